"""What connects clients and servers: a port with two makes, sockets and memory (`net.memory`).

Servers ask a network for a listener and clients ask it for a channel; neither knows what carries
the bytes. So the same classes run over TCP and, in tests, inside one process.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from sluicemq.net import channel as dialer
from sluicemq.net.channel import DIAL_TIMEOUT_S, Channel, OnClose, OnRequest
from sluicemq.net.dispatch import Dispatcher
from sluicemq.net.limits import SERVER_LIMITS, ServerLimits
from sluicemq.net.peer import Peer
from sluicemq.net.server import RemotingServer
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
        limits: ServerLimits = SERVER_LIMITS,
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
        limits: ServerLimits = SERVER_LIMITS,
    ) -> RemotingServer:
        server_tls = self._server_tls
        if server_tls is not None and server_tls.mode == "disabled":
            server_tls = None
        return RemotingServer(
            dispatcher,
            on_disconnect=on_disconnect,
            limits=limits,
            tls=None if server_tls is None else Door(server_tls),
        )


SOCKETS = Sockets()


def secured(network: Network, tls: Tls | None, server_tls: ServerTls | None = None) -> Network:
    """The network with TLS. Only sockets have it: what stays in one process needs none, and a
    network that was made with TLS keeps its own."""
    return Sockets(tls, server_tls) if network is SOCKETS else network
