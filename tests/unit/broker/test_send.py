"""Sends: what is stored, what is answered, what is refused. The hot path and the way by the book
have to agree."""

import dataclasses
import random

import pytest

from simulation.stepped import (
    SMALL,
    START_MS,
    SteppedBroker,
    SteppedClient,
    pull_fields,
    send_fields,
)
from sluicemq.model.ids import tag_code
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import GroupConfig, MessageQueue, TopicConfig
from sluicemq.record.codec import decode_record, decode_records, encode_batch
from sluicemq.wire.declare import decode_header, encode_header
from sluicemq.wire.frames import FLAG_ONEWAY, Command
from sluicemq.wire.headers import SendMessageRequest
from sluicemq.wire.headers import SendMessageRequestV2 as Letters

JAVA = (
    "KEYS\x01k 1\x02UNIQ_KEY\x01C000020203F34E0E2F2A67BA16000000\x02WAIT\x01true\x02TAGS\x01A\x02"
)
ADDED = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true", "CLUSTER": "DefaultCluster"}


def stored(broker: SteppedBroker, topic: str = "T", queue_id: int = 0) -> list[StoredMessage]:
    result = broker.store.reader.read(topic, queue_id, 0, 1000, 1 << 20)
    return [m for part in result.data for m in decode_records(part)]


def fields_of(answer: Command) -> dict[str, str]:
    assert answer.fields is not None
    return answer.fields


def test_a_plain_send_is_stored_as_sent_and_answered_with_its_place(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    answer = client.call(310, send_fields(properties=JAVA, e=2, f=1, h=9), b"body")
    (message,) = stored(broker, queue_id=2)
    assert answer.code == 0
    assert answer.remark is None
    assert fields_of(answer) == {
        "queueId": "2", "queueOffset": "0", "MSG_REGION": "DefaultRegion", "TRACE_ON": "true",
        "msgId": message.offset_message_id, "transactionId": "C000020203F34E0E2F2A67BA16000000",
    }  # fmt: skip
    assert message.properties == {
        "KEYS": "k 1", "UNIQ_KEY": "C000020203F34E0E2F2A67BA16000000", "WAIT": "true", "TAGS": "A",
    } | ADDED  # fmt: skip
    assert (message.flag, message.sys_flag, message.born_time_ms) == (9, 1, START_MS)
    assert message.born_host == client.peer.remote
    assert message.store_host == broker.host
    assert broker.store.reader.record_at(message.physical_offset) is not None


@pytest.mark.parametrize(
    "properties",
    [
        JAVA,
        JAVA.rstrip("\x02"),
        "UNIQ_KEY\x01AB\x02",
        "UNIQ_KEY\x01AB",
        "TAGS\x01T A\x02UNIQ_KEY\x01AB\x02",
        "TAGS\x01T A\x02UNIQ_KEY\x01AB\x02TAGS\x01other\x02",
        "MYTAGS\x01no tag\x02UNIQ_KEY\x01AB\x02",
        "TAGS\x01ÄÖ中\x02UNIQ_KEY\x01AB\x02name\x01中\x02",
        "WAIT\x01false\x02UNIQ_KEY\x01AB\x02",
        "UNIQ_KEY\x01AB\x02__SHARDINGKEY\x01s\x02",
    ],
)
def test_the_hot_path_and_the_way_by_the_book_agree(properties: str) -> None:
    results = []
    for code in (310, 10):
        broker = SteppedBroker()
        broker.core.topics.put(TopicConfig("T", 4, 4))
        client = broker.connect()
        letters = send_fields(properties=properties, e=1, f=0x301, h=3)
        fields: dict[str, object] = dict(letters)
        if code == 10:
            texts = {name: str(value) for name, value in letters.items()}
            header = decode_header(Letters, texts)
            names = {n: getattr(header, n) for n in SendMessageRequest.__slots__}
            fields = dict(encode_header(SendMessageRequest(**names)))
        answer = client.call(code, fields, b"some body")
        (message,) = stored(broker, queue_id=1)
        unit = broker.store.reader.read("T", 1, 0, 1, None, None)
        results.append((
            answer.code, answer.fields, answer.remark, dict(message.properties), message.flag,
            message.sys_flag, message.raw_body, message.born_time_ms, unit.count,
            broker.core.topics.table["T"].messages_in,
        ))  # fmt: skip
    assert results[0] == results[1]


@pytest.mark.parametrize("tag", ["A", "标签", "a tag of words", "x" * 100])
def test_the_queue_entry_holds_the_hash_of_the_tag(client: SteppedClient, tag: str) -> None:
    client.call(310, send_fields(properties=f"UNIQ_KEY\x01AB\x02TAGS\x01{tag}\x02"), b"")
    found = client.call(11, pull_fields(subscription=tag))
    missed = client.call(11, pull_fields(subscription="other"))
    assert (found.code, missed.code) == (0, 20)
    assert tag_code(tag) != 0


def test_ids_that_need_quoting_in_json_are_quoted(client: SteppedClient) -> None:
    answer = client.call(310, send_fields(properties='UNIQ_KEY\x01a"b\\c\x02'), b"")
    assert fields_of(answer)["transactionId"] == 'a"b\\c'


def test_a_missing_id_is_made_by_the_broker(broker: SteppedBroker, client: SteppedClient) -> None:
    for _ in range(2):
        client.call(310, send_fields(properties="TAGS\x01A\x02"), b"")
    ids = [message.properties["UNIQ_KEY"] for message in stored(broker)]
    assert len(set(ids)) == 2
    assert all(len(one) == 32 for one in ids)


def test_properties_the_client_set_itself_are_kept_and_pop_handles_are_not(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    given = JAVA + "CLUSTER\x01other\x02POP_CK\x01handle\x02"
    client.call(310, send_fields(properties=given), b"")
    (message,) = stored(broker)
    assert message.properties["CLUSTER"] == "other"
    assert "POP_CK" not in message.properties


def test_one_way_sends_are_stored_without_an_answer(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    client.feed(client.request(310, send_fields(), b"one", flag=FLAG_ONEWAY))
    client.feed(client.request(310, send_fields(properties="X\x01y\x02"), b"2", flag=FLAG_ONEWAY))
    broker.step()
    assert [message.body for message in stored(broker)] == [b"one", b"2"]
    assert client.log == []


def test_a_negative_queue_leaves_the_choice_to_the_broker(client: SteppedClient) -> None:
    chosen = {fields_of(client.call(310, send_fields(e=-1), b""))["queueId"] for _ in range(8)}
    assert chosen == {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("properties", "waits"),
    [
        ("UNIQ_KEY\x01AB\x02", True),
        ("UNIQ_KEY\x01AB\x02WAIT\x01true\x02", True),
        ("UNIQ_KEY\x01AB\x02WAIT\x01false\x02", False),
        ("UNIQ_KEY\x01AB\x02WAIT\x01no\x02", False),
        ("UNIQ_KEY\x01AB\x02MYWAIT\x01false\x02", True),
        ("UNIQ_KEY\x01AB\x02MYWAIT\x01false\x02WAIT\x01true\x02", True),
    ],
)
def test_only_wait_false_is_answered_before_the_fsync(properties: str, waits: bool) -> None:
    broker = SteppedBroker(store_config=dataclasses.replace(SMALL, flush_sync=True))
    broker.core.topics.put(TopicConfig("T", 1, 1))
    client = broker.connect()
    send = client.request(310, send_fields(properties=properties), b"x")
    client.feed(send)
    broker.step()
    assert (send.opaque not in client.answers) == waits
    broker.finish_sync()
    assert send.opaque in client.answers


# ----------------------------------------------------------------------------------- refusals


def refusal(answer: Command) -> tuple[int, str]:
    """Failed sends carry region and trace switch, as recorded."""
    assert fields_of(answer) == {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
    return answer.code, answer.remark or ""


@pytest.mark.parametrize(
    "properties",
    [
        "UNIQ_KEY\x01AB\x02DELAY\x013\x02",
        "UNIQ_KEY\x01AB\x02DELAY\x01soon\x02",
        "UNIQ_KEY\x01AB\x02TIMER_DELAY_SEC\x013\x02",
        "UNIQ_KEY\x01AB\x02TIMER_DELAY_MS\x013\x02",
        "UNIQ_KEY\x01AB\x02TIMER_DELIVER_MS\x013\x02",
        "UNIQ_KEY\x01AB\x02TRAN_MSG\x01true\x02",
        "UNIQ_KEY\x01AB\x02TRAN_MSG\x01TRUE\x02",
    ],
)
def test_what_no_message_of_a_batch_can_be_is_refused_and_not_stored(
    broker: SteppedBroker, client: SteppedClient, properties: str
) -> None:
    body = encode_batch([(0, b"x", b""), (0, b"y", properties.encode())])
    result, remark = refusal(client.call(320, send_fields(properties=""), body))
    assert result == 13
    assert "batch" in remark
    assert list(broker.store.queues()) == []


@pytest.mark.parametrize("sys_flag", [0x4, 0x8, 0xC])
def test_transaction_bits_are_refused(client: SteppedClient, sys_flag: int) -> None:
    assert refusal(client.call(310, send_fields(f=sys_flag), b""))[0] == 13


def test_delay_level_zero_is_an_ordinary_message(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    assert (
        client.call(310, send_fields(properties="UNIQ_KEY\x01A\x02DELAY\x010\x02"), b"").code == 0
    )
    assert len(stored(broker)) == 1


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"topic": "a b"}, 29, "illegal characters"),
        ({"topic": " "}, 29, "blank"),
        ({"topic": "x" * 128}, 29, "limit is 127"),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, 16, "is forbidden"),
        ({"topic": "RMQ_SYS_TRANS_HALF_TOPIC"}, 16, "is forbidden"),
        ({"e": 4}, 29, "queueId[4] is illegal, TopicConfig [topicName=T,"),
        ({"topic": "nosuch", "c": "T"}, 17, "topic[nosuch] not exist"),
        ({"topic": "nosuch", "c": "unknown"}, 17, "topic[nosuch] not exist"),
    ],
)
def test_a_send_that_cannot_be_is_refused(
    client: SteppedClient, changes: dict[str, object], code: int, text: str
) -> None:
    result, remark = refusal(client.call(310, send_fields(**changes), b"x"))  # type: ignore[arg-type]
    assert result == code
    assert text in remark


@pytest.mark.parametrize("letter", list("abcdefgh"))
def test_a_missing_field_is_named(client: SteppedClient, letter: str) -> None:
    fields = send_fields()
    del fields[letter]
    answer = client.call(310, fields, b"x")
    if letter in "acd":  # not used for a plain message to a topic that exists
        assert answer.code == 0
    else:
        assert (answer.code, answer.remark) == (1, f"the custom field <{letter}> is null")


def test_limits_of_body_and_properties_name_value_and_limit(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    limit = broker.settings.store.message_bytes_max
    large = refusal(client.call(310, send_fields(), bytes(limit + 1)))
    assert large[0] == 13
    assert str(limit) in large[1]
    broker.change(properties_length_max=200)
    long = refusal(client.call(310, send_fields(properties=JAVA + "x\x01" + "y" * 200), b""))
    assert long[0] == 13
    assert "limit is 200" in long[1]
    assert stored(broker) == []


def test_a_read_only_topic_takes_sends_as_the_real_broker_does(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.core.topics.put(TopicConfig("R", 1, 1, perm=4))
    assert client.call(310, send_fields("R"), b"x").code == 0


def test_a_broker_without_write_permission_refuses_ordered_topics(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.core.topics.put(TopicConfig("O", 1, 1, order=True))
    assert client.call(310, send_fields("O", "TAGS\x01a\x02"), b"x").code == 0
    broker.change(broker_permission=4)
    assert refusal(client.call(310, send_fields("O", "TAGS\x01a\x02"), b"x"))[0] == 16
    assert refusal(client.call(310, send_fields("O"), b"x"))[0] == 16


# ------------------------------------------------------------------------------ auto-creation


def test_an_unknown_topic_is_created_with_what_producer_and_default_topic_allow(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    assert client.call(310, send_fields("New", d=4), b"x").code == 0
    assert client.call(310, send_fields("Wide", d=99), b"x").code == 0
    made = broker.core.topics.table["New"].config
    assert (made.read_queues, made.write_queues, made.perm) == (4, 4, 6)
    assert broker.core.topics.table["Wide"].config.write_queues == 8


def test_auto_creation_can_be_switched_off(client: SteppedClient, broker: SteppedBroker) -> None:
    broker.change(auto_create_topic=False)
    code, remark = refusal(client.call(310, send_fields("New"), b"x"))
    assert code == 17
    assert remark.startswith("topic[New] not exist, apply first please!")
    assert "New" not in broker.core.topics


# ------------------------------------------------------------------------------------- batches


def test_a_batch_becomes_messages_with_consecutive_offsets(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    body = encode_batch([
        (1, b"a", b"TAGS\x01A\x02UNIQ_KEY\x01ID1\x02"),
        (2, b"b", b"UNIQ_KEY\x01ID2"),
        (3, b"", b""),
    ])  # fmt: skip
    properties = "UNIQ_KEY\x01WHOLE\x02WAIT\x01true\x02"
    answer = client.call(320, send_fields(properties=properties, m="true"), body)
    messages = stored(broker)
    assert [(m.flag, m.body, m.queue_offset) for m in messages] == [
        (1, b"a", 0), (2, b"b", 1), (3, b"", 2),
    ]  # fmt: skip
    assert [m.properties.get("UNIQ_KEY") for m in messages] == ["ID1", "ID2", None]
    assert all(ADDED.items() <= dict(m.properties).items() for m in messages)
    fields = fields_of(answer)
    assert fields["msgId"].split(",") == [m.offset_message_id for m in messages]
    assert (fields["queueOffset"], fields["transactionId"]) == ("0", "WHOLE")


def test_a_batch_without_an_id_gets_no_transaction_id(client: SteppedClient) -> None:
    answer = client.call(
        320, send_fields(properties="WAIT\x01true"), encode_batch([(0, b"a", b"")])
    )
    assert "transactionId" not in fields_of(answer)


@pytest.mark.parametrize("code", [10, 310])
def test_the_batch_flag_makes_a_batch_of_other_codes(
    broker: SteppedBroker, client: SteppedClient, code: int
) -> None:
    body = encode_batch([(0, b"a", b""), (0, b"b", b"")])
    fields: dict[str, object] = send_fields(m="true")
    if code == 10:
        fields = {
            "producerGroup": "P", "topic": "T", "defaultTopic": "TBW102", "queueId": 0,
            "defaultTopicQueueNums": 4, "sysFlag": 0, "bornTimestamp": 1, "flag": 0,
            "batch": "true",
        }  # fmt: skip
    assert client.call(code, fields, body).code == 0
    assert len(stored(broker)) == 2


@pytest.mark.parametrize(
    "body", [b"", b"\x00\x00\x00\x10", encode_batch([(0, b"a", b"")])[:-1], bytes(40)]
)
def test_a_broken_batch_is_refused_as_a_whole(
    broker: SteppedBroker, client: SteppedClient, body: bytes
) -> None:
    assert refusal(client.call(320, send_fields(), body))[0] == 13
    assert stored(broker) == []


def test_random_bytes_as_a_batch_never_break_the_broker(client: SteppedClient) -> None:
    rng = random.Random(3)
    good = encode_batch([(0, b"abc", b"TAGS\x01A\x02"), (0, b"def", b"")])
    for _ in range(200):
        broken = bytearray(good)
        broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        assert client.call(320, send_fields(), bytes(broken)).code in {0, 13}


# --------------------------------------------------------------------------------- retry topics


def test_a_message_for_retry_needs_its_group(broker: SteppedBroker, client: SteppedClient) -> None:
    broker.change(auto_create_group=False)
    assert refusal(client.call(310, send_fields("%RETRY%G"), b"x"))[0] == 26
    broker.core.groups.put(GroupConfig("G"))
    assert client.call(310, send_fields("%RETRY%G", j=3), b"x").code == 0
    (message,) = stored(broker, "%RETRY%G")
    assert message.reconsume_times == 3


@pytest.mark.parametrize(
    ("changes", "dead"), [({"j": 16}, False), ({"j": 17}, True), ({"j": 3, "l": 2}, True)]
)
def test_too_many_attempts_lead_to_the_dead_letter_topic(
    broker: SteppedBroker, client: SteppedClient, changes: dict[str, object], dead: bool
) -> None:
    broker.core.groups.put(GroupConfig("G"))
    client.call(310, send_fields("%RETRY%G", **changes), b"x")
    assert len(stored(broker, "%DLQ%G")) == int(dead)


def test_a_group_that_consumes_in_order_sends_to_the_dead_letter_topic(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.core.groups.put(GroupConfig("G"))
    broker.core.locks.lock("G", "c", [MessageQueue("T", "broker-a", 0)])
    client.call(310, send_fields("%RETRY%G"), b"x")
    assert len(stored(broker, "%DLQ%G")) == 1


def test_batches_for_retry_are_refused(client: SteppedClient) -> None:
    body = encode_batch([(0, b"a", b"")])
    assert refusal(client.call(320, send_fields("%RETRY%G"), body))[0] == 13


def test_a_record_can_be_read_at_the_place_that_was_answered(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    answer = client.call(310, send_fields(), b"here")
    offset = int(fields_of(answer)["msgId"][16:], 16)
    record = client.call(33, {"offset": offset})
    assert decode_record(record.body).body == b"here"
    assert client.call(33, {"offset": offset + 1}).code == 1
