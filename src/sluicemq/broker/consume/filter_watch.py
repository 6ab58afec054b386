"""What filters do, made visible: exact lag, and evaluations that failed, by cause and group.

Pulls count what they let through and keep back, a sum for each pull. All else happens beside them:
every ten seconds, and when somebody asks, the messages that a group has fetched since are looked at
again, in slices, for evaluations that failed (`Troubles`), and those before it are counted that
match (`Matching`). So the way of a message costs nothing more, and the figures are exact: each
message is looked at once for each time that a group has passed it.

The own offset of a group with lanes is the least of its lanes': from there on most may be delivered
already. A lane's messages are those from its place on that its rules there want. The rules of a
group exclude each other, so the sum over the lanes is what nobody was given yet.
"""

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from sluicemq.broker.background import Background, Steps
from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.delivered import Delivered
from sluicemq.broker.consume.filters import ConsumerFilters
from sluicemq.broker.consume.matching import Matching, Tally, Wanted
from sluicemq.broker.lanes.filters import RuleFilter
from sluicemq.broker.lanes.group import GroupLanes, Lane
from sluicemq.broker.lanes.places import Place
from sluicemq.broker.lanes.rules import Rule
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.topics import Topics
from sluicemq.clock import Clock
from sluicemq.errors import FilterError, FilterEvaluationError
from sluicemq.filter.plan import ERROR
from sluicemq.filter.subscriptions import preparation
from sluicemq.model.subscription import SQL92, MessageFilter, Subscription
from sluicemq.store.store import Store

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class LaneTally(NamedTuple):
    """A lane in one queue of a topic. `tally`: from its offset on."""

    lane: Lane
    queue_id: int
    tally: Tally


def lane_lag(
    matching: Matching, made: GroupLanes, topic: str, queue_id: int, now_s: float
) -> Steps[list[LaneTally]]:
    """Of every lane that has a place in the queue, the oldest first."""
    made.ensure((topic, queue_id))
    live, idle = made.ordered()
    found = []
    for lane in [made.lanes[key] for key in (*live, *idle)]:
        place = lane.places.get((topic, queue_id))
        if place is not None:
            name = f"{made.name}@{lane.id}"
            tally = yield from _tally(matching, name, topic, queue_id, place, now_s)
            found.append(LaneTally(lane, queue_id, tally))
    return found


def _tally(
    matching: Matching, name: str, topic: str, queue_id: int, place: Place, now_s: float
) -> Steps[Tally]:
    """The rule that holds to the end is counted by what is known of it, those before it anew: they
    are gone when the lane has passed them."""
    first, end = matching.range(topic, queue_id)
    start = at = min(max(place.position, first), end)
    closed: list[tuple[int, int, Rule]] = []
    rule, until = place.rule_at(at)
    while until is not None and until < end:
        closed.append((at, until, rule))
        at = until
        rule, until = place.rule_at(at)
    tally = yield from matching.lag(name, topic, queue_id, Wanted.of_rule(rule), at, now_s)
    count = tally.count
    for low, high, other in closed:
        count += yield from matching.count(topic, queue_id, Wanted.of_rule(other), low, high)
    return replace(tally, start=start, count=count)


SURVEY_PERIOD_S: Final = 10.0
REASONS_MAX: Final = 32
OTHER_REASONS: Final = "other reasons"
SAMPLES_KEPT: Final = 10
EXPLAINED_MAX: Final = 256
"""So many failed evaluations of a block are asked for their reasons one by one; of more, as many
are taken evenly, and their reasons stand for all."""
EXPLAINED_WEIGHT: Final = 1 << 15
"""Characters of an expression, times as often as it is asked: so much is a millisecond."""
WANTED_KEPT: Final = 128
Pair = tuple[str, str]
"""Topic and group."""


class Failure(NamedTuple):
    """An evaluation that failed: the message's place, and why with its value."""

    queue_id: int
    offset: int
    text: str


@dataclass(slots=True)
class Troubles:
    """Evaluations that failed for a group on a topic since the broker started."""

    reasons: dict[str, int] = field(default_factory=dict)
    samples: deque[Failure] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))

    @property
    def total(self) -> int:
        return sum(self.reasons.values())

    def add(self, reason: str, count: int) -> None:
        if reason not in self.reasons and len(self.reasons) >= REASONS_MAX:
            reason = OTHER_REASONS
        self.reasons[reason] = self.reasons.get(reason, 0) + count


class QueueMatches(NamedTuple):
    """One queue of a group. `tally` is None when it is not known what the group wants."""

    queue_id: int
    committed: int
    offset_min: int
    offset_max: int
    tally: Tally | None
    lanes: tuple[LaneTally, ...] = ()


@dataclass(slots=True, eq=False)
class FilterWatch:
    """Knows what the filters of all groups do. `matches` is as the last survey found it, of groups
    with a filter: matching messages before the group, and the seconds until it has none."""

    store: Store
    topics: Topics
    offsets: Offsets
    consumers: Consumers
    filters: ConsumerFilters
    delivered: dict[Pair, Delivered]
    background: Background
    clock: Clock
    troubles: dict[Pair, Troubles] = field(default_factory=dict)
    matches: dict[Pair, tuple[int, float | None]] = field(default_factory=dict)
    matching: Matching = field(init=False)
    _survey_s: float = field(init=False)
    _is_surveying: bool = False
    _wanted: dict[tuple[str, str], Wanted | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.matching = Matching(self.store)
        self._survey_s = self.clock.monotonic_s() + SURVEY_PERIOD_S

    # --- what a group wants

    def subscription(self, group: str, topic: str) -> Subscription | None:
        """What its members say; else the SQL92 expression that is kept of it; None: not known."""
        watch = self.consumers.watch(group, topic)
        if watch is not None:
            return watch.subscription
        kept = self.filters.table.get(group, {}).get(topic)
        if kept is None:
            return None
        return Subscription(topic, kept.expression, kept.kind, version=kept.version)

    def topics_of(self, group: str) -> set[str]:
        """Topics of which it is known what the group wants."""
        found = self.consumers.groups.get(group)
        return {*(found.watches if found is not None else ()), *self.filters.table.get(group, ())}

    def wanted(self, subscription: Subscription) -> Steps[Wanted | None]:
        """Compiled, and kept for a while; None when it does not compile."""
        key = (subscription.kind, subscription.expression)
        yield from preparation(subscription.expression, subscription.kind)
        if key not in self._wanted:
            if len(self._wanted) >= WANTED_KEPT:
                self._wanted.clear()
            try:
                self._wanted[key] = Wanted(subscription)
            except FilterError:
                self._wanted[key] = None
        return self._wanted[key]

    # --- lag

    def lag(
        self, group: str, topic: str, subscription: Subscription | None
    ) -> Steps[list[QueueMatches]]:
        """The queues of a topic, for a group with this subscription; for one with lanes see
        `progress`."""
        found: list[QueueMatches] = []
        known = self.topics.get(topic)
        wanted = None if subscription is None else (yield from self.wanted(subscription))
        for queue_id in range(known.config.read_queues if known is not None else 0):
            committed = self.offsets.committed(group, topic, queue_id)
            tally = None
            if wanted is not None:
                now_s = self.clock.monotonic_s()
                tally = yield from self.matching.lag(
                    group, topic, queue_id, wanted, committed, now_s
                )
            first, end = self.store.queue_offsets(topic, queue_id)
            end = end if tally is None else tally.end
            found.append(QueueMatches(queue_id, committed, first, end, tally))
            yield None
        return found

    def progress(self, group: str, topic: str) -> Steps[list[QueueMatches]]:
        """The queues of a topic for a group as it is: by its lanes where it has some."""
        made = self.consumers.lanes.table.get(group)
        known = self.topics.get(topic)
        if made is None or known is None:
            return (yield from self.lag(group, topic, self.subscription(group, topic)))
        found = []
        for queue_id in range(known.config.read_queues):
            now_s = self.clock.monotonic_s()
            lanes = yield from lane_lag(self.matching, made, topic, queue_id, now_s)
            first, end = self.store.queue_offsets(topic, queue_id)
            committed, whole = self.offsets.committed(group, topic, queue_id), None
            if lanes:  # it is where its last lane is, and has to get what any of them has to
                tallies = [item.tally for item in lanes]
                whole = max(tallies, key=lambda t: math.inf if t.eta_s is None else t.eta_s)
                committed, end = min(tally.start for tally in tallies), whole.end
                count = sum(tally.count for tally in tallies)
                whole = replace(whole, start=committed, count=count)
            found.append(QueueMatches(queue_id, committed, first, end, whole, tuple(lanes)))
            yield None
        return found

    # --- evaluations that failed

    def look(self, group: str, topic: str) -> Steps[None]:
        """Looks at what the group has fetched through a filter since the last time."""
        delivered = self.delivered.get((topic, group))
        if delivered is None or not delivered.runs:
            return
        looked, delivered.runs = delivered.runs, {}
        troubles = self.troubles.setdefault((topic, group), Troubles())
        for (message_filter, queue_id), ends in looked.items():
            for text in _expressions(message_filter):
                wanted = yield from self.wanted(Subscription(topic, text, SQL92))
                if wanted is None:
                    continue
                for start, end in zip(ends[::2], ends[1::2], strict=True):
                    low = max(start, self.store.queue_offsets(topic, queue_id)[0])
                    for found in self.matching.verdicts(topic, queue_id, wanted, low, end):
                        if callable(found):
                            yield found
                            continue
                        if found is not None:
                            self._explain(topic, queue_id, wanted, *found, troubles)
                        yield None

    def _explain(
        self,
        topic: str,
        queue_id: int,
        wanted: Wanted,
        first: int,
        verdicts: "NDArray[np.uint8]",
        troubles: Troubles,
    ) -> None:
        verdict = wanted.verdict
        assert verdict is not None
        rows = (verdicts == ERROR).nonzero()[0].tolist()
        count_max = min(EXPLAINED_MAX, max(1, EXPLAINED_WEIGHT // max(wanted.weight, 1)))
        asked = rows[:: -(-len(rows) // count_max)] if rows else []
        reasons: dict[str, int] = {}
        for row in asked:
            properties = self.matching.records.at(topic, queue_id, first + row)
            try:
                verdict(properties or {})
            except FilterEvaluationError as error:
                reasons[error.reason] = reasons.get(error.reason, 0) + 1
                troubles.samples.append(Failure(queue_id, first + row, str(error)))
        left, told = len(rows), sum(reasons.values())
        for reason, count in reasons.items():
            share = left * count // told
            left, told = left - share, told - count
            troubles.add(reason, share)

    # --- by the clock

    def run(self) -> None:
        """A survey of all filters when it is time."""
        now_s = self.clock.monotonic_s()
        if now_s < self._survey_s or self._is_surveying:
            return
        self._survey_s = now_s + SURVEY_PERIOD_S
        looked = [pair for pair, delivered in self.delivered.items() if delivered.runs]
        filtering = [
            (name, subscription)
            for name, group in self.consumers.groups.items()
            for topic in group.watches
            if (subscription := self.subscription(name, topic)) is not None
            and (not subscription.is_everything or name in self.consumers.lanes.table)
        ]
        if looked or filtering:
            self._is_surveying = True
            self.background.add(self._survey(looked, filtering))
        else:
            self.matches = {}

    def _survey(self, looked: list[Pair], filtering: list[tuple[str, Subscription]]) -> Steps[None]:
        found: dict[Pair, tuple[int, float | None]] = {}
        try:
            for topic, group in looked:
                yield from self.look(group, topic)
            for group, subscription in filtering:
                queues = yield from self.progress(group, subscription.topic)
                tallies = [queue.tally for queue in queues if queue.tally is not None]
                if tallies:
                    count = sum(tally.count for tally in tallies)
                    found[subscription.topic, group] = count, eta_s(tallies)
        finally:
            self._is_surveying = False
        self.matches = found

    def runtime(self) -> dict[str, str]:
        """For 28: what each filter has let through, kept back, and failed on."""
        table = {}
        for (topic, group), delivered in self.delivered.items():
            troubles = self.troubles.get((topic, group))
            if delivered.filtered or troubles is not None:
                errors = 0 if troubles is None else troubles.total
                table[f"sluiceFilter:{topic}@{group}"] = (
                    f"matched {delivered.messages_out} filtered {delivered.filtered} "
                    f"errors {errors}"
                )
        return table


def _expressions(message_filter: MessageFilter) -> list[str]:
    """The SQL92 that a filter evaluates: of a lane's rule what the lane itself wants."""
    selector = getattr(message_filter, "selector", None)
    if selector is not None:
        return [selector.text]
    rule = message_filter.rule if isinstance(message_filter, RuleFilter) else ()
    return sorted({atom.text for item in rule for atom in item.must if atom.kind == SQL92})


def eta_s(tallies: list[Tally]) -> float | None:
    """When the slowest queue is done; None when one of them does not tell."""
    times = [tally.eta_s for tally in tallies]
    known = [time for time in times if time is not None]
    return max(known, default=0.0) if len(known) == len(times) else None
