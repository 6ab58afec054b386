"""Supervision of background jobs: a job that fails is retried, and never stops another one.

A server does many things that no request asks for: it delivers delayed messages, expires long
polls, saves tables, registers with name servers. Each of them is a *job* with a name. A job that
raises is logged once, with its traceback unless the error is one of ours, counted in `failures`,
and tried again after a pause that doubles from `PAUSE_S` to `PAUSE_MAX_S`. The first success resets
the pause and is logged, so that a log tells when the trouble was over.

Cancellation of the task that runs a job passes through. A `CancelledError` that the job raised by
itself, from a future that somebody else has cancelled, is a failure like any other.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from sluicemq.clock import Clock
from sluicemq.errors import SluiceError

PAUSE_S: Final = 0.1
PAUSE_MAX_S: Final = 5.0

Work = Callable[[], object]


@dataclass(slots=True)
class _Job:
    """The state of one job: `resume_s` is the monotonic time before which it is not tried."""

    pause_s: float = PAUSE_S
    resume_s: float = 0.0
    complaint: str = ""
    failures_in_a_row: int = 0


class Supervisor:
    """The background jobs of one server, by name."""

    def __init__(self, clock: Clock, log: logging.Logger) -> None:
        """Measure pauses by `clock`, and log failures to `log`."""
        self._clock = clock
        self._log = log
        self._jobs: dict[str, _Job] = {}
        self.failures: Counter[str] = Counter()
        """How often each job has failed since the start."""

    def run(self, name: str, work: Work) -> bool:
        """Call `work` unless the job `name` is pausing after a failure.

        Return whether `work` was called and succeeded. Nothing that `work` raises is passed on.
        """
        return self._clock.monotonic_s() >= self.resume_s(name) and self.attempt(name, work)

    def attempt(self, name: str, work: Work) -> bool:
        """Call `work` as `run` does, but even while the job pauses: for work that must be done."""
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
        """Do `work` again and again, `period_s()` after its last end, until cancelled.

        After a failure the pause is at least that of the supervisor.
        """
        job = self._jobs.setdefault(name, _Job())
        while True:
            left_s = job.resume_s - self._clock.monotonic_s()
            await asyncio.sleep(max(period_s(), left_s))
            await self.do(name, work)

    async def keep(self, name: str, begin: Callable[[], Awaitable[object]]) -> None:
        """Await what `begin` returns, and begin again after each failure, until it returns."""
        job = self._jobs.setdefault(name, _Job())
        while True:
            if await self.do(name, begin):
                return
            await asyncio.sleep(max(job.resume_s - self._clock.monotonic_s(), 0.0))

    async def do(
        self, name: str, work: Callable[[], Awaitable[object] | None], *, is_last: bool = False
    ) -> bool:
        """Do `work` once, and await what it returns, even while the job `name` pauses.

        `is_last`: it will not be tried again. Return whether it succeeded. Only the cancellation
        of this task is passed on.
        """
        job, task = self._jobs.setdefault(name, _Job()), asyncio.current_task()
        try:
            if (awaited := work()) is not None:
                await awaited
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
        self.failures[name] += 1
        job.failures_in_a_row += 1
        job.resume_s = self._clock.monotonic_s() + job.pause_s
        job.pause_s = min(2 * job.pause_s, PAUSE_MAX_S)
        complaint = f"{type(error).__name__}: {error}"
        if complaint == job.complaint:
            return
        job.complaint = complaint
        is_ours = isinstance(error, SluiceError)
        self._log.error(
            "Background job %r failed%s: %s",
            name,
            "" if is_last else " and is retried",
            error if is_ours else complaint,
            exc_info=None if is_ours else error,
        )

    def _succeeded(self, name: str, job: _Job) -> None:
        if job.failures_in_a_row:
            self._log.info(
                "Background job %r works again after %d failures.", name, job.failures_in_a_row
            )
            job.pause_s, job.resume_s, job.complaint, job.failures_in_a_row = PAUSE_S, 0.0, "", 0
