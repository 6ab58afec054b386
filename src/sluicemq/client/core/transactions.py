"""Transactions of a producer: what is sent, what is remembered, what a broker asks.

    async with producer.transaction("orders", body) as tx:     # the half message is stored
        await database.commit(...)                              # the local transaction
    # leaving has committed; an exception would have rolled back

`tx.unknown()` and `tx.rollback()` say how leaving ends it instead. The same in RocketMQ's way:
`producer.send_in_transaction(message, argument)` calls the producer's TransactionListener.

A half message is a send with TRAN_MSG and PGROUP; what it is committed or rolled back by (37) names
the place that its answer gave. A broker that waits too long asks any client of the group (39).

What this process knows it answers by itself: a transaction that is still running is undecided,
whatever a listener would find in its database now; one that ended here is what it ended as, also
when the broker never heard of it. Only the rest is the listener's to check.
"""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any, Final, NamedTuple

from sluicemq.client.core.conversations import Await, Call, Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.messages import OutgoingMessage, add_properties
from sluicemq.client.core.names import check_number
from sluicemq.client.core.requests import SendResult, SendStatus, expect_success, make_request
from sluicemq.client.core.tracing import Tracing
from sluicemq.errors import (
    ConfigurationError,
    ConnectionLostError,
    ProtocolError,
    RequestTimeoutError,
    RouteNotFoundError,
    SendError,
    SluiceError,
)
from sluicemq.model.message import (
    CHECK_IMMUNITY,
    DELAY,
    PREPARED,
    PRODUCER_GROUP,
    TIMER_PROPERTIES,
    TRAN_MSG,
    Message,
    StoredMessage,
)
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_record
from sluicemq.wire import headers
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import decode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import CheckTransactionStateRequest

_log = logging.getLogger("sluicemq.client")
SendPrepared = Callable[[OutgoingMessage], Conversation[SendResult]]
ENDED_TRANSACTIONS_MAX: Final = 10_000
_OFFSET_DIGITS: Final = 16


class TransactionState(IntEnum):
    """How a local transaction stands."""

    UNKNOWN = 0
    COMMIT = 8
    ROLLBACK = 12


class TransactionListener:
    """Runs the local transactions of a producer, and says how they ended.

    Every producer of a group should have one: brokers ask any of them. With the asyncio producer
    both methods may be coroutines.
    """

    def execute_local(
        self, message: Message, transaction_id: str, argument: Any
    ) -> "TransactionState | Awaitable[TransactionState | None] | None":
        """The local transaction of a message that is stored and not yet visible.

        Returns how it ended; None, and an exception, which is logged, count as UNKNOWN.
        """
        raise NotImplementedError

    def check(
        self, message: StoredMessage
    ) -> "TransactionState | Awaitable[TransactionState | None] | None":
        """How the transaction of a message ended: `message.properties["UNIQ_KEY"]` is its id.

        Also asked about transactions of other processes of the group, and of ones long ago. None,
        and an exception, count as UNKNOWN: the broker asks again, up to its transactionCheckMax.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """What became of a message that was sent in a transaction.

    `is_acknowledged` says that the broker has confirmed commit or rollback; when it has not, it
    asks later, and this client (or another of the group) answers.
    """

    send_result: SendResult
    transaction_id: str
    state: TransactionState
    is_acknowledged: bool


@dataclass(frozen=True, slots=True)
class PreparedMessageLocation:
    """Where a half message lies: what 37 has to name."""

    group: str
    queue: MessageQueue
    half_queue_offset: int
    physical_offset: int
    message_id: str
    transaction_id: str


def make_prepared(
    outgoing: OutgoingMessage, group: str, check_after_s: int | None
) -> OutgoingMessage:
    """The message as the first phase sends it. Raises ConfigurationError."""
    names = {part.partition("\x01")[0] for part in outgoing.properties.split("\x02")}
    for name in (DELAY, *TIMER_PROPERTIES):
        if name in names:
            raise ConfigurationError(
                f"a message of a transaction cannot be delayed (property {name}).",
                fix="Send it without a transaction, or without a delay.",
            )
    added = {TRAN_MSG: "true", PRODUCER_GROUP: group}
    if check_after_s is not None:
        check_number("check_after_s", check_after_s, 0)
        added[CHECK_IMMUNITY] = str(check_after_s)
    half = add_properties(outgoing, added, "a transaction")
    return replace(half, sys_flag=outgoing.sys_flag | PREPARED)


def locate_prepared(result: SendResult, group: str) -> PreparedMessageLocation:
    """Where the answer says that the half message lies. Raises ProtocolError."""
    try:
        physical_offset = int(result.offset_message_id[-_OFFSET_DIGITS:], 16)
    except ValueError:
        raise ProtocolError(
            f"the answer's msgId is {result.offset_message_id!r}, which says no place."
        ) from None
    return PreparedMessageLocation(
        group,
        result.queue,
        result.queue_offset,
        physical_offset,
        result.message_id,
        result.message_id,
    )


def make_end_request(
    place: PreparedMessageLocation, state: TransactionState, *, is_check: bool = False
) -> Command:
    """37; one-way when it answers a check or decides nothing, which brokers do not answer."""
    header = headers.EndTransactionRequest(
        topic=place.queue.topic,
        group=place.group,
        half_queue_offset=place.half_queue_offset,
        physical_offset=place.physical_offset,
        outcome=int(state),
        is_check_answer=is_check,
        unique_id=place.message_id,
        transaction_id=place.transaction_id,
        broker=place.queue.broker or None,
    )
    is_oneway = is_check or state is TransactionState.UNKNOWN
    return make_request(RequestCode.END_TRANSACTION, header, oneway=is_oneway)


class TransactionCheck(NamedTuple):
    """A broker asks how a transaction ended."""

    location: PreparedMessageLocation
    message: StoredMessage


def parse_check_request(command: Command) -> TransactionCheck:
    """39. Raises ProtocolError when its message cannot be read."""
    header = decode_header(CheckTransactionStateRequest, command.fields or {})
    message = decode_record(command.body, broker=header.broker or "")
    queue = MessageQueue(message.topic, header.broker or "", message.queue_id)
    transaction_id = header.transaction_id or message.message_id
    place = PreparedMessageLocation(
        message.properties.get(PRODUCER_GROUP, ""),
        queue._replace(topic=header.topic or message.topic),
        header.half_queue_offset,
        header.physical_offset,
        header.unique_id or transaction_id,
        transaction_id,
    )
    return TransactionCheck(place, message)


class Transactions:
    """The transactions of one producer group that brokers ask. `guard` keeps threads apart."""

    def __init__(
        self,
        directory: Directory,
        group: str,
        listener: TransactionListener | None,
        trace: Tracing | None = None,
        *,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.directory = directory
        self.group = group
        if listener is not None and not callable(getattr(listener, "execute_local", None)):
            raise ConfigurationError(
                f"the listener is {listener!r:.60}.", fix="Give a TransactionListener."
            )
        self.listener = listener
        self.trace = trace
        self._lock = nullcontext() if lock is None else lock
        self._running: set[str] = set()
        self._ended: OrderedDict[str, tuple[TransactionState, str]] = OrderedDict()
        self._has_warned = False

    def expect_listener(self) -> None:
        """Raises ConfigurationError without one."""
        if self.listener is None:
            raise ConfigurationError(
                f"the producer of group {self.group!r} has no TransactionListener.",
                fix="Give it one (listener=), or use a `producer.transaction(...)` block.",
            )

    def answer_check(
        self, question: TransactionCheck, address: str
    ) -> Conversation[Command | None]:
        """37 for the broker that asked; None when this producer cannot know."""
        state = yield from self.determine_state(question)
        if state is None:
            return None
        self.trace_end(question.location, state, address, question.message.properties)
        return make_end_request(question.location, state, is_check=True)

    def send_prepared(
        self, outgoing: OutgoingMessage, check_after_s: int | None, send: SendPrepared
    ) -> Conversation[tuple[PreparedMessageLocation, SendResult]]:
        """Sends the half message. When that fails, a check would roll it back."""
        half = make_prepared(outgoing, self.group, check_after_s)
        with self._lock:
            self._running.add(half.message_id)
        try:
            result = yield from send(half)
            return locate_prepared(result, self.group), result
        except BaseException:
            self._record_end(half.message_id, TransactionState.ROLLBACK, "")
            raise

    def _record_end(self, transaction_id: str, state: TransactionState, broker: str) -> None:
        """The local transaction is over; `broker` keeps its half message."""
        with self._lock:
            self._running.discard(transaction_id)
            if state is not TransactionState.UNKNOWN:
                self._ended[transaction_id] = (state, broker)
                if len(self._ended) > ENDED_TRANSACTIONS_MAX:
                    self._ended.popitem(last=False)

    def end(self, place: PreparedMessageLocation, state: TransactionState) -> Conversation[bool]:
        """Tells the broker how it ended; False when that is left to a check.

        Raises RequestError when the broker refuses.
        """
        self._record_end(place.transaction_id, state, place.queue.broker)
        command = make_end_request(place, state)
        try:
            yield from self.directory.get_route(place.queue.topic)
            address = self.directory.get_master_address(place.queue)
            self.trace_end(place, state, address)
            response = yield Call(address, command)
        except (ConnectionLostError, RequestTimeoutError, RouteNotFoundError) as error:
            self.directory.log_failure(
                error,
                place.queue,
                f"ending transactions of {self.group}",
                "%s of transaction %s has no answer, the broker will ask: %s",
                state.name,
                place.transaction_id,
                error,
            )
            return False
        if command.is_oneway:
            return False
        if response.code == ResponseCode.ILLEGAL_OPERATION:  # too late: the broker asks by itself
            _log.warning("broker %s: %s", address, response.remark)
            return False
        expect_success(response, address)
        return True

    def trace_end(
        self,
        place: PreparedMessageLocation,
        state: TransactionState,
        address: str,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Notes the end, when traces are on; `properties`: of the message of a check."""
        if self.trace is not None:
            self.trace.record_transaction_end(
                place.group,
                place.queue.topic,
                place.transaction_id,
                state,
                address,
                properties=properties,
            )

    def send_in_transaction(
        self,
        message: Message,
        outgoing: OutgoingMessage,
        argument: Any,
        check_after_s: int | None,
        send: SendPrepared,
    ) -> Conversation[TransactionResult]:
        """Half message, local transaction by the listener, its end."""
        self.expect_listener()
        assert self.listener is not None
        place, result = yield from self.send_prepared(outgoing, check_after_s, send)
        state = TransactionState.ROLLBACK
        if result.status is SendStatus.OK:
            execute = partial(self.listener.execute_local, message, place.transaction_id, argument)
            try:
                state = yield from self._call_listener(
                    execute,
                    f"the local transaction {place.transaction_id} failed: the broker will ask how "
                    "it ended",
                )
            except BaseException:
                # The caller was cancelled, or the program ends: only the listener's check knows.
                self._record_end(place.transaction_id, TransactionState.UNKNOWN, place.queue.broker)
                raise
        is_acknowledged = yield from self.end(place, state)
        return TransactionResult(result, place.transaction_id, state, is_acknowledged)

    def _call_listener(
        self, function: Callable[[], object], failure: str
    ) -> Conversation[TransactionState]:
        """Return what `function` of the listener says, UNKNOWN when it fails, which is logged.

        Raises KeyboardInterrupt and SystemExit, and what the shell raises when it gives up the
        talk: a shell that awaits turns other failures of the listener into an Exception.
        """
        try:
            value = function()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # noqa: BLE001 -- the listener's own code
            _log.exception(failure)
            return TransactionState.UNKNOWN
        step = Await(value)
        try:
            yield step
            if step.value is None or isinstance(step.value, TransactionState):
                return step.value or TransactionState.UNKNOWN
            raise ConfigurationError(  # noqa: TRY301 - logged as the listener's own errors are
                f"the TransactionListener returned {step.value!r}.",
                fix="Return a TransactionState.",
            )
        except Exception:  # noqa: BLE001 -- the listener's own code
            _log.exception(failure)
            return TransactionState.UNKNOWN

    def determine_state(self, question: TransactionCheck) -> Conversation[TransactionState | None]:
        """The answer to a broker's question; None when this producer cannot know it.

        A half message on another broker than the one that was committed is what an unanswered send
        has left there: it must not become a second message.
        """
        transaction_id = question.location.transaction_id
        with self._lock:
            if transaction_id in self._running:
                return TransactionState.UNKNOWN
            state, broker = self._ended.get(transaction_id, (None, ""))
        if state is TransactionState.COMMIT and broker != question.location.queue.broker:
            return TransactionState.ROLLBACK
        if state is not None:
            return state
        if self.listener is None:
            if not self._has_warned:  # once is enough
                self._has_warned = True
                _log.warning(
                    "a broker asks producer group %s about transaction %s, which this process has "
                    "not begun, and the producer has no TransactionListener: give it one.",
                    self.group,
                    transaction_id,
                )
            return None
        check = partial(self.listener.check, question.message)
        failure = f"the check of transaction {transaction_id} failed"
        return (yield from self._call_listener(check, failure))


class TransactionBlock:
    """One message with its local transaction. `transaction_id` is what a check will name: store it
    with the local transaction's own data."""

    def __init__(
        self,
        transactions: Transactions,
        outgoing: OutgoingMessage,
        send: SendPrepared,
        check_after_s: int | None,
    ) -> None:
        self.transaction_id: str = outgoing.message_id
        self.state: TransactionState = TransactionState.COMMIT
        """How leaving normally ends it."""
        self.send_result: SendResult | None = None
        self.is_acknowledged: bool = False
        """Whether the broker has confirmed the end."""
        self._transactions = transactions
        self._outgoing = outgoing
        self._send = send
        self._check_after_s = check_after_s
        self._location: PreparedMessageLocation | None = None

    def __repr__(self) -> str:
        state = "not begun" if self._location is None else f"ends with {self.state.name}"
        return f"<Transaction {self.transaction_id} to {self._outgoing.topic}, {state}>"

    def unknown(self) -> None:
        """Leave it undecided: the broker will ask."""
        self.state = TransactionState.UNKNOWN

    def rollback(self) -> None:
        """Roll back when the block is left, without an exception."""
        self.state = TransactionState.ROLLBACK

    def commit(self) -> None:
        """Commit after all, when the block is left normally."""
        self.state = TransactionState.COMMIT

    def enter(self) -> Conversation[None]:
        """Sends the half message; raises as a send does, and SendError when it may get lost."""
        if self._location is not None:
            raise ConfigurationError(
                "this transaction was entered before.", fix="Make a new one for each message."
            )
        self._location, result = yield from self._transactions.send_prepared(
            self._outgoing, self._check_after_s, self._send
        )
        self.send_result = result
        if result.status is not SendStatus.OK:
            yield from self._transactions.end(self._location, TransactionState.ROLLBACK)
            raise SendError(
                f"the broker stored message {result.message_id} of a transaction with "
                f"{result.status.name}: it was rolled back, the local transaction has not begun.",
                fix="Try again; look at the broker's disk, or at its slaves.",
            )

    def leave(self, error: BaseException | None) -> Conversation[None]:
        """Ends it as `state` says; rolls back after an exception of the user's, which goes on."""
        assert self._location is not None
        if error is not None:
            self.state = TransactionState.ROLLBACK
        try:
            self.is_acknowledged = yield from self._transactions.end(self._location, self.state)
        except SluiceError as refusal:
            if error is None:
                raise
            _log.warning("rolling back transaction %s failed: %s", self.transaction_id, refusal)
