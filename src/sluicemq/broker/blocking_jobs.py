"""Run blocking jobs of a broker on another thread, and wait for them before its role ends."""

import asyncio
import contextlib
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor
from typing import Any, TypeVar

from sluicemq.net.work.background import fast_thread_switching

T = TypeVar("T")


class BlockingJobs:
    """The jobs that a broker runs on an executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the executor and return its result.

        The caller may be cancelled; `work` continues, and `wait` waits for it.
        """
        job = asyncio.get_running_loop().run_in_executor(self._executor, work)
        self._running.add(job)
        job.add_done_callback(self._running.discard)
        return await asyncio.shield(job)

    async def run_steps(
        self, steps: Iterator[float | Callable[[], object]], *, computes: bool = False
    ) -> None:
        """Execute the steps that an iterator yields, until it ends.

        A number is a pause in seconds. A function is called on the executor; its result is ignored.
        A generator is closed at the end, also after an exception or a cancellation. `computes` says
        that the functions compute for long, so Python must switch threads quickly.
        """
        with fast_thread_switching() if computes else contextlib.nullcontext():
            try:
                for step in steps:
                    if callable(step):
                        await self.run(step)
                    else:
                        await asyncio.sleep(step)
            finally:
                if isinstance(steps, Generator):
                    steps.close()

    async def wait(self) -> None:
        """Wait until the jobs that were started so far have ended."""
        if self._running:
            await asyncio.wait(self._running)
