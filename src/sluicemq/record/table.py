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

from collections.abc import Iterator, Sequence
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


def unaligned_view(raw: Bytes, value_type: Any) -> NDArray[Any]:
    """Return a view of `raw` whose element i is the value of `value_type` that begins at byte i.

    `value_type` is a NumPy data type. The view ends where no whole value follows.
    """
    dtype = np.dtype(value_type)
    return np.ndarray((max(len(raw) - dtype.itemsize + 1, 0),), dtype, raw.data, strides=(1,))


def gather(raw: Bytes, starts: Positions, value_type: Any) -> NDArray[Any]:
    """Return an array with the value at each start in `raw`, read as `value_type`.

    `value_type` is a NumPy data type, such as ">i4". The values may begin at any byte, but must be
    within `raw`.
    """
    dtype = np.dtype(value_type)
    if not len(starts):
        return np.empty(0, dtype)
    # Indexing an array of structs takes four times as long as one of plain bytes.
    indexed_dtype = np.dtype(f"V{dtype.itemsize}") if dtype.names else dtype
    values: NDArray[Any] = unaligned_view(raw, indexed_dtype)[starts].view(dtype)
    return values


def rows_at(raw: Bytes, starts: Positions, width: int) -> Bytes:
    """Return a matrix whose row i has the `width` bytes of `raw` from `starts[i]` on.

    Bytes behind the end of `raw` are zeros.
    """
    if not width:
        return np.empty((len(starts), 0), np.uint8)
    if len(raw) < width:
        raw = np.concatenate((raw, np.zeros(width - len(raw), np.uint8)))
    last_start = len(raw) - width
    readable_starts = starts
    if starts.max(initial=0) > last_start:
        readable_starts = np.minimum(starts, last_start)
    rows = gather(raw, readable_starts, f"V{width}").view(np.uint8).reshape(len(starts), width)
    if readable_starts is not starts:
        for row in np.flatnonzero(starts > last_start).tolist():
            rows[row] = np.frombuffer(raw[starts[row] :].tobytes().ljust(width, b"\0"), np.uint8)
    return rows


def matrix_column(matrix: Bytes, column: int, value_type: str) -> NDArray[Any]:
    """Return a view of the values that begin at byte `column` of each row of a matrix.

    `value_type` is their NumPy data type. The matrix must be contiguous, and the values inside of
    the rows.
    """
    return np.ndarray((len(matrix),), value_type, matrix.data, column, (matrix.shape[1],))


def rows_begin_with(matrix: Bytes, prefix: bytes) -> Mask:
    """Return a mask of the rows of a matrix that begin with `prefix`, which must not be empty.

    They are compared as words of 8, 4, 2 or 1 bytes, the last of which may overlap the one before.
    Comparing byte by byte takes several times as long.
    """
    width = next(size for size in (8, 4, 2, 1) if size <= len(prefix))
    last_word_at = len(prefix) - width
    is_equal: NDArray[Any] = np.ones(len(matrix), np.bool_)
    for column in (*range(0, last_word_at, width), last_word_at):
        word = np.frombuffer(prefix, f"u{width}", 1, column)[0]
        is_equal &= matrix_column(matrix, column, f"u{width}") == word
    return is_equal


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
    """Hashes of texts as unsigned numbers, one for each text.

    The hash of a text for which `odd` is true has no meaning, because the text is not ASCII or is
    longer than `_HASHED_BYTES_MAX` bytes.
    """

    hashes: NDArray[np.uint32]
    odd: Mask


def _compute_powers(base: int) -> NDArray[np.uint32]:
    """Return the powers of `base` modulo 2^32, from exponent 0 up to _HASHED_BYTES_MAX + 7."""
    powers = np.ones(_HASHED_BYTES_MAX + 8, np.uint32)
    factors = np.full(len(powers) - 1, base, np.uint32)
    np.cumprod(factors, dtype=np.uint32, out=powers[1:])
    return powers


POWERS: Final = _compute_powers(31)
"""The powers of 31 modulo 2^32: hash(a + b) = hash(a) * POWERS[len(b)] + hash(b)."""
_INVERSES: Final = _compute_powers(pow(31, -1, 1 << 32))
"""The powers of the inverse of 31 modulo 2^32."""


def java_hashes(raw: Bytes, starts: Positions, sizes: Positions) -> JavaHashes:
    """Return Java's String.hashCode of each text, and which texts are odd.

    Text i has the `sizes[i]` bytes of `raw` from `starts[i]` on. A text is odd if it is not ASCII
    or too long; its hash is wrong.

    The hash is a polynomial in 31 modulo 2^32 over the UTF-16 units, which are the bytes if the
    text is ASCII. It is computed as the product of a matrix of bytes with powers of 31. Rows are
    aligned left, and the surplus factor of shorter texts is divided out; 31 is odd, so it has an
    inverse.
    """
    width = int(sizes.max(initial=0))
    is_odd = sizes > _HASHED_BYTES_MAX
    if width > _SHORT_BYTES:
        is_short = sizes <= _SHORT_BYTES
        if is_short.any():
            # Hash short and long texts apart: the matrix of the short ones need not be as wide.
            hashes = np.empty(len(starts), np.uint32)
            for group in (is_short, ~is_short):
                hashes[group], is_odd[group] = java_hashes(raw, starts[group], sizes[group])
            return JavaHashes(hashes, is_odd)

    width = min(width, _HASHED_BYTES_MAX)
    if not width:
        return JavaHashes(np.zeros(len(starts), np.uint32), is_odd)
    matrix = rows_at(raw, starts, width)
    if (sizes != width).any():
        matrix = matrix * (np.arange(width) < sizes[:, np.newaxis])
    if matrix.max() >= _ASCII_END:
        is_odd |= (matrix >= _ASCII_END).any(axis=1)
    # The weight of the first byte is the highest power of 31, that of the last byte is 1.
    weights = np.ascontiguousarray(POWERS[:width][::-1])
    hashes = matrix.astype(np.uint32) @ weights
    return JavaHashes(np.asarray(hashes * _INVERSES[np.maximum(width - sizes, 0)]), is_odd)


# --- where records begin


def read_sizes(raw: Bytes, starts: Positions) -> Positions:
    """Return the 4-byte number at each start, which is the size of the record there."""
    return unaligned_view(raw, ">i4")[starts].astype(np.int64)


def find_record_starts(raw: Bytes) -> Positions:
    """Return the start of each record in `raw`, which must consist of whole records.

    Raises ProtocolError if it does not.
    """
    runs = [np.empty(0, np.int64)]
    end = 0
    while end < len(raw):
        starts = find_leading_starts(raw[end:])
        starts += end
        if len(starts) < _EQUAL_RUN_MIN:
            starts = walk_record_starts(raw, end)  # up to the end of `raw`
        runs.append(starts)
        end = int(starts[-1] + read_sizes(raw, starts[-1:])[0])
    return runs[1] if len(runs) == 2 else np.concatenate(runs)


def walk_record_starts(raw: Bytes, start: int) -> Positions:
    """Return the starts of the records from byte `start` of `raw` to its end, found one by one.

    Raises ProtocolError, which names the position, where the bytes are not a whole record.
    """
    buffer = raw.data
    unpack_size_and_magic = BLANK.struct.unpack_from
    starts: list[int] = []
    end = len(raw)
    while start < end:
        if end - start < BLANK.size:
            raise ProtocolError(
                f"{end - start} bytes follow the last record, which ends at byte {start}."
            )
        size, magic = unpack_size_and_magic(buffer, start)
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
    """Return the starts of the first records in `raw` that are certainly whole records.

    `raw` begins with a record and may end anywhere: within a record, in zeros or in other bytes.
    More records may follow those that are returned. The array is empty if nothing is certain: then
    read the first record alone, and call this again for the bytes behind it.
    """
    if len(raw) < RECORD_BYTES_MIN:
        return np.empty(0, np.int64)
    size = int(read_sizes(raw, np.zeros(1, np.int64))[0])
    if RECORD_BYTES_MIN <= size <= len(raw):
        # If the first records all have this size, assume that for the others too, and return the
        # starts up to the first record for which it is wrong.
        end = len(raw) - size + 1
        first_starts = np.arange(0, min(end, size * _EQUAL_RUN_MIN), size, dtype=np.int64)
        if _are_records(raw, first_starts, size).all():
            starts = np.arange(0, end, size, dtype=np.int64)
            wrong = np.flatnonzero(~_are_records(raw, starts, size))
            return starts[: wrong[0]] if len(wrong) else starts
    return _walk_pieces(raw, PIECES)


def _are_records(raw: Bytes, starts: Positions, size: int) -> Mask:
    """Return at which starts a record of `size` bytes begins, by its size and magic number."""
    fields = gather(raw, starts, BLANK.dtype)
    magics: Mask = (fields["magic"] == MAGIC_V1) | (fields["magic"] == MAGIC_V2)
    return np.asarray(magics & (fields["size"] == size))


def _walk_pieces(raw: Bytes, piece_count: int) -> Positions:
    """Find record starts by following the sizes of records in several pieces at the same time.

    `raw` is divided into up to `piece_count` pieces. Only the starts before the last piece are
    returned, because nothing proves what follows. The array is empty if `raw` is too short for two
    pieces, or if nothing is proven.
    """
    first_size = max(int(read_sizes(raw, np.zeros(1, np.int64))[0]), RECORD_BYTES_MIN)
    piece_count = min(piece_count, len(raw) // (first_size * PIECE_RECORDS_MIN))
    if piece_count < 2:
        return np.empty(0, np.int64)
    stride = len(raw) // piece_count
    piece_starts = _find_piece_starts(raw, piece_count, stride)
    long_piece_indices = np.flatnonzero(np.diff(piece_starts) > 4 * stride)
    if len(long_piece_indices):  # walking such a long piece takes too many steps
        piece_starts = piece_starts[: long_piece_indices[0] + 1]
    while len(piece_starts) > 1:
        starts = _walk_to_ends(raw, piece_starts[:-1], piece_starts[1:])
        if starts is not None:
            return starts
        # One piece cannot be walked. Try the first half of the pieces.
        piece_starts = piece_starts[: (len(piece_starts) + 1) // 2]
    return np.empty(0, np.int64)


def _find_piece_starts(raw: Bytes, piece_count: int, stride: int) -> Positions:
    """Return where the pieces of `raw` begin, in ascending order.

    The first piece begins at 0. Piece n begins at the first magic number of a record in a window of
    bytes from `n * stride` on. If the window has none, there is no piece n.
    """
    usual_bytes = int(_WINDOW_RECORDS * stride) // PIECE_RECORDS_MIN
    window_bytes = min(stride, max(_WINDOW_BYTES_MIN, usual_bytes))
    # The magic number follows the size of a record, which has 4 bytes. Its byte at column c of a
    # window therefore belongs to a record that begins at byte c of the piece.
    windows = raw[: piece_count * stride].reshape(piece_count, stride)[1:, 4:window_bytes]
    window_indices, starts = np.divmod(np.flatnonzero(windows == _MAGIC_FIRST), windows.shape[1])
    starts += (window_indices + 1) * stride
    readable = np.searchsorted(starts, len(raw) - 8, side="right")
    window_indices = window_indices[:readable]
    starts = starts[:readable]
    magics = unaligned_view(raw, ">i4")[starts + 4]
    hits = np.flatnonzero((magics == MAGIC_V1) | (magics == MAGIC_V2))
    first_hits = hits[np.diff(window_indices[hits], prepend=-1) > 0]  # of each window
    return np.append(0, starts[first_hits])


def _walk_to_ends(raw: Bytes, piece_starts: Positions, ends: Positions) -> Positions | None:
    """Walk all pieces to their ends. Return the record starts that are proven.

    To walk means to follow the sizes of records. A piece is proven if the walk hits exactly its
    entry of `ends`, where the next piece begins, and if all pieces before it are proven. The result
    ends at the first record that would be too small. Return None if a piece takes too many steps.
    """
    starts_by_step = _walk_in_steps(raw, piece_starts, ends)
    if starts_by_step is None:
        return None
    step_counts = (starts_by_step >= ends).argmax(axis=0)  # the steps of each piece up to its end
    missed = np.flatnonzero(starts_by_step[step_counts, np.arange(len(ends))] != ends)
    proven_pieces = int(missed[0]) if len(missed) else len(ends)
    is_inside = np.arange(len(starts_by_step))[:, np.newaxis] < step_counts[:proven_pieces]
    starts: Positions = starts_by_step[:, :proven_pieces].T[is_inside.T]
    too_small = np.flatnonzero(np.diff(starts, append=ends[proven_pieces - 1]) < RECORD_BYTES_MIN)
    return starts[: too_small[0]] if len(too_small) else starts


def _walk_in_steps(raw: Bytes, piece_starts: Positions, ends: Positions) -> Positions | None:
    """Walk all pieces, one record at each step, until each has reached its end.

    Return the starts of the records as a matrix [step, piece], or None if it takes too many steps.
    A piece that has reached its end is still walked until the others have; these starts are
    meaningless.
    """
    sizes_by_start = unaligned_view(raw, ">u4")
    last_start = len(raw) - 4
    starts = piece_starts
    starts_by_step = [starts]
    for _ in range(2 + int((ends - piece_starts).max()) // RECORD_BYTES_MIN):
        starts = starts + sizes_by_start[np.minimum(starts, last_start)]
        starts_by_step.append(starts)
        if len(starts_by_step) % 4 == 0 and (starts >= ends).all():
            return np.stack(starts_by_step)
    return None


# --- records


class Records:
    """The records that begin at `starts` in `raw`, which is at position `base` of the log.

    At least RECORD_BYTES_MIN bytes must follow each start. Each attribute has one entry for each
    record. The entries of rows that are not valid have no meaning, except that body ends, topic
    starts and property starts are inside of `raw`.
    """

    valid: Mask
    """Which records have a known magic number, and lengths that agree with their size."""
    topic: bytes | None
    """The topic of all records if they are valid, have layout V1 and the same topic, else None."""
    body_starts: Positions
    """Where the body of each record begins in `raw`."""
    body_lengths: Positions
    """The size of the stored body of each record, in bytes."""
    body_ends: Positions
    """Where the body of each record ends in `raw`."""
    property_starts: Positions
    """Where the encoded properties of each record begin in `raw`."""
    property_lengths: Positions
    """The size of the encoded properties of each record, in bytes."""

    def __init__(self, raw: Bytes, starts: Positions, base: int = 0) -> None:
        """Read the heads of the records at `starts` in `raw`, and locate their parts.

        `raw` begins at position `base` of the log. Sets `valid`, which says for each record whether
        its lengths agree with its size.
        """
        self.raw = raw
        self.starts = starts
        self.base = base
        heads = rows_at(raw, starts, RECORD_HEAD.size).reshape(-1).view(RECORD_HEAD.dtype)
        self.sys_flag = heads["sys_flag"].astype(np.int32)
        # Rows with hosts of the same kind (IPv4 or IPv6) have heads of the same layout. Each part
        # consists of the indices and heads of these rows.
        self._parts: list[tuple[slice | Positions, NDArray[Any]]] = [(slice(None), heads)]
        if (self.sys_flag & HOST_BITS).any():
            self._parts = list(self._iter_heads_by_host_kind())
        self._locate_bodies()
        if not self._locate_properties_behind_one_topic():
            self._locate_properties()

        # The parts must end where the record ends.
        lengths = self.property_lengths
        self.valid &= (lengths >= 0) & (self.property_starts + lengths == self.ends)

    def _iter_heads_by_host_kind(self) -> Iterator[tuple[Positions, NDArray[Any]]]:
        """Yield (rows, heads) for each kind of hosts (IPv4 or IPv6) that occurs.

        `heads` are the heads of the records with the numbers `rows`, which have the same layout.
        """
        host_bits = self.sys_flag & HOST_BITS
        for bits, head in RECORD_HEADS.items():
            rows = np.flatnonzero(host_bits == bits)
            if len(rows):
                yield (
                    rows,
                    rows_at(self.raw, self.starts[rows], head.size).reshape(-1).view(head.dtype),
                )

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.starts)

    def field(self, name: str, dtype: Any = np.int64) -> NDArray[Any]:
        """Return the integer field `name` of all heads, as an array of `dtype`.

        `name` is a field of `layout.RECORD_HEAD`.
        """
        if len(self._parts) == 1:
            return self._parts[0][1][name].astype(dtype)
        values = np.empty(len(self), dtype)
        for rows, heads in self._parts:
            values[rows] = heads[name]
        return values

    def hosts(self, name: str) -> Iterator[tuple[Positions, Bytes]]:
        """Yield (rows, hosts) for the field `born_host` or `store_host`.

        `rows` are the indices of the records whose heads have one layout, and `hosts` is a matrix
        with the 8 or 20 bytes of the host of each of them. All records are yielded.
        """
        for rows, heads in self._parts:
            field = np.ascontiguousarray(heads[name])
            yield np.arange(len(self))[rows], field.view(np.uint8).reshape(len(field), -1)

    def _locate_bodies(self) -> None:
        """Set sizes, ends, and bounds of bodies. Set `valid` where the body fits the record."""
        self.sizes = self.field("size")
        self.ends: Positions = self.starts + self.sizes
        self.body_starts = self.starts + self._parts[0][1].dtype.itemsize
        for rows, heads in self._parts[1:]:
            self.body_starts[rows] = self.starts[rows] + heads.dtype.itemsize
        self.body_lengths = self.field("body_length")
        body_ends = self.body_starts + self.body_lengths
        magics = self.field("magic", np.int32)
        self._is_v2 = magics == MAGIC_V2
        self.valid = self._is_v2 | (magics == MAGIC_V1)
        self.valid &= (self.body_lengths >= 0) & (body_ends + 3 <= self.ends)
        self.body_ends = self._replace_invalid(body_ends)

    def _locate_properties_behind_one_topic(self) -> bool:
        """Set topic and bounds of properties, if all records have the same topic.

        Return whether they have. If not, or if there are no records, or one is not valid or has
        layout V2, only set `topic` to None.
        """
        self.topic = None
        if not len(self) or not self.valid.all() or self._is_v2.any():
            return False
        # One gather reads the length of the topic, the topic, and the length of the properties.
        length = int(self.raw[self.body_ends[0]])
        tails = rows_at(self.raw, self.body_ends, length + 3)
        length_and_topic = tails[0, : length + 1].tobytes()
        if not rows_begin_with(tails, length_and_topic).all():
            return False
        self.topic = length_and_topic[1:]
        self.property_starts = self.body_ends + (length + 3)
        self.property_lengths = matrix_column(tails, length + 1, ">i2").astype(np.int64)
        return True

    def _locate_properties(self) -> None:
        """Set the bounds of properties. Clear `valid` of records whose topic does not fit them."""
        topic_ends = self.topic_starts + self.topic_lengths
        self.valid &= (self.topic_lengths >= 0) & (topic_ends + 2 <= self.ends)
        topic_ends = self._replace_invalid(topic_ends)
        self.property_starts = topic_ends + 2
        self.property_lengths = gather(self.raw, topic_ends, ">i2").astype(np.int64)

    def _replace_invalid(self, offsets: Positions) -> Positions:
        """Return `offsets`, but the start of the record for each row that is not valid.

        All offsets of the result are inside of `raw`, so that the bytes there can be read.
        """
        return offsets if self.valid.all() else np.where(self.valid, offsets, self.starts)

    @cached_property
    def topic_starts(self) -> Positions:
        """Where the topic of each record begins in `raw`."""
        return np.asarray(self.body_ends + 1 + self._is_v2)

    @cached_property
    def topic_lengths(self) -> Positions:
        """The length of each topic in bytes. It is stored in 1 byte in V1 records, and in 2 in V2.

        It may be negative in a V2 record that is not valid.
        """
        lengths: Positions = self.raw[self.body_ends].astype(np.int64)
        is_v2 = self._is_v2
        if is_v2.any():
            lengths[is_v2] = gather(self.raw, self.body_ends[is_v2], ">i2")
        return lengths

    @cached_property
    def topics(self) -> tuple[list[bytes], Positions]:
        """(topics, indices): the different topics, and the index of each row's topic in them.

        A row that is not valid has the topic b"".
        """
        if self.topic is not None:
            return [self.topic], np.zeros(len(self), np.int64)
        lengths = np.where(self.valid, self.topic_lengths, 0)
        topic_indices = np.full(len(self), -1, np.int64)
        index_by_topic: dict[bytes, int] = {}

        # Compare all rows with the topic of the first row that has no index yet, up to
        # `_TOPICS_MAX` times.
        rows = np.arange(len(self))  # those without an index
        while len(rows) and len(index_by_topic) < _TOPICS_MAX:
            topic, has_topic = self._compare_with_first_topic(rows, lengths[rows])
            topic_index = len(index_by_topic)
            index_by_topic[topic] = topic_index
            topic_indices[rows[has_topic]] = topic_index
            rows = rows[~has_topic]

        # Look up the topics of the remaining rows one by one. Topics of one length are read in one
        # step.
        for length in np.unique(lengths[rows]).tolist():
            rows_of_length = rows[lengths[rows] == length]
            joined_topics = rows_at(self.raw, self.topic_starts[rows_of_length], length).tobytes()
            offsets: Sequence[int] = [0] * len(rows_of_length)  # for topics of length 0
            if length:
                offsets = range(0, len(joined_topics), length)
            topic_indices[rows_of_length] = [
                index_by_topic.setdefault(
                    joined_topics[offset : offset + length], len(index_by_topic)
                )
                for offset in offsets
            ]
        return list(index_by_topic), topic_indices

    def _compare_with_first_topic(self, rows: Positions, lengths: Positions) -> tuple[bytes, Mask]:
        """Return (topic, mask): the topic of the first of `rows`, and which of `rows` have it.

        `lengths` are the lengths of the topics of `rows`.
        """
        length = int(lengths[0])
        start = int(self.topic_starts[rows[0]])
        topic = self.raw[start : start + length].tobytes()
        has_topic: Mask = lengths == length
        if length:
            candidates = rows_at(self.raw, self.topic_starts[rows[has_topic]], length)
            has_topic[has_topic] = rows_begin_with(candidates, topic)
        return topic, has_topic

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
        """Return the records that `rows`, a slice or a mask, selects; reads their heads again."""
        return type(self)(self.raw, self.starts[rows], self.base)
