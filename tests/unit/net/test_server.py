"""The remoting server over real sockets on loopback, on the loops of asyncio and uvloop."""

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop

from sluicemq.errors import ConfigurationError
from sluicemq.model.ids import Host
from sluicemq.net.accept import ACCEPTS_PER_ITERATION, BYTES_PER_ITERATION_MAX
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.limits import ServerLimits
from sluicemq.net.server import Connection, RemotingServer
from sluicemq.wire.frames import FLAG_RESPONSE, Command, FrameReader, encode
from waiting import limit


@pytest.fixture(params=[None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Any], None]:
    def run_it(coroutine: Any) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(coroutine, limit(20)))

    return run_it


def echo(command: Command, _: Peer) -> Command:
    return Command(0, {"size": str(len(command.body))}, command.body)


@contextlib.asynccontextmanager
async def serving(dispatcher: Dispatcher, **options: Any) -> AsyncIterator[RemotingServer]:
    server = RemotingServer(dispatcher, **options)
    await server.start("127.0.0.1", [0])
    try:
        yield server
    finally:
        await server.close()


async def connect(
    server: RemotingServer,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.ports[0], limit=1 << 25)


async def receive(reader: asyncio.StreamReader, count: int = 1) -> list[Command]:
    frames, commands = FrameReader(), []
    while len(commands) < count:
        data = await reader.read(1 << 20)
        assert data, f"closed after {len(commands)} of {count} answers"
        commands += frames.feed(data)
    return commands


def request(code: int, opaque: int = 1, body: bytes = b"") -> bytes:
    return encode(Command(code, {}, body, opaque))


def test_many_requests_in_any_pieces_are_answered(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        async with serving(Dispatcher({7: echo})) as server:
            reader, writer = await connect(server)
            stream = b"".join(request(7, n, bytes(n)) for n in range(200))
            writer.write(stream[:1001])
            await asyncio.sleep(0)
            writer.write(stream[1001:])
            answers = await receive(reader, 200)
            assert [(c.opaque, len(c.body)) for c in answers] == [(n, n) for n in range(200)]
            writer.close()

    run(main())


def test_a_frame_of_16_mib_goes_through(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        async with serving(
            Dispatcher({7: lambda c, _: Command(0, {"n": str(len(c.body))})})
        ) as server:
            reader, writer = await connect(server)
            body = bytes(16 * 1024 * 1024 - 200)
            writer.write(request(7, 1, body))
            (answer,) = await receive(reader)
            assert answer.fields == {"n": str(len(body))}
            writer.close()

    run(main())


def test_several_ports_serve_the_same_and_the_peer_knows_which(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        server = RemotingServer(Dispatcher({7: echo}))
        await server.start("127.0.0.1", [0, 0])
        for port in server.ports:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(7))
            await receive(reader)
            name = writer.get_extra_info("sockname")
            peer = server.peers[-1]
            assert peer.local == Host("127.0.0.1", port)
            assert peer.remote == Host(*name)
            assert len(peer.remote_bytes) == 8
            writer.close()
        assert len(set(server.ports)) == 2
        await server.close()

    run(main())


def test_a_port_in_use_is_a_sentence_with_its_cure(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        async with serving(Dispatcher({})) as server:
            other = RemotingServer(Dispatcher({}))
            with pytest.raises(
                ConfigurationError, match=rf"Port {server.ports[0]} is already in use"
            ):
                await other.start("127.0.0.1", [0, server.ports[0]])
            assert other.ports == ()
            with pytest.raises(ConfigurationError, match="address of this machine"):
                await other.start("203.0.113.1", [0])

    run(main())


@pytest.mark.parametrize(
    ("junk", "text"),
    [
        (bytes.fromhex("16030100c8010000c40303"), "TLS"),
        (b"GET / HTTP/1.1\r\n\r\n", "above the limit"),
        (struct.pack(">II", 6, 2) + b"[]", "not an object"),
    ],
)
def test_what_is_not_the_protocol_closes_the_connection_and_is_logged_once(
    run: Callable[[Any], None], caplog: pytest.LogCaptureFixture, junk: bytes, text: str
) -> None:
    async def main() -> None:
        async with serving(Dispatcher({7: echo})) as server:
            for _ in range(3):
                reader, writer = await connect(server)
                writer.write(request(7) + junk)
                (answer,) = await receive(reader)
                assert answer.code == 0
                assert await reader.read() == b""
                writer.close()
            reader, writer = await connect(server)
            writer.write(request(7))
            await receive(reader)
            writer.close()

    run(main())
    assert len([record for record in caplog.records if text in record.getMessage()]) == 1


def test_requests_before_a_broken_frame_are_answered(run: Callable[[Any], None]) -> None:
    """That includes requests whose response comes later, as that of a send waits for the disk."""

    def later(command: Command, peer: Peer) -> None:
        answer = encode(answer_to(command))
        asyncio.get_running_loop().call_later(0.05, peer.write, answer)

    async def main() -> None:
        broken = struct.pack(">II", 0xFFFFFFF0, 0) + b"z" * 20
        async with serving(Dispatcher({7: later})) as server:
            for apart in (False, True):
                reader, writer = await connect(server)
                writer.write(encode(Command(7, opaque=9)))
                if apart:
                    await asyncio.sleep(0.01)
                writer.write(broken + encode(Command(7, opaque=10)))
                assert [answer.opaque for answer in await receive(reader)] == [9]
                assert await reader.read() == b"", "what follows a broken frame is not served"
                writer.close()

    run(main())


def answer_to(command: Command) -> Command:
    return Command(0, opaque=command.opaque, flag=FLAG_RESPONSE)


def test_one_connection_too_many_is_closed(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        told: list[str] = []
        async with serving(
            Dispatcher({7: echo}),
            limits=ServerLimits(connections_max=1),
            on_disconnect=lambda _: told.append("out"),
        ) as server:
            reader, writer = await connect(server)
            writer.write(request(7))
            await receive(reader)
            second_reader, second = await connect(server)
            with contextlib.suppress(ConnectionError):
                assert await second_reader.read() == b""
            second.close()
            writer.write(request(7))
            await receive(reader)
            assert (len(server.peers), told) == (1, [])
            writer.close()
        assert told == ["out"]

    run(main())


def test_a_silent_connection_is_closed_and_a_talking_one_stays(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        async with serving(
            Dispatcher({7: echo}), limits=ServerLimits(idle_timeout_s=0.2)
        ) as server:
            silent, silent_writer = await connect(server)
            talking, talking_writer = await connect(server)

            async def talk() -> None:
                while True:
                    talking_writer.write(request(7))
                    await receive(talking)
                    await asyncio.sleep(0.02)

            task = asyncio.get_running_loop().create_task(talk())
            with contextlib.suppress(ConnectionError):
                assert await silent.read() == b""
            assert len(server.peers) == 1
            assert not task.done()
            task.cancel()
            silent_writer.close()
            talking_writer.close()

    run(main())


def test_a_client_that_does_not_read_is_not_read_from(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        handled = 0

        def big(command: Command, _: Peer) -> Command:
            nonlocal handled
            handled += 1
            return Command(0, None, bytes(1 << 20))

        async with serving(
            Dispatcher({7: big}), limits=ServerLimits(write_buffer_bytes_max=1 << 20)
        ) as server:
            client = socket.create_connection(("127.0.0.1", server.ports[0]))
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            stream = request(7) * 200
            sent = 0
            for _ in range(50):
                with contextlib.suppress(BlockingIOError):
                    sent += client.send(stream[sent : sent + len(request(7))])
                await asyncio.sleep(0.005)
            assert 1 <= handled < 40
            before = handled
            frames, answers = FrameReader(), 0
            while answers < before:
                answers += len(frames.feed(await loop.sock_recv(client, 1 << 20)))
            assert handled >= before
            client.close()

    run(main())


class RecordingTransport(asyncio.Transport):
    """A transport that records the calls of a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        self.events.append("pause")

    def resume_reading(self) -> None:
        self.events.append("resume")

    def write(self, data: Any) -> None:
        self.events.append("write")

    def is_closing(self) -> bool:
        return False


async def test_a_greedy_sender_is_read_again_only_in_the_next_turn() -> None:
    connection = Connection(RemotingServer(Dispatcher({7: echo})), Dispatcher({7: echo}))
    transport = RecordingTransport()
    connection.connection_made(transport)
    chunk = request(7, 1, bytes(BYTES_PER_ITERATION_MAX // 4))
    for _ in range(3):
        connection.data_received(chunk)
    assert transport.events == ["write"] * 3
    connection.data_received(chunk)
    assert transport.events[3:] == ["pause", "write"]
    await asyncio.sleep(0)
    assert transport.events[5:] == ["resume"]


async def test_reading_goes_on_only_when_both_reasons_to_pause_are_gone() -> None:
    connection = Connection(RemotingServer(Dispatcher({})), Dispatcher({7: echo}))
    transport = RecordingTransport()
    connection.connection_made(transport)
    connection.pause_writing()
    connection.data_received(request(7, 1, bytes(BYTES_PER_ITERATION_MAX)))
    await asyncio.sleep(0)
    assert "resume" not in transport.events
    connection.resume_writing()
    assert transport.events[-1] == "resume"


def test_a_request_to_the_client_is_answered_or_given_up_or_lost(
    run: Callable[[Any], None],
) -> None:
    async def main() -> None:
        async with serving(Dispatcher({})) as server:
            reader, writer = await connect(server)
            while not server.peers:
                await asyncio.sleep(0.001)
            peers = server.peers
            answers: list[Command] = []
            peers[0].send_request(Command(307, {"x": "1"}), answers.append)
            given_up = peers[0].send_request(Command(307), answers.append)
            peers[0].forget_request(given_up)
            peers[0].send_request(Command(307), answers.append)
            first, second, third = await receive(reader, 3)
            assert (first.code, first.fields, second.opaque) == (307, {"x": "1"}, given_up)
            for asked in (second, first):
                writer.write(encode(Command(0, {"y": "2"}, b"info", asked.opaque, FLAG_RESPONSE)))
            while not answers:
                await asyncio.sleep(0.001)
            peers[0].connection_lost()
            peers[0].handle_response(Command(0, None, b"", third.opaque, FLAG_RESPONSE))
            assert [(it.fields, it.body) for it in answers] == [({"y": "2"}, b"info")]
            writer.close()

    run(main())


def test_close_lets_written_answers_leave_and_waits_for_everyone(
    run: Callable[[Any], None],
) -> None:
    async def main() -> None:
        gone: list[Peer] = []
        server = RemotingServer(Dispatcher({7: echo}), on_disconnect=gone.append)
        await server.start("127.0.0.1", [0])
        reader, writer = await connect(server)
        writer.write(request(7, 1, bytes(1 << 20)))
        while not server.peers or server.peers[0].idle_sweeps != 0:
            await asyncio.sleep(0.001)
        (answer,) = await receive(reader)
        await server.close()
        assert len(answer.body) == 1 << 20
        assert len(gone) == 1
        assert server.peers == ()
        assert await reader.read() == b""
        writer.close()
        await server.close()

    run(main())


def test_a_client_that_takes_nothing_does_not_hold_up_the_close(
    run: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluicemq.net.accept.CLOSE_TIMEOUT_S", 0.05)

    async def main() -> None:
        server = RemotingServer(Dispatcher({7: lambda c, _: Command(0, None, bytes(8 << 20))}))
        await server.start("127.0.0.1", [0])
        client = socket.create_connection(("127.0.0.1", server.ports[0]))
        client.sendall(request(7) * 3)
        await asyncio.sleep(0.1)
        await server.close()
        assert server.peers == ()
        client.close()

    run(main())


def test_many_clients_that_connect_at_once_are_accepted_in_portions() -> None:
    """Between two portions, connected clients get their responses. (uvloop accepts all clients at
    once, and takes a tenth of the time for each.)"""

    async def connect_many() -> list[int]:
        async with serving(Dispatcher({})) as server:
            with contextlib.ExitStack() as clients:
                for _ in range(4 * ACCEPTS_PER_ITERATION):
                    clients.enter_context(socket.create_connection(("127.0.0.1", server.ports[0])))
                counts = [0]
                while counts[-1] < 4 * ACCEPTS_PER_ITERATION:
                    await asyncio.sleep(0)
                    counts.append(len(server.peers))
                return counts

    counts = asyncio.run(asyncio.wait_for(connect_many(), limit(20)))
    portions = [after - before for before, after in itertools.pairwise(counts)]
    assert max(portions) <= ACCEPTS_PER_ITERATION
