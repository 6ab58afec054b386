"""The timer wheel: for each second of two weeks, the chain of messages that are due in it.

One file of 38,707,200 bytes, 1,209,600 slots of 32 (spec/delivery.md §2), big-endian:

    | time 8 | first unit 8 | last unit 8 | messages 4 | magic 4 |

A slot belongs to one second in each turn of the wheel: it counts only when its time is the one that
is asked for. `time` is in units of the precision (seconds); units are positions in the timer log.

The file is sparse, and nothing of it is kept in memory but the slots that changed since they were
written: reads are single `pread`s, and holes are passed over. `take` hands the changed slots over
to `write`, which another thread may call; until `settle` they are read from memory.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from sluicemq.errors import StoreDamagedError
from sluicemq.files import File, Files
from sluicemq.store.timer_log import NONE

SLOT: Final = struct.Struct(">qqqii")
SLOT_BYTES: Final = 32
SLOTS: Final = 2 * 7 * 86_400
WHEEL_BYTES: Final = SLOTS * SLOT_BYTES
_CHUNK_SLOTS: Final = 2048


class Slot(NamedTuple):
    """One second: first and last unit of its chain, and how many messages it holds."""

    time: int
    first: int
    last: int
    messages: int
    magic: int = 0


class TimerWheel:
    """The slots. Times are milliseconds, cut down to the precision."""

    def __init__(self, files: Files, path: str, precision_ms: int = 1000) -> None:
        self._files = files
        self._path = path
        self._precision_ms = precision_ms
        self._file: File | None = None
        self._changed: dict[int, Slot] = {}
        self._writing: dict[int, Slot] = {}

    # --- the file

    @property
    def exists(self) -> bool:
        """Is the file there?"""
        return self._files.exists(self._path)

    def check(self) -> None:
        """Raises StoreDamagedError when the file is there and has another size. An empty one, the
        trace of a crash at its creation, is none."""
        if not self.exists:
            return
        size = self._open().size()
        if size == 0:
            self.remove()
        elif size != WHEEL_BYTES:
            raise StoreDamagedError(
                f"{self._path} has {size} bytes instead of {WHEEL_BYTES}.",
                cure="Bring it back from a copy, or remove timerwheel and timerlog: they are built"
                " again from the commit log.",
            )

    def _open(self) -> File:
        file = self._file
        if file is None:
            file = self._file = self._files.open(self._path, create=True)
        return file

    def _grow(self) -> None:
        self._open().truncate(WHEEL_BYTES)
        self._open().sync()
        self._files.sync_directory(self._path.rpartition("/")[0])

    def remove(self) -> None:
        """All slots are empty again."""
        self.close()
        self._changed.clear()
        self._writing.clear()
        if self.exists:
            self._files.remove(self._path)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    # --- slots

    def get(self, time_ms: int) -> Slot | None:
        """The slot of a second; None when nothing is in it. HOT."""
        time = time_ms // self._precision_ms
        index = time % SLOTS
        slot = self._changed.get(index) or self._writing.get(index)
        if slot is None:
            if self._file is None and not self.exists:
                return None
            data = self._open().pread(SLOT_BYTES, index * SLOT_BYTES)
            if len(data) < SLOT_BYTES:
                return None
            slot = Slot._make(SLOT.unpack(data))
        return slot if slot.time == time and slot.last != NONE else None

    def put(self, time_ms: int, first: int, last: int, messages: int) -> None:
        """What a second holds from now on."""
        time = time_ms // self._precision_ms
        self._changed[time % SLOTS] = Slot(time, first, last, messages)

    def occupied(self, start_ms: int, end_ms: int) -> Iterator[int]:
        """The seconds in [start, end), in ms, that hold something, in order.

        Slots that change meanwhile may be missed or come again.
        """
        step = self._precision_ms
        first = start_ms // step
        last = min(-(-end_ms // step), first + SLOTS)
        while first < last:
            stop = min(last, first + _CHUNK_SLOTS - first % SLOTS % _CHUNK_SLOTS, _turn_end(first))
            for time in sorted(self._in_memory(first, stop) | self._on_disk(first, stop)):
                if self.get(time * step) is not None:
                    yield time * step
            first = stop

    def _in_memory(self, first: int, stop: int) -> set[int]:
        found: set[int] = set()
        for slots in (self._changed, self._writing):
            if len(slots) < stop - first:
                found |= {slot.time for slot in slots.values() if first <= slot.time < stop}
            else:
                found |= {time for time in range(first, stop) if time % SLOTS in slots}
        return found

    def _on_disk(self, first: int, stop: int) -> set[int]:
        if self._file is None and not self.exists:
            return set()
        begin = first % SLOTS * SLOT_BYTES
        data = self._open().pread((stop - first) * SLOT_BYTES, begin)
        if not data.rstrip(b"\0"):
            return set()
        return {time for time, *_ in SLOT.iter_unpack(data) if first <= time < stop}

    @property
    def has_memory(self) -> bool:
        """Does a slot differ from the file?"""
        return bool(self._changed or self._writing)

    # --- writing

    def take(self) -> Mapping[int, Slot]:
        """The changed slots, for `write`; nothing while some are being written."""
        if not self._writing:
            self._writing, self._changed = self._changed, {}
        return self._writing

    def write(self, slots: Mapping[int, Slot]) -> None:
        """Write slots, neighbours in one piece, and wait until they are on disk. Raises OSError.

        Another thread may do this.
        """
        if not slots:
            return
        file = self._open()
        if file.size() < WHEEL_BYTES:
            self._grow()
        pack = SLOT.pack
        indices = sorted(slots)
        start = 0
        for at in range(1, len(indices) + 1):
            if at == len(indices) or indices[at] != indices[at - 1] + 1:
                run = indices[start:at]
                file.pwrite(b"".join([pack(*slots[i]) for i in run]), run[0] * SLOT_BYTES)
                start = at
        file.sync()

    def settle(self, *, is_written: bool) -> None:
        """The slots that `take` gave are on disk, or still have to be written."""
        if not is_written:
            self._changed = self._writing | self._changed
        self._writing = {}


def _turn_end(time: int) -> int:
    """Where the turn of the wheel ends in which `time` lies."""
    return time - time % SLOTS + SLOTS
