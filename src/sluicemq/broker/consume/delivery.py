"""What each group received of each topic: counters, failures, and an estimate of the span limit.

RocketMQ's push consumers pause for 50 ms when the first and the last unprocessed message of a queue
are too far apart (consumeConcurrentlyMaxSpan: 2,000 offsets in Java). A filter that matches one
message in a hundred reaches that limit with twenty messages. Clients do not report the limit, but
the broker can infer it from the time between an answer and the next pull:

    at once         below QUICK_S: the client was not over its limit, so the span may grow. It does
                    not grow in the first second, because most clients have the default limit and
                    each attempt to exceed it costs the client 50 ms.
    after 50 ms     between LATE_S and SLOW_S: the span shrinks, and grows again only after a pause
                    that becomes longer each time. So a client with RocketMQ's limit loses 50 ms
                    now and then.
    even later      the client is busy processing, which says nothing about its limit.

A pull carries the offset up to which everything is processed, but the client sends it before it has
begun to process the messages that it has just received. So a match that is out of reach is not
delivered at once. If the read has skipped messages before the match, the answer is empty. The next
pull comes at once, begins at the match and carries a newer offset. If the match is out of reach of
that pull too, the pull is *delayed* by some milliseconds and then gets the match, so every answer
makes progress. If the client pauses nevertheless (because it is slow, or because it does not report
its offset), the next delay is half as long, until pulls are no longer delayed and the client's own
limit takes effect.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.plan import ERROR
from sluicemq.model.subscription import MessageFilter
from sluicemq.store.gather import PULL_SPAN_MAX, SpanLimit
from sluicemq.store.read import ReadResult
from sluicemq.wire import bodies

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sluicemq.broker.consume.matching import MatchCriteria

SPAN_MIN: Final = PULL_SPAN_MAX // 2
"""The smallest span, in offsets. The Go client's default limit is half of Java's."""
SPAN_MAX: Final = 65_535
"""The largest span, in offsets: the highest limit that a Java consumer can be configured with."""
QUICK_S: Final = 0.020
"""A pull within this time after an answer came at once."""
LATE_S: Final = 0.040
"""A pull after this time or more may come from a client that paused at its limit."""
SLOW_S: Final = 0.200
"""A pull after more than this time says nothing about the client's limit."""
GROWTH_DELAY_S: Final = 1.0
"""The span does not grow in this time after the first wide answer."""
BACKOFF_MIN_S: Final = 0.25
"""The first pause in which the span does not grow after it has shrunk."""
BACKOFF_MAX_S: Final = 60.0
"""The longest pause in which the span does not grow after it has shrunk."""
DELAY_S_MAX: Final = 0.004
"""The longest delay of a pull. A client that processes its messages within it does not pause."""
DELAY_S_MIN: Final = 0.0005
"""Delays are halved down to this time. After that pulls are not delayed."""


@dataclass(slots=True)
class _QueueTiming:
    """The last answer for one queue, and how long the next pull out of reach is delayed."""

    answered_s: float = 0.0
    """When the last answer left, on the monotonic clock."""
    span: int = 0
    """The span of the last answer if it was wide enough to test the client's limit, else 0."""
    next_offset: int = -1
    """The next offset of the last answer, -1 before the first one."""
    first_held: int = -1
    """The first match that the client held after its last answer with messages, or -1."""
    delay_s: float = DELAY_S_MAX
    """How long the next pull out of reach is delayed; 0 if it is not."""
    was_delayed: bool = False
    """Whether the last answer was delayed."""

    def adjust_delay(self, passed_s: float) -> None:
        """Adapt the delay of answers to what the client did after the last delayed answer.

        `passed_s` is the time from that answer to the next pull. If it is less than QUICK_S, the
        delay becomes DELAY_S_MAX. If it is LATE_S or more, the client has paused although the
        answer was delayed: the delay is halved, or becomes 0 if it was at most DELAY_S_MIN.
        """
        self.was_delayed = False
        if passed_s < QUICK_S:
            self.delay_s = DELAY_S_MAX
        elif passed_s >= LATE_S:
            self.delay_s = self.delay_s / 2 if self.delay_s > DELAY_S_MIN else 0.0


@dataclass(slots=True)
class SpanEstimator:
    """An estimate of how far apart the unprocessed messages of a group may be, for one topic.

    Called for each ordinary pull with a filter, by `pull.py` and by the compiled engine.
    """

    span_max: int = PULL_SPAN_MAX
    """The current estimate, in offsets."""
    _grows_at_s: float = 0.0
    """The monotonic time from which on the span may grow; 0 before the first wide answer."""
    _shrinks_at_s: float = 0.0
    """The monotonic time from which on the span may shrink again."""
    _backoff_s: float = BACKOFF_MIN_S
    """The length of the next pause."""
    _failed_span: int = 0
    """The last span after which a client seemed to have paused at its limit; 0 before the first."""
    _queue_timings: dict[int, _QueueTiming] = field(default_factory=dict)

    def record_pull(self, queue_id: int, now_s: float) -> None:
        """Adapt `span_max` to the time that passed from the last answer to this pull.

        The span of an answer is the distance from the first to the last unprocessed offset of the
        client. A client pauses if it is too large. `span_max` is the largest span that is given to
        clients. `now_s` is the monotonic time of the pull. `span_max` changes only if the span of
        the last answer was more than half of it:

        - If the pull came within QUICK_S, `span_max` grows to twice that span, at most to SPAN_MAX.
          It does not grow in the first GROWTH_DELAY_S, and not in a pause (see below).
        - If the pull came between LATE_S and SLOW_S, the client has paused. `span_max` is halved,
          but not below SPAN_MIN. Then a pause begins, in which it neither grows nor shrinks. Each
          pause is twice as long as the last one, until a span as large as the failed one succeeds.

        If the last answer was delayed, the delay of the queue is adapted, too. Do nothing if the
        queue has had no answer. Called for each pull with a filter: keep it cheap.
        """
        queue = self._queue_timings.get(queue_id)
        if queue is None:
            return
        passed_s = now_s - queue.answered_s
        if queue.was_delayed:
            queue.adjust_delay(passed_s)
        if not queue.span:
            return

        # Each answer counts once.
        answered_span = queue.span
        queue.span = 0
        if not self._grows_at_s:
            self._grows_at_s = now_s + GROWTH_DELAY_S
        if passed_s < QUICK_S:
            if now_s >= self._grows_at_s:
                self.span_max = max(self.span_max, min(2 * answered_span, SPAN_MAX))
                if answered_span >= self._failed_span:  # the earlier pause had another reason
                    self._backoff_s = BACKOFF_MIN_S
        # The limit shrinks once for several pulls that come late at the same time.
        elif LATE_S <= passed_s <= SLOW_S and now_s >= self._shrinks_at_s:
            self._shrink_span_max(answered_span, now_s)

    def _shrink_span_max(self, failed_span: int, now_s: float) -> None:
        """Halve `span_max`, because a client has paused after an answer with `failed_span`.

        Then `span_max` neither grows nor shrinks for a while, which is longer each time.
        """
        self.span_max = max(self.span_max // 2, SPAN_MIN)
        self._failed_span = failed_span
        self._shrinks_at_s = now_s + self._backoff_s
        self._grows_at_s = self._shrinks_at_s
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)

    def make_span_limit(
        self, queue_id: int, offset: int, commit_offset: int | None, is_parked: bool
    ) -> SpanLimit:
        """Return the limit for a read from `offset` on, by which the client does not hold too much.

        `commit_offset` is the offset up to which the client has processed the queue. If it is None,
        the client counts as having processed everything before `offset`, except the messages of its
        last answer. `is_parked` says that the pull has waited in the broker. Then what it finds is
        delivered at once, without a delay.
        """
        queue = self._queue_timings.get(queue_id)
        if queue is None:
            queue = self._queue_timings[queue_id] = _QueueTiming()
        if commit_offset is not None:
            processed_end = commit_offset
        elif queue.next_offset == offset and queue.first_held >= 0:
            processed_end = queue.first_held  # the client has processed none of the last answer
        else:
            processed_end = offset
        is_patient = not is_parked and queue.delay_s > 0
        return SpanLimit(processed_end, self.span_max, is_patient)

    def record_delay(self, queue_id: int) -> float:
        """Record that the answer to a pull out of reach is delayed. Return the delay in seconds."""
        queue = self._queue_timings[queue_id]
        queue.was_delayed = True
        return queue.delay_s

    def record_answer(self, queue_id: int, result: ReadResult, now_s: float) -> None:
        """Record the answer to a pull of a queue, which is sent at `now_s`, for `record_pull`.

        The span of the answer is kept only if it is more than half of `span_max`, because a smaller
        one says nothing about the limit. `result` is a ReadResult, or the `Given` of the compiled
        engine, which has the same attributes.
        """
        queue = self._queue_timings[queue_id]
        queue.next_offset = result.next_offset
        queue.answered_s = now_s
        queue.span = 0
        if result.count:
            queue.first_held = result.held_from
            queue.span = result.span if 2 * result.span > self.span_max else 0


RANGE_BOUNDS_MAX: Final = 128
"""The most numbers in one list of `DeliveryState.ranges_to_check`: each range takes two."""
FILTERS_MAX: Final = 256
"""The most lists in `DeliveryState.ranges_to_check`: a pull may bring another filter each time."""
FILTERS_CHARS_MAX: Final = 1 << 16
"""The most characters of the different expressions in `DeliveryState.ranges_to_check`.

Compiled, each character takes 85 to 280 bytes.
"""


@dataclass(slots=True)
class DeliveryState:
    """What one group received of one topic since the broker started."""

    fetched_offsets: dict[int, int]
    """The next offset that the group will fetch, by queue id. The dict belongs to `Offsets`."""
    messages_out: int = 0
    """The number of messages that were delivered to the group."""
    bytes_out: int = 0
    """The size in bytes of the records that were delivered to the group."""
    filtered_count: int = 0
    """The number of messages that filters rejected."""
    acknowledged_count: int = 0
    """The number of popped messages that were acknowledged."""
    sent_back_count: int = 0
    """The number of messages that consumers sent back for a retry."""
    span_estimator: SpanEstimator = field(default_factory=SpanEstimator)
    ranges_to_check: dict[tuple[MessageFilter, int], list[int]] = field(default_factory=dict)
    """Offset ranges in which a filter on properties may have failed, by filter and queue id.

    Each list holds the start and end of one range after another, in ascending order for a reader
    that does not jump. `filter_diagnostics` takes the ranges and evaluates the filter again.
    """

    def add_range_to_check(
        self, message_filter: MessageFilter, queue_id: int, start: int, end: int
    ) -> None:
        """Remember that the filter may have failed on the messages from `start` to before `end`.

        The range is added to `ranges_to_check`. If it begins where the last range of the same
        filter and queue ends, it extends that one. If there are too many filters (FILTERS_MAX),
        characters in filters (FILTERS_CHARS_MAX) or bounds of ranges (RANGE_BOUNDS_MAX), the oldest
        ranges are dropped and never checked. Called once for each pull.
        """
        bounds = self.ranges_to_check.get((message_filter, queue_id))
        if bounds is None:
            self.ranges_to_check[message_filter, queue_id] = [start, end]
            while (
                len(self.ranges_to_check) > FILTERS_MAX
                or self._count_filter_chars() > FILTERS_CHARS_MAX
            ):
                del self.ranges_to_check[next(iter(self.ranges_to_check))]
        elif bounds[-1] == start:
            bounds[-1] = end
        else:
            bounds += (start, end)
            if len(bounds) > RANGE_BOUNDS_MAX:
                del bounds[:2]

    def _count_filter_chars(self) -> int:
        """Return the number of characters in the expressions of `ranges_to_check`."""
        filters = {message_filter for message_filter, _ in self.ranges_to_check}
        return sum(getattr(message_filter, "weight", 0) for message_filter in filters)


class DeliveryStates(dict[tuple[str, str], DeliveryState]):
    """The DeliveryState of each (topic, group) since the broker started.

    A missing entry is created when it is accessed.
    """

    __slots__ = ("_pulled_by",)

    def __init__(self, pulled_by: Callable[[str, str], dict[int, int]]) -> None:
        """Create the table without entries.

        `pulled_by(group, topic)` returns the dict that a new entry has as `fetched_offsets`. See
        `Offsets.pulled_by`.
        """
        super().__init__()
        self._pulled_by = pulled_by

    def __missing__(self, key: tuple[str, str]) -> DeliveryState:
        """Create the entry of a (topic, group), and return it."""
        topic, group = key
        state = self[key] = DeliveryState(self._pulled_by(group, topic))
        return state

    def forget_topic(self, topic: str) -> None:
        """Reset what depends on the offsets of a deleted topic, for every group.

        A new topic of the same name begins at offset 0. So the span estimate begins again, and
        ranges to check are dropped. The counters stay. `fetched_offsets` belongs to `Offsets`,
        which resets it.
        """
        for (name, _), state in self.items():
            if name == topic:
                state.span_estimator = SpanEstimator()
                state.ranges_to_check.clear()


REASONS_MAX: Final = 32
"""The most reasons that are counted for a group and topic; further ones count as OTHER_REASONS."""
OTHER_REASONS: Final = "other reasons"
FAILURES_KEPT: Final = 10
"""The most failed evaluations that are kept as samples."""
RECORDED_MAX: Final = 10_000
"""The most messages of which `FilterFailures` knows on which lane's filter they have failed."""
EXPLAINED_MAX: Final = 256
"""The most failed evaluations of a block that are repeated to find their reasons.

If more have failed, evenly spaced ones are taken, and their reasons stand for all.
"""
EXPLAINED_WEIGHT: Final = 1 << 15
"""The most characters of an expression, times the number of repetitions: about a millisecond."""


@dataclass(slots=True)
class FilterFailures:
    """The evaluations that failed for a group on a topic since the broker started.

    `reasons` counts them by reason, and `samples` are the last ones.
    """

    reasons: dict[str, int] = field(default_factory=dict)
    samples: deque[bodies.FilterFailure] = field(
        default_factory=lambda: deque(maxlen=FAILURES_KEPT)
    )
    _recorded: dict[tuple[int, int], tuple[str, object]] = field(default_factory=dict)
    """The key of the filter on which a message of a group with lanes failed, by (queue, offset)."""

    @property
    def total(self) -> int:
        """The number of failed evaluations."""
        return sum(self.reasons.values())

    def record_failures(
        self,
        queue_id: int,
        criteria: "MatchCriteria",
        first_offset: int,
        verdicts: "NDArray[np.uint8]",
        properties_at: Callable[[int], Mapping[str, str] | None],
        *,
        has_lanes: bool = False,
    ) -> None:
        """Count the failed evaluations of a filter by their reasons, and add samples.

        If the group has lanes, a message that failed on the filter of another lane is left out.
        Only the last RECORDED_MAX messages are remembered for that.

        `verdicts` are the results of evaluating the filter, one for each message from the offset
        `first_offset` on. ERROR means that the evaluation failed. `properties_at(offset)` returns
        the properties of a message, or None if it does not exist.

        A verdict does not say why the evaluation failed. So some of the failed evaluations are
        repeated: at most EXPLAINED_MAX, and fewer if the expression is long, at even distances. All
        failures are then distributed over the reasons in the same proportion.
        """
        evaluate = criteria.verdict
        assert evaluate is not None
        failed_rows = (verdicts == ERROR).nonzero()[0].tolist()
        if has_lanes:
            failed_rows = [
                row
                for row in failed_rows
                if self._is_first_filter(queue_id, first_offset + row, criteria.key)
            ]
        repeated_max = min(EXPLAINED_MAX, max(1, EXPLAINED_WEIGHT // max(criteria.weight, 1)))
        row_step = max(1, math.ceil(len(failed_rows) / repeated_max))
        repeated_counts: dict[str, int] = {}  # by reason
        for row in failed_rows[::row_step]:
            offset = first_offset + row
            try:
                evaluate(properties_at(offset) or {})
            except FilterEvaluationError as error:
                repeated_counts[error.reason] = repeated_counts.get(error.reason, 0) + 1
                self.samples.append(bodies.FilterFailure(queue_id, offset, str(error)))
        self._distribute_failures(len(failed_rows), repeated_counts)

    def _is_first_filter(self, queue_id: int, offset: int, key: tuple[str, object]) -> bool:
        """Return whether a failed message is not recorded yet, or with the same filter.

        `key` identifies the filter. The message is recorded with it if it was not.
        """
        recorded = self._recorded.setdefault((queue_id, offset), key)
        if len(self._recorded) > RECORDED_MAX:
            del self._recorded[next(iter(self._recorded))]
        return recorded == key

    def _distribute_failures(self, failure_count: int, repeated_counts: dict[str, int]) -> None:
        """Distribute `failure_count` failures over reasons, in proportion to `repeated_counts`.

        `repeated_counts` says by reason how many of the repeated evaluations failed.
        """
        # The last reason gets what is left, so that the shares add up to all failures.
        failures_left = failure_count
        repeated_left = sum(repeated_counts.values())
        for reason, repeated_count in repeated_counts.items():
            share = failures_left * repeated_count // repeated_left
            failures_left -= share
            repeated_left -= repeated_count
            self.add(reason, share)

    def add(self, reason: str, count: int) -> None:
        """Count `count` failures with this reason.

        A new reason counts as OTHER_REASONS if there are REASONS_MAX already.
        """
        if reason not in self.reasons and len(self.reasons) >= REASONS_MAX:
            reason = OTHER_REASONS
        self.reasons[reason] = self.reasons.get(reason, 0) + count


def take_newest(
    ranges: list[tuple[int, int, int]], count_max: int
) -> Iterator[tuple[int, int, int]]:
    """Yield `ranges` of (queue id, start, end), shortened to `count_max` messages in total.

    If they have more, each queue keeps the newest messages, in proportion to its length, but at
    least one.
    """
    total_count = sum(end - start for _, start, end in ranges)
    for queue_id, start, end in ranges:
        if total_count <= count_max:
            yield queue_id, start, end
        else:
            share = (end - start) * count_max // total_count
            yield queue_id, end - max(share, 1), end
