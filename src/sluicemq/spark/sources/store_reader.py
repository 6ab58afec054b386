"""Messages out of a store directory: its queues at one moment, and what an executor reads of them.

    StorePlace      where log and queues lie, and what the broker is called
    Snapshot        bounds of every queue of the topics: what `offset_reader` asks of brokers
    StorePartition  what travels to an executor: a range of one queue, and units not filed yet
    read_part       units of the queue -> matches -> places in mapped files of the log -> Arrow

The directory is a broker's own, running or not, or a copy; ours or a Java broker's. It is only ever
read: no lock, no recovery, not one byte written (`sluicemq.store.readonly`). The decoder reads
records where they lie: no byte of one is copied before it is in a column. Heavy to import.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sluicemq.errors import (
    ConfigurationError,
    OffsetOutOfRangeError,
    ProtocolError,
    StoreDamagedError,
)
from sluicemq.filter.subscriptions import make_filter
from sluicemq.model.subscription import TAG
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_record
from sluicemq.spark.errors import did_you_mean
from sluicemq.spark.options import Options
from sluicemq.spark.sources.offset_reader import newest_ranges
from sluicemq.spark.sources.offsets import Bounds, RangePartition, ReadPlan, topics_of
from sluicemq.spark.sources.reader import Tally, decoder_of, finished
from sluicemq.store.readonly import StoreReader, has_batch_queues, topics_of_store

_NAMES_SHOWN: Final = 20
_SKIP: Final = "Set failOnDataLoss=false to read what is left."
_SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where a store lies, and what its broker is called."""

    root: str
    log_path: str
    queue_path: str
    broker: str

    @classmethod
    def of(cls, options: Options) -> "StorePlace":
        """Raises ConfigurationError when there is no path."""
        root = str(Path(options.required("path")).absolute())
        return cls(
            root,
            options["commitLogPath"] or "",
            options["consumeQueuePath"] or "",
            options["brokerName"] or Path(root).name or "rocketmq_store",
        )

    def open(self, topics: frozenset[str] | None, queue_id: int | None = None) -> StoreReader:
        """For the queues of some topics (None: all), or one of them. Raises StoreError."""
        return StoreReader.open(
            self.root,
            commit_log_path=self.log_path,
            consume_queue_path=self.queue_path,
            wanted=lambda topic, number: (
                (topics is None or topic in topics) and queue_id in (None, number)
            ),
            option="the option commitLogPath",
        )

    def topics(self, options: Options) -> list[str]:
        """Those to be read. Raises ConfigurationError, naming the nearest, for a missing one."""
        there = set(topics_of_store(self.root, consume_queue_path=self.queue_path))
        wanted = topics_of(options)
        if not there.issuperset(wanted.names) or wanted.pattern is not None:
            reader = self.open(None)  # says what is wrong, if that is no store
            there.update(topic for topic, _ in reader.queues())
            reader.close()
        if wanted.pattern is not None:
            return list(wanted.matching(sorted(there)))
        for topic in wanted.names:
            if topic not in there and has_batch_queues(self.root, topic):
                raise ConfigurationError(
                    f"the topic {topic!r} in {self.root} has queues of batches (BatchCQ), which"
                    " are not read here.",
                    cure='Read it at its broker: format("rocketmq").',
                )
            if topic not in there:
                listed = ", ".join(sorted(there)[:_NAMES_SHOWN]) or "none"
                more = " …" if len(there) > _NAMES_SHOWN else ""
                raise ConfigurationError(
                    f"the store in {self.root} has no topic {topic!r}.",
                    cure=f"{did_you_mean(topic, sorted(there), cutoff=0.5)}There are:"
                    f" {listed}{more}.",
                )
        return list(wanted.names)


class StorePartition(RangePartition):
    """A range of one queue, and the units that its files do not hold yet (from `tail_start` on)."""

    def __init__(self, one: RangePartition, tail_start: int = 0, tail: bytes = b"") -> None:
        super().__init__(one.queue, one.start, one.end, one.address)
        self.tail_start = tail_start
        self.tail = tail


class Snapshot:
    """The queues of some topics at one moment: each ends behind its last message that is wholly in
    the log. What a running broker writes later is not read."""

    def __init__(self, place: StorePlace, reader: StoreReader, topics: frozenset[str]) -> None:
        self._reader = reader
        self.bounds: Bounds = {
            MessageQueue(topic, place.broker, queue_id): (
                reader.queue_offsets(topic, queue_id)[0],
                reader.sound_end(topic, queue_id),
            )
            for topic, queue_id in reader.queues()
            if topic in topics
        }

    def offset_by_time(self, queue: MessageQueue, time_ms: int) -> int:
        """The first message stored then or later, the queue's end without one."""
        return self._reader.offset_by_time(queue.topic, queue.queue_id, time_ms)

    def with_tail(self, part: RangePartition) -> RangePartition:
        """The partition with what an executor does not find in the files."""
        if part.queue is None:
            return part
        start, units = self._reader.unfiled_units(part.queue.topic, part.queue.queue_id)
        return StorePartition(part, start, units if units and part.end > start else b"")

    def newest_properties(self, count: int) -> Iterator[Mapping[str, str]]:
        """Those of about so many messages, the newest of every queue."""
        for queue, offsets in newest_ranges(self.bounds, count).items():
            scan = self._reader.range(queue.topic, queue.queue_id, skips=True)
            for places in scan.places(offsets.start, offsets.stop):
                for at in places.starts.tolist():
                    yield decode_record(places.view, at, decompress=False).properties


@contextmanager
def snapshot(options: Options) -> Iterator[Snapshot]:
    """What is there now. Raises StoreError for what is no store, ConfigurationError for a topic
    that is not there."""
    place = StorePlace.of(options)
    topics = frozenset(place.topics(options))
    reader = place.open(topics)
    try:
        yield Snapshot(place, reader, topics)
    finally:
        reader.close()


def newest_properties(options: Options) -> Iterator[Mapping[str, str]]:
    """Those of the newest messages, as many as the option `inferMessages` says."""
    with snapshot(options) as seen:
        yield from seen.newest_properties(options["inferMessages"])


def read_part(
    place: StorePlace, plan: ReadPlan, part: StorePartition, *, check_bodies: bool = False
) -> Iterator[Any]:
    """Arrow batches of a range, columns in the plan's order.

    Raises OffsetOutOfRangeError for messages that are gone and StoreDamagedError for damaged ones
    (with failOnDataLoss), ConfigurationError as `reader.read_range`.
    """
    queue = part.queue
    assert queue is not None
    tally = Tally()
    decoder = decoder_of(plan, place.broker)
    subscription = plan.subscription
    # Units of delayed messages hold times where others have the code of their tag (spec/store.md
    # §3): of those the decoder alone compares tags.
    if subscription is not None and queue.topic == _SCHEDULE_TOPIC and subscription.kind == TAG:
        subscription = subscription if plan.tags is None else None
    wanted = None if subscription is None else make_filter(subscription)
    reader = place.open(frozenset({queue.topic}), queue.queue_id)
    try:
        reader.add_units(queue.topic, queue.queue_id, part.tail_start, part.tail)
        scan = reader.range(
            queue.topic,
            queue.queue_id,
            wanted,
            skips=not plan.fail_on_data_loss,
            check_bodies=check_bodies,
        )
        for places in scan.places(part.start, part.end):
            for batch in decoder.decode_at(places.view, places.starts):
                yield finished(batch, plan, queue, tally)
    except (OffsetOutOfRangeError, StoreDamagedError) as error:
        raise type(error)(error.fact + ".", cure=f"{error.cure} {_SKIP}") from None
    except ProtocolError as error:
        raise StoreDamagedError(
            f"a message of queue {queue.queue_id} of {queue.topic!r} in {place.root} is damaged:"
            f" {error}",
            cure="`sluice store verify` shows all damage; checkBodies=true with"
            " failOnDataLoss=false reads what is sound.",
        ) from None
    finally:
        reader.close()
    tally.lost, tally.damaged, tally.bytes_read = scan.gone, scan.damaged, scan.log_bytes
    tally.report(queue)
