"""gRPC: calls on streams of HTTP/2, their metadata, messages, deadlines, and how they end.

    HEADERS   :path /package.Service/Method, metadata, grpc-timeout
    DATA      | is compressed 1 | length 4 | message | ...
    HEADERS   grpc-status, grpc-message                      the trailers

A method is a plain function `(message, call) -> answer`. Bytes are the answer of a call that has
one; None says that `reply`, or `send` and `end`, come later. A CallError that it raises ends the
call. One that takes a stream of messages sets `on_half` at the first of them: it is called with
each (or what it has put at `on_message`), and `on_half` when no more come. The others take one, so
that a stream is one request.

A call is over at its deadline, which the client measures too: the look once a second only frees
what a client that is gone would hold. Compressed messages are refused: the clients of RocketMQ
send none, and a body that is compressed is their business.
"""

import asyncio
import heapq
import logging
import re
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, Final, cast
from urllib.parse import quote, unquote

from sluicemq.errors import ConnectionLostError, RequestTimeoutError, SluiceError
from sluicemq.model.ids import parse_host
from sluicemq.net.accept import REFUSAL, OnPeer
from sluicemq.net.http2 import Http2Connection, Http2Server, Stream
from sluicemq.net.limits import NOBODY_WAITS, SERVER_LIMITS, ServerLimits, Shares
from sluicemq.net.openssl import TlsAcceptor, client_context
from sluicemq.net.tls import Tls
from sluicemq.wire import http2 as h
from sluicemq.wire.hpack import HeaderReader, encode_headers
from sluicemq.wire.http2 import Code

log = logging.getLogger(__name__)

ALPN: Final = ("h2",)
"""What a client asks for that wants gRPC inside TLS; some hang up without the answer."""
MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of a request, as of a frame of the remoting protocol."""
EXPIRE_S: Final = 1.0
TEXT_MAX: Final = 1024
ENDED_LOOSE: Final = 1024
"""Deadlines of calls that have ended, which may stay in their order."""

_PREFIX: Final = struct.Struct(">BI")
_TIMEOUT: Final = re.compile(r"(\d{1,8})([HMSmun])")
_UNITS_S: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


class StatusCode(IntEnum):
    """How a call ends."""

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
    """A call ends with something else than OK.

    When: a proxy refuses a gRPC call, one of `sluice proxy status` for example.
    Then: what the call asked for was not done; `code` is gRPC's.
    Fix: the text is the proxy's; its log has more. UNIMPLEMENTED: the port is no proxy of ours.
    """

    def __init__(self, code: StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


_CONTENT: Final = (":status", "200"), ("content-type", "application/grpc")
_HEADERS: Final = encode_headers(_CONTENT)
_OK: Final = encode_headers([("grpc-status", "0")])
_ACCEPTED: Final = ("grpc-accept-encoding", "identity")
_NOT_GRPC: Final = encode_headers([(":status", "415")])

Handler = Callable[[bytes, "Call"], bytes | None]
Methods = Mapping[str, Handler]
"""By path."""


class Call(Stream):
    """One call of a method. `headers` are its metadata, names in lower case."""

    __slots__ = (
        "_begun_s", "_buffer", "_deadlines", "_due_ms", "_has_asked", "_has_started", "_is_paused",
        "_methods", "_timeout_s", "on_half", "on_lost", "on_message",
    )  # fmt: skip

    def __init__(
        self,
        methods: Methods,
        deadlines: "Deadlines",
        connection: Http2Connection,
        number: int,
        headers: dict[str, str],
    ) -> None:
        super().__init__(connection, number, headers)
        self._methods = methods
        self.on_message: Handler
        """What gets its messages: the method, which may put something else here."""
        self._begun_s = connection.now_s
        self._timeout_s = _timeout_s(headers.get("grpc-timeout", ""))
        self._deadlines = deadlines
        self._due_ms = deadlines.add(self, self._timeout_s)
        self._buffer: bytearray | None = None  # of a message that is not whole
        self._is_paused = False  # messages that are here wait for the connection's turn
        self._has_asked = False  # a message came
        self._has_started = False  # something was sent
        self.on_half: Callable[[], None] | None = None
        """What is done when a client that streams has said all."""
        self.on_lost: Callable[[], None] | None = None
        """What is done when the client gives up, at the latest at its deadline."""

    # ------------------------------------------------------------------------------ requests

    def begun(self) -> None:
        headers, connection = self.headers, self.connection
        handler = self._methods.get(headers.get(":path", ""))
        if connection.is_refused:
            connection.peer.count_refusal()
            self.end(StatusCode.PERMISSION_DENIED, REFUSAL)
        elif not headers.get("content-type", "").startswith("application/grpc"):
            self.finish(_NOT_GRPC)
        elif handler is None:
            name = headers.get(":path", "")
            self.end(StatusCode.UNIMPLEMENTED, f"The method {name[:TEXT_MAX]} is not served here.")
        else:
            self.on_message = handler
            if self.is_half:
                self.received(b"")

    def received(self, data: bytes) -> None:
        """HOT: nearly always one frame that is one message."""
        if self.is_ended:
            return
        if self._buffer is None and len(data) >= _PREFIX.size:
            is_compressed, size = _PREFIX.unpack_from(data)
            if size + _PREFIX.size == len(data) and not is_compressed:
                self._message(data[_PREFIX.size :])
                data = b""
        if data or self._buffer is not None:
            self._collect(data)
        if self.is_half and not self.is_ended and not self._is_paused:
            self._half()

    def go_on(self) -> None:
        """Handle the messages that are left of a frame."""
        self._is_paused = False
        self.received(b"")

    def _collect(self, data: bytes) -> None:
        """Messages in pieces, or several in one."""
        buffer = self._buffer = self._buffer or bytearray()
        buffer += data
        self.connection.buffered_bytes += len(data)
        while len(buffer) >= _PREFIX.size and not self.is_ended:
            is_compressed, size = _PREFIX.unpack_from(buffer)
            end = _PREFIX.size + size
            if is_compressed:
                self.end(StatusCode.UNIMPLEMENTED, "Compressed messages are not served here.")
            elif size > MESSAGE_BYTES_MAX:
                self.end(
                    StatusCode.RESOURCE_EXHAUSTED,
                    f"A message of {size} bytes is above the limit of {MESSAGE_BYTES_MAX}.",
                )
            elif end > len(buffer):
                return
            else:
                message = bytes(memoryview(buffer)[_PREFIX.size : end])
                del buffer[:end]
                self.connection.buffered_bytes -= end
                self._message(message)
                is_more = len(buffer) >= _PREFIX.size and not self.is_ended
                if is_more and self.connection.has_to_pause():
                    self.connection.resume_later(self)
                    self._is_paused = True
                    return
        if not buffer or self.is_ended:
            self._drop()

    def _message(self, message: bytes) -> None:
        if self._has_asked and self.on_half is None:
            self.end(StatusCode.INTERNAL, "This method takes one message.")
            return
        self._has_asked = True
        try:
            answer = self.on_message(message, self)
        except CallError as error:
            self.end(error.code, str(error))
        except Exception as error:
            text = str(error) if isinstance(error, SluiceError) else type(error).__name__
            log.exception("%s failed", self.headers[":path"])
            self.end(StatusCode.INTERNAL, text)
        else:
            if answer is not None:
                self.reply(answer)

    def _half(self) -> None:
        """No more comes: a message that is not whole will never be."""
        if self._buffer is not None:
            self.end(StatusCode.INTERNAL, "The last message is cut short.")
        elif not self._has_asked:
            self.end(StatusCode.INTERNAL, "The call ends before its message.")
        elif self.on_half is not None:
            self.on_half()

    @property
    def age_s(self) -> float:
        """Since its headers were here."""
        return self.connection.now_s - self._begun_s

    @property
    def remaining_s(self) -> float | None:
        """How long the client will wait from now on; None: for ever. Below 0 it waits no more."""
        return None if self._timeout_s is None else self._timeout_s - self.age_s

    def expire(self) -> None:
        """The client waits no more, neither for an answer nor for the rest of one."""
        if self._outgoing is not None:
            self.reset(Code.CANCEL)
        else:
            self.lost()
            self.end(StatusCode.DEADLINE_EXCEEDED)

    def lost(self) -> None:
        if self.on_lost is not None:
            self.on_lost()

    def close(self) -> None:
        super().close()
        self._deadlines.discard(self, self._due_ms)
        self._drop()

    def _drop(self) -> None:
        """What is not a whole message will not become one."""
        if self._buffer is not None:
            self.connection.buffered_bytes -= len(self._buffer)
            self._buffer = None

    # ------------------------------------------------------------------------------- answers

    def reply(self, message: bytes) -> None:
        """The only answer, and the end of the call. HOT."""
        self.respond(_HEADERS, _PREFIX.pack(0, len(message)) + message, _OK)

    def send(self, message: bytes) -> None:
        """One of several answers."""
        if not self._has_started:
            self._has_started = True
            self.start(_HEADERS)
        self.write(_PREFIX.pack(0, len(message)) + message)

    def reply_all(self, messages: Sequence[bytes]) -> None:
        """All answers of a call that has several, and its end."""
        pack = _PREFIX.pack
        self.respond(
            _HEADERS, b"".join([part for it in messages for part in (pack(0, len(it)), it)]), _OK
        )

    def end(self, code: StatusCode = StatusCode.OK, text: str = "") -> None:
        """The end, after what was sent."""
        fields: list[tuple[str, str]] = [] if self._has_started else [*_CONTENT]
        fields.append(("grpc-status", str(int(code))))
        if code == StatusCode.UNIMPLEMENTED:
            fields.append(_ACCEPTED)
        if text:
            quoted = quote(text[:TEXT_MAX], safe=_PRINTABLE, errors="replace")
            fields.append(("grpc-message", quoted))
        self.finish(encode_headers(fields))


def _timeout_s(text: str) -> float | None:
    """Return the time in seconds that a `grpc-timeout` names, None when it names none."""
    found = _TIMEOUT.fullmatch(text)
    return None if found is None else int(found[1]) * _UNITS_S[found[2]]


class Deadlines:
    """Open calls by their deadlines, so that looking for those that are over costs nothing for the
    others: a server may have a million open calls."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._calls: dict[int, set[Call]] = {}
        """By the millisecond of their deadline."""
        self._order: list[int] = []
        """A heap of these milliseconds, and of some whose calls have ended before."""

    def add(self, call: Call, timeout_s: float | None) -> int | None:
        """Note a call that begins now. Return the millisecond with which `discard` finds it, None
        for a call without a deadline."""
        if timeout_s is None:
            return None
        due_ms = int((self._now_s() + timeout_s) * 1000) + 1
        calls = self._calls.get(due_ms)
        if calls is None:
            calls = self._calls[due_ms] = set()
            heapq.heappush(self._order, due_ms)
            if len(self._order) > 2 * len(self._calls) + ENDED_LOOSE:
                self._order = sorted(self._calls)
        calls.add(call)
        return due_ms

    def discard(self, call: Call, due_ms: int | None) -> None:
        """Forget a call that is over. One that is not there any more is no error."""
        calls = None if due_ms is None else self._calls.get(due_ms)
        if calls is not None and due_ms is not None:
            calls.discard(call)
            if not calls:
                del self._calls[due_ms]

    def take_over(self) -> list[Call]:
        """Remove and return the calls whose deadline has passed."""
        now_ms, found = int(self._now_s() * 1000), list[Call]()
        while self._order and self._order[0] <= now_ms:
            found += self._calls.pop(heapq.heappop(self._order), ())
        return found


class GrpcServer(Http2Server):
    """Serves methods on all its ports."""

    def __init__(
        self,
        methods: Methods,
        shares: Shares = NOBODY_WAITS,
        *,
        is_guarded: bool = False,
        on_disconnect: OnPeer | None = None,
        limits: ServerLimits = SERVER_LIMITS,
        tls: TlsAcceptor | None = None,
    ) -> None:
        """`tls`: None serves plain connections only."""
        self._deadlines = Deadlines(shares.now_s)
        make = cast(Any, partial(Call, methods, self._deadlines))
        super().__init__(
            make, shares, is_guarded=is_guarded, on_disconnect=on_disconnect, limits=limits, tls=tls
        )
        self._expiry: asyncio.TimerHandle | None = None

    async def start(self, host: str | None, ports: Sequence[int]) -> None:
        await super().start(host, ports)
        self._expiry = asyncio.get_running_loop().call_later(EXPIRE_S, self._expire)

    async def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        await super().close()

    @property
    def calls(self) -> list[Call]:
        """Those that have no whole answer yet."""
        return [
            cast(Call, call)
            for connection in self.connections
            for call in cast(Http2Connection, connection).streams
        ]

    def _expire(self) -> None:
        for call in self._deadlines.take_over():
            call.expire()
        self._expiry = asyncio.get_running_loop().call_later(EXPIRE_S, self._expire)


# ------------------------------------------------------------------------------ the other side

_STREAM: Final = 1
_BEGIN: Final = b"".join((
    h.PREFACE,
    h.settings({h.Setting.INITIAL_WINDOW_SIZE: h.WINDOW_BYTES_MAX}),
    h.window_update(0, h.WINDOW_BYTES_MAX - h.WINDOW_BYTES),
))  # fmt: skip


def ask(
    address: str,
    path: str,
    message: bytes,
    metadata: Iterable[tuple[str, str]] = (),
    *,
    tls: Tls | None = None,
    timeout_s: float = 5.0,
) -> bytes:
    """One blocking call on a connection of its own, for the command line; `message` is small. The
    windows are opened as wide as they go, so that the answer comes without a word from us. Raises
    CallError for a call that ends with an error, ConnectionLostError, RequestTimeoutError
    (`timeout_s` bounds every wait)."""
    host = parse_host(address)
    fields = [
        (":method", "POST"), (":scheme", "https" if tls else "http"), (":path", path),
        (":authority", address), ("te", "trailers"), ("content-type", "application/grpc"),
        *metadata,
    ]  # fmt: skip
    request = b"".join((
        _BEGIN,
        h.frame(h.HEADERS, h.END_HEADERS, _STREAM, encode_headers(fields)),
        h.frame(h.DATA, h.END_STREAM, _STREAM, _PREFIX.pack(0, len(message)) + message),
    ))  # fmt: skip
    try:
        with socket.create_connection((host.address, host.port), timeout_s) as plain:
            if tls is None:
                plain.sendall(request)
                headers, data = _read_answer(plain)
            else:
                name = tls.server_name or host.address
                with client_context(tls).wrap_socket(plain, server_hostname=name) as secure:
                    secure.sendall(request)
                    headers, data = _read_answer(secure)
    except TimeoutError as error:
        raise RequestTimeoutError(f"{address} did not answer within {timeout_s:g} s.") from error
    except OSError as error:
        raise ConnectionLostError(
            f"{address} cannot be reached: {error.strerror or error}.",
            fix="Is a proxy started there, and does it want TLS (--tls)?",
        ) from error
    status = int(headers.get("grpc-status", StatusCode.UNKNOWN))
    if status != StatusCode.OK:
        code = StatusCode(status) if status in StatusCode._value2member_map_ else StatusCode.UNKNOWN
        raise CallError(code, unquote(headers.get("grpc-message", "")) or code.name)
    return data[_PREFIX.size :]


def _read_answer(connection: socket.socket) -> tuple[dict[str, str], bytes]:
    """Headers and trailers, and the data between them."""
    reader, headers, data, rest = HeaderReader(), dict[str, str](), bytearray(), b""
    while received := connection.recv(1 << 18):
        rest += received
        while len(rest) >= h.HEAD_BYTES:
            mark, flags, number = h.unpack_head(rest)
            end = h.HEAD_BYTES + (mark >> 8)
            if end > len(rest):
                break
            kind, payload, rest = mark & 0xFF, rest[h.HEAD_BYTES : end], rest[end:]
            if kind == h.HEADERS:
                headers |= reader.read(payload)
            elif kind == h.DATA:
                data += payload
            if number == _STREAM and (kind == h.RST_STREAM or flags & h.END_STREAM):
                return headers, bytes(data)
    raise ConnectionLostError("The connection broke before the answer came.")
