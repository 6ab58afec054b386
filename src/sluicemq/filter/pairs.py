"""Two columns of many values beside each other: `price > cost`, `a = b`.

Each row is put into one of five cases, and what comes of a case is asked of the scalar engine, on
properties that are an example of it. Order compares as Double.compareTo does: by the bits, made
to ascend with the numbers, NaN all alike and above the rest, -0.0 below 0.0.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sluicemq.filter.column_numbers import parse_numbers
from sluicemq.filter.nodes import Equal, JavaClass, Order, Property
from sluicemq.filter.outcomes import verdict_of
from sluicemq.filter.plan import Several
from sluicemq.record.columns import Column

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
    case_of = _order_cases if isinstance(node, Order) else _equal_cases
    return found.take(case_of(columns[left], columns[right]))


def _order_cases(left: Column, right: Column) -> NDArray[np.intp]:
    first, first_fails = _sortable(left)
    second, second_fails = _sortable(right)
    cases = np.where(first < second, _LESS, np.where(first == second, _SAME, _MORE))
    if first_fails is not None:
        cases[first_fails] = _ERROR
    if second_fails is not None:
        cases[second_fails] = _ERROR
    cases[(left.codes < 0) | (right.codes < 0)] = _NULL  # looked at before any conversion
    return cases


def _sortable(column: Column) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """For each row a number that sorts as its Double does, and whether it is none at all."""
    numbers, errors = parse_numbers(column.values, JavaClass.DOUBLE)
    numbers[np.isnan(numbers)] = np.nan
    bits = numbers.view(np.int64)
    ascending = bits ^ (bits >> 63 & np.int64(0x7FFFFFFFFFFFFFFF))
    fails = None if errors is None else _on_rows(errors, column.codes)
    return _on_rows(ascending, column.codes), fails


def _equal_cases(left: Column, right: Column) -> NDArray[np.intp]:
    number_of = {value: number for number, value in enumerate(left.values)}
    same = np.fromiter((number_of.get(value, -2) for value in right.values), np.int64)
    first, second = left.codes.astype(np.int64), _on_rows(same, right.codes)
    cases = np.where(first == second, _ALIKE, _UNLIKE)
    no_left, no_right = first < 0, right.codes < 0
    cases[no_right] = _LEFT_ONLY
    cases[no_left] = _RIGHT_ONLY
    cases[no_left & no_right] = _NEITHER
    return cases


def _on_rows(of_values: NDArray[Any], codes: NDArray[Any]) -> NDArray[Any]:
    """Gathered; what stands in rows without a value is of no matter."""
    return (
        of_values.take(codes, mode="wrap")
        if len(of_values)
        else np.zeros(len(codes), of_values.dtype)
    )
