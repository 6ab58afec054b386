"""Replicas that fail over by a consensus service, over real sockets and disks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from etcd_process import EtcdProcess
from proxied import Proxied, Speaker
from simulation.stepped import send_fields
from sluicemq.broker.failover.broker_replica import run_replica
from sluicemq.broker.failover.etcd import Etcd
from sluicemq.broker.failover.replica import BrokerClosedError, Replica
from sluicemq.broker.server import Broker
from sluicemq.cli.servers.processes import etcd_binary
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.errors import ConfigurationError, RequestError, SluiceError, StoreFullError
from sluicemq.net.channel import dial
from sluicemq.proxy import messages as m
from sluicemq.proxy.local import make_local_proxy
from sluicemq.record.codec import decode_record
from sluicemq.testing.consensus import MemoryConsensus
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command
from waiting import limit, until

LEASE_S = 1.0


class EtcdService:
    """A real etcd, in the place of a `MemoryConsensus`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def client(self) -> Etcd:
        return Etcd(self._url)


class Node:
    """One of the replicas, which comes and goes."""

    client: Any

    def __init__(self, path: Path, service: MemoryConsensus | EtcdService, number: int) -> None:
        self.number, self.port = number, 0
        self._path, self._service = path, service
        self.replica: Replica
        self.broker: Broker
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        config = BrokerConfig(
            broker_name="broker-a", bind_address="127.0.0.1", listen_port=self.port,
            broker_id=self.number, broker_role="SYNC_MASTER", consensus="etcd://nowhere:1",
            metrics_enable=False, ha_heartbeat_ms=300, ha_port=0,
            # A machine that is busy with other tests must not drop a replica from the in-sync set.
            catch_up_ms=round(limit(15_000)),
        )  # fmt: skip
        store = StoreConfig(root=str(self._path / f"r{self.number}"), commit_log_file_bytes=1 << 20)
        self.client = self._service.client()
        self._stack = contextlib.AsyncExitStack()
        self.replica, self.broker = await self._stack.enter_async_context(
            run_replica(config, store, self.client, lease_s=LEASE_S)
        )
        self.port = self.broker.port

    async def stop(self) -> None:
        await self._stack.aclose()

    @property
    def role(self) -> str:
        return str(self.replica.status()["role"])


@pytest.fixture
async def service() -> MemoryConsensus:
    return MemoryConsensus(timeout_s=0.3)


@pytest.fixture
async def nodes(tmp_path: Path, service: MemoryConsensus) -> AsyncIterator[list[Node]]:
    nodes = [Node(tmp_path, service, number) for number in (1, 2)]
    for node in nodes:
        await node.start()
    yield nodes
    for node in nodes:
        await node.stop()


def master(nodes: list[Node]) -> Node | None:
    led = [node for node in nodes if node.role == "master" and node.broker.in_sync]
    return led[0] if len(led) == 1 else None


async def in_sync(nodes: list[Node], ids: list[int]) -> Node:
    def is_so() -> bool:
        led = master(nodes)
        return led is not None and led.replica.status()["inSync"] == ids

    await until(is_so, 30)
    found = master(nodes)
    assert found is not None
    return found


async def send(node: Node, body: bytes) -> int:
    channel = await dial(node.broker.address)
    try:
        return (await channel.call(Command(310, send_fields(), body), 5.0)).code
    finally:
        await channel.close()


async def bodies(node: Node) -> int:
    low, high = node.broker.store.queue_offsets("T", 0)
    return high - low


async def topic(node: Node) -> None:
    fields = {
        "topic": "T", "defaultTopic": "TBW102", "readQueueNums": "1", "writeQueueNums": "1",
        "perm": "6", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false",
    }  # fmt: skip
    channel = await dial(node.broker.address)
    assert (await channel.call(Command(17, fields), 5.0)).code == 0
    await channel.close()


async def sent(node: Node, body: bytes) -> None:
    """With retries, as clients do."""
    async with asyncio.timeout(limit(20)):
        while True:
            with contextlib.suppress(SluiceError, OSError):
                if await send(node, body) == 0:
                    return
            await asyncio.sleep(0.05)


async def test_the_master_moves_on_purpose(nodes: list[Node]) -> None:
    first = await in_sync(nodes, [1, 2])
    await topic(first)
    assert await send(first, b"1") == 0
    second = next(node for node in nodes if node is not first)
    await hand_over(first)
    await until(lambda: master(nodes) is second, 10)
    await in_sync(nodes, [1, 2])
    await sent(second, b"2")
    channel = await dial(first.broker.address)
    client = channel.local
    assert (await channel.call(Command(310, send_fields(), b"3"), 5.0)).code == 0  # it forwards
    await channel.close()
    reader = second.broker.store.reader
    record = reader.record_at(int.from_bytes(reader.units("T", 0, 2, 1)[:8]))
    assert record is not None
    assert decode_record(record).born_host == client, "the client's, and not the replica's"
    assert await bodies(second) == 3
    await until(lambda: first.broker.store.queue_offsets("T", 0) == (0, 3), 10)
    assert second.replica.status()["epoch"] == 2


async def test_a_master_that_stops_is_followed_by_the_other_and_comes_back(
    nodes: list[Node],
) -> None:
    first = await in_sync(nodes, [1, 2])
    await topic(first)
    await sent(first, b"1")
    second = next(node for node in nodes if node is not first)
    await first.stop()
    await sent(second, b"2")
    await first.start()
    assert await in_sync(nodes, [1, 2]) is second
    await sent(second, b"3")
    await until(lambda: first.broker.store.queue_offsets("T", 0) == (0, 3), 10)


async def test_a_master_that_is_cut_off_acknowledges_nothing(
    nodes: list[Node], service: MemoryConsensus
) -> None:
    first = await in_sync(nodes, [1, 2])
    await topic(first)
    await sent(first, b"1")
    second = next(node for node in nodes if node is not first)
    first.client.is_disconnected = True
    await until(lambda: second.role == "master" and second.broker.in_sync is not None, 15)
    await sent(second, b"2")
    assert await send(first, b"lost") != 0
    assert await bodies(first) == 1
    first.client.is_disconnected = False
    assert await in_sync(nodes, [1, 2]) is second
    await sent(second, b"3")
    await until(lambda: first.broker.store.queue_offsets("T", 0) == (0, 3), 10)
    assert service.revision


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[EtcdProcess]:
    try:
        etcd_binary()
    except ConfigurationError:
        pytest.skip("no etcd: install the extra [ha]")
    process = EtcdProcess(tmp_path)
    process.start()
    yield process
    process.kill()


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "running"])
async def test_after_a_loss_of_all_records_an_operator_elects_the_master(
    tmp_path: Path, etcd: EtcdProcess, is_stopped: bool
) -> None:
    """With a real etcd: its answers and events come in another order than those of the one in
    memory. The replicas are stopped before etcd loses its data, or run meanwhile."""
    nodes = [Node(tmp_path, EtcdService(etcd.url), number) for number in (1, 2)]
    for node in nodes:
        await node.start()
    try:
        first = await in_sync(nodes, [1, 2])
        await topic(first)
        assert await send(first, b"1") == 0
        before = first.replica.status()["epoch"]
        if is_stopped:
            for node in sorted(nodes, key=lambda node: node is first):
                await node.stop()
        await asyncio.to_thread(etcd.lose_data)
        if is_stopped:
            for node in nodes:
                await node.start()
        reason = "There is no record" if is_stopped else "older record"
        await until(lambda: all(reason in node.replica.reason for node in nodes), 30)
        first.replica.elect()
        await until(lambda: master(nodes) is first and first.replica.status()["epoch"] > before, 10)
        await sent(first, b"2")
        assert await in_sync(nodes, [1, 2]) is first
        assert [await bodies(node) for node in nodes] == [2, 2]
    finally:
        for node in nodes:
            await node.stop()


async def test_a_replica_that_cannot_take_its_role_ends(
    tmp_path: Path, service: MemoryConsensus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(broker: Broker, term: object) -> None:
        await broker.close()
        raise StoreFullError("no space left.")

    monkeypatch.setattr(Broker, "change_role", fail)
    node = Node(tmp_path, service, 1)

    async def serve() -> None:
        await node.start()
        try:
            await asyncio.Event().wait()
        finally:
            await node.stop()

    with pytest.raises(BrokerClosedError, match="no space left"):
        await asyncio.wait_for(serve(), limit(20))
    assert service.revision


# ------------------------------------------------------- the proxy in a replica's own process

TOPIC, GROUP = m.Resource(name="T"), m.Resource(name="G")


def message(body: str) -> m.SendMessageRequest:
    system = m.SystemProperties(message_id=body, queue_id=0)
    return m.SendMessageRequest(
        messages=[m.Message(topic=TOPIC, body=body.encode(), system_properties=system)]
    )


async def send_by_grpc(client: Speaker, body: str) -> None:
    """As the clients do: what was under way when the role changed is sent again."""
    async with asyncio.timeout(limit(20)):
        while (await client.ask("SendMessage", message(body))).status.code != m.Code.OK:
            await asyncio.sleep(0.05)


async def hand_over(node: Node) -> None:
    """As the command says: try again while the in-sync set is being changed."""
    async with asyncio.timeout(limit(20)):
        while True:
            try:
                return node.replica.switch(None)
            except RequestError as error:
                if error.code != ResponseCode.SYSTEM_BUSY:
                    raise
            await asyncio.sleep(0.05)


async def receive_by_grpc(client: Speaker) -> list[bytes]:
    """All there is, each acknowledged."""
    wish = m.ReceiveMessageRequest(
        group=GROUP, batch_size=32, invisible_duration=m.Duration(seconds=30),
        message_queue=m.MessageQueue(topic=TOPIC, id=-1),
        filter_expression=m.FilterExpression(type=1, expression="*"),
        long_polling_timeout=m.Duration(seconds=1),
    )  # fmt: skip
    answers: list[Any] = await client.ask("ReceiveMessage", wish)
    found = [it.message for it in answers if it.HasField("message")]
    entries = [
        m.AckMessageEntry(
            message_id=it.system_properties.message_id,
            receipt_handle=it.system_properties.receipt_handle,
        )
        for it in found
    ]
    if entries:
        ack = m.AckMessageRequest(group=GROUP, topic=TOPIC, entries=entries)
        assert (await client.ask("AckMessage", ack)).status.code == m.Code.OK
    return [it.body for it in found]


async def test_clients_of_grpc_stay_where_they_are_while_the_master_moves(
    nodes: list[Node],
) -> None:
    first = await in_sync(nodes, [1, 2])
    second = next(node for node in nodes if node is not first)
    await topic(first)
    await until(lambda: "T" in second.broker.core.topics)
    clients = [
        Proxied(None, make_local_proxy(node.broker)).speaker(f"c{node.number}")  # type: ignore[arg-type]
        for node in (first, second)
    ]
    for number, client in enumerate(clients):
        await send_by_grpc(client, f"before-{number}")
    got = await receive_by_grpc(clients[0])
    for led in (second, first):
        other = first if led is second else second
        await hand_over(other)
        sends = [asyncio.ensure_future(send_by_grpc(it, f"during-{it.headers}")) for it in clients]
        await until(lambda led=led: master(nodes) is led, 15)  # type: ignore[misc]
        await asyncio.gather(*sends)
        await in_sync(nodes, [1, 2])
        for number, client in enumerate(clients):
            await send_by_grpc(client, f"{led.number}-{number}")
    async with asyncio.timeout(limit(20)):
        while len(set(got)) < 8:
            for client in clients:
                got += await receive_by_grpc(client)
