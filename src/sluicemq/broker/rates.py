"""How fast something counts: per second over the last 10, 60 and 600 s, as RocketMQ's tools show.

Once a second `sample` remembers the counters; a rate is a difference of two samples. Nothing
happens where the counting is done.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from operator import itemgetter
from typing import Final

WINDOWS_S: Final = (10, 60, 600)


class Rates:
    """What named counters were when they changed."""

    __slots__ = ("_histories", "_times")

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=WINDOWS_S[-1] + 1)
        self._histories: dict[str, deque[tuple[float, int]]] = {}

    def sample(self, now_s: float, counters: Mapping[str, int]) -> None:
        """Call this once a second. Only those that have changed take room."""
        self._times.append(now_s)
        histories, oldest_s = self._histories, self._times[0]
        for name, value in counters.items():
            history = histories.get(name)
            if history is None:
                histories[name] = deque([(now_s, value)])
            elif history[-1][1] != value:
                history.append((now_s, value))
                while history[1][0] <= oldest_s:
                    history.popleft()
        if len(histories) > len(counters):
            for name in histories.keys() - counters.keys():
                del histories[name]

    def rate(self, name: str, window_s: int) -> float:
        """Counts a second over the last `window_s` seconds, 0.0 before there are two samples."""
        history = self._histories.get(name)
        if history is None or len(self._times) < 2:
            return 0.0
        begin_s = self._times[max(0, len(self._times) - 1 - window_s)]
        index = bisect_right(history, begin_s, key=itemgetter(0))
        counted = history[-1][1] - (history[index - 1][1] if index else 0)
        seconds = self._times[-1] - begin_s
        return counted / seconds if seconds > 0 else 0.0

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
