"""A group's lanes as tools see them (900133), and as they stand in config/sluiceLanes.json."""

from typing import Any

from sluicemq.broker.lane_places import place_from, place_object
from sluicemq.broker.lane_rules import parse_key
from sluicemq.broker.lanes import GroupLanes, Lane


def show(lanes: GroupLanes) -> list[dict[str, Any]]:
    """The lanes as tools see them, the oldest first."""
    live, idle = lanes.ordered()
    return [
        {
            "clientIds": sorted(lane.members),
            "isIdle": lane.is_idle,
            "lane": lane.id,
            "leftTimestamp": lane.left_ms or 0,
            "queues": [
                {"offset": p.position, "maxOffset": lanes.parts.end(q), "queueId": q[1],
                 "topic": q[0]}
                for q, p in sorted(lane.places.items())
            ],
            "subscriptions": {t: list(atom) for t, atom in parse_key(lane.key).items()},
        }
        for lane in map(lanes.lanes.__getitem__, (*live, *idle))
    ]  # fmt: skip


def to_object(lanes: GroupLanes) -> dict[str, Any]:
    return {
        "group": lanes.name,
        "lanes": [
            {
                "idleMs": lane.idle_ms,
                "isIdle": lane.is_idle,
                "number": lane.number,
                "offers": sorted(lane.offers),
                "orphans": sorted(lane.orphans),
                "places": [[*queue, place_object(p)] for queue, p in lane.places.items()],
                "subscription": lane.key,
            }
            for lane in lanes.lanes.values()
        ],
        "movers": lanes.movers.objects(lambda key: _members(lanes, key)),
        "resets": lanes.resets.objects(),
        "unmatched": lanes.unmatched,
    }


def _members(lanes: GroupLanes, key: str) -> set[str]:
    lane = lanes.lanes.get(key)
    return lane.members if lane is not None else set()


def load(lanes: GroupLanes, value: Any) -> None:
    """Raises KeyError, TypeError, ValueError. A broker that knows no lanes may have gone on
    meanwhile, from the group's own offset: what is before that is done."""
    now = lanes.parts.clock.now_ms()
    for item in value["lanes"]:
        lane = Lane(str(item["subscription"]), int(item["number"]), left_ms=now)
        lane.is_idle, lane.idle_ms = bool(item["isIdle"]), int(item["idleMs"])
        lane.offers = {(str(topic), int(queue_id)) for topic, queue_id in item["offers"]}
        lane.orphans = {(str(topic), int(queue_id)) for topic, queue_id in item.get("orphans", ())}
        for topic, queue_id, place in item["places"]:
            known = lane.places[str(topic), int(queue_id)] = place_from(place)
            done = lanes.parts.offsets.committed(lanes.name, str(topic), int(queue_id))
            if done > known.position:
                known.commit(done)
        parse_key(lane.key)
        lanes.lanes[lane.key] = lane
        lanes.number = max(lanes.number, lane.number)
    lanes.movers.load(value.get("movers", ()))
    lanes.resets.load(value.get("resets", ()))
    lanes.unmatched = int(value.get("unmatched", 0))
