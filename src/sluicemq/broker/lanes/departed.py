"""Lanes of those who left: others take over what they want of theirs, the rest waits; many become
few, and none is dropped without a word.

An idle lane costs a look at each of its queues every second. Of more than `IDLE_MAX` two that left
one after the other become a wider one, which has the spans of both: so nothing is lost and nothing
comes twice, and who is back takes from it the clauses that its own subscription must match. Of more
than `DEPARTED_MAX` subscriptions the lane that left first is given up, which the log and tools say.
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from sluicemq.broker.lanes.places import Place, Queue, Span, joined
from sluicemq.broker.lanes.rules import NOTHING, merged_key, own_atoms, parts_of
from sluicemq.model.topic import RETRY_PREFIX

if TYPE_CHECKING:
    from sluicemq.broker.lanes.group import GroupLanes, Lane

log = logging.getLogger(__name__)

IDLE_MAX: Final = 16
"""Lanes."""
DEPARTED_MAX: Final = 1000
"""Subscriptions in them."""
IN_HAND_MS: Final = 300_000
"""After so long a commit of somebody who changed lanes counts no more in a lane that is merged."""
MERGES_PER_TICK: Final = 16
SCANS_PER_TICK: Final = 8
SUBSCRIPTIONS_LOGGED: Final = 8


def wants_nothing(lanes: "GroupLanes", lane: "Lane") -> bool:
    """Do others want all that an idle lane wants, and is nothing left of it?"""
    return not lane.offers and all(
        place.position >= lanes.parts.end(queue)
        if queue[0].startswith(RETRY_PREFIX)
        else place.rule_at(place.position) == (NOTHING, None)
        for queue, place in lane.places.items()
    )


def skip(lanes: "GroupLanes", lane: "Lane") -> None:
    """A lane without members moves over what is not its own."""
    for queue, place in lane.places.items():
        for _ in range(SCANS_PER_TICK):
            here, end = place.position, lanes.parts.end(queue)
            if here >= end:
                break
            rule, until = place.rule_at(here)
            following, is_match = lanes.parts.next_match(queue, here, rule, until)
            if following > here:
                place.commit(following)
                lanes.publish(queue)
            if is_match or following <= here:
                break


def hand_over(
    lanes: "GroupLanes", lane: "Lane", queue: Queue, takers: Iterable[str] | None = None
) -> bool:
    """Offers what an idle lane has not read of a queue to the others, or some. False: not
    yet."""
    lanes.ensure(queue)
    if lanes.is_waited_for(lane, queue):
        return False
    place = lane.places[queue]
    here, end = place.position, lanes.parts.end(queue)
    _, rules, rest = lanes.claims(queue[0])
    gains: list[tuple[Lane, Place, list[Span]]] = []
    if here < end:
        for key in rules if takers is None else takers:
            other = lanes.lanes[key]
            # Without a place it does not want the queue: the retry topic of another group.
            if queue in other.places and (rule := rules.get(key)):
                gained = place.shared(here, end, rule)
                if gained:
                    gains.append((other, other.places[queue], gained))
    if any(not theirs.can_take(here) for _, theirs, _ in gains):
        lanes.held_ms.setdefault(queue, lanes.parts.clock.now_ms())
        return False
    for other, theirs, gained in gains:
        _give(lanes, other, theirs, queue, here, gained)
    place.keep_from(here, rest)
    lanes.held_ms.pop(queue, None)
    lanes.parts.look_again(queue)
    return True


def _give(
    lanes: "GroupLanes", lane: "Lane", place: Place, queue: Queue, here: int, gained: list[Span]
) -> None:
    before = max(place.scanned or 0, place.position)
    if before > here > place.position:
        place.commit(here)  # it has looked at all of that, and has nothing of it in hand
    place.take_up(gained)
    lanes.parts.changed()
    if before > here:
        place.go_back(here)
        lanes.resets.put(lane.key, *queue, here)
        lanes.publish(queue)
        log.info(
            "group %s: lane %s goes back on %s:%d from %d to %d, for what another lane left",
            lanes.name, lane.id, *queue, before, here,
        )  # fmt: skip


def merge(lanes: "GroupLanes") -> None:
    """Once a second: of the lanes that left one after the other those with the fewest subscriptions
    become one, but for some minutes none of which a member may have something in hand."""
    idle = lanes.idle()
    if len(idle) > IDLE_MAX:
        read, now_ms = lanes.movers.queues_read(), lanes.parts.clock.now_ms()
        idle = [
            lane
            for lane in idle
            if now_ms - lane.idle_ms > IN_HAND_MS
            or all(lane.places[q].is_at_rest for q in read.get(lane.key, ()) if q in lane.places)
        ]
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
