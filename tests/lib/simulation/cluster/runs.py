"""Running histories, and what to do with one that fails: shrink it, and tell how to repeat it."""

import random
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from simulation.chance import seeded
from simulation.cluster.split import SPLIT_WEIGHTS, SplitWorld
from simulation.cluster.world import WEIGHTS, ClusterWorld
from simulation.crashes.plan import Kind, Step, steps_of, take_steps
from simulation.replicas.pairs import PAIR_WEIGHTS, PairWorld
from simulation.replicas.timed import LOSS_WEIGHTS, TIMED_WEIGHTS, LossWorld, TimedWorld
from simulation.replicas.world import WEIGHTS as REPLICA_WEIGHTS
from simulation.replicas.world import ReplicaWorld

CLUSTER: Final = Kind("cluster", ClusterWorld, WEIGHTS)
SPLIT: Final = Kind("split", SplitWorld, SPLIT_WEIGHTS)
REPLICAS: Final = Kind("replicas", ReplicaWorld, REPLICA_WEIGHTS)
TIMED: Final = Kind("timed", TimedWorld, TIMED_WEIGHTS)
LOSSES: Final = Kind("losses", LossWorld, LOSS_WEIGHTS)
PAIRS: Final = Kind("pairs", PairWorld, PAIR_WEIGHTS)
KINDS: Final = {kind.name: kind for kind in (CLUSTER, SPLIT, REPLICAS, TIMED, LOSSES, PAIRS)}
LENGTH: Final = 60
SHRINK_RUNS_MAX: Final = 150
Say = Callable[[str], None]


class Failure(NamedTuple):
    """A history that went wrong. `kept` are the indexes of the steps that it takes."""

    seed: int
    error: str
    kept: list[int]
    trace: list[str]
    details: str
    kind: str = "cluster"

    def __str__(self) -> str:
        kept = ",".join(map(str, self.kept))
        lines = "\n".join(self.trace)
        option = "" if self.kind == CLUSTER.name else f" --kind {self.kind}"
        return (
            f"seed {self.seed}: {self.error}\n"
            f"{len(self.kept)} of {LENGTH} steps are enough:\n{lines}\n{self.details}"
            "repeat it with\n"
            f"    PYTHONPATH=tests/lib python -m simulation.cluster{option}"
            f" --seed {self.seed} --keep {kept}"
        )


def run_seed(seed: int, length: int = LENGTH, kind: Kind = CLUSTER) -> Failure | None:
    """One history; None when all went well, else the shrunk failure."""
    kept = list(range(length))
    if error_of(seed, kept, kind=kind) is None:
        return None
    kept = shrink(seed, kept, kind)
    return explain(seed, kept, kind) or Failure(
        seed, "it fails in one run and not in the next", kept, [], "", kind.name
    )


def explain(seed: int, kept: Sequence[int], kind: Kind = CLUSTER) -> Failure | None:
    """The story of these steps of a seed; None when nothing goes wrong in it."""
    trace: list[str] = []
    error = error_of(seed, kept, trace.append, kind)
    if error is None:
        return None
    details = "".join(traceback.format_exception(error))
    return Failure(seed, repr(error), list(kept), trace, details, kind.name)


def shrink(seed: int, kept: list[int], kind: Kind = CLUSTER) -> list[int]:
    """Leave out steps, in halves, quarters …, one by one, until it takes every one of them."""
    runs, size = 0, len(kept) // 2
    while size and runs < SHRINK_RUNS_MAX:
        start, before = 0, len(kept)
        while start < len(kept) and runs < SHRINK_RUNS_MAX:
            fewer = kept[:start] + kept[start + size :]
            runs += 1
            if error_of(seed, fewer, kind=kind) is not None:
                kept = fewer
            else:
                start += size
        size = size // 2 or int(len(kept) < before)
    return kept


def error_of(
    seed: int, kept: Sequence[int], say: Say = lambda _: None, kind: Kind = CLUSTER
) -> Exception | None:
    """What goes wrong in these steps of a seed."""
    steps = steps_of(kind, seed, max(kept, default=-1) + 1 if kept else 0)
    try:
        _live(seed, [(index, steps[index]) for index in kept], say, kind)
    except Exception as error:
        return error
    return None


def _live(seed: int, steps: Sequence[tuple[int, Step]], say: Say, kind: Kind) -> None:
    with seeded(f"{kind.name} {seed} chance"):
        world: Any = kind.make(random.Random(f"{kind.name} {seed} world"))
        try:
            take_steps(world, steps, say)
            world.finish()
            taken_s = world.clock.monotonic_s()
            say(f"     drained  {taken_s:8.3f}  {world.ledger.deliveries} deliveries")
        finally:
            world.close()
