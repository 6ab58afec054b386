"""Run the transactions of a producer and answer the transaction checks of brokers.

    async with producer.transaction("orders", body) as tx:     # the prepared message is stored
        await database.commit(...)                              # the local transaction
    # leaving the block commits; an exception would roll back

`tx.unknown()` and `tx.rollback()` make leaving the block end the transaction differently. The same
with RocketMQ's API: `producer.send_in_transaction(message, argument)` calls the producer's
TransactionListener.

A prepared message (RocketMQ: half message) is sent with the properties TRAN_MSG and PGROUP.
END_TRANSACTION (37) commits it or rolls it back; it names the location that the response to the
send contained. A broker that waits too long for it sends a transaction check,
CHECK_TRANSACTION_STATE (39), to any client of the producer group.

This process answers checks of its own transactions itself. A transaction that is still running is
UNKNOWN, whatever a listener would find in its database now. A transaction that ended here has the
state it ended with, even if the broker never received it. Only the other transactions are checked
by the listener.
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
"""A function that sends a prepared message."""
ENDED_TRANSACTIONS_MAX: Final = 10_000
"""The number of ended transactions whose states are kept, to answer checks."""
_OFFSET_DIGITS: Final = 16


class TransactionState(IntEnum):
    """The state of a local transaction."""

    UNKNOWN = 0
    COMMIT = 8
    ROLLBACK = 12


class TransactionListener:
    """Runs the local transactions of a producer, and tells how they ended.

    Every producer of a group should have one: brokers send checks to any of them. With the asyncio
    producer both methods may be coroutines.
    """

    def execute_local(
        self, message: Message, transaction_id: str, argument: Any
    ) -> "TransactionState | Awaitable[TransactionState | None] | None":
        """Run the local transaction of a message that is stored and not yet visible.

        `argument` is what the application passed to `send_in_transaction`. Return how the
        transaction ended. None, and an exception (which is logged), count as UNKNOWN.
        """
        raise NotImplementedError

    def check(
        self, message: StoredMessage
    ) -> "TransactionState | Awaitable[TransactionState | None] | None":
        """Return how the transaction of `message` ended.

        Its id is `message.properties["UNIQ_KEY"]`. This is also called for transactions of other
        processes of the group, and for old ones. None and an exception count as UNKNOWN: the broker
        checks again, up to its transactionCheckMax times.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """The result of sending a message in a transaction.

    `is_acknowledged` says that the broker has confirmed the commit or rollback. If it has not, it
    checks the transaction later, and this client (or another one of the group) answers.
    """

    send_result: SendResult
    transaction_id: str
    state: TransactionState
    is_acknowledged: bool


@dataclass(frozen=True, slots=True)
class PreparedMessageLocation:
    """Where a prepared message is stored, as END_TRANSACTION (37) has to name it.

    `half_queue_offset` is its offset in the queue of prepared messages, `physical_offset` its
    position in the commit log.
    """

    group: str
    queue: MessageQueue
    half_queue_offset: int
    physical_offset: int
    message_id: str
    transaction_id: str


def make_prepared(
    outgoing: OutgoingMessage, group: str, check_after_s: int | None
) -> OutgoingMessage:
    """Return a copy of a message as the prepared message of a transaction.

    Consumers do not see a prepared message until the transaction is committed. The broker asks the
    producer `group` for the state of an open transaction, at the earliest after `check_after_s`
    seconds; None means the broker's own interval.

    Raises ConfigurationError for a delayed message, an invalid `check_after_s`, and properties that
    become too large.
    """
    # Encoded properties are `name U+0001 value U+0002`, repeated.
    encoded_properties = outgoing.properties.split("\x02")
    names = {encoded.partition("\x01")[0] for encoded in encoded_properties}
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
    prepared = add_properties(outgoing, added, "a transaction")
    return replace(prepared, sys_flag=outgoing.sys_flag | PREPARED)


def locate_prepared(send_result: SendResult, group: str) -> PreparedMessageLocation:
    """Return where a broker has stored a prepared message, from the result of the send.

    Its position in the commit log is the last 16 hexadecimal digits of the offset message id.
    Raises ProtocolError if that id is not valid.
    """
    try:
        physical_offset = int(send_result.offset_message_id[-_OFFSET_DIGITS:], 16)
    except ValueError:
        raise ProtocolError(
            "the response's msgId must be an offset message id, got "
            f"{send_result.offset_message_id!r}."
        ) from None
    return PreparedMessageLocation(
        group,
        send_result.queue,
        send_result.queue_offset,
        physical_offset,
        send_result.message_id,
        send_result.message_id,
    )


def make_end_request(
    location: PreparedMessageLocation, state: TransactionState, *, is_check: bool = False
) -> Command:
    """Return the request END_TRANSACTION (37), which commits or rolls back a prepared message.

    `is_check` says that it answers a question of the broker. Brokers do not respond to such a
    request, nor to the state UNKNOWN, so it is then one-way.
    """
    header = headers.EndTransactionRequest(
        topic=location.queue.topic,
        group=location.group,
        half_queue_offset=location.half_queue_offset,
        physical_offset=location.physical_offset,
        outcome=int(state),
        is_from_check=is_check,
        unique_id=location.message_id,
        transaction_id=location.transaction_id,
        broker=location.queue.broker or None,
    )
    is_oneway = is_check or state is TransactionState.UNKNOWN
    return make_request(RequestCode.END_TRANSACTION, header, oneway=is_oneway)


class TransactionCheck(NamedTuple):
    """A transaction check of a broker: the location of the prepared message, and the message."""

    location: PreparedMessageLocation
    message: StoredMessage


def parse_check_request(command: Command) -> TransactionCheck:
    """Decode a broker's question for the state of a transaction (CHECK_TRANSACTION_STATE, 39).

    Raises ProtocolError if its header or message cannot be decoded.
    """
    header = decode_header(CheckTransactionStateRequest, command.fields or {})
    message = decode_record(command.body, broker=header.broker or "")
    queue = MessageQueue(message.topic, header.broker or "", message.queue_id)
    transaction_id = header.transaction_id or message.message_id
    location = PreparedMessageLocation(
        message.properties.get(PRODUCER_GROUP, ""),
        queue._replace(topic=header.topic or message.topic),
        header.half_queue_offset,
        header.physical_offset,
        header.unique_id or transaction_id,
        transaction_id,
    )
    return TransactionCheck(location, message)


class Transactions:
    """The running and ended transactions of one producer group.

    `listener` is the application's, or None. `trace` records the ends of transactions; None means
    no tracing. `lock` protects the tables if several threads use them; None means no lock. The
    constructor raises ConfigurationError if `listener` is not a TransactionListener.
    """

    def __init__(
        self,
        directory: Directory,
        group: str,
        listener: TransactionListener | None,
        trace: Tracing | None = None,
        *,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """Create the transactions of one producer group, with none open.

        `listener` runs local transactions and answers checks; it may be None. `trace` records ends
        of transactions; None means no tracing. `lock` protects the tables; None means that only one
        thread uses them. Raises ConfigurationError if `listener` is not a TransactionListener.
        """
        self.directory = directory
        self.group = group
        if listener is not None and not callable(getattr(listener, "execute_local", None)):
            raise ConfigurationError(
                f"listener must be a TransactionListener, got {listener!r:.60}.",
                fix="Pass an instance of a subclass of TransactionListener.",
            )
        self.listener = listener
        self.trace = trace
        self._tables_lock = nullcontext() if lock is None else lock
        self._running: set[str] = set()
        self._ended: OrderedDict[str, tuple[TransactionState, str]] = OrderedDict()
        self._has_warned = False

    def expect_listener(self) -> None:
        """Raise ConfigurationError if the producer has no TransactionListener."""
        if self.listener is None:
            raise ConfigurationError(
                "sending a transactional message requires a TransactionListener, but the producer "
                f"of group {self.group!r} has none.",
                fix="Pass one with listener=, or use a `producer.transaction(...)` block.",
            )

    def answer_check(self, check: TransactionCheck, address: str) -> Conversation[Command | None]:
        """Return the request that answers a broker's question for the state of a transaction.

        Returns None if this producer cannot know the state. The caller sends the request to the
        broker at `address`, which does not respond to it. The answer is traced.
        """
        state = yield from self.determine_state(check)
        if state is None:
            return None
        self.trace_end(check.location, state, address, check.message.properties)
        return make_end_request(check.location, state, is_check=True)

    def send_prepared(
        self, outgoing: OutgoingMessage, check_after_s: int | None, send: SendPrepared
    ) -> Conversation[tuple[PreparedMessageLocation, SendResult]]:
        """Send a message as a prepared message, with `send`; return (location, result of the send).

        Until `end` is called, a broker that asks for the state is answered with UNKNOWN. If sending
        fails, it is answered with ROLLBACK later. Raises what `make_prepared`, `send` and
        `locate_prepared` raise.
        """
        prepared = make_prepared(outgoing, self.group, check_after_s)
        with self._tables_lock:
            self._running.add(prepared.message_id)
        try:
            send_result = yield from send(prepared)
            return locate_prepared(send_result, self.group), send_result
        except BaseException:
            self._record_end(prepared.message_id, TransactionState.ROLLBACK, "")
            raise

    def _record_end(self, transaction_id: str, state: TransactionState, broker: str) -> None:
        """Remember the state of an ended transaction, to answer later checks of brokers.

        `broker` has the prepared message. UNKNOWN is not remembered, so that the listener is asked.
        Only the last `ENDED_TRANSACTIONS_MAX` states are remembered.
        """
        with self._tables_lock:
            self._running.discard(transaction_id)
            if state is not TransactionState.UNKNOWN:
                self._ended[transaction_id] = (state, broker)
                if len(self._ended) > ENDED_TRANSACTIONS_MAX:
                    self._ended.popitem(last=False)

    def end(self, location: PreparedMessageLocation, state: TransactionState) -> Conversation[bool]:
        """Tell the broker to commit or roll back, and return whether the broker has confirmed it.

        `location` is the prepared message. Returns False if the broker does not respond, or has
        already begun to ask for the state, or if `state` is UNKNOWN: the broker will then ask, and
        is answered with the state. The reason is logged, except for UNKNOWN. Raises RequestError if
        the broker refuses.
        """
        self._record_end(location.transaction_id, state, location.queue.broker)
        command = make_end_request(location, state)
        try:
            yield from self.directory.get_route(location.queue.topic)
            address = self.directory.get_master_address(location.queue)
            self.trace_end(location, state, address)
            response = yield Call(address, command)
        except (ConnectionLostError, RequestTimeoutError, RouteNotFoundError) as error:
            self.directory.log_failure(
                error,
                location.queue,
                f"ending transactions of {self.group}",
                "no response to %s of transaction %s, the broker will check it: %s",
                state.name,
                location.transaction_id,
                error,
            )
            return False
        if command.is_oneway:
            return False
        if response.code == ResponseCode.ILLEGAL_OPERATION:
            # Too late: the broker has begun to check.
            _log.warning("broker %s: %s", address, response.remark)
            return False
        expect_success(response, address)
        return True

    def trace_end(
        self,
        location: PreparedMessageLocation,
        state: TransactionState,
        address: str,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Record the end of a transaction in the traces; does nothing if tracing is off.

        `properties` are those of the message if a check of the broker caused the end, else None.
        """
        if self.trace is not None:
            self.trace.record_transaction_end(
                location.group,
                location.queue.topic,
                location.transaction_id,
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
        """Send a prepared message, let the listener run the local transaction, and end it.

        The listener receives `message` and `argument`; `outgoing` is the same message, encoded. If
        the broker has not stored the prepared message safely, the transaction is rolled back
        without calling the listener.

        Raises ConfigurationError without a listener, and what `send_prepared` and `end` raise.
        """
        self.expect_listener()
        assert self.listener is not None
        location, send_result = yield from self.send_prepared(outgoing, check_after_s, send)
        state = TransactionState.ROLLBACK
        if send_result.status is SendStatus.OK:
            execute = partial(
                self.listener.execute_local, message, location.transaction_id, argument
            )
            try:
                state = yield from self._call_listener(
                    execute,
                    f"the local transaction {location.transaction_id} failed; the broker will "
                    "check its state",
                )
            except BaseException:
                # The caller was cancelled, or the program ends: only the listener's check knows.
                self._record_end(
                    location.transaction_id, TransactionState.UNKNOWN, location.queue.broker
                )
                raise
        is_acknowledged = yield from self.end(location, state)
        return TransactionResult(send_result, location.transaction_id, state, is_acknowledged)

    def _call_listener(
        self, function: Callable[[], object], failure: str
    ) -> Conversation[TransactionState]:
        """Call a method of the listener, given as `function`, and return the state that it decides.

        The method may return an awaitable. None counts as UNKNOWN. If it raises an error or returns
        something else, `failure` is logged with the exception and the result is UNKNOWN.
        KeyboardInterrupt, SystemExit and a cancellation are raised.
        """
        try:
            returned = function()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # noqa: BLE001 - the listener is application code
            _log.exception(failure)
            return TransactionState.UNKNOWN
        step = Await(returned)
        try:
            yield step
            if step.value is None or isinstance(step.value, TransactionState):
                return step.value or TransactionState.UNKNOWN
            raise ConfigurationError(  # noqa: TRY301 - logged as the listener's own errors are
                f"a TransactionListener must return a TransactionState, got {step.value!r}.",
                fix="Return a TransactionState or None.",
            )
        except Exception:  # noqa: BLE001 - the listener is application code
            _log.exception(failure)
            return TransactionState.UNKNOWN

    def determine_state(self, check: TransactionCheck) -> Conversation[TransactionState | None]:
        """Return the state of a transaction for which a broker asks, None if it cannot be known.

        A transaction in progress is UNKNOWN, and an ended one has its state. For any other the
        listener is asked. Without a listener the result is None, which is logged once.

        A send without a response may have left a second prepared message at another broker. If the
        transaction was committed with the first one, the second one is rolled back, so that the
        message is not delivered twice.
        """
        transaction_id = check.location.transaction_id
        with self._tables_lock:
            if transaction_id in self._running:
                return TransactionState.UNKNOWN
            state, broker = self._ended.get(transaction_id, (None, ""))
        if state is TransactionState.COMMIT and broker != check.location.queue.broker:
            return TransactionState.ROLLBACK
        if state is not None:
            return state
        if self.listener is None:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "a broker asks producer group %s about transaction %s, which this process did "
                    "not begin, and the producer has no TransactionListener. Pass one as "
                    "listener=.",
                    self.group,
                    transaction_id,
                )
            return None
        call_check = partial(self.listener.check, check.message)
        failure = f"the check of transaction {transaction_id} failed"
        return (yield from self._call_listener(call_check, failure))


class TransactionBlock:
    """One message with its local transaction, as a context manager of the producers.

    `transaction_id` is the id that a check names: the application stores it with the data of the
    local transaction. `send_result` is None before the block is entered.
    """

    def __init__(
        self,
        transactions: Transactions,
        outgoing: OutgoingMessage,
        send: SendPrepared,
        check_after_s: int | None,
    ) -> None:
        """Create the block for one message; nothing is sent before `enter`.

        `outgoing` is the message, encoded. `send(prepared)` sends the prepared message. The broker
        asks for the state at the earliest after `check_after_s` seconds; None means its own
        interval.
        """
        self.transaction_id: str = outgoing.message_id
        self.state: TransactionState = TransactionState.COMMIT
        """How leaving the block without an exception ends the transaction."""
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
        """Leave the transaction undecided at the end of the block. The broker checks it later."""
        self.state = TransactionState.UNKNOWN

    def rollback(self) -> None:
        """Roll back at the end of the block, although it raises no exception."""
        self.state = TransactionState.ROLLBACK

    def commit(self) -> None:
        """Commit at the end of the block if it raises no exception. This is the default."""
        self.state = TransactionState.COMMIT

    def enter(self) -> Conversation[None]:
        """Send the prepared message, which consumers do not see until the block commits.

        Raises what a send raises. Raises SendError if the broker has stored the message but may
        lose it; it is then rolled back. Raises ConfigurationError if the block was entered before.
        """
        if self._location is not None:
            raise ConfigurationError(
                "this transaction was entered before.",
                fix="Create a new transaction for each message.",
            )
        self._location, send_result = yield from self._transactions.send_prepared(
            self._outgoing, self._check_after_s, self._send
        )
        self.send_result = send_result
        if send_result.status is not SendStatus.OK:
            yield from self._transactions.end(self._location, TransactionState.ROLLBACK)
            raise SendError(
                f"the broker stored message {send_result.message_id} of a transaction with "
                f"{send_result.status.name}: it was rolled back before the local transaction "
                "began.",
                fix="Try again, and check the broker's disk and its slaves.",
            )

    def leave(self, error: BaseException | None) -> Conversation[None]:
        """End the transaction with `state`, or roll it back if the block raised `error`.

        Sets `is_acknowledged`. Raises what `Transactions.end` raises. If there is an `error`, a
        failed rollback is only logged, because the caller raises `error`.
        """
        assert self._location is not None
        if error is not None:
            self.state = TransactionState.ROLLBACK
        try:
            self.is_acknowledged = yield from self._transactions.end(self._location, self.state)
        except SluiceError as refusal:
            if error is None:
                raise
            _log.warning("rolling back transaction %s failed: %s", self.transaction_id, refusal)
