"""Why a group has or has not got a message, and why it is idle or behind: facts in, findings out.

Pure. What was asked of brokers and members are facts; what could not be learned is None and is
said, never guessed. Everything here follows from requests that a RocketMQ broker answers too; what
only ours tells (until when a retry waits, how many messages match) makes the answer sharper.

A message's fate in a group:

    dead        its copy is in the dead letters
    retry       a copy of it waits, or is to be consumed again: the n-th time
    filtered    the group's filter does not let it through: the atoms that decide are named
    consumed    the group's offset is past it, and nothing speaks against it
    offline     it is before the group, and no member is there
    waiting     it is before the group, with the reason when there is one
    unknown     there is no such group, or nothing is known of it
"""

from dataclasses import replace

from sluicemq.client.core.facts import (
    Code,
    Fate,
    Finding,
    GroupExplained,
    GroupFacts,
    GroupState,
    MessageExplained,
    MessageFacts,
)
from sluicemq.client.core.findings import (
    ahead,
    behind,
    broken,
    compiles,
    consuming_off,
    dead,
    failures,
    idle_members,
    ignored_text,
    matching_of,
    no_member,
    no_route,
    no_such_group,
    not_subscribed,
    offset_past,
    owner_of,
    queue_idle,
    retries_before,
    retry_pending,
    stuck,
    unacknowledged,
    unequal,
    verdict_on,
)
from sluicemq.client.core.lane_findings import (
    as_lane,
    behind_in_lanes,
    by_contract,
    in_lane,
    lane_of,
    laned_topics,
    no_lane,
)
from sluicemq.model.topic import RETRY_PREFIX


def explain_message(about: MessageFacts, group: GroupFacts) -> MessageExplained:
    """The fate of a message in a group, with its causes."""
    if group.config is None:
        return MessageExplained(group.name, Fate.UNKNOWN, (no_such_group(group.name),))
    topic = about.message.topic
    if group.lanes:
        return _explain_in_lanes(about, group)
    owner = owner_of(about.queue, group.members)
    said = group.subscriptions.get(topic)
    verdict, filtering = verdict_on(about.message, said)
    common = [*ignored_text(said), *unequal(group.members, topic)]
    fate, times, found = _fate(about, group, owner, filtering)
    return MessageExplained(group.name, fate, (*found, *common), times, verdict, owner)


def _explain_in_lanes(about: MessageFacts, group: GroupFacts) -> MessageExplained:
    """By the lane it belongs to: that one's members, expression and offset."""
    lane = lane_of(about, group)
    common = unequal(group.members, about.message.topic, lanes=True)
    if lane is None:
        fate, times, found = _fate(about, replace(group, committed=None), None, None)
        if fate in {Fate.WAITING, Fate.OFFLINE}:
            fate, found = Fate.FILTERED, no_lane(about, group)
        return MessageExplained(group.name, fate, (*found, *common), times)
    common = [*ignored_text(lane.subscription), *common]
    own = as_lane(group, lane)
    owner = owner_of(about.queue, own.members)
    verdict, filtering = verdict_on(about.message, lane.subscription)
    fate, times, found = _fate(about, own, owner, filtering)
    if not lane.members and fate is Fate.OFFLINE:
        found = []  # the group may have members: the lane says what is missing
    found.insert(0 if not found else 1, in_lane(about, group, lane))
    return MessageExplained(group.name, fate, (*found, *common), times, verdict, owner)


def _fate(
    about: MessageFacts, group: GroupFacts, owner: str | None, filtering: Finding | None
) -> tuple[Fate, int, list[Finding]]:
    if group.dead:
        times = max(message.reconsume_times for message in group.dead)
        return Fate.DEAD, times, [dead(group, times)]
    last = max(group.copies, key=lambda copy: copy.times, default=None)
    if last is not None and not last.is_past:
        return Fate.RETRY, last.times, [retry_pending(group, last)]
    if last is not None or (group.traced is not None and group.traced.consumed):
        return Fate.CONSUMED, last.times if last is not None else 0, []
    if filtering is not None and filtering.code is not Code.BROKEN_FILTER:
        return Fate.FILTERED, 0, [filtering]
    offset = about.message.queue_offset
    if group.committed is not None and group.committed > offset:
        return Fate.CONSUMED, 0, [offset_past(about, group)]
    blocking = [] if filtering is None else [filtering]
    return (*_before(about, group, owner, blocking),)


def _before(
    about: MessageFacts, group: GroupFacts, owner: str | None, found: list[Finding]
) -> tuple[Fate, int, list[Finding]]:
    """The message is before the group: why has it not come?"""
    topic, broker = about.message.topic, about.message.broker
    if group.config is not None and not group.config.consume_enable:
        found.append(consuming_off(group.name))
    found += no_route(topic, [broker], about.routed)
    if not group.members:
        found.append(no_member(group.name))
        return Fate.OFFLINE, 0, found
    if topic not in group.subscriptions:
        found.append(not_subscribed(group, topic))
    if owner == "":
        found += [queue_idle(about.queue, group), *idle_members(group.members)]
    elif group.fetched is not None and group.fetched > about.message.queue_offset:
        found.append(unacknowledged(about.queue, group, owner, group.fetched))
    if not found:
        found.append(ahead(about, group, owner))
    return Fate.WAITING, 0, found


def explain_group(state: GroupState) -> GroupExplained:
    """Why a group is idle or behind."""
    group = state.facts
    lag = sum(item.lag for item in state.queues)
    matching = matching_of(state)
    if group.config is None:
        return GroupExplained(group.name, (no_such_group(group.name),), lag, matching)
    found: list[Finding] = []
    if not group.config.consume_enable:
        found.append(consuming_off(group.name))
    if not group.members:
        found.append(no_member(group.name))
    for topic in sorted({*group.subscriptions, *(item.queue.topic for item in state.queues)}):
        found += _of_topic(state, topic)
    if all(member.queues is not None for member in group.members):
        found += idle_members(group.members)
    laned = laned_topics(state)
    found += stuck(group, [item for item in state.queues if item.queue.topic not in laned])
    found += behind_in_lanes(state)
    found += by_contract(state)
    found += failures(state)
    if lag and not found:
        found.append(behind(state, lag, matching))
    return GroupExplained(group.name, tuple(found), lag, matching)


def _of_topic(state: GroupState, topic: str) -> list[Finding]:
    group = state.facts
    own = [item for item in state.queues if item.queue.topic == topic]
    if topic.startswith(RETRY_PREFIX):
        waiting = sum(item.lag for item in own)
        return [retries_before(group.name, waiting)] if waiting else []
    is_laned = topic in laned_topics(state)
    found = unequal(group.members, topic, lanes=is_laned)
    said = group.subscriptions.get(topic)
    if said is None and group.members:
        found.append(not_subscribed(group, topic))
    elif said is not None and not compiles(said):
        found.append(broken(said))
    found += ignored_text(said)
    brokers = {item.queue.broker for item in own}
    found += no_route(topic, brokers, state.routed.get(topic))
    if is_laned:  # every lane has readers of its own
        return found
    if group.members and all(member.queues is not None for member in group.members):
        idle = [item.queue for item in own if owner_of(item.queue, group.members) == ""]
        routed = state.routed.get(topic) or frozenset()
        found += [queue_idle(queue, group) for queue in idle if queue.broker in routed]
    return found
