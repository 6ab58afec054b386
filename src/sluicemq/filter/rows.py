"""Messages that are at hand as properties, put into a block of columns: for the filter lab."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sluicemq.record.columns import Column, ColumnBlock


def block_of(
    rows: Sequence[Mapping[str, str]],
    *,
    first_offset: int = 0,
    excluded: Iterable[str] = (),
    odd: Sequence[int] = (),
) -> ColumnBlock:
    """A block of these messages. Of the names in `excluded` those that occur are no columns; the
    rows in `odd` are given as if they could not be decoded."""
    skipped = frozenset(odd)
    numbers: dict[str, dict[str, int]] = {}
    codes: dict[str, list[int]] = {}
    for at, row in enumerate(rows):
        for name, value in row.items() if at not in skipped else ():
            known = numbers.setdefault(name, {})
            column = codes.setdefault(name, [-1] * len(rows))
            column[at] = known.setdefault(value, len(known))
    left_out = frozenset(excluded) & codes.keys()
    columns = {
        name: Column(_smallest(column, len(numbers[name])), tuple(numbers[name]))
        for name, column in codes.items()
        if name not in left_out
    }
    return ColumnBlock(first_offset, len(rows), columns, left_out, np.array(odd, np.int64))


def _smallest(codes: list[int], count: int) -> Any:
    kind = next(kind for kind in (np.int8, np.int16, np.int32) if count <= np.iinfo(kind).max)
    return np.array(codes, kind)
