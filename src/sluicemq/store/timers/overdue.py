"""Find out which timed messages that were due before a start have already been delivered.

A checkpoint says what had been delivered when it was written, but the broker may have delivered
more before it stopped. The checkpoints of RocketMQ and of older versions prove nothing at all. But
a delivery leaves a record in the message's own queue, with the properties of the timed message. So
before a broker delivers a message that was due before the broker started, it looks for that record:

    add                let an overdue message wait for the look-up
    find_undelivered   read the queues of all waiting messages once, from where a delivery could be
                       up to the end of the log at the start; return the undelivered messages

At most `WAITING_MAX` messages wait at a time. A message that rolls is not delivered but put into
the timer queue again. Then its next record in the timer queue is looked up instead of the delivery.
"""

import hashlib
from collections.abc import Generator
from typing import Final, NamedTuple

from sluicemq.model.system_names import TIMER_TOPIC
from sluicemq.numbers import natural
from sluicemq.record.codec import find_property
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store
from sluicemq.store.timers.placing import (
    REAL_QUEUE_KEY,
    REAL_TOPIC_KEY,
    ROLL_COUNT_KEY,
    TIMER_OUT_KEY,
    UNIQUE_ID_KEY,
    TimedRecord,
    parse_record,
)

WAITING_MAX: Final = 100_000
"""The number of waiting messages at which `DeliveryLookup.is_full`."""
_CHUNK_UNITS: Final = 256
_KEY_BYTES: Final = 16


class OverdueMessage(NamedTuple):
    """A message that was due before the start and may have been delivered.

    `position` is its position in the commit log, `slot_ms` its slot, and `due_ms` its exact due
    time, in milliseconds since 1970. `magic` contains the flags of its unit in the timer log.
    """

    position: int
    slot_ms: int
    due_ms: int
    magic: int
    has_unit: bool
    """Whether the timer log contains a unit of the message."""


def delivery_key(record: TimedRecord, more_rolls: int = 0) -> bytes:
    """Return a hash that is equal for a timed record and for its delivery.

    The delivery is the record in the message's own queue. The hash covers the unique id,
    TIMER_OUT_MS, the number of rolls, the born time and host, and the CRC of the body.

    A message that is due far in the future rolls: it is written to the timer queue again, with a
    higher number of rolls. `more_rolls` is added to the number: 1 gives the hash of the record
    after the next roll.
    """
    properties = record.properties
    roll_count = natural(find_property(properties, ROLL_COUNT_KEY) or b"") or 0
    fields = (
        find_property(properties, UNIQUE_ID_KEY) or b"",
        find_property(properties, TIMER_OUT_KEY) or b"",
        b"%d" % (roll_count + more_rolls),
        b"%d %d" % (record.born_time_ms, record.body_crc),
        record.born_host,
    )
    return hashlib.blake2b(b"\x00".join(fields), digest_size=_KEY_BYTES).digest()


class DeliveryLookup:
    """The look-up of deliveries for messages that were due before the start.

    The messages wait grouped by the queue in which their deliveries would be.
    """

    def __init__(self, store: Store, end: int) -> None:
        """Create a look-up of deliveries in a store, without messages.

        `end` is the end of the commit log when the broker started. Only deliveries before it are
        found, because later ones are of this run.
        """
        self._store = store
        self._end = end
        self._waiting: dict[tuple[str, int], dict[bytes, list[OverdueMessage]]] = {}
        self._floors: dict[tuple[str, int], int] = {}
        self.waiting_count = 0
        """The number of messages that wait for `find_undelivered`."""

    def add(
        self, record: TimedRecord, message: OverdueMessage, floor: int, *, is_roll: bool
    ) -> None:
        """Add a message for the next call of `find_undelivered`.

        Its delivery can only be at commit log position `floor` or later. If `is_roll`, the message
        was to be written to the timer queue again instead of delivered; then that record is looked
        up.
        """
        key = delivery_key(record, more_rolls=is_roll)
        queue = (TIMER_TOPIC, 0)
        if not is_roll:
            queue = target_queue(record)
        self._waiting.setdefault(queue, {}).setdefault(key, []).append(message)
        self._floors[queue] = min(self._floors.get(queue, floor), floor)
        self.waiting_count += 1

    @property
    def is_full(self) -> bool:
        """Whether `find_undelivered` must be called before more messages are added."""
        return self.waiting_count >= WAITING_MAX

    def find_undelivered(self) -> Generator[None, None, list[OverdueMessage]]:
        """Find the waiting messages that were not delivered, and forget all waiting messages.

        The generator yields after each chunk of a queue, so that other work can run. It returns the
        messages in the order of their due times.
        """
        waiting = self._waiting
        floors = self._floors
        self._waiting = {}
        self._floors = {}
        self.waiting_count = 0
        for queue, messages_by_key in waiting.items():
            yield from self._drop_delivered(queue, floors[queue], messages_by_key)

        undelivered: list[OverdueMessage] = []
        for messages_by_key in waiting.values():
            for messages in messages_by_key.values():
                undelivered += messages
        return sorted(undelivered, key=lambda message: (message.due_ms, message.position))

    def _drop_delivered(
        self, queue: tuple[str, int], floor: int, messages_by_key: dict[bytes, list[OverdueMessage]]
    ) -> Generator[None]:
        """Remove from `messages_by_key` the messages whose delivery is in a queue.

        `queue` is the (topic, queue id). Only its messages from position `floor` of the commit log
        on are read. The keys are results of `delivery_key`. The generator yields after each chunk
        of the queue.
        """
        store = self._store
        offset = store.first_offset_from(*queue, floor)
        while messages_by_key:
            units = store.committed_units(*queue, offset, _CHUNK_UNITS)
            if not len(units):
                return
            for position, size, _ in UNIT.iter_unpack(units):
                if size == BLANK_SIZE:
                    continue
                if position >= self._end:
                    return
                view = store.committed_record(position, size)
                # Most records are no deliveries, which is cheap to find out.
                if view is not None and TIMER_OUT_KEY in bytes(view):
                    _remove_delivered_message(view, messages_by_key)
            offset += len(units) // UNIT.size
            yield


def _remove_delivered_message(
    delivery: memoryview, messages_by_key: dict[bytes, list[OverdueMessage]]
) -> None:
    """Remove the message that the record `delivery` delivers from `messages_by_key`.

    If several messages have the same key, the first one is removed. Does nothing if there is none.
    """
    record = parse_record(delivery)
    if record is None:
        return
    key = delivery_key(record)
    messages = messages_by_key.get(key)
    if messages is not None:
        messages.pop(0)
        if not messages:
            del messages_by_key[key]


def target_queue(record: TimedRecord) -> tuple[str, int]:
    """Return the topic and the queue id to which a timed message is delivered."""
    name = find_property(record.properties, REAL_TOPIC_KEY) or b""
    queue_id = natural(find_property(record.properties, REAL_QUEUE_KEY) or b"") or 0
    return name.decode("utf-8", "replace"), queue_id
