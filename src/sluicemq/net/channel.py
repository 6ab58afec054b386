"""The calling side of the remoting protocol, for asyncio.

A `Channel` is one connection: any number of calls travel at once and are matched by opaque. Frames
that are sent in one turn of the loop leave in one write. A call that times out gives up its opaque;
an answer that comes later is dropped. When the connection breaks, every call learns it. One timer
watches all calls of a channel: a timer for each costs a tenth of a send.

`ChannelPool` holds one channel an address; who asks while it is being opened waits for the same
one. After a failure the next attempts wait longer and longer (0.1 s to 5 s), so that a dead broker
is not dialled in a tight loop.
"""

import asyncio
import logging
import math
import socket
from collections.abc import Callable
from typing import Any, Final, Protocol

from sluicemq import engine
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import (
    ClosedError,
    ConnectionLostError,
    ProtocolError,
    RequestTimeoutError,
    SluiceError,
)
from sluicemq.model.ids import Host, parse_host
from sluicemq.net.dispatch import Carrier, host_of
from sluicemq.net.tls import TLS_HINT, Tls
from sluicemq.wire.frames import FLAG_ONEWAY, FLAG_RESPONSE, Command, FrameReader, encode_start

log = logging.getLogger(__name__)

OnRequest = Callable[[Command, "Channel"], Command | None]
"""What a server asks of us: the answer, or None when there is none."""
OnClose = Callable[["Channel"], None]

DIAL_TIMEOUT_S: Final = 3.0
BACK_OFF_MIN_S: Final = 0.1
BACK_OFF_MAX_S: Final = 5.0
WRITE_BUFFER_BYTES_MAX: Final = 4 * 1024 * 1024
TLS_SHUTDOWN_S: Final = 0.5
EXPIRE_GAP_S: Final = 0.005
"""At least so long from one look at the deadlines to the next."""
EXPIRE_SLACK_S: Final = 0.001
"""Timers of some loops fire up to so much early."""


_Call = tuple[asyncio.Future[Command], int, float, float]
"""A call that waits for its answer: its code, the seconds it may take, and until when on the loop's
clock. A plain tuple: there is one for each message that is sent."""


_settle: Final[Callable[[bytes, dict[int, _Call]], int] | None] = (
    None if engine.client is None else engine.client.settle
)


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
        self.closed: bool = False
        self.local: Host | None = None
        self._on_request = on_request
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._carrier: Carrier | None = None
        self._reader = FrameReader()
        self._calls: dict[int, _Call] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._look_at_s = math.inf
        self._opaque = 0
        self._outgoing: list[bytes | memoryview] = []
        self._can_write = True
        self._held: list[tuple[asyncio.Future[Command], bytes, bytes | memoryview]] = []
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self.is_tls = False
        self._is_heard = False

    # --------------------------------------------------------------------------- what users do

    async def call(self, command: Command, timeout_s: float) -> Command:
        """A request and its answer, whatever its code; `command` gets its opaque here.

        Raises ConnectionLostError, RequestTimeoutError, ProtocolError (a frame above the limit).
        """
        try:
            return await self.begin(command, timeout_s)
        finally:
            self._calls.pop(command.opaque, None)

    def begin(self, command: Command, timeout_s: float) -> asyncio.Future[Command]:
        """The same for who has a task already: the answer to come. HOT.

        A call that is given up is forgotten when its answer comes, or at its deadline.
        """
        if self.closed:
            raise self._is_closed()
        loop = self._loop
        opaque = self._opaque = command.opaque = (self._opaque + 1) & 0x7FFFFFFF
        start = encode_start(command)
        future: asyncio.Future[Command] = loop.create_future()
        deadline_s = loop.time() + timeout_s
        self._calls[opaque] = future, command.code, timeout_s, deadline_s
        if deadline_s < self._look_at_s:
            self._look_at(deadline_s)
        if self._can_write:
            if not self._outgoing:
                loop.call_soon(self._flush)
            self._outgoing += (start, command.body)
        else:  # the server takes no bytes now
            self._held.append((future, start, command.body))
        return future

    def oneway(self, command: Command) -> None:
        """A request without an answer. Raises ConnectionLostError when the channel is closed."""
        command.flag |= FLAG_ONEWAY
        self._opaque = command.opaque = (self._opaque + 1) & 0x7FFFFFFF
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

    def _send(self, command: Command) -> None:
        if self.closed:
            raise self._is_closed()
        self._write(encode_start(command), command.body)

    def _write(self, start: bytes, body: bytes | memoryview) -> None:
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing += (start, body)

    def _is_closed(self) -> ConnectionLostError:
        return ConnectionLostError(f"The connection to {self.address} is closed.")

    def _flush(self) -> None:
        pieces, self._outgoing = self._outgoing, []
        if pieces and not self.closed and self._carrier is not None:
            self._carrier.write(b"".join(pieces))

    def _look_at(self, time_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._look_at_s = time_s
        self._timer = self._loop.call_at(time_s, self._expire)

    def _expire(self) -> None:
        """Ends the calls whose time is over, and looks again at the next deadline."""
        now_s = self._loop.time()
        earliest_s = math.inf
        over: list[int] = []
        for opaque, (future, code, timeout_s, deadline_s) in self._calls.items():
            if deadline_s > now_s + EXPIRE_SLACK_S:
                earliest_s = min(earliest_s, deadline_s)
                continue
            over.append(opaque)
            if not future.done():
                late = RequestTimeoutError(
                    f"{self.address} did not answer request {code} within {timeout_s:g} s.",
                    fix="Is the server overloaded, or the network slow?",
                )
                future.set_exception(late)
        for opaque in over:
            del self._calls[opaque]
        self._timer, self._look_at_s = None, math.inf
        if earliest_s < math.inf:
            self._look_at(max(earliest_s, now_s + EXPIRE_GAP_S))

    # ------------------------------------------------------------------- what the carrier tells

    def connected(self, carrier: Carrier, local: Host) -> None:
        """The connection is there."""
        self._carrier = carrier
        self.local = local

    def received(self, data: bytes) -> None:
        """Bytes came in."""
        self._is_heard = True
        try:
            commands = self._reader.feed(data if _settle is None else self._settled(data))
        except ProtocolError as error:
            log.warning("closing the connection to %s: %s", self.address, error)
            self.disconnected(error)
            if self._carrier is not None:
                self._carrier.close()
            return
        for command in commands:
            if command.flag & FLAG_RESPONSE:
                call = self._calls.pop(command.opaque, None)
                if call is not None and not call[0].done():
                    call[0].set_result(command)
                continue
            answer: Command | None = None
            try:  # the handler must not block; an error of it is logged, not fatal
                if self._on_request is not None:
                    answer = self._on_request(command, self)
            except Exception:
                log.exception("request %d of %s failed here", command.code, self.address)
            if answer is not None and not command.is_oneway:
                self.answer(command.opaque, answer)

    def _settled(self, data: bytes) -> bytes:
        """What is left when the engine has handed out the plain answers. HOT."""
        assert _settle is not None
        whole = self._reader.add(data)
        return whole[_settle(whole, self._calls) :] if whole else b""

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
        if not is_paused:
            for future, start, body in self._held:
                if not future.done():
                    self._write(start, body)
            self._held.clear()

    def disconnected(self, error: Exception | None) -> None:
        """The connection is gone: every call learns it. A second time does nothing."""
        self.closed = True
        self._held.clear()
        calls, self._calls = self._calls, {}
        for future, *_ in calls.values():
            if not future.done():
                future.set_exception(self._lost(error))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._gone.done():
            self._gone.set_result(None)
            if self._on_close is not None:
                self._on_close(self)

    def _lost(self, error: Exception | None) -> ConnectionLostError:
        if self.is_tls and error is not None:
            from sluicemq.net.openssl import is_tls_error, tls_failed  # noqa: PLC0415 - rare

            if is_tls_error(error):
                return tls_failed(self.address, error)
        why = f": {error}" if error is not None else ""
        fix = "The request may have been carried out."
        return ConnectionLostError(
            f"The connection to {self.address} closed before the answer came{why}.",
            fix=fix if self._is_heard or self.is_tls else f"{fix} {TLS_HINT}",
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
    tls: Tls | None = None,
) -> Channel:
    """Connect to `host:port`. Raises ConnectionLostError, RequestTimeoutError, ProtocolError;
    ConfigurationError when the files of `tls` cannot be used."""
    channel = Channel(address, on_request=on_request, on_close=on_close)
    channel.is_tls = tls is not None
    await connect(address, lambda: _Socket(channel), timeout_s=timeout_s, tls=tls)
    return channel


async def connect(
    address: str,
    protocol: Callable[[], asyncio.Protocol],
    *,
    timeout_s: float = DIAL_TIMEOUT_S,
    tls: Tls | None = None,
) -> None:
    """Connect a protocol to `host:port`. Raises as `dial`."""
    host = parse_host(address)
    options: dict[str, Any] = {}
    if tls is not None:
        from sluicemq.net.openssl import client_context  # noqa: PLC0415 - OpenSSL, on demand

        options = {
            # Reading all the authorities of a system takes tens of milliseconds.
            "ssl": await asyncio.to_thread(client_context, tls),
            "server_hostname": tls.server_name or host.address,
            "ssl_shutdown_timeout": TLS_SHUTDOWN_S,
        }
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().create_connection(
                protocol, host.address, host.port, **options
            )
    except TimeoutError as error:
        raise RequestTimeoutError(
            f"{address} did not accept a connection within {timeout_s:g} s.",
            fix="Check host and port, and that no firewall is between.",
        ) from error
    except OSError as error:
        raise cannot_connect(address, error, is_tls=tls is not None) from error


def cannot_connect(address: str, error: OSError, *, is_tls: bool = False) -> ConnectionLostError:
    """What a failed connect, or handshake, says."""
    if is_tls and not isinstance(error, ConnectionRefusedError):
        from sluicemq.net.openssl import is_tls_error, tls_failed  # noqa: PLC0415 - rare

        if is_tls_error(error) or isinstance(error, ConnectionError):
            return tls_failed(address, error)
    return ConnectionLostError(
        f"Cannot connect to {address}: {error.strerror or error}.",
        fix="Check host and port, and that the server runs.",
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
        self.channels: dict[str, Channel] = {}
        """By address; one that is closed is no use."""
        self._opening: dict[str, asyncio.Lock] = {}
        self._failures: dict[str, tuple[float, float, SluiceError]] = {}
        self._closed = False

    async def get(self, address: str) -> Channel:
        """The channel to `address`, which is opened for it.

        Raises ConnectionLostError, RequestTimeoutError; within the back-off after a failure at
        once, with that failure. Raises ClosedError after `close`.
        """
        channel = self.channels.get(address)
        if channel is not None and not channel.closed:
            return channel
        async with self._opening.setdefault(address, asyncio.Lock()):
            if self._closed:
                raise ClosedError("The connections are closed.", fix="Make a new client.")
            channel = self.channels.get(address)
            if channel is not None and not channel.closed:
                return channel
            failure = self._failures.get(address)
            if failure is not None and self._clock.monotonic_s() < failure[0]:
                raise type(failure[2])(f"{failure[2].fact}.", fix=failure[2].fix)
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
            if self._closed:  # by now
                await channel.close()  # type: ignore[unreachable]
                raise ClosedError("The connections are closed.", fix="Make a new client.")
            self.channels[address] = channel
            return channel

    async def close(self) -> None:
        """Close all channels; returns when they are gone."""
        self._closed = True
        channels, self.channels = self.channels, {}
        for channel in channels.values():
            await channel.close()
