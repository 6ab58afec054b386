"""The plan by which the block engine evaluates an expression on columns.

A plan is a tree that is cut where the expression reads only one property:

    ConstantPlan            reads no property
    SinglePropertyPlan      reads one property: evaluated once for each distinct value, then the
                            results are gathered over the rows
    SeveralPropertiesPlan   compares several properties: evaluated for each combination of values
                            that occurs
    JoinPlan                AND, OR, NOT and comparisons of conditions: a look-up in a table

A verdict is FALSE, TRUE, NULL or ERROR. A property may be unknown, because it is not a column or
because only the range of its values is known. Therefore plans compute with the *set* of verdicts
that are possible: a verdict set of four bits, from 1 to 15. A join is then one look-up,
`table[left << 4 | right]`, or `table[operand]` for a single operand. The tables are not written by
hand: they are computed with the scalar engine, with operands that evaluate to each combination of
verdicts. Therefore short circuits and errors behave as in the scalar engine.

A SinglePropertyPlan also contains a plan down to its atoms, for columns of thousands of values. An
atom that compares with a number does so for all values at once, and the same tables join the atoms.
AND and OR are associative, errors included (a test checks that), so neighbouring conditions on the
same property become one SinglePropertyPlan.

`can_match` evaluates a plan once for a whole block, from the statistics of its columns. Each leaf
gives the set of verdicts that its values can have, as if the properties were independent of each
other. Therefore the result may be True for a block without a match, but it is never False for a
block with one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, product
from typing import Any, TypeAlias, cast

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.evaluate import (
    MIRRORED_OPERATORS,
    ConditionFunction,
    compile_node,
    constant_number,
    expand_between,
)
from sluicemq.filter.nodes import (
    And,
    BareProperty,
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
    children,
    is_boolean,
    java_class,
    property_names,
)
from sluicemq.record.columns import BlockStats, ColumnStats

FALSE, TRUE, NULL, ERROR, NEEDS_RECORD = range(5)
"""The verdicts. NEEDS_RECORD means that the columns do not decide."""
ANY_VERDICT = 0b1111
"""The verdict set of all four verdicts."""
ONLY_TRUE = 1 << TRUE
"""The verdict set that contains only TRUE."""
VERDICT_OF_SET = bytes(
    [
        NEEDS_RECORD,
        *(
            members.bit_length() - 1 if members.bit_count() == 1 else NEEDS_RECORD
            for members in range(1, 16)
        ),
    ]
)
"""For each verdict set, its verdict if it has exactly one, else NEEDS_RECORD."""

# The values of a property `stub` for which `stub = 1` has each verdict. Without a value it is NULL.
_STUB_VALUES: dict[int, str] = {FALSE: "0", TRUE: "1", ERROR: "x"}


def evaluate_verdict(condition: ConditionFunction, properties: Mapping[str, str]) -> int:
    """Return FALSE, TRUE, NULL or ERROR for one message, as the scalar engine evaluates it."""
    try:
        result = condition(properties)
    except FilterEvaluationError:
        return ERROR
    return NULL if result is None else int(result)


def stub_condition(number: int) -> Node:
    """Return a condition that can have each of the four verdicts, on a property of its own."""
    return Equal(Property(f"stub{number}"), Literal(1))


def build_join_table(node: Node, operands: int) -> bytes:
    """Return the table of a join: for each verdict set of its operands, the set of its verdicts.

    The operands of `node` must be `stub_condition(0)` and, if there are two operands,
    `stub_condition(1)`. The index into the table is the verdict set of the operand, or
    `left << 4 | right`.
    """
    condition = compile_node(node)
    set_of_verdicts = {}
    for verdicts in product(range(4), repeat=operands):
        properties = {
            f"stub{number}": _STUB_VALUES[verdict]
            for number, verdict in enumerate(verdicts)
            if verdict != NULL
        }
        set_of_verdicts[verdicts] = 1 << evaluate_verdict(condition, properties)
    table = bytearray()
    for sets in product(range(16), repeat=operands):
        united = 0
        for verdicts, result in set_of_verdicts.items():
            pairs = zip(sets, verdicts, strict=True)
            if all(members >> verdict & 1 for members, verdict in pairs):
                united |= result
        table.append(united)
    return bytes(table)


@cache
def boolean_join_tables() -> dict[type[Node], bytes]:
    """Return the tables of AND, OR and NOT, by the type of their nodes."""
    stubs = (stub_condition(0), stub_condition(1))
    return {
        And: build_join_table(And(stubs), 2),
        Or: build_join_table(Or(stubs), 2),
        Not: build_join_table(Not(stubs[0]), 1),
    }


@cache
def settled_sets(table: bytes) -> frozenset[int]:
    """Return the verdict sets of a left operand that decide the join, whatever the right one is.

    They result from short circuits and errors.
    """
    return frozenset(
        left for left in range(1, 16) if set(table[left << 4 | 1 : left + 1 << 4]) == {left}
    )


def union_of_sets(verdict_set_of: Callable[[str], int], values: tuple[str, ...]) -> int:
    """Return the union of the verdict sets of some values."""
    united = 0
    for value in values:
        united |= verdict_set_of(value)
        if united == ANY_VERDICT:
            break
    return united


@dataclass(frozen=True, slots=True, eq=False)
class ConstantPlan:
    """A condition that reads no property. `verdict_set` contains its only verdict."""

    verdict_set: int


@dataclass(frozen=True, slots=True, eq=False)
class AtomPlan:
    """A comparison that reads one property, or a bare property.

    `name` is the property and `condition` the compiled `node`. `absent_set` is the verdict set for
    messages without the property. `possible_set` contains all verdicts that the atom can have.
    """

    name: str
    node: Node
    condition: ConditionFunction
    absent_set: int
    possible_set: int


@dataclass(frozen=True, slots=True, eq=False)
class SinglePropertyPlan:
    """A part of an expression that reads one property.

    `name` is the property, `condition` the compiled part, and `atom_plan` the plan of the same part
    down to its atoms. `absent_set` is the verdict set for messages without the property.
    `possible_set` contains all verdicts that the part can have.
    """

    name: str
    condition: ConditionFunction
    atom_plan: "Plan"
    absent_set: int
    possible_set: int


@dataclass(frozen=True, slots=True, eq=False)
class SeveralPropertiesPlan:
    """A comparison of several properties with each other.

    `names` are the properties in alphabetical order and `condition` is the compiled `node`.
    `possible_set` contains all verdicts that it can have.
    """

    names: tuple[str, ...]
    node: Node
    condition: ConditionFunction
    possible_set: int


@dataclass(frozen=True, slots=True, eq=False)
class JoinPlan:
    """Conditions that are joined by look-ups in `table`, from left to right.

    The verdict set of one operand is replaced by `table[set]`. For more operands, the sets so far
    and the set of the next operand become `table[so_far << 4 | next]`.
    """

    operands: tuple["Plan", ...]
    table: bytes


Plan: TypeAlias = ConstantPlan | AtomPlan | SinglePropertyPlan | SeveralPropertiesPlan | JoinPlan
Leaf: TypeAlias = AtomPlan | SinglePropertyPlan | SeveralPropertiesPlan


def as_number_comparison(node: Node) -> tuple[JavaClass, str, int | float] | None:
    """Return (class of the number, operator, number) for a comparison of a property and a number.

    If the number is on the left, the operator is mirrored. Return None for any other node.
    """
    if not isinstance(node, Order | Equal):
        return None
    number = node.right
    symbol: str = node.operator if isinstance(node, Order) else "<>" if node.negated else "="
    if isinstance(node.right, Property):
        symbol, number = MIRRORED_OPERATORS[symbol], node.left
    elif not isinstance(node.left, Property):
        return None
    bound = constant_number(number)
    return None if bound is None else (java_class(number), symbol, bound)


def make_plan(node: Node) -> Plan:
    """Return the plan of a condition."""
    names = property_names(node)
    if len(names) != 1:
        return _split(node, names, make_plan)
    inner = _atom_plan(node)
    absent = combine_leaves(
        inner, lambda leaf: leaf.absent_set if isinstance(leaf, AtomPlan) else ANY_VERDICT
    )
    unknown = combine_leaves(inner, lambda leaf: leaf.possible_set)
    (name,) = names
    return SinglePropertyPlan(name, compile_node(node), inner, absent, unknown)


def combine_leaves(
    plan: Plan,
    leaf_sets: Callable[[Leaf], Any],
    look_up: Callable[[bytes, Any], Any] = bytes.__getitem__,
    join: Callable[[bytes, Any, Any], Any] = lambda table, left, right: table[left << 4 | right],
) -> Any:
    """Return the verdict set of a plan, computed from the verdict sets of its leaves.

    `leaf_sets` returns the set of a leaf. It may instead return an array of sets, one for each
    row or value. Then `look_up(table, sets)` and `join(table, left_sets, right_sets)` must accept
    arrays, and the result is an array, or an int if it is the same for all.
    """
    if isinstance(plan, ConstantPlan):
        return plan.verdict_set
    if not isinstance(plan, JoinPlan):
        return leaf_sets(plan)
    sets = combine_leaves(plan.operands[0], leaf_sets, look_up, join)
    if len(plan.operands) == 1:
        return look_up(plan.table, sets)
    for operand in plan.operands[1:]:
        if isinstance(sets, int) and sets in settled_sets(plan.table):
            break
        right = combine_leaves(operand, leaf_sets, look_up, join)
        sets = join(plan.table, sets, right)
    return sets


def _atom_plan(node: Node) -> Plan:
    """Return the plan down to the atoms of a node that reads one property or none."""
    names = property_names(node)
    plan = _split(node, names, _atom_plan)
    if not isinstance(plan, SeveralPropertiesPlan):
        return plan
    absent = 1 << evaluate_verdict(plan.condition, {})
    return AtomPlan(plan.names[0], node, plan.condition, absent, plan.possible_set)


def _split(node: Node, names: frozenset[str], plan_of: Callable[[Node], Plan]) -> Plan:
    """Return the plan of a node, with `plan_of` for its operands.

    Return a SeveralPropertiesPlan for a comparison that cannot be split, even if it reads only one
    property. `names` are the properties that the node reads.
    """
    if not names:
        return ConstantPlan(1 << evaluate_verdict(compile_node(node), {}))
    match node:
        case And(parts=parts):
            return _chain(And, parts, plan_of)
        case Or(parts=parts):
            return _chain(Or, parts, plan_of)
        case Not(operand=operand):
            return JoinPlan((plan_of(operand),), boolean_join_tables()[Not])
        case Between():
            return plan_of(expand_between(node))
        case _:
            read = [child for child in children(node) if property_names(child)]
            if not all(map(is_boolean, read)):
                names_read = tuple(sorted(names))
                return SeveralPropertiesPlan(names_read, node, compile_node(node), _possible(node))
            # A comparison such as `(a = 1) = (b = 2)` or `(a = 1 AND b = 2) IS NULL`, which reads
            # properties only in the conditions that it compares.
            replaced: dict[str, Any] = {}
            for side in ("left", "right", "operand"):
                if (child := getattr(node, side, None)) in read and child is not None:
                    replaced[side] = stub_condition(len(replaced))
            table = build_join_table(replace(node, **replaced), len(replaced))
            return JoinPlan(tuple(map(plan_of, read)), table)


def _chain(
    kind: type[And] | type[Or], parts: tuple[Node, ...], plan_of: Callable[[Node], Plan]
) -> Plan:
    """Return the plan of an AND or OR.

    Neighbouring parts that read the same properties become one operand.
    """
    groups = [tuple(group) for _, group in groupby(parts, key=property_names)]
    if len(groups) == 1:  # all parts read the same properties, so they are split one by one
        groups = [(part,) for part in parts]
    plans = [plan_of(group[0] if len(group) == 1 else kind(group)) for group in groups]
    return JoinPlan(tuple(plans), boolean_join_tables()[kind])


def _possible(node: Node) -> int:
    """Return a verdict set that contains all verdicts that a comparison can have.

    It may contain verdicts that cannot occur.
    """
    match node:
        case In():
            return 1 << FALSE | 1 << TRUE | 1 << NULL
        case Equal(left=Property(), right=Literal(value=str())):
            return 1 << FALSE | 1 << TRUE | 1 << NULL
        case Equal(left=Property(), right=Property()):
            return 1 << FALSE | 1 << TRUE | 1 << NULL
        case IsNull(operand=Property()) | Match(operand=Property()):
            return 1 << FALSE | 1 << TRUE
        case BareProperty(operand=Property()):
            return 1 << FALSE | 1 << NULL
        case Order() | Between():
            return 1 << FALSE | 1 << TRUE | 1 << NULL | 1 << ERROR
        case _:
            return ANY_VERDICT


def can_match(plan: Plan, stats: BlockStats) -> bool:
    """Return False only if no row of a block with these statistics can be TRUE."""

    def possible_verdicts(leaf: Leaf) -> int:
        if isinstance(leaf, SeveralPropertiesPlan) or leaf.name in stats.excluded:
            return leaf.possible_set
        column = stats.columns.get(leaf.name)
        if column is None:
            return leaf.absent_set
        return _value_verdicts(leaf, column) | (leaf.absent_set if column.has_null else 0)

    return stats.has_odd or bool(combine_leaves(plan, possible_verdicts) & ONLY_TRUE)


def _value_verdicts(leaf: SinglePropertyPlan | AtomPlan, column: ColumnStats) -> int:
    """Return the set of verdicts that the values of a column can have, without null."""
    if column.values is not None:
        name, condition = leaf.name, leaf.condition
        return union_of_sets(
            lambda value: 1 << evaluate_verdict(condition, {name: value}), column.values
        )
    if isinstance(leaf, SinglePropertyPlan):
        whole: int = combine_leaves(
            leaf.atom_plan, lambda atom: _value_verdicts(cast("AtomPlan", atom), column)
        )
        return whole
    node, low, high = leaf.node, column.low, column.high
    if isinstance(node, IsNull | BareProperty) and isinstance(node.operand, Property):
        # Every value has the same verdict.
        return 1 << evaluate_verdict(leaf.condition, {leaf.name: "any"})
    comparison = as_number_comparison(node)
    if low is None or high is None or comparison is None:
        return leaf.possible_set
    number_class, symbol, bound = comparison
    if number_class is JavaClass.DOUBLE:
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
    # Values with a fraction are errors for a whole number, and so are large values for an Integer.
    # The range describes only values that can be converted.
    return (0 if always else 1 << FALSE) | (1 << TRUE if sometimes else 0) | 1 << ERROR
