"""What `verify` found: severity, kind, place, and a sentence.

    error     messages are lost, unreadable, or found at the wrong place
    warning   not as it should be; no message is lost, or the next start of a broker mends it
    note      worth knowing, and in order

Of each kind so many are kept as anyone will read; all are counted.
"""

from collections import Counter
from typing import Final, NamedTuple

ERROR: Final = "error"
WARNING: Final = "warning"
NOTE: Final = "note"
KEPT_PER_KIND: Final = 100


class Finding(NamedTuple):
    """`place` is a file, a position in the log, or a queue; `kind` is a word for scripts."""

    severity: str
    kind: str
    place: str
    text: str


class Findings:
    """A collection that stays small."""

    def __init__(self, kept_per_kind: int = KEPT_PER_KIND) -> None:
        self.kept: list[Finding] = []
        self.by_kind: Counter[tuple[str, str]] = Counter()
        self._kept_per_kind = kept_per_kind

    def add(self, severity: str, kind: str, place: str, text: str) -> None:
        self.by_kind[severity, kind] += 1
        if self.by_kind[severity, kind] <= self._kept_per_kind:
            self.kept.append(Finding(severity, kind, place, text))

    def has_room(self, severity: str, kind: str) -> bool:
        """False when one more would only be counted: no need to make up its text."""
        return self.by_kind[severity, kind] < self._kept_per_kind

    def count(self, severity: str, kind: str, number: int) -> None:
        """So many more that are not described."""
        self.by_kind[severity, kind] += number

    def total(self, severity: str) -> int:
        return sum(count for (of, _), count in self.by_kind.items() if of == severity)

    @property
    def is_clean(self) -> bool:
        """Notes do not count."""
        return not self.total(ERROR) and not self.total(WARNING)

    @property
    def hidden(self) -> dict[str, int]:
        """How many of each kind are counted and not kept."""
        return {
            kind: count - self._kept_per_kind
            for (_, kind), count in self.by_kind.items()
            if count > self._kept_per_kind
        }
