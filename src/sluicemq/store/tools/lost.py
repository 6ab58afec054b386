"""Find out which messages a damaged commit log has lost.

There are two sources:

    offsets    The offsets of a queue increase by 1. If two records of a queue with an invalid range
               between them have the offsets 5 and 9, the messages 6, 7 and 8 were in that range.
    units      The units of the consume queues also locate the lost messages at both ends of a
               queue, and say how long the records were.

A unit counts only if no valid record contradicts it. A damaged unit must not turn a message that
exists into a lost one.

The queue offset of a record has no checksum itself. `LostMessageFinder` therefore also finds valid
records whose offset cannot be right.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluicemq.record.layout import RECORD_BYTES_MIN
from sluicemq.record.table import UNIT_COLUMNS
from sluicemq.store.bulk import QueueUnits
from sluicemq.store.log import PLACEHOLDER_CODE
from sluicemq.store.queues import OFFSET_MAX, UNIT_BYTES, is_valid_key
from sluicemq.store.tools.layout import FileSequence, QueueKey
from sluicemq.store.tools.walk import InvalidRange, Run


class LostMessage(NamedTuple):
    """A message that is lost.

    `position` is where its record was in the log: exactly, if a unit says so. Otherwise it is the
    start of the invalid range in which the record was, or the position of a lost message before it.
    """

    position: int
    key: QueueKey
    offset: int


class _OffsetGap(NamedTuple):
    """Offsets [first, end) of a queue, which no record between two positions of the log has.

    `after` and `before` are the positions of the records that precede and follow the gap.
    """

    first: int
    end: int
    after: int
    before: int


class _QueueRecord(NamedTuple):
    """A record of a queue: its offset, and its bytes [position, end) in the log.

    `is_placeholder` says that an earlier repair has written it in place of a lost message. It may
    be at an earlier position than that message was.
    """

    offset: int
    position: int
    end: int
    is_placeholder: bool = False


@dataclass(slots=True)
class _QueueState:
    """What the valid records say about one queue.

    `first` and `last` are the first and the last record that was accepted. `suspect` is the last
    record if its offset was not plausible: the next record of the queue confirms or refutes it.
    """

    first: _QueueRecord
    last: _QueueRecord
    gaps: list[_OffsetGap] = field(default_factory=list)
    suspect: _QueueRecord | None = None

    def is_plausible(self, record: _QueueRecord) -> bool:
        """Return whether a record may follow the last one.

        The record's offset must be greater, and the log must have room for the messages between the
        two. Otherwise the offset is damaged (it has no checksum). The room is not checked if the
        last record is a placeholder, which an earlier repair wrote in place of a lost message.
        """
        skipped = record.offset - self.last.offset
        has_room = skipped * RECORD_BYTES_MIN <= record.position - self.last.position
        return skipped > 0 and (has_room or self.last.is_placeholder)

    def accept(self, record: _QueueRecord) -> None:
        """Make `record` the last one. If offsets are missing before it, add a gap to `gaps`."""
        if record.offset > self.last.offset + 1:
            gap = _OffsetGap(
                self.last.offset + 1, record.offset, self.last.position, record.position
            )
            self.gaps.append(gap)
        self.last = record

    def may_lack(self, offset: int, position: int) -> bool:
        """Return whether a lost message may have had this offset at this position of the log.

        That is so if the valid records of the queue around the position leave room for the offset.
        """
        if position < self.first.position:
            return offset < self.first.offset
        if position > self.last.position:
            return offset > self.last.offset
        # Find the last gap that begins at the position or before.
        index = bisect_right(self.gaps, position, key=lambda gap: gap.after) - 1
        if index < 0:
            return False
        gap = self.gaps[index]
        return gap.first <= offset < gap.end and position < gap.before


def _make_queue_record(group: QueueUnits, row: int) -> _QueueRecord:
    """Return the record of one unit."""
    position, size, code = group.units[row].tolist()
    is_placeholder = code == PLACEHOLDER_CODE
    return _QueueRecord(int(group.offsets[row]), position, position + size, is_placeholder)


class LostMessageFinder:
    """Records the offsets of all valid records, and derives the lost messages from them.

    Call `add_run` with each run of records in the order of the log, then `finish`, then
    `find_lost`. `record_count` is the number of valid records.

    After `finish`, `contradicted` maps valid records whose offset cannot be right, as invalid
    ranges, to the queue that they name. `doubtful_positions` are the positions of records whose
    offset may be right or wrong; repair leaves them in the log, but puts them into no queue.
    """

    def __init__(self, log_start: int, queues: dict[QueueKey, FileSequence]) -> None:
        """Create a finder of lost messages for a log that begins at `log_start`.

        `queues` are the files of the queues before a repair. If the offset in a record is not
        plausible, their units (entries that locate records) confirm or refute it.
        """
        self._log_start = log_start
        self._queues = queues
        self._states: dict[QueueKey, _QueueState] = {}
        self.record_count = 0
        self.contradicted: dict[InvalidRange, QueueKey] = {}
        self.doubtful_positions: set[int] = set()

    def add_run(self, run: Run) -> None:
        """Count the records of a run, and check their offsets.

        A run is a table of records that follow each other in the log without a gap. Its groups are
        the records of one queue each.
        """
        self.record_count += len(run)
        for group in run.groups:
            key = (group.topic.decode(errors="replace"), group.queue_id)
            # Two records with consecutive offsets confirm each other, and the consecutive ones
            # that follow them. So the rest of the group need not be checked.
            is_consecutive = group.is_consecutive and len(group.offsets) > 1
            checked_count = 2 if is_consecutive else len(group.offsets)
            for row in range(checked_count):
                self._add_record(key, _make_queue_record(group, row))
            state = self._states.get(key)
            if is_consecutive and state is not None and state.suspect is None:
                state.last = _make_queue_record(group, -1)

    def _add_record(self, key: QueueKey, record: _QueueRecord) -> None:
        """Check the offset of a record against the earlier records of its queue.

        - If the offset is plausible, the record becomes the last one of the queue.
        - If the offset is possible but not plausible, the record becomes the suspect. The next
          record of
          the queue decides about it.
        - If the offset is impossible, the record is added to `contradicted`.

        If the queue has a suspect already, the suspect is accepted or contradicted first.
        """
        if not is_valid_key(key) or not 0 <= record.offset <= OFFSET_MAX:
            self._contradict_record(key, record)
            return
        state = self._states.get(key)
        if state is None:
            has_room = record.offset * RECORD_BYTES_MIN <= record.position
            if has_room or self._log_start or record.is_placeholder:
                self._states[key] = _QueueState(record, record)
            else:  # the log has no room for the messages before this one
                self._contradict_record(key, record)
            return
        if state.suspect is not None:
            self._judge_suspect(key, state, state.suspect, record)
        if state.is_plausible(record):
            state.accept(record)
        else:
            state.suspect = record

    def _judge_suspect(
        self, key: QueueKey, state: _QueueState, suspect: _QueueRecord, next_record: _QueueRecord
    ) -> None:
        """Accept the suspect of a queue, or contradict it, by the next record of the queue.

        A suspect is a record whose offset is not plausible. It is accepted if the next record has
        the offset after it, unless the units of the queue refute it.
        """
        state.suspect = None
        # The units refute it if they have another record at its offset, and can be trusted because
        # they have the last accepted record.
        sequence = self._queues.get(key)
        unit_position = _read_unit_position(sequence, suspect.offset)
        is_refuted = (
            unit_position not in (None, suspect.position)
            and _read_unit_position(sequence, state.last.offset) == state.last.position
        )
        if suspect.offset + 1 == next_record.offset and not is_refuted:
            # The topic was created again, or the queue continues at this offset.
            if suspect.offset and state.first == state.last:
                # The queue has a single record before these two: that one is wrong.
                self._contradict_record(key, state.first)
                state.first = suspect
            state.last = suspect
        else:
            self._contradict_record(key, suspect)

    def _contradict_record(self, key: QueueKey, record: _QueueRecord) -> None:
        """Add a record to `contradicted`: it cannot be the message of the queue that it claims."""
        reason = (
            f"the record says that it is message {record.offset} of queue {key[0]}/{key[1]}, which"
            " is not possible"
        )
        self.contradicted[InvalidRange(record.position, record.end, reason)] = key

    def finish(self, queues: dict[QueueKey, FileSequence]) -> None:
        """Decide about the last records of all queues, by the units in `queues`.

        A record whose offset was not plausible is accepted, contradicted, or added to
        `doubtful_positions` if the units do not decide. The only record of a queue is checked as
        well. Raises OSError.
        """
        for key, state in list(self._states.items()):
            suspect = state.suspect
            state.suspect = None
            sequence = queues.get(key)
            if suspect is None:
                self._judge_only_record(key, state, sequence)
            else:
                unit_position = _read_unit_position(sequence, suspect.offset)
                self._judge_by_unit(key, state, suspect, unit_position)

    def _judge_by_unit(
        self, key: QueueKey, state: _QueueState, suspect: _QueueRecord, unit_position: int | None
    ) -> None:
        """Accept or contradict the suspect of a queue, by the unit at its offset.

        `unit_position` is the position of the record that the unit locates, or None if there is no
        unit. If that does not decide, the suspect's position is added to `doubtful_positions`.
        """
        if unit_position == suspect.position:
            has_single_record = state.first == state.last
            if has_single_record and suspect.offset:
                self._contradict_record(key, state.first)
                state.first = suspect
            state.last = suspect
        elif suspect.offset == 0 and not unit_position:
            state.last = suspect  # the topic was created again, and has one message
        elif unit_position in (state.first.position, state.last.position):
            self._contradict_record(key, suspect)  # another record has its offset
        else:
            self.doubtful_positions.add(suspect.position)

    def _judge_only_record(
        self, key: QueueKey, state: _QueueState, sequence: FileSequence | None
    ) -> None:
        """Contradict the only record of a queue if a unit locates it at another offset.

        Does nothing if the queue has more records, has no files, or has the unit at the right
        offset.
        """
        record = state.first
        if record != state.last or sequence is None:
            return
        if _read_unit_position(sequence, record.offset) == record.position:
            return
        record_bytes = record.end - record.position
        for _, units in _iter_units(sequence):
            has_position = units["position"] == record.position
            if (has_position & (units["size"] == record_bytes)).any():
                self._contradict_record(key, record)
                del self._states[key]
                return

    def find_lost(
        self, invalid_ranges: list[InvalidRange], queues: dict[QueueKey, FileSequence]
    ) -> list[LostMessage]:
        """Return the messages that were in `invalid_ranges`, sorted by position, queue and offset.

        `invalid_ranges` are the ranges of the log without valid records. `queues` are the files of
        the queues. Placeholders for the messages can be written in this order. Call it after
        `finish`.
        """
        lost: list[LostMessage] = []
        for key in sorted(self._states.keys() | queues.keys()):
            lost += self._find_lost_of_queue(key, queues.get(key), invalid_ranges)
        return sorted(lost)

    def _find_lost_of_queue(
        self, key: QueueKey, sequence: FileSequence | None, invalid_ranges: list[InvalidRange]
    ) -> list[LostMessage]:
        """Return the messages of one queue that were in `invalid_ranges`.

        A message is lost if a unit locates it in a range, or if its offset is in a gap between two
        records and something is damaged between them. `sequence` has the files of the queue; it is
        None if there are none.
        """
        position_by_offset: dict[int, int] = {}
        if sequence is not None and invalid_ranges:
            position_by_offset = self._find_units_in(key, sequence, invalid_ranges)

        lost: list[LostMessage] = []
        for gap in self._list_gaps(key, sequence):
            index = bisect_left(invalid_ranges, gap.after, key=lambda invalid: invalid.start)
            if index == len(invalid_ranges) or invalid_ranges[index].start >= gap.before:
                continue  # nothing is damaged between the two: the gap was there before
            # A message without a unit gets the position of the message before it.
            position = invalid_ranges[index].start
            for offset in range(gap.first, gap.end):
                position = position_by_offset.pop(offset, position)
                lost.append(LostMessage(position, key, offset))

        for offset, position in position_by_offset.items():
            lost.append(LostMessage(position, key, offset))
        return lost

    def _list_gaps(self, key: QueueKey, sequence: FileSequence | None) -> list[_OffsetGap]:
        """Return the gaps between the offsets of a queue's records.

        The offsets before its first record are a gap too, if the log is complete from position 0
        on, and a unit or a later record confirms the offset of the first record.
        """
        state = self._states.get(key)
        if state is None:
            return []
        if self._log_start:
            return state.gaps
        first_record = state.first
        has_unit = _read_unit_position(sequence, first_record.offset) == first_record.position
        has_room = 0 < first_record.offset * RECORD_BYTES_MIN <= first_record.position
        if has_room and (has_unit or state.last != first_record):
            return [_OffsetGap(0, first_record.offset, -1, first_record.position), *state.gaps]
        return state.gaps

    def _find_units_in(
        self, key: QueueKey, sequence: FileSequence, invalid_ranges: list[InvalidRange]
    ) -> dict[int, int]:
        """Return offset -> position of the units that locate a record within an invalid range.

        Units that contradict a valid record are left out. The positions ascend with the offsets: a
        unit that breaks this order is left out too.
        """
        state = self._states.get(key)
        position_by_offset: dict[int, int] = {}
        last_position = -1
        for first_offset, units in _iter_units(sequence):
            is_inside = _lead_into_ranges(units, invalid_ranges)
            if self._log_start == 0:  # the log must have room for the messages before
                offsets = first_offset + np.arange(len(units))
                is_inside &= offsets * RECORD_BYTES_MIN <= units["position"]
            for row in np.flatnonzero(is_inside).tolist():
                offset = first_offset + row
                position = int(units["position"][row])
                agrees_with_records = state is None or state.may_lack(offset, position)
                if position > last_position and agrees_with_records:
                    position_by_offset[offset] = position
                    last_position = position
        return position_by_offset


def _lead_into_ranges(units: NDArray[Any], invalid_ranges: list[InvalidRange]) -> NDArray[Any]:
    """Return a mask of the units whose record would be completely within one of the ranges."""
    range_starts, range_ends = np.array([invalid[:2] for invalid in invalid_ranges]).T
    positions = units["position"].astype(np.int64)
    range_indexes = np.searchsorted(range_starts, positions, side="right") - 1
    begins_in_range = (range_indexes >= 0) & (units["size"] >= RECORD_BYTES_MIN)
    ends_in_range = positions + units["size"] <= range_ends[np.maximum(range_indexes, 0)]
    is_inside: NDArray[Any] = begins_in_range & ends_in_range
    return is_inside


def _read_unit_position(sequence: FileSequence | None, offset: int) -> int | None:
    """Return the log position in the unit at `offset`, or None if there is no such unit.

    A unit with size 0 does not count. `sequence` is None if the queue has no files.
    """
    if sequence is None:
        return None
    unit = sequence.read(offset * UNIT_BYTES, UNIT_BYTES)
    has_size = len(unit) == UNIT_BYTES and any(unit[8:12])
    return int.from_bytes(unit[:8]) if has_size else None


def _iter_units(sequence: FileSequence) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield (offset of the first unit, units) of all parts of a queue that may not be zeros."""
    for position, unit_bytes in sequence.iter_data(align=UNIT_BYTES):
        yield position // UNIT_BYTES, np.frombuffer(unit_bytes, UNIT_COLUMNS)
