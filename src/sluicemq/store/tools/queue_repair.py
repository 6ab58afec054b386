"""Make the consume queues agree with the commit log.

`QueueRepair` receives all valid records in the order of the log, as a broker does that builds its
queues, and puts the unit of each record at its offset. Units that are right already are not
changed. An offset that is not greater than that of an earlier record means that the topic was
deleted and created again: the queue then ends behind that offset and is continued from there.

Units whose records retention has removed from the log stay as they are. A queue without a directory
is created, unless the broker's table of topics exists and does not contain its topic: then the
topic was deleted.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sluicemq.record.table import UNIT_COLUMNS
from sluicemq.store.log import PLACEHOLDER_CODE
from sluicemq.store.queues import BLANK_UNIT, UNIT, UNIT_BYTES, is_valid_key
from sluicemq.store.tools.edits import RepairWriter
from sluicemq.store.tools.layout import FileSequence, QueueKey
from sluicemq.store.tools.walk import Run

GAP_MAX: Final = 1 << 22
"""A record whose offset is more than this behind the end of its queue is not trusted."""
NEW_FILES_MAX: Final = 1 << 12
"""A gap of more files than this before a new one is not filled."""
_BLANK: Final = np.frombuffer(BLANK_UNIT, UNIT_COLUMNS)[0]
_CODE_MAX: Final = (1 << 31) - 1
DELAY_MAX_MS: Final = 40 * 86_400_000
"""The longest delay that messageDelayLevel allows."""
EXTENSION_ADDRESS_MAX: Final = -(1 << 31) - 1
"""Tag codes up to this are addresses in a ConsumeQueueExt file (spec/store.md §3.2)."""


class QueueRepair:
    """Compares the queues of one store with its log, or repairs them.

    Call `add_run` with each run of records in the order of the log, then `finish`. After that
    `wrong_unit_count` is the number of units that do not agree with the log, and `missing_queues`
    are the queues without files that have records. `skipped_positions` may be set before: records
    at these positions get no unit.
    """

    def __init__(
        self,
        queues: dict[QueueKey, FileSequence],
        directory: str,
        file_bytes: int,
        topics: set[str] | None,
        writer: RepairWriter | None,
        durable_end: int | None = None,
    ) -> None:
        """Prepare a comparison, or with a `writer` a repair.

        `directory` contains the queues, and their files have `file_bytes`. `topics` are those that
        exist, or None if they are not known. Missing units of records from position `durable_end`
        on do not count as wrong, because the next start after a crash adds them; None means that
        all count.
        """
        self._queues = queues
        self._directory = directory
        self._file_bytes = file_bytes
        self._topics = topics
        self._writer = writer
        self._durable_end = durable_end
        self._end_offsets: dict[QueueKey, int] = {}
        self._bases: dict[QueueKey, set[int]] = {
            key: {segment.base for segment in sequence.segments} for key, sequence in queues.items()
        }
        self._later_unit_counts: dict[QueueKey, int] = {}
        self.skipped_positions: set[int] = set()
        self.wrong_unit_count = 0
        self.missing_queues: set[QueueKey] = set()

    def add_run(self, run: Run) -> None:
        """Compare or repair the units of all records of a run."""
        for group in run.groups:
            key = (group.topic.decode(errors="replace"), group.queue_id)
            if key not in self._queues:
                is_deleted = self._topics is not None and key[0] not in self._topics
                if not is_valid_key(key) or is_deleted:
                    continue
                if self._durable_end is None or group.units["position"][0] < self._durable_end:
                    self.missing_queues.add(key)
            has_skipped = (
                bool(self.skipped_positions)
                and np.isin(group.units["position"], [*self.skipped_positions]).any()
            )
            if group.is_consecutive and not has_skipped:
                self._put_units(key, int(group.offsets[0]), group.units.tobytes())
                continue
            for offset, unit_parts in group.rows():
                if unit_parts[0] not in self.skipped_positions:
                    self._put_units(key, offset, UNIT.pack(*unit_parts))

    def _put_units(self, key: QueueKey, offset: int, data: bytes) -> None:
        """Compare or repair consecutive units, whose bytes are `data`, from `offset` on.

        Also those of the offsets between the end of the queue so far and `offset`, which no record
        has. Moves that end behind the units. Wrong units are written if there is a writer, else
        counted. Units whose offset is impossible are ignored.
        """
        sequence = self._queues.get(key)
        end = self._end_offsets.get(key)
        if end is None:
            end = self._find_first_offset(key, offset)
        if offset - end > GAP_MAX:
            return  # no queue lacks that many messages: the offset of the record is wrong
        first_position = UNIT.unpack_from(data)[0]
        if offset > end:
            data = self._fill_gap(sequence, end, offset, first_position) + data
            offset = end
        elif offset < end:  # the topic was deleted and created again
            self._later_unit_counts.pop(key, None)
            if self._writer is not None:
                self._writer.flush()  # the units compared below may be among the waiting changes
        self._end_offsets[key] = offset + len(data) // UNIT_BYTES
        old = b"" if sequence is None else sequence.read(offset * UNIT_BYTES, len(data))
        wrong_rows, later_count = _find_wrong_rows(old, data)
        if not len(wrong_rows):
            return
        if self._writer is not None:
            first, last = int(wrong_rows[0]), int(wrong_rows[-1])
            piece = data[first * UNIT_BYTES : (last + 1) * UNIT_BYTES]
            self._write_units(key, (offset + first) * UNIT_BYTES, piece, self._writer)
        elif self._durable_end is None or UNIT.unpack_from(data)[0] < self._durable_end:
            self.wrong_unit_count += len(wrong_rows) - later_count
            # These are wrong unless a later record shows that the topic was created again.
            self._later_unit_counts[key] = self._later_unit_counts.get(key, 0) + later_count

    def _find_first_offset(self, key: QueueKey, offset: int) -> int:
        """Return the offset from which on the units of a queue must be used or blank.

        `offset` is that of the queue's first record. The result is the first offset of the files
        that precede it without a gap, or `offset` itself without such files.
        """
        units_per_file = self._file_bytes // UNIT_BYTES
        file_offsets = {base // UNIT_BYTES for base in self._bases.get(key, ())}
        first = own_file = offset - offset % units_per_file
        while first - units_per_file in file_offsets and offset - first + units_per_file <= GAP_MAX:
            first -= units_per_file
        return first if own_file in file_offsets else offset

    def _fill_gap(
        self, sequence: FileSequence | None, start: int, end: int, next_position: int
    ) -> bytes:
        """Return the units for offsets [start, end), which no record has.

        Those that the queue has are kept. They become blank if they are unused, or lead behind
        `next_position`, the position of the next record.
        """
        size = (end - start) * UNIT_BYTES
        old = b"" if sequence is None else sequence.read(start * UNIT_BYTES, size)
        units = np.frombuffer(old + bytes(size - len(old)), UNIT_COLUMNS).copy()
        is_behind = units["position"] > next_position
        units[is_behind | (units["size"] <= 0) | (units["position"] < 0)] = _BLANK
        return units.tobytes()

    def _write_units(self, key: QueueKey, position: int, data: bytes, writer: RepairWriter) -> None:
        """Write units at byte `position` of a queue, and create the files that they need."""
        bases = self._bases.setdefault(key, set())
        file_bytes, done = self._file_bytes, 0
        while done < len(data):
            at = position + done
            base = at - at % file_bytes
            if base not in bases:
                # Queues have no missing files: create those between the last one and this one.
                before = max((known for known in bases if known < base), default=base - file_bytes)
                if base - before > NEW_FILES_MAX * file_bytes:
                    # The earlier file is a leftover of a deleted topic.
                    before = base - file_bytes
                for new_base in range(before + file_bytes, base + 1, file_bytes):
                    writer.resize_file(self._file_path(key, new_base), file_bytes)
                    blank_count = min(at - new_base, file_bytes) // UNIT_BYTES
                    writer.write(self._file_path(key, new_base), 0, BLANK_UNIT * blank_count)
                    bases.add(new_base)
            piece = data[done : done + base + file_bytes - at]
            writer.write(self._file_path(key, base), at - base, piece)
            done += len(piece)

    def _file_path(self, key: QueueKey, base: int) -> str:
        """Return the path of the file of a queue that begins at byte `base`."""
        for segment in self._queues[key].segments if key in self._queues else ():
            if segment.base == base:
                return segment.path
        return f"{self._directory}/{key[0]}/{key[1]}/{base:020d}"

    def finish(self, log_end: int) -> None:
        """Remove everything behind the ends of the queues, or count it as wrong units.

        Otherwise units there would lead to positions without a record. In a queue without records,
        units from the first one on that leads behind `log_end` are removed.
        """
        writer = self._writer
        self.wrong_unit_count += sum(self._later_unit_counts.values())
        if writer is not None:
            writer.flush()
        for key, sequence in self._queues.items():
            end_offset = self._end_offsets.get(key)
            position = (
                next(_iter_positions_behind_log(sequence, log_end), None)
                if end_offset is None
                else end_offset * UNIT_BYTES
            )
            for segment in sequence.segments if position is not None else ():
                start = max(position or 0, segment.base)
                if start >= segment.end:
                    continue
                if writer is not None and start == segment.base and end_offset:
                    writer.remove_file(segment.path, segment.size)
                elif writer is not None:
                    writer.write_zeros(segment.path, start - segment.base, segment.size)
                elif self._durable_end is None:
                    for _, data in sequence.iter_data(start, segment.end, UNIT_BYTES):
                        rows = np.frombuffer(data, np.uint8).reshape(-1, UNIT_BYTES)
                        self.wrong_unit_count += int(np.count_nonzero(rows.any(axis=1)))
        if writer is not None:
            writer.flush()


def _iter_positions_behind_log(sequence: FileSequence, log_end: int) -> Iterator[int]:
    """Yield byte positions of units in a queue's files that lead behind the end of the log.

    Only the first such unit of each piece that is read is yielded.
    """
    for position, data in sequence.iter_data(align=UNIT_BYTES):
        units = np.frombuffer(data, UNIT_COLUMNS)
        rows = np.flatnonzero((units["position"] >= log_end) & (units["size"] > 0))
        if len(rows):
            yield position + int(rows[0]) * UNIT_BYTES


def _find_wrong_rows(old: bytes, new: bytes) -> tuple[NDArray[Any], int]:
    """Return (rows, later count): the units that differ, and how many of them may be later ones.

    `old` are the bytes of the units in the files, `new` those that records demand. A later unit
    leads behind the wanted record: it may be right if the topic was deleted and created again.

    A unit does not differ if its code is the address of an extension unit, or another due time of
    a delayed message: it is not known with which messageDelayLevel the message was stored.
    """
    if old == new:
        return np.empty(0, np.int64), 0
    wanted = np.frombuffer(new, UNIT_COLUMNS)
    found = np.frombuffer(old + bytes(len(new) - len(old)), UNIT_COLUMNS)
    is_same = (found["position"] == wanted["position"]) & (found["size"] == wanted["size"])
    codes, wanted_codes = found["code"].astype(np.int64), wanted["code"].astype(np.int64)
    is_time = (wanted_codes > _CODE_MAX) & (abs(wanted_codes - codes) <= DELAY_MAX_MS)
    may_differ = (codes <= EXTENSION_ADDRESS_MAX) | is_time
    is_same &= (codes == wanted_codes) | (may_differ & (wanted_codes != PLACEHOLDER_CODE))
    is_later = ~is_same & (found["position"] > wanted["position"]) & (found["size"] > 0)
    return np.flatnonzero(~is_same), int(np.count_nonzero(is_later))
