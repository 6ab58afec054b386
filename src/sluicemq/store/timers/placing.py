"""Placing: to which slot of the timer wheel a timed message belongs.

A slot is `precision_ms` wide (timerPrecisionMs, 100 to 60,000; 1,000 by default), and `slot_ms` is
its beginning. A message of the timer queue (rmq_sys_wheel_timer, queue 0) names its slot in
TIMER_OUT_MS, and its own topic and queue in REAL_TOPIC and REAL_QID (spec/delivery.md §2).
Everything here follows from the record alone, so a broker, a restore and a verification place a
message alike.
"""

from typing import Final, NamedTuple, Protocol

from sluicemq.errors import ProtocolError
from sluicemq.model import properties as reserved
from sluicemq.model.message import TIMER_PROPERTIES
from sluicemq.numbers import natural
from sluicemq.record.codec import parse_head, value_of
from sluicemq.store.timers.files import DEFAULT, DELETE, ROLL

TIMER_OUT: Final = reserved.TIMER_OUT
TIMER_DELETES: Final = reserved.TIMER_DELETES
OUT: Final = TIMER_OUT.encode()
DELETES: Final = TIMER_DELETES.encode()
ROLLS: Final = b"TIMER_ROLL_TIMES"
REAL_TOPIC: Final = b"REAL_TOPIC"
REAL_QUEUE: Final = b"REAL_QID"
UNIQUE_ID: Final = b"UNIQ_KEY"
_SECONDS, _MILLISECONDS, _DELIVER = TIMER_PROPERTIES
_TIMES: Final = (
    (_SECONDS.encode(), 1000, True),
    (_MILLISECONDS.encode(), 1, True),
    (_DELIVER.encode(), 1, False),
)
"""Of each delay property: its name, its unit in ms, and whether it counts from the store time."""
_DIGITS_MAX: Final = 18
_LEAD_MIN_MS: Final = 2_000
"""A smaller difference of slots is no lead: the store's clock is read a moment later."""


class TimedRecord(Protocol):
    """The fields of a stored record that timers need."""

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


class ReadRecord(NamedTuple):
    """A `TimedRecord` as `parse_record` finds it."""

    size_bytes: int
    body_crc: int
    queue_offset: int
    physical_offset: int
    born_time_ms: int
    born_host: bytes
    store_time_ms: int
    topic: bytes
    properties: bytes


def parse_record(view: memoryview | bytes | None) -> ReadRecord | None:
    """Parse the record at the beginning of `view`, timed or not; return None if no whole record
    begins there."""
    if view is None:
        return None
    try:
        head = parse_head(view)
    except ProtocolError:
        return None
    return ReadRecord(
        head.size_bytes,
        head.body_crc,
        head.queue_offset,
        head.physical_offset,
        head.born_time_ms,
        bytes(view[head.born_host]),
        head.store_time_ms,
        bytes(view[head.topic]),
        bytes(view[head.properties]),
    )


class Place(NamedTuple):
    """The slot of a message, in ms, and the magic of its unit."""

    slot_ms: int
    magic: int


class Placing:
    """The rules of one broker: the precision of its wheel, and how far ahead a slot may lie."""

    def __init__(self, precision_ms: int, window_slots: int) -> None:
        """Take timerPrecisionMs and timerRollWindowSlot."""
        self.precision_ms = precision_ms
        self._window_slots = window_slots
        self._window_ms = window_slots * precision_ms

    def slot_start(self, time_ms: int) -> int:
        """Return the beginning of the slot that `time_ms` is in."""
        return time_ms - time_ms % self.precision_ms

    def place(self, record: TimedRecord, write_ms: int) -> Place | None:
        """Return the slot and magic of a message that is read from the timer queue at `write_ms`;
        None if it has no valid TIMER_OUT_MS.

        A message that is due beyond the window rolls: its unit is in the slot in which the message
        is put into the timer queue again.
        """
        out = value_of(record.properties, OUT)
        if out is None or not out.isdigit() or len(out) > _DIGITS_MAX:
            return None
        slot_ms, magic = self.slot_start(int(out)), DEFAULT
        begin_ms = min(self.slot_start(self.stored_ms(record, slot_ms)), write_ms)
        if slot_ms - begin_ms >= self._window_ms:
            magic |= ROLL
            # Looked at again when the wheel ends, or half-way when little would be left then.
            left_ms = slot_ms - begin_ms - self._window_ms
            is_near = left_ms < self._window_slots // 3 * self.precision_ms
            slots = self._window_slots // 2 if is_near else self._window_slots
            slot_ms = begin_ms + slots * self.precision_ms
        if DELETES in record.properties:
            magic |= DELETE
        return Place(slot_ms, magic)

    def stored_ms(self, record: TimedRecord, slot_ms: int) -> int:
        """Return the time of the broker's clock at which `record`, whose slot is `slot_ms`, was
        stored: its store time plus the lead that this clock had over the wall clock."""
        named_ms = named_due_ms(record.properties, record.store_time_ms)
        lead_ms = 0 if named_ms is None else lead_of(named_ms, slot_ms, self.precision_ms)
        return record.store_time_ms + lead_ms

    def due_ms(self, record: TimedRecord) -> int:
        """Return when a message is due, in ms since 1970. Raises ValueError if TIMER_OUT_MS is no
        number: `place` has to accept the record first."""
        out_ms = int(value_of(record.properties, OUT) or 0)
        return exact_due_ms(
            record.properties, self.slot_start(out_ms), record.store_time_ms, self.precision_ms
        )


def slot_of(due_ms: int, precision_ms: int) -> int:
    """Return the slot of a message that is due at `due_ms`: the largest multiple of `precision_ms`
    that is less. A due time on the boundary of two slots belongs to the earlier one."""
    return (due_ms - 1) // precision_ms * precision_ms


def exact_due_ms(properties: bytes, slot_ms: int, store_time_ms: int, precision_ms: int) -> int:
    """Return when a stored message is due, to the ms: later than `slot_ms`, by `precision_ms` at
    most. HOT.

    A relative delay counts from the store time. Of a message that has rolled, only TIMER_DELIVER_MS
    counts. If the broker's clock was ahead of the wall clock (`clock.SteadyClock`) when the message
    was stored, that lead is added. Without a due time in the properties, the message is due at the
    end of the slot.
    """
    due_ms = named_due_ms(properties, store_time_ms)
    if due_ms is None:
        return slot_ms + precision_ms
    due_ms += lead_of(due_ms, slot_ms, precision_ms)
    return min(max(due_ms, slot_ms + 1), slot_ms + precision_ms)


def lead_of(due_ms: int, slot_ms: int, precision_ms: int) -> int:
    """Return by how many ms `slot_ms` is later than the slot of `due_ms`, which the properties
    name: the lead that the broker's clock had over the wall clock (`clock.SteadyClock`). Return 0
    for a difference of up to 2 s."""
    lead_ms = slot_ms - slot_of(due_ms, precision_ms)
    return lead_ms if abs(lead_ms) > _LEAD_MIN_MS else 0


def named_due_ms(properties: bytes, store_time_ms: int) -> int | None:
    """Return the due time in ms that the delay properties of a stored message name, by the wall
    clock; None if they name none. Relative delays count from `store_time_ms`, and not at all once
    the message has rolled. HOT."""
    has_rolled = ROLLS + b"\x01" in properties
    for name, unit_ms, is_relative in _TIMES:
        value = value_of(properties, name)
        if value is None or (has_rolled and is_relative):
            continue
        if (number := natural(value)) is not None:
            return number * unit_ms + (store_time_ms if is_relative else 0)
    return None


def recall_key(properties: bytes) -> bytes:
    """Return the key by which a recall names this message: its topic, "+" and its unique id."""
    name = value_of(properties, REAL_TOPIC) or b""
    return name + b"+" + (value_of(properties, UNIQUE_ID) or b"")
