"""The dispatcher: from request frames to response frames, without an event loop."""

import logging
import struct
from typing import Any

import pytest

from sluicemq.errors import ProtocolError, RequestError, StoreFullError
from sluicemq.model.ids import Host
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.wire.declare import decode_header
from sluicemq.wire.frames import BINARY, FRAME_BYTES_MAX, Command, FrameReader, decode, encode
from sluicemq.wire.headers import QueueRequest


class Carrier:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes, /) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def peer() -> Peer:
    return Peer(Carrier(), Host("192.0.2.7", 40000), Host("127.0.0.1", 10911))


def request(code: int, opaque: int = 1, body: bytes = b"", **more: Any) -> bytes:
    return encode(Command(code, {}, body, opaque, **more))


def answers_of(data: bytes) -> list[Command]:
    return FrameReader().feed(data)


def test_all_frames_of_a_chunk_are_answered_in_order_in_one_piece(peer: Peer) -> None:
    dispatcher = Dispatcher({7: lambda c, _: Command(0, {"n": str(c.opaque)}, bytes(c.body))})
    chunk = b"".join(request(7, n, b"x" * n) for n in range(40))
    used, answers = dispatcher.handle_frames(chunk, peer)
    assert used == len(chunk)
    assert [(c.opaque, c.fields, len(c.body)) for c in answers_of(answers)] == [
        (n, {"n": str(n)}, n) for n in range(40)
    ]
    assert all(c.is_response and c.language == "JAVA" for c in answers_of(answers))


def test_a_frame_that_is_not_whole_is_left(peer: Peer) -> None:
    dispatcher = Dispatcher({7: lambda c, _: b"answer!!"})
    chunk = request(7) + request(7)[:-1]
    assert dispatcher.handle_frames(chunk, peer) == (len(request(7)), b"answer!!")
    assert dispatcher.handle_frames(chunk[:7], peer) == (0, b"")
    assert dispatcher.handle_frames(b"", peer) == (0, b"")


def test_bytes_are_answered_as_they_are_and_none_is_no_answer(peer: Peer) -> None:
    dispatcher = Dispatcher(
        {1: lambda c, _: b"one", 2: lambda c, _: None, 3: lambda c, _: b"three"}
    )
    _, answers = dispatcher.handle_frames(request(1) + request(2) + request(3), peer)
    assert answers == b"onethree"


def test_other_outcomes_go_to_deferred_with_their_request(peer: Peer) -> None:
    held: list[tuple[Any, int, Peer]] = []
    dispatcher = Dispatcher(
        {5: lambda c, _: ("parked", c.opaque)},
        handle_outcome=lambda outcome, command, who: held.append((outcome, command.opaque, who)),
    )
    assert dispatcher.handle_frames(request(5, 9), peer)[1] == b""
    assert held == [(("parked", 9), 9, peer)]


def test_oneway_requests_get_no_answer_whatever_happens(peer: Peer) -> None:
    def fail(command: Command, _: Peer) -> None:
        raise RequestError(16, "no")

    dispatcher = Dispatcher({1: lambda c, _: b"x", 2: lambda c, _: Command(0), 3: fail})
    chunk = b"".join(request(code, flag=2) for code in (1, 2, 3, 404))
    assert dispatcher.handle_frames(chunk, peer) == (len(chunk), b"")


def test_an_unknown_code_is_answered_3_and_logged_once(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher = Dispatcher({})
    _, answers = dispatcher.handle_frames(request(9999, 4) * 3, peer)
    answer = answers_of(answers)[0]
    assert (answer.code, answer.opaque, answer.fields) == (3, 4, None)
    assert answer.remark == " request type 9999 not supported"
    assert len(caplog.records) == 1


def test_errors_become_codes_and_remarks_and_the_rest_goes_on(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(command: Command, _: Peer) -> None:
        raise RequestError(17, "topic[x] not exist")

    def full(command: Command, _: Peer) -> None:
        raise StoreFullError("disk full", fix="Add space.")

    def bug(command: Command, _: Peer) -> None:
        raise ZeroDivisionError("oops")

    def header(command: Command, _: Peer) -> None:
        decode_header(QueueRequest, command.fields)

    dispatcher = Dispatcher({1: refuse, 2: full, 3: bug, 4: header, 5: lambda c, _: object()})
    caplog.set_level(logging.WARNING)
    chunk = b"".join(request(code) for code in (1, 2, 3, 3, 4, 5))
    _, answers = dispatcher.handle_frames(chunk, peer)
    assert [(c.code, c.remark) for c in answers_of(answers)] == [
        (17, "topic[x] not exist"),
        (14, "disk full Add space."),
        (1, "ZeroDivisionError: oops"),
        (1, "ZeroDivisionError: oops"),
        (1, "the custom field <topic> is null"),
        (1, "TypeError: unsupported handler result: object"),
    ]
    assert [record.levelname for record in caplog.records] == [
        "WARNING",
        "ERROR",
        "WARNING",
        "ERROR",
    ]


def test_an_answer_above_the_frame_limit_becomes_an_error(peer: Peer) -> None:
    dispatcher = Dispatcher({1: lambda c, _: Command(0, None, bytes(FRAME_BYTES_MAX))})
    (answer,) = answers_of(dispatcher.handle_frames(request(1), peer)[1])
    assert answer.code == 1
    assert "limit" in (answer.remark or "")


def test_binary_requests_are_answered_in_json(peer: Peer) -> None:
    seen: list[Command] = []

    def handler(command: Command, _: Peer) -> Command:
        seen.append(command)
        return Command(0, {"k": "v"}, serialization=BINARY)

    chunk = encode(Command(14, {"topic": "T"}, b"b", 3, serialization=BINARY, language="GO"))
    (answer,) = answers_of(Dispatcher({14: handler}).handle_frames(chunk, peer)[1])
    assert (seen[0].fields, seen[0].body, seen[0].language) == ({"topic": "T"}, b"b", "GO")
    assert (answer.serialization, answer.opaque) == (0, 3)


@pytest.mark.parametrize(
    "bad",
    [
        struct.pack(">II", 3, 0),
        struct.pack(">II", FRAME_BYTES_MAX + 1, 0),
        struct.pack(">II", 10, 7) + b"123456",
        struct.pack(">II", 6, 2) + b"[]",
        struct.pack(">II", 6, 7 << 24 | 2) + b"{}",
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_what_is_not_the_protocol_raises_after_the_frames_before_it(bad: bytes, peer: Peer) -> None:
    dispatcher = Dispatcher({1: lambda c, _: b"x"})
    with pytest.raises(ProtocolError):
        dispatcher.handle_frames(bad, peer)
    used, answers = dispatcher.handle_frames(request(1) + bad, peer)
    assert (used, answers) == (len(request(1)), b"x")


def test_before_sees_every_known_request_first(peer: Peer) -> None:
    def before(command: Command, _: Peer) -> Command | None:
        return Command(16, remark="denied") if command.opaque == 2 else None

    dispatcher = Dispatcher({1: lambda c, _: Command(0)}, authorize=before)
    _, answers = dispatcher.handle_frames(request(1, 1) + request(1, 2) + request(99, 2), peer)
    assert [c.code for c in answers_of(answers)] == [0, 16, 3]


def test_answers_to_our_requests_go_to_the_peer_and_are_never_answered(peer: Peer) -> None:
    dispatcher = Dispatcher({220: lambda c, _: b"x"})
    assert dispatcher.handle_frames(request(220, 77, flag=1), peer)[1] == b""


def test_notify_is_oneway_and_numbered(peer: Peer) -> None:
    peer.send_oneway(Command(40, {"consumerGroup": "G"}))
    peer.send_oneway(Command(40, {"consumerGroup": "G"}))
    transport = peer._transport
    assert isinstance(transport, Carrier)
    sent = [decode(frame[4:]) for frame in transport.written]
    assert [(c.opaque, c.is_oneway, c.is_response) for c in sent] == [
        (1, True, False),
        (2, True, False),
    ]


def test_a_closed_peer_takes_nothing(peer: Peer) -> None:
    transport = peer._transport
    assert isinstance(transport, Carrier)
    peer.close()
    peer.write(b"late")
    assert transport.closed
    assert transport.written == []


def test_a_quick_handler_sees_the_header_as_it_is_and_may_take_the_request(peer: Peer) -> None:
    seen: list[tuple[Any, bytes]] = []

    def quick(header: dict[str, Any], body: bytes, peer: Peer) -> bool:
        seen.append((header["opaque"], body))
        return bool(header["opaque"] % 2)

    dispatcher = Dispatcher({7: lambda c, _: Command(0)}, fast_handlers={7: quick})
    chunk = b"".join(request(7, n, b"x" * n) for n in range(5))
    used, answers = dispatcher.handle_frames(chunk, peer)
    assert used == len(chunk)
    assert seen == [(n, b"x" * n) for n in range(5)]
    assert [c.opaque for c in answers_of(answers)] == [0, 2, 4], "the others are its own business"


@pytest.mark.parametrize("where", ["quick", "admit"])
def test_a_bug_of_the_quick_path_surfaces_like_any_other(
    where: str, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(header: dict[str, Any], body: bytes, peer: Peer) -> bool:
        raise RuntimeError("a bug")

    usual: list[Command] = []
    dispatcher = Dispatcher(
        {7: lambda c, _: usual.append(c)},
        fast_handlers={7: bug if where == "quick" else lambda *_: True},
        authorize_fast=bug if where == "admit" else None,
    )
    chunk = request(7, 1) + request(7, 2, flag=2) + request(7, 3)
    used, frames = dispatcher.handle_frames(chunk, peer)
    assert used == len(chunk)
    assert [(it.opaque, it.code, it.remark) for it in answers_of(frames)] == [
        (1, 1, "RuntimeError: a bug"), (3, 1, "RuntimeError: a bug"),
    ]  # fmt: skip
    assert usual == [], "it is not carried out a second time"
    assert [it.levelname for it in caplog.records] == ["ERROR"], "once for each kind"


def test_a_protocol_error_of_a_quick_handler_does_not_end_the_connection(peer: Peer) -> None:
    def refuse(header: dict[str, Any], body: bytes, peer: Peer) -> bool:
        raise ProtocolError("a bad body.")

    dispatcher = Dispatcher({7: lambda c, _: Command(0)}, fast_handlers={7: refuse})
    (answer,) = answers_of(dispatcher.handle_frames(request(7), peer)[1])
    assert (answer.code, answer.remark) == (1, "a bad body.")


@pytest.mark.parametrize(
    "header",
    [
        b'{"code":7,"opaque":1,"flag":0,"version":0,"language":"JAVA","remark":"\\ud800"}',
        b'{"code":7,"opaque":1,"flag":0,"version":0,"language":"JAVA",0:1}',
        b'{"code":"7","opaque":1,"flag":0,"version":0,"language":"JAVA"}',
    ],
)
def test_a_header_that_is_not_plain_goes_the_usual_way(header: bytes, peer: Peer) -> None:
    dispatcher = Dispatcher({7: lambda c, _: Command(0)}, fast_handlers={7: lambda *_: True})
    data = struct.pack(">II", 4 + len(header), len(header)) + header
    (answer,) = answers_of(dispatcher.handle_frames(data, peer)[1])
    assert (answer.code, answer.opaque) == (0, 1)


def test_who_looks_first_sees_requests_with_a_quick_handler_too(peer: Peer) -> None:
    dispatcher = Dispatcher(
        {7: lambda c, _: Command(0)},
        fast_handlers={7: lambda *_: True},
        authorize=lambda c, _: Command(16, remark="no"),
    )
    (answer,) = answers_of(dispatcher.handle_frames(request(7), peer)[1])
    assert (answer.code, answer.remark) == (16, "no")
