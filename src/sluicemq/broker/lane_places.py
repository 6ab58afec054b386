"""Where a lane stands in a queue: an offset, and from there on which messages are its own.

    offset     everything of the lane's before it is done; -1: nothing is committed yet
    start      where it begins while nothing is committed
    spans      clauses with the offsets for which they hold. What holds at the place holds for
               everything before it too
    delivered  the end of what was given and may not be committed: a lane is *at rest* in a queue
               when everything it was given is committed
    reader     the client that pulled last, NOBODY when that one reads for another lane now; "":
               nobody since the lanes began
    scanned    where its reader goes on; None: it has not read since the broker started

Plain values and functions: who changes them when is `lanes.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sluicemq.broker.lane_rules import Clause, Rule, both

NOBODY: Final = "-"


class Span(NamedTuple):
    """A clause holds for the offsets [first, end); None: for ever."""

    first: int
    end: int | None
    clause: Clause


@dataclass(slots=True)
class Place:
    """One lane in one queue."""

    offset: int = -1
    start: int = 0
    spans: list[Span] = field(default_factory=list)
    delivered: int = -1
    scanned: int | None = None
    reader: str = ""

    @property
    def position(self) -> int:
        """Everything of the lane's before it is done."""
        return self.offset if self.offset >= 0 else self.start

    @property
    def is_at_rest(self) -> bool:
        return self.delivered <= self.position

    def read_by(self, client_id: str, places: "Iterable[Place]") -> None:
        """A client reads the queue for this lane from now on, and for no other of its places."""
        for place in places:
            if place.reader == client_id:
                place.reader = NOBODY
        self.reader = client_id

    def can_take(self, here: int) -> bool:
        """May the lane get messages from `here` on? Its reader has not come so far, or it has
        nothing in hand, so that it can be sent back. Where the reader is has to be known."""
        if self.scanned is None:
            return False
        return max(self.scanned, self.position) <= here or self.is_at_rest

    def rule_at(self, offset: int) -> tuple[Rule, int | None]:
        """The rule for a message, and the offset from which another one holds."""
        at = max(offset, self.position)
        found, until = [], None
        for first, end, clause in self.spans:
            if first > at:
                until = first if until is None else min(first, until)
            elif end is None:
                found.append(clause)
            elif end > at:
                found.append(clause)
                until = end if until is None else min(end, until)
        return frozenset(found), until

    def commit(self, offset: int) -> None:
        """Everything before `offset` is done: what held before it alone is forgotten."""
        self._stretch(offset)
        self.offset = offset
        self.spans = [span for span in self.spans if span.end is None or span.end > offset]

    def _stretch(self, offset: int) -> None:
        """Its reader goes back by itself: what is known first holds for all before it."""
        oldest = min((span.first for span in self.spans), default=offset)
        if offset < oldest <= self.position:
            self.spans = [
                Span(offset if first == oldest else first, end, clause)
                for first, end, clause in self.spans
            ]

    def change_from(self, offset: int, rule: Rule) -> None:
        """Another rule from an offset on, for ever."""
        if len(self.spans) == len(rule) and all(
            span.end is None and span.first <= offset and span.clause in rule for span in self.spans
        ):
            return
        self.spans = joined([*self.cut(0, offset), *whole(offset, rule)])

    def cut(self, first: int, end: int | None = None) -> list[Span]:
        """What lies in [first, end)."""
        found = []
        for low, high, clause in self.spans:
            start = max(low, first)
            stop = high if end is None else end if high is None else min(high, end)
            if stop is None or start < stop:
                found.append(Span(start, stop, clause))
        return found

    def keep_from(self, offset: int, rule: Rule) -> None:
        """From an offset on only what a rule wants too, and nothing that no atom asks for."""
        after = [
            Span(low, high, clause)
            for low, high, own in self.cut(offset)
            if own.must
            for clause in both(frozenset([own]), rule)
        ]
        self.spans = joined([*self.cut(0, offset), *after])

    def shared(self, first: int, end: int, rule: Rule) -> list[Span]:
        """What a lane with this rule gets of the messages [first, end). What another lane asks for
        is not for the clause without an atom."""
        with_atoms = frozenset(item for item in rule if item.must)
        return [
            Span(low, high, clause)
            for low, high, own in self.cut(first, end)
            for clause in both(frozenset([own]), with_atoms if own.must else rule)
        ]

    def take_up(self, gained: list[Span]) -> None:
        """These messages are the lane's too. Before its position nothing else is, so its position
        goes back when they begin before it."""
        if gained:
            here, first = self.position, min(span.first for span in gained)
            self.spans = joined([*self.cut(here), *gained])
            if first < here:
                self.go_back(first)

    def go_back(self, offset: int) -> None:
        """Nothing from `offset` on is done; the reader is to be told."""
        self.start = offset
        self.offset = offset if self.offset >= 0 else -1
        self.delivered = -1
        self.scanned = offset

    def pulls(self, offset: int) -> None:
        """A reader asks for what follows; it has nothing in hand when all before is done."""
        if self.offset < 0 and self.delivered < 0:
            self._stretch(offset)
            self.start = offset
        if offset <= self.position:
            self.delivered = min(self.delivered, offset)


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same clause on adjacent or overlapping offsets is one span."""
    found: dict[Clause, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.first):
        known = found.setdefault(span.clause, [])
        if known and (known[-1].end is None or known[-1].end >= span.first):
            first, end, clause = known[-1]
            end = None if end is None or span.end is None else max(end, span.end)
            known[-1] = Span(first, end, clause)
        else:
            known.append(span)
    return [span for group in found.values() for span in group]


def whole(first: int, rule: Rule) -> list[Span]:
    """A rule that holds from an offset on."""
    return [Span(first, None, clause) for clause in rule]
