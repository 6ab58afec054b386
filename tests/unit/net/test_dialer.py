"""Channels and pools, against a RemotingServer on loopback and against servers that misbehave."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sluicemq.errors import (
    ClosedError,
    ConnectionLostError,
    ProtocolError,
    RequestTimeoutError,
)
from sluicemq.model.ids import Host
from sluicemq.net.channel import (
    BACK_OFF_MIN_S,
    EXPIRE_SLACK_S,
    Channel,
    ChannelPool,
    connect_failure_text,
    dial,
)
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.server import RemotingServer
from sluicemq.wire.frames import FLAG_RESPONSE, Command, FrameReader, encode


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(111, "Connect call failed ('127.0.0.1', 1)"), "Connection refused"),
        (
            OSError(
                "Multiple exceptions: [Errno 111] Connect call failed ('::1', 1, 0, 0), "
                "[Errno 111] Connect call failed ('127.0.0.1', 1)"
            ),
            "Connection refused",
        ),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
    ],
)
def test_the_text_of_a_failed_connect_has_no_address(error: OSError, text: str) -> None:
    assert connect_failure_text(error) == text


class StepClock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def now_ms(self) -> int:
        return int(self.now_s * 1000)

    def monotonic_s(self) -> float:
        return self.now_s


class RecordingTransport:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes, /) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed = True


def attached(**options: Any) -> tuple[Channel, RecordingTransport]:
    """Return a channel without a network, and its transport, which records what is written."""
    channel, transport = Channel("127.0.0.1:1", **options), RecordingTransport()
    channel.connection_made(transport, Host("127.0.0.1", 2))
    return channel, transport


def answer(opaque: int, code: int = 0, body: bytes = b"") -> bytes:
    return encode(Command(code, {}, body, opaque, FLAG_RESPONSE))


@contextlib.asynccontextmanager
async def serving(dispatcher: Dispatcher, **options: Any) -> AsyncIterator[str]:
    server = RemotingServer(dispatcher, **options)
    await server.start("127.0.0.1", [0])
    try:
        yield f"127.0.0.1:{server.ports[0]}"
    finally:
        await server.close()


def task(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


async def test_calls_of_one_turn_leave_in_one_write_and_answers_may_come_in_any_order() -> None:
    channel, transport = attached()
    calls = [task(channel.call(Command(7, {"n": str(n)}), 5)) for n in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(transport.written) == 1
    sent = FrameReader().feed(transport.written[0])
    assert [c.fields for c in sent] == [{"n": "0"}, {"n": "1"}, {"n": "2"}]
    channel.data_received(
        b"".join(answer(c.opaque, body=str(c.fields).encode()) for c in sent[::-1])
    )
    for call, command in zip(calls, sent, strict=True):
        assert (await call).body == str(command.fields).encode()


async def test_a_call_and_its_answer_through_a_server() -> None:
    dispatcher = Dispatcher({7: lambda c, _: Command(0, {"size": str(len(c.body))}, c.body)})
    async with serving(dispatcher) as address:
        channel = await dial(address)
        got = await asyncio.gather(
            *(channel.call(Command(7, None, bytes(n)), 5) for n in range(100))
        )
        assert [len(command.body) for command in got] == list(range(100))
        assert channel.local is not None
        assert channel.local.address == "127.0.0.1"
        await channel.close()
        assert channel.closed


async def test_a_call_times_out_and_its_late_answer_is_dropped() -> None:
    channel, transport = attached()
    with pytest.raises(RequestTimeoutError, match=r"127\.0\.0\.1:1 did not respond to request 7"):
        await channel.call(Command(7), 0.01)
    opaque = FrameReader().feed(transport.written[0])[0].opaque
    channel.data_received(answer(opaque))
    call = task(channel.call(Command(8), 5))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    channel.data_received(answer(opaque + 1, 17))
    assert (await call).code == 17


@pytest.mark.looptime
async def test_each_call_ends_at_its_own_time_though_one_timer_watches_all() -> None:
    channel, _ = attached()
    time_of = asyncio.get_running_loop().time
    began_s, ended = time_of(), []

    async def late(code: int, timeout_s: float) -> None:
        with pytest.raises(RequestTimeoutError, match=f"request {code}"):
            await channel.call(Command(code), timeout_s)
        ended.append((code, time_of() - began_s))

    waiting = [task(late(code, code / 100)) for code in (20, 4, 12)]  # a shorter one comes later
    await asyncio.gather(*waiting)
    assert [code for code, _ in ended] == [4, 12, 20]
    assert all(after_s >= code / 100 - EXPIRE_SLACK_S for code, after_s in ended)
    assert channel._calls == {}
    call = task(channel.call(Command(9), 0.01))  # the timer had stopped and starts again
    with pytest.raises(RequestTimeoutError):
        await call


async def test_a_cancelled_call_leaves_nothing_behind() -> None:
    channel, _ = attached()
    call = task(channel.call(Command(7), 5))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert channel._calls == {}


async def test_a_begun_call_that_is_given_up_is_forgotten_at_its_deadline() -> None:
    channel, _ = attached()
    channel.start_call(Command(7), 0.01).cancel()
    kept = channel.start_call(Command(8), 5)
    await asyncio.sleep(0.03)
    assert [code for _, code, _, _ in channel._calls.values()] == [8]
    assert not kept.done()


async def test_an_answer_to_a_call_that_was_given_up_is_dropped() -> None:
    channel, transport = attached()
    future = channel.start_call(Command(310), 5)
    await asyncio.sleep(0)
    (sent,) = FrameReader().feed(transport.written[0])
    future.cancel()
    stored = {"msgId": "AB", "queueId": "0", "queueOffset": "1"}
    channel.data_received(encode(Command(0, stored, b"", sent.opaque, FLAG_RESPONSE, None, "JAVA")))
    assert channel._calls == {}


async def test_what_is_held_back_is_not_sent_for_who_has_given_up() -> None:
    channel, transport = attached()
    channel.set_writing_paused(True)
    given_up, kept = channel.start_call(Command(7), 5), channel.start_call(Command(8), 5)
    given_up.cancel()
    channel.set_writing_paused(True)
    await asyncio.sleep(0)
    assert transport.written == []
    channel.set_writing_paused(False)
    await asyncio.sleep(0)
    (sent,) = FrameReader().feed(transport.written[0])
    channel.data_received(answer(sent.opaque))
    assert (sent.code, kept.result().code) == (8, 0)


async def test_a_lost_connection_fails_every_call_and_tells_once() -> None:
    closed: list[Channel] = []
    channel, _ = attached(on_close=closed.append)
    calls = [task(channel.call(Command(7), 5)) for _ in range(2)]
    await asyncio.sleep(0)
    channel.connection_lost(ConnectionResetError("reset by peer"))
    channel.connection_lost(None)
    for call in calls:
        with pytest.raises(ConnectionLostError, match="reset by peer"):
            await call
    assert closed == [channel]
    with pytest.raises(ConnectionLostError):
        await channel.call(Command(7), 5)
    with pytest.raises(ConnectionLostError):
        channel.send_oneway(Command(7))


async def test_oneway_requests_are_marked_and_not_waited_for() -> None:
    channel, transport = attached()
    channel.send_oneway(Command(15))
    await asyncio.sleep(0)
    (sent,) = FrameReader().feed(transport.written[0])
    assert sent.is_oneway


async def test_requests_of_the_server_are_answered_with_their_opaque() -> None:
    def on_request(command: Command, _: Channel) -> Command | None:
        if command.code == 1:
            raise ValueError("a bug")
        return Command(0, {"for": str(command.code)})

    channel, transport = attached(on_request=on_request)
    channel.data_received(
        encode(Command(307, opaque=55)) + encode(Command(40, flag=2)) + encode(Command(1))
    )
    await asyncio.sleep(0)
    (sent,) = FrameReader().feed(b"".join(transport.written))
    assert (sent.opaque, sent.is_response, sent.fields) == (55, True, {"for": "307"})


async def test_a_server_that_does_not_speak_the_protocol_is_left() -> None:
    channel, transport = attached()
    call = task(channel.call(Command(7), 5))
    await asyncio.sleep(0)
    channel.data_received(b"HTTP/1.1 400 Bad Request\r\n")
    with pytest.raises(ConnectionLostError, match="above the limit"):
        await call
    assert transport.closed


async def test_calls_wait_while_the_server_takes_no_bytes() -> None:
    channel, transport = attached()
    channel.set_writing_paused(True)
    call = task(channel.call(Command(7), 5))
    impatient = task(channel.call(Command(7), 0.01))
    await asyncio.sleep(0.03)
    assert transport.written == []
    with pytest.raises(RequestTimeoutError):
        await impatient
    channel.set_writing_paused(False)
    await asyncio.sleep(0.01)
    (sent,) = FrameReader().feed(transport.written[0])
    channel.data_received(answer(sent.opaque))
    assert (await call).code == 0


async def test_a_frame_above_the_limit_fails_its_own_call_only() -> None:
    channel, transport = attached()
    with pytest.raises(ProtocolError, match="limit"):
        await channel.call(Command(7, None, bytes(17 << 20)), 5)
    assert not channel.closed
    assert transport.written == []


async def test_dialling_nobody_says_so() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ConnectionLostError, match=f"Cannot connect to {address}"):
            await dial(address, timeout_s=2)
    with pytest.raises(ProtocolError, match="not an address"):
        await dial("nowhere")


async def test_a_pool_shares_one_channel_and_opens_another_after_a_loss() -> None:
    peers: list[Peer] = []
    dispatcher = Dispatcher({7: lambda c, p: peers.append(p) or Command(0)})  # type: ignore[func-returns-value]
    async with serving(dispatcher) as address:
        pool = ChannelPool()
        one, two = await asyncio.gather(pool.get(address), pool.get(address))
        assert one is two
        await one.call(Command(7), 5)
        peers[0].close()
        while not one.closed:
            await asyncio.sleep(0.001)
        three = await pool.get(address)
        assert three is not one
        await three.call(Command(7), 5)
        await pool.close()
        assert three.closed
        with pytest.raises(ClosedError):
            await pool.get(address)


async def test_a_pool_does_not_dial_a_dead_server_in_a_tight_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialled: list[str] = []

    async def refuse(address: str, **_: object) -> Channel:
        dialled.append(address)
        raise ConnectionLostError(f"Cannot connect to {address}: refused.")

    monkeypatch.setattr("sluicemq.net.channel.dial", refuse)
    clock = StepClock()
    pool = ChannelPool(clock=clock)

    async def attempt(times: int) -> int:
        for _ in range(times):
            with pytest.raises(ConnectionLostError, match="refused"):
                await pool.get("127.0.0.1:9")
        return len(dialled)

    assert await attempt(3) == 1
    clock.now_s += 1.1 * BACK_OFF_MIN_S
    assert await attempt(3) == 2
    clock.now_s += 1.1 * BACK_OFF_MIN_S
    assert await attempt(3) == 2
    clock.now_s += 1.1 * BACK_OFF_MIN_S
    assert await attempt(3) == 3
