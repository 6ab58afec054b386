"""Find the files of a store directory, without its configuration.

The offline tools (`sluice store info`, `verify`, `repair`, `dump`) open stores of any origin and in
any state. Therefore this module takes nothing from settings: the sizes of files are those that the
files have. A missing file, or a file of an unexpected size, is a fact for the caller to report and
not an error, and names that do not belong to a store are ignored (spec/store.md §1).

    StoreLayout     all files of a store: the log, the queues of each type, index files, documents
    FileSequence    the files of the commit log or of one queue, as one sequence of bytes

All reads use `pread`. A bad sector of a failing disk then raises an OSError that contains the path;
reading it through a memory map would kill the process.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Final, NamedTuple

from sluicemq.errors import StoreError
from sluicemq.files import SYSTEM_FILES, File, Files
from sluicemq.store.directory import LOG_DIRECTORY, not_a_store_error
from sluicemq.store.segments import is_segment_name

QueueKey = tuple[str, int]
"""The topic and queue id of a queue."""

QUEUES: Final = "consumequeue"
EXTENSIONS: Final = "consumequeue_ext"
BATCH_QUEUES: Final = "batchconsumequeue"
INDEX: Final = "index"
CONFIG: Final = "config"
CHECKPOINT: Final = "checkpoint"
ABORT: Final = "abort"
MANIFEST: Final = "backup.json"
"""The file by which a directory is a backup (`store.tools.backup`), not a store."""
READ_BYTES: Final = 1 << 20
"""`FileSequence.iter_data` reads at most this many bytes at once."""
_INDEX_NAME_DIGITS: Final = 17
_BLOCK_BYTES: Final = 4096


class SegmentFile(NamedTuple):
    """One file of a sequence. It contains the bytes [base, base + size) of the sequence."""

    path: str
    base: int
    size: int

    @property
    def end(self) -> int:
        """The position behind the last byte of the file."""
        return self.base + self.size


class FileSequence:
    """Files that together are one sequence of bytes, with gaps where files are missing.

    The name of each file is the position of its first byte in the sequence. A position is a byte
    offset in the sequence. The sequence opens one file at a time, when it is read.
    """

    def __init__(self, files: Files, segments: Iterable[SegmentFile]) -> None:
        """Create a sequence of these files, which may be in any order.

        To find the files of a directory, use `load`.
        """
        self._files = files
        self.segments = sorted(segments, key=lambda segment: segment.base)
        self._bases = [segment.base for segment in self.segments]
        self._open: tuple[str, File] | None = None
        # The pool of descriptors closes the sequences first that were not read lately.
        self.is_used = False

    @classmethod
    def load(cls, files: Files, directories: Iterable[str]) -> "FileSequence":
        """Return the sequence of the files in one or several directories.

        Files whose names are not positions are ignored. So are empty files, which a crash leaves
        while a file is being created.
        """
        segments = []
        for directory in directories:
            for name in files.names(directory):
                if is_segment_name(name):
                    path = f"{directory}/{name}"
                    size = file_size(files, path)
                    if size:
                        segments.append(SegmentFile(path, int(name), size))
        return cls(files, segments)

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.segments)

    @property
    def start(self) -> int:
        """The position of the first file, or 0 without files."""
        return self.segments[0].base if self.segments else 0

    @property
    def end(self) -> int:
        """The position behind the last file, including its unused part; 0 without files."""
        return self.segments[-1].end if self.segments else 0

    @property
    def size_bytes(self) -> int:
        """The sum of the sizes of all files."""
        return sum(segment.size for segment in self.segments)

    @property
    def usual_file_bytes(self) -> int:
        """The most frequent size of the files, or 0 without files."""
        return find_usual_file_bytes([self])

    def find_segment_index(self, position: int) -> int | None:
        """Return the index in `segments` of the file that contains `position`, or None."""
        index = bisect_right(self._bases, position) - 1
        return index if index >= 0 and position < self.segments[index].end else None

    def read(self, position: int, size: int) -> bytes:
        """Read up to `size` bytes from `position` on, across files.

        Fewer bytes are returned if a file is missing or the sequence ends. Raises OSError.
        """
        pieces = []
        bytes_left = size
        while bytes_left > 0:
            index = self.find_segment_index(position)
            if index is None:
                break
            segment = self.segments[index]
            piece_bytes = min(bytes_left, segment.end - position)
            piece = self._open_file(segment.path).pread(piece_bytes, position - segment.base)
            if not piece:
                break
            pieces.append(piece)
            position += len(piece)
            bytes_left -= len(piece)
        if len(pieces) == 1:
            return pieces[0]  # without a copy
        return b"".join(pieces)

    def data_start(self, position: int) -> int | None:
        """Return the first position at or after `position` whose byte may not be zero.

        Only the file that contains `position` is examined. Returns None if its rest is a hole (a
        part that was never written), or if no file contains `position`.
        """
        index = self.find_segment_index(position)
        if index is None:
            return None
        segment = self.segments[index]
        offset_in_file = self._open_file(segment.path).data_start(position - segment.base)
        if offset_in_file is None or offset_in_file >= segment.size:
            return None
        return segment.base + offset_in_file

    def iter_data(
        self, start: int = 0, end: int | None = None, align: int = 1
    ) -> Iterator[tuple[int, bytes]]:
        """Yield (position, bytes) for the parts of [start, end) that may not be zero.

        Holes (parts that were never written) are skipped. If `end` is None, it is the end of the
        sequence. Each piece is within one file, and begins at `start`, at the begin of the file or
        at a multiple of `align`. Its length is a multiple of `align`; what remains at the end of a
        file is left out.
        """
        for segment in self.segments:
            position = max(segment.base, start)
            range_end = segment.end if end is None else min(segment.end, end)
            while position < range_end:
                data_start = self.data_start(position)
                if data_start is None or data_start >= range_end:
                    break  # only holes follow in this file
                position = max(position, data_start - data_start % align)
                piece = self.read(position, min(READ_BYTES, range_end - position))
                if len(piece) < align:
                    break
                whole_bytes = len(piece) // align * align
                yield position, piece[:whole_bytes]
                position += whole_bytes

    def _open_file(self, path: str) -> File:
        """Return the open file at `path`.

        A sequence has at most one open file: another one is closed first.
        """
        self.is_used = True
        if self._open is None or self._open[0] != path:
            self.release_descriptor()
            self._open = (path, self._files.open(path))
            self._files.pool.add(self)
        return self._open[1]

    def close(self) -> None:
        """Close the file that is open, and leave the pool of descriptors."""
        self._files.pool.remove(self)
        self.release_descriptor()

    def release_descriptor(self) -> None:
        """Close the file that is open. The next read opens it again."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


class StoreLayout:
    """The files of one store directory, as they were when it was created with `find`.

    `log` is the commit log. `queues`, `extensions` (ConsumeQueueExt) and `batch_queues` map the
    topic and queue id of a queue to its files. `indexes` are the paths of the index files, oldest
    first.
    """

    def __init__(self, files: Files, root: str, log_paths: list[str], queue_path: str) -> None:
        """List the files of a store. Callers use `find`, which checks that there is a commit log.

        `log_paths` are the directories of the commit log, and `queue_path` is the directory of the
        queues.
        """
        self.files = files
        self.root = root
        self.log_paths = log_paths
        self.queue_path = queue_path
        self.log = FileSequence.load(files, log_paths)
        self.queues = dict(_iter_queues(files, queue_path))
        self.extensions = dict(_iter_queues(files, f"{root}/{EXTENSIONS}"))
        self.batch_queues = dict(_iter_queues(files, f"{root}/{BATCH_QUEUES}"))
        self.indexes = []
        for name in files.names(f"{root}/{INDEX}"):
            is_index_name = len(name) == _INDEX_NAME_DIGITS and name.isascii() and name.isdigit()
            if is_index_name:
                self.indexes.append(f"{root}/{INDEX}/{name}")

    @classmethod
    def find(
        cls,
        root: str,
        *,
        commit_log_path: str = "",
        consume_queue_path: str = "",
        files: Files = SYSTEM_FILES,
    ) -> "StoreLayout":
        """List the files of the store in the directory `root`.

        `commit_log_path` is the directory of the commit log (default: `root`/commitlog), or several
        directories separated by commas, as in RocketMQ's storePathCommitLog. `consume_queue_path`
        is the directory of the queues (default: `root`/consumequeue).

        Raises StoreError if the commit log has no files, or if `root` is a backup.
        """
        root = root.rstrip("/") or "/"
        logs = [path.rstrip("/") for path in commit_log_path.split(",") if path]
        layout = cls(
            files,
            root,
            logs or [f"{root}/{LOG_DIRECTORY}"],
            consume_queue_path.rstrip("/") or f"{root}/{QUEUES}",
        )
        if files.exists(f"{root}/{MANIFEST}"):
            raise StoreError(
                f"{root} is a backup, which has no queues and no index.",
                fix=f"Restore it with `sluice store restore {root} DIR`, and use DIR.",
            )
        if not len(layout.log):
            raise not_a_store_error(files, root, ", ".join(layout.log_paths), "--commit-log")
        return layout

    @property
    def was_interrupted(self) -> bool:
        """Whether the file `abort` exists: a broker is running, or was not shut down cleanly."""
        return self.files.exists(f"{self.root}/{ABORT}")

    @property
    def checkpoint_path(self) -> str:
        """The path of the checkpoint, whether it exists or not."""
        return f"{self.root}/{CHECKPOINT}"

    def document_paths(self) -> list[str]:
        """Return the paths of everything in config/, without backups and temporary files."""
        directory = f"{self.root}/{CONFIG}"
        return [
            f"{directory}/{name}"
            for name in self.files.names(directory)
            if not name.endswith((".bak", ".tmp"))
        ]

    def shorten_path(self, path: str) -> str:
        """Return a path for display: relative to the store if it is below its directory."""
        return path.removeprefix(self.root + "/")

    def close(self) -> None:
        """Close all files that are open. Reading a sequence opens its files again."""
        for sequence in (self.log, *self.queues.values(), *self.extensions.values()):
            sequence.close()
        for sequence in self.batch_queues.values():
            sequence.close()


def find_usual_file_bytes(sequences: Iterable[FileSequence]) -> int:
    """Return the most frequent size of the files of `sequences`, or 0 without files.

    If several sizes are equally frequent, the largest of them is returned.
    """
    counts: Counter[int] = Counter()
    for sequence in sequences:
        counts.update(segment.size for segment in sequence.segments)
    return max(counts, key=lambda size: (counts[size], size), default=0)


def _iter_queues(files: Files, directory: str) -> Iterator[tuple[QueueKey, FileSequence]]:
    """Yield ((topic, queue id), files) for each queue in `directory`/TOPIC/QUEUE_ID.

    Bytes of a topic that are not UTF-8 are replaced. Other names than queue ids are ignored.
    """
    for topic in files.names(directory):
        for name in files.names(f"{directory}/{topic}"):
            if name.isascii() and name.isdigit():
                printable_topic = topic.encode("utf-8", "surrogateescape").decode(
                    "utf-8", "replace"
                )
                sequence = FileSequence.load(files, [f"{directory}/{topic}/{name}"])
                yield (printable_topic, int(name)), sequence


def read_or_zeros(read: Callable[[int, int], bytes], position: int, size: int) -> bytes:
    """Return `read(position, size)`, but with zeros for blocks that the disk cannot read.

    If `read` raises OSError, the range is halved, until the blocks of 4,096 bytes that cannot be
    read are found.
    """
    try:
        return read(position, size)
    except OSError:
        if size <= _BLOCK_BYTES:
            return bytes(size)
        half_bytes = max(_BLOCK_BYTES, size // 2 // _BLOCK_BYTES * _BLOCK_BYTES)
        second_half = read_or_zeros(read, position + half_bytes, size - half_bytes)
        return read_or_zeros(read, position, half_bytes).ljust(half_bytes, b"\0") + second_half


def file_size(files: Files, path: str) -> int:
    """Return the size of a file in bytes, or 0 if `path` does not exist or is a directory."""
    try:
        with closing(files.open(path)) as file:
            return file.size()
    except (FileNotFoundError, IsADirectoryError):
        return 0


def read_file(files: Files, path: str, size_max: int | None = None) -> bytes | None:
    """Return the bytes of a file, but at most the first `size_max`.

    Returns None if `path` does not exist or is a directory.
    """
    try:
        with closing(files.open(path)) as file:
            size = file.size()
            if size_max is not None:
                size = min(size, size_max)
            return file.pread(size, 0)
    except (FileNotFoundError, IsADirectoryError):
        return None
