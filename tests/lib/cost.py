"""Measures how the cost of some work grows with its size, in CPU time of this thread, which other
processes do not disturb much.

    assert_linear(lambda size: prepared(size), run, small=1000)

`growth` compares the least of several measurements at two sizes. Linear work grows as the size
does, quadratic work as its square: with a factor of 8 there are 8 and 64 to tell apart, so that a
busy machine, which disturbs a measurement by a half, cannot turn one into the other.
"""

import gc
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")
FACTOR: Final = 8
STEEPEST: Final = 3 * FACTOR
"""The largest ratio that counts as linear; quadratic work has FACTOR squared, 64."""
ROUNDS: Final = 3
FLOOR_S: Final = 0.000_2
"""What a measurement of small work is worth: less is noise."""


def cpu_s(run: Callable[[T], object], make: Callable[[], T], rounds: int = ROUNDS) -> float:
    """Return the least CPU time in seconds of `run(make())`; `make` is not measured."""
    least_s = float("inf")
    was_enabled = gc.isenabled()
    for _ in range(rounds):
        given = make()
        gc.disable()
        try:
            begin_s = time.thread_time()
            run(given)
            least_s = min(least_s, time.thread_time() - begin_s)
        finally:
            if was_enabled:
                gc.enable()
    return least_s


def growth(make: Callable[[int], T], run: Callable[[T], object], small: int) -> float:
    """Return how many times as much CPU time `run` takes for `make(FACTOR * small)` as for
    `make(small)`."""
    little_s = cpu_s(run, lambda: make(small))
    much_s = cpu_s(run, lambda: make(FACTOR * small))
    return much_s / max(little_s, FLOOR_S)


def assert_linear(make: Callable[[int], T], run: Callable[[T], object], small: int) -> None:
    """Fail when the cost of `run` grows much faster than the size that `make` is given."""
    found = growth(make, run, small)
    assert found <= STEEPEST, (
        f"{FACTOR} times the size takes {found:.1f} times the CPU time, more than {STEEPEST}"
    )
