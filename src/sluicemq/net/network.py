"""What connects clients and servers: sockets, or memory.

Servers ask a network for a listener and clients ask it for a channel; neither knows what carries
the bytes. So the same classes run over TCP and, in embedded brokers, tests and simulations, inside
one process. In memory bytes travel by `loop.call_soon`, so a call never re-enters its caller, and
arrive in order; nothing is lost and nothing is limited.

    network = MemoryNetwork()
    await network.listener(dispatcher).start("127.0.0.1", [10911])
    channel = await network.dial("127.0.0.1:10911")
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from sluicemq.config.keys import TlsConfig
from sluicemq.errors import ConnectionLostError
from sluicemq.model.ids import Host
from sluicemq.net.accept import Kept
from sluicemq.net.channel import DIAL_TIMEOUT_S, Channel, Dial, OnClose, OnRequest, dial
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.limits import SERVER_LIMITS, ServerLimits
from sluicemq.net.openssl import TlsAcceptor
from sluicemq.net.server import RemotingServer
from sluicemq.net.stream import (
    Accept,
    MemoryPorts,
    MemoryStreams,
    Stream,
    StreamServer,
    StreamUser,
    dial_stream,
)
from sluicemq.net.tls import Tls
from sluicemq.wire.frames import Pieces

OnPeer = Callable[[Peer], None]


class Listener(Protocol):
    """Serves a dispatcher; see `RemotingServer`, which is one."""

    dispatcher: Dispatcher
    ports: tuple[int, ...]
    kept: Kept

    def keep(self) -> Kept: ...

    async def start(self, host: str | None, ports: Sequence[int]) -> None:
        """Raises ConfigurationError when a port cannot be had; 0 is any free one."""
        ...

    async def close(self) -> None: ...


class StreamListener(Protocol):
    """Serves streams; see `StreamServer`, which is one."""

    ports: tuple[int, ...]

    async def start(self, host: str | None, ports: Sequence[int]) -> None:
        """Raises ConfigurationError when a port cannot be had; 0 is any free one."""
        ...

    async def close(self) -> None: ...


class Network(Protocol):
    """Makes listeners and channels that reach each other."""

    @property
    def dial(self) -> Dial:
        """Raises ConnectionLostError, RequestTimeoutError."""
        ...

    def listener(
        self,
        dispatcher: Dispatcher,
        *,
        on_disconnect: OnPeer | None = None,
        limits: ServerLimits = SERVER_LIMITS,
    ) -> Listener: ...

    def stream_listener(
        self, accept: Accept, *, limits: ServerLimits = SERVER_LIMITS
    ) -> StreamListener: ...

    async def dial_stream(
        self, address: str, user: StreamUser, *, timeout_s: float = DIAL_TIMEOUT_S
    ) -> Stream:
        """Raises ConnectionLostError, RequestTimeoutError."""
        ...


class Sockets:
    """TCP, with TLS for those who want it: `tls` for what is dialled, `served` for what is
    served (None: plain connections only)."""

    __slots__ = ("_served", "_tls", "dial")

    def __init__(self, tls: Tls | None = None, served: TlsConfig | None = None) -> None:
        self.dial: Dial = partial(dial, tls=tls)
        self._tls = tls
        self._served = None if served is None or served.tls_mode == "disabled" else served

    def listener(
        self,
        dispatcher: Dispatcher,
        *,
        on_disconnect: OnPeer | None = None,
        limits: ServerLimits = SERVER_LIMITS,
    ) -> RemotingServer:
        return RemotingServer(
            dispatcher, on_disconnect=on_disconnect, limits=limits, tls=self._acceptor()
        )

    def stream_listener(
        self, accept: Accept, *, limits: ServerLimits = SERVER_LIMITS
    ) -> StreamServer:
        return StreamServer(accept, limits=limits, tls=self._acceptor())

    async def dial_stream(
        self, address: str, user: StreamUser, *, timeout_s: float = DIAL_TIMEOUT_S
    ) -> Stream:
        return await dial_stream(address, user, timeout_s=timeout_s, tls=self._tls)

    def _acceptor(self) -> TlsAcceptor | None:
        return None if self._served is None else TlsAcceptor(self._served)


SOCKETS = Sockets()


def secured(network: Network, tls: Tls | None, served: TlsConfig | None = None) -> Network:
    """The network with TLS. Only sockets have it: what stays in one process needs none, and a
    network that was made with TLS keeps its own."""
    return Sockets(tls, served) if network is SOCKETS else network


_CLIENT_PORT_FIRST = 40_000


L = TypeVar("L", bound=MemoryPorts)


class _Wire:
    """One direction: bytes written here arrive at `deliver` in the next turn of the loop."""

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


class _Link:
    """A served connection: the server's Pieces and Peer on one end, a Channel on the other."""

    def __init__(
        self, listener: "MemoryListener", channel: Channel, remote: Host, local: Host
    ) -> None:
        self._listener = listener
        self._channel = channel
        self._to_client = _Wire(channel.received, self.lose)
        self.peer = Peer(self._to_client, remote, local)
        dispatcher = listener.dispatcher
        serve = partial(dispatcher.serve, Pieces(dispatcher.frame_bytes_max), self.peer)
        self._to_server = _Wire(serve, self.lose)
        listener.links.add(self)
        channel.connected(self._to_server, remote)

    def lose(self) -> None:
        """The connection is gone on both ends."""
        if self not in self._listener.links:
            return
        self._listener.links.discard(self)
        self._to_client.closed = self._to_server.closed = True
        self.peer.lost()
        if self._listener.on_disconnect is not None:
            self._listener.on_disconnect(self.peer)
        self._channel.disconnected(None)


class MemoryListener(MemoryPorts):
    """Serves a dispatcher at ports of a memory network."""

    def __init__(
        self, network: "MemoryNetwork", dispatcher: Dispatcher, on_disconnect: OnPeer | None
    ) -> None:
        super().__init__(network.listeners)
        self.dispatcher = dispatcher
        self.on_disconnect = on_disconnect
        self.links: set[_Link] = set()

    async def close(self) -> None:
        """Answers that were written are on their way before the connections end."""
        await asyncio.sleep(0)
        self.stop_listening()
        for link in tuple(self.links):
            link.lose()


class MemoryNetwork:
    """Addresses are any texts `host:port`; hosts have to be IP addresses when they are stored."""

    def __init__(self) -> None:
        self.listeners: dict[str, Any] = {}
        self._port = _CLIENT_PORT_FIRST

    def listener(
        self,
        dispatcher: Dispatcher,
        *,
        on_disconnect: OnPeer | None = None,
        limits: ServerLimits = SERVER_LIMITS,
    ) -> MemoryListener:
        del limits  # nothing is limited here
        return MemoryListener(self, dispatcher, on_disconnect)

    async def dial(
        self,
        address: str,
        *,
        timeout_s: float = 0.0,
        on_request: OnRequest | None = None,
        on_close: OnClose | None = None,
    ) -> Channel:
        """Raises ConnectionLostError when nobody serves there."""
        del timeout_s  # nothing here takes time
        listener, remote, local = self._find(address, MemoryListener)
        channel = Channel(address, on_request=on_request, on_close=on_close)
        _Link(listener, channel, remote, local)
        return channel

    def stream_listener(
        self, accept: Accept, *, limits: ServerLimits = SERVER_LIMITS
    ) -> MemoryStreams:
        del limits
        return MemoryStreams(self.listeners, accept)

    async def dial_stream(
        self, address: str, user: StreamUser, *, timeout_s: float = 0.0
    ) -> Stream:
        """Raises ConnectionLostError when nobody serves there."""
        del timeout_s
        listener, remote, local = self._find(address, MemoryStreams)
        return listener.dialled(user, remote, local)

    def _find(self, address: str, kind: type[L]) -> tuple[L, Host, Host]:
        """Who serves there, and both addresses of a new connection to it."""
        listener = self.listeners.get(address)
        if not isinstance(listener, kind):
            raise ConnectionLostError(f"Nobody serves {address} in this process.")
        self._port += 1
        host, _, port = address.rpartition(":")
        local = Host(host if host[:1].isdigit() or ":" in host else "127.0.0.1", int(port or 0))
        return listener, Host("127.0.0.1", self._port), local
