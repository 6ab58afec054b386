"""The rules by which a timed message is assigned to a slot of the timer wheel.

A slot is `precision_ms` wide (timerPrecisionMs, 100 to 60,000; 1,000 by default), and `slot_ms` is
its beginning. A message in the timer queue (rmq_sys_wheel_timer, queue 0) has its due slot in the
property TIMER_OUT_MS, and its own topic and queue in REAL_TOPIC and REAL_QID (spec/delivery.md §2).
The slot follows from the record alone. Therefore a broker, a restore and a verification assign a
message to the same slot.
"""

from typing import Final, NamedTuple, Protocol

from sluicemq.errors import ProtocolError
from sluicemq.model import properties as reserved
from sluicemq.model.message import TIMER_PROPERTIES
from sluicemq.numbers import natural
from sluicemq.record.codec import find_property, parse_head
from sluicemq.store.timers.files import MAGIC_DEFAULT, MAGIC_DELETE, MAGIC_ROLL

TIMER_OUT: Final = reserved.TIMER_OUT
TIMER_DELETES: Final = reserved.TIMER_DELETES
TIMER_OUT_KEY: Final = TIMER_OUT.encode()
TIMER_DELETES_KEY: Final = TIMER_DELETES.encode()
ROLL_COUNT_KEY: Final = b"TIMER_ROLL_TIMES"
REAL_TOPIC_KEY: Final = b"REAL_TOPIC"
REAL_QUEUE_KEY: Final = b"REAL_QID"
UNIQUE_ID_KEY: Final = b"UNIQ_KEY"
_SECONDS, _MILLISECONDS, _DELIVER = TIMER_PROPERTIES
_TIMES: Final = (
    (_SECONDS.encode(), 1000, True),
    (_MILLISECONDS.encode(), 1, True),
    (_DELIVER.encode(), 1, False),
)
"""For each delay property: its name, its unit in ms, and whether it counts from the store time."""
_DIGITS_MAX: Final = 18
_LEAD_MIN_MS: Final = 2_000
"""A smaller difference of slots does not count as a lead of the clock.

The store reads the clock slightly later than the broker.
"""


class TimedRecord(Protocol):
    """The fields of a stored record that timers need.

    `properties` and `born_host` are the encoded bytes, and times are milliseconds since 1970.
    """

    @property
    def size_bytes(self) -> int: ...
    @property
    def body_crc(self) -> int: ...
    @property
    def queue_offset(self) -> int: ...
    @property
    def physical_offset(self) -> int: ...
    @property
    def born_time_ms(self) -> int: ...
    @property
    def born_host(self) -> bytes: ...
    @property
    def store_time_ms(self) -> int: ...
    @property
    def properties(self) -> bytes: ...


class ParsedRecord(NamedTuple):
    """The `TimedRecord` that `parse_record` returns."""

    size_bytes: int
    body_crc: int
    queue_offset: int
    physical_offset: int
    born_time_ms: int
    born_host: bytes
    store_time_ms: int
    topic: bytes
    properties: bytes


def parse_record(view: memoryview | bytes | None) -> ParsedRecord | None:
    """Parse the record at the beginning of `view`. It need not be a timed one.

    Return None if `view` is None or no complete record begins there.
    """
    if view is None:
        return None
    try:
        head = parse_head(view)
    except ProtocolError:
        return None
    return ParsedRecord(
        size_bytes=head.size_bytes,
        body_crc=head.body_crc,
        queue_offset=head.queue_offset,
        physical_offset=head.physical_offset,
        born_time_ms=head.born_time_ms,
        born_host=bytes(view[head.born_host]),
        store_time_ms=head.store_time_ms,
        topic=bytes(view[head.topic]),
        properties=bytes(view[head.properties]),
    )


class SlotAssignment(NamedTuple):
    """The slot of a message, in milliseconds since 1970, and the magic of its unit."""

    slot_ms: int
    magic: int


class SlotRules:
    """The rules of one broker: the precision of its wheel, and how far ahead slots may be."""

    def __init__(self, precision_ms: int, window_slots: int) -> None:
        """Create the rules for slots of `precision_ms`, with a window of `window_slots` slots.

        A message that is due later than the window rolls: it is written to the timer queue again
        before. The settings are timerPrecisionMs and timerRollWindowSlot.
        """
        self.precision_ms = precision_ms
        """The width of a slot."""
        self._window_slots = window_slots
        self._window_ms = window_slots * precision_ms

    def slot_start(self, time_ms: int) -> int:
        """Return the beginning of the slot that contains `time_ms`."""
        return time_ms - time_ms % self.precision_ms

    def assign_slot(self, record: TimedRecord, write_ms: int) -> SlotAssignment | None:
        """Choose slot and flags for a message that is read from the timer queue at `write_ms`.

        The slot normally contains the due time, TIMER_OUT_MS. A message that is due after the
        window rolls: its slot is the one in which it is written to the timer queue again, and
        MAGIC_ROLL is set. MAGIC_DELETE is set for a recall, which cancels a message.

        Return None if the message has no valid TIMER_OUT_MS.
        """
        due_text = find_property(record.properties, TIMER_OUT_KEY)
        if due_text is None or not due_text.isdigit() or len(due_text) > _DIGITS_MAX:
            return None
        slot_ms = self.slot_start(int(due_text))
        magic = MAGIC_DEFAULT
        # The window begins when the message was stored, not when it is read. So a late reader
        # chooses the same slot.
        start_ms = min(self.slot_start(self.stored_at_ms(record, slot_ms)), write_ms)
        if slot_ms - start_ms >= self._window_ms:
            magic |= MAGIC_ROLL
            slot_ms = self._roll_slot(start_ms, slot_ms)
        if TIMER_DELETES_KEY in record.properties:
            magic |= MAGIC_DELETE
        return SlotAssignment(slot_ms, magic)

    def _roll_slot(self, start_ms: int, slot_ms: int) -> int:
        """Return the slot in which a message is written to the timer queue again.

        `slot_ms` is the message's own slot, and is beyond the window that begins at `start_ms`. The
        result is the end of the window, or its middle if less than a third of a window would remain
        afterwards.
        """
        left_ms = slot_ms - start_ms - self._window_ms
        rolled_slots = self._window_slots
        if left_ms < self._window_slots // 3 * self.precision_ms:
            rolled_slots = self._window_slots // 2
        return start_ms + rolled_slots * self.precision_ms

    def stored_at_ms(self, record: TimedRecord, slot_ms: int) -> int:
        """Return the time by the broker's clock at which a record was stored.

        `slot_ms` is the slot of its due time, computed with that clock. The clock may be ahead of
        the wall clock, with which the store time was read, so that lead is added.
        """
        due_ms = named_due_ms(record.properties, record.store_time_ms)
        if due_ms is None:
            return record.store_time_ms
        return record.store_time_ms + clock_lead_ms(due_ms, slot_ms, self.precision_ms)

    def compute_due_ms(self, record: TimedRecord) -> int:
        """Return when a message is due, in milliseconds since 1970.

        The record must have a TIMER_OUT_MS that `assign_slot` accepts. Raises ValueError if
        TIMER_OUT_MS is not a number.
        """
        out_ms = int(find_property(record.properties, TIMER_OUT_KEY) or 0)
        return exact_due_ms(
            record.properties, self.slot_start(out_ms), record.store_time_ms, self.precision_ms
        )


def slot_for_due_time(due_ms: int, precision_ms: int) -> int:
    """Return the slot of a message that is due at `due_ms`.

    It is the largest multiple of `precision_ms` below `due_ms`: a due time on the boundary of two
    slots belongs to the earlier one.
    """
    return (due_ms - 1) // precision_ms * precision_ms


def exact_due_ms(properties: bytes, slot_ms: int, store_time_ms: int, precision_ms: int) -> int:
    """Return the exact due time of a stored message, in milliseconds since 1970.

    `slot_ms` is the begin of the message's slot; the result is later by 1 ms to `precision_ms`. The
    delay properties name the due time. A relative delay counts from the store time, and does not
    count after the message has rolled (was written to the timer queue again). If the broker's clock
    was ahead of the wall clock, that lead is added. Without a delay property, the message is due at
    the end of the slot.

    HOT: called for every timed message.
    """
    due_ms = named_due_ms(properties, store_time_ms)
    if due_ms is None:
        return slot_ms + precision_ms
    due_ms += clock_lead_ms(due_ms, slot_ms, precision_ms)
    return min(max(due_ms, slot_ms + 1), slot_ms + precision_ms)


def clock_lead_ms(due_ms: int, slot_ms: int, precision_ms: int) -> int:
    """Return the lead in ms that the broker's clock (`clock.SteadyClock`) had over the wall clock.

    It is the difference between `slot_ms` and the slot of `due_ms`, which the properties of the
    message name. A difference of up to 2 s gives 0.
    """
    lead_ms = slot_ms - slot_for_due_time(due_ms, precision_ms)
    return lead_ms if abs(lead_ms) > _LEAD_MIN_MS else 0


def named_due_ms(properties: bytes, store_time_ms: int) -> int | None:
    """Return the due time that the delay properties of a stored message name, by the wall clock.

    The result is in milliseconds since 1970. It is None if no valid delay property exists. A
    relative delay counts from `store_time_ms`. It is ignored if the message has rolled (was written
    to the timer queue again), because then the store time is a later one.

    HOT: called for every timed message.
    """
    has_rolled = ROLL_COUNT_KEY + b"\x01" in properties
    for name, unit_ms, is_relative in _TIMES:
        encoded = find_property(properties, name)
        if encoded is None or (has_rolled and is_relative):
            continue
        amount = natural(encoded)
        if amount is None:
            continue
        due_ms = amount * unit_ms
        if is_relative:
            due_ms += store_time_ms
        return due_ms
    return None


def recall_key(properties: bytes) -> bytes:
    """Return the key by which a recall names a message: its topic, "+" and its unique id."""
    topic = find_property(properties, REAL_TOPIC_KEY) or b""
    return topic + b"+" + (find_property(properties, UNIQUE_ID_KEY) or b"")
