"""An outage is logged once, and its end once, however many parts of a client meet it."""

import asyncio
import logging

import pytest

from sluicemq.errors import SluiceError
from sluicemq.testing.embedded import embedded
from sluicemq.testing.virtual import VirtualClock


def warnings(caplog):
    return [
        one.getMessage() for one in caplog.records
        if one.name.startswith("sluicemq.client") and one.levelno >= logging.WARNING
    ]  # fmt: skip


STOPS = {
    "broker": ["broker"],
    "name servers": ["names"],
    "both": ["broker", "names"],
}


@pytest.mark.parametrize("kind", STOPS)
async def test_each_server_that_is_away_is_one_line_and_its_return_another_one(kind, caplog):
    async with embedded(clock=VirtualClock()) as mq:
        await mq.admin.create_topic("t", queues=8)
        fails = set()

        async def handle(message):
            if message.body in fails:
                raise SluiceError("the handler fails while its broker is away")

        async def transact(producer):
            try:
                async with producer.transaction("t", b"x"):
                    await asyncio.sleep(30)
            except SluiceError:
                pass

        await mq.consumer("a", handle).subscribe("t").start()
        await mq.consumer("o", handle, ordered=True).subscribe("t").start()
        polled = mq.lite_pull("l")
        await polled.subscribe("t")
        producer = mq.producer("p")
        await producer.queues("t")
        await mq.clock.advance(seconds=5)
        transactions = [
            asyncio.get_running_loop().create_task(transact(producer)) for _ in range(5)
        ]
        await mq.clock.advance(seconds=1)
        caplog.clear()
        for what in STOPS[kind]:
            if what == "broker":
                await mq.servers.stop_broker()
            else:
                await mq.servers.stop_name_server()
        await mq.clock.advance(seconds=300)
        during = warnings(caplog)
        assert len(during) == len(STOPS[kind]), during
        caplog.clear()
        for what in reversed(STOPS[kind]):
            if what == "broker":
                await mq.servers.start_broker()
            else:
                await mq.servers.start_name_server()
        await mq.clock.advance(seconds=120)
        after = warnings(caplog)
        assert len([one for one in after if "is over after" in one]) == len(STOPS[kind]), after
        rest = [one for one in after if "is over after" not in one and "the lock of" not in one]
        assert not rest
        assert len([one for one in after if "the lock of" in one]) <= 1
        await asyncio.gather(*transactions)
