"""A topic that is deleted and created again under consumers: each kind, each length, each broker.

The random histories are in `tests/property/test_recreated_topics.py`; here are the cases by name,
and what must not be taken for a topic that was created again.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from simulation.recreated import BROKERS, GROUP, KINDS, TOPIC, Consumer, History, cluster, warnings
from sluicemq import OffsetMoved, Sluice
from sluicemq.client.aio.offsets import decode_anchors, encode_anchors
from sluicemq.client.core import identity
from sluicemq.client.core.identity import (
    Anchor,
    CheckResult,
    QueueIdentity,
    QueueProbe,
    QueueVerdict,
    compare_with_anchors,
    probe_queue,
    restart_offset,
)
from sluicemq.client.core.requests import PullResponse, PullStatus
from sluicemq.client.threaded import LitePullConsumer
from sluicemq.model.topic import MessageQueue
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from waiting import limit

pytestmark = pytest.mark.slow

OLD = 50
QUEUE = MessageQueue(TOPIC, "broker-a", 0)


@pytest.fixture
def offsets(tmp_path: Path) -> Path:
    return tmp_path / "offsets"


async def begun(history: History, kind: str, start: Any = "last") -> Consumer:
    """A consumer that has read OLD messages of a topic with one queue."""
    await history.create(1)
    consumer = Consumer(history.mq, kind, start)
    await consumer.open()
    await history.rest(0.01)
    await history.send(OLD)
    await history.rest(7.0)
    assert sum(consumer.got.values()) == OLD
    return consumer


@pytest.mark.parametrize("broker", BROKERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("length", "pause_s"), [(5, 0.0), (OLD, 0.0), (OLD + 10, 0.0), (5, 3.0)], ids=str
)
async def test_a_running_consumer_reads_the_new_topic_from_its_beginning(
    kind: str,
    broker: str,
    length: int,
    pause_s: float,
    offsets: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster(kind, broker, offsets, monkeypatch) as mq:
        history = History(mq)
        consumer = await begun(history, kind)
        with warnings() as said:
            await history.delete()
            await history.rest(pause_s)
            await history.create(1)
            await history.send(length)
            await history.rest(35.0)
            consumer.check()
        await consumer.close()
        assert [consumer.got[body] for body in history.sent] == [1] * length
        assert len(said) == 1
        if kind in ("handler", "ordered", "stream", "lite", "assign"):
            committed = mq.servers.broker.core.offsets.committed(GROUP, TOPIC, 0)
            assert committed == length


@pytest.mark.parametrize("length", [5, OLD, OLD + 10])
async def test_a_group_that_was_away_reads_the_new_topic_from_its_beginning(
    length: int, offsets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster("stream", "sluice", offsets, monkeypatch) as mq:
        history = History(mq)
        consumer = await begun(history, "stream")
        await consumer.close()
        await history.delete()
        await history.create(2)
        await history.send(length)
        await consumer.open()
        await history.rest(30.0)
        await consumer.close()
        assert [consumer.got[body] for body in history.sent] == [1] * length


@pytest.mark.parametrize("broker", BROKERS)
@pytest.mark.parametrize("length", [5, OLD, OLD + 10])
async def test_a_broadcasting_consumer_that_was_away_notices_the_new_topic_by_its_file(
    broker: str, length: int, offsets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster("broadcast", broker, offsets, monkeypatch) as mq:
        history = History(mq)
        consumer = await begun(history, "broadcast")
        await consumer.close()
        await history.delete()
        await history.create(1)
        await history.send(length)
        with warnings() as said:
            await consumer.open()
            await history.rest(30.0)
            await consumer.close()
        assert [consumer.got[body] for body in history.sent] == [1] * length
        assert len(said) == 1


async def test_a_broadcast_file_of_another_client_that_is_ahead_of_its_queue(
    offsets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java's file has no anchors, so an offset behind the end restarts at the first message."""
    async with cluster("broadcast", "rocketmq-5", offsets, monkeypatch) as mq:
        history = History(mq)
        consumer = await begun(history, "broadcast")
        await consumer.close()
        (file,) = offsets.rglob("anchors.json*")
        file.write_text("[")
        await history.delete()
        await history.create(1)
        await history.send(5)
        await consumer.open()
        await history.rest(30.0)
        await consumer.close()
        assert [consumer.got[body] for body in history.sent] == [1] * 5


async def test_a_new_topic_is_reported_once_and_its_queues_are_shared(
    offsets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster("handler", "rocketmq-4", offsets, monkeypatch) as mq:
        history = History(mq)
        await history.create(8)
        consumer = Consumer(mq, "handler", "last")
        await consumer.open()
        await history.send(2 * OLD)
        await history.rest(7.0)
        for queues in (8, 3, 16):
            with warnings() as said:
                await history.delete()
                await history.create(queues)
                await history.send(2 * OLD)
                await history.rest(60.0)
            assert all(consumer.got[body] == 1 for body in history.sent)
            assert len(said) == 1, said
        await consumer.close()


async def test_a_reader_that_was_paused_notices_the_new_topic_too(
    offsets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of its pulls was parked when the topic was deleted."""
    async with cluster("lite", "rocketmq-5", offsets, monkeypatch) as mq:
        history = History(mq)
        await history.create(1)
        async with mq.lite_pull(GROUP, start="last") as consumer:
            await consumer.subscribe(TOPIC)
            await history.send(OLD)
            read = 0
            while read < OLD:
                read += len(await consumer.poll(5, count_max=OLD))
            assert await consumer.poll(0) == []
            consumer.pause([QUEUE])
            await history.rest(20.0)
            await history.delete()
            await history.create(1)
            await history.send(OLD + 10)
            await history.rest(20.0)
            consumer.resume([QUEUE])
            bodies = []
            while len(bodies) < OLD + 10 and (found := await consumer.poll(30, count_max=OLD)):
                bodies += [message.body for message in found]
        assert bodies == history.sent


async def test_an_offset_reset_is_followed_and_not_taken_for_a_new_topic(
    offsets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for broker in BROKERS:
        with monkeypatch.context() as patches:
            async with cluster("stream", broker, offsets, patches) as mq:
                history = History(mq)
                consumer = await begun(history, "stream")
                with warnings() as said:
                    await mq.admin.reset_offsets(GROUP, TOPIC, 0)
                    await history.rest(20.0)
                await consumer.close()
                assert [consumer.got[body] for body in history.sent] == [2] * OLD
                assert not said


async def test_on_moved_is_called_with_the_old_and_the_new_offset(
    offsets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[OffsetMoved] = []
    async with cluster("stream", "rocketmq-5", offsets, monkeypatch) as mq:
        mq.cluster.on_moved = moved.append
        history = History(mq)
        consumer = await begun(history, "stream")
        await history.delete()
        await history.create(1)
        await history.send(OLD)
        await history.rest(20.0)
        await consumer.close()
    assert moved == [OffsetMoved(GROUP, QUEUE, OLD, 0, 0)]


async def test_a_blocking_consumer_reads_the_new_topic_from_its_beginning(mq: Any) -> None:
    """The consumers of `client.threaded` are asyncio consumers on an event loop of their own."""
    history = History(mq)
    await history.create(1)
    consumer = LitePullConsumer(mq.servers.name_server_address, GROUP, start="last")

    def read(count: int) -> list[bytes]:
        bodies: list[bytes] = []
        while len(bodies) < count and (found := consumer.poll(10.0)):
            bodies += [message.body for message in found]
        return bodies

    with consumer:
        await asyncio.to_thread(consumer.subscribe, TOPIC)
        await history.send(5)
        assert await asyncio.to_thread(read, 5) == history.sent
        await history.delete()
        await history.create(1)
        await history.send(5)
        assert await asyncio.to_thread(read, 5) == history.sent


async def test_after_an_unclean_failover_the_reader_continues_behind_the_remaining_messages(
    fake: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new master lacks the newest messages, and stores others at their offsets."""
    monkeypatch.setattr(identity, "CHECK_PERIOD_S", 0.0)
    fake.topics[TOPIC] = 1
    got: list[bytes] = []

    async def until(body: bytes) -> None:
        async with asyncio.timeout(limit(10)):
            while body not in got:
                await asyncio.sleep(0.01)

    async def handle(message: Any) -> None:
        got.append(message.body)

    def put(name: str, count: int) -> None:
        for number in range(count):
            fake.broker.put(TOPIC, 0, f"{name} {number}".encode())

    async with Sluice(fake.name_server) as mq, mq.consumer(GROUP, handle).subscribe(TOPIC):
        put("safe", 10)
        await until(b"safe 9")
        put("lost", 5)
        await until(b"lost 4")
        for table in (fake.broker.queues, fake.broker.tags):
            del table[TOPIC, 0][12:]
        put("new", 1)
        await until(b"new 0")
    kept = [body for body in got if not body.startswith(b"lost")]
    assert Counter(kept) == Counter([b"safe %d" % n for n in range(10)] + [b"new 0"])
    assert "the broker has lost messages of t/broker-a/0" in caplog.text
    (found,) = re.findall(r"continuing at (\d+) instead of 15", caplog.text)
    assert 10 <= int(found) <= 12, "few messages come again"


# ------------------------------------------------------------------------ the verdict itself


class Queue:
    """A queue of numbers: `messages` by offset, each by the life of the topic it was stored in."""

    def __init__(self, messages: dict[int, int], end: int, begin: int = 0) -> None:
        self.messages, self.end, self.begin = messages, end, begin
        self.is_slave = False
        self.looks = 0

    def look(self, _directory: Any, _group: str, _queue: MessageQueue, offset: int) -> Any:
        yield from ()
        self.looks += 1
        life = self.messages.get(offset)
        found = None if life is None else Anchor(offset, 1000 * life + offset, 10 * offset)
        is_refused = not self.is_slave and not self.begin <= offset <= self.end
        return QueueProbe(found, self.begin, self.end, is_refused)


def lives(*spans: tuple[int, int, int]) -> dict[int, int]:
    """(begin, end, life) of each span."""
    return {offset: life for begin, end, life in spans for offset in range(begin, end)}


def anchors(*offsets: int) -> list[Anchor]:
    return [Anchor(offset, 1000 + offset, 10 * offset) for offset in offsets]


@pytest.mark.parametrize(
    ("queue", "known", "expected"),
    [
        (Queue(lives((0, 60, 1)), 60), anchors(10, 49), CheckResult(QueueVerdict.SAME)),
        (Queue({}, 0), anchors(49), CheckResult(QueueVerdict.RECREATED, 0)),
        (Queue({}, 0), anchors(0), CheckResult(QueueVerdict.RECREATED, 0)),
        (Queue(lives((0, 5, 2)), 5), anchors(10, 49), CheckResult(QueueVerdict.RECREATED, 0)),
        (Queue(lives((0, 49, 2)), 49), anchors(49), CheckResult(QueueVerdict.RECREATED, 0)),
        (Queue(lives((0, 50, 2)), 50), anchors(10, 49), CheckResult(QueueVerdict.RECREATED, 0)),
        (Queue(lives((0, 90, 2)), 90), anchors(10, 49), CheckResult(QueueVerdict.RECREATED, 0)),
        # Retention removed the head, up to all that was read, and all there is.
        (Queue(lives((40, 60, 1)), 60, 40), anchors(10, 49), CheckResult(QueueVerdict.SAME)),
        (Queue(lives((50, 60, 1)), 60, 50), anchors(10, 49), CheckResult(QueueVerdict.SAME)),
        (Queue({}, 50, 50), anchors(10, 49), CheckResult(QueueVerdict.SAME)),
        (Queue({}, 50, 50), [Anchor(49, None)], CheckResult(QueueVerdict.SAME)),
        (Queue(lives((0, 90, 2)), 90), [Anchor(49, None)], CheckResult(QueueVerdict.RECREATED, 0)),
        # And of a new topic too.
        (Queue(lives((20, 90, 2)), 90, 20), anchors(10, 49),
         CheckResult(QueueVerdict.RECREATED, 20)),
        # An unclean failover lost the newest messages; others may be in their places.
        (Queue(lives((0, 45, 1)), 45), anchors(10, 40, 49), CheckResult(QueueVerdict.CUT, 41)),
        (Queue(lives((0, 45, 1), (45, 60, 2)), 60), anchors(10, 40, 49),
         CheckResult(QueueVerdict.CUT, 41)),
        # A hole says nothing.
        (Queue(lives((0, 49, 1), (50, 60, 1)), 60), anchors(10, 49),
         CheckResult(QueueVerdict.SAME)),
        (Queue(lives((0, 49, 2), (50, 60, 2)), 60), anchors(10, 49),
         CheckResult(QueueVerdict.RECREATED, 0)),
        (Queue(lives((0, 60, 1)), 60), [], CheckResult(QueueVerdict.SAME)),
    ],
)  # fmt: skip
def test_the_verdict_on_a_queue(
    queue: Queue,
    known: list[Anchor],
    expected: CheckResult,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(identity, "probe_queue", queue.look)
    assert run(compare_with_anchors(None, GROUP, QUEUE, known)) == expected  # type: ignore[arg-type]


def run(conversation: Iterator[Any]) -> Any:
    """Run a conversation that sends no request, and return its result."""
    try:
        next(conversation)
    except StopIteration as done:
        return done.value
    raise AssertionError("it asks")


@pytest.mark.parametrize("end", [0, 5, 49])
def test_the_end_of_a_queue_at_a_slave_proves_nothing(
    end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(lives((0, end, 1)), end)
    queue.is_slave = True
    monkeypatch.setattr(identity, "probe_queue", queue.look)
    found = run(compare_with_anchors(None, GROUP, QUEUE, anchors(49)))  # type: ignore[arg-type]
    assert found == CheckResult(QueueVerdict.UNKNOWN)


def test_a_message_at_the_same_offset_with_another_time_or_position_is_another_one() -> None:
    one = Anchor(5, 1000, 70)
    assert one.is_same_message(Anchor(5, 1000, 70))
    assert one.is_same_message(Anchor(5, 1000))
    assert not one.is_same_message(Anchor(5, 1001, 70))
    assert not one.is_same_message(Anchor(5, 1000, 71)), "two lives within a millisecond"


def answer(low: int, high: int, status: PullStatus = PullStatus.NO_NEW_MSG) -> PullResponse:
    return PullResponse(status, high, low, high, b"", "")


def known_queue() -> QueueIdentity:
    known = QueueIdentity()
    known.add_anchor(anchors(8)[0], 100, 100.0)
    known.update_bounds(answer(2, 9))
    return known


@pytest.mark.parametrize(
    ("pulled", "now_s", "is_due", "is_suspect"),
    [
        (answer(2, 9), 100.5, False, False),
        (answer(5, 12), 100.5, False, False),  # retention and sends move the bounds on
        (answer(2, 9), 101.0001, True, False),
        (answer(1, 9), 100.5, True, True),
        (answer(2, 8), 100.5, True, True),
        (answer(2, 9, PullStatus.OFFSET_ILLEGAL), 100.5, True, True),
    ],
)
def test_a_check_is_due_once_a_second_and_when_the_queue_has_lost_something(
    pulled: PullResponse, now_s: float, is_due: bool, is_suspect: bool
) -> None:
    assert not QueueIdentity().needs_check(pulled, now_s), "nothing is known yet"
    known = known_queue()
    assert (known.needs_check(pulled, now_s), known.is_suspect) == (is_due, is_suspect)


def test_queues_of_large_messages_are_checked_less_often() -> None:
    known = known_queue()
    known.add_anchor(anchors(9)[0], 4 << 20, 100.5)
    assert not known.needs_check(answer(2, 10), 104.0)
    assert known.needs_check(answer(2, 10), 105.5)


def test_after_an_error_a_check_is_due_at_once() -> None:
    known = known_queue()
    known.is_suspect = True
    assert known.needs_check(answer(2, 9), 100.5)


def test_fresh_anchors_prove_nothing() -> None:
    known = QueueIdentity()
    known.add_anchor(anchors(8)[0], 1, 0.0)
    for offset in range(9, 40):
        known.add_anchor(anchors(offset)[0], 1, 0.0)
    assert [anchor.offset for anchor in known.proven] == [8]
    assert len(known.fresh) <= identity.ANCHORS_MAX
    known.record_same(1.0)
    offsets = [anchor.offset for anchor in known.proven]
    assert (offsets[0], offsets[-1], len(offsets)) == (8, 39, identity.ANCHORS_MAX)
    gaps = [39 - offset for offset in offsets]
    assert gaps[-2] <= 2, "a short cut repeats little"
    known.drop_lost_anchors(20)
    assert max(anchor.offset for anchor in known.proven) < 20


@pytest.mark.parametrize(
    ("pulled", "offset", "expected"),
    [
        (answer(3, 9, PullStatus.OFFSET_ILLEGAL), 10, 3),
        (answer(3, 9, PullStatus.OFFSET_ILLEGAL), 2, None),
        (answer(3, 9, PullStatus.OFFSET_ILLEGAL), 9, None),
        (answer(3, 9), 10, None),
        (PullResponse(PullStatus.OFFSET_ILLEGAL, 5, 3, 9, b"", "OFFSET_RESET"), 10, None),
    ],
)
def test_an_offset_behind_the_end_restarts_at_the_first_message(
    pulled: PullResponse, offset: int, expected: int | None
) -> None:
    assert restart_offset(pulled, offset) == expected


def test_an_encoded_anchors_file_decodes_to_the_same_anchors() -> None:
    known = {QUEUE: Anchor(4, 1000, 81), MessageQueue("u", "b", 1): Anchor(7, None)}
    assert decode_anchors(encode_anchors(known)) == known
    for bad in ("{", "[1]", '[{"topic":"t"}]', '{"a":1}'):
        with pytest.raises(Exception):  # noqa: B017, PT011 - `load_text` takes several
            decode_anchors(bad)


@pytest.fixture
async def mq() -> AsyncIterator[EmbeddedSluice]:
    async with embedded(tcp=True) as sluice:
        yield sluice


async def test_a_probe_does_not_affect_the_group(mq: Sluice) -> None:
    """It is not affected by a reset, and does not change what the group has fetched."""
    core = mq.servers.broker.core  # type: ignore[attr-defined]
    await mq.admin.create_topic(TOPIC, queues=1)
    await mq.send(TOPIC, b"one", tag="A")
    await mq.admin.commit_offset("TOOLS_CONSUMER", QUEUE, 0)
    core.offsets.resets.add("TOOLS_CONSUMER", TOPIC, 0, 0)
    before = dict(core.offsets.pulled_offsets("TOOLS_CONSUMER", TOPIC))
    seen = await mq.cluster.run(probe_queue(mq.cluster.directory, "TOOLS_CONSUMER", QUEUE, 0))
    assert seen.found is not None
    assert seen.found.offset == 0
    assert (seen.offset_min, seen.offset_max, seen.reset_to) == (0, 1, None)
    for offset, is_refused in ((1, False), (2, True)):
        seen = await mq.cluster.run(
            probe_queue(mq.cluster.directory, "TOOLS_CONSUMER", QUEUE, offset)
        )
        assert (seen.found, seen.is_refused) == (None, is_refused)
    assert core.offsets.resets.blocks_commits("TOOLS_CONSUMER", TOPIC, 0)
    assert core.offsets.pulled_offsets("TOOLS_CONSUMER", TOPIC) == before
