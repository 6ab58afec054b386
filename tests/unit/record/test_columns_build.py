"""Property columns are equal to what the scalar decoder reads, for records of any form."""

import struct

import numpy as np
import pytest

from sluicemq.record.arrow import ArrowColumns, LogPiece, build_block, merge_block_arrays
from sluicemq.record.codec import decode_properties, encode_record
from sluicemq.record.columns import ColumnBlock

HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
HOST6 = bytes(16) + struct.pack(">i", 10911)


def record(properties: bytes, position: int, *, topic: str = "T", host: bytes = HOST) -> bytes:
    return encode_record(
        topic=topic, queue_id=0, queue_offset=0, physical_offset=position, body=b"body",
        properties=properties, flag=0, sys_flag=0, born_time_ms=1, born_host=host,
        store_time_ms=1, store_host=HOST,
    )  # fmt: skip


def block_of(*rows: bytes, files: int = 1, base: int = 0, columns_max: int = 64) -> ColumnBlock:
    """Return the block of records with these properties, distributed over files."""
    positions, sizes, pieces = [], [], []
    for number in range(files):
        data = b""
        for properties in rows[number::files]:
            made = record(properties, base + len(data))
            positions.append(base + len(data))
            sizes.append(len(made))
            data += made
        pieces.append(LogPiece(base, np.frombuffer(data + bytes(50), np.uint8)))
        base += 1 << 20
    return build_block(0, np.array(positions), np.array(sizes), pieces, columns_max)


def row_of(block: ColumnBlock, row: int) -> dict[str, str]:
    found = {}
    for name in block.columns:
        codes, values = block.columns[name]
        if codes[row] >= 0:
            found[name] = values[codes[row]]
    return found


STRANGE = [
    b"", b"a\x011\x02", b"a\x011", b"a\x011\x02a\x012\x02", b"a\x01\x02b\x012\x02", b"\x01v\x02",
    b"a\x02b\x011\x02", b"a\x011\x01 2\x02", "城市\x01杭州\x02é\x01𝄞\x02".encode(),
    b"a\x01\xff\xfe\x02", b"\x02\x02\x02", b"a\x01\x00\x02", b"b\x012\x02a\x011\x02", b"a", b"\x01",
]  # fmt: skip


@pytest.mark.parametrize("files", [1, 3])
def test_every_row_has_the_values_of_the_scalar_decoder(files: int) -> None:
    rows = STRANGE * 3
    block = block_of(*rows, files=files)
    assert not len(block.odd)
    ordered = [properties for number in range(files) for properties in rows[number::files]]
    assert [row_of(block, row) for row in range(block.rows)] == list(
        map(decode_properties, ordered)
    )


def test_rows_keep_their_place_when_their_files_alternate() -> None:
    first = record(b"a\x011\x02", 0)
    second = record(b"a\x012\x02", 1000)
    pieces = [
        LogPiece(base, np.frombuffer(data, np.uint8)) for base, data in ((0, first), (1000, second))
    ]
    sizes = np.array([len(second), len(first), len(second)])
    block = build_block(7, np.array([1000, 0, 1000]), sizes, pieces)
    assert [row_of(block, row) for row in range(3)] == [{"a": "2"}, {"a": "1"}, {"a": "2"}]
    assert block.end == 10


@pytest.mark.parametrize("topic", ["T", "t" * 200])
@pytest.mark.parametrize("host", [HOST, HOST6])
def test_long_topics_and_ipv6_hosts_move_the_properties(topic: str, host: bytes) -> None:
    data = record(b"a\x011\x02", 0, topic=topic, host=host)
    piece = LogPiece(0, np.frombuffer(data, np.uint8))
    assert row_of(build_block(0, np.array([0]), np.array([len(data)]), [piece]), 0) == {"a": "1"}


@pytest.mark.parametrize("damage", ["blank", "elsewhere", "size", "magic", "body", "topic", "cut"])
def test_an_unreadable_record_is_odd_and_affects_no_other(damage: str) -> None:
    good = record(b"a\x011\x02", 0)
    bad = bytearray(record(b"a\x012\x02", len(good)))
    position, size = len(good), len(bad)
    if damage == "blank":
        position, size = 0, 0x7FFFFFFF
    elif damage == "elsewhere":
        position = 1 << 40
    elif damage == "size":
        bad[0:4] = struct.pack(">i", size + 1)
    elif damage == "magic":
        bad[4] ^= 1
    elif damage == "body":
        bad[84:88] = struct.pack(">i", 1 << 30)
    elif damage == "topic":
        bad[92] = 200
    else:
        size += 40
    piece = LogPiece(0, np.frombuffer(good + bytes(bad), np.uint8))
    block = build_block(
        0, np.array([0, position, 0]), np.array([len(good), size, len(good)]), [piece]
    )
    assert block.odd.tolist() == [1]
    assert [row_of(block, row) for row in range(3)] == [{"a": "1"}, {}, {"a": "1"}]


def test_a_block_without_any_record_is_all_odd() -> None:
    block = build_block(0, np.array([5, 6]), np.array([100, 100]), [])
    assert (block.odd.tolist(), dict(block.columns)) == ([0, 1], {})


def test_codes_have_the_smallest_sufficient_type() -> None:
    block = block_of(*(f"a\x01{n % 128}\x02b\x01{n % 129}\x02".encode() for n in range(300)))
    assert block.columns["a"].codes.dtype == np.int8
    assert block.columns["b"].codes.dtype == np.int16
    assert block.columns["a"].values[:3] == ("0", "1", "2")
    assert max(block.columns["a"].codes) == 127


def test_keys_and_long_unique_values_get_no_columns() -> None:
    rows = [
        f"UNIQ_KEY\x01{n}\x02KEYS\x01k\x02id\x01{n:032d}\x02price\x01{n}\x02".encode()
        for n in range(300)
    ]
    block = block_of(*rows)
    assert block.excluded == {"UNIQ_KEY", "KEYS", "id"}
    assert set(block.columns) == {"price"}


def test_the_most_frequent_names_become_columns_and_others_are_excluded() -> None:
    block = block_of(b"a\x011\x02", b"b\x011\x02a\x011\x02", b"c\x011\x02a\x011\x02b\x011\x02",
                     columns_max=2)  # fmt: skip
    assert (set(block.columns), block.excluded) == ({"a", "b"}, {"c"})


def test_the_number_of_columns_is_limited() -> None:
    block = block_of(*(f"n{n}\x01v\x02".encode() for n in range(500)))
    assert len(block.columns) == 64
    assert len(block.columns) + len(block.excluded) == 500


def test_a_slice_has_the_rows_of_its_offsets() -> None:
    block = block_of(*(f"a\x01{n}\x02".encode() for n in range(6)))
    block = block._replace(first_offset=10, odd=np.array([0, 3, 5]))
    part = block.slice_offsets(12, 15)
    assert [row_of(part, row) for row in range(3)] == [{"a": "2"}, {"a": "3"}, {"a": "4"}]
    assert (part.first_offset, part.rows, part.odd.tolist()) == (12, 3, [1])
    assert block.slice_offsets(10, 16) is block


def test_merged_blocks_have_common_codes() -> None:
    blocks = [
        block_of(b"a\x01x\x02", b"a\x01y\x02b\x011\x02"),
        block_of(b"UNIQ_KEY\x01u\x02"),
        block_of(b"", b"a\x01y\x02", b"a\x01z\x02"),
    ]
    arrays, excluded = merge_block_arrays(blocks)
    assert excluded == {"UNIQ_KEY"}
    whole = ColumnBlock(0, 6, ArrowColumns(arrays), excluded, np.empty(0, np.int64))
    expected = [{"a": "x"}, {"a": "y", "b": "1"}, {}, {}, {"a": "y"}, {"a": "z"}]
    assert [row_of(whole, row) for row in range(6)] == expected
    assert whole.columns["a"].values == ("x", "y", "z")


def test_a_name_that_one_block_excludes_is_excluded() -> None:
    some = block_of(b"a\x011\x02b\x011\x02")
    other = block_of(b"a\x011\x02b\x011\x02", columns_max=1)
    arrays, excluded = merge_block_arrays([some, other])
    assert (set(arrays), excluded) == ({"a"}, {"b"})
