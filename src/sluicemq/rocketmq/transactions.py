"""Transactions in RocketMQ's words.

    class Listener(TransactionListener):
        def execute_local_transaction(self, message, arg):
            return LocalTransactionState.COMMIT_MESSAGE
        def check_local_transaction(self, message):
            return LocalTransactionState.UNKNOW

    producer = TransactionMQProducer("my_group")
    producer.set_transaction_listener(Listener())

The local transaction runs in the caller's thread, checks in threads of their own.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from sluicemq.client.aio.producer import Transaction
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.core import transactions as core
from sluicemq.client.core.transactions import TransactionState
from sluicemq.errors import ConfigurationError, RouteNotFoundError
from sluicemq.model.message import StoredMessage
from sluicemq.rocketmq.clients import DefaultMQProducer
from sluicemq.rocketmq.values import Message, MessageExt, Nowhere, SendResult

_log = logging.getLogger("sluicemq.client")


class LocalTransactionState(Enum):
    """How a local transaction stands, in RocketMQ's spelling."""

    COMMIT_MESSAGE = "commit"
    ROLLBACK_MESSAGE = "rollback"
    UNKNOW = "unknown"


_STATES: Final = {
    LocalTransactionState.COMMIT_MESSAGE: TransactionState.COMMIT,
    LocalTransactionState.ROLLBACK_MESSAGE: TransactionState.ROLLBACK,
    LocalTransactionState.UNKNOW: TransactionState.UNKNOWN,
}
_NAMES: Final = {state: name for name, state in _STATES.items()}


class TransactionListener(ABC):
    """Runs local transactions and says how they ended; None counts as UNKNOW."""

    @abstractmethod
    def execute_local_transaction(
        self, message: Message, arg: Any
    ) -> LocalTransactionState | None: ...

    @abstractmethod
    def check_local_transaction(self, message: MessageExt) -> LocalTransactionState | None: ...


@dataclass(frozen=True, slots=True)
class TransactionSendResult:
    """What became of the half message, and how the local transaction ended."""

    send_result: SendResult
    transaction_id: str
    local_transaction_state: LocalTransactionState


class _Checks(core.TransactionListener):
    """RocketMQ's listener as the asyncio producer asks it."""

    def __init__(self, listener: TransactionListener) -> None:
        self._listener = listener

    async def check(self, message: StoredMessage) -> TransactionState | None:
        found = MessageExt(ReceivedMessage(message, Nowhere(), 0))
        state = await asyncio.to_thread(self._listener.check_local_transaction, found)
        return _state(state)


def _state(state: LocalTransactionState | None) -> TransactionState:
    return TransactionState.UNKNOWN if state is None else _STATES[state]


class TransactionMQProducer(DefaultMQProducer):
    """A producer of messages that become visible when a local transaction commits."""

    def __init__(
        self, producer_group: str = "DEFAULT_PRODUCER", *trace: Any, **options: Any
    ) -> None:
        super().__init__(producer_group, *trace, **options)
        self._listener: TransactionListener | None = None

    def set_transaction_listener(self, listener: TransactionListener) -> None:
        """Before `start`."""
        self._listener = listener

    def _options(self) -> dict[str, Any]:
        if self._listener is None:
            raise ConfigurationError(
                "the producer has no TransactionListener.",
                cure="Call set_transaction_listener before start.",
            )
        return {**super()._options(), "listener": _Checks(self._listener)}

    def start(self) -> None:
        super().start()
        portal, producer = self._ready()
        with contextlib.suppress(RouteNotFoundError):  # the first send makes it known
            portal.call(producer.answer_checks())

    def send_message_in_transaction(
        self, message: Message, arg: Any = None
    ) -> TransactionSendResult:
        """Stores the half message, executes the local transaction, commits or rolls back."""
        portal, producer = self._ready()
        assert self._listener is not None

        async def begin() -> Transaction:
            return await producer.transaction(message.frozen()).__aenter__()

        transaction = portal.call(begin())
        message.transaction_id = transaction.transaction_id
        try:
            transaction.state = _state(self._listener.execute_local_transaction(message, arg))
        except Exception:  # noqa: BLE001 -- the listener's own code: the broker will ask
            _log.exception("the local transaction %s failed", transaction.transaction_id)
            transaction.unknown()
        portal.call(transaction.__aexit__(None, None, None))
        assert transaction.send_result is not None
        return TransactionSendResult(
            SendResult.of(transaction.send_result),
            transaction.transaction_id,
            _NAMES[transaction.state],
        )
