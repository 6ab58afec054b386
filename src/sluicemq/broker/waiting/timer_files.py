"""The timer's derived files as one thing: wheel, log and checkpoint agree, or are built again.

    take in   a message of the timer's queue gets a unit in the log, its slot points to it
    save      log synced, then the changed slots, then the checkpoint: the next start begins there
    load      what the log holds behind the checkpoint is put into the slots; from the message
              after the last of these on, the queue is taken in again

So the wheel on disk never points behind the log on disk. What a crash left behind the last good
unit is wiped, or a later crash might take it for its own. A unit is good when its message stands in
the commit log, behind the one before. Files that are missing or do not agree are removed, and the
whole queue is taken in again.

`config/timermetrics`: how many timed messages wait, by topic (spec/store.md §11).

For tools alone: nothing relies on it. After a crash the numbers may differ from the truth by what
was stored and delivered since the file was written.
"""

import logging
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sluicemq.broker.documents import Document
from sluicemq.broker.topics import TIMER_TOPIC
from sluicemq.clock import Clock
from sluicemq.files import FULL_ERRORS, PASSING_ERRORS, Files
from sluicemq.record.layout import RECORD_HEAD
from sluicemq.store.store import Store
from sluicemq.store.timers import (
    DELETE,
    NONE,
    ROLL,
    UNIT_BYTES,
    TimerCheckpoint,
    TimerLog,
    TimerUnit,
    TimerWheel,
    read_timer_checkpoint,
    write_timer_checkpoint,
)
from sluicemq.wire import fastjson

log = logging.getLogger(__name__)

_BEGIN: Final = RECORD_HEAD.only("size", "queue_offset", "physical_offset")
_STEP_UNITS: Final = 256
_QUIET_MS: Final = 60_000


class Start(NamedTuple):
    """Where the timer goes on: the first second that may hold undelivered messages (0: nobody
    knows), the first message of the queue that is not in the files. `is_rebuilt`: none is.

    At the checkpoint everything due by `done_ms` was delivered, of what lies before `old_end` in
    the commit log.
    """

    read_ms: int
    queue_offset: int
    is_rebuilt: bool
    done_ms: int = 0
    old_end: int = 0


@dataclass(slots=True)
class Saving:
    """What a checkpoint writes; `run` waits for the disk, and may do so in another thread.

    Whoever starts one while another one is still running waits for it; one that was given up before
    it began does nothing any more.
    """

    files: "TimerFiles"
    checkpoint: TimerCheckpoint
    number: int
    steps: tuple[Callable[[], object], ...]
    has_failed: bool = False

    def run(self) -> None:
        """Raises OSError, StoreError."""
        with self.files.saving:
            if self.number <= self.files.saved:
                return
            try:
                for step in self.steps:
                    step()
            except OSError as error:
                self.has_failed = error.errno not in FULL_ERRORS | PASSING_ERRORS
                raise
            self.files.saved = self.number


class TimerFiles:
    """See the module. Times are ms, cut down to the precision."""

    def __init__(
        self, store: Store, files: Files, root: str, *, log_file_bytes: int, precision_ms: int
    ) -> None:
        self._store = store
        self._files = files
        self._precision_ms = precision_ms
        self.saving = threading.Lock()
        """Lets savings through one by one, in the order in which they were begun."""
        self.saved = self._begun = 0
        self._is_broken = False
        self._check_path = f"{root}/config/timercheck"
        self.wheel = TimerWheel(files, f"{root}/timerwheel", precision_ms)
        self.log = TimerLog(files, f"{root}/timerlog", log_file_bytes)
        self.checkpoint = TimerCheckpoint()
        """The one that is on disk."""

    # --- the start

    def load(self) -> Start:
        """Blocking. Raises StoreDamagedError when files have another size than they must."""
        low, high = self._store.queue_offsets(TIMER_TOPIC, 0)
        known = read_timer_checkpoint(self._files, self._check_path)
        self.wheel.check()
        self.log.load(known.log_end if known is not None else 0)
        self.checkpoint = known or TimerCheckpoint()
        if known is None or self.log.end != known.log_end or (
            known.log_end > 0 and not self.wheel.exists
        ):  # fmt: skip
            if high > low or not self.log.is_empty:
                log.warning("timer wheel and log are built from the queue of timed messages")
            self.forget()
            return Start(self.checkpoint.read_ms, low, True)
        known_offset = min(max(known.queue_offset, low), high)
        units = self._store.reader.units(TIMER_TOPIC, 0, known_offset, 1)
        # Where that message lies in the commit log; behind everything when there is none yet.
        place = int.from_bytes(units[:8]) if len(units) else self._store.written_offset
        return Start(known.read_ms, self._revise(known_offset), False, known.done_ms, place)

    def _revise(self, queue_offset: int) -> int:
        """Put what the log holds behind the checkpoint into the slots; the next queue offset."""
        start = end = self.log.end
        for position, unit in self.log.walk(start):
            offset = self._queue_offset(unit)
            if offset is None or offset < queue_offset or unit.previous >= position:
                break
            slot = self.wheel.get(unit.due_ms)
            step = -1 if unit.magic & DELETE else 1
            if slot is None:
                self.wheel.put(unit.due_ms, position, position, step)
            elif slot.last < position:
                self.wheel.put(unit.due_ms, slot.first, position, slot.messages + step)
            queue_offset = offset + 1
            end = position + UNIT_BYTES
        self.log.cut(end)
        if end != start:
            log.info("%d bytes of the timer log behind its checkpoint are used", end - start)
        return queue_offset

    def _queue_offset(self, unit: TimerUnit) -> int | None:
        """Where the unit's message stands in the timer's queue; None when it is not there."""
        view = self._store.reader.view_at(unit.position)
        if view is None or len(view) < _BEGIN.size:
            return None
        size, offset, position = _BEGIN.unpack_from(view)
        return offset if size == unit.size_bytes and position == unit.position else None

    def forget(self) -> None:
        """Wheel and log are empty."""
        self.wheel.remove()
        self.log.remove_all()

    # --- taking in

    def add(
        self, slot_ms: int, magic: int, write_ms: int, position: int, size: int, topic_hash: int
    ) -> None:
        """A message belongs to a slot. HOT."""
        slot = self.wheel.get(slot_ms)
        first, last, count = (slot.first, slot.last, slot.messages) if slot else (NONE, NONE, 0)
        unit = self.log.append(
            last, magic, write_ms, slot_ms - write_ms, position, size, topic_hash
        )
        count += -1 if magic & DELETE else 1
        self.wheel.put(slot_ms, unit if first == NONE else first, unit, count)

    def count(self, slot_ms: int) -> int:
        """How many messages a slot holds."""
        slot = self.wheel.get(slot_ms)
        return slot.messages if slot is not None else 0

    # --- reading

    def chain(
        self, slot_ms: int, end: int, places: "array[int]", magics: "array[int]"
    ) -> Iterator[bool]:
        """Collect place and magic of a slot's messages below `end` of the log, last first.

        Yields True now and then, False when the chain is broken.
        """
        slot = self.wheel.get(slot_ms)
        position = slot.last if slot is not None else NONE
        steps = 0
        while position != NONE:
            unit = self.log.unit(position)
            if unit is None or not unit.is_whole or unit.previous >= position:
                yield False
                return
            if position < end:
                places.append(unit.position)
                magics.append(unit.magic & (ROLL | DELETE))
            position = unit.previous
            steps += 1
            if steps % _STEP_UNITS == 0:
                yield True

    # --- saving

    def begin_save(
        self, read_ms: int, queue_offset: int, now_ms: int, done_ms: int, *, must: bool
    ) -> Saving | None:
        """What has to be written for a new checkpoint; None when nothing has changed but the time,
        unless it `must` be or the last one is a minute old. `end_save` follows. Raises OSError.
        """
        if self._is_broken:
            return None
        self.log.write()
        old = self.checkpoint
        state = (read_ms, self.log.end, queue_offset)
        is_same = state[1:] == old[1:3] and not self.wheel.has_memory
        is_young = not old.time_ms or now_ms - old.time_ms < _QUIET_MS
        if is_same and (is_young or state == old[:3]) and not must:
            return None
        new = TimerCheckpoint(
            *state, queue_offset, old.state_version, now_ms, old.counter + 1, done_ms
        )
        slots, start, end = self.wheel.take(), old.log_end, self.log.end
        self._begun += 1
        return Saving(
            self,
            new,
            self._begun,
            (
                self._store.sync,
                lambda: self.log.sync(start, end),
                lambda: self.wheel.write(slots),
                lambda: write_timer_checkpoint(self._files, self._check_path, new),
            ),
        )

    def end_save(self, saving: Saving, *, is_written: bool) -> None:
        """What `Saving.run` wrote is on disk, or has to be written again.

        After a disk error nothing is: the kernel may have thrown pages away. The last good
        checkpoint stays, and the next start begins there.
        """
        if saving.has_failed and not self._is_broken:
            self._is_broken = True
            log.error("the disk fails: timer files are saved no more. Check it, and start again.")
        self.wheel.settle(is_written=is_written)
        if is_written:
            self.checkpoint = saving.checkpoint

    def remove_before(self, log_offset: int) -> int:
        """Remove log files whose messages the commit log holds no more; says how many."""
        return self.log.remove_before(log_offset)

    def close(self) -> None:
        self.wheel.close()
        self.log.close()


class TimerMetrics:
    """Counts by topic."""

    def __init__(self, files: Files, root: str, clock: Clock) -> None:
        self._clock = clock
        self.counts: dict[str, int] = {}
        self._changed_ms: dict[str, int] = {}
        self._has_news = False
        self._version: dict[str, Any] = {"counter": 0, "stateVersion": 0, "timestamp": 0}
        self.document = Document(files, f"{root}/config/timermetrics", self._render)

    def load(self) -> None:
        """Raises StoreDamagedError."""
        values = self.document.load(fastjson.loads)
        if not isinstance(values, dict):
            return
        self._version |= values.get("dataVersion") or {}
        for topic, item in (values.get("timingCount") or {}).items():
            self.counts[topic] = int(item.get("count", 0))
            self._changed_ms[topic] = int(item.get("timeStamp", 0))

    def add(self, topic: str, count: int) -> None:
        """So many more wait, or fewer. HOT."""
        self.counts[topic] = self.counts.get(topic, 0) + count
        self.document.changed = self._has_news = True

    @property
    def total(self) -> int:
        """Of all topics."""
        return max(sum(self.counts.values()), 0)

    def text(self) -> str:
        """The file's text in one line, which request 61 answers too."""
        now_ms = self._clock.now_ms()
        counting = {
            topic: {"count": max(count, 0), "timeStamp": self._changed_ms.get(topic, now_ms)}
            for topic, count in sorted(self.counts.items())
        }
        return fastjson.dumps({"dataVersion": self._version, "timingCount": counting}).decode()

    def _render(self) -> str:
        if not self._has_news:
            return self.text()
        self._has_news = False
        now_ms = self._clock.now_ms()
        self._version = {
            **self._version, "counter": self._version["counter"] + 1, "timestamp": now_ms,
        }  # fmt: skip
        self._changed_ms |= dict.fromkeys(self.counts, now_ms)
        return self.text()
