"""`CrashableFiles`: the file port in memory, which forgets what was not synced when it is crashed.

What a crash (power loss) may do, after sqlite's test6.c and pebble's MemFS:

    a write that was not synced      is kept, dropped, torn (its beginning arrives) or scattered
                                     (some of its 512-byte sectors arrive), each on its own, so
                                     later writes may survive earlier ones
    a change of size, not synced     is kept or lost; when lost, so is all that came after it
    names made, removed or renamed   of each directory the first so many changes are kept, up to
                                     all; a rename is one change
    what was synced                  stays

`kill` is the end of a process only: everything written stays, and is still unsynced. Errors can be
injected (`fail_next`), the disk can be full (`free_bytes`), and `syncs_lie` plants the bug that
every such test must find. `operations` is the record of what was done, in order: a test appends
its own marks to it and asserts what came before what.

File contents are kept in memory at full size: configure small files.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from sluicemq.errors import StoreLockedError
from sluicemq.files import LOCK_CONTENT, File

if TYPE_CHECKING:
    import random

BLOCK_BYTES: Final = 4096
SECTOR_BYTES: Final = 512
TOTAL_BYTES: Final = 1 << 40


class Operation(NamedTuple):
    """One thing that was done: `write`, `sync`, `truncate`, `create`, `remove`, `rename`,
    `sync_directory`, `lock`, or a mark of the test itself."""

    kind: str
    path: str = ""
    offset: int = 0
    size: int = 0


class _Write(NamedTuple):
    offset: int
    data: bytes


class _Resize(NamedTuple):
    size: int


@dataclass
class _Node:
    """A file's content: what is safe, what is there now, and the changes between."""

    safe: bytearray = field(default_factory=bytearray)
    now: bytearray = field(default_factory=bytearray)
    pending: list[_Write | _Resize] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)

    def sync(self) -> None:
        self.safe = bytearray(self.now)
        self.pending.clear()

    def after_crash(self, rng: "random.Random") -> "_Node":
        content = bytearray(self.safe)
        for change in self.pending:
            if isinstance(change, _Resize):
                if rng.random() < 0.3:
                    break
                _resize(content, change.size)
            else:
                _apply_maybe(content, change, rng)
        blocks = {at // BLOCK_BYTES for at in range(0, len(content), BLOCK_BYTES)}
        used = {b for b in blocks if any(content[b * BLOCK_BYTES : (b + 1) * BLOCK_BYTES])}
        return _Node(content, bytearray(content), [], used)

    def copy(self) -> "_Node":
        return _Node(
            bytearray(self.safe), bytearray(self.now), list(self.pending), set(self.blocks)
        )


class _Entry(NamedTuple):
    """A change of names in a directory: `node` None and no `old` is a removal."""

    path: str
    node: "_Node | None"
    is_directory: bool = False
    old: str = ""


class _Fault(NamedTuple):
    kind: str
    path_part: str
    number: int
    written: int


class CrashableFile:
    """A file of `CrashableFiles`; lies in memory, so the store reads it without a map."""

    def __init__(self, files: "CrashableFiles", path: str, node: _Node) -> None:
        self._files = files
        self._node = node
        self.path = path

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        data = bytes(data)
        fault = self._files.fault("write", self.path)
        size = len(data) if fault is None else fault.written
        room = self._files.take(self._node, offset, size)
        if room:
            _write(self._node, offset, data[:room])
            self._node.pending.append(_Write(offset, data[:room]))
            self._files.note("write", self.path, offset, room)
        if fault is not None:
            raise OSError(fault.number, os.strerror(fault.number), self.path)
        if room < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)

    def pread(self, size: int, offset: int) -> bytes:
        self._files.check("read", self.path)
        return bytes(self._node.now[offset : offset + size])

    def sync(self) -> None:
        self._files.check("sync", self.path)
        self._files.note("sync", self.path)
        if not self._files.syncs_lie:
            self._node.sync()

    def truncate(self, size: int) -> None:
        self._files.check("truncate", self.path)
        self._node.now = bytearray(self._node.now)  # views of the old size stay what they were
        _resize(self._node.now, size)
        self._node.pending.append(_Resize(size))
        self._files.note("truncate", self.path, 0, size)

    def size(self) -> int:
        return len(self._node.now)

    def data_start(self, offset: int) -> int | None:
        content = self._node.now
        while offset < len(content):
            block_end = offset - offset % BLOCK_BYTES + BLOCK_BYTES
            if any(content[offset:block_end]):
                return offset
            offset = block_end
        return None

    def fileno(self) -> int:
        raise OSError(errno.EBADF, "a file in memory has no descriptor", self.path)

    def read_view(self) -> memoryview:
        """The whole file, read-only; shows later writes, as a map does."""
        return memoryview(self._node.now).toreadonly()

    def close(self) -> None:
        """Nothing: closing does not sync."""


class CrashableFiles:
    """A file system in memory with `sluicemq.files.Files`' face. See the module for its faults."""

    def __init__(self) -> None:
        self._entries: dict[str, _Node | None] = {}  # now: None is a directory
        self._safe: dict[str, _Node | None] = {}
        self._changes: dict[str, list[_Entry]] = {}  # of each directory, not synced
        self._locked: set[str] = set()
        self._faults: list[_Fault] = []
        self.operations: list[Operation] = []
        self.free_bytes: int | None = None
        """None: endless. Blocks of 4096 bytes are taken from it at their first write."""
        self.syncs_lie = False
        """The planted bug: syncs of files and directories do nothing."""

    # --- the port

    def open(self, path: str, *, create: bool = False) -> File:
        self.check("open", path)
        if path not in self._entries:
            if not create:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            self.check("create", path)
            self._require_directory(path)
            self._change(_Entry(path, _Node()))
            self.note("create", path)
        node = self._entries[path]
        if node is None:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return CrashableFile(self, path, node)

    def exists(self, path: str) -> bool:
        return path in self._entries or path in ("", "/")

    def names(self, directory: str) -> list[str]:
        start = directory.rstrip("/") + "/"
        return sorted(
            path[len(start) :]
            for path in self._entries
            if path.startswith(start) and "/" not in path[len(start) :]
        )

    def make_directory(self, path: str, *, durable: bool = True) -> None:
        missing = []
        while not self.exists(path):
            missing.append(path)
            path = _parent(path)
        for directory in reversed(missing):
            self.check("create", directory)
            self._change(_Entry(directory, None, is_directory=True))
            self.note("create", directory)
            if durable:
                self.sync_directory(_parent(directory))

    def remove(self, path: str) -> None:
        self.check("remove", path)
        if path not in self._entries:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if self.names(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        node = self._entries[path]
        if node is not None and self.free_bytes is not None:
            self.free_bytes += len(node.blocks) * BLOCK_BYTES
        self._change(_Entry(path, None))
        self.note("remove", path)

    def rename(self, old: str, new: str) -> None:
        """Within one directory, as all callers do."""
        self.check("rename", old)
        if old not in self._entries:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)
        self._change(_Entry(new, self._entries[old], old=old))
        self.note("rename", new)

    def sync_directory(self, path: str) -> None:
        self.check("sync_directory", path)
        self.note("sync_directory", path)
        if self.syncs_lie:
            return
        for change in self._changes.pop(path, []):
            _apply_entry(self._safe, change)

    def lock(self, path: str) -> Callable[[], None]:
        if path in self._locked:
            raise StoreLockedError(
                f"{path} is locked by process 1, which is running.",
                cure="Stop it, or give this broker a storePathRootDir of its own.",
            )
        self.open(path, create=True).pwrite(LOCK_CONTENT, 0)
        self._locked.add(path)
        self.note("lock", path)
        return lambda: self._locked.discard(path)

    def usage(self, path: str) -> tuple[int, int]:
        self.check("usage", path)
        return TOTAL_BYTES, TOTAL_BYTES // 2 if self.free_bytes is None else self.free_bytes

    # --- what a test does

    def fail_next(
        self, kind: str, number: int = errno.EIO, *, path_part: str = "", written: int = 0
    ) -> None:
        """The next operation of this kind on a path that contains `path_part` raises OSError.

        Kinds as in `Operation`, and `read`, `open`, `usage`. Of a failing write the first
        `written` bytes arrive.
        """
        self._faults.append(_Fault(kind, path_part, number, written))

    def clear_faults(self) -> None:
        """Take back the injected errors that have not struck."""
        self._faults.clear()

    def mark(self, text: str) -> None:
        """Put a mark of the test into `operations`."""
        self.note(text)

    def crash(self, rng: "random.Random") -> "CrashableFiles":
        """A possible disk after a power loss now; this one stays as it is."""
        survived = dict(self._safe)
        for changes in self._changes.values():
            for change in changes[: rng.randint(0, len(changes))]:
                _apply_entry(survived, change)
        files = CrashableFiles()
        files.free_bytes, files.syncs_lie = self.free_bytes, self.syncs_lie
        for path, node in sorted(survived.items()):  # a directory before what it holds
            if files.exists(_parent(path)):
                files._entries[path] = None if node is None else node.after_crash(rng)
        files._safe = dict(files._entries)
        return files

    def kill(self) -> "CrashableFiles":
        """The disk as another process finds it after this one was killed."""
        files = CrashableFiles()
        copies: dict[int, _Node] = {}

        def copy(node: _Node | None) -> _Node | None:
            return None if node is None else copies.setdefault(id(node), node.copy())

        files._entries = {path: copy(node) for path, node in self._entries.items()}
        files._safe = {path: copy(node) for path, node in self._safe.items()}
        files._changes = {
            directory: [entry._replace(node=copy(entry.node)) for entry in changes]
            for directory, changes in self._changes.items()
        }
        files.free_bytes, files.syncs_lie = self.free_bytes, self.syncs_lie
        return files

    def content(self, path: str) -> bytes:
        """What a reader finds in the file now."""
        node = self._entries[path]
        return b"" if node is None else bytes(node.now)

    def put(self, path: str, data: bytes) -> None:
        """Make a file that is safe, with its directories: the beginning of a test."""
        self.make_directory(_parent(path))
        file = self.open(path, create=True)
        file.truncate(len(data))
        file.pwrite(data, 0)
        file.sync()
        self.sync_directory(_parent(path))

    # --- for the files themselves

    def note(self, kind: str, path: str = "", offset: int = 0, size: int = 0) -> None:
        self.operations.append(Operation(kind, path, offset, size))

    def check(self, kind: str, path: str) -> None:
        """Raises the error that was injected for this operation, if any."""
        fault = self.fault(kind, path)
        if fault is not None:
            raise OSError(fault.number, os.strerror(fault.number), path)

    def take(self, node: _Node, offset: int, size: int) -> int:
        """How many of the bytes find room on the disk."""
        for block in range(offset // BLOCK_BYTES, (offset + size - 1) // BLOCK_BYTES + 1):
            if block in node.blocks:
                continue
            if self.free_bytes is not None:
                if self.free_bytes < BLOCK_BYTES:
                    return max(0, block * BLOCK_BYTES - offset)
                self.free_bytes -= BLOCK_BYTES
            node.blocks.add(block)
        return size

    def fault(self, kind: str, path: str) -> _Fault | None:
        """The error that was injected for this operation, which is used up now."""
        for fault in self._faults:
            if fault.kind == kind and fault.path_part in path:
                self._faults.remove(fault)
                return fault
        return None

    def _change(self, change: _Entry) -> None:
        self._changes.setdefault(_parent(change.path), []).append(change)
        _apply_entry(self._entries, change)

    def _require_directory(self, path: str) -> None:
        if not self.exists(_parent(path)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _apply_entry(entries: dict[str, _Node | None], change: _Entry) -> None:
    if change.old:
        entries.pop(change.old, None)
    if change.node is not None or change.is_directory:
        entries[change.path] = change.node
    else:
        entries.pop(change.path, None)


def _resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def _write(node: _Node, offset: int, data: bytes) -> None:
    if offset + len(data) > len(node.now):
        node.now = bytearray(node.now)
        _resize(node.now, offset + len(data))
    node.now[offset : offset + len(data)] = data


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if data:
        _resize(content, max(len(content), offset + len(data)))
        content[offset : offset + len(data)] = data


def _apply_maybe(content: bytearray, write: _Write, rng: "random.Random") -> None:
    """One unsynced write meets its fate."""
    fate = rng.random()
    if fate < 0.4:
        _put(content, *write)
    elif fate < 0.6:
        _put(content, write.offset, write.data[: rng.randint(0, len(write.data))])
    elif fate < 0.75:
        _scatter(content, write, rng)


def _scatter(content: bytearray, write: _Write, rng: "random.Random") -> None:
    at = 0
    while at < len(write.data):
        size = SECTOR_BYTES - (write.offset + at) % SECTOR_BYTES
        if rng.random() < 0.5:
            _put(content, write.offset + at, write.data[at : at + size])
        at += size
