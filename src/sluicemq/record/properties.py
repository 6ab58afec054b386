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
  separator (`first_separators`), or where all of them end.

A guess that some row disproves costs time, and nothing else: known values are then looked at one by
one, and what still differs is unknown; a length is searched. A row without one of the names is left
behind. No value that was passed holds a separator, so a row that ends where the template ends has
these names and values and no others.

*To Arrow.* Values of one length are gathered in one NumPy step. Values of many lengths become Arrow
*views* (16 bytes: the length, then the value itself when it has at most 12 bytes, else its first 4
bytes, a buffer number and an offset), which Arrow copies into an ordinary array at memory speed.
The 16 bytes that begin 4 before a value already hold both its inline form and its prefix, so one
gather writes nearly all of a view.

Short texts of many lengths are written as whole words: what is too much of one, at most 7 bytes,
lies where the next texts have their first words. So the first words are written last and in order,
and each covers what the one before left. A word costs 5 to 10 ns, a view 20 to 35 a text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sluicemq.record.codec import decode_properties
from sluicemq.record.table import (
    HEX_PAIRS,
    Bytes,
    Positions,
    column_of,
    equal_rows,
    gather,
    rows_at,
    view_of,
)

INLINE_BYTES_MAX = 12
"""Longest value that a view holds itself (Arrow columnar format, "Variable-size Binary View")."""
_VIEW_BYTES = 16
_PIECE_BYTES = 256 * 1024


def words_at(raw: Bytes, starts: Positions) -> NDArray[np.uint64]:
    """The 8 bytes from each start on as a number, the first one lowest; zeros behind the end."""
    return rows_at(raw, starts, 8).reshape(-1).view("<u8")


def everywhere(raw: Bytes, starts: Positions, text: bytes) -> bool:
    """Whether these bytes stand at all of the starts. Looked at in pieces that stay in the
    processor's cache; in a piece, the first row is the text and each is as the one before."""
    width = len(text)
    step = max(1, _PIECE_BYTES // width)
    for begin in range(0, len(starts), step):
        flat = rows_at(raw, starts[begin : begin + step], width).reshape(-1)
        if flat[:width].tobytes() != text or not (flat[width:] == flat[:-width]).all():
            return False
    return True


def variable(raw: Bytes, starts: Positions, lengths: Positions, kind: Any) -> Any:
    """An array of pa.binary() or pa.string() of the values at these places."""
    count = len(starts)
    if count and (lengths == lengths[0]).all():
        length = int(lengths[0])
        data = gather(raw, starts, f"V{length}") if length else np.empty(0, np.uint8)
        buffers = [None, even_offsets(count, length), pa.py_buffer(data)]
        return pa.Array.from_buffers(kind, count, buffers)
    if len(raw) < _VIEW_BYTES:
        raw = np.concatenate((raw, np.zeros(_VIEW_BYTES, np.uint8)))
    last = len(raw) - _VIEW_BYTES
    begins = starts - 4
    near = np.flatnonzero((begins < 0) | (begins > last))
    if len(near):
        begins = np.clip(begins, 0, last)
    views = gather(raw, begins, f"V{_VIEW_BYTES}").view(np.int32).reshape(-1, 4)
    for row in near:  # too near an end of the buffer for a gather
        start = int(starts[row])
        piece = raw[start : start + min(int(lengths[row]), INLINE_BYTES_MAX)].tobytes()
        views[row, 1:] = np.frombuffer(piece.ljust(INLINE_BYTES_MAX, b"\0"), np.int32)
    views[:, 0] = lengths
    long = np.flatnonzero(lengths > INLINE_BYTES_MAX)
    views[long, 2] = 0
    views[long, 3] = starts[long]
    form = pa.string_view() if pa.types.is_string(kind) else pa.binary_view()
    buffers = [None, pa.py_buffer(views), pa.py_buffer(raw)]
    return pa.Array.from_buffers(form, count, buffers).cast(kind)


def even_offsets(count: int, length: int) -> Any:
    """The buffer 0, length, 2*length, … of count + 1 offsets."""
    return pa.py_buffer(
        np.arange(0, (count + 1) * length, length, dtype=np.int32)
        if length
        else np.zeros(count + 1, np.int32)
    )


class Repeated:
    """Some texts, n times in a row. Kept and sliced, since blocks of one topic repeat them."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, ...], Any] = {}

    def array(self, texts: tuple[bytes, ...], rows: int) -> Any:
        """A pa.string() array of all of them for each of the rows."""
        known, wanted = self._known.get(texts), rows * len(texts)
        if known is None or len(known) < wanted:
            if len(self._known) > 64:
                self._known.clear()
            offsets = np.zeros(wanted + 1, np.int32)
            np.cumsum(np.tile(np.array([*map(len, texts)], np.int32), rows), out=offsets[1:])
            buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts) * rows)]
            known = self._known[texts] = pa.Array.from_buffers(pa.string(), wanted, buffers)
        return known.slice(0, wanted)


def hexadecimal(data: Bytes) -> Any:
    """Rows of bytes (2-d) -> pa.string() of upper-case hex digits."""
    count, width = data.shape
    digits = HEX_PAIRS[data]
    return pa.Array.from_buffers(
        pa.string(), count, [None, even_offsets(count, 2 * width), pa.py_buffer(digits)]
    )


Words = NDArray[np.uint64]

SEPARATOR: Final = 2
"""The byte that ends a value (spec/store.md §2.3)."""
_WORD: Final = 8
_NEAR: Final = 24
_WINDOW: Final = 64
_WRITTEN_MAX: Final = 32
"""Longest text written in words."""
_ASCII_END: Final = 0x80
_ONES: Final = np.uint64(0x0101010101010101)
_HIGHS: Final = np.uint64(0x8080808080808080)
_SEPARATORS: Final = np.uint64(0x0202020202020202)
_ONE, _SEVEN, _TOP = np.uint64(1), np.uint64(7), np.uint64(56)


@dataclass(frozen=True, slots=True)
class ValuePlaces:
    """The values of one name, where they lie in `raw`. `lengths` is a number when all have that
    length; `text` is what they all are; `words` the first 8 bytes of each, with what follows a
    shorter one; `block` all their bytes as a matrix."""

    raw: Bytes
    starts: Positions
    lengths: Positions | int
    text: bytes | None = None
    words: Words | None = None
    block: Bytes | None = None

    @property
    def longest(self) -> int:
        if isinstance(self.lengths, int):
            return self.lengths
        return int(self.lengths.max(initial=0))

    def part(self, rows: NDArray[Any]) -> "ValuePlaces":
        """Some of the rows."""
        return ValuePlaces(
            self.raw,
            self.starts[rows],
            self.lengths if isinstance(self.lengths, int) else self.lengths[rows],
            self.text,
            None if self.words is None else self.words[rows],
            None if self.block is None else self.block[rows],
        )

    def first_words(self) -> Words | np.uint64:
        """The first 8 bytes of each value, one number when they are all the same."""
        if self.text is not None:
            return _word(self.text)
        return words_at(self.raw, self.starts) if self.words is None else self.words


def _word(text: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(text[:_WORD], "little"))


def first_separators(raw: Bytes, starts: Positions, words: Words, room: Positions) -> Positions:
    """How many bytes lie before the next separator from each start on, at most `room`. `words` are
    the first ones; the next words are looked at as long as many values end soon, then more."""
    lengths = _before_separator(words)
    rows = np.flatnonzero(lengths == _WORD)
    for at in range(_WORD, _NEAR, _WORD):
        if not len(rows):
            break
        more = _before_separator(words_at(raw, starts[rows] + at))
        lengths[rows] += more
        rows = rows[more == _WORD]
    if len(rows):
        marks = rows_at(raw, starts[rows] + _NEAR, _WINDOW + 1) == SEPARATOR
        marks[:, _WINDOW] = True
        lengths[rows] += marks.argmax(axis=1)
        rows = rows[lengths[rows] == _NEAR + _WINDOW]
    if len(rows):
        # Every byte up to the end of the room is looked at.
        some = np.maximum(room[rows], 0)
        _, offsets, data = variable(raw, starts[rows], some, pa.binary()).buffers()
        bounds = np.frombuffer(offsets, np.int32, len(rows) + 1).astype(np.int64)
        size = int(bounds[-1])
        text = np.frombuffer(data, np.uint8, size) if size else np.empty(0, np.uint8)
        places = np.append(np.flatnonzero(text == SEPARATOR), size)
        found = places[np.searchsorted(places, bounds[:-1])] - bounds[:-1]
        lengths[rows] = np.minimum(found, some)
    return np.minimum(lengths, room)


def _before_separator(words: Words) -> Positions:
    """The number of bytes before the first separator in each word; 8 without one."""
    zeros = words ^ _SEPARATORS
    marks = (zeros - _ONES) & ~zeros & _HIGHS  # exact up to and with the lowest
    below = (marks - _ONE) & ~marks & _HIGHS
    counts: Positions = (((below >> _SEVEN) * _ONES) >> _TOP).view(np.int64)
    return counts


# --- to Arrow


def texts(columns: Sequence[ValuePlaces], rows: int) -> Any:
    """A pa.string() array of the values row by row: those of row 0 in all columns, of row 1, …"""
    if len(columns) == 1 and isinstance(length := columns[0].lengths, int):
        column = columns[0]
        if column.text is not None:
            data = np.frombuffer(column.text * rows, np.uint8)
        elif column.block is not None:
            data = np.ascontiguousarray(column.block).reshape(-1)
        else:
            data = rows_at(column.raw, column.starts, length).reshape(-1)
        return _readable(rows, even_offsets(rows, length), data)
    if max((column.longest for column in columns), default=0) > _WRITTEN_MAX:
        return _long(columns, rows)
    lengths = np.empty((rows, len(columns)), np.int32)
    words = np.empty((rows, len(columns)), np.uint64)
    for turn, column in enumerate(columns):
        lengths[:, turn] = column.lengths
        words[:, turn] = column.first_words()
    offsets = np.zeros(lengths.size + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    size = int(offsets[-1])
    data = np.empty(size + _WORD, np.uint8)
    places = offsets[:-1].reshape(lengths.shape)
    target = view_of(data, "<u8")
    for turn, column in enumerate(columns):  # their words after the first ones
        own = places[:, turn]
        for at in range(_WORD, column.longest, _WORD):
            if column.text is not None:
                target[own + at] = _word(column.text[at:])
            elif isinstance(column.lengths, int):
                target[own + at] = words_at(column.raw, column.starts + at)
            else:
                some = np.flatnonzero(column.lengths > at)
                target[own[some] + at] = words_at(column.raw, column.starts[some] + at)
    target[places.reshape(-1)] = words.reshape(-1)
    return _readable(lengths.size, offsets, data[:size])


def _long(columns: Sequence[ValuePlaces], rows: int) -> Any:
    """By Arrow's views, which is the faster the longer the texts are."""
    shape = (rows, len(columns))
    starts, lengths = np.empty(shape, np.int64), np.empty(shape, np.int64)
    for turn, column in enumerate(columns):
        starts[:, turn] = column.starts
        lengths[:, turn] = column.lengths
    found = variable(columns[0].raw, starts.reshape(-1), lengths.reshape(-1), pa.binary())
    _, offsets, data = found.buffers()
    return _readable(len(found), offsets, np.frombuffer(data, np.uint8))


def _readable(count: int, offsets: Any, data: Bytes) -> Any:
    """The string array, what is not UTF-8 in it replaced as `bytes.decode` does."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    found = pa.Array.from_buffers(pa.string(), count, buffers)
    if data.max(initial=0) < _ASCII_END:
        return found
    try:
        found.validate(full=True)
    except pa.ArrowInvalid:
        values = pa.Array.from_buffers(pa.binary(), count, buffers).to_pylist()
        return pa.array([str(value, "utf-8", "replace") for value in values], pa.string())
    return found


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
    try:
        _END.join(names).decode()
    except UnicodeDecodeError:
        return None
    return pairs if len(set(names)) == len(names) else None


def guesses(pairs: Pairs, sample: Sequence[bytes]) -> list[Guess]:
    """A guess for each value of a row, from the texts of some rows. When no separator ends the last
    value, no text is guessed for it: literals end with one."""
    names, found = [name for name, _ in pairs], [[value for _, value in pairs]]
    for text in sample:
        parts = text.replace(_END, _NAME_VALUE).split(_NAME_VALUE)
        if parts[:-1:2] == names:
            found.append(parts[1::2])
    known: list[Guess] = []
    for values in map(set, zip(*found, strict=True)):
        lengths = set(map(len, values))
        length = max(lengths)
        if len(values) == 1:
            known.append(values.pop())
        elif len(lengths) == 1 and _LENGTH_GUESSED_MIN <= length <= _LENGTH_GUESSED_MAX:
            known.append(length)
        else:
            known.append(0)
    if known and not sample[0].endswith(_END):
        known[-1] = 0
    return known


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
        literal, places = self._before, []
        for name, value in pairs:
            literal += name + _NAME_VALUE
            places.append(len(literal))
            literal += value + _END
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
        if length:
            marks = block[:, width:] == SEPARATOR
            # The only separator of each row stands after `length` bytes, at its end?
            if marks[:, length].all() and np.count_nonzero(marks) == len(marks):
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
            chosen = left[np.arange(SAMPLE_ROWS) * _SCATTER % len(left)].tolist()
            sample = [raw[starts[row] : ends[row]].tobytes() for row in chosen]
            names = tuple(name for name, _ in pairs)
            whole = len(left) == len(starts)
            own = starts if whole else starts[left]
            follower = Follower(raw, own, ends if whole else ends[left])
            follower.follow(names, guesses(pairs, sample))
            inside = follower.rows
            if inside is None:
                rows = None if whole else left
                left = left[:0]
            else:
                rows, own, left = left[inside], own[inside], np.delete(left, inside)
            shapes.append(Shape(names, rows, own, tuple(follower.values)))
    odd_rows = np.sort(np.array([*odd, *left.tolist()], np.int64))
    decoded = [decode_properties(raw[starts[row] : ends[row]].data) for row in odd_rows.tolist()]
    return Properties(len(starts), shapes, odd_rows, decoded)


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
    return in_row_order(parts, rows, found.count)


def in_row_order(parts: Sequence[Any], rows: Sequence[Positions], count: int) -> Any:
    """One array of `count` rows, of which each part has some; of two for a row the later counts."""
    numbers = np.concatenate(rows)
    order = np.empty(count, np.int64)
    order[numbers] = np.arange(len(numbers))
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
