"""Build the timer wheel and the timer log in one run, for a store that no broker has open: after a
restore.

Every broker, RocketMQ's too, then delivers exactly the messages that wait. The checkpoint tells
what was delivered before it was written. What was delivered later, or without a checkpoint, is
found by the records in the queues of the messages (`overdue`). Overdue messages go into the first
slot.
"""

from collections.abc import Iterator
from contextlib import closing
from typing import Final, NamedTuple

from sluicemq.config import StoreConfig
from sluicemq.files import Files
from sluicemq.model.ids import tag_code
from sluicemq.model.system_names import TIMER_TOPIC
from sluicemq.record.codec import value_of
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store
from sluicemq.store.timers.files import DEFAULT, DELETE, ROLL
from sluicemq.store.timers.overdue import Overdue, OverdueMessages, target_queue
from sluicemq.store.timers.placing import DELETES, Placing, ReadRecord, parse_record, recall_key
from sluicemq.store.timers.state import Start, TimerFiles

_CHUNK_UNITS: Final = 256


class Built(NamedTuple):
    """The result of a build: how many timed messages wait, and how many of those are overdue."""

    waiting: int
    overdue: int


def build_timer_files(store: Store, files: Files, config: StoreConfig, now_ms: int) -> Built:
    """Build wheel, timer log and checkpoint of a store from its commit log, as of `now_ms`. If the
    files that are there can be trusted, change nothing and return Built(0, 0). Blocking. Raises
    OSError, StoreError."""
    timers = TimerFiles(
        store, files, config.root, log_file_bytes=config.timer_log_file_bytes,
        precision_ms=config.timer_precision_ms,
    )  # fmt: skip
    start = timers.load()
    if not start.is_rebuilt:
        return Built(0, 0)
    return _Building(store, timers, config, now_ms, start).run()


class _Building:
    """A build: one run over the timer queue."""

    def __init__(
        self, store: Store, timers: TimerFiles, config: StoreConfig, now_ms: int, start: Start
    ) -> None:
        self._store, self._timers, self._now_ms = store, timers, now_ms
        self._placing = Placing(config.timer_precision_ms, config.timer_roll_window_slots)
        self._read_ms = self._placing.slot_start(now_ms)
        self._known = timers.checkpoint
        self._replay_offset = self._known.replay_offset if start.is_exact else 0
        self._overdue = OverdueMessages(store, store.written_offset)
        self._marks: set[bytes] = set()
        self._left: list[Overdue] = []
        self._waiting = 0

    def run(self) -> Built:
        """Read the timer queue, fill wheel and log, save and seal them."""
        timers, last = self._timers, None
        for offset, position, record in self._queue():
            timers.queue_offset, timers.record_position = offset + 1, position
            last = record
            if record is not None:
                self._take(record)
            if self._overdue.is_full:
                self._settle()
        self._settle()
        late = [record for message in self._left if (record := self._missed(message)) is not None]
        is_last_listed = self._list_late(late, last)
        if last is not None and not is_last_listed:
            # RocketMQ goes on in the queue behind the message of the last unit.
            self._add(last, self._read_ms - self._placing.precision_ms, DEFAULT)
        offsets = [record.queue_offset for record in late]
        saving = timers.save(
            self._read_ms, self._now_ms, self._read_ms, min(offsets, default=timers.queue_offset),
            self._store.written_offset, force=True,
        )  # fmt: skip
        with closing(saving) as steps:
            for step in steps:
                step()
        timers.seal()
        return Built(self._waiting, len(late))

    def _queue(self) -> Iterator[tuple[int, int, ReadRecord | None]]:
        store = self._store
        offset, high = store.queue_offsets(TIMER_TOPIC, 0)
        while offset < high and len(
            units := store.committed_units(TIMER_TOPIC, 0, offset, _CHUNK_UNITS)
        ):
            for position, size, _ in UNIT.iter_unpack(units):
                view = store.committed_record(position, size) if size != BLANK_SIZE else None
                yield offset, position, parse_record(view)
                offset += 1

    def _take(self, record: ReadRecord) -> None:
        """Add a message to its slot if it is not due yet; else let it wait until `_settle` knows
        whether it was delivered. Skip a message that the checkpoint counts as delivered, and
        remember an overdue recall."""
        place = self._placing.place(record, self._read_ms)
        if place is None:
            return
        slot_ms, magic = place
        is_roll = bool(magic & ROLL)
        due_ms = slot_ms + 1 if is_roll else self._placing.due_ms(record)
        is_old = record.queue_offset < self._replay_offset
        if is_old and (slot_ms < self._known.read_ms or due_ms <= self._known.done_ms):
            return
        if slot_ms >= self._read_ms:
            self._add(record, slot_ms, magic)
            self._waiting += -1 if magic & DELETE else 1  # a mark takes one of them back
        elif magic & DELETE and not is_roll:
            self._marks.add(value_of(record.properties, DELETES) or b"")
        else:
            message = Overdue(record.physical_offset, slot_ms, due_ms, magic, has_unit=False)
            floor = self._known.log_position if is_old else record.physical_offset
            self._overdue.add(record, message, floor, is_roll=is_roll)

    def _settle(self) -> None:
        steps = self._overdue.settle()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                self._left += end.value
                return

    def _missed(self, message: Overdue) -> ReadRecord | None:
        """Return the record of an overdue message that has to be delivered. Return None if its
        record or topic is gone, or if it was recalled."""
        record = parse_record(self._store.committed_record_at(message.position))
        if record is None or not self._store.is_record_live(
            target_queue(record)[0], message.position
        ):
            return None
        is_recalled = recall_key(record.properties) in self._marks
        return None if is_recalled and not message.magic & ROLL else record

    def _list_late(self, late: list[ReadRecord], last: ReadRecord | None) -> bool:
        """Add the overdue messages to the first slot. Return whether the last unit of the log is
        that of `last`, the last message of the timer queue."""
        magics = {message.position: message.magic for message in self._left}
        for record in late:
            self._add(record, self._read_ms, magics[record.physical_offset])
            self._waiting += 1
        unit = self._timers.last_unit
        return unit is not None and last is not None and unit.position == last.physical_offset

    def _add(self, record: ReadRecord, slot_ms: int, magic: int) -> None:
        self._timers.add(
            slot_ms, magic, self._read_ms, record.physical_offset, record.size_bytes,
            tag_code(target_queue(record)[0]),
        )  # fmt: skip
