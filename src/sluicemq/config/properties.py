r"""Parse and edit the text of a properties file, as RocketMQ's configuration files have it.

The syntax is that of java.util.Properties. A logical line is one line, or several lines of which
each but the last ends with an odd number of backslashes; spaces at the start of a continuation line
are dropped. Lines that start with `#` or `!` are comments. The key ends at the first `=`, `:` or
space that is not escaped, and spaces around the separator are ignored. Escapes are
`\t \n \r \f \uXXXX`; a backslash before any other character is dropped. Spaces at the end of a
value are removed. Java keeps them, so that RocketMQ silently ignores a number with such spaces.
"""

import re
from collections.abc import Iterator, Mapping
from string import hexdigits
from typing import Final

from sluicemq.errors import ConfigurationError

_BLANKS: Final = " \t\f"
_ESCAPE: Final = re.compile(r"\\(?:u(.{0,4})|(.?))", re.DOTALL)
_ESCAPES: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def decode_properties_file(data: bytes) -> str:
    """Return the text of a file in UTF-8, or else in ISO-8859-1, as Java reads it."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("iso-8859-1")


def parse_properties(text: str) -> dict[str, str]:
    r"""Return the keys and values of a properties text, in its order.

    The last of equal keys counts. Raises ConfigurationError for a malformed `\uXXXX`.
    """
    entries: dict[str, str] = {}
    for line, _physical in _logical_lines(text):
        if line is not None:
            key, value = _split(line)
            entries[_unescape(key)] = _unescape(value).strip()
    return entries


def edit_properties(text: str, changes: Mapping[str, str]) -> str:
    """Return the text with the values of the keys in `changes` replaced.

    Comments and the order of lines stay. If a key occurs several times, its first line gets the new
    value, and the others are removed. Keys that the text does not have come last.
    """
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
    """Return a line that sets the key, with the value escaped."""
    return f"{key}={value}".replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")


def _logical_lines(text: str) -> Iterator[tuple[str | None, list[str]]]:
    """Yield (logical line, physical lines) for each logical line of the text.

    The logical line is the joined text, still escaped; None for a comment or an empty line. The
    physical lines are those of the file, without their line ends.
    """
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
        pending = ""
        physical = []
    if physical:
        yield pending, physical


def _split(line: str) -> tuple[str, str]:
    """Return the key and the value of a logical line, both still escaped."""
    end = 0
    while end < len(line) and line[end] not in "=:" + _BLANKS:
        end += 2 if line[end] == "\\" else 1
    value = line[end:].lstrip(_BLANKS)
    if value[:1] in ("=", ":"):
        value = value[1:].lstrip(_BLANKS)
    return line[:end], value


def _unescape(text: str) -> str:
    r"""Return the text with its escapes replaced. Raises ConfigurationError for a bad `\uXXXX`."""
    if "\\" not in text:
        return text
    # Java writes a character beyond 16 bits as two escapes (surrogates).
    units = _ESCAPE.sub(_unescaped, text).encode("utf-16", "surrogatepass")
    return units.decode("utf-16", "replace")


def _unescaped(escape: re.Match[str]) -> str:
    """Return the character for one match of `_ESCAPE`: the escape of `_ESCAPES`, or itself."""
    follower = escape[2]
    digits = escape[1]
    if digits is None:
        return _ESCAPES.get(follower, follower)
    if len(digits) == 4 and set(digits) <= set(hexdigits):
        return chr(int(digits, 16))
    raise ConfigurationError(
        f"\\u{digits} is not a character.", fix="Write four hex digits, for example \\u4e2d."
    )
