"""The file port over a store that must not change: reads from the disk, writes into memory.

What the product does above it (recovery, building queues and an index, saving tables) works as
ever, and is gone with the process. Nothing below is written, locked, or even opened for writing.

    a file that is only read      the file below, by pread
    a file that is viewed or      one private map of it (copy on write): its pages are the file's
    written                       until they are written, then anonymous memory, a page at a time
    a file that is made or        an anonymous map of its size, which takes no memory where nothing
    changes its size              was written: a new log file of 1 GiB costs nothing
    names                         a table of what was made, renamed and removed since the start

A private map is why this module may map for writing: nothing of it reaches a disk, so there is no
SIGBUS of a full one. (Who cuts the files below while they are open gets what he asks for, as with
any reader.) Views show what `pwrite` writes later; after a change of size they stay what they were.

Directories are made and removed, never renamed: nobody does.
"""

import contextlib
import errno
import mmap
import os
import stat
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Final

from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.files import (
    FOR_OWNER,
    SYSTEM_FILES,
    Access,
    File,
    Files,
    SystemFile,
    SystemFiles,
)
from sluicemq.files.descriptors import DescriptorPool

_NO_RESERVE: Final = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE: address space, not memory, is what an untouched map takes."""
_PRIVATE: Final = mmap.MAP_PRIVATE | _NO_RESERVE
_ANONYMOUS: Final = _PRIVATE | mmap.MAP_ANONYMOUS
_COPY_BYTES: Final = 1 << 20


def _new_map(size: int) -> mmap.mmap:
    """Zeros, which take memory by pages of 4 KiB: a huge page would take 2 MiB for one byte."""
    made = mmap.mmap(-1, size, flags=_ANONYMOUS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with contextlib.suppress(OSError, AttributeError):
        made.madvise(mmap.MADV_NOHUGEPAGE)
    return made


class ReadOnlyFiles(SystemFiles):
    """The file system of this machine for who must not change it: the way under an overlay."""

    __slots__ = ()

    def open(self, path: str, *, create: bool = False, access: Access | None = None) -> File:
        """Not even opened for writing. `create` of a file that is missing raises OSError."""
        if create and not self.exists(path):
            raise _read_only(path)
        file = SystemFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        if stat.S_ISDIR(os.fstat(file.fileno()).st_mode):  # the kernel refuses writers alone
            file.close()
            raise _error(errno.EISDIR, path)
        return file

    def make_directory(self, path: str, *, durable: bool = True) -> None:
        raise _read_only(path)

    def remove(self, path: str) -> None:
        raise _read_only(path)

    def rename(self, old: str, new: str) -> None:
        raise _read_only(old)

    def sync_directory(self, path: str) -> None:
        raise _read_only(path)

    def sync_all(self, path: str) -> bool:
        raise _read_only(path)

    def lock(self, path: str) -> Callable[[], None]:
        raise _read_only(path)


def _read_only(path: str) -> OSError:
    return OSError(errno.EROFS, os.strerror(errno.EROFS), path)


READ_ONLY_FILES: Final = ReadOnlyFiles()


class _Node:
    """The content of one file, shared by all who have it open.

    `below` is the path to read from as long as the content is not (all) here; `users` are open
    handles. What was written lies within [written_start, written_end): for `data_start`.
    """

    __slots__ = (
        "_file", "_files", "_map", "_seen", "below", "lock", "modified_ms", "size", "users",
        "written_end", "written_start",
    )  # fmt: skip

    def __init__(self, files: Files, below: str | None) -> None:
        self._files = files
        self._file: File | None = None
        self._map: mmap.mmap | None = None
        self._seen: weakref.ref[mmap.mmap] | None = None  # of the file below, while it is viewed
        self.below = below
        self.lock = threading.Lock()
        self.users = 0
        self.modified_ms: int | None = None
        self.written_start = self.written_end = 0
        self.size = 0 if below is None else self._opened(below).size()

    @property
    def is_needed(self) -> bool:
        """Must it be kept when nobody has it open: does it say more than the file below?"""
        is_viewed = self._seen is not None and self._seen() is not None
        return self.below is None or self._map is not None or is_viewed

    def _opened(self, below: str) -> File:
        """The file below, kept open until `release`."""
        if self._file is None:
            self._file = self._files.open(below)
        return self._file

    def release(self) -> None:
        """Nobody has it open now."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def mapped(self) -> mmap.mmap | None:
        """The map of the content, made now if need be; None when the file is empty. That of a file
        below lives as long as somebody views it, and for ever once it is written."""
        if self._map is not None or not self.size:
            return self._map
        if self.below is None:
            self._map = _new_map(self.size)
            return self._map
        made = None if self._seen is None else self._seen()
        if made is None:
            file = self._opened(self.below)
            if hasattr(file, "read_view"):  # a file in memory has nothing that can be mapped
                made = _new_map(self.size)
                made[:] = file.pread(self.size, 0)
            else:
                prot = mmap.PROT_READ | mmap.PROT_WRITE
                made = mmap.mmap(file.fileno(), self.size, flags=_PRIVATE, prot=prot)
            self._seen = weakref.ref(made)
        return made

    def read(self, size: int, offset: int) -> bytes:
        with self.lock:
            stop = min(offset + size, self.size)
            if stop <= offset:
                return b""
            if self._map is not None:
                return self._map[offset:stop]
            if self.below is None:
                return bytes(stop - offset)
            return self._opened(self.below).pread(stop - offset, offset)

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        end = offset + len(data)
        if end == offset:
            return
        with self.lock:
            if end > self.size:
                self._resize(end)
            content = self._map = self.mapped()
            assert content is not None
            content[offset:end] = data
            start = min(offset, self.written_start) if self.written_end else offset
            self.written_start, self.written_end = start, max(end, self.written_end)

    def resize(self, size: int) -> None:
        with self.lock:
            if size != self.size:
                self._resize(size)

    def _resize(self, size: int) -> None:
        old, kept = self.mapped(), min(size, self.size)
        has_content = self.below is not None or self.written_end > 0
        self._map, self._seen, self.below, self.size = None, None, None, size
        if not has_content or old is None or not kept:
            self.written_start = self.written_end = 0
            return
        made = self.mapped()
        assert made is not None
        for at in range(0, kept, _COPY_BYTES):
            piece = old[at : min(at + _COPY_BYTES, kept)]
            if piece.count(0) < len(piece):  # what is not touched takes no memory
                made[at : at + len(piece)] = piece
        self.written_start, self.written_end = 0, kept

    def data_start(self, offset: int) -> int | None:
        with self.lock:
            starts = []
            if offset < self.written_end:
                starts.append(max(offset, self.written_start))
            if self.below is not None:
                start = self._opened(self.below).data_start(offset)
                if start is not None:
                    starts.append(start)
            return min(starts, default=None)

    def data_end(self, offset: int) -> int:
        with self.lock:
            end = self.written_end if self.written_start <= offset else offset
            if self.below is not None:
                end = max(end, self._opened(self.below).data_end(offset))
            return max(end, offset)


class OverlayFile:
    """A file of `OverlayFiles`. It is viewed, not mapped by who has it open (`read_view`)."""

    __slots__ = ("_files", "_node", "path")

    def __init__(self, files: "OverlayFiles", path: str, node: _Node) -> None:
        self._files = files
        self._node: _Node | None = node
        self.path = path

    def _content(self) -> _Node:
        if self._node is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self.path)
        return self._node

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        node = self._content()
        node.write(data, offset)
        node.modified_ms = self._files.clock.now_ms()

    def pread(self, size: int, offset: int) -> bytes:
        return self._content().read(size, offset)

    def sync(self) -> None:
        """Nothing is to be made durable."""

    def truncate(self, size: int) -> None:
        node = self._content()
        node.resize(size)
        node.modified_ms = self._files.clock.now_ms()

    def size(self) -> int:
        return self._content().size

    def data_start(self, offset: int) -> int | None:
        return self._content().data_start(offset)

    def data_end(self, offset: int) -> int:
        return self._content().data_end(offset)

    def read_view(self) -> memoryview:
        """The whole file, which shows what is written later."""
        node = self._content()
        with node.lock:
            content = node.mapped()
        return memoryview(b"") if content is None else memoryview(content).toreadonly()

    def fileno(self) -> int:
        raise OSError(errno.ENOTSUP, "a file in memory has no descriptor", self.path)

    def close(self) -> None:
        node, self._node = self._node, None
        if node is not None:
            self._files.closed(self.path, node)


class OverlayFiles:
    """The files below as they are, and what was done to them since, in memory.

    Any thread; `base` is only read.
    """

    def __init__(self, base: Files = READ_ONLY_FILES, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._base = base
        self.pool = DescriptorPool()
        self.clock = clock
        """Where times of change come from."""
        self._nodes: dict[str, _Node] = {}
        self._made: dict[str, set[str]] = {}  # names made here, by directory
        self._directories: set[str] = set()
        self._gone: set[str] = set()  # of the names below
        self._lock = threading.RLock()

    # --- the port

    def open(self, path: str, *, create: bool = False, access: Access | None = None) -> File:
        with self._lock:
            node = self._nodes.get(path)
            if node is None:
                node = self._nodes[path] = self._new_node(path, create=create)
            node.users += 1
        return OverlayFile(self, path, node)

    def access(self, path: str) -> Access:
        """That of the file below; what is in memory nobody else can read."""
        return FOR_OWNER if path in self._gone or self._is_made(path) else self._base.access(path)

    def exists(self, path: str) -> bool:
        with self._lock:
            return self._is_made(path) or (path not in self._gone and self._base.exists(path))

    def names(self, directory: str) -> list[str]:
        directory = directory.rstrip("/")
        with self._lock:
            found = set(self._made.get(directory, ()))
            found.update(
                name
                for name in self._base.names(directory)
                if f"{directory}/{name}" not in self._gone
            )
        return sorted(found)

    def make_directory(self, path: str, *, durable: bool = True) -> None:
        with self._lock:
            missing = []
            while path and not self.exists(path):
                missing.append(path)
                path = path.rpartition("/")[0]
            for directory in reversed(missing):
                self._directories.add(directory)
                self._add_name(directory)

    def remove(self, path: str) -> None:
        with self._lock:
            if not self.exists(path):
                raise _error(errno.ENOENT, path)
            if self.names(path):
                raise _error(errno.ENOTEMPTY, path)
            self._directories.discard(path)
            self._nodes.pop(path, None)
            self._drop_name(path)

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            if old in self._directories or self._base.names(old):
                raise _error(errno.ENOTSUP, old)
            with contextlib.closing(self.open(old)):
                node = self._nodes.pop(old)
            self._drop_name(old)
            self._nodes[new] = node
            self._add_name(new)

    def sync_directory(self, path: str) -> None:
        """Nothing is to be made durable."""

    def sync_all(self, path: str) -> bool:
        """Nothing is to be made durable."""
        return True

    def lock(self, path: str) -> Callable[[], None]:
        """Nobody is kept out and nobody keeps us out: we change nothing."""
        return lambda: None

    def usage(self, path: str) -> tuple[int, int]:
        while path and not self._base.exists(path):
            path = path.rpartition("/")[0]
        return self._base.usage(path or "/")

    def modified_ms(self, path: str) -> int:
        with self._lock:
            node = self._nodes.get(path)
            if node is None:
                node = self._new_node(path, create=False)
            if node.modified_ms is not None:
                return node.modified_ms
            return self.clock.now_ms() if node.below is None else self._base.modified_ms(node.below)

    # --- for the files themselves

    def closed(self, path: str, node: _Node) -> None:
        """A handle is closed: a file that says no more than the one below is forgotten."""
        with self._lock:
            node.users -= 1
            if node.users:
                return
            node.release()
            # A name that was made leads to this node alone, not to a file below.
            if not node.is_needed and self._nodes.get(path) is node and not self._is_made(path):
                del self._nodes[path]

    # --- names

    def _is_made(self, path: str) -> bool:
        directory, _, name = path.rpartition("/")
        return name in self._made.get(directory, ())

    def _new_node(self, path: str, *, create: bool) -> _Node:
        if path in self._directories:
            raise _error(errno.EISDIR, path)
        if path not in self._gone and self._base.exists(path):
            return _Node(self._base, path)
        if not create:
            raise _error(errno.ENOENT, path)
        if not self.exists(path.rpartition("/")[0] or "/"):
            raise _error(errno.ENOENT, path)
        self._add_name(path)
        return _Node(self._base, None)

    def _add_name(self, path: str) -> None:
        directory, _, name = path.rpartition("/")
        self._made.setdefault(directory, set()).add(name)

    def _drop_name(self, path: str) -> None:
        directory, _, name = path.rpartition("/")
        self._made.get(directory, set()).discard(name)
        self._gone.add(path)


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


def overlay(files: Files) -> OverlayFiles:
    """Return files that read from `files` and keep every change in memory. The files of the system
    are not opened for writing."""
    return OverlayFiles() if files is SYSTEM_FILES else OverlayFiles(files)
