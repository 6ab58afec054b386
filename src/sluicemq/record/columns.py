"""The tags and properties of consecutive messages of one queue, as columns: what they look like.

A block holds, for every property name that occurs, the distinct values once and the number of its
value for every row, so that a filter looks at each distinct value once instead of at each message.
`columns_build` makes blocks of stored records; nothing heavy is loaded to speak of one.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

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
        columns = _Part(self.columns, slice(low, high))
        return ColumnBlock(start, high - low, columns, self.excluded, odd)

    def some(self, rows: "NDArray[np.intp]") -> "ColumnBlock":
        """Rows by their numbers, none of them odd: side by side, with offsets that mean nothing."""
        columns = _Part(self.columns, rows)
        return ColumnBlock(self.first_offset, len(rows), columns, self.excluded, self.odd[:0])


class _Part(Mapping[str, Column]):
    """Some rows of the columns of a block."""

    __slots__ = ("_columns", "_rows")

    def __init__(self, columns: Mapping[str, Column], rows: "slice | NDArray[np.intp]") -> None:
        self._columns = columns
        self._rows = rows

    def __getitem__(self, name: str) -> Column:
        codes, values = self._columns[name]
        return Column(codes[self._rows], values)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)
