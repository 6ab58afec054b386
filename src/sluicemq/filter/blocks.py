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
    """Return `count` texts as numbers if each consists of 1 to `digits_max` digits, else None.

    `joined` contains the texts, each followed by a comma. A text that contains a comma makes the
    result None. This is ten times as fast as converting each text.
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
    # Characters below "0" wrap around to large numbers, so one comparison finds the digits.
    digits = np.count_nonzero(characters - np.uint8(ord("0")) < np.uint8(10))
    if digits + count != len(characters):
        return None
    return np.fromstring(joined[:-1], np.int64, sep=",")


def parse_numbers(values: tuple[str, ...], number_class: JavaClass) -> ParsedNumbers:
    """Return the values of a column as numbers of the class INTEGER, LONG or DOUBLE.

    `values` must not be empty. There are three ways, from fast to slow, with the same result: all
    values at once, each value by Python's int or float, and each value by the scalar engine.
    """
    is_double = number_class is JavaClass.DOUBLE
    dtype: Any = np.float64 if is_double else np.int64
    joined = ",".join(values) + ","
    whole_numbers = _whole_numbers(joined, len(values), _DIGITS_MAX[number_class])
    if whole_numbers is not None:
        return ParsedNumbers(whole_numbers.astype(dtype, copy=False), None)

    # Java and Python read plain values alike. A value with a dot is plain, but not a whole number.
    is_plain = joined.count(",") == len(values) and _PLAIN[number_class].fullmatch(joined)
    if is_plain and (is_double or "." not in joined):
        plain_numbers = map(float, values) if is_double else map(int, values)
        return ParsedNumbers(np.fromiter(plain_numbers, dtype, len(values)), None)
    numbers: list[int | float | None]
    if is_plain:
        numbers = [None if "." in text else int(text) for text in values]
    else:
        numbers = list(map(TRY_PARSE_NUMBER[number_class], values))
    errors = np.fromiter((number is None for number in numbers), np.bool_, len(numbers))
    numbers_or_zero = (0 if number is None else number for number in numbers)
    return ParsedNumbers(np.fromiter(numbers_or_zero, dtype, len(numbers)), errors)


# For each case of a comparison of two properties, an example of their values; None means absent.
# The names below are the indices of the cases.
_ORDER_CASES: Final = (("1", "2"), ("1", "1"), ("2", "1"), (None, None), ("x", "1"))
_LESS, _SAME, _MORE, _NULL, _ERROR = range(5)
_EQUAL_CASES: Final = (("x", "y"), ("x", "x"), ("x", None), (None, "x"), (None, None))
_DIFFERENT, _EQUAL, _LEFT_ONLY, _RIGHT_ONLY, _NEITHER = range(5)


def compare_two_columns(
    leaf: SeveralPropertiesPlan, columns: Mapping[str, Column]
) -> NDArray[np.uint8] | None:
    """Return the outcome of each row for a comparison of two properties that are both columns.

    Return None if the comparison is not an Order or Equal of two properties. Each row is sorted
    into one of five cases, such as "less", and the scalar engine decides the outcome of each case
    by an example.
    """
    node = leaf.node
    if not isinstance(node, Order | Equal):
        return None
    if not isinstance(node.left, Property) or not isinstance(node.right, Property):
        return None
    left_name = node.left.name
    right_name = node.right.name
    examples = _ORDER_CASES if isinstance(node, Order) else _EQUAL_CASES
    outcome_by_case = np.empty(len(examples), np.uint8)
    for case, (left_value, right_value) in enumerate(examples):
        pair = {left_name: left_value, right_name: right_value}
        properties = {name: value for name, value in pair.items() if value is not None}
        outcome_by_case[case] = 1 << evaluate_verdict(leaf.condition, properties)
    find_cases = _find_order_cases if isinstance(node, Order) else _find_equal_cases
    return outcome_by_case.take(find_cases(columns[left_name], columns[right_name]))


def _find_order_cases(left: Column, right: Column) -> NDArray[Any]:
    """Return for each row how its two values compare as Doubles: an index of `_ORDER_CASES`."""
    left_keys, left_fails = _sort_keys(left)
    right_keys, right_fails = _sort_keys(right)
    cases = np.where(left_keys < right_keys, _LESS, np.where(left_keys == right_keys, _SAME, _MORE))
    for fails in (left_fails, right_fails):
        if fails is not None:
            cases[fails] = _ERROR
    # The scalar engine does not convert a value if the other property is absent: null, no error.
    cases[(left.codes < 0) | (right.codes < 0)] = _NULL
    return cases


def _find_equal_cases(left: Column, right: Column) -> NDArray[Any]:
    """Return for each row whether its two strings are equal: an index of `_EQUAL_CASES`."""
    # Compare codes of the left column. A value that only the right column has becomes -2, which is
    # no code.
    code_by_value = {value: code for code, value in enumerate(left.values)}
    left_code_by_right_code = np.fromiter(
        (code_by_value.get(value, -2) for value in right.values), np.int64
    )
    left_codes = left.codes.astype(np.int64)
    right_codes = _gather(left_code_by_right_code, right.codes)
    cases = np.where(left_codes == right_codes, _EQUAL, _DIFFERENT)
    no_left = left_codes < 0
    no_right = right.codes < 0
    cases[no_right] = _LEFT_ONLY
    cases[no_left] = _RIGHT_ONLY
    cases[no_left & no_right] = _NEITHER
    return cases


def _sort_keys(column: Column) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """Return (keys, fails), both with one entry for each row.

    A key is an integer, and keys compare as Double.compareTo compares the values. `fails` says
    whether a value is not a number; None means that all values are numbers. Both entries of a row
    without a value are arbitrary.
    """
    numbers, errors = parse_numbers(column.values, JavaClass.DOUBLE)
    # There are many bit patterns of NaN, but Double.compareTo treats all of them as equal.
    numbers[np.isnan(numbers)] = np.nan
    # The bits of positive floats ascend with their value when read as an integer. Those of negative
    # floats, whose sign bit makes the integer negative, descend. `bits >> 63` is 0 for a positive
    # and -1 for a negative float, so the XOR inverts all bits but the sign of negative floats only.
    bits = numbers.view(np.int64)
    keys = bits ^ (bits >> 63 & np.int64(0x7FFFFFFFFFFFFFFF))
    fails = None if errors is None else _gather(errors, column.codes)
    return _gather(keys, column.codes), fails


def _gather(by_code: NDArray[Any], codes: NDArray[Any]) -> NDArray[Any]:
    """Return the entry of `by_code` for the code of each row.

    The entry of a row without a value, whose code is -1, is arbitrary.
    """
    if not len(by_code):
        return np.zeros(len(codes), by_code.dtype)
    return by_code.take(codes, mode="wrap")


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
    """Return a verdict for each row of a block: FALSE, TRUE, NULL, ERROR or NEEDS_RECORD.

    NEEDS_RECORD means that the columns do not decide. Odd rows, which could not be decoded, always
    have it.
    """
    outcomes = _evaluate_plan(plan, _Rows(block, {}))
    if isinstance(outcomes, int):
        verdicts = np.full(block.rows, VERDICT_OF_SET[outcomes], np.uint8)
    else:
        verdicts = _translate(_VERDICT_OF, outcomes)
    if len(block.odd):
        verdicts[block.odd] = VERDICT_OF_SET[0]
    return verdicts


def count_matches(plan: Plan, names: frozenset[str], block: ColumnBlock) -> int | None:
    """Return the number of rows for which a plan is TRUE.

    `names` are the properties that the plan reads. Return None if one of them is not a column, or
    if the block has odd rows, because the columns may then not decide every row.
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
    """Return the outcomes of a join with one operand: `table[operand]`, for each of its entries."""
    if isinstance(operand, int):
        return table[operand]
    return _translate(table.ljust(256, b"\0"), operand)


def _join(table: bytes, left: Outcomes, right: Outcomes) -> Outcomes:
    """Return the outcomes of a join with two operands: `table[left << 4 | right]` for each."""
    if isinstance(right, int):
        return _look_up(table[right::16], left)
    if isinstance(left, int):
        return _look_up(table[left << 4 : left + 1 << 4], right)
    return _translate(table, left << 4 | right)


# --- Evaluation on the rows of a block


class _Rows(NamedTuple):
    """Some rows of a block, and the tables of its columns that were computed for earlier rows.

    `tables` maps each leaf of the plan to its result of `table`. All selections of rows of one
    block share it.
    """

    block: ColumnBlock
    tables: dict[SinglePropertyPlan, Outcomes]

    def table(self, leaf: SinglePropertyPlan) -> Outcomes:
        """Return the outcome of each distinct value, followed by that of rows without a value.

        Return an int if the property is not a column of the block, because all rows then have the
        same outcome. The result is stored in `tables`.
        """
        table = self.tables.get(leaf)
        if table is not None:
            return table
        column = self.block.columns.get(leaf.name)
        if leaf.name in self.block.excluded:
            table = leaf.possible_set
        elif column is None:
            table = leaf.absent_set
        else:
            table = _evaluate_values(leaf, column.values)
        self.tables[leaf] = table
        return table

    def take(self, rows: NDArray[np.intp]) -> "_Rows":
        """Return the rows with these indices, with the same tables."""
        return _Rows(self.block.take_rows(rows), self.tables)


def _evaluate_plan(plan: Plan, rows: _Rows) -> Outcomes:
    """Return the outcomes of a plan for `rows`: a verdict set for each, or one int for all."""
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
    """Return the outcomes of a join, given the joined outcomes of its first operands.

    `table` is the table of the join, `outcomes` the result of the first operands for `rows`, and
    `rest` contains the other operands, in order. `outcomes` may be changed in place. Operands are
    not evaluated for rows that are settled, which means that no further operand can change them.
    """
    for index, operand in enumerate(rest):
        if isinstance(outcomes, int):
            if outcomes in settled_sets(table):
                break
        else:
            open_rows = _find_open_rows(table, outcomes)
            are_few_open = len(open_rows) * NARROW_FACTOR <= len(outcomes)
            if are_few_open:  # evaluate all remaining operands for these rows only
                if len(open_rows):
                    outcomes[open_rows] = _join_rest(
                        table, outcomes[open_rows], rest[index:], rows.take(open_rows)
                    )
                break
        outcomes = _join(table, outcomes, _evaluate_plan(operand, rows))
    return outcomes


def _find_open_rows(table: bytes, outcomes: NDArray[np.uint8]) -> NDArray[np.intp]:
    """Return the indices of the rows whose outcome the following operands can change."""
    if len(settled_sets(table)) > FEW:
        return np.flatnonzero(_open_sets(table).take(outcomes))
    is_open = np.ones(len(outcomes), np.bool_)
    for settled_set in settled_sets(table):
        is_open &= outcomes != settled_set
    return np.flatnonzero(is_open)


@cache
def _open_sets(table: bytes) -> NDArray[np.bool_]:
    """Return for each of the 16 verdict sets whether the following operands can change it."""
    return np.array([verdict_set not in settled_sets(table) for verdict_set in range(16)])


def _in_best_order(join: JoinPlan, rows: _Rows) -> list[Plan]:
    """Return the operands of a join, those first that leave the fewest rows open.

    Only the first operands are sorted: those that read one property, up to the first one whose
    order makes a difference for the outcomes that occur. The other operands follow in their order.
    The share of rows that an operand leaves open is estimated from its outcomes for the distinct
    values, as if all values were equally frequent.
    """
    open_shares: list[float] = []  # of the operands that may be exchanged
    occurring_sets: set[int] = set()
    join_table = join.table
    for operand in join.operands:
        table = rows.table(operand) if isinstance(operand, SinglePropertyPlan) else None
        if table is None:
            break
        counts = np.bincount([table] if isinstance(table, int) else table, minlength=16)
        sets = np.flatnonzero(counts).tolist()
        if any(
            join_table[left << 4 | right] != join_table[right << 4 | left]
            for left in sets
            for right in occurring_sets
        ):
            break
        occurring_sets.update(sets)
        open_shares.append(float((counts * _open_sets(join_table)).sum() / counts.sum()))
    order = sorted(range(len(open_shares)), key=open_shares.__getitem__)
    return [*(join.operands[index] for index in order), *join.operands[len(open_shares) :]]


def _gather_outcomes(table: NDArray[np.uint8], codes: NDArray[Any]) -> Outcomes:
    """Return `table[codes]`, or an int if that is the same for all rows.

    The last entry of `table` is for the code -1.
    """
    # If at most FEW entries differ from the usual outcome, fill the rows with the usual outcome and
    # add the difference where a row has one of these codes.
    usual = int(np.bincount(table[:-1], minlength=1).argmax()) if len(table) > 1 else int(table[0])
    differing = np.flatnonzero(table != usual).tolist()
    only_absent_differs = differing == [len(table) - 1]
    if only_absent_differs and not (codes < 0).any():
        differing = []
    if not differing:
        return usual
    if len(differing) <= FEW:
        outcomes = np.full(len(codes), usual, np.uint8)
        for index in differing:
            code = index if index < len(table) - 1 else -1
            difference = np.uint8((int(table[index]) - usual) & 0xFF)  # modulo 256
            outcomes += (codes == code).view(np.uint8) * difference
        return outcomes
    return table.take(codes, mode="wrap")


def _evaluate_combinations(leaf: SeveralPropertiesPlan, block: ColumnBlock) -> Outcomes:
    """Return the outcomes of a comparison of several properties for the rows of a block.

    The scalar engine evaluates every combination of values that occurs. Two columns with many
    values are compared by `compare_two_columns`, if possible. If one of the properties is not a
    column, all rows have all possible outcomes.
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
    combinations = _find_combinations(columns)
    examples = combinations.example_rows
    outcome_by_combination = np.empty(len(examples), np.uint8)
    codes = zip(*(column.codes[examples].tolist() for column in columns), strict=True)
    for index, codes_of_example in enumerate(codes):
        properties = {
            name: column.values[code]
            for name, column, code in zip(names, columns, codes_of_example, strict=True)
            if code >= 0
        }
        outcome_by_combination[index] = 1 << evaluate_verdict(leaf.condition, properties)
    return outcome_by_combination.take(combinations.combination_of_row)


class _Combinations(NamedTuple):
    """The different combinations of codes that the rows of several columns have.

    `example_rows` contains one row for each combination. `combination_of_row` has, for each row,
    the index in `example_rows` of its combination.
    """

    example_rows: NDArray[np.intp]
    combination_of_row: NDArray[np.intp]


def _find_combinations(columns: Sequence[Column]) -> _Combinations:
    """Return the combinations of codes that occur in these columns."""
    # The key of a row is a number in mixed radix. Each column is one digit: its code plus 1, so
    # that 0 means "absent". Keys are below `key_count`.
    keys = np.zeros(len(columns[0].codes), np.int64)
    key_count = 1
    for codes, values in columns:
        radix = len(values) + 1
        if key_count * radix >= 1 << 62:
            # The next keys would not fit into 64 bits: replace the keys so far by smaller numbers.
            distinct_keys, keys = np.unique(keys, return_inverse=True)
            key_count = len(distinct_keys)
        keys = keys * radix + (codes.astype(np.int64) + 1)
        key_count *= radix

    if key_count > COMBINATIONS_DENSE_MAX:
        _, example_rows, combination_of_row = np.unique(
            keys, return_index=True, return_inverse=True
        )
        return _Combinations(example_rows, combination_of_row)

    # With few possible keys, an array with one entry for each is faster than sorting the keys. It
    # first contains the last row with each key, then the index of the combination.
    by_key = np.full(key_count, -1, np.int32)
    by_key[keys] = np.arange(len(keys), dtype=np.int32)
    present_keys = np.flatnonzero(by_key >= 0)
    example_rows = by_key[present_keys].astype(np.intp)
    by_key[present_keys] = np.arange(len(present_keys), dtype=np.int32)
    return _Combinations(example_rows, by_key[keys].astype(np.intp))


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
    """Return the outcome of each value by the scalar engine, and a last entry.

    The last entry, for rows without a value, is 0. The caller must set it.
    """
    table = bytearray(len(values) + 1)
    properties: dict[str, str] = {}
    for index, value in enumerate(values):
        properties[leaf.name] = value
        table[index] = 1 << evaluate_verdict(leaf.condition, properties)
    return np.frombuffer(table, np.uint8)


def _evaluate_atom(values: tuple[str, ...], leaf: Leaf) -> NDArray[np.uint8]:
    """Return the outcome of an atom for each value, and a last entry for rows without a value.

    The last entry may be 0, because `_evaluate_values` sets it after joining the atoms. Comparisons
    with strings and numbers are evaluated for all values at once, others by the scalar engine.
    """
    assert isinstance(leaf, AtomPlan)  # the leaves of a SinglePropertyPlan.atom_plan are atoms
    match leaf.node:
        case In(values=texts) if texts:
            return _evaluate_string_atom(values, leaf, texts)
        case Equal(left=Property(), right=Literal(value=str(text))):
            return _evaluate_string_atom(values, leaf, (text,))
        case _:
            pass
    comparison = as_number_comparison(leaf.node)
    if comparison is None:
        return _evaluate_scalar(leaf, values)
    number_class, symbol, bound = comparison
    numbers, errors = _memoized(values, number_class, lambda: parse_numbers(values, number_class))
    is_true = _TESTS[symbol](numbers, bound)
    table = np.empty(len(values) + 1, np.uint8)
    table[:-1] = np.where(is_true, np.uint8(1 << TRUE), np.uint8(1 << FALSE))
    if errors is not None:
        table[:-1][errors] = 1 << ERROR
    table[-1] = leaf.absent_set
    return table


def _evaluate_string_atom(
    values: tuple[str, ...], leaf: AtomPlan, texts: tuple[str, ...]
) -> NDArray[np.uint8]:
    """Return the table of `_evaluate_atom` for an atom that compares a property with `texts`.

    The scalar engine evaluates only each of these strings, and one other string that represents
    all other values.
    """
    name = leaf.name
    condition = leaf.condition
    other_text = "".join(texts) + "."  # longer than each of them
    other_outcome = 1 << evaluate_verdict(condition, {name: other_text})
    table = np.full(len(values) + 1, other_outcome, np.uint8)
    code_by_value = _memoized(
        values, "codes", lambda: {value: code for code, value in enumerate(values)}
    )
    for text in texts:
        if (code := code_by_value.get(text)) is not None:
            table[code] = 1 << evaluate_verdict(condition, {name: text})
    table[-1] = leaf.absent_set
    return table


def _memoized(values: tuple[str, ...], key: object, make: Callable[[], _T]) -> _T:
    """Return `make()`, which must depend only on `values` and must not return None.

    If `values` is a `Values`, its cache keeps the result under `key`, so all filters share it.
    """
    if not isinstance(values, Values):
        return make()
    result: _T | None = values.cache.get(key)
    if result is None:
        result = values.cache[key] = make()
    return result


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
