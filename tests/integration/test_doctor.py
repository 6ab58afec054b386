"""Faults that are seeded in real clusters, each named by doctor; healthy clusters, of which it says
nothing. Servers listen on loopback; those behind NAT are in network namespaces."""

import asyncio
import contextlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from certificates import Authority
from histories.namespaces import available, run
from sluicemq import Message, SendStatus
from sluicemq.cli import main
from sluicemq.client.admin.diagnose import server_rules
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.requests import header_fields, make_request
from sluicemq.client.core.transactions import TransactionListener, TransactionState
from sluicemq.client.sync.admin import Admin
from sluicemq.clock import SYSTEM_CLOCK, SystemClock
from sluicemq.config import NameServerConfig
from sluicemq.model.topic import GroupConfig
from sluicemq.nameserver.routes import run_all_slices
from sluicemq.nameserver.server import NameServer
from sluicemq.net.tls import Tls
from sluicemq.operate.doctor import Diagnosis, diagnose
from sluicemq.record.codec import decode_records
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command
from sluicemq.wire.popping import AckMessageRequest, PopMessageRequest, ReceiptHandle
from waiting import limit

KEYS = ("account1", "secret-of-one")


async def examine(names: str, **about: Any) -> Diagnosis:
    """As `sluice doctor`, from a thread: the servers are in this one."""
    access = {name: about.pop(name) for name in ("credentials", "tls") if name in about}

    def look() -> Diagnosis:
        with Admin(names, **access) as admin:
            return diagnose(admin, **about)

    return await asyncio.to_thread(look)


async def cause(names: str, **about: Any) -> str:
    found = await examine(names, **about)
    return found.cause.code if found.cause else "healthy"


async def becomes(wanted: str, names: str, seconds: float = 20, **about: Any) -> None:
    """What takes a moment to show."""
    end_s = time.monotonic() + seconds
    while True:
        found = await examine(names, **about)
        codes = [one.code for one in (found.cause, *found.also) if one is not None]
        if codes[:1] == [wanted]:
            return
        if time.monotonic() > end_s:
            pytest.fail(f"{wanted} is not the cause, but {codes}; unseen: {found.facts.unseen}")
        await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def name_server(directory: Path, **settings: Any) -> AsyncIterator[NameServer]:
    config = NameServerConfig(
        bind_address="127.0.0.1", listen_port=0, kv_config_path=str(directory / "kv.json"),
        **settings,
    )  # fmt: skip
    server = NameServer(config)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


@pytest.fixture
async def mq() -> AsyncIterator[EmbeddedSluice]:
    async with embedded(tcp=True) as mq:
        yield mq


# ------------------------------------------------------------------------------- what answers


class Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Not to stderr."""


@pytest.fixture
def web() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Quiet)
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_what_answers_instead_of_a_name_server(web: str) -> None:
    async with embedded(tcp=True, proxy=True) as mq:
        servers = mq.servers
        assert await cause("no-such-host.invalid:9876") == "name-unresolved"
        assert await cause(servers.broker.address) == "name-server-is-broker"
        assert await cause(web) == "http-server"
        assert await cause(servers.proxy_address) == "grpc-server"
        given = await examine(servers.name_server_address, brokers=[servers.name_server_address])
        assert given.cause
        assert given.cause.code == "broker-is-name-server"
        address = servers.name_server_address
        await servers.stop_name_server()
        found = await examine(address, topic="T")
        assert found.cause
        assert found.cause.code == "name-server-down"
        assert found.facts.unseen == ("brokers, topics and groups: no name server answers.",)
        broker = servers.broker.address
        async with name_server(Path("/nowhere")) as other:
            elsewhere = f"127.0.0.1:{other.port}"
            assert await cause(elsewhere) == "no-broker-registered"
            assert await cause(elsewhere, brokers=[broker]) == "broker-registers-elsewhere"


async def test_tls_and_its_certificates(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    tls = Tls(ca=ours.path)

    async def met(days: int, host: str, wanted: Tls | None = tls, **more: Any) -> str:
        made = ours.issue("names", [host], days=days)
        settings = {
            "tls_mode": "enforcing", "tls_certificate": made.path, "tls_key": made.key_path,
            "tls_test_mode": False, **more,
        }  # fmt: skip
        async with name_server(tmp_path, **settings) as server:
            return await cause(f"127.0.0.1:{server.port}", tls=wanted or False)

    assert await met(9, "127.0.0.1") == "no-broker-registered"
    assert await met(9, "127.0.0.1", None) == "tls-demanded"
    assert await met(-1, "127.0.0.1") == "certificate-expired"
    assert await met(9, "elsewhere") == "certificate-wrong-name"
    assert await met(9, "127.0.0.1", Tls(ca=theirs.path)) == "certificate-untrusted"
    wants: dict[str, Any] = {"tls_client_auth": "require", "tls_ca": ours.path}
    assert await met(9, "127.0.0.1", **wants) == "client-certificate"
    async with name_server(tmp_path, tls_mode="disabled") as server:
        assert await cause(f"127.0.0.1:{server.port}", tls=tls) == "tls-not-spoken"


# ------------------------------------------------------------------------- brokers and topics


class Shifted(SystemClock):
    """A machine whose clock is 90 s ahead."""

    def now_ms(self) -> int:
        return super().now_ms() + 90_000


async def test_what_is_wrong_with_a_broker(mq: EmbeddedSluice) -> None:
    servers = mq.servers
    names = servers.name_server_address
    await mq.admin.create_topic("T", queues=2)
    (files,) = (one for name, one in servers.files.items() if name == "broker-a")
    for free_percent, wanted in ((7, "disk-full"), (12, "disk-forced")):
        files.free_bytes = files.total_bytes * free_percent // 100  # type: ignore[attr-defined]
        assert await cause(names, topic="T") == wanted
    files.free_bytes = files.total_bytes * 20 // 100  # type: ignore[attr-defined]
    filling = await examine(names, topic="T")
    assert filling.cause is None
    assert "disk-filling" in [one.code for one in filling.notes]
    files.free_bytes = None  # type: ignore[attr-defined]
    await servers.restart_broker(brokerPermission="4")
    await becomes("broker-read-only", names, topic="T")
    await servers.restart_broker(sluiceParkedPullsMax="1")
    stream = mq.subscribe("T", group="waits")
    waiting = asyncio.create_task(stream.receive())
    await becomes("polls-full", names)
    waiting.cancel()
    await stream.close()
    await servers.restart_broker(brokerIP1="0.0.0.0")
    await becomes("broker-address-wildcard", names, topic="T")
    servers.clock = Shifted()
    await servers.restart_broker()
    servers.clock = SYSTEM_CLOCK
    await becomes("clock-skew", names)
    await servers.restart_broker()


async def test_no_route_info_of_this_topic(mq: EmbeddedSluice, tmp_path: Path) -> None:
    servers, admin = mq.servers, mq.admin
    names = servers.name_server_address
    await admin.create_topic("orders", queues=2, type="normal")
    found = await examine(names, topic="ordres")
    assert found.cause
    assert found.cause.code == "topic-not-sent-to"
    assert "Did you mean 'orders'?" in found.cause.what
    assert await cause(names, topic="orders", type="fifo") == "wrong-type"
    async with name_server(tmp_path) as empty:
        both = f"{names};127.0.0.1:{empty.port}"
        found = await examine(both, topic="orders")
        codes = [one.code for one in (found.cause, *found.also) if one]
        assert codes == ["no-broker-registered", "topic-at-other-name-server"]
    for perm, wanted in ((0, "topic-closed"), (4, "topic-not-writable"), (2, "topic-not-readable")):
        await admin.create_topic("orders", queues=2, perm=perm)
        await becomes(wanted, names, topic="orders")
    await admin.create_topic("orders", queues=2)
    server = servers.name_server
    assert server is not None
    run_all_slices(server.requests.table.wipe_write_permission("broker-a"))
    await becomes("write-perm-wiped", names, topic="orders")
    await servers.restart_broker(autoCreateTopicEnable="false")
    await servers.stop_name_server()
    await servers.start_name_server()
    await becomes("topic-missing", names, topic="nowhere")
    server = servers.name_server
    assert server is not None
    server.requests.table.delete_topic("orders")
    assert await cause(names, topic="orders") == "topic-not-registered"


RULES = """\
accounts:
- accessKey: account1
  secretKey: secret-of-one
  topicPerms: [T=SUB]
  groupPerms: [G=SUB]
"""


async def test_who_may_not(tmp_path: Path) -> None:
    rules = tmp_path / "plain_acl.yml"
    rules.write_text(RULES)
    settings = {"aclEnable": "true", "plainAclFile": str(rules)}
    async with embedded(tcp=True, store=tmp_path / "store", settings=settings) as mq:
        names = mq.servers.name_server_address
        assert await cause(names) == "access-key-missing"
        assert await cause(names, credentials=("account2", "secret-of-one")) == "access-key-unknown"
        assert await cause(names, credentials=("account1", "another-secret")) == "secret-key-wrong"
        assert await cause(names, credentials=KEYS) == "healthy"
        found = await examine(names, credentials=KEYS, topic="TBW102")
        assert found.cause
        assert found.cause.code == "right-missing"
        assert "topic:TBW102" in found.cause.what


# ------------------------------------------------------------------------- groups and messages


async def take(message: Any) -> None:
    """A handler that is content."""


async def fail(message: Any) -> None:
    raise RuntimeError("not today")


class Undecided(TransactionListener):
    async def execute_local(self, *_: Any) -> TransactionState:
        return TransactionState.UNKNOWN


LADDER = {"messageDelayLevel": " ".join(["1s"] * 18)}


async def test_what_is_wrong_with_a_group() -> None:
    async with embedded(tcp=True, settings=LADDER) as mq:
        admin, names = mq.admin, mq.servers.name_server_address

        async def start(
            group: str, handler: Any, topic: str, filters: Any = None, **options: Any
        ) -> None:
            client = mq.servers.client()
            consumer = client.consumer(group, handler, **options)
            await consumer.subscribe(topic, **(filters or {})).start()

        over = asyncio.Event()

        async def hang(message: Any) -> None:
            await over.wait()

        for topic in ("poison", "blocked", "dead", "stuck", "T"):
            await admin.create_topic(topic, queues=1)
            await mq.send(topic, b"x", tag="A", properties={"price": "3"})
        await start("poison", fail, "poison")
        await start("blocked", fail, "blocked", ordered=True, suspend_s=0.2)
        await start("dead", fail, "dead", max_reconsume_times=1)
        await start("stuck", hang, "stuck")
        await start("filters", take, "T", {"where": "price > 1 AND origin = 'EWR'"})
        await start("tags", take, "T", {"tags": "B"})
        await start("unequal", take, "T", {"tags": "A"})
        await start("unequal", take, "T", {"tags": "B"})
        await start("many", take, "T")
        await start("many", take, "T")
        await start("models", take, "T")
        await start("models", take, "T", broadcast=True)
        await admin.create_group(GroupConfig("idle"))
        await admin.create_group(GroupConfig("off", consume_enable=False))
        assert await cause(names, group="nobody") == "no-such-group"
        assert await cause(names, group="idle") == "no-member"
        assert await cause(names, group="off") == "consuming-is-off"
        await becomes("filter-matches-nothing", names, group="tags")
        await becomes("filter-matches-nothing", names, group="filters")
        found = await examine(names, group="filters")
        assert found.cause
        assert "origin" in found.cause.what
        assert "price" not in found.cause.what.partition(": ")[2]
        await becomes("unequal-subscription", names, group="unequal")
        await becomes("member-without-queue", names, group="many")
        await becomes("models-mixed", names, group="models")
        await becomes("not-acknowledging", names, group="stuck")
        await becomes("queue-blocked", names, group="blocked")
        await becomes("dead-letters", names, group="dead")
        await becomes("message-poisoned", names, group="poison")
        over.set()


async def test_where_a_message_is(mq: EmbeddedSluice) -> None:
    admin, names = mq.admin, mq.servers.name_server_address
    await admin.create_topic("T", queues=1)
    later = await mq.send("T", b"later", delay_level=18)
    assert await cause(names, message_id=later.message_id) == "message-delayed"
    timed = await mq.send("T", b"later", delay=3600)
    assert await cause(names, message_id=timed.message_id) == "message-delayed"
    half = await mq.producer("P", listener=Undecided()).send_in_transaction(Message("T", b"half"))
    assert await cause(names, message_id=half.send_result.message_id) == "message-half"
    unknown = later.message_id[:-4] + "FFFF"
    assert await cause(names, message_id=unknown) == "message-unknown"
    sent = await mq.send("T", b"x", tag="A")
    await mq.send("T", b"wanted", tag="B")
    consumer = mq.consumer("G", take).subscribe("T", tags="B")
    await consumer.start()
    await becomes("filter-false", names, group="G", message_id=sent.message_id)


# ------------------------------------------------------------- replicas, retention, pops


SLAVE = {"brokerName": "broker-a", "brokerId": "1", "brokerRole": "SLAVE"}
BEAT = {"haSendHeartbeatInterval": "300", "haListenPort": "0"}


async def test_what_is_wrong_with_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    async with embedded(tcp=True, settings=BEAT) as mq:
        servers, names = mq.servers, mq.servers.name_server_address
        await servers.restart_broker(brokerRole="SYNC_MASTER")
        await servers.start_broker("slave", **SLAVE)
        await mq.admin.create_topic("T", queues=1)
        await mq.consumer("G", take).subscribe("T").start()
        await until_sent(mq, b"together")
        sent = await mq.send("T", b"x")
        await becomes_healthy(names, topic="T", group="G", message_id=sent.message_id)
        await content(names, topic="T", group="G", message_id=sent.message_id)
        await servers.stop_broker("slave")
        await becomes("replicas-too-few", names, topic="T", group="G")
        await servers.restart_broker(brokerRole="ASYNC_MASTER")
        await becomes_healthy(names, topic="T", group="G")
        await servers.start_broker("slave", haMasterAddress="127.0.0.1:1", **SLAVE)
        await becomes("replica-cut-off", names, topic="T", group="G")
        monkeypatch.setattr(server_rules, "LAG_BYTES", 1 << 20)
        await mq.send("T", os.urandom(2 << 20))
        found = await examine(names, topic="T", group="G")
        assert found.cause
        assert [found.cause.code, *(one.code for one in found.also)] == [
            "replica-cut-off", "replica-behind",
        ]  # fmt: skip
        await servers.stop_broker()
        for topic in (None, "T"):
            await becomes("no-master", names, topic=topic)
        found = await examine(names, topic="T", group="G", message_id=sent.message_id)
        assert not found.also
        assert [text.partition(":")[0] for text in found.facts.unseen][-2:] == [
            f"the message {sent.message_id}", "the group G",
        ]  # fmt: skip


async def until_sent(mq: EmbeddedSluice, body: bytes) -> None:
    """Until the slave has joined."""
    while (await mq.send("T", body)).status != SendStatus.OK:
        await asyncio.sleep(0.1)


async def test_a_name_server_of_two_is_down(mq: EmbeddedSluice, tmp_path: Path) -> None:
    names = mq.servers.name_server_address
    await mq.admin.create_topic("T", queues=1)
    sent = await mq.send("T", b"x")
    await mq.consumer("G", take).subscribe("T").start()
    await becomes_healthy(names, topic="T", group="G", message_id=sent.message_id)
    async with name_server(tmp_path) as other:
        gone = f"127.0.0.1:{other.port}"
    for both in (f"{gone};{names}", f"{names};{gone}"):
        found = await examine(both, topic="T", group="G", message_id=sent.message_id)
        assert found.cause
        assert found.cause.code == "name-server-down"
        assert gone in found.cause.what
        assert not found.also
        assert not found.facts.unseen
        assert found.facts.group is not None


async def test_retention_passes_a_group(tmp_path: Path) -> None:
    settings = {
        "mappedFileSizeCommitLog": "65536", "maxMessageSize": "32768",
        "deleteWhen": ";".join(map(str, range(24))),
        "flushCommitLogThoroughInterval": "100", "flushIntervalCommitLog": "50",
        "flushIntervalConsumeQueue": "50",
    }  # fmt: skip
    async with embedded(tcp=True, store=tmp_path, settings=settings) as mq:
        names, broker = mq.servers.name_server_address, mq.servers.broker
        await mq.admin.create_topic("T", queues=1)
        sent = [await mq.send("T", os.urandom(20_000)) for _ in range(10)]
        async with mq.subscribe("T", group="late", prefetch_count=1) as stream:
            await (await stream.receive()).ack()
            await becomes_healthy(names, topic="T", group="late")
            for hours, wanted in ((60, "retention-near"), (20, "retention-lost")):
                for path in sorted((tmp_path / "broker-a" / "commitlog").iterdir())[:-1]:
                    time_s = path.stat().st_mtime - hours * 3600
                    os.utime(path, (time_s, time_s))
                store = broker.store
                while store.retention.removable_end() < store.written_offset:
                    store._checkpoints._last_s = 0.0
                    store.tick()
                    await asyncio.to_thread(store.sync)
                broker.core.retention._next_clean_up_s = broker.core.retention._next_survey_s = 0.0
                await broker._jobs.run_steps(broker.core.retention.run_due_jobs())
                await becomes(wanted, names, topic="T", group="late")
            expired = await examine(names, message_id=sent[0].message_id)
            assert expired.cause
            assert expired.cause.code == "message-expired"


class Popper:
    """A member of G that pops T: known by the proxy's telemetry as clients of gRPC are, it pops by
    requests, which may hide a message for less than those may."""

    def __init__(self, mq: EmbeddedSluice) -> None:
        m = pytest.importorskip("sluicemq.proxy.messages")
        from proxied import Proxied

        self._mq = mq
        (proxy,) = mq.servers.proxies.values()
        topic = m.SubscriptionEntry(topic=m.Resource(name="T"), expression={"expression": "*"})
        wishes = m.Subscription(group=m.Resource(name="G"), subscriptions=[topic])
        settings = m.Settings(client_type=m.ClientType.PUSH_CONSUMER, subscription=wishes)
        Proxied(mq, proxy).speaker("one").call("Telemetry", m.TelemetryCommand(settings=settings))

    async def pop(self, invisible_ms: int) -> list[AckMessageRequest]:
        """What acknowledges each message that came."""
        header = PopMessageRequest(
            group="G", topic="T", queue_id=-1, count_max=32, invisible_ms=invisible_ms,
            poll_ms=1000,
        )  # fmt: skip
        answer = await self._ask(RequestCode.POP_MESSAGE, header)
        fields, found = header_fields(answer), decode_records(answer.body) if answer.body else []
        pop_ms, hidden_ms, revive = (
            int(fields[name]) for name in ("popTime", "invisibleTime", "reviveQid")
        )
        return [
            AckMessageRequest(
                group="G", topic="T", queue_id=0, offset=one.queue_offset,
                handle=ReceiptHandle(
                    found[0].queue_offset, pop_ms, hidden_ms, revive, 0, "broker-a", 0,
                    one.queue_offset,
                ).encode(),
            )
            for one in found
        ]  # fmt: skip

    async def acknowledge(self, header: AckMessageRequest) -> None:
        assert (await self._ask(RequestCode.ACK_MESSAGE, header)).code == 0

    async def _ask(self, code: RequestCode, header: Any) -> Command:
        def talk(directory: object) -> Conversation[Command]:
            return (yield Call(self._mq.servers.broker.address, make_request(code, header)))

        return await self._mq.admin.run(talk(self._mq.admin.directory))


async def test_a_group_that_pops() -> None:
    async with embedded(tcp=True, proxy=True, settings=LADDER) as mq:
        names = mq.servers.name_server_address
        about: dict[str, Any] = {"topic": "T", "group": "G"}
        await mq.admin.create_topic("T", queues=1)
        await mq.admin.create_group(GroupConfig("G"))
        popper = Popper(mq)
        await content(names, **about)
        sent = [await mq.send("T", b"%d" % number) for number in range(4)]
        await content(names, **about)
        first, *others = await popper.pop(60_000)
        await content(names, message_id=sent[0].message_id, **about)
        for one in others:
            await popper.acknowledge(one)
        await content(names, **about)
        await popper.acknowledge(first)
        await content(names, message_id=sent[0].message_id, **about)
        bad = await mq.send("T", b"poison")
        for _ in range(4):
            while not await popper.pop(300):
                """It waits in the retry topic."""
        await becomes("message-poisoned", names, **about)
        found = await examine(names, message_id=bad.message_id, **about)
        assert found.cause
        assert found.cause.code == "message-poisoned"
        assert bad.message_id in found.cause.what


# ------------------------------------------------------------------------------ healthy set-ups


async def content(names: str, **about: Any) -> None:
    found = await examine(names, **about)
    assert found.cause is None, found.cause
    assert not found.facts.unseen


async def test_nothing_is_found_where_nothing_is_wrong() -> None:
    async with embedded(tcp=True) as mq:
        names = mq.servers.name_server_address
        await mq.servers.start_broker("broker-b")
        await mq.admin.create_topic("T", queues=2)
        groups = {"push": {}, "ordered": {"ordered": True}, "all": {"broadcast": True}}
        for group, options in groups.items():
            await mq.consumer(group, take, **options).subscribe("T").start()  # type: ignore[arg-type]
        sent = [await mq.send("T", b"%d" % number, tag="A") for number in range(20)]
        last = sent[-1]
        await content(names)
        for group in groups:
            await asyncio.sleep(0.5)
            await content(names, topic="T", group=group, message_id=last.message_id, type="normal")
        done = await asyncio.to_thread(
            CliRunner().invoke, main, ["doctor", "-n", names, "-t", "T", "-g", "push", "--json"]
        )
        assert done.exit_code == 0, done.output
        assert json.loads(done.output)["healthy"] is True
        ill = await asyncio.to_thread(CliRunner().invoke, main, ["doctor", "-n", names, "-t", "no"])
        assert ill.exit_code == 1
        assert ill.output.startswith("cause    topic-not-sent-to: Topic no does not exist yet")


async def test_nothing_is_found_behind_rights_and_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    made = authority.issue("server", ["127.0.0.1"])
    rules = tmp_path / "plain_acl.yml"
    rules.write_text(RULES.replace("T=SUB", "T=PUB|SUB") + "  admin: true\n")
    settings = {
        "aclEnable": "true", "plainAclFile": str(rules),
        "tls.server.certPath": made.path, "tls.server.keyPath": made.key_path,
        "tls.test.mode.enable": "false",
    }  # fmt: skip
    access: dict[str, Any] = {"credentials": KEYS}
    async with embedded(tcp=True, store=tmp_path / "store", settings=settings, **access) as mq:
        names = mq.servers.name_server_address
        await mq.admin.create_topic("T", queues=2)
        sent = await mq.send("T", b"x")
        await mq.consumer("G", take).subscribe("T").start()
        await asyncio.sleep(0.5)
        await content(names, topic="T", group="G", message_id=sent.message_id, **access)
        broker = mq.servers.broker.address
        found = await examine(broker, tls=Tls(ca=authority.path), **access)
        assert found.cause
        assert found.cause.code == "name-server-is-broker", "TLS is spoken and trusted"


# -------------------------------------------------------------------------------- behind NAT


PRIVATE = "172.31.250.2"
CONFIG = """
brokerName = inside
brokerIP1 = {address}
bindAddress = 0.0.0.0
listenPort = 10911
namesrvAddr = 127.0.0.1:9876
storePathRootDir = {store}
mappedFileSizeCommitLog = 4194304
metricsExporterType = DISABLE
"""


class Inside:
    """A namespace with a name server that all reach, and a broker that is registered with an
    address of the inner network: packets to it go nowhere from here."""

    def __init__(self, root: Path) -> None:
        number = os.getpid() % 50_000
        self.root, self.space, self.cable = root, f"doc{number}", f"dv{number}"
        self.net = f"10.{250 + number % 5}.{number // 250 % 250}"
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Inside":
        run("ip", "netns", "add", self.space)
        run("ip", "link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns",
            self.space)  # fmt: skip
        run("ip", "addr", "add", f"{self.net}.1/24", "dev", self.cable)
        run("ip", "link", "set", self.cable, "up")
        run("ip", "route", "add", "blackhole", f"{PRIVATE}/32")
        for words in (
            ("addr", "add", f"{self.net}.2/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{PRIVATE}/24", "dev", "lo"),
        ):
            run("ip", "-n", self.space, *words)
        self.start("nameserver", "--host", "0.0.0.0", "--port", "9876")
        return self

    def start(self, *words: str) -> None:
        command = ["ip", "netns", "exec", self.space, sys.executable, "-m", "sluicemq", *words]
        with (self.root / "log").open("ab") as log:
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    def broker(self, address: str) -> None:
        while len(self.processes) > 1:
            self.end(self.processes.pop())
        path = self.root / "broker.conf"
        path.write_text(CONFIG.format(address=address, store=self.root / "store"))
        self.start("broker", "-c", str(path))

    def end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        process.wait(limit(20))

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            self.end(process)
        for words in (("netns", "del", self.space), ("route", "del", "blackhole", f"{PRIVATE}/32"),
                      ("route", "del", "blackhole", f"{self.net}.2/32")):  # fmt: skip
            subprocess.run(["ip", *words], check=False, capture_output=True)


async def test_a_broker_behind_nat(tmp_path: Path) -> None:
    if reason := available():
        pytest.skip(reason)
    with Inside(tmp_path) as inside:
        names = f"{inside.net}.2:9876"
        await becomes("no-broker-registered", names)
        inside.broker(PRIVATE)
        await becomes("broker-address-private", names)
        inside.broker("127.0.0.1")
        await becomes("broker-address-loopback", names)
        inside.broker(f"{inside.net}.2")
        await becomes_healthy(names)
        run("ip", "route", "add", "blackhole", f"{inside.net}.2/32")
        found = await examine(names)
        assert found.cause
        assert found.cause.code == "name-server-down"
        assert "silent" in found.cause.what


async def becomes_healthy(names: str, **about: Any) -> None:
    end_s = time.monotonic() + limit(20)
    while (found := await examine(names, **about)).cause is not None:
        assert time.monotonic() < end_s, found.cause
        await asyncio.sleep(0.2)
