"""Rules about consumer groups, and `explain_group`, which applies them to one group.

Several of these rules are also applied to the queue of one message: see `message_rules`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from sluicemq.client.admin.diagnose.findings import (
    Code,
    Finding,
    GroupExplained,
    Rule,
    Severity,
    Values,
    judge,
)
from sluicemq.client.admin.diagnose.group_facts import (
    GroupFacts,
    GroupTopicFacts,
    WaitingLaneFacts,
    owner_of,
)
from sluicemq.client.admin.groups import GroupContract, QueueProgress
from sluicemq.errors import FilterSyntaxError
from sluicemq.filter.subscriptions import compile_sql92, is_tag_kind
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import RETRY_PREFIX
from sluicemq.wire.bodies import GroupMatching, QueueState

STUCK_MS: Final = 30_000
"""A member that holds messages and has finished none for longer than this does not acknowledge."""
LANE_WITHOUT_MEMBER_FIX: Final = (
    "Start a consumer with that subscription. After half a minute, other lanes take over the "
    "messages that they match; the rest waits for a day."
)


# ----------------------------------------------------------------------------- whole groups


def _find_unknown_group(group: GroupFacts) -> Iterator[Values]:
    if group.config is None:
        yield {"group": group.name}


def _find_disabled_consuming(group: GroupFacts) -> Iterator[Values]:
    if group.config is not None and not group.config.consume_enable:
        yield {"group": group.name}


def _find_missing_members(group: GroupFacts) -> Iterator[Values]:
    if not group.members:
        yield {"group": group.name}


def _find_idle_members(group: GroupFacts) -> Iterator[Values]:
    """Yield {"client_id", "count"} for each member that has no queue, except of the retry topic.

    `count` is the number of members. A member that did not report its queues is left out. The
    dictionary has the values of the finding's text.
    """
    for member in group.members:
        if member.queues is not None and all(
            queue.topic.startswith(RETRY_PREFIX) for queue in member.queues
        ):
            yield {"client_id": member.client_id, "count": len(group.members)}


NO_SUCH_GROUP: Final = Rule(
    Code.NO_SUCH_GROUP,
    _find_unknown_group,
    "No broker knows the group {group}: no consumer has used it yet.",
    'List the groups with "sluice group list", or create one with "sluice group create".',
)
CONSUMING_OFF: Final = Rule(
    Code.CONSUMING_OFF,
    _find_disabled_consuming,
    "The group {group} is not allowed to consume: consumeEnable is false.",
    'Enable it with "mqadmin updateSubGroup -s true".',
)
NO_MEMBER: Final = Rule(
    Code.NO_MEMBER,
    _find_missing_members,
    "No member of {group} is online.",
    "Start a consumer. If one is running, it uses other name servers, or its log says why the "
    "brokers refuse it.",
)
MEMBER_IDLE: Final = Rule(
    Code.MEMBER_IDLE,
    _find_idle_members,
    "{client_id} reads no queue: {count} members share the queues of the group.",
    "A queue has one reader. Give the topic more queues, or stop some members.",
)


# ---------------------------------------------------------------------- a group in one topic


def _find_failed_messages(facts: GroupTopicFacts) -> Iterator[Values]:
    """Yield {"group", "count"} if messages wait in the group's retry topic.

    `count` is the number of waiting messages without those that are popped. Nothing is yielded for
    other topics. The dictionary has the values of the finding's text.
    """
    if facts.topic.startswith(RETRY_PREFIX):
        waiting = sum(
            queue_progress.lag - queue_progress.in_flight for queue_progress in facts.progress
        )
        if waiting:
            yield {"group": facts.group.name, "count": waiting}


def _find_different_subscriptions(facts: GroupTopicFacts) -> Iterator[Values]:
    """Yield {"topic", "expressions"} if members subscribe to the topic with different filters.

    `expressions` lists the members of each filter: "client-1: A; client-2: B". "nothing" stands for
    members that do not subscribe to the topic. The dictionary has the values of the finding's text.
    """
    members_by_expression: dict[str, list[str]] = {}
    for member in facts.group.members:
        if member.subscriptions is not None:
            subscription = member.subscriptions.get(facts.topic)
            expression = "nothing" if subscription is None else subscription.expression
            members_by_expression.setdefault(expression, []).append(member.client_id)
    if len(members_by_expression) > 1:
        lists = [
            f"{', '.join(client_ids)}: {expression}"
            for expression, client_ids in sorted(members_by_expression.items())
        ]
        yield {"topic": facts.topic, "expressions": "; ".join(lists)}


def _find_unequal_subscriptions(facts: GroupTopicFacts) -> Iterator[Values]:
    if not facts.has_lanes:
        yield from _find_different_subscriptions(facts)


def _find_unequal_subscriptions_in_lanes(facts: GroupTopicFacts) -> Iterator[Values]:
    if facts.has_lanes:
        yield from _find_different_subscriptions(facts)


def _find_missing_subscription(facts: GroupTopicFacts) -> Iterator[Values]:
    """Yield {"group", "topic", "subscribed"} if the online members do not subscribe to the topic.

    `subscribed` lists the topics to which they subscribe, or is "nothing". The dictionary has the
    values of the finding's text.
    """
    if facts.subscription is None and facts.group.members:
        subscribed_topics = sorted(
            name for name in facts.group.subscriptions if not name.startswith(RETRY_PREFIX)
        )
        yield {
            "group": facts.group.name,
            "topic": facts.topic,
            "subscribed": ", ".join(subscribed_topics) or "nothing",
        }


def _find_missing_route(facts: GroupTopicFacts) -> Iterator[Values]:
    if facts.readable_brokers is None:
        yield {"topic": facts.topic}


def _find_brokers_missing_in_route(facts: GroupTopicFacts) -> Iterator[Values]:
    """Yield {"topic", "brokers"} if brokers have the topic but clients cannot read it there.

    This is so if the route does not contain the broker, or forbids to read from it. The dictionary
    has the values of the finding's text.
    """
    if facts.readable_brokers is not None:
        brokers = {queue_progress.queue.broker for queue_progress in facts.progress}
        if missing := sorted(brokers - facts.readable_brokers):
            yield {"topic": facts.topic, "brokers": ", ".join(missing)}


RETRIES_PENDING: Final = Rule(
    Code.RETRY_PENDING,
    _find_failed_messages,
    "{count} messages that handlers of {group} failed to process will be delivered again.",
    "Look in the logs of the consumers for the reason.",
    Severity.NOTE,
)
UNEQUAL: Final = Rule(
    Code.UNEQUAL,
    _find_unequal_subscriptions,
    "Members subscribe {topic} differently: {expressions}.",
    "A RocketMQ broker uses one subscription for the whole group, so messages get lost. Give each "
    "subscription a group of its own.",
)
UNEQUAL_IN_LANES: Final = Rule(
    Code.UNEQUAL,
    _find_unequal_subscriptions_in_lanes,
    "Members subscribe {topic} differently: {expressions}.",
    "Each subscription is a lane, and a message goes to the oldest lane that matches it. A "
    "consumer that must receive all matching messages needs a group of its own.",
)
NOT_SUBSCRIBED: Final = Rule(
    Code.NOT_SUBSCRIBED,
    _find_missing_subscription,
    "The members of {group} do not subscribe {topic}, but {subscribed}.",
    "Subscribe to it, or delete the group's offsets of the topic.",
)
NO_ROUTE: Final = Rule(
    Code.NO_ROUTE,
    _find_missing_route,
    "The name server has no route for {topic}, so consumers cannot find it.",
    'Create the topic with "sluice topic create {topic}", or start its broker.',
)
MISSING_IN_ROUTE: Final = Rule(
    Code.NO_ROUTE,
    _find_brokers_missing_in_route,
    "The broker {brokers} has messages of {topic}, but the route does not list it as readable.",
    "Check in the broker's log why it is not registered, or give the topic read permission there.",
)


# ----------------------------------------------------------------------- the text of filters


def compiles(subscription: Subscription) -> bool:
    """Return whether the filter of a subscription is valid. A tag filter is always valid."""
    if not is_tag_kind(subscription.kind):
        try:
            compile_sql92(subscription.expression)
        except FilterSyntaxError:
            return False
    return True


def _find_broken_filter(subscription: Subscription) -> Iterator[Values]:
    if not compiles(subscription):
        yield {"expression": subscription.expression, "topic": subscription.topic}


def _find_ignored_text(subscription: Subscription) -> Iterator[Values]:
    """Yield {"expression", "topic", "ignored"} if RocketMQ ignores the end of the expression.

    RocketMQ's parser stops at the first complete expression: in `a = 1 b = 2` it ignores `b = 2`.
    The dictionary has the values of the finding's text.
    """
    if is_tag_kind(subscription.kind) or not compiles(subscription):
        return
    if ignored := compile_sql92(subscription.expression).ignored_text:
        yield {
            "expression": subscription.expression,
            "topic": subscription.topic,
            "ignored": ignored,
        }


BROKEN_FILTER: Final = Rule(
    Code.BROKEN_FILTER,
    _find_broken_filter,
    "The filter {expression} of {topic} does not compile, so brokers refuse its pulls.",
    'See the error with "sluice filter check".',
)
IGNORED_TEXT: Final = Rule(
    Code.IGNORED_TEXT,
    _find_ignored_text,
    "At the end of the filter {expression} of {topic}, {ignored} is ignored.",
    'See the reason with "sluice filter check".',
    Severity.NOTE,
)


# ----------------------------------------------------------------------- a group in one queue


@dataclass(frozen=True, slots=True)
class GroupQueueFacts:
    """A consumer group in one queue."""

    group: GroupFacts
    progress: QueueProgress

    @property
    def owner(self) -> str | None:
        """The member that reads the queue, as `owner_of` returns it."""
        return owner_of(self.progress.queue, self.group.members)

    @property
    def state(self) -> QueueState | None:
        """The state of the queue as its reader reports it; None if no member reads it."""
        for member in self.group.members:
            if member.queues is not None and self.progress.queue in member.queues:
                return member.queues[self.progress.queue]
        return None

    @property
    def has_unacknowledged(self) -> bool:
        """Whether members have fetched messages that the group has not committed yet.

        It is False while messages of the queue are popped, because these are delivered again when
        their invisible time ends.
        """
        progress = self.progress
        return (
            bool(progress.lag)
            and not progress.in_flight
            and (progress.fetched or 0) > progress.committed
        )

    @property
    def idle_ms(self) -> int | None:
        """The time since the member last finished a message, in ms; None if it is unknown."""
        state = self.state
        now_ms = self.group.now_ms
        if state is None or state.last_consume_ms <= 0 or not now_ms:
            return None
        return max(0, now_ms - state.last_consume_ms)


def _find_offset_beyond_end(facts: GroupQueueFacts) -> Iterator[Values]:
    """Yield the offsets if the group's committed offset is beyond the end of the queue.

    That happens if the topic was deleted and created again, or if a broker lost messages. The
    dictionary has the values of the finding's text.
    """
    progress = facts.progress
    if progress.committed > progress.offset_max:
        yield {
            "group": facts.group.name,
            "queue": progress.queue,
            "committed": progress.committed,
            "end": progress.offset_max,
        }


def _find_missing_reader(facts: GroupQueueFacts) -> Iterator[Values]:
    if facts.owner == "":
        yield {"group": facts.group.name, "queue": facts.progress.queue}


def _describe_fetched(facts: GroupQueueFacts) -> dict[str, object]:
    """Return the values of a finding's text about how far the queue was fetched and committed."""
    return {
        "reader": facts.owner or "A member",
        "queue": facts.progress.queue,
        "fetched": facts.progress.fetched,
        "committed": facts.progress.committed,
    }


def _find_missing_acknowledgements(facts: GroupQueueFacts) -> Iterator[Values]:
    """Yield the fetched and committed offsets, unless the member finished a message recently.

    Recently means within `STUCK_MS`. The text `since` tells for how long no message was finished;
    it is "" if that is unknown.
    """
    state = facts.state
    idle_ms = facts.idle_ms
    if idle_ms is not None and idle_ms < STUCK_MS:
        return
    since = ""
    if state is not None and state.last_consume_ms <= 0:
        since = "; the member has not finished any message yet"
    elif idle_ms is not None:
        since = f"; the member has not finished any message for {idle_ms // 1000} s"
    yield {**_describe_fetched(facts), "since": since}


def _find_messages_in_progress(facts: GroupQueueFacts) -> Iterator[Values]:
    """Yield the queue if its member has finished a message lately."""
    idle_ms = facts.idle_ms
    if idle_ms is not None and idle_ms < STUCK_MS:
        yield {**_describe_fetched(facts), "idle_s": idle_ms // 1000}


_FETCHED: Final = (
    "{reader} has fetched queue {queue.queue_id} of {queue.topic} on {queue.broker} up to offset "
    "{fetched}, and the group has committed up to {committed}"
)
BEYOND_END: Final = Rule(
    Code.BEYOND_END,
    _find_offset_beyond_end,
    "The committed offset of {group} in queue {queue.queue_id} of {queue.topic} on {queue.broker} "
    "is {committed}, beyond the end of the queue at {end}. The topic was deleted and created "
    "again, or the broker lost messages.",
    "SluiceMQ consumers go back to the beginning of the queue when they read it. Other clients "
    "skip "
    'the messages in the queue: run "sluice group reset {group} --topic {queue.topic} --to '
    'earliest".',
)
QUEUE_IDLE: Final = Rule(
    Code.QUEUE_IDLE,
    _find_missing_reader,
    "No member of {group} reads queue {queue.queue_id} of {queue.topic} on {queue.broker}.",
    "Members that have just joined take over queues within seconds. Otherwise look at their logs, "
    "and for client ids that are used twice.",
)
NOT_ACKNOWLEDGING: Final = Rule(
    Code.NOT_ACKNOWLEDGING,
    _find_missing_acknowledgements,
    _FETCHED + "{since}.",
    "Its handler does not return, or it never acknowledges the messages that it took. See where it "
    'is with "sluice consumer stack".',
)
IN_HAND: Final = Rule(
    Code.IN_HAND,
    _find_messages_in_progress,
    _FETCHED + "; the member finished a message {idle_s} s ago.",
    severity=Severity.DETAIL,
)


# ------------------------------------------------------- lanes, contracts and filter counters


def _find_waiting_lane(facts: WaitingLaneFacts) -> Iterator[Values]:
    if facts.lane.client_ids:
        yield {"facts": facts, "readers": ", ".join(facts.lane.client_ids)}


def _find_abandoned_lane(facts: WaitingLaneFacts) -> Iterator[Values]:
    if not facts.lane.client_ids:
        yield {"facts": facts}


def _find_refused_members(contract: GroupContract) -> Iterator[Values]:
    for client_id, reason in contract.refused.items():
        yield {"broker": contract.broker, "client_id": client_id, "reason": reason}


def _find_forgotten_subscriptions(contract: GroupContract) -> Iterator[Values]:
    """Yield the values of one finding for each subscription that the broker has forgotten.

    A broker forgets subscriptions of groups whose members left long ago, although messages for them
    were unread. `reason` says why.
    """
    for forgotten in contract.forgotten:
        yield {
            "broker": contract.broker,
            "subscription": forgotten["subscription"],
            "reason": forgotten["why"],
            "messages": forgotten["messagesMax"],
        }


def _find_failed_evaluations(facts: tuple[str, GroupMatching]) -> Iterator[Values]:
    """Yield the filter and its most frequent error, if it failed on some messages of a topic.

    `facts` is (broker name, counts of the topic).
    """
    broker, counts = facts
    if any(counts.errors.values()):
        error, _ = max(counts.errors.items(), key=itemgetter(1))
        yield {
            "broker": broker,
            "topic": counts.topic,
            "expression": counts.expression,
            "count": sum(counts.errors.values()),
            "error": error,
        }


_WAITING_LANE: Final = (
    "{facts.matching} messages of {facts.topic} on {facts.broker} wait for lane {facts.lane.lane} "
    "({facts.lane.expression}), which "
)
LANE_WAITS: Final = Rule(
    Code.LANE, _find_waiting_lane, _WAITING_LANE + "{readers} read.", severity=Severity.DETAIL
)
LANE_ABANDONED: Final = Rule(
    Code.LANE,
    _find_abandoned_lane,
    _WAITING_LANE + "has no member.",
    LANE_WITHOUT_MEMBER_FIX,
    Severity.DETAIL,
)
REFUSED: Final = Rule(
    Code.REFUSED, _find_refused_members, "{broker} refuses the member {client_id}: {reason}"
)
FORGOTTEN: Final = Rule(
    Code.FORGOTTEN,
    _find_forgotten_subscriptions,
    "{broker} forgot the subscription {subscription}, which had no member, because {reason}; at "
    "most {messages:,} messages were waiting for it.",
    severity=Severity.NOTE,
)
FILTER_FAILED: Final = Rule(
    Code.FILTER_ERROR,
    _find_failed_evaluations,
    "The filter {expression} could not be evaluated on {count} messages of {topic} on {broker}, "
    "which it did not deliver. The most frequent error: {error}.",
    'See what to write instead with "sluice filter test".',
)


# ---------------------------------------------------------------------------- lag by itself


def _find_lag_in_flight(group: GroupFacts) -> Iterator[Values]:
    """Yield {"lag"} if every unread message of the group is popped and not acknowledged yet.

    The dictionary has the values of the finding's text.
    """
    if group.lag and group.lag == sum(
        queue_progress.in_flight for queue_progress in group.progress
    ):
        yield {"lag": group.lag}


def _find_filtered_lag(group: GroupFacts) -> Iterator[Values]:
    if group.lag and group.matching_lag == 0:
        yield {"lag": group.lag}


def _find_lag(group: GroupFacts) -> Iterator[Values]:
    """Yield {"lag", "matching"} if the group has unread messages.

    `matching` is a part of the sentence that says how many of them match the filters, "" if
    unknown. The dictionary has the values of the finding's text.
    """
    if group.lag:
        matching = ""
        if group.matching_lag is not None:
            matching = f", of which {group.matching_lag} match the group's filters"
        yield {"lag": group.lag, "matching": matching}


ALL_IN_FLIGHT: Final = Rule(
    Code.IN_FLIGHT,
    _find_lag_in_flight,
    "The lag is {lag}: all of these messages are popped and not acknowledged yet.",
    "If that does not change, look in the logs of the consumers why they do not finish.",
    Severity.DETAIL,
)
ONLY_FILTERED: Final = Rule(
    Code.ONLY_FILTERED,
    _find_filtered_lag,
    "The lag is {lag}, but none of these messages match the group's filters.",
    "Nothing is lost.",
    Severity.DETAIL,
)
BEHIND: Final = Rule(
    Code.BEHIND,
    _find_lag,
    "The lag is {lag}{matching}; the group is consuming.",
    "If the lag grows, add queues and members, or make the handlers faster.",
    Severity.NOTE,
)

GROUP_RULES: Final = (CONSUMING_OFF, NO_MEMBER)
TOPIC_RULES: Final = (UNEQUAL, UNEQUAL_IN_LANES, NOT_SUBSCRIBED)
FILTER_RULES: Final = (BROKEN_FILTER, IGNORED_TEXT)
ROUTE_RULES: Final = (NO_ROUTE, MISSING_IN_ROUTE)
QUEUE_RULES: Final = (BEYOND_END, QUEUE_IDLE, NOT_ACKNOWLEDGING, IN_HAND)
LANE_RULES: Final = (LANE_WAITS, LANE_ABANDONED)
CONTRACT_RULES: Final = (REFUSED, FORGOTTEN)
LAG_RULES: Final = (ALL_IN_FLIGHT, ONLY_FILTERED, BEHIND)
"""The first of these that holds is the finding of a group that has a lag and no other finding."""


def explain_group(group: GroupFacts) -> GroupExplained:
    """Return what is wrong with a group, the most important finding first, and its lag.

    If nothing is wrong, the first rule that explains its lag gives the only finding. A group
    without a lag then has none.
    """
    if group.config is None:
        findings = judge([NO_SUCH_GROUP], group)
    else:
        findings = _judge_known_group(group)
        if not findings:
            findings = judge(LAG_RULES, group)[:1]
    return GroupExplained(group.name, tuple(findings), group.lag, group.matching_lag)


def _judge_known_group(group: GroupFacts) -> list[Finding]:
    """Return the findings about a group that exists.

    The rules that merely explain a lag (`LAG_RULES`) are not applied.
    """
    findings = judge(GROUP_RULES, group)
    for topic in group.topics:
        findings += _judge_topic(GroupTopicFacts(group, topic, group.has_lanes(topic)))

    # Whether a member is idle is known only if all members have reported their queues.
    if all(member.queues is not None for member in group.members):
        findings += judge([MEMBER_IDLE], group)
    for queue_progress in group.progress:
        if not group.has_lanes(queue_progress.queue.topic):
            findings += stuck_queue(GroupQueueFacts(group, queue_progress))

    for broker, counts in group.application_filter_counts:
        for lane in counts.lanes:
            findings += _judge_lane(WaitingLaneFacts(group, broker, counts.topic, lane))

    for contract in group.contracts:
        findings += judge(CONTRACT_RULES, contract)
    for broker_and_counts in group.filter_counts:
        findings += judge([FILTER_FAILED], broker_and_counts)
    return findings


def _judge_topic(facts: GroupTopicFacts) -> list[Finding]:
    """Return the findings about a group in one topic.

    A retry topic has only the finding that retries wait. Findings about lanes are made by
    `_judge_lane`.
    """
    if facts.topic.startswith(RETRY_PREFIX):
        return judge([RETRIES_PENDING], facts)

    findings = judge(TOPIC_RULES, facts)
    if facts.subscription is not None:
        findings += judge(FILTER_RULES, facts.subscription)
    findings += judge(ROUTE_RULES, facts)
    facts_of_queues = [
        GroupQueueFacts(facts.group, queue_progress) for queue_progress in facts.progress
    ]
    for queue_facts in facts_of_queues:
        findings += judge([BEYOND_END], queue_facts)

    # Each lane has readers of its own: `_judge_lane` looks for them.
    if facts.group.members and not facts.has_lanes:
        for queue_facts in facts_of_queues:
            if queue_facts.progress.queue.broker in (facts.readable_brokers or ()):
                findings += judge([QUEUE_IDLE], queue_facts)
    return findings


def _judge_lane(facts: WaitingLaneFacts) -> list[Finding]:
    """Return the findings about a lane, a subgroup of members with the same filter.

    The result is empty if no messages wait for the lane.
    """
    if not facts.matching:
        return []
    findings = judge(LANE_RULES, facts)

    lane = facts.as_group
    if not lane.members or any(member.queues is None for member in lane.members):
        return findings  # which queues the members of the lane read is unknown
    facts_of_queues = [GroupQueueFacts(lane, queue_progress) for queue_progress in lane.progress]
    for queue_facts, counts in zip(facts_of_queues, facts.lane.queues, strict=True):
        if counts.matching:
            findings += judge([QUEUE_IDLE], queue_facts)
    for queue_facts in facts_of_queues:
        findings += stuck_queue(queue_facts)
    return findings


def stuck_queue(facts: GroupQueueFacts) -> list[Finding]:
    """Return the finding if messages of the queue were fetched and are not acknowledged."""
    if facts.has_unacknowledged and facts.owner != "":
        return judge([NOT_ACKNOWLEDGING], facts)
    return []
