"""The blocking producer: for scripts, threads and Spark workers.

The same decisions as the asyncio producer (queue choice, retries, deadline, checks) from the same
core; every call waits for its answer. No background thread: nothing is sent that was not asked for.

    with Producer("127.0.0.1:9876") as producer:
        producer.send("flights", body, tag="UA")
        with producer.transaction("orders", body) as tx:    # half message stored
            database.commit()                     # leaving commits, an exception rolls back

Transactions and requests are what brokers come back to: with questions (39) and replies (326), on a
connection that heartbeats. So the first of them starts the keeper's thread; a listener's `check`
runs on one thread more.
"""

import functools
import logging
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar, Unpack

from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.messages import (
    DELAY_LEVEL_MAX,
    Body,
    MessageOptions,
    OutgoingMessage,
    check_topic_cached,
    expect_one_message,
    make_message,
)
from sluicemq.client.core.names import Credentials, check_number
from sluicemq.client.core.replies import (
    REPLY_TIMEOUT_S,
    ReplyFuture,
    accept_pushed_reply,
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
from sluicemq.client.core.tracing import LINGER_S, RECORDS_MAX, Tracing, parse_trace_option
from sluicemq.client.core.transactions import (
    PreparedMessageLocation,
    SendPrepared,
    TransactionBlock,
    TransactionListener,
    TransactionResult,
    Transactions,
    parse_check_request,
)
from sluicemq.client.heartbeat_thread import HeartbeatThread, make_client_id, make_unique_ids
from sluicemq.client.sync.cluster import Cluster
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import ProtocolError
from sluicemq.hints import improve_type_error, with_hints
from sluicemq.model.message import WAIT, Message, StoredMessage
from sluicemq.model.topic import DEFAULT_TOPIC, MessageQueue
from sluicemq.net.network import SocketNetwork
from sluicemq.net.tls import Tls
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import Command

_log = logging.getLogger("sluicemq.client")
P = ParamSpec("P")
T = TypeVar("T")
_CLOSE_S: Final = 3.0


def of_sender(
    talk: Callable[Concatenate[Sender, P], Conversation[T]],
) -> Callable[Concatenate[Any, P], T]:
    """A talk of the core as a method of `Producer`, with its parameters and docstring."""

    @functools.wraps(talk)
    def call(self: "Producer", /, *arguments: P.args, **named: P.kwargs) -> T:
        try:
            begun = talk(self._sender, *arguments, **named)
        except TypeError as error:
            improve_type_error(error, call, named)
            raise
        return self.run(begun)

    return call


@with_hints
class Producer(Cluster):
    """Sends and waits. Safe to share among threads.

    Errors of every send: ConfigurationError (the message breaks a rule, nothing was sent),
    RouteNotFoundError, RequestError (the broker refused it), SendError (not stored) and its child
    SendUnknownError (it may be stored).
    """

    def __init__(
        self,
        name_servers: str | list[str] | tuple[str, ...],
        *,
        group: str = DEFAULT_PRODUCER_GROUP,
        credentials: Credentials | tuple[str, str] | None = None,
        timeout_ms: int = SEND_TIMEOUT_MS,
        retries: int = RETRIES,
        retry_unsafe: bool = False,
        delay_level_max: int = DELAY_LEVEL_MAX,
        listener: TransactionListener | None = None,
        trace: bool | str = False,
        clock: Clock = SYSTEM_CLOCK,
        tls: Tls | bool | None = None,
        rng: Random | None = None,
    ) -> None:
        super().__init__(name_servers, credentials=credentials, clock=clock, tls=tls, rng=rng)
        next_id = make_unique_ids(clock).make_id
        topic = parse_trace_option(trace)
        self.trace: Tracing | None = None if topic is None else Tracing(topic, clock, next_id)
        self._sender = Sender(
            self.directory,
            group,
            next_id,
            timeout_ms=timeout_ms,
            retries=retries,
            retry_unsafe=retry_unsafe,
            delay_level_max=delay_level_max,
            trace=self.trace,
            first_queue=self.first_queue,
        )
        self.group: str = self._sender.group
        self.timeout_ms = timeout_ms
        self.inbound: Inbound = Inbound(self, self.group, listener)
        self.inbound.trace = self.trace
        self._trace_writer: TraceWriter | None = None
        if self.trace is not None:
            self._trace_writer = TraceWriter(self, self._sender, self.trace)

    send: Final = of_sender(Sender.send_message)
    send_oneway: Final = of_sender(Sender.send_oneway)
    send_batch: Final = of_sender(Sender.send_batch)
    recall: Final = of_sender(Sender.recall)

    def send_encoded(
        self, topic: str, body: bytes | memoryview, *, queue: MessageQueue | None = None
    ) -> SendResult:
        """Sends messages of one topic that are laid out as one batch already (`record.batch`), each
        with its UNIQ_KEY: all of them are stored, or none. The result is that of the first one.
        For who makes many messages at once and has checked them."""
        sender, properties = self._sender, f"{WAIT}\x01true\x02"
        outgoing = OutgoingMessage(
            check_topic_cached(topic), body, properties, sender.next_id(), 0, 0, True
        )
        return self.run(sender.send_with_retries(outgoing, ("",), queue, batch=True))[0]

    def send_outgoing(
        self, outgoing: OutgoingMessage, *, queue: MessageQueue | None = None
    ) -> SendResult:
        """Sends a message that is made ready already, with an id of the caller's choice."""
        return self.run(self._sender.send_outgoing(outgoing, queue))

    def request(
        self,
        topic: str | Message,
        body: Body | None = None,
        *,
        timeout_s: float = REPLY_TIMEOUT_S,
        **options: Unpack[MessageOptions],
    ) -> StoredMessage:
        """Sends a message and waits up to `timeout_s` for the reply of whoever consumes it.

        `options` are those of `send`. Raises what `send` does, and RequestTimeoutError without a
        reply: it says whether the request is stored. A late reply is dropped.
        """
        check_number("timeout_s", timeout_s, 0.001, whole=False)
        outgoing = self._sender.assign_id(make_message(topic, body, **options))
        return self.inbound.request(outgoing, self.send_outgoing, timeout_s)

    def transaction(
        self,
        topic: str | Message,
        body: Body | None = None,
        *,
        queue: MessageQueue | None = None,
        check_after_s: int | None = None,
        **options: Unpack[MessageOptions],
    ) -> "Transaction":
        """A message that becomes visible when the `with` block commits: see `Transaction`.

        `check_after_s`: ask this group not before so many seconds how it ended (the broker's
        transactionTimeOut without it); a commit that comes later may be refused. The others are
        those of `send`; delays are refused. Raises ConfigurationError here.
        """
        if queue is not None:
            check_destination(topic.topic if isinstance(topic, Message) else topic, queue)

        def send(half: OutgoingMessage) -> Conversation[SendResult]:
            return self._sender.send_outgoing(half, queue)

        outgoing = self._sender.assign_id(make_message(topic, body, **options))
        return Transaction(self, self.inbound, outgoing, send, check_after_s)

    def send_in_transaction(
        self, message: Message, argument: Any = None, *, check_after_s: int | None = None
    ) -> TransactionResult:
        """RocketMQ's form: stores the half message, lets the listener execute the local
        transaction, tells the broker how that ended. Raises as `send`, and ConfigurationError
        without a listener."""
        self.inbound.expect_listener()
        outgoing = self._sender.assign_id(
            expect_one_message(message, Message, "send_in_transaction")
        )
        return self.run(
            self.inbound.send_in_transaction(
                message, outgoing, argument, check_after_s, self._sender.send_outgoing
            )
        )

    def answer_checks(self, *topics: str) -> None:
        """Makes this producer known to the brokers of the topics before it sends there: they may
        ask its listener about transactions that other processes of the group have left. Without
        topics: to the brokers that create topics. Raises RouteNotFoundError.
        """
        self.inbound.expect_listener()
        for topic in topics or (DEFAULT_TOPIC,):
            self.inbound.introduce(topic)

    def close(self) -> None:
        """Closes every connection; further calls raise ClosedError."""
        self.inbound.close()
        if self._trace_writer is not None:
            self._trace_writer.close()
        super().close()


class Inbound(Transactions):
    """The transactions and open requests of one blocking producer. Safe to share among threads."""

    def __init__(self, cluster: Cluster, group: str, listener: TransactionListener | None) -> None:
        self._lock = threading.Lock()
        super().__init__(cluster.directory, group, listener, lock=self._lock)
        self._cluster = cluster
        self._keeper: HeartbeatThread | None = None
        self._checks = ThreadPoolExecutor(1, "sluicemq transaction check")
        self._known: dict[str, Future[Any]] = {}
        self._open: dict[str, ReplyFuture] = {}

    def introduce(self, topic: str) -> tuple[HeartbeatThread, "Future[Any]"]:
        """Makes this producer known to the brokers of a topic; the future ends when they have heard
        of it. Raises RouteNotFoundError."""
        if topic not in self._known or self._keeper is None:
            self._cluster.route(topic, create=True)
            with self._lock:
                if self._keeper is None:
                    self._keeper = HeartbeatThread(
                        make_client_id(self._cluster.clock),
                        credentials=self._cluster.credentials,
                        connect=SocketNetwork(self._cluster.tls).dial,
                        on_request=self._on_ask,
                        outages=self._cluster.directory.outages,
                    )
            self._keeper.add_producer_group(self.group)
            self._keeper.update_addresses(self._cluster.routes.broker_addresses([topic]))
            self._known[topic] = self._keeper.send_heartbeats()
        return self._keeper, self._known[topic]

    def send_prepared(
        self, outgoing: OutgoingMessage, check_after_s: int | None, send: SendPrepared
    ) -> Conversation[tuple[PreparedMessageLocation, SendResult]]:
        """Sends the half message, when its brokers know whom to ask."""
        self.introduce(outgoing.topic)
        return super().send_prepared(outgoing, check_after_s, send)

    def request(
        self,
        outgoing: OutgoingMessage,
        send: Callable[[OutgoingMessage], SendResult],
        timeout_s: float,
    ) -> StoredMessage:
        """The reply. Raises RequestTimeoutError, and what `send` raises."""
        began_s = self._cluster.clock.monotonic_s()
        keeper, introduced = self.introduce(outgoing.topic)
        correlation_id = secrets.token_hex(16)
        request = make_request_message(
            outgoing, keeper.client_id, correlation_id, int(timeout_s * 1000)
        )
        future: Future[StoredMessage] = Future()
        self._open[correlation_id] = future
        where = ""
        try:
            introduced.result(self._cluster.timeout_s)
            result = send(request)
            where = f"queue {result.queue.queue_id} of {result.queue.broker}"
            left_s = timeout_s - (self._cluster.clock.monotonic_s() - began_s)
            return future.result(max(0.0, left_s))
        except TimeoutError as error:
            raise reply_timeout_error(
                request.topic, request.message_id, where, timeout_s
            ) from error
        finally:
            self._open.pop(correlation_id, None)

    def _on_ask(self, command: Command, address: str, answer: Callable[[Command], None]) -> bool:
        """Called on the keeper's thread: 39, 326."""
        try:
            if command.code == RequestCode.CHECK_TRANSACTION_STATE:
                question = parse_check_request(command)
                if question.location.group == self.group:

                    def check() -> None:
                        try:
                            found = self._cluster.run(self.answer_check(question, address))
                            if found is not None and self._keeper is not None:
                                self._keeper.send_oneway(address, found)
                        except BaseException:  # noqa: BLE001 - its future is read by nobody
                            _log.exception(
                                "transaction %s could not be checked: the broker will ask again",
                                question.location.transaction_id,
                            )

                    self._checks.submit(check)
                return True
            if command.code != RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
                return False
            answer(accept_pushed_reply(command, self._open))
        except ProtocolError as error:
            _log.warning("a request of the broker %s cannot be understood: %s", address, error)
            answer(Command(ResponseCode.SYSTEM_ERROR, remark=str(error)))
        except RuntimeError:
            _log.debug("asked about a transaction while the producer closes")
        return True

    def close(self) -> None:
        """Answers no more questions, takes no more replies; checks that run end first."""
        self._checks.shutdown(wait=True, cancel_futures=True)
        if self._keeper is not None:
            self._keeper.close()


class Transaction(TransactionBlock):
    """One message with its local transaction: left normally it commits, by an exception it rolls
    back."""

    def __init__(self, cluster: Cluster, *block: Any) -> None:
        super().__init__(*block)
        self._cluster = cluster

    def __enter__(self) -> Self:
        self._cluster.run(self.enter())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._cluster.run(self.leave(error))


class TraceWriter:
    """Writes what one producer has noted: a thread that begins with the first note, sends about
    once a second, and never lets an error reach whom it tells of."""

    def __init__(
        self, cluster: Cluster, sender: Sender, tracing: Tracing, linger_s: float = LINGER_S
    ) -> None:
        self.tracing = tracing
        self._cluster = cluster
        self._sender = sender
        self._linger_s = linger_s
        self._work = threading.Event()
        self._full = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        tracing.on_note = self._wake

    def _wake(self) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closed:
                    self._thread = threading.Thread(
                        target=self._run, name="sluicemq trace", daemon=True
                    )
                    self._thread.start()
        if not self._work.is_set():
            self._work.set()
        if len(self.tracing) >= RECORDS_MAX and not self._full.is_set():
            self._full.set()

    def _run(self) -> None:
        while not self._closed or self.tracing:
            self._work.wait()
            self._work.clear()
            self._full.wait(self._linger_s)
            if not self._closed:
                self._full.clear()
            if not self.flush() and self._closed:
                return

    def flush(self) -> bool:
        """Send all that is noted and return whether that worked. Raises nothing: an unexpected
        error is logged, and the notes that are left are sent with the next ones."""
        try:
            return self._cluster.run(self._sender.write_traces(self.tracing))
        except Exception:  # noqa: BLE001 - a trace must not disturb what it tells of
            _log.exception("traces cannot be written")
            return False

    def close(self) -> None:
        """Writes what is left, for a few seconds at most."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._full.set()
            self._work.set()
            thread.join(_CLOSE_S)
        self.tracing.close()
