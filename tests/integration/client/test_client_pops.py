"""A group that pops, through the admin API and the command line: its lag, who has what, and why."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from click.testing import CliRunner, Result

from sluicemq.cli import main
from sluicemq.client.admin.diagnose.findings import Code, Fate
from sluicemq.client.admin.topics import masters
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.requests import (
    expect_success,
    header_fields,
    heartbeat,
    make_request,
    unregister,
)
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import GroupConfig
from sluicemq.record.codec import decode_records
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.wire import bodies
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command
from sluicemq.wire.popping import AckMessageRequest, PopMessageRequest, ReceiptHandle
from waiting import limit


@pytest.fixture
async def mq() -> AsyncIterator[EmbeddedSluice]:
    async with embedded(tcp=True) as cluster:
        await cluster.admin.create_topic("T", queues=1)
        await cluster.admin.create_group(GroupConfig("G"))
        yield cluster


async def sluice(mq: EmbeddedSluice, *words: str) -> Result:
    """In a thread: the cluster needs this one."""
    environment = {"NAMESRV_ADDR": mq.servers.name_server_address, "COLUMNS": "240"}
    async with asyncio.timeout(limit(30)):
        return await asyncio.to_thread(CliRunner().invoke, main, list(words), env=environment)


class Popper:
    """A member of the group, by requests alone."""

    def __init__(self, mq: EmbeddedSluice) -> None:
        self._mq = mq

    async def _ask(self, command: Command) -> Command:
        def talk(directory: object) -> Conversation[Command]:
            (address,) = (yield from masters(directory)).values()  # type: ignore[arg-type]
            return expect_success((yield Call(address, command)))

        admin = self._mq.admin
        return await admin.run(talk(admin.directory))

    async def beat(self) -> None:
        data = bodies.ConsumerData("G", subscriptions=(parse_subscription("T"),))
        await self._ask(heartbeat(bodies.Heartbeat("popper", (), (data,))))

    async def leave(self) -> None:
        """It answers no questions of tools, which would wait for them."""
        await self._ask(unregister("popper", consumer="G"))

    async def pop(self, count: int) -> list[tuple[StoredMessage, ReceiptHandle]]:
        header = PopMessageRequest(
            group="G", topic="T", queue_id=-1, count_max=count, invisible_ms=60_000, poll_ms=1000
        )
        answer = await self._ask(make_request(RequestCode.POP_MESSAGE, header))
        fields, found = header_fields(answer), decode_records(answer.body)
        numbers = (int(fields[name]) for name in ("popTime", "invisibleTime", "reviveQid"))
        handle = ReceiptHandle(found[0].queue_offset, *numbers, 0, "broker-a", 0)
        return [(one, handle._replace(offset=one.queue_offset)) for one in found]

    async def acknowledge(self, handle: ReceiptHandle) -> None:
        header = AckMessageRequest(
            group="G", topic="T", queue_id=0, handle=handle.encode(), offset=handle.offset
        )
        await self._ask(make_request(RequestCode.ACK_MESSAGE, header))


async def test_what_is_in_flight_is_told(mq: EmbeddedSluice) -> None:
    popper = Popper(mq)
    await popper.beat()
    for _ in range(3):
        await mq.send("T", b"x")
    (first, handle), (second, _) = await popper.pop(2)
    await popper.acknowledge(handle)
    await popper.leave()

    shown = await sluice(mq, "group", "lag", "G", "--json")
    assert shown.exit_code == 0, shown.output
    (record,) = [one for one in map(json.loads, shown.stdout.splitlines()) if one["topic"] == "T"]
    assert (record["lag"], record["in_flight"], record["matching"]) == (2, 1, 2)
    table = (await sluice(mq, "group", "lag", "G")).stdout
    assert "The lag is 2 messages, of which 1 are in flight" in table
    assert "Pops T on broker-a by TAG *." in (await sluice(mq, "group", "show", "G")).stdout

    fates = []
    for message in (first, second):
        _, (found,) = await mq.admin.explain_message(message.message_id, group="G", topic="T")
        fates.append((found.fate, found.cause and found.cause.code))
    assert fates == [(Fate.CONSUMED, Code.OFFSET_PAST), (Fate.IN_FLIGHT, Code.IN_FLIGHT)]
    told = await sluice(mq, "explain", "message", second.message_id, "--group", "G")
    assert "popper popped it" in told.stdout
    assert "(delivery 1)" in told.stdout
