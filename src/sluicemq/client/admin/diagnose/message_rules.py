"""Rules about one message in a consumer group, and `explain_message`, which applies them.

The fate of a message is the first of these that holds:

    dead        a copy of it is in the group's dead-letter topic
    in-flight   it, or its newest copy, is popped and not acknowledged
    retry       a copy of it waits in a retry topic, or for its delivery there
    consumed    a copy or a trace shows that a handler processed it
    filtered    the group's filter does not match it
    consumed    the group's committed offset is beyond it, and nothing contradicts
    offline     the group has not reached it, and no member is online
    waiting     the group has not reached it

It is unknown in a group that does not exist.

Lanes (design/0009): a message belongs to the oldest lane that matches it, and its fate is decided
by the members, the filter and the committed offset of that lane. A broker does not report which
messages a lane took over from an idle lane. A message that any matching lane has passed therefore
counts as consumed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from sluicemq.client.admin.diagnose.findings import (
    Code,
    Fate,
    Finding,
    MessageExplained,
    Rule,
    Severity,
    Values,
    judge,
)
from sluicemq.client.admin.diagnose.group_facts import (
    DeliveryFacts,
    LaneFacts,
    RetryFacts,
)
from sluicemq.client.admin.diagnose.group_rules import (
    BEYOND_END,
    BROKEN_FILTER,
    CONSUMING_OFF,
    IGNORED_TEXT,
    IN_HAND,
    LANE_WITHOUT_MEMBER_FIX,
    MEMBER_IDLE,
    NO_MEMBER,
    NO_SUCH_GROUP,
    NOT_ACKNOWLEDGING,
    NOT_SUBSCRIBED,
    QUEUE_IDLE,
    ROUTE_RULES,
    UNEQUAL,
    UNEQUAL_IN_LANES,
    GroupQueueFacts,
)
from sluicemq.filter.selector import Explanation, Outcome, deciding_atoms, explain
from sluicemq.filter.subscriptions import compile_sql92, is_tag_kind, tag_matches
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import DLQ_PREFIX

_RETRIES_MAX: Final = 16
"""The maximum number of retries of a group whose settings are unknown."""


# ---------------------------------------------------------------------- filters on a message


@dataclass(frozen=True, slots=True)
class FilterVerdict:
    """The result of a subscription's filter on a message.

    `explanation` is the result of an SQL92 filter with the results of its conditions, None if the
    filter is by tags or does not compile.
    """

    subscription: Subscription
    message: StoredMessage
    explanation: Explanation | None


def _find_different_tag(verdict: FilterVerdict) -> Iterator[Values]:
    """Yield {"expression", "tag"} if the subscription selects tags and the message has another.

    The dictionary has the values of the finding's text.
    """
    subscription = verdict.subscription
    tag = verdict.message.tag
    if not is_tag_kind(subscription.kind) or not subscription.tags:
        return
    if not tag_matches(subscription, tag):
        yield {"expression": subscription.expression, "tag": f"'{tag}'" if tag else "absent"}


def _find_deciding_conditions(verdict: FilterVerdict) -> Iterator[Values]:
    """Yield the conditions because of which an SQL92 expression is not true for the message.

    `outcome` is "false", "null" or "error". Nothing is yielded if the expression is true or the
    filter selects tags.
    """
    explanation = verdict.explanation
    if explanation is not None and not explanation.matches:
        conditions = [describe_condition(condition) for condition in deciding_atoms(explanation)]
        yield {
            "expression": verdict.subscription.expression,
            "outcome": explanation.outcome.value,
            "conditions": "; ".join(conditions),
        }


def _find_false_outcome(verdict: FilterVerdict) -> Iterator[Values]:
    if verdict.explanation is not None and verdict.explanation.outcome is not Outcome.ERROR:
        yield from _find_deciding_conditions(verdict)


def _find_failed_evaluation(verdict: FilterVerdict) -> Iterator[Values]:
    if verdict.explanation is not None and verdict.explanation.outcome is Outcome.ERROR:
        yield from _find_deciding_conditions(verdict)


def describe_condition(condition: Explanation) -> str:
    """Return one comparison of an SQL92 expression, with its outcome and the values it compared.

    For example `price > 30 is false (price is '7', a String)`. Literals of the expression are not
    explained.
    """
    descriptions = []
    for operand in condition.operands:
        operand_value = operand.value
        if operand_value is None:
            descriptions.append(f"{operand.text} is absent")
        elif not isinstance(operand_value, str):
            is_literal = operand.text == str(operand_value)
            if not is_literal:
                descriptions.append(f"{operand.text} is {operand_value}")
        else:
            is_literal = operand.text == "'" + operand_value.replace("'", "''") + "'"
            if not is_literal:
                descriptions.append(f"{operand.text} is '{operand_value}', a String")

    description = f"{condition.text} is {condition.outcome.value}"
    reason = condition.error.rstrip(".") or ", ".join(descriptions)
    return f"{description} ({reason})" if reason else description


TAG_DIFFERS: Final = Rule(
    Code.FILTER_FALSE,
    _find_different_tag,
    "The group subscribes the tags {expression}, and the tag of the message is {tag}.",
)
EVALUATES_FALSE: Final = Rule(
    Code.FILTER_FALSE,
    _find_false_outcome,
    "The filter {expression} is {outcome} for the message: {conditions}.",
)
EVALUATION_FAILS: Final = Rule(
    Code.FILTER_ERROR,
    _find_failed_evaluation,
    "The filter {expression} cannot be evaluated for the message: {conditions}.",
    'See how many messages are lost in this way, and what to write instead, with "sluice filter '
    'test".',
)
VERDICT_RULES: Final = (TAG_DIFFERS, EVALUATES_FALSE, EVALUATION_FAILS)


def verdict_on(
    message: StoredMessage, subscription: Subscription | None
) -> tuple[Explanation | None, Finding | None]:
    """Evaluate the filter of a subscription on a message.

    Returns (explanation, finding). `explanation` has the outcome of each part of an SQL92
    expression. It is None for a tag filter and for an invalid expression. `finding` says why the
    message does not match; it is None if the message matches. Both are None if `subscription` is
    None or matches everything.
    """
    if subscription is None or subscription.is_everything:
        return None, None
    if broken := judge([BROKEN_FILTER], subscription):
        return None, broken[0]
    explanation = None
    if not is_tag_kind(subscription.kind):
        explanation = explain(compile_sql92(subscription.expression), message.properties)
    findings = judge(VERDICT_RULES, FilterVerdict(subscription, message, explanation))
    return explanation, findings[0] if findings else None


# ------------------------------------------------------------------ the fate of a message


def _find_dead_letter(facts: DeliveryFacts) -> Iterator[Values]:
    """Yield {"times", "topic", "group"} if the message became a dead letter of the group.

    `times` is the number of failures, one more than the retries. The dictionary has the values of
    the finding's text.
    """
    if facts.dead_letters:
        yield {
            "times": max(message.reconsume_times for message in facts.dead_letters),
            "topic": DLQ_PREFIX + facts.group.name,
            "group": facts.group.name,
        }


def _find_popped_delivery(facts: DeliveryFacts) -> Iterator[Values]:
    """Yield who popped the message, when and how often, if it is not acknowledged yet.

    `left_s` is the time in seconds until the broker delivers it again.
    """
    popped = facts.popped
    now_ms = facts.group.now_ms
    if popped is not None:
        yield {
            "client": popped.client_id or "A client, before the broker was started,",
            "since_s": (now_ms - popped.popped_ms) / 1000,
            "times": popped.delivery_count,
            "left_s": max(popped.visible_ms - now_ms, 0) / 1000,
        }


def _find_pending_retry(facts: DeliveryFacts) -> Iterator[Values]:
    retry = facts.last_retry
    if retry is not None and not retry.is_past and not retry.is_popped:
        yield _make_retry_values(facts, retry)


def _find_pending_pop(facts: DeliveryFacts) -> Iterator[Values]:
    retry = facts.last_retry
    if retry is not None and not retry.is_past and retry.is_popped:
        yield _make_retry_values(facts, retry)


def _make_retry_values(facts: DeliveryFacts, retry: RetryFacts) -> Values:
    """Return the values of a finding's text about a copy of the message that waits for a retry.

    `retry` describes the copy; `facts` are those about the message in its group.
    """
    when = "waits in the retry topic"
    if retry.due_ms is not None:
        left_s = max((retry.due_ms - facts.group.now_ms) / 1000, 0)
        when = f"will be delivered in {left_s:.0f} s"
    config = facts.group.config
    return {
        "group": facts.group.name,
        "times": retry.times,
        "times_max": _RETRIES_MAX if config is None else config.retry_times_max,
        "when": when,
    }


def _find_offset_past_message(facts: DeliveryFacts) -> Iterator[Values]:
    """Yield the group's committed offset if it is beyond the message.

    Nothing is yielded if it is also beyond the end of the queue, which another rule reports.
    `evidence` says what traces show: a committed offset does not prove that the message was
    processed.
    """
    offset = facts.message.message.queue_offset
    committed = facts.committed
    if committed is None or not offset < committed <= facts.message.offset_max:
        return
    evidence = (
        "No trace shows whether it was processed: it was, or the group started behind it or was "
        "reset past it, or another filter dropped it"
    )
    if facts.trace is not None and facts.trace.deliveries:
        evidence = f"Its traces report {', '.join(facts.trace.results)}"
    yield {
        "group": facts.group.name,
        "committed": committed,
        "offset": offset,
        "evidence": evidence,
    }


def _count_messages_ahead(facts: DeliveryFacts) -> Iterator[Values]:
    """Yield {"count", "reader"}: how many messages the group must read first, and who reads.

    The dictionary has the values of the finding's text.
    """
    offset = facts.message.message.queue_offset
    begin = facts.message.offset_min
    owner = facts.owner
    reader = "which member reads its queue is unknown" if owner is None else f"{owner} reads it"
    yield {"count": max(0, offset - max(facts.committed or 0, begin)), "reader": reader}


DEAD_LETTER: Final = Rule(
    Code.DEAD_LETTER,
    _find_dead_letter,
    "{group} failed to process the message {times} times, so it was moved to the dead-letter "
    "topic {topic}.",
    "Fix the handler, then consume {topic} or send the message again.",
)
IN_FLIGHT: Final = Rule(
    Code.IN_FLIGHT,
    _find_popped_delivery,
    "{client} popped it {since_s:.0f} s ago (delivery {times}). Unless it is acknowledged, it will "
    "be delivered again in {left_s:.0f} s.",
    severity=Severity.DETAIL,
)
RETRY_PENDING: Final = Rule(
    Code.RETRY_PENDING,
    _find_pending_retry,
    "A handler of {group} failed to process it {times} times (of {times_max}); a copy {when}.",
    "Look in the log of the consumer for the reason.",
    Severity.NOTE,
)
POP_PENDING: Final = Rule(
    Code.RETRY_PENDING,
    _find_pending_pop,
    "{group} popped it {times} times and did not acknowledge it in time; a copy {when}.",
    "Look in the log of the consumer for the reason, or make the invisible time longer.",
    Severity.NOTE,
)
OFFSET_PAST: Final = Rule(
    Code.OFFSET_PAST,
    _find_offset_past_message,
    "The committed offset of {group} is {committed}, past the message at {offset}. {evidence}.",
    'Move the group back with "sluice group reset", or have one message processed again with '
    '"sluice message consume".',
    Severity.DETAIL,
)
MESSAGES_AHEAD: Final = Rule(
    Code.BEHIND,
    _count_messages_ahead,
    "{count} messages of its queue come before it; {reader}.",
    severity=Severity.NOTE,
)

FATE_RULES: Final = (
    (Fate.DEAD, DEAD_LETTER),
    (Fate.IN_FLIGHT, IN_FLIGHT),
    (Fate.RETRY, RETRY_PENDING),
    (Fate.RETRY, POP_PENDING),
)
"""The fates that follow from a copy of the message, in the order in which they are looked for."""


# ----------------------------------------------------------------------- bodies and lanes


def _find_undecodable_body(message: StoredMessage) -> Iterator[Values]:
    error = message.body_error
    if error is not None:
        yield {"reason": error.reason, "fix": error.fix}


@dataclass(frozen=True, slots=True)
class LaneChoice:
    """The lane of a group to which a message belongs, None if no lane matches the message."""

    facts: DeliveryFacts
    lane: LaneFacts | None


def _find_missing_lane(choice: LaneChoice) -> Iterator[Values]:
    """Yield {"group", "count", "lanes"} if the message belongs to no lane of the group.

    The dictionary has the values of the finding's text.
    """
    if choice.lane is None:
        lanes = choice.facts.lanes
        yield {
            "group": choice.facts.group.name,
            "count": len(lanes),
            "lanes": "; ".join(map(str, lanes)),
        }


def _make_lane_values(choice: LaneChoice, lane: LaneFacts) -> dict[str, object]:
    """Return the values of a finding's text about the lane to which the message belongs."""
    offset = lane.offset
    return {
        "group": choice.facts.group.name,
        "count": len(choice.facts.lanes),
        "offset": choice.facts.message.message.queue_offset,
        "lane": lane,
        "place": "has no offset in its queue" if offset is None else f"is at {offset}",
        "members": ", ".join(lane.members),
    }


def _find_lane_with_members(choice: LaneChoice) -> Iterator[Values]:
    if choice.lane is not None and choice.lane.members:
        yield _make_lane_values(choice, choice.lane)


def _find_lane_without_members(choice: LaneChoice) -> Iterator[Values]:
    if choice.lane is not None and not choice.lane.members:
        yield _make_lane_values(choice, choice.lane)


_IN_LANE: Final = (
    "{group} has {count} lanes; the message at {offset} belongs to {lane}, which {place} and has "
)
UNDECODABLE: Final = Rule(
    Code.UNDECODABLE,
    _find_undecodable_body,
    "The body of the message cannot be decoded: {reason}.",
    "{fix}",
    Severity.DETAIL,
)
NO_LANE: Final = Rule(
    Code.NO_LANE,
    _find_missing_lane,
    "None of the {count} lanes of {group} matches the message: {lanes}.",
    "No member will receive it until a consumer joins the group with a subscription that matches.",
)
IN_LANE: Final = Rule(
    Code.LANE, _find_lane_with_members, _IN_LANE + "{members}.", severity=Severity.DETAIL
)
IN_ABANDONED_LANE: Final = Rule(
    Code.LANE,
    _find_lane_without_members,
    _IN_LANE + "no member.",
    LANE_WITHOUT_MEMBER_FIX,
    Severity.DETAIL,
)
LANE_CHOICE_RULES: Final = (NO_LANE, IN_LANE, IN_ABANDONED_LANE)


# ----------------------------------------------------------------------------- explanation


def explain_message(facts: DeliveryFacts) -> MessageExplained:
    """Return the fate of a message in a group, and why.

    If the body of the message cannot be decoded, the last finding says so: that may be the reason
    why a handler fails.
    """
    explained = _explain(facts)
    undecodable = judge([UNDECODABLE], facts.message.message)
    return replace(explained, findings=(*explained.findings, *undecodable))


def _explain(facts: DeliveryFacts) -> MessageExplained:
    """Return the fate of a message in a group, with the findings that explain it.

    Bodies that consumers could not decode are not considered here. The fate is UNKNOWN if no broker
    knows the group.
    """
    group = facts.group
    if group.config is None:
        unknown = judge([NO_SUCH_GROUP], group)
        return MessageExplained(group.name, Fate.UNKNOWN, tuple(unknown))
    if facts.lanes:
        return _explain_in_lanes(facts)

    subscription = facts.in_topic.subscription
    verdict, mismatch = verdict_on(facts.message.message, subscription)
    fate, findings = _judge_fate(facts, mismatch)
    if subscription is not None:
        findings += judge([IGNORED_TEXT], subscription)
    findings += judge([UNEQUAL], facts.in_topic)
    return MessageExplained(
        group.name, fate, tuple(findings), _count_times(fate, facts), verdict, facts.owner
    )


_Verdicts = dict[str, tuple[Explanation | None, Finding | None]]
"""The results of `verdict_on` by lane."""


def _explain_in_lanes(facts: DeliveryFacts) -> MessageExplained:
    """Return the fate of a message in a group whose members are divided into lanes.

    A lane is a subgroup of members with the same filter, with offsets of its own. The fate is
    judged by the members, the filter and the offset of the lane to which the message belongs.
    """
    message = facts.message.message
    verdicts = {lane.lane: verdict_on(message, lane.subscription) for lane in facts.lanes}
    lane = _find_lane(facts, verdicts)
    if lane is None:
        return _explain_without_lane(facts, verdicts)

    in_lane = _limit_to_lane(facts, lane)
    verdict, mismatch = verdicts[lane.lane]
    fate, findings = _judge_fate(in_lane, mismatch)
    if not lane.members and fate is Fate.OFFLINE:
        findings = []  # the group may have members; the finding about the lane says what is missing
    findings[1:1] = judge(LANE_CHOICE_RULES, LaneChoice(facts, lane))
    if lane.subscription is not None:
        findings += judge([IGNORED_TEXT], lane.subscription)
    findings += judge([UNEQUAL_IN_LANES], facts.in_topic)
    return MessageExplained(
        facts.group.name, fate, tuple(findings), _count_times(fate, in_lane), verdict, in_lane.owner
    )


def _explain_without_lane(facts: DeliveryFacts, verdicts: _Verdicts) -> MessageExplained:
    """Return the fate of a message that no lane of the group matches.

    The findings say for each lane why its filter does not match. `verdicts` are the results of the
    filters by lane.
    """
    fate, findings = _judge_fate(replace(facts, committed=None), None)
    if fate in {Fate.WAITING, Fate.OFFLINE}:
        fate = Fate.FILTERED
        findings = judge(LANE_CHOICE_RULES, LaneChoice(facts, None))
        for name, (_, mismatch) in verdicts.items():
            if mismatch is not None:
                findings.append(replace(mismatch, what=f"Lane {name}: {mismatch.what}"))
    findings += judge([UNEQUAL_IN_LANES], facts.in_topic)
    return MessageExplained(facts.group.name, fate, tuple(findings), _count_times(fate, facts))


def _limit_to_lane(facts: DeliveryFacts, lane: LaneFacts) -> DeliveryFacts:
    """Return the facts with the lane in place of the group: its members, filter and offset."""
    subscriptions = {}
    if lane.subscription is not None:
        subscriptions[facts.topic] = lane.subscription
    members = [member for member in facts.group.members if member.client_id in lane.members]
    return replace(
        facts,
        group=replace(facts.group, members=members, subscriptions=subscriptions),
        committed=lane.offset,
        fetched=None,  # brokers report it of the whole group only
    )


def _find_lane(facts: DeliveryFacts, verdicts: _Verdicts) -> LaneFacts | None:
    """Return the lane to which the message belongs, None if no filter of a lane matches it.

    It is the oldest matching lane whose offset is beyond the message. If no matching lane is that
    far, it is the oldest matching lane.
    """
    oldest_matching = None
    for lane in facts.lanes:  # the oldest comes first
        _, mismatch = verdicts[lane.lane]
        if lane.subscription is None or mismatch is not None:
            continue
        has_passed = (lane.offset or 0) > facts.message.message.queue_offset
        if has_passed:
            return lane
        oldest_matching = oldest_matching or lane
    return oldest_matching


def _count_times(fate: Fate, facts: DeliveryFacts) -> int:
    """Return how often the message was delivered or retried, according to its fate.

    This is the number of failures of a dead letter, the number of deliveries of a popped message,
    and otherwise the number of retries so far (0 if there were none).
    """
    if fate is Fate.DEAD:
        return max(message.reconsume_times for message in facts.dead_letters)
    if fate is Fate.IN_FLIGHT and facts.popped is not None:
        return facts.popped.delivery_count
    return 0 if facts.last_retry is None else facts.last_retry.times


def _judge_fate(facts: DeliveryFacts, mismatch: Finding | None) -> tuple[Fate, list[Finding]]:
    """Return the fate of a message in a group, and the findings that explain it.

    `mismatch` says why the group's filter does not match the message; None means that it matches.
    """
    for fate, rule in FATE_RULES:
        if findings := judge([rule], facts):
            return fate, findings
    if facts.is_known_consumed:
        return Fate.CONSUMED, []
    if mismatch is not None and mismatch.code is not Code.BROKEN_FILTER:
        return Fate.FILTERED, [mismatch]
    if findings := judge([OFFSET_PAST], facts):
        return Fate.CONSUMED, findings

    # The group has not reached the message: say what prevents it, or how far it is away.
    findings = judge([BEYOND_END], _make_queue_facts(facts))
    if mismatch is not None:
        findings.append(mismatch)
    findings += _find_hindrances(facts)
    if not findings:
        findings = judge([MESSAGES_AHEAD], facts)
    return Fate.WAITING if facts.group.members else Fate.OFFLINE, findings


def _make_queue_facts(facts: DeliveryFacts) -> GroupQueueFacts:
    """Return the facts about the group in the message's queue."""
    group = facts.in_topic.group
    return GroupQueueFacts(group, group.progress[0])


def _find_hindrances(facts: DeliveryFacts) -> list[Finding]:
    """Return findings about what keeps the group from reading on to the message.

    For example the group has no members, or no member reads the message's queue. The result is
    empty if nothing does.
    """
    in_topic = facts.in_topic
    queue_facts = _make_queue_facts(facts)
    findings = judge([CONSUMING_OFF], facts.group) + judge(ROUTE_RULES, in_topic)
    if not facts.group.members:
        return findings + judge([NO_MEMBER], facts.group)

    findings += judge([NOT_SUBSCRIBED], in_topic)
    if facts.owner == "":
        findings += judge([QUEUE_IDLE], queue_facts) + judge([MEMBER_IDLE], facts.group)
    elif facts.fetched is not None and facts.fetched > facts.message.message.queue_offset:
        findings += judge([NOT_ACKNOWLEDGING, IN_HAND], queue_facts)
    return findings
