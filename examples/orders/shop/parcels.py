"""Hand paid orders to the carrier, whose service is away now and then.

An order that cannot be handed over is delivered again after 10 s, 30 s, 1 min and so on. After five
retries it is in the dead letters of the group, and the staff gets a letter.
"""

import contextlib
from collections.abc import Awaitable, Callable

import sqlalchemy as sa

from shop.desk import Desk, WrongStateError
from shop.events import TOPIC, Order, order_of
from shop.tables import letters
from sluicemq import ReceivedMessage, RetryLaterError, Sluice

Carrier = Callable[[Order], Awaitable[None]]
"""Takes a parcel, and ignores an order that it has. Raises CarrierAwayError."""
RETRIES_MAX = 5
LOST = "%DLQ%parcels"


class CarrierAwayError(Exception):
    """The carrier's service does not respond."""


def shipper(carrier: Carrier, desk: Desk) -> Callable[[ReceivedMessage], Awaitable[None]]:
    """Return a handler for events with the tag `paid`."""

    async def ship(message: ReceivedMessage) -> None:
        order = order_of(message)
        try:
            await carrier(order)
        except CarrierAwayError as error:
            raise RetryLaterError(str(error)) from error
        with contextlib.suppress(WrongStateError):  # shipped before
            await desk.move(order, "paid", "shipped")

    return ship


def reporter(engine: sa.Engine) -> Callable[[ReceivedMessage], None]:
    """Return a handler for the dead letters of the group `parcels`."""

    def write_to_staff(message: ReceivedMessage) -> None:
        text = f"staff: not shipped after {RETRIES_MAX} retries"
        with engine.begin() as connection:
            connection.execute(sa.insert(letters).values(order_id=order_of(message).id, text=text))

    return write_to_staff


async def start(mq: Sluice, engine: sa.Engine, carrier: Carrier, desk: Desk) -> None:
    """Start the consumers that ship parcels, and that report the lost ones."""
    parcels = mq.consumer("parcels", shipper(carrier, desk), max_reconsume_times=RETRIES_MAX)
    await parcels.subscribe(TOPIC, tags="paid").start()
    await mq.consumer("lost-parcels", reporter(engine)).subscribe(LOST).start()
