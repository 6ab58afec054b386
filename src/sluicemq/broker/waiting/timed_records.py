"""Functions on the records of timed messages, and the slots of messages that came too late."""

from collections import deque

from sluicemq.broker.produce.intake import Record, decode_topic_name, iter_queue
from sluicemq.model.system_names import TIMER_TOPIC
from sluicemq.numbers import natural
from sluicemq.record.codec import find_property
from sluicemq.store.store import Store
from sluicemq.store.timers.placing import REAL_TOPIC_KEY, SlotRules


def target_topic(record: Record) -> str:
    """Return the topic to which a timed message is delivered, "" if the record names none."""
    return decode_topic_name(find_property(record.properties, REAL_TOPIC_KEY) or b"")


def find_newest_store_ms(store: Store, placing: SlotRules) -> int:
    """Return when the newest message of the timer queue was stored, by the steady clock.

    The result is in ms since 1970; 0 if the queue is empty or the record is missing. The time is
    computed from the message's slot. Without a slot, it is the wall-clock time in the record.
    """
    low, high = store.queue_offsets(TIMER_TOPIC, 0)
    if low == high:
        return 0
    entry = next(iter_queue(store, TIMER_TOPIC, 0, high - 1), None)
    if entry is None or entry.record is None:
        return 0
    out_ms = entry.record.get_number("TIMER_OUT_MS")
    if out_ms is None:
        return entry.record.store_time_ms
    return placing.stored_at_ms(entry.record, placing.slot_start(out_ms))


def build_rolled_properties(record: Record, placing: SlotRules, lead_ms: int) -> dict[str, str]:
    """Return the properties with which a timed message is stored in the timer queue again.

    TIMER_DELIVER_MS is set to the due time by the wall clock, which the steady clock is `lead_ms`
    ahead of. TIMER_ROLL_TIMES is one higher than in the record, and TIMER_ENQUEUE_MS is the slot in
    which the record was stored.
    """
    properties = record.decode_properties()
    roll_count = natural(properties.get("TIMER_ROLL_TIMES", "0")) or 0
    properties["TIMER_DELIVER_MS"] = str(placing.compute_due_ms(record) - lead_ms)
    properties["TIMER_ROLL_TIMES"] = str(roll_count + 1)
    properties["TIMER_ENQUEUE_MS"] = str(placing.slot_start(record.store_time_ms))
    return properties


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

        Do nothing if an earlier late message of the same slot is known.
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
