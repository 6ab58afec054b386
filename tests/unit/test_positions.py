"""Every option for a position accepts the names of RocketMQ, Kafka and Spark, and times."""

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from sluicemq.cli.ending import OptionError
from sluicemq.cli.output import parse_position_or_time
from sluicemq.client.admin import group_offsets
from sluicemq.client.core.consuming import ConsumeOptions
from sluicemq.errors import ConfigurationError
from sluicemq.model.positions import parse_position
from sluicemq.spark.options import parse_offsets

FIRST = ["first", "earliest", "0", " First "]
LAST = ["last", "latest", "LATEST"]


@pytest.mark.parametrize("text", FIRST)
def test_the_beginning_has_the_same_names_everywhere(text: str) -> None:
    assert parse_position(text) == "first"
    assert parse_position_or_time(text, "--from") == "first"
    assert ConsumeOptions(start=text).start == "first"  # type: ignore[arg-type]
    assert parse_offsets(text) == "earliest"
    assert group_offsets._to_time_ms(text) == group_offsets.EARLIEST_MS


@pytest.mark.parametrize("text", LAST)
def test_the_end_has_the_same_names_everywhere(text: str) -> None:
    assert parse_position(text) == "last"
    assert parse_position_or_time(text, "--from") == "last"
    assert ConsumeOptions(start=text).start == "last"  # type: ignore[arg-type]
    assert parse_offsets(text) == "latest"
    assert group_offsets._to_time_ms(text) == group_offsets.LATEST_MS


def test_other_texts_are_refused_with_the_names() -> None:
    assert parse_position("begin") is None
    with pytest.raises(ConfigurationError, match="'first', 'last'"):
        ConsumeOptions(start="begin")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="'first', 'last'"):
        group_offsets._to_time_ms("begin")


def test_spark_takes_the_names_for_single_queues_too() -> None:
    assert parse_offsets('{"broker-a": {"0": "first", "1": "last", "2": 0}}') == {
        "broker-a": {0: "earliest", 1: "latest", 2: 0}
    }


YEAR_2013_MS = 1_356_998_400_000
WRONG_TIMES: list[tuple[Any, str]] = [
    (1356998400.5, "cannot be 1356998400.5. Use 'first', 'last', a datetime, or a Unix timestamp"),
    (float("nan"), "cannot be nan. Use"),
    (True, "cannot be True. Use"),
    (None, "cannot be None. Use"),
    ("2013-01-01", "cannot be '2013-01-01'. Use"),
    (1356998400, "=1356998400 looks like seconds, but must be a Unix timestamp in milliseconds. "
                 "Write 1356998400000"),
    (YEAR_2013_MS * 1000, "looks like microseconds, but must be a Unix timestamp in "
                          f"milliseconds. Write {YEAR_2013_MS}"),
    (-2, "=-2 is before 1970. Use 'first'"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "expected"), WRONG_TIMES)
def test_a_wrong_time_is_named_with_the_rule_and_the_fix(wrong: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError) as of_start:
        ConsumeOptions(start=wrong)
    with pytest.raises(ConfigurationError) as of_reset:
        group_offsets._to_time_ms(wrong)
    assert str(of_start.value).startswith("start")
    assert str(of_reset.value).startswith("time_ms")
    assert expected in str(of_start.value)
    assert expected in str(of_reset.value)


@pytest.mark.parametrize(
    "moment",
    [YEAR_2013_MS, datetime(2013, 1, 1, tzinfo=UTC), datetime(2013, 1, 1, tzinfo=UTC).astimezone()],
)
def test_a_time_is_a_datetime_or_milliseconds(moment: Any) -> None:
    assert ConsumeOptions(start=moment).start_ms == YEAR_2013_MS
    assert group_offsets._to_time_ms(moment) == YEAR_2013_MS


def test_a_time_before_1970_is_the_beginning_and_never_the_end() -> None:
    early = datetime(1960, 1, 1, tzinfo=UTC)
    assert group_offsets._to_time_ms(early) == group_offsets.EARLIEST_MS
    assert ConsumeOptions(start=early).start_ms == 0
    assert parse_position_or_time("1960-01-01T00:00", "--to") == 0
    assert parse_position_or_time("40000d", "--to") == 0


def test_an_option_takes_a_duration_before_now() -> None:
    found = parse_position_or_time("1h", "--to")
    assert isinstance(found, int)
    assert abs(found - (time.time() - 3600) * 1000) < 60_000
    with pytest.raises(OptionError, match=r"'-1h' is not a time.* such as 1h"):
        parse_position_or_time("-1h", "--to")
    with pytest.raises(OptionError, match="--from 1700000000 looks like seconds"):
        parse_position_or_time("1700000000", "--from")
