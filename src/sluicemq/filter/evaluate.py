"""The scalar engine: a tree becomes nested closures over one message's properties.

Three values: True, False and None for null. The classes of all operands are known from the tree
(`nodes.java_class`), so each comparison is compiled to the one conversion it needs; the shapes that
real filters consist of (property against a constant) have closures of their own.

An error of conversion ends the whole evaluation: it is raised, never turned into null, and only
parts that are reached can raise (spec/filter.md §7).
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.java import (
    boolean_of,
    compare_doubles,
    compare_whole_numbers,
    double_of,
    has_surrogate,
    integer_of,
    long_of,
    utf16_units,
)
from sluicemq.filter.nodes import (
    And,
    Between,
    Equal,
    In,
    IsNull,
    JavaClass,
    Literal,
    Match,
    Negate,
    Node,
    Not,
    Or,
    Order,
    Property,
    Truth,
    java_class,
)

Properties: TypeAlias = Mapping[str, str]
Verdict: TypeAlias = Callable[[Properties], bool | None]
Value: TypeAlias = Callable[[Properties], Any]  # str, int, float, bool or None

_NUMBER_OF: dict[JavaClass, Callable[[str, str], Any]] = {
    JavaClass.INTEGER: integer_of,
    JavaClass.LONG: long_of,
    JavaClass.DOUBLE: double_of,
}
# With the sign of a comparison (-1, 0, 1): does the operator hold?
_HOLDS: dict[str, Callable[[int, int], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_MIRRORED = {">": "<", ">=": "<=", "<": ">", "<=": ">="}


def compile_verdict(node: Node) -> Verdict:
    """The closure of a condition. Raises FilterEvaluationError when called on a value in it that
    cannot be converted."""
    return _COMPILERS[type(node)](node)


def compile_value(node: Node) -> Value:
    """The closure of any node."""
    return _COMPILERS[type(node)](node)


def constant_of(node: Node) -> int | float | None:
    """The number that a node always is (a literal, negated or not); None when it is no number."""
    if isinstance(node, Negate):
        inner = constant_of(node.operand)
        return None if inner is None else -inner
    if isinstance(node, Literal) and java_class(node).is_number:
        return node.value  # type: ignore[return-value]
    return None


def _property(node: Property) -> Value:
    name = node.name
    return lambda properties: properties.get(name)


def _literal(node: Literal) -> Value:
    value = node.value
    return lambda properties: value


def _negate(node: Negate) -> Value:
    constant = constant_of(node)
    if constant is not None:
        return lambda properties: constant
    operand = compile_value(node.operand)

    def null(properties: Properties) -> None:
        operand(properties)  # its errors count

    return null


def _truth(node: Truth) -> Verdict:
    operand = compile_value(node.operand)
    return lambda properties: None if operand(properties) is None else False


def _not(node: Not) -> Verdict:
    return _negated(compile_verdict(node.operand))


def _negated(verdict: Verdict) -> Verdict:
    def negated(properties: Properties) -> bool | None:
        result = verdict(properties)
        return None if result is None else not result

    return negated


def _and(node: And) -> Verdict:
    parts = tuple(map(compile_verdict, node.parts))
    if len(parts) == 2:
        return _both(*parts)

    def every(properties: Properties) -> bool | None:
        result: bool | None = True
        for part in parts:
            verdict = part(properties)
            if verdict is False:
                return False
            if verdict is None:
                result = None
        return result

    return every


def _both(left: Verdict, right: Verdict) -> Verdict:
    def both(properties: Properties) -> bool | None:
        first = left(properties)
        if first is False:
            return False
        second = right(properties)
        return second if first or second is False else None

    return both


def _or(node: Or) -> Verdict:
    parts = tuple(map(compile_verdict, node.parts))

    def some(properties: Properties) -> bool | None:
        result: bool | None = False
        for part in parts:
            verdict = part(properties)
            if verdict:
                return True
            if verdict is None:
                result = None
        return result

    return some


def _equal(node: Equal) -> Verdict:
    verdict = _equal_to_string(node) or _equal_to_number(node) or _equal_in_general(node)
    return _negated(verdict) if node.negated else verdict


def _equal_to_string(node: Equal) -> Verdict | None:
    """`property = 'text'`."""
    if not isinstance(node.left, Property) or not isinstance(node.right, Literal):
        return None
    name, wanted = node.left.name, node.right.value
    if not isinstance(wanted, str):
        return None

    def equal(properties: Properties) -> bool | None:
        text = properties.get(name)
        return None if text is None else text == wanted

    return equal


def _equal_to_number(node: Equal) -> Verdict | None:
    """`property = number`."""
    wanted = constant_of(node.right)
    if not isinstance(node.left, Property) or wanted is None:
        return None
    # Constants are never NaN or zero as floats, so Python's == is Double.compareTo == 0.
    return _number_test(node.left.name, java_class(node.right), lambda number: number == wanted)


def _number_test(name: str, wanted: JavaClass, test: Callable[[Any], bool]) -> Verdict:
    """A test of a property as a number of a class: null when absent."""
    number_of = _NUMBER_OF[wanted]

    def verdict(properties: Properties) -> bool | None:
        text = properties.get(name)
        return None if text is None else test(number_of(text, name))

    return verdict


def _equal_in_general(node: Equal) -> Verdict:
    left, right = compile_value(node.left), compile_value(node.right)
    same = _sameness(node.left, node.right)

    def equal(properties: Properties) -> bool | None:
        first, second = left(properties), right(properties)
        if first is None:
            return True if second is None else None
        return False if second is None else same(first, second)

    return equal


def _sameness(left: Node, right: Node) -> Callable[[Any, Any], bool]:
    """How two present values of these nodes' classes are equal."""
    first, second = java_class(left), java_class(right)
    if first is second and first in (JavaClass.STRING, JavaClass.BOOLEAN):
        return operator.eq
    if JavaClass.BOOLEAN in (first, second):
        return _boolean_sameness(first, second)
    compare = _comparison(left, right)
    return lambda one, other: compare(one, other) == 0


def _boolean_sameness(first: JavaClass, second: JavaClass) -> Callable[[Any, Any], bool]:
    if first is JavaClass.STRING:
        return lambda text, flag: boolean_of(text) == flag
    if second is JavaClass.STRING:
        return _class_cast
    return lambda one, other: False  # Boolean and number: never equal


def _class_cast(flag: bool, text: str) -> bool:
    raise FilterEvaluationError(
        f"a condition on the left cannot be compared with the string {text!r}.",
        cure="Put the property on the left: a = TRUE.",
        reason="a condition stands on the left of a string",
    )


def _order(node: Order) -> Verdict:
    if isinstance(node.left, Property) and constant_of(node.right) is not None:
        return _order_to_number(node.left, node.operator, node.right)
    if isinstance(node.right, Property) and constant_of(node.left) is not None:
        return _order_to_number(node.right, _MIRRORED[node.operator], node.left)
    left, right = compile_value(node.left), compile_value(node.right)
    compare, holds = _comparison(node.left, node.right), _HOLDS[node.operator]

    def order(properties: Properties) -> bool | None:
        first, second = left(properties), right(properties)
        if first is None or second is None:
            return None
        return holds(compare(first, second), 0)

    return order


def _order_to_number(subject: Property, symbol: str, bound_node: Node) -> Verdict:
    bound, wanted = constant_of(bound_node), java_class(bound_node)
    # Only NaN differs from Python: greater than every constant.
    tests: dict[str, Callable[[Any], bool]] = {
        ">": lambda number: not number <= bound,
        ">=": lambda number: not number < bound,
        "<": lambda number: number < bound,
        "<=": lambda number: number <= bound,
    }
    return _number_test(subject.name, wanted, tests[symbol])


def _comparison(left: Node, right: Node) -> Callable[[Any, Any], int]:
    """compareTo of two present values, none of them Boolean, after RocketMQ's conversions."""
    first, second = java_class(left), java_class(right)
    wanted = _common_class(first, second)
    from_left = _conversion(left, first, wanted)
    from_right = _conversion(right, second, wanted)
    sign = compare_doubles if wanted is JavaClass.DOUBLE else compare_whole_numbers
    return lambda one, other: sign(from_left(one), from_right(other))


def _common_class(first: JavaClass, second: JavaClass) -> JavaClass:
    """A string goes to the number's class, two strings to Double, numbers to the wider class."""
    pair = {first, second}
    for wanted in (JavaClass.DOUBLE, JavaClass.LONG, JavaClass.INTEGER):
        if wanted in pair:
            return wanted
    return JavaClass.DOUBLE


def _conversion(node: Node, have: JavaClass, wanted: JavaClass) -> Callable[[Any], Any]:
    if have is JavaClass.STRING:
        number_of, name = _NUMBER_OF[wanted], node.name if isinstance(node, Property) else ""
        return lambda text: number_of(text, name)
    return float if wanted is JavaClass.DOUBLE else int


def _between(node: Between) -> Verdict:
    wanted = java_class(node.low)
    low, high = constant_of(node.low), constant_of(node.high)
    if low is None or high is None or java_class(node.high) is not wanted:
        return _between_in_general(node)
    if not isinstance(node.value, Property):
        return _between_in_general(node)
    return _number_test(node.value.name, wanted, _range_test(low, high, node.negated))


def _range_test(low: float, high: float, negated: bool) -> Callable[[Any], bool]:
    if negated:
        return lambda number: number < low or not number <= high
    return lambda number: low <= number <= high


def _between_in_general(node: Between) -> Verdict:
    """By its definition: each bound compares in its own class."""
    value, low, high, where = node.value, node.low, node.high, node.position
    if node.negated:
        return _or(Or((Order("<", value, low, where), Order(">", value, high, where))))
    return _and(And((Order(">=", value, low, where), Order("<=", value, high, where))))


def _in(node: In) -> Verdict:
    name, values, negated = node.operand.name, frozenset(node.values), node.negated

    def contained(properties: Properties) -> bool | None:
        text = properties.get(name)
        return None if text is None else (text in values) is not negated

    return contained


def _match(node: Match) -> Verdict:
    operand = compile_value(node.operand)
    if not node.search:
        return lambda properties: False
    found, negated = _search(node.operator, node.search), node.negated

    def match(properties: Properties) -> bool:
        text = operand(properties)
        return found(text) is not negated if isinstance(text, str) else False

    return match


def _search(symbol: str, search: str) -> Callable[[str], bool]:
    if has_surrogate(search):  # half a character: only Java's UTF-16 view can contain it
        plain = _SEARCHES[symbol]
        return lambda text: plain(utf16_units(text), search)
    compare = _SEARCHES[symbol]
    return lambda text: compare(text, search)


_SEARCHES: dict[str, Callable[[str, str], bool]] = {
    "CONTAINS": operator.contains,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}


def _is_null(node: IsNull) -> Verdict:
    operand, negated = compile_value(node.operand), node.negated
    return lambda properties: (operand(properties) is None) is not negated


_COMPILERS: dict[type, Callable[[Any], Value]] = {
    Property: _property,
    Literal: _literal,
    Negate: _negate,
    Truth: _truth,
    Not: _not,
    And: _and,
    Or: _or,
    Equal: _equal,
    Order: _order,
    Between: _between,
    In: _in,
    Match: _match,
    IsNull: _is_null,
}
