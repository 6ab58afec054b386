"""Whatever is encoded comes back, and no bytes whatever crash the decoders."""

import contextlib

import hypothesis.strategies as st
from hypothesis import given, settings

from sluicemq.errors import ProtocolError
from sluicemq.record.codec import (
    decode_batch,
    decode_properties,
    decode_record,
    decode_records,
    encode_batch,
    encode_properties,
    encode_record,
    parse_head,
    properties_slice,
    tag_code_of_properties,
)

HOSTS = st.binary(min_size=4, max_size=4) | st.binary(min_size=16, max_size=16)
PORTS = st.integers(0, 65535).map(lambda port: port.to_bytes(4, "big"))
INTS = st.integers(-(1 << 31), (1 << 31) - 1)
LONGS = st.integers(-(1 << 63), (1 << 63) - 1)
TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), min_size=1, max_size=20
)
PROPERTIES = st.dictionaries(TEXTS, TEXTS, max_size=8)
RECORDS = st.fixed_dictionaries(
    {
        "topic": st.text(st.characters(codec="utf-8"), max_size=200),
        "queue_id": INTS,
        "queue_offset": LONGS,
        "physical_offset": LONGS,
        "body": st.binary(max_size=300),
        "properties": PROPERTIES.map(encode_properties),
        "flag": INTS,
        "sys_flag": st.integers(0, 0x7FF).map(lambda flag: flag & ~0x31),
        "born_time_ms": LONGS,
        "born_host": st.tuples(HOSTS, PORTS).map(b"".join),
        "store_time_ms": LONGS,
        "store_host": st.tuples(HOSTS, PORTS).map(b"".join),
        "reconsume_times": INTS,
        "prepared_offset": LONGS,
    }
)
QUICK = settings(max_examples=100, deadline=None)


@QUICK
@given(PROPERTIES)
def test_properties_come_back(properties: dict[str, str]) -> None:
    assert decode_properties(encode_properties(properties)) == properties


@QUICK
@given(st.lists(RECORDS, max_size=4), st.binary(max_size=8))
def test_records_come_back(records: list[dict], before: bytes) -> None:  # type: ignore[type-arg]
    parts = [encode_record(**record) for record in records]
    assert [m.size_bytes for m in decode_records(b"".join(parts))] == [len(p) for p in parts]
    for record, part in zip(records, parts, strict=True):
        message = decode_record(before + part, len(before))
        head = parse_head(memoryview(part))
        assert properties_slice(part) == head.properties
        assert part[head.born_host] == record["born_host"]
        assert part[head.store_host] == record["store_host"]
        assert message.properties == decode_properties(record["properties"])
        for name in record.keys() - {"properties", "born_host", "store_host", "sys_flag"}:
            assert getattr(message, name) == record[name], name
        assert message.sys_flag & ~0x30 == record["sys_flag"]


@QUICK
@given(st.lists(st.tuples(INTS, st.binary(max_size=50), st.binary(max_size=50)), max_size=5))
def test_batches_come_back(messages: list[tuple[int, bytes, bytes]]) -> None:
    found = decode_batch(encode_batch(messages))
    assert [(flag, bytes(body), properties) for flag, body, properties, _ in found] == messages
    assert [code for *_, code in found] == [tag_code_of_properties(own) for _, _, own in messages]


@QUICK
@given(RECORDS, st.data())
def test_damaged_records_are_refused_or_read_but_never_crash(
    record: dict,  # type: ignore[type-arg]
    data: st.DataObject,
) -> None:
    damaged = bytearray(encode_record(**record))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        decode_record(bytes(damaged))


@QUICK
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    for decode in (decode_batch, decode_records, decode_properties):
        with contextlib.suppress(ProtocolError):
            decode(data)
