"""One file of the key index, byte for byte as RocketMQ has it (spec/store.md §4), big-endian:

    header 40     | begin time 8 | end time 8 | begin offset 8 | end offset 8 | slots used 4 |
                  | next entry's number 4 |            times in ms, offsets in the commit log
    slots         4 bytes each: the number of the newest entry whose hash falls there, or 0
    entries       20 bytes each: | hash 4 | offset 8 | seconds since begin 4 | previous entry 4 |

Entry 0 is never used, so an empty file says 1 (or 0). Entries are only ever added, each batch with
one pwrite; they say everything. Header and slots are written at a flush, in this order: entries,
slots, header. Until then the file is a smaller index, but a right one.
"""

import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from sluicemq.errors import StoreDamagedError
from sluicemq.files import Files
from sluicemq.record.layout import INDEX_ENTRY, INDEX_HEADER
from sluicemq.store.segments import Segment

if TYPE_CHECKING:
    from sluicemq.record.table import Positions
    from sluicemq.store.index.columns import Columns, Slots

HEADER: Final = INDEX_HEADER.struct
ENTRY: Final = INDEX_ENTRY.struct
NAME_DIGITS: Final = 17
SLOT_BYTES: Final = 4
ENTRIES_PER_SLOT: Final = 4
"""RocketMQ's defaults have four entries a slot: what is assumed of a file of unknown sizes."""
CHAIN_MAX: Final = 200_000
"""Entries of one slot that a query looks at in one file: nothing may hold the loop."""
_INT: Final = struct.Struct(">i")


class Geometry(NamedTuple):
    """How many slots, and how many entries including the unused entry 0."""

    slots: int
    entries: int

    @property
    def entries_at(self) -> int:
        return HEADER.size + SLOT_BYTES * self.slots

    @property
    def size_bytes(self) -> int:
        return self.entries_at + ENTRY.size * self.entries


def fit_geometry(path: str, size: int, configured: Geometry) -> Geometry:
    """The geometry of a file that is there. Raises StoreDamagedError when it cannot be known."""
    if size == configured.size_bytes:
        return configured
    slots, rest = divmod(size - HEADER.size, SLOT_BYTES + ENTRIES_PER_SLOT * ENTRY.size)
    if rest == 0 and slots > 0:
        return Geometry(slots, ENTRIES_PER_SLOT * slots)
    raise StoreDamagedError(
        f"{path} has {size} bytes, but maxHashSlotNum={configured.slots} and"
        f" maxIndexNum={configured.entries} make {configured.size_bytes}.",
        fix="Set them to what the file was written with, or remove the directory index: it is"
        " built again from the log.",
    )


class IndexFile:
    """An index file. `count` is the number that the next entry gets, 1 in an empty file."""

    def __init__(self, files: Files, path: str, geometry: Geometry) -> None:
        self.path = path
        self.name = int(path.rpartition("/")[2])
        self.geometry = geometry
        self.begin_ms = self.end_ms = 0
        self.begin_offset = self.end_offset = 0
        self.slots_used = 0
        self.count = 1
        self._segment = Segment(files, path, 0, geometry.size_bytes)
        self._slots: Slots | None = None
        self._is_changed = False

    @classmethod
    def open(cls, files: Files, path: str, configured: Geometry) -> "IndexFile":
        """A file that is there, by its header. Raises StoreDamagedError."""
        with closing(files.open(path)) as handle:
            data, size = handle.pread(HEADER.size, 0), handle.size()
        file = cls(files, path, fit_geometry(path, size, configured))
        (
            file.begin_ms, file.end_ms, file.begin_offset, file.end_offset, file.slots_used, count,
        ) = HEADER.unpack(data)  # fmt: skip
        file.count = max(count, 1)
        if count > file.geometry.entries or file.slots_used > file.geometry.slots:
            raise StoreDamagedError(
                f"{path} says that it holds {count - 1} entries in {file.slots_used} slots, and has"
                f" room for {file.geometry.entries - 1} in {file.geometry.slots}: it is damaged, or"
                " maxHashSlotNum and maxIndexNum are not what it was written with.",
                fix="Remove the directory index: it is built again from the log.",
            )
        return file

    @classmethod
    def create(
        cls, files: Files, path: str, geometry: Geometry, former: "IndexFile | None"
    ) -> "IndexFile":
        """A new file, sparse, durable with its name. It begins where the former one ended."""
        handle = files.open(path, create=True)
        try:
            handle.truncate(geometry.size_bytes)
            file = cls(files, path, geometry)
            if former is not None:
                file.begin_ms = file.end_ms = former.end_ms
                file.begin_offset = file.end_offset = former.end_offset
            handle.pwrite(file._header(), 0)
            handle.sync()
        except OSError:
            with suppress(OSError):
                files.remove(path)
            raise
        finally:
            handle.close()
        files.sync_directory(path.rpartition("/")[0])
        file._slots = _new_slots(geometry.slots)
        return file

    @property
    def is_empty(self) -> bool:
        return self.count <= 1

    @property
    def room(self) -> int:
        """How many more entries the file takes."""
        return self.geometry.entries - self.count

    @property
    def is_ready(self) -> bool:
        """Whether its slots are in memory: then entries can be added."""
        return self._slots is not None

    @property
    def is_flushed(self) -> bool:
        """Whether slots and header lie in the file as they are."""
        return not self._is_changed

    # --- adding

    def append(self, columns: "Columns", base: int, starts: "Positions") -> None:
        """Add all keys of `columns`, which must fit; record i lies at base + starts[i].

        Raises OSError; then nothing was added.
        """
        from sluicemq.store.index.columns import entries_bytes  # noqa: PLC0415 - NumPy when needed

        assert self._slots is not None
        hashes, records, times = columns
        offsets = starts[records] + base
        seconds = (times - self.begin_ms) // 1000
        if self.is_empty and self.begin_ms <= 0:
            seconds = (times - times[0]) // 1000
        elif self.is_empty:  # the first entry counts from the former file's end (spec/store.md §4)
            seconds[1:] = (times[1:] - times[0]) // 1000
        linked = self._slots.link(hashes, self.count)
        data = entries_bytes(hashes, offsets, seconds, linked.previous)
        begin_ms, begin = self.begin_ms, self.begin_offset
        if self.is_empty:  # entries count from there: it has to lie in the file as long as they do
            begin_ms, begin = int(times[0]), int(offsets[0])
            self._segment.write(HEADER.pack(begin_ms, begin_ms, begin, begin, 0, 1), 0)
        self._segment.write(data, self._entry_at(self.count))
        self._slots.take(linked)
        self.begin_ms, self.begin_offset = begin_ms, begin
        self.end_ms, self.end_offset = int(times[-1]), int(offsets[-1])
        self.count += len(hashes)
        self.slots_used += linked.used
        self._is_changed = True

    def flush(self) -> bool:
        """Write slots and header; True when there was something to write. Raises OSError."""
        if not self._is_changed or self._slots is None:
            return False
        for slot, data in self._slots.changed():
            limit = (self.geometry.slots - slot) * SLOT_BYTES
            self._segment.write(data[:limit], HEADER.size + slot * SLOT_BYTES)
        self._segment.write(self._header(), 0)
        self._slots.written()
        self._is_changed = False
        return True

    def _header(self) -> bytes:
        return HEADER.pack(
            self.begin_ms, self.end_ms, self.begin_offset, self.end_offset, self.slots_used,
            self.count,
        )  # fmt: skip

    def _entry_at(self, number: int) -> int:
        return self.geometry.entries_at + ENTRY.size * number

    # --- getting ready

    def load(self) -> Iterator[None]:
        """Bring the slots into memory as the file has them, in steps."""
        slots = _new_slots(self.geometry.slots)
        # Without the map: most slots lie in holes between the data (`Segment.view`).
        stored = self._segment.read_detached(HEADER.size, self.geometry.entries_at - HEADER.size)
        yield from slots.load(memoryview(stored), self.count)
        self._slots = slots

    def restore(self, count: int, end_ms: int) -> Iterator[None]:
        """Be the index of the entries before `count`, in steps: what a crash left of slots and
        header does not matter. `end_ms` is the last one's store time."""
        self.count = count
        slots = _new_slots(self.geometry.slots)
        entries = self._segment.view()[self._entry_at(1) : self._entry_at(count)]
        yield from slots.restore(entries)
        self._slots = slots
        self.slots_used = slots.used()
        self.end_ms, self.end_offset = end_ms, self.offset_of(count - 1) if count > 1 else 0
        self._is_changed = True

    def offset_of(self, number: int) -> int:
        """Where the record of an entry lies."""
        offset: int = ENTRY.unpack_from(self._segment.view(), self._entry_at(number))[1]
        return offset

    def hash_of(self, number: int) -> int:
        """Return the hash of the key of an entry."""
        value: int = ENTRY.unpack_from(self._segment.view(), self._entry_at(number))[0]
        return value

    def count_before(self, offset: int) -> int:
        """The number of the first entry whose record lies at `offset` or behind."""
        low, high = 1, self.count
        while low < high:
            middle = (low + high) // 2
            if self.offset_of(middle) < offset:
                low = middle + 1
            else:
                high = middle
        return low

    # --- asking

    def find(self, value: int, begin_ms: int, end_ms: int) -> Iterator[int]:
        """Where the records of entries with this hash lie, newest first, that may be of that time:
        seconds leave out up to 999 ms."""
        view = self._segment.view()
        slot = value % self.geometry.slots
        if self._slots is not None:
            number = self._slots[slot]
        else:
            # Without the map: most slots lie in holes between the data (`Segment.view`).
            stored = self._segment.read_detached(HEADER.size + SLOT_BYTES * slot, SLOT_BYTES)
            number = _INT.unpack(stored)[0]
        limit = self.count
        for _ in range(CHAIN_MAX):
            if not 0 < number < limit:  # numbers fall along a chain: no damage makes it a circle
                return
            found, offset, seconds, previous = ENTRY.unpack_from(view, self._entry_at(number))
            time_ms = self.begin_ms + 1000 * seconds if number > 1 else self.begin_ms
            if time_ms + 999 < begin_ms:
                return
            if found == value and time_ms <= end_ms:
                yield offset
            limit, number = number, previous

    def release(self) -> None:
        """The file is full and flushed: its slots are read from the map from now on."""
        self._slots = None
        self._segment.release()

    def close(self) -> None:
        self._slots = None
        self._segment.close()


def _new_slots(count: int) -> "Slots":
    from sluicemq.store.index.columns import Slots  # noqa: PLC0415 - NumPy when it is needed

    return Slots(count)


def is_index_name(name: str) -> bool:
    return len(name) == NAME_DIGITS and name.isascii() and name.isdigit()
