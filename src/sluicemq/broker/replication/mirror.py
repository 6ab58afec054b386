"""State as operations on files: what a replica has to have besides the log.

Everything a broker promises and does not keep in its log stands in small files: tables with their
journals, marks, access rules. A master's files are wrapped (`MirroredFiles`), and whatever happens
to a small one becomes a numbered `Operation`, with the end of the log at that moment:

    WRITE      bytes at an offset            TRUNCATE   to a size; makes a file that is missing
    RENAME     to another name               REMOVE     a file

A slave does the same to its own files, each operation when its own log has reached that end
(`Applier`). So its directory is at all times what this master would have left if it had been
killed: the files of some moment, and a log that is as long or longer. A failover is a restart after
`kill -9`, which every table knows how to survive. Nothing on a slave writes these files but this.

Names are places and not paths (`config/topics.json`, `acl/plain_acl.yml`): each replica has them
where its own settings say.

Numbers belong to one life of one master. Who comes without a number, with one of another life, or
with one so old that its operations are not kept any more, gets a snapshot: BEGIN, every file, END.
END says with which number it agrees. A slave takes a snapshot as a whole: it is written down in one
file first (`config/sluiceSnapshot`), and a slave that is killed half-way finishes at its next start
(`Applier.settle`). UNITs in a snapshot are what neither a file nor the log says: the last message
of each queue all of whose messages have expired, so that its offsets go on.

What somebody else writes (an editor: access rules) is found by `Mirror.look`.
"""

import contextlib
import errno
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from enum import IntEnum
from typing import Final, NamedTuple

from sluicemq.errors import ProtocolError
from sluicemq.files import DEFAULT_ACCESS, OWNER_ONLY, Access, File, Files

CHUNK_BYTES: Final = 1 << 20
"""A longer write is several operations, so that any of them fits into a frame."""
ANSWER_BYTES: Final = 4 << 20
RETAINED_BYTES_MAX: Final = 64 << 20
"""A slave that is further behind gets a snapshot."""
FORGOTTEN_S: Final = 60.0
"""Who has not asked for so long is not kept anything for."""
SNAPSHOT_NAME: Final = "config/sluiceSnapshot"
EDITED: Final = "acl/"
"""Below it is what people edit."""
OWN_NAMES: Final = ("config/sluiceReplicas.json", SNAPSHOT_NAME)
"""What each replica has for itself."""
_SNAPSHOT_NUMBERS: Final = 1 << 40
"""From here on numbers are places in a snapshot."""
_HEAD: Final = struct.Struct(">qqBHqI")


class Kind(IntEnum):
    """What an operation does."""

    WRITE = 1
    TRUNCATE = 2
    RENAME = 3
    REMOVE = 4
    BEGIN = 5
    END = 6
    UNIT = 7


class Operation(NamedTuple):
    """One thing done to a file when the log ended at `log_end`.

    `offset`: of WRITE, in bytes; of TRUNCATE the size; of END the number that the snapshot agrees
    with; of UNIT the queue offset. `data`: of WRITE; of RENAME the new name; of UNIT the unit of
    the consume queue, whose `name` is `topic/queue id`.
    """

    number: int
    log_end: int
    kind: Kind
    name: str = ""
    offset: int = 0
    data: bytes = b""


def encode_operations(operations: Iterable[Operation]) -> bytes:
    """One after the other: number 8, log end 8, kind 1, size of the name 2, offset 8, size of the
    data 4, name, data; big-endian."""
    parts = []
    for number, log_end, kind, name, offset, data in operations:
        encoded = name.encode()
        parts += [_HEAD.pack(number, log_end, kind, len(encoded), offset, len(data)), encoded, data]
    return b"".join(parts)


def decode_operations(data: bytes) -> list[Operation]:
    """The inverse. Raises ProtocolError."""
    found, at = [], 0
    try:
        while at < len(data):
            number, log_end, kind, name_size, offset, size = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            name = data[at : at + name_size].decode()
            at += name_size
            found.append(Operation(number, log_end, Kind(kind), name, offset, data[at : at + size]))
            at += size
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"operation {len(found)} of mirrored state: {error}") from error
    if at != len(data):
        raise ProtocolError(f"mirrored state ends {at - len(data)} bytes too early.")
    return found


class Places:
    """Which files are mirrored, and where: `roots` is name -> path of a directory or file."""

    def __init__(self, roots: Mapping[str, str]) -> None:
        self.roots = dict(roots)

    @classmethod
    def of(cls, files: Files, root: str, rules: Iterable[str] = ()) -> "Places":
        """Those of a broker with its store below `root`, whose access rules are in the first of
        these files that is there."""
        roots, paths = {"config": f"{root}/config"}, tuple(rules)
        if paths:
            main = next(filter(files.exists, paths), paths[0])
            roots |= {"acl/main": main, "acl/more": f"{main.rpartition('/')[0] or '.'}/acl"}
        return cls(roots)

    def name_of(self, path: str) -> str | None:
        """None of a path that is not mirrored."""
        for name, root in self.roots.items():
            if path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/", "."):
                found = name + path[len(root) :]
                return None if found.startswith(OWN_NAMES) else found
        return None

    def path_of(self, name: str) -> str:
        """Raises ProtocolError for a name that leads elsewhere."""
        for start, root in self.roots.items():
            if name.startswith(start) and name[len(start) : len(start) + 1] in ("", "/", "."):
                if ".." not in name.split("/"):
                    return root + name[len(start) :]
                break
        raise ProtocolError(f"{name!r} is no place of mirrored state.")

    def walk(self, files: Files, start: str = "") -> Iterator[tuple[str, str]]:
        """(name, path) of every mirrored file that is there, of the names that begin so."""
        for name, root in self.roots.items():
            if not name.startswith(start):
                continue
            parent, _, last = root.rpartition("/")
            siblings = [each for each in files.names(parent) if each.startswith(last + ".")]
            for path in [root, *(f"{parent}/{each}" for each in siblings)]:
                for found in _below(files, path):
                    if self.name_of(found) == name + found[len(root) :]:
                        yield name + found[len(root) :], found


def _below(files: Files, path: str) -> Iterator[str]:
    """The files at a path or below it."""
    if inner := files.names(path):
        for name in inner:
            yield from _below(files, f"{path}/{name}")
    elif files.exists(path):
        with contextlib.suppress(IsADirectoryError):
            files.open(path).close()
            yield path


def _content(files: Files, path: str) -> bytes:
    with closing(files.open(path)) as file:
        return file.pread(file.size(), 0)


# --------------------------------------------------------------------------------- the master


class _Asker:
    """A slave that asks."""

    __slots__ = ("number", "seen_s")

    def __init__(self) -> None:
        self.number, self.seen_s = -1, 0.0


class Mirror:
    """The operations of one life of a master. `add` and `snapshot` may be called in any thread; all
    else belongs to the loop's. `call_soon` is the loop's, of those that any thread may call."""

    def __init__(
        self,
        places: Places,
        *,
        life: str,
        call_soon: Callable[[Callable[[], None]], object] = lambda call: call(),
    ) -> None:
        self.places, self.life = places, life
        self.number = 0
        """Of the last operation."""
        self.log_end: Callable[[], int] = lambda: 0
        """The end of the log; to be set when there is one."""
        self.units: Callable[[], Iterable[tuple[str, int, int, bytes]]] = tuple
        """(topic, queue id, offset, unit) for UNITs."""
        self.lock = threading.RLock()
        self._call_soon = call_soon
        self._operations: deque[Operation] = deque()
        self._bytes = 0
        self._snapshots: deque[list[Operation]] = deque(maxlen=2)
        self._snapshots_made = 0
        self._askers: dict[int, _Asker] = {}
        self._looked: dict[str, bytes] = {}
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._unkept: list[tuple[int, Callable[[], Collection[int]], Callable[[], None]]] = []
        self._is_waking = False

    # --- what happens

    def add(self, kind: Kind, name: str, offset: int = 0, data: bytes = b"") -> None:
        """It has happened. The caller holds `lock`, and held it when it did it."""
        self.number += 1
        if self._askers:
            operation = Operation(self.number, self.log_end(), kind, name, offset, data)
            self._operations.append(operation)
            self._bytes += _HEAD.size + len(data)
            while self._bytes > RETAINED_BYTES_MAX:
                self._drop()
        if self._waiting and not self._is_waking:
            self._is_waking = True
            self._call_soon(self._wake)

    def _drop(self) -> None:
        self._bytes -= _HEAD.size + len(self._operations.popleft().data)

    def look(self, files: Files) -> None:
        """Blocking, now and then: access rules that somebody else has changed. Raises OSError."""
        found = dict(self.places.walk(files, EDITED))
        for name in self._looked.keys() - found:
            with self.lock:
                self.add(Kind.REMOVE, name)
            del self._looked[name]
        for name, path in found.items():
            content = _content(files, path)
            if self._looked.get(name) != content:
                self._looked[name] = content
                with self.lock:
                    self.add(Kind.TRUNCATE, name)
                    for operation in _written(name, content):
                        self.add(*operation)

    # --- who asks

    def asked(self, replica_id: int, life: str, number: int, now_s: float) -> None:
        """A slave has all operations up to this one (of this life; else it has none)."""
        asker = self._askers.setdefault(replica_id, _Asker())
        is_ours = life == self.life and number < _SNAPSHOT_NUMBERS
        asker.number, asker.seen_s = number if is_ours else -1, now_s
        self.settle()
        with self.lock:
            for key, other in list(self._askers.items()):
                if now_s - other.seen_s > FORGOTTEN_S:
                    del self._askers[key]
            kept = min(other.number for other in self._askers.values())
            while self._operations and self._operations[0].number <= kept:
                self._drop()

    def after(self, life: str, number: int) -> list[Operation] | None:
        """What comes next, [] when there is nothing yet, None when it takes a snapshot."""
        if life != self.life:
            return None
        if number >= _SNAPSHOT_NUMBERS:
            for snapshot in self._snapshots:
                at = number - snapshot[0].number + 1
                if 0 < at < len(snapshot):
                    return _some(snapshot[at:])
            return None
        with self.lock:
            first = self._operations[0].number if self._operations else self.number + 1
            if not first - 1 <= number <= self.number:
                return None
            return _some(op for op in self._operations if op.number > number)

    def snapshot(self, files: Files) -> list[Operation]:
        """Blocking: every file as it is now; the beginning of it. Raises OSError."""
        with self.lock:
            self._snapshots_made += 1
            taken: list[tuple[Kind, str, int, bytes]] = [(Kind.BEGIN, "", 0, b"")]
            for name, path in self.places.walk(files):
                taken.append((Kind.TRUNCATE, name, 0, b""))
                taken += _written(name, _content(files, path))
            for topic, queue_id, offset, unit in self.units():
                taken.append((Kind.UNIT, f"{topic}/{queue_id}", offset, unit))
            taken.append((Kind.END, "", self.number, b""))
            base, log_end = self._snapshots_made * _SNAPSHOT_NUMBERS, self.log_end()
        operations = [
            Operation(base + at, log_end if kind is Kind.END else 0, kind, name, offset, data)
            for at, (kind, name, offset, data) in enumerate(taken)
        ]
        self._snapshots.append(operations)
        return _some(operations)

    def wait_for(self, number: int, done: Callable[[], None]) -> None:
        """Calls back when there is an operation with this number, perhaps at once."""
        if self.number >= number:
            done()
        else:
            self._waiting.append((number, done))

    def _wake(self) -> None:
        self._is_waking = False
        waiting, self._waiting = self._waiting, []
        for number, done in waiting:
            self.wait_for(number, done)

    # --- what is kept elsewhere too

    def kept(self, who: Callable[[], Collection[int]], done: Callable[[], None]) -> None:
        """Calls back when all replicas that `who` names by then have everything up to now."""
        self._unkept.append((self.number, who, done))
        self.settle()

    def settle(self) -> None:
        """What is waited for may be kept: a slave has said so, or it counts no more."""
        waiting, self._unkept = self._unkept, []
        for number, who, done in waiting:
            if all(self.number_of(replica_id) >= number for replica_id in who()):
                done()
            else:
                self._unkept.append((number, who, done))

    def number_of(self, replica_id: int) -> int:
        """The last operation that this slave has said to have; -1: not even a snapshot."""
        asker = self._askers.get(replica_id)
        return asker.number if asker is not None else -1

    def askers(self, now_s: float, silent_s: float) -> list[int]:
        """The slaves that have asked in the last so many seconds."""
        return [key for key, one in self._askers.items() if now_s - one.seen_s <= silent_s]


def _written(name: str, content: bytes) -> list[tuple[Kind, str, int, bytes]]:
    return [
        (Kind.WRITE, name, at, content[at : at + CHUNK_BYTES])
        for at in range(0, len(content), CHUNK_BYTES)
    ]


def _some(operations: Iterable[Operation]) -> list[Operation]:
    """As many of them as an answer takes."""
    found, size = [], 0
    for operation in operations:
        if size >= ANSWER_BYTES:
            break
        found.append(operation)
        size += _HEAD.size + len(operation.data)
    return found


class MirroredFiles:
    """The files of a master. Those that are not mirrored are opened as if this were not here."""

    def __init__(self, below: Files, mirror: Mirror) -> None:
        self._below, self._mirror, self.pool = below, mirror, below.pool
        self.access, self.exists, self.names = below.access, below.exists, below.names
        self.make_directory, self.sync_all = below.make_directory, below.sync_all
        self.sync_directory, self.lock = below.sync_directory, below.lock
        self.usage, self.modified_ms = below.usage, below.modified_ms

    def open(self, path: str, *, create: bool = False, access: Access | None = None) -> File:
        name = self._mirror.places.name_of(path)
        if name is None:
            return self._below.open(path, create=create, access=access)
        with self._mirror.lock:
            is_new = create and not self._below.exists(path)
            file = self._below.open(path, create=create, access=access)
            if is_new:
                self._mirror.add(Kind.TRUNCATE, name)
        return _MirroredFile(file, name, self._mirror)

    def rename(self, old: str, new: str) -> None:
        places, mirror = self._mirror.places, self._mirror
        names = places.name_of(old), places.name_of(new)
        with mirror.lock:
            self._below.rename(old, new)
            if names[0] is not None and names[1] is not None:
                mirror.add(Kind.RENAME, names[0], 0, names[1].encode())

    def remove(self, path: str) -> None:
        name = self._mirror.places.name_of(path)
        with self._mirror.lock if name is not None else contextlib.nullcontext():
            self._below.remove(path)
            if name is not None:
                self._mirror.add(Kind.REMOVE, name)


class _MirroredFile:
    """A small file of a master."""

    def __init__(self, below: File, name: str, mirror: Mirror) -> None:
        self._below, self._name, self._mirror = below, name, mirror
        self.pread, self.sync, self.size, self.close = (
            below.pread, below.sync, below.size, below.close,
        )  # fmt: skip
        self.data_start, self.data_end, self.fileno = (
            below.data_start, below.data_end, below.fileno,
        )  # fmt: skip

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        with self._mirror.lock:
            self._below.pwrite(data, offset)
            for kind, name, at, part in _written(self._name, bytes(data)):
                self._mirror.add(kind, name, offset + at, part)

    def truncate(self, size: int) -> None:
        with self._mirror.lock:
            self._below.truncate(size)
            self._mirror.add(Kind.TRUNCATE, self._name, size)


# ---------------------------------------------------------------------------------- the slave


class HeldFiles(MirroredFiles):
    """The files of a slave for everybody but its `Applier`: what others write to those that are
    mirrored goes nowhere, since a slave has its master's."""

    def __init__(self, below: Files, places: Places) -> None:
        super().__init__(below, Mirror(places, life=""))

    def open(self, path: str, *, create: bool = False, access: Access | None = None) -> File:
        if self._mirror.places.name_of(path) is None:
            return self._below.open(path, create=create, access=access)
        return _HeldFile(self._below.open(path) if self._below.exists(path) or not create else None)

    def rename(self, old: str, new: str) -> None:
        if self._mirror.places.name_of(old) is None:
            self._below.rename(old, new)

    def remove(self, path: str) -> None:
        if self._mirror.places.name_of(path) is None:
            self._below.remove(path)


class _HeldFile:
    """A small file that is only read; None is one that somebody would have made."""

    def __init__(self, below: File | None) -> None:
        self._below = below

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Nothing."""

    def truncate(self, size: int) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

    def pread(self, size: int, offset: int) -> bytes:
        return b"" if self._below is None else self._below.pread(size, offset)

    def size(self) -> int:
        return 0 if self._below is None else self._below.size()

    def data_start(self, offset: int) -> int | None:
        return None if self._below is None else self._below.data_start(offset)

    def data_end(self, offset: int) -> int:
        return 0 if self._below is None else self._below.data_end(offset)

    def fileno(self) -> int:
        if self._below is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._below.fileno()

    def close(self) -> None:
        if self._below is not None:
            self._below.close()


class Applier:
    """Does a master's operations to the files of this replica. Blocking, in one thread at a time.

    `put_unit(topic, queue_id, offset, unit)` takes the UNITs of a snapshot.
    """

    def __init__(
        self,
        files: Files,
        places: Places,
        put_unit: Callable[[str, int, int, bytes], object] = lambda *_: None,
    ) -> None:
        self._files, self._places, self._put_unit = files, places, put_unit
        self.life, self.number = "", 0
        """Of the last operation that is done: what is asked for next comes after it."""
        self.is_whole = False
        """Has a snapshot of this life been taken to its end?"""
        self._waiting: deque[Operation] = deque()
        self._snapshot: list[Operation] | None = None
        self._dirty: set[str] = set()
        self._dirty_directories: set[str] = set()

    @property
    def waits_for(self) -> int | None:
        """The end of the log that the next operation waits for; None: nothing waits."""
        return self._waiting[0].log_end if self._waiting else None

    def forget(self) -> None:
        """Begin anew: with a snapshot."""
        self.life, self.number, self.is_whole, self._snapshot = "", 0, False, None
        self._waiting.clear()

    def take(self, life: str, operations: Iterable[Operation]) -> None:
        """What a master of this life has sent."""
        if life != self.life:
            self.forget()
            self.life = life
        self._waiting.extend(operations)

    def apply(self, log_end: int) -> set[str]:
        """Does what a log of this length allows, durably; returns the names of what changed.

        Raises OSError, ProtocolError: then a snapshot is asked for next.
        """
        changed: set[str] = set()
        try:
            while self._waiting and self._waiting[0].log_end <= log_end:
                operation = self._waiting.popleft()
                self.number = operation.number
                if operation.kind is Kind.BEGIN:
                    self._snapshot = []
                elif self._snapshot is None:
                    self._do(operation)
                    changed.add(operation.name)
                elif operation.kind is not Kind.END:
                    self._snapshot.append(operation)
                else:
                    changed |= self._replace(self._snapshot)
                    self._snapshot, self.number, self.is_whole = None, operation.offset, True
            self._sync()
        except BaseException:
            self.forget()
            raise
        return changed

    def settle(self) -> None:
        """At a start: finish a snapshot that was taken as a whole. Raises OSError."""
        path = self._places.path_of(SNAPSHOT_NAME)
        if not self._files.exists(path):
            return
        content = _content(self._files, path)
        if content[:4] == zlib.crc32(content[4:]).to_bytes(4):
            self._make(decode_operations(content[4:]))
        self._files.remove(path)
        self._files.sync_directory(path.rpartition("/")[0])

    # --- one

    def _do(self, operation: Operation) -> None:
        path = self._places.path_of(operation.name)
        directory = path.rpartition("/")[0]
        if operation.kind is Kind.RENAME:
            new = self._places.path_of(operation.data.decode())
            self._sync_file(path)
            self._files.rename(path, new)
            self._dirty_directories.add(directory)
        elif operation.kind is Kind.REMOVE:
            with contextlib.suppress(FileNotFoundError):
                self._files.remove(path)
            self._dirty.discard(path)
            self._dirty_directories.add(directory)
        else:
            if not self._files.exists(path):
                self._files.make_directory(directory)
                self._dirty_directories.add(directory)
            with closing(self._files.open(path, create=True, access=self._access(path))) as file:
                if operation.kind is Kind.TRUNCATE:
                    file.truncate(operation.offset)
                else:
                    file.pwrite(operation.data, operation.offset)
            self._dirty.add(path)

    def _access(self, path: str) -> Access:
        if self._files.exists(path):
            return self._files.access(path)
        is_table = (self._places.name_of(path) or "").startswith("config/")
        return DEFAULT_ACCESS if is_table else OWNER_ONLY

    def _sync_file(self, path: str) -> None:
        if path in self._dirty:
            self._dirty.discard(path)
            with closing(self._files.open(path)) as file:
                file.sync()

    def _sync(self) -> None:
        for path in sorted(self._dirty):
            self._sync_file(path)
        for directory in sorted(self._dirty_directories):
            self._files.sync_directory(directory)
        self._dirty_directories.clear()

    # --- all

    def _replace(self, operations: list[Operation]) -> set[str]:
        encoded = encode_operations(operations)
        path = self._places.path_of(SNAPSHOT_NAME)
        self._put(path, zlib.crc32(encoded).to_bytes(4) + encoded, OWNER_ONLY)
        self._files.sync_directory(path.rpartition("/")[0])
        changed = self._make(operations)
        self._files.remove(path)
        self._files.sync_directory(path.rpartition("/")[0])
        return changed

    def _make(self, operations: list[Operation]) -> set[str]:
        """The files are those of the snapshot, and no others."""
        contents: dict[str, bytearray] = {}
        for operation in operations:
            if operation.kind is Kind.UNIT:
                topic, _, queue_id = operation.name.rpartition("/")
                self._put_unit(topic, int(queue_id), operation.offset, operation.data)
            else:
                contents.setdefault(operation.name, bytearray()).extend(operation.data)
        changed = set()
        for name, path in list(self._places.walk(self._files)):
            if name not in contents:
                self._files.remove(path)
            elif _content(self._files, path) == contents[name]:
                del contents[name]
                continue
            changed.add(name)
            self._dirty_directories.add(path.rpartition("/")[0])
        for name, content in contents.items():
            path = self._places.path_of(name)
            self._put(path, content, self._access(path))
            changed.add(name)
        self._dirty.clear()
        self._sync()
        return changed

    def _put(self, path: str, content: bytes | bytearray, access: Access) -> None:
        """A whole file, in one step."""
        directory, beside = path.rpartition("/")[0], path + ".new"
        self._files.make_directory(directory)
        with closing(self._files.open(beside, create=True, access=access)) as file:
            file.truncate(len(content))
            file.pwrite(content, 0)
            file.sync()
        self._files.rename(beside, path)
        self._dirty_directories.add(directory)
