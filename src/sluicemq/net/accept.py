"""Accepting connections, for any protocol: TLS, limits, sweeps and protected mode.

    socket -> AcceptedConnection.data_received -> the protocol of a subclass -> one write

An `AcceptedConnection` is one connection. `server.Connection` speaks the remoting protocol on it,
`http2.Http2Connection` speaks HTTP/2. Each connection has these limits (see also `limits`):

- Bytes for each iteration of the event loop. Above `BYTES_PER_ITERATION_MAX` reading pauses until
  the next iteration, so that one greedy sender does not starve the others. (uvloop would read up to
  8 MiB at once.)
- Its write buffer. While a client does not read its responses, the server does not read its
  requests.
- Its share of time. When the budget of a scheduling round is used up, requests without a fast
  handler wait for a later round, whichever connection used the budget (`limits.FairScheduler`).
- Silence. After `idle_timeout_s` without a byte in either direction the connection is closed. A
  periodic sweep over all connections counts, so that no connection needs a timer of its own.
- Time for a frame. The connection is closed if a frame is not whole `frame_timeout_s` after its
  first byte, or if the unfinished frames of all connections exceed `pending_bytes_max`.
- The number of connections: of one address (loopback is exempt), and of the whole server as many as
  the process has file descriptors beside those for its files (`files.descriptors`).

Protected mode: a server without configured access serves clients on its own machine only. Clients
on other machines receive a response to every request that says how to open the server. After
`limits.REFUSALS_MAX` requests their connection is closed. The reasons are in design/0011.

TLS starts on the same ports (spec/remoting.md §1). With a `TlsAcceptor`, a `TlsDetector` receives
the first byte of a connection and decides whether it uses TLS (`openssl.py`).
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
from sluicemq.net.dispatch import UNKNOWN_HOST, Peer, host_from_socket_name
from sluicemq.net.limits import (
    AddressLimit,
    FairScheduler,
    ServerLimits,
    UnfinishedBytes,
)
from sluicemq.net.openssl import TlsAcceptor, TlsDetector, TlsStream, UpgradableConnection

log = logging.getLogger(__name__)

ListeningSockets = Mapping[int, socket.socket]
"""Listening sockets by port, which a closing server leaves to the next one."""

PROTECTED_MODE_FIX = (
    "Set bindAddress (or --host) there, 0.0.0.0 for all addresses, to serve every client that can "
    "reach it; aclEnable = true to serve clients that have an account; or "
    "sluiceProtectedMode = false"
)
PROTECTED_MODE_REFUSAL = (
    "This server serves only clients on its own machine (protected mode), because neither an "
    f"address to listen at nor access control is configured. {PROTECTED_MODE_FIX}."
)


def log_protected_mode(config: ServerConfig) -> None:
    """Log a warning if a server with this configuration is in protected mode."""
    if config.is_protected:
        log.warning(
            "protected mode: only clients on this machine are served, all others are refused "
            "(in a container: all clients outside of it). %s",
            PROTECTED_MODE_FIX.replace(" there", ""),
        )


def is_on_this_machine(peer: Peer) -> bool:
    """Return whether the client runs on this machine.

    That is so if its address is a loopback address, equals the address at which it reached the
    server, or is unknown (a Unix socket).
    """
    if peer.remote == UNKNOWN_HOST:
        return True
    return is_loopback(peer.remote.address) or peer.remote.address == peer.local.address


BYTES_PER_ITERATION_MAX: Final = 256 * 1024
"""One full read of uvloop (250 kB) or asyncio (256 KiB): about 600 sends of 128 B."""
SWEEPS_PER_TIMEOUT: Final = 4
CLOSE_TIMEOUT_S: Final = 1.0
LAST_RESPONSES_S: Final = 1.0
"""After a bad frame, the time in which requests before it may still be answered."""
BACKLOG: Final = 1024
"""Connections that the system keeps until they are accepted."""
ACCEPTS_PER_ITERATION: Final = 16
"""Asyncio accepts at most as many connections in one iteration of its loop as the backlog that it
is given, and each takes about 0.2 ms. So it is given this number, and the socket gets BACKLOG."""

OnPeer = Callable[[Peer], None]


class AcceptedConnection(UpgradableConnection):
    """One accepted connection. A subclass implements the protocol that is spoken on it."""

    __slots__ = (
        "_counted_as_trusted",
        "_counted_bytes",
        "_deferred_frames",
        "_is_ending",
        "_is_over_budget",
        "_is_writing_paused",
        "_iteration_bytes",
        "_loop",
        "_scheduler",
        "_server",
        "_transport",
        "is_refused",
        "peer",
        "remote_address",
        "sweeps_since_frame",
    )

    def __init__(self, server: "Server") -> None:
        """Create a connection of `server`. `connection_made` gives it a transport and a peer."""
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._scheduler = server.scheduler
        self._deferred_frames: bytes | None = None  # whole frames that wait for a later round
        self._iteration_bytes = 0  # received since reading paused last
        self._is_over_budget = False  # reading pauses until the next iteration of the event loop
        self._is_writing_paused = False  # the client does not read its responses
        self._counted_bytes = 0  # how many bytes `server.unfinished` counts for this connection
        self._counted_as_trusted = False  # and whether it counts them as those of a trusted client
        self._is_ending = False  # it will be closed, and nothing more is read
        self.sweeps_since_frame = 0
        """The number of sweeps since a frame became whole, while the client lets one wait."""
        self.is_refused = False
        """Whether protected mode refuses every request of this connection."""
        self._transport: asyncio.Transport
        self.remote_address: str
        """The IP address of the other end, also if its requests are those of another client."""
        self.peer: Peer

    # --------------------------------------------------- what a subclass implements: the protocol

    def _handle_data(self, data: bytes) -> None:
        """Handle bytes that the client sent."""
        raise NotImplementedError

    def _handle_frames(self, whole: bytes | None) -> None:
        """Handle the whole frames at the start of `whole`, and keep the bytes after them."""
        raise NotImplementedError

    @property
    def unfinished_bytes(self) -> int:
        """The number of bytes that are kept of frames that are not whole."""
        raise NotImplementedError

    # ---------------------------------------------------------------------- asyncio's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Create the peer, set options of the socket, and register the connection with its server.

        asyncio calls this. In protected mode, a client on another machine is marked as refused.
        """
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        self.peer = Peer(
            self._transport,
            host_from_socket_name(transport.get_extra_info("peername")),
            host_from_socket_name(transport.get_extra_info("sockname")),
        )
        self.remote_address = self.peer.remote.address
        if self._server.is_protected:
            self.peer.is_trusted = is_on_this_machine(self.peer)
            if not self.peer.is_trusted:
                self.is_refused = True
                self._server.log_once(self.peer, PROTECTED_MODE_REFUSAL, "refusing the requests of")
        sock = transport.get_extra_info("socket")
        descriptor = -1 if sock is None else sock.fileno()
        if sock is not None and sock.family != getattr(socket, "AF_UNIX", None):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport.set_write_buffer_limits(high=self._server.write_buffer_bytes_max)
        self._server.connection_opened(self, descriptor)

    def connection_lost(self, exc: Exception | None) -> None:
        self._count_unfinished(0)
        self.peer.connection_lost()
        self._server.connection_closed(self)

    def data_received(self, data: bytes) -> None:
        """Handle bytes from the client. Does nothing after the connection was closed.

        Reading pauses until the next iteration of the event loop after BYTES_PER_ITERATION_MAX
        bytes. While frames wait for a scheduling round, the bytes are kept behind them.
        """
        peer = self.peer
        if peer.closed or self._is_ending:
            return
        peer.idle_sweeps = 0
        self._iteration_bytes += len(data)
        if self._iteration_bytes > BYTES_PER_ITERATION_MAX:
            self._iteration_bytes = 0
            if not self._is_over_budget:
                self._is_over_budget = True
                self._transport.pause_reading()
                self._loop.call_soon(self._renew_budget)
        if self._deferred_frames is not None:
            self._deferred_frames += data
        else:
            self._handle_data(data)

    def pause_writing(self) -> None:
        self._is_writing_paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_writing_paused = False
        self._resume_reading()

    def set_transport(self, transport: TlsStream) -> None:
        self._transport = transport  # type: ignore[assignment]  # it has the methods used here
        self.peer.set_transport(transport)

    # ------------------------------------------------------------------------ waiting and limits

    def _defer_frames(self, frames: bytes) -> None:
        """Stop reading, and handle `frames` when the scheduler selects this connection."""
        self._deferred_frames = frames
        self._transport.pause_reading()
        self._scheduler.schedule_read(self.peer, self._handle_deferred_frames)

    def _handle_deferred_frames(self) -> None:
        """Handle the frames that were deferred, and resume reading. The scheduler calls this."""
        frames = self._deferred_frames
        self._deferred_frames = None
        if not self.peer.closed:
            self._resume_reading()
            self._handle_frames(frames)

    def _renew_budget(self) -> None:
        """Read again, in the next iteration of the event loop."""
        self._is_over_budget = False
        self._resume_reading()

    def _resume_reading(self) -> None:
        """Resume reading from the transport, unless there is still a reason to pause.

        Reasons are a used-up byte budget, a client that does not read its responses, frames that
        wait, and a connection that is about to close.
        """
        must_pause = (
            self._is_over_budget
            or self._is_writing_paused
            or self._is_ending
            or self._deferred_frames is not None
        )
        if not must_pause and not self._transport.is_closing():
            self._transport.resume_reading()

    def _count_unfinished(self, size: int) -> None:
        """Tell the server that this connection now holds `size` bytes of unfinished frames.

        The server counts these bytes of all connections. If they are too many, this connection is
        closed at once.
        """
        unfinished = self._server.unfinished
        added_bytes = size - self._counted_bytes
        if self._counted_as_trusted != self.peer.is_trusted:
            self._counted_as_trusted = self.peer.is_trusted
            unfinished.move_to_trusted(self._counted_bytes)
        self._counted_bytes = size
        has_room = unfinished.add(added_bytes, is_trusted=self._counted_as_trusted)
        if not has_room and not self.peer.closed:
            self._server.log_once(self.peer, "too many bytes of unfinished frames are waiting")
            self.abort()

    @property
    def is_waiting_for_client(self) -> bool:
        """Whether the client has sent a part of a frame and the server is ready for the rest."""
        return self.unfinished_bytes > 0 and not self._is_writing_paused

    # ----------------------------------------------------------------------------------- closing

    def close_with_reason(self, reason: str) -> None:
        """Log `reason`, and close the connection after sending what was written."""
        self._server.log_once(self.peer, reason)
        self.peer.close()

    def close_after_responses(self, reason: str) -> None:
        """Log `reason`, stop reading, and close the connection after LAST_RESPONSES_S seconds.

        Until then, responses to earlier requests may still be sent. Does nothing at a second call.
        """
        if not self._is_ending:
            self._is_ending = True
            self._server.log_once(self.peer, reason)
            self._transport.pause_reading()
            self._loop.call_later(LAST_RESPONSES_S, self.peer.close)

    def abort(self) -> None:
        """Close the connection at once. Bytes that were not sent yet are lost."""
        self.peer.closed = True
        self._transport.abort()


class Server:
    """Accepts connections on one or more ports. A subclass decides which protocol they speak."""

    def __init__(
        self,
        limits: ServerLimits,
        scheduler: FairScheduler,
        *,
        is_guarded: bool = False,
        on_disconnect: OnPeer | None = None,
        tls: TlsAcceptor | None = None,
    ) -> None:
        """Create a server; `start` opens its ports.

        `scheduler` shares the time of the event loop between connections. `is_guarded` means that
        access control decides about requests. `on_disconnect` is called with the peer of each
        connection that has ended. `tls` serves TLS on the same ports; None serves plain connections
        only.
        """
        self.tls = tls
        self.scheduler = scheduler
        self.write_buffer_bytes_max = limits.write_buffer_bytes_max
        self.is_protected = limits.is_protected
        self.unfinished = UnfinishedBytes(
            limits.pending_bytes_max, is_guarded=is_guarded or limits.is_protected
        )
        self.ports: tuple[int, ...] = ()
        self.inherited_sockets: ListeningSockets = {}
        """Sockets of an earlier server, by port. Set it before `start`, which listens with the
        socket of a port instead of opening a new one."""
        self._on_disconnect = on_disconnect
        self._addresses = AddressLimit(limits.connections_per_address_max)
        self._sweep_s = min(limits.idle_timeout_s, limits.frame_timeout_s) / SWEEPS_PER_TIMEOUT
        self._idle_sweeps_max = math.ceil(limits.idle_timeout_s / self._sweep_s)
        self._frame_sweeps_max = math.ceil(limits.frame_timeout_s / self._sweep_s)
        self._connections_max = limits.connections_max
        self._connections: dict[Peer, AcceptedConnection] = {}
        self._listeners: list[asyncio.Server] = []
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._logged: set[tuple[str, str]] = set()
        self._all_disconnected = asyncio.Event()
        self._is_closing = False

    def _new_connection(self) -> AcceptedConnection:
        """Return the protocol object for a connection that is being accepted."""
        raise NotImplementedError

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The peers of all open connections."""
        return tuple(self._connections)

    @property
    def connections(self) -> tuple[AcceptedConnection, ...]:
        """All open connections."""
        return tuple(self._connections.values())

    def duplicate_sockets(self) -> ListeningSockets:
        """Return duplicates of the listening sockets, by port.

        They stay open when this server closes. Clients that connect meanwhile wait for the next
        server, which gets the duplicates as `inherited_sockets`.
        """
        duplicates: dict[int, socket.socket] = {}
        for listener in self._listeners:
            for sock in listener.sockets:
                port = sock.getsockname()[1]
                duplicates[port] = sock.dup()
        return duplicates

    async def start(self, host: str | None, ports: Sequence[int]) -> None:
        """Listen on every port in `ports`, and set `self.ports` to their numbers.

        Port 0 stands for a free port. `host` None or "" means all addresses. Raise
        ConfigurationError if a port cannot be opened or a certificate cannot be used; then no port
        is open.
        """
        loop = asyncio.get_running_loop()
        tls = self.tls
        make_protocol: Callable[[], asyncio.Protocol] = self._new_connection
        if tls is not None:
            tls.start()
            make_protocol = lambda: TlsDetector(self._new_connection(), tls)  # noqa: E731 - one use
        opened_ports: list[int] = []
        for port in ports:
            try:
                listener = await self._open_listener(host, port, make_protocol)
            except OSError as error:
                await self.close()
                raise _make_listen_error(host, port, error) from error
            self._listeners.append(listener)
            opened_ports.append(listener.sockets[0].getsockname()[1])
        self.ports = tuple(opened_ports)
        self._sweep_timer = loop.call_later(self._sweep_s, self._abort_stale_connections)

    async def _open_listener(
        self, host: str | None, port: int, make_protocol: Callable[[], asyncio.Protocol]
    ) -> asyncio.Server:
        """Listen on a port. If there is an inherited socket for it, use that. Raise OSError.

        `make_protocol` makes the protocol of each accepted connection.
        """
        endpoint: dict[str, Any] = {"host": host or None, "port": port}
        inherited = self.inherited_sockets.get(port)
        if inherited is not None:
            endpoint = {"sock": inherited}
        listener = await asyncio.get_running_loop().create_server(
            make_protocol, **endpoint, backlog=ACCEPTS_PER_ITERATION
        )
        # asyncio accepts up to `backlog` connections in one iteration of the event loop. The queue
        # of the operating system is longer: it is set afterwards, by a duplicate of the socket.
        for sock in listener.sockets:
            with sock.dup() as duplicate:
                duplicate.listen(BACKLOG)
        return listener

    async def close(self) -> None:
        """Stop listening, close every connection, and wait until all are closed.

        Connections whose clients do not read what was written to them are aborted after
        CLOSE_TIMEOUT_S.
        """
        self._is_closing = True
        if self.tls is not None:
            self.tls.close()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        self.stop_listening()
        listeners = self._listeners
        self._listeners = []
        for peer in self.peers:
            peer.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.wait_disconnected()
        except TimeoutError:
            for connection in self.connections:
                connection.abort()
            await self.wait_disconnected()
        for listener in listeners:
            await listener.wait_closed()

    async def wait_disconnected(self) -> None:
        """Wait until no connection is open."""
        self._all_disconnected.clear()
        if self._connections:
            await self._all_disconnected.wait()

    def stop_listening(self) -> None:
        """Accept no further connections. Open connections go on."""
        for listener in self._listeners:
            listener.close()

    # -------------------------------------------------------------------- called by connections

    def connection_opened(self, connection: AcceptedConnection, descriptor: int) -> None:
        """Register an accepted connection. Abort it if it exceeds a limit or the server is closing.

        `descriptor` is the file descriptor of its socket, -1 if it is unknown.
        """
        excess = ""
        if descriptor >= descriptors.socket_descriptor_end():
            excess = descriptors.shortage_text()
        elif len(self._connections) >= self._connections_max:
            excess = f"there are {self._connections_max} connections, which is the limit"
        elif not self._is_closing and not self._addresses.acquire(connection.remote_address):
            excess = f"it exceeds the {self._addresses.count_max} that one address may have"
        if self._is_closing or excess:
            if not self._is_closing:
                self.log_once(connection.peer, excess)
            connection.abort()
            return
        self._connections[connection.peer] = connection

    def connection_closed(self, connection: AcceptedConnection) -> None:
        """Forget a connection that has ended, and call `on_disconnect` with its peer.

        Do nothing for a connection that was never registered because of a limit.
        """
        if self._connections.pop(connection.peer, None) is None:
            return  # `connection_opened` had aborted it
        self._addresses.release(connection.remote_address)
        if self._on_disconnect is not None:
            self._on_disconnect(connection.peer)
        if not self._connections:
            self._all_disconnected.set()

    def log_once(self, peer: Peer, reason: str, action: str = "closing the connection of") -> None:
        """Log `action`, the client and `reason`, once for each client address and kind of reason.

        Reasons are of the same kind if their first 40 characters are equal.
        """
        key = (peer.remote.address, reason[:40])
        if key not in self._logged and len(self._logged) < 1024:
            self._logged.add(key)
            log.warning("%s %s: %s", action, peer.remote, reason)

    def _abort_stale_connections(self) -> None:
        """Abort the connections that were silent, or left a frame unfinished, for too long.

        Each call schedules the next one. Times are counted in sweeps, so they are exact to a
        quarter of the shorter limit.
        """
        for peer, connection in tuple(self._connections.items()):
            peer.idle_sweeps += 1
            if connection.is_waiting_for_client:
                connection.sweeps_since_frame += 1
            else:
                connection.sweeps_since_frame = 0
            if peer.idle_sweeps > self._idle_sweeps_max:
                log.info("closing the connection of %s: it was silent for too long", peer.remote)
                connection.abort()
            elif connection.sweeps_since_frame > self._frame_sweeps_max:
                self.log_once(peer, "it left a frame unfinished for too long")
                connection.abort()
        loop = asyncio.get_running_loop()
        self._sweep_timer = loop.call_later(self._sweep_s, self._abort_stale_connections)


def _make_listen_error(host: str | None, port: int, error: OSError) -> ConfigurationError:
    """Make the error that explains why the server cannot listen on `port`, with a fix."""
    endpoint = f"{host or '*'}:{port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigurationError(
            f"Port {port} is already in use ({endpoint}).",
            fix="Stop the other process, or configure another port.",
        )
    if error.errno == errno.EACCES:
        return ConfigurationError(
            f"This process is not permitted to listen on port {port} ({endpoint}).",
            fix="Configure a port above 1023.",
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ConfigurationError(
            f"Cannot listen on {endpoint}: {error.strerror}.", fix=descriptors.FIX
        )
    return ConfigurationError(
        f"Cannot listen on {endpoint}: {error.strerror or error}.",
        fix="Configure an address of this machine.",
    )
