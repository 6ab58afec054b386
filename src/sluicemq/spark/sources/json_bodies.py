"""Convert columns of bodies to strings or to values of a JSON schema.

JSON is read by Arrow, all bodies of a chunk at once, which takes a fifth of the time of Python's
parser with Arrow's conversion. Arrow rejects a chunk as a whole if one body is not of the schema.
Its bodies are then read one by one by Python, which is the reference: it finds the reason of each
bad body, and it reads what Arrow refuses but JSON permits. Both have the same result
(tests/property/test_json_bodies.py).

Arrow reads a stream of objects, which need not be one for each body: a body could contain the end
of an object and the beginning of another one. So each body becomes a field of an object that also
has the number of its row, under a secret name. The numbers are compared afterwards.
"""

import json
import secrets
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as arrow_json
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

from sluicemq.record.property_columns import get_data_and_offsets
from sluicemq.spark.schema import TEXT, BodyFormat

_REASON_LENGTH_MAX: Final = 200


JsonConverter = Callable[[Any], Any]
"""A function from a parsed JSON value to a value that Arrow takes for a type."""


class DecodedBodies(NamedTuple):
    """The columns `body` and `_error`.

    If a body could not be read, it is null, and `_error` has the reason in that row.
    """

    bodies: Any
    errors: Any


class _MisfitError(Exception):
    """A JSON value that is not of the schema's type; the text says which field it is."""


def decode_bodies(bodies: Any, body_format: BodyFormat, errors: Any) -> DecodedBodies:
    """Convert a binary column of bodies to strings or to values of a JSON schema.

    `errors` is a string column with the reasons why bodies are null already; null for other rows. A
    body that cannot be converted becomes null. The result has the column, and `errors` with these
    further reasons.
    """
    if body_format.kind == TEXT:
        # All bodies at once; they are read one by one only if a body is not UTF-8.
        try:
            return DecodedBodies(bodies.cast(pa.string()), errors)
        except pa.ArrowInvalid:
            return _decode_one_by_one(bodies, body_format, errors)
    if not _can_arrow_read(body_format.type) or not len(bodies):
        return _decode_one_by_one(bodies, body_format, errors)
    values_type = to_arrow_type(body_format.type)
    parts = []
    for start in range(0, len(bodies), _CHUNK_ROWS):
        chunk = bodies.slice(start, _CHUNK_ROWS)
        chunk_errors = errors.slice(start, _CHUNK_ROWS)
        values = _read_json_chunk(chunk, values_type)
        if values is not None:
            parts.append(DecodedBodies(values, chunk_errors))
        else:
            parts.extend(_decode_in_small_chunks(chunk, body_format, chunk_errors))
    return DecodedBodies(*(pa.concat_arrays(arrays) for arrays in zip(*parts, strict=True)))


def _decode_in_small_chunks(
    bodies: Any, body_format: BodyFormat, errors: Any
) -> Iterator[DecodedBodies]:
    """Yield the columns of a chunk that Arrow cannot read as a whole, in parts.

    Most parts are read by Arrow. Only those that contain an unusual body are read one by one.
    """
    values_type = to_arrow_type(body_format.type)
    for start in range(0, len(bodies), _SMALL_CHUNK_ROWS):
        chunk = bodies.slice(start, _SMALL_CHUNK_ROWS)
        chunk_errors = errors.slice(start, _SMALL_CHUNK_ROWS)
        values = _read_json_chunk(chunk, values_type)
        if values is None:
            yield _decode_one_by_one(chunk, body_format, chunk_errors)
        else:
            yield DecodedBodies(values, chunk_errors)


def _decode_one_by_one(bodies: Any, body_format: BodyFormat, errors: Any) -> DecodedBodies:
    """Convert bodies with Python: the reference of `decode_bodies`."""
    convert = None if body_format.kind == TEXT else _make_json_converter(body_format.type)
    decoded: list[Any] = [None] * len(bodies)
    reasons: list[str | None] = errors.to_pylist()
    for row, body in enumerate(bodies.to_pylist()):
        if body is None:
            continue
        try:
            body_text = body.decode()
            decoded[row] = body_text if convert is None else convert(_parse_json(body_text))
        except (ValueError, RecursionError, _MisfitError) as error:
            reasons[row] = shorten_reason(_describe_bad_body(error))
    arrow_type = to_arrow_type(body_format.type)
    return DecodedBodies(pa.array(decoded, arrow_type), pa.array(reasons, pa.string()))


# ---- JSON, read by Arrow

_CHUNK_ROWS: Final = 16_384
_SMALL_CHUNK_ROWS: Final = 256
_ROW_FIELD: Final = f"row {secrets.token_hex(8)}"
"""The name of the field with the number of the row. No body contains it, because it is secret."""

_NUMBERS_OF_ARROW: Final = (b"NaN", b"Inf")
"""Words that Arrow reads as numbers, and JSON does not permit outside of strings."""


@cache
def _object_starts() -> Any:
    """Return a string column with the text before the body, for each row of a chunk."""
    name = json.dumps(_ROW_FIELD)
    return pa.array([f'{{{name}:{row},"body":' for row in range(_CHUNK_ROWS)], pa.string())


def _can_arrow_read(spark_type: DataType) -> bool:
    """Return whether Arrow reads values of this type as the reference does."""
    if isinstance(spark_type, ArrayType):
        return _can_arrow_read(spark_type.elementType)
    if isinstance(spark_type, StructType):
        names = [field.name for field in spark_type.fields]
        has_distinct_names = 0 < len(names) == len(set(names))
        return has_distinct_names and all(
            _can_arrow_read(field.dataType) for field in spark_type.fields
        )
    return type(spark_type) in _JSON_TYPES


def _read_json_chunk(bodies: Any, values_type: Any) -> Any | None:
    """Read a chunk of bodies with Arrow, and return them as a column of the type `values_type`.

    A null stays null. Return None if Arrow cannot read all bodies, or may read one of them in
    another way than the reference.
    """
    try:
        texts = bodies.cast(pa.string())  # raises if a body is not UTF-8
    except pa.ArrowInvalid:
        return None
    row_count = len(texts)
    objects = pc.binary_join_element_wise(
        _object_starts().slice(0, row_count), pc.fill_null(texts, "null"), "}\n", ""
    )
    data, offsets = get_data_and_offsets(objects)
    stream = bytes(data[offsets[0] : offsets[-1]])
    if any(constant in stream for constant in _NUMBERS_OF_ARROW):
        return None
    schema = pa.schema([pa.field(_ROW_FIELD, pa.int64()), pa.field("body", values_type)])
    try:
        table = arrow_json.read_json(
            pa.BufferReader(stream),
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(stream) + 1),
            parse_options=arrow_json.ParseOptions(
                explicit_schema=schema,
                newlines_in_values=True,
                unexpected_field_behavior="ignore",
            ),
        )
    except pa.ArrowInvalid:
        return None
    if len(table) != row_count or not _are_row_numbers(table.column(0)):
        return None
    return table.column(1).combine_chunks()


def _are_row_numbers(column: Any) -> bool:
    """Return whether a column contains the numbers of its rows, 0, 1, 2 and so on."""
    if column.null_count:
        return False
    return bool((np.asarray(column) == np.arange(len(column))).all())


# ---- JSON, read by Python


def _describe_bad_body(error: Exception) -> str:
    """Return the reason why a body cannot be read, from the error of its decoding."""
    if isinstance(error, UnicodeDecodeError):  # a ValueError, too
        return f"not UTF-8: {error.reason} at byte {error.start}"
    if isinstance(error, _MisfitError):
        return f"not of the schema: {error}"
    return f"not JSON: {error}"


def _reject_constant(constant: str) -> Any:
    """Raise ValueError for NaN and Infinity, which Python's parser would accept."""
    raise ValueError(f"{constant} is not a JSON number")


_parse_json: Final = json.JSONDecoder(parse_constant=_reject_constant).decode
_JSON_TYPES: Final[dict[type[DataType], tuple[tuple[type, ...], int]]] = {
    StringType: ((str,), 0),
    IntegerType: ((int,), 31),
    LongType: ((int,), 63),
    DoubleType: ((float, int), 0),
    FloatType: ((float, int), 0),
    BooleanType: ((bool,), 0),
}
"""For each Spark type, the Python types of its JSON values, and the bits of a whole number without
the sign (0 means no limit)."""


def _make_json_converter(spark_type: DataType, path: str = "body") -> JsonConverter:
    """Return a function that converts a JSON value into a value for a Spark type.

    null stays null. The function raises _MisfitError for a value of another type. `path` names the
    value in the text of the error, such as `body.legs[].to`.
    """
    # Arrow's own conversion would accept 1.5 as a whole number, and a string as a list of letters.
    # `bits` is the size of an integer without its sign; 0 for other types.
    accepted_types, bits = _JSON_TYPES.get(type(spark_type), ((), 0))
    expected = spark_type.simpleString()
    convert_inner: JsonConverter | None = float if float in accepted_types else None
    if isinstance(spark_type, StructType):
        accepted_types = (dict,)
        expected = "an object"
        convert_inner = _make_struct_converter(spark_type, path)
    elif isinstance(spark_type, ArrayType):
        accepted_types = (list,)
        expected = "a list"
        convert_inner = _make_list_converter(spark_type, path)
    limit = 1 << bits

    def convert(value: Any) -> Any:
        """Check that `value` has the expected type, and convert its items if it has any."""
        if value is None:
            return None
        if type(value) not in accepted_types or (bits and not -limit <= value < limit):
            raise _MisfitError(f"{path} is {json.dumps(value)[:40]}, not {expected}")
        if type(value) is str and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:  # JSON can contain it as an escape, but UTF-8 cannot
                raise _MisfitError(f"{path} contains half a surrogate pair") from None
        return value if convert_inner is None else convert_inner(value)

    return convert


def _make_struct_converter(spark_type: StructType, path: str) -> JsonConverter:
    """Return a function that converts a JSON object into a value for a struct type.

    `path` names the object in the texts of errors.
    """
    field_converters = {
        field.name: _make_json_converter(field.dataType, f"{path}.{field.name}")
        for field in spark_type.fields
    }

    def convert_struct(json_object: Any) -> Any:
        return {name: convert(json_object.get(name)) for name, convert in field_converters.items()}

    return convert_struct


def _make_list_converter(spark_type: ArrayType, path: str) -> JsonConverter:
    """Return a function that converts a JSON list into a value for an array type.

    `path` names the list in the texts of errors.
    """
    convert_element = _make_json_converter(spark_type.elementType, f"{path}[]")

    def convert_list(json_list: Any) -> Any:
        return [convert_element(element) for element in json_list]

    return convert_list


def shorten_reason(reason: str) -> str:
    """Return the first line of a reason, cut to `_REASON_LENGTH_MAX` characters."""
    return reason.splitlines()[0][:_REASON_LENGTH_MAX]
