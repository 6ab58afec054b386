"""A message in the hands of a consumer, and where messages wait for takers: in one line, or in one
for each queue.

A reader (`Origin`) puts what it pulled into a `Feed`. Who takes a message from there has it until
it is acknowledged, rejected or put back.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, Protocol

from sluicemq import engine
from sluicemq.client.core.consuming import InFlight, original_topic
from sluicemq.client.core.messages import Body
from sluicemq.client.core.messages import encode_body as sent
from sluicemq.client.core.replies import CORRELATION_ID, REPLY_TO_CLIENT
from sluicemq.client.core.tracing import TracedDelivery
from sluicemq.errors import UndecodableBodyError
from sluicemq.hints import with_hints
from sluicemq.model.ids import Host
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import MessageQueue
from sluicemq.model.trace_records import ConsumeOutcome
from sluicemq.record.codec import decode_record, raw_body_of, tag_of

_engine: Final[Any] = engine.client


class Origin(Protocol):
    """The queue reader that a message came from. It alone knows which messages are out, and hears
    what becomes of them."""

    group: str
    queue: MessageQueue
    in_flight: InFlight
    out: "set[ReceivedMessage]"
    screens: bool
    """Whether `screen` has to be asked before a message is handed out."""

    def screen(self, message: "ReceivedMessage") -> bool: ...

    def undecodable(self, message: "ReceivedMessage", error: UndecodableBodyError) -> None: ...

    @property
    def may_hand_out(self) -> bool: ...

    def taken(self, messages: "list[ReceivedMessage]", owner: object) -> None: ...

    def finished(self, message: "ReceivedMessage", outcome: ConsumeOutcome) -> None: ...

    def returned(self, message: "ReceivedMessage") -> None: ...

    def release(self, owner: object) -> None: ...

    def ack(self, message: "ReceivedMessage") -> bool: ...

    def done(self, messages: "list[ReceivedMessage]") -> int: ...

    async def reject(
        self, message: "ReceivedMessage", delay_level: int | None, suspend_s: float | None
    ) -> bool: ...

    async def reply(self, record: StoredMessage, body: bytes, message_id: str) -> object: ...


def of_record(name: str) -> Any:
    """A property: that attribute of the record."""
    return property(attrgetter(f"record.{name}"))


@with_hints
class ReceivedMessage:
    """A message that was delivered to a consumer.

    It stays unacknowledged until `await message.ack()`: an exception, leaving the loop or a crash
    means that it is delivered again. `topic` is the topic it was sent to, also after a retry;
    times are milliseconds since 1970; `attempt` counts deliveries by this process, from 1.
    """

    __slots__ = (
        "_is_reported", "_record", "attempt", "delivery", "in_flight", "origin", "owner",
        "queue_offset", "since_s",
    )  # fmt: skip

    def __init__(
        self,
        record: StoredMessage | bytes,
        origin: Origin,
        in_flight: InFlight,
        queue_offset: int,
    ) -> None:
        """`record`: its bytes when nobody has looked into it yet (`split_records`). `in_flight` is
        the origin's as it was pulled; while it is out, the origin notes who has it, since when, and
        its trace."""
        self._record = record
        self._is_reported = False
        self.queue_offset: int = queue_offset
        self.attempt: int = 1
        self.origin: Origin = origin
        self.in_flight: InFlight = in_flight
        self.owner: object = None
        self.since_s: float = 0.0
        self.delivery: TracedDelivery | None = None

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
        self.finished(ConsumeOutcome.FAILED)
        return await self.origin.reject(self, delay_level, suspend_s)

    @property
    def wants_reply(self) -> bool:
        """Whether its sender waits for an answer (`Sluice.request`)."""
        properties = self.record.properties
        return bool(properties.get(REPLY_TO_CLIENT) and properties.get(CORRELATION_ID))

    async def reply(self, body: Body) -> None:
        """Answers a message that was sent with `request`; returns when the requester has it.

        Does not acknowledge: a reply that could not be given may be tried again. Raises
        ConfigurationError when nobody asked, RequestError when the requester is gone (code 1),
        ConnectionLostError, RequestTimeoutError.
        """
        await self.origin.reply(self.record, sent(body), f"{self.message_id}R")

    def settle(self) -> bool:
        """`ack` for code that cannot await; must run on the loop's thread."""
        return self.origin.ack(self)

    def finished(self, outcome: ConsumeOutcome) -> None:
        """How the application dealt with it; only the first word after it was taken counts."""
        self.origin.finished(self, outcome)

    @property
    def is_current(self) -> bool:
        """Whether its queue is still ours and was not moved since it was pulled."""
        return self.in_flight is self.origin.in_flight

    @property
    def record(self) -> StoredMessage:
        """All that the broker has stored."""
        record = self._record
        if isinstance(record, bytes):
            broker = self.origin.queue.broker
            found = None if _engine is None else _engine.decode(record, broker)
            record = self._record = found or decode_record(record, broker=broker)
        return record

    @property
    def body(self) -> bytes:
        """The body that the producer sent, decompressed when it is first read. Raises
        UndecodableBodyError when it cannot be decoded."""
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
        """The error that reading `body` raises, None when the body can be read."""
        record = self._record
        error = None if isinstance(record, bytes) else record.body_error
        if error is not None:
            self._report(error)
        return error

    @property
    def body_or_raw(self) -> bytes:
        """For display: the body that the producer sent, or the stored bytes when it cannot be
        decoded."""
        return self.raw_body if self.body_error is not None else self.body

    def _report(self, error: UndecodableBodyError) -> None:
        """Let the consumer count and log the message, once."""
        if not self._is_reported:
            self._is_reported = True
            self.origin.undecodable(self, error)

    @property
    def tag(self) -> str | None:
        return tag_of(self._record)

    keys: tuple[str, ...] = of_record("keys")
    properties: Mapping[str, str] = of_record("properties")
    message_id: str = of_record("message_id")
    offset_message_id: str = of_record("offset_message_id")
    flag: int = of_record("flag")
    born_time_ms: int = of_record("born_time_ms")
    born_host: Host = of_record("born_host")
    store_time_ms: int = of_record("store_time_ms")
    reconsume_times: int = of_record("reconsume_times")
    """How often the broker has redelivered it (0: never)."""

    @property
    def topic(self) -> str:
        return original_topic(self.record)

    @property
    def group(self) -> str:
        """The consumer group that it was delivered to."""
        return self.origin.group

    @property
    def queue(self) -> MessageQueue:
        """The queue it lies in; for a retried message that of the retry topic."""
        return MessageQueue(self.record.topic, self.record.broker, self.record.queue_id)

    def __str__(self) -> str:
        """For logs: nothing that the producer has written but its id."""
        return f"message {self.message_id} of {self.queue} at offset {self.queue_offset}"

    def __repr__(self) -> str:
        times = f" redelivered {self.reconsume_times} times" if self.reconsume_times else ""
        return (
            f"<ReceivedMessage {self.message_id} of {self.topic} queue {self.record.queue_id} of "
            f"{self.record.broker or '-'} offset {self.queue_offset}{times}"
            f"{self.record.summary()}>"
        )


class Feed:
    """Messages in line; bounded by the readers that fill it, not here.

    A failure that ends the consumer is raised to every taker, once the messages are gone.
    """

    __slots__ = ("_error", "_items", "_takers", "is_shareable")

    def __init__(self, *, is_shareable: bool = False) -> None:
        self.is_shareable: bool = is_shareable
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
        """Puts messages that were out first in line: they are older than what waits."""
        for message in messages:
            message.origin.returned(message)
        self._items.extendleft(reversed(messages))
        self._wake(len(messages))

    def suspend(self, message: ReceivedMessage, seconds: float) -> None:
        """The message comes first again, after a rest."""
        asyncio.get_running_loop().call_later(seconds, self.put_back, [message])

    def discard(self, unwanted: Callable[[ReceivedMessage], bool]) -> None:
        """Removes messages, those of a queue that was lost."""
        self._items = deque(item for item in self._items if not unwanted(item))

    def resume(self, origin: Origin) -> None:
        """The next message of a reader may be handed out, if nothing of it is out."""

    def forget(self, origin: Origin) -> None:
        """The reader has ended."""

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
        while (message := self.take(owner)) is None:
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
        `count_max` in all, without waiting. An undecodable message that is not to be delivered ends
        the batch; the next `take` deals with it."""
        messages, items, origin = [first], self._items, first.origin
        while len(messages) < count_max and items and items[0].origin is origin:
            if origin.screens and items[0].body_error is not None:
                break
            messages.append(items.popleft())
        origin.taken(messages[1:], None)
        return messages

    def take(self, owner: object) -> ReceivedMessage | None:
        """The next message that may be handed out now; from then on it is out. Raises
        UndecodableBodyError at an undecodable message when its consumer wants that; the message
        stays first in line, so every later call raises too."""
        while self._items:
            message = self._items[0]
            is_passed = not message.origin.screens or self._screen(message)
            self._items.popleft()
            if is_passed:
                message.origin.taken([message], owner)
                return message
        return None

    def _screen(self, message: ReceivedMessage) -> bool:
        """Ask the origin whether the message may be handed out; False when the origin keeps it.
        An error is raised to every taker that waits, too."""
        try:
            return message.origin.screen(message)
        except UndecodableBodyError:
            self._wake(len(self._takers))
            raise

    def fill(self, messages: list[ReceivedMessage], count_max: int, owner: object) -> None:
        """Append messages that may be handed out now, up to `count_max` in all. Messages before an
        undecodable one are kept; the next `take` raises its error."""
        while len(messages) < count_max:
            try:
                message = self.take(owner)
            except UndecodableBodyError:
                return
            if message is None:
                return
            messages.append(message)


class PausingFeed(Feed):
    """A feed that keeps the messages of paused queues."""

    __slots__ = ("_kept", "paused")

    def __init__(self) -> None:
        super().__init__()
        self.paused: set[MessageQueue] = set()
        """The queues whose messages wait."""
        self._kept: deque[ReceivedMessage] = deque()

    def pause(self, queue: MessageQueue) -> None:
        """Nothing of the queue is handed out."""
        self.paused.add(queue)
        waiting = list(self._items)
        self._items.clear()
        self.put(waiting)

    def resume_queue(self, queue: MessageQueue) -> None:
        """What was kept comes first: it is older."""
        self.paused.discard(queue)
        kept = list(self._kept)
        self._kept.clear()
        self.put_back(kept)

    def put_back(self, messages: list[ReceivedMessage]) -> None:
        super().put_back(self._free(messages))

    def put(self, messages: list[ReceivedMessage]) -> None:
        super().put(self._free(messages))

    def _free(self, messages: list[ReceivedMessage]) -> list[ReceivedMessage]:
        if not self.paused:
            return messages
        self._kept.extend(message for message in messages if message.queue in self.paused)
        return [message for message in messages if message.queue not in self.paused]

    def discard(self, unwanted: Callable[[ReceivedMessage], bool]) -> None:
        super().discard(unwanted)
        self._kept = deque(item for item in self._kept if not unwanted(item))


class Lane:
    """The messages of one queue that wait."""

    __slots__ = ("is_queued", "is_resting", "origin", "waiting")

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.waiting: deque[ReceivedMessage] = deque()
        self.is_resting: bool = False
        self.is_queued: bool = False

    @property
    def is_ready(self) -> bool:
        """May its next message be handed out now?"""
        origin = self.origin
        is_free = not origin.out and not self.is_resting and origin.may_hand_out
        return bool(self.waiting) and is_free


class OrderedFeed(Feed):
    """A lane for each queue: its next message leaves when nothing of the queue is out."""

    __slots__ = ("_lanes", "_ready")

    def __init__(self, *, is_shareable: bool = False) -> None:
        super().__init__(is_shareable=is_shareable)
        self._lanes: dict[Origin, Lane] = {}
        self._ready: deque[Lane] = deque()

    def __len__(self) -> int:
        return sum(lane.is_ready for lane in self._ready)

    def put(self, messages: list[ReceivedMessage]) -> None:
        for message in messages:
            self._lane(message).waiting.append(message)
        for lane in dict.fromkeys(self._lane(message) for message in messages):
            self._offer(lane)

    def put_back(self, messages: list[ReceivedMessage]) -> None:
        for message in reversed(messages):
            lane = self._lane(message)
            lane.waiting.appendleft(message)
            message.origin.returned(message)
            self._offer(lane)

    def suspend(self, message: ReceivedMessage, seconds: float) -> None:
        """Of a batch all come again in their order."""
        lane = self._lane(message)
        older = sum(item.queue_offset < message.queue_offset for item in lane.waiting)
        lane.waiting.insert(older, message)
        lane.is_resting = True

        def go_on() -> None:
            lane.is_resting = False
            self._offer(lane)

        asyncio.get_running_loop().call_later(seconds, go_on)

    def _lane(self, message: ReceivedMessage) -> Lane:
        lane = self._lanes.get(message.origin)
        if lane is None:
            lane = self._lanes[message.origin] = Lane(message.origin)
        return lane

    def _offer(self, lane: Lane) -> None:
        is_free = not lane.origin.out and not lane.is_resting
        if lane.waiting and is_free and not lane.is_queued:
            lane.is_queued = True
            self._ready.append(lane)
            self._wake(1)

    def take(self, owner: object) -> ReceivedMessage | None:
        while self._ready:
            lane = self._ready[0]
            is_ready = lane.is_ready
            # While that may raise, the lane and its message stay first in line.
            is_passed = is_ready and (not lane.origin.screens or self._screen(lane.waiting[0]))
            self._ready.popleft()
            lane.is_queued = False
            if is_ready:
                message = lane.waiting.popleft()
                if is_passed:
                    lane.origin.taken([message], owner)
                    return message
        return None

    def more(self, first: ReceivedMessage, count_max: int) -> list[ReceivedMessage]:
        lane, messages = self._lane(first), [first]
        origin = lane.origin
        while len(messages) < count_max and lane.waiting and origin.may_hand_out:
            if origin.screens and lane.waiting[0].body_error is not None:
                break
            messages.append(lane.waiting.popleft())
        origin.taken(messages[1:], None)
        return messages

    def resume(self, origin: Origin) -> None:
        lane = self._lanes.get(origin)
        if lane is not None:
            self._offer(lane)

    def forget(self, origin: Origin) -> None:
        lane = self._lanes.pop(origin, None)
        if lane is not None:
            lane.waiting.clear()

    def discard(self, unwanted: Callable[[ReceivedMessage], bool]) -> None:
        for lane in self._lanes.values():
            lane.waiting = deque(item for item in lane.waiting if not unwanted(item))

    def expel(self, owner: object, error: BaseException) -> None:
        super().expel(owner, error)
        for lane in tuple(self._lanes.values()):
            lane.origin.release(owner)
            self._offer(lane)


class RetrySink:
    """Sends the messages of a group's retry topic to the feeds of the topics they came from; one of
    a topic that is not subscribed to any more to any feed."""

    __slots__ = ("_feeds",)

    def __init__(self, feeds: Mapping[str, Feed]) -> None:
        self._feeds = feeds

    def _of(self, message: ReceivedMessage) -> Feed | None:
        feed = self._feeds.get(message.topic)  # an empty one is false
        return next(iter(self._feeds.values()), None) if feed is None else feed

    def put(self, messages: list[ReceivedMessage]) -> None:
        for message in messages:
            feed = self._of(message)
            if feed is not None:
                feed.put([message])

    def suspend(self, message: ReceivedMessage, seconds: float) -> None:
        feed = self._of(message)
        if feed is not None:
            feed.suspend(message, seconds)

    def discard(self, unwanted: Callable[[ReceivedMessage], bool]) -> None:
        for feed in self._feeds.values():
            feed.discard(unwanted)

    def fail(self, error: BaseException) -> None:
        for feed in self._feeds.values():
            feed.fail(error)

    def resume(self, origin: Origin) -> None:
        for feed in self._feeds.values():
            feed.resume(origin)

    def forget(self, origin: Origin) -> None:
        for feed in self._feeds.values():
            feed.forget(origin)
