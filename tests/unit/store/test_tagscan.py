"""The vectorised scan gives what a loop over the units gives."""

from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from sluicemq.store.bulk import TagHits, find_tag_codes
from sluicemq.store.queues import BLANK_UNIT, UNIT

INTERESTING = [0, 1, -1, 97, -97, (1 << 31) - 1, -(1 << 31), 1 << 31, -(1 << 31) - 1, 1 << 40]
CODES = st.sampled_from(INTERESTING) | st.integers(-(1 << 63), (1 << 63) - 1)
HASHES = st.sampled_from([c for c in INTERESTING if -(1 << 31) <= c < 1 << 31])


def units(codes: list[int]) -> bytes:
    return b"".join(UNIT.pack(7, 100, code) for code in codes)


@settings(max_examples=100, deadline=None)
@given(st.lists(CODES, max_size=60), st.frozensets(HASHES, max_size=4))
def test_scan_equals_a_loop(stored: list[int], wanted: frozenset[int]) -> None:
    expected = [index for index, code in enumerate(stored) if code in wanted]
    data = units(stored)
    assert find_tag_codes(memoryview(data), wanted).tolist() == expected
    assert find_tag_codes(bytearray(data), wanted).tolist() == expected


def test_scan_begins_anywhere_in_a_file() -> None:
    data = memoryview(units([1, 2, 3, 2]))
    for start in range(5):
        expected = [i - start for i in (1, 3) if i >= start]
        assert find_tag_codes(data[start * 20 :], {2}).tolist() == expected


def test_times_of_delayed_messages_are_not_taken_for_tags() -> None:
    low_word = 1_700_000_000_123 & 0x7FFFFFFF
    assert find_tag_codes(memoryview(units([1_700_000_000_123])), {low_word}).tolist() == []


def test_blank_units_have_code_zero() -> None:
    assert find_tag_codes(memoryview(BLANK_UNIT * 3), {97}).tolist() == []


class FakeQueue:
    topic, queue_id = "T", 0

    def __init__(self, codes: list[int]) -> None:
        self._data = memoryview(units(codes))
        self.looked_at = 0

    def units(self, start: int, count: int) -> memoryview:
        self.looked_at += count
        return self._data[start * 20 : (start + count) * 20]


def walk(hits: TagHits, queue: Any, wanted: frozenset[int], steps: list[int], end: int) -> None:
    """As a reader does that goes on in the middle of a chunk, or somewhere else."""
    codes = [code for _, _, code in UNIT.iter_unpack(queue._data)]
    position = 0
    for step in steps:
        found = hits.at(queue, wanted, position, end, 4)
        assert found is not None
        assert found.start <= position < found.stop
        expected = [at for at in range(found.start, found.stop) if codes[at] in wanted]
        assert found.offsets == expected
        assert found.units == b"".join(queue.units(at, 1) for at in expected)
        position = (position + step) % end


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=60),
    st.frozensets(st.sampled_from([1, 2]), min_size=1),
    st.lists(st.integers(0, 12), max_size=20),
    st.integers(1, 60),
)
def test_hits_that_are_kept_are_those_that_a_look_finds(
    stored: list[int], wanted: frozenset[int], steps: list[int], end: int
) -> None:
    walk(TagHits(), FakeQueue(stored), wanted, steps, min(end, len(stored)))


def test_no_unit_is_looked_at_twice_by_a_reader_that_goes_on() -> None:
    hits, queue, wanted = TagHits(), FakeQueue([1, 2] * 500), frozenset({2})
    position = 0
    while position < 1000:
        found = hits.at(queue, wanted, position, 1000, 64)  # type: ignore[arg-type]
        assert found is not None
        coming = [offset for offset in found.offsets if offset >= position]
        position = coming[2] if len(coming) > 2 else found.stop
    assert queue.looked_at == 1000


def test_a_queue_that_was_made_again_has_other_hits() -> None:
    hits, wanted = TagHits(), frozenset({2})
    for codes in ([2, 1], [1, 2]):
        queue: Any = FakeQueue(codes)
        found = hits.at(queue, wanted, 0, 2, 2)
        assert found is not None
        assert found.offsets == [codes.index(2)]
