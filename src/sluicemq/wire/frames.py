"""Frames of the remoting protocol, and the commands that they carry. Nothing here does I/O.

A command is a request or a response. It is sent as one frame, whose integers are big-endian
(spec/remoting.md §1-4):

    | total 4 | serialisation 1, header length 3 | header | body |

`total` does not count its own four bytes. The header is JSON (0) or ROCKETMQ binary (1). A peer may
use either for each frame. A server always responds in JSON, as RocketMQ's does by default.

JSON headers are decoded with orjson. A slower and more tolerant decoder handles the headers that
orjson refuses and fastjson accepts: lone surrogates, bytes that are not UTF-8, numbers written as
strings, and integer keys. The values of fields are always strings after decoding, because Java
peers accept numbers there.

`encode` writes JSON unless the command's `serialization` is BINARY. A binary header cannot carry
codes above 32,767, so `encode` raises ProtocolError for them. It also cannot carry empty values
(spec/remoting.md §3), so `encode` leaves fields with an empty value out.

A connection collects received bytes in a `FrameBuffer`, or in a `FrameReader`, which also decodes
the frames.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from sluicemq.errors import ProtocolError
from sluicemq.wire import fastjson

FLAG_RESPONSE: Final = 1
FLAG_ONEWAY: Final = 2
JSON: Final = 0
BINARY: Final = 1
VERSION: Final = 479
"""The version in our requests and responses: V5_3_3, ordinal 479 of RocketMQ's MQVersion."""
FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
"""The largest `total` of a frame."""


@dataclass(slots=True, eq=False, repr=False)
class Command:
    """A request or a response.

    `fields` are the header's extFields, or None if the header has none. `body` is never None.
    `opaque` is the number by which a response is matched with its request. `flag` is a set of the
    bits FLAG_RESPONSE and FLAG_ONEWAY. `serialization` is JSON or BINARY: how the header was or
    will be written.

    Commands are mutable and are not validated, because each exists only while one request is
    handled.
    """

    code: int
    fields: dict[str, str] | None = None
    body: bytes | memoryview = b""
    opaque: int = 0
    flag: int = 0
    remark: str | None = None
    language: str = "PYTHON"
    version: int = VERSION
    serialization: int = JSON

    @property
    def is_response(self) -> bool:
        """Whether the command is a response, not a request."""
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        """Whether the command is a request that has no response."""
        return bool(self.flag & FLAG_ONEWAY)

    def start(self) -> bytes | None:
        """Return the frame up to its body, if a subclass can encode it faster than `encode_start`.

        None means that `encode_start` encodes it.
        """
        return None

    def copy(self, added_flag: int = 0) -> "Command":
        """Return a shallow copy whose flag also has the bits of `added_flag`.

        The copy has the same `opaque`. The caller changes it before it sends the copy.
        """
        return Command(
            code=self.code,
            fields=self.fields,
            body=self.body,
            opaque=self.opaque,
            flag=self.flag | added_flag,
            remark=self.remark,
            language=self.language,
            version=self.version,
            serialization=self.serialization,
        )

    def __repr__(self) -> str:
        """Describe the command without the values of its fields: they may contain signatures."""
        request_or_response = "response" if self.is_response else "request"
        field_names = sorted(self.fields or ())
        return (
            f"<{request_or_response} code={self.code} opaque={self.opaque} fields={field_names} "
            f"body={len(self.body)} B>"
        )


LANGUAGES: Final = (
    "JAVA",
    "CPP",
    "DOTNET",
    "PYTHON",
    "DELPHI",
    "ERLANG",
    "RUBY",
    "OTHER",
    "HTTP",
    "GO",
    "PHP",
    "OMS",
    "RUST",
    "NODE_JS",
)
"""The name of each language. Its index is its number in binary headers."""
SERVER_LANGUAGE: Final = "JAVA"
"""The language in the responses of our servers. Every client has been tested with this name.

Requests of our client have PYTHON instead, which brokers show in their connection lists.
"""

HEADER_VALUES_MAX: Final = 4096
"""The most JSON values, counting names, in a header that the tolerant decoder accepts."""
_LANGUAGE_NUMBERS: Final = {name: number for number, name in enumerate(LANGUAGES)}
_OTHER: Final = _LANGUAGE_NUMBERS["OTHER"]
_PREFIX: Final = struct.Struct(">II")
_NUMBER: Final = struct.Struct(">I")
_BINARY_FIXED: Final = struct.Struct(">hBhiii")
_LENGTH: Final = struct.Struct(">i")
_SHORT: Final = struct.Struct(">h")
HEADER_MASK: Final = 0xFFFFFF
"""The bits of a frame's second integer that are the header's length in bytes."""


# ------------------------------------------------------------------------------------ decoding


def decode(buffer: bytes | memoryview, start: int = 0, end: int | None = None) -> Command:
    """Return the command in the frame `buffer[start:end]`.

    The frame is passed without its first four bytes, which contain its total size. An `end` of None
    means the end of `buffer`. The body of the command is a slice of `buffer`, which is a view and
    not a copy if `buffer` is a memoryview. Raises ProtocolError if the frame is malformed.
    """
    end = len(buffer) if end is None else end
    if end - start < 4:
        raise ProtocolError(f"A frame of {end - start} bytes is too short for a header length.")
    # The upper byte is the serialisation; the lower three bytes are the header's length.
    serialization_and_length = _NUMBER.unpack_from(buffer, start)[0]
    header_end = start + 4 + (serialization_and_length & HEADER_MASK)
    if header_end > end:
        raise ProtocolError(
            f"A header of {serialization_and_length & HEADER_MASK} bytes does not fit into a frame "
            f"of {end - start} bytes."
        )
    header = bytes(buffer[start + 4 : header_end])
    body = buffer[header_end:end]
    serialization = serialization_and_length >> 24
    if serialization == BINARY:
        return _decode_binary(header, body)
    if serialization != JSON:
        raise ProtocolError(
            f"Serialisation {serialization} does not exist: it must be 0 (JSON) or 1 (ROCKETMQ)."
        )
    try:
        header_values = orjson.loads(header)
    except ValueError:  # `build_command` decodes it with the tolerant decoder
        header_values = None
    return build_command(header_values, header, body)


def build_command(header_values: Any, header: bytes, body: bytes | memoryview) -> Command:
    """Return the command with the JSON header `header` and the body `body`.

    `header_values` is what orjson decoded from the header, or None if orjson failed. A header in
    the usual form is built from `header_values`. Any other header is decoded again by a slower,
    tolerant decoder. Raises ProtocolError if this cannot read the header either. This runs for
    every frame.
    """
    # `join` and `|` are type checks that run in C: they fail for values that are not strings, and
    # for numbers that are not integers. Negative numbers go to the tolerant decoder, because in the
    # result of `|` a negative number hides that another number is too large.
    try:
        fields = header_values.get("extFields")
        if fields is not None:
            "".join(fields.values())
        code = header_values["code"]
        opaque = header_values["opaque"]
        flag = header_values["flag"]
        version = header_values["version"]
        language = header_values["language"]
        remark = header_values.get("remark")
        if (
            0 <= code | opaque | flag | version <= 0x7FFFFFFF
            and language.__class__ is str
            and (remark is None or remark.__class__ is str)
        ):
            return Command(code, fields, body, opaque, flag, remark, language, version)
    except (TypeError, KeyError, AttributeError):
        pass
    return _decode_unusual_json(header, body)


def _decode_unusual_json(header: bytes, body: bytes | memoryview) -> Command:
    """Return the command with a JSON header, decoded as tolerantly as by RocketMQ's JSON library.

    Numbers may be strings, and strings may be numbers. Fields that are null are left out. A
    language may be a number, and an unknown one becomes OTHER. Raises ProtocolError if the header
    is not a JSON object, if a number does not fit into 32 bits, or if there are more than
    HEADER_VALUES_MAX values.
    """
    header_values = fastjson.loads(header, HEADER_VALUES_MAX)
    if not isinstance(header_values, dict):
        raise ProtocolError("The JSON header is not an object.")
    fields = header_values.get("extFields")
    if fields is not None and not isinstance(fields, dict):
        raise ProtocolError("The header's extFields are not a JSON object.")
    remark = header_values.get("remark")
    language = header_values.get("language")
    if isinstance(language, int) and 0 <= language < len(LANGUAGES):
        language = LANGUAGES[language]
    return Command(
        _read_int32(header_values, "code"),
        fields and _convert_fields_to_texts(fields),  # None and {} stay as they are
        body,
        _read_int32(header_values, "opaque"),
        _read_int32(header_values, "flag"),
        None if remark is None else fastjson.to_text(remark),
        language if isinstance(language, str) else "OTHER",
        _read_int32(header_values, "version"),
    )


def _convert_fields_to_texts(fields: Mapping[Any, Any]) -> dict[str, str]:
    """Return extFields with names and values as strings, without the fields that are null."""
    texts = {}
    for name, value in fields.items():
        if value is not None:
            texts[fastjson.to_text(name)] = fastjson.to_text(value)
    return texts


def _read_int32(header_values: Mapping[Any, Any], key: str) -> int:
    """Return the 32-bit integer under `key` of a header; 0 if it is absent or null.

    A string is parsed. Raises ProtocolError if the value is not an integer of 32 bits.
    """
    received_value = header_values.get(key)
    try:
        integer = int(received_value) if received_value is not None else 0
    except (ValueError, TypeError, OverflowError):
        integer = 1 << 31  # out of range, so that the error below is raised
    if not -0x80000000 <= integer <= 0x7FFFFFFF:
        raise ProtocolError(f"The header's {key} is not a 32-bit integer.")
    return integer


def _decode_binary(header: bytes, body: bytes | memoryview) -> Command:
    """Return the command with a binary header.

    The layout of the header is documented at `_encode_binary`. Fields with an empty name or value
    are left out, because an empty string means null there (spec/remoting.md §3). Raises
    ProtocolError if the header ends early, or if a size in it is negative or too large.
    """
    try:
        code, language_number, version, opaque, flag, remark_size = _BINARY_FIXED.unpack_from(
            header
        )
        remark, position = _read_binary_text(header, _BINARY_FIXED.size, remark_size)
        (fields_size,) = _LENGTH.unpack_from(header, position)
        fields = _read_binary_fields(header, position + 4, fields_size)
    except struct.error as error:
        raise ProtocolError(f"The binary header ends early, after {len(header)} bytes.") from error
    is_known_language = language_number < len(LANGUAGES)
    return Command(
        code,
        fields if fields_size else None,
        body,
        opaque,
        flag,
        remark or None,
        LANGUAGES[language_number] if is_known_language else "OTHER",
        version,
        BINARY,
    )


def _read_binary_fields(header: bytes, position: int, fields_size: int) -> dict[str, str]:
    """Return the fields in the `fields_size` bytes of a binary header from `position` on.

    Fields with an empty name or value are left out. Raises ProtocolError if the fields do not fit
    into the header, and struct.error if they end within the size of a name or a value.
    """
    end = position + fields_size
    if fields_size < 0 or end > len(header):
        raise ProtocolError(f"Fields of {fields_size} bytes do not fit into the binary header.")
    fields: dict[str, str] = {}
    while position < end:
        name_size = _SHORT.unpack_from(header, position)[0]
        name, position = _read_binary_text(header, position + 2, name_size)
        value_size = _LENGTH.unpack_from(header, position)[0]
        value, position = _read_binary_text(header, position + 4, value_size)
        if name and value:
            fields[name] = value
    return fields


def _read_binary_text(header: bytes, start: int, size: int) -> tuple[str, int]:
    """Return the string of `size` bytes at `start`, and the position behind it.

    Raises ProtocolError if the string does not fit into the header.
    """
    end = start + size
    if size < 0 or end > len(header):
        raise ProtocolError(f"A string of {size} bytes does not fit into the binary header.")
    return header[start:end].decode("utf-8", "replace"), end


# ------------------------------------------------------------------------------------ encoding


def encode(command: Command) -> bytes:
    """Encode a command as a whole frame, with its `total`.

    Raises ProtocolError if the frame is larger than FRAME_BYTES_MAX, or if its binary header cannot
    hold a number of the command.
    """
    start = encode_start(command)
    body = command.body
    return b"".join((start, body)) if body else start


def encode_start(command: Command) -> bytes:
    """Return the bytes of a frame up to its body: total size, header length and header.

    The caller sends the body separately, so that a large body need not be copied. A JSON header has
    its keys in alphabetical order and no nulls, as Java peers write it. Raises ProtocolError if the
    frame is above FRAME_BYTES_MAX, or if the header cannot be written.
    """
    is_subclass = command.__class__ is not Command
    if is_subclass and (encoded_start := command.start()) is not None:
        return encoded_start

    if command.serialization == BINARY:
        header = _encode_binary(command)
    else:
        header_values: dict[str, Any] = {"code": command.code}
        if command.fields is not None:
            header_values["extFields"] = command.fields
        header_values["flag"] = command.flag
        header_values["language"] = command.language
        header_values["opaque"] = command.opaque
        if command.remark is not None:
            header_values["remark"] = command.remark
        header_values["serializeTypeCurrentRPC"] = "JSON"
        header_values["version"] = command.version
        try:
            header = orjson.dumps(header_values)
        except TypeError:  # a lone surrogate
            header = fastjson.dumps_strict(header_values)

    frame_bytes = 4 + len(header) + len(command.body)
    if frame_bytes > FRAME_BYTES_MAX or len(header) > HEADER_MASK:
        raise ProtocolError(
            f"A frame of {frame_bytes} bytes is above the limit of {FRAME_BYTES_MAX}.",
            fix="Send a smaller body.",
        )
    return _PREFIX.pack(frame_bytes, command.serialization << 24 | len(header)) + header


def _encode_binary(command: Command) -> bytes:
    """Return the binary header of a command, without fields that have an empty name or value.

        code 2, language 1, version 2, opaque 4, flag 4 | remark size 4, remark
        | size of all fields 4 | name size 2, name | value size 4, value | …

    Raises ProtocolError if a number does not fit into its field.
    """
    remark = _encode_utf8(command.remark or "")
    try:
        fields = _encode_binary_fields(command.fields or {})
        start = _BINARY_FIXED.pack(
            command.code,
            _LANGUAGE_NUMBERS.get(command.language, _OTHER),
            command.version,
            command.opaque,
            command.flag,
            len(remark),
        )
    except struct.error as error:
        raise ProtocolError(
            f"Request code {command.code} cannot be written in a binary header ({error}).",
            fix="Use the JSON serialisation.",
        ) from error
    return b"".join((start, remark, _LENGTH.pack(len(fields)), fields))


def _encode_binary_fields(fields: Mapping[str, str]) -> bytes:
    """Return the fields of a binary header: the size and bytes of each name, then of its value.

    The total size, which precedes them in the header, is not included. Fields with an empty name or
    value are left out. Raises struct.error if a name or value is too long.
    """
    pieces: list[bytes] = []
    for name, value in fields.items():
        if name and value:
            name_bytes = _encode_utf8(name)
            value_bytes = _encode_utf8(value)
            pieces += (_SHORT.pack(len(name_bytes)), name_bytes)
            pieces += (_LENGTH.pack(len(value_bytes)), value_bytes)
    return b"".join(pieces)


def _encode_utf8(string: str) -> bytes:
    """Return a string as UTF-8. A lone surrogate becomes `?`."""
    return string.encode("utf-8", "replace")


def encode_response(
    request: Command,
    code: int = 0,
    fields: Mapping[str, str] | None = None,
    body: bytes | memoryview = b"",
    remark: str | None = None,
) -> bytes:
    """Encode the response to `request` as a whole frame with a JSON header.

    The header is JSON even if the header of the request is binary. The response gets the request's
    `opaque`. Raises ProtocolError if the frame is above FRAME_BYTES_MAX.
    """
    return encode(
        Command(
            code,
            dict(fields) if fields is not None else None,
            body,
            request.opaque,
            FLAG_RESPONSE,
            remark,
            SERVER_LANGUAGE,
            VERSION,
        )
    )


# --------------------------------------------------------------------------------- connections

UNJOINED_PIECES_MAX: Final = 1024
"""The most pieces that a FrameBuffer holds before it joins them.

A frame of 16 MiB that arrives in reads of 64 KiB has fewer pieces, so it is joined only once.
"""
TLS_HELLO: Final = 0x16
"""The first byte of a TLS connection. No frame begins with it: its `total` would be 369 MB."""


def check_frame_size(announced_bytes: int, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
    """Raise ProtocolError unless `announced_bytes` is at least 4 and at most `frame_bytes_max`."""
    if announced_bytes < 4:
        raise ProtocolError(
            f"A frame announces {announced_bytes} bytes, too few for its header length."
        )
    if announced_bytes > frame_bytes_max:
        raise ProtocolError(
            f"A frame announces {announced_bytes} bytes, above the limit of {frame_bytes_max}.",
            fix="Check that the peer uses the remoting protocol on this port.",
        )


class FrameBuffer:
    """The bytes of a stream that belong to a frame which has not arrived completely.

    For each received piece the caller calls `join`. If that returns bytes, the caller takes the
    complete frames from them, and gives the rest back by `keep_rest`. `frame_bytes_max` is the
    largest `total` of a frame.

    The pieces are joined once, when the frame is complete: a frame of 16 MiB in pieces of 64 KiB is
    copied once, not 256 times. A peer that sends single bytes does not cost an object for each,
    because after UNJOINED_PIECES_MAX pieces the latest ones are joined.
    """

    __slots__ = ("_frame_bytes_max", "_needed", "_parts", "_size", "_unjoined")

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        """Create an empty buffer for frames of at most `frame_bytes_max` bytes."""
        self._frame_bytes_max = frame_bytes_max
        self._parts: list[bytes] = []
        self._unjoined = 0
        """The number of pieces at the end of `_parts` since pieces were last joined."""
        self._size = 0
        """The number of buffered bytes."""
        self._needed = 0
        """The size of the buffered frame with its `total`, or 4 if that is not known yet."""

    def __len__(self) -> int:
        """Return the number of buffered bytes."""
        return self._size

    def join(self, received: bytes) -> bytes | None:
        """Return the buffered bytes followed by `received`, or None if the frame is incomplete.

        If the buffered frame is still incomplete, `received` is buffered too. Otherwise the buffer
        is empty afterwards. If nothing was buffered, `received` is returned as it is, even without
        a complete frame. The returned bytes begin at a frame.
        """
        if self._parts:
            self._parts.append(received)
            self._size += len(received)
            if self._size < self._needed:
                self._unjoined += 1
                # Join small pieces now and then, because each one takes memory of its own.
                if self._unjoined == UNJOINED_PIECES_MAX:
                    self._parts[-UNJOINED_PIECES_MAX:] = [
                        b"".join(self._parts[-UNJOINED_PIECES_MAX:])
                    ]
                    self._unjoined = 0
                return None
            received = b"".join(self._parts)
            self._parts.clear()
            self._size = self._unjoined = 0
        return received

    def keep_rest(self, unread: bytes) -> bytes | None:
        """Buffer `unread` if the frame at its start is incomplete, and return None.

        If the frame is complete, buffer nothing and return `unread`. Call this only while the
        buffer is empty. Raises ProtocolError if the size of the frame is invalid.
        """
        self._needed = 4
        if len(unread) >= 4:
            frame_bytes = _NUMBER.unpack_from(unread)[0]
            check_frame_size(frame_bytes, self._frame_bytes_max)
            self._needed = 4 + frame_bytes
            if len(unread) >= self._needed:
                return unread
        self._parts.append(unread)
        self._size = len(unread)
        return None


class FrameReader(FrameBuffer):
    """Decodes the commands of a stream of bytes.

    After a ProtocolError the position of the next frame is unknown, so the caller must close the
    connection.
    """

    __slots__ = ()

    def feed(self, received: bytes) -> list[Command]:
        """Return the commands whose frames `received` completes, in order; [] if it completes none.

        Bytes of an incomplete frame are stored for the next call. Raises ProtocolError if a frame
        is malformed or too large.
        """
        buffered = self.join(received)
        if not buffered:
            return []
        commands: list[Command] = []
        position = 0
        buffered_bytes = len(buffered)
        while buffered_bytes - position >= 4:
            frame_bytes = _NUMBER.unpack_from(buffered, position)[0]
            check_frame_size(frame_bytes, self._frame_bytes_max)
            end = position + 4 + frame_bytes
            if end > buffered_bytes:
                break
            commands.append(decode(buffered, position + 4, end))
            position = end
        if position < buffered_bytes:
            self.keep_rest(buffered[position:] if position else buffered)
        return commands
