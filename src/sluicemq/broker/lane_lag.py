"""Lag of a group with lanes: what each lane still has to get, by its own offset and rules.

The group's own offset is the least of its lanes': from there on most may be delivered already. A
lane's messages are those from its place on that its rules there want. The rules of a group exclude
each other, so the sum over the lanes is what nobody was given yet, each message once.
"""

from dataclasses import dataclass, replace

from sluicemq.broker.background import Steps
from sluicemq.broker.lane_places import Place
from sluicemq.broker.lane_rules import Rule
from sluicemq.broker.lanes import GroupLanes, Lane
from sluicemq.broker.matching import Matching, Tally, Wanted


@dataclass(frozen=True, slots=True)
class LaneTally:
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
