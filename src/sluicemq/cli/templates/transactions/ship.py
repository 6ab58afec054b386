"""Ships orders, each once, until Ctrl-C: python ship.py"""

import asyncio
import contextlib
import json
import os
import signal
import sqlite3

from sluicemq import ReceivedMessage, Sluice

DATABASE = os.environ.get("SHIPPED_DATABASE", "shipped.db")


async def main() -> None:
    with contextlib.closing(sqlite3.connect(DATABASE)) as database:
        database.execute("create table if not exists shipped (id text primary key)")

        async def ship(message: ReceivedMessage) -> None:
            order = json.loads(message.body)["order"]
            # Messages are delivered at least once, so the work has to bear a repetition: here the
            # primary key does. (For effects in any SQL database, exactly once: `idempotent`.)
            with database:
                added = database.execute("insert or ignore into shipped values (?)", (order,))
            if added.rowcount:
                print(f"shipped order {order}", flush=True)

        async with Sluice() as mq:
            print("shipping; Ctrl-C ends it", flush=True)
            await mq.consumer("shipping", ship).subscribe("orders").run()


if __name__ == "__main__":
    # SIGTERM, with which service managers end a program, is to do what Ctrl-C does: cancel main().
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
