"""Lanes of those who left: many become few, and none is dropped without a word.

An idle lane costs a look at each of its queues every second. Of more than `IDLE_MAX` two that left
one after the other become a wider one, which has the spans of both: so nothing is lost and nothing
comes twice, and who is back takes from it the clauses that its own subscription must match. Of more
than `DEPARTED_MAX` subscriptions the lane that left first is given up, which the log and tools say.
"""

import logging
from typing import TYPE_CHECKING, Final

from sluicemq.broker.lane_places import Place, joined
from sluicemq.broker.lane_rules import NOTHING, merged_key, own_atoms, parts_of

if TYPE_CHECKING:
    from sluicemq.broker.lanes import GroupLanes, Lane

log = logging.getLogger(__name__)

IDLE_MAX: Final = 16
"""Lanes."""
DEPARTED_MAX: Final = 1000
"""Subscriptions in them."""
MERGES_PER_TICK: Final = 16
SUBSCRIPTIONS_LOGGED: Final = 8


def merge(lanes: "GroupLanes") -> None:
    """Once a second: of the lanes that left one after the other those with the fewest subscriptions
    become one, but none that a member still has something in hand of."""
    idle = lanes.idle()
    if len(idle) > IDLE_MAX:
        read = lanes.movers.lanes_read()
        idle = [lane for lane in idle if lane.key not in read]
    for _ in range(min(len(idle) - IDLE_MAX, MERGES_PER_TICK)):
        counts = [len(parts_of(lane.key)) for lane in idle]
        at = min(range(len(idle) - 1), key=lambda at: counts[at] + counts[at + 1])
        idle[at : at + 2] = [_unite(lanes, idle[at], idle[at + 1])]
    while sum(len(parts_of(lane.key)) for lane in idle) > DEPARTED_MAX:
        why = f"more than {DEPARTED_MAX} subscriptions left the group within a day"
        give_up(lanes, idle.pop(0), why)


def _unite(lanes: "GroupLanes", first: "Lane", second: "Lane") -> "Lane":
    """One lane that has what two idle ones had, and is as old as the younger."""
    for lane in (first, second):
        lanes.remove(lane)
    names = f"{first.id} and {second.id}"
    for queue, place in first.places.items():
        other = second.places.get(queue)
        if other is None:
            second.places[queue] = place
            continue
        here = min(place.position, other.position)
        spans = joined([*place.cut(place.position), *other.cut(other.position)])
        offset = here if max(place.offset, other.offset) >= 0 else -1
        second.places[queue] = Place(offset, here, spans)
    second.key = merged_key({*parts_of(first.key), *parts_of(second.key)})
    second.offers |= first.offers
    second.orphans.clear()
    lanes.lanes[second.key] = second
    lanes.parts.save(lanes.name)
    log.info("group %s: the idle lanes %s are one: %s", lanes.name, names, second.id)
    return second


def take_out(lanes: "GroupLanes", key: str) -> "Lane | None":
    """A subscription that shares a lane is back: it goes on with what is its own."""
    shared = next((lane for lane in lanes.idle() if key in parts_of(lane.key)), None)
    if shared is None:
        return None
    lanes.remove(shared)
    lane = type(shared)(key, lanes.next_number())
    for queue, place in shared.places.items():
        own = own_atoms(queue[0], key)
        if own:
            mine = [span for span in place.cut(place.position) if span.clause.must & own]
            place.spans = [span for span in place.spans if not span.clause.must & own]
            at = min((span.first for span in mine), default=lanes.parts.end(queue))
            lane.places[queue] = Place(at if place.offset >= 0 else -1, at, mine, scanned=at)
    rest = [part for part in parts_of(shared.key) if part != key]
    shared.key = merged_key(rest) if len(rest) > 1 else rest[0]
    lanes.lanes[shared.key] = shared
    lanes.lanes[key] = lane
    log.info("group %s: lane %s is back: %s", lanes.name, lane.id, key)
    return lane


def give_up(lanes: "GroupLanes", lane: "Lane", why: str) -> None:
    """What an idle lane has not read is nobody's from now on, and that is said."""
    now_ms = lanes.parts.clock.now_ms()
    left = sum(
        lanes.parts.end(queue) - place.position
        for queue, place in lane.places.items()
        if place.rule_at(place.position) != (NOTHING, None)
    )
    parts = parts_of(lane.key)
    for part in parts:
        lanes.forgotten.append(
            {"messagesMax": left, "subscription": part, "timestamp": now_ms, "why": why}
        )
    log.warning(
        "group %s forgets %d subscription(s) without members, because %s: %s%s. They had not "
        "looked at %d messages; what they wanted of them is nobody's now.",
        lanes.name, len(parts), why, ", ".join(parts[:SUBSCRIPTIONS_LOGGED]),
        ", ..." if len(parts) > SUBSCRIPTIONS_LOGGED else "", left,
    )  # fmt: skip
    lanes.forget(lane)
