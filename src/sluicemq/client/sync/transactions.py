"""Transactions of the blocking producer.

    with producer.transaction("orders", body) as tx:    # half message stored
        database.commit()                                # leaving commits, an exception rolls back

Brokers ask on a connection that heartbeats (39), so the first transaction starts the keeper's
thread; a listener's `check` runs on one thread more. Programs without transactions have neither.
"""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from sluicemq.client.core.answers import SendResult
from sluicemq.client.core.directory import Directory, Routes
from sluicemq.client.core.messages import Outgoing
from sluicemq.client.core.names import Credentials
from sluicemq.client.core.talks import Talk
from sluicemq.client.core.transactions import (
    HalfPlace,
    Question,
    SendHalf,
    TransactionBlock,
    TransactionListener,
    end_transaction,
    question_of,
)
from sluicemq.client.core.transactions import Transactions as Conversations
from sluicemq.client.identity import make_client_id
from sluicemq.client.keeper import Keeper
from sluicemq.clock import Clock
from sluicemq.errors import ProtocolError
from sluicemq.model.topic import TopicRoute
from sluicemq.net.network import Sockets
from sluicemq.net.tls import Tls
from sluicemq.wire.frames import Command

_log = logging.getLogger("sluicemq.client")
T = TypeVar("T")


class Brokers(Protocol):
    """What the transactions need of the producer."""

    directory: Directory
    routes: Routes
    credentials: Credentials | None
    clock: Clock
    timeout_s: float
    tls: Tls | None

    def route(self, topic: str, *, create: bool = False) -> TopicRoute: ...

    def run(self, talk: Talk[T]) -> T: ...


class Transactions(Conversations):
    """The transactions of one blocking producer. Safe to share among threads."""

    def __init__(self, brokers: Brokers, group: str, listener: TransactionListener | None) -> None:
        self._lock = threading.Lock()
        super().__init__(brokers.directory, group, listener, guard=self._lock)
        self._brokers = brokers
        self._keeper: Keeper | None = None
        self._checks: ThreadPoolExecutor | None = None
        self._known: set[str] = set()

    def begin(
        self, outgoing: Outgoing, check_after_s: int | None, send: SendHalf
    ) -> Talk[tuple[HalfPlace, SendResult]]:
        """Sends the half message, when its brokers know whom to ask."""
        self.introduce(outgoing.topic)
        return super().begin(outgoing, check_after_s, send)

    def introduce(self, topic: str) -> None:
        """Lets the brokers of a topic know whom to ask. Raises RouteNotFoundError."""
        if topic in self._known:
            return
        self._brokers.route(topic, create=True)
        with self._lock:
            if self._keeper is None:
                self._checks = ThreadPoolExecutor(1, "sluicemq transaction check")
                self._keeper = Keeper(
                    make_client_id(self._brokers.clock),
                    credentials=self._brokers.credentials,
                    connect=Sockets(self._brokers.tls).dial,
                    on_check=self._on_check,
                )
            self._known.add(topic)
        self._keeper.produce(self.group)
        self._keeper.use(self._brokers.routes.addresses([topic]))
        self._keeper.beat()

    def _on_check(self, command: Command, address: str) -> None:
        """Called on the keeper's thread."""
        try:
            question = question_of(command)
        except ProtocolError as error:
            _log.warning("a question about a transaction from %s is odd: %s", address, error)
            return
        if question.place.group == self.group and self._checks is not None:
            try:
                self._checks.submit(self._answer, question, address)
            except RuntimeError:
                _log.debug("asked about a transaction while the producer closes")

    def _answer(self, question: Question, address: str) -> None:
        state = self._brokers.run(self.check(question))
        if state is not None and self._keeper is not None:
            self.trace_end(question.place, state, address, question.message.properties)
            self._keeper.tell(address, end_transaction(question.place, state, is_check=True))

    def close(self) -> None:
        """Answers no more questions; checks that run end first."""
        if self._checks is not None:
            self._checks.shutdown(wait=True, cancel_futures=True)
        if self._keeper is not None:
            self._keeper.close()


class Transaction(TransactionBlock):
    """One message with its local transaction; see `client.aio.producer.Transaction`."""

    def __init__(self, brokers: Brokers, *block: Any) -> None:
        super().__init__(*block)
        self._brokers = brokers

    def __enter__(self) -> Self:
        self._brokers.run(self.entering())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._brokers.run(self.leaving(error))
