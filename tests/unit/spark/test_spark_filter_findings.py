"""What a DataFrame with a filter is told while Spark plans."""

from typing import Any

import pytest

from sluicemq.errors import RequestError
from sluicemq.spark.filters import (
    SAMPLE_MESSAGES_MAX,
    SAMPLE_TOPICS_MAX,
    collect_findings,
    log_filter_findings,
    try_at_brokers,
    try_on_properties,
)

ROWS = [{"latitude": f"{index + 30}.25", "state": "TX"} for index in range(20)]


def found(expression: str, rows: list[dict[str, str]] = ROWS) -> list[str]:
    return collect_findings(expression, lambda text: try_on_properties(rows, text))


def test_a_whole_number_beside_fractions_is_said_with_figures_and_cure() -> None:
    (one,) = found("latitude > 40")
    assert "Of the newest 20 messages 0 match." in one
    assert "20 of 20 values of latitude cannot be read as Integer ('30.25', " in one
    assert one.endswith("Write 40.0.")
    assert found("latitude > 40.0") == []


def test_some_lost_rows_are_said_also_where_others_match() -> None:
    (one,) = found("n > 40", [{"n": "41"}, {"n": "late"}])
    assert "Of the newest 2 messages 1 match. 1 of 2 values of n cannot be read as Int" in one


def test_a_property_that_is_never_there_counts_where_nothing_matches() -> None:
    (one,) = found("Latitude > 40.0")
    assert "Did you mean 'latitude'?" in one
    assert found("flag IS NULL") == []
    assert found("latitude > 40", []) == []


def test_what_surprises_in_the_expression_itself_is_said_too() -> None:
    assert any("NOT applies to the next word only" in one for one in found("NOT state = 'TX'"))


class FakeAdmin:
    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def try_filter(self, topic: str, _: str, *, count_max: int) -> list[Any]:
        self.asked.append((topic, count_max))
        if topic == "denied":
            raise RequestError(16, "no permission", address="a:1")
        return []


def test_brokers_are_asked_a_bounded_question_and_may_refuse_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    admin: Any = FakeAdmin()
    topics = [f"t{number}" for number in range(SAMPLE_TOPICS_MAX + 5)]
    log_filter_findings("n > 1.0", lambda text: try_at_brokers(admin, topics, text))
    assert admin.asked == [(topic, SAMPLE_MESSAGES_MAX) for topic in topics[:SAMPLE_TOPICS_MAX]]
    log_filter_findings("n > 1.0", lambda text: try_at_brokers(admin, ["denied"], text))
    log_filter_findings(None, lambda text: try_at_brokers(admin, topics, text))
    assert "filter.sql" not in caplog.text
    assert len(admin.asked) == SAMPLE_TOPICS_MAX + 1
