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
        """Measure pauses by `clock`, and log failures to `log`."""
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
        """Call `work`, even while the job `name` pauses. Return whether it succeeded.

        An Exception that `work` raises is counted and logged, not raised.
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
        """Sleep for `period_s()` seconds, then `run_async` the job once; repeat until cancelled.

        After a failure, sleep at least until the pause of the job is over.
        """
        job = self._jobs.setdefault(name, _Job())
        while True:
            left_s = job.resume_s - self._clock.monotonic_s()
            await asyncio.sleep(max(period_s(), left_s))
            await self.run_async(name, work)

    async def retry_until_success(self, name: str, begin: Callable[[], Awaitable[object]]) -> None:
        """Await `begin()` until it succeeds once, with the pause of the job between attempts."""
        job = self._jobs.setdefault(name, _Job())
        while True:
            if await self.run_async(name, begin):
                return
            await asyncio.sleep(max(job.resume_s - self._clock.monotonic_s(), 0.0))

    async def run_async(
        self, name: str, work: Callable[[], Awaitable[object] | None], *, is_last: bool = False
    ) -> bool:
        """Call `work` once and await what it returns, even while the job `name` pauses.

        Return whether it succeeded. An Exception is counted and logged; only the cancellation of
        the current task is raised. `is_last` says that the job is not tried again, so the log
        promises no retry.
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
        """Count a failure of a job, lengthen its pause, and log the error if it is a new one.

        `is_last` is that of `run_async`.
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
        """Log that a job works again, and reset its pause, if it had failed."""
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
