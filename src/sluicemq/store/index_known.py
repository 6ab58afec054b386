"""Keys that the index need not look for: the writer had them in its hands.

A batch that is written as columns (`record.batch_columns`) has the table of its properties, so its
keys are known when it is appended, and where its records begin. Both are kept here until the index
comes there; then it does not read the log. What is not here is read, and nothing depends on its
being here: after a restart, or when the index is far behind, it is not.

A turn that fails is taken back here, too.
"""

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from sluicemq.record.batch_columns import Columns as Batch
    from sluicemq.record.batch_columns import Laid
    from sluicemq.record.table import Positions
    from sluicemq.store.index_columns import Columns

BATCHES_MAX: Final = 256
"""The newest that are remembered: some ten megabytes."""


class Known(NamedTuple):
    """The keys of all records from `start` to `end` of the log: record i begins at `starts[i]`."""

    start: int
    end: int
    starts: "Positions"
    columns: "Columns"


class KnownKeys:
    """The batches that were appended last, in the order of the log."""

    def __init__(self, *, is_wanted: bool = True) -> None:
        """`is_wanted`: there is an index."""
        self._is_wanted = is_wanted
        self._batches: deque[Known] = deque(maxlen=BATCHES_MAX)

    def note(self, topic: str, batch: "Batch", laid: "Laid", stored_ms: int) -> None:
        """A batch was appended."""
        if not self._is_wanted:
            return
        from sluicemq.store.index_columns import columns_of_batch  # noqa: PLC0415 - NumPy

        columns = columns_of_batch(topic, batch, stored_ms)
        if columns is not None:
            start = int(laid.positions[0])
            self._batches.append(Known(start, laid.end, laid.positions, columns))

    def take_back(self, position: int) -> None:
        """What was appended from there on has never been."""
        while self._batches and self._batches[-1].start >= position:
            self._batches.pop()

    def next_start(self, position: int) -> int | None:
        """Where the first batch begins at `position` or behind; None without one."""
        while self._batches and self._batches[0].start < position:
            self._batches.popleft()
        return self._batches[0].start if self._batches else None

    def take(self, position: int, goal: int, bytes_max: int) -> Known | None:
        """The batches that lie one behind the other from `position` on, as one; None when none
        begins there, or ends behind `goal`."""
        found: list[Known] = []
        end = position
        while self._batches and end - position < bytes_max:
            first = self._batches[0]
            if first.start != end or first.end > goal:
                break
            found.append(self._batches.popleft())
            end = first.end
        return _joined(found) if found else None


def _joined(batches: list[Known]) -> Known:
    if len(batches) == 1:
        return batches[0]
    import numpy as np  # noqa: PLC0415 - it is there when there are batches

    columns = batches[0].columns
    counts = np.cumsum([0] + [len(one.starts) for one in batches[:-1]])
    records = [one.columns.records + before for one, before in zip(batches, counts, strict=True)]
    return Known(
        batches[0].start,
        batches[-1].end,
        np.concatenate([one.starts for one in batches]),
        columns._replace(
            hashes=np.concatenate([one.columns.hashes for one in batches]),
            records=np.concatenate(records),
            times_ms=np.concatenate([one.columns.times_ms for one in batches]),
        ),
    )
