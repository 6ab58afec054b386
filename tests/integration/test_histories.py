"""Real replicas in network namespaces, killed, stopped, cut off and wiped: every history is right.

SLUICEMQ_SEEDS says how many histories (default 5); `make histories` runs 200.
"""

import os

import pytest

from histories import processes
from histories.namespaces import available
from histories.report import Report

SEEDS = int(os.environ.get("SLUICEMQ_SEEDS", "5"))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_histories_of_real_processes(capfd: pytest.CaptureFixture[str]) -> None:
    if reason := available():
        pytest.skip(reason)
    wrong = processes.run_many(SEEDS, 1, Report(replicas=3, seconds=4.0))
    assert not wrong, capfd.readouterr().out
