"""The scalar engine of SQL92: it compiles a tree to closures that evaluate one message.

A condition evaluates to True, False or None, which stands for null. The Java classes of all
operands are known from the tree (`nodes.java_class`), so each comparison is compiled to the one
conversion that it needs. A property that is compared with a constant, the usual form of a filter,
has specialised closures.

Strings and numbers behave exactly as in Java. RocketMQ converts a property, which is a string, to
the class of the other operand by Integer.valueOf, Long.valueOf, Double.valueOf or Boolean.valueOf
(spec/filter.md §7). Their syntax differs from Python's. Whole numbers may contain any Unicode
decimal digit of one UTF-16 unit, but no spaces and no underscores. Floats may have spaces around
them and may be written `5d`, `0x1p3` or `NaN`, but only with ASCII digits.

A value that cannot be converted ends the whole evaluation with FilterEvaluationError; it never
becomes null. Only operands that are reached can raise it. The functions `parse_…` raise the error
with the property's name and value. The functions `try_parse_…` return None instead; the block
engine uses them.
"""

import operator
import re
from collections.abc import Callable, Mapping
from functools import singledispatch
from math import copysign, inf, nan
from typing import Any, NoReturn, TypeAlias

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.nodes import (
    INTEGER_MAX,
    JAVA_TRIM_CHARACTERS,
    And,
    BareProperty,
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
    java_class,
)
from sluicemq.numbers import LONG_MAX


def has_surrogate(text: str) -> bool:
    """Return whether a text contains a surrogate: one half of a character above U+FFFF.

    Java strings and JSON can contain a single surrogate, UTF-8 cannot.
    """
    return any("\ud800" <= character <= "\udfff" for character in text)


def to_utf16_units(text: str) -> str:
    """Return a text with one character for each UTF-16 unit.

    A character above U+FFFF becomes its two surrogates.
    """
    encoded = text.encode("utf-16-be", "surrogatepass")  # two bytes for each unit
    units = (encoded[i] << 8 | encoded[i + 1] for i in range(0, len(encoded), 2))
    return "".join(map(chr, units))


# What Double.valueOf accepts, without the spaces around it.
_FLOAT = re.compile(
    r"""(?P<sign>[+-]?)(?:
        (?P<name>NaN|Infinity)
      | (?:(?P<hexadecimal>0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)
         | (?P<decimal>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
        )[fFdD]?
    )""",
    re.VERBOSE,
)


def parse_integer(text: str, name: str) -> int:
    """Return a text as a whole number of 32 bits, as Java's Integer.valueOf.

    `name` is the property that has the value, "" if the value is a literal. Raises
    FilterEvaluationError if the text is not such a number.
    """
    # This is called for every message, so the plain case comes first. Nine digits always fit.
    if len(text) < 10 and text.isdigit() and text.isascii():
        return int(text)
    number = try_parse_integer(text)
    if number is None:
        raise _make_conversion_error("whole number of 32 bits (Integer)", text, name)
    return number


def parse_long(text: str, name: str) -> int:
    """Return a text as a whole number of 64 bits, as Java's Long.valueOf.

    `name` is the property that has the value, "" if the value is a literal. Raises
    FilterEvaluationError if the text is not such a number.
    """
    # This is called for every message, so the plain case comes first. 18 digits always fit.
    if len(text) < 19 and text.isdigit() and text.isascii():
        return int(text)
    number = try_parse_long(text)
    if number is None:
        raise _make_conversion_error("whole number of 64 bits (Long)", text, name)
    return number


def parse_double(text: str, name: str) -> float:
    """Return a text as a float, as Java's Double.valueOf.

    The text may be decimal or hexadecimal, NaN or Infinity. A number that is too large becomes
    Infinity. `name` is the property that has the value, "" if the value is a literal. Raises
    FilterEvaluationError if the text is not a number.
    """
    number = try_parse_double(text)
    if number is None:
        raise _make_conversion_error("number (Double)", text, name)
    return number


def try_parse_integer(text: str) -> int | None:
    """Return a text as a whole number of 32 bits, as Java's Integer.valueOf reads it.

    Return None if the text is not such a number.
    """
    number = _parse_whole_number(text)
    if number is None or not -INTEGER_MAX - 1 <= number <= INTEGER_MAX:
        return None
    return number


def try_parse_long(text: str) -> int | None:
    """Return a text as a whole number of 64 bits, as Java's Long.valueOf reads it.

    Return None if the text is not such a number.
    """
    number = _parse_whole_number(text)
    if number is None or not -LONG_MAX - 1 <= number <= LONG_MAX:
        return None
    return number


def try_parse_double(text: str) -> float | None:
    """Return a text as a float, as Java's Double.valueOf reads it.

    Return None if the text is not a number.
    """
    # This is called for every message, so the plain case comes first: Java and Python read ASCII
    # digits with or without a dot alike.
    if text.isascii() and text.replace(".", "", 1).isdigit():
        return float(text)
    groups = _FLOAT.fullmatch(text.strip(JAVA_TRIM_CHARACTERS))
    if groups is None:
        return None
    if groups["name"]:
        magnitude = nan if groups["name"] == "NaN" else inf
    elif groups["decimal"]:
        magnitude = float(groups["decimal"])
    else:
        try:
            magnitude = float.fromhex(groups["hexadecimal"])
        except OverflowError:
            magnitude = inf
    return -magnitude if groups["sign"] == "-" else magnitude


def parse_boolean(text: str) -> bool:
    """Return whether a text is "true" in any case, as Java's Boolean.valueOf."""
    return text.lower() == "true"


def compare_whole_numbers(left: int, right: int) -> int:
    """Return -1, 0 or 1 for less, equal or greater, as Java's Integer.compareTo."""
    return (left > right) - (left < right)


def compare_doubles(left: float, right: float) -> int:
    """Compare two floats as Double.compareTo of Java.

    Return a number below 0 if `left` is less, 0 if they are equal, and above 0 if `left` is
    greater. NaN equals itself and is greater than every other number. -0.0 is less than 0.0.
    """
    if left < right:
        return -1
    if left > right:
        return 1
    if left == right and left != 0:
        return 0
    return _rank_in_java_order(left) - _rank_in_java_order(right)


def _rank_in_java_order(number: float) -> int:
    """Return 0 for -0.0, 1 for other numbers, 2 for NaN.

    This is the order of Double.compareTo among numbers that Python's `<` and `>` do not order.
    """
    if number != number:  # noqa: PLR0124 - NaN is the one number that differs from itself
        return 2
    is_negative_zero = number == 0 and copysign(1, number) < 0
    return 0 if is_negative_zero else 1


def _parse_whole_number(text: str) -> int | None:
    """Return the whole number that a text contains, as Java's valueOf reads it.

    Return None if the text is not a whole number, or if the number has more than 20 digits without
    leading zeros, because it then does not fit into 64 bits.
    """
    digits = text[1:] if text[:1] in ("+", "-") else text
    # isdecimal() accepts what Character.digit of Java accepts. But Java examines UTF-16 units, so
    # it accepts no digit above U+FFFF.
    if not digits.isdecimal() or max(digits) > "\uffff":
        return None
    # Java accepts any number of leading zeros. Python's int() refuses more than 4,300 digits.
    if len(digits) > 20:
        is_too_large = any(map(int, digits[:-20]))
        if is_too_large:
            return None
        digits = digits[-20:]
    magnitude = int(digits)
    return -magnitude if text[0] == "-" else magnitude


def _make_conversion_error(wanted_class: str, text: str, name: str) -> FilterEvaluationError:
    """Return the error for a text that is not a `wanted_class`, such as "number (Double)".

    `name` is the property that has the text as its value, "" if the text is a literal.
    """
    shown_text = text if len(text) <= 60 else text[:57] + "..."
    owner = f"property {name} is" if name else "the string is"
    return FilterEvaluationError(
        f"{owner} {shown_text!r}, which is not a {wanted_class}.",
        reason=f"{name or 'a string'} is not a {wanted_class}",
    )


Properties: TypeAlias = Mapping[str, str]
ConditionFunction: TypeAlias = Callable[[Properties], bool | None]
"""A compiled condition: returns True, False or None (null), or raises FilterEvaluationError."""
ValueFunction: TypeAlias = Callable[[Properties], Any]
"""A compiled node: returns a str, int, float, bool or None, or raises FilterEvaluationError."""

TRY_PARSE_NUMBER: dict[JavaClass, Callable[[str], Any]] = {
    JavaClass.INTEGER: try_parse_integer,
    JavaClass.LONG: try_parse_long,
    JavaClass.DOUBLE: try_parse_double,
}
"""For each class of numbers, the function that converts a text, or returns None."""
_PARSE_NUMBER: dict[JavaClass, Callable[[str, str], Any]] = {
    JavaClass.INTEGER: parse_integer,
    JavaClass.LONG: parse_long,
    JavaClass.DOUBLE: parse_double,
}
# For each operator, the test of a comparison's sign (-1, 0 or 1) against 0.
_SIGN_TESTS: dict[str, Callable[[int, int], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
MIRRORED_OPERATORS = {">": "<", ">=": "<=", "<": ">", "<=": ">=", "=": "=", "<>": "<>"}
"""For each operator, the operator with the same meaning when its operands are exchanged."""


@singledispatch
def compile_node(node: Node) -> ValueFunction:
    """Return a function that takes the properties of a message and returns the value of a node.

    For a condition it is a `ConditionFunction`. The function raises FilterEvaluationError if it
    reaches a value that cannot be converted.
    """
    raise TypeError(node)


def constant_number(node: Node) -> int | float | None:
    """Return the value of a literal number, with its minus sign if it has one.

    Return None for every other node.
    """
    if isinstance(node, Negate):
        inner = constant_number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, Literal) and java_class(node).is_number:
        return node.value  # type: ignore[return-value]
    return None


@compile_node.register
def _compile_property(node: Property) -> ValueFunction:
    """Return a function that returns the value of a property, or None."""
    name = node.name
    return lambda properties: properties.get(name)


@compile_node.register
def _compile_literal(node: Literal) -> ValueFunction:
    """Return a function that returns a constant."""
    constant = node.value
    return lambda properties: constant


@compile_node.register
def _compile_minus(node: Negate) -> ValueFunction:
    """Return a function that evaluates a minus.

    Before a literal number, it returns the negative number. Before any other operand, it returns
    null.
    """
    constant = constant_number(node)
    if constant is not None:
        return lambda properties: constant
    operand = compile_node(node.operand)

    def evaluate_to_null(properties: Properties) -> None:
        operand(properties)  # an error of the operand is an error of the node

    return evaluate_to_null


@compile_node.register
def _compile_bare_property(node: BareProperty) -> ConditionFunction:
    """Return the condition of a property without a comparison: FALSE if it exists, else null."""
    operand = compile_node(node.operand)
    return lambda properties: None if operand(properties) is None else False


@compile_node.register
def _compile_not(node: Not) -> ConditionFunction:
    """Return the condition NOT `operand`."""
    return _negate(compile_node(node.operand))


def _negate(condition: ConditionFunction) -> ConditionFunction:
    """Return a function that evaluates NOT `condition`. NOT of null is null."""

    def negated(properties: Properties) -> bool | None:
        verdict = condition(properties)
        return None if verdict is None else not verdict

    return negated


@compile_node.register
def _compile_and(node: And) -> ConditionFunction:
    """Return a function that evaluates an AND. It evaluates the parts in order, until one is FALSE.

    The result is null if a part is null and none is FALSE.
    """
    conditions = tuple(map(compile_node, node.parts))
    first_condition = conditions[0]
    last_condition = conditions[-1]

    def both(properties: Properties) -> bool | None:
        """Return the verdict of an AND of two conditions, without a loop.

        FALSE if one of them is FALSE; otherwise null (None) if one is null, else TRUE.
        """
        first_verdict = first_condition(properties)
        if first_verdict is False:
            return False
        last_verdict = last_condition(properties)
        return last_verdict if first_verdict or last_verdict is False else None

    def every(properties: Properties) -> bool | None:
        """Return the verdict of an AND of several conditions.

        FALSE at the first FALSE; otherwise null (None) if one is null, else TRUE.
        """
        joined_verdict: bool | None = True
        for condition in conditions:
            verdict = condition(properties)
            if verdict is False:
                return False
            if verdict is None:
                joined_verdict = None
        return joined_verdict

    return both if len(conditions) == 2 else every


@compile_node.register
def _compile_or(node: Or) -> ConditionFunction:
    """Return a function that evaluates an OR. It evaluates the parts in order, until one is TRUE.

    The result is null if a part is null and none is TRUE.
    """
    conditions = tuple(map(compile_node, node.parts))

    def some(properties: Properties) -> bool | None:
        """Return True if a condition is True; otherwise None if one is None (null), else False."""
        joined_verdict: bool | None = False
        for condition in conditions:
            verdict = condition(properties)
            if verdict:
                return True
            if verdict is None:
                joined_verdict = None
        return joined_verdict

    return some


@compile_node.register
def _compile_equal(node: Equal) -> ConditionFunction:
    """Return a function that evaluates `=` or `<>`.

    A property and a constant are compared in a faster way than other operands.
    """
    left = node.left
    right = node.right
    number = constant_number(right)
    condition: ConditionFunction
    if isinstance(left, Property) and isinstance(right, Literal) and isinstance(right.value, str):
        condition = _compile_string_equality(left.name, right.value)
    elif isinstance(left, Property) and number is not None:
        # A constant is never NaN and never 0.0, so == of Python agrees with Double.compareTo.
        condition = _compile_number_test(
            left.name, java_class(right), lambda value: value == number
        )
    else:
        condition = _compile_general_equality(left, right)
    return _negate(condition) if node.negated else condition


def _compile_string_equality(name: str, string: str) -> ConditionFunction:
    """Return a function that compares property `name` with `string`; null without the property."""

    def equal(properties: Properties) -> bool | None:
        value = properties.get(name)
        return None if value is None else value == string

    return equal


def _compile_number_test(
    name: str, number_class: JavaClass, test: Callable[[Any], bool]
) -> ConditionFunction:
    """Return a condition that tests a property as a number of class `number_class`.

    The condition is null if the message does not have the property.
    """
    parse_number = _PARSE_NUMBER[number_class]

    def condition(properties: Properties) -> bool | None:
        value = properties.get(name)
        return None if value is None else test(parse_number(value, name))

    return condition


def _compile_general_equality(left_node: Node, right_node: Node) -> ConditionFunction:
    """Return the condition `left = right` for operands of any classes.

    As in RocketMQ, the condition is TRUE if both operands are null, null if only the left one is
    null, and FALSE if only the right one is null.
    """
    evaluate_left = compile_node(left_node)
    evaluate_right = compile_node(right_node)
    are_equal = _choose_equality_test(left_node, right_node)

    def equal(properties: Properties) -> bool | None:
        """Return the verdict for one message, with the rules for null."""
        left_value = evaluate_left(properties)
        right_value = evaluate_right(properties)
        if left_value is None:
            return True if right_value is None else None
        return False if right_value is None else are_equal(left_value, right_value)

    return equal


def _choose_equality_test(left: Node, right: Node) -> Callable[[Any, Any], bool]:
    """Return a function that says whether a value of `left` equals a value of `right`.

    The function takes two values that are not null. How it compares them depends on the Java
    classes of the operands. It raises FilterEvaluationError if a value cannot be converted, or if
    the left operand is Boolean and the right one a string.
    """
    classes = (java_class(left), java_class(right))
    if classes == (JavaClass.STRING, JavaClass.STRING):
        return operator.eq
    if classes == (JavaClass.BOOLEAN, JavaClass.BOOLEAN):
        return operator.eq
    if classes == (JavaClass.STRING, JavaClass.BOOLEAN):
        return lambda string, flag: parse_boolean(string) == flag
    if classes == (JavaClass.BOOLEAN, JavaClass.STRING):
        return _raise_class_cast
    if JavaClass.BOOLEAN in classes:
        return lambda _left_value, _right_value: False  # a Boolean never equals a number
    compare = _comparison(left, right)
    return lambda left_value, right_value: compare(left_value, right_value) == 0


def _raise_class_cast(_flag: bool, string: str) -> NoReturn:
    """Raise FilterEvaluationError, because a Boolean was compared with `string` on its right.

    RocketMQ fails with a ClassCastException there. The value of the Boolean, `_flag`, is ignored.
    """
    raise FilterEvaluationError(
        f"a condition on the left cannot be compared with the string {string!r}.",
        fix="Put the property on the left: a = TRUE.",
        reason="a condition is on the left of a string",
    )


@compile_node.register
def _compile_order(node: Order) -> ConditionFunction:
    """Return a function that evaluates `<`, `<=`, `>` or `>=`; null if an operand is null."""
    if isinstance(node.left, Property) and constant_number(node.right) is not None:
        return _compile_order_to_number(node.left, node.operator, node.right)
    if isinstance(node.right, Property) and constant_number(node.left) is not None:
        return _compile_order_to_number(node.right, MIRRORED_OPERATORS[node.operator], node.left)
    evaluate_left = compile_node(node.left)
    evaluate_right = compile_node(node.right)
    compare = _comparison(node.left, node.right)
    is_true = _SIGN_TESTS[node.operator]

    def order(properties: Properties) -> bool | None:
        """Return whether the comparison holds for these properties; None if a side is null."""
        left_value = evaluate_left(properties)
        right_value = evaluate_right(properties)
        if left_value is None or right_value is None:
            return None
        return is_true(compare(left_value, right_value), 0)

    return order


def _compile_order_to_number(subject: Property, symbol: str, bound_node: Node) -> ConditionFunction:
    """Return the condition `subject symbol bound`, which compares a property with a number.

    `symbol` is `<`, `<=`, `>` or `>=`. The property is converted to the class of the number.
    """
    bound = constant_number(bound_node)
    number_class = java_class(bound_node)
    # Java differs from Python only for NaN, which is greater than every constant.
    tests: dict[str, Callable[[Any], bool]] = {
        ">": lambda number: not number <= bound,
        ">=": lambda number: not number < bound,
        "<": lambda number: number < bound,
        "<=": lambda number: number <= bound,
    }
    return _compile_number_test(subject.name, number_class, tests[symbol])


def _comparison(left: Node, right: Node) -> Callable[[Any, Any], int]:
    """Return a function that compares a value of `left` with a value of `right`.

    The function converts both values as RocketMQ does, and returns a number below, equal to or
    above 0, as Java's compareTo. The values must not be null or Boolean.
    """
    left_class = java_class(left)
    right_class = java_class(right)
    common_class = _choose_number_class(left_class, right_class)
    convert_left = _choose_conversion(left, left_class, common_class)
    convert_right = _choose_conversion(right, right_class, common_class)
    compare = compare_doubles if common_class is JavaClass.DOUBLE else compare_whole_numbers
    return lambda left, right: compare(convert_left(left), convert_right(right))


def _choose_number_class(left_class: JavaClass, right_class: JavaClass) -> JavaClass:
    """Return the class of numbers to which both operands of a comparison are converted.

    A string is converted to the class of the number, two strings to Double, and two numbers to the
    wider class.
    """
    for number_class in (JavaClass.DOUBLE, JavaClass.LONG, JavaClass.INTEGER):  # widest first
        if number_class in (left_class, right_class):
            return number_class
    return JavaClass.DOUBLE


def _choose_conversion(node: Node, source: JavaClass, target: JavaClass) -> Callable[[Any], Any]:
    """Return the function that converts a value of `node` from class `source` to class `target`.

    `target` is a class of numbers. The function raises FilterEvaluationError for a string that is
    not a number of this class.
    """
    if source is JavaClass.STRING:
        parse_number = _PARSE_NUMBER[target]
        property_name = node.name if isinstance(node, Property) else ""
        return lambda string: parse_number(string, property_name)
    return float if target is JavaClass.DOUBLE else int


@compile_node.register
def _compile_between(node: Between) -> ConditionFunction:
    """Return the condition of a BETWEEN or NOT BETWEEN.

    A property between two constants of one class is converted once. Any other BETWEEN is evaluated
    as two comparisons.
    """
    number_class = java_class(node.low)
    low = constant_number(node.low)
    high = constant_number(node.high)
    have_same_class = java_class(node.high) is number_class
    if not isinstance(node.value, Property) or low is None or high is None or not have_same_class:
        return compile_node(expand_between(node))

    # Java differs from Python only for NaN, which is greater than every constant.
    def is_inside(number: float) -> bool:
        return low <= number <= high

    def is_outside(number: float) -> bool:
        return number < low or not number <= high

    return _compile_number_test(
        node.value.name, number_class, is_outside if node.negated else is_inside
    )


def expand_between(node: Between) -> Node:
    """Return the two comparisons that a BETWEEN stands for.

    `a BETWEEN 1 AND 5` becomes `a >= 1 AND a <= 5`, and `a NOT BETWEEN 1 AND 5` becomes `a < 1 OR a
    > 5`. Each comparison converts the value to the class of its own bound.
    """
    operand = node.value
    position = node.position
    if node.negated:
        is_below = Order("<", operand, node.low, position)
        is_above = Order(">", operand, node.high, position)
        return Or((is_below, is_above))
    reaches_low = Order(">=", operand, node.low, position)
    reaches_high = Order("<=", operand, node.high, position)
    return And((reaches_low, reaches_high))


@compile_node.register
def _compile_in(node: In) -> ConditionFunction:
    """Return a function that evaluates IN or NOT IN; null if the message has no such property."""
    name = node.operand.name
    listed_strings = frozenset(node.values)
    negated = node.negated

    def contained(properties: Properties) -> bool | None:
        value = properties.get(name)
        return None if value is None else (value in listed_strings) is not negated

    return contained


@compile_node.register
def _compile_match(node: Match) -> ConditionFunction:
    """Return the condition of CONTAINS, STARTSWITH or ENDSWITH, negated or not.

    The condition is FALSE if the value is not a string or the searched string is empty. As in
    RocketMQ, it is then FALSE with NOT too.
    """
    operand = compile_node(node.operand)
    negated = node.negated
    search = node.search
    if not search:
        return lambda properties: False
    is_found = _SEARCHES[node.operator]
    # Java compares UTF-16 units, and only they can contain half of a character.
    if has_surrogate(search):
        is_found = _search_in_utf16_units(is_found)

    def match(properties: Properties) -> bool:
        """Return whether the operand is a string that fits the search; reversed if `negated`.

        A value that is not a string, or null, is always False, even with `negated`.
        """
        value = operand(properties)
        if not isinstance(value, str):
            return False
        return is_found(value, search) is not negated

    return match


def _search_in_utf16_units(is_found: Callable[[str, str], bool]) -> Callable[[str, str], bool]:
    """Return a search in the UTF-16 units of a text instead of its characters."""
    return lambda text, search: is_found(to_utf16_units(text), search)


_SEARCHES: dict[str, Callable[[str, str], bool]] = {
    "CONTAINS": operator.contains,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}


@compile_node.register
def _compile_is_null(node: IsNull) -> ConditionFunction:
    """Return the condition of IS NULL or IS NOT NULL."""
    operand = compile_node(node.operand)
    negated = node.negated
    return lambda properties: (operand(properties) is None) is not negated
