"""What handlers of these tests do in the database, and a consumer as a process of its own.

    python effects.py NAME_SERVER URL CRASH AFTER

consumes topic `orders` for group `billing`. CRASH: `working` kills the process (SIGKILL) inside a
handler, `done` between a handler's commit and the acknowledgement, `never` ends it when nothing has
come for a second. AFTER: at which message. It prints the number of deliveries, one line each.
"""

import os
import signal
import sys
import threading
import time

import sqlalchemy as sa

from sluicemq import idempotent
from sluicemq.client.threaded import PushConsumer

metadata = sa.MetaData()
bookings = sa.Table("bookings", metadata, sa.Column("order_id", sa.String(64)))
account = sa.Table("account", metadata, sa.Column("balance", sa.Integer))


def driven(url: sa.URL) -> sa.URL:
    names = {"postgresql": "postgresql+psycopg"}
    return url.set(drivername=names.get(url.drivername, url.drivername))


def prepare(url: sa.URL) -> None:
    """Empty tables."""
    engine = sa.create_engine(driven(url), poolclass=sa.NullPool)
    with engine.begin() as connection:
        metadata.create_all(connection)
        connection.execute(sa.insert(account).values(balance=0))


def result(url: sa.URL) -> tuple[int, list[str]]:
    """The balance, and which orders were booked."""
    engine = sa.create_engine(driven(url), poolclass=sa.NullPool)
    with engine.connect() as connection:
        balance = connection.execute(sa.select(account.c.balance)).scalar_one()
        return balance, sorted(connection.execute(sa.select(bookings.c.order_id)).scalars())


def book(order: str) -> list[sa.Executable]:
    """The work: neither statement could be repeated without being seen."""
    return [
        sa.insert(bookings).values(order_id=order),
        sa.update(account).values(balance=account.c.balance + 1),
    ]


def main(name_server: str, url: str, crash: str, after: int) -> None:
    count = 0
    moved = time.monotonic()
    lock = threading.Lock()

    @idempotent(sa.make_url(url))
    def work(message, connection):
        statements = book(message.body.decode())
        connection.execute(statements[0])
        if crash == "working" and count >= after:
            os.kill(os.getpid(), signal.SIGKILL)
        connection.execute(statements[1])

    def handle(message):
        nonlocal count, moved
        with lock:
            count += 1
            moved = time.monotonic()
        print(message.body.decode(), flush=True)
        work(message)
        if crash == "done" and count >= after:
            os.kill(os.getpid(), signal.SIGKILL)

    consumer = PushConsumer(name_server, "billing", handle, concurrency=4).subscribe("orders")
    with consumer:
        while crash != "never" or time.monotonic() - moved < 1.5 or not count:
            time.sleep(0.05)
            if not count and time.monotonic() - moved > 20:
                break


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
