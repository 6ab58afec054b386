"""Placing: to which second of the timer wheel a timed message belongs.

A message of the timer's queue (rmq_sys_wheel_timer, queue 0) names its second in TIMER_OUT_MS, and
its own topic and queue in REAL_TOPIC and REAL_QID (spec/delivery.md §2). Everything here follows
from the record alone, so a broker, a restore and a verification place a message alike.
"""

from typing import Final, NamedTuple, Protocol

from sluicemq.errors import ProtocolError
from sluicemq.model import properties as reserved
from sluicemq.model.message import TIMER_PROPERTIES
from sluicemq.record.codec import parse_head, value_of
from sluicemq.store.timers.files import DEFAULT, DELETE, ROLL

TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
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
"""Property, its unit in ms, whether it counts from when the message was stored."""
_DIGITS_MAX: Final = 18
_LEAD_MIN_MS: Final = 2_000
"""A slot may differ by less because the store's clock is read a moment later."""


class TimedRecord(Protocol):
    """What timers need of a stored record."""

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
    """A `TimedRecord` as `read_timed` finds it."""

    size_bytes: int
    body_crc: int
    queue_offset: int
    physical_offset: int
    born_time_ms: int
    born_host: bytes
    store_time_ms: int
    topic: bytes
    properties: bytes


def read_timed(view: memoryview | bytes | None) -> ReadRecord | None:
    """Read the record at the beginning of `view`; None when no whole record begins there."""
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
    """The second of the wheel, in ms, and the magic of the unit."""

    slot_ms: int
    magic: int


class Placing:
    """The rules of one broker: the precision of its wheel, and how far ahead a slot may lie."""

    def __init__(self, precision_ms: int, window_slots: int) -> None:
        """Take timerPrecisionMs and timerRollWindowSlot."""
        self.precision_ms = precision_ms
        self._window_slots = window_slots
        self._window_ms = window_slots * precision_ms

    def cut(self, time_ms: int) -> int:
        """Return the beginning of the second that `time_ms` is in."""
        return time_ms - time_ms % self.precision_ms

    def slot_of(self, due_ms: int) -> int:
        """Return the second to which a due time belongs; a full second ends the one before."""
        return self.cut(due_ms - 1)

    def place(self, record: TimedRecord, write_ms: int) -> Place | None:
        """Return where a message belongs that is taken in at `write_ms`; None if it is not timed.

        A message that is due later than the window reaches rolls: its unit stands where the message
        is put into the timer's queue again.
        """
        out = value_of(record.properties, OUT)
        if out is None or not out.isdigit() or len(out) > _DIGITS_MAX:
            return None
        slot_ms, magic = self.cut(int(out)), DEFAULT
        begin_ms = min(self.cut(self.stored_ms(record, slot_ms)), write_ms)
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
        """Return what the broker's clock said when the message was stored: its store time, later by
        the lead that the clock had over the wall clock."""
        named_ms = named_due_ms(record.properties, record.store_time_ms)
        lead_ms = 0 if named_ms is None else lead_of(named_ms, slot_ms, self.precision_ms)
        return record.store_time_ms + lead_ms

    def due_ms(self, record: TimedRecord) -> int:
        """Return when a message is due, to the ms."""
        out_ms = int(value_of(record.properties, OUT) or 0)
        return exact_due_ms(
            record.properties, self.cut(out_ms), record.store_time_ms, self.precision_ms
        )


def slot_of(due_ms: int, precision_ms: int) -> int:
    """Return the second of a due time, cut down to the precision; a multiple of the precision
    belongs to the second before."""
    return (due_ms - 1) // precision_ms * precision_ms


def exact_due_ms(properties: bytes, slot_ms: int, store_time_ms: int, precision_ms: int) -> int:
    """Return when a stored message is due, to the ms: always within its second `slot_ms`. HOT.

    A relative delay counts from the store time; of a message that was stored again on its way
    TIMER_DELIVER_MS says it. Times of messages that were stored while the broker's clock was ahead
    of the wall clock (`clock.SteadyClock`) are moved by that lead.
    """
    due_ms = named_due_ms(properties, store_time_ms)
    if due_ms is None:
        return slot_ms + precision_ms
    due_ms += lead_of(due_ms, slot_ms, precision_ms)
    return min(max(due_ms, slot_ms + 1), slot_ms + precision_ms)


def lead_of(due_ms: int, slot_ms: int, precision_ms: int) -> int:
    """Return by how much the slot of a stored message is later than that of the time it names: the
    lead that the broker's clock had over the wall clock (`clock.SteadyClock`), mostly 0."""
    lead_ms = slot_ms - slot_of(due_ms, precision_ms)
    return lead_ms if abs(lead_ms) > _LEAD_MIN_MS else 0


def named_due_ms(properties: bytes, store_time_ms: int) -> int | None:
    """Return the time that the properties of a stored message name, by the wall clock of when it
    was stored; None without one. HOT."""
    has_rolled = ROLLS + b"\x01" in properties
    for name, unit_ms, is_relative in _TIMES:
        value = value_of(properties, name)
        if value is not None and value.isdigit() and not (has_rolled and is_relative):
            return int(value) * unit_ms + (store_time_ms if is_relative else 0)
    return None


def recall_key(properties: bytes) -> bytes:
    """Return what a mark that takes back this message names: its topic and id."""
    name = value_of(properties, REAL_TOPIC) or b""
    return name + b"+" + (value_of(properties, UNIQUE_ID) or b"")
