"""Messages as consumers receive them.

The reader of a queue makes a `ReceivedMessage` of each message that it pulls, and puts it into a
prefetch buffer (`prefetch`). A consumer takes it from there; the message is then *handed out* until
it is acknowledged, rejected or put back. The reader is the `origin` of its messages: it alone knows
which of them are handed out, and it learns what becomes of each.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final, Protocol

from sluicemq import engine
from sluicemq.client.core.consuming import InFlight, original_topic
from sluicemq.client.core.replies import CORRELATION_ID, REPLY_TO_CLIENT
from sluicemq.client.core.tracing import TracedDelivery
from sluicemq.errors import UndecodableBodyError
from sluicemq.hints import with_hints
from sluicemq.model.arguments import Body, encode_body
from sluicemq.model.ids import Host
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import MessageQueue
from sluicemq.model.trace_records import ConsumeOutcome
from sluicemq.record.codec import decode_record, raw_body_of, tag_of

_engine: Final[Any] = engine.client


class Origin(Protocol):
    """The queue reader from which messages come. `QueueReader` implements and documents it.

    `queue` is the queue that it reads for `group`. `in_flight` are the messages that it has pulled
    and that are not acknowledged; after the reader moved to another offset it is another object.
    `handed_out` are the messages that the application has now. If `needs_body_check` is True, a
    message may only be handed out if `check_body` returns True for it.
    """

    group: str
    queue: MessageQueue
    in_flight: InFlight
    handed_out: "set[ReceivedMessage]"
    needs_body_check: bool
    """Whether `check_body` must be called before a message is handed out."""

    def check_body(self, message: "ReceivedMessage") -> bool: ...

    def record_undecodable(
        self, message: "ReceivedMessage", error: UndecodableBodyError
    ) -> None: ...

    @property
    def may_hand_out(self) -> bool: ...

    def mark_handed_out(self, messages: "list[ReceivedMessage]", owner: object) -> None: ...

    def record_outcome(self, message: "ReceivedMessage", outcome: ConsumeOutcome) -> None: ...

    def mark_returned(self, message: "ReceivedMessage") -> None: ...

    def release_owner(self, owner: object) -> None: ...

    def ack(self, message: "ReceivedMessage") -> bool: ...

    def ack_many(self, messages: "list[ReceivedMessage]") -> int: ...

    async def reject(
        self, message: "ReceivedMessage", delay_level: int | None, suspend_s: float | None
    ) -> bool: ...

    async def reply(self, record: StoredMessage, body: bytes, message_id: str) -> object: ...


def record_attribute(name: str) -> Any:
    """Return a property that reads the attribute `name` of the message's record."""
    return property(attrgetter(f"record.{name}"))


@with_hints
class ReceivedMessage:
    """A message that was delivered to a consumer.

    It stays unacknowledged until `await message.ack()`. If an exception ends the consumer, its loop
    is left or its process crashes before that, the message is delivered again.

        async for message in mq.subscribe("orders", group="billing"):
            if await book(message.body):
                await message.ack()
            else:
                await message.reject()

    The attributes of the message:

    - `topic`: the topic to which the message was sent, even if it comes from a retry topic.
    - `body`: the bytes that the producer sent. `tag`, `keys` and `properties`: as the producer set
      them; `properties` also contains RocketMQ's reserved properties.
    - `message_id`: the id that the producer gave the message. `offset_message_id` contains the
      broker and the position in its commit log.
    - `queue`, `queue_offset`: where the message is stored.
    - `born_time_ms`, `store_time_ms`: when it was sent and stored, in milliseconds since 1970.
      `born_host` is the address of the producer.
    - `reconsume_times`: how many times the group has failed to process it; 0 at first.
    - `attempt`: 1, plus the number of those failures after which this client kept the message
      instead of sending it back to the broker: in ordered groups, or because no broker could be
      reached. Another client that takes over the queue begins at 1.
    - `flag`: a number of the producer's own.
    """

    __slots__ = (
        "_is_undecodable_reported",
        "_record",
        "attempt",
        "delivery",
        "handed_out_s",
        "in_flight",
        "origin",
        "owner",
        "queue_offset",
    )

    def __init__(
        self,
        record: StoredMessage | bytes,
        origin: Origin,
        in_flight: InFlight,
        queue_offset: int,
    ) -> None:
        """Create a message that the reader `origin` has pulled.

        `record` is the stored message, or its bytes, which are decoded at first use. `in_flight` is
        the reader's present set of unacknowledged messages. The reader sets `owner` (who has
        received the message), `handed_out_s` (when, in monotonic seconds) and `delivery` (the
        trace).
        """
        self._record = record
        self._is_undecodable_reported = False
        self.queue_offset: int = queue_offset
        """The offset of the message in `queue`."""
        self.attempt: int = 1
        """1, plus the number of failures after which this client kept the message."""
        self.origin: Origin = origin
        """The reader of the queue. For internal use, like the attributes below."""
        self.in_flight: InFlight = in_flight
        self.owner: object = None
        self.handed_out_s: float = 0.0
        self.delivery: TracedDelivery | None = None

    async def ack(self) -> bool:
        """Acknowledge the message: it will not be delivered to the group again.

        This sends no request. The lowest unacknowledged offset of each queue is committed every 5
        seconds and when the consumer closes.

        Return False if the message was acknowledged before, or if its queue was assigned to another
        member or moved to another offset since it was pulled; it is then delivered again.
        """
        return self.ack_nowait()

    async def reject(
        self, delay_level: int | None = None, *, suspend_s: float | None = None
    ) -> bool:
        """Report that the message was not processed, so that it is delivered again later.

        The broker stores a copy of the message, which comes back through the group's retry topic;
        then the original counts as acknowledged. After the maximum number of retries the copy
        becomes a dead letter. In an ordered group the message stays in its queue instead, and is
        delivered again after `suspend_s` seconds, before any other message of the queue.
        Other broadcasting groups, and consumers that are polled (`LitePullConsumer`), have no
        retries: they log a warning and drop the message.

        - `delay_level`: 0 means increasing delays (10 s, 30 s … 2 h), 1 or more a delay level of
          the broker, -1 a dead letter at once. None (the default) means the consumer's
          `retry_delay_level`.
        - `suspend_s`: the pause of the queue of an ordered group in seconds. None (the default)
          means the consumer's `suspend_s`. Other groups ignore it.

        Return False if the queue was assigned to another member or moved to another offset since
        the message was pulled. Raises SluiceError if no broker could store the copy; the message
        then stays unacknowledged and may be rejected again.
        """
        self.record_outcome(ConsumeOutcome.FAILED)
        return await self.origin.reject(self, delay_level, suspend_s)

    @property
    def wants_reply(self) -> bool:
        """Whether its sender waits for a reply (`Sluice.request`)."""
        properties = self.record.properties
        return bool(properties.get(REPLY_TO_CLIENT) and properties.get(CORRELATION_ID))

    async def reply(self, body: Body) -> None:
        """Reply to a message that was sent with `request`.

            async for message in mq.subscribe("prices", group="pricing"):
                if message.wants_reply:
                    await message.reply(b"1.20")
                await message.ack()

        Return when the requester has received the reply. This does not acknowledge the message. If
        it raises, it may be called again.

        Raises ConfigurationError if the message does not ask for a reply, RequestError (code 1) if
        the requester is no longer connected, ConnectionLostError and RequestTimeoutError.
        """
        await self.origin.reply(self.record, encode_body(body), f"{self.message_id}R")

    def ack_nowait(self) -> bool:
        """Acknowledge the message like `ack`, from code that cannot await.

        Call it on the thread of the event loop.
        """
        return self.origin.ack(self)

    def record_outcome(self, outcome: ConsumeOutcome) -> None:
        """Record in the trace how the application processed the message.

        Only the first call after the message was handed out has an effect.
        """
        self.origin.record_outcome(self, outcome)

    @property
    def is_current(self) -> bool:
        """Whether acknowledging this message has an effect.

        It has none if the queue was assigned to another member, or moved to another offset, since
        the message was pulled; the message is then delivered again.
        """
        return self.in_flight is self.origin.in_flight

    @property
    def record(self) -> StoredMessage:
        """The stored message with all its fields; bytes are decoded when it is read first."""
        record = self._record
        if isinstance(record, bytes):
            broker = self.origin.queue.broker
            # The compiled decoder returns None for records that only the other one can decode.
            decoded = None if _engine is None else _engine.decode(record, broker)
            record = self._record = decoded or decode_record(record, broker=broker)
        return record

    @property
    def body(self) -> bytes:
        """The body that the producer sent.

        A compressed body is decompressed when it is read for the first time. Raises
        UndecodableBodyError if that fails.
        """
        record = self._record
        if isinstance(record, bytes):
            return raw_body_of(record)
        try:
            return record.body
        except UndecodableBodyError as error:
            self._report(error)
            raise

    @property
    def raw_body(self) -> bytes:
        """The body as it is stored, possibly compressed. It can always be read."""
        return raw_body_of(self._record)

    @property
    def body_error(self) -> UndecodableBodyError | None:
        """The error that reading `body` raises, or None if the body can be read."""
        record = self._record
        error = None if isinstance(record, bytes) else record.body_error
        if error is not None:
            self._report(error)
        return error

    @property
    def body_or_raw(self) -> bytes:
        """The body for display: `body`, or `raw_body` if the body cannot be decoded."""
        return self.raw_body if self.body_error is not None else self.body

    def _report(self, error: UndecodableBodyError) -> None:
        """Let the consumer count and log the undecodable message, once."""
        if not self._is_undecodable_reported:
            self._is_undecodable_reported = True
            self.origin.record_undecodable(self, error)

    @property
    def tag(self) -> str | None:
        """The tag that the producer set, or None."""
        return tag_of(self._record)

    keys: tuple[str, ...] = record_attribute("keys")
    """The keys by which the message can be queried."""
    properties: Mapping[str, str] = record_attribute("properties")
    """The properties by name: those of the producer and RocketMQ's reserved ones."""
    message_id: str = record_attribute("message_id")
    """The id that the producer gave the message, or `offset_message_id` if it gave none."""
    offset_message_id: str = record_attribute("offset_message_id")
    """The id that contains the broker and the position in its commit log."""
    flag: int = record_attribute("flag")
    """A 32-bit number for the application's own use."""
    born_time_ms: int = record_attribute("born_time_ms")
    """When the producer sent the message, in milliseconds since 1970."""
    born_host: Host = record_attribute("born_host")
    """The address of the producer."""
    store_time_ms: int = record_attribute("store_time_ms")
    """When the broker stored the message, in milliseconds since 1970."""

    @property
    def reconsume_times(self) -> int:
        """How many times the group has failed to process the message; 0 at first.

        These are the retries that the broker has counted, and those of this client (`attempt`), as
        in RocketMQ's Java client.
        """
        return self.record.reconsume_times + self.attempt - 1

    @property
    def topic(self) -> str:
        """The topic to which the message was sent, even if it comes from a retry topic."""
        return original_topic(self.record)

    @property
    def group(self) -> str:
        """The consumer group to which it was delivered."""
        return self.origin.group

    @property
    def queue(self) -> MessageQueue:
        """The queue in which it is stored. For a retry, that is a queue of the retry topic."""
        return MessageQueue(self.record.topic, self.record.broker, self.record.queue_id)

    def __str__(self) -> str:
        """Return the message for log lines.

        Of what the producer wrote, they only contain the message id.
        """
        return f"message {self.message_id} of {self.queue} at offset {self.queue_offset}"

    def __repr__(self) -> str:
        times = f" redelivered {self.reconsume_times} times" if self.reconsume_times else ""
        return (
            f"<ReceivedMessage {self.message_id} of {self.topic} queue {self.record.queue_id} of "
            f"{self.record.broker or '-'} offset {self.queue_offset}{times}"
            f"{self.record.summary()}>"
        )
