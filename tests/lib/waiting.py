"""Waiting for what another thread, process or client does.

A limit is what a machine at rest needs. On one that is busy everything takes longer, and clients
with threads of their own most of all, so time is counted as the machine gives it: with four
runnable threads a core a second counts as a quarter.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator

SLOWNESS_MAX = 10.0
CORES = os.cpu_count() or 1
PAUSE_S = 0.01


def slowness() -> float:
    """How much longer than at rest things take now: runnable threads a core, 1 to SLOWNESS_MAX."""
    return min(max(os.getloadavg()[0] / CORES, 1.0), SLOWNESS_MAX)


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Lets the loop run until the condition holds. Raises TimeoutError after `seconds` at rest."""
    for _ in _rounds(condition, seconds):
        await asyncio.sleep(PAUSE_S)


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Blocks until the condition holds. Raises TimeoutError after `seconds` at rest."""
    for _ in _rounds(condition, seconds):
        time.sleep(PAUSE_S)


def _rounds(condition: Callable[[], object], seconds: float) -> Iterator[None]:
    left_s, last_s = seconds, time.monotonic()
    while not condition():
        now_s = time.monotonic()
        left_s -= (now_s - last_s) / slowness()
        last_s = now_s
        if left_s < 0:
            raise TimeoutError(f"it has not happened within {seconds:g} s of a machine at rest")
        yield
