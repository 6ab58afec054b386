"""An order service as the tutorial has it, in one class."""

import asyncio
import json
from types import TracebackType
from typing import Self, TypedDict

from sluicemq import Producer, ReceivedMessage, Sluice


class Order(TypedDict):
    id: str
    amount: int


class Service:
    """Owns its client."""

    def __init__(self, name_servers: str) -> None:
        self._mq = Sluice(name_servers, client_id="service-1")
        self._producer: Producer | None = None

    async def __aenter__(self) -> Self:
        self._producer = self._mq.producer("orders", retries=5)
        await self._mq.consumer("ship", self.ship, concurrency=4).subscribe("paid").start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._mq.close()

    async def take(self, order: Order) -> str:
        assert self._producer is not None
        amount = str(order["amount"])
        result = await self._producer.send(
            "paid", json.dumps(order), keys=order["id"], properties={"amount": amount}
        )
        return result.message_id

    async def ship(self, message: ReceivedMessage) -> None:
        order: Order = json.loads(message.body)
        await self._mq.send("shipped", order["id"], delay=10, keys=message.keys)


async def main() -> None:
    async with Service("127.0.0.1:9876") as service:
        print(await service.take({"id": "7", "amount": 12}))


asyncio.run(main())
