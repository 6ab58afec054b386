"""One thing taken out of the product, and the simulation says what is wrong with it.

Each mutant has the seed of a history that goes wrong with it, and well without.
"""

import pytest

from simulation.cluster.runs import LENGTH, REPLICAS, error_of
from simulation.replicas.mutants import MUTANTS, mutated
from simulation.silence import silence

SEEDS = {
    "waits_for_nobody": 0, "joins_early": 36, "has_no_gate": 23, "keeps_its_tail": 23,
    "anybody_is_elected": 1, "same_disk": 1, "cuts_at_the_master_s_end": 23,
    "acknowledges_without_doing": 1, "elects_over_the_master": 13,
    "notes_a_role_that_it_has_not_taken": 0, "expects_the_record_that_was_lost": 0,
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
