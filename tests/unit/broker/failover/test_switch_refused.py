"""A switch that is refused says which replica cannot take over, and which ones could."""

from types import SimpleNamespace
from typing import Any

import pytest

from sluicemq.broker.failover.replica import Replica


@pytest.mark.parametrize(
    ("to", "text"),
    [(3, "replica 3 cannot take over"), (None, "no replica can take over")],
)
def test_a_refused_switch_names_the_replica(to: int | None, text: str) -> None:
    replica: Any = SimpleNamespace(
        view=SimpleNamespace(members={1: None, 2: None}),
        _term=SimpleNamespace(in_sync=(1, 2)),
        _id=1,
    )
    error = Replica._no_successor_error(replica, to)
    assert text in str(error)
    assert "Replicas in sync: 2." in str(error)
