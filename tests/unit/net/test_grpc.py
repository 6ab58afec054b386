"""gRPC: calls in frames made by hand, with the client of grpcio if installed, and over TLS."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from certificates import Authority
from http2_client import Client, message
from sluicemq.config import BrokerConfig
from sluicemq.errors import ConfigurationError
from sluicemq.net import grpc as own
from sluicemq.net.grpc import ALPN, Call, CallError, GrpcServer, Handler, StatusCode
from sluicemq.net.limits import FairScheduler
from sluicemq.net.openssl import TlsAcceptor
from sluicemq.wire import http2 as h
from waiting import limit

ECHO = "/test.Service/Echo"
HELD: list[Call] = []
LOST: list[Call] = []


def whoami(_message: bytes, call: Call) -> bytes:
    peer = call.connection.peer
    named = call.headers.get("x-mq-client-id", "")
    return f"{named} {peer.remote.address} {peer.local.port}".encode()


def refuse(text: bytes, _call: Call) -> bytes:
    raise CallError(StatusCode.NOT_FOUND, text.decode(errors="surrogatepass"))


def fail(text: bytes, _call: Call) -> bytes:
    raise ConfigurationError("It is set wrong.") if text else ZeroDivisionError("secret")


def count(number: bytes, call: Call) -> None:
    call.reply_all([b"%d" % it for it in range(int(number))])


def slowly(number: bytes, call: Call) -> None:
    for it in range(int(number)):
        call.send(b"%d" % it)
    call.end()


def hold(_message: bytes, call: Call) -> None:
    HELD.append(call)
    call.on_cancelled = partial(LOST.append, call)


def remaining(_message: bytes, call: Call) -> bytes:
    return str(call.remaining_s).encode()


def converse(text: bytes, call: Call) -> None:
    call.on_half_close = call.end
    call.send(text.upper())


METHODS: dict[str, Handler] = {
    ECHO: lambda data, _call: data,
    "/test.Service/WhoAmI": whoami,
    "/test.Service/Refuse": refuse,
    "/test.Service/Fail": fail,
    "/test.Service/Count": count,
    "/test.Service/Slowly": slowly,
    "/test.Service/Hold": hold,
    "/test.Service/Remaining": remaining,
    "/test.Service/Converse": converse,
}


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(METHODS, **options)
    await server.start("127.0.0.1", [0])
    HELD.clear()
    LOST.clear()
    try:
        yield server
    finally:
        await server.close()


def run(conversation: Callable[[int], Any], **options: Any) -> Any:
    """Run a blocking conversation on a thread, with the port of a server. Return its result."""

    async def main() -> Any:
        async with serving(**options) as server:
            return await asyncio.wait_for(
                asyncio.to_thread(conversation, server.ports[0]), limit(20)
            )

    return asyncio.run(main())


def by_hand(conversation: Callable[[Client], Any]) -> Any:
    def talk(port: int) -> Any:
        with Client(port) as client:
            return conversation(client.begin())

    return run(talk)


# ------------------------------------------------------------------------------- calls by hand


def test_what_a_method_raises_ends_the_call() -> None:
    def talk(client: Client) -> None:
        answer = client.call("/test.Service/Refuse", "no 杭州\n100 %".encode())
        assert answer.status == StatusCode.NOT_FOUND
        assert answer.headers["grpc-message"] == "no %E6%9D%AD%E5%B7%9E%0A100 %25"
        assert unquote(answer.headers["grpc-message"]) == "no 杭州\n100 %"
        answer = client.call("/test.Service/Refuse", "\ud800".encode(errors="surrogatepass"))
        assert answer.headers["grpc-message"] == "?"
        answer = client.call("/test.Service/Fail", b"x")
        assert (answer.status, answer.headers["grpc-message"]) == (13, "It is set wrong.")
        answer = client.call("/test.Service/Fail", b"")
        assert (answer.status, answer.headers["grpc-message"]) == (13, "ZeroDivisionError")

    by_hand(talk)


def test_a_method_that_is_not_served_says_so() -> None:
    def talk(client: Client) -> None:
        answer = client.call("/test.Service/Nothing", b"x")
        assert answer.status == StatusCode.UNIMPLEMENTED
        assert answer.headers["grpc-accept-encoding"] == "identity"
        block = client.writer.write([(":method", "GET"), (":path", ECHO)])
        client.send(h.encode_frame(h.HEADERS, h.END_HEADERS | h.END_STREAM, 99, block))
        assert client.answer(99).headers == {":status": "415"}

    by_hand(talk)


def test_a_compressed_or_unending_or_large_message_ends_the_call() -> None:
    def talk(client: Client) -> None:
        def ends_with(data: bytes, status: StatusCode) -> None:
            stream = client.open(ECHO)
            client.send(h.encode_frame(h.DATA, h.END_STREAM, stream, data))
            assert client.answer(stream).status == status

        ends_with(struct.pack(">BI", 1, 3) + b"abc", StatusCode.UNIMPLEMENTED)
        ends_with(struct.pack(">BI", 0, 9) + b"abc", StatusCode.INTERNAL)
        ends_with(b"\0\0", StatusCode.INTERNAL)
        large = struct.pack(">BI", 0, own.MESSAGE_BYTES_MAX + 1)
        ends_with(large, StatusCode.RESOURCE_EXHAUSTED)

    by_hand(talk)


def test_a_method_that_takes_one_message_gets_one() -> None:
    """Otherwise one stream could make any number of requests, or be a call without a response."""

    def talk(client: Client) -> None:
        stream = client.open("/test.Service/Hold")
        client.send(h.encode_frame(h.DATA, h.END_STREAM, stream, message(b"a") * 50))
        assert client.answer(stream).status == StatusCode.INTERNAL
        assert len(HELD) == 1
        for flags in (h.END_HEADERS | h.END_STREAM, h.END_HEADERS):
            stream = client.open("/test.Service/Hold", flags=flags)
            if not flags & h.END_STREAM:
                client.send(h.encode_frame(h.DATA, h.END_STREAM, stream))
            assert client.answer(stream).status == StatusCode.INTERNAL
        assert len(HELD) == 1

    by_hand(talk)


def test_an_end_that_waits_for_a_window_is_an_end() -> None:
    """Found by fuzzing: a call that had ended, but whose end awaited a window, was still read."""

    def talk(port: int) -> None:
        with Client(port) as client:
            client.begin((h.Setting.INITIAL_WINDOW_SIZE, 0))
            stream = client.open("/test.Service/Converse")
            compressed = struct.pack(">BI", 1, 3) + b"abc"
            client.send(h.encode_frame(h.DATA, 0, stream, message(b"one") + compressed))
            client.send(h.encode_frame(h.DATA, h.END_STREAM, stream, message(b"two")))
            client.send(h.encode_frame(h.PING, 0, 0, bytes(8)))
            assert client.until(h.PING).flags == h.ACK
            client.send(h.encode_window_update(stream, 1000))
            answer = client.answer(stream)
            assert (answer.messages, answer.status) == ([b"ONE"], StatusCode.UNIMPLEMENTED)
            client.send(h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: h.WINDOW_BYTES}))
            assert client.call(ECHO, b"on").messages == [b"on"]

    run(talk)


def test_after_its_end_nothing_is_sent_of_a_call() -> None:
    async def main() -> None:
        def ask(client: Client) -> int:
            client.begin((h.Setting.INITIAL_WINDOW_SIZE, 0))
            stream = client.open("/test.Service/Hold")
            client.send(h.encode_frame(h.DATA, h.END_STREAM, stream, message(b"x")))
            client.send(h.encode_frame(h.PING, 0, 0, bytes(8)))
            client.until(h.PING)
            return stream

        async with serving() as server:
            with Client(server.ports[0]) as client:
                stream = await asyncio.to_thread(ask, client)
                HELD[0].send(b"one")
                HELD[0].end(StatusCode.NOT_FOUND)
                client.send(h.encode_window_update(stream, 1000))
                HELD[0].send(b"two")
                HELD[0].reply(b"three")
                HELD[0].end()
                answer = await asyncio.to_thread(client.answer, stream)
                assert (answer.messages, answer.status) == ([b"one"], StatusCode.NOT_FOUND)
                client.send(h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: h.WINDOW_BYTES}))
                again = await asyncio.to_thread(client.call, ECHO, b"on")
                assert again.messages == [b"on"]

    asyncio.run(main())


def test_a_client_that_streams_has_each_message_answered() -> None:
    def talk(client: Client) -> None:
        stream = client.open("/test.Service/Converse")
        client.send(h.encode_frame(h.DATA, 0, stream, message(b"one") + message(b"two")[:4]))
        assert client.until(h.DATA, stream).payload == message(b"ONE")
        client.send(h.encode_frame(h.DATA, 0, stream, message(b"two")[4:]))
        assert client.until(h.DATA, stream).payload == message(b"TWO")
        client.send(h.encode_frame(h.DATA, h.END_STREAM, stream))
        assert client.answer(stream).status == 0

    by_hand(talk)


def by_hand_of_time(
    monkeypatch: pytest.MonkeyPatch, talk: Callable[[Client, Callable[[float], None]], None]
) -> None:
    """Run a conversation that receives a function with which it lets time pass, in seconds."""
    monkeypatch.setattr(own, "EXPIRE_PERIOD_S", 0.01)
    now_s = 100.0

    def passed(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def connect(port: int) -> None:
        with Client(port) as client:
            talk(client, passed)

    async def main() -> None:
        scheduler = FairScheduler(lambda: now_s, asyncio.get_running_loop().call_soon)
        async with serving(scheduler=scheduler) as server:
            await asyncio.to_thread(connect, server.ports[0])

    asyncio.run(main())


def test_a_call_is_over_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def talk(client: Client, passed: Callable[[float], None]) -> None:
        patient = client.begin().open("/test.Service/Hold", ("grpc-timeout", "8H"))
        client.send(h.encode_frame(h.DATA, h.END_STREAM, patient, message(b"x")))
        hurried = client.open("/test.Service/Hold", ("grpc-timeout", "30m"))
        client.send(h.encode_frame(h.DATA, h.END_STREAM, hurried, message(b"x")))
        client.call(ECHO, b"")  # what was sent before has begun
        assert [call.is_closed for call in HELD] == [False, False]
        passed(0.031)
        assert client.answer(hurried).status == StatusCode.DEADLINE_EXCEEDED
        assert [call.is_closed for call in HELD] == [False, True]
        assert HELD[1:] == LOST

    by_hand_of_time(monkeypatch, talk)


def test_an_answer_that_nobody_takes_is_dropped_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def talk(client: Client, passed: Callable[[float], None]) -> None:
        client.begin((h.Setting.INITIAL_WINDOW_SIZE, 0))
        stream = client.open("/test.Service/Slowly", ("grpc-timeout", "1S"))
        client.send(h.encode_frame(h.DATA, h.END_STREAM, stream, message(b"3")))
        client.send(h.encode_frame(h.PING, 0, 0, bytes(8)))
        client.until(h.PING)
        passed(1.1)
        code = h.read_integer(client.until(h.RST_STREAM, stream).payload, "RST_STREAM")
        assert code == h.ErrorCode.CANCEL

    by_hand_of_time(monkeypatch, talk)


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [("1H", 3600), ("2M", 120), ("3S", 3), ("4m", 0.004), ("5u", 5 * 1e-6),
     ("99999999n", 99_999_999 * 1e-9), ("", None), ("1", None), ("123456789S", None),
     ("-1S", None)],
)  # fmt: skip
def test_a_deadline_is_read(timeout: str, seconds: float | None) -> None:
    def talk(client: Client) -> None:
        answer = client.call("/test.Service/Remaining", b"", ("grpc-timeout", timeout))
        assert answer.messages == [str(seconds and float(seconds)).encode()]

    by_hand(talk)


# ------------------------------------------------------------------------------ a real client


@pytest.fixture
def grpc() -> Any:
    return pytest.importorskip("grpc")


def talk_by_library(grpc: Any, channel: Any) -> None:
    def unary(name: str) -> Any:
        return channel.unary_unary(f"/test.Service/{name}")

    assert unary("Echo")(b"hello", timeout=limit(10)) == b"hello"
    large = bytes(range(256)) * 12_000
    assert unary("Echo")(large, timeout=limit(10)) == large
    found = unary("WhoAmI")(b"", timeout=limit(10), metadata=[("x-mq-client-id", "me")])
    assert found.startswith(b"me 127.0.0.1 ")
    futures = [unary("Echo").future(b"%d" % it, timeout=limit(10)) for it in range(300)]
    assert [future.result() for future in futures] == [b"%d" % it for it in range(300)]
    for name in ("Count", "Slowly"):
        several = channel.unary_stream(f"/test.Service/{name}")
        assert list(several(b"40", timeout=limit(10))) == [b"%d" % it for it in range(40)]
    both = channel.stream_stream("/test.Service/Converse")
    assert list(both(iter([b"a", b"b"]), timeout=limit(10))) == [b"A", b"B"]
    with pytest.raises(grpc.RpcError) as caught:
        unary("Refuse")("no 杭州".encode(), timeout=limit(10))
    error: Any = caught.value
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "no 杭州")
    with pytest.raises(grpc.RpcError) as caught:
        unary("Nothing")(b"", timeout=limit(10))
    error = caught.value
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.RpcError) as caught:
        unary("Hold")(b"", timeout=0.05)
    error = caught.value
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_real_client_over_a_plain_connection(grpc: Any) -> None:
    def talk(port: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            talk_by_library(grpc, channel)

    run(talk)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def door(authority: Authority) -> TlsAcceptor:
    own_certificate = authority.issue("proxy", ["127.0.0.1"])
    settings = replace(
        BrokerConfig(),
        tls_certificate=own_certificate.path,
        tls_key=own_certificate.key_path,
        tls_test_mode=False,
    )
    return TlsAcceptor(settings, ALPN)


def test_a_real_client_over_tls_on_the_port_of_plain_ones(
    grpc: Any, authority: Authority, door: TlsAcceptor
) -> None:
    def talk(port: int) -> None:
        credentials = grpc.ssl_channel_credentials(Path(authority.path).read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            talk_by_library(grpc, channel)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert channel.unary_unary(ECHO)(b"plain", timeout=limit(10)) == b"plain"

    run(talk, tls=door)


def test_the_protocol_inside_tls_is_named_and_the_address_is_the_clients(door: TlsAcceptor) -> None:
    def talk(port: int) -> None:
        with Client(port, tls=True) as client:
            assert client.socket.selected_alpn_protocol() == "h2"  # type: ignore[attr-defined]
            answer = client.begin().call("/test.Service/WhoAmI", b"", ("x-mq-client-id", "c"))
            assert answer.messages == [f"c 127.0.0.1 {port}".encode()]

    run(talk, tls=door)
