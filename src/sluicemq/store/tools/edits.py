"""Change the files of a store, with a backup of everything that is overwritten.

The backup is a directory of its own, `repair-TIME` in the store. Its file `overwritten.bin`
contains the overwritten bytes one after the other. Its file `manifest.jsonl` contains one line for
each change:

    {"file": "commitlog/000…", "offset": 4096, "size_bytes": 300, "backup_offset": 0}
    {"file": "consumequeue/T/0/000…", "created": true}
    {"file": "commitlog/000…", "size_before": 123}         the size of the file was changed
    {"file": "commitlog/000…", "removed": true}            the lines before it save its content

The backup of a change is synced before the first byte of the change is written. Bytes that are in
the file already are not written again.
"""

import json
from contextlib import closing
from typing import Any, Final

from sluicemq.files import File, Files
from sluicemq.store.segments import used_blocks
from sluicemq.store.tools.layout import read_or_zeros

BATCH_BYTES: Final = 8 << 20
"""Changes are collected until they have this many bytes."""
_PIECE_BYTES: Final = 1 << 20


class RepairWriter:
    """Writes the changes of one repair.

    Changes are collected and written in batches. `flush` writes those that are waiting, and `close`
    makes all of them durable. `changed_bytes` is the number of bytes that were overwritten. All
    methods raise OSError.
    """

    def __init__(self, files: Files, root: str, backup: str) -> None:
        """Create a writer for the store in `root`, which saves what it overwrites in `backup`.

        The directory `backup` is created when there is something to save.
        """
        self._files = files
        self._root = root
        self._backup = backup
        self._waiting: list[tuple[str, int, bytes]] = []
        self._waiting_bytes = 0
        self._saved: File | None = None
        self._manifest: File | None = None
        self._saved_bytes = self._manifest_bytes = 0
        self._written_paths: set[str] = set()
        self._changed_directories: set[str] = set()
        self.changed_bytes = 0

    def write(self, path: str, offset: int, data: bytes) -> None:
        """Schedule `data` to be written at `offset` of an existing file, by the next flush.

        If BATCH_BYTES or more are waiting, the flush is done at once.
        """
        self._waiting.append((path, offset, data))
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= BATCH_BYTES:
            self.flush()

    def write_zeros(self, path: str, start: int, end: int) -> None:
        """Schedule zeros for the bytes [start, end) of a file.

        Parts that were never written (holes) stay holes.
        """
        with closing(self._files.open(path)) as file:
            position = start
            while position < end:
                piece_start = file.data_start(position)
                if piece_start is None or piece_start >= end:
                    return  # only holes follow
                position = min(piece_start + _PIECE_BYTES, end)
                piece = _read_or_zeros(file, position - piece_start, piece_start)
                # Only blocks that are not zero yet must be written.
                for offset, size in used_blocks(piece, piece_start):
                    self.write(path, offset, bytes(size))

    def resize_file(self, path: str, size: int) -> None:
        """Create a file of `size` zeros, or extend it with zeros, or cut it to `size` bytes.

        Waiting changes are written first. The bytes that a cut removes are saved.
        """
        self.flush()
        directory = path.rpartition("/")[0]
        is_new = not self._files.exists(path)
        self._files.make_directory(directory)
        with closing(self._files.open(path, create=True)) as file:
            size_before = file.size()
            if size_before == size and not is_new:
                return
            if size_before > size:
                self._save_overwritten(path, size, _read_or_zeros(file, size_before - size, size))
            if is_new:
                self._add_to_manifest({"created": True}, path)
            else:
                self._add_to_manifest({"size_before": size_before}, path)
            self._sync_backup()
            file.truncate(size)
        self._written_paths.add(path)
        self._changed_directories.add(directory)

    def remove_file(self, path: str, size: int) -> None:
        """Remove a file of `size` bytes, after saving its bytes that are not zero.

        Waiting changes are written first.
        """
        self.flush()
        with closing(self._files.open(path)) as file:
            position = 0
            while position < size:
                piece_start = file.data_start(position)
                if piece_start is None:
                    break  # only holes follow
                piece = _read_or_zeros(file, min(_PIECE_BYTES, size - piece_start), piece_start)
                if any(piece):
                    self._save_overwritten(path, piece_start, piece)
                position = piece_start + max(len(piece), 1)

        # The backup is durable before the file is removed.
        self._add_to_manifest({"removed": True}, path)
        self._sync_backup()
        self._files.remove(path)
        self._written_paths.discard(path)
        self._changed_directories.add(path.rpartition("/")[0])

    def flush(self) -> None:
        """Write the waiting changes, after saving the bytes that they overwrite.

        A change that would write the same bytes is dropped.
        """
        waiting = self._waiting
        self._waiting = []
        self._waiting_bytes = 0

        # Save what is overwritten. Changes that change nothing are dropped.
        changes = []
        for path, offset, data in waiting:
            with closing(self._files.open(path)) as file:
                overwritten = _read_or_zeros(file, len(data), offset)
            if overwritten != data:
                self._save_overwritten(path, offset, overwritten)
                changes.append((path, offset, data))
        if not changes:
            return
        self._sync_backup()

        for path, offset, data in changes:
            with closing(self._files.open(path)) as file:
                file.pwrite(data, offset)
            self._written_paths.add(path)
            self.changed_bytes += len(data)

    def close(self) -> None:
        """Write the waiting changes, sync all files, and close the backup."""
        self.flush()
        for path in sorted(self._written_paths):
            with closing(self._files.open(path)) as file:
                file.sync()
        for directory in sorted(self._changed_directories):
            self._files.sync_directory(directory)
        for backup_file in (self._saved, self._manifest):
            if backup_file is not None:
                backup_file.close()

    # --- the backup

    def _save_overwritten(self, path: str, offset: int, overwritten: bytes) -> None:
        """Append `overwritten` to the backup, and describe it in the manifest.

        These are the bytes at `offset` of the file at `path`, before they are changed. Nothing is
        synced.
        """
        backup_file, _ = self._open_backup()
        backup_file.pwrite(overwritten, self._saved_bytes)
        fields = {
            "offset": offset,
            "size_bytes": len(overwritten),
            "backup_offset": self._saved_bytes,
        }
        self._saved_bytes += len(overwritten)
        self._add_to_manifest(fields, path)

    def _add_to_manifest(self, fields: dict[str, Any], path: str) -> None:
        """Append a line of JSON to the manifest: `fields`, and `path` relative to the store."""
        _, manifest = self._open_backup()
        name = path.removeprefix(self._root + "/")
        line = json.dumps({"file": name, **fields}).encode() + b"\n"
        manifest.pwrite(line, self._manifest_bytes)
        self._manifest_bytes += len(line)

    def _open_backup(self) -> tuple[File, File]:
        """Return the open files overwritten.bin and manifest.jsonl of the backup.

        The first call creates them and their directory.
        """
        if self._saved is None or self._manifest is None:
            self._files.make_directory(self._backup)
            self._saved = self._files.open(f"{self._backup}/overwritten.bin", create=True)
            self._manifest = self._files.open(f"{self._backup}/manifest.jsonl", create=True)
            self._files.sync_directory(self._backup)
        return self._saved, self._manifest

    def _sync_backup(self) -> None:
        """Make the backup durable. Call this before anything that it saves is changed."""
        for file in self._open_backup():
            file.sync()


def _read_or_zeros(file: File, size: int, offset: int) -> bytes:
    """Read from a file, with zeros in place of blocks that the disk cannot read."""
    return read_or_zeros(lambda at, count: file.pread(count, at), offset, size)
