"""Blocks of columns with properties that are not columns, and rows that could not be decoded."""

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
    """Return a block of these messages.

    The properties in `excluded` are not columns. The rows in `odd` look as if they could not be
    decoded.
    """
    decoded = [{} if index in odd else row for index, row in enumerate(rows)]
    block = lab.build_block(decoded, first_offset)
    left_out = block.columns.keys() & frozenset(excluded)
    columns = {name: column for name, column in block.columns.items() if name not in left_out}
    return block._replace(
        columns=columns, excluded=frozenset(left_out), odd=np.array(odd, np.int64)
    )
