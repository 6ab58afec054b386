"""Remind customers who have not paid after half an hour, and cancel their orders after two hours.

The shop sends itself two messages, which the broker delivers when it is time. The order may have
been paid by then, so both handlers look at its state first.
"""

import contextlib
from collections.abc import Awaitable, Callable
from datetime import timedelta

import sqlalchemy as sa

from shop.desk import Desk, WrongStateError
from shop.events import REMINDERS, TOPIC, order_of
from shop.tables import letters, orders
from sluicemq import ReceivedMessage, Sluice, idempotent

REMIND_AFTER = timedelta(minutes=30)
CANCEL_AFTER = timedelta(hours=2)


def planner(mq: Sluice) -> Callable[[ReceivedMessage], Awaitable[None]]:
    """Return a handler for events with the tag `placed`."""

    async def plan(message: ReceivedMessage) -> None:
        for tag, delay in (("remind", REMIND_AFTER), ("cancel", CANCEL_AFTER)):
            await mq.send(REMINDERS, message.body, tag=tag, keys=message.keys, delay=delay)

    return plan


def reminder(engine: sa.Engine) -> Callable[[ReceivedMessage], None]:
    """Return a handler for reminders with the tag `remind`."""

    @idempotent(engine, key=lambda message: message.keys[0])
    def remind(message: ReceivedMessage, connection: sa.Connection) -> None:
        order = order_of(message)
        state = connection.execute(sa.select(orders.c.state).where(orders.c.id == order.id))
        if state.scalar() == "placed":
            text = f"{order.cents / 100:.2f} are due"
            connection.execute(sa.insert(letters).values(order_id=order.id, text=text))

    return remind


def canceller(desk: Desk) -> Callable[[ReceivedMessage], Awaitable[None]]:
    """Return a handler for reminders with the tag `cancel`."""

    async def cancel(message: ReceivedMessage) -> None:
        with contextlib.suppress(WrongStateError):  # it was paid
            await desk.move(order_of(message), "placed", "cancelled")

    return cancel


async def start(mq: Sluice, engine: sa.Engine, desk: Desk) -> None:
    """Start the consumers that plan reminders and act on them."""
    await mq.consumer("planner", planner(mq)).subscribe(TOPIC, tags="placed").start()
    await mq.consumer("reminder", reminder(engine)).subscribe(REMINDERS, tags="remind").start()
    await mq.consumer("canceller", canceller(desk)).subscribe(REMINDERS, tags="cancel").start()
