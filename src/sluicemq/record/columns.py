"""Property columns: tags and properties of consecutive messages of a queue, and their statistics.

A `ColumnBlock` contains, for each property name that occurs, the distinct values and, for each row,
the index of its value. A filter examines each distinct value once instead of each message. The
module `arrow` builds blocks from stored records. Importing this module loads neither NumPy nor
Arrow.

With the statistics of a block a filter can skip the whole block (`filter.plan.can_match`). For each
column they say whether a row lacks the property, and either its distinct values, if these are few,
or the lowest and highest value, if these are many and all of them are plain numbers. A plain number
is one that Java's Integer, Long and Double and Python read in the same way. If one value is not a
plain number, the column has no range. The store keeps the statistics beside a sealed block as JSON.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Values(tuple[str, ...]):  # noqa: SLOT001 - a tuple of any length has no slots
    """The distinct values of a column.

    Filters store in `cache` what they have computed from the values, so that all filters that are
    matched with this column can use it.
    """

    cache: dict[object, Any]

    def __init__(self, _: Iterable[str] = ()) -> None:
        """Begin with an empty cache. The values themselves are set by `tuple.__new__`."""
        self.cache = {}


class Column(NamedTuple):
    """One property of a block.

    `codes[row]` is the index of the row's value in `values`; -1 if the message does not have the
    property. The codes are signed integers of the smallest sufficient width.
    """

    codes: "NDArray[np.signedinteger[Any]]"
    values: tuple[str, ...]


class ColumnBlock(NamedTuple):
    """The tags and properties of `rows` consecutive messages of one queue.

    - `first_offset` is the queue offset of row 0.
    - `excluded` are the names that occur and have no column, because they have too many distinct
      values for a column to be useful. Read the records instead. A name that is neither in
      `columns` nor in `excluded` occurs in no row.
    - `odd` are the rows that could not be decoded as columns. All their codes are -1. Read their
      records instead.
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

    def slice_offsets(self, start: int, stop: int) -> "ColumnBlock":
        """Return the rows with queue offsets in [start, stop) as a block.

        Both ends must be within this block. If these are all of its rows, the block itself is
        returned. The columns of the result may list values that occur in no row.
        """
        first_row = start - self.first_offset
        end_row = stop - self.first_offset
        if first_row == 0 and end_row == self.rows:
            return self
        odd = self.odd[(self.odd >= first_row) & (self.odd < end_row)] - first_row
        columns = self._take_columns(slice(first_row, end_row))
        return ColumnBlock(start, end_row - first_row, columns, self.excluded, odd)

    def take_rows(self, rows: "NDArray[np.intp]") -> "ColumnBlock":
        """Return the block of the rows with these indices, none of which may be odd.

        The queue offsets of the result have no meaning, because its rows need not be consecutive.
        """
        columns = self._take_columns(rows)
        return ColumnBlock(self.first_offset, len(rows), columns, self.excluded, self.odd[:0])

    def _take_columns(self, rows: "slice | NDArray[np.intp]") -> "LazyColumns":
        """Return the columns with only these rows. Each column is made when it is first read."""

        def make(name: str) -> Column:
            codes, values = self.columns[name]
            return Column(codes[rows], values)

        return LazyColumns(self.columns.keys(), make)


class LazyColumns(Mapping[str, Column]):
    """Columns by name, each created when it is first read.

    `names` are the keys of the mapping. `make(name)` returns the column of one of them, and raises
    KeyError for any other name. It is called once for each name that is read.
    """

    __slots__ = ("_columns", "_make", "_names")

    def __init__(self, names: Collection[str], make: Callable[[str], Column]) -> None:
        """Create the mapping. No column is created yet."""
        self._names = names
        self._make = make
        self._columns: dict[str, Column] = {}

    def __getitem__(self, name: str) -> Column:
        """Return a column, which is created at the first call. Raises KeyError."""
        column = self._columns.get(name)
        if column is None:
            column = self._make(name)
            self._columns[name] = column
        return column

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


VALUES_MAX: Final = 64
"""The most distinct values that the statistics of a column list."""
VALUES_CHARACTERS_MAX: Final = 2048
"""The most characters of these values together."""
# A whole number of 18 digits fits into 64 bits. If one number has a decimal point, all of them are
# read as floats: up to 15 digits before the point, so that whole numbers stay exact.
_PLAIN_WHOLE: Final = re.compile(r"(?:-?[0-9]{1,18}+,)*+")
_PLAIN_DECIMAL: Final = re.compile(r"(?:-?[0-9]{1,15}+(?:\.[0-9]{1,18}+)?+,)*+")


class ColumnStats(NamedTuple):
    """Statistics of one column.

    - `has_null` says whether a row lacks the property.
    - `values` are the distinct values if these are few, else None.
    - `low` and `high` are the lowest and highest value if `values` is None and all values are plain
      numbers: int if all numbers are whole, float if one has a decimal point. Otherwise both are
      None.
    """

    has_null: bool
    values: tuple[str, ...] | None
    low: int | float | None = None
    high: int | float | None = None


class BlockStats(NamedTuple):
    """Statistics of a block.

    A name that is neither in `columns` nor in `excluded` occurs in no row. A block with rows that
    could not be decoded (`has_odd`) can match every filter.
    """

    columns: Mapping[str, ColumnStats]
    excluded: frozenset[str] = frozenset()
    has_odd: bool = False


def compute_block_stats(block: ColumnBlock) -> BlockStats:
    """Return the statistics of a block.

    Takes some milliseconds if columns have thousands of distinct values.
    """
    columns = {name: compute_column_stats(column) for name, column in block.columns.items()}
    return BlockStats(columns, block.excluded, len(block.odd) > 0)


def compute_column_stats(column: Column) -> ColumnStats:
    """Compute the statistics of a column, with which filters can skip a whole block.

    They list the distinct values if there are at most VALUES_MAX, with VALUES_CHARACTERS_MAX
    characters together. Otherwise they have the lowest and highest value if all values are plain
    numbers.
    """
    values = column.values
    has_null = bool((column.codes < 0).any())
    if len(values) <= VALUES_MAX and sum(map(len, values)) <= VALUES_CHARACTERS_MAX:
        return ColumnStats(has_null, values)

    # One search in all values, each followed by a comma, is faster than one search for each value.
    joined = ",".join(values) + ","
    has_value_with_comma = joined.count(",") != len(values)
    if not has_value_with_comma:
        for pattern, parse in ((_PLAIN_WHOLE, int), (_PLAIN_DECIMAL, float)):
            if pattern.fullmatch(joined):
                numbers = list(map(parse, values))
                return ColumnStats(has_null, None, min(numbers), max(numbers))
    return ColumnStats(has_null, None)
