"""Test options that are times."""

import pytest

from sluicemq.cli.ending import OptionError
from sluicemq.cli.output import TIME_MAX_MS, parse_time_ms
from sluicemq.cli.spark import parse_moment


@pytest.mark.parametrize("parse", [parse_time_ms, parse_moment])
def test_seconds_are_refused_with_the_milliseconds_as_fix(parse: object) -> None:
    """Seconds after `group reset --to` would mean 1970, and deliver every message again."""
    assert callable(parse)
    with pytest.raises(OptionError, match=r"--to.*1732190400.*seconds.*1732190400000"):
        parse("1732190400", "--to")


def test_milliseconds_up_to_the_largest_are_accepted() -> None:
    assert parse_time_ms("1732190400000") == 1_732_190_400_000
    assert parse_time_ms("9" * 30) == TIME_MAX_MS
    assert parse_time_ms("0") == 0
