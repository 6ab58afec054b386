"""Many stored records at once, as columns of numbers and places (NumPy).

*Places.* One step takes a number, or so many bytes, at each of a thousand places of a buffer,
whatever their alignment. Bytes side by side are a *matrix*, a row a place; a row that goes on
behind the end of the buffer is filled up with zeros.

*Starts.* A record says its own size first, so finding where records begin is a walk in which each
step needs the one before. Three ways, from fast to slow, all giving what the plain walk gives:

1. Equal sizes: when the first record's size repeats, the starts are an arithmetic row; a look at
   the size and magic of each place proves it.
2. Lanes: the run is cut at evenly spaced places where a magic number was found, and all pieces are
   walked side by side, one NumPy step for all of them. A magic number inside a body may be a false
   start; but the lane before it then does not end exactly on it, and since the first lane starts
   at a true record, "every lane ends where the next begins" proves all of them.
3. One by one, for short runs and for runs that are damaged; it raises the exact error.

*Records.* One step takes the heads of all records with the same hosts as a NumPy struct (field by
field it would take five times as long), another one what lies between body and properties, as long
as all have one topic.

No pyarrow is loaded for any of it: the broker does without.
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
Positions = NDArray[np.int64]
Mask = NDArray[np.bool_]

UNIT_COLUMNS: Final = UNIT.dtype

LANES = 1024
LANE_RECORDS_MIN = 24
"""Fewer and longer lanes take more steps, more and shorter ones longer to be found."""
_WINDOW_BYTES_MIN = 512
_WINDOW_RECORDS = 1.5
"""So much of each lane is searched for its begin; without one it belongs to the lane before."""
_MAGIC_FIRST = MAGIC_V1 >> 24 & 0xFF
_EQUAL_RUN_MIN = 64
_TOPICS_MAX: Final = 8
"""So many different topics are looked for in columns."""
_HASHED_BYTES_MAX: Final = 1024
_SHORT_BYTES: Final = 40
_ASCII_END: Final = 0x80


# --- places


def view_of(raw: Bytes, kind: Any) -> NDArray[Any]:
    """One value of `kind` at every byte, as far as they lie inside."""
    dtype = np.dtype(kind)
    return np.ndarray((max(len(raw) - dtype.itemsize + 1, 0),), dtype, raw.data, strides=(1,))


def gather(raw: Bytes, starts: Positions, kind: Any) -> NDArray[Any]:
    """One value of `kind` at each start. Starts must be inside."""
    dtype = np.dtype(kind)
    if not len(starts):
        return np.empty(0, dtype)
    plain = np.dtype(f"V{dtype.itemsize}") if dtype.names else dtype  # fields: four times as slow
    found: NDArray[Any] = view_of(raw, plain)[starts].view(dtype)
    return found


def rows_at(raw: Bytes, starts: Positions, width: int) -> Bytes:
    """The `width` bytes from each start on, as the rows of a matrix; zeros behind the end."""
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


def column_of(block: Bytes, at: int, kind: str) -> NDArray[Any]:
    """The value of `kind` that begins at byte `at` of each row of a matrix."""
    return np.ndarray((len(block),), kind, block.data, at, (block.shape[1],))


def equal_rows(block: Bytes, text: bytes) -> Mask:
    """Which rows of a matrix begin with these bytes. They are compared as words of 8, 4, 2 or 1
    bytes, the last one overlapping: byte by byte takes several times as long."""
    width = next(size for size in (8, 4, 2, 1) if size <= len(text))
    equal: NDArray[Any] = np.ones(len(block), np.bool_)
    for at in dict.fromkeys((*range(0, len(text) - width, width), len(text) - width)):
        word = np.frombuffer(text, f"u{width}", 1, at)[0]
        equal &= column_of(block, at, f"u{width}") == word
    return equal


def keep_freed_memory(size_bytes: int) -> None:
    """Makes glibc keep the memory of so large columns for the next ones. It gives large blocks back
    to the kernel, which then has to clear each page anew (0.05 µs a message), until it has seen one
    as large freed: see mallopt(3), M_MMAP_THRESHOLD. Elsewhere it does nothing."""
    np.empty(size_bytes, np.uint8)


_NIBBLES: Final = np.frombuffer(b"0123456789ABCDEF", np.uint8)
HEX_PAIRS: Final = (
    np.stack((_NIBBLES.repeat(16), np.tile(_NIBBLES, 16)), axis=1).reshape(-1).view(np.uint16)
)
"""Byte value -> its two upper-case hex digits, as one number."""


class Hashed(NamedTuple):
    """`hashes` as unsigned numbers; what is in `odd` (beyond ASCII, very long) has none."""

    hashes: NDArray[np.uint32]
    odd: Mask


def _powers(base: int) -> NDArray[np.uint32]:
    powers = np.ones(_HASHED_BYTES_MAX + 8, np.uint32)
    factors = np.full(len(powers) - 1, base, np.uint32)
    np.cumprod(factors, dtype=np.uint32, out=powers[1:])
    return powers


POWERS: Final = _powers(31)
"""Of 31, modulo 2^32: hash(a + b) = hash(a) * POWERS[len(b)] + hash(b)."""
_INVERSES: Final = _powers(pow(31, -1, 1 << 32))


def java_hashes(raw: Bytes, starts: Positions, sizes: Positions) -> Hashed:
    """Java's String.hashCode of the texts at these places.

    It is a polynomial in 31 modulo 2^32 over UTF-16 units, which are the bytes as long as all are
    ASCII: a product of a matrix of bytes with powers of 31. Rows are aligned left, and the surplus
    factor of a shorter one is divided out (31 is odd, so it has an inverse).
    """
    width = int(sizes.max(initial=0))
    odd = sizes > _HASHED_BYTES_MAX
    if width > _SHORT_BYTES and (short := sizes <= _SHORT_BYTES).any() and not short.all():
        hashes = np.empty(len(starts), np.uint32)
        for part in (short, ~short):  # a few long ones must not widen all
            hashes[part], odd[part] = java_hashes(raw, starts[part], sizes[part])
        return Hashed(hashes, odd)
    width = min(width, _HASHED_BYTES_MAX)
    if not width:
        return Hashed(np.zeros(len(starts), np.uint32), odd)
    text = rows_at(raw, starts, width)
    if (sizes != width).any():
        text = text * (np.arange(width) < sizes[:, np.newaxis])
    if text.max() >= _ASCII_END:
        odd |= (text >= _ASCII_END).any(axis=1)
    weights = np.ascontiguousarray(POWERS[width - 1 :: -1] if width > 1 else POWERS[:1])
    hashes = text.astype(np.uint32) @ weights
    return Hashed(np.asarray(hashes * _INVERSES[np.maximum(width - sizes, 0)]), odd)


# --- where records begin


def sizes_at(raw: Bytes, starts: Positions) -> Positions:
    """The total size that stands at each start."""
    return view_of(raw, ">i4")[starts].astype(np.int64)


def record_starts(raw: Bytes) -> Positions:
    """The start of every record in `raw`, which must hold whole records and nothing else.

    Raises ProtocolError where the bytes are not a record.
    """
    found, end = [np.empty(0, np.int64)], 0
    while end < len(raw):
        starts = leading_starts(raw[end:])
        starts += end
        if len(starts) < _EQUAL_RUN_MIN:
            starts = plain_starts(raw, end)
        found.append(starts)
        end = int(starts[-1] + sizes_at(raw, starts[-1:])[0])
    return found[1] if len(found) == 2 else np.concatenate(found)


def plain_starts(raw: Bytes, start: int) -> Positions:
    """The plain walk from `start`, which names the place of what is wrong."""
    data, unpack = raw.data, BLANK.struct.unpack_from
    starts: list[int] = []
    end = len(raw)
    while start < end:
        if end - start < BLANK.size:
            raise ProtocolError(f"{end - start} bytes after the last record at {start}.")
        size, magic = unpack(data, start)
        if magic not in MAGICS:
            shown = f"{magic & 0xFFFFFFFF:#010x}"
            raise ProtocolError(f"no stored record at byte {start}: magic {shown}.")
        if size < RECORD_BYTES_MIN or size > end - start:
            raise ProtocolError(f"a stored record at byte {start} of {end} claims {size} bytes.")
        starts.append(start)
        start += size
    return np.array(starts, np.int64)


def leading_starts(raw: Bytes) -> Positions:
    """Starts of records that follow one another from the first byte on: as many as one look proves.

    `raw` begins with a record and may end anywhere, also inside one, in zeros or in nonsense. All
    returned records lie wholly in `raw`, as far as sizes and magic numbers say. Where nothing can
    be proved the answer is empty: the caller looks at single records and asks again behind them.
    """
    if len(raw) < RECORD_BYTES_MIN:
        return np.empty(0, np.int64)
    size = int(sizes_at(raw, np.zeros(1, np.int64))[0])
    if RECORD_BYTES_MIN <= size <= len(raw):
        probe = np.arange(0, min(len(raw) - size + 1, size * _EQUAL_RUN_MIN), size, dtype=np.int64)
        if _are_records(raw, probe, size).all():
            places = np.arange(0, len(raw) - size + 1, size, dtype=np.int64)
            bad = np.flatnonzero(~_are_records(raw, places, size))
            return places[: bad[0]] if len(bad) else places
    return _by_lanes(raw, LANES)


def _are_records(raw: Bytes, places: Positions, size: int) -> Mask:
    fields = gather(raw, places, BLANK.dtype)
    magics: Mask = (fields["magic"] == MAGIC_V1) | (fields["magic"] == MAGIC_V2)
    return np.asarray(magics & (fields["size"] == size))


def _by_lanes(raw: Bytes, lanes: int) -> Positions:
    """The starts by lanes, up to the last place where one begins: what follows proves nothing.

    Lanes begin near even distances, where a magic number says that a record may begin.
    """
    first = max(int(sizes_at(raw, np.zeros(1, np.int64))[0]), RECORD_BYTES_MIN)
    lanes = min(lanes, len(raw) // (first * LANE_RECORDS_MIN))
    if lanes < 2:
        return np.empty(0, np.int64)
    stride = len(raw) // lanes
    window = min(stride, max(_WINDOW_BYTES_MIN, int(_WINDOW_RECORDS * stride) // LANE_RECORDS_MIN))
    windows = raw[: lanes * stride].reshape(lanes, stride)[1:, 4:window]
    turns, places = np.divmod(np.flatnonzero(windows == _MAGIC_FIRST), windows.shape[1])
    places += (turns + 1) * stride
    inside = np.searchsorted(places, len(raw) - 8, side="right")
    turns, places = turns[:inside], places[:inside]
    magics = view_of(raw, ">i4")[places + 4]
    hits = np.flatnonzero((magics == MAGIC_V1) | (magics == MAGIC_V2))
    firsts = hits[np.diff(turns[hits], prepend=-1) > 0]
    begins: Positions = np.append(0, places[firsts])
    far = np.flatnonzero(np.diff(begins) > 4 * stride)
    if len(far):  # a lane this long takes too many steps
        begins = begins[: far[0] + 1]
    while len(begins) > 1:
        starts = _walked(raw, begins[:-1], begins[1:])
        if starts is not None:
            return starts
        begins = begins[: (len(begins) + 1) // 2]  # something stops a lane: nearer ones may do
    return np.empty(0, np.int64)


def _walked(raw: Bytes, begins: Positions, ends: Positions) -> Positions | None:
    """All lanes walked until each is at or past its end: the starts in the leading lanes that end
    exactly where the next one begins. None when some lane takes too long.

    A lane that arrived walks on, in the next one's records or in nonsense past the end of the run.
    """
    at, last = view_of(raw, ">u4"), len(raw) - 4
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
    lanes = int(missed[0]) if len(missed) else len(ends)
    inside = np.arange(len(places))[:, np.newaxis] < steps[:lanes]
    starts: Positions = places[:, :lanes].T[inside.T]
    small = np.flatnonzero(np.diff(starts, append=ends[lanes - 1]) < RECORD_BYTES_MIN)
    return starts[: small[0]] if len(small) else starts


# --- records


class Records:
    """The records that begin at `starts` of `raw`, which lies at `base` in the log.

    At least `RECORD_BYTES_MIN` bytes follow each start. Rows whose parts do not agree with their
    size are not `good`: their places are nonsense, but inside of `raw`.
    """

    topic: bytes | None
    """The topic of all, when it is the same."""
    property_starts: Positions
    property_lengths: Positions

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

    def number(self, name: str, dtype: Any = np.int64) -> NDArray[Any]:
        """One field of the head, of all rows."""
        if len(self._parts) == 1:
            return self._parts[0][1][name].astype(dtype)
        numbers = np.empty(len(self), dtype)
        for rows, heads in self._parts:
            numbers[rows] = heads[name]
        return numbers

    def hosts(self, name: str) -> Iterator[tuple[Positions, Bytes]]:
        """`born_host` or `store_host` as (rows, their bytes), those of one length together."""
        for rows, heads in self._parts:
            found = np.ascontiguousarray(heads[name])
            yield np.arange(len(self))[rows], found.view(np.uint8).reshape(len(found), -1)

    def _measure(self) -> None:
        """Where bodies, topics and properties lie."""
        self.sizes = self.number("size")
        self.ends: Positions = self.starts + self.sizes
        self.body_starts: Positions = self.starts + self._parts[0][1].dtype.itemsize
        for rows, heads in self._parts[1:]:
            self.body_starts[rows] = self.starts[rows] + heads.dtype.itemsize
        self.body_lengths = self.number("body_length")
        self.body_ends: Positions = self.body_starts + self.body_lengths
        magics = self.number("magic", np.int32)
        self._is_second = magics == MAGIC_V2
        self.good: Mask = self._is_second | (magics == MAGIC_V1)
        self.good &= (self.body_lengths >= 0) & (self.body_ends + 3 <= self.ends)
        self.body_ends = self._inside(self.body_ends)
        self.topic = None
        if len(self) and self.good.all() and not self._is_second.any():
            # One look takes the topic and what follows it, when it is the same in all records.
            length = int(self.raw[self.body_ends[0]])
            tails = rows_at(self.raw, self.body_ends, length + 3)
            text = tails[0, : length + 1].tobytes()
            if equal_rows(tails, text).all():
                self.topic = text[1:]
                self.property_starts = self.body_ends + (length + 3)
                self.property_lengths = column_of(tails, length + 1, ">i2").astype(np.int64)
        if self.topic is None:
            at = self.topic_starts + self.topic_lengths
            self.good &= (self.topic_lengths >= 0) & (at + 2 <= self.ends)
            at = self._inside(at)
            self.property_starts = at + 2
            self.property_lengths = gather(self.raw, at, ">i2").astype(np.int64)
        lengths = self.property_lengths
        self.good &= (lengths >= 0) & (self.property_starts + lengths == self.ends)

    def _inside(self, places: Positions) -> Positions:
        return places if self.good.all() else np.where(self.good, places, self.starts)

    @cached_property
    def topic_starts(self) -> Positions:
        return np.asarray(self.body_ends + 1 + self._is_second)

    @cached_property
    def topic_lengths(self) -> Positions:
        """They take 1 byte in V1, 2 in V2."""
        lengths: Positions = self.raw[self.body_ends].astype(np.int64)
        if (second := self._is_second).any():
            lengths[second] = gather(self.raw, self.body_ends[second], ">i2")
        return lengths

    def _measure_topics(self) -> None:
        at = self.topic_starts + self.topic_lengths
        self.good &= (self.topic_lengths >= 0) & (at + 2 <= self.ends)
        at = self._inside(at)
        self.property_starts = at + 2
        self.property_lengths = gather(self.raw, at, ">i2").astype(np.int64)

    @cached_property
    def topics(self) -> tuple[list[bytes], Positions]:
        """The different topics, and which one each row has."""
        if self.topic is not None:
            return [self.topic], np.zeros(len(self), np.int64)
        starts, lengths = self.topic_starts, np.where(self.good, self.topic_lengths, 0)
        numbers = np.full(len(self), -1, np.int64)
        known: dict[bytes, int] = {}
        left = np.arange(len(self))
        while len(left) and len(known) < _TOPICS_MAX:
            start, length = int(starts[left[0]]), int(lengths[left[0]])
            text = self.raw[start : start + length].tobytes()
            same = lengths[left] == length
            if length:
                same[same] = equal_rows(rows_at(self.raw, starts[left[same]], length), text)
            numbers[left[same]] = known[text] = len(known)
            left = left[~same]
        for length in np.unique(lengths[left]).tolist():  # many
            rows = left[lengths[left] == length]
            texts, end = rows_at(self.raw, starts[rows], length).tobytes(), len(rows) * length
            places = range(0, end, length) if length else [0] * len(rows)
            numbers[rows] = [known.setdefault(texts[at : at + length], len(known)) for at in places]
        return list(known), numbers

    def record(self, row: int) -> memoryview:
        """All bytes of one."""
        return self.raw.data[int(self.starts[row]) : int(self.ends[row])]

    def properties_of(self, row: int) -> bytes:
        """Of one, encoded."""
        start = int(self.property_starts[row])
        return self.raw[start : start + int(self.property_lengths[row])].tobytes()

    def require_good(self) -> None:
        """Raises ProtocolError when a record's lengths differ from its size."""
        if not self.good.all():
            row = int(self.good.argmin())
            offset = int(self.number("queue_offset")[row])
            raise ProtocolError(
                f"the record at byte {self.starts[row]} (queue offset {offset}) is damaged:"
                " its lengths do not agree with its size."
            )

    def part(self, rows: slice | Mask) -> Self:
        """Some of the rows."""
        return type(self)(self.raw, self.starts[rows], self.base)
