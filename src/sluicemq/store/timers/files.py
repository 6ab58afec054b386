"""The timer log: one unit for each timed message, chained within its second (spec/delivery.md §2).

A unit has 52 bytes, big-endian, in files of `mappedFileSizeTimerLog` bytes below `timerlog/`:

    | 52: 4 | previous unit of the same second 8 | magic 4 | written at 8 | due after 4 |
    | physical offset of the message 8 | its size 4 | hash of its real topic 4 | 0: 8 |

`previous` is the unit's position in the log, -1 for the first of a second; the last unit of a
second stands in the wheel (the wheel). Where a file has no room for a unit and 16 bytes more, a
blank closes it: the room left, a long 0, the magic of the commit log's blank record.

Both are derived data: what they say follows from the queue of `rmq_sys_wheel_timer`. Units are
collected in memory and written by `write`; another thread may `sync` what is written.

The timer wheel: for each second of two weeks, the chain of messages that are due in it.

One file of 38,707,200 bytes, 1,209,600 slots of 32 (spec/delivery.md §2), big-endian:

    | time 8 | first unit 8 | last unit 8 | messages 4 | magic 4 |

A slot belongs to one second in each turn of the wheel: it counts only when its time is the one that
is asked for. `time` is in units of the precision (seconds); units are positions in the timer log.

The file is sparse, and nothing of it is kept in memory but the slots that changed since they were
written: reads are single `pread`s, and holes are passed over. `take` hands the changed slots over
to `write`, which another thread may call; until `settle` they are read from memory.

`config/timercheck`: how far the timer has come (spec/store.md §11).

A file of 4096 bytes of which RocketMQ uses 56: seven big-endian longs. The wheel and the timer log
agree up to `log_end`; all messages of the timer's queue below `queue_offset` are in them;
everything due before `read_ms` is delivered. Written in place: one sector arrives whole or not at
all.

Behind them stands what only we have, with a CRC over everything:

    done_ms         up to here the second of `read_ms` is delivered
    replay_offset   wheel and log can be built again exactly: of the messages of the queue below it
                    those before `read_ms` are delivered. Those behind it may have come too late for
                    their own second
    log_position    the end of the commit log then: what was delivered since lies behind it
    record          position and CRC-32 of the last record of the queue that was taken in: the
                    checkpoint belongs to a commit log that holds it
    incarnation     of the store whose wheel and timer log `log_end` and `queue_offset` speak of. A
                    slave has its master's checkpoint, and the wheel of nobody

When RocketMQ has written since, the CRC is wrong. A checkpoint without all this (RocketMQ's, or of
a version before) does not prove that anything is delivered.
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
from sluicemq.store.segments import SegmentFiles

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

CHECKED_BYTES: Final = 64 << 20
"""So much of the end of the log a start reads, to compare its checksum."""
_PIECE_BYTES: Final = 1 << 20
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
        self._dense_end = 0
        """Up to here the files have no holes, so a map of them can be read on a full tmpfs."""
        self.end = 0
        """Where the next unit goes, as far as one fits there."""

    # --- the files

    def load(self, end: int, *, removes: bool = True) -> None:
        """Find the files; units are appended from `end` on. `removes=False` changes nothing on
        disk, for tools. Raises StoreDamagedError."""
        self._segments.load(is_derived=True, removes=removes)
        if not len(self._segments):
            end = 0
        self._dense_end = self._segments.start
        for segment in self._segments:
            self._dense_end = segment.base + segment.file().data_end(0)
            if self._dense_end < segment.end:
                break
        self.set_end(min(max(end, self._segments.start), self._segments.end))

    def set_end(self, end: int) -> None:
        """What lies behind is forgotten."""
        self._tail.clear()
        self._tail_start = self.end = end

    def cut(self, end: int) -> None:
        """The log ends here: what the files hold behind it is wiped, durably. Raises OSError."""
        if self._segments.truncate(end):
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
        if position + UNIT_BYTES > self._dense_end:
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
        """Add a unit; returns its position. Nothing is written yet. HOT.

        `delay_ms` has 32 bits in the file. One that has more room moves `write_ms` instead: their
        sum, which says to which second the unit belongs, is what counts.
        """
        fitting_ms = min(max(delay_ms, -(1 << 31)), (1 << 31) - 1)
        if fitting_ms != delay_ms:
            write_ms, delay_ms = write_ms + delay_ms - fitting_ms, fitting_ms
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
            segment = self._segments.at(start + done)
            if segment is None:
                if not self._files.exists(self._segments.directory):
                    self._files.make_directory(self._segments.directory)
                self._is_name_new = True
                position = start + done
                segment = self._segments.add(position - position % self._file_bytes)
            piece = bytes(tail[done : done + segment.end - start - done])
            segment.write(piece, start + done)
            done += len(piece)
        if self._dense_end >= start:
            self._dense_end = max(self._dense_end, start + done)
        tail.clear()
        self._tail_start = start + done

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
        room, _, magic = _BLANK.unpack(segment.read(position, _BLANK.size))
        return bool(magic == MAGIC_BLANK and room == segment.end - position)

    @property
    def bases(self) -> list[int]:
        """The positions at which the files begin."""
        return [segment.base for segment in self._segments]

    def read(self, position: int, size: int) -> bytes:
        """Read bytes of one file with `pread`; fewer where the file ends."""
        segment = self._segments.at(position)
        return b"" if segment is None else segment.read(position, min(size, segment.end - position))

    def checksum(self, end: int) -> int:
        """Return a CRC-32 of the files' bytes before `end`, of the last `CHECKED_BYTES` at most:
        what lies before is checked when its second is loaded."""
        crc, position = 0, max(end - CHECKED_BYTES, self.start)
        while position < end and (data := self.read(position, min(_PIECE_BYTES, end - position))):
            crc = zlib.crc32(data, zlib.crc32(position.to_bytes(8), crc))
            position += len(data)
        return crc

    @property
    def units_a_file(self) -> int:
        """How many units a full file holds."""
        return (self._file_bytes - UNIT_BYTES - _BLANK.size) // UNIT_BYTES + 1

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
            self._files.remove(self._segments.detach_first())
            removed += 1
        return removed

    def close(self) -> None:
        self._segments.close()


SLOT: Final = struct.Struct(">qqqii")
SLOT_BYTES: Final = 32
SLOTS: Final = 2 * 7 * 86_400
WHEEL_BYTES: Final = SLOTS * SLOT_BYTES
_CHUNK_SLOTS: Final = 2048


class Slot(NamedTuple):
    """One second: first and last unit of its chain, and how many messages it holds."""

    time: int
    first: int
    last: int
    messages: int
    magic: int = 0


class TimerWheel:
    """The slots. Times are milliseconds, cut down to the precision."""

    def __init__(self, files: Files, path: str, precision_ms: int = 1000) -> None:
        self._files = files
        self._path = path
        self.precision_ms = precision_ms
        self._file: File | None = None
        self._changed: dict[int, Slot] = {}
        self._writing: dict[int, Slot] = {}

    # --- the file

    @property
    def exists(self) -> bool:
        """Is the file there?"""
        return self._files.exists(self._path)

    def check(self, *, removes: bool = True) -> None:
        """Raises StoreDamagedError when the file is there and has another size. An empty one, the
        trace of a crash at its creation, is none, and removed unless `removes` says no."""
        if not self.exists:
            return
        size = self._open().size()
        if size == 0:
            if removes:
                self.remove()
        elif size != WHEEL_BYTES:
            raise StoreDamagedError(
                f"{self._path} has {size} bytes instead of {WHEEL_BYTES}.",
                fix="Bring it back from a copy, or remove timerwheel and timerlog: they are built"
                " again from the commit log.",
            )

    def _open(self) -> File:
        file = self._file
        if file is None:
            file = self._file = self._files.open(self._path, create=True)
        return file

    def checksum(self) -> int:
        """Return a CRC-32 of the file, as `identity.content_checksum`; 0 without a file."""
        return content_checksum(self._open()) if self.exists else 0

    def remove(self) -> None:
        """All slots are empty again."""
        self.close()
        self._changed.clear()
        self._writing.clear()
        if self.exists:
            self._files.remove(self._path)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    # --- slots

    def get(self, time_ms: int) -> Slot | None:
        """The slot of a second; None when nothing is in it. HOT."""
        time = time_ms // self.precision_ms
        index = time % SLOTS
        slot = self._changed.get(index) or self._writing.get(index)
        if slot is None:
            if self._file is None and not self.exists:
                return None
            data = self._open().pread(SLOT_BYTES, index * SLOT_BYTES)
            if len(data) < SLOT_BYTES:
                return None
            slot = Slot._make(SLOT.unpack(data))
        return slot if slot.time == time and slot.last != NONE else None

    def put(self, time_ms: int, first: int, last: int, messages: int) -> None:
        """What a second holds from now on."""
        time = time_ms // self.precision_ms
        self._changed[time % SLOTS] = Slot(time, first, last, messages)

    def occupied(self, start_ms: int, end_ms: int) -> Iterator[int]:
        """The seconds in [start, end), in ms, that hold something, in order.

        Slots that change meanwhile may be missed or come again.
        """
        step = self.precision_ms
        first = start_ms // step
        last = min(-(-end_ms // step), first + SLOTS)
        while first < last:
            turn_end = first - first % SLOTS + SLOTS
            stop = min(last, first + _CHUNK_SLOTS - first % SLOTS % _CHUNK_SLOTS, turn_end)
            times: set[int] = set()
            for slots in (self._changed, self._writing):
                if len(slots) < stop - first:
                    times |= {slot.time for slot in slots.values() if first <= slot.time < stop}
                else:
                    times |= {time for time in range(first, stop) if time % SLOTS in slots}
            if self._file is not None or self.exists:
                size, begin = (stop - first) * SLOT_BYTES, first % SLOTS * SLOT_BYTES
                data = self._open().pread(size, begin)
                if data.rstrip(b"\0"):
                    times |= {time for time, *_ in SLOT.iter_unpack(data) if first <= time < stop}
            for time in sorted(times):
                if self.get(time * step) is not None:
                    yield time * step
            first = stop

    @property
    def has_memory(self) -> bool:
        """Does a slot differ from the file?"""
        return bool(self._changed or self._writing)

    # --- writing

    def take(self) -> Mapping[int, Slot]:
        """The changed slots, for `write`; nothing while some are being written."""
        if not self._writing:
            self._writing, self._changed = self._changed, {}
        return self._writing

    def write(self, slots: Mapping[int, Slot]) -> None:
        """Write slots, neighbours in one piece, and wait until they are on disk. Raises OSError.

        Another thread may do this.
        """
        if not slots:
            return
        file = self._open()
        if file.size() < WHEEL_BYTES:
            file.truncate(WHEEL_BYTES)
            file.sync()
            self._files.sync_directory(self._path.rpartition("/")[0])
        pack = SLOT.pack
        indices = sorted(slots)
        start = 0
        for at in range(1, len(indices) + 1):
            if at == len(indices) or indices[at] != indices[at - 1] + 1:
                run = indices[start:at]
                file.pwrite(b"".join([pack(*slots[i]) for i in run]), run[0] * SLOT_BYTES)
                start = at
        file.sync()

    def settle(self, *, is_written: bool) -> None:
        """The slots that `take` gave are on disk, or still have to be written."""
        if not is_written:
            self._changed = self._writing | self._changed
        self._writing = {}


CHECKPOINT_BYTES: Final = 4096
_FIELDS: Final = struct.Struct(">7q")
_OWN: Final = struct.Struct(">8s4qI16s")
_OWN_MAGIC: Final = b"sluice3\0"
_CRC: Final = struct.Struct(">I")
_CRC_AT: Final = _FIELDS.size + _OWN.size
_INCARNATION_BYTES: Final = 16


class TimerCheckpoint(NamedTuple):
    """The seven numbers. `read_ms` is the first second that may hold undelivered messages."""

    read_ms: int = 0
    log_end: int = 0
    queue_offset: int = 0
    master_queue_offset: int = 0
    state_version: int = 0
    time_ms: int = 0
    counter: int = 0
    done_ms: int = 0
    replay_offset: int = NONE
    """NONE: nothing proves what is delivered."""
    log_position: int = 0
    record_position: int = NONE
    record_crc: int = 0
    incarnation: str = ""

    def encode(self) -> bytes:
        """RocketMQ's 56 bytes, as request 60 answers them too."""
        return _FIELDS.pack(*self[:7])

    def encode_own(self) -> bytes:
        """What stands behind them."""
        own = _OWN.pack(
            _OWN_MAGIC,
            self.done_ms,
            self.replay_offset,
            self.log_position,
            self.record_position,
            self.record_crc,
            self.incarnation.encode()[:_INCARNATION_BYTES],
        )
        return own + _CRC.pack(zlib.crc32(self.encode() + own))

    def is_of(self, log: RecordSource) -> bool:
        """Return whether the checkpoint says what is delivered of the messages in this log.

        A record that retention has removed cannot be compared, and does not count against it.
        """
        if self.replay_offset == NONE:
            return False
        if self.record_position == NONE or self.record_position < log.start:
            return True
        return log.record_crc(self.record_position) == self.record_crc

    def without_files(self) -> "TimerCheckpoint":
        """Return the checkpoint of a store whose wheel and log have to be built: every broker,
        RocketMQ's too, takes in the whole queue."""
        return self._replace(log_end=0, queue_offset=0, master_queue_offset=0)


def read_timer_checkpoint(files: Files, path: str) -> TimerCheckpoint | None:
    """Read a checkpoint; None when there is none, or nothing in it."""
    if not files.exists(path):
        return None
    with closing(files.open(path)) as file:
        data = file.pread(_CRC_AT + _CRC.size, 0)
    if len(data) < _FIELDS.size or not any(data):
        return None
    fields = _FIELDS.unpack_from(data)
    is_ours = len(data) == _CRC_AT + _CRC.size and _CRC.unpack_from(data, _CRC_AT) == (
        zlib.crc32(data[:_CRC_AT]),
    )
    if not is_ours:
        return TimerCheckpoint(*fields)
    _, *own, name = _OWN.unpack_from(data, _FIELDS.size)
    return TimerCheckpoint._make((*fields, *own, name.rstrip(b"\0").decode("ascii", "replace")))


def write_timer_checkpoint(files: Files, path: str, checkpoint: TimerCheckpoint) -> None:
    """Write a checkpoint, durably. One that proves nothing leaves what stands behind RocketMQ's
    bytes as it is. Raises OSError."""
    directory = path.rpartition("/")[0]
    files.make_directory(directory)
    with closing(files.open(path, create=True)) as file:
        is_new = file.size() < CHECKPOINT_BYTES
        if is_new:
            file.truncate(CHECKPOINT_BYTES)
        own = checkpoint.encode_own() if checkpoint.replay_offset != NONE else b""
        file.pwrite(checkpoint.encode() + own, 0)
        file.sync()
    if is_new:
        files.sync_directory(directory)
