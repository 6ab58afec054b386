"""The decoder in columns gives, row by row, what the scalar codec gives."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq.errors import ProtocolError
from sluicemq.model.bodies import (
    COMPRESSED,
    COMPRESSION_LZ4,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
    compress,
)
from sluicemq.model.ids import Host, encode_host
from sluicemq.record import table as walk
from sluicemq.record.arrow import RecordDecoder
from sluicemq.record.codec import decode_records, encode_record
from sluicemq.record.layout import MAGIC_V1
from sluicemq.record.table import find_record_starts

pytestmark = pytest.mark.slow

HOSTS = st.sampled_from(
    [
        encode_host(Host("127.0.0.1", 10911)),
        encode_host(Host("10.1.2.3", 1)),
        encode_host(Host("fe80::1", 65535)),
    ]
)
PIECE = st.text(
    st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), max_size=14
)
REGULAR = st.dictionaries(
    st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "origin", "dep_delay", "ö", "a"]),
    st.text("abcü9", min_size=1, max_size=40),
    max_size=4,
).map(lambda found: "".join(f"{k}\x01{v}\x02" for k, v in found.items()).encode())
CUT = REGULAR.map(lambda data: data[:-1] if data.endswith(b"\x02") else data)
ODD = st.lists(
    st.one_of(
        PIECE.map(str.encode), st.sampled_from([b"\x01", b"\x02", b"a\x01b\x02", b"\xff", b"a"])
    ),
    max_size=8,
).map(b"".join)
PROPERTIES = st.one_of(REGULAR, REGULAR, CUT, ODD)
TIME = st.one_of(st.just(1_700_000_000_123), st.integers(-(2**63), 2**63 - 1))
MAGIC_IN_BODY = st.just(b"\0\0\0\x5b" + MAGIC_V1.to_bytes(4, "big", signed=True) + bytes(40))
BODY = st.one_of(st.binary(max_size=30), MAGIC_IN_BODY, st.just(b"0123456789abcdef" * 8))


@st.composite
def records(draw: st.DrawFn) -> bytes:
    """One stored record, of any kind a broker may hold."""
    kind = draw(st.sampled_from([0, 0, 0, COMPRESSION_ZLIB, COMPRESSION_LZ4, COMPRESSION_ZSTD, 1]))
    body = draw(BODY)
    if kind and draw(st.integers(0, 3)):  # else it says that it is compressed, and is not
        body = compress(body, kind & ~COMPRESSED)
    topic = draw(st.sampled_from(["t", "flights", "%RETRY%g", "ü", "x" * 130]))
    return encode_record(
        topic=topic, queue_id=draw(st.integers(0, 7)), queue_offset=draw(st.integers(0, 2**40)),
        physical_offset=draw(st.integers(0, 2**62)), body=body, properties=draw(PROPERTIES),
        flag=0, sys_flag=kind | COMPRESSED if kind else 0,
        born_time_ms=draw(TIME), born_host=draw(HOSTS),
        store_time_ms=draw(TIME), store_host=draw(HOSTS),
        reconsume_times=draw(st.integers(0, 16)), version2=True if len(topic) > 127 else None,
    )  # fmt: skip


def rows_of(data: bytes, decoder: RecordDecoder) -> list[dict[str, Any]]:
    rows = []
    for batch in decoder.decode(data):
        batch.validate(full=True)
        assert batch.schema == decoder.schema
        assert batch.num_rows > 0
        rows += _plain_times(batch).to_pylist()
    return rows


def _plain_times(batch: Any) -> Any:
    """Times as whole numbers: Python's own times end in the year 9999."""
    columns = [
        column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def expected(data: bytes, broker: str) -> list[dict[str, Any]]:
    def time_us(value: int) -> int | None:
        return value * 1000 if abs(value) <= (1 << 63) // 1000 - 1 else None

    return [
        {
            "topic": one.topic, "broker": broker, "queue_id": one.queue_id,
            "queue_offset": one.queue_offset, "msg_id": one.message_id,
            "keys": one.properties.get("KEYS"), "tags": one.tag,
            "properties": dict(one.properties),
            "body": None if one.body_error else one.body,
            "born_time": time_us(one.born_time_ms), "store_time": time_us(one.store_time_ms),
            "reconsume_times": one.reconsume_times, "place": one.properties.get("origin"),
        }
        for one in decode_records(data, broker=broker)
    ]  # fmt: skip


def with_dictionaries(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        names = [name for name, _ in row["properties"]]
        assert len(set(names)) == len(names), "Spark's maps may not hold a key twice"
        row["properties"] = dict(row["properties"])
    return rows


@given(st.lists(records(), max_size=12), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_columns_equal_the_scalar_codec(parts: list[bytes], copies: int) -> None:
    data = b"".join(parts) * copies
    decoder = RecordDecoder(promoted={"place": "origin"}, broker="broker-a")
    assert with_dictionaries(rows_of(data, decoder)) == expected(data, "broker-a")


@given(st.lists(records(), min_size=1, max_size=8), st.integers(1, 40), st.integers(2, 9))
@settings(max_examples=60, deadline=None)
def test_every_way_to_walk_finds_the_same_starts(
    parts: list[bytes], copies: int, pieces: int
) -> None:
    data = b"".join(parts * copies)
    raw = np.frombuffer(data, np.uint8)
    plain = walk.walk_record_starts(raw, 0)
    assert find_record_starts(raw).tolist() == plain.tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "PIECE_RECORDS_MIN", 2)
        starts = walk._walk_pieces(raw, pieces)
    assert starts.tolist() == plain.tolist()[: len(starts)]


@given(st.lists(records(), min_size=1, max_size=3), st.data())
@settings(max_examples=100, deadline=None)
def test_damaged_bytes_raise_and_nothing_else(parts: list[bytes], data: st.DataObject) -> None:
    run = bytearray(b"".join(parts))
    place = data.draw(st.integers(0, len(run) - 1))
    run[place] = data.draw(st.integers(0, 255))
    run = run[: data.draw(st.integers(0, len(run)))]
    try:
        for batch in RecordDecoder(promoted={"place": "origin"}).decode(bytes(run)):
            batch.validate(full=True)
    except ProtocolError:
        pass


@given(st.lists(records(), max_size=10), st.frozensets(st.sampled_from(["abc", "9", "ü", "x"])))
@settings(max_examples=60, deadline=None)
def test_rows_with_another_tag_are_left_out(parts: list[bytes], tags: frozenset[str]) -> None:
    data = b"".join(parts)
    found = rows_of(data, RecordDecoder(("queue_offset", "tags"), tags=tags))
    wanted = [
        {"queue_offset": one.queue_offset, "tags": one.tag}
        for one in decode_records(data) if one.tag in tags
    ]  # fmt: skip
    assert found == wanted
