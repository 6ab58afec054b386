"""Limits for HTTP connections to the console and to `sluice mcp`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from sluicemq.client.tasks import Tasks
from sluicemq.console import http_limits
from sluicemq.console.serve import open_socket
from waiting import limit


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond with the number of bytes of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % size})


@contextlib.asynccontextmanager
async def serving(app: Any = echo) -> AsyncIterator[int]:
    listening = open_socket("127.0.0.1", 0)
    listening.listen()
    config = uvicorn.Config(app, log_level="error", lifespan="off", **http_limits.uvicorn_options())
    server, tasks = uvicorn.Server(config), Tasks()
    task = tasks.spawn(server._serve([listening]), "server")
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await asyncio.wait({task})


async def ask(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), limit(10))
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


GET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"


@pytest.mark.parametrize(
    "begin", [b"", b"GET / HTTP/1.1\r\n", POST + b"content-length: 10\r\n\r\nabc"],
    ids=["nothing", "half a head", "half a body"],
)  # fmt: skip
async def test_an_incomplete_request_is_closed(
    monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    monkeypatch.setattr(http_limits, "HEAD_S", 0.05)
    monkeypatch.setattr(http_limits, "BODY_S", 0.1)
    async with serving() as port:
        assert b"200" not in await ask(port, begin)


async def test_a_slow_response_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HEAD_S", 0.02)
    monkeypatch.setattr(http_limits, "BODY_S", 0.02)

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.2)
        await echo(scope, receive, send)

    async with serving(slow) as port:
        assert b"200 OK" in await ask(
            port, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )


async def test_connections_above_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "CONNECTIONS_MAX", 2)
    async with serving() as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert await ask(port, POST + b"\r\n") == b""
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [(b"content-length: 100", b"x" * 100, b"200"), (b"content-length: 101", b"x" * 101, b"413"),
     (b"transfer-encoding: chunked", b"65\r\n" + b"x" * 101 + b"\r\n0\r\n\r\n", b"413"),
     (b"transfer-encoding: chunked", b"64\r\n" + b"x" * 100 + b"\r\n0\r\n\r\n", b"200")],
)  # fmt: skip
async def test_the_size_of_a_body_is_limited_with_and_without_a_length(
    head: bytes, body: bytes, status: bytes
) -> None:
    async with serving(http_limits.BoundedBody(echo, 100)) as port:
        answer = await ask(port, POST + head + b"\r\n\r\n" + body)
        assert answer.startswith(b"HTTP/1.1 " + status)


async def test_other_asgi_scopes_pass() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def nothing(*_: Any) -> Message:
        return {}

    await http_limits.BoundedBody(app)({"type": "lifespan"}, nothing, nothing)  # type: ignore[arg-type]
    assert seen == ["lifespan"]


async def test_the_head_after_a_long_response_has_its_full_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_limits, "HEAD_S", 0.2)

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            await asyncio.sleep(0.7)
        await echo(scope, receive, send)

    async with serving(slow) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.15)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b"200 OK" in await reader.read()
        writer.close()
