"""Records of timed messages: when the newest one was stored, and the copy of one that rolls."""

from sluicemq.broker.produce.intake import MessageToStore, Record, iter_queue
from sluicemq.model.system_names import TIMER_TOPIC
from sluicemq.numbers import natural
from sluicemq.record.codec import parse_property_text
from sluicemq.store.store import Store
from sluicemq.store.timers.placing import SlotRules


def find_newest_store_ms(store: Store, placing: SlotRules) -> int:
    """Return when the newest message of the timer queue was stored, by the steady clock.

    The time is in ms since 1970. Return 0 if the queue is empty, or if its last record is missing.
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


def make_rolled_copy(
    record: Record, placing: SlotRules, lead_ms: int, added_properties: bytes
) -> MessageToStore:
    """Return a message for the timer queue that waits for the same time as `record`.

    `lead_ms` is by how much the steady clock, of which the due time is a time, is ahead of the wall
    clock. The copy has one more roll in its count, and the encoded `added_properties`.
    """
    properties = record.decode_properties()
    roll_count = natural(properties.get("TIMER_ROLL_TIMES", "0")) or 0
    properties["TIMER_DELIVER_MS"] = str(placing.compute_due_ms(record) - lead_ms)
    properties["TIMER_ROLL_TIMES"] = str(roll_count + 1)
    properties["TIMER_ENQUEUE_MS"] = str(placing.slot_start(record.store_time_ms))
    properties |= parse_property_text(added_properties.decode())
    return record.copy_to(TIMER_TOPIC, 0, properties)
