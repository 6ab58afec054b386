"""Messages, batches and names: what is refused, and what the bytes are."""

import re
import zlib

import pytest

from sluicemq.client.core import requests
from sluicemq.client.core.messages import (
    OutgoingMessage,
    check_batch,
    join_batch,
    make_message,
    make_outgoing,
    split_batch,
)
from sluicemq.client.core.names import (
    check_group,
    check_properties,
    check_tag,
    check_topic,
    check_topic_to_send,
    parse_name_servers,
)
from sluicemq.errors import ConfigurationError
from sluicemq.model.message import Message
from sluicemq.model.properties import REFUSED_PROPERTIES
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_batch, decode_properties
from sluicemq.wire import headers
from sluicemq.wire.declare import encode_header


def test_the_hot_send_header_is_the_declared_one():
    queue = MessageQueue("t", "broker-a", 3)
    outgoing = OutgoingMessage("t", b"x", "a\x01b\x02", "ID", 769, 5, True)
    for batch in (False, True):
        command = requests.send("g", queue, outgoing, 12, batch=batch)
        declared = headers.SendMessageRequestV2(
            group="g", topic="t", default_topic="TBW102", default_topic_queues=4, queue_id=3,
            sys_flag=769, born_time_ms=12, flag=5, properties="a\x01b\x02", reconsume_times=0,
            unit_mode=False, batch=batch, broker="broker-a",
        )  # fmt: skip
        assert command.fields == encode_header(declared)
        assert command.code == (320 if batch else 310)


@pytest.mark.parametrize("broker", ["broker-a", ""])
@pytest.mark.parametrize("subscription", [None, Subscription("t", "a > 1", "SQL92", version=9)])
def test_the_hot_pull_header_is_the_declared_one(subscription, broker):
    """Once with all that may be left out, and once without."""
    said = subscription or Subscription("t", version=5)
    command = requests.pull(
        "g", MessageQueue("t", broker, 3), 1 << 40, count_max=7, bytes_max=99, sub_version=5,
        subscription=subscription, suspend_timeout_ms=15_000, commit_offset=12, bulk=not broker,
    )  # fmt: skip
    declared = headers.PullMessageRequest(
        group="g", topic="t", queue_id=3, queue_offset=1 << 40, message_count_max=7,
        sys_flag=3 if subscription is None else 7, commit_offset=12, suspend_timeout_ms=15_000,
        subscription=None if subscription is None else "a > 1", sub_version=said.version,
        expression_kind=said.kind, message_bytes_max=99, broker=broker or None,
        bulk=not broker or None,
    )  # fmt: skip
    assert command.fields == encode_header(declared)
    assert command.code == 11


def test_properties_travel_as_name_and_value_with_the_clients_own_first():
    message = Message("t", b"x", "UA", ("k1", "k2"), {"a": "1", "b": ""}, 0, False, "shard", 3)
    outgoing = make_outgoing(message, "ID")
    assert decode_properties(outgoing.properties.encode()) == {
        "UNIQ_KEY": "ID", "WAIT": "false", "TAGS": "UA", "KEYS": "k1 k2", "a": "1",
        "__SHARDINGKEY": "shard", "DELAY": "3",
    }  # fmt: skip
    assert not outgoing.wait_store_ok


def test_a_body_is_deflated_from_4096_bytes_on_when_that_helps():
    assert make_outgoing(Message("t", bytes(4095)), "ID").sys_flag == 0
    deflated = make_outgoing(Message("t", bytes(4096)), "ID")
    assert deflated.sys_flag == 0x301
    assert zlib.decompress(deflated.body) == bytes(4096)
    noise = b"".join(zlib.crc32(bytes([n % 256, n // 256])).to_bytes(4) for n in range(2000))
    assert make_outgoing(Message("t", noise), "ID").sys_flag == 0, "noise does not become smaller"
    assert make_outgoing(Message("t", bytes(9999)), "ID", compress_from_bytes=0).sys_flag == 0


def test_properties_above_the_limit_of_their_length_field_are_refused():
    with pytest.raises(ConfigurationError, match="limit is 32,767"):
        make_outgoing(Message("t", b"x", properties={"a": "ä" * 17_000}), "ID")
    make_outgoing(Message("t", b"x", properties={"a": "x" * 32_000}), "ID")


def test_a_body_is_bytes_or_text():
    assert make_message("t", "ü").body == "ü".encode()
    assert make_message("t", bytearray(b"x")).body == b"x"
    assert make_message("t", memoryview(b"x"), keys=["one", "key"][0]).keys == ("one",)
    for wrong in (None, 5, ["x"]):
        with pytest.raises(ConfigurationError, match="must be bytes or a string"):
            make_message("t", wrong)
    with pytest.raises(ConfigurationError, match="a Message cannot be combined"):
        make_message(Message("t", b"x"), b"y")


@pytest.mark.parametrize("name", sorted(REFUSED_PROPERTIES))
def test_a_reserved_property_is_refused_by_name(name):
    with pytest.raises(ConfigurationError, match=name):
        check_properties({name: "x"})


def test_properties_that_would_break_the_wire_or_are_not_text_are_refused():
    for bad in ({"a\x01": "x"}, {"a": "x\x02"}, {"": "x"}):
        with pytest.raises(ConfigurationError):
            check_properties(bad)
    with pytest.raises(ConfigurationError, match=r"str\(\)"):
        check_properties({"dep_delay": 61})


def test_tags_are_one_visible_word_group_without_a_bar():
    for good in ("UA", "a b", "标签", "x" * 128):
        assert check_tag(good) == good
    for bad in ("", "a|b", "a||b", "*", "x" * 129, "a\n", " a", "a\u200b"):
        with pytest.raises(ConfigurationError):
            check_tag(bad)


def test_topic_and_group_names_keep_to_the_brokers_rules():
    assert check_topic("%RETRY%" + "g" * 120)
    assert check_group("g" * 120)
    for bad in ("", "a b", "tö", "t" * 128, "a.b"):
        with pytest.raises(ConfigurationError):
            check_topic(bad)
    with pytest.raises(ConfigurationError, match="121 characters"):
        check_group("g" * 121)
    with pytest.raises(ConfigurationError, match="is reserved for the broker"):
        check_topic_to_send("SCHEDULE_TOPIC_XXXX")


def test_name_server_addresses_come_in_every_usual_spelling():
    assert parse_name_servers("a:1;b:2, c;a:1") == ("a:1", "b:2", "c:9876")
    assert parse_name_servers(["http://a:1"]) == ("a:1",)
    assert parse_name_servers("[::1]:9877") == ("[::1]:9877",)
    assert parse_name_servers("[::1]") == ("[::1]:9876",)
    for bad in ("", " ; ", "a:x", "a:70000", ":9876"):
        with pytest.raises(ConfigurationError):
            parse_name_servers(bad)


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (Message("other", b""), "same topic, got 't' (message 0) and 'other' (message 1)"),
        (
            Message("t", b"", wait_store_ok=False),
            "same wait_store_ok, got True (message 0) and False (message 1)",
        ),
        (Message("t", b"", delay_level=2), "message 1 of the batch is delayed"),
        (
            Message("t", b"", sharding_key="k"),
            "same sharding key, got None (message 0) and 'k' (message 1)",
        ),
    ],
)
def test_a_batch_is_refused_by_the_index_of_the_message_at_fault(second, text):
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        check_batch([Message("t", b""), second])


def test_an_empty_batch_and_a_retry_topic_are_refused():
    with pytest.raises(ConfigurationError, match="empty"):
        check_batch([])
    with pytest.raises(ConfigurationError, match="message 0 of the batch goes to the retry topic"):
        check_batch([Message("%RETRY%g", b"")])


def part(size):
    return OutgoingMessage("t", bytes(size), "", "ID", 0, 0, True)


def test_parts_of_a_batch_hold_at_most_the_limit_and_a_giant_goes_alone():
    sizes = [400, 400, 200, 2000, 10]
    runs = list(split_batch([part(size) for size in sizes], 1000))
    assert [[len(one.body) for one in run] for run in runs] == [[400, 400], [200], [2000], [10]]


def test_a_joined_batch_reads_back_and_has_no_id_that_a_broker_would_give_its_messages():
    parts = [make_outgoing(Message("t", b"%d" % n, tag="A", flag=n), f"ID{n}") for n in range(3)]
    joined = join_batch(parts, "BATCH")
    read = [(flag, bytes(body), bytes(text)) for flag, body, text, _ in decode_batch(joined.body)]
    assert read == [(n, b"%d" % n, parts[n].properties.encode()) for n in range(3)]
    assert joined.message_id == "BATCH"
    assert decode_properties(joined.properties.encode()) == {"WAIT": "true"}


def test_an_empty_body_is_refused_because_brokers_do_not_take_it():
    with pytest.raises(ConfigurationError, match="the body is empty"):
        make_outgoing(Message("t", b""), "ID")
