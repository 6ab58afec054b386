"""Every mutant of `make mutants` still fits the code, and its test still exists."""

from pathlib import Path

import pytest

from mutants.patching import Mutant, patched, path_of
from mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.area}: {mutant.name}")
def test_a_mutant_fits_the_code_and_names_a_test(mutant: Mutant) -> None:
    path = path_of(mutant.module)
    text = (ROOT / path).read_text()
    assert patched(text, path, mutant.function, mutant.old, mutant.new) != text
    for word in mutant.caught_by.split():
        if word.startswith("tests/"):
            assert (ROOT / word.partition("::")[0]).exists(), word


def test_names_are_told_apart() -> None:
    names = [f"{mutant.area}/{mutant.name}" for mutant in MUTANTS]
    assert len(names) == len({*names}) >= 80
