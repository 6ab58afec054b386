"""Seeded histories of a store and of a broker: crashes, kills, disk errors, damage from outside.

`make simulate` runs thousands of seeds; here are some of each world, the same worlds driven by
Hypothesis, and the shrinking of a failure. tests/crash/test_planted_bugs.py shows that the worlds
find what they are for.
"""

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from simulation.crashes.__main__ import main, run_range
from simulation.crashes.broker_world import BROKER
from simulation.crashes.plan import Kind, World
from simulation.crashes.runs import KINDS, explain, run_seed
from simulation.crashes.store_world import STORE
from sluicemq.store.log import CommitLog
from waiting import limit

ROOT = Path(__file__).parents[2]
SEEDS = int(os.environ.get("SLUICEMQ_EXAMPLES", "50"))
SETTINGS = settings(
    max_examples=min(SEEDS, 300),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("world", list(KINDS))
def test_nothing_that_was_promised_is_lost_in_any_history(world: str) -> None:
    failure = run_range(world, 0, SEEDS)
    assert failure is None, str(failure)


def test_pops_outlive_a_power_loss_that_cuts_the_timer_queue() -> None:
    """Found by seed 382: their file said more than was on disk, was taken for another store's, and
    those that had fallen due meanwhile were taken for delivered."""
    kept = [1, 11, 12, 20, 21, 23, 24, 25, 27, 31, 34]
    failure = explain(KINDS["pop"], 382, kept)
    assert failure is None, str(failure)


class Machine(RuleBasedStateMachine):
    """A world whose steps Hypothesis chooses."""

    world: World
    kind: ClassVar[Kind]

    @initialize(seed=st.integers(0, 1 << 20))
    def make(self, seed: int) -> None:
        self.world = self.kind.make(random.Random(seed))

    def step(self, kind: str, seed: int) -> None:
        if not self.world.is_over:
            self.world.take(kind, random.Random(seed))

    def teardown(self) -> None:
        if hasattr(self, "world") and not self.world.is_over:
            self.world.finish()


def machine(kind: Kind) -> type[Machine]:
    """Kinds of steps are drawn by their weights."""
    names = [name for name, weight in kind.weights.items() for _ in range(weight)]
    drawn = rule(kind=st.sampled_from(names), seed=st.integers(0, 1 << 20))(Machine.step)
    return type(f"{kind.name}Machine", (Machine,), {"kind": kind, "step": drawn})


TestStoreWorld = machine(STORE).TestCase
TestStoreWorld.settings = SETTINGS
TestBrokerWorld = machine(BROKER).TestCase
TestBrokerWorld.settings = SETTINGS


def first_failing_seed(kind: Kind) -> int:
    for seed in range(300):
        if run_seed(kind, seed) is not None:
            return seed
    raise AssertionError("the planted bug is not found")


def test_a_failure_is_shrunk_and_tells_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommitLog, "sync", lambda log: log.written_offset)
    failure = run_seed(STORE, first_failing_seed(STORE))
    assert failure is not None
    assert len(failure.kept) <= 6, "an append, a commit, a sync, a crash"
    assert [line.split()[1] for line in failure.trace]
    assert f"--world store --seed {failure.seed} --keep" in str(failure)
    again = explain(STORE, failure.seed, failure.kept)
    assert again is not None
    assert again.error == failure.error
    shorter = [explain(STORE, failure.seed, failure.kept[:at] + failure.kept[at + 1 :])
               for at in range(len(failure.kept))]  # fmt: skip
    assert shorter == [None] * len(failure.kept), "no step is in it that it does not take"


def test_the_command_runs_seeds_on_all_cores_and_says_how_it_went(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--seeds", "4", "--first", "100"]) == 0
    told = capsys.readouterr().out
    assert "4 seeds in each of the worlds store, storm, broker, rot, pop: all went well" in told


def test_one_seed_tells_its_story_when_it_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CommitLog, "sync", lambda log: log.written_offset)
    seed = first_failing_seed(STORE)
    assert main(["--world", "store", "--seed", str(seed)]) == 1
    told = capsys.readouterr().out
    assert f"store world, seed {seed}: Violation" in told
    assert re.search(r"python -m simulation.crashes --world store --seed \d+ --keep", told)


def test_the_same_seed_is_the_same_history_in_another_process() -> None:
    script = (
        "import random; from simulation.crashes.runs import *\n"
        "from simulation.crashes.plan import run_steps, steps_of\n"
        "for name in ('store', 'broker'):\n"
        "    run_steps(KINDS[name], 7, steps_of(KINDS[name], 7, 40), print)\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": hash_seed},
            capture_output=True, text=True, timeout=limit(60), check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]  # fmt: skip
    assert runs[0] == runs[1]
    assert runs[0].count("\n") >= 40
