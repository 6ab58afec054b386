"""Request-reply and a look into consumers for blocking programs, RocketMQ's names and the command
line; over sockets, on threads, in real time."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sluicemq.cli import main
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.client.threaded import Consumer, PushConsumer
from sluicemq.errors import RequestTimeoutError
from sluicemq.model.topic import MessageQueue
from sluicemq.rocketmq import DefaultMQProducer, DefaultMQPushConsumer, Message
from sluicemq.testing.embedded import embedded
from waiting import limit

QUEUE = MessageQueue("T", "broker-a", 0)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """Of the name server of a cluster with the topic T of one queue."""
    async with embedded(tcp=True) as mq:
        await mq.admin.create_topic("T", queues=1)
        yield mq.servers.name_server_address


async def run(work: Callable[..., Any], *arguments: Any) -> Any:
    """In a thread: the cluster needs this one."""
    async with asyncio.timeout(limit(30)):
        return await asyncio.to_thread(work, *arguments)


async def test_the_blocking_producer_gets_the_reply_of_a_blocking_handler(address: str) -> None:
    def work() -> bytes:
        def handler(message: Any) -> None:
            message.reply(b"pong " + message.body)

        consumer = PushConsumer(address, "G", handler, concurrency=2).subscribe("T")
        with consumer, Producer(address) as producer:
            replies = [producer.request("T", f"ping {number}") for number in range(3)]
            return b", ".join(reply.body for reply in replies)

    assert await run(work) == b"pong ping 0, pong ping 1, pong ping 2"


async def test_the_blocking_producer_says_what_is_known_when_the_time_is_over(address: str) -> None:
    def work() -> None:
        with Producer(address) as producer:
            producer.request("T", "ping", timeout_s=0.3)

    with pytest.raises(RequestTimeoutError, match=r"stored in queue 0 of broker-a.*0\.3 s"):
        await run(work)


async def test_a_stream_answers_as_well(address: str) -> None:
    def answer() -> None:
        with Consumer(address, "T", group="G") as messages:
            message = messages.receive(20)
            assert message is not None
            assert message.wants_reply
            message.reply("pong")
            message.ack()

    def work() -> bytes:
        answering = threading.Thread(target=answer)
        answering.start()
        with Producer(address) as producer:
            body = producer.request("T", "ping", timeout_s=20).body
        answering.join(limit(20))
        return body

    assert await run(work) == b"pong"


async def test_request_and_reply_in_rocketmqs_words(address: str) -> None:
    def work() -> Message:
        producer = DefaultMQProducer("P", namesrv_addr=address)
        consumer = DefaultMQPushConsumer("G", namesrv_addr=address)
        consumer.subscribe("T")
        consumer.register_message_listener(
            lambda messages: producer.reply(messages[0], b"pong " + messages[0].body)
        )
        with producer, consumer:
            return producer.request(Message("T", b"ping"), 20_000)

    reply = await run(work)
    assert reply.body == b"pong ping"
    assert reply.properties["MSG_TYPE"] == "reply"


async def test_a_consumer_whose_handler_blocks_its_loop_can_be_looked_into(address: str) -> None:
    blocked, go = threading.Event(), threading.Event()

    async def handler(message: Any) -> None:
        blocked.set()
        go.wait(20)  # the mistake: it blocks the consumer's loop

    def work() -> tuple[str, dict[str, str]]:
        consumer = PushConsumer(address, "G", handler).subscribe("T")
        with consumer, Producer(address) as producer, Admin(address) as admin:
            producer.send("T", "stuck")
            assert blocked.wait(limit(20))
            (client,) = admin.consumers("G")
            info = admin.running_info("G", client.client_id, stack=True)
            go.set()
            return info.stack or "", dict(info.notes)

    stack, notes = await run(work)
    assert "go.wait(20)" in stack, "the very line"
    assert notes["messagesOut"] == "1"


# --- the command line


def call(address: str, *words: str) -> Result:
    return CliRunner().invoke(main, [*words, "-n", address])


def lines(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


async def test_group_reset_skip_and_clone_show_what_changes(address: str) -> None:
    def work() -> None:
        with Producer(address) as producer, Admin(address) as admin:
            for number in range(10):
                producer.send("T", str(number))
            assert call(address, "group", "create", "G").exit_code == 0
            admin.commit_offset("G", QUEUE, 6)
            plan = call(address, "group", "reset", "G", "-t", "T", "--to", "earliest", "--dry-run")
            assert (
                "G would continue there. 6 stored messages are read again, 0 are skipped."
                in plan.output
            )
            assert admin.committed_offset("G", QUEUE) == 6
            words = ("group", "reset", "G", "-t", "T", "--to", "earliest", "--json")
            (done,) = lines(call(address, *words))
            assert (done["from"], done["to"], done["come_again"]) == (6, 0, 6)
            assert admin.committed_offset("G", QUEUE) == 0
            (skipped,) = lines(call(address, "group", "skip", "G", "-t", "T", "--json"))
            assert (skipped["to"], skipped["skipped"]) == (10, 10)
            (cloned,) = lines(call(address, "group", "clone", "G", "copy", "--json"))
            assert (cloned["group"], cloned["from"], cloned["to"]) == ("copy", None, 10)
            assert admin.committed_offset("copy", QUEUE) == 10

    await run(work)


async def test_what_is_wrong_is_said_with_its_cure(address: str) -> None:
    def work() -> list[Result]:
        return [
            call(address, "group", "reset", "none", "-t", "T", "--to", "latest"),
            call(address, "group", "reset", "TOOLS_CONSUMER", "-t", "T", "--to", "soon"),
            call(address, "group", "clone", "TOOLS_CONSUMER", "TOOLS_CONSUMER"),
            call(address, "consumer", "stack", "TOOLS_CONSUMER"),
            call(address, "message", "consume", "AB12", "-g", "TOOLS_CONSUMER"),
        ]

    results = await run(work)
    assert [result.exit_code for result in results] == [1, 2, 1, 1, 1]
    texts = [result.stderr for result in results]
    for text, wanted in zip(
        texts,
        [
            "sluice group create",
            "2013-01-01",
            "another target group",
            "sluice group show",
            "have been deleted",
        ],
        strict=True,
    ):
        assert wanted in text


async def test_consumer_list_status_stack_and_message_consume(address: str) -> None:
    seen: list[bytes] = []
    done = threading.Event()

    def handler(message: Any) -> None:
        seen.append(message.body)
        done.set()
        if len(seen) > 2:
            raise ValueError("third time")

    def work() -> None:
        consumer = PushConsumer(address, "G", handler).subscribe("T", tags="red")
        with consumer, Producer(address) as producer:
            sent = producer.send("T", "once", tag="red")
            assert done.wait(limit(20))
            (member,) = lines(call(address, "consumer", "list", "G", "--json"))
            assert member["kind"] == "push"
            (status,) = lines(call(address, "consumer", "status", "G", "--json"))
            assert status["subscriptions"]["T"] == "red"
            assert {queue["topic"] for queue in status["queues"]} >= {"T"}
            shown = call(address, "consumer", "status", "G", member["client_id"])
            assert "subscribed: T TAG red" in shown.output
            stack = call(address, "consumer", "stack", "G")
            assert "thread" in stack.output
            assert "messagesOut: 0" in stack.output
            words = ("message", "consume", sent.message_id, "-g", "G")
            (first,) = lines(call(address, *words, "--json"))
            assert first["result"] == "CR_SUCCESS"
            second = call(address, *words)
            assert second.exit_code == 1
            assert "the handler failed" in second.output
            assert "ValueError: third time" in second.output

    await run(work)
    assert seen == [b"once"] * 3
