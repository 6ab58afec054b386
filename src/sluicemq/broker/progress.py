"""How far the broker has come with what it stores by itself, and how much of that is safe.

Who delivers delayed messages, or marks transactions as done, remembers where to go on. That place
may be written to disk only when everything before it is on disk: or a crash would leave a place
behind messages that are gone. So each place goes with the end of the log at that time.
"""

from collections import deque
from typing import Final

_MARKS_MAX: Final = 4096


class Progress:
    """`value` is where to go on now; `safe` where to go on after a crash."""

    __slots__ = ("_marks", "_safe", "value")

    def __init__(self, value: int) -> None:
        self.value = value
        self._safe = value
        self._marks: deque[tuple[int, int]] = deque()

    def advance(self, value: int, log_end: int) -> None:
        """Everything before `value` is stored, and the log ends at `log_end`."""
        self.value = value
        marks = self._marks
        if len(marks) == _MARKS_MAX:  # nobody asks: a later place says the same
            marks.pop()
        marks.append((value, log_end))

    def safe(self, synced_offset: int) -> int:
        """The newest value whose log is on disk up to `synced_offset`."""
        marks = self._marks
        while marks and marks[0][1] <= synced_offset:
            self._safe = marks.popleft()[0]
        return self._safe
