"""From the parser's reductions to nodes, with RocketMQ's compile-time rejections.

What compiles in RocketMQ compiles here and what it rejects is rejected (spec/filter.md §6
"Compile-time rejections"), but with the place and the cure.
"""

from sys import float_info
from typing import cast

from sluicemq.filter.findings import Finding, Rejected, Token
from sluicemq.filter.nodes import (
    LONG_MAX,
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
)

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
        _check_equal(left, right)
        return Equal(left, right, token.kind == "UNEQUAL", token.position)

    def is_null(self, operand: Node, token: Token, _null: Token) -> Node:
        return IsNull(operand, negated=False, position=token.position)

    def is_not_null(self, operand: Node, token: Token, _not: Token, _null: Token) -> Node:
        return IsNull(operand, negated=True, position=token.position)

    def order(self, left: Node, token: Token, right: Node) -> Node:
        _check_number(left, token.text)
        _check_number(right, token.text)
        return Order(cast("OrderOperator", token.text), left, right, token.position)

    def match(self, operand: Node, token: Token, search: Token) -> Node:
        return _match(operand, token, search, negated=False)

    def not_match(self, operand: Node, _not: Token, token: Token, search: Token) -> Node:
        return _match(operand, token, search, negated=True)

    def between(self, value: Node, token: Token, low: Node, _and: Token, high: Node) -> Node:
        for node in (value, low, high):
            _check_number(node, "BETWEEN")
        _check_range(low, high)
        return Between(value, low, high, negated=False, position=token.position)

    def not_between(
        self, value: Node, token: Token, _between: Token, low: Node, _and: Token, high: Node
    ) -> Node:
        for node in (value, low, high):
            _check_number(node, "NOT BETWEEN")
        return Between(value, low, high, negated=True, position=token.position)

    def contained(
        self, operand: Node, token: Token, _open: Token, values: list[str], _close: Token
    ) -> Node:
        return _contained(operand, token, values, negated=False)

    def not_contained(
        self, operand: Node, token: Token, _in: Token, _open: Token, values: list[str],
        _close: Token,
    ) -> Node:  # fmt: skip
        return _contained(operand, token, values, negated=True)

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
        cure = f"Write it as a float, {digits}.0, or compare it as a string."
        raise _rejected(Literal(0, token.position, token.text), "number-too-large", what, cure)

    def float_number(self, token: Token) -> Node:
        literal = Literal(float(token.text), token.position, token.text)
        if FLOAT_MIN <= float(token.text) <= FLOAT_MAX:
            return literal
        if float(token.text) > FLOAT_MAX:
            what, cure = f"The float {token.text} is too large.", f"The largest is {FLOAT_MAX}."
            raise _rejected(literal, "float-too-large", what, cure)
        what = f"RocketMQ refuses the float {token.text}: it must be at least 4.9e-324."
        cure = (
            "For whole numbers write 0. For floats write > 0.0 as >= 4.9e-324, "
            ">= 0.0 as > -4.9e-324, < 0.0 as <= -4.9e-324, <= 0.0 as < 4.9e-324."
        )
        raise _rejected(literal, "float-zero", what, cure)


def as_boolean(node: Node) -> Node:
    """A condition as it is, a property as `Truth`; any other value is rejected."""
    if is_boolean(node):
        return node
    if isinstance(node, Property):
        return Truth(node, node.position)
    what = f"{_shown(node)} is a value, not a condition."
    cure = "Compare it with a property, for example a = 5."
    raise _rejected(node, "not-a-condition", what, cure)


def _match(operand: Node, token: Token, search: Token, *, negated: bool) -> Node:
    operator = cast("MatchOperator", token.text.upper())
    return Match(operator, operand, _unquoted(search), negated, token.position)


def _contained(operand: Node, token: Token, values: list[str], *, negated: bool) -> Node:
    if isinstance(operand, Property):
        return In(operand, tuple(values), negated, token.position)
    what, cure = "IN needs a property on its left.", "Write a IN ('x', 'y')."
    if isinstance(operand, Not):
        what = "NOT belongs to the one word after it, and IN needs a property on its left."
        cure = "Write a NOT IN ('x', 'y') or NOT (a IN ('x', 'y'))."
    raise _rejected(operand, "in-operand", what, cure)


def _unquoted(token: Token) -> str:
    return token.text[1:-1].replace("''", "'")


def _check_equal(left: Node, right: Node) -> None:
    for side in (left, right):
        if isinstance(side, Literal) and side.value is None:
            what = "NULL cannot be compared with = or <>."
            raise _rejected(side, "equal-null", what, "Write a IS NULL or a IS NOT NULL.")
    if not isinstance(left, Literal) or not isinstance(right, Literal):
        return
    if isinstance(left.value, bool) and not isinstance(right.value, bool):
        what = f"{left.text} cannot be compared with the constant {right.text}."
        cure = "TRUE and FALSE are words of the language: no property can have such a name."
        raise _rejected(left, "boolean-against-constant", what, cure)


def _check_number(node: Node, operator: str) -> None:
    """May the node stand beside an order operator? Numbers, properties and minus may."""
    if isinstance(node, Literal) and isinstance(node.value, str):
        what = f"{operator} compares numbers only, and {node.text} is a string."
        raise _rejected(node, "order-string", what, _number_cure(node.value))
    if isinstance(node, Literal) and is_boolean(node):
        what = f"{operator} compares numbers only, and {node.text} is none."
        cure = "Write a number, or use = TRUE, = FALSE, IS NULL."
        raise _rejected(node, "order-constant", what, cure)
    if isinstance(node, Not):
        what = f"NOT belongs to the one word after it, not to the comparison with {operator}."
        cure = "Put the comparison in parentheses: NOT (a > 5)."
        raise _rejected(node, "not-binds-tight", what, cure)
    if is_boolean(node):
        what = f"{operator} compares numbers only, and one side is a condition (TRUE or FALSE)."
        raise _rejected(node, "order-condition", what, "Join conditions: a > 1 AND b > 0.")


def _number_cure(value: str) -> str:
    try:
        float(value)
    except ValueError:
        return "Strings can be compared with =, <>, IN, STARTSWITH, ENDSWITH and CONTAINS."
    return f"Write the number without quotes: {value}."


def _check_range(low: Node, high: Node) -> None:
    # Only constants are compared: a negated number is none (spec/filter.md §6).
    if not isinstance(low, Literal) or not isinstance(high, Literal):
        return
    first, last = cast("float", low.value), cast("float", high.value)
    if float in (type(first), type(last)):  # Java widens a Long to Double, which rounds it
        first, last = float(first), float(last)
    if last < first:
        what = f"BETWEEN {low.text} AND {high.text}: the second bound is below the first."
        cure = f"Write BETWEEN {high.text} AND {low.text}."
        raise _rejected(high, "between-order", what, cure)


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
