"""Finding the end of the log at start-up, and making the queues agree with it.

    stopped in order (no `abort`)   the queues are complete: the log ends behind the record of the
                                    last unit; a few reads, however large the store is
    crashed, our mark is there      queues are cut back to the mark, the log is walked from there
    crashed, no mark (Java's store) the walk begins at the newest file that the checkpoint's time
                                    vouches for (spec/store.md §7.3), else at the first
    queues missing or too short     everything is walked, all queues are built anew

Queues are found missing by the digest in the mark (how many, and the sum of their ends), or by a
gap in offsets during a walk. The end of the log is the end of the last good record. What follows
is a torn tail: later files are removed, the rest of the file is zeroed, both are synced before the
first append, and units that point there are dropped. Only before the mark bad bytes are damage.

Nothing is dispatched twice: a queue ignores units that it has (`Queue.put`).
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

from sluicemq.errors import StoreDamagedError
from sluicemq.store.checkpoint import Checkpoint, Mark
from sluicemq.store.commitlog import CommitLog
from sluicemq.store.consumequeue import ConsumeQueues, Queue, Unit
from sluicemq.store.scan import Scanned, read_scanned, scan_end, scan_records

logger = logging.getLogger(__name__)


class Recovered(NamedTuple):
    """Where the log ends, the last record's store time (0: none), how many units were added."""

    end: int
    store_time_ms: int
    units_added: int
    is_rebuilt: bool


class Recovery:
    """One start-up: `load`, then `run`; log and queues are ready for use after that."""

    def __init__(
        self, log: CommitLog, queues: ConsumeQueues, checkpoint: Checkpoint, *, check_crc: bool
    ) -> None:
        self._log = log
        self._queues = queues
        self._checkpoint = checkpoint
        self._check_crc = check_crc
        self._mark: Mark | None = None
        self._after_crash = False
        self._start = 0
        self._by_name: dict[tuple[bytes, int], Queue] = {}
        self._added = 0
        self._time_ms = 0

    def load(self, *, after_crash: bool) -> None:
        """Find the files; after an orderly stop this changes nothing.

        Raises StoreDamagedError when files are missing or have another size than configured.
        """
        self._log.segments.load()
        self._after_crash = after_crash
        self._mark = self._usable_mark()
        if not after_crash:
            self._queues.load(after_crash=False)
            return
        self._start = self._mark.log_offset if self._mark is not None else self._start_by_time()
        self._queues.load(after_crash=True, before=self._start)

    def run(self, on_rebuild: Callable[[], None]) -> Recovered:
        """Find the end and make the queues agree. `abort` must exist by now.

        `on_rebuild` has to forget the mark, durably: it is called before all queues are built
        anew. Raises StoreDamagedError when bytes before the mark are not what they must be.
        """
        start = self._start_crashed() if self._after_crash else self._start_stopped()
        end = None if start is None else self._walk(start, may_gap=start == self._log.start)
        is_rebuilt = end is None
        if end is None:
            on_rebuild()
            end = self._rebuild()
        if self._mark is not None and end < self._mark.log_offset:
            raise self._damage(end, self._mark)
        self._finish(end)
        return Recovered(end, self._time_ms or self._last_time(), self._added, is_rebuilt)

    def _usable_mark(self) -> Mark | None:
        mark = self._checkpoint.mark
        segments = self._log.segments
        if mark is None or not len(segments) or mark.log_offset < segments.start:
            return None
        if mark.log_offset > segments.end:
            raise self._damage(segments.end, mark)
        return mark

    # --- where the walk begins; None: build everything anew

    def _start_stopped(self) -> int | None:
        for queue in self._queues:
            self._trim(queue)
        mark = self._mark
        if mark is not None and not self._has_record(mark.log_offset) and not self._agrees(mark):
            return None
        return self._end_of_units()

    def _start_crashed(self) -> int | None:
        if self._mark is None:
            return self._start
        if not self._agrees(self._mark):
            return None
        last = self._last_unit()  # its record is looked at again: the mark vouches for it
        return self._log.start if last is None else max(last.physical_offset, self._log.start)

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
            if unit is not None and self._is_sound(unit):
                break
            if unit is not None and self._mark is not None:
                self._require_behind(unit, self._mark)
            end -= 1
        if end < queue.next_offset:
            logger.warning(
                "queue %s/%d ends at %d instead of %d: the log does not hold the rest",
                queue.topic, queue.queue_id, end, queue.next_offset,
            )  # fmt: skip
            queue.truncate(end)

    def _require_behind(self, unit: Unit, mark: Mark) -> None:
        """A unit whose record is not there is damage when the mark vouches for it."""
        if unit.physical_offset < mark.log_offset:
            raise self._damage(unit.physical_offset, mark)

    def _is_sound(self, unit: Unit) -> bool:
        """Its record is there, or was there before the log's first files were deleted."""
        is_gone = unit.physical_offset < self._log.start
        return unit.is_blank or is_gone or self._record_of(unit) is not None

    def _record_of(self, unit: Unit) -> Scanned | None:
        segment = self._log.segments.at(unit.physical_offset)
        if segment is None:
            return None
        at = unit.physical_offset - segment.base
        scanned = read_scanned(segment.view(), at, segment.base, check_crc=False)
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
        for scanned in scan_records(self._log, start, check_crc=self._check_crc):
            if scanned.is_queued and not self._dispatch(scanned, may_gap=may_gap):
                return None
            end = scanned.end
            self._time_ms = scanned.store_time_ms
        return scan_end(self._log, end)

    def _dispatch(self, scanned: Scanned, *, may_gap: bool) -> bool:
        """False at a gap: the queue lacks units before this one."""
        key = (scanned.topic, scanned.queue_id)
        queue = self._by_name.get(key)
        if queue is None:
            name = (scanned.topic.decode(errors="replace"), scanned.queue_id)
            queue = self._by_name[key] = self._queues.open(name)
        if not self._put(queue, scanned.queue_offset, scanned, may_gap=may_gap):
            return False
        return all(
            self._put(self._queues.open(other), offset, scanned, may_gap=True)
            for other, offset in scanned.other_queues()
        )

    def _put(self, queue: Queue, offset: int, scanned: Scanned, *, may_gap: bool) -> bool:
        if offset > queue.next_offset and not may_gap:
            logger.warning(
                "queue %s/%d lacks the units from %d to %d",
                queue.topic, queue.queue_id, queue.next_offset, offset,
            )  # fmt: skip
            return False
        if queue.put(offset, Unit(scanned.position, scanned.size_bytes, scanned.tag_code())):
            self._added += 1
            self._queues.note(queue)
        return True

    def _rebuild(self) -> int:
        logger.warning("consume queues are missing or too short: building all from the log")
        self._queues.remove_all()
        self._by_name.clear()
        self._added = 0
        end = self._walk(self._log.start, may_gap=True)
        return self._log.start if end is None else end

    # --- the end

    def _finish(self, end: int) -> None:
        log = self._log
        is_clean = not self._after_crash and self._mark is not None and end == self._mark.log_offset
        if not is_clean and log.segments.cut(end):
            self._sync_log(from_offset=end - 1)
            log.segments.files.sync_directory(log.segments.directory)
        if self._after_crash:
            # A killed process leaves written records that are not on disk: readers see them now.
            self._sync_log(from_offset=self._start)
        self._queues.truncate_log(end)
        for queue in self._queues:
            queue.correct_min(log.start)
        log.set_end(end)

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

    def _damage(self, end: int, mark: Mark) -> StoreDamagedError:
        return StoreDamagedError(
            f"The commit log in {self._log.segments.directory} is damaged at {end}: the checkpoint"
            f" says that everything before {mark.log_offset} was safely on disk.",
            cure="Bring the files back from a copy. To start with what can be read before the"
            " damage, and lose what follows it, remove the file checkpoint.",
        )
