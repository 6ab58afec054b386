"""What is due when: places in the commit log by the millisecond.

Held only for the seconds that come next. A place is 8 bytes in an array for its millisecond, so a
hundred thousand messages of one second take less than a megabyte; a heap says which is first.
"""

import heapq
from array import array

Entry = tuple[int, int]
"""(due in ms since 1970, place in the commit log)."""


class DueTable:
    """Entries by time; those of one millisecond in the order they came."""

    __slots__ = ("_at", "_places", "_times", "count")

    def __init__(self) -> None:
        self._times: list[int] = []
        self._places: dict[int, array[int]] = {}
        self._at: dict[int, int] = {}  # how many of a millisecond are taken already
        self.count = 0

    def add(self, due_ms: int, place: int) -> None:
        """HOT."""
        places = self._places.get(due_ms)
        if places is None:
            places = self._places[due_ms] = array("q")
            heapq.heappush(self._times, due_ms)
        places.append(place)
        self.count += 1

    @property
    def next_ms(self) -> int | None:
        """When the next entry is due; None without one."""
        return self._times[0] if self._times else None

    def take(self, now_ms: int, count_max: int) -> list[Entry]:
        """Up to so many of the first entries, all of one millisecond and due by now."""
        if not self._times or self._times[0] > now_ms:
            return []
        due_ms = self._times[0]
        places, at = self._places[due_ms], self._at.get(due_ms, 0)
        taken = places[at : at + count_max]
        at += len(taken)
        if at == len(places):
            heapq.heappop(self._times)
            del self._places[due_ms]
            self._at.pop(due_ms, None)
        else:
            self._at[due_ms] = at
        self.count -= len(taken)
        return [(due_ms, place) for place in taken]

    def give_back(self, entries: list[Entry]) -> None:
        """What was taken is due still."""
        for due_ms, place in entries:
            self.add(due_ms, place)

    def clear(self) -> None:
        self._times.clear()
        self._places.clear()
        self._at.clear()
        self.count = 0
