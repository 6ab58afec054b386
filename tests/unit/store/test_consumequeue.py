"""Queues at recovery: units are put where the records say, once, and gaps stay gaps."""

from typing import Any

import pytest

from sluicemq.errors import MessageIllegalError
from sluicemq.store.queues import UNIT, ConsumeQueues, Queue, Unit
from sluicemq.testing.files import CrashableFiles


def unit(place: int) -> Unit:
    return Unit(place, 100, 5)


@pytest.fixture
def queues() -> ConsumeQueues:
    files = CrashableFiles()
    files.make_directory("/cq")
    return ConsumeQueues(files, "/cq", 100)  # five units a file


def places(queue: Queue) -> list[int | None]:
    found = [queue.unit(offset) for offset in range(queue.offset_min, queue.next_offset)]
    return [None if u is None or u.is_blank else u.physical_offset for u in found]


@pytest.mark.parametrize("flushed", [False, True])
def test_unit_that_is_there_is_not_put_again(queues: ConsumeQueues, flushed: bool) -> None:
    queue = queues.get_or_create(("T", 0))
    for offset in range(12):
        assert queue.put(offset, unit(offset * 100))
    if flushed:
        queue.flush()
    for offset in range(12):
        assert not queue.put(offset, unit(offset * 100))
    assert places(queue) == list(range(0, 1200, 100))


@pytest.mark.parametrize("flushed", [False, True])
def test_later_record_with_a_known_offset_begins_the_queue_anew_there(
    queues: ConsumeQueues, flushed: bool
) -> None:
    queue = queues.get_or_create(("T", 0))
    for offset in range(12):
        queue.put(offset, unit(offset * 100))
    if flushed:
        queue.flush()
    assert queue.put(3, unit(5000))
    assert places(queue) == [0, 100, 200, 5000]
    queue.flush()
    again = Queue(queue.segments.files, "/cq/T/0", 100, ("T", 0))
    again.load(after_crash=False)
    again.update_offset_min(0)
    assert places(again) == [0, 100, 200, 5000]


def test_gap_is_filled_with_blank_units(queues: ConsumeQueues) -> None:
    queue = queues.get_or_create(("T", 0))
    queue.put(0, unit(0))
    queue.put(4, unit(500))
    assert places(queue) == [0, None, None, None, 500]


def test_first_unit_sets_where_an_empty_queue_begins(queues: ConsumeQueues) -> None:
    queue = queues.get_or_create(("T", 0))
    queue.put(7, unit(0))
    queue.put(8, unit(100))
    queue.update_offset_min(0)
    assert (queue.offset_min, queue.next_offset) == (7, 9)
    queue.flush()
    again = Queue(queue.segments.files, "/cq/T/0", 100, ("T", 0))
    again.load(after_crash=False)
    again.update_offset_min(0)
    assert (again.offset_min, again.next_offset) == (7, 9)
    assert places(again) == [0, 100]


def test_first_offset_moves_behind_records_deleted_from_the_log(queues: ConsumeQueues) -> None:
    queue = queues.get_or_create(("T", 0))
    for offset in range(12):
        queue.put(offset, unit(offset * 100))
    queue.flush()
    for log_start, first in [(0, 0), (1, 1), (500, 5), (550, 6), (9999, 12)]:
        queue.update_offset_min(log_start)
        assert queue.offset_min == first


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("gap", range(1, 12))
def test_a_gap_in_the_middle_hides_nothing_before_it(
    queues: ConsumeQueues, flushed: bool, gap: int
) -> None:
    queue = queues.get_or_create(("T", 0))
    for offset in range(12):
        if offset != gap or offset == 11:
            queue.put(offset, unit(offset * 100))
    if flushed:
        queue.flush()
    for log_start in range(0, 1150, 50):
        queue.update_offset_min(log_start)
        there = [n for n in range(12) if n * 100 >= log_start and (n != gap or n == 11)]
        assert queue.offset_min == there[0]


def test_end_is_found_before_a_place_in_the_log(queues: ConsumeQueues) -> None:
    queue = queues.get_or_create(("T", 0))
    for offset in range(12):
        queue.put(offset, unit(offset * 100))
    queue.flush()
    for before, end in [(9999, 12), (1101, 12), (1100, 11), (500, 5), (1, 1), (0, 0)]:
        again = Queue(queue.segments.files, "/cq/T/0", 100, ("T", 0))
        again.load(after_crash=True, before=before)
        assert again.next_offset == end


def test_long_queue_is_opened_with_few_reads(queues: ConsumeQueues, monkeypatch: Any) -> None:
    queue = queues.get_or_create(("T", 0))
    for offset in range(3000):
        queue.put(offset, unit(offset * 100))
    queue.flush()
    looks: list[int] = []
    original = Queue.read_unit
    monkeypatch.setattr(
        Queue, "read_unit", lambda self, offset: (looks.append(offset), original(self, offset))[1]
    )
    again = Queue(queue.segments.files, "/cq/T/0", 100, ("T", 0))
    again.load(after_crash=False)
    assert again.next_offset == 3000
    assert len(looks) <= 12


def test_blank_units_are_passed_over_by_readers(bench: Any) -> None:
    store = bench.open()
    bench.send(b"0", b"1")
    second = bench.messages()[1]
    queue = store._queues.by_key["T", 0]
    queue.truncate(1)
    queue.put(3, Unit(second.physical_offset, second.size_bytes, 0))
    result = store.reader.read("T", 0, 0, 32)
    assert (result.count, result.next_offset) == (2, 4)
    assert store.reader.read("T", 0, 1, 1).count == 1


def test_queue_ids_and_topics_are_checked_for_new_queues_only(queues: ConsumeQueues) -> None:
    with pytest.raises(MessageIllegalError):
        queues.get_or_create(("a/b", 0))
    assert queues.get_unchecked(("t" * 300, 0)) is queues.get_or_create(("t" * 300, 0))


def test_mended_unit_is_right_in_the_tail_and_in_the_file(queues: ConsumeQueues) -> None:
    queue = queues.get_or_create(("T", 0))
    for offset in range(3):
        queue.put(offset, unit(offset * 100))
    queue.flush()
    for _ in range(2):
        again = Queue(queue.segments.files, "/cq/T/0", 100, ("T", 0))
        again.load(after_crash=False)  # which has the last unit in its tail
        again.overwrite_unit(2, UNIT.pack(*unit(777)))
        assert places(again) == [0, 100, 777]
    again = Queue(queue.segments.files, "/cq/T/0", 100, ("T", 0))
    again.load(after_crash=False)
    assert places(again) == [0, 100, 777]
