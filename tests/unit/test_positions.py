"""Every option for a position accepts the names of RocketMQ, Kafka and Spark."""

import pytest

from sluicemq.cli.traffic import parse_start
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
    assert parse_start(text) == "first"
    assert ConsumeOptions(start=text).start == "first"  # type: ignore[arg-type]
    assert parse_offsets(text) == "earliest"
    assert group_offsets._to_time_ms(text) == group_offsets.EARLIEST_MS


@pytest.mark.parametrize("text", LAST)
def test_the_end_has_the_same_names_everywhere(text: str) -> None:
    assert parse_position(text) == "last"
    assert parse_start(text) == "last"
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
