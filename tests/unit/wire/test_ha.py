"""Both HA protocols: the bytes of RocketMQ, in whatever pieces they arrive."""

import struct
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicemq.errors import ProtocolError
from sluicemq.wire.ha import (
    BODY_BYTES_MAX,
    TERMS_MAX,
    LogChunk,
    LogTerm,
    MasterFrameReader,
    MasterHandshake,
    SlaveFrameReader,
    SlaveHandshake,
    common_end,
    encode_log_header,
    encode_master_handshake,
    encode_slave_handshake,
    encode_slave_report,
)

POSITIONS = st.integers(0, 2**40)
NUMBERS = st.integers(0, 2**31 - 1)


def test_the_bytes_are_those_of_rocketmq() -> None:
    assert encode_slave_report(9651, failover=False).hex() == "00000000000025b3"
    assert encode_slave_report(9651, failover=True).hex() == "0000000200000000000025b3"
    assert (
        encode_slave_handshake(SlaveHandshake(2, is_learner=True)).hex()
        == "00000001000000010000000000000002"
    )
    assert encode_log_header(16384, 9651).hex() == "0000000000004000000025b3"
    assert (
        encode_log_header(16384, 9651, LogTerm(7, 7000), 16000).hex()
        == "00000002000025b30000000000004000000000070000000000001b580000000000003e80"
    )
    assert (
        encode_master_handshake(
            MasterHandshake(26035, 8, (LogTerm(7, 7000), LogTerm(8, 8000)))
        ).hex()
        == "000000010000001800000000000065b300000008"
        "000000070000000000001b58000000080000000000001f40"
    )


def test_a_welcome_has_no_more_epochs_than_rocketmqs_buffer() -> None:
    many = tuple(LogTerm(number, number) for number in range(TERMS_MAX + 5))
    (read,) = MasterFrameReader(failover=True).feed(
        encode_master_handshake(MasterHandshake(9999, 1004, many))
    )
    assert read == MasterHandshake(9999, 1004, many[5:])


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[begin:end] for begin, end in pairwise(at)]


@given(st.lists(POSITIONS | st.just(-1), min_size=1), st.lists(NUMBERS, max_size=8))
def test_of_plain_reports_the_last_whole_one_counts(ends: list[int], cuts: list[int]) -> None:
    data = b"".join(encode_slave_report(end, failover=False) for end in ends)
    reader = SlaveFrameReader(failover=False)
    read = [said for piece in pieces(data, cuts) for said in reader.feed(piece)]
    assert read[-1] == ends[-1]
    assert set(read) <= set(ends)
    assert not list(reader.feed(b"\0" * 7))


@given(
    st.lists(POSITIONS | st.builds(SlaveHandshake, POSITIONS, st.booleans(), st.booleans())),
    st.lists(NUMBERS, max_size=8),
)
def test_greetings_and_reports_arrive_in_order(said: list[Any], cuts: list[int]) -> None:
    data = b"".join(
        encode_slave_handshake(one)
        if isinstance(one, SlaveHandshake)
        else encode_slave_report(one, failover=True)
        for one in said
    )
    reader = SlaveFrameReader(failover=True)
    assert [one for piece in pieces(data, cuts) for one in reader.feed(piece)] == said


EPOCHS = st.builds(LogTerm, NUMBERS, POSITIONS)
CHUNKS = st.tuples(POSITIONS, st.binary(max_size=50), EPOCHS, POSITIONS)


@given(st.lists(CHUNKS | st.lists(EPOCHS), max_size=8), st.lists(NUMBERS, max_size=8))
def test_bytes_arrive_once_in_order_and_at_their_place(sent: list[Any], cuts: list[int]) -> None:
    data = b"".join(
        encode_master_handshake(MasterHandshake(5, 6, tuple(one)))
        if isinstance(one, list)
        else encode_log_header(one[0], len(one[1]), one[2], one[3]) + one[1]
        for one in sent
    )
    reader = MasterFrameReader(failover=True)
    read = [found for piece in pieces(data, cuts) for found in reader.feed(piece)]
    assert spread(read) == spread(
        MasterHandshake(5, 6, tuple(one)) if isinstance(one, list) else LogChunk(one[0], *one[1:])
        for one in sent
    )


@given(
    st.lists(st.tuples(POSITIONS, st.binary(max_size=50)), max_size=8),
    st.lists(NUMBERS, max_size=8),
)
def test_plain_bytes_too(sent: list[tuple[int, bytes]], cuts: list[int]) -> None:
    data = b"".join(encode_log_header(position, len(body)) + body for position, body in sent)
    reader = MasterFrameReader(failover=False)
    read = [found for piece in pieces(data, cuts) for found in reader.feed(piece)]
    assert spread(read) == spread(LogChunk(*one) for one in sent)


def spread(found: Any) -> list[Any]:
    """Byte by byte, with the epoch of each; a confirmed offset may be left out by a later one."""
    out: list[Any] = []
    for one in found:
        if isinstance(one, MasterHandshake):
            out.append(one)
        for at, byte in enumerate(one.data if isinstance(one, LogChunk) else b""):
            out.append((one.position + at, byte, one.term))
    return out


def test_frames_that_follow_one_another_come_as_one_chunk() -> None:
    data = (
        encode_log_header(10, 3)
        + b"abc"
        + encode_log_header(13, 0)
        + encode_log_header(13, 2)
        + b"de"
    )
    reader = MasterFrameReader(failover=False)
    assert list(reader.feed(data)) == [LogChunk(10, b"abcde")]
    epoch = LogTerm(1, 0)
    frames = encode_log_header(10, 1, epoch, 5) + b"a" + encode_log_header(11, 1, epoch, 9) + b"b"
    assert list(MasterFrameReader(failover=True).feed(frames)) == [LogChunk(10, b"ab", epoch, 9)]


@pytest.mark.parametrize(
    ("failover", "data"),
    [
        (False, encode_log_header(0, BODY_BYTES_MAX + 1)),
        (False, encode_log_header(0, -1)),
        (False, b"HTTP/1.1 400 Bad Request\r\n"),
        (True, encode_log_header(0, 10) + bytes(40)),
        (True, struct.pack(">iiqi", 1, 13, 0, 0) + bytes(13)),
    ],
)
def test_what_no_master_sends_is_refused(failover: bool, data: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(MasterFrameReader(failover=failover).feed(data))


def test_a_plain_slave_at_a_failover_master_is_told_apart() -> None:
    with pytest.raises(ProtocolError, match="failover is enabled on the slave"):
        list(SlaveFrameReader(failover=True).feed(encode_slave_report(5 << 32, failover=False)))


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=12),
    st.integers(0, 12), st.integers(0, 20), st.integers(0, 12), st.integers(0, 20),
)  # fmt: skip
def test_two_logs_are_the_same_up_to_where_it_is_said(
    reigns: list[tuple[int, int]], fork: int, own: int, other_fork: int, other: int
) -> None:
    """Against the logs themselves, which say of each byte who wrote it."""
    epochs, written = [], list[int]()
    for number, (size, _) in enumerate(reigns, 1):
        epochs.append(LogTerm(number, len(written)))
        written += [number] * size

    def branch(at: int, number: int, size: int) -> tuple[list[LogTerm], list[int]]:
        """The log as far as epoch `at`, and `size` bytes that another wrote."""
        kept = epochs[: min(at, len(epochs))]
        begin = epochs[len(kept)].start if len(kept) < len(epochs) else len(written)
        lines = [*kept, LogTerm(number, begin)] if size else kept
        return lines, [*written[:begin], *([number] * size)]

    mine, my_bytes = branch(fork, 100, own)
    theirs, their_bytes = branch(other_fork, 101, other)
    same = 0
    while same < min(len(my_bytes), len(their_bytes)) and my_bytes[same] == their_bytes[same]:
        same += 1
    found = common_end(mine, len(my_bytes), theirs, len(their_bytes))
    assert max(found, 0) == same


def test_an_epoch_with_two_begins_is_damage() -> None:
    with pytest.raises(ProtocolError, match="damaged"):
        common_end([LogTerm(1, 0), LogTerm(2, 9)], 20, [LogTerm(1, 0), LogTerm(2, 8)], 20)
