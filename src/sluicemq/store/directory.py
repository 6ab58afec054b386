"""The small files in a store's directory, and the checks whether a directory is a store.

`checkpoint` has 4096 bytes. RocketMQ uses the first 40 (spec/store.md §5): the store times up to
which log, queues and index are on disk, and two positions. SluiceMQ writes these too. Further back,
where RocketMQ neither reads nor writes, it stores a `Checkpoint` of its own: a position of the log
before which log *and* queues are synced, with a digest of the queues. After a crash recovery begins
there and not at the beginning of some file. At every start the digest shows whether queue files are
missing.

The checkpoint has two slots, which are written in turn and each have a CRC: a torn write damages
one slot, and the other is still valid. Layout of a slot (at 1024 and 2048), big-endian:

    | "SLC" 3 | version 1 | crc of the rest 4 | sequence 8 | log position 8 | queues 8 |
    | sum of ends 8 | store time 8 | index position 8 | index entries 8 | index file 8 |
    | index files 8 | log start 8 |

This is version 4. Older versions can be read: version 3 has no log start (-1), version 2 has no
number of index files either (-1). Version "M" (the first) ends behind the store time; its index
position is 0, so that the index is checked from the beginning.

`abort` exists while a store is open. A start that finds it knows that the process crashed. The file
also says whether the store was a slave's.

`config/deletedTopics.json` is an object: topic -> the position of the log before which the topic's
records are dead. The records stay in the log until retention removes its files, so without this
file a recovery that rebuilds queues from the log would restore the topic. The entry is durable
before the first queue file is removed; a deletion that a crash interrupts is finished at the next
start. A topic that is created again begins behind its entry. Therefore the log is synced up to
there before the entry is written, and if a damaged log ends before it, the entry is lowered.
RocketMQ does not read this file.
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
_JAVA_FIELDS: Final = struct.Struct(">5q")
_SLOT_HEAD: Final = struct.Struct(">4sI")
_MAGIC: Final = b"SLC\x04"
_LAYOUTS: Final = {
    b"SLCM": struct.Struct(">5q"),
    b"SLC\x02": struct.Struct(">8q"),
    b"SLC\x03": struct.Struct(">9q"),
    _MAGIC: struct.Struct(">10q"),
}
_INDEX_TIME_AT: Final = 16
_FOLLOWED_SUFFIX: Final = b" slave"
"""The end of the content of `abort` if the store is a slave's."""
RESTORING_FILE: Final = "restoring"
"""A file beside the log that exists while a store is restored from a backup (`tools.backup`)."""
_JAVA_MARGIN_MS: Final = 3000
"""RocketMQ subtracts this from the smallest time in its checkpoint, to be safe."""
LOG_DIRECTORY: Final = "commitlog"
ROCKSDB_QUEUES: Final = "consumequeue_r"
QUEUE_FILES_MAX: Final = 64
"""The sizes of at most this many queue files are read: a large store has tens of thousands."""

logger = logging.getLogger(__name__)


# --- the checkpoint


class Checkpoint(NamedTuple):
    """A position of the log, `log_offset`, before which log and queues are durable.

    `sequence` numbers the checkpoints of a store. `queues` is the number of queues that have units,
    and `units` the sum of their end offsets, both as of `log_offset`. `store_time_ms` is that of
    the last record before `log_offset` (0 if there is none).

    The key index is durable up to `index_offset` in the log: all its older files, and of the file
    named `index_file` (0 means that there is none) the entries before number `index_count`. There
    were `index_files` files (-1 if not known); retention may have removed some of the first ones
    since.

    The log begins at `log_start` or before (-1 if not known). Retention writes this before it
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
        """Return the following checkpoint, with the next sequence number, but for the log alone.

        Its numbers for queues are -1, which no queues match, so the next start rebuilds them.
        """
        return self._replace(sequence=self.sequence + 1, queues=-1, units=-1)


class CheckpointContent(NamedTuple):
    """The content of the file `checkpoint`.

    `java_time_ms` is the store time up to which RocketMQ trusts its log and queues. `index_time_ms`
    is RocketMQ's field for the index (spec/store.md §5). Both are 0 if not known. `latest` is
    SluiceMQ's latest valid checkpoint, or None.
    """

    java_time_ms: int
    latest: Checkpoint | None
    index_time_ms: int = 0

    @property
    def is_checkpoint_current(self) -> bool:
        """Whether RocketMQ has stored nothing since SluiceMQ's last checkpoint was written."""
        latest = self.latest
        if latest is None:
            return False
        return self.java_time_ms <= max(0, latest.store_time_ms - _JAVA_MARGIN_MS)


def read_checkpoint(files: Files, path: str) -> CheckpointContent:
    """Read the file `checkpoint`. Missing bytes count as zeros.

    If the file is missing, the times are 0 and there is no checkpoint. Raises OSError.
    """
    if not files.exists(path):
        return CheckpointContent(0, None)
    with closing(files.open(path)) as file:
        content = file.pread(CHECKPOINT_BYTES, 0).ljust(CHECKPOINT_BYTES, b"\0")
    log_time_ms, queue_time_ms, index_time_ms, _, _ = _JAVA_FIELDS.unpack_from(content)
    java_time_ms = max(0, min(log_time_ms, queue_time_ms) - _JAVA_MARGIN_MS)
    # Checkpoints compare by their first field, the sequence number.
    latest = max(filter(None, parse_slots(content)), default=None)
    return CheckpointContent(java_time_ms, latest, index_time_ms)


def parse_slots(data: bytes) -> list[Checkpoint | None]:
    """Return the checkpoints in the two slots; None for an empty or torn slot.

    `data` are all bytes of the file. Slots of older versions are read too, with defaults for the
    fields that these lack.
    """
    return [_parse_slot(data, slot_start) for slot_start in SLOTS]


def _parse_slot(data: bytes, slot_start: int) -> Checkpoint | None:
    """Return the checkpoint in the slot at byte `slot_start`; None if the slot has no valid one."""
    magic, crc = _SLOT_HEAD.unpack_from(data, slot_start)
    layout = _LAYOUTS.get(magic)
    if layout is None:  # the slot is empty
        return None
    fields_start = slot_start + _SLOT_HEAD.size
    fields = data[fields_start : fields_start + layout.size]
    if zlib.crc32(fields) != crc:  # a crash has interrupted the write
        return None
    return Checkpoint(*layout.unpack(fields))


def write_checkpoint(
    files: Files, path: str, checkpoint: Checkpoint, *, index_time_ms: int = 0
) -> None:
    """Write a checkpoint to one of the two slots of the file, and sync the file.

    An even or odd `sequence` selects the slot; the other slot stays as it is. The file is created
    if necessary. RocketMQ's fields are written too: log and queues get the checkpoint's store time,
    but not a later time than `index_time_ms` (0 if not known). Everything that the checkpoint
    claims must be synced before. Raises OSError.
    """
    content = _LAYOUTS[_MAGIC].pack(*checkpoint)
    is_new = not files.exists(path)
    with closing(files.open(path, create=True)) as file:
        if file.size() != CHECKPOINT_BYTES:
            file.truncate(CHECKPOINT_BYTES)
        # RocketMQ reads the log again from this time, so its index must be complete before.
        time = min(checkpoint.store_time_ms, index_time_ms or checkpoint.store_time_ms)
        file.pwrite(_JAVA_FIELDS.pack(time, time, index_time_ms, 0, 0), 0)
        slot = _SLOT_HEAD.pack(_MAGIC, zlib.crc32(content)) + content
        file.pwrite(slot, SLOTS[checkpoint.sequence % len(SLOTS)])
        file.sync()
    if is_new:
        files.sync_directory(path.rpartition("/")[0])


class CheckpointFile:
    """The file `checkpoint` of a store.

    `initial` is its content at the start of this process. `written` is the last checkpoint that
    this process has written, or None. The log's start in it never decreases, because retention may
    have written a later one than that of a checkpoint which was requested before.
    """

    def __init__(self, files: Files, path: str, initial: CheckpointContent) -> None:
        """Create a writer of checkpoints to the file at `path`.

        `initial` is the present content of the file.
        """
        self._files = files
        self._path = path
        self._lock = threading.RLock()
        latest = initial.latest
        self._sequence = latest.sequence if latest is not None else 0
        self.initial = initial
        self.written: Checkpoint | None = None
        self.index_time_ms = initial.index_time_ms
        """RocketMQ's field for the index that the next write stores (0 if not known)."""

    def write(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint with the next sequence number, and sync it. Raises OSError.

        After a write that fails, the next one uses the same slot, so the other slot stays valid.
        """
        with self._lock:
            log_start = checkpoint.log_start
            if self.written is not None:
                log_start = max(log_start, self.written.log_start)
            numbered = checkpoint._replace(sequence=self._sequence + 1, log_start=log_start)
            write_checkpoint(self._files, self._path, numbered, index_time_ms=self.index_time_ms)
            self._sequence = numbered.sequence
            self.written = numbered

    def remove(self) -> None:
        """Remove the file durably, so that no start trusts log, queues or index. Raises OSError."""
        with self._lock:
            self.written = None
            if self._files.exists(self._path):
                self._files.remove(self._path)
                self._files.sync_directory(self._path.rpartition("/")[0])

    def set_log_start(self, log_start: int) -> None:
        """Write, durably, that the log begins at `log_start`. Raises OSError.

        Does nothing if this process has not written a checkpoint.
        """
        with self._lock:
            if self.written is not None and self.written.log_start < log_start:
                self.write(self.written._replace(log_start=log_start))

    def distrust_queues(self) -> None:
        """Make sure, durably, that no later start trusts the queues that this start has found.

        Writes a checkpoint that describes only the log. If the file had no checkpoint of SluiceMQ,
        it is removed instead. Call this before the queues are rebuilt. Raises OSError.
        """
        checkpoint = self.initial.latest
        if checkpoint is not None:
            write_checkpoint(self._files, self._path, checkpoint.without_queues())
        else:
            self.remove()

    def write_index_time(self, time_ms: int) -> None:
        """Write RocketMQ's time of the index into the file, without a sync.

        Later checkpoints contain it too. If the file has no checkpoint of SluiceMQ, it does not
        change. At a start after a crash RocketMQ deletes index files that are newer than this time,
        so call this before such a file is written. Raises OSError.
        """
        with self._lock:
            self.index_time_ms = time_ms
            if not self._files.exists(self._path):
                return
            with closing(self._files.open(self._path)) as file:
                content = file.pread(CHECKPOINT_BYTES, 0).ljust(CHECKPOINT_BYTES, b"\0")
                if any(parse_slots(content)):
                    file.pwrite(struct.pack(">q", time_ms), _INDEX_TIME_AT)


# --- other small files


def write_abort(files: Files, path: str, *, is_followed: bool = False) -> None:
    """Write the file `abort` at `path`, durably. It marks the store as open.

    It contains the id of this process, then " slave" if `is_followed` (a master writes the log).
    Raises OSError.
    """
    content = str(process_id()).encode()
    if is_followed:
        content += _FOLLOWED_SUFFIX
    with closing(files.open(path, create=True)) as file:
        file.truncate(len(content))
        file.pwrite(content, 0)
        file.sync()
    files.sync_directory(path.rpartition("/")[0])


def was_slave(files: Files, path: str) -> bool:
    """Return whether the file `abort` at `path` says that a master wrote the log.

    Returns False if there is no such file. Raises OSError.
    """
    if not files.exists(path):
        return False
    with closing(files.open(path)) as file:
        return file.pread(file.size(), 0).endswith(_FOLLOWED_SUFFIX)


def remove_abort(files: Files, path: str) -> None:
    """Remove the file `abort`, durably. Call this only when everything is on disk."""
    files.remove(path)
    files.sync_directory(path.rpartition("/")[0])


class DeletedTopics:
    """The deleted topics whose records are still in the log.

    `end_by_topic` maps a topic to the position before which its records are dead. `is_doubtful` is
    set if writing an entry failed and the next start may find it nevertheless.
    """

    def __init__(self, files: Files, path: str, ends: dict[str, int] | None = None) -> None:
        """Create a table of deleted topics whose file is at `path`.

        `ends` is the content of the file, from topic to position of its deletion; None means no
        topic.
        """
        self._files = files
        self._path = path
        self.end_by_topic = ends or {}
        self.is_doubtful = False

    @classmethod
    def load(cls, files: Files, root: str) -> "DeletedTopics":
        """Return the table in `config/deletedTopics.json` of the store in `root`.

        It is empty if there is no such file. If the file is damaged, it is empty too, and a warning
        is logged. Raises OSError.
        """
        path = f"{root}/config/deletedTopics.json"
        try:
            return cls(files, path, load_text(files, path, _parse_deleted_topics))
        except StoreDamagedError as error:
            logger.warning("%s Deleted topics may come back.", error.fact)
            return cls(files, path)

    def add(self, topic: str, end: int, log_start: int) -> None:
        """Note durably that the records of a topic before position `end` of the log are dead.

        Also removes topics of which the log, which begins at `log_start`, has no dead records any
        more. Raises OSError. Then the topic is not noted in this process, and the next start does
        not find it either, unless `is_doubtful` is set.
        """
        # Keep the topics of which the log still has dead records.
        new_ends = {
            name: position for name, position in self.end_by_topic.items() if position > log_start
        }
        new_ends[topic] = end

        old_text = json.dumps(self.end_by_topic, indent=1)
        new_text = json.dumps(new_ends, indent=1)
        try:
            replace_text(self._files, self._path, new_text)
        except OSError:
            self.is_doubtful = True
            # If the new text is there, only syncing the file's name failed.
            if read_text(self._files, self._path) == new_text:
                replace_text(self._files, self._path, old_text)
            # Not reached if reading or writing fails again: then the entry stays doubtful.
            self.is_doubtful = False
            raise
        self.end_by_topic = new_ends

    def cut(self, end: int) -> None:
        """Lower all positions to `end`, the new end of the log, so that later records are live.

        The file is written only if a position changes. Raises OSError.
        """
        if all(topic_end <= end for topic_end in self.end_by_topic.values()):
            return
        self.end_by_topic = {
            topic: min(topic_end, end) for topic, topic_end in self.end_by_topic.items()
        }
        replace_text(self._files, self._path, json.dumps(self.end_by_topic, indent=1))

    def is_live(self, topic: str, position: int) -> bool:
        """Return whether the record at `position` belongs to the topic as it exists now."""
        return position >= self.end_by_topic.get(topic, 0)


def _parse_deleted_topics(text: str) -> dict[str, int]:
    """Parse the text of `deletedTopics.json`: topic -> position. Raises ValueError or TypeError."""
    end_by_topic = json.loads(text)
    if not isinstance(end_by_topic, dict):
        raise TypeError("no object of topics")
    return {str(topic): int(end) for topic, end in end_by_topic.items()}


# --- checking directories


def check_directory(files: Files, config: StoreConfig) -> None:
    """Raise StoreError or StoreDamagedError if the directory cannot be opened as a store.

    Changes nothing. Reports files in place of directories, an interrupted `restore`, and formats
    that SluiceMQ does not support (DLedger, RocksDB). Raises OSError for what cannot be read.
    """
    root = config.root
    for path in (
        config.commit_log_path,
        config.consume_queue_path,
        f"{root}/index",
        f"{root}/config",
    ):
        _require_no_file(files, path)
    if files.exists(f"{root}/{RESTORING_FILE}"):
        raise StoreError(
            f"{root} contains an incomplete store: `sluice store restore` was interrupted.",
            fix="Run that command again with the same directories.",
        )
    _require_supported_format(files, root)


def _require_no_file(files: Files, path: str) -> None:
    """Raise StoreDamagedError if there is a file at `path`, where a directory belongs.

    Returns if there is nothing at `path`. Raises OSError.
    """
    if not files.exists(path) or files.names(path):
        return
    # An empty directory, or a file: only opening it shows which.
    try:
        files.open(path).close()
    except IsADirectoryError:
        return
    raise StoreDamagedError(
        f"{path} must be a directory, but is a file.",
        fix="Move the file away, and restore the directory from a copy if there was one.",
    )


def _require_supported_format(files: Files, root: str) -> None:
    """Raise StoreError if the store in `root` is kept in DLedger or RocksDB. Raises OSError."""
    for name in files.names(root):
        if name.startswith("dledger-") and files.names(f"{root}/{name}"):
            raise StoreError(
                f"{root}/{name} is a log of DLedger (enableDLegerCommitLog), which SluiceMQ does"
                " not support.",
                fix="Copy the topics to a broker without DLedger using RocketMQ's tools, or set"
                " storePathRootDir of this broker to another directory.",
            )
    if files.names(f"{root}/{ROCKSDB_QUEUES}"):
        raise StoreError(
            f"{root}/{ROCKSDB_QUEUES} exists, so RocketMQ keeps the queues of this store in RocksDB"
            " (storeType=defaultRocksDB), which SluiceMQ does not support.",
            fix="Move that directory away. The queues are then rebuilt from the commit log.",
        )
    settings_path = f"{root}/config"
    for name in files.names(settings_path):
        if "CURRENT" in files.names(f"{settings_path}/{name}"):  # every RocksDB has that file
            raise StoreError(
                f"{settings_path}/{name} is a RocksDB table, which SluiceMQ does not support.",
                fix="Export it with `mqadmin rocksDBConfigToJson`, then move the directory away.",
            )


def not_a_store_error(files: Files, root: str, log_paths: str, option: str) -> StoreError:
    """Make the error for a directory `root` without a commit log.

    It names the probable mistake: a missing directory, a directory below or above the store, or
    queues in RocksDB. `log_paths` is where the log was expected. `option` is the option or setting
    that says where the log is.
    """
    fact = f"{root} is not a message store"
    if not files.exists(root):
        return StoreError(
            f"the directory {root!r} does not exist.", fix="Pass the directory of a message store."
        )
    root_names = files.names(root)
    if any(map(is_segment_name, root_names)):
        return StoreError(
            f"{fact}: it contains the files of one part of a store.",
            fix="Specify the directory above it (the value of storePathRootDir).",
        )
    for name in root_names:
        if files.names(f"{root}/{name}/{LOG_DIRECTORY}"):
            return StoreError(f"{fact}.", fix=f"Specify {root}/{name}, which is one.")
    if ROCKSDB_QUEUES in root_names:
        return StoreError(
            f"{fact}: it keeps its queues in RocksDB (storeType=defaultRocksDB) and contains no"
            " commit log.",
            fix=f"Specify the log with {option}; queues in RocksDB cannot be read.",
        )
    return StoreError(
        f"{fact}: {log_paths} contains no commit log.",
        fix="Specify the directory that contains commitlog, consumequeue and config (the value of"
        f" storePathRootDir). If the log is elsewhere, specify its directory with {option} (the"
        " value of storePathCommitLog).",
    )


def open_error(root: str, error: OSError) -> StoreError:
    """Make the StoreError for an OSError that occurred while the store in `root` was opened."""
    reason = str(error.strerror or error)
    if error.filename:
        reason += f" ({error.filename})"
    return StoreError(f"The store in {root} cannot be opened: {reason}.", fix=fix_of(error))


def detect_file_sizes(
    config: StoreConfig, files: Files, option: str = "storePathCommitLog"
) -> StoreConfig:
    """Return a copy of `config` with the sizes of the existing files: log, queues and timer log.

    A copied store does not contain the settings mappedFileSizeCommitLog, …ConsumeQueue and
    …TimerLog (spec/store.md §1). A configured size stays if any file has it, or if there is no
    file. Otherwise the most frequent size is used; opening the store then reports files of another
    size.

    Raises StoreError if `config.root` is not a store; `option` is the option or setting that says
    where the log is. Raises OSError.
    """
    log_paths = list(_iter_segment_paths(files, config.commit_log_path))
    if not log_paths:
        raise not_a_store_error(files, config.root, config.commit_log_path, option)
    queue_paths = islice(_iter_queue_paths(files, config.consume_queue_path), QUEUE_FILES_MAX)
    timer_paths = _iter_segment_paths(files, f"{config.root}/timerlog")
    return replace(
        config,
        commit_log_file_bytes=_detect_size(files, log_paths, config.commit_log_file_bytes),
        consume_queue_file_bytes=_detect_size(files, queue_paths, config.consume_queue_file_bytes),
        timer_log_file_bytes=_detect_size(files, timer_paths, config.timer_log_file_bytes),
    )


def _iter_segment_paths(files: Files, directory: str) -> Iterator[str]:
    """Yield the paths of the files of a log or queue in `directory`, in the order of their names.

    Files with other names are left out.
    """
    for name in files.names(directory):
        if is_segment_name(name):
            yield f"{directory}/{name}"


def _iter_queue_paths(files: Files, directory: str) -> Iterator[str]:
    """Yield the paths of the files of all queues. `directory` contains the topics."""
    for topic in files.names(directory):
        for queue_id in files.names(f"{directory}/{topic}"):
            yield from _iter_segment_paths(files, f"{directory}/{topic}/{queue_id}")


def _detect_size(files: Files, paths: Iterable[str], configured_size: int) -> int:
    """Return the configured size if a file has it or there is no file, else the most frequent size.

    Files of 0 bytes do not count. Raises OSError.
    """
    size_counts: Counter[int] = Counter()
    for path in paths:
        with closing(files.open(path)) as file:
            size_counts[file.size()] += 1
    del size_counts[0]  # left by a crash that interrupted the file's creation
    if not size_counts or configured_size in size_counts:
        return configured_size
    return size_counts.most_common(1)[0][0]


def format_bytes(size: float) -> str:
    """Format a number of bytes with a binary unit: 1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.1f} {unit}"


def format_uptime(seconds: int) -> str:
    """Format a duration as RocketMQ does: 90 -> `[ 0 days, 0 hours, 1 minutes, 30 seconds ]`."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"
