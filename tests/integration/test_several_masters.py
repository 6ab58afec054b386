"""Brokers come, are drained and go, on virtual time: no client sees an error, nothing is lost."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest

from sluicemq.client.core.directory import NAME_SERVERS
from sluicemq.errors import SendError
from sluicemq.model.topic import MessageQueue
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.testing.virtual import VirtualClock
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command

QUEUES = 2


@pytest.fixture
async def mq() -> AsyncIterator[EmbeddedSluice]:
    async with embedded(clock=VirtualClock()) as mq:
        await mq.servers.start_broker("broker-b")
        await mq.admin.create_topic("t", queues=QUEUES)
        yield mq


class Traffic:
    """Sends every 200 ms, consumes beside it; an error of either ends the test."""

    def __init__(self, mq: EmbeddedSluice, **how: str) -> None:
        self.mq = mq
        self.how = how
        self.sent: list[tuple[str, bytes]] = []
        self.got: list[bytes] = []

    async def start(self) -> None:
        async def note(message) -> None:
            self.got.append(message.body)

        await self.mq.consumer("g", note).subscribe("t").start()
        self.task = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while True:
            body = b"%d" % len(self.sent)
            result = await self.mq.send("t", body, **self.how)
            self.sent.append((result.queue.broker, body))
            await asyncio.sleep(0.2)

    def brokers(self, since: int) -> set[str]:
        """Where the messages from the `since`th on went."""
        return {broker for broker, _ in self.sent[since:]}

    async def end(self, *, repeats: bool = False) -> None:
        """`repeats`: what was not committed when a broker went may come again."""
        assert not self.task.done(), self.task.exception()
        self.task.cancel()
        await self.mq.clock.advance(minutes=2)
        assert set(self.got) == {body for _, body in self.sent}
        assert repeats or len(self.got) == len(self.sent)


async def command(mq: EmbeddedSluice, code: int, broker: str) -> None:
    await mq.cluster.ask(NAME_SERVERS, Command(code, {"brokerName": broker}))


async def test_a_broker_is_drained_goes_and_comes_again(mq: EmbeddedSluice) -> None:
    traffic = Traffic(mq)
    await traffic.start()
    await mq.clock.advance(seconds=5)
    assert traffic.brokers(0) == {"broker-a", "broker-b"}
    await command(mq, RequestCode.WIPE_WRITE_PERM_OF_BROKER, "broker-b")
    await mq.admin.create_topic("another", queues=1)  # a new topic does not undo it
    await mq.clock.advance(seconds=40)
    since = len(traffic.sent)
    await mq.clock.advance(seconds=60)
    assert traffic.brokers(since) == {"broker-a"}, "routes are 30 s old at most"
    lag = await mq.admin.topic_offsets("t")
    assert {queue.broker for queue in lag} == {"broker-a", "broker-b"}, "it can still be read"
    await mq.servers.stop_broker("broker-b")
    await mq.clock.advance(minutes=3)
    assert [queue.broker for queue in await mq.queues("t")] == ["broker-a"] * QUEUES
    await mq.servers.start_broker("broker-b")
    await mq.clock.advance(minutes=1)
    since = len(traffic.sent)
    await mq.clock.advance(seconds=5)
    assert traffic.brokers(since) == {"broker-a", "broker-b"}
    await traffic.end()


async def test_the_permission_can_be_given_back(mq: EmbeddedSluice) -> None:
    traffic = Traffic(mq)
    await traffic.start()
    await command(mq, RequestCode.WIPE_WRITE_PERM_OF_BROKER, "broker-b")
    await mq.clock.advance(minutes=1)
    await command(mq, RequestCode.ADD_WRITE_PERM_OF_BROKER, "broker-b")
    await mq.clock.advance(minutes=1)
    since = len(traffic.sent)
    await mq.clock.advance(seconds=5)
    assert traffic.brokers(since) == {"broker-a", "broker-b"}
    await traffic.end()


async def test_a_third_broker_takes_its_part(mq: EmbeddedSluice) -> None:
    traffic = Traffic(mq)
    await traffic.start()
    await mq.clock.advance(seconds=5)
    await mq.servers.start_broker("broker-c")
    await mq.admin.create_topic("t", queues=QUEUES)
    await mq.clock.advance(minutes=1)
    since = len(traffic.sent)
    await mq.clock.advance(seconds=10)
    assert traffic.brokers(since) == {"broker-a", "broker-b", "broker-c"}
    await traffic.end()


async def test_a_name_server_that_starts_empty_costs_nobody_anything(mq: EmbeddedSluice) -> None:
    traffic = Traffic(mq)
    await traffic.start()
    await mq.clock.advance(seconds=5)
    for away_s in (0, 90):
        await mq.servers.stop_name_server()
        await mq.clock.advance(seconds=away_s)
        await mq.servers.start_name_server()
        await mq.clock.advance(minutes=1)
    await traffic.end()


async def test_a_broker_dies_and_the_other_takes_what_comes(mq: EmbeddedSluice) -> None:
    traffic = Traffic(mq)
    await traffic.start()
    await mq.clock.advance(seconds=5)
    await mq.servers.stop_broker("broker-b")
    since = len(traffic.sent)
    await mq.clock.advance(minutes=1)
    assert traffic.brokers(since) == {"broker-a"}
    await mq.servers.start_broker("broker-b")
    await mq.clock.advance(minutes=1)
    await traffic.end(repeats=True)


async def test_strict_order_keeps_a_key_at_its_queue_in_an_outage(mq: EmbeddedSluice) -> None:
    names = mq.servers.name_server
    assert names is not None
    names.requests.config = dataclasses.replace(names.requests.config, order_message_enable=True)
    await mq.admin.create_topic("rows", queues=QUEUES, order=True)

    async def send(key: str) -> MessageQueue | None:
        try:
            return (await mq.send("rows", b"x", sharding_key=key)).queue
        except SendError:
            return None

    keys = [f"key-{number}" for number in range(12)]
    usual = {key: await send(key) for key in keys}
    assert {queue.broker for queue in usual.values() if queue} == {"broker-a", "broker-b"}
    await mq.servers.stop_broker("broker-b")
    for wait_s in (0, 40):
        await mq.clock.advance(seconds=wait_s)
        for key, queue in usual.items():
            assert queue is not None
            assert await send(key) == (queue if queue.broker == "broker-a" else None)
    await mq.servers.start_broker("broker-b")
    await mq.clock.advance(seconds=40)
    assert {key: await send(key) for key in keys} == usual
