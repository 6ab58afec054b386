"""The hash slots of one index file, in memory (NumPy): slot -> number of its newest entry.

An anonymous array of 4 bytes a slot (20 MB with RocketMQ's default of 5,000,000), of which the
system provides only the pages that are touched. Entries of a batch are linked in columns: sorted
by slot, each entry's predecessor is its neighbour, or what the slot held before.

Slots are derived: entries say their hashes, so `restore` builds them again, whatever a crash left
in the file. What changed is remembered by blocks, and written when the index is flushed.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluicemq.record.layout import INDEX_ENTRY

BLOCK_SLOTS: Final = 1024
STEP_SLOTS: Final = 1 << 18
STEP_ENTRIES: Final = 1 << 16
ENTRY_TYPE: Final = INDEX_ENTRY.dtype

Numbers = NDArray[np.int32]


class Linked(NamedTuple):
    """What a batch of entries would change: see `Slots.link`."""

    previous: Numbers
    slots: Numbers
    newest: Numbers
    used: int


class Slots:
    """The slots of one file. Values are entry numbers, 0 where there is none."""

    def __init__(self, count: int) -> None:
        self._newest = np.zeros(count, np.int32)
        self._dirty = np.zeros(-(-count // BLOCK_SLOTS), np.bool_)

    def __getitem__(self, slot: int) -> int:
        return int(self._newest[slot])

    def link(self, hashes: Numbers, first: int) -> Linked:
        """Entries `first`, `first` + 1, … with these hashes: their predecessors, and what the slots
        will say. Changes nothing before `take`."""
        newest = self._newest
        slots = hashes % np.int32(len(newest))
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        numbers = order.astype(np.int32) + np.int32(first)
        before = newest[ordered]
        is_head = np.ones(len(ordered), np.bool_)
        np.not_equal(ordered[1:], ordered[:-1], out=is_head[1:])
        used = int(np.count_nonzero(is_head & (before == 0)))
        before[1:][~is_head[1:]] = numbers[:-1][~is_head[1:]]
        previous = np.empty_like(before)
        previous[order] = before
        is_last = np.append(is_head[1:], True)
        return Linked(previous, ordered[is_last], numbers[is_last], used)

    def take(self, linked: Linked) -> None:
        """Make what `link` found true."""
        self._newest[linked.slots] = linked.newest
        self._dirty[linked.slots // BLOCK_SLOTS] = True

    # --- from and to the file

    def load(self, stored: memoryview, count: int) -> Iterator[None]:
        """Take the slots as a file says, in steps; a number that no entry has counts as none."""
        values = np.frombuffer(stored, ">i4")
        for start in range(0, len(values), STEP_SLOTS):
            part = values[start : start + STEP_SLOTS]
            if part.any():  # untouched pages of the array stay untouched
                good = (part > 0) & (part < count)
                self._newest[start : start + STEP_SLOTS] = np.where(good, part, 0)
            yield

    def restore(self, entries: memoryview) -> Iterator[None]:
        """Build the slots from all entries (the first of them has number 1), in steps."""
        hashes = np.frombuffer(entries, ENTRY_TYPE)["hash"]
        for start in range(0, len(hashes), STEP_ENTRIES):
            part = hashes[start : start + STEP_ENTRIES].astype(np.int32) & np.int32(0x7FFFFFFF)
            slots = part % np.int32(len(self._newest))
            # Of equal slots the last assignment stays: the newest entry.
            self._newest[slots] = np.arange(start + 1, start + 1 + len(part), dtype=np.int32)
            yield
        self._dirty[:] = True

    def used(self) -> int:
        """How many slots have an entry."""
        return int(np.count_nonzero(self._newest))

    def changed(self) -> Iterator[tuple[int, bytes]]:
        """(first slot, bytes for the file) of each run of changed blocks."""
        dirty = np.flatnonzero(self._dirty)
        for run in np.split(dirty, np.flatnonzero(np.diff(dirty) != 1) + 1) if len(dirty) else ():
            start, end = int(run[0]) * BLOCK_SLOTS, (int(run[-1]) + 1) * BLOCK_SLOTS
            yield start, self._newest[start:end].astype(">i4").tobytes()

    def written(self) -> None:
        """All that `changed` gave is in the file."""
        self._dirty[:] = False


def entries_bytes(
    hashes: Numbers, offsets: NDArray[np.int64], seconds: NDArray[np.int64], previous: Numbers
) -> bytes:
    """Entries as they stand in the file."""
    entries = np.empty(len(hashes), ENTRY_TYPE)
    entries["hash"] = hashes
    entries["position"] = offsets
    entries["seconds"] = np.clip(seconds, 0, 0x7FFFFFFF)
    entries["previous"] = previous
    return entries.tobytes()
