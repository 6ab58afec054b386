"""The blocking channel against a scripted server on a thread."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from sluicemq.errors import ConnectionLostError, ProtocolError, RequestTimeoutError
from sluicemq.net.blocking import LARGE_BODY_BYTES, READ_AHEAD_BYTES, BlockingChannel
from sluicemq.wire.frames import FLAG_RESPONSE, Command, FrameReader, encode
from waiting import limit

Script = Callable[[socket.socket], None]


@contextlib.contextmanager
def served(script: Script) -> Iterator[str]:
    """Serve one connection with `script` on a thread, and yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                script(connection)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join(limit(10))
            assert not thread.is_alive()


def requests_of(connection: socket.socket, count: int) -> list[Command]:
    reader, commands = FrameReader(), []
    while len(commands) < count:
        data = connection.recv(65536)
        if not data:
            break
        commands += reader.feed(data)
    return commands


def answer(opaque: int, body: bytes = b"", code: int = 0) -> bytes:
    return encode(Command(code, {}, body, opaque, FLAG_RESPONSE))


def test_a_call_returns_its_answer() -> None:
    def script(connection: socket.socket) -> None:
        (command,) = requests_of(connection, 1)
        connection.sendall(encode(Command(40, flag=2)) + answer(command.opaque, b"body", 19))

    with served(script) as address, closing(BlockingChannel(address)) as channel:
        got = channel.call(Command(11, {"topic": "T"}))
        assert (got.code, bytes(got.body)) == (19, b"body")


def test_bodies_of_any_size_are_views_without_a_copy() -> None:
    sizes = [0, 10, READ_AHEAD_BYTES * 3, 5, READ_AHEAD_BYTES - 1, 8 << 20, 7, 1 << 20]

    def script(connection: socket.socket) -> None:
        commands = requests_of(connection, len(sizes))
        for command, size in zip(commands, sizes, strict=True):
            connection.sendall(answer(command.opaque, bytes([size % 251]) * size))

    with served(script) as address, closing(BlockingChannel(address)) as channel:
        for _ in sizes:
            channel.send(Command(11))
        buffers = set()
        for size in sizes:
            body = channel.receive().body
            assert isinstance(body, memoryview)
            assert bytes(body) == bytes([size % 251]) * size
            buffers.add(id(body.obj))
        assert len(buffers) <= 4


def test_large_bodies_of_requests_arrive_whole_behind_their_headers() -> None:
    sizes = [1, LARGE_BODY_BYTES - 1, LARGE_BODY_BYTES, 5 << 20, 0]
    bodies = [memoryview(bytes([size % 251]) * size) for size in sizes]
    found: list[bytes] = []

    def script(connection: socket.socket) -> None:
        found.extend(bytes(one.body) for one in requests_of(connection, len(sizes)))

    with served(script) as address, closing(BlockingChannel(address)) as channel:
        for body in bodies:
            channel.send(Command(320, {"a": "group"}, body))
    assert found == bodies


def test_answers_that_arrive_in_one_piece_or_bit_by_bit_are_told_apart() -> None:
    def script(connection: socket.socket) -> None:
        commands = requests_of(connection, 30)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = b"".join(answer(c.opaque, str(c.opaque).encode()) for c in commands)
        connection.sendall(stream[:2000])
        for start in range(2000, len(stream), 7):
            connection.sendall(stream[start : start + 7])

    with served(script) as address, closing(BlockingChannel(address)) as channel:
        sent = [Command(11) for _ in range(30)]
        for command in sent:
            channel.send(command)
        for command in sent:
            got = channel.receive()
            assert (got.opaque, bytes(got.body)) == (command.opaque, str(command.opaque).encode())


def test_a_silent_server_is_a_timeout_and_the_channel_is_closed() -> None:
    release = threading.Event()

    with served(lambda connection: release.wait(limit(10)) and None) as address:
        channel = BlockingChannel(address, timeout_s=0.05)
        with pytest.raises(RequestTimeoutError, match=r"0\.05 s"):
            channel.call(Command(11))
        assert channel.closed
        with pytest.raises(ConnectionLostError):
            channel.send(Command(11))
        release.set()


def test_a_server_that_hangs_up_is_a_lost_connection() -> None:
    with served(lambda connection: None) as address:
        channel = BlockingChannel(address)
        with pytest.raises(ConnectionLostError, match="waiting for"):
            channel.receive()
        assert channel.closed


def test_a_server_that_does_not_speak_the_protocol_closes_the_channel() -> None:
    with served(lambda connection: connection.sendall(b"HTTP/1.1 400")) as address:
        channel = BlockingChannel(address)
        with pytest.raises(ProtocolError, match="above the limit"):
            channel.receive()
        assert channel.closed


def test_nobody_there_is_a_sentence_with_its_cure() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ConnectionLostError, match="Check host and port"):
            BlockingChannel(address, timeout_s=1)


def test_oneway_is_sent_and_not_waited_for() -> None:
    seen: list[Command] = []

    def script(connection: socket.socket) -> None:
        seen.extend(requests_of(connection, 1))

    with served(script) as address, closing(BlockingChannel(address)) as channel:
        channel.send_oneway(Command(15))
    assert seen[0].is_oneway
