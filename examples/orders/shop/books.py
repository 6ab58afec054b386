"""Write each payment into the books, once.

A message may be delivered twice, for example after a crash. `@idempotent` stores its key in the
transaction of the booking, so the second delivery finds the key and is skipped.
"""

from collections.abc import Callable

import sqlalchemy as sa

from shop.events import TOPIC, order_of
from shop.tables import bookings
from sluicemq import ReceivedMessage, Sluice, idempotent


def payment(message: ReceivedMessage) -> str:
    """Return a key that two messages for the same payment have in common."""
    return f"{message.keys[0]} {message.tag}"


def bookkeeper(engine: sa.Engine) -> Callable[[ReceivedMessage], None]:
    """Return a handler for events with the tag `paid`."""

    @idempotent(engine, key=payment)
    def book(message: ReceivedMessage, connection: sa.Connection) -> None:
        order = order_of(message)
        connection.execute(sa.insert(bookings).values(region=order.region, cents=order.cents))

    return book


async def start(mq: Sluice, engine: sa.Engine) -> None:
    """Start a consumer that writes payments into the books."""
    await mq.consumer("books", bookkeeper(engine)).subscribe(TOPIC, tags="paid").start()
