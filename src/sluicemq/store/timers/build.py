"""Build the timer wheel and the timer log of a store that no broker has open, after a restore.

Afterwards every broker, also RocketMQ's, delivers exactly the messages that still wait. The
checkpoint says what was delivered before it was written. What was delivered later, or without a
checkpoint, is found by the records in the queues of the messages (`overdue`). Overdue messages are
put into the first slot.
"""

from collections.abc import Iterator
from contextlib import closing
from typing import Final

from sluicemq.config import StoreConfig
from sluicemq.files import Files
from sluicemq.model.ids import tag_code
from sluicemq.model.system_names import TIMER_TOPIC
from sluicemq.record.codec import find_property
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store
from sluicemq.store.timers.files import MAGIC_DEFAULT, MAGIC_DELETE, MAGIC_ROLL
from sluicemq.store.timers.overdue import DeliveryLookup, OverdueMessage, target_queue
from sluicemq.store.timers.placing import (
    TIMER_DELETES_KEY,
    ParsedRecord,
    SlotRules,
    parse_record,
    recall_key,
)
from sluicemq.store.timers.state import TimerFiles, TimerStart

_CHUNK_UNITS: Final = 256


def build_timer_files(store: Store, files: Files, config: StoreConfig, now_ms: int) -> int:
    """Build wheel, timer log and checkpoint of a store from its commit log, as of `now_ms`.

    The wheel is a ring of slots by due time; the timer log has an entry for each timed message. If
    the existing files can be trusted, nothing is changed.

    Return the number of timed messages that wait to be delivered, including those that are overdue
    at `now_ms`. Return 0 if nothing was built. The call blocks. Raises OSError and StoreError.
    """
    timers = TimerFiles(
        store,
        files,
        config.root,
        log_file_bytes=config.timer_log_file_bytes,
        precision_ms=config.timer_precision_ms,
    )
    start = timers.load()
    if not start.is_rebuilt:
        return 0
    return _Building(store, timers, config, now_ms, start).run()


class _Building:
    """One build: a single pass over the timer queue."""

    def __init__(
        self, store: Store, timers: TimerFiles, config: StoreConfig, now_ms: int, start: TimerStart
    ) -> None:
        """Prepare to build the files of `timers`.

        `start` is the result of `timers.load()`. `now_ms` is the time for which the files are
        built: messages that are due earlier are overdue.
        """
        self._store = store
        self._timers = timers
        self._now_ms = now_ms
        self._rules = SlotRules(config.timer_precision_ms, config.timer_roll_window_slots)
        self._read_ms = self._rules.slot_start(now_ms)
        self._checkpoint = timers.checkpoint
        self._replay_offset = self._checkpoint.replay_offset if start.is_exact else 0
        self._overdue = DeliveryLookup(store, store.written_offset)
        self._recalls: set[bytes] = set()
        self._undelivered: list[OverdueMessage] = []
        self._waiting = 0

    def run(self) -> int:
        """Read the whole timer queue, and write wheel, timer log and checkpoint for it.

        Messages that were delivered are left out, according to the checkpoint or because the
        delivery is found in the message's own queue. Other overdue messages go to the first slot.
        At the end the files are sealed: marked as complete and trusted.

        Return the number of messages that wait to be delivered.
        """
        last_record = self._read_queue()
        late_records = self._read_late_records()
        for record, magic in late_records:
            self._add_unit(record, self._read_ms, magic)
            self._waiting += 1
        if last_record is not None and not self._is_last_unit(last_record):
            # RocketMQ continues in the timer queue behind the message of the last unit.
            self._add_unit(last_record, self._read_ms - self._rules.precision_ms, MAGIC_DEFAULT)

        late_offsets = [record.queue_offset for record, _ in late_records]
        self._save_files(min(late_offsets, default=self._timers.queue_offset))
        self._timers.seal()
        return self._waiting

    def _read_queue(self) -> ParsedRecord | None:
        """Add the messages of the timer queue to their slots; collect the overdue ones.

        The overdue messages that were not delivered are in `_undelivered` afterwards. Return the
        record of the last message. Return None if it cannot be read, or if the queue is empty.
        """
        last_record = None
        for offset, position, record in self._iter_queue():
            self._timers.queue_offset = offset + 1
            self._timers.record_position = position
            last_record = record
            if record is not None:
                self._add_or_look_up(record)
            if self._overdue.is_full:
                self._look_up_deliveries()
        self._look_up_deliveries()
        return last_record

    def _read_late_records(self) -> list[tuple[ParsedRecord, int]]:
        """Read the records of the messages in `_undelivered`; leave out recalled and lost ones.

        Return a list of (record, magic), where magic contains the flags of the timer log's entry.
        """
        late_records = []
        for message in self._undelivered:
            record = self._read_undelivered(message)
            if record is not None:
                late_records.append((record, message.magic))
        return late_records

    def _is_last_unit(self, record: ParsedRecord) -> bool:
        """Return whether the last unit (entry) of the timer log is the unit of this record."""
        unit = self._timers.last_unit
        return unit is not None and unit.position == record.physical_offset

    def _save_files(self, replay_offset: int) -> None:
        """Write wheel, timer log and checkpoint to the disk.

        `replay_offset` is the offset in the timer queue of the first message that may still have to
        be delivered although the checkpoint's times say that it was.
        """
        saving = self._timers.save(
            read_ms=self._read_ms,
            now_ms=self._now_ms,
            done_ms=self._read_ms,
            replay_offset=replay_offset,
            log_position=self._store.written_offset,
            force=True,
        )
        with closing(saving) as steps:
            for write in steps:
                write()

    def _iter_queue(self) -> Iterator[tuple[int, int, ParsedRecord | None]]:
        """Yield (offset, commit log position, record) for each message of the timer queue.

        The record is None if it cannot be read, or if the unit is blank.
        """
        store = self._store
        offset, end_offset = store.queue_offsets(TIMER_TOPIC, 0)
        while offset < end_offset:
            units = store.committed_units(TIMER_TOPIC, 0, offset, _CHUNK_UNITS)
            if not len(units):
                return
            for position, size, _ in UNIT.iter_unpack(units):
                view = None
                if size != BLANK_SIZE:
                    view = store.committed_record(position, size)
                yield offset, position, parse_record(view)
                offset += 1

    def _add_or_look_up(self, record: ParsedRecord) -> None:
        """Add a message of the timer queue to its slot, or note it as overdue.

        An overdue message waits in `_overdue` until `_look_up_deliveries` finds out whether it was
        delivered. An overdue recall, which cancels a message, is noted in `_recalls`. A message
        without a valid due time, or that was delivered according to the checkpoint, is skipped.
        """
        assignment = self._rules.assign_slot(record, self._read_ms)
        if assignment is None:
            return
        slot_ms, magic = assignment
        is_roll = bool(magic & MAGIC_ROLL)
        is_recall = bool(magic & MAGIC_DELETE)
        # A message that rolls is only put into the timer queue again, when its slot begins.
        due_ms = slot_ms + 1 if is_roll else self._rules.compute_due_ms(record)
        is_old = record.queue_offset < self._replay_offset
        was_due = slot_ms < self._checkpoint.read_ms or due_ms <= self._checkpoint.done_ms
        if is_old and was_due:
            return  # the checkpoint counts it as delivered
        if slot_ms >= self._read_ms:
            self._add_unit(record, slot_ms, magic)
            self._waiting += -1 if is_recall else 1  # a recall cancels a message
        elif is_recall and not is_roll:
            self._recalls.add(find_property(record.properties, TIMER_DELETES_KEY) or b"")
        else:
            message = OverdueMessage(record.physical_offset, slot_ms, due_ms, magic, has_unit=False)
            position_min = record.physical_offset
            if is_old:
                position_min = self._checkpoint.log_position
            self._overdue.add(record, message, position_min, is_roll=is_roll)

    def _look_up_deliveries(self) -> None:
        """Move the messages in `_overdue` that were not delivered to `_undelivered`.

        The delivered messages are dropped, so `_overdue` is empty afterwards.
        """
        # The generator yields between its steps, and returns the messages at the end.
        steps = self._overdue.find_undelivered()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                self._undelivered += end.value
                return

    def _read_undelivered(self, message: OverdueMessage) -> ParsedRecord | None:
        """Return the record of an overdue message that must be delivered.

        Return None if its record or topic no longer exists, or if it was recalled.
        """
        record = parse_record(self._store.committed_record_at(message.position))
        if record is None:
            return None
        topic, _ = target_queue(record)
        if not self._store.is_record_live(topic, message.position):
            return None
        is_recalled = recall_key(record.properties) in self._recalls
        is_roll = bool(message.magic & MAGIC_ROLL)
        if is_recalled and not is_roll:
            return None
        return record

    def _add_unit(self, record: ParsedRecord, slot_ms: int, magic: int) -> None:
        """Append a unit (an entry of the timer log) for a record to the slot at `slot_ms`.

        `magic` contains the flags of the unit.
        """
        topic, _ = target_queue(record)
        self._timers.add_unit(
            slot_ms,
            magic,
            self._read_ms,
            record.physical_offset,
            record.size_bytes,
            tag_code(topic),
        )
