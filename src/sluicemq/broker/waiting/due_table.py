"""A table of messages by the millisecond in which they are due."""

import heapq
from array import array

DueMessage = tuple[int, int]
"""The time when a message is due, in ms since 1970, and its position in the commit log."""


class DueTable:
    """Positions of messages in the commit log, by the millisecond in which they are due.

    Messages that are due in the same millisecond are in the order in which they were added. The
    positions of each millisecond are an array of 8-byte integers, so a hundred thousand messages of
    one second take less than a megabyte. A heap contains the milliseconds.
    """

    __slots__ = ("_positions", "_taken_counts", "_times", "count")

    def __init__(self) -> None:
        self._times: list[int] = []
        """A heap of the milliseconds that have messages. The first one is the earliest."""
        self._positions: dict[int, array[int]] = {}
        """The positions of each millisecond. Those that were taken stay until all are taken."""
        self._taken_counts: dict[int, int] = {}
        """How many messages of a millisecond were taken from the beginning of its array.

        A millisecond of which no message was taken has no entry."""
        self.count = 0
        """The number of messages."""

    def add(self, due_ms: int, position: int) -> None:
        """Add the message at `position` of the commit log, which is due at `due_ms`.

        It comes after the other messages of the same millisecond. Called for each timed message:
        keep it cheap.
        """
        positions = self._positions.get(due_ms)
        if positions is None:
            positions = self._positions[due_ms] = array("q")
            heapq.heappush(self._times, due_ms)
        positions.append(position)
        self.count += 1

    @property
    def next_due_ms(self) -> int | None:
        """The time when the first message is due, in ms since 1970; None if the table is empty."""
        return self._times[0] if self._times else None

    def take_due(self, now_ms: int, count_max: int) -> list[DueMessage]:
        """Remove and return the messages of the earliest millisecond, at most `count_max`.

        Each is a tuple (due time in ms, position in the commit log). Messages of the next
        millisecond are not returned, even if they are due as well. Return [] if no message is due
        at `now_ms`.
        """
        if not self._times or self._times[0] > now_ms:
            return []
        due_ms = self._times[0]
        positions = self._positions[due_ms]
        start = self._taken_counts.get(due_ms, 0)
        taken = positions[start : start + count_max]
        end = start + len(taken)
        if end == len(positions):
            heapq.heappop(self._times)
            del self._positions[due_ms]
            self._taken_counts.pop(due_ms, None)
        else:
            self._taken_counts[due_ms] = end
        self.count -= len(taken)
        return [(due_ms, position) for position in taken]

    def put_back(self, taken: list[DueMessage]) -> None:
        """Add messages again that `take_due` returned and that were not delivered.

        They are now behind the messages of their millisecond that were not taken.
        """
        for due_ms, position in taken:
            self.add(due_ms, position)
