"""What was handed out of one queue and not yet acknowledged; the offset that may be committed.

Offsets of a queue come in rising order and are acknowledged in any order. The committed offset is
the lowest one that is not acknowledged, or the position after the last one seen when there is none:
so a restart repeats messages and never skips one. Messages that the client itself drops (a tag hash
collision) never enter: the position passes them.

    seen:   10 11 12 13 | position 14
    acked:  10    12
    commit: 11
"""

from collections import deque
from collections.abc import Collection
from typing import Final

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
