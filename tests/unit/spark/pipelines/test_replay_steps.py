"""Steps of a replay, their pace, and what is decided about each dead letter."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from simulation.stepped import ManualClock
from sluicemq.filter.subscriptions import subscribe
from sluicemq.spark.pipelines import ready as steps
from sluicemq.spark.pipelines.deadletters import Judge
from sluicemq.spark.pipelines.ready import WINDOWS_MAX, Pace, Window, step_rows, steps_of


def windows(*rows: int) -> list[Window]:
    return [Window("t", "a", 0, turn * 10, turn * 10 + 10, n) for turn, n in enumerate(rows)]


def test_steps_hold_about_the_rows_asked_for_and_every_window_once() -> None:
    found = list(steps_of(windows(5, 5, 1, 9, 2, 40, 3), 10))
    assert [[one.rows for one in step] for step in found] == [[5, 5], [1, 9], [2], [40], [3]]
    many = list(steps_of(windows(*[1] * 150), 1_000))
    assert [len(step) for step in many] == [WINDOWS_MAX, WINDOWS_MAX, 150 - 2 * WINDOWS_MAX]


@pytest.mark.parametrize(
    ("rate", "asked", "rows"), [(0, 0, 100_000), (50, 0, 100), (0.1, 0, 1), (1e9, 0, 100_000),
                                (50, 7, 7)],
)  # fmt: skip
def test_a_step_is_two_seconds_of_the_rate(rate: float, asked: int, rows: int) -> None:
    assert step_rows(rate, asked) == rows


def test_the_pace_is_kept_over_steps_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 rows at 100 a second take ten seconds, whatever a step itself takes."""
    clock = ManualClock()

    class Waiting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            clock.advance(timeout or 0)
            return False

    monkeypatch.setattr(steps.threading, "Event", Waiting)
    pace = Pace(100.0, clock)
    for rows in (10, 400, 90, 500):
        clock.advance(0.2)
        pace.wait(rows, lambda: False)
    assert 9.99 <= clock.monotonic_s() <= 11.0
    before = clock.monotonic_s()
    pace.wait(10_000, lambda: True)
    assert clock.monotonic_s() == before, "who stops does not wait"


def row(**changes: Any) -> Mapping[str, Any]:
    return {
        "target": "orders", "read_as": "orders", "tags": "A", "keys": "k1 k2", "new_id": "1F",
        "properties": {"amount": "7"}, "size": 10,
    } | changes  # fmt: skip


SELECTOR = {"orders": (subscribe("orders", "amount > 5 AND KEYS = 'k1 k2'", "SQL92"),)}


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        ({}, "matches", ""),
        ({"properties": {"amount": "5"}}, "filtered", "amount > 5 is false (amount is '5'"),
        ({"properties": {}}, "filtered", "amount > 5 is null (amount is absent)"),
        ({"read_as": "other"}, "filtered", "does not subscribe to 'other'"),
        ({"target": None}, "invalid", "origin topic is not known"),
        ({"target": "gone"}, "invalid", "'gone' does not exist"),
        ({"size": 0}, "invalid", "the body has 0 bytes"),
        ({"tags": "A||B"}, "invalid", "separates tags"),
        ({"properties": {"DELAY": "3"}}, "invalid", "'DELAY' is reserved"),
        ({"properties": {"x": "y" * 40_000}}, "invalid", "the properties have 40,003 bytes"),
    ],
)
def test_each_letter_gets_a_verdict_with_its_reason(
    changes: dict[str, Any], verdict: str, reason: str
) -> None:
    found = Judge(SELECTOR, frozenset({"gone"})).verdict(row(**changes))
    assert found[0] == verdict
    assert reason in found[1]


def test_all_expressions_of_a_group_have_to_let_a_letter_through() -> None:
    unequal = {"orders": (subscribe("orders", "A"), subscribe("orders", "B"))}
    assert Judge(unequal).verdict(row())[0] == "filtered"
    assert Judge(None).verdict(row())[0] == "unchecked"
