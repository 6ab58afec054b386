"""Find out which timed messages that were due before a start have been delivered already.

A checkpoint says what was delivered when it was written, and a broker may have delivered more
before it stopped. RocketMQ's checkpoint, and those of older versions, prove nothing at all. But a
delivery leaves a record in the message's own queue, with the properties of the timed message. So
before a broker delivers a message that was due before it started, it looks there:

    add      let an overdue message wait
    settle   read the queues of all waiting messages once, from where a delivery could lie up to
             the end of the log at the start; return the messages that were not delivered

At most `WAITING_MAX` messages wait at a time. A message that rolls is not delivered but put into
the timer queue again; its next record there takes the place of the delivery.
"""

import hashlib
from collections.abc import Generator
from typing import Final, NamedTuple

from sluicemq.model.system_names import TIMER_TOPIC
from sluicemq.numbers import natural
from sluicemq.record.codec import value_of
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store
from sluicemq.store.timers.placing import (
    OUT,
    REAL_QUEUE,
    REAL_TOPIC,
    ROLLS,
    UNIQUE_ID,
    TimedRecord,
    parse_record,
)

WAITING_MAX: Final = 100_000
_CHUNK_UNITS: Final = 256
_KEY_BYTES: Final = 16


class Overdue(NamedTuple):
    """A message that waits until `settle` finds out whether it was delivered. `position` is its
    position in the commit log; times are milliseconds."""

    position: int
    slot_ms: int
    due_ms: int
    magic: int
    has_unit: bool
    """Whether the wheel holds a unit of it."""


def delivery_key(record: TimedRecord, more_rolls: int = 0) -> bytes:
    """Return a hash that only the records of one timed message and of its delivery share. It covers
    the unique id, TIMER_OUT_MS, the number of rolls, born time and host, and the CRC of the body.
    `more_rolls` is added to the number of rolls: 1 for the record after the next roll, -1 for the
    one before the last."""
    properties = record.properties
    rolls = natural(value_of(properties, ROLLS) or b"") or 0
    parts = (
        value_of(properties, UNIQUE_ID) or b"",
        value_of(properties, OUT) or b"",
        b"%d" % (rolls + more_rolls),
        b"%d %d" % (record.born_time_ms, record.body_crc),
        record.born_host,
    )
    return hashlib.blake2b(b"\x00".join(parts), digest_size=_KEY_BYTES).digest()


class OverdueMessages:
    """The messages that wait, by the queue in which their deliveries would lie."""

    def __init__(self, store: Store, end: int) -> None:
        """Take the store, and the end of its log at the start: deliveries lie before it."""
        self._store = store
        self._end = end
        self._waiting: dict[tuple[str, int], dict[bytes, list[Overdue]]] = {}
        self._floors: dict[tuple[str, int], int] = {}
        self.count = 0

    def add(self, record: TimedRecord, message: Overdue, floor: int, *, is_roll: bool) -> None:
        """Let a message wait. Its delivery, if there is one, lies at commit log position `floor` or
        behind. `is_roll`: look for its next record in the timer queue instead of a delivery in its
        own queue."""
        key, place = delivery_key(record, more_rolls=is_roll), (TIMER_TOPIC, 0)
        if not is_roll:
            place = target_queue(record)
        self._waiting.setdefault(place, {}).setdefault(key, []).append(message)
        self._floors[place] = min(self._floors.get(place, floor), floor)
        self.count += 1

    @property
    def is_full(self) -> bool:
        """Whether `settle` has to be called before more is added."""
        return self.count >= WAITING_MAX

    def settle(self) -> Generator[None, None, list[Overdue]]:
        """Find out which of the waiting messages were delivered. Return the others in the order of
        their due times; none waits afterwards. Yield now and then, so that other work can run."""
        waiting, floors = self._waiting, self._floors
        self._waiting, self._floors, self.count = {}, {}, 0
        for place, messages in waiting.items():
            yield from self._drop_delivered(place, floors[place], messages)
        left = [message for keys in waiting.values() for one in keys.values() for message in one]
        return sorted(left, key=lambda message: (message.due_ms, message.position))

    def _drop_delivered(
        self, place: tuple[str, int], floor: int, messages: dict[bytes, list[Overdue]]
    ) -> Generator[None]:
        store = self._store
        offset = store.first_offset_from(*place, floor)
        while messages:
            units = store.committed_units(*place, offset, _CHUNK_UNITS)
            if not len(units):
                return
            for position, size, _ in UNIT.iter_unpack(units):
                if position >= self._end and size != BLANK_SIZE:
                    return
                view = store.committed_record(position, size) if size != BLANK_SIZE else None
                if view is not None and OUT in bytes(view):
                    record = parse_record(view)
                    key = delivery_key(record) if record is not None else b""
                    if key in messages:
                        messages[key].pop(0)
                        if not messages[key]:
                            del messages[key]
            offset += len(units) // UNIT.size
            yield


def target_queue(record: TimedRecord) -> tuple[str, int]:
    """Return the topic and the queue id to which a timed message is delivered."""
    name = value_of(record.properties, REAL_TOPIC) or b""
    queue_id = natural(value_of(record.properties, REAL_QUEUE) or b"") or 0
    return name.decode("utf-8", "replace"), queue_id
