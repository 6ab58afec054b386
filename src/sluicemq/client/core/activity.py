"""What a consumer did lately, topic by topic: the status table of 307.

Counts are kept for the last `WINDOW_S` seconds, in cells of one second each; the failures of the
last hour in cells of a minute. Times come in as arguments.
"""

from collections import deque
from typing import Final

from sluicemq.protocol.bodies import TopicRates

WINDOW_S: Final = 60
_HOUR_CELLS: Final = 60


class Counts:
    """One group's doings with one topic."""

    __slots__ = ("_cell", "_cell_end_s", "_cells", "_failed", "last_consume_s")

    def __init__(self) -> None:
        self._cells: deque[list[float]] = deque()
        self._cell: list[float] = []
        self._cell_end_s = 0.0
        self._failed: deque[list[float]] = deque()
        self.last_consume_s = 0.0

    def _next_cell(self, now_s: float) -> None:
        second = int(now_s)
        self._cell = [second, 0, 0, 0, 0.0]
        self._cell_end_s = second + 1.0
        self._cells.append(self._cell)
        while self._cells[0][0] <= second - WINDOW_S:
            self._cells.popleft()

    def pulled(self, now_s: float, count: int) -> None:
        """A pull has brought so many messages."""
        if now_s >= self._cell_end_s:
            self._next_cell(now_s)
        self._cell[1] += count

    def done(self, now_s: float, took_s: float) -> None:
        """A message was acknowledged so long after the application got it. HOT."""
        if now_s >= self._cell_end_s:
            self._next_cell(now_s)
        cell = self._cell
        cell[2] += 1
        cell[4] += took_s
        self.last_consume_s = now_s

    def failed(self, now_s: float, took_s: float) -> None:
        """A message was given back."""
        if now_s >= self._cell_end_s:
            self._next_cell(now_s)
        cell = self._cell
        cell[3] += 1
        cell[4] += took_s
        minute = int(now_s // 60)
        if not self._failed or self._failed[-1][0] != minute:
            self._failed.append([minute, 0])
        self._failed[-1][1] += 1
        while self._failed[0][0] <= minute - _HOUR_CELLS:
            self._failed.popleft()

    def rates(self, now_s: float) -> TopicRates:
        """Over the window. Callable from another thread: it works on copies."""
        first = int(now_s) - WINDOW_S
        cells = [tuple(cell) for cell in tuple(self._cells) if cell[0] > first]
        pulled = sum(cell[1] for cell in cells)
        done, failed = sum(cell[2] for cell in cells), sum(cell[3] for cell in cells)
        first_minute = int(now_s // 60) - _HOUR_CELLS
        failures = sum(cell[1] for cell in tuple(self._failed) if cell[0] > first_minute)
        return TopicRates(
            pulls_per_second=pulled / WINDOW_S,
            consume_ms=(
                1000 * sum(cell[4] for cell in cells) / (done + failed) if done + failed else 0.0
            ),
            done_per_second=done / WINDOW_S,
            failed_per_second=failed / WINDOW_S,
            failures=int(failures),
        )
