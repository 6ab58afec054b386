"""The calling side of the remoting protocol, for asyncio.

A `Channel` is one connection: any number of calls travel at once and are matched by opaque. Frames
that are sent in one turn of the loop leave in one write. A call that times out gives up its opaque;
an answer that comes later is dropped. When the connection breaks, every call learns it.

`ChannelPool` holds one channel an address; who asks while it is being opened waits for the same
one. After a failure the next attempts wait longer and longer (0.1 s to 5 s), so that a dead broker
is not dialled in a tight loop.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Final, Protocol

from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import (
    ClosedError,
    ConnectionLostError,
    ProtocolError,
    RequestTimeoutError,
    SluiceError,
)
from sluicemq.model.ids import Host, parse_host
from sluicemq.net.peer import Carrier, host_of
from sluicemq.protocol.codec import encode
from sluicemq.protocol.command import FLAG_ONEWAY, FLAG_RESPONSE, Command
from sluicemq.protocol.connection import FrameReader

log = logging.getLogger(__name__)

OnRequest = Callable[[Command, "Channel"], Command | None]
"""What a server asks of us: the answer, or None when there is none."""
OnClose = Callable[["Channel"], None]

DIAL_TIMEOUT_S: Final = 3.0
BACK_OFF_MIN_S: Final = 0.1
BACK_OFF_MAX_S: Final = 5.0
WRITE_BUFFER_BYTES_MAX: Final = 4 * 1024 * 1024


class Channel:
    """One connection to a server. Use it in the loop that opened it."""

    def __init__(
        self,
        address: str,
        *,
        on_request: OnRequest | None = None,
        on_close: OnClose | None = None,
    ) -> None:
        self.address = address
        self.closed = False
        self.local: Host | None = None
        self._on_request = on_request
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._carrier: Carrier | None = None
        self._reader = FrameReader()
        self._calls: dict[int, asyncio.Future[Command]] = {}
        self._opaque = 0
        self._outgoing: list[bytes] = []
        self._can_write = True
        self._waiters: list[asyncio.Future[None]] = []
        self._gone: asyncio.Future[None] = self._loop.create_future()

    # --------------------------------------------------------------------------- what users do

    async def call(self, command: Command, timeout_s: float) -> Command:
        """A request and its answer, whatever its code; `command` gets its opaque here.

        Raises ConnectionLostError, RequestTimeoutError, ProtocolError (a frame above the limit).
        """
        future: asyncio.Future[Command] = self._loop.create_future()
        opaque = -1
        timer = self._loop.call_later(timeout_s, self._expire, future, command.code, timeout_s)
        try:
            if not self._can_write:
                await self._drained(future)
            opaque = self._number(command)
            self._calls[opaque] = future
            self._send(command)
            return await future
        finally:
            timer.cancel()
            self._calls.pop(opaque, None)

    def oneway(self, command: Command) -> None:
        """A request without an answer. Raises ConnectionLostError when the channel is closed."""
        command.flag |= FLAG_ONEWAY
        self._number(command)
        self._send(command)

    async def close(self) -> None:
        """Close; returns when the connection is gone. Open calls get ConnectionLostError."""
        self._flush()
        self.closed = True
        if self._carrier is not None:
            self._carrier.close()
            await asyncio.wait([self._gone], timeout=1.0)
        self.disconnected(None)

    # -------------------------------------------------------------------------------- sending

    def _number(self, command: Command) -> int:
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        command.opaque = self._opaque
        return self._opaque

    def _send(self, command: Command) -> None:
        if self.closed:
            raise ConnectionLostError(f"The connection to {self.address} is closed.")
        self._outgoing.append(encode(command))
        if len(self._outgoing) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        frames, self._outgoing = self._outgoing, []
        if frames and not self.closed and self._carrier is not None:
            self._carrier.write(frames[0] if len(frames) == 1 else b"".join(frames))

    async def _drained(self, future: asyncio.Future[Command]) -> None:
        """Wait until the server takes bytes again, or the call is over."""
        while not (self._can_write or future.done()):
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append(waiter)
            ends: list[asyncio.Future[Any]] = [waiter, future]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            future.result()

    def _expire(self, future: asyncio.Future[Command], code: int, timeout_s: float) -> None:
        if not future.done():
            future.set_exception(
                RequestTimeoutError(
                    f"{self.address} did not answer request {code} within {timeout_s:g} s.",
                    cure="Is the server overloaded, or the network slow?",
                )
            )

    # ------------------------------------------------------------------- what the carrier tells

    def connected(self, carrier: Carrier, local: Host) -> None:
        """The connection is there."""
        self._carrier = carrier
        self.local = local

    def received(self, data: bytes) -> None:
        """Bytes came in."""
        try:
            commands = self._reader.feed(data)
        except ProtocolError as error:
            log.warning("closing the connection to %s: %s", self.address, error)
            self.disconnected(error)
            if self._carrier is not None:
                self._carrier.close()
            return
        for command in commands:
            if command.flag & FLAG_RESPONSE:
                future = self._calls.pop(command.opaque, None)
                if future is not None and not future.done():
                    future.set_result(command)
            else:
                self._requested(command)

    def _requested(self, command: Command) -> None:
        """A request of the server. Its handler must not block; an error is logged, not fatal."""
        answer: Command | None = None
        try:
            if self._on_request is not None:
                answer = self._on_request(command, self)
        except Exception:
            log.exception("request %d of %s failed here", command.code, self.address)
        if answer is not None and not command.is_oneway and not self.closed:
            answer.opaque = command.opaque
            answer.flag |= FLAG_RESPONSE
            self._send(answer)

    def answer(self, opaque: int, answer: Command) -> None:
        """The answer to a request of the server that `on_request` left for later; dropped when the
        connection is gone."""
        if not self.closed:
            answer.opaque = opaque
            answer.flag |= FLAG_RESPONSE
            self._send(answer)

    def paused(self, is_paused: bool) -> None:
        """The server does not take bytes (or does again)."""
        self._can_write = not is_paused
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def disconnected(self, error: Exception | None) -> None:
        """The connection is gone: every call learns it. A second time does nothing."""
        self.closed = True
        self.paused(False)
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(self._lost(error))
        if not self._gone.done():
            self._gone.set_result(None)
            if self._on_close is not None:
                self._on_close(self)

    def _lost(self, error: Exception | None) -> ConnectionLostError:
        why = f": {error}" if error is not None else ""
        return ConnectionLostError(
            f"The connection to {self.address} closed before the answer came{why}.",
            cure="The request may have been carried out.",
        )

    def __repr__(self) -> str:
        return f"<channel {self.address}{' closed' if self.closed else ''}>"


class _Socket(asyncio.Protocol):
    """Carries a channel over a socket."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def connection_made(self, transport: Any) -> None:
        connected = transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        self._channel.connected(transport, host_of(transport.get_extra_info("sockname")))

    def data_received(self, data: bytes) -> None:
        self._channel.received(data)

    def pause_writing(self) -> None:
        self._channel.paused(True)

    def resume_writing(self) -> None:
        self._channel.paused(False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._channel.disconnected(exc)


async def dial(
    address: str,
    *,
    timeout_s: float = DIAL_TIMEOUT_S,
    on_request: OnRequest | None = None,
    on_close: OnClose | None = None,
) -> Channel:
    """Connect to `host:port`. Raises ConnectionLostError, RequestTimeoutError, ProtocolError."""
    host = parse_host(address)
    channel = Channel(address, on_request=on_request, on_close=on_close)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().create_connection(
                lambda: _Socket(channel), host.address, host.port
            )
    except TimeoutError as error:
        raise RequestTimeoutError(
            f"{address} did not accept a connection within {timeout_s:g} s.",
            cure="Check host and port, and that no firewall is between.",
        ) from error
    except OSError as error:
        raise cannot_connect(address, error) from error
    return channel


def cannot_connect(address: str, error: OSError) -> ConnectionLostError:
    """What a failed connect says."""
    return ConnectionLostError(
        f"Cannot connect to {address}: {error.strerror or error}.",
        cure="Check host and port, and that the server runs.",
    )


class Dial(Protocol):
    """How a pool connects: `dial`, or that of another network."""

    async def __call__(
        self,
        address: str,
        *,
        timeout_s: float = DIAL_TIMEOUT_S,
        on_request: OnRequest | None = None,
        on_close: OnClose | None = None,
    ) -> Channel: ...


class ChannelPool:
    """One channel an address, opened when first asked for and again after a loss."""

    def __init__(
        self,
        *,
        timeout_s: float = DIAL_TIMEOUT_S,
        on_request: OnRequest | None = None,
        on_close: OnClose | None = None,
        clock: Clock = SYSTEM_CLOCK,
        connect: Dial | None = None,
    ) -> None:
        """`connect`: None is `dial`."""
        self._connect = connect
        self._timeout_s = timeout_s
        self._on_request = on_request
        self._on_close = on_close
        self._clock = clock
        self._channels: dict[str, Channel] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._failures: dict[str, tuple[float, float, SluiceError]] = {}
        self._closed = False

    async def get(self, address: str) -> Channel:
        """The channel to `address`.

        Raises ConnectionLostError, RequestTimeoutError; within the back-off after a failure at
        once, with that failure. Raises ClosedError after `close`.
        """
        channel = self._channels.get(address)
        if channel is not None and not channel.closed and not self._closed:
            return channel
        async with self._opening.setdefault(address, asyncio.Lock()):
            if self._closed:
                raise ClosedError("The connections are closed.", cure="Make a new client.")
            channel = self._channels.get(address)
            if channel is None or channel.closed:
                channel = await self._open(address)
            return channel

    async def _open(self, address: str) -> Channel:
        failure = self._failures.get(address)
        if failure is not None and self._clock.monotonic_s() < failure[0]:
            raise type(failure[2])(str(failure[2]))
        try:
            channel = await (self._connect or dial)(
                address,
                timeout_s=self._timeout_s,
                on_request=self._on_request,
                on_close=self._on_close,
            )
        except (ConnectionLostError, RequestTimeoutError) as error:
            pause_s = min(failure[1] * 2, BACK_OFF_MAX_S) if failure else BACK_OFF_MIN_S
            self._failures[address] = (self._clock.monotonic_s() + pause_s, pause_s, error)
            raise
        self._failures.pop(address, None)
        if self._closed:
            await channel.close()
            raise ClosedError("The connections are closed.", cure="Make a new client.")
        self._channels[address] = channel
        return channel

    async def close(self) -> None:
        """Close all channels; returns when they are gone."""
        self._closed = True
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()
