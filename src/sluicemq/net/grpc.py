"""gRPC over HTTP/2: calls with their metadata, messages, deadlines and status, and a small client.

    HEADERS   :path /package.Service/Method, metadata, grpc-timeout
    DATA      compressed flag (1 byte) | length (4 bytes) | message | ...
    HEADERS   grpc-status, grpc-message                      (the trailers)

A method is a plain function `(message, call) -> response`. If it returns bytes, they are the only
response and the call ends. If it returns None, it calls `reply`, or `send` and `end`, itself, now
or later. If it raises CallError, the call ends with that status.

A method that accepts a stream of messages sets `call.on_half_close` when it receives the first one.
It is then called with each further message (or the function that it assigned to `call.on_message`
is), and `on_half_close` is called when the client has sent all. All other methods accept one
message.

A call ends at its deadline. The client measures the deadline too, so the server's check once a
second only frees what a call of a client that is gone would hold. Compressed messages are refused:
RocketMQ's clients send none (the compression of message bodies is a matter of the clients).
"""

import asyncio
import heapq
import logging
import re
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, Final, cast
from urllib.parse import quote, unquote

from sluicemq.errors import ConnectionLostError, RequestTimeoutError, SluiceError
from sluicemq.model.ids import Host, parse_host
from sluicemq.net.accept import PROTECTED_MODE_REFUSAL, OnPeer
from sluicemq.net.http2 import Http2Connection, Http2Server, Stream
from sluicemq.net.limits import NULL_SCHEDULER, SERVER_LIMITS, FairScheduler, ServerLimits
from sluicemq.net.openssl import TlsAcceptor, client_context
from sluicemq.net.tls import Tls
from sluicemq.wire import http2 as h
from sluicemq.wire.hpack import HeaderDecoder, encode_headers
from sluicemq.wire.http2 import ErrorCode

log = logging.getLogger(__name__)

ALPN: Final = ("h2",)
"""The protocol that a gRPC client offers with TLS; some disconnect if the server does not select
it."""
MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
"""The largest request message, as large as a frame of the remoting protocol."""
EXPIRE_PERIOD_S: Final = 1.0
STATUS_TEXT_LENGTH_MAX: Final = 1024
STALE_DEADLINES: Final = 1024
"""Deadlines of ended calls that may stay in the order of deadlines."""

_PREFIX: Final = struct.Struct(">BI")
_TIMEOUT: Final = re.compile(r"(\d{1,8})([HMSmun])")
_UNITS_S: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_UNQUOTED: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
"""The characters that a grpc-message contains as they are."""


class StatusCode(IntEnum):
    """The status codes of gRPC that a call here may end with."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class CallError(SluiceError):
    """A gRPC call ended with a status other than OK.

    When: a proxy refuses a gRPC call, for example that of `sluice proxy status`.
    Then: what the call asked for was not done; `code` is the gRPC status code.
    Fix: read the text, which comes from the proxy, and the proxy's log. UNIMPLEMENTED means that
    the port does not belong to a SluiceMQ proxy.
    """

    def __init__(self, code: StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


_CONTENT: Final = (":status", "200"), ("content-type", "application/grpc")
_HEADERS: Final = encode_headers(_CONTENT)
_OK_TRAILERS: Final = encode_headers([("grpc-status", "0")])
_ACCEPTED_ENCODINGS: Final = ("grpc-accept-encoding", "identity")
_NOT_GRPC: Final = encode_headers([(":status", "415")])

Handler = Callable[[bytes, "Call"], bytes | None]
Methods = Mapping[str, Handler]
"""The handler of each method by its path, "/package.Service/Method"."""


class Call(Stream):
    """One call of a method. `headers` contains its metadata, with lower-case names."""

    __slots__ = (
        "_begin_s",
        "_buffer",
        "_deadlines",
        "_due_ms",
        "_has_message",
        "_has_sent_headers",
        "_is_paused",
        "_methods",
        "_timeout_s",
        "on_cancelled",
        "on_half_close",
        "on_message",
    )

    connection: Http2Connection

    def __init__(
        self,
        methods: Methods,
        deadlines: "Deadlines",
        connection: Http2Connection,
        stream_id: int,
        headers: dict[str, str],
    ) -> None:
        """Create the call that a client begins with `headers`.

        `methods` maps paths to handlers. `deadlines` ends calls that take too long; this call is
        added. `stream_id` is the HTTP/2 stream of the call on `connection`.
        """
        super().__init__(connection, stream_id, headers)
        self._methods = methods
        self.on_message: Handler
        """Called with each message: the method, or a function that the method assigns here."""
        self._begin_s = connection.now_s
        self._timeout_s = _parse_timeout_s(headers.get("grpc-timeout", ""))
        self._deadlines = deadlines
        self._due_ms = deadlines.add(self, self._timeout_s)
        self._buffer: bytearray | None = None  # bytes of a message that is not whole
        self._is_paused = False  # whole messages in `_buffer` wait for a later scheduling round
        self._has_message = False
        self._has_sent_headers = False
        self.on_half_close: Callable[[], None] | None = None
        """Called when a client that streams messages has sent all of them."""
        self.on_cancelled: Callable[[], None] | None = None
        """Called when the client cancels the call or disconnects, or at the deadline."""

    # ------------------------------------------------------------------------------ requests

    def headers_received(self) -> None:
        """Look up the method of the call. End the call with a status if it cannot be handled."""
        headers = self.headers
        connection = self.connection
        handler = self._methods.get(headers.get(":path", ""))
        if connection.is_refused:
            connection.peer.count_refusal()
            self.end(StatusCode.PERMISSION_DENIED, PROTECTED_MODE_REFUSAL)
        elif not headers.get("content-type", "").startswith("application/grpc"):
            self.send_trailers(_NOT_GRPC)
        elif handler is None:
            path = headers.get(":path", "")[:STATUS_TEXT_LENGTH_MAX]
            self.end(StatusCode.UNIMPLEMENTED, f"The method {path} is not implemented.")
        else:
            self.on_message = handler
            if self.is_half_closed:
                self.data_received(b"")

    # Called for each DATA frame, which is nearly always one whole message: keep it cheap.
    def data_received(self, data: bytes) -> None:
        """Handle bytes of the request: call the method with each whole message.

        A message has a prefix of 5 bytes: whether it is compressed, and its size. Bytes of a
        message that is not whole are kept. Does nothing after the response is complete.
        """
        if self.is_response_complete:
            return
        if self._buffer is None and len(data) >= _PREFIX.size:
            is_compressed, size = _PREFIX.unpack_from(data)
            if size + _PREFIX.size == len(data) and not is_compressed:
                self._handle_message(data[_PREFIX.size :])
                data = b""
        if data or self._buffer is not None:
            self._collect_messages(data)
        if self.is_half_closed and not self.is_response_complete and not self._is_paused:
            self._handle_half_close()

    def resume(self) -> None:
        """Handle the messages that are left of a frame."""
        self._is_paused = False
        self.data_received(b"")

    def _collect_messages(self, data: bytes) -> None:
        """Handle bytes that are part of a message, or contain several messages.

        If the connection has used up its time, the other messages wait for a later scheduling
        round.
        """
        buffer = self._buffer = self._buffer or bytearray()
        buffer += data
        self.connection.buffered_bytes += len(data)
        while len(buffer) >= _PREFIX.size and not self.is_response_complete:
            message = self._take_message(buffer)
            if message is None:
                break
            self._handle_message(message)
            has_more = len(buffer) >= _PREFIX.size and not self.is_response_complete
            if has_more and self.connection.has_to_pause():
                self.connection.resume_later(self)
                self._is_paused = True
                return
        if not buffer or self.is_response_complete:
            self._drop_buffer()

    def _take_message(self, buffer: bytearray) -> bytes | None:
        """Remove the first message from the buffer, and return it; None if it is not whole.

        If the message is compressed or too large, end the call and return None.
        """
        is_compressed, size = _PREFIX.unpack_from(buffer)
        end = _PREFIX.size + size
        if is_compressed:
            self.end(StatusCode.UNIMPLEMENTED, "Compressed messages are not supported.")
            return None
        if size > MESSAGE_BYTES_MAX:
            self.end(
                StatusCode.RESOURCE_EXHAUSTED,
                f"A message of {size} bytes is above the limit of {MESSAGE_BYTES_MAX}.",
            )
            return None
        if end > len(buffer):
            return None
        message = bytes(memoryview(buffer)[_PREFIX.size : end])
        del buffer[:end]
        self.connection.buffered_bytes -= end
        return message

    def _handle_message(self, message: bytes) -> None:
        """Call the method with a message. Send its result as the response.

        If the result is None, the method responds later. An exception ends the call with a status.
        """
        if self._has_message and self.on_half_close is None:
            self.end(StatusCode.INTERNAL, "This method accepts only one message.")
            return
        self._has_message = True
        try:
            response = self.on_message(message, self)
        except CallError as error:
            self.end(error.code, str(error))
        except Exception as error:
            log.exception("%s failed", self.headers[":path"])
            # The text of other errors is not meant for clients.
            is_own_error = isinstance(error, SluiceError)
            self.end(StatusCode.INTERNAL, str(error) if is_own_error else type(error).__name__)
        else:
            if response is not None:
                self.reply(response)

    def _handle_half_close(self) -> None:
        """Handle the end of the request: call `on_half_close`, or fail if it is incomplete."""
        if self._buffer is not None:
            self.end(StatusCode.INTERNAL, "The last message is incomplete.")
        elif not self._has_message:
            self.end(StatusCode.INTERNAL, "The call ended without a message.")
        elif self.on_half_close is not None:
            self.on_half_close()

    @property
    def age_s(self) -> float:
        """The seconds since the headers of the call were received."""
        return self.connection.now_s - self._begin_s

    @property
    def remaining_s(self) -> float | None:
        """The seconds until the deadline, below 0 after it; None without a deadline."""
        return None if self._timeout_s is None else self._timeout_s - self.age_s

    def expire(self) -> None:
        """End the call with DEADLINE_EXCEEDED, because its deadline has passed.

        If response bytes wait for a flow-control window, reset the stream instead.
        """
        if self._outgoing is not None:
            self.reset(ErrorCode.CANCEL)
        else:
            self.cancelled()
            self.end(StatusCode.DEADLINE_EXCEEDED)

    def cancelled(self) -> None:
        if self.on_cancelled is not None:
            self.on_cancelled()

    def close(self) -> None:
        super().close()
        self._deadlines.discard(self, self._due_ms)
        self._drop_buffer()

    def _drop_buffer(self) -> None:
        """Drop the bytes of a message that will not be completed."""
        if self._buffer is not None:
            self.connection.buffered_bytes -= len(self._buffer)
            self._buffer = None

    # ------------------------------------------------------------------------------- responses

    # Called for each unary call: keep it cheap.
    def reply(self, message: bytes) -> None:
        """Send the only response message, and end the call with OK."""
        self.send_response(_HEADERS, _PREFIX.pack(0, len(message)) + message, _OK_TRAILERS)

    def send(self, message: bytes) -> None:
        """Send one of several response messages. The caller calls `end` after the last one."""
        if not self._has_sent_headers:
            self._has_sent_headers = True
            self.send_headers(_HEADERS)
        self.send_data(_PREFIX.pack(0, len(message)) + message)

    def reply_all(self, messages: Sequence[bytes]) -> None:
        """Send all response messages at once, and end the call with OK."""
        pack = _PREFIX.pack
        framed_messages: list[bytes] = []
        for message in messages:
            framed_messages += (pack(0, len(message)), message)
        self.send_response(_HEADERS, b"".join(framed_messages), _OK_TRAILERS)

    def end(self, code: StatusCode = StatusCode.OK, text: str = "") -> None:
        """End the call with a status. Messages that were sent before arrive first.

        The client receives at most STATUS_TEXT_LENGTH_MAX characters of `text`.
        """
        fields: list[tuple[str, str]] = [] if self._has_sent_headers else [*_CONTENT]
        fields.append(("grpc-status", str(int(code))))
        if code == StatusCode.UNIMPLEMENTED:
            fields.append(_ACCEPTED_ENCODINGS)
        if text:
            quoted = quote(text[:STATUS_TEXT_LENGTH_MAX], safe=_UNQUOTED, errors="replace")
            fields.append(("grpc-message", quoted))
        self.send_trailers(encode_headers(fields))


def _parse_timeout_s(header: str) -> float | None:
    """Parse a `grpc-timeout` value, such as "100m" for 0.1 s. Return None if it is not valid."""
    match = _TIMEOUT.fullmatch(header)
    if match is None:
        return None
    number = int(match[1])
    unit = match[2]
    return number * _UNITS_S[unit]


class Deadlines:
    """The open calls of a server that have a deadline, ordered by it.

    Finding the expired calls costs nothing for the others: a server may have a million open calls.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        """Create an empty collection of deadlines. `now_s` is the clock."""
        self._now_s = now_s
        self._calls: dict[int, set[Call]] = {}
        """The calls by their deadline in milliseconds, on the clock `now_s`."""
        self._order: list[int] = []
        """A heap of the keys of `_calls`, and of stale ones whose calls have all ended."""

    def add(self, call: Call, timeout_s: float | None) -> int | None:
        """Add a call that begins now. Return its deadline in milliseconds, for `discard`.

        Do nothing and return None if `timeout_s` is None.
        """
        if timeout_s is None:
            return None
        due_ms = int((self._now_s() + timeout_s) * 1000) + 1
        calls = self._calls.get(due_ms)
        if calls is None:
            calls = self._calls[due_ms] = set()
            heapq.heappush(self._order, due_ms)
            # Remove stale entries when they are the majority. A sorted list is a heap.
            if len(self._order) > 2 * len(self._calls) + STALE_DEADLINES:
                self._order = sorted(self._calls)
        calls.add(call)
        return due_ms

    def discard(self, call: Call, due_ms: int | None) -> None:
        """Remove a call, if it is there. `due_ms` is the deadline that `add` returned."""
        calls = None if due_ms is None else self._calls.get(due_ms)
        if calls is not None and due_ms is not None:
            calls.discard(call)
            if not calls:
                del self._calls[due_ms]

    def pop_expired(self) -> list[Call]:
        """Remove and return the calls whose deadline has passed."""
        now_ms = int(self._now_s() * 1000)
        expired = list[Call]()
        while self._order and self._order[0] <= now_ms:
            expired += self._calls.pop(heapq.heappop(self._order), ())
        return expired


class GrpcServer(Http2Server):
    """A server for gRPC methods."""

    def __init__(
        self,
        methods: Methods,
        scheduler: FairScheduler = NULL_SCHEDULER,
        *,
        is_guarded: bool = False,
        on_disconnect: OnPeer | None = None,
        limits: ServerLimits = SERVER_LIMITS,
        tls: TlsAcceptor | None = None,
    ) -> None:
        """Create a server for `methods`, which maps paths to handlers. `start` opens its ports.

        `scheduler` shares the time of the event loop between connections. `is_guarded` means that
        access control decides about requests. `on_disconnect` is called with the peer of each
        connection that has ended. `tls` serves TLS on the same ports; None serves plain connections
        only.
        """
        self._deadlines = Deadlines(scheduler.now_s)
        make_call = cast(Any, partial(Call, methods, self._deadlines))
        super().__init__(
            make_call,
            scheduler,
            is_guarded=is_guarded,
            on_disconnect=on_disconnect,
            limits=limits,
            tls=tls,
        )
        self._expiry_timer: asyncio.TimerHandle | None = None

    async def start(self, host: str | None, ports: Sequence[int]) -> None:
        await super().start(host, ports)
        loop = asyncio.get_running_loop()
        self._expiry_timer = loop.call_later(EXPIRE_PERIOD_S, self._expire_calls)

    async def close(self) -> None:
        """Stop listening, close every connection, and stop checking deadlines."""
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
            self._expiry_timer = None
        await super().close()

    @property
    def open_calls(self) -> list[Call]:
        """The calls of all connections whose response is not complete."""
        calls: list[Call] = []
        for connection in self.connections:
            streams = cast(Http2Connection, connection).streams
            calls += [cast(Call, stream) for stream in streams]
        return calls

    def _expire_calls(self) -> None:
        """End the calls whose deadline has passed. Schedule the next call of this method."""
        for call in self._deadlines.pop_expired():
            call.expire()
        loop = asyncio.get_running_loop()
        self._expiry_timer = loop.call_later(EXPIRE_PERIOD_S, self._expire_calls)


# ------------------------------------------------------------------------------------ the client

_STREAM_ID: Final = 1
# The windows are opened as wide as possible, so that the response needs no WINDOW_UPDATE.
_CLIENT_PREFACE: Final = b"".join(
    (
        h.PREFACE,
        h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: h.WINDOW_BYTES_MAX}),
        h.encode_window_update(0, h.WINDOW_BYTES_MAX - h.WINDOW_BYTES),
    )
)


def call_unary(
    address: str,
    path: str,
    message: bytes,
    metadata: Iterable[tuple[str, str]] = (),
    *,
    tls: Tls | None = None,
    timeout_s: float = 5.0,
) -> bytes:
    """Call a method on a new blocking connection, and return the response message.

    `address` is `host:port`, and `path` is "/package.Service/Method". `message` must be small,
    because flow control is not respected. `metadata` has names in lower case. If `tls` is None, the
    connection is plain. `timeout_s` limits each wait for the socket.

    Raise CallError if the call ends with a status other than OK, ConnectionLostError if the
    connection fails, RequestTimeoutError after `timeout_s`, and ProtocolError if `address` is
    malformed.
    """
    host = parse_host(address)
    headers_frame, data_frame = _encode_call(address, path, message, metadata, is_tls=bool(tls))
    request = _CLIENT_PREFACE + headers_frame + data_frame
    try:
        headers, data = _exchange(host, request, tls, timeout_s)
    except TimeoutError as error:
        raise RequestTimeoutError(f"{address} did not respond within {timeout_s:g} s.") from error
    except OSError as error:
        raise ConnectionLostError(
            f"Cannot connect to {address}: {error.strerror or error}.",
            fix="Check that a proxy runs there, and whether it requires TLS (--tls).",
        ) from error

    status = int(headers.get("grpc-status", StatusCode.UNKNOWN))
    if status != StatusCode.OK:
        code = StatusCode(status) if status in StatusCode._value2member_map_ else StatusCode.UNKNOWN
        raise CallError(code, unquote(headers.get("grpc-message", "")) or code.name)
    return data[_PREFIX.size :]


def _encode_call(
    address: str,
    path: str,
    message: bytes,
    metadata: Iterable[tuple[str, str]],
    *,
    is_tls: bool,
) -> tuple[bytes, bytes]:
    """Encode a call with one message. Return (HEADERS frame, DATA frame).

    `metadata` are further headers. `is_tls` decides the scheme, https or http.
    """
    fields = [
        (":method", "POST"),
        (":scheme", "https" if is_tls else "http"),
        (":path", path),
        (":authority", address),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    ]
    headers_frame = h.encode_frame(h.HEADERS, h.END_HEADERS, _STREAM_ID, encode_headers(fields))
    data = _PREFIX.pack(0, len(message)) + message
    data_frame = h.encode_frame(h.DATA, h.END_STREAM, _STREAM_ID, data)
    return headers_frame, data_frame


def _exchange(
    host: Host, request: bytes, tls: Tls | None, timeout_s: float
) -> tuple[dict[str, str], bytes]:
    """Send a request on a new connection. Return (headers, data) of the response.

    `request` contains encoded frames. Raise OSError or ConnectionLostError if the connection fails.
    """
    with socket.create_connection((host.address, host.port), timeout_s) as plain:
        if tls is None:
            plain.sendall(request)
            return _read_response(plain)
        name = tls.server_name or host.address
        with client_context(tls).wrap_socket(plain, server_hostname=name) as secure:
            secure.sendall(request)
            return _read_response(secure)


def _read_response(connection: socket.socket) -> tuple[dict[str, str], bytes]:
    """Read frames until the response ends. Return (headers and trailers together, data).

    Raise ConnectionLostError if the server closes the connection before.
    """
    reader = HeaderDecoder()
    headers = dict[str, str]()
    data = bytearray()
    for frame_type, flags, stream_id, payload in _iter_frames(connection):
        if frame_type == h.HEADERS:
            headers |= reader.decode(payload)
        elif frame_type == h.DATA:
            data += payload
        is_end = frame_type == h.RST_STREAM or flags & h.END_STREAM
        if stream_id == _STREAM_ID and is_end:
            return headers, bytes(data)
    raise ConnectionLostError("The connection closed before the response arrived.")


def _iter_frames(connection: socket.socket) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (type, flags, stream id, payload) of each frame, until the connection ends."""
    unread = b""
    while received := connection.recv(1 << 18):
        unread += received
        while len(unread) >= h.FRAME_HEADER_BYTES:
            length_and_type, flags, stream_id = h.unpack_frame_header(unread)
            end = h.FRAME_HEADER_BYTES + (length_and_type >> 8)
            if end > len(unread):
                break  # the frame is not whole
            yield length_and_type & 0xFF, flags, stream_id, unread[h.FRAME_HEADER_BYTES : end]
            unread = unread[end:]
