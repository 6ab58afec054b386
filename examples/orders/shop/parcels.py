"""Paid orders go to the carrier, whose service is down now and then.

A parcel that could not be handed over comes again, after 10 s, 30 s, 1 min and so on. After five
retries it lies in the dead letters of the group, and somebody has to call the carrier.
"""

import contextlib
from collections.abc import Awaitable, Callable

import sqlalchemy as sa

from shop.desk import Desk, WrongStateError
from shop.events import TOPIC, Order, order_of
from shop.tables import letters
from sluicemq import ReceivedMessage, RetryLaterError, Sluice

Carrier = Callable[[Order], Awaitable[None]]
"""Takes a parcel; the id of the order tells it which ones it has. Raises CarrierAwayError."""
RETRIES_MAX = 5
LOST = "%DLQ%parcels"


class CarrierAwayError(Exception):
    """Nobody answers there."""


def shipper(carrier: Carrier, desk: Desk) -> Callable[[ReceivedMessage], Awaitable[None]]:
    """A handler of `paid`."""

    async def ship(message: ReceivedMessage) -> None:
        order = order_of(message)
        try:
            await carrier(order)
        except CarrierAwayError as error:
            raise RetryLaterError(str(error)) from error
        with contextlib.suppress(WrongStateError):  # shipped before
            await desk.move(order, "paid", "shipped")

    return ship


def undertaker(engine: sa.Engine) -> Callable[[ReceivedMessage], None]:
    """A handler of the dead letters."""

    def write_to_staff(message: ReceivedMessage) -> None:
        text = f"staff: not shipped after {RETRIES_MAX} retries"
        with engine.begin() as connection:
            connection.execute(sa.insert(letters).values(order_id=order_of(message).id, text=text))

    return write_to_staff


async def start(mq: Sluice, engine: sa.Engine, carrier: Carrier, desk: Desk) -> None:
    """Parcels leave; somebody hears of those that cannot."""
    parcels = mq.consumer("parcels", shipper(carrier, desk), max_reconsume_times=RETRIES_MAX)
    await parcels.subscribe(TOPIC, tags="paid").start()
    await mq.consumer("undertaker", undertaker(engine)).subscribe(LOST).start()
