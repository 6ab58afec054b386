"""Effects exactly once."""

import asyncio
from datetime import timedelta

import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncConnection

from sluicemq import MessageKeyMissingError, ReceivedMessage, Sluice, idempotent


@idempotent("orders.db", key="order_id", keep=timedelta(days=30), table="seen")
def book(message: ReceivedMessage, connection: sqlalchemy.Connection) -> None:
    connection.execute(sqlalchemy.text("INSERT INTO booked VALUES (1)"))


@idempotent("postgresql+psycopg://host/orders", key=lambda message: message.keys[0], consumer="b")
async def book_later(message: ReceivedMessage, connection: AsyncConnection) -> None:
    await connection.execute(sqlalchemy.text("INSERT INTO booked VALUES (1)"))


async def main() -> None:
    async with Sluice() as mq:
        try:
            await mq.consumer("billing", handler=book).subscribe("orders").run()
        except MessageKeyMissingError as error:
            print(error.fix)
        await mq.consumer("later", book_later, batch_max=10).subscribe("orders").start()


asyncio.run(main())
