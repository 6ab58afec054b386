"""Convert columns of decoded records: bodies to strings or structs, properties to typed columns.

The broker compares a property with a number by Integer.valueOf, Long.valueOf or Double.valueOf
(spec/filter.md §7). A promoted column uses the same functions (`filter.evaluate`), so that Spark
and the broker agree on every message. Each distinct value is converted once: simple decimal numbers
together in Arrow, all others one by one. A value that is not of the type becomes null.
"""

import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
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

from sluicemq import engine
from sluicemq.errors import FilterEvaluationError
from sluicemq.record.properties import in_row_order
from sluicemq.spark.schema import NUMBER_PARSERS, TEXT, BodyFormat

_REASON_LENGTH_MAX: Final = 200


# ---- bodies

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
    convert: JsonConverter | None = None
    if body_format.kind == TEXT:
        # All bodies at once; they are read one by one only if a body is not UTF-8.
        try:
            return DecodedBodies(bodies.cast(pa.string()), errors)
        except pa.ArrowInvalid:
            pass
    else:
        convert = _make_json_converter(body_format.type)

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


# ---- promoted properties

ARROW_TYPES: Final[dict[str, Any]] = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
}
_SIMPLE_NUMBERS: Final = {
    "int": r"^-?[0-9]{1,9}$",
    "bigint": r"^-?[0-9]{1,18}$",
    "double": r"^-?[0-9]{1,15}(\.[0-9]{1,15})?$",
}
"""Values that Arrow's cast reads as Java does. Arrow also accepts 0x10 as a whole number."""
_DIGITS_MAX: Final = {"int": 9, "bigint": 18, "double": 15}
"""The most digits of the numbers that the compiled engine parses, which are among these values."""


def _parse_boolean(text: str, _name: str) -> bool:
    """Return True for "true" and False for "false", in any case. Raises KeyError for others.

    Java would read every other text as false.
    """
    return {"true": True, "false": False}[text.lower()]


_PARSERS: Final[dict[str, Callable[[str, str], Any]]] = {
    **dict(NUMBER_PARSERS),
    "boolean": _parse_boolean,
}
"""For each type but string, a function (text, property name) -> value."""


def convert_property_column(texts: Any, type_name: str, name: str) -> tuple[Any, int, str]:
    """Convert a string column of the property `name` to the type `type_name`.

    Return (column, number of bad values, one bad value). A bad value is a string that is not of the
    type. It becomes null in the column. The third item is "" if there is no bad value.
    """
    if type_name == "string":
        return texts, 0, ""
    if engine.decoding is not None and type_name in _DIGITS_MAX:
        return _parse_numbers(texts, type_name, name)
    return _convert_texts(texts, type_name, name)


def _parse_numbers(texts: Any, type_name: str, name: str) -> tuple[Any, int, str]:
    """Convert strings to numbers with the compiled engine.

    The parameters and the result are those of `convert_property_column`. Values that the engine
    does not parse are converted by the reference.
    """
    row_count = len(texts)
    starts, lengths, text_bytes = _find_texts(texts)
    values, states = engine.decoding.numbers(
        text_bytes, starts, lengths, _DIGITS_MAX[type_name], type_name == "double"
    )
    states_by_row = np.frombuffer(states, np.uint8)
    value_type = np.float64 if type_name == "double" else np.int64
    is_missing = states_by_row != engine.decoding.PARSED
    mask = is_missing if is_missing.any() else None
    numbers = np.frombuffer(values, value_type)
    if type_name == "int":
        numbers = numbers.astype(np.int32)  # up to nine digits: all fit
    column = pa.array(numbers, ARROW_TYPES[type_name], mask=mask)

    complex_rows = np.flatnonzero(states_by_row == engine.decoding.COMPLEX)
    if not len(complex_rows):
        return column, 0, ""
    converted, bad_count, example = _convert_texts(texts.take(complex_rows), type_name, name)
    rows = [np.arange(row_count), complex_rows]
    return in_row_order([column, converted], rows, row_count), bad_count, example


def _find_texts(texts: Any) -> tuple[Any, Any, Any]:
    """Return (starts, lengths, data): where the strings of a string column are in its data.

    The starts are int64, -1 for null, and the lengths int32.
    """
    if not len(texts):
        return np.empty(0, np.int64), np.empty(0, np.int32), b""
    _, offset_buffer, data_buffer = texts.buffers()
    all_offsets = np.frombuffer(offset_buffer, np.int32)
    offsets = all_offsets[texts.offset : texts.offset + len(texts) + 1]
    starts = offsets[:-1].astype(np.int64)
    if texts.null_count:
        starts[np.asarray(texts.is_null())] = -1
    return starts, np.diff(offsets), memoryview(data_buffer or b"").cast("B")


def _convert_texts(texts: Any, type_name: str, name: str) -> tuple[Any, int, str]:
    """Convert a string column by its distinct values: `convert_property_column` in Python."""
    # Each distinct text is converted once.
    encoded = texts.dictionary_encode()
    distinct_texts = encoded.dictionary
    distinct_values = _convert_distinct_texts(distinct_texts, type_name, name)
    column = distinct_values.take(encoded.indices)
    bad_count = column.null_count - texts.null_count
    if not bad_count:
        return column, 0, ""
    bad_texts = distinct_texts.filter(distinct_values.is_null())
    return column, bad_count, bad_texts[0].as_py()


def _convert_distinct_texts(texts: Any, type_name: str, name: str) -> Any:
    """Convert strings to the type `type_name`, with null in place of bad values.

    `name` is the property, for errors.
    """
    arrow_type = ARROW_TYPES[type_name]
    # Arrow converts simple numbers quickly. All other values are converted one by one.
    is_simple = pa.array([False] * len(texts), pa.bool_())
    if type_name in _SIMPLE_NUMBERS:
        is_simple = pc.match_substring_regex(texts, _SIMPLE_NUMBERS[type_name])
    if is_simple.true_count == len(texts):
        return texts.cast(arrow_type)

    null = pa.scalar(None, pa.string())
    parsed: list[Any] = []
    for text in pc.if_else(is_simple, null, texts).to_pylist():
        try:
            parsed.append(None if text is None else _PARSERS[type_name](text, name))
        except (FilterEvaluationError, KeyError):
            parsed.append(None)
    parsed_values = pa.array(parsed, arrow_type)
    if not is_simple.true_count:
        return parsed_values
    simple_values = pc.if_else(is_simple, texts, null).cast(arrow_type)
    return pc.if_else(is_simple, simple_values, parsed_values)
