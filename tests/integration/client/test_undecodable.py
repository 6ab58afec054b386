"""One message whose body cannot be decoded among good ones: blocking consumers, commands, the
doctor, explanations, replies, transactions and RocketMQ's names."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from click.testing import CliRunner

from sluicemq import Sluice, TransactionListener, TransactionState, UndecodableBodyError
from sluicemq.cli import main
from sluicemq.client.core.messages import OutgoingMessage
from sluicemq.client.core.replies import parse_pushed_reply
from sluicemq.client.core.transactions import parse_check_request
from sluicemq.client.sync.admin import Admin
from sluicemq.client.threaded import Consumer, LitePullConsumer, PushConsumer
from sluicemq.operate.doctor import Diagnosis, diagnose
from sluicemq.operate.mcp import message_fields
from sluicemq.rocketmq import ConsumeFromWhere, DefaultMQPushConsumer
from sluicemq.rocketmq.messages import MessageExt
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.wire.frames import Command
from stored_bodies import BAD, GOOD, StoredBody, send_stored
from waiting import limit, until

GARBAGE = BAD["zlib, garbage"]
BAD_ID = "BAD0"


@pytest.fixture
async def mq() -> AsyncIterator[EmbeddedSluice]:
    """good 0, an undecodable one, good 1, good 2 in the one queue of the topic t."""
    settings = {"transactionTimeOut": "200", "transactionCheckInterval": "200"}
    async with embedded(tcp=True, settings=settings) as made:
        await made.admin.create_topic("t", queues=1)
        await made.send("t", b"good 0")
        await send_stored(made, "t", BAD_ID, GARBAGE, KEYS="k", TAGS="A")
        for number in (1, 2):
            await made.send("t", b"good %d" % number)
        yield made


def names(mq: EmbeddedSluice) -> str:
    return mq.servers.name_server_address


async def dead_letters(mq: Sluice, group: str) -> list[tuple[str, bytes, int]]:
    async with asyncio.timeout(limit(60)):
        while f"%DLQ%{group}" not in await mq.admin.topics():
            await asyncio.sleep(0.02)
    async with mq.subscribe(f"%DLQ%{group}", group="undertaker") as stream:
        found = await stream.receive_many(10, timeout_s=5)
        for one in found:
            await one.ack()
    return [(one.message_id, one.raw_body, one.record.sys_flag & 0x701) for one in found]


# ------------------------------------------------------------------------- blocking consumers


def read_stream(servers: str, rule: Any, seen: list[bytes]) -> None:
    with Consumer(servers, "t", group=f"stream-{rule}", on_undecodable=rule) as messages:
        while (message := messages.receive(timeout_s=1)) is not None:
            seen.append(message.body_or_raw)
            assert (message.body_error is None) == message.body_or_raw.startswith(b"good")
            message.ack()


def read_polled(servers: str, rule: Any, seen: list[bytes]) -> None:
    with LitePullConsumer(servers, f"polled-{rule}", on_undecodable=rule) as consumer:
        consumer.subscribe("t")
        while messages := consumer.poll(timeout_s=1):
            seen += [message.body_or_raw for message in messages]
        consumer.commit()


@pytest.mark.parametrize("read", [read_stream, read_polled])
async def test_blocking_consumers_follow_each_rule(mq: EmbeddedSluice, read: Any) -> None:
    seen: list[bytes] = []
    await asyncio.to_thread(read, names(mq), "deliver", seen)
    assert seen == [b"good 0", GARBAGE.raw, b"good 1", b"good 2"]
    seen.clear()
    await asyncio.to_thread(read, names(mq), "dead_letter", seen)
    assert seen == [b"good 0", b"good 1", b"good 2"]
    kind = read.__name__.removeprefix("read_")
    group = f"{kind}-dead_letter"
    assert await dead_letters(mq, group) == [(BAD_ID, GARBAGE.raw, GARBAGE.sys_flag)]
    for _ in range(2):  # also after a restart
        seen.clear()
        with pytest.raises(UndecodableBodyError, match=BAD_ID):
            await asyncio.to_thread(read, names(mq), "raise", seen)
        assert seen in ([b"good 0"], [])


@pytest.mark.parametrize("rule", ["deliver", "raise", "dead_letter"])
async def test_a_blocking_handler_follows_each_rule(mq: EmbeddedSluice, rule: Any) -> None:
    seen: list[bytes] = []
    consumer = PushConsumer(
        names(mq), "g", lambda message: seen.append(message.body), concurrency=1,
        on_undecodable=rule, max_reconsume_times=0,
    ).subscribe("t")  # fmt: skip
    await asyncio.to_thread(consumer.start)
    try:
        if rule == "raise":
            await until(lambda: consumer._consumer.failure)
            assert isinstance(consumer._consumer.failure, UndecodableBodyError)
            assert seen == [b"good 0"]
            return
        await until(lambda: len(seen) == 3)
        assert seen == [b"good 0", b"good 1", b"good 2"]
        assert await dead_letters(mq, "g") == [(BAD_ID, GARBAGE.raw, GARBAGE.sys_flag)]
        assert consumer._consumer.undecodable_count == 1
    finally:
        await asyncio.to_thread(consumer.close)


async def test_a_dead_letter_that_no_broker_takes_is_sent_again(
    mq: EmbeddedSluice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile it counts as unacknowledged, and messages behind it are delivered."""
    from sluicemq.client.aio import queue_reader as readers
    from sluicemq.errors import ConnectionLostError

    calls, real = [], readers.RetrySender.send_back

    async def flaky(self: Any, record: Any, level: int) -> None:
        calls.append(level)
        if len(calls) < 3:
            raise ConnectionLostError("no broker is there.")
        await real(self, record, level)

    monkeypatch.setattr(readers.RetrySender, "send_back", flaky)
    monkeypatch.setattr(readers, "local_retry_delay_s", lambda attempt: 0.01 * attempt)
    async with mq.subscribe("t", group="g", on_undecodable="dead_letter") as stream:
        good = [await stream.receive() for _ in range(3)]
        for message in good:
            await message.ack()
        reader = good[0].origin
        assert reader.in_flight.committable == 1
        await until(lambda: not reader.in_flight.count)
    assert calls == [-1, -1, -1]
    assert await dead_letters(mq, "g") == [(BAD_ID, GARBAGE.raw, GARBAGE.sys_flag)]
    (queue,) = await mq.queues("t")
    assert await mq.pull_consumer("g").committed(queue) == 4


async def test_an_undecodable_message_in_the_retry_topic_is_handled_like_others() -> None:
    async with embedded(tcp=True, trace=True, settings={"traceTopicEnable": "true"}) as mq:
        await mq.admin.create_topic("t", queues=1)
        seen: list[bytes] = []

        async def handle(message: Any) -> None:
            seen.append(message.body)

        consumer = mq.consumer("g", handle, concurrency=1, max_reconsume_times=0).subscribe("t")
        async with consumer:
            await mq.send("t", b"good 0")
            await until(lambda: seen)
            await send_stored(mq, "%RETRY%g", BAD_ID, GARBAGE, RETRY_TOPIC="t")
            letters = await dead_letters(mq, "g")
            await mq.send("t", b"good 1")
            await until(lambda: len(seen) == 2)
        assert letters == [(BAD_ID, GARBAGE.raw, GARBAGE.sys_flag)]
        assert consumer.failure is None


async def test_a_poll_continues_behind_the_message_after_a_seek(mq: EmbeddedSluice) -> None:
    async with mq.lite_pull("g", on_undecodable="raise") as consumer:
        await consumer.subscribe("t")
        assert [one.body for one in await consumer.poll()] == [b"good 0"]
        for _ in range(2):
            with pytest.raises(UndecodableBodyError) as caught:
                await consumer.poll()
        (queue,) = consumer.assignment
        await consumer.seek(queue, caught.value.queue_offset + 1)
        bodies: list[bytes] = []
        while len(bodies) < 2:
            bodies += [one.body for one in await consumer.poll()]
        assert bodies == [b"good 1", b"good 2"]


async def test_members_of_one_group_need_one_rule(mq: EmbeddedSluice) -> None:
    from sluicemq import ConfigurationError

    async with mq.subscribe("t", group="g"):
        with pytest.raises(ConfigurationError, match="on_undecodable='deliver'"):
            await mq.subscribe("t", group="g", on_undecodable="raise").start()


# ------------------------------------------------------------------------------------- commands


async def run(*arguments: str) -> str:
    done = await asyncio.to_thread(CliRunner().invoke, main, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


async def test_commands_show_the_stored_bytes_and_why(mq: EmbeddedSluice) -> None:
    at = ("-n", names(mq))
    why = "incorrect header check"
    text = await run("consume", "t", *at, "--max", "4", "--timeout", "2")
    assert [f"good {n}" in text for n in range(3)] == [True] * 3
    assert "[undecodable: it is not valid zlib data: Error -3" in text
    assert "not compressed" in text
    rows = await run("consume", "t", *at, "-g", "g", "--max", "4", "--timeout", "2", "--json")
    records = [json.loads(line) for line in rows.splitlines() if line.startswith("{")]
    (bad,) = [one for one in records if "body_error" in one]
    assert (bad["body"], bad["message_id"]) == ("not compressed", BAD_ID)
    assert why in bad["body_error"]
    shown = await run("message", "show", BAD_ID, "-t", "t", *at)
    assert "not compressed" in shown
    assert why in shown
    assert why in await run("message", "query", "-t", "t", "-k", "k", *at, "--json")
    explained = await run("explain", "message", BAD_ID, "-t", "t", "-g", "g", *at)
    assert "body     The body of message BAD0 cannot be decoded" in explained
    assert "body-undecodable: The body of the message cannot be decoded" in explained
    listed = await run("explain", "message", BAD_ID, "-t", "t", *at, "--json")
    assert why in json.loads(listed)["message"]["body_error"]


async def test_mqadmin_prints_every_message(mq: EmbeddedSluice, tmp_path: Any) -> None:
    at = ("-n", names(mq))
    printed = await run("mqadmin", "printMsg", "-t", "t", *at)
    assert printed.count("MSGID: ") == 4
    assert "BODY: not compressed" in printed
    found = await run("mqadmin", "queryMsgByUniqueKey", "-i", BAD_ID, "-t", "t", *at)
    assert "BAD0" in found


async def test_the_doctor_names_members_that_cannot_decode_and_the_message(
    mq: EmbeddedSluice,
) -> None:
    async def take(message: Any) -> None:
        assert message.body_error is None or message.raw_body

    consumer = mq.consumer("g", take).subscribe("t")
    await consumer.start()
    await until(lambda: consumer.undecodable_count)

    def look() -> Diagnosis:
        with Admin(names(mq)) as admin:
            return diagnose(admin, topic="t", group="g", message_id=BAD_ID)

    found = await asyncio.to_thread(look)
    causes = {one.code: one for one in (found.cause, *found.also) if one is not None}
    assert "1 messages of t" in causes["bodies-undecodable"].what
    assert BAD_ID in causes["bodies-undecodable"].what
    assert "incorrect header check" in causes["message-undecodable"].what
    info = await mq.admin.running_info("g", mq.client_id)
    assert info.notes["undecodable.t"].startswith("1; The body of message BAD0")
    await consumer.close()


# ------------------------------------------------------------------- what carries other bodies


def test_names_of_rocketmq_have_the_stored_bytes() -> None:
    message = MessageExt(stored(GARBAGE))
    with pytest.raises(UndecodableBodyError):
        _ = message.body
    assert message.raw_body == GARBAGE.raw
    assert message.body_error is not None
    assert "not compressed" in repr(message)


async def test_a_listener_of_rocketmq_fails_on_it_alone(mq: EmbeddedSluice) -> None:
    seen: list[bytes] = []
    consumer = DefaultMQPushConsumer("g", namesrv_addr=names(mq))
    consumer.consume_from_where = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
    consumer.max_reconsume_times = 0
    consumer.subscribe("t", "*")
    consumer.register_message_listener(lambda messages: seen.extend(m.body for m in messages))
    await asyncio.to_thread(consumer.start)
    try:
        await until(lambda: len(seen) == 3)
        assert sorted(seen) == [b"good 0", b"good 1", b"good 2"]
        assert await dead_letters(mq, "g") == [(BAD_ID, GARBAGE.raw, GARBAGE.sys_flag)]
        assert consumer._threaded.client.undecodable_count == 1
    finally:
        await asyncio.to_thread(consumer.shutdown)


def test_an_assistant_is_told_why() -> None:
    message = message_fields(stored(GARBAGE))
    assert (message["body_of_the_sender"], message["body_bytes"]) == ("not compressed", 14)
    assert "incorrect header check" in message["body_error"]
    assert "body_error" not in message_fields(stored(GOOD["zlib"]))


def stored(body: StoredBody) -> Any:
    from sluicemq.record.codec import decode_record

    return decode_record(record_of(body))


def record_of(body: StoredBody) -> bytes:
    from sluicemq.record.codec import encode_record

    host = b"\x7f\0\0\1\0\0\0\1"
    return encode_record(
        topic="t", queue_id=0, queue_offset=1, physical_offset=2, body=body.raw,
        properties=b"UNIQ_KEY\x01ID\x02PGROUP\x01p\x02", flag=0, sys_flag=body.sys_flag,
        born_time_ms=1, born_host=host, store_time_ms=2, store_host=host,
    )  # fmt: skip


@pytest.mark.parametrize("body", [*GOOD.values(), GARBAGE])
def test_a_reply_and_a_question_of_a_transaction_can_be_read_but_for_their_body(
    body: StoredBody,
) -> None:
    reply = parse_pushed_reply(
        Command(
            326,
            {
                "producerGroup": "p", "topic": "t", "defaultTopic": "T", "queueId": "0",
                "defaultTopicQueueNums": "4", "sysFlag": str(body.sys_flag), "bornTimestamp": "1",
                "flag": "0", "bornHost": "127.0.0.1:1", "storeHost": "127.0.0.1:2",
                "storeTimestamp": "2", "properties": "CORRELATION_ID\x01c\x02",
            },
            body.raw,
        )
    )  # fmt: skip
    asked = parse_check_request(
        Command(39, {"tranStateTableOffset": "1", "commitLogOffset": "2"}, record_of(body))
    )
    for message in (reply, asked.message):
        assert message.raw_body == body.raw
        if body.body is None:
            assert isinstance(message.body_error, UndecodableBodyError)
        else:
            assert message.body == body.body
    assert asked.location.group == "p"


async def test_a_transaction_with_an_undecodable_body_is_decided(mq: EmbeddedSluice) -> None:
    """The question about it reached no listener: its body was read before."""
    asked: list[str] = []

    class Listener(TransactionListener):
        def execute_local(self, message: Any, transaction_id: str, argument: Any) -> None:
            """Never called: the half message is sent by hand."""

        def check(self, message: Any) -> TransactionState:
            asked.append(message.message_id)
            assert message.body_error is not None
            return TransactionState.COMMIT

    producer = mq.producer("p", listener=Listener())
    await producer.send("t", b"introduces the group")
    half = OutgoingMessage(
        "t", GARBAGE.raw, "UNIQ_KEY\x01HALF\x02TRAN_MSG\x01true\x02PGROUP\x01p\x02", "HALF",
        GARBAGE.sys_flag | 0x4, 0, True,
    )  # fmt: skip
    await mq.cluster.run(producer.sender.send_outgoing(half))
    await until(lambda: asked)
    assert asked == ["HALF"]
