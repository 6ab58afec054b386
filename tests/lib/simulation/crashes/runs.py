"""Running histories, and what to do with one that fails: shrink it, and tell how to repeat it."""

import traceback
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from simulation.crashes.broker_world import BROKER
from simulation.crashes.plan import Kind, Step, run_steps, steps_of
from simulation.crashes.pop_world import POP
from simulation.crashes.store_world import ROT, STORE, STORM

KINDS: Final = {kind.name: kind for kind in (STORE, STORM, BROKER, ROT, POP)}
LENGTH: Final = 60
SHRINK_RUNS_MAX: Final = 400


class Failure(NamedTuple):
    """A history that went wrong. `kept` are the indexes of the steps that it takes."""

    world: str
    seed: int
    error: str
    kept: list[int]
    trace: list[str]
    details: str

    @property
    def command(self) -> str:
        kept = ",".join(map(str, self.kept))
        return (
            "PYTHONPATH=tests/lib python -m simulation.crashes"
            f" --world {self.world} --seed {self.seed} --keep {kept}"
        )

    def __str__(self) -> str:
        lines = "\n".join(self.trace)
        return (
            f"{self.world} world, seed {self.seed}: {self.error}\n"
            f"{len(self.kept)} of {LENGTH} steps are enough:\n{lines}\n{self.details}"
            f"repeat it with\n    {self.command}"
        )


def run_seed(kind: Kind, seed: int) -> Failure | None:
    """One history; None when all went well, else the shrunk failure."""
    steps = steps_of(kind, seed, LENGTH)
    kept = list(range(len(steps)))
    if _error(kind, seed, steps) is None:
        return None
    return explain(kind, seed, shrink(kind, seed, steps, kept))


def explain(kind: Kind, seed: int, kept: Sequence[int]) -> Failure | None:
    """The story of these steps of a seed; None when nothing goes wrong in it."""
    steps = steps_of(kind, seed, LENGTH)
    trace: list[str] = []
    error = _error(kind, seed, [steps[index] for index in kept], trace.append)
    if error is None:
        return None
    numbered = [line.replace(line[:4], f"{kept[int(line[:4])]:4d}", 1) for line in trace]
    details = "".join(traceback.format_exception(error))
    return Failure(kind.name, seed, repr(error), list(kept), numbered, details)


def shrink(kind: Kind, seed: int, steps: Sequence[Step], kept: list[int]) -> list[int]:
    """Leave out steps, in halves, quarters …, one by one, as long as it still fails."""
    runs = 0
    size = len(kept) // 2
    while size and runs < SHRINK_RUNS_MAX:
        start = 0
        while start < len(kept) and runs < SHRINK_RUNS_MAX:
            fewer = kept[:start] + kept[start + size :]
            runs += 1
            if _error(kind, seed, [steps[index] for index in fewer]) is not None:
                kept = fewer
            else:
                start += size
        size //= 2
    return kept


def _error(
    kind: Kind, seed: int, steps: Sequence[Step], say: Callable[[str], None] = lambda _: None
) -> Exception | None:
    try:
        run_steps(kind, seed, steps, say)
    except Exception as error:
        return error
    return None
