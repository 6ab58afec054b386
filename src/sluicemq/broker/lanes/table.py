"""The groups that have lanes: the one seam between lanes and the rest of the broker.

Everybody else asks one question, for which lane a request asks (`Consumers.lane_of`), and is told
None (no lane: the group is what it is in RocketMQ) or a `LaneReader`, which does the rest.

Beside that stand a group's lanes as tools see them (900133), and as they are in the file,
config/sluiceLanes.json. Lanes share clauses, and clauses share orders: the file has a table of
both, and spans name a clause by its number there.
"""

import logging
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final, NamedTuple

import orjson

from sluicemq.broker.lanes.filters import among
from sluicemq.broker.lanes.group import GroupLanes, Lane
from sluicemq.broker.lanes.places import NOBODY, Ground, Place, Queue, Span, end_of, whole
from sluicemq.broker.lanes.rules import (
    Atom,
    Clause,
    Order,
    after,
    atoms_of,
    own_claim,
    parts_of,
    tags_of,
)
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.clock import Clock
from sluicemq.files import Files
from sluicemq.model.message import TAGS
from sluicemq.model.subscription import SQL92, TAG
from sluicemq.net.work.background import Offload, offload_inline
from sluicemq.store.read import ReadResult, ReadStatus
from sluicemq.store.store import Store


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
                "orphans": sorted(lane.abandoned),
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
        "resets": lanes.resets.to_objects(),
        "unmatched": lanes.unmatched,
        **table.objects(),
    }  # fmt: skip


def load(lanes: GroupLanes, value: Any) -> None:
    """Raises KeyError, TypeError, ValueError. A broker that knows no lanes may have gone on
    meanwhile, from the group's own offset: what is before that is done."""
    now = lanes.ground.clock.now_ms()
    orders: list[Order | None] = []
    for before, kind, text in value["orders"]:
        orders.append(after(orders[before] if before >= 0 else None, Atom(kind, text)))
    clauses = [
        Clause(
            frozenset(Atom(*atom) for atom in must), frozenset(o for n in none if (o := orders[n]))
        )
        for must, none in value["clauses"]
    ]
    for item in value["lanes"]:
        lane = Lane(str(item["subscription"]), int(item["number"]), left_ms=now)
        lane.is_idle, lane.idle_ms = bool(item["isIdle"]), int(item["idleMs"])
        lane.offers = {(str(topic), int(queue_id)) for topic, queue_id in item["offers"]}
        lane.abandoned = {
            (str(topic), int(queue_id)) for topic, queue_id in item.get("orphans", ())
        }
        for topic, queue_id, offset, start, reader, spans in item["places"]:
            queue = (str(topic), int(queue_id))
            place = lane.places[queue] = Place(
                int(offset), int(start),
                [Span(first, end, clauses[number]) for first, end, number in spans],
                reader=str(reader),
            )  # fmt: skip
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


log = logging.getLogger(__name__)

PLACES_QUICK: Final = 2000
"""So many places of lanes are made a text in a few milliseconds."""


class Do(Enum):
    """What a pull in a lane has to do. WAIT: until the lane is at rest; ANEW: ask once more."""

    READ = auto()
    WAIT = auto()
    ANEW = auto()
    MOVE = auto()


class Step(NamedTuple):
    """`lane`: for which one it waits from now on; `offset`: where it has to go."""

    do: Do
    lane: str = ""
    offset: int = -1


READ: Final = Step(Do.READ)


class LaneReader(NamedTuple):
    """A member of a group with lanes: who asks, and for which lane (`key`)."""

    lanes: GroupLanes
    client_id: str
    key: str

    def commit(self, queue: Queue, offset: int) -> None:
        self.lanes.commit(self.key, self.client_id, *queue, offset)

    def asks(self, queue: Queue) -> Place | None:
        """It asks where to begin (14); None when its lane does not want the topic."""
        return self.lanes.asked(self.key, self.client_id, queue)

    def place(self, queue: Queue) -> Place | None:
        return self.lanes.place(self.key, queue)

    def pulls(self, queue: Queue, offset: int) -> Step:
        """A new pull, whose commit has been counted."""
        lanes, client_id, key = self
        step = READ
        for _ in range(2):
            told = lanes.tell(key, client_id, queue, offset)
            if told is not None:
                return Step(Do.MOVE, offset=told)
            if step.do is Do.WAIT:
                break
            step = self._begins(queue, offset)
            if step.do is Do.READ:
                break
        return step

    def _begins(self, queue: Queue, offset: int) -> Step:
        """Notes who reads now. A lane that went back with this pull's commit, or will, waits."""
        lanes, client_id, key = self
        place = lanes.place(key, queue)
        if place is None:
            return READ
        if lanes.is_finishing(client_id, queue, key):
            lanes.lanes[lanes.readers.reads(client_id, queue, key)].places[queue].pulls(offset)
            return Step(Do.WAIT)
        if lanes.is_waited_for(lanes.lanes[key], queue) or lanes.ground.is_unsaved(lanes.name):
            return Step(Do.WAIT)
        if place.reader != client_id:
            place.read_by(client_id, lanes.places_in(queue))
            lanes.ground.changed()
        place.pulls(offset)
        if place.scanned is None:
            place.scanned = place.delivered = offset
        lanes.settle(queue)
        goes_back = lanes.is_held(place, queue) or lanes.resets.blocks_commits(key, *queue)
        return Step(Do.WAIT if goes_back else Do.READ, key)

    def looks_again(self, queue: Queue, offset: int, lane: str) -> Step:
        """A pull that waits, from this offset and for this lane."""
        lanes, client_id, key = self
        place = lanes.place(key, queue)
        # Has another member pulled since, a reader that has given the queue up hears nothing.
        if place is None or place.reader in {"", client_id}:
            told = lanes.tell(key, client_id, queue, offset, is_parked=True)
            if told is not None:
                return Step(Do.MOVE, offset=told)
        if place is None:
            return READ
        if (
            lanes.is_held(place, queue)
            or lanes.ground.is_unsaved(lanes.name)
            or lanes.is_finishing(client_id, queue, key)
            or lanes.is_waited_for(lanes.lanes[key], queue)
        ):
            return Step(Do.WAIT)
        # What a pull of another lane has passed over may be what the new one wants.
        return READ if key == lane else Step(Do.ANEW, offset=offset)


def note(place: Place, offset: int, result: ReadResult) -> None:
    """What a lane was given, so that it can be sent back when nothing of it is in hand."""
    if result.status is ReadStatus.FOUND:
        place.delivered = max(place.delivered, end_of(result.data))
    place.scanned = max(result.next_offset, offset)


class Lanes:
    """The groups that have lanes, and their file (config/sluiceLanes.json)."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        offsets: Offsets,
        store: Store,
        files: Files,
        clock: Clock,
        look_again: Callable[[str, int], None],
        call_soon: Callable[[Callable[[], None]], object],
        offload: Offload = offload_inline,
    ) -> None:
        self.table: dict[str, GroupLanes] = {}
        self.offsets = offsets

        def render() -> str:
            places = sum(len(n.places) for made in self.table.values() for n in made.lanes.values())
            if places > PLACES_QUICK:
                self.ground.rest()
            groups = [to_object(made) for made in self.table.values()]
            return orjson.dumps({"groups": groups}).decode()

        self.ground = Ground(
            settings, topics, offsets, store, files, clock, look_again, call_soon, offload, render
        )
        self.document = self.ground.document

    # -------------------------------------------------------------------------------- members

    def enter(
        self, group: str, key: str, client_id: str, before: str, others: dict[str, str]
    ) -> bool:
        """A member wants something (`key`), something else than `before` perhaps, while others
        (client id -> key) want theirs. Returns whether it is new in its lane."""
        lanes = self.table.get(group)
        if lanes is None:  # members want different things from now on
            old = next(iter(others.values()))  # the first lane is everything that the group was
            lanes = self.table[group] = GroupLanes(group, self.ground)
            lane = lanes.lanes[old] = Lane(old, lanes.next_number())
            for queue in self.ground.queues(group, old):
                known = self.offsets.committed(group, *queue)
                start = known if known >= 0 else max(self.ground.floor(group, queue), 0)
                lanes.counted[queue] = start
                fetched = self.offsets.fetched(group, *queue)
                lane.places[queue] = Place(
                    known, start, whole(start, own_claim(queue[0], old)), fetched
                )
            self.ground.changed()
            for other, other_key in others.items():
                lanes.enter(other_key, other)
        is_new = key not in lanes.lanes or client_id not in lanes.lanes[key].members
        if is_new:
            lanes.enter(key, client_id)
        if before and before != key:
            lanes.move(before, client_id)
            lanes.run()
        return is_new

    def lock_name(self, group: str, client_id: str) -> str:
        """Under which name a member's queues are locked: each lane locks for itself."""
        lanes = self.table.get(group)
        for lane in lanes.lanes.values() if lanes is not None else ():
            if client_id in lane.members:
                return f"{group}@{lane.id}"
        return group

    def reset(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """False: the group has no lanes."""
        lanes = self.table.get(group)
        if lanes is not None:
            lanes.reset(topic, queue_id, offset)
            self.offsets.put(group, topic, queue_id, offset)
        return lanes is not None

    def forget_group(self, group: str) -> None:
        if self.table.pop(group, None) is not None:
            self.ground.changed()

    def run(self) -> None:
        """Once a second."""
        self.ground.flush_unsaved()
        self.ground.lift_floors()
        for made in list(self.table.values()):
            made.run()
            made.count_unmatched()
            if made.is_over:
                log.info("group %s has one subscription again: its lanes end", made.name)
                self.forget_group(made.name)

    # ------------------------------------------------------------------------------ the file

    def load(self) -> None:
        """After the offsets. Raises StoreDamagedError."""

        def parse(text: str) -> dict[str, GroupLanes]:
            try:
                found = {}
                for item in orjson.loads(text)["groups"]:
                    made = found[str(item["group"])] = GroupLanes(str(item["group"]), self.ground)
                    load(made, item)
            except (KeyError, TypeError) as error:
                raise ValueError(f"a lane lacks a field: {error}") from error
            return found

        found = self.document.load(parse) or {}
        if self.document.is_doubtful:
            log.warning(
                "%s is not what this broker wrote last (removed, an older copy, or of another"
                " store): the lanes in it end. Groups go on at their own offsets, the least of"
                " their lanes', and messages may come again. Nothing has to be done.",
                self.document.path,
            )
            found = {}
            self.document.changed = True
        self.table.update(found)
