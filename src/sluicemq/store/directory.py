"""What stands in a store's directory beside log and queues, and whether it is a store at all.

`checkpoint` has 4096 bytes. RocketMQ uses the first 40 (spec/store.md §5): store times up to
which log, queues and index are on disk, and two positions. We write these for it, and keep a `Mark`
of our own further back, where RocketMQ neither looks nor writes: a position in the log before which
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

`abort` exists while a store is open: finding it at a start means that a crash came before. A
slave's says so.

`config/deletedTopics.json` is an object of topic -> position in the log before which the topic's
records do not count. They stay in the log until its files go, so a recovery that builds queues from
the log would bring the topic back. The entry is durable before the first queue file is removed: a
deletion that a crash interrupts is finished at the next start. A topic that is made again begins
behind its entry, so the log is on disk up to there before the entry is, and where a damaged log
ends before it, the entry is cut back. RocketMQ does not look at this file.
"""

import json
import logging
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Final, NamedTuple

from sluicemq.config import StoreConfig
from sluicemq.errors import StoreDamagedError, StoreError
from sluicemq.files import Files, fix_of, load_text, process_id, read_text, replace_text
from sluicemq.store.segments import is_segment_name

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
_INDEX_TIME_AT: Final = 16
FOLLOWED: Final = b" slave"
RESTORING_FILE: Final = "restoring"
"""A file beside the log while a store is made of a backup (`tools.backup`)."""
_MARGIN_MS: Final = 3000
"""What RocketMQ takes off the smallest time to be on the safe side."""
LOG_DIRECTORY: Final = "commitlog"
ROCKSDB_QUEUES: Final = "consumequeue_r"
QUEUE_FILES_MAX: Final = 64
"""So many files of queues are asked for their size: a large store has tens of thousands."""

logger = logging.getLogger(__name__)


# --- the checkpoint


class Checkpoint(NamedTuple):
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

    def without_queues(self) -> "Checkpoint":
        """The next mark, which holds for the log alone: no queues agree with it."""
        return self._replace(sequence=self.sequence + 1, queues=-1, units=-1)


class CheckpointContent(NamedTuple):
    """What the file says. `java_time_ms` is the time up to which RocketMQ trusts its files.

    `index_time_ms` is RocketMQ's own field for the index (spec/store.md §5).
    """

    java_time_ms: int
    latest: Checkpoint | None
    index_time_ms: int = 0

    @property
    def is_checkpoint_current(self) -> bool:
        """Whether RocketMQ has stored nothing since the mark: it leaves the mark as it was."""
        mark = self.latest
        return mark is not None and self.java_time_ms <= max(0, mark.store_time_ms - _MARGIN_MS)


def read_checkpoint(files: Files, path: str) -> CheckpointContent:
    """Time 0 and no mark when the file is missing or short."""
    if not files.exists(path):
        return CheckpointContent(0, None)
    with closing(files.open(path)) as file:
        data = file.pread(CHECKPOINT_BYTES, 0).ljust(CHECKPOINT_BYTES, b"\0")
    log_time, queue_time, index_time, _, _ = _JAVA.unpack_from(data)
    java_time = max(0, min(log_time, queue_time) - _MARGIN_MS)
    return CheckpointContent(
        java_time, max(filter(None, parse_slots(data)), default=None), index_time
    )


def parse_slots(data: bytes) -> list[Checkpoint | None]:
    """The mark in each slot of a whole file; None where there is none or a torn one."""
    marks: list[Checkpoint | None] = []
    for at in SLOTS:
        magic, crc = _SLOT.unpack_from(data, at)
        layout = _LAYOUTS.get(magic, _JAVA)
        content = data[at + _SLOT.size : at + _SLOT.size + layout.size]
        is_whole = magic in _LAYOUTS and crc == zlib.crc32(content)
        marks.append(Checkpoint(*layout.unpack(content)) if is_whole else None)
    return marks


def write_checkpoint(files: Files, path: str, mark: Checkpoint, *, index_time_ms: int = 0) -> None:
    """Write and sync; everything the mark claims has to be synced before."""
    content = _LAYOUTS[_MAGIC].pack(*mark)
    is_new = not files.exists(path)
    with closing(files.open(path, create=True)) as file:
        if file.size() != CHECKPOINT_BYTES:
            file.truncate(CHECKPOINT_BYTES)
        # RocketMQ reads the log again from here: what its index lacks has to be behind.
        time = min(mark.store_time_ms, index_time_ms or mark.store_time_ms)
        file.pwrite(_JAVA.pack(time, time, index_time_ms, 0, 0), 0)
        slot = _SLOT.pack(_MAGIC, zlib.crc32(content)) + content
        file.pwrite(slot, SLOTS[mark.sequence % len(SLOTS)])
        file.sync()
    if is_new:
        files.sync_directory(path.rpartition("/")[0])


class CheckpointFile:
    """The mark as the checkpoint has it: `found` at the start, `mark` written by this process since
    (None: not yet). The log's start in it never goes back: retention may have said more than what
    was due before it."""

    def __init__(self, files: Files, path: str, found: CheckpointContent) -> None:
        self._files = files
        self._path = path
        self._lock = threading.RLock()
        self._sequence = found.latest.sequence if found.latest is not None else 0
        self.found = found
        self.written: Checkpoint | None = None
        self.index_time_ms = found.index_time_ms
        """RocketMQ's field for the index, for the next write (0: not known)."""

    def write(self, mark: Checkpoint) -> None:
        """As `write_checkpoint`. A write that fails spoils the same slot again the next time."""
        with self._lock:
            start = mark.log_start if self.written is None else self.written.log_start
            new = mark._replace(sequence=self._sequence + 1, log_start=max(mark.log_start, start))
            write_checkpoint(self._files, self._path, new, index_time_ms=self.index_time_ms)
            self._sequence, self.written = new.sequence, new

    def remove(self) -> None:
        """Durably, nothing is known of log, queues and index. Raises OSError."""
        with self._lock:
            self.written = None
            if self._files.exists(self._path):
                self._files.remove(self._path)
                self._files.sync_directory(self._path.rpartition("/")[0])

    def set_log_start(self, log_start: int) -> None:
        """The durable mark says from now on that the log begins there. Raises OSError."""
        with self._lock:
            if self.written is not None and self.written.log_start < log_start:
                self.write(self.written._replace(log_start=log_start))

    def distrust_queues(self) -> None:
        """Make sure, durably, that no later start trusts the queues of this one."""
        mark = self.found.latest
        if mark is not None:
            write_checkpoint(self._files, self._path, mark.without_queues())
        else:
            self.remove()

    def write_index_time(self, time_ms: int) -> None:
        """RocketMQ's field for the index alone, not synced, and only beside a mark of ours.
        RocketMQ throws away index files that are newer than this when it starts after a crash: say
        it before such a file is written."""
        with self._lock:
            self.index_time_ms = time_ms
            if not self._files.exists(self._path):
                return
            with closing(self._files.open(self._path)) as file:
                if any(parse_slots(file.pread(CHECKPOINT_BYTES, 0).ljust(CHECKPOINT_BYTES, b"\0"))):
                    file.pwrite(struct.pack(">q", time_ms), _INDEX_TIME_AT)


# --- other small files


def write_abort(files: Files, path: str, *, is_followed: bool = False) -> None:
    """Say, durably, that a store is open here, and whether a master writes its log."""
    content = str(process_id()).encode() + FOLLOWED * is_followed
    with closing(files.open(path, create=True)) as file:
        file.truncate(len(content))
        file.pwrite(content, 0)
        file.sync()
    files.sync_directory(path.rpartition("/")[0])


def was_slave(files: Files, path: str) -> bool:
    """Whether the store was a slave's when it was not closed in order."""
    if not files.exists(path):
        return False
    with closing(files.open(path)) as file:
        return file.pread(file.size(), 0).endswith(FOLLOWED)


def remove_abort(files: Files, path: str) -> None:
    """Say that everything is on disk: only then."""
    files.remove(path)
    files.sync_directory(path.rpartition("/")[0])


class DeletedTopics:
    """`ends`: topic -> records before this position of the log do not count.

    `is_doubtful`: an entry was refused, and the next start may find it all the same.
    """

    def __init__(self, files: Files, path: str, ends: dict[str, int] | None = None) -> None:
        self._files = files
        self._path = path
        self.end_by_topic = ends or {}
        self.is_doubtful = False

    @classmethod
    def load(cls, files: Files, root: str) -> "DeletedTopics":
        """A file that cannot be read is no reason not to start: a topic may come back."""

        def parse(text: str) -> dict[str, int]:
            values = json.loads(text)
            if not isinstance(values, dict):
                raise TypeError("no object of topics")
            return {str(topic): int(end) for topic, end in values.items()}

        path = f"{root}/config/deletedTopics.json"
        try:
            return cls(files, path, load_text(files, path, parse))
        except StoreDamagedError as error:
            logger.warning("%s Deleted topics may come back.", error.fact)
            return cls(files, path)

    def add(self, topic: str, end: int, log_start: int) -> None:
        """Durable on return. Entries that the log has left behind go.

        Raises OSError: there is no new entry, now or at the next start, unless `is_doubtful`.
        """
        kept = {
            name: position for name, position in self.end_by_topic.items() if position > log_start
        }
        ends = kept | {topic: end}
        before, text = json.dumps(self.end_by_topic, indent=1), json.dumps(ends, indent=1)
        try:
            replace_text(self._files, self._path, text)
        except OSError:
            self.is_doubtful = True
            if read_text(self._files, self._path) == text:  # its name was not synced
                replace_text(self._files, self._path, before)
            self.is_doubtful = False
            raise
        self.end_by_topic = ends

    def cut(self, end: int) -> None:
        """The log ends here: what is written from now on counts. Raises OSError."""
        if any(position > end for position in self.end_by_topic.values()):
            self.end_by_topic = {
                name: min(position, end) for name, position in self.end_by_topic.items()
            }
            replace_text(self._files, self._path, json.dumps(self.end_by_topic, indent=1))

    def is_live(self, topic: str, position: int) -> bool:
        """Whether a record of the topic at this position of the log still counts."""
        return position >= self.end_by_topic.get(topic, 0)


# --- is it a store, and one that is read here?


def check_directory(files: Files, config: StoreConfig) -> None:
    """Before anything is read or changed: what has another kind than it must have, and formats that
    are not read here (DLedger, RocksDB), are refused with what to do about it.

    Raises StoreError or StoreDamagedError; OSError for what cannot be looked at.
    """
    root = config.root
    index, settings = f"{root}/index", f"{root}/config"
    for path in (config.commit_log_path, config.consume_queue_path, index, settings):
        if not files.exists(path) or files.names(path):
            continue
        try:
            files.open(path).close()
        except IsADirectoryError:
            continue
        raise StoreDamagedError(
            f"{path} is a file, and must be a directory.",
            fix="Move it away, and bring the directory back from a copy if there was one.",
        )
    if files.exists(f"{root}/{RESTORING_FILE}"):
        raise StoreError(
            f"{root} is the half of a store: `sluice store restore` was interrupted.",
            fix="Run it again, with the same directories.",
        )
    for name in files.names(root):
        if name.startswith("dledger-") and files.names(f"{root}/{name}"):
            raise StoreError(
                f"{root}/{name} is a log of DLedger (enableDLegerCommitLog), which is not read"
                " here.",
                fix="Copy the topics into a plain broker with RocketMQ's tools, or give this"
                " broker a storePathRootDir of its own.",
            )
    if files.names(f"{root}/{ROCKSDB_QUEUES}"):
        raise StoreError(
            f"{root}/{ROCKSDB_QUEUES} says that RocketMQ keeps the queues of this store in RocksDB"
            " (storeType=defaultRocksDB), which is not read here.",
            fix="Move that directory away: the queues are then built from the commit log.",
        )
    for name in files.names(settings):
        if "CURRENT" in files.names(f"{settings}/{name}"):  # every RocksDB has that file
            raise StoreError(
                f"{settings}/{name} is a table in RocksDB, which is not read here.",
                fix="Export it with `mqadmin rocksDBConfigToJson`, then move the directory away.",
            )


def not_a_store_error(files: Files, root: str, log_paths: str, option: str) -> StoreError:
    """The error for a directory without a commit log; `option` says where the log lies."""
    fact = f"{root} is not a message store"
    if not files.exists(root):
        return StoreError(f"{fact}: {root} does not exist.", fix="Name the directory of a store.")
    names = files.names(root)
    if any(map(is_segment_name, names)):
        return StoreError(
            f"{fact}: it holds the files of one part of a store.",
            fix="Name the directory above it (the one that storePathRootDir says).",
        )
    for name in names:
        if files.names(f"{root}/{name}/{LOG_DIRECTORY}"):
            return StoreError(f"{fact}.", fix=f"Name {root}/{name}: that one is.")
    if ROCKSDB_QUEUES in names:
        return StoreError(
            f"{fact}: it keeps its queues in RocksDB (storeType=defaultRocksDB) and has no commit"
            " log here.",
            fix=f"Name the log with {option}; queues in RocksDB cannot be read.",
        )
    return StoreError(
        f"{fact}: {log_paths} holds no commit log.",
        fix="Name the directory that holds commitlog, consumequeue and config (the one that"
        f" storePathRootDir says), and with {option} the one that storePathCommitLog says when the"
        " log lies elsewhere.",
    )


def open_error(root: str, error: OSError) -> StoreError:
    """The error of the system as one of the store: path, reason, cure."""
    return StoreError(
        f"The store in {root} cannot be opened: {error.strerror or error}"
        f"{f' ({error.filename})' if error.filename else ''}.",
        fix=fix_of(error),
    )


def detect_file_sizes(
    config: StoreConfig, files: Files, option: str = "storePathCommitLog"
) -> StoreConfig:
    """`config` with the sizes of the files that are there: a copy of a store alone does not say
    what mappedFileSizeCommitLog, …ConsumeQueue and …TimerLog were (spec/store.md §1).

    Where files differ the most frequent size counts: opening the store then names the odd one.
    Raises StoreError when `config.root` holds no store; `option` says where a log lies elsewhere.
    """

    def paths(directory: str) -> Iterator[str]:
        return (f"{directory}/{name}" for name in files.names(directory) if is_segment_name(name))

    def size(found: Iterable[str], configured: int) -> int:
        sizes: Counter[int] = Counter()
        for path in found:
            with closing(files.open(path)) as file:
                sizes[file.size()] += 1
        del sizes[0]  # the trace of a crash at the file's creation
        return configured if not sizes or configured in sizes else sizes.most_common(1)[0][0]

    log, queues = config.commit_log_path, config.consume_queue_path
    if not any(paths(log)):
        raise not_a_store_error(files, config.root, log, option)
    queue_files = (
        path
        for topic in files.names(queues)
        for queue_id in files.names(f"{queues}/{topic}")
        for path in paths(f"{queues}/{topic}/{queue_id}")
    )
    timer_log = paths(f"{config.root}/timerlog")
    return replace(
        config,
        commit_log_file_bytes=size(paths(log), config.commit_log_file_bytes),
        consume_queue_file_bytes=size(
            islice(queue_files, QUEUE_FILES_MAX), config.consume_queue_file_bytes
        ),
        timer_log_file_bytes=size(timer_log, config.timer_log_file_bytes),
    )
