"""Connections of `net.http2` in memory, without sockets: thousands of conversations a second, and a
look into what they leave behind.

Each conversation comes in chunks of any size. What has to hold: nothing raises; what is written is
HTTP/2 by the rules (frames of a stream in their order, blocks that can be read, each answer with a
status); a call is answered or lost, and that once; when the connection is gone nothing of it is
left, neither counted bytes nor streams.
"""

import asyncio
import logging
from functools import partial
from random import Random
from typing import Any, Final

from fuzz.grpc_calls import SERVICE, requests
from fuzz.http2 import ANSWER, OPENING, QUESTION, Http2Mutator
from fuzz.mutate import Input
from http2_client import frames_of
from sluicemq.net.grpc import Call, CallError, GrpcServer, Handler, StatusCode
from sluicemq.net.http2 import Http2Connection
from sluicemq.net.limits import FairScheduler, ServerLimits
from sluicemq.wire import http2 as h
from sluicemq.wire.hpack import HeaderDecoder

CALLS: Final = 12
LOG: Final = "sluicemq.net"


class World:
    """A server whose methods do all that methods do; the loop's time does not pass."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.calls: list[Call] = []
        self.lost: list[Call] = []
        self.held: list[Call] = []
        handlers = {
            "Telemetry": self._converse, "Heartbeat": self._hold, "SendMessage": self._later,
            "ReceiveMessage": self._several, "AckMessage": self._fail, "PullMessage": self._slowly,
        }  # fmt: skip
        methods: dict[str, Handler] = {
            SERVICE + name: partial(self._called, handlers.get(name, self._echo))
            for name, _ in requests()
        }
        shares = FairScheduler(loop.time, loop.call_soon)
        self.server = GrpcServer(methods, shares, limits=ServerLimits(pending_bytes_max=1 << 26))

    def _called(self, handle: Handler, data: bytes, call: Call) -> bytes | None:
        if call not in self.calls:
            self.calls.append(call)
            call.on_cancelled = partial(self.lost.append, call)
        return handle(data, call)

    def _echo(self, data: bytes, _call: Call) -> bytes:
        return data

    def _hold(self, _data: bytes, call: Call) -> None:
        self.held.append(call)

    def _later(self, data: bytes, call: Call) -> None:
        asyncio.get_running_loop().call_soon(call.reply, data)

    def _several(self, _data: bytes, call: Call) -> None:
        call.reply_all([b"x" * 20_000, b"", b"y" * 100])

    def _slowly(self, data: bytes, call: Call) -> None:
        call.send(data)
        asyncio.get_running_loop().call_soon(call.end)

    def _fail(self, data: bytes, _call: Call) -> bytes:
        raise CallError(StatusCode.NOT_FOUND, data.decode("latin-1"))

    def _converse(self, data: bytes, call: Call) -> None:
        call.on_half_close = call.end
        call.send(data)


class Wire:
    """The transport of a connection."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = self.is_paused = False
        self.connection: Any = None

    def write(self, data: bytes) -> None:
        assert not self.is_closed, "written after the end"
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, _name: str) -> None:
        return None


class Errors(logging.Handler):
    """What a server logs of itself when something is wrong with it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def conversation(recorded: list[bytes], rng: Random) -> list[Input]:
    """One that is whole, and answered, or one that is broken."""
    mutator = Http2Mutator(recorded, rng)
    if rng.random() < 0.5:
        return [mutator.breaking()]
    return [mutator.plain() for _ in range(CALLS)]


def check(recorded: list[bytes], seed: int, first: int, count: int) -> str:
    """So many conversations from the one with the number `first` on; what is wrong with one, or
    nothing."""

    async def run() -> str:
        for at in range(first, first + count):
            inputs = conversation(recorded, Random(f"{seed}:{at}"))
            try:
                await converse(inputs, Random(at))
            except Exception as error:
                return f"conversation {at} of seed {seed}: {error!r}"
        return ""

    errors, logger = Errors(), logging.getLogger(LOG)
    logger.addHandler(errors)
    was = logger.propagate
    logger.propagate = False
    try:
        found = asyncio.run(run())
    finally:
        logger.removeHandler(errors)
        logger.propagate = was
    return found or (errors.records[0].getMessage() if errors.records else "")


async def converse(inputs: list[Input], rng: Random) -> None:
    """One conversation, and what has to hold of it. Raises AssertionError and whatever else."""
    world, wire = World(), Wire()
    connection = world.server._new_connection()
    assert isinstance(connection, Http2Connection)
    connection.connection_made(wire)  # type: ignore[arg-type]
    is_whole = not inputs[-1].breaks
    data = b"".join(each.data for each in inputs)
    data = OPENING + data + QUESTION if is_whole else data
    await feed(connection, wire, data, rng)
    if is_whole:
        assert ANSWER in wire.written, "the question is not answered"
        assert not wire.is_closed, "the connection was closed"
    for call in world.held:
        call.reply(b"at last")
    await settle(connection, wire)
    check_frames(wire.written)
    for call in world.calls:
        assert (
            not (call.is_half_closed and call.on_half_close is None)
            or call.is_closed
            or connection.stalled_streams
        )
    answered = [call for call in world.calls if call.is_closed and call not in world.lost]
    wire.is_closed = True
    connection.connection_lost(None)
    assert len(set(map(id, world.lost))) == len(world.lost), "a call was lost twice"
    assert not [call for call in answered if call in world.lost], "lost, though it was answered"
    assert all(call.is_closed for call in world.calls), "a call is open"
    left = connection.buffered_bytes, connection.queued_bytes, len(connection.stalled_streams)
    assert left == (0, 0, 0), left
    assert (world.server.unfinished.total_bytes, world.server.unfinished.untrusted_bytes) == (0, 0)
    assert not world.server.connections


async def feed(connection: Http2Connection, wire: Wire, data: bytes, rng: Random) -> None:
    """In chunks, as a socket gives them; not while nothing is to be read."""
    size = rng.choice((1 << 18, 1 << 18, 1 << 16, 3000, 100, len(data) // 2 + 1))
    size = max(size, len(data) // 500)
    for at in range(0, len(data), size):
        if wire.is_closed:
            return
        connection.data_received(data[at : at + size])
        if wire.is_paused or rng.random() < 0.1:
            await settle(connection, wire)
    await settle(connection, wire)


async def settle(connection: Http2Connection, wire: Wire) -> None:
    """What is to be done in the next turns is done."""
    for turn in range(1000):
        await asyncio.sleep(0)
        if turn > 3 and (not wire.is_paused or wire.is_closed):
            return
    raise AssertionError("it does not read any more")


def check_frames(data: bytes) -> None:
    """Are these frames that a server may write?"""
    frames, rest = frames_of(data)
    assert not rest, "half a frame"
    reader = HeaderDecoder()
    begun: set[int] = set()
    ended: set[int] = set()
    reset: set[int] = set()
    for frame in frames:
        kind, flags, stream, payload = frame
        if kind in (h.DATA, h.HEADERS, h.RST_STREAM):
            assert stream & 1, frame
            assert stream not in reset, f"{frame} after a reset"
        if kind == h.HEADERS:
            assert flags & h.END_HEADERS
            assert stream not in ended, f"{frame} after the end"
            fields = reader.decode(payload)
            if stream not in begun:
                assert fields.get(":status") in ("200", "415"), fields
            if flags & h.END_STREAM:
                ended.add(stream)
                assert "grpc-status" in fields or fields == {":status": "415"}, fields
            begun.add(stream)
        elif kind == h.DATA:
            assert stream in begun, f"{frame} before its headers"
            assert stream not in ended, f"{frame} after the end"
            assert payload
        elif kind == h.RST_STREAM:
            reset.add(stream)
            code = h.read_integer(payload, "RST_STREAM")
            assert stream not in ended or code == h.ErrorCode.NO_ERROR, frame
        elif kind == h.GOAWAY:
            assert frame is frames[-1], "frames after the end"
        else:
            assert kind in (h.SETTINGS, h.PING, h.WINDOW_UPDATE), frame
