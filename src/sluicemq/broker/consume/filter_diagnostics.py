"""Handlers and surveys that show what filters do: exact lag, failed evaluations, trials, lanes.

Pulls only add up how many messages they delivered and filtered. Everything else is done beside
them. Every SURVEY_PERIOD_S, and when a tool asks, the messages that a group has fetched since the
last time are evaluated again, in slices, to find evaluations that failed (`FilterFailures`). Then
the matching messages that the group has not consumed are counted (`MatchCounter`). So delivering a
message costs nothing more, and the figures are exact: each message is examined once for each time
that a group has passed it. Without a filter every message matches, and the count is the difference
of two offsets.

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

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import orjson

from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.delivery import DeliveryState, FilterFailures, take_newest
from sluicemq.broker.consume.filters import (
    ConsumerFilters,
    estimate_filter_bytes,
    find_sql92_expressions,
    parse_trial_subscription,
)
from sluicemq.broker.consume.matching import (
    RECORDS_PER_STEP,
    SAMPLES_KEPT,
    LagSamples,
    MatchCounter,
    MatchCriteria,
    QueueLag,
    Tally,
    combined_eta_s,
    estimate_eta_s,
    sum_tallies,
)
from sluicemq.broker.context import BrokerComponent, BrokerContext
from sluicemq.broker.lanes.cache import ByteCache
from sluicemq.broker.lanes.group import GroupLanes
from sluicemq.broker.lanes.lane import Lane
from sluicemq.broker.lanes.lanes_file import describe_atoms, describe_lanes
from sluicemq.broker.lanes.rules import get_atoms_by_topic
from sluicemq.broker.offsets import UnfinishedMessages
from sluicemq.errors import FilterError, RequestError
from sluicemq.filter.subscriptions import preparation_jobs
from sluicemq.model.subscription import SQL92, TAG, Subscription
from sluicemq.model.topic import pop_origin
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import Job, WorkItem
from sluicemq.store.gather import INLINE_WEIGHT_MAX
from sluicemq.wire import bodies
from sluicemq.wire.bodies import BROADCASTING
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import ConsumerGroupRequest, FilteredLagRequest, TryFilterRequest

if TYPE_CHECKING:
    from sluicemq.filter.lab import Report, Trial

SURVEY_PERIOD_S: Final = 10.0
"""The time in seconds between two surveys of all filters."""
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


def _compile_or_none(kind: str, expression: str) -> MatchCriteria | None:
    """Compile a filter expression, and return the object that evaluates it, or None if invalid."""
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
        """Create the handlers.

        - `consumers` has the subscriptions and lanes of connected groups, and `filters` the SQL92
          expressions that are kept of the others.
        - `deliveries` has what each group received of each topic, with the ranges in which filters
          may have failed.
        - `unfinished(group, topic, queue_id)` returns the messages of a queue that a group has not
          finished.
        """
        super().__init__(context)
        self.consumers = consumers
        self.filters = filters
        self.deliveries = deliveries
        self.background = context.background
        self.unfinished = unfinished
        self.failures: dict[TopicGroup, FilterFailures] = {}
        self.survey_results: dict[TopicGroup, tuple[int, float | None]] = {}
        """The results of the last survey, by topic and group, for connected groups.

        Each is the lag in messages, and the time in seconds until it is 0; None if that is unknown.
        """
        self._lag_samples: dict[TopicGroup, LagSamples] = {}
        """The lags in the last surveys, by topic and group, for groups that have no filter."""
        self._is_surveying = False
        self._criteria_cache: ByteCache[MatchCriteria | None] = ByteCache(
            _compile_or_none, estimate_filter_bytes, CRITERIA_BYTES_MAX
        )
        self.match_counter = MatchCounter(self.store)
        self._next_survey_s = self.clock.monotonic_s() + SURVEY_PERIOD_S
        """The monotonic time from which on the next survey is due."""

    # --- subscriptions of groups

    def find_subscription(self, group: str, topic: str) -> Subscription | None:
        """Return the subscription of a group to a topic, or None if it is unknown.

        It is the filter with which the group pops the topic, else the subscription in its
        heartbeats, else the SQL92 expression that was kept for it. For a retry topic of pops, it is
        the subscription to the original topic. Raises RequestError if a pop's filter is invalid.
        """
        # Messages of a retry topic are filtered by the subscription to the original topic.
        original_topic = pop_origin(topic, group)
        popped_subscriptions = self.consumers.contracts.popped_subscriptions(group)
        for popped_topic, kind, expression in popped_subscriptions:
            if popped_topic == original_topic:
                return parse_trial_subscription(topic, expression, kind)

        compiled = self.consumers.find_subscription(group, topic)
        if compiled is None:
            compiled = self.consumers.find_subscription(group, original_topic)
        if compiled is not None:
            return compiled.subscription

        stored = self.filters.table.get(group, {}).get(original_topic)
        if stored is None:
            return None
        return Subscription(topic, stored.expression, stored.kind, version=stored.version)

    def topics_of_group(self, group: str) -> set[str]:
        """Return the topics to which the group subscribes, as far as the broker knows.

        These are the topics in the heartbeats of its members, and those of kept SQL92 expressions.
        """
        topics = set(self.filters.table.get(group, ()))
        members = self.consumers.groups.get(group)
        if members is not None:
            topics.update(members.subscriptions)
        return topics

    def compile_criteria(self, subscription: Subscription) -> WorkItem[MatchCriteria | None]:
        """Return the criteria of a subscription; None if its expression does not compile.

        Compiled criteria are cached. Work item: it yields jobs for another thread.
        """
        yield from preparation_jobs(subscription.expression, subscription.kind)
        return self._criteria_cache(subscription.kind, subscription.expression)

    # --- lag

    def count_lag(
        self, group: str, topic: str, subscription: Subscription | None
    ) -> WorkItem[list[QueueLag]]:
        """Count the lag in each queue of a topic as if the group had this subscription.

        A tally, the number of matching messages, is None if `subscription` is None or invalid.
        Lanes are ignored. Return [] if the topic does not exist. This is a generator. It yields
        functions for another thread, and None where other work may run.
        """
        queues: list[QueueLag] = []
        topic_entry = self.topics.get(topic)
        criteria = None
        if subscription is not None:
            criteria = yield from self.compile_criteria(subscription)
        queue_count = topic_entry.config.read_queues if topic_entry is not None else 0
        for queue_id in range(queue_count):
            queue_lag = yield from self._count_queue_lag(group, topic, queue_id, criteria)
            queues.append(queue_lag)
            yield None
        return queues

    def _count_queue_lag(
        self, group: str, topic: str, queue_id: int, criteria: MatchCriteria | None
    ) -> WorkItem[QueueLag]:
        """Count the unread messages of a group in one queue, in steps.

        The result has a tally, the number of messages that match `criteria`. The tally is None if
        `criteria` is None.
        """
        committed, in_flight, extra = self.unfinished(group, topic, queue_id)
        tally = None
        if criteria is not None:
            now_s = self.clock.monotonic_s()
            tally = yield from self.match_counter.count_lag(
                group, topic, queue_id, criteria, committed, now_s
            )
        # Messages may have arrived during the count: the lag ends where the count ended.
        offset_min, offset_max = self.store.queue_offsets(topic, queue_id)
        if tally is not None:
            offset_max = tally.end
        return QueueLag(
            queue_id=queue_id,
            committed=committed,
            offset_min=offset_min,
            offset_max=offset_max,
            tally=tally,
            in_flight=in_flight,
            extra=extra,
        )

    def count_group_lag(self, group: str, topic: str) -> WorkItem[list[QueueLag]]:
        """Count the lag of a group in each queue of a topic, with its own subscription.

        If the group has lanes, the lag is the sum over its lanes. Otherwise messages that are
        popped and not acknowledged (`extra`) are added to the tally. Return [] if the topic does
        not exist. This is a generator that works in steps.
        """
        group_lanes = self.consumers.lanes.table.get(group)
        topic_entry = self.topics.get(topic)
        if group_lanes is not None and topic_entry is not None:
            queue_count = topic_entry.config.read_queues
            return (yield from self._count_lag_of_lanes(group, group_lanes, topic, queue_count))

        queues = yield from self.count_lag(group, topic, self.find_subscription(group, topic))
        queues_with_extra: list[QueueLag] = []
        for queue in queues:
            tally = queue.tally
            if tally is not None:
                tally = replace(tally, count=tally.count + queue.extra)
            queues_with_extra.append(queue._replace(tally=tally))
        return queues_with_extra

    def _count_lag_of_lanes(
        self, group: str, group_lanes: GroupLanes, topic: str, queue_count: int
    ) -> WorkItem[list[QueueLag]]:
        """Count the lag of a group with lanes in each queue of a topic.

        The committed offset of a queue is the least of its lanes, the tally is the sum over the
        lanes, and its time estimate is that of the slowest lane. This is a generator that works in
        steps.
        """
        queues = []
        for queue_id in range(queue_count):
            lane_tallies = yield from self._tally_lanes(group, group_lanes, topic, queue_id)
            # Without a lane in this queue, the group's own offset counts, and its lag is unknown.
            offset_min, offset_max = self.store.queue_offsets(topic, queue_id)
            committed = self.offsets.committed(group, topic, queue_id)
            group_tally = None
            if lane_tallies:
                group_tally = sum_tallies([tally for _, tally in lane_tallies])
                committed = group_tally.start
                offset_max = group_tally.end
            queues.append(
                QueueLag(
                    queue_id=queue_id,
                    committed=committed,
                    offset_min=offset_min,
                    offset_max=offset_max,
                    tally=group_tally,
                    lanes=tuple(lane_tallies),
                )
            )
            yield None
        return queues

    def _tally_lanes(
        self, group: str, group_lanes: GroupLanes, topic: str, queue_id: int
    ) -> WorkItem[list[tuple[Lane, Tally]]]:
        """Return each lane of a group that has a queue, with its tally there, in steps."""
        now_s = self.clock.monotonic_s()
        group_lanes.ensure_queue((topic, queue_id))
        live_keys, idle_keys = group_lanes.get_live_and_idle_keys()
        # Listed before the first count, because lanes may end while the counts go on.
        lanes = [group_lanes.lanes[key] for key in (*live_keys, *idle_keys)]
        lane_tallies: list[tuple[Lane, Tally]] = []
        for lane in lanes:
            lane_queue = lane.queues.get((topic, queue_id))
            if lane_queue is not None:
                tally = yield from self.match_counter.count_lane_lag(
                    f"{group}@{lane.id}", topic, queue_id, lane_queue, now_s
                )
                lane_tallies.append((lane, tally))
        return lane_tallies

    # --- evaluations that failed

    def check_fetched(self, group: str, topic: str) -> WorkItem[None]:
        """Find the messages, fetched since the last call, on which the group's filter has failed.

        The filter is evaluated again on the messages in `DeliveryState.ranges_to_check`, which is
        empty afterwards. Failed evaluations are recorded in `failures`. Deleted messages and
        invalid expressions are skipped.

        This is a generator. It yields functions for another thread, and None where other work may
        run.
        """
        delivery = self.deliveries.get((topic, group))
        if delivery is None or not delivery.ranges_to_check:
            return
        # Take the ranges before the first yield: pulls add new ones while these are checked.
        ranges_to_check = delivery.ranges_to_check
        delivery.ranges_to_check = {}
        failures = self.failures.setdefault((topic, group), FilterFailures())
        has_lanes = group in self.consumers.lanes.table
        for (message_filter, queue_id), bounds in ranges_to_check.items():
            # `bounds` holds the start and the end of one range after another.
            ranges = list(zip(bounds[::2], bounds[1::2], strict=True))
            for expression in sorted(find_sql92_expressions(message_filter)):
                criteria = yield from self.compile_criteria(Subscription(topic, expression, SQL92))
                if criteria is None:
                    continue
                for start, end in ranges:
                    yield from self._record_failures_in_range(
                        failures, topic, queue_id, criteria, start, end, has_lanes=has_lanes
                    )

    def _record_failures_in_range(
        self,
        failures: FilterFailures,
        topic: str,
        queue_id: int,
        criteria: MatchCriteria,
        start: int,
        end: int,
        *,
        has_lanes: bool,
    ) -> WorkItem[None]:
        """Evaluate a filter on the messages from `start` to before `end`, and record failures.

        Failed evaluations are added to `failures`, one for each message if the group `has_lanes`.
        Deleted messages are skipped. This is a generator that works in steps.
        """
        offset_min, _ = self.store.queue_offsets(topic, queue_id)
        read_at = partial(self.match_counter.properties.read_at, topic, queue_id)
        steps = self.match_counter.iter_verdicts(
            topic, queue_id, criteria, max(start, offset_min), end
        )
        for step in steps:
            if callable(step):  # a job for another thread
                yield step
                continue
            if step is not None:
                failures.record_failures(
                    queue_id,
                    criteria,
                    step.first_offset,
                    step.verdicts,
                    read_at,
                    has_lanes=has_lanes,
                )
            yield None

    # --- surveys

    def survey_if_due(self) -> None:
        """Start a survey of all filters in the background, unless there was one recently.

        A survey finds failed evaluations (`failures`), and counts the lag of each connected group
        (`survey_results`). Do nothing if the last survey was started less than SURVEY_PERIOD_S
        seconds ago, or is still running. If no group is connected, only `survey_results` is
        cleared.
        """
        now_s = self.clock.monotonic_s()
        if now_s < self._next_survey_s or self._is_surveying:
            return
        self._next_survey_s = now_s + SURVEY_PERIOD_S

        unchecked = [
            topic_and_group
            for topic_and_group, delivery in self.deliveries.items()
            if delivery.ranges_to_check
        ]
        connected = [
            (name, topic)
            for name, group in self.consumers.groups.items()
            if group.message_model != BROADCASTING  # its offsets are those of each member
            for topic in group.subscriptions
        ]
        if not unchecked and not connected:
            self.survey_results = {}
            return

        self._is_surveying = True  # `_survey_groups` sets it to False at its end
        self.background.run_in_background(self._survey_groups(unchecked, connected))

    def _survey_groups(
        self, unchecked: list[TopicGroup], connected: list[tuple[str, str]]
    ) -> WorkItem[None]:
        """Run a survey: find failed evaluations, and count the lag of groups.

        `unchecked` has (topic, group) for each filter that may have failed. `connected` has (group,
        topic) for each lag to count, over all queues. At the end, the lags replace
        `survey_results`. This is a generator that works in steps.
        """
        lags: dict[TopicGroup, tuple[int, float | None]] = {}
        lag_samples: dict[TopicGroup, LagSamples] = {}
        try:
            for topic, group in unchecked:
                yield from self.check_fetched(group, topic)
            for group, topic in connected:
                yield None
                if self._has_filter(group, topic):
                    queues = yield from self.count_group_lag(group, topic)
                    tallies = [queue.tally for queue in queues if queue.tally is not None]
                    if tallies:
                        lag_count = sum(tally.count for tally in tallies)
                        lags[topic, group] = (lag_count, combined_eta_s(tallies))
                    continue
                queue_lags = self._list_lags_without_filter(group, topic)
                eta_s: float | None = 0.0
                if any(queue_lags):
                    samples = self._sample_lag(group, topic, queue_lags)
                    lag_samples[topic, group] = samples
                    eta_s = estimate_eta_s(samples)
                lags[topic, group] = (sum(queue_lags), eta_s)
        finally:
            self._is_surveying = False
        self.survey_results = lags
        self._lag_samples = lag_samples

    def _has_filter(self, group: str, topic: str) -> bool:
        """Return whether the messages of a topic that a group receives have to be counted.

        Without a filter, the lag is the difference of two offsets. A group with lanes filters all
        its topics.
        """
        if group in self.consumers.lanes.table:
            return True
        subscription = self.find_subscription(group, topic)
        return subscription is not None and not subscription.is_everything

    def _list_lags_without_filter(self, group: str, topic: str) -> tuple[int, ...]:
        """Return the number of messages in each queue of a topic that a group has not consumed."""
        topic_entry = self.topics.get(topic)
        queue_lags = []
        for queue_id in range(topic_entry.config.read_queues if topic_entry is not None else 0):
            start, _, extra = self.unfinished(group, topic, queue_id)
            offset_min, offset_end = self.store.queue_offsets(topic, queue_id)
            queue_lags.append(max(offset_end - max(start, offset_min) + extra, 0))
        return tuple(queue_lags)

    def _sample_lag(self, group: str, topic: str, queue_lags: tuple[int, ...]) -> LagSamples:
        """Return the last samples of a group's lag on a topic, the newest one with `queue_lags`."""
        samples = self._lag_samples.get((topic, group))
        if samples is None or len(samples[0][1]) != len(queue_lags):
            samples = deque(maxlen=SAMPLES_KEPT)
        samples.append((self.clock.monotonic_s(), queue_lags))
        return samples

    def runtime_info(self) -> dict[str, str]:
        """Return entries for GET_BROKER_RUNTIME_INFO (28) with the counters of each filter.

        For example {"sluiceFilter:TOPIC@GROUP": "matched 5 filtered 20 errors 0"}, for each topic
        and group of which messages were filtered or evaluations have failed.
        """
        entries = {}
        for (topic, group), delivery in self.deliveries.items():
            failures = self.failures.get((topic, group))
            if delivery.filtered_count or failures is not None:
                error_count = 0 if failures is None else failures.total
                entries[f"sluiceFilter:{topic}@{group}"] = (
                    f"matched {delivery.messages_out} filtered {delivery.filtered_count} "
                    f"errors {error_count}"
                )
        return entries

    # --- requests of tools

    def report_filtered_lag(
        self, header: FilteredLagRequest, command: Command, peer: Peer
    ) -> Command | None:
        """Answer SLUICE_FILTERED_LAG (900131): the exact lag and the counters of a group.

        The request may name one topic; otherwise all topics are reported to which the group
        subscribes or has committed offsets. With an expression in the request, the lag is counted
        as if the group had that expression. Return None if the answer follows later. Raises
        RequestError if the group does not exist.
        """
        self.groups.check_exists(header.group)
        return self.background.answer(self._count_filtered_lag(header), command, peer)

    def _count_filtered_lag(self, header: FilteredLagRequest) -> WorkItem[Command]:
        """Count the lag of each topic in steps, and return the answer to `report_filtered_lag`.

        Topics that do not exist are left out. Raises RequestError if an expression does not
        compile.
        """
        topics = [header.topic] if header.topic else self._list_topics_of_group(header.group)
        matchings = []
        for topic in topics:
            if topic in self.topics:
                matching = yield from self._describe_matching(header, topic)
                matchings.append(matching)
        return Command(ResponseCode.SUCCESS, {}, bodies.encode_group_matching(matchings))

    def _describe_matching(
        self, header: FilteredLagRequest, topic: str
    ) -> WorkItem[bodies.GroupMatching]:
        """Count the lag of a group on one topic, and return it with the counters of its filter.

        The lag counts the messages that match the expression in the request, or the group's
        subscription if the request has none. Raises RequestError if the expression is invalid. This
        is a generator that works in steps.
        """
        group = header.group
        subscription = self.find_subscription(group, topic)
        if header.expression is not None:
            yield from preparation_jobs(header.expression, header.kind or TAG)
            subscription = parse_trial_subscription(topic, header.expression, header.kind)

        # Before the failures are read below, because it may record more of them.
        yield from self.check_fetched(group, topic)
        if header.expression is None:
            queues = yield from self.count_group_lag(group, topic)
        else:
            queues = yield from self.count_lag(group, topic, subscription)

        matched_count = 0
        filtered_count = 0
        delivery = self.deliveries.get((topic, group))
        if delivery is not None:
            matched_count = delivery.messages_out
            filtered_count = delivery.filtered_count
        failures = self.failures.get((topic, group)) or FilterFailures()
        return bodies.GroupMatching(
            topic=topic,
            kind=subscription.kind if subscription is not None else "",
            expression=subscription.expression if subscription is not None else None,
            queues=tuple(map(_encode_queue_lag, queues)),
            matched=matched_count,
            filtered=filtered_count,
            errors=failures.reasons,
            failures=tuple(failures.samples),
            lanes=tuple(_iter_lane_lags(topic, queues)),
        )

    def _list_topics_of_group(self, group: str) -> list[str]:
        """Return the topics to which a group subscribes or has committed offsets, sorted."""
        return sorted(self.topics_of_group(group) | self.offsets.topics_of(group))

    def try_filter(self, header: TryFilterRequest, command: Command, peer: Peer) -> Command | None:
        """Answer SLUICE_TRY_FILTER (900132): evaluate an expression on stored messages.

        No offset changes. The messages of all queues of the topic are evaluated, or only those that
        were stored between the times in the request. If the request names a group, the expression
        is compared with its subscription. Return None if the answer is sent later.

        Raises RequestError if the topic does not exist or the subscription of the group is unknown.
        """
        topic = self.topics.require(header.topic)
        group_subscription = None
        if header.group is not None:
            group_subscription = self.find_subscription(header.group, header.topic)
            if group_subscription is None:
                raise RequestError(
                    ResponseCode.SUBSCRIPTION_NOT_EXIST,
                    f"The subscription of group {header.group} to topic {header.topic} is unknown: "
                    "no member is online, and no SQL92 expression is stored.",
                )

        ranges = self._find_trial_ranges(header, topic.config.read_queues)
        trial_steps = self._run_trial(header, group_subscription, ranges)
        return self.background.answer(trial_steps, command, peer)

    def _find_trial_ranges(
        self, header: TryFilterRequest, queue_count: int
    ) -> list[tuple[int, int, int]]:
        """Return (queue id, first offset, end) of the messages in each queue of a trial.

        They are the messages between the times in the request. Queues without any are left out.
        """
        find_offset = partial(self.store.reader.offset_by_time, header.topic)
        ranges = []
        for queue_id in range(queue_count):
            start, end = self.store.queue_offsets(header.topic, queue_id)
            if header.begin_ms:
                start = find_offset(queue_id, header.begin_ms)
            if header.end_ms is not None:
                end = find_offset(queue_id, header.end_ms + 1)
            if start < end:
                ranges.append((queue_id, start, end))
        return ranges

    def _run_trial(
        self,
        header: TryFilterRequest,
        group_subscription: Subscription | None,
        ranges: list[tuple[int, int, int]],
    ) -> WorkItem[Command]:
        """Evaluate the expression of a request on stored messages, and return the answer.

        `ranges` are (queue id, first offset, end offset). If they have more messages than the
        request allows, the newest part of each is taken. The expression is compared with
        `group_subscription` if that is given. The body of the answer is JSON with the keys
        "report", "stored" (the number of messages in the ranges) and "messages" (queue, offset and
        properties of each sample). This is a generator that works in steps.

        Raises RequestError if the expression is invalid.
        """
        topic = header.topic
        yield from preparation_jobs(header.expression, header.kind or TAG)
        subscription = parse_trial_subscription(topic, header.expression, header.kind)
        if not self.store.columns.is_loaded:
            yield self.store.columns.warm_up
        from sluicemq.filter.lab import Trial  # noqa: PLC0415 - NumPy is loaded only for trials

        trial = yield partial(Trial, subscription, group_subscription)
        weight = len(subscription.expression)
        if group_subscription is not None:
            weight += len(group_subscription.expression)

        for queue_id, start, end in take_newest(ranges, header.count_max or ROWS_MAX):
            yield from self._add_queue_to_trial(trial, weight, topic, queue_id, start, end)

        report = yield trial.report
        stored_count = sum(end - start for _, start, end in ranges)
        body = {
            "report": report,
            "stored": stored_count,
            "messages": self._describe_samples(topic, report),
        }
        body_json = yield partial(orjson.dumps, body, default=str)
        return Command(ResponseCode.SUCCESS, {}, body_json)

    def _describe_samples(self, topic: str, report: "Report") -> list[dict[str, object]]:
        """Return a dict (queueId, queueOffset, properties) for each sample in a trial's report."""
        samples = [*report.samples, *(cause.sample for cause in report.causes)]
        if report.difference is not None:
            samples += [*report.difference.samples_here, *report.difference.samples_there]
        # A message may be a sample more than once: list it once.
        sampled_offsets = sorted({(str(sample.source), sample.offset) for sample in samples})
        read_at = self.match_counter.properties.read_at
        return [
            {
                "queueId": int(source),
                "queueOffset": offset,
                "properties": read_at(topic, int(source), offset) or {},
            }
            for source, offset in sampled_offsets
        ]

    def _add_queue_to_trial(
        self, trial: "Trial", weight: int, topic: str, queue_id: int, start: int, end: int
    ) -> Iterator[Job | None]:
        """Evaluate a trial's expressions on the messages of a queue from `start` to before `end`.

        `weight` is the number of characters of the expressions. Short ones are evaluated here, on
        blocks of columns (the values of a property of many messages). Without columns, or with long
        expressions, records are read, and evaluated on another thread, because that takes long.
        Yield functions for another thread, and None where other work may run.
        """
        blocks = self.store.columns.iter_blocks(topic, queue_id, start, end)
        if blocks is None or weight > INLINE_WEIGHT_MAX:
            yield from self._add_records_to_trial(trial, topic, queue_id, start, end)
            return

        read_at = partial(self.match_counter.properties.read_at, topic, queue_id)
        for block in blocks:
            for part_start in range(block.first_offset, block.end, ROWS_PER_STEP):
                part_end = min(part_start + ROWS_PER_STEP, block.end)

                def read_properties(row: int, first_offset: int = part_start) -> Mapping[str, str]:
                    return read_at(first_offset + row) or {}

                part = block.slice_offsets(part_start, part_end)
                trial.add_block(part, queue_id, read_properties)
                yield None

    def _add_records_to_trial(
        self, trial: "Trial", topic: str, queue_id: int, start: int, end: int
    ) -> Iterator[Job | None]:
        """Evaluate a trial's expressions on messages from `start` to before `end`, by reading them.

        RECORDS_PER_STEP records are read at a time; None is yielded after that. For each
        ROWS_PER_JOB messages, a function that evaluates them on another thread is yielded.
        """
        stored_properties = self.match_counter.properties
        for job_start in range(start, end, ROWS_PER_JOB):
            job_end = min(job_start + ROWS_PER_JOB, end)
            rows: list[dict[str, str]] = []
            for step_start in range(job_start, job_end, RECORDS_PER_STEP):
                step_end = min(step_start + RECORDS_PER_STEP, job_end)
                records = stored_properties.iter_range(topic, queue_id, step_start, step_end)
                rows += [properties for _, properties in records]
                yield None
            yield partial(trial.add_rows, rows, first_offset=job_start, source=queue_id)

    def report_lanes(self, header: ConsumerGroupRequest, command: Command, peer: Peer) -> Command:
        """Answer SLUICE_GROUP_LANES (900133): the contract and lanes of a group.

        The answer also has the clients that the group refused, and its pops.
        """
        group = header.group
        self.groups.check_exists(group)
        contracts = self.consumers.contracts
        refusal_reasons = {}
        for (refusing_group, client_id), refusal in contracts.refusals.items():
            if refusing_group == group:
                refusal_reasons[client_id] = refusal.reason

        body = {
            "conflicts": contracts.conflict_counts.get(group, 0),
            "contract": contracts.contract_of(group),
            "forgotten": [],
            "lanes": [],
            "pops": contracts.popped_subscriptions(group),
            "refused": refusal_reasons,
            "unmatched": 0,
        }
        lanes = self.consumers.lanes.table.get(group)
        if lanes is not None:
            body["forgotten"] = list(lanes.forgotten_subscriptions)
            body["lanes"] = describe_lanes(lanes)
            body["unmatched"] = lanes.unmatched_count
        return Command(ResponseCode.SUCCESS, body=orjson.dumps(body))


def _list_queues_of_lane(lane: Lane, queues: list[QueueLag]) -> list[QueueLag]:
    """Return the entries of `queues` for the queues of one lane, with the lag of this lane only."""
    lane_queues = []
    for queue in queues:
        for queue_lane, tally in queue.lanes:
            if queue_lane is lane:
                lane_queues.append(queue._replace(committed=tally.start, tally=tally))
    return lane_queues


def _iter_lane_lags(topic: str, queues: list[QueueLag]) -> Iterator[bodies.LaneMatching]:
    """Yield the lag of each lane in all queues, as the body of an answer describes it.

    Live lanes come before idle ones, and the oldest first. `queues` are the queues of `topic`.
    """
    lanes: dict[str, Lane] = {}
    for queue in queues:
        for lane, _ in queue.lanes:
            lanes[lane.key] = lane
    for lane in sorted(lanes.values(), key=lambda lane: (lane.is_idle, lane.join_number)):
        kind, expression = describe_atoms(get_atoms_by_topic(lane.key).get(topic, ()))
        yield bodies.LaneMatching(
            lane=lane.id,
            kind=kind,
            expression=expression,
            client_ids=tuple(sorted(lane.members)),
            queues=tuple(map(_encode_queue_lag, _list_queues_of_lane(lane, queues))),
        )


def _encode_queue_lag(queue: QueueLag) -> bodies.QueueMatching:
    """Return the lag of a queue as the part of an answer's body that describes it.

    In the body the tally is called `matching`; it is None if the filter is unknown.
    """
    match_count: int | None = None
    eta_ms: int | None = None
    if queue.tally is not None:
        match_count = queue.tally.count
        eta_s = queue.tally.eta_s
        if eta_s is not None:
            eta_ms = round(eta_s * 1000)
    return bodies.QueueMatching(
        queue_id=queue.queue_id,
        committed=queue.committed,
        offset_min=queue.offset_min,
        offset_max=queue.offset_max,
        matching=match_count,
        eta_ms=eta_ms,
        in_flight=queue.in_flight,
        extra=queue.extra,
    )
