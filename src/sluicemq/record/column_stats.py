"""What is known of a block of columns without reading it: enough to leave out whole blocks.

For each column: does a row lack the property, its few values, or, where there are many and all are
numbers written plainly, the least and the greatest. Plain is what every reader of numbers (Java's
Integer, Long and Double, Python's) understands in the same way; a column with one other value has
no range. The store keeps the figures beside a sealed block (they are JSON: strings, numbers, null),
a filter asks `sluicemq.filter.pruning` whether they can match.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from sluicemq.record.columns import Column, ColumnBlock

VALUES_MAX: Final = 64
VALUES_CHARACTERS_MAX: Final = 2048
# A whole number of 18 digits fits in 64 bits. With a decimal among them all become floats: up to 15
# digits before the dot, so that a whole one stays exactly what it is.
_PLAIN_WHOLE: Final = re.compile(r"(?:-?[0-9]{1,18}+,)*+")
_PLAIN_DECIMAL: Final = re.compile(r"(?:-?[0-9]{1,15}+(?:\.[0-9]{1,18}+)?+,)*+")


class ColumnStats(NamedTuple):
    """One column. `values` are all distinct ones, None when there are too many of them; `low` and
    `high` the range of the numbers: int when all are whole, float when one has a dot, None when one
    is no plain number."""

    has_null: bool
    values: tuple[str, ...] | None
    low: int | float | None = None
    high: int | float | None = None


class BlockStats(NamedTuple):
    """A block. A name that is in neither `columns` nor `excluded` occurs in no row; a block with
    rows that could not be decoded (`has_odd`) can always match."""

    columns: Mapping[str, ColumnStats]
    excluded: frozenset[str] = frozenset()
    has_odd: bool = False


def block_stats(block: ColumnBlock) -> BlockStats:
    """The figures of a whole block: some milliseconds where there are thousands of values."""
    columns = {name: column_stats(column) for name, column in block.columns.items()}
    return BlockStats(columns, block.excluded, len(block.odd) > 0)


def column_stats(column: Column) -> ColumnStats:
    """The figures of one column."""
    values = column.values
    has_null = bool((column.codes < 0).any())
    if len(values) <= VALUES_MAX and sum(map(len, values)) <= VALUES_CHARACTERS_MAX:
        return ColumnStats(has_null, values)
    return ColumnStats(has_null, None, *_range(values))


def _range(values: tuple[str, ...]) -> tuple[int | float | None, int | float | None]:
    joined = ",".join(values) + ","
    if joined.count(",") != len(values):  # a value with a comma is no number
        return None, None
    if _PLAIN_WHOLE.fullmatch(joined):
        whole = list(map(int, values))
        return min(whole), max(whole)
    if _PLAIN_DECIMAL.fullmatch(joined):
        numbers = list(map(float, values))
        return min(numbers), max(numbers)
    return None, None
