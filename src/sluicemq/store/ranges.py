"""Where the records of a range of a queue lie in the log, found by the thousand with NumPy.

For who reads a store in columns without a broker (`store.reader`): no record is copied or looked at
singly. Units of the queue come in chunks, a filter chooses among them, and what is left is told as
places in the mapped files of the log, which `record.arrow` decodes where they lie:

    units    | position size code | position size code | …      thousands at once
    chosen   by tag codes; by property columns, sealed ones or such as are made on the way
             (`columns_blocks`); by the record where neither can say
    proved   size, magic number, position, queue id and offset of each record: what a bulk read of
             a broker looks at (`sound`); with `check_bodies` all of it, bodies with their CRC
    Places   (a file of the log, where records begin in it)

So the log is touched for matches alone. What is not there any more (retention) and what is damaged
is an error, or with `skips` counted and passed over; blank units and place holders of a repair are
no messages and nobody misses them.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from sluicemq.errors import OffsetOutOfRangeError, StoreDamagedError
from sluicemq.model.subscription import ColumnFilter, MessageFilter
from sluicemq.record.table import UNIT_COLUMNS
from sluicemq.store.bulk import unproved_rows
from sluicemq.store.columns.scan import ColumnScan
from sluicemq.store.log import LOST_CODE, CommitLog, read_scanned
from sluicemq.store.queues import BLANK_SIZE, UNIT_BYTES, Queue
from sluicemq.store.read import LogReader
from sluicemq.store.segments import Segment
from sluicemq.store.walk import explain

ROWS_MAX: Final = 16_384
"""Units at once: their records (some MB) stay in the processor's cache while they are decoded."""
ROWS_FILTERED_MAX: Final = 65_536
"""With a filter, whose matches are few: batches of some hundred rows cost Spark more."""
BYTES_MAX: Final = 64 * 1024 * 1024
"""Of records in one `Places`: what is decoded of them has to fit Arrow's offsets, and memory."""
_SINGLES: Final = 256
Units = memoryview | bytearray
Positions = NDArray[np.int64]


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
    was looked at, `log_bytes` the size of the records that were told."""

    def __init__(
        self,
        log: CommitLog,
        reader: LogReader,
        queue: Queue,
        message_filter: MessageFilter | None,
        *,
        skips: bool = False,
        check_bodies: bool = False,
    ) -> None:
        self._log = log
        self._sound = reader.soundness
        self._queue = queue
        self._filter = message_filter
        self._select = self._columns = None
        if message_filter is not None:
            self._select = reader.selector(message_filter)
            self._columns = reader.column_scan(queue, message_filter)
        self._skips = skips
        self._check_bodies = check_bodies
        self.gone = self.damaged = self.units = self.log_bytes = 0

    def places(self, start: int, end: int) -> Iterator[Places]:
        """Matches among the queue offsets [start, end), in order.

        Raises OffsetOutOfRangeError when some are gone, StoreDamagedError for what is damaged, and
        OSError.
        """
        low, high = self._queue.offset_min, self._queue.visible_offset
        rows_max = ROWS_MAX if self._filter is None else ROWS_FILTERED_MAX
        position, stop = min(max(start, low), end), min(end, high)
        if position > start or stop < end:
            self._lose(end - start - max(0, stop - position), start, end)
        while position < stop:
            units = self._units(position, min(rows_max, stop - position))
            count = len(units) // UNIT_BYTES
            if not count:
                count = self._count_to_next_file(position, stop)
                self._lose(count, position, stop)
            self.units += count
            yield from self._placed(units, position)
            position += count

    def _units(self, position: int, count: int) -> Units:
        try:
            return self._queue.units(position, count)
        except FileNotFoundError:  # retention has removed it since
            return bytearray()

    def _count_to_next_file(self, position: int, stop: int) -> int:
        per_file = self._queue.segments.file_bytes // UNIT_BYTES
        return min(stop, position - position % per_file + per_file) - position

    def _placed(self, units: Units, offset: int) -> Iterator[Places]:
        rows = np.frombuffer(units, UNIT_COLUMNS)
        sizes = rows["size"].astype(np.int64)
        used = (sizes != BLANK_SIZE) & (rows["code"] != LOST_CODE)
        empty = np.flatnonzero(sizes <= 0)
        if len(empty):
            self._spoil(len(empty), offset + int(empty[0]), "its unit in the queue is empty")
            used &= sizes > 0
        chosen = self._chosen(units, offset)
        chosen = np.flatnonzero(used) if chosen is None else chosen[used[chosen]]
        if not len(chosen):
            return
        found = _Rows(rows["position"].astype(np.int64), sizes, offset + np.arange(len(rows)))
        if len(chosen) < len(rows):
            found = found.part(chosen)
        files = found.positions // self._log.segments.file_bytes
        cuts = [0, *(np.flatnonzero(files[1:] != files[:-1]) + 1).tolist(), len(files)]
        for begin, end in pairwise(cuts):
            yield from self._in_file(found.part(slice(begin, end)))

    # --- the filter

    def _chosen(self, units: Units, offset: int) -> Positions | None:
        """The numbers of the units that match, ascending; None for all."""
        if self._filter is None or self._select is None:
            return None
        if self._columns is None or not len(units):
            return np.fromiter(self._select(units), np.int64)
        return self._by_columns(self._columns, units, offset)

    def _by_columns(self, columns: ColumnScan, units: Units, offset: int) -> Positions:
        assert self._select is not None
        block_filter = cast("ColumnFilter", self._filter).vectorised  # `column_scan` has looked
        found: list[Positions] = []
        position, end = offset, offset + len(units) // UNIT_BYTES
        while position < end:
            block = columns.blocks.block_at(self._queue, position)
            if block is None:
                stop = min(end, position + _SINGLES)
                piece = units[(position - offset) * UNIT_BYTES : (stop - offset) * UNIT_BYTES]
                found.append(np.fromiter(self._select(piece), np.int64) + (position - offset))
            else:
                stop = min(end, block.end)
                first = block.first_offset
                rows, asks = columns.candidates(block_filter, block).between(
                    position - first, stop - first
                )
                places = np.array(rows, np.int64) + (position - offset)
                found.append(self._asked(units, places, asks))
            position = stop
        return np.concatenate(found)

    def _asked(self, units: Units, rows: Positions, asks: list[bool] | None) -> Positions:
        """The rows without those whose record says no."""
        assert self._select is not None
        if asks is None:
            return rows
        keep = ~np.array(asks, np.bool_)
        for place in np.flatnonzero(~keep).tolist():
            begin = int(rows[place]) * UNIT_BYTES
            keep[place] = any(True for _ in self._select(units[begin : begin + UNIT_BYTES]))
        return rows[keep]

    # --- the log

    def _in_file(self, rows: _Rows) -> Iterator[Places]:
        """The places of rows whose records lie in one file."""
        segment = self._log.segments.at(int(rows.positions[0]))
        view = None if segment is None else _view(segment)
        if segment is None or view is None:
            self._without_file(rows)
            return
        base = segment.base
        good = np.ones(len(rows.sizes), np.bool_)
        for row in unproved_rows(view, base, *rows[:2], self._queue.queue_id, rows.offsets):
            position, size = int(rows.positions[row]), int(rows.sizes[row])
            good[row] = self._sound.is_sound(position, size, is_whole=False)
        starts = rows.positions - base
        if self._check_bodies:
            for row, at in enumerate(starts.tolist()):
                good[row] &= read_scanned(view, at, base, check_crc=True) is not None
        if not good.all():
            self._tell_damage(segment, view, rows, np.flatnonzero(~good))
            starts, rows = starts[good], rows.part(good)
        totals = np.cumsum(rows.sizes)
        begin = 0
        while begin < len(starts):
            before = int(totals[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(totals, before + BYTES_MAX, side="right")))
            self.log_bytes += int(totals[end - 1]) - before
            yield Places(view, base, starts[begin:end])
            begin = end

    def _without_file(self, rows: _Rows) -> None:
        position, first = int(rows.positions[0]), int(rows.offsets[0])
        if self._log.segments.at(position) is None and position >= self._log.start:
            self._spoil(len(rows.sizes), first, f"no file of the log holds byte {position}")
        else:
            self._lose(len(rows.sizes), first, int(rows.offsets[-1]) + 1)

    def _tell_damage(self, segment: Segment, view: memoryview, rows: _Rows, bad: Positions) -> None:
        first = int(bad[0])
        at = int(rows.positions[first]) - segment.base
        reason = explain(view, at, segment.base) if 0 <= at < len(view) else "it cannot be there"
        self._spoil(len(bad), int(rows.offsets[first]), f"{reason} ({segment.path}, byte {at})")

    # --- what is not there

    def _lose(self, count: int, start: int, end: int) -> None:
        self.gone += count
        if not self._skips:
            queue = self._queue
            raise OffsetOutOfRangeError(
                f"offsets {start} to {end} of queue {queue.queue_id} of {queue.topic!r} are not all"
                f" there: it holds {queue.offset_min} to {queue.visible_offset}.",
                cure="Retention deleted them, or the queue was reset: start from what is there.",
            )

    def _spoil(self, count: int, offset: int, reason: str) -> None:
        self.damaged += count
        if not self._skips:
            queue = self._queue
            raise StoreDamagedError(
                f"the message at offset {offset} of queue {queue.queue_id} of {queue.topic!r} is"
                f" damaged: {reason}.",
                cure="`sluice store verify` shows all damage, `sluice store repair` mends.",
            )


def _view(segment: Segment) -> memoryview | None:
    """The file, None when retention has just removed it."""
    try:
        return segment.view()
    except FileNotFoundError:
        return None
