"""The background jobs of a broker that save its tables, and how blocking work is run.

Blocking work runs on another thread, and the broker waits for it before its role ends.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sluicemq.broker.documents import DocumentWriter
from sluicemq.net.work.background import fast_thread_switching

if TYPE_CHECKING:
    from sluicemq.broker.state import BrokerState

T = TypeVar("T")
BackgroundJob = tuple[str, Callable[[], float], Callable[[], Awaitable[None] | None]]
"""The name of a job, a function that returns its period in seconds, and the job itself."""

TABLES_S: Final = 0.5
FILTERS_PERIOD_S: Final = 10.0  # spec/store.md §11


class BlockingJobs:
    """The jobs that a broker runs on an executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self, work: Callable[[], T]) -> T:
        """Call `work()` on a thread of the executor, and return its result or raise its exception.

        If the caller is cancelled, `work` continues. The method `wait` waits until it has ended.
        """
        job = asyncio.get_running_loop().run_in_executor(self._executor, work)
        self._running.add(job)
        job.add_done_callback(self._running.discard)
        return await asyncio.shield(job)

    async def run_steps(
        self, steps: Iterator[float | Callable[[], object]], *, computes: bool = False
    ) -> None:
        """Execute the steps that an iterator yields, until it ends.

        A step is a number or a function. A number is a pause in seconds. A function is called
        without arguments on a thread of the executor, and its result is ignored. If `steps` is a
        generator, it is closed at the end, also after an exception or a cancellation.

        With `computes`, Python switches between threads more often, so that functions that compute
        for a long time do not delay the event loop.
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


def list_saving_jobs(
    core: "BrokerState",
    jobs: BlockingJobs,
    writer: DocumentWriter,
    save_offsets: Callable[[], Awaitable[None]],
) -> list[BackgroundJob]:
    """Return the background jobs that save the tables of `core` to their files.

    Each job is a tuple (name, function that returns the period in seconds, function that saves).
    `writer` writes the documents, and `jobs` runs the steps that save the timers. `save_offsets`
    saves the committed offsets and the tables that must match them.
    """
    settings = core.settings
    delayed = core.delayed
    filters = core.filters

    def save_topics() -> Awaitable[None]:
        return writer.write(*core.journaled_documents, core.locks.document)

    def save_filters() -> Awaitable[None]:
        filters.remove_expired()
        return writer.write(filters.document, core.assignments.document)

    def save_delayed() -> Awaitable[None]:
        delayed.remove_old_log_files()
        return writer.write(*delayed.documents, core.epochs.table.document)

    return [
        # A change is in the journal at once; only RocketMQ's JSON files lag by this period.
        ("saving topics", lambda: TABLES_S, save_topics),
        (
            "saving offsets",
            lambda: settings.broker.consumer_offset_flush_interval_ms / 1000,
            save_offsets,
        ),
        ("saving filters", lambda: FILTERS_PERIOD_S, save_filters),
        (
            "saving delay levels",
            lambda: settings.store.delay_offset_flush_interval_ms / 1000,
            save_delayed,
        ),
        (
            "saving timers",
            lambda: settings.store.timer_flush_interval_ms / 1000,
            lambda: jobs.run_steps(delayed.timers.save()),
        ),
    ]
