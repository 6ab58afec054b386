"""Make the consume queues agree with the commit log.

A consume queue is a sequence of units: entries of 20 bytes with the position and the size of a
record, and a tag code. The unit of the message with offset n is at byte 20 n.

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
        """Prepare to compare the queues with the log, or to repair them if there is a `writer`.

        `queues` are the existing files by (topic, queue id), in `directory`. New files get
        `file_bytes` bytes. `topics` are the topics that exist, or None if they are not known.
        Records from position `durable_end` on may lack units, because the next start after a crash
        adds them; None means that all records must have units.
        """
        self._queues = queues
        self._directory = directory
        self._file_bytes = file_bytes
        self._topics = topics
        self._writer = writer
        self._durable_end = durable_end
        # The offset behind the last record of each queue that has records.
        self._end_offsets: dict[QueueKey, int] = {}
        # The bytes at which the files of each queue begin.
        self._file_bases: dict[QueueKey, set[int]] = {}
        for key, sequence in queues.items():
            self._file_bases[key] = {segment.base for segment in sequence.segments}
        # The units that are wrong unless the topic turns out to have been created again.
        self._later_unit_counts: dict[QueueKey, int] = {}
        self.skipped_positions: set[int] = set()
        self.wrong_unit_count = 0
        self.missing_queues: set[QueueKey] = set()

    def add_run(self, run: Run) -> None:
        """Compare the units of all records of a run with the queues, or repair them.

        A run is a table of records that follow each other in the log without a gap. Its groups are
        the records of one queue each. A unit is the queue's entry for a record.
        """
        for group in run.groups:
            key = (group.topic.decode(errors="replace"), group.queue_id)
            unit_positions = group.units["position"]
            if key not in self._queues:
                topic_was_deleted = self._topics is not None and key[0] not in self._topics
                if not is_valid_key(key) or topic_was_deleted:
                    continue
                if self._must_have_unit(unit_positions[0]):
                    self.missing_queues.add(key)

            # Usually all units of the group are compared at once.
            has_skipped_records = (
                bool(self.skipped_positions)
                and np.isin(unit_positions, [*self.skipped_positions]).any()
            )
            if group.is_consecutive and not has_skipped_records:
                first_offset = int(group.offsets[0])
                self._compare_or_repair_units(key, first_offset, group.units.tobytes())
                continue
            for offset, unit_fields in group.rows():
                if unit_fields[0] not in self.skipped_positions:
                    self._compare_or_repair_units(key, offset, UNIT.pack(*unit_fields))

    def _must_have_unit(self, position: int) -> bool:
        """Return whether the queue must have the unit of the record at `position` already.

        It need not if the next start adds the unit, because the record is behind the durable end.
        """
        return self._durable_end is None or position < self._durable_end

    def _compare_or_repair_units(self, key: QueueKey, offset: int, expected: bytes) -> None:
        """Compare the units of a queue from `offset` on with `expected`, their right bytes.

        If there is a writer, wrong units are overwritten; otherwise they are counted. If the
        queue's units so far end before `offset`, the units between, which have no records, are
        checked too. The end of the queue then moves behind `expected`.

        Nothing is done if `offset` is more than GAP_MAX beyond the end, because then it must be
        wrong.
        """
        sequence = self._queues.get(key)
        end_offset = self._end_offsets.get(key)
        if end_offset is None:
            end_offset = self._find_first_offset(key, offset)
        if offset - end_offset > GAP_MAX:
            return  # no queue lacks that many messages: the offset of the record is wrong

        if offset > end_offset:
            next_position = UNIT.unpack_from(expected)[0]
            expected = self._fill_gap(sequence, end_offset, offset, next_position) + expected
            offset = end_offset
        elif offset < end_offset:  # the topic was deleted and created again
            self._later_unit_counts.pop(key, None)
            if self._writer is not None:
                # Before the files are read, because the writer may hold changes of these units.
                self._writer.flush()
        self._end_offsets[key] = offset + len(expected) // UNIT_BYTES

        stored = b"" if sequence is None else sequence.read(offset * UNIT_BYTES, len(expected))
        wrong_rows, later_count = _find_wrong_rows(stored, expected)
        if not len(wrong_rows):
            return
        if self._writer is not None:
            # Overwrite everything from the first wrong unit to the last one.
            wrong_start = int(wrong_rows[0]) * UNIT_BYTES
            wrong_end = (int(wrong_rows[-1]) + 1) * UNIT_BYTES
            position = offset * UNIT_BYTES + wrong_start
            self._write_units(key, position, expected[wrong_start:wrong_end], self._writer)
        elif self._must_have_unit(UNIT.unpack_from(expected)[0]):
            self.wrong_unit_count += len(wrong_rows) - later_count
            # These are wrong unless a later record shows that the topic was created again.
            self._later_unit_counts[key] = self._later_unit_counts.get(key, 0) + later_count

    def _find_first_offset(self, key: QueueKey, offset: int) -> int:
        """Return the first offset of a queue whose unit must be used or blank.

        `offset` is the offset of its first record. The result is the first offset of the file that
        contains `offset`, or of the first of the files that precede it without a gap, within
        GAP_MAX offsets. It is `offset` itself if no file contains it.
        """
        units_per_file = self._file_bytes // UNIT_BYTES
        file_offsets = {base // UNIT_BYTES for base in self._file_bases.get(key, ())}
        record_file_offset = offset - offset % units_per_file
        if record_file_offset not in file_offsets:
            return offset

        first_offset = record_file_offset
        previous_file_offset = first_offset - units_per_file
        while previous_file_offset in file_offsets and offset - previous_file_offset <= GAP_MAX:
            first_offset = previous_file_offset
            previous_file_offset = first_offset - units_per_file
        return first_offset

    def _fill_gap(
        self, sequence: FileSequence | None, start: int, end: int, next_position: int
    ) -> bytes:
        """Return the right units for the offsets [start, end), which no record has.

        Units that the files have are kept. A unit becomes blank if it is unused, or if it locates a
        record behind `next_position`, the position of the next record.
        """
        gap_bytes = (end - start) * UNIT_BYTES
        stored = b"" if sequence is None else sequence.read(start * UNIT_BYTES, gap_bytes)
        units = np.frombuffer(stored + bytes(gap_bytes - len(stored)), UNIT_COLUMNS).copy()
        leads_too_far = units["position"] > next_position
        is_unused = (units["size"] <= 0) | (units["position"] < 0)
        units[leads_too_far | is_unused] = _BLANK
        return units.tobytes()

    def _write_units(
        self, key: QueueKey, position: int, unit_bytes: bytes, writer: RepairWriter
    ) -> None:
        """Write units from byte `position` of a queue on. Create files that do not exist."""
        file_bytes = self._file_bytes
        written_bytes = 0
        while written_bytes < len(unit_bytes):
            piece_start = position + written_bytes
            base = piece_start - piece_start % file_bytes
            if base not in self._file_bases.get(key, ()):
                self._create_files(key, piece_start, writer)
            bytes_left_in_file = base + file_bytes - piece_start
            piece = unit_bytes[written_bytes : written_bytes + bytes_left_in_file]
            writer.write(self._find_file_path(key, base), piece_start - base, piece)
            written_bytes += len(piece)

    def _create_files(self, key: QueueKey, position: int, writer: RepairWriter) -> None:
        """Create the file of a queue that contains byte `position`, and missing files before it.

        The units before `position` in these files become blank. Files between an old file and this
        one are created only if there are at most NEW_FILES_MAX.
        """
        file_bytes = self._file_bytes
        bases = self._file_bases.setdefault(key, set())
        base = position - position % file_bytes
        # Queues have no missing files: create those between the last one and this one.
        first_new_base = base
        earlier_bases = [file_base for file_base in bases if file_base < base]
        if earlier_bases:
            # A file that is far before this one is a leftover of a deleted topic.
            last_base = max(earlier_bases)
            if base - last_base <= NEW_FILES_MAX * file_bytes:
                first_new_base = last_base + file_bytes
        for new_base in range(first_new_base, base + 1, file_bytes):
            path = self._find_file_path(key, new_base)
            writer.resize_file(path, file_bytes)
            blank_count = min(position - new_base, file_bytes) // UNIT_BYTES
            writer.write(path, 0, BLANK_UNIT * blank_count)
            bases.add(new_base)

    def _find_file_path(self, key: QueueKey, base: int) -> str:
        """Return the path of the file of a queue that begins at byte `base`."""
        if key in self._queues:
            for segment in self._queues[key].segments:
                if segment.base == base:
                    return segment.path
        return f"{self._directory}/{key[0]}/{key[1]}/{base:020d}"

    def finish(self, log_end: int) -> None:
        """Remove the units behind the end of each queue, or count them as wrong without a writer.

        They would locate records that do not exist. A queue ends behind its last record's unit. If
        it has no records, it ends at the first unit whose position is behind `log_end`.
        """
        # No record has shown that these topics were created again.
        self.wrong_unit_count += sum(self._later_unit_counts.values())
        if self._writer is not None:
            self._writer.flush()
        for key, sequence in self._queues.items():
            end_position = self._find_end_position(key, sequence, log_end)
            if end_position is None:
                continue
            # Only a queue with records loses whole files. The files of others are cleared.
            can_remove_files = bool(self._end_offsets.get(key))
            for segment in sequence.segments:
                start = max(end_position, segment.base)
                if start >= segment.end:
                    continue
                if self._writer is None:
                    self._count_units_behind_end(sequence, start, segment.end)
                elif can_remove_files and start == segment.base:
                    self._writer.remove_file(segment.path, segment.size)
                else:
                    self._writer.write_zeros(segment.path, start - segment.base, segment.size)
        if self._writer is not None:
            self._writer.flush()

    def _find_end_position(self, key: QueueKey, sequence: FileSequence, log_end: int) -> int | None:
        """Return the byte of a queue from which on it must be empty; None if it may be full.

        It is the end of the last record's unit. In a queue without records, it is the begin of the
        first unit whose position is behind `log_end`.
        """
        end_offset = self._end_offsets.get(key)
        if end_offset is not None:
            return end_offset * UNIT_BYTES
        return next(_iter_positions_behind_log(sequence, log_end), None)

    def _count_units_behind_end(self, sequence: FileSequence, start: int, end: int) -> None:
        """Count the units in bytes [start, end) of a queue that are not zero as wrong.

        After a crash (`durable_end` is set), they are not counted, because the next start removes
        them.
        """
        if self._durable_end is not None:
            return
        for _, unit_bytes in sequence.iter_data(start, end, UNIT_BYTES):
            unit_rows = np.frombuffer(unit_bytes, np.uint8).reshape(-1, UNIT_BYTES)
            self.wrong_unit_count += int(np.count_nonzero(unit_rows.any(axis=1)))


def _iter_positions_behind_log(sequence: FileSequence, log_end: int) -> Iterator[int]:
    """Yield byte positions of units in a queue's files whose records are behind the log's end.

    Of each piece of the files that is read, only the first such unit is yielded.
    """
    for position, unit_bytes in sequence.iter_data(align=UNIT_BYTES):
        units = np.frombuffer(unit_bytes, UNIT_COLUMNS)
        leads_behind_log = (units["position"] >= log_end) & (units["size"] > 0)
        rows = np.flatnonzero(leads_behind_log)
        if len(rows):
            yield position + int(rows[0]) * UNIT_BYTES


def _may_differ(stored_codes: NDArray[Any], expected_codes: NDArray[Any]) -> NDArray[Any]:
    """Return a mask of the units whose code may differ from the expected one.

    A stored code may also be the address of an extension unit, or another due time of a delayed
    message, within DELAY_MAX_MS.
    """
    is_extension_address = stored_codes <= EXTENSION_ADDRESS_MAX
    # Codes that are greater than any hash of a tag are due times.
    has_due_time = expected_codes > _CODE_MAX
    is_other_due_time = has_due_time & (abs(expected_codes - stored_codes) <= DELAY_MAX_MS)
    is_placeholder = expected_codes == PLACEHOLDER_CODE
    may_differ: NDArray[Any] = (is_extension_address | is_other_due_time) & ~is_placeholder
    return may_differ


def _find_wrong_rows(stored: bytes, expected: bytes) -> tuple[NDArray[Any], int]:
    """Return (rows, later count): the indexes of wrong units, and how many may be later units.

    `expected` are the right bytes of the units. `stored` are the bytes in the files, possibly
    fewer. A later unit locates a record behind the expected record. It may be right if the topic
    was deleted and created again.

    A unit whose code is the address of an extension unit, or another due time of a delayed message,
    is not wrong. The messageDelayLevel with which the message was stored is not known.
    """
    if stored == expected:
        return np.empty(0, np.int64), 0
    expected_units = np.frombuffer(expected, UNIT_COLUMNS)
    missing_bytes = len(expected) - len(stored)
    stored_units = np.frombuffer(stored + bytes(missing_bytes), UNIT_COLUMNS)

    has_same_position = stored_units["position"] == expected_units["position"]
    has_same_size = stored_units["size"] == expected_units["size"]

    stored_codes = stored_units["code"].astype(np.int64)
    expected_codes = expected_units["code"].astype(np.int64)
    has_right_code = (stored_codes == expected_codes) | _may_differ(stored_codes, expected_codes)

    is_wrong = ~(has_same_position & has_same_size & has_right_code)
    is_later = (
        is_wrong
        & (stored_units["position"] > expected_units["position"])
        & (stored_units["size"] > 0)
    )
    return np.flatnonzero(is_wrong), int(np.count_nonzero(is_later))
