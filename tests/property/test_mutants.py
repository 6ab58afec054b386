"""The model of replication is right with all of its rules, and wrong without any one of them."""

from dataclasses import fields

import pytest

from histories.checker import check
from histories.model import Rules, run
from simulation.seeds import seeds

MUTANTS = {
    "epoch_of_a_life": 2,
}
"""Rule -> a seed whose history shows that it is gone."""


@pytest.mark.parametrize(("rule", "seed"), MUTANTS.items())
def test_without_a_rule_the_checker_speaks(rule: str, seed: int) -> None:
    assert check(run(seed, Rules(**{rule: False})))
    assert not check(run(seed))


def test_every_rule_has_its_mutant() -> None:
    assert {rule.name for rule in fields(Rules)} == set(MUTANTS)


def test_with_all_rules_every_history_is_right() -> None:
    for seed in seeds(60):
        wrong = check(run(seed))
        assert not wrong, f"seed {seed}: {wrong[0]}"
