"""How long the loop waits for the interpreter while another thread computes.

Python hands over after 5 ms, which is several times the p99 of a send. While the executor decodes
columns or judges blocks of them it hands over after a tenth of a millisecond.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any, Final

USUAL_S: Final = sys.getswitchinterval()
CALM_S: Final = 0.0001
Elsewhere = Callable[[Callable[[], Any], Callable[[Any], None]], None]
_busy: list[None] = []
"""One for each that computes now: of several the last one switches back."""


def in_executor(executor: Executor) -> Elsewhere:
    """Does in an executor what blocks or computes; calls back in the loop's thread, with the result
    or the exception."""

    def run(work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        def finished(future: asyncio.Future[Any]) -> None:
            if not future.cancelled():
                error = future.exception()
                done(error if error is not None else future.result())

        asyncio.get_running_loop().run_in_executor(executor, work).add_done_callback(finished)

    return run


@contextlib.contextmanager
def calm() -> Iterator[None]:
    """For the time of the block another thread computes."""
    _begin()
    try:
        yield
    finally:
        _end()


def calmly(elsewhere: Elsewhere) -> Elsewhere:
    """The same for jobs that are done elsewhere."""

    def run(job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        def ended(outcome: Any) -> None:
            _end()
            done(outcome)

        _begin()
        elsewhere(job, ended)

    return run


def _begin() -> None:
    _busy.append(None)
    sys.setswitchinterval(CALM_S)


def _end() -> None:
    _busy.pop()
    if not _busy:
        sys.setswitchinterval(USUAL_S)
