"""Show bodies of messages as text, JSON, Protocol Buffers or hexadecimal.

The schema of Protocol Buffers is unknown. So a body is shown as it is on the wire: field numbers,
and values by their wire type. The bytes of a field are shown as text if they are UTF-8, else as a
message if all of them can be decoded as one, else in hexadecimal.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson

SHOWN_BYTES_MAX: Final = 64 << 10
DEPTH_MAX: Final = 16
"""The deepest nesting of JSON and Protocol Buffers that is shown as such."""
FIELD_MAX: Final = (1 << 29) - 1
"""The largest field number of Protocol Buffers."""
_VARINT: Final = 0
_LENGTH_DELIMITED: Final = 2
_FIXED_SIZES: Final = {1: 8, 5: 4}
"""The wire types of Protocol Buffers: these constants, and fixed sizes in bytes by wire type."""
_HEX_ROW_BYTES: Final = 16
_FIELD_BYTES_SHOWN: Final = 64


def find_forms(body: bytes) -> dict[str, Callable[[], str]]:
    """Return the forms in which a body can be shown, as name -> function that returns the text.

    The names are those of "json", "text", "protobuf" and "hex" that fit the body, the most likely
    one first. "hex" always fits. Of a body larger than `SHOWN_BYTES_MAX`, only the beginning is
    shown, as text or as hexadecimal digits.
    """
    shown_bytes = body[:SHOWN_BYTES_MAX]
    is_cut = len(shown_bytes) < len(body)
    json_value = None if is_cut else parse_json(body)
    body_text = decode_text(shown_bytes, is_cut=is_cut)
    protobuf_lines = None if is_cut else format_protobuf(body)

    forms: dict[str, Callable[[], str]] = {}
    if json_value is not None:
        forms["json"] = lambda: format_json(json_value)[:SHOWN_BYTES_MAX]
    if body_text is not None:
        forms["text"] = lambda: body_text
    if protobuf_lines is not None:
        forms["protobuf"] = lambda: "\n".join(protobuf_lines)[:SHOWN_BYTES_MAX]
    forms["hex"] = lambda: format_hex(shown_bytes[: SHOWN_BYTES_MAX // 4])
    return forms


def parse_json(body: bytes) -> Any:
    """Return the JSON object or list in a body; None for anything else.

    The result is also None for a value with more than `DEPTH_MAX` levels, because its indentation
    would make the lines too long.
    """
    if body.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        json_value = orjson.loads(body)
    except ValueError:
        return None
    return json_value if is_nested_within(json_value, DEPTH_MAX) else None


def is_nested_within(json_value: Any, depth: int) -> bool:
    """Return whether a JSON value has at most `depth` levels of objects and lists."""
    if not isinstance(json_value, dict | list):
        return True
    if depth <= 0:
        return False
    members = json_value.values() if isinstance(json_value, dict) else json_value
    return all(is_nested_within(member, depth - 1) for member in members)


def format_json(json_value: Any) -> str:
    """Return a JSON value with an indentation of two spaces for each level."""
    return orjson.dumps(json_value, option=orjson.OPT_INDENT_2).decode()


def decode_text(body: bytes, *, is_cut: bool = False) -> str | None:
    """Return a body as text; None if it is not UTF-8 or has control characters.

    `is_cut` says that the body was cut, so an incomplete character at its end is left out.
    """
    try:
        body_text = body.decode()
    except UnicodeDecodeError as error:
        is_at_end = error.start >= len(body) - 4  # a character has at most four bytes
        if not is_cut or not is_at_end:
            return None
        body_text = body[: error.start].decode()
    is_readable = all(character.isprintable() or character in "\t\r\n" for character in body_text)
    return body_text if is_readable else None


def format_hex(body: bytes) -> str:
    """Return a hexadecimal dump: lines with a position, sixteen bytes, and their characters.

    A byte that is not printable ASCII is shown as ".".
    """
    lines = []
    for position in range(0, len(body), _HEX_ROW_BYTES):
        row = body[position : position + _HEX_ROW_BYTES]
        hex_digits = row.hex(" ")
        characters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{position:08x}  {hex_digits:<{_HEX_ROW_BYTES * 3}} {characters}")
    return "\n".join(lines)


def format_protobuf(body: bytes) -> list[str] | None:
    """Return the lines that show a body as a Protocol Buffers message; None if it cannot be one.

    A field is a line `number: value`, because names are unknown. A nested message is several lines
    between braces. An empty body gives None.
    """
    try:
        return list(_format_fields(body, 0)) if body else None
    except ValueError:
        return None


def _format_fields(body: bytes, depth: int) -> Iterator[str]:
    """Yield the lines of a Protocol Buffers message that is nested `depth` levels deep.

    Raises ValueError if the bytes cannot be such a message.
    """
    if depth > DEPTH_MAX:
        raise ValueError("nested too deeply")
    position = 0
    indent = "  " * depth
    while position < len(body):
        # The tag of a field contains its number, and in the lowest three bits its wire type.
        tag, position = _read_varint(body, position)
        field = tag >> 3
        wire_type = tag & 7
        if not 0 < field <= FIELD_MAX:
            raise ValueError("invalid field number")
        if wire_type == _VARINT:
            number, position = _read_varint(body, position)
            yield f"{indent}{field}: {number}"
        elif wire_type in _FIXED_SIZES:
            # Little-endian order. The type (integer, float) is unknown.
            size = _FIXED_SIZES[wire_type]
            big_endian = _read_bytes(body, position, size)[::-1]
            yield f"{indent}{field}: 0x{big_endian.hex()}"
            position += size
        elif wire_type == _LENGTH_DELIMITED:
            size, position = _read_varint(body, position)
            yield from _format_bytes(field, _read_bytes(body, position, size), depth)
            position += size
        else:
            raise ValueError("unknown wire type")


def _format_bytes(field: int, content: bytes, depth: int) -> Iterator[str]:
    """Yield the lines of field number `field`, whose value is the bytes `content`.

    They are shown as text if they are UTF-8, else as a nested message if they can be one, else as
    hexadecimal digits.
    """
    indent = "  " * depth
    content_text = decode_text(content)
    if content_text is not None:
        yield f"{indent}{field}: {orjson.dumps(content_text).decode()}"
        return
    try:
        lines_of_message = list(_format_fields(content, depth + 1))
    except ValueError:
        hex_digits = content[:_FIELD_BYTES_SHOWN].hex(" ")
        ellipsis = " …" if len(content) > _FIELD_BYTES_SHOWN else ""
        yield f"{indent}{field}: {hex_digits}{ellipsis}"
        return
    yield f"{indent}{field} {{"
    yield from lines_of_message
    yield f"{indent}}}"


def _read_bytes(body: bytes, position: int, size: int) -> bytes:
    """Return `size` bytes at a position. Raises ValueError if there are fewer."""
    if position + size > len(body):
        raise ValueError("too few bytes")
    return body[position : position + size]


def _read_varint(body: bytes, position: int) -> tuple[int, int]:
    """Return (number, position after it) for the variable-length integer at a position.

    Raises ValueError if the body ends within it, or if it has more than ten bytes.
    """
    number = 0
    for shift in range(0, 64, 7):  # each byte has seven bits, the lowest first
        byte = _read_bytes(body, position, 1)[0]
        position += 1
        number |= (byte & 0x7F) << shift
        is_last_byte = byte < 0x80
        if is_last_byte:
            return number, position
    raise ValueError("a varint of more than ten bytes")
