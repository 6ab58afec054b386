"""What is wrong or surprising about an expression, and where: the value that all checks speak.

A finding points at characters of the expression, says what they mean to RocketMQ and what to write
instead. An error does not compile; a warning compiles, and does something else than it seems to.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
from unicodedata import east_asian_width

from sluicemq.errors import FilterSyntaxError

LINE_LENGTH_MAX = 100
IGNORED_TEXT = "ignored-text"


END = "$END"  # the terminal that lark's tables have for the end of the text


class Token(NamedTuple):
    """A piece of the expression: the terminal's name in grammar.lark, its text and place."""

    kind: str
    text: str
    position: int


class Severity(Enum):
    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """`position` and `length` count characters of the expression; `code` is a stable short name
    for scripts; `what` is the fact, `instead` the cure (may be empty)."""

    position: int
    length: int
    code: str
    what: str
    instead: str = ""
    severity: Severity = Severity.ERROR

    @property
    def is_error(self) -> bool:
        return self.severity is Severity.ERROR


class Rejected(Exception):  # noqa: N818 - never leaves the package
    """Carries a finding out of the parser."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.what)
        self.finding = finding


def caret_lines(text: str, position: int, length: int) -> tuple[str, str]:
    """The line of the expression that holds `position`, and a line of carets under the fault.

    Control characters show as spaces, a long line is cut to what surrounds the fault, and
    characters of double width (Chinese) get two columns.
    """
    start = max(text.rfind("\n", 0, position), text.rfind("\r", 0, position)) + 1
    line = text[start:].splitlines()[0] if text[start:].strip("\r\n") else text[start:]
    offset = min(position - start, len(line))
    cut = max(0, offset - LINE_LENGTH_MAX // 2)
    shown = line[cut : cut + LINE_LENGTH_MAX]
    fault = shown[offset - cut : offset - cut + max(1, length)]
    before = _columns(shown[: offset - cut])
    printable = "".join(character if character.isprintable() else " " for character in shown)
    return printable, " " * before + "^" * max(1, _columns(fault))


def syntax_error(text: str, finding: Finding) -> FilterSyntaxError:
    """The exception for an error, or for ignored text: the place, the carets, the fact and the
    cure."""
    line, carets = caret_lines(text, finding.position, finding.length)
    wrong = "does not compile at" if finding.is_error else "ends before"
    return FilterSyntaxError(
        f"The SQL92 expression {wrong} character {finding.position + 1}:\n"
        f"    {line}\n    {carets}\n{finding.what}",
        position=finding.position,
        cure=finding.instead,
    )


def _columns(text: str) -> int:
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def rest_warning(text: str, rest: int) -> Finding:
    """The warning about everything from index `rest` on, which RocketMQ ignores."""
    ignored = text[rest:].rstrip()
    what, instead = _why_it_ends(text, rest)
    code = "open-comment" if ignored.startswith("--") else IGNORED_TEXT
    return Finding(rest, len(ignored), code, what, instead, Severity.WARNING)


def _why_it_ends(text: str, rest: int) -> tuple[str, str]:
    ignored, before = text[rest:], text[:rest]
    everything = "Everything from here on is ignored"
    if re.match(r"like\b", ignored, re.IGNORECASE):
        return (
            f"{everything}: there is no LIKE.",
            "Write a CONTAINS 'x', a STARTSWITH 'x' or a ENDSWITH 'x'; there are no wildcards.",
        )
    if ignored.startswith("--"):
        return (
            "A line comment needs its line's end; this one is text that is ignored.",
            "Nothing is lost, but a line break after it makes it a comment.",
        )
    if re.search(r"[A-Za-z_$][A-Za-z0-9_$]*$", before) and re.match(r"-[A-Za-z0-9_$]", ignored):
        return (
            f"{everything}: a property name has no dashes.",
            "Rename the property, for example order_id.",
        )
    if ignored[0] in "+-":
        return f"{everything}: there is no arithmetic.", "Write the computed number."
    if ignored[0] == ")":
        return f"{everything}: no parenthesis is open here.", "Leave it away, or open one."
    number = re.search(r"(?<![A-Za-z0-9_$])[0-9.]+[lL]?$", before)
    if number and re.match(r"[A-Za-z0-9_$.]", ignored):
        return (
            f"{everything}: the number ends after {number[0]}.",
            "Numbers are written 10, 1.5 or 1e3: no 0x, no leading zero, no 1_000, no 5f.",
        )
    return f"{everything}: a condition was complete before it.", "Join conditions with AND or OR."
