"""One file of the key index, with the bytes that RocketMQ writes (spec/store.md §4).

All numbers are big-endian:

    header 40     | begin time 8 | end time 8 | begin position 8 | end position 8 | slots used 4 |
                  | number of the next entry 4 |     times in ms, positions in the commit log
    slots         4 bytes each: the number of the newest entry whose hash has this slot, or 0
    entries       20 bytes each: | hash 4 | position 8 | seconds since begin 4 | previous entry 4 |

Entry 0 is never used, so the header of an empty file has 1 (or 0) as the next number. Entries are
only appended, each batch with one pwrite, and everything else can be rebuilt from them. Slots and
header are written by a flush, in this order: entries, slots, header. Until then the file is a
smaller index, but a correct one.
"""

import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from sluicemq.errors import StoreDamagedError
from sluicemq.files import Files
from sluicemq.record.layout import INDEX_ENTRY, INDEX_HEADER
from sluicemq.store.segments import Segment

if TYPE_CHECKING:
    from sluicemq.record.table import Positions
    from sluicemq.store.index.columns import KeyColumns, Slots

HEADER: Final = INDEX_HEADER.struct
ENTRY: Final = INDEX_ENTRY.struct
NAME_DIGITS: Final = 17
"""The length of a file's name: the local time of its creation, as digits up to the ms."""

SLOT_BYTES: Final = 4
ENTRIES_PER_SLOT: Final = 4
"""The number of entries for each slot in RocketMQ's defaults. It is assumed for a file that does
not have the configured size."""

CHAIN_MAX: Final = 200_000
"""The number of entries of one slot that a query examines in one file at most. The limit keeps a
query from blocking the event loop."""

_INT: Final = struct.Struct(">i")


class IndexMark(NamedTuple):
    """The state of the index as a checkpoint stores it (`directory.Checkpoint`)."""

    offset: int = 0
    """The position before which the log is indexed; 0 if the state is unknown."""
    entries: int = 0
    """The `next_number` of the last file."""
    file: int = 0
    """The name of the last file, as a number; 0 if there is none."""
    files: int = -1
    """The number of files; -1 if it is unknown."""


class KeyQueryResult(NamedTuple):
    """The result of a query of the key index."""

    records: list[bytes]
    """The stored records, the newest first."""
    last_time_ms: int = 0
    """The store time of the newest indexed record; 0 if no entry has the hash of the key."""
    last_offset: int = 0
    """The position of the newest indexed record; 0 if no entry has the hash of the key."""
    behind_bytes: int = 0
    """The bytes of the log that are not indexed, if they are too many to wait for. Then nothing
    was looked up."""


class Geometry(NamedTuple):
    """The size of an index file, as its numbers of slots and entries."""

    slot_count: int
    entry_count: int
    """The number of entries, including the unused entry 0."""

    @property
    def entries_start(self) -> int:
        """The offset of entry 0 in the file."""
        return HEADER.size + SLOT_BYTES * self.slot_count

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return self.entries_start + ENTRY.size * self.entry_count


def fit_geometry(path: str, size: int, configured: Geometry) -> Geometry:
    """Return the numbers of slots and entries of an index file, derived from its size.

    `path` is only for the error. The result is `configured` if that gives a file of `size` bytes.
    Otherwise it is the number of slots, with ENTRIES_PER_SLOT entries a slot as in RocketMQ, that
    gives this size.

    Raises StoreDamagedError if there is no such number.
    """
    if size == configured.size_bytes:
        return configured
    slot_count, bytes_left = divmod(size - HEADER.size, SLOT_BYTES + ENTRIES_PER_SLOT * ENTRY.size)
    if bytes_left == 0 and slot_count > 0:
        return Geometry(slot_count, ENTRIES_PER_SLOT * slot_count)
    raise StoreDamagedError(
        f"{path} has {size} bytes, but maxHashSlotNum={configured.slot_count} and"
        f" maxIndexNum={configured.entry_count} require {configured.size_bytes}.",
        fix="Set them to the values with which the file was written, or remove the directory"
        " index: it is built again from the log.",
    )


class IndexFile:
    """One index file.

    Its slots are in memory (`has_slots`) while entries may be added, and are read from the file
    otherwise.
    """

    def __init__(self, files: Files, path: str, geometry: Geometry) -> None:
        """Describe an empty file at `path`, without reading or writing it.

        Callers use `open` or `create` instead. The name of the file must be a number. `geometry`
        has the numbers of slots and entries.
        """
        self.path = path
        self.name = int(path.rpartition("/")[2])
        self.geometry = geometry
        self.begin_ms = self.end_ms = 0
        """The store times of the first and last record that have an entry."""
        self.begin_offset = self.end_offset = 0
        """The positions of the first and last record that have an entry."""
        self.slots_used = 0
        """The number of slots that have an entry."""
        self.next_number = 1
        """The number that the next entry gets; 1 if the file is empty."""
        self._segment = Segment(files, path, 0, geometry.size_bytes)
        self._slots: Slots | None = None
        self._is_changed = False

    @classmethod
    def open(cls, files: Files, path: str, configured: Geometry) -> "IndexFile":
        """Open the existing file `path`, and read its header but not its slots.

        `configured` is the geometry (numbers of slots and entries) of new files. An older file may
        have another geometry, which follows from its size.

        Raises StoreDamagedError if the size or the header is not valid, and OSError.
        """
        with closing(files.open(path)) as handle:
            header = handle.pread(HEADER.size, 0)
            size = handle.size()
        file = cls(files, path, fit_geometry(path, size, configured))
        (
            file.begin_ms,
            file.end_ms,
            file.begin_offset,
            file.end_offset,
            file.slots_used,
            next_number,
        ) = HEADER.unpack(header)
        file.next_number = max(next_number, 1)
        if next_number > file.geometry.entry_count or file.slots_used > file.geometry.slot_count:
            raise StoreDamagedError(
                f"{path} claims {next_number - 1} entries in {file.slots_used} slots, but has room"
                f" for {file.geometry.entry_count - 1} in {file.geometry.slot_count}. It is"
                " damaged, or was written with other values of maxHashSlotNum and maxIndexNum.",
                fix="Remove the directory index: it is built again from the log.",
            )
        return file

    @classmethod
    def create(
        cls, files: Files, path: str, geometry: Geometry, former: "IndexFile | None"
    ) -> "IndexFile":
        """Create the sparse file `path`, and return it with empty slots, ready for entries.

        The file and its name are synced to the disk. As in RocketMQ, the header begins at the time
        and position at which the header of the `former` file ended. If `former` is None, it begins
        at 0.

        Raises OSError; then the file is removed.
        """
        handle = files.open(path, create=True)
        try:
            handle.truncate(geometry.size_bytes)
            file = cls(files, path, geometry)
            if former is not None:
                file.begin_ms = file.end_ms = former.end_ms
                file.begin_offset = file.end_offset = former.end_offset
            handle.pwrite(file._encode_header(), 0)
            handle.sync()
        except OSError:
            with suppress(OSError):
                files.remove(path)
            raise
        finally:
            handle.close()
        files.sync_directory(path.rpartition("/")[0])
        file._slots = _make_slots(geometry.slot_count)
        return file

    @property
    def is_empty(self) -> bool:
        """Whether the file has no entries."""
        return self.next_number <= 1

    @property
    def free_entries(self) -> int:
        """The number of entries for which the file still has room."""
        return self.geometry.entry_count - self.next_number

    @property
    def has_slots(self) -> bool:
        """Whether the slots are in memory, so that entries can be added."""
        return self._slots is not None

    @property
    def is_flushed(self) -> bool:
        """Whether slots and header have been written since the last change."""
        return not self._is_changed

    # --- adding

    def append(self, columns: "KeyColumns", base: int, starts: "Positions") -> None:
        """Add an entry for each key of `columns`.

        The file must have enough free entries, and its slots must be in memory. Record i begins at
        position `base` + `starts[i]` of the log. The entries are written to the file now, but slots
        and header only when `flush` is called.

        Raises OSError; then nothing was added.
        """
        from sluicemq.store.index.columns import encode_entries  # noqa: PLC0415 - imports NumPy

        assert self._slots is not None
        hashes, records, times_ms = columns
        positions = starts[records] + base
        seconds = self._compute_seconds(times_ms)
        links = self._slots.link(hashes, self.next_number)
        encoded_entries = encode_entries(hashes, positions, seconds, links.previous)
        begin_ms = self.begin_ms
        begin_offset = self.begin_offset
        if self.is_empty:
            # The seconds of entries count from the header's begin time, so that must be in the file
            # before them.
            begin_ms = int(times_ms[0])
            begin_offset = int(positions[0])
            self._segment.write(
                HEADER.pack(begin_ms, begin_ms, begin_offset, begin_offset, 0, 1), 0
            )
        self._segment.write(encoded_entries, self._entry_at(self.next_number))
        self._slots.apply(links)
        self.begin_ms = begin_ms
        self.begin_offset = begin_offset
        self.end_ms = int(times_ms[-1])
        self.end_offset = int(positions[-1])
        self.next_number += len(hashes)
        self.slots_used += links.used
        self._is_changed = True

    def _compute_seconds(self, times_ms: "Positions") -> "Positions":
        """Return the seconds that new entries store, for records that were stored at `times_ms`.

        Seconds count from the begin time in the header, which is the store time of the first entry.
        There is one exception, as in RocketMQ: the first entry of a file counts from the end time
        of the former file, or is 0 if there is no former file (spec/store.md §4).
        """
        seconds = (times_ms - self.begin_ms) // 1000
        if self.is_empty:
            # The header's begin time is still that of the former file. `times_ms[0]` replaces it.
            seconds[1:] = (times_ms[1:] - times_ms[0]) // 1000
            has_former_file = self.begin_ms > 0
            if not has_former_file:
                seconds[0] = 0
        return seconds

    def flush(self) -> bool:
        """Write the changed slots, then the header, without syncing the file.

        Return whether there was anything to write. A file whose slots are not in memory has nothing
        to write.

        Raises OSError; then the next call writes all of it again.
        """
        if not self._is_changed or self._slots is None:
            return False
        for first_slot, slot_bytes in self._slots.iter_changed():
            bytes_max = (self.geometry.slot_count - first_slot) * SLOT_BYTES
            self._segment.write(slot_bytes[:bytes_max], HEADER.size + first_slot * SLOT_BYTES)
        self._segment.write(self._encode_header(), 0)
        self._slots.mark_written()
        self._is_changed = False
        return True

    def _encode_header(self) -> bytes:
        """Return the 40 bytes of the header."""
        return HEADER.pack(
            self.begin_ms,
            self.end_ms,
            self.begin_offset,
            self.end_offset,
            self.slots_used,
            self.next_number,
        )

    def _entry_at(self, entry_number: int) -> int:
        """Return the offset of an entry in the file."""
        return self.geometry.entries_start + ENTRY.size * entry_number

    # --- slots

    def load_slots(self) -> Iterator[None]:
        """Read the slots from the file into memory, so that entries can be added.

        The work is done while the caller iterates; each step takes about a millisecond.
        """
        slots = _make_slots(self.geometry.slot_count)
        # Not through the mapping: most slots are in holes of the sparse file (`Segment.view`).
        stored = self._segment.read_detached(HEADER.size, self.geometry.entries_start - HEADER.size)
        yield from slots.load(memoryview(stored), self.next_number)
        self._slots = slots

    def rebuild_slots(self, end_number: int, end_ms: int) -> Iterator[None]:
        """Drop the entries from `end_number` on, and rebuild slots and header from the others.

        `end_ms` is the store time of the last record that remains. The old slots and the old header
        are not read, so they may be damaged. The work is done in memory, while the caller iterates;
        the next `flush` writes the result.
        """
        self.next_number = end_number
        slots = _make_slots(self.geometry.slot_count)
        stored_entries = self._segment.view()[self._entry_at(1) : self._entry_at(end_number)]
        yield from slots.rebuild(stored_entries)
        self._slots = slots
        self.slots_used = slots.count_used()
        self.end_ms = end_ms
        self.end_offset = 0
        if end_number > 1:
            self.end_offset = self.position_of(end_number - 1)
        self._is_changed = True

    def position_of(self, entry_number: int) -> int:
        """Return the position of the record of an entry."""
        position: int = ENTRY.unpack_from(self._segment.view(), self._entry_at(entry_number))[1]
        return position

    def hash_of(self, entry_number: int) -> int:
        """Return the hash of the key of an entry."""
        key_hash: int = ENTRY.unpack_from(self._segment.view(), self._entry_at(entry_number))[0]
        return key_hash

    def first_number_at(self, offset: int) -> int:
        """Return the number of the first entry whose record is at position `offset` or later.

        Return `next_number` if there is none.
        """
        low = 1
        high = self.next_number
        while low < high:
            middle = (low + high) // 2
            if self.position_of(middle) < offset:
                low = middle + 1
            else:
                high = middle
        return low

    # --- queries

    def find_positions(self, key_hash: int, begin_ms: int, end_ms: int) -> Iterator[int]:
        """Yield the positions of records with a key whose hash is `key_hash`, the newest first.

        Only records that may have been stored from `begin_ms` to `end_ms` are found. Entries store
        whole seconds, so the store time of a found record may be up to 999 ms outside. Different
        keys may have the same hash, so the caller must compare the keys.

        At most CHAIN_MAX entries are examined.
        """
        view = self._segment.view()
        entry_number = self._newest_number_in(key_hash % self.geometry.slot_count)
        number_end = self.next_number
        for _ in range(CHAIN_MAX):
            if not 0 < entry_number < number_end:
                # Number 0 ends the chain. Numbers must decrease along a chain, so that a damaged
                # file cannot make it endless.
                return
            entry_hash, position, seconds, previous_number = ENTRY.unpack_from(
                view, self._entry_at(entry_number)
            )
            # The seconds of entry 1 may count from the end of the former file, so they are ignored.
            # Its time is the begin time of this file.
            time_ms = self.begin_ms
            if entry_number > 1:
                time_ms += 1000 * seconds
            if time_ms + 999 < begin_ms:
                return
            if entry_hash == key_hash and time_ms <= end_ms:
                yield position
            number_end = entry_number
            entry_number = previous_number

    def _newest_number_in(self, slot: int) -> int:
        """Return the number of the newest entry of a slot, 0 if it has none."""
        if self._slots is not None:
            return self._slots[slot]
        # Not through the mapping: most slots are in holes of the sparse file (`Segment.view`).
        stored = self._segment.read_detached(HEADER.size + SLOT_BYTES * slot, SLOT_BYTES)
        (number,) = _INT.unpack(stored)
        return int(number)

    def release_slots(self) -> None:
        """Free the slots of a full, flushed file. They are read from the file from now on."""
        self._slots = None
        self._segment.release()

    def close(self) -> None:
        """Close the file, without a flush."""
        self._slots = None
        self._segment.close()


def _make_slots(count: int) -> "Slots":
    """Return `count` slots without entries."""
    from sluicemq.store.index.columns import Slots  # noqa: PLC0415 - imports NumPy

    return Slots(count)


def is_index_name(name: str) -> bool:
    """Return whether a file name is that of an index file."""
    return len(name) == NAME_DIGITS and name.isascii() and name.isdigit()


def list_index_names(files: Files, directory: str) -> list[str]:
    """Return the sorted names of the index files in `directory`, and remove empty ones at the end.

    A crash or an error while a file is created leaves a file of 0 bytes. Raises OSError.
    """
    names = list(filter(is_index_name, files.names(directory)))
    while names:
        path = f"{directory}/{names[-1]}"
        with closing(files.open(path)) as file:
            if file.size():
                break
        files.remove(path)
        names.pop()
    return names


def choose_path(files: Files, directory: str, now_ms: int, name_min: int) -> str:
    """Return a path in `directory` for the next index file, at which no file exists yet.

    The name is `now_ms` in local time as digits (year to millisecond). It is `name_min` if that is
    higher, and higher numbers are tried while a file has the name.
    """
    now = datetime.fromtimestamp(now_ms // 1000, UTC).astimezone()
    name = max(int(f"{now:%Y%m%d%H%M%S}{now_ms % 1000:03d}"), name_min)
    while True:
        path = f"{directory}/{name:0{NAME_DIGITS}d}"
        if not files.exists(path):
            return path
        name += 1
