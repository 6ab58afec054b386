"""Blocking consumers: a stream to loop over, a handler on threads, a consumer to poll.

    with Consumer("127.0.0.1:9876", "flights", group="late", where="dep_delay > 60") as messages:
        for message in messages:
            ...
            message.ack()

Consumers pull ahead, balance and commit while the program does other things, so their blocking form
is the asyncio consumer of the same kind on a loop and thread of its own (`Portal`): membership,
balance, offsets, filters and errors are the same.
"""

import asyncio
import functools
import inspect
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, Unpack, overload

from sluicemq.client.affinity import ClientAffinity
from sluicemq.client.aio.consumer import MessageStream
from sluicemq.client.aio.consumer import PushConsumer as AsyncPushConsumer
from sluicemq.client.aio.pull import POLL_TIMEOUT_S
from sluicemq.client.aio.pull import LitePullConsumer as AsyncLitePullConsumer
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.consuming import ConsumeRules, LitePullLimits, Start
from sluicemq.client.core.messages import Body
from sluicemq.client.core.names import Credentials
from sluicemq.errors import ClosedError, ConfigurationError
from sluicemq.hints import with_hints
from sluicemq.model.topic import MessageQueue
from sluicemq.net.tls import Tls

_log = logging.getLogger("sluicemq.client")
T = TypeVar("T")
C = TypeVar("C")
P = ParamSpec("P")


class Portal:
    """A running loop on a daemon thread. Its methods may be called from any other thread."""

    def __init__(self, name: str = "sluicemq client") -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._affinity = ClientAffinity()
        is_ready = threading.Event()

        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            is_ready.set()
            await self._stop.wait()

        def work() -> None:
            try:
                asyncio.run(main())
            except BaseException as error:  # noqa: BLE001 - a thread ends silently of SystemExit
                self._failure = error
                _log.critical("the loop of %s ended: its client is lost", name, exc_info=error)

        self._thread = threading.Thread(target=work, name=name, daemon=True)
        self._thread.start()
        is_ready.wait()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine there. Raises ClosedError after `close`, ConfigurationError after a
        fork: the thread is in the parent process."""
        try:
            self._affinity.check_process()
        except ConfigurationError:
            coroutine.close()
            raise
        loop = self._loop
        if loop is None or loop.is_closed():
            coroutine.close()
            why = f" its loop ended of {self._failure!r}." if self._failure is not None else ""
            raise ClosedError(f"this client is closed.{why}", fix="Make a new one.")
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def call(
        self, coroutine: Coroutine[Any, Any, T], take_back: Callable[[T], object] = lambda _: None
    ) -> T:
        """Run a coroutine there, wait, and return its result.

        An interrupt of the waiting (Ctrl-C) cancels the coroutine. A result that it had already and
        that the caller does not get is given to `take_back`, on the loop. Raises what the coroutine
        raises, ClosedError after `close`, and ConfigurationError on the loop's own thread.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ConfigurationError(
                "a blocking call on the client's own thread would wait for itself.",
                fix="Await the asyncio client there, or give a handler that is a plain function.",
            )
        results: list[T] = []

        async def work() -> T:
            results.append(await coroutine)
            return results[0]

        try:
            future = self.submit(work())
        except (ClosedError, ConfigurationError):
            coroutine.close()
            raise
        try:
            return future.result()
        except BaseException:
            future.cancel()
            self.soon(lambda: [take_back(result) for result in results])
            raise

    def call_to_end(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """`call` a close(): interrupted once, it ends its waiting, and the caller waits for the
        rest; interrupted again it is left alone. Raises the interrupt afterwards."""
        try:
            return self.call(function())
        except (KeyboardInterrupt, SystemExit):
            self.call(function())
            raise

    @overload
    def run(self, function: Callable[P, Awaitable[T]], *args: P.args, **options: P.kwargs) -> T: ...

    @overload
    def run(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T: ...

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Calls a function there, awaits what it returns where that is to be awaited, and waits."""

        async def work() -> Any:
            found = function(*args, **options)
            return await found if inspect.isawaitable(found) else found

        return self.call(work())

    def soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Run a function there without waiting; does nothing after `close`. Raises
        ConfigurationError after a fork."""
        self._affinity.check_process()
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Ends the loop and its thread. Safe to call twice."""
        self.soon(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)


@overload
def blocking(
    method: Callable[Concatenate[C, P], Awaitable[T]],
) -> Callable[Concatenate[Any, P], T]: ...


@overload
def blocking(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[Any, P], T]: ...


def blocking(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an asyncio client as one that blocks, of a class whose `_on_loop()` gives a
    `Portal` and that client. Signature and docstring are those of the asyncio one."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        portal, client = self._on_loop()
        return portal.run(method, client, *args, **options)

    return call


NameServers = str | list[str] | tuple[str, ...] | None
Keys = Credentials | tuple[str, str] | None
_FETCH_COUNT = 100


@with_hints
class BlockingMessage(ReceivedMessage):
    """A received message whose `ack` does not have to be awaited."""

    __slots__ = ("_inner", "_portal")

    def __init__(self, inner: ReceivedMessage, portal: Portal) -> None:
        super().__init__(inner._record, inner.origin, inner.in_flight, inner.queue_offset)
        self.attempt: int = inner.attempt
        self._inner = inner
        self._portal = portal

    def ack(self) -> None:  # type: ignore[override]
        """Done with this message; does not wait. Commits follow every 5 s and at close."""
        self._portal.soon(self._inner.ack_nowait)

    def reject(  # type: ignore[override]
        self, delay_level: int | None = None, *, suspend_s: float | None = None
    ) -> bool:
        """Not done: deliver it again later. Waits until that is stored; see
        `ReceivedMessage.reject`."""
        return self._portal.call(self._inner.reject(delay_level, suspend_s=suspend_s))

    def reply(self, body: Body) -> None:  # type: ignore[override]
        """Answers a message of `request`; returns when the requester has it. See
        `ReceivedMessage.reply`."""
        self._portal.call(self._inner.reply(body))


class _Blocking(Generic[T]):
    """A consumer of a `Sluice` of its own on a loop of its own, in a `with` statement."""

    def __init__(
        self,
        make: Callable[[Sluice], T],
        name_servers: NameServers,
        credentials: Keys,
        trace: bool | str,
        tls: Tls | bool | None,
    ) -> None:
        self._portal = Portal()
        try:
            self._sluice = self._portal.run(
                Sluice, name_servers, credentials=credentials, trace=trace, tls=tls
            )
            self._consumer = self._portal.run(make, self._sluice)
        except BaseException:
            self.close()
            raise

    def _on_loop(self) -> tuple[Portal, T]:
        return self._portal, self._consumer

    def close(self) -> None:
        """Commits, leaves the group, closes. Safe to call twice."""
        try:
            if hasattr(self, "_sluice"):
                self._portal.call_to_end(self._sluice.close)
        finally:
            self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<blocking {self._consumer!r:.400}>"


@with_hints
class Consumer(_Blocking[MessageStream]):
    """The messages of one topic for one group, to loop over. Use it from one thread.

    `group` to `ordered` and the `rules` are those of `Sluice.subscribe`, the others those of
    `Sluice`. Raises what both do; what ended the subscription is raised by `receive` and the loop.
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
        credentials: Keys = None,
        trace: bool | str = False,
        tls: Tls | bool | None = None,
        **rules: Unpack[ConsumeRules],
    ) -> None:
        def subscribe(sluice: Sluice) -> MessageStream:
            return sluice.subscribe(
                topic, group=group, tags=tags, where=where, start=start, ordered=ordered, **rules
            )

        super().__init__(subscribe, name_servers, credentials, trace, tls)
        self._waiting: deque[ReceivedMessage] = deque()
        self._ordered = ordered

    def receive(self, timeout_s: float | None = None) -> BlockingMessage | None:
        """The next message; None when none came within `timeout_s`."""
        if not self._waiting:
            count = 1 if self._ordered else _FETCH_COUNT  # what waits here could be lost
            receive = self._consumer.receive_many(count, timeout_s)
            self._waiting.extend(self._portal.call(receive, take_back=self._waiting.extend))
        return BlockingMessage(self._waiting.popleft(), self._portal) if self._waiting else None

    change: Final = blocking(MessageStream.change)

    def __iter__(self) -> Iterator[BlockingMessage]:
        while True:
            message = self.receive()
            if message is not None:
                yield message


@with_hints
class PushConsumer(_Blocking[AsyncPushConsumer]):
    """Calls a handler on `concurrency` threads; its return acknowledges, see the asyncio one.

    The handler asks for the message again by raising RetryLaterError, or anything else.
    `concurrency` to `ordered` and the `rules` are those of `Sluice.consumer`, the others those of
    `Sluice`. Raises what both do.
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
        **rules: Unpack[ConsumeRules],
    ) -> None:
        def on_thread(message: ReceivedMessage) -> Any:
            return handler(BlockingMessage(message, self._portal))

        called = handler if inspect.iscoroutinefunction(handler) else on_thread

        def make(sluice: Sluice) -> AsyncPushConsumer:
            return sluice.consumer(
                group, called, concurrency=concurrency, start=start, ordered=ordered, **rules
            )

        super().__init__(make, name_servers, credentials, trace, tls)

    def subscribe(self, topic: str, *, tags: str | None = None, where: str | None = None) -> Self:
        """Adds a topic before `start`."""
        self._consumer.subscribe(topic, tags=tags, where=where)
        return self

    change: Final = blocking(AsyncPushConsumer.change)
    start: Final = blocking(AsyncPushConsumer.start)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self


@with_hints
class LitePullConsumer(_Blocking[AsyncLitePullConsumer]):
    """Polls messages for a group: subscribe or assign, then poll. Use it from one thread.

    `auto_commit`, `start` and the `limits` are those of `Sluice.lite_pull`, the others those of
    `Sluice`. Raises what both do.
    """

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
        **limits: Unpack[LitePullLimits],
    ) -> None:
        def make(sluice: Sluice) -> AsyncLitePullConsumer:
            return sluice.lite_pull(group, start=start, auto_commit=auto_commit, **limits)

        super().__init__(make, name_servers, credentials, trace, tls)

    @property
    def assignment(self) -> list[MessageQueue]:
        """The queues read now."""
        return self._consumer.assignment

    def commit_soon(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """As `commit`, without waiting."""
        self._portal.soon(self._consumer.commit_soon, offsets)

    subscribe: Final = blocking(AsyncLitePullConsumer.subscribe)
    unsubscribe: Final = blocking(AsyncLitePullConsumer.unsubscribe)
    assign: Final = blocking(AsyncLitePullConsumer.assign)

    def poll(
        self, timeout_s: float | None = POLL_TIMEOUT_S, *, count_max: int = 32
    ) -> list[ReceivedMessage]:
        """Return up to `count_max` messages: wait up to `timeout_s` seconds (None: for ever) for
        the first, and return [] if none came. 0 takes what is there.

        What earlier polls returned counts as done from now on; what an interrupted one (Ctrl-C)
        took is handed out again. Raises what ended the reading.
        """
        polling = self._consumer.poll(timeout_s, count_max=count_max)
        return self._portal.call(polling, take_back=self._consumer.put_back)

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
