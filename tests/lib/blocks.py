"""Blocks of columns as a log may give them: with names that are no columns, with odd rows."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from sluicemq.filter import lab
from sluicemq.record.columns import ColumnBlock


def block_of(
    rows: Sequence[Mapping[str, str]],
    *,
    first_offset: int = 0,
    excluded: Iterable[str] = (),
    odd: Sequence[int] = (),
) -> ColumnBlock:
    """A block of these messages. Of the names in `excluded` those that occur are no columns; the
    rows in `odd` are given as if they could not be decoded."""
    told = [{} if at in odd else row for at, row in enumerate(rows)]
    block = lab.block_of(told, first_offset)
    left_out = block.columns.keys() & frozenset(excluded)
    columns = {name: column for name, column in block.columns.items() if name not in left_out}
    return block._replace(
        columns=columns, excluded=frozenset(left_out), odd=np.array(odd, np.int64)
    )
