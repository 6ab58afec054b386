"""Find in the log which messages of a delay level were delivered before a start.

`config/delayOffset.json` says up to which offset a level was delivered when the file was last
saved. A broker that is killed has delivered more messages since then, and would deliver them again
after each kill. But a delivery leaves a record in the message's own queue, with the properties of
the delayed message. So a start searches the queues of the messages that were due before the log
ended for these records, from the time at which the first of the messages was due. A level delivers
its messages in the order of its queue, so the delivered ones are consecutive, and the level
continues behind them.

Each record is the delivery of one message, which was due when the record was stored. If several
messages are alike, as many of them count as delivered as there are such records behind them. The
first of these records belong to the messages that are delivered according to the file. A message
whose delivery is not found, for whatever reason, is delivered again.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from sluicemq.broker.produce.intake import Record, read_record
from sluicemq.model.message import DELAY, REAL_QUEUE, REAL_TOPIC, UNIQ_KEY
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store

CHUNK_MESSAGES: Final = 4096
"""The messages of a level whose deliveries are searched together."""
RECORDS_MAX: Final = 1_000_000
"""The most records that a start reads. Messages whose delivery was not found are redelivered."""
_CHUNK_UNITS: Final = 256

QueueKey = tuple[str, int]
"""Topic and queue id."""
DeliveryKey = tuple[str, str, int, int, bytes, int]
"""The values that the record of a delayed message and that of its delivery share."""
FoundDeliveries = dict[DeliveryKey, list[tuple[int, int]]]
"""By key: the position in the commit log and the store time, in ms, of each record."""


class DueLevelMessage(NamedTuple):
    """A message of a level that was due before the log ended.

    `record` is None if there is nothing to deliver: for a blank unit, a cancelled message, and a
    record that is gone.
    """

    due_ms: int
    record: Record | None

    @property
    def queue(self) -> QueueKey | None:
        """The queue to which the message is delivered; None without a record."""
        if self.record is None:
            return None
        return self.record.get_text(REAL_TOPIC), self.record.get_number(REAL_QUEUE) or 0


def _delivery_key(record: Record) -> DeliveryKey:
    """Return a key that a delayed message shares with the record of its delivery.

    It consists of message id, delay level, number of retries, birth time, birth host, and CRC of
    the body.
    """
    return (
        record.get_text(UNIQ_KEY),
        record.get_text(DELAY),
        record.reconsume_times,
        record.born_time_ms,
        record.born_host,
        record.body_crc,
    )


class LoggedDeliveries:
    """Finds the deliveries in the log of one store, for all levels of one start."""

    def __init__(self, store: Store, lead_ms: int) -> None:
        """Create a search of `store` that has matched no record yet.

        `lead_ms` is how far the steady clock is ahead of the wall clock, in ms. It is needed
        because due times are times of the steady clock, and store times in records are times of the
        wall clock.
        """
        self._store = store
        self._lead_ms = lead_ms
        self._used_positions: set[int] = set()
        """The positions of the records that were matched with a message."""
        self._records_left = RECORDS_MAX

    def count_delivered(self, messages: Sequence[DueLevelMessage]) -> int:
        """Return how many of `messages`, counted from the first, were delivered.

        `messages` are consecutive messages of a level. The count ends before the first message that
        has a record but whose delivery is not in the log. A message without a record has nothing to
        deliver. It counts only if a delivered message follows it.

        Each delivery in the log is matched with one message only, also in later calls.
        """
        candidates = self._find_candidates(messages)
        delivered_count = 0
        for message_count, message in enumerate(messages, 1):
            if message.record is not None:
                if not self._match_delivery(message, candidates):
                    break
                delivered_count = message_count
        return delivered_count

    def use_up(self, messages: Sequence[DueLevelMessage]) -> None:
        """Reserve the deliveries of `messages`, which are known to be delivered.

        Another message may have the same key. Later calls do not match these deliveries with it.
        """
        candidates = self._find_candidates(messages)
        for message in messages:
            if message.record is not None:
                self._match_delivery(message, candidates)

    def _find_candidates(
        self, messages: Sequence[DueLevelMessage]
    ) -> dict[QueueKey, FoundDeliveries]:
        """Return the records in the log that may be deliveries of the messages, by queue.

        The keys are the queues to which the messages must be delivered. The value of a queue may be
        empty.
        """
        messages_by_queue: dict[QueueKey, list[DueLevelMessage]] = {}
        for message in messages:
            if message.queue is not None:
                messages_by_queue.setdefault(message.queue, []).append(message)
        return {
            queue: self._find_candidates_in(queue, waiting)
            for queue, waiting in messages_by_queue.items()
        }

    def _match_delivery(
        self, message: DueLevelMessage, candidates: Mapping[QueueKey, FoundDeliveries]
    ) -> bool:
        """Match a message with its first possible delivery, and return whether there is one.

        A delivery has the same key as the message, comes after it in the commit log, and was not
        stored before the message was due. The matched delivery is removed from `candidates`, and
        later calls do not match it again. The message must have a record.
        """
        record = message.record
        assert record is not None
        assert message.queue is not None
        deliveries = candidates[message.queue].get(_delivery_key(record), [])
        for delivery in deliveries:
            position, stored_ms = delivery
            if position > record.physical_offset and stored_ms >= message.due_ms:
                deliveries.remove(delivery)
                self._used_positions.add(position)
                return True
        return False

    def _find_candidates_in(
        self, queue: QueueKey, messages: list[DueLevelMessage]
    ) -> FoundDeliveries:
        """Return the records in one queue that may be deliveries of the messages.

        The records are returned by key (`_delivery_key`). The queue is read from the time when the
        first of the messages was due to its end. All calls together read at most RECORDS_MAX
        records. Records that are matched already are left out. Each message must have a record.
        """
        records = [message.record for message in messages if message.record is not None]
        keys = {_delivery_key(record) for record in records}
        candidates = FoundDeliveries()
        for position, record in self._iter_unmatched_records(
            queue, self._find_start(queue, messages)
        ):
            # Only a delivery has this property, which names its topic. A producer's message does
            # not.
            if record.get_text(REAL_TOPIC):
                key = _delivery_key(record)
                if key in keys:
                    stored_ms = record.store_time_ms + self._lead_ms
                    candidates.setdefault(key, []).append((position, stored_ms))
        return candidates

    def _find_start(self, queue: QueueKey, messages: list[DueLevelMessage]) -> int:
        """Return the offset in `queue` before which no delivery of the messages can be.

        A delivery comes after its message in the commit log, and is not stored before the message
        is due.
        """
        positions = [
            message.record.physical_offset for message in messages if message.record is not None
        ]
        since_ms = min(message.due_ms for message in messages) - self._lead_ms
        return max(
            self._store.first_offset_from(*queue, min(positions)),
            self._store.reader.offset_by_time(*queue, since_ms),
        )

    def _iter_unmatched_records(self, queue: QueueKey, offset: int) -> Iterator[tuple[int, Record]]:
        """Yield (position in the log, record) of each message of a queue, from `offset` on.

        Messages that are matched already, or whose record is missing, are left out. End when all
        calls of this method together have read RECORDS_MAX records.
        """
        while self._records_left > 0:
            units = self._store.committed_units(*queue, offset, _CHUNK_UNITS)
            if not len(units):
                return
            for position, size, _ in UNIT.iter_unpack(units):
                self._records_left -= 1
                if size == BLANK_SIZE or position in self._used_positions:
                    continue
                record = read_record(self._store.committed_record(position, size))
                if record is not None:
                    yield position, record
            offset += len(units) // UNIT.size
