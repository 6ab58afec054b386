"""Walk over a commit log from its start to its end, past damaged parts.

`LogWalk` divides each file of the log into:

    Run            adjacent valid records
    InvalidRange   bytes without a valid record: either one record whose header is plausible but
                   whose content is not valid, or all bytes up to the next valid record
    Blank          the unused end of a file, behind a blank record

A record is valid under the rules of recovery (`log.parse_log_record`: position, lengths, CRC of the
body, no lost sector). Recovery ends the log at the first invalid record. The walk instead continues
at the next position that `store.log.find_next_record_start` accepts. Verify, repair and dump all
use this walk, so they agree about what is damaged.

Invalid ranges with no valid record behind them are the tail of the log: a crash may have left them.
`LogWalk.valid_end` is the position where the tail begins.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np

from sluicemq.errors import ProtocolError
from sluicemq.record.codec import parse_head
from sluicemq.record.layout import BLANK, MAGIC_BLANK, MAGICS, RECORD_BYTES_MIN
from sluicemq.record.table import UNIT_COLUMNS, Records
from sluicemq.store.bulk import QueueUnits, Sweep, sweep_piece
from sluicemq.store.log import (
    DELAYS_MS,
    RECORD_BYTES_MAX,
    LogRecord,
    explain_bad_record,
    find_next_record_start,
    parse_log_record,
)
from sluicemq.store.tools.layout import FileSequence, read_or_zeros

WINDOW_BYTES: Final = 8 << 20
"""The walk reads this many bytes of the log at once."""
_RECORD_READ_BYTES_MAX: Final = 1 << 26
_SINGLE_RECORDS: Final = 256
"""Where reading in columns fails, this many records are parsed singly before the next attempt."""


class Run:
    """Valid records that are adjacent in the log.

    `groups` are the units of these records, one group for each queue. `end` is the position behind
    the last record, and `store_time_ms` the store time of the last record.
    """

    def __init__(
        self, swept: Sweep | LogRecord, records: Records, groups: list[QueueUnits]
    ) -> None:
        """Create a run of `records`, which follow each other in the log without a gap.

        `groups` are the units of these records, by queue. `swept` has the position behind the
        records and their last store time.
        """
        self.records = records
        self.groups = groups
        self.end = swept.end
        self.store_time_ms = swept.store_time_ms

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.records)


class InvalidRange(NamedTuple):
    """The bytes [start, end) of one file, which contain no valid record.

    `reason` is a phrase that says what is wrong at `start`. `is_record` is set if the range is one
    record whose lengths and position are plausible. `is_file_missing` is set if the file of these
    bytes does not exist.
    """

    start: int
    end: int
    reason: str
    is_record: bool = False
    is_file_missing: bool = False


class Blank(NamedTuple):
    """The bytes [start, end) at the end of a file. A blank record says that they are unused."""

    start: int
    end: int


class LogWalk:
    """One walk over a log. It can be iterated once.

    While it is iterated, `position` is the position that it has reached. `valid_end` is the
    position behind the last valid record, or behind the blank record that ends its file.
    `plausible_end` is the same, but also counts invalid records whose lengths and position are
    plausible (`InvalidRange.is_record`).
    """

    def __init__(
        self,
        log: FileSequence,
        extents: Iterable[tuple[int, int]] | None = None,
        delays_ms: Sequence[int] = DELAYS_MS,
        *,
        is_forgiving: bool = False,
    ) -> None:
        """Prepare a walk over `log`.

        `extents` are the (start, end) that the files have or should have; None takes them from the
        files. `delays_ms` are the delays of the levels of delayed messages, from which due times
        are computed. If `is_forgiving`, bytes that the disk cannot read or that a file lacks count
        as zeros. Otherwise the walk raises OSError for blocks that cannot be read.
        """
        self._log = log
        self._extents = _find_extents(log) if extents is None else list(extents)
        self._delays_ms = delays_ms
        self._is_forgiving = is_forgiving
        self.position = self.valid_end = self.plausible_end = log.start

    def __iter__(self) -> Iterator[Run | InvalidRange | Blank]:
        """Yield the parts of the log in order. Raises OSError unless `is_forgiving` is set."""
        for start, end in self._extents:
            self.position = start
            if self._log.find_segment_index(start) is None:
                yield InvalidRange(start, end, "the file is missing", is_file_missing=True)
            else:
                yield from self._walk_file(end)
            self.position = end

    def _walk_file(self, file_end: int) -> Iterator[Run | InvalidRange | Blank]:
        """Yield the parts of one file from `position` on, up to `file_end`.

        The parts are runs of valid records, invalid ranges, and the blank end of the file.
        """
        while self.position < file_end:
            window_start = self.position
            window = self._read_window(window_start, file_end)
            for run in self._iter_runs(window, window_start):
                yield run
                self.position = self.valid_end = self.plausible_end = run.end

            # What follows the valid records: a record that the window cuts, the blank end of the
            # file, or an invalid range.
            index = self.position - window_start
            bytes_left_in_file = file_end - self.position
            claimed_size, magic = _read_size_and_magic(window, index)
            is_record = magic in MAGICS and RECORD_BYTES_MIN <= claimed_size <= bytes_left_in_file
            needed_bytes = claimed_size if is_record else RECORD_BYTES_MIN
            is_cut = len(window) - index < needed_bytes
            if is_cut and index and window_start + len(window) < file_end:
                continue  # The record continues behind the window: read again from its beginning.

            is_blank = magic == MAGIC_BLANK and claimed_size == bytes_left_in_file
            if is_blank:
                yield Blank(self.position, file_end)
            if is_blank or bytes_left_in_file < BLANK.size:
                self.position = self.valid_end = self.plausible_end = file_end
                return
            yield self._pass_invalid_range(window, window_start, file_end)

    def _read_window(self, start: int, file_end: int) -> memoryview:
        """Read WINDOW_BYTES of a file from position `start` on, or fewer at its end.

        If a longer record begins at `start`, read the whole record.
        """
        window_bytes = min(WINDOW_BYTES, file_end - start)
        window = memoryview(self.read(start, window_bytes))
        claimed_size, magic = _read_size_and_magic(window, 0)
        record_bytes_max = min(file_end - start, RECORD_BYTES_MAX)
        if magic in MAGICS and window_bytes < claimed_size <= record_bytes_max:
            window = memoryview(self.read(start, claimed_size))
        return window

    def _pass_invalid_range(
        self, window: memoryview, window_start: int, file_end: int
    ) -> InvalidRange:
        """Return the invalid range that begins at `position`, and move `position` to its end.

        The range ends behind the damaged record if its head is plausible. Otherwise it ends at the
        next valid record or the end of the file. `window` contains the bytes of the log from
        position `window_start` on.
        """
        start = self.position
        if self._log.find_segment_index(start) is None:
            self.position = file_end
            return InvalidRange(start, file_end, "the file is too short")

        # If the head is plausible, the record is damaged behind it, and its end is known.
        index = start - window_start
        reason = explain_bad_record(window, index, window_start, file_end - start)
        head = None
        with suppress(ProtocolError):
            head = parse_head(window, index)
        if head is not None and head.physical_offset == start and head.store_time_ms > 0:
            self.position = self.plausible_end = start + head.size_bytes
            return InvalidRange(start, self.position, reason, is_record=True)

        next_start = find_next_record_start(self, start + 1, file_end, file_end)
        self.position = file_end if next_start is None else next_start
        return InvalidRange(start, self.position, reason)

    def _iter_runs(self, view: memoryview, base: int) -> Iterator[Run]:
        """Yield runs of the valid records from `position` on that are completely in the window.

        `view` contains the window, which begins at position `base`. The caller must set `position`
        to the end of each run before it asks for the next one.
        """
        # Where records cannot be read as a table, the next few are read one by one.
        singles_left = 0
        # `position` changes while this generator is suspended.
        while self.position - base < len(view):
            index = self.position - base
            if not singles_left:
                swept = sweep_piece(view, index, base, check_crc=True, delays_ms=self._delays_ms)
                if swept is not None:
                    yield Run(swept, swept.records, swept.groups)
                    continue
                singles_left = _SINGLE_RECORDS
            singles_left -= 1
            record = parse_log_record(view, index, base, check_crc=True)
            if record is None:
                return
            raw = np.frombuffer(view, np.uint8, record.size_bytes, index)
            records = Records(raw, np.zeros(1, np.int64), record.position)
            yield Run(record, records, self._group_units(record))

    def _group_units(self, record: LogRecord) -> list[QueueUnits]:
        """Return the unit of a record for each queue that contains it.

        A record may be in several queues, or in none.
        """
        if not record.is_queued:
            return []
        own_queue = (record.topic, record.queue_id, record.queue_offset)
        other_queues = [(key[0].encode(), key[1], offset) for key, offset in record.extra_queues()]
        unit = (record.position, record.size_bytes, record.tag_code(self._delays_ms))
        return [
            QueueUnits(topic, queue_id, np.array([offset]), np.array([unit], UNIT_COLUMNS))
            for topic, queue_id, offset in (own_queue, *other_queues)
        ]

    def read(self, position: int, size: int) -> bytes:
        """Return `size` bytes of the log; fewer where files end, unless the walk is forgiving.

        Raises OSError unless `is_forgiving` is set.
        """
        if not self._is_forgiving:
            return self._log.read(position, size)
        return read_or_zeros(self._log.read, position, size).ljust(size, b"\0")

    def data_start(self, position: int) -> int | None:
        """Return the same as `FileSequence.data_start` of the log."""
        return self._log.data_start(position)


def _read_size_and_magic(view: memoryview, index: int) -> tuple[int, int]:
    """Return the size and the magic number of a record at `index`; zeros if both do not fit."""
    if len(view) - index < BLANK.size:
        return 0, 0
    return BLANK.struct.unpack_from(view, index)


def _find_extents(log: FileSequence) -> list[tuple[int, int]]:
    """Return the (start, end) of each file of the log, and of each missing part, in order."""
    extents: list[tuple[int, int]] = []
    end = log.start
    for segment in log.segments:
        if end < segment.base:  # a file is missing
            extents.append((end, segment.base))
        if end < segment.end:
            extents.append((max(end, segment.base), segment.end))
            end = segment.end
    return extents


def read_record(
    log: FileSequence, position: int, size_max: int = _RECORD_READ_BYTES_MAX
) -> Records | None:
    """Read the record at `position` as a table of one row.

    Return None if its lengths are not plausible, or if it has more than `size_max` bytes. Its CRC
    and the position in it are not checked.
    """
    head = log.read(position, BLANK.size)
    size = BLANK.struct.unpack(head)[0] if len(head) == BLANK.size else 0
    raw = np.frombuffer(log.read(position, min(size, size_max)), np.uint8)
    if len(raw) < RECORD_BYTES_MIN:
        return None
    record = Records(raw, np.zeros(1, np.int64), position)
    return record if record.valid[0] and record.sizes[0] == len(raw) else None


def find_data_end(log: FileSequence, start: int) -> int | None:
    """Return the position behind the last byte that is not zero; None if all are zero.

    Only bytes from position `start` on are examined.
    """
    end = None
    for position, piece in log.iter_data(start):
        used_bytes = len(piece.rstrip(b"\0"))
        if used_bytes:
            end = position + used_bytes
    return end
