"""A shop: orders are announced, shipped, and reminded of. It is handed its client, so that a test
can hand it another one."""

from collections.abc import Callable
from datetime import timedelta

from sluicemq import PushConsumer, ReceivedMessage, Sluice

REMIND_AFTER = timedelta(minutes=30)


async def place(mq: Sluice, order: str) -> None:
    """Announces an order, and a reminder of it for later, which the broker keeps until then."""
    await mq.send("orders", order, keys=[order])
    await mq.send("reminders", order, keys=[order], delay=REMIND_AFTER)


async def start_shipping(mq: Sluice, ship: Callable[[str], None]) -> PushConsumer:
    """Calls `ship` for each order; one that it raises for comes again, later and later."""

    async def handle(message: ReceivedMessage) -> None:
        ship(message.body.decode())

    consumer = mq.consumer("shipping", handle).subscribe("orders")
    await consumer.start()
    return consumer
