"""Choosing messages by their columns: filtered reads, and ranges of a queue for readers in columns.

A block of which the figures alone say that nothing in it matches is passed over and not even read
(`pruned_to`). Where there is no block yet, some thousand rows are made into columns of what the
filter reads, and of nothing else: a fifth of the work, and a filter that was never seen before does
not wait for the files. What is kept are the rows found in such parts, and the block or part where
each reader is, since a pull takes 32 of many and the next one goes on behind them. Rows that
columns cannot decide (a property that is none, a record that could not be decoded) are asked from
the log, one by one, when it is their turn, and so many of them end the call.

A store that is read in columns without a broker (`store.readonly`) copies no record and looks at
none singly. Units of the queue come in chunks, a filter chooses among them, and what is left is
given as places in the mapped files of the log, which `record.arrow` decodes where they lie:

    units    | position size code | position size code | …      thousands at once
    chosen   by tag codes; by property columns, sealed ones or such as are made on the way
             (`blocks`); by the record where neither can say
    proved   size, magic number, position, queue id and offset of each record: what a bulk read of
             a broker looks at (`gather`); with `check_bodies` all of it, bodies with their CRC
    Places   (a file of the log, where records begin in it)

So the log is touched for matches alone. What is not there any more (retention) and what is damaged
is an error, or with `skips` counted and passed over; blank units and place holders of a repair are
no messages and are not missed.
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
from sluicemq.record.arrow import ArrowColumns, build_block, merged_arrays
from sluicemq.record.columns import ColumnBlock
from sluicemq.record.table import UNIT_COLUMNS, Positions
from sluicemq.store.bulk import ChunkHits, unverified_rows
from sluicemq.store.columns.blocks import PART_ROWS, ColumnBlocks
from sluicemq.store.columns.file import Head
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
"""For fewer rows looking at the records is faster than making columns of them."""
RECORDS_MAX: Final = 2000
"""So many records are read to decide in one call."""
SCAN_S: Final = 0.004
"""After so long a call ends: a block more may take as long again."""
CHUNK_ROWS_MIN: Final = 1024
"""Rows made into columns for one filter, up to PART_ROWS for a reader that goes on: what it asked
for first it gets soon, and then it has the fewest steps, of a millisecond or two."""
_SINGLES_MIN: Final = 8
_SINGLES: Final = 256
"""So many records are looked at before the next look at the clock, at first few."""
_WEIGHT_ROWS_INLINE: Final = 64 * 8192
"""Of filters (their weight) on blocks: some milliseconds, when all rows differ."""
_KEPT: Final = 48
_RULED_KEPT: Final = 1024
_LAST_KEPT: Final = 1024
_HITS_KEPT: Final = 256
_PARTS_ROWS_MAX: Final = 1 << 20
"""Of all filters together: some 40 MiB."""
_PART_WEIGHT: Final = 32
_TRUE: Final = 1
_ERROR: Final = 3
_NEEDS_RECORD: Final = 4
RANGE_ROWS: Final = 16_384
"""Units at once: their records (some MB) stay in the processor's cache while they are decoded."""
RANGE_ROWS_FILTERED: Final = 65_536
"""With a filter, whose matches are few: batches of some hundred rows cost Spark more."""
RANGE_BYTES: Final = 64 * 1024 * 1024
"""Of records in one `Places`: what is decoded of them has to fit Arrow's offsets, and memory."""


class Candidates(NamedTuple):
    """Rows of a block that match or may match, ascending; `asks`: whether the record decides, None
    where it never does. `is_sure`: no evaluation failed."""

    rows: list[int]
    asks: list[bool] | None
    is_sure: bool = False

    @property
    def is_none(self) -> bool:
        """Is there nothing to look at?"""
        return not self.rows

    def between(self, low: int, high: int) -> "tuple[list[int], list[bool] | None]":
        """Those of the rows [low, high), reckoned from `low` on."""
        first = bisect_left(self.rows, low)
        last = bisect_left(self.rows, high, first)
        rows = [row - low for row in self.rows[first:last]]
        return rows, None if self.asks is None else self.asks[first:last]


_NONE: Final = Candidates([], None)


class Found(NamedTuple):
    """What a filter has to look at of the rows of a queue from offset `start` to `stop`."""

    block_filter: BlockFilter
    queue: Queue
    start: int
    stop: int
    candidates: Candidates


def _weight(found: Found) -> int:
    """About how many row numbers take as much memory."""
    return _PART_WEIGHT + len(found.candidates.rows)


class ColumnScan:
    """Filtered reads of one store, by columns."""

    def __init__(self, blocks: ColumnBlocks, clock: "Clock") -> None:
        self.blocks = blocks
        self._clock = clock
        self._ruled: OrderedDict[tuple[int, int], tuple[BlockFilter, Head, bool]] = OrderedDict()
        self._known: OrderedDict[tuple[int, int], tuple[BlockFilter, ColumnBlock, Candidates]] = (
            OrderedDict()
        )
        self._last: OrderedDict[tuple[int, str, int], Found] = OrderedDict()
        """By filter and queue."""
        self._parts: OrderedDict[tuple[int, str, int, int], Found] = OrderedDict()
        """What was found where there is no block: by filter, queue and start."""
        self._parts_rows = 0
        self._hits: OrderedDict[tuple[int, str, int], tuple[Found, ChunkHits]] = OrderedDict()

    def forget(self, topic: str) -> None:
        """Its queues have other messages."""
        for key in [key for key in self._last if key[1] == topic]:
            del self._last[key]
        for part in [key for key in self._parts if key[1] == topic]:
            self._parts_rows -= _weight(self._parts.pop(part))

    def run(
        self,
        block_filter: BlockFilter,
        queue: Queue,
        gather: RecordCollector,
        offset: int,
        end: int,
        select: UnitSelector,
        weight: int = 0,
    ) -> int:
        """Take matches among the queue offsets [offset, end); returns where to go on.

        `select` chooses among units by their records. `weight` is the filter's where verdicts that
        take long may be postponed (`gather`), 0 where they may not.
        """
        begin_s = self._clock.monotonic_s()
        deadline_s = begin_s + SCAN_S
        records, few = RECORDS_MAX, _SINGLES_MIN
        gather.is_filter_reliable = True
        position = offset
        while position < end and records > 0:
            if position > offset and self._clock.monotonic_s() >= deadline_s:
                break
            few, at_once = min(2 * few, _SINGLES), min(few, records)
            try:
                found = self.found_at(block_filter, queue, position, ROWS_MIN, weight)
                stop = position + at_once if found is None else found.stop
                units: Units = queue.units(position, min(end, stop) - position)
                if not len(units):
                    gather.is_missing = True
                    break
                gather.is_filter_reliable &= found is not None and found.candidates.is_sure
                if found is None:
                    chosen = select(units)
                    asked = len(units) // UNIT_BYTES
                elif found.candidates.is_none:
                    position = min(end, stop)
                    continue
                else:
                    first = position - found.start
                    chosen, units, asked = _choose(
                        found.candidates, first, units, gather.room, at_once, select
                    )
            except PostponedError as postponed:
                gather.postponed = postponed.work
                break
            if asked:
                records -= asked
                deadline_s = begin_s + READ_TIME_MAX_S
            left = gather.take_indices(units, position, chosen)
            if left >= 0:
                return left
            position += len(units) // UNIT_BYTES
        return position

    def at(
        self, queue: Queue, block_filter: BlockFilter, position: int, end: int, grown: int
    ) -> ChunkHits | None:
        """The matches around an offset, as `bulk.TagHits` has them, where a read has found them and
        no record has to be asked; else None. HOT."""
        del end, grown
        key = (id(block_filter), *queue.key)
        found = self._last.get(key)
        if found is None or found.queue is not queue or not found.start <= position < found.stop:
            return None
        known, hits = self._hits.get(key, (None, None))
        if known is found and hits is not None and hits.start <= position < hits.stop:
            return hits
        candidates = found.candidates
        if candidates.asks is not None or not candidates.is_sure:
            return None
        begin = max(found.start, queue.offset_min)
        units = queue.units(begin, found.stop - begin)
        if begin + len(units) // UNIT_BYTES <= position:  # they go on in the next file
            begin = position
            units = queue.units(begin, found.stop - begin)
        stop = begin + len(units) // UNIT_BYTES
        if stop <= position:
            return None
        low = bisect_left(candidates.rows, begin - found.start)
        high = bisect_left(candidates.rows, stop - found.start, low)
        offsets = [row + found.start for row in candidates.rows[low:high]]
        chosen = np.frombuffer(units, UNIT_COLUMNS)[np.array(offsets, np.int64) - begin]
        hits = ChunkHits(queue, begin, stop, offsets, chosen.tobytes())
        self._hits[key] = found, hits
        if len(self._hits) > _HITS_KEPT:
            self._hits.popitem(last=False)
        return hits

    def holds(
        self, block_filter: BlockFilter, queue: Queue, offset: int, select: UnitSelector
    ) -> bool:
        """Does the message at an offset match? Where a reader is it is known without a look at the
        record. HOT."""
        found = self._last.get((id(block_filter), *queue.key))
        if found is None or found.queue is not queue or not found.start <= offset < found.stop:
            return any(True for _ in select(queue.units(offset, 1)))
        rows, asks, _ = found.candidates
        row = offset - found.start
        at = bisect_left(rows, row)
        if at == len(rows) or rows[at] != row:
            return False
        return asks is None or not asks[at] or any(True for _ in select(queue.units(offset, 1)))

    def found_at(
        self,
        block_filter: BlockFilter,
        queue: Queue,
        offset: int,
        rows_min: int = 1,
        weight: int = 0,
    ) -> Found | None:
        """What the filter has to look at around a visible offset; None when fewer than `rows_min`
        rows would have to be decoded for it: looking at those one by one is faster. HOT.

        Raises PostponedError when a filter of this weight takes long.
        """
        key = (id(block_filter), *queue.key)  # what is kept cannot have given its id to another
        last = self._last.get(key)
        if last is not None and last.queue is queue and last.start <= offset < last.stop:
            return last

        part = self._parts.get((*key, offset))  # who reads on begins where one ends
        if part is not None and part.queue is queue:
            return self._keep(part)
        passed = self.pruned_to(block_filter, queue, offset)
        if passed:
            return self._keep(Found(block_filter, queue, offset, passed, _NONE))
        block = self.blocks.made_at(queue, offset)
        if block is not None:
            candidates = self.candidates(block_filter, block, weight)
            return self._keep(Found(block_filter, queue, block.first_offset, block.end, candidates))
        goes_on = last is not None and last.queue is queue and last.stop == offset
        rows = 4 * (last.stop - last.start) if goes_on and last is not None else 0
        # A heavy filter takes smaller steps, as long as that spares it another thread.
        rows = min(rows, PART_ROWS, _WEIGHT_ROWS_INLINE // max(weight, 1))
        stop = min(offset + max(rows, CHUNK_ROWS_MIN), self.blocks.end_of(queue, offset))
        source = self.blocks.source(queue, offset, stop) if stop - offset >= rows_min else None
        if source is None:
            return None
        self.blocks.rows_decoded += stop - offset

        def find() -> Found:
            candidates = _candidates(block_filter, source.block_of(block_filter.names))
            return Found(block_filter, queue, offset, stop, candidates)

        if weight * (stop - offset) > _WEIGHT_ROWS_INLINE:
            raise PostponedError(PostponedWork(find, self._keep_part))
        return self._keep_part(find())

    def _keep_part(self, found: Found) -> Found:
        """As `_keep`, for the next one who comes there with the same filter, too."""
        key = (id(found.block_filter), *found.queue.key, found.start)
        if (old := self._parts.pop(key, None)) is not None:
            self._parts_rows -= _weight(old)
        self._parts[key] = found
        self._parts_rows += _weight(found)
        while self._parts_rows > _PARTS_ROWS_MAX:
            self._parts_rows -= _weight(self._parts.popitem(last=False)[1])
        return self._keep(found)

    def _keep(self, found: Found) -> Found:
        key = (id(found.block_filter), *found.queue.key)
        self._last[key] = found
        self._last.move_to_end(key)
        if len(self._last) > _LAST_KEPT:
            self._last.popitem(last=False)
        return found

    def pruned_to(
        self, block_filter: BlockFilter, queue: Queue, offset: int, *, only_known: bool = False
    ) -> int:
        """The end of the sealed block that holds an offset, when it has no match; else 0.
        `only_known`: no file is read to know it."""
        head = self.blocks.head_at(queue, offset, only_known=only_known)
        if head is None:
            return 0
        key = (id(block_filter), id(head))
        known = self._ruled.get(key)
        if known is None:
            known = (block_filter, head, block_filter.can_match(head.stats))
            self._ruled[key] = known  # what is kept cannot have given its id to another
            if len(self._ruled) > _RULED_KEPT:
                self._ruled.popitem(last=False)
        return 0 if known[2] else head.end

    def candidates(
        self, block_filter: BlockFilter, block: ColumnBlock, weight: int = 0
    ) -> Candidates:
        """The rows of a block that a filter has to look at, or not even that.

        Raises PostponedError when a filter of this weight takes long to say so.
        """
        key = (id(block_filter), id(block))
        known = self._known.get(key)
        if known is not None:  # what is kept cannot have given its id to another
            self._known.move_to_end(key)
            return known[2]

        def keep(found: Candidates) -> Candidates:
            self._known[key] = (block_filter, block, found)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
            return found

        if weight * block.rows > _WEIGHT_ROWS_INLINE:
            raise PostponedError(PostponedWork(partial(_candidates, block_filter, block), keep))
        return keep(_candidates(block_filter, block))


def _candidates(block_filter: BlockFilter, block: ColumnBlock) -> Candidates:
    verdicts = block_filter.verdicts(block)
    asks = verdicts == _NEEDS_RECORD
    if not asks.any():
        is_sure = not (verdicts == _ERROR).any()
        return Candidates(np.flatnonzero(verdicts == _TRUE).tolist(), None, is_sure)
    rows = np.flatnonzero((verdicts == _TRUE) | asks)
    return Candidates(rows.tolist(), asks[rows].tolist())


def _choose(
    candidates: Candidates,
    first: int,
    units: Units,
    room: int,
    records: int,
    select: UnitSelector,
) -> tuple[Iterable[int], Units, int]:
    """Which of the units, the first one of row `first`, are chosen; the units that were dealt with;
    and how many records that reads at most. HOT."""
    end = first + len(units) // UNIT_BYTES
    if candidates.asks is None:
        low = bisect_left(candidates.rows, first)
        some = candidates.rows[low : low + room + 1]  # one more says where to go on
        return [row - first for row in some if row < end], units, 0
    rows, asks = candidates.between(first, end)
    assert asks is not None
    last = next(islice((at for at, needs in enumerate(asks) if needs), records, None), None)
    if last is not None:
        units, rows, asks = units[: rows[last] * UNIT_BYTES], rows[:last], asks[:last]
    return _asked(rows, asks, units, select), units, sum(asks)


def _asked(rows: list[int], asks: list[bool], units: Units, select: UnitSelector) -> list[int]:
    """Without the rows whose records say that they do not match."""
    asked = list(compress(rows, asks))
    found = select(b"".join([units[row * UNIT_BYTES : (row + 1) * UNIT_BYTES] for row in asked]))
    wanted = {asked[index] for index in found}
    return [row for row, needs in zip(rows, asks, strict=True) if not needs or row in wanted]


def warm_up() -> None:
    """Use everything once, on nothing: pyarrow loads parts of itself when they are needed."""
    nothing = np.zeros(2, np.int64)
    block = build_block(0, nothing, nothing, ())
    merged_arrays([block, block._replace(columns=ArrowColumns({}))])
    # Where pandas is installed Arrow loads it here, for a quarter of a second.
    _ = ArrowColumns({"": pa.array([""]).dictionary_encode()})[""]


# --- ranges


class Places(NamedTuple):
    """Records of one file of the log, in the queue's order: `view` is the whole file, whose first
    byte is byte `base` of the log, and they begin at `starts` of it."""

    view: memoryview
    base: int
    starts: Positions


class _Rows(NamedTuple):
    """Some units of the queue, with their queue offsets, in columns."""

    positions: Positions
    sizes: Positions
    offsets: Positions

    def part(self, rows: slice | NDArray[Any]) -> "_Rows":
        return _Rows(self.positions[rows], self.sizes[rows], self.offsets[rows])


class RangeScan:
    """A look at a range of one queue. `gone` and `damaged` count what was passed over, `units` what
    was looked at, `log_bytes` the size of the records found."""

    def __init__(
        self,
        log: CommitLog,
        sound: RecordVerifier,
        queue: Queue,
        message_filter: MessageFilter | None,
        select: UnitSelector | None,
        columns: ColumnScan | None,
        *,
        skips: bool = False,
        check_bodies: bool = False,
    ) -> None:
        """A filter chooses by `select`, and by `columns` where they are."""
        self._log = log
        self._sound = sound
        self._queue = queue
        self._filter = message_filter
        self._select = select
        self._columns = columns
        self._skips = skips
        self._check_bodies = check_bodies
        self.gone = self.damaged = self.units = self.log_bytes = 0

    def places(self, start: int, end: int) -> Iterator[Places]:
        """Matches among the queue offsets [start, end), in order.

        Raises OffsetOutOfRangeError when some are gone, StoreDamagedError for what is damaged, and
        OSError.
        """
        low, high = self._queue.offset_min, self._queue.visible_offset
        rows_max = RANGE_ROWS if self._filter is None else RANGE_ROWS_FILTERED
        position, stop = min(max(start, low), end), min(end, high)
        if position > start or stop < end:
            self._lose(end - start - max(0, stop - position), start, end)
        while position < stop:
            try:
                units = self._queue.units(position, min(rows_max, stop - position))
            except FileNotFoundError:  # retention has removed it since
                units = bytearray()
            count = len(units) // UNIT_BYTES
            if not count:  # on with the next file
                per_file = self._queue.segments.file_bytes // UNIT_BYTES
                count = min(stop, position - position % per_file + per_file) - position
                self._lose(count, position, stop)
            self.units += count
            yield from self._placed(units, position)
            position += count

    def _placed(self, units: Units, offset: int) -> Iterator[Places]:
        rows = np.frombuffer(units, UNIT_COLUMNS)
        sizes = rows["size"].astype(np.int64)
        used = (sizes != BLANK_SIZE) & (rows["code"] != PLACEHOLDER_CODE)
        empty = np.flatnonzero(sizes <= 0)
        if len(empty):
            self._spoil(len(empty), offset + int(empty[0]), "its unit in the queue is empty")
            used &= sizes > 0
        if self._select is None:
            chosen = np.flatnonzero(used)
        else:
            if self._columns is None or not len(units):
                chosen = np.fromiter(self._select(units), np.int64)
            else:
                chosen = self._by_columns(self._columns, self._select, units, offset)
            chosen = chosen[used[chosen]]
        if not len(chosen):
            return
        found = _Rows(rows["position"].astype(np.int64), sizes, offset + np.arange(len(rows)))
        if len(chosen) < len(rows):
            found = found.part(chosen)
        files = found.positions // self._log.segments.file_bytes
        cuts = [0, *(np.flatnonzero(files[1:] != files[:-1]) + 1).tolist(), len(files)]
        for begin, end in pairwise(cuts):
            yield from self._in_file(found.part(slice(begin, end)))

    def _by_columns(
        self, columns: ColumnScan, select: UnitSelector, units: Units, offset: int
    ) -> Positions:
        """The numbers of the units that match, ascending."""
        block_filter = cast("ColumnFilter", self._filter).vectorised  # `column_scan` has looked
        found: list[int] = []
        position, end = offset, offset + len(units) // UNIT_BYTES
        while position < end:
            known = columns.found_at(block_filter, self._queue, position)
            at = position - offset
            stop = min(end, position + _SINGLES if known is None else known.stop)
            piece = units[at * UNIT_BYTES : (stop - offset) * UNIT_BYTES]
            rows: Iterable[int]
            if known is None:
                rows = select(piece)
            else:
                first = known.start
                rows, asks = known.candidates.between(position - first, stop - first)
                rows = rows if asks is None else _asked(rows, asks, piece, select)
            found += [row + at for row in rows]
            position = stop
        return np.array(found, np.int64)

    def _in_file(self, rows: _Rows) -> Iterator[Places]:
        """The places of rows whose records lie in one file."""
        log, position = self._log, int(rows.positions[0])
        segment = log.segments.at(position)
        try:
            end = int(rows.positions[-1]) + int(rows.sizes[-1])
            view = None if segment is None else segment.data_view(end)
        except FileNotFoundError:  # retention has just removed it
            view = None
        if segment is None or view is None:
            first, count = int(rows.offsets[0]), len(rows.sizes)
            if segment is None and position >= log.start:
                self._spoil(count, first, f"no file of the log holds byte {position}")
            else:
                self._lose(count, first, int(rows.offsets[-1]) + 1)
            return
        base = segment.base
        good = np.ones(len(rows.sizes), np.bool_)
        for row in unverified_rows(view, base, *rows[:2], self._queue.queue_id, rows.offsets):
            where, size = int(rows.positions[row]), int(rows.sizes[row])
            good[row] = self._sound.is_valid(where, size, is_whole=False)
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
            self._spoil(len(bad), int(rows.offsets[bad[0]]), place)
            starts, rows = starts[good], rows.part(good)
        totals = np.cumsum(rows.sizes)
        begin = 0
        while begin < len(starts):
            before = int(totals[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(totals, before + RANGE_BYTES, side="right")))
            self.log_bytes += int(totals[end - 1]) - before
            yield Places(view, base, starts[begin:end])
            begin = end

    def _lose(self, count: int, start: int, end: int) -> None:
        self.gone += count
        if not self._skips:
            queue = self._queue
            raise OffsetOutOfRangeError(
                f"offsets {start} to {end} of queue {queue.queue_id} of {queue.topic!r} are not all"
                f" there: it holds {queue.offset_min} to {queue.visible_offset}.",
                fix="Retention deleted them, or the queue was reset: start from what is there.",
            )

    def _spoil(self, count: int, offset: int, reason: str) -> None:
        self.damaged += count
        if not self._skips:
            queue = self._queue
            raise StoreDamagedError(
                f"the message at offset {offset} of queue {queue.queue_id} of {queue.topic!r} is"
                f" damaged: {reason}.",
                fix="`sluice store verify` shows all damage, `sluice store repair` mends.",
            )
