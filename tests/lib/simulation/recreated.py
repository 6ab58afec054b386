"""A topic that is deleted and created again at random moments under consumers of every kind.

One seed is one history: messages are sent, the topic is deleted and created with another number of
queues and filled to any length, consumers are closed and started, time passes. The cluster is
embedded and its time virtual. A broker may be ours, or behave as RocketMQ's (`as_rocketmq`): pulls
that wait are not answered when their topic is deleted, offsets of a deleted topic stay (4.x) or go
(5.x), and no group is reset.

At the end every message of the topic as it is then has arrived, and in histories without restarts
none that was not read across a creation has arrived twice.
"""

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sluicemq import Sluice
from sluicemq.broker.consume import pull as pull_module
from sluicemq.broker.server import Broker
from sluicemq.client.core.consuming import Start
from sluicemq.client.core.requests import PullStatus
from sluicemq.errors import SluiceError
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.testing.virtual import VirtualClock

TOPIC, GROUP = "t", "g"
KINDS = ("handler", "ordered", "stream", "lite", "assign", "pull", "broadcast")
BROKERS = ("sluice", "rocketmq-4", "rocketmq-5")


def as_rocketmq(broker: Broker, monkeypatch: pytest.MonkeyPatch, *, keeps_offsets: bool) -> None:
    """Take away what only our broker does when a topic is deleted or created."""
    core = broker.core
    core.topics.on_created = core.topics.on_removed = lambda name: None
    monkeypatch.setattr(pull_module, "PROBE_FIELD", "not known")

    def delete_topic(topic: str) -> None:
        if not keeps_offsets:
            core.offsets.forget(topic=topic)

    monkeypatch.setattr(core.offsets, "delete_topic", delete_topic)


class Warnings(logging.Handler):
    """Counts the lines about topics that were created again."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "created again" in text:
            self.lines.append(text)


@contextlib.contextmanager
def warnings() -> Iterator[list[str]]:
    """The lines that are logged meanwhile."""
    handler, logger = Warnings(), logging.getLogger("sluicemq.client")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


@dataclass
class Consumer:
    """A consumer of one kind. `start` is the group's: it must never matter after a creation."""

    mq: Sluice
    kind: str
    start: Start
    topic: str = TOPIC
    group: str = GROUP
    got: Counter[bytes] = field(default_factory=Counter)
    position: dict[Any, int] = field(default_factory=dict)
    """Of raw pulls: the program keeps it."""
    _task: asyncio.Task[None] | None = None
    _stop: Any = None

    async def open(self) -> None:
        begun = asyncio.Event()
        self._task = asyncio.create_task(getattr(self, f"_{self.kind}")(begun))
        waiting = asyncio.create_task(begun.wait())
        await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            if task.done():
                task.result()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def check(self) -> None:
        """Raise what ended the consumer."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def _handled(self, begun: asyncio.Event, **options: Any) -> None:
        async def handle(message: Any) -> None:
            self.got[message.body] += 1

        consumer = self.mq.consumer(self.group, handle, start=self.start, **options).subscribe(
            self.topic
        )
        await consumer.start()
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await consumer.close()

    async def _handler(self, begun: asyncio.Event) -> None:
        await self._handled(begun)

    async def _ordered(self, begun: asyncio.Event) -> None:
        await self._handled(begun, ordered=True)

    async def _broadcast(self, begun: asyncio.Event) -> None:
        await self._handled(begun, broadcast=True)

    async def _stream(self, begun: asyncio.Event) -> None:
        async with self.mq.subscribe(self.topic, group=self.group, start=self.start) as stream:
            begun.set()
            async for message in stream:
                self.got[message.body] += 1
                await message.ack()

    async def _polled(self, begun: asyncio.Event, consumer: Any) -> None:
        begun.set()
        while True:
            for message in await consumer.poll(5.0):
                self.got[message.body] += 1

    async def _lite(self, begun: asyncio.Event) -> None:
        async with self.mq.lite_pull(self.group, start=self.start) as consumer:
            await consumer.subscribe(self.topic)
            await self._polled(begun, consumer)

    async def _assign(self, begun: asyncio.Event) -> None:
        async with self.mq.lite_pull(self.group, start=self.start) as consumer:
            await consumer.assign(await consumer.queues(self.topic))
            await self._polled(begun, consumer)

    async def _pull(self, begun: asyncio.Event) -> None:
        consumer = self.mq.pull_consumer(self.group)
        queues = await consumer.queues(self.topic)

        async def read(queue: Any) -> None:
            if queue not in self.position:
                self.position[queue] = (await consumer.offsets(queue))[self.start == "last"]
            while True:
                try:
                    found = await consumer.pull(queue, self.position[queue], wait_s=20)
                except SluiceError:
                    await asyncio.sleep(1.0)
                    continue
                self.position[queue] = found.next_offset
                for message in found.messages:
                    self.got[message.body] += 1
                if found.status is PullStatus.NO_NEW_MSG:
                    await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            for queue in queues:
                tasks.create_task(read(queue))
            begun.set()


@dataclass
class History:
    """What has happened to the topic; `sent` are the messages of its present life, by body."""

    mq: EmbeddedSluice
    queues: int = 1
    lives: int = 0
    sent: list[bytes] = field(default_factory=list)

    async def create(self, queues: int) -> None:
        await self.mq.admin.create_topic(TOPIC, queues=queues)
        self.queues, self.sent = queues, []
        self.lives += 1
        self.mq.cluster.routes.expire(TOPIC)

    async def delete(self) -> None:
        await self.mq.admin.delete_topic(TOPIC)
        self.sent = []

    async def send(self, count: int) -> None:
        for _ in range(count):
            body = b"life %d number %d" % (self.lives, len(self.sent))
            await self.mq.send(TOPIC, body)
            self.sent.append(body)

    async def rest(self, seconds: float) -> None:
        await self.mq.clock.advance(seconds=seconds)


@contextlib.asynccontextmanager
async def cluster(
    kind: str, broker: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EmbeddedSluice]:
    """An embedded cluster whose one broker behaves as `broker` says."""
    async with embedded(clock=VirtualClock(), offsets_directory=str(directory)) as mq:
        mq.cluster.long_poll_s = 15.0
        if broker != "sluice":
            as_rocketmq(mq.servers.broker, monkeypatch, keeps_offsets=broker == "rocketmq-4")
        yield mq


async def run(
    seed: int, kind: str, broker: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One history. Raises AssertionError for a message that does not arrive, or comes too often."""
    chance = random.Random(f"{seed} {kind} {broker}")
    # RocketMQ's broker cannot tell a group that was away; the file of a broadcasting one can. Raw
    # pulls leave nothing behind by which they could be told.
    is_known = broker == "sluice" and kind != "pull"
    restarts = chance.random() < 0.5 and (is_known or kind == "broadcast")
    has_one_size = kind in ("assign", "pull")  # these name their queues
    async with cluster(kind, broker, directory, monkeypatch) as mq:
        history = History(mq)
        await history.create(chance.randint(1, 3))
        consumer = Consumer(mq, kind, chance.choice(("first", "last")))
        with warnings() as said:
            await consumer.open()
            await history.rest(0.01)  # a position is known before anything was read there
            for _ in range(chance.randint(2, 5)):
                await history.send(chance.choice((0, 1, 2, 7, 40)))
                await history.rest(chance.choice((0.0, 0.01, 0.3, 1.5, 7.0, 20.0)))
                is_away = restarts and chance.random() < 0.4
                if is_away:
                    await consumer.close()
                await history.delete()
                await history.rest(chance.choice((0.002, 0.3, 4.0, 40.0)))
                await history.create(history.queues if has_one_size else chance.randint(1, 3))
                if is_away and chance.random() < 0.5:
                    await history.send(chance.choice((1, 7, 50)))
                if is_away:
                    await consumer.open()
                    await history.rest(0.01)
            await history.send(chance.choice((1, 3, 8, 41, 60)))
            await history.rest(chance.choice((0.5, 3.0, 30.0)))
            await history.send(chance.choice((0, 3)))
            await history.rest(90.0)
            consumer.check()
            await consumer.close()
    missing = [body for body in history.sent if not consumer.got[body]]
    assert not missing, f"{len(missing)} of {len(history.sent)} are lost: {missing[:3]}, {said}"
    if not restarts:
        often = {body: consumer.got[body] for body in history.sent if consumer.got[body] > 1}
        allowed = 0 if broker == "sluice" else len(history.sent)
        assert len(often) <= allowed, often
        assert all(times == 2 for times in often.values()), often
        if kind != "pull":  # its program hears of each queue
            assert len(said) < history.lives, said
