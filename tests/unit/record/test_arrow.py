"""What the column decoder promises beyond being right: no work a message, only what was asked."""

import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sluicemq.errors import ProtocolError
from sluicemq.model.bodies import COMPRESSED, compress
from sluicemq.model.ids import Host, encode_host
from sluicemq.record import arrow, layout
from sluicemq.record import properties as shapes
from sluicemq.record import table as walk
from sluicemq.record.arrow import BODY_ERROR, COLUMNS, EXTRA_COLUMNS, RecordDecoder
from sluicemq.record.codec import decode_records, encode_properties, encode_record
from stored_bodies import BAD, GOOD, LIMIT

HOST = encode_host(Host("127.0.0.1", 10911))
HOST_V6 = encode_host(Host("::1", 10911))


def record(offset: int, **changes: Any) -> bytes:
    """A stored record whose parts differ in length from its neighbours'."""
    properties = {
        "TAGS": "ABCD"[offset % 4],
        "UNIQ_KEY": f"7F00000100007F0A18B4AAC2{offset:08X}",
        "price": str(offset % 1013),
        "region": ("hz", "shanghai", "beijing-north-1")[offset % 3],
    }
    fields: dict[str, Any] = {
        "topic": "trades", "queue_id": 3, "queue_offset": offset, "physical_offset": offset * 300,
        "body": bytes(100 + offset % 29), "properties": encode_properties(properties), "flag": 0,
        "sys_flag": 0, "born_time_ms": 1_700_000_000_000 + offset, "born_host": HOST,
        "store_time_ms": 1_700_000_000_005 + offset, "store_host": HOST,
    }  # fmt: skip
    return encode_record(**fields | changes)


def run_of(count: int) -> bytes:
    return b"".join(record(offset) for offset in range(count))


def decoded(data: bytes, decoder: RecordDecoder | None = None) -> list[dict[str, Any]]:
    return pa.Table.from_batches((decoder or RecordDecoder()).decode(data)).to_pylist()


def calls_of(work: Callable[[], object]) -> int:
    """Return the number of Python and C functions that `work` calls."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_no_python_object_is_created_for_each_message() -> None:
    decoder = RecordDecoder(promoted={"price": "price"}, tags=frozenset("ABCD"))
    few, many = run_of(2_000), run_of(20_000)
    list(decoder.decode(many))
    batches: list[Any] = []
    before = sys.getallocatedblocks()
    batches.extend(decoder.decode(many))
    grown = sys.getallocatedblocks() - before
    assert batches[0].num_rows == 20_000
    assert grown < 500, f"{grown} Python objects live on for 20,000 messages"
    more = calls_of(lambda: list(decoder.decode(many))) - calls_of(
        lambda: list(decoder.decode(few))
    )
    assert more < 18_000 * 0.2, f"{more} more calls for 18,000 more messages"


def test_the_counting_of_calls_detects_work_for_each_message() -> None:
    few, many = run_of(100), run_of(1_100)
    assert calls_of(lambda: decode_records(many)) - calls_of(lambda: decode_records(few)) > 1_000


def test_properties_are_not_read_when_no_column_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("properties were read")

    monkeypatch.setattr(arrow, "read_property_columns", refuse)
    columns = ("topic", "queue_offset", "body", "store_time")
    assert len(decoded(run_of(10), RecordDecoder(columns))) == 10
    with pytest.raises(AssertionError, match="were read"):
        decoded(run_of(10), RecordDecoder(("tags",)))


def test_columns_have_the_requested_order_and_the_declared_types() -> None:
    decoder = RecordDecoder(("body", "topic", "store_time"), promoted={"p": "price"}, broker="b")
    (batch,) = decoder.decode(run_of(3))
    assert batch.schema.names == ["body", "topic", "store_time", "p"]
    assert [field.type for field in batch.schema] == [
        COLUMNS["body"], COLUMNS["topic"], COLUMNS["store_time"], pa.string()
    ]  # fmt: skip


def test_compressed_bodies_among_plain_ones_keep_their_rows() -> None:
    squeezed = {"body": compress(b"z" * 5000, 0), "sys_flag": COMPRESSED}
    data = b"".join(record(offset, **squeezed if offset % 5 == 2 else {}) for offset in range(20))
    bodies = [row["body"] for row in decoded(data)]
    assert bodies == [one.body for one in decode_records(data)]
    assert bodies[7] == b"z" * 5000


@pytest.mark.parametrize("keeps_raw", [False, True])
def test_undecodable_bodies_are_null_or_raw_with_a_reason(keeps_raw: bool) -> None:
    stored = [*GOOD.values(), *BAD.values(), *GOOD.values()]
    data = b"".join(
        record(offset, body=one.raw, sys_flag=one.sys_flag) for offset, one in enumerate(stored)
    )
    decoder = RecordDecoder(("body", BODY_ERROR), body_bytes_max=LIMIT, keeps_raw=keeps_raw)
    for one, row in zip(stored, decoded(data, decoder), strict=True):
        if one.body is not None:
            assert row == {"body": one.body, BODY_ERROR: None}
        else:
            assert row["body"] == (one.raw if keeps_raw else None)
            assert row[BODY_ERROR].startswith("it")


def test_a_read_without_bodies_decodes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"".join(record(0, body=one.raw, sys_flag=one.sys_flag) for one in BAD.values())
    monkeypatch.setattr(arrow, "decode_body", None)
    names = [name for name in (*COLUMNS, *EXTRA_COLUMNS) if name != "body"]
    assert len(decoded(data, RecordDecoder(names, promoted={"p": "price"}))) == len(BAD)
    with pytest.raises(TypeError):
        decoded(data)


def test_large_decompressed_bodies_are_split_over_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "BATCH_BODY_BYTES_MAX", 25_000)
    squeezed = {"body": compress(bytes(10_000), 0), "sys_flag": COMPRESSED}
    data = b"".join(record(offset, **squeezed) for offset in range(8))
    batches = list(RecordDecoder(("queue_offset", "body")).decode(data))
    assert [batch.num_rows for batch in batches] == [2, 2, 2, 2]
    assert sum(map(len, pa.Table.from_batches(batches)["body"].to_pylist())) == 80_000


def test_rows_and_bytes_of_a_batch_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    data = run_of(100)
    monkeypatch.setattr(arrow, "BLOCK_ROWS_MAX", 30)
    assert [batch.num_rows for batch in RecordDecoder().decode(data)] == [30, 30, 30, 10]
    monkeypatch.setattr(arrow, "BLOCK_BYTES_MAX", 1)
    assert len(list(RecordDecoder().decode(data))) == 100


def test_ids_are_unique_keys_or_offset_message_ids() -> None:
    bare = {"properties": b""}
    data = record(0) + record(1, **bare) + record(2, **bare, store_host=HOST_V6)
    ids = [row["msg_id"] for row in decoded(data)]
    assert ids == [
        "7F00000100007F0A18B4AAC200000000",
        "7F00000100002A9F000000000000012C",
        "0" * 31 + "100002A9F0000000000000258",
    ]


def test_rows_of_too_many_shapes_are_decoded_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shapes, "SHAPES_MAX", 3)
    data = b"".join(
        record(offset, properties=encode_properties({f"name{offset % 7}": "v", "b": str(offset)}))
        for offset in range(50)
    )
    found = [dict(row["properties"]) for row in decoded(data)]
    assert found == [one.properties for one in decode_records(data)]


def test_the_last_of_two_equal_names_wins_as_in_the_scalar_codec() -> None:
    data = record(0) + record(1, properties=b"a\x011\x02b\x01x\x02a\x012\x02")
    assert dict(decoded(data)[1]["properties"]) == {"a": "2", "b": "x"}


def test_hidden_properties_are_missing_in_the_map_and_nowhere_else() -> None:
    hidden = frozenset({"TAGS", "UNIQ_KEY", "other"})
    odd = record(1, properties=b"a\x011\x02TAGS\x01T\x02a\x012\x02")
    decoder = RecordDecoder(("tags", "msg_id", "properties"), promoted={"t": "TAGS"}, hidden=hidden)
    first, second = decoded(record(0) + odd, decoder)
    assert dict(first["properties"]) == {"price": "0", "region": "hz"}
    assert (first["tags"], first["t"], first["msg_id"][:4]) == ("A", "A", "7F00")
    assert (dict(second["properties"]), second["tags"]) == ({"a": "2"}, "T")


def test_topics_may_differ_within_a_run() -> None:
    data = record(0) + record(1, topic="longer-than-trades") + record(2, topic="x" * 200)
    assert [row["topic"] for row in decoded(data)] == ["trades", "longer-than-trades", "x" * 200]


def test_times_beyond_64_bit_microseconds_are_null() -> None:
    data = record(0, born_time_ms=2**62) + record(1, born_time_ms=-1)
    decoder = RecordDecoder(("born_time",))
    (batch,) = decoder.decode(data)
    assert batch.column(0).cast(pa.int64()).to_pylist() == [None, -1000]


def test_batches_do_not_refer_to_the_bytes_they_came_from() -> None:
    data = bytearray(run_of(50))
    batches = list(RecordDecoder(promoted={"p": "price"}).decode(data))
    before = pa.Table.from_batches(batches).to_pylist()
    data[:] = bytes(len(data))
    assert pa.Table.from_batches(batches).to_pylist() == before


def test_no_bytes_give_no_batch() -> None:
    assert list(RecordDecoder().decode(b"")) == []


@pytest.mark.parametrize("cut", [1, 5, 40, 90, 200])
def test_a_cut_off_record_is_an_error(cut: int) -> None:
    with pytest.raises(ProtocolError):
        list(RecordDecoder().decode(run_of(3)[:-cut]))


def test_lengths_that_disagree_with_the_size_are_an_error() -> None:
    data = bytearray(run_of(2))
    struct.pack_into(">i", data, 84, 10**6)
    with pytest.raises(ProtocolError, match="queue offset 0"):
        list(RecordDecoder(("queue_offset",)).decode(data))


def test_a_magic_number_inside_a_body_does_not_mislead_the_walk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(walk, "PIECE_RECORDS_MIN", 2)
    fake = struct.pack(">ii", 91, layout.MAGIC_V1) * 20
    data = b"".join(record(offset, body=fake + bytes(offset)) for offset in range(200))
    raw = np.frombuffer(data, np.uint8)
    assert walk.find_record_starts(raw).tolist() == walk.walk_record_starts(raw, 0).tolist()
