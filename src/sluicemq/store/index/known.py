"""The keys of batches that were appended lately, so that the key index need not read the log."""

from collections import deque
from collections.abc import Sequence
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
        """Remember the keys of a batch of `topic` that was appended at `stored_ms`.

        `encoded` has the positions of its records in the log. Does nothing if there is no index, or
        if the keys cannot be told from the batch alone.
        """
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
        """Remove the consecutive batches that begin at `position`, and return them joined into one.

        Batches that end after position `goal` stay. Stop when the joined batch has `bytes_max`
        bytes of the log or more. Return None if no batch begins at `position`, or if it ends after
        `goal`.
        """
        batches: list[KnownBatch] = []
        end = position
        while self._batches and end - position < bytes_max:
            next_batch = self._batches[0]
            if next_batch.start != end or next_batch.end > goal:
                break
            batches.append(self._batches.popleft())
            end = next_batch.end
        if not batches:
            return None
        if len(batches) == 1:
            return batches[0]
        return _join_batches(batches)


def _join_batches(batches: Sequence[KnownBatch]) -> KnownBatch:
    """Join batches that follow one another in the log into one batch."""
    import numpy as np  # noqa: PLC0415 - loaded already if there are batches

    # The numbers of records count from the first record of the joined batch.
    hashes = []
    record_numbers = []
    times_ms = []
    record_count = 0
    for batch in batches:
        hashes.append(batch.columns.hashes)
        record_numbers.append(batch.columns.records + record_count)
        times_ms.append(batch.columns.times_ms)
        record_count += len(batch.record_starts)

    columns = batches[0].columns._replace(
        hashes=np.concatenate(hashes),
        records=np.concatenate(record_numbers),
        times_ms=np.concatenate(times_ms),
    )
    record_starts = np.concatenate([batch.record_starts for batch in batches])
    return KnownBatch(batches[0].start, batches[-1].end, record_starts, columns)
