"""What is wrong or surprising about an expression, where, and what to write instead.

A finding points at characters of the expression and says what they mean to RocketMQ. An error does
not compile; a warning compiles, and does something else than it seems to.

A text fails in two ways: a character begins no token, or a token cannot stand where it stands. The
first is mostly a habit of another language (`!=`, `&&`, `"x"`) or a character copied from an
article: ‘ ’ “ ” and the full-width （ ） ， ＝ of Chinese typesetting.
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
        fix=finding.instead,
    )


def _columns(text: str) -> int:
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def rest_warning(text: str, rest: int) -> Finding:
    """The warning about everything from index `rest` on, which RocketMQ ignores."""
    before, ignored = text[:rest], text[rest:].rstrip()
    what, instead = next(
        (what.format(found[0]), instead)
        for ends, begins, what, instead in _ENDS
        if re.match(begins, text[rest:]) and (found := re.search(ends, before))
    )
    code = "open-comment" if ignored.startswith("--") else IGNORED_TEXT
    return Finding(rest, len(ignored), code, what, instead, Severity.WARNING)


_NO_LIKE = "Write a CONTAINS 'x', a STARTSWITH 'x' or a ENDSWITH 'x'; there are no wildcards."
_IGNORED = "Everything from here on is ignored"
# How the text before ends, how the ignored text begins, why that is so, what to write instead.
_ENDS: tuple[tuple[str, str, str, str], ...] = (
    ("$", r"(?i:like)\b", f"{_IGNORED}: there is no LIKE.", _NO_LIKE),
    ("$", "--", "A line comment needs its line's end; this one is text that is ignored.",
     "Nothing is lost, but a line break after it makes it a comment."),
    (r"[A-Za-z_$][A-Za-z0-9_$]*$", r"-[A-Za-z0-9_$]",
     f"{_IGNORED}: a property name has no dashes.", "Rename the property, for example order_id."),
    ("$", r"[+-]", f"{_IGNORED}: there is no arithmetic.", "Write the computed number."),
    ("$", r"\)", f"{_IGNORED}: no parenthesis is open here.", "Leave it away, or open one."),
    (r"(?<![A-Za-z0-9_$])[0-9.]+[lL]?$", r"[A-Za-z0-9_$.]",
     f"{_IGNORED}: the number ends after {{0}}.",
     "Numbers are written 10, 1.5 or 1e3: no 0x, no leading zero, no 1_000, no 5f."),
    ("$", "", f"{_IGNORED}: a condition was complete before it.",
     "Join conditions with AND or OR."),
)  # fmt: skip


# Typographic look-alikes, one character each, so that a repaired text keeps its positions.
_QUOTES = "‘’‚‛′‵“”„‟″«»「」『』＇＂´`"
_BLANKS = "".join(map(chr, (0xA0, 0x1680, *range(0x2000, 0x200C), 0x202F, 0x205F, 0x3000, 0xFEFF)))
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
LOOK_ALIKES: dict[int, str] = {
    **{code: chr(ascii_code) for code, ascii_code in _FULL_WIDTH.items()},
    **dict.fromkeys(map(ord, _QUOTES), "'"),
    **dict.fromkeys(map(ord, _BLANKS), " "),
    ord("、"): ",",
    ord("–"): "-",
    ord("—"): "-",
    ord("−"): "-",
}
LOOK_ALIKE_CODE = "look-alike"

_QUOTED = re.compile(rf"[{_QUOTES}]([^{_QUOTES}']*)[{_QUOTES}]")

# What stands there -> (code, what it means to RocketMQ, what to write instead); longest first.
_HABITS: dict[str, tuple[str, str, str]] = {
    "!=": ("operator", "!= is not an operator of SQL92.", "Write <>."),
    "≠": ("operator", "≠ is not an operator of SQL92.", "Write <>."),
    "≥": ("operator", "≥ is not an operator of SQL92.", "Write >=."),
    "≤": ("operator", "≤ is not an operator of SQL92.", "Write <=."),
    "&&": ("operator", "&& is not an operator of SQL92.", "Write AND."),
    "||": ("operator", "|| is not an operator of SQL92 (it belongs to tags).", "Write OR."),
    "!": ("operator", "! is not an operator of SQL92.", "Write NOT (...), or <> for not equal."),
    "&": ("operator", "& is not an operator of SQL92.", "Write AND."),
    "|": ("operator", "| is not an operator of SQL92.", "Write OR."),
    "/*": ("comment", "The comment is not closed.", "Close it with */."),
    "*": ("arithmetic", "There is no arithmetic.", "Let the producer send the computed value."),
    "/": ("arithmetic", "There is no arithmetic.", "Let the producer send the computed value."),
    "%": ("arithmetic", "There is no arithmetic.", "Let the producer send the computed value."),
    ".": ("name", "A property name has no dots: only letters, digits, _ and $.",
          "Rename the property, for example order_id."),
    ";": ("character", "An expression is not ended with a semicolon.", "Leave ; away."),
    "'": ("quote", "The string that begins here is not closed.",
          "Close it with '; a quote inside a string is written twice: 'it''s'."),
    '"': ("quote", "Strings stand in single quotes.", "Write 'x'; property names have no quotes."),
    "`": ("quote", "Property names have no quotes.", "Write the name bare, or a string as 'x'."),
    "\\": ("character", "There are no backslash escapes.",
           "A quote inside a string is written twice: 'it''s'."),
}  # fmt: skip

_WORDS = {"NOT", "AND", "OR", "BETWEEN", "IN", "IS", "NULL", "TRUE", "FALSE", "MATCH"}
_TOKEN_NAMES = {
    "NAME": "a property", "DECIMAL": "a number", "STRING": "a string in single quotes",
    "OPEN": "(", "CLOSE": ")", "COMMA": ",", "EQUAL": "=", "UNEQUAL": "<>", "ORDER": "> >= < <=",
    "MATCH": "CONTAINS, STARTSWITH or ENDSWITH", END: "the end",
}  # fmt: skip


def lexical_finding(text: str, position: int) -> Finding:
    """No token begins at `position`."""
    character = text[position]
    if character != "`" and (quoted := _QUOTED.match(text, position)):
        what = f"{quoted[0]} stands in typographic quotes; strings need the plain quote ' (U+0027)."
        fix = f"Write '{quoted[1]}'."
        return Finding(position, len(quoted[0]), LOOK_ALIKE_CODE, what, fix)
    if ord(character) in LOOK_ALIKES and character != "`":
        plain = LOOK_ALIKES[ord(character)]
        name = "space" if plain == " " else plain
        what = f"{_visible(character)} is not the plain {name}, it only looks like it."
        return Finding(position, 1, LOOK_ALIKE_CODE, what, f"Type a plain {name} instead.")
    for sign in sorted(_HABITS, key=len, reverse=True):
        if text.startswith(sign, position):
            code, what, instead = _HABITS[sign]
            length = len(text) - position if code in ("quote", "comment") else len(sign)
            if sign == '"':
                end = text.find(sign, position + 1)
                length = max(1, end + 1 - position)
                if end > 0:
                    instead = f"Write '{text[position + 1 : end]}'; property names have no quotes."
            return Finding(position, length, code, what, instead)
    if character.isalnum():
        return Finding(
            position, 1, "name",
            f"{character!r} cannot be in a property name: only A-Z, a-z, 0-9, _ and $.",
            "Rename the property; strings in quotes may hold any character.",
        )  # fmt: skip
    return Finding(position, 1, "character", f"{_visible(character)} means nothing in SQL92.", "")


def parse_finding(text: str, token: Token, expected: frozenset[str]) -> Finding:
    """`token` cannot stand where it stands; `expected` are the token types that can."""
    position, shown, kind = token.position, token.text, token.kind
    if not text.strip():
        return Finding(0, 1, "empty", "The expression is empty.", "Write TRUE for all messages.")
    opened = _open_parenthesis(text[:position]) if "CLOSE" in expected else None
    if kind == END:
        if opened is not None:
            return Finding(opened, 1, "parenthesis", "This parenthesis is not closed.", "Add ).")
        what = "The expression ends too early."
        return Finding(len(text), 1, "ends-early", what, _wanted(expected))
    before = text[max(0, position - 1) : position]
    meant = {"==": "=", "=>": ">=", "=<": "<=", "><": "<>"}.get(before + shown[:1], "")
    if meant and kind in ("EQUAL", "ORDER", "UNEQUAL"):
        what = f"{before}{shown} is not an operator of SQL92."
        return Finding(position, len(shown), "operator", what, f"Write {meant}.")
    found = _wrong_list(text, token, expected) or _wrong_word(token, expected, opened)
    return Finding(position, len(shown), *found)


def name_begins_with_digit(text: str, finding: Finding) -> Finding:
    """`1a = 5` is the number 1 and then a name: say what the user meant, not what was parsed."""
    end = finding.position + finding.length
    name = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*").match(text, end)
    if finding.code != "not-a-condition" or name is None or not text[finding.position].isdigit():
        return finding
    return Finding(
        finding.position, name.end() - finding.position, "name",
        f"A property name cannot begin with a digit: {text[finding.position:name.end()]}.",
        "Rename the property.",
    )  # fmt: skip


def _wrong_list(text: str, token: Token, expected: frozenset[str]) -> tuple[str, str, str] | None:
    if expected == {"OPEN"}:
        return "in-list", "IN needs parentheses.", "Write IN ('x', 'y')."
    if token.kind == "COMMA" and "AND" in expected:
        fix = "The bounds are joined by AND: BETWEEN 1 AND 9."
        return "between", "A comma cannot stand here.", fix
    if expected != {"STRING"}:
        return None
    before = text[: token.position].rstrip(" \t\r\n\f")
    if before[-1:] not in ("(", ","):
        operator = before[-10:].split()[-1].upper()
        what = f"{operator} needs a string in quotes after it."
        return "match-operand", what, f"Write {operator} 'x'."
    if token.kind == "CLOSE":
        return "in-list", "IN needs strings, and here one is missing.", "Write IN ('x', 'y')."
    what = f"IN takes strings only, and {token.text} is none."
    return "in-list", what, f"Write '{token.text}' in quotes."


def _wrong_word(token: Token, expected: frozenset[str], opened: int | None) -> tuple[str, str, str]:
    shown = token.text
    if token.kind == "NAME" and shown.upper() == "LIKE":
        return "like", "There is no LIKE.", _NO_LIKE
    if "NULL" in expected and "NAME" not in expected:
        return "is", "IS is followed by NULL or NOT NULL.", "For values write = and <>."
    if token.kind in _WORDS and "NAME" in expected:
        what = f"{shown} is a word of the language and cannot stand here, nor name a property."
        return "word", what, "Rename the property if it is one. " + _wanted(expected)
    if opened is not None:
        what = f"{shown} cannot follow here: the parenthesis at character {opened + 1} is open."
        return "parenthesis", what, "Write ) or an operator before it."
    return "unexpected", f"{shown} cannot stand here.", _wanted(expected)


def _open_parenthesis(text: str) -> int | None:
    """The last parenthesis without its partner; strings do not count."""
    opened = []
    for found in re.finditer(r"'[^']*'|[()]", text):
        if found[0] == "(":
            opened.append(found.start())
        elif found[0] == ")" and opened:
            opened.pop()
    return opened[-1] if opened else None


def _wanted(expected: frozenset[str]) -> str:
    if "NAME" in expected:
        return "A property, a number, a string in single quotes or ( must follow."
    names = sorted({_TOKEN_NAMES.get(kind, kind) for kind in expected})
    return f"Expected: {', '.join(names)}." if names else ""


def _visible(character: str) -> str:
    shown = f"{character} " if character.isprintable() and not character.isspace() else ""
    return f"{shown}(U+{ord(character):04X})"
