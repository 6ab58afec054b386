"""The keys of batches that were appended lately, so that the key index need not read the log."""

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from sluicemq.record.batch_columns import BatchColumns as Batch
    from sluicemq.record.batch_columns import EncodedRecords
    from sluicemq.record.table import Positions
    from sluicemq.store.index.columns import KeyColumns

BATCHES_MAX: Final = 256
"""The number of batches whose keys are remembered. They take some ten megabytes."""


class KnownBatch(NamedTuple):
    """The keys of consecutive records of the log, noted when the records were appended."""

    start: int
    """The position at which the first record begins."""
    end: int
    """The position at which the last record ends."""
    record_starts: "Positions"
    """The position at which each record begins."""
    columns: "KeyColumns"


class KnownKeys:
    """The keys of the batches that were appended last, in the order of the log."""

    def __init__(self, *, is_wanted: bool = True) -> None:
        """Remember nothing unless `is_wanted`, which says whether there is an index."""
        self._is_wanted = is_wanted
        self._batches: deque[KnownBatch] = deque(maxlen=BATCHES_MAX)

    def note_batch(
        self, topic: str, batch: "Batch", encoded: "EncodedRecords", stored_ms: int
    ) -> None:
        """Note a batch of `topic` that was appended at `stored_ms`; `encoded` has its positions."""
        if not self._is_wanted:
            return
        from sluicemq.store.index.columns import key_columns_of_batch  # noqa: PLC0415 - imports NumPy

        columns = key_columns_of_batch(topic, batch, stored_ms)
        if columns is not None:
            start = int(encoded.positions[0])
            self._batches.append(KnownBatch(start, encoded.end, encoded.positions, columns))

    def discard_from(self, position: int) -> None:
        """Forget batches that begin at `position` or later, because their group commit failed."""
        while self._batches and self._batches[-1].start >= position:
            self._batches.pop()

    def next_start(self, position: int) -> int | None:
        """Return the start of the first batch at `position` or later; None if there is none.

        Forget the batches before.
        """
        while self._batches and self._batches[0].start < position:
            self._batches.popleft()
        return self._batches[0].start if self._batches else None

    def take(self, position: int, goal: int, bytes_max: int) -> KnownBatch | None:
        """Remove the consecutive batches that begin at `position`, and return them as one.

        They end at position `goal` at most. Stop after `bytes_max` bytes of the log. Return None if
        no batch begins at `position`, or if it ends after `goal`.
        """
        found: list[KnownBatch] = []
        end = position
        while self._batches and end - position < bytes_max:
            first = self._batches[0]
            if first.start != end or first.end > goal:
                break
            found.append(self._batches.popleft())
            end = first.end
        if len(found) < 2:
            return found[0] if found else None
        import numpy as np  # noqa: PLC0415 - loaded already if there are batches

        before = np.cumsum([0] + [len(one.record_starts) for one in found[:-1]])
        hashes, records, times_ms = zip(*(one.columns for one in found), strict=True)
        columns = found[0].columns._replace(
            hashes=np.concatenate(hashes),
            records=np.concatenate([own + n for own, n in zip(records, before, strict=True)]),
            times_ms=np.concatenate(times_ms),
        )
        return KnownBatch(
            position, end, np.concatenate([one.record_starts for one in found]), columns
        )
