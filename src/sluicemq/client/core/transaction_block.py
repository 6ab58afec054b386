"""What both faces of a transaction share: how a block ends, and the group that brokers ask.

`client.aio.transactions` and `client.sync.transactions` add the sending, which one of them awaits.
"""

import logging

from sluicemq.client.core.answers import SendResult
from sluicemq.client.core.messages import Outgoing
from sluicemq.client.core.tracing import Tracing
from sluicemq.client.core.transactions import (
    Decisions,
    HalfPlace,
    Question,
    TransactionListener,
    TransactionState,
)
from sluicemq.errors import ConfigurationError, SluiceError

_log = logging.getLogger("sluicemq.client")


class TransactionBlock:
    """One message with its local transaction. `transaction_id` is what a check will name: store it
    with the local transaction's own data."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._place: HalfPlace | None = None
        self.transaction_id = outgoing.message_id
        self.state = TransactionState.COMMIT
        """How leaving normally ends it."""
        self.send_result: SendResult | None = None
        self.is_acknowledged = False
        """Whether the broker has confirmed the end."""

    def unknown(self) -> None:
        """Leave it undecided: the broker will ask."""
        self.state = TransactionState.UNKNOWN

    def rollback(self) -> None:
        """Roll back when the block is left, without an exception."""
        self.state = TransactionState.ROLLBACK

    def commit(self) -> None:
        """Commit after all, when the block is left normally."""
        self.state = TransactionState.COMMIT

    def _check_is_new(self) -> None:
        if self._place is not None:
            raise ConfigurationError(
                "this transaction was entered before.", cure="Make a new one for each message."
            )

    def _tell_refusal(self, refusal: SluiceError) -> None:
        """The user's own exception matters more, and goes on."""
        _log.warning("rolling back transaction %s failed: %s", self.transaction_id, refusal)


class AskedGroup:
    """A producer group that brokers ask, and what this process can answer."""

    def __init__(self, group: str, listener: TransactionListener | None) -> None:
        self.group = group
        self.listener = listener
        self.trace: Tracing | None = None
        self._decisions = Decisions()
        self._has_warned = False

    def expect_listener(self) -> None:
        """Raises ConfigurationError without one."""
        if self.listener is None:
            raise ConfigurationError(
                f"the producer of group {self.group!r} has no TransactionListener.",
                cure="Give it one (listener=), or use a `producer.transaction(...)` block.",
            )

    def _warn_of(self, question: Question) -> None:
        """Nobody here knows the answer; once is enough."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "a broker asks producer group %s about transaction %s, which this process has not "
                "begun, and the producer has no TransactionListener: give it one.",
                self.group, question.place.transaction_id,
            )  # fmt: skip
