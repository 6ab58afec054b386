"""HTTP/2 in frames made by hand, against a server on a port."""

import asyncio
import contextlib
import os
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from http2_client import Client, HeaderWriter, message
from sluicemq.net import http2_limits
from sluicemq.net.accept import PROTECTED_MODE_REFUSAL
from sluicemq.net.grpc import Call, GrpcServer, Handler, StatusCode
from sluicemq.net.limits import REFUSALS_MAX, ServerLimits
from sluicemq.wire import http2 as h
from waiting import limit

ECHO, LATER, MANY = "/t.T/Echo", "/t.T/Later", "/t.T/Many"
OPEN: list[Call] = []
"""The calls of LATER, which the server does not answer."""


BLOCK = HeaderWriter(0).write([(":path", LATER), ("content-type", "application/grpc")], form=0)
"""A header block that does not use the HPACK table."""
HEADERS = h.encode_frame(h.HEADERS, h.END_HEADERS, 1, BLOCK)


def later(_data: bytes, call: Call) -> None:
    OPEN.append(call)


def many(data: bytes, call: Call) -> None:
    for count in range(int(data)):
        call.send(bytes([count % 256]) * 10_000)
    call.end()


METHODS: dict[str, Handler] = {ECHO: lambda data, _call: data, LATER: later, MANY: many}


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(METHODS, **options)
    await server.start("127.0.0.1", [0])
    OPEN.clear()
    try:
        yield server
    finally:
        await server.close()


def run(conversation: Callable[[Client], Any], *settings: tuple[int, int], **options: Any) -> Any:
    """Run a blocking conversation of a client on a thread, beside a server. Return its result."""

    async def main() -> Any:
        async with serving(**options) as server:

            def talk() -> Any:
                with Client(server.ports[0]) as client:
                    return conversation(client.begin(*settings))

            return await asyncio.wait_for(asyncio.to_thread(talk), limit(20))

    return asyncio.run(main())


def test_both_sides_say_what_they_take() -> None:
    def talk(client: Client) -> None:
        found = h.read_settings(client.until(h.SETTINGS).payload)
        assert found[h.Setting.MAX_CONCURRENT_STREAMS] == http2_limits.STREAMS_MAX
        more = h.read_integer(client.until(h.WINDOW_UPDATE).payload, "WINDOW_UPDATE")
        assert more + h.WINDOW_BYTES == http2_limits.CONNECTION_WINDOW_BYTES
        assert client.until(h.SETTINGS).flags == h.ACK

    run(talk)


def test_a_call_in_single_bytes_is_a_call() -> None:
    def talk(client: Client) -> None:
        block = client.request(ECHO, ("x-mq-client-id", "me"))
        data = h.encode_frame(h.HEADERS, h.END_HEADERS, 1, block)
        data += h.encode_frame(h.DATA, h.END_STREAM, 1, message(b"x" * 50))
        for byte in data:
            client.send(bytes([byte]))
        assert client.answer(1).messages == [b"x" * 50]

    run(talk)


def test_a_call_in_odd_frames_is_a_call() -> None:
    """The headers come in three frames with padding and priority, the message in four frames, of
    which one is empty and one padded. Frames of other types are between them, trailers follow."""

    def talk(client: Client) -> None:
        block, data = client.request(ECHO), message(b"abcdef")
        first = b"\x03" + struct.pack(">IB", 0, 16) + block[:5] + b"\0\0\0"
        trailers = client.writer.write([("x-sum", "7")])
        client.send(
            h.encode_frame(h.HEADERS, h.PADDED | h.HAS_PRIORITY, 1, first)
            + h.encode_frame(h.CONTINUATION, 0, 1, block[5:9])
            + h.encode_frame(h.CONTINUATION, h.END_HEADERS, 1, block[9:])
            + h.encode_frame(h.PRIORITY, 0, 1, struct.pack(">IB", 0, 1))
            + h.encode_frame(h.DATA, 0, 1, data[:3])
            + h.encode_frame(h.DATA, 0, 1)
            + h.encode_frame(0x42, 0xFF, 7, b"of the future")
            + h.encode_frame(h.DATA, h.PADDED, 1, b"\x02" + data[3:8] + b"\0\0")
            + h.encode_frame(h.DATA, 0, 1, data[8:])
            + h.encode_frame(h.HEADERS, h.END_HEADERS | h.END_STREAM, 1, trailers)
        )
        assert client.answer(1).messages == [b"abcdef"]
        client._last = 1
        assert client.call(ECHO, b"and on").messages == [b"and on"]

    run(talk)


def test_many_calls_at_once_are_one_write() -> None:
    def talk(client: Client) -> None:
        data = b""
        for number in range(1, 201, 2):
            data += h.encode_frame(h.HEADERS, h.END_HEADERS, number, client.request(ECHO))
            data += h.encode_frame(h.DATA, h.END_STREAM, number, message(b"%d" % number))
        client.send(data)
        for number in range(1, 201, 2):
            assert client.answer(number).messages == [b"%d" % number]

    run(talk)


@pytest.mark.parametrize("frame_bytes", [16_384, 1 << 20])
def test_an_answer_waits_for_windows(frame_bytes: int) -> None:
    """The stream has a window of 30,000 bytes, then a little more at a time; the connection has one
    of 65,535 bytes. Another stream does not have to wait."""

    def talk(client: Client) -> None:
        stream = client.open(MANY)
        client.send(h.encode_frame(h.DATA, h.END_STREAM, stream, message(b"20")))
        got = 0

        def take(wanted: int) -> int:
            nonlocal got
            while got < wanted:
                frame = client.until(h.DATA, stream)
                assert len(frame.payload) <= frame_bytes
                got += len(frame.payload)
            return got

        assert take(30_000) == 30_000
        assert client.call(ECHO, b"me too").messages == [b"me too"]
        client.send(h.encode_window_update(stream, 5_000))
        assert take(35_000) == 35_000
        client.send(h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: 1 << 20}))
        assert take(65_535 - 11) == 65_535 - 11  # the connection's, of which the echo had some
        client.send(h.encode_window_update(0, 1 << 20))
        assert take(20 * 10_005) == 20 * 10_005
        assert client.answer(stream).status == 0

    run(
        talk,
        (h.Setting.INITIAL_WINDOW_SIZE, 30_000),
        (h.Setting.MAX_FRAME_SIZE, frame_bytes),
    )


def test_what_is_received_is_given_back() -> None:
    def talk(client: Client) -> None:
        stream = client.open(ECHO)
        data, sent, window, whole = (
            message(os.urandom(3 << 20)),
            0,
            http2_limits.STREAM_WINDOW_BYTES,
            0,
        )
        while sent < len(data):
            size = min(16_384, window, len(data) - sent)
            if not size:
                window += h.read_integer(client.until(h.WINDOW_UPDATE, stream).payload, "")
                continue
            client.send(h.encode_frame(h.DATA, 0, stream, data[sent : sent + size]))
            sent, window = sent + size, window - size
        client.send(h.encode_frame(h.DATA, h.END_STREAM, stream))
        client.send(h.encode_window_update(0, 1 << 24) + h.encode_window_update(stream, 1 << 24))
        assert client.answer(stream).messages == [data[5:]]
        client.until(h.WINDOW_UPDATE)  # at the begin
        while any(frame.kind == h.WINDOW_UPDATE and not frame.stream for frame in client.frames):
            whole += h.read_integer(client.until(h.WINDOW_UPDATE).payload, "")
        assert whole > http2_limits.CONNECTION_WINDOW_BYTES // 2

    run(talk)


def test_pings_are_answered() -> None:
    def talk(client: Client) -> None:
        client.send(h.encode_frame(h.PING, 0, 0, b"12345678"))
        assert client.until(h.PING)[1:] == (h.ACK, 0, b"12345678")

    run(talk)


def test_a_reset_ends_a_call_and_its_client_is_missed() -> None:
    lost = []

    async def main() -> None:
        async with serving() as server:

            def talk() -> None:
                with Client(server.ports[0]) as client:
                    stream = client.begin().open(LATER)
                    client.send(h.encode_frame(h.DATA, h.END_STREAM, stream, message(b"x")))
                    other = client.open(LATER)
                    client.send(h.encode_frame(h.DATA, h.END_STREAM, other, message(b"y")))
                    while len(OPEN) < 2:
                        client.call(ECHO, b"")
                    for call in OPEN:
                        call.on_cancelled = lambda it=call: lost.append(it)  # type: ignore[misc]
                    client.send(h.encode_rst_stream(stream, h.ErrorCode.CANCEL))
                    assert client.call(ECHO, b"on").messages == [b"on"]
                    assert lost == OPEN[:1]

            await asyncio.to_thread(talk)
            while server.connections:
                await asyncio.sleep(0)
            assert lost == OPEN
            OPEN[0].reply(b"too late")
            OPEN[1].send(b"too late")
            OPEN[1].end()

    asyncio.run(main())


@pytest.mark.parametrize(
    "frame",
    [
        h.encode_rst_stream(1, h.ErrorCode.CANCEL),
        h.encode_window_update(1, 0),
        h.encode_window_update(1, (1 << 31) - 1),
    ],
)
def test_a_client_that_has_its_answer_is_not_missed(frame: bytes) -> None:
    """The client has not half-closed the stream, so the server still knows it."""
    lost = []

    def talk(client: Client) -> None:
        stream = client.open(LATER)
        client.send(h.encode_frame(h.DATA, 0, stream, message(b"x")))
        client.call(ECHO, b"")
        OPEN[0].on_cancelled = lambda: lost.append(1)
        loop.call_soon_threadsafe(OPEN[0].reply, b"there")
        assert client.answer(stream).messages == [b"there"]
        client.send(frame)
        assert client.call(ECHO, b"on").messages == [b"on"]

    async def main() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        async with serving() as server:

            def connect() -> None:
                with Client(server.ports[0]) as client:
                    talk(client.begin())

            await asyncio.to_thread(connect)

    loop: asyncio.AbstractEventLoop
    asyncio.run(main())
    assert not lost


def test_headers_of_open_streams_count_as_pending() -> None:
    """A block of about 60 bytes becomes a list of 64 KiB, kept while its stream is open."""

    def talk(client: Client) -> None:
        client.send(
            h.encode_frame(
                h.HEADERS, h.END_HEADERS, 1, BLOCK + client.writer.write([("x", "v" * 3900)])
            )
        )
        name = client.writer.write([("x", "v" * 3900)])
        assert len(name) == 1
        with contextlib.suppress(ConnectionError):
            for stream in range(3, 400, 2):
                client.send(h.encode_frame(h.HEADERS, h.END_HEADERS, stream, BLOCK + name * 16))
        while client.read():
            pass

    run(talk, limits=ServerLimits(pending_bytes_max=8 << 20))


def test_streams_above_the_limit_are_refused_one_by_one() -> None:
    def talk(client: Client) -> None:
        numbers = range(1, 2 * http2_limits.STREAMS_MAX + 3, 2)
        client.send(b"".join(h.encode_frame(h.HEADERS, h.END_HEADERS, it, BLOCK) for it in numbers))
        frame = client.until(h.RST_STREAM, numbers[-1])
        assert h.read_integer(frame.payload, "RST_STREAM") == h.ErrorCode.REFUSED_STREAM
        client.send(h.encode_rst_stream(1, h.ErrorCode.CANCEL))
        client._last = numbers[-1]
        assert client.call(ECHO, b"room").messages == [b"room"]

    run(talk)


def test_a_client_that_takes_nothing_gets_no_more_to_take() -> None:
    def talk(client: Client) -> None:
        first = client.open(MANY)
        client.send(h.encode_frame(h.DATA, h.END_STREAM, first, message(b"20")))
        second = client.open(ECHO)
        client.send(h.encode_frame(h.DATA, h.END_STREAM, second, message(b"x")))
        frame = client.until(h.RST_STREAM, second)
        assert h.read_integer(frame.payload, "RST_STREAM") == h.ErrorCode.REFUSED_STREAM

    run(talk, limits=ServerLimits(write_buffer_bytes_max=100_000))


def test_a_client_that_never_takes_its_answer_is_closed() -> None:
    def talk(client: Client) -> None:
        first = client.open(MANY)
        client.send(h.encode_frame(h.DATA, h.END_STREAM, first, message(b"20")))
        while client.read():
            pass

    run(talk, limits=ServerLimits(frame_timeout_s=0.2))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (h.encode_frame(h.DATA, 0, 1, b"x"), h.ErrorCode.PROTOCOL_ERROR),
        (h.encode_frame(h.DATA, 0, 0, b"x"), h.ErrorCode.PROTOCOL_ERROR),
        (HEADERS + h.encode_frame(h.DATA, h.PADDED, 1, b"\x09x"), h.ErrorCode.PROTOCOL_ERROR),
        (h.encode_frame(h.HEADERS, h.END_HEADERS, 2, BLOCK), h.ErrorCode.PROTOCOL_ERROR),
        (HEADERS * 2, h.ErrorCode.PROTOCOL_ERROR),
        (h.encode_frame(h.HEADERS, h.END_HEADERS, 1, b"\x80"), h.ErrorCode.COMPRESSION_ERROR),
        (h.encode_frame(h.HEADERS, 0, 1, BLOCK) + h.encode_frame(h.PING, 0, 0, bytes(8)),
         h.ErrorCode.PROTOCOL_ERROR),
        (h.encode_frame(h.CONTINUATION, h.END_HEADERS, 1, BLOCK), h.ErrorCode.PROTOCOL_ERROR),
        (h.encode_frame(h.HEADERS, 0, 0, BLOCK), h.ErrorCode.PROTOCOL_ERROR),
        (h.encode_frame(h.HEADERS, h.END_HEADERS, 0, BLOCK), h.ErrorCode.PROTOCOL_ERROR),
        (h.encode_frame(h.HEADERS, 0, 1, BLOCK)
         + h.encode_frame(h.CONTINUATION, 0, 1, bytes(16_384)) * 5,
         h.ErrorCode.ENHANCE_YOUR_CALM),
        (h.encode_frame(h.HEADERS, 0, 1, BLOCK) + h.encode_frame(h.CONTINUATION, 0, 1),
         h.ErrorCode.ENHANCE_YOUR_CALM),
        (h.encode_frame_header(16_385, h.DATA, 0, 1), h.ErrorCode.FRAME_SIZE_ERROR),
        (h.encode_frame(h.SETTINGS, 0, 0, b"12345"), h.ErrorCode.FRAME_SIZE_ERROR),
        (h.encode_frame(h.SETTINGS, 0, 1), h.ErrorCode.PROTOCOL_ERROR),
        (h.encode_settings({h.Setting.MAX_FRAME_SIZE: 16_383}), h.ErrorCode.PROTOCOL_ERROR),
        (h.encode_settings({h.Setting.ENABLE_PUSH: 2}), h.ErrorCode.PROTOCOL_ERROR),
        (h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: 1 << 31}),
         h.ErrorCode.FLOW_CONTROL_ERROR),
        (h.encode_window_update(0, 0), h.ErrorCode.FLOW_CONTROL_ERROR),
        (h.encode_window_update(0, h.WINDOW_BYTES_MAX), h.ErrorCode.FLOW_CONTROL_ERROR),
        (HEADERS + h.encode_window_update(1, 1 << 30) + h.encode_settings(
            {h.Setting.INITIAL_WINDOW_SIZE: h.WINDOW_BYTES_MAX}), h.ErrorCode.FLOW_CONTROL_ERROR),
        (h.encode_frame(h.WINDOW_UPDATE, 0, 0, b"123"), h.ErrorCode.FRAME_SIZE_ERROR),
        (h.encode_rst_stream(9, h.ErrorCode.CANCEL), h.ErrorCode.PROTOCOL_ERROR),
        (h.encode_frame(h.PING, 0, 0, b"short"), h.ErrorCode.PROTOCOL_ERROR),
        (h.encode_frame(h.PUSH_PROMISE, 0, 1, bytes(4)), h.ErrorCode.PROTOCOL_ERROR),
        (h.encode_frame(h.PING, 0, 0, bytes(8)) * 1100, h.ErrorCode.ENHANCE_YOUR_CALM),
        (h.encode_frame(h.SETTINGS, 0, 0) * 1100, h.ErrorCode.ENHANCE_YOUR_CALM),
        (HEADERS + h.encode_frame(h.DATA, 0, 1) * 1100, h.ErrorCode.ENHANCE_YOUR_CALM),
        (h.encode_frame(0x77, 0, 0) * 1100, h.ErrorCode.ENHANCE_YOUR_CALM),
        (h.encode_frame(h.SETTINGS, h.ACK, 0) * 1100, h.ErrorCode.ENHANCE_YOUR_CALM),
        (h.encode_frame(h.PING, h.ACK, 0, bytes(8)) * 1100, h.ErrorCode.ENHANCE_YOUR_CALM),
        (h.encode_goaway(0, h.ErrorCode.NO_ERROR) * 1100, h.ErrorCode.ENHANCE_YOUR_CALM),
        (h.encode_frame(h.HEADERS, 0, 1, BLOCK)
         + h.encode_frame(h.CONTINUATION, 0, 1, b"\0") * 1100,
         h.ErrorCode.ENHANCE_YOUR_CALM),
        (b"".join(
            h.encode_frame(h.HEADERS, h.END_HEADERS, it, BLOCK)
             + h.encode_rst_stream(it, h.ErrorCode.CANCEL)
            for it in range(1, 600, 2)), h.ErrorCode.ENHANCE_YOUR_CALM),
    ],
)  # fmt: skip
def test_a_client_that_breaks_the_rules_is_told_which(data: bytes, code: h.ErrorCode) -> None:
    def talk(client: Client) -> h.ErrorCode:
        with contextlib.suppress(ConnectionError):
            client.send(data)
        return client.ended()

    assert run(talk) is code


def test_more_data_than_the_window_resets_the_stream_or_ends_the_connection() -> None:
    """The server returns no window, because each frame has one byte of an incomplete message."""

    def stream_only(client: Client) -> None:
        stream = client.open(LATER)
        client.send(h.encode_frame(h.DATA, 0, stream, message(bytes(16_379))))
        client.send(h.encode_window_update(stream, h.WINDOW_BYTES_MAX))
        frame = client.until(h.RST_STREAM, stream)
        assert h.read_integer(frame.payload, "RST_STREAM") == h.ErrorCode.FLOW_CONTROL_ERROR

    run(stream_only)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0\0\0\x70\0\0\0\x6c" + b'{"code":105}']
)
def test_another_protocol_is_closed_with_a_word_in_the_log(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving() as server:

            def talk() -> None:
                with Client(server.ports[0]) as client:
                    client.send(data)
                    assert not client.read()

            await asyncio.to_thread(talk)

    asyncio.run(main())
    assert "does not speak HTTP/2" in caplog.text


def test_a_server_that_drains_lets_calls_end() -> None:
    async def main() -> None:
        async with serving() as server:

            def talk() -> None:
                with Client(server.ports[0]) as client, Client(server.ports[0]) as idle:
                    idle.begin().call(ECHO, b"")
                    stream = client.begin().open(LATER)
                    client.send(h.encode_frame(h.DATA, h.END_STREAM, stream, message(b"x")))
                    client.call(ECHO, b"")
                    loop.call_soon_threadsafe(drain)
                    assert last(client) == h.STREAM_MAX
                    on_its_way = client.call(ECHO, b"still")
                    assert on_its_way.messages == [b"still"]
                    client.send(h.encode_frame(h.PING, h.ACK, 0, client.until(h.PING).payload))
                    assert last(client) == client._last
                    late = client.open(ECHO)
                    refused = client.until(h.RST_STREAM, late).payload
                    assert h.read_integer(refused, "RST_STREAM") == h.ErrorCode.REFUSED_STREAM
                    loop.call_soon_threadsafe(OPEN[0].reply, b"at last")
                    assert client.answer(stream).messages == [b"at last"]
                    assert not client.read()
                    idle.send(h.encode_frame(h.PING, h.ACK, 0, http2_limits.DRAIN_PING))
                    while idle.read():
                        pass

            def last(client: Client) -> int:
                number, code = struct.unpack(">II", client.until(h.GOAWAY).payload[:8])
                assert code == h.ErrorCode.NO_ERROR
                return int(number)

            def drain() -> None:
                tasks.append(loop.create_task(server.drain(5)))

            loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[None]]()
            await asyncio.to_thread(talk)
            await asyncio.wait_for(tasks[0], limit(5))
            assert not server.connections
            with pytest.raises(ConnectionRefusedError):
                Client(server.ports[0])

    asyncio.run(main())


def test_a_stranger_is_told_how_to_be_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluicemq.net.accept.is_on_this_machine", lambda _peer: False)

    def talk(client: Client) -> int:
        answer = client.call(ECHO, b"x")
        assert answer.status == StatusCode.PERMISSION_DENIED
        assert answer.headers["grpc-message"] == PROTECTED_MODE_REFUSAL
        for _ in range(REFUSALS_MAX - 1):
            client.call(ECHO, b"x")
        client.open(ECHO)
        return sum(1 for _ in iter(client.read, False))

    run(talk, limits=ServerLimits(is_protected=True))
