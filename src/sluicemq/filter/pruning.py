"""Can a block match at all? Answered from figures of its columns, without reading them.

The plan is evaluated once for the whole block: each leaf gives the set of what can come of it for
the values there are, as if the properties had nothing to do with each other, so the answer may be
yes for nothing but never no for a block with a match.
"""

from sluicemq.filter.evaluate import constant_of
from sluicemq.filter.nodes import Equal, IsNull, JavaClass, Order, Property, Truth, java_class
from sluicemq.filter.outcomes import ERROR, FALSE, IS_TRUE, TRUE, union, verdict_of
from sluicemq.filter.plan import (
    MIRRORED,
    Atom,
    Column,
    Leaf,
    Plan,
    Several,
    outcome_of,
    symbol_of,
)
from sluicemq.record.column_stats import BlockStats, ColumnStats

_EITHER = 1 << FALSE | 1 << TRUE


def can_match(plan: Plan, stats: BlockStats) -> bool:
    """False only when no row of a block with these figures is TRUE."""
    if stats.has_odd:
        return True
    return bool(outcome_of(plan, lambda leaf: _possible(leaf, stats)) & IS_TRUE)


def _possible(leaf: Leaf, stats: BlockStats) -> int:
    if isinstance(leaf, Several):
        return leaf.unknown
    if leaf.name in stats.excluded:
        return leaf.unknown
    column = stats.columns.get(leaf.name)
    if column is None:
        return leaf.absent
    return _of_values(leaf, column) | (leaf.absent if column.has_null else 0)


def _of_values(leaf: Column | Atom, column: ColumnStats) -> int:
    if column.values is not None:
        name, verdict = leaf.name, leaf.verdict
        return union(lambda value: 1 << verdict_of(verdict, {name: value}), column.values)
    if isinstance(leaf, Column):
        return outcome_of(leaf.inner, lambda atom: _of_values(_atom(atom), column))
    return _of_range(leaf, column)


def _atom(leaf: Leaf) -> Atom:
    assert isinstance(leaf, Atom)  # an inner plan has no others
    return leaf


def _of_range(atom: Atom, column: ColumnStats) -> int:
    """A comparison with a number, when the least and the greatest value are known."""
    node, low, high = atom.node, column.low, column.high
    if isinstance(node, IsNull | Truth) and isinstance(node.operand, Property):
        return 1 << verdict_of(atom.verdict, {atom.name: "any"})  # the same for every value
    if low is None or high is None or not isinstance(node, Order | Equal):
        return atom.unknown
    number, symbol = node.right, symbol_of(node)
    if isinstance(node.right, Property):
        number, symbol = node.left, MIRRORED[symbol]
    elif not isinstance(node.left, Property):
        return atom.unknown
    bound = constant_of(number)
    if bound is None:
        return atom.unknown
    if java_class(number) is JavaClass.DOUBLE:
        low, high = float(low), float(high)
    # Decimal values are errors for a whole number, and so are wide ones for an Integer; the range
    # holds for those that are none.
    return _within(symbol, low, high, bound) | 1 << ERROR


def _within(symbol: str, low: float, high: float, bound: float) -> int:
    """What comes of `x symbol bound` for x from low to high."""
    inside, single = low <= bound <= high, low == high
    tests = {
        "=": (inside and single, inside),
        "<>": (not inside, not (inside and single)),
        ">": (low > bound, high > bound),
        ">=": (low >= bound, high >= bound),
        "<": (high < bound, low < bound),
        "<=": (high <= bound, low <= bound),
    }
    always, sometimes = tests[symbol]
    if always:
        return 1 << TRUE
    return _EITHER if sometimes else 1 << FALSE
