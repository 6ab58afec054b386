"""Replicas on virtual time: killed, without power, wiped, cut off, deaf, late, full.

`make simulate` runs 2,000 seeds; SLUICEMQ_SEEDS says how many here.
"""

import pytest

from simulation.cluster.runs import LOSSES, REPLICAS, run_seed
from simulation.silence import silence
from thorough import seeds

SEEDS = seeds(12)


@pytest.mark.parametrize("first", range(0, SEEDS, 4))
def test_histories_of_replicas_are_right(first: int) -> None:
    with silence():
        for seed in range(first, min(first + 4, SEEDS)):
            failure = run_seed(seed, kind=REPLICAS)
            assert failure is None, str(failure)


@pytest.mark.parametrize("seed", range(seeds(3)))
def test_no_message_is_lost_when_the_consensus_service_loses_its_data(seed: int) -> None:
    """Whole brokers. An operator elects the replica whose log counts, if that is necessary."""
    with silence():
        failure = run_seed(seed, kind=LOSSES)
    assert failure is None, str(failure)
