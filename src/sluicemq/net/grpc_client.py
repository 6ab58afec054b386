"""One blocking call of gRPC on a connection of its own: for the command line.

    preface, SETTINGS, WINDOW_UPDATE, HEADERS, DATA -> ... -> HEADERS, DATA, HEADERS (the trailers)

The windows are opened as wide as they go, so that the answer comes without a word from us; nothing
else of the protocol has to be here.
"""

import socket
import struct
from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote

from sluicemq.errors import ConnectionLostError, RequestTimeoutError
from sluicemq.model.ids import parse_host
from sluicemq.net.grpc import CallError, StatusCode
from sluicemq.net.tls import Tls
from sluicemq.wire import http2 as h
from sluicemq.wire.hpack import HeaderReader, encode_headers

_MESSAGE: Final = struct.Struct(">BI")
_STREAM: Final = 1
_BEGIN: Final = b"".join((
    h.PREFACE,
    h.settings({h.Setting.INITIAL_WINDOW_SIZE: h.WINDOW_BYTES_MAX}),
    h.window_update(0, h.WINDOW_BYTES_MAX - h.WINDOW_BYTES),
))  # fmt: skip


def call(
    address: str,
    path: str,
    message: bytes,
    metadata: Iterable[tuple[str, str]] = (),
    *,
    tls: Tls | None = None,
    timeout_s: float = 5.0,
) -> bytes:
    """The answer; `message` is small. Raises CallError for a call that ends with an error,
    ConnectionLostError, RequestTimeoutError (`timeout_s` bounds every wait)."""
    host = parse_host(address)
    fields = [
        (":method", "POST"), (":scheme", "https" if tls else "http"), (":path", path),
        (":authority", address), ("te", "trailers"), ("content-type", "application/grpc"),
        *metadata,
    ]  # fmt: skip
    request = b"".join((
        _BEGIN,
        h.frame(h.HEADERS, h.END_HEADERS, _STREAM, encode_headers(fields)),
        h.frame(h.DATA, h.END_STREAM, _STREAM, _MESSAGE.pack(0, len(message)) + message),
    ))  # fmt: skip
    try:
        with socket.create_connection((host.address, host.port), timeout_s) as plain:
            if tls is None:
                plain.sendall(request)
                headers, data = _answer(plain)
            else:
                from sluicemq.net.openssl import client_context  # noqa: PLC0415 - on demand

                name = tls.server_name or host.address
                with client_context(tls).wrap_socket(plain, server_hostname=name) as secure:
                    secure.sendall(request)
                    headers, data = _answer(secure)
    except TimeoutError as error:
        raise RequestTimeoutError(f"{address} did not answer within {timeout_s:g} s.") from error
    except OSError as error:
        raise ConnectionLostError(
            f"{address} cannot be reached: {error.strerror or error}.",
            cure="Is a proxy started there, and does it want TLS (--tls)?",
        ) from error
    status = int(headers.get("grpc-status", StatusCode.UNKNOWN))
    if status != StatusCode.OK:
        code = StatusCode(status) if status in StatusCode._value2member_map_ else StatusCode.UNKNOWN
        raise CallError(code, unquote(headers.get("grpc-message", "")) or code.name)
    return data[_MESSAGE.size :]


def _answer(connection: socket.socket) -> tuple[dict[str, str], bytes]:
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
