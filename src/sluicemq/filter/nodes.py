"""The tree of a compiled SQL92 selector: frozen nodes, read by every engine; and back to text.

A node holds what was written, in the shape RocketMQ's parser gives it (spec/filter.md §6), and no
behaviour:

    value    Property  Literal  Negate
    verdict  Literal (TRUE FALSE NULL)  Truth  Not  And  Or  Equal  Order  Between  In
             Match  IsNull

`position` is the index in the expression of the token that stands for the node: the word itself
for a property or literal, the operator for everything else. It does not count in comparisons.

A property is always a string and a number comes only from a literal, so the Java class of every
operand is known before any message is seen: `java_class`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal as OneOf
from typing import TypeAlias

INTEGER_MAX = (1 << 31) - 1
BLANKS = "".join(map(chr, range(0x21)))
"""What String.trim() of Java removes: everything up to the space."""

OrderOperator: TypeAlias = OneOf[">", ">=", "<", "<="]
MatchOperator: TypeAlias = OneOf["CONTAINS", "STARTSWITH", "ENDSWITH"]


class JavaClass(Enum):
    """What an operand is for RocketMQ. NULL: it never has a value (a negated property)."""

    STRING = "String"
    INTEGER = "Integer"
    LONG = "Long"
    DOUBLE = "Double"
    BOOLEAN = "Boolean"
    NULL = "null"

    @property
    def is_number(self) -> bool:
        return self in (JavaClass.INTEGER, JavaClass.LONG, JavaClass.DOUBLE)


@dataclass(frozen=True, slots=True)
class Property:
    """The value of a message property: a string, or null when the message has none."""

    name: str
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant: whole number, float, string, TRUE, FALSE or NULL; `text` as it was written."""

    value: int | float | str | bool | None
    position: int = field(default=0, compare=False)
    text: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Negate:
    """Minus: a number's negative; of anything that is no number always null."""

    operand: "Node"
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Truth:
    """A bare property as a verdict: null when absent, else FALSE (a string is never Boolean)."""

    operand: "Node"
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Not:
    """NOT: null stays null."""

    operand: "Node"
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class And:
    """Parts from left to right: the first FALSE ends it, otherwise any null makes it null."""

    parts: tuple["Node", ...]
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Or:
    """Parts from left to right: the first TRUE ends it, otherwise any null makes it null."""

    parts: tuple["Node", ...]
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Equal:
    """`=`, or `<>` when negated."""

    left: "Node"
    right: "Node"
    negated: bool = False
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Order:
    """`>`, `>=`, `<`, `<=` on numbers."""

    operator: OrderOperator
    left: "Node"
    right: "Node"
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Between:
    """`value >= low AND value <= high`; negated: `value < low OR value > high`."""

    value: "Node"
    low: "Node"
    high: "Node"
    negated: bool = False
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class In:
    """Is the property one of these strings? Null when it is absent, negated too."""

    operand: Property
    values: tuple[str, ...]
    negated: bool = False
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Match:
    """CONTAINS, STARTSWITH, ENDSWITH. FALSE when there is nothing to search, negated too."""

    operator: MatchOperator
    operand: "Node"
    search: str
    negated: bool = False
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class IsNull:
    """IS NULL, IS NOT NULL: never null itself."""

    operand: "Node"
    negated: bool = False
    position: int = field(default=0, compare=False)


Node: TypeAlias = (
    Property
    | Literal
    | Negate
    | Truth
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
    """The class of the values that this node can have. A whole number is Integer when 32 bits hold
    it; the suffix L does not widen it, and minus keeps the class (spec/filter.md §7)."""
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
        case _:  # NULL is a constant of the Boolean kind
            return JavaClass.BOOLEAN


def is_boolean(node: Node) -> bool:
    """Is it a condition (TRUE, FALSE and NULL are)? Anything else is a value."""
    return java_class(node) is JavaClass.BOOLEAN


def children(node: Node) -> tuple[Node, ...]:
    """The nodes directly below, in the order in which they are evaluated."""
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
    """All nodes by depth, the root first. Not recursive: safe on a tree of any depth."""
    found: list[tuple[Node, ...]] = [(root,)]
    while below := tuple(child for node in found[-1] for child in children(node)):
        found.append(below)
    return found


def walk(root: Node) -> Iterator[Node]:
    """All nodes, level by level."""
    for level in levels(root):
        yield from level


def property_names(root: Node) -> frozenset[str]:
    """The properties that the expression reads."""
    return frozenset(node.name for node in walk(root) if isinstance(node, Property))


# How tightly a node binds (grammar.lark): an operand that binds looser goes into parentheses.
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
    """The node as SQL92, with only the parentheses it needs; literals as they were written."""
    match node:
        case Property(name=name):
            return name
        case Literal(value=value, text=text):
            return text or _written(value)
        case Truth(operand=operand):
            return render(operand)
        case Negate(operand=operand):
            return f"- {_inside(operand, _OPERAND)}"  # the blank: two signs would be a comment
        case Not(operand=operand):
            return f"NOT {_inside(operand, _OPERAND)}"
        case Or(parts=parts):
            return " OR ".join(_inside(part, _AND) for part in parts)
        case And(parts=parts):
            return " AND ".join(_inside(part, _EQUALITY) for part in parts)
        case _:
            return _comparison(node)


def _comparison(node: Equal | Order | Between | In | Match | IsNull) -> str:
    match node:
        case Equal(left=left, right=right, negated=negated):
            sign = "<>" if negated else "="
            return f"{_inside(left, _EQUALITY)} {sign} {_inside(right, _COMPARISON)}"
        case IsNull(operand=operand, negated=negated):
            return f"{_inside(operand, _EQUALITY)} IS {'NOT ' * negated}NULL"
        case Order(operator=operator, left=left, right=right):
            return f"{_inside(left, _COMPARISON)} {operator} {_inside(right, _OPERAND)}"
        case Between(value=value, low=low, high=high, negated=negated):
            bounds = f"{_inside(low, _OPERAND)} AND {_inside(high, _OPERAND)}"
            return f"{_inside(value, _COMPARISON)} {'NOT ' * negated}BETWEEN {bounds}"
        case In(operand=operand, values=values, negated=negated):
            return f"{operand.name} {'NOT ' * negated}IN ({', '.join(map(_written, values))})"
        case Match(operator=word, operand=operand, search=search, negated=negated):
            return f"{_inside(operand, _COMPARISON)} {'NOT ' * negated}{word} {_written(search)}"


def _inside(node: Node, binding: int) -> str:
    inner = node.operand if isinstance(node, Truth) else node
    return render(inner) if _BINDING[type(inner)] >= binding else f"({render(inner)})"


def _written(value: object) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return "NULL" if value is None else str(value).upper()
