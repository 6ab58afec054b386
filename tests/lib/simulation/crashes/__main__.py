"""The command: many seeds on all cores, or one seed with its story.

    python -m simulation.crashes --seeds 2000
    python -m simulation.crashes --world broker --seed 17 [--keep 3,8,9]

The first failure stops the run; it is shrunk, its story and the command that repeats it are shown,
and the exit code is 1.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from simulation.crashes.runs import KINDS, LENGTH, Failure, explain, run_seed
from simulation.silence import silence
from sluicemq.clock import SYSTEM_CLOCK

SEEDS_PER_TASK = 25


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 when every history went well."""
    options = _options(arguments)
    if options.seed is not None:
        kept = range(LENGTH) if options.keep is None else map(int, options.keep.split(","))
        with silence():
            failure = explain(KINDS[options.world or "store"], options.seed, list(kept))
        _say(f"{failure}" if failure else "all went well")
        return int(failure is not None)
    worlds = [options.world] if options.world else list(KINDS)
    started_s = SYSTEM_CLOCK.monotonic_s()
    failure = _run(worlds, range(options.first, options.first + options.seeds), options.jobs)
    if failure is not None:
        _say(str(failure))
        return 1
    seconds = SYSTEM_CLOCK.monotonic_s() - started_s
    _say(
        f"{options.seeds} seeds in each of the worlds {', '.join(worlds)}:"
        f" all went well, in {seconds:.0f} s"
    )
    return 0


def _run(worlds: Sequence[str], seeds: range, jobs: int) -> Failure | None:
    with ProcessPoolExecutor(jobs) as pool:
        tasks = [
            pool.submit(run_range, world, first, min(first + SEEDS_PER_TASK, seeds.stop))
            for first in seeds[::SEEDS_PER_TASK]
            for world in worlds
        ]
        for task in as_completed(tasks):
            failure = task.result()
            if failure is not None:
                pool.shutdown(cancel_futures=True)
                return failure
    return None


def run_range(world: str, first: int, stop: int) -> Failure | None:
    """The first failure among the seeds, for one process of many."""
    with silence():
        failures = (run_seed(KINDS[world], seed) for seed in range(first, stop))
        return next((failure for failure in failures if failure is not None), None)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m simulation.crashes", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--world", choices=list(KINDS), help="one sort of world only")
    parser.add_argument("--seeds", type=int, default=2000, help="how many, in each world")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--seed", type=int, help="this one alone, with its story")
    parser.add_argument("--keep", help="its steps to keep, as 3,8,9")
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
