"""The plan by which the block engine evaluates an expression on columns.

A plan is a tree that is cut where the expression reads only one property:

    ConstantPlan            reads no property
    SinglePropertyPlan      reads one property: evaluated once for each distinct value, then the
                            results are gathered over the rows
    SeveralPropertiesPlan   compares several properties: evaluated for each combination of values
                            that occurs
    JoinPlan                AND, OR, NOT and comparisons of conditions: a look-up in a table

A verdict is the result of a condition for one message: FALSE, TRUE, NULL or ERROR, the numbers 0 to
3. A property may be unknown, because it is not a column or because only the range of its values is
known. Therefore plans compute with the *set* of verdicts that are possible. A verdict set is an
integer from 1 to 15 in which bit `1 << verdict` is set for each member: `1 << TRUE | 1 << NULL`
means TRUE or NULL. The union of two sets is `left | right`. A join is then one look-up,
`table[left << 4 | right]`, or `table[operand]` for a single operand. The tables are not written by
hand: they are computed with the scalar engine, with operands that evaluate to each combination of
verdicts. Therefore short circuits and errors behave as in the scalar engine.

A SinglePropertyPlan also contains a plan down to its atoms (its comparisons and bare properties,
the parts without AND, OR or NOT), for columns of thousands of values. An atom that compares with a
number does so for all values at once, and the same tables join the atoms. AND and OR are
associative, errors included (a test checks that), so neighbouring conditions on the same property
become one SinglePropertyPlan.

`can_match` evaluates a plan once for a whole block, from the statistics of its columns. Each leaf
gives the set of verdicts that its values can have, as if the properties were independent of each
other. Therefore the result may be True for a block without a match, but it is never False for a
block with one.
"""

from collections.abc import Callable, Mapping, Sequence
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
    """Evaluate a condition for the properties of one message, and return its verdict.

    The verdict is FALSE, TRUE, NULL or ERROR. ERROR means that a value could not be converted.
    """
    try:
        truth = condition(properties)
    except FilterEvaluationError:
        return ERROR
    return NULL if truth is None else int(truth)


def stub_condition(stub_number: int) -> Node:
    """Return the condition `stub<stub_number> = 1`, a comparison that can have any verdict."""
    return Equal(Property(f"stub{stub_number}"), Literal(1))


def build_join_table(node: Node, operand_count: int) -> bytes:
    """Return the table that maps the verdict sets of one or two operands to the set of their join.

    A verdict set is a number from 0 to 15, in which bit `1 << verdict` is set for each verdict that
    an operand may have. With one operand, the table has 16 bytes, and the index is the operand's
    set. With two operands, it has 256 bytes, and the index is `left << 4 | right`.

    `node` is the join, such as an AND. Its operands must be `stub_condition(0)` and, if
    `operand_count` is 2, `stub_condition(1)`. A stub is a condition whose verdict is chosen by a
    property.
    """
    # First the verdict of the join for each combination of single verdicts, by the scalar engine.
    condition = compile_node(node)
    result_sets: dict[tuple[int, ...], int] = {}
    for verdicts in product(range(4), repeat=operand_count):
        properties = {}
        for stub_number, verdict in enumerate(verdicts):
            if verdict != NULL:
                properties[f"stub{stub_number}"] = _STUB_VALUES[verdict]
        result_sets[verdicts] = 1 << evaluate_verdict(condition, properties)

    # Then, for each combination of verdict sets, the union of the verdicts that are possible.
    table = bytearray()
    for operand_sets in product(range(16), repeat=operand_count):
        possible_set = 0
        for verdicts, result_set in result_sets.items():
            if _are_members(verdicts, operand_sets):
                possible_set |= result_set
        table.append(possible_set)
    return bytes(table)


def _are_members(verdicts: Sequence[int], verdict_sets: Sequence[int]) -> bool:
    """Return whether each verdict is in the verdict set at the same index.

    A verdict set has bit `1 << verdict` set for each verdict that it contains.
    """
    return all(
        verdict_set >> verdict & 1
        for verdict, verdict_set in zip(verdicts, verdict_sets, strict=True)
    )


@cache
def verdict_tables() -> dict[type[Node], bytes]:
    """Return the tables of AND, OR and NOT, by the type of their nodes.

    A table maps the verdict sets of the operands to the verdict set of the result.
    `build_join_table` makes it.
    """
    stubs = (stub_condition(0), stub_condition(1))
    return {
        And: build_join_table(And(stubs), 2),
        Or: build_join_table(Or(stubs), 2),
        Not: build_join_table(Not(stubs[0]), 1),
    }


@cache
def settled_sets(table: bytes) -> frozenset[int]:
    """Return the verdict sets of the first operand of a join that the second cannot change.

    A join is an AND or OR, and `table` is its table. A verdict set is a number with bit `1 <<
    verdict` set for each possible verdict. With AND, the result has the sets {FALSE}, {ERROR} and
    {FALSE, ERROR}: the result of the AND is the same set for every second operand.
    """
    settled = set()
    for left_set in range(1, 16):
        # The entries for the right sets 1 to 15; 0 is not a verdict set.
        joined_sets = table[left_set << 4 | 1 : (left_set + 1) << 4]
        if set(joined_sets) == {left_set}:
            settled.add(left_set)
    return frozenset(settled)


def union_of_sets(verdict_set_of: Callable[[str], int], values: tuple[str, ...]) -> int:
    """Return the union of the verdict sets of all values; 0 if there are no values.

    `verdict_set_of(value)` returns a verdict set: a number with bit `1 << verdict` set for each
    possible verdict.
    """
    union = 0
    for value in values:
        union |= verdict_set_of(value)
        if union == ANY_VERDICT:  # further values cannot add a verdict
            break
    return union


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

    The operator has the property on its left: `5 < a` gives (INTEGER, ">", 5). Return None for any
    other node.
    """
    if not isinstance(node, Order | Equal):
        return None
    operator: str
    if isinstance(node, Order):
        operator = node.operator
    elif node.negated:
        operator = "<>"
    else:
        operator = "="

    if isinstance(node.right, Property):
        number_node = node.left
        operator = MIRRORED_OPERATORS[operator]
    elif isinstance(node.left, Property):
        number_node = node.right
    else:
        return None
    bound = constant_number(number_node)
    return None if bound is None else (java_class(number_node), operator, bound)


def make_plan(node: Node) -> Plan:
    """Return the plan of a condition: how its verdicts are computed for all rows of a block.

    A condition that reads exactly one property becomes a SinglePropertyPlan, which is evaluated
    once for each distinct value of the property. Any other condition is divided into its operands,
    whose plans are made in the same way.
    """
    names = property_names(node)
    if len(names) != 1:
        return _plan_by_operands(node, names, make_plan)
    atom_plan = _make_atom_plan(node)
    absent_set = combine_leaves(
        atom_plan, lambda leaf: leaf.absent_set if isinstance(leaf, AtomPlan) else ANY_VERDICT
    )
    possible_set = combine_leaves(atom_plan, lambda leaf: leaf.possible_set)
    (name,) = names
    return SinglePropertyPlan(name, compile_node(node), atom_plan, absent_set, possible_set)


def combine_leaves(
    plan: Plan,
    leaf_sets: Callable[[Leaf], Any],
    look_up: Callable[[bytes, Any], Any] = bytes.__getitem__,
    join: Callable[[bytes, Any, Any], Any] = lambda table, left, right: table[left << 4 | right],
) -> Any:
    """Return the verdict set of a plan, computed from the verdict sets of its leaves.

    A verdict set has bit `1 << verdict` set for each possible verdict. A plan is a tree. Its leaves
    are comparisons, and its inner nodes, the joins, are AND, OR and NOT. `leaf_sets(leaf)` returns
    the set of a leaf. It may instead return an array of sets, one for each row or value. Then the
    result is an array too, or an int if it is the same for all.

    `look_up(table, sets)` computes a join with one operand, and `join(table, left_sets,
    right_sets)` one with two. They must accept arrays if `leaf_sets` returns arrays. The remaining
    operands of a join are skipped when they cannot change its set.
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


def _make_atom_plan(node: Node) -> Plan:
    """Return the plan of a condition that reads at most one property, divided down to its atoms.

    An atom is a comparison or bare property. The leaves of the plan are AtomPlans and
    ConstantPlans.
    """
    names = property_names(node)
    plan = _plan_by_operands(node, names, _make_atom_plan)
    if not isinstance(plan, SeveralPropertiesPlan):
        return plan
    # The verdict for a message without the property.
    absent_set = 1 << evaluate_verdict(plan.condition, {})
    return AtomPlan(plan.names[0], node, plan.condition, absent_set, plan.possible_set)


def _plan_by_operands(node: Node, names: frozenset[str], plan_of: Callable[[Node], Plan]) -> Plan:
    """Return the plan of a condition, made of the plans of its operands.

    `names` are the properties that the condition reads. `plan_of(operand)` returns the plan of an
    operand that is a condition itself.

    - A condition without properties becomes a ConstantPlan.
    - AND, OR, NOT, BETWEEN and comparisons of conditions become a JoinPlan.
    - Any other comparison, such as `a > 5` or `a = b`, becomes a SeveralPropertiesPlan, even if it
      reads only one property.
    """
    if not names:
        return ConstantPlan(1 << evaluate_verdict(compile_node(node), {}))
    match node:
        case And(parts=conditions):
            return _plan_chain(And, conditions, plan_of)
        case Or(parts=conditions):
            return _plan_chain(Or, conditions, plan_of)
        case Not(operand=operand):
            return JoinPlan((plan_of(operand),), verdict_tables()[Not])
        case Between():
            return plan_of(expand_between(node))
        case _:
            reading_operands = [child for child in children(node) if property_names(child)]
            if all(map(is_boolean, reading_operands)):
                return _plan_comparison_of_conditions(node, reading_operands, plan_of)
            return SeveralPropertiesPlan(
                names=tuple(sorted(names)),
                node=node,
                condition=compile_node(node),
                possible_set=_find_possible_verdicts(node),
            )


def _plan_comparison_of_conditions(
    node: Node, reading_operands: list[Node], plan_of: Callable[[Node], Plan]
) -> Plan:
    """Return the plan of a comparison whose operands are conditions.

    Examples are `(a = 1) = (b = 2)` and `(a = 1 AND b = 2) IS NULL`. `reading_operands` are the
    operands that read properties, and `plan_of(operand)` returns the plan of one. In the
    comparison, they are replaced by stubs, conditions that can be given any verdict, to compute the
    table of the join.
    """
    stubs: dict[str, Any] = {}
    for side in ("left", "right", "operand"):
        child = getattr(node, side, None)
        if child is not None and child in reading_operands:
            stubs[side] = stub_condition(len(stubs))
    table = build_join_table(replace(node, **stubs), len(stubs))
    return JoinPlan(tuple(map(plan_of, reading_operands)), table)


def _plan_chain(
    node_class: type[And] | type[Or],
    conditions: tuple[Node, ...],
    plan_of: Callable[[Node], Plan],
) -> Plan:
    """Return the plan of an AND or OR (`node_class`) of conditions.

    Neighbouring conditions that read the same properties become one operand of the plan: `a > 1 AND
    a < 9 AND b = 2` has two operands. If all conditions read the same properties, each becomes an
    operand. `plan_of` returns the plan of an operand.
    """
    neighbours = [tuple(group) for _, group in groupby(conditions, key=property_names)]
    operands: list[Node]
    if len(neighbours) == 1:
        operands = list(conditions)
    else:
        operands = [group[0] if len(group) == 1 else node_class(group) for group in neighbours]
    return JoinPlan(tuple(map(plan_of, operands)), verdict_tables()[node_class])


def _find_possible_verdicts(node: Node) -> int:
    """Return the verdict set of a comparison: all verdicts that it can have for any message.

    Bit `1 << verdict` is set for each of them. The set may contain verdicts that cannot occur, but
    it contains every verdict that can.
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
    """Return False if a plan is certainly not TRUE for any row of a block, else True.

    `stats` describes the values in the columns of the block. True does not mean that a row matches.
    It is also returned if the block has odd rows, which could not be decoded.
    """

    def possible_verdicts(leaf: Leaf) -> int:
        """Return the set of the verdicts that a leaf can have for any row of the block."""
        if isinstance(leaf, SeveralPropertiesPlan) or leaf.name in stats.excluded:
            return leaf.possible_set
        column = stats.columns.get(leaf.name)
        if column is None:
            return leaf.absent_set
        verdict_set = _find_verdicts_of_column(leaf, column)
        if column.has_null:
            verdict_set |= leaf.absent_set
        return verdict_set

    if stats.has_odd:
        return True
    return bool(combine_leaves(plan, possible_verdicts) & ONLY_TRUE)


def _find_verdicts_of_column(leaf: SinglePropertyPlan | AtomPlan, column: ColumnStats) -> int:
    """Return the verdicts that a condition on one property can have for the values of a column.

    The result is a number with bit `1 << verdict` set for each possible verdict. `column` has
    statistics about the values. Rows without a value are not considered. The result is exact if the
    statistics list the distinct values. Otherwise it may contain verdicts that do not occur, but it
    lacks none that does.
    """
    if column.values is not None:
        return union_of_sets(
            lambda value: 1 << evaluate_verdict(leaf.condition, {leaf.name: value}), column.values
        )
    if isinstance(leaf, AtomPlan):
        return _find_verdicts_of_range(leaf, column)
    union: int = combine_leaves(
        leaf.atom_plan, lambda atom: _find_verdicts_of_range(cast("AtomPlan", atom), column)
    )
    return union


def _find_verdicts_of_range(atom: AtomPlan, column: ColumnStats) -> int:
    """Return the verdicts that a comparison can have for numbers in the range of a column.

    The result is a number with bit `1 << verdict` set for each possible verdict. The range is
    `column.low` to `column.high`, both included. The result is `atom.possible_set` if the range is
    unknown, or if the atom does not compare the property with a number.
    """
    node = atom.node
    if isinstance(node, IsNull | BareProperty) and isinstance(node.operand, Property):
        # Every value has the same verdict.
        return 1 << evaluate_verdict(atom.condition, {atom.name: "any"})
    low = column.low
    high = column.high
    comparison = as_number_comparison(node)
    if low is None or high is None or comparison is None:
        return atom.possible_set
    number_class, operator, bound = comparison
    if number_class is JavaClass.DOUBLE:
        low = float(low)
        high = float(high)

    is_always_true, is_sometimes_true = _compare_range(operator, low, high, bound)
    # ERROR is always possible: values with a fraction are errors for a whole number, and large
    # values are errors for an Integer. The range describes only values that can be converted.
    possible_set = 1 << ERROR
    if not is_always_true:
        possible_set |= 1 << FALSE
    if is_sometimes_true:
        possible_set |= 1 << TRUE
    return possible_set


def _compare_range(operator: str, low: float, high: float, bound: float) -> tuple[bool, bool]:
    """Return two bools: whether all numbers in a range fulfil a comparison, and whether any may.

    The comparison is `number operator bound`, and the range is `low` to `high`, both included.
    """
    is_inside = low <= bound <= high
    is_single = low == high
    return {
        "=": (is_inside and is_single, is_inside),
        "<>": (not is_inside, not (is_inside and is_single)),
        ">": (low > bound, high > bound),
        ">=": (low >= bound, high >= bound),
        "<": (high < bound, low < bound),
        "<=": (high <= bound, low <= bound),
    }[operator]
