"""The parse: tokens through lark's LALR tables to nodes, up to the first that cannot continue.

RocketMQ's start rule does not ask for the end of the input: it stops at the first token that
cannot continue the expression and ignores the rest, of which only that one token has to lex
(spec/filter.md §6). So a token without an action is replaced by the end; when the end has no action
either, the token is the fault. A token that can continue a rule is taken and commits the parse:
`a = 5 AND` does not compile. What RocketMQ rejects at compile time is rejected here ("Compile-time
rejections"), but with the place and the cure.

lark makes the tables from grammar.lark: a lexer of one regular expression, and the actions of every
state. That costs 50 ms, once a process, so this module is loaded at the first SQL92 expression.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from sys import float_info, intern
from typing import Any, NamedTuple, TypeAlias, cast

from lark import Lark
from lark.parsers.lalr_analysis import Reduce

from sluicemq.filter.findings import (
    END,
    Finding,
    Rejected,
    Token,
    lexical_finding,
    name_begins_with_digit,
    parse_finding,
)
from sluicemq.filter.nodes import (
    And,
    Between,
    Equal,
    In,
    IsNull,
    Literal,
    Match,
    MatchOperator,
    Negate,
    Node,
    Not,
    Or,
    Order,
    OrderOperator,
    Property,
    Truth,
    is_boolean,
    levels,
)
from sluicemq.numbers import LONG_MAX

FLOAT_MIN = 5e-324  # Java's Double.MIN_VALUE, spelled 4.9E-324 there
FLOAT_MAX = float_info.max
_CONSTANTS = {"TRUE": True, "FALSE": False, "NULL": None}


class Builder:
    """One method for each arrow of grammar.lark; the parser calls it with the parts of the rule."""

    def whole(self, node: Node) -> Node:
        return as_boolean(node)

    def either(self, left: Node, token: Token, right: Node) -> Node:
        # One flat node for a chain: the same three-valued result, and no deep recursion.
        first = left.parts if isinstance(left, Or) else (as_boolean(left),)
        return Or((*first, as_boolean(right)), token.position)

    def both(self, left: Node, token: Token, right: Node) -> Node:
        first = left.parts if isinstance(left, And) else (as_boolean(left),)
        return And((*first, as_boolean(right)), token.position)

    def equal(self, left: Node, token: Token, right: Node) -> Node:
        for side in (left, right):
            if isinstance(side, Literal) and side.value is None:
                what = "NULL cannot be compared with = or <>."
                raise _rejected(side, "equal-null", what, "Write a IS NULL or a IS NOT NULL.")
        if (
            isinstance(left, Literal)
            and isinstance(right, Literal)
            and isinstance(left.value, bool)
            and not isinstance(right.value, bool)
        ):
            what = f"{left.text} cannot be compared with the constant {right.text}."
            fix = "TRUE and FALSE are words of the language: no property can have such a name."
            raise _rejected(left, "boolean-against-constant", what, fix)
        return Equal(left, right, token.kind == "UNEQUAL", token.position)

    def is_null(self, operand: Node, token: Token, *rest: Token) -> Node:
        return IsNull(operand, len(rest) > 1, token.position)

    def order(self, left: Node, token: Token, right: Node) -> Node:
        _check_number(left, token.text)
        _check_number(right, token.text)
        return Order(cast("OrderOperator", token.text), left, right, token.position)

    def match(self, operand: Node, *tokens: Token) -> Node:
        *negation, token, search = tokens
        operator = cast("MatchOperator", token.text.upper())
        return Match(operator, operand, _unquoted(search), bool(negation), token.position)

    def between(self, value: Node, token: Token, *rest: Any) -> Node:
        low, _, high = rest[-3:]
        negated = token.kind == "NOT"
        for node in (value, low, high):
            _check_number(node, "NOT BETWEEN" if negated else "BETWEEN")
        # Only constants are compared: a negated number is none (spec/filter.md §6).
        if not negated and isinstance(low, Literal) and isinstance(high, Literal):
            first, last = cast("float", low.value), cast("float", high.value)
            if float in (type(first), type(last)):  # Java widens a Long to Double, and rounds it
                first, last = float(first), float(last)
            if last < first:
                what = f"BETWEEN {low.text} AND {high.text}: the second bound is below the first."
                fix = f"Write BETWEEN {high.text} AND {low.text}."
                raise _rejected(high, "between-order", what, fix)
        return Between(value, low, high, negated, token.position)

    def contained(self, operand: Node, token: Token, *rest: Any) -> Node:
        if isinstance(operand, Property):
            return In(operand, tuple(rest[-2]), token.kind == "NOT", token.position)
        what, fix = "IN needs a property on its left.", "Write a IN ('x', 'y')."
        if isinstance(operand, Not):
            what = "NOT belongs to the one word after it, and IN needs a property on its left."
            fix = "Write a NOT IN ('x', 'y') or NOT (a IN ('x', 'y'))."
        raise _rejected(operand, "in-operand", what, fix)

    def first_string(self, token: Token) -> list[str]:
        return [_unquoted(token)]

    def more_strings(self, values: list[str], _comma: Token, token: Token) -> list[str]:
        values.append(_unquoted(token))
        return values

    def plus(self, _token: Token, operand: Node) -> Node:
        return operand

    def minus(self, token: Token, operand: Node) -> Node:
        return Negate(operand, token.position)

    def negation(self, token: Token, operand: Node) -> Node:
        return Not(as_boolean(operand), token.position)

    def parentheses(self, _open: Token, node: Node, _close: Token) -> Node:
        return node

    def name(self, token: Token) -> Node:
        return Property(token.text, token.position)

    def string(self, token: Token) -> Node:
        return Literal(_unquoted(token), token.position, token.text)

    def constant(self, token: Token) -> Node:
        return Literal(_CONSTANTS[token.kind], token.position, token.text)

    def whole_number(self, token: Token) -> Node:
        digits = token.text.rstrip("lL")
        if len(digits) <= len(str(LONG_MAX)) and int(digits) <= LONG_MAX:
            return Literal(int(digits), token.position, token.text)
        what = f"{token.text} does not fit in 64 bits: the largest number is {LONG_MAX}."
        fix = f"Write it as a float, {digits}.0, or compare it as a string."
        raise _rejected(Literal(0, token.position, token.text), "number-too-large", what, fix)

    def float_number(self, token: Token) -> Node:
        literal = Literal(float(token.text), token.position, token.text)
        if FLOAT_MIN <= float(token.text) <= FLOAT_MAX:
            return literal
        if float(token.text) > FLOAT_MAX:
            what, fix = f"The float {token.text} is too large.", f"The largest is {FLOAT_MAX}."
            raise _rejected(literal, "float-too-large", what, fix)
        what = f"RocketMQ refuses the float {token.text}: it must be at least 4.9e-324."
        fix = (
            "For whole numbers write 0. For floats write > 0.0 as >= 4.9e-324, "
            ">= 0.0 as > -4.9e-324, < 0.0 as <= -4.9e-324, <= 0.0 as < 4.9e-324."
        )
        raise _rejected(literal, "float-zero", what, fix)


def as_boolean(node: Node) -> Node:
    """A condition as it is, a property as `Truth`; any other value is rejected."""
    if is_boolean(node):
        return node
    if isinstance(node, Property):
        return Truth(node, node.position)
    what = f"{_shown(node)} is a value, not a condition."
    fix = "Compare it with a property, for example a = 5."
    raise _rejected(node, "not-a-condition", what, fix)


def _unquoted(token: Token) -> str:
    return token.text[1:-1].replace("''", "'")


def _check_number(node: Node, operator: str) -> None:
    """May the node stand beside an order operator? Numbers, properties and minus may."""
    if isinstance(node, Literal) and isinstance(node.value, str):
        what = f"{operator} compares numbers only, and {node.text} is a string."
        fix = "Strings can be compared with =, <>, IN, STARTSWITH, ENDSWITH and CONTAINS."
        with suppress(ValueError):
            float(node.value)
            fix = f"Write the number without quotes: {node.value}."
        raise _rejected(node, "order-string", what, fix)
    if isinstance(node, Literal) and is_boolean(node):
        what = f"{operator} compares numbers only, and {node.text} is none."
        fix = "Write a number, or use = TRUE, = FALSE, IS NULL."
        raise _rejected(node, "order-constant", what, fix)
    if isinstance(node, Not):
        what = f"NOT belongs to the one word after it, not to the comparison with {operator}."
        fix = "Put the comparison in parentheses: NOT (a > 5)."
        raise _rejected(node, "not-binds-tight", what, fix)
    if is_boolean(node):
        what = f"{operator} compares numbers only, and one side is a condition (TRUE or FALSE)."
        raise _rejected(node, "order-condition", what, "Join conditions: a > 1 AND b > 0.")


def _shown(node: Node) -> str:
    match node:
        case Property(name=name):
            return name
        case Literal(text=text):
            return text
        case Negate():
            return "-"
        case Not():
            return "NOT"
        case _:
            return ""


def _rejected(node: Node, code: str, what: str, instead: str) -> Rejected:
    return Rejected(Finding(node.position, max(1, len(_shown(node))), code, what, instead))


LINE_COMMENT = "LINE_COMMENT"


class Reduction(NamedTuple):
    """`size` parts become one of the rule `origin`; `make` is None when it is the part itself."""

    size: int
    origin: str
    make: Callable[..., Any] | None


Action: TypeAlias = int | Reduction  # the state to go to, or what to reduce first


class Tables(NamedTuple):
    """`token` matches one token, its group's name is the terminal; those in `ignored` are skipped.

    `actions[state][terminal]` says what to do, `gotos[state][rule]` where to go after a reduction.
    `token_last` is for what lies behind the last end of a line, where no comment can end: there
    each -- would be searched to the end of the text, and 64,000 of them took a minute.
    """

    token: re.Pattern[str]
    ignored: frozenset[str]
    actions: dict[int, dict[str, Action]]
    gotos: dict[int, dict[str, int]]
    start: int
    end: int
    token_last: re.Pattern[str]


@cache
def tables() -> Tables:
    lark = Lark.open_from_package(__package__, "grammar.lark", parser="lalr", lexer="basic")
    # The configuration of an idle parser is lark's public way to its tables.
    table = lark.parse_interactive("").parser_state.parse_conf
    builder = Builder()
    actions: dict[int, dict[str, Action]] = {}
    gotos: dict[int, dict[str, int]] = {}
    for state, entries in table.states.items():
        # lark's symbols are a subclass of str with a slow __eq__: plain strings look up faster.
        found: dict[str, Action] = {}
        for symbol, (kind, rule) in entries.items():
            action: Action
            if kind is Reduce:
                make = getattr(builder, rule.alias) if rule.alias else None
                action = Reduction(len(rule.expansion), intern(str(rule.origin.name)), make)
            else:
                action = int(rule)
            found[intern(str(symbol))] = action
        actions[state] = {name: action for name, action in found.items() if name.isupper()}
        gotos[state] = {name: to for name, to in found.items() if isinstance(to, int)}
    return Tables(
        token=_token_pattern(lark),
        ignored=frozenset(map(str, lark.ignore_tokens)),
        actions=actions,
        gotos=gotos,
        start=table.start_state,
        end=table.end_state,
        token_last=_token_pattern(lark, without=LINE_COMMENT),
    )


def _token_pattern(lark: Any, without: str = "") -> re.Pattern[str]:
    terminals = sorted(lark.terminals, key=lambda terminal: -terminal.priority)
    terminals = [terminal for terminal in terminals if terminal.name != without]
    return re.compile(
        "|".join(f"(?P<{each.name}>{each.pattern.to_regexp()})" for each in terminals)
    )


NESTING_MAX = 200  # keeps the recursion of every engine far below Python's 1,000 frames
LENGTH_MAX = 32_768  # characters; a parse takes some µs a token on the broker's only thread


class Parsed(NamedTuple):
    """A tree, and where the ignored rest begins (None when there is none)."""

    tree: Node
    rest: int | None


def parse(text: str) -> Parsed:
    """Text -> tree. Raises Rejected with the finding when RocketMQ would not compile it."""
    if len(text) > LENGTH_MAX:
        what = f"The expression has {len(text)} characters, the limit is {LENGTH_MAX}."
        fix = "Give the messages a property or tag that says it shorter."
        raise Rejected(Finding(LENGTH_MAX, 1, "too-long", what, fix))
    _, _, actions, gotos, start, end, _ = tables()
    states: list[int] = [start]
    values: list[Any] = []
    tokens = _tokens(text)
    refused: Token | None = None
    token = next(tokens)
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
                try:
                    values[-size:] = [make(*values[-size:])]
                except Rejected as rejected:
                    raise Rejected(name_begins_with_digit(text, rejected.finding)) from None
            del states[-size:]
            states.append(gotos[states[-1]][origin])
    tree: Node = values[-1]
    # A level costs a character at least, so a short text needs no look.
    if len(text) > NESTING_MAX and len(levels(tree)) > NESTING_MAX:
        what = f"Conditions are nested deeper than {NESTING_MAX} levels."
        fix = "Write it flatter: chains of AND and OR need no parentheses."
        raise Rejected(Finding(0, len(text), "too-deep", what, fix))
    return Parsed(tree, refused.position if refused else None)


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
