"""Keys that the writer tells the index, in the order of the log, as far as they are true."""

import numpy as np
import pytest

from sluicemq.record.batch_columns import EncodedRecords
from sluicemq.store.index import columns as index_columns
from sluicemq.store.index.columns import KeyColumns
from sluicemq.store.index.known import BATCHES_MAX, KnownBatch, KnownKeys


@pytest.fixture(autouse=True)
def numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is a number here, and has one key of that hash in each of its two records."""

    def key_columns_of_batch(topic: str, batch: int, stored_ms: int) -> KeyColumns | None:
        hashes = np.full(2, batch, np.int32)
        return KeyColumns(hashes, np.arange(2), np.full(2, stored_ms)) if batch >= 0 else None

    monkeypatch.setattr(index_columns, "key_columns_of_batch", key_columns_of_batch)


def known(*batches: tuple[int, int]) -> KnownKeys:
    """(start, number) of batches of ten bytes."""
    keys = KnownKeys()
    for start, number in batches:
        laid = EncodedRecords([], b"", np.array([start, start + 4]), start + 10)
        keys.note_batch("T", number, laid, 5)  # type: ignore[arg-type]
    return keys


def test_batches_that_touch_each_other_are_taken_together() -> None:
    keys = known((10, 1), (20, 2), (40, 3))
    assert keys.next_start(10) == 10
    found = keys.take(10, 100, 1000)
    assert found is not None
    assert (found.start, found.end, found.record_starts.tolist()) == (10, 30, [10, 14, 20, 24])
    assert found.columns.hashes.tolist() == [1, 1, 2, 2]
    assert found.columns.records.tolist() == [0, 1, 2, 3]
    assert found.columns.times_ms.tolist() == [5] * 4
    assert keys.next_start(30) == 40
    assert keys.take(30, 100, 1000) is None


def test_no_more_is_taken_than_is_wanted_or_written() -> None:
    keys = known((0, 1), (10, 2), (20, 3))
    for goal, size in ((100, 10), (19, 1000)):
        first = keys.take(0, goal, size)
        assert isinstance(first, KnownBatch)
        assert first.end == 10
        keys = known((0, 1), (10, 2), (20, 3))
    assert keys.take(0, 9, 1000) is None


def test_what_was_never_written_and_what_lies_behind_is_forgotten() -> None:
    keys = known((0, 1), (10, 2), (20, 3))
    keys.discard_from(10)
    assert keys.next_start(0) == 0
    assert keys.next_start(1) is None
    keys.discard_from(0)
    assert keys.next_start(0) is None


def test_only_the_newest_are_kept_and_none_without_an_index() -> None:
    keys = known(*((10 * number, number) for number in range(BATCHES_MAX + 3)))
    assert keys.next_start(0) == 30
    unwanted = KnownKeys(is_wanted=False)
    unwanted.note_batch("T", 1, EncodedRecords([], b"", np.array([0, 4]), 10), 5)  # type: ignore[arg-type]
    assert unwanted.next_start(0) is None
    assert known((0, -1)).next_start(0) is None, "its keys have to be read"
