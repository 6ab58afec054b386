"""The command: many seeds on all cores, or one seed with its story.

    python -m simulation.cluster --seeds 1000
    python -m simulation.cluster --seed 17 --verbose [--keep 3,8,9]
    python -m simulation.cluster --kind split --seeds 300     # different subscriptions

The first failure stops the run; it is shrunk, its story and the command that repeats it are shown,
and the exit code is 1. Sets of texts have another order in every process unless PYTHONHASHSEED is
set, so the command starts itself with PYTHONHASHSEED=0: a seed is one history.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from simulation.cluster.runs import KINDS, LENGTH, Failure, error_of, explain, run_seed
from simulation.silence import silence
from sluicemq.clock import SYSTEM_CLOCK

SEEDS_PER_TASK = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 when every history went well."""
    options = _options(arguments)
    if options.seed is not None:
        return _one(options)
    began_s = SYSTEM_CLOCK.monotonic_s()
    seeds = range(options.first, options.first + options.seeds)
    failure = _many(seeds, options.jobs, options.kind)
    if failure is not None:
        _say(str(failure))
        return 1
    seconds = SYSTEM_CLOCK.monotonic_s() - began_s
    _say(
        f"{options.seeds} seeds of the {options.kind}: all went well, in {seconds:.0f} s"
        f" ({options.seeds / seconds:.1f} seeds/s on {options.jobs} cores)"
    )
    return 0


def _one(options: argparse.Namespace) -> int:
    kind = KINDS[options.kind]
    kept = list(range(LENGTH) if options.keep is None else map(int, options.keep.split(",")))
    with silence():
        if options.verbose:
            error = error_of(options.seed, kept, _say, kind)
            _say("all went well" if error is None else repr(error))
            return int(error is not None)
        failure = (
            run_seed(options.seed, kind=kind)
            if options.keep is None
            else explain(options.seed, kept, kind)
        )
    _say(str(failure) if failure else "all went well")
    return int(failure is not None)


def _many(seeds: range, jobs: int, kind: str) -> Failure | None:
    with ProcessPoolExecutor(jobs) as pool:
        tasks = [
            pool.submit(run_range, first, min(first + SEEDS_PER_TASK, seeds.stop), kind)
            for first in seeds[::SEEDS_PER_TASK]
        ]
        for task in as_completed(tasks):
            failure = task.result()
            if failure is not None:
                pool.shutdown(cancel_futures=True)
                return failure
    return None


def run_range(first: int, stop: int, kind: str = "cluster") -> Failure | None:
    """The first failure among the seeds, for one process of many."""
    with silence():
        failures = (run_seed(seed, kind=KINDS[kind]) for seed in range(first, stop))
        return next((failure for failure in failures if failure is not None), None)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m simulation.cluster", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--kind", choices=sorted(KINDS), default="cluster", help="of world")
    parser.add_argument("--seed", type=int, help="this one alone, with its story")
    parser.add_argument("--keep", help="its steps to keep, as 3,8,9")
    parser.add_argument("--verbose", action="store_true", help="tell every step, do not shrink")
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        again = [sys.executable, "-m", "simulation.cluster", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
