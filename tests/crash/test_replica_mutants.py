"""One thing taken out of the product, and the simulation says what is wrong with it.

Each mutant has the seed of a history that goes wrong with it, and well without.
"""

import pytest

from simulation.cluster.runs import LENGTH, REPLICAS, error_of
from simulation.replicas.mutants import MUTANTS, mutated
from simulation.silence import silence

SEEDS = {
    "waits_for_nobody": 0, "joins_early": 24, "has_no_gate": 23, "keeps_its_tail": 18,
    "anybody_is_elected": 1, "same_disk": 5, "cuts_at_the_master_s_end": 19,
    "acknowledges_without_doing": 1,
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "seed"), SEEDS.items())
def test_the_simulation_finds_it(name: str, seed: int) -> None:
    steps = list(range(LENGTH))
    with silence():
        with mutated(name):
            assert error_of(seed, steps, kind=REPLICAS) is not None
        assert error_of(seed, steps, kind=REPLICAS) is None


def test_every_mutant_is_looked_for() -> None:
    assert MUTANTS.keys() == SEEDS.keys()
