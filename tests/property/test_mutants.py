"""The model of replication is right with all of its rules, and wrong without any one of them."""

from dataclasses import fields

import pytest

from histories.checker import check
from histories.model import Rules, run
from thorough import seeds

pytestmark = pytest.mark.slow

SEEDS = seeds(60)
MUTANTS = {
    "epoch_of_a_life": 3,
    "truncates": 3,
    "line_before_bytes": 19,
    "joins_caught_up": 7,
    "waits_for_all": 19,
    "shows_confirmed": 5,
    "only_members": 4,
    "incarnations": 10,
    "deposed_is_silent": 5,
    "answers_after_state": 6,
    "counts_proposals": 249,
    "serves_when_confirmed": 189,
    "claims_bind": 2000,
    "settles_proposals": 1338,
}
"""Rule -> a seed whose history shows that it is gone."""


@pytest.mark.parametrize(("rule", "seed"), MUTANTS.items())
def test_without_a_rule_the_checker_speaks(rule: str, seed: int) -> None:
    assert check(run(seed, Rules(**{rule: False})))
    assert not check(run(seed))


def test_with_all_rules_every_history_is_right() -> None:
    for seed in range(SEEDS):
        wrong = check(run(seed))
        assert not wrong, f"seed {seed}: {wrong[0]}"


def test_every_rule_has_its_mutant() -> None:
    assert {rule.name for rule in fields(Rules)} == set(MUTANTS)
