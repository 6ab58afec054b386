"""Retries, dead letters, order and transactions when things go wrong: who is killed, refused, late.

test_clients.py has what goes well. Here the brokers have a ladder of seconds, ask six times and
then give a transaction up. What only one client can be made to do is driven by java/Delivery.java,
or by our client from here.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from peer import clusters, drivers
from peer.clusters import Cluster
from peer.drivers import Driver, Event
from peer.names import own
from peer.toolchain import HERE

from conftest import QUICK_CHECKS, missing_tool_is_a_reason
from sluicemq import Sluice
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.core import requests
from sluicemq.client.core.transactions import TransactionListener, TransactionState
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import RetryLaterError, SendError
from sluicemq.model.message import Message, StoredMessage
from sluicemq.wire.frames import Command
from thorough import ALL
from waiting import until, wait_for

CHECKS_MAX = 6
SETTINGS = {
    **QUICK_CHECKS,
    "brokerName": "broker-a",
    "transactionCheckMax": str(CHECKS_MAX),
    # Whoever waits on levels 1 and 2 is wrong: retries begin with the third.
    "messageDelayLevel": " ".join(["2h", "2h", *["1s"] * 16]),
}
KINDS = {
    "sluicemq": partial(clusters.sluice_cluster, **SETTINGS),
    "rocketmq": partial(clusters.rocketmq_cluster, **SETTINGS, transactionOpBatchInterval="100"),
}
PAIRS = [
    ("sluicemq", "java-5.3.3"),
    *([("sluicemq", "go-2.1.2"), ("rocketmq", "python-aio")] if ALL else []),
]
pair_of = pytest.mark.parametrize(("kind", "client"), PAIRS, ids=[f"{b}-to-{a}" for a, b in PAIRS])
SETTLE_S = 1.0


@dataclass
class Delivery:
    """Java's client 5.3 with commands for what goes wrong; every test has topics of its own."""

    driver: Driver
    name_server: str

    def __call__(self, command: str, **options: object) -> list[Event]:
        events = self.driver.call(command, ns=self.name_server, **options)
        assert not named(events, "incomplete"), events
        return events


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Cluster]]:
    """place("sluicemq"), place("rocketmq"): running brokers with SETTINGS."""
    running: dict[str, Cluster] = {}
    with ExitStack() as stack:

        def start(kind: str) -> Cluster:
            if kind not in running:
                directory = tmp_path_factory.mktemp(f"delivery-{kind}")
                with missing_tool_is_a_reason():
                    running[kind] = stack.enter_context(KINDS[kind](directory))
            return running[kind]

        yield start


def java_delivery(directory: Path) -> Driver:
    with missing_tool_is_a_reason():
        source = HERE / "java" / "Delivery.java"
        return drivers.java_driver("client-5.3.3", directory, source=source)


@pytest.fixture(scope="module")
def java(
    place: Callable[[str], Cluster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Delivery]:
    driver = java_delivery(tmp_path_factory.mktemp("delivery"))
    yield Delivery(driver, place("sluicemq").name_server)
    driver.close()


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["event"] == name]


def got_bodies(events: list[Event]) -> list[str]:
    return [event["body"] for event in named(events, "got")]


def everything(driver: Driver, cluster: Cluster, topic: str, expect: int) -> list[str]:
    """The bodies of a topic, as a new group gets them; one more than expected would be there."""
    events = driver.call(
        "push", ns=cluster.name_server, topic=topic, group=f"all_{time.monotonic_ns()}",
        expect=expect, timeout_s=20,
    )  # fmt: skip
    return sorted(got_bodies(events))


# ---- the ladder


@pair_of
def test_a_message_climbs_sixteen_steps_and_becomes_a_dead_letter(
    kind: str,
    client: str,
    place: Callable[[str], Cluster],
    driver: Callable[[str], Driver],
) -> None:
    cluster, consumer = place(kind), driver(client)
    group = own(f"G_ladder_{client[:2]}")
    where = {"ns": cluster.name_server, "topic": own(f"T_ladder_{client[:2]}")}
    if client.startswith("go"):  # it looks for topics every 30 s: see test_clients.py
        with Admin(cluster.name_server) as admin:
            admin.create_topic(f"%RETRY%{group}", queues=1)
    consumer.call("send", count=3, prefix="up", **where)
    events = consumer.call(
        "push", group=group, expect=3 * 17, fail=99, timeout_s=60, **where
    )  # fmt: skip
    rounds: dict[str, list[tuple[int, str | None]]] = {}
    for event in named(events, "got"):
        times, level = event["reconsumed"], event["properties"].get("DELAY")
        rounds.setdefault(event["body"], []).append((times, level))
    ladder = [(0, None), *((times, str(2 + times)) for times in range(1, 17))]
    assert rounds == {f"up-{n}": ladder for n in range(3)}
    wait_for(lambda: has_topic(cluster.name_server, f"%DLQ%{group}"))
    assert everything(consumer, cluster, f"%DLQ%{group}", 3) == ["up-0", "up-1", "up-2"]


@pytest.mark.thorough
def test_failures_of_a_group_of_dead_letters_go_to_its_own_retries_and_dead_letters(
    place: Callable[[str], Cluster], driver: Callable[[str], Driver]
) -> None:
    cluster, consumer = place("sluicemq"), driver("java-5.3.3")
    ns = cluster.name_server
    consumer.call("send", ns=ns, topic=own("T_tree"), count=4, prefix="leaf")
    consumer.call(
        "push",
        ns=ns,
        topic=own("T_tree"),
        group=own("G_tree"),
        expect=4,
        fail=99,
        max=0,
        timeout_s=20,
    )
    events = consumer.call(
        "push",
        ns=ns,
        topic=f"%DLQ%{own('G_tree')}",
        group=own("G_under"),
        expect=12,
        fail=99,
        max=2,
        timeout_s=40,
    )
    times: dict[str, list[int]] = {}
    for event in named(events, "got"):
        assert event["topic"] == f"%DLQ%{own('G_tree')}"
        times.setdefault(event["body"], []).append(event["reconsumed"])
    # The client counts from what the dead letter says (1), the broker from the beginning.
    assert {body: len(seen) for body, seen in times.items()} == {f"leaf-{n}": 3 for n in range(4)}
    dead = everything(consumer, cluster, f"%DLQ%{own('G_under')}", 4)
    assert dead == [f"leaf-{n}" for n in range(4)]


def test_a_java_consumer_whose_send_backs_fail_sends_the_copies_itself(
    java: Delivery, place: Callable[[str], Cluster], driver: Callable[[str], Driver]
) -> None:
    cluster, other = place("sluicemq"), driver("java-5.3.3")
    other.call("send", ns=cluster.name_server, topic=own("T_detour"), count=4, prefix="d")
    events = java(
        "fallback",
        topic=own("T_detour"),
        group=own("G_detour"),
        expect=12,
        fail=99,
        max=2,
        timeout_s=40,
    )
    assert len(named(events, "blocked")) >= 12, "no send-back has come through"
    rounds: dict[str, list[tuple[int, str | None]]] = {}
    for event in named(events, "got"):
        rounds.setdefault(event["body"], []).append((event["reconsumed"], event["level"]))
    ladder = [(0, None), (1, "3"), (2, "4")]
    assert rounds == {f"d-{n}": ladder for n in range(4)}
    assert everything(other, cluster, f"%DLQ%{own('G_detour')}", 4) == [f"d-{n}" for n in range(4)]


@pytest.mark.thorough
async def test_our_consumer_takes_the_same_detour_at_the_real_broker(
    place: Callable[[str], Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    unsupported = Command(9_999)  # what the real broker answers with an error, like a failed 36
    monkeypatch.setattr(requests, "send_back", lambda *words: unsupported)
    ns = place("rocketmq").name_server
    rounds: dict[bytes, list[tuple[int, str | None]]] = {}
    dead: list[bytes] = []

    async def fail(message: ReceivedMessage) -> None:
        seen = message.reconsume_times, message.properties.get("DELAY")
        rounds.setdefault(message.body, []).append(seen)
        raise RetryLaterError()

    async def bury(message: ReceivedMessage) -> None:
        dead.append(message.body)

    async with Sluice(ns) as mq:
        for n in range(4):
            await mq.send(own("T_detour"), f"d-{n}")
        await (
            mq.consumer(own("G_detour"), fail, max_reconsume_times=2)
            .subscribe(own("T_detour"))
            .start()
        )
        await until(lambda: len(rounds) == 4 and all(len(seen) == 3 for seen in rounds.values()))
        await until(lambda: has_topic(ns, f"%DLQ%{own('G_detour')}"))
        await mq.consumer(own("G_detour_dead"), bury).subscribe(f"%DLQ%{own('G_detour')}").start()
        await until(lambda: len(dead) >= 4)
    ladder = [(0, None), (1, "3"), (2, "4")]
    assert rounds == {b"d-%d" % n: ladder for n in range(4)}
    assert sorted(dead) == [b"d-%d" % n for n in range(4)]


@pytest.mark.thorough
@pytest.mark.parametrize("client", ["java-5.3.3", "go-2.1.2"])
def test_broadcasting_has_no_retries(
    client: str, place: Callable[[str], Cluster], driver: Callable[[str], Driver]
) -> None:
    cluster, consumer = place("sluicemq"), driver(client)
    topic, group = own(f"T_loud_{client[:2]}"), own(f"G_loud_{client[:2]}")
    where = {"ns": cluster.name_server, "topic": topic}
    consumer.call("send", count=1, prefix="before", tags="hidden", **where)
    events = consumer.call(
        "push", group=group, model="broadcasting", fail=99, level=3, tag="A", expect=10,
        prefix="loud", count=10, timeout_s=20, **where,
    )  # fmt: skip
    assert sorted(got_bodies(events)) == sorted(f"loud-{n}" for n in range(10))
    time.sleep(1.5)  # a level would be over
    assert everything(consumer, cluster, topic, 11)  # the consumer's process lives, and the broker
    listed = driver("java-5.3.3").call("admin", ns=cluster.name_server, words="topicList")
    assert f"%DLQ%{group}" not in str(listed)


# ---- order


@pair_of
def test_orderly_consumers_get_every_key_in_order_although_all_fail_once(
    kind: str,
    client: str,
    place: Callable[[str], Cluster],
    driver: Callable[[str], Driver],
) -> None:
    consumer = driver(client)
    # A second orderly consumer of the Go client (v2.1.2) gets no messages, whatever the broker:
    # with the real one the half of its queues waits just so.
    instances = 1 if client.startswith("go") else 2
    where = {"ns": place(kind).name_server, "topic": own(f"T_rows_{client[:2]}"), "keyed": 12}
    consumer.call("send", count=1, prefix="before", tags="hidden", **where)
    events = consumer.call(
        "push", group=own(f"G_rows_{client[:2]}"), orderly=1, instances=instances, fail=1,
        tag="A", count=60, prefix="row", expect=120, timeout_s=60, **where,
    )  # fmt: skip
    received = named(events, "got")
    by_key: dict[int, list[int]] = {}
    for event in received:
        number = int(event["body"].rpartition("-")[2])
        by_key.setdefault(number % 12, []).append(number)
    twice = {key: [n for n in range(key, 60, 12) for _ in range(2)] for key in range(12)}
    assert by_key == twice
    assert {event["consumer"] for event in received} == {*range(instances)}


def test_java_consumers_keep_the_order_when_one_of_them_leaves(
    java: Delivery, driver: Callable[[str], Driver]
) -> None:
    where = {"ns": java.name_server, "topic": own("T_leave")}
    driver("java-5.3.3").call("send", count=1, tags="hidden", **where)
    events = java(
        "handover",
        topic=own("T_leave"),
        group=own("G_leave"),
        keyed=8,
        count=160,
        leave=30,
        timeout_s=40,
    )
    left = next(number for number, event in enumerate(events) if event["event"] == "left")
    assert {event["consumer"] for event in named(events[left:], "got")} == {1}
    assert_in_order([event["body"] for event in named(events, "got")], keys=8, count=160)


@pytest.mark.thorough
async def test_our_consumers_keep_the_order_at_the_real_broker_when_one_of_them_leaves(
    place: Callable[[str], Cluster],
) -> None:
    ns = place("rocketmq").name_server
    received: list[tuple[int, str]] = []

    def handler(number: int) -> Callable[[ReceivedMessage], object]:
        async def handle(message: ReceivedMessage) -> None:
            received.append((number, message.body.decode()))

        return handle

    async with Sluice(ns) as sender, Sluice(ns) as two:
        await sender.send(own("T_leave"), "before", tag="hidden")
        one = Sluice(ns)
        for number, mq in enumerate((one, two)):
            consumer = mq.consumer(own("G_leave"), handler(number), ordered=True)
            await consumer.subscribe(own("T_leave"), tags="kept").start()
        await asyncio.sleep(2.5)
        for n in range(160):
            key = f"key-{n % 8}"
            await sender.send(own("T_leave"), f"m-{n}", tag="kept", sharding_key=key)
            if n == 60:
                await until(lambda: any(number == 0 for number, _ in received))
                await one.close()
        await until(lambda: len({body for _, body in received}) == 160)
    assert {number for number, _ in received} == {0, 1}
    assert_in_order([body for _, body in received], keys=8, count=160)


def assert_in_order(received: list[str], *, keys: int, count: int) -> None:
    """All are there, and in each key what comes again comes before anything new."""
    numbers = [int(body.rpartition("-")[2]) for body in received]
    for key in range(keys):
        mine = [number for number in numbers if number % keys == key]
        assert mine == sorted(mine)
        assert sorted({*mine}) == list(range(key, count, keys))


@pytest.fixture
def strict(
    place: Callable[[str], Cluster], driver: Callable[[str], Driver]
) -> Iterator[Callable[[str], Callable[[str, bool], str]]]:
    """strict(kind)(topic, on): a topic of four queues whose other four are at a broker that is
    away, made with the real mqadmin; returns the name server."""
    used: list[str] = []
    mqadmin = driver("java-5.3.3")

    def order(kind: str) -> Callable[[str, bool], str]:
        cluster = place(kind)
        used.append(cluster.name_server)

        def admin(*words: str) -> None:
            mqadmin.call("admin", ns=cluster.name_server, words="\n".join(words))

        def make(topic: str, is_on: bool) -> str:
            ns, value = cluster.name_server, "broker-a:4;broker-b:4"
            admin("updateTopic", "-b", cluster.broker, "-t", topic, "-r", "4", "-w", "4")
            admin("updateKvConfig", "-s", "ORDER_TOPIC_CONFIG", "-k", topic, "-v", value)
            switch = "true" if is_on else "false"
            admin("updateNamesrvConfig", "-n", ns, "-k", "orderMessageEnable", "-v", switch)
            time.sleep(1.0)  # a registration is on its way
            return ns

        return make

    yield order
    for ns in used:
        words = ["updateNamesrvConfig", "-n", ns, "-k", "orderMessageEnable", "-v", "false"]
        mqadmin.call("admin", ns=ns, words="\n".join(words))


def java_hash(key: str) -> int:
    value = 0
    for letter in key:
        value = (31 * value + ord(letter)) & 0xFFFFFFFF
    return abs(value - (1 << 32) if value >> 31 else value)


KEYS = [f"key-{n}" for n in range(24)]


@pytest.mark.thorough
def test_a_java_producer_keeps_the_queues_of_strict_order_and_only_then(
    java: Delivery, strict: Callable[[str], Callable[[str, bool], str]]
) -> None:
    make = strict("sluicemq")
    make(own("T_strict"), True)
    events = java("keyed", topic=own("T_strict"), count=24, prefix="s")
    refused = {event["body"]: event["error"] for event in named(events, "refused")}
    here = {event["body"]: event["queue"] for event in named(events, "sent")}
    expected = {f"s-{n}": java_hash(key) % 8 for n, key in enumerate(KEYS)}
    assert here == {body: queue for body, queue in expected.items() if queue < 4}, refused
    assert {*refused} == {body for body, queue in expected.items() if queue >= 4}
    make(own("T_loose"), False)
    events = java("keyed", topic=own("T_loose"), count=24, prefix="l")
    assert not named(events, "refused")
    places = {event["body"]: event["queue"] for event in named(events, "sent")}
    assert places == {f"l-{n}": java_hash(key) % 4 for n, key in enumerate(KEYS)}


@pytest.mark.thorough
async def test_our_producer_keeps_the_queues_that_the_real_name_server_tells(
    strict: Callable[[str], Callable[[str, bool], str]],
) -> None:
    make = strict("rocketmq")
    ns = await asyncio.to_thread(make, own("T_strict"), True)
    async with Sluice(ns, send_timeout_ms=3000) as mq:
        for key in KEYS[:12]:
            expected = java_hash(key) % 8
            if expected < 4:
                result = await mq.send(own("T_strict"), key, sharding_key=key)
                assert result.queue.queue_id == expected
            else:
                with pytest.raises(SendError):
                    await mq.send(own("T_strict"), key, sharding_key=key)
    ns = await asyncio.to_thread(make, own("T_loose"), False)
    async with Sluice(ns) as mq:
        for key in KEYS:
            result = await mq.send(own("T_loose"), key, sharding_key=key)
            assert result.queue.queue_id == java_hash(key) % 4


@pytest.mark.thorough
def test_mqadmin_makes_a_topic_of_strict_order(
    place: Callable[[str], Cluster],
    driver: Callable[[str], Driver],
    strict: Callable[[str], Callable[[str, bool], str]],
) -> None:
    cluster = place("sluicemq")
    ns = strict("sluicemq")(own("T_other"), True)

    def admin(*words: str) -> str:
        (event,) = driver("java-5.3.3").call("admin", ns=ns, words="\n".join(words))
        return str(event["text"])

    said = admin("updateTopic", "-b", cluster.broker, "-t", own("T_row"), "-r", "3", "-o", "true")
    assert "set broker orderConf. isOrder=true, orderConf=[broker-a:" in said.replace("\n", "")
    with Admin(ns) as ours:
        route = ours.find_route(own("T_row"))
    assert route is not None
    assert (route.order_topic_config or "").startswith("broker-a:")


# ---- transactions


@pair_of
def test_a_transaction_that_nobody_decides_ends_in_the_topic_of_those(
    kind: str,
    client: str,
    place: Callable[[str], Cluster],
    driver: Callable[[str], Driver],
) -> None:
    cluster, producer = place(kind), driver(client)
    topic = own(f"T_never_{client[:2]}")
    where = {"ns": cluster.name_server, "topic": topic}
    producer.call("send", prefix="plain", **where)
    events = producer.call(
        "transact", group=own(f"G_never_{client[:2]}"), prefix=topic, outcomes="unknown",
        checks="unknown", expect=CHECKS_MAX, timeout_s=60, **where,
    )  # fmt: skip
    assert len(named(events, "checked")) == CHECKS_MAX
    kept = driver("java-5.3.3").call(
        "push", ns=cluster.name_server, topic="TRANS_CHECK_MAX_TIME_TOPIC", group=own("G_kept"),
        sql=f"REAL_TOPIC = '{topic}'", expect=1, timeout_s=40,
    )  # fmt: skip
    [message] = named(kept, "got")
    assert message["body"] == f"{topic}-0"
    # Nobody was asked again while the producer was gone.
    assert message["properties"]["TRANSACTION_CHECK_TIMES"] == str(CHECKS_MAX)
    assert everything(producer, cluster, topic, 1) == ["plain-0"]


def test_a_second_end_of_java_changes_nothing(
    java: Delivery, place: Callable[[str], Cluster], driver: Callable[[str], Driver]
) -> None:
    common = {"topic": own("T_twice"), "group": own("G_twice"), "count": 4}
    java("transact", prefix="cc", outcomes="commit", again="commit", **common)
    java("transact", prefix="cr", outcomes="commit", again="rollback", **common)
    java("transact", prefix="rc", outcomes="rollback", again="commit", **common)
    expected = sorted(f"{kind}-{n}" for kind in ("cc", "cr") for n in range(4))
    assert everything(driver("java-5.3.3"), place("sluicemq"), own("T_twice"), 8) == expected


def test_a_message_says_when_java_may_be_asked_about_it(java: Delivery) -> None:
    common = {
        "topic": own("T_immune"),
        "group": own("G_immune"),
        "outcomes": "unknown",
        "expect": 1,
    }
    [soon] = named(java("transact", prefix="soon", **common), "checked")
    assert 2000 <= soon["age_ms"] < 5500
    immune = {"property": "CHECK_IMMUNITY_TIME_IN_SECONDS:6", **common}
    [late] = named(java("transact", prefix="late", **immune), "checked")
    assert 6000 <= late["age_ms"] < 9500


def test_java_is_told_that_transactions_and_timers_exclude_each_other(java: Delivery) -> None:
    delayed = {"property": "TIMER_DELAY_SEC:3", "topic": own("T_timed"), "group": own("G_timed")}
    [refused] = named(java("transact", prefix="timed", **delayed), "refused")
    assert "CODE: 13" in refused["error"]
    assert "a message of a transaction cannot be delayed" in refused["error"]


class Ledger(TransactionListener):
    """Commits what has an even number; `asked` are the bodies of the checks."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def check(self, message: StoredMessage) -> TransactionState:
        self.asked.append(message.body.decode())
        is_even = int(message.properties["n"]) % 2 == 0
        return TransactionState.COMMIT if is_even else TransactionState.ROLLBACK


@pytest.mark.parametrize("kind", KINDS if ALL else ["sluicemq"])
async def test_our_producer_decides_for_a_java_producer_that_was_killed(
    kind: str,
    place: Callable[[str], Cluster],
    driver: Callable[[str], Driver],
    tmp_path: Path,
) -> None:
    cluster = place(kind)
    common = {"ns": cluster.name_server, "topic": own("T_heirs"), "group": own("G_heirs")}
    await asyncio.to_thread(abandon, java_delivery(tmp_path), common)
    ledger = Ledger()
    async with Sluice(cluster.name_server) as mq:
        await mq.producer(own("G_heirs"), listener=ledger).answer_checks(own("T_heirs"))
        await until(lambda: len({*ledger.asked}) == 6)
        await asyncio.sleep(SETTLE_S)
    assert {*ledger.asked} == {f"left-{n}" for n in range(6)}
    received = await asyncio.to_thread(
        everything, driver("java-5.3.3"), cluster, own("T_heirs"), 3
    )  # fmt: skip
    assert received == ["left-0", "left-2", "left-4"]


def abandon(sender: Driver, common: dict[str, str]) -> None:
    """Six undecided transactions of a Java process that is then killed."""
    events = sender.call(
        "transact", count=6, prefix="left", outcomes="unknown", keep=1, **common
    )  # fmt: skip
    assert len(named(events, "sent")) == 6
    sender._process.kill()
    sender.close()


def test_a_java_producer_decides_after_the_broker_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: Callable[[str], Driver]
) -> None:
    ports = clusters.free_ports()
    monkeypatch.setattr(clusters, "free_ports", lambda: ports)
    begin = partial(clusters.sluice_cluster, tmp_path, **SETTINGS, flushDiskType="SYNC_FLUSH")
    (tmp_path / "java").mkdir()
    sender = java_delivery(tmp_path / "java")
    try:
        with begin() as cluster:
            events = sender.call(
                "transact", ns=cluster.name_server, topic=own("T_back"), group=own("G_back"),
                count=6, keep=1, outcomes="unknown,commit,rollback",
                checks="commit,rollback,commit",
            )  # fmt: skip
            assert len(named(events, "sent")) == 6
            os.kill(cluster.pids["broker"], signal.SIGKILL)
        with begin() as cluster:
            expected = ["m-0", "m-1", "m-3", "m-4"]
            assert everything(driver("java-5.3.3"), cluster, own("T_back"), 4) == expected
    finally:
        sender._process.kill()
        sender.close()


@pytest.mark.thorough
@pytest.mark.parametrize("client", ["java-5.3.3", "go-2.1.2"])
async def test_java_and_go_decide_for_our_producer_that_is_gone(
    client: str, place: Callable[[str], Cluster], driver: Callable[[str], Driver]
) -> None:
    cluster, heir = place("sluicemq"), driver(client)
    topic, group = own(f"T_orphans_{client[:2]}"), own(f"G_orphans_{client[:2]}")
    async with Sluice(cluster.name_server) as mq:
        producer = mq.producer(group, listener=Ledger())
        for n in range(4):
            message = Message(topic, f"orphan-{n}".encode(), properties={"n": str(n)})
            async with producer.transaction(message) as tx:
                tx.unknown()
    events = await asyncio.to_thread(
        partial(
            heir.call, "transact", ns=cluster.name_server, topic=topic, group=group, prefix="own",
            checks="commit,rollback", expect=4, timeout_s=20,
        )
    )  # fmt: skip
    assert not named(events, "incomplete")
    received = await asyncio.to_thread(everything, heir, cluster, topic, 3)
    assert received == ["orphan-0", "orphan-2", "own-0"]


@pytest.mark.thorough
async def test_our_blocks_end_as_they_are_left_at_the_real_broker(
    place: Callable[[str], Cluster], driver: Callable[[str], Driver]
) -> None:
    cluster, ledger = place("rocketmq"), Ledger()

    def message(n: int) -> Message:
        return Message(own("T_blocks"), f"block-{n}".encode(), properties={"n": str(n)})

    async with Sluice(cluster.name_server) as mq:
        producer = mq.producer(own("G_blocks"), listener=ledger)
        async with producer.transaction(message(0)):
            pass
        with pytest.raises(KeyError):
            async with producer.transaction(message(1)):
                raise KeyError("the local transaction")
        async with producer.transaction(message(2)) as tx:
            tx.rollback()
        for n in (4, 5):
            async with producer.transaction(message(n), check_after_s=3) as tx:
                tx.unknown()
        await until(lambda: {*ledger.asked} == {"block-4", "block-5"})
        await asyncio.sleep(SETTLE_S)
    received = await asyncio.to_thread(
        everything, driver("java-5.3.3"), cluster, own("T_blocks"), 2
    )
    assert received == ["block-0", "block-4"]


def has_topic(ns: str, topic: str) -> bool:
    """Do the name servers know it yet? A new topic is registered a moment after it is made."""
    with Admin(ns) as admin:
        return admin.find_route(topic) is not None
