"""How an expression is evaluated on columns: the tree cut where it reads one property only.

    Constant   reads nothing
    Single     reads one property: evaluated for each distinct value, once, then gathered
    Several    a comparison that reads more: evaluated for each combination that occurs
    Join       AND, OR, NOT and comparisons of conditions: a look-up in a table of outcomes

A verdict is FALSE, TRUE, NULL or ERROR. Where a property is not known (it is no column, or only the
range of its values is), the outcome is the *set* of verdicts that are possible: four bits, 1 to 15.
A join is then one look-up: `table[left << 4 | right]`, or `table[operand]`. The tables are not
written down: they are asked of the scalar engine, with a comparison that comes out as wanted in the
place of each operand. So short circuit and errors are what they are there.

Within a Single the tree is cut further, to its atoms, for columns of thousands of values: an atom
that compares with a number does it for all of them at once, and the same joins hold. AND and OR are
associative, errors included (a test holds it), so neighbours that read the same property are one
Single.

`can_match` evaluates the plan once for a whole block, from figures of its columns: each leaf gives
the set of what can come of it for the values there are, as if the properties had nothing to do with
each other. So the answer may be yes for nothing, but never no for a block with a match.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, product
from typing import Any, TypeAlias, cast

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.evaluate import (
    MIRRORED,
    Verdict,
    between_as_orders,
    compile_value,
    constant_of,
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
    Node,
    Not,
    Or,
    Order,
    Property,
    Truth,
    children,
    is_boolean,
    java_class,
    property_names,
)
from sluicemq.record.columns import BlockStats, ColumnStats

FALSE, TRUE, NULL, ERROR, NEEDS_RECORD = range(5)
ALL = 0b1111
IS_TRUE = 1 << TRUE

# A verdict where the set has one member, NEEDS_RECORD where it has more.
VERDICT_OF = bytes([NEEDS_RECORD, *(
    members.bit_length() - 1 if members.bit_count() == 1 else NEEDS_RECORD
    for members in range(1, 16)
)])  # fmt: skip

# `stub = 1` comes out as each verdict with these values of the stub.
_STUB_VALUES: dict[int, str] = {FALSE: "0", TRUE: "1", ERROR: "x"}


def verdict_of(verdict: Verdict, properties: Mapping[str, str]) -> int:
    """The scalar engine's verdict on one message as a number. Never raises."""
    try:
        result = verdict(properties)
    except FilterEvaluationError:
        return ERROR
    return NULL if result is None else int(result)


def stub(number: int) -> Node:
    """An operand that can come out as each of the four verdicts."""
    return Equal(Property(f"stub{number}"), Literal(1))


def lookup_table(node: Node, operands: int) -> bytes:
    """The outcomes of a node whose conditions are `stub(0)` (and `stub(1)`), for all their sets."""
    verdict = compile_value(node)
    single = {}
    for chosen in product(range(4), repeat=operands):
        numbered = enumerate(chosen)
        properties = {f"stub{n}": _STUB_VALUES[one] for n, one in numbered if one != NULL}
        single[chosen] = 1 << verdict_of(verdict, properties)
    table = bytearray()
    for sets in product(range(16), repeat=operands):
        united = 0
        for chosen, outcome in single.items():
            if all(members >> one & 1 for members, one in zip(sets, chosen, strict=True)):
                united |= outcome
        table.append(united)
    return bytes(table)


@cache
def join_tables() -> dict[type[Node], bytes]:
    """Those of AND, OR and NOT."""
    stubs = (stub(0), stub(1))
    return {
        And: lookup_table(And(stubs), 2),
        Or: lookup_table(Or(stubs), 2),
        Not: lookup_table(Not(stubs[0]), 1),
    }


@cache
def settled(table: bytes) -> frozenset[int]:
    """The left sets of a join that no right side changes: short circuit, and errors."""
    return frozenset(
        left for left in range(1, 16) if set(table[left << 4 | 1 : left + 1 << 4]) == {left}
    )


def union(outcomes: Callable[[str], int], values: tuple[str, ...]) -> int:
    """The set of what comes of some values. Stops when nothing more can be added."""
    united = 0
    for value in values:
        united |= outcomes(value)
        if united == ALL:
            break
    return united


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
class Single:
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


Plan: TypeAlias = Constant | Atom | Single | Several | Join
Leaf: TypeAlias = Atom | Single | Several


def number_comparison(node: Node) -> tuple[JavaClass, str, int | float] | None:
    """Of a property with a number, whichever stands left: the number's class, the operator, the
    number; None for anything else."""
    if not isinstance(node, Order | Equal):
        return None
    number = node.right
    symbol: str = node.operator if isinstance(node, Order) else "<>" if node.negated else "="
    if isinstance(node.right, Property):
        symbol, number = MIRRORED[symbol], node.left
    elif not isinstance(node.left, Property):
        return None
    bound = constant_of(number)
    return None if bound is None else (java_class(number), symbol, bound)


def make_plan(node: Node) -> Plan:
    """The plan of a condition."""
    names = property_names(node)
    if len(names) != 1:
        return _split(node, names, make_plan)
    inner = _inner_plan(node)
    absent = outcome_of(inner, lambda leaf: leaf.absent if isinstance(leaf, Atom) else ALL)
    unknown = outcome_of(inner, lambda leaf: leaf.unknown)
    (name,) = names
    return Single(name, compile_value(node), inner, absent, unknown)


def outcome_of(
    plan: Plan,
    leaf_outcomes: Callable[[Leaf], Any],
    look_up: Callable[[bytes, Any], Any] = bytes.__getitem__,
    join: Callable[[bytes, Any, Any], Any] = lambda table, left, right: table[left << 4 | right],
) -> Any:
    """What a plan comes to, given that of each leaf: a set, or one for each of many values, which
    the last two know how to look up."""
    if isinstance(plan, Constant):
        return plan.outcomes
    if not isinstance(plan, Join):
        return leaf_outcomes(plan)
    outcomes = outcome_of(plan.operands[0], leaf_outcomes, look_up, join)
    if len(plan.operands) == 1:
        return look_up(plan.table, outcomes)
    for operand in plan.operands[1:]:
        if isinstance(outcomes, int) and outcomes in settled(plan.table):
            break
        right = outcome_of(operand, leaf_outcomes, look_up, join)
        outcomes = join(plan.table, outcomes, right)
    return outcomes


def _inner_plan(node: Node) -> Plan:
    """Down to the atoms, for a node that reads one property or none."""
    names = property_names(node)
    plan = _split(node, names, _inner_plan)
    if not isinstance(plan, Several):
        return plan
    absent = 1 << verdict_of(plan.verdict, {})
    return Atom(plan.names[0], node, plan.verdict, absent, plan.unknown)


def _split(node: Node, names: frozenset[str], plan_of: Callable[[Node], Plan]) -> Plan:
    """One step down; a Several where there is nothing to split."""
    if not names:
        return Constant(1 << verdict_of(compile_value(node), {}))
    match node:
        case And(parts=parts):
            return _chain(And, parts, plan_of)
        case Or(parts=parts):
            return _chain(Or, parts, plan_of)
        case Not(operand=operand):
            return Join((plan_of(operand),), join_tables()[Not])
        case Between():
            return plan_of(between_as_orders(node))
        case _:
            read = [child for child in children(node) if property_names(child)]
            if not all(map(is_boolean, read)):
                names_read = tuple(sorted(names))
                return Several(names_read, node, compile_value(node), _possible(node))
            # `(a = 1) = (b = 2)`, `(a = 1 AND b = 2) IS NULL`: all it reads is in its conditions.
            replaced: dict[str, Any] = {}
            for side in ("left", "right", "operand"):
                if (child := getattr(node, side, None)) in read and child is not None:
                    replaced[side] = stub(len(replaced))
            table = lookup_table(replace(node, **replaced), len(replaced))
            return Join(tuple(map(plan_of, read)), table)


def _chain(
    kind: type[And] | type[Or], parts: tuple[Node, ...], plan_of: Callable[[Node], Plan]
) -> Plan:
    """Neighbours with the same properties first, then from left to right."""
    groups = [tuple(group) for _, group in groupby(parts, key=property_names)]
    if len(groups) == 1:  # all of them alike: part by part
        groups = [(part,) for part in parts]
    plans = [plan_of(group[0] if len(group) == 1 else kind(group)) for group in groups]
    return Join(tuple(plans), join_tables()[kind])


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


def can_match(plan: Plan, stats: BlockStats) -> bool:
    """False only when no row of a block with these figures is TRUE."""

    def possible(leaf: Leaf) -> int:
        if isinstance(leaf, Several) or leaf.name in stats.excluded:
            return leaf.unknown
        column = stats.columns.get(leaf.name)
        if column is None:
            return leaf.absent
        return _of_values(leaf, column) | (leaf.absent if column.has_null else 0)

    return stats.has_odd or bool(outcome_of(plan, possible) & IS_TRUE)


def _of_values(leaf: Single | Atom, column: ColumnStats) -> int:
    if column.values is not None:
        name, verdict = leaf.name, leaf.verdict
        return union(lambda value: 1 << verdict_of(verdict, {name: value}), column.values)
    if isinstance(leaf, Single):
        whole: int = outcome_of(leaf.inner, lambda atom: _of_values(cast("Atom", atom), column))
        return whole
    node, low, high = leaf.node, column.low, column.high
    if isinstance(node, IsNull | Truth) and isinstance(node.operand, Property):
        return 1 << verdict_of(leaf.verdict, {leaf.name: "any"})  # the same for every value
    comparison = number_comparison(node)
    if low is None or high is None or comparison is None:
        return leaf.unknown
    wanted, symbol, bound = comparison
    if wanted is JavaClass.DOUBLE:
        low, high = float(low), float(high)
    inside, single = low <= bound <= high, low == high
    always, sometimes = {
        "=": (inside and single, inside),
        "<>": (not inside, not (inside and single)),
        ">": (low > bound, high > bound),
        ">=": (low >= bound, high >= bound),
        "<": (high < bound, low < bound),
        "<=": (high <= bound, low <= bound),
    }[symbol]
    # Decimal values are errors for a whole number, and so are wide ones for an Integer; the range
    # holds for those that are none.
    return (0 if always else 1 << FALSE) | (1 << TRUE if sometimes else 0) | 1 << ERROR
