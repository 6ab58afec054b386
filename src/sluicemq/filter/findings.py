"""What is wrong or surprising about an expression, and where: the value that all checks speak.

A finding points at characters of the expression, says what they mean to RocketMQ and what to write
instead. An error does not compile; a warning compiles, and does something else than it seems to.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
from unicodedata import east_asian_width

from sluicemq.errors import FilterSyntaxError

LINE_LENGTH_MAX = 100


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
