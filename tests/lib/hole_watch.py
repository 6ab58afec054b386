"""Find reads through a map that touch a hole of a sparse file.

On tmpfs such a read allocates a page, which fails with SIGBUS when the file system is full. The
allocation also shows: `HoleWatch` is the real file system with a record of all writes, and
`pages_from_reads` names the pages that are allocated although nothing wrote them.
"""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sluicemq.files import Access, File, SystemFile, SystemFiles

PAGE: Final = mmap.PAGESIZE
TMPFS: Final = Path("/dev/shm")


class _WatchedFile(SystemFile):
    """A file whose written pages are recorded in `written`."""

    __slots__ = ("_written",)

    def __init__(self, path: str, descriptor: int, written: set[int]) -> None:
        super().__init__(path, descriptor)
        self._written = written

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        super().pwrite(data, offset)
        if len(data):
            self._written.update(range(offset // PAGE, (offset + len(data) - 1) // PAGE + 1))


class HoleWatch(SystemFiles):
    """The file system of this machine, which knows the pages that may hold data."""

    __slots__ = ("_pages", "_root")

    def __init__(self, root: str) -> None:
        """Take the pages that the files below `root` have now as written."""
        super().__init__()
        self._root = root
        self._pages = {str(path): set(allocated(path)) for path in files_below(root)}

    def open(self, path: str, *, create: bool = False, access: Access | None = None) -> File:
        super().open(path, create=create, access=access).close()
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return _WatchedFile(path, descriptor, self._pages.setdefault(path, set()))

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._pages[new] = self._pages.pop(old, set())

    def pages_from_reads(self) -> list[tuple[str, int]]:
        """Return (path below the root, page number) of each page that only a read can have
        allocated."""
        return [
            (str(path.relative_to(self._root)), page)
            for path in files_below(self._root)
            for page in allocated(path)
            if page not in self._pages.get(str(path), set())
        ]


def files_below(root: str) -> list[Path]:
    """Return the regular files below `root`, sorted."""
    return sorted(path for path in Path(root).rglob("*") if path.is_file())


def allocated(path: Path) -> Iterator[int]:
    """Yield the numbers of the pages of a file that are not holes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        end, size = 0, os.fstat(descriptor).st_size
        while end < size:
            try:
                start = os.lseek(descriptor, end, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left
                return
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
            yield from range(start // PAGE, -(-end // PAGE))
    finally:
        os.close(descriptor)
