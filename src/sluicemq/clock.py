"""The only door to time.

Everything that needs the time takes a `Clock`, so that a test can own it. `now_ms` is the wall
clock in milliseconds since 1970 (what RocketMQ stores and sends); `monotonic_s` never goes back
and is for measuring and for deadlines.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Where the time comes from."""

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
