"""The state of one lane in one queue: its offset, and which of the following messages are its own.

A *span* is a clause (`rules.py`) with the range of offsets for which it holds. The rule of a lane
at an offset consists of the clauses of all spans that contain the offset. Before the current offset
of the lane, the rule is the one at the current offset.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sluicemq.broker.lanes.rules import Clause, LaneRule, intersect_rules

NO_READER: Final = "-"
"""`LaneQueue.reader` if the client that pulled last reads the queue for another lane now."""

QueueKey = tuple[str, int]
"""Topic and queue id."""


class Span(NamedTuple):
    """A clause that holds for the offsets from `first` up to but not including `end`.

    `end` None means that the clause holds for all later offsets.
    """

    first: int
    end: int | None
    clause: Clause


@dataclass(slots=True)
class LaneQueue:
    """The state of one lane in one queue."""

    committed_offset: int = -1
    """All messages of the lane before this offset are done; -1 if nothing is committed yet."""
    start_offset: int = 0
    """The offset at which the lane begins if nothing is committed."""
    spans: list[Span] = field(default_factory=list)
    delivered_end: int = -1
    """The offset behind the last message that was delivered and may not be committed."""
    read_end: int | None = None
    """The offset at which the reader continues. None if it has not pulled since the broker started.
    """
    reader: str = ""
    """The client id of the member that pulled last. It is NO_READER if that client reads the queue
    for another lane now, and "" if no client has pulled since the group has lanes."""

    @property
    def current_offset(self) -> int:
        """The committed offset, or the start offset if nothing is committed."""
        return self.committed_offset if self.committed_offset >= 0 else self.start_offset

    @property
    def is_fully_committed(self) -> bool:
        """Whether all messages that were delivered are committed, so that none is in flight."""
        return self.delivered_end <= self.current_offset

    def set_reader(self, client_id: str, lane_queues: "Iterable[LaneQueue]") -> None:
        """Note that a client reads the queue for this lane from now on.

        `lane_queues` are the states of all lanes in the same queue. The client is no longer the
        reader of another one.
        """
        for lane_queue in lane_queues:
            if lane_queue.reader == client_id:
                lane_queue.reader = NO_READER
        self.reader = client_id

    def can_go_back_to(self, offset: int) -> bool:
        """Return whether the lane may get messages from `offset` on.

        That is the case if its reader is not behind `offset` yet, or if the lane has no messages in
        flight, so that the reader can be redirected. It must be known where the reader is.
        """
        if self.read_end is None:
            return False
        return max(self.read_end, self.current_offset) <= offset or self.is_fully_committed

    def find_rule(self, offset: int) -> tuple[LaneRule, int | None]:
        """Return the rule for the message at `offset`, and the offset at which it changes.

        The offset is None if the rule holds for all later messages.
        """
        offset = max(offset, self.current_offset)
        found, until = [], None
        for first, end, clause in self.spans:
            if first > offset:
                until = first if until is None else min(first, until)
            elif end is None:
                found.append(clause)
            elif end > offset:
                found.append(clause)
                until = end if until is None else min(end, until)
        return frozenset(found), until

    def commit(self, offset: int) -> None:
        """Set the committed offset, and forget spans that end before it."""
        self._extend_back_to(offset)
        self.committed_offset = offset
        self.spans = [span for span in self.spans if span.end is None or span.end > offset]

    def _extend_back_to(self, offset: int) -> None:
        """Let the oldest spans begin at `offset`, because the reader goes back on its own."""
        oldest = min((span.first for span in self.spans), default=offset)
        if offset < oldest <= self.current_offset:
            self.spans = [
                Span(offset if first == oldest else first, end, clause)
                for first, end, clause in self.spans
            ]

    def set_rule_from(self, offset: int, rule: LaneRule) -> None:
        """Replace the rule for all messages from `offset` on."""
        if len(self.spans) == len(rule) and all(
            span.end is None and span.first <= offset and span.clause in rule for span in self.spans
        ):
            return
        self.spans = merge_spans([*self.slice_spans(0, offset), *create_spans(offset, rule)])

    def slice_spans(self, first: int, end: int | None = None) -> list[Span]:
        """Return the spans, restricted to the offsets from `first` up to but excluding `end`.

        `end` None means all later offsets.
        """
        found = []
        for low, high, clause in self.spans:
            start = max(low, first)
            stop = high if end is None else end if high is None else min(high, end)
            if stop is None or start < stop:
                found.append(Span(start, stop, clause))
        return found

    def restrict_from(self, offset: int, rule: LaneRule) -> None:
        """Keep only the messages from `offset` on that `rule` matches, too.

        Clauses that require no atom are removed from there on.
        """
        restricted = [
            Span(low, high, clause)
            for low, high, known in self.slice_spans(offset)
            if known.required
            for clause in intersect_rules(frozenset([known]), rule)
        ]
        self.spans = merge_spans([*self.slice_spans(0, offset), *restricted])

    def find_shared_spans(self, first: int, end: int, rule: LaneRule) -> list[Span]:
        """Return spans of the messages from `first` up to `end` that `rule` matches, too.

        A clause of `rule` without required atoms is for messages that no lane asks for, so it only
        counts for spans of the same kind.
        """
        with_atoms = frozenset(clause for clause in rule if clause.required)
        return [
            Span(low, high, clause)
            for low, high, known in self.slice_spans(first, end)
            for clause in intersect_rules(
                frozenset([known]), with_atoms if known.required else rule
            )
        ]

    def add_spans(self, gained: list[Span]) -> None:
        """Add messages to those of the lane.

        If they begin before the current offset, the lane goes back there. Its other messages still
        begin at the current offset.
        """
        if gained:
            current, first = self.current_offset, min(span.first for span in gained)
            self.spans = merge_spans([*self.slice_spans(current), *gained])
            if first < current:
                self.go_back_to(first)

    def go_back_to(self, offset: int) -> None:
        """Move the lane back to `offset`. The caller must redirect the reader."""
        self.start_offset = offset
        self.committed_offset = offset if self.committed_offset >= 0 else -1
        self.delivered_end = -1
        self.read_end = offset

    def note_pull(self, offset: int) -> None:
        """Note that the reader pulls from `offset`.

        A reader that pulls from the current offset, or before it, has no messages in flight.
        """
        if self.committed_offset < 0 and self.delivered_end < 0:
            self._extend_back_to(offset)
            self.start_offset = offset
        if offset <= self.current_offset:
            self.delivered_end = min(self.delivered_end, offset)


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the spans, with those merged that have the same clause and touch or overlap."""
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


def create_spans(first: int, rule: LaneRule) -> list[Span]:
    """Return spans by which `rule` holds for all messages from offset `first` on."""
    return [Span(first, None, clause) for clause in rule]
