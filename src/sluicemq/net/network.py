"""Networks that connect clients and servers: TCP sockets, or memory.

A server asks its network for a listener, and a client asks it for a channel. Neither knows what
carries the bytes, so the same classes run over TCP and, in embedded brokers, tests and simulations,
inside one process. In memory, bytes travel by `loop.call_soon`. So a call never re-enters its
caller, bytes arrive in order, nothing is lost, and no limit applies.

    network = MemoryNetwork()
    await network.listener(dispatcher).start("127.0.0.1", [10911])
    channel = await network.dial("127.0.0.1:10911")
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from sluicemq.config.keys import TlsConfig
from sluicemq.errors import ConnectionLostError
from sluicemq.model.ids import Host
from sluicemq.net.accept import ListeningSockets
from sluicemq.net.channel import DIAL_TIMEOUT_S, Channel, Dialer, OnClose, OnRequest, dial
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.limits import SERVER_LIMITS, ServerLimits
from sluicemq.net.openssl import TlsAcceptor
from sluicemq.net.server import RemotingServer
from sluicemq.net.stream import (
    ByteStream,
    MemoryListenerBase,
    MemoryStreamListener,
    StreamProtocol,
    StreamProtocolFactory,
    StreamServer,
    dial_stream,
)
from sluicemq.net.tls import Tls
from sluicemq.wire.frames import FrameBuffer

OnPeer = Callable[[Peer], None]


class Listener(Protocol):
    """A server for one dispatcher, such as `RemotingServer`."""

    dispatcher: Dispatcher
    ports: tuple[int, ...]
    inherited_sockets: ListeningSockets

    def duplicate_sockets(self) -> ListeningSockets: ...

    async def start(self, host: str | None, ports: Sequence[int]) -> None:
        """Listen on every port; 0 stands for a free one. Afterwards `ports` has their numbers.

        Raise ConfigurationError if a port cannot be opened.
        """
        ...

    async def close(self) -> None: ...


def duplicate_sockets(listeners: Iterable[Listener]) -> ListeningSockets:
    """Return duplicates of the listening sockets of several servers, by port.

    The caller must close the duplicates, or pass them to another server.
    """
    sockets: dict[int, Any] = {}
    for listener in listeners:
        sockets.update(listener.duplicate_sockets())
    return sockets


class StreamListener(Protocol):
    """A server for byte streams, such as `StreamServer`."""

    ports: tuple[int, ...]

    async def start(self, host: str | None, ports: Sequence[int]) -> None:
        """Listen on every port; 0 stands for a free one. Afterwards `ports` has their numbers.

        Raise ConfigurationError if a port cannot be opened.
        """
        ...

    async def close(self) -> None: ...


class Network(Protocol):
    """A factory of listeners and channels that can reach each other."""

    @property
    def dial(self) -> Dialer:
        """The function that connects a channel.

        It raises ConnectionLostError or RequestTimeoutError if no server can be reached.
        """
        ...

    def listener(
        self,
        dispatcher: Dispatcher,
        *,
        on_disconnect: OnPeer | None = None,
        limits: ServerLimits = SERVER_LIMITS,
    ) -> Listener: ...

    def stream_listener(
        self, accept: StreamProtocolFactory, *, limits: ServerLimits = SERVER_LIMITS
    ) -> StreamListener: ...

    async def dial_stream(
        self, address: str, protocol: StreamProtocol, *, timeout_s: float = DIAL_TIMEOUT_S
    ) -> ByteStream:
        """Connect a byte stream to `address`; `protocol` receives what arrives on it.

        Raise ConnectionLostError or RequestTimeoutError if no server can be reached.
        """
        ...


class SocketNetwork:
    """The network of TCP sockets, optionally with TLS."""

    __slots__ = ("_server_tls", "_tls", "dial")

    def __init__(self, tls: Tls | None = None, server_tls: TlsConfig | None = None) -> None:
        """Create a network of real sockets.

        Outgoing connections use TLS with the settings `tls`; None means plain connections.
        Listeners serve TLS with the settings `server_tls`; None, or the mode "disabled", means
        plain connections only.
        """
        self.dial: Dialer = partial(dial, tls=tls)
        self._tls = tls
        is_off = server_tls is None or server_tls.tls_mode == "disabled"
        self._server_tls = None if is_off else server_tls

    def listener(
        self,
        dispatcher: Dispatcher,
        *,
        on_disconnect: OnPeer | None = None,
        limits: ServerLimits = SERVER_LIMITS,
    ) -> RemotingServer:
        return RemotingServer(
            dispatcher, on_disconnect=on_disconnect, limits=limits, tls=self._new_acceptor()
        )

    def stream_listener(
        self, accept: StreamProtocolFactory, *, limits: ServerLimits = SERVER_LIMITS
    ) -> StreamServer:
        return StreamServer(accept, limits=limits, tls=self._new_acceptor())

    async def dial_stream(
        self, address: str, protocol: StreamProtocol, *, timeout_s: float = DIAL_TIMEOUT_S
    ) -> ByteStream:
        return await dial_stream(address, protocol, timeout_s=timeout_s, tls=self._tls)

    def _new_acceptor(self) -> TlsAcceptor | None:
        return None if self._server_tls is None else TlsAcceptor(self._server_tls)


SOCKET_NETWORK = SocketNetwork()


def with_tls(network: Network, tls: Tls | None, server_tls: TlsConfig | None = None) -> Network:
    """Return a network with TLS in the place of SOCKET_NETWORK, and any other network unchanged.

    A network in memory needs no TLS, and a SocketNetwork that was made with TLS keeps its own.
    """
    return SocketNetwork(tls, server_tls) if network is SOCKET_NETWORK else network


_CLIENT_PORT_FIRST: Final = 40_000


L = TypeVar("L", bound=MemoryListenerBase)


class _MemoryTransport:
    """One direction of a connection in memory.

    Bytes that are written arrive at `deliver` in the next iteration of the event loop.
    """

    __slots__ = ("_deliver", "_on_close", "closed")

    def __init__(self, deliver: Callable[[bytes], None], on_close: Callable[[], None]) -> None:
        self._deliver = deliver
        self._on_close = on_close
        self.closed = False

    def write(self, data: bytes, /) -> None:
        if not self.closed:
            asyncio.get_running_loop().call_soon(self._deliver, bytes(data))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self._on_close)


class _MemoryConnection:
    """A connection in memory between a client's Channel and a server's Peer."""

    def __init__(
        self, listener: "MemoryListener", channel: Channel, remote: Host, local: Host
    ) -> None:
        """Connect `channel` to `listener` in memory.

        `remote` is the address of the client, to which the channel belongs, and `local` the address
        of the listener.
        """
        self._listener = listener
        self._channel = channel
        self._to_client = _MemoryTransport(channel.data_received, self.disconnect)
        self.peer = Peer(self._to_client, remote, local)
        dispatcher = listener.dispatcher
        handle_data = partial(
            dispatcher.handle_data, FrameBuffer(dispatcher.frame_bytes_max), self.peer
        )
        self._to_server = _MemoryTransport(handle_data, self.disconnect)
        listener.connections.add(self)
        channel.connection_made(self._to_server, remote)

    def disconnect(self) -> None:
        """End the connection on both sides. Do nothing if it has ended already."""
        if self not in self._listener.connections:
            return
        self._listener.connections.discard(self)
        self._to_client.closed = self._to_server.closed = True
        self.peer.connection_lost()
        if self._listener.on_disconnect is not None:
            self._listener.on_disconnect(self.peer)
        self._channel.connection_lost(None)


class MemoryListener(MemoryListenerBase):
    """A server for one dispatcher at addresses of a memory network."""

    def __init__(
        self, network: "MemoryNetwork", dispatcher: Dispatcher, on_disconnect: OnPeer | None
    ) -> None:
        """Create a listener of a memory network, which passes requests to `dispatcher`.

        `on_disconnect` is called with the peer of each connection that has ended.
        """
        super().__init__(network.listeners)
        self.dispatcher = dispatcher
        self.on_disconnect = on_disconnect
        self.connections: set[_MemoryConnection] = set()

    async def close(self) -> None:
        """Stop listening and end all connections. Responses written before still arrive."""
        await asyncio.sleep(0)
        self.stop_listening()
        for connection in tuple(self.connections):
            connection.disconnect()


class MemoryNetwork:
    """A network inside one process.

    An address is any string `host:port`. The host must be an IP address if it is stored, for
    example in a message.
    """

    def __init__(self) -> None:
        self.listeners: dict[str, Any] = {}
        """The listener of each address."""
        self._port = _CLIENT_PORT_FIRST

    def listener(
        self,
        dispatcher: Dispatcher,
        *,
        on_disconnect: OnPeer | None = None,
        limits: ServerLimits = SERVER_LIMITS,
    ) -> MemoryListener:
        del limits  # no limit applies in memory
        return MemoryListener(self, dispatcher, on_disconnect)

    async def dial(
        self,
        address: str,
        *,
        timeout_s: float = 0.0,
        on_request: OnRequest | None = None,
        on_close: OnClose | None = None,
    ) -> Channel:
        """Return a channel that is connected to `address` in memory.

        `timeout_s` is ignored. `on_request` is called with requests of the server, and `on_close`
        when the connection has ended. Raise ConnectionLostError if no listener has the address.
        """
        del timeout_s  # connecting in memory takes no time
        listener, remote, local = self._find_listener(address, MemoryListener)
        channel = Channel(address, on_request=on_request, on_close=on_close)
        _MemoryConnection(listener, channel, remote, local)
        return channel

    def stream_listener(
        self, accept: StreamProtocolFactory, *, limits: ServerLimits = SERVER_LIMITS
    ) -> MemoryStreamListener:
        del limits
        return MemoryStreamListener(self.listeners, accept)

    async def dial_stream(
        self, address: str, protocol: StreamProtocol, *, timeout_s: float = 0.0
    ) -> ByteStream:
        """Connect a byte stream to `address`; `protocol` receives what arrives on it.

        Raise ConnectionLostError if no stream listener serves the address.
        """
        del timeout_s
        listener, remote, local = self._find_listener(address, MemoryStreamListener)
        return listener.connect(protocol, remote, local)

    def _find_listener(self, address: str, listener_type: type[L]) -> tuple[L, Host, Host]:
        """Return (listener of `address`, client's address, server's address) for a new connection.

        The client gets a new port. Raise ConnectionLostError if no listener of this type has the
        address.
        """
        listener = self.listeners.get(address)
        if not isinstance(listener, listener_type):
            raise ConnectionLostError(f"No server listens on {address} in this process.")
        self._port += 1
        client_host = Host("127.0.0.1", self._port)

        name, _, port = address.rpartition(":")
        is_ip_address = name[:1].isdigit() or ":" in name
        server_host = Host(name if is_ip_address else "127.0.0.1", int(port or 0))
        return listener, client_host, server_host
