"""Where a lane stands in a queue: an offset, and from there on which messages are its own.

    offset     everything of the lane's before it is done; -1: nothing is committed yet
    start      where it begins while nothing is committed
    spans      (first offset, rule), ascending: the rule holds to the next span, the last for ever;
               the first one holds for everything before it too
    delivered  the end of what was given and may not be committed: a lane is *at rest* in a queue
               when everything it was given is committed
    reader     the client that pulled last, NOBODY when that one reads for another lane now; "":
               nobody since the lanes began
    scanned    where its reader goes on; None: it has not read since the broker started

Plain values and functions: who changes them when is `lanes.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from sluicemq.broker.lane_rules import NOTHING, Atom, Clause, Rule, either

Span = tuple[int, Rule]
NOBODY: Final = "-"


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
        rule: Rule = self.spans[0][1] if self.spans else NOTHING
        for first, following in self.spans[1:]:
            if first > offset:
                return rule, first
            rule = following
        return rule, None

    def commit(self, offset: int) -> None:
        """Everything before `offset` is done: rules before it are forgotten."""
        self.offset = offset
        while len(self.spans) > 1 and self.spans[1][0] <= offset:
            del self.spans[0]

    def change_from(self, offset: int, rule: Rule) -> None:
        """Another rule from an offset on, for ever."""
        self.spans = _joined([*(span for span in self.spans if span[0] < offset), (offset, rule)])

    def take_up(self, spans: Iterable[Span]) -> None:
        """These messages are the lane's too. Before its position nothing else is, so its position
        goes back when they begin before it."""
        gained = Place(spans=sorted(spans, key=lambda span: span[0]))
        first = next((at for at, rule in gained.spans if rule), None)
        if first is None:
            return
        here = self.position
        own = [(here, self.rule_at(here)[0]), *(span for span in self.spans if span[0] > here)]
        starts = sorted({at for at, _ in own} | {at for at, _ in gained.spans})
        mine = Place(spans=own)
        self.spans = _joined(
            (
                at,
                either(
                    mine.rule_at(at)[0] if at >= here else NOTHING,
                    gained.rule_at(at)[0] if at >= gained.spans[0][0] else NOTHING,
                ),
            )
            for at in starts
        )
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
            self.start = offset
        if offset <= self.position:
            self.delivered = min(self.delivered, offset)


def _joined(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for span in spans:
        if not found or found[-1][1] != span[1]:
            found.append(span)
    return found


# ---------------------------------------------------------------------------------- the file


def rule_object(rule: Rule) -> list[Any]:
    """As JSON, in an order that does not change."""
    return sorted(
        [[list(atom) for atom in sorted(atoms)] for atoms in (item.must, item.none)]
        for item in rule
    )


def rule_from(value: Any) -> Rule:
    return frozenset(
        Clause(frozenset(Atom(*atom) for atom in must), frozenset(Atom(*atom) for atom in none))
        for must, none in value
    )


def place_object(place: Place) -> dict[str, Any]:
    return {
        "offset": place.offset,
        "reader": place.reader,
        "spans": [[first, rule_object(rule)] for first, rule in place.spans],
        "start": place.start,
    }


def place_from(value: Any) -> Place:
    """Raises KeyError, TypeError, ValueError."""
    spans = [(int(first), rule_from(rule)) for first, rule in value["spans"]]
    reader = str(value.get("reader", ""))
    return Place(int(value["offset"]), int(value["start"]), spans, reader=reader)
