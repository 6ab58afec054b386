"""Transactions of the blocking producer.

    with producer.transaction("orders", body) as tx:    # half message stored
        database.commit()                                # leaving commits, an exception rolls back

Brokers ask on a connection that heartbeats (39), so the first transaction starts the keeper's
thread; a listener's `check` runs on one thread more. Programs without transactions have neither.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, Self

from sluicemq.client.core.answers import SendResult, SendStatus
from sluicemq.client.core.directory import Routes
from sluicemq.client.core.messages import Outgoing
from sluicemq.client.core.names import Credentials, signed
from sluicemq.client.core.transaction_block import AskedGroup, TransactionBlock
from sluicemq.client.core.transactions import (
    HalfPlace,
    Question,
    TransactionListener,
    TransactionResult,
    TransactionState,
    as_half,
    as_state,
    end_transaction,
    is_acknowledged,
    not_safe,
    place_of,
    question_of,
)
from sluicemq.client.identity import make_client_id
from sluicemq.client.keeper import Keeper
from sluicemq.clock import Clock
from sluicemq.errors import (
    ConnectionLostError,
    ProtocolError,
    RequestTimeoutError,
    RouteNotFoundError,
    SluiceError,
)
from sluicemq.model.message import Message
from sluicemq.model.topic import MessageQueue, TopicRoute
from sluicemq.net.blocking import BlockingChannel
from sluicemq.net.network import Sockets
from sluicemq.net.tls import Tls
from sluicemq.wire.frames import Command

_log = logging.getLogger("sluicemq.client")

SendHalf = Callable[[Outgoing], SendResult]


class Brokers(Protocol):
    """What the transactions need of the producer."""

    routes: Routes
    credentials: Credentials | None
    clock: Clock
    timeout_s: float
    tls: Tls | None

    def route(self, topic: str, *, create: bool = False) -> TopicRoute: ...

    def address(self, queue: MessageQueue) -> str: ...

    def call(self, address: str, command: Command, timeout_s: float | None = None) -> Command: ...

    def take(self, address: str, timeout_s: float) -> BlockingChannel: ...

    def give(self, address: str, channel: BlockingChannel) -> None: ...


class Transactions(AskedGroup):
    """The transactions of one blocking producer. Safe to share among threads."""

    def __init__(self, brokers: Brokers, group: str, listener: TransactionListener | None) -> None:
        super().__init__(group, listener)
        self._brokers = brokers
        self._lock = threading.Lock()
        self._keeper: Keeper | None = None
        self._checks: ThreadPoolExecutor | None = None
        self._known: set[str] = set()

    def begin(
        self, outgoing: Outgoing, check_after_s: int | None, send: SendHalf
    ) -> tuple[HalfPlace, SendResult]:
        """Sends the half message. When that fails, a check would roll it back."""
        half = as_half(outgoing, self.group, check_after_s)
        with self._lock:
            self._decisions.begin(half.message_id)
        try:
            self.introduce(half.topic)
            result = send(half)
            return place_of(result, self.group), result
        except BaseException:
            self._decide(half.message_id, TransactionState.ROLLBACK, "")
            raise

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

    def _decide(self, transaction_id: str, state: TransactionState, broker: str) -> None:
        with self._lock:
            self._decisions.end(transaction_id, state, broker)

    def finish(self, place: HalfPlace, state: TransactionState) -> bool:
        """Tells the broker how it ended; False when that is left to a check.

        Raises RequestError when the broker refuses.
        """
        self._decide(place.transaction_id, state, place.queue.broker)
        command = end_transaction(place, state)
        brokers = self._brokers
        try:
            address = brokers.address(place.queue)
            if self.trace is not None:
                self.trace.ended(place, state, address)
            if command.is_oneway:
                channel = brokers.take(address, brokers.timeout_s)
                channel.send(signed(command, brokers.credentials))
                brokers.give(address, channel)
                return False
            answer = brokers.call(address, command)
        except (ConnectionLostError, RequestTimeoutError, RouteNotFoundError) as error:
            _log.warning(
                "%s of transaction %s has no answer, the broker will ask: %s",
                state.name, place.transaction_id, error,
            )  # fmt: skip
            return False
        return is_acknowledged(answer, address)

    def run(
        self, place: HalfPlace, result: SendResult, message: Message, argument: Any
    ) -> TransactionResult:
        """The second half of `send_in_transaction`: local transaction, then its end."""
        if result.status is not SendStatus.OK:
            state = TransactionState.ROLLBACK
        else:
            state = self._execute(message, place.transaction_id, argument)
        acknowledged = self.finish(place, state)
        return TransactionResult(result, place.transaction_id, state, acknowledged)

    def _execute(self, message: Message, transaction_id: str, argument: Any) -> TransactionState:
        assert self.listener is not None
        try:
            return as_state(self.listener.execute_local(message, transaction_id, argument))
        except Exception:  # noqa: BLE001 -- the listener's own code
            _log.exception(
                "the local transaction %s failed: the broker will ask how it ended", transaction_id
            )
            return TransactionState.UNKNOWN

    # --- the broker's questions

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
        state = self._state_of(question)
        if state is not None and self._keeper is not None:
            if self.trace is not None:
                self.trace.ended(
                    question.place, state, address, properties=question.message.properties
                )
            self._keeper.tell(address, end_transaction(question.place, state, is_check=True))

    def _state_of(self, question: Question) -> TransactionState | None:
        with self._lock:
            known = self._decisions.known(question)
        if known is not None:
            return known
        if self.listener is None:
            self._warn_of(question)
            return None
        try:
            return as_state(self.listener.check(question.message))
        except Exception:  # noqa: BLE001 -- the listener's own code
            _log.exception("the check of transaction %s failed", question.place.transaction_id)
            return TransactionState.UNKNOWN

    def close(self) -> None:
        """Answers no more questions; checks that run end first."""
        if self._checks is not None:
            self._checks.shutdown(wait=True, cancel_futures=True)
        if self._keeper is not None:
            self._keeper.close()


class Transaction(TransactionBlock):
    """One message with its local transaction; see `client.aio.transactions.Transaction`."""

    def __init__(
        self,
        transactions: Transactions,
        outgoing: Outgoing,
        send: SendHalf,
        check_after_s: int | None,
    ) -> None:
        super().__init__(outgoing)
        self._transactions = transactions
        self._outgoing = outgoing
        self._send = send
        self._check_after_s = check_after_s

    def __enter__(self) -> Self:
        self._check_is_new()
        place, result = self._transactions.begin(self._outgoing, self._check_after_s, self._send)
        self._place, self.send_result = place, result
        if result.status is not SendStatus.OK:
            self._transactions.finish(place, TransactionState.ROLLBACK)
            raise not_safe(result)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._place is not None
        if error is None:
            self.is_acknowledged = self._transactions.finish(self._place, self.state)
            return
        self.state = TransactionState.ROLLBACK
        try:
            self.is_acknowledged = self._transactions.finish(self._place, self.state)
        except SluiceError as refusal:
            self._tell_refusal(refusal)
