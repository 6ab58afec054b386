"""What `Timers` knows about the records of timed messages: their slots, recalls and topics."""

from array import array
from collections import deque
from collections.abc import Generator, Sequence
from typing import Final

from sluicemq.broker.produce.intake import Record, decode_topic_name, iter_queue
from sluicemq.model.system_names import TIMER_TOPIC
from sluicemq.numbers import natural
from sluicemq.record.codec import find_property
from sluicemq.store.store import Store
from sluicemq.store.timers.files import MAGIC_DELETE, MAGIC_ROLL, NO_UNIT
from sluicemq.store.timers.placing import (
    REAL_TOPIC_KEY,
    TIMER_DELETES_KEY,
    SlotRules,
    recall_key,
    slot_for_due_time,
)
from sluicemq.store.timers.state import TimerFiles

_STEP_UNITS: Final = 256
"""The units of the timer log that `read_slot_units` reads before it yields."""


def target_topic(record: Record) -> str:
    """Return the topic to which a timed message is delivered, "" if the record names none."""
    return decode_topic_name(find_property(record.properties, REAL_TOPIC_KEY) or b"")


def find_newest_store_ms(store: Store, placing: SlotRules) -> int:
    """Return the time when the newest message of the timer queue was stored, in ms since 1970.

    It is a time of the steady clock, computed from the message's slot. If the message has no slot,
    it is the wall-clock time in the record. Return 0 if the queue is empty or the record is
    missing.
    """
    first_offset, end_offset = store.queue_offsets(TIMER_TOPIC, 0)
    if first_offset == end_offset:
        return 0
    newest = next(iter_queue(store, TIMER_TOPIC, 0, end_offset - 1), None)
    if newest is None or newest.record is None:
        return 0
    out_ms = newest.record.get_number("TIMER_OUT_MS")
    if out_ms is None:
        return newest.record.store_time_ms
    return placing.stored_at_ms(newest.record, placing.slot_start(out_ms))


def read_slot_units(
    files: TimerFiles, slot_ms: int, end: int
) -> "Generator[None, None, tuple[array[int], array[int]] | None]":
    """Read the units of a slot, that is the entries of the timer log for its messages.

    This is a generator, which yields after each `_STEP_UNITS` units. Its return value is a tuple of
    two arrays, with the newest unit first: the positions of the messages in the commit log, and
    their flags (MAGIC_ROLL, MAGIC_DELETE). It is None if a unit cannot be read. Units at position
    `end` of the timer log or later are left out.
    """
    positions = array("q")
    magics = array("b")
    slot = files.wheel.get(slot_ms)
    last_unit = NO_UNIT if slot is None else slot.last_unit
    for unit_position, unit in files.iter_chain(slot_ms, last_unit):
        if unit is None:
            return None
        if unit_position < end:
            positions.append(unit.position)
            magics.append(unit.magic & (MAGIC_ROLL | MAGIC_DELETE))
            if len(positions) % _STEP_UNITS == 0:
                yield
    return positions, magics


def build_rolled_properties(record: Record, placing: SlotRules, lead_ms: int) -> dict[str, str]:
    """Return the properties with which a timed message is stored in the timer queue again.

    That is necessary if the message is due later than the timer wheel reaches. They are the
    properties of `record` with three changes:

    - TIMER_DELIVER_MS is the due time by the wall clock. `lead_ms` is how far the steady clock is
      ahead of the wall clock.
    - TIMER_ROLL_TIMES, the number of times it was stored again, is increased by one.
    - TIMER_ENQUEUE_MS is the start of the slot in which `record` was stored.
    """
    properties = record.decode_properties()
    roll_count = natural(properties.get("TIMER_ROLL_TIMES", "0")) or 0
    properties["TIMER_DELIVER_MS"] = str(placing.compute_due_ms(record) - lead_ms)
    properties["TIMER_ROLL_TIMES"] = str(roll_count + 1)
    properties["TIMER_ENQUEUE_MS"] = str(placing.slot_start(record.store_time_ms))
    return properties


def find_recall_markers(magics: Sequence[int]) -> list[int]:
    """Return the indexes of the recall markers among the magics that `read_slot_units` returned."""
    if not any(magics):
        return []
    return [index for index, magic in enumerate(magics) if magic == MAGIC_DELETE]


class LateSlots:
    """The slots with messages that came too late for their own slot.

    Each slot is kept with the offset in the timer queue of the first such message. Slots are added
    in ascending order.
    """

    def __init__(self) -> None:
        self._slots: deque[tuple[int, int]] = deque()
        """The start of a slot in ms since 1970, and an offset of the timer queue."""

    def add(self, slot_ms: int, offset: int) -> None:
        """Record that the slot contains the late message at `offset` of the timer queue.

        Do nothing if the last recorded message is in the same slot and has no higher offset.
        """
        if self._slots:
            last_slot_ms, last_offset = self._slots[-1]
            if last_slot_ms == slot_ms and last_offset <= offset:
                return
        self._slots.append((slot_ms, offset))

    def remove_before(self, slot_ms: int) -> None:
        """Remove the slots before `slot_ms`, whose messages are all delivered."""
        while self._slots and self._slots[0][0] < slot_ms:
            self._slots.popleft()

    def find_first_offset(self, default: int) -> int:
        """Return the lowest offset of a late message, or `default` if no slot is known."""
        return min((offset for _, offset in self._slots), default=default)

    def clear(self) -> None:
        """Remove all slots."""
        self._slots.clear()


class RecalledKeys:
    """The keys of messages that recall markers of loaded slots recall, by slot."""

    def __init__(self, precision_ms: int) -> None:
        """Create the keys without one. `precision_ms` is the width of a slot."""
        self._precision_ms = precision_ms
        self._keys_by_slot: dict[int, set[bytes]] = {}
        """By the start of a slot in ms since 1970. A slot without recalls has no entry."""

    def add(self, slot_ms: int, marker: Record) -> None:
        """Add the key in a recall marker of a slot. Do nothing if the marker has none."""
        key = find_property(marker.properties, TIMER_DELETES_KEY)
        if key is not None:
            self._keys_by_slot.setdefault(slot_ms, set()).add(key)

    # Called for each message that is due: keep it cheap.
    def is_recalled(self, record: Record, due_ms: int) -> bool:
        """Return whether a recall marker in the slot of `due_ms` recalls the message `record`.

        `due_ms` is the due time of the message.
        """
        if not self._keys_by_slot:
            return False
        keys = self._keys_by_slot.get(slot_for_due_time(due_ms, self._precision_ms))
        return keys is not None and recall_key(record.properties) in keys

    def remove_before(self, slot_ms: int) -> None:
        """Remove the keys of the slots before `slot_ms`, whose messages are all delivered."""
        passed_slots = [slot for slot in self._keys_by_slot if slot < slot_ms]
        for slot in passed_slots:
            del self._keys_by_slot[slot]
