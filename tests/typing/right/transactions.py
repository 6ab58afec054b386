"""Transactions, with a block and with a listener."""

import asyncio
from typing import Any

from sluicemq import (
    Message,
    Sluice,
    StoredMessage,
    TransactionListener,
    TransactionResult,
    TransactionState,
)


class Books(TransactionListener):
    def __init__(self) -> None:
        self.known: set[str] = set()

    def execute_local(
        self, message: Message, transaction_id: str, argument: Any
    ) -> TransactionState:
        self.known.add(transaction_id)
        return TransactionState.COMMIT

    async def check(self, message: StoredMessage) -> TransactionState:
        is_known = message.message_id in self.known
        return TransactionState.COMMIT if is_known else TransactionState.ROLLBACK


async def main() -> None:
    async with Sluice("127.0.0.1:9876", trace=True) as mq:
        async with mq.transaction("orders", b"7", tag="paid", check_after_s=30) as transaction:
            print(transaction.transaction_id)
            transaction.rollback()
        producer = mq.producer("orders-p", listener=Books())
        await producer.answer_checks("orders")
        result: TransactionResult = await producer.send_in_transaction(
            Message("orders", b"8"), {"row": 8}, check_after_s=10
        )
        print(result.state is TransactionState.COMMIT, result.send_result.message_id)


asyncio.run(main())
