"""The asyncio producer.

Every `await send()` is independent: ten thousand of them may wait at once, they share one
connection a broker, and the frames of one loop turn leave in one write. What decides (checks, queue
choice, retries, deadline, the words of an error) is `core.sending`; here is only the waiting.
"""

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Concatenate, Final, ParamSpec, Protocol, Self, TypeVar, Unpack

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.messages import (
    COMPRESS_FROM_BYTES,
    DELAY_LEVEL_MAX,
    Body,
    MessageOptions,
    OutgoingMessage,
    expect_one_message,
    make_draft,
    make_message,
)
from sluicemq.client.core.names import check_number
from sluicemq.client.core.replies import (
    REPLY_TIMEOUT_S,
    ReplyFuture,
    make_request_message,
    reply_timeout_error,
)
from sluicemq.client.core.requests import SendResult
from sluicemq.client.core.sending import (
    DEFAULT_PRODUCER_GROUP,
    RETRIES,
    SEND_TIMEOUT_MS,
    Sender,
    check_destination,
)
from sluicemq.client.core.tracing import INNER_GROUP, LINGER_S, RECORDS_MAX, Tracing
from sluicemq.client.core.transactions import (
    TransactionBlock,
    TransactionListener,
    TransactionResult,
    Transactions,
)
from sluicemq.client.heartbeat_thread import HeartbeatThread, make_unique_ids
from sluicemq.client.tasks import CloseOnce, Tasks, call_listener
from sluicemq.errors import ConfigurationError, SendUnknownError, SluiceError
from sluicemq.hints import improve_type_error, with_hints
from sluicemq.model.message import Message, StoredMessage
from sluicemq.model.topic import DEFAULT_TOPIC, MessageQueue

_log = logging.getLogger("sluicemq.client")

P = ParamSpec("P")
T = TypeVar("T")
OnDone = Callable[[SendResult | None, SluiceError | None], None]
TRACE_CLOSE_S: Final = 3.0
TRACE_PAUSE_S: Final = 5.0


@dataclass(frozen=True, slots=True, repr=False)
class CloseReport:
    """What `close` found: sends that were settled while it waited, and ids of messages of which
    nobody knows whether they are stored."""

    settled: int
    unknown: tuple[str, ...]

    def __repr__(self) -> str:
        ids = ", ".join(self.unknown[:5]) + (" …" if len(self.unknown) > 5 else "")
        count = f"{len(self.unknown)} unknown{': ' if ids else ''}"
        return f"<CloseReport: {self.settled} settled, {count}{ids}>"


class Sends(Protocol):
    """Who has methods that are talks of a `Sender`: a `Producer`, a `Sluice`."""

    cluster: Cluster

    @property
    def sender(self) -> Sender: ...


def of_sender(
    talk: Callable[Concatenate[Sender, P], Conversation[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """A talk of the core as a method, with its parameters and docstring."""

    @functools.wraps(talk)
    def call(self: Sends, /, *arguments: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T]:
        try:
            begun = talk(self.sender, *arguments, **named)
        except TypeError as error:
            improve_type_error(error, call, named)
            raise
        return self.cluster.run(begun)

    return call


@with_hints
class Producer:
    """Sends messages of one producer group.

    Errors of every send: ConfigurationError (the message breaks a rule, nothing was sent),
    RouteNotFoundError, NameServerUnreachableError, RequestError (the broker refused it), SendError
    (not stored) and its child SendUnknownError (it may be stored; never resent by itself).
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        group: str = DEFAULT_PRODUCER_GROUP,
        timeout_ms: int = SEND_TIMEOUT_MS,
        retries: int = RETRIES,
        retries_async: int = 0,
        retry_unsafe: bool = False,
        compress_from_bytes: int = COMPRESS_FROM_BYTES,
        delay_level_max: int = DELAY_LEVEL_MAX,
        listener: TransactionListener | None = None,
        on_first: Callable[[str, str], None] = lambda group, topic: None,
        trace: Tracing | None = None,
        requester: "Requester | None" = None,
    ) -> None:
        self.cluster = cluster
        self.sender: Sender = Sender(
            cluster.directory,
            group,
            make_unique_ids(cluster.clock).make_id,
            timeout_ms=timeout_ms,
            retries=retries,
            retry_unsafe=retry_unsafe,
            compress_from_bytes=compress_from_bytes,
            delay_level_max=delay_level_max,
            trace=trace,
            first_queue=cluster.first_queue,
        )
        self.sender.on_first_send = on_first
        self.group: str = self.sender.group
        self.transactions: Transactions = Transactions(
            cluster.directory, self.group, listener, trace
        )
        self._retries_async = retries_async
        self._callbacks: set[asyncio.Task[None]] = set()
        self._requester = requester
        self.closing: CloseOnce[CloseReport] = CloseOnce()

    send: Final = of_sender(Sender.send_message)
    send_oneway: Final = of_sender(Sender.send_oneway)
    send_batch: Final = of_sender(Sender.send_batch)
    recall: Final = of_sender(Sender.recall)

    def send_soon(
        self,
        on_done: OnDone,
        topic: str | Message,
        body: Body | None = None,
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
        **options: Unpack[MessageOptions],
    ) -> None:
        """RocketMQ's asynchronous send: returns at once, calls `on_done(result, error)` later, one
        of the two None. The options are those of `send`.

        One attempt only (`retries_async`), as RocketMQ counts it. What breaks a rule raises
        ConfigurationError here; other errors of `send` are handed to `on_done`. What `on_done`
        raises is logged.
        """
        self.cluster.affinity.check_loop()
        if not callable(on_done):
            raise ConfigurationError(
                f"on_done is {on_done!r:.60}.", fix="Give a function: (result, error) -> None."
            )
        outgoing = self.sender.assign_id(make_draft(topic, body, **options))
        check_destination(outgoing.topic, queue, timeout_ms)
        send = self.sender.send_outgoing(outgoing, queue, timeout_ms, self._retries_async)

        async def call_back() -> None:
            try:
                result = await self.cluster.run(send)
            except SluiceError as error:
                call_listener(on_done, None, error)
            except Exception as error:  # noqa: BLE001 - the callback has to hear of it
                _log.exception("send_soon of %s failed", outgoing.message_id)
                unknown = SendUnknownError(
                    f"sending message {outgoing.message_id} failed unexpectedly [{error!r}]: it "
                    "may be stored or not.",
                    fix="Please report the traceback in the log.",
                )
                call_listener(on_done, None, unknown)
            else:
                call_listener(on_done, result, None)

        task = asyncio.get_running_loop().create_task(call_back(), name="sluicemq send_soon")
        self._callbacks.add(task)
        task.add_done_callback(self._callbacks.discard)

    async def request(
        self,
        topic: str | Message,
        body: Body | None = None,
        *,
        timeout_s: float = REPLY_TIMEOUT_S,
        **options: Unpack[MessageOptions],
    ) -> StoredMessage:
        """Sends a message and waits for the reply of whoever consumes it (`message.reply`).

        `timeout_s`: how long it waits for the reply. `options` are those of `send`. Raises what
        `send` does, and RequestTimeoutError without a reply: it says whether the request is stored.
        A late reply is dropped. ConfigurationError for a producer that was not made by a `Sluice`.
        """
        check_number("timeout_s", timeout_s, 0.001, whole=False)
        if self._requester is None:
            raise ConfigurationError(
                "this producer takes no replies.", fix="Make it with `Sluice.producer`."
            )
        outgoing = self.sender.assign_id(make_message(topic, body, **options))
        return await self._requester.request(self.sender, outgoing, timeout_s)

    def transaction(
        self,
        topic: str | Message,
        body: Body | None = None,
        *,
        queue: MessageQueue | None = None,
        timeout_ms: int | None = None,
        check_after_s: int | None = None,
        **options: Unpack[MessageOptions],
    ) -> "Transaction":
        """A message that becomes visible when the block commits: see `Transaction`.

        `check_after_s`: ask this group not before so many seconds how it ended (the broker's
        transactionTimeOut without it); a commit that comes later may be refused. The others are
        those of `send`; delays are refused. Raises ConfigurationError here.
        """
        if queue is not None or timeout_ms is not None:
            check_destination(
                topic.topic if isinstance(topic, Message) else topic, queue, timeout_ms
            )

        def send(half: OutgoingMessage) -> Conversation[SendResult]:
            return self.sender.send_outgoing(half, queue, timeout_ms)

        outgoing = self.sender.assign_id(make_message(topic, body, **options))
        return Transaction(self.cluster, self.transactions, outgoing, send, check_after_s)

    async def send_in_transaction(
        self, message: Message, argument: Any = None, *, check_after_s: int | None = None
    ) -> TransactionResult:
        """RocketMQ's form: stores the half message, lets the listener execute the local
        transaction, tells the broker how that ended. Raises as `send`, and ConfigurationError
        without a listener."""
        self.transactions.expect_listener()
        outgoing = self.sender.assign_id(
            expect_one_message(message, Message, "send_in_transaction")
        )
        return await self.cluster.run(
            self.transactions.send_in_transaction(
                message, outgoing, argument, check_after_s, self.sender.send_outgoing
            )
        )

    async def answer_checks(self, *topics: str) -> None:
        """Makes this producer known to the brokers of the topics before it sends there: they may
        ask its listener about transactions that other processes of the group have left. Without
        topics: to the brokers that create topics. Raises RouteNotFoundError.
        """
        self.transactions.expect_listener()
        for topic in topics or (DEFAULT_TOPIC,):
            await self.cluster.route(topic, create=True)
            self.sender.on_first_send(self.group, topic)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The queues that a message of the topic may go to. Raises RouteNotFoundError."""
        return list(await self.cluster.write_queues(topic))

    async def close(self, timeout_s: float | None = None) -> CloseReport:
        """Refuses new sends, waits until the open ones are settled, reports what stays unknown.

        Waits `timeout_s`, by default as long as sends may take (each has its own deadline). Callers
        of sends that got no answer receive SendUnknownError; their ids stand in the report, as do
        the ids of those that are still open when the wait ends. Cancelling it ends the waiting: it
        raises CancelledError, and a second call returns the report.
        """
        self.cluster.affinity.check_loop()
        return await self.closing.run(lambda: self._close(timeout_s))

    async def _close(self, timeout_s: float | None) -> CloseReport:
        if self._callbacks:
            await asyncio.sleep(0)  # Those that were asked for just now have begun then.
        sender, settled = self.sender, asyncio.Event()
        open_at_start, sender.on_drained = len(sender.open_ids), settled.set
        sender.close()
        if sender.open_ids:
            limit_s = sender.timeout_ms / 1000 + 1.0 if timeout_s is None else timeout_s
            await self.closing.wait_unless_hurried(settled, limit_s)
        unknown = (*sender.unknown_ids, *sender.open_ids)
        if unknown:
            _log.warning(
                "producer %s closed while %d messages were unanswered; they may be stored: %s",
                self.group, len(unknown), ", ".join(unknown[:20]),
            )  # fmt: skip
        return CloseReport(open_at_start - len(sender.open_ids), unknown)

    def __repr__(self) -> str:
        state = "closed" if self.sender.is_closed else f"{len(self.sender.open_ids)} sends open"
        return f"<Producer of {self.group} at {self.cluster!r}, {state}>"


class Transaction(TransactionBlock):
    """One message with its local transaction: what `producer.transaction` returns.

    Entering sends the half message and raises as a send does; then nothing has begun. Leaving
    normally commits, an exception (which goes on) rolls back. Leaving raises RequestError when the
    broker refuses the end; when the broker cannot be reached it does not: the broker asks later.
    """

    def __init__(self, cluster: Cluster, *block: Any) -> None:
        super().__init__(*block)
        self._cluster = cluster

    async def __aenter__(self) -> Self:
        await self._cluster.run(self.enter())
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._cluster.run(self.leave(error))


class Requester:
    """Sends requests for the producers of one client. `awaited`: the replies that are waited for,
    by correlation id."""

    def __init__(self, cluster: Cluster, keeper: HeartbeatThread) -> None:
        self.awaited: dict[str, ReplyFuture] = {}
        self._cluster = cluster
        self._keeper = keeper
        self._known: set[tuple[str, str]] = set()

    async def request(
        self, sender: Sender, outgoing: OutgoingMessage, timeout_s: float
    ) -> StoredMessage:
        """The reply. Raises RequestTimeoutError, and what a send raises."""
        correlation_id, topic, where = secrets.token_hex(16), outgoing.topic, ""
        ttl_ms = int(timeout_s * 1000)
        request = make_request_message(outgoing, self._keeper.client_id, correlation_id, ttl_ms)
        future: asyncio.Future[StoredMessage] = asyncio.get_running_loop().create_future()
        self.awaited[correlation_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                await self._cluster.route(topic, create=True)
                if (sender.group, topic) not in self._known:
                    # The brokers have to know our connection before a reply comes.
                    self._keeper.add_producer_group(sender.group)
                    self._keeper.update_addresses(self._cluster.routes.broker_addresses([topic]))
                    await asyncio.wrap_future(self._keeper.send_heartbeats())
                    self._known.add((sender.group, topic))
                result = await self._cluster.run(sender.send_outgoing(request))
                where = f"queue {result.queue.queue_id} of {result.queue.broker}"
                return await future
        except TimeoutError as error:
            raise reply_timeout_error(topic, request.message_id, where, timeout_s) from error
        finally:
            del self.awaited[correlation_id]


class TraceWriter:
    """Writes what one `Sluice` has noted: a task that begins with the first note, sends about once
    a second, and never lets an error reach whom it tells of. Use it in the loop that made it."""

    def __init__(self, cluster: Cluster, tracing: Tracing, linger_s: float = LINGER_S) -> None:
        self.tracing = tracing
        self._cluster = cluster
        self._linger_s = linger_s
        self._sender = Sender(
            cluster.directory,
            INNER_GROUP,
            make_unique_ids(cluster.clock).make_id,
            first_queue=cluster.first_queue,
        )
        self._work = asyncio.Event()
        self._tasks = Tasks()
        self._closed = False
        tracing.on_note = self._wake

    def _wake(self) -> None:
        if not self._closed:
            if not self._tasks:
                self._tasks.supervise(self._run, "sluicemq trace")
            if len(self.tracing) in (1, RECORDS_MAX):
                self._work.set()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            if len(self.tracing) < RECORDS_MAX:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._linger_s):
                        await self._work.wait()
            if not await self.flush():
                await asyncio.sleep(TRACE_PAUSE_S)
            if self.tracing:
                self._work.set()

    async def flush(self) -> bool:
        """Send all that is noted and return whether that worked. Raises nothing: an unexpected
        error is logged, and the notes that are left are sent with the next ones."""
        try:
            return await self._cluster.run(self._sender.write_traces(self.tracing))
        except Exception:  # noqa: BLE001 - a trace must not disturb what it tells of
            _log.exception("traces cannot be written")
            return False

    async def close(self) -> None:
        """Writes what is left, for a few seconds at most."""
        if self._closed:
            return
        self._closed = True
        await self._tasks.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TRACE_CLOSE_S):
                while self.tracing and await self.flush():
                    pass
        self.tracing.close()
