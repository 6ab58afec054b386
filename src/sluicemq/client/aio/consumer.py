"""Consumers for applications: a stream to iterate over, and a handler that is called.

    async for message in mq.subscribe("flights", group="late", where="dep_delay > 60"):
        ...
        await message.ack()

Both share the group's `Member`. A message is acknowledged by `ack` (stream) or by the handler's
return (handler). `reject`, or a handler that raises, gives it back: the broker delivers it again
later, and in the end puts it to the group's dead letters. Leaving the loop or a crash leaves it
unacknowledged, and the lowest unacknowledged offset of each queue is what is committed.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Self

from sluicemq.client.aio.members import Memberships
from sluicemq.client.aio.readers import Readers
from sluicemq.client.aio.received import Feed, OrderedFeed, ReceivedMessage
from sluicemq.client.core.consuming import ConsumeOptions, local_retry_delay_s, make_subscription
from sluicemq.client.core.names import check_number
from sluicemq.client.tasks import (
    CloseOnce,
    EscapedError,
    Tasks,
    failure_of,
    run_application_code,
    run_on_thread,
    run_to_end,
)
from sluicemq.errors import ClosedError, ConfigurationError, RetryLaterError, SluiceError
from sluicemq.hints import with_hints
from sluicemq.model.subscription import Subscription
from sluicemq.model.trace_records import ConsumeOutcome

_log = logging.getLogger("sluicemq.client")
Handler = Callable[[Any], Awaitable[Any] | Any]
"""Gets a ReceivedMessage, or a list of them."""
BATCH_MAX: Final = 1024


@with_hints
class MessageStream:
    """The messages of one topic for one group; made by `Sluice.subscribe`.

    Iterate over it, or call `receive` from as many tasks as there are workers. Leaving the loop
    ends the subscription; so does leaving an `async with` block, or `close`. Fetching ahead is
    bounded: when `prefetch_count` messages or `prefetch_bytes` bytes of a queue are
    unacknowledged, that queue pauses.
    """

    def __init__(
        self,
        groups: Memberships,
        options: ConsumeOptions,
        group: str,
        subscription: Subscription,
    ) -> None:
        self.group = group
        self.subscription: Subscription = subscription
        self._groups = groups
        self._options = options
        self._feed: Feed | None = None
        self._readers: Readers | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Joins the group; iteration does it by itself. Safe to call twice.

        Raises SubscriptionConflictError, RouteNotFoundError, GroupNotFoundError, FilterSyntaxError,
        PermissionDeniedError, ConfigurationError, NameServerUnreachableError, ConnectionLostError.
        """
        async with self._starting:
            if self._feed is None:
                feed = (OrderedFeed if self._options.ordered else Feed)(is_shareable=True)
                member = await self._groups.join(self.group, self.subscription, feed, self._options)
                self._readers = member.readers
                self._feed = member.feeds.get(self.subscription.topic) or feed

    async def receive(self) -> ReceivedMessage:
        """The next message; waits for one. Raises what ended the subscription."""
        self._groups.enter()
        if self._feed is None:
            await self.start()
        assert self._feed is not None
        return await self._feed.get(self)

    async def receive_many(
        self, count_max: int = 100, timeout_s: float | None = None
    ) -> list[ReceivedMessage]:
        """Up to `count_max` messages: waits up to `timeout_s` (None: for ever) for the first, takes
        what else is there; [] when none came. Raises what ended the subscription."""
        check_number("count_max", count_max, 1)
        if timeout_s is not None:
            check_number("timeout_s", timeout_s, 0, whole=False)
        if self._feed is None:
            await self.start()
        try:
            async with asyncio.timeout(timeout_s):
                messages = [await self.receive()]
        except TimeoutError:
            return []
        if self._feed is not None:
            self._feed.fill(messages, count_max, self)
        return messages

    async def __aiter__(self) -> AsyncGenerator[ReceivedMessage, None]:
        try:
            while True:
                yield await self.receive()
        finally:
            await self.close()

    @property
    def undecodable(self) -> int:
        """How many messages had a body that could not be decoded since the group is read here."""
        return 0 if self._readers is None else self._readers.undecodable

    async def change(self, *, tags: str | None = None, where: str | None = None) -> None:
        """Other messages of the topic from now on: by tags, by SQL92 (`where`), or all.

        It holds for every stream of this client that reads the topic for this group, in all queues;
        what is waiting here and does not match counts as done. The other members of the group have
        to change as well: a group has one expression for a topic. Cancelling it does not leave it
        half done: it raises CancelledError when the change is complete.
        """
        if self._feed is None:
            await self.start()

        async def change() -> None:
            self.subscription = await self._groups.change(
                self.group, self.subscription.topic, tags=tags, where=where
            )

        await run_to_end(change())

    async def close(self) -> None:
        """Leaves; messages handed out and not acknowledged will be delivered again. Cancelling it
        does not keep it from leaving: it raises CancelledError afterwards."""
        if self._feed is not None:
            self._groups.enter()
        await run_to_end(self._close())

    async def _close(self) -> None:
        async with self._starting:
            feed, self._feed = self._feed, None
            if feed is None or self._readers is None:
                return
            feed.put_back(self._readers.out_of(self))
            feed.expel(self, ClosedError(f"the subscription of {self.group!r} is closed."))
            await self._groups.leave(self.group, self.subscription.topic)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = "not running" if self._feed is None else f"{len(self._feed)} wait"
        return f"<MessageStream of {self.group}: {self.subscription!r}, {state}>"


@with_hints
class PushConsumer:
    """Calls a handler for each message, up to `concurrency` at a time; made by `Sluice.consumer`.

    The handler may be a coroutine function (runs on the loop) or a plain function (runs on a thread
    of its own pool, so that it may block). Its return acknowledges. When it raises, the message is
    rejected (`ReceivedMessage.reject`); RetryLaterError says when it shall come again. Should the
    message be stored nowhere for that, it is handled again here after 1 s, 2 s … 60 s, and stays
    unacknowledged meanwhile.

    Everything that a handler raises counts, also what is no Exception: a CancelledError of
    something that the handler awaits, GeneratorExit, StopIteration. Only closing the consumer
    cancels a handler. KeyboardInterrupt and SystemExit end the program where Python lets them (a
    coroutine function on the main thread), and its message comes again to another member; raised on
    a thread they are failures like any other. A worker that ends unexpectedly is logged and started
    again; `live_workers` says how many run.

    With `batch_max` the handler gets a list of up to so many messages of one queue. Its return
    acknowledges all of them, an error rejects all of them; RetryLaterError(done=n) keeps the first
    n. Of a broadcasting group what is rejected is logged and dropped.
    """

    def __init__(
        self,
        groups: Memberships,
        options: ConsumeOptions,
        group: str,
        handler: Handler,
        *,
        concurrency: int = 20,
        version_ms: Callable[[], int] = lambda: 0,
        batch_max: int | None = None,
    ) -> None:
        """`batch_max` None: the handler gets single messages."""
        if not callable(handler):
            raise ConfigurationError(
                f"the handler is {handler!r:.60}.", fix="Give a function of the message."
            )
        check_number("concurrency", concurrency, 1)
        if batch_max is not None:
            check_number("batch_max", batch_max, 1, BATCH_MAX)
        self.batch_max = batch_max
        self.group = group
        self._groups = groups
        self._options = options
        self._handler = handler

        self._is_blocking = not inspect.iscoroutinefunction(handler)
        self._call: Callable[[Any], Awaitable[Any]] = handler
        if self._is_blocking:
            self._call = lambda given: run_on_thread(self._pool, handler, given)
        self.concurrency = self._concurrency = concurrency
        self._version_ms = version_ms
        self._subscriptions: dict[str, Subscription] = {}
        self._feed = OrderedFeed() if options.ordered else Feed()
        self._tasks = Tasks()
        self._pool: ThreadPoolExecutor | None = None
        self._busy = 0
        self._busy_closing = 0
        """Handlers that wait for `close`, which does not wait for them."""
        self._quiet = asyncio.Event()
        self._starting = asyncio.Lock()
        self.closing: CloseOnce[None] = CloseOnce()
        self._joined: list[str] = []
        """The topics for which this consumer is in its group."""
        self._started = False
        self.failure: BaseException | None = None

    def subscribe(self, topic: str, *, tags: str | None = None, where: str | None = None) -> Self:
        """Adds a topic before `start`; by tags ("A||B"), by SQL92 (`where`), or all."""
        if self._started:
            raise ConfigurationError(
                "the consumer runs already.",
                fix="Subscribe to all topics before start(); then use `change`.",
            )
        self._subscriptions[topic] = make_subscription(
            topic, tags=tags, where=where, version=self._version_ms()
        )
        return self

    async def start(self) -> None:
        """Joins the group and begins to call the handler. Raises what `MessageStream.start`
        does."""
        if self._started or not self._subscriptions:
            raise ConfigurationError(
                "the consumer runs already, or has no topic.", fix="Subscribe, then start once."
            )
        self._started = True
        async with self._starting:
            try:
                for subscription in tuple(self._subscriptions.values()):
                    await self._join(subscription)
            except BaseException:
                await run_to_end(self._leave_all())
                self._started = False
                raise
            if self._is_blocking:
                self._pool = ThreadPoolExecutor(self._concurrency, f"sluicemq {self.group}")
            for index in range(self._concurrency):
                self._tasks.supervise(self._work, f"sluicemq handler {self.group} {index}")

    async def _join(self, subscription: Subscription) -> None:
        await self._groups.join(self.group, subscription, self._feed, self._options)
        self._joined.append(subscription.topic)

    async def _leave_all(self) -> None:
        while self._joined:
            await self._groups.leave(self.group, self._joined.pop())

    async def change(
        self, topic: str, *, tags: str | None = None, where: str | None = None
    ) -> None:
        """Another expression for a topic, or one more topic, while the consumer runs.

        It holds in all queues when this returns: the brokers know, and what waits here and does not
        match counts as done. The other members of the group have to change as well. Raises what
        `start` does; then nothing has changed. Cancelling a change of expression does not leave it
        half done: it raises CancelledError when the change is complete.
        """
        if topic in self._subscriptions and self._started:

            async def change() -> None:
                changed = await self._groups.change(self.group, topic, tags=tags, where=where)
                self._subscriptions[topic] = changed

            await run_to_end(change())
            return
        wanted = make_subscription(topic, tags=tags, where=where, version=self._version_ms())
        if self._started:
            await self._join(wanted)
        self._subscriptions[topic] = wanted

    async def unsubscribe(self, topic: str) -> None:
        """Reads a topic no more; its queues go to the other members."""
        self._subscriptions.pop(topic, None)
        if topic in self._joined:
            self._joined.remove(topic)
            await self._groups.leave(self.group, topic)

    async def run(self) -> None:
        """`start`, then waits until the consumer is closed or fails; raises what ended it. It has
        left its group when this returns or raises. Cancelling it calls `close`, which waits for
        handlers that run; cancelling it once more ends that waiting."""
        await self.start()
        try:
            await self._tasks.wait()
        finally:
            await self.close()
        if self.failure is not None:
            raise self.failure

    async def _work(self) -> None:
        while True:
            try:
                message = await self._feed.get()
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001 - whatever ended the feed ends the consumer
                self._fail(error)
                return
            if self._is_closed:  # what waited is discarded: this one would overtake it
                return
            messages = [message]
            if self.batch_max is not None:
                messages = self._feed.more(message, self.batch_max)
            current = [one for one in messages if one.is_current]
            if len(current) < len(messages):
                for message in messages:
                    if not message.is_current:
                        message.settle()
            if current:
                await self._handle(current)

    def _fail(self, error: Exception) -> None:
        if self.failure is None:  # the first worker that hears of it
            _log.error("consumer %s ends: %s", self.group, error)
        self.failure = error

    async def _handle(self, messages: list[ReceivedMessage]) -> None:
        """Call the handler, and acknowledge or reject. HOT: `run_application_code`, without a
        coroutine of its own."""
        task = asyncio.current_task()
        before = 0 if task is None else task.cancelling()
        self._busy += 1
        try:
            await self._call(messages if self.batch_max is not None else messages[0])
        except BaseException as error:
            failure = failure_of(error, task, before)
            if failure is not None:
                await self._failed(messages, failure)
                return
            # Closing cancels a handler, and its message comes again to another member. Else the
            # task was cancelled from outside: it has to end, and its owner starts it again.
            if isinstance(error, asyncio.CancelledError) and not self._tasks.is_closing:
                await self._failed(messages, EscapedError(error))
            raise
        else:
            messages[0].origin.done(messages)
        finally:
            self._busy -= 1
            self._look_whether_quiet()

    def _look_whether_quiet(self) -> None:
        if self._busy <= self._busy_closing:
            self._quiet.set()

    async def _failed(self, messages: list[ReceivedMessage], error: Exception) -> None:
        """Give the messages back: they come again by way of the broker, or else here."""
        level, suspend_s, done = None, None, 0
        if isinstance(error, RetryLaterError):
            level, suspend_s, done = error.delay_level, error.suspend_s, max(0, error.done)
        else:
            self._log_failure(messages, error.error if isinstance(error, EscapedError) else error)
        for message in messages[:done]:
            message.settle()
        outcome = (
            ConsumeOutcome.FAILED
            if isinstance(error, RetryLaterError)
            else ConsumeOutcome.EXCEPTION
        )
        for message in messages[done:]:
            message.finished(outcome)
        for message in messages[done:]:
            try:
                await message.reject(level, suspend_s=suspend_s)
            except SluiceError as failure:
                delay_s = local_retry_delay_s(message.attempt)
                self._groups.directory.log_failure(
                    failure, message.queue, f"sending back for {self.group}",
                    "group %s: %s could not be sent back, it is handled again here in %g s: %s",
                    self.group, message, delay_s, failure,
                )  # fmt: skip
                message.attempt += 1
                self._feed.suspend(message, delay_s)

    def _log_failure(self, messages: list[ReceivedMessage], error: BaseException) -> None:
        message = messages[0]
        # One that fails for ever in its queue's order does so each second: 1, 2, 4, 8 … whole.
        is_whole = not message.attempt & (message.attempt - 1)
        _log.warning(
            "handler of %s failed on %s%s (retry %d, attempt %d): %s: %s",
            self.group, message, f" and {len(messages) - 1} more" if messages[1:] else "",
            message.reconsume_times, message.attempt, type(error).__name__, error,
            exc_info=error if is_whole else None,
        )  # fmt: skip

    def __repr__(self) -> str:
        state = "not running"
        if self.is_running:
            state = f"{self._busy} of {self.concurrency} busy"
            if self.live_workers < self.concurrency:
                state += f", {self.live_workers} workers alive"
        topics = ", ".join(self._subscriptions) or "-"
        return f"<PushConsumer of {self.group}: {topics}, {state}>"

    @property
    def undecodable(self) -> int:
        """How many messages had a body that could not be decoded since the group is read here."""
        member = self._groups.get(self.group)
        return 0 if member is None else member.readers.undecodable

    @property
    def is_ordered(self) -> bool:
        """Whether it consumes one message of a queue at a time."""
        return self._options.ordered

    @property
    def is_running(self) -> bool:
        """Whether it is started and not closed."""
        return self._started and not self._is_closed

    @property
    def live_workers(self) -> int:
        """The number of workers that run: `concurrency` while the consumer runs. Fewer for a moment
        after a worker ended unexpectedly, which is logged; 0 before start and after close."""
        return self._tasks.running_count

    @property
    def _is_closed(self) -> bool:
        return self.closing.has_started

    async def call_handler(self, message: ReceivedMessage) -> None:
        """Call the handler with a message that an operator has chosen (309). Raises what the
        handler raises, as an Exception."""
        await run_application_code(self._call(message if self.batch_max is None else [message]))

    async def close(self, timeout_s: float = 30.0) -> None:
        """Takes no new messages, waits up to `timeout_s` for running handlers, commits, leaves.

        Cancelling it ends the waiting for handlers: they are cancelled, and it raises
        CancelledError when the group is left. A second call waits for the first one.
        """
        if not self._started:
            return
        self._groups.enter()
        is_own = asyncio.current_task() in self._tasks  # A handler would wait for itself.
        self._busy_closing += is_own
        self._look_whether_quiet()
        try:
            await self.closing.run(lambda: self._close(timeout_s))
        finally:
            self._busy_closing -= is_own

    async def _close(self, timeout_s: float) -> None:
        self._feed.discard(lambda _: True)
        self._feed.fail(ClosedError("this consumer is closed."))
        async with self._starting:  # A start that runs would enter the group after we left it.
            pass
        if self._busy > self._busy_closing:
            self._quiet.clear()
            if not await self.closing.wait_unless_hurried(self._quiet, timeout_s):
                _log.warning(
                    "consumer %s closes while %d handlers run; their messages come again",
                    self.group,
                    self._busy,
                )
        await self._tasks.close()
        if self._pool is None:  # no handler runs any more: its message is free
            self._feed.expel(None, ClosedError("this consumer is closed."))
        await self._leave_all()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
