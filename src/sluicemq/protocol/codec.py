"""Frames to commands and back, without I/O (layout: `command.py`; facts: spec/remoting.md §1-4).

JSON headers are read with orjson; whatever it refuses but fastjson reads (a lone surrogate, bytes
that are not UTF-8, numbers as text, unquoted keys) goes a second, slow and tolerant way. Field
values are text after decoding, always: Java peers tolerate numbers there.

`encode` writes JSON unless the command says BINARY. Binary cannot carry codes above 32,767 and
drops empty values (spec/remoting.md §3); `encode` refuses the first and follows the second.
"""

import struct
from collections.abc import Mapping
from typing import Any, Final

import orjson

from sluicemq.errors import ProtocolError
from sluicemq.protocol import fastjson
from sluicemq.protocol.command import (
    BINARY,
    FLAG_RESPONSE,
    FRAME_BYTES_MAX,
    JSON,
    VERSION,
    Command,
)

LANGUAGES: Final = (
    "JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER", "HTTP", "GO", "PHP",
    "OMS", "RUST", "NODE_JS",
)  # fmt: skip
"""Language names by their number in binary headers."""
SERVER_LANGUAGE: Final = "JAVA"
"""What our servers call themselves in answers: the one name that every client has been tried
with. Requests of our client say PYTHON, which the broker shows in its connection lists."""

HEADER_VALUES_MAX: Final = 4096
"""Of a header that orjson does not read: its fields and their names."""
_LANGUAGE_NUMBERS: Final = {name: number for number, name in enumerate(LANGUAGES)}
_OTHER: Final = _LANGUAGE_NUMBERS["OTHER"]
_PREFIX: Final = struct.Struct(">II")
_MARK: Final = struct.Struct(">I")
_BINARY_FIXED: Final = struct.Struct(">hBhiii")
_LENGTH: Final = struct.Struct(">i")
_SHORT: Final = struct.Struct(">h")
_HEADER_MASK: Final = 0xFFFFFF

_loads = orjson.loads


# ------------------------------------------------------------------------------------ decoding


def decode(frame: bytes | memoryview) -> Command:
    """One frame without its leading total -> Command whose body is a slice of `frame`.

    A memoryview stays a memoryview (no copy of the body). Raises ProtocolError.
    """
    if len(frame) < 4:
        raise ProtocolError(f"A frame of {len(frame)} bytes has no room for a header length.")
    mark = _MARK.unpack_from(frame)[0]
    end = 4 + (mark & _HEADER_MASK)
    if end > len(frame):
        raise ProtocolError(
            f"A header of {end - 4} bytes does not fit into a frame of {len(frame)} bytes."
        )
    return decode_header_bytes(mark >> 24, bytes(frame[4:end]), frame[end:])


def decode_header_bytes(serialization: int, header: bytes, body: bytes | memoryview) -> Command:
    """The bytes of a header (0 JSON, 1 binary) and a body -> Command. Raises ProtocolError."""
    if serialization == JSON:
        return decode_json(header, body)
    if serialization == BINARY:
        return _decode_binary(header, body)
    raise ProtocolError(f"{serialization} is not a serialisation: 0 is JSON, 1 is ROCKETMQ.")


def decode_json(header: bytes, body: bytes | memoryview) -> Command:
    """A JSON header -> Command. Raises ProtocolError."""
    try:
        values = _loads(header)
    except ValueError:
        values = None
    return command_of(values, header, body)


def command_of(values: Any, header: bytes, body: bytes | memoryview) -> Command:
    """The same when `values` is what orjson made of the header, or None when it made nothing. HOT:
    plain headers pass here, anything odd goes the slow way.

    The join and the `|` are type checks made in C: they fail on values that are not text, and on
    numbers that are not integers.
    """
    try:
        fields = values.get("extFields")
        if fields is not None:
            "".join(fields.values())
        code = values["code"]
        opaque = values["opaque"]
        flag = values["flag"]
        version = values["version"]
        language = values["language"]
        remark = values.get("remark")
        if (
            -0x80000000 <= code | opaque | flag | version <= 0x7FFFFFFF
            and language.__class__ is str
            and (remark is None or remark.__class__ is str)
        ):
            return Command(code, fields, body, opaque, flag, remark, language, version)
    except (TypeError, KeyError, AttributeError):
        pass
    return _decode_odd_json(header, body)


def _decode_odd_json(header: bytes, body: bytes | memoryview) -> Command:
    values = fastjson.loads(header, HEADER_VALUES_MAX)
    if not isinstance(values, dict):
        raise ProtocolError("A JSON header is not an object.")
    remark = values.get("remark")
    return Command(
        _number(values, "code"),
        _texts(values.get("extFields")),
        body,
        _number(values, "opaque"),
        _number(values, "flag"),
        remark if remark is None or isinstance(remark, str) else fastjson.text(remark),
        _language(values.get("language")),
        _number(values, "version"),
    )


def _number(values: Mapping[Any, Any], key: str) -> int:
    """An int32 as fastjson reads one: absent is 0, text is parsed."""
    value = values.get(key)
    try:
        number = int(value) if value is not None else 0
    except (ValueError, TypeError, OverflowError):
        number = 1 << 31
    if not -0x80000000 <= number <= 0x7FFFFFFF:
        raise ProtocolError(f"The header's {key} is not a 32-bit integer.")
    return number


def _texts(fields: Any) -> dict[str, str] | None:
    if fields is None:
        return None
    if not isinstance(fields, dict):
        raise ProtocolError("The header's extFields are not an object.")
    return {
        fastjson.text(name): fastjson.text(value)
        for name, value in fields.items()
        if value is not None
    }


def _language(value: Any) -> str:
    if isinstance(value, int) and 0 <= value < len(LANGUAGES):
        return LANGUAGES[value]
    return value if isinstance(value, str) else "OTHER"


def _decode_binary(header: bytes, body: bytes | memoryview) -> Command:
    try:
        code, language, version, opaque, flag, remark_size = _BINARY_FIXED.unpack_from(header)
        remark, position = _binary_text(header, _BINARY_FIXED.size, remark_size)
        (fields_size,) = _LENGTH.unpack_from(header, position)
        fields = _binary_fields(header, position + 4, fields_size)
    except struct.error as error:
        raise ProtocolError(f"A binary header of {len(header)} bytes is cut short.") from error
    name = LANGUAGES[language] if language < len(LANGUAGES) else "OTHER"
    return Command(code, fields, body, opaque, flag, remark or None, name, version, BINARY)


def _binary_text(header: bytes, start: int, size: int) -> tuple[str, int]:
    end = start + size
    if size < 0 or end > len(header):
        raise ProtocolError(f"A text of {size} bytes does not fit into the binary header.")
    return header[start:end].decode("utf-8", "replace"), end


def _binary_fields(header: bytes, start: int, size: int) -> dict[str, str] | None:
    """An empty name or value stands for null (spec/remoting.md §3): such a field is absent."""
    end = start + size
    if size < 0 or end > len(header):
        raise ProtocolError(f"Fields of {size} bytes do not fit into the binary header.")
    fields: dict[str, str] = {}
    position = start
    while position < end:
        name, position = _binary_text(header, position + 2, _SHORT.unpack_from(header, position)[0])
        value, position = _binary_text(
            header, position + 4, _LENGTH.unpack_from(header, position)[0]
        )
        if name and value:
            fields[name] = value
    return fields if size else None


# ------------------------------------------------------------------------------------ encoding


def encode(command: Command) -> bytes:
    """Command -> whole frame with its leading total. Raises ProtocolError when it cannot travel."""
    return frame(_encode_header(command), command.body, command.serialization)


def encode_start(command: Command) -> bytes:
    """The frame up to its body, for who sends a large body as it is. Raises ProtocolError."""
    header = _encode_header(command)
    return _frame_start(len(header), len(command.body), command.serialization) + header


def _encode_header(command: Command) -> bytes:
    return _encode_binary(command) if command.serialization == BINARY else _encode_json(command)


def frame(header: bytes, body: bytes | memoryview = b"", serialization: int = JSON) -> bytes:
    """Header bytes and body -> whole frame. Raises ProtocolError above the limits."""
    prefix = _frame_start(len(header), len(body), serialization)
    return b"".join((prefix, header, body)) if body else prefix + header


def _frame_start(header_bytes: int, body_bytes: int, serialization: int) -> bytes:
    total = 4 + header_bytes + body_bytes
    if total > FRAME_BYTES_MAX or header_bytes > _HEADER_MASK:
        raise ProtocolError(
            f"A frame of {total} bytes is above the limit of {FRAME_BYTES_MAX}.",
            cure="Send a smaller body.",
        )
    return _PREFIX.pack(total, serialization << 24 | header_bytes)


def _encode_json(command: Command) -> bytes:
    """Keys in alphabetical order, nulls left out, as the Java peers write them."""
    values: dict[str, Any] = {"code": command.code}
    if command.fields is not None:
        values["extFields"] = command.fields
    values["flag"] = command.flag
    values["language"] = command.language
    values["opaque"] = command.opaque
    if command.remark is not None:
        values["remark"] = command.remark
    values["serializeTypeCurrentRPC"] = "JSON"
    values["version"] = command.version
    return fastjson.dumps_strict(values)


def _encode_binary(command: Command) -> bytes:
    remark = _utf8(command.remark or "")
    parts = [b"", remark, b""]
    size = 0
    try:
        for name, value in (command.fields or {}).items():
            if name and value:
                key, data = _utf8(name), _utf8(value)
                parts += (_SHORT.pack(len(key)), key, _LENGTH.pack(len(data)), data)
                size += 6 + len(key) + len(data)
        parts[2] = _LENGTH.pack(size)
        parts[0] = _BINARY_FIXED.pack(
            command.code,
            _LANGUAGE_NUMBERS.get(command.language, _OTHER),
            command.version,
            command.opaque,
            command.flag,
            len(remark),
        )
    except struct.error as error:
        raise ProtocolError(
            f"Request code {command.code} cannot travel in a binary header ({error}).",
            cure="Use the JSON serialisation.",
        ) from error
    return b"".join(parts)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def encode_answer(
    request: Command,
    code: int = 0,
    fields: Mapping[str, str] | None = None,
    body: bytes | memoryview = b"",
    remark: str | None = None,
) -> bytes:
    """The answer to `request` as a frame: JSON always, whatever the request was written in."""
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
