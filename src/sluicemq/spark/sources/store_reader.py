"""Planning a read of a store directory: its queues at this moment, and from where to where.

StorePlace      where log and queues lie, and what the broker is called
Snapshot        bounds of every queue of the topics: what `cluster` asks of brokers
StorePartition  what travels to an executor: a range of one queue, and units not filed yet

What an executor does with its share of a store: places in the log -> Arrow batches.

    StoreReader    opened for the one queue, read-only
    RangeScan      units of the queue -> matches -> places in mapped files of the log
    RecordDecoder  decodes them where they lie; from there on everything is as in `reader`

No byte of a record is copied before it is in a column. Heavy to import: only executors do.
"""

import difflib
from collections.abc import Iterator, Mapping
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
from sluicemq.model.subscription import TAG, MessageFilter
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_record
from sluicemq.spark.options import Options
from sluicemq.spark.sources.offset_reader import Bounds
from sluicemq.spark.sources.offsets import RangePartition, ReadPlan, topics_of
from sluicemq.spark.sources.reader import Tally, decoder_of, finished, report_tally
from sluicemq.store.readonly import StoreReader, has_batch_queues, topics_of_store

NAME: Final = "rocketmq_store"
_NAMES_SHOWN: Final = 20


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
            options["brokerName"] or Path(root).name or NAME,
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


class StorePartition(RangePartition):
    """A range of one queue, and the units that its files do not hold yet (from `tail_start` on)."""

    def __init__(self, one: RangePartition, tail_start: int = 0, tail: bytes = b"") -> None:
        super().__init__(one.queue, one.start, one.end, one.address)
        self.tail_start = tail_start
        self.tail = tail


class Snapshot:
    """The queues of some topics at one moment."""

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

    def with_tail(self, part: RangePartition) -> StorePartition:
        """The partition with what an executor does not find in the files."""
        assert part.queue is not None
        start, units = self._reader.unfiled_units(part.queue.topic, part.queue.queue_id)
        return StorePartition(part, start, units if units and part.end > start else b"")


def snapshot(place: StorePlace, options: Options) -> tuple[StoreReader, Snapshot]:
    """The reader to be closed, and what it sees. Raises StoreError for what is no store,
    ConfigurationError for a topic that is not there."""
    topics = frozenset(found_topics(place, options))
    reader = place.open(topics)
    return reader, Snapshot(place, reader, topics)


def found_topics(place: StorePlace, options: Options) -> list[str]:
    """The topics to be read. Raises ConfigurationError, naming the nearest, for a missing one."""
    there = set(topics_of_store(place.root, consume_queue_path=place.queue_path))
    wanted = topics_of(options)
    if not there.issuperset(wanted.names) or wanted.pattern is not None:
        reader = place.open(None)  # says what is wrong, if that is no store
        there.update(topic for topic, _ in reader.queues())
        reader.close()
    if wanted.pattern is not None:
        return list(wanted.matching(sorted(there)))
    missing = [name for name in wanted.names if name not in there]
    if missing:
        raise _missing(place, missing[0], there)
    return list(wanted.names)


def _missing(place: StorePlace, topic: str, there: set[str]) -> ConfigurationError:
    if has_batch_queues(place.root, topic):
        return ConfigurationError(
            f"the topic {topic!r} in {place.root} has queues of batches (BatchCQ), which are not"
            " read here.",
            cure='Read it at its broker: format("rocketmq").',
        )
    near = difflib.get_close_matches(topic, sorted(there), n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    listed = ", ".join(sorted(there)[:_NAMES_SHOWN]) or "none"
    more = " …" if len(there) > _NAMES_SHOWN else ""
    return ConfigurationError(
        f"the store in {place.root} has no topic {topic!r}.",
        cure=f"{hint}There are: {listed}{more}.",
    )


def newest_values(options: Options) -> Mapping[str, set[str]]:
    """Property -> the distinct values it has in the newest messages of every queue."""
    found: dict[str, set[str]] = {}
    reader, seen = snapshot(StorePlace.of(options), options)
    for properties in newest_properties(reader, seen.bounds, options["inferMessages"]):
        for name, value in properties.items():
            found.setdefault(name, set()).add(value)
    reader.close()
    return found


def newest_properties(
    reader: StoreReader, bounds: Bounds, count: int
) -> Iterator[Mapping[str, str]]:
    """Those of about so many messages, the newest of every queue."""
    filled = {queue: bound for queue, bound in bounds.items() if bound[0] < bound[1]}
    for queue, (lowest, highest) in filled.items():
        start = max(lowest, highest - -(-count // len(filled)))
        scan = reader.range(queue.topic, queue.queue_id, skips=True)
        for places in scan.places(start, highest):
            for at in places.starts.tolist():
                yield decode_record(places.view, at, decompress=False).properties


SKIP: Final = "Set failOnDataLoss=false to read what is left."
_SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"


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
    reader = place.open(frozenset({queue.topic}), queue.queue_id)
    try:
        reader.add_units(queue.topic, queue.queue_id, part.tail_start, part.tail)
        scan = reader.range(
            queue.topic,
            queue.queue_id,
            _filter_of(plan, queue.topic),
            skips=not plan.fail_on_data_loss,
            check_bodies=check_bodies,
        )
        for places in scan.places(part.start, part.end):
            for batch in decoder.decode_at(places.view, places.starts):
                yield finished(batch, plan, queue, tally)
    except OffsetOutOfRangeError as error:
        raise OffsetOutOfRangeError(error.fact + ".", cure=f"{error.cure} {SKIP}") from None
    except StoreDamagedError as error:
        raise StoreDamagedError(error.fact + ".", cure=f"{error.cure} {SKIP}") from None
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
    report_tally(queue, tally)


def _filter_of(plan: ReadPlan, topic: str) -> MessageFilter | None:
    """What the store decides. Units of delayed messages hold times where others have the code of
    their tag (spec/store.md §3): of those the decoder alone compares tags."""
    if plan.subscription is None or (
        topic == _SCHEDULE_TOPIC and plan.subscription.kind == TAG and plan.tags is not None
    ):
        return None
    return make_filter(plan.subscription)
