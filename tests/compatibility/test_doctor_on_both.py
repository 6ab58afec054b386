"""Doctor before the real broker and before ours: it finds the same, and nothing where nothing is
wrong; what a RocketMQ broker cannot tell is no cause."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from peer.clusters import Cluster
from peer.names import own

from sluicemq import Sluice
from sluicemq.client.sync.admin import Admin
from sluicemq.operate.doctor import Diagnosis, diagnose
from waiting import limit

KINDS = ["sluicemq", "rocketmq"]


async def examine(names: str, **about: Any) -> Diagnosis:
    def look() -> Diagnosis:
        with Admin(names) as admin:
            return diagnose(admin, **about)

    return await asyncio.to_thread(look)


async def becomes(wanted: str | None, names: str, **about: Any) -> Diagnosis:
    """What takes a moment to show."""
    end_s = time.monotonic() + limit(30)
    while True:
        found = await examine(names, **about)
        if (found.cause and found.cause.code) == wanted:
            return found
        assert time.monotonic() < end_s, (wanted, found.cause, found.facts.unseen)
        await asyncio.sleep(0.2)


async def take(message: Any) -> None:
    """A handler that is content."""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
async def test_doctor_finds_the_same_on_both(kind: str, cluster: Callable[[str], Cluster]) -> None:
    names = cluster(kind).name_server
    topic = group = own(f"doctor-{kind}")
    async with Sluice(names) as mq:
        await mq.admin.create_topic(topic, queues=1, type="normal")
        sent = await mq.send(topic, b"x", properties={"price": "3"})
        await mq.consumer(group, take).subscribe(topic).start()
        seen = await becomes(None, names, topic=topic, group=group, message_id=sent.message_id)
        assert all(one.clock_ahead_ms is not None for one in seen.facts.masters)
        await mq.consumer(f"{group}-sql", take).subscribe(topic, where="price > 9").start()
        found = await becomes("filter-matches-nothing", names, group=f"{group}-sql")
        assert found.cause
        assert "price > 9 is true for none" in found.cause.what
        await becomes("wrong-type", names, topic=topic, type="fifo")
        later = await mq.send(topic, b"later", delay_level=18)
        await becomes("message-delayed", names, message_id=later.message_id)
        address = next(iter((await mq.admin.masters()).values()))
        await becomes("name-server-is-broker", address)
    await becomes("no-member", names, group=group)
