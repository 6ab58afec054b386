"""The state of a slave: the files that it copies from its master.

`StateApplier` applies the operations of the master's state log (`state_log.py`) to the files.
`DiscardingFiles` keeps all other components of the slave from changing them.
"""

import contextlib
import errno
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing

from sluicemq.broker.replication.state_log import (
    SNAPSHOT_NAME,
    Operation,
    OperationKind,
    RecordingFiles,
    ReplicatedPaths,
    StateLog,
    decode_operations,
    encode_operations,
    read_file,
)
from sluicemq.files import DEFAULT_ACCESS, OWNER_ONLY, Access, File, Files


class DiscardingFiles(RecordingFiles):
    """The files of a slave for everything but its `StateApplier`.

    Changes of replicated files are discarded, because these files are copies of the master's.
    """

    def __init__(self, below: Files, paths: ReplicatedPaths) -> None:
        """Wrap the files `below`. `paths` says which of them are replicated."""
        super().__init__(below, StateLog(paths, run_id=""))

    def open(self, path: str, *, create: bool = False, access: Access | None = None) -> File:
        """Open a file. If it is a replicated file, changes to the returned file are discarded.

        A missing replicated file is not created. With `create`, the returned file looks empty.
        Without it, the error of `Files.open` is raised. All other files are opened as by
        `Files.open`.
        """
        if self._state_log.paths.name_of(path) is None:
            return self._below.open(path, create=create, access=access)
        is_missing = create and not self._below.exists(path)
        return _DiscardingFile(None if is_missing else self._below.open(path))

    def rename(self, old: str, new: str) -> None:
        """Rename a file, like `Files.rename`. Do nothing if `old` is replicated."""
        if self._state_log.paths.name_of(old) is None:
            self._below.rename(old, new)

    def remove(self, path: str) -> None:
        """Remove a file, like `Files.remove`. Do nothing if the file is replicated."""
        if self._state_log.paths.name_of(path) is None:
            self._below.remove(path)


class _DiscardingFile:
    """A replicated file of a slave: reads work, and changes are discarded.

    `below` is None if the file was not created because it is missing. Then it looks empty.
    """

    def __init__(self, below: File | None) -> None:
        self._below = below

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Do nothing."""

    def truncate(self, size: int) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""

    def pread(self, size: int, offset: int) -> bytes:
        """Return up to `size` bytes from `offset`; b"" if the file does not exist."""
        return b"" if self._below is None else self._below.pread(size, offset)

    def size(self) -> int:
        """Return the size in bytes; 0 if the file does not exist."""
        return 0 if self._below is None else self._below.size()

    def data_start(self, offset: int) -> int | None:
        return None if self._below is None else self._below.data_start(offset)

    def data_end(self, offset: int) -> int:
        return 0 if self._below is None else self._below.data_end(offset)

    def fileno(self) -> int:
        """Return the descriptor. Raise OSError (EBADF) if the file does not exist."""
        if self._below is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._below.fileno()

    def close(self) -> None:
        """Close the file. Do nothing if it does not exist."""
        if self._below is not None:
            self._below.close()


class StateApplier:
    """Applies a master's operations to the files of this replica.

    `enqueue` adds operations, and `apply` applies those that the log of this replica allows. All
    methods block, and must be called by one thread at a time.
    """

    def __init__(
        self,
        files: Files,
        paths: ReplicatedPaths,
        put_unit: Callable[[str, int, int, bytes], object] = lambda *_: None,
    ) -> None:
        """Create an applier that repeats a master's operations on the tables' files in `files`.

        `paths` converts the names in the operations to paths. `put_unit(topic, queue_id, offset,
        unit)` is called for each UNIT operation, which sets the end of an expired consume queue.
        """
        self._files = files
        self._paths = paths
        self._put_unit = put_unit
        self.run_id = ""
        """The run of the master that the operations are from; "" if there are none."""
        self.applied_number = 0
        """The number of the last operation that was applied. Request what comes after it."""
        self.has_snapshot = False
        """Whether a whole snapshot of this run was applied."""
        self._waiting: deque[Operation] = deque()
        self._snapshot: list[Operation] | None = None
        """The operations of a snapshot since its BEGIN; None outside of a snapshot."""
        self._dirty: set[str] = set()
        """The paths of files that have changed and are not synced."""
        self._dirty_directories: set[str] = set()

    @property
    def next_log_end(self) -> int | None:
        """The log end that the next operation waits for; None if no operation waits."""
        return self._waiting[0].log_end if self._waiting else None

    def reset(self) -> None:
        """Forget all operations, so that a snapshot is requested next."""
        self.run_id = ""
        self.applied_number = 0
        self.has_snapshot = False
        self._snapshot = None
        self._waiting.clear()

    def enqueue(self, run_id: str, operations: Iterable[Operation]) -> None:
        """Add operations from a master, to be applied later by `apply`.

        `run_id` identifies the run of the master's process. If it is another run than that of the
        earlier operations, these are forgotten.
        """
        if run_id != self.run_id:
            self.reset()
            self.run_id = run_id
        self._waiting.extend(operations)

    def apply(self, log_end: int) -> set[str]:
        """Apply the waiting operations that need the commit log only up to `log_end`.

        Return the names of the files that have changed. The changes are synced to disk. The
        operations of a snapshot, from BEGIN to END, are collected first, and applied as a whole at
        the END.

        Raises OSError or ProtocolError. Then all operations are forgotten, so that a snapshot is
        requested next.
        """
        changed: set[str] = set()
        try:
            while self._waiting and self._waiting[0].log_end <= log_end:
                operation = self._waiting.popleft()
                self.applied_number = operation.number
                if operation.kind is OperationKind.BEGIN:
                    self._snapshot = []
                elif self._snapshot is None:
                    self._execute(operation)
                    changed.add(operation.name)
                elif operation.kind is not OperationKind.END:
                    self._snapshot.append(operation)
                else:
                    changed |= self._apply_snapshot(self._snapshot)
                    self._snapshot = None
                    self.has_snapshot = True
                    self.applied_number = operation.offset
            self._sync()
        except BaseException:
            self.reset()
            raise
        return changed

    def finish_snapshot(self) -> None:
        """Finish a snapshot that was being applied when the process was killed.

        Call this when a broker starts. The snapshot file has the operations of the snapshot. If the
        file is complete (its first 4 bytes are the CRC-32 of the rest), they are applied again. The
        file is removed in any case. Do nothing if there is none. Raises OSError.
        """
        path = self._paths.path_of(SNAPSHOT_NAME)
        if not self._files.exists(path):
            return
        content = read_file(self._files, path)
        is_complete = content[:4] == zlib.crc32(content[4:]).to_bytes(4)
        if is_complete:
            self._write_snapshot(decode_operations(content[4:]))
        self._files.remove(path)
        self._files.sync_directory(path.rpartition("/")[0])

    # --- single operations

    def _execute(self, operation: Operation) -> None:
        """Apply an operation that is not part of a snapshot: RENAME, REMOVE, TRUNCATE or WRITE.

        The changes are durable after `_sync`. A file is synced before it is renamed, so that the
        new name never has an older content after a crash. Removing a missing file does nothing.
        TRUNCATE and WRITE create a missing file. Raises OSError, and ProtocolError if a name is not
        the name of a replicated file.
        """
        path = self._paths.path_of(operation.name)
        directory = path.rpartition("/")[0]
        if operation.kind is OperationKind.RENAME:
            new_path = self._paths.path_of(operation.data.decode())
            self._sync_file(path)
            self._files.rename(path, new_path)
            self._dirty_directories.add(directory)
        elif operation.kind is OperationKind.REMOVE:
            with contextlib.suppress(FileNotFoundError):
                self._files.remove(path)
            self._dirty.discard(path)
            self._dirty_directories.add(directory)
        else:
            self._change_content(path, operation)

    def _change_content(self, path: str, operation: Operation) -> None:
        """Apply a TRUNCATE or WRITE to the file at `path`, which is created if it is missing."""
        if not self._files.exists(path):
            directory = path.rpartition("/")[0]
            self._files.make_directory(directory)
            self._dirty_directories.add(directory)
        access = self._choose_access(path)
        with closing(self._files.open(path, create=True, access=access)) as file:
            if operation.kind is OperationKind.TRUNCATE:
                file.truncate(operation.offset)
            else:
                file.pwrite(operation.data, operation.offset)
        self._dirty.add(path)

    def _choose_access(self, path: str) -> Access:
        """Return the file permissions of the file at `path`, or those with which to create it.

        A new table gets the default permissions. Any other new file has access rules, so only its
        owner may read it.
        """
        if self._files.exists(path):
            return self._files.access(path)
        is_table = (self._paths.name_of(path) or "").startswith("config/")
        return DEFAULT_ACCESS if is_table else OWNER_ONLY

    def _sync_file(self, path: str) -> None:
        """Sync the file at `path` if it has changed since it was last synced."""
        if path in self._dirty:
            self._dirty.discard(path)
            with closing(self._files.open(path)) as file:
                file.sync()

    def _sync(self) -> None:
        """Sync the files and directories that have changed."""
        for path in sorted(self._dirty):
            self._sync_file(path)
        for directory in sorted(self._dirty_directories):
            self._files.sync_directory(directory)
        self._dirty_directories.clear()

    # --- snapshots

    def _apply_snapshot(self, operations: list[Operation]) -> set[str]:
        """Apply a snapshot as a whole, and return the names of the files that have changed.

        The operations are first written to a snapshot file, which is removed at the end. If the
        process is killed in between, `finish_snapshot` applies them again. The file has the CRC-32
        of the encoded operations in 4 bytes, and then the operations.
        """
        encoded = encode_operations(operations)
        path = self._paths.path_of(SNAPSHOT_NAME)
        self._replace_file(path, zlib.crc32(encoded).to_bytes(4) + encoded, OWNER_ONLY)
        self._files.sync_directory(path.rpartition("/")[0])
        changed = self._write_snapshot(operations)
        self._files.remove(path)
        self._files.sync_directory(path.rpartition("/")[0])
        return changed

    def _write_snapshot(self, operations: list[Operation]) -> set[str]:
        """Replace all replicated files by those of a snapshot, and sync the changes to disk.

        Replicated files that are not in the snapshot are removed. Files that have the right content
        already are not written. `put_unit` is called for each UNIT operation. Return the names of
        the files that were written or removed.
        """
        contents = self._put_units(operations)
        changed = set()
        unchanged = set()
        # A list, because the loop removes files.
        for name, path in list(self._paths.find_files(self._files)):
            if name not in contents:
                self._files.remove(path)
                changed.add(name)
                self._dirty_directories.add(path.rpartition("/")[0])
            elif read_file(self._files, path) == contents[name]:
                unchanged.add(name)

        for name, content in contents.items():
            if name not in unchanged:
                path = self._paths.path_of(name)
                self._replace_file(path, content, self._choose_access(path))
                changed.add(name)
        self._dirty.clear()
        self._sync()
        return changed

    def _put_units(self, operations: list[Operation]) -> dict[str, bytearray]:
        """Call `put_unit` for each UNIT operation, and return the files of a snapshot.

        The result is a dict of the content of each file by its name.
        """
        contents: dict[str, bytearray] = {}
        for operation in operations:
            if operation.kind is OperationKind.UNIT:
                topic, _, queue_id = operation.name.rpartition("/")
                self._put_unit(topic, int(queue_id), operation.offset, operation.data)
            else:
                contents.setdefault(operation.name, bytearray()).extend(operation.data)
        return contents

    def _replace_file(self, path: str, content: bytes | bytearray, access: Access) -> None:
        """Replace or create the file at `path` with `content`, atomically.

        The content is synced to disk here. The name is durable when `_sync` has synced the
        directory. A new file gets the permissions `access`.
        """
        directory = path.rpartition("/")[0]
        new_path = path + ".new"
        self._files.make_directory(directory)
        with closing(self._files.open(new_path, create=True, access=access)) as file:
            file.truncate(len(content))
            file.pwrite(content, 0)
            file.sync()
        self._files.rename(new_path, path)
        self._dirty_directories.add(directory)
