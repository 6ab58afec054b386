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
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from sluicemq.config.keys import TlsConfig
from sluicemq.errors import ConfigurationError, ConnectionLostError
from sluicemq.model.ids import Host
from sluicemq.net.channel import Channel, Dial, OnClose, OnRequest, dial
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.limits import SERVER_LIMITS, ServerLimits
from sluicemq.net.openssl import TlsAcceptor
from sluicemq.net.server import RemotingServer
from sluicemq.net.tls import Tls
from sluicemq.wire.frames import Pieces

OnPeer = Callable[[Peer], None]


class Listener(Protocol):
    """Serves a dispatcher; see `RemotingServer`, which is one."""

    dispatcher: Dispatcher
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


class Sockets:
    """TCP, with TLS for those who want it: `tls` for what is dialled, `served` for what is
    served (None: plain connections only)."""

    __slots__ = ("_served", "dial")

    def __init__(self, tls: Tls | None = None, served: TlsConfig | None = None) -> None:
        self.dial: Dial = partial(dial, tls=tls)
        self._served = None if served is None or served.tls_mode == "disabled" else served

    def listener(
        self,
        dispatcher: Dispatcher,
        *,
        on_disconnect: OnPeer | None = None,
        limits: ServerLimits = SERVER_LIMITS,
    ) -> RemotingServer:
        tls = None if self._served is None else TlsAcceptor(self._served)
        return RemotingServer(dispatcher, on_disconnect=on_disconnect, limits=limits, tls=tls)


SOCKETS = Sockets()


def secured(network: Network, tls: Tls | None, served: TlsConfig | None = None) -> Network:
    """The network with TLS. Only sockets have it: what stays in one process needs none, and a
    network that was made with TLS keeps its own."""
    return Sockets(tls, served) if network is SOCKETS else network


_CLIENT_PORT_FIRST = 40_000
_SERVER_PORTS = itertools.cycle(range(20_000, 40_000))
"""Of the process, so that two networks do not share an address: clients remember addresses."""


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


class MemoryListener:
    """Serves a dispatcher at ports of a memory network."""

    def __init__(
        self, network: "MemoryNetwork", dispatcher: Dispatcher, on_disconnect: OnPeer | None
    ) -> None:
        self.dispatcher = dispatcher
        self.on_disconnect = on_disconnect
        self.ports: tuple[int, ...] = ()
        self.links: set[_Link] = set()
        self._network = network
        self._addresses: tuple[str, ...] = ()

    async def start(self, host: str | None, ports: Sequence[int]) -> None:
        found = tuple(port or next(_SERVER_PORTS) for port in ports)
        addresses = tuple(f"{host or '127.0.0.1'}:{port}" for port in found)
        for port, address in zip(found, addresses, strict=True):
            if address in self._network.listeners:
                raise ConfigurationError(
                    f"Port {port} is in use already in this memory network.",
                    cure="Close what serves it, or use port 0.",
                )
        self.ports, self._addresses = found, addresses
        self._network.listeners.update(dict.fromkeys(addresses, self))

    async def close(self) -> None:
        """Answers that were written are on their way before the connections end."""
        await asyncio.sleep(0)
        for address in self._addresses:
            self._network.listeners.pop(address, None)
        for link in tuple(self.links):
            link.lose()


class MemoryNetwork:
    """Addresses are any texts `host:port`; hosts have to be IP addresses when they are stored."""

    def __init__(self) -> None:
        self.listeners: dict[str, MemoryListener] = {}
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
        listener = self.listeners.get(address)
        if listener is None:
            raise ConnectionLostError(f"Nobody serves {address} in this process.")
        self._port += 1
        host, _, port = address.rpartition(":")
        channel = Channel(address, on_request=on_request, on_close=on_close)
        local = Host(host if host[:1].isdigit() or ":" in host else "127.0.0.1", int(port or 0))
        _Link(listener, channel, Host("127.0.0.1", self._port), local)
        return channel
