"""How fast something counts: per second over the last 10, 60 and 600 s, as RocketMQ's tools show.

Once a second `sample` remembers the counters; a rate is a difference of two samples. Nothing
happens where the counting is done.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final

WINDOWS_S: Final = (10, 60, 600)


class Rates:
    """Samples of named counters."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=WINDOWS_S[-1] + 1)

    def sample(self, now_s: float, counters: Mapping[str, int]) -> None:
        """Call this once a second; `counters` is kept, so hand in a new one each time."""
        self._samples.append((now_s, counters))

    def rate(self, name: str, window_s: int) -> float:
        """Counts a second over the last `window_s` seconds, 0.0 before there are two samples."""
        if len(self._samples) < 2:
            return 0.0
        end_s, end = self._samples[-1]
        begin_s, begin = self._samples[max(0, len(self._samples) - 1 - window_s)]
        seconds = end_s - begin_s
        return (end.get(name, 0) - begin.get(name, 0)) / seconds if seconds > 0 else 0.0

    def text(self, *names: str) -> str:
        """Three rates of the sum of the counters, as in code 28: `10s 60s 600s`."""
        return " ".join(str(sum(self.rate(n, window) for n in names)) for window in WINDOWS_S)


class Days:
    """What a counter was at the last two midnights (UTC): code 28's "today" and "yesterday"."""

    __slots__ = ("_day", "morning", "yesterday")

    def __init__(self) -> None:
        self._day = -1
        self.morning: dict[str, int] = {}
        self.yesterday: dict[str, int] = {}

    def sample(self, now_ms: int, counters: Mapping[str, int]) -> None:
        day = now_ms // 86_400_000
        if day != self._day:
            self.yesterday = self.morning if self._day >= 0 else {}
            self.morning = dict(counters) if self._day >= 0 else {}
            self._day = day
