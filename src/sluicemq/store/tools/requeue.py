"""Making the consume queues say what the log says, changing no unit that is right already.

Fed with all good records in the order of the log, as a broker would be that builds its queues anew:
each record's unit is put at its offset. An offset at or below one that came before means that the
topic was deleted and made again: the queue ends there, and goes on from there.

Units of records that retention has removed from the log stay. A queue without a directory is made,
but not when the broker's table of topics is there and does not know its topic: it was deleted.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sluicemq.record.table import UNIT_COLUMNS
from sluicemq.store.log import LOST_CODE
from sluicemq.store.queues import BLANK_UNIT, UNIT, UNIT_BYTES, is_possible
from sluicemq.store.tools.edits import Edits
from sluicemq.store.tools.layout import Series
from sluicemq.store.tools.walk import Run

QueueKey = tuple[str, int]
GAP_MAX: Final = 1 << 22
"""Messages that a queue may lack in a row, when records are in doubt."""
FILES_MAX: Final = 1 << 12
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
        topics: frozenset[str] | None,
        edits: Edits | None,
        safe_end: int | None = None,
    ) -> None:
        """`safe_end`: units of records from there on are not missed (after a crash the next start
        makes them)."""
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
            is_plain = not self.skip or not np.isin(group.units["position"], [*self.skip]).any()
            if group.is_row and is_plain:
                self._put(key, int(group.offsets[0]), group.units.tobytes())
                continue
            for offset, unit_parts in group.rows():
                if unit_parts[0] not in self.skip:
                    self._put(key, offset, UNIT.pack(*unit_parts))

    def _put(self, key: QueueKey, offset: int, data: bytes) -> None:
        """Consecutive units from `offset` on."""
        if key not in self._queues and not self._is_missed(key, data):
            return
        end = self._ends.get(key)
        if end is None:  # what is before the first record has to be used, or blank
            end = self._first(key, offset)
        if offset - end > GAP_MAX:
            return  # no queue lacks so many: the record is wrong
        if offset > end:
            data, offset = self._gap(key, end, offset, UNIT.unpack_from(data)[0]) + data, end
        elif offset < end:  # the topic was deleted and made again
            self._later.pop(key, None)
            if self._edits is not None:
                self._edits.flush()  # what is compared below may just have been changed
        self._ends[key] = offset + len(data) // UNIT_BYTES
        self._compare(key, offset, data)

    def _first(self, key: QueueKey, offset: int) -> int:
        """Where the units begin that lie in the queue's files before this offset, at most
        `GAP_MAX` of them."""
        file_units = self._file_bytes // UNIT_BYTES
        bases = {base // UNIT_BYTES for base in self._bases.get(key, ())}
        own = offset - offset % file_units
        first = own
        while first - file_units in bases and offset - first + file_units <= GAP_MAX:
            first -= file_units
        return first if own in bases else offset

    def _compare(self, key: QueueKey, offset: int, data: bytes) -> None:
        """Count what is wrong there, or mend it."""
        series = self._queues.get(key)
        old = b"" if series is None else series.read(offset * UNIT_BYTES, len(data))
        if old == data:
            return
        wrong, later = _wrong_rows(old, data)
        if not len(wrong):
            return
        if self._edits is None:
            if self._safe_end is not None and UNIT.unpack_from(data)[0] >= self._safe_end:
                return
            self.wrong_units += len(wrong) - later
            if later:  # wrong, unless the topic turns out to have been made again
                self._later[key] = self._later.get(key, 0) + later
        else:
            first, last = int(wrong[0]), int(wrong[-1])
            piece = data[first * UNIT_BYTES : (last + 1) * UNIT_BYTES]
            self._write(key, (offset + first) * UNIT_BYTES, piece, self._edits)

    def _gap(self, key: QueueKey, first: int, end: int, before: int) -> bytes:
        """The units of offsets that no record has: as they are, blank where they are nothing."""
        size = (end - first) * UNIT_BYTES
        series = self._queues.get(key)
        old = series.read(first * UNIT_BYTES, size) if series is not None else b""
        units = np.frombuffer(old + bytes(size - len(old)), UNIT_COLUMNS).copy()
        bad = (units["size"] <= 0) | (units["position"] < 0) | (units["position"] > before)
        units[bad] = np.frombuffer(BLANK_UNIT, UNIT_COLUMNS)[0]
        return units.tobytes()

    def _is_missed(self, key: QueueKey, data: bytes) -> bool:
        """Whether a queue without files should have some; these are units of it."""
        if (self._topics is not None and key[0] not in self._topics) or not is_possible(key):
            return False
        if self._safe_end is None or UNIT.unpack_from(data)[0] < self._safe_end:
            self.missing_queues.add(key)
        return True

    def _write(self, key: QueueKey, position: int, data: bytes, edits: Edits) -> None:
        done = 0
        while done < len(data):
            at = position + done
            base = at - at % self._file_bytes
            self._make_files(key, at, base, edits)
            piece = data[done : done + base + self._file_bytes - at]
            edits.write(self._path(key, base), at - base, piece)
            done += len(piece)

    def _make_files(self, key: QueueKey, at: int, base: int, edits: Edits) -> None:
        """The file at `base`, and those between it and the ones before: files have no gaps."""
        bases = self._bases.setdefault(key, set())
        if base in bases:
            return
        before = max((known for known in bases if known < base), default=base - self._file_bytes)
        if base - before > FILES_MAX * self._file_bytes:
            before = base - self._file_bytes  # a leftover of an earlier life: nobody misses these
        for missing in range(before + self._file_bytes, base + 1, self._file_bytes):
            path = self._path(key, missing)
            edits.make_file(path, self._file_bytes)
            blank = min(at - missing, self._file_bytes)
            edits.write(path, 0, BLANK_UNIT * (blank // UNIT_BYTES))
            bases.add(missing)

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
            position = end * UNIT_BYTES if end is not None else _first_behind(series, log_end)
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
    wanted = np.frombuffer(new, UNIT_COLUMNS)
    found = np.frombuffer(old + bytes(len(new) - len(old)), UNIT_COLUMNS)
    same = (found["position"] == wanted["position"]) & (found["size"] == wanted["size"])
    codes, wanted_codes = found["code"].astype(np.int64), wanted["code"].astype(np.int64)
    is_time = (wanted_codes > _CODE_MAX) & (abs(wanted_codes - codes) <= DELAY_MAX_MS)
    is_other = (codes <= EXTENSION_ADDRESS_MAX) | is_time
    same &= (codes == wanted_codes) | (is_other & (wanted_codes != LOST_CODE))
    later = ~same & (found["position"] > wanted["position"]) & (found["size"] > 0)
    return np.flatnonzero(~same), int(np.count_nonzero(later))


def _first_behind(series: Series, log_end: int) -> int | None:
    """Where the first unit stands (bytes) that points behind the end of the log."""
    for at, data in series.data(align=UNIT_BYTES):
        units = np.frombuffer(data, UNIT_COLUMNS)
        behind = np.flatnonzero((units["position"] >= log_end) & (units["size"] > 0))
        if len(behind):
            return at + int(behind[0]) * UNIT_BYTES
    return None
