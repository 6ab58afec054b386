"""Find large orders. The broker selects them."""

from collections.abc import AsyncIterator

from shop.events import TOPIC, Order, order_of
from sluicemq import Sluice

LARGE = "TAGS = 'placed' AND cents >= 100000 AND region <> 'home'"


async def large_orders(mq: Sluice) -> AsyncIterator[Order]:
    """Yield large orders. An order is acknowledged when the next one is requested."""
    async with mq.subscribe(TOPIC, group="review", where=LARGE) as stream:
        async for message in stream:
            yield order_of(message)
            await message.ack()
