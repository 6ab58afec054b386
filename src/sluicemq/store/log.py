"""The commit log: all records of all topics, one after the other, in files of a fixed size.

Each commit writes once, with one pwrite for each file that it touches. A file without room for the
next record and 8 more bytes is closed by a blank record (spec/store.md §2.2). The log knows two
positions; the writer's own position lies behind them:

    synced_offset    everything before is on disk
    written_offset   everything before is in the kernel's page cache

On a slave the log may end within a record. `records_end` is the position up to which queues, key
index and checkpoints are complete. On a master it equals `written_offset`.

`sync` may run in another thread than everything else. It covers what was written when it began, in
the order of the files. It reads `written_offset` once and writes `synced_offset`, and changes
nothing else that the writing thread uses.

If a write fails, the bytes that may have reached the file are overwritten with zeros and synced.
Otherwise recovery could find records that were never acknowledged. There are three kinds of errors:

    passing   no descriptor or no memory: this write is refused, and the next one may succeed;
              a sync, or the overwriting, is repeated before the next write
    full      the disk is full: all writes are refused until there is room
    final     a sync or the overwriting failed: the kernel may have dropped the pages, so the log
              accepts no more writes; messages that were not synced may or may not exist after a
              restart

A record is valid (`parse_log_record`) only if its magic number is known, its size equals the sum of
its parts, its stored position equals its real position, and the CRC of its body matches
(spec/store.md §7). The stored position excludes old bytes of a file that was used before. The CRC
covers the body only, so a torn write, which leaves zeros, may damage topic or properties unnoticed.
Therefore neither may contain such zeros (`is_torn`), and the writer refuses properties that would
look torn. With `forceVerifyPropCRC` a record also needs a valid checksum of the whole record (see
`record.checksum`).
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
    RecordHead,
    decode_properties,
    has_valid_checksum,
    is_body_intact,
    parse_head,
    tag_code_of_properties,
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

FILE_SIZE_SETTING: Final = "mappedFileSizeCommitLog"
"""The setting that says how large the files of the log are."""
BLANK_BYTES: Final = 8
MULTI_DISPATCH: Final = reserved.MULTI_DISPATCH
MULTI_OFFSETS: Final = reserved.MULTI_OFFSETS
DELAYS_MS: Final = parse_delay_levels(DEFAULT_LEVELS)
"""The delays of level 1, 2, … in ms where messageDelayLevel is not known."""
ZEROS_NEVER_STORED: Final = bytes(16)
"""Properties never contain this many zeros in a row, and never end with a zero."""
PLACEHOLDER_NAME: Final = "SLUICE_LOST"
"""The property of a placeholder, and the topic of records that fill up a damaged range."""
PLACEHOLDER_CODE: Final = int.from_bytes(b"LOST") << 32
"""The tag code of a placeholder, which `sluice store repair` writes in place of a lost message.

SluiceMQ's readers skip such units. The lower half, which is all that RocketMQ compares, is the tag
code of a message without a tag.
"""
PLACEHOLDER_PREPARED_OFFSET: Final = int.from_bytes(b"SLUICELO")
"""The offset of the prepared message in a placeholder's record. No other record has this value."""
_SCHEDULE_TOPIC: Final = SCHEDULE_TOPIC.encode()
_MULTI_START: Final = MULTI_DISPATCH.encode() + b"\x01"
_unpack_head: Final = RECORD_HEAD.struct.unpack_from
_unpack_size_and_magic: Final = BLANK.struct.unpack_from
_INT16: Final = struct.Struct(">h")
SEARCH_BYTES_MAX: Final = 64 << 20
"""A report searches this many bytes behind a damaged position for the next valid record."""
RECORD_BYTES_MAX: Final = 1 << 29
_SEARCH_CHUNK_BYTES: Final = 1 << 20
_MAGIC_START: Final = BLANK.struct.pack(0, MAGIC_V1)[4:7]
_MAGIC_BLANK: Final = BLANK.struct.pack(0, MAGIC_BLANK)[4:]
_POSITION_AT: Final = RECORD_HEAD.at("physical_offset")
_SIZE_BYTES: Final = 4
_MAGIC_PATTERNS: Final = [re.compile(re.escape(magic)) for magic in (_MAGIC_START, _MAGIC_BLANK)]
"""Patterns that find positions at which the magic number of a record or blank record may begin."""


class CommitLog:
    """The files of the commit log, and the positions up to which they are written and synced.

    See the module for threads and errors. `refusal` is the error with which appending is refused
    while the disk is too full, or None. `store.retain` sets it. `failure` is the final error after
    which the log accepts no more writes, or None.
    """

    def __init__(
        self, files: Files, directory: str, file_bytes: int, *, requires_checksum: bool = False
    ) -> None:
        """Create an empty log; neither read nor create a file.

        Call `segments.load()` to find the files in `directory`, each of which has `file_bytes`
        bytes, and `set_end` when the end of the log is known. If `requires_checksum`, a record
        without a valid checksum property is damaged.
        """
        self.segments = SegmentFiles(
            files, directory, file_bytes, FILE_SIZE_SETTING, cuts_in_order=True
        )
        self.requires_checksum = requires_checksum
        self.written_offset = 0
        self.synced_offset = 0
        self.followed_end: int | None = None
        """The value of `records_end` while a master writes the log; None otherwise."""
        self.failure: OSError | None = None
        self.refusal: StoreFullError | None = None
        self._sync_lock = threading.Lock()
        self._failed_writes: list[tuple[int, int]] = []
        """(position, size) of the pieces of failed writes, which must be zeroed."""

    @property
    def start(self) -> int:
        """The first position that is still in the log."""
        return self.segments.start

    @property
    def records_end(self) -> int:
        """The position behind the last record that is in its queue."""
        return self.written_offset if self.followed_end is None else self.followed_end

    def set_end(self, offset: int) -> None:
        """Set the written and the synced end of the log to `offset`, where appending continues.

        The caller guarantees that all bytes before `offset` are on disk. No file is changed.
        """
        self.written_offset = self.synced_offset = offset

    def truncate(self, end: int) -> None:
        """Remove everything from position `end` on, durably. The log then ends there.

        Later files are removed, and the rest of the file that contains `end` is zeroed. Waits for a
        `sync` in another thread. Raises StoreError if this fails; the log then accepts no more
        writes.
        """
        with self._sync_lock:
            self.check_writable()
            segments = self.segments
            try:
                if segments.truncate(end):
                    if segments.last is not None:
                        segments.last.file().sync()
                    segments.files.sync_directory(segments.directory)
            except OSError as error:
                self.mark_failed(error)
            self.written_offset = end
            self.synced_offset = min(self.synced_offset, end)

    def check_writable(self) -> None:
        """Raise StoreError if the log accepts no more writes, because the disk failed before."""
        if self.failure is not None:
            raise StoreError(
                f"The commit log in {self.segments.directory} refuses writes: {self.failure}.",
                fix="Check the disk, then restart the broker: it recovers everything that is on"
                " disk.",
            )

    def mark_failed(self, error: OSError) -> None:
        """Record `error` as `failure`, so that the log accepts no more writes.

        Always raises StoreError.
        """
        self.failure = error
        self.check_writable()

    def check_appendable(self) -> None:
        """Raise StoreError after a final error, or StoreFullError while the disk is too full.

        Does nothing if messages may be appended.
        """
        self.check_writable()
        if self.refusal is not None:
            raise StoreFullError(self.refusal.fact + ".", fix=self.refusal.fix)

    # --- writing

    def write(self, pieces: Sequence[tuple[int, bytes | memoryview]], end: int) -> None:
        """Write (position, bytes) pieces, each within one file, and set the log's end to `end`.

        Missing files are created. Nothing is synced. If a write fails, its bytes are overwritten
        with zeros, the log keeps its old end, and StoreFullError or StoreError is raised. If the
        zeros cannot be written either, StoreUncertainError is raised: the messages may exist after
        a restart.
        """
        # Each piece is noted as failed before it is written. The notes are cleared at success.
        failed_writes = self._failed_writes
        if self.failure is not None:
            self.check_writable()
        try:
            if failed_writes:  # an earlier overwriting failed, and is repeated first
                self._zero_failed_writes()
            for position, piece in pieces:
                segment = self.segments.at(position) or self.add_file(position)
                file = segment.file()  # if this fails, no byte of this piece is written yet
                failed_writes.append((position, len(piece)))
                file.pwrite(piece, position - segment.base)
                segment.note_written(position + len(piece))
        except OSError as error:
            self._undo_failed_write(error)
            raise self._make_write_error(error) from error
        failed_writes.clear()
        self.written_offset = end

    def _undo_failed_write(self, error: OSError) -> None:
        """Overwrite what a failed write may have written with zeros.

        Raises StoreUncertainError with the text of `error` if that fails.
        """
        try:
            self._zero_failed_writes()
        except (OSError, StoreError):
            raise StoreUncertainError(
                f"Writing the commit log in {self.segments.directory} failed, and the partial"
                f" write cannot be undone: {error}. The message may reappear when the broker is"
                " restarted.",
                fix=fix_of(error),
            ) from error

    def add_file(self, position: int) -> Segment:
        """Create the file that contains `position`, make its name and size durable, and return it.

        Creates the directory if it does not exist. If syncing fails, the file is removed. Raises
        OSError.
        """
        segments = self.segments
        if not segments.files.exists(segments.directory):
            segments.files.make_directory(segments.directory)
        segment = segments.add(position - position % segments.file_bytes)
        try:
            segment.file().sync()
            segments.files.sync_directory(segments.directory)
        except OSError:
            # No later sync would make the file's name durable, so nothing may be written to it.
            segments.drop_last()
            raise
        return segment

    def prepare_next_file(self) -> None:
        """Create the next file if less than a quarter of the last one is free. Raises OSError.

        Does nothing if the log has no file.
        """
        last_segment = self.segments.last
        if last_segment is None:
            return
        last_quarter_start = last_segment.end - last_segment.size // 4
        if self.written_offset > last_quarter_start:
            self.add_file(last_segment.end)

    def _zero_failed_writes(self) -> None:
        """Overwrite the bytes of failed writes with zeros, the latest write first, and sync them.

        Each write is removed from `_failed_writes` when that is done, so the next call continues
        after an error. Raises OSError if overwriting fails; a final error becomes `failure`. Raises
        StoreError if a sync fails.
        """
        while self._failed_writes:
            position, size = self._failed_writes[-1]
            segment = self.segments.at(position)
            try:
                if segment is not None and segment.zero_range(position, position + size):
                    self._sync_segment(segment)
            except OSError as error:
                if error.errno not in TRANSIENT_ERRORS | FULL_ERRORS:
                    self.failure = error
                raise
            self._failed_writes.pop()

    def _make_write_error(self, error: OSError) -> StoreError:
        """Make the StoreError to raise for an OSError of a write.

        It is StoreTransientError if descriptors or memory ran out, StoreFullError if the disk is
        full, and a plain StoreError otherwise.
        """
        directory = self.segments.directory
        if error.errno in TRANSIENT_ERRORS:
            return StoreTransientError(
                f"The commit log in {directory} cannot be written at present: {error}.",
                fix=fix_of(error),
            )
        if error.errno not in FULL_ERRORS:
            return StoreError(
                f"Writing the commit log in {directory} failed: {error}.", fix=fix_of(error)
            )
        total_bytes, free_bytes = self.segments.files.usage(directory)
        return StoreFullError(
            f"The disk has no room for the commit log in {directory}: {total_bytes - free_bytes} of"
            f" {total_bytes} bytes are used, {free_bytes} are free.",
            fix="Free disk space; sending then works again at once.",
        )

    def sync(self) -> int:
        """Sync everything that was written before this call. Return its end in the log.

        The end becomes `synced_offset`. Files that are full are closed. Does no I/O if everything
        is synced. Any thread may call this; calls wait for each other. Raises StoreTransientError
        if the call may be repeated, and StoreError if a sync failed, now or earlier.
        """
        with self._sync_lock:
            self.check_writable()
            target = self.written_offset
            position = self.synced_offset
            while position < target:
                segment = self.segments.at(position)
                if segment is None:  # the position is a file's end, the next file begins there
                    break
                self._sync_segment(segment)
                position = segment.end
                if position <= target:  # the file is full, and never written again
                    segment.release()
            self.synced_offset = target
            return target

    def _sync_segment(self, segment: Segment) -> None:
        """Sync one file of the log.

        Raises StoreTransientError if it cannot be opened for lack of descriptors or memory. Any
        other error is final: the log accepts no more writes, and StoreError is raised.
        """
        is_open = False
        try:
            file = segment.file()
            is_open = True
            file.sync()
        except OSError as error:
            if not is_open and error.errno in TRANSIENT_ERRORS:
                raise self._make_write_error(error) from error
            self.mark_failed(error)

    def close(self) -> None:
        self.segments.close()

    # --- reading

    def record_view(self, position: int, size: int) -> memoryview | None:
        """Return a view of `size` bytes from `position` on; None if no file contains them all.

        The bytes must have been written: reading a hole through a map may crash on a full tmpfs.
        """
        segment = self.segments.at(position)
        if segment is None or position + size > segment.end:
            return None
        begin = position - segment.base
        return segment.view()[begin : begin + size]

    def view_record(self, position: int) -> tuple[memoryview, int]:
        """Return (view, index): the record at `position` begins at this index of the view.

        The record is not checked. If its head has a possible size and this position, the view
        contains the whole record. Otherwise it contains at least `RECORD_BYTES_MIN` bytes behind
        the index, or fewer at the end of a file. It is empty if no file contains `position`. Bytes
        that were never written are read without a map.
        """
        segment = self.segments.at(position)
        if segment is None:
            return memoryview(b""), 0
        view, index = segment.safe_view(position, RECORD_BYTES_MIN)
        if len(view) - index < RECORD_BYTES_MIN:
            return view, index
        # If the view ends within the record, make another one with the whole record.
        head = view[index : index + RECORD_BYTES_MIN]
        size = record_size(head, 0)
        is_plausible = RECORD_BYTES_MIN <= size <= min(segment.end - position, RECORD_BYTES_MAX)
        if len(view) - index >= size or not is_plausible:
            return view, index
        has_its_position = head[_POSITION_AT : _POSITION_AT + 8] == position.to_bytes(8)
        if not has_its_position:
            return view, index
        return segment.safe_view(position, size)

    def find_record(self, position: int, *, check_crc: bool = True) -> "LogRecord | None":
        """Return the record that begins at `position`; None if there is no valid record.

        `check_crc` False skips the checks of the CRC, and of topic and properties. The checksum
        property is not checked (`find_valid_record` does that).
        """
        view, index = self.view_record(position)
        return parse_log_record(view, index, position - index, check_crc=check_crc)

    def find_valid_record(self, position: int, *, check_crc: bool = True) -> "LogRecord | None":
        """Return the record that begins at `position`; None if there is no valid record.

        If `check_crc`, the CRC of the record must be right. If the log also `requires_checksum`,
        the checksum property of the record must be right, too.
        """
        view, index = self.view_record(position)
        record = parse_log_record(view, index, position - index, check_crc=check_crc)
        if record is None or not (check_crc and self.requires_checksum):
            return record
        record_bytes = view[index : index + record.size_bytes]
        return record if has_valid_checksum(record_bytes) else None

    def is_blank_at(self, segment: Segment, position: int) -> bool:
        """Return whether a blank record at `position` of `segment` covers the rest of the file."""
        view, index = segment.safe_view(position, BLANK_BYTES)
        if len(view) - index < BLANK_BYTES:
            return False
        size, magic = _unpack_size_and_magic(view, index)
        return bool(magic == MAGIC_BLANK and size == segment.end - position)

    def skip_blank(self, position: int) -> int:
        """Return the end of the file if a blank record begins at `position`, else `position`."""
        segment = self.segments.at(position)
        if segment is None or segment.end - position < BLANK_BYTES:
            return position
        return segment.end if self.is_blank_at(segment, position) else position

    def explain_bad_record(self, position: int) -> str:
        """Return why there is no valid record at `position`, as a phrase."""
        segment = self.segments.at(position)
        if segment is None:
            return f"no file of the log holds byte {position}"
        view, index = self.view_record(position)
        return explain_bad_record(view, index, position - index, segment.end - position)

    def next_room(self, position: int, stop: int | None = None) -> tuple[Segment, int, int] | None:
        """Find where the next record begins: at `position`, or in the next file.

        Returns (segment, start, limit): the file, the record's position in the log, and the
        position before which the record must end. The limit is the file's end, or `stop` if that is
        nearer. Returns None if there is no room for a record before `stop` or the last file's end.
        The record itself is not checked.
        """
        while (segment := self.segments.at(position)) is not None:
            end_max = segment.end if stop is None else min(stop, segment.end)
            if end_max - position >= BLANK_BYTES and not self.is_blank_at(segment, position):
                return segment, position, end_max
            if end_max < segment.end:  # `stop` lies in this file
                return None
            position = segment.end
        return None

    def scan(
        self, start: int, stop: int | None = None, *, check_crc: bool = True
    ) -> "Iterator[LogRecord]":
        """Yield the valid records from `start` on that end at `stop` or before.

        Goes on from file to file. Ends at the first position without a valid record. If `stop` is
        None, the end of the log counts. CRCs are checked if `check_crc`.
        """
        position = start
        while (next_room := self.next_room(position, stop)) is not None:
            _, position, end_max = next_room
            record = self.find_valid_record(position, check_crc=check_crc)
            if record is None or record.end > end_max:
                return
            yield record
            position = record.end


class LogRecord(NamedTuple):
    """A valid record, as it is found in the log.

    `position` is its own position in the log, `prepared_offset` the position of the prepared
    message of a transaction (0 for other messages). `topic` and `properties` are the encoded bytes.
    """

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
        """The position behind the record."""
        return self.position + self.size_bytes

    @property
    def is_queued(self) -> bool:
        """Whether a queue contains the record: not for prepared and rolled-back messages."""
        return not self.sys_flag & UNQUEUED

    @property
    def is_placeholder(self) -> bool:
        """Whether the record stands for a message that `sluice store repair` could not save."""
        return self.prepared_offset == PLACEHOLDER_PREPARED_OFFSET

    def tag_code(self, delays_ms: Sequence[int] = DELAYS_MS) -> int:
        """Return the code that the record's unit (queue entry) must have.

        It is the hash of the record's tag (0 without a tag), the due time in ms of a delayed
        message, or `PLACEHOLDER_CODE`. `delays_ms` are the delays of level 1, 2, …
        (messageDelayLevel). A higher level has the delay of the last one.
        """
        encoded_properties = self.properties
        if self.is_placeholder:
            return PLACEHOLDER_CODE
        if self.topic == _SCHEDULE_TOPIC:
            properties = decode_properties(encoded_properties)
            level = natural(properties.get(DELAY, ""))
            if level:
                level = min(level, len(delays_ms))
                return self.store_time_ms + delays_ms[level - 1]
            return tag_code(properties.get(TAGS, ""))
        return tag_code_of_properties(encoded_properties)

    def belongs_to(self, key: tuple[str, int], offset: int | None = None) -> bool:
        """Return whether queue `key` contains the record at `offset` (None means any offset)."""
        queue = (self.topic.decode(errors="replace"), self.queue_id)
        queues = [(queue, self.queue_offset), *self.extra_queues()]
        return any(
            other_key == key and offset in (None, other_offset)
            for other_key, other_offset in queues
        )

    def extra_queues(self) -> list[tuple[tuple[str, int], int]]:
        """Return (queue key, offset) of the queues that contain the record besides its own.

        A key is (topic, queue id). Most records have no other queue. RocketMQ's multi-dispatch
        (spec/store.md §3.1) puts names and offsets of others into two properties, separated by
        commas. Those that cannot be valid are left out.
        """
        if _MULTI_START not in self.properties:
            return []
        properties = decode_properties(self.properties)
        names = properties.get(MULTI_DISPATCH, "").split(",")
        offsets = properties.get(MULTI_OFFSETS, "").split(",")
        queues = []
        for name, offset in zip(names, offsets, strict=False):
            if not name or "/" in name or not offset.isdecimal():
                continue
            queue_id = 0 if name.startswith(LMQ_PREFIX) else self.queue_id
            queues.append(((name, queue_id), int(offset)))
        return queues


def record_size(view: memoryview, index: int) -> int:
    """Return the size that the record at index `index` of a view claims to have."""
    size: int = _unpack_size_and_magic(view, index)[0]
    return size


def is_torn(topic: bytes, properties: bytes) -> bool:
    """Return whether topic or properties contain zeros as a torn write leaves them.

    A torn write lacks its end, of any length, or a sector. An empty topic counts as torn too.
    """
    if not topic or b"\0" in topic:
        return True
    return properties.endswith(b"\0") or ZEROS_NEVER_STORED in properties


def parse_log_record(
    view: memoryview, start: int, base: int, *, check_crc: bool
) -> LogRecord | None:
    """Return the record at index `start` of a view that begins at position `base` of the log.

    Returns None if the record is not valid (see the module), or not completely in the view.
    `check_crc` False skips two checks: the CRC, and whether topic and properties are torn. The
    checksum property is not checked. A common record (V1, IPv4) is read with one `struct` call, any
    other record with the record codec.
    """
    if len(view) - start < RECORD_BYTES_MIN:
        return None
    (
        size,
        magic,
        crc,
        queue_id,
        _,
        queue_offset,
        position,
        sys_flag,
        _,
        _,
        store_time_ms,
        _,
        _,
        prepared_offset,
        body_bytes,
    ) = _unpack_head(view, start)
    if magic not in MAGICS or position != base + start:
        return None
    if magic != MAGIC_V1 or sys_flag & HOST_BITS:
        return _parse_uncommon_record(view, start, check_crc=check_crc)

    # Behind the head: body | topic size 1 | topic | properties size 2 | properties.
    body_start = start + RECORD_HEAD.size
    topic_start = body_start + body_bytes + 1
    if body_bytes < 0 or topic_start + 2 > len(view):
        return None
    properties_start = topic_start + view[topic_start - 1] + 2
    if properties_start > len(view):
        return None
    properties_end = properties_start + _INT16.unpack_from(view, properties_start - 2)[0]
    if (
        properties_end != start + size
        or properties_end < properties_start
        or properties_end > len(view)
    ):
        return None
    topic = bytes(view[topic_start : properties_start - 2])
    properties = bytes(view[properties_start:properties_end])
    is_whole = not check_crc or zlib.crc32(view[body_start : topic_start - 1]) & CRC_MASK == crc
    if not store_time_ms or not is_whole or (check_crc and is_torn(topic, properties)):
        return None
    return LogRecord(
        position,
        size,
        queue_id,
        queue_offset,
        sys_flag,
        store_time_ms,
        topic,
        properties,
        prepared_offset,
    )


def _parse_uncommon_record(view: memoryview, start: int, *, check_crc: bool) -> LogRecord | None:
    """Parse a record of version 2 or with IPv6 hosts; return None if it is not valid.

    The caller has compared its stored position. CRCs are checked if `check_crc`.
    """
    try:
        head = parse_head(view, start)
    except ProtocolError:
        return None
    topic = bytes(view[head.topic])
    properties = bytes(view[head.properties])
    if not head.store_time_ms:
        return None
    if check_crc and (not is_body_intact(view, head) or is_torn(topic, properties)):
        return None
    return LogRecord(
        position=head.physical_offset,
        size_bytes=head.size_bytes,
        queue_id=head.queue_id,
        queue_offset=head.queue_offset,
        sys_flag=head.sys_flag,
        store_time_ms=head.store_time_ms,
        topic=topic,
        properties=properties,
        prepared_offset=head.prepared_offset,
    )


# --- searching behind damaged bytes


class LogBytes(Protocol):
    """A source of bytes of a log, by position."""

    def read(self, position: int, size: int, /) -> bytes:
        """Return `size` bytes from `position` on; fewer where a file ends."""

    def data_start(self, position: int, /) -> int | None:
        """Return the first position from this one on that may contain bytes other than zero.

        Searches the same file only. Returns None if there is no such position.
        """


def find_next_record_start(
    log: LogBytes, start: int, stop: int, file_end: int, *, takes_blank: bool = True
) -> int | None:
    """Return the position of the next valid record in [start, stop); None if there is none.

    Positions are positions in the log. [start, stop) is within one file, which ends at `file_end`.
    If `takes_blank`, the blank record that ends the file counts as valid. Recovery, verify and
    repair all use this function, so they agree about where valid records continue.
    """
    # Reads with pread, not through a map: reading a hole through a map may need room on the disk,
    # and kills the process (SIGBUS) without it.
    data_start = log.data_start(start)
    while data_start is not None and data_start < stop:
        # The size before a magic number begins with zero bytes, which may lie in a hole.
        chunk_start = max(start, data_start - _SIZE_BYTES)
        chunk = log.read(chunk_start, min(_SEARCH_CHUNK_BYTES, file_end - chunk_start))
        for magic_index in _find_magic_numbers(chunk):
            head = chunk[magic_index - _SIZE_BYTES : magic_index + RECORD_BYTES_MIN]
            position = chunk_start + magic_index - _SIZE_BYTES
            if head[_SIZE_BYTES:].startswith(_MAGIC_BLANK):
                covers_rest = int.from_bytes(head[:_SIZE_BYTES], signed=True) == file_end - position
                if takes_blank and covers_rest:
                    return position
            elif _is_valid_record(log, position, head, file_end):
                return position
        # The next chunk begins earlier than this one ends, because a head may lie across both.
        start = chunk_start + len(chunk) - RECORD_BYTES_MIN
        if len(chunk) < _SEARCH_CHUNK_BYTES or start >= stop:
            return None
        data_start = log.data_start(start)
    return None


def _find_magic_numbers(chunk: bytes) -> list[int]:
    """Return the indices at which the magic number of a record may begin, in ascending order.

    Indices without room for the record's size before them are left out.
    """
    indices = []
    for pattern in _MAGIC_PATTERNS:
        indices += [match.start() for match in pattern.finditer(chunk, _SIZE_BYTES)]
    return sorted(indices)


def _is_valid_record(log: LogBytes, position: int, head: bytes, file_end: int) -> bool:
    """Return whether a valid record begins at `position` of the log.

    `head` contains the first bytes of the record. Its file ends at position `file_end`.
    """
    # The position is checked first: hardly any other bytes contain it.
    if head[_POSITION_AT:][:8] != position.to_bytes(8):
        return False
    size = int.from_bytes(head[:_SIZE_BYTES], signed=True)
    if not RECORD_BYTES_MIN <= size <= min(file_end - position, RECORD_BYTES_MAX):
        return False
    view = memoryview(log.read(position, size))
    return parse_log_record(view, 0, position, check_crc=True) is not None


def explain_bad_record(view: memoryview, index: int, base: int, bytes_left: int) -> str:
    """Return why there is no valid record at index `index` of a view, as a phrase for logs.

    `view` begins at position `base` of the log, and `bytes_left` bytes are left in the file. The
    caller knows that the record is not valid: if no other check fails, the phrase blames zeros or
    the checksum.
    """
    if min(bytes_left, len(view) - index) < BLANK_BYTES:
        return f"only {bytes_left} bytes are left in the file"
    size, magic = BLANK.struct.unpack_from(view, index)
    if not any(view[index : index + RECORD_BYTES_MIN]):
        return "there are zero bytes instead of a record"
    if magic == MAGIC_BLANK:
        return f"the blank record covers {size} bytes, but {bytes_left} bytes are left in the file"
    if magic not in MAGICS:
        return (
            f"the magic number is {magic & 0xFFFFFFFF:#010x}, that of a record is"
            f" {MAGIC_V1 & 0xFFFFFFFF:#010x} or {MAGIC_V2 & 0xFFFFFFFF:#010x}"
        )
    try:
        head = parse_head(view, index)
    except ProtocolError as error:
        return str(error).rstrip(".")
    return _explain_bad_content(view, head, base + index)


def _explain_bad_content(view: memoryview, head: RecordHead, position: int) -> str:
    """Return why a record with a readable head is not valid, as a phrase.

    `head` was read from `view`, and the record begins at `position` of the log.
    """
    if head.physical_offset != position:
        return f"the record's stored position is {head.physical_offset}, not {position}"
    if not is_body_intact(view, head):
        computed_crc = zlib.crc32(view[head.body]) & CRC_MASK
        stored_crc = head.body_crc & CRC_MASK
        return f"the body's CRC is {computed_crc:#010x}, but the record contains {stored_crc:#010x}"
    if not head.store_time_ms:
        return "the record's store time is 0"
    return "the record's topic or properties contain zeros, or its checksum is wrong"
