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
_HEX_ROW_BYTES: Final = 16
_FIELD_BYTES_SHOWN: Final = 64


def find_forms(body: bytes) -> dict[str, Callable[[], str]]:
    """Return the forms in which a body can be shown, each with a function that returns its text.

    The keys are those of "json", "text", "protobuf" and "hex" that fit the body, in this order;
    "hex" always fits. The most likely form comes first. Of a body larger than `SHOWN_BYTES_MAX`
    only the beginning is shown, as text or hexadecimal.
    """
    shown = body[:SHOWN_BYTES_MAX]
    is_cut = len(shown) < len(body)
    forms: dict[str, Callable[[], str]] = {}
    if not is_cut and (value := parse_json(body)) is not None:
        forms["json"] = lambda: format_json(value)[:SHOWN_BYTES_MAX]
    if (text := decode_text(shown, is_cut=is_cut)) is not None:
        forms["text"] = lambda: text
    if not is_cut and (lines := format_protobuf(body)) is not None:
        forms["protobuf"] = lambda: "\n".join(lines)[:SHOWN_BYTES_MAX]
    return forms | {"hex": lambda: format_hex(shown[: SHOWN_BYTES_MAX // 4])}


def parse_json(body: bytes) -> Any:
    """Return the JSON object or list in a body; None if it is anything else.

    Values that are nested deeper than `DEPTH_MAX` are None too, because the indentation would make
    each line long.
    """
    if body.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        value = orjson.loads(body)
    except ValueError:
        return None
    return value if is_nested_within(value, DEPTH_MAX) else None


def is_nested_within(value: Any, depth: int) -> bool:
    """Return whether a JSON value has at most `depth` levels of objects and lists."""
    if not isinstance(value, dict | list):
        return True
    items = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(is_nested_within(item, depth - 1) for item in items)


def format_json(value: Any) -> str:
    """Return a JSON value with an indentation of two spaces for each level."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


def decode_text(body: bytes, *, is_cut: bool = False) -> str | None:
    """Return a body as text, or None if it is not UTF-8 or contains control characters.

    If `is_cut` is True, an incomplete character at the end is left out.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        if not is_cut or error.start < len(body) - 4:
            return None
        text = body[: error.start].decode()
    is_readable = all(one.isprintable() or one in "\t\r\n" for one in text)
    return text if is_readable else None


def format_hex(body: bytes) -> str:
    """Return lines of sixteen bytes each: the position, the bytes, and their ASCII characters."""
    lines = []
    for position in range(0, len(body), _HEX_ROW_BYTES):
        row = body[position : position + _HEX_ROW_BYTES]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{position:08x}  {row.hex(' '):<{_HEX_ROW_BYTES * 3}} {text}")
    return "\n".join(lines)


def format_protobuf(body: bytes) -> list[str] | None:
    """Return the lines that show a body as a message of Protocol Buffers.

    A field takes one line, `number: value`; a nested message takes several, between braces. Return
    None if the body is empty or cannot be such a message.
    """
    try:
        return list(_format_fields(body, 0)) if body else None
    except ValueError:
        return None


def _format_fields(body: bytes, depth: int) -> Iterator[str]:
    """Yield the lines of a message at this depth. Raises ValueError if the bytes cannot be one."""
    if depth > DEPTH_MAX:
        raise ValueError("nested too deeply")
    position = 0
    indent = "  " * depth
    while position < len(body):
        tag, position = _read_varint(body, position)
        field = tag >> 3
        wire_type = tag & 7
        if not 0 < field <= FIELD_MAX:
            raise ValueError("invalid field number")
        if wire_type == 0:
            value, position = _read_varint(body, position)
            yield f"{indent}{field}: {value}"
        elif wire_type in (1, 5):
            # Fixed 64 or 32 bits in little-endian order. The type (integer, float) is unknown.
            size = 8 if wire_type == 1 else 4
            yield f"{indent}{field}: 0x{_read_bytes(body, position, size)[::-1].hex()}"
            position += size
        elif wire_type == 2:
            size, position = _read_varint(body, position)
            yield from _format_bytes(field, _read_bytes(body, position, size), depth)
            position += size
        else:
            raise ValueError("unknown wire type")


def _format_bytes(field: int, value: bytes, depth: int) -> Iterator[str]:
    """Yield the lines of a length-delimited field: a text, a message, or bytes."""
    indent = "  " * depth
    if (text := decode_text(value)) is not None:
        yield f"{indent}{field}: {orjson.dumps(text).decode()}"
        return
    try:
        inner = list(_format_fields(value, depth + 1))
    except ValueError:
        shown = value[:_FIELD_BYTES_SHOWN].hex(" ")
        yield f"{indent}{field}: {shown}{' …' if len(value) > _FIELD_BYTES_SHOWN else ''}"
        return
    yield f"{indent}{field} {{"
    yield from inner
    yield f"{indent}}}"


def _read_bytes(body: bytes, position: int, size: int) -> bytes:
    """Return `size` bytes at a position. Raises ValueError if there are fewer."""
    if position + size > len(body):
        raise ValueError("too few bytes")
    return body[position : position + size]


def _read_varint(body: bytes, position: int) -> tuple[int, int]:
    """Return the varint at a position, and the position after it.

    Raises ValueError if the body ends within the varint, or the varint has more than ten bytes.
    """
    value = 0
    for shift in range(0, 64, 7):
        byte = _read_bytes(body, position, 1)[0]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a varint of more than ten bytes")
