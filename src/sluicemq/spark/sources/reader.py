"""Texts of promoted properties -> typed Arrow columns, exactly as Java reads them.

The broker compares a property with a number by Integer.valueOf, Long.valueOf or Double.valueOf
(spec/filter.md §7). A promoted column follows the same functions (`filter.java`), so that Spark and
the broker agree on every message. Each distinct text is looked at once: plain decimal numbers all
together in Arrow, the others one by one. A text that is no value of the type becomes null.

Body columns of one Arrow batch: bytes -> texts or structs, and the reasons where that fails.

Texts are converted by Arrow all at once, and looked at one by one only when that fails; JSON is
read body by body. Heavy to import: executors only.

What an executor does: pull one range of one queue and yield Arrow batches of it.

    BulkReader  pulls in flight, whole records as they came off the socket
    gathered    small answers (a Java broker gives 32 messages a pull) joined to larger blocks
    RecordDecoder, typed_column   columns

Heavy to import (NumPy, pyarrow): only executors do.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

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
from sluicemq.client.core.answers import expect_success, number
from sluicemq.client.core.names import signed
from sluicemq.client.sync.bulk import BulkReader
from sluicemq.errors import (
    ConfigurationError,
    ConnectionLostError,
    FilterEvaluationError,
    OffsetOutOfRangeError,
    RequestTimeoutError,
)
from sluicemq.filter.java import boolean_of, double_of, integer_of, long_of
from sluicemq.model.topic import MessageQueue
from sluicemq.net.blocking import BlockingChannel
from sluicemq.record.arrow import RecordDecoder
from sluicemq.spark.errors import Outage, keep_imports
from sluicemq.spark.schema import ERROR, TEXT, BodyFormat, Column
from sluicemq.spark.sources.offsets import RangePartition, ReadPlan

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


def _boolean(text: str, name: str) -> bool:
    """True and false in any case. Java reads every other text as false; here it is none."""
    if text.lower() not in ("true", "false"):
        raise FilterEvaluationError(f"property {name} is {text!r}, which is no boolean.")
    return boolean_of(text)


_SCALAR: Final[dict[str, Callable[[str, str], Any]]] = {
    "int": integer_of, "bigint": long_of, "double": double_of, "boolean": _boolean,
}  # fmt: skip


def typed_column(texts: Any, kind: str, name: str) -> tuple[Any, int, str]:
    """Texts (pa.string(), with nulls) -> (column of `kind`, count of bad texts, one bad text)."""
    if kind == "string":
        return texts, 0, ""
    encoded = texts.dictionary_encode()
    distinct = encoded.dictionary
    values = _typed_values(distinct, kind, name)
    column = values.take(encoded.indices)
    bad = column.null_count - texts.null_count
    if not bad:
        return column, 0, ""
    example = distinct.filter(values.is_null())[0].as_py()
    return column, bad, example


def _typed_values(distinct: Any, kind: str, name: str) -> Any:
    """The value of each distinct text, null where it is none."""
    pattern = _PLAIN.get(kind)
    if pattern is None:
        return _one_by_one(distinct, kind, name)
    plain = pc.match_substring_regex(distinct, pattern)
    if plain.true_count == len(distinct):
        return distinct.cast(ARROW_TYPES[kind])
    fast = pc.if_else(plain, distinct, pa.scalar(None, pa.string())).cast(ARROW_TYPES[kind])
    slow = _one_by_one(pc.if_else(plain, pa.scalar(None, pa.string()), distinct), kind, name)
    return pc.if_else(plain, fast, slow)


def _one_by_one(texts: Any, kind: str, name: str) -> Any:
    read = _SCALAR[kind]
    values: list[Any] = []
    for text in texts.to_pylist():
        try:
            values.append(None if text is None else read(text, name))
        except FilterEvaluationError:
            values.append(None)
    return pa.array(values, ARROW_TYPES[kind])


_REASON_LENGTH_MAX: Final = 200
Reader = Callable[[Any], Any]


class Decoded(NamedTuple):
    """The column, the column `_error`, and the first bad row with its reason (or None)."""

    bodies: Any
    errors: Any
    first_bad: tuple[int, str] | None


def decoded_bodies(bodies: Any, how: BodyFormat) -> Decoded:
    """`bodies` is a pa.binary() array without nulls."""
    if how.kind == TEXT:
        return _texts(bodies)
    values, errors = _values(bodies, _reader(how.type))
    return _result(pa.array(values, to_arrow_type(how.type)), errors)


def _texts(bodies: Any) -> Decoded:
    try:
        return _result(bodies.cast(pa.string()), {})
    except pa.ArrowInvalid:
        pass
    errors: dict[int, str] = {}
    texts: list[str | None] = []
    for row, body in enumerate(bodies.to_pylist()):
        try:
            texts.append(body.decode())
        except UnicodeDecodeError as error:
            texts.append(None)
            errors[row] = _not_text(error)
    return _result(pa.array(texts, pa.string()), errors)


def _values(bodies: Any, read: Reader) -> tuple[list[Any], dict[int, str]]:
    """Values of the schema (or None), and the reasons of the rows that are none."""
    errors: dict[int, str] = {}
    values: list[Any] = []
    for row, body in enumerate(bodies.to_pylist()):
        value = None
        try:
            value = read(_json(body.decode()))
        except UnicodeDecodeError as error:
            errors[row] = _not_text(error)
        except _MisfitError as error:
            errors[row] = str(error)
        except (ValueError, RecursionError) as error:
            errors[row] = f"not JSON: {error}"
        values.append(value)
    return values, errors


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


_json: Final = json.JSONDecoder(parse_constant=_refuse).decode


class _MisfitError(Exception):
    """A value that is not of the schema's type; its text says which field."""


def _reader(kind: DataType, place: str = "body") -> Reader:
    """A function from a JSON value to what Arrow takes for the type; it raises _MisfitError.

    Arrow's own conversion would take 1.5 for a whole number, and a text for a list of letters.
    """
    if isinstance(kind, StructType):
        return _struct_reader(kind, place)
    if isinstance(kind, ArrayType):
        return _list_reader(_reader(kind.elementType, f"{place}[]"), place)
    return _scalar_reader(kind, place)


def _struct_reader(kind: StructType, place: str) -> Reader:
    fields = [
        (field.name, _reader(field.dataType, f"{place}.{field.name}")) for field in kind.fields
    ]

    def read(value: Any) -> Any:
        if value is None:
            return None
        if type(value) is not dict:
            raise _misfit(place, value, "an object")
        return {name: inner(value.get(name)) for name, inner in fields}

    return read


def _list_reader(inner: Reader, place: str) -> Reader:
    def read(value: Any) -> Any:
        if value is None:
            return None
        if type(value) is not list:
            raise _misfit(place, value, "a list")
        return [inner(one) for one in value]

    return read


def _scalar_reader(kind: DataType, place: str) -> Reader:
    takes, bits = _TAKEN[type(kind)]
    name, limit = kind.simpleString(), 1 << bits
    is_text, is_float = str in takes, float in takes

    def read(value: Any) -> Any:
        if value is None:
            return None
        if type(value) not in takes or (bits and not -limit <= value < limit):
            raise _misfit(place, value, name)
        if is_text and not value.isascii():
            _check_text(place, value)
        return float(value) if is_float else value

    return read


_TAKEN: Final[dict[type[DataType], tuple[tuple[type, ...], int]]] = {
    StringType: ((str,), 0), IntegerType: ((int,), 31), LongType: ((int,), 63),
    DoubleType: ((float, int), 0), FloatType: ((float, int), 0), BooleanType: ((bool,), 0),
}  # fmt: skip
"""Spark type -> the Python types that JSON gives for it, and the bits of a whole number."""


def _check_text(place: str, value: str) -> None:
    """JSON can write half of a surrogate pair, which no UTF-8 holds."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _MisfitError(f"not of the schema: {place} holds half a surrogate pair") from None


def _misfit(place: str, value: Any, wanted: str) -> _MisfitError:
    shown = json.dumps(value)[:40]
    return _MisfitError(f"not of the schema: {place} is {shown}, not {wanted}")


def _not_text(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: {error.reason} at byte {error.start}"


def _result(column: Any, errors: dict[int, str]) -> Decoded:
    if not errors:
        return Decoded(column, pa.nulls(len(column), pa.string()), None)
    texts: list[str | None] = [None] * len(column)
    for row, reason in errors.items():
        texts[row] = reason.splitlines()[0][:_REASON_LENGTH_MAX]
    first = min(errors)
    return Decoded(column, pa.array(texts, pa.string()), (first, texts[first] or ""))


logger = logging.getLogger(__name__)

BLOCK_BYTES_MIN: Final = 1024 * 1024
"""Answers are joined until a block has so many bytes: batches of 10 k rows and more cost the least
a row in Spark (spec/spark.md)."""


@dataclass(slots=True)
class Tally:
    """What one partition's read saw; logged at its end when something was odd."""

    rows: int = 0
    bytes_read: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    bad_bodies: int = 0
    examples: dict[str, str] = field(default_factory=dict)
    lost: int = 0
    damaged: int = 0


def read_range(plan: ReadPlan, partition: RangePartition) -> Iterator[Any]:
    """Arrow batches of a range, columns in the plan's order.

    Raises OffsetOutOfRangeError when messages of the range are gone (and failOnDataLoss is on),
    ConfigurationError for a bad property under badProperties=fail, and the client's errors.
    """
    if partition.queue is None:
        return
    tally = Tally()
    decoder = decoder_of(plan, partition.queue.broker)
    for block in gathered(_chunks(plan, partition, tally)):
        for batch in decoder.decode(block):
            yield finished(batch, plan, partition.queue, tally)
    report_tally(partition.queue, tally)


def decoder_of(plan: ReadPlan, broker: str) -> RecordDecoder:
    """Decodes records into what `finished` takes."""
    keep_imports()
    return RecordDecoder(
        _decoded_names(plan),
        promoted={
            column.name: column.property_name
            for column in plan.columns
            if column.property_name is not None
        },
        broker=broker,
        tags=plan.tags,
        hidden=plan.hidden,
    )


def finished(batch: Any, plan: ReadPlan, queue: MessageQueue, tally: Tally) -> Any:
    """A decoded batch as Spark gets it: bodies read, properties typed, columns in order."""
    tally.rows += batch.num_rows
    return arranged(with_bodies(batch, plan.body, queue, tally), plan, tally)


def _decoded_names(plan: ReadPlan) -> list[str]:
    """The base columns that are decoded; with a body format also what an error's place needs."""
    names = [column.name for column in plan.columns if column.property_name is None]
    if plan.body is None or not {"body", ERROR} & set(names):
        return names
    wanted = dict.fromkeys((*names, "body", "queue_offset"))
    return [name for name in wanted if name != ERROR]


def with_bodies(batch: Any, how: BodyFormat | None, queue: MessageQueue, tally: Tally) -> Any:
    """The batch with `body` as texts or structs, and the column `_error`."""
    if how is None or "body" not in batch.schema.names:
        return batch

    found = decoded_bodies(batch.column("body"), how)
    if found.first_bad is not None:
        row, reason = found.first_bad
        place = f"{queue.broker}:{queue.queue_id} of {queue.topic!r}"
        offset = batch.column("queue_offset")[row].as_py()
        if how.must_be_good:
            raise ConfigurationError(
                f"the body at offset {offset} of {place} is {reason}.",
                cure="Set badBody=null to have the reason in the column _error.",
            )
        tally.bad_bodies += len(found.errors) - found.errors.null_count
        tally.examples.setdefault(ERROR, f"offset {offset}: {reason}")
    kept = [name for name in batch.schema.names if name != "body"]
    arrays = [*(batch.column(name) for name in kept), found.bodies, found.errors]
    return pa.RecordBatch.from_arrays(arrays, names=[*kept, "body", ERROR])


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


def arranged(batch: Any, plan: ReadPlan, tally: Tally) -> Any:
    """The batch with typed property columns, in the order of the plan."""
    arrays = []
    for column in plan.columns:
        array = batch.column(column.name)
        if column.property_name is not None:
            array, bad, example = typed_column(array, column.kind, column.property_name)
            if bad:
                _note_bad(column, bad, example, plan, tally)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, names=[column.name for column in plan.columns])


def _note_bad(column: Column, bad: int, example: str, plan: ReadPlan, tally: Tally) -> None:
    if plan.fail_on_bad_property:
        raise ConfigurationError(
            f"the property {column.property_name!r} has the value {example!r}, which is no"
            f" {column.kind}.",
            cure="Choose another type, or badProperties=null.",
        )
    tally.bad[column.name] = tally.bad.get(column.name, 0) + bad
    tally.examples.setdefault(column.name, example)


def _chunks(
    plan: ReadPlan, partition: RangePartition, tally: Tally
) -> Iterator[bytes | memoryview]:
    """Raw records of the range; past what is lost when that is allowed."""
    start = partition.start
    outage = Outage(plan.timeout_s)
    while start < partition.end:
        reader = _open(plan, partition, start)
        try:
            with reader:
                for chunk in reader:
                    outage.over()
                    yield chunk
            start = partition.end
        except OffsetOutOfRangeError as error:
            if plan.fail_on_data_loss:
                raise OffsetOutOfRangeError(
                    str(error), cure="Set failOnDataLoss=false to read what is left."
                ) from None
            start = _first_left(plan, partition, reader.position)
            tally.lost += start - reader.position
        except (ConnectionLostError, RequestTimeoutError) as error:
            start = reader.position
            outage.pause(error)
        finally:
            tally.bytes_read += reader.bytes_read


def _open(plan: ReadPlan, partition: RangePartition, start: int) -> BulkReader:
    assert partition.queue is not None
    topic, broker, queue_id = partition.queue
    return BulkReader(
        partition.address,
        topic,
        queue_id,
        start,
        partition.end,
        None if plan.subscription is None else replace(plan.subscription, topic=topic),
        broker=broker,
        group=plan.group,
        credentials=plan.credentials,
        tls=plan.tls or False,
        batch_bytes=plan.batch_bytes,
        timeout_s=plan.timeout_s,
    )


def _first_left(plan: ReadPlan, partition: RangePartition, position: int) -> int:
    """The first offset of the range that is still stored; its end when there is none."""
    assert partition.queue is not None
    channel = BlockingChannel(partition.address, plan.timeout_s, plan.tls)
    try:
        answer = channel.call(signed(requests.offset_min(partition.queue), plan.credentials))
        first = number(expect_success(answer, partition.address), "offset")
    finally:
        channel.close()
    return min(first, partition.end) if first > position else partition.end


def report_tally(queue: MessageQueue, tally: Tally) -> None:
    """Logs what was odd about a read that is over."""
    where = f"{queue.broker}:{queue.queue_id} of {queue.topic!r}"
    if tally.lost:
        logger.warning("%d offsets of %s are gone and were not read", tally.lost, where)
    if tally.damaged:
        logger.warning("%d damaged messages of %s were not read", tally.damaged, where)
    if tally.bad_bodies:
        logger.warning(
            "%d bodies of %s are null, the reasons in _error; %s",
            tally.bad_bodies, where, tally.examples[ERROR],
        )  # fmt: skip
    for name, count in tally.bad.items():
        logger.warning(
            "%d values of the property column %r are null in %s: not of its type, for example %r",
            count, name, where, tally.examples[name],
        )  # fmt: skip
