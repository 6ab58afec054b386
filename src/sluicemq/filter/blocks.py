"""A plan on the columns of a block, with NumPy: the outcome of every row.

Every array here holds sets of outcomes (`outcomes.py`), one a row, or, for what is the same in all
rows, is just the number. A Column is decided for its distinct values, then gathered:
`table[codes]`. The last place of the table is for rows without the property, whose code is -1.

Columns of few values are given to the scalar engine, value by value. In a column of thousands the
atoms are decided one by one: comparisons with numbers for all values at once
(`column_numbers.py`), with texts by looking those texts up; two such columns that are compared with
each other are in `pairs.py`.

A join goes from left to right, and on only with the rows that are still open: what a row comes to
is settled by FALSE in an AND, by TRUE in an OR, by an error in both. Neighbours change places when
the one that settles more stands behind and the table says, for the outcomes that occur here, that
their order makes no difference (with errors it does). So of `region = 'hz' AND customer = 'c7'` the
second is gathered for all rows and the first for a handful.
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from sluicemq.filter.column_numbers import Numbers, parse_numbers
from sluicemq.filter.evaluate import Verdict, constant_of
from sluicemq.filter.nodes import Equal, In, JavaClass, Literal, Node, Order, Property, java_class
from sluicemq.filter.outcomes import (
    ERROR,
    FALSE,
    IS_TRUE,
    TRUE,
    VERDICT_OF,
    settled,
    verdict_of,
)
from sluicemq.filter.pairs import pair_outcomes
from sluicemq.filter.plan import (
    MIRRORED,
    Atom,
    Column,
    Constant,
    Join,
    Leaf,
    Plan,
    Several,
    symbol_of,
)
from sluicemq.record.columns import ColumnBlock, Values

Outcomes: TypeAlias = NDArray[np.uint8] | int
_T = TypeVar("_T")

SCALAR_VALUES_MAX: Final = 48  # below it a loop over the values is faster than some NumPy calls
PAIRS_SCALAR_MAX: Final = 2048  # the same for two columns that are compared with each other
NARROW_FACTOR: Final = 3  # so many times fewer open rows are worth to be picked out
COMBINATIONS_DENSE_MAX: Final = 1 << 20  # a table of one byte and one int32 for each
FEW: Final = 3  # so many comparisons of a whole block are faster than a look-up for each row

_VERDICT_OF: Final = VERDICT_OF.ljust(256, b"\0")


def block_verdicts(plan: Plan, block: ColumnBlock) -> NDArray[np.uint8]:
    """One verdict a row (`outcomes`); rows that could not be decoded need the record."""
    outcomes = _on_rows(plan, _Rows(block, {}))
    if isinstance(outcomes, int):
        verdicts = np.full(block.rows, VERDICT_OF[outcomes], np.uint8)
    else:
        verdicts = _translated(_VERDICT_OF, outcomes)
    if len(block.odd):
        verdicts[block.odd] = VERDICT_OF[0]
    return verdicts


def block_count(plan: Plan, names: frozenset[str], block: ColumnBlock) -> int | None:
    """How many rows are TRUE; None when the columns cannot tell of each. `names` are those that
    the plan reads."""
    if len(block.odd) or not block.excluded.isdisjoint(names):
        return None
    outcomes = _on_rows(plan, _Rows(block, {}))
    if isinstance(outcomes, int):
        return block.rows if outcomes == IS_TRUE else 0
    return int(np.count_nonzero(outcomes == IS_TRUE))


def _translated(table: bytes, outcomes: NDArray[Any]) -> NDArray[np.uint8]:
    """`table[outcomes]` with a table of 256 places, twice as fast."""
    return np.frombuffer(bytearray(outcomes).translate(table), np.uint8)


def _evaluate(plan: Plan, of_leaf: Callable[[Leaf], Outcomes]) -> Outcomes:
    if isinstance(plan, Constant):
        return plan.outcomes
    if not isinstance(plan, Join):
        return of_leaf(plan)
    outcomes = _evaluate(plan.operands[0], of_leaf)
    if len(plan.operands) == 1:
        return _looked_up(plan.table, outcomes)
    for operand in plan.operands[1:]:
        if isinstance(outcomes, int) and outcomes in settled(plan.table):
            break
        outcomes = _joined(plan.table, outcomes, _evaluate(operand, of_leaf))
    return outcomes


def _looked_up(table: bytes, operand: Outcomes) -> Outcomes:
    if isinstance(operand, int):
        return table[operand]
    return _translated(table.ljust(256, b"\0"), operand)


def _joined(table: bytes, left: Outcomes, right: Outcomes) -> Outcomes:
    if isinstance(right, int):
        return _looked_up(table[right::16], left)
    if isinstance(left, int):
        return _looked_up(table[left << 4 : left + 1 << 4], right)
    return _translated(table, left << 4 | right)


# --- on the rows of a block


class _Rows(NamedTuple):
    """Rows of a block, and the tables of its columns that are made already, by leaf."""

    block: ColumnBlock
    tables: dict[Column, Outcomes]

    def table(self, leaf: Column) -> Outcomes:
        """The outcome of each value, the last one for rows without; a number: of all rows."""
        found = self.tables.get(leaf)
        if found is None:
            found = self.tables[leaf] = _table(leaf, self.block)
        return found

    def some(self, rows: NDArray[np.intp]) -> "_Rows":
        return _Rows(self.block.some(rows), self.tables)


def _table(leaf: Column, block: ColumnBlock) -> Outcomes:
    if leaf.name in block.excluded:
        return leaf.unknown
    column = block.columns.get(leaf.name)
    if column is None:
        return leaf.absent
    table = _on_values(leaf, column.values)
    if isinstance(table, int):
        table = np.full(len(column.values) + 1, table, np.uint8)
    table[-1] = leaf.absent
    return table


def _on_rows(plan: Plan, rows: _Rows) -> Outcomes:
    if isinstance(plan, Constant):
        return plan.outcomes
    if isinstance(plan, Several):
        return _several(plan, rows.block)
    if isinstance(plan, Column):
        table = rows.table(plan)
        if isinstance(table, int):
            return table
        return _gathered(table, rows.block.columns[plan.name].codes)
    assert isinstance(plan, Join)  # atoms are inside of columns
    if len(plan.operands) == 1:
        return _looked_up(plan.table, _on_rows(plan.operands[0], rows))
    first, *rest = _in_best_order(plan, rows)
    return _join_rest(plan.table, _on_rows(first, rows), rest, rows)


def _join_rest(table: bytes, outcomes: Outcomes, rest: list[Plan], rows: _Rows) -> Outcomes:
    """What comes of the operands behind those that came to `outcomes`."""
    for at, operand in enumerate(rest):
        if isinstance(outcomes, int):
            if outcomes in settled(table):
                break
        else:
            open_rows = _open_rows(table, outcomes)
            if len(open_rows) * NARROW_FACTOR <= len(outcomes):
                if len(open_rows):
                    narrow = rows.some(open_rows)
                    outcomes[open_rows] = _join_rest(table, outcomes[open_rows], rest[at:], narrow)
                break
        outcomes = _joined(table, outcomes, _on_rows(operand, rows))
    return outcomes


def _open_rows(table: bytes, outcomes: NDArray[np.uint8]) -> NDArray[np.intp]:
    """Those for which what follows matters."""
    if len(settled(table)) > FEW:
        return np.flatnonzero(_is_open(table).take(outcomes))
    is_open = np.ones(len(outcomes), np.bool_)
    for number in settled(table):
        is_open &= outcomes != number
    return np.flatnonzero(is_open)


@cache
def _is_open(table: bytes) -> NDArray[np.bool_]:
    """By outcome: does what follows matter?"""
    return np.array([number not in settled(table) for number in range(16)])


def _in_best_order(join: Join, rows: _Rows) -> list[Plan]:
    """The operands, of those at the beginning that can change places the ones that settle most
    first: by how many of their values do."""
    shares: list[float] = []
    present: list[list[int]] = []
    for operand in join.operands:
        table = rows.table(operand) if isinstance(operand, Column) else None
        if table is None:
            break
        counts = np.bincount([table] if isinstance(table, int) else table, minlength=16)
        occurs = np.flatnonzero(counts).tolist()
        if not all(_commutes(join.table, occurs, other) for other in present):
            break
        present.append(occurs)
        shares.append(float((counts * _is_open(join.table)).sum() / counts.sum()))
    order = sorted(range(len(shares)), key=shares.__getitem__)
    return [*(join.operands[at] for at in order), *join.operands[len(shares) :]]


def _commutes(table: bytes, left: list[int], right: list[int]) -> bool:
    return all(table[a << 4 | b] == table[b << 4 | a] for a in left for b in right)


def _gathered(table: NDArray[np.uint8], codes: NDArray[Any]) -> Outcomes:
    """`table[codes]`, or the number when it is the same for all rows."""
    usual = int(np.bincount(table[:-1], minlength=1).argmax()) if len(table) > 1 else int(table[0])
    others = np.flatnonzero(table != usual).tolist()
    if others == [len(table) - 1] and not (codes < 0).any():
        others = []
    if not others:
        return usual
    if len(others) <= FEW:
        found = np.full(len(codes), usual, np.uint8)
        for at in others:
            code = at if at < len(table) - 1 else -1
            found += (codes == code).view(np.uint8) * np.uint8((int(table[at]) - usual) & 0xFF)
        return found
    return table.take(codes, mode="wrap")


def _several(leaf: Several, block: ColumnBlock) -> Outcomes:
    """The scalar engine on every combination of values that occurs."""
    if not block.excluded.isdisjoint(leaf.names):
        return leaf.unknown
    names = [name for name in leaf.names if name in block.columns]
    if not names:
        return 1 << verdict_of(leaf.verdict, {})
    columns = [block.columns[name] for name in names]
    if len(names) == 2 and prod(len(column.values) for column in columns) > PAIRS_SCALAR_MAX:
        outcomes = pair_outcomes(leaf, block.columns)
        if outcomes is not None:
            return outcomes
    combinations = _combinations([(column.codes, len(column.values)) for column in columns])
    found = np.empty(len(combinations.rows), np.uint8)
    codes = zip(*(column.codes[combinations.rows].tolist() for column in columns), strict=True)
    for at, chosen in enumerate(codes):
        properties = {
            name: column.values[code]
            for name, column, code in zip(names, columns, chosen, strict=True)
            if code >= 0
        }
        found[at] = 1 << verdict_of(leaf.verdict, properties)
    return found.take(combinations.numbers)


class Combinations(NamedTuple):
    """`rows`: one row for each combination of codes that occurs; `numbers`: a row's combination."""

    rows: NDArray[np.intp]
    numbers: NDArray[np.intp]


def _combinations(columns: Sequence[tuple[NDArray[Any], int]]) -> Combinations:
    """Of columns of codes, each with the number of its values."""
    keys, size = np.zeros(len(columns[0][0]), np.int64), 1
    for codes, count in columns:
        if size * (count + 1) >= 1 << 62:
            distinct, keys = np.unique(keys, return_inverse=True)
            size = len(distinct)
        keys = keys * (count + 1) + (codes.astype(np.int64) + 1)
        size *= count + 1
    if size > COMBINATIONS_DENSE_MAX:
        _, rows, numbers = np.unique(keys, return_index=True, return_inverse=True)
        return Combinations(rows, numbers)
    row_of = np.full(size, -1, np.int32)
    row_of[keys] = np.arange(len(keys), dtype=np.int32)
    present = np.flatnonzero(row_of >= 0)
    rows = row_of[present].astype(np.intp)
    row_of[present] = np.arange(len(present), dtype=np.int32)
    return Combinations(rows, row_of[keys].astype(np.intp))


# --- one property on its distinct values


def _on_values(leaf: Column, values: tuple[str, ...]) -> Outcomes:
    """An outcome for each value, and a last place that the caller fills."""
    if len(values) <= SCALAR_VALUES_MAX:
        return _by_scalar(leaf.name, leaf.verdict, values)
    numbers: dict[JavaClass, Numbers] = {}
    return _evaluate(leaf.inner, lambda inner: _atom_on_values(inner, values, numbers))


def _by_scalar(name: str, verdict: Verdict, values: tuple[str, ...]) -> NDArray[np.uint8]:
    found = bytearray(len(values) + 1)
    properties: dict[str, str] = {}
    for at, value in enumerate(values):
        properties[name] = value
        found[at] = 1 << verdict_of(verdict, properties)
    return np.frombuffer(found, np.uint8)


def _atom_on_values(
    leaf: Leaf, values: tuple[str, ...], parsed: dict[JavaClass, Numbers]
) -> Outcomes:
    assert isinstance(leaf, Atom)  # an inner plan has no others
    texts = _texts(leaf.node)
    if texts is not None:
        return _by_texts(leaf, texts, values)
    comparison = _number_comparison(leaf.node)
    if comparison is None:
        return _by_scalar(leaf.name, leaf.verdict, values)
    wanted, test, bound = comparison
    if wanted not in parsed:
        parsed[wanted] = _noted(values, wanted, lambda: parse_numbers(values, wanted))
    numbers, errors = parsed[wanted]
    found = np.empty(len(values) + 1, np.uint8)
    found[:-1] = np.where(test(numbers, bound), np.uint8(1 << TRUE), np.uint8(1 << FALSE))
    if errors is not None:
        found[:-1][errors] = 1 << ERROR
    found[-1] = leaf.absent
    return found


def _noted(values: tuple[str, ...], key: object, make: Callable[[], _T]) -> _T:
    """What depends on nothing but the values, made once for all filters."""
    if not isinstance(values, Values):
        return make()
    found: _T | None = values.notes.get(key)
    if found is None:
        found = values.notes[key] = make()
    return found


def _texts(node: Node) -> frozenset[str] | None:
    """The texts that a property is compared with, by nothing but "is it that one?"; else None."""
    if isinstance(node, In):
        return frozenset(node.values)
    if isinstance(node, Equal) and isinstance(node.left, Property):
        text = node.right.value if isinstance(node.right, Literal) else None
        return frozenset((text,)) if isinstance(text, str) else None
    return None


def _by_texts(leaf: Atom, texts: frozenset[str], values: tuple[str, ...]) -> NDArray[np.uint8]:
    """The scalar engine on each of the texts, and on one text that is none of them, for the
    rest."""
    other = "".join(texts) + "."  # longer than each
    found = np.full(len(values) + 1, 1 << verdict_of(leaf.verdict, {leaf.name: other}), np.uint8)
    places = _noted(values, "places", lambda: {value: at for at, value in enumerate(values)})
    for text in texts:
        at = places.get(text)
        if at is not None:
            found[at] = 1 << verdict_of(leaf.verdict, {leaf.name: text})
    found[-1] = leaf.absent
    return found


_Test: TypeAlias = Callable[[NDArray[Any], float], NDArray[np.bool_]]

# As the scalar engine's: only NaN differs, which is greater than every constant. Constants are
# never NaN nor zero as floats, so == is compareTo == 0.
_TESTS: Final[dict[str, _Test]] = {
    ">": lambda numbers, bound: ~(numbers <= bound),
    ">=": lambda numbers, bound: ~(numbers < bound),
    "<": lambda numbers, bound: numbers < bound,
    "<=": lambda numbers, bound: numbers <= bound,
    "=": lambda numbers, bound: numbers == bound,
    "<>": lambda numbers, bound: numbers != bound,
}


def _number_comparison(node: Node) -> tuple[JavaClass, _Test, int | float] | None:
    """Of a property with a number, whichever stands left; None for anything else."""
    if not isinstance(node, Order | Equal):
        return None
    number, symbol = node.right, symbol_of(node)
    if isinstance(node.right, Property):
        symbol, number = MIRRORED[symbol], node.left
    elif not isinstance(node.left, Property):
        return None
    bound = constant_of(number)
    return None if bound is None else (java_class(number), _TESTS[symbol], bound)
