"""Work that the broker does by itself on the event loop's thread, in time slices.

Delivering delayed messages or checking transactions may find a hundred thousand things to do. Such
a job works in slices: a `TimeSlice` ends after some milliseconds or after a number of steps,
whichever comes first. The job asks `is_over` between two steps, and a `SliceWorker` runs its next
slice in a later iteration of the loop. (Long answers to requests are in `net.work.background`.)

A job that reads a queue remembers where to continue (`Progress`). That offset may be saved only
when everything that the job stored before it is on disk. Otherwise a crash would lose messages and
keep an offset beyond them. Therefore each offset is noted together with the end of the commit log
at the time.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from sluicemq.clock import Clock
from sluicemq.net.work.background import WorkItem
from sluicemq.store.gather import PostponedWork

log = logging.getLogger(__name__)

T = TypeVar("T")
CLOCK_CHECK_STEPS: Final = 16
"""A time slice reads the clock once for this number of steps."""
_ENTRIES_MAX: Final = 4096
"""Offsets that a `Progress` notes until the log is synced up to them."""


def retry_after(judgement: PostponedWork, retry: Callable[[], T]) -> WorkItem[T]:
    """Evaluate an expensive filter on another thread, and then repeat the read that needs it.

    A read returns `judgement` if it needs the results of the filter first. This work item yields
    the function that computes them, stores them with `store_result`, and returns `retry()`, which
    repeats the read.
    """
    judgement.store_result((yield judgement.run))
    return retry()


class TimeSlice:
    """A limit of time and steps for one piece of work. It begins when it is created.

    Under a clock that stands still, as in tests, only the number of steps limits the work.
    """

    __slots__ = ("_clock", "_end_s", "_next_check", "now_ms", "remaining")

    def __init__(self, clock: Clock, seconds: float, count_max: int) -> None:
        """Begin a slice of work now. It ends after `seconds` or after `count_max` steps."""
        self._clock = clock
        self._end_s = clock.monotonic_s() + seconds
        # When `remaining` has fallen to this number, the clock is read.
        self._next_check = count_max - CLOCK_CHECK_STEPS
        self.remaining = count_max
        """The number of steps that may still be done; 0 once the time is over."""
        self.now_ms = clock.now_ms()
        """The wall-clock time at which the slice began, in ms since 1970."""

    @property
    def is_over(self) -> bool:
        """Whether no step may be done any more."""
        return self.remaining <= 0

    def count_done(self, count: int = 1) -> None:
        """Subtract `count` steps that were done from `remaining`, which does not go below 0.

        If the time of the slice is over, `remaining` becomes 0. The clock is read only once in
        CLOCK_CHECK_STEPS steps, because reading it costs time.
        """
        self.remaining = max(self.remaining - count, 0)
        if self.remaining <= self._next_check:
            self._next_check = self.remaining - CLOCK_CHECK_STEPS
            if self._clock.monotonic_s() >= self._end_s:
                self.remaining = 0


class SliceWorker:
    """Runs a job one slice at a time, and lets it pause after a failure."""

    PAUSE_S: Final = 0.1
    """The pause after a failure, in seconds."""

    def __init__(
        self,
        run_slice: Callable[[], None],
        clock: Clock,
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        """Create a worker that is not enabled yet.

        `run_slice()` does one slice of the job. `call_soon(function)` lets the event loop call a
        function in its next iteration.
        """
        self._run_slice = run_slice
        self._clock = clock
        self._call_soon = call_soon
        self._is_scheduled = False
        self._last_failure = ""
        self.is_enabled = False
        """Whether `schedule` has an effect. The owner sets it when the job may run."""
        self.paused_until_s = 0.0
        """The monotonic time until which the job pauses."""

    def schedule(self) -> None:
        """Run a slice in the next iteration of the loop.

        Do nothing if a slice is scheduled already, or if the worker is not enabled. A pause does
        not prevent the slice: the job itself checks `is_paused`.
        """
        if self.is_enabled and not self._is_scheduled:
            self._is_scheduled = True

            def run_scheduled() -> None:
                # Before the slice, which may schedule the next one.
                self._is_scheduled = False
                self._run_slice()

            self._call_soon(run_scheduled)

    @property
    def is_paused(self) -> bool:
        """Whether the job pauses after a failure. The job itself must check it."""
        return self._clock.monotonic_s() < self.paused_until_s

    def pause_after_failure(self, failure: str) -> None:
        """Pause for `PAUSE_S`, and log `failure` unless it equals the text of the last failure."""
        self.paused_until_s = self._clock.monotonic_s() + self.PAUSE_S
        if failure != self._last_failure:
            self._last_failure = failure
            log.error("%s", failure)

    def clear_failure(self) -> None:
        """Forget the last failure after a success, so that the next one is logged."""
        self._last_failure = ""


class Progress:
    """The offset from which a job continues, and the one from which it may continue after a crash.

    The second one is behind while the messages that the job stored are not on disk.
    """

    __slots__ = ("_durable_offset", "_unsynced_offsets", "value")

    def __init__(self, start_offset: int) -> None:
        """Let the job continue from `start_offset`, now and after a crash."""
        self.value = start_offset
        """The offset from which the job continues now."""
        self._durable_offset = start_offset
        self._unsynced_offsets: deque[tuple[int, int]] = deque()
        """Offsets with the end of the log when they were reached, in order."""

    def advance(self, next_offset: int, log_end: int) -> None:
        """Set `value`, the offset from which the job continues, to `next_offset`.

        `log_end` is the end of the commit log now: the records that the job stored before
        `next_offset` end there or earlier. A crash may lose them until the log is synced up to
        `log_end`. `durable_value` does not return `next_offset` before that.
        """
        self.value = next_offset
        unsynced_offsets = self._unsynced_offsets
        if len(unsynced_offsets) == _ENTRIES_MAX:
            # Replace the last entry. The new one is further on, so only the saved offset lags.
            unsynced_offsets.pop()
        unsynced_offsets.append((next_offset, log_end))

    def durable_value(self, synced_offset: int) -> int:
        """Return the newest offset that may be saved when the log is synced up to `synced_offset`.

        That is the last offset given to `advance` whose `log_end` is not after `synced_offset`. If
        there is none, it is the offset that was returned before, at first the start offset.

        Entries of the returned and of earlier offsets are removed. So `synced_offset` must not be
        lower than in an earlier call.
        """
        unsynced_offsets = self._unsynced_offsets
        while unsynced_offsets:
            offset, log_end = unsynced_offsets[0]
            if log_end > synced_offset:
                break
            self._durable_offset = offset
            unsynced_offsets.popleft()
        return self._durable_offset
