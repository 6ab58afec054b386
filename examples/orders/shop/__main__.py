"""Run the shop from a shell.

    python -m shop open                   start all consumers, until Ctrl-C
    python -m shop review                 print large orders, until Ctrl-C
    python -m shop place 17 north 2500    order number 17, to the region north, for 25.00
    python -m shop pay 17 north 2500      pay this order
    python -m shop carrier away           let the carrier refuse parcels, until `carrier back`

The database is shop.db in the current directory. NAMESRV_ADDR is the address of the name server;
the default is 127.0.0.1:9876.
"""

import asyncio
import sys
from pathlib import Path

from sqlalchemy.exc import IntegrityError

from shop.desk import Desk, WrongStateError
from shop.events import Order
from shop.parcels import CarrierAwayError
from shop.review import large_orders
from shop.staff import make_topics, open_shop
from shop.tables import open_database
from sluicemq import Sluice, SluiceError

PARAMETERS = {"open": 0, "review": 0, "place": 3, "pay": 3}
"""The number of parameters of each command."""
AWAY = Path("carrier-is-away")
"""The carrier is away while this file exists."""


async def hand_over(order: Order) -> None:
    """Print the order, instead of calling a carrier."""
    if await asyncio.to_thread(AWAY.exists):
        print(f"the carrier is away, order {order.id} waits", flush=True)
        raise CarrierAwayError("the carrier is away")
    print(f"order {order.id} leaves for {order.region}", flush=True)


async def main(command: str, *given: str) -> None:
    """Execute one command."""
    if command in ("place", "pay") and not given[2].isdecimal():
        sys.exit(f"The price must be a whole number of cents, got {given[2]!r}.")
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
        try:
            await (desk.place(order) if command == "place" else desk.move(order, "placed", "paid"))
        except IntegrityError:
            sys.exit(f"There is an order {number} already.")
        except WrongStateError:
            sys.exit(f"Order {number} does not exist, was paid, or was cancelled.")


if __name__ == "__main__":
    words = sys.argv[1:]
    if words == ["carrier", "away"]:
        AWAY.touch()
    elif words == ["carrier", "back"]:
        AWAY.unlink(missing_ok=True)
    elif not words or PARAMETERS.get(words[0]) != len(words) - 1:
        sys.exit(__doc__)
    else:
        try:
            asyncio.run(main(*words))
        except KeyboardInterrupt:
            pass
        except SluiceError as error:  # for example: the broker does not run
            sys.exit(str(error))
