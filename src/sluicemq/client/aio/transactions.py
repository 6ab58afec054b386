"""Transactions of the asyncio producer.

    async with producer.transaction("orders", body) as tx:     # the half message is stored
        await database.commit(...)                              # the local transaction
    # leaving has committed; an exception would have rolled back

`tx.unknown()` and `tx.rollback()` say how leaving ends it instead. The same in RocketMQ's way:
`producer.send_in_transaction(message, argument)` calls the producer's TransactionListener.

What becomes of a message whose commit the broker never heard is decided by its question (39), which
the keeper hands over: answered from this process' own memory, then by the listener.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.core.answers import SendResult, SendStatus
from sluicemq.client.core.messages import Outgoing
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
)
from sluicemq.errors import (
    ConnectionLostError,
    RequestTimeoutError,
    RouteNotFoundError,
    SluiceError,
)
from sluicemq.model.message import Message

_log = logging.getLogger("sluicemq.client")

SendHalf = Callable[[Outgoing], Awaitable[SendResult]]


class Transactions(AskedGroup):
    """The transactions of one producer."""

    def __init__(self, cluster: Cluster, group: str, listener: TransactionListener | None) -> None:
        super().__init__(group, listener)
        self._cluster = cluster

    @property
    def is_used(self) -> bool:
        """Can a broker have reason to ask?"""
        return self.listener is not None or self._decisions.is_used

    async def begin(
        self, outgoing: Outgoing, check_after_s: int | None, send: SendHalf
    ) -> tuple[HalfPlace, SendResult]:
        """Sends the half message. When that fails, a check would roll it back."""
        half = as_half(outgoing, self.group, check_after_s)
        message_id = half.message_id
        self._decisions.begin(message_id)
        try:
            result = await send(half)
            return place_of(result, self.group), result
        except BaseException:
            self._decisions.end(message_id, TransactionState.ROLLBACK, "")
            raise

    async def finish(self, place: HalfPlace, state: TransactionState) -> bool:
        """Tells the broker how it ended; False when that is left to a check.

        Raises RequestError when the broker refuses.
        """
        self._decisions.end(place.transaction_id, state, place.queue.broker)
        command = end_transaction(place, state)
        try:
            await self._cluster.route(place.queue.topic)
            address = self._cluster.master(place.queue)
            if self.trace is not None:
                self.trace.ended(place, state, address)
            if command.is_oneway:
                (await self._cluster.channel(address)).oneway(self._cluster.signed(command))
                return False
            answer = await self._cluster.call(address, command)
        except (ConnectionLostError, RequestTimeoutError, RouteNotFoundError) as error:
            _log.warning(
                "%s of transaction %s has no answer, the broker will ask: %s",
                state.name, place.transaction_id, error,
            )  # fmt: skip
            return False
        return is_acknowledged(answer, address)

    async def run(
        self, place: HalfPlace, result: SendResult, message: Message, argument: Any
    ) -> TransactionResult:
        """The second half of `send_in_transaction`: local transaction, then its end."""
        if result.status is not SendStatus.OK:
            state = TransactionState.ROLLBACK
        else:
            state = await self._execute(message, place.transaction_id, argument)
        acknowledged = await self.finish(place, state)
        return TransactionResult(result, place.transaction_id, state, acknowledged)

    async def _execute(
        self, message: Message, transaction_id: str, argument: Any
    ) -> TransactionState:
        assert self.listener is not None
        try:
            return as_state(
                await _value(self.listener.execute_local(message, transaction_id, argument))
            )
        except Exception:  # noqa: BLE001 -- the listener's own code
            _log.exception(
                "the local transaction %s failed: the broker will ask how it ended", transaction_id
            )
            return TransactionState.UNKNOWN

    async def check(self, question: Question) -> TransactionState | None:
        """The answer to a broker's question; None when this producer cannot know it."""
        known = self._decisions.known(question)
        if known is not None:
            return known
        if self.listener is None:
            self._warn_of(question)
            return None
        try:
            return as_state(await _value(self.listener.check(question.message)))
        except Exception:  # noqa: BLE001 -- the listener's own code
            _log.exception("the check of transaction %s failed", question.place.transaction_id)
            return TransactionState.UNKNOWN


async def _value(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


class Transaction(TransactionBlock):
    """One message with its local transaction: what `producer.transaction` returns.

    Entering sends the half message and raises as a send does; then nothing has begun. Leaving
    normally commits, an exception (which goes on) rolls back. Leaving raises RequestError when the
    broker refuses the end; when the broker cannot be reached it does not: the broker asks later.
    """

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

    async def __aenter__(self) -> Self:
        self._check_is_new()
        place, result = await self._transactions.begin(
            self._outgoing, self._check_after_s, self._send
        )
        self._place, self.send_result = place, result
        if result.status is not SendStatus.OK:
            await self._transactions.finish(place, TransactionState.ROLLBACK)
            raise not_safe(result)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._place is not None
        if error is None:
            self.is_acknowledged = await self._transactions.finish(self._place, self.state)
            return
        self.state = TransactionState.ROLLBACK
        try:
            self.is_acknowledged = await self._transactions.finish(self._place, self.state)
        except SluiceError as refusal:
            self._tell_refusal(refusal)
