"""Bodies of messages as they can be read: text, JSON, hexadecimal, Protocol Buffers.

A schema is not known, so Protocol Buffers are shown as what is on the wire: field numbers, and
values by their form. Bytes of a field are a message if they can be one to their end, else text,
else hexadecimal.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson

SHOWN_BYTES_MAX: Final = 64 << 10
DEPTH_MAX: Final = 16
"""Of what is nested; deeper it is shown as text and bytes."""
FIELD_MAX: Final = (1 << 29) - 1
_ROW: Final = 16


def forms(body: bytes) -> dict[str, Callable[[], str]]:
    """Name of the form -> what makes its text, of the forms that it has; what is likely meant comes
    first. Of a body above `SHOWN_BYTES_MAX` its begin is shown, as text or hexadecimal."""
    shown = body[:SHOWN_BYTES_MAX]
    is_cut = len(shown) < len(body)
    found: dict[str, Callable[[], str]] = {}
    if not is_cut and (value := as_json(body)) is not None:
        found["json"] = lambda: indented(value)[:SHOWN_BYTES_MAX]
    if (text := as_text(shown, is_cut=is_cut)) is not None:
        found["text"] = lambda: text
    if not is_cut and (lines := as_protobuf(body)) is not None:
        found["protobuf"] = lambda: "\n".join(lines)[:SHOWN_BYTES_MAX]
    return found | {"hex": lambda: as_hex(shown[: SHOWN_BYTES_MAX // 4])}


def as_json(body: bytes) -> Any:
    """Its value; None for what is no JSON object or list, or one nested deeper than `DEPTH_MAX`:
    each line of it would begin with its depth in spaces."""
    if body.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        value = orjson.loads(body)
    except ValueError:
        return None
    return value if is_flat(value, DEPTH_MAX) else None


def is_flat(value: Any, depth: int) -> bool:
    """Is a value of JSON nested no deeper?"""
    if not isinstance(value, dict | list):
        return True
    items = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(is_flat(item, depth - 1) for item in items)


def indented(value: Any) -> str:
    """Two spaces a level."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


def as_text(body: bytes, *, is_cut: bool = False) -> str | None:
    """UTF-8; None for other bytes and for control characters."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        if not is_cut or error.start < len(body) - 4:
            return None
        text = body[: error.start].decode()
    is_readable = all(one.isprintable() or one in "\t\r\n" for one in text)
    return text if is_readable else None


def as_hex(body: bytes) -> str:
    """Sixteen bytes a line, with the place before and the text behind."""
    lines = []
    for at in range(0, len(body), _ROW):
        row = body[at : at + _ROW]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:08x}  {row.hex(' '):<{_ROW * 3}} {text}")
    return "\n".join(lines)


def as_protobuf(body: bytes) -> list[str] | None:
    """A line a field; None for bytes that are no message."""
    try:
        return list(_fields(body, 0)) if body else None
    except ValueError:
        return None


def _fields(body: bytes, depth: int) -> Iterator[str]:
    """Raises ValueError."""
    if depth > DEPTH_MAX:
        raise ValueError("too deep")
    at, indent = 0, "  " * depth
    while at < len(body):
        tag, at = _varint(body, at)
        field, kind = tag >> 3, tag & 7
        if not 0 < field <= FIELD_MAX:
            raise ValueError("no field")
        if kind == 0:
            value, at = _varint(body, at)
            yield f"{indent}{field}: {value}"
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            yield f"{indent}{field}: 0x{_taken(body, at, size)[::-1].hex()}"
            at += size
        elif kind == 2:
            size, at = _varint(body, at)
            yield from _bytes(field, _taken(body, at, size), depth)
            at += size
        else:
            raise ValueError("a form that is not in use")


def _bytes(field: int, value: bytes, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if (text := as_text(value)) is not None:
        yield f"{indent}{field}: {orjson.dumps(text).decode()}"
        return
    try:
        inner = list(_fields(value, depth + 1))
    except ValueError:
        yield f"{indent}{field}: {value[:64].hex(' ')}{' …' if len(value) > 64 else ''}"
        return
    yield f"{indent}{field} {{"
    yield from inner
    yield f"{indent}}}"


def _taken(body: bytes, at: int, size: int) -> bytes:
    if at + size > len(body):
        raise ValueError("cut off")
    return body[at : at + size]


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        byte = _taken(body, at, 1)[0]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than ten bytes")
