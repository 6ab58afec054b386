"""Transactions, seen by a producer: what is sent, what is remembered, what a broker asks.

A half message is a send with TRAN_MSG and PGROUP; what it is committed or rolled back by (37) names
the place that its answer told. A broker that waits too long asks any client of the group (39).

`Decisions` is what this process knows by itself: a transaction that is still running is undecided,
whatever a listener would find in its database now; one that ended here is what it ended as, also
when the broker never heard of it. Only the rest is the listener's to check.
"""

import logging
from collections import OrderedDict
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final, NamedTuple

from sluicemq.client.core.answers import SendResult, expect_success
from sluicemq.client.core.messages import PROPERTIES_BYTES_MAX, Outgoing
from sluicemq.errors import ConfigurationError, ProtocolError, SendError
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
from sluicemq.wire.declare import decode_header, encode_header
from sluicemq.wire.frames import FLAG_ONEWAY, Command
from sluicemq.wire.headers import CheckTransactionStateRequest

_log = logging.getLogger("sluicemq.client")
REMEMBERED: Final = 10_000
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
class HalfPlace:
    """Where a half message lies: what 37 has to name."""

    group: str
    queue: MessageQueue
    half_queue_offset: int
    physical_offset: int
    message_id: str
    transaction_id: str


def as_half(outgoing: Outgoing, group: str, check_after_s: int | None) -> Outgoing:
    """The message as the first phase sends it. Raises ConfigurationError."""
    names = {part.partition("\x01")[0] for part in outgoing.properties.split("\x02")}
    for name in (DELAY, *TIMER_PROPERTIES):
        if name in names:
            raise _delayed(f"property {name}")
    text = f"{outgoing.properties}{TRAN_MSG}\x01true\x02{PRODUCER_GROUP}\x01{group}\x02"
    if check_after_s is not None:
        if check_after_s < 0:
            raise ConfigurationError(
                f"check_after_s is {check_after_s}.", cure="Give seconds, 0 or more."
            )
        text += f"{CHECK_IMMUNITY}\x01{check_after_s}\x02"
    if len(text.encode()) > PROPERTIES_BYTES_MAX:
        raise ConfigurationError(
            f"the properties take more than {PROPERTIES_BYTES_MAX:,} bytes with those of a "
            "transaction.",
            cure="Put large values into the body.",
        )
    return replace(outgoing, properties=text, sys_flag=outgoing.sys_flag | PREPARED)


def _delayed(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"a message of a transaction cannot be delayed ({what}).",
        cure="Send it without a transaction, or without a delay.",
    )


def place_of(result: SendResult, group: str) -> HalfPlace:
    """Where the answer says that the half message lies. Raises ProtocolError."""
    try:
        physical_offset = int(result.offset_message_id[-_OFFSET_DIGITS:], 16)
    except ValueError:
        raise ProtocolError(
            f"the answer's msgId is {result.offset_message_id!r}, which says no place."
        ) from None
    return HalfPlace(
        group, result.queue, result.queue_offset, physical_offset, result.message_id,
        result.message_id,
    )  # fmt: skip


def end_transaction(
    place: HalfPlace, state: TransactionState, *, is_check: bool = False, remark: str | None = None
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
    return Command(
        int(RequestCode.END_TRANSACTION),
        encode_header(header),
        flag=FLAG_ONEWAY if is_oneway else 0,
        remark=remark,
    )


class Question(NamedTuple):
    """A broker asks how a transaction ended."""

    place: HalfPlace
    message: StoredMessage


def question_of(command: Command) -> Question:
    """39. Raises ProtocolError when its message cannot be read."""
    header = decode_header(CheckTransactionStateRequest, command.fields or {})
    message = decode_record(command.body, broker=header.broker or "")
    queue = MessageQueue(message.topic, header.broker or "", message.queue_id)
    transaction_id = header.transaction_id or message.message_id
    place = HalfPlace(
        message.properties.get(PRODUCER_GROUP, ""),
        queue._replace(topic=header.topic or message.topic),
        header.half_queue_offset,
        header.physical_offset,
        header.unique_id or transaction_id,
        transaction_id,
    )
    return Question(place, message)


def as_state(value: object) -> TransactionState:
    """What a listener returned; None is UNKNOWN. Raises ConfigurationError for anything else."""
    if value is None:
        return TransactionState.UNKNOWN
    if isinstance(value, TransactionState):
        return value
    raise ConfigurationError(
        f"the TransactionListener returned {value!r}.", cure="Return a TransactionState."
    )


def is_acknowledged(answer: Command, address: str) -> bool:
    """Did the broker end the transaction as asked? False when it leaves that to a check.

    Raises RequestError when it refuses.
    """
    if answer.code == ResponseCode.ILLEGAL_OPERATION:  # too late: it asks by itself
        _log.warning("broker %s: %s", address, answer.remark)
        return False
    expect_success(answer, address)
    return True


def not_safe(result: SendResult) -> SendError:
    """The half message of a transaction is stored, and may get lost: nothing may rely on it."""
    return SendError(
        f"the broker stored message {result.message_id} of a transaction with "
        f"{result.status.name}: it was rolled back, the local transaction has not begun.",
        cure="Try again; look at the broker's disk, or at its slaves.",
    )


class Decisions:
    """What a producer knows of its transactions without asking its listener."""

    def __init__(self) -> None:
        self._running: set[str] = set()
        self._ended: OrderedDict[str, tuple[TransactionState, str]] = OrderedDict()

    @property
    def is_used(self) -> bool:
        """Has there been a transaction?"""
        return bool(self._running or self._ended)

    def begin(self, transaction_id: str) -> None:
        """The half message is about to be sent."""
        self._running.add(transaction_id)

    def end(self, transaction_id: str, state: TransactionState, broker: str) -> None:
        """The local transaction is over; `broker` keeps its half message."""
        self._running.discard(transaction_id)
        if state is not TransactionState.UNKNOWN:
            self._ended[transaction_id] = (state, broker)
            if len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)

    def known(self, question: Question) -> TransactionState | None:
        """The answer; None when the listener has to find it.

        A half message on another broker than the one that was committed is what an unanswered send
        has left there: it must not become a second message.
        """
        transaction_id = question.place.transaction_id
        if transaction_id in self._running:
            return TransactionState.UNKNOWN
        state, broker = self._ended.get(transaction_id, (None, ""))
        if state is TransactionState.COMMIT and broker != question.place.queue.broker:
            return TransactionState.ROLLBACK
        return state
