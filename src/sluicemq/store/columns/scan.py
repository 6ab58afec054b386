"""Filtered reads by property columns (`ColumnScan`).

A block that cannot match according to its statistics is skipped and not even read (`pruned_end`).
Where there is no block yet, some thousand rows are decoded, but only the columns that the filter
reads. That is a fifth of the work, and a new filter does not wait for the files. The scan keeps the
matching rows of such parts, and for each filter and queue the range that was read last, because a
pull takes 32 of many messages and the next pull continues behind them. Some rows cannot be decided
by columns, because a property is not a column or because a record could not be decoded. Their
records are read from the log one by one when a reader reaches them. A call ends after a number of
such records.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from itertools import compress, islice
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

from sluicemq.model.subscription import BlockFilter
from sluicemq.record.arrow import ArrowColumns, build_block, merge_block_arrays
from sluicemq.record.columns import ColumnBlock
from sluicemq.record.table import UNIT_COLUMNS
from sluicemq.store.bulk import ChunkHits
from sluicemq.store.columns.blocks import PART_ROWS, ColumnBlocks
from sluicemq.store.columns.file import BlockHead
from sluicemq.store.gather import (
    READ_TIME_MAX_S,
    PostponedError,
    PostponedWork,
    RecordCollector,
    UnitSelector,
)
from sluicemq.store.queues import UNIT_BYTES, Queue, Units

if TYPE_CHECKING:
    from sluicemq.clock import Clock

ROWS_MIN: Final = 128
"""For fewer rows, reading the records is faster than decoding columns."""
RECORDS_MAX: Final = 2000
"""The maximum number of records that one call reads to decide."""
SCAN_S: Final = 0.004
"""The time after which a call ends. One more block may take the same time again."""
CHUNK_ROWS_MIN: Final = 1024
"""The number of rows that are decoded for the first call of a filter.

It grows up to PART_ROWS for a reader that continues. So a reader gets its first messages soon, and
later it needs few steps, of a millisecond or two.
"""
_RECORDS_STEP_MIN: Final = 8
"""The number of records that are read before the clock is checked for the second time."""
RECORDS_STEP_MAX: Final = 256
"""That number doubles with each step up to this one."""
_INLINE_WORK_MAX: Final = 64 * 8192
"""The maximum product of a filter's weight and the rows for which it is evaluated at once.

It takes some milliseconds if all rows have different values. More work is postponed.
"""
# The maximum entries of the caches of candidates, heads, last ranges and hits.
_CACHED_BLOCKS_MAX: Final = 48
_CACHED_HEADS_MAX: Final = 1024
_CACHED_RANGES_MAX: Final = 1024
_CACHED_HITS_MAX: Final = 256
_PARTS_ROWS_MAX: Final = 1 << 20
"""The maximum total weight of all parts that the scan keeps: some 40 MiB."""
_PART_WEIGHT: Final = 32
"""The memory of a part without its rows, as a number of rows."""
_TRUE: Final = 1
_ERROR: Final = 3
_NEEDS_RECORD: Final = 4


class Candidates(NamedTuple):
    """The rows of a block or part that match or may match a filter, in ascending order.

    `needs_record` says for each of them whether its record decides; None means that none does.
    `is_sure` is True if no row needs its record and no evaluation failed.
    """

    rows: list[int]
    needs_record: list[bool] | None
    is_sure: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no row can match."""
        return not self.rows

    def slice_rows(self, first_row: int, end_row: int) -> "tuple[list[int], list[bool] | None]":
        """Return (rows, needs_record) of the candidates whose row is in [first_row, end_row).

        The returned row numbers count from `first_row`. `needs_record` says for each of them
        whether its record must be read to decide. It is None if no record is needed.
        """
        first_index = bisect_left(self.rows, first_row)
        end_index = bisect_left(self.rows, end_row, first_index)
        rows = [row - first_row for row in self.rows[first_index:end_index]]
        if self.needs_record is None:
            return rows, None
        return rows, self.needs_record[first_index:end_index]


_NO_CANDIDATES: Final = Candidates([], None)


class ScannedRange(NamedTuple):
    """The candidates of a filter among the offsets [start, stop) of a queue.

    The row numbers of the candidates count from `start`.
    """

    block_filter: BlockFilter
    queue: Queue
    start: int
    stop: int
    candidates: Candidates


def _estimate_weight(scanned: ScannedRange) -> int:
    """Return the memory of a range, as an approximate number of row numbers."""
    return _PART_WEIGHT + len(scanned.candidates.rows)


class ColumnScan:
    """The filtered reads of one store by property columns.

    Cache keys contain `id(block_filter)` and the like. The cached values refer to the same objects,
    so their ids cannot be used by others.
    """

    def __init__(self, blocks: ColumnBlocks, clock: "Clock") -> None:
        """Create a scan without cached results. `clock` limits the time of each call."""
        self.blocks = blocks
        self._clock = clock
        self._heads: OrderedDict[tuple[int, int], tuple[BlockFilter, BlockHead, bool]] = (
            OrderedDict()
        )
        """By filter and head: both, and whether the block may match."""
        self._candidates: OrderedDict[
            tuple[int, int], tuple[BlockFilter, ColumnBlock, Candidates]
        ] = OrderedDict()
        """By filter and block: both, and the candidates in the block."""
        self._last_ranges: OrderedDict[tuple[int, str, int], ScannedRange] = OrderedDict()
        """The range that was read last, by filter and queue."""
        self._parts: OrderedDict[tuple[int, str, int, int], ScannedRange] = OrderedDict()
        """The ranges that were decoded where there is no block, by filter, queue and start."""
        self._parts_rows = 0
        self._hits: OrderedDict[tuple[int, str, int], tuple[ScannedRange, ChunkHits]] = (
            OrderedDict()
        )

    def forget_topic(self, topic: str) -> None:
        """Forget the ranges of a deleted topic, because its queues may get other messages."""
        # The second field of both kinds of keys is the topic.
        for range_key in list(self._last_ranges):
            if range_key[1] == topic:
                del self._last_ranges[range_key]
        for part_key in list(self._parts):
            if part_key[1] == topic:
                removed = self._parts.pop(part_key)
                self._parts_rows -= _estimate_weight(removed)

    def collect_matches(
        self,
        block_filter: BlockFilter,
        queue: Queue,
        gather: RecordCollector,
        offset: int,
        end: int,
        select: UnitSelector,
        weight: int = 0,
    ) -> int:
        """Pass the messages that match among the queue offsets [offset, end) to `gather`.

        Each step evaluates the filter for one range of rows, and lets `gather` take the matches.
        `select` chooses among units (queue entries) by reading their records. `weight` is the cost
        of the filter if a long evaluation may be postponed, else 0.

        Return the offset at which to continue. That is `end`, or an earlier offset if the time or
        the number of records is used up, `gather` has no more room, the evaluation was postponed
        (`gather.postponed` is set), or the queue lacks units (`gather.is_missing` is set). Also
        sets `gather.is_filter_reliable`.
        """
        begin_s = self._clock.monotonic_s()
        deadline_s = begin_s + SCAN_S
        records_left = RECORDS_MAX
        step = _RECORDS_STEP_MIN
        gather.is_filter_reliable = True
        position = offset
        while position < end and records_left > 0:
            is_first_step = position == offset
            if not is_first_step and self._clock.monotonic_s() >= deadline_s:
                break
            step_records_max = min(step, records_left)
            step = min(2 * step, RECORDS_STEP_MAX)
            try:
                scanned = self.scan_at(block_filter, queue, position, ROWS_MIN, weight)
                stop = position + step_records_max if scanned is None else scanned.stop
                units: Units = queue.units(position, min(end, stop) - position)
                if not len(units):
                    gather.is_missing = True
                    break
                gather.is_filter_reliable &= scanned is not None and scanned.candidates.is_sure
                if scanned is None:  # without columns, every record is read
                    matches = select(units)
                    records_read = len(units) // UNIT_BYTES
                elif scanned.candidates.is_empty:
                    position = min(end, stop)
                    continue
                else:
                    first_row = position - scanned.start
                    matches, units, records_read = _select_matches(
                        scanned.candidates,
                        first_row,
                        units,
                        gather.messages_left,
                        step_records_max,
                        select,
                    )
            except PostponedError as postponed:
                gather.postponed = postponed.work
                break
            if records_read:  # reading records takes longer, and is given more time
                records_left -= records_read
                deadline_s = begin_s + READ_TIME_MAX_S
            first_not_taken = gather.take_indices(units, position, matches)
            if first_not_taken >= 0:
                return first_not_taken
            position += len(units) // UNIT_BYTES
        return position

    def at(
        self, queue: Queue, block_filter: BlockFilter, offset: int, end: int, chunk_units: int
    ) -> ChunkHits | None:
        """Return the cached matches in the units around the queue offset `offset`. HOT.

        Return None if no read has evaluated the filter there yet, or if records must be read to
        decide. `end` and `chunk_units` are not used; callers pass them because `bulk.TagHits.at`
        needs them.
        """
        del end, chunk_units
        key = (id(block_filter), *queue.key)
        scanned = self._last_ranges.get(key)
        if scanned is None or scanned.queue is not queue:
            return None
        if not scanned.start <= offset < scanned.stop:
            return None
        cached_range, hits = self._hits.get(key, (None, None))
        if cached_range is scanned and hits is not None and hits.start <= offset < hits.stop:
            return hits
        candidates = scanned.candidates
        if candidates.needs_record is not None or not candidates.is_sure:
            return None

        # Take the units of the whole range. `units` returns fewer if a file of the queue ends
        # within the range. If it ends before `offset`, take the units from `offset` on.
        begin = max(scanned.start, queue.offset_min)
        units = queue.units(begin, scanned.stop - begin)
        if begin + len(units) // UNIT_BYTES <= offset:
            begin = offset
            units = queue.units(begin, scanned.stop - begin)
        stop = begin + len(units) // UNIT_BYTES
        if stop <= offset:
            return None

        # Select the units of the candidates among them.
        rows_low = bisect_left(candidates.rows, begin - scanned.start)
        rows_high = bisect_left(candidates.rows, stop - scanned.start, rows_low)
        offsets = [row + scanned.start for row in candidates.rows[rows_low:rows_high]]
        matching_units = np.frombuffer(units, UNIT_COLUMNS)[np.array(offsets, np.int64) - begin]
        hits = ChunkHits(queue, begin, stop, offsets, matching_units.tobytes())
        self._hits[key] = scanned, hits
        if len(self._hits) > _CACHED_HITS_MAX:
            self._hits.popitem(last=False)
        return hits

    def is_match(
        self, block_filter: BlockFilter, queue: Queue, offset: int, select: UnitSelector
    ) -> bool:
        """Return whether the message at a queue offset matches. HOT: called for every pull.

        If the last range that was scanned for this filter and queue contains the offset, its result
        counts. Otherwise, or if that range says that the record decides, the record is read with
        `select`.
        """
        scanned = self._last_ranges.get((id(block_filter), *queue.key))
        if scanned is None or scanned.queue is not queue:
            return _selects_unit(select, queue, offset)
        if not scanned.start <= offset < scanned.stop:
            return _selects_unit(select, queue, offset)
        candidate_rows, needs_record, _ = scanned.candidates
        row = offset - scanned.start
        index = bisect_left(candidate_rows, row)
        if index == len(candidate_rows) or candidate_rows[index] != row:
            return False
        if needs_record is None or not needs_record[index]:
            return True
        return _selects_unit(select, queue, offset)

    def scan_at(
        self,
        block_filter: BlockFilter,
        queue: Queue,
        offset: int,
        rows_min: int = 1,
        weight: int = 0,
    ) -> ScannedRange | None:
        """Return a range of rows around a visible offset, with a filter's candidates in it. HOT.

        Candidates are rows that match, or whose record must be read. The range is the first of
        these that exists: the last range of this filter and queue, another cached range, a file's
        block that cannot match, a block in memory or in a file, or rows that are decoded now.

        Return None if the rows cannot be read, or if fewer than `rows_min` rows would be decoded,
        because reading their records is faster. Raises PostponedError if a filter with this
        `weight` (cost for each row) would take too long; another thread must then do the work.
        """
        key = (id(block_filter), *queue.key)
        last_range = self._last_ranges.get(key)
        if last_range is not None and last_range.queue is not queue:
            last_range = None  # of a deleted queue with the same name
        if last_range is not None and last_range.start <= offset < last_range.stop:
            return last_range

        # A reader that continues begins exactly where a cached range begins.
        cached_range = self._parts.get((*key, offset))
        if cached_range is not None and cached_range.queue is queue:
            return self._set_last_range(cached_range)
        pruned_end = self.pruned_end(block_filter, queue, offset)
        if pruned_end:
            return self._set_last_range(
                ScannedRange(block_filter, queue, offset, pruned_end, _NO_CANDIDATES)
            )
        block = self.blocks.find_block(queue, offset)
        if block is not None:
            candidates = self.find_candidates(block_filter, block, weight)
            return self._set_last_range(
                ScannedRange(block_filter, queue, block.first_offset, block.end, candidates)
            )

        # The rows are in no block: decode some of them.
        rows_max = _count_rows_to_decode(last_range, offset, weight)
        stop = min(offset + rows_max, self.blocks.block_end(queue, offset))
        if stop - offset < rows_min:
            return None
        rows = self.blocks.take_rows(queue, offset, stop)
        if rows is None:
            return None
        self.blocks.rows_decoded += stop - offset

        def scan_rows() -> ScannedRange:
            candidates = _evaluate_filter(block_filter, rows.columns_of(block_filter.names))
            return ScannedRange(block_filter, queue, offset, stop, candidates)

        if weight * (stop - offset) > _INLINE_WORK_MAX:
            raise PostponedError(PostponedWork(scan_rows, self._cache_part))
        return self._cache_part(scan_rows())

    def _cache_part(self, scanned: ScannedRange) -> ScannedRange:
        """Cache a range that was decoded, and return it.

        Other readers with the same filter use it too. The ranges that were cached first are dropped
        if there are too many rows.
        """
        key = (id(scanned.block_filter), *scanned.queue.key, scanned.start)
        replaced = self._parts.pop(key, None)
        if replaced is not None:
            self._parts_rows -= _estimate_weight(replaced)
        self._parts[key] = scanned
        self._parts_rows += _estimate_weight(scanned)
        while self._parts_rows > _PARTS_ROWS_MAX:
            _, oldest = self._parts.popitem(last=False)
            self._parts_rows -= _estimate_weight(oldest)
        return self._set_last_range(scanned)

    def _set_last_range(self, scanned: ScannedRange) -> ScannedRange:
        """Remember a range as the last one of its filter and queue, and return it.

        The range that was used least recently is dropped if there are too many.
        """
        key = (id(scanned.block_filter), *scanned.queue.key)
        self._last_ranges[key] = scanned
        self._last_ranges.move_to_end(key)
        if len(self._last_ranges) > _CACHED_RANGES_MAX:
            self._last_ranges.popitem(last=False)
        return scanned

    def pruned_end(
        self, block_filter: BlockFilter, queue: Queue, offset: int, *, only_known: bool = False
    ) -> int:
        """Return the end of the file's block that contains `offset`, if no row of it can match.

        The statistics of the block's columns decide. Return 0 if a row may match, or if no file
        contains the offset. If `only_known`, return 0 instead of reading a file.
        """
        head = self.blocks.head_at(queue, offset, only_known=only_known)
        if head is None:
            return 0
        key = (id(block_filter), id(head))
        cached = self._heads.get(key)
        if cached is None:
            cached = (block_filter, head, block_filter.can_match(head.stats))
            self._heads[key] = cached
            if len(self._heads) > _CACHED_HEADS_MAX:
                self._heads.popitem(last=False)
        _, _, can_match = cached
        return 0 if can_match else head.end

    def find_candidates(
        self, block_filter: BlockFilter, block: ColumnBlock, weight: int = 0
    ) -> Candidates:
        """Return the rows of a block that match a filter or need their record; cache the result.

        `weight` is the cost of the filter for each row. Raises PostponedError if the evaluation
        would take too long. Its work, which another thread does, evaluates the filter; the result
        is cached afterwards.
        """
        key = (id(block_filter), id(block))
        cached = self._candidates.get(key)
        if cached is not None:
            self._candidates.move_to_end(key)
            _, _, cached_candidates = cached
            return cached_candidates

        def store_result(candidates: Candidates) -> Candidates:
            self._candidates[key] = (block_filter, block, candidates)
            if len(self._candidates) > _CACHED_BLOCKS_MAX:
                self._candidates.popitem(last=False)
            return candidates

        if weight * block.rows > _INLINE_WORK_MAX:
            evaluate = partial(_evaluate_filter, block_filter, block)
            raise PostponedError(PostponedWork(evaluate, store_result))
        return store_result(_evaluate_filter(block_filter, block))


def _count_rows_to_decode(last_range: ScannedRange | None, offset: int, weight: int) -> int:
    """Return the maximum number of rows to decode from `offset` on.

    A reader that continues where `last_range` ends gets four times as many rows as the last time.
    Others get CHUNK_ROWS_MIN. `weight` is the cost of the filter for each row; a large one makes
    steps smaller, so that they need not be postponed.
    """
    row_count = 0
    if last_range is not None and last_range.stop == offset:
        row_count = 4 * (last_range.stop - last_range.start)
    row_count = min(row_count, PART_ROWS, _INLINE_WORK_MAX // max(weight, 1))
    return max(row_count, CHUNK_ROWS_MIN)


def _evaluate_filter(block_filter: BlockFilter, block: ColumnBlock) -> Candidates:
    """Evaluate a filter on a block. Return the rows that match or need their record to decide.

    The result is sure if no row needs its record and no evaluation failed.
    """
    verdicts = block_filter.verdicts(block)
    needs_record = verdicts == _NEEDS_RECORD
    if not needs_record.any():
        is_sure = not (verdicts == _ERROR).any()
        return Candidates(np.flatnonzero(verdicts == _TRUE).tolist(), None, is_sure)
    rows = np.flatnonzero((verdicts == _TRUE) | needs_record)
    return Candidates(rows.tolist(), needs_record[rows].tolist())


def _selects_unit(select: UnitSelector, queue: Queue, offset: int) -> bool:
    """Return whether `select` selects the unit of one queue offset."""
    return any(True for _ in select(queue.units(offset, 1)))


def _select_matches(
    candidates: Candidates,
    first_row: int,
    units: Units,
    messages_left: int,
    records_max: int,
    select: UnitSelector,
) -> tuple[Iterable[int], Units, int]:
    """Select the matches among `units`. The first unit is row `first_row` of the candidates. HOT.

    Candidates are rows that match, and rows whose record must be read to decide. `select` reads
    these records, at most `records_max`.

    Return (indices, units, records_read). `indices` are the matches, counted from the first unit.
    `units` are the units that were examined: fewer than given if more than `records_max` records
    would have to be read. `records_read` is the number of records that were read. If no record
    needs to be read, at most `messages_left` + 1 indices are returned.
    """
    end_row = first_row + len(units) // UNIT_BYTES
    if candidates.needs_record is None:
        low = bisect_left(candidates.rows, first_row)
        rows = candidates.rows[low : low + messages_left + 1]  # one more says where to continue
        return [row - first_row for row in rows if row < end_row], units, 0

    indices, needs_record = candidates.slice_rows(first_row, end_row)
    assert needs_record is not None
    # End before the first record that exceeds the limit.
    undecided = (index for index, is_undecided in enumerate(needs_record) if is_undecided)
    excess = next(islice(undecided, records_max, None), None)
    if excess is not None:
        units = units[: indices[excess] * UNIT_BYTES]
        indices = indices[:excess]
        needs_record = needs_record[:excess]
    matches = filter_by_records(indices, needs_record, units, select)
    return matches, units, sum(needs_record)


def filter_by_records(
    rows: list[int], needs_record: list[bool], units: Units, select: UnitSelector
) -> list[int]:
    """Return `rows` without those whose record was read and does not match.

    `rows` are indices of `units` (queue entries of UNIT_BYTES each, joined). `needs_record` says
    for each of them whether its record must be read to decide. `select` reads the records, and
    returns the indices of those that match.
    """
    undecided = list(compress(rows, needs_record))
    undecided_units = [units[row * UNIT_BYTES : (row + 1) * UNIT_BYTES] for row in undecided]
    matching = {undecided[index] for index in select(b"".join(undecided_units))}
    return [
        row
        for row, is_undecided in zip(rows, needs_record, strict=True)
        if not is_undecided or row in matching
    ]


def warm_up() -> None:
    """Call the functions of this module once without data, so that pyarrow loads all its parts."""
    nothing = np.zeros(2, np.int64)
    block = build_block(0, nothing, nothing, ())
    merge_block_arrays([block, block._replace(columns=ArrowColumns({}))])
    # If pandas is installed, Arrow loads it here, which takes a quarter of a second.
    _ = ArrowColumns({"": pa.array([""]).dictionary_encode()})[""]
