"""Arrow arrays from places in a byte buffer, without a Python object a value.

A *place* is a start and a length in bytes. Values of one length are gathered in one NumPy step.
Values of many lengths become Arrow *views* (16 bytes: the length, then the value itself when it
has at most 12 bytes, else its first 4 bytes, a buffer number and an offset), which Arrow copies
into an ordinary binary or string array at memory speed. One trick makes the views cheap: the 16
bytes that begin 4 before a value already hold both its inline form and its prefix, so one gather
writes nearly all of a view.

`ValuePlaces` tell where the values of one property lie, a row each, and what is known of them
already: one text in all rows, one length in all rows (then their bytes are side by side), or the
first word (8 bytes) of each, which the search for the separator has read anyway.

    | h z 2 r e g i o |   word       every byte ^ 2 is zero where the separator stands;
    |     ^           |              the lowest such byte, counted in one product, is the length

Short texts of many lengths are written as whole words: what is too much of one, at most 7 bytes,
lies where the next texts have their first words. So the first words are written last and in order,
and each covers what the one before left. A word costs 5 to 10 ns, a view 20 to 35 a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sluicemq.record.table import Bytes, Positions, gather, rows_at, view_of

INLINE_BYTES_MAX = 12
"""Longest value that a view holds itself (Arrow columnar format, "Variable-size Binary View")."""
_VIEW_BYTES = 16
_PIECE_BYTES = 256 * 1024
_NIBBLES = np.frombuffer(b"0123456789ABCDEF", np.uint8)
HEX_PAIRS = (
    np.stack((_NIBBLES.repeat(16), np.tile(_NIBBLES, 16)), axis=1).reshape(-1).view(np.uint16)
)
"""Byte value -> its two upper-case hex digits, as one number."""


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
        return _of_one_length(raw, starts, int(lengths[0]), kind)
    views = _views(raw, starts, lengths)
    form = pa.string_view() if pa.types.is_string(kind) else pa.binary_view()
    buffers = [None, pa.py_buffer(views), pa.py_buffer(raw)]
    return pa.Array.from_buffers(form, count, buffers).cast(kind)


def _of_one_length(raw: Bytes, starts: Positions, length: int, kind: Any) -> Any:
    count = len(starts)
    data = gather(raw, starts, f"V{length}") if length else np.empty(0, np.uint8)
    return pa.Array.from_buffers(
        kind, count, [None, even_offsets(count, length), pa.py_buffer(data)]
    )


def even_offsets(count: int, length: int) -> Any:
    """The buffer 0, length, 2*length, … of count + 1 offsets."""
    return pa.py_buffer(
        np.arange(0, (count + 1) * length, length, dtype=np.int32)
        if length
        else np.zeros(count + 1, np.int32)
    )


def _views(raw: Bytes, starts: Positions, lengths: Positions) -> NDArray[np.int32]:
    if len(raw) < _VIEW_BYTES:
        raw = np.concatenate((raw, np.zeros(_VIEW_BYTES, np.uint8)))
    last = len(raw) - _VIEW_BYTES
    begins = starts - 4
    near = np.flatnonzero((begins < 0) | (begins > last))
    if len(near):
        begins = np.clip(begins, 0, last)
    words = gather(raw, begins, f"V{_VIEW_BYTES}").view(np.int32).reshape(-1, 4)
    for row in near:
        _patch(words[row], raw, int(starts[row]), int(lengths[row]))
    words[:, 0] = lengths
    if (lengths > INLINE_BYTES_MAX).any():
        long = np.flatnonzero(lengths > INLINE_BYTES_MAX)
        words[long, 2] = 0
        words[long, 3] = starts[long]
    return words


def _patch(view: NDArray[np.int32], raw: Bytes, start: int, length: int) -> None:
    """The view of a value so near an end of the buffer that 16 bytes cannot be gathered there."""
    piece = raw[start : start + min(length, INLINE_BYTES_MAX)].tobytes()
    view[1:] = np.frombuffer(piece.ljust(INLINE_BYTES_MAX, b"\0"), np.int32)


class Repeated:
    """One text, n times, as an array. Kept and sliced, since blocks of one topic repeat it."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def array(self, text: bytes, count: int) -> Any:
        """pa.string() array with `text` in every row."""
        known = self._known.get(text)
        if known is None or len(known) < count:
            if len(self._known) > 64:
                self._known.clear()
            known = pa.Array.from_buffers(
                pa.string(),
                count,
                [None, even_offsets(count, len(text)), pa.py_buffer(text * count)],
            )
            self._known[text] = known
        return known.slice(0, count)


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
        lengths[rows] = _by_search(raw, starts[rows], room[rows])
    return np.minimum(lengths, room)


def _before_separator(words: Words) -> Positions:
    """The number of bytes before the first separator in each word; 8 without one."""
    zeros = words ^ _SEPARATORS
    marks = (zeros - _ONES) & ~zeros & _HIGHS  # exact up to and with the lowest
    below = (marks - _ONE) & ~marks & _HIGHS
    counts: Positions = (((below >> _SEVEN) * _ONES) >> _TOP).view(np.int64)
    return counts


def _by_search(raw: Bytes, starts: Positions, room: Positions) -> Positions:
    """As `first_separators`: every byte up to the end of the room is looked at."""
    room = np.maximum(room, 0)
    _, offsets, data = variable(raw, starts, room, pa.binary()).buffers()
    bounds = np.frombuffer(offsets, np.int32, len(starts) + 1).astype(np.int64)
    size = int(bounds[-1])
    text = np.frombuffer(data, np.uint8, size) if size else np.empty(0, np.uint8)
    places = np.append(np.flatnonzero(text == SEPARATOR), size)
    return np.minimum(places[np.searchsorted(places, bounds[:-1])] - bounds[:-1], room)


# --- to Arrow


def texts(columns: Sequence[ValuePlaces], rows: int) -> Any:
    """A pa.string() array of the values row by row: those of row 0 in all columns, of row 1, …"""
    if len(columns) == 1 and isinstance(columns[0].lengths, int):
        return _equal_lengths(columns[0], rows)
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
    for turn, column in enumerate(columns):
        _write_rest(data, places[:, turn], column)
    view_of(data, "<u8")[places.reshape(-1)] = words.reshape(-1)
    return _readable(len(words) * len(columns), offsets, data[:size])


def _write_rest(data: Bytes, places: NDArray[np.int32], column: ValuePlaces) -> None:
    """The words of a column after the first ones."""
    target = view_of(data, "<u8")
    for at in range(_WORD, column.longest, _WORD):
        if column.text is not None:
            target[places + at] = _word(column.text[at:])
        elif isinstance(column.lengths, int):
            target[places + at] = words_at(column.raw, column.starts + at)
        else:
            rows = np.flatnonzero(column.lengths > at)
            target[places[rows] + at] = words_at(column.raw, column.starts[rows] + at)


def _equal_lengths(column: ValuePlaces, rows: int) -> Any:
    length = column.lengths
    assert isinstance(length, int)
    if column.text is not None:
        data = np.frombuffer(column.text * rows, np.uint8)
    elif column.block is not None:
        data = np.ascontiguousarray(column.block).reshape(-1)
    else:
        data = rows_at(column.raw, column.starts, length).reshape(-1)
    return _readable(rows, even_offsets(rows, length), data)


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
