"""Accepting connections, whatever is spoken on them: TLS, limits, sweeps, protected mode.

    socket -> Accepted.data_received -> what is spoken there -> one write

An `Accepted` is one connection; `server.Connection` speaks the remoting protocol on it. These bound
it (and see `limits`):

- a budget of bytes a turn: above it reading pauses until the next iteration of the loop, so that
  one greedy sender does not starve the rest (uvloop would read up to 8 MiB at once);
- its write buffer: a client that does not read its answers is not read from either;
- a share of the time: requests that are not quick wait for one of the next turns when this one has
  had its budget, whichever connection used it (`limits.Shares`);
- silence: after `idle_timeout_s` without a byte in either direction it is closed. A sweep counts;
  there is no timer a connection;
- time for a frame: one that is not whole `frame_timeout_s` after its first byte closes it, as do
  unfinished frames of all connections together above `pending_bytes_max`;
- neighbours: so many connections an address, loopback aside; and in all as many as the process has
  descriptors for, beside its files (see `descriptors`).

Protected mode: a server that nobody has opened answers its own machine alone. Clients on other
machines get an answer to every request, a sentence that names what to do, until the connection is
closed for having asked too often. The reasons: design/0011.

TLS starts on the same ports (spec/remoting.md §1): with a `TlsAcceptor` a connection stands behind
`FirstByte` until its first byte tells, see `openssl.py`.
"""

import asyncio
import errno
import logging
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sluicemq.config.keys import ServerConfig
from sluicemq.errors import ConfigurationError
from sluicemq.files import descriptors
from sluicemq.model.addresses import is_loopback
from sluicemq.net.dispatch import NOWHERE, Peer, host_of
from sluicemq.net.limits import (
    AddressLimit,
    Pending,
    ServerLimits,
    Shares,
)
from sluicemq.net.openssl import FirstByte, Inner, TlsAcceptor, TlsStream

log = logging.getLogger(__name__)

Kept = Mapping[int, socket.socket]
"""Listening sockets by port, for a server that starts where another one closes."""

FIXES = (
    "Set bindAddress (or --host) there, 0.0.0.0 for all addresses, to serve everybody who reaches "
    "it; aclEnable = true to serve those who have an account; or sluiceProtectedMode = false"
)
REFUSAL = (
    "This server answers clients on its own machine alone (protected mode), because neither an "
    f"address to listen at nor access control is configured. {FIXES}."
)


def warn_of_protection(config: ServerConfig) -> None:
    """Says at the start what refused clients will be told: nobody shall look for it in vain."""
    if config.is_protected:
        log.warning(
            "protected mode: only clients on this machine are served, others (in a container all "
            "of outside) are refused. %s", FIXES.replace(" there", ""),
        )  # fmt: skip


def is_local(peer: Peer) -> bool:
    """Is the other end on this machine? Who calls an address of its own comes from that."""
    if peer.remote == NOWHERE:  # a Unix socket
        return True
    return is_loopback(peer.remote.address) or peer.remote.address == peer.local.address


TURN_BYTES_MAX: Final = 256 * 1024
"""One full read of uvloop (250 kB) or asyncio (256 KiB): about 600 sends of 128 B."""
SWEEPS_PER_TIMEOUT: Final = 4
CLOSE_TIMEOUT_S: Final = 1.0
ANSWERS_S: Final = 1.0
"""Time for the answers to requests before a broken frame, which ends its connection."""
BACKLOG: Final = 1024
"""Connections that the system keeps until they are accepted."""
ACCEPTED_A_TURN: Final = 16
"""Asyncio accepts at most as many connections in one iteration of its loop as the backlog that it
is given, and each takes about 0.2 ms. So it is given this number, and the socket gets BACKLOG."""

OnPeer = Callable[[Peer], None]


class Accepted(Inner):
    """One accepted socket."""

    __slots__ = (
        "_blocked", "_held", "_is_ending", "_is_trusted", "_loop", "_resting", "_server", "_shares",
        "_transport", "_turn_bytes", "_waiting", "address", "frame_sweeps", "is_refused", "peer",
    )  # fmt: skip

    def __init__(self, server: "Server") -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._shares = server.shares
        self._waiting: bytes | None = None  # whole frames, for a later turn
        self._turn_bytes = 0
        self._resting = False  # over its budget until the next turn
        self._blocked = False  # its answers do not leave
        self._held = 0  # bytes that count as pending
        self._is_ending = False  # refused, and not closed yet
        self._is_trusted = False  # as what they count
        self.frame_sweeps = 0  # since a frame became whole
        self.is_refused = False
        """Protected mode: every request is refused, and says why."""
        self._transport: asyncio.Transport
        self.address: str
        """Of the other end itself, whomever it speaks for: it counts by that."""
        self.peer: Peer

    # ------------------------------------------------------------------- what is spoken here

    def _received(self, data: bytes) -> None:
        """Bytes came in."""
        raise NotImplementedError

    def _serve(self, whole: bytes | None) -> None:
        """Whole frames, and perhaps the begin of one."""
        raise NotImplementedError

    @property
    def unfinished_bytes(self) -> int:
        """What is here of frames that are not whole."""
        raise NotImplementedError

    # ------------------------------------------------------------------- what the socket tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        self.peer = Peer(
            self._transport,
            host_of(transport.get_extra_info("peername")),
            host_of(transport.get_extra_info("sockname")),
        )
        self.address = self.peer.remote.address
        if self._server.is_protected:
            self.peer.is_trusted = is_local(self.peer)
            if not self.peer.is_trusted:
                self.is_refused = True
                self._server.complain(self.peer, REFUSAL, "refusing the requests of")
        connected = transport.get_extra_info("socket")
        number = -1 if connected is None else connected.fileno()
        if connected is not None and connected.family != getattr(socket, "AF_UNIX", None):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport.set_write_buffer_limits(high=self._server.write_buffer_bytes_max)
        self._server.opened(self, number)

    def connection_lost(self, exc: Exception | None) -> None:
        self._hold(0)
        self.peer.lost()
        self._server.lost(self)

    def data_received(self, data: bytes) -> None:
        peer = self.peer
        if peer.closed or self._is_ending:
            return
        peer.idle_sweeps = 0
        self._turn_bytes += len(data)
        if self._turn_bytes > TURN_BYTES_MAX:
            self._turn_bytes = 0
            if not self._resting:
                self._resting = True
                self._transport.pause_reading()
                self._loop.call_soon(self._rested)
        if self._waiting is not None:
            self._waiting += data
        else:
            self._received(data)

    def pause_writing(self) -> None:
        self._blocked = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._blocked = False
        self._listen()

    def carry(self, carrier: TlsStream) -> None:
        """Bytes go through TLS from now on."""
        self._transport = carrier  # type: ignore[assignment]  # it has what is used here
        self.peer.carry(carrier)

    # ------------------------------------------------------------------------- turns and bounds

    def _wait(self, whole: bytes) -> None:
        """These frames are served when it is this connection's turn again."""
        self._waiting = whole
        self._transport.pause_reading()
        self._shares.wait(self.peer, self._go_on)

    def _go_on(self) -> None:
        whole, self._waiting = self._waiting, None
        if not self.peer.closed:
            self._listen()
            self._serve(whole)

    def _rested(self) -> None:
        self._resting = False
        self._listen()

    def _listen(self) -> None:
        is_kept = self._resting or self._blocked or self._is_ending or self._waiting is not None
        if not is_kept and not self._transport.is_closing():
            self._transport.resume_reading()

    def _hold(self, size: int) -> None:
        """Of an unfinished frame so many bytes are here; too many end the connection."""
        pending, more = self._server.pending, size - self._held
        if self._is_trusted != self.peer.is_trusted:
            self._is_trusted = self.peer.is_trusted
            pending.trust(self._held)
        self._held = size
        if not pending.change(more, is_trusted=self._is_trusted) and not self.peer.closed:
            self._server.complain(self.peer, "too many bytes of unfinished frames are waiting")
            self.abort()

    @property
    def is_late(self) -> bool:
        """Does a frame stay unfinished, and not because we do not read?"""
        return self.unfinished_bytes > 0 and not self._blocked

    def refuse(self, text: str) -> None:
        """Log why, and close the connection."""
        self._server.complain(self.peer, text)
        self.peer.close()

    def refuse_after_answers(self, text: str) -> None:
        """Log why, read nothing more, and close the connection after ANSWERS_S: until then the
        requests that came before may be answered."""
        if not self._is_ending:
            self._is_ending = True
            self._server.complain(self.peer, text)
            self._transport.pause_reading()
            self._loop.call_later(ANSWERS_S, self.peer.close)

    def abort(self) -> None:
        """Close at once; what was not sent is lost."""
        self.peer.closed = True
        self._transport.abort()


class Server:
    """Accepts connections on one or more ports, for what one protocol makes of them."""

    def __init__(
        self,
        limits: ServerLimits,
        shares: Shares,
        *,
        is_guarded: bool = False,
        on_disconnect: OnPeer | None = None,
        tls: TlsAcceptor | None = None,
    ) -> None:
        """`is_guarded`: requests need rights. `tls`: None serves plain connections only."""
        self.tls = tls
        self.shares = shares
        self.write_buffer_bytes_max = limits.write_buffer_bytes_max
        self.is_protected = limits.is_protected
        self.pending = Pending(
            limits.pending_bytes_max, is_guarded=is_guarded or limits.is_protected
        )
        self.ports: tuple[int, ...] = ()
        self.kept: Kept = {}
        """To be set before the start: it listens with these where it is to listen there."""
        self._on_disconnect = on_disconnect
        self._addresses = AddressLimit(limits.connections_per_address_max)
        self._sweep_s = min(limits.idle_timeout_s, limits.frame_timeout_s) / SWEEPS_PER_TIMEOUT
        self._idle_sweeps_max = math.ceil(limits.idle_timeout_s / self._sweep_s)
        self._frame_sweeps_max = math.ceil(limits.frame_timeout_s / self._sweep_s)
        self._connections_max = limits.connections_max
        self._connections: dict[Peer, Accepted] = {}
        self._listeners: list[asyncio.Server] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._complained: set[tuple[str, str]] = set()
        self._gone = asyncio.Event()
        self._closing = False

    def _accepted(self) -> Accepted:
        """A connection that is about to be made."""
        raise NotImplementedError

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Everyone who is connected."""
        return tuple(self._connections)

    @property
    def connections(self) -> tuple[Accepted, ...]:
        """Theirs."""
        return tuple(self._connections.values())

    def keep(self) -> Kept:
        """Its listening sockets once more: they stay open when this server closes, and connections
        wait for the next one that starts with them."""
        sockets = [one.dup() for listener in self._listeners for one in listener.sockets]
        return {one.getsockname()[1]: one for one in sockets}

    async def start(self, host: str | None, ports: Sequence[int]) -> None:
        """Listen on every port; 0 means a free one (see `ports` afterwards).

        Raises ConfigurationError when a port cannot be had, or a certificate cannot be used; then
        none is open.
        """
        loop, tls = asyncio.get_running_loop(), self.tls
        accept: Callable[[], asyncio.Protocol] = self._accepted
        if tls is not None:
            tls.open()
            accept = lambda: FirstByte(self._accepted(), tls)  # noqa: E731
        found: list[int] = []
        for port in ports:
            try:
                kept = self.kept.get(port)
                where: dict[str, Any] = {"host": host or None, "port": port}
                if kept is not None:
                    where = {"sock": kept}
                listener = await loop.create_server(accept, **where, backlog=ACCEPTED_A_TURN)
                for one in listener.sockets:
                    with one.dup() as listening:
                        listening.listen(BACKLOG)
            except OSError as error:
                await self.close()
                raise _cannot_listen(host, port, error) from error
            self._listeners.append(listener)
            found.append(listener.sockets[0].getsockname()[1])
        self.ports = tuple(found)
        self._sweeper = loop.call_later(self._sweep_s, self._sweep)

    async def close(self) -> None:
        """Stop listening, close every connection; returns when all are closed."""
        self._closing = True
        if self.tls is not None:
            self.tls.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        self.stop_listening()
        listeners, self._listeners = self._listeners, []
        for peer in self.peers:
            peer.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.gone()
        except TimeoutError:  # clients that do not take what was written to them
            for connection in self.connections:
                connection.abort()
            await self.gone()
        for listener in listeners:
            await listener.wait_closed()

    async def gone(self) -> None:
        """Returns when all connections are closed."""
        self._gone.clear()
        if self._connections:
            await self._gone.wait()

    def stop_listening(self) -> None:
        """Accept no connection any more."""
        for listener in self._listeners:
            listener.close()

    # ------------------------------------------------------------------ told by connections

    def opened(self, connection: Accepted, number: int) -> None:
        """A connection was accepted, its descriptor is `number`; one too many or too late is
        closed at once."""
        excess = ""
        if number >= descriptors.socket_descriptor_end():
            excess = descriptors.shortage_text()
        elif len(self._connections) >= self._connections_max:
            excess = f"there are {self._connections_max} connections, which is the limit"
        elif not self._closing and not self._addresses.enter(connection.address):
            excess = f"it is more than the {self._addresses.max} that one address may have"
        if self._closing or excess:
            if not self._closing:
                self.complain(connection.peer, excess)
            connection.abort()
            return
        self._connections[connection.peer] = connection

    def lost(self, connection: Accepted) -> None:
        """A connection is gone."""
        if self._connections.pop(connection.peer, None) is None:
            return  # it was one too many
        self._addresses.leave(connection.address)
        if self._on_disconnect is not None:
            self._on_disconnect(connection.peer)
        if not self._connections:
            self._gone.set()

    def complain(self, peer: Peer, text: str, what: str = "closing the connection of") -> None:
        """Log why a connection is not served: once for each kind and address."""
        key = (peer.remote.address, text[:40])
        if key not in self._complained and len(self._complained) < 1024:
            self._complained.add(key)
            log.warning("%s %s: %s", what, peer.remote, text)

    def _sweep(self) -> None:
        for peer, connection in tuple(self._connections.items()):
            peer.idle_sweeps += 1
            connection.frame_sweeps = connection.frame_sweeps + 1 if connection.is_late else 0
            if peer.idle_sweeps > self._idle_sweeps_max:
                log.info("closing the connection of %s: silent for too long", peer.remote)
                connection.abort()
            elif connection.frame_sweeps > self._frame_sweeps_max:
                self.complain(peer, "a frame of it does not become whole")
                connection.abort()
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(self._sweep_s, self._sweep)


def _cannot_listen(host: str | None, port: int, error: OSError) -> ConfigurationError:
    where = f"{host or '*'}:{port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigurationError(
            f"Port {port} is in use already ({where}).",
            fix="Stop the other process, or configure another port.",
        )
    if error.errno == errno.EACCES:
        return ConfigurationError(
            f"Port {port} needs rights that this process does not have ({where}).",
            fix="Configure a port above 1023.",
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ConfigurationError(
            f"Cannot listen on {where}: {error.strerror}.", fix=descriptors.FIX
        )
    return ConfigurationError(
        f"Cannot listen on {where}: {error.strerror or error}.",
        fix="Configure an address of this machine.",
    )
