"""QueryRoute and QueryAssignment."""

import asyncio

import pytest

pytest.importorskip("google.protobuf")

from proxied import proxied
from sluicemq.model.topic import QueueData
from sluicemq.proxy import messages as m
from sluicemq.proxy.messages import Code, MessageType, Permission
from sluicemq.proxy.routes import iter_queue_permissions


def test_a_route_has_the_address_that_the_client_knows() -> None:
    async def scene() -> None:
        async with proxied() as proxy:
            await proxy.mq.admin.create_topic("orders", queues=3)
            client = proxy.speaker()
            asked = m.Endpoints(scheme=3, addresses=[m.Address(host="mq.example", port=8081)])
            answer = await client.ask(
                "QueryRoute",
                m.QueryRouteRequest(topic=m.Resource(name="orders"), endpoints=asked),
            )
            assert answer.status.code == Code.OK
            assert [queue.id for queue in answer.message_queues] == [0, 1, 2]
            for queue in answer.message_queues:
                assert queue.broker.endpoints == asked
                assert queue.permission == Permission.READ_WRITE
                assert list(queue.accept_message_types) == [MessageType.NORMAL]
            answer = await client.ask(
                "QueryRoute", m.QueryRouteRequest(topic=m.Resource(name="orders"))
            )
            address = answer.message_queues[0].broker.endpoints.addresses[0]
            assert (address.host, address.port) == ("127.0.0.1", 8081)

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("name", "code"),
    [("none", Code.TOPIC_NOT_FOUND), ("a b", Code.ILLEGAL_TOPIC), ("", Code.ILLEGAL_TOPIC),
     ("rmq_sys_REVIVE_LOG_DefaultCluster", Code.ILLEGAL_TOPIC), ("TBW102", Code.ILLEGAL_TOPIC),
     ("RMQ_SYS_TRACE_TOPIC", Code.ILLEGAL_TOPIC)],
)  # fmt: skip
def test_a_topic_that_is_not_there_has_no_route(name: str, code: Code) -> None:
    async def scene() -> None:
        async with proxied() as proxy:
            answer = await proxy.speaker().ask(
                "QueryRoute", m.QueryRouteRequest(topic=m.Resource(name=name))
            )
            assert answer.status.code == code

    asyncio.run(scene())


def test_who_says_no_client_id_is_told_so() -> None:
    async def scene() -> None:
        async with proxied() as proxy:
            answer = await proxy.speaker("").ask("QueryRoute", m.QueryRouteRequest())
            assert answer.status.code == Code.CLIENT_ID_REQUIRED

    asyncio.run(scene())


def test_an_assignment_is_all_of_a_broker() -> None:
    async def scene() -> None:
        async with proxied() as proxy:
            await proxy.mq.admin.create_topic("orders", queues=3)
            answer = await proxy.speaker().ask(
                "QueryAssignment",
                m.QueryAssignmentRequest(
                    topic=m.Resource(name="orders"), group=m.Resource(name="g")
                ),
            )
            assert [it.message_queue.id for it in answer.assignments] == [-1]

    asyncio.run(scene())


def test_queues_have_what_may_be_done_with_them() -> None:
    R, W, RW = Permission.READ, Permission.WRITE, Permission.READ_WRITE  # noqa: N806
    assert list(iter_queue_permissions(QueueData("b", 3, 1, 6))) == [(0, RW), (1, R), (2, R)]
    assert list(iter_queue_permissions(QueueData("b", 1, 2, 6))) == [(0, RW), (1, W)]
    assert list(iter_queue_permissions(QueueData("b", 2, 2, 4))) == [(0, R), (1, R)]
    assert list(iter_queue_permissions(QueueData("b", 0, 0, 0))) == [(0, Permission.NONE)]
