"""The steady clock: it never goes back, and waits no longer than the monotonic clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.stepped import START_MS, ManualClock
from sluicemq.clock import STEP_MS, SteadyClock

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("passes"), st.floats(0.001, 100_000.0)),
        st.tuples(st.just("is set"), st.floats(-4_000_000.0, 4_000_000.0)),
    ),
    max_size=30,
)


@given(STEPS)
def test_it_never_goes_back_and_follows_the_wall_clock_only_forward(
    steps: list[tuple[str, float]],
) -> None:
    clock = ManualClock()
    steady = SteadyClock(clock)
    passed_s, ahead_ms, before_ms = 0.0, 0.0, steady.now_ms()
    peak_ms = clock.now_ms() - clock.monotonic_s() * 1000
    for what, seconds in steps:
        if what == "passes":
            clock.advance(seconds)
            passed_s += seconds
        else:
            clock.set_wall_clock(seconds)
        difference_ms = clock.now_ms() - clock.monotonic_s() * 1000
        ahead_ms += max(difference_ms - peak_ms, 0.0)
        peak_ms = max(peak_ms, difference_ms)
        now_ms = steady.now_ms()
        assert now_ms >= before_ms
        assert now_ms >= clock.now_ms()
        assert steady.lead_ms % STEP_MS == 0
        least_ms = START_MS + passed_s * 1000 + ahead_ms
        assert least_ms - STEP_MS - 1 <= now_ms <= least_ms + 11
        before_ms = now_ms


def test_it_is_the_wall_clock_as_long_as_that_goes_forward() -> None:
    clock = ManualClock()
    steady = SteadyClock(clock)
    for _ in range(100):
        clock.advance(0.3)
        clock.set_wall_clock(7.0)
        assert (steady.now_ms(), steady.lead_ms) == (clock.now_ms(), 0)


def test_a_step_back_makes_a_lead_and_a_step_forward_ends_it() -> None:
    clock = ManualClock()
    steady = SteadyClock(clock)
    clock.set_wall_clock(-3600)
    assert (steady.now_ms(), steady.lead_ms) == (START_MS, 3_600_000)
    clock.advance(5)
    assert steady.now_ms() == START_MS + 5000
    clock.set_wall_clock(600)
    assert (steady.now_ms(), steady.lead_ms) == (START_MS + 5000, 3_000_000)
    clock.set_wall_clock(3000)
    assert (steady.now_ms(), steady.lead_ms) == (clock.now_ms(), 0)


@pytest.mark.parametrize(("time_ms", "lead_ms"), [(-5, 0), (0, 0), (1, 1000), (90_000, 90_000)])
def test_it_goes_on_from_an_earlier_time(time_ms: int, lead_ms: int) -> None:
    clock = ManualClock()
    steady = SteadyClock(clock)
    steady.raise_to(START_MS + time_ms)
    assert steady.lead_ms == lead_ms
    assert START_MS + time_ms <= steady.now_ms() <= START_MS + max(time_ms, 0) + STEP_MS
