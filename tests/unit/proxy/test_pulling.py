"""PullMessage, UpdateOffset, GetOffset, QueryOffset, SyncLiteSubscription."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from proxied import Proxied, proxied
from sluicemq.model.topic import GroupConfig
from sluicemq.proxy import messages as m
from sluicemq.proxy.messages import Code, FilterType, QueryOffsetPolicy
from sluicemq.proxy.pulling import Pulling
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


@dataclass
class Pulled:
    """What a pull was answered with."""

    code: int
    text: str
    bodies: list[str]
    next_offset: int | None

    @classmethod
    def of(cls, answers: list[m.PullMessageResponse]) -> "Pulled":
        kinds = [answer.WhichOneof("content") for answer in answers]
        assert kinds == ["status", *["message"] * (len(kinds) - 2), "next_offset"]
        status = answers[0].status
        found = [answer.message.body.decode() for answer in answers[1:-1]]
        return cls(status.code, status.message, found, answers[-1].next_offset)


def pull_request(proxy: Proxied, offset: int = 0, **fields: Any) -> m.PullMessageRequest:
    return m.PullMessageRequest(
        group=m.Resource(name="g"), message_queue=queue(proxy), offset=offset, **fields
    )


async def pull(proxy: Proxied, offset: int = 0, **fields: Any) -> Pulled:
    request = pull_request(proxy, offset, **fields)
    return Pulled.of(await proxy.speaker().ask("PullMessage", request, 60.0))


async def prepare(proxy: Proxied) -> None:
    await proxy.mq.admin.create_topic("orders", queues=1)
    await proxy.mq.admin.create_group(GroupConfig("g"))


def tags(text: str) -> m.FilterExpression:
    return m.FilterExpression(type=FilterType.TAG, expression=text)


def sql(text: str) -> m.FilterExpression:
    return m.FilterExpression(type=FilterType.SQL, expression=text)


def test_a_pull_gets_messages_and_where_to_go_on() -> None:
    async def scene() -> None:
        async with proxied() as proxy:
            await prepare(proxy)
            await send(proxy, 5, tag="A", keys=["k"], properties={"region": "hz"})
            first = await pull(proxy, batch_size=2)
            assert first == Pulled(Code.OK, "OK", ["0", "1"], 2)
            assert (await pull(proxy, 2)).bodies == ["2", "3", "4"]
            answers = await proxy.speaker().ask("PullMessage", pull_request(proxy, 4))
            message = answers[1].message
            system = message.system_properties
            assert message.topic.name == "orders"
            assert dict(message.user_properties) == {"region": "hz"}
            assert (system.tag, list(system.keys), system.queue_offset) == ("A", ["k"], 4)
            assert system.receipt_handle == ""

    asyncio.run(scene())


def test_filters_choose_and_the_offset_moves_over_the_rest() -> None:
    async def scene() -> None:
        async with proxied() as proxy:
            await prepare(proxy)
            for tag in "ABAB":
                await send(proxy, 1, tag=tag, properties={"n": tag})
            of_tags = await pull(proxy, filter_expression=tags("B || C"))
            assert (of_tags.bodies, of_tags.next_offset) == (["0", "0"], 4)
            of_sql = await pull(proxy, filter_expression=sql("n = 'A'"))
            assert (len(of_sql.bodies), of_sql.next_offset) == (2, 4)
            nothing = await pull(proxy, filter_expression=tags("D"))
            assert (nothing.code, nothing.bodies, nothing.next_offset) == (
                Code.MESSAGE_NOT_FOUND, [], 4,
            )  # fmt: skip
            for wrong in (sql("n ="), sql(""), tags("||")):
                request = pull_request(proxy, filter_expression=wrong)
                (answer,) = await proxy.speaker().ask("PullMessage", request)
                assert answer.status.code == Code.ILLEGAL_FILTER_EXPRESSION

    asyncio.run(scene())


def test_tags_with_the_same_hash_are_told_apart() -> None:
    async def scene() -> None:
        async with proxied() as proxy:
            await prepare(proxy)
            for tag in ("Aa", "BB"):
                await send(proxy, 1, tag=tag)
            found = await pull(proxy, filter_expression=tags("BB"))
            assert (found.bodies, found.next_offset) == (["0"], 2)
            found = await pull(proxy, 1, filter_expression=tags("Aa"))
            assert (found.code, found.next_offset) == (Code.MESSAGE_NOT_FOUND, 2)

    asyncio.run(scene())


@pytest.mark.parametrize(("offset", "next_offset"), [(-1, 0), (9, 0)])
def test_an_offset_that_is_not_there_is_illegal(offset: int, next_offset: int) -> None:
    async def scene() -> None:
        async with proxied() as proxy:
            await prepare(proxy)
            await send(proxy, 3)
            found = await pull(proxy, offset)
            assert (found.code, found.next_offset) == (Code.ILLEGAL_OFFSET, next_offset)
            assert f"go on at {next_offset}" in found.text

    asyncio.run(scene())


def test_a_pull_waits_for_what_it_wants() -> None:
    async def scene() -> None:
        clock = VirtualClock(stands_still=True)
        async with proxied(clock) as proxy:
            await prepare(proxy)
            call = proxy.speaker().call(
                "PullMessage",
                pull_request(
                    proxy, long_polling_timeout=m.Duration(seconds=15), filter_expression=tags("B")
                ),
                20.0,
            )
            for seconds, tag in ((5, "A"), (5, "B")):
                await clock.advance(seconds)
                assert not call.answers
                await send(proxy, 1, tag=tag)
            await clock.advance(1)
            assert Pulled.of(call.answers) == Pulled(Code.OK, "OK", ["0"], 2)

    asyncio.run(scene())


@pytest.mark.parametrize(("deadline_s", "ends_s"), [(20.0, 10), (6.0, 6)])
def test_a_pull_ends_with_its_time(deadline_s: float, ends_s: int) -> None:
    async def scene() -> None:
        clock = VirtualClock(stands_still=True)
        async with proxied(clock) as proxy:
            await prepare(proxy)
            asked = pull_request(proxy, long_polling_timeout=m.Duration(seconds=10))
            call = proxy.speaker().call("PullMessage", asked, deadline_s)
            await clock.advance(ends_s - 1)
            assert not call.answers
            await clock.advance(5)  # the broker looks less often by a clock of this kind
            assert Pulled.of(call.answers) == Pulled(
                Code.MESSAGE_NOT_FOUND, "no new message", [], 0
            )

    asyncio.run(scene())


def test_who_waits_when_the_proxy_ends_is_told_so() -> None:
    async def scene() -> None:
        clock = VirtualClock(stands_still=True)
        async with proxied(clock) as proxy:
            await prepare(proxy)
            asked = pull_request(proxy, long_polling_timeout=m.Duration(seconds=10))
            call = proxy.speaker().call("PullMessage", asked, 20.0)
            await clock.settle()
            for family in proxy.proxy.services:
                if isinstance(family, Pulling):
                    family.drain()
            assert [answer.status.code for answer in call.answers] == [Code.MESSAGE_NOT_FOUND]
            await clock.advance(11)
            assert len(call.answers) == 1

    asyncio.run(scene())


def test_who_gives_up_leaves_nothing_behind() -> None:
    async def scene() -> None:
        clock = VirtualClock(stands_still=True)
        async with proxied(clock) as proxy:
            await prepare(proxy)
            asked = pull_request(
                proxy, long_polling_timeout=m.Duration(seconds=10), filter_expression=tags("Aa")
            )
            call = proxy.speaker().call("PullMessage", asked, 20.0)
            await clock.settle()
            call.lose()
            await send(proxy, 1, tag="BB")
            await clock.advance(1)
            assert call.answers == []
            assert len(proxy.mq.servers.broker.core.polls) == 0

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
