"""Checking records of the commit log by the thousand, in columns (NumPy): what `scan` does singly.

A piece of the log is swept in stages, each cheaper than the next one:

    starts       each record names the size of the one before (`record.walk.leading_starts`)
    structure    sizes of the parts, stored position, store time: whole columns at once
    bodies       zlib over slices of the map, the only work for each record by itself
    properties   gathered side by side; separators found in one pass, tags hashed in columns

The rule is `scan.read_scanned`'s, and it has the last word: a row that is not plainly good (bad,
zeros inside properties, a record that stands in several queues) ends the columns before it, and the
caller reads that record alone. So columns can only be too short, never wrong. Tags that are not
plain (beyond ASCII, twice, delayed messages) are read by the scalar code, row by row.

Finding tag codes in a block of consume-queue units, all at once with NumPy.

A unit has 20 bytes and its tag code in the last 8 (big-endian, a 32-bit hash with its sign
extended). So the low words stand 20 bytes apart, aligned to 4 in a mapped file: they are compared
in the machine's own order with a code whose bytes are swapped. Hits are then checked with the high
words, which differ only for other kinds of numbers (times of delayed messages).

A pull takes 32 of the hits of a chunk, and the next one goes on behind them: the hits of a reader's
chunk are kept for it (`TagHits`), so no unit is looked at twice.

NumPy is imported with this module, and this module at the first filtered read: an idle broker
does without it.

Many units at once: records that lie side by side in the log are one run, found with NumPy.

A bulk read takes ten thousand messages, and as they were sent in batches, or to one topic, they lie
in a few runs. Looking at each unit in turn costs more than all the rest of such a read. NumPy is
imported with this module, and this module at the first bulk read.
"""

import sys
import zlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluicemq.model.message import BORN_HOST_IPV6, STORE_HOST_IPV6, UNQUEUED
from sluicemq.record.codec import is_sealed
from sluicemq.record.layout import (
    CRC_MASK,
    MAGIC_V1,
    MAGIC_V2,
    NAME_END,
    RECORD_BEGIN,
    RECORD_BYTES_MIN,
    RECORD_HEAD,
    VALUE_END,
)
from sluicemq.record.table import UNIT_COLUMNS, Bytes, Positions, gather, leading_starts
from sluicemq.store.log import DELAYS_MS, LOST_CODE, LOST_MARK, read_scanned
from sluicemq.store.queues import BLANK_SIZE, UNIT_BYTES, Queue

PIECE_BYTES: Final = 4 << 20
SCHEDULE_TOPIC: Final = b"SCHEDULE_TOPIC_XXXX"
_HEAD: Final = RECORD_BEGIN.dtype
_STORE_TIME_AT: Final = RECORD_HEAD.at("store_time")
_BODY_LENGTH_AT: Final = RECORD_HEAD.at("body_length")
_TOPIC_V1_MAX: Final = 127
_TAGS: Final = np.uint64(int.from_bytes(b"TAGS"))
_LOW_HALF: Final = np.uint64(0xFFFFFFFF)
_DISPATCH: Final = np.uint64(int.from_bytes(b"DISPATCH"))
"""The last eight bytes of INNER_MULTI_DISPATCH."""
_ASCII_END: Final = 0x80
_TAG_BYTES_MAX: Final = 128
_TOPICS_MAX: Final = 8
Mask = NDArray[np.bool_]


class Sweep:
    """Consecutive good records. `topics[topic_of[n]]` is the topic of record n."""

    def __init__(self, piece: "_Piece", count: int, codes: Positions) -> None:
        self._piece = piece
        self._codes = codes
        self.count = count

    @property
    def start(self) -> int:
        """Position in the log of the first record."""
        return self._piece.base + int(self._piece.starts[0])

    @property
    def end(self) -> int:
        """Position in the log behind the last record."""
        return self._piece.base + int(self._piece.ends[self.count - 1])

    @property
    def store_time_ms(self) -> int:
        """Of the last record."""
        return int(self._piece.times[self.count - 1])

    @property
    def topics(self) -> list[bytes]:
        return self._piece.topics[0]

    @cached_property
    def groups(self) -> "list[Group]":
        """The records that stand in queues, by queue, each in the order of the log."""
        piece, count = self._piece, self.count
        heads = piece.heads[:count]
        queued = np.flatnonzero((heads["sys_flag"].astype(np.int32) & UNQUEUED) == 0)
        ids = heads["queue_id"].astype(np.int64)
        keys = (piece.topics[1][:count] << 32) + (ids & 0xFFFFFFFF)
        order = queued[np.argsort(keys[queued], kind="stable")]
        keys = keys[order]
        units = np.empty(len(order), UNIT_COLUMNS)
        units["position"] = piece.starts[order] + piece.base
        units["size"] = heads["size"][order]
        units["code"] = self._codes[order]
        offsets = heads["queue_offset"][order].astype(np.int64)
        cuts = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(order)]
        return [
            Group(self.topics[int(keys[a]) >> 32], int(ids[order[a]]), offsets[a:b], units[a:b])
            for a, b in pairwise(cuts)
            if b > a
        ]


class Group:
    """The units of one queue found in a sweep, in order, with their queue offsets."""

    __slots__ = ("offsets", "queue_id", "topic", "units")

    def __init__(
        self, topic: bytes, queue_id: int, offsets: Positions, units: NDArray[Any]
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.offsets = offsets
        self.units = units

    @property
    def is_row(self) -> bool:
        """Whether each offset is the one before plus 1."""
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        count = len(self.offsets)
        return last - first == count - 1 and bool((np.diff(self.offsets) == 1).all())

    def rows(self) -> list[tuple[int, tuple[int, int, int]]]:
        """(queue offset, (position, size, tag code)) of each."""
        units: list[tuple[int, int, int]] = self.units.tolist()
        return list(zip(self.offsets.tolist(), units, strict=True))


def sweep_piece(
    view: memoryview,
    at: int,
    base: int,
    *,
    check_crc: bool,
    requires_checksum: bool = False,
    delays_ms: Sequence[int] = DELAYS_MS,
) -> Sweep | None:
    """The good records from `at` on in a file that begins at `base`: as many as one piece holds.

    `delays_ms` are the delays of level 1, 2, … (messageDelayLevel). None when too few can be told
    from others this way.
    """
    raw = np.frombuffer(view, np.uint8, min(PIECE_BYTES, len(view) - at), at)
    starts = leading_starts(raw)
    if not len(starts):
        return None
    piece = _Piece(raw, starts, base + at)
    count = piece.structured
    if check_crc and count:
        count = piece.checked(view[at : at + len(raw)], count, whole=requires_checksum)
    if not count:
        return None
    tags = _Tags(piece, count)
    bad = np.flatnonzero(tags.cut)
    count = int(bad[0]) if len(bad) else count
    for row in np.flatnonzero(tags.odd[:count]).tolist():
        place = at + int(starts[row])
        scanned = read_scanned(view, place, base, check_crc=False)
        if scanned is None:  # cannot be: it was checked above
            return Sweep(piece, row, tags.codes) if row else None
        tags.codes[row] = scanned.tag_code(delays_ms)
    return Sweep(piece, count, tags.codes) if count else None


class _Piece:
    """Records in `raw`, which lies at `base` in the log; columns of places are relative to it."""

    def __init__(self, raw: Bytes, starts: Positions, base: int) -> None:
        self.raw = raw
        self.base = base
        heads = gather(raw, starts, _HEAD)
        ends = starts + heads["size"]
        fits = int(np.searchsorted(ends, len(raw), side="right"))
        self.starts, self.heads, self.ends = starts[:fits], heads[:fits], ends[:fits]
        self.crcs = self.heads["body_crc"].astype(np.int64)
        self._measure()

    def _measure(self) -> None:
        raw, starts, ends = self.raw, self.starts, self.ends
        flags = self.heads["sys_flag"].astype(np.int32)
        born = np.where(flags & BORN_HOST_IPV6, 12, 0)
        extra = born + np.where(flags & STORE_HOST_IPV6, 12, 0)
        inside = starts + _BODY_LENGTH_AT + extra + 7 <= ends
        bodies = np.where(inside, starts + _BODY_LENGTH_AT + extra, starts)
        self.times = gather(raw, np.where(inside, starts + _STORE_TIME_AT + born, starts), ">i8")
        self.prepared = gather(raw, np.where(inside, bodies - 8, starts), ">i8")
        lengths = gather(raw, bodies, ">i4").astype(np.int64)
        is_second = self.heads["magic"] == MAGIC_V2
        self.bodies = bodies + 4
        at = self.bodies + lengths
        inside &= (lengths >= 0) & (at + 3 + is_second <= ends)
        self.body_ends = at = np.where(inside, at, starts)
        topic_lengths = raw[at].astype(np.int64)
        if is_second.any():
            topic_lengths[is_second] = gather(raw, at[is_second], ">i2")
        self.topic_lengths = topic_lengths
        self.topic_starts = at + 1 + is_second
        at = self.topic_starts + topic_lengths
        inside &= (topic_lengths > 0) & (at + 2 <= ends)
        inside &= is_second | (topic_lengths <= _TOPIC_V1_MAX)
        at = np.where(inside, at, starts)
        self.properties = at + 2
        self.properties_bytes = gather(raw, at, ">i2").astype(np.int64)
        inside &= (self.properties_bytes >= 0) & (self.properties + self.properties_bytes == ends)
        self._inside = inside

    @property
    def structured(self) -> int:
        """How many records agree with themselves and with their place, from the first on."""
        good = self._inside & (self.times != 0)
        good &= self.heads["physical_offset"] == self.starts + self.base
        bad = np.flatnonzero(~good)
        return int(bad[0]) if len(bad) else len(good)

    def checked(self, view: memoryview, count: int, *, whole: bool) -> int:
        """How many bodies agree with their CRC (and records with their checksum)."""
        crc32 = zlib.crc32
        starts, ends = self.bodies[:count].tolist(), self.body_ends[:count].tolist()
        found = [crc32(view[start:end]) for start, end in zip(starts, ends, strict=True)]
        bad = np.flatnonzero((np.array(found, np.int64) & CRC_MASK) != self.crcs[:count])
        count = int(bad[0]) if len(bad) else count
        if whole:
            starts, ends = self.starts[:count].tolist(), self.ends[:count].tolist()
            for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
                if not is_sealed(view[start:end]):
                    return number
        return count

    @cached_property
    def topics(self) -> tuple[list[bytes], Positions]:
        """The different topics, and which one each record has. Looked at after `structured`."""
        count = self.structured
        starts, lengths = self.topic_starts[:count], self.topic_lengths[:count]
        numbers = np.full(count, -1, np.int64)
        topics: list[bytes] = []
        left = np.arange(count)
        while len(left) and len(topics) < _TOPICS_MAX:
            start, length = int(starts[left[0]]), int(lengths[left[0]])
            name = self.raw[start : start + length]
            same = lengths[left] == length
            rows = left[same]
            texts = gather(self.raw, starts[rows], f"V{length}").view(np.uint8).reshape(-1, length)
            same[same] = (texts == name).all(axis=1)
            numbers[left[same]] = len(topics)
            topics.append(name.tobytes())
            left = left[~same]
        if len(left):
            self._name_singly(left, topics, numbers)
        return topics, numbers

    def _name_singly(self, rows: Positions, topics: list[bytes], numbers: Positions) -> None:
        known = {topic: number for number, topic in enumerate(topics)}
        data = self.raw.data
        starts, lengths = self.topic_starts[rows].tolist(), self.topic_lengths[rows].tolist()
        numbers[rows] = [
            known.setdefault(bytes(data[start : start + length]), len(known))
            for start, length in zip(starts, lengths, strict=True)
        ]
        topics[:] = known


class _Tags:
    """The tag codes of the first `count` records of a piece, and where they are not to be had.

    `cut`: the columns have to end before; `odd`: the scalar code has to say.
    """

    def __init__(self, piece: _Piece, count: int) -> None:
        self.codes = np.zeros(count, np.int64)
        topics, topic_of = piece.topics
        topic_of = topic_of[:count]
        self.cut = np.isin(topic_of, [n for n, topic in enumerate(topics) if 0 in topic])
        self.odd = np.isin(
            topic_of, [n for n, topic in enumerate(topics) if topic == SCHEDULE_TOPIC]
        )
        sizes = piece.properties_bytes[:count]
        for size in np.unique(sizes).tolist():
            if size:
                rows = np.flatnonzero(sizes == size)
                text = gather(piece.raw, piece.properties[rows], f"V{size}").view(np.uint8)
                self._look(rows, text.reshape(-1, size))
        is_lost = piece.prepared[:count] == LOST_MARK
        self.codes[is_lost] = LOST_CODE
        self.odd[is_lost] = False

    def _look(self, rows: Positions, text: Bytes) -> None:
        """At properties of one length, those of `rows`."""
        count, width = text.shape
        if not text.all():
            self.cut[rows] |= ~text.all(axis=1)
        # Each row gets eight bytes before it (as if a property ended there), a separator behind it.
        matrix = np.full((count, width + 9), VALUE_END, np.uint8)
        matrix[:, 8:-1] = text
        flat = matrix.reshape(-1)
        equals = np.flatnonzero(flat == NAME_END)
        if not len(equals):
            return
        before = gather(flat, equals - 8, ">u8").astype(np.uint64)
        owners = rows[equals // (width + 9)]
        self.cut[owners[before == _DISPATCH]] = True
        hits = np.flatnonzero((before & _LOW_HALF) == _TAGS)
        owners = owners[hits]
        is_name = (before[hits] >> np.uint64(32)) & np.uint64(0xFF) == VALUE_END
        self.odd[owners[~is_name]] = True
        self.odd[owners[1:][owners[1:] == owners[:-1]]] = True
        bad, found = _hashes(flat, equals[hits] + 1)
        self.odd[owners[bad]] = True
        self.codes[owners] = found


def _hashes(flat: Bytes, starts: Positions) -> tuple[Mask, Positions]:
    """Java's string hash of the ASCII texts that begin there and end before a separator 0x02."""
    count = len(starts)
    hashes = np.zeros(count, np.uint32)
    bad = np.zeros(count, np.bool_)
    at = starts
    live = np.arange(count)
    for _ in range(_TAG_BYTES_MAX):
        letters = flat[at]
        going = letters != VALUE_END
        if not going.all():
            live, at, letters = live[going], at[going], letters[going]
        if not len(live):
            return bad, hashes.view(np.int32).astype(np.int64)
        hashes[live] = hashes[live] * np.uint32(31) + letters
        bad[live[(letters >= _ASCII_END) | (letters == NAME_END)]] = True
        at = at + 1
    bad[live] = True
    return bad, hashes.view(np.int32).astype(np.int64)


def unproved_heads(
    view: memoryview,
    base: int,
    units: bytes | bytearray | memoryview,
    queue_id: int,
    offsets: Sequence[int] | Positions,
) -> list[int]:
    """Which units (by number) have no record of their size at their position in this file.

    Only size, magic number, position, queue id and offset are looked at. Units of other files are
    among them.
    """
    rows = np.frombuffer(units, UNIT_COLUMNS)
    positions, sizes = rows["position"].astype(np.int64), rows["size"].astype(np.int64)
    sizes[rows["code"] == LOST_CODE] = 0  # which no record has
    found = unproved_rows(view, base, positions, sizes, queue_id, np.asarray(offsets))
    return [int(row) for row in found]


def unproved_rows(
    view: memoryview,
    base: int,
    positions: Positions,
    sizes: Positions,
    queue_id: int,
    offsets: Positions,
) -> Positions:
    """As `unproved_heads`, for units in columns, none of a lost record."""
    raw = np.frombuffer(view, np.uint8)
    places = positions - base
    inside = (places >= 0) & (places + np.maximum(sizes, RECORD_BYTES_MIN) <= len(raw))
    heads = gather(raw, places if inside.all() else np.where(inside, places, 0), _HEAD)
    good = inside & (heads["size"] == sizes) & (heads["physical_offset"] == positions)
    good &= (heads["magic"] == MAGIC_V1) | (heads["magic"] == MAGIC_V2)
    good &= (heads["queue_id"] == queue_id) & (heads["queue_offset"] == offsets)
    return np.flatnonzero(~good)


CHUNK_UNITS_MIN: Final = 1024
CHUNK_UNITS_MAX: Final = 16 * 1024
"""Chunks grow: 16 k at once cost twice as much when one message in ten matches (bench/README)."""
KEPT: Final = 256
_LOW_WORD: Final = 16
_HIGH_WORD: Final = 12


def find_codes(units: memoryview | bytearray, codes: Collection[int]) -> list[int]:
    """Indices of the units whose tag code is one of `codes`, ascending."""
    count = len(units) // UNIT_BYTES
    if not count or not codes:
        return []
    low = _words(units, count, _LOW_WORD)
    hits: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None
    for code in codes:
        found = low == _as_stored(code)
        hits = found if hits is None else np.logical_or(hits, found, out=hits)
    if hits is None:
        return []
    indices = np.flatnonzero(hits)
    if not len(indices):
        return []
    # The sign extension: all ones for a negative hash, all zeros for another.
    high = _words(units, count, _HIGH_WORD)[indices]
    negative = (low[indices] & _SIGN) != 0
    result: list[int] = indices[high == np.where(negative, 0xFFFFFFFF, 0)].tolist()
    return result


class _Chunk(NamedTuple):
    queue: Queue
    start: int
    stop: int
    indices: list[int]
    """From `start` on, ascending."""


class TagHits:
    """The last chunk of each queue and filter. Stored codes do not change; a queue that was made
    again is another one."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[tuple[str, int, frozenset[int]], _Chunk] = OrderedDict()

    def chunk(
        self, queue: Queue, codes: frozenset[int], position: int, end: int, grown: int
    ) -> tuple[int, int, list[int]]:
        """Where a chunk begins that holds `position`, the offset behind it, and the indices of its
        hits from `position` up to `end`. The offset is `position` when there are no units. HOT.

        `grown`: how many units to look at where nothing is known.
        """
        key = (queue.topic, queue.queue_id, codes)
        known = self._chunks.get(key)
        if known is None or known.queue is not queue or not known.start <= position < known.stop:
            if known is not None and known.queue is queue and known.stop == position:
                grown = min(max(grown, 4 * (known.stop - known.start)), CHUNK_UNITS_MAX)
            units = queue.units(position, min(grown, end - position))
            stop = position + len(units) // UNIT_BYTES
            known = _Chunk(queue, position, stop, find_codes(units, codes))
            self._chunks[key] = known
            if len(self._chunks) > KEPT:
                self._chunks.popitem(last=False)
        _, start, stop, indices = known
        if position > start or stop > end:
            low = bisect_left(indices, position - start)
            indices = indices[low : bisect_left(indices, end - start, low)]
        return start, min(stop, end), indices


def _words(
    units: memoryview | bytearray, count: int, offset: int
) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """One 32-bit word of each unit, as it lies there, without copying."""
    return np.ndarray((count,), np.uint32, buffer=units, offset=offset, strides=(UNIT_BYTES,))


def _as_stored(code: int) -> int:
    """The low word of a code as this machine reads it from big-endian bytes."""
    return int.from_bytes((code & 0xFFFFFFFF).to_bytes(4, "big"), sys.byteorder)


_SIGN: Final = _as_stored(0x80000000)


class Runs(NamedTuple):
    """`places`: from where to where each run goes, in the order of the queue; `messages` of
    `size_bytes` together."""

    places: list[tuple[int, int]]
    messages: int
    size_bytes: int


def runs_of(units: memoryview | bytearray | bytes, count_max: int, bytes_max: int) -> Runs | None:
    """The first units, as far as both limits allow; None when some unit is blank or nonsense."""
    rows = np.frombuffer(units, UNIT_COLUMNS)
    sizes = rows["size"].astype(np.int64)
    if (sizes <= 0).any() or (sizes == BLANK_SIZE).any():
        return None
    totals = np.cumsum(sizes)
    count = min(count_max, int(np.searchsorted(totals, bytes_max, "right")))
    if count <= 0:
        return Runs([], 0, 0)
    starts = rows["position"][:count].astype(np.int64)
    ends = starts + sizes[:count]
    cuts = [0, *(np.flatnonzero(starts[1:] != ends[:-1]) + 1).tolist(), count]
    places = [(int(starts[begin]), int(ends[end - 1])) for begin, end in pairwise(cuts)]
    return Runs(places, count, int(totals[count - 1]))
