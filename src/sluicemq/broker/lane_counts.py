"""How many messages no lane of a group wants: counted a slice at a time, behind the last lane.

Only what every lane has passed is counted, so that a lane which comes meanwhile and wants it is
heard. What no lane matches is lost to the group as it is in RocketMQ, but here somebody can see it.
"""

from typing import Final

from sluicemq.broker.lane_rules import Rule, atoms_of, claimed, clause
from sluicemq.broker.lanes import GroupLanes, Queue

EVALUATIONS_MAX: Final = 4096
"""Of expressions, for a queue each second: what is counted may lag behind."""


def count_unmatched(lanes: GroupLanes) -> None:
    """Messages that every lane has passed and none wants, a slice of each queue."""
    live, idle = lanes.ordered()
    for topic in {topic for key in (*live, *idle) for topic in atoms_of(key)}:
        orders = [order for keys in (live, idle) for order in claimed(topic, keys) if order]
        rule = clause([], *orders)
        room = EVALUATIONS_MAX // (1 + sum(1 for order in orders for _ in order.others())) + 1
        queues = {q for lane in lanes.lanes.values() for q in lane.places if q[0] == topic}
        for queue in sorted(queues):
            _count(lanes, queue, rule, room)


def _count(lanes: GroupLanes, queue: Queue, rule: Rule, room: int) -> None:
    places = [lane.places[queue] for lane in lanes.lanes.values() if queue in lane.places]
    least = min(place.position for place in places)
    here = lanes.counted.setdefault(queue, least)
    if here < least:
        if rule:
            here, found = lanes.parts.count(queue, here, rule, min(least, here + room))
            lanes.unmatched += found
        else:
            here = least
        lanes.counted[queue] = here
