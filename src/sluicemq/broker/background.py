"""What the broker does by itself on the loop's thread, in slices (`Slice`, `Worker`): a slice lasts
so long, or does so many things. A part with a hundred thousand things to do asks `is_over` between
two of them. The clock is read only now and then; under one that stands still (a test's) the count
is the limit. Long answers to requests are in `net.work.background`.

What delivers delayed messages, or marks transactions as done, remembers where to go on. That place
may be written to disk only when everything before it is on disk; otherwise a crash would leave a
place behind messages that are gone. So each place goes with the end of the log at that time
(`Progress`).
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from sluicemq.clock import Clock
from sluicemq.net.work.background import Steps
from sluicemq.store.gather import PostponedWork

log = logging.getLogger(__name__)

T = TypeVar("T")
LOOK_EVERY: Final = 16
_MARKS_MAX: Final = 4096


def after(judgement: PostponedWork, again: Callable[[], T]) -> Steps[T]:
    """The same once more, when what a read has to know first is known."""
    judgement.store_result((yield judgement.run))
    return again()


class Slice:
    """Begins now. `now_ms` is the time at which it began."""

    __slots__ = ("_clock", "_end_s", "_next_look", "left", "now_ms")

    def __init__(self, clock: Clock, seconds: float, count_max: int) -> None:
        self._clock = clock
        self._end_s = clock.monotonic_s() + seconds
        self._next_look = count_max - LOOK_EVERY
        self.left = count_max
        """How many things may still be done."""
        self.now_ms = clock.now_ms()

    @property
    def is_over(self) -> bool:
        return self.left <= 0

    def done(self, count: int = 1) -> None:
        """So many things are done."""
        self.left = max(self.left - count, 0)
        if self.left <= self._next_look:
            self._next_look = self.left - LOOK_EVERY
            if self._clock.monotonic_s() >= self._end_s:
                self.left = 0


class Worker:
    """Work that is done a slice at a time: `soon`, or after a pause when something went wrong."""

    PAUSE_S: Final = 0.1

    def __init__(
        self,
        run: Callable[[], None],
        clock: Clock,
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self._run = run
        self._clock = clock
        self._call_soon = call_soon
        self._is_coming = False
        self._complaint = ""
        self.is_on = False
        self.paused_until_s = 0.0

    def soon(self) -> None:
        """A slice in the loop's next turn."""
        if self.is_on and not self._is_coming:
            self._is_coming = True

            def come() -> None:
                self._is_coming = False
                self._run()

            self._call_soon(come)

    @property
    def is_paused(self) -> bool:
        return self._clock.monotonic_s() < self.paused_until_s

    def failed(self, what: str) -> None:
        """Pause; log what is wrong unless that was the last thing said."""
        self.paused_until_s = self._clock.monotonic_s() + self.PAUSE_S
        if what != self._complaint:
            self._complaint = what
            log.error("%s", what)

    def succeeded(self) -> None:
        self._complaint = ""


class Progress:
    """`value` is where to go on now; `safe` where to go on after a crash."""

    __slots__ = ("_marks", "_safe", "value")

    def __init__(self, value: int) -> None:
        self.value = value
        self._safe = value
        self._marks: deque[tuple[int, int]] = deque()

    def advance(self, value: int, log_end: int) -> None:
        """Everything before `value` is stored, and the log ends at `log_end`."""
        self.value = value
        marks = self._marks
        if len(marks) == _MARKS_MAX:  # nobody asks: a later place says the same
            marks.pop()
        marks.append((value, log_end))

    def safe(self, synced_offset: int) -> int:
        """The newest value whose log is on disk up to `synced_offset`."""
        marks = self._marks
        while marks and marks[0][1] <= synced_offset:
            self._safe = marks.popleft()[0]
        return self._safe
