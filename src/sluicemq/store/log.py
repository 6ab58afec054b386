"""The commit log: every record of every topic, one after the other, in files of a fixed size.

Written once a turn, one pwrite per file touched; a file that has no room for the next record and
8 bytes more is closed by a blank record (spec/store.md §2.2). Three positions, left to right:

    synced_offset <= written_offset        (and the writer's own, which the log does not know)
    on disk          in the kernel

Behind a master (`follow`) the bytes may end within a record: `records_end` is how far queues, index
and marks are then; with a writer it is `written_offset`.

`sync` may run in another thread than everything else. It covers what was written when it began
(a group commit), in file order, and touches nothing that the writing thread changes: it reads
`written_offset` once and writes `synced_offset`.

A failed write is wiped: what may have reached the file is overwritten with zeros and synced, or a
later recovery would find records that were never acknowledged. Three kinds of errors:

    passing   no descriptor or no memory: the turn is refused, the next one may succeed; a sync, and
              a wipe, is made up for before the next write
    full      the turn is refused, and so is every other one until there is room
    final     a failed sync, or a failed wipe: the kernel may have thrown the pages away, so the log
              takes no more writes, and what was not synced may come back after a restart or not

Reading it at a start, a record counts only when everything agrees (`read_scanned`): magic, its size
with its parts, its stored physical offset with its position (so that stale bytes of an earlier life
of the file never come back), and the body with its CRC (spec/store.md §7). The CRC covers
the body alone, and a torn write leaves zeros behind what arrived. A record can therefore look whole
while its topic or properties are lost: neither may hold such zeros (`is_torn`; the writer refuses
properties that would look so). With `forceVerifyPropCRC` a record also needs the checksum of its
whole, see `record.checksum`.
"""

import re
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from sluicemq.config.settings import DEFAULT_LEVELS, parse_delay_levels
from sluicemq.errors import (
    ProtocolError,
    StoreError,
    StoreFullError,
    StoreTransientError,
    StoreUncertainError,
)
from sluicemq.files import FULL_ERRORS, TRANSIENT_ERRORS, Files, fix_of
from sluicemq.model import properties as reserved
from sluicemq.model.ids import tag_code
from sluicemq.model.message import DELAY, TAGS, UNQUEUED
from sluicemq.model.system_names import SCHEDULE_TOPIC
from sluicemq.model.topic import LMQ_PREFIX
from sluicemq.numbers import natural
from sluicemq.record.codec import (
    body_crc_agrees,
    decode_properties,
    is_sealed,
    parse_head,
    tag_code_of,
)
from sluicemq.record.layout import (
    BLANK,
    CRC_MASK,
    HOST_BITS,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    MAGICS,
    RECORD_BYTES_MIN,
    RECORD_HEAD,
)
from sluicemq.store.segments import Segment, SegmentFiles

SIZE_KEY: Final = "mappedFileSizeCommitLog"
BLANK_BYTES: Final = 8
MULTI_DISPATCH: Final = reserved.MULTI_DISPATCH
MULTI_OFFSETS: Final = reserved.MULTI_OFFSETS
DELAYS_MS: Final = parse_delay_levels(DEFAULT_LEVELS)
"""What a delayed message of level 1, 2, … waits for where messageDelayLevel is not known."""
ZEROS_NEVER_STORED: Final = bytes(16)
"""Properties hold no run of zeros as long as this, and do not end with a zero."""
LOST_NAME: Final = "SLUICE_LOST"
LOST_CODE: Final = int.from_bytes(b"LOST") << 32
"""The tag code of a place holder (`tools.repair`): our readers pass over it. Its lower half, all
that RocketMQ compares, is that of a message without a tag."""
LOST_MARK: Final = int.from_bytes(b"SLUICELO")
"""What a place holder has for the offset of its prepared message, which no ordinary one has."""
_SCHEDULE_TOPIC: Final = SCHEDULE_TOPIC.encode()
_MULTI_START: Final = MULTI_DISPATCH.encode() + b"\x01"
_unpack_head: Final = RECORD_HEAD.struct.unpack_from
_unpack_begin: Final = BLANK.struct.unpack_from
_SHORT: Final = struct.Struct(">h")
SEARCH_BYTES_MAX: Final = 64 << 20
"""How far behind a bad place the next good record is looked for, for a report."""
RECORD_BYTES_MAX: Final = 1 << 29
_CHUNK_BYTES: Final = 1 << 20
_MAGIC_START: Final = BLANK.struct.pack(0, MAGIC_V1)[4:7]
_MAGIC_BLANK: Final = BLANK.struct.pack(0, MAGIC_BLANK)[4:]
_POSITION_AT: Final = RECORD_HEAD.at("physical_offset")
_SIZE_BYTES: Final = 4
_MAGICS: Final = [re.compile(re.escape(magic)) for magic in (_MAGIC_START, _MAGIC_BLANK)]
"""Where the magic number of a record or blank record may stand."""


class CommitLog:
    """The files and how far they are written and synced. See the module for threads and errors.

    `requires_checksum`: a record counts only with its checksum property. `refusal`: why nothing may
    be appended for the time being, since the disk is too full (`retain`). `failure` is final.
    """

    def __init__(
        self, files: Files, directory: str, file_bytes: int, *, requires_checksum: bool = False
    ) -> None:
        self.segments = SegmentFiles(files, directory, file_bytes, SIZE_KEY, cuts_in_order=True)
        self.requires_checksum = requires_checksum
        self.written_offset = 0
        self.synced_offset = 0
        self.followed_end: int | None = None
        """`records_end` when a master writes the log."""
        self.failure: OSError | None = None
        self.refusal: StoreFullError | None = None
        self._sync_lock = threading.Lock()
        self._unwiped: list[tuple[int, int]] = []  # (position, size) of what a write has begun

    @property
    def start(self) -> int:
        """The first position that is still there."""
        return self.segments.start

    @property
    def records_end(self) -> int:
        """Behind the last record that is in its queue."""
        return self.written_offset if self.followed_end is None else self.followed_end

    def set_end(self, offset: int) -> None:
        """What recovery found: everything before is on disk, appending goes on from there."""
        self.written_offset = self.synced_offset = offset

    def cut(self, end: int) -> None:
        """Forget what lies behind `end`, durably. Raises StoreError, as a failed sync does."""
        with self._sync_lock:
            self.check()
            segments = self.segments
            try:
                if segments.cut(end):
                    if segments.last is not None:
                        segments.last.file().sync()
                    segments.files.sync_directory(segments.directory)
            except OSError as error:
                self.fail(error)
            self.written_offset, self.synced_offset = end, min(self.synced_offset, end)

    def check(self) -> None:
        """Raises StoreError when the log takes no more writes."""
        if self.failure is not None:
            raise StoreError(
                f"The commit log in {self.segments.directory} refuses writes: {self.failure}.",
                fix="Check the disk, then start the broker again: it recovers what is safe.",
            )

    def fail(self, error: OSError) -> None:
        """The log takes no more writes from now on. Raises StoreError."""
        self.failure = error
        self.check()

    def check_room(self) -> None:
        """Raises StoreError or StoreFullError when nothing may be appended."""
        self.check()
        if self.refusal is not None:
            raise StoreFullError(self.refusal.fact + ".", fix=self.refusal.fix)

    # --- writing

    def write(self, pieces: Sequence[tuple[int, bytes | memoryview]], end: int) -> None:
        """Write (position, bytes) pieces, each within one file, and let the log end at `end`.

        Raises StoreFullError or StoreError; then nothing was written, as far as anyone can tell,
        but with StoreUncertainError: then it may come back after a restart.
        """
        begun = self._unwiped
        if self.failure is not None:
            self.check()
        try:
            if begun:
                self._wipe()
            for position, data in pieces:
                segment = self.segments.at(position) or self.add_file(position)
                file = segment.file()  # without a descriptor nothing has begun
                begun.append((position, len(data)))
                file.pwrite(data, position - segment.base)
                segment.grown(position + len(data))
        except OSError as error:
            try:
                self._wipe()
            except (OSError, StoreError):
                raise StoreUncertainError(
                    f"Writing the commit log in {self.segments.directory} failed half-way: {error}."
                    " The message may come back when the broker is started again.",
                    fix=fix_of(error),
                ) from error
            raise self._write_error(error) from error
        begun.clear()
        self.written_offset = end

    def add_file(self, position: int) -> Segment:
        """Create the file that holds `position`; its name and size are durable on return."""
        segments = self.segments
        if not segments.files.exists(segments.directory):
            segments.files.make_directory(segments.directory)
        segment = segments.add(position - position % segments.file_bytes)
        try:
            segment.file().sync()
            segments.files.sync_directory(segments.directory)
        except OSError:
            segments.drop_last()  # nothing may be written where no later sync saves the name
            raise
        return segment

    def prepare_next(self) -> None:
        """Create the next file ahead of need when the last one is three quarters full."""
        last = self.segments.last
        if last is not None and self.written_offset > last.end - last.size // 4:
            self.add_file(last.end)

    def _wipe(self) -> None:
        """Zero what failed writes have begun. Raises OSError, StoreError when that is final."""
        while self._unwiped:
            position, size = self._unwiped[-1]
            segment = self.segments.at(position)
            try:
                if segment is not None and segment.zero_from(position, position + size):
                    self._sync_segment(segment)
            except OSError as error:
                if error.errno not in TRANSIENT_ERRORS | FULL_ERRORS:
                    self.failure = error
                raise
            self._unwiped.pop()

    def _write_error(self, error: OSError) -> StoreError:
        directory = self.segments.directory
        if error.errno in TRANSIENT_ERRORS:
            return StoreTransientError(
                f"The commit log in {directory} cannot be written for the moment: {error}.",
                fix=fix_of(error),
            )
        if error.errno not in FULL_ERRORS:
            return StoreError(
                f"Writing the commit log in {directory} failed: {error}.", fix=fix_of(error)
            )
        total, free = self.segments.files.usage(directory)
        return StoreFullError(
            f"There is no room for the commit log in {directory}: {total - free} of {total} bytes"
            f" are used, {free} are free.",
            fix="Make room; sending works again at once.",
        )

    def sync(self) -> int:
        """Make durable what was written when this began; returns the end of that.

        Any thread. Raises StoreError when it fails, now and from then on, and StoreTransientError
        when it may be tried again.
        """
        with self._sync_lock:
            self.check()
            target = self.written_offset
            position = self.synced_offset
            while position < target:
                segment = self.segments.at(position)
                if segment is None:  # the position is a file's end, the next file begins there
                    break
                self._sync_segment(segment)
                position = segment.end
                if position <= target:  # full: nobody writes it any more
                    segment.release()
            self.synced_offset = target
            return target

    def _sync_segment(self, segment: Segment) -> None:
        is_open = False
        try:
            file = segment.file()
            is_open = True
            file.sync()
        except OSError as error:
            if not is_open and error.errno in TRANSIENT_ERRORS:
                raise self._write_error(error) from error
            self.fail(error)

    def close(self) -> None:
        self.segments.close()

    # --- reading

    def record(self, position: int, size: int) -> memoryview | None:
        """The bytes [position, + size) without copying; None when no file holds them all."""
        segment = self.segments.at(position)
        if segment is None or position + size > segment.end:
            return None
        begin = position - segment.base
        return segment.view()[begin : begin + size]

    def look(self, position: int) -> tuple[memoryview, int]:
        """Return a view and the index in it of the record that begins at `position`.

        The view reaches to the record's end if the bytes there begin like a record of this
        position, else it holds at least `RECORD_BYTES_MIN` bytes; it is shorter, or empty, where
        the files end. Holes are not touched: see `Segment.look`.
        """
        segment = self.segments.at(position)
        if segment is None:
            return memoryview(b""), 0
        view, at = segment.look(position, RECORD_BYTES_MIN)
        if len(view) - at < RECORD_BYTES_MIN:
            return view, at
        head = view[at : at + RECORD_BYTES_MIN]
        size = record_size(head, 0)
        is_plausible = RECORD_BYTES_MIN <= size <= min(segment.end - position, RECORD_BYTES_MAX)
        if len(view) - at >= size or not is_plausible:
            return view, at
        is_there = head[_POSITION_AT : _POSITION_AT + 8] == position.to_bytes(8)
        return segment.look(position, size) if is_there else (view, at)

    def scanned_at(self, position: int, *, check_crc: bool = True) -> "Scanned | None":
        """Return the record that begins there; None when none does that is wholly good."""
        view, at = self.look(position)
        return read_scanned(view, at, position - at, check_crc=check_crc)

    def counted_at(self, position: int, *, check_crc: bool = True) -> "Scanned | None":
        """Return what `scanned_at` returns if it counts: with its checksum where the log requires
        one."""
        view, at = self.look(position)
        scanned = read_scanned(view, at, position - at, check_crc=check_crc)
        if scanned is None or not (check_crc and self.requires_checksum):
            return scanned
        return scanned if is_sealed(view[at : at + scanned.size_bytes]) else None

    def is_blank_at(self, segment: Segment, position: int) -> bool:
        """Return whether a blank record at `position` of `segment` says that the rest of the file
        holds nothing."""
        view, at = segment.look(position, BLANK_BYTES)
        if len(view) - at < BLANK_BYTES:
            return False
        size, magic = _unpack_begin(view, at)
        return bool(magic == MAGIC_BLANK and size == segment.end - position)

    def skip_blank(self, position: int) -> int:
        """Return where the log goes on: behind a blank record, if there is one."""
        segment = self.segments.at(position)
        if segment is None or segment.end - position < BLANK_BYTES:
            return position
        return segment.end if self.is_blank_at(segment, position) else position

    def explain(self, position: int) -> str:
        """Return why no record counts at `position`, as a phrase."""
        segment = self.segments.at(position)
        if segment is None:
            return f"no file of the log holds byte {position}"
        view, at = self.look(position)
        return explain(view, at, position - at, segment.end - position)

    def scan(
        self, start: int, stop: int | None = None, *, check_crc: bool = True
    ) -> "Iterator[Scanned]":
        """Yield every good record from `start` on that begins before `stop`, up to the first place
        where there is none."""
        position = start
        while (segment := self.segments.at(position)) is not None:
            limit = segment.end if stop is None else min(stop, segment.end)
            while limit - position >= BLANK_BYTES and not self.is_blank_at(segment, position):
                scanned = self.counted_at(position, check_crc=check_crc)
                if scanned is None:
                    return
                yield scanned
                position = scanned.end
            if limit < segment.end:
                return
            position = segment.end


class Scanned(NamedTuple):
    """A record that stands where it says. `topic` and `properties` are the encoded bytes."""

    position: int
    size_bytes: int
    queue_id: int
    queue_offset: int
    sys_flag: int
    store_time_ms: int
    topic: bytes
    properties: bytes
    prepared_offset: int = 0

    @property
    def end(self) -> int:
        return self.position + self.size_bytes

    @property
    def is_queued(self) -> bool:
        """Prepared and rolled-back messages stand in no queue (spec/store.md §3)."""
        return not self.sys_flag & UNQUEUED

    @property
    def is_lost(self) -> bool:
        """Only the place holder of a message that a repair could not save (`tools.repair`)."""
        return self.prepared_offset == LOST_MARK

    def tag_code(self, delays_ms: Sequence[int] = DELAYS_MS) -> int:
        """What its queue's unit says: the hash of the tag, or a delayed message's time (ms).

        `delays_ms` are the delays of level 1, 2, … (messageDelayLevel).
        """
        encoded = self.properties
        if self.is_lost:
            return LOST_CODE
        if self.topic == _SCHEDULE_TOPIC:
            properties = decode_properties(encoded)
            if level := natural(properties.get(DELAY, "")):
                return self.store_time_ms + delays_ms[min(level, len(delays_ms)) - 1]
            return tag_code(properties.get(TAGS, ""))
        return tag_code_of(encoded)

    def stands_in(self, key: tuple[str, int], offset: int | None = None) -> bool:
        """Whether a queue holds it, at this offset; None: at any."""
        own = (self.topic.decode(errors="replace"), self.queue_id)
        places = [(own, self.queue_offset), *self.other_queues()]
        return any(found == key and offset in (None, at) for found, at in places)

    def other_queues(self) -> list[tuple[tuple[str, int], int]]:
        """Further queues that the record stands in, with its offset there (spec/store.md
        §3.1)."""
        if _MULTI_START not in self.properties:
            return []
        properties = decode_properties(self.properties)
        names = properties.get(MULTI_DISPATCH, "").split(",")
        offsets = properties.get(MULTI_OFFSETS, "").split(",")
        return [
            ((name, 0 if name.startswith(LMQ_PREFIX) else self.queue_id), int(offset))
            for name, offset in zip(names, offsets, strict=False)
            if name and "/" not in name and offset.isdecimal()
        ]


def record_size(view: memoryview, at: int) -> int:
    """What the record at `at` says that it is long."""
    size: int = _unpack_begin(view, at)[0]
    return size


def is_torn(topic: bytes, properties: bytes) -> bool:
    """Whether a lost end (of any length) or a lost sector shows in them."""
    return (
        b"\0" in topic or not topic or properties[-1:] == b"\0" or ZEROS_NEVER_STORED in properties
    )


def read_scanned(view: memoryview, at: int, base: int, *, check_crc: bool) -> Scanned | None:
    """The record at `at` of a file that begins at `base`; None when it is not wholly good.

    The common record (V1, IPv4) is read with one `struct` call, any other with the record codec.
    """
    if len(view) - at < RECORD_BYTES_MIN:
        return None
    (
        size, magic, crc, queue_id, _, offset, position, flag, _, _, time, _, _, prepared,
        body_bytes,
    ) = _unpack_head(view, at)  # fmt: skip
    if magic not in MAGICS or position != base + at:
        return None
    if magic != MAGIC_V1 or flag & HOST_BITS:
        try:
            head = parse_head(view, at)
        except ProtocolError:
            return None
        time, prepared = head.store_time_ms, head.prepared_offset
        topic, properties = bytes(view[head.topic]), bytes(view[head.properties])
        is_whole = not check_crc or body_crc_agrees(view, head)
    else:
        body = at + RECORD_HEAD.size
        name = body + body_bytes + 1
        if body_bytes < 0 or name + 2 > len(view):
            return None
        begin = name + view[name - 1] + 2
        if begin > len(view):
            return None
        end = begin + _SHORT.unpack_from(view, begin - 2)[0]
        if end != at + size or end < begin or end > len(view):
            return None
        topic, properties = bytes(view[name : begin - 2]), bytes(view[begin:end])
        is_whole = not check_crc or zlib.crc32(view[body : name - 1]) & CRC_MASK == crc
    if not time or not is_whole or (check_crc and is_torn(topic, properties)):
        return None
    return Scanned(position, size, queue_id, offset, flag, time, topic, properties, prepared)


# --- behind bad places


def next_record(log: CommitLog, position: int) -> Scanned | None:
    """Return the first whole record behind a bad place, as far as a report looks."""
    segment = log.segments.at(position)
    if segment is None:
        return None
    found = None
    stop = min(segment.end, position + SEARCH_BYTES_MAX)
    place = next_good(segment, position + 1, stop, segment.end, takes_blank=False)
    if place is not None:
        found = log.scanned_at(place)
    while found is None and (segment := log.segments.at(segment.end)) is not None:
        found = log.scanned_at(segment.base)
    return found


def records_from(log: CommitLog, start: int) -> Iterator[Scanned]:
    """Every whole record from `start` on, over bad places, as far as a report looks."""
    end = start
    while True:
        for record in log.scan(end):
            yield record
            end = record.end
        found = next_record(log, end)
        if found is None:
            return
        end = found.position


class LogBytes(Protocol):
    """Bytes of a log, by their positions."""

    def read(self, position: int, size: int, /) -> bytes:
        """Fewer where a file ends."""

    def data_start(self, position: int, /) -> int | None:
        """The first position in the same file, from this one on, that may hold other bytes than
        zeros; None when there is none."""


def next_good(
    log: LogBytes, start: int, stop: int, file_end: int, *, takes_blank: bool = True
) -> int | None:
    """Where the next good record begins, from `start` on and before `stop` of a file that ends at
    `file_end`; or (`takes_blank`) the blank record that ends the file. None without one.

    THE answer for recovery, verify and repair: what `read_scanned` takes counts. Read without the
    map: a hole that is read through it may need room on the disk (SIGBUS).
    """
    found = log.data_start(start)
    while found is not None and found < stop:
        place = max(start, found - _SIZE_BYTES)  # a size begins with zeros
        data = log.read(place, min(_CHUNK_BYTES, file_end - place))
        for at in sorted(m.start() for magic in _MAGICS for m in magic.finditer(data, _SIZE_BYTES)):
            position = place + at - _SIZE_BYTES
            room = file_end - position
            head = data[at - _SIZE_BYTES : at + RECORD_BYTES_MIN]
            size = int.from_bytes(head[:_SIZE_BYTES], signed=True)
            if head[_SIZE_BYTES:].startswith(_MAGIC_BLANK):
                if takes_blank and size == room:
                    return position
            elif (  # its position is looked at first: hardly any other bytes have it
                head[_POSITION_AT:][:8] == position.to_bytes(8)
                and RECORD_BYTES_MIN <= size <= min(room, RECORD_BYTES_MAX)
                and read_scanned(memoryview(log.read(position, size)), 0, position, check_crc=True)
            ):
                return position
        start = place + len(data) - RECORD_BYTES_MIN
        if len(data) < _CHUNK_BYTES or start >= stop:
            return None
        found = log.data_start(start)
    return None


def explain(view: memoryview, at: int, base: int, room: int) -> str:
    """Return why no record counts at index `at` of a view that begins at `base` of the log.

    `room` is the number of bytes from there to the end of the file.
    """
    if min(room, len(view) - at) < BLANK_BYTES:
        return f"only {room} bytes are left in the file"
    size, magic = BLANK.struct.unpack_from(view, at)
    head, fault = None, ""
    try:
        head = parse_head(view, at)
    except ProtocolError as error:
        fault = str(error).rstrip(".")
    if not any(view[at : at + RECORD_BYTES_MIN]):
        fault = "there are zeros instead of a record"
    elif magic == MAGIC_BLANK:
        fault = f"the blank record says that {size} bytes are left in the file: {room} are"
    elif magic not in MAGICS:
        fault = (
            f"the magic number is {magic & 0xFFFFFFFF:#010x}, that of a record is"
            f" {MAGIC_V1 & 0xFFFFFFFF:#010x} or {MAGIC_V2 & 0xFFFFFFFF:#010x}"
        )
    elif head is None:
        pass
    elif head.physical_offset != base + at:
        fault = f"the record says that it lies at {head.physical_offset}, not at {base + at}"
    elif not body_crc_agrees(view, head):
        found, expected = zlib.crc32(view[head.body]) & CRC_MASK, head.body_crc & CRC_MASK
        fault = f"the body's CRC is {found:#010x}, the record says {expected:#010x}"
    elif not head.store_time_ms:
        fault = "the record's store time is 0"
    return fault or "the record's topic or properties hold zeros, or its checksum is wrong"
