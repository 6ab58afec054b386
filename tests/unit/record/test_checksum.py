"""The checksum property: its place, its digits, what breaks it."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicemq.record.codec import CHECKSUM_BYTES, is_sealed, seal, with_place

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
def test_the_place_is_the_last_property_and_the_only_one_of_its_name(
    properties: bytes, expected: bytes
) -> None:
    assert with_place(properties) == expected


@given(st.binary(max_size=300))
def test_the_digits_of_the_checksum_stand_in_reverse(content: bytes) -> None:
    record = seal(content + PLACE)
    assert record[:-CHECKSUM_BYTES] == content
    assert record[-20:-11] == b"__CRC32#\x01"
    assert record[-1:] == b"\x02"
    assert int(record[-11:-1][::-1]) == zlib.crc32(content) & 0x7FFFFFFF
    assert is_sealed(memoryview(record))


@given(st.binary(min_size=1, max_size=100), st.data())
def test_every_flipped_bit_breaks_the_seal(content: bytes, data: st.DataObject) -> None:
    record = bytearray(seal(content + PLACE))
    bit = data.draw(st.integers(0, 8 * len(record) - 1))
    record[bit // 8] ^= 1 << bit % 8
    assert not is_sealed(record)


@pytest.mark.parametrize("record", [b"", b"short", b"body" + PLACE])
def test_what_has_no_checksum_is_not_sealed(record: bytes) -> None:
    assert not is_sealed(record)
