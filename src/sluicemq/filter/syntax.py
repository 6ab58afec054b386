"""The parse: tokens through lark's LALR tables, up to the first that cannot continue.

RocketMQ's start rule does not ask for the end of the input: it stops at the first token that
cannot continue the expression and ignores the rest, of which only that one token has to lex
(spec/filter.md §6). So a token without an action is replaced by the end; when the end has no action
either, the token is the fault. A token that can continue a rule is taken and commits the parse:
`a = 5 AND` does not compile.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from sluicemq.filter.diagnose import lexical_finding, name_begins_with_digit, parse_finding
from sluicemq.filter.findings import END, Finding, Rejected, Token
from sluicemq.filter.nodes import Node, levels
from sluicemq.filter.tables import Tables, make_tables

NESTING_MAX = 200  # keeps the recursion of every engine far below Python's 1,000 frames
LENGTH_MAX = 32_768  # characters; a parse takes some µs a token on the broker's only thread


class Parsed(NamedTuple):
    """A tree, and where the ignored rest begins (None when there is none)."""

    tree: Node
    rest: int | None


@cache
def tables() -> Tables:
    return make_tables()


def parse(text: str) -> Parsed:
    """Text -> tree. Raises Rejected with the finding when RocketMQ would not compile it."""
    if len(text) > LENGTH_MAX:
        raise Rejected(_too_long(text))
    try:
        parsed = _longest_prefix(text)
    except Rejected as rejected:
        raise Rejected(name_begins_with_digit(text, rejected.finding)) from None
    # A level costs a character at least, so a short text needs no look.
    if len(text) > NESTING_MAX and len(levels(parsed.tree)) > NESTING_MAX:
        raise Rejected(_too_deep(text))
    return parsed


def _longest_prefix(text: str) -> Parsed:
    _, _, actions, gotos, start, end, _ = tables()
    states: list[int] = [start]
    values: list[Any] = []
    tokens = _tokens(text)
    token = next(tokens)
    refused: Token | None = None
    while states[-1] != end:
        action = actions[states[-1]].get(END if refused else token.kind)
        if action is None:
            if refused or token.kind == END:
                raise Rejected(parse_finding(text, token, frozenset(actions[states[-1]])))
            refused = token
        elif isinstance(action, int):
            states.append(action)
            values.append(token)
            token = next(tokens)
        else:
            size, origin, make = action
            if make:
                values[-size:] = [make(*values[-size:])]
            del states[-size:]
            states.append(gotos[states[-1]][origin])
    return Parsed(values[-1], refused.position if refused else None)


def _tokens(text: str) -> Iterator[Token]:
    """The tokens, then the end for ever. Raises Rejected when it gets to what does not lex."""
    pattern, ignored, *_, pattern_last = tables()
    lines_end = max(text.rfind("\n"), text.rfind("\r")) + 1
    position = 0
    for each, is_over in ((pattern, lines_end), (pattern_last, len(text))):
        for found in each.finditer(text, position) if position < is_over else ():
            if found.start() != position:
                break
            position = found.end()
            if found.lastgroup not in ignored:
                yield Token(str(found.lastgroup), found[0], found.start())
            if position >= is_over:
                break
    if position < len(text):
        raise Rejected(lexical_finding(text, position))
    while True:
        yield Token(END, "", len(text))


def _too_long(text: str) -> Finding:
    return Finding(
        LENGTH_MAX, 1, "too-long",
        f"The expression has {len(text)} characters, the limit is {LENGTH_MAX}.",
        "Give the messages a property or tag that says it shorter.",
    )  # fmt: skip


def _too_deep(text: str) -> Finding:
    return Finding(
        0, len(text), "too-deep",
        f"Conditions are nested deeper than {NESTING_MAX} levels.",
        "Write it flatter: chains of AND and OR need no parentheses.",
    )  # fmt: skip
