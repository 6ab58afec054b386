"""Timed messages and masters whose role returns to them, on virtual time with whole brokers.

`make simulate` runs 500 seeds of each kind; SLUICEMQ_SEEDS says how many here. Each planted bug
takes out of the product what keeps timed messages over a change of roles, and has to be found.
"""

import pytest

from simulation.cluster.runs import KINDS, LENGTH, error_of, run_seed
from simulation.replicas.mutants import TIMED_MUTANTS, mutated
from simulation.silence import silence
from thorough import seeds

SEEDS = seeds(1)
NEARBY = 200
"""A change of the product changes the histories: look at this many seeds, from the known one on."""
PLANTED = {
    ("trusts_stale_timer_files", "timed"): 2,
    ("trusts_stale_timer_files", "pairs"): 3,
    ("takes_in_new_ones_alone", "timed"): 2,
    ("cancels_here_alone", "timed"): 122,
    ("answers_held_changes", "timed"): 360,
}
"""Mutant and kind of world -> a seed that finds it."""


# Seed 12: a master builds its timers again while its slaves are away, and must not spin meanwhile.
# Seed 282: a recall is in the log of a master that starts, and hidden until its slave is there.
@pytest.mark.parametrize("kind", ["timed", "pairs"])
@pytest.mark.parametrize("seed", [*range(SEEDS), 12, 282])
def test_no_timed_message_is_lost(kind: str, seed: int) -> None:
    with silence():
        failure = run_seed(seed, kind=KINDS[kind])
    assert failure is None, str(failure)


@pytest.mark.thorough
@pytest.mark.timeout(600)  # up to NEARBY histories, when a change has moved the known seed
@pytest.mark.parametrize(("name", "kind"), PLANTED)
def test_the_simulation_finds_a_planted_bug(name: str, kind: str) -> None:
    steps, first = list(range(LENGTH)), PLANTED[name, kind]
    with silence(), mutated(name):
        found = (error_of(first + more, steps, kind=KINDS[kind]) for more in range(NEARBY))
        assert any(found), f"{name} is not found in {NEARBY} seeds of {kind}"


def test_every_mutant_is_looked_for() -> None:
    assert {name for name, _ in PLANTED} == set(TIMED_MUTANTS)
