"""Find out which messages of a delay level were delivered before a start, by the log.

`config/delayOffset.json` says up to where a level is delivered, as of its last save. A broker that
is killed has delivered more by then, and would deliver that again after each kill. But a delivery
leaves a record in the message's own queue, with the properties of the delayed message. So a start
looks for these records, in the queues of the messages that were due before the log ended, from the
time on at which the first of them was due. A level is delivered in the order of its queue, so what
was delivered is a run of messages, and the level goes on behind it.

A record is the delivery of one message, which was due when the record was stored. Of messages that
do not differ, as many count as delivered as there are such records behind them, and the messages
before the run, of which the file says that they were delivered, have the first ones. What is not
found, for whatever reason, is delivered (again).
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from sluicemq.broker.produce.intake import Record, read_record
from sluicemq.model.message import DELAY, REAL_QUEUE, REAL_TOPIC, UNIQ_KEY
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store

CHUNK: Final = 4096
"""Messages of a level that are looked for together."""
RECORDS_MAX: Final = 1_000_000
"""Records that a start reads for this. What is not found by then is delivered again."""
_CHUNK_UNITS: Final = 256

QueueKey = tuple[str, int]
Key = tuple[str, str, int, int, bytes, int]
Found = dict[Key, list[tuple[int, int]]]
"""Position in the log, and store time in ms, of records by what they share with a message."""


class Due(NamedTuple):
    """A message of a level that was due before the log ended. `record` is None for a blank unit, a
    cancelled message and a record that is gone: nothing is to be delivered there."""

    due_ms: int
    record: Record | None

    @property
    def queue(self) -> QueueKey | None:
        """The queue to which the message is delivered."""
        if self.record is None:
            return None
        return self.record.get_text(REAL_TOPIC), self.record.get_number(REAL_QUEUE) or 0


def _key(record: Record) -> Key:
    """Return what the records of one delayed message and of its delivery share."""
    return (
        record.get_text(UNIQ_KEY),
        record.get_text(DELAY),
        record.reconsume_times,
        record.born_time_ms,
        record.born_host,
        record.body_crc,
    )


class LoggedDeliveries:
    """The deliveries that the log of one store shows, for all levels of a start."""

    def __init__(self, store: Store, lead_ms: int) -> None:
        """Take the store, and the time by which due times are ahead of the times of its records."""
        self._store = store
        self._lead_ms = lead_ms
        self._used: set[int] = set()
        self._left = RECORDS_MAX

    def count(self, messages: Sequence[Due]) -> int:
        """Find the deliveries of `messages`, which are in the order of their level, up to the first
        message that has none. Return the number of messages up to the last one that was delivered:
        those without a record in between have nothing to deliver. The deliveries are used up, so
        that no other message is taken for delivered by them."""
        found, delivered = self._find_all(messages), 0
        for number, message in enumerate(messages, 1):
            if message.record is not None:
                if not self._take(message, found):
                    break
                delivered = number
        return delivered

    def use_up(self, messages: Sequence[Due]) -> None:
        """Use up the deliveries of messages that are known to be delivered."""
        found = self._find_all(messages)
        for message in messages:
            if message.record is not None:
                self._take(message, found)

    def _find_all(self, messages: Sequence[Due]) -> dict[QueueKey, Found]:
        wanted: dict[QueueKey, list[Due]] = {}
        for message in messages:
            if message.queue is not None:
                wanted.setdefault(message.queue, []).append(message)
        return {queue: self._find(queue, waiting) for queue, waiting in wanted.items()}

    def _take(self, message: Due, found: Mapping[QueueKey, Found]) -> bool:
        """Use up the first delivery that lies behind the message; False if there is none."""
        record = message.record
        assert record is not None
        assert message.queue is not None
        records = found[message.queue].get(_key(record), [])
        for delivery in records:
            position, stored_ms = delivery
            if position > record.physical_offset and stored_ms >= message.due_ms:
                records.remove(delivery)
                self._used.add(position)
                return True
        return False

    def _find(self, queue: QueueKey, messages: list[Due]) -> Found:
        """Return the records in one queue that may be deliveries of the messages."""
        store, found = self._store, Found()
        keys = {_key(message.record) for message in messages if message.record is not None}
        first = min(
            message.record.physical_offset for message in messages if message.record is not None
        )
        since_ms = min(message.due_ms for message in messages) - self._lead_ms
        offset = max(
            store.first_offset_from(*queue, first), store.reader.offset_by_time(*queue, since_ms)
        )
        while self._left > 0 and len(units := store.committed_units(*queue, offset, _CHUNK_UNITS)):
            for position, size, _ in UNIT.iter_unpack(units):
                self._left -= 1
                if size == BLANK_SIZE or position in self._used:
                    continue
                record = read_record(store.committed_record(position, size))
                if (
                    record is not None
                    and record.get_text(REAL_TOPIC)
                    and (key := _key(record)) in keys
                ):
                    stored_ms = record.store_time_ms + self._lead_ms
                    found.setdefault(key, []).append((position, stored_ms))
            offset += len(units) // UNIT.size
        return found
