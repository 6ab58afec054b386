"""Convert string columns of properties to typed columns.

The broker compares a property with a number by Integer.valueOf, Long.valueOf or Double.valueOf
(spec/filter.md §7). A promoted column uses the same functions (`filter.evaluate`), so that Spark
and the broker agree on every message. Each distinct value is converted once: simple decimal numbers
together in Arrow, all others one by one. A value that is not of the type becomes null.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluicemq import engine
from sluicemq.errors import FilterEvaluationError
from sluicemq.record.properties import in_row_order
from sluicemq.record.property_columns import get_data_and_offsets
from sluicemq.spark.schema import NUMBER_PARSERS

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
        return _parse_numbers(engine.decoding, texts, type_name, name)
    return _convert_texts(texts, type_name, name)


def _parse_numbers(
    decoding: ModuleType, texts: Any, type_name: str, name: str
) -> tuple[Any, int, str]:
    """Convert strings to numbers with the compiled module `decoding`.

    The other parameters and the result are those of `convert_property_column`. Values that the
    engine does not parse are converted by the reference.
    """
    row_count = len(texts)
    text_bytes, offsets = get_data_and_offsets(texts)
    lengths = np.diff(offsets).astype(np.int32)
    starts = offsets[:-1]
    if texts.null_count:
        starts[np.asarray(texts.is_null())] = -1  # stands for null
    values, states = decoding.numbers(
        text_bytes, starts, lengths, _DIGITS_MAX[type_name], type_name == "double"
    )
    states_by_row = np.frombuffer(states, np.uint8)
    value_type = np.float64 if type_name == "double" else np.int64
    is_unparsed = states_by_row != decoding.PARSED
    mask = is_unparsed if is_unparsed.any() else None
    numbers = np.frombuffer(values, value_type)
    if type_name == "int":
        numbers = numbers.astype(np.int32)  # up to nine digits: all fit
    column = pa.array(numbers, ARROW_TYPES[type_name], mask=mask)

    complex_rows = np.flatnonzero(states_by_row == decoding.COMPLEX)
    if not len(complex_rows):
        return column, 0, ""
    converted, bad_count, example = _convert_texts(texts.take(complex_rows), type_name, name)
    rows = [np.arange(row_count), complex_rows]
    return in_row_order([column, converted], rows, row_count), bad_count, example


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
