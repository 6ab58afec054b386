"""The state of one lane in one queue: its offset, and which of the following messages are its own.

A *span* is a clause (`rules.py`) with the range of offsets for which it holds. The rule of a lane
at an offset consists of the clauses of all spans that contain the offset. Before the current offset
of the lane, the rule is the one at the current offset.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
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
    """The state of one lane in one queue: its offsets, its spans, and how far its reader is."""

    committed_offset: int = -1
    """All messages of the lane before this offset are done; -1 if nothing is committed yet."""
    start_offset: int = 0
    """The offset at which the lane begins if nothing is committed."""
    spans: list[Span] = field(default_factory=list)
    """The clauses by which messages belong to the lane, each with its range of offsets."""
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

    def may_have_reader(self, client_id: str) -> bool:
        """Return whether this client pulled last, or no client has pulled since lanes exist.

        If another client pulled last, this one has no messages of the lane in flight here.
        """
        return self.reader in {"", client_id}

    @property
    def is_fully_committed(self) -> bool:
        """Whether all messages that were delivered are committed, so that none is in flight."""
        return self.delivered_end <= self.current_offset

    def set_reader(self, client_id: str, lane_queues: "Iterable[LaneQueue]") -> None:
        """Record that a client reads the queue for this lane from now on.

        `lane_queues` are the states of all lanes in the same queue. If the client was the reader of
        another lane, that lane gets NO_READER as its reader.
        """
        for lane_queue in lane_queues:
            if lane_queue.reader == client_id:
                lane_queue.reader = NO_READER
        self.reader = client_id

    def can_go_back_to(self, offset: int) -> bool:
        """Return whether the lane may get additional messages from `offset` on.

        That is the case if its reader has not read past `offset` yet. It is also the case if the
        lane has no messages in flight, because then the reader can be redirected to `offset`.
        Return False if the reader has not pulled since the broker started: it may be anywhere.
        """
        if self.read_end is None:
            return False
        return max(self.read_end, self.current_offset) <= offset or self.is_fully_committed

    def find_rule(self, offset: int) -> tuple[LaneRule, int | None]:
        """Return (rule for the message at `offset`, offset at which the rule changes).

        The rule is the set of the clauses (conditions) of all spans that contain `offset`. A
        message belongs to the lane if one clause matches it. The second value is None if the rule
        holds for all later messages. For an offset before the current one, the rule at the current
        offset is returned.
        """
        offset = max(offset, self.current_offset)
        clauses: list[Clause] = []
        later_changes: list[int] = []  # the offsets after `offset` at which a span begins or ends
        for span_start, span_end, clause in self.spans:
            if span_start > offset:
                later_changes.append(span_start)
            elif span_end is None:
                clauses.append(clause)
            elif span_end > offset:
                clauses.append(clause)
                later_changes.append(span_end)
        return frozenset(clauses), min(later_changes, default=None)

    def commit(self, offset: int) -> None:
        """Set the committed offset, which may go back, and remove the spans that end before it.

        If it goes back before the oldest span, the oldest spans are extended back to `offset`.
        """
        self._extend_back_to(offset)
        self.committed_offset = offset
        self.spans = [span for span in self.spans if span.end is None or span.end > offset]

    def _extend_back_to(self, offset: int) -> None:
        """Let the spans that begin first begin at `offset`, because the reader goes back itself.

        A span says which messages of a range of offsets belong to the lane. Do nothing if a span
        begins at `offset` or earlier. Do nothing either if all spans begin after the current
        offset, because they are for messages that the lane has not reached.
        """
        oldest_start = min((span.first for span in self.spans), default=offset)
        if not offset < oldest_start <= self.current_offset:
            return
        extended_spans = []
        for span in self.spans:
            if span.first == oldest_start:
                extended_spans.append(span._replace(first=offset))
            else:
                extended_spans.append(span)
        self.spans = extended_spans

    def set_rule_from(self, offset: int, rule: LaneRule) -> None:
        """Replace the rule for all messages from `offset` on. Spans before `offset` are kept."""
        has_rule_already = len(self.spans) == len(rule) and all(
            span.end is None and span.first <= offset and span.clause in rule for span in self.spans
        )
        if has_rule_already:
            return
        self.spans = merge_spans([*self.slice_spans(0, offset), *create_spans(offset, rule)])

    def slice_spans(self, first: int, end: int | None = None) -> list[Span]:
        """Return the parts of the spans from offset `first` up to but excluding `end`.

        A span is a range of offsets with a clause, the condition by which messages there belong to
        the lane. If `end` is None, the range has no end. Spans without such offsets are left out.
        """
        sliced_spans = []
        for span in self.spans:
            sliced_start = max(span.first, first)
            # The lower one of the two ends, of which None is the highest.
            if end is None:
                sliced_end = span.end
            elif span.end is None:
                sliced_end = end
            else:
                sliced_end = min(span.end, end)
            if sliced_end is None or sliced_start < sliced_end:
                sliced_spans.append(Span(sliced_start, sliced_end, span.clause))
        return sliced_spans

    def restrict_from(self, offset: int, rule: LaneRule) -> None:
        """Remove the lane's messages from `offset` on that `rule` does not match.

        Messages before `offset` stay with the lane. Clauses that require no filter expression, for
        messages of a retry topic that no lane asks for, are removed from `offset` on.
        """
        restricted_spans: list[Span] = []
        for span in self.slice_spans(offset):
            if span.clause.required:
                restricted_spans += _intersect_span(span, rule)
        self.spans = merge_spans([*self.slice_spans(0, offset), *restricted_spans])

    def find_shared_spans(self, first: int, end: int, rule: LaneRule) -> list[Span]:
        """Return spans for the messages that belong to the lane and that `rule` matches as well.

        Only messages from `first` up to but excluding `end` are included. A clause of `rule`
        without required atoms is for messages that no lane asks for. So it is combined only with
        clauses of the lane that have no required atoms, either.
        """
        rule_with_atoms = frozenset(clause for clause in rule if clause.required)
        shared_spans: list[Span] = []
        for span in self.slice_spans(first, end):
            if span.clause.required:
                shared_spans += _intersect_span(span, rule_with_atoms)
            else:
                shared_spans += _intersect_span(span, rule)
        return shared_spans

    def add_spans(self, gained_spans: list[Span]) -> None:
        """Add `gained_spans` to the spans of the lane.

        A span is a range of offsets with a clause, the condition by which messages there belong to
        the lane. If one of `gained_spans` begins before the current offset, the lane goes back to
        the first one. The spans that the lane had before then begin at the former current offset,
        so that no message is delivered twice.
        """
        if not gained_spans:
            return
        former_offset = self.current_offset
        first_gained_offset = min(span.first for span in gained_spans)
        self.spans = merge_spans([*self.slice_spans(former_offset), *gained_spans])
        if first_gained_offset < former_offset:
            self.go_back_to(first_gained_offset)

    def go_back_to(self, offset: int) -> None:
        """Set the current offset of the lane back to `offset`, and count nothing as in flight.

        The spans do not change. The caller must redirect the reader to `offset`.
        """
        self.start_offset = offset
        self.committed_offset = offset if self.committed_offset >= 0 else -1
        self.delivered_end = -1
        self.read_end = offset

    def note_pull(self, offset: int) -> None:
        """Record that the reader of the lane pulls from `offset`.

        If the lane has committed and delivered nothing yet, it starts at `offset`, because
        consumers decide where they begin. If `offset` is the current offset of the lane or before
        it, the reader has no messages in flight, and `delivered_end` is lowered to `offset`.
        """
        if self.committed_offset < 0 and self.delivered_end < 0:
            self._extend_back_to(offset)
            self.start_offset = offset
        if offset <= self.current_offset:
            self.delivered_end = min(self.delivered_end, offset)


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return equivalent spans, in which those of the same clause do not touch or overlap.

    A span is a range of offsets with a clause, a condition on messages. For example, 0 to 5 and 5
    to 9 with the same clause become 0 to 9. The result is grouped by clause, and ascending within a
    clause.
    """
    merged_by_clause: dict[Clause, list[Span]] = {}
    for span in sorted(spans, key=attrgetter("first")):
        merged_spans = merged_by_clause.setdefault(span.clause, [])
        if merged_spans and _touches(merged_spans[-1], span):
            merged_spans[-1] = _unite_spans(merged_spans[-1], span)
        else:
            merged_spans.append(span)
    return list(chain.from_iterable(merged_by_clause.values()))


def _touches(earlier: Span, later: Span) -> bool:
    """Return whether two spans touch or overlap. `later` does not begin before `earlier`."""
    return earlier.end is None or earlier.end >= later.first


def _unite_spans(earlier: Span, later: Span) -> Span:
    """Return the span of all offsets of two spans of one clause that touch or overlap."""
    if earlier.end is None or later.end is None:
        return earlier._replace(end=None)
    return earlier._replace(end=max(earlier.end, later.end))


def _intersect_span(span: Span, rule: LaneRule) -> list[Span]:
    """Return spans of the messages that both a span and a rule match."""
    shared_rule = intersect_rules(frozenset([span.clause]), rule)
    return [Span(span.first, span.end, clause) for clause in shared_rule]


def create_spans(start_offset: int, rule: LaneRule) -> list[Span]:
    """Return spans by which `rule` holds for all messages from `start_offset` on."""
    return [Span(start_offset, None, clause) for clause in rule]
