"""The shop from a shell, beside a cluster (`sluice up`).

    python -m shop open                   all consumers, until Ctrl-C
    python -m shop review                 large orders, as they come
    python -m shop place 17 north 2500    an order, in cents
    python -m shop pay 17 north 2500

The database is shop.db, here; NAMESRV_ADDR says where the cluster is, else it is on this machine.
"""

import asyncio
import contextlib
import sys
from pathlib import Path

from shop.desk import Desk
from shop.events import Order
from shop.review import large_orders
from shop.staff import make_topics, open_shop
from shop.tables import open_database
from sluicemq import Sluice


async def hand_over(order: Order) -> None:
    """A carrier for trials."""
    print(f"order {order.id} leaves for {order.region}", flush=True)


async def main(command: str, *given: str) -> None:
    """Does what the command line says."""
    engine = open_database(Path("shop.db"))
    async with Sluice() as mq:
        if command == "open":
            await open_shop(mq, engine, hand_over)
            print("open", flush=True)
            await asyncio.Event().wait()
        await make_topics(mq)
        if command == "review":
            async for order in large_orders(mq):
                print(f"look at order {order.id}: {order.cents / 100:.2f}", flush=True)
        number, region, cents = given
        order, desk = Order(number, region, int(cents)), Desk(mq, engine)
        await (desk.place(order) if command == "place" else desk.move(order, "placed", "paid"))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(*sys.argv[1:]))
