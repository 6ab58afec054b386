"""The cost of HTTP/2 frames does not grow with the number of streams, and all is charged."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from cost import FACTOR, cpu_s
from fuzz.connections import Wire
from http2_client import HeaderWriter, frames_of, message
from simulation.stepped import ManualClock
from sluicemq.net import http2_limits
from sluicemq.net.grpc import Call, GrpcServer, Handler
from sluicemq.net.http2 import Http2Connection
from sluicemq.net.limits import ROUND_BUDGET_S, FairScheduler
from sluicemq.wire import hpack
from sluicemq.wire import http2 as h
from sluicemq.wire.http2 import Http2Error

ECHO, HOLD, TALK = "/t.T/Echo", "/t.T/Hold", "/t.T/Talk"
FRAMES: Final = 400
FEW: Final = 120
MANY: Final = FEW * FACTOR


def block(path: str, *fields: tuple[str, str]) -> bytes:
    content = ("content-type", "application/grpc")
    return HeaderWriter(0).write([(":path", path), content, *fields], form=0)


def request(path: str, number: int, *fields: tuple[str, str]) -> bytes:
    head = h.encode_frame(h.HEADERS, h.END_HEADERS, number, block(path, *fields))
    return head + h.encode_frame(h.DATA, h.END_STREAM, number, message(b"x" * 50))


def hold(_data: bytes, _call: Call) -> None:
    """Leave the call open."""


METHODS: Final[dict[str, Handler]] = {ECHO: lambda data, _call: data, HOLD: hold}


def connected(
    methods: dict[str, Handler] = METHODS, scheduler: FairScheduler | None = None
) -> tuple[Http2Connection, Wire]:
    """Return a connection in memory that has received the preface, and its transport."""
    loop = asyncio.get_running_loop()
    server = GrpcServer(methods, scheduler or FairScheduler(lambda: 0.0, loop.call_soon))
    connection, wire = server._new_connection(), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    connection.data_received(h.PREFACE + h.encode_frame(h.SETTINGS, 0, 0))
    return connection, wire


def windows(*values: int) -> Iterator[bytes]:
    return itertools.cycle(
        [h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: it}) for it in values]
    )


def numbers(count: int) -> range:
    return range(1, 2 * count, 2)


def held(count: int) -> bytes:
    """Return requests that open `count` idle streams."""
    return b"".join(request(HOLD, number) for number in numbers(count))


def stalled(count: int) -> bytes:
    """Return requests on `count` streams whose responses wait for a window."""
    answers = b"".join(request(ECHO, number) for number in numbers(count))
    return h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: 0}) + answers


def same(data: bytes) -> Iterator[bytes]:
    return itertools.repeat(data)


Attack = tuple[Callable[[int], bytes], Callable[[], Iterator[bytes]]]
ATTACKS: Final[dict[str, Attack]] = {
    "SETTINGS with many streams": (held, lambda: windows(0, h.WINDOW_BYTES_MAX)),
    "SETTINGS with many stalled answers": (stalled, lambda: windows(0, 0)),
    "WINDOW_UPDATE of the connection": (stalled, lambda: same(h.encode_window_update(0, 1))),
    "WINDOW_UPDATE of a stream": (stalled, lambda: same(h.encode_window_update(1, 1))),
    "WINDOW_UPDATE of all streams in turn": (
        stalled, lambda: itertools.cycle([h.encode_window_update(it, 1) for it in numbers(FEW)])
    ),
    "grants taken back": (
        stalled,
        lambda: itertools.cycle([
            h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: 1}), h.encode_window_update(0, 1),
            h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: 0}), h.encode_window_update(0, 1),
        ]),
    ),
    "PING": (held, lambda: same(h.encode_frame(h.PING, 0, 0, bytes(8)))),
    "PRIORITY": (held, lambda: same(h.encode_frame(h.PRIORITY, 0, 1, bytes(5)))),
    "unknown kinds": (held, lambda: same(h.encode_frame(0x77, 0, 0, bytes(100)))),
    "RST_STREAM of streams that are over": (
        lambda n: held(n) + h.encode_rst_stream(1, h.ErrorCode.CANCEL),
        lambda: same(h.encode_rst_stream(1, h.ErrorCode.CANCEL))
    ),
    "requests": (
        held, lambda: (request(ECHO, number) for number in itertools.count(2 * MANY + 1, 2))
    ),
    "requests that are given up": (
        held,
        lambda: (
            request(HOLD, number) + h.encode_rst_stream(number, h.ErrorCode.CANCEL)
            for number in itertools.count(2 * MANY + 1, 2)
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("prepare", "frames"), ATTACKS.values(), ids=ATTACKS.keys())
def test_a_frame_costs_the_same_however_many_streams_there_are(
    monkeypatch: pytest.MonkeyPatch, prepare: Callable[[int], bytes],
    frames: Callable[[], Iterator[bytes]],
) -> None:  # fmt: skip
    """Eight times as many streams may cost a logarithm more, but not eight times as much."""
    monkeypatch.setattr(http2_limits, "OVERHEAD_FRAMES", 1 << 30)
    monkeypatch.setattr(http2_limits, "UNANSWERED_RESETS", 1 << 30)

    async def measure(count: int) -> float:
        def make() -> tuple[Http2Connection, bytes]:
            connection, wire = connected()
            connection.data_received(prepare(count))
            assert not wire.is_closed
            return connection, b"".join(itertools.islice(frames(), FRAMES))

        def run(given: tuple[Http2Connection, bytes]) -> None:
            connection, data = given
            connection.data_received(data)
            assert not connection.peer.closed

        return cpu_s(run, make)

    little_s, much_s = asyncio.run(measure(FEW)), asyncio.run(measure(MANY))
    assert much_s < 3.5 * little_s


def test_windows_that_settings_change_hold_for_streams_that_are_there_and_that_come() -> None:
    """By definition, a window is the initial one, plus WINDOW_UPDATEs, minus the bytes sent."""

    async def main() -> None:
        connection, wire = connected({ECHO: lambda _data, _call: b"y" * 100})
        connection.data_received(h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: 30}))
        connection.data_received(b"".join(request(ECHO, number) for number in (1, 3, 5)))
        connection.data_received(h.encode_window_update(3, 20))
        connection.data_received(h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: 10}))
        connection.data_received(request(ECHO, 7))
        connection.data_received(h.encode_window_update(1, 25))

        def sent() -> dict[int, int]:
            found: dict[int, int] = {}
            for frame in frames_of(wire.written)[0]:
                if frame.kind == h.DATA:
                    found[frame.stream] = found.get(frame.stream, 0) + len(frame.payload)
            return found

        assert sent() == {1: 35, 3: 50, 5: 30, 7: 10}
        connection.data_received(h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: 40}))
        assert sent() == {1: 65, 3: 60, 5: 40, 7: 40}
        connection.data_received(h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: 1000}))
        assert sent() == dict.fromkeys((1, 3, 5, 7), 105)
        assert not connection.stalled_streams

    asyncio.run(main())


def test_stalled_streams_with_equal_windows_take_turns() -> None:
    async def main() -> None:
        connection, wire = connected({ECHO: lambda _data, _call: b"y" * 60_000})
        connection.data_received(h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: 1 << 20}))
        connection.data_received(b"".join(request(ECHO, number) for number in (1, 3, 5)))
        before = len(wire.written)
        connection.data_received(h.encode_window_update(0, 3 * h.FRAME_BYTES_MAX))
        frames = [it for it in frames_of(wire.written[before:])[0] if it.kind == h.DATA]
        assert {frame.stream for frame in frames} >= {3, 5}
        connection.data_received(h.encode_window_update(0, 1 << 20))
        assert not connection.stalled_streams

    asyncio.run(main())


def test_the_order_of_stalled_streams_does_not_grow_with_the_frames_that_changed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http2_limits, "OVERHEAD_FRAMES", 1 << 30)

    async def main() -> None:
        connection, wire = connected()
        connection.data_received(stalled(10))
        for _ in range(30):
            for number in numbers(10):
                connection.data_received(h.encode_window_update(number, 1))
        assert len(connection._ranks) <= 2 * 10 + http2_limits.STALE_RANKS + 1
        assert not wire.is_closed

    asyncio.run(main())


@pytest.mark.parametrize(
    "frame",
    [h.encode_frame(h.PING, 0, 0, bytes(8)), h.encode_frame(h.SETTINGS, 0, 0),
     h.encode_window_update(0, 1),
     h.encode_frame(h.PRIORITY, 0, 1, bytes(5)), h.encode_frame(0x77, 0, 0)],
    ids=["PING", "SETTINGS", "WINDOW_UPDATE", "PRIORITY", "unknown"],
)  # fmt: skip
def test_each_frame_is_charged_and_one_too_many_waits_for_its_turn(frame: bytes) -> None:
    async def main() -> None:
        clock = ManualClock()
        soon: list[Callable[[], None]] = []

        def now_s() -> float:
            clock.advance(ROUND_BUDGET_S / 10)  # each look at the clock is a tenth of a turn later
            return clock.monotonic_s()

        scheduler = FairScheduler(now_s, soon.append)
        connection, wire = connected(scheduler=scheduler)
        wire.is_paused = False
        connection.data_received(frame * 50)
        assert wire.is_paused, "it is not read from until its turn comes"
        assert connection._deferred_frames
        turns = 0
        while connection._deferred_frames is not None:
            assert soon, "its turn comes"
            for run in [*soon]:
                soon.remove(run)
                run()
            turns += 1
        assert turns >= 5
        assert not wire.is_paused

    asyncio.run(main())


def test_a_frame_full_of_messages_is_handled_in_several_turns() -> None:
    handled: list[bytes] = []

    def talk(data: bytes, call: Call) -> None:
        call.on_half_close = call.end
        handled.append(data)

    async def main() -> None:
        clock = ManualClock()
        soon: list[Callable[[], None]] = []

        def now_s() -> float:
            clock.advance(ROUND_BUDGET_S / 10)
            return clock.monotonic_s()

        connection, wire = connected({TALK: talk}, FairScheduler(now_s, soon.append))
        begin = h.encode_frame(h.HEADERS, h.END_HEADERS, 1, block(TALK))
        data = b"".join(message(b"%d" % at) for at in range(100))
        connection.data_received(
            begin + h.encode_frame(h.DATA, h.END_STREAM, 1, data) + request(TALK, 3)
        )
        assert 0 < len(handled) < 50
        while soon:
            soon.pop(0)()
        assert handled == [*[b"%d" % at for at in range(100)], b"x" * 50]
        ends = [it.stream for it in frames_of(wire.written)[0] if it.is_last]
        assert ends == [1, 3], "each ends after its last message"
        assert connection.buffered_bytes == 0

    asyncio.run(main())


def test_looking_for_calls_that_are_over_does_not_look_at_the_others() -> None:
    async def main() -> None:
        connection, _ = connected()
        server = connection._server
        assert isinstance(server, GrpcServer)
        for number in numbers(900):
            connection.data_received(request(HOLD, number, ("grpc-timeout", f"{number}S")))
        assert server._deadlines.pop_expired() == []
        assert len(server._deadlines._calls) == 900
        connection.connection_lost(None)
        assert not server._deadlines._calls, "nothing is kept of calls that are over"

    asyncio.run(main())


def test_a_block_of_table_sizes_is_refused() -> None:
    reader = hpack.HeaderDecoder()
    reader.decode(b"\x20\x3f\xe1\x1f")  # to 0, and back to 4096
    with pytest.raises(Http2Error, match="is not allowed"):
        reader.decode(b"\x20" * 60_000)
