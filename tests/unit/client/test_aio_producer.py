"""The asyncio producer at a scripted broker."""

import asyncio
import zlib

import pytest

from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.requests import SendStatus
from sluicemq.errors import (
    ClosedError,
    ConfigurationError,
    NameServerUnreachableError,
    RequestError,
    RouteNotFoundError,
    SendUnknownError,
)
from sluicemq.model.message import Message
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_record, decode_records
from sluicemq.wire.frames import Command


def stored(fake, topic):
    return [
        record
        for broker in fake.brokers
        for (name, _), queue in sorted(broker.queues.items())
        if name == topic
        for record in decode_records(b"".join(queue))
    ]


async def test_a_message_is_received_as_it_was_sent(fake):
    fake.topics["t"] = 2
    async with Sluice(fake.name_server) as mq:
        result = await mq.send(
            "t", b"body", tag="UA", keys=["N1", "N2"], properties={"a": "1", "none": ""}, flag=7
        )
    (record,) = stored(fake, "t")
    assert record.body == b"body"
    assert record.tag == "UA"
    assert record.keys == ("N1", "N2")
    assert record.flag == 7
    assert record.properties["a"] == "1"
    assert "none" not in record.properties
    assert record.properties["WAIT"] == "true"
    assert result.status is SendStatus.OK
    assert result.message_id == record.message_id
    assert result.offset_message_id == record.offset_message_id
    assert result.queue == MessageQueue("t", "broker-a", record.queue_id)
    assert result.queue_offset == 0


async def test_many_sends_at_once_share_one_connection_and_all_arrive(fake):
    fake.topics["t"] = 4
    async with Sluice(fake.name_server) as mq:
        results = await asyncio.gather(*(mq.send("t", b"%d" % index) for index in range(500)))
        data_connections = list(fake.broker.server.peers)
    assert len({result.message_id for result in results}) == 500
    assert sorted(int(record.body) for record in stored(fake, "t")) == list(range(500))
    assert len(data_connections) <= 2  # one for data, one of the keeper
    assert {len(queue) for queue in fake.broker.queues.values()} == {125}


async def test_a_large_body_is_sent_compressed_and_received_decompressed(fake):
    fake.topics["t"] = 1
    body = b"flight " * 2000
    async with Sluice(fake.name_server) as mq:
        await mq.send("t", body)
    (frame,) = fake.broker.queues["t", 0]
    raw = decode_record(frame)
    assert raw.sys_flag & 0x1
    assert raw.sys_flag & 0x700 == 0x300
    assert zlib.decompress(raw.raw_body) == body
    assert raw.body == body


async def test_an_unknown_topic_is_created_from_the_brokers_default(fake):
    async with Sluice(fake.name_server) as mq:
        result = await mq.send("fresh", b"x")
    assert result.status is SendStatus.OK
    assert fake.seen["TBW102"] == 1


async def test_an_unknown_topic_without_automatic_creation_names_excluded_causes(fake):
    fake.auto_create = False
    async with Sluice(fake.name_server) as mq:
        with pytest.raises(RouteNotFoundError) as error:
            await mq.send("nosuch", b"x")
    assert "are reachable" in str(error.value)
    assert "brokers are registered (broker-a)" in str(error.value)
    assert "automatic creation is off" in str(error.value)
    assert "sluice topic create nosuch" in str(error.value)


async def test_a_name_server_without_brokers_has_another_error_than_a_missing_topic(fake):
    fake.auto_create = False
    fake.brokers, kept = [], fake.brokers
    async with Sluice(fake.name_server) as mq:
        with pytest.raises(RouteNotFoundError, match="no broker is registered with them"):
            await mq.send("nosuch", b"x")
    fake.brokers = kept


async def test_every_unreachable_name_server_is_named():
    async with Sluice(["127.0.0.1:1", "127.0.0.1:2"]) as mq:
        with pytest.raises(NameServerUnreachableError) as error:
            await mq.send("t", b"x")
    assert "127.0.0.1:1" in str(error.value)
    assert "127.0.0.1:2" in str(error.value)


async def test_a_dead_name_server_is_passed_over(fake):
    fake.topics["t"] = 1
    async with Sluice(["127.0.0.1:1", fake.name_server]) as mq:
        assert (await mq.send("t", b"x")).status is SendStatus.OK


async def test_a_send_to_a_busy_broker_is_retried_at_the_next_one(fake_two):
    fake_two.topics["t"] = 1
    fake_two.brokers[0].script[310] = lambda command, peer: Command(2, remark="busy")
    async with Sluice(fake_two.name_server) as mq:
        results = [await mq.send("t", b"x") for _ in range(6)]
    assert {result.queue.broker for result in results} == {"broker-b"}
    assert fake_two.brokers[0].seen[310] == 1, "after the first refusal it is avoided"


async def test_a_broken_connection_is_retried_at_another_broker(fake_two):
    fake_two.topics["t"] = 1
    fake_two.brokers[0].script[310] = lambda command, peer: peer.close()
    async with Sluice(fake_two.name_server) as mq:
        results = [await mq.send("t", b"x") for _ in range(4)]
    assert {result.queue.broker for result in results} == {"broker-b"}


async def test_a_refusal_by_every_broker_is_raised_at_once(fake_two):
    fake_two.topics["t"] = 1
    for broker in fake_two.brokers:
        broker.script[310] = lambda command, peer: Command(13, remark="the message is illegal")
    async with Sluice(fake_two.name_server) as mq:
        with pytest.raises(RequestError, match="the message is illegal"):
            await mq.send("t", b"x")
    assert sum(broker.seen[310] for broker in fake_two.brokers) == 1


async def test_a_send_without_a_response_is_not_repeated_and_may_be_stored(fake_two):
    fake_two.topics["t"] = 1
    for broker in fake_two.brokers:
        broker.script[310] = lambda command, peer: None
    async with Sluice(fake_two.name_server) as mq:
        with pytest.raises(SendUnknownError, match="may be stored"):
            await mq.send("t", b"x", timeout_ms=200)
    assert sum(broker.seen[310] for broker in fake_two.brokers) == 1


async def test_a_send_with_a_callback_makes_one_attempt(fake_two):
    fake_two.topics["t"] = 1
    for broker in fake_two.brokers:
        broker.script[310] = lambda command, peer: Command(2, remark="busy")
    done: asyncio.Future = asyncio.get_running_loop().create_future()
    async with Sluice(fake_two.name_server) as mq:
        mq.send_soon(lambda result, error: done.set_result((result, error)), "t", b"x")
        result, error = await done
    assert result is None
    assert error.code == 2
    assert sum(broker.seen[310] for broker in fake_two.brokers) == 1


async def test_one_way_messages_arrive_without_a_response(fake):
    fake.topics["t"] = 1
    async with Sluice(fake.name_server) as mq:
        await mq.send_oneway("t", b"x")
        for _ in range(100):
            if fake.broker.seen[310]:
                break
            await asyncio.sleep(0.01)
    assert len(stored(fake, "t")) == 1


async def test_a_selector_chooses_the_queue_and_an_invalid_choice_is_refused(fake):
    fake.topics["t"] = 4
    async with Sluice(fake.name_server) as mq:
        for number in range(8):
            result = await mq.send(
                "t",
                b"x",
                sharding_key=str(number),
                selector=lambda queues, message: queues[int(message.sharding_key) % len(queues)],
            )
            assert result.queue.queue_id == number % 4
        with pytest.raises(ConfigurationError, match="not one of the 4 queues"):
            await mq.send("t", b"x", selector=lambda queues, message: MessageQueue("t", "z", 0))
    assert stored(fake, "t")[0].properties["__SHARDINGKEY"] == "0"


async def test_a_batch_is_stored_in_order_in_one_queue_with_a_result_for_each(fake):
    fake.topics["t"] = 4
    messages = [Message("t", b"%d" % index, tag="A") for index in range(10)]
    async with Sluice(fake.name_server) as mq:
        results = await mq.send_batch(messages)
    records = stored(fake, "t")
    assert [record.body for record in records] == [message.body for message in messages]
    assert [result.message_id for result in results] == [record.message_id for record in records]
    assert [result.offset_message_id for result in results] == [
        record.offset_message_id for record in records
    ]
    assert [result.queue_offset for result in results] == list(range(10))
    assert fake.broker.seen[320] == 1


async def test_a_batch_above_one_mebibyte_is_sent_in_parts(fake):
    fake.topics["t"] = 1
    messages = [Message("t", bytes(200_000)) for _ in range(12)]
    async with Sluice(fake.name_server) as mq:
        results = await mq.send_batch(messages)
    assert fake.broker.seen[320] == 3
    assert [result.queue_offset for result in results] == list(range(12))


async def test_a_batch_that_fails_half_way_says_how_much_is_stored(fake):
    fake.topics["t"] = 1
    broker = fake.broker

    def second_refused(command, peer):
        return broker.send(command, peer) if broker.seen[320] == 1 else Command(13, remark="no")

    broker.script[320] = second_refused
    async with Sluice(fake.name_server) as mq:
        with pytest.raises(RequestError) as error:
            await mq.send_batch([Message("t", bytes(600_000)) for _ in range(3)])
    assert error.value.__notes__[1:] == ["1 of 3 messages of this batch are stored."]


@pytest.mark.parametrize(
    ("bodies", "silent", "note"),
    [
        ([b"x"] * 100, 1, "0 of 100 messages of this batch are known to be stored.|its 100 "),
        ([bytes(600_000)] * 3, 2, "1 of 3 messages of this batch are known to be stored.|its 1 "),
    ],
)
async def test_a_batch_without_a_response_does_not_say_that_it_is_not_stored(
    fake, bodies, silent, note
):
    fake.topics["t"] = 1
    broker = fake.broker
    broker.script[320] = lambda command, peer: (
        broker.send(command, peer) if broker.seen[320] < silent else None
    )
    broker.script[310] = broker.script[320]
    async with Sluice(fake.name_server) as mq:
        with pytest.raises(SendUnknownError) as error:
            await mq.send_batch([Message("t", body) for body in bodies], timeout_ms=200)
    known, unknown = note.split("|")
    assert error.value.__notes__[-1].startswith(known)
    assert "The outcome of the last request is unknown" in error.value.__notes__[-1]
    assert unknown in error.value.__notes__[-1]


async def test_a_bad_batch_is_refused_before_anything_is_sent(fake):
    fake.topics["t"] = 1
    async with Sluice(fake.name_server) as mq:
        with pytest.raises(ConfigurationError, match="must have the same topic, got"):
            await mq.send_batch([Message("t", b"x"), Message("other", b"y")])
    assert not fake.broker.seen[320]


async def test_closing_waits_for_open_sends(fake):
    fake.topics["t"] = 1
    answer_later = []
    fake.broker.script[310] = lambda command, peer: answer_later.append((command, peer))
    mq = Sluice(fake.name_server)
    sending = asyncio.gather(mq.send("t", b"x"), return_exceptions=True)
    while not answer_later:
        await asyncio.sleep(0.01)
    closing = asyncio.gather(mq.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    command, peer = answer_later[0]
    from sluicemq.net.dispatch import encode_response_to

    peer.write(encode_response_to(fake.broker.send(command, peer), command))
    ((report,), (result,)) = await asyncio.gather(closing, sending)
    assert result.status is SendStatus.OK
    assert report.settled == 1
    assert report.unknown == ()


async def test_closing_reports_the_messages_without_a_response(fake):
    fake.topics["t"] = 1
    fake.broker.script[310] = lambda command, peer: None
    mq = Sluice(fake.name_server, send_timeout_ms=200)
    sending = asyncio.gather(mq.send("t", b"x"), return_exceptions=True)
    await asyncio.sleep(0.1)
    report = await mq.close()
    ((error,),) = await asyncio.gather(sending)
    assert isinstance(error, SendUnknownError)
    assert len(report.unknown) == 1
    assert report.unknown[0] in str(error)
    with pytest.raises(ClosedError):
        await mq.send("t", b"x")


async def test_an_invalid_argument_is_refused_without_a_connection():
    async with Sluice("127.0.0.1:1") as mq:
        for arguments, text in [
            ({"tag": "a|b"}, "contains '|'"),
            ({"tag": "a\tb"}, "unprintable"),
            ({"tag": "x" * 129}, "129 characters"),
            ({"properties": {"KEYS": "x"}}, "reserved"),
            ({"properties": {"a": "x\x01y"}}, "U\\+0001"),
            ({"keys": ["a b"]}, "white space"),
        ]:
            with pytest.raises(ConfigurationError, match=text):
                await mq.send("t", b"x", **arguments)
        with pytest.raises(ConfigurationError, match="contains a space"):
            await mq.send("bad topic", b"x")
        with pytest.raises(ConfigurationError, match="4,194,305 bytes"):
            await mq.send("t", bytes(4 * 1024 * 1024 + 1))


async def test_signed_requests_carry_the_key_and_never_show_the_secret(fake):
    fake.topics["t"] = 1
    async with Sluice(fake.name_server, credentials=("user", "very secret")) as mq:
        await mq.send("t", b"x")
        assert "very secret" not in repr(mq)
        assert "very secret" not in repr(mq.cluster.credentials)
    (fields,) = [fields for code, fields in fake.broker.log if code == 310]
    assert fields["AccessKey"] == "user"
    assert len(fields["Signature"]) == 28
