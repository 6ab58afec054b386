"""A plan on the columns of a block, with NumPy: the outcome of every row.

Every array here holds sets of outcomes (`plan`), one a row, or, for what is the same in all rows,
is just the number. A column is decided for its distinct values, then gathered: `table[codes]`. The
last place of the table is for rows without the property, whose code is -1.

Columns of few values are given to the scalar engine, value by value. In a column of thousands the
atoms are decided one by one: comparisons with a number for all values at once (read by Python where
all texts are so plain that Java reads them alike), comparisons with texts by looking those texts
up. Two such columns beside each other (`price > cost`) are sorted into five cases, and the scalar
engine is asked about an example of each; order is that of Double.compareTo, NaN above the rest.

A join goes from left to right, and on only with the rows that are still open: what a row comes to
is settled by FALSE in an AND, by TRUE in an OR, by an error in both. Neighbours change places when
the one that settles more stands behind and the table says, for the outcomes that occur here, that
their order makes no difference (with errors it does). So of `region = 'hz' AND customer = 'c7'` the
second is gathered for all rows and the first for a handful.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from sluicemq.filter.evaluate import NUMBER_OR_NONE
from sluicemq.filter.nodes import Equal, In, JavaClass, Literal, Order, Property
from sluicemq.filter.plan import (
    ERROR,
    FALSE,
    IS_TRUE,
    TRUE,
    VERDICT_OF,
    Atom,
    Constant,
    Join,
    Leaf,
    Plan,
    Several,
    Single,
    number_comparison,
    outcome_of,
    settled,
    verdict_of,
)
from sluicemq.record.columns import Column, ColumnBlock, Values


class Numbers(NamedTuple):
    """One for each value, int64 or float64; `errors`: which of them are none (there is a 0)."""

    numbers: NDArray[Any]
    errors: NDArray[np.bool_] | None


# So plain that Java's valueOf is Python's int (or float), and that the number fits. A whole number
# with a dot is none.
_PLAIN: Final = {
    JavaClass.INTEGER: re.compile(r"(?:-?[0-9]{1,9}+(?:\.[0-9]++)?+,)*+"),
    JavaClass.LONG: re.compile(r"(?:-?[0-9]{1,18}+(?:\.[0-9]++)?+,)*+"),
    JavaClass.DOUBLE: re.compile(r"(?:-?[0-9]{1,300}+(?:\.[0-9]{1,300}+)?+,)*+"),
}


# Whole numbers of so many digits are the same in every class; as a float exactly so.
_DIGITS: Final = {JavaClass.INTEGER: 9, JavaClass.LONG: 18, JavaClass.DOUBLE: 15}
_COMMA: Final = ord(",")


def _whole_numbers(joined: str, count: int, digits_max: int) -> NDArray[np.int64] | None:
    """So many texts with a comma behind each, when all of them are but digits: ten times as fast
    as one by one."""
    if not joined.isascii():
        return None
    letters = np.frombuffer(joined.encode(), np.uint8)
    commas = np.flatnonzero(letters == _COMMA)
    if len(commas) != count:
        return None
    lengths = np.diff(commas, prepend=-1) - 1
    if lengths.min() < 1 or lengths.max() > digits_max:
        return None
    if np.count_nonzero(letters - np.uint8(ord("0")) < np.uint8(10)) + count != len(letters):
        return None
    return np.fromstring(joined[:-1], np.int64, sep=",")


def parse_numbers(values: tuple[str, ...], wanted: JavaClass) -> Numbers:
    """As the class that a literal wants: INTEGER, LONG or DOUBLE."""
    is_double = wanted is JavaClass.DOUBLE
    kind: Any = np.float64 if is_double else np.int64
    joined = ",".join(values) + ","
    digits = _whole_numbers(joined, len(values), _DIGITS[wanted])
    if digits is not None:
        return Numbers(digits.astype(kind, copy=False), None)
    is_plain = joined.count(",") == len(values) and _PLAIN[wanted].fullmatch(joined)
    if is_plain and (is_double or "." not in joined):
        plain = map(float, values) if is_double else map(int, values)
        return Numbers(np.fromiter(plain, kind, len(values)), None)
    if is_plain:
        found = [None if "." in text else int(text) for text in values]
    else:
        found = list(map(NUMBER_OR_NONE[wanted], values))
    errors = np.fromiter((number is None for number in found), np.bool_, len(found))
    usable = (0 if number is None else number for number in found)
    return Numbers(np.fromiter(usable, kind, len(found)), errors)


# The cases with an example of the left and of the right property.
_ORDER_CASES: Final = (("1", "2"), ("1", "1"), ("2", "1"), (None, None), ("x", "1"))
_LESS, _SAME, _MORE, _NULL, _ERROR = range(5)
_EQUAL_CASES: Final = (("x", "y"), ("x", "x"), ("x", None), (None, "x"), (None, None))
_UNLIKE, _ALIKE, _LEFT_ONLY, _RIGHT_ONLY, _NEITHER = range(5)


def pair_outcomes(leaf: Several, columns: Mapping[str, Column]) -> NDArray[np.uint8] | None:
    """The outcomes of a comparison of two properties, both columns; None for any other one."""
    node = leaf.node
    if not isinstance(node, Order | Equal):
        return None
    if not isinstance(node.left, Property) or not isinstance(node.right, Property):
        return None
    left, right = node.left.name, node.right.name
    examples = _ORDER_CASES if isinstance(node, Order) else _EQUAL_CASES
    found = np.empty(len(examples), np.uint8)
    for case, (first, second) in enumerate(examples):
        given = {left: first, right: second}
        properties = {name: value for name, value in given.items() if value is not None}
        found[case] = 1 << verdict_of(leaf.verdict, properties)
    one, other = columns[left], columns[right]
    if isinstance(node, Order):
        low, low_fails = _sortable(one)
        high, high_fails = _sortable(other)
        cases = np.where(low < high, _LESS, np.where(low == high, _SAME, _MORE))
        for fails in (low_fails, high_fails):
            if fails is not None:
                cases[fails] = _ERROR
        cases[(one.codes < 0) | (other.codes < 0)] = _NULL  # looked at before any conversion
    else:
        number_of = {value: number for number, value in enumerate(one.values)}
        same = np.fromiter((number_of.get(value, -2) for value in other.values), np.int64)
        own, alike = one.codes.astype(np.int64), _on_all_rows(same, other.codes)
        cases = np.where(own == alike, _ALIKE, _UNLIKE)
        no_left, no_right = own < 0, other.codes < 0
        cases[no_right] = _LEFT_ONLY
        cases[no_left] = _RIGHT_ONLY
        cases[no_left & no_right] = _NEITHER
    return found.take(cases)


def _sortable(column: Column) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """For each row a number that sorts as its Double does, and whether it is none at all."""
    numbers, errors = parse_numbers(column.values, JavaClass.DOUBLE)
    numbers[np.isnan(numbers)] = np.nan
    bits = numbers.view(np.int64)
    ascending = bits ^ (bits >> 63 & np.int64(0x7FFFFFFFFFFFFFFF))
    fails = None if errors is None else _on_all_rows(errors, column.codes)
    return _on_all_rows(ascending, column.codes), fails


def _on_all_rows(of_values: NDArray[Any], codes: NDArray[Any]) -> NDArray[Any]:
    """Gathered; what stands in rows without a value is of no matter."""
    return (
        of_values.take(codes, mode="wrap")
        if len(of_values)
        else np.zeros(len(codes), of_values.dtype)
    )


Outcomes: TypeAlias = NDArray[np.uint8] | int
_T = TypeVar("_T")

SCALAR_VALUES_MAX: Final = 48  # below it a loop over the values is faster than some NumPy calls
PAIRS_SCALAR_MAX: Final = 2048  # the same for two columns that are compared with each other
NARROW_FACTOR: Final = 3  # so many times fewer open rows are worth to be picked out
COMBINATIONS_DENSE_MAX: Final = 1 << 20  # a table of one byte and one int32 for each
FEW: Final = 3  # so many comparisons of a whole block are faster than a look-up for each row

_VERDICT_OF: Final = VERDICT_OF.ljust(256, b"\0")


def block_verdicts(plan: Plan, block: ColumnBlock) -> NDArray[np.uint8]:
    """One verdict a row; rows that could not be decoded need the record."""
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
    tables: dict[Single, Outcomes]

    def table(self, leaf: Single) -> Outcomes:
        """The outcome of each value, the last one for rows without; a number: of all rows."""
        found = self.tables.get(leaf)
        if found is not None:
            return found
        column = self.block.columns.get(leaf.name)
        if leaf.name in self.block.excluded:
            found = leaf.unknown
        elif column is None:
            found = leaf.absent
        else:
            found = _on_values(leaf, column.values)
        self.tables[leaf] = found
        return found

    def some(self, rows: NDArray[np.intp]) -> "_Rows":
        return _Rows(self.block.some(rows), self.tables)


def _on_rows(plan: Plan, rows: _Rows) -> Outcomes:
    if isinstance(plan, Constant):
        return plan.outcomes
    if isinstance(plan, Several):
        return _several(plan, rows.block)
    if isinstance(plan, Single):
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
    present: set[int] = set()
    both = join.table
    for operand in join.operands:
        table = rows.table(operand) if isinstance(operand, Single) else None
        if table is None:
            break
        counts = np.bincount([table] if isinstance(table, int) else table, minlength=16)
        occurs = np.flatnonzero(counts).tolist()
        if any(both[a << 4 | b] != both[b << 4 | a] for a in occurs for b in present):
            break
        present.update(occurs)
        shares.append(float((counts * _is_open(join.table)).sum() / counts.sum()))
    order = sorted(range(len(shares)), key=shares.__getitem__)
    return [*(join.operands[at] for at in order), *join.operands[len(shares) :]]


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
    examples, numbers = _combinations(columns)
    found = np.empty(len(examples), np.uint8)
    codes = zip(*(column.codes[examples].tolist() for column in columns), strict=True)
    for at, chosen in enumerate(codes):
        properties = {
            name: column.values[code]
            for name, column, code in zip(names, columns, chosen, strict=True)
            if code >= 0
        }
        found[at] = 1 << verdict_of(leaf.verdict, properties)
    return found.take(numbers)


def _combinations(columns: Sequence[Column]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """One row for each combination of codes that occurs, and each row's combination."""
    keys, size = np.zeros(len(columns[0].codes), np.int64), 1
    for codes, values in columns:
        count = len(values)
        if size * (count + 1) >= 1 << 62:
            distinct, keys = np.unique(keys, return_inverse=True)
            size = len(distinct)
        keys = keys * (count + 1) + (codes.astype(np.int64) + 1)
        size *= count + 1
    if size > COMBINATIONS_DENSE_MAX:
        _, rows, numbers = np.unique(keys, return_index=True, return_inverse=True)
        return rows, numbers
    row_of = np.full(size, -1, np.int32)
    row_of[keys] = np.arange(len(keys), dtype=np.int32)
    present = np.flatnonzero(row_of >= 0)
    rows = row_of[present].astype(np.intp)
    row_of[present] = np.arange(len(present), dtype=np.int32)
    return rows, row_of[keys].astype(np.intp)


# --- one property on its distinct values


def _on_values(leaf: Single, values: tuple[str, ...]) -> Outcomes:
    """The outcome of each value, the last one for rows without."""
    if len(values) <= SCALAR_VALUES_MAX:
        table: Outcomes = _by_scalar(leaf, values)
    else:
        table = outcome_of(leaf.inner, partial(_on_atom, values), _looked_up, _joined)
    if isinstance(table, int):
        table = np.full(len(values) + 1, table, np.uint8)
    table[-1] = leaf.absent
    return table


def _by_scalar(leaf: Single | Atom, values: tuple[str, ...]) -> NDArray[np.uint8]:
    found = bytearray(len(values) + 1)
    properties: dict[str, str] = {}
    for at, value in enumerate(values):
        properties[leaf.name] = value
        found[at] = 1 << verdict_of(leaf.verdict, properties)
    return np.frombuffer(found, np.uint8)


def _on_atom(values: tuple[str, ...], leaf: Leaf) -> NDArray[np.uint8]:
    assert isinstance(leaf, Atom)  # an inner plan has no others
    name, verdict = leaf.name, leaf.verdict
    texts: tuple[str, ...] = ()
    match leaf.node:  # Is it that text?
        case In(values=wanted_texts):
            texts = wanted_texts
        case Equal(left=Property(), right=Literal(value=str(text))):
            texts = (text,)
        case _:
            pass
    if texts:
        # The scalar engine on each of them, and on one that is none of them, for the rest.
        other = "".join(texts) + "."  # longer than each
        found = np.full(len(values) + 1, 1 << verdict_of(verdict, {name: other}), np.uint8)
        places = _noted(values, "places", lambda: {value: at for at, value in enumerate(values)})
        for text in texts:
            if (at := places.get(text)) is not None:
                found[at] = 1 << verdict_of(verdict, {name: text})
    elif (comparison := number_comparison(leaf.node)) is None:
        return _by_scalar(leaf, values)
    else:
        wanted, symbol, bound = comparison
        numbers, errors = _noted(values, wanted, lambda: parse_numbers(values, wanted))
        is_true = _TESTS[symbol](numbers, bound)
        found = np.empty(len(values) + 1, np.uint8)
        found[:-1] = np.where(is_true, np.uint8(1 << TRUE), np.uint8(1 << FALSE))
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
