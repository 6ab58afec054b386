"""Where messages wait for takers: in one line, or in one for each queue."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from sluicemq.client.aio.received import Origin, ReceivedMessage
from sluicemq.model.topic import MessageQueue


class Sink(Protocol):
    """Where a reader puts what it pulled."""

    def put(self, messages: list[ReceivedMessage]) -> None:
        """Appends and wakes takers."""

    def discard(self, unwanted: Callable[[ReceivedMessage], bool]) -> None:
        """Removes messages, those of a queue that was lost."""

    def fail(self, error: BaseException) -> None:
        """Ends the feed: takers get the error."""

    def suspend(self, message: ReceivedMessage, seconds: float) -> None:
        """The message comes first again, after a rest."""

    def resume(self, origin: Origin) -> None:
        """The next message of a reader may be handed out, if nothing of it is out."""
        return

    def forget(self, origin: Origin) -> None:
        """The reader has ended."""
        return


class Feed(Sink):
    """Messages in line; bounded by the readers that fill it, not here.

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
        self._items.extend(messages)
        self._wake(len(messages))

    def put_back(self, messages: list[ReceivedMessage]) -> None:
        """Puts messages that were out first in line: they are older than what waits."""
        for message in messages:
            message.origin.returned(message)
        self._items.extendleft(reversed(messages))
        self._wake(len(messages))

    def suspend(self, message: ReceivedMessage, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self.put_back, [message])

    def discard(self, unwanted: Callable[[ReceivedMessage], bool]) -> None:
        self._items = deque(item for item in self._items if not unwanted(item))

    def fail(self, error: BaseException) -> None:
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
        messages, items = [first], self._items
        while len(messages) < count_max and items and items[0].origin is first.origin:
            messages.append(items.popleft())
            first.origin.taken(messages[-1], None)
        return messages

    def _take(self, owner: object) -> ReceivedMessage | None:
        """The next message that may be handed out now; from then on it is out."""
        if not self._items:
            return None
        message = self._items.popleft()
        message.origin.taken(message, owner)
        return message


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
        self.is_resting = False
        self.is_queued = False

    @property
    def is_ready(self) -> bool:
        """May its next message be handed out now?"""
        origin = self.origin
        is_free = not origin.is_busy and not self.is_resting and origin.may_hand_out
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
        asyncio.get_running_loop().call_later(seconds, self._go_on, lane)

    def _go_on(self, lane: Lane) -> None:
        lane.is_resting = False
        self._offer(lane)

    def _lane(self, message: ReceivedMessage) -> Lane:
        lane = self._lanes.get(message.origin)
        if lane is None:
            lane = self._lanes[message.origin] = Lane(message.origin)
        return lane

    def _offer(self, lane: Lane) -> None:
        is_free = not lane.origin.is_busy and not lane.is_resting
        if lane.waiting and is_free and not lane.is_queued:
            lane.is_queued = True
            self._ready.append(lane)
            self._wake(1)

    def _take(self, owner: object) -> ReceivedMessage | None:
        while self._ready:
            lane = self._ready.popleft()
            lane.is_queued = False
            if lane.is_ready:
                message = lane.waiting.popleft()
                lane.origin.taken(message, owner)
                return message
        return None

    def more(self, first: ReceivedMessage, count_max: int) -> list[ReceivedMessage]:
        lane, messages = self._lane(first), [first]
        while len(messages) < count_max and lane.waiting and lane.origin.may_hand_out:
            messages.append(lane.waiting.popleft())
            lane.origin.taken(messages[-1], None)
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


class RetrySink(Sink):
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
