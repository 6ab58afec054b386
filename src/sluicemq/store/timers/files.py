"""The files of the timers: timer log, timer wheel and checkpoint (spec/delivery.md §2).

All three are derived data: they can be rebuilt from the timer queue, which is queue 0 of the topic
`rmq_sys_wheel_timer`. Numbers are big-endian.

**The timer log** contains one unit for each timed message. The units of one slot form a chain.
A unit has 52 bytes, in files of `mappedFileSizeTimerLog` bytes in the directory `timerlog`:

    | 52: 4 | previous unit of the same slot 8 | magic 4 | written at 8 | due after 4 |
    | physical offset of the message 8 | its size 4 | hash of its real topic 4 | 0: 8 |

`previous` is a position in the timer log, -1 for the first unit of a slot. The wheel contains the
position of the last unit. If a file has no room for a unit and a blank of 16 bytes, a blank closes
the file: the remaining size, a long 0, and the magic of a blank record of the commit log. Units are
collected in memory until `write` writes them. Another thread may `sync` what is written.

**The timer wheel** contains, for each second of two weeks, the ends of the chain of the messages
that are due in it. It is one file of 38,707,200 bytes, 1,209,600 slots of 32:

    | time 8 | first unit 8 | last unit 8 | messages 4 | magic 4 |

`time` is the due time divided by the precision (by default 1,000 ms, so a slot is a second). A slot
is used again after one turn of the wheel, so it counts only if its `time` is the requested one. The
file is sparse. Only the slots that changed since the last write are in memory. All others are read
one by one with `pread`, and holes of the file are skipped. `take_changed_slots` hands the changed
slots to `write`, which another thread may call. They stay readable in memory until `finish_write`.

**The checkpoint**, `config/timercheck`, says how far the timers have come (spec/store.md §11). It
is a file of 4,096 bytes, of which RocketMQ uses the first 56: seven longs. The wheel and the timer
log agree up to `log_end`. All messages of the timer queue before `queue_offset` are in them.
Everything that is due before `read_ms` has been delivered. The file is written in place: one sector
is written completely or not at all.

SluiceMQ appends an extension, with a CRC over all fields:

    done_ms         the slot of `read_ms` has been delivered up to this time
    replay_offset   of the messages before this offset of the timer queue, exactly those that are
                    due before `read_ms` have been delivered. Later messages may have been too late
                    for their slot. Therefore wheel and log can be rebuilt exactly
    log_position    the end of the commit log at that time: later deliveries are behind it
    record          the position and CRC-32 of the last record of the timer queue that is in the
                    files: the checkpoint belongs to a commit log that contains this record
    incarnation     of the store whose wheel and timer log `log_end` and `queue_offset` describe. A
                    slave has its master's checkpoint, but no wheel

If RocketMQ has written the file since, the CRC is wrong. A checkpoint without a valid extension
does not prove that any message has been delivered.
"""

import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Final, NamedTuple

from sluicemq.errors import StoreDamagedError
from sluicemq.files import File, Files
from sluicemq.files.identity import RecordSource, content_checksum
from sluicemq.record.layout import MAGIC_BLANK
from sluicemq.store.segments import Segment, SegmentFiles

UNIT: Final = struct.Struct(">iqiqiqiiq")
UNIT_BYTES: Final = 52
SIZE_KEY: Final = "mappedFileSizeTimerLog"
NO_UNIT: Final = -1
"""The position that means that there is no unit."""

MAGIC_DEFAULT: Final = 1
"""The flag that every unit has."""
MAGIC_ROLL: Final = 2
"""The message is due later than the wheel reaches. It is put into the timer queue again."""
MAGIC_DELETE: Final = 4
"""The unit is a recall: a message of the same slot must not be delivered."""

CHECKED_BYTES: Final = 64 << 20
"""The number of bytes at the end of the timer log that its checksum covers."""
_PIECE_BYTES: Final = 1 << 20
_BLANK: Final = struct.Struct(">iqi")
_FLAGS: Final = MAGIC_DEFAULT | MAGIC_ROLL | MAGIC_DELETE


class TimerUnit(NamedTuple):
    """A unit of the timer log.

    `write_ms` and `delay_ms` are milliseconds; their sum is the slot. `previous` is the position of
    the previous unit in the timer log. `position` is the position of the message in the commit log.
    """

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
        """The slot of the unit, in milliseconds since 1970."""
        return self.write_ms + self.delay_ms

    @property
    def is_valid(self) -> bool:
        """Whether the fields have possible values: the right size and flags, and a message."""
        return (
            self.unit_bytes == UNIT_BYTES
            and bool(self.magic & MAGIC_DEFAULT)
            and not self.magic & ~_FLAGS
            and self.size_bytes > 0
        )


class TimerLog:
    """The files of the timer log, and the units that are not in the files yet."""

    def __init__(self, files: Files, directory: str, file_bytes: int) -> None:
        """Create an empty log; `load` finds its files in `directory`.

        Each file has `file_bytes` bytes. The directory is created with the first file.
        """
        self._segments = SegmentFiles(files, directory, file_bytes, SIZE_KEY)
        self._files = files
        self._file_bytes = file_bytes
        self._tail = bytearray()
        self._tail_start = 0
        self._is_name_new = False
        self._dense_end = 0
        """The files have no holes before this position, so a map of them is readable on a full
        tmpfs."""
        self.end = 0
        """The position of the next unit, unless a blank must come first."""

    # --- The files

    def load(self, end: int, *, removes: bool = True) -> None:
        """Find the files, and set `end`, the position at which the next unit is appended.

        `end` is limited to the range of the files. Units behind it stay in the files:
        `iter_stored_units` reads them, and `truncate` removes them. An empty or missing file ends
        the log, and later files are removed. If `removes` is False, which tools use, nothing on
        disk is changed.

        Raises StoreDamagedError if a file has a wrong size, and OSError.
        """
        self._segments.load(is_derived=True, removes=removes)
        if not len(self._segments):
            end = 0
        self._dense_end = self._segments.start
        for segment in self._segments:
            self._dense_end = segment.base + segment.file().data_end(0)
            if self._dense_end < segment.end:
                break
        self.reset_end(min(max(end, self._segments.start), self._segments.end))

    def reset_end(self, end: int) -> None:
        """Set the position of the next unit, and drop all units that are not written yet."""
        self._tail.clear()
        self._tail_start = self.end = end

    def truncate(self, end: int) -> None:
        """Remove all units from position `end` on, durably. The next unit is appended at `end`.

        Later files are removed, and the rest of the file that contains `end` is zeroed. Raises
        OSError.
        """
        if self._segments.truncate(end):
            for segment in self._segments:
                if segment.end >= end:
                    segment.file().sync()
            self._files.sync_directory(self._segments.directory)
        self.reset_end(end)

    @property
    def start(self) -> int:
        """The position at which the first file begins, 0 without files."""
        return self._segments.start

    @property
    def is_empty(self) -> bool:
        """Whether there are neither files nor units in memory."""
        return not len(self._segments) and not self._tail

    def remove_all(self) -> None:
        """Remove all files and units. The log continues at position 0."""
        self._segments.remove_all()
        self.reset_end(0)

    # --- Units

    def unit_at(self, position: int) -> TimerUnit | None:
        """Return the unit at a position, from memory or the files; None if the log ends before."""
        if position >= self._tail_start:
            index = position - self._tail_start
            if index + UNIT_BYTES > len(self._tail):
                return None
            return TimerUnit._make(UNIT.unpack_from(self._tail, index))
        return self._read_stored_unit(position)

    def _read_stored_unit(self, position: int) -> TimerUnit | None:
        """Read the unit at a position from the files. Its fields may be invalid.

        The position may be behind `end`. Return None if no file contains it.
        """
        segment = self._segments.at(position)
        if segment is None or position + UNIT_BYTES > segment.end or position < 0:
            return None
        if position + UNIT_BYTES > self._dense_end:
            # The file may have holes here, which cannot be read through a map on a full tmpfs.
            return TimerUnit._make(UNIT.unpack(segment.read(position, UNIT_BYTES)))
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
        """Append a unit in memory, and return its position. HOT: called for every timed message.

        `previous` is the position of the previous unit of the same slot, or NO_UNIT. `magic`
        contains flags. The record of the message has `size_bytes` at `position` of the commit log.
        `topic_hash` is the hash of the topic to which it is delivered. `write_ms` + `delay_ms` is
        the slot.

        `delay_ms` has 32 bits in the file. If it does not fit, a part of it is added to `write_ms`,
        so that the sum stays the same. If a file has no room for the unit, a blank fills the file,
        and the unit begins the next one.
        """
        fitting_ms = min(max(delay_ms, -(1 << 31)), (1 << 31) - 1)
        if fitting_ms != delay_ms:
            write_ms = write_ms + delay_ms - fitting_ms
            delay_ms = fitting_ms
        unit_position = self.end
        bytes_left = self._file_bytes - unit_position % self._file_bytes
        if bytes_left < UNIT_BYTES + _BLANK.size:
            self._tail += _BLANK.pack(bytes_left, 0, MAGIC_BLANK).ljust(bytes_left, b"\0")
            unit_position += bytes_left
        self._tail += UNIT.pack(
            UNIT_BYTES, previous, magic, write_ms, delay_ms, position, size_bytes, topic_hash, 0
        )
        self.end = unit_position + UNIT_BYTES
        return unit_position

    def write(self) -> None:
        """Write the appended units to the files, without syncing them. Create files as necessary.

        Raises OSError; then all units stay in memory for the next call.
        """
        tail = self._tail
        start = self._tail_start
        end = start + len(tail)
        position = start
        while position < end:
            segment = self._segments.at(position)
            if segment is None:
                segment = self._add_file(position)
            piece = bytes(tail[position - start : segment.end - start])
            segment.write(piece, position)
            position += len(piece)
        has_hole = self._dense_end < start
        if not has_hole:
            self._dense_end = max(self._dense_end, end)
        tail.clear()
        self._tail_start = end

    def _add_file(self, position: int) -> Segment:
        """Create the file that contains `position`, and the directory if it does not exist."""
        if not self._files.exists(self._segments.directory):
            self._files.make_directory(self._segments.directory)
        self._is_name_new = True
        return self._segments.add(position - position % self._file_bytes)

    @property
    def written_end(self) -> int:
        """The position up to which the units are in the files."""
        return self._tail_start

    def sync(self, start: int, end: int) -> None:
        """Wait until the positions [start, end) are on disk. Another thread may call this.

        Raises OSError.
        """
        if self._is_name_new:
            self._is_name_new = False
            self._files.sync_directory(self._segments.directory)
        for segment in list(self._segments):
            if segment.end > start and segment.base < end:
                segment.file().sync()

    def iter_stored_units(self, start: int) -> Iterator[tuple[int, TimerUnit]]:
        """Yield (position, unit) for the units in the files, from position `start` on.

        The iteration stops at the first invalid unit, not at `end`. Blanks at the ends of files are
        skipped. Units that are only in memory are not yielded.
        """
        position = start
        while True:
            unit = self._read_stored_unit(position)
            if unit is not None and unit.is_valid:
                yield position, unit
                position += UNIT_BYTES
            elif self._is_blank(position):
                position += self._file_bytes - position % self._file_bytes
            else:
                return

    def _is_blank(self, position: int) -> bool:
        """Return whether a blank at this position fills the rest of its file."""
        segment = self._segments.at(position)
        if segment is None or position + _BLANK.size > segment.end:
            return False
        blank_bytes, _, magic = _BLANK.unpack(segment.read(position, _BLANK.size))
        return bool(magic == MAGIC_BLANK and blank_bytes == segment.end - position)

    @property
    def segment_starts(self) -> list[int]:
        """The positions at which the files begin."""
        return [segment.base for segment in self._segments]

    def read(self, position: int, size: int) -> bytes:
        """Return `size` bytes from a position, read with `pread`; fewer if the file ends before."""
        segment = self._segments.at(position)
        if segment is None:
            return b""
        return segment.read(position, min(size, segment.end - position))

    def checksum(self, end: int) -> int:
        """Return a CRC-32 of the last `CHECKED_BYTES` of the files before position `end`.

        It covers the bytes and their positions. Raises OSError.
        """
        crc = 0
        position = max(end - CHECKED_BYTES, self.start)
        while position < end:
            piece = self.read(position, min(_PIECE_BYTES, end - position))
            if not piece:
                break
            crc = zlib.crc32(piece, zlib.crc32(position.to_bytes(8), crc))
            position += len(piece)
        return crc

    @property
    def units_per_file(self) -> int:
        """The number of units that a full file contains."""
        return (self._file_bytes - UNIT_BYTES - _BLANK.size) // UNIT_BYTES + 1

    # --- Retention

    def remove_before(self, log_offset: int) -> int:
        """Remove the first files whose messages are all before a position of the commit log.

        The last unit of a file decides, because units are in the order of the commit log. Return
        the number of removed files. The last file is never removed. Raises OSError.
        """
        removed = 0
        last_unit_number = (self._file_bytes - _BLANK.size) // UNIT_BYTES - 1
        while len(self._segments) > 1:
            unit = self.unit_at(self._segments.start + last_unit_number * UNIT_BYTES)
            if unit is None or unit.position >= log_offset:
                break
            self._files.remove(self._segments.detach_first())
            removed += 1
        return removed

    def close(self) -> None:
        """Close the files. Units that are not written are lost."""
        self._segments.close()


SLOT: Final = struct.Struct(">qqqii")
SLOT_BYTES: Final = 32
SLOTS: Final = 2 * 7 * 86_400
"""The number of slots of the wheel: the seconds of two weeks."""
WHEEL_BYTES: Final = SLOTS * SLOT_BYTES
_CHUNK_SLOTS: Final = 2048


class Slot(NamedTuple):
    """A slot of the wheel.

    `time` is the slot's time divided by the precision. `first_unit` and `last_unit` are positions
    in the timer log. `message_count` is the number of messages to deliver, recalls subtracted.
    """

    time: int
    first_unit: int
    last_unit: int
    message_count: int
    magic: int = 0


class TimerWheel:
    """The timer wheel. Times are in milliseconds and are rounded down to the precision."""

    def __init__(self, files: Files, path: str, precision_ms: int = 1000) -> None:
        """Create a wheel with the slots that the file at `path` has. It need not exist yet.

        `precision_ms` is the width of a slot.
        """
        self._files = files
        self._path = path
        self.precision_ms = precision_ms
        self._file: File | None = None
        self._changed: dict[int, Slot] = {}
        """The slots that were changed since `take_changed_slots`, by their index in the file."""
        self._writing: dict[int, Slot] = {}
        """The slots that `take_changed_slots` returned, until `finish_write`."""

    # --- The file

    @property
    def exists(self) -> bool:
        """Whether the file exists."""
        return self._files.exists(self._path)

    def check_size(self, *, removes: bool = True) -> None:
        """Raise StoreDamagedError if the file exists and has a wrong size.

        A file of 0 bytes is accepted, because a crash during its creation leaves one. It is
        removed, unless `removes` is False.
        """
        if not self.exists:
            return
        size = self._open_file().size()
        if size == 0:
            if removes:
                self.remove()
        elif size != WHEEL_BYTES:
            raise StoreDamagedError(
                f"{self._path} has {size} bytes instead of {WHEEL_BYTES}.",
                fix="Restore it from a copy, or remove timerwheel and timerlog: they are rebuilt"
                " from the commit log.",
            )

    def _open_file(self) -> File:
        """Return the open file. Open it if necessary, and create it if it does not exist."""
        file = self._file
        if file is None:
            file = self._file = self._files.open(self._path, create=True)
        return file

    def checksum(self) -> int:
        """Return a CRC-32 of the content of the file; 0 if the file does not exist."""
        if not self.exists:
            return 0
        return content_checksum(self._open_file())

    def remove(self) -> None:
        """Remove the file and all changes in memory, so that all slots are empty."""
        self.close()
        self._changed.clear()
        self._writing.clear()
        if self.exists:
            self._files.remove(self._path)

    def close(self) -> None:
        """Close the file. It is opened again when it is needed."""
        file = self._file
        self._file = None
        if file is not None:
            file.close()

    # --- Slots

    def get(self, time_ms: int) -> Slot | None:
        """Return the slot of a time; None if it is empty. HOT: called for every timed message.

        A slot covers `precision_ms`. It locates the first and last unit (log entry) that are due
        then. The wheel is a ring, so the place of a slot may have one of an earlier or later turn;
        then the slot of `time_ms` is empty.
        """
        time = time_ms // self.precision_ms
        index = time % SLOTS
        slot = self._changed.get(index) or self._writing.get(index)
        if slot is None:
            if self._file is None and not self.exists:
                return None
            stored = self._open_file().pread(SLOT_BYTES, index * SLOT_BYTES)
            if len(stored) < SLOT_BYTES:
                return None
            slot = Slot._make(SLOT.unpack(stored))
        if slot.time != time or slot.last_unit == NO_UNIT:
            return None
        return slot

    def put(self, time_ms: int, first_unit: int, last_unit: int, message_count: int) -> None:
        """Replace the slot of a time, in memory.

        `first_unit` and `last_unit` are the positions of the first and last unit of its chain in
        the timer log, and `message_count` is the number of messages to deliver.
        """
        time = time_ms // self.precision_ms
        self._changed[time % SLOTS] = Slot(time, first_unit, last_unit, message_count)

    def iter_occupied_ms(self, start_ms: int, end_ms: int) -> Iterator[int]:
        """Yield the times of the slots in [start_ms, end_ms) that are not empty, in order.

        At most one turn of the wheel is read. Slots that change during the iteration may be missed
        or yielded twice.
        """
        # Times are divided by the precision from here on, as in `Slot.time`.
        step = self.precision_ms
        time = start_ms // step
        end_time = min(-(-end_ms // step), time + SLOTS)
        while time < end_time:
            # A chunk ends at a multiple of its size in the file, or where the wheel begins again.
            index = time % SLOTS
            turn_end = time - index + SLOTS
            stop = min(end_time, time + _CHUNK_SLOTS - index % _CHUNK_SLOTS, turn_end)
            times = self._find_changed_times(time, stop) | self._read_stored_times(time, stop)
            for occupied_time in sorted(times):
                if self.get(occupied_time * step) is not None:
                    yield occupied_time * step
            time = stop

    def _find_changed_times(self, start: int, stop: int) -> set[int]:
        """Return times in [start, stop) that may have a slot in memory, changed but not on disk.

        Times are divided by the precision. Some may be times of another turn of the wheel.
        """
        times: set[int] = set()
        for slots in (self._changed, self._writing):
            # Examine whatever is fewer: the slots in memory, or the times.
            if len(slots) < stop - start:
                times |= {slot.time for slot in slots.values() if start <= slot.time < stop}
            else:
                times |= {time for time in range(start, stop) if time % SLOTS in slots}
        return times

    def _read_stored_times(self, start: int, stop: int) -> set[int]:
        """Return the times in [start, stop) that have a slot in the file.

        Times are divided by the precision, and must be within one turn of the wheel.
        """
        if self._file is None and not self.exists:
            return set()
        size = (stop - start) * SLOT_BYTES
        stored = self._open_file().pread(size, start % SLOTS * SLOT_BYTES)
        if not stored.rstrip(b"\0"):  # the common case: all slots are empty
            return set()
        return {time for time, *_ in SLOT.iter_unpack(stored) if start <= time < stop}

    @property
    def has_unsaved_slots(self) -> bool:
        """Whether a slot in memory has not been written to the file."""
        return bool(self._changed or self._writing)

    # --- Writing

    def take_changed_slots(self) -> Mapping[int, Slot]:
        """Take the changed slots, by their index in the file, so that `write` can write them.

        Later changes are kept apart, for the next call. If an earlier write has not been finished
        with `finish_write`, return the slots of that write again.
        """
        if not self._writing:
            self._writing = self._changed
            self._changed = {}
        return self._writing

    def write(self, slots: Mapping[int, Slot]) -> None:
        """Write slots and wait until they are on disk. Another thread may call this.

        Neighbouring slots are written with one system call. Raises OSError.
        """
        if not slots:
            return
        file = self._open_file()
        if file.size() < WHEEL_BYTES:
            file.truncate(WHEEL_BYTES)
            file.sync()
            self._files.sync_directory(self._path.rpartition("/")[0])
        for indices in _split_into_runs(sorted(slots)):
            encoded = b"".join([SLOT.pack(*slots[index]) for index in indices])
            file.pwrite(encoded, indices[0] * SLOT_BYTES)
        file.sync()

    def finish_write(self, *, is_written: bool) -> None:
        """Finish the write of the slots that `take_changed_slots` returned.

        With `is_written=False`, because the write failed, they count as changed again.
        """
        if not is_written:
            self._changed = self._writing | self._changed
        self._writing = {}


def _split_into_runs(numbers: list[int]) -> Iterator[list[int]]:
    """Yield the runs of consecutive numbers in an ascending list."""
    start = 0
    for stop in range(1, len(numbers) + 1):
        is_end_of_run = stop == len(numbers) or numbers[stop] != numbers[stop - 1] + 1
        if is_end_of_run:
            yield numbers[start:stop]
            start = stop


CHECKPOINT_BYTES: Final = 4096
_FIELDS: Final = struct.Struct(">7q")
_EXTENSION: Final = struct.Struct(">8s4qI16s")
_EXTENSION_MAGIC: Final = b"sluice3\0"
_CRC: Final = struct.Struct(">I")
_CRC_OFFSET: Final = _FIELDS.size + _EXTENSION.size
_INCARNATION_BYTES: Final = 16


class TimerCheckpoint(NamedTuple):
    """The fields of the checkpoint: the seven of RocketMQ, then those of SluiceMQ's extension.

    `read_ms` is the first slot that may contain undelivered messages. The module's docstring
    describes the other fields. `replay_offset` is NO_UNIT if the checkpoint does not prove what was
    delivered.
    """

    read_ms: int = 0
    log_end: int = 0
    queue_offset: int = 0
    master_queue_offset: int = 0
    state_version: int = 0
    time_ms: int = 0
    counter: int = 0
    done_ms: int = 0
    replay_offset: int = NO_UNIT
    log_position: int = 0
    record_position: int = NO_UNIT
    record_crc: int = 0
    incarnation: str = ""

    def encode(self) -> bytes:
        """Return the 56 bytes of RocketMQ's fields, as GET_TIMER_CHECK_POINT (60) returns them."""
        return _FIELDS.pack(*self[:7])

    def encode_extension(self) -> bytes:
        """Return SluiceMQ's extension and its CRC, as they follow `encode` in the file."""
        extension = _EXTENSION.pack(
            _EXTENSION_MAGIC,
            self.done_ms,
            self.replay_offset,
            self.log_position,
            self.record_position,
            self.record_crc,
            self.incarnation.encode()[:_INCARNATION_BYTES],
        )
        return extension + _CRC.pack(zlib.crc32(self.encode() + extension))

    def matches_log(self, log: RecordSource) -> bool:
        """Return whether the checkpoint says what was delivered of the messages in this log.

        That is so if it has a `replay_offset`, and the log contains the last record that it names,
        with the same CRC. A record that retention has removed counts as contained.
        """
        if self.replay_offset == NO_UNIT:
            return False
        if self.record_position == NO_UNIT or self.record_position < log.start:
            return True
        return log.record_crc(self.record_position) == self.record_crc

    def without_timer_files(self) -> "TimerCheckpoint":
        """Return the checkpoint of a store whose wheel and log must be rebuilt.

        With it every broker, also RocketMQ's, reads the whole timer queue.
        """
        return self._replace(log_end=0, queue_offset=0, master_queue_offset=0)


def read_timer_checkpoint(files: Files, path: str) -> TimerCheckpoint | None:
    """Read a checkpoint from a file; return None if there is no file or it contains only zeros.

    If the extension is missing or its CRC is wrong, the fields of the extension have their default
    values.
    """
    if not files.exists(path):
        return None
    with closing(files.open(path)) as file:
        content = file.pread(_CRC_OFFSET + _CRC.size, 0)
    if len(content) < _FIELDS.size or not any(content):
        return None
    fields = _FIELDS.unpack_from(content)
    if not _has_valid_extension(content):
        return TimerCheckpoint(*fields)
    _magic, *extension, encoded_incarnation = _EXTENSION.unpack_from(content, _FIELDS.size)
    incarnation = encoded_incarnation.rstrip(b"\0").decode("ascii", "replace")
    return TimerCheckpoint._make((*fields, *extension, incarnation))


def _has_valid_extension(content: bytes) -> bool:
    """Return whether the content of a checkpoint file has the full length and the right CRC."""
    if len(content) != _CRC_OFFSET + _CRC.size:
        return False
    (crc,) = _CRC.unpack_from(content, _CRC_OFFSET)
    return bool(crc == zlib.crc32(content[:_CRC_OFFSET]))


def write_timer_checkpoint(files: Files, path: str, checkpoint: TimerCheckpoint) -> None:
    """Write a checkpoint to a file, and sync it. Raises OSError.

    The extension is written only if `replay_offset` is not NO_UNIT, that is, if the checkpoint says
    what was delivered. Otherwise the old bytes of the extension stay; their CRC is then wrong.
    """
    directory = path.rpartition("/")[0]
    files.make_directory(directory)
    with closing(files.open(path, create=True)) as file:
        is_new = file.size() < CHECKPOINT_BYTES
        if is_new:
            file.truncate(CHECKPOINT_BYTES)
        content = checkpoint.encode()
        proves_delivery = checkpoint.replay_offset != NO_UNIT
        if proves_delivery:
            content += checkpoint.encode_extension()
        file.pwrite(content, 0)
        file.sync()
    if is_new:
        files.sync_directory(directory)
