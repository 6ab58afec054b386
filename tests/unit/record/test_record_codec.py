"""The scalar record codec, compared with bytes that follow spec/store.md §2.1."""

import struct
import zlib

import pytest

from sluicemq.errors import ProtocolError
from sluicemq.model.ids import Host
from sluicemq.record.codec import (
    decode_properties,
    decode_record,
    decode_records,
    encode_properties,
    encode_record,
    is_body_intact,
    parse_head,
    properties_slice,
)

IPV4 = bytes([10, 1, 2, 3]) + struct.pack(">i", 10911)
IPV6 = bytes(15) + b"\x01" + struct.pack(">i", 9)


def by_hand(*, born: bytes = IPV4, stored: bytes = IPV4, topic: bytes = b"TopicA") -> bytes:
    """Return a record, encoded field by field as in the table of the specification."""
    body, properties = b"hello", b"TAGS\x01TagA\x02KEYS\x01k1 k2\x02"
    sys_flag = (0x10 if len(born) == 20 else 0) | (0x20 if len(stored) == 20 else 0)
    fields = [
        b"\xda\xa3\x20\xa7" if len(topic) <= 127 else b"\xda\xa3\x20\xab",
        struct.pack(">i", zlib.crc32(body) & 0x7FFFFFFF),
        struct.pack(">i", 3),  # queue id
        struct.pack(">i", -5),  # flag
        struct.pack(">q", 77),  # queue offset
        struct.pack(">q", 1 << 40),  # physical offset
        struct.pack(">i", sys_flag),
        struct.pack(">q", 1_700_000_000_001),  # born
        born,
        struct.pack(">q", 1_700_000_000_002),  # stored
        stored,
        struct.pack(">i", 2),  # reconsume times
        struct.pack(">q", 9),  # prepared offset
        struct.pack(">i", len(body)) + body,
        (bytes([len(topic)]) if len(topic) <= 127 else struct.pack(">h", len(topic))) + topic,
        struct.pack(">h", len(properties)) + properties,
    ]
    rest = b"".join(fields)
    return struct.pack(">i", 4 + len(rest)) + rest


def encoded(*, born: bytes = IPV4, stored: bytes = IPV4, topic: str = "TopicA") -> bytes:
    return encode_record(
        topic=topic,
        queue_id=3,
        queue_offset=77,
        physical_offset=1 << 40,
        body=b"hello",
        properties=encode_properties({"TAGS": "TagA", "KEYS": "k1 k2"}),
        flag=-5,
        sys_flag=0x30,  # wrong host bits: set from the hosts themselves
        born_time_ms=1_700_000_000_001,
        born_host=born,
        store_time_ms=1_700_000_000_002,
        store_host=stored,
        reconsume_times=2,
        prepared_offset=9,
    )


@pytest.mark.parametrize("born", [IPV4, IPV6])
@pytest.mark.parametrize("stored", [IPV4, IPV6])
@pytest.mark.parametrize("topic", ["TopicA", "%RETRY%" + "g" * 121, "t" * 127])
def test_encoder_writes_the_layout(born: bytes, stored: bytes, topic: str) -> None:
    expected = by_hand(born=born, stored=stored, topic=topic.encode())
    assert encoded(born=born, stored=stored, topic=topic) == expected


def test_decoder_reads_every_field() -> None:
    message = decode_record(b"xx" + by_hand(born=IPV6), 2, broker="b")
    assert message.topic == "TopicA"
    assert (message.queue_id, message.queue_offset, message.flag) == (3, 77, -5)
    assert message.physical_offset == 1 << 40
    assert message.body == b"hello"
    assert message.properties == {"TAGS": "TagA", "KEYS": "k1 k2"}
    assert message.sys_flag == 0x10
    assert message.born_time_ms == 1_700_000_000_001
    assert message.store_time_ms == 1_700_000_000_002
    assert message.born_host == Host("::1", 9)
    assert message.store_host == Host("10.1.2.3", 10911)
    assert (message.reconsume_times, message.prepared_offset) == (2, 9)
    assert message.size_bytes == len(by_hand(born=IPV6))
    assert message.broker == "b"
    assert message.keys == ("k1", "k2")
    assert message.tag == "TagA"
    assert message.offset_message_id == "0A01020300002A9F0000010000000000"


def test_concatenated_records_are_read_one_after_the_other() -> None:
    data = by_hand() + by_hand(topic=b"t" * 200) + by_hand(stored=IPV6)
    assert [m.topic for m in decode_records(data)] == ["TopicA", "t" * 200, "TopicA"]
    assert [message.size_bytes for message in decode_records(memoryview(data))] == [
        len(by_hand()),
        len(by_hand(topic=b"t" * 200)),
        len(by_hand(stored=IPV6)),
    ]
    assert decode_records(b"") == []


@pytest.mark.parametrize("born", [IPV4, IPV6])
@pytest.mark.parametrize("stored", [IPV4, IPV6])
@pytest.mark.parametrize("topic", [b"TopicA", b"t" * 200])
def test_properties_are_found_without_decoding_the_rest(
    born: bytes, stored: bytes, topic: bytes
) -> None:
    record = b"###" + by_hand(born=born, stored=stored, topic=topic) + b"###"
    assert record[properties_slice(record, 3)] == b"TAGS\x01TagA\x02KEYS\x01k1 k2\x02"


def test_every_cut_of_a_record_is_refused() -> None:
    record = by_hand()
    for size in range(len(record)):
        with pytest.raises(ProtocolError):
            decode_record(record[:size])


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, 10), (0, 150), (4, 0), (84, -1), (84, 1 << 30), (84, 6), (-23, 0)],
    ids=["small", "large", "magic", "body<0", "body>all", "body+1", "properties"],
)
def test_lengths_that_do_not_agree_are_refused(at: int, value: int) -> None:
    record = bytearray(by_hand())
    if at < 0:
        record[at] = 0xFF  # a negative length
    else:
        struct.pack_into(">i", record, at, value)
    with pytest.raises(ProtocolError):
        decode_record(bytes(record))


def test_changed_body_does_not_agree_with_its_crc() -> None:
    record = bytearray(by_hand())
    assert is_body_intact(record, parse_head(record))
    record[88] ^= 1
    assert not is_body_intact(record, parse_head(record))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", {}),
        (b"a\x01b\x02", {"a": "b"}),
        (b"a\x01b", {"a": "b"}),  # the last separator may be missing
        (b"a\x01\x02b\x01c\x02", {"b": "c"}),  # empty values are dropped
        (b"\x01x\x02b\x01c\x02", {"b": "c"}),  # so are empty names
        (b"abc\x02\x02b\x01c\x02", {"b": "c"}),  # and pieces without a separator
        (b"a\x01b\x01c\x02", {"a": "b\x01c"}),  # the first separator counts
        ("用户\x01é\x02".encode(), {"用户": "é"}),
        (b"a\x01\xff\x02", {"a": "\ufffd"}),
    ],
)
def test_properties_are_split_as_java_does(data: bytes, expected: dict[str, str]) -> None:
    assert decode_properties(data) == expected
    assert decode_properties(memoryview(data)) == expected


@pytest.mark.parametrize("bad", [{"a\x01": "b"}, {"a": "b\x02"}, {"\x02": "b"}, {"a": "\x01"}])
def test_separators_in_properties_are_refused(bad: dict[str, str]) -> None:
    with pytest.raises(ProtocolError, match="0x01"):
        encode_properties(bad)


def test_parts_too_long_for_their_length_field_are_refused() -> None:
    with pytest.raises(ProtocolError, match="limit is 32767"):
        encode_record(**{**ARGUMENTS, "properties": bytes(32768)})  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="topic has 128 bytes"):
        encode_record(**{**ARGUMENTS, "topic": "t" * 128, "version2": False})  # type: ignore[arg-type]


ARGUMENTS = {
    "topic": "t",
    "queue_id": 0,
    "queue_offset": 0,
    "physical_offset": 0,
    "body": b"",
    "properties": b"",
    "flag": 0,
    "sys_flag": 0,
    "born_time_ms": 0,
    "born_host": IPV4,
    "store_time_ms": 0,
    "store_host": IPV4,
}
