"""Places orders, each a row and a message, both or neither: python shop.py [--crash]"""

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
"""The broker asks about a transaction not before it is so old. None of ours takes that long."""


def open_database() -> sqlite3.Connection:
    database = sqlite3.connect(DATABASE)
    database.execute(
        "create table if not exists orders"
        " (id text primary key, amount integer check (amount > 0), transaction_id text unique)"
    )
    return database


class Ledger(TransactionListener):
    """Answers the broker about transactions that were left undecided: by a crash, or because the
    network lost how they ended. Any process of the producer group is asked, at any later time.
    """

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database = database

    async def check(self, message: StoredMessage) -> TransactionState:
        transaction_id = message.properties["UNIQ_KEY"]
        found = self.database.execute(
            "select id from orders where transaction_id = ?", (transaction_id,)
        ).fetchone()
        if found:
            print(f"asked about order {found[0]}: committed", flush=True)
            return TransactionState.COMMIT
        # No row, and after CHECK_AFTER_S none will come. (Where that is not sure, answer UNKNOWN:
        # who says ROLLBACK too early loses the message of an order that is placed.)
        return TransactionState.ROLLBACK


async def place(
    producer: Producer, database: sqlite3.Connection, amount: int, *, crash: bool = False
) -> str:
    """The id of the order. Raises sqlite3.IntegrityError when the database refuses it."""
    order = secrets.token_hex(4)
    body = json.dumps({"order": order, "amount": amount})
    async with producer.transaction(
        "orders", body, keys=[order], check_after_s=CHECK_AFTER_S
    ) as transaction:
        # The broker has the message and shows it to nobody yet. Now our own work: the id beside
        # the row is how check() finds out later. (A statement of SQLite takes a millisecond; for
        # a database across a network use its asyncio driver.)
        with database:
            database.execute(
                "insert into orders values (?, ?, ?)", (order, amount, transaction.transaction_id)
            )
        if crash:
            print(f"order {order} has a row; this process dies before the commit", flush=True)
            os._exit(1)
    # Leaving the block has committed the message; an exception in it rolls back, and goes on.
    return order


async def main() -> None:
    with contextlib.closing(open_database()) as database:
        async with Sluice() as mq:
            producer = mq.producer("shop", listener=Ledger(database))
            # Before the first send: for transactions that a crash has left.
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
    # SIGTERM, with which service managers end a program, is to do what Ctrl-C does: cancel main().
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
