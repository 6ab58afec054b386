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
waits until the log has been searched for its delivery (`OverdueMessages`).
"""

import logging
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
from sluicemq.broker.waiting.overdue import OverdueMessages
from sluicemq.broker.waiting.timed_records import (
    LateSlots,
    RecalledKeys,
    build_rolled_properties,
    find_newest_store_ms,
    find_recall_markers,
    read_slot_units,
    target_topic,
)
from sluicemq.clock import SteadyClock
from sluicemq.files import Files
from sluicemq.model.ids import tag_code
from sluicemq.model.system_names import TIMER_TOPIC
from sluicemq.record.codec import find_property, parse_property_text
from sluicemq.store.store import Store
from sluicemq.store.timers.files import MAGIC_DEFAULT, MAGIC_DELETE, MAGIC_ROLL, NO_UNIT, SLOTS
from sluicemq.store.timers.overdue import OverdueMessage
from sluicemq.store.timers.placing import (
    REAL_TOPIC_KEY,
    TIMER_DELETES,
    SlotRules,
    slot_for_due_time,
)
from sluicemq.store.timers.state import TimerFiles, TimerStart

log = logging.getLogger(__name__)

LOAD_AHEAD_MS: Final = 1500
"""A slot is loaded this long before it begins. The broker calls `prepare` five times a second."""
LOADED_MESSAGES_MAX: Final = 200_000
"""No further slots are loaded while the table of due messages has more messages than this."""
_CHUNK: Final = 64
"""The messages after which a time slice is checked."""
_UNDELIVERABLE: Final = "cannot deliver timed message %d, at position %d: %s"
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
        """Create timers without reading a file; `load` reads them.

        `redelivery` appends due messages to their topics, `intake` stores rolling messages in the
        timer queue. `add_count(topic, count)` is called with 1 for each message that begins to
        wait and with -1 when it is delivered or recalled. `clear_counts()` is called before a
        rebuild, which counts all messages again.
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
        # Slots before `_loaded_end_ms` are loaded or being loaded, those before `_load_done_ms` are
        # loaded completely.
        self._loaded_end_ms = self._load_done_ms = 0
        self._loading: Iterator[None] | None = None
        self._indexed_until_ms = 0  # all messages that were stored before it are indexed
        self._checkpoint_done_ms = 0  # what was due by then was delivered at the last checkpoint
        self._checkpoint_offset = NO_UNIT  # messages of the queue before it were known to it
        self._inexact_until_ms = 0  # the exact times of messages in slots before it were not read
        # While the files are rebuilt, the queue is read up to `_rebuild_target`. Messages before
        # offset `_rebuild_end` whose slot is before `_rebuild_ms` are delivered.
        self._rebuild_end = self._rebuild_ms = self._rebuild_target = 0
        self._start_queue_end = 0  # the end of the queue at the start
        self._late_slots = LateSlots()
        self._recalled_keys = RecalledKeys(precision_ms)
        # What `deliver` has taken from the tables since the last `confirm_deliveries`, and topics.
        self._unconfirmed: list[tuple[DueTable, list[DueMessage]]] = []
        self._unconfirmed_topics: list[str] = []
        self._has_delivered = False  # since the last checkpoint
        self._overdue = OverdueMessages(store, redelivery)
        # Messages that were delivered, and are due after the last checkpoint's `done_ms`, are in
        # the log behind the floor. All of them are due by `_delivered_until_ms`.
        self._delivery_floor = self._delivered_until_ms = 0
        self._last_unindexed: QueueEntry | None = None  # the queue's last message, without a unit
        self._damage_reason = ""  # why `prepare` must rebuild wheel and log
        self._damage_due_ms = 0  # no message that is due from then on counts as delivered
        self.delivered_count = self.recalled_count = 0

    # --- the start

    def load(self) -> None:
        """Load the files, and set `read_ms`, the slot where delivery continues. Blocking.

        It is the slot of the checkpoint if that can be trusted, else the present slot. If the wheel
        and the timer log cannot be trusted, they are emptied, and `prepare` fills them again. The
        steady clock is set forward if a file or a message has a later time. After an unclean stop,
        due messages wait until the log was searched for their deliveries. Raises OSError.
        """
        start = self.files.load()
        checkpoint = self.files.checkpoint
        # If the wall clock has been set back, messages would wait for a time that has passed, and
        # slots that are delivered would be read again.
        if start.is_exact:
            self._clock.raise_to(max(self._slot_start(checkpoint.read_ms), checkpoint.done_ms))
        self._clock.raise_to(find_newest_store_ms(self._store, self.placing))

        self.read_ms = self._find_first_slot_ms(start)
        self._loaded_end_ms = self._load_done_ms = self.read_ms
        if start.is_exact:
            self.delivered_before_ms = self._slot_start(checkpoint.read_ms)
            self._checkpoint_done_ms = checkpoint.done_ms
            self._delivery_floor = checkpoint.log_position
        else:
            self.delivered_before_ms = 0
            self._checkpoint_done_ms = 0
            self._delivery_floor = 0
        self._checkpoint_offset = self.files.queue_offset if start.is_settled else NO_UNIT

        if start.is_rebuilt and start.is_exact:
            self._begin_rebuild(checkpoint.replay_offset, checkpoint.read_ms)
        elif start.is_rebuilt:
            self._begin_rebuild(0, 0)
        self._begin_doubt()
        if start.is_settled:
            self._overdue.end()

    def _find_first_slot_ms(self, start: TimerStart) -> int:
        """Return the slot at which delivery continues after a start.

        It is the slot of the checkpoint if that can be trusted, else the present slot. If the wheel
        is rebuilt, the slot of the checkpoint is moved to one that the wheel can hold.
        """
        now_ms = self._slot_start(self._clock.now_ms())
        if not start.is_exact:
            return now_ms

        read_ms = self._slot_start(self.files.checkpoint.read_ms)
        if start.is_rebuilt:
            # The wheel cannot hold older slots beside the new ones. 60 slots are a margin.
            oldest_ms = now_ms - (SLOTS // 2 - 60) * self._precision_ms
            read_ms = max(min(read_ms, now_ms), oldest_ms)
        if not read_ms or not self._store.queue_exists(TIMER_TOPIC, 0):
            return now_ms
        return read_ms

    def _begin_doubt(self) -> None:
        """Treat all messages that are stored and due now as maybe delivered already.

        They wait in `_overdue` until the log has been searched for their deliveries. All deliveries
        wait until the queue is indexed up to its present committed end, `_start_queue_end`.
        """
        # Not the visible end: a new master does not show the messages that its slaves lack, but
        # the previous master has answered the recalls among them, so they are valid.
        self._start_queue_end = self._store.committed_offset(TIMER_TOPIC, 0)
        now_ms = self._clock.now_ms()
        self._overdue.begin(now_ms)
        self._delivered_until_ms = now_ms

    def _begin_rebuild(self, replay_offset: int, read_ms: int) -> None:
        """Prepare to fill the empty wheel and timer log from the queue, which `prepare` does later.

        A message before offset `replay_offset` of the queue whose slot is before `read_ms` counts
        as delivered. The counts of waiting messages are cleared, as indexing counts them again.
        """
        self._late_slots.clear()
        self._rebuild_end = replay_offset
        self._rebuild_ms = read_ms
        self._rebuild_target = self._store.committed_offset(TIMER_TOPIC, 0)
        self._clear_counts()

    def _note_damage(self, reason: str, due_ms: int) -> None:
        """Let `prepare` rebuild the files, because one of their units is damaged.

        `reason` is a phrase for the log. The lost message is due at `due_ms` or later, so nothing
        that is due from then on counts as delivered. Of several reports, the earliest time counts.
        """
        if not self._damage_reason or due_ms < self._damage_due_ms:
            self._damage_reason = reason
            self._damage_due_ms = due_ms

    def _rebuild_now(self) -> None:
        """Empty the wheel and the timer log because of damage, and begin to fill them again.

        The tables of loaded messages are emptied, too. As after a start, messages that are due now
        wait until the log has been searched for their deliveries. Raises OSError.
        """
        done_ms = self._find_done_ms(self._clock.now_ms())
        replay_offset = self._replay_offset
        reason = self._damage_reason
        self._damage_reason = ""
        self.files.start_rebuild(reason)
        self.due_table = DueTable()
        self._roll_table = DueTable()
        self._recalled_keys = RecalledKeys(self._precision_ms)
        self._loading = None
        self._last_unindexed = None
        self._loaded_end_ms = self._load_done_ms = self.read_ms
        self._checkpoint_done_ms = done_ms
        self._checkpoint_offset = NO_UNIT
        self._begin_rebuild(replay_offset, self.read_ms)
        self.files.log_end_at_start = self.files.log_position_of(replay_offset)
        self._begin_doubt()

    # --- indexing

    @property
    def unindexed_count(self) -> int:
        """The number of messages of the queue that are not indexed."""
        return max(self._store.queue_offsets(TIMER_TOPIC, 0)[1] - self.files.queue_offset, 0)

    def _index(self, entry: QueueEntry, write_ms: int) -> None:
        """Add the message of `entry`, at `files.queue_offset` of the queue, to the timer wheel.

        If its slot is loaded already, the message is also added to a table. Nothing is added if it
        has no record or no valid time, which is logged; if it was delivered before a rebuild; or if
        its slot was over at the start, and it may have been delivered. `write_ms` is the present
        slot. A message whose slot is over otherwise gets the slot at `read_ms`.
        """
        record = entry.record
        offset = self.files.queue_offset
        if record is None:
            log.error(_UNDELIVERABLE, offset, entry.position, "its record is missing")
            return
        assigned = self.placing.assign_slot(record, write_ms)
        if assigned is None:
            log.error(_UNDELIVERABLE, offset, entry.position, "it has no valid time")
            return

        slot_ms, magic = assigned
        stored_ms = self.placing.stored_at_ms(record, slot_ms)
        self._indexed_until_ms = max(self._indexed_until_ms, stored_ms)
        is_old = offset < self._rebuild_end
        if is_old and slot_ms < self._rebuild_ms:
            self._last_unindexed = entry
            return  # delivered before the files were lost

        if slot_ms < self.read_ms:
            if self._overdue.defer_without_unit(entry, record, slot_ms, magic):
                self._last_unindexed = entry
                return
            # The message is late: it gets the first slot that is not delivered.
            slot_ms = self.read_ms
            self._late_slots.add(slot_ms, offset)
        self._add_to_wheel(record, slot_ms, magic, write_ms)
        self._last_unindexed = None
        if slot_ms < self._loaded_end_ms:
            self._add_to_table(slot_ms, entry.position, magic, record, is_old=is_old)

    def _add_to_wheel(self, record: Record, slot_ms: int, magic: int, write_ms: int) -> None:
        """Add a unit for the message to the slot. Count it as waiting unless it recalls another."""
        name = decode_topic_name(find_property(record.properties, REAL_TOPIC_KEY) or b"")
        if not magic & MAGIC_DELETE:
            self._add_count(name, 1)
        self.files.add_unit(
            slot_ms, magic, write_ms, record.physical_offset, record.size_bytes, tag_code(name)
        )

    def _add_to_table(
        self, slot_ms: int, position: int, magic: int, record: Record | None, *, is_old: bool
    ) -> None:
        """Add a message of a loaded slot to `due_table` or, if it rolls, to `_roll_table`.

        A message rolls if it is due later than the wheel reaches: it is stored in the queue again.
        A recall marker is added to `_recalled_keys` instead. A message that was delivered before
        the checkpoint is left out. A message that may have been delivered is kept in `_overdue`.

        If `record` is None, it was not read or is missing, and the message is due at the end of the
        slot. `is_old` says that the message was indexed before the last checkpoint of the previous
        run, whose `done_ms` says whether it was delivered.
        """
        is_roll = magic & MAGIC_ROLL
        is_recall_marker = magic & MAGIC_DELETE and not is_roll
        if is_recall_marker:
            if record is not None:
                self._recalled_keys.add(slot_ms, record)
            return

        if is_roll:
            if is_old and slot_ms < self._checkpoint_done_ms:
                return
            table = self._roll_table
            due_ms = slot_ms + 1
        else:
            table = self.due_table
            if record is not None:
                due_ms = max(self.placing.compute_due_ms(record), slot_ms + 1)
            else:
                due_ms = slot_ms + self._precision_ms
            if is_old and due_ms <= self._checkpoint_done_ms:
                return

        if record is not None:
            message = OverdueMessage(position, slot_ms, due_ms, magic, has_unit=True)
            floor = self._delivery_floor if is_old else position
            if self._overdue.defer(record, message, floor):
                return
        table.add(due_ms, position)

    # --- messages that may be delivered already

    @property
    def _is_doubtful(self) -> bool:
        """Whether some messages may be delivered or not, or a rebuild has not read the queue."""
        is_rebuilding = self.files.queue_offset < self._rebuild_target
        return self._overdue.has_waiting or is_rebuilding

    @property
    def _is_indexed(self) -> bool:
        """Whether all messages of the queue are indexed, and all that existed at the start."""
        return not self.unindexed_count and self.files.queue_offset >= self._start_queue_end

    @property
    def _can_check_overdue(self) -> bool:
        """Whether overdue messages wait, and the log can be searched for their deliveries now.

        All messages that decide about them must be indexed, unless no more overdue ones fit.
        """
        if not self._overdue.has_waiting:
            return False
        is_complete = self._is_indexed and self._loading is None
        return self._overdue.can_search(is_complete=is_complete)

    def _check_overdue(self, work: TimeSlice) -> None:
        """Search the log for deliveries of overdue messages until the slice is over.

        A later call continues the search. At its end, the undelivered messages are added to their
        tables. Do nothing while `_can_check_overdue` is False.
        """
        if self._can_check_overdue:
            for message in self._overdue.search(work):
                self._add_undelivered(message)

    def _add_undelivered(self, message: OverdueMessage) -> None:
        """Add an overdue message, whose delivery is not in the log, to the table of its kind.

        A message without a unit is first added to the wheel, in the slot at `read_ms`. If that slot
        is not loaded yet, it is added only there. A message that was recalled, whose topic was
        deleted, or whose record is missing is dropped.
        """
        record = self._read_timed_message(message.position, message.due_ms)
        if record is None:
            return
        topic = target_topic(record)
        is_roll = bool(message.magic & MAGIC_ROLL)
        if not self._store.is_record_live(topic, self._delivery_floor or message.position):
            log.info("skipped a timed message of topic %s, which was deleted", topic)
            return
        if not is_roll and self._overdue.is_recalled(record):
            self.recalled_count += 1
            return

        due_ms = message.due_ms
        if not message.has_unit:
            self._late_slots.add(self.read_ms, record.queue_offset)
            write_ms = self._slot_start(self._clock.now_ms())
            self._add_to_wheel(record, self.read_ms, message.magic, write_ms)
            if self.read_ms >= self._loaded_end_ms:
                return
            due_ms = self.read_ms + 1
        table = self._roll_table if is_roll else self.due_table
        table.add(due_ms, message.position)

    # --- loading

    def _load(self, work: TimeSlice) -> None:
        """Load the slots that begin within LOAD_AHEAD_MS, until the slice `work` is over.

        The next call continues. Nothing is loaded while too many loaded messages are undelivered.
        """
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
        """Load the slots before `until_ms` that are not loaded yet. Yield after each step.

        If a slot is damaged, the later slots are not loaded, because `prepare` rebuilds the files.
        """
        begin_ms = self._loaded_end_ms
        self._loaded_end_ms = until_ms
        end = self.files.log.end  # the messages of later units are added to the tables at once
        for slot_ms in self.files.wheel.iter_occupied_ms(begin_ms, until_ms):
            self._load_done_ms = slot_ms
            yield from self._load_slot(slot_ms, end)
            if self._damage_reason:
                return
        self._load_done_ms = until_ms

    def _load_slot(self, slot_ms: int, end: int) -> Iterator[None]:
        """Add the messages of a slot to the tables, recall markers first. Yield after each step.

        Units at position `end` of the timer log or later are ignored. If a unit of the slot cannot
        be read, no message is added, and the files are marked as damaged.
        """
        units = yield from read_slot_units(self.files, slot_ms, end)
        if units is None:
            reason = f"the timer log is damaged at the slot {slot_ms} ms"
            self._note_damage(reason, slot_ms + 1)
            return
        positions, magics = units

        needs_records = self._needs_records(slot_ms)
        if not needs_records:
            self._inexact_until_ms = max(self._inexact_until_ms, slot_ms + self._precision_ms)
        markers = find_recall_markers(magics)
        # The units are in the order of the newest first, the messages are added the oldest first.
        oldest_first = reversed(range(len(positions)))
        for count, index in enumerate(chain(markers, oldest_first)):
            position = positions[index]
            record = None
            if count < len(markers) or needs_records:
                record = read_record(self._store.committed_record_at(position))
            is_old = position < self.files.log_end_at_start
            self._add_to_table(slot_ms, position, magics[index], record, is_old=is_old)
            if count % _CHUNK == 0:
                yield

    def _needs_records(self, slot_ms: int) -> bool:
        """Return whether the records of a slot's messages must be read to load the slot.

        They show the exact times, which do not matter when the whole slot is over, and what may be
        delivered already.
        """
        is_over = slot_ms + self._precision_ms <= self._clock.now_ms()
        is_partly_delivered = slot_ms < self._checkpoint_done_ms
        return not is_over or is_partly_delivered or self._overdue.may_contain(slot_ms)

    # --- delivering

    def deliver(self, work: TimeSlice) -> None:
        """Append due messages to their topics, until the slice `work` is over.

        Rolling messages are appended to the timer queue instead. All are taken from the tables. If
        the store accepts no more messages, StoreError is raised, and the messages that were not
        appended are put back. The others are delivered when `confirm_deliveries` is called.
        """
        added_properties = f"TIMER_DEQUEUE_MS\x01{work.now_ms}\x02".encode()
        for table, append, until_ms in (
            (self._roll_table, self._append_rolled, work.now_ms),
            (self.due_table, self._append_due, self._find_deliverable_ms(work.now_ms)),
        ):
            while not work.is_over and (chunk := table.take_due(until_ms, _CHUNK)):
                appended_count = 0
                try:
                    for due_ms, position in chunk:
                        append(due_ms, position, added_properties)
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
        if self._is_indexed or self._is_far_behind(now_ms):
            return now_ms
        return min(now_ms, self._indexed_until_ms)

    @property
    def next_deliverable_ms(self) -> int | None:
        """The time when the next loaded message can be delivered, in ms since 1970.

        None means that no message is loaded, or that the next one must wait until more messages of
        the timer queue, which may recall it, have become visible.
        """
        next_ms = self.next_due_ms
        if next_ms is None or next_ms <= self._find_deliverable_ms(next_ms):
            return next_ms
        return next_ms if self.unindexed_count else None

    def _append_due(self, due_ms: int, position: int, added_properties: bytes) -> None:
        """Append the due message at a position of the commit log to its own topic.

        It gets the encoded `added_properties`, too. If it is recalled or its record is missing, it
        is not appended. Raises StoreError if the store accepts no messages.
        """
        record = self._read_timed_message(position, due_ms)
        if record is None:
            return
        if self._recalled_keys.is_recalled(record, due_ms):
            self.recalled_count += 1
            self._unconfirmed_topics.append(target_topic(record))
            return
        enqueued = b"TIMER_ENQUEUE_MS\x01%d\x02" % self._slot_start(record.store_time_ms)
        topic = self._redelivery.deliver(record, enqueued + added_properties)
        if topic is not None:
            self._unconfirmed_topics.append(topic)

    def _read_timed_message(self, position: int, due_ms: int) -> Record | None:
        """Return the timed message at a position of the commit log, or None if it is not there.

        If retention has removed it, an error is logged. If another record is there, the timer log
        is damaged, and the next `prepare` rebuilds the files.
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

    def _append_rolled(self, due_ms: int, position: int, added_properties: bytes) -> None:
        """Store a message in the timer queue again, because it is due later than the wheel reaches.

        `added_properties` are further encoded properties. Do nothing if the record is missing.
        Raises StoreError if the store accepts no messages.
        """
        record = self._read_timed_message(position, due_ms)
        if record is None:
            return
        properties = build_rolled_properties(record, self.placing, self._clock.lead_ms)
        if TIMER_DELETES not in properties:
            # Indexing the new record counts the message again.
            self._unconfirmed_topics.append(properties.get("REAL_TOPIC", ""))
        properties |= parse_property_text(added_properties.decode())
        self._intake.append(record.copy_to(TIMER_TOPIC, 0, properties))

    def confirm_deliveries(self, *, is_stored: bool) -> None:
        """Record whether the messages that `deliver` appended were stored by the group commit.

        If they were, they are counted as delivered and no longer as waiting. If not, they are put
        back into their tables, and the next `deliver` appends them again.
        """
        unconfirmed = self._unconfirmed
        self._unconfirmed = []
        topics = self._unconfirmed_topics
        self._unconfirmed_topics = []
        if not is_stored:
            for table, chunk in unconfirmed:
                table.put_back(chunk)
            return
        for topic in topics:
            self._add_count(topic, -1)
        for table, chunk in unconfirmed:
            if not chunk:
                continue
            if table is self.due_table:
                self.delivered_count += len(chunk)
            last_due_ms, _position = chunk[-1]
            self._delivered_until_ms = max(self._delivered_until_ms, last_due_ms)
            self._has_delivered = True

    # --- the work

    def prepare(self, work: TimeSlice) -> None:
        """Advance `read_ms`, load slots and index new messages, until the slice `work` is over.

        `read_ms`, the first slot that may have undelivered messages, passes a slot when the slot is
        over and none of its messages is in the tables. If the files are damaged, they are emptied
        first. Messages that retention has removed before they were indexed are logged and skipped.
        At the end, the log is searched for deliveries of overdue messages, and the timer log is
        written. Raises OSError if that fails.
        """
        # Before a rebuild, which empties the tables: `read_ms` must not pass their messages.
        next_ms = self.next_due_ms
        if self._damage_reason:
            self._rebuild_now()
        self._advance_read_ms(work.now_ms, next_ms)
        self._load(work)
        if self._damage_reason:
            self._rebuild_now()
        if self._is_far_behind(work.now_ms):
            return

        self._skip_removed_messages()
        self._index_new_messages(work)
        self._check_overdue(work)
        self.files.log.write()

    def _advance_read_ms(self, now_ms: int, next_due_ms: int | None) -> None:
        """Advance `read_ms` to the first slot that may contain undelivered messages at `now_ms`.

        `next_due_ms` is the time of the next message of the tables, or None. Forget the recalls and
        late slots of the slots that `read_ms` passes.
        """
        limit_ms = min(self._slot_start(now_ms), self._load_done_ms)
        if next_due_ms is not None:
            limit_ms = min(limit_ms, slot_for_due_time(next_due_ms, self._precision_ms))
        if limit_ms <= self.read_ms or self._is_doubtful:
            return
        self.read_ms = limit_ms
        self._late_slots.remove_before(limit_ms)
        self._recalled_keys.remove_before(limit_ms)

    def _skip_removed_messages(self) -> None:
        """Skip the messages that retention has removed before they were indexed, and log that."""
        first_offset, _end_offset = self._store.queue_offsets(TIMER_TOPIC, 0)
        if self.files.queue_offset < first_offset:
            log.error(
                "the timed messages %d to %d are lost: retention has removed them before they were"
                " indexed",
                self.files.queue_offset,
                first_offset - 1,
            )
            self.files.queue_offset = first_offset

    def _index_new_messages(self, work: TimeSlice) -> None:
        """Add new messages of the timer queue to the wheel, until the slice `work` is over."""
        now_ms = self._slot_start(work.now_ms)
        units = self._store.reader.valid_units
        new_entries = iter_queue(self._store, TIMER_TOPIC, 0, self.files.queue_offset, units)
        for entry in takewhile(lambda _: not work.is_over, new_entries):
            self._index(entry, now_ms)
            self.files.queue_offset += 1
            self.files.record_position = entry.position
            work.count_done()

    @property
    def next_due_ms(self) -> int | None:
        """The time when the next loaded message is due or rolls, in ms since 1970, or None."""
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
        return self._late_slots.find_first_offset(default=self.files.queue_offset)

    def _find_done_ms(self, now_ms: int) -> int:
        """Return the latest time, at most `now_ms`, by which all due messages are delivered."""
        next_ms = self.next_due_ms
        # What the last start knew to be delivered remains so, whether it is loaded or not.
        done_ms = max(min(now_ms, self._load_done_ms), self._checkpoint_done_ms)
        if next_ms is not None:
            # A message of a slot that was over when it was loaded is in the table for the end of
            # the slot. Its own time may be any of the slot, so nothing of the slot counts as done.
            is_exact = next_ms > self._inexact_until_ms
            slot_ms = slot_for_due_time(next_ms, self._precision_ms)
            done_ms = min(done_ms, next_ms - 1 if is_exact else slot_ms)
        if self._damage_reason:
            done_ms = min(done_ms, slot_for_due_time(self._damage_due_ms, self._precision_ms))
        return done_ms

    def save(self, *, is_last: bool = False) -> Generator[Callable[[], None]]:
        """Save the timer wheel, timer log and checkpoint to their files if they have changed.

        Yield at most one function, which blocks. The caller calls it on any thread, and then
        resumes the generator. With `is_last` the broker stops, so a checkpoint is written even if
        nothing was delivered. Nothing is saved until overdue messages were looked up, and while the
        files are damaged. Raises OSError.
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
        """Add a unit for the last message of the queue to a slot that is over, if it has none.

        RocketMQ, if it uses these files, continues in the queue after the message of the last unit.
        Without this unit it would deliver the message again.
        """
        entry = self._last_unindexed
        self._last_unindexed = None
        if entry is not None and entry.record is not None:
            slot_ms = self.read_ms - self._precision_ms
            size_bytes = entry.record.size_bytes
            self.files.add_unit(slot_ms, MAGIC_DEFAULT, self.read_ms, entry.position, size_bytes, 0)

    def seal(self) -> None:
        """Mark the files as trustworthy for the next start. Blocking. Raises OSError.

        The caller does this after the last save of an orderly shutdown. Do nothing if that save
        wrote nothing, because messages may be delivered already or the files are damaged.
        """
        if not self._is_doubtful and not self._damage_reason:
            self.files.seal()
