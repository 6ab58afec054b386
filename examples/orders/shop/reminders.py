"""Orders that nobody pays: a letter after half an hour, the end after two hours.

No table of timers, no job that runs every minute: two messages to ourselves, which the broker
delivers when it is time. By then the order may have been paid, so whoever gets one looks first.
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
GIVE_UP_AFTER = timedelta(hours=2)


def planner(mq: Sluice) -> Callable[[ReceivedMessage], Awaitable[None]]:
    """A handler of `placed`."""

    async def plan(message: ReceivedMessage) -> None:
        for tag, delay in (("remind", REMIND_AFTER), ("give_up", GIVE_UP_AFTER)):
            await mq.send(REMINDERS, message.body, tag=tag, keys=message.keys, delay=delay)

    return plan


def reminder(engine: sa.Engine) -> Callable[[ReceivedMessage], None]:
    """A handler of `remind`."""

    @idempotent(engine, key=lambda message: message.keys[0])
    def remind(message: ReceivedMessage, connection: sa.Connection) -> None:
        order = order_of(message)
        state = connection.execute(sa.select(orders.c.state).where(orders.c.id == order.id))
        if state.scalar() == "placed":
            text = f"{order.cents / 100:.2f} are due"
            connection.execute(sa.insert(letters).values(order_id=order.id, text=text))

    return remind


def quitter(desk: Desk) -> Callable[[ReceivedMessage], Awaitable[None]]:
    """A handler of `give_up`."""

    async def give_up(message: ReceivedMessage) -> None:
        with contextlib.suppress(WrongStateError):  # it was paid
            await desk.move(order_of(message), "placed", "cancelled")

    return give_up


async def start(mq: Sluice, engine: sa.Engine, desk: Desk) -> None:
    """Reminders are planned, and heeded."""
    await mq.consumer("planner", planner(mq)).subscribe(TOPIC, tags="placed").start()
    await mq.consumer("reminder", reminder(engine)).subscribe(REMINDERS, tags="remind").start()
    await mq.consumer("quitter", quitter(desk)).subscribe(REMINDERS, tags="give_up").start()
