"""A message in the hands of a consumer."""

from collections.abc import Mapping
from typing import Protocol

from sluicemq.client.core.consuming import first_topic
from sluicemq.client.core.replies import CORRELATION_ID, REPLY_TO_CLIENT
from sluicemq.client.core.tracing import Outcome
from sluicemq.model.ids import Host
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import MessageQueue


class Origin(Protocol):
    """The queue reader that a message came from. It alone knows which messages are out, and hears
    what becomes of them."""

    @property
    def group(self) -> str: ...

    @property
    def is_busy(self) -> bool: ...

    @property
    def may_hand_out(self) -> bool: ...

    def owns(self, generation: int) -> bool: ...

    def taken(self, message: "ReceivedMessage", owner: object) -> None: ...

    def finished(self, message: "ReceivedMessage", outcome: Outcome) -> None: ...

    def returned(self, message: "ReceivedMessage") -> None: ...

    def release(self, owner: object) -> None: ...

    def ack(self, message: "ReceivedMessage") -> bool: ...

    async def reject(
        self, message: "ReceivedMessage", delay_level: int | None, suspend_s: float | None
    ) -> bool: ...

    async def reply(self, record: StoredMessage, body: bytes, message_id: str) -> object: ...


class ReceivedMessage:
    """A message that was delivered to a consumer.

    It stays unacknowledged until `await message.ack()`: an exception, leaving the loop or a crash
    means that it is delivered again. `topic` is the topic it was sent to, also after a retry;
    times are milliseconds since 1970; `attempt` counts deliveries by this process, from 1.
    """

    __slots__ = ("attempt", "generation", "origin", "record")

    def __init__(self, record: StoredMessage, origin: Origin, generation: int) -> None:
        self.record = record
        self.attempt = 1
        self.origin = origin
        self.generation = generation

    async def ack(self) -> bool:
        """Done with this message: it will not be delivered to the group again.

        Costs no request: the lowest unacknowledged offset of a queue is committed every 5 s and at
        close. False when it was acknowledged before, or the queue has gone to another member
        meanwhile (which then gets the message again).
        """
        return self.settle()

    async def reject(
        self, delay_level: int | None = None, *, suspend_s: float | None = None
    ) -> bool:
        """Not done: deliver it again later, or nowhere any more.

        The broker stores a copy that comes to the group again; when that is safe the original
        counts as done. `delay_level`: 0 the ladder 10 s, 30 s … 2 h, n a level of the broker, -1
        the dead letters at once; None as the consumer is set up. In an ordered group the message
        stays where it is and comes again after `suspend_s`, before any other of its queue.

        False when its queue has gone to another member meanwhile. Raises SluiceError when it could
        not be stored anywhere: then it is unacknowledged still, and may be rejected again.
        """
        self.finished(Outcome.FAILED)
        return await self.origin.reject(self, delay_level, suspend_s)

    @property
    def wants_reply(self) -> bool:
        """Whether its sender waits for an answer (`Sluice.request`)."""
        properties = self.record.properties
        return bool(properties.get(REPLY_TO_CLIENT) and properties.get(CORRELATION_ID))

    async def reply(self, body: bytes | str) -> None:
        """Answers a message that was sent with `request`; returns when the requester has it.

        Does not acknowledge: a reply that could not be given may be tried again. Raises
        ConfigurationError when nobody asked, RequestError when the requester is gone (code 1),
        ConnectionLostError, RequestTimeoutError.
        """
        data = body.encode() if isinstance(body, str) else body
        await self.origin.reply(self.record, data, f"{self.message_id}R")

    def settle(self) -> bool:
        """`ack` for code that cannot await; must run on the loop's thread."""
        return self.origin.ack(self)

    def finished(self, outcome: Outcome) -> None:
        """How the application dealt with it; only the first word after it was taken counts."""
        self.origin.finished(self, outcome)

    @property
    def place(self) -> tuple[int, int]:
        """Its generation and offset: what it is known by at its origin."""
        return self.generation, self.record.queue_offset

    @property
    def is_current(self) -> bool:
        """Whether its queue is still ours and was not moved since it was pulled."""
        return self.origin.owns(self.generation)

    @property
    def topic(self) -> str:
        return first_topic(self.record)

    @property
    def group(self) -> str:
        """The consumer group that it was delivered to."""
        return self.origin.group

    @property
    def body(self) -> bytes:
        return self.record.body

    @property
    def tag(self) -> str | None:
        return self.record.tag

    @property
    def keys(self) -> tuple[str, ...]:
        return self.record.keys

    @property
    def properties(self) -> Mapping[str, str]:
        return self.record.properties

    @property
    def message_id(self) -> str:
        return self.record.message_id

    @property
    def offset_message_id(self) -> str:
        return self.record.offset_message_id

    @property
    def queue(self) -> MessageQueue:
        """The queue it lies in; for a retried message that of the retry topic."""
        return MessageQueue(self.record.topic, self.record.broker, self.record.queue_id)

    @property
    def queue_offset(self) -> int:
        return self.record.queue_offset

    @property
    def flag(self) -> int:
        return self.record.flag

    @property
    def born_time_ms(self) -> int:
        return self.record.born_time_ms

    @property
    def born_host(self) -> Host:
        return self.record.born_host

    @property
    def store_time_ms(self) -> int:
        return self.record.store_time_ms

    @property
    def reconsume_times(self) -> int:
        """How often the broker has redelivered it (0: never)."""
        return self.record.reconsume_times

    def __repr__(self) -> str:
        return (
            f"<message {self.message_id} of {self.topic} queue {self.record.queue_id} "
            f"offset {self.queue_offset} {len(self.body)} B>"
        )
