"""The tags and properties of consecutive messages of one queue, as columns, and figures about them.

A block holds, for every property name that occurs, the distinct values once and the number of its
value for every row, so that a filter looks at each distinct value once instead of at each message.
`arrow` makes blocks of stored records; nothing heavy is loaded to speak of one.

The figures let a filter leave out whole blocks (`filter.plan.can_match`). For each column: does a
row lack the property, its few values, or, where there are many and all are numbers written plainly,
the least and the greatest. Plain is what every reader of numbers (Java's Integer, Long and Double,
Python's) understands in the same way; a column with one other value has no range. The store keeps
the figures beside a sealed block as JSON.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Values(tuple[str, ...]):  # noqa: SLOT001 - a tuple of any length has no slots
    """The distinct values of a column; `notes` is what readers have found out about them (numbers,
    places), so that the next filter need not."""

    notes: dict[object, Any]

    def __init__(self, _: Iterable[str] = ()) -> None:
        self.notes = {}


class Column(NamedTuple):
    """One property of a block.

    `codes[row]` is the number of its value in `values`, -1 where the message has no such property;
    signed, of the smallest width that fits.
    """

    codes: "NDArray[np.signedinteger[Any]]"
    values: tuple[str, ...]


class ColumnBlock(NamedTuple):
    """The tags and properties of `rows` consecutive messages of one queue.

    Row 0 has the queue offset `first_offset`. A name in `excluded` occurs but is no column here
    (it has too many values to be worth one): ask the record. A name that is in neither `columns`
    nor `excluded` occurs in no row. The rows in `odd` could not be decoded as columns: their codes
    are -1 everywhere, and the record decides.
    """

    first_offset: int
    rows: int
    columns: Mapping[str, Column]
    excluded: frozenset[str]
    odd: "NDArray[np.int64]"

    @property
    def end(self) -> int:
        """The queue offset behind the last row."""
        return self.first_offset + self.rows

    def part(self, start: int, stop: int) -> "ColumnBlock":
        """The rows of the queue offsets [start, stop). `values` may hold some that none has."""
        low, high = start - self.first_offset, stop - self.first_offset
        if low == 0 and high == self.rows:
            return self
        odd = self.odd[(self.odd >= low) & (self.odd < high)] - low
        columns = self._rows_of_columns(slice(low, high))
        return ColumnBlock(start, high - low, columns, self.excluded, odd)

    def some(self, rows: "NDArray[np.intp]") -> "ColumnBlock":
        """Rows by their numbers, none of them odd: side by side, with offsets that mean nothing."""
        columns = self._rows_of_columns(rows)
        return ColumnBlock(self.first_offset, len(rows), columns, self.excluded, self.odd[:0])

    def _rows_of_columns(self, rows: "slice | NDArray[np.intp]") -> "LazyColumns":
        def make(name: str) -> Column:
            codes, values = self.columns[name]
            return Column(codes[rows], values)

        return LazyColumns(self.columns.keys(), make)


class LazyColumns(Mapping[str, Column]):
    """Columns of these names, each made when first asked for."""

    __slots__ = ("_known", "_make", "_names")

    def __init__(self, names: Collection[str], make: Callable[[str], Column]) -> None:
        self._names = names
        self._make = make
        self._known: dict[str, Column] = {}

    def __getitem__(self, name: str) -> Column:
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._make(name)
        return known

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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
    joined = ",".join(values) + ","
    if joined.count(",") == len(values):  # a value with a comma is no number
        for plain, read in ((_PLAIN_WHOLE, int), (_PLAIN_DECIMAL, float)):
            if plain.fullmatch(joined):
                numbers = list(map(read, values))
                return ColumnStats(has_null, None, min(numbers), max(numbers))
    return ColumnStats(has_null, None)
