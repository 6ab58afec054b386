"""Tests of an application: a cluster in the process, on virtual time."""

from pathlib import Path

from sluicemq import Credentials
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.testing.virtual import VirtualClock


async def test_a_reminder_comes_after_a_day(tmp_path: Path) -> None:
    async with embedded(clock=VirtualClock()) as mq:
        await mq.send("reminders", b"1", delay=86_400)
        await mq.clock.advance(days=1)
        message = await mq.subscribe("reminders", group="g").receive()
        assert message.body == b"1"
    async with embedded(
        tcp=True,
        store=tmp_path,
        settings={"autoCreateTopicEnable": "false"},
        trace="traces",
        producer_group="p",
        send_timeout_ms=2000,
        credentials=Credentials("key", "secret"),
    ) as durable:
        other: EmbeddedSluice = durable.servers.client(client_id="second")
        await durable.servers.restart_broker("broker-a", brokerPermission="4")
        await other.queues("reminders")


async def test_with_the_plugin(sluicemq: EmbeddedSluice) -> None:
    await sluicemq.send("orders", b"7")
