"""Checking thousands of records and choosing among thousands of units at once, with NumPy.

`sweep_piece` checks a piece of the log with the rules of `log.parse_log_record`, in stages, each of
which is cheaper than the next:

    starts       each record's size leads to the next record (`record.table.find_leading_starts`)
    structure    sizes of the parts, stored position, store time: whole columns at once
    bodies       zlib over slices of the map, the only work for each record separately
    properties   gathered side by side; separators found in one pass, tags hashed in columns

The scalar code decides in case of doubt. A record that is not clearly valid (damaged, with zeros in
its properties, or in several queues) ends the columns before it, and the caller parses that record
alone. So columns can be too short, but never wrong. Tags that are not plain (not ASCII, given
twice, of delayed messages) are read by the scalar code, row by row.

Units have 20 bytes, with the tag code in the last 8 (big-endian). `find_tag_codes` compares those
in the machine's byte order with a code whose bytes are swapped. A pull takes 32 of the matches in a
chunk, and the next pull continues behind them. Therefore the matches of a chunk are cached
(`TagHits`), and no unit is compared twice. Messages that were sent in batches are adjacent in the
log; a bulk read takes such runs as a whole (`find_runs`).

NumPy is imported with this module, and this module only when there is much to read, so that an idle
broker runs without it.
"""

import sys
import zlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluicemq.model.message import UNQUEUED
from sluicemq.model.system_names import SCHEDULE_TOPIC
from sluicemq.record.codec import has_valid_checksum
from sluicemq.record.layout import (
    CRC_MASK,
    MAGIC_V1,
    MAGIC_V2,
    NAME_END,
    RECORD_BEGIN,
    RECORD_BYTES_MIN,
    UNIT,
    VALUE_END,
)
from sluicemq.record.table import (
    UNIT_COLUMNS,
    Mask,
    Positions,
    Records,
    find_leading_starts,
    gather,
    java_hashes,
    rows_at,
)
from sluicemq.store.log import (
    DELAYS_MS,
    PLACEHOLDER_CODE,
    PLACEHOLDER_PREPARED_OFFSET,
    parse_log_record,
)
from sluicemq.store.queues import BLANK_SIZE, UNIT_BYTES, Queue, Units

PIECE_BYTES: Final = 4 << 20
"""`sweep_piece` checks at most this many bytes at once."""
CHUNK_UNITS_MIN: Final = 1024
CHUNK_UNITS_MAX: Final = 16 * 1024
"""Chunks grow up to this many units.

Starting with 16 k at once cost twice as much when one message in ten matches (bench/README).
"""
CACHED_CHUNKS_MAX: Final = 256
"""Number of chunks whose matches are cached."""
_RECORD_BEGIN: Final = RECORD_BEGIN.dtype
_SCHEDULE_TOPIC: Final = SCHEDULE_TOPIC.encode()
_TAGS_WORD: Final = np.uint64(int.from_bytes(b"TAGS"))
_LOW_WORD_HALF: Final = np.uint64(0xFFFFFFFF)
_DISPATCH_WORD: Final = np.uint64(int.from_bytes(b"DISPATCH"))
"""The last eight bytes of INNER_MULTI_DISPATCH."""
_TAG_BYTES_MAX: Final = 40
"""Longer tags are hashed by the scalar code."""
_WHOLE_UNIT: Final = np.dtype(f"V{UNIT_BYTES}")
_CODE_AT: Final = UNIT.at("code")


# --- records


class QueueUnits:
    """The units of one queue in a sweep, in the order of the log, with their queue offsets.

    `topic` is encoded. `offsets` and `units` are arrays of equal length; `units` has the dtype
    `UNIT_COLUMNS`.
    """

    __slots__ = ("offsets", "queue_id", "topic", "units")

    def __init__(
        self, topic: bytes, queue_id: int, offsets: Positions, units: NDArray[Any]
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.offsets = offsets
        self.units = units

    @property
    def is_consecutive(self) -> bool:
        """Whether each offset is the previous one plus 1."""
        return bool((np.diff(self.offsets) == 1).all())

    def rows(self) -> list[tuple[int, tuple[int, int, int]]]:
        """Return (queue offset, (position, size, tag code)) of each unit."""
        units: list[tuple[int, int, int]] = self.units.tolist()
        return list(zip(self.offsets.tolist(), units, strict=True))


class Sweep:
    """Records that are adjacent in the log, and all valid, in columns."""

    def __init__(self, records: Records, count: int, codes: Positions) -> None:
        """Create a sweep of the first `count` of `records`. `codes` are their tag codes."""
        self._records = records
        self._codes = codes
        self.count = count

    @property
    def records(self) -> Records:
        """All columns of the records."""
        return self._records.take_rows(slice(self.count))

    @property
    def start(self) -> int:
        """The position of the first record."""
        return self._records.base + int(self._records.starts[0])

    @property
    def end(self) -> int:
        """The position behind the last record."""
        return self._records.base + int(self._records.ends[self.count - 1])

    @property
    def store_time_ms(self) -> int:
        """The store time of the last record."""
        return int(self._records.field("store_time")[self.count - 1])

    @cached_property
    def groups(self) -> list[QueueUnits]:
        """The units of the records that are in queues, by queue, each in the order of the log."""
        records, count = self._records, self.count
        topics, topic_of = records.topics
        queued = np.flatnonzero((records.sys_flag[:count] & UNQUEUED) == 0)
        ids = records.field("queue_id")
        keys = (topic_of[:count] << 32) + (ids[:count] & 0xFFFFFFFF)
        order = queued[np.argsort(keys[queued], kind="stable")]
        keys = keys[order]
        units = np.empty(len(order), UNIT_COLUMNS)
        units["position"] = records.starts[order] + records.base
        units["size"] = records.sizes[order]
        units["code"] = self._codes[order]
        offsets = records.field("queue_offset")[order]
        cuts = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(order)]
        return [
            QueueUnits(topics[int(keys[a]) >> 32], int(ids[order[a]]), offsets[a:b], units[a:b])
            for a, b in pairwise(cuts)
            if b > a
        ]


def sweep_piece(
    view: memoryview,
    at: int,
    base: int,
    *,
    check_crc: bool,
    requires_checksum: bool = False,
    delays_ms: Sequence[int] = DELAYS_MS,
) -> Sweep | None:
    """Return the valid records from index `at` of a view on, up to the first doubtful one.

    The view begins at position `base` of the log. At most `PIECE_BYTES` are checked. Returns None
    if the first record is doubtful: the caller then parses it alone, because it need not be
    damaged. `check_crc` False skips the CRCs. With `requires_checksum`, records without a valid
    checksum property are not valid. `delays_ms` are the delays of level 1, 2, …
    (messageDelayLevel), for the units of delayed messages.
    """
    raw = np.frombuffer(view, np.uint8, min(PIECE_BYTES, len(view) - at), at)
    starts = find_leading_starts(raw)
    if not len(starts):
        return None
    records = Records(raw, starts, base + at)
    good = records.valid & (records.topic_lengths > 0) & (records.field("store_time") != 0)
    count = _count_leading(good & (records.field("physical_offset") == starts + records.base))
    if check_crc:
        begins, ends = records.body_starts[:count].tolist(), records.body_ends[:count].tolist()
        data, crc32 = raw.data, zlib.crc32
        crcs = np.array([crc32(data[a:b]) for a, b in zip(begins, ends, strict=True)], np.int64)
        count = _count_leading((crcs & CRC_MASK) == records.field("body_crc")[:count])
        if requires_checksum:
            sealed = [has_valid_checksum(records.record_bytes(row)) for row in range(count)]
            count = _count_leading(np.array(sealed, np.bool_))
    if not count:
        return None
    codes, odd, cut = _tag_codes(records, count)
    count = _count_leading(~cut)
    for row in np.flatnonzero(odd[:count]).tolist():
        record = parse_log_record(view, at + int(starts[row]), base, check_crc=False)
        if record is None:  # impossible: the record was checked above
            count = row
            break
        codes[row] = record.tag_code(delays_ms)
    return Sweep(records, count, codes) if count else None


def _count_leading(good: Mask) -> int:
    """Return the number of rows before the first one that is not good; all if every row is."""
    return len(good) if good.all() else int(good.argmin())


def _tag_codes(records: Records, count: int) -> tuple[Positions, Mask, Mask]:
    """Return (codes, odd, cut) of the first `count` records: their tag codes, and two masks.

    Rows in `odd` have no valid code: the scalar code must compute it. The sweep must end before the
    first row in `cut`, which has zeros in its topic or properties, or belongs to several queues.
    """
    codes = np.zeros(count, np.int64)
    topics, topic_of = records.topics
    topic_of = topic_of[:count]
    cut = np.isin(topic_of, [n for n, topic in enumerate(topics) if 0 in topic])
    odd = np.isin(topic_of, [n for n, topic in enumerate(topics) if topic == _SCHEDULE_TOPIC])
    sizes = records.property_lengths[:count]
    for size in np.unique(sizes[sizes > 0]).tolist():
        rows = np.flatnonzero(sizes == size)
        text = rows_at(records.raw, records.property_starts[rows], size)
        cut[rows] |= ~text.all(axis=1)
        # Eight bytes precede each row, as if a property ended there, and a separator follows it.
        matrix = np.full((len(rows), size + 9), VALUE_END, np.uint8)
        matrix[:, 8:-1] = text
        flat = matrix.reshape(-1)
        equals = np.flatnonzero(flat == NAME_END)
        before = gather(flat, equals - 8, ">u8").astype(np.uint64)
        owners = rows[equals // (size + 9)]
        cut[owners[before == _DISPATCH_WORD]] = True
        hits = np.flatnonzero((before & _LOW_WORD_HALF) == _TAGS_WORD)
        if not len(hits):
            continue
        owners = owners[hits]
        is_name = (before[hits] >> np.uint64(32)) & np.uint64(0xFF) == VALUE_END
        odd[owners[~is_name]] = True
        odd[owners[1:][owners[1:] == owners[:-1]]] = True
        starts = equals[hits] + 1
        is_end = rows_at(flat, starts, _TAG_BYTES_MAX) == VALUE_END
        lengths = is_end.argmax(axis=1)
        following = np.append(equals, len(flat))[hits + 1]
        hashes, is_odd = java_hashes(flat, starts, lengths)
        odd[owners[is_odd | (following < starts + lengths) | ~is_end.any(axis=1)]] = True
        codes[owners] = hashes.view(np.int32)
    is_lost = records.field("prepared_offset")[:count] == PLACEHOLDER_PREPARED_OFFSET
    codes[is_lost] = PLACEHOLDER_CODE
    odd[is_lost] = False
    return codes, odd, cut


# --- units


def unverified_heads(
    view: memoryview, base: int, units: Units, queue_id: int, offsets: Sequence[int] | Positions
) -> list[int]:
    """Return the indices of the units whose records could not be verified here.

    A unit is verified if, at its position, a head has its size, a known magic number, this
    position, the queue id, and the unit's offset of `offsets`. The rest of the record is not
    checked. `view` contains the bytes of one file, from position `base` of the log on. Units of
    records in other files, and of placeholders, are returned too.
    """
    rows = np.frombuffer(units, UNIT_COLUMNS)
    positions, sizes = rows["position"].astype(np.int64), rows["size"].astype(np.int64)
    sizes[rows["code"] == PLACEHOLDER_CODE] = 0  # no record has this size, so none matches
    unverified = unverified_rows(view, base, positions, sizes, queue_id, np.asarray(offsets))
    return [int(row) for row in unverified]


def unverified_rows(
    view: memoryview,
    base: int,
    positions: Positions,
    sizes: Positions,
    queue_id: int,
    offsets: Positions,
) -> Positions:
    """Return what `unverified_heads` returns, for units in columns, none of a placeholder."""
    raw = np.frombuffer(view, np.uint8)
    starts = positions - base
    inside = (starts >= 0) & (starts + np.maximum(sizes, RECORD_BYTES_MIN) <= len(raw))
    heads = gather(raw, starts if inside.all() else np.where(inside, starts, 0), _RECORD_BEGIN)
    good = inside & (heads["size"] == sizes) & (heads["physical_offset"] == positions)
    good &= (heads["magic"] == MAGIC_V1) | (heads["magic"] == MAGIC_V2)
    good &= (heads["queue_id"] == queue_id) & (heads["queue_offset"] == offsets)
    return np.flatnonzero(~good)


def find_tag_codes(units: Units, codes: Collection[int]) -> NDArray[np.intp]:
    """Return the indices of the units whose tag code is one of `codes`, in ascending order."""
    count = len(units) // UNIT_BYTES
    if not count or not codes:
        return np.empty(0, np.intp)
    # A view of the tag codes, which are 20 bytes apart, without copying.
    stored = np.ndarray((count,), np.int64, buffer=units, offset=_CODE_AT, strides=(UNIT_BYTES,))
    first, *others = map(_swap_bytes, codes)
    hits = stored == first
    for code in others:
        np.logical_or(hits, stored == code, out=hits)
    return np.flatnonzero(hits)


def _swap_bytes(code: int) -> np.int64:
    """Return a tag code as this machine reads it from big-endian bytes."""
    return np.int64(
        int.from_bytes(code.to_bytes(8, "big", signed=True), sys.byteorder, signed=True)
    )


class ChunkHits(NamedTuple):
    """The matching units among a queue's units from offset `start` to before `stop`.

    `units` are the matching units, joined, and `offsets` their queue offsets, in ascending order.
    """

    queue: Queue
    start: int
    stop: int
    offsets: list[int]
    units: bytes


class TagHits:
    """Caches the matches in the last chunk of each queue and set of tag codes.

    Stored tag codes do not change. A queue that was deleted and created again is another object.
    """

    def __init__(self) -> None:
        self._chunks: OrderedDict[tuple[str, int, frozenset[int]], ChunkHits] = OrderedDict()

    def at(
        self, queue: Queue, codes: frozenset[int], position: int, end: int, grown: int
    ) -> ChunkHits | None:
        """Return the matches of a chunk that contains offset `position`. HOT.

        A cached chunk may begin before `position`, and may continue behind `end`. Otherwise a chunk
        of `grown` units from `position` on, at most up to `end`, is compared and cached. It is
        larger if `position` is where the cached chunk ends, because a reader that continues will
        need more. Returns None if the queue has no units at `position`.
        """
        key = (queue.topic, queue.queue_id, codes)
        chunk = self._chunks.get(key)
        if chunk is None or chunk.queue is not queue or not chunk.start <= position < chunk.stop:
            if chunk is not None and chunk.queue is queue and chunk.stop == position:
                grown = min(max(grown, 4 * (chunk.stop - chunk.start)), CHUNK_UNITS_MAX)
            units = queue.units(position, min(grown, end - position))
            count = len(units) // UNIT_BYTES
            if not count:
                return None
            offsets, hits = select_tagged(units, codes, position)
            chunk = self._chunks[key] = ChunkHits(queue, position, position + count, offsets, hits)
            if len(self._chunks) > CACHED_CHUNKS_MAX:
                self._chunks.popitem(last=False)
        return chunk


def select_tagged(units: Units, codes: Collection[int], offset: int) -> tuple[list[int], bytes]:
    """Return (queue offsets, joined units) of the units with one of the tag codes.

    `offset` is the queue offset of the first one of `units`. The results are in its order.
    """
    indices = find_tag_codes(units, codes)
    return (indices + offset).tolist(), np.frombuffer(units, _WHOLE_UNIT)[indices].tobytes()


class Runs(NamedTuple):
    """Runs of records that are adjacent in the log.

    `extents` are the (start, end) positions of the runs, in the order of the queue. They contain
    `messages` records of `size_bytes` bytes in total.
    """

    extents: list[tuple[int, int]]
    messages: int
    size_bytes: int


def find_runs(units: Units, count_max: int, bytes_max: int) -> Runs | None:
    """Return the runs that the first units form: at most `count_max` units and `bytes_max` bytes.

    The runs are empty if not even the first unit is within the limits. Returns None if any of the
    units is blank or has an impossible size, because then they must be examined one by one.
    """
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
    extents = [(int(starts[begin]), int(ends[end - 1])) for begin, end in pairwise(cuts)]
    return Runs(extents, count, int(totals[count - 1]))
