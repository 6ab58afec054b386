"""Histories: what a world is told to do, made from a seed.

A step is a kind and a seed; the world draws everything else (sizes, names, moments) from a
generator with that seed. The weights of the kinds change from seed to seed, so that some histories
are all crashes and others nearly without (swarm testing).
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from simulation.chance import seeded


class Step(NamedTuple):
    """One thing to do."""

    kind: str
    seed: int


class Violation(AssertionError):  # noqa: N818 - it is found, not made
    """What was promised does not hold."""


class World(Protocol):
    """What a history is run on. `is_over` says that the rest of it makes no sense any more."""

    is_over: bool

    def take(self, kind: str, rng: random.Random) -> str:
        """Do one step; a line that says what it was. Raises Violation."""
        ...

    def finish(self) -> None:
        """Cut the power once more and look."""
        ...


class Kind(NamedTuple):
    """A sort of world: how to make one, and how often it does what."""

    name: str
    make: Callable[[random.Random], World]
    weights: Mapping[str, int]


def steps_of(kind: Kind, seed: int, length: int) -> list[Step]:
    """The history that belongs to a seed."""
    rng = random.Random(f"{kind.name} {seed} steps")
    kinds = list(kind.weights)
    weights = [kind.weights[name] * rng.choice((0, 1, 1, 2, 4)) for name in kinds]
    if not any(weights):
        weights = list(kind.weights.values())
    return [Step(rng.choices(kinds, weights)[0], rng.getrandbits(32)) for _ in range(length)]


def run_steps(
    kind: Kind, seed: int, steps: Sequence[Step], say: Callable[[str], None] = lambda _: None
) -> None:
    """Live through a history. Raises whatever goes wrong: Violation, or an error of the product."""
    with seeded(f"{kind.name} {seed} chance"):
        world = kind.make(random.Random(f"{kind.name} {seed} world"))
        take_steps(world, enumerate(steps), say)
        if not world.is_over:
            world.finish()


def take_steps(world: World, steps: Iterable[tuple[int, Step]], say: Callable[[str], None]) -> None:
    """Do steps, each with its number, until the world is over, and `say` what each did. Raises what
    goes wrong."""
    for index, step in steps:
        try:
            text = world.take(step.kind, random.Random(step.seed))
        except Exception as error:
            say(f"{index:4d} {step.kind:8s} {error!r}")
            raise
        say(f"{index:4d} {step.kind:8s} {text}")
        if world.is_over:
            return
