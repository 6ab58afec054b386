"""UpdateOffset, GetOffset, QueryOffset, SyncLiteSubscription."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from proxied import Proxied, proxied
from sluicemq.model.topic import GroupConfig
from sluicemq.proxy import messages as m
from sluicemq.proxy.messages import Code, QueryOffsetPolicy
from sluicemq.testing.virtual import VirtualClock


def queue(proxy: Proxied, topic: str = "orders", queue_id: int = 0) -> m.MessageQueue:
    broker = proxy.mq.servers.broker.core.settings.broker.broker_name
    return m.MessageQueue(topic=m.Resource(name=topic), id=queue_id, broker=m.Broker(name=broker))


async def send(proxy: Proxied, count: int, **fields: Any) -> None:
    producer = proxy.mq.producer()
    for number in range(count):
        await producer.send("orders", f"{number}".encode(), **fields)


def test_an_offset_is_kept_for_a_group() -> None:
    async def scene() -> None:
        async with proxied() as proxy:
            await proxy.mq.admin.create_topic("orders", queues=1)
            client, group = proxy.speaker(), m.Resource(name="g")
            asked = m.GetOffsetRequest(group=group, message_queue=queue(proxy))
            answer = await client.ask("GetOffset", asked)
            assert answer.status.code == Code.OFFSET_NOT_FOUND
            said = m.UpdateOffsetRequest(group=group, message_queue=queue(proxy), offset=7)
            answer = await client.ask("UpdateOffset", said)
            assert answer.status.code == Code.CONSUMER_GROUP_NOT_FOUND
            await proxy.mq.admin.create_group(GroupConfig("g"))
            answer = await client.ask("UpdateOffset", said)
            assert answer.status.code == Code.OK
            answer = await client.ask("GetOffset", asked)
            assert (answer.status.code, answer.offset) == (Code.OK, 7)
            said.offset = -1
            answer = await client.ask("UpdateOffset", said)
            assert answer.status.code == Code.ILLEGAL_OFFSET

    asyncio.run(scene())


def test_a_queue_tells_its_ends_and_where_it_was_at_a_time() -> None:
    async def scene() -> None:
        clock = VirtualClock()
        async with proxied(clock) as proxy:
            await proxy.mq.admin.create_topic("orders", queues=1)
            await send(proxy, 2)
            await clock.advance(5)
            between_ms = clock.now_ms()
            await clock.advance(5)
            await send(proxy, 3)
            client = proxy.speaker()
            asked = m.QueryOffsetRequest(message_queue=queue(proxy))
            found = []
            for policy in QueryOffsetPolicy:
                asked.query_offset_policy = policy
                if policy == QueryOffsetPolicy.TIMESTAMP:
                    answer = await client.ask("QueryOffset", asked)
                    assert answer.status.code == Code.BAD_REQUEST
                    asked.timestamp.seconds = between_ms // 1000
                    asked.timestamp.nanos = between_ms % 1000 * 1_000_000
                answer = await client.ask("QueryOffset", asked)
                assert answer.status.code == Code.OK
                found.append(answer.offset)
            assert found == [0, 5, 2]

    asyncio.run(scene())


def test_a_request_names_one_queue_that_can_be_read() -> None:
    async def scene() -> None:
        async with proxied() as proxy:
            await proxy.mq.admin.create_topic("orders", queues=1)
            client = proxy.speaker()
            here = queue(proxy)
            wrong = {
                Code.TOPIC_NOT_FOUND: [queue(proxy, "none")],
                Code.BAD_REQUEST: [
                    queue(proxy, queue_id=1),
                    queue(proxy, queue_id=-1),
                    m.MessageQueue(topic=here.topic, id=0, broker=m.Broker(name="away")),
                ],
            }
            for code, queues in wrong.items():
                for one in queues:
                    asked = m.QueryOffsetRequest(message_queue=one)
                    answer = await client.ask("QueryOffset", asked)
                    assert answer.status.code == code, answer.status.message

    asyncio.run(scene())


def test_lite_topics_are_not_served() -> None:
    async def scene() -> None:
        async with proxied() as proxy:
            answer = await proxy.speaker().ask(
                "SyncLiteSubscription",
                m.SyncLiteSubscriptionRequest(topic=m.Resource(name="orders")),
            )
            assert answer.status.code == Code.UNSUPPORTED

    asyncio.run(scene())
