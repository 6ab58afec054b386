"""Plain streams of bytes, for protocols that are no requests and answers; over sockets or memory.

A `Stream` is a `Peer`: where the other end is, `write`, `close`, and how much of what was written
has not left yet. What comes is told to a `StreamUser`, in the loop. A user that has much to write
stops when `unsent_bytes` is above HIGH_BYTES, and is told by `writable` when little of it is left.

The side that dials speaks first: only with its first byte is a user made for it, behind TLS where
the server has it. Until then, and after, the limits of `accept` hold: connections, silence,
protected mode (which closes, since there is no answer to refuse with).
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
from sluicemq.net.accept import Accepted, Kept, Server
from sluicemq.net.channel import DIAL_TIMEOUT_S, connect
from sluicemq.net.dispatch import Peer, host_of
from sluicemq.net.limits import NOBODY_WAITS, ServerLimits
from sluicemq.net.openssl import TlsAcceptor
from sluicemq.net.tls import Tls

log = logging.getLogger(__name__)

HIGH_BYTES: Final = 1024 * 1024
LOW_BYTES: Final = HIGH_BYTES // 4
MEMORY_PORTS: Final = itertools.cycle(range(20_000, 40_000))
"""Of the process, so that two networks do not share an address: clients remember addresses."""

Stream = Peer


class StreamUser(Protocol):
    """Who speaks on a stream."""

    def received(self, data: bytes) -> None:
        """Bytes came. Raises SluiceError: the stream is closed, and the text logged."""

    def writable(self) -> None:
        """Most of what was unsent has left."""

    def lost(self) -> None:
        """The connection is gone, whoever closed it. Told once."""


Accept = Callable[[Stream], StreamUser]
"""Who speaks on a new stream, now that its first bytes are there. Raises SluiceError: nobody, and
the text is logged."""


class _Taken(Accepted):
    """An accepted stream."""

    __slots__ = ("_accept", "_user")

    def __init__(self, server: "StreamServer") -> None:
        super().__init__(server)
        self._accept = server.accept
        self._user: StreamUser | None = None

    @property
    def unfinished_bytes(self) -> int:
        return 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.is_refused:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._user is not None:
            self._user.lost()

    def _received(self, data: bytes) -> None:
        try:
            if self._user is None:
                self._user = self._accept(self.peer)
            self._user.received(data)
        except SluiceError as error:
            self.refuse(str(error))

    def pause_writing(self) -> None:
        """What is written here answers nothing: reading goes on."""

    def resume_writing(self) -> None:
        if self._user is not None:
            self._user.writable()


class StreamServer(Server):
    """Listens for streams."""

    def __init__(
        self, accept: Accept, *, limits: ServerLimits, tls: TlsAcceptor | None = None
    ) -> None:
        super().__init__(replace(limits, write_buffer_bytes_max=HIGH_BYTES), NOBODY_WAITS, tls=tls)
        self.accept = accept

    def _accepted(self) -> _Taken:
        return _Taken(self)


class _Dialled(asyncio.Protocol):
    """A dialled stream."""

    def __init__(self, user: StreamUser) -> None:
        self._user = user
        self.stream: Stream

    def connection_made(self, transport: Any) -> None:
        connected = transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=HIGH_BYTES, low=LOW_BYTES)
        ends = (host_of(transport.get_extra_info(end)) for end in ("peername", "sockname"))
        self.stream = Stream(transport, *ends)

    def data_received(self, data: bytes) -> None:
        receive(self.stream, data, self._user.received)

    def resume_writing(self) -> None:
        self._user.writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stream.lost()
        self._user.lost()


async def dial_stream(
    address: str, user: StreamUser, *, timeout_s: float = DIAL_TIMEOUT_S, tls: Tls | None = None
) -> Stream:
    """Connect to `host:port`. Raises ConnectionLostError, RequestTimeoutError, ConfigurationError
    as `channel.dial`."""
    end = _Dialled(user)
    await connect(address, lambda: end, timeout_s=timeout_s, tls=tls)
    return end.stream


def receive(stream: Stream, data: bytes, received: Callable[[bytes], None]) -> None:
    """Hands on what came. An error of the user closes the stream."""
    if stream.closed:
        return
    try:
        received(data)
    except SluiceError as error:
        log.warning("closing the stream with %s: %s", stream.remote, error)
        stream.close()


# ------------------------------------------------------------------------------------ in memory


class MemoryPorts:
    """What is served at some addresses of a memory network."""

    def __init__(self, served: dict[str, Any]) -> None:
        self.ports: tuple[int, ...] = ()
        self.kept: Kept = {}
        self._served = served
        self._addresses: tuple[str, ...] = ()

    def keep(self) -> Kept:
        """Nothing: whoever starts first has the port."""
        return {}

    async def start(self, host: str | None, ports: Sequence[int]) -> None:
        found = tuple(port or next(MEMORY_PORTS) for port in ports)
        addresses = tuple(f"{host or '127.0.0.1'}:{port}" for port in found)
        for port, address in zip(found, addresses, strict=True):
            if address in self._served:
                raise ConfigurationError(
                    f"Port {port} is in use already in this memory network.",
                    fix="Close what serves it, or use port 0.",
                )
        self.ports, self._addresses = found, addresses
        self._served.update(dict.fromkeys(addresses, self))

    def stop_listening(self) -> None:
        """Nobody is accepted any more."""
        for address in self._addresses:
            self._served.pop(address, None)


class MemoryStreams(MemoryPorts):
    """Listens for streams in a memory network."""

    def __init__(self, served: dict[str, Any], accept: Accept) -> None:
        super().__init__(served)
        self.accept = accept
        self.lines: set[_Line] = set()

    def dialled(self, user: StreamUser, remote: Host, local: Host) -> Stream:
        """A new stream: the end of who dials, whose address is `remote`."""
        line = _Line(self, user, remote, local)
        self.lines.add(line)
        return line.dialled

    async def close(self) -> None:
        """What was written is on its way before the streams end."""
        await asyncio.sleep(0)
        self.stop_listening()
        for line in tuple(self.lines):
            line.lose()


class _Pipe:
    """One direction: what is written arrives in the next turn of the loop."""

    def __init__(
        self,
        deliver: Callable[[bytes], None],
        writable: Callable[[], None],
        lose: Callable[[], None],
    ) -> None:
        self._deliver, self._writable, self._lose = deliver, writable, lose
        self._unsent_bytes = 0

    def write(self, data: bytes, /) -> None:
        self._unsent_bytes += len(data)
        asyncio.get_running_loop().call_soon(self.arrive, bytes(data))

    def arrive(self, data: bytes) -> None:
        """A turn later."""
        self._unsent_bytes -= len(data)
        self._deliver(data)
        if self._unsent_bytes <= LOW_BYTES < self._unsent_bytes + len(data):
            self._writable()

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def close(self) -> None:
        asyncio.get_running_loop().call_soon(self._lose)


class _Line:
    """A stream with both its ends."""

    def __init__(self, listener: MemoryStreams, user: StreamUser, remote: Host, local: Host):
        self._listener = listener
        self._user = user
        self._served: StreamUser | None = None
        self.dialled = Stream(_Pipe(self.to_served, user.writable, self.lose), local, remote)
        self._accepted = Stream(_Pipe(self.to_user, self.writable, self.lose), remote, local)

    def to_user(self, data: bytes) -> None:
        """To who has dialled."""
        receive(self.dialled, data, self._user.received)

    def to_served(self, data: bytes) -> None:
        """To who was dialled."""
        receive(self._accepted, data, self.serve)

    def serve(self, data: bytes) -> None:
        """The first bytes make the user."""
        if self._served is None:
            self._served = self._listener.accept(self._accepted)
        self._served.received(data)

    def writable(self) -> None:
        """Most of what was written to the user has arrived."""
        if self._served is not None:
            self._served.writable()

    def lose(self) -> None:
        """The stream is gone on both ends."""
        if self not in self._listener.lines:
            return
        self._listener.lines.discard(self)
        for stream, user in (self.dialled, self._user), (self._accepted, self._served):
            stream.lost()
            if user is not None:
                user.lost()
