"""Build the timer wheel and the timer log of a store that no broker has open, after a restore.

Afterwards every broker, also RocketMQ's, delivers exactly the messages that still wait. The
checkpoint says what was delivered before it was written. What was delivered later, or without a
checkpoint, is found by the records in the queues of the messages (`overdue`). Overdue messages are
put into the first slot.
"""

from collections.abc import Iterator
from contextlib import closing
from typing import Final, NamedTuple

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


class BuildResult(NamedTuple):
    """The result of a build: the number of waiting timed messages, overdue ones included."""

    waiting: int
    overdue: int
    """The number of waiting messages that are overdue."""


def build_timer_files(store: Store, files: Files, config: StoreConfig, now_ms: int) -> BuildResult:
    """Build wheel, timer log and checkpoint of a store from its commit log, as of `now_ms`.

    If the existing files can be trusted, change nothing and return BuildResult(0, 0). The call
    blocks. Raises OSError and StoreError.
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
        return BuildResult(0, 0)
    return _Building(store, timers, config, now_ms, start).run()


class _Building:
    """One build: a single pass over the timer queue."""

    def __init__(
        self, store: Store, timers: TimerFiles, config: StoreConfig, now_ms: int, start: TimerStart
    ) -> None:
        """Prepare a build into `timers`, whose `load` returned `start`."""
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

    def run(self) -> BuildResult:
        """Read the whole timer queue, fill wheel and log, save and seal them.

        Messages that the checkpoint counts as delivered, or whose delivery is found in their own
        queue, are left out. The other overdue ones are added to the first slot. Return their
        numbers.
        """
        timers = self._timers
        last = None
        for offset, position, record in self._queue():
            timers.queue_offset = offset + 1
            timers.record_position = position
            last = record
            if record is not None:
                self._process(record)
            if self._overdue.is_full:
                self._look_up_deliveries()
        self._look_up_deliveries()
        late = [
            record
            for message in self._undelivered
            if (record := self._read_undelivered(message)) is not None
        ]
        is_last_added = self._add_late(late, last)
        if last is not None and not is_last_added:
            # RocketMQ continues in the timer queue behind the message of the last unit.
            self._add(last, self._read_ms - self._rules.precision_ms, MAGIC_DEFAULT)
        offsets = [record.queue_offset for record in late]
        saving = timers.save(
            read_ms=self._read_ms,
            now_ms=self._now_ms,
            done_ms=self._read_ms,
            replay_offset=min(offsets, default=timers.queue_offset),
            log_position=self._store.written_offset,
            force=True,
        )
        with closing(saving) as steps:
            for step in steps:
                step()
        timers.seal()
        return BuildResult(self._waiting, len(late))

    def _queue(self) -> Iterator[tuple[int, int, ParsedRecord | None]]:
        """Yield (offset, commit log position, record) for each message of the timer queue.

        The record is None if it cannot be read, or if the unit is blank.
        """
        store = self._store
        offset, high = store.queue_offsets(TIMER_TOPIC, 0)
        while offset < high and len(
            units := store.committed_units(TIMER_TOPIC, 0, offset, _CHUNK_UNITS)
        ):
            for position, size, _ in UNIT.iter_unpack(units):
                view = store.committed_record(position, size) if size != BLANK_SIZE else None
                yield offset, position, parse_record(view)
                offset += 1

    def _process(self, record: ParsedRecord) -> None:
        """Add a message to its slot if it is not due yet.

        An overdue message waits until `_look_up_deliveries` knows whether it was delivered, and an
        overdue recall is remembered. A message that the checkpoint counts as delivered is skipped.
        """
        assignment = self._rules.assign_slot(record, self._read_ms)
        if assignment is None:
            return
        slot_ms, magic = assignment
        is_roll = bool(magic & MAGIC_ROLL)
        due_ms = slot_ms + 1 if is_roll else self._rules.compute_due_ms(record)
        is_old = record.queue_offset < self._replay_offset
        if is_old and (slot_ms < self._checkpoint.read_ms or due_ms <= self._checkpoint.done_ms):
            return
        if slot_ms >= self._read_ms:
            self._add(record, slot_ms, magic)
            self._waiting += -1 if magic & MAGIC_DELETE else 1  # a recall cancels a message
        elif magic & MAGIC_DELETE and not is_roll:
            self._recalls.add(find_property(record.properties, TIMER_DELETES_KEY) or b"")
        else:
            message = OverdueMessage(record.physical_offset, slot_ms, due_ms, magic, has_unit=False)
            floor = self._checkpoint.log_position if is_old else record.physical_offset
            self._overdue.add(record, message, floor, is_roll=is_roll)

    def _look_up_deliveries(self) -> None:
        """Add the overdue messages that were not delivered to `_undelivered`.

        Afterwards no message waits in `_overdue`.
        """
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
        if record is None or not self._store.is_record_live(
            target_queue(record)[0], message.position
        ):
            return None
        is_recalled = recall_key(record.properties) in self._recalls
        return None if is_recalled and not message.magic & MAGIC_ROLL else record

    def _add_late(self, late: list[ParsedRecord], last: ParsedRecord | None) -> bool:
        """Add the overdue messages `late` to the first slot, and count them as waiting.

        Return whether the last unit of the timer log is now that of `last`, the last message of the
        timer queue; False if `last` is None.
        """
        magics = {message.position: message.magic for message in self._undelivered}
        for record in late:
            self._add(record, self._read_ms, magics[record.physical_offset])
            self._waiting += 1
        unit = self._timers.last_unit
        return unit is not None and last is not None and unit.position == last.physical_offset

    def _add(self, record: ParsedRecord, slot_ms: int, magic: int) -> None:
        """Append a unit for a record to the chain of a slot."""
        self._timers.add_unit(
            slot_ms,
            magic,
            self._read_ms,
            record.physical_offset,
            record.size_bytes,
            tag_code(target_queue(record)[0]),
        )
