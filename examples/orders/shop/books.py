"""Payments, in the books once each.

A message may come twice: after a crash, after a rebalance, after a lost answer. `@idempotent` notes
its key in the transaction of the booking, so the second one finds the key and is skipped.
"""

from collections.abc import Callable

import sqlalchemy as sa

from shop.events import TOPIC, order_of
from shop.tables import bookings
from sluicemq import ReceivedMessage, Sluice, idempotent


def payment(message: ReceivedMessage) -> str:
    """What makes two messages the same payment."""
    return f"{message.keys[0]} {message.tag}"


def bookkeeper(engine: sa.Engine) -> Callable[[ReceivedMessage], None]:
    """A handler of `paid`."""

    @idempotent(engine, key=payment)
    def book(message: ReceivedMessage, connection: sa.Connection) -> None:
        order = order_of(message)
        connection.execute(sa.insert(bookings).values(region=order.region, cents=order.cents))

    return book


async def start(mq: Sluice, engine: sa.Engine) -> None:
    """Payments go into the books."""
    await mq.consumer("books", bookkeeper(engine)).subscribe(TOPIC, tags="paid").start()
