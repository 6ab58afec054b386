"""One file of the key index, in columns (spec/store.md §4).

    | begin time 8 | end time 8 | begin position 8 | end position 8 | used slots 4 | count 4 |
    | slot 4 … |  the number of the newest entry, by hash modulo slots; 0: none
    | hash 4 | position 8 | seconds since begin time 4 | previous entry of the slot 4 | …

Entry 0 is never used, so `count` is one more than there are entries. How many slots a file has it
does not say: in RocketMQ's default there are four times as many entries. A file of other settings
tells by where its first and its last entry stand.
"""

import struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluicemq.files import File, Files
from sluicemq.record.layout import INDEX_ENTRY, INDEX_HEADER
from sluicemq.store.offline.columns import Positions

HEADER: Final = INDEX_HEADER.struct
ENTRY: Final = INDEX_ENTRY.dtype
SLOT_BYTES: Final = 4
ENTRIES_PER_SLOT: Final = 4
_SECONDS_MAX: Final = (1 << 31) - 1
_SEARCH_BYTES_MAX: Final = 1 << 29


class IndexHeader(NamedTuple):
    begin_time_ms: int
    end_time_ms: int
    begin_position: int
    end_position: int
    slots_used: int
    entry_limit: int
    """One more than the number of the last entry."""


class IndexFile:
    """A file's entries, number 1 at index 0, and its slots."""

    def __init__(
        self,
        path: str,
        header: IndexHeader,
        slots: NDArray[Any],
        entries: NDArray[Any],
        *,
        is_cut: bool = False,
    ) -> None:
        self.path = path
        self.is_cut = is_cut
        """Only the first entries are there: neither header nor slots speak of them alone."""
        self.header = header
        self.slots = slots
        self.hashes: Positions = entries["hash"].astype(np.int64)
        self.positions: Positions = entries["position"].astype(np.int64)
        self.times: Positions = entries["seconds"].astype(np.int64)
        self.previous: Positions = entries["previous"].astype(np.int64)
        count = len(self.positions)
        self.last = int(self.positions.max()) if count else -1
        # A damaged entry must not keep the next file from being read.
        self.nearly_last = (
            int(np.partition(self.positions, count // 2)[count // 2]) if count else -1
        )

    def expected_times(self, store_times: Positions) -> Positions:
        """Seconds after the file's begin, as an entry holds them."""
        return np.clip((store_times - self.header.begin_time_ms) // 1000, 0, _SECONDS_MAX)

    def follow(self, former: "IndexFile | None") -> None:
        """The first entry may count from the end of the file before (spec/store.md §4): then its
        time is as good as 0. Without that file, which retention may have removed, any is."""
        if not len(self.times):
            return
        gap_ms = 0 if former is None else self.header.begin_time_ms - former.header.end_time_ms
        if former is None or self.times[0] == gap_ms // 1000:
            self.times[0] = 0

    def problems(self) -> list[str]:
        """What in the file does not agree with itself."""
        if not len(self.positions):
            return ["it has no entry, but slots"] if self.slots.any() and not self.is_cut else []
        header = [] if self.is_cut else self._header_problems()
        return [*header, *self._order_problems(), *self._chain_problems()]

    def _header_problems(self) -> list[str]:
        header, found = self.header, []
        if header.begin_position != self.positions[0]:
            found.append(
                f"its header says that it begins at {header.begin_position} of the log, its first"
                f" entry says {self.positions[0]}"
            )
        if header.end_position != self.positions[-1]:
            found.append(
                f"its header says that it ends at {header.end_position} of the log, its last entry"
                f" says {self.positions[-1]}"
            )
        if self.times[0] != 0:
            found.append(f"its first entry has time {self.times[0]} instead of 0")
        seconds = (header.end_time_ms - header.begin_time_ms) // 1000
        if max(seconds, 0) != self.times[-1]:
            found.append(
                f"its header spans {seconds} seconds, its last entry says {self.times[-1]}"
            )
        used = int(np.count_nonzero(self.slots))
        if header.slots_used != used:
            found.append(f"its header counts {header.slots_used} used slots, there are {used}")
        return found

    def _order_problems(self) -> list[str]:
        back = np.flatnonzero(np.diff(self.positions) < 0)
        return [f"entry {at + 2} lies before entry {at + 1} in the log" for at in back[:20]]

    def _chain_problems(self) -> list[str]:
        """Every entry leads to the one before it in its slot, the slot to the newest."""
        count = len(self.hashes)
        slots = self.hashes % len(self.slots)
        order = np.argsort(slots, kind="stable")
        sorted_slots = slots[order]
        first = np.append(True, sorted_slots[1:] != sorted_slots[:-1]) if count else order > 0
        previous = np.zeros(count, np.int64)
        before = np.zeros(count, np.int64)
        before[1:] = order[:-1] + 1
        before[first] = 0
        previous[order] = before
        heads = np.zeros(len(self.slots), np.int64)
        heads[slots] = np.arange(1, count + 1)
        found = [
            f"entry {at + 1} leads to entry {self.previous[at]}, but {previous[at]} is the one"
            " before it in its slot"
            for at in np.flatnonzero(previous != self.previous)[:20].tolist()
        ]
        if self.is_cut:
            return found
        found += [
            f"slot {at} begins with entry {self.slots[at]} instead of {heads[at]}"
            for at in np.flatnonzero(heads != self.slots)[:20].tolist()
        ]
        return found


def load_index(files: Files, path: str, entry_limit: int | None = None) -> IndexFile | None:
    """The file in memory, or only its entries before number `entry_limit`.

    None when it cannot be an index file. Raises OSError.
    """
    file = files.open(path)
    try:
        size = file.size()
        if size < HEADER.size + SLOT_BYTES + ENTRY.itemsize:
            return None
        header = IndexHeader._make(HEADER.unpack(file.pread(HEADER.size, 0)))
        header = header._replace(entry_limit=max(header.entry_limit, 1))
        is_cut = entry_limit is not None
        slots = slot_count(file, header)
        if entry_limit is not None:
            header = header._replace(entry_limit=max(entry_limit, 1))
        if slots is None or header.entry_limit > (size - HEADER.size - SLOT_BYTES * slots) // 20:
            return None
        table = np.frombuffer(file.pread(SLOT_BYTES * slots, HEADER.size), ">i4")
        entries = file.pread(
            ENTRY.itemsize * (header.entry_limit - 1),
            HEADER.size + SLOT_BYTES * slots + ENTRY.itemsize,
        )
        return IndexFile(path, header, table, np.frombuffer(entries, ENTRY), is_cut=is_cut)
    finally:
        file.close()


def slot_count(file: File, header: IndexHeader) -> int | None:
    """How many slots the file has; None when no number fits."""
    rest = file.size() - HEADER.size
    usual, odd = divmod(rest, SLOT_BYTES + ENTRIES_PER_SLOT * ENTRY.itemsize)
    if not odd and (header.entry_limit <= 1 or _fits(file, header, usual)):
        return usual
    found = _search(file, header) if rest <= _SEARCH_BYTES_MAX and header.entry_limit > 1 else None
    return found if found is not None else (usual if not odd else None)


def _fits(file: File, header: IndexHeader, slots: int) -> bool:
    """Whether the first and the last entry stand where they would with so many slots."""
    entries = HEADER.size + SLOT_BYTES * slots
    ends = ((1, header.begin_position), (header.entry_limit - 1, header.end_position))
    for number, position in ends:
        data = file.pread(ENTRY.itemsize, entries + number * ENTRY.itemsize)
        if len(data) < ENTRY.itemsize or np.frombuffer(data, ENTRY)["position"][0] != position:
            return False
    return True


def _search(file: File, header: IndexHeader) -> int | None:
    """The number of slots that makes both ends of the entries fit."""
    size = file.size()
    data = file.pread(size, 0)
    wanted = struct.pack(">q", header.end_position)
    last = (header.entry_limit - 1) * ENTRY.itemsize + 4
    at = data.find(wanted, HEADER.size)
    while at >= 0:
        slots, odd = divmod(at - last - HEADER.size, SLOT_BYTES)
        room = size - HEADER.size - SLOT_BYTES * slots
        if not odd and slots > 0 and room % ENTRY.itemsize == 0 and _fits(file, header, slots):
            return slots
        at = data.find(wanted, at + 1)
    return None
