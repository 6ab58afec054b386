"""What lies where in a store directory, found from the files themselves.

Offline tools look at stores of any kind and any state, so nothing here believes a setting: sizes
of files are those of the files, a file that is missing or has another size is a fact to be told
and not an error, and names that do not belong are passed over (spec/store.md §1). Everything is
read with pread: a bad sector of a failing disk is then an OSError with a path, where a map would
kill the process.

    Series        the files of one directory (or several, storePathCommitLog=a,b), each named by
                  the position of its first byte, as one sequence with possible gaps
    StoreLayout   the log, the queues by kind, index files, documents
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from sluicemq.files import SYSTEM_FILES, File, Files
from sluicemq.store.directory import LOG, no_store
from sluicemq.store.segments import is_segment_name

QueueKey = tuple[str, int]

QUEUES: Final = "consumequeue"
EXTENSIONS: Final = "consumequeue_ext"
BATCH_QUEUES: Final = "batchconsumequeue"
INDEX: Final = "index"
CONFIG: Final = "config"
CHECKPOINT: Final = "checkpoint"
ABORT: Final = "abort"
_INDEX_NAME_DIGITS: Final = 17


class SeriesFile(NamedTuple):
    """One file: the bytes [base, base + size) of its series."""

    path: str
    base: int
    size: int

    @property
    def end(self) -> int:
        return self.base + self.size


class Series:
    """Files that together are one long byte sequence, or should be."""

    def __init__(self, files: Files, items: Iterable[SeriesFile]) -> None:
        self._files = files
        self.items = sorted(items, key=lambda item: item.base)
        self._bases = [item.base for item in self.items]
        self._open: tuple[str, File] | None = None
        self.is_used = False  # lately, for the pool of descriptors

    @classmethod
    def load(cls, files: Files, directories: Iterable[str]) -> "Series":
        """The files of one directory or several. A file of no bytes is the trace of a crash at
        its creation and is left out."""
        found = []
        for directory in directories:
            for name in files.names(directory):
                if is_segment_name(name):
                    path = f"{directory}/{name}"
                    size = file_size(files, path)
                    if size:
                        found.append(SeriesFile(path, int(name), size))
        return cls(files, found)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def start(self) -> int:
        return self.items[0].base if self.items else 0

    @property
    def end(self) -> int:
        """The end of the last file, not of what is written in it."""
        return self.items[-1].end if self.items else 0

    @property
    def size_bytes(self) -> int:
        return sum(item.size for item in self.items)

    @property
    def file_bytes(self) -> int:
        """The size that most files have; 0 without files."""
        counted = Counter(item.size for item in self.items)
        return max(counted, key=lambda size: (counted[size], size), default=0)

    def index_at(self, position: int) -> int | None:
        """Which file holds the position."""
        index = bisect_right(self._bases, position) - 1
        return index if index >= 0 and position < self.items[index].end else None

    def read(self, position: int, size: int) -> bytes:
        """Up to `size` bytes; fewer where the sequence has a gap or ends."""
        pieces = []
        while size > 0 and (index := self.index_at(position)) is not None:
            item = self.items[index]
            data = self._file(item.path).pread(min(size, item.end - position), position - item.base)
            if not data:
                break
            pieces.append(data)
            position += len(data)
            size -= len(data)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def data_start(self, position: int) -> int | None:
        """The first position in the same file, from this one on, that may hold other bytes than
        zeros; None when there is none."""
        index = self.index_at(position)
        if index is None:
            return None
        item = self.items[index]
        found = self._file(item.path).data_start(position - item.base)
        return item.base + found if found is not None and found < item.size else None

    def _file(self, path: str) -> File:
        self.is_used = True
        if self._open is None or self._open[0] != path:
            self.let_go()
            self._open = (path, self._files.open(path))
            self._files.pool.enter(self)
        return self._open[1]

    def close(self) -> None:
        self._files.pool.leave(self)
        self.let_go()

    def let_go(self) -> None:
        """Close the file; the next read opens it again."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


class StoreLayout:
    """One store directory. Make one with `StoreLayout.find`."""

    def __init__(self, files: Files, root: str, log_paths: list[str], queue_path: str) -> None:
        self.files = files
        self.root = root
        self.log_paths = log_paths
        self.queue_path = queue_path
        self.log = Series.load(files, log_paths)
        self.queues = dict(_queues(files, queue_path))
        self.extensions = dict(_queues(files, f"{root}/{EXTENSIONS}"))
        self.batch_queues = dict(_queues(files, f"{root}/{BATCH_QUEUES}"))
        self.indexes = [
            f"{root}/{INDEX}/{name}"
            for name in files.names(f"{root}/{INDEX}")
            if len(name) == _INDEX_NAME_DIGITS and name.isascii() and name.isdigit()
        ]

    @classmethod
    def find(
        cls,
        root: str,
        *,
        commit_log_path: str = "",
        consume_queue_path: str = "",
        files: Files = SYSTEM_FILES,
    ) -> "StoreLayout":
        """`commit_log_path` may name several directories, separated by commas, as RocketMQ's
        storePathCommitLog. Raises StoreError, with the cure, when this is no store."""
        root = root.rstrip("/") or "/"
        logs = [path.rstrip("/") for path in commit_log_path.split(",") if path]
        layout = cls(
            files,
            root,
            logs or [f"{root}/{LOG}"],
            consume_queue_path.rstrip("/") or f"{root}/{QUEUES}",
        )
        if not len(layout.log):
            raise no_store(files, root, ", ".join(layout.log_paths), "--commit-log")
        return layout

    @property
    def was_interrupted(self) -> bool:
        """The file `abort` is there: a broker is running, or ended without an orderly stop."""
        return self.files.exists(f"{self.root}/{ABORT}")

    @property
    def checkpoint_path(self) -> str:
        return f"{self.root}/{CHECKPOINT}"

    def documents(self) -> list[str]:
        """Paths of what lies in config/, without the previous editions."""
        directory = f"{self.root}/{CONFIG}"
        return [
            f"{directory}/{name}"
            for name in self.files.names(directory)
            if not name.endswith((".bak", ".tmp"))
        ]

    def name_of(self, path: str) -> str:
        """A path as it is shown: relative to the store where it lies inside."""
        return path.removeprefix(self.root + "/")

    def close(self) -> None:
        for series in (self.log, *self.queues.values(), *self.extensions.values()):
            series.close()
        for series in self.batch_queues.values():
            series.close()


def _queues(files: Files, directory: str) -> Iterator[tuple[QueueKey, Series]]:
    for topic in files.names(directory):
        for name in files.names(f"{directory}/{topic}"):
            if name.isascii() and name.isdigit():
                shown = topic.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                yield (shown, int(name)), Series.load(files, [f"{directory}/{topic}/{name}"])


def file_size(files: Files, path: str) -> int:
    """The size of a file; 0 when it is not there (any more)."""
    try:
        file = files.open(path)
    except (FileNotFoundError, IsADirectoryError):
        return 0
    try:
        return file.size()
    finally:
        file.close()


def read_file(files: Files, path: str, size_max: int | None = None) -> bytes | None:
    """The bytes of a whole file, or its first `size_max`; None when it is not there."""
    try:
        file = files.open(path)
    except (FileNotFoundError, IsADirectoryError):
        return None
    try:
        size = file.size()
        return file.pread(size if size_max is None else min(size, size_max), 0)
    finally:
        file.close()
