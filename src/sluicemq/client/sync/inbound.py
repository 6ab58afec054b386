"""What brokers send to a blocking producer: questions about its transactions (39), and replies to
its requests (326).

    with producer.transaction("orders", body) as tx:    # half message stored
        database.commit()                                # leaving commits, an exception rolls back

They come on a connection that heartbeats, so the first transaction or request starts the keeper's
thread; a listener's `check` runs on one thread more. Programs without them have neither.
"""

import logging
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from sluicemq.client.core.answers import SendResult
from sluicemq.client.core.messages import Outgoing
from sluicemq.client.core.replies import Reply, as_request, no_reply, take_reply
from sluicemq.client.core.talks import Talk
from sluicemq.client.core.transactions import (
    HalfPlace,
    Question,
    SendHalf,
    TransactionBlock,
    TransactionListener,
    Transactions,
    end_transaction,
    question_of,
)
from sluicemq.client.identity import make_client_id
from sluicemq.client.keeper import Keeper
from sluicemq.client.sync.cluster import Cluster
from sluicemq.errors import ProtocolError
from sluicemq.model.message import StoredMessage
from sluicemq.net.network import Sockets
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import Command

_log = logging.getLogger("sluicemq.client")


class Inbound(Transactions):
    """The transactions and open requests of one blocking producer. Safe to share among threads."""

    def __init__(self, cluster: Cluster, group: str, listener: TransactionListener | None) -> None:
        self._lock = threading.Lock()
        super().__init__(cluster.directory, group, listener, guard=self._lock)
        self._cluster = cluster
        self._keeper: Keeper | None = None
        self._checks = ThreadPoolExecutor(1, "sluicemq transaction check")
        self._known: dict[str, Future[Any]] = {}
        self._open: dict[str, Reply] = {}

    def introduce(self, topic: str) -> tuple[Keeper, "Future[Any]"]:
        """Makes this producer known to the brokers of a topic; the future ends when they have heard
        of it. Raises RouteNotFoundError."""
        if topic not in self._known or self._keeper is None:
            self._cluster.route(topic, create=True)
            with self._lock:
                if self._keeper is None:
                    self._keeper = Keeper(
                        make_client_id(self._cluster.clock),
                        credentials=self._cluster.credentials,
                        connect=Sockets(self._cluster.tls).dial,
                        on_check=self._on_check,
                        on_ask=self._on_ask,
                    )
            self._keeper.produce(self.group)
            self._keeper.use(self._cluster.routes.addresses([topic]))
            self._known[topic] = self._keeper.beat()
        return self._keeper, self._known[topic]

    def begin(
        self, outgoing: Outgoing, check_after_s: int | None, send: SendHalf
    ) -> Talk[tuple[HalfPlace, SendResult]]:
        """Sends the half message, when its brokers know whom to ask."""
        self.introduce(outgoing.topic)
        return super().begin(outgoing, check_after_s, send)

    def _on_check(self, command: Command, address: str) -> None:
        """Called on the keeper's thread."""
        try:
            question = question_of(command)
        except ProtocolError as error:
            _log.warning("a question about a transaction from %s is odd: %s", address, error)
            return
        if question.place.group == self.group:
            try:
                self._checks.submit(self._answer, question, address)
            except RuntimeError:
                _log.debug("asked about a transaction while the producer closes")

    def _answer(self, question: Question, address: str) -> None:
        state = self._cluster.run(self.check(question))
        if state is not None and self._keeper is not None:
            self.trace_end(question.place, state, address, question.message.properties)
            self._keeper.tell(address, end_transaction(question.place, state, is_check=True))

    def request(
        self, outgoing: Outgoing, send: Callable[[Outgoing], SendResult], timeout_s: float
    ) -> StoredMessage:
        """The reply. Raises RequestTimeoutError, and what `send` raises."""
        began_s = self._cluster.clock.monotonic_s()
        keeper, introduced = self.introduce(outgoing.topic)
        correlation_id = secrets.token_hex(16)
        request = as_request(outgoing, keeper.client_id, correlation_id, int(timeout_s * 1000))
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
            raise no_reply(request.topic, request.message_id, where, timeout_s) from error
        finally:
            self._open.pop(correlation_id, None)

    def _on_ask(self, command: Command, answer: Callable[[Command], None]) -> bool:
        """Called on the keeper's thread."""
        if command.code != RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
            return False
        try:
            answer(take_reply(command, self._open))
        except ProtocolError as error:
            answer(Command(ResponseCode.SYSTEM_ERROR, remark=str(error)))
        return True

    def close(self) -> None:
        """Answers no more questions, takes no more replies; checks that run end first."""
        self._checks.shutdown(wait=True, cancel_futures=True)
        if self._keeper is not None:
            self._keeper.close()


class Transaction(TransactionBlock):
    """One message with its local transaction; see `client.aio.producer.Transaction`."""

    def __init__(self, cluster: Cluster, *block: Any) -> None:
        super().__init__(*block)
        self._cluster = cluster

    def __enter__(self) -> Self:
        self._cluster.run(self.entering())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cluster.run(self.leaving(error))
