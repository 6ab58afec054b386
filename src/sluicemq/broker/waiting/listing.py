"""Lists of the timed messages that wait, for tools.

A timed message is in the timer queue first, and then in the timer wheel, too. A list has many
pages, and messages move from the queue to the wheel meanwhile. So a list notes the offset up to
which messages were in the wheel when it began (`indexed_end`). `iter_queue` yields the messages
from this offset on, and `iter_wheel` those before it.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from sluicemq.broker.produce import intake
from sluicemq.broker.produce.intake import Record, read_record
from sluicemq.broker.waiting.timers import Timers
from sluicemq.clock import SteadyClock
from sluicemq.model.system_names import TIMER_TOPIC
from sluicemq.record.codec import find_property
from sluicemq.store.store import Store
from sluicemq.store.timers.files import MAGIC_DELETE, SLOTS
from sluicemq.store.timers.placing import TIMER_DELETES_KEY, SlotRules, recall_key

NEWEST_UNIT: Final = -2
"""In a cursor: begin at the newest unit of a slot."""
_SLOTS_PER_STEP: Final = 8192
"""The slots of the wheel that are searched before an entry without a message is yielded."""


class WaitingEntry(NamedTuple):
    """One step of a list of waiting messages, usually with a message."""

    record: Record | None
    """The message. None if it was recalled or is missing, or if the step found no message."""
    due_ms: int
    """When the message is due, in ms since 1970."""
    cursor: str
    """Where the list continues behind this entry."""
    level: int = 0
    """The number of its delay level, 0 for a timed message."""
    queue_offset: int = 0
    """The offset of a message in the queue of its delay level."""


class TimerListing:
    """Lists the timed messages of a broker that wait."""

    def __init__(
        self, store: Store, timers: Timers, placing: SlotRules, clock: SteadyClock
    ) -> None:
        """Create a listing of the waiting messages of `timers`.

        `placing` computes the slot and the due time of a message.
        """
        self._store = store
        self._timers = timers
        self._placing = placing
        self._clock = clock
        self._recalled_keys: dict[int, set[bytes]] = {}
        """The slot that was listed last, with the keys of the recall markers that it contains.

        The next page may begin inside of this slot. Its messages are older than the markers."""

    def iter_queue(self, offset: int, indexed_end: int) -> Iterator[WaitingEntry]:
        """Yield an entry for each message that was not in the timer wheel when the list began.

        These are the messages of the timer queue at offset `indexed_end` and later. A new master,
        which has to fill its wheel first, may have many of them. `offset` is where the last page
        ended, or 0 for the first page.

        The entry of a message that cannot be shown has no record: it is a recall marker, has no
        valid time, or its record is missing.
        """
        now_ms = self._clock.now_ms()
        read_units = self._store.reader.valid_units
        start = max(offset, indexed_end)
        for queued in intake.iter_queue(self._store, TIMER_TOPIC, 0, start, read_units):
            record = queued.record
            due_ms = 0
            if record is not None:
                assigned = self._placing.assign_slot(record, now_ms)
                if assigned is None or assigned.magic & MAGIC_DELETE:
                    record = None
                else:
                    due_ms = self._placing.compute_due_ms(record)
            yield WaitingEntry(record, due_ms, f"Q:{queued.offset + 1}:0:{indexed_end}")

    def iter_wheel(self, slot_ms: int, unit: int, indexed_end: int) -> Iterator[WaitingEntry]:
        """Yield an entry for each message in the timer wheel, a ring of slots by due time.

        Slots come in ascending order, and the messages of a slot from the newest to the oldest.
        `slot_ms` and `unit` say where the last page ended: the slot, and the position of a unit in
        the timer log. For the first page they are 0 and NEWEST_UNIT. Messages at offset
        `indexed_end` of the timer queue or later have no record in their entries, because
        `iter_queue` lists them.

        After every _SLOTS_PER_STEP slots an entry without a record is yielded, so that the caller
        can end a page even if the slots are empty.
        """
        precision_ms = self._placing.precision_ms
        read_ms = self._timers.read_ms
        start_ms = max(slot_ms, read_ms)
        is_inside_slot = slot_ms == start_ms and unit != NEWEST_UNIT
        if is_inside_slot:
            recalled = self._recalled_keys.get(slot_ms, set())
            yield from self._iter_slot(slot_ms, unit, indexed_end, recalled)
            start_ms += precision_ms

        step_ms = _SLOTS_PER_STEP * precision_ms
        end_ms = read_ms + SLOTS // 2 * precision_ms
        for step_start_ms in range(start_ms, end_ms, step_ms):
            next_step_ms = step_start_ms + step_ms
            yield from self._iter_slots(step_start_ms, min(next_step_ms, end_ms), indexed_end)
            yield WaitingEntry(None, 0, f"T:{next_step_ms}:{NEWEST_UNIT}:{indexed_end}")

    def _iter_slots(self, start_ms: int, end_ms: int, indexed_end: int) -> Iterator[WaitingEntry]:
        """Yield an entry for each message in the slots from `start_ms` to before `end_ms`.

        The keys of the recall markers of the present slot are kept in `_recalled_keys`.
        """
        wheel = self._timers.files.wheel
        for occupied_ms in wheel.iter_occupied_ms(start_ms, end_ms):
            slot = wheel.get(occupied_ms)
            if slot is not None:
                recalled: set[bytes] = set()
                self._recalled_keys = {occupied_ms: recalled}
                yield from self._iter_slot(occupied_ms, slot.last_unit, indexed_end, recalled)

    def _iter_slot(
        self, slot_ms: int, position: int, indexed_end: int, recalled: set[bytes]
    ) -> Iterator[WaitingEntry]:
        """Yield an entry for each unit of a slot, from the unit at `position` to the oldest one.

        A unit is an entry of the timer log that stands for one message. The yielded entry has no
        record if the unit is a recall marker, if its message is recalled or missing, or if its
        message is at offset `indexed_end` of the timer queue or later.

        `recalled` has the keys of recalled messages. The keys of the recall markers are added to
        it. A marker is newer than the message that it recalls, so it is read first.
        """
        for _, unit in self._timers.files.iter_chain(slot_ms, position):
            if unit is None:
                return  # The timer log is damaged here. The delivery rebuilds it.
            record = read_record(self._store.committed_record_at(unit.position))
            if record is not None and unit.magic & MAGIC_DELETE:
                recalled.add(find_property(record.properties, TIMER_DELETES_KEY) or b"")
                record = None
            if record is not None and recalled and recall_key(record.properties) in recalled:
                record = None
            # `iter_queue` lists these messages.
            if record is not None and record.queue_offset >= indexed_end:
                record = None
            due_ms = self._placing.compute_due_ms(record) if record is not None else 0
            yield WaitingEntry(record, due_ms, f"T:{slot_ms}:{unit.previous}:{indexed_end}")
