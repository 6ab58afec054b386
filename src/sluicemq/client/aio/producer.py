"""The asyncio producer.

Each `await producer.send(...)` is independent of the others. Thousands of them may wait at the same
time: they share one connection to each broker, and the requests of one event loop iteration leave
in one write. `core.sending` makes the decisions (checks, choice of the queue, retries, time limits,
error texts); this module only waits for I/O.

It also contains the two helpers of a `Sluice` that send messages: `Requester` for request-reply,
and `TraceWriter` for trace records.
"""

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Concatenate, Final, ParamSpec, Protocol, Self, TypeVar, Unpack

from sluicemq.client.aio.cluster import Cluster, expect_cluster
from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.messages import (
    COMPRESS_FROM_BYTES,
    DELAY_LEVEL_MAX,
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
from sluicemq.client.core.send_attempts import RETRIES, SEND_TIMEOUT_MS
from sluicemq.client.core.sending import (
    DEFAULT_PRODUCER_GROUP,
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
from sluicemq.model.arguments import Body
from sluicemq.model.message import Message, StoredMessage
from sluicemq.model.topic import DEFAULT_TOPIC, MessageQueue

_log = logging.getLogger("sluicemq.client")

P = ParamSpec("P")
T = TypeVar("T")
OnDone = Callable[[SendResult | None, SluiceError | None], None]
"""A function (result, error) that `send_soon` calls when the send has ended.

Exactly one of the two arguments is None.
"""
TRACE_CLOSE_S: Final = 3.0
"""How many seconds `TraceWriter.close` waits for the remaining trace records to be sent."""
TRACE_PAUSE_S: Final = 5.0
"""The pause in seconds after trace records could not be sent."""


@dataclass(frozen=True, slots=True, repr=False)
class CloseReport:
    """The result of closing a producer or a client.

    - `settled`: the number of sends that were in progress and ended while `close` waited.
    - `unknown`: the ids of messages that may or may not be stored, because no broker confirmed
      them. Look them up with `sluice message show ID` before you send them again.
    """

    settled: int
    unknown: tuple[str, ...]

    def __repr__(self) -> str:
        ids = ", ".join(self.unknown[:5]) + (" …" if len(self.unknown) > 5 else "")
        count = f"{len(self.unknown)} unknown{': ' if ids else ''}"
        return f"<CloseReport: {self.settled} settled, {count}{ids}>"


class HasSender(Protocol):
    """An object whose methods can be made by `sender_method`: a `Producer` or a `Sluice`."""

    cluster: Cluster

    @property
    def sender(self) -> Sender: ...


def sender_method(
    function: Callable[Concatenate[Sender, P], Conversation[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Turn a method of `Sender` into an asyncio method of a class that has a `sender`.

    The method of `Sender` returns a conversation, a generator of requests; the new one returns a
    coroutine that carries it out. It has the same parameters (except `self`) and docstring. If the
    arguments do not fit, the TypeError gets a hint that names the parameters.
    """

    @functools.wraps(function)
    def call(self: HasSender, /, *arguments: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T]:
        try:
            conversation = function(self.sender, *arguments, **named)
        except TypeError as error:
            improve_type_error(error, call, named)
            raise
        return self.cluster.run(conversation)

    return call


@with_hints
class Producer:
    """Sends messages for one producer group. `Sluice.producer` creates it.

        producer = mq.producer("order-service", retries=5)
        result = await producer.send("orders", b"17 apples", tag="new", keys="order-4711")

    Every method that sends raises these errors:

    - ConfigurationError: an argument or the message is invalid. Nothing was sent.
    - RouteNotFoundError: the topic does not exist, and no broker creates it automatically.
    - NameServerUnreachableError: no name server responded.
    - RequestError: the broker refused the message. PermissionDeniedError is a subclass.
    - SendError: the message is not stored. Sending it again is safe.
    - SendUnknownError, a subclass of SendError: the message may be stored, because a response is
      missing. The client never sends it again by itself; doing so may store it twice.
    - ClosedError: the producer or its client is closed.
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
        on_first_send: Callable[[str, str], None] = lambda group, topic: None,
        trace: Tracing | None = None,
        requester: "Requester | None" = None,
    ) -> None:
        """Create a producer. Applications call `Sluice.producer` instead.

        - `group` to `listener`: the options of `ProducerOptions`.
        - `on_first_send(group, topic)`: called before the first send to a topic.
        - `trace`: records the messages that are sent; None records nothing.
        - `requester`: sends requests that expect a reply. With None, `request` raises
          ConfigurationError.

        Raises ConfigurationError if an option is invalid.
        """
        self.cluster: Cluster = expect_cluster(
            cluster, "Producer", "producer(…)", "sluicemq.client.sync.producer.Producer"
        )
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
            first_queue=cluster.choose_first_queue,
        )
        """Makes the requests of this producer and decides about retries. For internal use."""
        self.sender.on_first_send = on_first_send
        self.group: str = self.sender.group
        """The producer group."""
        self.transactions: Transactions = Transactions(
            cluster.directory, self.group, listener, trace
        )
        """The transactions of this producer that are running or have ended. For internal use."""
        self._retries_async = retries_async
        self._callbacks: set[asyncio.Task[None]] = set()
        """The tasks of `send_soon`. Without this reference, they could be garbage-collected."""
        self._requester = requester
        self.closing: CloseOnce[CloseReport] = CloseOnce()
        """Runs the actual close once. `Sluice.close` hurries it when its caller is cancelled."""

    send: Final = sender_method(Sender.send_message)
    send_oneway: Final = sender_method(Sender.send_oneway)
    send_batch: Final = sender_method(Sender.send_batch)
    recall: Final = sender_method(Sender.recall)

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
        """Start to send one message, return at once, and call `on_done(result, error)` later.

        This is RocketMQ's asynchronous send. `on_done` is called on the event loop: after a success
        with the `SendResult` and None, after a failure with None and the SluiceError that `send`
        would raise. What `on_done` raises is logged. The other arguments are those of `send`,
        except `selector`.

        Like RocketMQ, it makes one attempt only, unless the producer was created with
        `retries_async`.

        Raises ConfigurationError if an argument is invalid, and ClosedError after `close`;
        `on_done` is not called then.
        """
        self.cluster.affinity.check_loop()
        if not callable(on_done):
            raise ConfigurationError(
                f"on_done must be a function (result, error), got {on_done!r:.60}.",
                fix="Pass a function that accepts a result and an error.",
            )
        outgoing = self.sender.assign_id(make_draft(topic, body, **options))
        check_destination(outgoing.topic, queue, timeout_ms)
        send = self.sender.send_outgoing(outgoing, queue, timeout_ms, self._retries_async)
        task = asyncio.get_running_loop().create_task(
            self._send_and_call_back(send, outgoing.message_id, on_done), name="sluicemq send_soon"
        )
        self._callbacks.add(task)
        task.add_done_callback(self._callbacks.discard)

    async def _send_and_call_back(
        self, send: Conversation[SendResult], message_id: str, on_done: OnDone
    ) -> None:
        """Run `send`, and then call `on_done(result, None)` or `on_done(None, error)`.

        An unexpected exception is logged and becomes a SendUnknownError, so that `on_done` is
        always called.
        """
        try:
            send_result = await self.cluster.run(send)
        except SluiceError as error:
            call_listener(on_done, None, error)
        except Exception as error:  # noqa: BLE001 - the callback must always be called
            _log.exception("send_soon of %s failed", message_id)
            unknown = SendUnknownError(
                f"sending message {message_id} failed unexpectedly [{error!r}]: it may be stored "
                "or not.",
                fix="Please report the traceback in the log.",
            )
            call_listener(on_done, None, unknown)
        else:
            call_listener(on_done, send_result, None)

    async def request(
        self,
        topic: str | Message,
        body: Body | None = None,
        *,
        timeout_s: float = REPLY_TIMEOUT_S,
        **options: Unpack[MessageOptions],
    ) -> StoredMessage:
        """Send a message and wait for the reply of the consumer that processes it.

        The consumer replies with `message.reply`:

            reply = await producer.request("prices", b"apples", timeout_s=3)
            print(reply.body)

        `timeout_s` is the time limit in seconds for sending the request and receiving the reply
        (10). `options` are those of `MessageOptions`, as in `send`. Return the reply as a
        `StoredMessage`; its offsets are -1.

        Raises RequestTimeoutError if no reply came in time. Its text says whether the request is
        stored: if so, a consumer may still process it, and a late reply is dropped. Raises
        ConfigurationError if the producer was not created by a `Sluice`, and what `send` raises.
        """
        check_number("timeout_s", timeout_s, 0.001, whole=False)
        if self._requester is None:
            raise ConfigurationError(
                "this producer cannot receive replies.", fix="Create it with `Sluice.producer`."
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
        """Return a context manager that sends a message in a transaction.

            async with producer.transaction("orders", b"17 apples") as tx:
                await database.execute("INSERT ...", tx.transaction_id)

        The message becomes visible to consumers when the block commits. `check_after_s` is how many
        seconds the broker waits at least before it checks a transaction that was not ended; None
        (the default) means the broker's own transactionTimeOut. A commit after the first check may
        be refused. The other arguments are those of `send`, except delays and timed delivery, which
        are refused.

        Raises ConfigurationError if an argument is invalid, and ClosedError after `close`. Nothing
        is sent before the block is entered.
        """
        if queue is not None or timeout_ms is not None:
            check_destination(
                topic.topic if isinstance(topic, Message) else topic, queue, timeout_ms
            )

        def send(prepared: OutgoingMessage) -> Conversation[SendResult]:
            return self.sender.send_outgoing(prepared, queue, timeout_ms)

        outgoing = self.sender.assign_id(make_message(topic, body, **options))
        return Transaction(self.cluster, self.transactions, outgoing, send, check_after_s)

    async def send_in_transaction(
        self, message: Message, argument: Any = None, *, check_after_s: int | None = None
    ) -> TransactionResult:
        """Send a message in a transaction whose local part the producer's listener runs.

        This is RocketMQ's interface. The prepared message is stored, the `TransactionListener` runs
        `execute_local(message, transaction_id, argument)`, and the transaction ends in the state
        that this returns. `check_after_s` is how many seconds the broker waits at least before it
        asks for the state; None means its own interval. Returns the state and the result of the
        send.

        Raises ConfigurationError if the producer has no listener or `message` is not one `Message`,
        what `send` raises, and RequestError if the broker refuses to end the transaction.
        """
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
        """Register at brokers, so that they ask this producer about open transactions.

        Brokers ask any producer of the group about transactions that another process has left open;
        this one's listener answers. `topics` are the topics of such transactions. Without them, the
        producer registers at the brokers that create topics automatically.

        Raises ConfigurationError without a listener, RouteNotFoundError if a topic does not exist,
        and NameServerUnreachableError.
        """
        self.transactions.expect_listener()
        for topic in topics or (DEFAULT_TOPIC,):
            await self.cluster.route(topic, create=True)
            self.sender.on_first_send(self.group, topic)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues of `topic` that messages can be sent to.

        Pass one of them as `queue` to `send`. Raises RouteNotFoundError if the topic does not
        exist, and NameServerUnreachableError.
        """
        return list(await self.cluster.write_queues(topic))

    async def close(self, timeout_s: float | None = None) -> CloseReport:
        """Refuse new messages and wait for the sends in progress.

        Wait up to `timeout_s` seconds. None (the default) means the producer's time limit of a send
        (`timeout_ms`) plus one second. Return a `CloseReport` with the ids of messages that may or
        may not be stored: sends without a response, whose callers get SendUnknownError, and sends
        that are still in progress after `timeout_s`.

        If the caller is cancelled, stop waiting and raise CancelledError; call `close` again for
        the report. Raises ConfigurationError in another event loop or process.
        """
        self.cluster.affinity.check_loop()
        return await self.closing.run(lambda: self._close(timeout_s))

    async def _close(self, timeout_s: float | None) -> CloseReport:
        """Do the work of `close`, which calls this once, and return the report.

        Sends in progress have `timeout_s` seconds to end; None means the producer's time-out and 1
        s more. A cancellation of `close` hurries `closing`, which ends the wait.
        """
        if self._callbacks:
            await asyncio.sleep(0)  # lets the sends begin that send_soon has just scheduled
        sender = self.sender
        settled = asyncio.Event()
        open_count_before = len(sender.open_ids)
        sender.on_drained = settled.set
        sender.close()
        if sender.open_ids:
            if timeout_s is None:
                timeout_s = sender.timeout_ms / 1000 + 1.0
            await self.closing.wait_unless_hurried(settled, timeout_s)

        unknown_ids = (*sender.unknown_ids, *sender.open_ids)
        if unknown_ids:
            _log.warning(
                "the producer of group %s closed while %d messages had no response; they may be "
                "stored: %s",
                self.group,
                len(unknown_ids),
                ", ".join(unknown_ids[:20]),
            )
        return CloseReport(open_count_before - len(sender.open_ids), unknown_ids)

    def __repr__(self) -> str:
        state = "closed" if self.sender.is_closed else f"{len(self.sender.open_ids)} sends open"
        return f"<Producer of {self.group} at {self.cluster!r}, {state}>"


class Transaction(TransactionBlock):
    """One message and its local transaction, as an asynchronous context manager.

    `Producer.transaction` creates it. Entering the block stores the prepared message, which
    consumers do not see. Leaving it normally commits the message; an exception rolls it back and
    propagates. Within the block, `rollback()` and `unknown()` make leaving the block end the
    transaction differently.

    Entering raises what `send` raises; the transaction has not begun then. Leaving raises
    RequestError if the broker refuses to end the transaction. If the broker cannot be reached,
    leaving raises nothing: `is_acknowledged` is False, and the broker checks the transaction later.
    """

    def __init__(self, cluster: Cluster, *arguments: Any) -> None:
        """Create the block; `arguments` are those of `TransactionBlock`."""
        super().__init__(*arguments)
        self._cluster = cluster

    async def __aenter__(self) -> Self:
        await self._cluster.run(self.enter())
        return self

    async def __aexit__(
        self, error_class: object, error: BaseException | None, traceback: object
    ) -> None:
        await self._cluster.run(self.leave(error))


class Requester:
    """Sends the requests of all producers of one client, and waits for their replies.

    `pending_replies` maps the correlation id of each waiting request to the future of its reply;
    `BrokerRequests` completes the futures.
    """

    def __init__(self, cluster: Cluster, heartbeat_thread: HeartbeatThread) -> None:
        """Begin without pending requests.

        `heartbeat_thread` has the connections on which brokers send replies.
        """
        self.pending_replies: dict[str, ReplyFuture] = {}
        self._cluster = cluster
        self._heartbeat_thread = heartbeat_thread
        self._announced: set[tuple[str, str]] = set()
        """The (producer group, topic) whose brokers have received a heartbeat."""

    async def request(
        self, sender: Sender, outgoing: OutgoingMessage, timeout_s: float
    ) -> StoredMessage:
        """Send a message as a request, and return the reply of the consumer that processes it.

        A broker sends the reply on the connection from which it received the requester's heartbeat.
        So heartbeats are sent before the first request of a producer group to a topic.

        Raises RequestTimeoutError if no reply came within `timeout_s` seconds, and what a send
        raises.
        """
        correlation_id = secrets.token_hex(16)
        topic = outgoing.topic
        stored_in = ""
        ttl_ms = int(timeout_s * 1000)
        request = make_request_message(
            outgoing, self._heartbeat_thread.client_id, correlation_id, ttl_ms
        )
        future: asyncio.Future[StoredMessage] = asyncio.get_running_loop().create_future()
        # Before the send, because the reply may come before the response.
        self.pending_replies[correlation_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                await self._cluster.route(topic, create=True)
                if (sender.group, topic) not in self._announced:
                    await self._announce(sender.group, topic)
                send_result = await self._cluster.run(sender.send_outgoing(request))
                stored_in = f"queue {send_result.queue.queue_id} of {send_result.queue.broker}"
                return await future
        except TimeoutError as error:
            raise reply_timeout_error(topic, request.message_id, stored_in, timeout_s) from error
        finally:
            del self.pending_replies[correlation_id]

    async def _announce(self, group: str, topic: str) -> None:
        """Send heartbeats of a producer group to the brokers of a topic, and wait for them.

        So the brokers know the connection for replies before the first request.
        """
        self._heartbeat_thread.add_producer_group(group)
        self._heartbeat_thread.update_addresses(self._cluster.routes.broker_addresses([topic]))
        await asyncio.wrap_future(self._heartbeat_thread.send_heartbeats())
        self._announced.add((group, topic))


class TraceWriter:
    """Sends the trace records of one `Sluice` in a background task.

    The task starts with the first record and sends about once a second. It never raises an error
    into the code that records. Use it in the event loop in which it was created.
    """

    def __init__(self, cluster: Cluster, tracing: Tracing, linger_s: float = LINGER_S) -> None:
        """Create a writer that sends the records of `tracing` to its topic.

        After the first record, it waits up to `linger_s` seconds for further ones before it sends.
        It sets `tracing.on_note`, which wakes it.
        """
        self.tracing = tracing
        self._cluster = cluster
        self._linger_s = linger_s
        self._sender = Sender(
            cluster.directory,
            INNER_GROUP,
            make_unique_ids(cluster.clock).make_id,
            first_queue=cluster.choose_first_queue,
        )
        self._work = asyncio.Event()
        self._tasks = Tasks()
        self._closed = False
        tracing.on_note = self._wake

    def _wake(self) -> None:
        """Start the writing task at the first record, and wake it when it has something to do.

        The task waits for the first record, and then for enough records to fill a message.
        `tracing` calls this after each new record. Does nothing after `close`.
        """
        if not self._closed:
            if not self._tasks:
                self._tasks.supervise(self._run, "sluicemq trace")
            if len(self.tracing) in (1, RECORDS_MAX):
                self._work.set()

    async def _run(self) -> None:
        """Send records in a loop until the task is cancelled.

        After a failure, pause for `TRACE_PAUSE_S` seconds.
        """
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
        """Send all records, and return False if that failed.

        Raises no Exception: an unexpected error is logged. Records that were not sent yet stay for
        the next call.
        """
        try:
            return await self._cluster.run(self._sender.write_traces(self.tracing))
        except Exception:  # noqa: BLE001 - tracing must not fail a client
            _log.exception("traces cannot be written")
            return False

    async def close(self) -> None:
        """Send the remaining records for up to `TRACE_CLOSE_S` seconds.

        Records that are left then are dropped, which is logged as a warning.
        """
        if self._closed:
            return
        self._closed = True
        await self._tasks.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TRACE_CLOSE_S):
                while self.tracing and await self.flush():
                    pass
        self.tracing.close()
