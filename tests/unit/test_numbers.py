"""Whole numbers in texts of others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicemq.numbers import LONG_MAX, natural, other_unit


@given(st.integers(0, LONG_MAX), st.integers(0, 20), st.booleans())
def test_digits_are_read(number: int, zeros: int, is_bytes: bool) -> None:
    text = "0" * zeros + str(number)
    assert natural(text.encode() if is_bytes else text) == number


@pytest.mark.parametrize(
    "text",
    ["", "-1", "+1", " 1", "1 ", "1_000", "1.0", "\u0661", "\uff11", "x", "9" * 5000, b"\xb2"],
)
def test_everything_else_is_no_number(text: str | bytes) -> None:
    assert natural(text) is None


def test_a_number_above_the_maximum_is_none() -> None:
    assert natural(str(LONG_MAX)) == LONG_MAX
    assert natural(str(LONG_MAX + 1)) is None
    assert natural("10", 9) is None


@given(st.integers(1_000_000_000_000, 4_000_000_000_000))
def test_a_time_of_today_is_known_in_every_unit(time_ms: int) -> None:
    assert other_unit(time_ms) is None
    seconds = time_ms // 1_000
    assert other_unit(seconds) == ("seconds", seconds * 1_000)
    assert other_unit(time_ms * 1_000 + 7) == ("microseconds", time_ms)
    assert other_unit(time_ms * 1_000_000 + 7) == ("nanoseconds", time_ms)


@pytest.mark.parametrize("number", [-1, 0, 1, 999_999_999, 10**10, LONG_MAX])
def test_other_numbers_may_be_milliseconds(number: int) -> None:
    assert other_unit(number) is None
