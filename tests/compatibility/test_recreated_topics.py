"""A topic that is deleted and created again, on our broker and on the real RocketMQ 5.3.3: the
Python client reads the new topic from its first message."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from peer import clusters

from simulation.recreated import Consumer
from sluicemq import Sluice
from waiting import limit

OLD, KINDS = 20, ("handler", "stream", "lite", "pull", "broadcast")


@pytest.fixture(scope="module", params=["sluicemq", "rocketmq"])
def running(request: pytest.FixtureRequest, cluster: Any) -> clusters.Cluster:
    found: clusters.Cluster = cluster(request.param)
    return found


@pytest.mark.parametrize(
    ("running", "length"),
    [
        *(("sluicemq", length) for length in (5, OLD, OLD + 10)),
        ("rocketmq", OLD),
        *(pytest.param("rocketmq", it, marks=pytest.mark.thorough) for it in (5, OLD + 10)),
    ],
    indirect=["running"],
)
async def test_every_kind_of_consumer_reads_the_new_topic(
    running: clusters.Cluster, length: int, tmp_path: Path
) -> None:
    name = f"recreated-{length}"

    async def fill(mq: Sluice, life: str, count: int) -> list[bytes]:
        await mq.admin.create_topic(name, queues=1)
        mq.cluster.routes.expire(name)
        bodies = [f"{life} {number}".encode() for number in range(count)]
        for body in bodies:
            await mq.send(name, body)
        return bodies

    async def reading(kind: str, clients: list[Sluice]) -> Consumer:
        mq = Sluice(running.name_server, offsets_directory=str(tmp_path / kind), instance=kind)
        clients.append(await mq.__aenter__())
        mq.cluster.long_poll_s = 2.0
        # Each kind is a group of its own.
        consumer = Consumer(mq, kind, "first", topic=name, group=f"{name}-{kind}")
        await consumer.open()
        return consumer

    async def await_all(consumers: list[Consumer], bodies: list[bytes]) -> None:
        async with asyncio.timeout(limit(60)):
            while any(set(bodies) - consumer.got.keys() for consumer in consumers):
                for consumer in consumers:
                    consumer.check()
                await asyncio.sleep(0.1)

    clients: list[Sluice] = []
    async with Sluice(running.name_server) as mq:
        old = await fill(mq, "old", OLD)
        consumers = [await reading(kind, clients) for kind in KINDS]
        try:
            await await_all(consumers, old)
            await mq.admin.delete_topic(name)
            new = await fill(mq, "new", length)
            await await_all(consumers, new)
            twice = Counter(one.kind for one in consumers if max(one.got.values()) > 2)
            assert not twice
        finally:
            for consumer in consumers:
                await consumer.close()
            for client in clients:
                await client.close()
