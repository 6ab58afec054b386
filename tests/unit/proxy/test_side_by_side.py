"""Two proxies before two brokers: what one has given out the other takes back."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from proxied import Proxied, Speaker, proxied_cluster
from sluicemq.model.topic import GroupConfig
from sluicemq.proxy import messages as m
from sluicemq.proxy.cluster import ClusterBackend
from sluicemq.proxy.messages import Code, MessageType, TransactionResolution
from sluicemq.testing.virtual import VirtualClock

pytestmark = pytest.mark.slow

TOPIC, GROUP = m.Resource(name="orders"), m.Resource(name="g")
COMMIT = TransactionResolution.COMMIT
NUMBERS = itertools.count()
Scene = Callable[[Proxied, Proxied], Awaitable[None]]


def play(scene: Scene, kind: str = "normal") -> None:
    """With a topic that both brokers have, on virtual time."""

    async def run() -> None:
        async with proxied_cluster(VirtualClock(), proxies=2) as [one, other]:
            await one.mq.admin.create_topic(TOPIC.name, queues=2, type=kind)
            await one.mq.admin.create_group(GroupConfig(GROUP.name))
            await scene(one, other)

    asyncio.run(run())


async def kill(proxy: Proxied) -> None:
    """Nothing is said to anybody: its connections end."""
    assert isinstance(proxy.backend, ClusterBackend)
    await proxy.backend.close()


async def send(client: Speaker, count: int = 1, **system: Any) -> list[Any]:
    """Messages one by one; the entries of the answers."""
    entries = []
    for _ in range(count):
        properties = m.SystemProperties(message_id=f"id{next(NUMBERS)}", **system)
        message = m.Message(topic=TOPIC, body=b"body", system_properties=properties)
        answer = await client.ask("SendMessage", m.SendMessageRequest(messages=[message]))
        assert answer.status.code == Code.OK, answer
        entries += answer.entries
    return entries


async def receive(client: Speaker, **options: Any) -> list[m.Message]:
    """What comes until both brokers have nothing more."""
    found: list[m.Message] = []
    for broker in ("broker-a", "broker-b"):
        options = {"invisible_duration": m.Duration(seconds=30), "batch_size": 32, **options}
        request = m.ReceiveMessageRequest(
            group=GROUP, long_polling_timeout=m.Duration(seconds=5), **options,
            message_queue=m.MessageQueue(topic=TOPIC, broker=m.Broker(name=broker)),
        )  # fmt: skip
        answers = await client.ask("ReceiveMessage", request)
        found += [it.message for it in answers if it.HasField("message")]
    return found


async def acknowledge(client: Speaker, messages: list[m.Message]) -> set[int]:
    entries = [
        m.AckMessageEntry(
            message_id=it.system_properties.message_id,
            receipt_handle=it.system_properties.receipt_handle,
        )
        for it in messages
    ]
    request = m.AckMessageRequest(group=GROUP, topic=TOPIC, entries=entries)
    answer = await client.ask("AckMessage", request)
    return {entry.status.code for entry in answer.entries}


def ids(messages: list[Any]) -> list[str]:
    return sorted(it.system_properties.message_id for it in messages)


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_one_has_given_out_the_other_acknowledges(is_killed: bool) -> None:
    async def scene(one: Proxied, other: Proxied) -> None:
        sent = await send(one.speaker(), 12)
        found = await receive(one.speaker())
        assert ids(found) == sorted(entry.message_id for entry in sent)
        if is_killed:
            await kill(one)
        assert await acknowledge(other.speaker(), found) == {Code.OK}
        await one.mq.clock.advance(minutes=2)
        assert await receive(other.speaker()) == []

    play(scene)


def test_what_was_received_through_one_that_is_killed_comes_again_at_its_time() -> None:
    async def scene(one: Proxied, other: Proxied) -> None:
        await send(one.speaker(), 12)
        found = await receive(one.speaker())
        await kill(one)
        await one.mq.clock.advance(seconds=15)
        assert await receive(other.speaker()) == []
        await one.mq.clock.advance(seconds=16)
        again = await receive(other.speaker())
        assert ids(again) == ids(found)
        assert {it.system_properties.delivery_attempt for it in again} == {2}

    play(scene)


def test_a_time_that_was_changed_through_the_other_counts() -> None:
    async def scene(one: Proxied, other: Proxied) -> None:
        await send(one.speaker())
        (message,) = await receive(one.speaker())
        request = m.ChangeInvisibleDurationRequest(
            group=GROUP, topic=TOPIC, invisible_duration=m.Duration(seconds=300),
            receipt_handle=message.system_properties.receipt_handle,
        )  # fmt: skip
        answer = await other.speaker().ask("ChangeInvisibleDuration", request)
        assert answer.status.code == Code.OK
        await kill(other)
        await one.mq.clock.advance(seconds=200)
        assert await receive(one.speaker()) == []
        message.system_properties.receipt_handle = answer.receipt_handle
        assert await acknowledge(one.speaker(), [message]) == {Code.OK}
        await one.mq.clock.advance(seconds=200)
        assert await receive(one.speaker()) == []

    play(scene)


def test_what_is_given_up_through_the_other_is_a_dead_letter() -> None:
    async def scene(one: Proxied, other: Proxied) -> None:
        await send(one.speaker())
        (message,) = await receive(one.speaker())
        request = m.ForwardMessageToDeadLetterQueueRequest(
            group=GROUP, topic=TOPIC, message_id=message.system_properties.message_id,
            receipt_handle=message.system_properties.receipt_handle,
        )  # fmt: skip
        answer = await other.speaker().ask("ForwardMessageToDeadLetterQueue", request)
        assert answer.status.code == Code.OK
        dead = [
            offset
            for queue in await one.mq.admin.queues(f"%DLQ%{GROUP.name}")
            if (offset := await one.mq.admin.offset_max(queue))
        ]
        assert dead == [1]
        await one.mq.clock.advance(minutes=2)
        assert await receive(one.speaker()) == []

    play(scene)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_transaction_is_ended_through_the_other(is_killed: bool) -> None:
    async def scene(one: Proxied, other: Proxied) -> None:
        entries = await send(one.speaker(), 6, message_type=MessageType.TRANSACTION)
        if is_killed:
            await kill(one)
        for number, entry in enumerate(entries):
            request = m.EndTransactionRequest(
                topic=TOPIC, message_id=entry.message_id, transaction_id=entry.transaction_id,
                resolution=COMMIT if number % 2 else TransactionResolution.ROLLBACK,
            )  # fmt: skip
            answer = await other.speaker().ask("EndTransaction", request)
            assert answer.status.code == Code.OK
        assert ids(await receive(other.speaker())) == sorted(it.message_id for it in entries[1::2])

    play(scene, "transaction")


def test_a_transaction_that_was_left_open_is_ended_through_the_other() -> None:
    async def scene(one: Proxied, other: Proxied) -> None:
        producer = one.speaker("producer")
        settings = m.Settings(
            client_type=m.ClientType.PRODUCER, publishing=m.Publishing(topics=[TOPIC])
        )
        stream = producer.call("Telemetry", m.TelemetryCommand(settings=settings), None)
        (entry,) = await send(producer, message_type=MessageType.TRANSACTION)
        await one.mq.clock.advance(seconds=40)
        asked = stream.answers[1].recover_orphaned_transaction_command
        request = m.EndTransactionRequest(
            topic=TOPIC, message_id=asked.message.system_properties.message_id,
            transaction_id=asked.transaction_id, resolution=COMMIT,
            source=m.TransactionSource.SOURCE_SERVER_CHECK,
        )  # fmt: skip
        assert (await other.speaker().ask("EndTransaction", request)).status.code == Code.OK
        assert ids(await receive(other.speaker())) == [entry.message_id]

    play(scene, "transaction")


def test_a_message_that_one_renewed_is_known_there_alone() -> None:
    """The one difference: the other goes by the first handle, whose time is over."""

    async def scene(one: Proxied, other: Proxied) -> None:
        client = one.speaker()
        await send(client)
        (message,) = await receive(client, auto_renew=True)
        for _ in range(65):
            await one.mq.clock.advance(seconds=1)
            one.proxy.run()
        assert await receive(other.speaker()) == []
        refused = await acknowledge(other.speaker(), [message])
        assert refused == {Code.INVALID_RECEIPT_HANDLE}
        assert await acknowledge(client, [message]) == {Code.OK}

    play(scene)


def test_a_broker_that_is_away_is_passed_by_and_without_brokers_calls_time_out() -> None:
    async def scene(one: Proxied, other: Proxied) -> None:
        client, servers = one.speaker(), one.mq.servers
        await send(client, 4)
        await servers.stop_broker("broker-b")
        codes = []
        for _ in range(8):
            properties = m.SystemProperties(message_id=f"id{next(NUMBERS)}")
            message = m.Message(topic=TOPIC, body=b"body", system_properties=properties)
            request = m.SendMessageRequest(messages=[message])
            codes.append((await client.ask("SendMessage", request)).status.code)
        assert codes.count(Code.PROXY_TIMEOUT) <= 1
        assert set(codes) <= {Code.OK, Code.PROXY_TIMEOUT}
        await servers.stop_broker("broker-a")
        answer = await client.ask("SendMessage", request)
        assert answer.status.code == Code.PROXY_TIMEOUT

    play(scene)
