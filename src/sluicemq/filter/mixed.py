"""Warnings that need the whole expression: one property read in two ways, and misspelt names.

Each is a message that is lost although one of the comparisons would take it: the conversion that
fails in the other ends the evaluation (spec/filter.md §7).
"""

from collections.abc import Iterator
from itertools import groupby

from sluicemq.filter.findings import Finding, Severity
from sluicemq.filter.java import double_or_none, integer_or_none, long_or_none
from sluicemq.filter.nodes import Equal, In, JavaClass, Literal, Node, Or, Property, levels
from sluicemq.filter.uses import Use, float_cure, property_uses

_OR_NONE = {
    JavaClass.INTEGER: integer_or_none,
    JavaClass.LONG: long_or_none,
    JavaClass.DOUBLE: double_or_none,
}
_WIDTH = [JavaClass.INTEGER, JavaClass.LONG, JavaClass.DOUBLE]


def mixed_warnings(tree: Node) -> Iterator[Finding]:
    """The warnings about a property's several uses, and about names."""
    uses = sorted(property_uses(tree), key=lambda use: use.name)
    for _, group in groupby(uses, key=lambda use: use.name):
        alike = sorted(group, key=lambda use: use.position)
        yield from _two_number_classes(alike)
        yield from _number_in_quotes(alike)
    for level in levels(tree):
        for node in level:
            if isinstance(node, Or):
                yield from _text_behind_number(node)
            if isinstance(node, Property):
                yield from _tag_name(node)


def _two_number_classes(uses: list[Use]) -> Iterator[Finding]:
    """`price > 30 AND price < 99.5`: 30.5 is an error for the first."""
    numbers = [use for use in uses if use.read_as in _WIDTH]
    widest = max((use.read_as for use in numbers), key=_WIDTH.index, default=None)
    for use in numbers:
        if use.read_as is widest or widest is None:
            continue
        other = next(other for other in numbers if other.read_as is widest)
        lost = "30.5" if widest is JavaClass.DOUBLE else "3000000000"
        what = (
            f"{use.name} is read as {use.read_as.value} beside {use.text} and as {widest.value} "
            f"beside {other.text}: a value such as {lost} is an error for the first, and the "
            "message does not match."
        )
        cure = f"{float_cure(use.text)} A float takes whole numbers too."
        yield _warning(use.position, use.length, "mixed-numbers", what, cure)


def _number_in_quotes(uses: list[Use]) -> Iterator[Finding]:
    """`a = '5' OR a > 7`: the first compares characters."""
    if not any(use.read_as in _WIDTH for use in uses):
        return
    for use in uses:
        text = use.text[1:-1]
        if not isinstance(use.node, Equal) or use.read_as is not JavaClass.STRING:
            continue
        if use.text[:1] == "'" and double_or_none(text) is not None:
            what = (
                f"{use.text} is a string: {use.name} is compared with it character by character "
                "('5' is not '5.0'), and elsewhere as a number."
            )
            yield _warning(
                use.position, use.length, "number-in-quotes", what, f"Write {text} without quotes."
            )


def _text_behind_number(node: Or) -> Iterator[Finding]:
    """`a > 5 OR a = 'n/a'`: 'n/a' ends the evaluation in the first part."""
    numbers: dict[str, Use] = {}
    for part in node.parts:
        for name, text, position in _texts(part):
            use = numbers.get(name)
            if use is not None and _OR_NONE[use.read_as](text) is None:
                what = (
                    f"{name} = '{text}' is never reached: the comparison of {name} with "
                    f"{use.text} stands before it, and '{text}' is an error there."
                )
                cure = f"Put {name} = '{text}' first; OR ends at the first TRUE."
                yield _warning(position, len(text) + 2, "string-behind-number", what, cure)
        for use in property_uses(part):
            if use.read_as in _WIDTH:
                numbers.setdefault(use.name, use)


def _texts(part: Node) -> Iterator[tuple[str, str, int]]:
    """The strings that a part of OR would accept for a property."""
    match part:
        case Equal(left=Property(name=name), right=Literal(value=str(text)) as right):
            if not part.negated:
                yield name, text, right.position
        case In(operand=operand, values=values, negated=False):
            for text in values:
                yield operand.name, text, part.position
        case _:
            return


def _tag_name(node: Property) -> Iterator[Finding]:
    if node.name != "TAGS" and node.name.upper() in ("TAGS", "TAG"):
        what = f"A message's tag is the property TAGS; {node.name} is another property."
        yield _warning(node.position, len(node.name), "tag-name", what, "Write TAGS for the tag.")


def _warning(position: int, length: int, code: str, what: str, instead: str) -> Finding:
    return Finding(position, length, code, what, instead, Severity.WARNING)
