"""What connects clients and servers: a port with two makes, sockets and memory (`net.memory`).

Servers ask a network for a listener and clients ask it for a channel; neither knows what carries
the bytes. So the same classes run over TCP and, in tests, inside one process.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from sluicemq.net import dialer
from sluicemq.net.dialer import DIAL_TIMEOUT_S, Channel, OnClose, OnRequest
from sluicemq.net.dispatch import Dispatcher
from sluicemq.net.limits import PENDING_BYTES_MAX
from sluicemq.net.peer import Peer
from sluicemq.net.server import (
    CONNECTIONS_MAX,
    FRAME_TIMEOUT_S,
    IDLE_TIMEOUT_S,
    WRITE_BUFFER_BYTES_MAX,
    RemotingServer,
)
from sluicemq.net.tls import ServerTls, Tls
from sluicemq.net.tls_stream import Door

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

    async def dial(
        self,
        address: str,
        *,
        timeout_s: float = DIAL_TIMEOUT_S,
        on_request: OnRequest | None = None,
        on_close: OnClose | None = None,
    ) -> Channel:
        """Raises ConnectionLostError, RequestTimeoutError."""
        ...

    def listener(
        self,
        dispatcher: Dispatcher,
        *,
        on_disconnect: OnPeer | None = None,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        connections_max: int = CONNECTIONS_MAX,
        write_buffer_bytes_max: int = WRITE_BUFFER_BYTES_MAX,
        connections_per_address_max: int = 0,
        frame_timeout_s: float = FRAME_TIMEOUT_S,
        pending_bytes_max: int = PENDING_BYTES_MAX,
    ) -> Listener: ...


class Sockets:
    """TCP, with TLS for those who want it: `tls` for what is dialled, `server_tls` for what is
    served (None: plain connections only)."""

    __slots__ = ("_server_tls", "_tls")

    def __init__(self, tls: Tls | None = None, server_tls: ServerTls | None = None) -> None:
        self._tls = tls
        self._server_tls = server_tls

    async def dial(
        self,
        address: str,
        *,
        timeout_s: float = DIAL_TIMEOUT_S,
        on_request: OnRequest | None = None,
        on_close: OnClose | None = None,
    ) -> Channel:
        return await dialer.dial(
            address, timeout_s=timeout_s, on_request=on_request, on_close=on_close, tls=self._tls
        )

    def listener(
        self,
        dispatcher: Dispatcher,
        *,
        on_disconnect: OnPeer | None = None,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        connections_max: int = CONNECTIONS_MAX,
        write_buffer_bytes_max: int = WRITE_BUFFER_BYTES_MAX,
        connections_per_address_max: int = 0,
        frame_timeout_s: float = FRAME_TIMEOUT_S,
        pending_bytes_max: int = PENDING_BYTES_MAX,
    ) -> RemotingServer:
        server_tls = self._server_tls
        if server_tls is not None and server_tls.mode == "disabled":
            server_tls = None
        return RemotingServer(
            dispatcher,
            on_disconnect=on_disconnect,
            idle_timeout_s=idle_timeout_s,
            connections_max=connections_max,
            write_buffer_bytes_max=write_buffer_bytes_max,
            connections_per_address_max=connections_per_address_max,
            frame_timeout_s=frame_timeout_s,
            pending_bytes_max=pending_bytes_max,
            tls=None if server_tls is None else Door(server_tls),
        )


SOCKETS = Sockets()


def secured(network: Network, tls: Tls | None, server_tls: ServerTls | None = None) -> Network:
    """The network with TLS. Only sockets have it: what stays in one process needs none, and a
    network that was made with TLS keeps its own."""
    return Sockets(tls, server_tls) if network is SOCKETS else network
