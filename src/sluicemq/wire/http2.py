"""Frames of HTTP/2 (RFC 9113), without I/O.

    | length 3 | kind 1 | flags 1 | stream 4 | payload |

A connection begins with the client's PREFACE and a SETTINGS frame of each side. Stream 0 is the
connection itself; a client's streams have odd numbers that grow. What breaks a connection raises
Http2Error with the code that its GOAWAY carries.
"""

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from sluicemq.errors import ProtocolError

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9
FRAME_BYTES_MAX: Final = 16_384
"""Of a payload, unless the receiver has said that it takes more; we say nothing."""
FRAME_BYTES_LIMIT: Final = (1 << 24) - 1
WINDOW_BYTES: Final = 65_535
"""Of each stream and of the connection, until their receiver grants more."""
WINDOW_BYTES_MAX: Final = (1 << 31) - 1
STREAM_MAX: Final = (1 << 31) - 1

# Kinds. Plain numbers: each frame is looked at.
DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

# Flags.
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20


class Code(IntEnum):
    """Why a stream or a connection ends (RFC 9113 §7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class Setting(IntEnum):
    """What a side says of itself (RFC 9113 §6.5.2)."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Http2Error(ProtocolError):
    """The connection has to end; `code` says to the other side why.

    When: what arrives at a proxy's port is not HTTP/2, or breaks its rules or limits.
    Then: the connection is closed; calls under way on it are not answered.
    Fix: clients of the remoting protocol use the ports of name server and broker.

        A frame of 20000 bytes is above the limit of 16384.
    """

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


_HEAD: Final = struct.Struct(">IBI")
_PAIR: Final = struct.Struct(">HI")
_NUMBER: Final = struct.Struct(">I")
_GOAWAY: Final = struct.Struct(">II")
unpack_head: Final = _HEAD.unpack_from
"""(data, position) -> length << 8 | kind, flags, stream."""


def head(length: int, kind: int, flags: int, stream: int) -> bytes:
    """The nine bytes before a payload of that length. HOT."""
    return _HEAD.pack(length << 8 | kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    return _HEAD.pack(len(payload) << 8 | kind, flags, stream) + payload


def settings(values: Mapping[Setting, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_PAIR.pack(*item) for item in values.items()))


def read_settings(payload: bytes) -> dict[int, int]:
    """What a SETTINGS frame says, unknown settings included. Raises Http2Error."""
    if len(payload) % _PAIR.size:
        raise Http2Error(Code.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes: not 6 each.")
    found = dict(_PAIR.iter_unpack(payload))
    if found.get(Setting.INITIAL_WINDOW_SIZE, 0) > WINDOW_BYTES_MAX:
        raise Http2Error(Code.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is above 2147483647.")
    frame_bytes = found.get(Setting.MAX_FRAME_SIZE, FRAME_BYTES_MAX)
    if not FRAME_BYTES_MAX <= frame_bytes <= FRAME_BYTES_LIMIT:
        raise Http2Error(
            Code.PROTOCOL_ERROR, f"MAX_FRAME_SIZE is {frame_bytes}: it is 16384 to 16777215."
        )
    if found.get(Setting.ENABLE_PUSH, 0) > 1:
        raise Http2Error(Code.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1.")
    return found


def window_update(stream: int, more: int) -> bytes:
    """The receiver takes so many bytes more."""
    return frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(more))


def reset(stream: int, code: Code) -> bytes:
    """A stream ends at once."""
    return frame(RST_STREAM, 0, stream, _NUMBER.pack(code))


def goaway(last_stream: int, code: Code, text: str = "") -> bytes:
    """No stream after `last_stream` is served."""
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(last_stream, code) + text.encode())


def read_number(payload: bytes, what: str) -> int:
    """The payload of WINDOW_UPDATE or RST_STREAM, without its reserved bit. Raises Http2Error."""
    if len(payload) != _NUMBER.size:
        raise Http2Error(Code.FRAME_SIZE_ERROR, f"{what} of {len(payload)} bytes: it has 4.")
    number: int = _NUMBER.unpack(payload)[0]
    return number if what == "RST_STREAM" else number & WINDOW_BYTES_MAX


def unpadded(flags: int, payload: bytes, *, priority: bool = False) -> bytes:
    """What a DATA or HEADERS frame carries, without padding and priority. Raises Http2Error."""
    start, end = 0, len(payload)
    if flags & PADDED:
        start, end = 1, end - (payload[0] if payload else 0)
    if priority and flags & HAS_PRIORITY:
        start += 5
    if start > end:
        raise Http2Error(Code.PROTOCOL_ERROR, "A frame has more padding than payload.")
    return payload[start:end]
