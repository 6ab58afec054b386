"""The small files beside the log: `checkpoint`, `abort`.

`checkpoint` has 4096 bytes. RocketMQ uses the first 40 (spec/store.md §5): store times up to which
log, queues and index are on disk, and two positions. We write these for it, and keep a `Mark` of
our own further back, where RocketMQ neither looks nor writes: a position in the log before which
log *and* queues are synced, with a digest of the queues. After a crash the scan begins there
instead of at the start of some file; at any start the digest tells whether queue files are missing.

The mark has two slots that are written in turn, each with its CRC: a torn write spoils one, the
other still holds. Layout of a slot (offset 1024 and 2048), big-endian:

    | "SLC" 3 | version 1 | crc of the rest 4 | sequence 8 | log position 8 | queues 8 |
    | sum of ends 8 | store time 8 | index position 8 | index entries 8 | index file 8 |
    | index files 8 | log start 8 |

Version 4 is this. Older ones are still read: version 3 does not say where the log begins (-1),
version 2 not how many index files there are either (-1); version "M" (the first) ends behind the
store time, and its index position is 0, so that the index is looked at from the beginning.

`abort` exists while a store is open: who finds it starts after a crash.
"""

import struct
import zlib
from typing import Final, NamedTuple

from sluicemq.files import Files, process_id

CHECKPOINT_BYTES: Final = 4096
SLOTS: Final = (1024, 2048)
_JAVA: Final = struct.Struct(">5q")
_SLOT: Final = struct.Struct(">4sI")
_MAGIC: Final = b"SLC\x04"
_LAYOUTS: Final = {
    b"SLCM": struct.Struct(">5q"),
    b"SLC\x02": struct.Struct(">8q"),
    b"SLC\x03": struct.Struct(">9q"),
    _MAGIC: struct.Struct(">10q"),
}
_MARGIN_MS: Final = 3000
"""What RocketMQ takes off the smallest time to be on the safe side."""


class Mark(NamedTuple):
    """Everything before `log_offset` is durable: in the log and in the queues.

    `queues` is how many queues have units and `units` the sum of their ends, both as of
    `log_offset`; `store_time_ms` is that of the last record before it (0: none). The key index
    is durable up to `index_offset` in the log: with all its older files, and of the one named
    `index_file` (0: there is none) the entries before number `index_count`. There were
    `index_files` of them (-1: not known); retention may have removed some of the first since.
    The log begins at `log_start` or before (-1: not known): retention says so here before it
    removes a file.
    """

    sequence: int
    log_offset: int
    queues: int
    units: int
    store_time_ms: int
    index_offset: int = 0
    index_count: int = 0
    index_file: int = 0
    index_files: int = -1
    log_start: int = -1

    def without_queues(self) -> "Mark":
        """The next mark, which holds for the log alone: no queues agree with it."""
        return self._replace(sequence=self.sequence + 1, queues=-1, units=-1)


class Checkpoint(NamedTuple):
    """What the file says. `java_time_ms` is the time up to which RocketMQ trusts its files.

    `index_time_ms` is RocketMQ's own field for the index (spec/store.md §5).
    """

    java_time_ms: int
    mark: Mark | None
    index_time_ms: int = 0

    @property
    def is_mark_newest(self) -> bool:
        """Whether RocketMQ has stored nothing since the mark: it leaves the mark as it was."""
        mark = self.mark
        return mark is not None and self.java_time_ms <= max(0, mark.store_time_ms - _MARGIN_MS)


def read_checkpoint(files: Files, path: str) -> Checkpoint:
    """Time 0 and no mark when the file is missing or short."""
    if not files.exists(path):
        return Checkpoint(0, None)
    file = files.open(path)
    try:
        data = file.pread(CHECKPOINT_BYTES, 0)
    finally:
        file.close()
    data += bytes(CHECKPOINT_BYTES - len(data))
    log_time, queue_time, index_time, _, _ = _JAVA.unpack_from(data)
    marks = [mark for at in SLOTS if (mark := _read_slot(data, at)) is not None]
    java_time = max(0, min(log_time, queue_time) - _MARGIN_MS)
    return Checkpoint(java_time, max(marks, default=None), index_time)


def slots_of(data: bytes) -> list[Mark | None]:
    """The mark in each slot of a whole file; None where there is none or a torn one."""
    return [_read_slot(data, at) for at in SLOTS]


def _read_slot(data: bytes, at: int) -> Mark | None:
    magic, crc = _SLOT.unpack_from(data, at)
    layout = _LAYOUTS.get(magic)
    if layout is None:
        return None
    content = data[at + _SLOT.size : at + _SLOT.size + layout.size]
    return Mark(*layout.unpack(content)) if crc == zlib.crc32(content) else None


def write_checkpoint(files: Files, path: str, mark: Mark, *, index_time_ms: int = 0) -> None:
    """Write and sync; everything the mark claims has to be synced before."""
    content = _LAYOUTS[_MAGIC].pack(*mark)
    is_new = not files.exists(path)
    file = files.open(path, create=True)
    try:
        if file.size() != CHECKPOINT_BYTES:
            file.truncate(CHECKPOINT_BYTES)
        # RocketMQ reads the log again from here: what its index lacks has to be behind.
        time = min(mark.store_time_ms, index_time_ms or mark.store_time_ms)
        file.pwrite(_JAVA.pack(time, time, index_time_ms, 0, 0), 0)
        slot = _SLOT.pack(_MAGIC, zlib.crc32(content)) + content
        file.pwrite(slot, SLOTS[mark.sequence % len(SLOTS)])
        file.sync()
    finally:
        file.close()
    if is_new:
        files.sync_directory(path.rpartition("/")[0])


class DurableMark:
    """The newest mark on disk (None until this process writes one), and the next one's number. The
    log's start never goes back: retention may have said more than what was due before it."""

    def __init__(self, files: Files, path: str, sequence: int) -> None:
        self._files = files
        self._path = path
        self._sequence = sequence
        self.mark: Mark | None = None

    def write(self, mark: Mark, index_time_ms: int) -> None:
        """As `write_checkpoint`. A write that fails spoils the same slot again the next time."""
        start = mark.log_start if self.mark is None else self.mark.log_start
        new = mark._replace(sequence=self._sequence + 1, log_start=max(mark.log_start, start))
        write_checkpoint(self._files, self._path, new, index_time_ms=index_time_ms)
        self._sequence, self.mark = new.sequence, new


def write_index_time(files: Files, path: str, time_ms: int) -> None:
    """RocketMQ's field for the index alone, not synced, and only beside a mark of ours. RocketMQ
    throws away index files that are newer than this when it starts after a crash: say it before
    such a file is written."""
    if not files.exists(path):
        return
    file = files.open(path)
    try:
        if any(slots_of(file.pread(CHECKPOINT_BYTES, 0).ljust(CHECKPOINT_BYTES, b"\0"))):
            file.pwrite(struct.pack(">q", time_ms), 16)
    finally:
        file.close()


def write_abort(files: Files, path: str) -> None:
    """Say, durably, that a store is open here."""
    file = files.open(path, create=True)
    try:
        content = str(process_id()).encode()
        file.truncate(len(content))
        file.pwrite(content, 0)
        file.sync()
    finally:
        file.close()
    files.sync_directory(path.rpartition("/")[0])


def remove_abort(files: Files, path: str) -> None:
    """Say that everything is on disk: only then."""
    files.remove(path)
    files.sync_directory(path.rpartition("/")[0])
