"""Blocking consumers: a stream to loop over, a handler on threads, a consumer to poll.

    with Consumer("127.0.0.1:9876", "flights", group="late", where="dep_delay > 60") as messages:
        for message in messages:
            ...
            message.ack()

Each is the asyncio consumer of the same kind on a loop of its own (`portal`), so membership,
balance, offsets and filters are the same, and so are the errors.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from sluicemq.client.aio.consumer import MessageStream
from sluicemq.client.aio.consumer import PushConsumer as AsyncPushConsumer
from sluicemq.client.aio.pull import LitePullConsumer as AsyncLitePullConsumer
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.consuming import Start
from sluicemq.client.core.inflight import BYTES_MAX, COUNT_MAX
from sluicemq.client.core.names import Credentials
from sluicemq.client.threaded.portal import Portal
from sluicemq.model.topic import MessageQueue
from sluicemq.net.tls import Tls

NameServers = str | list[str] | tuple[str, ...] | None
Keys = Credentials | tuple[str, str] | None
_FETCH_COUNT = 100


class BlockingMessage(ReceivedMessage):
    """A received message whose `ack` does not have to be awaited."""

    __slots__ = ("_inner", "_portal")

    def __init__(self, inner: ReceivedMessage, portal: Portal) -> None:
        super().__init__(inner.record, inner.origin, inner.generation)
        self.attempt = inner.attempt
        self._inner = inner
        self._portal = portal

    def ack(self) -> None:  # type: ignore[override]
        """Done with this message; does not wait. Commits follow every 5 s and at close."""
        self._portal.soon(self._inner.settle)

    def reject(  # type: ignore[override]
        self, delay_level: int | None = None, *, suspend_s: float | None = None
    ) -> bool:
        """Not done: deliver it again later. Waits until that is stored; see
        `ReceivedMessage.reject`."""
        return self._portal.call(self._inner.reject(delay_level, suspend_s=suspend_s))

    def reply(self, body: bytes | str) -> None:  # type: ignore[override]
        """Answers a message of `request`; returns when the requester has it. See
        `ReceivedMessage.reply`."""
        self._portal.call(self._inner.reply(body))


class _Blocking:
    """A `Sluice` on a loop of its own, in a `with` statement."""

    def __init__(
        self,
        name_servers: NameServers,
        credentials: Keys,
        trace: bool | str = False,
        tls: Tls | bool | None = None,
    ) -> None:
        self._portal = Portal()
        try:
            self._sluice = self._portal.call(_make(name_servers, credentials, trace, tls))
        except BaseException:
            self._portal.close()
            raise

    def close(self) -> None:
        """Commits, leaves the group, closes. Safe to call twice."""
        try:
            self._portal.call(self._sluice.close())
        finally:
            self._portal.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._sluice!r}>"


async def _make(
    name_servers: NameServers, credentials: Keys, trace: bool | str, tls: Tls | bool | None
) -> Sluice:
    return Sluice(name_servers, credentials=credentials, trace=trace, tls=tls)


class Consumer(_Blocking):
    """The messages of one topic for one group, to loop over. Use it from one thread.

    `ordered` and the rest are those of `Sluice.subscribe`: max_reconsume_times, retry_delay_level,
    suspend_s, broadcast, allocate, span_max …
    """

    def __init__(
        self,
        name_servers: NameServers,
        topic: str,
        *,
        group: str,
        tags: str | None = None,
        where: str | None = None,
        start: Start = "first",
        prefetch_count: int = COUNT_MAX,
        prefetch_bytes: int = BYTES_MAX,
        ordered: bool = False,
        credentials: Keys = None,
        trace: bool | str = False,
        tls: Tls | bool | None = None,
        **rules: Any,
    ) -> None:
        super().__init__(name_servers, credentials, trace, tls)

        async def subscribe() -> MessageStream:
            return self._sluice.subscribe(
                topic,
                group=group,
                tags=tags,
                where=where,
                start=start,
                prefetch_count=prefetch_count,
                prefetch_bytes=prefetch_bytes,
                ordered=ordered,
                **rules,
            )

        try:
            self._stream = self._portal.call(subscribe())
        except BaseException:
            self.close()
            raise
        self._waiting: deque[ReceivedMessage] = deque()
        self._ordered = ordered

    def receive(self, timeout_s: float | None = None) -> BlockingMessage | None:
        """The next message; None when none came within `timeout_s`."""
        if not self._waiting:
            count = 1 if self._ordered else _FETCH_COUNT  # what waits here could be lost
            fetched = self._portal.call(self._stream.receive_many(count, timeout_s))
            self._waiting.extend(fetched)
        return BlockingMessage(self._waiting.popleft(), self._portal) if self._waiting else None

    def change(self, *, tags: str | None = None, where: str | None = None) -> None:
        """Other messages of the topic from now on; see `MessageStream.change`. What was fetched to
        this thread before may still come."""
        self._portal.call(self._stream.change(tags=tags, where=where))

    def __iter__(self) -> Iterator[BlockingMessage]:
        while True:
            message = self.receive()
            if message is not None:
                yield message


class PushConsumer(_Blocking):
    """Calls a handler on `concurrency` threads; its return acknowledges, see the asyncio one.

    The handler asks for the message again by raising RetryLaterError, or anything else. `ordered`
    and the rest are those of `Sluice.consumer`.
    """

    def __init__(
        self,
        name_servers: NameServers,
        group: str,
        handler: Callable[[ReceivedMessage], Any],
        *,
        concurrency: int = 20,
        start: Start = "first",
        ordered: bool = False,
        credentials: Keys = None,
        trace: bool | str = False,
        tls: Tls | bool | None = None,
        **rules: Any,
    ) -> None:
        super().__init__(name_servers, credentials, trace, tls)

        def blocking(message: ReceivedMessage) -> Any:
            return handler(BlockingMessage(message, self._portal))

        called = handler if inspect.iscoroutinefunction(handler) else blocking

        async def make() -> AsyncPushConsumer:
            return self._sluice.consumer(
                group, called, concurrency=concurrency, start=start, ordered=ordered, **rules
            )

        try:
            self._consumer = self._portal.call(make())
        except BaseException:
            self.close()
            raise

    def subscribe(self, topic: str, *, tags: str | None = None, where: str | None = None) -> Self:
        """Adds a topic before `start`."""
        self._consumer.subscribe(topic, tags=tags, where=where)
        return self

    def change(self, topic: str, *, tags: str | None = None, where: str | None = None) -> None:
        """Another expression for a topic, or one more topic, while it runs."""
        self._portal.call(self._consumer.change(topic, tags=tags, where=where))

    def start(self) -> None:
        """Joins the group and begins to call the handler."""
        self._portal.call(self._consumer.start())

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self


async def _now(work: Callable[..., None], *given: Any, **named: Any) -> None:
    """Runs a plain function on the client's thread."""
    work(*given, **named)


class LitePullConsumer(_Blocking):
    """Polls messages for a group: subscribe or assign, then poll. Use it from one thread."""

    def __init__(
        self,
        name_servers: NameServers,
        group: str,
        *,
        auto_commit: bool = True,
        start: Start = "first",
        credentials: Keys = None,
        trace: bool | str = False,
        tls: Tls | bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name_servers, credentials, trace, tls)

        async def make() -> AsyncLitePullConsumer:
            return self._sluice.lite_pull(group, start=start, auto_commit=auto_commit, **options)

        try:
            self._consumer = self._portal.call(make())
        except BaseException:
            self.close()
            raise

    def subscribe(self, topic: str, *, tags: str | None = None, where: str | None = None) -> None:
        """Joins the group for a topic; again for it: another expression from now on."""
        self._portal.call(self._consumer.subscribe(topic, tags=tags, where=where))

    def assign(
        self, queues: Iterable[MessageQueue], *, tags: str | None = None, where: str | None = None
    ) -> None:
        """Reads exactly these queues."""
        self._portal.call(self._consumer.assign(queues, tags=tags, where=where))

    @property
    def assignment(self) -> list[MessageQueue]:
        """The queues read now."""
        return self._consumer.assignment

    def poll(self, timeout_s: float = 5.0, *, count_max: int = 32) -> list[ReceivedMessage]:
        """Up to `count_max` messages, [] when none came in time; earlier ones count as done."""
        return self._portal.call(self._consumer.poll(timeout_s, count_max=count_max))

    def unsubscribe(self, topic: str) -> None:
        """Reads a topic no more."""
        self._portal.call(self._consumer.unsubscribe(topic))

    def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Everything polled so far is done, or these offsets; returns when it is stored."""
        self._portal.call(self._consumer.commit(offsets))

    def commit_soon(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """The same without waiting."""
        self._portal.soon(self._consumer.commit_soon, offsets)

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Nothing of these queues is fetched or handed out until `resume`."""
        self._portal.call(_now(self._consumer.pause, list(queues)))

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """They go on where they stood."""
        self._portal.call(_now(self._consumer.resume, list(queues)))

    def on_queues(
        self,
        topic: str,
        listener: Callable[[str, list[MessageQueue]], None],
        *,
        period_s: float = 30.0,
    ) -> None:
        """Calls `listener`, on the client's thread, when a topic gets other queues."""
        self._portal.call(_now(self._consumer.on_queues, topic, listener, period_s=period_s))

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """The next messages of a queue come from `offset` on."""
        self._portal.call(self._consumer.seek(queue, offset))

    def seek_to_begin(self, queue: MessageQueue) -> None:
        """The next messages of a queue are the oldest stored ones."""
        self._portal.call(self._consumer.seek_to_begin(queue))

    def seek_to_end(self, queue: MessageQueue) -> None:
        """The next messages of a queue are those that come from now on."""
        self._portal.call(self._consumer.seek_to_end(queue))

    def seek_to_time(self, queue: MessageQueue, time_ms: int) -> None:
        """The next messages of a queue are those stored at `time_ms` or later."""
        self._portal.call(self._consumer.seek_to_time(queue, time_ms))

    def offset_for_time(self, queue: MessageQueue, time_ms: int) -> int:
        """The first offset stored at `time_ms` (milliseconds since 1970) or later."""
        return self._portal.call(self._consumer.offset_for_time(queue, time_ms))

    def committed(self, queue: MessageQueue) -> int | None:
        """The committed offset of the group, None when there is none."""
        return self._portal.call(self._consumer.committed(queue))

    def queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic."""
        return self._portal.call(self._consumer.queues(topic))
