"""As what each property is read: the literal beside it decides, not the message.

A property is a string. Beside a whole number it is converted by Integer.valueOf (Long.valueOf above
2,147,483,647), beside a float by Double.valueOf; a value that cannot be converted ends the
evaluation and the message is not delivered (spec/filter.md §7).
"""

from collections.abc import Iterator
from typing import NamedTuple

from sluicemq.filter.evaluate import constant_of
from sluicemq.filter.nodes import (
    Between,
    Equal,
    In,
    JavaClass,
    Literal,
    Match,
    Negate,
    Node,
    Order,
    Property,
    is_boolean,
    java_class,
    levels,
)


class Use(NamedTuple):
    """A property beside something: `node` is the comparison, `other` what it is compared with, in
    `read_as` as which class. `text` and `position` are those of the other side."""

    name: str
    read_as: JavaClass
    node: Node
    text: str
    position: int

    @property
    def length(self) -> int:
        return max(1, len(self.text))


class TypeNote(NamedTuple):
    """What a user should know of a property: as what it is read and which values are errors."""

    name: str
    read_as: str
    because: str
    accepts: str
    errors: str
    instead: str


# 0.0 itself is refused (spec/filter.md §6), so its neighbours stand for it.
_ZERO = (
    "There is no 0.0: write > 0 as >= 4.9e-324, >= 0 as > -4.9e-324, "
    "< 0 as <= -4.9e-324, <= 0 as < 4.9e-324."
)
_NOTES: dict[JavaClass, tuple[str, str]] = {
    JavaClass.INTEGER: (
        "whole numbers from -2147483648 to 2147483647",
        "'30.5', '1e3', '3000000000', ' 5' and text",
    ),
    JavaClass.LONG: (
        "whole numbers of 64 bits",
        "'30.5', '1e3', ' 5' and text",
    ),
    JavaClass.DOUBLE: ("any number: '5', '-0.5', '1e3'", "text"),
    JavaClass.BOOLEAN: ("'true' in any case is TRUE, everything else FALSE", ""),
    JavaClass.STRING: (
        "any value, character by character: '5' is not '5.0', 'a' is not 'A'",
        "",
    ),
}


def property_uses(tree: Node) -> tuple[Use, ...]:
    """Every comparison of a property, in the order of their places."""
    found = [use for level in levels(tree) for node in level for use in _uses(node)]
    return tuple(sorted(found, key=lambda use: use.position))


def type_notes(tree: Node) -> tuple[TypeNote, ...]:
    """One note for each property and class, in the order of their places."""
    notes: dict[tuple[str, JavaClass], TypeNote] = {}
    for use in property_uses(tree):
        if use.read_as not in _NOTES or (use.name, use.read_as) in notes:
            continue
        accepts, errors = _NOTES[use.read_as]
        because = f"it is compared with {use.text}"
        is_whole = use.read_as in (JavaClass.INTEGER, JavaClass.LONG)
        cure = f"For values with a fraction: {float_cure(use.text)}" if is_whole else ""
        notes[use.name, use.read_as] = TypeNote(
            use.name, use.read_as.value, because, accepts, errors, cure
        )
    return tuple(notes.values())


def float_cure(text: str) -> str:
    """What to write for a whole number to compare as floats."""
    digits = text.rstrip("lL")
    return _ZERO if digits.lstrip("-") == "0" else f"Write {digits}.0."


def literal_text(node: Node) -> str:
    """A constant as it was written, with its sign."""
    if isinstance(node, Negate):
        return f"-{literal_text(node.operand)}"
    if isinstance(node, Literal):
        return node.text or str(node.value)
    return node.name if isinstance(node, Property) else "a condition"


def _uses(node: Node) -> Iterator[Use]:
    match node:
        case Equal(left=left, right=right) | Order(left=left, right=right):
            yield from _beside(node, left, right)
            yield from _beside(node, right, left)
        case Between(value=value, low=low, high=high):
            for bound in (low, high):
                yield from _beside(node, value, bound)
                yield from _beside(node, bound, value)
        case In(operand=operand, values=values):
            shown = f"'{values[0]}'"
            yield Use(operand.name, JavaClass.STRING, node, shown, node.position)
        case Match(operand=Property(name=name), operator=operator, search=search):
            yield Use(name, JavaClass.STRING, node, f"{operator} '{search}'", node.position)
        case _:
            return


def _beside(node: Node, subject: Node, other: Node) -> Iterator[Use]:
    if not isinstance(subject, Property):
        return
    if isinstance(other, Property):
        read_as = JavaClass.STRING if isinstance(node, Equal) else JavaClass.DOUBLE
    elif constant_of(other) is not None or isinstance(other, Literal) or is_boolean(other):
        read_as = java_class(other)
    else:
        return
    yield Use(subject.name, read_as, node, literal_text(other), other.position)
