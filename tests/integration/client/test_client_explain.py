"""Why a message was not consumed, why a group is idle: each fault is made, and named."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from sluicemq.client.admin.diagnose.findings import Code, Fate, GroupExplained, MessageExplained
from sluicemq.client.core import requests
from sluicemq.client.core.directory import NAME_SERVERS
from sluicemq.errors import MessageNotFoundError
from sluicemq.model.topic import GroupConfig, MessageQueue
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from waiting import limit, until

QUEUE = MessageQueue("T", "broker-a", 0)


@pytest.fixture
async def mq() -> AsyncIterator[EmbeddedSluice]:
    async with embedded() as cluster:
        await cluster.admin.create_topic("T", queues=1)
        await cluster.admin.create_group(GroupConfig("G"))
        yield cluster


async def sent(mq: EmbeddedSluice, tag: str | None = None, **properties: str) -> str:
    result = await mq.send("T", b"x", tag=tag, properties=properties)
    return result.message_id


async def explained(mq: EmbeddedSluice, message_id: str, group: str = "G") -> MessageExplained:
    _, (found,) = await mq.admin.explain_message(message_id, group=group)
    return found


def codes(found: MessageExplained | GroupExplained) -> list[Code]:
    return [finding.code for finding in found.findings]


async def forget(mq: EmbeddedSluice, topic: str) -> None:
    """The name server forgets a topic that its broker has."""
    command = requests.delete_topic_on_name_server(topic=topic, cluster="DefaultCluster")
    await mq.cluster.ask(NAME_SERVERS, command)
    mq.cluster.routes.remove(topic)


async def test_no_such_group(mq: EmbeddedSluice) -> None:
    found = await explained(mq, await sent(mq), "nobody")
    assert (found.fate, codes(found)) == (Fate.UNKNOWN, [Code.NO_SUCH_GROUP])
    assert codes(await mq.admin.explain_group("nobody")) == [Code.NO_SUCH_GROUP]


async def test_no_member(mq: EmbeddedSluice) -> None:
    found = await explained(mq, await sent(mq))
    assert (found.fate, codes(found)) == (Fate.OFFLINE, [Code.NO_MEMBER])
    assert codes(await mq.admin.explain_group("G")) == [Code.NO_MEMBER]


async def test_unequal_subscriptions(mq: EmbeddedSluice) -> None:
    other = mq.servers.client()
    async with mq.subscribe("T", group="G", tags="A"), other.subscribe("T", group="G", tags="B"):
        await asyncio.sleep(0.3)
        found = await mq.admin.explain_group("G")
        assert Code.UNEQUAL in codes(found)
        text = next(one.what for one in found.findings if one.code is Code.UNEQUAL)
        assert ": A" in text
        assert ": B" in text
        nobodys = await explained(mq, await sent(mq, "C"))
        assert (nobodys.fate, codes(nobodys)[0]) == (Fate.FILTERED, Code.NO_LANE)
        assert Code.UNEQUAL in codes(nobodys)
        lanes = (await mq.admin.contract("G"))[0].lanes
        mine = next(one for one in lanes if one["subscriptions"]["T"][1] == "B")
        text = next(one.what for one in (await explained(mq, await sent(mq, "B"))).findings
                    if one.code is Code.LANE)  # fmt: skip
        assert f"belongs to lane {mine['lane']} (T: B)" in text
        assert mine["clientIds"][0] in text


@pytest.mark.parametrize(
    ("where", "properties", "code", "words"),
    [
        ("price > 30 AND region = 'hz'", {"price": "7", "region": "hz"}, Code.FILTER_FALSE,
         "price > 30 is false (price is '7', a String)"),
        ("price > 30", {"price": "30.5"}, Code.FILTER_ERROR, "30.5"),
        ("price > 30", {}, Code.FILTER_FALSE, "price is absent"),
    ],
)  # fmt: skip
async def test_the_filter_drops_it(
    mq: EmbeddedSluice, where: str, properties: dict[str, str], code: Code, words: str
) -> None:
    async with mq.subscribe("T", group="G", where=where):
        found = await explained(mq, await sent(mq, **properties))
        assert (found.fate, codes(found)) == (Fate.FILTERED, [code])
        assert found.cause is not None
        assert words in found.cause.what
        assert found.verdict is not None
    found = await explained(mq, await sent(mq, **properties))
    assert found.fate is Fate.FILTERED, "the broker keeps the expression of a group that is away"


async def test_another_tag(mq: EmbeddedSluice) -> None:
    async with mq.subscribe("T", group="G", tags="A || B"):
        found = await explained(mq, await sent(mq, "C"))
    assert (found.fate, codes(found)) == (Fate.FILTERED, [Code.FILTER_FALSE])
    assert found.cause is not None
    assert "A || B" in found.cause.what
    assert "'C'" in found.cause.what


async def test_a_member_without_a_queue(mq: EmbeddedSluice) -> None:
    other = mq.servers.client()
    async with mq.subscribe("T", group="G"), other.subscribe("T", group="G"):
        async with asyncio.timeout(limit(15)):
            while True:
                found = await mq.admin.explain_group("G")
                if codes(found) == [Code.MEMBER_IDLE]:
                    break
                await asyncio.sleep(0.05)
    assert "2 members" in found.findings[0].what


async def test_the_offset_is_past_the_message(mq: EmbeddedSluice) -> None:
    message_id = await sent(mq)
    await mq.admin.commit_offset("G", QUEUE, 1)
    found = await explained(mq, message_id)
    assert (found.fate, codes(found)) == (Fate.CONSUMED, [Code.OFFSET_PAST])
    assert found.cause is not None
    assert "No trace shows" in found.cause.what


async def test_a_retry_is_pending_and_ends_as_a_dead_letter(mq: EmbeddedSluice) -> None:
    seen: list[int] = []

    async def handler(message: object) -> None:
        seen.append(1)
        raise ValueError("no")

    async with mq.consumer("G", handler).subscribe("T"):
        message_id = await sent(mq)
        await until(lambda: seen)
        async with asyncio.timeout(limit(10)):
            while (found := await explained(mq, message_id)).fate is not Fate.RETRY:
                await asyncio.sleep(0.05)
        assert codes(found) == [Code.RETRY_PENDING]
        assert found.times == 1
        assert found.cause is not None
        assert "will be delivered in" in found.cause.what


async def test_a_dead_letter(mq: EmbeddedSluice) -> None:
    async def handler(message: object) -> None:
        raise ValueError("no")

    async with mq.consumer("G", handler, max_reconsume_times=0).subscribe("T"):
        message_id = await sent(mq)
        async with asyncio.timeout(limit(10)):
            while (found := await explained(mq, message_id)).fate is not Fate.DEAD:
                await asyncio.sleep(0.05)
    assert codes(found) == [Code.DEAD_LETTER]
    assert found.cause is not None
    assert "failed to process the message 1 times" in found.cause.what
    # The copy in the dead-letter topic has the same id.
    facts, _ = await mq.admin.explain_message(message_id)
    assert facts.message.topic == "T"


async def test_the_topic_has_no_route(mq: EmbeddedSluice) -> None:
    message_id = await sent(mq)
    async with mq.subscribe("T", group="G") as messages:
        await messages.receive()
        second = await sent(mq)
        await mq.admin.create_topic("T", queues=1, perm=2)
        mq.cluster.routes.remove("T")
        found = await explained(mq, second)
        assert found.fate is Fate.WAITING
        assert Code.NO_ROUTE in codes(found)
        assert codes(await mq.admin.explain_group("G"))[0] is Code.NO_ROUTE
    await forget(mq, "T")
    found_now, _ = await mq.admin.explain_message(message_id, group="G", topic="T")
    assert found_now.readable_brokers is None or "broker-a" not in found_now.readable_brokers


async def test_a_consumer_that_does_not_acknowledge(mq: EmbeddedSluice) -> None:
    async with mq.subscribe("T", group="G") as messages:
        message_id = await sent(mq)
        await messages.receive()
        found = await explained(mq, message_id)
        assert (found.fate, codes(found)) == (Fate.WAITING, [Code.NOT_ACKNOWLEDGING])
        assert found.owner
        assert codes(await mq.admin.explain_group("G")) == [Code.NOT_ACKNOWLEDGING]


async def test_without_a_group_each_reader_is_told(mq: EmbeddedSluice) -> None:
    message_id = await sent(mq, "A")
    async with contextlib.AsyncExitStack() as stack:
        got = await stack.enter_async_context(mq.subscribe("T", group="G"))
        await stack.enter_async_context(mq.subscribe("T", group="H", tags="B"))
        await (await got.receive()).ack()
        about, found = await mq.admin.explain_message(message_id)
    fates = {item.group: item.fate for item in found}
    assert about.queue == QUEUE
    assert fates["H"] is Fate.FILTERED
    assert set(fates) == {"G", "H"}


async def test_a_message_that_is_not_there(mq: EmbeddedSluice) -> None:
    with pytest.raises(MessageNotFoundError):
        await mq.admin.explain_message("F" * 32)


async def test_a_group_that_is_up_to_date_has_no_findings(mq: EmbeddedSluice) -> None:
    async with mq.subscribe("T", group="G", where="n > 5") as messages:
        await sent(mq, n="6")
        await (await messages.receive()).ack()
    async with mq.subscribe("T", group="G", where="n > 5"):
        async with asyncio.timeout(limit(10)):
            while codes(found := await mq.admin.explain_group("G")):
                await asyncio.sleep(0.05)
    assert (found.lag, found.matching) == (0, 0)
