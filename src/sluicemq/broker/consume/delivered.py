"""What groups got: sums that pulls and pops add to, and how far apart the messages may lie that a
filtering consumer has in hand, which is learned from its pulls.

RocketMQ's push consumers stop for 50 ms when the first and the last message of a queue that they
have not finished lie too far apart (consumeConcurrentlyMaxSpan: 2,000 offsets in Java). A filter
that lets one message in a hundred through reaches that with twenty messages. The limit is the
client's own secret, but its pulls tell of it:

    quick     the next pull comes at once: what it has in hand is not too much, so the span grows;
              not in the first second, since most limits are the default and a trial costs 50 ms
    late      it comes after some 50 ms: the span shrinks, and grows again later, and later still
              each time that it happens: a client with RocketMQ's limit loses 50 ms now and then
    slow      it comes after more than that: what it got takes its time, which tells nothing

A pull names the offset up to which everything is consumed, but a client asks again before it has
begun to consume what it just got. A match that lies out of its reach is then not given at once. If
messages before it are passed over, the answer has none, and the client's next pull, which comes at
once and begins at the match, says what it has consumed by then. If that pull is out of reach too,
it is *held* for some milliseconds and given the match then: every answer makes progress. When the
client pauses all the same (a slow consumer, or one that does not tell), the next hold is half as
long, until nothing is held and the client's own limit does the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sluicemq.model.subscription import MessageFilter
from sluicemq.store.gather import PULL_SPAN_MAX, SpanLimit
from sluicemq.store.read import ReadResult

SPAN_MIN: Final = PULL_SPAN_MAX // 2
"""Half of Java's default is the Go client's."""
SPAN_MAX: Final = 65_535
"""The most that a Java consumer can be set to."""
QUICK_S: Final = 0.020
LATE_S: Final = 0.040
SLOW_S: Final = 0.200
GROWS_AFTER_S: Final = 1.0
BACKOFF_MIN_S: Final = 0.25
BACKOFF_MAX_S: Final = 60.0
HOLD_S: Final = 0.004
"""The longest time for which a pull is held: a client that consumes in it does not pause."""
HOLD_MIN_S: Final = 0.0005


@dataclass(slots=True)
class _Queue:
    """`span`: that the last answer tries out; 0: none. `hold_s`: the time for which the next pull
    out of reach is held; 0: it is not. `is_held`: the last answer was held."""

    answered_s: float = 0.0
    span: int = 0
    next_offset: int = -1
    held_from: int = -1
    hold_s: float = HOLD_S
    is_held: bool = False

    def learn_hold(self, passed_s: float) -> None:
        """Take in that the next pull came `passed_s` after the answer to one that was held."""
        self.is_held = False
        if passed_s < QUICK_S:
            self.hold_s = HOLD_S
        elif passed_s >= LATE_S:
            self.hold_s = self.hold_s / 2 if self.hold_s > HOLD_MIN_S else 0.0


@dataclass(slots=True)
class Pace:
    """Of one group on one topic. `_failed`: the last span that was too much, as it seemed."""

    span_max: int = PULL_SPAN_MAX
    _grows_at_s: float = 0.0
    _shrinks_at_s: float = 0.0
    _backoff_s: float = BACKOFF_MIN_S
    _failed: int = 0
    _queues: dict[int, _Queue] = field(default_factory=dict)

    def asked(self, queue_id: int, now_s: float) -> None:
        """A pull came: what does it tell of the answer before it?"""
        queue = self._queues.get(queue_id)
        if queue is None:
            return
        passed_s = now_s - queue.answered_s
        if queue.is_held:
            queue.learn_hold(passed_s)
        if not queue.span:
            return
        span, queue.span = queue.span, 0
        if not self._grows_at_s:
            self._grows_at_s = now_s + GROWS_AFTER_S
        if passed_s < QUICK_S:
            if now_s >= self._grows_at_s:
                self.span_max = max(self.span_max, min(2 * span, SPAN_MAX))
                if span >= self._failed:  # it was for another reason
                    self._backoff_s = BACKOFF_MIN_S
        elif LATE_S <= passed_s <= SLOW_S and now_s >= self._shrinks_at_s:  # once for several
            self.span_max = max(self.span_max // 2, SPAN_MIN)
            self._failed = span
            self._shrinks_at_s = self._grows_at_s = now_s + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)

    def reach(self, queue_id: int, offset: int, consumed: int | None, is_parked: bool) -> SpanLimit:
        """For a read from `offset` on. What a parked pull finds is always given."""
        queue = self._queues.get(queue_id)
        if queue is None:
            queue = self._queues[queue_id] = _Queue()
        if consumed is None and queue.next_offset == offset and queue.held_from >= 0:
            consumed = queue.held_from  # nothing yet, of what it got
        is_patient = not is_parked and queue.hold_s > 0
        return SpanLimit(offset if consumed is None else consumed, self.span_max, is_patient)

    def hold(self, queue_id: int) -> float:
        """Note that a pull out of reach is held. Return for how many seconds."""
        queue = self._queues[queue_id]
        queue.is_held = True
        return queue.hold_s

    def answered(self, queue_id: int, result: ReadResult, now_s: float) -> None:
        """What a read gave."""
        queue = self._queues[queue_id]
        queue.next_offset, queue.answered_s = result.next_offset, now_s
        queue.span = 0
        if result.count:
            queue.held_from = result.held_from
            queue.span = result.span if 2 * result.span > self.span_max else 0


RUNS_MAX: Final = 128
FILTERS_MAX: Final = 256
"""On queues: a pull may bring another expression each time."""
FILTERS_WEIGHT_MAX: Final = 1 << 16
"""Characters of the expressions of different filters. Compiled, each takes 85 to 280 bytes."""


@dataclass(slots=True)
class Delivered:
    """What one group got of one topic. `pulled` is the table of how far it has fetched, by queue;
    it belongs to `Offsets`. `runs` are the ranges on which a filter of properties may have failed,
    by filter and queue, start and end in turn, for whoever asks what came of them (`filter_watch`).
    `pace` is how far apart what it has in hand may lie."""

    pulled: dict[int, int]
    messages_out: int = 0
    bytes_out: int = 0
    filtered: int = 0
    acknowledged: int = 0
    """Popped messages that were acknowledged."""
    sent_back: int = 0
    pace: Pace = field(default_factory=Pace)
    runs: dict[tuple[MessageFilter, int], list[int]] = field(default_factory=dict)

    def looked(self, message_filter: MessageFilter, queue_id: int, start: int, end: int) -> None:
        """The filter was asked about these messages, and may have failed on some: a sum for each
        pull, not for each message.

        Of a reader that jumps, or changes its filter, more than anybody asks for, the oldest ranges
        are forgotten.
        """
        runs = self.runs.get((message_filter, queue_id))
        if runs is None:
            self.runs[message_filter, queue_id] = [start, end]
            while len(self.runs) > FILTERS_MAX or self._weight() > FILTERS_WEIGHT_MAX:
                del self.runs[next(iter(self.runs))]
        elif runs[-1] == start:
            runs[-1] = end
        else:
            runs += (start, end)
            if len(runs) > RUNS_MAX:
                del runs[:2]

    def _weight(self) -> int:
        """Return the number of characters in the expressions of the filters in `runs`."""
        return sum(getattr(one, "weight", 0) for one in {one for one, _ in self.runs})


class Deliveries(dict[tuple[str, str], Delivered]):
    """What each group got of each topic, by topic and group, since the broker started."""

    __slots__ = ("_pulled_by",)

    def __init__(self, pulled_by: Callable[[str, str], dict[int, int]]) -> None:
        """`pulled_by(group, topic)`: see `Offsets`."""
        super().__init__()
        self._pulled_by = pulled_by

    def __missing__(self, key: tuple[str, str]) -> Delivered:
        topic, group = key
        found = self[key] = Delivered(self._pulled_by(group, topic))
        return found

    def topic_deleted(self, topic: str) -> None:
        """Forget the offsets that pulls of `topic` have noted: a topic of the same name begins at
        offset 0. The counters go on."""
        for (name, _), delivered in self.items():
            if name == topic:
                delivered.pace = Pace()
                delivered.runs.clear()
