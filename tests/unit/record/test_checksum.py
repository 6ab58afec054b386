"""The checksum property: its position, its digits, and changes that make it wrong."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicemq.record.codec import (
    CHECKSUM_BYTES,
    fill_checksum,
    has_valid_checksum,
    reserve_checksum,
)

PLACE = b"__CRC32#\x010000000000\x02"


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        (b"", PLACE),
        (b"a\x01b\x02", b"a\x01b\x02" + PLACE),
        (b"a\x01b", b"a\x01b\x02" + PLACE),
        (b"__CRC32#\x017\x02a\x01b\x02", b"a\x01b\x02" + PLACE),
        (b"a\x01b\x02__CRC32#\x017", b"a\x01b\x02" + PLACE),
        (b"a\x01b\x02" + PLACE, b"a\x01b\x02" + PLACE),
        (b"x__CRC32#\x01b\x02", b"x__CRC32#\x01b\x02" + PLACE),
    ],
)
def test_the_reserved_property_is_the_last_and_only_one_of_its_name(
    properties: bytes, expected: bytes
) -> None:
    assert reserve_checksum(properties) == expected


@given(st.binary(max_size=300))
def test_the_digits_of_the_checksum_are_reversed(content: bytes) -> None:
    record = fill_checksum(content + PLACE)
    assert record[:-CHECKSUM_BYTES] == content
    assert record[-20:-11] == b"__CRC32#\x01"
    assert record[-1:] == b"\x02"
    assert int(record[-11:-1][::-1]) == zlib.crc32(content) & 0x7FFFFFFF
    assert has_valid_checksum(memoryview(record))


@given(st.binary(min_size=1, max_size=100), st.data())
def test_every_flipped_bit_makes_the_checksum_wrong(content: bytes, data: st.DataObject) -> None:
    record = bytearray(fill_checksum(content + PLACE))
    bit = data.draw(st.integers(0, 8 * len(record) - 1))
    record[bit // 8] ^= 1 << bit % 8
    assert not has_valid_checksum(record)


@pytest.mark.parametrize("record", [b"", b"short", b"body" + PLACE])
def test_a_record_without_checksum_has_no_valid_checksum(record: bytes) -> None:
    assert not has_valid_checksum(record)
