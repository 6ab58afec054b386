"""Pieces of a stream: limits, joining, and that a big frame is not copied again and again."""

import struct

import pytest

from sluicemq.errors import ProtocolError
from sluicemq.wire.frames import (
    UNJOINED_PIECES_MAX,
    Command,
    FrameBuffer,
    FrameReader,
    check_frame_size,
    encode,
)


def test_frames_come_out_when_they_are_whole() -> None:
    one, two = encode(Command(1, opaque=1)), encode(Command(2, None, b"body", 2))
    reader = FrameReader()
    assert [c.code for c in reader.feed(one + two[:9])] == [1]
    assert len(reader) == 9
    assert reader.feed(two[9:-1]) == []
    commands = reader.feed(two[-1:] + one)
    assert [(c.code, c.body) for c in commands] == [(2, b"body"), (1, b"")]
    assert len(reader) == 0
    assert reader.feed(b"") == []


@pytest.mark.parametrize("total", [0, 3, 16 * 1024 * 1024 + 1, 0x16030100, 0x47455420, 2**32 - 1])
def test_an_impossible_total_is_refused_at_once(total: int) -> None:
    with pytest.raises(ProtocolError, match=str(total)):
        FrameReader().feed(struct.pack(">I", total))


def test_a_header_longer_than_its_frame_is_refused() -> None:
    with pytest.raises(ProtocolError, match="99"):
        FrameReader().feed(struct.pack(">II", 6, 99) + b"{}")


def test_the_limit_can_be_lower() -> None:
    frame = encode(Command(1, None, bytes(100)))
    FrameReader(len(frame) - 4).feed(frame)
    with pytest.raises(ProtocolError, match="above the limit"):
        FrameReader(len(frame) - 5).feed(frame)
    check_frame_size(4)


def test_a_big_frame_in_pieces_is_joined_once() -> None:
    frame = encode(Command(1, None, bytes(1_000_000)))
    pieces = FrameBuffer()
    joins = 0
    rest = frame[:1000]
    assert pieces.join(rest) is rest
    assert pieces.keep_rest(rest) is None
    for start in range(1000, len(frame), 1000):
        joined = pieces.join(frame[start : start + 1000])
        joins += joined is not None
        if joined is not None:
            assert joined == frame
    assert joins == 1
    assert len(pieces) == 0


def test_a_rest_that_is_whole_is_handed_back() -> None:
    frame = encode(Command(1))
    assert FrameBuffer().keep_rest(frame) is frame


def test_a_frame_in_single_bytes_costs_no_object_a_byte() -> None:
    frame = encode(Command(1, None, bytes(20_000)))
    pieces = FrameBuffer()
    pieces.keep_rest(frame[:10])
    joined = None
    for index in range(10, len(frame)):
        joined = pieces.join(frame[index : index + 1])
        assert len(pieces._parts) <= UNJOINED_PIECES_MAX + len(frame) // UNJOINED_PIECES_MAX
    assert joined == frame
