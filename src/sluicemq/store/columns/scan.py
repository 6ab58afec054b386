"""Filtered reads by property columns, and reads of ranges of a queue for columnar readers.

**Filtered reads** (`ColumnScan`). A block that cannot match according to its statistics is skipped
and not even read (`pruned_end`). Where there is no block yet, some thousand rows are decoded, but
only the columns that the filter reads. That is a fifth of the work, and a new filter does not wait
for the files. The scan keeps the matching rows of such parts, and for each filter and queue the
range that was read last, because a pull takes 32 of many messages and the next pull continues
behind them. Some rows cannot be decided by columns, because a property is not a column or because a
record could not be decoded. Their records are read from the log one by one when a reader reaches
them. A call ends after a number of such records.

**Ranges** (`RangeScan`). A store that is read in columns without a broker (`store.readonly`) copies
no record and examines none individually. The units of the queue come in chunks, a filter chooses
among them, and the result is positions in the mapped files of the log, where `record.arrow` decodes
the records in place:

    units          | position size code | position size code | …      thousands at once
    chosen         by tag codes; by property columns, sealed or made on the way (`blocks`); by the
                   record where neither decides
    verified       size, magic number, position, queue id and offset of each record, as a bulk read
                   of a broker verifies them (`gather`); with `check_bodies` the whole record, and
                   the body by its CRC
    RecordPlaces   a file of the log, and where records begin in it

So the log is read only for matches. Messages that retention removed and damaged ones are errors, or
with `skips` they are counted and skipped. Blank units and the placeholders of a repair are not
messages, and they do not count as missing.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import compress, islice, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sluicemq.errors import OffsetOutOfRangeError, StoreDamagedError
from sluicemq.model.subscription import BlockFilter, ColumnFilter, MessageFilter
from sluicemq.record.arrow import ArrowColumns, build_block, merge_block_arrays
from sluicemq.record.columns import ColumnBlock
from sluicemq.record.table import UNIT_COLUMNS, Positions
from sluicemq.store.bulk import ChunkHits, unverified_rows
from sluicemq.store.columns.blocks import PART_ROWS, ColumnBlocks
from sluicemq.store.columns.file import BlockHead
from sluicemq.store.gather import (
    READ_TIME_MAX_S,
    PostponedError,
    PostponedWork,
    RecordCollector,
    RecordVerifier,
    UnitSelector,
)
from sluicemq.store.log import PLACEHOLDER_CODE, CommitLog, parse_log_record
from sluicemq.store.queues import BLANK_SIZE, UNIT_BYTES, Queue, Units

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
_RECORDS_STEP_MAX: Final = 256
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
RANGE_ROWS: Final = 16_384
"""The number of units in a chunk. Their records, some MB, stay in the processor's cache."""
RANGE_ROWS_FILTERED: Final = 65_536
"""The same with a filter, which few messages match: small batches are expensive for Spark."""
RANGE_BYTES: Final = 64 * 1024 * 1024
"""The maximum bytes of records in one `RecordPlaces`. They must fit Arrow's offsets and memory."""


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

    def slice_rows(self, low: int, high: int) -> "tuple[list[int], list[bool] | None]":
        """Return (rows, needs_record) of the candidates in [low, high), counted from `low`."""
        first = bisect_left(self.rows, low)
        last = bisect_left(self.rows, high, first)
        rows = [row - low for row in self.rows[first:last]]
        return rows, None if self.needs_record is None else self.needs_record[first:last]


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


def _weight(found: ScannedRange) -> int:
    """Return the memory of a range, as an approximate number of row numbers."""
    return _PART_WEIGHT + len(found.candidates.rows)


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
        for key in [key for key in self._last_ranges if key[1] == topic]:
            del self._last_ranges[key]
        for part in [key for key in self._parts if key[1] == topic]:
            self._parts_rows -= _weight(self._parts.pop(part))

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
        """Collect matches among the queue offsets [offset, end) with `gather`.

        Return the offset at which to continue: `end`, or earlier if the time or the number of
        records is used up, `gather` has no more room, or the queue lacks units
        (`gather.is_missing`). Also sets `gather.is_filter_reliable`. `select` chooses among units
        by their records. `weight` is the weight of the filter if an evaluation that takes long may
        be postponed (`gather.postponed`), else 0.
        """
        begin_s = self._clock.monotonic_s()
        deadline_s = begin_s + SCAN_S
        records_left = RECORDS_MAX
        step = _RECORDS_STEP_MIN
        gather.is_filter_reliable = True
        position = offset
        while position < end and records_left > 0:
            if position > offset and self._clock.monotonic_s() >= deadline_s:
                break
            step_records_max = min(step, records_left)
            step = min(2 * step, _RECORDS_STEP_MAX)
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
            if records_read:
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
        """Return the matches in a chunk of units that contains the queue offset `offset`. HOT.

        The arguments are those of `bulk.TagHits.at`, which it replaces for filters on properties;
        `end` and `chunk_units` are not used. Return None if no read has evaluated the filter there
        yet, or if records must be read to decide.
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

        # Take the units of the whole range, or, if a file of the queue ends within it before
        # `offset`, those from `offset` on.
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
        """Return whether the message at an offset matches. HOT: called for every pull.

        The cached range that was read last answers if it contains the offset. The record is read
        with `select` only if the range does not contain it, or says that the record decides.
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
        """Return the range around a visible offset with the candidates of a filter. HOT.

        The range is, in this order of preference, the last one of filter and queue, another cached
        one, the sealed block if it cannot match, a block in memory or in a file, or rows that are
        decoded now. Return None if fewer than `rows_min` rows would have to be decoded, because
        reading their records is faster, or if the rows cannot be read. Raises PostponedError if the
        evaluation of a filter of this weight takes long.
        """
        key = (id(block_filter), *queue.key)
        last = self._last_ranges.get(key)
        if last is not None and last.queue is queue and last.start <= offset < last.stop:
            return last

        part = self._parts.get((*key, offset))  # a continuing reader begins at a start
        if part is not None and part.queue is queue:
            return self._keep(part)
        passed = self.pruned_end(block_filter, queue, offset)
        if passed:
            return self._keep(ScannedRange(block_filter, queue, offset, passed, _NO_CANDIDATES))
        block = self.blocks.find_block(queue, offset)
        if block is not None:
            candidates = self.find_candidates(block_filter, block, weight)
            return self._keep(
                ScannedRange(block_filter, queue, block.first_offset, block.end, candidates)
            )
        continues = last is not None and last.queue is queue and last.stop == offset
        rows = 4 * (last.stop - last.start) if continues and last is not None else 0
        # A filter of large weight takes smaller steps if they need not be postponed.
        rows = min(rows, PART_ROWS, _INLINE_WORK_MAX // max(weight, 1))
        stop = min(offset + max(rows, CHUNK_ROWS_MIN), self.blocks.block_end(queue, offset))
        source = self.blocks.take_rows(queue, offset, stop) if stop - offset >= rows_min else None
        if source is None:
            return None
        self.blocks.rows_decoded += stop - offset

        def find() -> ScannedRange:
            candidates = _evaluate(block_filter, source.columns_of(block_filter.names))
            return ScannedRange(block_filter, queue, offset, stop, candidates)

        if weight * (stop - offset) > _INLINE_WORK_MAX:
            raise PostponedError(PostponedWork(find, self._keep_part))
        return self._keep_part(find())

    def _keep_part(self, found: ScannedRange) -> ScannedRange:
        """Cache a decoded range, for this reader and others with the same filter, and return it.

        The ranges that were cached first are dropped if there are too many.
        """
        key = (id(found.block_filter), *found.queue.key, found.start)
        if (old := self._parts.pop(key, None)) is not None:
            self._parts_rows -= _weight(old)
        self._parts[key] = found
        self._parts_rows += _weight(found)
        while self._parts_rows > _PARTS_ROWS_MAX:
            self._parts_rows -= _weight(self._parts.popitem(last=False)[1])
        return self._keep(found)

    def _keep(self, found: ScannedRange) -> ScannedRange:
        """Keep a range as the last one of its filter and queue, and return it."""
        key = (id(found.block_filter), *found.queue.key)
        self._last_ranges[key] = found
        self._last_ranges.move_to_end(key)
        if len(self._last_ranges) > _CACHED_RANGES_MAX:
            self._last_ranges.popitem(last=False)
        return found

    def pruned_end(
        self, block_filter: BlockFilter, queue: Queue, offset: int, *, only_known: bool = False
    ) -> int:
        """Return the end of the sealed block that contains an offset if the block cannot match.

        Return 0 if it may match, or if there is no such block. With `only_known`, no file is read
        to find out.
        """
        head = self.blocks.head_at(queue, offset, only_known=only_known)
        if head is None:
            return 0
        key = (id(block_filter), id(head))
        known = self._heads.get(key)
        if known is None:
            known = (block_filter, head, block_filter.can_match(head.stats))
            self._heads[key] = known
            if len(self._heads) > _CACHED_HEADS_MAX:
                self._heads.popitem(last=False)
        return 0 if known[2] else head.end

    def find_candidates(
        self, block_filter: BlockFilter, block: ColumnBlock, weight: int = 0
    ) -> Candidates:
        """Return the candidates of a filter in a block, from the cache if they are there.

        Raises PostponedError if the evaluation of a filter of this weight takes long. Its work
        evaluates the filter, and caches the result.
        """
        key = (id(block_filter), id(block))
        known = self._candidates.get(key)
        if known is not None:
            self._candidates.move_to_end(key)
            return known[2]

        def keep(found: Candidates) -> Candidates:
            self._candidates[key] = (block_filter, block, found)
            if len(self._candidates) > _CACHED_BLOCKS_MAX:
                self._candidates.popitem(last=False)
            return found

        if weight * block.rows > _INLINE_WORK_MAX:
            raise PostponedError(PostponedWork(partial(_evaluate, block_filter, block), keep))
        return keep(_evaluate(block_filter, block))


def _evaluate(block_filter: BlockFilter, block: ColumnBlock) -> Candidates:
    """Return the rows of a block that match, or that need their record to decide.

    The candidates are sure if no row needs its record and no evaluation failed.
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
    """Select the matches among units, of which the first one is row `first_row` of the candidates.

    The candidates are the rows that match for sure, and those whose record decides. `select` reads
    the records of the latter, at most `records_max` of them.

    Return (indices, units, records_read). `indices` are the matches, counted from the first unit.
    `units` are the units among which they were selected: fewer than given if more than
    `records_max` records would have to be read. `records_read` is the number of records that were
    read. At most `messages_left` + 1 indices are returned if no record is read. HOT: called for
    every pull.
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
    matches = _filter_by_records(indices, needs_record, units, select)
    return matches, units, sum(needs_record)


def _filter_by_records(
    rows: list[int], needs_record: list[bool], units: Units, select: UnitSelector
) -> list[int]:
    """Return `rows` without those that need their record and do not match.

    `rows` are indices in `units`, and `needs_record` says for each whether its record decides.
    `select` reads these records.
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
    """Call everything once without data, because pyarrow loads parts of itself at first use."""
    nothing = np.zeros(2, np.int64)
    block = build_block(0, nothing, nothing, ())
    merge_block_arrays([block, block._replace(columns=ArrowColumns({}))])
    # If pandas is installed, Arrow loads it here, which takes a quarter of a second.
    _ = ArrowColumns({"": pa.array([""]).dictionary_encode()})[""]


# --- Ranges


class RecordPlaces(NamedTuple):
    """The positions of records in one file of the log, in the order of the queue.

    `view` is the whole file, whose first byte is at position `base` of the log. The records begin
    at the indices `starts` of `view`.
    """

    view: memoryview
    base: int
    starts: Positions


class _Rows(NamedTuple):
    """Some units of the queue as columns: positions and sizes of the records, queue offsets."""

    positions: Positions
    sizes: Positions
    offsets: Positions

    def part(self, rows: slice | NDArray[Any]) -> "_Rows":
        """Return some of the rows, selected by a slice, a mask or row numbers."""
        return _Rows(self.positions[rows], self.sizes[rows], self.offsets[rows])


class RangeScan:
    """A read of ranges of one queue.

    `log_bytes` is the total size of the records that were found. `missing_count` and
    `damaged_count` are the numbers of messages that were skipped because they no longer exist or
    are damaged.
    """

    def __init__(
        self,
        log: CommitLog,
        verifier: RecordVerifier,
        queue: Queue,
        message_filter: MessageFilter | None,
        select: UnitSelector | None,
        columns: ColumnScan | None,
        *,
        skips: bool = False,
        check_bodies: bool = False,
    ) -> None:
        """Create a read of `queue`.

        A filter needs `select`, which chooses among units by their records; `columns` makes it
        faster. With `skips`, missing and damaged messages are skipped instead of raised. With
        `check_bodies`, whole records are verified, and bodies by their CRC.
        """
        self._log = log
        self._verifier = verifier
        self._queue = queue
        self._filter = message_filter
        self._select = select
        self._columns = columns
        self._skips = skips
        self._check_bodies = check_bodies
        self.missing_count = self.damaged_count = self.log_bytes = 0

    def iter_places(self, start: int, end: int) -> Iterator[RecordPlaces]:
        """Yield the positions of the matches among the queue offsets [start, end), in order.

        Raises OffsetOutOfRangeError if some messages no longer exist, StoreDamagedError if one is
        damaged, and OSError. With `skips`, only OSError is raised.
        """
        low = self._queue.offset_min
        high = self._queue.visible_offset
        rows_max = RANGE_ROWS if self._filter is None else RANGE_ROWS_FILTERED
        position = min(max(start, low), end)
        stop = min(end, high)
        if position > start or stop < end:
            self._count_missing(end - start - max(0, stop - position), start, end)
        while position < stop:
            try:
                units = self._queue.units(position, min(rows_max, stop - position))
            except FileNotFoundError:  # retention has removed it since
                units = bytearray()
            count = len(units) // UNIT_BYTES
            if not count:  # continue with the next file
                per_file = self._queue.segments.file_bytes // UNIT_BYTES
                count = min(stop, position - position % per_file + per_file) - position
                self._count_missing(count, position, stop)
            yield from self._places_of_units(units, position)
            position += count

    def _places_of_units(self, units: Units, offset: int) -> Iterator[RecordPlaces]:
        """Yield the positions of the matches among units, of which the first one is at `offset`."""
        rows = np.frombuffer(units, UNIT_COLUMNS)
        sizes = rows["size"].astype(np.int64)
        used = (sizes != BLANK_SIZE) & (rows["code"] != PLACEHOLDER_CODE)
        empty = np.flatnonzero(sizes <= 0)
        if len(empty):
            self._count_damaged(
                len(empty), offset + int(empty[0]), "its unit in the queue is empty"
            )
            used &= sizes > 0
        if self._select is None:
            chosen = np.flatnonzero(used)
        else:
            if self._columns is None or not len(units):
                chosen = np.fromiter(self._select(units), np.int64)
            else:
                chosen = self._choose_by_columns(self._columns, self._select, units, offset)
            chosen = chosen[used[chosen]]
        if not len(chosen):
            return
        found = _Rows(rows["position"].astype(np.int64), sizes, offset + np.arange(len(rows)))
        if len(chosen) < len(rows):
            found = found.part(chosen)
        files = found.positions // self._log.segments.file_bytes
        cuts = [0, *(np.flatnonzero(files[1:] != files[:-1]) + 1).tolist(), len(files)]
        for begin, end in pairwise(cuts):
            yield from self._places_in_file(found.part(slice(begin, end)))

    def _choose_by_columns(
        self, columns: ColumnScan, select: UnitSelector, units: Units, offset: int
    ) -> Positions:
        """Return the indices of the matching units, in ascending order.

        `offset` is the queue offset of the first unit. `columns` decides; where it cannot, `select`
        reads the records.
        """
        block_filter = cast(
            "ColumnFilter", self._filter
        ).vectorised  # `column_scan` checked the type
        matching: list[int] = []
        position = offset
        end = offset + len(units) // UNIT_BYTES
        while position < end:
            scanned = columns.scan_at(block_filter, self._queue, position)
            stop = min(end, position + _RECORDS_STEP_MAX if scanned is None else scanned.stop)
            index = position - offset
            piece = units[index * UNIT_BYTES : (stop - offset) * UNIT_BYTES]
            rows: Iterable[int]  # the matches, counted from `position`
            if scanned is None:
                rows = select(piece)
            else:
                first_row = position - scanned.start
                stop_row = stop - scanned.start
                rows, needs_record = scanned.candidates.slice_rows(first_row, stop_row)
                if needs_record is not None:
                    rows = _filter_by_records(rows, needs_record, piece, select)
            matching += [row + index for row in rows]
            position = stop
        return np.array(matching, np.int64)

    def _places_in_file(self, rows: _Rows) -> Iterator[RecordPlaces]:
        """Verify the records of rows that are in one file of the log, and yield their positions.

        Each item has at most RANGE_BYTES of records, or one record. Missing and damaged records are
        counted or raised as `iter_places` says.
        """
        log = self._log
        position = int(rows.positions[0])
        segment = log.segments.at(position)
        try:
            end = int(rows.positions[-1]) + int(rows.sizes[-1])
            view = None if segment is None else segment.data_view(end)
        except FileNotFoundError:  # retention has just removed it
            view = None
        if segment is None or view is None:
            first = int(rows.offsets[0])
            count = len(rows.sizes)
            if segment is None and position >= log.start:
                self._count_damaged(count, first, f"no file of the log holds byte {position}")
            else:
                self._count_missing(count, first, int(rows.offsets[-1]) + 1)
            return
        base = segment.base
        good = np.ones(len(rows.sizes), np.bool_)
        for row in unverified_rows(view, base, *rows[:2], self._queue.queue_id, rows.offsets):
            record_start = int(rows.positions[row])
            size = int(rows.sizes[row])
            good[row] = self._verifier.is_valid(record_start, size, is_whole=False)
        starts = rows.positions - base
        if self._check_bodies:
            for row, at in enumerate(starts.tolist()):
                good[row] &= parse_log_record(view, at, base, check_crc=True) is not None
        if not good.all():
            bad = np.flatnonzero(~good)
            at = int(starts[bad[0]])
            reason = (
                log.explain_bad_record(base + at)
                if 0 <= at < segment.size
                else "it cannot be there"
            )
            place = f"{reason} ({segment.path}, byte {at})"
            self._count_damaged(len(bad), int(rows.offsets[bad[0]]), place)
            starts = starts[good]
            rows = rows.part(good)
        totals = np.cumsum(rows.sizes)
        begin = 0
        while begin < len(starts):
            before = int(totals[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(totals, before + RANGE_BYTES, side="right")))
            self.log_bytes += int(totals[end - 1]) - before
            yield RecordPlaces(view, base, starts[begin:end])
            begin = end

    def _count_missing(self, count: int, start: int, end: int) -> None:
        """Count messages that no longer exist, or raise OffsetOutOfRangeError."""
        self.missing_count += count
        if not self._skips:
            queue = self._queue
            raise OffsetOutOfRangeError(
                f"some of the offsets {start} to {end} of queue {queue.queue_id} of"
                f" {queue.topic!r} do not exist: it contains {queue.offset_min} to"
                f" {queue.visible_offset}.",
                fix="Start from an existing offset: retention deleted messages, or the queue was"
                " reset.",
            )

    def _count_damaged(self, count: int, offset: int, reason: str) -> None:
        """Count damaged messages, of which the first one is at `offset`, or raise an error."""
        self.damaged_count += count
        if not self._skips:
            queue = self._queue
            raise StoreDamagedError(
                f"the message at offset {offset} of queue {queue.queue_id} of {queue.topic!r} is"
                f" damaged: {reason}.",
                fix="Run `sluice store verify` to list all damage, then `sluice store repair`.",
            )
