"""Thousands of stored records at once, as columns of numbers and positions in NumPy.

*Reading.* One NumPy step reads a number, or a fixed number of bytes, at each of thousands of
positions in a buffer, whatever their alignment. Bytes that are read together form a *matrix* with
one row for each position. A row that extends behind the end of the buffer is filled with zeros.

*Record starts.* A record begins with its own size, so each start follows from the one before.
There are three ways to find the starts, from fast to slow, with the same result:

1. Equal sizes: if the size of the first record repeats, the starts are an arithmetic sequence. One
   step checks size and magic number at all of them.
2. Walks: the bytes are cut near evenly spaced positions, at positions where a magic number was
   found. All pieces are walked at the same time, one NumPy step for one record of each piece. A
   magic number inside of a body may be a false start. But then the piece before it does not end
   exactly there. The first piece begins at a true record, so if every piece ends where the next one
   begins, all starts are proven.
3. One by one, for few records and for damaged bytes. This way raises the exact error.

*Records.* One step reads the heads of all records with hosts of the same kind as a NumPy struct;
field by field this would take five times as long. Another step reads what is between body and
properties, if all records have the same topic.

This module does not load pyarrow, because the broker does not need it.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from sluicemq.errors import ProtocolError
from sluicemq.record.layout import (
    BLANK,
    HOST_BITS,
    MAGIC_V1,
    MAGIC_V2,
    MAGICS,
    RECORD_BYTES_MIN,
    RECORD_HEAD,
    RECORD_HEADS,
    UNIT,
)

Bytes = NDArray[np.uint8]
"""Bytes of a buffer, or a matrix of bytes."""
Positions = NDArray[np.int64]
"""Offsets in a buffer, or other whole numbers."""
Mask = NDArray[np.bool_]
"""One boolean for each row."""

UNIT_COLUMNS: Final = UNIT.dtype
"""The data type of units of a consume queue."""

PIECES = 1024
"""The number of pieces that are walked at the same time."""
PIECE_RECORDS_MIN = 24
"""The least number of records in a piece. With fewer and longer pieces the walk takes more steps;
with more and shorter ones it takes longer to find where they begin."""
_WINDOW_BYTES_MIN = 512
"""At least this many bytes of each piece are searched for the start of a record."""
_WINDOW_RECORDS = 1.5
"""The start of a record is searched in this multiple of the largest average record size of a piece,
which is its size divided by PIECE_RECORDS_MIN. If none is found, the piece is joined to the one
before it."""
_MAGIC_FIRST = MAGIC_V1 >> 24 & 0xFF
_EQUAL_RUN_MIN = 64
"""The number of records that are compared to find out whether all have the same size. Also the
least number of starts that one step has to prove; otherwise all further records are found one by
one."""
_TOPICS_MAX: Final = 8
"""At most this many different topics are searched for in columns. Others are read row by row."""
_HASHED_BYTES_MAX: Final = 1024
"""The longest text, in bytes, whose hash is computed in columns."""
_SHORT_BYTES: Final = 40
"""Texts up to this length, in bytes, are hashed apart from longer ones."""
_ASCII_END: Final = 0x80


# --- reading at many positions


def unaligned_view(raw: Bytes, kind: Any) -> NDArray[Any]:
    """Return a view that has one value of `kind` at every byte of `raw` where it fits."""
    dtype = np.dtype(kind)
    return np.ndarray((max(len(raw) - dtype.itemsize + 1, 0),), dtype, raw.data, strides=(1,))


def gather(raw: Bytes, starts: Positions, kind: Any) -> NDArray[Any]:
    """Return the value of `kind` at each start. The values must be inside of `raw`."""
    dtype = np.dtype(kind)
    if not len(starts):
        return np.empty(0, dtype)
    plain = (
        np.dtype(f"V{dtype.itemsize}") if dtype.names else dtype
    )  # a struct takes four times as long
    found: NDArray[Any] = unaligned_view(raw, plain)[starts].view(dtype)
    return found


def rows_at(raw: Bytes, starts: Positions, width: int) -> Bytes:
    """Return the `width` bytes from each start on as the rows of a matrix.

    Bytes behind the end of `raw` are zeros.
    """
    if not width:
        return np.empty((len(starts), 0), np.uint8)
    if len(raw) < width:
        raw = np.concatenate((raw, np.zeros(width - len(raw), np.uint8)))
    last = len(raw) - width
    inside = starts if starts.max(initial=0) <= last else np.minimum(starts, last)
    rows = gather(raw, inside, f"V{width}").view(np.uint8).reshape(len(starts), width)
    if inside is not starts:
        for row in np.flatnonzero(starts > last).tolist():
            rows[row] = np.frombuffer(raw[starts[row] :].tobytes().ljust(width, b"\0"), np.uint8)
    return rows


def matrix_column(block: Bytes, at: int, kind: str) -> NDArray[Any]:
    """Return the value of `kind` at byte `at` of each row of a matrix."""
    return np.ndarray((len(block),), kind, block.data, at, (block.shape[1],))


def rows_begin_with(block: Bytes, text: bytes) -> Mask:
    """Return which rows of a matrix begin with `text`, which must not be empty.

    They are compared as words of 8, 4, 2 or 1 bytes, the last of which may overlap the one before.
    Comparing byte by byte takes several times as long.
    """
    width = next(size for size in (8, 4, 2, 1) if size <= len(text))
    equal: NDArray[Any] = np.ones(len(block), np.bool_)
    for at in dict.fromkeys((*range(0, len(text) - width, width), len(text) - width)):
        word = np.frombuffer(text, f"u{width}", 1, at)[0]
        equal &= matrix_column(block, at, f"u{width}") == word
    return equal


def keep_freed_memory(size_bytes: int) -> None:
    """Make glibc keep freed blocks of up to `size_bytes` for later columns.

    By default glibc returns large blocks to the kernel, which then has to clear each page again
    (0.05 µs for each message), until a block of this size was freed once: see mallopt(3),
    M_MMAP_THRESHOLD. With other allocators this does nothing.
    """
    np.empty(size_bytes, np.uint8)


_NIBBLES: Final = np.frombuffer(b"0123456789ABCDEF", np.uint8)
HEX_PAIRS: Final = (
    np.stack((_NIBBLES.repeat(16), np.tile(_NIBBLES, 16)), axis=1).reshape(-1).view(np.uint16)
)
"""The two upper-case hexadecimal digits of each byte value, as one number."""


class JavaHashes(NamedTuple):
    """Hashes of texts as unsigned numbers.

    Rows in `odd` have no hash here, because their text is not ASCII or is too long.
    """

    hashes: NDArray[np.uint32]
    odd: Mask


def _powers(base: int) -> NDArray[np.uint32]:
    """Return the powers of `base` modulo 2^32, from exponent 0 on."""
    powers = np.ones(_HASHED_BYTES_MAX + 8, np.uint32)
    factors = np.full(len(powers) - 1, base, np.uint32)
    np.cumprod(factors, dtype=np.uint32, out=powers[1:])
    return powers


POWERS: Final = _powers(31)
"""The powers of 31 modulo 2^32: hash(a + b) = hash(a) * POWERS[len(b)] + hash(b)."""
_INVERSES: Final = _powers(pow(31, -1, 1 << 32))
"""The powers of the inverse of 31 modulo 2^32."""


def java_hashes(raw: Bytes, starts: Positions, sizes: Positions) -> JavaHashes:
    """Return Java's String.hashCode of the texts with these starts and sizes.

    The hash is a polynomial in 31 modulo 2^32 over the UTF-16 units, which are the bytes if the
    text is ASCII. It is computed as the product of a matrix of bytes with powers of 31. Rows are
    aligned left, and the surplus factor of shorter texts is divided out; 31 is odd, so it has an
    inverse.
    """
    width = int(sizes.max(initial=0))
    odd = sizes > _HASHED_BYTES_MAX
    if width > _SHORT_BYTES and (short := sizes <= _SHORT_BYTES).any() and not short.all():
        hashes = np.empty(len(starts), np.uint32)
        for part in (short, ~short):  # a few long texts must not widen the matrix of all others
            hashes[part], odd[part] = java_hashes(raw, starts[part], sizes[part])
        return JavaHashes(hashes, odd)
    width = min(width, _HASHED_BYTES_MAX)
    if not width:
        return JavaHashes(np.zeros(len(starts), np.uint32), odd)
    text = rows_at(raw, starts, width)
    if (sizes != width).any():
        text = text * (np.arange(width) < sizes[:, np.newaxis])
    if text.max() >= _ASCII_END:
        odd |= (text >= _ASCII_END).any(axis=1)
    weights = np.ascontiguousarray(POWERS[width - 1 :: -1] if width > 1 else POWERS[:1])
    hashes = text.astype(np.uint32) @ weights
    return JavaHashes(np.asarray(hashes * _INVERSES[np.maximum(width - sizes, 0)]), odd)


# --- where records begin


def read_sizes(raw: Bytes, starts: Positions) -> Positions:
    """Return the record size at each start."""
    return unaligned_view(raw, ">i4")[starts].astype(np.int64)


def find_record_starts(raw: Bytes) -> Positions:
    """Return the start of each record in `raw`, which must consist of whole records.

    Raises ProtocolError where the bytes are not a record.
    """
    found, end = [np.empty(0, np.int64)], 0
    while end < len(raw):
        starts = find_leading_starts(raw[end:])
        starts += end
        if len(starts) < _EQUAL_RUN_MIN:
            starts = walk_record_starts(raw, end)
        found.append(starts)
        end = int(starts[-1] + read_sizes(raw, starts[-1:])[0])
    return found[1] if len(found) == 2 else np.concatenate(found)


def walk_record_starts(raw: Bytes, start: int) -> Positions:
    """Return the starts of the records from `start` on, found one by one.

    Raises ProtocolError that names the position where the bytes are not a record.
    """
    data, unpack = raw.data, BLANK.struct.unpack_from
    starts: list[int] = []
    end = len(raw)
    while start < end:
        if end - start < BLANK.size:
            raise ProtocolError(
                f"{end - start} bytes follow the last record, which ends at byte {start}."
            )
        size, magic = unpack(data, start)
        if magic not in MAGICS:
            shown = f"{magic & 0xFFFFFFFF:#010x}"
            raise ProtocolError(f"No record begins at byte {start}: its magic number is {shown}.")
        if size < RECORD_BYTES_MIN or size > end - start:
            raise ProtocolError(
                f"The record at byte {start} of {end} has an impossible size of {size} bytes."
            )
        starts.append(start)
        start += size
    return np.array(starts, np.int64)


def find_leading_starts(raw: Bytes) -> Positions:
    """Return the starts of consecutive records at the start of `raw`, as far as they are proven.

    `raw` begins with a record and may end anywhere: within a record, in zeros or in other bytes.
    All returned records are whole, according to their sizes and magic numbers. If nothing can be
    proven, return an empty array; then read a record by itself, and call this again for the bytes
    behind it.
    """
    if len(raw) < RECORD_BYTES_MIN:
        return np.empty(0, np.int64)
    size = int(read_sizes(raw, np.zeros(1, np.int64))[0])
    if RECORD_BYTES_MIN <= size <= len(raw):
        probe = np.arange(0, min(len(raw) - size + 1, size * _EQUAL_RUN_MIN), size, dtype=np.int64)
        if _are_records(raw, probe, size).all():
            places = np.arange(0, len(raw) - size + 1, size, dtype=np.int64)
            bad = np.flatnonzero(~_are_records(raw, places, size))
            return places[: bad[0]] if len(bad) else places
    return _walk_pieces(raw, PIECES)


def _are_records(raw: Bytes, places: Positions, size: int) -> Mask:
    """Return where records of `size` bytes begin, according to size and magic number."""
    fields = gather(raw, places, BLANK.dtype)
    magics: Mask = (fields["magic"] == MAGIC_V1) | (fields["magic"] == MAGIC_V2)
    return np.asarray(magics & (fields["size"] == size))


def _walk_pieces(raw: Bytes, pieces: int) -> Positions:
    """Return starts that are found by walking pieces, up to the start of the last piece.

    The pieces begin near evenly spaced positions, where a magic number says that a record may
    begin. What follows the start of the last piece is not proven. Return an empty array if nothing
    is.
    """
    first = max(int(read_sizes(raw, np.zeros(1, np.int64))[0]), RECORD_BYTES_MIN)
    pieces = min(pieces, len(raw) // (first * PIECE_RECORDS_MIN))
    if pieces < 2:
        return np.empty(0, np.int64)
    stride = len(raw) // pieces
    window = min(stride, max(_WINDOW_BYTES_MIN, int(_WINDOW_RECORDS * stride) // PIECE_RECORDS_MIN))
    windows = raw[: pieces * stride].reshape(pieces, stride)[1:, 4:window]
    numbers, places = np.divmod(np.flatnonzero(windows == _MAGIC_FIRST), windows.shape[1])
    places += (numbers + 1) * stride
    inside = np.searchsorted(places, len(raw) - 8, side="right")
    numbers, places = numbers[:inside], places[:inside]
    magics = unaligned_view(raw, ">i4")[places + 4]
    hits = np.flatnonzero((magics == MAGIC_V1) | (magics == MAGIC_V2))
    firsts = hits[np.diff(numbers[hits], prepend=-1) > 0]
    begins: Positions = np.append(0, places[firsts])
    far = np.flatnonzero(np.diff(begins) > 4 * stride)
    if len(far):  # walking such a long piece takes too many steps
        begins = begins[: far[0] + 1]
    while len(begins) > 1:
        starts = _walk_to_ends(raw, begins[:-1], begins[1:])
        if starts is not None:
            return starts
        begins = begins[
            : (len(begins) + 1) // 2
        ]  # a piece cannot be walked; the first pieces may be
    return np.empty(0, np.int64)


def _walk_to_ends(raw: Bytes, begins: Positions, ends: Positions) -> Positions | None:
    """Walk all pieces until each has reached its end, and return the starts that are proven.

    These are the starts in the leading pieces that end exactly where the next one begins. Return
    None if a piece takes too many steps. A piece that has reached its end continues to be walked,
    in the records of the next one or in bytes behind the last end.
    """
    at, last = unaligned_view(raw, ">u4"), len(raw) - 4
    place = begins
    steps_of_all = [place]
    for _ in range(2 + int((ends - begins).max()) // RECORD_BYTES_MIN):
        place = place + at[np.minimum(place, last)]
        steps_of_all.append(place)
        if len(steps_of_all) % 4 == 0 and (place >= ends).all():
            break
    else:
        return None
    places = np.stack(steps_of_all)
    steps = (places >= ends).argmax(axis=0)
    missed = np.flatnonzero(places[steps, np.arange(len(ends))] != ends)
    pieces = int(missed[0]) if len(missed) else len(ends)
    inside = np.arange(len(places))[:, np.newaxis] < steps[:pieces]
    starts: Positions = places[:, :pieces].T[inside.T]
    small = np.flatnonzero(np.diff(starts, append=ends[pieces - 1]) < RECORD_BYTES_MIN)
    return starts[: small[0]] if len(small) else starts


# --- records


class Records:
    """The records that begin at `starts` in `raw`, which is at position `base` of the log.

    At least RECORD_BYTES_MIN bytes must follow each start. `valid` says which rows have lengths
    that agree with their size. The positions of other rows have no meaning, but are inside of
    `raw`.
    """

    topic: bytes | None
    """The topic of all records if they have the same one, else None."""
    property_starts: Positions
    """Where the encoded properties of each record begin in `raw`."""
    property_lengths: Positions
    """The size of the encoded properties of each record, in bytes."""

    def __init__(self, raw: Bytes, starts: Positions, base: int = 0) -> None:
        self.raw = raw
        self.starts = starts
        self.base = base
        heads = rows_at(raw, starts, RECORD_HEAD.size).reshape(-1).view(RECORD_HEAD.dtype)
        self.sys_flag = heads["sys_flag"].astype(np.int32)
        kinds = self.sys_flag & HOST_BITS
        self._parts: list[tuple[slice | Positions, NDArray[Any]]] = [(slice(None), heads)]
        if kinds.any():
            self._parts = []
            for kind, head in RECORD_HEADS.items():
                if len(rows := np.flatnonzero(kinds == kind)):
                    heads = rows_at(raw, starts[rows], head.size).reshape(-1).view(head.dtype)
                    self._parts.append((rows, heads))
        self._measure()

    def __len__(self) -> int:
        return len(self.starts)

    def field(self, name: str, dtype: Any = np.int64) -> NDArray[Any]:
        """Return one integer field of the head for all rows."""
        if len(self._parts) == 1:
            return self._parts[0][1][name].astype(dtype)
        numbers = np.empty(len(self), dtype)
        for rows, heads in self._parts:
            numbers[rows] = heads[name]
        return numbers

    def hosts(self, name: str) -> Iterator[tuple[Positions, Bytes]]:
        """Yield (rows, bytes of their hosts) for `born_host` or `store_host`.

        Rows with hosts of the same length come together. The bytes are a matrix with one row for
        each host.
        """
        for rows, heads in self._parts:
            found = np.ascontiguousarray(heads[name])
            yield np.arange(len(self))[rows], found.view(np.uint8).reshape(len(found), -1)

    def _measure(self) -> None:
        """Find where bodies, topics and properties are, and which rows are valid."""
        self.sizes = self.field("size")
        self.ends: Positions = self.starts + self.sizes
        self.body_starts: Positions = self.starts + self._parts[0][1].dtype.itemsize
        for rows, heads in self._parts[1:]:
            self.body_starts[rows] = self.starts[rows] + heads.dtype.itemsize
        self.body_lengths = self.field("body_length")
        self.body_ends: Positions = self.body_starts + self.body_lengths
        magics = self.field("magic", np.int32)
        self._is_second = magics == MAGIC_V2
        self.valid: Mask = self._is_second | (magics == MAGIC_V1)
        self.valid &= (self.body_lengths >= 0) & (self.body_ends + 3 <= self.ends)
        self.body_ends = self._inside(self.body_ends)
        self.topic = None
        if len(self) and self.valid.all() and not self._is_second.any():
            # One gather reads the topic and what follows it, if all records have the same topic.
            length = int(self.raw[self.body_ends[0]])
            tails = rows_at(self.raw, self.body_ends, length + 3)
            text = tails[0, : length + 1].tobytes()
            if rows_begin_with(tails, text).all():
                self.topic = text[1:]
                self.property_starts = self.body_ends + (length + 3)
                self.property_lengths = matrix_column(tails, length + 1, ">i2").astype(np.int64)
        if self.topic is None:
            at = self.topic_starts + self.topic_lengths
            self.valid &= (self.topic_lengths >= 0) & (at + 2 <= self.ends)
            at = self._inside(at)
            self.property_starts = at + 2
            self.property_lengths = gather(self.raw, at, ">i2").astype(np.int64)
        lengths = self.property_lengths
        self.valid &= (lengths >= 0) & (self.property_starts + lengths == self.ends)

    def _inside(self, places: Positions) -> Positions:
        """Return `places`, with those of invalid rows replaced by the start of the record."""
        return places if self.valid.all() else np.where(self.valid, places, self.starts)

    @cached_property
    def topic_starts(self) -> Positions:
        """Where the topic of each record begins in `raw`."""
        return np.asarray(self.body_ends + 1 + self._is_second)

    @cached_property
    def topic_lengths(self) -> Positions:
        """The length of each topic. It is stored in 1 byte in V1 records, and in 2 in V2."""
        lengths: Positions = self.raw[self.body_ends].astype(np.int64)
        if (second := self._is_second).any():
            lengths[second] = gather(self.raw, self.body_ends[second], ">i2")
        return lengths

    @cached_property
    def topics(self) -> tuple[list[bytes], Positions]:
        """The different topics, and for each row the index of its topic."""
        if self.topic is not None:
            return [self.topic], np.zeros(len(self), np.int64)
        starts, lengths = self.topic_starts, np.where(self.valid, self.topic_lengths, 0)
        numbers = np.full(len(self), -1, np.int64)
        known: dict[bytes, int] = {}
        left = np.arange(len(self))
        while len(left) and len(known) < _TOPICS_MAX:
            start, length = int(starts[left[0]]), int(lengths[left[0]])
            text = self.raw[start : start + length].tobytes()
            same = lengths[left] == length
            if length:
                same[same] = rows_begin_with(rows_at(self.raw, starts[left[same]], length), text)
            numbers[left[same]] = known[text] = len(known)
            left = left[~same]
        for length in np.unique(lengths[left]).tolist():  # the further topics, row by row
            rows = left[lengths[left] == length]
            texts, end = rows_at(self.raw, starts[rows], length).tobytes(), len(rows) * length
            places = range(0, end, length) if length else [0] * len(rows)
            numbers[rows] = [known.setdefault(texts[at : at + length], len(known)) for at in places]
        return list(known), numbers

    def record_bytes(self, row: int) -> memoryview:
        """Return all bytes of the record in `row`."""
        return self.raw.data[int(self.starts[row]) : int(self.ends[row])]

    def property_bytes(self, row: int) -> bytes:
        """Return the encoded properties of the record in `row`."""
        start = int(self.property_starts[row])
        return self.raw[start : start + int(self.property_lengths[row])].tobytes()

    def require_valid(self) -> None:
        """Raise ProtocolError if the lengths of a record do not agree with its size."""
        if not self.valid.all():
            row = int(self.valid.argmin())
            offset = int(self.field("queue_offset")[row])
            raise ProtocolError(
                f"The record at byte {self.starts[row]} (queue offset {offset}) is damaged:"
                " its lengths do not agree with its size."
            )

    def take_rows(self, rows: slice | Mask) -> Self:
        """Return the records in these rows."""
        return type(self)(self.raw, self.starts[rows], self.base)
