"""Good and undecodable bodies mixed in the queues of a topic, read by every kind of consumer.

Under each rule of `on_undecodable` every good message arrives once, every bad one is treated as the
rule says, the consumer lives on (or ends with the error, where that is the rule), and a consumer
that is started again continues where the last one stopped.

The cluster is a real one on virtual time. SLUICEMQ_EXAMPLES says how many topics each kind of
consumer reads under each rule.
"""

import asyncio
import contextlib
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from sluicemq.errors import ConfigurationError, UndecodableBodyError
from sluicemq.model.bodies import COMPRESSION_BITS
from sluicemq.model.topic import MessageQueue
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.testing.virtual import VirtualClock
from stored_bodies import BAD, GOOD, LIMIT, StoredBody, send_stored

pytestmark = pytest.mark.slow

EXAMPLES: Final = int(os.environ.get("SLUICEMQ_EXAMPLES", "2"))
TOPIC, GROUP = "orders", "billing"
QUEUES: Final = 2
RETRIES: Final = 1
QUIET_S: Final = 30.0
"""Longer than all retries of a message, in virtual time."""
PACKAGES: Final = {"lz4": "lz4.frame", "zstd": "zstandard"}


@dataclass
class Seen:
    """What consumers were given: bodies by id where they can be read, and how often not."""

    good: dict[str, list[bytes]] = field(default_factory=dict)
    bad: Counter[str] = field(default_factory=Counter)
    raw: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    order: list[tuple[int, str]] = field(default_factory=list)
    errors: list[UndecodableBodyError] = field(default_factory=list)

    def read(self, message: Any) -> None:
        """Read a message as an application does. Raises UndecodableBodyError."""
        record = getattr(message, "record", message)
        name = record.message_id
        if message.body_error is not None:
            self.bad[name] += 1
            self.raw[name] = (message.raw_body, record.sys_flag & COMPRESSION_BITS)
            assert message.body_error.queue_offset == message.queue_offset
        body = message.body
        self.good.setdefault(name, []).append(body)
        self.order.append((record.queue_id, name))


class Scene:
    """A topic with good and bad messages, and consumers of it that follow one another."""

    def __init__(self, mq: EmbeddedSluice, rule: str, dice: random.Random, missing: str) -> None:
        self.mq = mq
        self.rule: Any = rule
        self.dice = dice
        self.missing = missing
        self.sent: dict[str, tuple[StoredBody, int]] = {}
        self.seen = Seen()
        self.options: dict[str, Any] = {"on_undecodable": rule, "body_bytes_max": LIMIT}

    def is_bad(self, name: str) -> bool:
        stored, _ = self.sent[name]
        kind = {0x100: "lz4", 0x200: "zstd"}.get(stored.sys_flag & 0x700)
        is_missing = kind == self.missing and stored.sys_flag & 1 and stored.raw
        return stored.body is None or bool(is_missing)

    async def send(self, count: int, *, kinds: dict[str, StoredBody] = GOOD | BAD) -> None:
        for _ in range(count):
            stored = kinds[self.dice.choice(sorted(kinds))]
            queue, name = self.dice.randrange(QUEUES), f"{len(self.sent):032X}"
            self.sent[name] = stored, queue
            await send_stored(self.mq, TOPIC, name, stored, queue, TAGS="paid")

    async def dead_letters(self) -> dict[str, tuple[bytes, int]]:
        found = {}
        stream = self.mq.subscribe(f"%DLQ%{GROUP}", group="undertaker", body_bytes_max=LIMIT)
        with contextlib.suppress(Exception):  # no message of the group has died
            while messages := await stream.receive_many(100, timeout_s=1):
                for one in messages:
                    assert one.message_id not in found, "twice among the dead letters"
                    found[one.message_id] = (one.raw_body, one.record.sys_flag & COMPRESSION_BITS)
                    await one.ack()
        await stream.close()
        return found

    def check_good(self) -> None:
        """Every good message arrived once and whole."""
        good = [name for name in self.sent if not self.is_bad(name)]
        assert sorted(self.seen.good) == sorted(good)
        for name in good:
            assert self.seen.good[name] == [self.sent[name][0].body], name

    def check_raw(self, found: dict[str, tuple[bytes, int]]) -> None:
        """The bad messages, and no others, are there as they were stored."""
        assert found == {
            name: (stored.raw, stored.sys_flag & COMPRESSION_BITS)
            for name, (stored, _) in self.sent.items()
            if self.is_bad(name)
        }

    def check_order(self) -> None:
        for queue in range(QUEUES):
            names = [name for number, name in self.seen.order if number == queue]
            assert names == [n for n in self.sent if self.sent[n][1] == queue and n in names]


Read = Callable[[Scene], Awaitable[None]]
"""Consume until nothing comes any more, then close. Raises what ends the consumer."""


async def stream(scene: Scene, **more: Any) -> None:
    async with scene.mq.subscribe(TOPIC, group=GROUP, **scene.options, **more) as messages:
        while some := await messages.receive_many(3, timeout_s=QUIET_S):
            for one in some:
                with contextlib.suppress(UndecodableBodyError):
                    scene.seen.read(one)
                await one.ack()


async def ordered_stream(scene: Scene) -> None:
    await stream(scene, ordered=True)


async def iterated(scene: Scene) -> None:
    messages = scene.mq.subscribe(TOPIC, group=GROUP, **scene.options)

    async def loop() -> None:
        async for one in messages:
            with contextlib.suppress(UndecodableBodyError):
                scene.seen.read(one)
            await one.ack()

    task = asyncio.get_running_loop().create_task(loop())
    await asyncio.wait([task], timeout=QUIET_S)
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
    elif (error := task.exception()) is not None:
        raise error


async def broadcast(scene: Scene) -> None:
    await stream(scene, broadcast=True)


async def handled(scene: Scene, handler: Any, **more: Any) -> None:
    consumer = scene.mq.consumer(
        GROUP, handler, concurrency=3, max_reconsume_times=RETRIES, retry_delay_level=1,
        suspend_s=0.1, **scene.options, **more,
    ).subscribe(TOPIC)  # fmt: skip
    await consumer.start()
    running = asyncio.get_running_loop().create_task(consumer._tasks.wait())
    await asyncio.wait([running], timeout=QUIET_S)
    failure = consumer.failure
    running.cancel()
    await consumer.close()
    if failure is not None:
        raise failure


async def handler(scene: Scene) -> None:
    async def handle(message: Any) -> None:
        scene.seen.read(message)

    await handled(scene, handle)


async def blocking_handler(scene: Scene) -> None:
    await handled(scene, scene.seen.read)


async def ordered_handler(scene: Scene) -> None:
    async def handle(message: Any) -> None:
        scene.seen.read(message)

    await handled(scene, handle, ordered=True)


async def batch_handler(scene: Scene, **more: Any) -> None:
    """A bad message in a batch must not fail the good ones, so the handler asks before it reads;
    then it gives back the bad ones."""

    async def handle(messages: list[Any]) -> None:
        for message in messages:
            if message.body_error is None:
                scene.seen.read(message)
                continue
            with contextlib.suppress(UndecodableBodyError):
                scene.seen.read(message)
            if message.reconsume_times < RETRIES:
                await message.reject(1, suspend_s=0.1)
            else:
                await message.reject(-1)

    await handled(scene, handle, batch_max=4, **more)


async def ordered_batches(scene: Scene) -> None:
    """As one that fails at the first bad message of a batch: what was handled is done."""

    async def handle(messages: list[Any]) -> None:
        from sluicemq import RetryLaterError

        for number, message in enumerate(messages):
            try:
                scene.seen.read(message)
            except UndecodableBodyError as error:
                level = None if message.attempt <= RETRIES else -1
                raise RetryLaterError(str(error), done=number, delay_level=level) from error

    await handled(scene, handle, batch_max=1, ordered=True)


async def polled(scene: Scene, *, assign: bool = False) -> None:
    async with scene.mq.lite_pull(GROUP, **scene.options) as consumer:
        if assign:
            await consumer.assign(await consumer.queues(TOPIC))
        else:
            await consumer.subscribe(TOPIC)
        while some := await consumer.poll(QUIET_S, count_max=3):
            for one in some:
                with contextlib.suppress(UndecodableBodyError):
                    scene.seen.read(one)
            await consumer.commit()


async def assigned(scene: Scene) -> None:
    await polled(scene, assign=True)


async def pulled(scene: Scene) -> None:
    consumer = scene.mq.pull_consumer(GROUP, **scene.options)
    for queue in await consumer.queues(TOPIC):
        offset = await consumer.committed(queue) or 0
        while offset < (await consumer.offsets(queue))[1]:
            result = await consumer.pull(queue, offset, count_max=3)
            for one in result.messages:
                with contextlib.suppress(UndecodableBodyError):
                    scene.seen.read(one)
            offset = result.next_offset
            await consumer.commit(queue, offset)


STREAMS: Final = (stream, ordered_stream, iterated, broadcast, polled, assigned, pulled)
HANDLERS: Final = (handler, blocking_handler, ordered_handler, batch_handler, ordered_batches)
ORDERED: Final = (ordered_stream, ordered_handler, ordered_batches)
ALL: Final = [*STREAMS, *HANDLERS]


@contextlib.contextmanager
def without(package: str) -> Iterator[None]:
    """Imports of a package fail."""
    with pytest.MonkeyPatch.context() as patch:
        if package:
            patch.setitem(sys.modules, PACKAGES[package], None)
        yield


@contextlib.asynccontextmanager
async def scene_of(
    rule: str, kind: Read, seed: int, directory: object = None
) -> AsyncIterator[Scene]:
    dice = random.Random(f"{rule} {kind.__name__} {seed}")
    missing = dice.choice(["", "", "lz4", "zstd"])
    async with embedded(
        clock=VirtualClock(), offsets_directory=str(directory), client_id="one"
    ) as mq:
        await mq.admin.create_topic(TOPIC, queues=QUEUES)
        scene = Scene(mq, rule, dice, missing)
        await scene.send(dice.choice([3, 8, 20]))
        if not any(map(scene.is_bad, scene.sent)):
            await scene.send(1, kinds=BAD)
        await scene.send(2, kinds=GOOD)
        with without(missing):
            yield scene


@pytest.mark.parametrize("seed", range(EXAMPLES))
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
async def test_deliver(kind: Read, seed: int, tmp_path: object) -> None:
    async with scene_of("deliver", kind, seed, tmp_path) as scene:
        for _ in range(2):
            await kind(scene)
            scene.check_good()
            scene.check_raw(scene.seen.raw)
            times = 1 + RETRIES if kind in HANDLERS else 1
            assert set(scene.seen.bad.values()) <= {times}
            await scene.send(4)
        if kind in HANDLERS:
            await kind(scene)
            scene.check_raw(await scene.dead_letters())
        if kind in ORDERED:
            scene.check_order()


@pytest.mark.parametrize("seed", range(EXAMPLES))
@pytest.mark.parametrize(
    "kind", [kind for kind in ALL if kind is not broadcast], ids=lambda kind: kind.__name__
)
async def test_dead_letter(kind: Read, seed: int, tmp_path: object) -> None:
    async with scene_of("dead_letter", kind, seed, tmp_path) as scene:
        for _ in range(2):
            await kind(scene)
            scene.check_good()
            assert not scene.seen.bad
            await scene.send(4)
        await kind(scene)
        scene.check_raw(await scene.dead_letters())
        if kind in ORDERED:
            scene.check_order()


@pytest.mark.parametrize("seed", range(EXAMPLES))
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
async def test_raise(kind: Read, seed: int, tmp_path: object) -> None:
    """Each run hands out good messages up to a bad one and raises its error; a restart meets the
    same message. Then an operator moves the group past it."""
    async with scene_of("raise", kind, seed, tmp_path) as scene:
        passed: set[str] = set()
        while len(passed) < sum(map(scene.is_bad, scene.sent)):
            for _ in range(2):
                with pytest.raises(UndecodableBodyError) as caught:
                    await kind(scene)
                error = caught.value
                assert error.message_id not in passed
                for name, (_, queue) in scene.sent.items():
                    if queue == error.queue_id and name < error.message_id:
                        assert name in (passed if scene.is_bad(name) else scene.seen.good)
            await skip(scene, kind, error)
            passed.add(error.message_id)
        await kind(scene)
        assert not scene.seen.bad
        scene.check_good()
        if kind in ORDERED:
            scene.check_order()


async def skip(scene: Scene, kind: Read, error: UndecodableBodyError) -> None:
    queue, behind = MessageQueue(error.topic, error.broker, error.queue_id), error.queue_offset + 1
    if kind is broadcast:
        offsets = scene.mq.cluster.offset_files.for_group(GROUP)
        await offsets.write(queue, behind)
        await offsets.close()
    else:
        await scene.mq.pull_consumer(GROUP).commit(queue, behind)


async def test_no_dead_letters_where_a_group_has_none() -> None:
    async with embedded(clock=VirtualClock()) as mq:
        rule: Any = {"on_undecodable": "dead_letter"}
        for make in (
            lambda: mq.subscribe(TOPIC, group=GROUP, broadcast=True, **rule),
            lambda: mq.consumer(GROUP, print, broadcast=True, **rule),
            lambda: mq.lite_pull(GROUP, broadcast=True, **rule),
        ):
            with pytest.raises(ConfigurationError, match="has no dead letters"):
                make()
        with pytest.raises(ConfigurationError, match="needs a group"):
            mq.pull_consumer(**rule)
        for wrong in ({"on_undecodable": "skip"}, {"body_bytes_max": 0}):
            with pytest.raises(ConfigurationError):
                mq.subscribe(TOPIC, group=GROUP, **wrong)  # type: ignore[arg-type]
