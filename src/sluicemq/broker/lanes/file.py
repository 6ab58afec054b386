"""A group's lanes as tools see them (900133), and as they stand in config/sluiceLanes.json.

Lanes share clauses, and clauses share orders: the file has a table of both, and spans name a clause
by its number there. Files of before have the clauses with each span, without orders.
"""

from typing import Any

from sluicemq.broker.lanes.filters import among
from sluicemq.broker.lanes.group import GroupLanes, Lane
from sluicemq.broker.lanes.places import NOBODY, Place, Span
from sluicemq.broker.lanes.rules import (
    Atom,
    Clause,
    Order,
    Rule,
    after,
    atoms_of,
    parts_of,
    tags_of,
)
from sluicemq.model.message import TAGS
from sluicemq.model.subscription import SQL92, TAG


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
                {"offset": p.position, "maxOffset": lanes.ground.end(q), "queueId": q[1],
                 "topic": q[0]}
                for q, p in sorted(lane.places.items())
            ],
            "subscriptions": {t: shown(atoms) for t, atoms in atoms_of(lane.key).items()},
            "subscriptionCount": len(parts_of(lane.key)),
        }
        for lane in map(lanes.lanes.__getitem__, (*live, *idle))
    ]  # fmt: skip


def shown(atoms: tuple[Atom, ...]) -> list[str]:
    """[kind, expression] for tools; of several that share a lane, what says them together."""
    if all(kind == TAG for kind, _ in atoms):
        return [TAG, "||".join(text for _, text in atoms)]
    texts = []
    for atom in atoms:
        if atom.kind != TAG:
            texts.append(atom.text)
        elif (tags := tags_of(atom)) is None:
            texts.append("TRUE")
        else:
            texts.append(among(TAGS, sorted(tags)))
    return [SQL92, " OR ".join(texts)]


class _Table:
    """Orders and clauses by number, each after those that it names."""

    def __init__(self) -> None:
        self.orders: dict[Order, int] = {}
        self.clauses: dict[Clause, int] = {}

    def number(self, item: Clause) -> int:
        if item not in self.clauses:
            for order in item.none:
                missing: list[Order] = []
                node: Order | None = order
                while node is not None and node not in self.orders:
                    missing.append(node)
                    node = node.before
                for node in reversed(missing):
                    self.orders[node] = len(self.orders)
            self.clauses[item] = len(self.clauses)
        return self.clauses[item]

    def objects(self) -> dict[str, Any]:
        return {
            "clauses": [
                [sorted(map(list, must)), sorted(self.orders[order] for order in none)]
                for must, none in self.clauses
            ],
            "orders": [
                [self.orders[order.before] if order.before is not None else -1, *order.atom]
                for order in self.orders
            ],
        }


def to_object(lanes: GroupLanes) -> dict[str, Any]:
    """A group as it stands in the file."""
    table = _Table()
    return {
        "forgotten": list(lanes.forgotten),
        "group": lanes.name,
        "lanes": [
            {
                "idleMs": lane.idle_ms,
                "isIdle": lane.is_idle,
                "number": lane.number,
                "offers": sorted(lane.offers),
                "orphans": sorted(lane.orphans),
                "places": [
                    [*queue, place.offset, place.start, place.reader,
                     [[first, end, table.number(item)] for first, end, item in place.spans]]
                    for queue, place in lane.places.items()
                ],
                "subscription": lane.key,
            }
            for lane in lanes.lanes.values()
        ],
        "movers": lanes.readers.objects(
            {key: lane.members for key, lane in lanes.lanes.items()}
        ),
        "resets": lanes.resets.objects(),
        "unmatched": lanes.unmatched,
        **table.objects(),
    }  # fmt: skip


def load(lanes: GroupLanes, value: Any) -> None:
    """Raises KeyError, TypeError, ValueError. A broker that knows no lanes may have gone on
    meanwhile, from the group's own offset: what is before that is done."""
    now = lanes.ground.clock.now_ms()
    clauses = _clauses(value) if "clauses" in value else None
    for item in value["lanes"]:
        lane = Lane(str(item["subscription"]), int(item["number"]), left_ms=now)
        lane.is_idle, lane.idle_ms = bool(item["isIdle"]), int(item["idleMs"])
        lane.offers = {(str(topic), int(queue_id)) for topic, queue_id in item["offers"]}
        lane.orphans = {(str(topic), int(queue_id)) for topic, queue_id in item.get("orphans", ())}
        for topic, queue_id, *said in item["places"]:
            queue = (str(topic), int(queue_id))
            place = lane.places[queue] = _place(said, clauses)
            done = lanes.ground.offsets.committed(lanes.name, *queue)
            if done > place.position:
                place.commit(done)
            if place.reader not in {"", NOBODY}:  # how much it has in hand its next pull says
                place.delivered = lanes.ground.end(queue)
        atoms_of(lane.key)
        lanes.lanes[lane.key] = lane
        lanes.number = max(lanes.number, lane.number)
    lanes.readers.load(value.get("movers", ()))
    lanes.resets.load(value.get("resets", ()))
    lanes.forgotten.extend(value.get("forgotten", ()))
    lanes.unmatched = int(value.get("unmatched", 0))


def _clauses(value: Any) -> list[Clause]:
    orders: list[Order | None] = []
    for before, kind, text in value["orders"]:
        orders.append(after(orders[before] if before >= 0 else None, Atom(kind, text)))
    return [
        Clause(
            frozenset(Atom(*atom) for atom in must), frozenset(o for n in none if (o := orders[n]))
        )
        for must, none in value["clauses"]
    ]


def _place(said: Any, clauses: list[Clause] | None) -> Place:
    if clauses is not None:
        offset, start, reader, spans = said
        made = [Span(first, end, clauses[number]) for first, end, number in spans]
    else:
        (old,) = said
        offset, start, reader = old["offset"], old["start"], old.get("reader", "")
        ends = [*(first for first, _ in old["spans"][1:]), None]
        made = [
            Span(first, end, item)
            for (first, rule), end in zip(old["spans"], ends, strict=True)
            for item in _old_rule(rule)
        ]
    return Place(int(offset), int(start), made, reader=str(reader))


def _old_rule(value: Any) -> Rule:
    """Of a file without tables."""
    return frozenset(
        Clause(
            frozenset(Atom(*atom) for atom in must),
            frozenset(o for o in (after(None, *(Atom(*atom) for atom in none)),) if o is not None),
        )
        for must, none in value
    )
