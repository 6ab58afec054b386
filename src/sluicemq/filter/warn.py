"""What compiles and surprises: one rule a function, each looks at one node.

Facts: spec/filter.md §6 "Consequences" and §7.
"""

from collections.abc import Callable, Iterator

from sluicemq.filter.findings import Finding, Severity
from sluicemq.filter.nodes import (
    INTEGER_MAX,
    Equal,
    IsNull,
    JavaClass,
    Literal,
    Match,
    Negate,
    Node,
    Not,
    Order,
    Property,
    Truth,
    is_boolean,
    java_class,
    levels,
)


def tree_warnings(tree: Node) -> Iterator[Finding]:
    """The warnings of a whole tree."""
    nodes = [node for level in levels(tree) for node in level]
    # What stands under a misplaced NOT has its warning already.
    told = {id(found.operand) for node in nodes if (found := _misplaced_not(node))}
    for node in nodes:
        for rule in _RULES:
            if id(node) not in told and (finding := rule(node)):
                yield finding


def _bare_property(node: Node) -> Finding | None:
    if not isinstance(node, Truth) or not isinstance(node.operand, Property):
        return None
    name = node.operand.name
    what = f"The bare property {name} is never TRUE: a property is a string."
    cure = f"Write {name} = TRUE or {name} IS NOT NULL."
    return _warning(node.position, name, "bare-property", what, cure)


def _misplaced_not(node: Node) -> Not | None:
    left = node.left if isinstance(node, Equal) else None
    if isinstance(node, IsNull | Match):
        left = node.operand
    return left if isinstance(left, Not) else None


def _not_binds_tight(node: Node) -> Finding | None:
    found = _misplaced_not(node)
    if found is None:
        return None
    what = "NOT belongs to the one word after it, not to the whole comparison."
    cure = "Put the comparison in parentheses, for example NOT (a = 5)."
    return _warning(found.position, "NOT", "not-binds-tight", what, cure)


def _condition_against_string(node: Node) -> Finding | None:
    if not isinstance(node, Equal) or not is_boolean(node.left) or isinstance(node.left, Not):
        return None
    if java_class(node.right) is not JavaClass.STRING:
        return None
    what = "A condition on the left of a string cannot be evaluated: no message matches."
    return _warning(
        node.position, "=", "boolean-on-left", what, "Write it the other way: a = TRUE."
    )


def _always_unequal(node: Node) -> Finding | None:
    if not isinstance(node, Equal) or isinstance(node.left, Not):
        return None
    classes = [java_class(node.left), java_class(node.right)]
    if JavaClass.BOOLEAN not in classes or not any(found.is_number for found in classes):
        return None
    what = "A condition never equals a number."
    return _warning(node.position, "=", "boolean-and-number", what, "Write = TRUE or = FALSE.")


def _constant(node: Node) -> Finding | None:
    if not isinstance(node, Equal | Order) or not isinstance(node.left, Literal):
        return None
    if not isinstance(node.right, Literal):
        return None
    what = "This compares two constants: it is the same for every message."
    return _warning(node.position, "=", "constant", what, "Compare with a property.")


def _constant_on_left(node: Node) -> Finding | None:
    if not isinstance(node, Equal) or not node.negated or not isinstance(node.left, Literal):
        return None
    if not isinstance(node.right, Property):
        return None
    what = f"With the constant on the left <> matches messages without {node.right.name} too."
    cure = f"Write {node.right.name} <> {node.left.text}."
    return _warning(node.left.position, node.left.text, "constant-on-left", what, cure)


def _negated_no_number(node: Node) -> Finding | None:
    if not isinstance(node, Negate) or java_class(node) is not JavaClass.NULL:
        return None
    what = "Minus works on numbers only; of anything else the result is always null."
    return _warning(node.position, "-", "minus", what, "Write the minus before the number.")


def _suffix_does_not_widen(node: Node) -> Finding | None:
    if not isinstance(node, Literal) or not isinstance(node.value, int):
        return None
    if node.text[-1:] not in ("l", "L") or node.value > INTEGER_MAX:
        return None
    what = f"The suffix of {node.text} changes nothing: values above {INTEGER_MAX} do not match."
    cure = f"For larger values compare with a float: {node.value}.0."
    return _warning(node.position, node.text, "long-suffix", what, cure)


def _empty_search(node: Node) -> Finding | None:
    if not isinstance(node, Match) or node.search:
        return None
    what = f"{node.operator} with an empty string is FALSE for every message, with NOT too."
    return _warning(node.position, node.operator, "empty-search", what, "Write a IS NOT NULL.")


_RULES: tuple[Callable[[Node], Finding | None], ...] = (
    _bare_property,
    _not_binds_tight,
    _condition_against_string,
    _always_unequal,
    _constant,
    _constant_on_left,
    _negated_no_number,
    _suffix_does_not_widen,
    _empty_search,
)


def _warning(position: int, token: str, code: str, what: str, instead: str) -> Finding:
    return Finding(position, len(token), code, what, instead, Severity.WARNING)
