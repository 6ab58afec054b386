"""Which lane of a group a message belongs to (docs/design/0009-lanes.md), and what that explains.

A message goes to the oldest lane that matches it. What a lane gets from another that is idle is
not told by the broker: so a message that some matching lane is past counts as consumed.
"""

from dataclasses import replace

from sluicemq.client.core.facts import Code, Finding, GroupFacts, LaneFacts, MessageFacts
from sluicemq.client.core.findings import verdict_on


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
    cure = "" if lane.members else (
        "Start a consumer with that subscription. After half a minute other lanes take over what "
        "they match; the rest waits for a day."
    )  # fmt: skip
    return Finding(
        Code.LANE,
        f"{group.name} has {len(group.lanes)} lanes; the message at {about.message.queue_offset} "
        f"belongs to {_named(lane)}, which {place} and has {members}.",
        cure,
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
