"""Client connections of the remoting protocol, for asyncio.

A `Channel` is one connection. Any number of calls can be in flight on it; responses are matched by
opaque. Frames that are sent in one iteration of the event loop leave in one write. When a call
times out, its opaque is forgotten, and a response that arrives later is dropped. When the
connection breaks, every open call fails. One timer watches the deadlines of all calls of a channel,
because a timer for each call would cost a tenth of a send.

`ChannelPool` keeps one channel for each address. While it is being opened, all callers wait for the
same one. After a failure further attempts are delayed by 0.1 s to 5 s, doubling each time, so that
an unreachable broker is not dialed in a tight loop.
"""

import asyncio
import logging
import math
import os
import re
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
from sluicemq.net.dispatch import Transport, host_from_socket_name
from sluicemq.net.tls import TLS_HINT, Tls
from sluicemq.wire.frames import FLAG_ONEWAY, FLAG_RESPONSE, Command, FrameReader, encode_start

log = logging.getLogger(__name__)

OnRequest = Callable[[Command, "Channel"], Command | None]
"""Called with each request of the server. Return the response, or None to send none now."""
OnClose = Callable[["Channel"], None]

DIAL_TIMEOUT_S: Final = 3.0
BACK_OFF_MIN_S: Final = 0.1
BACK_OFF_MAX_S: Final = 5.0
WRITE_BUFFER_BYTES_MAX: Final = 4 * 1024 * 1024
TLS_SHUTDOWN_S: Final = 0.5
EXPIRE_GAP_S: Final = 0.005
"""The least time between two checks of the deadlines."""
EXPIRE_SLACK_S: Final = 0.001
"""The timers of some event loops fire up to this much early."""


_Call = tuple[asyncio.Future[Command], int, float, float]
"""An open call: the future of its response, its request code, its timeout in seconds, and its
deadline on the clock of the event loop. A plain tuple, because one is made for each message sent,
and because the compiled engine reads it."""


_settle_sends: Final[Callable[[bytes, dict[int, _Call]], int] | None] = (
    None if engine.client is None else engine.client.settle
)
"""Completes the calls of plain sends whose responses `data` begins with, and returns where the
first other frame begins. None without the compiled engine."""


class Channel:
    """One connection to a server. It must be used in the event loop that opened it."""

    def __init__(
        self,
        address: str,
        *,
        on_request: OnRequest | None = None,
        on_close: OnClose | None = None,
    ) -> None:
        """Create a channel that is not connected. `dial` makes a connected one.

        `address` is shown in errors. `on_request` is called with each request of the server and
        must not block; None means that these requests are ignored. `on_close` is called once, when
        the connection has ended.
        """
        self.address = address
        self.closed: bool = False
        self.local: Host | None = None
        self._on_request = on_request
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._transport: Transport | None = None
        self._reader = FrameReader()
        self._calls: dict[int, _Call] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_expiry_s = math.inf  # for when the timer is set
        self._opaque = 0
        self._outgoing: list[bytes | memoryview] = []
        self._can_write = True
        self._unwritten: list[tuple[asyncio.Future[Command], bytes, bytes | memoryview]] = []
        """Calls that began while the transport had paused writing: future, frame start, body."""
        self._disconnected: asyncio.Future[None] = self._loop.create_future()
        self.is_tls = False
        self._has_received = False

    # ---------------------------------------------------------------------------- for its users

    async def call(self, command: Command, timeout_s: float) -> Command:
        """Send a request, wait for its response, and return it, whatever its response code.

        Sets `command.opaque`, the number by which the response is recognised. Raise
        ConnectionLostError if the connection is closed or breaks, RequestTimeoutError after
        `timeout_s`, and ProtocolError if the request exceeds the size of a frame.
        """
        try:
            return await self.start_call(command, timeout_s)
        finally:
            self._calls.pop(command.opaque, None)

    # Called for each message sent: keep it cheap.
    def start_call(self, command: Command, timeout_s: float) -> asyncio.Future[Command]:
        """Send a request and return the future of its response, without waiting.

        Raise ProtocolError if the request exceeds the size of a frame, and ConnectionLostError if
        the channel is closed. The future gets ConnectionLostError if the connection breaks, and
        RequestTimeoutError after `timeout_s`. If the caller cancels the future, the call is
        forgotten when its response arrives, or at its deadline.
        """
        if self.closed:
            raise self._make_closed_error()
        loop = self._loop
        # The response will have the same number, which is never negative.
        opaque = self._opaque = command.opaque = (self._opaque + 1) & 0x7FFFFFFF
        start = encode_start(command)
        future: asyncio.Future[Command] = loop.create_future()
        deadline_s = loop.time() + timeout_s
        self._calls[opaque] = future, command.code, timeout_s, deadline_s
        if deadline_s < self._next_expiry_s:
            self._set_expiry_timer(deadline_s)
        if self._can_write:
            if not self._outgoing:
                loop.call_soon(self._flush)
            self._outgoing += (start, command.body)
        else:
            self._unwritten.append((future, start, command.body))
        return future

    def send_oneway(self, command: Command) -> None:
        """Send a request that has no response. Set its one-way flag and opaque.

        Raise ConnectionLostError if the channel is closed, and ProtocolError if the request exceeds
        the size of a frame.
        """
        command.flag |= FLAG_ONEWAY
        self._opaque = command.opaque = (self._opaque + 1) & 0x7FFFFFFF
        self._send(command)

    def send_response(self, opaque: int, response: Command) -> None:
        """Send the response to the server's request with this opaque (request number).

        This is for requests for which `on_request` returned None. Does nothing if the connection is
        closed.
        """
        if not self.closed:
            response.opaque = opaque
            response.flag |= FLAG_RESPONSE
            self._send(response)

    async def close(self) -> None:
        """Close the connection and wait at most 1 s until it has ended.

        Open calls fail with ConnectionLostError.
        """
        self._flush()
        self.closed = True
        if self._transport is not None:
            self._transport.close()
            await asyncio.wait([self._disconnected], timeout=1.0)
        self.connection_lost(None)

    # -------------------------------------------------------------------------------- sending

    def _send(self, command: Command) -> None:
        """Send one frame. Raise ConnectionLostError if the channel is closed."""
        if self.closed:
            raise self._make_closed_error()
        self._write(encode_start(command), command.body)

    def _write(self, start: bytes, body: bytes | memoryview) -> None:
        """Write a frame, given as its start and its body, with all others of this iteration."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing += (start, body)

    def _make_closed_error(self) -> ConnectionLostError:
        return ConnectionLostError(f"The connection to {self.address} is closed.")

    def _flush(self) -> None:
        """Write the frames that were collected in this iteration of the event loop, all at once.

        If the channel is closed, they are dropped.
        """
        buffers = self._outgoing
        self._outgoing = []
        if buffers and not self.closed and self._transport is not None:
            self._transport.write(b"".join(buffers))

    # ------------------------------------------------------------------------------- deadlines

    def _set_expiry_timer(self, time_s: float) -> None:
        """Set the timer that checks the deadlines to `time_s` on the loop's clock."""
        if self._timer is not None:
            self._timer.cancel()
        self._next_expiry_s = time_s
        self._timer = self._loop.call_at(time_s, self._fail_expired_calls)

    def _fail_expired_calls(self) -> None:
        """Fail the calls whose deadline has passed, and set the timer to the next deadline.

        The future of such a call gets RequestTimeoutError. Without open calls there is no timer.
        """
        now_s = self._loop.time()
        earliest_s = math.inf
        expired: list[int] = []
        for opaque, (future, code, timeout_s, deadline_s) in self._calls.items():
            if deadline_s > now_s + EXPIRE_SLACK_S:
                earliest_s = min(earliest_s, deadline_s)
                continue
            expired.append(opaque)
            if not future.done():
                future.set_exception(self._make_timeout_error(code, timeout_s))
        for opaque in expired:
            del self._calls[opaque]
        self._timer = None
        self._next_expiry_s = math.inf
        if earliest_s < math.inf:
            self._set_expiry_timer(max(earliest_s, now_s + EXPIRE_GAP_S))

    def _make_timeout_error(self, code: int, timeout_s: float) -> RequestTimeoutError:
        """Make the error of a call of request `code` whose deadline has passed."""
        return RequestTimeoutError(
            f"{self.address} did not respond to request {code} within {timeout_s:g} s.",
            fix="Check whether the server is overloaded or the network is slow.",
        )

    # --------------------------------------------------------------- called by the transport

    def connection_made(self, transport: Transport, local: Host) -> None:
        """Send through `transport` from now on. `local` is the address of this end."""
        self._transport = transport
        self.local = local

    def data_received(self, data: bytes) -> None:
        """Complete the calls whose responses are in `data`, and handle requests of the server.

        If the bytes do not follow the protocol, the connection is closed.
        """
        self._has_received = True
        try:
            other_data = data if _settle_sends is None else self._settle_sends(data)
            commands = self._reader.feed(other_data)
        except ProtocolError as error:
            log.warning("closing the connection to %s: %s", self.address, error)
            self.connection_lost(error)
            if self._transport is not None:
                self._transport.close()
            return
        for command in commands:
            if command.flag & FLAG_RESPONSE:
                call = self._calls.pop(command.opaque, None)
                if call is not None and not call[0].done():
                    call[0].set_result(command)
            else:
                self._handle_request(command)

    def _handle_request(self, command: Command) -> None:
        """Handle a request of the server with `on_request`, and send the response if there is one.

        An exception of `on_request` is only logged.
        """
        response: Command | None = None
        try:  # an error of the handler must not end the connection
            if self._on_request is not None:
                response = self._on_request(command, self)
        except Exception:
            log.exception("handling request %d of %s failed", command.code, self.address)
        if response is not None and not command.is_oneway:
            self.send_response(command.opaque, response)

    def _settle_sends(self, data: bytes) -> bytes:
        """Complete calls of plain sends with the compiled engine; return the bytes it leaves."""
        assert _settle_sends is not None
        frames = self._reader.join(data)
        if not frames:
            return b""
        settled_bytes = _settle_sends(frames, self._calls)
        return frames[settled_bytes:]

    def set_writing_paused(self, is_paused: bool) -> None:
        """Note that the transport has paused or resumed writing.

        While it is paused, further calls wait; afterwards they are sent, except those that were
        cancelled or timed out meanwhile.
        """
        self._can_write = not is_paused
        if not is_paused:
            for future, start, body in self._unwritten:
                if not future.done():
                    self._write(start, body)
            self._unwritten.clear()

    def connection_lost(self, error: Exception | None) -> None:
        """Close the channel and fail every open call, because the connection has ended.

        `error` says why, if that is known. Further calls of this method do nothing.
        """
        self.closed = True
        self._unwritten.clear()
        calls = self._calls
        self._calls = {}
        for future, *_ in calls.values():
            if not future.done():
                future.set_exception(self._make_lost_error(error))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._disconnected.done():
            self._disconnected.set_result(None)
            if self._on_close is not None:
                self._on_close(self)

    def _make_lost_error(self, error: Exception | None) -> ConnectionLostError:
        """Make the error of a call that was open when the connection broke because of `error`."""
        if self.is_tls and error is not None:
            from sluicemq.net.openssl import is_tls_error, tls_connection_error  # noqa: PLC0415 - rare

            if is_tls_error(error):
                return tls_connection_error(self.address, error)
        why = f": {error}" if error is not None else ""
        fix = "The request may have been carried out."
        return ConnectionLostError(
            f"The connection to {self.address} closed before the response arrived{why}.",
            fix=fix if self._has_received or self.is_tls else f"{fix} {TLS_HINT}",
        )

    def __repr__(self) -> str:
        return f"<channel {self.address}{' closed' if self.closed else ''}>"


class _ChannelProtocol(asyncio.Protocol):
    """The asyncio protocol that connects a channel with a socket's transport."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def connection_made(self, transport: Any) -> None:
        """Set options of the socket, and connect the channel to `transport`, for asyncio."""
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        local = host_from_socket_name(transport.get_extra_info("sockname"))
        self._channel.connection_made(transport, local)

    def data_received(self, data: bytes) -> None:
        self._channel.data_received(data)

    def pause_writing(self) -> None:
        self._channel.set_writing_paused(True)

    def resume_writing(self) -> None:
        self._channel.set_writing_paused(False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._channel.connection_lost(exc)


async def dial(
    address: str,
    *,
    timeout_s: float = DIAL_TIMEOUT_S,
    on_request: OnRequest | None = None,
    on_close: OnClose | None = None,
    tls: Tls | None = None,
) -> Channel:
    """Connect to `address`, which is `host:port`, and return the channel.

    `on_request` is called with each request of the server, and `on_close` when the connection has
    ended. If `tls` is None, the connection is plain. Raise ConnectionLostError if the connection or
    the TLS handshake fails, RequestTimeoutError after `timeout_s`, ProtocolError if `address` is
    malformed, and ConfigurationError if the files of `tls` cannot be used.
    """
    channel = Channel(address, on_request=on_request, on_close=on_close)
    channel.is_tls = tls is not None
    await connect_protocol(address, lambda: _ChannelProtocol(channel), timeout_s=timeout_s, tls=tls)
    return channel


async def connect_protocol(
    address: str,
    make_protocol: Callable[[], asyncio.Protocol],
    *,
    timeout_s: float = DIAL_TIMEOUT_S,
    tls: Tls | None = None,
) -> None:
    """Connect to `address`, which is `host:port`, with the protocol that `make_protocol` makes.

    If `tls` is None, the connection is plain. Raise ConnectionLostError if the connection or the
    TLS handshake fails, RequestTimeoutError after `timeout_s`, ProtocolError if `address` is
    malformed, and ConfigurationError if the files of `tls` cannot be used.
    """
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
                make_protocol, host.address, host.port, **options
            )
    except TimeoutError as error:
        raise RequestTimeoutError(
            f"{address} did not accept a connection within {timeout_s:g} s.",
            fix="Check host and port, and that no firewall blocks the connection.",
        ) from error
    except OSError as error:
        raise _make_connect_error(address, error, is_tls=tls is not None) from error


def connect_failure_text(error: OSError) -> str:
    """Return why a connection could not be made, such as "Connection refused".

    The text of asyncio repeats the address for each address of the host. It is replaced by the
    texts of the operating system, each one once.
    """
    error_text = error.strerror or str(error)
    if "Connect call failed" not in error_text:
        return error_text
    error_numbers = map(int, re.findall(r"\[Errno (\d+)\]", str(error)))
    reasons = dict.fromkeys(map(os.strerror, error_numbers))  # each one once
    return "; ".join(reasons) or error_text


def _make_connect_error(
    address: str, error: OSError, *, is_tls: bool = False
) -> ConnectionLostError:
    """Make the error that explains why connecting to `address`, or its TLS handshake, failed."""
    if is_tls and not isinstance(error, ConnectionRefusedError):
        from sluicemq.net.openssl import is_tls_error, tls_connection_error  # noqa: PLC0415 - rare

        if is_tls_error(error) or isinstance(error, ConnectionError):
            return tls_connection_error(address, error)
    return ConnectionLostError(
        f"Cannot connect to {address}: {connect_failure_text(error)}.",
        fix="Check host and port, and that the server runs.",
    )


class Dialer(Protocol):
    """The function by which clients connect: `dial`, or that of another network."""

    async def __call__(
        self,
        address: str,
        *,
        timeout_s: float = DIAL_TIMEOUT_S,
        on_request: OnRequest | None = None,
        on_close: OnClose | None = None,
    ) -> Channel: ...


class ChannelPool:
    """One channel for each address. It is opened on first use, and again after it was lost."""

    def __init__(
        self,
        *,
        timeout_s: float = DIAL_TIMEOUT_S,
        on_request: OnRequest | None = None,
        on_close: OnClose | None = None,
        clock: Clock = SYSTEM_CLOCK,
        connect: Dialer | None = None,
    ) -> None:
        """Create an empty pool of channels, one for each address.

        `timeout_s` limits each attempt to connect. Each channel gets `on_request`, which is called
        with requests of the server, and `on_close`, which is called when the connection has ended.
        `clock` measures the delay after a failure. `connect` opens channels; None means `dial`.
        """
        self._connect = connect
        self._timeout_s = timeout_s
        self._on_request = on_request
        self._on_close = on_close
        self._clock = clock
        self.channels: dict[str, Channel] = {}
        """The newest channel to each address; it may be closed."""
        self._locks: dict[str, asyncio.Lock] = {}
        self._failures: dict[str, tuple[float, float, SluiceError]] = {}
        """By address: when to try again (on the monotonic clock), the delay, and the error."""
        self._closed = False

    async def get(self, address: str) -> Channel:
        """Return the channel to `address`. Open it if there is none.

        Raise ConnectionLostError or RequestTimeoutError if it cannot be opened. For some time after
        a failure, raise the same error without a new attempt. Raise ClosedError after `close`.
        """
        channel = self.channels.get(address)
        if channel is not None and not channel.closed:
            return channel
        # The lock lets several tasks that need the channel share one attempt.
        async with self._locks.setdefault(address, asyncio.Lock()):
            if self._closed:
                raise ClosedError("The connections are closed.", fix="Make a new client.")
            channel = self.channels.get(address)
            if channel is not None and not channel.closed:
                return channel
            self._raise_recent_failure(address)
            channel = await self._open(address)
            if self._closed:  # the pool was closed while the channel was opened
                await channel.close()  # type: ignore[unreachable]
                raise ClosedError("The connections are closed.", fix="Make a new client.")
            self.channels[address] = channel
            return channel

    def _raise_recent_failure(self, address: str) -> None:
        """Raise the last error of an address again, if the delay after it has not passed."""
        failure = self._failures.get(address)
        if failure is None:
            return
        retry_s, _delay_s, error = failure
        if self._clock.monotonic_s() < retry_s:
            raise type(error)(f"{error.fact}.", fix=error.fix)

    async def _open(self, address: str) -> Channel:
        """Connect to `address`, and return the channel.

        Raise ConnectionLostError or RequestTimeoutError on failure. Then the delay until the next
        attempt doubles with each failure in a row, up to BACK_OFF_MAX_S.
        """
        failure = self._failures.get(address)
        try:
            channel = await (self._connect or dial)(
                address,
                timeout_s=self._timeout_s,
                on_request=self._on_request,
                on_close=self._on_close,
            )
        except (ConnectionLostError, RequestTimeoutError) as error:
            delay_s = BACK_OFF_MIN_S
            if failure is not None:
                _retry_s, last_delay_s, _error = failure
                delay_s = min(last_delay_s * 2, BACK_OFF_MAX_S)
            self._failures[address] = (self._clock.monotonic_s() + delay_s, delay_s, error)
            raise
        self._failures.pop(address, None)
        return channel

    async def close(self) -> None:
        """Close all channels and wait until they are gone. The pool opens no channel afterwards."""
        self._closed = True
        channels = self.channels
        self.channels = {}
        for channel in channels.values():
            await channel.close()
