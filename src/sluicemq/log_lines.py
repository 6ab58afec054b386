"""Formatters that write a log record as one line: as text, or as a JSON object.

Names, addresses, ids and properties of messages come from clients, and many log lines quote them.
So a line has no control character: a name with a line break in it cannot begin a line of its own,
and one with an escape sequence cannot change what a terminal shows. Only this module escapes
them, so the code that logs passes names unchanged.
"""

import logging
import re
from datetime import UTC, datetime
from typing import Final

import orjson

TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_BREAK: Final = "\n"
_UNSAFE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters
    "\u2028\u2029"  # separators of lines and paragraphs
    "\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069"  # marks that change the direction of text
    "\ud800-\udfff]"  # lone surrogates, which UTF-8 cannot encode
)


def escape(text: str) -> str:
    r"""Return the text with a backslash sequence for each character that a log line must not have.

    A line break becomes `\n`, an escape character `\x1b`.
    """
    return _UNSAFE.sub(_escape_match, text)


def _escape_match(match: re.Match[str]) -> str:
    """Return the backslash sequence for an unsafe character."""
    return match[0].encode("unicode_escape").decode("ascii")


class TextLines(logging.Formatter):
    """A formatter that writes a record as a line of text: time, level, logger, message.

    The lines of a traceback follow, indented, so that none of them looks like another record.
    """

    def __init__(self) -> None:
        """Create the formatter for `TEXT_FORMAT`."""
        super().__init__(TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line, escaped."""
        return escape(super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802 - logging's name
        """Return the lines of a traceback, escaped and indented."""
        return _escape_and_indent(super().formatException(ei))  # type: ignore[arg-type]

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - logging's name
        """Return the lines of a stack, escaped and indented."""
        return _escape_and_indent(super().formatStack(stack_info))


def _escape_and_indent(lines: str) -> str:
    """Return several lines of text, each escaped and indented."""
    return _BREAK.join(f"  {escape(line)}" for line in lines.split(_BREAK))


class JsonLines(logging.Formatter):
    """A formatter that writes a record as a JSON object: time, level, logger, message, error.

    The time is ISO 8601 in UTC. Texts are not changed, except that a lone surrogate, which JSON
    cannot contain, becomes a backslash sequence.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return a log record as a JSON object in one line.

        Its members are time (ISO 8601, UTC), level, logger, message and, if there is an exception,
        error.
        """
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        safe_fields = {key: _escape_surrogates(content) for key, content in fields.items()}
        line = orjson.dumps(safe_fields).decode()
        return _UNSAFE.sub(_escape_match_for_json, line)


def _escape_surrogates(text: str) -> str:
    """Return the text with a backslash sequence for each lone surrogate."""
    return text.encode("utf-8", "backslashreplace").decode()


def _escape_match_for_json(match: re.Match[str]) -> str:
    """Return the escape sequence of JSON for an unsafe character."""
    return f"\\u{ord(match[0]):04x}"
