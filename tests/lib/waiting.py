"""Waiting for what another thread, process or client does.

A limit is what a machine at rest needs. On a machine that is slow or busy everything takes longer,
and clients with threads of their own most of all. So the start of a run measures how slow the
machine is, and `limit` multiplies by that, or by the number of runnable threads a core where that
is more now. `until` and `wait_for` count time in the same way: with four runnable threads a core, a
second counts as a quarter, and a pause that lasts longer than it should counts as a short one.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

SLOWNESS = "SLUICEMQ_TEST_SLOWNESS"
"""The variable with the factor that the start of a run has measured (tests/conftest.py)."""
SLOWNESS_MAX = 10.0
CORES = os.cpu_count() or 1
PAUSE_S = 0.01
WORK = "x = 0\nfor i in range(3_000_000): x += i * i % 7"
WORK_S = 0.4
"""Seconds that a process takes for WORK, with its start, on the machine on which the limits were
chosen, when as many such processes as it has cores run there and nothing else does."""

_nearly_missed: list[str] = []


def measure_slowness() -> float:
    """Return how much slower than that machine at rest this one is now, from 1 to SLOWNESS_MAX."""
    begin_s = time.monotonic()
    processes = [subprocess.Popen([sys.executable, "-c", WORK]) for _ in range(CORES)]
    for process in processes:
        process.wait()
    return min(max((time.monotonic() - begin_s) / WORK_S, 1.0), SLOWNESS_MAX)


def slowness() -> float:
    """Return by what to multiply limits now: what the start of the run has measured, or runnable
    threads a core, from 1 to SLOWNESS_MAX."""
    measured = float(os.environ.get(SLOWNESS, "1"))
    return min(max(os.getloadavg()[0] / CORES, measured, 1.0), SLOWNESS_MAX)


def limit(seconds: float) -> float:
    """Return the seconds that something may take now which takes at most `seconds` on a machine at
    rest. For timeouts that end a test; not for those whose end a test waits for."""
    return seconds * slowness()


def limits_missed_nearly() -> list[str]:
    """Return, and forget, a text for each wait that has taken more than half of its limit."""
    found, _nearly_missed[:] = list(_nearly_missed), []
    return found


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Let the loop run until the condition holds. Raises TimeoutError after `seconds` at rest."""
    for _ in _rounds(condition, seconds):
        await asyncio.sleep(PAUSE_S)


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Block until the condition holds. Raises TimeoutError after `seconds` at rest."""
    for _ in _rounds(condition, seconds):
        time.sleep(PAUSE_S)


def _rounds(condition: Callable[[], object], seconds: float) -> Iterator[None]:
    left_s, begin_s = seconds, time.monotonic()
    last_s = begin_s
    while not condition():
        now_s = time.monotonic()
        left_s -= min(now_s - last_s, 5 * PAUSE_S) / slowness()
        last_s = now_s
        if left_s < 0:
            raise TimeoutError(f"it has not happened within {seconds:g} s of a machine at rest")
        yield
    if left_s < seconds / 2:
        _nearly_missed.append(
            f"it waited {last_s - begin_s:.1f} s, {seconds - left_s:.1f} of {seconds:g} s at rest"
        )
