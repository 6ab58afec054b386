"""The blocking producer: for scripts, threads and Spark workers.

The same decisions as the asyncio producer (queue choice, retries, deadline, checks) from the same
core; every call waits for its answer. No background thread: nothing is sent that was not asked for
(transactions, which brokers ask about, have one: `client.sync.transactions`).

    with Producer("127.0.0.1:9876") as producer:
        producer.send("flights", body, tag="UA")
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sluicemq.client.core import messages as batches
from sluicemq.client.core import requests
from sluicemq.client.core.answers import (
    SUCCESS,
    SendResult,
    expect_success,
    fields_of,
    send_results,
)
from sluicemq.client.core.directory import master_address
from sluicemq.client.core.messages import (
    DELAY_LEVEL_MAX,
    Outgoing,
    checked_group,
    checked_topic,
    make_message,
    prepare,
    recalled,
)
from sluicemq.client.core.names import Credentials, signed
from sluicemq.client.core.replies import REPLY_TIMEOUT_S
from sluicemq.client.core.sending import (
    RETRIES,
    SEND_TIMEOUT_MS,
    Attempts,
    QueueChooser,
    Selector,
    choose_by,
    choose_by_key,
)
from sluicemq.client.core.tracing import Tracing, trace_topic
from sluicemq.client.core.transactions import TransactionListener, TransactionResult
from sluicemq.client.identity import MessageIds
from sluicemq.client.sync.cluster import Cluster
from sluicemq.client.sync.replies import Requester
from sluicemq.client.sync.tracing import TraceWriter
from sluicemq.client.sync.transactions import Transaction, Transactions
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import (
    ConnectionLostError,
    RequestError,
    RequestTimeoutError,
    SluiceError,
)
from sluicemq.model.message import WAIT, Message, StoredMessage
from sluicemq.model.topic import DEFAULT_TOPIC, MessageQueue
from sluicemq.net.blocking import BlockingChannel
from sluicemq.net.tls import Tls
from sluicemq.wire.frames import Command

DEFAULT_GROUP = "sluicemq-producer"


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
        self.group = checked_group(group)
        self.timeout_ms = timeout_ms
        self.retries = retries
        self.delay_level_max = delay_level_max
        self._ids = MessageIds(clock)
        self._chooser = QueueChooser()
        self.transactions = Transactions(self, self.group, listener)
        self._requester = Requester(self, self.group)
        self.trace: Tracing | None = None
        self._trace_writer: TraceWriter | None = None
        topic = trace_topic(trace)
        if topic is not None:
            self.trace = self.transactions.trace = Tracing(topic, clock, self._ids.next)
            self._trace_writer = TraceWriter(self.trace, self._send_trace)

    def send(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        tag: str | None = None,
        keys: str | Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        **rare: Any,
    ) -> SendResult:
        """Sends one message and waits until it is stored. `rare`: see `make_message`."""
        message = make_message(
            topic, body, tag=tag, keys=_keys(keys), properties=properties, **rare
        )
        outgoing = self._prepare(message)
        if selector is not None:
            queue = choose_by(selector, self.write_queues(message.topic), message)
        return self._deliver(outgoing, (outgoing.message_id,), queue=queue)[0]

    def send_oneway(
        self, topic: str | Message, body: bytes | str | None = None, **rest: Any
    ) -> None:
        """Hands one message to the network and does not wait: it may get lost."""
        outgoing = self._prepare(make_message(topic, body, **rest))
        queue = self._choose(outgoing, self.clock.monotonic_s(), None)
        address = self._master(queue)
        channel = self.take(address, self.timeout_s)
        channel.send(self._request(outgoing, queue, batch=False, oneway=True))
        self.give(address, channel)

    def send_batch(
        self, messages: Sequence[Message], *, queue: MessageQueue | None = None
    ) -> list[SendResult]:
        """Sends messages of one topic in requests of at most 1 MiB each; one result a message.

        Each request is stored all or nothing; when a later one fails, the earlier ones are stored
        and the exception's note tells how many. Raises SendError before sending when the messages
        may not be in one batch.
        """
        batches.check_batch(messages)
        parts = [prepare(one, self._ids.next(), compress_from_bytes=0) for one in messages]
        results: list[SendResult] = []
        for run in batches.split(parts):
            ids = tuple(part.message_id for part in run)
            try:
                joined = batches.join(run, self._ids.next())
                results += self._deliver(joined, ids, queue=queue, batch=True)
            except SluiceError as error:
                error.add_note(f"{len(results)} of {len(parts)} messages of this batch are stored.")
                raise
        return results

    def send_encoded(
        self, topic: str, body: bytes | memoryview, *, queue: MessageQueue | None = None
    ) -> SendResult:
        """Sends messages of one topic that are laid out as one batch already (`record.batch`), each
        with its UNIQ_KEY: all of them are stored, or none. The result is that of the first one.
        For who makes many messages at once and has checked them."""
        properties = f"{WAIT}\x01true\x02"
        outgoing = Outgoing(checked_topic(topic), body, properties, self._ids.next(), 0, 0, True)
        return self._deliver(outgoing, ("",), queue=queue, batch=True)[0]

    def send_outgoing(self, outgoing: Outgoing, *, queue: MessageQueue | None = None) -> SendResult:
        """Sends a message that is made ready already, with an id of the caller's choice."""
        return self._deliver(outgoing, (outgoing.message_id,), queue=queue)[0]

    def recall(self, handle: str) -> str:
        """Takes a timed message back by the `recall_handle` of its send; see the asyncio one."""
        found = recalled(handle)
        self.route(found.topic)
        address = self._master(MessageQueue(found.topic, found.broker, 0))
        answer = self.call(address, requests.recall(self.group, found))
        if self.trace is not None:
            is_taken = answer.code == SUCCESS
            self.trace.recalled(self.group, found.topic, found.unique_id, success=is_taken)
        return fields_of(expect_success(answer, address)).get("msgId", found.unique_id)

    def request(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        timeout_s: float = REPLY_TIMEOUT_S,
        **rest: Any,
    ) -> StoredMessage:
        """Sends a message and waits for the reply of whoever consumes it; see the asyncio one."""

        def send(made: Outgoing) -> SendResult:
            return self._deliver(made, (made.message_id,), queue=None)[0]

        outgoing = self._prepare(make_message(topic, body, **rest))
        return self._requester.request(outgoing, send, timeout_s)

    def _prepare(self, message: Message) -> Outgoing:
        return prepare(message, self._ids.next(), delay_level_max=self.delay_level_max)

    def transaction(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        queue: MessageQueue | None = None,
        check_after_s: int | None = None,
        **rest: Any,
    ) -> Transaction:
        """A message that becomes visible when the `with` block commits: see `Transaction`.

        `check_after_s`: ask this group not before so many seconds how it ended (the broker's
        transactionTimeOut without it); a commit that comes later may be refused. `rest`: see
        `make_message`; delays are refused. Raises ConfigurationError here.
        """

        def send(half: Outgoing) -> SendResult:
            return self._deliver(half, (half.message_id,), queue=queue)[0]

        outgoing = prepare(make_message(topic, body, **rest), self._ids.next())
        return Transaction(self.transactions, outgoing, send, check_after_s)

    def send_in_transaction(
        self, message: Message, argument: Any = None, *, check_after_s: int | None = None
    ) -> TransactionResult:
        """RocketMQ's form: stores the half message, lets the listener execute the local
        transaction, tells the broker how that ended. Raises as `send`, and ConfigurationError
        without a listener."""
        self.transactions.expect_listener()
        outgoing = prepare(message, self._ids.next())

        def send(half: Outgoing) -> SendResult:
            return self._deliver(half, (half.message_id,), queue=None)[0]

        place, result = self.transactions.begin(outgoing, check_after_s, send)
        return self.transactions.run(place, result, message, argument)

    def answer_checks(self, *topics: str) -> None:
        """Makes this producer known to the brokers of the topics before it sends there: they may
        ask its listener about transactions that other processes of the group have left. Without
        topics: to the brokers that create topics. Raises RouteNotFoundError.
        """
        self.transactions.expect_listener()
        for topic in topics or (DEFAULT_TOPIC,):
            self.transactions.introduce(topic)

    def _send_trace(self, message: Message) -> None:
        """On the trace writer's thread."""
        self.route(message.topic)
        outgoing = self._prepare(message)
        self._deliver(outgoing, (outgoing.message_id,), queue=None)

    def close(self) -> None:
        """Closes every connection; further calls raise ClosedError."""
        self.transactions.close()
        self._requester.close()
        if self._trace_writer is not None:
            self._trace_writer.close()
        super().close()

    def _choose(self, outgoing: Outgoing, now_s: float, last_broker: str | None) -> MessageQueue:
        queues = self.write_queues(outgoing.topic)
        if outgoing.sharding_key:
            return choose_by_key(queues, outgoing.sharding_key)
        return self._chooser.choose(queues, now_s, last_broker)

    def _deliver(
        self,
        outgoing: Outgoing,
        ids: tuple[str, ...],
        *,
        queue: MessageQueue | None,
        batch: bool = False,
    ) -> list[SendResult]:
        attempts = Attempts(self.clock.monotonic_s(), self.timeout_ms, self.retries)
        while True:
            now_s = self.clock.monotonic_s()
            target = queue or self._choose(outgoing, now_s, attempts.last_broker)
            written = False
            try:
                address = self._master(target)
                channel = self.take(address, max(0.001, attempts.remaining_s(now_s)))
                written = True
                is_brief = batch and len(ids) == 1
                request = self._request(outgoing, target, batch=batch, is_brief=is_brief)
                answer = self._exchange(address, channel, request)
                results = send_results(answer, target, ids, address)
            except (ConnectionLostError, RequestTimeoutError, RequestError) as error:
                failed_s = self.clock.monotonic_s()
                self._chooser.failed(target.broker, failed_s)
                self.routes.forget(outgoing.topic)
                if not attempts.failed(target.broker, error, failed_s, written=written):
                    if self.trace is not None:
                        cost_s = failed_s - now_s
                        self.trace.failed(self.group, outgoing, ids, cost_s, batch=batch)
                    raise attempts.verdict(outgoing.topic, outgoing.message_id, error) from error
            else:
                done_s = self.clock.monotonic_s()
                cost_s = done_s - now_s
                self._chooser.answered(target.broker, cost_s, done_s)
                if self.trace is not None:
                    self.trace.sent(
                        self.group, outgoing, results, address, answer, cost_s, batch=batch
                    )
                return results

    def _exchange(self, address: str, channel: BlockingChannel, request: Command) -> Command:
        try:
            answer = channel.call(request)
        except BaseException:
            channel.close()
            raise
        self.give(address, channel)
        return answer

    def _request(
        self,
        outgoing: Outgoing,
        queue: MessageQueue,
        *,
        batch: bool,
        oneway: bool = False,
        is_brief: bool = False,
    ) -> Command:
        command = requests.send(
            self.group,
            queue,
            outgoing.properties,
            outgoing.body,
            sys_flag=outgoing.sys_flag,
            flag=outgoing.flag,
            born_time_ms=self.clock.now_ms(),
            batch=batch,
            oneway=oneway,
            is_brief=is_brief,
        )
        return signed(command, self.credentials)

    def _master(self, queue: MessageQueue) -> str:
        route = self.routes.get(queue.topic) or self.route(queue.topic, create=True)
        address = master_address(route, queue.broker)
        if address is None:
            raise ConnectionLostError(
                f"the master of {queue.broker!r} is not in the route of {queue.topic!r}.",
                cure="See sluice cluster list.",
            )
        return address


def _keys(keys: str | Sequence[str]) -> str | tuple[str, ...]:
    return keys if isinstance(keys, str) else tuple(keys)
