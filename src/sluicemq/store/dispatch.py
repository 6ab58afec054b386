"""From the log to the queues: whole records, one by one or many at a time, each into its queue.

At a start (`recover`) and behind a master (`follow`).

A record's queue and offset have no checksum. One that cannot be (it goes back in its queue, or
skips more offsets than there was room for in the log) waits for the next one of its queue: only
when that goes on from it the queue does as well, else the record is passed over and logged.
Nothing is dispatched twice: a queue ignores units that it has (`Queue.put`).
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
    CommitLog,
    LogRecord,
)
from sluicemq.store.queues import OFFSET_MAX, ConsumeQueues, Queue, Unit, is_valid_key

if TYPE_CHECKING:
    from sluicemq.store.bulk import QueueUnits, Sweep

logger = logging.getLogger(__name__)

SINGLES_FIRST: Final = 2000
"""A walk shorter than this is over before NumPy would be imported."""
SINGLES_BETWEEN: Final = 32
"""So many are read one by one where columns do not help, more each time, up to the number above."""


class Dispatcher:
    """Puts records of the log into their queues.

    `added` is how many units were not there before, `grown` are the queues that got them, and
    `time_ms` is the store time of the last record that was seen (0: none).
    """

    def __init__(
        self,
        log: CommitLog,
        queues: ConsumeQueues,
        *,
        check_crc: bool = True,
        delays_ms: Sequence[int] = DELAYS_MS,
    ) -> None:
        """`delays_ms` are the delays of level 1, 2, … (messageDelayLevel)."""
        self._log = log
        self._queues = queues
        self._check_crc = check_crc
        self._delays_ms = delays_ms
        self._by_name: dict[tuple[bytes, int], Queue] = {}
        self._suspects: dict[Queue, tuple[int, Unit]] = {}
        self.units_added = 0
        self.grown_queues: set[Queue] = set()
        self.last_store_time_ms = 0

    def reset(self) -> None:
        """The queues are others from now on."""
        self._by_name.clear()
        self._suspects.clear()
        self.grown_queues.clear()
        self.units_added = 0

    def dispatch_records(
        self, start: int, stop: int | None = None, *, may_gap: bool, singles: int | None = None
    ) -> int | None:
        """Put every record from `start` on, up to `stop`, into its queue; the end of the last one,
        or None at a gap: the queue lacks units before this one. `singles`: see `sweep_records`."""
        end = start
        for found in sweep_records(
            self._log, start, stop, check_crc=self._check_crc, delays_ms=self._delays_ms,
            singles=singles,
        ):  # fmt: skip
            if not isinstance(found, LogRecord):
                is_complete = all(self._dispatch_group(g, may_gap=may_gap) for g in found.groups)
            elif found.is_queued:
                code = found.tag_code(self._delays_ms)
                unit = Unit(found.position, found.size_bytes, code)
                queue = self._queue(found.topic, found.queue_id)
                is_complete = self._put(queue, found.queue_offset, unit, may_gap=may_gap)
                for other, offset in found.extra_queues() if is_complete else ():
                    self._put(self._queues.get_unchecked(other), offset, unit, may_gap=True)
            else:
                is_complete = True
            if not is_complete:
                return None
            end = found.end
            self.last_store_time_ms = found.store_time_ms
        return end

    def resolve_suspects(self, *, is_end: bool = True) -> None:
        """Nothing follows (for now): decide about what waits for the next of its queue."""
        for queue, (offset, unit) in list(self._suspects.items()):
            if offset == 0:  # the topic was deleted and made again, and has one message
                self._place(queue, offset, unit)
            elif is_end:
                _report_suspect(queue, offset, unit)
            else:
                continue
            del self._suspects[queue]

    def _dispatch_group(self, group: "QueueUnits", *, may_gap: bool) -> bool:
        """Many units of one queue. False at a gap."""
        queue = self._queue(group.topic, group.queue_id)
        is_new = queue.topic not in self._queues.deleted.end_by_topic
        is_row = group.is_consecutive and is_new and is_valid_key(queue.key)
        added = queue.extend(int(group.offsets[0]), group.units.tobytes()) if is_row else None
        if added is None:
            return all(
                self._put(queue, offset, Unit._make(unit), may_gap=may_gap)
                for offset, unit in group.rows()
            )
        if added:
            self.units_added += added
            self.grown_queues.add(queue)
            self._queues.mark_dirty(queue)
        return True

    def _queue(self, topic: bytes, queue_id: int) -> Queue:
        queue = self._by_name.get((topic, queue_id))
        if queue is None:
            name = (topic.decode(errors="replace"), queue_id)
            queue = self._by_name[topic, queue_id] = self._queues.get_unchecked(name)
        return queue

    def _put(self, queue: Queue, offset: int, unit: Unit, *, may_gap: bool) -> bool:
        """False at a gap."""
        if not self._queues.deleted.is_live(queue.topic, unit.physical_offset):
            return True
        suspect = self._suspects.pop(queue, None)
        if suspect is not None and suspect[0] + 1 == offset:
            self._place(queue, *suspect)
        elif suspect is not None:
            _report_suspect(queue, *suspect)
        offset_max = OFFSET_MAX
        if not (self._log.start or queue.next_offset or unit.tag_code == PLACEHOLDER_CODE):
            # The first of a queue in a whole log: no more than records fit before it.
            offset_max = unit.physical_offset // RECORD_BYTES_MIN
        if not is_valid_key(queue.key) or not 0 <= offset <= offset_max:
            _report_suspect(queue, offset, unit)
            return True
        if not _is_plausible(queue, offset, unit):
            self._suspects[queue] = (offset, unit)
            return True
        if offset > queue.next_offset and not may_gap:
            logger.warning(
                "queue %s/%d lacks the units from %d to %d",
                queue.topic, queue.queue_id, queue.next_offset, offset,
            )  # fmt: skip
            return False
        self._place(queue, offset, unit)
        return True

    def _place(self, queue: Queue, offset: int, unit: Unit) -> None:
        if queue.put(offset, unit):
            self.units_added += 1
            self.grown_queues.add(queue)
            self._queues.mark_dirty(queue)


def _is_plausible(queue: Queue, offset: int, unit: Unit) -> bool:
    """Whether a record with this offset can be where it is, as far as the queue knows."""
    end = queue.next_offset
    if end == offset:
        return True
    if offset < end:
        known = queue.unit(offset)
        return known is not None and known.physical_offset >= unit.physical_offset
    last = queue.unit(end - 1)
    if last is None or not last.is_used or last.is_blank or last.tag_code == PLACEHOLDER_CODE:
        return True  # a place holder may lie far before the place of what it stands for
    return (offset - end + 1) * RECORD_BYTES_MIN <= unit.physical_offset - last.physical_offset


def _report_suspect(queue: Queue, offset: int, unit: Unit) -> None:
    logger.error(
        "the record at %d of the log is damaged and is passed over: it says that it is message %d"
        " of queue %s/%d, which cannot be; stop the broker and run `sluice store repair`",
        unit.physical_offset, offset, queue.topic, queue.queue_id,
    )  # fmt: skip


def sweep_records(
    log: CommitLog,
    start: int,
    stop: int | None = None,
    *,
    check_crc: bool = True,
    delays_ms: Sequence[int] = DELAYS_MS,
    singles: int | None = None,
) -> "Iterator[LogRecord | Sweep]":
    """As `CommitLog.scan`, many records at a time where there are many; those that end at `stop` or
    before.

    The first `singles` come singly (by default so many that a short walk, the usual one, does
    without NumPy). `delays_ms` are the delays of level 1, 2, … (messageDelayLevel), for the units
    of delayed messages.
    """
    singles, between = SINGLES_FIRST if singles is None else singles, SINGLES_BETWEEN
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

        room = log.next_room(position, stop)
        if room is None:
            return
        segment, position, limit = room
        from sluicemq.store.bulk import sweep_piece  # noqa: PLC0415 - NumPy: long walks

        view = segment.data_view(limit if stop is not None else position + BLANK_BYTES)
        sweep = sweep_piece(
            view[: limit - segment.base],
            position - segment.base,
            segment.base,
            check_crc=check_crc,
            requires_checksum=log.requires_checksum,
            delays_ms=delays_ms,
        )
        if sweep is not None:
            yield sweep
            position = sweep.end
        is_worth_it = sweep is not None and sweep.count >= SINGLES_BETWEEN
        between = SINGLES_BETWEEN if is_worth_it else min(2 * between, SINGLES_FIRST)
        singles = 0 if is_worth_it else between
