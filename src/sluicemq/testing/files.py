"""`CrashableFiles`: the file port in memory, which forgets what was not synced when it is crashed.

`crash` is a power loss: each unsynced change meets its fate by the rules of `testing.fate`. `kill`
is the end of a process only: everything written stays, and is still unsynced. `power_fails_after`
lets the power fail in the middle of what is done next: the change after so many raises `PowerLost`
(of a write nobody knows how much arrives), and so does every later one.

Errors can be injected (`fail_next`: ENOSPC, EIO of writes and syncs, short writes), the disk can be
full (`free_bytes`), bits rot (`rot`), and `syncs_lie` plants the bug that every such test must
find. `operations` is the record of what was done, in order: a test appends its own marks to it and
asserts what came before what.

File contents are kept in memory at full size: configure small files.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import StoreLockedError
from sluicemq.files import LOCK_CONTENT, OPEN, Access, File
from sluicemq.files.descriptors import DescriptorPool
from sluicemq.testing.fate import (
    BLOCK_BYTES,
    Entry,
    Names,
    Node,
    apply_entry,
    apply_surviving,
)

if TYPE_CHECKING:
    import random

TOTAL_BYTES: Final = 1 << 40
MAPS: Final = 8
"""So few that every test that reads more files meets the bound."""
CHANGES: Final = frozenset(
    ("write", "sync", "truncate", "create", "remove", "rename", "sync_directory")
)
"""The operations that `power_fails_after` counts."""


class PowerLost(BaseException):
    """The power failed; no handler of errors may live on after it."""


class Operation(NamedTuple):
    """One thing that was done: `write`, `sync`, `truncate`, `create`, `remove`, `rename`,
    `sync_directory`, `lock`, or a mark of the test itself."""

    kind: str
    path: str = ""
    offset: int = 0
    size: int = 0


@dataclass
class _Fault:
    kind: str
    path_part: str
    number: int
    written: int
    after: int


class CrashableFile:
    """A file of `CrashableFiles`; lies in memory, so the store reads it without a map."""

    def __init__(self, files: "CrashableFiles", path: str, node: Node) -> None:
        self._files = files
        self._node = node
        self.path = path

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        data = bytes(data)
        self._node.modified_ms = self._files.clock.now_ms()
        try:
            fault = self._files.fault("write", self.path)
        except PowerLost:
            self._files.last_write(self._node, offset, data)
            raise
        size = len(data) if fault is None else min(fault.written, len(data))
        room = self._files.take(self._node, offset, size)
        if room:
            self._node.write(offset, data[:room])
            self._files.note("write", self.path, offset, room)
        if fault is not None:
            raise OSError(fault.number, os.strerror(fault.number), self.path)
        if room < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)

    def pread(self, size: int, offset: int) -> bytes:
        self._files.check("read", self.path)
        return bytes(self._node.now[offset : offset + size])

    def sync(self) -> None:
        try:
            self._files.check("sync", self.path)
        except OSError:
            self._node.fail_sync()
            raise
        self._files.note("sync", self.path)
        if not self._files.syncs_lie:
            self._node.sync()

    def truncate(self, size: int) -> None:
        self._files.check("truncate", self.path)
        self._node.modified_ms = self._files.clock.now_ms()
        self._node.truncate(size)
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

    def data_end(self, offset: int) -> int:
        content = self._node.now
        while offset < len(content):
            block_end = offset - offset % BLOCK_BYTES + BLOCK_BYTES
            if not any(content[offset:block_end]):
                return offset
            offset = block_end
        return min(offset, len(content))

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
        self.pool = DescriptorPool(MAPS)
        self._entries: Names = {}  # now
        self._safe: Names = {}
        self._changes: dict[str, list[Entry]] = {}  # of each directory, not synced
        self._locked: set[str] = set()
        self._faults: list[_Fault] = []
        self.operations: list[Operation] = []
        self.free_bytes: int | None = None
        """None: endless. Blocks of 4096 bytes are taken from it at their first write."""
        self.total_bytes = TOTAL_BYTES
        """The size of the disk, for `usage`; of an endless one the half is free."""
        self.clock: Clock = SYSTEM_CLOCK
        """Where `modified_ms` comes from."""
        self.syncs_lie = False
        """The planted bug: syncs of files and directories do nothing."""
        self.power_fails_after: int | None = None
        """So many more changes are done, then PowerLost is raised."""

    # --- the port

    def open(self, path: str, *, create: bool = False, access: Access | None = None) -> File:
        self.check("open", path)
        if path not in self._entries:
            if not create:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            self.check("create", path)
            self._require_directory(path)
            self._change(Entry(path, Node(access=access or OPEN)))
            self.note("create", path)
        node = self._entries[path]
        if node is None:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return CrashableFile(self, path, node)

    def access(self, path: str) -> Access:
        node = self._entries.get(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return node.access

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
            self._change(Entry(directory, None, is_directory=True))
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
        self._change(Entry(path, None, inner=tuple(self._changes.pop(path, ()))))
        self.note("remove", path)

    def rename(self, old: str, new: str) -> None:
        """Within one directory, as all callers do."""
        self.check("rename", old)
        if old not in self._entries:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)
        self._change(Entry(new, self._entries[old], old=old))
        self.note("rename", new)

    def sync_directory(self, path: str) -> None:
        self.check("sync_directory", path)
        self.note("sync_directory", path)
        if self.syncs_lie:
            return
        for change in self._changes.pop(path, []):
            apply_entry(self._safe, change)

    def sync_all(self, path: str) -> bool:
        """Never: each file and directory meets a fate of its own."""
        return False

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
        free = self.total_bytes // 2 if self.free_bytes is None else self.free_bytes
        return self.total_bytes, free

    def modified_ms(self, path: str) -> int:
        node = self._entries.get(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return node.modified_ms

    # --- what a test does

    def fail_next(
        self,
        kind: str,
        number: int = errno.EIO,
        *,
        path_part: str = "",
        written: int = 0,
        after: int = 0,
    ) -> None:
        """The next operation of this kind on a path that contains `path_part` raises OSError.

        Kinds as in `Operation`, and `read`, `open`, `usage`. Of a failing write the first
        `written` bytes arrive; what a failing sync was to save is lost. `after` such operations
        succeed before.
        """
        self._faults.append(_Fault(kind, path_part, number, written, after))

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
            apply_surviving(survived, changes, rng)
        files = self._new()
        nodes: dict[int, Node] = {}
        for path, node in sorted(survived.items()):  # a directory before what it holds
            if files.exists(_parent(path)):
                if node is not None and id(node) not in nodes:
                    nodes[id(node)] = node.after_crash(rng)
                files._entries[path] = None if node is None else nodes[id(node)]
        files._safe = dict(files._entries)
        return files

    def kill(self) -> "CrashableFiles":
        """The disk as another process finds it after this one was killed."""
        files = self._new()
        copies: dict[int, Node] = {}

        def copy(node: Node | None) -> Node | None:
            if node is not None and id(node) not in copies:
                copies[id(node)] = node.after_kill()
            return None if node is None else copies[id(node)]

        def copy_entry(entry: Entry) -> Entry:
            inner = tuple(copy_entry(change) for change in entry.inner)
            return entry._replace(node=copy(entry.node), inner=inner)

        files._entries = {path: copy(node) for path, node in self._entries.items()}
        files._safe = {path: copy(node) for path, node in self._safe.items()}
        files._changes = {
            directory: [copy_entry(entry) for entry in changes]
            for directory, changes in self._changes.items()
        }
        return files

    def _new(self) -> "CrashableFiles":
        files = CrashableFiles()
        files.free_bytes, files.syncs_lie = self.free_bytes, self.syncs_lie
        files.total_bytes, files.clock = self.total_bytes, self.clock
        return files

    def rot(self, path: str, rng: "random.Random", start: int = 0, end: int | None = None) -> int:
        """A bit of the file turns over, for every reader and for good; returns its byte's place."""
        node = self._entries[path]
        if node is None or len(node.now) <= start:
            raise IsADirectoryError(errno.EISDIR, "there is nothing that could rot", path)
        at = rng.randrange(start, len(node.now) if end is None else end)
        bit = 1 << rng.randrange(8)
        for content in (node.now, node.safe):
            if at < len(content):
                content[at] ^= bit
        return at

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

    def take(self, node: Node, offset: int, size: int) -> int:
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
        if kind in CHANGES and self.power_fails_after is not None:
            self.power_fails_after -= 1
            if self.power_fails_after < 0:
                raise PowerLost(f"{kind} {path}")
        for fault in self._faults:
            if fault.kind == kind and fault.path_part in path:
                if fault.after == 0:
                    self._faults.remove(fault)
                    return fault
                fault.after -= 1
        return None

    def last_write(self, node: Node, offset: int, data: bytes) -> None:
        """The power fails during this write: it is under way, as any that was not synced."""
        if self.power_fails_after == -1:
            node.write(offset, data)

    def _change(self, change: Entry) -> None:
        self._changes.setdefault(_parent(change.path), []).append(change)
        apply_entry(self._entries, change)

    def _require_directory(self, path: str) -> None:
        if not self.exists(_parent(path)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
