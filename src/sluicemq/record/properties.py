"""The properties of many messages at once: `name 0x01 value 0x02 …`.

Messages of one topic nearly always carry the same names in the same order, or one of a few such
sequences. So rows are sorted into *shapes*: all rows of a shape have exactly the same names in the
same order, and the j-th value of every row is one column of places; names need no work a row. The
first row that has no shape yet is the template of the next one, and rows that do not fit it wait
for another. A row that fits no shape (a name without a value, a name twice, names that are not
UTF-8, or one shape too many) is *odd*: `codec.decode_properties` decodes it, alone.

A few rows beside the template give a guess which values are the same everywhere and which have the
same length. Then all rows are followed along it together:

    UNIQ_KEY 1 [32 bytes] 2 WAIT 1 true 2 TAGS 1 [?] 2 price 1 [?] 2 CLUSTER 1 DefaultCluster 2
    ------------------------------------- --------   ---------   ------------------------------
    unknown, of one length   known        unknown    unknown     known

- *Known* values are compared together with the names around them, as one text.
- Of an *unknown* value one gather takes the name and the first word; the value ends at the first
  separator (`texts.first_separators`), or where all of them end.

A guess that some row disproves costs time, and nothing else: known values are then looked at one by
one, and what still differs is unknown; a length is searched. A row without one of the names is left
behind. No value that was passed holds a separator, so a row that ends where the template ends has
these names and values and no others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sluicemq.record.codec import decode_properties
from sluicemq.record.table import Bytes, Positions, column_of, equal_rows, rows_at
from sluicemq.record.texts import SEPARATOR, ValuePlaces, everywhere, first_separators, texts

SAMPLE_ROWS: Final = 8
_LENGTH_GUESSED_MIN: Final = 8
"""Shorter values are found by their first word at the same cost."""
_LENGTH_GUESSED_MAX: Final = 128
_NAME_VALUE: Final = b"\x01"
_END: Final = bytes((SEPARATOR,))

Guess = bytes | int
"""A value that all rows have, or the length of all; 0: unknown."""
Pairs = list[tuple[bytes, bytes]]


def pairs_of(text: bytes) -> Pairs | None:
    """Names and values of one row; None when it is not regular: name, 0x01, value in turn, neither
    empty, no name twice, names in UTF-8. A value may hold 0x01: the first one ends the name."""
    text = text.removesuffix(_END)
    if not text:
        return []
    pairs = []
    for piece in text.split(_END):
        name, _, value = piece.partition(_NAME_VALUE)
        if not name or not value:
            return None
        pairs.append((name, value))
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names) or not _is_utf8(_END.join(names)):
        return None
    return pairs


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def guesses(pairs: Pairs, sample: Sequence[bytes]) -> list[Guess]:
    """A guess for each value of a row, from the texts of some rows. When no separator ends the last
    value, no text is guessed for it: literals end with one."""
    names, found = [name for name, _ in pairs], [[value for _, value in pairs]]
    for text in sample:
        parts = text.replace(_END, _NAME_VALUE).split(_NAME_VALUE)
        if parts[:-1:2] == names:
            found.append(parts[1::2])
    known = [_guess(set(values)) for values in zip(*found, strict=True)]
    if known and not sample[0].endswith(_END):
        known[-1] = 0
    return known


def _guess(values: set[bytes]) -> Guess:
    if len(values) == 1:
        return values.pop()
    lengths = {len(value) for value in values}
    length = lengths.pop()
    return 0 if lengths or not _LENGTH_GUESSED_MIN <= length <= _LENGTH_GUESSED_MAX else length


class Follower:
    """Rows of properties on their way along a template. `rows` are those that fit so far, numbers
    of `starts`; None is all of them. `values`: those passed already, a name each.

    Between two steps each row stands where it ends or where a separator is.
    """

    def __init__(self, raw: Bytes, starts: Positions, ends: Positions) -> None:
        self.rows: Positions | None = None
        self.values: list[ValuePlaces] = []
        self._raw = raw
        self._at = starts
        self._ends = ends
        self._before = b""

    def follow(self, names: Sequence[bytes], known: Sequence[Guess]) -> None:
        """Goes along the whole template."""
        pairs = zip(names, known, strict=True)
        for is_known, run in groupby(pairs, lambda pair: isinstance(pair[1], bytes)):
            if is_known:
                self._pass_known(cast("Pairs", list(run)))
            else:
                for name, length in run:
                    self._pass_unknown(name, cast("int", length))
        left = self._ends - self._at
        self._keep((left == 0) | (left == 1))  # the last separator may be missing

    def _pass_known(self, pairs: Pairs) -> None:
        """Names with the values that all rows should have. If they have not: one by one, and a
        single value as if nothing were known."""
        literal, places = _literal(pairs, self._before)
        if everywhere(self._raw, self._at, literal):
            for place, (_, value) in zip(places, pairs, strict=True):
                self.values.append(ValuePlaces(self._raw, self._at + place, len(value), value))
            self._pass(len(literal) - len(_END))
        elif len(pairs) > 1:
            for pair in pairs:
                self._pass_known([pair])
        else:
            self._pass_unknown(pairs[0][0], 0)

    def _pass_unknown(self, name: bytes, length: int) -> None:
        """A name with its value, which has the length in all rows, or any for 0. One gather takes
        the name and as much of the value."""
        literal = self._before + name + _NAME_VALUE
        width = len(literal)
        block = rows_at(self._raw, self._at, width + (length + 1 if length else 8))
        same = equal_rows(block, literal)
        if not same.all():
            self._keep(same)
            block = block[same]
        self._pass(width)
        if length and _is_length(block[:, width:], length):
            value = block[:, width : width + length]
            self.values.append(ValuePlaces(self._raw, self._at, length, block=value))
            self._pass(length)
            return
        words = column_of(block, width, "<u8").copy()
        lengths = first_separators(self._raw, self._at, words, self._ends - self._at)
        self.values.append(ValuePlaces(self._raw, self._at, lengths, words=words))
        self._pass(lengths)
        self._keep(lengths > 0)

    def _pass(self, lengths: Positions | int) -> None:
        self._at = self._at + lengths
        self._before = _END

    def _keep(self, fits: NDArray[np.bool_]) -> None:
        """Leaves the other rows behind."""
        if fits.all():
            return
        kept = np.flatnonzero(fits)
        self.rows = kept if self.rows is None else self.rows[kept]
        self._at, self._ends = self._at[kept], self._ends[kept]
        self.values = [value.part(kept) for value in self.values]


def _is_length(block: Bytes, length: int) -> bool:
    """Whether the only separator of each row stands after `length` bytes, at its end."""
    marks = block == SEPARATOR
    return bool(marks[:, length].all()) and np.count_nonzero(marks) == len(marks)


def _literal(pairs: Pairs, before: bytes) -> tuple[bytes, list[int]]:
    """The bytes of names and values with the separator that ends them, and where in them each value
    begins."""
    literal, places = before, []
    for name, value in pairs:
        literal += name + _NAME_VALUE
        places.append(len(literal))
        literal += value + _END
    return literal, places


SHAPES_MAX = 64
"""Each shape costs a fixed 100 to 200 µs a block; rows of further shapes go the odd way."""

_SCATTER = 40_503
"""Rows of a sample are so far from each other (modulo their number): not in step with what recurs
every few rows."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows with the same names. `rows` is None for all rows of the block, in order; `starts` is
    where the properties of each row begin."""

    names: tuple[bytes, ...]
    rows: Positions | None
    starts: Positions
    values: tuple[ValuePlaces, ...]


@dataclass(frozen=True, slots=True)
class Properties:
    """The properties of a block of `count` rows."""

    count: int
    shapes: list[Shape]
    odd_rows: Positions
    odd: list[dict[str, str]]


def read_properties(raw: Bytes, starts: Positions, lengths: Positions) -> Properties:
    """Sorts the rows whose properties lie at these places into shapes. What is found refers to
    `raw`; arrays made of it do not."""
    ends = starts + lengths
    shapes: list[Shape] = []
    odd: list[int] = []
    left = np.arange(len(starts))
    while len(left) and len(shapes) < SHAPES_MAX:
        first = int(left[0])
        pairs = pairs_of(raw[starts[first] : ends[first]].tobytes())
        if pairs is None:
            odd.append(first)
            left = left[1:]
        else:
            shape, left = _shape_of(pairs, raw, starts, ends, left)
            shapes.append(shape)
    odd_rows = np.sort(np.array([*odd, *left.tolist()], np.int64))
    decoded = [decode_properties(raw[starts[row] : ends[row]].data) for row in odd_rows.tolist()]
    return Properties(len(starts), shapes, odd_rows, decoded)


def _shape_of(
    pairs: Pairs, raw: Bytes, starts: Positions, ends: Positions, left: Positions
) -> tuple[Shape, Positions]:
    """The shape of the first row that is left, which has these names; and the rows that are left
    then."""
    chosen = left[np.arange(SAMPLE_ROWS) * _SCATTER % len(left)].tolist()
    sample = [raw[starts[row] : ends[row]].tobytes() for row in chosen]
    whole = len(left) == len(starts)
    if not whole:
        starts, ends = starts[left], ends[left]
    names = tuple(name for name, _ in pairs)
    follower = Follower(raw, starts, ends)
    follower.follow(names, guesses(pairs, sample))
    values = tuple(follower.values)
    if follower.rows is None:
        return Shape(names, None if whole else left, starts, values), left[:0]
    inside = follower.rows
    return Shape(names, left[inside], starts[inside], values), np.delete(left, inside)


def shape_arrays(
    found: Properties,
    column: Callable[[Shape], Any],
    odd_column: Callable[[list[dict[str, str]]], Any],
) -> Any:
    """`column(shape)` of every shape and `odd_column(dicts)`, put back into the order of rows."""
    parts = [column(shape) for shape in found.shapes]
    if len(parts) == 1 and found.shapes[0].rows is None:
        return parts[0]
    rows = [shape.rows for shape in found.shapes if shape.rows is not None]
    if found.odd:
        parts.append(odd_column(found.odd))
        rows.append(found.odd_rows)
    if not parts:
        return odd_column([])
    order = np.empty(found.count, np.int64)
    order[np.concatenate(rows)] = np.arange(found.count)
    return pa.concat_arrays(parts).take(pa.array(order))


def text_column(found: Properties, name: str) -> Any:
    """The values of one property as a pa.string() array, null where a message has none."""
    wanted = name.encode()

    def column(shape: Shape) -> Any:
        if wanted not in shape.names:
            return pa.nulls(len(shape.starts), pa.string())
        return texts([shape.values[shape.names.index(wanted)]], len(shape.starts))

    def odd_column(rows: list[dict[str, str]]) -> Any:
        return pa.array([row.get(name) for row in rows], pa.string())

    return shape_arrays(found, column, odd_column)
