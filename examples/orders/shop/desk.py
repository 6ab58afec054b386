"""Change orders in the database, and send an event for each change.

The change and its event happen together or not at all. First the event is stored as a prepared
message, which no consumer sees. Then the row is written, with the id of the transaction. Then the
message is committed. If the process dies in between, the broker asks another desk, which looks for
the id in the database.
"""

import asyncio

import sqlalchemy as sa

from shop.events import TOPIC, Order, event
from shop.tables import announced, orders
from sluicemq import Sluice, StoredMessage, TransactionListener, TransactionState

LONGEST_CHANGE_S = 60
"""The broker asks for the outcome after this time. No change takes longer."""


class WrongStateError(Exception):
    """The order is in another state than the change expects."""


class Desk(TransactionListener):
    """Changes orders. All desks belong to one producer group."""

    def __init__(self, mq: Sluice, engine: sa.Engine) -> None:
        self.engine = engine
        self.producer = mq.producer("shop-desk", listener=self)

    async def open(self) -> None:
        """Start to answer the broker about transactions that other desks have left open."""
        await self.producer.answer_checks(TOPIC)

    async def place(self, order: Order) -> None:
        """Add an order. Raises IntegrityError if there is one with this id."""
        row = sa.insert(orders).values(
            id=order.id, region=order.region, cents=order.cents, state="placed"
        )
        await self.change(order, "placed", row)

    async def move(self, order: Order, before: str, after: str) -> None:
        """Change the state of an order. Raises WrongStateError if it is not `before`."""
        row = (
            sa.update(orders)
            .where(orders.c.id == order.id, orders.c.state == before)
            .values(state=after)
        )
        await self.change(order, after, row)

    async def change(self, order: Order, name: str, change: sa.Insert | sa.Update) -> None:
        """Write the change and send its event, or do neither."""
        async with self.producer.transaction(
            event(name, order), check_after_s=LONGEST_CHANGE_S
        ) as transaction:
            await asyncio.to_thread(self.write, order, change, transaction.transaction_id)

    def write(self, order: Order, change: sa.Insert | sa.Update, transaction_id: str) -> None:
        """Write the change and the id of its message in one database transaction."""
        with self.engine.begin() as connection:
            if connection.execute(change).rowcount != 1:
                raise WrongStateError(order.id)
            connection.execute(
                sa.insert(announced).values(transaction_id=transaction_id, order_id=order.id)
            )

    def check(self, message: StoredMessage) -> TransactionState:
        """Return how the transaction of this message has ended."""
        row = sa.select(announced).where(announced.c.transaction_id == message.message_id)
        with self.engine.connect() as connection:
            is_there = connection.execute(row).first() is not None
        return TransactionState.COMMIT if is_there else TransactionState.ROLLBACK
