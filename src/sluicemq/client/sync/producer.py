"""The blocking producer: for scripts, threads and Spark workers.

The same decisions as the asyncio producer (queue choice, retries, deadline, checks) from the same
core; every call waits for its answer. No background thread: nothing is sent that was not asked for
(transactions and requests, which brokers come back to, have one: `client.sync.inbound`).

    with Producer("127.0.0.1:9876") as producer:
        producer.send("flights", body, tag="UA")
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Unpack

from sluicemq.client.core.answers import SendResult
from sluicemq.client.core.messages import (
    DELAY_LEVEL_MAX,
    MessageOptions,
    Outgoing,
    checked_topic,
    make_message,
)
from sluicemq.client.core.names import Credentials
from sluicemq.client.core.replies import REPLY_TIMEOUT_S
from sluicemq.client.core.sending import RETRIES, SEND_TIMEOUT_MS, Selector, Sender
from sluicemq.client.core.talks import Talk
from sluicemq.client.core.tracing import LINGER_S, RECORDS_MAX, Tracing, trace_hint, trace_topic
from sluicemq.client.core.transactions import TransactionListener, TransactionResult
from sluicemq.client.identity import MessageIds
from sluicemq.client.sync.cluster import Cluster
from sluicemq.client.sync.inbound import Inbound, Transaction
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.model.message import WAIT, Message, StoredMessage
from sluicemq.model.topic import DEFAULT_TOPIC, MessageQueue
from sluicemq.net.tls import Tls

_log = logging.getLogger("sluicemq.client")
DEFAULT_GROUP = "sluicemq-producer"
_CLOSE_S: Final = 3.0


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
        group: str = DEFAULT_GROUP,
        credentials: Credentials | tuple[str, str] | None = None,
        timeout_ms: int = SEND_TIMEOUT_MS,
        retries: int = RETRIES,
        delay_level_max: int = DELAY_LEVEL_MAX,
        listener: TransactionListener | None = None,
        trace: bool | str = False,
        clock: Clock = SYSTEM_CLOCK,
        tls: Tls | bool | None = None,
    ) -> None:
        super().__init__(name_servers, credentials=credentials, clock=clock, tls=tls)
        next_id = MessageIds(clock).next
        topic = trace_topic(trace)
        self.trace = None if topic is None else Tracing(topic, clock, next_id)
        self._sender = Sender(
            self.directory,
            group,
            next_id,
            timeout_ms=timeout_ms,
            retries=retries,
            delay_level_max=delay_level_max,
            trace=self.trace,
        )
        self.group = self._sender.group
        self.timeout_ms = timeout_ms
        self.inbound = Inbound(self, self.group, listener)
        self.inbound.trace = self.trace
        self._trace_writer = None if self.trace is None else TraceWriter(self.trace, self._trace)

    def send(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        **options: Unpack[MessageOptions],
    ) -> SendResult:
        """Sends one message and waits until it is stored. `options`: see `make_message`."""
        message = make_message(topic, body, **options)
        if selector is not None:
            return self.run(self._sender.send_selected(message, selector))
        return self.run(self._sender.send(self._prepare(message), queue))

    def send_oneway(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        **options: Unpack[MessageOptions],
    ) -> None:
        """Hands one message to the network and does not wait: it may get lost."""
        outgoing = self._prepare(make_message(topic, body, **options))
        self.run(self._sender.send_oneway(outgoing))

    def send_batch(
        self, messages: Sequence[Message], *, queue: MessageQueue | None = None
    ) -> list[SendResult]:
        """Sends messages of one topic in requests of at most 1 MiB each; one result a message.

        Each request is stored all or nothing; when a later one fails, the earlier ones are stored
        and the exception's note tells how many. Raises SendError before sending when the messages
        may not be in one batch.
        """
        return self.run(self._sender.send_batch(messages, queue))

    def send_encoded(
        self, topic: str, body: bytes | memoryview, *, queue: MessageQueue | None = None
    ) -> SendResult:
        """Sends messages of one topic that are laid out as one batch already (`record.batch`), each
        with its UNIQ_KEY: all of them are stored, or none. The result is that of the first one.
        For who makes many messages at once and has checked them."""
        sender, properties = self._sender, f"{WAIT}\x01true\x02"
        outgoing = Outgoing(checked_topic(topic), body, properties, sender.next_id(), 0, 0, True)
        return self.run(sender.deliver(outgoing, ("",), queue, batch=True))[0]

    def send_outgoing(self, outgoing: Outgoing, *, queue: MessageQueue | None = None) -> SendResult:
        """Sends a message that is made ready already, with an id of the caller's choice."""
        return self.run(self._sender.send(outgoing, queue))

    def recall(self, handle: str) -> str:
        """Takes a timed message back by the `recall_handle` of its send; see the asyncio one."""
        return self.run(self._sender.recall(handle))

    def request(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        timeout_s: float = REPLY_TIMEOUT_S,
        **options: Unpack[MessageOptions],
    ) -> StoredMessage:
        """Sends a message and waits for the reply of whoever consumes it; see the asyncio one."""
        outgoing = self._prepare(make_message(topic, body, **options))
        return self.inbound.request(outgoing, self.send_outgoing, timeout_s)

    def transaction(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        queue: MessageQueue | None = None,
        check_after_s: int | None = None,
        **options: Unpack[MessageOptions],
    ) -> Transaction:
        """A message that becomes visible when the `with` block commits: see `Transaction`.

        `check_after_s`: ask this group not before so many seconds how it ended (the broker's
        transactionTimeOut without it); a commit that comes later may be refused. `options`: see
        `make_message`; delays are refused. Raises ConfigurationError here.
        """

        def send(half: Outgoing) -> Talk[SendResult]:
            return self._sender.send(half, queue)

        outgoing = self._prepare(make_message(topic, body, **options))
        return Transaction(self, self.inbound, outgoing, send, check_after_s)

    def send_in_transaction(
        self, message: Message, argument: Any = None, *, check_after_s: int | None = None
    ) -> TransactionResult:
        """RocketMQ's form: stores the half message, lets the listener execute the local
        transaction, tells the broker how that ended. Raises as `send`, and ConfigurationError
        without a listener."""
        self.inbound.expect_listener()
        outgoing, send = self._prepare(message), self._sender.send
        return self.run(self.inbound.send(message, outgoing, argument, check_after_s, send))

    def answer_checks(self, *topics: str) -> None:
        """Makes this producer known to the brokers of the topics before it sends there: they may
        ask its listener about transactions that other processes of the group have left. Without
        topics: to the brokers that create topics. Raises RouteNotFoundError.
        """
        self.inbound.expect_listener()
        for topic in topics or (DEFAULT_TOPIC,):
            self.inbound.introduce(topic)

    def _prepare(self, message: Message) -> Outgoing:
        return self._sender.prepare(message, self._sender.next_id())

    def _trace(self, message: Message) -> None:
        """On the trace writer's thread."""
        self.route(message.topic)
        self.send(message)

    def close(self) -> None:
        """Closes every connection; further calls raise ClosedError."""
        self.inbound.close()
        if self._trace_writer is not None:
            self._trace_writer.close()
        super().close()


class TraceWriter:
    """Writes what one producer has noted: a thread that begins with the first note, sends about
    once a second, and never lets an error reach whom it tells of. `send` stores a message, or
    raises."""

    def __init__(
        self, tracing: Tracing, send: Callable[[Message], None], linger_s: float = LINGER_S
    ) -> None:
        self.tracing = tracing
        self._send = send
        self._linger_s = linger_s
        self._work = threading.Event()
        self._full = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = self._has_warned = False
        tracing.on_work = self._wake

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
        """Sends all that is noted; False when that failed. Raises nothing."""
        while (batch := self.tracing.take()) is not None:
            try:
                self._send(batch.message)
            except Exception as error:  # noqa: BLE001 - a trace must not disturb what it tells of
                self.tracing.lost(batch.record_count)
                level = logging.DEBUG if self._has_warned else logging.WARNING
                self._has_warned = True
                _log.log(level, "traces cannot be written%s: %s", trace_hint(error), error)
                return False
        return True

    def close(self) -> None:
        """Writes what is left, for a few seconds at most."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._full.set()
            self._work.set()
            thread.join(_CLOSE_S)
        self.tracing.lost(len(self.tracing))
        if self.tracing.dropped:
            _log.warning("%d trace records were not written", self.tracing.dropped)
