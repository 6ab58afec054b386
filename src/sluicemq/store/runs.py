"""Many units at once: records that lie side by side in the log are one run, found with NumPy.

A bulk read takes ten thousand messages, and as they were sent in batches, or to one topic, they lie
in a few runs. Looking at each unit in turn costs more than all the rest of such a read. NumPy is
imported with this module, and this module at the first bulk read.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sluicemq.record.table import UNIT_COLUMNS
from sluicemq.store.consumequeue import BLANK_SIZE


class Runs(NamedTuple):
    """`places`: from where to where each run goes, in the order of the queue; `messages` of
    `size_bytes` together."""

    places: list[tuple[int, int]]
    messages: int
    size_bytes: int


def runs_of(units: memoryview | bytearray | bytes, count_max: int, bytes_max: int) -> Runs | None:
    """The first units, as far as both limits allow; None when some unit is blank or nonsense."""
    rows = np.frombuffer(units, UNIT_COLUMNS)
    sizes = rows["size"].astype(np.int64)
    if (sizes <= 0).any() or (sizes == BLANK_SIZE).any():
        return None
    totals = np.cumsum(sizes)
    count = min(count_max, int(np.searchsorted(totals, bytes_max, "right")))
    if count <= 0:
        return Runs([], 0, 0)
    starts = rows["position"][:count].astype(np.int64)
    ends = starts + sizes[:count]
    cuts = [0, *(np.flatnonzero(starts[1:] != ends[:-1]) + 1).tolist(), count]
    places = [(int(starts[begin]), int(ends[end - 1])) for begin, end in pairwise(cuts)]
    return Runs(places, count, int(totals[count - 1]))
