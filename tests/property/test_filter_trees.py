"""Random trees: they are the same after rendering and parsing, and have the expected verdicts.

The expected verdicts come from a reference interpreter. It was written from spec/filter.md §7 alone
and in another manner: without closures and without classes that are known beforehand. Every value
has its Java class, which is examined when values are compared. Only the nodes are shared with
`sluicemq.filter`.
"""

import math
import re
import unicodedata
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.evaluate import compile_node
from sluicemq.filter.nodes import (
    And,
    BareProperty,
    Between,
    Equal,
    In,
    IsNull,
    Literal,
    Match,
    Negate,
    Node,
    Not,
    Or,
    Order,
    Property,
    render,
)
from sluicemq.filter.selector import explain
from sluicemq.filter.subscriptions import compile_sql92

NAMES = ["a", "b", "c"]
TEXTS = [
    "5", "-5", "+5", "5.0", "0", "-0.0", "10", "007", "", "abc", "true", "TRUE", "NaN", "Infinity",
    " 5", "5d", "0x1p3", "1e3", "٥", "5L", "1_0", "2147483648", "-2147483648",
    "9223372036854775808", "1e400", "hello", "it's", ".5",
]  # fmt: skip

properties_of = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(TEXTS))
names = st.sampled_from(NAMES).map(Property)
whole_numbers = st.sampled_from([0, 1, 5, 7, 10, 2**31 - 1, 2**31, 2**63 - 1]).map(Literal)
floats = st.sampled_from([0.5, 1.5, 5.0, 10.0, 1e3, 5e-324, 2.0**63]).map(Literal)
strings = st.sampled_from(TEXTS).map(Literal)
booleans = st.sampled_from([True, False]).map(Literal)
constants = st.sampled_from([True, False, None]).map(Literal)
searches = st.sampled_from(["", "5", "h", "ell", "'"])
orders = st.sampled_from([">", ">=", "<", "<="])
matches = st.sampled_from(["CONTAINS", "STARTSWITH", "ENDSWITH"])
lists = st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6).map(tuple)
flags = st.booleans()


def is_in_range(node: Between) -> bool:
    """Return whether a BETWEEN compiles: its constants are in order, or it is negated."""
    if node.negated or not (isinstance(node.low, Literal) and isinstance(node.high, Literal)):
        return True
    return node.low.value <= node.high.value  # type: ignore[operator]


def compiles(node: Equal) -> bool:
    """Return whether a comparison compiles: TRUE and FALSE are not left of another constant."""
    left, right = node.left, node.right
    if not (isinstance(left, Literal) and isinstance(right, Literal)):
        return True
    return not isinstance(left.value, bool) or isinstance(right.value, bool)


@st.composite
def numbers(draw: st.DrawFn) -> Node:
    """Draw an operand of `<`: a property, a number, or the minus of either."""
    node: Node = draw(names | whole_numbers | floats)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2]))):
        node = Negate(node)
    return node


@st.composite
def values(draw: st.DrawFn, depth: int) -> Node:
    """Draw an operand of `=`: anything but NULL and a bare property as a condition."""
    if depth > 0 and draw(st.integers(0, 3)) == 0:
        node: Node = draw(conditions(depth - 1))
        if not isinstance(node, BareProperty) and node != Literal(None):
            return node
    return draw(numbers() | strings | booleans)


@st.composite
def atoms(draw: st.DrawFn, depth: int) -> Node:
    kind = draw(st.integers(0, 7))
    if kind == 0:
        node: Node = draw(st.builds(Equal, values(depth), values(depth), flags).filter(compiles))
    elif kind in (1, 2):
        node = draw(st.builds(Order, orders, numbers(), numbers()))
    elif kind == 3:
        bounds = st.builds(Between, numbers(), numbers(), numbers(), flags)
        node = draw(bounds.filter(is_in_range))
    elif kind == 4:
        node = draw(st.builds(In, names, lists, flags))
    elif kind == 5:
        node = draw(st.builds(Match, matches, values(depth), searches, flags))
    elif kind == 6:
        node = draw(st.builds(IsNull, values(depth), flags))
    else:
        node = draw(names.map(BareProperty) | constants)
    return node


@st.composite
def conditions(draw: st.DrawFn, depth: int = 2) -> Node:
    """Draw a tree as the parser makes it: no chain begins with a chain of its own kind."""
    kind = draw(st.integers(0, 3)) if depth > 0 else 0
    if kind == 0:
        return draw(atoms(depth))
    if kind == 1:
        return Not(draw(conditions(depth - 1)))
    chain = And if kind == 2 else Or
    parts = draw(st.lists(conditions(depth - 1), min_size=2, max_size=4))
    if isinstance(parts[0], chain):
        parts[0] = Not(parts[0])
    return chain(tuple(parts))


class Value(NamedTuple):
    kind: str
    value: Any


class EvaluationEndsError(Exception):
    """The evaluation ends with an exception in Java."""


def fail() -> Any:
    raise EvaluationEndsError


def evaluate(node: Node, properties: dict[str, str]) -> Value | None:
    """Return the value of a node, None for null. The kind of a condition is Boolean."""
    return globals()[f"evaluate_{type(node).__name__.lower()}"](node, properties)


def boolean(value: bool | None) -> Value | None:
    return None if value is None else Value("Boolean", value)


def evaluate_property(node: Property, properties: dict[str, str]) -> Value | None:
    return Value("String", properties[node.name]) if node.name in properties else None


def evaluate_literal(node: Literal, properties: dict[str, str]) -> Value | None:
    kinds = {bool: "Boolean", str: "String", float: "Double"}
    if node.value is None:
        return None
    long = isinstance(node.value, int) and node.value >= 2**31
    return Value(kinds.get(type(node.value), "Long" if long else "Integer"), node.value)


def evaluate_negate(node: Negate, properties: dict[str, str]) -> Value | None:
    inner = evaluate(node.operand, properties)
    if inner is None or inner.kind in ("String", "Boolean"):
        return None
    return Value(inner.kind, -inner.value)


def evaluate_bareproperty(node: BareProperty, properties: dict[str, str]) -> Value | None:
    return None if evaluate(node.operand, properties) is None else boolean(False)


def evaluate_not(node: Not, properties: dict[str, str]) -> Value | None:
    inner = evaluate(node.operand, properties)
    return None if inner is None else boolean(not inner.value)


def evaluate_and(node: And, properties: dict[str, str]) -> Value | None:
    left = evaluate(node.parts[0], properties)
    for part in node.parts[1:]:
        if left == boolean(False):
            return left
        right = evaluate(part, properties)
        if right == boolean(False):
            left = right
        elif left is None or right is None:
            left = None
    return left


def evaluate_or(node: Or, properties: dict[str, str]) -> Value | None:
    left = evaluate(node.parts[0], properties)
    for part in node.parts[1:]:
        if left == boolean(True):
            return left
        right = evaluate(part, properties)
        if right == boolean(True):
            left = right
        elif left is None or right is None:
            left = None
    return left


def evaluate_equal(node: Equal, properties: dict[str, str]) -> Value | None:
    left, right = evaluate(node.left, properties), evaluate(node.right, properties)
    if left is None:
        same = True if right is None else None
    elif right is None:
        same = False
    elif left.kind == right.kind == "String":
        same = left.value == right.value
    else:
        same = compare(left, right) == 0
    return boolean(same if same is None else same is not node.negated)


def evaluate_order(node: Order, properties: dict[str, str]) -> Value | None:
    left, right = evaluate(node.left, properties), evaluate(node.right, properties)
    if left is None or right is None:
        return None
    sign = compare(left, right)
    return boolean({">": sign > 0, ">=": sign >= 0, "<": sign < 0, "<=": sign <= 0}[node.operator])


def evaluate_between(node: Between, properties: dict[str, str]) -> Value | None:
    if node.negated:
        parts = (Order("<", node.value, node.low), Order(">", node.value, node.high))
        return evaluate_or(Or(parts), properties)
    parts = (Order(">=", node.value, node.low), Order("<=", node.value, node.high))
    return evaluate_and(And(parts), properties)


def evaluate_in(node: In, properties: dict[str, str]) -> Value | None:
    found = evaluate(node.operand, properties)
    return None if found is None else boolean((found.value in node.values) != node.negated)


def evaluate_match(node: Match, properties: dict[str, str]) -> Value | None:
    if node.search == "":
        return boolean(False)
    found = evaluate(node.operand, properties)
    if found is None or found.kind != "String":
        return boolean(False)
    pattern = re.escape(node.search)
    pattern = {"STARTSWITH": "^" + pattern, "ENDSWITH": pattern + r"\Z"}.get(node.operator, pattern)
    return boolean((re.search(pattern, found.value) is not None) != node.negated)


def evaluate_isnull(node: IsNull, properties: dict[str, str]) -> Value | None:
    return boolean((evaluate(node.operand, properties) is None) != node.negated)


def compare(left: Value, right: Value) -> int:
    """Return the sign of compareTo after the conversions of §7; -1 for values that never equal."""
    kinds = (left.kind, right.kind)
    if kinds == ("String", "String"):
        return double_sign(to_double(left.value), to_double(right.value))
    if left.kind == "Boolean":
        if right.kind == "String":
            fail()
        return int(left.value != right.value) if right.kind == "Boolean" else -1
    if right.kind == "Boolean":
        if left.kind != "String":
            return -1
        return int((left.value.casefold() == "true") != right.value)
    if "String" in kinds:
        number_kind = next(kind for kind in kinds if kind != "String")
        convert = {"Integer": to_integer, "Long": to_long, "Double": to_double}[number_kind]
        left, right = (
            Value(number_kind, convert(side.value)) if side.kind == "String" else side
            for side in (left, right)
        )
    if "Double" in (left.kind, right.kind):
        return double_sign(float(left.value), float(right.value))
    return int(left.value > right.value) - int(left.value < right.value)


def double_sign(left: float, right: float) -> int:
    """Return the sign of Double.compareTo, which puts NaN above all and -0.0 below 0.0."""

    def key(value: float) -> tuple[bool, float, float]:
        return (math.isnan(value), 0.0 if math.isnan(value) else value, math.copysign(1, value))

    first, second = key(left), key(right)
    if first[0] and second[0]:
        return 0
    return int(first > second) - int(first < second)


def digits_of(text: str) -> int:
    """Convert digits one by one, as Character.digit does for one UTF-16 unit."""
    sign, rest = (-1, text[1:]) if text[:1] == "-" else (1, text.removeprefix("+"))
    if not rest:
        fail()
    value = 0
    for character in rest:
        digit = unicodedata.decimal(character, -1)
        if digit < 0 or ord(character) > 0xFFFF:
            fail()
        value = value * 10 + digit
    return sign * value


def to_integer(text: str) -> int:
    value = digits_of(text)
    return value if -(2**31) <= value < 2**31 else fail()


def to_long(text: str) -> int:
    value = digits_of(text)
    return value if -(2**63) <= value < 2**63 else fail()


def to_double(text: str) -> float:
    body = text.strip("".join(map(chr, range(33))))
    sign = -1.0 if body[:1] == "-" else 1.0
    body = body[1:] if body[:1] in ("+", "-") else body
    if body in ("NaN", "Infinity"):
        return sign * float(body)
    if body[-1:] in ("f", "F", "d", "D") and "x" not in body.lower():
        body = body[:-1]
    if not body.isascii() or "_" in body or body != body.strip() or body[:1] in ("+", "-"):
        fail()
    try:
        if body[:2].lower() == "0x":
            return sign * float.fromhex(body) if "p" in body.lower() else fail()
        return sign * float(body) if body[:1].isdigit() or body[:1] == "." else fail()
    except ValueError:
        return float(fail())


def reference_verdict(node: Node, properties: dict[str, str]) -> str:
    try:
        found = evaluate(node, properties)
    except EvaluationEndsError:
        return "error"
    return "null" if found is None else str(found.value).lower()


def ours(node: Node, properties: dict[str, str]) -> str:
    try:
        found = compile_node(node)(properties)
    except FilterEvaluationError:
        return "error"
    return "null" if found is None else str(found).lower()


@settings(max_examples=60, deadline=None)
@given(conditions())
def test_a_rendered_and_parsed_tree_is_the_same_tree(tree: Node) -> None:
    assert compile_sql92(render(tree)).tree == tree


@settings(max_examples=60, deadline=None)
@given(conditions(), st.lists(properties_of, min_size=1, max_size=20))
def test_closures_agree_with_the_reference_interpreter(
    tree: Node, messages: list[dict[str, str]]
) -> None:
    for properties in messages:
        assert ours(tree, properties) == reference_verdict(tree, properties), (
            render(tree),
            properties,
        )


@settings(max_examples=60, deadline=None)
@given(conditions(), properties_of)
def test_explanation_has_the_verdict_of_the_evaluation(
    tree: Node, properties: dict[str, str]
) -> None:
    selector = compile_sql92(render(tree))
    assert explain(selector, properties).outcome.value == ours(tree, properties)


def test_the_reference_interpreter_agrees_with_the_specification() -> None:
    """Check the reference interpreter itself with a few lines of spec/filter.md."""
    for text, properties, wanted in (
        ("a = 5", {"a": "5.0"}, "error"),
        ("a = 5.0", {"a": " 5 "}, "true"),
        ("a = b", {}, "true"),
        ("TRUE = a", {"a": "true"}, "error"),
        ("a NOT CONTAINS ''", {"a": "x"}, "false"),
        ("a > 1 OR b > 1", {"a": "x", "b": "5"}, "error"),
        ("b > 1 OR a > 1", {"a": "x", "b": "5"}, "true"),
        ("9223372036854775807 = 9223372036854775808.0", {}, "true"),
    ):
        assert reference_verdict(compile_sql92(text).tree, properties) == wanted, text
