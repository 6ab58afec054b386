"""What the lanes of a group explain (docs/design/0009-lanes.md).

A message goes to the oldest lane that matches it. What a lane gets from another that is idle is
not told by the broker: so a message that some matching lane is past counts as consumed.

A lane is looked at like a group: its members read all queues between them, from its own offsets.
What a broker tells of fetched offsets is the whole group's; so what a lane's members have in hand
is what they say themselves.
"""

from collections.abc import Iterator
from dataclasses import replace

from sluicemq.client.core.facts import (
    Code,
    Finding,
    GroupFacts,
    GroupState,
    LaneFacts,
    MessageFacts,
    QueueFacts,
)
from sluicemq.client.core.findings import owner_of, queue_idle, stuck, verdict_on
from sluicemq.model.topic import RETRY_PREFIX, MessageQueue
from sluicemq.protocol.bodies import LaneMatching


def lane_of(about: MessageFacts, group: GroupFacts) -> LaneFacts | None:
    """The lane that the message belongs to; None when no lane matches it."""
    wanted = [lane for lane in group.lanes if _wants(about, lane)]
    past = (lane for lane in wanted if (lane.offset or 0) > about.message.queue_offset)
    return next(past, wanted[0] if wanted else None)


def _wants(about: MessageFacts, lane: LaneFacts) -> bool:
    said = lane.subscription
    return said is not None and verdict_on(about.message, said)[1] is None


def as_lane(group: GroupFacts, lane: LaneFacts) -> GroupFacts:
    """The group as its lane sees it: its own members, subscription and offset."""
    said = lane.subscription
    return replace(
        group,
        members=[member for member in group.members if member.client_id in lane.members],
        subscriptions={} if said is None else {said.topic: said},
        committed=lane.offset,
        fetched=None,  # a broker tells it for the whole group only
    )


def in_lane(about: MessageFacts, group: GroupFacts, lane: LaneFacts) -> Finding:
    """Whose it is."""
    members = ", ".join(lane.members) or "no member"
    place = "has no offset in its queue" if lane.offset is None else f"is at {lane.offset}"
    cure = "" if lane.members else _CURE_NO_MEMBER
    return Finding(
        Code.LANE,
        f"{group.name} has {len(group.lanes)} lanes; the message at {about.message.queue_offset} "
        f"belongs to {_named(lane)}, which {place} and has {members}.",
        cure,
    )


_CURE_NO_MEMBER = (
    "Start a consumer with that subscription. After half a minute other lanes take over what they "
    "match; the rest waits for a day."
)


def no_lane(about: MessageFacts, group: GroupFacts) -> list[Finding]:
    """No member wants it: said once, and of each lane why."""
    names = "; ".join(_named(lane) for lane in group.lanes)
    what = f"None of the {len(group.lanes)} lanes of {group.name} matches it: {names}."
    cure = "Nobody is given it. A consumer of the group whose subscription matches would be."
    found = [Finding(Code.NO_LANE, what, cure)]
    for lane in group.lanes:
        why = verdict_on(about.message, lane.subscription)[1]
        if why is not None:
            found.append(replace(why, what=f"Lane {lane.lane}: {why.what}"))
    return found


def _named(lane: LaneFacts) -> str:
    said = lane.subscription
    text = "another topic" if said is None else f"{said.topic}: {said.expression}"
    return f"lane {lane.lane} ({text})"


# ------------------------------------------------------------------------------- whole groups


def laned_topics(state: GroupState) -> frozenset[str]:
    """The topics on which some broker has lanes of this group."""
    return frozenset(topic.topic for _, topic in state.matching if topic.lanes)


def behind_in_lanes(state: GroupState) -> list[Finding]:
    """What each lane still has to get, and what keeps it from that."""
    found: list[Finding] = []
    for broker, counted in state.matching:
        for lane in counted.lanes if not counted.topic.startswith(RETRY_PREFIX) else ():
            waiting = sum(queue.matching or 0 for queue in lane.queues)
            if waiting:
                found.append(_waiting(counted.topic, broker, lane, waiting))
                found += _of_members(state, counted.topic, broker, lane)
    return found


def _waiting(topic: str, broker: str, lane: LaneMatching, count: int) -> Finding:
    where = f"{count} messages of {topic} on {broker} wait for lane {lane.lane} ({lane.expression})"
    if lane.client_ids:
        return Finding(Code.LANE, f"{where}, which {', '.join(lane.client_ids)} read.")
    return Finding(Code.LANE, f"{where}, which has no member.", _CURE_NO_MEMBER)


def _of_members(
    state: GroupState, topic: str, broker: str, lane: LaneMatching
) -> Iterator[Finding]:
    """Queues that none of a lane's members reads, and members that have messages and finish none.
    Nothing while a member does not tell what it reads."""
    members = [one for one in state.facts.members if one.client_id in lane.client_ids]
    if not members or any(one.queues is None for one in members):
        return
    group = replace(state.facts, name=f"lane {lane.lane}", members=members)
    queues = []
    for one in lane.queues:
        queue = MessageQueue(topic, broker, one.queue_id)
        if one.matching and owner_of(queue, members) == "":
            yield queue_idle(queue, group)
        held = [m.queues[queue] for m in members if m.queues and queue in m.queues]
        fetched = max((own.cached_max + 1 for own in held if own.cached_count), default=None)
        queues.append(QueueFacts(queue, max(0, one.committed), one.offset_max, fetched))
    yield from stuck(group, queues)


def by_contract(state: GroupState) -> Iterator[Finding]:
    """Clients that a strict group refuses, and what brokers no longer remember of who left."""
    for told in state.contracts:
        for client_id, why in told.refused.items():
            yield Finding(Code.REFUSED, f"{told.broker} refuses {client_id}: {why}")
        for said in told.forgotten:
            yield Finding(
                Code.FORGOTTEN,
                f"{told.broker} forgot the subscription {said['subscription']}, which had no "
                f"member, because {said['why']}; at most {said['messagesMax']:,} messages waited.",
            )
