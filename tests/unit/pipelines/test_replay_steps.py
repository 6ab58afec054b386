"""The steps of a replay and their rate."""

import threading

import pytest

from simulation.stepped import ManualClock
from sluicemq.pipelines.sinks import steps
from sluicemq.pipelines.sinks.steps import (
    WINDOWS_MAX,
    OffsetWindow,
    Pacer,
    group_into_steps,
    rows_per_step,
)


def windows(*rows: int) -> list[OffsetWindow]:
    return [OffsetWindow("t", "a", 0, turn * 10, turn * 10 + 10, n) for turn, n in enumerate(rows)]


def test_steps_have_at_most_the_requested_rows_and_every_window_once() -> None:
    found = list(group_into_steps(windows(5, 5, 1, 9, 2, 40, 3), 10))
    assert [[one.rows for one in step] for step in found] == [[5, 5], [1, 9], [2], [40], [3]]
    many = list(group_into_steps(windows(*[1] * 150), 1_000))
    assert [len(step) for step in many] == [WINDOWS_MAX, WINDOWS_MAX, 150 - 2 * WINDOWS_MAX]


@pytest.mark.parametrize(
    ("rate", "asked", "rows"), [(0, 0, 100_000), (50, 0, 100), (0.1, 0, 1), (1e9, 0, 100_000),
                                (50, 7, 7)],
)  # fmt: skip
def test_a_step_is_two_seconds_of_the_rate(rate: float, asked: int, rows: int) -> None:
    assert rows_per_step(rate, asked) == rows


def test_the_average_rate_is_limited_for_steps_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 rows at 100 per second take ten seconds, however long each step takes."""
    clock = ManualClock()

    class Waiting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            clock.advance(timeout or 0)
            return False

    monkeypatch.setattr(steps.threading, "Event", Waiting)
    pace = Pacer(100.0, clock)
    for rows in (10, 400, 90, 500):
        clock.advance(0.2)
        pace.wait(rows, lambda: False)
    assert 9.99 <= clock.monotonic_s() <= 11.0
    before = clock.monotonic_s()
    pace.wait(10_000, lambda: True)
    assert clock.monotonic_s() == before, "a stopped job does not wait"
