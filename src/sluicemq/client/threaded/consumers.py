"""Blocking consumers: each runs the asyncio consumer of its kind on an event loop thread.

Consumers prefetch messages, rebalance queues and commit offsets while the application does other
things. So a blocking consumer needs a thread anyway, and has the same membership, rebalancing,
offsets, filters and errors as the asyncio consumer that it runs.
"""

import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final, Generic, Self, TypeVar, Unpack

from sluicemq.client.aio.consumer import MessageStream
from sluicemq.client.aio.consumer import PushConsumer as AsyncPushConsumer
from sluicemq.client.aio.pull import POLL_TIMEOUT_S
from sluicemq.client.aio.pull import LitePullConsumer as AsyncLitePullConsumer
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.consuming import ConsumeRules, LitePullLimits, Start
from sluicemq.client.core.names import Credentials
from sluicemq.client.threaded.portal import Portal, ThreadedClient, blocking
from sluicemq.hints import with_hints
from sluicemq.model.arguments import Body
from sluicemq.model.topic import MessageQueue
from sluicemq.net.tls import Tls

C = TypeVar("C")
NameServers = str | list[str] | tuple[str, ...] | None
CredentialsLike = Credentials | tuple[str, str] | None
_FETCH_COUNT: Final = 100
"""The maximum number of messages that `Consumer` takes from its event loop at a time."""


@with_hints
class BlockingMessage(ReceivedMessage):
    """A received message with methods that block, or return at once, instead of coroutines."""

    __slots__ = ("_inner", "_portal")

    def __init__(self, inner: ReceivedMessage, portal: Portal) -> None:
        """Wrap `inner`, a message of an asyncio client whose event loop runs in `portal`."""
        super().__init__(inner._record, inner.origin, inner.in_flight, inner.queue_offset)
        self.attempt: int = inner.attempt
        self._inner = inner
        self._portal = portal

    def ack(self) -> None:  # type: ignore[override]
        """Acknowledge the message, without waiting.

        The offset is committed with the next periodic commit (every 5 s by default), or when the
        consumer is closed. After that, this does nothing.
        """
        self._portal.call_soon(self._inner.ack_nowait)

    def reject(  # type: ignore[override]
        self, delay_level: int | None = None, *, suspend_s: float | None = None
    ) -> bool:
        """Report that the message was not processed, so that it is delivered again later.

        Returns when that is stored. The arguments, the result and the errors are those of
        `ReceivedMessage.reject`.
        """
        return self._portal.run(self._inner.reject(delay_level, suspend_s=suspend_s))

    def reply(self, body: Body) -> None:  # type: ignore[override]
        """Reply to a message that was sent with `request`, and wait until the requester has it.

        The message is not acknowledged by this. The errors are those of `ReceivedMessage.reply`.
        """
        self._portal.run(self._inner.reply(body))


class _BlockingConsumer(Generic[C]):
    """A consumer with a `Sluice` and an event loop thread of its own."""

    def __init__(
        self,
        make_consumer: Callable[[Sluice], Awaitable[C]],
        name_servers: NameServers,
        credentials: CredentialsLike,
        trace: bool | str,
        tls: Tls | bool | None,
    ) -> None:
        """Create a client, and a consumer with `make_consumer(client)`.

        The last four arguments are those of the client. Both run on the event loop of a thread of
        their own.
        """

        def make_sluice() -> Sluice:
            return Sluice(name_servers, credentials=credentials, trace=trace, tls=tls)

        self._threaded: ThreadedClient[C] = ThreadedClient(make_sluice, make_consumer)
        self._portal: Portal = self._threaded.portal
        self._consumer: C = self._threaded.client

    def close(self) -> None:
        """Commit the offsets of acknowledged messages, leave the group, and stop the thread.

        Waits for handlers that run. If the wait is interrupted (KeyboardInterrupt), the consumer
        leaves the group without waiting for them, and the interrupt is raised afterwards. Safe to
        call twice.
        """
        self._threaded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<blocking {self._consumer!r:.400}>"


@with_hints
class Consumer(_BlockingConsumer[MessageStream]):
    """The messages of one topic for one group, to loop over. Use it from one thread.

        with Consumer("127.0.0.1:9876", "flights", group="late") as messages:
            for message in messages:
                message.ack()

    A message that is not acknowledged is delivered again. The loop has no end; leave it with
    `break`.

    `topic`, `group`, `tags`, `where`, `start`, `ordered` and `rules` are the arguments of
    `Sluice.subscribe`; `name_servers`, `credentials`, `trace` and `tls` are those of `Sluice`. The
    constructor raises what both raise. The group is joined by the first `receive`, which, like the
    loop, also raises what ends the subscription.
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
        ordered: bool = False,
        credentials: CredentialsLike = None,
        trace: bool | str = False,
        tls: Tls | bool | None = None,
        **rules: Unpack[ConsumeRules],
    ) -> None:
        """Create the consumer on a thread of its own; the first `receive` joins the group."""

        async def subscribe(sluice: Sluice) -> MessageStream:
            return sluice.subscribe(
                topic, group=group, tags=tags, where=where, start=start, ordered=ordered, **rules
            )

        super().__init__(subscribe, name_servers, credentials, trace, tls)
        self._fetched: deque[ReceivedMessage] = deque()
        # An ordered consumer fetches single messages: its queue may move to another member while
        # further messages wait here, and that member would process them too.
        self._fetch_count = 1 if ordered else _FETCH_COUNT

    def receive(self, timeout_s: float | None = None) -> BlockingMessage | None:
        """Wait up to `timeout_s` seconds for the next message, and return it.

        Returns None if no message arrived in time. A `timeout_s` of None waits without limit. The
        first call joins the group. Raises what `MessageStream.start` raises, and what ended the
        subscription.
        """
        if not self._fetched:
            receive = self._consumer.receive_many(self._fetch_count, timeout_s)
            messages = self._portal.run(receive, on_undelivered=self._fetched.extend)
            self._fetched.extend(messages)
        if not self._fetched:
            return None
        return BlockingMessage(self._fetched.popleft(), self._portal)

    change: Final = blocking(MessageStream.change)

    def __iter__(self) -> Iterator[BlockingMessage]:
        while True:
            message = self.receive()
            if message is not None:
                yield message


@with_hints
class PushConsumer(_BlockingConsumer[AsyncPushConsumer]):
    """A consumer that calls a handler for each message, on up to `concurrency` threads.

        with PushConsumer("127.0.0.1:9876", "late", handle).subscribe("flights"):
            stop.wait()

    The handler is called with a `BlockingMessage`. The message is acknowledged when the handler
    returns. If the handler raises RetryLaterError or any other error, the message is delivered
    again. A handler that is a coroutine function runs on the event loop thread, and is called with
    a `ReceivedMessage`. For details see the asyncio `PushConsumer`.

    Subscribe to topics, then call `start` or enter the `with` block.

    `group`, `handler`, `concurrency`, `start`, `ordered` and `rules` are the arguments of
    `Sluice.consumer`; `name_servers`, `credentials`, `trace` and `tls` are those of `Sluice`. The
    constructor raises what both raise.
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
        credentials: CredentialsLike = None,
        trace: bool | str = False,
        tls: Tls | bool | None = None,
        **rules: Unpack[ConsumeRules],
    ) -> None:
        """Create the consumer on a thread of its own; nothing is received before it is started.

        A plain function as `handler` gets messages with blocking methods.
        """

        def handle_blocking(message: ReceivedMessage) -> Any:
            return handler(BlockingMessage(message, self._portal))

        async def make_consumer(sluice: Sluice) -> AsyncPushConsumer:
            is_coroutine = inspect.iscoroutinefunction(handler)
            return sluice.consumer(
                group,
                handler if is_coroutine else handle_blocking,
                concurrency=concurrency,
                start=start,
                ordered=ordered,
                **rules,
            )

        super().__init__(make_consumer, name_servers, credentials, trace, tls)

    def subscribe(self, topic: str, *, tags: str | None = None, where: str | None = None) -> Self:
        """Add a topic before `start`, and return this consumer.

        `tags` ("A||B") or `where` (SQL92) selects messages; without them all messages match. Raises
        FilterSyntaxError, and ConfigurationError if the consumer runs already.
        """
        self._consumer.subscribe(topic, tags=tags, where=where)
        return self

    change: Final = blocking(AsyncPushConsumer.change)
    start: Final = blocking(AsyncPushConsumer.start)

    def __enter__(self) -> Self:
        """Start the consumer. If that raises, the consumer is closed."""
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self


@with_hints
class LitePullConsumer(_BlockingConsumer[AsyncLitePullConsumer]):
    """A consumer that the application polls for messages. Use it from one thread.

        with LitePullConsumer("127.0.0.1:9876", "late") as consumer:
            consumer.subscribe("flights")
            messages = consumer.poll()

    Call `subscribe` to share the queues of topics with the other members of the group, or `assign`
    to read exactly the given queues; then `poll`.

    `group`, `auto_commit`, `start` and `limits` are the arguments of `Sluice.lite_pull`;
    `name_servers`, `credentials`, `trace` and `tls` are those of `Sluice`. The constructor raises
    what both raise.
    """

    def __init__(
        self,
        name_servers: NameServers,
        group: str,
        *,
        auto_commit: bool = True,
        start: Start = "first",
        credentials: CredentialsLike = None,
        trace: bool | str = False,
        tls: Tls | bool | None = None,
        **limits: Unpack[LitePullLimits],
    ) -> None:
        """Create the consumer on a thread of its own; it reads nothing yet."""

        async def make_consumer(sluice: Sluice) -> AsyncLitePullConsumer:
            return sluice.lite_pull(group, start=start, auto_commit=auto_commit, **limits)

        super().__init__(make_consumer, name_servers, credentials, trace, tls)

    @property
    def assignment(self) -> list[MessageQueue]:
        """The queues that this consumer reads now, sorted.

        Raises ConfigurationError before `subscribe` or `assign`.
        """
        return self._consumer.assignment

    def commit_soon(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Commit as `commit` does, but return at once. Errors are logged."""
        self._portal.call_soon(self._consumer.commit_soon, offsets)

    subscribe: Final = blocking(AsyncLitePullConsumer.subscribe)
    unsubscribe: Final = blocking(AsyncLitePullConsumer.unsubscribe)
    assign: Final = blocking(AsyncLitePullConsumer.assign)

    def poll(
        self, timeout_s: float | None = POLL_TIMEOUT_S, *, count_max: int = 32
    ) -> list[ReceivedMessage]:
        """Wait up to `timeout_s` seconds for messages, and return up to `count_max` of them.

        Returns as soon as there is one message, with all others that are prefetched, and [] if none
        arrived in time. A `timeout_s` of None waits without limit; 0 returns what is prefetched.

        The messages that earlier calls returned count as processed from now on. If the wait is
        interrupted (KeyboardInterrupt), the next call returns the messages that this one took.
        Raises what ended the consumer, such as GroupNotFoundError or PermissionDeniedError.
        """
        polling = self._consumer.poll(timeout_s, count_max=count_max)
        return self._portal.run(polling, on_undelivered=self._consumer.put_back)

    commit: Final = blocking(AsyncLitePullConsumer.commit)
    pause: Final = blocking(AsyncLitePullConsumer.pause)
    resume: Final = blocking(AsyncLitePullConsumer.resume)
    watch_queues: Final = blocking(AsyncLitePullConsumer.watch_queues)
    seek: Final = blocking(AsyncLitePullConsumer.seek)
    seek_to_begin: Final = blocking(AsyncLitePullConsumer.seek_to_begin)
    seek_to_end: Final = blocking(AsyncLitePullConsumer.seek_to_end)
    seek_to_time: Final = blocking(AsyncLitePullConsumer.seek_to_time)
    offset_for_time: Final = blocking(AsyncLitePullConsumer.offset_for_time)
    committed: Final = blocking(AsyncLitePullConsumer.committed)
    queues: Final = blocking(AsyncLitePullConsumer.queues)
