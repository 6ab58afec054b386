"""The nodes of a compiled SQL92 expression, and functions that traverse and render them.

The parser (`syntax`) makes a tree of frozen nodes in the shape that RocketMQ's parser gives it
(spec/filter.md §6). The scalar engine (`evaluate`), the block engine (`plan`, `blocks`) and the
checks (`check`) read the tree. Nodes contain no behaviour.

A node is either a value or a condition:

    value      Property  Literal  Negate
    condition  Literal (TRUE FALSE NULL)  BareProperty  Not  And  Or  Equal  Order  Between
               In  Match  IsNull

A condition evaluates to TRUE, FALSE or null (three-valued logic). `position` is the index in the
expression of the token that represents the node: the word itself for a property or literal, the
operator for every other node. Comparisons of nodes ignore `position`.

A property is always a string, and a number comes only from a literal. Therefore the Java class of
every operand is known before any message is seen (`java_class`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Literal as OneOf
from typing import TypeAlias

INTEGER_MAX = (1 << 31) - 1
JAVA_TRIM_CHARACTERS = "".join(map(chr, range(0x21)))
"""The characters that Java's String.trim() removes: all control characters up to the space."""

OrderOperator: TypeAlias = OneOf[">", ">=", "<", "<="]
MatchOperator: TypeAlias = OneOf["CONTAINS", "STARTSWITH", "ENDSWITH"]


class JavaClass(Enum):
    """The class that an operand has in RocketMQ. NULL means that it never has a value."""

    STRING = "String"
    INTEGER = "Integer"
    LONG = "Long"
    DOUBLE = "Double"
    BOOLEAN = "Boolean"
    NULL = "null"

    @property
    def is_number(self) -> bool:
        """Whether the class is Integer, Long or Double."""
        return self in (JavaClass.INTEGER, JavaClass.LONG, JavaClass.DOUBLE)


@dataclass(frozen=True, slots=True)
class Property:
    """The value of a message property: a string, or null if the message does not have it."""

    name: str
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant: whole number, float, string, TRUE, FALSE or NULL.

    `value` is None for NULL. `text` is the literal as it was written in the expression, "" if the
    node was not made by the parser.
    """

    value: int | float | str | bool | None
    position: int = field(default=0, compare=False)
    text: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Negate:
    """A minus sign: the negative of a number. The minus of any other operand is always null."""

    operand: "Node"
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class BareProperty:
    """A property that is used as a condition, without a comparison.

    It is null if the message does not have the property, else FALSE, because a string is never a
    Boolean for RocketMQ. `operand` is the `Property`.
    """

    operand: "Node"
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Not:
    """NOT: exchanges TRUE and FALSE. The NOT of null is null."""

    operand: "Node"
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class And:
    """A chain of two or more conditions that are joined by AND.

    The parts are evaluated from left to right. The first FALSE ends the evaluation with FALSE. If
    no part is FALSE, the result is null if any part is null, else TRUE.
    """

    parts: tuple["Node", ...]
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Or:
    """A chain of two or more conditions that are joined by OR.

    The parts are evaluated from left to right. The first TRUE ends the evaluation with TRUE. If no
    part is TRUE, the result is null if any part is null, else FALSE.
    """

    parts: tuple["Node", ...]
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Equal:
    """A comparison with `=`, or with `<>` if `negated`."""

    left: "Node"
    right: "Node"
    negated: bool = False
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Order:
    """A comparison of numbers with `>`, `>=`, `<` or `<=`."""

    operator: OrderOperator
    left: "Node"
    right: "Node"
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Between:
    """BETWEEN: `value >= low AND value <= high`. If `negated`: `value < low OR value > high`."""

    value: "Node"
    low: "Node"
    high: "Node"
    negated: bool = False
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class In:
    """IN, or NOT IN if `negated`: whether the property is one of the strings in `values`.

    Both forms are null if the message does not have the property.
    """

    operand: Property
    values: tuple[str, ...]
    negated: bool = False
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Match:
    """CONTAINS, STARTSWITH or ENDSWITH, or NOT with one of them if `negated`.

    Both forms are FALSE if the operand is not a string (for example null) or `search` is empty.
    """

    operator: MatchOperator
    operand: "Node"
    search: str
    negated: bool = False
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class IsNull:
    """IS NULL, or IS NOT NULL if `negated`. The result is never null."""

    operand: "Node"
    negated: bool = False
    position: int = field(default=0, compare=False)


Node: TypeAlias = (
    Property
    | Literal
    | Negate
    | BareProperty
    | Not
    | And
    | Or
    | Equal
    | Order
    | Between
    | In
    | Match
    | IsNull
)


def java_class(node: Node) -> JavaClass:
    """Return the Java class of the values that a node can have (spec/filter.md §7).

    - A property and a string are String, and a float is Double.
    - A whole number is Integer if it fits in 32 bits, else Long. The suffix L makes no difference.
    - A minus has the class of its number. The class is NULL if its operand is not a number.
    - Conditions and the constants TRUE, FALSE and NULL are Boolean.
    """
    match node:
        case Property() | Literal(value=str()):
            return JavaClass.STRING
        case Literal(value=float()):
            return JavaClass.DOUBLE
        case Literal(value=int(value)) if not isinstance(value, bool):
            return JavaClass.INTEGER if value <= INTEGER_MAX else JavaClass.LONG
        case Negate(operand=operand):
            inner = java_class(operand)
            return inner if inner.is_number else JavaClass.NULL
        case _:  # the constant NULL counts as a Boolean
            return JavaClass.BOOLEAN


def is_boolean(node: Node) -> bool:
    """Return whether a node is a condition, not a value.

    The constants TRUE, FALSE and NULL are conditions.
    """
    return java_class(node) is JavaClass.BOOLEAN


def children(node: Node) -> tuple[Node, ...]:
    """Return the direct operands of a node, in the order in which they are evaluated.

    The result is () for a property and a literal. IN, IS NULL and other conditions on one operand
    return (operand,).
    """
    match node:
        case Property() | Literal():
            return ()
        case And(parts=parts) | Or(parts=parts):
            return parts
        case Equal(left=left, right=right) | Order(left=left, right=right):
            return (left, right)
        case Between(value=value, low=low, high=high):
            return (value, low, high)
        case _:
            return (node.operand,)


def levels(root: Node) -> list[tuple[Node, ...]]:
    """Return the nodes of a tree grouped by depth. The first group contains only `root`.

    The function is not recursive, so a tree of any depth cannot exhaust Python's stack.
    """
    groups: list[tuple[Node, ...]] = []
    level: tuple[Node, ...] = (root,)
    while level:
        groups.append(level)
        level = tuple(chain.from_iterable(map(children, level)))
    return groups


def walk(root: Node) -> Iterator[Node]:
    """Yield all nodes of a tree, level by level, the root first."""
    for level in levels(root):
        yield from level


def property_names(root: Node) -> frozenset[str]:
    """Return the names of the properties that an expression reads."""
    return frozenset(node.name for node in walk(root) if isinstance(node, Property))


# The binding strength of a node (grammar.lark). An operand that binds more loosely than its place
# requires is put into parentheses.
_OR, _AND, _EQUALITY, _COMPARISON, _OPERAND, _PRIMARY = range(6)
_BINDING: dict[type, int] = {
    Or: _OR,
    And: _AND,
    Equal: _EQUALITY,
    IsNull: _EQUALITY,
    Order: _COMPARISON,
    Between: _COMPARISON,
    In: _COMPARISON,
    Match: _COMPARISON,
    Not: _OPERAND,
    Negate: _OPERAND,
    Literal: _PRIMARY,
    Property: _PRIMARY,
}


def render(node: Node) -> str:
    """Return a node as SQL92 text, with only the parentheses that it needs.

    Literals that the parser made appear as they were written in the expression.
    """
    match node:
        case Property(name=name):
            return name
        case Literal(value=value, text=text):
            return text or _render_literal(value)
        case BareProperty(operand=operand):
            return render(operand)
        case Negate(operand=operand):
            # Without the space, two minus signs would begin a comment.
            return f"- {_render_operand(operand, _OPERAND)}"
        case Not(operand=operand):
            return f"NOT {_render_operand(operand, _OPERAND)}"
        case Or(parts=parts):
            return " OR ".join(_render_operand(part, _AND) for part in parts)
        case And(parts=parts):
            return " AND ".join(_render_operand(part, _EQUALITY) for part in parts)
        case _:
            return _render_comparison(node)


def _render_comparison(node: Equal | Order | Between | In | Match | IsNull) -> str:
    """Return a comparison as SQL92 text, with only the parentheses that it needs."""
    match node:
        case Equal(left=left, right=right, negated=negated):
            sign = "<>" if negated else "="
            left_text = _render_operand(left, _EQUALITY)
            return f"{left_text} {sign} {_render_operand(right, _COMPARISON)}"
        case IsNull(operand=operand, negated=negated):
            return f"{_render_operand(operand, _EQUALITY)} IS {'NOT ' * negated}NULL"
        case Order(operator=operator, left=left, right=right):
            left_text = _render_operand(left, _COMPARISON)
            return f"{left_text} {operator} {_render_operand(right, _OPERAND)}"
        case Between(value=value_node, low=low, high=high, negated=negated):
            bounds = f"{_render_operand(low, _OPERAND)} AND {_render_operand(high, _OPERAND)}"
            return f"{_render_operand(value_node, _COMPARISON)} {'NOT ' * negated}BETWEEN {bounds}"
        case In(operand=operand, values=strings, negated=negated):
            listed_strings = ", ".join(map(_render_literal, strings))
            return f"{operand.name} {'NOT ' * negated}IN ({listed_strings})"
        case Match(operator=operator, operand=operand, search=search, negated=negated):
            operator_and_string = f"{operator} {_render_literal(search)}"
            return (
                f"{_render_operand(operand, _COMPARISON)} {'NOT ' * negated}{operator_and_string}"
            )


def _render_operand(node: Node, binding: int) -> str:
    """Return a node as text, in parentheses if it binds more loosely than `binding`."""
    inner = node.operand if isinstance(node, BareProperty) else node
    return render(inner) if _BINDING[type(inner)] >= binding else f"({render(inner)})"


def _render_literal(constant: object) -> str:
    """Return a constant as SQL92 writes it."""
    if isinstance(constant, str):
        return "'" + constant.replace("'", "''") + "'"
    return "NULL" if constant is None else str(constant).upper()
