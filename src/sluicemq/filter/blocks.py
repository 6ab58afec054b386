"""The block engine of SQL92: it evaluates a plan on the columns of a block with NumPy.

Every array of outcomes contains one verdict set (`plan`) for each row, or for each distinct value
of a column. A result that is the same for all rows is a plain int. A column is evaluated for its
distinct values, then the results are gathered over the rows: `table[codes]`. The last entry of a
table is for rows without the property, whose code is -1.

For a column of few values, the scalar engine evaluates every value. For a column of thousands, the
atoms are evaluated one by one. An atom that compares with a number does so for all values at once.
Python parses the values if all of them are written so plainly that Java would read them alike. An
atom that compares with strings looks up only those strings. If two such columns are compared with
each other (`price > cost`), the rows are sorted into five cases, and the scalar engine evaluates an
example of each case. The order of values is that of Double.compareTo, in which NaN is the greatest.

A join proceeds from left to right, and only with the rows that are still open. FALSE settles a row
in an AND, TRUE in an OR, and an error in both. Neighbouring operands are exchanged if the second
one settles more rows, and if the table proves that the order makes no difference for the outcomes
that occur. (With errors it makes a difference.) For example, in `region = 'hz' AND customer = 'c7'`
one operand is gathered for all rows, and the other one only for a few.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from sluicemq.filter.evaluate import TRY_PARSE_NUMBER
from sluicemq.filter.nodes import Equal, In, JavaClass, Literal, Order, Property
from sluicemq.filter.plan import (
    ERROR,
    FALSE,
    ONLY_TRUE,
    TRUE,
    VERDICT_OF_SET,
    AtomPlan,
    ConstantPlan,
    JoinPlan,
    Leaf,
    Plan,
    SeveralPropertiesPlan,
    SinglePropertyPlan,
    as_number_comparison,
    combine_leaves,
    evaluate_verdict,
    settled_sets,
)
from sluicemq.record.columns import Column, ColumnBlock, Values


class ParsedNumbers(NamedTuple):
    """The numbers of a column's values, as int64 or float64.

    `errors` says which values are not numbers; their number is 0. None means that all are numbers.
    """

    numbers: NDArray[Any]
    errors: NDArray[np.bool_] | None


# Values, each followed by a comma, that Java's valueOf and Python's int or float read alike, and
# that fit in the class. For INTEGER and LONG, a value with a dot matches but is an error.
_PLAIN: Final = {
    JavaClass.INTEGER: re.compile(r"(?:-?[0-9]{1,9}+(?:\.[0-9]++)?+,)*+"),
    JavaClass.LONG: re.compile(r"(?:-?[0-9]{1,18}+(?:\.[0-9]++)?+,)*+"),
    JavaClass.DOUBLE: re.compile(r"(?:-?[0-9]{1,300}+(?:\.[0-9]{1,300}+)?+,)*+"),
}


# For each class, the number of digits up to which every whole number is represented exactly.
_DIGITS_MAX: Final = {JavaClass.INTEGER: 9, JavaClass.LONG: 18, JavaClass.DOUBLE: 15}
_COMMA: Final = ord(",")


def _whole_numbers(joined: str, count: int, digits_max: int) -> NDArray[np.int64] | None:
    """Return the numbers of `count` texts, if all of them consist of 1 to `digits_max` digits.

    `joined` contains the texts, each followed by a comma. Return None for other texts. This is ten
    times as fast as converting each text.
    """
    if not joined.isascii():
        return None
    characters = np.frombuffer(joined.encode(), np.uint8)
    commas = np.flatnonzero(characters == _COMMA)
    if len(commas) != count:
        return None
    lengths = np.diff(commas, prepend=-1) - 1
    if lengths.min() < 1 or lengths.max() > digits_max:
        return None
    digits = np.count_nonzero(characters - np.uint8(ord("0")) < np.uint8(10))
    if digits + count != len(characters):
        return None
    return np.fromstring(joined[:-1], np.int64, sep=",")


def parse_numbers(values: tuple[str, ...], number_class: JavaClass) -> ParsedNumbers:
    """Return the values of a column as numbers of the class INTEGER, LONG or DOUBLE."""
    is_double = number_class is JavaClass.DOUBLE
    kind: Any = np.float64 if is_double else np.int64
    joined = ",".join(values) + ","
    digits = _whole_numbers(joined, len(values), _DIGITS_MAX[number_class])
    if digits is not None:
        return ParsedNumbers(digits.astype(kind, copy=False), None)
    is_plain = joined.count(",") == len(values) and _PLAIN[number_class].fullmatch(joined)
    if is_plain and (is_double or "." not in joined):
        plain = map(float, values) if is_double else map(int, values)
        return ParsedNumbers(np.fromiter(plain, kind, len(values)), None)
    if is_plain:
        found = [None if "." in text else int(text) for text in values]
    else:
        found = list(map(TRY_PARSE_NUMBER[number_class], values))
    errors = np.fromiter((number is None for number in found), np.bool_, len(found))
    usable = (0 if number is None else number for number in found)
    return ParsedNumbers(np.fromiter(usable, kind, len(found)), errors)


# For each case of a comparison of two properties, an example of their values; None means absent.
_ORDER_CASES: Final = (("1", "2"), ("1", "1"), ("2", "1"), (None, None), ("x", "1"))
_LESS, _SAME, _MORE, _NULL, _ERROR = range(5)
_EQUAL_CASES: Final = (("x", "y"), ("x", "x"), ("x", None), (None, "x"), (None, None))
_DIFFERENT, _EQUAL, _LEFT_ONLY, _RIGHT_ONLY, _NEITHER = range(5)


def compare_two_columns(
    leaf: SeveralPropertiesPlan, columns: Mapping[str, Column]
) -> NDArray[np.uint8] | None:
    """Return the outcome of each row for a comparison of two properties that are both columns.

    Return None if the plan is another kind of comparison.
    """
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
        found[case] = 1 << evaluate_verdict(leaf.condition, properties)
    left_column, right_column = columns[left], columns[right]
    if isinstance(node, Order):
        left_keys, left_fails = _sort_keys(left_column)
        right_keys, right_fails = _sort_keys(right_column)
        cases = np.where(
            left_keys < right_keys, _LESS, np.where(left_keys == right_keys, _SAME, _MORE)
        )
        for fails in (left_fails, right_fails):
            if fails is not None:
                cases[fails] = _ERROR
        # An absent property is null before any value is converted.
        cases[(left_column.codes < 0) | (right_column.codes < 0)] = _NULL
    else:
        code_of = {value: code for code, value in enumerate(left_column.values)}
        left_codes_of_right = np.fromiter(
            (code_of.get(value, -2) for value in right_column.values), np.int64
        )
        left_codes = left_column.codes.astype(np.int64)
        right_codes = _gather(left_codes_of_right, right_column.codes)
        cases = np.where(left_codes == right_codes, _EQUAL, _DIFFERENT)
        no_left, no_right = left_codes < 0, right_column.codes < 0
        cases[no_right] = _LEFT_ONLY
        cases[no_left] = _RIGHT_ONLY
        cases[no_left & no_right] = _NEITHER
    return found.take(cases)


def _sort_keys(column: Column) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """Return (keys, fails): for each row, an integer that sorts as its Double does.

    `fails` says for each row whether its value is not a number; None means that all are. Entries of
    rows without a value are arbitrary.
    """
    numbers, errors = parse_numbers(column.values, JavaClass.DOUBLE)
    numbers[np.isnan(numbers)] = np.nan
    bits = numbers.view(np.int64)
    ascending = bits ^ (bits >> 63 & np.int64(0x7FFFFFFFFFFFFFFF))
    fails = None if errors is None else _gather(errors, column.codes)
    return _gather(ascending, column.codes), fails


def _gather(of_values: NDArray[Any], codes: NDArray[Any]) -> NDArray[Any]:
    """Return the entry of each row's value. Entries of rows without a value are arbitrary."""
    if not len(of_values):
        return np.zeros(len(codes), of_values.dtype)
    return of_values.take(codes, mode="wrap")


Outcomes: TypeAlias = NDArray[np.uint8] | int
"""A verdict set for each row or value; an int if it is the same for all."""
_T = TypeVar("_T")

SCALAR_VALUES_MAX: Final = 48
"""Up to this number of values, a loop of the scalar engine is faster than some NumPy calls."""
PAIRS_SCALAR_MAX: Final = 2048
"""The same for the combinations of values of two columns that are compared with each other."""
NARROW_FACTOR: Final = 3
"""Open rows are selected before the next operand if they are at most one in this number."""
COMBINATIONS_DENSE_MAX: Final = 1 << 20
"""The maximum number of combinations for which a table with an int32 for each is used."""
FEW: Final = 3
"""Up to this number, comparisons of a whole block are faster than a look-up for each row."""

_VERDICT_OF: Final = VERDICT_OF_SET.ljust(256, b"\0")


def evaluate_block(plan: Plan, block: ColumnBlock) -> NDArray[np.uint8]:
    """Return a verdict for each row of a block. Rows that could not be decoded get NEEDS_RECORD."""
    outcomes = _evaluate_plan(plan, _Rows(block, {}))
    if isinstance(outcomes, int):
        verdicts = np.full(block.rows, VERDICT_OF_SET[outcomes], np.uint8)
    else:
        verdicts = _translate(_VERDICT_OF, outcomes)
    if len(block.odd):
        verdicts[block.odd] = VERDICT_OF_SET[0]
    return verdicts


def count_matches(plan: Plan, names: frozenset[str], block: ColumnBlock) -> int | None:
    """Return the number of rows that are TRUE, None if the columns do not decide every row.

    `names` are the properties that the plan reads.
    """
    if len(block.odd) or not block.excluded.isdisjoint(names):
        return None
    outcomes = _evaluate_plan(plan, _Rows(block, {}))
    if isinstance(outcomes, int):
        return block.rows if outcomes == ONLY_TRUE else 0
    return int(np.count_nonzero(outcomes == ONLY_TRUE))


def _translate(table: bytes, outcomes: NDArray[Any]) -> NDArray[np.uint8]:
    """Return `table[outcomes]` for a table of 256 bytes, twice as fast as NumPy does."""
    return np.frombuffer(bytearray(outcomes).translate(table), np.uint8)


def _look_up(table: bytes, operand: Outcomes) -> Outcomes:
    """Return the outcomes of a join with one operand."""
    if isinstance(operand, int):
        return table[operand]
    return _translate(table.ljust(256, b"\0"), operand)


def _join(table: bytes, left: Outcomes, right: Outcomes) -> Outcomes:
    """Return the outcomes of a join with two operands."""
    if isinstance(right, int):
        return _look_up(table[right::16], left)
    if isinstance(left, int):
        return _look_up(table[left << 4 : left + 1 << 4], right)
    return _translate(table, left << 4 | right)


# --- Evaluation on the rows of a block


class _Rows(NamedTuple):
    """Rows of a block, with the tables of its columns that were computed before, by leaf."""

    block: ColumnBlock
    tables: dict[SinglePropertyPlan, Outcomes]

    def table(self, leaf: SinglePropertyPlan) -> Outcomes:
        """Return the outcome of each distinct value, followed by that of rows without a value.

        Return an int if all rows have the same outcome.
        """
        found = self.tables.get(leaf)
        if found is not None:
            return found
        column = self.block.columns.get(leaf.name)
        if leaf.name in self.block.excluded:
            found = leaf.possible_set
        elif column is None:
            found = leaf.absent_set
        else:
            found = _evaluate_values(leaf, column.values)
        self.tables[leaf] = found
        return found

    def some(self, rows: NDArray[np.intp]) -> "_Rows":
        """Return the rows with these numbers, with the same tables."""
        return _Rows(self.block.take_rows(rows), self.tables)


def _evaluate_plan(plan: Plan, rows: _Rows) -> Outcomes:
    """Return the outcomes of a plan for some rows of a block."""
    if isinstance(plan, ConstantPlan):
        return plan.verdict_set
    if isinstance(plan, SeveralPropertiesPlan):
        return _evaluate_combinations(plan, rows.block)
    if isinstance(plan, SinglePropertyPlan):
        table = rows.table(plan)
        if isinstance(table, int):
            return table
        return _gather_outcomes(table, rows.block.columns[plan.name].codes)
    assert isinstance(plan, JoinPlan)  # an AtomPlan occurs only inside a SinglePropertyPlan
    if len(plan.operands) == 1:
        return _look_up(plan.table, _evaluate_plan(plan.operands[0], rows))
    first, *rest = _in_best_order(plan, rows)
    return _join_rest(plan.table, _evaluate_plan(first, rows), rest, rows)


def _join_rest(table: bytes, outcomes: Outcomes, rest: list[Plan], rows: _Rows) -> Outcomes:
    """Return the outcomes of a join whose first operands have the outcomes `outcomes`.

    `rest` contains the other operands.
    """
    for index, operand in enumerate(rest):
        if isinstance(outcomes, int):
            if outcomes in settled_sets(table):
                break
        else:
            open_rows = _open_rows(table, outcomes)
            if len(open_rows) * NARROW_FACTOR <= len(outcomes):
                if len(open_rows):
                    narrow = rows.some(open_rows)
                    outcomes[open_rows] = _join_rest(
                        table, outcomes[open_rows], rest[index:], narrow
                    )
                break
        outcomes = _join(table, outcomes, _evaluate_plan(operand, rows))
    return outcomes


def _open_rows(table: bytes, outcomes: NDArray[np.uint8]) -> NDArray[np.intp]:
    """Return the numbers of the rows whose outcome the following operands can change."""
    if len(settled_sets(table)) > FEW:
        return np.flatnonzero(_is_open(table).take(outcomes))
    is_open = np.ones(len(outcomes), np.bool_)
    for number in settled_sets(table):
        is_open &= outcomes != number
    return np.flatnonzero(is_open)


@cache
def _is_open(table: bytes) -> NDArray[np.bool_]:
    """Return for each verdict set whether the following operands can change it."""
    return np.array([number not in settled_sets(table) for number in range(16)])


def _in_best_order(join: JoinPlan, rows: _Rows) -> list[Plan]:
    """Return the operands of a join, those first that leave the fewest rows open.

    Only operands at the beginning are exchanged, and only if their order makes no difference. The
    share of open rows is estimated by the share of distinct values.
    """
    shares: list[float] = []
    present: set[int] = set()
    pairs = join.table
    for operand in join.operands:
        table = rows.table(operand) if isinstance(operand, SinglePropertyPlan) else None
        if table is None:
            break
        counts = np.bincount([table] if isinstance(table, int) else table, minlength=16)
        occurs = np.flatnonzero(counts).tolist()
        if any(pairs[a << 4 | b] != pairs[b << 4 | a] for a in occurs for b in present):
            break
        present.update(occurs)
        shares.append(float((counts * _is_open(join.table)).sum() / counts.sum()))
    order = sorted(range(len(shares)), key=shares.__getitem__)
    return [*(join.operands[index] for index in order), *join.operands[len(shares) :]]


def _gather_outcomes(table: NDArray[np.uint8], codes: NDArray[Any]) -> Outcomes:
    """Return `table[codes]`, or an int if it is the same for all rows."""
    usual = int(np.bincount(table[:-1], minlength=1).argmax()) if len(table) > 1 else int(table[0])
    others = np.flatnonzero(table != usual).tolist()
    if others == [len(table) - 1] and not (codes < 0).any():
        others = []
    if not others:
        return usual
    if len(others) <= FEW:
        found = np.full(len(codes), usual, np.uint8)
        for index in others:
            code = index if index < len(table) - 1 else -1
            found += (codes == code).view(np.uint8) * np.uint8((int(table[index]) - usual) & 0xFF)
        return found
    return table.take(codes, mode="wrap")


def _evaluate_combinations(leaf: SeveralPropertiesPlan, block: ColumnBlock) -> Outcomes:
    """Return the outcomes of a comparison of several properties.

    The scalar engine evaluates every combination of values that occurs. Two columns with many
    values are compared by `compare_two_columns`.
    """
    if not block.excluded.isdisjoint(leaf.names):
        return leaf.possible_set
    names = [name for name in leaf.names if name in block.columns]
    if not names:
        return 1 << evaluate_verdict(leaf.condition, {})
    columns = [block.columns[name] for name in names]
    if len(names) == 2 and prod(len(column.values) for column in columns) > PAIRS_SCALAR_MAX:
        outcomes = compare_two_columns(leaf, block.columns)
        if outcomes is not None:
            return outcomes
    examples, numbers = _combinations(columns)
    found = np.empty(len(examples), np.uint8)
    codes = zip(*(column.codes[examples].tolist() for column in columns), strict=True)
    for index, combination in enumerate(codes):
        properties = {
            name: column.values[code]
            for name, column, code in zip(names, columns, combination, strict=True)
            if code >= 0
        }
        found[index] = 1 << evaluate_verdict(leaf.condition, properties)
    return found.take(numbers)


def _combinations(columns: Sequence[Column]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return (rows, numbers) of the combinations of codes that occur.

    `rows` contains one example row for each combination, and `numbers` the index into `rows` of
    each row's combination.
    """
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


# --- Evaluation of one property for its distinct values


def _evaluate_values(leaf: SinglePropertyPlan, values: tuple[str, ...]) -> Outcomes:
    """Return the outcome of each value, followed by that of rows without a value."""
    if len(values) <= SCALAR_VALUES_MAX:
        table: Outcomes = _evaluate_scalar(leaf, values)
    else:
        table = combine_leaves(leaf.atom_plan, partial(_evaluate_atom, values), _look_up, _join)
    if isinstance(table, int):
        table = np.full(len(values) + 1, table, np.uint8)
    table[-1] = leaf.absent_set
    return table


def _evaluate_scalar(
    leaf: SinglePropertyPlan | AtomPlan, values: tuple[str, ...]
) -> NDArray[np.uint8]:
    """Return the outcome of each value by the scalar engine, and an entry that the caller sets."""
    found = bytearray(len(values) + 1)
    properties: dict[str, str] = {}
    for index, value in enumerate(values):
        properties[leaf.name] = value
        found[index] = 1 << evaluate_verdict(leaf.condition, properties)
    return np.frombuffer(found, np.uint8)


def _evaluate_atom(values: tuple[str, ...], leaf: Leaf) -> NDArray[np.uint8]:
    """Return the outcome of an atom for each value, and an entry that `_evaluate_values` sets."""
    assert isinstance(leaf, AtomPlan)  # the leaves of a SinglePropertyPlan.atom_plan are atoms
    name, condition = leaf.name, leaf.condition
    texts: tuple[str, ...] = ()  # the strings with which the atom compares
    match leaf.node:
        case In(values=wanted_texts):
            texts = wanted_texts
        case Equal(left=Property(), right=Literal(value=str(text))):
            texts = (text,)
        case _:
            pass
    if texts:
        # The scalar engine evaluates each of these strings, and a different one that represents
        # all other values.
        other = "".join(texts) + "."  # longer than each of them
        found = np.full(len(values) + 1, 1 << evaluate_verdict(condition, {name: other}), np.uint8)
        code_of = _memoized(
            values, "codes", lambda: {value: code for code, value in enumerate(values)}
        )
        for text in texts:
            if (code := code_of.get(text)) is not None:
                found[code] = 1 << evaluate_verdict(condition, {name: text})
    elif (comparison := as_number_comparison(leaf.node)) is None:
        return _evaluate_scalar(leaf, values)
    else:
        number_class, symbol, bound = comparison
        numbers, errors = _memoized(
            values, number_class, lambda: parse_numbers(values, number_class)
        )
        is_true = _TESTS[symbol](numbers, bound)
        found = np.empty(len(values) + 1, np.uint8)
        found[:-1] = np.where(is_true, np.uint8(1 << TRUE), np.uint8(1 << FALSE))
        if errors is not None:
            found[:-1][errors] = 1 << ERROR
    found[-1] = leaf.absent_set
    return found


def _memoized(values: tuple[str, ...], key: object, make: Callable[[], _T]) -> _T:
    """Return `make()`, which must depend only on the values, computed once for all filters."""
    if not isinstance(values, Values):
        return make()
    found: _T | None = values.cache.get(key)
    if found is None:
        found = values.cache[key] = make()
    return found


_Test: TypeAlias = Callable[[NDArray[Any], float], NDArray[np.bool_]]

# The same tests as in the scalar engine. Java differs from NumPy only for NaN, which is greater
# than every constant. A constant is never NaN and never 0.0, so == agrees with Double.compareTo.
_TESTS: Final[dict[str, _Test]] = {
    ">": lambda numbers, bound: ~(numbers <= bound),
    ">=": lambda numbers, bound: ~(numbers < bound),
    "<": lambda numbers, bound: numbers < bound,
    "<=": lambda numbers, bound: numbers <= bound,
    "=": lambda numbers, bound: numbers == bound,
    "<>": lambda numbers, bound: numbers != bound,
}
