"""How an expression is evaluated on columns: the tree cut where it reads one property only.

    Constant   reads nothing
    Column     reads one property: evaluated for each distinct value, once, then gathered
    Several    a comparison that reads more: evaluated for each combination that occurs
    Join       AND, OR, NOT and comparisons of conditions: a look-up in a table of outcomes

Within a Column the tree is cut further, to its atoms (`Atom`), for columns of thousands of values:
an atom that compares with a number does it for all of them at once, and the same joins hold.
AND and OR are read from left to right, two at a time; they are associative, errors included
(a test holds it), so neighbours that read the same property are one Column.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias

from sluicemq.filter.evaluate import Verdict, compile_verdict
from sluicemq.filter.nodes import (
    And,
    Between,
    Equal,
    In,
    IsNull,
    Literal,
    Match,
    Node,
    Not,
    Or,
    Order,
    Property,
    Truth,
    children,
    is_boolean,
    property_names,
)
from sluicemq.filter.outcomes import (
    ALL,
    ERROR,
    FALSE,
    NULL,
    TRUE,
    and_table,
    lookup_table,
    not_table,
    or_table,
    settled,
    stub,
    verdict_of,
)


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """The same for every message: a set of one verdict."""

    outcomes: int


@dataclass(frozen=True, slots=True, eq=False)
class Atom:
    """A comparison that reads one property. `absent`: what comes of it without the property,
    `unknown`: what can come of it at all (both sets of outcomes)."""

    name: str
    node: Node
    verdict: Verdict
    absent: int
    unknown: int


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """All that reads one property; `inner` is the same, down to its atoms."""

    name: str
    verdict: Verdict
    inner: "Plan"
    absent: int
    unknown: int


@dataclass(frozen=True, slots=True, eq=False)
class Several:
    """A comparison of properties with each other."""

    names: tuple[str, ...]
    node: Node
    verdict: Verdict
    unknown: int


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """`table[operand]` of one operand; of more, from left to right, `table[so far << 4 | next]`."""

    operands: tuple["Plan", ...]
    table: bytes


# A comparison whose sides are exchanged.
MIRRORED = {">": "<", ">=": "<=", "<": ">", "<=": ">=", "=": "=", "<>": "<>"}

Plan: TypeAlias = Constant | Atom | Column | Several | Join
Leaf: TypeAlias = Atom | Column | Several


def symbol_of(node: Order | Equal) -> str:
    """The operator as it is written."""
    if isinstance(node, Order):
        return node.operator
    return "<>" if node.negated else "="


def make_plan(node: Node) -> Plan:
    """The plan of a condition."""
    names = property_names(node)
    if len(names) != 1:
        return _split(node, names, make_plan)
    inner = _inner_plan(node)
    absent = outcome_of(inner, lambda leaf: leaf.absent if isinstance(leaf, Atom) else ALL)
    unknown = outcome_of(inner, lambda leaf: leaf.unknown)
    (name,) = names
    return Column(name, compile_verdict(node), inner, absent, unknown)


def outcome_of(plan: Plan, leaf_outcomes: Callable[[Leaf], int]) -> int:
    """The set that a plan comes to, given that of each leaf."""
    if isinstance(plan, Constant):
        return plan.outcomes
    if not isinstance(plan, Join):
        return leaf_outcomes(plan)
    outcomes = outcome_of(plan.operands[0], leaf_outcomes)
    if len(plan.operands) == 1:
        return plan.table[outcomes]
    for operand in plan.operands[1:]:
        if outcomes in settled(plan.table):
            break
        outcomes = plan.table[outcomes << 4 | outcome_of(operand, leaf_outcomes)]
    return outcomes


def _inner_plan(node: Node) -> Plan:
    """Down to the atoms, for a node that reads one property or none."""
    names = property_names(node)
    plan = _split(node, names, _inner_plan)
    if not isinstance(plan, Several):
        return plan
    absent = 1 << verdict_of(plan.verdict, {})
    return Atom(plan.names[0], node, plan.verdict, absent, plan.unknown)


def _as_orders(node: Between) -> Node:
    """By its definition (evaluate.py): each bound compares in its own class."""
    value, where = node.value, node.position
    if node.negated:
        return Or((Order("<", value, node.low, where), Order(">", value, node.high, where)))
    return And((Order(">=", value, node.low, where), Order("<=", value, node.high, where)))


def _split(node: Node, names: frozenset[str], plan_of: Callable[[Node], Plan]) -> Plan:
    """One step down; a Several where there is nothing to split."""
    if not names:
        return Constant(1 << verdict_of(compile_verdict(node), {}))
    match node:
        case And(parts=parts):
            return _chain(And, parts, and_table(), plan_of)
        case Or(parts=parts):
            return _chain(Or, parts, or_table(), plan_of)
        case Not(operand=operand):
            return Join((plan_of(operand),), not_table())
        case Between():
            return plan_of(_as_orders(node))
        case _:
            return _join_of_conditions(node, plan_of) or Several(
                tuple(sorted(names)), node, compile_verdict(node), _possible(node)
            )


def _chain(
    kind: type[And] | type[Or],
    parts: tuple[Node, ...],
    table: bytes,
    plan_of: Callable[[Node], Plan],
) -> Plan:
    """Neighbours with the same properties first, then from left to right."""
    groups = [tuple(group) for _, group in groupby(parts, key=property_names)]
    if len(groups) == 1:  # all of them alike: part by part
        groups = [(part,) for part in parts]
    plans = [plan_of(group[0] if len(group) == 1 else kind(group)) for group in groups]
    return Join(tuple(plans), table)


def _join_of_conditions(node: Node, plan_of: Callable[[Node], Plan]) -> Plan | None:
    """`(a = 1) = (b = 2)`, `(a = 1 AND b = 2) IS NULL`: when all it reads is in its conditions."""
    read = [child for child in children(node) if property_names(child)]
    if not all(map(is_boolean, read)):
        return None
    replaced: dict[str, Any] = {}
    for side in ("left", "right", "operand"):
        if (child := getattr(node, side, None)) in read and child is not None:
            replaced[side] = stub(len(replaced))
    table = lookup_table(replace(node, **replaced), len(replaced))
    return Join(tuple(map(plan_of, read)), table)


def _possible(node: Node) -> int:
    """What can come of a comparison, whatever the properties are: wider than needed, not less."""
    match node:
        case In():
            return 1 << FALSE | 1 << TRUE | 1 << NULL
        case Equal(left=Property(), right=Literal(value=str())):
            return 1 << FALSE | 1 << TRUE | 1 << NULL
        case Equal(left=Property(), right=Property()):
            return 1 << FALSE | 1 << TRUE | 1 << NULL
        case IsNull(operand=Property()) | Match(operand=Property()):
            return 1 << FALSE | 1 << TRUE
        case Truth(operand=Property()):
            return 1 << FALSE | 1 << NULL
        case Order() | Between():
            return 1 << FALSE | 1 << TRUE | 1 << NULL | 1 << ERROR
        case _:
            return ALL
