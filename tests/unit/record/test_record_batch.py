"""The body of a client batch (spec/store.md §2.5)."""

import struct

import pytest

from sluicemq.errors import ProtocolError
from sluicemq.record.codec import COPIED_BYTES_MAX, decode_batch, encode_batch

MESSAGES = [(0, b"one", b"a\x01b\x02"), (-7, b"", b""), (5, b"x" * 300, b"TAGS\x01t\x02")]


def plain(body: bytes) -> list[tuple[int, bytes, bytes]]:
    return [(flag, bytes(part), properties) for flag, part, properties, _ in decode_batch(body)]


def test_layout_is_that_of_the_fact_sheet() -> None:
    expected = struct.pack(">iiiii", 29, 0, 0, 9, 3) + b"one" + struct.pack(">h", 4) + b"a\x01b\x02"
    assert encode_batch([(9, b"one", b"a\x01b\x02")]) == expected


def test_batch_comes_back() -> None:
    assert plain(encode_batch(MESSAGES)) == MESSAGES
    assert plain(b"") == []


def test_bodies_of_a_large_batch_are_not_copied() -> None:
    body = encode_batch([*MESSAGES, (0, bytes(COPIED_BYTES_MAX), b"")])
    large = decode_batch(body)[2][1]
    assert isinstance(large, memoryview)
    assert large.obj is body


def test_every_cut_inside_a_message_is_refused() -> None:
    body = encode_batch(MESSAGES[:1])
    for size in range(1, len(body)):
        with pytest.raises(ProtocolError, match="batch"):
            decode_batch(body[:size])


@pytest.mark.parametrize(("at", "value"), [(0, 28), (16, -1), (16, -100), (16, 4), (16, 1 << 30)])
def test_lengths_that_do_not_agree_are_refused(at: int, value: int) -> None:
    body = bytearray(encode_batch(MESSAGES[:1]))
    struct.pack_into(">i", body, at, value)
    with pytest.raises(ProtocolError, match="byte 0 of the batch"):
        decode_batch(bytes(body))


def test_negative_properties_length_is_refused() -> None:
    body = bytearray(encode_batch([(0, b"one", b"")]))
    struct.pack_into(">h", body, 23, -1)
    with pytest.raises(ProtocolError):
        decode_batch(bytes(body))


def test_properties_over_the_limit_are_refused() -> None:
    with pytest.raises(ProtocolError, match="32767"):
        encode_batch([(0, b"", bytes(32768))])
