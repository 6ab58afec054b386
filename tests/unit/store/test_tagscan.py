"""The vectorised scan gives what a loop over the units gives."""

import hypothesis.strategies as st
from hypothesis import given, settings

from sluicemq.store.consumequeue import BLANK_UNIT, UNIT
from sluicemq.store.tagscan import find_codes

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
    assert find_codes(memoryview(data), wanted) == expected
    assert find_codes(bytearray(data), wanted) == expected


def test_scan_begins_anywhere_in_a_file() -> None:
    data = memoryview(units([1, 2, 3, 2]))
    for start in range(5):
        expected = [i - start for i in (1, 3) if i >= start]
        assert find_codes(data[start * 20 :], {2}) == expected


def test_times_of_delayed_messages_are_not_taken_for_tags() -> None:
    low_word = 1_700_000_000_123 & 0x7FFFFFFF
    assert find_codes(memoryview(units([1_700_000_000_123])), {low_word}) == []


def test_blank_units_have_code_zero() -> None:
    assert find_codes(memoryview(BLANK_UNIT * 3), {97}) == []
