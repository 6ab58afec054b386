"""A broker's successor has its files and another address, as after a failover: clients follow the
routes within seconds, without a word of the application, and nothing is lost."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator

import pytest

from sluicemq import Message
from sluicemq.nameserver.routes import Registration
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.testing.virtual import VirtualClock

AWAY_S = 4.0
"""From the death of the master to its successor's registration."""


@pytest.fixture
async def mq() -> AsyncIterator[EmbeddedSluice]:
    async with embedded(clock=VirtualClock()) as mq:
        await mq.admin.create_topic("t", queues=4)
        shadow(mq)
        yield mq


def shadow(mq: EmbeddedSluice) -> None:
    """A slave is registered, by its name alone: so the clients know that somebody may take over."""
    assert mq.servers.name_server is not None
    table = mq.servers.name_server.requests.table
    slave = Registration(
        cluster="DefaultCluster", broker="broker-a", broker_id=1, address="127.0.0.1:9",
        acting_master_enable=False, timeout_ms=10**9,
    )  # fmt: skip
    table.register(slave, int(mq.clock.monotonic_s() * 1000))


async def fail_over(mq: EmbeddedSluice) -> str:
    """The master goes; its successor is there after a while. The address that it has."""
    servers = mq.servers
    await servers.stop_broker("broker-a")
    await mq.clock.advance(seconds=AWAY_S)
    servers._ports.pop("broker-a")
    return (await servers.start_broker("broker-a")).address


async def test_a_send_that_meets_the_failover_is_stored_by_the_successor(
    mq: EmbeddedSluice,
) -> None:
    before = await mq.send("t", b"0")
    over = asyncio.create_task(fail_over(mq))
    await asyncio.sleep(1)
    began_s = mq.clock.monotonic_s()
    sends = [mq.send("t", b"%d" % n, sharding_key=f"{n}") for n in range(1, 5)]
    results = await asyncio.gather(*sends, mq.send_batch([Message("t", b"5"), Message("t", b"6")]))
    assert mq.clock.monotonic_s() - began_s < AWAY_S + 1
    assert before.queue.broker == results[0].queue.broker
    address = await over
    assert mq.cluster.routes.master_addresses["t"] == {"broker-a": address}


@pytest.mark.parametrize("is_ordered", [False, True])
async def test_consumers_go_on_at_the_successor(mq: EmbeddedSluice, is_ordered: bool) -> None:
    """Orderly ones lock their queues there anew; each key stays in its order, nobody reads beside
    another."""
    got: dict[str, list[int]] = defaultdict(list)
    running: set[str] = set()

    async def handle(one) -> None:
        key, _, number = one.body.decode().partition(":")
        if is_ordered:
            assert key not in running, "two members have its queue"
        running.add(key)
        await asyncio.sleep(0.01)
        running.discard(key)
        got[key].append(int(number))

    for _ in range(2):
        member = mq.servers.client()
        await member.consumer("g", handle, ordered=is_ordered).subscribe("t").start()
    await mq.clock.advance(seconds=5)
    keys = [f"key-{number}" for number in range(8)]
    sent = 0

    async def produce() -> None:
        nonlocal sent
        while True:
            for key in keys:
                await mq.send("t", f"{key}:{sent}".encode(), sharding_key=key)
            sent += 1
            await asyncio.sleep(0.5)

    producing = asyncio.create_task(produce())
    await mq.clock.advance(seconds=5)
    await fail_over(mq)
    at_s = mq.clock.monotonic_s()
    so_far = sum(map(len, got.values()))
    while sum(map(len, got.values())) == so_far:
        await mq.clock.advance(seconds=0.25)
    assert mq.clock.monotonic_s() - at_s < 8
    await mq.clock.advance(seconds=60)
    producing.cancel()
    await mq.clock.advance(seconds=60)
    for key in keys:
        assert set(got[key]) == set(range(sent)), key
        if is_ordered:
            firsts = list(dict.fromkeys(got[key]))
            assert firsts == sorted(firsts)
