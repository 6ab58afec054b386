"""Is every byte of a store as it must be? One walk over the log answers for log, queues and index.

    log          lengths, places, CRC of every body, the CRC property where records have one, no
                 lost sectors in topic and properties; bytes that are no records; missing files
    queues       every unit against its record and every record against its unit, order, ends,
                 extensions; batch queues too
    index        chains, headers, every entry against a key of its message, keys without entry
    timers       wheel and timer log by their identity; every timed message that waits
    the rest     sizes and names of files, checkpoint and mark, documents

Nothing protects flags, hosts, born time, reconsume times and most properties of a record, unless
records carry the CRC property (enabledAppendPropCRC): a byte changed there is not found.

`QueueCheck` holds queues against the log, both ways: every record has its unit, every unit its
record. While the log is walked, each run of records is compared with the units that should be
there, in columns; a unit that agrees is marked as seen. What does not agree at once (delayed
messages, whose code is a time; addresses in ConsumeQueueExt; light queues; damage) is looked at one
by one, with the same code that makes units at recovery. At the end each queue is read once: what
nobody saw is explained.

A record without a unit is no damage by itself: a deleted topic leaves its records in the log until
they expire, and a topic made again uses the same offsets for later records.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from sluicemq.model.message import DELAY, TAGS
from sluicemq.model.system_names import SCHEDULE_TOPIC
from sluicemq.model.topic import LMQ_PREFIX
from sluicemq.record.codec import (
    CHECKSUM_BYTES,
    CHECKSUM_START,
    decode_properties,
    has_valid_checksum,
    is_body_intact,
    parse_head,
)
from sluicemq.record.layout import RECORD_HEAD
from sluicemq.record.table import Positions, Records, rows_at, rows_begin_with
from sluicemq.store.directory import read_checkpoint
from sluicemq.store.log import SEARCH_BYTES_MAX, parse_log_record
from sluicemq.store.recover import may_be_lost_write
from sluicemq.store.tools.checks import (
    ERROR,
    KEPT_PER_KIND,
    NOTE,
    WARNING,
    Findings,
    IndexCheck,
    check_checkpoint,
    check_documents,
    check_series,
    known_topics,
)
from sluicemq.store.tools.layout import (
    BATCH_UNIT,
    Hole,
    LogWalk,
    QueueKey,
    Run,
    StoreLayout,
    UnitFile,
    is_address,
    is_blank,
    is_used,
    last_data,
    read_extension,
    record_at,
)
from sluicemq.store.tools.timers import TimerCheck

_BEGIN: Final = RECORD_HEAD.struct_of("size", "physical_offset")
Progress = Callable[[int, int], None]
"""Called with the bytes of the log that are done, and about how many there are."""


class Verified(NamedTuple):
    """What was looked at, and what was found."""

    findings: Findings
    records: int
    units: int
    entries: int
    log_start: int
    log_end: int


def verify(
    layout: StoreLayout,
    progress: Progress = lambda done, total: None,
    kept_per_kind: int = KEPT_PER_KIND,
) -> Verified:
    """Reads everything, writes nothing. Raises OSError where a disk cannot read."""
    return _Verification(layout, Findings(kept_per_kind)).run(progress)


class _Verification:
    """One run: the walk and what it collects."""

    def __init__(self, layout: StoreLayout, findings: Findings) -> None:
        self._layout = layout
        self._findings = findings
        self._interrupted = layout.was_interrupted
        mark = read_checkpoint(layout.files, layout.checkpoint_path).latest
        self._durable = 1 << 63 if mark is None or not self._interrupted else mark.log_offset
        self._queues = QueueCheck(layout, findings, known_topics(layout))
        self._index = IndexCheck(layout, findings, mark)
        self._timers = TimerCheck(layout, findings)
        self._holes: list[Hole] = []
        self._records = 0
        self._last_time = 0

    def run(self, progress: Progress) -> Verified:
        layout, findings, log = self._layout, self._findings, self._layout.log
        check_series(layout, findings)
        walk = LogWalk(log)
        total = max(self._queues.log_end - log.start, 1)
        waiting: list[Hole] = []  # damage when something follows, else the tail
        for found in walk:
            progress(walk.position - log.start, max(total, walk.position - log.start))
            if isinstance(found, Hole) and not found.is_record:
                waiting.append(found)
                continue
            for hole in waiting:
                self._holes.append(hole)
                severity, text = ERROR, f"are no records: {hole.reason}"
                if hole.is_missing:
                    text = "are not there: a file is missing"
                elif self._was_unsafe(hole):
                    severity = WARNING
                    text += "; behind the durable mark, so the next start cuts the log here"
                text = f"{hole.end - hole.start} bytes, up to {hole.end}, {text}"
                findings.add(severity, "damage", f"commitlog {hole.start}", text)
                self._index.damage(hole)
            waiting.clear()
            if isinstance(found, Hole):
                self._holes.append(found)
                self._index.damage(found)
            elif isinstance(found, Run):
                self._records += len(found)
                self._last_time = max(self._last_time, int(found.records.field("store_time").max()))
                self._check_checksums(found.records)
                self._queues.add(found)
                self._index.add(found)
                self._timers.add(found)
        log_end = walk.whole_end
        for hole in self._holes:
            if hole.is_record:
                self._bad_record(hole, log_end)
        self._check_tail(waiting)
        self._queues.finish(log.start, log_end, self._holes)
        self._index.finish(log_end)
        self._timers.finish()
        self._check_batches(log_end)
        end = waiting[0].start if waiting else walk.position
        check_checkpoint(layout, findings, end, self._last_time)
        check_documents(layout, findings, self._queues.ends())
        return Verified(
            findings, self._records, self._queues.units, self._index.entries, log.start, log_end
        )

    def _was_unsafe(self, hole: Hole) -> bool:
        """Whether a power loss may have taken what was there (`recover.may_be_lost_write`)."""
        start, end = hole.start, hole.end
        if start < self._durable:
            return False
        data = self._layout.log.read(start, min(end - start, SEARCH_BYTES_MAX))
        items = self._layout.log.items
        return may_be_lost_write(data, start, ends_file=any(item.base == end for item in items))

    def _check_checksums(self, records: Records) -> None:
        """The CRC over the whole record, where it has one (spec/store.md §2.4)."""
        places = np.maximum(records.ends - CHECKSUM_BYTES, 0)
        there = rows_begin_with(rows_at(records.raw, places, len(CHECKSUM_START)), CHECKSUM_START)
        there &= records.property_lengths >= CHECKSUM_BYTES
        for row in np.flatnonzero(there).tolist():
            if not has_valid_checksum(records.record_bytes(row)):
                position = records.base + int(records.starts[row])
                self._findings.add(
                    ERROR, "record-crc", f"commitlog {position}",
                    "the record's CRC property is not that of its bytes",
                )  # fmt: skip

    def _bad_record(self, hole: Hole, log_end: int) -> None:
        """One whose lengths and place alone are right."""
        record = record_at(self._layout.log, hole.start, hole.end - hole.start)
        assert record is not None  # the walk has just read it
        self._check_checksums(record)
        head = parse_head(record.raw.data)
        kind = "torn-record" if is_body_intact(record.raw.data, head) else "body-crc"
        is_tail = self._interrupted and (hole.end == log_end or self._was_unsafe(hole))
        text = (
            f"of the record of {hole.end - hole.start} bytes there,"
            f" {record.topics[0][0].decode(errors='replace')}/{head.queue_id} offset"
            f" {head.queue_offset}, not all is left: {hole.reason}"
        )
        if is_tail:
            text += "; a torn tail, which the next start cuts off"
        severity = WARNING if is_tail else ERROR
        self._findings.add(severity, kind, f"commitlog {hole.start}", text)

    def _check_tail(self, holes: list[Hole]) -> None:
        """What lies behind the last record."""
        end = last_data(self._layout.log, holes[0].start) if holes else None
        if end is None:
            return
        start, known = holes[0].start, self._queues.log_end
        severity, what = WARNING, "the next start cuts them off"
        if not self._interrupted and known >= start:
            severity, what = ERROR, f"a queue knows a message at {known}"
        self._findings.add(
            severity, "tail", f"commitlog {start}",
            f"behind the last record there are bytes up to {end}, {holes[0].reason}; {what}",
        )  # fmt: skip

    def _check_batches(self, log_end: int) -> None:
        """Units of BatchCQ: each leads to a record of its size."""
        for (topic, queue_id), series in sorted(self._layout.batch_queues.items()):
            for number, units in UnitFile(series, BATCH_UNIT).pieces():
                good = is_used(units) & (units["position"] >= self._layout.log.start)
                for at in np.flatnonzero(good).tolist():
                    position, size = int(units["position"][at]), int(units["size"][at])
                    head = self._layout.log.read(position, _BEGIN.size)
                    is_there = len(head) == _BEGIN.size and _BEGIN.unpack(head) == (size, position)
                    if position + size > log_end or not is_there:
                        self._findings.add(
                            ERROR, "unit", f"{topic}/{queue_id} batch {number + at}",
                            f"no record of {size} bytes is at {position}, where its unit says",
                        )  # fmt: skip


STRAYS_MAX: Final = 100_000


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
            key = (group.topic.decode("utf-8", "replace"), group.queue_id)
            queue, wanted, offsets = self.queues.get(key), group.units, group.offsets
            positions = wanted["position"].astype(np.int64)
            if queue is None:
                self._stray(key, offsets, positions, None)
                continue
            units, there = queue.units.at(offsets)
            placed = there & (units["position"] == positions) & (units["size"] == wanted["size"])
            queue.seen[offsets[placed] - queue.units.first] = True
            differs = placed & (units["code"] != wanted["code"])  # not as a rule
            if not placed.all():
                known = np.where(there, units["position"], -1)[~placed]
                self._stray(key, offsets[~placed], positions[~placed], known)
            for at in np.flatnonzero(differs).tolist():
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
        record = parse_log_record(data, 0, position, check_crc=False)
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
        # Delay times differ from the default table: in order when all of a level are the same.
        for level, found in self._delays.items():
            times = {delay for delay, _ in found}
            if len(times) == 1 and len(found) > 1 and (only := times.pop()) > 0 and not only % 1000:
                continue
            for delay, place in found:
                self._findings.add(
                    ERROR, "tag-code", place,
                    f"a message of delay level {level} is due {delay} ms after it was stored",
                )  # fmt: skip
        for stray in self._strays:
            self._finish_stray(stray)
        for key, queue in sorted(self.queues.items()):
            self._finish_queue(key, queue, log_start, log_end, holes)

    def _finish_stray(self, stray: Stray) -> None:
        queue = self.queues.get(stray.key)
        topic, queue_id = stray.key
        place = f"{topic}/{queue_id} offset {stray.offset}"
        where = f"the record at {stray.position}"
        severity, kind = ERROR, "record-without-unit"
        if queue is None:
            text = f"{where} is in no queue: {topic}/{queue_id} has no files"
            if self._topics is not None and topic not in self._topics and LMQ_PREFIX not in topic:
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
            rows = np.flatnonzero(seen)  # they go forward in the log
            positions = units["position"][rows].astype(np.int64)
            for back in np.flatnonzero(np.diff(positions, prepend=last) <= 0).tolist():
                self._findings.add(
                    ERROR, "unit-order", f"{name} offset {offset + int(rows[back])}",
                    f"its record at {positions[back]} lies before that of the unit ahead",
                )  # fmt: skip
            last = int(positions[-1]) if len(rows) else last
        if (stale := queue.units.data_behind()) is not None:
            self._findings.add(
                WARNING, "queue-tail", name,
                f"behind its last unit ({queue.units.end - 1}) there are bytes that are not zero,"
                f" at {stale} of the queue",
            )  # fmt: skip

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
            found = record_at(self._layout.log, position)
            if found is None:
                text = f"no record of {size} bytes is at {position}, where its unit says"
            elif found.field("physical_offset")[0] != position:
                text = f"no record begins at {position}, where its unit says"
            else:
                topic = found.topics[0][0].decode("utf-8", "replace")
                text = (
                    f"its unit says {position}, where a record of {found.sizes[0]} bytes is that"
                    f" says {topic}/{found.field('queue_id')[0]} offset"
                    f" {found.field('queue_offset')[0]}"
                )
            self._findings.add(ERROR, "unit", place, text)
