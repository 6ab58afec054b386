"""Frames of HTTP/2 (RFC 9113). Nothing here does I/O.

    | length 3 | type 1 | flags 1 | stream 4 | payload |

A connection begins with the client's PREFACE and one SETTINGS frame from each side. Stream 0 is the
connection itself. The streams of a client have odd, increasing numbers. An error that ends the
connection raises Http2Error, with the error code for the GOAWAY frame.
"""

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from sluicemq.errors import ProtocolError

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES: Final = 9
FRAME_BYTES_MAX: Final = 16_384
"""The largest payload, unless the receiver allows more in its SETTINGS. SluiceMQ never does."""
FRAME_BYTES_LIMIT: Final = (1 << 24) - 1
"""The largest value of the setting MAX_FRAME_SIZE."""
WINDOW_BYTES: Final = 65_535
"""The initial flow-control window of each stream and of the connection."""
WINDOW_BYTES_MAX: Final = (1 << 31) - 1
STREAM_MAX: Final = (1 << 31) - 1

# Frame types. They are plain integers because they are compared for every frame.
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


class ErrorCode(IntEnum):
    """An error code: why a stream or a connection ends (RFC 9113 §7)."""

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
    """The identifier of a setting in a SETTINGS frame (RFC 9113 §6.5.2)."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Http2Error(ProtocolError):
    """The connection must be closed; `code` tells the peer the reason.

    When: the bytes that arrive at a proxy's port are not HTTP/2, or violate its rules or limits.
    Then: the connection is closed; calls in progress on it get no response.
    Fix: connect clients of the remoting protocol to the ports of name server and broker.

        A frame of 20000 bytes is above the limit of 16384.
    """

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


_HEAD: Final = struct.Struct(">IBI")
_PAIR: Final = struct.Struct(">HI")
_NUMBER: Final = struct.Struct(">I")
_GOAWAY: Final = struct.Struct(">II")
unpack_frame_header: Final = _HEAD.unpack_from
"""A function (data, position) that returns (length << 8 | type, flags, stream)."""


def encode_frame_header(length: int, frame_type: int, flags: int, stream: int) -> bytes:
    """Encode the header, of nine bytes, of a frame with a payload of `length` bytes.

    This runs for every frame sent.
    """
    return _HEAD.pack(length << 8 | frame_type, flags, stream)


def encode_frame(frame_type: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Encode a whole frame."""
    return _HEAD.pack(len(payload) << 8 | frame_type, flags, stream) + payload


def encode_settings(settings: Mapping[Setting, int]) -> bytes:
    """Return a SETTINGS frame with these settings."""
    payload = b"".join(_PAIR.pack(identifier, value) for identifier, value in settings.items())
    return encode_frame(SETTINGS, 0, 0, payload)


def read_settings(payload: bytes) -> dict[int, int]:
    """Return the settings in the payload of a SETTINGS frame, including unknown ones.

    Raises Http2Error if the payload is malformed or a value is invalid.
    """
    if len(payload) % _PAIR.size:
        raise Http2Error(
            ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS has {len(payload)} bytes, not a multiple of 6."
        )
    settings = dict(_PAIR.iter_unpack(payload))
    if settings.get(Setting.INITIAL_WINDOW_SIZE, 0) > WINDOW_BYTES_MAX:
        raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is above 2147483647.")
    frame_bytes = settings.get(Setting.MAX_FRAME_SIZE, FRAME_BYTES_MAX)
    if not FRAME_BYTES_MAX <= frame_bytes <= FRAME_BYTES_LIMIT:
        raise Http2Error(
            ErrorCode.PROTOCOL_ERROR,
            f"MAX_FRAME_SIZE is {frame_bytes}; it must be 16384 to 16777215.",
        )
    if settings.get(Setting.ENABLE_PUSH, 0) > 1:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1.")
    return settings


def encode_window_update(stream: int, increment: int) -> bytes:
    """Encode a WINDOW_UPDATE frame that enlarges the window of a stream by `increment` bytes.

    Stream 0 stands for the window of the connection.
    """
    return encode_frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(increment))


def encode_rst_stream(stream: int, code: ErrorCode) -> bytes:
    """Encode a RST_STREAM frame, which ends a stream immediately."""
    return encode_frame(RST_STREAM, 0, stream, _NUMBER.pack(code))


def encode_goaway(last_stream: int, code: ErrorCode, reason: str = "") -> bytes:
    """Encode a GOAWAY frame, which says that no stream after `last_stream` is processed.

    `reason` is a text for people who read the frame.
    """
    return encode_frame(GOAWAY, 0, 0, _GOAWAY.pack(last_stream, code) + reason.encode())


def read_integer(payload: bytes, frame_type_name: str) -> int:
    """Return the integer in the payload of a WINDOW_UPDATE or RST_STREAM frame.

    `frame_type_name` is "WINDOW_UPDATE" or "RST_STREAM". In a WINDOW_UPDATE, the highest bit is
    reserved and ignored. Raises Http2Error if the payload does not have four bytes.
    """
    if len(payload) != _NUMBER.size:
        raise Http2Error(
            ErrorCode.FRAME_SIZE_ERROR,
            f"{frame_type_name} has {len(payload)} bytes; it must have 4.",
        )
    integer: int = _NUMBER.unpack(payload)[0]
    if frame_type_name == "RST_STREAM":
        return integer
    return integer & WINDOW_BYTES_MAX


def remove_padding(flags: int, payload: bytes, *, priority: bool = False) -> bytes:
    """Return the payload of a DATA or HEADERS frame without padding and priority fields.

    `flags` are the flags of the frame. If PADDED is set, the first byte is the number of padding
    bytes at the end. `priority` must be True for HEADERS frames, in which the flag HAS_PRIORITY
    announces five more bytes. Raises Http2Error if the payload is too short for these.
    """
    start = 0
    end = len(payload)
    if flags & PADDED:
        start = 1
        end = end - (payload[0] if payload else 0)
    if priority and flags & HAS_PRIORITY:
        start += 5
    if start > end:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "A frame has more padding than payload.")
    return payload[start:end]
