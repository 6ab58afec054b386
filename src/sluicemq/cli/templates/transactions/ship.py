"""Ship each order once, until Ctrl-C. Run: python ship.py."""

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
            # A message is delivered at least once, so the handler must be idempotent: here, the
            # primary key makes it so. (For effects in any SQL database, see `idempotent`.)
            with database:
                added = database.execute("insert or ignore into shipped values (?)", (order,))
            if added.rowcount:
                print(f"shipped order {order}", flush=True)

        async with Sluice() as mq:
            print("shipping; Ctrl-C ends it", flush=True)
            await mq.consumer("shipping", ship).subscribe("orders").run()


if __name__ == "__main__":
    # Service managers end a program with SIGTERM. Let it do what Ctrl-C does: cancel main().
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores it
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
