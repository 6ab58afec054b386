"""The blocking producer, for scripts, threads and Spark workers.

    with Producer("127.0.0.1:9876") as producer:
        producer.send("flights", body, tag="UA")
        with producer.transaction("orders", body) as tx:    # a prepared message is stored
            database.commit()                     # leaving commits, an exception rolls back

Queue selection, retries, time limits and checks are those of the asyncio producer, from the same
core. Every call runs on the caller's thread and waits for its response.

For transactions and requests, a broker must be able to send requests to the client: transaction
checks (CHECK_TRANSACTION_STATE, 39) and replies (PUSH_REPLY_MESSAGE_TO_CLIENT, 326). They arrive on
a connection that sends heartbeats. So the first transaction or request starts the heartbeat thread;
the checks of a listener run on another thread. A producer that uses neither, and writes no traces,
has no thread.
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
from sluicemq.client.core.send_attempts import RETRIES, SEND_TIMEOUT_MS
from sluicemq.client.core.sending import (
    DEFAULT_PRODUCER_GROUP,
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
from sluicemq.model.arguments import Body
from sluicemq.model.message import WAIT, Message, StoredMessage
from sluicemq.model.topic import DEFAULT_TOPIC, MessageQueue
from sluicemq.net.network import SocketNetwork
from sluicemq.net.tls import Tls
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import Command

_log = logging.getLogger("sluicemq.client")
P = ParamSpec("P")
T = TypeVar("T")
_TRACE_CLOSE_S: Final = 3.0
"""The maximum time for writing the last trace records when a producer is closed."""


def sender_method(
    function: Callable[Concatenate[Sender, P], Conversation[T]],
) -> Callable[Concatenate[Any, P], T]:
    """Make a method of `Producer` from a method of `Sender`.

    The method of `Sender` returns a conversation, a generator of requests; the new one carries it
    out and returns its result. Name, parameters and docstring stay the same. If the arguments do
    not fit, the TypeError gets a hint that names the parameters.
    """

    @functools.wraps(function)
    def call(self: "Producer", /, *arguments: P.args, **named: P.kwargs) -> T:
        try:
            conversation = function(self._sender, *arguments, **named)
        except TypeError as error:
            improve_type_error(error, call, named)
            raise
        return self.run(conversation)

    return call


@with_hints
class Producer(Cluster):
    """A blocking producer of one producer group. Threads may share it.

    Use it in a `with` statement, or call `close`. After a fork, every call raises
    ConfigurationError in the child process.

    Every send raises ConfigurationError (the message is invalid and nothing was sent),
    RouteNotFoundError, NameServerUnreachableError, RequestError (the broker refused the message),
    SendError (it is not stored), its subclass SendUnknownError (it may be stored), or ClosedError.
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
        """Prepare the producer. Nothing is connected before the first call.

        `group`, `timeout_ms`, `retries`, `retry_unsafe`, `delay_level_max` and `listener` are
        described at `ProducerOptions`. `trace` is True to write traces to RMQ_SYS_TRACE_TOPIC, or
        the name of another topic. The other arguments are those of `Cluster`. Raises
        ConfigurationError for an invalid value.
        """
        super().__init__(name_servers, credentials=credentials, clock=clock, tls=tls, rng=rng)
        next_id = make_unique_ids(clock).make_id
        self.trace: Tracing | None = None
        trace_topic = parse_trace_option(trace)
        if trace_topic is not None:
            self.trace = Tracing(trace_topic, clock, next_id)
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
        self.callbacks: BrokerCallbacks = BrokerCallbacks(self, self.group, listener)
        self.callbacks.trace = self.trace
        self._trace_writer: TraceWriter | None = None
        if self.trace is not None:
            self._trace_writer = TraceWriter(self, self._sender, self.trace)

    send: Final = sender_method(Sender.send_message)
    send_oneway: Final = sender_method(Sender.send_oneway)
    send_batch: Final = sender_method(Sender.send_batch)
    recall: Final = sender_method(Sender.recall)

    def send_encoded(
        self, topic: str, body: bytes | memoryview, *, queue: MessageQueue | None = None
    ) -> SendResult:
        """Send messages of one topic that are already encoded as one batch.

        `body` is the encoded batch (`record.batch`), in which each message has its UNIQ_KEY. It
        goes to `queue`; None means a queue that the producer chooses. Either all messages are
        stored or none. Returns the result of the first one. The messages are not checked, because
        this is for code that makes many messages at once. Raises what every send raises.
        """
        sender = self._sender
        properties = f"{WAIT}\x01true\x02"
        outgoing = OutgoingMessage(
            check_topic_cached(topic), body, properties, sender.next_id(), 0, 0, True
        )
        return self.run(sender.send_with_retries(outgoing, ("",), queue, batch=True))[0]

    def send_outgoing(
        self, outgoing: OutgoingMessage, *, queue: MessageQueue | None = None
    ) -> SendResult:
        """Send a message that is already encoded, with the id that it has.

        It goes to `queue`, or to a queue that the producer chooses. Raises what every send raises.
        """
        return self.run(self._sender.send_outgoing(outgoing, queue))

    def request(
        self,
        topic: str | Message,
        body: Body | None = None,
        *,
        timeout_s: float = REPLY_TIMEOUT_S,
        **options: Unpack[MessageOptions],
    ) -> StoredMessage:
        """Send a message, and return the reply of the consumer that receives it.

        The reply must arrive within `timeout_s` seconds, counted from the start of the call.
        `options` are the options of a message, as those of `send`. Raises what every send raises,
        and RequestTimeoutError if no reply arrives in time; its text says whether the request is
        stored. A reply that arrives later is dropped.
        """
        check_number("timeout_s", timeout_s, 0.001, whole=False)
        outgoing = self._sender.assign_id(make_message(topic, body, **options))
        return self.callbacks.request(outgoing, self.send_outgoing, timeout_s)

    def transaction(
        self,
        topic: str | Message,
        body: Body | None = None,
        *,
        queue: MessageQueue | None = None,
        check_after_s: int | None = None,
        **options: Unpack[MessageOptions],
    ) -> "Transaction":
        """Return a context manager that sends a message in a transaction.

        The message goes to `queue`; None means a queue that the producer chooses. Consumers receive
        it after the block has ended without an error. `check_after_s` is how many seconds the
        broker waits before it asks for the state of the transaction; None means its
        transactionTimeOut. A commit after that time may be refused. `options` are the options of a
        message, without delays. Raises ConfigurationError for an invalid argument.
        """
        if queue is not None:
            check_destination(topic.topic if isinstance(topic, Message) else topic, queue)

        def send(prepared: OutgoingMessage) -> Conversation[SendResult]:
            return self._sender.send_outgoing(prepared, queue)

        outgoing = self._sender.assign_id(make_message(topic, body, **options))
        return Transaction(self, self.callbacks, outgoing, send, check_after_s)

    def send_in_transaction(
        self, message: Message, argument: Any = None, *, check_after_s: int | None = None
    ) -> TransactionResult:
        """Send a message in a transaction that the listener of this producer executes.

        This is RocketMQ's form of a transaction. The prepared message is stored, the listener's
        `execute_local` is called with `message`, the transaction id and `argument`, and the
        transaction is committed or rolled back as it returns. If the broker has not stored the
        message safely, it is rolled back without calling the listener. `check_after_s` is how many
        seconds the broker waits before it asks for the state.

        Raises what every send raises, and ConfigurationError without a listener.
        """
        self.callbacks.expect_listener()
        outgoing = self._sender.assign_id(
            expect_one_message(message, Message, "send_in_transaction")
        )
        return self.run(
            self.callbacks.send_in_transaction(
                message, outgoing, argument, check_after_s, self._sender.send_outgoing
            )
        )

    def answer_checks(self, *topics: str) -> None:
        """Register this producer with the brokers of some topics, before it sends there.

        The brokers may then send it the checks of transactions that other processes of its group
        did not end. Without topics, register with the brokers that create topics. Raises
        RouteNotFoundError, and ConfigurationError without a listener.
        """
        self.callbacks.expect_listener()
        for topic in topics or (DEFAULT_TOPIC,):
            self.callbacks.register(topic)

    def close(self) -> None:
        """Close the producer: wait for running checks, write the last traces, and disconnect.

        Further calls raise ClosedError. Safe to call twice.
        """
        self.callbacks.close()
        if self._trace_writer is not None:
            self._trace_writer.close()
        super().close()


class BrokerCallbacks(Transactions):
    """The transactions and open requests of a blocking producer, for which brokers call it back.

    Brokers send it transaction checks and replies, on the connections of a heartbeat thread, which
    the first transaction or request starts. Threads may share it.
    """

    def __init__(self, cluster: Cluster, group: str, listener: TransactionListener | None) -> None:
        """Begin without a heartbeat thread, which the first `register` starts.

        `listener` answers the questions of brokers about transactions; it may be None.
        """
        self._lock = threading.Lock()
        super().__init__(cluster.directory, group, listener, lock=self._lock)
        self._cluster = cluster
        self._heartbeat_thread: HeartbeatThread | None = None
        self._check_executor = ThreadPoolExecutor(1, "sluicemq transaction check")
        self._registrations: dict[str, Future[Any]] = {}
        """For each topic, the future of the first heartbeats to its brokers."""
        self._pending_replies: dict[str, ReplyFuture] = {}
        """The futures of replies that are waited for, by correlation id."""

    def register(self, topic: str) -> tuple[HeartbeatThread, "Future[Any]"]:
        """Make the producer known to the brokers of a topic, so that they can send requests to it.

        If the topic does not exist, these are the brokers that create it on the first send. Returns
        (heartbeat thread, a future that is done when the brokers have responded). Raises
        RouteNotFoundError.
        """
        if topic not in self._registrations or self._heartbeat_thread is None:
            self._cluster.route(topic, create=True)
            with self._lock:
                if self._heartbeat_thread is None:
                    self._heartbeat_thread = HeartbeatThread(
                        make_client_id(self._cluster.clock),
                        credentials=self._cluster.credentials,
                        connect=SocketNetwork(self._cluster.tls).dial,
                        on_request=self._on_broker_request,
                        outages=self._cluster.directory.outages,
                    )
            addresses = self._cluster.routes.broker_addresses([topic])
            self._heartbeat_thread.add_producer_group(self.group)
            self._heartbeat_thread.update_addresses(addresses)
            self._registrations[topic] = self._heartbeat_thread.send_heartbeats()
        return self._heartbeat_thread, self._registrations[topic]

    def send_prepared(
        self, outgoing: OutgoingMessage, check_after_s: int | None, send: SendPrepared
    ) -> Conversation[tuple[PreparedMessageLocation, SendResult]]:
        """Register with the brokers of the topic, then send the prepared message.

        A broker that has the message can send checks only to registered producers. See
        `Transactions.send_prepared`.
        """
        self.register(outgoing.topic)
        return super().send_prepared(outgoing, check_after_s, send)

    def request(
        self,
        outgoing: OutgoingMessage,
        send: Callable[[OutgoingMessage], SendResult],
        timeout_s: float,
    ) -> StoredMessage:
        """Send a message as a request, and return the reply of the consumer that processes it.

        `send` sends it. Raises RequestTimeoutError if no reply arrives within `timeout_s` seconds,
        and what `send` raises.
        """
        started_s = self._cluster.clock.monotonic_s()
        heartbeat_thread, registration = self.register(outgoing.topic)
        correlation_id = secrets.token_hex(16)
        request = make_request_message(
            outgoing, heartbeat_thread.client_id, correlation_id, int(timeout_s * 1000)
        )
        reply: Future[StoredMessage] = Future()
        self._pending_replies[correlation_id] = reply
        stored_in = ""
        try:
            # A broker can push a reply only if it knows the client before.
            registration.result(self._cluster.timeout_s)
            send_result = send(request)
            stored_in = f"queue {send_result.queue.queue_id} of {send_result.queue.broker}"
            remaining_s = timeout_s - (self._cluster.clock.monotonic_s() - started_s)
            return reply.result(max(0.0, remaining_s))
        except TimeoutError as error:
            raise reply_timeout_error(
                request.topic, request.message_id, stored_in, timeout_s
            ) from error
        finally:
            self._pending_replies.pop(correlation_id, None)

    def _on_broker_request(
        self, command: Command, address: str, respond: Callable[[Command], None]
    ) -> bool:
        """Handle a transaction check or a reply that a broker sends.

        Returns False for any other request. This runs on the heartbeat thread, so transaction
        checks are answered on another thread. The response to a reply is passed to `respond`.
        """
        try:
            if command.code == RequestCode.CHECK_TRANSACTION_STATE:
                self._submit_check(command, address)
                return True
            if command.code != RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
                return False
            respond(accept_pushed_reply(command, self._pending_replies))
        except ProtocolError as error:
            _log.warning("cannot decode a request of the broker %s: %s", address, error)
            respond(Command(ResponseCode.SYSTEM_ERROR, remark=str(error)))
        except RuntimeError:
            _log.debug("ignored a transaction check, because the producer is being closed")
        return True

    def _submit_check(self, command: Command, address: str) -> None:
        """Let the check thread answer a broker's question for the state of a transaction.

        A question to another producer group is ignored. Raises ProtocolError if the request cannot
        be decoded, and RuntimeError after `close`.
        """
        transaction_check = parse_check_request(command)
        if transaction_check.location.group != self.group:
            return

        def answer() -> None:
            try:
                response = self._cluster.run(self.answer_check(transaction_check, address))
                if response is not None and self._heartbeat_thread is not None:
                    self._heartbeat_thread.send_oneway(address, response)
            except BaseException:  # noqa: BLE001 - the executor's future is not awaited
                _log.exception(
                    "transaction %s could not be checked: the broker will ask again",
                    transaction_check.location.transaction_id,
                )

        self._check_executor.submit(answer)

    def close(self) -> None:
        """Drop transaction checks that have not started, wait for the running one, and unregister.

        Replies are not accepted any more.
        """
        self._check_executor.shutdown(wait=True, cancel_futures=True)
        if self._heartbeat_thread is not None:
            self._heartbeat_thread.close()


class Transaction(TransactionBlock):
    """A message and its local transaction, as a context manager: `Producer.transaction` returns it.

    Entering the block sends the prepared message, and raises what a send raises. Leaving it commits
    the message, and an exception rolls it back. `rollback` and `unknown` change how leaving without
    an exception ends the transaction. Leaving raises RequestError if the broker refuses. If the
    broker does not respond, nothing is raised: the broker sends a transaction check later.
    """

    def __init__(
        self,
        cluster: Cluster,
        transactions: Transactions,
        outgoing: OutgoingMessage,
        send: SendPrepared,
        check_after_s: int | None,
    ) -> None:
        super().__init__(transactions, outgoing, send, check_after_s)
        self._cluster = cluster

    def __enter__(self) -> Self:
        self._cluster.run(self.enter())
        return self

    def __exit__(self, error_class: object, error: BaseException | None, traceback: object) -> None:
        self._cluster.run(self.leave(error))


class TraceWriter:
    """Writes the trace records of one producer, on a thread that starts with the first record.

    It writes about once a second, or when there are `RECORDS_MAX` records. Errors are logged and
    never reach the application.
    """

    def __init__(
        self, cluster: Cluster, sender: Sender, tracing: Tracing, linger_s: float = LINGER_S
    ) -> None:
        """Prepare to write the records of `tracing` with `sender`.

        A record is written `linger_s` seconds after it was made, or earlier if many have been made.
        """
        self.tracing = tracing
        self._cluster = cluster
        self._sender = sender
        self._linger_s = linger_s
        self._has_records = threading.Event()
        self._is_full = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        tracing.on_note = self._on_record

    def _on_record(self) -> None:
        """Start the writing thread at the first record, and wake it for later ones.

        `tracing` calls this for each record, on the thread that sends a message.
        """
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._is_closed:
                    self._thread = threading.Thread(
                        target=self._run, name="sluicemq trace", daemon=True
                    )
                    self._thread.start()
        if not self._has_records.is_set():
            self._has_records.set()
        if len(self.tracing) >= RECORDS_MAX and not self._is_full.is_set():
            self._is_full.set()

    def _run(self) -> None:
        """Write records until the writer is closed and none are left.

        If writing fails after `close`, the remaining records are given up.
        """
        while not self._is_closed or self.tracing:
            self._has_records.wait()
            self._has_records.clear()
            self._is_full.wait(self._linger_s)
            if not self._is_closed:
                self._is_full.clear()
            if not self.flush() and self._is_closed:
                return

    def flush(self) -> bool:
        """Write all records, and return whether that succeeded.

        No Exception is raised: an unexpected error is logged. Records that are left are written
        later.
        """
        try:
            return self._cluster.run(self._sender.write_traces(self.tracing))
        except Exception:  # noqa: BLE001 - tracing must not fail the producer
            _log.exception("traces cannot be written")
            return False

    def close(self) -> None:
        """Write the remaining records, for up to `_TRACE_CLOSE_S` seconds, and end the thread.

        Records that are left then are dropped.
        """
        with self._lock:
            self._is_closed = True
            thread = self._thread
        if thread is not None:
            self._is_full.set()
            self._has_records.set()
            thread.join(_TRACE_CLOSE_S)
        self.tracing.close()
