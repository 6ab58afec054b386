"""Byte streams behave the same over sockets, TLS and memory, and have the limits of requests."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from certificates import Authority
from sluicemq.broker.registration import find_interface_addresses
from sluicemq.config import BrokerConfig
from sluicemq.errors import ConfigurationError, ConnectionLostError, ProtocolError
from sluicemq.net.limits import SERVER_LIMITS, ServerLimits
from sluicemq.net.network import SOCKET_NETWORK, MemoryNetwork, Network, StreamListener, with_tls
from sluicemq.net.stream import HIGH_WATER_BYTES, ByteStream
from sluicemq.net.tls import Tls
from waiting import limit


class User:
    """A stream protocol that records its calls."""

    def __init__(self, stream: ByteStream | None = None) -> None:
        self.stream = stream
        self.data = bytearray()
        self.lost_times = 0
        self.writable_times = 0

    def data_received(self, data: bytes) -> None:
        if data == b"bad":
            raise ProtocolError("that is not what is spoken here")
        self.data += data

    def resume_writing(self) -> None:
        self.writable_times += 1

    def connection_lost(self) -> None:
        self.lost_times += 1


class Scene:
    """A stream listener, and the protocols of the streams it accepted."""

    def __init__(self, network: Network, limits: ServerLimits = SERVER_LIMITS) -> None:
        self.network = network
        self.served: list[User] = []
        self.listener: StreamListener = network.stream_listener(self.accept, limits=limits)

    def accept(self, stream: ByteStream) -> User:
        self.served.append(User(stream))
        return self.served[-1]

    async def dial(self) -> User:
        user = User()
        user.stream = await self.network.dial_stream(f"127.0.0.1:{self.listener.ports[0]}", user)
        return user


@pytest.fixture(params=["sockets", "tls", "memory"])
def network(request: pytest.FixtureRequest, tmp_path: Path) -> Network:
    if request.param == "memory":
        return MemoryNetwork()
    if request.param == "sockets":
        return SOCKET_NETWORK
    authority = Authority(tmp_path / "ca")
    server = authority.issue("broker", ["127.0.0.1"])
    config = BrokerConfig(
        tls_mode="enforcing", tls_certificate=server.path, tls_key=server.key_path
    )
    return with_tls(SOCKET_NETWORK, Tls(ca=authority.path), config)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(limit(10)):
        while not condition():
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def scene(network: Network, limits: ServerLimits = SERVER_LIMITS) -> Any:
    made = Scene(network, limits)
    await made.listener.start("127.0.0.1", [0])
    yield made
    await made.listener.close()


async def test_bytes_go_both_ways_and_ends_know_each_other(network: Network) -> None:
    async with scene(network) as made:
        user = await made.dial()
        await asyncio.sleep(0.01)
        assert not made.served, "who has dialled speaks first"
        user.stream.write(b"hello")
        await until(lambda: made.served and made.served[0].data == b"hello")
        other = made.served[0].stream
        other.write(b"world")
        await until(lambda: user.data == b"world")
        assert user.stream.local == other.remote
        assert user.stream.remote == other.local
        user.stream.close()
        await until(lambda: made.served[0].lost_times and user.lost_times)
        assert other.closed
        assert (user.lost_times, made.served[0].lost_times) == (1, 1)
        other.write(b"late")


@pytest.mark.parametrize("is_dialled", [True, False])
async def test_what_does_not_leave_counts_and_room_is_told(
    network: Network, is_dialled: bool
) -> None:
    async with scene(network) as made:
        user = await made.dial()
        user.stream.write(b"!")
        await until(lambda: made.served)
        sender, reader = (user, made.served[0]) if is_dialled else (made.served[0], user)
        reader.data.clear()
        written = 0
        while sender.stream.unsent_bytes <= HIGH_WATER_BYTES:
            sender.stream.write(bytes(256 * 1024))
            written += 256 * 1024
        assert not sender.writable_times
        await until(lambda: sender.writable_times and len(reader.data) == written)
        assert sender.stream.unsent_bytes == 0


async def test_an_error_of_the_user_closes_the_stream(network: Network) -> None:
    async with scene(network) as made:
        user = await made.dial()
        user.stream.write(b"bad")
        await until(lambda: user.lost_times)
        other = await made.dial()
        other.stream.write(b"good")
        await until(lambda: made.served[-1].data == b"good")
        made.served[-1].stream.write(b"bad")
        await until(lambda: made.served[-1].lost_times)
        assert other.stream.closed


async def test_whom_nobody_wants_is_closed(network: Network) -> None:
    def accept(stream: ByteStream) -> User:
        raise ConfigurationError(f"{stream.remote} is a stranger.")

    listener = network.stream_listener(accept)
    await listener.start("127.0.0.1", [0])
    user = User()
    stream = await network.dial_stream(f"127.0.0.1:{listener.ports[0]}", user)
    stream.write(b"hello")
    await until(lambda: user.lost_times)
    await listener.close()
    with pytest.raises(ConnectionLostError):
        await network.dial_stream(f"127.0.0.1:{listener.ports[0]}", user)


async def test_the_end_of_a_listener_ends_its_streams(network: Network) -> None:
    made = Scene(network)
    await made.listener.start("127.0.0.1", [0])
    user = await made.dial()
    user.stream.write(b"hello")
    await until(lambda: made.served)
    made.served[0].stream.write(b"bye")
    await made.listener.close()
    await until(lambda: user.lost_times)
    assert user.data == b"bye"
    assert made.served[0].lost_times == 1


async def test_a_port_is_served_once(network: Network) -> None:
    async with scene(network) as made:
        with pytest.raises(ConfigurationError, match="in use"):
            await Scene(network).listener.start("127.0.0.1", made.listener.ports)


async def test_silence_ends_a_stream_and_so_do_too_many() -> None:
    limits = ServerLimits(idle_timeout_s=0.1, frame_timeout_s=9, connections_max=1)
    async with scene(SOCKET_NETWORK, limits) as made:
        first, second = await made.dial(), await made.dial()
        first.stream.write(b"hello")
        await until(lambda: second.lost_times)
        await until(lambda: first.lost_times)
        assert made.served[0].lost_times == 1


async def test_protected_mode_closes_strangers() -> None:
    outside = [
        one for one in find_interface_addresses() if not one.startswith("127.") and ":" not in one
    ]
    if not outside:
        pytest.skip("this machine has no address but loopback")
    made = Scene(SOCKET_NETWORK, ServerLimits(is_protected=True))
    await made.listener.start("0.0.0.0", [0])

    def call(source: str) -> bytes:
        with socket.create_connection(
            ("127.0.0.1", made.listener.ports[0]), 10, (source, 0)
        ) as connection:
            connection.sendall(b"hello")
            connection.settimeout(0.2)
            with contextlib.suppress(TimeoutError, ConnectionError):
                return connection.recv(1) or b"closed"
            return b"reset" if source == outside[0] else b"served"

    assert await asyncio.to_thread(call, outside[0]) in (b"closed", b"reset")
    assert not made.served
    assert await asyncio.to_thread(call, "127.0.0.1") == b"served"
    await until(lambda: made.served)
    await made.listener.close()
