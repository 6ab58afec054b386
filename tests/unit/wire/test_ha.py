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
    EPOCHS_MAX,
    Chunk,
    Epoch,
    Greeting,
    MasterReader,
    SlaveReader,
    Welcome,
    consistent_end,
    encode_greeting,
    encode_head,
    encode_report,
    encode_welcome,
)

POSITIONS = st.integers(0, 2**40)
NUMBERS = st.integers(0, 2**31 - 1)


def test_the_bytes_are_those_of_rocketmq() -> None:
    assert encode_report(9651, failover=False).hex() == "00000000000025b3"
    assert encode_report(9651, failover=True).hex() == "0000000200000000000025b3"
    assert encode_greeting(Greeting(2, is_learner=True)).hex() == "00000001000000010000000000000002"
    assert encode_head(16384, 9651).hex() == "0000000000004000000025b3"
    assert (
        encode_head(16384, 9651, Epoch(7, 7000), 16000).hex()
        == "00000002000025b30000000000004000000000070000000000001b580000000000003e80"
    )
    assert (
        encode_welcome(Welcome(26035, 8, (Epoch(7, 7000), Epoch(8, 8000)))).hex()
        == "000000010000001800000000000065b300000008"
        "000000070000000000001b58000000080000000000001f40"
    )


def test_a_welcome_has_no_more_epochs_than_rocketmqs_buffer() -> None:
    many = tuple(Epoch(number, number) for number in range(EPOCHS_MAX + 5))
    (read,) = MasterReader(failover=True).feed(encode_welcome(Welcome(9999, 1004, many)))
    assert read == Welcome(9999, 1004, many[5:])


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[begin:end] for begin, end in pairwise(at)]


@given(st.lists(POSITIONS | st.just(-1), min_size=1), st.lists(NUMBERS, max_size=8))
def test_of_plain_reports_the_last_whole_one_counts(ends: list[int], cuts: list[int]) -> None:
    data = b"".join(encode_report(end, failover=False) for end in ends)
    reader = SlaveReader(failover=False)
    read = [said for piece in pieces(data, cuts) for said in reader.feed(piece)]
    assert read[-1] == ends[-1]
    assert set(read) <= set(ends)
    assert not list(reader.feed(b"\0" * 7))


@given(
    st.lists(POSITIONS | st.builds(Greeting, POSITIONS, st.booleans(), st.booleans())),
    st.lists(NUMBERS, max_size=8),
)
def test_greetings_and_reports_arrive_in_order(said: list[Any], cuts: list[int]) -> None:
    data = b"".join(
        encode_greeting(one) if isinstance(one, Greeting) else encode_report(one, failover=True)
        for one in said
    )
    reader = SlaveReader(failover=True)
    assert [one for piece in pieces(data, cuts) for one in reader.feed(piece)] == said


EPOCHS = st.builds(Epoch, NUMBERS, POSITIONS)
CHUNKS = st.tuples(POSITIONS, st.binary(max_size=50), EPOCHS, POSITIONS)


@given(st.lists(CHUNKS | st.lists(EPOCHS), max_size=8), st.lists(NUMBERS, max_size=8))
def test_bytes_arrive_once_in_order_and_at_their_place(sent: list[Any], cuts: list[int]) -> None:
    data = b"".join(
        encode_welcome(Welcome(5, 6, tuple(one)))
        if isinstance(one, list)
        else encode_head(one[0], len(one[1]), one[2], one[3]) + one[1]
        for one in sent
    )
    reader = MasterReader(failover=True)
    read = [found for piece in pieces(data, cuts) for found in reader.feed(piece)]
    assert spread(read) == spread(
        Welcome(5, 6, tuple(one)) if isinstance(one, list) else Chunk(one[0], *one[1:])
        for one in sent
    )


@given(
    st.lists(st.tuples(POSITIONS, st.binary(max_size=50)), max_size=8),
    st.lists(NUMBERS, max_size=8),
)
def test_plain_bytes_too(sent: list[tuple[int, bytes]], cuts: list[int]) -> None:
    data = b"".join(encode_head(position, len(body)) + body for position, body in sent)
    reader = MasterReader(failover=False)
    read = [found for piece in pieces(data, cuts) for found in reader.feed(piece)]
    assert spread(read) == spread(Chunk(*one) for one in sent)


def spread(found: Any) -> list[Any]:
    """Byte by byte, with the epoch of each; a confirmed offset may be left out by a later one."""
    out: list[Any] = []
    for one in found:
        if isinstance(one, Welcome):
            out.append(one)
        for at, byte in enumerate(one.data if isinstance(one, Chunk) else b""):
            out.append((one.position + at, byte, one.epoch))
    return out


def test_frames_that_follow_one_another_come_as_one_chunk() -> None:
    data = encode_head(10, 3) + b"abc" + encode_head(13, 0) + encode_head(13, 2) + b"de"
    reader = MasterReader(failover=False)
    assert list(reader.feed(data)) == [Chunk(10, b"abcde")]
    epoch = Epoch(1, 0)
    frames = encode_head(10, 1, epoch, 5) + b"a" + encode_head(11, 1, epoch, 9) + b"b"
    assert list(MasterReader(failover=True).feed(frames)) == [Chunk(10, b"ab", epoch, 9)]


@pytest.mark.parametrize(
    ("failover", "data"),
    [
        (False, encode_head(0, BODY_BYTES_MAX + 1)),
        (False, encode_head(0, -1)),
        (False, b"HTTP/1.1 400 Bad Request\r\n"),
        (True, encode_head(0, 10) + bytes(40)),
        (True, struct.pack(">iiqi", 1, 13, 0, 0) + bytes(13)),
    ],
)
def test_what_no_master_sends_is_refused(failover: bool, data: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(MasterReader(failover=failover).feed(data))


def test_a_plain_slave_at_a_failover_master_is_told_apart() -> None:
    with pytest.raises(ProtocolError, match="without failover"):
        list(SlaveReader(failover=True).feed(encode_report(5 << 32, failover=False)))


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
        epochs.append(Epoch(number, len(written)))
        written += [number] * size

    def branch(at: int, number: int, size: int) -> tuple[list[Epoch], list[int]]:
        """The log as far as epoch `at`, and `size` bytes that another wrote."""
        kept = epochs[: min(at, len(epochs))]
        begin = epochs[len(kept)].start if len(kept) < len(epochs) else len(written)
        lines = [*kept, Epoch(number, begin)] if size else kept
        return lines, [*written[:begin], *([number] * size)]

    mine, my_bytes = branch(fork, 100, own)
    theirs, their_bytes = branch(other_fork, 101, other)
    same = 0
    while same < min(len(my_bytes), len(their_bytes)) and my_bytes[same] == their_bytes[same]:
        same += 1
    found = consistent_end(mine, len(my_bytes), theirs, len(their_bytes))
    assert max(found, 0) == same


def test_an_epoch_with_two_begins_is_damage() -> None:
    with pytest.raises(ProtocolError, match="damaged"):
        consistent_end([Epoch(1, 0), Epoch(2, 9)], 20, [Epoch(1, 0), Epoch(2, 8)], 20)
