"""Half messages: a send with TRAN_MSG=true is stored where no consumer sees it.

A rewrite of the intake, before the delays: REAL_TOPIC and REAL_QID say where the message goes when
its transaction is committed (spec/remoting.md §16).
"""

from typing import Final

from sluicemq.broker.produce.intake import Draft, Intake, RefusalError
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import HALF_TOPIC
from sluicemq.broker.transactions.open import UndecidedTable
from sluicemq.broker.transactions.prepared import COPY_BYTES_MAX, REAL_QUEUE, TRANSACTION_ID
from sluicemq.model.message import (
    COMMITTED,
    DELAY,
    PRODUCER_GROUP,
    REAL_TOPIC,
    TIMER_PROPERTIES,
    TRAN_MSG,
    TRANSACTION_MASK,
    UNIQ_KEY,
)
from sluicemq.record import property_text as text
from sluicemq.wire.codes import ResponseCode

_DELAYS: Final = (DELAY, *TIMER_PROPERTIES, "TIMER_DEL_UNIQKEY")


class Preparing:
    """Makes half messages. `table` is exchanged when the transactions are loaded."""

    def __init__(self, settings: Settings, intake: Intake) -> None:
        self._settings = settings
        self._intake = intake
        self.table = UndecidedTable(0, 0)
        intake.rewrites.insert(0, self.rewrite)

    def rewrite(self, draft: Draft) -> None:
        """Hide a message of a transaction. Raises RefusalError."""
        properties = draft.properties
        kind = draft.sys_flag & TRANSACTION_MASK
        if kind == COMMITTED or properties.get(TRAN_MSG, "").lower() != "true":
            return
        if draft.reconsume_times > 0 and properties.get(DELAY, "0") != "0":
            # A consumer gives it back: it was committed long ago (spec/delivery.md §3).
            del properties[TRAN_MSG]
            draft.sys_flag &= ~TRANSACTION_MASK
            return
        self._check(properties)
        properties |= {
            REAL_TOPIC: draft.topic,
            REAL_QUEUE: str(draft.queue_id),
            TRANSACTION_ID: properties.get(UNIQ_KEY, ""),
        }
        self._intake.check_properties(len(text.as_text(properties).encode()) + COPY_BYTES_MAX)
        draft.topic, draft.queue_id = HALF_TOPIC, 0
        draft.sys_flag &= ~TRANSACTION_MASK

    def _check(self, properties: dict[str, str]) -> None:
        config = self._settings.broker
        if config.reject_transactions:
            raise RefusalError(
                ResponseCode.NO_PERMISSION,
                f"the broker[{config.broker_name}] sending transaction message is forbidden "
                "(rejectTransactionMessage).",
            )
        for name in _DELAYS:
            if properties.get(name, "0") != "0":
                raise RefusalError(
                    ResponseCode.MESSAGE_ILLEGAL,
                    f"a message of a transaction cannot be delayed (property {name}="
                    f"{properties[name]}). It was not stored. Commit it when it is due, or send a "
                    "delayed message without a transaction.",
                )
        if not properties.get(PRODUCER_GROUP):
            raise RefusalError(
                ResponseCode.MESSAGE_ILLEGAL,
                "a message of a transaction has no producer group (property PGROUP): nobody could "
                "be asked how it ended. It was not stored.",
            )
        if len(self.table) >= config.transactions_open_max:
            raise RefusalError(
                ResponseCode.SYSTEM_BUSY,
                f"{len(self.table):,} transactions are undecided, the limit is "
                f"{config.transactions_open_max:,} (sluiceTransactionsOpenMax). It was not stored. "
                "See `sluice transaction list` for what they wait for.",
            )
