"""Master and slave over real sockets and disks: roles of the file, and those of a term."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from certificates import Authority
from served import NEW_TOPIC, call, running
from simulation.stepped import pull_fields, send_fields
from sluicemq.broker.replication.in_sync import InSyncReplicas, Term
from sluicemq.broker.replication.sides import INCOMPLETE_NAME, MasterSide, SlaveSide
from sluicemq.broker.replication.state_transfer import ReplicaIdentity
from sluicemq.broker.server import Broker
from sluicemq.config import BrokerConfig, NameServerConfig, StoreConfig
from sluicemq.nameserver.server import NameServer
from sluicemq.net.channel import dial
from sluicemq.net.tls import broker_client_tls
from sluicemq.wire.frames import Command
from waiting import limit, until

FILE_BYTES = 1 << 20


def store_config(path: Path, name: str, **changes: object) -> StoreConfig:
    made = StoreConfig(root=str(path / name), commit_log_file_bytes=FILE_BYTES)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def broker_config(names: str = "", **changes: object) -> BrokerConfig:
    return BrokerConfig(**{
        "broker_name": "broker-a", "bind_address": "127.0.0.1", "listen_port": 0,
        "name_server_addresses": (names,) if names else (), "metrics_enable": False,
        "ha_heartbeat_ms": 300,
    } | changes)  # type: ignore[arg-type]  # fmt: skip


@contextlib.asynccontextmanager
async def name_server(path: Path, **changes: object) -> AsyncIterator[str]:
    made: dict[str, object] = {
        "bind_address": "127.0.0.1", "listen_port": 0, "kv_config_path": str(path / "kv.json"),
    }  # fmt: skip
    server = NameServer(NameServerConfig(**made | changes))  # type: ignore[arg-type]
    await server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.close()


async def sent(broker: Broker, body: bytes) -> int:
    return (await call(broker, 310, send_fields(), body)).code


async def bodies(broker: Broker, offset: int = 0) -> int:
    answer = await call(broker, 30, {"topic": "T", "queueId": 0})
    return int((answer.fields or {}).get("offset", -1)) - offset


def gate(broker: Broker) -> InSyncReplicas:
    assert broker.in_sync is not None
    return broker.in_sync


@pytest.mark.parametrize("sync", [False, True])
async def test_a_slave_of_the_file_has_log_and_state_of_its_master(
    tmp_path: Path, sync: bool
) -> None:
    async with name_server(tmp_path) as names:
        master = Broker(
            broker_config(names, broker_role="SYNC_MASTER"),
            store_config(tmp_path, "m", flush_sync=sync),
        )
        slave = Broker(
            broker_config(names, broker_role="SLAVE", broker_id=1, slave_read=True),
            store_config(tmp_path, "s", flush_sync=sync),
        )
        async with running(master):
            assert (await call(master, 17, NEW_TOPIC)).code == 0
            assert await sent(master, b"alone") == 11, "no slave is there"
            assert await bodies(master) == 0, "and so nobody sees it"
            async with running(slave):
                await until(lambda: gate(master).confirmed == slave.store.written_offset > 0)
                assert await sent(master, b"together") == 0
                assert await bodies(master) == 2
                await until(lambda: slave.store.queue_offsets("T", 0) == (0, 2))
                await until(lambda: "T" in slave.core.topics)
                assert await sent(slave, b"x") == 2
                pulled = await call(slave, 11, pull_fields())
                assert b"together" in pulled.body
                status = json.loads((await call(master, 907)).body)
                assert status["master"]
                assert [one["inSync"] for one in status["haConnectionInfo"]] == [True]
                status = json.loads((await call(slave, 907)).body)
                assert not status["master"]
                assert status["haClientRuntimeInfo"]["isActivated"]
            assert await sent(master, b"alone again") == 11
            assert await bodies(master) == 2


async def test_who_was_a_slave_in_between_hides_nothing_that_it_has_shown(tmp_path: Path) -> None:
    """What it knew to be confirmed as a master, by its file, is not what it knows later."""
    async with name_server(tmp_path) as names:

        def broker(role: str, name: str) -> Broker:
            slave = {"broker_id": 1, "slave_read": True} if role == "SLAVE" else {}
            config = broker_config(names, broker_role=role, **slave)
            return Broker(config, store_config(tmp_path, name))

        for master, slave, body in (("a", "b", b"first"), ("b", "a", b"second")):
            async with running(broker("SYNC_MASTER", master)) as one:
                assert (await call(one, 17, NEW_TOPIC)).code == 0
                async with running(broker("SLAVE", slave)) as other:
                    await until(lambda: bool(one.replication_side.log_senders.senders))  # type: ignore[union-attr]
                    await until_sent(one, body)
                    await until(lambda: other.store.written_offset == one.store.written_offset)
                    shown = other.store.queue_offsets("T", 0)[1]
        async with running(broker("SYNC_MASTER", "a")) as one:
            assert await bodies(one) == shown


async def test_who_has_cut_its_log_is_whole_when_it_is_level_with_a_master(tmp_path: Path) -> None:
    mark = tmp_path / "s" / INCOMPLETE_NAME
    async with name_server(tmp_path) as names:
        # It hears of its master when it registers: at rest that would be too late.
        config = broker_config(names, broker_role="SLAVE", broker_id=1, register_period_ms=1000)
        async with running(Broker(config, store_config(tmp_path, "s"))) as slave:
            assert isinstance(slave.replication_side, SlaveSide)
            assert slave.replication_side.check_complete()
            slave.replication_side.mark_incomplete()
        async with running(Broker(config, store_config(tmp_path, "s"))) as slave:
            assert isinstance(slave.replication_side, SlaveSide)
            assert not slave.replication_side.check_complete(), "a restart knows it"
            assert mark.exists()
            master = Broker(broker_config(names), store_config(tmp_path, "m"))
            async with running(master):
                await until(slave.replication_side.check_complete)
            assert not mark.exists()


def replica(path: Path, number: int, term: Term | None = None, **changes: object) -> Broker:
    config = broker_config(
        broker_id=number, broker_role="SYNC_MASTER", consensus="etcd://nowhere:1", **changes
    )
    identity = ReplicaIdentity(number, f"disk-{number}", f"life-{number}")
    return Broker(config, store_config(path, f"r{number}"), term=term, identity=identity)


async def test_replicas_change_places_and_lose_nothing(tmp_path: Path) -> None:
    both = {1: "disk-1", 2: "disk-2"}
    first = Term(1, 1, "life-a", in_sync={1: "disk-1"})
    one, two = replica(tmp_path, 1, first), replica(tmp_path, 2)
    proposed: list[frozenset[int]] = []
    one._propose = proposed.append
    async with running(one), running(two):
        assert (await call(one, 17, NEW_TOPIC)).code == 0
        assert await sent(one, b"alone") == 0
        led = first._replace(address=one.address, ha_address=one.registration.ha_address)
        await two.change_role(led)
        await until(lambda: bool(proposed))
        assert proposed == [frozenset({1, 2})]
        one.update_term(led._replace(in_sync=both))
        assert await sent(one, b"together") == 0
        port = one.port
        one.depose("a switch")
        assert await sent(one, b"late") == 14
        second = Term(2, 2, "life-b", in_sync=both)
        await two.change_role(second)
        assert two.registration.ha_port
        second = second._replace(address=two.address, ha_address=two.registration.ha_address)
        await one.change_role(second)
        assert one.port == port
        await asyncio.wait_for(until_sent(two, b"after"), limit(10))
        await until(lambda: one.store.queue_offsets("T", 0) == two.store.queue_offsets("T", 0))
        assert [term.number for term in two.log_terms.entries] == [1, 2]  # type: ignore[union-attr]


async def test_what_nobody_knows_to_be_confirmed_is_hidden(tmp_path: Path) -> None:
    alone = Term(1, 1, "life-a", in_sync={1: "disk-1"})
    async with running(replica(tmp_path, 1, alone)) as one:
        assert (await call(one, 17, NEW_TOPIC)).code == 0
        assert await sent(one, b"alone") == 0
        assert await bodies(one) == 1
    for path in tmp_path.rglob("sluiceReplicas.json*"):
        path.unlink()
    both = Term(2, 1, "life-b", in_sync={1: "disk-1", 2: "disk-2"})
    async with running(replica(tmp_path, 1, both)) as one:
        assert await bodies(one) == 0
        one.update_term(both._replace(in_sync=alone.in_sync))
        await until(lambda: one.store.queue_offsets("T", 0) == (0, 1))


async def until_sent(broker: Broker, body: bytes) -> None:
    while await sent(broker, body):
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("is_silent", [False, True])
async def test_a_change_is_answered_when_the_slave_has_it(tmp_path: Path, is_silent: bool) -> None:
    async with name_server(tmp_path) as names:
        master = Broker(
            broker_config(names, broker_role="SYNC_MASTER", slave_timeout_ms=500),
            store_config(tmp_path, "m"),
        )
        slave_config = broker_config(names, broker_role="SLAVE", broker_id=1)
        slave = Broker(slave_config, store_config(tmp_path, "s"))
        async with running(master), running(slave):
            assert isinstance(master.replication_side, MasterSide)
            state_log = master.replication_side.state_sender._state_log
            await until(lambda: state_log.acked_number(1) == state_log.last_number)
            if is_silent:
                await slave.close()
                answer = await call(master, 17, NEW_TOPIC)
                assert answer.code != 0
                assert "not all slaves" in (answer.remark or "")
                return
            for number in range(3):
                answer = await call(master, 17, NEW_TOPIC | {"topic": f"T{number}"})
                assert answer.code == 0, answer.remark
                assert f"T{number}" in slave.core.topics, "and serves it"
        heir = Broker(
            dataclasses.replace(slave_config, broker_role="ASYNC_MASTER", broker_id=0),
            store_config(tmp_path, "s"),
        )
        async with running(heir):
            assert heir.core.topics.table.keys() >= {"T0", "T1", "T2"}


# --------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Settings by which nobody is served or asked who has no certificate of one authority."""
    authority = Authority(tmp_path_factory.mktemp("ca"))
    one = authority.issue("replica", ["127.0.0.1"])
    return {
        "tls_mode": "enforcing", "tls_certificate": one.path, "tls_key": one.key_path,
        "tls_ca": authority.path, "tls_client_auth": "require", "tls_auth_server": True,
        "tls_client_ca": authority.path, "tls_client_certificate": one.path,
        "tls_client_key": one.key_path, "tls_test_mode": False,
    }  # fmt: skip


async def securely(broker: Broker, code: int, fields: dict[str, object], body: bytes = b"") -> int:
    """The code of the answer."""
    tls = broker_client_tls(broker.settings.broker)
    channel = await dial(broker.address, tls=tls)
    try:
        texts = {name: str(value) for name, value in fields.items()}
        return (await channel.call(Command(code, texts, body), 10.0)).code
    finally:
        await channel.close()


async def is_served_plainly(address: str) -> bool:
    """Whether a stranger's report gets any answer from an HA port."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(bytes(8))
    try:
        async with asyncio.timeout(limit(5)):
            return bool(await reader.read(1))
    except ConnectionError:
        return False
    finally:
        writer.close()


async def test_a_slave_of_the_file_follows_over_tls(
    tmp_path: Path, secured: dict[str, object]
) -> None:
    served = {name: secured[name] for name in ("tls_certificate", "tls_key", "tls_ca")}
    async with name_server(tmp_path, **served) as names:
        master = Broker(
            broker_config(names, broker_role="SYNC_MASTER", **secured), store_config(tmp_path, "m")
        )
        slave = Broker(
            broker_config(names, broker_role="SLAVE", broker_id=1, **secured),
            store_config(tmp_path, "s"),
        )
        async with running(master), running(slave):
            assert await securely(master, 17, NEW_TOPIC) == 0
            assert await securely(master, 310, send_fields(), b"first") in (0, 11)
            await until(lambda: gate(master).confirmed == slave.store.written_offset > 0)
            assert await securely(master, 310, send_fields(), b"together") == 0
            await until(lambda: "T" in slave.core.topics)
            await until(lambda: slave.store.queue_offsets("T", 0) == (0, 2))
            assert not await is_served_plainly(master.registration.ha_address)


async def test_replicas_change_places_over_tls(tmp_path: Path, secured: dict[str, object]) -> None:
    both = {1: "disk-1", 2: "disk-2"}
    first = Term(1, 1, "life-a", in_sync={1: "disk-1"})
    one = replica(tmp_path, 1, first, **secured)
    two = replica(tmp_path, 2, **secured)
    proposed: list[frozenset[int]] = []
    one._propose = proposed.append
    async with running(one), running(two):
        assert await securely(one, 17, NEW_TOPIC) == 0
        led = first._replace(address=one.address, ha_address=one.registration.ha_address)
        await two.change_role(led)
        await until(lambda: bool(proposed))
        one.update_term(led._replace(in_sync=both))
        assert await securely(one, 310, send_fields(), b"together") == 0
        assert not await is_served_plainly(one.registration.ha_address)
        one.depose("a switch")
        second = Term(2, 2, "life-b", in_sync=both)
        await two.change_role(second)
        second = second._replace(address=two.address, ha_address=two.registration.ha_address)
        await one.change_role(second)

        async def is_sent() -> bool:
            return await securely(two, 310, send_fields(), b"after") == 0

        async with asyncio.timeout(limit(10)):
            while not await is_sent():
                await asyncio.sleep(0.05)
        await until(lambda: one.store.queue_offsets("T", 0) == two.store.queue_offsets("T", 0))
