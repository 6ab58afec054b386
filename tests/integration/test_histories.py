"""Real replicas in network namespaces, killed, stopped, cut off and wiped: every history is right.

SLUICEMQ_SEEDS says how many histories (default 4); `make histories` runs 400. Faults of the epochs
are looked for where it is set.
"""

import pytest

from histories import processes
from histories.mutants import MUTANTS
from histories.namespaces import available
from histories.report import Report
from thorough import seeds

SEEDS = seeds(4)
TRIES = 40


@pytest.fixture(autouse=True)
def namespaces() -> None:
    if reason := available():
        pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(0)
def test_histories_of_real_processes(capfd: pytest.CaptureFixture[str]) -> None:
    wrong = processes.run_many(SEEDS, 1, Report(replicas=3, seconds=4.0))
    assert not wrong, capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.simulation
@pytest.mark.timeout(0)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_in_the_epochs_is_found(mutant: str, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyspark")
    report = Report(replicas=3, seconds=4.0)
    assert processes.run_many(TRIES, 1, report, sink=processes.CLASSES, mutant=mutant)
    assert "epoch: history" in capfd.readouterr().out.partition("WRONG")[2]
