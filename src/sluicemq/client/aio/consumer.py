"""The asyncio consumers that receive messages continuously: a stream, and one with a handler.

    async for message in mq.subscribe("flights", group="late", where="dep_delay > 60"):
        ...
        await message.ack()

Both use the `Member` of their group, which they share with the group's other consumers of the same
client. A stream acknowledges a message by `message.ack()`, a handler by returning.
`message.reject()`, or a handler that raises, makes the broker deliver the message again later, and
store it as a dead letter after the maximum number of retries. A message that was neither
acknowledged nor rejected when its consumer ends, or its process crashes, is delivered again: only
the lowest unacknowledged offset of each queue is committed.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Self

from sluicemq.client.aio.memberships import Memberships
from sluicemq.client.aio.prefetch import OrderedPrefetchBuffer, PrefetchBuffer
from sluicemq.client.aio.readers import Readers
from sluicemq.client.aio.received import ReceivedMessage
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
"""A function of a `ReceivedMessage`, or of a list of them, that a `PushConsumer` calls.

It may be a coroutine function or a plain function. Its result is ignored.
"""
BATCH_MAX: Final = 1024
"""The highest `batch_max`: the number of messages that a handler can receive in one call."""


@with_hints
class MessageStream:
    """The messages of one topic for one consumer group. `Sluice.subscribe` creates it.

    Iterate over it, or call `receive` from as many tasks as there are workers. Ending the loop ends
    the subscription, and so do leaving an `async with` block and `close`.

        async with mq.subscribe("orders", group="billing") as stream:
            while messages := await stream.receive_many(100, timeout_s=5):
                await store(messages)
                for message in messages:
                    await message.ack()

    The client fetches messages in advance. It stops fetching from a queue while `prefetch_count`
    messages, or `prefetch_bytes` bytes, of that queue are unacknowledged.
    """

    def __init__(
        self,
        memberships: Memberships,
        options: ConsumeOptions,
        group: str,
        subscription: Subscription,
    ) -> None:
        """Create a stream. Applications call `Sluice.subscribe` instead.

        `memberships` are the groups of the client, through which `start` joins `group`. `options`
        are the settings of the subscription. `subscription` is the topic with its filter.
        """
        self.group = group
        """The consumer group."""
        self.subscription: Subscription = subscription
        """The topic and its filter."""
        self._memberships = memberships
        self._options = options
        self._buffer: PrefetchBuffer | None = None
        self._readers: Readers | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Join the group and begin to fetch messages. Safe to call twice.

        The first `receive` does this by itself; call `start` to get its errors early. It returns
        when the client has its first share of the queues. It raises:

        - RouteNotFoundError if the topic does not exist, and GroupNotFoundError if the group does
          not exist and brokers do not create it.
        - SubscriptionConflictError if another client of this process reads the topic for this group
          with a different filter, and the brokers do not support lanes.
        - FilterSyntaxError if a broker does not accept the SQL92 filter.
        - PermissionDeniedError if access control refuses the topic or the group, or if the group is
          strict and requires another filter.
        - ConfigurationError if the group is used by another kind of consumer of this client, or the
          broker does not support SQL92 filters.
        - NameServerUnreachableError and ConnectionLostError if no name server, or no broker of the
          topic, can be reached.
        - ClosedError if the client is closed.
        """
        async with self._starting:
            if self._buffer is None:
                buffer_class = OrderedPrefetchBuffer if self._options.ordered else PrefetchBuffer
                buffer = buffer_class(is_shareable=True)
                member = await self._memberships.join(
                    self.group, self.subscription, buffer, self._options
                )
                self._readers = member.readers
                # Streams of the same topic share the buffer of the first one.
                self._buffer = member.buffers.get(self.subscription.topic) or buffer

    async def receive(self) -> ReceivedMessage:
        """Wait for the next message and return it.

        Acknowledge it with `await message.ack()`. May be called from several tasks; each message
        goes to one of them.

        Raises what `start` raises if the stream was not started, ClosedError if the stream is
        closed meanwhile, UndecodableBodyError with `on_undecodable="raise"`, and the error that
        ended the subscription: GroupNotFoundError, PermissionDeniedError, another RequestError if
        the broker cannot parse the filter, or ProtocolError.
        """
        self._memberships.check_loop()
        if self._buffer is None:
            await self.start()
        assert self._buffer is not None
        return await self._buffer.get(self)

    async def receive_many(
        self, count_max: int = 100, timeout_s: float | None = None
    ) -> list[ReceivedMessage]:
        """Wait for messages, and return a list of 1 to `count_max` of them, or [] after a time-out.

        The first message is awaited for up to `timeout_s` seconds; None means without limit.
        Further messages are added only if they have been fetched already. Raises ConfigurationError
        if an argument is invalid, and what `receive` raises.
        """
        check_number("count_max", count_max, 1)
        if timeout_s is not None:
            check_number("timeout_s", timeout_s, 0, whole=False)
        if self._buffer is None:
            await self.start()
        try:
            async with asyncio.timeout(timeout_s):
                messages = [await self.receive()]
        except TimeoutError:
            return []
        if self._buffer is not None:
            self._buffer.fill(messages, count_max, self)
        return messages

    async def __aiter__(self) -> AsyncGenerator[ReceivedMessage, None]:
        """Yield messages until the loop is left, then close the stream.

        Raises what `receive` raises.
        """
        try:
            while True:
                yield await self.receive()
        finally:
            await self.close()

    @property
    def undecodable_count(self) -> int:
        """The number of messages with an undecodable body since this client joined the group."""
        return 0 if self._readers is None else self._readers.undecodable_count

    async def change(self, *, tags: str | None = None, where: str | None = None) -> None:
        """Change the filter of the topic: to tags, to an SQL92 expression (`where`), or to none.

        When this returns, the brokers know the new filter, and it applies in all queues and to all
        streams of this client that read the topic for the group. A message that was fetched before
        and does not match it counts as acknowledged, if it cannot be fetched again. The other
        members of the group must change as well, because a group has one filter for a topic.

        Raises what `start` raises; then nothing has changed. If the caller is cancelled, the change
        is completed before CancelledError is raised.
        """
        if self._buffer is None:
            await self.start()

        async def change_at_brokers() -> None:
            self.subscription = await self._memberships.change_subscription(
                self.group, self.subscription.topic, tags=tags, where=where
            )

        await run_to_end(change_at_brokers())

    async def close(self) -> None:
        """Leave the group. Messages that were received and not acknowledged are delivered again.

        Safe to call twice. If the caller is cancelled, the group is left before CancelledError is
        raised. Raises ConfigurationError in another event loop or process.
        """
        if self._buffer is not None:
            self._memberships.check_loop()
        await run_to_end(self._close())

    async def _close(self) -> None:
        """Leave the group, and return the unacknowledged messages of this stream to the buffer.

        Calls of `receive` that wait raise ClosedError. Other streams of the client may get the
        returned messages. Does nothing if the stream was not started.
        """
        async with self._starting:
            buffer = self._buffer
            self._buffer = None
            if buffer is None or self._readers is None:
                return
            buffer.put_back(self._readers.messages_handed_to(self))
            buffer.fail_waiters_of(
                self, ClosedError(f"the subscription of {self.group!r} is closed.")
            )
            await self._memberships.leave(self.group, self.subscription.topic)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = "not running" if self._buffer is None else f"{len(self._buffer)} prefetched"
        return f"<MessageStream of {self.group}: {self.subscription!r}, {state}>"


@with_hints
class PushConsumer:
    """Calls a handler for each message. `Sluice.consumer` creates it.

    Subscribe it to topics, then `await consumer.run()`, or use it as an async context manager. Up
    to `concurrency` handlers run at the same time. A coroutine function runs on the event loop; a
    plain function runs on a thread of the consumer's own pool, so it may block.

    When the handler returns, the message is acknowledged. When it raises, the message is rejected
    (see `ReceivedMessage.reject`), so it is delivered again later. A handler that raises
    RetryLaterError chooses the delay. If no broker can store the rejected message, it stays
    unacknowledged, and this consumer calls the handler with it again after 1 s, 2 s, 4 s … 60 s.

    With `batch_max`, the handler is called with a list of messages of one queue. Returning
    acknowledges all of them, and raising rejects all of them; `RetryLaterError(done=n)`
    acknowledges the first n. A broadcasting group has no retries: a rejected message is logged and
    dropped, unless the group is ordered.

    Any exception of a handler rejects its message, even one that is not an Exception: a
    CancelledError of something that the handler awaits, GeneratorExit, StopIteration. Only closing
    the consumer cancels a handler. KeyboardInterrupt and SystemExit end the program if a coroutine
    function raises them on the main thread, and the message is delivered again to another member;
    raised on another thread, they reject the message like other exceptions. A worker task that ends
    unexpectedly is logged and started again (`live_workers`).
    """

    def __init__(
        self,
        memberships: Memberships,
        options: ConsumeOptions,
        group: str,
        handler: Handler,
        *,
        concurrency: int = 20,
        version_ms: Callable[[], int] = lambda: 0,
        batch_max: int | None = None,
    ) -> None:
        """Create a consumer. Applications call `Sluice.consumer` instead.

        - `memberships`: the groups of the client, through which `start` joins `group`.
        - `options`: how the group consumes: in order, broadcasting, its retries and prefetch.
        - `handler`: the function that is called with each message, or with a list of messages if
          `batch_max` is given. It may be a coroutine function.
        - `concurrency`: how many calls of the handler run at the same time, at least 1.
        - `version_ms`: returns the version of a new subscription, the current time in milliseconds.
        - `batch_max`: the maximum length of that list, 1 to 1,024. None means single messages.

        Raises ConfigurationError if `handler` is not callable or a number is out of its range.
        """
        if not callable(handler):
            raise ConfigurationError(
                f"handler must be a function, got {handler!r:.60}.",
                fix="Pass a function of one argument, the message.",
            )
        check_number("concurrency", concurrency, 1)
        if batch_max is not None:
            check_number("batch_max", batch_max, 1, BATCH_MAX)
        self.batch_max = batch_max
        """The maximum number of messages in a call of the handler, None for single messages."""
        self.group = group
        """The consumer group."""
        self._memberships = memberships
        self._options = options
        self._handler = handler

        self._is_blocking = not inspect.iscoroutinefunction(handler)
        self._call: Callable[[Any], Awaitable[Any]] = handler
        if self._is_blocking:
            # The pool is looked up in each call, because `start` creates it.
            self._call = lambda argument: run_on_thread(self._thread_pool, handler, argument)
        self.concurrency = self._concurrency = concurrency
        """How many handlers run at the same time."""
        self._version_ms = version_ms
        self._subscriptions: dict[str, Subscription] = {}
        self._buffer = OrderedPrefetchBuffer() if options.ordered else PrefetchBuffer()
        self._tasks = Tasks()
        self._thread_pool: ThreadPoolExecutor | None = None
        self._busy = 0
        """The number of handlers that run now."""
        self._busy_closing = 0
        """The number of running handlers that wait for `close`; `close` does not wait for them."""
        self._idle = asyncio.Event()
        """Set when no handler runs, apart from those that wait for `close`."""
        self._starting = asyncio.Lock()
        self.closing: CloseOnce[None] = CloseOnce()
        """Runs the actual close once. `Sluice.close` hurries it when its caller is cancelled."""
        self._joined_topics: list[str] = []
        """The topics for which this consumer has joined its group."""
        self._started = False
        self.failure: BaseException | None = None
        """The error that ended the consumer, None if there was none."""

    def subscribe(self, topic: str, *, tags: str | None = None, where: str | None = None) -> Self:
        """Add a topic before the consumer is started, and return the consumer.

        `tags` ("A||B") or `where` (SQL92) selects messages; without both, all messages match. May
        be called for several topics; a second call for a topic replaces its filter.

        Raises FilterSyntaxError if the filter does not compile, and ConfigurationError if an
        argument is invalid or the consumer was started.
        """
        if self._started:
            raise ConfigurationError(
                "the consumer was started already.",
                fix="Subscribe to all topics before start(). Afterwards, add them with `change`.",
            )
        self._subscriptions[topic] = make_subscription(
            topic, tags=tags, where=where, version=self._version_ms()
        )
        return self

    async def start(self) -> None:
        """Join the group for all topics and begin to call the handler in `concurrency` tasks.

        If joining for one topic fails, leave the group again. Raises ConfigurationError if the
        consumer was started before or has no topic, and what `MessageStream.start` raises.
        """
        if self._started or not self._subscriptions:
            raise ConfigurationError(
                "the consumer was started already, or has no topic.",
                fix="Subscribe to a topic, then start the consumer once.",
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
                self._thread_pool = ThreadPoolExecutor(self._concurrency, f"sluicemq {self.group}")
            for index in range(self._concurrency):
                self._tasks.supervise(self._work, f"sluicemq handler {self.group} {index}")

    async def _join(self, subscription: Subscription) -> None:
        """Join the group for one topic, and remember the topic for `_leave_all`."""
        await self._memberships.join(self.group, subscription, self._buffer, self._options)
        self._joined_topics.append(subscription.topic)

    async def _leave_all(self) -> None:
        """Leave the group for all topics."""
        while self._joined_topics:
            await self._memberships.leave(self.group, self._joined_topics.pop())

    async def change(
        self, topic: str, *, tags: str | None = None, where: str | None = None
    ) -> None:
        """Change the filter of a topic, or add a topic, while the consumer runs.

        `tags` ("A||B") or `where` (SQL92) is the filter; without both, all messages match. When
        this returns, the brokers know it, and it applies in all queues. A message that was fetched
        before and does not match it counts as acknowledged, if it cannot be fetched again. The
        other members of the group must change as well, because a group has one filter for a topic.

        Raises what `start` raises; then nothing has changed. If the caller is cancelled, the change
        of a filter is completed before CancelledError is raised.
        """
        if topic in self._subscriptions and self._started:

            async def change_at_brokers() -> None:
                changed_subscription = await self._memberships.change_subscription(
                    self.group, topic, tags=tags, where=where
                )
                self._subscriptions[topic] = changed_subscription

            await run_to_end(change_at_brokers())
            return
        subscription = make_subscription(topic, tags=tags, where=where, version=self._version_ms())
        if self._started:
            await self._join(subscription)
        self._subscriptions[topic] = subscription

    async def unsubscribe(self, topic: str) -> None:
        """Stop consuming a topic, so that other members of the group read its queues.

        Does nothing for a topic that is not subscribed to.
        """
        self._subscriptions.pop(topic, None)
        if topic in self._joined_topics:
            self._joined_topics.remove(topic)
            await self._memberships.leave(self.group, topic)

    async def run(self) -> None:
        """Start the consumer, wait until it is closed or fails, and leave the group.

        Raises what `start` raises, and the error that ended the consumer, such as
        GroupNotFoundError or UndecodableBodyError. If the caller is cancelled, `close` is called,
        which waits for running handlers; a second cancellation ends that wait.
        """
        await self.start()
        try:
            await self._tasks.wait()
        finally:
            await self.close()
        if self.failure is not None:
            raise self.failure

    async def _work(self) -> None:
        """Take messages from the buffer and call the handler, until the consumer is closed.

        This is one of the consumer's worker tasks. Messages that the consumer must not process any
        more, for example because another member reads their queue now, are dropped without a call.
        An error of the buffer ends the consumer and becomes its `failure`.
        """
        while True:
            try:
                message = await self._buffer.get()
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001 - an error of the buffer ends the consumer
                self._fail(error)
                return
            if self._is_closed:  # The buffer was discarded, so this message would be out of order.
                return
            messages = [message]
            if self.batch_max is not None:
                messages = self._buffer.take_batch(message, self.batch_max)
            current_messages = [message for message in messages if message.is_current]
            if len(current_messages) < len(messages):
                for message in messages:
                    if not message.is_current:
                        message.ack_nowait()
            if current_messages:
                await self._handle(current_messages)

    def _fail(self, error: Exception) -> None:
        """Record the error that ends the consumer, and log it once."""
        if self.failure is None:  # log it for the first worker only
            _log.error("the consumer of group %s stops: %s", self.group, error)
        self.failure = error

    async def _handle(self, messages: list[ReceivedMessage]) -> None:
        """Call the handler with `messages`, and acknowledge or reject them afterwards. HOT.

        They are acknowledged if the handler returns, and rejected if it raises. If `close` cancels
        the handler, neither happens, so that they are delivered again.
        """
        # This does what `run_application_code` does, without the cost of another coroutine.
        task = asyncio.current_task()
        # The count tells a cancellation from outside from a CancelledError of the handler's own.
        cancellations_before = 0 if task is None else task.cancelling()
        self._busy += 1
        try:
            await self._call(messages if self.batch_max is not None else messages[0])
        except BaseException as error:
            failure = failure_of(error, task, cancellations_before)
            if failure is not None:
                await self._reject_failed(messages, failure)
                return
            # Closing the consumer cancels its handlers; their messages are delivered again. Any
            # other cancellation comes from outside: the task ends, and `_tasks` starts it again.
            if isinstance(error, asyncio.CancelledError) and not self._tasks.is_closing:
                await self._reject_failed(messages, EscapedError(error))
            raise
        else:
            messages[0].origin.ack_many(messages)
        finally:
            self._busy -= 1
            self._update_idle()

    def _update_idle(self) -> None:
        """Set `_idle` if no handler runs that `close` has to wait for."""
        if self._busy <= self._busy_closing:
            self._idle.set()

    async def _reject_failed(self, messages: list[ReceivedMessage], error: Exception) -> None:
        """Reject messages whose handler raised `error`, and record that in their traces.

        A RetryLaterError sets the delay of the retries. Its attribute `done` may say that the first
        messages were processed; these are acknowledged. Any other error is logged. If no broker can
        store a message for a retry, the message goes back to this consumer's buffer.
        """
        delay_level = None
        suspend_s = None
        processed_count = 0
        outcome = ConsumeOutcome.EXCEPTION
        if isinstance(error, RetryLaterError):
            delay_level = error.delay_level
            suspend_s = error.suspend_s
            processed_count = max(0, error.done)
            outcome = ConsumeOutcome.FAILED
        else:
            raised_error = error.error if isinstance(error, EscapedError) else error
            self._log_failure(messages, raised_error)

        for message in messages[:processed_count]:
            message.ack_nowait()
        rejected_messages = messages[processed_count:]
        # Before the rejections, which wait for a broker: the handler has ended now.
        for message in rejected_messages:
            message.record_outcome(outcome)
        for message in rejected_messages:
            try:
                await message.reject(delay_level, suspend_s=suspend_s)
            except SluiceError as failure:
                self._retry_locally(message, failure)

    def _retry_locally(self, message: ReceivedMessage, failure: SluiceError) -> None:
        """Put a message back into the buffer, because no broker could store it for a retry.

        The handler is called again after a delay that grows with the attempts. `failure`, the
        reason, is logged.
        """
        delay_s = local_retry_delay_s(message.attempt)
        self._memberships.directory.log_failure(
            failure,
            message.queue,
            f"sending back for {self.group}",
            "group %s: %s could not be sent back; its handler is called again in %g s: %s",
            self.group,
            message,
            delay_s,
            failure,
        )
        message.attempt += 1
        self._buffer.put_back_later(message, delay_s)

    def _log_failure(self, messages: list[ReceivedMessage], error: BaseException) -> None:
        """Log that a handler raised `error`, with the traceback at attempt 1, 2, 4, 8 and so on.

        An ordered group tries a failing message again every second, so tracebacks of all attempts
        would fill the log.
        """
        message = messages[0]
        has_traceback = not message.attempt & (message.attempt - 1)  # a power of two
        _log.warning(
            "handler of group %s failed on %s%s (failure %d): %s: %s",
            self.group,
            message,
            f" and {len(messages) - 1} more" if messages[1:] else "",
            message.reconsume_times + 1,
            type(error).__name__,
            error,
            exc_info=error if has_traceback else None,
        )

    def __repr__(self) -> str:
        state = "not running"
        if self.is_running:
            state = f"{self._busy} of {self.concurrency} busy"
            if self.live_workers < self.concurrency:
                state += f", {self.live_workers} workers alive"
        topics = ", ".join(self._subscriptions) or "-"
        return f"<PushConsumer of {self.group}: {topics}, {state}>"

    @property
    def undecodable_count(self) -> int:
        """The number of messages with an undecodable body since this client joined the group."""
        member = self._memberships.get(self.group)
        return 0 if member is None else member.readers.undecodable_count

    @property
    def is_ordered(self) -> bool:
        """Whether it processes one message of a queue at a time."""
        return self._options.ordered

    @property
    def is_running(self) -> bool:
        """Whether it was started and not closed."""
        return self._started and not self._is_closed

    @property
    def live_workers(self) -> int:
        """The number of worker tasks that run.

        It is `concurrency` while the consumer runs, and smaller for a moment after a worker ended
        unexpectedly. Before the start and after `close` it is 0.
        """
        return self._tasks.running_count

    @property
    def _is_closed(self) -> bool:
        """Whether `close` was called."""
        return self.closing.has_started

    async def call_handler(self, message: ReceivedMessage) -> None:
        """Call the handler with a message that an operator has chosen.

        A broker asks for that with CONSUME_MESSAGE_DIRECTLY (309). Raises what the handler raises,
        as an Exception.
        """
        await run_application_code(self._call(message if self.batch_max is None else [message]))

    async def close(self, timeout_s: float = 30.0) -> None:
        """Stop taking messages, wait for running handlers, commit the offsets and leave the group.

        Handlers have `timeout_s` seconds (30) to end. Then coroutines are cancelled, and messages
        of unfinished handlers are delivered again. If a handler calls `close`, this does not wait
        for that handler. A second call waits for the first one.

        If the caller is cancelled, handlers are cancelled at once, and CancelledError is raised
        when the consumer has left the group. Raises ConfigurationError in another event loop or
        process.
        """
        if not self._started:
            return
        self._memberships.check_loop()
        # A handler must not wait for itself.
        is_called_by_handler = asyncio.current_task() in self._tasks
        self._busy_closing += is_called_by_handler
        self._update_idle()
        try:
            await self.closing.run(lambda: self._close(timeout_s))
        finally:
            self._busy_closing -= is_called_by_handler

    async def _close(self, timeout_s: float) -> None:
        """Do the work of `close`, which calls this once.

        Handlers have `timeout_s` seconds to end, or less if a cancellation of `close` hurries
        `closing`.
        """
        self._buffer.discard(lambda _: True)
        self._buffer.fail(ClosedError("this consumer is closed."))
        async with self._starting:  # A running start() would join the group after it was left.
            pass
        if self._busy > self._busy_closing:
            self._idle.clear()
            if not await self.closing.wait_unless_hurried(self._idle, timeout_s):
                _log.warning(
                    "the consumer of group %s closes while %d handlers run; their messages are "
                    "delivered again",
                    self.group,
                    self._busy,
                )
        await self._tasks.close()
        if self._thread_pool is None:  # No handler runs, so its message may be handed out again.
            self._buffer.fail_waiters_of(None, ClosedError("this consumer is closed."))
        await self._leave_all()
        if self._thread_pool is not None:
            self._thread_pool.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
