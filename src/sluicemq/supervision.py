"""Supervision of background jobs: a job that fails is retried and never stops another one.

A server does much work that no request asks for: it delivers delayed messages, expires long polls,
saves tables, registers with name servers. Each kind of work is a *job* with a name. When a job
raises, the failure is counted in `failures`, and the job is tried again after a pause that doubles
from `PAUSE_S` to `PAUSE_MAX_S`. The failure is logged unless its text equals that of the failure
before; a SluiceError is logged without a traceback. The first success resets the pause and is
logged, so the log shows when the trouble ended.

Cancelling the task that runs a job cancels the job. A `CancelledError` that the job raises by
itself, because a future that it awaits was cancelled, is a failure like any other.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from sluicemq.clock import Clock
from sluicemq.errors import SluiceError

PAUSE_S: Final = 0.1
PAUSE_MAX_S: Final = 5.0

Work = Callable[[], object]
T = TypeVar("T")


@dataclass(slots=True)
class _Job:
    """The state of one job.

    `pause_s` is its next pause, `resume_s` the monotonic time before which it is not tried, and
    `logged_failure` the text of the last failure that was logged.
    """

    pause_s: float = PAUSE_S
    resume_s: float = 0.0
    logged_failure: str = ""
    failures_in_a_row: int = 0


class Supervisor:
    """Runs the background jobs of one server and keeps the state of each by name."""

    def __init__(self, clock: Clock, log: logging.Logger) -> None:
        """Create a supervisor without jobs.

        `clock` measures the pauses after failures, and failures are logged to `log`.
        """
        self._clock = clock
        self._log = log
        self._jobs: dict[str, _Job] = {}
        self.failures: Counter[str] = Counter()
        """The number of failures of each job since the process started."""

    def run_unless_pausing(self, name: str, work: Work) -> bool:
        """Call `work`, unless the job `name` is pausing after a failure.

        Return whether `work` was called and succeeded. An Exception that `work` raises is counted
        and logged, not raised.
        """
        return self._clock.monotonic_s() >= self.resume_s(name) and self.run_now(name, work)

    def run_now(self, name: str, work: Work) -> bool:
        """Call `work` as the job `name`, and return whether it succeeded.

        The call is made even during the pause after a failure of the job. An Exception is counted
        and logged, not raised.
        """
        job = self._jobs.setdefault(name, _Job())
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other jobs go on
            self._failed(name, job, error)
            return False
        self._succeeded(name, job)
        return True

    def resume_s(self, name: str) -> float:
        """Return the monotonic time before which the job `name` pauses, 0.0 if it does not."""
        job = self._jobs.get(name)
        return job.resume_s if job is not None else 0.0

    async def repeat(
        self,
        name: str,
        period_s: Callable[[], float],
        work: Callable[[], Awaitable[object] | None],
    ) -> None:
        """Repeat a job until the task is cancelled.

        Sleep for `period_s()` seconds, then call `work()`, and await its result if it is not None.
        After a failure, the sleep lasts at least until the end of the job's pause. Failures are
        counted and logged, not raised.
        """
        job = self._jobs.setdefault(name, _Job())
        while True:
            left_s = job.resume_s - self._clock.monotonic_s()
            await asyncio.sleep(max(period_s(), left_s))
            await self.run_async(name, work)

    async def retry_until_success(self, name: str, begin: Callable[[], Awaitable[object]]) -> None:
        """Await `begin()` until it succeeds once, with a growing pause after each failure.

        Failures are counted and logged, not raised.
        """
        job = self._jobs.setdefault(name, _Job())
        while True:
            if await self.run_async(name, begin):
                return
            await asyncio.sleep(max(job.resume_s - self._clock.monotonic_s(), 0.0))

    async def run_async(
        self, name: str, work: Callable[[], Awaitable[object] | None], *, is_last: bool = False
    ) -> bool:
        """Call `work()` once, await its result, and return whether it succeeded.

        The call is made even during the pause after a failure of the job `name`. The result of
        `work()` is awaited if it is not None. An Exception is counted and logged. Only the
        cancellation of the current task is raised. `is_last` means that the job is not tried again,
        so that the log does not promise it.
        """
        job = self._jobs.setdefault(name, _Job())
        task = asyncio.current_task()
        try:
            awaitable = work()
            if awaitable is not None:
                await awaitable
        except asyncio.CancelledError as error:
            if task is None or task.cancelling():
                raise
            self._failed(name, job, error, is_last=is_last)
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, the other jobs go on
            self._failed(name, job, error, is_last=is_last)
            return False
        self._succeeded(name, job)
        return True

    def _failed(self, name: str, job: _Job, error: BaseException, *, is_last: bool = False) -> None:
        """Count a failure of a job, double its next pause, and log the error if it is a new one.

        `is_last` means that the job is not tried again.
        """
        self.failures[name] += 1
        job.failures_in_a_row += 1
        job.resume_s = self._clock.monotonic_s() + job.pause_s
        job.pause_s = min(2 * job.pause_s, PAUSE_MAX_S)
        failure = f"{type(error).__name__}: {error}"
        if failure == job.logged_failure:
            return

        job.logged_failure = failure
        promise = "" if is_last else "; it is retried after a pause"
        if isinstance(error, SluiceError):
            self._log.error("Background job %r failed%s: %s", name, promise, error)
        else:
            self._log.error(
                "Background job %r failed%s: %s", name, promise, failure, exc_info=error
            )

    def _succeeded(self, name: str, job: _Job) -> None:
        """Reset the pause of a job that had failed, and log that it works again."""
        if job.failures_in_a_row:
            self._log.info(
                "Background job %r works again after %d failures.", name, job.failures_in_a_row
            )
            job.pause_s = PAUSE_S
            job.resume_s = 0.0
            job.logged_failure = ""
            job.failures_in_a_row = 0


def start_shared(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start `work`, whose result several callers may await, each of whom may be cancelled.

    Its error is raised in every caller that still awaits it. When none does, the error is dropped:
    asyncio would report an exception that was never retrieved.
    """
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(_retrieve)
    return task


def _retrieve(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()
