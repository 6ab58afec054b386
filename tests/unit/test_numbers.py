"""Whole numbers in texts of others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicemq.numbers import LONG_MAX, format_duration, natural, other_unit, parse_duration_ms


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


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [("500ms", 500), ("90s", 90_000), ("15m", 900_000), ("6h", 21_600_000), ("7d", 604_800_000),
     ("0s", 0), ("1.5h", 5_400_000), ("0.5ms", 0.5), ("3  s", 3_000), ("007d", 604_800_000)],
)  # fmt: skip
def test_durations_are_read(text: str, duration_ms: float) -> None:
    found = parse_duration_ms(text)
    assert found == duration_ms
    assert isinstance(found, float) == ("." in text)


@pytest.mark.parametrize(
    "text",
    ["", "s", "5", "-1s", "+1s", " 1s", "1s ", "1.s", ".5s", "1 S", "1min", "1e3s", "\u0661s",
     "1s2m", "9" * 64 + "d", "9" * 5000 + "s", "1\n s"],
)  # fmt: skip
def test_everything_else_is_no_duration(text: str) -> None:
    assert parse_duration_ms(text) is None


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [(0, "0 s"), (0.4, "0 s"), (999, "999 ms"), (1_000, "1 s"), (90_000, "1 min 30 s"),
     (3_600_000, "1 h"), (97_200_000, "1 d 3 h"), (90_061_001, "1 d 1 h"), (-5, "-5 ms")],
)  # fmt: skip
def test_a_duration_is_shown_in_its_two_largest_units(duration_ms: float, text: str) -> None:
    assert format_duration(duration_ms) == text
