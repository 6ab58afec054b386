# ruff: noqa: SIM117 - nested blocks show the order of events
"""Rejected messages at a scripted broker.

The tests check which requests are sent, when messages count as acknowledged, and the copy that a
client sends by itself.
"""

import asyncio
import logging
import re

import pytest

from sluicemq import ConfigurationError, RetryLaterError, Sluice
from sluicemq.client.core.consuming import (
    RetryRules,
    make_retry_message,
    original_topic,
    retry_count,
)
from sluicemq.errors import SluiceError
from sluicemq.model.ids import Host
from sluicemq.model.message import StoredMessage
from sluicemq.net.dispatch import encode_response_to
from sluicemq.record.codec import decode_properties
from sluicemq.wire.frames import Command
from stored_bodies import BAD, GOOD
from waiting import until


def record(topic="t", times=0, body=b"x", sys_flag=0, **properties):
    return StoredMessage(
        topic=topic, queue_id=1, queue_offset=5, physical_offset=500, raw_body=body,
        properties={"UNIQ_KEY": "AB", **properties}, flag=3, sys_flag=sys_flag, born_time_ms=1,
        born_host=Host("127.0.0.1", 1), store_time_ms=2, store_host=Host("127.0.0.1", 2),
        reconsume_times=times, prepared_offset=0, broker="broker-a", size_bytes=100, body_crc=0,
    )  # fmt: skip


def refuse(command, peer):
    return Command(1, remark="look message by offset failed")


def asked(fake, code):
    return [fields for number, fields in fake.broker.log if number == code]


async def failing(message):
    raise ValueError("no")


# --- the pure part


def test_the_copy_contains_its_origin_and_its_number_of_retries():
    stored = record("%RETRY%g", 2, TAGS="A", KEYS="k", RETRY_TOPIC="t", ORIGIN_MESSAGE_ID="F00",
                    DELAY="4", TRAN_MSG="true", WAIT="false", TIMER_DELAY_SEC="3")  # fmt: skip
    copy = make_retry_message(stored, "g", retry_count(stored), 0, 16)
    assert (copy.topic, copy.flag, copy.message_id) == ("%RETRY%g", 3, "AB")
    assert (copy.reconsume_times, copy.reconsume_times_max) == (3, 16)
    assert decode_properties(copy.properties.encode()) == {
        "UNIQ_KEY": "AB", "TAGS": "A", "KEYS": "k", "RETRY_TOPIC": "t", "ORIGIN_MESSAGE_ID": "F00",
        "DELAY": "5",
    }  # fmt: skip


def test_the_first_copy_takes_topic_and_id_from_the_stored_message():
    stored = record()
    properties = decode_properties(make_retry_message(stored, "g", 0, 7, None).properties.encode())
    assert properties["RETRY_TOPIC"] == "t"
    assert properties["ORIGIN_MESSAGE_ID"] == stored.offset_message_id
    assert properties["DELAY"] == "7"


def test_a_copy_for_the_dead_letters_allows_no_retry():
    assert make_retry_message(record(), "g", 0, -1, 16).reconsume_times_max == 0


def test_a_copy_has_the_stored_body_and_its_compression_flag():
    for one in (*GOOD.values(), *BAD.values()):
        copy = make_retry_message(
            record(body=one.raw, sys_flag=one.sys_flag | 0x38), "g", 0, 0, None
        )
        assert (copy.body, copy.sys_flag) == (one.raw, one.sys_flag)


def test_a_dead_letter_is_counted_from_the_beginning_and_keeps_its_topic():
    stored = record("%DLQ%g", 17, RETRY_TOPIC="t")
    assert retry_count(stored) == 0
    assert original_topic(stored) == "%DLQ%g"
    copy = make_retry_message(stored, "u", retry_count(stored), 0, None)
    assert copy.reconsume_times == 1
    assert decode_properties(copy.properties.encode())["RETRY_TOPIC"] == "%DLQ%g"


def test_the_topic_is_restored_only_for_messages_of_a_retry_topic():
    assert original_topic(record("%RETRY%g", 1, RETRY_TOPIC="t")) == "t"
    assert original_topic(record("%RETRY%g", 1)) == "%RETRY%g"
    assert original_topic(record("t", 0, RETRY_TOPIC="other")) == "t"


@pytest.mark.parametrize(
    "rules", [(-1, 0, 1.0), (2**31, 0, 1.0), (None, -2, 1.0), (None, 0, 0.0), (None, 0, 31.0)]
)
def test_invalid_retry_rules_are_refused(rules):
    with pytest.raises(ConfigurationError):
        RetryRules(*rules)


# --- with a broker


async def test_a_handler_that_raises_sends_the_message_back_and_acknowledges_the_original(fake):
    fake.topics["t"] = 1
    for n in range(3):
        fake.broker.put("t", 0, b"%d" % n, UNIQ_KEY=f"ID{n}")

    async def handler(message):
        if message.body == b"1":
            raise ValueError("no")

    async with Sluice(fake.name_server) as mq, mq.consumer("g", handler).subscribe("t"):
        await until(lambda: asked(fake, 36))
    (back,) = asked(fake, 36)
    assert dict(back, sluiceClientId="") == {
        "sluiceClientId": "",
        "offset": "1000", "group": "g", "delayLevel": "0", "originMsgId": "ID1",
        "originTopic": "t", "unitMode": "false", "bname": "broker-a",
    }  # fmt: skip
    assert fake.broker.committed["g", "t", 0] == 3


@pytest.mark.parametrize(
    ("error", "rules", "level", "times_max"),
    [
        (ValueError("x"), {}, "0", None),
        (ValueError("x"), {"retry_delay_level": 4, "max_reconsume_times": 2}, "4", "2"),
        (RetryLaterError(), {"retry_delay_level": 4}, "4", None),
        (RetryLaterError(delay_level=0), {"retry_delay_level": 4}, "0", None),
        (RetryLaterError(delay_level=-1), {}, "-1", None),
    ],
)
async def test_the_delay_is_that_of_the_handler_or_of_the_consumer(
    fake, error, rules, level, times_max
):
    fake.topics["t"] = 1
    fake.broker.put("t", 0, b"x")

    async def handler(message):
        raise error

    async with Sluice(fake.name_server) as mq:
        async with mq.consumer("g", handler, **rules).subscribe("t"):
            await until(lambda: asked(fake, 36))
    (back,) = asked(fake, 36)
    assert (back["delayLevel"], back.get("maxReconsumeTimes")) == (level, times_max)


async def test_only_an_unexpected_error_is_logged_with_its_trace(fake, caplog):
    fake.topics["t"] = 1
    fake.broker.put("t", 0, b"later")
    fake.broker.put("t", 0, b"error")

    async def handler(message):
        raise RetryLaterError if message.body == b"later" else ValueError("unexpected")

    with caplog.at_level(logging.WARNING, "sluicemq.client"):
        async with Sluice(fake.name_server) as mq, mq.consumer("g", handler).subscribe("t"):
            await until(lambda: len(asked(fake, 36)) == 2)
    traced = [entry for entry in caplog.records if entry.exc_info]
    assert [str(entry.exc_info[1]) for entry in traced] == ["unexpected"]
    said = traced[0].getMessage()
    assert re.fullmatch(
        r"handler of group g failed on message \S+ of t/\S+/0 at offset 1 \(.*\): .*", said
    )
    assert said.endswith("ValueError: unexpected")


async def test_the_client_sends_the_copy_if_the_broker_refuses_to(fake):
    fake.topics["t"] = 1
    fake.broker.put("t", 0, b"x", UNIQ_KEY="ID", TAGS="A")
    fake.broker.script[36] = refuse
    seen = []

    async def handler(message):
        seen.append((message.topic, message.reconsume_times, message.tag))
        if len(seen) == 1:
            raise ValueError("no")

    async with Sluice(fake.name_server) as mq:
        consumer = mq.consumer("g", handler, max_reconsume_times=5).subscribe("t", tags="A")
        async with consumer:
            await until(lambda: len(seen) == 2)
    assert seen == [("t", 0, "A"), ("t", 1, "A")]
    (sent,) = [fields for fields in asked(fake, 310) if fields["b"] == "%RETRY%g"]
    assert (sent["a"], sent["j"], sent["l"]) == ("CLIENT_INNER_PRODUCER", "1", "5")
    assert fake.broker.committed["g", "t", 0] == 1


async def test_the_handler_is_called_again_if_the_message_cannot_be_stored_anywhere(
    fake, monkeypatch
):
    monkeypatch.setattr("sluicemq.client.aio.consumer.local_retry_delay_s", lambda attempt: 0.02)
    fake.topics["t"] = 1
    for n in range(3):
        fake.broker.put("t", 0, b"%d" % n)
    fake.broker.script[36] = refuse
    fake.broker.script[310] = lambda command, peer: Command(14, remark="the disk is full")
    attempts = []

    async def handler(message):
        if message.body == b"1":
            attempts.append(message.reconsume_times + 1)
            raise ValueError("never")

    async with Sluice(fake.name_server) as mq, mq.consumer("g", handler).subscribe("t"):
        await until(lambda: len(attempts) >= 3)
    assert attempts[:3] == [1, 2, 3]
    assert fake.broker.committed["g", "t", 0] == 1


async def test_rejecting_raises_when_neither_the_broker_nor_the_client_can_store_a_copy(fake):
    fake.topics["t"] = 1
    fake.broker.put("t", 0, b"x")
    fake.broker.script[36] = refuse
    fake.broker.script[310] = lambda command, peer: Command(14, remark="the disk is full")
    async with Sluice(fake.name_server) as mq, mq.subscribe("t", group="g") as stream:
        message = await stream.receive()
        with pytest.raises(SluiceError, match="the disk is full"):
            await message.reject()
        assert mq._members["g"].readers.get(message.queue).in_flight.committable == 0


async def test_the_offset_waits_for_the_answer_of_the_send_back(fake):
    """A commit in between must not skip the message."""
    fake.topics["t"] = 1
    fake.broker.put("t", 0, b"x")
    waiting = []

    def hold(command, peer):
        waiting.append((command, peer))
        return fake.broker.silence

    fake.broker.script[36] = hold
    async with Sluice(fake.name_server) as mq:
        async with mq.subscribe("t", group="g") as stream:
            message = await stream.receive()
            rejecting = asyncio.ensure_future(message.reject())
            await until(lambda: waiting)
            readers = mq._members["g"].readers
            assert readers.get(message.queue).in_flight.committable == 0
            ((command, peer),) = waiting
            peer.write(encode_response_to(Command(0), command))
            assert await rejecting
            assert readers.get(message.queue).in_flight.committable == 1


async def test_a_message_of_a_removed_queue_is_not_sent_back(fake):
    fake.topics["t"] = 1
    fake.broker.put("t", 0, b"x")
    async with Sluice(fake.name_server) as mq, mq.subscribe("t", group="g") as stream:
        message = await stream.receive()
        reader = mq._members["g"].readers.get(message.queue)
        reader.move_to(0)
        assert not await message.reject()
    assert asked(fake, 36) == []


async def test_a_consumer_without_retries_drops_what_is_rejected(fake, caplog):
    """A broadcasting group does that: no other member has to read the message."""
    fake.topics["t"] = 1
    fake.broker.put("t", 0, b"x")
    async with Sluice(fake.name_server) as mq:
        consumer = mq.lite_pull("g")
        await consumer.subscribe("t")
        (message,) = await consumer.poll()
        with caplog.at_level(logging.WARNING, "sluicemq.client"):
            assert await message.reject()
        await consumer.commit()
        await consumer.close()
    assert "no retries" in caplog.text
    assert asked(fake, 36) == []
    assert fake.broker.committed["g", "t", 0] == 1
