"""Whether the brokers of a cluster can write exactly once, and what is said when they cannot."""

from typing import Any

import pytest

from sluicemq.errors import ConfigurationError, RequestError
from sluicemq.spark.source import find_staging_brokers, validate_query_id
from sluicemq.wire.frames import Command


class Cluster:
    """Masters that answer with these codes."""

    def __init__(self, **codes: int) -> None:
        self.codes = codes

    def masters(self) -> dict[str, str]:
        return {name: f"{name}:10911" for name in self.codes}

    def call(self, address: str, command: Command) -> Command:
        assert command.code == 900201
        return Command(self.codes[address.partition(":")[0]], {}, remark="no")


def asked(**codes: int) -> tuple[str, ...]:
    cluster: Any = Cluster(**codes)
    return find_staging_brokers(cluster)


def test_all_masters_with_epochs_can_stage() -> None:
    assert asked(b=0, a=0) == ("a", "b")


def test_one_that_has_none_is_said_plainly_and_nobody_stages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert asked(a=0, b=3) == ()
    assert "AT LEAST ONCE" in caplog.text
    assert "SLUICE_DEDUP_KEY" in caplog.text


def test_any_other_refusal_is_an_error() -> None:
    with pytest.raises(RequestError):
        asked(a=16)


def test_a_query_id_that_no_stage_can_hold_is_refused() -> None:
    assert validate_query_id(None) is None
    assert validate_query_id("job-7 of 2026-11-21") == "job-7 of 2026-11-21"
    with pytest.raises(ConfigurationError, match="is not a query id"):
        validate_query_id("a/b")
