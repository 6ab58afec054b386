"""The syntax of java.util.Properties, in which RocketMQ's files are written.

A logical line is one line, or several when each but the last ends in an odd number of backslashes;
the blanks that begin a continuation are dropped. Lines that begin with `#` or `!` are comments.
The key ends at the first `=`, `:` or blank that is not escaped; blanks around the separator do not
count. Escapes: `\\t \\n \\r \\f \\uXXXX`; a backslash before anything else is dropped. Unlike Java,
which keeps them, blanks at the end of a value are trimmed: in the real servers such a number is
silently ignored (spec/config.md).
"""

import re
from collections.abc import Iterator, Mapping
from string import hexdigits

from sluicemq.errors import ConfigurationError

_BLANKS = " \t\f"
_ESCAPE = re.compile(r"\\(?:u(.{0,4})|(.?))", re.DOTALL)
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def decode_properties_file(data: bytes) -> str:
    """The text of a file: UTF-8, or ISO-8859-1 (what Java reads) when it is not that."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("iso-8859-1")


def parse_properties(text: str) -> dict[str, str]:
    """Text -> keys and values, in the order of the file; the last of several wins.

    Raises ConfigurationError for a malformed `\\uXXXX`.
    """
    entries: dict[str, str] = {}
    for line, _physical in _logical_lines(text):
        if line is not None:
            key, value = _split(line)
            entries[_unescape(key)] = _unescape(value).strip()
    return entries


def edit_properties(text: str, changes: Mapping[str, str]) -> str:
    """The same file with other values: comments and order stay, new keys come last."""
    left = dict(changes)
    lines: list[str] = []
    for line, physical in _logical_lines(text):
        key = None if line is None else _unescape(_split(line)[0])
        if key is None or key not in changes:
            lines.extend(physical)
        elif key in left:
            lines.append(_entry(key, left.pop(key)))
    lines.extend(_entry(key, value) for key, value in left.items())
    return "".join(f"{line}\n" for line in lines)


def _entry(key: str, value: str) -> str:
    return f"{key}={value}".replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")


def _logical_lines(text: str) -> Iterator[tuple[str | None, list[str]]]:
    """Each logical line (None for a comment or an empty one) with the lines it was made of."""
    pending = ""
    physical: list[str] = []
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    for line in text.removesuffix("\n").split("\n") if text else ():
        physical.append(line)
        part = line.lstrip(_BLANKS)
        if len(physical) == 1 and (not part or part[0] in "#!"):
            yield None, physical
        elif (len(part) - len(part.rstrip("\\"))) % 2 == 1:
            pending += part[:-1]
            continue
        else:
            yield pending + part, physical
        pending, physical = "", []
    if physical:
        yield pending, physical


def _split(line: str) -> tuple[str, str]:
    """A logical line -> its key and value, both still escaped."""
    end = 0
    while end < len(line) and line[end] not in "=:" + _BLANKS:
        end += 2 if line[end] == "\\" else 1
    value = line[end:].lstrip(_BLANKS)
    if value[:1] in ("=", ":"):
        value = value[1:].lstrip(_BLANKS)
    return line[:end], value


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    # Java writes characters beyond 16 bits as two escapes.
    units = _ESCAPE.sub(_unescaped, text).encode("utf-16", "surrogatepass")
    return units.decode("utf-16", "replace")


def _unescaped(escape: re.Match[str]) -> str:
    follower, digits = escape[2], escape[1]
    if digits is None:
        return _ESCAPES.get(follower, follower)
    if len(digits) == 4 and set(digits) <= set(hexdigits):
        return chr(int(digits, 16))
    raise ConfigurationError(
        f"\\u{digits} is not a character.", cure="Write four hex digits, for example \\u4e2d."
    )
