"""Reads of ranges of a queue for columnar readers (`RangeScan`).

A store that is read in columns without a broker (`store.readonly`) copies no record and examines
none individually. The units of the queue come in chunks, a filter chooses among them, and the
result is positions in the mapped files of the log, where `record.arrow` decodes the records in
place:

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

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from sluicemq.errors import OffsetOutOfRangeError, StoreDamagedError
from sluicemq.model.subscription import ColumnFilter, MessageFilter
from sluicemq.record.table import UNIT_COLUMNS, Mask, Positions
from sluicemq.store.bulk import unverified_rows
from sluicemq.store.columns.scan import RECORDS_STEP_MAX, ColumnScan, filter_by_records
from sluicemq.store.gather import RecordVerifier, UnitSelector
from sluicemq.store.log import PLACEHOLDER_CODE, CommitLog, parse_log_record
from sluicemq.store.queues import BLANK_SIZE, UNIT_BYTES, Queue, Units
from sluicemq.store.segments import Segment

RANGE_ROWS: Final = 16_384
"""The number of units in a chunk. Their records, some MB, stay in the processor's cache."""
RANGE_ROWS_FILTERED: Final = 65_536
"""The same with a filter, which few messages match: small batches are expensive for Spark."""
RANGE_BYTES: Final = 64 * 1024 * 1024
"""The maximum bytes of records in one `RecordPlaces`. They must fit Arrow's offsets and memory."""


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

        A filter needs `select`, which chooses among units (queue entries) by reading their records.
        `columns` makes it faster; None means that records are always read. If `skips`, missing and
        damaged messages are counted instead of raised as errors. If `check_bodies`, whole records
        are verified, and bodies by their CRC.
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
        """Yield where the matching records of the queue offsets [start, end) are, in order.

        Each item names several records in one file of the log. Raises OffsetOutOfRangeError if some
        messages no longer exist, StoreDamagedError if one is damaged, and OSError. With `skips`,
        the first two are not raised; the messages are skipped and counted.
        """
        offset_min = self._queue.offset_min
        visible_end = self._queue.visible_offset
        units_max = RANGE_ROWS if self._filter is None else RANGE_ROWS_FILTERED

        # Count what lies outside of the queue as missing.
        offset = min(max(start, offset_min), end)
        stop = min(end, visible_end)
        if offset > start or stop < end:
            existing_count = max(0, stop - offset)
            self._count_missing(end - start - existing_count, start, end)

        while offset < stop:
            try:
                units = self._queue.units(offset, min(units_max, stop - offset))
            except FileNotFoundError:  # retention has removed it since
                units = bytearray()
            count = len(units) // UNIT_BYTES
            if not count:  # continue with the next file
                units_per_file = self._queue.segments.file_bytes // UNIT_BYTES
                file_end = offset - offset % units_per_file + units_per_file
                count = min(stop, file_end) - offset
                self._count_missing(count, offset, stop)
            yield from self._iter_places_of_units(units, offset)
            offset += count

    def _iter_places_of_units(self, units: Units, offset: int) -> Iterator[RecordPlaces]:
        """Yield where the matching records of some units are.

        `units` are queue entries of UNIT_BYTES each, joined. The first one has the queue offset
        `offset`. An empty unit counts as a damaged message.
        """
        fields = np.frombuffer(units, UNIT_COLUMNS)
        sizes = fields["size"].astype(np.int64)
        has_record = (sizes != BLANK_SIZE) & (fields["code"] != PLACEHOLDER_CODE)
        empty_indices = np.flatnonzero(sizes <= 0)
        if len(empty_indices):
            first_empty = offset + int(empty_indices[0])
            self._count_damaged(len(empty_indices), first_empty, "its unit in the queue is empty")
            has_record &= sizes > 0

        matching = self._find_matching_indices(units, offset, has_record)
        if not len(matching):
            return
        positions = fields["position"].astype(np.int64)
        rows = _Rows(positions, sizes, offset + np.arange(len(fields)))
        if len(matching) < len(fields):
            rows = rows.part(matching)

        # Cut the rows where the file of the log changes.
        file_numbers = rows.positions // self._log.segments.file_bytes
        changes = np.flatnonzero(file_numbers[1:] != file_numbers[:-1]) + 1
        for begin, end in pairwise([0, *changes.tolist(), len(file_numbers)]):
            yield from self._iter_places_in_file(rows.part(slice(begin, end)))

    def _find_matching_indices(self, units: Units, offset: int, has_record: Mask) -> Positions:
        """Return the indices of the units that match and have a record, in ascending order.

        `units` are queue entries, joined, of which the first has the queue offset `offset`.
        `has_record` says for each unit whether it has a record.
        """
        if self._select is None:
            return np.flatnonzero(has_record)
        if self._columns is None or not len(units):
            matching = np.fromiter(self._select(units), np.int64)
        else:
            matching = self._filter_by_columns(self._columns, self._select, units, offset)
        return matching[has_record[matching]]

    def _filter_by_columns(
        self, columns: ColumnScan, select: UnitSelector, units: Units, offset: int
    ) -> Positions:
        """Return the indices of the units that match the filter, in ascending order.

        `units` are queue entries, joined, of which the first has the queue offset `offset`.
        `columns` evaluates the filter. Where it cannot decide, `select` reads the records.
        """
        # `column_scan` has checked the type of the filter.
        block_filter = cast("ColumnFilter", self._filter).vectorised
        matching: list[int] = []
        scan_offset = offset
        end = offset + len(units) // UNIT_BYTES
        while scan_offset < end:
            scanned = columns.scan_at(block_filter, self._queue, scan_offset)
            stop = scan_offset + RECORDS_STEP_MAX if scanned is None else scanned.stop
            stop = min(stop, end)
            first_index = scan_offset - offset
            scanned_units = units[first_index * UNIT_BYTES : (stop - offset) * UNIT_BYTES]
            rows: Iterable[int]  # the matches, counted from `scan_offset`
            if scanned is None:
                rows = select(scanned_units)
            else:
                first_row = scan_offset - scanned.start
                stop_row = stop - scanned.start
                rows, needs_record = scanned.candidates.slice_rows(first_row, stop_row)
                if needs_record is not None:
                    rows = filter_by_records(rows, needs_record, scanned_units, select)
            matching += [row + first_index for row in rows]
            scan_offset = stop
        return np.array(matching, np.int64)

    def _iter_places_in_file(self, rows: _Rows) -> Iterator[RecordPlaces]:
        """Verify the records of rows that are in one file of the log, and yield where they are.

        Each item has at most RANGE_BYTES of records, or one record. Missing and damaged records are
        counted, and raised as errors unless `skips`.
        """
        segment = self._log.segments.at(int(rows.positions[0]))
        view = None
        if segment is not None:
            last_end = int(rows.positions[-1]) + int(rows.sizes[-1])
            with suppress(FileNotFoundError):  # retention has just removed it
                view = segment.data_view(last_end)
        if segment is None or view is None:
            self._count_without_file(rows, has_segment=segment is not None)
            return

        rows = self._drop_damaged(rows, segment, view)
        starts = rows.positions - segment.base
        cumulative_sizes = np.cumsum(rows.sizes)
        begin = 0
        while begin < len(starts):
            size_before = int(cumulative_sizes[begin - 1]) if begin else 0
            end = int(np.searchsorted(cumulative_sizes, size_before + RANGE_BYTES, side="right"))
            end = max(end, begin + 1)  # a record that is larger than the limit comes alone
            self.log_bytes += int(cumulative_sizes[end - 1]) - size_before
            yield RecordPlaces(view, segment.base, starts[begin:end])
            begin = end

    def _count_without_file(self, rows: _Rows, *, has_segment: bool) -> None:
        """Count the messages of rows whose file of the log cannot be read, or raise an error.

        They are missing if retention has removed the file, and damaged if the log never had it.
        `has_segment` means that the log had the file a moment ago.
        """
        position = int(rows.positions[0])
        first_offset = int(rows.offsets[0])
        count = len(rows.sizes)
        if not has_segment and position >= self._log.start:
            self._count_damaged(count, first_offset, f"no file of the log holds byte {position}")
        else:
            self._count_missing(count, first_offset, int(rows.offsets[-1]) + 1)

    def _drop_damaged(self, rows: _Rows, segment: Segment, view: memoryview) -> _Rows:
        """Return the rows whose records are valid. Count the others as damaged, or raise an error.

        `view` is the content of `segment`, the file of the log that contains the records.
        """
        is_valid = self._verify_records(rows, segment.base, view)
        if is_valid.all():
            return rows

        damaged = np.flatnonzero(~is_valid)
        first_damaged = damaged[0]
        position = int(rows.positions[first_damaged])
        index = position - segment.base
        reason = "it cannot be there"
        if 0 <= index < segment.size:
            reason = self._log.explain_bad_record(position)
        reason = f"{reason} ({segment.path}, byte {index})"
        self._count_damaged(len(damaged), int(rows.offsets[first_damaged]), reason)
        return rows.part(is_valid)

    def _verify_records(self, rows: _Rows, base: int, view: memoryview) -> Mask:
        """Return for each row whether its record is valid.

        `view` is the file of the log that contains the records, from position `base` on.
        """
        is_valid = np.ones(len(rows.sizes), np.bool_)
        unverified = unverified_rows(
            view, base, rows.positions, rows.sizes, self._queue.queue_id, rows.offsets
        )
        for row in unverified:  # few rows: columns have verified the others
            position = int(rows.positions[row])
            size = int(rows.sizes[row])
            is_valid[row] = self._verifier.is_valid(position, size, is_whole=False)
        if self._check_bodies:
            for row, start in enumerate((rows.positions - base).tolist()):
                is_valid[row] &= parse_log_record(view, start, base, check_crc=True) is not None
        return is_valid

    def _count_missing(self, count: int, start: int, end: int) -> None:
        """Add to the number of missing messages. Raise OffsetOutOfRangeError unless `skips`.

        The error names the queue offsets from `start` to `end`, some of which do not exist.
        """
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
        """Add to the number of damaged messages. Raise StoreDamagedError unless `skips`.

        `offset` is the queue offset of the first damaged message.
        """
        self.damaged_count += count
        if not self._skips:
            queue = self._queue
            raise StoreDamagedError(
                f"the message at offset {offset} of queue {queue.queue_id} of {queue.topic!r} is"
                f" damaged: {reason}.",
                fix="Run `sluice store verify` to list all damage, then `sluice store repair`.",
            )
