"""A file system in memory that loses unsynced changes when the power fails.

`CrashableFiles` implements `sluicemq.files.Files`. It keeps the contents of its files in memory at
full size, so configure small files.

`crash` returns a disk as a power failure may leave it. Each change that was not synced survives or
not:

    write        survives, is lost, is torn (a prefix of any length survives) or is scattered
                 (some of its 512-byte sectors survive). Each write has its own fate: a later one
                 may survive an earlier one.
    change of a  survives or is lost. If it is lost, all later changes of the file are lost too.
    file's size
    created,     Of the changes of one directory, either the first ones survive, or any of them; but
    removed or   changes that touch the same name keep their order. A rename is one change: both
    renamed      names change, or neither. If a directory does not survive, neither does what lies
    names        in it.
    failed sync  The kernel has dropped the written pages. A later sync of the file succeeds, and
                 does not save them; that is why a failed sync must never be retried. The process
                 can still read the pages, the next process cannot.

The model follows sqlite's test6.c and pebble's MemFS. All random choices come from one generator.

`kill` returns the disk as the end of a process leaves it: everything that was written is there, and
still unsynced. With `power_fails_after`, the power fails during later work: a change after that
number of changes raises `PowerLost`, and so does every change after it.

Errors can be injected (`fail_next`: ENOSPC, EIO of writes and syncs, short writes), the disk can be
full (`free_bytes`), and bits can flip (`rot`). `syncs_lie` is a deliberate bug, which every test of
durability must detect. `operations` lists all operations in order; a test can add marks to it, and
check what happened before what.
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
"""The size of the blocks that are taken from the free space of the disk."""
_ZEROS: Final = bytes(BLOCK_BYTES)
_MANY_ZEROS: Final = bytes(256 * BLOCK_BYTES)
SECTOR_BYTES: Final = 512
"""The size of the parts of a write that survive a power failure separately."""
TOTAL_BYTES: Final = 1 << 40
MAPS: Final = 8
"""The maximum number of open maps.

It is so small that tests with more files reach it.
"""
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
    """The content of a file (an inode).

    - `synced`: the content that survives a power failure.
    - `current`: the content that the process reads.
    - `unsynced`: the changes between the two, in order: writes, and new sizes in bytes.
    - `blocks`: the numbers of the blocks that the file occupies on the disk.
    - `modified_ms`: when the file was last changed, in milliseconds since 1970.
    - `has_failed_sync`: whether a sync of the file has failed.
    """

    synced: bytearray = field(default_factory=bytearray)
    current: bytearray = field(default_factory=bytearray)
    unsynced: list[Write | int] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)
    modified_ms: int = 0
    access: Access = DEFAULT_ACCESS
    has_failed_sync: bool = False

    def write(self, offset: int, data: bytes) -> None:
        """Write `data` at `offset`, without syncing it.

        Views of the file show the change, unless the file grows.
        """
        if offset + len(data) > len(self.current):
            try:
                resize(self.current, offset + len(data))
            except BufferError:  # Views of a bytearray prevent that it is resized.
                self.current = bytearray(self.current)
                resize(self.current, offset + len(data))
        self.current[offset : offset + len(data)] = data
        self.unsynced.append(Write(offset, data))

    def truncate(self, size: int) -> None:
        """Set the size. Views of the file keep the old content."""
        self.current = bytearray(self.current)
        resize(self.current, size)
        self.unsynced.append(size)

    def sync(self) -> None:
        """Make all unsynced changes durable, except writes that a failed sync has lost."""
        self._apply_unsynced(self.synced)
        self.unsynced.clear()

    def fail_sync(self) -> None:
        """Lose the unsynced writes. The process can still read them."""
        self.unsynced = [change for change in self.unsynced if isinstance(change, int)]
        self.has_failed_sync = True

    def _apply_to_synced(self) -> bytearray:
        """Return the content that a sync would make durable now."""
        content = bytearray(self.synced)
        self._apply_unsynced(content)
        return content

    def _apply_unsynced(self, content: bytearray) -> None:
        """Apply all unsynced changes to `content`."""
        for change in self.unsynced:
            if isinstance(change, Write):
                _overwrite(content, *change)
            else:
                resize(content, change)

    def copy_after_crash(self, rng: "random.Random") -> "Node":
        """Return a copy of the file as a power failure may leave it. `rng` chooses what is lost."""
        content = bytearray(self.synced)
        for change in self.unsynced:
            if isinstance(change, Write):
                _apply_surviving_part(content, change, rng)
            elif rng.random() < 0.3:
                break  # the new size is lost, and with it all later changes
            else:
                resize(content, change)
        return Node(
            synced=content,
            current=bytearray(content),
            blocks=_find_used_blocks(content),
            modified_ms=self.modified_ms,
            access=self.access,
        )

    def copy_after_kill(self) -> "Node":
        """Return a copy of the file as the next process finds it after a kill.

        Only writes whose sync has failed are lost.
        """
        current = bytearray(self.current)
        if self.has_failed_sync:
            current = self._apply_to_synced()
        return Node(
            synced=bytearray(self.synced),
            current=current,
            unsynced=list(self.unsynced),
            blocks=set(self.blocks),
            modified_ms=self.modified_ms,
            access=self.access,
        )


class NameChange(NamedTuple):
    """A change of a name in a directory.

    - A new file has a `node`, a new directory has `is_directory`.
    - A rename has the earlier path in `old`.
    - A removal has neither a `node` nor `old`, and `is_directory` is False. If a directory is
      removed, `inner` are the unsynced changes within it; they matter if the removal is lost.
    """

    path: str
    node: Node | None
    is_directory: bool = False
    old: str = ""
    inner: "tuple[NameChange, ...]" = ()


Names = dict[str, Node | None]
"""Maps each path to the content of the file, or to None if it is a directory."""


def apply_change(names: Names, change: NameChange) -> None:
    """Apply one change of a name to `names`. Removing a directory removes everything in it."""
    if change.old:
        names.pop(change.old, None)
    if change.node is not None or change.is_directory:
        names[change.path] = change.node
    elif names.pop(change.path, None) is None:
        start = change.path + "/"
        for path in list(names):
            if path.startswith(start):
                del names[path]


def apply_surviving(names: Names, changes: Sequence[NameChange], rng: "random.Random") -> None:
    """Apply those changes of a directory to `names` that survive a power failure.

    `rng` chooses whether the first changes survive, or any of them. A change does not survive
    without the earlier changes of the same names.
    """
    survivor_count = rng.randint(0, len(changes))
    is_ordered = rng.random() < 0.5
    lost_paths: set[str] = set()
    for index, change in enumerate(changes):
        paths = {change.path, change.old} - {""}
        survives = index < survivor_count if is_ordered else rng.random() < 0.6
        # Paths of lost changes are noted, because later changes of them are lost too.
        if survives and not paths & lost_paths:
            apply_change(names, change)
        else:
            lost_paths |= paths
            apply_surviving(names, change.inner, rng)


def resize(content: bytearray, size: int) -> None:
    """Set the size of `content`: cut its end, or append zeros."""
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def _find_used_blocks(content: bytearray) -> set[int]:
    """Return the numbers of the blocks that contain other bytes than zeros."""
    used_blocks = set()
    for start in range(0, len(content), BLOCK_BYTES):
        is_full_of_zeros = content.startswith(_ZEROS, start)
        if not is_full_of_zeros and any(content[start : start + BLOCK_BYTES]):
            used_blocks.add(start // BLOCK_BYTES)
    return used_blocks


def _overwrite(content: bytearray, offset: int, data: bytes) -> None:
    """Write `data` at `offset`, and grow `content` with zeros if that is beyond its end."""
    if data:
        resize(content, max(len(content), offset + len(data)))
        content[offset : offset + len(data)] = data


def _apply_surviving_part(content: bytearray, write: Write, rng: "random.Random") -> None:
    """Apply to `content` what survives of an unsynced write: all, nothing, a prefix, or sectors."""
    fate = rng.random()
    if fate < 0.4:  # all
        _overwrite(content, *write)
    elif fate < 0.6:  # a prefix
        _overwrite(content, write.offset, write.data[: rng.randint(0, len(write.data))])
    elif fate < 0.75:  # some sectors
        start = 0
        while start < len(write.data):
            sector_bytes = SECTOR_BYTES - (write.offset + start) % SECTOR_BYTES
            if rng.random() < 0.5:
                _overwrite(content, write.offset + start, write.data[start : start + sector_bytes])
            start += sector_bytes


# --------------------------------------------------------------------------------- the files


class PowerLost(BaseException):
    """The power failed.

    It is a BaseException, so that no error handler of the code under test continues after it.
    """


class Operation(NamedTuple):
    """One operation on the file system, or a mark of the test.

    `kind` is "write", "sync", "truncate", "create", "remove", "rename", "sync_directory", "lock",
    or the text of the mark. `offset` and `size` are those of a write or truncation, in bytes.
    """

    kind: str
    path: str = ""
    offset: int = 0
    size: int = 0


@dataclass
class _Fault:
    """An injected error with the arguments of `CrashableFiles.fail_next`."""

    kind: str
    path_part: str
    number: int
    written: int
    after: int
    """The number of operations that must succeed before."""


class CrashableFile:
    """An open file of `CrashableFiles`. See `sluicemq.files.File` for its methods.

    It lies in memory, so the store reads it without a map.
    """

    def __init__(self, files: "CrashableFiles", path: str, node: Node) -> None:
        self._files = files
        self._node = node
        self.path = path

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write `data` at `offset`. Raises an injected error, and ENOSPC on a full disk.

        The file then has the part of the bytes that was written before. Raises PowerLost if the
        power fails now.
        """
        data = bytes(data)
        self._node.modified_ms = self._files.clock.now_ms()
        try:
            fault = self._files.take_fault("write", self.path)
        except PowerLost:
            self._files.write_at_power_failure(self._node, offset, data)
            raise
        # The disk may fail, or become full, after a part of the bytes.
        size = len(data)
        if fault is not None:
            size = min(fault.written, size)
        stored_size = self._files.allocate(self._node, offset, size)
        if stored_size:
            self._node.write(offset, data[:stored_size])
            self._files.record_operation("write", self.path, offset, stored_size)
        if fault is not None:
            raise _make_error(fault.number, self.path)
        if stored_size < size:
            raise _make_error(errno.ENOSPC, self.path)

    def pread(self, size: int, offset: int) -> bytes:
        self._files.raise_fault("read", self.path)
        return bytes(self._node.current[offset : offset + size])

    def sync(self) -> None:
        """Make the content of the file survive a power failure. Raises an injected error.

        If the disk lies about syncs, nothing becomes durable.
        """
        try:
            self._files.raise_fault("sync", self.path)
        except OSError:
            self._node.fail_sync()
            raise
        self._files.record_operation("sync", self.path)
        if not self._files.syncs_lie:
            self._node.sync()

    def truncate(self, size: int) -> None:
        """Set the size of the file: cut its end, or append zeros. Raises an injected error."""
        self._files.raise_fault("truncate", self.path)
        self._node.modified_ms = self._files.clock.now_ms()
        self._node.truncate(size)
        self._files.record_operation("truncate", self.path, 0, size)

    def size(self) -> int:
        return len(self._node.current)

    def data_start(self, offset: int) -> int | None:
        start = self._find_block(offset, has_data=True)
        return start if start < len(self._node.current) else None

    def data_end(self, offset: int) -> int:
        return self._find_block(offset, has_data=False)

    def _find_block(self, offset: int, *, has_data: bool) -> int:
        """Return the first offset, from `offset` on, in a block of data or in a block of zeros.

        `has_data` says which of them is searched. Return the size of the file if there is no such
        block.
        """
        content = self._node.current
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
        """Return a read-only view of the whole file, which shows later writes, as a map does."""
        return memoryview(self._node.current).toreadonly()

    def close(self) -> None:
        """Do nothing: closing a file does not sync it."""


class CrashableFiles:
    """A file system in memory, with faults. See the module, and `sluicemq.files.Files`.

    - `operations`: all operations so far, in order, with the marks of the test.
    - `free_bytes`: the free space of the disk, None for an endless disk. Blocks of 4,096 bytes are
      taken from it when they are first written.
    - `total_bytes`: the size of the disk, for `usage`. An endless disk is half full.
    - `clock`: the clock for the times of changes.
    - `syncs_lie`: the deliberate bug: syncing a file or directory does nothing.
    - `power_fails_after`: the number of further changes until `PowerLost` is raised, None for
      never. `CHANGES` says which operations count.
    """

    def __init__(self) -> None:
        """Create an empty disk in memory, which is never full."""
        self.pool = DescriptorPool(MAPS)
        self._names: Names = {}
        """The files and directories that the process sees."""
        self._synced_names: Names = {}
        """Those that survive a power failure."""
        self._name_changes: dict[str, list[NameChange]] = {}
        """The changes between the two, by directory."""
        self._locked_paths: set[str] = set()
        self._faults: list[_Fault] = []
        self.operations: list[Operation] = []
        self.free_bytes: int | None = None
        self.total_bytes = TOTAL_BYTES
        self.clock: Clock = SYSTEM_CLOCK
        self.syncs_lie = False
        self.power_fails_after: int | None = None

    # --- the methods of `Files`

    def open(self, path: str, *, create: bool = False, access: Access | None = None) -> File:
        """Open a file, and create it if it is missing and `create` is set. Raises OSError."""
        self.raise_fault("open", path)
        if path not in self._names:
            if not create:
                raise _make_error(errno.ENOENT, path)
            self.raise_fault("create", path)
            if not self.exists(_parent(path)):
                raise _make_error(errno.ENOENT, path)
            self._change_name(NameChange(path, Node(access=access or DEFAULT_ACCESS)))
            self.record_operation("create", path)
        node = self._names[path]
        if node is None:
            raise _make_error(errno.EISDIR, path)
        return CrashableFile(self, path, node)

    def access(self, path: str) -> Access:
        """Return the permissions and owner of a file. Raises FileNotFoundError."""
        node = self._names.get(path)
        if node is None:
            raise _make_error(errno.ENOENT, path)
        return node.access

    def exists(self, path: str) -> bool:
        return path in self._names or path in ("", "/")

    def names(self, directory: str) -> list[str]:
        """Return the sorted names in a directory; [] if it does not exist."""
        start = directory.rstrip("/") + "/"
        names = []
        for path in self._names:
            name = path.removeprefix(start)
            if path.startswith(start) and "/" not in name:
                names.append(name)
        return sorted(names)

    def make_directory(self, path: str, *, durable: bool = True) -> None:
        """Create a directory and its missing parents. If `durable`, sync each parent."""
        missing = []
        while not self.exists(path):
            missing.append(path)
            path = _parent(path)
        for directory in reversed(missing):
            self.raise_fault("create", directory)
            self._change_name(NameChange(directory, None, is_directory=True))
            self.record_operation("create", directory)
            if durable:
                self.sync_directory(_parent(directory))

    def remove(self, path: str) -> None:
        """Remove a file or an empty directory. Raises OSError.

        A power failure may undo that until the directory is synced.
        """
        self.raise_fault("remove", path)
        if path not in self._names:
            raise _make_error(errno.ENOENT, path)
        if self.names(path):
            raise _make_error(errno.ENOTEMPTY, path)
        node = self._names[path]
        if node is not None and self.free_bytes is not None:
            self.free_bytes += len(node.blocks) * BLOCK_BYTES
        self._change_name(NameChange(path, None, inner=tuple(self._name_changes.pop(path, ()))))
        self.record_operation("remove", path)

    def rename(self, old_path: str, new_path: str) -> None:
        """Rename a file within its directory. No caller moves files between directories."""
        self.raise_fault("rename", old_path)
        if old_path not in self._names:
            raise _make_error(errno.ENOENT, old_path)
        self._change_name(NameChange(new_path, self._names[old_path], old=old_path))
        self.record_operation("rename", new_path)

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory survive a power failure. Raises an injected error."""
        self.raise_fault("sync_directory", path)
        self.record_operation("sync_directory", path)
        if self.syncs_lie:
            return
        for change in self._name_changes.pop(path, []):
            apply_change(self._synced_names, change)

    def sync_all(self, path: str) -> bool:
        """Return False: syncing the whole file system is not supported.

        Each file and directory has its own fate in a power failure, so it must be synced itself.
        """
        return False

    def lock(self, path: str) -> Callable[[], None]:
        """Lock a file. Return the function that unlocks it. Raises StoreLockedError."""
        if path in self._locked_paths:
            raise StoreLockedError(
                f"{path} is locked by process 1, which is running.",
                fix="Stop it, or give this broker a storePathRootDir of its own.",
            )
        self.open(path, create=True).pwrite(LOCK_CONTENT, 0)
        self._locked_paths.add(path)
        self.record_operation("lock", path)
        return lambda: self._locked_paths.discard(path)

    def usage(self, path: str) -> tuple[int, int]:
        """Return (total bytes, free bytes) of the disk. An endless disk counts as half full."""
        self.raise_fault("usage", path)
        free_bytes = self.free_bytes
        if free_bytes is None:  # an endless disk is half full
            free_bytes = self.total_bytes // 2
        return self.total_bytes, free_bytes

    def modified_ms(self, path: str) -> int:
        """Return the time of the last write to a file, in ms since 1970.

        Raises FileNotFoundError.
        """
        node = self._names.get(path)
        if node is None:
            raise _make_error(errno.ENOENT, path)
        return node.modified_ms

    # --- the methods for tests

    def fail_next(
        self,
        kind: str,
        number: int = errno.EIO,
        *,
        path_part: str = "",
        written: int = 0,
        after: int = 0,
    ) -> None:
        """Make the next operation of a kind, on a path that contains `path_part`, raise OSError.

        `kind` is one of `Operation`, or "read", "open" or "usage". `number` is the errno. The first
        `written` bytes of a failing write are still written. A failing sync loses the unsynced
        writes of its file. `after` such operations succeed first.
        """
        self._faults.append(_Fault(kind, path_part, number, written, after))

    def clear_faults(self) -> None:
        """Remove the injected errors that were not raised yet."""
        self._faults.clear()

    def mark(self, text: str) -> None:
        """Add a mark of the test to `operations`."""
        self.record_operation(text)

    def crash(self, rng: "random.Random") -> "CrashableFiles":
        """Return a new disk as a power failure may leave it now. `rng` chooses what is lost.

        This disk does not change.
        """
        names = dict(self._synced_names)
        for changes in self._name_changes.values():
            apply_surviving(names, changes, rng)
        files = self._make_empty_disk()
        copies: dict[int, Node] = {}
        for path, node in sorted(names.items()):  # a directory before what lies in it
            if not files.exists(_parent(path)):
                continue  # the directory was lost
            if node is None:
                files._names[path] = None
                continue
            if id(node) not in copies:
                copies[id(node)] = node.copy_after_crash(rng)
            files._names[path] = copies[id(node)]
        files._synced_names = dict(files._names)
        return files

    def kill(self) -> "CrashableFiles":
        """Return a new disk as another process finds it after this one was killed.

        Unsynced changes are there, and a later power failure may still lose them.
        """
        files = self._make_empty_disk()
        copies: dict[int, Node] = {}

        # A node with several names, or in several changes, is copied once.
        def copy(node: Node | None) -> Node | None:
            if node is None:
                return None
            if id(node) not in copies:
                copies[id(node)] = node.copy_after_kill()
            return copies[id(node)]

        def copy_change(change: NameChange) -> NameChange:
            inner = tuple(map(copy_change, change.inner))
            return change._replace(node=copy(change.node), inner=inner)

        files._names = {path: copy(node) for path, node in self._names.items()}
        files._synced_names = {path: copy(node) for path, node in self._synced_names.items()}
        for directory, changes in self._name_changes.items():
            files._name_changes[directory] = list(map(copy_change, changes))
        return files

    def _make_empty_disk(self) -> "CrashableFiles":
        """Return an empty disk with the size, free space and clock of this one."""
        files = CrashableFiles()
        files.free_bytes = self.free_bytes
        files.syncs_lie = self.syncs_lie
        files.total_bytes = self.total_bytes
        files.clock = self.clock
        return files

    def rot(self, path: str, rng: "random.Random", start: int = 0, end: int | None = None) -> int:
        """Flip a random bit of a file, durably. Return the offset of the changed byte.

        It is between the offsets `start` and `end`; `end` None means the end of the file. Raises
        IsADirectoryError for a directory, and if the file has no byte behind `start`.
        """
        node = self._names[path]
        if node is None or len(node.current) <= start:
            raise IsADirectoryError(errno.EISDIR, "there is no byte that could change", path)
        if end is None:
            end = len(node.current)
        offset = rng.randrange(start, end)
        bit = 1 << rng.randrange(8)
        for content in (node.current, node.synced):
            if offset < len(content):
                content[offset] ^= bit
        return offset

    def content(self, path: str) -> bytes:
        """Return what the process reads in a file, b"" for a directory."""
        node = self._names[path]
        return b"" if node is None else bytes(node.current)

    def put(self, path: str, content: bytes) -> None:
        """Create or replace a file and its directories, durably. Tests prepare a disk with it."""
        self.make_directory(_parent(path))
        file = self.open(path, create=True)
        file.truncate(len(content))
        file.pwrite(content, 0)
        file.sync()
        self.sync_directory(_parent(path))

    # --- the methods for `CrashableFile`

    def record_operation(self, kind: str, path: str = "", offset: int = 0, size: int = 0) -> None:
        """Add an operation to `operations`."""
        self.operations.append(Operation(kind, path, offset, size))

    def raise_fault(self, kind: str, path: str) -> None:
        """Raise the error that was injected for this operation, if there is one.

        Raises PowerLost as `take_fault` does.
        """
        fault = self.take_fault(kind, path)
        if fault is not None:
            raise _make_error(fault.number, path)

    def allocate(self, node: Node, offset: int, size: int) -> int:
        """Allocate the blocks that a write needs. Return how many of its bytes fit on the disk."""
        first_block = offset // BLOCK_BYTES
        last_block = (offset + size - 1) // BLOCK_BYTES
        for block in range(first_block, last_block + 1):
            if block in node.blocks:
                continue
            if self.free_bytes is not None:
                if self.free_bytes < BLOCK_BYTES:
                    return max(0, block * BLOCK_BYTES - offset)
                self.free_bytes -= BLOCK_BYTES
            node.blocks.add(block)
        return size

    def take_fault(self, kind: str, path: str) -> _Fault | None:
        """Return the error that was injected for this operation, and remove it; None without one.

        Raises PowerLost if the operation changes something, and the power fails now or has failed.
        """
        if kind in CHANGES and self.power_fails_after is not None:
            self.power_fails_after -= 1
            if self.power_fails_after < 0:
                raise PowerLost(f"{kind} {path}")
        for fault in self._faults:
            if fault.kind != kind or fault.path_part not in path:
                continue
            if fault.after == 0:
                self._faults.remove(fault)
                return fault
            fault.after -= 1
        return None

    def write_at_power_failure(self, node: Node, offset: int, data: bytes) -> None:
        """Keep the write during which the power failed as an unsynced one. Ignore later writes."""
        if self.power_fails_after == -1:
            node.write(offset, data)

    def _change_name(self, change: NameChange) -> None:
        """Apply a change of a name, which is unsynced until its directory is synced."""
        self._name_changes.setdefault(_parent(change.path), []).append(change)
        apply_change(self._names, change)


def _make_error(error_number: int, path: str) -> OSError:
    """Return the OSError of an errno, such as FileNotFoundError for ENOENT."""
    return OSError(error_number, os.strerror(error_number), path)


def _parent(path: str) -> str:
    """Return the directory of a path; "" without one."""
    return path.rpartition("/")[0]
