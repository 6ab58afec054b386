"""Changes to the files of a store, each with a copy of what it overwrites.

The copies lie in a directory of their own (`repair-TIME` in the store): `overwritten.bin` holds
them one after the other, `manifest.jsonl` says of each where it was:

    {"file": "commitlog/000…", "offset": 4096, "size_bytes": 300, "backup_offset": 0}
    {"file": "consumequeue/T/0/000…", "created": true}
    {"file": "commitlog/000…", "size_before": 123}         it was made longer
    {"file": "commitlog/000…", "removed": true}            all that it held was copied before

Copies are on disk before the first byte that they save is overwritten. What is there already is
not written again.

`Requeue` makes the consume queues say what the log says, and changes no unit that is right already:
fed with all good records in the order of the log, as a broker would be that builds its queues anew:
each record's unit is put at its offset. An offset at or below one that came before means that the
topic was deleted and made again: the queue ends there, and goes on from there.

Units of records that retention has removed from the log stay. A queue without a directory is made,
but not when the broker's table of topics is there and does not know its topic: it was deleted.
"""

import json
from contextlib import closing
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sluicemq.files import File, Files
from sluicemq.record.table import UNIT_COLUMNS
from sluicemq.store.log import PLACEHOLDER_CODE
from sluicemq.store.queues import BLANK_UNIT, UNIT, UNIT_BYTES, is_valid_key
from sluicemq.store.segments import used_blocks
from sluicemq.store.tools.layout import Run, Series, read_or_zeros

BATCH_BYTES: Final = 8 << 20
_PIECE_BYTES: Final = 1 << 20


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

    def write(self, path: str, offset: int, data: bytes) -> None:
        self._waiting.append((path, offset, data))
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= BATCH_BYTES:
            self.flush()

    def zero(self, path: str, start: int, end: int) -> None:
        """Make [start, end) of a file read as zeros; holes in it stay holes."""
        with closing(self._files.open(path)) as file:
            at = start
            while at < end and (found := file.data_start(at)) is not None and found < end:
                at = min(found + _PIECE_BYTES, end)
                for offset, size in used_blocks(_read(file, at - found, found), found):
                    self.write(path, offset, bytes(size))

    def make_file(self, path: str, size: int) -> None:
        """A file of that size: made of zeros, made longer, or (with a copy) shorter."""
        self.flush()
        directory = path.rpartition("/")[0]
        is_new = not self._files.exists(path)
        self._files.make_directory(directory)
        with closing(self._files.open(path, create=True)) as file:
            before = file.size()
            if before == size and not is_new:
                return
            if before > size:
                self._save(path, size, _read(file, before - size, size))
            self._note({"created": True} if is_new else {"size_before": before}, path)
            self._sync_backup()
            file.truncate(size)
        self._touched.add(path)
        self._directories.add(directory)

    def remove_file(self, path: str, size: int) -> None:
        """Remove a file, with copies of all that is not zero in it."""
        self.flush()
        with closing(self._files.open(path)) as file:
            at = 0
            while at < size and (found := file.data_start(at)) is not None:
                data = _read(file, min(_PIECE_BYTES, size - found), found)
                if any(data):
                    self._save(path, found, data)
                at = found + max(len(data), 1)
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
            with closing(self._files.open(path)) as file:
                old = _read(file, len(data), offset)
            if old != data:
                self._save(path, offset, old)
                real.append((path, offset, data))
        if not real:
            return
        self._sync_backup()
        for path, offset, data in real:
            with closing(self._files.open(path)) as file:
                file.pwrite(data, offset)
            self._touched.add(path)
            self.changed_bytes += len(data)

    def close(self) -> None:
        """Make the rest of the changes; all are on disk on return."""
        self.flush()
        for path in sorted(self._touched):
            with closing(self._files.open(path)) as file:
                file.sync()
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


QueueKey = tuple[str, int]
GAP_MAX: Final = 1 << 22
"""Messages that a queue may lack in a row, when records are in doubt."""
FILES_MAX: Final = 1 << 12
_BLANK: Final = np.frombuffer(BLANK_UNIT, UNIT_COLUMNS)[0]
_CODE_MAX: Final = (1 << 31) - 1
DELAY_MAX_MS: Final = 40 * 86_400_000
"""What messageDelayLevel allows."""
EXTENSION_ADDRESS_MAX: Final = -(1 << 31) - 1
"""Tag codes up to this are addresses in a ConsumeQueueExt file (spec/store.md §3.2)."""


class Requeue:
    """Compares (without `edits`) or mends (with them) the queues of one store."""

    def __init__(
        self,
        queues: dict[QueueKey, Series],
        directory: str,
        file_bytes: int,
        topics: set[str] | None,
        edits: Edits | None,
        safe_end: int | None = None,
    ) -> None:
        """`safe_end`: units of records from there on are not missed (after a crash the next start
        makes them).
        """
        self._queues = queues
        self._directory = directory
        self._file_bytes = file_bytes
        self._topics = topics
        self._edits = edits
        self._safe_end = safe_end
        self._ends: dict[QueueKey, int] = {}
        self._bases: dict[QueueKey, set[int]] = {
            key: {item.base for item in series.items} for key, series in queues.items()
        }
        self.skip: set[int] = set()
        """Positions of records that are not put into a queue."""
        self._later: dict[QueueKey, int] = {}
        self.wrong_units = 0
        """Complete after `finish`."""
        self.missing_queues: set[QueueKey] = set()

    def add(self, run: Run) -> None:
        for group in run.groups:
            key = (group.topic.decode(errors="replace"), group.queue_id)
            if key not in self._queues:
                if not is_valid_key(key) or (
                    self._topics is not None and key[0] not in self._topics
                ):
                    continue
                if self._safe_end is None or group.units["position"][0] < self._safe_end:
                    self.missing_queues.add(key)
            is_plain = not self.skip or not np.isin(group.units["position"], [*self.skip]).any()
            if group.is_consecutive and is_plain:
                self._put(key, int(group.offsets[0]), group.units.tobytes())
                continue
            for offset, unit_parts in group.rows():
                if unit_parts[0] not in self.skip:
                    self._put(key, offset, UNIT.pack(*unit_parts))

    def _put(self, key: QueueKey, offset: int, data: bytes) -> None:
        """Consecutive units from `offset` on."""
        end, series = self._ends.get(key), self._queues.get(key)
        if end is None:  # what is before the first record has to be used, or blank
            size = self._file_bytes // UNIT_BYTES
            bases = {base // UNIT_BYTES for base in self._bases.get(key, ())}
            first = own = offset - offset % size
            while first - size in bases and offset - first + size <= GAP_MAX:
                first -= size
            end = first if own in bases else offset
        if offset - end > GAP_MAX:
            return  # no queue lacks so many: the record is wrong
        if offset > end:
            # Offsets that no record has: their units as they are, blank where they are nothing.
            size = (offset - end) * UNIT_BYTES
            old = b"" if series is None else series.read(end * UNIT_BYTES, size)
            units = np.frombuffer(old + bytes(size - len(old)), UNIT_COLUMNS).copy()
            behind = units["position"] > UNIT.unpack_from(data)[0]
            units[behind | (units["size"] <= 0) | (units["position"] < 0)] = _BLANK
            data, offset = units.tobytes() + data, end
        elif offset < end:  # the topic was deleted and made again
            self._later.pop(key, None)
            if self._edits is not None:
                self._edits.flush()  # what is compared below may just have been changed
        self._ends[key] = offset + len(data) // UNIT_BYTES
        old = b"" if series is None else series.read(offset * UNIT_BYTES, len(data))
        wrong, later = _wrong_rows(old, data)
        if not len(wrong):
            return
        if self._edits is not None:
            first, last = int(wrong[0]), int(wrong[-1])
            piece = data[first * UNIT_BYTES : (last + 1) * UNIT_BYTES]
            self._write(key, (offset + first) * UNIT_BYTES, piece, self._edits)
        elif self._safe_end is None or UNIT.unpack_from(data)[0] < self._safe_end:
            self.wrong_units += len(wrong) - later
            # Those are wrong unless the topic turns out to have been made again.
            self._later[key] = self._later.get(key, 0) + later

    def _write(self, key: QueueKey, position: int, data: bytes, edits: Edits) -> None:
        bases, size, done = self._bases.setdefault(key, set()), self._file_bytes, 0
        while done < len(data):
            at = position + done
            base = at - at % size
            if base not in bases:  # files have no gaps: those between are made, too
                before = max((known for known in bases if known < base), default=base - size)
                if base - before > FILES_MAX * size:
                    before = base - size  # a leftover of an earlier life: nobody misses these
                for missing in range(before + size, base + 1, size):
                    edits.make_file(self._path(key, missing), size)
                    blanks = min(at - missing, size) // UNIT_BYTES
                    edits.write(self._path(key, missing), 0, BLANK_UNIT * blanks)
                    bases.add(missing)
            piece = data[done : done + base + size - at]
            edits.write(self._path(key, base), at - base, piece)
            done += len(piece)

    def _path(self, key: QueueKey, base: int) -> str:
        for item in self._queues[key].items if key in self._queues else ():
            if item.base == base:
                return item.path
        return f"{self._directory}/{key[0]}/{key[1]}/{base:020d}"

    def finish(self, log_end: int) -> None:
        """Nothing is left behind the ends: no unit may point to where no record is."""
        edits = self._edits
        self.wrong_units += sum(self._later.values())
        if edits is not None:
            edits.flush()
        for key, series in self._queues.items():
            end = self._ends.get(key)
            first_behind = (  # that points behind the end of the log
                at + int(found[0]) * UNIT_BYTES
                for at, data in series.data(align=UNIT_BYTES)
                for units in (np.frombuffer(data, UNIT_COLUMNS),)
                if len(
                    found := np.flatnonzero((units["position"] >= log_end) & (units["size"] > 0))
                )
            )
            position = next(first_behind, None) if end is None else end * UNIT_BYTES
            for item in series.items if position is not None else ():
                start = max(position or 0, item.base)
                if start >= item.end:
                    continue
                if edits is not None and start == item.base and end:
                    edits.remove_file(item.path, item.size)
                elif edits is not None:
                    edits.zero(item.path, start - item.base, item.size)
                elif self._safe_end is None:
                    for _, data in series.data(start, item.end, UNIT_BYTES):
                        rows = np.frombuffer(data, np.uint8).reshape(-1, UNIT_BYTES)
                        self.wrong_units += int(np.count_nonzero(rows.any(axis=1)))
        if edits is not None:
            edits.flush()


def _wrong_rows(old: bytes, new: bytes) -> tuple[NDArray[Any], int]:
    """The rows that differ, and how many of them may be units of a later life of the topic.

    Addresses of extension units are as good as the codes they stand for, and so are other times of
    delayed messages: nobody knows by which messageDelayLevel they were stored.
    """
    if old == new:
        return np.empty(0, np.int64), 0
    wanted = np.frombuffer(new, UNIT_COLUMNS)
    found = np.frombuffer(old + bytes(len(new) - len(old)), UNIT_COLUMNS)
    same = (found["position"] == wanted["position"]) & (found["size"] == wanted["size"])
    codes, wanted_codes = found["code"].astype(np.int64), wanted["code"].astype(np.int64)
    is_time = (wanted_codes > _CODE_MAX) & (abs(wanted_codes - codes) <= DELAY_MAX_MS)
    is_other = (codes <= EXTENSION_ADDRESS_MAX) | is_time
    same &= (codes == wanted_codes) | (is_other & (wanted_codes != PLACEHOLDER_CODE))
    later = ~same & (found["position"] > wanted["position"]) & (found["size"] > 0)
    return np.flatnonzero(~same), int(np.count_nonzero(later))
