"""Consume queues against the log, both ways: every record has its unit, every unit its record.

While the log is walked, each run of records is compared with the units that should be there, in
columns; a unit that agrees is marked as seen. What does not agree at once (delayed messages, whose
code is a time; addresses in ConsumeQueueExt; light queues; damage) is looked at one by one, with
the same code that makes units at recovery. At the end each queue is read once: what nobody saw is
explained.

A record without a unit is no damage by itself: a deleted topic leaves its records in the log until
they expire, and a topic made again uses the same offsets for later records.
"""

from collections import defaultdict
from typing import Any, Final, NamedTuple

import numpy as np

from sluicemq.model.message import DELAY, TAGS
from sluicemq.record.codec import decode_properties
from sluicemq.record.table import Mask, Positions
from sluicemq.store.bulk import Group
from sluicemq.store.log import LIGHT_PREFIX, SCHEDULE_TOPIC, read_scanned
from sluicemq.store.tools.check_files import ERROR, NOTE, WARNING, Findings
from sluicemq.store.tools.layout import (
    QueueKey,
    StoreLayout,
    UnitArray,
    UnitFile,
    is_address,
    is_blank,
    is_used,
    read_extension,
)
from sluicemq.store.tools.walk import Hole, Run, record_at

STRAYS_MAX: Final = 100_000
_SPARSE: Final = 64


class Stray(NamedTuple):
    """A record whose unit is not there, or says something else."""

    key: QueueKey
    offset: int
    position: int
    unit_position: int | None


class CheckedQueue:
    """One queue and which of its units have been found right."""

    def __init__(self, units: UnitFile) -> None:
        self.units = units
        self.seen = np.zeros(max(units.end - units.first, 0), np.bool_)
        self.last_position = -1
        for _, last in units.pieces(units.end - 1):
            self.last_position = int(last["position"][-1])


class QueueCheck:
    """Give it each run of records, then call `finish`."""

    def __init__(self, layout: StoreLayout, findings: Findings, topics: set[str] | None) -> None:
        """`topics` are those that topics.json knows; None when it cannot be read."""
        self._layout = layout
        self._findings = findings
        self._topics = topics
        self._interrupted = layout.was_interrupted
        self._late_ends: dict[QueueKey, int] = {}
        self.queues = {key: CheckedQueue(UnitFile(s)) for key, s in layout.queues.items()}
        self._strays: list[Stray] = []
        self._delays: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self.units = sum(queue.units.end - queue.units.first for queue in self.queues.values())

    @property
    def log_end(self) -> int:
        """The last position that a unit names: about where the log ends."""
        return max((queue.last_position for queue in self.queues.values()), default=0)

    # --- while walking

    def add(self, run: Run) -> None:
        """Compare the units of all records of a run."""
        for group in run.groups:
            self._match((group.topic.decode("utf-8", "replace"), group.queue_id), group)

    def _match(self, key: QueueKey, group: Group) -> None:
        queue, wanted, offsets = self.queues.get(key), group.units, group.offsets
        positions = wanted["position"].astype(np.int64)
        if queue is None:
            self._stray(key, offsets, positions, None)
            return
        units, there = _units_at(queue.units, offsets)
        placed = there & (units["position"] == positions) & (units["size"] == wanted["size"])
        queue.seen[offsets[placed] - queue.units.first] = True
        if placed.all() and (units["code"] == wanted["code"]).all():  # as a rule
            return
        if not placed.all():
            known = np.where(there, units["position"], -1)[~placed]
            self._stray(key, offsets[~placed], positions[~placed], known)
        for at in np.flatnonzero(placed & (units["code"] != wanted["code"])).tolist():
            self._check_code(key, int(offsets[at]), int(units["code"][at]), wanted[at])

    def _stray(
        self, key: QueueKey, offsets: Positions, positions: Positions, known: Positions | None
    ) -> None:
        room = STRAYS_MAX - len(self._strays)
        for at in range(min(len(offsets), room)):
            unit = None if known is None or known[at] < 0 else int(known[at])
            self._strays.append(Stray(key, int(offsets[at]), int(positions[at]), unit))
        if len(offsets) > room:
            self._findings.count(ERROR, "record-without-unit", len(offsets) - max(room, 0))

    def _check_code(self, key: QueueKey, offset: int, code: int, wanted: Any) -> None:
        """A code that is not simply the hash of the tag."""
        position, size, expected = wanted.tolist()
        data = memoryview(self._layout.log.read(position, size))
        record = read_scanned(data, 0, position, check_crc=False)
        assert record is not None  # the walk has just read it
        place = f"{key[0]}/{key[1]} offset {offset}"
        if is_address(code):
            found = read_extension(self._layout.extensions.get(key), code)
            if found is None:
                self._findings.add(
                    ERROR, "extension", place, f"its unit's address {code} leads to no extension"
                )
                return
            if found.store_time_ms != record.store_time_ms:
                self._findings.add(
                    ERROR, "extension", place,
                    f"its extension has store time {found.store_time_ms},"
                    f" its record {record.store_time_ms}",
                )  # fmt: skip
            code = found.tag_code
        if code == expected:
            return
        level = decode_properties(record.properties).get(DELAY, "")
        if key[0] == SCHEDULE_TOPIC and level.isdecimal() and int(level):
            self._delays[int(level)].append((code - record.store_time_ms, place))
            return
        tag = decode_properties(record.properties).get(TAGS, "")
        self._findings.add(
            ERROR, "tag-code", place,
            f"its unit has code {code}, the record at {record.position} has tag {tag!r}"
            f" (code {expected})",
        )  # fmt: skip

    # --- at the end

    def ends(self) -> dict[QueueKey, int]:
        """Where each queue ends, with what the next start adds to it. For after `finish`."""
        found = {key: queue.units.end for key, queue in self.queues.items()}
        for key, end in self._late_ends.items():
            found[key] = max(found.get(key, 0), end)
        return found

    def finish(self, log_start: int, log_end: int, holes: list[Hole]) -> None:
        """Look at every unit that no record claimed, and at every record without a unit."""
        self._finish_delays()
        for stray in self._strays:
            self._finish_stray(stray)
        for key, queue in sorted(self.queues.items()):
            self._finish_queue(key, queue, log_start, log_end, holes)

    def _finish_delays(self) -> None:
        """Delay times differ from the default table: in order when all of a level are the same."""
        for level, found in self._delays.items():
            times = {delay for delay, _ in found}
            if len(times) == 1 and len(found) > 1 and (only := times.pop()) > 0 and not only % 1000:
                continue
            for delay, place in found:
                self._findings.add(
                    ERROR, "tag-code", place,
                    f"a message of delay level {level} is due {delay} ms after it was stored",
                )  # fmt: skip

    def _finish_stray(self, stray: Stray) -> None:
        queue = self.queues.get(stray.key)
        topic, queue_id = stray.key
        place = f"{topic}/{queue_id} offset {stray.offset}"
        where = f"the record at {stray.position}"
        severity, kind = ERROR, "record-without-unit"
        if queue is None:
            text = f"{where} is in no queue: {topic}/{queue_id} has no files"
            if self._topics is not None and topic not in self._topics and LIGHT_PREFIX not in topic:
                severity, kind = NOTE, "deleted-topic"
                text = f"{where} is of a topic that does not exist (any more)"
        elif stray.offset >= queue.units.end:
            if stray.position < queue.last_position:
                severity, kind = NOTE, "deleted-topic"
                text = f"{where} is of an earlier life of its topic: the queue ends before it"
            else:
                text = f"{where} is in no queue: {topic}/{queue_id} ends at {queue.units.end}"
        elif stray.offset >= queue.units.first and queue.seen[stray.offset - queue.units.first]:
            severity, kind = NOTE, "deleted-topic"
            text = f"{where} is of an earlier life of its topic: another one has its offset now"
        elif stray.unit_position is None:
            text = f"{where} is in no queue: there is no unit at its offset"
        else:
            text = f"{where} is in no queue: the unit at its offset says {stray.unit_position}"
        if (
            severity == ERROR
            and self._interrupted
            and (queue is None or stray.offset >= queue.units.end)
        ):
            severity, kind = NOTE, "not-queued-yet"
            self._late_ends[stray.key] = max(self._late_ends.get(stray.key, 0), stray.offset + 1)
            text += "; a broker adds it when it starts"
        self._findings.add(severity, kind, place, text)

    def _finish_queue(
        self, key: QueueKey, queue: CheckedQueue, start: int, end: int, holes: list[Hole]
    ) -> None:
        name = f"{key[0]}/{key[1]}"
        may_be_gone, last = True, -1
        for offset, units in queue.units.pieces():
            first = offset - queue.units.first
            seen = queue.seen[first : first + len(units)]
            live = is_used(units) & ~is_blank(units)
            gone = live & ~seen & (units["position"] < start)
            if may_be_gone:  # only at the front: everything before the first that is not gone
                inside = np.flatnonzero(live & ~gone)
                front = int(inside[0]) if len(inside) else len(units)
                gone[front:] = False
                may_be_gone = front == len(units)
                odd = ~seen & ~gone
                odd[:front] &= is_used(units)[:front] & ~is_blank(units)[:front]
                odd[:front] |= ~is_used(units)[:front]
            else:
                odd = ~seen
            for at in np.flatnonzero(odd).tolist():
                self._explain(f"{name} offset {offset + at}", units[at], end, holes)
            last = self._check_order(name, offset, units, seen, last)
        if (stale := queue.units.data_behind()) is not None:
            self._findings.add(
                WARNING, "queue-tail", name,
                f"behind its last unit ({queue.units.end - 1}) there are bytes that are not zero,"
                f" at {stale} of the queue",
            )  # fmt: skip

    def _check_order(self, name: str, offset: int, units: UnitArray, seen: Mask, last: int) -> int:
        """Units go forward in the log; returns the position of the last one."""
        rows = np.flatnonzero(seen)
        if not len(rows):
            return last
        positions = units["position"][rows].astype(np.int64)
        back = np.flatnonzero(np.diff(positions, prepend=last) <= 0)
        for at in back.tolist():
            self._findings.add(
                ERROR, "unit-order", f"{name} offset {offset + int(rows[at])}",
                f"its record at {positions[at]} lies before that of the unit ahead",
            )  # fmt: skip
        return int(positions[-1])

    def _explain(self, place: str, unit: Any, end: int, holes: list[Hole]) -> None:
        position, size = int(unit["position"]), int(unit["size"])
        if size <= 0 or position < 0:
            text = f"it is no unit (position {position}, size {size}), and more follow"
            self._findings.add(ERROR, "unit", place, text)
        elif is_blank(np.array([unit]))[0]:
            text = "the unit is blank: the message of this offset is not known"
            self._findings.add(WARNING, "blank-unit", place, text)
        elif position + size > end:
            severity = WARNING if self._interrupted else ERROR
            text = (
                f"its record [{position}, {position + size}) lies behind the end of the log, {end}"
            )
            self._findings.add(severity, "unit-behind-log", place, text)
        elif any(hole.start <= position < hole.end for hole in holes):
            if not any(hole.is_record and hole.start == position for hole in holes):  # told already
                text = f"its record at {position} lies in damaged bytes: the message is lost"
                self._findings.add(ERROR, "lost-message", place, text)
        else:
            self._findings.add(ERROR, "unit", place, self._what_is_at(position, size))

    def _what_is_at(self, position: int, size: int) -> str:
        found = record_at(self._layout.log, position)
        if found is None:
            return f"no record of {size} bytes is at {position}, where its unit says"
        if found.number("physical_offset")[0] != position:
            return f"no record begins at {position}, where its unit says"
        topic = found.topics[0][0].decode("utf-8", "replace")
        queue_id, offset = found.number("queue_id")[0], found.number("queue_offset")[0]
        return (
            f"its unit says {position}, where a record of {found.sizes[0]} bytes is that says"
            f" {topic}/{queue_id} offset {offset}"
        )


def _units_at(units: UnitFile, offsets: Positions) -> tuple[UnitArray, Mask]:
    """The unit at each offset, and whether there is one (else the unit is nonsense)."""
    found = np.zeros(len(offsets), units.kind)
    there = (offsets >= units.first) & (offsets < units.end)
    inside = offsets[there]
    if not len(inside):
        return found, there
    low, high = int(inside.min()), int(inside.max())
    if high - low > len(inside) * _SPARSE + 4096:  # a damaged offset among good ones
        for row in np.flatnonzero(there).tolist():
            one = units.read(int(offsets[row]), 1)
            there[row] = len(one) == 1
            found[row : row + 1] = one
        return found, there
    read = units.read(low, high - low + 1)
    there[there] = inside - low < len(read)
    found[there] = read[offsets[there] - low]
    return found, there
