"""Stored messages as clients of gRPC get them."""

import gzip
import hashlib
from dataclasses import replace

import pytest

pytest.importorskip("google.protobuf")

from hypothesis import given
from hypothesis import strategies as st

from sluicemq.model.bodies import (
    COMPRESSED,
    COMPRESSION_LZ4,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
    compress,
)
from sluicemq.model.ids import Host
from sluicemq.model.message import (
    StoredMessage,
)
from sluicemq.model.properties import HIDDEN_PROPERTIES
from sluicemq.proxy.convert import DECODED_BYTES_MAX, UNDECODABLE, to_message
from sluicemq.proxy.messages import DigestType, Encoding, MessageType
from stored_bodies import BAD

STORED = StoredMessage(
    topic="orders", queue_id=3, queue_offset=17, physical_offset=4711, size_bytes=200,
    raw_body=b"body", properties={}, flag=0, sys_flag=0, born_time_ms=1_700_000_000_123,
    born_host=Host("10.0.0.1", 4000), store_time_ms=1_700_000_000_456,
    store_host=Host("10.0.0.2", 10911), reconsume_times=2, prepared_offset=0, body_crc=0,
)  # fmt: skip
names = st.text(
    st.characters(codec="utf-8", exclude_characters="\x00\x01\x02"), min_size=1, max_size=12
)
properties = st.dictionaries(
    names | st.sampled_from(sorted({*HIDDEN_PROPERTIES, "__SHARDINGKEY", "TRACE_CONTEXT"})), names
)


def test_all_that_a_record_says() -> None:
    stored = replace(
        STORED,
        properties={
            "TAGS": "a", "KEYS": "k1  k2", "UNIQ_KEY": "01AB", "__SHARDINGKEY": "group",
            "TRACE_CONTEXT": "trace", "color": "red", "WAIT": "true", "__BORNHOST": "1.2.3.4",
            "DLQ_ORIGIN_TOPIC": "t", "DLQ_ORIGIN_MESSAGE_ID": "i", "POP_CK": "x",
        },
    )  # fmt: skip
    message = to_message(stored, "1 2 3", topic="asked", reconsume_times=4)
    system = message.system_properties
    assert message.topic.name == "asked"
    assert message.user_properties == {
        "color": "red", "__SHARDINGKEY": "group", "TRACE_CONTEXT": "trace",
    }  # fmt: skip
    assert (system.tag, list(system.keys), system.message_id) == ("a", ["k1", "k2"], "01AB")
    assert (system.born_timestamp.seconds, system.born_timestamp.nanos) == (
        1_700_000_000, 123_000_000,
    )  # fmt: skip
    assert system.store_timestamp.nanos == 456_000_000
    assert (system.born_host, system.store_host) == ("1.2.3.4", "10.0.0.2:10911")
    assert (system.queue_id, system.queue_offset, system.delivery_attempt) == (3, 17, 5)
    assert (system.message_group, system.trace_context) == ("group", "trace")
    assert (system.dead_letter_queue.topic, system.dead_letter_queue.message_id) == ("t", "i")
    assert system.receipt_handle == "1 2 3"
    assert not system.HasField("invisible_duration")
    assert not system.HasField("delivery_timestamp")


def test_what_a_record_does_not_say() -> None:
    system = to_message(STORED).system_properties
    assert not system.HasField("tag")
    assert not system.HasField("message_group")
    assert not system.HasField("dead_letter_queue")
    assert (system.born_host, system.delivery_attempt) == ("10.0.0.1", 3)
    assert system.message_id == STORED.offset_message_id


@pytest.mark.parametrize(
    ("properties", "kind"),
    [({}, MessageType.NORMAL), ({"__SHARDINGKEY": "g"}, MessageType.FIFO),
     ({"TIMER_DELIVER_MS": "5", "__SHARDINGKEY": "g"}, MessageType.DELAY),
     ({"DELAY": "3"}, MessageType.DELAY),
     ({"TRAN_MSG": "true", "DELAY": "3"}, MessageType.TRANSACTION),
     ({"TRAN_MSG": "false"}, MessageType.NORMAL),
     ({"_SYS_MSG_PRIORITY_": "3"}, MessageType.PRIORITY),
     ({"__LITE_TOPIC": "x"}, MessageType.LITE)],
)  # fmt: skip
def test_of_which_kind_a_message_is(properties: dict[str, str], kind: MessageType) -> None:
    assert to_message(replace(STORED, properties=properties)).system_properties.message_type == kind


@pytest.mark.parametrize(
    ("properties", "seconds"),
    [({"TIMER_DELIVER_MS": "1700000009000"}, 1_700_000_009),
     ({"TIMER_DELAY_SEC": "9"}, 1_700_000_009), ({"TIMER_DELAY_MS": "9000"}, 1_700_000_009),
     ({"TIMER_DELIVER_MS": "9" * 30}, 0), ({"TIMER_DELIVER_MS": "٣"}, 0), ({}, 0)],
)  # fmt: skip
def test_when_it_was_to_be_delivered(properties: dict[str, str], seconds: int) -> None:
    system = to_message(replace(STORED, properties=properties)).system_properties
    assert system.HasField("delivery_timestamp") == bool(seconds)
    assert system.delivery_timestamp.seconds == seconds


@pytest.mark.parametrize("kind", [0, COMPRESSION_ZLIB, COMPRESSION_LZ4, COMPRESSION_ZSTD])
def test_a_compressed_body_arrives_as_it_was(kind: int) -> None:
    body = b"body " * 100
    stored = replace(STORED, raw_body=compress(body, kind), sys_flag=COMPRESSED | kind)
    message = to_message(stored)
    assert message.body == body
    assert message.system_properties.body_encoding == Encoding.IDENTITY
    assert message.system_properties.body_digest.type == DigestType.MD5
    assert message.system_properties.body_digest.checksum == hashlib.md5(body).hexdigest().upper()


def test_a_body_of_gzip_is_readable_too() -> None:
    message = to_message(replace(STORED, raw_body=gzip.compress(b"body"), sys_flag=COMPRESSED))
    assert (message.body, message.system_properties.body_encoding) == (b"body", Encoding.IDENTITY)


def test_bodies_that_cannot_be_decompressed_are_counted_and_bounded() -> None:
    before = UNDECODABLE.value
    for bad in BAD.values():
        stored = replace(STORED, raw_body=bad.raw, sys_flag=bad.sys_flag)
        if "oversized" in str(stored.body_error) or stored.body_error is None:
            continue
        message = to_message(stored)
        assert (message.body, message.system_properties.body_encoding) == (bad.raw, Encoding.GZIP)
    assert UNDECODABLE.value > before + 10
    bomb = compress(bytes(DECODED_BYTES_MAX + 1), COMPRESSION_ZLIB)
    message = to_message(replace(STORED, raw_body=bomb, sys_flag=COMPRESSED | COMPRESSION_ZLIB))
    assert message.body == bomb


def test_a_body_that_cannot_be_decompressed_goes_as_it_lies() -> None:
    message = to_message(replace(STORED, raw_body=b"no zlib", sys_flag=COMPRESSED))
    assert (message.body, message.system_properties.body_encoding) == (b"no zlib", Encoding.GZIP)
    assert (
        message.system_properties.body_digest.checksum
        == hashlib.md5(b"no zlib").hexdigest().upper()
    )


@given(properties, st.binary(max_size=64), st.integers(0, 1 << 45))
def test_any_record_is_a_message(properties: dict[str, str], body: bytes, time_ms: int) -> None:
    stored = replace(
        STORED, properties=properties, raw_body=body, born_time_ms=time_ms, store_time_ms=time_ms
    )
    message = to_message(stored)
    assert message.body == body
    assert {**message.user_properties} == {
        name: value for name, value in properties.items() if name not in HIDDEN_PROPERTIES
    }
    assert message.SerializeToString()
