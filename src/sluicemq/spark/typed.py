"""Texts of promoted properties -> typed Arrow columns, exactly as Java reads them.

The broker compares a property with a number by Integer.valueOf, Long.valueOf or Double.valueOf
(spec/filter.md §7). A promoted column follows the same functions (`filter.java`), so that Spark and
the broker agree on every message. Each distinct text is looked at once: plain decimal numbers all
together in Arrow, the others one by one. A text that is no value of the type becomes null.
"""

from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.java import boolean_of, double_of, integer_of, long_of

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
    values = _values(distinct, kind, name)
    column = values.take(encoded.indices)
    bad = column.null_count - texts.null_count
    if not bad:
        return column, 0, ""
    example = distinct.filter(values.is_null())[0].as_py()
    return column, bad, example


def _values(distinct: Any, kind: str, name: str) -> Any:
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
