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
    length is guessed        value is     nothing    nothing     value is
                             guessed      is known   is known    guessed

- *Guessed* values are compared together with the names around them, as one text.
- For any other value, which is *unknown*, one gather reads the name and the first word of the
  value. The value ends at the first separator (`first_separators`), or at the guessed length.

A wrong guess takes time, but does not change the result. Guessed values are then compared one by
one, and a value that still differs counts as unknown. If the guessed length is wrong, the end of
each value is searched. A row without one of the names waits for another shape. No value that was
matched contains a separator, so a row that ends where the template ends has exactly these names.

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
    """Return the 8 bytes from each start on as a little-endian number.

    Bytes behind the end of `raw` are zeros.
    """
    return rows_at(raw, starts, 8).reshape(-1).view("<u8")


def all_begin_with(raw: Bytes, starts: Positions, prefix: bytes) -> bool:
    """Return whether the bytes `prefix`, which must not be empty, are at each of the starts.

    The bytes are compared in pieces that fit into the processor's cache. In a piece, the first row
    is compared with the prefix, and each other row with the one before.
    """
    prefix_bytes = len(prefix)
    rows_per_piece = max(1, _PIECE_BYTES // prefix_bytes)
    for first_row in range(0, len(starts), rows_per_piece):
        piece_starts = starts[first_row : first_row + rows_per_piece]
        flat = rows_at(raw, piece_starts, prefix_bytes).reshape(-1)
        has_prefix = flat[:prefix_bytes].tobytes() == prefix
        if not has_prefix or not (flat[prefix_bytes:] == flat[:-prefix_bytes]).all():
            return False
    return True


def make_value_array(raw: Bytes, starts: Positions, lengths: Positions, arrow_type: Any) -> Any:
    """Make an Arrow array whose value i has the `lengths[i]` bytes of `raw` from `starts[i]` on.

    `arrow_type` is pa.binary() or pa.string(). The array does not refer to `raw`.
    """
    count = len(starts)
    if count and (lengths == lengths[0]).all():
        length = int(lengths[0])
        value_bytes = gather(raw, starts, f"V{length}") if length else np.empty(0, np.uint8)
        buffers = [None, make_even_offsets(count, length), pa.py_buffer(value_bytes)]
        return pa.Array.from_buffers(arrow_type, count, buffers)

    # Values of different lengths are described by Arrow views, which Arrow then copies.
    if len(raw) < _VIEW_BYTES:
        raw = np.concatenate((raw, np.zeros(_VIEW_BYTES, np.uint8)))
    views = _make_views(raw, starts, lengths)
    view_type = pa.string_view() if pa.types.is_string(arrow_type) else pa.binary_view()
    buffers = [None, pa.py_buffer(views), pa.py_buffer(raw)]
    return pa.Array.from_buffers(view_type, count, buffers).cast(arrow_type)


def join_values(raw: Bytes, starts: Positions, lengths: Positions) -> tuple[Bytes, Positions]:
    """Copy values behind each other. Return (joined bytes, start of each value in them).

    Value i has the `lengths[i]` bytes of `raw` from `starts[i]` on.
    """
    # The data buffer of a binary array contains the values without gaps.
    _, offsets, value_bytes = make_value_array(raw, starts, lengths, pa.binary()).buffers()
    bounds = np.frombuffer(offsets, np.int32, len(starts) + 1).astype(np.int64)
    joined_bytes = int(bounds[-1])
    if not joined_bytes:
        return np.empty(0, np.uint8), bounds[:-1]
    return np.frombuffer(value_bytes, np.uint8, joined_bytes), bounds[:-1]


def _make_views(raw: Bytes, starts: Positions, lengths: Positions) -> NDArray[np.int32]:
    """Return the Arrow view of each value, as a row of four numbers of 4 bytes.

    In the view of a long value they are: length, first 4 bytes of the value, number of the buffer,
    offset in the buffer. The view of a short value has its length and its bytes. Value i has the
    `lengths[i]` bytes of `raw` from `starts[i]` on. `raw` must have at least _VIEW_BYTES bytes.
    """
    # A view has the first bytes of its value from byte 4 on. So it is read from 4 bytes before the
    # value on, and the 4 bytes are replaced by the length.
    last_start = len(raw) - _VIEW_BYTES
    view_starts = starts - 4
    is_near_an_end = (view_starts < 0) | (view_starts > last_start)
    rows_near_an_end = np.flatnonzero(is_near_an_end)
    if len(rows_near_an_end):
        view_starts = np.clip(view_starts, 0, last_start)
    views = gather(raw, view_starts, f"V{_VIEW_BYTES}").view(np.int32).reshape(-1, 4)
    for row in rows_near_an_end:  # the gather would have read beyond an end of the buffer
        start = int(starts[row])
        first_bytes = raw[start : start + min(int(lengths[row]), INLINE_BYTES_MAX)].tobytes()
        views[row, 1:] = np.frombuffer(first_bytes.ljust(INLINE_BYTES_MAX, b"\0"), np.int32)
    views[:, 0] = lengths
    long_rows = np.flatnonzero(lengths > INLINE_BYTES_MAX)
    views[long_rows, 2] = 0
    views[long_rows, 3] = starts[long_rows]
    return views


def make_even_offsets(count: int, length: int) -> Any:
    """Return the Arrow offsets buffer of an array of `count` values with `length` bytes each.

    It has `count` + 1 offsets: 0, length, 2 * length, and so on.
    """
    if not length:
        return pa.py_buffer(np.zeros(count + 1, np.int32))
    return pa.py_buffer(np.arange(0, (count + 1) * length, length, dtype=np.int32))


class RepeatedTexts:
    """A cache of Arrow arrays of repeated texts, which blocks of one topic have in common."""

    def __init__(self) -> None:
        """Create an empty cache."""
        self._arrays: dict[tuple[bytes, ...], Any] = {}

    def array(self, texts: tuple[bytes, ...], rows: int) -> Any:
        """Return a pa.string() array that repeats `texts`, in order, `rows` times.

        The texts must be valid UTF-8. The longest array of each `texts` is cached, and a shorter
        one is a slice of it. The cache is cleared when it has more than 64 arrays.
        """
        array = self._arrays.get(texts)
        count = rows * len(texts)
        if array is None or len(array) < count:
            if len(self._arrays) > 64:
                self._arrays.clear()
            offsets = np.zeros(count + 1, np.int32)
            np.cumsum(np.tile(np.array([*map(len, texts)], np.int32), rows), out=offsets[1:])
            buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts) * rows)]
            array = self._arrays[texts] = pa.Array.from_buffers(pa.string(), count, buffers)
        return array.slice(0, count)


def make_hex_array(matrix: Bytes) -> Any:
    """Return a pa.string() array: element i has the upper-case hexadecimal digits of row i."""
    count, row_bytes = matrix.shape
    digits = HEX_PAIRS[matrix]
    return pa.Array.from_buffers(
        pa.string(), count, [None, make_even_offsets(count, 2 * row_bytes), pa.py_buffer(digits)]
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
_ONE = np.uint64(1)
_SEVEN = np.uint64(7)
_TOP = np.uint64(56)


@dataclass(frozen=True, slots=True)
class ValueSpans:
    """Where the values of one property are in `raw`, for all rows of a shape.

    - `starts[row]` is the offset of the value in `raw`.
    - `lengths` is one number if all values have this length, else an array with one entry for each
      row.
    - `text` is the value if the matcher found the same one in all rows, else None.
    - `words` are the first 8 bytes of each value as numbers, or None if the matcher has not read
      them. If a value is shorter, the word continues with the bytes that follow it.
    - `block` is a matrix whose rows are the values, or None if the matcher has not read them.
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
        """Return only the values of some rows. `rows` are indices or a mask."""
        lengths = self.lengths
        if not isinstance(lengths, int):
            lengths = lengths[rows]
        words = None if self.words is None else self.words[rows]
        block = None if self.block is None else self.block[rows]
        return ValueSpans(self.raw, self.starts[rows], lengths, self.text, words, block)

    def first_words(self) -> Words | np.uint64:
        """Return the first 8 bytes of each value as a number, or one number if all are the same.

        What follows a value of fewer than 8 bytes in its word may be anything.
        """
        if self.text is not None:
            return _read_first_word(self.text)
        return read_words(self.raw, self.starts) if self.words is None else self.words


def _read_first_word(value: bytes) -> np.uint64:
    """Return the first 8 bytes of `value` as a little-endian number; missing bytes are zeros."""
    return np.uint64(int.from_bytes(value[:_WORD], "little"))


def first_separators(
    raw: Bytes, starts: Positions, words: Words, sizes_max: Positions
) -> Positions:
    """Return how many bytes precede the next separator (0x02) from each start on.

    `words` are the first 8 bytes from each start on, as numbers. `sizes_max[row]` is the number of
    bytes up to the end of the row's properties. It is returned if there is no separator before,
    even if it is negative.

    The search has three stages. Each examines only the rows without a separator so far: two more
    words, then a window of 64 bytes, then all bytes up to the end.
    """
    lengths = _count_bytes_before_separator(words)
    rows = np.flatnonzero(lengths == _WORD)
    for searched_bytes in range(_WORD, _NEAR, _WORD):
        if not len(rows):
            break
        more_bytes = _count_bytes_before_separator(read_words(raw, starts[rows] + searched_bytes))
        lengths[rows] += more_bytes
        rows = rows[more_bytes == _WORD]

    if len(rows):
        is_separator = rows_at(raw, starts[rows] + _NEAR, _WINDOW + 1) == SEPARATOR
        is_separator[:, _WINDOW] = True  # so that argmax returns _WINDOW if there is none
        lengths[rows] += is_separator.argmax(axis=1)
        rows = rows[lengths[rows] == _NEAR + _WINDOW]

    if len(rows):
        lengths[rows] = _search_whole_rows(raw, starts[rows], np.maximum(sizes_max[rows], 0))
    return np.minimum(lengths, sizes_max)


def _search_whole_rows(raw: Bytes, starts: Positions, sizes: Positions) -> Positions:
    """Return how many bytes precede the first separator in each row; all if there is none.

    Row i has the `sizes[i]` bytes of `raw` from `starts[i]` on. The rows are copied behind each
    other and searched at once.
    """
    joined, row_starts = join_values(raw, starts, sizes)
    separators = np.append(np.flatnonzero(joined == SEPARATOR), len(joined))
    distances = separators[np.searchsorted(separators, row_starts)] - row_starts
    byte_counts: Positions = np.minimum(distances, sizes)
    return byte_counts


def _count_bytes_before_separator(words: Words) -> Positions:
    """Return the number of bytes before the first separator in each word; 8 if there is none.

    This is the search for a zero byte that strlen does word by word. The first byte of a word has
    its lowest bits.
    """
    zeros = words ^ _SEPARATORS  # a separator becomes a zero byte
    # The highest bit of each zero byte. Bytes above the first zero byte may be marked wrongly.
    marks = (zeros - _ONES) & ~zeros & _HIGHS
    # The highest bits of the bytes below the first mark: add them up by a multiplication.
    below = (marks - _ONE) & ~marks & _HIGHS
    counts: Positions = (((below >> _SEVEN) * _ONES) >> _TOP).view(np.int64)
    return counts


# --- to Arrow


def make_text_array(columns: Sequence[ValueSpans], rows: int) -> Any:
    """Return a pa.string() array of the values of all columns, row by row.

    It has `rows` * len(columns) elements, and begins with the values of row 0 in all columns. Bytes
    that are not UTF-8 are replaced by U+FFFD.
    """
    if len(columns) == 1:
        column = columns[0]
        if isinstance(column.lengths, int):  # all values have this length
            if column.text is not None:
                text_bytes = np.frombuffer(column.text * rows, np.uint8)
            elif column.block is not None:
                text_bytes = np.ascontiguousarray(column.block).reshape(-1)
            else:
                text_bytes = rows_at(column.raw, column.starts, column.lengths).reshape(-1)
            return make_valid_text_array(rows, make_even_offsets(rows, column.lengths), text_bytes)

    length_max = max((column.length_max for column in columns), default=0)
    if length_max > _WRITTEN_MAX:
        return _make_long_text_array(columns, rows)
    return _make_short_text_array(columns, rows)


def _make_short_text_array(columns: Sequence[ValueSpans], rows: int) -> Any:
    """Return a pa.string() array of the values of all columns, row by row, if they are short.

    No value may have more than `_WRITTEN_MAX` bytes. The array is written in words of 8 bytes, one
    word of all rows at a time.
    """
    lengths = np.empty((rows, len(columns)), np.int32)
    first_words = np.empty((rows, len(columns)), np.uint64)
    for index, column in enumerate(columns):
        lengths[:, index] = column.lengths
        first_words[:, index] = column.first_words()
    offsets = np.zeros(lengths.size + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    total_bytes = int(offsets[-1])
    text_bytes = np.empty(total_bytes + _WORD, np.uint8)
    target_starts = offsets[:-1].reshape(lengths.shape)  # [row, index of the column]
    target = unaligned_view(text_bytes, "<u8")

    # The last word of a value writes up to 7 surplus bytes into the values behind it. Each value
    # begins with its first word, so the first words are written last and in order.
    for index, column in enumerate(columns):
        _write_later_words(target, target_starts[:, index], column)
    target[target_starts.reshape(-1)] = first_words.reshape(-1)
    return make_valid_text_array(lengths.size, offsets, text_bytes[:total_bytes])


def _write_later_words(target: Words, target_starts: NDArray[np.int32], column: ValueSpans) -> None:
    """Write the values of a column into `target`, from their second word of 8 bytes on.

    Value i begins at byte `target_starts[i]`. Element n of `target` is the word at byte n.
    """
    for word_start in range(_WORD, column.length_max, _WORD):
        if column.text is not None:  # all values are the same
            target[target_starts + word_start] = _read_first_word(column.text[word_start:])
        elif isinstance(column.lengths, int):
            words = read_words(column.raw, column.starts + word_start)
            target[target_starts + word_start] = words
        else:
            longer = np.flatnonzero(column.lengths > word_start)
            words = read_words(column.raw, column.starts[longer] + word_start)
            target[target_starts[longer] + word_start] = words


def _make_long_text_array(columns: Sequence[ValueSpans], rows: int) -> Any:
    """Return a pa.string() array of the values of all columns, row by row, of any length.

    It is built from Arrow views, which is faster if some values are long.
    """
    shape = (rows, len(columns))
    starts = np.empty(shape, np.int64)
    lengths = np.empty(shape, np.int64)
    for index, column in enumerate(columns):
        starts[:, index] = column.starts
        lengths[:, index] = column.lengths
    array = make_value_array(columns[0].raw, starts.reshape(-1), lengths.reshape(-1), pa.binary())
    _, offsets, text_bytes = array.buffers()
    return make_valid_text_array(len(array), offsets, np.frombuffer(text_bytes, np.uint8))


def make_valid_text_array(
    count: int, offsets: Any, text_bytes: Bytes, validity: Any | None = None
) -> Any:
    """Make a pa.string() array of `count` values with these offsets and bytes.

    `validity` is a buffer with a bit for each value that is not null; None means that no value is
    null. Bytes that are not UTF-8 are replaced by U+FFFD.
    """
    validity_buffer = None if validity is None else pa.py_buffer(validity)
    buffers = [validity_buffer, pa.py_buffer(offsets), pa.py_buffer(text_bytes)]
    array = pa.Array.from_buffers(pa.string(), count, buffers)
    if text_bytes.max(initial=0) < _ASCII_END:
        return array
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        encoded_values = pa.Array.from_buffers(pa.binary(), count, buffers).to_pylist()
        values = [
            None if encoded_value is None else str(encoded_value, "utf-8", "replace")
            for encoded_value in encoded_values
        ]
        return pa.array(values, pa.string())
    return array


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
"""What is guessed about the values of one property in all rows.

- bytes: all rows have this value.
- a positive int: all values have this length in bytes.
- 0: nothing is known.
"""
Pairs = list[tuple[bytes, bytes]]
"""Names and values of one row, in order."""


def split_properties(encoded: bytes) -> Pairs | None:
    """Split the encoded properties of one row into (name, value) pairs; None if the row is odd.

    A regular row consists of name, 0x01, value, 0x02 for each property. Neither is empty, no name
    occurs twice, and names are UTF-8. A value may contain 0x01, because the first 0x01 ends the
    name. The last 0x02 may be missing. Return [] if `encoded` is empty.
    """
    encoded = encoded.removesuffix(_END)
    if not encoded:
        return []
    pairs = []
    for encoded_property in encoded.split(_END):
        name, _, value = encoded_property.partition(_NAME_VALUE)
        if not name or not value:
            return None
        pairs.append((name, value))
    names = [name for name, _ in pairs]
    try:
        _END.join(names).decode()
    except UnicodeDecodeError:
        return None
    if len(set(names)) < len(names):
        return None
    return pairs


def guess_values(pairs: Pairs, sample: Sequence[bytes]) -> list[Guess]:
    """Guess the values of each property of a template, so that they can be compared at once.

    `pairs` are names and values of the template, and `sample` the encoded properties of some rows,
    at least one. Rows of the sample with other names are ignored. A guess is the common value of
    all these rows (bytes); or, if their values only have the same length, from 8 to 128 bytes, this
    length; or else 0.

    The guess for the last property is 0 if no separator ends the first row of the sample, because
    the matcher compares a value together with the separator behind it.
    """
    names = [name for name, _ in pairs]
    value_rows = [[value for _, value in pairs]]
    for encoded in sample:
        # name, value, name, value, …, and "" behind the last separator
        names_and_values = encoded.replace(_END, _NAME_VALUE).split(_NAME_VALUE)
        if names_and_values[:-1:2] == names:
            value_rows.append(names_and_values[1::2])

    guesses = [_guess_value(set(values)) for values in zip(*value_rows, strict=True)]
    if guesses and not sample[0].endswith(_END):
        guesses[-1] = 0
    return guesses


def _guess_value(values: set[bytes]) -> Guess:
    """Guess a value: the only one of `values`, or their common length, or 0."""
    if len(values) == 1:
        return values.pop()
    lengths = set(map(len, values))
    length = max(lengths)
    if len(lengths) == 1 and _LENGTH_GUESSED_MIN <= length <= _LENGTH_GUESSED_MAX:
        return length
    return 0


class TemplateMatcher:
    """Matches the properties of many rows with a template, all rows together.

    The properties of a row are the bytes of `raw` from its entry in `starts` up to its entry in
    `ends`. Call `match` once, then read the result:

    - `rows` are the indices, in `starts`, of the rows that match; None means that all match.
    - `values` has one entry for each property of the template: its values in the rows that match.

    While it matches, each row has a position in `raw`, which moves from property to property. After
    a property it is at the end of the row, or at the separator behind the value.
    """

    def __init__(self, raw: Bytes, starts: Positions, ends: Positions) -> None:
        """Create a matcher for rows whose encoded properties are `raw[starts[i]:ends[i]]`."""
        self.rows: Positions | None = None
        self.values: list[ValueSpans] = []
        self._raw = raw
        self._positions = starts
        self._ends = ends
        self._separator = b""
        """The bytes before the next name: empty for the first name, then the separator."""

    def match(self, names: Sequence[bytes], guesses: Sequence[Guess]) -> None:
        """Find the rows that have exactly `names`, in this order. Set `rows` and `values`.

        `guesses` has a guess for the values of each name: the bytes, the length, or 0. A wrong
        guess takes time, but does not change which rows match. A row with other names, or with an
        empty value, does not match: it is removed from `rows` and from all entries of `values`.
        """
        pairs = zip(names, guesses, strict=True)
        for is_value_guessed, group in groupby(pairs, lambda pair: isinstance(pair[1], bytes)):
            if is_value_guessed:
                self._match_guessed_values(cast("Pairs", list(group)))
            else:
                for name, length in group:
                    self._match_unknown_value(name, cast("int", length))
        remaining_bytes = self._ends - self._positions
        # The separator behind the last value may be missing.
        self._remove_other_rows((remaining_bytes == 0) | (remaining_bytes == 1))

    def _match_guessed_values(self, pairs: Pairs) -> None:
        """Match consecutive properties, given as (name, guessed value), in all rows.

        If all rows have these values, one comparison of all names and values is enough. Otherwise
        each property is compared alone. If it still differs, its values are read.
        """
        expected = self._separator
        value_offsets = []
        for name, value in pairs:
            expected += name + _NAME_VALUE
            value_offsets.append(len(expected))
            expected += value + _END
        if all_begin_with(self._raw, self._positions, expected):
            for offset, (_, value) in zip(value_offsets, pairs, strict=True):
                starts = self._positions + offset
                self.values.append(ValueSpans(self._raw, starts, len(value), value))
            self._advance_positions(len(expected) - len(_END))
        elif len(pairs) > 1:
            for pair in pairs:
                self._match_guessed_values([pair])
        else:
            self._match_unknown_value(pairs[0][0], 0)

    def _match_unknown_value(self, name: bytes, length: int) -> None:
        """Match one property whose value may differ from row to row.

        `length` is the guessed length of all values; 0 means unknown. Rows with another name or an
        empty value are removed. One read gets the name and either a value of this length with its
        separator, or the first word of the value.
        """
        encoded_name = self._separator + name + _NAME_VALUE
        name_bytes = len(encoded_name)
        value_bytes = length + 1 if length else _WORD
        rows_read = rows_at(self._raw, self._positions, name_bytes + value_bytes)
        has_name = rows_begin_with(rows_read, encoded_name)
        if not has_name.all():
            self._remove_other_rows(has_name)
            rows_read = rows_read[has_name]
        self._advance_positions(name_bytes)
        if length and self._match_guessed_length(rows_read[:, name_bytes:], length):
            return

        # The length is unknown, or the guess is wrong: search the separator of each row.
        first_words = matrix_column(rows_read, name_bytes, "<u8").copy()
        bytes_left = self._ends - self._positions
        lengths = first_separators(self._raw, self._positions, first_words, bytes_left)
        self.values.append(ValueSpans(self._raw, self._positions, lengths, words=first_words))
        self._advance_positions(lengths)
        self._remove_other_rows(lengths > 0)

    def _match_guessed_length(self, value_rows: Bytes, length: int) -> bool:
        """Add the values of a property if all of them have `length` bytes. Return whether they do.

        Row i of `value_rows` has the next `length` + 1 bytes of row i.
        """
        # Is the only separator of each row the one after `length` bytes?
        is_separator = value_rows == SEPARATOR
        if not is_separator[:, length].all() or np.count_nonzero(is_separator) != len(value_rows):
            return False
        values = value_rows[:, :length]
        self.values.append(ValueSpans(self._raw, self._positions, length, block=values))
        self._advance_positions(length)
        return True

    def _advance_positions(self, lengths: Positions | int) -> None:
        """Move the position of each row by `lengths` bytes. A separator precedes the next name."""
        self._positions = self._positions + lengths
        self._separator = _END

    def _remove_other_rows(self, matches: NDArray[np.bool_]) -> None:
        """Remove the rows for which `matches` is False from the results and all later steps."""
        if matches.all():
            return
        remaining_indices = np.flatnonzero(matches)
        self.rows = remaining_indices if self.rows is None else self.rows[remaining_indices]
        self._positions = self._positions[remaining_indices]
        self._ends = self._ends[remaining_indices]
        self.values = [spans.take_rows(remaining_indices) for spans in self.values]


SHAPES_MAX = 64
"""The most shapes in a block. Each shape costs 100 to 200 µs for each block. Rows of further shapes
are odd."""

_SCATTER = 40_503
"""The distance between the rows of a sample, modulo their number. It is large, so that the sample
is not in step with anything that repeats every few rows."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The rows that have the same names in the same order.

    - `rows` are their indices in the block, in ascending order; None means all rows of the block.
    - `starts` has one entry for each of these rows: where its properties begin.
    - `values` has one entry for each name.
    """

    names: tuple[bytes, ...]
    rows: Positions | None
    starts: Positions
    values: tuple[ValueSpans, ...]


@dataclass(frozen=True, slots=True)
class Properties:
    """The properties of the `count` rows of a block.

    Each row either belongs to one of the `shapes`, or is odd. `odd_rows` are the indices of the odd
    rows in ascending order, and `odd[i]` contains the decoded properties of row `odd_rows[i]`.
    """

    count: int
    shapes: list[Shape]
    odd_rows: Positions
    odd: list[dict[str, str]]


def read_properties(raw: Bytes, starts: Positions, lengths: Positions) -> Properties:
    """Sort rows into shapes: groups of rows that have the same property names in the same order.

    The encoded properties of row i have `lengths[i]` bytes and begin at `starts[i]` in `raw`. The
    result refers to `raw`; Arrow arrays that are made from it do not. A row is odd if its
    properties are malformed or repeated, or if there are already SHAPES_MAX shapes.
    """
    ends = starts + lengths
    shapes: list[Shape] = []
    odd: list[int] = []
    unsorted_rows = np.arange(len(starts))
    while len(unsorted_rows) and len(shapes) < SHAPES_MAX:
        template_row = int(unsorted_rows[0])
        pairs = split_properties(raw[starts[template_row] : ends[template_row]].tobytes())
        if pairs is None:
            odd.append(template_row)
            unsorted_rows = unsorted_rows[1:]
            continue

        shape, unsorted_rows = _extract_shape(raw, starts, ends, unsorted_rows, pairs)
        shapes.append(shape)
    odd_rows = np.sort(np.array([*odd, *unsorted_rows.tolist()], np.int64))
    decoded = [decode_properties(raw[starts[row] : ends[row]].data) for row in odd_rows.tolist()]
    return Properties(len(starts), shapes, odd_rows, decoded)


def _extract_shape(
    raw: Bytes, starts: Positions, ends: Positions, unsorted_rows: Positions, pairs: Pairs
) -> tuple[Shape, Positions]:
    """Find the rows with the same property names as the first of `unsorted_rows`.

    Return (shape, other rows): the shape with all these rows, and the rest of `unsorted_rows`.
    `pairs` are the names and values of the first row. The encoded properties of row i are
    `raw[starts[i]:ends[i]]`.
    """
    sample_indices = np.arange(SAMPLE_ROWS) * _SCATTER % len(unsorted_rows)
    sample_rows = unsorted_rows[sample_indices].tolist()
    sample = [raw[starts[row] : ends[row]].tobytes() for row in sample_rows]

    are_all_unsorted = len(unsorted_rows) == len(starts)
    if not are_all_unsorted:
        starts = starts[unsorted_rows]
        ends = ends[unsorted_rows]
    names = tuple(name for name, _ in pairs)
    matcher = TemplateMatcher(raw, starts, ends)
    matcher.match(names, guess_values(pairs, sample))

    values = tuple(matcher.values)
    matched = matcher.rows  # indices in `unsorted_rows`
    if matched is not None:
        shape = Shape(names, unsorted_rows[matched], starts[matched], values)
        return shape, np.delete(unsorted_rows, matched)
    # All of the rows have this shape. None as rows means all rows of the block.
    rows = None if are_all_unsorted else unsorted_rows
    return Shape(names, rows, starts, values), unsorted_rows[:0]


def shape_arrays(
    properties: Properties,
    make_column: Callable[[Shape], Any],
    make_odd_column: Callable[[list[dict[str, str]]], Any],
) -> Any:
    """Make an Arrow array with an element for each row of a block, in order.

    `make_column(shape)` returns the array for the rows of a shape (rows with the same property
    names), and `make_odd_column(dicts)` the array for the odd rows, given their properties. Both
    must return the same type.
    """
    arrays = [make_column(shape) for shape in properties.shapes]
    if len(arrays) == 1 and properties.shapes[0].rows is None:
        return arrays[0]
    rows = [shape.rows for shape in properties.shapes if shape.rows is not None]
    if properties.odd:
        arrays.append(make_odd_column(properties.odd))
        rows.append(properties.odd_rows)
    if not arrays:
        return make_odd_column([])
    return in_row_order(arrays, rows, properties.count)


def in_row_order(arrays: Sequence[Any], rows: Sequence[Positions], count: int) -> Any:
    """Join Arrow arrays into one array of `count` elements, in the order of the rows.

    Element k of `arrays[i]` becomes element `rows[i][k]`. Each row must be in an array. If a row is
    in several arrays, the last of them counts.
    """
    row_by_element = np.concatenate(rows)
    element_by_row = np.empty(count, np.int64)
    element_by_row[row_by_element] = np.arange(len(row_by_element))
    return pa.concat_arrays(arrays).take(pa.array(element_by_row))


def text_column(properties: Properties, name: str) -> Any:
    """Return the values of a property as a pa.string() array; null if a message lacks it."""
    encoded_name = name.encode()

    def column(shape: Shape) -> Any:
        if encoded_name not in shape.names:
            return pa.nulls(len(shape.starts), pa.string())
        return make_text_array([shape.values[shape.names.index(encoded_name)]], len(shape.starts))

    def odd_column(rows: list[dict[str, str]]) -> Any:
        return pa.array([row.get(name) for row in rows], pa.string())

    return shape_arrays(properties, column, odd_column)
