"""Timed messages: from the timer queue (rmq_sys_wheel_timer) to their topics.

A message passes through these steps. Times are milliseconds since 1970.

    index     each new message of the queue gets a unit in the timer log, and is thereby in a slot
              of the timer wheel. A slot is one second wide, by default
    load      the slots of the next second and a half are read. The exact time of each message is in
              its properties; the message is added to the table of due messages
    deliver   messages that are due are appended to their own topics, in their millisecond
    advance   `read_ms` moves to the first slot that may contain undelivered messages

A message that is stored for a slot that is loaded already is added to the table at once. If its
slot has been delivered completely, it gets the first slot that has not. A message that is due later
than the wheel reaches is stored in the timer queue again on the way: it *rolls*. A *recall marker*
(a unit with the flag DELETE) recalls a message of its slot. It is loaded before the messages, and
has no other effect (spec/delivery.md §2).

RocketMQ delivers the messages of a second when it is over, so up to a second late. Here the slot
only says where they are stored.

Timer wheel, timer log and checkpoint are derived from the queue (`store.timers.state`). A start may
not know what was delivered before it. Then an *overdue* message, which was due before the start,
waits until the log has been searched for its delivery (`store.timers.overdue`).
"""

import logging
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator
from itertools import chain, takewhile
from typing import Final

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
from sluicemq.broker.waiting.due_table import DueMessage, DueTable
from sluicemq.broker.waiting.timed_records import find_newest_store_ms, make_rolled_copy
from sluicemq.clock import SteadyClock
from sluicemq.files import Files
from sluicemq.model.ids import tag_code
from sluicemq.model.system_names import TIMER_TOPIC
from sluicemq.record.codec import find_property
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

LOAD_AHEAD_MS: Final = 1500
"""A slot is loaded this long before it begins. The broker calls `prepare` five times a second."""
LOADED_MESSAGES_MAX: Final = 200_000
"""No further slots are loaded while the table of due messages has more messages than this."""
_CHUNK: Final = 64
"""The messages after which a time slice is checked."""
_STEP_UNITS: Final = 256
_TIMER_TOPIC_BYTES: Final = TIMER_TOPIC.encode()


class Timers:
    """The timed messages of a broker. It is one of the sources of `DelayedDelivery`.

    `prepare` indexes and loads messages, and `deliver` appends due ones, both for one time slice.
    `confirm_deliveries` says whether the appended messages are stored.
    """

    name: Final = "timed messages"

    def __init__(
        self,
        settings: Settings,
        store: Store,
        redelivery: DueMessageDelivery,
        intake: MessageIntake,
        files: Files,
        clock: SteadyClock,
        add_count: Callable[[str, int], None],
        clear_counts: Callable[[], None] = lambda: None,
    ) -> None:
        """Create timers whose files are not loaded.

        Due messages are appended with `redelivery`, and rolling ones with `intake`.
        `add_count(topic, count)` is called to add `count`, which may be negative, to the number of
        a topic's messages that wait. `clear_counts()` is called before all of them are counted
        again.
        """
        config = settings.store
        self._store = store
        self._redelivery = redelivery
        self._intake = intake
        self._clock = clock
        self._precision_ms = precision_ms = config.timer_precision_ms
        self.placing = SlotRules(precision_ms, config.timer_roll_window_slots)
        self._slot_start = self.placing.slot_start
        self.files = TimerFiles(
            store,
            files,
            config.root,
            log_file_bytes=config.timer_log_file_bytes,
            precision_ms=precision_ms,
        )
        self._add_count = add_count
        self._clear_counts = clear_counts
        self.due_table = DueTable()
        """The loaded messages that are not delivered."""
        self._roll_table = DueTable()
        """The loaded messages that must be stored in the queue again."""
        self.read_ms = 0
        """The first slot that may contain undelivered messages."""
        self.delivered_before_ms = 0
        """Messages that were due before this time were delivered before the start; 0 if unknown."""
        self._loaded_end_ms = 0  # slots before it are loaded, or being loaded
        self._load_done_ms = 0  # slots before it are loaded
        self._loading: Iterator[None] | None = None
        self._indexed_until_ms = 0  # all messages that were stored before it are indexed
        self._checkpoint_done_ms = 0  # what was due by then was delivered at the last checkpoint
        self._checkpoint_offset = NO_UNIT  # messages of the queue before it were known to it
        self._inexact_until_ms = 0  # the exact times of messages in slots before it were not read
        # While the files are rebuilt, the queue is read up to `_rebuild_target`. Messages before
        # offset `_rebuild_end` whose slot is before `_rebuild_ms` are delivered.
        self._rebuild_end = self._rebuild_ms = self._rebuild_target = 0
        self._start_queue_end = 0  # the end of the queue at the start
        # Slots with messages that came too late for their own, each with their first offset.
        self._late_slots: deque[tuple[int, int]] = deque()
        self._recalled_keys: dict[int, set[bytes]] = {}  # by slot: keys of messages to recall
        # What `deliver` has taken from the tables since the last `confirm_deliveries`, and topics.
        self._unconfirmed: list[tuple[DueTable, list[DueMessage]]] = []
        self._unconfirmed_topics: list[str] = []
        self._has_delivered = False  # since the last checkpoint
        # Messages before `_doubt_log_end` in the log that were due by `_doubt_until_ms` may be
        # delivered already. They wait in `_overdue` until `_overdue_check` has searched the log.
        self._overdue: DeliveryLookup | None = None
        self._overdue_check: Generator[None, None, list[OverdueMessage]] | None = None
        self._doubt_until_ms = self._doubt_log_end = 0
        self._late_recalled_keys: set[bytes] = set()  # of recall markers among those messages
        # Messages that were delivered, and are due after the last checkpoint's `done_ms`, are in
        # the log behind the floor. All of them are due by `_delivered_until_ms`.
        self._delivery_floor = self._delivered_until_ms = 0
        self._last_unindexed: QueueEntry | None = None  # the queue's last message, without a unit
        self._damage_reason = ""  # why `prepare` must rebuild wheel and log
        self._damage_due_ms = 0  # no message that is due from then on counts as delivered
        self.delivered_count = self.recalled_count = 0

    # --- the start

    def load(self) -> None:
        """Load the files, and find where delivery continues. Blocking.

        Files that cannot be trusted are emptied, and `prepare` rebuilds them from the queue. The
        steady clock is set forward if the wall clock was set back. Raises OSError.
        """
        start = self.files.load()
        checkpoint = self.files.checkpoint
        # If the wall clock has been set back, messages would wait for a time that has passed, and
        # slots that are delivered would be read again.
        if start.is_exact:
            self._clock.raise_to(max(self._slot_start(checkpoint.read_ms), checkpoint.done_ms))
        self._clock.raise_to(find_newest_store_ms(self._store, self.placing))
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
        self._loaded_end_ms = self._load_done_ms = self.read_ms
        self.delivered_before_ms = self._slot_start(checkpoint.read_ms) if start.is_exact else 0
        self._checkpoint_done_ms = checkpoint.done_ms if start.is_exact else 0
        self._checkpoint_offset = self.files.queue_offset if start.is_settled else NO_UNIT
        self._delivery_floor = checkpoint.log_position if start.is_exact else 0
        self._begin_doubt()
        if start.is_settled:
            self._overdue = None

    def _begin_doubt(self) -> None:
        """Treat all messages that are stored and due now as maybe delivered already.

        The end of the queue is the committed one: a new master does not show the messages that its
        slaves lack, but a recall among them was answered by the previous master, and is valid.
        """
        self._start_queue_end = self._store.committed_offset(TIMER_TOPIC, 0)
        self._doubt_until_ms = self._clock.now_ms()
        self._doubt_log_end = self._store.written_offset
        self._overdue = DeliveryLookup(self._store, self._doubt_log_end)
        self._overdue_check = None
        self._late_recalled_keys = set()
        self._delivered_until_ms = self._doubt_until_ms

    def _begin_rebuild(self, replay_offset: int, read_ms: int) -> None:
        """Prepare to fill empty files from the queue; `prepare` indexes the messages again.

        Messages before queue offset `replay_offset` count as delivered if their slot is before
        `read_ms`. The counts of waiting messages are cleared.
        """
        self._late_slots.clear()
        self._rebuild_end, self._rebuild_ms = replay_offset, read_ms
        self._rebuild_target = self._store.committed_offset(TIMER_TOPIC, 0)
        self._clear_counts()

    def _note_damage(self, reason: str, due_ms: int) -> None:
        """Let the next `prepare` rebuild the files, which lack a message due at `due_ms` or later.

        `reason` is logged then. Of several reports, the one with the earliest `due_ms` counts.
        """
        if not self._damage_reason or due_ms < self._damage_due_ms:
            self._damage_reason, self._damage_due_ms = reason, due_ms

    def _rebuild_now(self) -> None:
        """Empty tables, wheel and log, and rebuild them as a start would. Raises OSError."""
        done_ms, replay_offset = self._find_done_ms(self._clock.now_ms()), self._replay_offset
        reason, self._damage_reason = self._damage_reason, ""
        self.files.start_rebuild(reason)
        self.due_table, self._roll_table, self._recalled_keys = DueTable(), DueTable(), {}
        self._loading, self._last_unindexed = None, None
        self._loaded_end_ms = self._load_done_ms = self.read_ms
        self._checkpoint_done_ms, self._checkpoint_offset = done_ms, NO_UNIT
        self._begin_rebuild(replay_offset, self.read_ms)
        self.files.log_end_at_start = self.files.log_position_of(replay_offset)
        self._begin_doubt()

    # --- indexing

    @property
    def unindexed_count(self) -> int:
        """The number of messages of the queue that are not indexed."""
        return max(self._store.queue_offsets(TIMER_TOPIC, 0)[1] - self.files.queue_offset, 0)

    def _index(self, entry: QueueEntry, write_ms: int) -> None:
        """Add a message of the queue to the wheel, and to a table if its slot is loaded.

        `write_ms` is the present slot, which is stored in the unit. A message whose slot is over
        gets the first slot that has not been delivered completely. No unit is added for a message
        that was delivered before a rebuild, or that waits for `_check_overdue`. A message that
        cannot be delivered is logged and skipped.
        """
        record, offset = entry.record, self.files.queue_offset
        assigned = self.placing.assign_slot(record, write_ms) if record is not None else None
        if record is None or assigned is None:
            what = "its record is missing" if record is None else "it has no valid time"
            log.error(
                "cannot deliver timed message %d, at position %d: %s", offset, entry.position, what
            )
            return

        slot_ms, magic = assigned
        stored_ms = self.placing.stored_at_ms(record, slot_ms)
        self._indexed_until_ms = max(self._indexed_until_ms, stored_ms)
        is_old = offset < self._rebuild_end
        if is_old and slot_ms < self._rebuild_ms:
            self._last_unindexed = entry
            return  # delivered before the files were lost
        if slot_ms < self.read_ms:
            if self._defer_unindexed(entry, record, slot_ms, magic):
                self._last_unindexed = entry
                return
            slot_ms = self.read_ms
            self._note_late(slot_ms, offset)
        self._add_to_wheel(record, slot_ms, magic, write_ms)
        self._last_unindexed = None
        if slot_ms < self._loaded_end_ms:
            self._add_to_table(slot_ms, entry.position, magic, record, is_old=is_old)

    def _add_to_wheel(self, record: Record, slot_ms: int, magic: int, write_ms: int) -> None:
        """Add a unit for a message to a slot. Count the message unless it is a recall marker."""
        name = decode_topic_name(find_property(record.properties, REAL_TOPIC_KEY) or b"")
        if not magic & MAGIC_DELETE:
            self._add_count(name, 1)
        self.files.add_unit(
            slot_ms, magic, write_ms, record.physical_offset, record.size_bytes, tag_code(name)
        )

    def _note_late(self, slot_ms: int, offset: int) -> None:
        """Record that slot `slot_ms` contains a message that came too late for its own slot.

        `offset` is the offset of the message in the timer queue. See `_replay_offset`.
        """
        late = self._late_slots
        if not late or late[-1][0] != slot_ms or late[-1][1] > offset:
            late.append((slot_ms, offset))

    def _add_to_table(
        self,
        slot_ms: int,
        position: int,
        magic: int,
        record: Record | None,
        *,
        is_old: bool = False,
    ) -> None:
        """Add a message of a loaded slot to its table, unless it is delivered or a recall marker.

        Without its record, the message is due when the slot is over. `is_old` says that the last
        checkpoint before the start knew the message, and that it may have been delivered then.
        """
        if magic & MAGIC_DELETE and not magic & MAGIC_ROLL:
            key = (
                find_property(record.properties, TIMER_DELETES_KEY) if record is not None else None
            )
            if key is not None:
                self._recalled_keys.setdefault(slot_ms, set()).add(key)
            return

        table, due_ms = self.due_table, slot_ms + self._precision_ms
        if magic & MAGIC_ROLL:
            if is_old and slot_ms < self._checkpoint_done_ms:
                return
            table, due_ms = self._roll_table, slot_ms + 1
        elif record is not None:
            due_ms = max(self.placing.compute_due_ms(record), slot_ms + 1)
        if is_old and due_ms <= self._checkpoint_done_ms and not magic & MAGIC_ROLL:
            return
        message = OverdueMessage(position, slot_ms, due_ms, magic, has_unit=True)
        floor = self._delivery_floor if is_old else position
        if record is None or not self._defer_overdue(record, message, floor):
            table.add(due_ms, position)

    # --- messages that may be delivered already

    def _defer_overdue(self, record: Record, message: OverdueMessage, floor: int) -> bool:
        """Let a message wait if it may have been delivered before the start.

        Return whether it waits, until `_check_overdue` has searched the log for its delivery, from
        position `floor` on. A message of a topic with a gate does not wait, because the gate knows
        what is delivered.
        """
        overdue = self._overdue
        if (
            overdue is None
            or message.due_ms > self._doubt_until_ms
            or message.position >= self._doubt_log_end
            or decode_topic_name(find_property(record.properties, REAL_TOPIC_KEY) or b"")
            in self._redelivery.gates
        ):
            return False
        overdue.add(record, message, floor, is_roll=bool(message.magic & MAGIC_ROLL))
        return True

    def _defer_unindexed(self, entry: QueueEntry, record: Record, slot_ms: int, magic: int) -> bool:
        """Let a message whose slot is over wait like `_defer_overdue`, without a unit in the wheel.

        Return whether it needs no unit: it waits, is a recall marker, or its gate drops it.
        """
        if self._overdue is None or entry.position >= self._doubt_log_end:
            return False
        if magic & MAGIC_DELETE and not magic & MAGIC_ROLL:
            self._late_recalled_keys.add(find_property(record.properties, TIMER_DELETES_KEY) or b"")
            return True
        gate = self._redelivery.gates.get(
            decode_topic_name(find_property(record.properties, REAL_TOPIC_KEY) or b"")
        )
        if gate is not None:
            return gate(record) is None
        message = OverdueMessage(entry.position, slot_ms, slot_ms + 1, magic, has_unit=False)
        return self._defer_overdue(record, message, entry.position)

    @property
    def _is_doubtful(self) -> bool:
        """Whether it is unknown what is delivered, or a rebuild has not read the whole queue."""
        return self._has_overdue or self.files.queue_offset < self._rebuild_target

    @property
    def _lacks_start_queue(self) -> bool:
        """Whether messages of the queue that existed at the start are not indexed."""
        return self.files.queue_offset < self._start_queue_end

    @property
    def _has_overdue(self) -> bool:
        """Whether overdue messages wait until their delivery has been searched."""
        overdue = self._overdue
        return (
            overdue is not None and overdue.waiting_count > 0
        ) or self._overdue_check is not None

    @property
    def _can_check_overdue(self) -> bool:
        """Whether overdue messages wait, and the log can be searched for their deliveries now.

        All messages that decide about them must be indexed, unless no more overdue ones fit.
        """
        overdue = self._overdue
        if self._overdue_check is not None:
            return True
        if overdue is None or not overdue.waiting_count:
            return False
        is_complete = (
            self._loading is None and not self.unindexed_count and not self._lacks_start_queue
        )
        return is_complete or overdue.is_full

    def _check_overdue(self, work: TimeSlice) -> None:
        """Search the log for the deliveries of overdue messages, until the slice is over.

        When the search ends, the undelivered messages are added to the tables, due at once. Do
        nothing while the search cannot begin (`_can_check_overdue`).
        """
        overdue = self._overdue
        if overdue is None:
            return
        if self._overdue_check is None:
            if not self._can_check_overdue:
                return
            self._overdue_check = overdue.find_undelivered()
        try:
            while not work.is_over:
                next(self._overdue_check)
                work.count_done(_CHUNK)
        except StopIteration as end:
            self._overdue_check = None
            for message in end.value:
                self._add_undelivered(message)

    def _add_undelivered(self, message: OverdueMessage) -> None:
        """Add an overdue message that was not delivered before the start to its table.

        A message that was recalled, or whose topic was deleted, is dropped.
        """
        record = self._read_timed_message(message.position, message.due_ms)
        if record is None:
            return
        topic = decode_topic_name(find_property(record.properties, REAL_TOPIC_KEY) or b"")
        is_roll = bool(message.magic & MAGIC_ROLL)
        if not self._store.is_record_live(topic, self._delivery_floor or message.position):
            log.info("skipped a timed message of topic %s, which was deleted", topic)
            return
        if not is_roll and recall_key(record.properties) in self._late_recalled_keys:
            self.recalled_count += 1
            return

        table, due_ms = (self._roll_table if is_roll else self.due_table), message.due_ms
        if not message.has_unit:
            slot_ms = self.read_ms
            self._note_late(slot_ms, record.queue_offset)
            write_ms = self._slot_start(self._clock.now_ms())
            self._add_to_wheel(record, slot_ms, message.magic, write_ms)
            if slot_ms >= self._loaded_end_ms:
                return
            due_ms = slot_ms + 1
        table.add(due_ms, message.position)

    # --- loading

    def _load(self, work: TimeSlice) -> None:
        """Load slots of the near future until the slice is over or enough messages are loaded."""
        if self._loading is None:
            until_ms = self._slot_start(work.now_ms + LOAD_AHEAD_MS) + self._precision_ms
            if until_ms <= self._loaded_end_ms or self.due_table.count > LOADED_MESSAGES_MAX:
                return
            self._loading = self._load_until(until_ms)
        for _ in self._loading:
            work.count_done(_CHUNK)
            if work.is_over or self.due_table.count > 2 * LOADED_MESSAGES_MAX:
                return
        self._loading = None

    def _load_until(self, until_ms: int) -> Iterator[None]:
        """Load the slots before `until_ms`, or up to a damaged one. Yields None after each step."""
        begin_ms, self._loaded_end_ms = self._loaded_end_ms, until_ms
        end = self.files.log.end  # the messages of later units are added to the tables at once
        for slot_ms in self.files.wheel.iter_occupied_ms(begin_ms, until_ms):
            self._load_done_ms = slot_ms
            yield from self._load_slot(slot_ms, end)
            if self._damage_reason:
                return
        self._load_done_ms = until_ms

    def _load_slot(self, slot_ms: int, end: int) -> Iterator[None]:
        """Add the messages of a slot to the tables, recall markers first.

        Yields None after each step. Units at or behind position `end` of the timer log are ignored,
        because `_index` adds their messages to the tables. If the timer log is damaged, nothing is
        added, and the damage is reported to `prepare`.
        """
        positions, magics = array("q"), array("b")
        slot = self.files.wheel.get(slot_ms)
        for unit_position, unit in self.files.iter_chain(
            slot_ms, NO_UNIT if slot is None else slot.last_unit
        ):
            if unit is None:
                reason = f"the timer log is damaged at the slot {slot_ms} ms"
                self._note_damage(reason, slot_ms + 1)
                return
            if unit_position < end:
                positions.append(unit.position)
                magics.append(unit.magic & (MAGIC_ROLL | MAGIC_DELETE))
                if len(positions) % _STEP_UNITS == 0:
                    yield

        is_partly_done = slot_ms < self._checkpoint_done_ms  # some of it may be delivered
        is_over = slot_ms + self._precision_ms <= self._clock.now_ms() and not is_partly_done
        if self._overdue is not None and slot_ms <= self._doubt_until_ms:
            is_over = False  # the records are needed to find out what is delivered
        if is_over:
            # All messages are due, so their exact times, and their records, are not needed.
            self._inexact_until_ms = max(self._inexact_until_ms, slot_ms + self._precision_ms)
        markers = (
            [i for i, magic in enumerate(magics) if magic == MAGIC_DELETE] if any(magics) else []
        )
        for number, index in enumerate(chain(markers, reversed(range(len(positions))))):
            position, record = positions[index], None
            if number < len(markers) or not is_over:
                record = read_record(self._store.committed_record_at(position))
            is_old = position < self.files.log_end_at_start
            self._add_to_table(slot_ms, position, magics[index], record, is_old=is_old)
            if number % _CHUNK == 0:
                yield

    # --- delivering

    def deliver(self, work: TimeSlice) -> None:
        """Append rolling and due messages until the slice is over. Raises StoreError."""
        added = f"TIMER_DEQUEUE_MS\x01{work.now_ms}\x02".encode()
        for table, append, until_ms in (
            (self._roll_table, self._append_rolled, work.now_ms),
            (self.due_table, self._append_due, self._find_deliverable_ms(work.now_ms)),
        ):
            while not work.is_over and (chunk := table.take_due(until_ms, _CHUNK)):
                appended_count = 0
                try:
                    for due_ms, position in chunk:
                        append(due_ms, position, added)
                        appended_count += 1
                finally:
                    self._unconfirmed.append((table, chunk[:appended_count]))
                    table.put_back(chunk[appended_count:])
                work.count_done(len(chunk))

    def _find_deliverable_ms(self, now_ms: int) -> int:
        """Return the latest due time of messages that may be delivered at `now_ms`.

        A recall that was stored before a message is due is valid, so the message waits until the
        queue is indexed up to that time. Only timers that are far behind do not wait: they index
        nothing before they have delivered.
        """
        if self._is_far_behind(now_ms) or not (self.unindexed_count or self._lacks_start_queue):
            return now_ms
        return min(now_ms, self._indexed_until_ms)

    @property
    def next_deliverable_ms(self) -> int | None:
        """When the next loaded message can be delivered, in ms since 1970.

        It is None without one, and if nothing can be delivered before the queue shows more of the
        messages that it had at the start.
        """
        next_ms = self.next_due_ms
        if next_ms is None or next_ms <= self._find_deliverable_ms(next_ms):
            return next_ms
        return next_ms if self.unindexed_count else None

    def _append_due(self, due_ms: int, position: int, added: bytes) -> None:
        """Append the message at a position of the commit log to its topic, unless it is recalled.

        `added` are encoded properties that are added to those of the message. A missing record is
        handled by `_read_timed_message`. Called for each due message. Raises StoreError if the
        store accepts no messages.
        """
        record = self._read_timed_message(position, due_ms)
        if record is None:
            return
        recalled = self._recalled_keys and self._recalled_keys.get(
            slot_for_due_time(due_ms, self._precision_ms)
        )
        if recalled and recall_key(record.properties) in recalled:
            self.recalled_count += 1
            name = find_property(record.properties, REAL_TOPIC_KEY) or b""
            self._unconfirmed_topics.append(decode_topic_name(name))
            return
        enqueued = b"TIMER_ENQUEUE_MS\x01%d\x02" % self._slot_start(record.store_time_ms)
        topic = self._redelivery.deliver(record, enqueued + added)
        if topic is not None:
            self._unconfirmed_topics.append(topic)

    def _read_timed_message(self, position: int, due_ms: int) -> Record | None:
        """Return the timed message at a position of the commit log.

        Return None if retention has removed it, which is logged. If another record is there, the
        unit is damaged: return None and let `prepare` rebuild the files.
        """
        record = read_record(self._store.committed_record_at(position))
        if record is not None and record.topic_view == _TIMER_TOPIC_BYTES:
            return record
        if position < self._store.log_start:
            log.error(
                "the timed message at position %d of the commit log is lost: retention has removed"
                " it before it was due. Set fileReservedTime to more than the longest delay.",
                position,
            )
        else:
            reason = f"a unit names position {position}, where no timed message is stored"
            self._note_damage(reason, due_ms)
        return None

    def _append_rolled(self, due_ms: int, position: int, added: bytes) -> None:
        """Store a message in the timer queue again, because its due time is nearer now.

        Its due time does not change. `added` are encoded properties that are added to those of the
        message. Raises StoreError if the store accepts no messages.
        """
        record = self._read_timed_message(position, due_ms)
        if record is None:
            return
        rolled = make_rolled_copy(record, self.placing, self._clock.lead_ms, added)
        if TIMER_DELETES not in rolled.properties:
            self._unconfirmed_topics.append(rolled.properties.get("REAL_TOPIC", ""))
        self._intake.append(rolled)

    def confirm_deliveries(self, *, is_stored: bool) -> None:
        """Record whether the messages that `deliver` appended are stored.

        If they are, they are counted, and no longer count as waiting. If they are not, they are put
        back into the tables.
        """
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        topics, self._unconfirmed_topics = self._unconfirmed_topics, []
        if not is_stored:
            for table, chunk in unconfirmed:
                table.put_back(chunk)
            return
        for topic in topics:
            self._add_count(topic, -1)
        for table, chunk in unconfirmed:
            self.delivered_count += len(chunk) if table is self.due_table else 0
            latest_ms = chunk[-1][0] if chunk else 0
            self._delivered_until_ms = max(self._delivered_until_ms, latest_ms)
        self._has_delivered |= any(chunk for _, chunk in unconfirmed)

    # --- the work

    def prepare(self, work: TimeSlice) -> None:
        """Load and index messages until the slice is over, and advance `read_ms`.

        `read_ms` moves past a slot when the slot is over and none of its messages is in the tables.
        It does not move while it is unknown which messages are delivered. If damage was reported,
        the files are rebuilt. The log is searched for deliveries of overdue messages, and the timer
        log is written. Messages that retention has removed before they were indexed are logged.

        Raises OSError if the timer log cannot be written.
        """
        now_ms, next_ms = self._slot_start(work.now_ms), self.next_due_ms
        if self._damage_reason:
            self._rebuild_now()
        limit_ms = min(now_ms, self._load_done_ms)
        if next_ms is not None:
            limit_ms = min(limit_ms, slot_for_due_time(next_ms, self._precision_ms))
        if limit_ms > self.read_ms and not self._is_doubtful:
            self.read_ms = limit_ms
            while self._late_slots and self._late_slots[0][0] < limit_ms:
                self._late_slots.popleft()
            for slot_ms in [slot for slot in self._recalled_keys if slot < limit_ms]:
                del self._recalled_keys[slot_ms]
        self._load(work)
        if self._damage_reason:
            self._rebuild_now()
        if self._is_far_behind(work.now_ms):
            return

        low = self._store.queue_offsets(TIMER_TOPIC, 0)[0]
        if self.files.queue_offset < low:
            log.error(
                "the timed messages %d to %d are lost: retention has removed them before they were"
                " indexed",
                self.files.queue_offset,
                low - 1,
            )
            self.files.queue_offset = low
        units = self._store.reader.valid_units
        new = iter_queue(self._store, TIMER_TOPIC, 0, self.files.queue_offset, units)
        for entry in takewhile(lambda _: not work.is_over, new):
            self._index(entry, now_ms)
            self.files.queue_offset += 1
            self.files.record_position = entry.position
            work.count_done()
        self._check_overdue(work)
        self.files.log.write()

    @property
    def next_due_ms(self) -> int | None:
        """When the next loaded message is due or rolls, in ms since 1970; None without one."""
        tables = self.due_table, self._roll_table
        times = [table.next_due_ms for table in tables if table.next_due_ms is not None]
        return min(times, default=None)

    @property
    def is_behind(self) -> bool:
        """Whether `prepare` has something to load, to index or to search right now.

        Messages of the queue that the slaves of a new master lack do not count. Their arrival is
        reported like that of new ones.
        """
        is_loading = self._loading is not None and self.due_table.count <= 2 * LOADED_MESSAGES_MAX
        is_indexing = self.unindexed_count > 0 and not self._is_far_behind(self._clock.now_ms())
        return is_loading or is_indexing or self._can_check_overdue

    def _is_far_behind(self, now_ms: int) -> bool:
        """Return whether undelivered messages are so old that a new one could get their slot.

        That is the case after half a turn of the wheel. They are delivered first.
        """
        return now_ms - self.read_ms >= SLOTS // 2 * self._precision_ms

    # --- saving

    @property
    def _replay_offset(self) -> int:
        """The queue offset before which all messages whose slot is over are delivered."""
        return min((offset for _, offset in self._late_slots), default=self.files.queue_offset)

    def _find_done_ms(self, now_ms: int) -> int:
        """Return the latest time by which all messages that were due then are delivered, in ms."""
        next_ms = self.next_due_ms
        # What the last start knew to be delivered remains so, whether it is loaded or not.
        done_ms = max(min(now_ms, self._load_done_ms), self._checkpoint_done_ms)
        if next_ms is not None:
            # A message of a slot that was over when it was loaded is in the table for the end of
            # the slot. Its own time may be any of the slot, so nothing of the slot counts as done.
            is_exact = next_ms > self._inexact_until_ms
            done_ms = min(
                done_ms, next_ms - 1 if is_exact else slot_for_due_time(next_ms, self._precision_ms)
            )
        if self._damage_reason:
            done_ms = min(done_ms, slot_for_due_time(self._damage_due_ms, self._precision_ms))
        return done_ms

    def save(self, *, is_last: bool = False) -> Generator[Callable[[], None]]:
        """Save wheel, log and checkpoint if they have changed; see `TimerFiles.save`.

        Yield functions, which the caller must call in order, on any thread: they do the blocking
        parts. `is_last` says that the broker stops: then a checkpoint with the present time is
        written, if there is one. Nothing is yielded while it is unknown which messages are
        delivered, or while the files are damaged. Raises OSError.
        """
        if self._is_doubtful or self._damage_reason:
            return  # the old checkpoint, the queue and the log contain all that is known
        self._index_last()
        force = self._has_delivered or (is_last and self.files.checkpoint.time_ms > 0)
        self._has_delivered = False
        now_ms = self._clock.now_ms()
        done_ms = self._find_done_ms(now_ms)
        if self.files.queue_offset == self._checkpoint_offset:
            # A process that stops before it has loaded a slot or indexed a message knows as much
            # as the one before it.
            done_ms = max(done_ms, self._checkpoint_done_ms)
        if self._delivered_until_ms <= done_ms:
            self._delivery_floor = self._store.written_offset
        is_written = False
        try:
            yield from self.files.save(
                read_ms=self.read_ms,
                now_ms=now_ms,
                done_ms=done_ms,
                replay_offset=self._replay_offset,
                log_position=self._delivery_floor,
                force=force,
            )
            is_written = True
        finally:
            self._has_delivered |= force and not is_written

    def _index_last(self) -> None:
        """Give the last message of the queue a unit in a slot that is over, if it has none.

        RocketMQ continues in the queue behind the message of the last unit.
        """
        entry, self._last_unindexed = self._last_unindexed, None
        if entry is not None and entry.record is not None:
            slot_ms = self.read_ms - self._precision_ms
            size_bytes = entry.record.size_bytes
            self.files.add_unit(slot_ms, MAGIC_DEFAULT, self.read_ms, entry.position, size_bytes, 0)

    def seal(self) -> None:
        """Mark the files as trustworthy for the next start. Blocking. Raises OSError.

        Called after the last save of an orderly shutdown. Does nothing in the cases in which `save`
        does nothing.
        """
        if not self._is_doubtful and not self._damage_reason:
            self.files.seal()
