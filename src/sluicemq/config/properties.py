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


def decode_properties_file(file_bytes: bytes) -> str:
    """Decode the bytes of a properties file.

    They are read as UTF-8, or as ISO-8859-1 (like Java) if they are not valid UTF-8.
    """
    try:
        return file_bytes.decode("utf-8")
    except UnicodeDecodeError:
        return file_bytes.decode("iso-8859-1")


def parse_properties(text: str) -> dict[str, str]:
    r"""Return the keys and values of a properties text, in its order.

    If a key occurs several times, its last value counts. Raises ConfigurationError for a malformed
    `\uXXXX`.
    """
    value_by_key: dict[str, str] = {}
    for logical_line, _ in _split_logical_lines(text):
        if logical_line is not None:
            key, value = _split_key_and_value(logical_line)
            value_by_key[_unescape(key)] = _unescape(value).strip()
    return value_by_key


def edit_properties(text: str, changes: Mapping[str, str]) -> str:
    """Return the text of a properties file with some values replaced.

    `changes` maps keys to new values. Comments and the order of lines do not change. If a key
    occurs several times, its first line gets the new value, and the other lines are removed. A key
    that the text does not have is added at the end.
    """
    unwritten_changes = dict(changes)  # the changes whose key has not occurred yet
    edited_lines: list[str] = []
    for logical_line, physical_lines in _split_logical_lines(text):
        key = None
        if logical_line is not None:
            escaped_key, _ = _split_key_and_value(logical_line)
            key = _unescape(escaped_key)
        if key is None or key not in changes:
            edited_lines.extend(physical_lines)
        elif key in unwritten_changes:
            edited_lines.append(_format_entry(key, unwritten_changes.pop(key)))
    for key, value in unwritten_changes.items():
        edited_lines.append(_format_entry(key, value))
    return "".join(f"{line}\n" for line in edited_lines)


def _format_entry(key: str, value: str) -> str:
    """Return a line that sets the key, with the value escaped."""
    return f"{key}={value}".replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")


def _split_logical_lines(text: str) -> Iterator[tuple[str | None, list[str]]]:
    """Yield (logical line, physical lines) for each logical line of the text.

    A line that ends with a backslash continues on the next line. The logical line is the text
    joined from such lines, with its escapes. It is None for a comment or an empty line. The
    physical lines are the lines as they are in the file, without their line ends.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if not text:
        return
    joined = ""
    physical_lines: list[str] = []
    for line in text.removesuffix("\n").split("\n"):
        physical_lines.append(line)
        content = line.lstrip(_BLANKS)
        is_first = len(physical_lines) == 1
        # An even number of backslashes at the end are escaped backslashes.
        backslash_count = len(content) - len(content.rstrip("\\"))
        if is_first and (not content or content[0] in "#!"):
            yield None, physical_lines
        elif backslash_count % 2 == 1:
            joined += content[:-1]  # the next line continues this one
            continue
        else:
            yield joined + content, physical_lines
        joined = ""
        physical_lines = []
    if physical_lines:
        yield joined, physical_lines


def _split_key_and_value(logical_line: str) -> tuple[str, str]:
    """Return the key and the value of a logical line, both still with their escapes.

    The key ends before the first `=`, `:` or blank that is not escaped by a backslash. The value is
    "" if nothing follows.
    """
    key_end = 0
    while key_end < len(logical_line) and logical_line[key_end] not in "=:" + _BLANKS:
        is_escape = logical_line[key_end] == "\\"
        key_end += 2 if is_escape else 1
    value = logical_line[key_end:].lstrip(_BLANKS)
    if value.startswith(("=", ":")):
        value = value[1:].lstrip(_BLANKS)
    return logical_line[:key_end], value


def _unescape(escaped: str) -> str:
    r"""Return a text with its escapes, such as `\n` or `\u4e2d`, replaced by their characters.

    Raises ConfigurationError for a malformed `\uXXXX`.
    """
    if "\\" not in escaped:
        return escaped
    unescaped = _ESCAPE.sub(_replace_escape, escaped)
    # Java writes a character beyond 16 bits as two escapes (surrogates): join them.
    return unescaped.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _replace_escape(escape: re.Match[str]) -> str:
    r"""Return the character that an escape stands for.

    `escape` is a match of `_ESCAPE`: `\n` becomes a newline, `\u4e2d` the character with this code,
    and `\x` becomes x, as does every other character without a meaning of its own. Raises
    ConfigurationError for a `\u` without four hex digits.
    """
    follower = escape[2]
    hex_digits = escape[1]
    if hex_digits is None:
        return _ESCAPES.get(follower, follower)
    if len(hex_digits) == 4 and set(hex_digits) <= set(hexdigits):
        return chr(int(hex_digits, 16))
    raise ConfigurationError(
        f"\\u{hex_digits} is not a character.", fix="Write four hex digits, for example \\u4e2d."
    )
