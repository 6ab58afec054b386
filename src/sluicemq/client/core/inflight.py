"""What was handed out of one queue and not yet acknowledged; the offset that may be committed.

Offsets of a queue come in rising order and are acknowledged in any order. The committed offset is
the lowest one that is not acknowledged, or the position after the last one seen when there is none:
so a restart repeats messages and never skips one. Messages that the client itself drops (a tag hash
collision) never enter: the position passes them.

    seen:   10 11 12 13 | position 14
    acked:  10    12
    commit: 11

What a consumer did lately, topic by topic: the status table of 307.

Counts are kept for the last `WINDOW_S` seconds, in cells of one second each; the failures of the
last hour in cells of a minute. Times come in as arguments.
"""

from collections import deque
from collections.abc import Collection
from typing import Final

from sluicemq.wire.bodies import TopicRates

COUNT_MAX: Final = 1000
"""Messages of one queue in flight before pulling pauses (RocketMQ's pullThresholdForQueue)."""
BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes of one queue in flight before pulling pauses (RocketMQ allows 100 MiB)."""


class InFlight:
    """One queue, from `position` on. `count` and `size_bytes` are what is not acknowledged."""

    __slots__ = ("_done", "_order", "_sizes", "count", "position", "size_bytes")

    def __init__(self, position: int) -> None:
        self.position = position
        self.count = 0
        self.size_bytes = 0
        self._order: deque[int] = deque()
        self._sizes: dict[int, int] = {}
        self._done: set[int] = set()

    def add(self, offset: int, size_bytes: int) -> None:
        """A message was taken from the queue. Offsets must rise."""
        assert not self._order or offset > self._order[-1], "offsets of a queue rise"
        self._order.append(offset)
        self._sizes[offset] = size_bytes
        self.count += 1
        self.size_bytes += size_bytes

    def passed(self, position: int) -> None:
        """Everything below `position` has been seen."""
        self.position = max(self.position, position)

    def ack(self, offset: int) -> bool:
        """Acknowledges one message; False when it was not in flight (acknowledged before)."""
        size = self._sizes.pop(offset, None)
        if size is None:
            return False
        self.count -= 1
        self.size_bytes -= size
        self._done.add(offset)
        while self._order and self._order[0] in self._done:
            self._done.remove(self._order.popleft())
        return True

    def back(self, waiting: Collection[int]) -> set[int]:
        """Goes back before the messages at the end that nobody was given yet (`waiting`), as if
        they had never been seen. Returns them."""
        gone: set[int] = set()
        while self._order and self._order[-1] in waiting:
            offset = self._order.pop()
            self.count -= 1
            self.size_bytes -= self._sizes.pop(offset)
            self.position = offset
            gone.add(offset)
        return gone

    @property
    def committable(self) -> int:
        """The lowest offset not acknowledged, or the position when all are."""
        return self._order[0] if self._order else self.position

    @property
    def span(self) -> int:
        """From the lowest unacknowledged offset to the position."""
        return self.position - self.committable

    @property
    def spread(self) -> int:
        """From the lowest unacknowledged offset to the highest offset taken since: what a crash
        would repeat, at most."""
        return self._order[-1] - self._order[0] if self._order else 0

    def has_room(
        self,
        count_max: int = COUNT_MAX,
        bytes_max: int = BYTES_MAX,
        span_max: int | None = None,
    ) -> bool:
        """Whether more may be pulled."""
        is_narrow = span_max is None or self.spread <= span_max
        return self.count < count_max and self.size_bytes < bytes_max and is_narrow


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
