"""Bytes from many places of one buffer at once (NumPy), whatever their alignment.

All that reads stored records in columns begins here: one step takes a number, or so many bytes, at
each of a thousand places. Bytes side by side are a *matrix*, a row a place. What follows the last
record may be out of reach, so a row that goes on behind the end of the buffer is filled up with
zeros. No pyarrow is loaded for any of it: the broker does without.

The units of consume queues as columns: position, size and code of a tag.

Where the records begin in a run of concatenated stored records, found in columns.

A record says its own size first (spec/store.md §2.1), so finding the starts is a walk: each step
needs the one before. Three ways, from fast to slow, all giving exactly what the plain walk gives:

1. *Equal sizes.* When the first record's size repeats, the starts are an arithmetic row; a look at
   the size and magic of each place proves it.
2. *Lanes.* The run is cut at evenly spaced places where a magic number was found, and all pieces
   are walked side by side, one NumPy step for all of them. A magic number inside a body may be a
   false start; but the lane before it then does not end exactly on it, and since the first lane
   starts at a true record, "every lane ends where the next begins" proves all of them.
3. *One by one*, for short runs and for runs that are damaged; it raises the exact error.

Some stored records as columns of numbers and places: what the column decoder works on.

A record's fixed part (spec/store.md §2.1) is 88 bytes with two IPv4 hosts and 12 more for each
IPv6 host. One gather takes the fixed parts of all records with the same hosts as a NumPy struct;
field by field it would take five times as long (spec/spark.md). Another one takes what lies
between body and properties, as long as all have one topic. Everything is found when first asked
for.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final, Self

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


def equal_rows(block: Bytes, text: bytes) -> NDArray[np.bool_]:
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


UNIT_COLUMNS: Final = UNIT.dtype


LANES = 1024
LANE_RECORDS_MIN = 24
"""Fewer and longer lanes take more steps, more and shorter ones longer to be found."""
_WINDOW_BYTES_MIN = 512
_WINDOW_RECORDS = 1.5
"""So much of each lane is searched for its begin; without one it belongs to the lane before."""
_MAGIC_FIRST = MAGIC_V1 >> 24 & 0xFF
_EQUAL_RUN_MIN = 64


def sizes_at(raw: Bytes, starts: Positions) -> Positions:
    """The total size that stands at each start."""
    return view_of(raw, ">i4")[starts].astype(np.int64)


def record_starts(raw: Bytes) -> Positions:
    """The start of every record in `raw`, which must hold whole records and nothing else.

    Raises ProtocolError where the bytes are not a record.
    """
    if len(raw) == 0:
        return np.empty(0, np.int64)
    if len(raw) < RECORD_BYTES_MIN:
        return _walk(raw, 0)
    starts = _equal_run(raw)
    end = int(starts[-1] + sizes_at(raw, starts[-1:])[0]) if len(starts) else 0
    if end == len(raw):
        return starts
    rest = _lanes(raw[end:], LANES)
    rest = _walk(raw, end) if rest is None else rest + end
    return np.concatenate((starts, rest)) if len(starts) else rest


def _equal_run(raw: Bytes) -> Positions:
    """The starts of the leading records that all have the size of the first one."""
    size = int(sizes_at(raw, np.zeros(1, np.int64))[0])
    if size < RECORD_BYTES_MIN or size > len(raw):
        return np.empty(0, np.int64)
    probe = np.arange(0, min(len(raw) - size + 1, size * _EQUAL_RUN_MIN), size, dtype=np.int64)
    if not _are_records(raw, probe, size).all():
        return np.empty(0, np.int64)
    places = np.arange(0, len(raw) - size + 1, size, dtype=np.int64)
    bad = np.flatnonzero(~_are_records(raw, places, size))
    return places[: bad[0]] if len(bad) else places


def _are_records(raw: Bytes, places: Positions, size: int) -> NDArray[np.bool_]:
    fields = gather(raw, places, BLANK.dtype)
    magics: NDArray[np.bool_] = (fields["magic"] == MAGIC_V1) | (fields["magic"] == MAGIC_V2)
    return np.asarray(magics & (fields["size"] == size))


def _lanes(raw: Bytes, lanes: int) -> Positions | None:
    """The starts by lanes, or None when the run is short or the lanes do not prove each other."""
    if len(raw) < RECORD_BYTES_MIN:  # what a damaged run ends with: the walk says what is wrong
        return None
    first = max(int(sizes_at(raw, np.zeros(1, np.int64))[0]), RECORD_BYTES_MIN)
    lanes = min(lanes, len(raw) // (first * LANE_RECORDS_MIN))
    if lanes < 2:
        return None
    begins = _lane_begins(raw, lanes)
    ends = np.append(begins[1:], len(raw))
    places = _step_lanes(raw, begins, ends)
    if places is None:
        return None
    arrived = places >= ends
    steps = arrived.argmax(axis=0)
    if (places[steps, np.arange(len(ends))] != ends).any():
        return None
    inside = np.arange(len(places))[:, np.newaxis] < steps
    starts = places.T[inside.T]
    sizes = np.diff(starts, append=len(raw))
    return starts if (sizes >= RECORD_BYTES_MIN).all() else None


def _lane_begins(raw: Bytes, lanes: int) -> Positions:
    """Places near even distances where a magic number says a record may begin."""
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
    return np.append(0, places[firsts])


def _step_lanes(raw: Bytes, begins: Positions, ends: Positions) -> Positions | None:
    """All lanes walked until each is at or past its end: places by step and lane.

    A lane that arrived walks on, in the next one's records or in nonsense past the end of the run;
    the caller takes what lies before the first arrival. None when some lane takes too long.
    """
    at = view_of(raw, ">u4")
    last = len(raw) - 4
    place = begins
    places = [place]
    for _ in range(2 + int((ends - begins).max()) // RECORD_BYTES_MIN):
        place = place + at[np.minimum(place, last)]
        places.append(place)
        if len(places) % 4 == 0 and (place >= ends).all():
            return np.stack(places)
    return None


def _walk(raw: Bytes, start: int) -> Positions:
    """The plain walk from `start`, which names the place of what is wrong."""
    data = raw.data
    starts: list[int] = []
    end = len(raw)
    while start < end:
        if end - start < 8:
            raise ProtocolError(f"{end - start} bytes after the last record at {start}.")
        size, magic = BLANK.struct.unpack_from(data, start)
        if magic not in MAGICS:
            raise ProtocolError(
                f"no stored record at byte {start}: magic {magic & 0xFFFFFFFF:#010x}."
            )
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
    starts = _equal_run(raw)
    return starts if len(starts) else _leading_lanes(raw)


def _leading_lanes(raw: Bytes) -> Positions:
    """As `_lanes`, up to the last place where a lane began: what follows proves nothing."""
    first = max(int(sizes_at(raw, np.zeros(1, np.int64))[0]), RECORD_BYTES_MIN)
    lanes = min(LANES, len(raw) // (first * LANE_RECORDS_MIN))
    if lanes < 2:
        return np.empty(0, np.int64)
    begins = _lane_begins(raw, lanes)
    far = np.flatnonzero(np.diff(begins) > 4 * (len(raw) // lanes))
    if len(far):  # a lane this long takes too many steps
        begins = begins[: far[0] + 1]
    while len(begins) > 1:
        ends = begins[1:]
        places = _step_lanes(raw, begins[:-1], ends)
        if places is not None:
            return _proved(raw, places, ends)
        begins = begins[: (len(begins) + 1) // 2]  # something stops a lane: nearer ones may do
    return np.empty(0, np.int64)


def _proved(raw: Bytes, places: Positions, ends: Positions) -> Positions:
    """The starts in the leading lanes that end exactly where the next one begins."""
    steps = (places >= ends).argmax(axis=0)
    missed = np.flatnonzero(places[steps, np.arange(len(ends))] != ends)
    lanes = int(missed[0]) if len(missed) else len(ends)
    inside = np.arange(len(places))[:, np.newaxis] < steps[:lanes]
    starts: Positions = places[:, :lanes].T[inside.T]
    small = np.flatnonzero(np.diff(starts, append=ends[lanes - 1]) < RECORD_BYTES_MIN)
    return starts[: small[0]] if len(small) else starts


Rows = slice | Positions


class Block:
    """Some records of one run of bytes, with what is known about them, found when first asked."""

    def __init__(self, raw: Bytes, starts: Positions) -> None:
        self.raw = raw
        self.starts = starts
        heads = _gather_heads(raw, starts, RECORD_HEAD.dtype)
        self.sys_flag = heads["sys_flag"].astype(np.int32)
        kinds = self.sys_flag & HOST_BITS
        self._parts: list[tuple[Rows, NDArray[Any]]] = [(slice(None), heads)]
        if kinds.any():
            self._parts = _heads_by_kind(raw, starts, kinds)

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

    @cached_property
    def body_starts(self) -> Positions:
        if len(self._parts) == 1:
            return self.starts + self._parts[0][1].dtype.itemsize
        starts = self.starts.copy()
        for rows, heads in self._parts:
            starts[rows] += heads.dtype.itemsize
        return starts

    @cached_property
    def body_lengths(self) -> Positions:
        return self.number("body_length")

    @cached_property
    def _ends(self) -> Positions:
        ends: Positions = self.starts + self.number("size")
        return ends

    @cached_property
    def _body_ends(self) -> Positions:
        lengths = self.body_lengths
        ends: Positions = self.body_starts + lengths
        self._check((lengths < 0) | (ends + 3 > self._ends))
        return ends

    @cached_property
    def _is_second(self) -> NDArray[np.bool_]:
        second: NDArray[np.bool_] = self.number("magic", np.int32) == MAGIC_V2
        return second

    @cached_property
    def _same_topic(self) -> tuple[bytes, Positions] | None:
        """The topic of all records, and the lengths that follow it; None when topics differ."""
        if not len(self) or self._is_second.any():
            return None
        at = self._body_ends
        length = int(self.raw[at[0]])
        tails = rows_at(self.raw, at, length + 3)
        text = tails[0, : length + 1].tobytes()
        if not equal_rows(tails, text).all():
            return None
        return text[1:], column_of(tails, length + 1, ">i2").astype(np.int64)

    @property
    def topic(self) -> bytes | None:
        """The topic, when it is the same in all records."""
        return None if self._same_topic is None else self._same_topic[0]

    @cached_property
    def topic_places(self) -> tuple[Positions, Positions]:
        """Starts and lengths of the topics; the length takes 1 byte in V1, 2 in V2."""
        at, second = self._body_ends, self._is_second
        lengths = self.raw[at].astype(np.int64)
        lengths[second] = gather(self.raw, at[second], ">i2")
        return at + 1 + second, lengths

    @cached_property
    def property_places(self) -> tuple[Positions, Positions]:
        """Starts and lengths of the properties. Raises ProtocolError when a record's lengths differ
        from its size."""
        if self._same_topic is not None:
            topic, lengths = self._same_topic
            starts = self._body_ends + len(topic) + 3
        else:
            topic_starts, topic_lengths = self.topic_places
            starts = topic_starts + topic_lengths + 2
            self._check((topic_lengths < 0) | (starts > self._ends))
            lengths = gather(self.raw, starts - 2, ">i2").astype(np.int64)
        self._check((lengths < 0) | (starts + lengths != self._ends))
        return starts, lengths

    def _check(self, bad: NDArray[np.bool_]) -> None:
        if bad.any():
            raise _damaged(self, bad)

    def part(self, rows: slice | NDArray[np.bool_]) -> Self:
        """Some of the rows as a block of their own."""
        return type(self)(self.raw, self.starts[rows])


def _heads_by_kind(
    raw: Bytes, starts: Positions, kinds: NDArray[np.int32]
) -> list[tuple[Rows, NDArray[Any]]]:
    """The heads of records whose hosts have one length, together: which rows, and their heads."""
    found = [(np.flatnonzero(kinds == kind), head.dtype) for kind, head in RECORD_HEADS.items()]
    return [(rows, _gather_heads(raw, starts[rows], head)) for rows, head in found if len(rows)]


def _gather_heads(raw: Bytes, starts: Positions, kind: np.dtype[Any]) -> NDArray[Any]:
    if len(starts) and int(starts[-1]) + kind.itemsize > len(raw):
        raise ProtocolError(f"the record at byte {starts[-1]} is cut off.")
    return gather(raw, starts, f"V{kind.itemsize}").view(kind)


def _damaged(block: Block, bad: NDArray[np.bool_]) -> ProtocolError:
    row = int(np.flatnonzero(bad)[0])
    offset = int(block.number("queue_offset")[row])
    return ProtocolError(
        f"the record at byte {block.starts[row]} (queue offset {offset}) is damaged:"
        " its lengths do not agree with its size."
    )
