"""What a power loss makes of changes that were not synced: the rules behind `CrashableFiles`.

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

After sqlite's test6.c and pebble's MemFS. All chance comes from one generator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from sluicemq.files import OPEN, Access

if TYPE_CHECKING:
    import random

BLOCK_BYTES: Final = 4096
SECTOR_BYTES: Final = 512


class Write(NamedTuple):
    """Bytes that were written at an offset."""

    offset: int
    data: bytes


class Resize(NamedTuple):
    """A new size in bytes."""

    size: int


@dataclass
class Node:
    """A file's content: what is safe, what is there now, and the changes between."""

    safe: bytearray = field(default_factory=bytearray)
    now: bytearray = field(default_factory=bytearray)
    pending: list[Write | Resize] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)
    modified_ms: int = 0
    access: Access = OPEN
    has_lost: bool = False

    def write(self, offset: int, data: bytes) -> None:
        """Like pwrite; views of the file see it unless it grows."""
        if offset + len(data) > len(self.now):
            self.now = bytearray(self.now)
            resize(self.now, offset + len(data))
        self.now[offset : offset + len(data)] = data
        self.pending.append(Write(offset, data))

    def truncate(self, size: int) -> None:
        """Views of the old size stay what they were."""
        self.now = bytearray(self.now)
        resize(self.now, size)
        self.pending.append(Resize(size))

    def sync(self) -> None:
        """What was not lost to a failed sync is safe."""
        self.safe = self._synced()
        self.pending.clear()

    def fail_sync(self) -> None:
        """The writes are lost, though they can still be read."""
        self.pending = [change for change in self.pending if isinstance(change, Resize)]
        self.has_lost = True

    def _synced(self) -> bytearray:
        content = bytearray(self.safe)
        for change in self.pending:
            if isinstance(change, Resize):
                resize(content, change.size)
            else:
                _put(content, *change)
        return content

    def after_crash(self, rng: "random.Random") -> "Node":
        """A content that a power loss may leave."""
        content = bytearray(self.safe)
        for change in self.pending:
            if isinstance(change, Write):
                _apply_maybe(content, change, rng)
            elif rng.random() < 0.3:
                break
            else:
                resize(content, change.size)
        blocks = {at // BLOCK_BYTES for at in range(0, len(content), BLOCK_BYTES)}
        used = {b for b in blocks if any(content[b * BLOCK_BYTES : (b + 1) * BLOCK_BYTES])}
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
        _scatter(content, write, rng)


def _scatter(content: bytearray, write: Write, rng: "random.Random") -> None:
    at = 0
    while at < len(write.data):
        size = SECTOR_BYTES - (write.offset + at) % SECTOR_BYTES
        if rng.random() < 0.5:
            _put(content, write.offset + at, write.data[at : at + size])
        at += size
