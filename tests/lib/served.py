"""Brokers over real sockets: started and ended, and asked one thing on a connection of its own."""

import contextlib
from collections.abc import AsyncIterator, Mapping

from sluicemq.broker.server import Broker
from sluicemq.net.channel import dial
from sluicemq.wire.frames import Command

NEW_TOPIC = {
    "topic": "T", "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6,
    "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false",
}  # fmt: skip
"""What makes the topic T with one queue (17)."""


@contextlib.asynccontextmanager
async def running(broker: Broker) -> AsyncIterator[Broker]:
    await broker.start()
    try:
        yield broker
    finally:
        await broker.close()


async def call(
    broker: Broker, code: int, fields: Mapping[str, object] | None = None, body: bytes = b""
) -> Command:
    texts = None if fields is None else {name: str(value) for name, value in fields.items()}
    channel = await dial(broker.address)
    try:
        return await channel.call(Command(code, texts, body), 10.0)
    finally:
        await channel.close()
