"""A message in the hands of a consumer, and the place where messages wait for takers.

Where the messages of a group's retry topic go: to the feeds of the topics they came from.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from sluicemq.client.core.consuming import first_topic
from sluicemq.client.core.replies import CORRELATION_ID, REPLY_TO_CLIENT
from sluicemq.client.core.tracing import Delivery, Outcome
from sluicemq.model.ids import Host
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import MessageQueue


class Origin(Protocol):
    """The queue reader that a message came from: it hears what became of it."""

    @property
    def group(self) -> str: ...

    def ack(self, generation: int, offset: int) -> bool: ...

    def owns(self, generation: int) -> bool: ...

    async def reject(
        self, message: "ReceivedMessage", delay_level: int | None, suspend_s: float | None
    ) -> bool: ...

    def taken(self, record: StoredMessage) -> Delivery | None: ...

    async def reply(self, record: StoredMessage, body: bytes, message_id: str) -> object: ...


class ReceivedMessage:
    """A message that was delivered to a consumer.

    It stays unacknowledged until `await message.ack()`: an exception, leaving the loop or a crash
    means that it is delivered again. `topic` is the topic it was sent to, also after a retry;
    times are milliseconds since 1970; `attempt` counts deliveries by this process, from 1.
    """

    __slots__ = ("_delivery", "_holder", "attempt", "generation", "origin", "record")

    def __init__(self, record: StoredMessage, origin: Origin, generation: int) -> None:
        self.record = record
        self.attempt = 1
        self.origin = origin
        self.generation = generation
        self._holder: dict[int, ReceivedMessage] | None = None
        self._delivery: Delivery | None = None

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
        rejected = await self.origin.reject(self, delay_level, suspend_s)
        if self._holder is not None:
            self._holder.pop(id(self), None)
        return rejected

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
        if self._holder is not None:
            self._holder.pop(id(self), None)
        if self._delivery is not None:
            self.finished(Outcome.SUCCESS)
        return self.origin.ack(self.generation, self.record.queue_offset)

    def taken(self) -> None:
        """It is handed to the application now: noted when traces are on."""
        self._delivery = self.origin.taken(self.record)

    def finished(self, outcome: Outcome) -> None:
        """The application is done with it; only the first word after `taken` counts."""
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            delivery.finished(outcome)

    def held_by(self, holder: "dict[int, ReceivedMessage]") -> None:
        """Notes in `holder` that it was handed out; `ack` takes it out again."""
        holder[id(self)] = self
        self._holder = holder

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

    def is_from(self, origin: object) -> bool:
        """Whether that reader delivered it."""
        return self.origin is origin

    def __repr__(self) -> str:
        return (
            f"<message {self.message_id} of {self.topic} queue {self.record.queue_id} "
            f"offset {self.queue_offset} {len(self.body)} B>"
        )


class Sink(Protocol):
    """Where a reader puts what it pulled."""

    def put(self, messages: list[ReceivedMessage]) -> None: ...

    def discard(self, unwanted: Callable[[ReceivedMessage], bool]) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class Feed:
    """Messages that wait for takers; bounded by the readers that fill it, not here.

    A failure that ends the consumer is raised to every taker, once the messages are gone.
    """

    __slots__ = ("_error", "_items", "_takers", "is_shareable")

    def __init__(self, *, is_shareable: bool = False) -> None:
        self.is_shareable = is_shareable
        self._items: deque[ReceivedMessage] = deque()
        self._takers: deque[tuple[asyncio.Future[None], object]] = deque()
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, messages: list[ReceivedMessage]) -> None:
        """Appends and wakes takers."""
        self._items.extend(messages)
        self._wake(len(messages))

    def put_back(self, messages: list[ReceivedMessage]) -> None:
        """Puts messages first in line: they are older than what waits."""
        self._items.extendleft(reversed(messages))
        self._wake(len(messages))

    def discard(self, unwanted: Callable[[ReceivedMessage], bool]) -> None:
        """Removes messages, those of a queue that was lost."""
        self._items = deque(item for item in self._items if not unwanted(item))

    def fail(self, error: BaseException) -> None:
        """Ends the feed: takers get the error."""
        self._error = self._error or error
        self._wake(len(self._takers))

    def expel(self, owner: object, error: BaseException) -> None:
        """Ends the waiting of one owner's takers; the others wait on."""
        for taker, its_owner in self._takers:
            if its_owner is owner and not taker.done():
                taker.set_exception(error)

    def _wake(self, count: int) -> None:
        while count > 0 and self._takers:
            taker, _ = self._takers.popleft()
            if not taker.done():
                taker.set_result(None)
                count -= 1

    async def get(self, owner: object = None) -> ReceivedMessage:
        """The next message; waits for one. Raises the error that ended the feed, or `expel`'s."""
        while (message := self._take(owner)) is None:
            if self._error is not None:
                raise self._error
            taker = asyncio.get_running_loop().create_future()
            self._takers.append((taker, owner))
            try:
                await taker
            except asyncio.CancelledError:
                # Cancelled after it was woken: the next taker must not sleep beside a message.
                if taker.done() and not taker.cancelled():
                    self._wake(1)
                raise
        return message

    def more(self, first: ReceivedMessage, count_max: int) -> list[ReceivedMessage]:
        """A message that was taken just now, and those of its queue that wait next to it: up to
        `count_max` in all, without waiting."""
        messages = [first]
        while len(messages) < count_max and self._items and self._items[0].is_from(first.origin):
            messages.append(self._items.popleft())
        return messages

    def _take(self, owner: object) -> ReceivedMessage | None:
        """The next message that may be handed out now."""
        del owner
        return self._items.popleft() if self._items else None


class RetrySink:
    """Sends the messages of a retry topic to the feeds of the topics they came from."""

    __slots__ = ("_feeds",)

    def __init__(self, feeds: Mapping[str, Feed]) -> None:
        self._feeds = feeds

    def put(self, messages: list[ReceivedMessage]) -> None:
        """A message of a topic that is not subscribed to any more goes to any feed."""
        for message in messages:
            feed = self._feed_of(message)
            if feed is not None:
                feed.put([message])

    def _feed_of(self, message: ReceivedMessage) -> Feed | None:
        return self._feeds.get(message.topic) or next(iter(self._feeds.values()), None)

    def discard(self, unwanted: Callable[[ReceivedMessage], bool]) -> None:
        for feed in self._feeds.values():
            feed.discard(unwanted)

    def fail(self, error: BaseException) -> None:
        for feed in self._feeds.values():
            feed.fail(error)
