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

Wheel, log and checkpoint are derived from the queue (`store.timers.state`). After a start that is
not sure what its predecessor delivered, a message that was due before the start waits until the
log has been asked for its delivery (`store.timers.overdue`).
"""

import heapq
import logging
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator
from itertools import chain, takewhile
from typing import Final, NamedTuple

from sluicemq.broker.background import TimeSlice
from sluicemq.broker.produce.intake import (
    DueMessageDelivery,
    MessageIntake,
    QueueEntry,
    Record,
    decode_topic_name,
    iter_queue,
    read_record,
)
from sluicemq.broker.settings import Settings
from sluicemq.clock import SteadyClock
from sluicemq.files import Files
from sluicemq.model.ids import tag_code
from sluicemq.model.system_names import TIMER_TOPIC
from sluicemq.numbers import natural
from sluicemq.record.codec import as_dict, value_of
from sluicemq.store.store import Store
from sluicemq.store.timers.files import MAGIC_DEFAULT, MAGIC_DELETE, MAGIC_ROLL, NO_UNIT, SLOTS
from sluicemq.store.timers.overdue import DeliveryLookup, OverdueMessage
from sluicemq.store.timers.placing import (
    REAL_TOPIC_KEY,
    TIMER_DELETES,
    TIMER_DELETES_KEY,
    SlotRules,
    recall_key,
    slot_for_due_time,
)
from sluicemq.store.timers.state import TimerFiles

log = logging.getLogger(__name__)

AHEAD_MS: Final = 1500
"""So long before it begins, a slot is loaded: the sweep comes by five times a second."""
FROM_END: Final = -2
LOADED_MAX: Final = 200_000
"""No more slots are loaded while so many messages are in the table."""
_CHUNK: Final = 64
_STEP_UNITS: Final = 256
_LIST_SLOTS: Final = 8192
_TIMER_TOPIC: Final = TIMER_TOPIC.encode()
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
        redelivery: DueMessageDelivery,
        intake: MessageIntake,
        files: Files,
        clock: SteadyClock,
        count: Callable[[str, int], None],
        forget_counts: Callable[[], None] = lambda: None,
    ) -> None:
        """`count` is told of so many messages of a topic that wait more, or fewer; `forget_counts`
        when all of them are going to be counted again."""
        config = settings.store
        self._store = store
        self._redelivery = redelivery
        self._intake = intake
        self._clock = clock
        self._precision_ms = precision_ms = config.timer_precision_ms
        self._placing = SlotRules(precision_ms, config.timer_roll_window_slots)
        self._slot_start = self._placing.slot_start
        self.files = TimerFiles(
            store, files, config.root, log_file_bytes=config.timer_log_file_bytes,
            precision_ms=precision_ms,
        )  # fmt: skip
        self._count = count
        self._forget_counts = forget_counts
        self.due = DueTable()
        self.read_ms = 0
        """The first slot that may hold undelivered messages."""
        self.passed_ms = 0  # at the start, all due before it was delivered; 0 when not known
        self._loaded_ms = 0  # slots before it are in the table, or being read
        self._load_floor_ms = 0  # slots before it are read
        self._loading: Iterator[None] | None = None
        self._taken_in_ms = 0  # all that was stored before is taken in
        self._done_ms = 0  # what was due by then was delivered at the last checkpoint
        self._known_offset = (
            NO_UNIT  # of the queue: messages before it were known to that checkpoint
        )
        self._over_until_ms = 0  # of slots before it the exact times were not read
        # Files that are built again up to `to`: messages below `end` are delivered before `ms`.
        self._rebuild_end = self._rebuild_ms = self._rebuild_to = self._known_end = 0
        # The first of those in a second that came too late for their own.
        self._late: deque[tuple[int, int]] = deque()
        self._deleted: dict[int, set[bytes]] = {}
        self._rolls = DueTable()
        self._taken: list[tuple[DueTable, list[Due]]] = []
        self._listed: dict[int, set[bytes]] = {}  # what is taken back of the slot listed last
        self._has_delivered = False  # since the last checkpoint
        self._topics: list[str] = []  # of what this slice has dealt with
        # Messages that lie before `end` and were due by `start_ms` may be delivered already: where
        # that is not known, they wait in `overdue`. Marks among them are in `late_marks`.
        self._overdue: DeliveryLookup | None = None
        self._settling: Generator[None, None, list[OverdueMessage]] | None = None
        self._start_ms = self._start_end = 0
        self._late_marks: set[bytes] = set()
        # What was delivered and is due later than the last checkpoint's `done_ms` lies behind the
        # floor; the latest of it is due by `delivered_ms`.
        self._floor = self._delivered_ms = 0
        self._last_skipped: QueueEntry | None = None  # the last of the queue, if it has no unit
        self._damage = ""  # why wheel and log have to be built again, at the next opportunity
        self._damage_ms = 0  # nothing that is due from then on counts as done
        self.delivered = self.recalled = 0

    # --- the start

    def load(self) -> None:
        """Blocking. Raises OSError."""
        start = self.files.load()
        checkpoint = self.files.checkpoint
        # If the wall clock has been set back, messages would wait for a time that has passed, and
        # slots that are delivered would be read again.
        if start.is_exact:
            self._clock.raise_to(max(self._slot_start(checkpoint.read_ms), checkpoint.done_ms))
        self._clock.raise_to(self._newest_ms())
        now_ms = self._slot_start(self._clock.now_ms())
        oldest_ms = now_ms - (SLOTS // 2 - 60) * self._precision_ms
        self.read_ms = self._slot_start(checkpoint.read_ms) if start.is_exact else now_ms
        if start.is_rebuilt:
            self.read_ms = max(min(self.read_ms, now_ms), oldest_ms)
            is_exact = start.is_exact
            self._begin_rebuild(
                checkpoint.replay_offset if is_exact else 0, checkpoint.read_ms if is_exact else 0
            )
        if not self.read_ms or not self._store.queue_exists(TIMER_TOPIC, 0):
            self.read_ms = now_ms
        self._loaded_ms = self._load_floor_ms = self.read_ms
        self.passed_ms = self._slot_start(checkpoint.read_ms) if start.is_exact else 0
        self._done_ms = checkpoint.done_ms if start.is_exact else 0
        self._known_offset = self.files.queue_offset if start.is_settled else NO_UNIT
        self._floor = checkpoint.log_position if start.is_exact else 0
        self._begin_doubting()
        if start.is_settled:
            self._overdue = None

    def _newest_ms(self) -> int:
        """Return what the clock said when the newest timed message was stored, 0 without one."""
        low, high = self._store.queue_offsets(TIMER_TOPIC, 0)
        if low == high:
            return 0
        entry = next(iter_queue(self._store, TIMER_TOPIC, 0, high - 1), None)
        if entry is None or entry.record is None:
            return 0
        out_ms = entry.record.get_number("TIMER_OUT_MS")
        if out_ms is None:
            return entry.record.store_time_ms
        return self._placing.stored_at_ms(entry.record, self._slot_start(out_ms))

    def _begin_doubting(self) -> None:
        """From now on, what is in the log and due may be delivered already. A new master shows what
        its slaves have; a recall behind it was answered by the master before, and holds."""
        self._known_end = self._store.committed_offset(TIMER_TOPIC, 0)
        self._start_ms, self._start_end = self._clock.now_ms(), self._store.written_offset
        self._overdue = DeliveryLookup(self._store, self._start_end)
        self._settling = None
        self._late_marks = set()
        self._delivered_ms = self._start_ms

    def _begin_rebuild(self, replay_offset: int, read_ms: int) -> None:
        """Messages below the offset are delivered when their second is before `read_ms`."""
        self._late.clear()
        self._rebuild_end, self._rebuild_ms = replay_offset, read_ms
        self._rebuild_to = self._store.committed_offset(TIMER_TOPIC, 0)
        self._forget_counts()

    def _damaged(self, reason: str, due_ms: int) -> None:
        """A message that is due then, or later, cannot be found by wheel and log."""
        if not self._damage or due_ms < self._damage_ms:
            self._damage, self._damage_ms = reason, due_ms

    def _rebuild_now(self) -> None:
        """Build wheel and log again while the broker runs, as a start would. Raises OSError."""
        done_ms, replay_offset = self._done_by(self._clock.now_ms()), self._replay_offset
        reason, self._damage = self._damage, ""
        self.files.start_rebuild(reason)
        self.due, self._rolls, self._deleted = DueTable(), DueTable(), {}
        self._loading, self._last_skipped = None, None
        self._loaded_ms = self._load_floor_ms = self.read_ms
        self._done_ms, self._known_offset = done_ms, NO_UNIT
        self._begin_rebuild(replay_offset, self.read_ms)
        self.files.log_end_at_start = self.files.log_position_of(replay_offset)
        self._begin_doubting()

    # --- taking in

    @property
    def queue_behind(self) -> int:
        """How many messages of the queue are not taken in."""
        return max(self._store.queue_offsets(TIMER_TOPIC, 0)[1] - self.files.queue_offset, 0)

    def _take_one(self, entry: QueueEntry, write_ms: int) -> None:
        record, offset = entry.record, self.files.queue_offset
        place = self._placing.assign_slot(record, write_ms) if record is not None else None
        if record is None or place is None:
            what = "is gone" if record is None else "says no time"
            log.error(
                "the timed message %d, at %d, %s: it is not delivered", offset, entry.position, what
            )
            return
        slot_ms, magic = place
        self._taken_in_ms = max(self._taken_in_ms, self._placing.stored_at_ms(record, slot_ms))
        is_old = offset < self._rebuild_end
        if is_old and slot_ms < self._rebuild_ms:
            self._last_skipped = entry
            return  # delivered before the files were lost
        if slot_ms < self.read_ms:
            if self._waits_unlisted(entry, record, slot_ms, magic):
                self._last_skipped = entry
                return
            slot_ms = self.read_ms
            self._note_late(slot_ms, offset)
        self._list(record, slot_ms, magic, write_ms)
        self._last_skipped = None
        if slot_ms < self._loaded_ms:
            self._into_table(slot_ms, entry.position, magic, record, is_old=is_old)

    def _list(self, record: Record, slot_ms: int, magic: int, write_ms: int) -> None:
        """Put a message into the wheel."""
        name = decode_topic_name(value_of(record.properties, REAL_TOPIC_KEY) or b"")
        if not magic & MAGIC_DELETE:
            self._count(name, 1)
        self.files.add_unit(
            slot_ms, magic, write_ms, record.physical_offset, record.size_bytes, tag_code(name)
        )

    def _note_late(self, slot_ms: int, offset: int) -> None:
        if not self._late or self._late[-1][0] != slot_ms or self._late[-1][1] > offset:
            self._late.append((slot_ms, offset))

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

        `is_old`: of before the last checkpoint, and maybe delivered then.
        """
        if magic & MAGIC_DELETE and not magic & MAGIC_ROLL:
            key = value_of(record.properties, TIMER_DELETES_KEY) if record is not None else None
            if key is not None:
                self._deleted.setdefault(slot_ms, set()).add(key)
            return
        table, due_ms = self.due, slot_ms + self._precision_ms
        if magic & MAGIC_ROLL:
            if is_old and slot_ms < self._done_ms:
                return
            table, due_ms = self._rolls, slot_ms + 1
        elif record is not None:
            due_ms = max(self._placing.compute_due_ms(record), slot_ms + 1)
        if is_old and due_ms <= self._done_ms and not magic & MAGIC_ROLL:
            return
        message = OverdueMessage(position, slot_ms, due_ms, magic, has_unit=True)
        floor = self._floor if is_old else position
        if record is None or not self._waits(record, message, floor):
            table.add(due_ms, position)

    # --- what may be delivered already

    def _waits(self, record: Record, message: OverdueMessage, floor: int) -> bool:
        """Let a message wait, if it may be delivered already; its delivery lies behind `floor`.

        What belongs to a topic with a gate does not wait: the gate knows what is delivered.
        """
        overdue = self._overdue
        if (
            overdue is None
            or message.due_ms > self._start_ms
            or message.position >= self._start_end
            or decode_topic_name(value_of(record.properties, REAL_TOPIC_KEY) or b"")
            in self._redelivery.gates
        ):
            return False
        overdue.add(record, message, floor, is_roll=bool(message.magic & MAGIC_ROLL))
        return True

    def _waits_unlisted(self, entry: QueueEntry, record: Record, slot_ms: int, magic: int) -> bool:
        """As `_waits`, for a message whose second is over, and which the wheel need not hold."""
        if self._overdue is None or entry.position >= self._start_end:
            return False
        if magic & MAGIC_DELETE and not magic & MAGIC_ROLL:
            self._late_marks.add(value_of(record.properties, TIMER_DELETES_KEY) or b"")
            return True
        gate = self._redelivery.gates.get(
            decode_topic_name(value_of(record.properties, REAL_TOPIC_KEY) or b"")
        )
        if gate is not None:
            return gate(record) is None
        message = OverdueMessage(entry.position, slot_ms, slot_ms + 1, magic, has_unit=False)
        return self._waits(record, message, entry.position)

    @property
    def _is_doubtful(self) -> bool:
        """Does a message wait, or is there more of the queue that a rebuild has to take in?"""
        return self._has_waiting or self.files.queue_offset < self._rebuild_to

    @property
    def _lacks_known(self) -> bool:
        """Return whether some of the queue that was there at the start is not taken in."""
        return self.files.queue_offset < self._known_end

    @property
    def _has_waiting(self) -> bool:
        """Return whether it is open of some overdue message whether it was delivered."""
        overdue = self._overdue
        return (overdue is not None and overdue.waiting_count > 0) or self._settling is not None

    @property
    def _can_settle(self) -> bool:
        """Return whether there are overdue messages, and all is taken in that decides about them,
        or no room is left for more of them."""
        overdue = self._overdue
        if self._settling is not None:
            return True
        if overdue is None or not overdue.waiting_count:
            return False
        is_all = self._loading is None and not self.queue_behind and not self._lacks_known
        return is_all or overdue.is_full

    def _settle_overdue(self, work: TimeSlice) -> None:
        """Find out which of those that wait are delivered; the others are due now."""
        overdue = self._overdue
        if overdue is None:
            return
        if self._settling is None:
            if not self._can_settle:
                return
            self._settling = overdue.find_undelivered()
        try:
            while not work.is_over:
                next(self._settling)
                work.count_done(_CHUNK)
        except StopIteration as end:
            self._settling = None
            for message in end.value:
                self._redeliver(message)

    def _redeliver(self, message: OverdueMessage) -> None:
        """A message was not delivered before the start."""
        record = self._record(message.position, message.due_ms)
        if record is None:
            return
        topic = decode_topic_name(value_of(record.properties, REAL_TOPIC_KEY) or b"")
        is_roll = bool(message.magic & MAGIC_ROLL)
        if not self._store.is_record_live(topic, self._floor or message.position):
            log.info("a timed message of the topic %s, which was deleted, is passed over", topic)
            return
        if not is_roll and recall_key(record.properties) in self._late_marks:
            self.recalled += 1
            return
        table, due_ms = (self._rolls if is_roll else self.due), message.due_ms
        if not message.has_unit:
            slot_ms = self.read_ms
            self._note_late(slot_ms, record.queue_offset)
            self._list(record, slot_ms, message.magic, self._slot_start(self._clock.now_ms()))
            if slot_ms >= self._loaded_ms:
                return
            due_ms = slot_ms + 1
        table.add(due_ms, message.position)

    # --- loading

    def _load(self, work: TimeSlice) -> None:
        """Read the slots of the near future, as far as the slice lasts."""
        if self._loading is None:
            until_ms = self._slot_start(work.now_ms + AHEAD_MS) + self._precision_ms
            if until_ms <= self._loaded_ms or self.due.count > LOADED_MAX:
                return
            self._loading = self._load_until(until_ms)
        for _ in self._loading:
            work.count_done(_CHUNK)
            if work.is_over or self.due.count > 2 * LOADED_MAX:
                return
        self._loading = None

    def _load_until(self, until_ms: int) -> Iterator[None]:
        begin_ms, self._loaded_ms = self._loaded_ms, until_ms
        end = self.files.log.end  # later ones go into the table by themselves
        for slot_ms in self.files.wheel.iter_occupied_ms(begin_ms, until_ms):
            self._load_floor_ms = slot_ms
            yield from self._load_slot(slot_ms, end)
            if self._damage:
                return
        self._load_floor_ms = until_ms

    def _load_slot(self, slot_ms: int, end: int) -> Iterator[None]:
        places, magics = array("q"), array("b")
        slot = self.files.wheel.get(slot_ms)
        for at, unit in self.files.iter_chain(slot_ms, NO_UNIT if slot is None else slot.last_unit):
            if unit is None:
                self._damaged(f"the timer log is damaged at the second {slot_ms}", slot_ms + 1)
                return
            if at < end:
                places.append(unit.position)
                magics.append(unit.magic & (MAGIC_ROLL | MAGIC_DELETE))
                if len(places) % _STEP_UNITS == 0:
                    yield
        is_begun = slot_ms < self._done_ms  # maybe some of it is delivered
        is_over = slot_ms + self._precision_ms <= self._clock.now_ms() and not is_begun
        if self._overdue is not None and slot_ms <= self._start_ms:
            is_over = False  # maybe delivered: the record says so
        if is_over:
            self._over_until_ms = max(self._over_until_ms, slot_ms + self._precision_ms)
        marks = (
            [i for i, magic in enumerate(magics) if magic == MAGIC_DELETE] if any(magics) else []
        )
        for number, index in enumerate(chain(marks, reversed(range(len(places))))):
            position, record = places[index], None
            if number < len(marks) or not is_over:
                record = read_record(self._store.committed_record_at(position))
            is_old = position < self.files.log_end_at_start
            self._into_table(slot_ms, position, magics[index], record, is_old=is_old)
            if number % _CHUNK == 0:
                yield

    # --- delivering

    def deliver(self, work: TimeSlice) -> None:
        """Append what is due, as long as the slice lasts. Raises StoreError."""
        dequeued = f"TIMER_DEQUEUE_MS\x01{work.now_ms}\x02".encode()
        for table, put, until_ms in (
            (self._rolls, self._roll, work.now_ms),
            (self.due, self._put, self._deliverable_until(work.now_ms)),
        ):
            while not work.is_over and (chunk := table.take(until_ms, _CHUNK)):
                done = 0
                try:
                    for due_ms, position in chunk:
                        put(due_ms, position, dequeued)
                        done += 1
                finally:
                    self._taken.append((table, chunk[:done]))
                    table.give_back(chunk[done:])
                work.count_done(len(chunk))

    def _deliverable_until(self, now_ms: int) -> int:
        """Return up to which due time messages may be delivered at `now_ms`.

        A recall that was stored before a message is due holds, so the message waits until the
        queue is taken in up to that time. Only timers that are far behind do not wait: they take in
        nothing before they have delivered.
        """
        if self._is_far_behind(now_ms) or not (self.queue_behind or self._lacks_known):
            return now_ms
        return min(now_ms, self._taken_in_ms)

    @property
    def wakes_ms(self) -> int | None:
        """Return when there is something to deliver, as far as it is loaded; None if nothing may be
        delivered before the queue shows more of what was there at the start."""
        next_ms = self.next_ms
        if next_ms is None or next_ms <= self._deliverable_until(next_ms):
            return next_ms
        return next_ms if self.queue_behind else None

    def _put(self, due_ms: int, position: int, dequeued: bytes) -> None:
        record = self._record(position, due_ms)
        if record is None:
            return
        deleted = (
            self._deleted.get(slot_for_due_time(due_ms, self._precision_ms))
            if self._deleted
            else None
        )
        if deleted and (recall_key(record.properties) in deleted):
            self.recalled += 1
            name = value_of(record.properties, REAL_TOPIC_KEY) or b""
            self._topics.append(decode_topic_name(name))
            return
        added = b"TIMER_ENQUEUE_MS\x01%d\x02" % self._slot_start(record.store_time_ms)
        topic = self._redelivery.deliver(record, added + dequeued)
        if topic is not None:
            self._topics.append(topic)

    def _record(self, position: int, due_ms: int) -> Record | None:
        """Return the timed message at a position of the commit log; None if it is gone, or if the
        unit that names it is damaged."""
        record = read_record(self._store.committed_record_at(position))
        if record is not None and record.topic_view == _TIMER_TOPIC:
            return record
        if position < self._store.log_start:
            log.error(
                "the timed message at %d of the commit log is lost: retention has removed it before"
                " it was due. Set fileReservedTime to more than the longest delay.", position,
            )  # fmt: skip
        else:
            self._damaged(f"no timed message is at {position}, where a unit says so", due_ms)
        return None

    def _roll(self, due_ms: int, position: int, dequeued: bytes) -> None:
        """Put the message into the timer's queue again: it is nearer now."""
        record = self._record(position, due_ms)
        if record is None:
            return
        own = record.decode_properties()
        if TIMER_DELETES not in own:
            self._topics.append(own.get("REAL_TOPIC", ""))
        times = natural(own.get("TIMER_ROLL_TIMES", "0")) or 0
        own["TIMER_DELIVER_MS"] = str(self._placing.compute_due_ms(record) - self._clock.lead_ms)
        own["TIMER_ROLL_TIMES"] = str(times + 1)
        own["TIMER_ENQUEUE_MS"] = str(self._slot_start(record.store_time_ms))
        own |= as_dict(dequeued.decode())
        self._intake.append(record.copy_to(TIMER_TOPIC, 0, own))

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
        for table, chunk in taken:
            self.delivered += len(chunk) if table is self.due else 0
            self._delivered_ms = max(self._delivered_ms, chunk[-1][0] if chunk else 0)
        self._has_delivered |= any(chunk for _, chunk in taken)

    # --- the work

    def prepare(self, work: TimeSlice) -> None:
        """Load what comes next, and take in what is new. Seconds that are over and have nothing
        left in the table are read."""
        now_ms, next_ms = self._slot_start(work.now_ms), self.next_ms
        if self._damage:
            self._rebuild_now()
        limit_ms = min(now_ms, self._load_floor_ms)
        if next_ms is not None:
            limit_ms = min(limit_ms, slot_for_due_time(next_ms, self._precision_ms))
        if limit_ms > self.read_ms and not self._is_doubtful:
            self.read_ms = limit_ms
            while self._late and self._late[0][0] < limit_ms:
                self._late.popleft()
            for slot_ms in [slot for slot in self._deleted if slot < limit_ms]:
                del self._deleted[slot_ms]
        self._load(work)
        if self._damage:
            self._rebuild_now()
        if self._is_far_behind(work.now_ms):
            return
        low = self._store.queue_offsets(TIMER_TOPIC, 0)[0]
        if self.files.queue_offset < low:
            log.error(
                "the timed messages %d to %d are lost: retention has removed them before they were"
                " taken in", self.files.queue_offset, low - 1,
            )  # fmt: skip
            self.files.queue_offset = low
        units = self._store.reader.valid_units
        new = iter_queue(self._store, TIMER_TOPIC, 0, self.files.queue_offset, units)
        for entry in takewhile(lambda _: not work.is_over, new):
            self._take_one(entry, now_ms)
            self.files.queue_offset += 1
            self.files.record_position = entry.position
            work.count_done()
        self._settle_overdue(work)
        self.files.log.write()

    @property
    def next_ms(self) -> int | None:
        """When there is something to deliver, as far as it is loaded."""
        times = [time for time in (self.due.next_ms, self._rolls.next_ms) if time is not None]
        return min(times, default=None)

    @property
    def is_behind(self) -> bool:
        """Return whether there is something to load, to take in or to find out right now.

        What was there at the start and the slaves do not have yet is not: the queue shows it later,
        and its arrival is told.
        """
        is_loading = self._loading is not None and self.due.count <= 2 * LOADED_MAX
        is_taking_in = self.queue_behind > 0 and not self._is_far_behind(self._clock.now_ms())
        return is_loading or is_taking_in or self._can_settle

    def _is_far_behind(self, now_ms: int) -> bool:
        """Return whether undelivered messages lie so far back that a new one could take the slot
        of one of them, one turn of the wheel later: they are delivered first."""
        return now_ms - self.read_ms >= SLOTS // 2 * self._precision_ms

    # --- what waits

    def not_taken_in(self, offset: int, taken_in: int) -> Iterator[Waiting]:
        """Yield the messages that wait and that were in the queue alone when a list began.

        `offset` is where an earlier look stopped, 0 at first. `taken_in` is the offset up to which
        messages were in the wheel at that time: a new master, for one, has to fill its wheel first.
        """
        now_ms, units = self._clock.now_ms(), self._store.reader.valid_units
        for entry in iter_queue(self._store, TIMER_TOPIC, 0, max(offset, taken_in), units):
            record, due_ms = entry.record, 0
            place = self._placing.assign_slot(record, now_ms) if record is not None else None
            if record is None or place is None or place[1] & MAGIC_DELETE:
                record = None
            else:
                due_ms = self._placing.compute_due_ms(record)
            yield Waiting(record, due_ms, f"Q:{entry.offset + 1}:0:{taken_in}")

    def pending(self, slot_ms: int, unit: int, taken_in: int) -> Iterator[Waiting]:
        """Yield the messages of the wheel that wait, second by second, each second from its last
        message to its first.

        `slot_ms` and `unit` are where an earlier look stopped; 0 and FROM_END at first. `taken_in`:
        see `not_taken_in`, which has yielded the messages from this offset on.
        """
        start_ms = max(slot_ms, self.read_ms)
        if slot_ms == start_ms and unit != FROM_END:
            deleted = self._listed.get(slot_ms, set())
            yield from self._pending_of(slot_ms, unit, taken_in, deleted)
            start_ms += self._precision_ms
        step_ms = _LIST_SLOTS * self._precision_ms
        end_ms = self.read_ms + SLOTS // 2 * self._precision_ms
        for begin_ms in range(start_ms, end_ms, step_ms):
            for found_ms in self.files.wheel.iter_occupied_ms(
                begin_ms, min(begin_ms + step_ms, end_ms)
            ):
                slot = self.files.wheel.get(found_ms)
                if slot is not None:
                    deleted = set()
                    self._listed = {found_ms: deleted}
                    yield from self._pending_of(found_ms, slot.last_unit, taken_in, deleted)
            yield Waiting(None, 0, f"T:{begin_ms + step_ms}:{FROM_END}:{taken_in}")

    def _pending_of(
        self, slot_ms: int, position: int, taken_in: int, deleted: set[bytes]
    ) -> Iterator[Waiting]:
        """A mark stands behind the message it means: it is seen first."""
        for _, unit in self.files.iter_chain(slot_ms, position):
            if unit is None:
                return
            record = read_record(self._store.committed_record_at(unit.position))
            if record is not None and unit.magic & MAGIC_DELETE:
                deleted.add(value_of(record.properties, TIMER_DELETES_KEY) or b"")
                record = None
            if record is not None and deleted and recall_key(record.properties) in deleted:
                record = None
            if record is not None and record.queue_offset >= taken_in:
                record = None
            due_ms = self._placing.compute_due_ms(record) if record is not None else 0
            yield Waiting(record, due_ms, f"T:{slot_ms}:{unit.previous}:{taken_in}")

    # --- saving

    @property
    def _replay_offset(self) -> int:
        """Of the messages below this one of the queue, those of a second that is over are
        delivered."""
        return min((offset for _, offset in self._late), default=self.files.queue_offset)

    def _done_by(self, now_ms: int) -> int:
        """Return up to when everything that is due is delivered."""
        next_ms = self.next_ms
        # What the last start knew to be delivered stays so, loaded or not.
        done_ms = max(min(now_ms, self._load_floor_ms), self._done_ms)
        if next_ms is not None:
            # A message of a slot that was over when it was loaded is in the table for the slot's
            # end. Its own time may be any of the slot: nothing of the slot counts as done.
            is_exact = next_ms > self._over_until_ms
            done_ms = min(
                done_ms, next_ms - 1 if is_exact else slot_for_due_time(next_ms, self._precision_ms)
            )
        if self._damage:
            done_ms = min(done_ms, slot_for_due_time(self._damage_ms, self._precision_ms))
        return done_ms

    def save(self, *, is_last: bool = False) -> Generator[Callable[[], None]]:
        """What the files lack; see `TimerFiles.save`. The last one of all says the time at any
        rate."""
        if self._is_doubtful or self._damage:
            return  # by the old checkpoint, queue and log the rest is known
        self._list_last()
        force = self._has_delivered or (is_last and self.files.checkpoint.time_ms > 0)
        self._has_delivered = False
        now_ms = self._clock.now_ms()
        done_ms = self._done_by(now_ms)
        if self.files.queue_offset == self._known_offset:
            # A process that ends before it has loaded its first second, or taken in a message,
            # knows as much as its predecessor.
            done_ms = max(done_ms, self._done_ms)
        if self._delivered_ms <= done_ms:
            self._floor = self._store.written_offset
        is_written = False
        try:
            yield from self.files.save(
                self.read_ms, now_ms, done_ms, self._replay_offset, self._floor, force=force
            )
            is_written = True
        finally:
            self._has_delivered |= force and not is_written

    def _list_last(self) -> None:
        """Give the last message of the queue a unit, in a second that is over: RocketMQ goes on in
        the queue behind the message of the last unit."""
        entry, self._last_skipped = self._last_skipped, None
        if entry is not None and entry.record is not None:
            slot_ms = self.read_ms - self._precision_ms
            self.files.add_unit(
                slot_ms, MAGIC_DEFAULT, self.read_ms, entry.position, entry.record.size_bytes, 0
            )

    def seal(self) -> None:
        """Blocking, after the last save of an orderly stop: the next start trusts the files.
        Raises OSError."""
        if not self._is_doubtful and not self._damage:
            self.files.seal()
