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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product
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


def _convert_whole_numbers_at_once(
    joined: str, count: int, digits_max: int
) -> NDArray[np.int64] | None:
    """Convert `count` texts to whole numbers at once, ten times as fast as one by one.

    `joined` contains the texts, each followed by a comma. Return None if a text does not consist of
    1 to `digits_max` digits.
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
    without_last_comma = joined[:-1]
    return np.fromstring(without_last_comma, np.int64, sep=",")


def parse_numbers(values: tuple[str, ...], number_class: JavaClass) -> ParsedNumbers:
    """Convert the values of a column to numbers of the class INTEGER, LONG or DOUBLE.

    `values` must not be empty. Return an array of the numbers, and an array that is True for each
    value that cannot be converted. The second one is None if all can.

    The result is that of Java's conversion. If all values are plain digits, they are converted at
    once, which is fast. Otherwise they are converted one by one.
    """
    is_double = number_class is JavaClass.DOUBLE
    dtype: Any = np.float64 if is_double else np.int64
    joined = ",".join(values) + ","
    whole_numbers = _convert_whole_numbers_at_once(joined, len(values), _DIGITS_MAX[number_class])
    if whole_numbers is not None:
        return ParsedNumbers(whole_numbers.astype(dtype, copy=False), None)

    # Java and Python read plain values alike. A value with a dot is plain, but not a whole number.
    is_plain = joined.count(",") == len(values) and _PLAIN[number_class].fullmatch(joined)
    if is_plain and (is_double or "." not in joined):
        python_class = float if is_double else int
        return ParsedNumbers(np.fromiter(map(python_class, values), dtype, len(values)), None)

    number_or_none: list[int | float | None]
    if is_plain:
        number_or_none = [None if "." in value else int(value) for value in values]
    else:
        number_or_none = list(map(TRY_PARSE_NUMBER[number_class], values))
    return _mark_errors(number_or_none, dtype)


def _mark_errors(numbers: Sequence[int | float | None], dtype: Any) -> ParsedNumbers:
    """Return numbers as an array of type `dtype`; those that are None become 0 and errors."""
    errors = np.fromiter((number is None for number in numbers), np.bool_, len(numbers))
    numbers_or_zero = (0 if number is None else number for number in numbers)
    return ParsedNumbers(np.fromiter(numbers_or_zero, dtype, len(numbers)), errors)


# For each case of a comparison of two properties, an example of their values; None means absent.
# The names below are the indices of the cases.
_ExamplePair: TypeAlias = tuple[str | None, str | None]
_ORDER_CASES: Final[Sequence[_ExamplePair]] = (
    ("1", "2"),
    ("1", "1"),
    ("2", "1"),
    (None, None),
    ("x", "1"),
)
_LESS, _SAME, _MORE, _NULL, _ERROR = range(5)
_EQUAL_CASES: Final[Sequence[_ExamplePair]] = (
    ("x", "y"),
    ("x", "x"),
    ("x", None),
    (None, "x"),
    (None, None),
)
_DIFFERENT, _EQUAL, _LEFT_ONLY, _RIGHT_ONLY, _NEITHER = range(5)


def compare_two_columns(
    leaf: SeveralPropertiesPlan, columns: Mapping[str, Column]
) -> NDArray[np.uint8] | None:
    """Return the outcome of each row for a comparison of two properties that are both columns.

    An outcome is a number with one bit set, `1 << verdict`. Return None if the comparison is not an
    Order or Equal of two properties.

    Each row is sorted into one of five cases, such as "less". The outcome of a case is found by
    evaluating one example of it.
    """
    node = leaf.node
    if not isinstance(node, Order | Equal):
        return None
    if not isinstance(node.left, Property) or not isinstance(node.right, Property):
        return None
    left_column = columns[node.left.name]
    right_column = columns[node.right.name]
    if isinstance(node, Order):
        examples = _ORDER_CASES
        case_of_row = _find_order_cases(left_column, right_column)
    else:
        examples = _EQUAL_CASES
        case_of_row = _find_equal_cases(left_column, right_column)

    outcome_by_case = np.empty(len(examples), np.uint8)
    for case, (left_value, right_value) in enumerate(examples):
        properties = {}
        if left_value is not None:
            properties[node.left.name] = left_value
        if right_value is not None:
            properties[node.right.name] = right_value
        outcome_by_case[case] = 1 << evaluate_verdict(leaf.condition, properties)
    return outcome_by_case.take(case_of_row)


def _find_order_cases(left_column: Column, right_column: Column) -> NDArray[Any]:
    """Return for each row how its two values compare as Doubles.

    The result contains indices of `_ORDER_CASES`: less, same, more, error or null.
    """
    left_keys, left_fails = _sort_keys(left_column)
    right_keys, right_fails = _sort_keys(right_column)
    cases = np.where(left_keys < right_keys, _LESS, np.where(left_keys == right_keys, _SAME, _MORE))
    for fails in (left_fails, right_fails):
        if fails is not None:
            cases[fails] = _ERROR
    # The scalar engine does not convert a value if the other property is absent: null, no error.
    cases[(left_column.codes < 0) | (right_column.codes < 0)] = _NULL
    return cases


def _find_equal_cases(left_column: Column, right_column: Column) -> NDArray[Any]:
    """Return for each row whether its two strings are equal, and whether one is absent.

    The result contains indices of `_EQUAL_CASES`.
    """
    # Compare codes of the left column. A value that only the right column has becomes -2, which is
    # no code.
    code_by_value = {value: code for code, value in enumerate(left_column.values)}
    left_code_by_right_code = np.fromiter(
        (code_by_value.get(value, -2) for value in right_column.values), np.int64
    )
    left_codes = left_column.codes.astype(np.int64)
    right_codes = _gather(left_code_by_right_code, right_column.codes)
    cases = np.where(left_codes == right_codes, _EQUAL, _DIFFERENT)

    # Rows without a value have the code -1. The case of both comes last, because it overrides.
    is_left_absent = left_codes < 0
    is_right_absent = right_column.codes < 0
    cases[is_right_absent] = _LEFT_ONLY
    cases[is_left_absent] = _RIGHT_ONLY
    cases[is_left_absent & is_right_absent] = _NEITHER
    return cases


def _sort_keys(column: Column) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """Return (keys, fails), two arrays with one entry for each row.

    A key is an integer. Keys compare as Double.compareTo of Java compares the values. `fails` is
    True for a value that is not a number; None means that all values are numbers. For a row without
    a value, both entries are arbitrary.
    """
    doubles, errors = parse_numbers(column.values, JavaClass.DOUBLE)
    # There are many bit patterns of NaN, but Double.compareTo treats all of them as equal.
    doubles[np.isnan(doubles)] = np.nan
    # The bits of positive floats ascend with their value when read as an integer. Those of negative
    # floats, whose sign bit makes the integer negative, descend. `bits >> 63` is 0 for a positive
    # and -1 for a negative float, so the XOR inverts all bits but the sign of negative floats only.
    bits = doubles.view(np.int64)
    key_by_code = bits ^ (bits >> 63 & np.int64(0x7FFFFFFFFFFFFFFF))
    keys = _gather(key_by_code, column.codes)
    fails = None if errors is None else _gather(errors, column.codes)
    return keys, fails


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
    """Return the verdict of a filter for each row of a block, as an array.

    A verdict is FALSE, TRUE, NULL, ERROR or NEEDS_RECORD. NEEDS_RECORD means that the columns of
    the block do not decide, and the record of the message must be read. Rows that could not be
    decoded (odd rows) always have it.
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
    """Return the number of rows of a block for which a filter is TRUE, or None if unknown.

    `names` are the properties that the filter reads. The number is unknown if one of them is not a
    column of the block, or if some rows could not be decoded (odd rows).
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
    """Return the outcomes of a join with one operand, which are looked up in `table`.

    The operand is an int for all rows, or an array with a verdict set for each row or value. The
    result has the same form.
    """
    if isinstance(operand, int):
        return table[operand]
    return _translate(table.ljust(256, b"\0"), operand)


def _join(table: bytes, left_outcomes: Outcomes, right_outcomes: Outcomes) -> Outcomes:
    """Return the outcomes of an AND or OR of two conditions, for each row of a block.

    An outcome is a set of verdicts in 4 bits. `table[left << 4 | right]` is the outcome of the AND
    or OR. An argument is an array with one outcome for each row, or an int if all rows have the
    same.
    """
    # If one operand has the same outcome for all rows, 16 of the 256 entries suffice: a table with
    # the outcome of the other operand as its index.
    if isinstance(right_outcomes, int):
        return _look_up(table[right_outcomes::16], left_outcomes)
    if isinstance(left_outcomes, int):
        row_start = left_outcomes << 4
        return _look_up(table[row_start : row_start + 16], right_outcomes)
    return _translate(table, left_outcomes << 4 | right_outcomes)


# --- Evaluation on the rows of a block


class _Rows(NamedTuple):
    """Some rows of a block, and the tables of its columns that were computed for earlier rows.

    `tables` maps each leaf of the plan to its result of `table`. All selections of rows of one
    block share it.
    """

    block: ColumnBlock
    tables: dict[SinglePropertyPlan, Outcomes]

    def table(self, leaf: SinglePropertyPlan) -> Outcomes:
        """Return the outcomes of a condition on one property, for each distinct value.

        The last entry is the outcome of rows without a value. An outcome is a number with bit `1 <<
        verdict` set for each possible verdict.

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
    """Evaluate a filter, given as a plan, for some rows of a block.

    Return an array with the outcome of each row, or one int if all have the same. An outcome is a
    number with bit `1 << verdict` set for each possible verdict.
    """
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
    first_operand, *other_operands = _order_operands(plan, rows)
    first_outcomes = _evaluate_plan(first_operand, rows)
    return _join_operands(plan.table, first_outcomes, other_operands, rows)


def _join_operands(table: bytes, outcomes: Outcomes, operands: list[Plan], rows: _Rows) -> Outcomes:
    """Return the outcomes of an AND or OR, given the outcomes of its first operands.

    `table` is the table of the AND or OR. `outcomes` is the result of the first operands for
    `rows`, and may be changed in place. `operands` contains the other operands, in order.

    A row is open if a further operand can still change its outcome. If there are few open rows, the
    operands are evaluated only for these.
    """
    for index, operand in enumerate(operands):
        if isinstance(outcomes, int):
            if outcomes in settled_sets(table):
                break
        else:
            open_rows = _find_open_rows(table, outcomes)
            are_few_open = len(open_rows) * NARROW_FACTOR <= len(outcomes)
            if are_few_open:  # evaluate all remaining operands for these rows only
                if len(open_rows):
                    outcomes[open_rows] = _join_operands(
                        table, outcomes[open_rows], operands[index:], rows.take(open_rows)
                    )
                break
        outcomes = _join(table, outcomes, _evaluate_plan(operand, rows))
    return outcomes


def _find_open_rows(table: bytes, outcomes: NDArray[np.uint8]) -> NDArray[np.intp]:
    """Return the indices of the rows whose outcome further operands of an AND or OR can change.

    `table` is the table of the AND or OR, and `outcomes` the result of the first operands for each
    row.
    """
    # With few settled sets, one comparison for each is faster than a look-up in a table.
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


def _order_operands(join: JoinPlan, rows: _Rows) -> list[Plan]:
    """Return the operands of an AND or OR in the order in which it is cheapest to evaluate them.

    An operand comes first if few rows stay open after it: rows whose outcome another operand can
    still change. This share is estimated from the operand's outcomes for the distinct values, as if
    all values were equally frequent.

    Only the first operands are sorted: those that read one property, up to the first one whose
    order changes the result. The other operands keep their order.
    """
    open_share_by_index: list[float] = []  # of the operands that may be exchanged
    previous_sets: set[int] = set()
    for operand in join.operands:
        if not isinstance(operand, SinglePropertyPlan):
            break
        outcomes = rows.table(operand)
        listed_outcomes = [outcomes] if isinstance(outcomes, int) else outcomes
        count_by_set = np.bincount(listed_outcomes, minlength=16)
        occurring_sets = np.flatnonzero(count_by_set).tolist()
        if not _are_exchangeable(join.table, occurring_sets, previous_sets):
            break
        previous_sets.update(occurring_sets)
        open_count = (count_by_set * _open_sets(join.table)).sum()
        open_share_by_index.append(float(open_count / count_by_set.sum()))

    sorted_count = len(open_share_by_index)
    best_order = sorted(range(sorted_count), key=open_share_by_index.__getitem__)
    return [*(join.operands[index] for index in best_order), *join.operands[sorted_count:]]


def _are_exchangeable(table: bytes, sets: Iterable[int], other_sets: Iterable[int]) -> bool:
    """Return whether an AND or OR has the same result for both orders of two operands.

    `table` is its table. `sets` are the outcomes that occur for one operand, and `other_sets` the
    outcomes that occur for the other one.
    """
    return all(
        table[left << 4 | right] == table[right << 4 | left]
        for left, right in product(sets, other_sets)
    )


def _gather_outcomes(table: NDArray[np.uint8], codes: NDArray[Any]) -> Outcomes:
    """Return the outcome `table[code]` of each row, or an int if all rows have the same.

    `codes` has, for each row, the index of its value in `table`. The code -1 of a row without a
    value selects the last entry.
    """
    # If at most FEW entries differ from the usual outcome, fill the rows with the usual outcome and
    # add the difference where a row has one of these codes.
    absent_index = len(table) - 1
    if absent_index > 0:
        usual_outcome = int(np.bincount(table[:-1], minlength=1).argmax())
    else:
        usual_outcome = int(table[0])
    differing_indices = np.flatnonzero(table != usual_outcome).tolist()
    only_absent_differs = differing_indices == [absent_index]
    if only_absent_differs and not (codes < 0).any():
        differing_indices = []
    if not differing_indices:
        return usual_outcome
    if len(differing_indices) > FEW:
        return table.take(codes, mode="wrap")

    outcomes = np.full(len(codes), usual_outcome, np.uint8)
    for index in differing_indices:
        code = -1 if index == absent_index else index
        difference = np.uint8((int(table[index]) - usual_outcome) & 0xFF)  # modulo 256
        outcomes += (codes == code).view(np.uint8) * difference
    return outcomes


def _evaluate_combinations(leaf: SeveralPropertiesPlan, block: ColumnBlock) -> Outcomes:
    """Return the outcome of a comparison of several properties for each row of a block.

    The comparison is evaluated once for every combination of values that occurs. Two columns with
    many values are instead compared by numpy, if possible. If all rows have the same outcome,
    because no property has a column, the result is an int.

    `block.excluded` contains properties with too many values for a column. If one of these is read,
    all verdicts are possible.
    """
    if not block.excluded.isdisjoint(leaf.names):
        return leaf.possible_set
    columns = {name: block.columns[name] for name in leaf.names if name in block.columns}
    if not columns:
        return 1 << evaluate_verdict(leaf.condition, {})
    pair_count = prod(len(column.values) for column in columns.values())
    if len(columns) == 2 and pair_count > PAIRS_SCALAR_MAX:
        outcomes = compare_two_columns(leaf, block.columns)
        if outcomes is not None:
            return outcomes

    combinations = _find_combinations(list(columns.values()))
    outcome_by_combination = np.empty(len(combinations.example_rows), np.uint8)
    for index, properties in enumerate(_iterate_properties(columns, combinations.example_rows)):
        outcome_by_combination[index] = 1 << evaluate_verdict(leaf.condition, properties)
    return outcome_by_combination.take(combinations.combination_of_row)


def _iterate_properties(
    columns: Mapping[str, Column], rows: NDArray[np.intp]
) -> Iterator[dict[str, str]]:
    """Yield the properties of each of these rows, as a dict from name to value.

    A property that the row does not have is left out.
    """
    codes_by_column = [column.codes[rows].tolist() for column in columns.values()]
    for codes_of_row in zip(*codes_by_column, strict=True):
        properties = {}
        for (name, column), code in zip(columns.items(), codes_of_row, strict=True):
            if code >= 0:
                properties[name] = column.values[code]
        yield properties


class _Combinations(NamedTuple):
    """The different combinations of codes that the rows of several columns have.

    `example_rows` contains one row for each combination. `combination_of_row` has, for each row,
    the index in `example_rows` of its combination.
    """

    example_rows: NDArray[np.intp]
    combination_of_row: NDArray[np.intp]


def _find_combinations(columns: Sequence[Column]) -> _Combinations:
    """Return the distinct combinations of values that occur in the rows of some columns.

    The result has an example row for each combination, and the index of the combination for each
    row.
    """
    keys, key_count = _make_combination_keys(columns)
    if key_count > COMBINATIONS_DENSE_MAX:
        _, example_rows, combination_of_row = np.unique(
            keys, return_index=True, return_inverse=True
        )
        return _Combinations(example_rows, combination_of_row)

    # With few possible keys, an array with one entry for each is faster than sorting the keys. It
    # first contains the last row with each key, then the index of the combination.
    entry_by_key = np.full(key_count, -1, np.int32)
    entry_by_key[keys] = np.arange(len(keys), dtype=np.int32)
    present_keys = np.flatnonzero(entry_by_key >= 0)
    example_rows = entry_by_key[present_keys].astype(np.intp)
    entry_by_key[present_keys] = np.arange(len(present_keys), dtype=np.int32)
    return _Combinations(example_rows, entry_by_key[keys].astype(np.intp))


def _make_combination_keys(columns: Sequence[Column]) -> tuple[NDArray[np.int64], int]:
    """Return (an integer key for each row, a number above all keys).

    Rows have equal keys if, and only if, they have equal codes in all columns. A key is a number
    with one digit for each column, the code plus 1, so that 0 means "absent". The base of a digit
    is the number of values of its column plus 1.
    """
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
    return keys, key_count


# --- Evaluation of one property for its distinct values


def _evaluate_values(leaf: SinglePropertyPlan, values: tuple[str, ...]) -> Outcomes:
    """Return the outcome of a plan for each of `values`, and for rows without a value.

    The result is an array with one entry for each value, followed by the outcome of an absent
    value.
    """
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
    """Evaluate a condition for each of `values`, one by one, and return the outcomes.

    The array has one more entry, for rows without a value. It is 0, and the caller must set it.
    """
    table = bytearray(len(values) + 1)
    properties: dict[str, str] = {}
    for index, value in enumerate(values):
        properties[leaf.name] = value
        table[index] = 1 << evaluate_verdict(leaf.condition, properties)
    return np.frombuffer(table, np.uint8)


def _evaluate_atom(values: tuple[str, ...], leaf: Leaf) -> NDArray[np.uint8]:
    """Return the outcome of an atom, a single comparison, for each of `values`.

    The array has one more entry, for rows without a value. It may be 0, because the caller sets it.
    Comparisons with strings and numbers are evaluated for all values at once, others one by one.
    """
    assert isinstance(leaf, AtomPlan)  # the leaves of a SinglePropertyPlan.atom_plan are atoms
    match leaf.node:
        case In(values=accepted_strings) if accepted_strings:
            return _evaluate_string_atom(values, leaf, accepted_strings)
        case Equal(left=Property(), right=Literal(value=str(compared_string))):
            return _evaluate_string_atom(values, leaf, (compared_string,))
        case _:
            pass
    comparison = as_number_comparison(leaf.node)
    if comparison is None:
        return _evaluate_scalar(leaf, values)
    return _evaluate_number_atom(values, leaf, *comparison)


def _evaluate_number_atom(
    values: tuple[str, ...],
    leaf: AtomPlan,
    number_class: JavaClass,
    operator: str,
    bound: float,
) -> NDArray[np.uint8]:
    """Return the outcome of a comparison with a number for each of `values`.

    The comparison is `value operator bound`. The values are converted to `number_class`. A value
    that cannot be converted has the outcome ERROR. The array has one more entry, the outcome of
    rows without a value.
    """
    parsed_numbers, errors = _compute_cached(
        values, number_class, lambda: parse_numbers(values, number_class)
    )
    is_true = _TESTS[operator](parsed_numbers, bound)
    table = np.empty(len(values) + 1, np.uint8)
    table[:-1] = np.where(is_true, np.uint8(1 << TRUE), np.uint8(1 << FALSE))
    if errors is not None:
        table[:-1][errors] = 1 << ERROR
    table[-1] = leaf.absent_set
    return table


def _evaluate_string_atom(
    values: tuple[str, ...], leaf: AtomPlan, compared_strings: tuple[str, ...]
) -> NDArray[np.uint8]:
    """Return the outcome of a comparison with one or more strings for each of `values`.

    The condition is evaluated once for each of `compared_strings`, and once for a string that
    represents all others. The array has one more entry, the outcome of rows without a value.
    """
    other_string = "".join(compared_strings) + "."  # longer than each of them
    other_outcome = 1 << evaluate_verdict(leaf.condition, {leaf.name: other_string})
    table = np.full(len(values) + 1, other_outcome, np.uint8)
    code_by_value = _compute_cached(
        values, "codes", lambda: {value: code for code, value in enumerate(values)}
    )
    for compared_string in compared_strings:
        code = code_by_value.get(compared_string)
        if code is not None:
            table[code] = 1 << evaluate_verdict(leaf.condition, {leaf.name: compared_string})
    table[-1] = leaf.absent_set
    return table


def _compute_cached(values: tuple[str, ...], key: object, compute: Callable[[], _T]) -> _T:
    """Return `compute()`, from a cache if possible.

    The result must depend only on `values`, and must not be None. If `values` is a `Values`, its
    cache keeps the result under `key`, so that all filters share it.
    """
    if not isinstance(values, Values):
        return compute()
    cached: _T | None = values.cache.get(key)
    if cached is None:
        cached = values.cache[key] = compute()
    return cached


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
