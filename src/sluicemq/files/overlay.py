"""Files that are read from the disk, and whose changes stay in memory (copy on write).

A broker uses them for a store that must not change (`--read-only`). Recovery, building queues and
an index, and saving tables work as usual, and their results disappear with the process. No file on
the disk is written, locked, or even opened for writing.

    a file that is only read      pread of the file on the disk
    a file that is viewed or      a private map of it (copy on write): its pages are those of the
    written                       file until they are written, then anonymous memory, page by page
    a file that is created or     an anonymous map of its size, which takes memory only for pages
    changes its size              that were written: a new log file of 1 GiB takes none
    names                         a table of the names that were created, renamed and removed

This module may map files for writing, because a private map never writes to a disk, so a full disk
causes no SIGBUS. (If another process truncates a file on the disk meanwhile, a map of it fails, as
for every reader.) Views show what `pwrite` writes later. After a change of the size of the file
they keep the old content.

Directories can be created and removed, but not renamed, because the product never does that.
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
    OWNER_ONLY,
    SYSTEM_FILES,
    Access,
    File,
    Files,
    SystemFile,
    SystemFiles,
)
from sluicemq.files.descriptors import DescriptorPool

_NO_RESERVE: Final = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE: a map that was not touched takes address space, but no memory."""
_PRIVATE: Final = mmap.MAP_PRIVATE | _NO_RESERVE
_ANONYMOUS: Final = _PRIVATE | mmap.MAP_ANONYMOUS
_COPY_BYTES: Final = 1 << 20


def _make_map(size: int) -> mmap.mmap:
    """Return a map of `size` zeros in memory, which takes memory only for pages that are written.

    The pages have 4 KiB. With huge pages, one written byte would take 2 MiB.
    """
    zeros = mmap.mmap(-1, size, flags=_ANONYMOUS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with contextlib.suppress(OSError, AttributeError):
        zeros.madvise(mmap.MADV_NOHUGEPAGE)
    return zeros


class ReadOnlyFiles(SystemFiles):
    """The file system of this machine, read only: the files below an overlay."""

    __slots__ = ()

    def open(self, path: str, *, create: bool = False, access: Access | None = None) -> File:
        """Open a file for reading, even if `create` is set.

        Raises OSError if the file does not exist or is a directory.
        """
        if create and not self.exists(path):
            raise _make_read_only_error(path)
        file = SystemFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        if stat.S_ISDIR(os.fstat(file.fileno()).st_mode):  # the kernel refuses only writers
            file.close()
            raise _make_error(errno.EISDIR, path)
        return file

    def make_directory(self, path: str, *, durable: bool = True) -> None:
        raise _make_read_only_error(path)

    def remove(self, path: str) -> None:
        raise _make_read_only_error(path)

    def rename(self, old_path: str, new_path: str) -> None:
        raise _make_read_only_error(old_path)

    def sync_directory(self, path: str) -> None:
        raise _make_read_only_error(path)

    def sync_all(self, path: str) -> bool:
        raise _make_read_only_error(path)

    def lock(self, path: str) -> Callable[[], None]:
        raise _make_read_only_error(path)


def _make_read_only_error(path: str) -> OSError:
    """Return the error of an attempt to change something at `path`."""
    return OSError(errno.EROFS, os.strerror(errno.EROFS), path)


READ_ONLY_FILES: Final = ReadOnlyFiles()


class _FileContent:
    """The content of one file, shared by all `OverlayFile` objects that have it open.

    `below` is the path of the file on the disk, or None if the content is only in memory. `users`
    is the number of open `OverlayFile` objects. All bytes that were written are within
    [written_start, written_end), which `data_start` and `data_end` need.
    """

    __slots__ = (
        "_file",
        "_files",
        "_map",
        "_viewed_map",
        "below",
        "lock",
        "modified_ms",
        "size",
        "users",
        "written_end",
        "written_start",
    )

    def __init__(self, files: Files, below: str | None) -> None:
        """Create the content of a file, taken from the file `below` of `files`.

        If `below` is None, the content is empty. The file is opened to find out its size.
        """
        self._files = files
        self._file: File | None = None
        self._map: mmap.mmap | None = None
        self._viewed_map: weakref.ref[mmap.mmap] | None = None  # of `below`, while it is viewed
        self.below = below
        self.lock = threading.Lock()
        self.users = 0
        self.modified_ms: int | None = None
        self.written_start = self.written_end = 0
        self.size = 0 if below is None else self._open_below(below).size()

    @property
    def is_needed(self) -> bool:
        """Whether the content must be kept while no one has it open.

        That is so if it differs from the file on the disk, or if a view of it still exists.
        """
        is_viewed = self._viewed_map is not None and self._viewed_map() is not None
        return self.below is None or self._map is not None or is_viewed

    def _open_below(self, below: str) -> File:
        """Return the file on the disk, which stays open until `release`."""
        if self._file is None:
            self._file = self._files.open(below)
        return self._file

    def release(self) -> None:
        """Close the file on the disk. Called when the last `OverlayFile` is closed."""
        file = self._file
        self._file = None
        if file is not None:
            file.close()

    def mapped(self) -> mmap.mmap | None:
        """Return the map of the content. Create it if necessary. Return None if the file is empty.

        A map of a file on the disk exists as long as a view of it, and permanently once it was
        written. The caller must hold `lock`.
        """
        if self._map is not None or not self.size:
            return self._map
        if self.below is None:
            self._map = _make_map(self.size)
            return self._map

        # The reference is weak, so that the map is freed with its last view.
        disk_map = None if self._viewed_map is None else self._viewed_map()
        if disk_map is None:
            disk_map = self._map_file(self._open_below(self.below))
            self._viewed_map = weakref.ref(disk_map)
        return disk_map

    def _map_file(self, file: File) -> mmap.mmap:
        """Map the file on the disk. Changes of the map stay in memory."""
        if hasattr(file, "read_view"):  # a file in memory cannot be mapped: copy it
            copy = _make_map(self.size)
            copy[:] = file.pread(self.size, 0)
            return copy
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(file.fileno(), self.size, flags=_PRIVATE, prot=prot)

    def read(self, size: int, offset: int) -> bytes:
        """Return up to `size` bytes at `offset`: fewer at the end of the file, b"" behind it."""
        with self.lock:
            stop = min(offset + size, self.size)
            if stop <= offset:
                return b""
            if self._map is not None:
                return self._map[offset:stop]
            if self.below is None:
                return bytes(stop - offset)
            return self._open_below(self.below).pread(stop - offset, offset)

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write `data` at `offset`, in memory only. The file grows if necessary."""
        end = offset + len(data)
        if end == offset:
            return
        with self.lock:
            if end > self.size:
                self._resize(end)
            content_map = self._map = self.mapped()
            assert content_map is not None
            content_map[offset:end] = data
            is_first_write = self.written_end == 0
            if is_first_write or offset < self.written_start:
                self.written_start = offset
            self.written_end = max(end, self.written_end)

    def resize(self, size: int) -> None:
        """Cut the file, or extend it with zeros."""
        with self.lock:
            if size != self.size:
                self._resize(size)

    def _resize(self, size: int) -> None:
        """Move the content into a new map in memory, cut or extended to `size` bytes.

        Views of the old content stay as they are. The caller must hold `lock`.
        """
        old_map = self.mapped()
        kept_bytes = min(size, self.size)
        has_content = self.below is not None or self.written_end > 0
        self._map = None
        self._viewed_map = None
        self.below = None
        self.size = size
        if not has_content or old_map is None or not kept_bytes:
            self.written_start = self.written_end = 0
            return
        new_map = self.mapped()
        assert new_map is not None
        for start in range(0, kept_bytes, _COPY_BYTES):
            piece = old_map[start : min(start + _COPY_BYTES, kept_bytes)]
            if piece.count(0) < len(piece):  # pages that are not touched take no memory
                new_map[start : start + len(piece)] = piece
        self.written_start = 0
        self.written_end = kept_bytes

    def data_start(self, offset: int) -> int | None:
        """Return the first position at or after `offset` that may not be zero, or None.

        Data is what was written here, and what is on the disk. None means that only holes follow.
        """
        with self.lock:
            starts = []
            if offset < self.written_end:
                starts.append(max(offset, self.written_start))
            if self.below is not None:
                start = self._open_below(self.below).data_start(offset)
                if start is not None:
                    starts.append(start)
            return min(starts, default=None)

    def data_end(self, offset: int) -> int:
        """Return the end of the data that contains `offset`, or `offset` if it is in a hole.

        All bytes between two writes count as data.
        """
        with self.lock:
            end = self.written_end if self.written_start <= offset else offset
            if self.below is not None:
                end = max(end, self._open_below(self.below).data_end(offset))
            return max(end, offset)


class OverlayFile:
    """An open file of `OverlayFiles` (an implementation of `File`).

    It has no descriptor, so callers cannot map it. They use `read_view` instead.
    """

    __slots__ = ("_files", "_node", "path")

    def __init__(self, files: "OverlayFiles", path: str, node: _FileContent) -> None:
        """Create an open file at `path` with the content `node`, whose `users` count it already."""
        self._files = files
        self._node: _FileContent | None = node
        self.path = path

    def _get_content(self) -> _FileContent:
        """Return the content. Raises OSError (EBADF) if the file is closed."""
        if self._node is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self.path)
        return self._node

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        node = self._get_content()
        node.write(data, offset)
        node.modified_ms = self._files.clock.now_ms()

    def pread(self, size: int, offset: int) -> bytes:
        return self._get_content().read(size, offset)

    def sync(self) -> None:
        """Do nothing: changes in memory are never durable."""

    def truncate(self, size: int) -> None:
        node = self._get_content()
        node.resize(size)
        node.modified_ms = self._files.clock.now_ms()

    def size(self) -> int:
        return self._get_content().size

    def data_start(self, offset: int) -> int | None:
        return self._get_content().data_start(offset)

    def data_end(self, offset: int) -> int:
        return self._get_content().data_end(offset)

    def read_view(self) -> memoryview:
        """Return a view of the whole file. It shows later writes until the file's size changes."""
        node = self._get_content()
        with node.lock:
            content = node.mapped()
        if content is None:
            return memoryview(b"")
        return memoryview(content).toreadonly()

    def fileno(self) -> int:
        raise OSError(errno.ENOTSUP, "a file in memory has no descriptor", self.path)

    def close(self) -> None:
        """Close the file. Closing it again does nothing."""
        node = self._node
        self._node = None
        if node is not None:
            self._files.release_handle(self.path, node)


class OverlayFiles:
    """The files of `base`, which is only read, with all changes in memory.

    It implements `Files`. Methods may be called from any thread.
    """

    def __init__(self, base: Files = READ_ONLY_FILES, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Create an overlay that shows the files of `base`. Changes will stay in memory.

        `clock` gives the times of changes.
        """
        self._base = base
        self.pool = DescriptorPool()
        self.clock = clock
        """The clock for the times of changes."""
        self._nodes: dict[str, _FileContent] = {}
        self._created: dict[str, set[str]] = {}  # names created here, by directory
        self._directories: set[str] = set()
        self._removed: set[str] = set()  # paths of `base` that were removed here
        self._lock = threading.RLock()

    # --- the protocol Files

    def open(self, path: str, *, create: bool = False, access: Access | None = None) -> File:
        """Open a file, whose changes stay in memory. Raises OSError.

        If `create`, a missing file is created in memory. `access` is ignored.
        """
        with self._lock:
            node = self._nodes.get(path)
            if node is None:
                node = self._nodes[path] = self._find_or_create_content(path, create=create)
            node.users += 1
        return OverlayFile(self, path, node)

    def access(self, path: str) -> Access:
        """Return the permissions of the file in `base`. Files in memory are private."""
        if path in self._removed or self._is_created(path):
            return OWNER_ONLY
        return self._base.access(path)

    def exists(self, path: str) -> bool:
        with self._lock:
            return self._is_created(path) or (path not in self._removed and self._base.exists(path))

    def names(self, directory: str) -> list[str]:
        """Return the sorted names in a directory, as the changes in memory leave it."""
        directory = directory.rstrip("/")
        with self._lock:
            names = set(self._created.get(directory, ()))
            for name in self._base.names(directory):
                if f"{directory}/{name}" not in self._removed:
                    names.add(name)
        return sorted(names)

    def make_directory(self, path: str, *, durable: bool = True) -> None:
        """Create a directory and its missing parents, in memory."""
        with self._lock:
            missing = []
            while path and not self.exists(path):
                missing.append(path)
                path = path.rpartition("/")[0]
            for directory in reversed(missing):
                self._directories.add(directory)
                self._add_name(directory)

    def remove(self, path: str) -> None:
        """Remove a file or an empty directory, in memory only. Raises OSError."""
        with self._lock:
            if not self.exists(path):
                raise _make_error(errno.ENOENT, path)
            if self.names(path):
                raise _make_error(errno.ENOTEMPTY, path)
            self._directories.discard(path)
            self._nodes.pop(path, None)
            self._drop_name(path)

    def rename(self, old_path: str, new_path: str) -> None:
        """Rename a file, in memory only. Raises OSError for a directory or a missing file."""
        with self._lock:
            if old_path in self._directories or self._base.names(old_path):
                raise _make_error(errno.ENOTSUP, old_path)
            with contextlib.closing(self.open(old_path)):
                content = self._nodes.pop(old_path)
            self._drop_name(old_path)
            self._nodes[new_path] = content
            self._add_name(new_path)

    def sync_directory(self, path: str) -> None:
        """Do nothing: changes in memory are never durable."""

    def sync_all(self, path: str) -> bool:
        """Return True without doing anything: changes in memory are never durable."""
        return True

    def lock(self, path: str) -> Callable[[], None]:
        """Return a function that does nothing. Nothing is locked, because nothing is changed."""
        return lambda: None

    def usage(self, path: str) -> tuple[int, int]:
        while path and not self._base.exists(path):
            path = path.rpartition("/")[0]
        return self._base.usage(path or "/")

    def modified_ms(self, path: str) -> int:
        """Return the time of the last write to a file, in milliseconds since 1970."""
        with self._lock:
            node = self._nodes.get(path)
            if node is None:
                node = self._find_or_create_content(path, create=False)
            if node.modified_ms is not None:
                return node.modified_ms
            if node.below is None:
                return self.clock.now_ms()
            return self._base.modified_ms(node.below)

    # --- called by OverlayFile

    def release_handle(self, path: str, node: _FileContent) -> None:
        """Note that an `OverlayFile` of `path` was closed. `node` is its content.

        When no file uses the content any more, it is dropped unless it differs from the file in
        `base`.
        """
        with self._lock:
            node.users -= 1
            if node.users:
                return
            node.release()
            # A name that was created here exists only in this object, not in `base`.
            if not node.is_needed and self._nodes.get(path) is node and not self._is_created(path):
                del self._nodes[path]

    # --- names

    def _is_created(self, path: str) -> bool:
        """Return whether a file or directory with this path was created here, and still exists."""
        directory, _, name = path.rpartition("/")
        return name in self._created.get(directory, ())

    def _find_or_create_content(self, path: str, *, create: bool) -> _FileContent:
        """Return the content of a file that is not open, from `base` or empty.

        If `create`, a missing file is created; its directory must exist. Raises OSError with ENOENT
        if there is no such file, and with EISDIR for a directory.
        """
        if path in self._directories:
            raise _make_error(errno.EISDIR, path)
        if path not in self._removed and self._base.exists(path):
            return _FileContent(self._base, path)
        if not create:
            raise _make_error(errno.ENOENT, path)
        if not self.exists(path.rpartition("/")[0] or "/"):
            raise _make_error(errno.ENOENT, path)
        self._add_name(path)
        return _FileContent(self._base, None)

    def _add_name(self, path: str) -> None:
        """Note that a file or directory with this path was created here."""
        directory, _, name = path.rpartition("/")
        self._created.setdefault(directory, set()).add(name)

    def _drop_name(self, path: str) -> None:
        """Note that the file or directory with this path was removed, here and from `base`."""
        directory, _, name = path.rpartition("/")
        self._created.get(directory, set()).discard(name)
        self._removed.add(path)


def _make_error(error_number: int, path: str) -> OSError:
    """Return the OSError with this error number for a path."""
    return OSError(error_number, os.strerror(error_number), path)


def overlay(files: Files) -> OverlayFiles:
    """Return files that read from `files` and keep every change in memory.

    If `files` are those of the system, they are never opened for writing.
    """
    if files is SYSTEM_FILES:
        return OverlayFiles()
    return OverlayFiles(files)
