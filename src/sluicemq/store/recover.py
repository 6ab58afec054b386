"""Finding the end of the log at start-up, and making the queues agree with it.

    stopped in order (no `abort`)   the queues are complete: the log ends behind the record of the
                                    last unit; a few reads, however large the store is
    crashed, our mark is there      queues are cut back to the mark, the log is walked from there
    crashed, no mark (Java's store) the walk begins at the newest file that the checkpoint's time
                                    vouches for (spec/store.md §7), else at the first
    queues missing or too short     everything is walked, all queues are built anew

Queues are found missing by the digest in the mark (how many, and the sum of their ends), by files
that are missing or have a size of their own, by a first or last unit that does not lead to its
record, by records in the log that lie before the first file's, or by a gap in offsets during a
walk. The end of the
log is the end of the last good record. What follows is a torn tail: later files are removed, the
rest of the file is zeroed, both are synced before the first append, and units that point there are
dropped. Bad bytes before the mark are damage, and the start stops with a report before anything
is changed; in a store without a mark it is damage when a record behind the bad bytes is older than
the checkpoint, which says that it and everything before was on disk.

A record's queue and offset have no checksum. One that cannot be (it goes back in its queue, or
skips more offsets than there was room for in the log) waits for the next one of its queue: only
when that goes on from it the queue does as well, else the record is passed over, and the log of the
broker says so.

Long walks go in columns (`sweep`), a record where they do not help singly. Nothing is dispatched
twice: a queue ignores units that it has (`Queue.put`).
"""

import logging
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

from sluicemq.errors import StoreDamagedError
from sluicemq.record.layout import RECORD_BYTES_MIN
from sluicemq.store.directory import Checkpoint, Mark
from sluicemq.store.log import (
    DELAYS_MS,
    LOST_CODE,
    CommitLog,
    Scanned,
    read_scanned,
    scan_end,
    scan_records,
)
from sluicemq.store.queues import OFFSET_MAX, UNIT_BYTES, ConsumeQueues, Queue, Unit, is_possible
from sluicemq.store.walk import (
    bad_bytes,
    bad_place,
    damage_error,
    is_lost_write,
    next_record,
    records_from,
    require_own_files,
    sweep_records,
)

if TYPE_CHECKING:
    from sluicemq.store.bulk import Group

logger = logging.getLogger(__name__)

CLEAN_TAIL_BYTES: Final = 16 << 20


class Recovered(NamedTuple):
    """Where the log ends, the last record's store time (0: none), how many units were added."""

    end: int
    store_time_ms: int
    units_added: int
    is_rebuilt: bool


class Recovery:
    """One start-up: `load`, then `run`; log and queues are ready for use after that."""

    def __init__(
        self,
        log: CommitLog,
        queues: ConsumeQueues,
        checkpoint: Checkpoint,
        *,
        check_crc: bool,
        root: str = "",
        delays_ms: Sequence[int] = DELAYS_MS,
    ) -> None:
        """`delays_ms`: messageDelayLevel, for units of delayed messages that are built anew."""
        self._delays_ms = delays_ms
        self._root = root or log.segments.directory.rpartition("/")[0]
        self._log = log
        self._queues = queues
        self._checkpoint = checkpoint
        self._check_crc = check_crc
        self._mark: Mark | None = None
        self._after_crash = False
        self._start = 0
        self._is_incomplete = False
        self._by_name: dict[tuple[bytes, int], Queue] = {}
        self._added = 0
        self._time_ms = 0
        self._suspects: dict[Queue, tuple[int, Unit]] = {}

    def load(self, *, after_crash: bool) -> None:
        """Find the files; after an orderly stop this changes nothing.

        Raises StoreDamagedError when files are missing, exchanged, or of another size.
        """
        self._log.segments.load()
        require_own_files(self._log)
        self._after_crash = after_crash
        self._mark = self._usable_mark()
        if not after_crash:
            self._load_queues()
            return
        self._start = self._mark.log_offset if self._mark is not None else self._start_by_time()
        self._load_queues(before=self._start)

    def _load_queues(self, before: int | None = None) -> None:
        try:
            self._queues.load(
                after_crash=self._after_crash, before=before, log_start=self._log.start
            )
        except StoreDamagedError as error:
            if self._queues.is_size_plausible():
                raise  # the setting is wrong, not the files
            logger.warning("%s", error.fact)
            self._is_incomplete = True

    def run(self, on_rebuild: Callable[[], None]) -> Recovered:
        """Find the end and make the queues agree. `abort` must exist by now.

        `on_rebuild` has to make sure, durably, that no later start trusts the queues: it is called
        before all are built anew. Raises StoreDamagedError when bytes before the mark are not what
        they must be.
        """
        start = None
        self._queues.finish_deletions()
        if not self._is_incomplete and not all(map(self._begins_right, self._queues)):
            self._is_incomplete = True
        if not self._is_incomplete:
            start = self._start_crashed() if self._after_crash else self._start_stopped()
        end = None if start is None else self._walk(start, may_gap=start == self._log.start)
        is_rebuilt = end is None
        if end is None:
            self._require_whole_log()
            on_rebuild()
            end = self._rebuild()
        self._require_mark(end)
        self._finish(end)
        return Recovered(end, self._time_ms or self._last_time(), self._added, is_rebuilt)

    def _usable_mark(self) -> Mark | None:
        mark = self._checkpoint.mark
        segments = self._log.segments
        if mark is not None and mark.log_offset and not len(segments):
            raise StoreDamagedError(
                f"There is no file in {segments.directory}, and the checkpoint says that"
                f" {mark.log_offset} bytes of the log were safely on disk.",
                cure="Bring the files back (is the disk mounted?). To begin anew and lose all"
                f" messages, remove checkpoint and consumequeue from {self._root}.",
            )
        if mark is not None and 0 <= mark.log_start < segments.start:
            self._tell_missing_start(mark.log_start)
        if mark is None or mark.log_offset < segments.start:
            return None
        if mark.log_offset > segments.end:
            raise self._damage(segments.end, mark)
        return mark

    def _tell_missing_start(self, start: int) -> None:
        """Raises, unless RocketMQ has worked here since and may have deleted the files."""
        segments = self._log.segments
        fact = (
            f"{segments.directory} begins at {segments.start:020d}, and no retention has deleted"
            f" what lies before: the log began at {start} at the last checkpoint."
        )
        if not self._checkpoint.is_mark_newest:
            logger.warning("%s RocketMQ has written here since: its retention may have.", fact)
            return
        raise StoreDamagedError(
            fact,
            cure="Bring the files back from a copy. If you removed them on purpose,"
            f" `sluice store repair {self._root} --write` lets the log begin there.",
        )

    # --- where the walk begins; None: build everything anew

    def _start_stopped(self) -> int | None:
        for queue in self._queues:
            self._trim(queue)
        if self._is_incomplete:
            return None
        mark = self._mark
        if mark is not None and not self._has_record(mark.log_offset) and not self._agrees(mark):
            return None
        return max(self._end_of_units(), mark.log_offset if mark is not None else 0)

    def _start_crashed(self) -> int | None:
        if self._mark is None:
            return self._start
        if not self._agrees(self._mark):
            return None
        last = self._last_unit()  # its record is looked at again: the mark vouches for it
        is_there = last is not None and last.physical_offset >= self._log.start
        if last is not None and is_there and not self._record_of(last, check_crc=self._check_crc):
            return None  # queue or log are damaged: building anew finds out
        # What lies between it and the mark stands in no queue: topics that were deleted.
        return self._mark.log_offset

    def _agrees(self, mark: Mark) -> bool:
        return self._queues.totals() == (mark.queues, mark.units)

    def _has_record(self, position: int) -> bool:
        """Whether the log goes on at `position`, maybe behind a blank record."""
        return next(scan_records(self._log, position, check_crc=False), None) is not None

    def _trim(self, queue: Queue) -> None:
        """Drop units at the end whose records are not there."""
        end = queue.next_offset
        while end > queue.offset_min:
            unit = queue.unit(end - 1)
            if unit is not None and self._is_sound(queue, end - 1, unit):
                break
            mark = self._mark
            if mark is not None and unit is not None and unit.physical_offset < mark.log_offset:
                self._is_incomplete = True  # the mark vouches for it: queue or log are damaged
                return
            end -= 1
        if end < queue.next_offset:
            logger.warning(
                "queue %s/%d ends at %d instead of %d: the log does not hold the rest",
                queue.topic, queue.queue_id, end, queue.next_offset,
            )  # fmt: skip
            queue.truncate(end)

    def _is_sound(self, queue: Queue, offset: int, unit: Unit) -> bool:
        """Its record is there, or was there before the log's first files were deleted."""
        if unit.is_blank or 0 <= unit.physical_offset < self._log.start:
            return True
        record = self._record_of(unit)
        return record is not None and (record.is_lost or record.stands_in(queue.key, offset))

    def _begins_right(self, queue: Queue) -> bool:
        """Whether the first unit of the first file leads to no other queue's record, and no record
        of the queue lies before that one's: retention removes such files of the log first."""
        first = queue.segments.start // UNIT_BYTES
        unit = queue.peek(first) if first < queue.next_offset else None
        queue.segments.release()
        end = self._start or self._log.segments.end
        if unit is not None:
            if unit.is_blank or unit.physical_offset < self._log.start:
                return True
            record = self._record_of(unit)
            if record is not None and not record.is_lost and not record.stands_in(queue.key, first):
                return False
            end = unit.physical_offset
        is_cut = first > 0 and first * UNIT_BYTES % queue.segments.file_bytes == 0
        if not is_cut or not self._queues.deleted.counts(queue.topic, end):
            return True
        records = scan_records(self._log, self._log.start, check_crc=False)
        earlier = takewhile(lambda record: record.position < end, records)
        return not any(
            record.is_queued
            and record.stands_in(queue.key)
            and self._queues.deleted.counts(queue.topic, record.position)
            for record in earlier
        )

    def _record_of(self, unit: Unit, *, check_crc: bool = False) -> Scanned | None:
        segment = self._log.segments.at(unit.physical_offset)
        if segment is None:
            return None
        at = unit.physical_offset - segment.base
        scanned = read_scanned(segment.view(), at, segment.base, check_crc=check_crc)
        return scanned if scanned is not None and scanned.size_bytes == unit.size_bytes else None

    def _last_unit(self) -> Unit | None:
        """Of all queues, the one that lies last in the log."""
        units = [q.unit(q.next_offset - 1) for q in self._queues if q.next_offset > 0]
        return max((unit for unit in units if unit is not None and not unit.is_blank), default=None)

    def _end_of_units(self) -> int:
        """The end of the last record that a queue knows; the log's start without any."""
        unit = self._last_unit()
        end = unit.physical_offset + unit.size_bytes if unit is not None else 0
        return max(end, self._log.start)

    def _start_by_time(self) -> int:
        for segment in reversed(list(self._log.segments)):
            first = read_scanned(segment.view(), 0, segment.base, check_crc=self._check_crc)
            if first is not None and first.store_time_ms <= self._checkpoint.java_time_ms:
                return segment.base
        return self._log.start

    # --- walking

    def _walk(self, start: int, *, may_gap: bool) -> int | None:
        """Put every record from `start` on into its queue; the end, or None at a gap."""
        end = start
        for found in sweep_records(
            self._log, start, check_crc=self._check_crc, delays_ms=self._delays_ms
        ):
            if isinstance(found, Scanned):
                is_complete = self._dispatch(found, may_gap=may_gap)
            else:
                is_complete = all(self._dispatch_group(g, may_gap=may_gap) for g in found.groups)
            if not is_complete:
                return None
            end = found.end
            self._time_ms = found.store_time_ms
        for queue, (offset, unit) in self._suspects.items():
            if offset == 0:  # the topic was deleted and made again, and has one message
                self._place(queue, offset, unit)
            else:
                _report_suspect(queue, offset, unit)
        self._suspects.clear()
        return scan_end(self._log, end)

    def _dispatch(self, scanned: Scanned, *, may_gap: bool) -> bool:
        """False at a gap: the queue lacks units before this one."""
        if not scanned.is_queued:
            return True
        queue = self._queue(scanned.topic, scanned.queue_id)
        unit = Unit(scanned.position, scanned.size_bytes, scanned.tag_code(self._delays_ms))
        if not self._put(queue, scanned.queue_offset, unit, may_gap=may_gap):
            return False
        return all(
            self._put(self._queues.open(other), offset, unit, may_gap=True)
            for other, offset in scanned.other_queues()
        )

    def _dispatch_group(self, group: "Group", *, may_gap: bool) -> bool:
        """As `_dispatch`, for many units of one queue."""
        queue = self._queue(group.topic, group.queue_id)
        is_new = queue.topic not in self._queues.deleted.ends
        is_row = group.is_row and is_new and is_possible(queue.key)
        added = queue.extend(int(group.offsets[0]), group.units.tobytes()) if is_row else None
        if added is None:
            return all(
                self._put(queue, offset, Unit._make(unit), may_gap=may_gap)
                for offset, unit in group.rows()
            )
        if added:
            self._added += added
            self._queues.note(queue)
        return True

    def _queue(self, topic: bytes, queue_id: int) -> Queue:
        queue = self._by_name.get((topic, queue_id))
        if queue is None:
            name = (topic.decode(errors="replace"), queue_id)
            queue = self._by_name[topic, queue_id] = self._queues.open(name)
        return queue

    def _put(self, queue: Queue, offset: int, unit: Unit, *, may_gap: bool) -> bool:
        """False at a gap."""
        if not self._queues.deleted.counts(queue.topic, unit.physical_offset):
            return True
        suspect = self._suspects.pop(queue, None)
        if suspect is not None and suspect[0] + 1 == offset:
            self._place(queue, *suspect)
        elif suspect is not None:
            _report_suspect(queue, *suspect)
        if not is_possible(queue.key) or not 0 <= offset <= self._offset_max(queue, unit):
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

    def _offset_max(self, queue: Queue, unit: Unit) -> int:
        """A queue's first record in a whole log has no larger offset than records fit before it."""
        if self._log.start or queue.next_offset or unit.tag_code == LOST_CODE:
            return OFFSET_MAX
        return unit.physical_offset // RECORD_BYTES_MIN

    def _place(self, queue: Queue, offset: int, unit: Unit) -> None:
        if queue.put(offset, unit):
            self._added += 1
            self._queues.note(queue)

    def _rebuild(self) -> int:
        logger.warning("consume queues are missing or too short: building all from the log")
        self._queues.remove_all()
        self._by_name.clear()
        self._suspects.clear()
        self._added = 0
        end = self._walk(self._log.start, may_gap=True)
        return self._log.start if end is None else end

    # --- the end

    def _finish(self, end: int) -> None:
        log = self._log
        is_clean = not self._after_crash and self._mark is not None and end == self._mark.log_offset
        if self._zero_tail(end) if is_clean else log.segments.cut(end):
            self._sync_log(from_offset=end - 1)
            log.segments.files.sync_directory(log.segments.directory)
        if self._after_crash:
            # A killed process leaves written records that are not on disk: readers see them now.
            self._sync_log(from_offset=self._start)
        self._queues.truncate_log(end)
        self._queues.deleted.cut(end)
        for queue in self._queues.dirty:  # of the others `load` has found it
            queue.correct_min(log.start)
        log.set_end(end)

    def _zero_tail(self, end: int) -> bool:
        """After an orderly stop zeros follow, unless others wrote there: a little is looked at, or
        a torn write over it could later mix old and new to one record."""
        segment = self._log.segments.at(end)
        if segment is None:
            return False
        return segment.zero_from(end, min(end + CLEAN_TAIL_BYTES, segment.end))

    def _sync_log(self, from_offset: int) -> None:
        for segment in self._log.segments:
            if segment.end > from_offset:
                segment.file().sync()
                segment.release()

    def _last_time(self) -> int:
        """The store time of the last record that a queue knows; 0 without one."""
        unit = self._last_unit()
        scanned = self._record_of(unit) if unit is not None else None
        return scanned.store_time_ms if scanned is not None else 0

    # --- damage

    def _require_whole_log(self) -> None:
        """Raise for damage before the queues are removed: they tell a repair what was lost."""
        mark = self._mark
        if mark is None:
            return
        end = self._log.start
        for found in sweep_records(self._log, end, check_crc=self._check_crc):
            end = found.end
            if end >= mark.log_offset:
                return
        self._require_mark(scan_end(self._log, end))

    def _require_mark(self, end: int) -> None:
        """Raise for damage before the end that the checkpoint vouches for, and behind it."""
        mark = self._mark
        if mark is not None and end < mark.log_offset:
            raise self._damage(end, mark)
        place = bad_place(self._log, end)
        found = next_record(self._log, place) if self._after_crash else None
        if found is None:
            if self._after_crash and any(bad_bytes(self._log, place, place + RECORD_BYTES_MIN)):
                logger.warning("the log ends at %d: a torn record behind it is cut off", end)
            return
        known_ms = self._checkpoint.java_time_ms if mark is None else 0
        if found.store_time_ms <= known_ms:
            reason = f"everything stored until {known_ms} ms was safely on disk."
            raise damage_error(self._log, place, f"The checkpoint says that {reason}", self._root)
        if found.store_time_ms < self._time_ms:
            return  # RocketMQ does not wipe what it cuts off: of an earlier life of the file
        data = bad_bytes(self._log, place, found.position)
        ends_file = (place + len(data)) % self._log.segments.file_bytes == 0
        if not is_lost_write(data, place, ends_file=ends_file):
            reason = "No power loss leaves that: writes that are lost read as zeros."
            raise damage_error(self._log, place, reason, self._root)
        logger.error(
            "the log ends at %d: a power loss has taken what was written there, and %d messages"
            " behind it, which were not synced either, are cut off",
            end, sum(1 for _ in records_from(self._log, found.position)),
        )  # fmt: skip

    def _damage(self, end: int, mark: Mark) -> StoreDamagedError:
        return damage_error(
            self._log, bad_place(self._log, end),
            f"The checkpoint says that everything before {mark.log_offset} was safely on disk.",
            self._root,
        )  # fmt: skip


def _is_plausible(queue: Queue, offset: int, unit: Unit) -> bool:
    """Whether a record with this offset can be where it is, as far as the queue knows."""
    end = queue.next_offset
    if end == offset:
        return True
    if offset < end:
        known = queue.unit(offset)
        return known is not None and known.physical_offset >= unit.physical_offset
    last = queue.unit(end - 1)
    if last is None or not last.is_used or last.is_blank or last.tag_code == LOST_CODE:
        return True  # a place holder may lie far before the place of what it stands for
    return (offset - end + 1) * RECORD_BYTES_MIN <= unit.physical_offset - last.physical_offset


def _report_suspect(queue: Queue, offset: int, unit: Unit) -> None:
    logger.error(
        "the record at %d of the log is damaged and is passed over: it says that it is message %d"
        " of queue %s/%d, which cannot be; stop the broker and run `sluice store repair`",
        unit.physical_offset, offset, queue.topic, queue.queue_id,
    )  # fmt: skip
