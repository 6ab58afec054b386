"""A client of HTTP/2 for tests: frames made by hand, and the headers as Netty and Go write them
(every field into the table, every text in the Huffman code), which is more than our server writes.
"""

import socket
import ssl
import struct
from collections.abc import Iterable
from typing import NamedTuple, Self

from sluicemq.wire import hpack
from sluicemq.wire import http2 as h

ENTRY_BYTES = 32


def _codes() -> dict[int, tuple[int, int]]:
    """symbol -> code, bits."""
    found, code, length = {}, 0, 0
    for bits, symbol in sorted((int(c, 36), n) for n, c in enumerate(hpack.HUFFMAN_CODE_LENGTHS)):
        code <<= bits - length
        found[symbol] = (code, bits)
        code, length = code + 1, bits
    return found


CODES = _codes()


def number(value: int, mask: int, first: int) -> bytes:
    if value < mask:
        return bytes([first | value])
    found, value = [first | mask], value - mask
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def coded(text: str) -> bytes:
    value = size = 0
    for byte in text.encode("latin-1"):
        code, bits = CODES[byte]
        value, size = value << bits | code, size + bits
    padding = -size % 8
    data = (value << padding | (1 << padding) - 1).to_bytes((size + padding) // 8, "big")
    return number(len(data), 0x7F, 0x80) + data


def plain(text: str) -> bytes:
    return number(len(text), 0x7F, 0) + text.encode("latin-1")


class HeaderWriter:
    """Writes header blocks with a table of its own."""

    def __init__(self, size_max: int = hpack.DYNAMIC_TABLE_BYTES_MAX) -> None:
        self.entries: list[tuple[str, str]] = []  # the newest first
        self.size_max = size_max

    def write(self, fields: Iterable[tuple[str, str]], *, form: int = 0x40) -> bytes:
        """`form`: 0x40 into the table, 0 or 0x10 nowhere."""
        return b"".join(self._field(field, form) for field in fields)

    def _field(self, field: tuple[str, str], form: int) -> bytes:
        known = [*hpack.STATIC_TABLE, *self.entries]
        if field in known[1:]:
            return number(known.index(field, 1), 0x7F, 0x80)
        names = [name for name, _ in known]
        mask = 0x3F if form == 0x40 else 0x0F
        if field[0] in names[1:]:
            begin = number(names.index(field[0], 1), mask, form)
        else:
            begin = bytes([form]) + coded(field[0])
        if form == 0x40:
            self.entries.insert(0, field)
            while sum(len(n) + len(v) + ENTRY_BYTES for n, v in self.entries) > self.size_max:
                self.entries.pop()
        return begin + coded(field[1])


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def is_last(self) -> bool:
        return self.kind <= h.HEADERS and bool(self.flags & h.END_STREAM)


def frames_of(data: bytes) -> tuple[list[Frame], bytes]:
    """Whole frames, and what is left."""
    found, position = [], 0
    while len(data) - position >= h.FRAME_HEADER_BYTES:
        mark, flags, stream = struct.unpack_from(">IBI", data, position)
        end = position + h.FRAME_HEADER_BYTES + (mark >> 8)
        if end > len(data):
            break
        found.append(Frame(mark & 0xFF, flags, stream, data[position + h.FRAME_HEADER_BYTES : end]))
        position = end
    return found, data[position:]


def message(data: bytes) -> bytes:
    return struct.pack(">BI", 0, len(data)) + data


class Answer(NamedTuple):
    """What came on a stream."""

    headers: dict[str, str]
    messages: list[bytes]

    @property
    def status(self) -> int:
        return int(self.headers.get("grpc-status", -1))


class Client:
    """One blocking connection."""

    def __init__(self, port: int, host: str = "127.0.0.1", *, tls: bool = False) -> None:
        self.socket = socket.create_connection((host, port), 10)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            self.socket = context.wrap_socket(self.socket)
        self.writer = HeaderWriter()
        self.reader = hpack.HeaderDecoder()
        self.frames: list[Frame] = []
        self.headers: dict[int, dict[str, str]] = {}
        self._rest = b""
        self._last = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def begin(self, *settings: tuple[int, int]) -> Self:
        pairs = b"".join(struct.pack(">HI", *item) for item in settings)
        self.send(h.PREFACE + h.encode_frame(h.SETTINGS, 0, 0, pairs))
        return self

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def request(self, path: str, *fields: tuple[str, str]) -> bytes:
        """A header block for a call."""
        begin = [
            (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test"),
            ("te", "trailers"), ("content-type", "application/grpc"),
        ]  # fmt: skip
        return self.writer.write([*begin, *fields])

    def open(self, path: str, *fields: tuple[str, str], flags: int = h.END_HEADERS) -> int:
        """A stream whose client has not said all."""
        self._last += 2
        self.send(h.encode_frame(h.HEADERS, flags, self._last, self.request(path, *fields)))
        return self._last

    def call(self, path: str, data: bytes, *fields: tuple[str, str]) -> Answer:
        """A whole call."""
        stream = self.open(path, *fields)
        self.send(h.encode_frame(h.DATA, h.END_STREAM, stream, message(data)))
        return self.answer(stream)

    def read(self) -> bool:
        """More frames, False at the end of the connection."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        found, self._rest = frames_of(self._rest + data)
        for frame in found:
            if frame.kind == h.HEADERS:
                self.headers.setdefault(frame.stream, {}).update(self.reader.decode(frame.payload))
        self.frames += found
        return bool(data)

    def until(self, kind: int, stream: int = 0) -> Frame:
        """The next frame of that kind there, which is taken."""
        while True:
            for frame in self.frames:
                if (frame.kind, frame.stream) == (kind, stream):
                    self.frames.remove(frame)
                    return frame
            assert self.read(), f"the connection ended; there are {self.frames}"

    def answer(self, stream: int) -> Answer:
        while not any(frame.stream == stream and frame.is_last for frame in self.frames):
            reset = [f for f in self.frames if (f.kind, f.stream) == (h.RST_STREAM, stream)]
            assert not reset, f"reset: {reset}"
            assert self.read(), f"the connection ended; there are {self.frames}"
        data = b"".join(
            frame.payload for frame in self.frames if (frame.kind, frame.stream) == (0, stream)
        )
        found = []
        while data:
            size = struct.unpack(">I", data[1:5])[0]
            found.append(data[5 : 5 + size])
            data = data[5 + size :]
        return Answer(self.headers[stream], found)

    def ended(self) -> h.ErrorCode:
        """Reads to the end of the connection; the code of its GOAWAY."""
        while self.read():
            pass
        (frame,) = (frame for frame in self.frames if frame.kind == h.GOAWAY)
        return h.ErrorCode(struct.unpack(">I", frame.payload[4:8])[0])
