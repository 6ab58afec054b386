"""A shop that announces orders, ships them, and sends reminders.

Each function takes the client as an argument, so that a test can pass another one.
"""

from collections.abc import Callable
from datetime import timedelta

from sluicemq import PushConsumer, ReceivedMessage, Sluice

REMIND_AFTER = timedelta(minutes=30)


async def place(mq: Sluice, order: str) -> None:
    """Send a message about an order, and a reminder that the broker delivers later."""
    await mq.send("orders", order, keys=[order])
    await mq.send("reminders", order, keys=[order], delay=REMIND_AFTER)


async def start_shipping(mq: Sluice, ship: Callable[[str], None]) -> PushConsumer:
    """Call `ship` for each order. If it raises, the order is delivered again after a delay."""

    async def handle(message: ReceivedMessage) -> None:
        ship(message.body.decode())

    consumer = mq.consumer("shipping", handle).subscribe("orders")
    await consumer.start()
    return consumer
