"""The timer log: one unit for each timed message, chained within its second (spec/delivery.md §2).

A unit has 52 bytes, big-endian, in files of `mappedFileSizeTimerLog` bytes below `timerlog/`:

    | 52: 4 | previous unit of the same second 8 | magic 4 | written at 8 | due after 4 |
    | physical offset of the message 8 | its size 4 | hash of its real topic 4 | 0: 8 |

`previous` is the unit's position in the log, -1 for the first of a second; the last unit of a
second stands in the wheel (`timer_wheel`). Where a file has no room for a unit and 16 bytes more, a
blank closes it: the room left, a long 0, the magic of the commit log's blank record.

Both are derived data: what they say follows from the queue of `rmq_sys_wheel_timer`. Units are
collected in memory and written by `write`; another thread may `sync` what is written.
"""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from sluicemq.files import Files
from sluicemq.record.layout import MAGIC_BLANK
from sluicemq.store.segments import Segment, SegmentFiles

UNIT: Final = struct.Struct(">iqiqiqiiq")
UNIT_BYTES: Final = 52
SIZE_KEY: Final = "mappedFileSizeTimerLog"
NONE: Final = -1
"""No unit."""

DEFAULT: Final = 1
ROLL: Final = 2
"""Due later than the wheel reaches: the message is put into the timer's queue again by then."""
DELETE: Final = 4
"""Not a message to deliver: one of the same second is taken back."""

_BLANK: Final = struct.Struct(">iqi")
_FLAGS: Final = DEFAULT | ROLL | DELETE


class TimerUnit(NamedTuple):
    """One unit. Times are milliseconds; `position` is the message's place in the commit log."""

    unit_bytes: int
    previous: int
    magic: int
    write_ms: int
    delay_ms: int
    position: int
    size_bytes: int
    topic_hash: int
    reserved: int

    @property
    def due_ms(self) -> int:
        """The second it belongs to, as the unit says it."""
        return self.write_ms + self.delay_ms

    @property
    def is_whole(self) -> bool:
        """Does it look as a unit must?"""
        return (
            self.unit_bytes == UNIT_BYTES
            and bool(self.magic & DEFAULT)
            and not self.magic & ~_FLAGS
            and self.size_bytes > 0
        )


class TimerLog:
    """The files, and the units that are not in them yet."""

    def __init__(self, files: Files, directory: str, file_bytes: int) -> None:
        self._segments = SegmentFiles(files, directory, file_bytes, SIZE_KEY)
        self._files = files
        self._file_bytes = file_bytes
        self._tail = bytearray()
        self._tail_start = 0
        self._is_name_new = False
        self.end = 0
        """Where the next unit goes, as far as one fits there."""

    # --- the files

    def load(self, end: int) -> None:
        """Find the files; units are appended from `end` on. Raises StoreDamagedError."""
        self._segments.load(is_derived=True)
        if not len(self._segments):
            end = 0
        self.set_end(min(max(end, self._segments.start), self._segments.end))

    def set_end(self, end: int) -> None:
        """What lies behind is forgotten."""
        self._tail.clear()
        self._tail_start = self.end = end

    def cut(self, end: int) -> None:
        """The log ends here: what the files hold behind it is wiped, durably. Raises OSError."""
        if self._segments.cut(end):
            for segment in self._segments:
                if segment.end >= end:
                    segment.file().sync()
            self._files.sync_directory(self._segments.directory)
        self.set_end(end)

    @property
    def start(self) -> int:
        """The first position there is."""
        return self._segments.start

    @property
    def is_empty(self) -> bool:
        """Is there nothing at all?"""
        return not len(self._segments) and not self._tail

    def remove_all(self) -> None:
        """The log begins anew."""
        self._segments.remove_all()
        self.set_end(0)

    # --- units

    def unit(self, position: int) -> TimerUnit | None:
        """The unit at a position; None when there is none."""
        if position >= self._tail_start:
            at = position - self._tail_start
            if at + UNIT_BYTES > len(self._tail):
                return None
            return TimerUnit._make(UNIT.unpack_from(self._tail, at))
        return self._stored(position)

    def _stored(self, position: int) -> TimerUnit | None:
        """What the files hold there, behind the end too."""
        segment = self._segments.at(position)
        if segment is None or position + UNIT_BYTES > segment.end or position < 0:
            return None
        return TimerUnit._make(UNIT.unpack_from(segment.view(), position - segment.base))

    def append(
        self,
        previous: int,
        magic: int,
        write_ms: int,
        delay_ms: int,
        position: int,
        size_bytes: int,
        topic_hash: int,
    ) -> int:
        """Add a unit; returns its position. Nothing is written yet. HOT."""
        end = self.end
        room = self._file_bytes - end % self._file_bytes
        if room < UNIT_BYTES + _BLANK.size:
            self._tail += _BLANK.pack(room, 0, MAGIC_BLANK).ljust(room, b"\0")
            end += room
        self._tail += UNIT.pack(
            UNIT_BYTES, previous, magic, write_ms, delay_ms, position, size_bytes, topic_hash, 0
        )
        self.end = end + UNIT_BYTES
        return end

    def write(self) -> None:
        """Write what was appended. On OSError it stays in memory for the next time."""
        done = 0
        tail, start = self._tail, self._tail_start
        while done < len(tail):
            segment = self._segments.at(start + done) or self._add(start + done)
            piece = bytes(tail[done : done + segment.end - start - done])
            segment.write(piece, start + done)
            done += len(piece)
        tail.clear()
        self._tail_start = start + done

    def _add(self, position: int) -> Segment:
        files, directory = self._files, self._segments.directory
        if not files.exists(directory):
            files.make_directory(directory)
        self._is_name_new = True
        return self._segments.add(position - position % self._file_bytes)

    @property
    def written_end(self) -> int:
        """Everything before is in the files."""
        return self._tail_start

    def sync(self, start: int, end: int) -> None:
        """Wait until [start, end) is on disk. Another thread may do this. Raises OSError."""
        if self._is_name_new:
            self._is_name_new = False
            self._files.sync_directory(self._segments.directory)
        for segment in list(self._segments):
            if segment.end > start and segment.base < end:
                segment.file().sync()

    def walk(self, start: int) -> Iterator[tuple[int, TimerUnit]]:
        """(position, unit) in the files from `start` on, up to the first place where none is."""
        position = start
        while (unit := self._stored(position)) is not None or self._is_blank(position):
            if unit is None or not unit.is_whole:
                if not self._is_blank(position):
                    return
                position += self._file_bytes - position % self._file_bytes
                continue
            yield position, unit
            position += UNIT_BYTES

    def _is_blank(self, position: int) -> bool:
        segment = self._segments.at(position)
        if segment is None or position + _BLANK.size > segment.end:
            return False
        room, _, magic = _BLANK.unpack_from(segment.view(), position - segment.base)
        return bool(magic == MAGIC_BLANK and room == segment.end - position)

    # --- retention

    def remove_before(self, log_offset: int) -> int:
        """Remove the files whose messages lie before a place in the commit log; says how many.

        Never the last file.
        """
        removed = 0
        last = (self._file_bytes - _BLANK.size) // UNIT_BYTES - 1
        while len(self._segments) > 1:
            unit = self.unit(self._segments.start + last * UNIT_BYTES)
            if unit is None or unit.position >= log_offset:
                break
            self._files.remove(self._segments.remove_first())
            removed += 1
        return removed

    def close(self) -> None:
        self._segments.close()
