"""Handlers and surveys that show what filters do: exact lag, failed evaluations, trials, lanes.

Pulls only add up how many messages they delivered and filtered. Everything else is done beside
them. Every SURVEY_PERIOD_S, and when a tool asks, the messages that a group has fetched since the
last time are evaluated again, in slices, to find evaluations that failed (`FilterFailures`). Then
the matching messages that the group has not consumed are counted (`MatchCounter`). So delivering a
message costs nothing more, and the figures are exact: each message is examined once for each time
that a group has passed it.

For a group that pops, messages in flight count as lag, too: they match and are not acknowledged.

The committed offset of a group with lanes is the least of its lanes' offsets, so most messages
behind it may be delivered already. The messages of a lane are those from its offset on that match
its rules there. The rules of a group exclude each other, so the sum over the lanes is the number of
messages that no member has received.

Tools use three requests of SluiceMQ: SLUICE_FILTERED_LAG (900131), SLUICE_TRY_FILTER (900132) and
SLUICE_GROUP_LANES (900133). The first two examine many messages, and are answered when they are
done (`net.work.background`). A trial examines no more messages than the request allows, the newest
ones of each queue.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson

from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.delivery import DeliveryState
from sluicemq.broker.consume.filters import ConsumerFilters, estimate_filter_bytes
from sluicemq.broker.consume.matching import RECORDS_PER_STEP, MatchCounter, MatchCriteria, Tally
from sluicemq.broker.context import BrokerComponent, BrokerContext
from sluicemq.broker.lanes.cache import ByteCache
from sluicemq.broker.lanes.filters import RuleFilter
from sluicemq.broker.lanes.lane import Lane
from sluicemq.broker.lanes.lanes_file import describe_atoms, describe_lanes
from sluicemq.broker.lanes.rules import get_atoms_by_topic
from sluicemq.broker.offsets import UnfinishedMessages
from sluicemq.errors import FilterError, FilterEvaluationError, RequestError
from sluicemq.filter.plan import ERROR
from sluicemq.filter.selector import Selector
from sluicemq.filter.subscriptions import parse_subscription, preparation_jobs
from sluicemq.model.subscription import SQL92, TAG, MessageFilter, Subscription
from sluicemq.model.topic import pop_origin
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import Job, WorkItem
from sluicemq.store.gather import INLINE_WEIGHT_MAX
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import ConsumerGroupRequest, FilteredLagRequest, TryFilterRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sluicemq.filter.lab import Trial

SURVEY_PERIOD_S: Final = 10.0
"""The time in seconds between two surveys of all filters."""
REASONS_MAX: Final = 32
"""The most reasons that are counted for a group and topic; further ones count as OTHER_REASONS."""
OTHER_REASONS: Final = "other reasons"
SAMPLES_KEPT: Final = 10
"""The most failed evaluations that are kept as samples."""
EXPLAINED_MAX: Final = 256
"""The most failed evaluations of a block that are repeated to find their reasons.

If more have failed, evenly spaced ones are taken, and their reasons stand for all.
"""
EXPLAINED_WEIGHT: Final = 1 << 15
"""The most characters of an expression, times the number of repetitions: about a millisecond."""
CRITERIA_BYTES_MAX: Final = 8 << 20
"""The limit of the cached filters in bytes, as `estimate_filter_bytes` counts them."""
ROWS_MAX: Final = 1_000_000
"""The most messages that a trial examines if the request does not say."""
ROWS_PER_STEP: Final = 8192
"""The number of rows of columns that a trial examines in one step."""
ROWS_PER_JOB: Final = 1024
"""The number of records that a trial examines in one job."""
TopicGroup = tuple[str, str]
"""A topic and a group."""


@dataclass(slots=True)
class FilterFailures:
    """The evaluations that failed for a group on a topic since the broker started.

    `reasons` counts them by reason, and `samples` are the last ones.
    """

    reasons: dict[str, int] = field(default_factory=dict)
    samples: deque[bodies.FilterFailure] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))

    @property
    def total(self) -> int:
        """The number of failed evaluations."""
        return sum(self.reasons.values())

    def record_failures(
        self,
        queue_id: int,
        criteria: MatchCriteria,
        first: int,
        verdicts: "NDArray[np.uint8]",
        properties_at: Callable[[int], Mapping[str, str] | None],
    ) -> None:
        """Count the ERROR verdicts in `verdicts` by reason.

        The verdicts are those on the messages from offset `first` on. `properties_at(offset)`
        returns the properties of a message, None if there is none.
        """
        verdict = criteria.verdict
        assert verdict is not None
        rows = (verdicts == ERROR).nonzero()[0].tolist()
        count_max = min(EXPLAINED_MAX, max(1, EXPLAINED_WEIGHT // max(criteria.weight, 1)))
        repeated = rows[:: -(-len(rows) // count_max)] if rows else []
        reasons: dict[str, int] = {}
        for row in repeated:
            try:
                verdict(properties_at(first + row) or {})
            except FilterEvaluationError as error:
                reasons[error.reason] = reasons.get(error.reason, 0) + 1
                self.samples.append(bodies.FilterFailure(queue_id, first + row, str(error)))

        # Distribute all failures over the reasons in proportion to the repeated evaluations.
        rows_left, reasons_left = len(rows), sum(reasons.values())
        for reason, count in reasons.items():
            share = rows_left * count // reasons_left
            rows_left, reasons_left = rows_left - share, reasons_left - count
            self.add(reason, share)

    def add(self, reason: str, count: int) -> None:
        """Count `count` failures with this reason."""
        if reason not in self.reasons and len(self.reasons) >= REASONS_MAX:
            reason = OTHER_REASONS
        self.reasons[reason] = self.reasons.get(reason, 0) + count


class QueueLag(NamedTuple):
    """The lag of a group in one queue.

    `tally` is None if the filter of the group is unknown. `lanes` has the tally of each lane, from
    the lane's own offset on. `in_flight` and `extra` are those of `UnfinishedMessages`.
    """

    queue_id: int
    committed: int
    offset_min: int
    offset_max: int
    tally: Tally | None
    lanes: tuple[tuple[Lane, Tally], ...] = ()
    in_flight: int = 0
    extra: int = 0


def _compile_or_none(kind: str, expression: str) -> MatchCriteria | None:
    """Return the criteria of an expression on any topic; None if it does not compile."""
    try:
        return MatchCriteria(Subscription("", expression, kind))
    except FilterError:
        return None


class FilterHandlers(BrokerComponent):
    """Request handlers for filters and lanes, and the survey of all filters.

    They answer SLUICE_FILTERED_LAG (900131), SLUICE_TRY_FILTER (900132) and SLUICE_GROUP_LANES
    (900133).
    """

    def __init__(
        self,
        context: BrokerContext,
        *,
        consumers: Consumers,
        filters: ConsumerFilters,
        deliveries: dict[TopicGroup, DeliveryState],
        unfinished: Callable[[str, str, int], UnfinishedMessages],
    ) -> None:
        """`unfinished(group, topic, queue_id)` returns the unfinished messages of a group."""
        super().__init__(context)
        self.consumers = consumers
        self.filters = filters
        self.deliveries = deliveries
        self.background = context.background
        self.unfinished = unfinished
        self.failures: dict[TopicGroup, FilterFailures] = {}
        self.survey_results: dict[TopicGroup, tuple[int, float | None]] = {}
        """The last survey: each filtered group's lag, and the seconds until it has none."""
        self._is_surveying = False
        self._criteria_cache: ByteCache[MatchCriteria | None] = ByteCache(
            _compile_or_none, estimate_filter_bytes, CRITERIA_BYTES_MAX
        )
        self.match_counter = MatchCounter(self.store)
        self._survey_s = self.clock.monotonic_s() + SURVEY_PERIOD_S

    # --- subscriptions of groups

    def find_subscription(self, group: str, topic: str) -> Subscription | None:
        """Return the subscription of a group to a topic; None if it is unknown.

        It is that of the pops or heartbeats of the group, or else the SQL92 expression that the
        table of expressions has kept. For a retry topic of pops it is that of the original topic.
        """
        # Messages of a retry topic are filtered by the subscription to the original topic.
        origin = pop_origin(topic, group)
        for popped, kind, expression in self.consumers.contracts.popped_subscriptions(group):
            if popped == origin:
                return _parse_subscription(topic, expression, kind)
        find = self.consumers.find_subscription
        compiled = find(group, topic) or find(group, origin)
        if compiled is not None:
            return compiled.subscription
        stored = self.filters.table.get(group, {}).get(origin)
        if stored is None:
            return None
        return Subscription(topic, stored.expression, stored.kind, version=stored.version)

    def known_topics(self, group: str) -> set[str]:
        """Return the topics to which the subscription of the group is known."""
        topics = set(self.filters.table.get(group, ()))
        members = self.consumers.groups.get(group)
        if members is not None:
            topics.update(members.subscriptions)
        return topics

    def compile_criteria(self, subscription: Subscription) -> WorkItem[MatchCriteria | None]:
        """Return the criteria of a subscription; None if its expression does not compile.

        Compiled criteria are cached.
        """
        yield from preparation_jobs(subscription.expression, subscription.kind)
        return self._criteria_cache(subscription.kind, subscription.expression)

    # --- lag

    def count_lag(
        self, group: str, topic: str, subscription: Subscription | None
    ) -> WorkItem[list[QueueLag]]:
        """Count the lag in each queue of a topic for a group with this subscription.

        Lanes are not considered: see `count_group_lag`.
        """
        queues: list[QueueLag] = []
        known = self.topics.get(topic)
        criteria = None
        if subscription is not None:
            criteria = yield from self.compile_criteria(subscription)
        for queue_id in range(known.config.read_queues if known is not None else 0):
            start, in_flight, extra = self.unfinished(group, topic, queue_id)
            tally = None
            if criteria is not None:
                now_s = self.clock.monotonic_s()
                tally = yield from self.match_counter.count_lag(
                    group, topic, queue_id, criteria, start, now_s
                )
            first, end = self.store.queue_offsets(topic, queue_id)
            end = end if tally is None else tally.end
            queues.append(
                QueueLag(
                    queue_id=queue_id,
                    committed=start,
                    offset_min=first,
                    offset_max=end,
                    tally=tally,
                    in_flight=in_flight,
                    extra=extra,
                )
            )
            yield None
        return queues

    def count_group_lag(self, group: str, topic: str) -> WorkItem[list[QueueLag]]:
        """Count the lag in each queue of a topic for a group, by its lanes if it has some."""
        group_lanes = self.consumers.lanes.table.get(group)
        known = self.topics.get(topic)
        if group_lanes is None or known is None:
            counted = yield from self.count_lag(group, topic, self.find_subscription(group, topic))
            return [
                queue._replace(
                    tally=queue.tally
                    and replace(queue.tally, count=queue.tally.count + queue.extra)
                )
                for queue in counted
            ]

        queues = []
        for queue_id in range(known.config.read_queues):
            now_s = self.clock.monotonic_s()
            group_lanes.ensure_queue((topic, queue_id))
            lanes = []
            for lane in [
                group_lanes.lanes[key] for keys in group_lanes.get_ordered_keys() for key in keys
            ]:
                lane_queue = lane.queues.get((topic, queue_id))
                if lane_queue is not None:
                    name = f"{group}@{lane.id}"
                    tally = yield from self.match_counter.count_lane_lag(
                        name, topic, queue_id, lane_queue, now_s
                    )
                    lanes.append((lane, tally))
            first, end = self.store.queue_offsets(topic, queue_id)
            committed, total = self.offsets.committed(group, topic, queue_id), None
            if lanes:
                # The group is where its last lane is, and its lag is the sum over its lanes.
                tallies = [tally for _, tally in lanes]
                slowest = max(
                    tallies, key=lambda tally: math.inf if tally.eta_s is None else tally.eta_s
                )
                committed, end = min(tally.start for tally in tallies), slowest.end
                count = sum(tally.count for tally in tallies)
                total = replace(slowest, start=committed, count=count)
            queues.append(QueueLag(queue_id, committed, first, end, total, tuple(lanes)))
            yield None
        return queues

    # --- evaluations that failed

    def check_fetched(self, group: str, topic: str) -> WorkItem[None]:
        """Evaluate filters again on what the group has fetched since the last call.

        Evaluations that fail are recorded in `failures`.
        """
        delivery = self.deliveries.get((topic, group))
        if delivery is None or not delivery.ranges_to_check:
            return
        ranges, delivery.ranges_to_check = delivery.ranges_to_check, {}
        failures = self.failures.setdefault((topic, group), FilterFailures())
        for (message_filter, queue_id), bounds in ranges.items():
            for text in sorted(_sql92_expressions(message_filter)):
                criteria = yield from self.compile_criteria(Subscription(topic, text, SQL92))
                if criteria is None:
                    continue
                for start, end in zip(bounds[::2], bounds[1::2], strict=True):
                    low = max(start, self.store.queue_offsets(topic, queue_id)[0])
                    steps = self.match_counter.iter_verdicts(topic, queue_id, criteria, low, end)
                    for step in steps:
                        if callable(step):
                            yield step
                            continue
                        if step is not None:
                            first, verdicts = step
                            read_at = partial(
                                self.match_counter.properties.read_at, topic, queue_id
                            )
                            failures.record_failures(queue_id, criteria, first, verdicts, read_at)
                        yield None

    # --- surveys

    def survey_if_due(self) -> None:
        """Begin a survey of all filters in the background if the last one is long enough ago."""
        now_s = self.clock.monotonic_s()
        if now_s < self._survey_s or self._is_surveying:
            return
        self._survey_s = now_s + SURVEY_PERIOD_S
        to_check = [pair for pair, delivery in self.deliveries.items() if delivery.ranges_to_check]
        filtering = [
            (name, subscription)
            for name, group in self.consumers.groups.items()
            for topic in group.subscriptions
            if (subscription := self.find_subscription(name, topic)) is not None
            and (not subscription.is_everything or name in self.consumers.lanes.table)
        ]
        if not to_check and not filtering:
            self.survey_results = {}
            return

        def survey() -> WorkItem[None]:
            results: dict[TopicGroup, tuple[int, float | None]] = {}
            try:
                for topic, group in to_check:
                    yield from self.check_fetched(group, topic)
                for group, subscription in filtering:
                    queues = yield from self.count_group_lag(group, subscription.topic)
                    tallies = [queue.tally for queue in queues if queue.tally is not None]
                    if tallies:
                        count = sum(tally.count for tally in tallies)
                        results[subscription.topic, group] = count, combined_eta_s(tallies)
            finally:
                self._is_surveying = False
            self.survey_results = results

        self._is_surveying = True
        self.background.run_in_background(survey())

    def runtime_info(self) -> dict[str, str]:
        """Return entries for GET_BROKER_RUNTIME_INFO (28) with the counters of each filter."""
        table = {}
        for (topic, group), delivery in self.deliveries.items():
            failures = self.failures.get((topic, group))
            if delivery.filtered_count or failures is not None:
                errors = 0 if failures is None else failures.total
                table[f"sluiceFilter:{topic}@{group}"] = (
                    f"matched {delivery.messages_out} filtered {delivery.filtered_count} "
                    f"errors {errors}"
                )
        return table

    # --- requests of tools

    def report_filtered_lag(
        self, header: FilteredLagRequest, command: Command, peer: Peer
    ) -> Command | None:
        """Answer SLUICE_FILTERED_LAG (900131): the exact lag and the counters of a group.

        Return None if the answer follows later. With an expression in the request, the lag is
        counted as if the group had that expression. Raises RequestError if the group does not
        exist.
        """
        group, expression = header.group, header.expression
        self.groups.check_exists(group)

        def steps() -> WorkItem[Command]:
            names = self.known_topics(group) | self.offsets.topics_of(group)
            matchings = []
            for topic in [header.topic] if header.topic else sorted(names):
                if topic not in self.topics:
                    continue
                subscription = self.find_subscription(group, topic)
                if expression is not None:
                    yield from preparation_jobs(expression, header.kind or TAG)
                    subscription = _parse_subscription(topic, expression, header.kind)
                yield from self.check_fetched(group, topic)
                if expression is None:
                    queues = yield from self.count_group_lag(group, topic)
                else:
                    queues = yield from self.count_lag(group, topic, subscription)
                delivery = self.deliveries.get((topic, group))
                failures = self.failures.get((topic, group)) or FilterFailures()
                matchings.append(
                    bodies.GroupMatching(
                        topic=topic,
                        kind=subscription.kind if subscription is not None else "",
                        expression=subscription.expression if subscription is not None else None,
                        queues=tuple(map(_queue_matching, queues)),
                        matched=delivery.messages_out if delivery is not None else 0,
                        filtered=delivery.filtered_count if delivery is not None else 0,
                        errors=failures.reasons,
                        failures=tuple(failures.samples),
                        lanes=tuple(_lane_matchings(topic, queues)),
                    )
                )
            return Command(ResponseCode.SUCCESS, {}, bodies.encode_group_matching(matchings))

        return self.background.answer(steps(), command, peer)

    def try_filter(self, header: TryFilterRequest, command: Command, peer: Peer) -> Command | None:
        """Answer SLUICE_TRY_FILTER (900132): evaluate an expression on stored messages.

        Nothing is consumed. Return None if the answer follows later. With a group, its subscription
        is compared with the expression. Raises RequestError if the topic does not exist or the
        subscription of the group is unknown.
        """
        name, topic = header.topic, self.topics.require(header.topic)
        compared = None
        if header.group is not None:
            compared = self.find_subscription(header.group, name)
            if compared is None:
                raise RequestError(
                    ResponseCode.SUBSCRIPTION_NOT_EXIST,
                    f"The subscription of group {header.group} to topic {name} is unknown: no "
                    "member is online, and no SQL92 expression is stored.",
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
        return self.background.answer(self._run_trial(header, compared, ranges), command, peer)

    def _run_trial(
        self,
        header: TryFilterRequest,
        compared: Subscription | None,
        ranges: list[tuple[int, int, int]],
    ) -> WorkItem[Command]:
        """Run a trial over `ranges` of (queue id, first offset, end), and return the answer.

        If the ranges have more messages than the request allows, the newest part of each is taken.
        `compared` is the subscription with which the expression is compared, if any.
        """
        topic, rows_max = header.topic, header.count_max or ROWS_MAX
        yield from preparation_jobs(header.expression, header.kind or TAG)
        subscription = _parse_subscription(topic, header.expression, header.kind)
        stored = sum(end - start for _, start, end in ranges)
        if not self.store.columns.is_loaded:
            yield self.store.columns.warm_up
        from sluicemq.filter.lab import Trial  # noqa: PLC0415 - NumPy is loaded only for trials

        trial = yield partial(Trial, subscription, compared)
        weight = len(subscription.expression)
        if compared is not None:
            weight += len(compared.expression)
        for queue_id, start, end in ranges:
            first = start
            if stored > rows_max:
                first = end - max((end - start) * rows_max // stored, 1)
            yield from self._add_queue(trial, weight, topic, queue_id, first, end)

        report = yield trial.report
        read_at = self.match_counter.properties.read_at
        samples = [*report.samples, *(cause.sample for cause in report.causes)]
        if report.difference is not None:
            samples += [*report.difference.samples_here, *report.difference.samples_there]
        messages = sorted({(str(sample.source), sample.offset) for sample in samples})
        body = {
            "report": report,
            "stored": stored,
            "messages": [
                {
                    "queueId": int(source),
                    "queueOffset": offset,
                    "properties": read_at(topic, int(source), offset) or {},
                }
                for source, offset in messages
            ],
        }
        data = yield partial(orjson.dumps, body, default=str)
        return Command(ResponseCode.SUCCESS, {}, data)

    def _add_queue(
        self, trial: "Trial", weight: int, topic: str, queue_id: int, start: int, end: int
    ) -> Iterator[Job | None]:
        """Add the messages [`start`, `end`) of a queue to a trial.

        `weight` is the number of characters of its expressions.
        """
        records = self.match_counter.properties
        blocks = self.store.columns.iter_blocks(topic, queue_id, start, end)
        # A trial counts each condition separately. A long expression would take too long on the
        # event loop, so jobs evaluate its records on another thread.
        if blocks is None or weight > INLINE_WEIGHT_MAX:
            for first in range(start, end, ROWS_PER_JOB):
                rows: list[dict[str, str]] = []
                for low in range(first, min(first + ROWS_PER_JOB, end), RECORDS_PER_STEP):
                    found = records.iter_range(
                        topic, queue_id, low, min(low + RECORDS_PER_STEP, end)
                    )
                    rows += [row for _, row in found]
                    yield None
                yield partial(trial.add_rows, rows, first_offset=first, source=queue_id)
            return
        for block in blocks:
            for low in range(block.first_offset, block.end, ROWS_PER_STEP):
                part = block.slice_offsets(low, min(low + ROWS_PER_STEP, block.end))

                def properties_of(row: int, first: int = low) -> Mapping[str, str]:
                    return records.read_at(topic, queue_id, first + row) or {}

                trial.add_block(part, queue_id, properties_of)
                yield None

    def report_lanes(self, header: ConsumerGroupRequest, command: Command, peer: Peer) -> Command:
        """Answer SLUICE_GROUP_LANES (900133): the contract and lanes of a group.

        The answer also has the clients that the group refused, and its pops.
        """
        name = header.group
        self.groups.check_exists(name)
        contracts = self.consumers.contracts
        lanes = self.consumers.lanes.table.get(name)
        answer = {
            "conflicts": contracts.conflict_counts.get(name, 0),
            "contract": contracts.contract_of(name),
            "forgotten": list(lanes.forgotten_subscriptions) if lanes is not None else [],
            "lanes": describe_lanes(lanes) if lanes is not None else [],
            "pops": contracts.popped_subscriptions(name),
            "refused": {
                client_id: refusal.reason
                for (group, client_id), refusal in contracts.refusals.items()
                if group == name
            },
            "unmatched": lanes.unmatched_count if lanes is not None else 0,
        }
        return Command(ResponseCode.SUCCESS, body=orjson.dumps(answer))


def _sql92_expressions(message_filter: MessageFilter) -> set[str]:
    """Return the SQL92 expressions of a filter; those that must match for the rule of a lane."""
    if isinstance(message_filter, Selector):
        return {message_filter.text}
    rule = message_filter.rule if isinstance(message_filter, RuleFilter) else ()
    return {atom.text for item in rule for atom in item.required if atom.kind == SQL92}


def _parse_subscription(topic: str, expression: str, kind: str | None) -> Subscription:
    """Return the subscription to a topic. Raises RequestError if it does not compile."""
    try:
        return parse_subscription(topic, expression, kind or None)
    except FilterError as error:
        raise RequestError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error)) from error


def _lane_matchings(topic: str, queues: list[QueueLag]) -> Iterator[bodies.LaneMatching]:
    """Yield the lag of each lane; live lanes come before idle ones, the oldest first."""
    lanes = {lane.key: lane for queue in queues for lane, _ in queue.lanes}
    for lane in sorted(lanes.values(), key=lambda lane: (lane.is_idle, lane.join_number)):
        kind, expression = describe_atoms(get_atoms_by_topic(lane.key).get(topic, ()))
        lane_queues = [
            queue._replace(committed=tally.start, tally=tally)
            for queue in queues
            for each, tally in queue.lanes
            if each is lane
        ]
        yield bodies.LaneMatching(
            lane=lane.id,
            kind=kind,
            expression=expression,
            client_ids=tuple(sorted(lane.members)),
            queues=tuple(map(_queue_matching, lane_queues)),
        )


def _queue_matching(queue: QueueLag) -> bodies.QueueMatching:
    """Return the lag of a queue as the body of an answer describes it."""
    tally = queue.tally
    eta_s = tally.eta_s if tally is not None else None
    return bodies.QueueMatching(
        queue_id=queue.queue_id,
        committed=queue.committed,
        offset_min=queue.offset_min,
        offset_max=queue.offset_max,
        matching=tally.count if tally is not None else None,
        eta_ms=None if eta_s is None else round(eta_s * 1000),
        in_flight=queue.in_flight,
        extra=queue.extra,
    )


def combined_eta_s(tallies: list[Tally]) -> float | None:
    """Return the seconds until the slowest queue is done; None if one of them is unknown."""
    times = [tally.eta_s for tally in tallies]
    known = [time for time in times if time is not None]
    return max(known, default=0.0) if len(known) == len(times) else None
