"""Byte streams for protocols that are not requests and responses, over sockets or in memory.

A `ByteStream` is a `Peer`: it has the address of the other end, `write`, `close`, and the number of
bytes that were written and not sent yet. A `StreamProtocol` receives, in the event loop, what
happens on the stream. A protocol with much to write stops when `unsent_bytes` exceeds
HIGH_WATER_BYTES, and continues when its `resume_writing` is called, as with asyncio's transports.

The side that connects must send first. Its protocol is created only with its first byte, after the
TLS handshake if the connection has one. The limits of `accept` apply before and after: number of
connections, silence, and protected mode (which closes the connection, because a stream has no
response with which to refuse).
"""

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.model.ids import Host
from sluicemq.net.accept import AcceptedConnection, ListeningSockets, Server
from sluicemq.net.channel import DIAL_TIMEOUT_S, connect_protocol
from sluicemq.net.dispatch import Peer, host_from_socket_name
from sluicemq.net.limits import NULL_SCHEDULER, ServerLimits
from sluicemq.net.openssl import TlsAcceptor
from sluicemq.net.tls import Tls

log = logging.getLogger(__name__)

HIGH_WATER_BYTES: Final = 1024 * 1024
LOW_WATER_BYTES: Final = HIGH_WATER_BYTES // 4
_FREE_MEMORY_PORTS: Final = itertools.cycle(range(20_000, 40_000))
"""The next free port of any memory network. It is shared by all networks of the process, so that
two networks never use the same address: clients remember addresses."""

ByteStream = Peer


class StreamProtocol(Protocol):
    """The code that uses a byte stream; its methods are called in the event loop."""

    def data_received(self, data: bytes) -> None:
        """Handle bytes that arrived. A SluiceError raised here is logged and closes the stream."""

    def resume_writing(self) -> None:
        """Write on: `unsent_bytes` has fallen to LOW_WATER_BYTES or less."""

    def connection_lost(self) -> None:
        """Clean up, because the connection is gone. Called once, whichever side closed it."""


StreamProtocolFactory = Callable[[ByteStream], StreamProtocol]
"""Return the protocol for an accepted stream whose first bytes have arrived. A SluiceError raised
here is logged and closes the stream."""


class _AcceptedStream(AcceptedConnection):
    """An accepted byte stream over a socket."""

    __slots__ = ("_accept", "_protocol")

    def __init__(self, server: "StreamServer") -> None:
        super().__init__(server)
        self._accept = server.accept
        self._protocol: StreamProtocol | None = None

    @property
    def unfinished_bytes(self) -> int:
        return 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.is_refused:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._protocol is not None:
            self._protocol.connection_lost()

    def _handle_data(self, data: bytes) -> None:
        """Pass `data` to the protocol of the stream. The first bytes create the protocol.

        A SluiceError closes the connection.
        """
        try:
            if self._protocol is None:
                self._protocol = self._accept(self.peer)
            self._protocol.data_received(data)
        except SluiceError as error:
            self.close_with_reason(str(error))

    def pause_writing(self) -> None:
        """Do nothing: bytes on a stream are not responses, so reading goes on."""

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()


class StreamServer(Server):
    """A server for byte streams over sockets."""

    def __init__(
        self,
        accept: StreamProtocolFactory,
        *,
        limits: ServerLimits,
        tls: TlsAcceptor | None = None,
    ) -> None:
        """Create a server; `start` opens its ports.

        `accept` returns the protocol of each new stream. `tls` serves TLS on the same ports; None
        serves plain connections only.
        """
        limits = replace(limits, write_buffer_bytes_max=HIGH_WATER_BYTES)
        super().__init__(limits, NULL_SCHEDULER, tls=tls)
        self.accept = accept

    def _new_connection(self) -> _AcceptedStream:
        return _AcceptedStream(self)


class _DialedStream(asyncio.Protocol):
    """The asyncio protocol that connects a StreamProtocol with a socket's transport."""

    def __init__(self, protocol: StreamProtocol) -> None:
        self._protocol = protocol
        self.stream: ByteStream

    def connection_made(self, transport: Any) -> None:
        """Set options of the socket, and create the byte stream. asyncio calls this."""
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES, low=LOW_WATER_BYTES)
        remote = host_from_socket_name(transport.get_extra_info("peername"))
        local = host_from_socket_name(transport.get_extra_info("sockname"))
        self.stream = ByteStream(transport, remote, local)

    def data_received(self, data: bytes) -> None:
        deliver(self.stream, data, self._protocol.data_received)

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stream.connection_lost()
        self._protocol.connection_lost()


async def dial_stream(
    address: str,
    protocol: StreamProtocol,
    *,
    timeout_s: float = DIAL_TIMEOUT_S,
    tls: Tls | None = None,
) -> ByteStream:
    """Connect to `address`, which is `host:port`, and return the stream.

    `protocol` receives what happens on the stream. If `tls` is None, the connection is plain. Raise
    ConnectionLostError if connecting fails, RequestTimeoutError after `timeout_s`, ProtocolError if
    `address` is malformed, and ConfigurationError if the files of `tls` cannot be used.
    """
    dialed = _DialedStream(protocol)
    await connect_protocol(address, lambda: dialed, timeout_s=timeout_s, tls=tls)
    return dialed.stream


def deliver(stream: ByteStream, data: bytes, receiver: Callable[[bytes], None]) -> None:
    """Call `receiver(data)`, unless the stream is closed.

    A SluiceError that `receiver` raises is logged and closes the stream.
    """
    if stream.closed:
        return
    try:
        receiver(data)
    except SluiceError as error:
        log.warning("closing the stream with %s: %s", stream.remote, error)
        stream.close()


# ------------------------------------------------------------------------------------ in memory


class MemoryListenerBase:
    """A listener at some addresses of a memory network. Subclasses decide what it serves."""

    def __init__(self, listeners: dict[str, Any]) -> None:
        """Create a listener that does not listen yet.

        `listeners` are all listeners of the memory network, by address; `start` adds this one.
        """
        self.ports: tuple[int, ...] = ()
        self.inherited_sockets: ListeningSockets = {}
        self._listeners = listeners
        self._addresses: tuple[str, ...] = ()

    def duplicate_sockets(self) -> ListeningSockets:
        """Return no sockets: in memory, the listener that starts first has the port."""
        return {}

    async def start(self, host: str | None, ports: Sequence[int]) -> None:
        """Listen on every port in `ports`, and set `self.ports` to their numbers.

        Port 0 stands for a free port. `host` None or "" means 127.0.0.1. Raise ConfigurationError
        if another listener of the network has one of the addresses.
        """
        chosen_ports = tuple(port or next(_FREE_MEMORY_PORTS) for port in ports)
        addresses = tuple(f"{host or '127.0.0.1'}:{port}" for port in chosen_ports)
        for port, address in zip(chosen_ports, addresses, strict=True):
            if address in self._listeners:
                raise ConfigurationError(
                    f"Port {port} is already in use in this memory network.",
                    fix="Close the listener that uses it, or use port 0.",
                )
        self.ports = chosen_ports
        self._addresses = addresses
        self._listeners.update(dict.fromkeys(addresses, self))

    def stop_listening(self) -> None:
        """Accept no further connections. Open connections go on."""
        for address in self._addresses:
            self._listeners.pop(address, None)


class MemoryStreamListener(MemoryListenerBase):
    """A server for byte streams in a memory network."""

    def __init__(self, listeners: dict[str, Any], accept: StreamProtocolFactory) -> None:
        """Create a listener. `accept` returns the protocol of a new stream."""
        super().__init__(listeners)
        self.accept = accept
        self.open_pairs: set[_StreamPair] = set()

    def connect(self, protocol: StreamProtocol, remote: Host, local: Host) -> ByteStream:
        """Open a stream to this listener, and return the end of the side that connects.

        `protocol` receives what happens on that end. `remote` is the address of the side that
        connects, and `local` the address of this listener.
        """
        pair = _StreamPair(self, protocol, remote, local)
        self.open_pairs.add(pair)
        return pair.dialed

    async def close(self) -> None:
        """Stop listening and end all streams. Bytes that were written before still arrive."""
        await asyncio.sleep(0)
        self.stop_listening()
        for pair in tuple(self.open_pairs):
            pair.disconnect()


class _FlowControlledTransport:
    """One direction of a byte stream in memory, with flow control.

    Bytes that are written arrive at `deliver` in the next iteration of the event loop.
    """

    def __init__(
        self,
        deliver: Callable[[bytes], None],
        resume_writing: Callable[[], None],
        on_close: Callable[[], None],
    ) -> None:
        """Create a transport that calls `deliver` with the bytes that are written to it.

        `resume_writing` is called when the unsent bytes have fallen to LOW_WATER_BYTES, and
        `on_close` when the transport is closed.
        """
        self._deliver = deliver
        self._resume_writing = resume_writing
        self._on_close = on_close
        self._unsent_bytes = 0

    def write(self, data: bytes, /) -> None:
        self._unsent_bytes += len(data)
        asyncio.get_running_loop().call_soon(self._deliver_later, bytes(data))

    def _deliver_later(self, data: bytes) -> None:
        """Deliver bytes that were written in an earlier iteration of the event loop.

        Calls `resume_writing` if few enough unsent bytes are left.
        """
        self._unsent_bytes -= len(data)
        self._deliver(data)
        if self._unsent_bytes <= LOW_WATER_BYTES < self._unsent_bytes + len(data):
            self._resume_writing()

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def close(self) -> None:
        asyncio.get_running_loop().call_soon(self._on_close)


class _StreamPair:
    """A byte stream in memory with its two ends."""

    def __init__(
        self,
        listener: MemoryStreamListener,
        protocol: StreamProtocol,
        remote: Host,
        local: Host,
    ) -> None:
        """Connect the protocol that has dialed to `listener`, in memory.

        `remote` is the address of the end that has dialed, and `local` the address of the listener.
        """
        self._listener = listener
        self._dialed_protocol = protocol
        self._accepted_protocol: StreamProtocol | None = None  # created with the first bytes
        to_listener = _FlowControlledTransport(
            self._deliver_to_accepted, protocol.resume_writing, self.disconnect
        )
        to_dialer = _FlowControlledTransport(
            self._deliver_to_dialed, self._resume_accepted, self.disconnect
        )
        self.dialed = ByteStream(to_listener, local, remote)
        self._accepted = ByteStream(to_dialer, remote, local)

    def _deliver_to_dialed(self, data: bytes) -> None:
        deliver(self.dialed, data, self._dialed_protocol.data_received)

    def _deliver_to_accepted(self, data: bytes) -> None:
        deliver(self._accepted, data, self._receive_accepted)

    def _receive_accepted(self, data: bytes) -> None:
        """Pass `data` to the protocol of the accepted end, which the first bytes create."""
        if self._accepted_protocol is None:
            self._accepted_protocol = self._listener.accept(self._accepted)
        self._accepted_protocol.data_received(data)

    def _resume_accepted(self) -> None:
        if self._accepted_protocol is not None:
            self._accepted_protocol.resume_writing()

    def disconnect(self) -> None:
        """End the stream on both ends. Do nothing if it has ended already."""
        if self not in self._listener.open_pairs:
            return
        self._listener.open_pairs.discard(self)
        ends = (self.dialed, self._dialed_protocol), (self._accepted, self._accepted_protocol)
        for stream, protocol in ends:
            stream.connection_lost()
            if protocol is not None:
                protocol.connection_lost()
