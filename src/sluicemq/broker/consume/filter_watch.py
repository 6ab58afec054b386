"""What filters do, made visible: exact lag, evaluations that failed, an expression on trial, lanes.

Pulls count what they let through and keep back, a sum for each pull. All else happens beside them:
every ten seconds, and when somebody asks, the messages that a group has fetched since are looked at
again, in slices, for evaluations that failed (`Troubles`), and those before it are counted that
match (`Matching`). So the way of a message costs nothing more, and the figures are exact: each
message is looked at once for each time that a group has passed it.

Of a group that pops, what is in flight counts too: it matches, and is not done.

The own offset of a group with lanes is the least of its lanes': from there on most may be delivered
already. A lane's messages are those from its place on that its rules there want. The rules of a
group exclude each other, so the sum over the lanes is what nobody was given yet.

Tools ask for it, with requests of ours alone: 900131 exact lag and counters, 900132 an expression
on trial, 900133 a group's contract and lanes. The first two look at many messages and answer when
they are done (`background.py`). A trial looks at no more than the asker allows, the newest messages
of each queue.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson

from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.delivered import Delivered
from sluicemq.broker.consume.filters import ConsumerFilters, filter_bytes
from sluicemq.broker.consume.matching import RECORDS_A_STEP, Matching, Tally, Wanted
from sluicemq.broker.lanes.filters import RuleFilter
from sluicemq.broker.lanes.group import Lane
from sluicemq.broker.lanes.rules import ByteCache, atoms_of
from sluicemq.broker.lanes.table import show, shown
from sluicemq.broker.offsets import Offsets, UnfinishedMessages
from sluicemq.broker.topics import Groups, Topics
from sluicemq.clock import Clock
from sluicemq.errors import FilterError, FilterEvaluationError, RequestError
from sluicemq.filter.plan import ERROR
from sluicemq.filter.selector import Selector
from sluicemq.filter.subscriptions import preparation, subscribe
from sluicemq.model.subscription import SQL92, TAG, Subscription
from sluicemq.model.topic import pop_origin
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import Background, Job, WorkItem
from sluicemq.store.gather import INLINE_WEIGHT_MAX
from sluicemq.store.store import Store
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import ConsumerGroupRequest, FilteredLagRequest, TryFilterRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sluicemq.filter.lab import Trial

SURVEY_PERIOD_S: Final = 10.0
REASONS_MAX: Final = 32
OTHER_REASONS: Final = "other reasons"
SAMPLES_KEPT: Final = 10
EXPLAINED_MAX: Final = 256
"""So many failed evaluations of a block are asked for their reasons one by one; of more, as many
are taken evenly, and their reasons stand for all."""
EXPLAINED_WEIGHT: Final = 1 << 15
"""Characters of an expression, times as often as it is asked: so much is a millisecond."""
WANTED_BYTES_MAX: Final = 8 << 20
"""Compiled filters that are kept, in bytes as `filter_bytes` counts them."""
ROWS_MAX: Final = 1_000_000
ROWS_A_STEP: Final = 8192
ROWS_A_JOB: Final = 1024
Pair = tuple[str, str]
"""Topic and group."""


@dataclass(slots=True)
class Troubles:
    """Evaluations that failed for a group on a topic since the broker started."""

    reasons: dict[str, int] = field(default_factory=dict)
    samples: deque[bodies.FilterFailure] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))

    @property
    def total(self) -> int:
        return sum(self.reasons.values())

    def explain(
        self,
        queue_id: int,
        wanted: Wanted,
        first: int,
        verdicts: "NDArray[np.uint8]",
        properties_at: Callable[[int], Mapping[str, str] | None],
    ) -> None:
        """Why did evaluations fail on messages from offset `first` on?"""
        verdict = wanted.verdict
        assert verdict is not None
        rows = (verdicts == ERROR).nonzero()[0].tolist()
        count_max = min(EXPLAINED_MAX, max(1, EXPLAINED_WEIGHT // max(wanted.weight, 1)))
        asked = rows[:: -(-len(rows) // count_max)] if rows else []
        reasons: dict[str, int] = {}
        for row in asked:
            try:
                verdict(properties_at(first + row) or {})
            except FilterEvaluationError as error:
                reasons[error.reason] = reasons.get(error.reason, 0) + 1
                self.samples.append(bodies.FilterFailure(queue_id, first + row, str(error)))
        left, told = len(rows), sum(reasons.values())
        for reason, count in reasons.items():
            share = left * count // told
            left, told = left - share, told - count
            self.add(reason, share)

    def add(self, reason: str, count: int) -> None:
        if reason not in self.reasons and len(self.reasons) >= REASONS_MAX:
            reason = OTHER_REASONS
        self.reasons[reason] = self.reasons.get(reason, 0) + count


class QueueMatches(NamedTuple):
    """One queue of a group. `tally` is None when it is not known what the group wants; `lanes`: of
    each lane from its own offset on; `in_flight` and `extra` as in `Unfinished`."""

    queue_id: int
    committed: int
    offset_min: int
    offset_max: int
    tally: Tally | None
    lanes: tuple[tuple[Lane, Tally], ...] = ()
    in_flight: int = 0
    extra: int = 0


def _compiled(kind: str, expression: str) -> Wanted | None:
    """Return the compiled filter of an expression on any topic, None if it does not compile."""
    try:
        return Wanted(Subscription("", expression, kind))
    except FilterError:
        return None


@dataclass(slots=True, eq=False)
class FilterWatch:
    """The request family of filters and lanes, which knows what the filters of all groups do.
    `matches` is as the last survey found it, of groups with a filter: matching messages before the
    group, and the seconds until it has none."""

    store: Store
    topics: Topics
    groups: Groups
    offsets: Offsets
    consumers: Consumers
    filters: ConsumerFilters
    delivered: dict[Pair, Delivered]
    background: Background
    clock: Clock
    unfinished: Callable[[str, str, int], UnfinishedMessages]
    troubles: dict[Pair, Troubles] = field(default_factory=dict)
    matches: dict[Pair, tuple[int, float | None]] = field(default_factory=dict)
    matching: Matching = field(init=False)
    _survey_s: float = field(init=False)
    _is_surveying: bool = False
    _wanted: ByteCache[Wanted | None] = field(
        default_factory=lambda: ByteCache(_compiled, filter_bytes, WANTED_BYTES_MAX)
    )

    def __post_init__(self) -> None:
        self.matching = Matching(self.store)
        self._survey_s = self.clock.monotonic_s() + SURVEY_PERIOD_S

    # --- what a group wants

    def subscription(self, group: str, topic: str) -> Subscription | None:
        """What its members say; else the SQL92 expression that is kept of it; None: not known."""
        origin = pop_origin(topic, group)  # what comes again is wanted as it was
        for popped, kind, expression in self.consumers.contracts.pops(group):
            if popped == origin:
                return _parsed(topic, expression, kind)
        watch = self.consumers.watch(group, topic) or self.consumers.watch(group, origin)
        if watch is not None:
            return watch.subscription
        kept = self.filters.table.get(group, {}).get(origin)
        if kept is None:
            return None
        return Subscription(topic, kept.expression, kept.kind, version=kept.version)

    def topics_of(self, group: str) -> set[str]:
        """Topics of which it is known what the group wants."""
        found = self.consumers.groups.get(group)
        return {*(found.watches if found is not None else ()), *self.filters.table.get(group, ())}

    def wanted(self, subscription: Subscription) -> WorkItem[Wanted | None]:
        """Compiled, and kept for a while; None when it does not compile."""
        yield from preparation(subscription.expression, subscription.kind)
        return self._wanted(subscription.kind, subscription.expression)

    # --- lag

    def lag(
        self, group: str, topic: str, subscription: Subscription | None
    ) -> WorkItem[list[QueueMatches]]:
        """The queues of a topic, for a group with this subscription; for one with lanes see
        `progress`."""
        found: list[QueueMatches] = []
        known = self.topics.get(topic)
        wanted = None if subscription is None else (yield from self.wanted(subscription))
        for queue_id in range(known.config.read_queues if known is not None else 0):
            start, in_flight, extra = self.unfinished(group, topic, queue_id)
            tally = None
            if wanted is not None:
                now_s = self.clock.monotonic_s()
                tally = yield from self.matching.lag(group, topic, queue_id, wanted, start, now_s)
            first, end = self.store.queue_offsets(topic, queue_id)
            end = end if tally is None else tally.end
            found.append(
                QueueMatches(queue_id, start, first, end, tally, in_flight=in_flight, extra=extra)
            )
            yield None
        return found

    def progress(self, group: str, topic: str) -> WorkItem[list[QueueMatches]]:
        """The queues of a topic for a group as it is: by its lanes where it has some."""
        made = self.consumers.lanes.table.get(group)
        known = self.topics.get(topic)
        if made is None or known is None:
            counted = yield from self.lag(group, topic, self.subscription(group, topic))
            return [
                it._replace(tally=it.tally and replace(it.tally, count=it.tally.count + it.extra))
                for it in counted
            ]
        found = []
        for queue_id in range(known.config.read_queues):
            now_s = self.clock.monotonic_s()
            made.ensure((topic, queue_id))
            lanes = []
            for lane in [made.lanes[key] for keys in made.ordered() for key in keys]:
                place = lane.places.get((topic, queue_id))
                if place is not None:
                    name = f"{group}@{lane.id}"
                    tally = yield from self.matching.lane_lag(name, topic, queue_id, place, now_s)
                    lanes.append((lane, tally))
            first, end = self.store.queue_offsets(topic, queue_id)
            committed, whole = self.offsets.committed(group, topic, queue_id), None
            if lanes:  # it is where its last lane is, and has to get what any of them has to
                tallies = [tally for _, tally in lanes]
                whole = max(tallies, key=lambda t: math.inf if t.eta_s is None else t.eta_s)
                committed, end = min(tally.start for tally in tallies), whole.end
                count = sum(tally.count for tally in tallies)
                whole = replace(whole, start=committed, count=count)
            found.append(QueueMatches(queue_id, committed, first, end, whole, tuple(lanes)))
            yield None
        return found

    # --- evaluations that failed

    def look(self, group: str, topic: str) -> WorkItem[None]:
        """Looks at what the group has fetched through a filter since the last time."""
        delivered = self.delivered.get((topic, group))
        if delivered is None or not delivered.runs:
            return
        looked, delivered.runs = delivered.runs, {}
        troubles = self.troubles.setdefault((topic, group), Troubles())
        for (message_filter, queue_id), ends in looked.items():
            # Of a lane's rule what the lane itself wants.
            rule = message_filter.rule if isinstance(message_filter, RuleFilter) else ()
            texts = {atom.text for item in rule for atom in item.must if atom.kind == SQL92}
            if isinstance(message_filter, Selector):
                texts = {message_filter.text}
            for text in sorted(texts):
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
                            at = partial(self.matching.records.at, topic, queue_id)
                            troubles.explain(queue_id, wanted, *found, at)
                        yield None

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
        if not looked and not filtering:
            self.matches = {}
            return

        def survey() -> WorkItem[None]:
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

        self._is_surveying = True
        self.background.run_in_background(survey())

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

    # --- what tools ask

    def filtered_lag(
        self, header: FilteredLagRequest, command: Command, peer: Peer
    ) -> Command | None:
        """900131: ours."""
        group, expression = header.group, header.expression
        self.groups.check_exists(group)

        def steps() -> WorkItem[Command]:
            names = self.topics_of(group) | self.offsets.topics_of(group)
            found = []
            for topic in [header.topic] if header.topic else sorted(names):
                if topic not in self.topics:
                    continue
                wanted = self.subscription(group, topic)
                if expression is not None:
                    yield from preparation(expression, header.kind or TAG)
                    wanted = _parsed(topic, expression, header.kind)
                yield from self.look(group, topic)
                if expression is None:
                    queues = yield from self.progress(group, topic)
                else:
                    queues = yield from self.lag(group, topic, wanted)
                delivered = self.delivered.get((topic, group))
                troubles = self.troubles.get((topic, group)) or Troubles()
                found.append(
                    bodies.GroupMatching(
                        topic,
                        wanted.kind if wanted is not None else "",
                        wanted.expression if wanted is not None else None,
                        tuple(map(_queue_matching, queues)),
                        delivered.messages_out if delivered is not None else 0,
                        delivered.filtered if delivered is not None else 0,
                        troubles.reasons,
                        tuple(troubles.samples),
                        tuple(_lanes(topic, queues)),
                    )
                )
            return Command(ResponseCode.SUCCESS, {}, bodies.encode_group_matching(found))

        return self.background.answer(steps(), command, peer)

    def try_filter(self, header: TryFilterRequest, command: Command, peer: Peer) -> Command | None:
        """900132: ours."""
        name, topic = header.topic, self.topics.require(header.topic)
        against = None
        if header.group is not None:
            against = self.subscription(header.group, name)
            if against is None:
                raise RequestError(
                    ResponseCode.SUBSCRIPTION_NOT_EXIST,
                    f"what the group {header.group} wants of {name} is not known: no "
                    "member is online, and no SQL92 expression is kept of it.",
                )
        ranges = []
        for queue_id in range(topic.config.read_queues):
            low, high = self.store.queue_offsets(name, queue_id)
            if header.begin_ms:
                low = self.store.reader.offset_by_time(name, queue_id, header.begin_ms)
            if header.end_ms is not None:
                high = self.store.reader.offset_by_time(name, queue_id, header.end_ms + 1)
            if low < high:
                ranges.append((queue_id, low, high))
        return self.background.answer(self._try(header, against, ranges), command, peer)

    def _try(
        self,
        header: TryFilterRequest,
        against: Subscription | None,
        ranges: list[tuple[int, int, int]],
    ) -> WorkItem[Command]:
        """`ranges`: queue id, first offset, end."""
        topic, rows_max = header.topic, header.count_max or ROWS_MAX
        yield from preparation(header.expression, header.kind or TAG)
        wanted = _parsed(topic, header.expression, header.kind)
        stored = sum(end - start for _, start, end in ranges)
        if not self.store.columns.is_warm:
            yield self.store.columns.warm_up
        from sluicemq.filter.lab import Trial  # noqa: PLC0415 - NumPy only when somebody asks

        trial = yield partial(Trial, wanted, against)
        weight = len(wanted.expression) + (0 if against is None else len(against.expression))
        for queue_id, start, end in ranges:
            if stored > rows_max:
                start = end - max((end - start) * rows_max // stored, 1)  # noqa: PLW2901
            yield from self._try_queue(trial, weight, topic, queue_id, start, end)
        report = yield trial.report
        at = self.matching.records.at
        samples = [*report.samples, *(cause.sample for cause in report.causes)]
        if report.difference is not None:
            samples += [*report.difference.samples_here, *report.difference.samples_there]
        places = sorted({(str(sample.source), sample.offset) for sample in samples})
        body = {
            "report": report,
            "stored": stored,
            "messages": [
                {
                    "queueId": int(source),
                    "queueOffset": offset,
                    "properties": at(topic, int(source), offset) or {},
                }
                for source, offset in places
            ],
        }
        data = yield partial(orjson.dumps, body, default=str)
        return Command(ResponseCode.SUCCESS, {}, data)

    def _try_queue(
        self, trial: "Trial", weight: int, topic: str, queue_id: int, start: int, end: int
    ) -> Iterator[Job | None]:
        records = self.matching.records
        blocks = self.store.columns.blocks(topic, queue_id, start, end)
        if blocks is None or weight > INLINE_WEIGHT_MAX:  # each condition is counted by itself
            for first in range(start, end, ROWS_A_JOB):
                rows: list[dict[str, str]] = []
                for low in range(first, min(first + ROWS_A_JOB, end), RECORDS_A_STEP):
                    found = records.between(topic, queue_id, low, min(low + RECORDS_A_STEP, end))
                    rows += [row for _, row in found]
                    yield None
                yield partial(trial.add_rows, rows, first_offset=first, source=queue_id)
            return
        for block in blocks:
            for low in range(block.first_offset, block.end, ROWS_A_STEP):
                part = block.part(low, min(low + ROWS_A_STEP, block.end))

                def properties_of(row: int, first: int = low) -> Mapping[str, str]:
                    return records.at(topic, queue_id, first + row) or {}

                trial.add(part, queue_id, properties_of)
                yield None

    def group_lanes(self, header: ConsumerGroupRequest, command: Command, peer: Peer) -> Command:
        """900133: ours. A group's contract, its lanes and whom it refused."""
        name = header.group
        self.groups.check_exists(name)
        contracts = self.consumers.contracts
        made = self.consumers.lanes.table.get(name)
        answer = {
            "conflicts": contracts.conflicts.get(name, 0),
            "contract": contracts.of(name),
            "forgotten": list(made.forgotten) if made is not None else [],
            "lanes": show(made) if made is not None else [],
            "pops": contracts.pops(name),
            "refused": {c: said.why for (g, c), said in contracts.refused.items() if g == name},
            "unmatched": made.unmatched if made is not None else 0,
        }
        return Command(ResponseCode.SUCCESS, body=orjson.dumps(answer))


def _parsed(topic: str, expression: str, kind: str | None) -> Subscription:
    try:
        return subscribe(topic, expression, kind or None)
    except FilterError as error:
        raise RequestError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error)) from error


def _lanes(topic: str, queues: list[QueueMatches]) -> Iterator[bodies.LaneMatching]:
    """What each lane still has to get, the oldest lane first."""
    lanes = {lane.key: lane for queue in queues for lane, _ in queue.lanes}
    for lane in sorted(lanes.values(), key=lambda lane: (lane.is_idle, lane.number)):
        kind, expression = shown(atoms_of(lane.key).get(topic, ()))
        own = [(queue, tally) for queue in queues for one, tally in queue.lanes if one is lane]
        yield bodies.LaneMatching(
            lane.id,
            kind,
            expression,
            tuple(sorted(lane.members)),
            tuple(
                _queue_matching(queue._replace(committed=tally.start, tally=tally))
                for queue, tally in own
            ),
        )


def _queue_matching(queue: QueueMatches) -> bodies.QueueMatching:
    tally = queue.tally
    eta_s = tally.eta_s if tally is not None else None
    return bodies.QueueMatching(
        queue.queue_id,
        queue.committed,
        queue.offset_min,
        queue.offset_max,
        tally.count if tally is not None else None,
        None if eta_s is None else round(eta_s * 1000),
        queue.in_flight,
        queue.extra,
    )


def eta_s(tallies: list[Tally]) -> float | None:
    """When the slowest queue is done; None when one of them does not tell."""
    times = [tally.eta_s for tally in tallies]
    known = [time for time in times if time is not None]
    return max(known, default=0.0) if len(known) == len(times) else None
