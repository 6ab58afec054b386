"""Findings: the errors and warnings of an expression, with their position and fix.

A finding marks characters of an expression and says what they mean to RocketMQ. An expression with
an error does not compile. An expression with a warning compiles, but does something other than it
seems to.

Compilation can fail in two ways: a character begins no token (`lexical_finding`), or a token cannot
follow the tokens before it (`parse_finding`). The cause of the first is mostly a habit from another
language (`!=`, `&&`, `"x"`), or a character that was copied from an article: ‘ ’ “ ” and the
full-width （ ） ， ＝ of Chinese typesetting.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
from unicodedata import east_asian_width

from sluicemq.errors import FilterSyntaxError
from sluicemq.filter.nodes import Property

LINE_LENGTH_MAX = 100
"""The maximum characters of an expression's line that an error shows."""
IGNORED_TEXT = "ignored-text"
"""The code of the warning about text that RocketMQ ignores."""
EMPTY = "empty"
"""The code of the error about an empty expression. There is no text to mark."""


END = "$END"
"""The terminal for the end of the text in the tables of lark."""


class Token(NamedTuple):
    """A token of an expression: the name of its terminal in grammar.lark, its text and index."""

    kind: str
    text: str
    position: int


class Severity(Enum):
    """Whether a finding prevents the expression from compiling."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """An error or a warning about a part of an expression.

    The part begins at character `position`, counted from 0, and has `length` characters. `code` is
    a short name that never changes, for scripts. `what` states the fact. `instead` is the fix: what
    to write instead, "" if there is no general advice. The fields are the keys of the JSON output
    of `sluice filter check`.
    """

    position: int
    length: int
    code: str
    what: str
    instead: str = ""
    severity: Severity = Severity.ERROR

    @property
    def is_error(self) -> bool:
        """Whether the expression does not compile because of this."""
        return self.severity is Severity.ERROR


class Rejected(Exception):  # noqa: N818 - it never leaves the package
    """The parser or one of its actions rejected the expression. `finding` says where and why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.what)
        self.finding = finding


def caret_lines(text: str, position: int, length: int) -> tuple[str, str]:
    """Return the line of the expression that contains `position`, and a line of carets below it.

    The carets mark `length` characters from `position`, but only on that line. Control characters
    are replaced by spaces. A line of more than LINE_LENGTH_MAX characters is cut to a part around
    `position`. A character of double width (Chinese) gets two carets.
    """
    last_line_end = max(text.rfind("\n", 0, position), text.rfind("\r", 0, position))
    line_start = last_line_end + 1
    line = text[line_start:]
    if line.strip("\r\n"):
        line = line.splitlines()[0]
    column = min(position - line_start, len(line))

    cut_start = max(0, column - LINE_LENGTH_MAX // 2)
    shown_line = line[cut_start : cut_start + LINE_LENGTH_MAX]
    marked_start = column - cut_start
    marked = shown_line[marked_start : marked_start + max(1, length)]
    indent = " " * _terminal_width(shown_line[:marked_start])
    carets = "^" * max(1, _terminal_width(marked))
    return _replace_unprintable(shown_line), indent + carets


def _replace_unprintable(text: str) -> str:
    """Return a text with a space instead of each control character."""
    return "".join(character if character.isprintable() else " " for character in text)


def syntax_error(text: str, finding: Finding) -> FilterSyntaxError:
    """Return the exception for a finding that makes an expression unusable.

    The finding is an error, or a warning about text that RocketMQ ignores. The message of the
    exception shows the position, the line with carets, the fact and the fix. An empty expression
    has no line to show.
    """
    what = finding.what
    if finding.code != EMPTY:
        line, carets = caret_lines(text, finding.position, finding.length)
        problem = "does not compile" if finding.is_error else "is not valid"
        what = (
            f"The SQL92 expression {problem} at character {finding.position + 1}:\n"
            f"    {line}\n    {carets}\n{what}"
        )
    return FilterSyntaxError(what, position=finding.position, fix=finding.instead)


def _terminal_width(text: str) -> int:
    """Return the width of a text on a terminal, in columns."""
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def ignored_text_warning(text: str, ignored_start: int) -> Finding:
    """Return the warning about the text from `ignored_start` on, which RocketMQ ignores.

    Its code is "open-comment" for a line comment without a line end, and IGNORED_TEXT for other
    text. It says why the text is ignored and what to write instead. It marks the ignored text, and
    for a function also its name, which RocketMQ reads as a property.
    """
    text_before = text[:ignored_start]
    ignored_text = text[ignored_start:]
    reason, match_before = _find_ignored_reason(text_before, ignored_text)
    code = "open-comment" if ignored_text.startswith("--") else IGNORED_TEXT
    start = match_before.start() if reason.is_marked_from_match else ignored_start
    what = reason.what.format(match_before[0].rstrip())
    return Finding(start, len(text[start:].rstrip()), code, what, reason.fix, Severity.WARNING)


def _find_ignored_reason(
    text_before: str, ignored_text: str
) -> "tuple[_IgnoredReason, re.Match[str]]":
    """Return the first reason in `_IGNORED_REASONS` for text that RocketMQ ignores.

    `text_before` is the text before it. Also return the match of the reason's pattern there.
    """
    for reason in _IGNORED_REASONS:
        match_before = re.search(reason.before_pattern, text_before)
        if match_before is not None and re.match(reason.ignored_pattern, ignored_text):
            return reason, match_before
    raise AssertionError("the last reason always applies")


class _IgnoredReason(NamedTuple):
    """Why RocketMQ ignores text: it applies if both patterns match where the ignored text begins.

    `{0}` in `what` stands for the match of `before_pattern`, without blanks at its end.
    """

    before_pattern: str
    ignored_pattern: str
    what: str
    fix: str
    is_marked_from_match: bool = False
    """Whether the warning marks the match of `before_pattern` too."""


_NO_LIKE = "Write a CONTAINS 'x', a STARTSWITH 'x' or a ENDSWITH 'x'; there are no wildcards."
_IGNORED = "RocketMQ ignores everything from here on"
# The first reason that applies is reported. The last one always applies.
_IGNORED_REASONS = (
    _IgnoredReason(
        "$", r"(?i:like)\b", f"{_IGNORED}: SQL92 filters do not support LIKE.", _NO_LIKE
    ),
    _IgnoredReason(
        "$",
        "--",
        "A line comment needs a line end; this one has none and is ignored as text.",
        "Add a line break behind it to make it a comment. The filter is the same without it.",
    ),
    _IgnoredReason(
        r"(?i:(?<![a-z0-9_$])(?!(?:null|true|false)\s*$)[a-z_$][a-z0-9_$]*)\s*$",
        r"\(",
        "SQL92 filters do not support functions: RocketMQ reads {0} as a property name and ignores "
        "the rest.",
        "Compare the property itself, as in color IN ('red', 'RED').",
        is_marked_from_match=True,
    ),
    _IgnoredReason(
        r"[A-Za-z_$][A-Za-z0-9_$]*$",
        r"-[A-Za-z0-9_$]",
        f"{_IGNORED}: a property name cannot contain dashes.",
        "Rename the property, for example order_id.",
    ),
    _IgnoredReason(
        "$",
        r"[+-]",
        f"{_IGNORED}: SQL92 filters do not support arithmetic.",
        "Write the computed number.",
    ),
    _IgnoredReason(
        "$",
        r"\)",
        f"{_IGNORED}: no parenthesis is open here.",
        "Remove the parenthesis, or open one.",
    ),
    _IgnoredReason(
        r"(?<![A-Za-z0-9_$])[0-9.]+[lL]?$",
        r"[A-Za-z0-9_$.]",
        f"{_IGNORED}: the number ends after {{0}}.",
        "Numbers are written 10, 1.5 or 1e3: no 0x, no leading zero, no 1_000, no 5f.",
    ),
    _IgnoredReason(
        "$",
        "",
        f"{_IGNORED}, because the condition before it is complete.",
        "Join conditions with AND or OR.",
    ),
)


# Typographic look-alikes. Each is replaced by one character, so that positions stay the same.
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
"""The plain ASCII character for each character that looks like it, as str.translate() takes it."""
LOOK_ALIKE_CODE = "look-alike"
"""The code of the error about a character in `LOOK_ALIKES`."""

_PROPERTY_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")
_LIST_VALUE = re.compile(r"[A-Za-z0-9_$.+-]+|'[^']*'")
_QUOTED = re.compile(rf"[{_QUOTES}]([^{_QUOTES}']*)[{_QUOTES}]")

_NO_ARITHMETIC = "SQL92 filters do not support arithmetic."
# Signs from other languages: code, meaning in RocketMQ, fix.
# fmt: off
_HABITS: dict[str, tuple[str, str, str]] = {
    "!=": ("operator", "!= is not an SQL92 operator.", "Use <> instead."),
    "≠": ("operator", "≠ is not an SQL92 operator.", "Use <> instead."),
    "≥": ("operator", "≥ is not an SQL92 operator.", "Use >= instead."),
    "≤": ("operator", "≤ is not an SQL92 operator.", "Use <= instead."),
    "&&": ("operator", "&& is not an SQL92 operator.", "Use AND instead."),
    "||": ("operator", "|| is not an SQL92 operator (it belongs to tags).", "Use OR instead."),
    "!": ("operator", "! is not an SQL92 operator.", "Use NOT (...), or <> for not equal."),
    "&": ("operator", "& is not an SQL92 operator.", "Use AND instead."),
    "|": ("operator", "| is not an SQL92 operator.", "Use OR instead."),
    "/*": ("comment", "This comment is not closed.", "Add */ at its end."),
    "*": ("arithmetic", _NO_ARITHMETIC, "Let the producer send the computed value."),
    "/": ("arithmetic", _NO_ARITHMETIC, "Let the producer send the computed value."),
    "%": ("arithmetic", _NO_ARITHMETIC, "Let the producer send the computed value."),
    ".": ("name", "A property name cannot contain dots, only letters, digits, _ and $.",
          "Rename the property, for example order_id."),
    ";": ("character", "An expression does not end with a semicolon.", "Remove the semicolon."),
    "'": ("quote", "This string is not closed.",
          "Add a single quote at its end. To include a quote in a string, double it, as in "
          "'it''s'."),
    '"': ("quote", "Strings must be in single quotes.",
          "Write 'x', or x without quotes if it is the name of a property."),
    "`": ("quote", "Property names must not be in quotes.",
          "Write the name without quotes, or a string in single quotes: 'x'."),
    "\\": ("character", "SQL92 filters do not support backslash escapes.",
           "To include a quote in a string, double it, as in 'it''s'."),
}
# fmt: on

_MATCH_ALL = "Write TRUE to match all messages."
_RESERVED_WORDS = {"NOT", "AND", "OR", "BETWEEN", "IN", "IS", "NULL", "TRUE", "FALSE", "MATCH"}
_LIST_TOKENS = {
    "DECIMAL": "a number",
    "FLOAT": "a number",
    "NAME": "the name of a property",
}
"""What a token in a list after IN is, if it was probably meant as a string."""
_COMPLETIONS = {
    "": "a condition, as in price > 3",
    "AND": "a condition after {0}, as in price > 3 {0} color = 'red'",
    "BETWEEN": "two bounds after BETWEEN, as in {1} BETWEEN 1 AND 10",
    "CLOSE": "a closing parenthesis",
    "EQUAL": "a value after =, as in {1} = 3 or {1} = 'red'",
    "IN": "a list of strings after IN, as in {1} IN ('x', 'y')",
    "IS": "NULL or NOT NULL after IS, as in {1} IS NULL",
    "IS NOT": "NULL after NOT, as in {1} IS NOT NULL",
    "MATCH": "a string in single quotes after {0}, as in {1} {0} 'x'",
    "MINUS": "a number after -, as in -3",
    "NOT": "a condition in parentheses after NOT, as in NOT (price > 3)",
    "OPEN": "a condition and a closing parenthesis, as in (price > 3)",
    "OR": "a condition after {0}, as in price > 3 {0} color = 'red'",
    "ORDER": "a number or the name of a property after {0}, as in {1} {0} 3",
    "PLUS": "a number after +, as in +3",
    "UNEQUAL": "a value after <>, as in {1} <> 3 or {1} <> 'red'",
    "bound": "an upper bound after AND, as in {1} BETWEEN 1 AND 10",
    "list": "strings in single quotes and a closing parenthesis, as in {1} IN ('x', 'y')",
    "low": "AND and an upper bound, as in {1} BETWEEN 1 AND 10",
    "negated": "IN, BETWEEN, CONTAINS, STARTSWITH or ENDSWITH after NOT, "
    "as in {1} NOT IN ('x', 'y')",
}
"""What must follow the last token, by the kind of the token or by the place.

`{0}` stands for the token, and `{1}` for the property to which it is applied.
"""


def lexical_finding(text: str, position: int) -> Finding:
    """Return the error for the character at `position`, at which no token can begin.

    The causes are tried in this order: a string in typographic quotes, a character that only looks
    like a plain one, a sign from another language such as `!=`, and a letter or digit that no name
    may contain. Any other character "means nothing in SQL92".
    """
    character = text[position]
    finding = _explain_look_alike(text, position) or _explain_foreign_sign(text, position)
    if finding is not None:
        return finding
    if character.isalnum():
        what = f"{character!r} cannot be in a property name: only A-Z, a-z, 0-9, _ and $."
        fix = "Rename the property; strings in quotes may contain any character."
        return Finding(position, 1, "name", what, fix)
    return Finding(
        position, 1, "character", f"{_show_character(character)} means nothing in SQL92.", ""
    )


def _explain_look_alike(text: str, position: int) -> Finding | None:
    """Return the error for a string in typographic quotes or a character that looks like another.

    `LOOK_ALIKES` contains these characters, such as the non-breaking space. Return None for any
    other character. A backtick returns None too, because it is explained as a sign from another
    language.
    """
    character = text[position]
    if character == "`":
        return None
    quoted = _QUOTED.match(text, position)
    if quoted is not None:
        what = f"{quoted[0]} is in typographic quotes; strings need the plain quote ' (U+0027)."
        fix = f"Write '{quoted[1]}'."
        return Finding(position, len(quoted[0]), LOOK_ALIKE_CODE, what, fix)
    if ord(character) not in LOOK_ALIKES:
        return None
    plain_character = LOOK_ALIKES[ord(character)]
    plain_name = "space" if plain_character == " " else plain_character
    what = f"{_show_character(character)} is not the plain {plain_name}, it only looks like it."
    return Finding(position, 1, LOOK_ALIKE_CODE, what, f"Type a plain {plain_name} instead.")


def _explain_foreign_sign(text: str, position: int) -> Finding | None:
    """Return the error for a sign at `position` that other languages use, such as `!=` or `&&`.

    Return None if there is no such sign.
    """
    for sign in sorted(_HABITS, key=len, reverse=True):  # `!=` before `!`
        if not text.startswith(sign, position):
            continue
        code, what, fix = _HABITS[sign]
        if sign == '"':
            length, fix = _explain_double_quotes(text, position)
        elif code in ("quote", "comment"):
            length = len(text) - position
        else:
            length = len(sign)
        return Finding(position, length, code, what, fix)
    return None


def _explain_double_quotes(text: str, position: int) -> tuple[int, str]:
    """Return (length, fix) for a string in double quotes that begins at `position`.

    `length` is the number of characters to mark, with both quotes. It is 1 if the closing quote is
    missing.
    """
    end = text.find('"', position + 1)
    if end < 0:
        _, _, fix = _HABITS['"']
        return 1, fix
    quoted_text = text[position + 1 : end]
    fix = f"Write '{quoted_text}'"
    if _PROPERTY_NAME.fullmatch(quoted_text):
        fix += f", or {quoted_text} without quotes if it is the name of a property"
    return end + 1 - position, fix + "."


def parse_finding(
    text: str, token: Token, expected: frozenset[str], before: Sequence[object] = ()
) -> Finding:
    """Return the error for a token that cannot follow the tokens before it.

    `expected` contains the kinds of tokens that can follow. `before` contains the tokens and nodes
    that the parser has read and not yet joined. The causes are tried in this order:

    - the expression is empty, or ends too early
    - an operator that does not exist, such as `=>`
    - a wrong token in the list of IN, after BETWEEN, or after CONTAINS, STARTSWITH or ENDSWITH
    - any other wrong word, such as LIKE or a reserved word
    """
    if not text.strip():
        return Finding(0, 1, EMPTY, "The SQL92 expression is empty.", _MATCH_ALL)
    open_index = None
    if "CLOSE" in expected:
        open_index = _find_open_parenthesis(text[: token.position])
    completion = _describe_completion(before, expected)
    if token.kind == END:
        return _explain_early_end(text, completion, open_index)

    wrong_operator = _explain_wrong_operator(text, token, _find_property_name(before))
    if wrong_operator is not None:
        return wrong_operator
    explanation = _explain_wrong_list(text, token, expected) or _explain_wrong_word(
        token, expected, completion, open_index
    )
    code, what, fix = explanation
    return Finding(token.position, len(token.text), code, what, fix)


def _explain_early_end(text: str, completion: str, open_index: int | None) -> Finding:
    """Return the error for an expression that ends too early.

    `open_index` is the index of a parenthesis that is not closed, None if there is none.
    `completion` says what could follow.
    """
    if open_index is not None:
        what = "This parenthesis is not closed."
        return Finding(open_index, 1, "parenthesis", what, "Add a closing parenthesis.")
    return Finding(
        len(text), 1, "ends-early", "Unexpected end of expression.", f"Add {completion}."
    )


def _explain_wrong_operator(text: str, token: Token, property_name: str) -> Finding | None:
    """Return the error for an operator that does not exist, such as `=>`; None for other tokens.

    The tokenizer has split `=>` into two tokens. `token` begins with the second character, `>`. The
    first one is the character before it. `property_name` is for the example in the fix.
    """
    if token.kind not in ("EQUAL", "ORDER", "UNEQUAL"):
        return None
    start = max(0, token.position - 1)
    wrong_operator = text[start : token.position] + token.text
    correct_operators = {"==": "=", "=>": ">=", "=<": "<=", "><": "<>"}
    correct_operator = correct_operators.get(wrong_operator[:2])
    if correct_operator is None:
        return None
    what = f"{wrong_operator} is not an SQL92 operator."
    fix = f"Use {correct_operator} instead, as in {property_name} {correct_operator} 3."
    return Finding(start, len(wrong_operator), "operator", what, fix)


def _describe_completion(before: Sequence[object], expected: frozenset[str]) -> str:
    """Return a phrase that says what must follow, such as "a number after >, as in price > 3".

    `before` contains the tokens and nodes that the parser has read and not yet joined, and
    `expected` the kinds of tokens that could follow.
    """
    last = before[-1] if before else None
    before_last = before[-3] if len(before) > 2 else None
    place = last.kind if isinstance(last, Token) else ""
    if "CLOSE" in expected:
        place = "CLOSE"
    elif "AND" in expected and "NAME" not in expected:
        place = "low"
    elif place == "AND" and isinstance(before_last, Token) and before_last.kind == "BETWEEN":
        place = "bound"
    elif place == "NOT" and expected == {"NULL"}:
        place = "IS NOT"
    elif place == "NOT" and "NAME" not in expected:
        place = "negated"
    elif "STRING" in expected and "NAME" not in expected and place != "MATCH":
        place = "list"
    word = last.text if isinstance(last, Token) else ""
    return _COMPLETIONS[place].format(word, _find_property_name(before))


def _find_property_name(before: Sequence[object]) -> str:
    """Return the name of the last property among tokens and nodes, "price" if there is none."""
    names = [part.name for part in before if isinstance(part, Property)]
    return names[-1] if names else "price"


def explain_name_with_digit(text: str, finding: Finding) -> Finding:
    """Return a better finding if a name that begins with a digit caused `finding`.

    `1a = 5` is parsed as the number 1, followed by the name a. So `finding` marks `1` and says that
    a number is not a condition. The better finding marks `1a` and says that a name cannot begin
    with a digit. Every other finding is returned unchanged.
    """
    if finding.code != "not-a-condition" or not text[finding.position].isdigit():
        return finding
    rest_of_name = _PROPERTY_NAME.match(text, finding.position + finding.length)
    if rest_of_name is None:
        return finding
    name = text[finding.position : rest_of_name.end()]
    what = f"A property name cannot begin with a digit: {name}."
    return Finding(finding.position, len(name), "name", what, "Rename the property.")


def _explain_wrong_list(
    text: str, token: Token, expected: frozenset[str]
) -> tuple[str, str, str] | None:
    """Return (code, what, fix) for a wrong token where a list, a bound or a string must be.

    These are the places after IN, between the bounds of BETWEEN, and after CONTAINS, STARTSWITH and
    ENDSWITH. `expected` contains the kinds of tokens that could follow. Return None for other
    places.
    """
    if expected == {"OPEN"}:
        return "in-list", "IN needs parentheses.", "Write IN ('x', 'y')."
    if token.kind == "COMMA" and "AND" in expected:
        fix = "Join the bounds with AND, as in price BETWEEN 1 AND 10."
        return "between", "A comma is not allowed here.", fix
    if expected != {"STRING"}:
        return None

    # A string is expected: in the list of IN, or after CONTAINS, STARTSWITH or ENDSWITH.
    text_before = text[: token.position].rstrip(" \t\r\n\f")
    is_in_list = text_before.endswith(("(", ","))
    if not is_in_list:
        # The last word; the longest operator, STARTSWITH, has 10 characters.
        operator = text_before[-10:].split()[-1].upper()
        what = f"{operator} needs a string in quotes after it."
        return "match-operand", what, f"Write {operator} 'x'."
    if token.kind == "CLOSE":
        return "in-list", "IN needs strings, and here one is missing.", "Write IN ('x', 'y')."
    description = _LIST_TOKENS.get(token.kind, "not a string")
    what = f"IN accepts only strings, and {token.text} is {description}."
    fix = "Write IN ('x', 'y')."
    if token.kind in _LIST_TOKENS:
        fix = _quote_list(text, token)
    return "in-list", what, fix


def _quote_list(text: str, token: Token) -> str:
    """Return the fix for a list after IN in which `token` and perhaps other values have no quotes.

    It shows the whole list with quotes, if the list is short and consists of words and strings.
    """
    start = text.rindex("(", 0, token.position) + 1
    values = [value.strip() for value in text[start:].partition(")")[0].split(",")]
    if len(values) == 1:
        return f"Put it in single quotes: '{token.text}'."
    is_simple = all(_LIST_VALUE.fullmatch(value) for value in values)
    if not is_simple or sum(map(len, values)) > LINE_LENGTH_MAX:
        return "Put every value in single quotes, as in IN ('x', 'y')."
    quoted = ", ".join(value if value.startswith("'") else f"'{value}'" for value in values)
    return f"Put every value in single quotes: IN ({quoted})."


def _explain_wrong_word(
    token: Token, expected: frozenset[str], completion: str, open_index: int | None
) -> tuple[str, str, str]:
    """Return (code, what, fix) for a token that is wrong at its position, whatever the reason.

    `expected` contains the kinds of tokens that could follow, and `completion` describes them.
    `open_index` is the index of a parenthesis that is not closed, None if there is none.
    """
    word = token.text
    if token.kind == "NAME" and word.upper() == "LIKE":
        return "like", "SQL92 filters do not support LIKE.", _NO_LIKE
    if "NULL" in expected and "NAME" not in expected:
        fix = "To compare with a value, use = or <>, as in color = 'red'."
        return "is", "IS must be followed by NULL or NOT NULL.", fix
    if token.kind in _RESERVED_WORDS and "NAME" in expected:
        what = f"{word} is a reserved word. It is not allowed here, and not as a property name."
        return "word", what, f"Rename the property if it is one; otherwise, write {completion}."
    if open_index is not None:
        what = f"{word} cannot follow here: the parenthesis at character {open_index + 1} is open."
        return "parenthesis", what, "Add a closing parenthesis or an operator before it."
    return "unexpected", f"{word} is not allowed here.", f"Write {completion}."


def _find_open_parenthesis(text: str) -> int | None:
    """Return the index of the last `(` that is not closed, None if all are closed.

    Parentheses in strings are ignored.
    """
    open_indices = []
    for string_or_parenthesis in re.finditer(r"'[^']*'|[()]", text):
        if string_or_parenthesis[0] == "(":
            open_indices.append(string_or_parenthesis.start())
        elif string_or_parenthesis[0] == ")" and open_indices:
            open_indices.pop()
    return open_indices[-1] if open_indices else None


def _show_character(character: str) -> str:
    """Return a character with its code point, as `é (U+00E9)`.

    If the character is a space or cannot be printed, return only the code point: `(U+00A0)`.
    """
    code_point = f"(U+{ord(character):04X})"
    if character.isprintable() and not character.isspace():
        return f"{character} {code_point}"
    return code_point
