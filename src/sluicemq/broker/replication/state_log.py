"""The state log: operations on files by which a slave copies everything that is not the commit log.

What a broker promises and does not store in its log is in small files: tables with their journals,
checkpoints, access rules. The files of a master are wrapped in `RecordingFiles`, and each change of
a small file becomes a numbered `Operation`, with the end of the log at that moment:

    WRITE      write bytes at an offset
    TRUNCATE   set the size of a file; creates a missing file
    RENAME     rename a file
    REMOVE     remove a file

A slave applies each operation to its own files once its own log has reached that end
(`state_applier.StateApplier`). Its directory is therefore always what this master would have left
if it had been killed: the files of some moment, and a log that is as long or longer. A failover is
like a restart after `kill -9`, which every table survives. Nothing else on a slave writes these
files (`state_applier.DiscardingFiles`).

Operations contain names, not paths, such as `config/topics.json` and `acl/main`. Each replica has
the files where its own configuration says (`ReplicatedPaths`).

Operation numbers belong to one run of one master. A slave gets a snapshot if it has no number, a
number of another run, or a number so old that the following operations are not retained any more. A
snapshot consists of BEGIN, every file, and END, which contains the number of the operation that the
snapshot corresponds to. A slave applies a snapshot as a whole: it first writes it to one file
(`config/sluiceSnapshot`), and if it is killed before the end, it finishes at its next start
(`StateApplier.finish_snapshot`). UNIT operations of a snapshot contain what is neither in a file
nor in the log: the last unit of each queue all of whose messages have expired, so that its offsets
continue.

Changes from outside the broker, such as an editor's changes of access rules, are found by
`StateLog.record_edits`.
"""

import contextlib
import struct
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from enum import IntEnum
from typing import Final, NamedTuple

from sluicemq.errors import ProtocolError
from sluicemq.files import Access, File, Files

CHUNK_BYTES: Final = 1 << 20
"""The most bytes of a WRITE. A longer write becomes several operations, so that each of them fits
into a frame."""
ANSWER_BYTES: Final = 4 << 20
"""A response contains operations until they have at least this size, in bytes."""
RETAINED_BYTES_MAX: Final = 64 << 20
"""The size of the operations that a master retains. A slave that is further behind gets a
snapshot."""
FORGOTTEN_S: Final = 60.0
"""A slave that has not sent a request for this time, in seconds, is forgotten: operations are not
retained for it."""
SNAPSHOT_NAME: Final = "config/sluiceSnapshot"
EDITED: Final = "acl/"
"""The start of the names of files that users edit."""
UNREPLICATED_NAMES: Final = ("config/sluiceReplicas.json", SNAPSHOT_NAME)
"""The starts of the names of files that are not replicated: each replica has its own."""
_SNAPSHOT_NUMBERS: Final = 1 << 40
"""Numbers from here on are those of operations in a snapshot."""
_HEAD: Final = struct.Struct(">qqBHqI")


class OperationKind(IntEnum):
    """What an operation does."""

    WRITE = 1
    TRUNCATE = 2
    RENAME = 3
    REMOVE = 4
    BEGIN = 5
    END = 6
    UNIT = 7


class Operation(NamedTuple):
    """One change of a file, made when the commit log ended at `log_end`.

    - `name` is the name of the file; for UNIT, "topic/queue id".
    - `offset` is, for WRITE, the offset in bytes; for TRUNCATE, the size; for END, the number that
      the snapshot corresponds to; for UNIT, the queue offset.
    - `data` is, for WRITE, the bytes; for RENAME, the new name; for UNIT, the unit of the consume
      queue.
    """

    number: int
    log_end: int
    kind: OperationKind
    name: str = ""
    offset: int = 0
    data: bytes = b""


def encode_operations(operations: Iterable[Operation]) -> bytes:
    """Encode operations, one after the other, for a request or a snapshot file.

    An operation has these fields, big-endian, with their sizes in bytes: number (8), log end (8),
    kind (1), size of the name (2), offset (8), size of the data (4), then the name and the data.
    """
    encoded_parts: list[bytes] = []
    for operation in operations:
        name = operation.name.encode()
        head = _HEAD.pack(
            operation.number,
            operation.log_end,
            operation.kind,
            len(name),
            operation.offset,
            len(operation.data),
        )
        encoded_parts += (head, name, operation.data)
    return b"".join(encoded_parts)


def decode_operations(encoded: bytes) -> list[Operation]:
    """Return the operations that `encode_operations` has encoded.

    Raises ProtocolError if an operation is invalid or the bytes end within one.
    """
    operations = []
    position = 0
    try:
        while position < len(encoded):
            operation, position = _decode_operation(encoded, position)
            operations.append(operation)
    except (struct.error, ValueError) as error:
        raise ProtocolError(
            f"Operation {len(operations)} of the state log is invalid: {error}"
        ) from error
    if position != len(encoded):
        raise ProtocolError(
            f"The operations of the state log end {position - len(encoded)} bytes too early."
        )
    return operations


def _decode_operation(encoded: bytes, position: int) -> tuple[Operation, int]:
    """Decode the operation at `position` of `encoded`.

    Return (operation, position of the next one). If the bytes end within the name or the data, the
    returned position is greater than their length. Raises struct.error or ValueError if the
    operation is invalid.
    """
    number, log_end, kind, name_size, offset, data_size = _HEAD.unpack_from(encoded, position)
    name_start = position + _HEAD.size
    data_start = name_start + name_size
    end = data_start + data_size
    name = encoded[name_start:data_start].decode()
    data = encoded[data_start:end]
    return Operation(number, log_end, OperationKind(kind), name, offset, data), end


class ReplicatedPaths:
    """The files that are replicated, and where they are on this replica.

    `roots` maps the start of names to the path of a directory or file. The files beside such a path
    that continue it with a dot, such as backups, belong to it.
    """

    def __init__(self, roots: Mapping[str, str]) -> None:
        """Create the paths from names to paths, such as {"config": "/store/config"}."""
        self.roots = dict(roots)

    @classmethod
    def for_broker(cls, files: Files, root: str, rules: Iterable[str] = ()) -> "ReplicatedPaths":
        """Return the paths of the replicated files of a broker whose store is in `root`.

        They are the tables in `root`/config, and the access rules. `rules` are the paths where the
        file with the access rules may be. The first existing one is used, or the first one if none
        exists. Further rules may be in the directory `acl` beside it. No `rules` means that the
        broker has no access control.
        """
        roots = {"config": f"{root}/config"}
        paths = tuple(rules)
        if paths:
            main = next(filter(files.exists, paths), paths[0])
            roots |= {"acl/main": main, "acl/more": f"{main.rpartition('/')[0] or '.'}/acl"}
        return cls(roots)

    def name_of(self, path: str) -> str | None:
        """Return the name of the file at `path`, such as `config/topics.json`.

        Return None if the file is not replicated.
        """
        for name, root in self.roots.items():
            # The root itself, a file below it, or a file with a further suffix, such as .bak.
            if path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/", "."):
                file_name = name + path[len(root) :]
                return None if file_name.startswith(UNREPLICATED_NAMES) else file_name
        return None

    def path_of(self, name: str) -> str:
        """Return the path of the file `name`.

        Raises ProtocolError if the name does not begin with a key of `roots`, or contains "..".
        """
        for start, root in self.roots.items():
            if name.startswith(start) and name[len(start) : len(start) + 1] in ("", "/", "."):
                if ".." not in name.split("/"):
                    return root + name[len(start) :]
                break
        raise ProtocolError(f"{name!r} is not the name of a replicated file.")

    def find_files(self, files: Files, start: str = "") -> Iterator[tuple[str, str]]:
        """Yield name and path of each replicated file that exists.

        Only the roots whose names begin with `start` are searched; "" means all roots.
        """
        for root_name, root in self.roots.items():
            if not root_name.startswith(start):
                continue
            for path in _iter_files_of_root(files, root):
                name = root_name + path[len(root) :]
                if self.name_of(path) == name:  # else it is not replicated, or of another root
                    yield name, path


def _iter_files_of_root(files: Files, root: str) -> Iterator[str]:
    """Yield the path of the file `root`, or the paths of all files below the directory `root`.

    Files whose paths begin with `root` and a dot, such as the backup `root`.bak, are included.
    """
    parent, _, base_name = root.rpartition("/")
    siblings = [name for name in files.names(parent) if name.startswith(base_name + ".")]
    yield from _iter_files_below(files, root)
    for sibling in siblings:
        yield from _iter_files_below(files, f"{parent}/{sibling}")


def _iter_files_below(files: Files, path: str) -> Iterator[str]:
    """Yield `path` if it is a file, or the paths of all files below it if it is a directory.

    Yield nothing if there is neither, or if the directory is empty.
    """
    names = files.names(path)
    if names:
        for name in names:
            yield from _iter_files_below(files, f"{path}/{name}")
    elif files.exists(path):
        with contextlib.suppress(IsADirectoryError):
            files.open(path).close()
            yield path


def read_file(files: Files, path: str) -> bytes:
    """Return the whole content of a file. Raises OSError."""
    with closing(files.open(path)) as file:
        return file.pread(file.size(), 0)


_Change = tuple[OperationKind, str, int, bytes]
"""The kind, name, offset and data of an operation, the arguments of `StateLog.record`."""


class _SlaveProgress:
    """What the master knows about a slave.

    `number` is that of the last operation that the slave has; -1 means that it has no snapshot of
    this run. `asked_s` is the monotonic time of the slave's last request.
    """

    __slots__ = ("asked_s", "number")

    def __init__(self) -> None:
        self.number = -1
        self.asked_s = 0.0


class StateLog:
    """The operations of one run of a master.

    Operations are retained while at least one slave may need them. `record` and `make_snapshot` may
    be called on any thread; everything else belongs to the thread of the event loop.
    """

    def __init__(
        self,
        paths: ReplicatedPaths,
        *,
        run_id: str,
        call_soon: Callable[[Callable[[], None]], object] = lambda call: call(),
    ) -> None:
        """Create an empty state log for the run `run_id` of a master.

        `paths` says which files are replicated. `call_soon` calls a function in the event loop. It
        must be callable on any thread.
        """
        self.paths = paths
        self.run_id = run_id
        self.last_number = 0
        """The number of the last operation."""
        self.log_end: Callable[[], int] = lambda: 0
        """Returns the end of the commit log. Set it when the log is open."""
        self.expired_queues: Callable[[], Iterable[tuple[str, int, int, bytes]]] = tuple
        """Returns (topic, queue id, queue offset, unit) for the UNIT operations of snapshots."""
        self.lock = threading.RLock()
        """Held while a replicated file is changed and the operation is recorded."""
        self._call_soon = call_soon
        self._operations: deque[Operation] = deque()
        """The retained operations, in the order of their numbers."""
        self._bytes = 0
        """The size of the retained operations."""
        self._snapshots: deque[list[Operation]] = deque(maxlen=2)
        self._snapshots_made = 0
        self._slaves: dict[int, _SlaveProgress] = {}
        self._edited_contents: dict[str, bytes] = {}
        """By name: the content of each access rules file at the last call of `record_edits`."""
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        """The numbers and functions of `call_when_recorded` that still wait."""
        self._unreplicated: list[tuple[int, Callable[[], Collection[int]], Callable[[], None]]] = []
        """For each waiting call of `call_when_replicated`: the number of the last operation at that
        time, and the arguments."""
        self._is_waking = False
        """Whether `_wake` will be called soon."""

    # --- recording

    def record(self, kind: OperationKind, name: str, offset: int = 0, data: bytes = b"") -> None:
        """Record an operation on a replicated file that has been done, under the next number.

        `name` is the replicated name of the file. `offset` and `data` depend on the kind: for
        WRITE, the bytes and where they were written. The operation is kept for the slaves, if there
        are any. If all kept operations have more than RETAINED_BYTES_MAX, the oldest are dropped.
        Functions that wait for its number are called soon.

        The caller must hold `lock`, and must have held it when it changed the file.
        """
        self.last_number += 1
        if self._slaves:
            operation = Operation(self.last_number, self.log_end(), kind, name, offset, data)
            self._operations.append(operation)
            self._bytes += _HEAD.size + len(data)
            while self._bytes > RETAINED_BYTES_MAX:
                self._drop_oldest()
        if self._waiting and not self._is_waking:
            self._is_waking = True
            self._call_soon(self._wake)

    def _drop_oldest(self) -> None:
        """Drop the oldest retained operation."""
        self._bytes -= _HEAD.size + len(self._operations.popleft().data)

    def record_edits(self, files: Files) -> None:
        """Record changes of the files with access rules that were made outside of this process.

        The files are compared with their contents at the last call. A removed file is recorded as
        REMOVE. A new or changed file is recorded as TRUNCATE and WRITE. The first call records all
        files. Called periodically. Blocks. Raises OSError.
        """
        paths_by_name = dict(self.paths.find_files(files, EDITED))
        for name in self._edited_contents.keys() - paths_by_name:
            with self.lock:
                self.record(OperationKind.REMOVE, name)
            del self._edited_contents[name]
        for name, path in paths_by_name.items():
            content = read_file(files, path)
            if self._edited_contents.get(name) == content:
                continue
            self._edited_contents[name] = content
            with self.lock:
                self.record(OperationKind.TRUNCATE, name)
                for write in _split_write(name, content):
                    self.record(*write)

    # --- serving slaves

    def record_progress(self, replica_id: int, run_id: str, number: int, now_s: float) -> None:
        """Record that the slave `replica_id` has all operations of the run `run_id` up to `number`.

        If `run_id` is another run of the master, or `number` is within a snapshot, the slave has no
        operations of this run. `now_s` is the monotonic time of the slave's request.

        Then the functions that wait until slaves have an operation are called, if they do now.
        Slaves that have sent no request for FORGOTTEN_S seconds are forgotten. Operations that all
        slaves have are dropped.
        """
        slave = self._slaves.setdefault(replica_id, _SlaveProgress())
        is_this_run = run_id == self.run_id and number < _SNAPSHOT_NUMBERS
        slave.number = number if is_this_run else -1
        slave.asked_s = now_s
        self.check_replicated()
        with self.lock:
            self._forget_silent_slaves(now_s)
            acked_number = min(known_slave.number for known_slave in self._slaves.values())
            while self._operations and self._operations[0].number <= acked_number:
                self._drop_oldest()

    def _forget_silent_slaves(self, now_s: float) -> None:
        """Forget slaves that have not sent a request for FORGOTTEN_S. The caller holds `lock`."""
        for replica_id, slave in list(self._slaves.items()):
            if now_s - slave.asked_s > FORGOTTEN_S:
                del self._slaves[replica_id]

    def operations_after(self, run_id: str, number: int) -> list[Operation] | None:
        """Return the next operations for a slave that has those of the run `run_id` up to `number`.

        Only as many are returned as fit into one response. If `number` is within a snapshot, they
        are from the rest of that snapshot. Return [] if there are none yet. Return None if the
        slave needs a new snapshot, because `run_id` is another run of the master, or the operations
        or the snapshot are not kept any more.
        """
        if run_id != self.run_id:
            return None
        if number >= _SNAPSHOT_NUMBERS:
            return self._rest_of_snapshot(number)

        with self.lock:
            # Without kept operations, a slave that has the last one has everything.
            oldest_number = self.last_number + 1
            if self._operations:
                oldest_number = self._operations[0].number
            is_retained = oldest_number - 1 <= number <= self.last_number
            if not is_retained:
                return None
            return _take_response(op for op in self._operations if op.number > number)

    def _rest_of_snapshot(self, number: int) -> list[Operation] | None:
        """Return the operations of a snapshot after `number` that fit into one response.

        Return None if no retained snapshot contains an operation after `number`.
        """
        for snapshot in self._snapshots:
            next_index = number - snapshot[0].number + 1
            if 0 < next_index < len(snapshot):
                return _take_response(snapshot[next_index:])
        return None

    def make_snapshot(self, files: Files) -> list[Operation]:
        """Make a snapshot of all replicated files, and return its first operations.

        As many are returned as fit into one response; `operations_after` returns the rest. The last
        two snapshots are kept. Blocks, and changes of the files wait meanwhile. Raises OSError.
        """
        with self.lock:
            self._snapshots_made += 1
            changes = self._collect_changes(files)
            first_number = self._snapshots_made * _SNAPSHOT_NUMBERS
            log_end = self.log_end()

        operations = []
        for number, (kind, name, offset, data) in enumerate(changes, first_number):
            # A slave applies a snapshot as a whole at its END, so only the END waits for the log.
            needed_log_end = log_end if kind is OperationKind.END else 0
            operations.append(Operation(number, needed_log_end, kind, name, offset, data))
        self._snapshots.append(operations)
        return _take_response(operations)

    def _collect_changes(self, files: Files) -> list[_Change]:
        """Return the operations of a snapshot, as tuples (kind, name, offset, data).

        They are BEGIN, the whole content of each replicated file, a UNIT for each expired queue,
        and END, whose offset is the number of the last operation. The caller holds `lock`. Raises
        OSError.
        """
        changes: list[_Change] = [(OperationKind.BEGIN, "", 0, b"")]
        for name, path in self.paths.find_files(files):
            changes.append((OperationKind.TRUNCATE, name, 0, b""))
            changes += _split_write(name, read_file(files, path))
        for topic, queue_id, offset, unit in self.expired_queues():
            changes.append((OperationKind.UNIT, f"{topic}/{queue_id}", offset, unit))
        changes.append((OperationKind.END, "", self.last_number, b""))
        return changes

    def call_when_recorded(self, number: int, callback: Callable[[], None]) -> None:
        """Call `callback()` when operation `number` is recorded; immediately if it is already."""
        if self.last_number >= number:
            callback()
        else:
            self._waiting.append((number, callback))

    def _wake(self) -> None:
        """Call the functions of `call_when_recorded` whose operation is recorded now."""
        self._is_waking = False
        waiting = self._waiting
        self._waiting = []
        for number, callback in waiting:
            self.call_when_recorded(number, callback)

    # --- waiting until slaves have an operation

    def call_when_replicated(
        self, get_replica_ids: Callable[[], Collection[int]], callback: Callable[[], None]
    ) -> None:
        """Call `callback()` when all slaves that count have every operation recorded so far.

        That may be immediately. `get_replica_ids()` returns the ids of the slaves that count. It is
        called each time the condition is checked, because slaves may leave.
        """
        self._unreplicated.append((self.last_number, get_replica_ids, callback))
        self.check_replicated()

    def check_replicated(self) -> None:
        """Call the functions of `call_when_replicated` whose condition is now met."""
        waiting = self._unreplicated
        self._unreplicated = []
        for number, get_replica_ids, callback in waiting:
            acked_numbers = [self.acked_number(replica_id) for replica_id in get_replica_ids()]
            if all(acked_number >= number for acked_number in acked_numbers):
                callback()
            else:
                self._unreplicated.append((number, get_replica_ids, callback))

    def acked_number(self, replica_id: int) -> int:
        """Return the number of the last operation that a slave has.

        -1 means that the slave is not known, or has no snapshot of this run.
        """
        slave = self._slaves.get(replica_id)
        return slave.number if slave is not None else -1

    def active_slaves(self, now_s: float, silent_s: float) -> list[int]:
        """Return the ids of the slaves that have sent a request in the last `silent_s` seconds."""
        return [key for key, slave in self._slaves.items() if now_s - slave.asked_s <= silent_s]


def _split_write(name: str, content: bytes) -> list[_Change]:
    """Return the WRITE operations that write `content` to the file `name` from offset 0 on.

    Each is a tuple (kind, name, offset, data) with at most CHUNK_BYTES of data.
    """
    return [
        (OperationKind.WRITE, name, offset, content[offset : offset + CHUNK_BYTES])
        for offset in range(0, len(content), CHUNK_BYTES)
    ]


def _take_response(operations: Iterable[Operation]) -> list[Operation]:
    """Return as many of the first `operations` as fit into one response.

    The result ends with the operation by which ANSWER_BYTES are reached.
    """
    taken = []
    size = 0
    for operation in operations:
        if size >= ANSWER_BYTES:
            break
        taken.append(operation)
        size += _HEAD.size + len(operation.data)
    return taken


class RecordingFiles:
    """The files of a master. Changes of replicated files are recorded in a state log.

    Other files are opened as if this wrapper did not exist.
    """

    def __init__(self, below: Files, state_log: StateLog) -> None:
        """Wrap `below`, so that changes of replicated files are recorded in `state_log`.

        Methods that change no replicated file are those of `below` itself.
        """
        self._below = below
        self._state_log = state_log
        self.pool = below.pool
        self.access = below.access
        self.exists = below.exists
        self.names = below.names
        self.make_directory = below.make_directory
        self.sync_all = below.sync_all
        self.sync_directory = below.sync_directory
        self.lock = below.lock
        self.usage = below.usage
        self.modified_ms = below.modified_ms

    def open(self, path: str, *, create: bool = False, access: Access | None = None) -> File:
        """Open a file, like `Files.open`.

        Creating a replicated file is recorded as TRUNCATE to 0. Changes of a replicated file
        through the returned `File` are recorded.
        """
        name = self._state_log.paths.name_of(path)
        if name is None:
            return self._below.open(path, create=create, access=access)
        with self._state_log.lock:
            is_new = create and not self._below.exists(path)
            file = self._below.open(path, create=create, access=access)
            if is_new:
                self._state_log.record(OperationKind.TRUNCATE, name)
        return _RecordingFile(file, name, self._state_log)

    def rename(self, old: str, new: str) -> None:
        """Rename a file, like `Files.rename`. It is recorded if both paths are replicated."""
        paths = self._state_log.paths
        state_log = self._state_log
        old_name = paths.name_of(old)
        new_name = paths.name_of(new)
        with state_log.lock:
            self._below.rename(old, new)
            if old_name is not None and new_name is not None:
                state_log.record(OperationKind.RENAME, old_name, 0, new_name.encode())

    def remove(self, path: str) -> None:
        """Remove a file, like `Files.remove`, and record it if the file is replicated."""
        name = self._state_log.paths.name_of(path)
        with self._state_log.lock if name is not None else contextlib.nullcontext():
            self._below.remove(path)
            if name is not None:
                self._state_log.record(OperationKind.REMOVE, name)


class _RecordingFile:
    """A replicated file of a master. Its changes are recorded."""

    def __init__(self, below: File, name: str, state_log: StateLog) -> None:
        """Wrap the open file `below`, so that its changes are recorded in `state_log`.

        `name` is its replicated name, such as "config/topics.json".
        """
        self._below = below
        self._name = name
        self._state_log = state_log
        self.pread = below.pread
        self.sync = below.sync
        self.size = below.size
        self.close = below.close
        self.data_start = below.data_start
        self.data_end = below.data_end
        self.fileno = below.fileno

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write `data` at `offset`, and record it as one WRITE for each CHUNK_BYTES."""
        with self._state_log.lock:
            self._below.pwrite(data, offset)
            for kind, name, chunk_start, chunk in _split_write(self._name, bytes(data)):
                self._state_log.record(kind, name, offset + chunk_start, chunk)

    def truncate(self, size: int) -> None:
        """Set the size of the file, and record it."""
        with self._state_log.lock:
            self._below.truncate(size)
            self._state_log.record(OperationKind.TRUNCATE, self._name, size)
