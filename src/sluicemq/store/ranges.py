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
from sluicemq.store.columns_scan import ColumnScan
from sluicemq.store.commitlog import CommitLog
from sluicemq.store.consumequeue import BLANK_SIZE, UNIT_BYTES, Queue
from sluicemq.store.damage import explain
from sluicemq.store.reading import LogReader
from sluicemq.store.scan import LOST_CODE, read_scanned
from sluicemq.store.segments import Segment
from sluicemq.store.sweep import unproved_heads

ROWS_MAX: Final = 16_384
"""Units at once: their records (some MB) stay in the processor's cache while they are decoded."""
ROWS_FILTERED_MAX: Final = 65_536
"""With a filter, whose matches are few: batches of some hundred rows cost Spark more."""
BYTES_MAX: Final = 64 * 1024 * 1024
"""Of records in one `Places`: what is decoded of them has to fit Arrow's offsets, and memory."""
_SINGLES: Final = 256
_UNIT: Final = np.dtype([("position", ">i8"), ("size", ">i4"), ("code", ">i8")])
Units = memoryview | bytearray
Positions = NDArray[np.int64]


class Places(NamedTuple):
    """Records of one file of the log, in the queue's order: `view` is the whole file, whose first
    byte is byte `base` of the log, and they begin at `starts` of it."""

    view: memoryview
    base: int
    starts: Positions


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
        rows = np.frombuffer(units, _UNIT)
        sizes = rows["size"]
        used = (sizes != BLANK_SIZE) & (rows["code"] != LOST_CODE)
        empty = np.flatnonzero(sizes <= 0)
        if len(empty):
            self._spoil(len(empty), offset + int(empty[0]), "its unit in the queue is empty")
            used &= sizes > 0
        chosen = self._chosen(units, offset)
        chosen = np.flatnonzero(used) if chosen is None else chosen[used[chosen]]
        if not len(chosen):
            return
        rows = rows[chosen]
        files = rows["position"].astype(np.int64) // self._log.segments.file_bytes
        cuts = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(rows)]
        for begin, end in pairwise(cuts):
            yield from self._in_file(rows[begin:end], offset + chosen[begin:end])

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
                rows, asks = columns.candidates(block_filter, block)
                rows = rows + (block.first_offset - offset)
                inside = slice(*np.searchsorted(rows, (position - offset, stop - offset)))
                found.append(self._asked(units, rows[inside], asks[inside]))
            position = stop
        return np.concatenate(found)

    def _asked(self, units: Units, rows: Positions, asks: NDArray[np.bool_]) -> Positions:
        """The rows without those whose record says no."""
        assert self._select is not None
        if not asks.any():
            return rows
        keep = ~asks
        for place in np.flatnonzero(asks).tolist():
            begin = int(rows[place]) * UNIT_BYTES
            keep[place] = any(True for _ in self._select(units[begin : begin + UNIT_BYTES]))
        return rows[keep]

    # --- the log

    def _in_file(self, rows: NDArray[Any], offsets: Positions) -> Iterator[Places]:
        """The places of rows whose records lie in one file."""
        segment = self._log.segments.at(int(rows["position"][0]))
        view = None if segment is None else _view(segment)
        if segment is None or view is None:
            self._without_file(rows, offsets)
            return
        good = np.ones(len(rows), np.bool_)
        for row in unproved_heads(
            view, segment.base, rows.tobytes(), self._queue.queue_id, offsets
        ):
            position, size, code = rows[row].tolist()
            good[row] = self._sound.is_sound(position, size, code, is_whole=False)
        if self._check_bodies:
            for row, position in enumerate(rows["position"].tolist()):
                at = position - segment.base
                good[row] &= read_scanned(view, at, segment.base, check_crc=True) is not None
        if not good.all():
            self._tell_damage(segment, view, rows, offsets, np.flatnonzero(~good))
            rows = rows[good]
        starts = rows["position"].astype(np.int64) - segment.base
        totals = np.cumsum(rows["size"].astype(np.int64))
        begin = 0
        while begin < len(rows):
            before = int(totals[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(totals, before + BYTES_MAX, side="right")))
            self.log_bytes += int(totals[end - 1]) - before
            yield Places(view, segment.base, starts[begin:end])
            begin = end

    def _without_file(self, rows: NDArray[Any], offsets: Positions) -> None:
        position, first = int(rows["position"][0]), int(offsets[0])
        if self._log.segments.at(position) is None and position >= self._log.start:
            self._spoil(len(rows), first, f"no file of the log holds byte {position}")
        else:
            self._lose(len(rows), first, int(offsets[-1]) + 1)

    def _tell_damage(
        self,
        segment: Segment,
        view: memoryview,
        rows: NDArray[Any],
        offsets: Positions,
        bad: Positions,
    ) -> None:
        first = int(bad[0])
        at = int(rows["position"][first]) - segment.base
        reason = explain(view, at, segment.base) if 0 <= at < len(view) else "it cannot be there"
        self._spoil(len(bad), int(offsets[first]), f"{reason} ({segment.path}, byte {at})")

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
