"""`CrashableFiles`: the file port in memory, which forgets what was not synced when it is crashed.

`crash` is a power loss, in which each unsynced change meets its fate:

    a write      is kept, dropped, torn (its beginning arrives, cut at any byte) or scattered
                 (some of its 512-byte sectors arrive), each on its own: later writes may survive
                 earlier ones
    a change of  is kept or lost; when lost, so is all that came after it
    size
    names made,  of each directory the first so many changes are kept, or any of them, as long as
    removed or   changes that touch the same name keep their order; a rename is one change: both
    renamed      names or neither. What lay in a directory that is gone is gone
    a failed     the kernel has thrown the pages away: a later fsync says yes and saves nothing of
    fsync        them (that is why an fsync is never retried). The process still reads them, the
                 next one does not

After sqlite's test6.c and pebble's MemFS. All chance comes from one generator. `kill` is the end of
a process only: everything written stays, and is still unsynced. `power_fails_after` lets the power
fail in the middle of what is done next: the change after so many raises `PowerLost` (of a write
nobody knows how much arrives), and so does every later one.

Errors can be injected (`fail_next`: ENOSPC, EIO of writes and syncs, short writes), the disk can be
full (`free_bytes`), bits rot (`rot`), and `syncs_lie` plants the bug that every such test must
find. `operations` is the record of what was done, in order: a test appends its own marks to it and
asserts what came before what.

File contents are kept in memory at full size: configure small files.
"""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import StoreLockedError
from sluicemq.files import DEFAULT_ACCESS, LOCK_CONTENT, Access, File
from sluicemq.files.descriptors import DescriptorPool

if TYPE_CHECKING:
    import random

BLOCK_BYTES: Final = 4096
_ZEROS: Final = bytes(BLOCK_BYTES)
_MANY_ZEROS: Final = bytes(256 * BLOCK_BYTES)
SECTOR_BYTES: Final = 512
TOTAL_BYTES: Final = 1 << 40
MAPS: Final = 8
"""So few that every test that reads more files meets the bound."""
CHANGES: Final = frozenset(
    ("write", "sync", "truncate", "create", "remove", "rename", "sync_directory")
)
"""The operations that `power_fails_after` counts."""


class Write(NamedTuple):
    """Bytes that were written at an offset."""

    offset: int
    data: bytes


@dataclass
class Node:
    """A file's content: what is safe, what is there now, and the changes between."""

    safe: bytearray = field(default_factory=bytearray)
    now: bytearray = field(default_factory=bytearray)
    pending: list[Write | int] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)
    modified_ms: int = 0
    access: Access = DEFAULT_ACCESS
    has_lost: bool = False

    def write(self, offset: int, data: bytes) -> None:
        """Like pwrite; views of the file see it unless it grows."""
        if offset + len(data) > len(self.now):
            try:
                resize(self.now, offset + len(data))
            except BufferError:  # there are views
                self.now = bytearray(self.now)
                resize(self.now, offset + len(data))
        self.now[offset : offset + len(data)] = data
        self.pending.append(Write(offset, data))

    def truncate(self, size: int) -> None:
        """Views of the old size stay what they were."""
        self.now = bytearray(self.now)
        resize(self.now, size)
        self.pending.append(size)

    def sync(self) -> None:
        """Make every pending change safe, but for those that a failed sync has lost."""
        self._apply_pending(self.safe)
        self.pending.clear()

    def fail_sync(self) -> None:
        """The writes are lost, though they can still be read."""
        self.pending = [change for change in self.pending if isinstance(change, int)]
        self.has_lost = True

    def _synced(self) -> bytearray:
        content = bytearray(self.safe)
        self._apply_pending(content)
        return content

    def _apply_pending(self, content: bytearray) -> None:
        for change in self.pending:
            if isinstance(change, Write):
                _put(content, *change)
            else:
                resize(content, change)

    def after_crash(self, rng: "random.Random") -> "Node":
        """A content that a power loss may leave."""
        content = bytearray(self.safe)
        for change in self.pending:
            if isinstance(change, Write):
                _apply_maybe(content, change, rng)
            elif rng.random() < 0.3:
                break
            else:
                resize(content, change)
        used = {
            at // BLOCK_BYTES
            for at in range(0, len(content), BLOCK_BYTES)
            if not content.startswith(_ZEROS, at) and any(content[at : at + BLOCK_BYTES])
        }
        return Node(content, bytearray(content), [], used, self.modified_ms, self.access)

    def after_kill(self) -> "Node":
        """As the next process finds it: pages that a failed sync lost have been read anew."""
        now = self._synced() if self.has_lost else bytearray(self.now)
        safe, pending, blocks = bytearray(self.safe), list(self.pending), set(self.blocks)
        return Node(safe, now, pending, blocks, self.modified_ms, self.access)


class Entry(NamedTuple):
    """A change of names in a directory: `node` None and no `old` is a removal.

    `inner` are the unsynced changes within a directory that was removed: they count if the
    removal is undone.
    """

    path: str
    node: Node | None
    is_directory: bool = False
    old: str = ""
    inner: "tuple[Entry, ...]" = ()


Names = dict[str, Node | None]
"""Path -> content; None is a directory."""


def apply_entry(names: Names, change: Entry) -> None:
    """Do one change; with a directory goes what lies in it."""
    if change.old:
        names.pop(change.old, None)
    if change.node is not None or change.is_directory:
        names[change.path] = change.node
    elif names.pop(change.path, None) is None:
        start = change.path + "/"
        for path in [path for path in names if path.startswith(start)]:
            del names[path]


def apply_surviving(names: Names, changes: Sequence[Entry], rng: "random.Random") -> None:
    """Do those changes of one directory that survive a power loss."""
    kept = rng.randint(0, len(changes))
    is_ordered = rng.random() < 0.5
    lost: set[str] = set()
    for index, change in enumerate(changes):
        touched = {change.path, change.old} - {""}
        is_kept = index < kept if is_ordered else rng.random() < 0.6
        if is_kept and not touched & lost:
            apply_entry(names, change)
        else:
            lost |= touched
            apply_surviving(names, change.inner, rng)


def resize(content: bytearray, size: int) -> None:
    """Cut, or grow by zeros."""
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if data:
        resize(content, max(len(content), offset + len(data)))
        content[offset : offset + len(data)] = data


def _apply_maybe(content: bytearray, write: Write, rng: "random.Random") -> None:
    """One unsynced write meets its fate."""
    fate = rng.random()
    if fate < 0.4:
        _put(content, *write)
    elif fate < 0.6:
        _put(content, write.offset, write.data[: rng.randint(0, len(write.data))])
    elif fate < 0.75:
        at = 0
        while at < len(write.data):
            size = SECTOR_BYTES - (write.offset + at) % SECTOR_BYTES
            if rng.random() < 0.5:
                _put(content, write.offset + at, write.data[at : at + size])
            at += size


# --------------------------------------------------------------------------------- the files


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
            raise _error(fault.number, self.path)
        if room < size:
            raise _error(errno.ENOSPC, self.path)

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
        start = self._next(offset, has_data=True)
        return start if start < len(self._node.now) else None

    def data_end(self, offset: int) -> int:
        return self._next(offset, has_data=False)

    def _next(self, offset: int, *, has_data: bool) -> int:
        """From `offset` on: where a block begins that has data, or has none; else the end."""
        content = self._node.now
        while offset < len(content):
            if has_data and content.startswith(_MANY_ZEROS, offset):
                offset += len(_MANY_ZEROS)
                continue
            block_end = offset - offset % BLOCK_BYTES + BLOCK_BYTES
            block = content[offset:block_end]
            if (block != _ZEROS[: len(block)]) is has_data:
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
                raise _error(errno.ENOENT, path)
            self.check("create", path)
            if not self.exists(_parent(path)):
                raise _error(errno.ENOENT, path)
            self._change(Entry(path, Node(access=access or DEFAULT_ACCESS)))
            self.note("create", path)
        node = self._entries[path]
        if node is None:
            raise _error(errno.EISDIR, path)
        return CrashableFile(self, path, node)

    def access(self, path: str) -> Access:
        node = self._entries.get(path)
        if node is None:
            raise _error(errno.ENOENT, path)
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
            raise _error(errno.ENOENT, path)
        if self.names(path):
            raise _error(errno.ENOTEMPTY, path)
        node = self._entries[path]
        if node is not None and self.free_bytes is not None:
            self.free_bytes += len(node.blocks) * BLOCK_BYTES
        self._change(Entry(path, None, inner=tuple(self._changes.pop(path, ()))))
        self.note("remove", path)

    def rename(self, old: str, new: str) -> None:
        """Within one directory, as all callers do."""
        self.check("rename", old)
        if old not in self._entries:
            raise _error(errno.ENOENT, old)
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
                fix="Stop it, or give this broker a storePathRootDir of its own.",
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
            raise _error(errno.ENOENT, path)
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
            raise _error(fault.number, path)

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


def _error(number: int, path: str) -> OSError:
    """FileNotFoundError and so on, by its number."""
    return OSError(number, os.strerror(number), path)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
