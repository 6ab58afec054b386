"""Read one range of one queue in an executor, and yield Arrow batches.

    BulkReader              pulls whole records from a broker, several pulls in flight
    join_chunks             joins small responses (a RocketMQ broker returns 32 messages for a pull)
    RecordDecoder           decodes records into columns
    decode_bodies           turns bytes into strings or structs, and finds the reasons of failures
    convert_property_column turns the strings of promoted properties into typed columns

Messages from a store directory take the same way after the pull:

    StoreLocation           the directories of log and queues, and the name of the broker
    StoreSnapshot           bounds of every queue of the topics, which `offsets` gets from brokers
    StorePartition          travels to an executor: a range of one queue, and units not in its files
    read_store_partition    units of the queue -> matches -> positions in the mapped log -> Arrow

The directory is that of a SluiceMQ or RocketMQ broker, running or not, or a copy. It is only read:
nothing is locked, recovered or written (`sluicemq.store.readonly`). The decoder reads records in
the mapped files and copies their bytes directly into columns.

The module imports NumPy and pyarrow, which is slow. Only executors and planners of store
directories import it.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from sluicemq.client.core import requests
from sluicemq.client.core.names import sign_request
from sluicemq.client.core.requests import expect_success, int_field
from sluicemq.client.sync.bulk import BulkReader
from sluicemq.errors import (
    ConfigurationError,
    ConnectionLostError,
    OffsetOutOfRangeError,
    ProtocolError,
    RequestError,
    RequestTimeoutError,
    StoreDamagedError,
)
from sluicemq.files import is_locked
from sluicemq.filter.subscriptions import make_filter
from sluicemq.hints import did_you_mean
from sluicemq.model.subscription import TAG, MessageFilter
from sluicemq.model.system_names import SCHEDULE_TOPIC, revealed_names
from sluicemq.model.topic import MessageQueue
from sluicemq.net.blocking import BlockingChannel
from sluicemq.record.arrow import BODY_ERROR, RecordDecoder
from sluicemq.record.codec import decode_record
from sluicemq.spark.errors import Outage, freeze_imports, retry_during_outage
from sluicemq.spark.options import Options
from sluicemq.spark.schema import BAD_BODY_FAIL, BAD_BODY_RAW, ERROR_NAME
from sluicemq.spark.sources.conversion import convert_property_column
from sluicemq.spark.sources.identity import NO_QUEUE_CODES, check_after_read, find_range_to_read
from sluicemq.spark.sources.json_bodies import decode_bodies, shorten_reason
from sluicemq.spark.sources.offsets import (
    Bounds,
    QueueRange,
    RangePartition,
    ReadPlan,
    TopicSelection,
    parse_topics,
    queue_label,
    select_newest_ranges,
)

if TYPE_CHECKING:
    from sluicemq.store.readonly import StoreReader

logger = logging.getLogger(__name__)

_READ_WHAT_IS_LEFT: Final = "Set failOnDataLoss=false to read what is left."
BLOCK_BYTES_MIN: Final = 1024 * 1024
"""Responses are joined until a block has this size. Batches of 10,000 rows and more cost the least
per row in Spark (spec/spark.md)."""


@dataclass(slots=True)
class ReadStatistics:
    """Counts for the read of one partition.

    `rows` were yielded, and `bytes_read` were pulled or read. `bad_properties` has, for each
    promoted column, the number of values that are not of its type. `bad_bodies` could not be read.
    `examples` has one bad value for each such column, and one reason under `_error`. `lost_offsets`
    and `damaged_messages` were not read.
    """

    rows: int = 0
    bytes_read: int = 0
    bad_properties: dict[str, int] = field(default_factory=dict)
    bad_bodies: int = 0
    examples: dict[str, str] = field(default_factory=dict)
    lost_offsets: int = 0
    damaged_messages: int = 0

    def log_problems(self, queue: MessageQueue) -> None:
        """Log one warning for each kind of problem in the read of `queue`."""
        label = f"{queue_label(queue)} of {queue.topic!r}"
        if self.lost_offsets:
            logger.warning("%d offsets of %s are gone and were not read", self.lost_offsets, label)
        if self.damaged_messages:
            logger.warning("%d damaged messages of %s were not read", self.damaged_messages, label)
        if self.bad_bodies:
            logger.warning(
                "%d bodies of %s cannot be read, the reasons are in _error; %s",
                self.bad_bodies,
                label,
                self.examples[ERROR_NAME],
            )
        for name, count in self.bad_properties.items():
            logger.warning(
                "%d values of the property column %r are null in %s, because they are not of its"
                " type, for example %r",
                count,
                name,
                label,
                self.examples[name],
            )


# ---- brokers


def read_range(plan: ReadPlan, partition: RangePartition) -> Iterator[Any]:
    """Yield the messages of a partition as Arrow batches, with columns in the order of the plan.

    Nothing is yielded for a partition without a queue. Before the read, the function checks by a
    known message that the topic was not deleted and created again. If it was, nothing or another
    range is read. Problems are logged at the end.

    Raises OffsetOutOfRangeError if messages of the range are gone (with failOnDataLoss),
    ConfigurationError for a bad property or body if the options ask for that, and the client's
    errors.
    """
    if partition.queue is None:
        return
    statistics = ReadStatistics()
    decoder = make_decoder(plan, partition.queue.broker)
    to_read = retry_during_outage(lambda: find_range_to_read(plan, partition), plan.timeout_s)
    if to_read is None:
        return
    read_partition = RangePartition(to_read.queue, to_read.start, to_read.end, partition.address)
    for block in join_chunks(_pull_chunks(plan, read_partition, statistics)):
        for batch in decoder.decode(block):
            yield finish_batch(batch, plan, partition.queue, statistics)

    planned = QueueRange(partition.queue, partition.start, partition.end)
    if to_read == planned:
        # Not if the queue had changed before the read: then the anchor would not match again.
        retry_during_outage(lambda: check_after_read(plan, partition), plan.timeout_s)
    statistics.log_problems(partition.queue)


def make_decoder(plan: ReadPlan, broker: str) -> RecordDecoder:
    """Return a decoder that turns records into Arrow batches, which `finish_batch` completes.

    The batches contain the plan's columns. A column that contains a property is still a string
    column. `broker` is the value of the column `broker`. If bodies are read, the batches also
    contain what is needed to find bad bodies and to report their offsets.
    """
    freeze_imports()
    decoded_names = []
    promoted = {}
    for column in plan.columns:
        if column.property_name is None:
            decoded_names.append(column.name)
        else:
            promoted[column.name] = column.property_name
    if "body" in decoded_names or ERROR_NAME in decoded_names:
        decoded_names += [BODY_ERROR, "queue_offset"]
        if plan.body_format is not None:
            decoded_names.append("body")
    # `finish_batch` adds the column `_error`.
    distinct_names = [name for name in dict.fromkeys(decoded_names) if name != ERROR_NAME]
    return RecordDecoder(
        distinct_names,
        promoted=promoted,
        broker=broker,
        tags=plan.exact_tags,
        hidden=plan.hidden_properties,
        body_bytes_max=plan.body_bytes_max,
        keeps_raw=plan.bad_body == BAD_BODY_RAW,
    )


def join_chunks(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | bytearray | memoryview]:
    """Yield the bytes of `chunks` in blocks of at least `BLOCK_BYTES_MIN`.

    Only the last block may be smaller. A large chunk is yielded as it is, and small ones are
    joined.
    """
    block = bytearray()
    for chunk in chunks:
        if not block and len(chunk) >= BLOCK_BYTES_MIN:
            yield chunk
            continue
        block += chunk
        if len(block) >= BLOCK_BYTES_MIN:
            yield block
            block = bytearray()
    if block:
        yield block


def _pull_chunks(
    plan: ReadPlan, partition: RangePartition, statistics: ReadStatistics
) -> Iterator[bytes | memoryview]:
    """Yield the records of a range as raw bytes, and count bytes and lost offsets in `statistics`.

    During an outage, pulls are repeated from the offset that was reached, for up to the plan's
    timeout. If messages or the queue are gone, OffsetOutOfRangeError is raised under
    failOnDataLoss. Otherwise the remaining messages are read. Raises the client's errors.
    """
    assert partition.queue is not None
    start = partition.start
    outage = Outage(plan.timeout_s)
    while start < partition.end:
        reader = _make_bulk_reader(plan, partition, start)
        try:
            with reader:
                for chunk in reader:
                    outage.reset()
                    yield chunk
            start = partition.end
        except OffsetOutOfRangeError as error:
            if plan.fail_on_data_loss:
                raise OffsetOutOfRangeError(str(error), fix=_READ_WHAT_IS_LEFT) from None
            start = _skip_lost_offsets(plan, partition, reader.position)
            statistics.lost_offsets += start - reader.position
        except RequestError as error:
            if error.code not in NO_QUEUE_CODES:
                raise
            if plan.fail_on_data_loss:
                raise OffsetOutOfRangeError(
                    f"{queue_label(partition.queue)} of {partition.queue.topic!r} disappeared"
                    f" before its offsets {reader.position} to {partition.end} were read"
                    f" [{error.fact}].",
                    fix=_READ_WHAT_IS_LEFT,
                ) from None
            statistics.lost_offsets += partition.end - reader.position
            start = partition.end
        except (ConnectionLostError, RequestTimeoutError) as error:
            start = reader.position
            outage.wait_before_retry(error)
        finally:
            statistics.bytes_read += reader.bytes_read


def _make_bulk_reader(plan: ReadPlan, partition: RangePartition, start: int) -> BulkReader:
    """Return a client that reads the partition's range from the offset `start` on."""
    assert partition.queue is not None
    topic, broker, queue_id = partition.queue
    subscription = None
    if plan.subscription is not None:
        subscription = replace(plan.subscription, topic=topic)
    return BulkReader(
        partition.address,
        topic,
        queue_id,
        start,
        partition.end,
        subscription,
        broker=broker,
        group=plan.group,
        credentials=plan.credentials,
        tls=plan.tls or False,
        batch_bytes=plan.batch_bytes,
        timeout_s=plan.timeout_s,
    )


def _skip_lost_offsets(plan: ReadPlan, partition: RangePartition, position: int) -> int:
    """Return the offset at which to read on, because the queue does not have `position`.

    It is the first offset of the queue if the queue begins behind `position`. Otherwise the queue
    ends before it, and the result is the end of the range, because there is nothing left to read.
    """
    first_offset = _fetch_first_offset(plan, partition)
    if first_offset > position:
        return min(first_offset, partition.end)
    return partition.end


def _fetch_first_offset(plan: ReadPlan, partition: RangePartition) -> int:
    """Return the first offset of the partition's queue that is still stored.

    Raises the client's errors.
    """
    assert partition.queue is not None
    channel = BlockingChannel(partition.address, plan.timeout_s, plan.tls)
    try:
        response = channel.call(
            sign_request(requests.offset_min(partition.queue), plan.credentials)
        )
        return int_field(expect_success(response, partition.address), "offset")
    finally:
        channel.close()


# ---- decoded batches


def finish_batch(
    batch: Any, plan: ReadPlan, queue: MessageQueue, statistics: ReadStatistics
) -> Any:
    """Return a decoded batch in the form that Spark gets.

    Bodies are converted to their format, properties to their types, and the columns are put in the
    order of the plan. The rows and the problems are counted in `statistics`. Raises
    ConfigurationError for a bad property or body if the plan asks for that.
    """
    statistics.rows += batch.num_rows
    columns = {name: batch.column(name) for name in batch.schema.names}
    if BODY_ERROR in columns:
        _read_bodies(columns, plan, queue, statistics)
    for column in plan.columns:
        if column.property_name is None:
            continue
        columns[column.name], bad_count, example = convert_property_column(
            columns[column.name], column.type_name, column.property_name
        )
        if not bad_count:
            continue
        if plan.fail_on_bad_property:
            raise ConfigurationError(
                f"the property {column.property_name!r} has the value {example!r}, which is not a"
                f" valid {column.type_name}.",
                fix="Choose another type, or set badProperties=null.",
            )
        count_before = statistics.bad_properties.get(column.name, 0)
        statistics.bad_properties[column.name] = count_before + bad_count
        statistics.examples.setdefault(column.name, example)
    names = [column.name for column in plan.columns]
    return pa.RecordBatch.from_arrays([columns[name] for name in names], names=names)


def _read_bodies(
    columns: dict[str, Any], plan: ReadPlan, queue: MessageQueue, statistics: ReadStatistics
) -> None:
    """Convert the bodies in `columns` to the plan's format, and add the column `_error`.

    `columns` maps names to columns, and is changed in place. Bad bodies are counted in
    `statistics`. Raises ConfigurationError for a bad body under badBody=fail.
    """
    errors = _format_decoder_errors(columns[BODY_ERROR])
    if plan.body_format is not None:
        columns["body"], errors = decode_bodies(columns["body"], plan.body_format, errors)
    columns[ERROR_NAME] = errors
    bad_count = len(errors) - errors.null_count
    if not bad_count:
        return
    row = errors.is_valid().index(True).as_py()  # the first row with an error
    offset = columns["queue_offset"][row].as_py()
    reason = errors[row].as_py()
    if plan.bad_body == BAD_BODY_FAIL:
        raise ConfigurationError(
            f"the body at offset {offset} of {queue_label(queue)} of {queue.topic!r} is {reason}.",
            fix="Set badBody=null to have the reason in the column _error.",
        )
    statistics.bad_bodies += bad_count
    statistics.examples.setdefault(ERROR_NAME, f"offset {offset}: {reason}")


def _format_decoder_errors(reasons: Any) -> Any:
    """Return the decoder's reasons for bad bodies as texts for the column `_error`.

    `reasons` is a string column with null for each good body, and so is the result.
    """
    if reasons.null_count == len(reasons):
        return reasons
    return pa.array(
        [
            None if reason is None else shorten_reason(f"not decodable: {reason}")
            for reason in reasons.to_pylist()
        ],
        pa.string(),
    )


# ---- a store directory

_NAMES_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """The directories of a store, and the name of its broker.

    `log_path` and `queue_path` are "" if log and queues are in `root`.
    """

    root: str
    log_path: str
    queue_path: str
    broker: str

    @classmethod
    def from_options(cls, options: Options) -> "StoreLocation":
        """Return the location that the options name. Raises ConfigurationError without a path."""
        root = str(Path(options.require("path")).absolute())
        return cls(
            root,
            options["commitLogPath"] or "",
            options["consumeQueuePath"] or "",
            options["brokerName"] or Path(root).name or "rocketmq_store",
        )

    def open_reader(
        self, topics: frozenset[str] | None, queue_id: int | None = None
    ) -> "StoreReader":
        """Return a reader of the store's queues. The caller closes it.

        `topics` are the topics to read, and `queue_id` the queue of each topic. None means all
        topics, or all queues. Raises StoreError if the directory is not a store.
        """
        from sluicemq.store.readonly import StoreReader  # noqa: PLC0415 - not for brokers

        def is_wanted(stored_topic: str, stored_queue_id: int) -> bool:
            """Return whether the topic, and the queue if one is given, is to be read."""
            if topics is not None and stored_topic not in topics:
                return False
            return queue_id is None or queue_id == stored_queue_id

        return StoreReader.open(
            self.root,
            commit_log_path=self.log_path,
            consume_queue_path=self.queue_path,
            is_wanted=is_wanted,
            option="the option commitLogPath",
        )

    def resolve_topics(self, options: Options) -> list[str]:
        """Return the names of the store's topics that the options select.

        Raises ConfigurationError for a topic that the store does not have, with the nearest name,
        and StoreError if the directory is not a store.
        """
        from sluicemq.store.readonly import has_batch_queues  # noqa: PLC0415 - not for brokers

        selection = parse_topics(options)
        existing = self._list_topics(selection)
        if selection.pattern is not None:
            return list(selection.match(sorted(existing), revealed_names(existing)))
        for topic in selection.names:
            if topic in existing:
                continue
            if has_batch_queues(self.root, topic):
                raise ConfigurationError(
                    f"the topic {topic!r} in {self.root} has batch consume queues (BatchCQ), which"
                    " are not supported here.",
                    fix='Read it at its broker: format("rocketmq").',
                )
            raise self._missing_topic_error(topic, sorted(existing))
        return list(selection.names)

    def _list_topics(self, selection: TopicSelection) -> set[str]:
        """Return the topics of the store, at least all those in `selection` that exist.

        The names of the directories of consume queues are looked at first. If they do not contain
        all listed topics, the log is read too, which is slow. Raises StoreError if this is
        necessary and the directory is not a store.
        """
        from sluicemq.store.readonly import topics_of_store  # noqa: PLC0415 - not for brokers

        topics = set(topics_of_store(self.root, consume_queue_path=self.queue_path))
        if selection.pattern is None and topics.issuperset(selection.names):
            return topics
        reader = self.open_reader(None)  # raises if the directory is not a store
        topics.update(topic for topic, _ in reader.queues())
        reader.close()
        return topics

    def _missing_topic_error(self, topic: str, existing: Sequence[str]) -> ConfigurationError:
        """Return the error for a topic that is not among the `existing` topics of the store."""
        listed = ", ".join(existing[:_NAMES_SHOWN]) or "none"
        if len(existing) > _NAMES_SHOWN:
            listed += " …"
        suggestion = did_you_mean(topic, existing, cutoff=0.5)
        return ConfigurationError(
            f"the store in {self.root} has no topic {topic!r}.",
            fix=f"{suggestion} The topics are: {listed}.".lstrip(),
        )


class StorePartition(RangePartition):
    """A range of one queue of a store, and the queue's units that are not in its files yet.

    `tail` are these units as bytes, and `tail_start` is the offset of the first one.
    """

    def __init__(self, partition: RangePartition, tail_start: int = 0, tail: bytes = b"") -> None:
        """Copy `partition`, and add the units `tail`, which begin at the offset `tail_start`."""
        super().__init__(partition.queue, partition.start, partition.end, partition.address)
        self.tail_start = tail_start
        self.tail = tail


class StoreSnapshot:
    """The queues of some topics of a store at one moment.

    `bounds` are the offsets of each queue. A queue ends after its last message that is completely
    in the log; what a running broker writes later is not read.
    """

    def __init__(
        self, location: StoreLocation, reader: "StoreReader", topics: frozenset[str]
    ) -> None:
        """Take a snapshot: store the first and the end offset of each queue of `topics`.

        `reader` reads the store at `location`.
        """
        self._location = location
        self._reader = reader
        self._topics = topics
        self.bounds: Bounds = {
            MessageQueue(topic, location.broker, queue_id): (
                reader.queue_offsets(topic, queue_id)[0],
                reader.verified_end(topic, queue_id),
            )
            for topic, queue_id in reader.queues()
            if topic in topics
        }

    def check_damage(self, *, is_fatal: bool) -> None:
        """Check that a broker would recover all messages from the files of the store.

        Do nothing while a broker has the files open. If messages would be missing, raise
        StoreDamagedError if `is_fatal` is True, else log a warning.
        """
        from sluicemq.store.readonly import check_recovery  # noqa: PLC0415 - not for brokers

        location = self._location
        if is_locked(f"{location.root}/lock"):
            return
        try:
            check_recovery(
                self._reader,
                location.root,
                commit_log_path=location.log_path,
                consume_queue_path=location.queue_path,
                is_wanted=lambda topic, _: topic in self._topics,
            )
        except StoreDamagedError as error:
            if is_fatal:
                fix = f"{error.fix} {_READ_WHAT_IS_LEFT}"
                raise StoreDamagedError(error.fact + ".", fix=fix) from None
            logger.warning("%s", error)

    def offset_by_time(self, queue: MessageQueue, time_ms: int) -> int:
        """Return the offset of the first message stored at `time_ms` or later.

        `time_ms` is in milliseconds since 1970. Return the end of the queue if there is no such
        message.
        """
        return self._reader.offset_by_time(queue.topic, queue.queue_id, time_ms)

    def add_unfiled_units(self, partition: RangePartition) -> RangePartition:
        """Return a partition with the entries of its queue that are not in the queue's files yet.

        Their messages are in the log, and an executor could not find them otherwise. Only entries
        that the partition needs are added. A partition without a queue is returned unchanged.
        """
        if partition.queue is None:
            return partition
        topic, _, queue_id = partition.queue
        tail_start, tail = self._reader.unflushed_units(topic, queue_id)
        if partition.end <= tail_start:
            tail = b""  # the partition needs none of these units
        return StorePartition(partition, tail_start, tail)

    def read_newest_properties(self, count: int) -> Iterator[Mapping[str, str]]:
        """Yield the properties of the newest messages of all queues, about `count` messages."""
        for queue, offsets in select_newest_ranges(self.bounds, count).items():
            scan = self._reader.scan_queue(queue.topic, queue.queue_id, skips=True)
            for log_part in scan.iter_places(offsets.start, offsets.stop):
                for position in log_part.starts.tolist():
                    yield decode_record(log_part.view, position).properties


@contextmanager
def open_snapshot(options: Options) -> Iterator[StoreSnapshot]:
    """Return a context manager with a snapshot of the store that the options name.

    Raises StoreError if the directory is not a store, and ConfigurationError for a topic that the
    store does not have.
    """
    location = StoreLocation.from_options(options)
    topics = frozenset(location.resolve_topics(options))
    reader = location.open_reader(topics)
    try:
        yield StoreSnapshot(location, reader, topics)
    finally:
        reader.close()


def read_newest_properties(options: Options) -> Iterator[Mapping[str, str]]:
    """Yield the properties of the newest messages of a store.

    The option `inferMessages` says how many messages are read. Raises the errors of
    `open_snapshot`.
    """
    with open_snapshot(options) as snapshot:
        yield from snapshot.read_newest_properties(options["inferMessages"])


def read_store_partition(
    location: StoreLocation,
    plan: ReadPlan,
    partition: StorePartition,
    *,
    check_bodies: bool = False,
) -> Iterator[Any]:
    """Yield the messages of a store's partition as Arrow batches, with columns in the plan's order.

    With `check_bodies`, each body is compared with its checksum. Problems are logged at the end.
    With failOnDataLoss, OffsetOutOfRangeError is raised for messages that are gone, and
    StoreDamagedError for damaged ones. ConfigurationError is raised for a bad property or body if
    the options ask for that.
    """
    queue = partition.queue
    assert queue is not None
    statistics = ReadStatistics()
    decoder = make_decoder(plan, location.broker)
    message_filter = _make_store_filter(plan, queue.topic)
    reader = location.open_reader(frozenset({queue.topic}), queue.queue_id)
    with closing(reader), _store_errors_with_fix(location, queue):
        reader.add_units(queue.topic, queue.queue_id, partition.tail_start, partition.tail)
        scan = reader.scan_queue(
            queue.topic,
            queue.queue_id,
            message_filter,
            skips=not plan.fail_on_data_loss,
            check_bodies=check_bodies,
        )
        for log_part in scan.iter_places(partition.start, partition.end):
            for batch in decoder.decode_at(log_part.view, log_part.starts):
                yield finish_batch(batch, plan, queue, statistics)
    statistics.lost_offsets = scan.missing_count
    statistics.damaged_messages = scan.damaged_count
    statistics.bytes_read = scan.log_bytes
    statistics.log_problems(queue)


@contextmanager
def _store_errors_with_fix(location: StoreLocation, queue: MessageQueue) -> Iterator[None]:
    """Return a context manager that adds advice to the errors of a store.

    The advice says how to read the undamaged messages. A ProtocolError, raised for a record that
    cannot be decoded, becomes a StoreDamagedError.
    """
    try:
        yield
    except (OffsetOutOfRangeError, StoreDamagedError) as error:
        fix = f"{error.fix} {_READ_WHAT_IS_LEFT}"
        raise type(error)(error.fact + ".", fix=fix) from None
    except ProtocolError as error:
        raise StoreDamagedError(
            f"a message of queue {queue.queue_id} of {queue.topic!r} in {location.root} is damaged:"
            f" {error}",
            fix="Run `sluice store verify` to see all damage, or read the undamaged messages with"
            " checkBodies=true and failOnDataLoss=false.",
        ) from None


def _make_store_filter(plan: ReadPlan, topic: str) -> MessageFilter | None:
    """Return the filter with which a queue of a store is scanned; None means all messages.

    In the consume queue, entries of delayed messages contain times where other entries contain the
    hash of the tag (spec/store.md §3). So a filter by tags is left to the decoder for these
    messages.
    """
    subscription = plan.subscription
    if subscription is None:
        return None
    is_delayed = topic == SCHEDULE_TOPIC
    if is_delayed and subscription.kind == TAG and plan.exact_tags is not None:
        return None
    return make_filter(subscription)
