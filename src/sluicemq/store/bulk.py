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

    A unit is the 20-byte entry of a queue that locates a record. `topic` is encoded. `offsets` and
    `units` are arrays of equal length; `units` has the dtype `UNIT_COLUMNS`.
    """

    __slots__ = ("offsets", "queue_id", "topic", "units")

    def __init__(
        self, topic: bytes, queue_id: int, offsets: Positions, units: NDArray[Any]
    ) -> None:
        """Group the units of one queue: unit i has the queue offset `offsets[i]`.

        `topic` is encoded, and `units` is an array of UNIT_COLUMNS.
        """
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
        unit_tuples: list[tuple[int, int, int]] = self.units.tolist()
        return list(zip(self.offsets.tolist(), unit_tuples, strict=True))


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
        """The units (queue entries) of the records, grouped by queue, each in the order of the log.

        Records that belong to no queue are left out.
        """
        rows, boundaries = self._sort_rows_by_queue()
        units = self._make_units(rows)
        topics, topic_indices = self._records.topics
        queue_ids = self._records.field("queue_id")
        queue_offsets = self._records.field("queue_offset")[rows]
        groups = []
        for begin, end in pairwise(boundaries):
            first_row = rows[begin]
            topic = topics[int(topic_indices[first_row])]
            queue_id = int(queue_ids[first_row])
            groups.append(QueueUnits(topic, queue_id, queue_offsets[begin:end], units[begin:end]))
        return groups

    def _sort_rows_by_queue(self) -> tuple[NDArray[np.intp], list[int]]:
        """Return (rows, boundaries): the numbers of the records in queues, sorted by queue.

        Queue k has the rows from index `boundaries[k]` up to `boundaries[k + 1]`, in the order of
        the log. `boundaries` is empty if no record is in a queue.
        """
        records = self._records
        count = self.count
        # A key has the topic's index in its high half, and the queue id in its low half.
        _, topic_indices = records.topics
        keys = (topic_indices[:count] << 32) + (records.field("queue_id")[:count] & 0xFFFFFFFF)
        queued_rows = np.flatnonzero((records.sys_flag[:count] & UNQUEUED) == 0)
        rows = queued_rows[np.argsort(keys[queued_rows], kind="stable")]
        if not len(rows):
            return rows, []
        key_changes = np.flatnonzero(np.diff(keys[rows])) + 1
        return rows, [0, *key_changes.tolist(), len(rows)]

    def _make_units(self, rows: NDArray[np.intp]) -> NDArray[Any]:
        """Make the units (queue entries) of the records in these rows: an array of UNIT_COLUMNS."""
        units = np.empty(len(rows), UNIT_COLUMNS)
        units["position"] = self._records.starts[rows] + self._records.base
        units["size"] = self._records.sizes[rows]
        units["code"] = self._codes[rows]
        return units


def sweep_piece(
    view: memoryview,
    start: int,
    base: int,
    *,
    check_crc: bool,
    requires_checksum: bool = False,
    delays_ms: Sequence[int] = DELAYS_MS,
) -> Sweep | None:
    """Check many records at once. Return the valid ones up to the first doubtful one.

    The first record begins at byte `start` of `view`, which begins at position `base` of the log.
    At most `PIECE_BYTES` are checked. Returns None if the first record is doubtful: the caller must
    then parse it alone, because it need not be damaged.

    CRCs are checked if `check_crc`. If `requires_checksum`, a record without a valid checksum
    property is not valid. `delays_ms` are the delays of level 1, 2, … (messageDelayLevel), for the
    units of delayed messages.
    """
    raw = np.frombuffer(view, np.uint8, min(PIECE_BYTES, len(view) - start), start)
    record_starts = find_leading_starts(raw)
    if not len(record_starts):
        return None
    records = Records(raw, record_starts, base + start)

    # Each check lowers `count`, the number of leading records that have passed all checks.
    count = _count_structurally_valid(records)
    if check_crc:
        count = _count_valid_bodies(records, count)
        if requires_checksum:
            has_checksum = [has_valid_checksum(records.record_bytes(row)) for row in range(count)]
            count = _count_leading(np.array(has_checksum, np.bool_))
    if not count:
        return None

    # Where the columns give no tag code, the scalar code computes it from the record.
    tags = _hash_tags(records, count)
    codes = tags.codes
    count = _count_leading(~tags.ends_sweep)
    for row in np.flatnonzero(tags.is_odd[:count]).tolist():
        record = parse_log_record(view, start + int(record_starts[row]), base, check_crc=False)
        if record is None:  # impossible: the record was checked above
            count = row
            break
        codes[row] = record.tag_code(delays_ms)
    if not count:
        return None
    return Sweep(records, count, codes)


def _count_leading(is_good: Mask) -> int:
    """Return the number of rows before the first one that is not good; all if every row is."""
    return len(is_good) if is_good.all() else int(is_good.argmin())


def _count_structurally_valid(records: Records) -> int:
    """Count the leading records with possible lengths, a topic, a time and their own position."""
    has_topic = records.topic_lengths > 0
    has_time = records.field("store_time") != 0
    is_at_its_position = records.field("physical_offset") == records.starts + records.base
    return _count_leading(records.valid & has_topic & has_time & is_at_its_position)


def _count_valid_bodies(records: Records, count: int) -> int:
    """Count the leading records whose bodies have the right CRC, among the first `count`."""
    body_starts = records.body_starts[:count].tolist()
    body_ends = records.body_ends[:count].tolist()
    log_bytes = records.raw.data
    crc32 = zlib.crc32
    crcs = [crc32(log_bytes[start:end]) for start, end in zip(body_starts, body_ends, strict=True)]
    is_right = (np.array(crcs, np.int64) & CRC_MASK) == records.field("body_crc")[:count]
    return _count_leading(is_right)


class _HashedTags(NamedTuple):
    """The tag codes of records, and two masks over the records.

    Where `is_odd` is set, `codes` has no valid code: the scalar code must compute it. The sweep
    must end before the first record where `ends_sweep` is set: this record has zeros in its topic
    or properties, or belongs to several queues.
    """

    codes: Positions
    is_odd: Mask
    ends_sweep: Mask


def _hash_tags(records: Records, count: int) -> _HashedTags:
    """Compute the tag codes (hashes of tags) of the first `count` records.

    The result also marks odd rows, whose code must be computed from the record alone, and rows at
    which the sweep must end.
    """
    codes = np.zeros(count, np.int64)

    # The topic alone decides some rows.
    topics, topic_indices = records.topics
    topic_indices = topic_indices[:count]
    topics_with_zeros = [index for index, topic in enumerate(topics) if 0 in topic]
    delay_topics = [index for index, topic in enumerate(topics) if topic == _SCHEDULE_TOPIC]
    ends_sweep = np.isin(topic_indices, topics_with_zeros)
    is_odd = np.isin(topic_indices, delay_topics)
    tags = _HashedTags(codes, is_odd, ends_sweep)

    # Rows whose properties have equally many bytes form a matrix.
    lengths = records.property_lengths[:count]
    for length in np.unique(lengths[lengths > 0]).tolist():
        _hash_tags_of_length(records, np.flatnonzero(lengths == length), length, tags)

    # Last, because a placeholder has its own code, whatever its properties are.
    is_placeholder = records.field("prepared_offset")[:count] == PLACEHOLDER_PREPARED_OFFSET
    codes[is_placeholder] = PLACEHOLDER_CODE
    is_odd[is_placeholder] = False
    return tags


def _hash_tags_of_length(
    records: Records, rows: NDArray[np.intp], length: int, tags: _HashedTags
) -> None:
    """Compute the tag codes of the records `rows`, and write them into `tags`.

    The properties of all these records have `length` bytes. Rows are also marked in `tags` as odd
    if the tag needs the scalar code, and as `ends_sweep` if the record may be damaged or is in
    several queues.
    """
    properties = rows_at(records.raw, records.property_starts[rows], length)
    tags.ends_sweep[rows] |= ~properties.all(axis=1)

    # Eight bytes precede each row, as if a property ended there, and a separator follows it.
    row_bytes = length + 9
    matrix = np.full((len(rows), row_bytes), VALUE_END, np.uint8)
    matrix[:, 8:-1] = properties
    flat = matrix.reshape(-1)

    # A name ends with NAME_END. Compare the eight bytes before it with the names that matter.
    name_ends = np.flatnonzero(flat == NAME_END)
    words_before = gather(flat, name_ends - 8, ">u8").astype(np.uint64)
    rows_of_names = rows[name_ends // row_bytes]
    tags.ends_sweep[rows_of_names[words_before == _DISPATCH_WORD]] = True
    hits = np.flatnonzero((words_before & _LOW_WORD_HALF) == _TAGS_WORD)
    if not len(hits):
        return
    tag_rows = rows_of_names[hits]

    # Rows are odd if a longer name ends with "TAGS", or if the name occurs twice.
    byte_before_name = (words_before[hits] >> np.uint64(32)) & np.uint64(0xFF)
    tags.is_odd[tag_rows[byte_before_name != VALUE_END]] = True
    tags.is_odd[tag_rows[1:][tag_rows[1:] == tag_rows[:-1]]] = True

    # Rows are odd if the tag is not ASCII, contains NAME_END, or is too long.
    tag_starts = name_ends[hits] + 1
    is_tag_end = rows_at(flat, tag_starts, _TAG_BYTES_MAX) == VALUE_END
    tag_lengths = is_tag_end.argmax(axis=1)
    is_too_long = ~is_tag_end.any(axis=1)
    next_name_ends = np.append(name_ends, len(flat))[hits + 1]
    contains_name_end = next_name_ends < tag_starts + tag_lengths
    hashes, is_not_ascii = java_hashes(flat, tag_starts, tag_lengths)
    tags.is_odd[tag_rows[is_not_ascii | contains_name_end | is_too_long]] = True
    tags.codes[tag_rows] = hashes.view(np.int32)


# --- units


def unverified_heads(
    view: memoryview, base: int, units: Units, queue_id: int, offsets: Sequence[int] | Positions
) -> list[int]:
    """Return the indices of the units whose records do not have the right head.

    `units` are 20-byte entries of a queue, joined, and `offsets` their queue offsets. The head at a
    unit's position must have the unit's size, a known magic number, this position, the queue id,
    and the offset. The rest of the record is not checked. `view` contains one file of the log,
    which begins at position `base`. Units of records in other files, and of placeholders, are
    returned too.
    """
    rows = np.frombuffer(units, UNIT_COLUMNS)
    positions = rows["position"].astype(np.int64)
    sizes = rows["size"].astype(np.int64)
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
    """Return the indices of the units whose records do not have the right head.

    Unit i locates a record of `sizes[i]` bytes at position `positions[i]`, and has the queue offset
    `offsets[i]`. The head there must have these values and the queue id. `view` contains one file
    of the log, which begins at position `base`. Units of records in other files are returned too.
    """
    raw = np.frombuffer(view, np.uint8)
    starts = positions - base
    is_inside = (starts >= 0) & (starts + np.maximum(sizes, RECORD_BYTES_MIN) <= len(raw))
    # Units of other files read the head at 0, so that no index is out of range.
    readable_starts = starts if is_inside.all() else np.where(is_inside, starts, 0)
    heads = gather(raw, readable_starts, _RECORD_BEGIN)
    is_verified = is_inside & (heads["size"] == sizes) & (heads["physical_offset"] == positions)
    is_verified &= (heads["magic"] == MAGIC_V1) | (heads["magic"] == MAGIC_V2)
    is_verified &= (heads["queue_id"] == queue_id) & (heads["queue_offset"] == offsets)
    return np.flatnonzero(~is_verified)


def find_tag_codes(units: Units, codes: Collection[int]) -> NDArray[np.intp]:
    """Return the indices of the units whose tag code is one of `codes`, in ascending order.

    `units` are 20-byte entries of a queue, joined. The tag code is the last of their three numbers.
    """
    count = len(units) // UNIT_BYTES
    if not count or not codes:
        return np.empty(0, np.intp)
    # A view of the tag codes, which are 20 bytes apart, without copying. The machine reads their
    # bytes in its own order, so the wanted codes are swapped instead.
    unit_codes = np.ndarray(
        (count,), np.int64, buffer=units, offset=_CODE_AT, strides=(UNIT_BYTES,)
    )
    first_code, *other_codes = map(_swap_bytes, codes)
    is_match = unit_codes == first_code
    for code in other_codes:
        np.logical_or(is_match, unit_codes == code, out=is_match)
    return np.flatnonzero(is_match)


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
        self, queue: Queue, codes: frozenset[int], offset: int, end: int, chunk_units: int
    ) -> ChunkHits | None:
        """Return the units with one of the tag codes around the queue offset `offset`. HOT.

        A cached range may begin before `offset`, and may continue behind `end`. Otherwise
        `chunk_units` units from `offset` on, at most up to `end`, are compared and cached. The
        range is larger if `offset` is where the cached range ends, because a reader that continues
        will need more. Returns None if the queue has no units at `offset`.
        """
        key = (queue.topic, queue.queue_id, codes)
        cached = self._chunks.get(key)
        if cached is not None and cached.queue is queue:
            if cached.start <= offset < cached.stop:
                return cached
            if cached.stop == offset:  # the reader continues: compare four times as many
                larger = max(chunk_units, 4 * (cached.stop - cached.start))
                chunk_units = min(larger, CHUNK_UNITS_MAX)

        units = queue.units(offset, min(chunk_units, end - offset))
        count = len(units) // UNIT_BYTES
        if not count:
            return None
        matching_offsets, matching_units = select_tagged(units, codes, offset)
        chunk = ChunkHits(queue, offset, offset + count, matching_offsets, matching_units)
        self._chunks[key] = chunk
        if len(self._chunks) > CACHED_CHUNKS_MAX:
            self._chunks.popitem(last=False)
        return chunk


def select_tagged(units: Units, codes: Collection[int], offset: int) -> tuple[list[int], bytes]:
    """Return (queue offsets, joined units) of the units with one of the tag codes, in order.

    `units` are 20-byte entries of a queue, joined; the first one has the queue offset `offset`.
    """
    indices = find_tag_codes(units, codes)
    queue_offsets = (indices + offset).tolist()
    joined_units = np.frombuffer(units, _WHOLE_UNIT)[indices].tobytes()
    return queue_offsets, joined_units


class Runs(NamedTuple):
    """Runs of records that are adjacent in the log.

    `ranges` are the (start, end) positions of the runs, in the order of the queue. They contain
    `message_count` records of `size_bytes` bytes in total.
    """

    ranges: list[tuple[int, int]]
    message_count: int
    size_bytes: int


def find_runs(units: Units, count_max: int, bytes_max: int) -> Runs | None:
    """Find the runs of adjacent records that the first units locate.

    A run consists of units (20-byte entries of a queue) whose records follow each other in the log
    without a gap. At most `count_max` units and `bytes_max` bytes of records are used. If not even
    the first unit is within these limits, there are no runs. Returns None if any unit is blank or
    has an impossible size, because then the units must be examined one by one.
    """
    rows = np.frombuffer(units, UNIT_COLUMNS)
    sizes = rows["size"].astype(np.int64)
    if (sizes <= 0).any() or (sizes == BLANK_SIZE).any():
        return None

    # Count the units that are within both limits.
    cumulative_sizes = np.cumsum(sizes)
    count_within_bytes = int(np.searchsorted(cumulative_sizes, bytes_max, "right"))
    count = min(count_max, count_within_bytes)
    if count <= 0:
        return Runs([], 0, 0)

    # A run begins with each record that does not begin where the one before it ends.
    positions = rows["position"][:count].astype(np.int64)
    ends = positions + sizes[:count]
    run_begins = (np.flatnonzero(positions[1:] != ends[:-1]) + 1).tolist()
    ranges = []
    for first, stop in pairwise([0, *run_begins, count]):
        ranges.append((int(positions[first]), int(ends[stop - 1])))
    return Runs(ranges, count, int(cumulative_sizes[count - 1]))
