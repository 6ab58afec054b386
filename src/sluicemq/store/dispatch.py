"""Dispatching records: from the commit log to the consume queues, one by one or many at a time.

Recovery (`recover`) and slaves (`follow`) dispatch records. A record's queue id and offset have no
checksum. A record whose offset is implausible (it goes back in its queue, or skips more offsets
than there was room for in the log) is a *suspect*: it waits for the next record of its queue. If
that record has the following offset, both are added to the queue. Otherwise the suspect is skipped
and logged. No record is dispatched twice: a queue ignores units that it has (`Queue.put`).
"""

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from sluicemq.record.layout import RECORD_BYTES_MIN
from sluicemq.store.log import (
    BLANK_BYTES,
    DELAYS_MS,
    PLACEHOLDER_CODE,
    SEARCH_BYTES_MAX,
    CommitLog,
    LogRecord,
    find_next_record_start,
)
from sluicemq.store.queues import OFFSET_MAX, ConsumeQueues, Queue, Unit, is_valid_key

if TYPE_CHECKING:
    from sluicemq.store.bulk import QueueUnits, Sweep

logger = logging.getLogger(__name__)

SINGLE_RECORDS_FIRST: Final = 2000
"""The first records of a walk, which are read one by one.

A walk that is shorter than this ends before NumPy would be imported.
"""
SINGLE_RECORDS_BETWEEN: Final = 32
"""Number of records that are read one by one after columns did not help.

The number doubles each time, up to `SINGLE_RECORDS_FIRST`.
"""


class Dispatcher:
    """Adds the units of records of the log to their queues.

    `units_added` counts the units that the queues did not have before. The keys of `grown_queues`
    are the queues that received these units, in the order in which they received the first one; the
    caller clears it. `last_store_time_ms` is the store time of the last record that was read (0 if
    there was none).
    """

    def __init__(
        self,
        log: CommitLog,
        queues: ConsumeQueues,
        *,
        check_crc: bool = True,
        delays_ms: Sequence[int] = DELAYS_MS,
    ) -> None:
        """Create a dispatcher, which adds the records of `log` to `queues`.

        If `check_crc`, records are valid only if their CRC is right. `delays_ms` are the delays of
        level 1, 2, … (messageDelayLevel), from which the units of delayed messages are computed.
        """
        self._log = log
        self._queues = queues
        self._check_crc = check_crc
        self._delays_ms = delays_ms
        self._by_name: dict[tuple[bytes, int], Queue] = {}
        """The queues by encoded topic and queue id, so that most topics are decoded only once."""
        self._suspects: dict[Queue, tuple[int, Unit]] = {}
        """The (offset, unit) of the suspect of each queue that has one: see the module."""
        self.units_added = 0
        self.grown_queues: dict[Queue, None] = {}
        self.last_store_time_ms = 0

    def reset(self) -> None:
        """Forget all queues, suspects and counts. Call this when queues were removed or truncated.

        Suspects are records with implausible offsets that wait for the next record of their queue.
        `last_store_time_ms` does not change.
        """
        self._by_name.clear()
        self._suspects.clear()
        self.grown_queues.clear()
        self.units_added = 0

    def dispatch_records(
        self, start: int, stop: int | None = None, *, may_gap: bool, singles: int | None = None
    ) -> int | None:
        """Add the units (queue entries) of the records from `start` up to `stop` to their queues.

        Stops at the first position without a valid record. Returns the end of the last record
        (`start` if there was none). Records of deleted topics are skipped. Records with implausible
        offsets wait for the next record of their queue, or for `resolve_suspects`.

        A gap is a record whose queue lacks the units before it. If `may_gap`, gaps are filled with
        blank units. Otherwise the method stops at a gap, logs it, and returns None; the units
        before it stay added. The first `singles` records are read one by one; None means the usual
        number. Raises OSError if a queue cannot be written.
        """
        end = start
        for records in sweep_records(
            self._log,
            start,
            stop,
            check_crc=self._check_crc,
            delays_ms=self._delays_ms,
            singles=singles,
        ):
            if isinstance(records, LogRecord):
                has_gap = records.is_queued and not self._dispatch_record(records, may_gap=may_gap)
            else:
                has_gap = not all(
                    self._dispatch_group(group, may_gap=may_gap) for group in records.groups
                )
            if has_gap:
                return None
            end = records.end
            self.last_store_time_ms = records.store_time_ms
        return end

    def resolve_suspects(self, *, is_end: bool = True) -> None:
        """Decide about records with implausible offsets, because no record follows for now.

        A record with offset 0 is added: its topic was deleted and created again. If `is_end`, any
        other is logged and dropped. Otherwise it continues to wait.
        """
        for queue, (offset, unit) in list(self._suspects.items()):
            if offset == 0:  # the topic was deleted and created again, and has one message
                self._add_unit(queue, offset, unit)
            elif is_end:
                _log_impossible_offset(queue, offset, unit)
            else:
                continue
            del self._suspects[queue]

    def _dispatch_record(self, record: LogRecord, *, may_gap: bool) -> bool:
        """Add the unit of a record to its queue, and to other queues that contain the record.

        Returns False at a gap, where the queue lacks units before this one; then the unit was not
        added. If `may_gap`, gaps are filled with blank units instead.
        """
        unit = Unit(record.position, record.size_bytes, record.tag_code(self._delays_ms))
        queue = self._get_queue(record.topic, record.queue_id)
        if not self._dispatch_unit(queue, record.queue_offset, unit, may_gap=may_gap):
            return False
        for key, offset in record.extra_queues():
            self._dispatch_unit(self._queues.get_unchecked(key), offset, unit, may_gap=True)
        return True

    def _dispatch_group(self, group: "QueueUnits", *, may_gap: bool) -> bool:
        """Add many units (entries) to one queue, all at once if possible, else one by one.

        Returns False at a gap, where the queue lacks units before the next one; the units before
        the gap stay added. If `may_gap`, gaps are filled with blank units instead.
        """
        queue = self._get_queue(group.topic, group.queue_id)
        was_deleted = queue.topic in self._queues.deleted.end_by_topic
        units_added = None
        if group.is_consecutive and not was_deleted and is_valid_key(queue.key):
            units_added = queue.extend(int(group.offsets[0]), group.units.tobytes())
        if units_added is None:  # the units do not simply follow those of the queue
            return all(
                self._dispatch_unit(queue, offset, Unit._make(fields), may_gap=may_gap)
                for offset, fields in group.rows()
            )
        if units_added:
            self.units_added += units_added
            self.grown_queues[queue] = None
            self._queues.mark_dirty(queue)
        return True

    def _get_queue(self, topic: bytes, queue_id: int) -> Queue:
        """Return the queue of an encoded topic. Create it if necessary, with any name."""
        queue = self._by_name.get((topic, queue_id))
        if queue is None:
            key = (topic.decode(errors="replace"), queue_id)
            queue = self._by_name[topic, queue_id] = self._queues.get_unchecked(key)
        return queue

    def _dispatch_unit(self, queue: Queue, offset: int, unit: Unit, *, may_gap: bool) -> bool:
        """Add a unit (entry) to its queue, skip it, or let it wait as a suspect.

        A suspect is a unit whose offset is implausible. The next record of its queue decides about
        it. So if the queue has a suspect, this unit first decides about it.

        A unit of a deleted topic is skipped. A unit with an impossible queue id or offset is
        skipped and logged. If the queue lacks units before this one and `may_gap` is False, the gap
        is logged, the unit is not added, and the result is False. Otherwise the result is True.
        """
        if not self._queues.deleted.is_live(queue.topic, unit.physical_offset):
            return True
        suspect = self._suspects.pop(queue, None)
        if suspect is not None:
            self._resolve_suspect(queue, *suspect, following_offset=offset)

        offset_max = OFFSET_MAX
        is_log_complete = self._log.start == 0
        if is_log_complete and not queue.next_offset and unit.tag_code != PLACEHOLDER_CODE:
            # In an empty queue, the offset cannot exceed the number of records that fit before this
            # one.
            offset_max = unit.physical_offset // RECORD_BYTES_MIN
        if not is_valid_key(queue.key) or not 0 <= offset <= offset_max:
            _log_impossible_offset(queue, offset, unit)
            return True
        if not _is_plausible(queue, offset, unit):
            self._suspects[queue] = (offset, unit)  # the next record of the queue decides
            return True
        if offset > queue.next_offset and not may_gap:
            logger.warning(
                "queue %s/%d lacks the units from offset %d to before %d",
                queue.topic,
                queue.queue_id,
                queue.next_offset,
                offset,
            )
            return False
        self._add_unit(queue, offset, unit)
        return True

    def _resolve_suspect(
        self, queue: Queue, offset: int, unit: Unit, *, following_offset: int
    ) -> None:
        """Add a suspect, whose offset was implausible, to its queue, or log it as impossible.

        It is right if the next record of the queue, with `following_offset`, follows it.
        """
        if offset + 1 == following_offset:
            self._add_unit(queue, offset, unit)
        else:
            _log_impossible_offset(queue, offset, unit)

    def _add_unit(self, queue: Queue, offset: int, unit: Unit) -> None:
        """Add a unit to its queue. If it is new there, count it and mark the queue as grown."""
        if queue.put(offset, unit):
            self.units_added += 1
            self.grown_queues[queue] = None
            self._queues.mark_dirty(queue)


def _is_plausible(queue: Queue, offset: int, unit: Unit) -> bool:
    """Return whether the record of `unit` can have this offset in the queue.

    - The queue's next offset is plausible.
    - A smaller offset is plausible unless the queue's unit there is earlier in the log.
    - A greater offset is plausible if the log has room for the records between.
    """
    next_offset = queue.next_offset
    if next_offset == offset:
        return True
    if offset < next_offset:
        present_unit = queue.unit(offset)
        return present_unit is not None and present_unit.physical_offset >= unit.physical_offset
    last_unit = queue.unit(next_offset - 1)
    if last_unit is None or not last_unit.is_used or last_unit.is_blank:
        return True
    if last_unit.tag_code == PLACEHOLDER_CODE:
        return True  # a placeholder may lie far before the position of the lost message
    bytes_needed = (offset - next_offset + 1) * RECORD_BYTES_MIN
    return bytes_needed <= unit.physical_offset - last_unit.physical_offset


def _log_impossible_offset(queue: Queue, offset: int, unit: Unit) -> None:
    """Log that a record is skipped because it cannot have the offset that it claims."""
    logger.error(
        "the record at position %d of the log is damaged and is skipped: it claims to be message %d"
        " of queue %s/%d, which is impossible; stop the broker and run `sluice store repair`",
        unit.physical_offset,
        offset,
        queue.topic,
        queue.queue_id,
    )


def sweep_records(
    log: CommitLog,
    start: int,
    stop: int | None = None,
    *,
    check_crc: bool = True,
    delays_ms: Sequence[int] = DELAYS_MS,
    singles: int | None = None,
) -> "Iterator[LogRecord | Sweep]":
    """Yield the valid records from `start` on that end at `stop` or before.

    Each item is either one record, or a `Sweep`: many adjacent records in columns. The first
    `singles` records come one by one. None means `SINGLE_RECORDS_FIRST`, so that a short walk, the
    usual case, ends before NumPy is imported. Then columns are tried. Where they do not help, more
    records come one by one before columns are tried again. `delays_ms` are the delays of level 1,
    2, … (messageDelayLevel), for the units of delayed messages.
    """
    if singles is None:
        singles = SINGLE_RECORDS_FIRST
    singles_between = SINGLE_RECORDS_BETWEEN
    position = start
    while True:
        if singles:
            count = 0
            for record in islice(log.scan(position, stop, check_crc=check_crc), singles):
                yield record
                position = record.end
                count += 1
            if count < singles:
                return

        next_room = log.next_room(position, stop)
        if next_room is None:
            return
        segment, position, end_max = next_room
        # Without `stop`, the records end somewhere before the end of the file.
        needed_end = position + BLANK_BYTES if stop is None else end_max
        view = segment.data_view(needed_end)[: end_max - segment.base]
        from sluicemq.store.bulk import sweep_piece  # noqa: PLC0415 - imports NumPy

        sweep = sweep_piece(
            view,
            position - segment.base,
            segment.base,
            check_crc=check_crc,
            requires_checksum=log.requires_checksum,
            delays_ms=delays_ms,
        )
        if sweep is not None:
            yield sweep
            position = sweep.end
        if sweep is not None and sweep.count >= SINGLE_RECORDS_BETWEEN:
            singles_between = SINGLE_RECORDS_BETWEEN
            singles = 0
        else:  # columns did not help much here
            singles_between = min(2 * singles_between, SINGLE_RECORDS_FIRST)
            singles = singles_between


def find_next_record(log: CommitLog, position: int) -> LogRecord | None:
    """Return the first valid record behind the damaged `position`; None if none is found.

    Only `SEARCH_BYTES_MAX` bytes of the same file are searched, and then the begin of each later
    file. Checksum properties are not checked.
    """
    segment = log.segments.at(position)
    if segment is None:
        return None
    record = None
    stop = min(segment.end, position + SEARCH_BYTES_MAX)
    start = find_next_record_start(segment, position + 1, stop, segment.end, takes_blank=False)
    if start is not None:
        record = log.find_record(start)
    while record is None and (segment := log.segments.at(segment.end)) is not None:
        record = log.find_record(segment.base)
    return record


def iter_whole_records(log: CommitLog, start: int) -> Iterator[LogRecord]:
    """Yield the valid records from `start` on, skipping damaged parts of the log.

    Ends where `find_next_record` finds no record behind a damaged part.
    """
    end = start
    while True:
        for record in log.scan(end):
            yield record
            end = record.end
        next_record = find_next_record(log, end)
        if next_record is None:
            return
        end = next_record.position
