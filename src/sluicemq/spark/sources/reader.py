"""What an executor does: read one range of one queue and yield Arrow batches of it.

    BulkReader      pulls in flight, whole records as they came off the socket
    gathered        small answers (a Java broker gives 32 messages a pull) joined to larger blocks
    RecordDecoder   columns
    decoded_bodies  bytes -> texts or structs, and the reasons where that fails
    typed_column    texts of promoted properties -> typed columns

The broker compares a property with a number by Integer.valueOf, Long.valueOf or Double.valueOf
(spec/filter.md §7). A promoted column follows the same functions (`filter.evaluate`), so that Spark
and the broker agree on every message. Each distinct text is looked at once: plain decimal numbers
all together in Arrow, the others one by one. A text that is no value of the type becomes null.

Messages out of a store directory take the same way behind the pull:

    StorePlace      where log and queues lie, and what the broker is called
    Snapshot        bounds of every queue of the topics: what `offsets` asks of brokers
    StorePartition  what travels to an executor: a range of one queue, and units not filed yet
    read_part       units of the queue -> matches -> places in mapped files of the log -> Arrow

The directory is a broker's own, running or not, or a copy; ours or a Java broker's. It is only ever
read: no lock, no recovery, not one byte written (`sluicemq.store.readonly`). The decoder reads
records where they lie: no byte of one is copied before it is in a column.

Heavy to import (NumPy, pyarrow): only executors do, and planners of store directories.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    StringType,
    StructType,
)

from sluicemq.client.core import requests
from sluicemq.client.core.names import sign_request
from sluicemq.client.core.requests import expect_success, int_field
from sluicemq.client.sync.bulk import BulkReader
from sluicemq.errors import (
    ConfigurationError,
    ConnectionLostError,
    FilterEvaluationError,
    OffsetOutOfRangeError,
    ProtocolError,
    RequestError,
    RequestTimeoutError,
    StoreDamagedError,
)
from sluicemq.files import is_locked
from sluicemq.filter.subscriptions import make_filter
from sluicemq.hints import did_you_mean
from sluicemq.model.subscription import TAG
from sluicemq.model.system_names import SCHEDULE_TOPIC, revealed_names
from sluicemq.model.topic import MessageQueue
from sluicemq.net.blocking import BlockingChannel
from sluicemq.record.arrow import BODY_ERROR, RecordDecoder
from sluicemq.record.codec import decode_record
from sluicemq.spark.errors import Outage, keep_imports, ride_out
from sluicemq.spark.options import Options
from sluicemq.spark.schema import ERROR, FAIL, NUMBERS, RAW, TEXT, BodyFormat
from sluicemq.spark.sources.identity import NO_QUEUE, check_part, range_to_read
from sluicemq.spark.sources.offsets import (
    Bounds,
    QueueRange,
    RangePartition,
    ReadPlan,
    newest_ranges,
    place,
    topics_of,
)

if TYPE_CHECKING:
    from sluicemq.store.readonly import StoreReader

logger = logging.getLogger(__name__)

BLOCK_BYTES_MIN: Final = 1024 * 1024
"""Answers are joined until a block has so many bytes: batches of 10 k rows and more cost the least
a row in Spark (spec/spark.md)."""
_REASON_LENGTH_MAX: Final = 200


@dataclass(slots=True)
class Tally:
    """What one partition's read saw; `report` logs what was odd."""

    rows: int = 0
    bytes_read: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    bad_bodies: int = 0
    examples: dict[str, str] = field(default_factory=dict)
    lost: int = 0
    damaged: int = 0

    def report(self, queue: MessageQueue) -> None:
        """At the end of the read of a queue's range."""
        where = f"{place(queue)} of {queue.topic!r}"
        if self.lost:
            logger.warning("%d offsets of %s are gone and were not read", self.lost, where)
        if self.damaged:
            logger.warning("%d damaged messages of %s were not read", self.damaged, where)
        if self.bad_bodies:
            logger.warning(
                "%d bodies of %s cannot be read, the reasons are in _error; %s",
                self.bad_bodies, where, self.examples[ERROR],
            )  # fmt: skip
        for name, count in self.bad.items():
            logger.warning(
                "%d values of the property column %r are null in %s: not of its type, for example"
                " %r", count, name, where, self.examples[name],
            )  # fmt: skip


def read_range(plan: ReadPlan, partition: RangePartition) -> Iterator[Any]:
    """Arrow batches of a range, columns in the plan's order.

    Raises OffsetOutOfRangeError when messages of the range are gone (and failOnDataLoss is on),
    ConfigurationError for a bad property under badProperties=fail, and the client's errors.
    """
    if partition.queue is None:
        return
    tally = Tally()
    decoder = decoder_of(plan, partition.queue.broker)
    left = ride_out(lambda: range_to_read(plan, partition), plan.timeout_s)
    if left is None:
        return
    part = RangePartition(left.queue, left.start, left.end, partition.address)
    for block in gathered(_chunks(plan, part, tally)):
        for batch in decoder.decode(block):
            yield finished(batch, plan, partition.queue, tally)
    if left == QueueRange(partition.queue, partition.start, partition.end):
        ride_out(lambda: check_part(plan, partition), plan.timeout_s)
    tally.report(partition.queue)


def decoder_of(plan: ReadPlan, broker: str) -> RecordDecoder:
    """Decodes records into what `finished` takes: the base columns of the plan, with a body format
    also what an error's place needs, and promoted properties as texts."""
    keep_imports()
    names = [column.name for column in plan.columns if column.property_name is None]
    if {"body", ERROR} & set(names):
        needed = [BODY_ERROR, "queue_offset", *(["body"] if plan.body is not None else [])]
        names = [name for name in dict.fromkeys((*names, *needed)) if name != ERROR]
    promoted = {
        column.name: column.property_name
        for column in plan.columns
        if column.property_name is not None
    }
    return RecordDecoder(
        names, promoted=promoted, broker=broker, tags=plan.tags, hidden=plan.hidden,
        body_bytes_max=plan.body_bytes_max, keeps_raw=plan.bad_body == RAW,
    )  # fmt: skip


def gathered(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | bytearray | memoryview]:
    """The same bytes in blocks of at least BLOCK_BYTES_MIN, the last one excepted.

    A large chunk is handed on as it is; small ones are copied together.
    """
    held = bytearray()
    for chunk in chunks:
        if not held and len(chunk) >= BLOCK_BYTES_MIN:
            yield chunk
            continue
        held += chunk
        if len(held) >= BLOCK_BYTES_MIN:
            yield held
            held = bytearray()
    if held:
        yield held


def _chunks(
    plan: ReadPlan, partition: RangePartition, tally: Tally
) -> Iterator[bytes | memoryview]:
    """Raw records of the range; past what is lost when that is allowed."""
    assert partition.queue is not None
    topic, broker, queue_id = partition.queue
    subscription = None if plan.subscription is None else replace(plan.subscription, topic=topic)
    start = partition.start
    outage = Outage(plan.timeout_s)
    while start < partition.end:
        reader = BulkReader(
            partition.address, topic, queue_id, start, partition.end, subscription, broker=broker,
            group=plan.group, credentials=plan.credentials, tls=plan.tls or False,
            batch_bytes=plan.batch_bytes, timeout_s=plan.timeout_s,
        )  # fmt: skip
        try:
            with reader:
                for chunk in reader:
                    outage.over()
                    yield chunk
            start = partition.end
        except OffsetOutOfRangeError as error:
            if plan.fail_on_data_loss:
                raise OffsetOutOfRangeError(
                    str(error), fix="Set failOnDataLoss=false to read what is left."
                ) from None
            first = _first_stored(plan, partition)
            start = min(first, partition.end) if first > reader.position else partition.end
            tally.lost += start - reader.position
        except RequestError as error:
            if error.code not in NO_QUEUE:
                raise
            if plan.fail_on_data_loss:
                raise OffsetOutOfRangeError(
                    f"{place(partition.queue)} of {topic!r} disappeared while its offsets"
                    f" {reader.position} to {partition.end} were to be read [{error.fact}].",
                    fix="Set failOnDataLoss=false to read what is left.",
                ) from None
            tally.lost += partition.end - reader.position
            start = partition.end
        except (ConnectionLostError, RequestTimeoutError) as error:
            start = reader.position
            outage.pause(error)
        finally:
            tally.bytes_read += reader.bytes_read


def _first_stored(plan: ReadPlan, partition: RangePartition) -> int:
    """The first offset of the queue that is still stored."""
    assert partition.queue is not None
    channel = BlockingChannel(partition.address, plan.timeout_s, plan.tls)
    try:
        answer = channel.call(sign_request(requests.offset_min(partition.queue), plan.credentials))
        return int_field(expect_success(answer, partition.address), "offset")
    finally:
        channel.close()


def finished(batch: Any, plan: ReadPlan, queue: MessageQueue, tally: Tally) -> Any:
    """A decoded batch as Spark gets it: bodies read, properties typed, columns in order."""
    tally.rows += batch.num_rows
    found = {name: batch.column(name) for name in batch.schema.names}
    if BODY_ERROR in found:
        _read_bodies(found, plan, queue, tally)
    for column in plan.columns:
        if column.property_name is None:
            continue
        found[column.name], count, example = typed_column(
            found[column.name], column.kind, column.property_name
        )
        if count and plan.fail_on_bad_property:
            raise ConfigurationError(
                f"the property {column.property_name!r} has the value {example!r}, which is no"
                f" {column.kind}.",
                fix="Choose another type, or badProperties=null.",
            )
        if count:
            tally.bad[column.name] = tally.bad.get(column.name, 0) + count
            tally.examples.setdefault(column.name, example)
    names = [column.name for column in plan.columns]
    return pa.RecordBatch.from_arrays([found[name] for name in names], names=names)


def _read_bodies(found: dict[str, Any], plan: ReadPlan, queue: MessageQueue, tally: Tally) -> None:
    """Read the bodies in `found` as the plan says and add the column `_error`. Raises
    ConfigurationError for a bad body under badBody=fail."""
    found[ERROR] = _undecodable(found[BODY_ERROR])
    if plan.body is not None:
        found["body"], found[ERROR] = decoded_bodies(found["body"], plan.body, found[ERROR])
    bad = len(found[ERROR]) - found[ERROR].null_count
    if not bad:
        return
    row = found[ERROR].is_valid().index(True).as_py()
    offset, reason = found["queue_offset"][row].as_py(), found[ERROR][row].as_py()
    if plan.bad_body == FAIL:
        raise ConfigurationError(
            f"the body at offset {offset} of {place(queue)} of {queue.topic!r} is {reason}.",
            fix="Set badBody=null to have the reason in the column _error.",
        )
    tally.bad_bodies += bad
    tally.examples.setdefault(ERROR, f"offset {offset}: {reason}")


def _undecodable(reasons: Any) -> Any:
    """Reasons of the decoder as the column `_error` tells them."""
    if reasons.null_count == len(reasons):
        return reasons
    return pa.array(
        [None if one is None else _short(f"not decodable: {one}") for one in reasons.to_pylist()],
        pa.string(),
    )


def _short(reason: str) -> str:
    return reason.splitlines()[0][:_REASON_LENGTH_MAX]


# ---- a store directory

_NAMES_SHOWN: Final = 20
_SKIP: Final = "Set failOnDataLoss=false to read what is left."


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

    def open(self, topics: frozenset[str] | None, queue_id: int | None = None) -> "StoreReader":
        """For the queues of some topics (None: all), or one of them. Raises StoreError."""
        from sluicemq.store.readonly import StoreReader  # noqa: PLC0415 - not for brokers

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
        from sluicemq.store.readonly import has_batch_queues, topics_of_store  # noqa: PLC0415

        there = set(topics_of_store(self.root, consume_queue_path=self.queue_path))
        wanted = topics_of(options)
        if not there.issuperset(wanted.names) or wanted.pattern is not None:
            reader = self.open(None)  # says what is wrong, if that is no store
            there.update(topic for topic, _ in reader.queues())
            reader.close()
        if wanted.pattern is not None:
            return list(wanted.matching(sorted(there), revealed_names(there)))
        for topic in wanted.names:
            if topic not in there and has_batch_queues(self.root, topic):
                raise ConfigurationError(
                    f"the topic {topic!r} in {self.root} has queues of batches (BatchCQ), which"
                    " are not read here.",
                    fix='Read it at its broker: format("rocketmq").',
                )
            if topic not in there:
                listed = ", ".join(sorted(there)[:_NAMES_SHOWN]) or "none"
                more = " …" if len(there) > _NAMES_SHOWN else ""
                raise ConfigurationError(
                    f"the store in {self.root} has no topic {topic!r}.",
                    fix=f"{did_you_mean(topic, sorted(there), cutoff=0.5)} There are:"
                    f" {listed}{more}.".lstrip(),
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

    def __init__(self, place: StorePlace, reader: "StoreReader", topics: frozenset[str]) -> None:
        self._place = place
        self._reader = reader
        self._topics = topics
        self.bounds: Bounds = {
            MessageQueue(topic, place.broker, queue_id): (
                reader.queue_offsets(topic, queue_id)[0],
                reader.sound_end(topic, queue_id),
            )
            for topic, queue_id in reader.queues()
            if topic in topics
        }

    def check_damage(self, *, is_fatal: bool) -> None:
        """Compare what the files show with what a broker would recover, unless a broker has the
        store open. Raise StoreDamagedError if messages are missing and that `is_fatal`; log it
        otherwise."""
        from sluicemq.store.readonly import check_recovery  # noqa: PLC0415 - not for brokers

        place = self._place
        if is_locked(f"{place.root}/lock"):
            return
        try:
            check_recovery(
                self._reader, place.root, commit_log_path=place.log_path,
                consume_queue_path=place.queue_path, wanted=lambda topic, _: topic in self._topics,
            )  # fmt: skip
        except StoreDamagedError as error:
            if is_fatal:
                raise StoreDamagedError(error.fact + ".", fix=f"{error.fix} {_SKIP}") from None
            logger.warning("%s", error)

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
                    yield decode_record(places.view, at).properties


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
    if subscription is not None and queue.topic == SCHEDULE_TOPIC and subscription.kind == TAG:
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
        raise type(error)(error.fact + ".", fix=f"{error.fix} {_SKIP}") from None
    except ProtocolError as error:
        raise StoreDamagedError(
            f"a message of queue {queue.queue_id} of {queue.topic!r} in {place.root} is damaged:"
            f" {error}",
            fix="`sluice store verify` shows all damage; checkBodies=true with"
            " failOnDataLoss=false reads what is sound.",
        ) from None
    finally:
        reader.close()
    tally.lost, tally.damaged, tally.bytes_read = scan.gone, scan.damaged, scan.log_bytes
    tally.report(queue)


# ---- bodies

JsonReader = Callable[[Any], Any]


class Decoded(NamedTuple):
    """The column `body` and the column `_error`."""

    bodies: Any
    errors: Any


class _MisfitError(Exception):
    """A value that is not of the schema's type; its text says which field."""


def decoded_bodies(bodies: Any, how: BodyFormat, errors: Any) -> Decoded:
    """Read `bodies`, a pa.binary() array, as texts or JSON. `errors` are the reasons why some of
    them are null already."""
    read: JsonReader | None = None
    if how.kind == TEXT:
        try:  # all at once; one by one only when that fails
            return Decoded(bodies.cast(pa.string()), errors)
        except pa.ArrowInvalid:
            pass
    else:
        read = _reader(how.type)
    values: list[Any] = [None] * len(bodies)
    reasons: list[str | None] = errors.to_pylist()
    for row, body in enumerate(bodies.to_pylist()):
        if body is None:
            continue
        try:
            text = body.decode()
            values[row] = text if read is None else read(_parse_json(text))
            continue
        except UnicodeDecodeError as error:
            reason = f"not UTF-8: {error.reason} at byte {error.start}"
        except _MisfitError as error:
            reason = f"not of the schema: {error}"
        except (ValueError, RecursionError) as error:
            reason = f"not JSON: {error}"
        reasons[row] = _short(reason)
    return Decoded(pa.array(values, to_arrow_type(how.type)), pa.array(reasons, pa.string()))


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


_parse_json: Final = json.JSONDecoder(parse_constant=_refuse).decode
_TAKEN: Final[dict[type[DataType], tuple[tuple[type, ...], int]]] = {
    StringType: ((str,), 0), IntegerType: ((int,), 31), LongType: ((int,), 63),
    DoubleType: ((float, int), 0), FloatType: ((float, int), 0), BooleanType: ((bool,), 0),
}  # fmt: skip
"""Spark type -> the Python types that JSON gives for it, and the bits of a whole number."""


def _reader(kind: DataType, place: str = "body") -> JsonReader:
    """A function from a JSON value to what Arrow takes for the type; it raises _MisfitError.

    Arrow's own conversion would take 1.5 for a whole number, and a text for a list of letters.
    """
    takes, bits, wanted = (*_TAKEN.get(type(kind), ((), 0)), kind.simpleString())
    inner: JsonReader | None = float if float in takes else None
    if isinstance(kind, StructType):
        fields = {one.name: _reader(one.dataType, f"{place}.{one.name}") for one in kind.fields}
        takes, wanted = (dict,), "an object"
        inner = lambda value: {name: take(value.get(name)) for name, take in fields.items()}  # noqa: E731
    elif isinstance(kind, ArrayType):
        element = _reader(kind.elementType, f"{place}[]")
        takes, wanted = (list,), "a list"
        inner = lambda value: [element(one) for one in value]  # noqa: E731
    limit = 1 << bits

    def read(value: Any) -> Any:
        if value is None:
            return None
        if type(value) not in takes or (bits and not -limit <= value < limit):
            raise _MisfitError(f"{place} is {json.dumps(value)[:40]}, not {wanted}")
        if type(value) is str and not value.isascii():
            try:  # JSON can write half of a surrogate pair, which no UTF-8 holds
                value.encode()
            except UnicodeEncodeError:
                raise _MisfitError(f"{place} holds half a surrogate pair") from None
        return value if inner is None else inner(value)

    return read


# ---- promoted properties

ARROW_TYPES: Final[dict[str, Any]] = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
}
_PLAIN: Final = {
    "int": r"^-?[0-9]{1,9}$",
    "bigint": r"^-?[0-9]{1,18}$",
    "double": r"^-?[0-9]{1,15}(\.[0-9]{1,15})?$",
}
"""Texts that Arrow's own cast reads as Java does (Arrow also takes 0x10 for a whole number)."""


_SCALAR: Final[dict[str, Callable[[str, str], Any]]] = {
    **dict(NUMBERS), "boolean": lambda text, _: {"true": True, "false": False}[text.lower()],
}  # fmt: skip
"""Java reads every text but "true" as false; here another is none (KeyError)."""


def typed_column(texts: Any, kind: str, name: str) -> tuple[Any, int, str]:
    """Texts (pa.string(), with nulls) -> (column of `kind`, count of bad texts, one bad text)."""
    if kind == "string":
        return texts, 0, ""
    encoded = texts.dictionary_encode()
    distinct, wanted = encoded.dictionary, ARROW_TYPES[kind]
    plain = pa.array([False] * len(distinct), pa.bool_())
    if kind in _PLAIN:
        plain = pc.match_substring_regex(distinct, _PLAIN[kind])
    if plain.true_count == len(distinct):
        values = distinct.cast(wanted)
    else:
        none = pa.scalar(None, pa.string())
        slow: list[Any] = []
        for text in pc.if_else(plain, none, distinct).to_pylist():
            try:
                slow.append(None if text is None else _SCALAR[kind](text, name))
            except (FilterEvaluationError, KeyError):
                slow.append(None)
        values = pa.array(slow, wanted)
        if plain.true_count:
            fast = pc.if_else(plain, distinct, none).cast(wanted)
            values = pc.if_else(plain, fast, values)
    column = values.take(encoded.indices)
    bad = column.null_count - texts.null_count
    return column, bad, distinct.filter(values.is_null())[0].as_py() if bad else ""
