"""Conversations of gRPC over HTTP/2 that nobody has.

Of a batch all but the last are calls whose messages, metadata, gRPC prefixes and frames are odd but
keep the connection whole: a PING behind them has to be answered. The last one is a recorded or made
conversation with something broken in it: lengths, kinds, flags, streams, windows, settings, header
blocks, the order of frames. It has a connection of its own, which has to end when its client has
said all.
"""

import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Final

from fuzz import grpc_calls
from fuzz.grpc_calls import METADATA, SERVICE
from fuzz.mutate import NAMES, VALUES, Input
from http2_client import Frame, HeaderWriter, coded, frames_of, number, plain
from sluicemq.wire import http2 as h
from sluicemq.wire.hpack import HeaderField

WINDOW: Final = (1 << 30) - 1
OPENING: Final = (
    h.PREFACE
    + h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: WINDOW})
    + h.encode_window_update(0, WINDOW)
)
ASK: Final = b"fuzz-ask"
QUESTION: Final = h.encode_frame(h.PING, 0, 0, ASK)
ANSWER: Final = h.encode_frame(h.PING, h.ACK, 0, ASK)
NUMBERS: Final = (
    0, 1, 2, 5, -1, 127, 128, 255, 256, 16_383, 16_384, 16_385, 65_535, (1 << 31) - 1, 1 << 31,
    (1 << 32) - 1, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1,
)  # fmt: skip
TIMEOUTS: Final = ("1S", "20m", "0S", "0m", "1n", "99999999H", "-1S", "1", "S", "1e3S", "1" * 40)
BINARY: Final = ("x-mq-bin", "grpc-trace-bin", "grpc-tags-bin")
NESTING: Final = 30_000


def clean(text: str) -> str:
    """What protobuf takes: no lone surrogates."""
    return text.encode("utf-8", "replace").decode()


class Http2Mutator:
    """Makes calls and conversations, all from one generator. `recorded`: what clients wrote."""

    def __init__(self, recorded: list[bytes], rng: Random) -> None:
        self._recorded = recorded
        self._rng = rng
        self._requests = list(grpc_calls.requests())
        self._writer = HeaderWriter()
        self._stream = -1

    # ------------------------------------------------------------- calls on a whole connection

    def plain(self) -> Input:
        """The next call of this connection."""
        rng = self._rng
        name, messages = rng.choice(self._requests)
        kind = rng.choice(("message", "message", "message", "bytes", "prefix", "metadata", "odd"))
        data = [it.SerializeToString() for it in messages]
        if kind == "message":
            data = [self._message(it) for it in messages]
        elif kind == "bytes":
            data = [self._bytes(it) for it in data]
        fields = self._metadata(name) if kind == "metadata" else self._fields(name)
        body = b"".join(struct.pack(">BI", 0, len(it)) + it for it in data)
        if kind == "prefix":
            body = self._prefixes(body)
        self._stream += 2 * rng.choice((1, 1, 1, 1, 7))
        return Input(kind, b"".join(self._frames(fields, body, is_odd=kind == "odd")))

    def _fields(self, name: str) -> list[HeaderField]:
        timeout = [("grpc-timeout", self._rng.choice(TIMEOUTS))] * (self._rng.random() < 0.3)
        return [
            (":method", "POST"), (":scheme", "http"), (":path", SERVICE + name),
            (":authority", "127.0.0.1:8081"), ("te", "trailers"),
            ("content-type", "application/grpc"), *timeout, *METADATA,
        ]  # fmt: skip

    def _metadata(self, name: str) -> list[HeaderField]:
        """Fields too few, too many, of other values."""
        rng = self._rng
        fields = self._fields(name)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at, kind = int(rng.random() * len(fields)), rng.random()
            if kind < 0.3:
                del fields[at]
            elif kind < 0.7:
                value = rng.choice((*VALUES, *NAMES)).encode("utf-8", "replace").decode("latin-1")
                fields[at] = fields[at][0], value[: rng.choice((20, 3000))]
            elif kind < 0.85:
                fields.append(rng.choice(fields))
            else:
                fields.append((rng.choice((*BINARY, "", "X", "x" * 300, ":path")), "\xff\0"))
        return fields

    def _frames(self, fields: list[HeaderField], body: bytes, *, is_odd: bool) -> Iterator[bytes]:
        rng, stream = self._rng, self._stream
        ends_at_once = not body
        block = self._writer.write(fields, form=rng.choice((0x40, 0x40, 0, 0x10)))
        yield from self._block(block, h.END_STREAM * ends_at_once, is_odd=is_odd)
        at, end = 0, rng.random()
        while at < len(body):
            size = rng.choice((1, 5, 100, 16_384, 16_384)) if is_odd else 16_384
            part = body[at : at + size]
            at += size
            if is_odd and rng.random() < 0.2 and len(part) < 16_000:
                padding = rng.choice((0, 1, 200))
                part, flags = bytes([padding]) + part + bytes(padding), h.PADDED
            else:
                flags = 0
            yield h.encode_frame(
                h.DATA, flags | h.END_STREAM * (at >= len(body) and end < 0.8), stream, part
            )
            if is_odd and rng.random() < 0.1:
                yield self._between()
            if at > 40_000 and size < 100:  # else a large one would be a flood of small frames
                body = body[:at]
        if end > 0.95:
            yield h.encode_rst_stream(stream, h.ErrorCode.CANCEL)
        elif end > 0.9:
            trailers = self._writer.write([("x-end", "1")])
            yield h.encode_frame(h.HEADERS, h.END_HEADERS | h.END_STREAM, stream, trailers)
        elif end > 0.8:
            yield h.encode_frame(h.DATA, h.END_STREAM, stream)

    def _block(self, block: bytes, flags: int, *, is_odd: bool) -> Iterator[bytes]:
        rng, stream = self._rng, self._stream
        if not is_odd and len(block) <= h.FRAME_BYTES_MAX:
            yield h.encode_frame(h.HEADERS, flags | h.END_HEADERS, stream, block)
            return
        at = rng.choice((0, 1, len(block) // 2, min(len(block), 16_000)))
        first, rest = block[:at], block[at:]
        if rng.random() < 0.5:
            flags |= h.PADDED | h.HAS_PRIORITY
            first = b"\x02" + struct.pack(">IB", 0, 15) + first + b"\0\0"
        yield h.encode_frame(h.HEADERS, flags | h.END_HEADERS * (not rest), stream, first)
        while rest:
            size = rng.choice((50, 500, 16_384))
            part, rest = rest[:size], rest[size:]
            yield h.encode_frame(h.CONTINUATION, h.END_HEADERS * (not rest), stream, part)

    def _between(self) -> bytes:
        """What may come at any time between frames."""
        return self._rng.choice(
            (
                h.encode_frame(h.PING, 0, 0, b"\0" * 8),
                h.encode_frame(0x42, 0xFF, self._stream, b"?"),
                h.encode_frame(h.PRIORITY, 0, self._stream, bytes(5)), h.encode_window_update(0, 1),
                h.encode_settings(
                    {h.Setting.INITIAL_WINDOW_SIZE: self._rng.choice((0, 1, WINDOW))}
                ),
                h.encode_settings({h.Setting.MAX_FRAME_SIZE: 1 << 20}),
                h.encode_frame(h.SETTINGS, h.ACK, 0),
                h.encode_settings({h.Setting.HEADER_TABLE_SIZE: 0}),
            )
        )  # fmt: skip

    def _prefixes(self, body: bytes) -> bytes:
        """Lengths and the mark of compression, changed."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.3:
            return struct.pack(">BI", rng.choice((1, 2, 255)), len(body) - 5) + body[5:]
        if kind < 0.6:
            size = rng.choice((0, 1, len(body), 1 << 20, 1 << 24, (1 << 24) + 1, (1 << 32) - 1))
            return struct.pack(">BI", 0, size) + body[5:]
        if kind < 0.8:
            return body * rng.choice((2, 3, 40))
        return body[: int(rng.random() * len(body))]

    # ------------------------------------------------------------------------------- messages

    def _message(self, original: Any) -> bytes:
        """A message with fields of other values, anywhere in it."""
        rng = self._rng
        made = type(original).FromString(original.SerializeToString())
        for _ in range(rng.choice((1, 1, 2, 4))):
            here = made
            while True:
                field = rng.choice(here.DESCRIPTOR.fields)
                inner = field.message_type is not None and not field.is_repeated
                if not inner or rng.random() < 0.15:
                    break
                here = getattr(here, field.name)
            self._set(here, field)
        return bytes(made.SerializeToString())

    def _set(self, here: Any, field: Any) -> None:
        rng = self._rng
        if rng.random() < 0.15:
            here.ClearField(field.name)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(rng.choice((1, 3, 500))):
                getattr(here, field.name)[self._text()] = self._text()
        elif field.message_type is not None:
            inner = getattr(here, field.name)
            if field.is_repeated:
                copies = [inner[0]] * rng.choice((1, 10, 40, 300)) if len(inner) else [None]
                for copy in copies:
                    inner.add() if copy is None else inner.append(copy)
            else:
                inner.SetInParent()
        else:
            value = self._value(field)
            if field.is_repeated:
                getattr(here, field.name).extend([value] * rng.choice((1, 3, 100)))
            else:
                setattr(here, field.name, value)

    def _text(self) -> str:
        return clean(self._rng.choice(self._rng.choice((NAMES, VALUES))))

    def _value(self, field: Any) -> Any:
        """Of the kind of a field without messages."""
        rng, kind = self._rng, field.cpp_type
        if kind == field.CPPTYPE_STRING:
            if field.type == field.TYPE_BYTES:
                return rng.randbytes(rng.choice((0, 1, 100, 5000))) * rng.choice((1, 1, 1, 900))
            return self._text()
        if kind == field.CPPTYPE_BOOL:
            return rng.random() < 0.5
        if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
            return rng.choice((0.0, -1.5, 1e30, float("nan"), float("inf")))
        bits = 64 if kind in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) else 32
        value = rng.choice(NUMBERS) % (1 << bits)
        is_signed = kind not in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64)
        return value - (1 << bits) if is_signed and value >> bits - 1 else value

    def _bytes(self, data: bytes) -> bytes:
        """Bytes that nearly are a message."""
        rng, kind = self._rng, self._rng.random()
        if kind < 0.4 and data:
            changed = bytearray(data)
            for _ in range(rng.choice((1, 2, 8))):
                changed[int(rng.random() * len(changed))] = int(rng.random() * 256)
            return bytes(changed)
        if kind < 0.6:
            return data[: int(rng.random() * (len(data) + 1))]
        if kind < 0.7:
            return data * rng.choice((2, 50))
        if kind < 0.8:
            return data + rng.choice((b"\x0b" * NESTING, b"\x0a\xff\xff\xff\xff\x0f", b"\xff" * 11))
        return rng.randbytes(int(rng.random() * 200))

    # --------------------------------------------------------------- conversations that break

    def breaking(self) -> Input:
        """The whole of another connection."""
        rng = self._rng
        if rng.random() < 0.6:
            data = rng.choice(self._recorded)
        else:
            other = Http2Mutator(self._recorded, rng)
            data = OPENING + b"".join(other.plain().data for _ in range(rng.choice((1, 3, 8))))
        frames = frames_of(data[len(h.PREFACE) :])[0]
        make: Callable[[list[Frame]], None] = rng.choice(
            (self._heads, self._payloads, self._order, self._blocks, self._said, self._flood)
        )
        make(frames)
        data = h.PREFACE + b"".join(h.encode_frame(*frame) for frame in frames)
        if rng.random() < 0.15:
            data = self._bytes(data)
        return Input(make.__name__[1:], data, breaks=True)

    def _heads(self, frames: list[Frame]) -> None:
        """Kinds, flags and streams of other values; a length by a frame inside a frame."""
        rng = self._rng
        for _ in range(rng.choice((1, 1, 3))):
            at = int(rng.random() * len(frames))
            kind, flags, stream, payload = frames[at]
            which = rng.random()
            if which < 0.25:
                kind = rng.choice((*range(12), 255))
            elif which < 0.55:
                flags = rng.choice((flags ^ 1 << rng.randrange(8), 0, 255))
            elif which < 0.8:
                stream = rng.choice(
                    (0, 1, 2, stream + 2, stream + 1, max(stream - 2, 0), (1 << 31) - 1, 1 << 31)
                )
            else:
                payload = h.encode_frame_header(
                    rng.choice((0, 1, 8, 1 << 14, (1 << 14) + 1, (1 << 24) - 1)), kind, flags,
                    stream & 0xFFFFFFFF,
                ) + payload  # fmt: skip
            frames[at] = Frame(kind, flags, stream, payload)

    def _payloads(self, frames: list[Frame]) -> None:
        at = int(self._rng.random() * len(frames))
        frames[at] = frames[at]._replace(payload=self._bytes(frames[at].payload)[: 1 << 16])

    def _order(self, frames: list[Frame]) -> None:
        """Frames again, left out, elsewhere."""
        rng = self._rng
        for _ in range(rng.choice((1, 2, 5))):
            at, to = (int(rng.random() * len(frames)) for _ in range(2))
            kind = rng.random()
            if kind < 0.3:
                frames.insert(to, frames[at])
            elif kind < 0.6 and len(frames) > 1:
                del frames[at]
            else:
                frames[at], frames[to] = frames[to], frames[at]

    def _blocks(self, frames: list[Frame]) -> None:
        """A header block that is none, names what is not there, or becomes much."""
        rng = self._rng
        places = [at for at, frame in enumerate(frames) if frame.kind == h.HEADERS]
        if not places:
            return
        at = rng.choice(places)
        block = frames[at].payload
        large = number(62, 0x7F, 0x80)
        block = rng.choice(
            (
                self._bytes(block), b"\x40" + coded("x") + plain("v" * 4000) + large * 15,
                b"\x40" + coded("x") + plain("v" * 4000) + large * 100, block + large * 3000,
                b"\x3f\xe1\x1f" + block, b"\x20" + block, b"\x3f" + b"\xff" * 9 + block,
                number(rng.choice((0, 61, 62, 70, 1 << 20)), 0x7F, 0x80), b"",
                b"\0" + number(rng.choice((5, 1 << 14, 1 << 27)), 0x7F, 0x80) + b"\xff" * 20,
                block * 3,
            )
        )  # fmt: skip
        frames[at] = frames[at]._replace(payload=block[: 1 << 14])

    def _said(self, frames: list[Frame]) -> None:
        """Settings and windows of other values."""
        rng = self._rng
        for _ in range(rng.choice((1, 2, 6))):
            value = rng.choice(NUMBERS) & 0xFFFFFFFF
            stream = rng.choice((0, 1, 3, 9, 2, 1001))
            made = rng.choice(
                (
                    Frame(h.SETTINGS, 0, 0, struct.pack(">HI", rng.randrange(9), value)),
                    Frame(h.WINDOW_UPDATE, 0, stream, struct.pack(">I", value)),
                    Frame(h.RST_STREAM, 0, stream, struct.pack(">I", value)),
                    Frame(h.GOAWAY, 0, 0, struct.pack(">II", value, 0) + b"why"),
                )
            )
            frames.insert(int(rng.random() * (len(frames) + 1)), made)

    def _flood(self, frames: list[Frame]) -> None:
        rng = self._rng
        at = int(rng.random() * len(frames))
        most = 1500 if len(frames[at].payload) < 1000 else 200
        frames[at:at] = [frames[at]] * rng.choice((3, 60, most))
