"""An outage is logged once, and its end once, however many parts of a client meet it."""

import asyncio
import logging

import pytest

from sluicemq.client.core.outages import FLAP_S, Outages, is_outage
from sluicemq.errors import ConnectionLostError, RequestError, SendError, SluiceError
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


class Clock:
    now_s = 0.0

    def monotonic_s(self):
        return self.now_s


def test_the_end_tells_how_long_it_was_and_how_much_was_not_logged(caplog):
    clock = Clock()
    outages = Outages(clock)
    for _ in range(4):
        outages.failed("a:1", "pull of %s failed", "q")
    outages.failed("b:1", "other")
    clock.now_s = 60.0
    outages.worked("a:1")
    outages.worked("a:1")
    found = [one.getMessage() for one in caplog.records]
    assert found == [
        "pull of q failed [until it works again, failures of a:1 are logged at DEBUG]",
        "other [until it works again, failures of b:1 are logged at DEBUG]",
        "the outage of a:1 is over after 60 s; 3 more failures were logged at DEBUG",
    ]
    assert set(outages.open) == {"b:1"}


def test_what_fails_again_at_once_is_logged_when_it_lasts(caplog):
    clock = Clock()
    outages = Outages(clock)
    outages.failed("a:1", "first")
    outages.worked("a:1")
    caplog.clear()
    outages.failed("a:1", "flap")
    outages.worked("a:1")
    assert not caplog.records
    outages.failed("a:1", "flap")
    clock.now_s += FLAP_S + 1
    outages.failed("a:1", "lasts")
    outages.failed("a:1", "lasts")
    assert [one.getMessage().partition(" ")[0] for one in caplog.records] == ["lasts"]
    outages.worked("a:1")
    assert "2 more failures" in caplog.records[-1].getMessage()


def test_an_outage_is_found_behind_the_error_that_a_send_raises():
    failed = SendError("not stored")
    failed.__cause__ = ConnectionLostError("gone")
    assert is_outage(failed)
    refused = RequestError(1, "no")
    refused.__cause__ = refused  # as `raise error from error` leaves it
    assert not is_outage(refused)
