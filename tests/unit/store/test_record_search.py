"""Finding the next record after damaged bytes, and judging where a record may lie."""

from typing import Any

import pytest

from sluicemq.record.layout import RECORD_BYTES_MIN
from sluicemq.store.dispatch import _is_plausible, find_next_record
from sluicemq.store.queues import Unit


@pytest.mark.parametrize("topic", ["T", "%RETRY%" + "g" * 200])
def test_records_of_both_versions_are_found(bench: Any, topic: str) -> None:
    """A topic of more than 127 bytes makes a record with another magic number."""
    store = bench.open()
    bench.send(b"one", topic=topic)
    ((second, _),) = bench.send(b"two", topic=topic)
    found = find_next_record(store._log, 1)
    assert found is not None
    assert found.position == second


class QueueEnd:
    """A queue whose last message has offset 4 and is at position 1000."""

    next_offset = 5

    def unit(self, offset: int) -> Unit:
        return Unit(1000, 200, 0)


@pytest.mark.parametrize(("missing", "is_plausible"), [(0, True), (1, False)])
def test_a_record_is_as_far_from_the_last_one_as_the_lost_ones_need(
    missing: int, is_plausible: bool
) -> None:
    """Offset 8 means three lost messages, each of which had at least the smallest record."""
    unit = Unit(1000 + 4 * RECORD_BYTES_MIN - missing, 200, 0)
    assert _is_plausible(QueueEnd(), 8, unit) is is_plausible  # type: ignore[arg-type]
