"""What is due when: places in the commit log by the millisecond.

Held only for the seconds that come next. A place is 8 bytes in an array for its millisecond, so a
hundred thousand messages of one second take less than a megabyte; a heap says which is first.

Timed messages: from the queue of rmq_sys_wheel_timer to their topics, to the millisecond.

    take in   each new message of the queue is put into the slot of its second (`timer_files`)
    load      the slots of the next second and a half are read: each message's exact time stands in
              its properties, and it goes into the table of what is due (`due`)
    deliver   whatever in the table is due is appended to its own topic
    close     a second that is over and whose messages are all stored is done: `read_ms` moves on

A message that is stored for a second that is loaded already goes into the table at once; one for a
second that is over goes into the first that is open. A message that is due later than the wheel
reaches is put into the queue again on the way (it *rolls*). A mark that takes back a message of its
second is loaded before the others and has no other effect (spec/delivery.md §2).

Real RocketMQ delivers a second's messages when it is over, up to a second late; here the second is
only where they lie.
"""

import heapq
import logging
from array import array
from collections.abc import Iterator
from itertools import takewhile
from typing import Final, NamedTuple

from sluicemq.broker.background import Slice
from sluicemq.broker.produce.intake import Intake
from sluicemq.broker.produce.redelivery import (
    Entry,
    Record,
    Redelivery,
    entries,
    read_record,
    topic_name,
)
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import TIMER_TOPIC
from sluicemq.broker.waiting.rewrite import TIMER_DELETES, TIMER_OUT, exact_due_ms
from sluicemq.broker.waiting.timer_files import Saving, TimerFiles, TimerMetrics
from sluicemq.clock import Clock
from sluicemq.errors import StoreError
from sluicemq.files import Files
from sluicemq.model.ids import tag_code
from sluicemq.record.codec import value_of
from sluicemq.store.store import Store
from sluicemq.store.timers import DEFAULT, DELETE, NONE, ROLL, SLOTS

Due = tuple[int, int]
"""(due in ms since 1970, place in the commit log)."""


class DueTable:
    """Entries by time; those of one millisecond in the order they came."""

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

    def clear(self) -> None:
        self._times.clear()
        self._places.clear()
        self._at.clear()
        self.count = 0


log = logging.getLogger(__name__)

AHEAD_MS: Final = 1500
"""So long before it begins, a slot is loaded: the sweep comes by five times a second."""
FROM_END: Final = -2
LOADED_MAX: Final = 200_000
"""No more slots are loaded while so many messages are in the table."""
_REBUILD_MARGIN_MS: Final = 60_000
_CHUNK: Final = 64
_LIST_SLOTS: Final = 8192
_OUT: Final = TIMER_OUT.encode()
_DELETES: Final = TIMER_DELETES.encode()
_REAL_TOPIC: Final = b"REAL_TOPIC"
_UNIQUE_ID: Final = b"UNIQ_KEY"


class TimedMessage(NamedTuple):
    """A message of a slot; `next_unit` is where the slot goes on (-1: nowhere, -2: at its end)."""

    slot_ms: int
    next_unit: int
    due_ms: int
    record: Record | None
    """None: taken back, no message, or gone."""


class Timers:
    """See the module. `step` works a slice; `settle` says whether what it put is stored."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        redelivery: Redelivery,
        intake: Intake,
        files: Files,
        clock: Clock,
    ) -> None:
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
        self.metrics = TimerMetrics(files, config.root, clock)
        self.due = DueTable()
        self.read_ms = 0
        """The first slot that may hold undelivered messages."""
        self._loaded_ms = 0  # slots before it are in the table, or being read
        self._load_floor_ms = 0  # slots before it are read
        self._loading: Iterator[None] | None = None
        self._queue_offset = 0
        self._done_ms = self._old_end = 0
        """What was due by then and lies before that place was delivered at the last checkpoint."""
        self._rebuild_end = 0  # messages before it were in the files that are built again
        self._deleted: dict[int, set[bytes]] = {}
        self._rolls = DueTable()
        self._taken: list[Due] = []
        self._rolled: list[Due] = []
        self._listed: dict[int, set[bytes]] = {}  # what is taken back of the slot listed last
        self._has_delivered = False  # since the last checkpoint
        self._topics: list[str] = []  # of what this slice has dealt with
        self.taken_in = self.delivered = self.lost = self.recalled = 0

    # --- the start

    def load(self) -> None:
        """Blocking. Raises StoreDamagedError."""
        start = self.files.load()
        now_ms = self._cut_down(self._clock.now_ms())
        oldest_ms = now_ms - (SLOTS // 2 - 60) * self._precision_ms
        self.read_ms = self._cut_down(start.read_ms)
        if start.is_rebuilt:
            self._rebuild_end = self._store.queue_offsets(TIMER_TOPIC, 0)[1]
            self.read_ms = max(min(self.read_ms, now_ms), oldest_ms)
        if not self.read_ms or not self._store.queue_exists(TIMER_TOPIC, 0):
            self.read_ms = now_ms
        self._loaded_ms = self._load_floor_ms = self.read_ms
        self._queue_offset = start.queue_offset
        self._done_ms, self._old_end = start.done_ms, start.old_end
        self.metrics.load()

    def _cut_down(self, time_ms: int) -> int:
        return time_ms - time_ms % self._precision_ms

    # --- taking in

    @property
    def queue_behind(self) -> int:
        """How many messages of the queue are not taken in."""
        return max(self._store.queue_offsets(TIMER_TOPIC, 0)[1] - self._queue_offset, 0)

    def _take_in(self, work: Slice) -> None:
        """New messages of the queue into their slots."""
        low = self._store.queue_offsets(TIMER_TOPIC, 0)[0]
        self._queue_offset = max(self._queue_offset, low)
        write_ms, units = self._cut_down(work.now_ms), self._store.reader.sound_units
        new = entries(self._store, TIMER_TOPIC, 0, self._queue_offset, units)
        for entry in takewhile(lambda _: not work.is_over, new):
            self._take_one(entry, write_ms)
            self._queue_offset += 1
            work.done()
        self.files.log.write()

    def _take_one(self, entry: Entry, write_ms: int) -> None:
        record = entry.record
        out = value_of(record.properties, _OUT) if record is not None else None
        if record is None or out is None or not out.isdigit():
            log.error("message %d of the timer's queue is not timed", self._queue_offset)
            self.lost += 1
            return
        slot_ms = self._cut_down(int(out))
        if self._queue_offset < self._rebuild_end and slot_ms + _REBUILD_MARGIN_MS < self.read_ms:
            return  # delivered before the files were lost
        slot_ms = max(slot_ms, self.read_ms)
        magic = DEFAULT
        if slot_ms - write_ms >= self._window_ms:
            magic |= ROLL
            # Looked at again when the wheel ends, or half-way when little would be left then.
            left_ms = slot_ms - write_ms - self._window_ms
            is_near = left_ms < self._window_slots // 3 * self._precision_ms
            slots = self._window_slots // 2 if is_near else self._window_slots
            slot_ms = write_ms + slots * self._precision_ms
        name = value_of(record.properties, _REAL_TOPIC) or b""
        if _DELETES in record.properties:
            magic |= DELETE
        else:
            self.metrics.add(topic_name(name), 1)
        self.files.add(
            slot_ms, magic, write_ms, entry.position, record.size_bytes, tag_code(topic_name(name))
        )
        self.taken_in += 1
        if slot_ms < self._loaded_ms:
            self._into_table(slot_ms, entry.position, magic, record)

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
        for is_whole in self.files.chain(slot_ms, end, places, magics):
            if not is_whole:
                self._rebuild(slot_ms)
                return
            yield
        is_begun = slot_ms < self._done_ms  # maybe some of it is delivered
        is_over = slot_ms + self._precision_ms <= self._clock.now_ms() and not is_begun
        for index in range(len(places)) if any(magics) else ():
            if magics[index] & DELETE and not magics[index] & ROLL:
                self._load_one(slot_ms, places[index], magics[index], needs_record=True)
        for index in range(len(places) - 1, -1, -1):
            if not magics[index] & DELETE or magics[index] & ROLL:
                self._load_one(slot_ms, places[index], magics[index], needs_record=not is_over)
            if index % _CHUNK == 0:
                yield

    def _load_one(self, slot_ms: int, position: int, magic: int, *, needs_record: bool) -> None:
        is_old = position < self._old_end
        record = read_record(self._store.reader.view_at(position)) if needs_record else None
        self._into_table(slot_ms, position, magic, record, is_old=is_old)

    def _rebuild(self, slot_ms: int) -> None:
        """The chain of a slot is broken: everything that waits is taken in anew."""
        log.error("the timer log is damaged at the second %d: it is built again", slot_ms)
        self.files.forget()
        self.due.clear()
        self._rolls.clear()
        low, self._rebuild_end = self._store.queue_offsets(TIMER_TOPIC, 0)
        self._queue_offset = low

    # --- delivering

    def deliver(self, work: Slice) -> None:
        """Append what is due, as long as the slice lasts. Raises StoreError."""
        while not work.is_over and (rolls := self._rolls.take(work.now_ms, 1)):
            try:
                self._roll(rolls[0][1], work.now_ms)
            except StoreError:
                self._rolls.give_back(rolls)
                raise
            self._rolled += rolls
            work.done()
        added_end = f"TIMER_DEQUEUE_MS\x01{work.now_ms}\x02".encode()
        while not work.is_over and (chunk := self.due.take(work.now_ms, _CHUNK)):
            for index, (due_ms, position) in enumerate(chunk):
                try:
                    self._put(due_ms, position, added_end)
                except StoreError:
                    self._taken += chunk[:index]
                    self.due.give_back(chunk[index:])
                    raise
            self._taken += chunk
            work.done(len(chunk))

    def _put(self, due_ms: int, position: int, added_end: bytes) -> None:
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
        topic = self._redelivery.put(record, added + added_end)
        if topic is not None:
            self._topics.append(topic)

    def _record(self, position: int) -> Record | None:
        record = read_record(self._store.reader.view_at(position))
        if record is None:
            self.lost += 1
            log.error("the timed message at %d of the commit log is gone: not delivered", position)
        return record

    def _roll(self, position: int, now_ms: int) -> None:
        """Put the message into the timer's queue again: it is nearer now."""
        record = self._record(position)
        if record is None:
            return
        own = record.all_properties()
        if TIMER_DELETES not in own:
            self._topics.append(own.get("REAL_TOPIC", ""))
        times = own.get("TIMER_ROLL_TIMES", "0")
        own["TIMER_DELIVER_MS"] = str(self._due_ms(record))
        own["TIMER_ROLL_TIMES"] = str(int(times) + 1 if times.isdigit() else 1)
        own["TIMER_ENQUEUE_MS"] = str(self._cut_down(record.store_time_ms))
        own["TIMER_DEQUEUE_MS"] = str(now_ms)
        self._intake.append(record.draft(TIMER_TOPIC, 0, own))

    def settle(self, *, is_stored: bool) -> None:
        """What `deliver` put is stored, or has to be put again."""
        taken, self._taken = self._taken, []
        rolled, self._rolled = self._rolled, []
        topics, self._topics = self._topics, []
        if not is_stored:
            self.due.give_back(taken)
            self._rolls.give_back(rolled)
            return
        for topic in topics:
            self.metrics.add(topic, -1)
        self.delivered += len(taken)
        self._has_delivered |= bool(taken or rolled)

    def _slot_of(self, due_ms: int) -> int:
        return self._cut_down(due_ms - 1)

    def _move_on(self, now_ms: int) -> None:
        """Seconds that are over and have nothing left in the table are read."""
        limit_ms = min(self._cut_down(now_ms), self._load_floor_ms)
        next_ms = self.next_ms
        if next_ms is not None:
            limit_ms = min(limit_ms, self._slot_of(next_ms))
        if limit_ms > self.read_ms:
            self.read_ms = limit_ms
            if self._deleted:
                for slot_ms in [slot for slot in self._deleted if slot < limit_ms]:
                    del self._deleted[slot_ms]

    # --- the work

    def prepare(self, work: Slice) -> None:
        """Load what comes next, and take in what is new."""
        self._move_on(work.now_ms)
        self._load(work)
        if work.now_ms - self._loaded_ms < SLOTS // 2 * self._precision_ms:
            self._take_in(work)

    @property
    def next_ms(self) -> int | None:
        """When there is something to deliver, as far as it is loaded."""
        times = [time for time in (self.due.next_ms, self._rolls.next_ms) if time is not None]
        return min(times, default=None)

    @property
    def is_behind(self) -> bool:
        """Is there something to load or to take in right now?"""
        is_loading = self._loading is not None and self.due.count <= 2 * LOADED_MAX
        return is_loading or self.queue_behind > 0

    # --- what waits

    def pending(self, slot_ms: int, unit: int) -> Iterator[TimedMessage]:
        """The messages that wait, second by second, each from its last to its first.

        `slot_ms` and `unit` are where an earlier look stopped; 0 and FROM_END at first.
        """
        start_ms = max(slot_ms, self.read_ms)
        if slot_ms == start_ms and unit != FROM_END:
            deleted = self._listed.get(slot_ms, set())
            yield from self._pending_of(slot_ms, unit, deleted)
            start_ms += self._precision_ms
        step_ms = _LIST_SLOTS * self._precision_ms
        end_ms = self.read_ms + SLOTS // 2 * self._precision_ms
        for begin_ms in range(start_ms, end_ms, step_ms):
            for found_ms in self.files.wheel.occupied(begin_ms, min(begin_ms + step_ms, end_ms)):
                slot = self.files.wheel.get(found_ms)
                if slot is not None:
                    self._listed = {found_ms: set()}
                    yield from self._pending_of(found_ms, slot.last, self._listed[found_ms])
            yield TimedMessage(begin_ms + step_ms, FROM_END, 0, None)

    def _pending_of(
        self, slot_ms: int, position: int, deleted: set[bytes]
    ) -> Iterator[TimedMessage]:
        """A mark stands behind the message it means: it is seen first."""
        while position != NONE and (unit := self.files.log.unit(position)) is not None:
            if unit.previous >= position:
                return
            position = unit.previous
            record = read_record(self._store.reader.view_at(unit.position))
            if record is not None and unit.magic & DELETE:
                deleted.add(value_of(record.properties, _DELETES) or b"")
                record = None
            if record is not None and deleted and _key_of(record.properties) in deleted:
                record = None
            due_ms = self._due_ms(record) if record is not None else 0
            yield TimedMessage(slot_ms, position, due_ms, record)

    @property
    def count(self) -> int:
        """How many messages wait, as far as the metrics know."""
        return self.metrics.total

    # --- saving

    def begin_save(self, *, is_last: bool = False) -> Saving | None:
        """What the files lack; see `TimerFiles`. The last one of all says the time at any rate.
        Raises OSError."""
        must = self._has_delivered or (is_last and self.files.checkpoint.time_ms > 0)
        self._has_delivered = False
        now_ms, next_ms = self._clock.now_ms(), self.next_ms
        done_ms = min(now_ms, self._load_floor_ms)
        if next_ms is not None:
            done_ms = min(done_ms, next_ms - 1)
        return self.files.begin_save(self.read_ms, self._queue_offset, now_ms, done_ms, must=must)

    def end_save(self, saving: Saving, *, is_written: bool) -> None:
        """See `TimerFiles`."""
        self.files.end_save(saving, is_written=is_written)
        self._has_delivered |= not is_written


def _key_of(properties: bytes) -> bytes:
    """What takes a message back: its topic and id (spec/delivery.md §2)."""
    name = value_of(properties, _REAL_TOPIC) or b""
    return name + b"+" + (value_of(properties, _UNIQUE_ID) or b"")
