"""Where orders change.

A change and the message about it happen together or not at all. The message is sent first, as a
half message that nobody sees; then the row is written, with the id of the transaction beside it;
then the message is committed. When the process dies in between, the broker asks any desk how it
ended, and the row is the answer.
"""

import asyncio

import sqlalchemy as sa

from shop.events import TOPIC, Order, event
from shop.tables import announced, orders
from sluicemq import Sluice, StoredMessage, TransactionListener, TransactionState

LONGEST_CHANGE_S = 60
"""The broker asks after that time: a change that is not there then never will be."""


class WrongStateError(Exception):
    """The order is not in the state that the change begins with."""


class Desk(TransactionListener):
    """Takes orders, payments, cancellations. One producer group for all desks."""

    def __init__(self, mq: Sluice, engine: sa.Engine) -> None:
        self.engine = engine
        self.producer = mq.producer("shop-desk", listener=self)

    async def open(self) -> None:
        """From now on the broker may ask about what other desks have left."""
        await self.producer.answer_checks(TOPIC)

    async def place(self, order: Order) -> None:
        """A new order. Raises IntegrityError when there is one with this id."""
        row = sa.insert(orders).values(
            id=order.id, region=order.region, cents=order.cents, state="placed"
        )
        await self.change(order, "placed", row)

    async def move(self, order: Order, before: str, after: str) -> None:
        """An order goes from one state to the next. Raises WrongStateError."""
        row = (
            sa.update(orders)
            .where(orders.c.id == order.id, orders.c.state == before)
            .values(state=after)
        )
        await self.change(order, after, row)

    async def change(self, order: Order, name: str, change: sa.Insert | sa.Update) -> None:
        """Writes the change and tells everybody, or does neither."""
        async with self.producer.transaction(
            event(name, order), check_after_s=LONGEST_CHANGE_S
        ) as transaction:
            await asyncio.to_thread(self.write, order, change, transaction.transaction_id)

    def write(self, order: Order, change: sa.Insert | sa.Update, transaction_id: str) -> None:
        """The change and the id of its message, in one transaction of the database."""
        with self.engine.begin() as connection:
            if connection.execute(change).rowcount != 1:
                raise WrongStateError(order.id)
            connection.execute(
                sa.insert(announced).values(transaction_id=transaction_id, order_id=order.id)
            )

    def check(self, message: StoredMessage) -> TransactionState:
        """How did the transaction of this message end?"""
        row = sa.select(announced).where(announced.c.transaction_id == message.message_id)
        with self.engine.connect() as connection:
            is_there = connection.execute(row).first() is not None
        return TransactionState.COMMIT if is_there else TransactionState.ROLLBACK
