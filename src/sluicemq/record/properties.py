"""The properties of many messages at once: `name 0x01 value 0x02 …`.

Messages of one topic nearly always have the same names in the same order, or one of a few such
sequences. Rows are therefore sorted into *shapes*: all rows of a shape have exactly the same names
in the same order. The values of the n-th property of all rows are then one column of positions, and
names cost nothing for each row. The first row without a shape becomes the template of the next
shape, and rows that do not match it wait for a later one. A row that matches no shape is *odd*, and
is decoded by itself with `codec.decode_properties`: a name has no value or occurs twice, names are
not UTF-8, or there are too many shapes.

A few rows besides the template give a guess which values are the same in all rows, and which have
the same length. Then all rows are matched together along the template (`TemplateMatcher`):

    UNIQ_KEY 1 [32 bytes] 2 WAIT 1 true 2 TAGS 1 [?] 2 price 1 [?] 2 CLUSTER 1 DefaultCluster 2
    ------------------------------------- --------   ---------   ------------------------------
    unknown, of one length   known        unknown    unknown     known

- *Known* values are compared together with the names around them, as one text.
- For an *unknown* value, one gather reads the name and the first word of the value. The value ends
  at the first separator (`first_separators`), or at the same length in all rows.

A wrong guess costs time, but does not change the result: known values are then compared one by one,
and a value that still differs counts as unknown; a length is searched. A row without one of the
names is left for another shape. No value that was matched contains a separator, so a row that ends
where the template ends has exactly these names and values.

*Conversion to Arrow.* Values of one length are gathered in one NumPy step. Values of different
lengths become Arrow *views*, which Arrow copies into an ordinary array at the speed of memory. A
view has 16 bytes: the length, and then the value itself if it has at most 12 bytes, else its first
4 bytes, a buffer number and an offset. The 16 bytes that begin 4 bytes before a value already
contain both its inline form and its prefix, so one gather writes nearly all of a view.

Short texts of different lengths are written as whole words. The surplus bytes of a word, at most 7,
are where the next texts have their first words. So the first words are written last and in order,
and each of them overwrites the surplus of the text before. A word costs 5 to 10 ns, and a view 20
to 35 ns for each text.
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
    gather,
    matrix_column,
    rows_at,
    rows_begin_with,
    unaligned_view,
)

INLINE_BYTES_MAX = 12
"""The longest value that a view contains itself (Arrow columnar format, "Variable-size Binary
View")."""
_VIEW_BYTES = 16
_PIECE_BYTES = 256 * 1024
"""Bytes are compared in pieces of this size, which fit into the processor's cache."""


def read_words(raw: Bytes, starts: Positions) -> NDArray[np.uint64]:
    """Return the 8 bytes from each start on as a number, the first byte lowest.

    Bytes behind the end of `raw` are zeros.
    """
    return rows_at(raw, starts, 8).reshape(-1).view("<u8")


def all_begin_with(raw: Bytes, starts: Positions, text: bytes) -> bool:
    """Return whether `text` is at all of the starts.

    The bytes are compared in pieces that fit into the processor's cache. In a piece, the first row
    is compared with the text, and each other row with the one before.
    """
    width = len(text)
    step = max(1, _PIECE_BYTES // width)
    for begin in range(0, len(starts), step):
        flat = rows_at(raw, starts[begin : begin + step], width).reshape(-1)
        if flat[:width].tobytes() != text or not (flat[width:] == flat[:-width]).all():
            return False
    return True


def make_value_array(raw: Bytes, starts: Positions, lengths: Positions, kind: Any) -> Any:
    """Return an array of `kind`, pa.binary() or pa.string(), with the values at these positions.

    The array does not refer to `raw`.
    """
    count = len(starts)
    if count and (lengths == lengths[0]).all():
        length = int(lengths[0])
        data = gather(raw, starts, f"V{length}") if length else np.empty(0, np.uint8)
        buffers = [None, make_even_offsets(count, length), pa.py_buffer(data)]
        return pa.Array.from_buffers(kind, count, buffers)
    if len(raw) < _VIEW_BYTES:
        raw = np.concatenate((raw, np.zeros(_VIEW_BYTES, np.uint8)))
    last = len(raw) - _VIEW_BYTES
    begins = starts - 4
    near = np.flatnonzero((begins < 0) | (begins > last))
    if len(near):
        begins = np.clip(begins, 0, last)
    views = gather(raw, begins, f"V{_VIEW_BYTES}").view(np.int32).reshape(-1, 4)
    for row in near:  # a gather would read beyond an end of the buffer
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


def make_even_offsets(count: int, length: int) -> Any:
    """Return the Arrow buffer of `count` + 1 offsets 0, length, 2 * length, …."""
    return pa.py_buffer(
        np.arange(0, (count + 1) * length, length, dtype=np.int32)
        if length
        else np.zeros(count + 1, np.int32)
    )


class RepeatedTexts:
    """A cache of Arrow arrays of repeated texts, which blocks of one topic have in common."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, ...], Any] = {}

    def array(self, texts: tuple[bytes, ...], rows: int) -> Any:
        """Return a pa.string() array that contains all `texts`, repeated `rows` times."""
        known, wanted = self._known.get(texts), rows * len(texts)
        if known is None or len(known) < wanted:
            if len(self._known) > 64:
                self._known.clear()
            offsets = np.zeros(wanted + 1, np.int32)
            np.cumsum(np.tile(np.array([*map(len, texts)], np.int32), rows), out=offsets[1:])
            buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts) * rows)]
            known = self._known[texts] = pa.Array.from_buffers(pa.string(), wanted, buffers)
        return known.slice(0, wanted)


def make_hex_array(data: Bytes) -> Any:
    """Return a pa.string() array with the upper-case hexadecimal digits of each row of a matrix."""
    count, width = data.shape
    digits = HEX_PAIRS[data]
    return pa.Array.from_buffers(
        pa.string(), count, [None, make_even_offsets(count, 2 * width), pa.py_buffer(digits)]
    )


Words = NDArray[np.uint64]

SEPARATOR: Final = 2
"""The byte that ends a value (spec/store.md §2.3)."""
_WORD: Final = 8
"""The bytes of a word."""
_NEAR: Final = 24
"""Separators are searched word by word up to this many bytes behind the start."""
_WINDOW: Final = 64
"""After that, this many bytes are searched at once."""
_WRITTEN_MAX: Final = 32
"""The longest text, in bytes, that is written in words."""
_ASCII_END: Final = 0x80
_ONES: Final = np.uint64(0x0101010101010101)
_HIGHS: Final = np.uint64(0x8080808080808080)
_SEPARATORS: Final = np.uint64(0x0202020202020202)
_ONE, _SEVEN, _TOP = np.uint64(1), np.uint64(7), np.uint64(56)


@dataclass(frozen=True, slots=True)
class ValueSpans:
    """Where the values of one property are in `raw`, for all rows of a shape.

    - `lengths` is a number if all values have this length.
    - `text` is the value if all rows have the same one.
    - `words` are the first 8 bytes of each value, with what follows a shorter one.
    - `block` contains the bytes of all values as a matrix.
    """

    raw: Bytes
    starts: Positions
    lengths: Positions | int
    text: bytes | None = None
    words: Words | None = None
    block: Bytes | None = None

    @property
    def length_max(self) -> int:
        """The length of the longest value, in bytes."""
        if isinstance(self.lengths, int):
            return self.lengths
        return int(self.lengths.max(initial=0))

    def take_rows(self, rows: NDArray[Any]) -> "ValueSpans":
        """Return the values of some rows, given by index or mask."""
        return ValueSpans(
            self.raw,
            self.starts[rows],
            self.lengths if isinstance(self.lengths, int) else self.lengths[rows],
            self.text,
            None if self.words is None else self.words[rows],
            None if self.block is None else self.block[rows],
        )

    def first_words(self) -> Words | np.uint64:
        """Return the first 8 bytes of each value as a number, or one number if all are the same."""
        if self.text is not None:
            return _word(self.text)
        return read_words(self.raw, self.starts) if self.words is None else self.words


def _word(text: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(text[:_WORD], "little"))


def first_separators(raw: Bytes, starts: Positions, words: Words, room: Positions) -> Positions:
    """Return the number of bytes before the next separator from each start on, at most `room`.

    `words` are the first 8 bytes from each start on.
    """
    lengths = _before_separator(words)
    rows = np.flatnonzero(lengths == _WORD)
    for at in range(_WORD, _NEAR, _WORD):
        if not len(rows):
            break
        more = _before_separator(read_words(raw, starts[rows] + at))
        lengths[rows] += more
        rows = rows[more == _WORD]
    if len(rows):
        marks = rows_at(raw, starts[rows] + _NEAR, _WINDOW + 1) == SEPARATOR
        marks[:, _WINDOW] = True
        lengths[rows] += marks.argmax(axis=1)
        rows = rows[lengths[rows] == _NEAR + _WINDOW]
    if len(rows):
        # The few long values: search all bytes up to `room`.
        some = np.maximum(room[rows], 0)
        _, offsets, data = make_value_array(raw, starts[rows], some, pa.binary()).buffers()
        bounds = np.frombuffer(offsets, np.int32, len(rows) + 1).astype(np.int64)
        size = int(bounds[-1])
        text = np.frombuffer(data, np.uint8, size) if size else np.empty(0, np.uint8)
        places = np.append(np.flatnonzero(text == SEPARATOR), size)
        found = places[np.searchsorted(places, bounds[:-1])] - bounds[:-1]
        lengths[rows] = np.minimum(found, some)
    return np.minimum(lengths, room)


def _before_separator(words: Words) -> Positions:
    """Return the number of bytes before the first separator in each word; 8 if there is none."""
    zeros = words ^ _SEPARATORS
    marks = (zeros - _ONES) & ~zeros & _HIGHS  # exact up to and with the lowest
    below = (marks - _ONE) & ~marks & _HIGHS
    counts: Positions = (((below >> _SEVEN) * _ONES) >> _TOP).view(np.int64)
    return counts


# --- to Arrow


def make_text_array(columns: Sequence[ValueSpans], rows: int) -> Any:
    """Return a pa.string() array of the values of all columns, row by row.

    It begins with the values of row 0 in all columns. Bytes that are not UTF-8 are replaced, as by
    `bytes.decode`.
    """
    if len(columns) == 1 and isinstance(length := columns[0].lengths, int):
        column = columns[0]
        if column.text is not None:
            data = np.frombuffer(column.text * rows, np.uint8)
        elif column.block is not None:
            data = np.ascontiguousarray(column.block).reshape(-1)
        else:
            data = rows_at(column.raw, column.starts, length).reshape(-1)
        return _make_valid_text_array(rows, make_even_offsets(rows, length), data)
    if max((column.length_max for column in columns), default=0) > _WRITTEN_MAX:
        return _make_long_text_array(columns, rows)
    lengths = np.empty((rows, len(columns)), np.int32)
    words = np.empty((rows, len(columns)), np.uint64)
    for index, column in enumerate(columns):
        lengths[:, index] = column.lengths
        words[:, index] = column.first_words()
    offsets = np.zeros(lengths.size + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    size = int(offsets[-1])
    data = np.empty(size + _WORD, np.uint8)
    places = offsets[:-1].reshape(lengths.shape)
    target = unaligned_view(data, "<u8")
    for index, column in enumerate(columns):  # the words after the first ones
        targets = places[:, index]
        for at in range(_WORD, column.length_max, _WORD):
            if column.text is not None:
                target[targets + at] = _word(column.text[at:])
            elif isinstance(column.lengths, int):
                target[targets + at] = read_words(column.raw, column.starts + at)
            else:
                some = np.flatnonzero(column.lengths > at)
                target[targets[some] + at] = read_words(column.raw, column.starts[some] + at)
    target[places.reshape(-1)] = words.reshape(-1)
    return _make_valid_text_array(lengths.size, offsets, data[:size])


def _make_long_text_array(columns: Sequence[ValueSpans], rows: int) -> Any:
    """Return the array of `make_text_array`, built from Arrow views. Better for long texts."""
    shape = (rows, len(columns))
    starts, lengths = np.empty(shape, np.int64), np.empty(shape, np.int64)
    for index, column in enumerate(columns):
        starts[:, index] = column.starts
        lengths[:, index] = column.lengths
    found = make_value_array(columns[0].raw, starts.reshape(-1), lengths.reshape(-1), pa.binary())
    _, offsets, data = found.buffers()
    return _make_valid_text_array(len(found), offsets, np.frombuffer(data, np.uint8))


def _make_valid_text_array(count: int, offsets: Any, data: Bytes) -> Any:
    """Return the pa.string() array with these buffers. Bytes that are not UTF-8 are replaced."""
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
"""The number of rows from which values are guessed."""
_LENGTH_GUESSED_MIN: Final = 8
"""The shortest length that is guessed. Shorter values are found with their first word at the same
cost."""
_LENGTH_GUESSED_MAX: Final = 128
"""The longest length that is guessed."""
_NAME_VALUE: Final = b"\x01"
_END: Final = bytes((SEPARATOR,))

Guess = bytes | int
"""A value that all rows have, or the length that all values have; 0 means unknown."""
Pairs = list[tuple[bytes, bytes]]
"""Names and values of one row, in order."""


def split_properties(text: bytes) -> Pairs | None:
    """Return names and values of one row, or None if the row is odd.

    A regular row consists of name, 0x01, value, 0x02 for each property. Neither is empty, no name
    occurs twice, and names are UTF-8. A value may contain 0x01, because the first 0x01 ends the
    name. The last 0x02 may be missing.
    """
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


def guess_values(pairs: Pairs, sample: Sequence[bytes]) -> list[Guess]:
    """Return a guess for each value of the template `pairs`, from the texts of some rows.

    The last value is not guessed if no separator ends it, because known texts end with one.
    """
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


class TemplateMatcher:
    """Matches the properties of rows with a template.

    `rows` are the indices, in `starts`, of the rows that have matched so far; None means all rows.
    `values` are the values that were passed, one entry for each name. Between two steps the
    position of each row is at its end or at a separator.
    """

    def __init__(self, raw: Bytes, starts: Positions, ends: Positions) -> None:
        self.rows: Positions | None = None
        self.values: list[ValueSpans] = []
        self._raw = raw
        self._at = starts
        self._ends = ends
        self._before = b""

    def match(self, names: Sequence[bytes], known: Sequence[Guess]) -> None:
        """Match all rows with a template of `names` and guessed values."""
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
        """Pass names whose values are known.

        If not all rows have these values, pass them one by one; a single one is passed as unknown.
        """
        literal, places = self._before, []
        for name, value in pairs:
            literal += name + _NAME_VALUE
            places.append(len(literal))
            literal += value + _END
        if all_begin_with(self._raw, self._at, literal):
            for place, (_, value) in zip(places, pairs, strict=True):
                self.values.append(ValueSpans(self._raw, self._at + place, len(value), value))
            self._pass(len(literal) - len(_END))
        elif len(pairs) > 1:
            for pair in pairs:
                self._pass_known([pair])
        else:
            self._pass_unknown(pairs[0][0], 0)

    def _pass_unknown(self, name: bytes, length: int) -> None:
        """Pass a name and its value. `length` is the guessed length of all values; 0 means unknown.

        One gather reads the name and, as far as it is guessed, the value.
        """
        literal = self._before + name + _NAME_VALUE
        width = len(literal)
        block = rows_at(self._raw, self._at, width + (length + 1 if length else 8))
        same = rows_begin_with(block, literal)
        if not same.all():
            self._keep(same)
            block = block[same]
        self._pass(width)
        if length:
            marks = block[:, width:] == SEPARATOR
            # Is the only separator of each row the one after `length` bytes?
            if marks[:, length].all() and np.count_nonzero(marks) == len(marks):
                value = block[:, width : width + length]
                self.values.append(ValueSpans(self._raw, self._at, length, block=value))
                self._pass(length)
                return
        words = matrix_column(block, width, "<u8").copy()
        lengths = first_separators(self._raw, self._at, words, self._ends - self._at)
        self.values.append(ValueSpans(self._raw, self._at, lengths, words=words))
        self._pass(lengths)
        self._keep(lengths > 0)

    def _pass(self, lengths: Positions | int) -> None:
        self._at = self._at + lengths
        self._before = _END

    def _keep(self, fits: NDArray[np.bool_]) -> None:
        """Remove the rows that do not match."""
        if fits.all():
            return
        kept = np.flatnonzero(fits)
        self.rows = kept if self.rows is None else self.rows[kept]
        self._at, self._ends = self._at[kept], self._ends[kept]
        self.values = [value.take_rows(kept) for value in self.values]


SHAPES_MAX = 64
"""The most shapes in a block. Each shape costs 100 to 200 µs for each block. Rows of further shapes
are odd."""

_SCATTER = 40_503
"""The distance between the rows of a sample, modulo their number. It is large, so that the sample
is not in step with anything that repeats every few rows."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The rows that have the same names in the same order.

    `rows` are their indices; None means all rows of the block. `starts` says where the properties
    of each row begin.
    """

    names: tuple[bytes, ...]
    rows: Positions | None
    starts: Positions
    values: tuple[ValueSpans, ...]


@dataclass(frozen=True, slots=True)
class Properties:
    """The properties of the `count` rows of a block.

    `odd` are the decoded properties of the rows `odd_rows`, which have no shape.
    """

    count: int
    shapes: list[Shape]
    odd_rows: Positions
    odd: list[dict[str, str]]


def read_properties(raw: Bytes, starts: Positions, lengths: Positions) -> Properties:
    """Sort rows into shapes by their properties, which are at these positions in `raw`.

    The result refers to `raw`; Arrow arrays that are made from it do not.
    """
    ends = starts + lengths
    shapes: list[Shape] = []
    odd: list[int] = []
    left = np.arange(len(starts))
    while len(left) and len(shapes) < SHAPES_MAX:
        first = int(left[0])
        pairs = split_properties(raw[starts[first] : ends[first]].tobytes())
        if pairs is None:
            odd.append(first)
            left = left[1:]
        else:
            chosen = left[np.arange(SAMPLE_ROWS) * _SCATTER % len(left)].tolist()
            sample = [raw[starts[row] : ends[row]].tobytes() for row in chosen]
            names = tuple(name for name, _ in pairs)
            whole = len(left) == len(starts)
            own_starts = starts if whole else starts[left]
            matcher = TemplateMatcher(raw, own_starts, ends if whole else ends[left])
            matcher.match(names, guess_values(pairs, sample))
            inside = matcher.rows
            if inside is None:
                rows = None if whole else left
                left = left[:0]
            else:
                rows, own_starts, left = left[inside], own_starts[inside], np.delete(left, inside)
            shapes.append(Shape(names, rows, own_starts, tuple(matcher.values)))
    odd_rows = np.sort(np.array([*odd, *left.tolist()], np.int64))
    decoded = [decode_properties(raw[starts[row] : ends[row]].data) for row in odd_rows.tolist()]
    return Properties(len(starts), shapes, odd_rows, decoded)


def shape_arrays(
    found: Properties,
    column: Callable[[Shape], Any],
    odd_column: Callable[[list[dict[str, str]]], Any],
) -> Any:
    """Return one array in the order of the rows, built from `column` and `odd_column`.

    `column(shape)` returns the array for the rows of a shape, and `odd_column(dicts)` the one for
    the odd rows.
    """
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
    """Return one array of `count` rows, put together from `parts`.

    Each part contains the rows in the entry of `rows` with the same index. If two parts have the
    same row, the later one counts.
    """
    numbers = np.concatenate(rows)
    order = np.empty(count, np.int64)
    order[numbers] = np.arange(len(numbers))
    return pa.concat_arrays(parts).take(pa.array(order))


def text_column(found: Properties, name: str) -> Any:
    """Return the values of a property as a pa.string() array, null if a message lacks it."""
    wanted = name.encode()

    def column(shape: Shape) -> Any:
        if wanted not in shape.names:
            return pa.nulls(len(shape.starts), pa.string())
        return make_text_array([shape.values[shape.names.index(wanted)]], len(shape.starts))

    def odd_column(rows: list[dict[str, str]]) -> Any:
        return pa.array([row.get(name) for row in rows], pa.string())

    return shape_arrays(found, column, odd_column)
