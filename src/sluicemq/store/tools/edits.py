"""Changes to the files of a store, each with a copy of what it overwrites.

The copies lie in a directory of their own (`repair-TIME` in the store): `overwritten.bin` holds
them one after the other, `manifest.jsonl` says of each where it was:

    {"file": "commitlog/000…", "offset": 4096, "size_bytes": 300, "backup_offset": 0}
    {"file": "consumequeue/T/0/000…", "created": true}
    {"file": "commitlog/000…", "size_before": 123}         it was made longer
    {"file": "commitlog/000…", "removed": true}            all that it held was copied before

Copies are on disk before the first byte that they save is overwritten. What is there already is
not written again.
"""

import json
from typing import Any, Final

from sluicemq.files import File, Files
from sluicemq.store.tools.layout import read_or_zeros

BATCH_BYTES: Final = 8 << 20
_PIECE_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 4096


class Edits:
    """Collects changes, and makes them a batch at a time. `close` makes all durable."""

    def __init__(self, files: Files, root: str, backup: str) -> None:
        self._files = files
        self._root = root
        self._backup = backup
        self._waiting: list[tuple[str, int, bytes]] = []
        self._waiting_bytes = 0
        self._saved: File | None = None
        self._manifest: File | None = None
        self._saved_bytes = self._manifest_bytes = 0
        self._touched: set[str] = set()
        self._directories: set[str] = set()
        self.changed_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Nothing was changed, and no backup was made."""
        return self._saved is None and not self._waiting

    def write(self, path: str, offset: int, data: bytes) -> None:
        self._waiting.append((path, offset, data))
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= BATCH_BYTES:
            self.flush()

    def zero(self, path: str, start: int, end: int) -> None:
        """Make [start, end) of a file read as zeros; holes in it stay holes."""
        file = self._files.open(path)
        try:
            at = start
            while at < end and (found := file.data_start(at)) is not None and found < end:
                at = min(found + _PIECE_BYTES, end)
                self._zero_blocks(path, found, _read(file, at - found, found))
        finally:
            file.close()

    def _zero_blocks(self, path: str, offset: int, data: bytes) -> None:
        at = 0
        while at < len(data):
            size = min(_BLOCK_BYTES - (offset + at) % _BLOCK_BYTES, len(data) - at)
            if any(data[at : at + size]):
                self.write(path, offset + at, bytes(size))
            at += size

    def make_file(self, path: str, size: int) -> None:
        """A file of that size: made of zeros, made longer, or (with a copy) shorter."""
        self.flush()
        directory = path.rpartition("/")[0]
        is_new = not self._files.exists(path)
        self._files.make_directory(directory)
        file = self._files.open(path, create=True)
        try:
            before = file.size()
            if before == size and not is_new:
                return
            if before > size:
                self._save(path, size, _read(file, before - size, size))
            self._note({"created": True} if is_new else {"size_before": before}, path)
            self._sync_backup()
            file.truncate(size)
        finally:
            file.close()
        self._touched.add(path)
        self._directories.add(directory)

    def remove_file(self, path: str, size: int) -> None:
        """Remove a file, with copies of all that is not zero in it."""
        self.flush()
        file = self._files.open(path)
        try:
            at = 0
            while at < size and (found := file.data_start(at)) is not None:
                data = _read(file, min(_PIECE_BYTES, size - found), found)
                if any(data):
                    self._save(path, found, data)
                at = found + max(len(data), 1)
        finally:
            file.close()
        self._note({"removed": True}, path)
        self._sync_backup()
        self._files.remove(path)
        self._touched.discard(path)
        self._directories.add(path.rpartition("/")[0])

    def flush(self) -> None:
        """Make the changes that wait: copies first."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        real = []
        for path, offset, data in waiting:
            file = self._files.open(path)
            try:
                old = _read(file, len(data), offset)
            finally:
                file.close()
            if old != data:
                self._save(path, offset, old)
                real.append((path, offset, data))
        if not real:
            return
        self._sync_backup()
        for path, offset, data in real:
            file = self._files.open(path)
            try:
                file.pwrite(data, offset)
            finally:
                file.close()
            self._touched.add(path)
            self.changed_bytes += len(data)

    def close(self) -> None:
        """Make the rest of the changes; all are on disk on return."""
        self.flush()
        for path in sorted(self._touched):
            file = self._files.open(path)
            try:
                file.sync()
            finally:
                file.close()
        for directory in sorted(self._directories):
            self._files.sync_directory(directory)
        for file_or_none in (self._saved, self._manifest):
            if file_or_none is not None:
                file_or_none.close()

    # --- the backup

    def _save(self, path: str, offset: int, old: bytes) -> None:
        saved, _ = self._open()
        saved.pwrite(old, self._saved_bytes)
        place = {"offset": offset, "size_bytes": len(old), "backup_offset": self._saved_bytes}
        self._saved_bytes += len(old)
        self._note(place, path)

    def _note(self, fact: dict[str, Any], path: str) -> None:
        _, manifest = self._open()
        name = path.removeprefix(self._root + "/")
        line = json.dumps({"file": name, **fact}).encode() + b"\n"
        manifest.pwrite(line, self._manifest_bytes)
        self._manifest_bytes += len(line)

    def _open(self) -> tuple[File, File]:
        if self._saved is None or self._manifest is None:
            self._files.make_directory(self._backup)
            self._saved = self._files.open(f"{self._backup}/overwritten.bin", create=True)
            self._manifest = self._files.open(f"{self._backup}/manifest.jsonl", create=True)
            self._files.sync_directory(self._backup)
        return self._saved, self._manifest

    def _sync_backup(self) -> None:
        for file in self._open():
            file.sync()


def _read(file: File, size: int, offset: int) -> bytes:
    return read_or_zeros(lambda at, count: file.pread(count, at), offset, size)
