"""Verify a store: one walk over the commit log checks the log, the queues and the key index.

    log          lengths, positions, the CRC of every body, the CRC property of records that have
                 one, lost sectors in topics and properties; bytes without records; missing files
    queues       every unit against its record and every record against its unit, the order of
                 units, queue ends, extension units; batch queues too
    index        chains, headers, every entry against a key of its message, keys without entry
                 (`index_check`)
    timers       timer wheel and timer log; every timed message that waits (`timers`)
    other files  sizes and names of files, checkpoint, documents (`checks`)

The flags, hosts, born time, reconsume times and most properties of a record have no checksum,
unless the record has the CRC property (enabledAppendPropCRC). A byte that changes there is not
detected.

A record without a unit is not always damage. A deleted topic leaves its records in the log until
they expire, and a topic that is created again uses the same offsets for later records.
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
from sluicemq.record.table import Mask, Positions, Records, rows_at, rows_begin_with
from sluicemq.store.directory import read_checkpoint
from sluicemq.store.log import SEARCH_BYTES_MAX, LogRecord, parse_log_record
from sluicemq.store.recover import may_be_lost_write
from sluicemq.store.tools.checks import (
    ERROR,
    LISTED_PER_KIND_MAX,
    NOTE,
    WARNING,
    Findings,
    check_checkpoint,
    check_documents,
    check_files,
    read_topic_names,
)
from sluicemq.store.tools.index_check import IndexCheck
from sluicemq.store.tools.layout import QueueKey, StoreLayout
from sluicemq.store.tools.timers import TimerCheck
from sluicemq.store.tools.units import (
    BATCH_UNIT_TYPE,
    Extension,
    UnitArray,
    UnitReader,
    blank_mask,
    is_extension_address,
    read_extension,
    used_mask,
)
from sluicemq.store.tools.walk import InvalidRange, LogWalk, Run, find_data_end, read_record

_SIZE_AND_POSITION: Final = RECORD_HEAD.struct_of("size", "physical_offset")
Progress = Callable[[int, int], None]
"""Called with the bytes of the log that have been read, and approximately the bytes to read."""


class VerifyReport(NamedTuple):
    """The result of `verify`.

    `records`, `units` and `entries` are the numbers of valid records in the log, of units in the
    queues, and of entries in the index. The log has records from position `log_start` to `log_end`.
    """

    findings: Findings
    records: int
    units: int
    entries: int
    log_start: int
    log_end: int


def verify(
    layout: StoreLayout,
    progress: Progress = lambda done, total: None,
    listed_per_kind_max: int = LISTED_PER_KIND_MAX,
) -> VerifyReport:
    """Read the whole store and return what is wrong with it. Nothing is written.

    At most `listed_per_kind_max` findings of each kind are listed; the others are only counted.
    Raises OSError if the disk cannot read a file.
    """
    return _Verification(layout, Findings(listed_per_kind_max)).run(progress)


class _Verification:
    """One run of verify: the walk over the log, and the checks that follow it."""

    def __init__(self, layout: StoreLayout, findings: Findings) -> None:
        """Prepare to check the store in `layout`. Problems are added to `findings`."""
        self._layout = layout
        self._findings = findings
        self._was_interrupted = layout.was_interrupted
        checkpoint = read_checkpoint(layout.files, layout.checkpoint_path).latest
        # Behind this position, a crash may have lost writes. After an orderly stop, none are lost.
        self._durable_end = 1 << 63
        if checkpoint is not None and self._was_interrupted:
            self._durable_end = checkpoint.log_offset
        self._queues = QueueCheck(layout, findings, read_topic_names(layout))
        self._index = IndexCheck(layout, findings, checkpoint)
        self._timers = TimerCheck(layout, findings)
        self._damaged_ranges: list[InvalidRange] = []
        self._records = 0
        self._last_time_ms = 0

    def run(self, progress: Progress) -> VerifyReport:
        """Walk over the log, make all checks, and return the report.

        `progress` is called with (bytes walked, bytes in total).
        """
        layout = self._layout
        findings = self._findings
        check_files(layout, findings)

        # The walk hands each record to the checks, which finish when the end of the log is known.
        walk = LogWalk(layout.log)
        tail = self._walk_log(walk, progress)
        log_end = walk.plausible_end
        for invalid in self._damaged_ranges:
            if invalid.is_record:
                self._add_damaged_record(invalid, log_end)
        self._check_tail(tail)
        self._queues.finish(layout.log.start, log_end, self._damaged_ranges)
        self._index.finish(log_end)
        self._timers.finish()
        self._check_batch_queues(log_end)

        continuation = tail[0].start if tail else walk.position
        check_checkpoint(layout, findings, continuation, self._last_time_ms)
        check_documents(layout, findings, self._queues.end_offsets())
        return VerifyReport(
            findings=findings,
            records=self._records,
            units=self._queues.unit_count,
            entries=self._index.entry_count,
            log_start=layout.log.start,
            log_end=log_end,
        )

    def _walk_log(self, walk: LogWalk, progress: Progress) -> list[InvalidRange]:
        """Hand each part of the log to the checks. Return the invalid ranges at its end.

        An invalid range that other parts follow is damage, and is added to the findings.
        """
        log_start = self._layout.log.start
        expected_bytes = max(self._queues.last_position - log_start, 1)
        pending: list[InvalidRange] = []  # damage if anything follows, otherwise the tail
        for log_part in walk:
            walked_bytes = walk.position - log_start
            progress(walked_bytes, max(expected_bytes, walked_bytes))
            if isinstance(log_part, InvalidRange) and not log_part.is_record:
                pending.append(log_part)
                continue
            for invalid in pending:
                self._add_damage(invalid)
            pending.clear()

            if isinstance(log_part, InvalidRange):
                self._damaged_ranges.append(log_part)
                self._index.add_invalid_range(log_part)
            elif isinstance(log_part, Run):
                self._records += len(log_part)
                last_time_ms = int(log_part.records.field("store_time").max())
                self._last_time_ms = max(self._last_time_ms, last_time_ms)
                self._check_checksums(log_part.records)
                self._queues.add_run(log_part)
                self._index.add_run(log_part)
                self._timers.add_run(log_part)
        return pending

    def _add_damage(self, invalid: InvalidRange) -> None:
        """Add a finding for an invalid range of the log, and remember the range.

        The finding is a warning if a power loss can explain the range, else an error.
        """
        self._damaged_ranges.append(invalid)
        severity = ERROR
        text = f"are not records: {invalid.reason}"
        if invalid.is_file_missing:
            text = "do not exist: a file is missing"
        elif self._may_be_lost_write(invalid):
            severity = WARNING
            text += "; they are behind the checkpoint, so the next start ends the log here"
        text = f"{invalid.end - invalid.start} bytes, up to {invalid.end}, {text}"
        self._findings.add(severity, "damage", f"commitlog {invalid.start}", text)
        self._index.add_invalid_range(invalid)

    def _may_be_lost_write(self, invalid: InvalidRange) -> bool:
        """Return whether a power loss can explain an invalid range.

        Only the log behind its durable end can lose writes.
        """
        if invalid.start < self._durable_end:
            return False
        size = min(invalid.end - invalid.start, SEARCH_BYTES_MAX)
        content = self._layout.log.read(invalid.start, size)
        ends_file = any(segment.base == invalid.end for segment in self._layout.log.segments)
        return may_be_lost_write(content, invalid.start, ends_file=ends_file)

    def _check_checksums(self, records: Records) -> None:
        """Check the CRC of each whole record that has the CRC property (spec/store.md §2.4)."""
        starts = np.maximum(records.ends - CHECKSUM_BYTES, 0)
        has_checksum = rows_begin_with(
            rows_at(records.raw, starts, len(CHECKSUM_START)), CHECKSUM_START
        )
        has_checksum &= records.property_lengths >= CHECKSUM_BYTES
        for row in np.flatnonzero(has_checksum).tolist():
            if not has_valid_checksum(records.record_bytes(row)):
                position = records.base + int(records.starts[row])
                self._findings.add(
                    ERROR,
                    "record-crc",
                    f"commitlog {position}",
                    "the CRC property of the record does not match its bytes",
                )

    def _add_damaged_record(self, invalid: InvalidRange, log_end: int) -> None:
        """Add a finding for a record whose lengths and position are right, but whose rest is not.

        The finding is a warning if the next start removes the record as a torn tail, else an error.
        """
        record = read_record(self._layout.log, invalid.start, invalid.end - invalid.start)
        assert record is not None  # the walk has just read it
        self._check_checksums(record)
        head = parse_head(record.raw.data)
        kind = "torn-record" if is_body_intact(record.raw.data, head) else "body-crc"
        is_tail = self._was_interrupted and (
            invalid.end == log_end or self._may_be_lost_write(invalid)
        )
        topic = record.topics[0][0].decode(errors="replace")
        text = (
            f"the record there ({invalid.end - invalid.start} bytes, {topic}/{head.queue_id} offset"
            f" {head.queue_offset}) is damaged: {invalid.reason}"
        )
        if is_tail:
            text += "; it is a torn tail, which the next start removes"
        severity = WARNING if is_tail else ERROR
        self._findings.add(severity, kind, f"commitlog {invalid.start}", text)

    def _check_tail(self, tail: list[InvalidRange]) -> None:
        """Add a finding if there are bytes other than zeros behind the last record.

        `tail` are the invalid ranges at the end of the log. The finding is a warning if the next
        start removes the bytes, else an error.
        """
        end = find_data_end(self._layout.log, tail[0].start) if tail else None
        if end is None:
            return
        start = tail[0].start
        last_position = self._queues.last_position
        severity = WARNING
        consequence = "the next start removes them"
        if not self._was_interrupted and last_position >= start:
            severity = ERROR
            consequence = f"a queue has a unit for a record at {last_position}"
        self._findings.add(
            severity,
            "tail",
            f"commitlog {start}",
            f"there are bytes behind the last record, up to {end}: {tail[0].reason}; {consequence}",
        )

    def _check_batch_queues(self, log_end: int) -> None:
        """Add a finding for each unit of a batch queue that locates no record of its size."""
        log_start = self._layout.log.start
        for (topic, queue_id), sequence in sorted(self._layout.batch_queues.items()):
            for first_number, units in UnitReader(sequence, BATCH_UNIT_TYPE).iter_units():
                is_retained = used_mask(units) & (units["position"] >= log_start)
                for row in np.flatnonzero(is_retained).tolist():
                    position = int(units["position"][row])
                    size = int(units["size"][row])
                    if position + size > log_end or not self._has_record(position, size):
                        self._findings.add(
                            ERROR,
                            "unit",
                            f"{topic}/{queue_id} batch {first_number + row}",
                            f"there is no record of {size} bytes at {position}, to which its unit"
                            " leads",
                        )

    def _has_record(self, position: int, size: int) -> bool:
        """Return whether a record of `size` bytes begins at `position` of the log.

        Only the size and the position in the record are compared.
        """
        head = self._layout.log.read(position, _SIZE_AND_POSITION.size)
        if len(head) < _SIZE_AND_POSITION.size:
            return False
        return _SIZE_AND_POSITION.unpack(head) == (size, position)


UNMATCHED_RECORDS_MAX: Final = 100_000
"""Further records without a matching unit are counted, but not explained."""


class UnmatchedRecord(NamedTuple):
    """A record of the log whose unit is missing or leads elsewhere.

    `unit_position` is the position in the unit at the record's offset, or None without such a unit.
    """

    key: QueueKey
    offset: int
    position: int
    unit_position: int | None


class CheckedQueue:
    """A queue that is being checked.

    `is_confirmed` says for each unit whether a record has been found that agrees with it.
    `last_position` is the position in the last unit, or -1 without units.
    """

    def __init__(self, units: UnitReader) -> None:
        """Create the state of a queue of which no unit is confirmed yet; read its last unit."""
        self.units = units
        self.is_confirmed = np.zeros(max(units.end_offset - units.first_offset, 0), np.bool_)
        self.last_position = -1
        for _, last_units in units.iter_units(units.end_offset - 1):
            self.last_position = int(last_units["position"][-1])


class QueueCheck:
    """The check of all consume queues of a store against the log, in both directions.

    Call `add_run` with each run of records in the order of the log, then `finish`. `add_run`
    compares the records with the units that recovery would build for them, as columns, and marks
    the units that agree. Units that do not agree at once (delayed messages, whose code is a time,
    addresses of extension units, light queues, damage) are examined one by one. `finish` reads
    each queue, and explains the units that no record has confirmed.
    """

    def __init__(self, layout: StoreLayout, findings: Findings, topics: set[str] | None) -> None:
        """Find the units of all queues. Problems are added to `findings`.

        `topics` are the topics in topics.json, or None if it cannot be read. Raises OSError.
        """
        self._layout = layout
        self._findings = findings
        self._topics = topics
        self._was_interrupted = layout.was_interrupted
        self._pending_ends: dict[QueueKey, int] = {}
        self.queues = {
            key: CheckedQueue(UnitReader(sequence)) for key, sequence in layout.queues.items()
        }
        self._unmatched_records: list[UnmatchedRecord] = []
        self._delays: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self.unit_count = sum(
            queue.units.end_offset - queue.units.first_offset for queue in self.queues.values()
        )

    @property
    def last_position(self) -> int:
        """The largest position in the last units of all queues: approximately the log's end."""
        return max((queue.last_position for queue in self.queues.values()), default=0)

    # --- while the log is walked

    def add_run(self, run: Run) -> None:
        """Compare the records of a run with the units of their queues.

        A run is a table of records that follow each other in the log without a gap. Its groups are
        the records of one queue each. Units that agree count as confirmed. `finish` reports the
        other records.
        """
        for group in run.groups:
            key = (group.topic.decode("utf-8", "replace"), group.queue_id)
            queue = self.queues.get(key)
            expected_units = group.units
            offsets = group.offsets
            positions = expected_units["position"].astype(np.int64)
            if queue is None:
                self._add_unmatched(key, offsets, positions, None)
                continue

            units, exists = queue.units.read_at(offsets)
            has_same_position = exists & (units["position"] == positions)
            agrees = has_same_position & (units["size"] == expected_units["size"])
            queue.is_confirmed[offsets[agrees] - queue.units.first_offset] = True
            if not agrees.all():
                unit_positions = np.where(exists, units["position"], -1)[~agrees]
                self._add_unmatched(key, offsets[~agrees], positions[~agrees], unit_positions)

            has_other_code = agrees & (units["code"] != expected_units["code"])
            for row in np.flatnonzero(has_other_code).tolist():
                code = int(units["code"][row])
                self._check_code(key, int(offsets[row]), code, expected_units[row])

    def _add_unmatched(
        self,
        key: QueueKey,
        offsets: Positions,
        positions: Positions,
        unit_positions: Positions | None,
    ) -> None:
        """Note records whose units are missing or different. `finish` explains them.

        The records have these queue offsets and log positions. `unit_positions` are the positions
        in the units at these offsets, -1 if there is no unit. It is None if the queue has no files.
        Beyond UNMATCHED_RECORDS_MAX, records are only counted.
        """
        records_left = UNMATCHED_RECORDS_MAX - len(self._unmatched_records)
        noted_count = min(len(offsets), max(records_left, 0))
        for row in range(noted_count):
            unit_position = None
            if unit_positions is not None and unit_positions[row] >= 0:
                unit_position = int(unit_positions[row])
            self._unmatched_records.append(
                UnmatchedRecord(key, int(offsets[row]), int(positions[row]), unit_position)
            )
        if noted_count < len(offsets):
            unlisted_count = len(offsets) - noted_count
            self._findings.count_unlisted(ERROR, "record-without-unit", unlisted_count)

    def _check_code(self, key: QueueKey, offset: int, code: int, expected_unit: Any) -> None:
        """Check the code of a unit that differs from the code of `expected_unit`, the right unit.

        The code is normally the hash of the tag. It may also be the address of an extension unit
        that contains the hash, or the due time of a delayed message, which `finish` checks.
        Otherwise a finding is added.
        """
        position, size, expected_code = expected_unit.tolist()
        record_bytes = memoryview(self._layout.log.read(position, size))
        record = parse_log_record(record_bytes, 0, position, check_crc=False)
        assert record is not None  # the walk has just read it
        place = f"{key[0]}/{key[1]} offset {offset}"
        if is_extension_address(code):
            extension = read_extension(self._layout.extensions.get(key), code)
            if extension is None:
                text = f"its unit's address {code} does not lead to an extension unit"
                self._findings.add(ERROR, "extension", place, text)
                return
            self._check_extension_time(place, extension, record)
            code = extension.tag_code
        if code == expected_code:
            return

        # The unit of a delayed message has the due time instead of a tag code. All messages of a
        # delay level are checked together later.
        properties = decode_properties(record.properties)
        level = properties.get(DELAY, "")
        if key[0] == SCHEDULE_TOPIC and level.isdecimal() and int(level):
            self._delays[int(level)].append((code - record.store_time_ms, place))
            return
        self._findings.add(
            ERROR,
            "tag-code",
            place,
            f"its unit has code {code}, the record at {record.position} has tag"
            f" {properties.get(TAGS, '')!r} (code {expected_code})",
        )

    def _check_extension_time(self, place: str, extension: Extension, record: LogRecord) -> None:
        """Add a finding if an extension unit and its record have different store times."""
        if extension.store_time_ms != record.store_time_ms:
            text = (
                f"its extension unit has store time {extension.store_time_ms}, its record"
                f" {record.store_time_ms}"
            )
            self._findings.add(ERROR, "extension", place, text)

    # --- at the end

    def end_offsets(self) -> dict[QueueKey, int]:
        """Return the offset behind the last unit of each queue, by (topic, queue id).

        Units that the next start of a broker adds are included. Call it after `finish`.
        """
        end_offsets = {key: queue.units.end_offset for key, queue in self.queues.items()}
        for key, end in self._pending_ends.items():
            end_offsets[key] = max(end_offsets.get(key, 0), end)
        return end_offsets

    def finish(self, log_start: int, log_end: int, damaged_ranges: list[InvalidRange]) -> None:
        """Add a finding for each unit that no record has confirmed, and each record without a unit.

        The log has records from `log_start` to `log_end`, except in `damaged_ranges`.
        """
        self._check_delays()
        for record in self._unmatched_records:
            self._explain_record(record)
        for key, queue in sorted(self.queues.items()):
            self._check_queue(key, queue, log_start, log_end, damaged_ranges)

    def _check_delays(self) -> None:
        """Check the due times of delayed messages that do not fit the default delay levels.

        The broker may have had other levels. So the times of a level are right if all of its
        messages (at least two) have the same delay, in whole seconds.
        """
        for level, delays in self._delays.items():
            different_ms = {delay_ms for delay_ms, _ in delays}
            if len(different_ms) == 1 and len(delays) > 1:
                common_ms = different_ms.pop()
                if common_ms > 0 and common_ms % 1000 == 0:
                    continue
            for delay_ms, place in delays:
                self._findings.add(
                    ERROR,
                    "tag-code",
                    place,
                    f"a message of delay level {level} is due {delay_ms} ms after it was stored",
                )

    def _explain_record(self, record: UnmatchedRecord) -> None:
        """Add a finding that says why a record has no unit that agrees.

        The finding is a note if the topic was deleted or the next start adds the unit; else an
        error.
        """
        queue = self.queues.get(record.key)
        topic, queue_id = record.key
        place = f"{topic}/{queue_id} offset {record.offset}"
        subject = f"the record at {record.position}"

        # A record of a deleted topic is not missing in a queue.
        deletion = self._describe_deletion(record, queue)
        if deletion:
            self._findings.add(NOTE, "deleted-topic", place, f"{subject} {deletion}")
            return

        if queue is None:
            reason = f"{topic}/{queue_id} has no files"
        elif record.offset >= queue.units.end_offset:
            reason = f"{topic}/{queue_id} ends at {queue.units.end_offset}"
        elif record.unit_position is None:
            reason = "there is no unit at its offset"
        else:
            reason = f"the unit at its offset leads to {record.unit_position}"
        text = f"{subject} is in no queue: {reason}"

        is_behind_end = queue is None or record.offset >= queue.units.end_offset
        if self._was_interrupted and is_behind_end:
            pending_end = self._pending_ends.get(record.key, 0)
            self._pending_ends[record.key] = max(pending_end, record.offset + 1)
            text += "; a broker adds it when it starts"
            self._findings.add(NOTE, "not-queued-yet", place, text)
        else:
            self._findings.add(ERROR, "record-without-unit", place, text)

    def _describe_deletion(self, record: UnmatchedRecord, queue: CheckedQueue | None) -> str:
        """Return a predicate such as "belongs to a topic that does not exist" for a record.

        Return "" if nothing shows that its topic was deleted. The topic may have been created again
        since.
        """
        if queue is None:
            topic = record.key[0]
            is_deleted = self._topics is not None and topic not in self._topics
            if is_deleted and LMQ_PREFIX not in topic:
                return "belongs to a topic that does not exist (any more)"
            return ""

        stored_before = "was stored before its topic was deleted and created again:"
        if record.offset >= queue.units.end_offset:
            if record.position < queue.last_position:
                return f"{stored_before} the queue ends before it"
            return ""
        row = record.offset - queue.units.first_offset
        if row >= 0 and queue.is_confirmed[row]:
            return f"{stored_before} another record has its offset now"
        return ""

    def _check_queue(
        self,
        key: QueueKey,
        queue: CheckedQueue,
        log_start: int,
        log_end: int,
        damaged_ranges: list[InvalidRange],
    ) -> None:
        """Add findings for the units of a queue that no record has confirmed, and for their order.

        Units at the front of the queue whose records are before `log_start` are fine, because
        retention has removed the records.
        """
        name = f"{key[0]}/{key[1]}"
        is_front = True
        last_position = -1
        for offset, units in queue.units.iter_units():
            first_row = offset - queue.units.first_offset
            is_confirmed = queue.is_confirmed[first_row : first_row + len(units)]
            if is_front:
                is_unexplained, is_front = self._find_unexplained_front_units(
                    units, is_confirmed, log_start
                )
            else:
                is_unexplained = ~is_confirmed
            for row in np.flatnonzero(is_unexplained).tolist():
                place = f"{name} offset {offset + row}"
                self._explain_unit(place, units[row], log_end, damaged_ranges)

            # The records of confirmed units must ascend.
            rows = np.flatnonzero(is_confirmed)
            if len(rows):
                positions = units["position"][rows].astype(np.int64)
                self._check_unit_order(name, offset + rows, positions, last_position)
                last_position = int(positions[-1])
        self._check_behind_end(name, queue)

    def _check_unit_order(
        self, name: str, offsets: Positions, positions: Positions, last_position: int
    ) -> None:
        """Add a finding for each unit whose record is before the record of the previous unit.

        The units have these queue offsets, and their records these log positions. `last_position`
        is the position of the record before them.
        """
        is_backward = np.diff(positions, prepend=last_position) <= 0
        for index in np.flatnonzero(is_backward).tolist():
            self._findings.add(
                ERROR,
                "unit-order",
                f"{name} offset {offsets[index]}",
                f"its record at {positions[index]} lies before that of the previous unit",
            )

    def _check_behind_end(self, name: str, queue: CheckedQueue) -> None:
        """Add a finding if a queue has bytes other than zeros behind its last unit.

        `name` is TOPIC/QUEUE_ID.
        """
        stale_position = queue.units.find_data_behind_end()
        if stale_position is not None:
            self._findings.add(
                WARNING,
                "queue-tail",
                name,
                f"there are bytes that are not zero behind its last unit"
                f" ({queue.units.end_offset - 1}), at byte {stale_position} of the queue",
            )

    def _find_unexplained_front_units(
        self, units: UnitArray, is_confirmed: Mask, log_start: int
    ) -> tuple[Mask, bool]:
        """Return (mask, goes_on): which units at the front of a queue need a finding.

        The front is the part before the first unit whose record should still be in the log. A unit
        of the front needs no finding if it is blank, or if its record is before `log_start`, where
        retention has removed records. `goes_on` is True if all of `units` belong to the front, so
        that the next units may too.
        """
        is_used = used_mask(units)
        is_live = is_used & ~blank_mask(units)
        is_expired = is_live & ~is_confirmed & (units["position"] < log_start)
        later_rows = np.flatnonzero(is_live & ~is_expired)
        front_count = int(later_rows[0]) if len(later_rows) else len(units)
        # Within the front, only units that are neither blank nor expired need a finding; behind it,
        # all that are not confirmed.
        is_expired[front_count:] = False
        is_unexplained = ~is_confirmed & ~is_expired
        is_unexplained[:front_count] &= is_live[:front_count]
        is_unexplained[:front_count] |= ~is_used[:front_count]
        return is_unexplained, front_count == len(units)

    def _explain_unit(
        self, place: str, unit: Any, log_end: int, damaged_ranges: list[InvalidRange]
    ) -> None:
        """Add a finding that says why no record agrees with a unit.

        `place` names the unit. There is no finding for a unit of a damaged record, which has one
        already.
        """
        position = int(unit["position"])
        size = int(unit["size"])
        if size <= 0 or position < 0:
            text = f"it is not a unit (position {position}, size {size}), but more units follow"
            self._findings.add(ERROR, "unit", place, text)
        elif blank_mask(np.array([unit]))[0]:
            text = "the unit is blank: the message of this offset is not known"
            self._findings.add(WARNING, "blank-unit", place, text)
        elif position + size > log_end:
            severity = WARNING if self._was_interrupted else ERROR
            text = (
                f"its record [{position}, {position + size}) lies behind the end of the log,"
                f" {log_end}"
            )
            self._findings.add(severity, "unit-behind-log", place, text)
        elif position in [invalid.start for invalid in damaged_ranges if invalid.is_record]:
            return  # the damaged record has a finding of its own already
        elif any(invalid.start <= position < invalid.end for invalid in damaged_ranges):
            text = f"its record at {position} lies in damaged bytes: the message is lost"
            self._findings.add(ERROR, "lost-message", place, text)
        else:
            self._findings.add(ERROR, "unit", place, self._describe_mismatch(position, size))

    def _describe_mismatch(self, position: int, size: int) -> str:
        """Describe what the log contains instead of a record of `size` bytes at `position`."""
        record = read_record(self._layout.log, position)
        if record is None:
            return f"there is no record of {size} bytes at {position}, to which its unit leads"
        if record.field("physical_offset")[0] != position:
            return f"no record begins at {position}, to which its unit leads"
        topic = record.topics[0][0].decode("utf-8", "replace")
        return (
            f"its unit leads to {position}, where a record of {record.sizes[0]} bytes belongs to"
            f" {topic}/{record.field('queue_id')[0]} offset {record.field('queue_offset')[0]}"
        )
