"""Place orders: for each, a row and a message, or neither. Run: python shop.py [--crash]."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sqlite3
import sys

from sluicemq import Producer, Sluice, StoredMessage, TransactionListener, TransactionState

DATABASE = os.environ.get("SHOP_DATABASE", "shop.db")
CHECK_AFTER_S = 15
"""The age at which the broker checks an open transaction. No transaction here takes that long."""


def open_database() -> sqlite3.Connection:
    database = sqlite3.connect(DATABASE)
    database.execute(
        "create table if not exists orders"
        " (id text primary key, amount integer check (amount > 0), transaction_id text unique)"
    )
    return database


class Ledger(TransactionListener):
    """Tells the broker how transactions ended that it still considers open.

    A transaction stays open if the process crashes, or if the network loses its commit. The broker
    may check it with any process of the producer group, at any later time.
    """

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database = database

    async def check(self, message: StoredMessage) -> TransactionState:
        transaction_id = message.properties["UNIQ_KEY"]
        row = self.database.execute(
            "select id from orders where transaction_id = ?", (transaction_id,)
        ).fetchone()
        if row:
            print(f"asked about order {row[0]}: committed", flush=True)
            return TransactionState.COMMIT
        # There is no row, and after CHECK_AFTER_S none will be inserted. (If that is not certain,
        # return UNKNOWN: an early ROLLBACK loses the message of an order that is then placed.)
        return TransactionState.ROLLBACK


async def place(
    producer: Producer, database: sqlite3.Connection, amount: int, *, crash: bool = False
) -> str:
    """Place an order and return its id. Raises sqlite3.IntegrityError if it is invalid."""
    order = secrets.token_hex(4)
    body = json.dumps({"order": order, "amount": amount})
    async with producer.transaction(
        "orders", body, keys=[order], check_after_s=CHECK_AFTER_S
    ) as transaction:
        # The broker has stored the message, but delivers it to no consumer yet. Now insert the row.
        # check() finds it later by the transaction id. (A statement of SQLite takes a millisecond;
        # for a database across a network, use its asyncio driver.)
        with database:
            database.execute(
                "insert into orders values (?, ?, ?)", (order, amount, transaction.transaction_id)
            )
        if crash:
            print(f"order {order} has a row; this process dies before the commit", flush=True)
            os._exit(1)
    # Leaving the block commits the message. An exception in it rolls back and is raised again.
    return order


async def main() -> None:
    with contextlib.closing(open_database()) as database:
        async with Sluice() as mq:
            producer = mq.producer("shop", listener=Ledger(database))
            # Called before the first send, for transactions that an earlier crash has left open.
            await producer.answer_checks("orders")
            if "--crash" in sys.argv:
                await place(producer, database, 75, crash=True)
            for amount in (20, 130, -5):
                try:
                    order = await place(producer, database, amount)
                    print(f"placed order {order} of {amount}", flush=True)
                except sqlite3.IntegrityError as error:
                    print(f"an order of {amount} is refused: {error}", flush=True)
            print("answering what the broker asks; Ctrl-C ends it", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    # Service managers end a program with SIGTERM. Let it do what Ctrl-C does: cancel main().
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores it
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
