"""Pops of a stepped broker without requests: what a consumer in POP mode does, in a few calls."""

from typing import NamedTuple

from simulation.stepped import SteppedBroker
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import pop_kind, pop_retry_topic
from sluicemq.record.codec import decode_records
from sluicemq.wire.popping import ReceiptHandle


class Held(NamedTuple):
    """A message that a consumer has popped."""

    topic: str
    handle: ReceiptHandle
    message: StoredMessage

    @property
    def body(self) -> bytes:
        return self.message.body


def messages_of(
    broker: SteppedBroker, topic: str, queue_id: int = 0, begin: int = 0
) -> list[StoredMessage]:
    """Return the visible messages of a queue from an offset on."""
    result = broker.store.reader.read(topic, queue_id, begin, 1_000_000, 1 << 30)
    return decode_records(b"".join(result.data))


class Popper:
    """A consumer of a group. The caller's `step` commits what it does."""

    def __init__(self, broker: SteppedBroker, group: str = "G", invisible_ms: int = 10_000) -> None:
        self.broker = broker
        self.group = group
        self.invisible_ms = invisible_ms

    def pop(
        self, topic: str = "T", queue_id: int = 0, count: int = 32, invisible_ms: int | None = None
    ) -> list[Held]:
        """Pop at most `count` messages of a queue."""
        broker, checkpoints = self.broker, self.broker.core.checkpoints
        begin, end = broker.store.queue_offsets(topic, queue_id)
        begin = max(begin, checkpoints.resolve_next_offset(self.group, topic, queue_id))
        found = broker.store.reader.read(topic, queue_id, begin, count, 1 << 30)
        messages = decode_records(b"".join(found.data)) if begin < end else []
        if not messages:
            return []
        offsets = [message.queue_offset for message in messages]
        now_ms = broker.clock.now_ms()
        invisible_ms = self.invisible_ms if invisible_ms is None else invisible_ms
        revive_queue = checkpoints.record_pop(
            self.group, topic, queue_id, offsets, offsets[-1] + 1, now_ms, invisible_ms
        )
        name, kind = broker.settings.broker.broker_name, pop_kind(topic)
        handle = ReceiptHandle(offsets[0], now_ms, invisible_ms, revive_queue, kind, name, queue_id)
        return [
            Held(topic, handle._replace(offset=message.queue_offset), message)
            for message in messages
        ]

    def pop_retries(self, topic: str = "T", **more: int) -> list[Held]:
        """Pop messages of the retry topic."""
        return self.pop(pop_retry_topic(self.group, topic, is_v2=False), **more)

    def acknowledge(self, *held: Held) -> None:
        """Acknowledge messages of one pop."""
        offsets = [one.handle.offset for one in held]
        self.broker.core.checkpoints.acknowledge(self.group, held[0].topic, held[0].handle, offsets)

    def change(self, held: Held, invisible_ms: int) -> Held:
        """Change the invisible time of a message."""
        handle = self.broker.core.checkpoints.change_invisible_time(
            self.group, held.topic, held.handle, invisible_ms
        )
        return held._replace(handle=handle)
