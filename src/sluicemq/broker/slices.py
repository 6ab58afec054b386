"""A slice of work on the loop's thread: so long, or so many things, then others have their turn.

Who has a hundred thousand things to do asks `is_over` between two of them. Time is looked at only
now and then, and under a clock that stands still (a test's) the count is the limit.
"""

from typing import Final

from sluicemq.clock import Clock

LOOK_EVERY: Final = 16


class Slice:
    """Begins now. `now_ms` is the time at which it began."""

    __slots__ = ("_clock", "_end_s", "_left", "_next_look", "now_ms")

    def __init__(self, clock: Clock, seconds: float, count_max: int) -> None:
        self._clock = clock
        self._end_s = clock.monotonic_s() + seconds
        self._left = count_max
        self._next_look = count_max - LOOK_EVERY
        self.now_ms = clock.now_ms()

    @property
    def left(self) -> int:
        """How many things may still be done."""
        return self._left

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    def done(self, count: int = 1) -> None:
        """So many things are done."""
        self._left = max(self._left - count, 0)
        if self._left <= self._next_look:
            self._next_look = self._left - LOOK_EVERY
            if self._clock.monotonic_s() >= self._end_s:
                self._left = 0
