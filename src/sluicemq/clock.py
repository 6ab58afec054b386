"""Clocks: the only module that reads the time.

Everything that needs the time takes a `Clock`, so that a test can replace it. `now_ms` is the wall
clock in milliseconds since 1970 (what RocketMQ stores and sends); `monotonic_s` never goes back
and is for measuring and for deadlines.

A deadline that has to survive a restart is a wall-clock time, and a wall clock can be set back. A
message that was due in 5 s would then wait for an hour. `SteadyClock` is for those deadlines: its
`now_ms` follows the wall clock forward and never goes back.
"""

import time
from typing import Final, Protocol


class Clock(Protocol):
    """A source of the time."""

    def now_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        ...

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back."""
        ...


class SystemClock:
    """The clock of this machine."""

    __slots__ = ()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    monotonic_s = staticmethod(time.monotonic)


SYSTEM_CLOCK = SystemClock()

STEP_MS: Final = 1000
"""The lead of a `SteadyClock` is a multiple of this."""
_ROUNDING_MS: Final = 10
"""Tolerance, because the wall clock and the monotonic clock are not read at the same instant."""


class SteadyClock:
    """A clock whose `now_ms` never goes back, for deadlines that are kept in wall-clock time.

    While the wall clock is only set forward, `now_ms` is the wall clock's. When the wall clock is
    set back, `now_ms` continues at the pace of the monotonic clock, ahead of the wall clock by
    `lead_ms`. Setting the wall clock forward again shortens the lead. So what is due in 5 s waits
    for at most 6 s, however the wall clock is corrected meanwhile.

    The lead is a whole number of seconds, because a timed message keeps its millisecond within a
    slot of one second. Therefore `now_ms` may stand still for up to a second after a step back.
    """

    __slots__ = ("_clock", "_latest_ms", "_peak_ms")

    def __init__(self, clock: Clock) -> None:
        """Create a clock that follows `clock`, but never goes back."""
        self._clock = clock
        self._latest_ms = 0
        # The largest difference seen between the wall clock and the monotonic clock.
        self._peak_ms = clock.now_ms() - round(clock.monotonic_s() * 1000)

    def now_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC, never less than before."""
        wall_ms = self._clock.now_ms()
        self._latest_ms = max(self._latest_ms, wall_ms + self._lead_ms(wall_ms))
        return self._latest_ms

    def monotonic_s(self) -> float:
        return self._clock.monotonic_s()

    @property
    def lead_ms(self) -> int:
        """How far `now_ms` is ahead of the wall clock: 0 unless the wall clock was set back."""
        return self._lead_ms(self._clock.now_ms())

    def raise_to(self, time_ms: int) -> None:
        """Continue from `time_ms`, this clock's time before a restart, if it is later than now."""
        behind_ms = time_ms - self.now_ms()
        if behind_ms > 0:
            # A whole number of steps, rounded up: `-(-a // b)` rounds up.
            self._peak_ms += -(-behind_ms // STEP_MS) * STEP_MS

    def _lead_ms(self, wall_ms: int) -> int:
        """Return how far this clock is ahead of the wall clock, which shows `wall_ms` now, in ms.

        If the wall clock was set back, the difference between it and the monotonic clock is smaller
        than its largest value so far. This clock is ahead by the missing time.
        """
        difference_ms = wall_ms - round(self._clock.monotonic_s() * 1000)
        self._peak_ms = max(self._peak_ms, difference_ms)
        lead_ms = self._peak_ms - difference_ms + _ROUNDING_MS
        return lead_ms - lead_ms % STEP_MS
