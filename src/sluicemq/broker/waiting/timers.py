"""Timed messages: from the queue of rmq_sys_wheel_timer to their topics, to the millisecond.

    take in   each new message of the queue is put into the slot of its second
    load      the slots of the next second and a half are read: each message's exact time stands in
              its properties, and it goes into the table of what is due
    deliver   whatever in the table is due is appended to its own topic
    close     a second that is over and whose messages are all stored is done: `read_ms` moves on

A message that is stored for a second that is loaded already goes into the table at once; one for a
second that is over goes into the first that is open. A message that is due later than the wheel
reaches is put into the queue again on the way (it *rolls*). A mark that takes back a message of its
second is loaded before the others and has no other effect (spec/delivery.md §2).

Real RocketMQ delivers a second's messages when it is over, up to a second late; here the second is
only where they lie.

Wheel, log and checkpoint are derived from the queue, and agree or are built again. A save syncs the
log, then the changed slots, then the checkpoint: the next start begins there, puts what the log
holds behind it into the slots, and takes in the queue from the message after the last of these on.
So the wheel on disk never points behind the log on disk. What a crash left behind the last good
unit is wiped, or a later crash might take it for its own. A unit is good when its message stands in
the commit log, behind the one before. Files that are missing or do not agree are removed, and the
whole queue is taken in again: so it is with a slave that becomes master, which has its master's
checkpoint and none of the other files. What was delivered before is known exactly: the second of a
message follows from its record alone, but for those that came too late for it, and the checkpoint
says behind which place of the queue there are such (`replay_offset`).
"""

import heapq
import logging
import threading
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator
from itertools import chain, takewhile
from typing import Final, NamedTuple

from sluicemq.broker.background import Slice
from sluicemq.broker.produce.intake import (
    Entry,
    Intake,
    Record,
    Redelivery,
    entries,
    read_record,
    topic_name,
)
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import TIMER_TOPIC
from sluicemq.broker.waiting.rewrite import (
    TIMER_DELETES,
    TIMER_OUT,
    exact_due_ms,
    lead_of,
    named_due_ms,
)
from sluicemq.clock import SteadyClock
from sluicemq.files import FULL_ERRORS, PASSING_ERRORS, Files
from sluicemq.model.ids import tag_code
from sluicemq.record.codec import as_dict, value_of
from sluicemq.record.layout import RECORD_HEAD
from sluicemq.store.store import Store
from sluicemq.store.timers import (
    DEFAULT,
    DELETE,
    NONE,
    ROLL,
    SLOTS,
    UNIT_BYTES,
    TimerCheckpoint,
    TimerLog,
    TimerUnit,
    TimerWheel,
    read_timer_checkpoint,
    write_timer_checkpoint,
)

log = logging.getLogger(__name__)

AHEAD_MS: Final = 1500
"""So long before it begins, a slot is loaded: the sweep comes by five times a second."""
FROM_END: Final = -2
LOADED_MAX: Final = 200_000
"""No more slots are loaded while so many messages are in the table."""
_REBUILD_MARGIN_MS: Final = 60_000
_CHUNK: Final = 64
_STEP_UNITS: Final = 256
_LIST_SLOTS: Final = 8192
_OUT: Final = TIMER_OUT.encode()
_DELETES: Final = TIMER_DELETES.encode()
_REAL_TOPIC: Final = b"REAL_TOPIC"
_UNIQUE_ID: Final = b"UNIQ_KEY"
_BEGIN: Final = RECORD_HEAD.only("size", "queue_offset", "physical_offset")
_QUIET_MS: Final = 60_000
Due = tuple[int, int]
"""(due in ms since 1970, place in the commit log)."""


class DueTable:
    """What is due when: places in the commit log by the millisecond, in the order they came.

    Held only for the seconds that come next. A place is 8 bytes in an array for its millisecond, so
    a hundred thousand messages of one second take less than a megabyte; a heap says which is first.
    """

    __slots__ = ("_at", "_places", "_times", "count")

    def __init__(self) -> None:
        self._times: list[int] = []
        self._places: dict[int, array[int]] = {}
        self._at: dict[int, int] = {}  # how many of a millisecond are taken already
        self.count = 0

    def add(self, due_ms: int, place: int) -> None:
        """HOT."""
        places = self._places.get(due_ms)
        if places is None:
            places = self._places[due_ms] = array("q")
            heapq.heappush(self._times, due_ms)
        places.append(place)
        self.count += 1

    @property
    def next_ms(self) -> int | None:
        """When the next entry is due; None without one."""
        return self._times[0] if self._times else None

    def take(self, now_ms: int, count_max: int) -> list[Due]:
        """Up to so many of the first entries, all of one millisecond and due by now."""
        if not self._times or self._times[0] > now_ms:
            return []
        due_ms = self._times[0]
        places, at = self._places[due_ms], self._at.get(due_ms, 0)
        taken = places[at : at + count_max]
        at += len(taken)
        if at == len(places):
            heapq.heappop(self._times)
            del self._places[due_ms]
            self._at.pop(due_ms, None)
        else:
            self._at[due_ms] = at
        self.count -= len(taken)
        return [(due_ms, place) for place in taken]

    def give_back(self, taken: list[Due]) -> None:
        """What was taken is due still."""
        for due_ms, place in taken:
            self.add(due_ms, place)


class TimerFiles:
    """Wheel, log and checkpoint as one thing. Times are ms, cut down to the precision."""

    def __init__(
        self, store: Store, files: Files, root: str, *, log_file_bytes: int, precision_ms: int
    ) -> None:
        self._store = store
        self._files = files
        self._saving = threading.Lock()
        self._saved = self._begun = 0
        self._is_broken = False
        self._check_path = f"{root}/config/timercheck"
        self.wheel = TimerWheel(files, f"{root}/timerwheel", precision_ms)
        self.log = TimerLog(files, f"{root}/timerlog", log_file_bytes)
        self.checkpoint = TimerCheckpoint()
        """The one that is on disk. Everything due by its `done_ms` was delivered, of what lies
        before `old_end` in the commit log."""
        self.queue_offset = 0
        """The first message of the queue that is not in the files."""
        self.old_end = 0

    # --- the start

    def load(self) -> bool:
        """Blocking. Are the files to be built again? Raises StoreDamagedError when they have
        another size than they must."""
        low, high = self._store.queue_offsets(TIMER_TOPIC, 0)
        known = read_timer_checkpoint(self._files, self._check_path)
        self.wheel.check()
        self.log.load(known.log_end if known is not None else 0)
        self.checkpoint = known or TimerCheckpoint()
        known_offset = min(max(self.checkpoint.queue_offset, low), high)
        if known is None or self.log.end != known.log_end or (
            known.log_end > 0 and not self.wheel.exists
        ):  # fmt: skip
            if high > low or not self.log.is_empty:
                log.warning("timer wheel and log are built from the queue of timed messages")
            self.forget()
            self.queue_offset = low
            self.old_end = self._position(max(self.checkpoint.replay_offset, low))
            return True
        self.old_end = self._position(known_offset)
        self.queue_offset = self._revise(known_offset)
        return False

    def _position(self, queue_offset: int) -> int:
        """Where that message lies in the commit log; behind everything when there is none yet."""
        units = self._store.reader.units(TIMER_TOPIC, 0, queue_offset, 1)
        return int.from_bytes(units[:8]) if len(units) else self._store.written_offset

    def _revise(self, queue_offset: int) -> int:
        """Put what the log holds behind the checkpoint into the slots; the next queue offset."""
        start = end = self.log.end
        for position, unit in self.log.walk(start):
            view = self._store.reader.view_at(unit.position)
            if view is None or len(view) < _BEGIN.size:
                break
            size, offset, place = _BEGIN.unpack_from(view)
            is_there = size == unit.size_bytes and place == unit.position
            if not is_there or offset < queue_offset or unit.previous >= position:
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

    def chain(self, position: int) -> Iterator[tuple[int, TimerUnit | None]]:
        """The units of a slot from one on, the last first, each with its place in the log; None for
        one where the chain is broken."""
        while position != NONE:
            unit = self.log.unit(position)
            if unit is None or not unit.is_whole or unit.previous >= position:
                yield position, None
                return
            yield position, unit
            position = unit.previous

    # --- saving

    def save(
        self, read_ms: int, now_ms: int, done_ms: int, replay_offset: int, *, must: bool
    ) -> Generator[Callable[[], None]]:
        """Writes a new checkpoint and what it stands for; nothing when only the time has changed,
        unless it `must` be or the last one is a minute old. Raises OSError.

        What it yields waits for the disk (raises OSError, StoreError) and may be called in another
        thread; close the iterator when it is done. Savings go through one by one; one that was
        given up before it began does nothing any more. After a disk error nothing is saved: the
        kernel may have thrown pages away. The last good checkpoint stays, and the next start begins
        there.
        """
        if self._is_broken:
            return
        self.log.write()
        old = self.checkpoint
        state = (read_ms, self.log.end, self.queue_offset)
        is_same = state[1:] == old[1:3] and not self.wheel.has_memory
        is_young = not old.time_ms or now_ms - old.time_ms < _QUIET_MS
        if is_same and (is_young or state == old[:3]) and not must:
            return
        new = TimerCheckpoint(
            *state, self.queue_offset, old.state_version, now_ms, old.counter + 1, done_ms,
            replay_offset,
        )  # fmt: skip
        slots, start, end = self.wheel.take(), old.log_end, self.log.end
        self._begun += 1
        number = self._begun
        is_written = has_failed = False

        def write() -> None:
            nonlocal has_failed
            with self._saving:
                if number <= self._saved:
                    return
                try:
                    self._store.sync()
                    self.log.sync(start, end)
                    self.wheel.write(slots)
                    write_timer_checkpoint(self._files, self._check_path, new)
                except OSError as error:
                    has_failed = error.errno not in FULL_ERRORS | PASSING_ERRORS
                    raise
                self._saved = number

        try:
            yield write
            is_written = True
        finally:
            if has_failed and not self._is_broken:
                self._is_broken = True
                log.error(
                    "the disk fails: timer files are saved no more. Check it, and start again."
                )
            self.wheel.settle(is_written=is_written)
            if is_written:
                self.checkpoint = new


class Waiting(NamedTuple):
    """A message that waits; `record` is None of one that is taken back, gone, or none at all.
    `cursor` says where a list goes on after it."""

    record: Record | None
    due_ms: int
    cursor: str
    level: int = 0
    queue_offset: int = 0


class Timers:
    """`prepare` and `deliver` work a slice; `settle` says whether what it put is stored."""

    name: Final = "timed messages"

    def __init__(
        self,
        settings: Settings,
        store: Store,
        redelivery: Redelivery,
        intake: Intake,
        files: Files,
        clock: SteadyClock,
        count: Callable[[str, int], None],
    ) -> None:
        """`count` is told of so many messages of a topic that wait more, or fewer."""
        config = settings.store
        self._store = store
        self._redelivery = redelivery
        self._intake = intake
        self._clock = clock
        self._precision_ms = precision_ms = config.timer_precision_ms
        self._window_slots = config.timer_roll_window_slots
        self._window_ms = config.timer_roll_window_slots * precision_ms
        self.files = TimerFiles(
            store, files, config.root, log_file_bytes=config.timer_log_file_bytes,
            precision_ms=precision_ms,
        )  # fmt: skip
        self._count = count
        self.due = DueTable()
        self.read_ms = 0
        """The first slot that may hold undelivered messages."""
        self._loaded_ms = 0  # slots before it are in the table, or being read
        self._load_floor_ms = 0  # slots before it are read
        self._loading: Iterator[None] | None = None
        self._done_ms = 0  # what was due by then was delivered at the last checkpoint
        self._over_until_ms = 0  # of slots before it the exact times were not read
        # Files that are built again up to `to`: messages below `end` are delivered before `ms`.
        self._rebuild_end = self._rebuild_ms = self._rebuild_to = 0
        # The first of those in a second that came too late for their own.
        self._late: deque[tuple[int, int]] = deque()
        self._deleted: dict[int, set[bytes]] = {}
        self._rolls = DueTable()
        self._taken: list[tuple[DueTable, list[Due]]] = []
        self._listed: dict[int, set[bytes]] = {}  # what is taken back of the slot listed last
        self._has_delivered = False  # since the last checkpoint
        self._topics: list[str] = []  # of what this slice has dealt with
        self.delivered = self.recalled = 0

    # --- the start

    def load(self) -> None:
        """Blocking. Raises StoreDamagedError."""
        is_rebuilt = self.files.load()
        # If the wall clock has been set back, messages would wait for a time that has passed, and
        # slots that are delivered would be read again.
        known = self.files.checkpoint
        self._clock.raise_to(max(self._cut_down(known.read_ms), known.done_ms))
        self._clock.raise_to(self._newest_ms())
        now_ms = self._cut_down(self._clock.now_ms())
        oldest_ms = now_ms - (SLOTS // 2 - 60) * self._precision_ms
        self.read_ms = self._cut_down(self.files.checkpoint.read_ms)
        checkpoint, high = self.files.checkpoint, self._store.queue_offsets(TIMER_TOPIC, 0)[1]
        is_exact = checkpoint.replay_offset != NONE
        if is_rebuilt:
            self._begin_rebuild(
                checkpoint.replay_offset if is_exact else high,
                checkpoint.read_ms - (0 if is_exact else _REBUILD_MARGIN_MS),
            )
            self.read_ms = max(min(self.read_ms, now_ms), oldest_ms)
        if not self.read_ms or not self._store.queue_exists(TIMER_TOPIC, 0):
            self.read_ms = now_ms
        self._loaded_ms = self._load_floor_ms = self.read_ms
        self._done_ms = checkpoint.done_ms if is_exact or not is_rebuilt else 0

    def _newest_ms(self) -> int:
        """Return what the clock said when the newest timed message was stored, 0 without one."""
        low, high = self._store.queue_offsets(TIMER_TOPIC, 0)
        if low == high:
            return 0
        entry = next(entries(self._store, TIMER_TOPIC, 0, high - 1), None)
        if entry is None or entry.record is None:
            return 0
        record = entry.record
        slot_ms, named_ms = (
            record.number(TIMER_OUT),
            named_due_ms(record.properties, record.store_time_ms),
        )
        if slot_ms is None or named_ms is None:
            return record.store_time_ms
        return record.store_time_ms + lead_of(named_ms, slot_ms, self._precision_ms)

    def _begin_rebuild(self, replay_offset: int, read_ms: int) -> None:
        """Messages below the offset are delivered when their second is before `read_ms`."""
        self._late.clear()
        self._rebuild_end, self._rebuild_ms = replay_offset, read_ms
        self._rebuild_to = self._store.queue_offsets(TIMER_TOPIC, 0)[1]

    def _cut_down(self, time_ms: int) -> int:
        return time_ms - time_ms % self._precision_ms

    # --- taking in

    @property
    def queue_behind(self) -> int:
        """How many messages of the queue are not taken in."""
        return max(self._store.queue_offsets(TIMER_TOPIC, 0)[1] - self.files.queue_offset, 0)

    def _take_one(self, entry: Entry, write_ms: int) -> None:
        record = entry.record
        out = value_of(record.properties, _OUT) if record is not None else None
        if record is None or out is None or not out.isdigit():
            log.error("message %d of the timer's queue is not timed", self.files.queue_offset)
            return
        slot_ms, magic = self._cut_down(int(out)), DEFAULT
        named_ms = named_due_ms(record.properties, record.store_time_ms)
        lead_ms = 0 if named_ms is None else lead_of(named_ms, slot_ms, self._precision_ms)
        begin_ms = min(self._cut_down(record.store_time_ms + lead_ms), write_ms)
        if slot_ms - begin_ms >= self._window_ms:
            magic |= ROLL
            # Looked at again when the wheel ends, or half-way when little would be left then.
            left_ms = slot_ms - begin_ms - self._window_ms
            is_near = left_ms < self._window_slots // 3 * self._precision_ms
            slots = self._window_slots // 2 if is_near else self._window_slots
            slot_ms = begin_ms + slots * self._precision_ms
        if self.files.queue_offset < self._rebuild_end and slot_ms < self._rebuild_ms:
            return  # delivered before the files were lost
        if slot_ms < self.read_ms:
            slot_ms = self.read_ms
            if not self._late or self._late[-1][0] != slot_ms:
                self._late.append((slot_ms, self.files.queue_offset))
        name = value_of(record.properties, _REAL_TOPIC) or b""
        if _DELETES in record.properties:
            magic |= DELETE
        else:
            self._count(topic_name(name), 1)
        self.files.add(
            slot_ms, magic, write_ms, entry.position, record.size_bytes, tag_code(topic_name(name))
        )
        if slot_ms < self._loaded_ms:
            is_old = self.files.queue_offset < self._rebuild_end
            self._into_table(slot_ms, entry.position, magic, record, is_old=is_old)

    def _into_table(
        self,
        slot_ms: int,
        position: int,
        magic: int,
        record: Record | None,
        *,
        is_old: bool = False,
    ) -> None:
        """A message of a loaded slot; without its record it is due when the slot is over.

        `is_old`: of before the start, and maybe delivered then.
        """
        if magic & DELETE and not magic & ROLL:
            key = value_of(record.properties, _DELETES) if record is not None else None
            if key is not None:
                self._deleted.setdefault(slot_ms, set()).add(key)
            return
        if magic & ROLL:
            if is_old and slot_ms < self._done_ms:
                return
            self._rolls.add(slot_ms + 1, position)
            return
        due_ms = slot_ms + self._precision_ms
        if record is not None:
            due_ms = max(self._due_ms(record), slot_ms + 1)
        if not (is_old and due_ms <= self._done_ms):
            self.due.add(due_ms, position)

    def _due_ms(self, record: Record) -> int:
        out_ms = int(value_of(record.properties, _OUT) or 0)
        return exact_due_ms(
            record.properties, self._cut_down(out_ms), record.store_time_ms, self._precision_ms
        )

    # --- loading

    def _load(self, work: Slice) -> None:
        """Read the slots of the near future, as far as the slice lasts."""
        if self._loading is None:
            until_ms = self._cut_down(work.now_ms + AHEAD_MS) + self._precision_ms
            if until_ms <= self._loaded_ms or self.due.count > LOADED_MAX:
                return
            self._loading = self._load_until(until_ms)
        for _ in self._loading:
            work.done(_CHUNK)
            if work.is_over or self.due.count > 2 * LOADED_MAX:
                return
        self._loading = None

    def _load_until(self, until_ms: int) -> Iterator[None]:
        begin_ms, self._loaded_ms = self._loaded_ms, until_ms
        end = self.files.log.end  # later ones go into the table by themselves
        for slot_ms in self.files.wheel.occupied(begin_ms, until_ms):
            self._load_floor_ms = slot_ms
            yield from self._load_slot(slot_ms, end)
        self._load_floor_ms = until_ms

    def _load_slot(self, slot_ms: int, end: int) -> Iterator[None]:
        places, magics = array("q"), array("b")
        slot = self.files.wheel.get(slot_ms)
        for at, unit in self.files.chain(NONE if slot is None else slot.last):
            if unit is None:
                log.error("the timer log is damaged at the second %d: it is built again", slot_ms)
                self.files.forget()
                self.due, self._rolls = DueTable(), DueTable()
                end = self._late[0][1] if self._late else self.files.queue_offset
                self._begin_rebuild(end, self.read_ms)
                self.files.queue_offset = self._store.queue_offsets(TIMER_TOPIC, 0)[0]
                return
            if at < end:
                places.append(unit.position)
                magics.append(unit.magic & (ROLL | DELETE))
                if len(places) % _STEP_UNITS == 0:
                    yield
        is_begun = slot_ms < self._done_ms  # maybe some of it is delivered
        is_over = slot_ms + self._precision_ms <= self._clock.now_ms() and not is_begun
        if is_over:
            self._over_until_ms = max(self._over_until_ms, slot_ms + self._precision_ms)
        marks = [i for i, magic in enumerate(magics) if magic == DELETE] if any(magics) else []
        for number, index in enumerate(chain(marks, reversed(range(len(places))))):
            position, record = places[index], None
            if number < len(marks) or not is_over:
                record = read_record(self._store.reader.view_at(position))
            is_old = position < self.files.old_end
            self._into_table(slot_ms, position, magics[index], record, is_old=is_old)
            if number % _CHUNK == 0:
                yield

    # --- delivering

    def deliver(self, work: Slice) -> None:
        """Append what is due, as long as the slice lasts. Raises StoreError."""
        dequeued = f"TIMER_DEQUEUE_MS\x01{work.now_ms}\x02".encode()
        for table, put in ((self._rolls, self._roll), (self.due, self._put)):
            while not work.is_over and (chunk := table.take(work.now_ms, _CHUNK)):
                done = 0
                try:
                    for due_ms, position in chunk:
                        put(due_ms, position, dequeued)
                        done += 1
                finally:
                    self._taken.append((table, chunk[:done]))
                    table.give_back(chunk[done:])
                work.done(len(chunk))

    def _put(self, due_ms: int, position: int, dequeued: bytes) -> None:
        record = self._record(position)
        if record is None:
            return
        deleted = self._deleted.get(self._slot_of(due_ms)) if self._deleted else None
        if deleted and (_key_of(record.properties) in deleted):
            self.recalled += 1
            name = value_of(record.properties, _REAL_TOPIC) or b""
            self._topics.append(topic_name(name))
            return
        added = b"TIMER_ENQUEUE_MS\x01%d\x02" % self._cut_down(record.store_time_ms)
        topic = self._redelivery.put(record, added + dequeued)
        if topic is not None:
            self._topics.append(topic)

    def _record(self, position: int) -> Record | None:
        record = read_record(self._store.reader.view_at(position))
        if record is None:
            log.error("the timed message at %d of the commit log is gone: not delivered", position)
        return record

    def _roll(self, _due_ms: int, position: int, dequeued: bytes) -> None:
        """Put the message into the timer's queue again: it is nearer now."""
        record = self._record(position)
        if record is None:
            return
        own = record.all_properties()
        if TIMER_DELETES not in own:
            self._topics.append(own.get("REAL_TOPIC", ""))
        times = own.get("TIMER_ROLL_TIMES", "0")
        own["TIMER_DELIVER_MS"] = str(self._due_ms(record) - self._clock.lead_ms)
        own["TIMER_ROLL_TIMES"] = str(int(times) + 1 if times.isdigit() else 1)
        own["TIMER_ENQUEUE_MS"] = str(self._cut_down(record.store_time_ms))
        own |= as_dict(dequeued.decode())
        self._intake.append(record.draft(TIMER_TOPIC, 0, own))

    def settle(self, *, is_stored: bool) -> None:
        """What `deliver` put is stored, or has to be put again."""
        taken, self._taken = self._taken, []
        topics, self._topics = self._topics, []
        if not is_stored:
            for table, chunk in taken:
                table.give_back(chunk)
            return
        for topic in topics:
            self._count(topic, -1)
        self.delivered += sum(len(chunk) for table, chunk in taken if table is self.due)
        self._has_delivered |= any(chunk for _, chunk in taken)

    def _slot_of(self, due_ms: int) -> int:
        return self._cut_down(due_ms - 1)

    # --- the work

    def prepare(self, work: Slice) -> None:
        """Load what comes next, and take in what is new. Seconds that are over and have nothing
        left in the table are read."""
        now_ms, next_ms = self._cut_down(work.now_ms), self.next_ms
        limit_ms = min(now_ms, self._load_floor_ms)
        if next_ms is not None:
            limit_ms = min(limit_ms, self._slot_of(next_ms))
        if limit_ms > self.read_ms:
            self.read_ms = limit_ms
            while self._late and self._late[0][0] < limit_ms:
                self._late.popleft()
            for slot_ms in [slot for slot in self._deleted if slot < limit_ms]:
                del self._deleted[slot_ms]
        self._load(work)
        if self._is_far_behind(work.now_ms):
            return
        low = self._store.queue_offsets(TIMER_TOPIC, 0)[0]
        self.files.queue_offset = max(self.files.queue_offset, low)
        units = self._store.reader.sound_units
        new = entries(self._store, TIMER_TOPIC, 0, self.files.queue_offset, units)
        for entry in takewhile(lambda _: not work.is_over, new):
            self._take_one(entry, now_ms)
            self.files.queue_offset += 1
            work.done()
        self.files.log.write()

    @property
    def next_ms(self) -> int | None:
        """When there is something to deliver, as far as it is loaded."""
        times = [time for time in (self.due.next_ms, self._rolls.next_ms) if time is not None]
        return min(times, default=None)

    @property
    def is_behind(self) -> bool:
        """Is there something to load or to take in right now?"""
        is_loading = self._loading is not None and self.due.count <= 2 * LOADED_MAX
        return is_loading or (
            self.queue_behind > 0 and not self._is_far_behind(self._clock.now_ms())
        )

    def _is_far_behind(self, now_ms: int) -> bool:
        """Return whether undelivered messages lie so far back that a new one could take the slot
        of one of them, one turn of the wheel later: they are delivered first."""
        return now_ms - self.read_ms >= SLOTS // 2 * self._precision_ms

    # --- what waits

    def pending(self, slot_ms: int, unit: int) -> Iterator[Waiting]:
        """The messages that wait, second by second, each from its last to its first.

        `slot_ms` and `unit` are where an earlier look stopped; 0 and FROM_END at first.
        """
        start_ms = max(slot_ms, self.read_ms)
        if slot_ms == start_ms and unit != FROM_END:
            yield from self._pending_of(slot_ms, unit, self._listed.get(slot_ms, set()))
            start_ms += self._precision_ms
        step_ms = _LIST_SLOTS * self._precision_ms
        end_ms = self.read_ms + SLOTS // 2 * self._precision_ms
        for begin_ms in range(start_ms, end_ms, step_ms):
            for found_ms in self.files.wheel.occupied(begin_ms, min(begin_ms + step_ms, end_ms)):
                slot = self.files.wheel.get(found_ms)
                if slot is not None:
                    self._listed = {found_ms: set()}
                    yield from self._pending_of(found_ms, slot.last, self._listed[found_ms])
            yield Waiting(None, 0, f"T:{begin_ms + step_ms}:{FROM_END}")

    def _pending_of(self, slot_ms: int, position: int, deleted: set[bytes]) -> Iterator[Waiting]:
        """A mark stands behind the message it means: it is seen first."""
        for _, unit in self.files.chain(position):
            if unit is None:
                return
            record = read_record(self._store.reader.view_at(unit.position))
            if record is not None and unit.magic & DELETE:
                deleted.add(value_of(record.properties, _DELETES) or b"")
                record = None
            if record is not None and deleted and _key_of(record.properties) in deleted:
                record = None
            due_ms = self._due_ms(record) if record is not None else 0
            yield Waiting(record, due_ms, f"T:{slot_ms}:{unit.previous}")

    # --- saving

    def save(self, *, is_last: bool = False) -> Generator[Callable[[], None]]:
        """What the files lack; see `TimerFiles.save`. The last one of all says the time at any
        rate."""
        if self.files.queue_offset < self._rebuild_to:
            return  # by the old checkpoint the rest of the queue is known
        must = self._has_delivered or (is_last and self.files.checkpoint.time_ms > 0)
        self._has_delivered = False
        now_ms, next_ms = self._clock.now_ms(), self.next_ms
        # What the last start knew to be delivered stays so, loaded or not.
        done_ms = max(min(now_ms, self._load_floor_ms), self._done_ms)
        if next_ms is not None:
            # A message of a slot that was over when it was loaded is in the table for the slot's
            # end. Its own time may be any of the slot: nothing of the slot counts as done.
            is_exact = next_ms > self._over_until_ms
            done_ms = min(done_ms, next_ms - 1 if is_exact else self._slot_of(next_ms))
        is_written = False
        try:
            replay = self._late[0][1] if self._late else self.files.queue_offset
            yield from self.files.save(self.read_ms, now_ms, done_ms, replay, must=must)
            is_written = True
        finally:
            self._has_delivered |= must and not is_written


def _key_of(properties: bytes) -> bytes:
    """What takes a message back: its topic and id (spec/delivery.md §2)."""
    name = value_of(properties, _REAL_TOPIC) or b""
    return name + b"+" + (value_of(properties, _UNIQUE_ID) or b"")
