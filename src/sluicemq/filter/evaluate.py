"""The scalar engine: a tree becomes nested closures over one message's properties.

Three values: True, False and None for null. The classes of all operands are known from the tree
(`nodes.java_class`), so each comparison is compiled to the one conversion it needs; the shapes that
real filters consist of (property against a constant) have closures of their own.

Strings and numbers are exactly as Java sees them. A property is a string; RocketMQ turns it into
the class of what it is compared with by Integer.valueOf, Long.valueOf, Double.valueOf or
Boolean.valueOf (spec/filter.md §7), and the syntax those accept is not Python's: no blanks and no
underscores in whole numbers but any Unicode decimal digit of one UTF-16 unit; in floats blanks
around, `5d`, `0x1p3`, `NaN`, but ASCII digits.

An error of conversion ends the whole evaluation: it is raised, never turned into null, and only
parts that are reached can raise. The functions named `..._of` raise FilterEvaluationError with the
property's name and value, `..._or_none` are for whole columns.
"""

import operator
import re
from collections.abc import Callable, Mapping
from functools import singledispatch
from math import copysign, inf, nan
from typing import Any, TypeAlias, cast

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.nodes import (
    BLANKS,
    INTEGER_MAX,
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
from sluicemq.numbers import LONG_MAX


def has_surrogate(text: str) -> bool:
    """Does it hold half a character (possible in Java strings and in JSON, not in UTF-8)?"""
    return any("\ud800" <= character <= "\udfff" for character in text)


def utf16_units(text: str) -> str:
    """One character a UTF-16 unit: what lies above U+FFFF becomes its two surrogates."""
    data = text.encode("utf-16-be", "surrogatepass")
    return "".join(chr(data[at] << 8 | data[at + 1]) for at in range(0, len(data), 2))


_FLOAT = re.compile(
    r"""(?P<sign>[+-]?)(?:
        (?P<name>NaN|Infinity)
      | (?:(?P<hexadecimal>0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)
         | (?P<decimal>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
        )[fFdD]?
    )""",
    re.VERBOSE,
)


def integer_of(text: str, name: str) -> int:
    """Integer.valueOf: 32 bits."""
    # Hot: the plain case first. Nine digits always fit.
    if len(text) < 10 and text.isdigit() and text.isascii():
        return int(text)
    value = integer_or_none(text)
    if value is None:
        raise _not_a("whole number of 32 bits (Integer)", text, name)
    return value


def long_of(text: str, name: str) -> int:
    """Long.valueOf: 64 bits."""
    if len(text) < 19 and text.isdigit() and text.isascii():
        return int(text)
    value = long_or_none(text)
    if value is None:
        raise _not_a("whole number of 64 bits (Long)", text, name)
    return value


def double_of(text: str, name: str) -> float:
    """Double.valueOf: decimal, hexadecimal, NaN, Infinity; too large becomes Infinity."""
    value = double_or_none(text)
    if value is None:
        raise _not_a("number (Double)", text, name)
    return value


def integer_or_none(text: str) -> int | None:
    """Integer.valueOf, None where it throws."""
    value = _whole_number(text)
    return value if value is None or -INTEGER_MAX - 1 <= value <= INTEGER_MAX else None


def long_or_none(text: str) -> int | None:
    """Long.valueOf, None where it throws."""
    value = _whole_number(text)
    return value if value is None or -LONG_MAX - 1 <= value <= LONG_MAX else None


def double_or_none(text: str) -> float | None:
    """Double.valueOf, None where it throws."""
    # Hot: digits with a dot or without, which Java and Python read alike.
    if text.isascii() and text.replace(".", "", 1).isdigit():
        return float(text)
    found = _FLOAT.fullmatch(text.strip(BLANKS))
    if found is None:
        return None
    if name := found["name"]:
        size = nan if name == "NaN" else inf
    elif found["decimal"]:
        size = float(found["decimal"])
    else:
        try:
            size = float.fromhex(found["hexadecimal"])
        except OverflowError:
            size = inf
    return -size if found["sign"] == "-" else size


def boolean_of(text: str) -> bool:
    """Boolean.valueOf: "true" in any case, everything else is FALSE."""
    return text.lower() == "true"


def compare_whole_numbers(left: int, right: int) -> int:
    """Integer.compareTo, Long.compareTo."""
    return (left > right) - (left < right)


def compare_doubles(left: float, right: float) -> int:
    """Double.compareTo: NaN is the greatest and equals itself, -0.0 is below 0.0."""
    if left < right:
        return -1
    if left > right:
        return 1
    if left == right and left != 0:
        return 0
    return _rank(left) - _rank(right)


def _rank(value: float) -> int:
    """Orders what `<` and `>` cannot: -0.0, then 0.0 and all numbers, then NaN."""
    if value != value:  # noqa: PLR0124 - NaN is the one number that differs from itself
        return 2
    return 0 if value == 0 and copysign(1, value) < 0 else 1


def _whole_number(text: str) -> int | None:
    digits = text[1:] if text[:1] in ("+", "-") else text
    # isdecimal() is Java's Character.digit, but Java looks at UTF-16 units: no digit above U+FFFF.
    if not digits.isdecimal() or max(digits) > "\uffff":
        return None
    if len(digits) > 20:  # leading zeros are fine at any length; Python refuses above 4,300 digits
        if any(map(int, digits[:-20])):
            return None
        digits = digits[-20:]
    value = int(digits)
    return -value if text[0] == "-" else value


def _not_a(wanted: str, text: str, name: str) -> FilterEvaluationError:
    shown = text if len(text) <= 60 else text[:57] + "..."
    owner = f"property {name} is" if name else "the string is"
    return FilterEvaluationError(
        f"{owner} {shown!r}, which is no {wanted}.",
        reason=f"{name or 'a string'} is no {wanted}",
    )


Properties: TypeAlias = Mapping[str, str]
Verdict: TypeAlias = Callable[[Properties], bool | None]
Value: TypeAlias = Callable[[Properties], Any]  # str, int, float, bool or None

NUMBER_OR_NONE: dict[JavaClass, Callable[[str], Any]] = {
    JavaClass.INTEGER: integer_or_none,
    JavaClass.LONG: long_or_none,
    JavaClass.DOUBLE: double_or_none,
}
"""valueOf of a class of numbers, None where it throws."""
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
# A comparison whose sides are exchanged.
MIRRORED = {">": "<", ">=": "<=", "<": ">", "<=": ">=", "=": "=", "<>": "<>"}


@singledispatch
def compile_value(node: Node) -> Value:
    """The closure of any node, of a condition its verdict. It raises FilterEvaluationError when it
    is called on a value that cannot be converted."""
    raise TypeError(node)


def constant_of(node: Node) -> int | float | None:
    """The number that a node always is (a literal, negated or not); None when it is no number."""
    if isinstance(node, Negate):
        inner = constant_of(node.operand)
        return None if inner is None else -inner
    if isinstance(node, Literal) and java_class(node).is_number:
        return node.value  # type: ignore[return-value]
    return None


@compile_value.register
def _(node: Property) -> Value:
    name = node.name
    return lambda properties: properties.get(name)


@compile_value.register
def _(node: Literal) -> Value:
    value = node.value
    return lambda properties: value


@compile_value.register
def _(node: Negate) -> Value:
    constant = constant_of(node)
    if constant is not None:
        return lambda properties: constant
    operand = compile_value(node.operand)

    def null(properties: Properties) -> None:
        operand(properties)  # its errors count

    return null


@compile_value.register
def _(node: Truth) -> Verdict:
    operand = compile_value(node.operand)
    return lambda properties: None if operand(properties) is None else False


@compile_value.register
def _(node: Not) -> Verdict:
    return _negated(compile_value(node.operand))


def _negated(verdict: Verdict) -> Verdict:
    def negated(properties: Properties) -> bool | None:
        result = verdict(properties)
        return None if result is None else not result

    return negated


@compile_value.register
def _(node: And) -> Verdict:
    parts = tuple(map(compile_value, node.parts))
    left, right = parts[0], parts[-1]

    def both(properties: Properties) -> bool | None:
        first = left(properties)
        if first is False:
            return False
        second = right(properties)
        return second if first or second is False else None

    def every(properties: Properties) -> bool | None:
        result: bool | None = True
        for part in parts:
            verdict = part(properties)
            if verdict is False:
                return False
            if verdict is None:
                result = None
        return result

    return both if len(parts) == 2 else every


@compile_value.register
def _(node: Or) -> Verdict:
    parts = tuple(map(compile_value, node.parts))

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


@compile_value.register
def _(node: Equal) -> Verdict:
    left, right = node.left, node.right
    wanted = constant_of(right)
    verdict: Verdict
    if isinstance(left, Property) and isinstance(right, Literal) and isinstance(right.value, str):
        name, text = left.name, right.value

        def equal(properties: Properties) -> bool | None:
            found = properties.get(name)
            return None if found is None else found == text

        verdict = equal
    elif isinstance(left, Property) and wanted is not None:
        # Constants are never NaN or zero as floats: Python's == is Double.compareTo == 0.
        verdict = _number_test(left.name, java_class(right), lambda number: number == wanted)
    else:
        verdict = _equal_in_general(left, right)
    return _negated(verdict) if node.negated else verdict


def _number_test(name: str, wanted: JavaClass, test: Callable[[Any], bool]) -> Verdict:
    """A test of a property as a number of a class: null when absent."""
    number_of = _NUMBER_OF[wanted]

    def verdict(properties: Properties) -> bool | None:
        text = properties.get(name)
        return None if text is None else test(number_of(text, name))

    return verdict


def _equal_in_general(left_node: Node, right_node: Node) -> Verdict:
    left, right = compile_value(left_node), compile_value(right_node)
    classes = java_class(left_node), java_class(right_node)
    same: Callable[[Any, Any], bool]
    if classes in ((JavaClass.STRING,) * 2, (JavaClass.BOOLEAN,) * 2):
        same = operator.eq
    elif classes == (JavaClass.STRING, JavaClass.BOOLEAN):
        same = lambda text, flag: boolean_of(text) == flag  # noqa: E731
    elif classes == (JavaClass.BOOLEAN, JavaClass.STRING):
        same = _class_cast
    elif JavaClass.BOOLEAN in classes:
        same = lambda one, other: False  # noqa: E731 - Boolean and number: never equal
    else:
        compare = _comparison(left_node, right_node)
        same = lambda one, other: compare(one, other) == 0  # noqa: E731

    def equal(properties: Properties) -> bool | None:
        first, second = left(properties), right(properties)
        if first is None:
            return True if second is None else None
        return False if second is None else same(first, second)

    return equal


def _class_cast(flag: bool, text: str) -> bool:
    raise FilterEvaluationError(
        f"a condition on the left cannot be compared with the string {text!r}.",
        fix="Put the property on the left: a = TRUE.",
        reason="a condition stands on the left of a string",
    )


@compile_value.register
def _(node: Order) -> Verdict:
    if isinstance(node.left, Property) and constant_of(node.right) is not None:
        return _order_to_number(node.left, node.operator, node.right)
    if isinstance(node.right, Property) and constant_of(node.left) is not None:
        return _order_to_number(node.right, MIRRORED[node.operator], node.left)
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
    # A string goes to the number's class, two strings to Double, numbers to the wider class.
    classes = (JavaClass.DOUBLE, JavaClass.LONG, JavaClass.INTEGER)
    wanted = next((one for one in classes if one in (first, second)), JavaClass.DOUBLE)
    from_left = _conversion(left, first, wanted)
    from_right = _conversion(right, second, wanted)
    sign = compare_doubles if wanted is JavaClass.DOUBLE else compare_whole_numbers
    return lambda one, other: sign(from_left(one), from_right(other))


def _conversion(node: Node, have: JavaClass, wanted: JavaClass) -> Callable[[Any], Any]:
    if have is JavaClass.STRING:
        number_of, name = _NUMBER_OF[wanted], node.name if isinstance(node, Property) else ""
        return lambda text: number_of(text, name)
    return float if wanted is JavaClass.DOUBLE else int


@compile_value.register
def _(node: Between) -> Verdict:
    wanted, is_outside = java_class(node.low), node.negated
    low, high = constant_of(node.low), constant_of(node.high)
    is_plain = isinstance(node.value, Property) and java_class(node.high) is wanted
    if low is None or high is None or not is_plain:
        return compile_value(between_as_orders(node))
    name = cast("Property", node.value).name
    if is_outside:
        return _number_test(name, wanted, lambda number: number < low or not number <= high)
    return _number_test(name, wanted, lambda number: low <= number <= high)


def between_as_orders(node: Between) -> Node:
    """By its definition: each bound compares in its own class."""
    value, where = node.value, node.position
    if node.negated:
        return Or((Order("<", value, node.low, where), Order(">", value, node.high, where)))
    return And((Order(">=", value, node.low, where), Order("<=", value, node.high, where)))


@compile_value.register
def _(node: In) -> Verdict:
    name, values, negated = node.operand.name, frozenset(node.values), node.negated

    def contained(properties: Properties) -> bool | None:
        text = properties.get(name)
        return None if text is None else (text in values) is not negated

    return contained


@compile_value.register
def _(node: Match) -> Verdict:
    operand, negated = compile_value(node.operand), node.negated
    if not (search := node.search):
        return lambda properties: False
    plain = found = _SEARCHES[node.operator]
    if has_surrogate(search):  # half a character: only Java's UTF-16 view can contain it
        found = lambda text, wanted: plain(utf16_units(text), wanted)  # noqa: E731

    def match(properties: Properties) -> bool:
        text = operand(properties)
        return found(text, search) is not negated if isinstance(text, str) else False

    return match


_SEARCHES: dict[str, Callable[[str, str], bool]] = {
    "CONTAINS": operator.contains,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}


@compile_value.register
def _(node: IsNull) -> Verdict:
    operand, negated = compile_value(node.operand), node.negated
    return lambda properties: (operand(properties) is None) is not negated
