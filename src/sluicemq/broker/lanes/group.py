"""Lanes: members of one group with different subscriptions share its messages.

docs/design/0009-lanes.md is the theory. In short: members with the same subscription (all topics
and expressions) form a lane. Each lane has a place of its own in each queue (`lane_places.py`):
an offset and, from there on, the rule that says which messages are its own (`lane_rules.py`). The
rules of a group's lanes exclude each other at every offset, so that no message is delivered
twice, and cover whatever a lane wants, so that none is lost.

    join      from the newest message on the lane gets what no older one wants; of what was stored
              within the last while it gets what no lane wants
    leave     a lane without members keeps its place; after `IDLE_MS` what it has not read is
              offered to the others, oldest first; the rest waits for it, for a day
    back      it goes on where it was, as the youngest
    merge     too many idle lanes become wider ones (`lane_departed.py`)

A lane that takes up messages behind its own place goes back there: only when it is at rest in that
queue (its pulls are held for a moment), told with 21 like a reset. The broker itself moves a lane
without members over what is not its own.

A group in which all members want the same has no lanes: it is what it is in RocketMQ. Its lanes
end when one is left that has nothing but its own rule.
"""

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sluicemq.broker.lanes import departed as lane_departed
from sluicemq.broker.lanes.places import Movers, Place, whole
from sluicemq.broker.lanes.rules import (
    NOTHING,
    Order,
    Rule,
    atoms_of,
    claimed,
    claims,
    clause,
    lane_id,
    own_claim,
)
from sluicemq.broker.offsets import Resets
from sluicemq.model.topic import RETRY_PREFIX

if TYPE_CHECKING:
    from sluicemq.broker.lanes.table import Lanes

log = logging.getLogger(__name__)

IDLE_MS: Final = 30_000
"""A lane without a member for so long is no longer waited for."""
HOLD_MS: Final = 30_000
"""Pulls are held so long for a lane to come to rest, then let go as long."""
HAND_OVERS_PER_TICK: Final = 10_000
"""Lanes that are offered something, each in each queue."""
FORGOTTEN_KEPT: Final = 16

Queue = tuple[str, int]
"""(topic, queue id)"""


@dataclass(slots=True, eq=False)
class Lane:
    """Members of a group with one subscription (`key`). `number` is its age: the oldest has the
    least. `left_ms` is when its last member left; `is_idle`: it is no longer waited for; `offers`
    are the queues in which others have not been offered what it left; `orphans` those whose reader
    changed to another lane (`lane_movers.py`)."""

    key: str
    number: int
    members: set[str] = field(default_factory=set)
    left_ms: int | None = None
    is_idle: bool = False
    places: dict[Queue, Place] = field(default_factory=dict)
    offers: set[Queue] = field(default_factory=set)
    orphans: set[Queue] = field(default_factory=set)
    idle_ms: int = 0

    @property
    def id(self) -> str:
        return lane_id(self.key)


class Claims(NamedTuple):
    """Of a topic: `future` is who gets what from now on; `shares`, who gets what of that which
    others leave; `rest`, what no lane that counts wants. `future` and `shares` differ in what
    nobody wants of a retry topic: what idle lanes would want is theirs."""

    future: dict[str, Rule]
    shares: dict[str, Rule]
    rest: Rule


class GroupLanes:
    """The lanes of one group."""

    def __init__(self, name: str, parts: "Lanes") -> None:
        self.name = name
        self.parts = parts
        self.lanes: dict[str, Lane] = {}
        self.resets = Resets(parts.changed)
        self.unmatched = 0
        self.number = 0
        self.counted: dict[Queue, int] = {}
        self.movers = Movers(parts.clock, parts.changed)
        self.held_ms: dict[Queue, int] = {}
        """Queues in which a lane is to go back -> since when it is waited for."""
        self._claims: dict[str, Claims] = {}
        self.forgotten: deque[dict[str, Any]] = deque(maxlen=FORGOTTEN_KEPT)
        """Subscriptions that had to be given up, for tools."""

    # ------------------------------------------------------------------------------- members

    def ordered(self) -> tuple[list[str], list[str]]:
        """Keys of the lanes: those that count from the oldest on, and idle ones from the one that
        left last on: each wants what none before it does, so that it is nothing to them who left
        earlier when another one leaves."""
        lanes = self.lanes.values()
        live = sorted((lane for lane in lanes if not lane.is_idle), key=lambda lane: lane.number)
        return [lane.key for lane in live], [lane.key for lane in self.idle()[::-1]]

    def idle(self) -> list[Lane]:
        """Those that nobody waits for, from the one that left first on."""
        idle = [lane for lane in self.lanes.values() if lane.is_idle]
        return sorted(idle, key=lambda lane: (lane.idle_ms, lane.number))

    def enter(self, key: str, client_id: str) -> Lane:
        """A member with a subscription is there."""
        known = self.lanes.get(key)
        lane = known or lane_departed.take_out(self, key) or self._join(key)
        lane.left_ms = None
        if client_id not in lane.members:
            self.movers.comes(client_id, self._read_before(client_id))
        lane.members.add(client_id)
        self.parts.changed()
        if known is None or lane.is_idle:
            if lane.is_idle:
                lane.is_idle, lane.number = False, self.next_number()
                lane.offers.clear()
            self.rebase()
            for other in self.idle():
                for queue in sorted(other.places.keys() & lane.places.keys() - other.offers):
                    if not lane_departed.hand_over(self, other, queue, [key]):
                        other.offers.add(queue)
            self.run()
            self.parts.save(self.name)
        return lane

    def _read_before(self, client_id: str) -> list[tuple[Queue, str]]:
        """The queues that a client read last, and for which lane: one that was away for a moment
        may have another subscription now."""
        return [
            (queue, lane.key)
            for lane in self.lanes.values()
            for queue, place in lane.places.items()
            if place.reader == client_id
        ]

    def move(self, old: str, client_id: str) -> None:
        """A member wants something else. What it has in hand counts for its old lane until it
        begins anew (`lane_movers.py`)."""
        lane = self.lanes.get(old)
        if lane is not None:
            mine = [q for q, place in lane.places.items() if place.reader in {"", client_id}]
            self.movers.moves(client_id, old, mine)
            lane.orphans.update(mine)
        self.leave(old, client_id, moved=True)

    def leave(self, key: str, client_id: str, *, moved: bool = False) -> None:
        """A member is gone; `moved`: to another subscription, so that nobody waits for the lane
        that it was the last of."""
        lane = self.lanes.get(key)
        if lane is None:
            return
        lane.members.discard(client_id)
        if not moved:
            self.movers.leave(client_id)
        if not lane.members and lane.left_ms is None:
            now = self.parts.clock.now_ms()
            lane.left_ms = now - IDLE_MS if moved else now
            self.parts.changed()

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def _join(self, key: str) -> Lane:
        for queue in self.parts.queues(self.name, key):
            self.ensure(queue)
        lane = Lane(key, self.next_number())
        taken = {topic: self._taken(topic) for topic in atoms_of(key)}
        for queue in self.parts.queues(self.name, key):
            lane.places[queue] = self._place_of_new(key, taken.get(queue[0], ()), queue)
        self.lanes[key] = lane
        log.info("group %s: lane %s joins: %s", self.name, lane.id, key)
        return lane

    def _taken(self, topic: str) -> tuple[Order | None, ...]:
        """What the lanes want that are there."""
        live, idle = self.ordered()
        return *claimed(topic, live), *claimed(topic, idle)

    def _place_of_new(self, key: str, taken: tuple[Order | None, ...], queue: Queue) -> Place:
        """It begins where the group was a while ago, with what no other lane wants or wanted."""
        high = self.parts.end(queue)
        if queue[0].startswith(RETRY_PREFIX):
            return Place(high, high, scanned=high)
        start = min(self.parts.floor(self.name, queue), high)
        own = atoms_of(key).get(queue[0], ())
        rule = clause(own, *taken) if own else NOTHING
        first = max(start, 0)
        return Place(start, first, whole(first, rule), scanned=first)

    def ensure(self, queue: Queue) -> None:
        """Every lane that wants the topic has a place in the queue. All get it at the same time,
        or their rules might not exclude each other."""
        missing = [
            lane
            for lane in self.lanes.values()
            if queue not in lane.places and self._wants(lane, queue)
        ]  # fmt: skip
        if missing:
            rules = claims(queue[0], *self.ordered())
            is_known = any(queue in lane.places for lane in self.lanes.values())
            at = self.parts.end(queue) if is_known else self.parts.floor(self.name, queue)
            first = max(at, 0)
            for lane in missing:
                rule = rules.get(lane.key, NOTHING)
                lane.places[queue] = Place(at, first, whole(first, rule), scanned=first)

    def _wants(self, lane: Lane, queue: Queue) -> bool:
        return queue[0] == RETRY_PREFIX + self.name or queue[0] in atoms_of(lane.key)

    def claims(self, topic: str) -> Claims:
        """Of the lanes that count now."""
        if topic not in self._claims:
            self.rebase()
        return self._claims[topic]

    def rebase(self) -> None:
        """From each queue's end on messages belong to the lanes as they are now: idle ones keep of
        theirs what no other wants."""
        live, idle = self.ordered()
        retry = RETRY_PREFIX + self.name
        topics = {topic for lane in self.lanes.values() for topic, _ in lane.places}
        before = self._claims
        self._claims = {}
        for topic in topics:
            rest = clause([], *claimed(topic, live))  # keeps the orders that the claims grow from
            known = before[topic].shares if topic in before else None
            shares = claims(topic, live, (), known)
            future = claims(topic, live, idle) if topic == retry and idle else shares
            self._claims[topic] = Claims(future, shares, rest)
        ends: dict[Queue, int] = {}
        for lane in self.lanes.values():
            for queue, place in lane.places.items():
                end = ends.get(queue)
                if end is None:
                    end = ends[queue] = self.parts.end(queue)
                new, old = self._claims[queue[0]], before.get(queue[0])
                if lane.is_idle:
                    place.keep_from(end, new.rest)
                    continue
                rule = new.future.get(lane.key, NOTHING)
                if old is None or lane.key not in old.shares or old.future[lane.key] != rule:
                    place.change_from(end, rule)

    # ---------------------------------------------------------------------------- hand over

    def run(self) -> None:
        """Now and then, and at each change: nobody waits any longer for who is away too long."""
        now = self.parts.clock.now_ms()
        if not any(lane.members for lane in self.lanes.values()):
            return
        gone = [
            lane
            for lane in self.lanes.values()
            if lane.left_ms is not None and not lane.is_idle and now - lane.left_ms >= IDLE_MS
        ]
        for lane in gone:
            lane.is_idle, lane.idle_ms = True, now
            lane.offers = set(lane.places)
            log.info("group %s: nobody waits for lane %s any longer", self.name, lane.id)
        if gone:
            self.rebase()
            self.parts.save(self.name)
        room = HAND_OVERS_PER_TICK
        for lane in self.idle():
            lane_departed.skip(self, lane)
            for queue in sorted(lane.offers):
                room -= len(self.lanes)
                if room > 0 and lane_departed.hand_over(self, lane, queue):
                    lane.offers.discard(queue)
                    self.parts.save(self.name)
            if lane_departed.wants_nothing(self, lane):
                self.forget(lane)
            elif now - lane.idle_ms > self.parts.kept_ms:
                lane_departed.give_up(self, lane, "its day is over")
        lane_departed.merge(self)

    def forget(self, lane: Lane) -> None:
        self.remove(lane)
        for queue in lane.places:
            self.publish(queue)
        self.rebase()
        self.parts.save(self.name)

    def remove(self, lane: Lane) -> None:
        del self.lanes[lane.key]
        self.resets.forget(group=lane.key)
        self.movers.forget(lane.key)

    # ------------------------------------------------------------------------------ a member

    def place(self, key: str, topic: str, queue_id: int) -> Place | None:
        """None when the lane does not want the topic."""
        lane = self.lanes.get(key)
        if lane is None:
            return None
        place = lane.places.get((topic, queue_id))
        if place is None:
            self.ensure((topic, queue_id))
            place = lane.places.get((topic, queue_id))
        return place

    def is_held(self, place: Place, queue: Queue) -> bool:
        """Shall a pull wait, because the lane is to go back as soon as it is at rest?"""
        since = self.held_ms.get(queue)
        if since is None or place.is_at_rest:
            return False
        return (self.parts.clock.now_ms() - since) // HOLD_MS % 2 == 0

    def asked(self, key: str, client_id: str, queue: Queue) -> Place | None:
        """A member asks where to begin (14)."""
        place = self.place(key, *queue)
        if place is not None and self.movers.reads(client_id, queue, "") != key:
            self.movers.begins(client_id, queue, key)
            self.parts.changed()
        return place

    def tell(
        self, key: str, client_id: str, queue: Queue, offset: int, *, is_parked: bool = False
    ) -> int | None:
        """A member pulls from `offset`: where it has to go on, None when it may go on there."""
        movers = self.movers
        if movers.reads(client_id, queue, key) != key:
            if self.is_finishing(client_id, queue, key):
                return None
            self._begin(key, client_id, queue, offset)
        elif not is_parked and not movers.knows(client_id, queue):
            place = self.place(key, *queue)
            # From ahead of its lane's place it reads on after a restart of the broker, if it did.
            is_its_own = place is not None and place.reader in {"", client_id}
            is_right = place is not None and is_its_own and offset >= place.position
            self._begin(key, client_id, queue, None if is_right else offset)
        told = movers.tell(client_id, queue, offset)
        if told is not None:
            return told
        lane = self.lanes.get(key)
        if lane is not None and queue in lane.orphans and not self.is_waited_for(lane, queue):
            self._take_over(lane, client_id, queue, offset)
        if not self.resets:
            return None
        if lane is not None and queue in lane.places:
            self.resets.follow(key, *queue, lane.places[queue].position)
        return self.resets.tell(key, *queue, offset, client_id, is_parked=is_parked)

    def _begin(self, key: str, client_id: str, queue: Queue, offset: int | None) -> None:
        """From now on a member reads for this lane. If it pulls from another `offset` than its
        lane's place it is sent there; None: it may go on where it is."""
        place = self.place(key, *queue)
        if offset is not None and place is not None and 0 <= place.position != offset:
            self.movers.sent_to(client_id, queue, key, place.position)
        else:
            self.movers.begins(client_id, queue, key)
        self.parts.changed()

    def _take_over(self, lane: Lane, client_id: str, queue: Queue, offset: int) -> None:
        """A member reads on in a queue whose reader changed lanes: from where that one came to."""
        lane.orphans.discard(queue)
        place = lane.places[queue]
        is_known = place.is_at_rest or place.reader not in {"", client_id}
        if is_known and 0 <= place.position != offset:
            self.resets.put(lane.key, *queue, place.position)
        self.parts.changed()

    def is_finishing(self, client_id: str, queue: Queue, key: str) -> bool:
        """Has a member of the lane `key` something in hand for another one?"""
        lane = self.lanes.get(self.movers.reads(client_id, queue, key))
        place = lane.places.get(queue) if lane is not None and lane.key != key else None
        return (
            place is not None
            and place.reader in {"", client_id}
            and not place.is_at_rest
            and self.movers.has_time(client_id)
        )

    def is_waited_for(self, lane: Lane, queue: Queue) -> bool:
        """Has a client that left the lane something of it in hand in this queue?"""
        place = lane.places.get(queue)
        if place is None or place.is_at_rest or queue not in lane.orphans:
            return False
        return any(
            client_id not in lane.members
            and place.reader in {"", client_id}
            and self.movers.has_time(client_id)
            for client_id in self.movers.readers(queue, lane.key)
        )

    def is_going_back(self, key: str, place: Place, queue: Queue) -> bool:
        """Was the lane sent back and has not heard of it, or is it going to be?"""
        return self.is_held(place, queue) or self.resets.blocks(key, *queue)

    def commit(self, key: str, client_id: str, topic: str, queue_id: int, offset: int) -> None:
        """A member's commit, for the lane that it reads for; dropped while it does not know of a
        reset."""
        queue = (topic, queue_id)
        key = self.movers.reads(client_id, queue, key)
        place = self.place(key, topic, queue_id)
        if (
            place is None
            or self.resets.blocks(key, topic, queue_id)
            or self.movers.is_deaf(client_id, queue)
        ):
            return
        is_known = queue not in self.lanes[key].orphans and self.movers.knows(client_id, queue)
        if offset < place.position and not is_known:
            return
        is_ahead = 0 <= self.parts.offsets.committed(self.name, *queue) < place.position
        place.commit(offset)
        self.parts.changed()
        if not is_ahead or offset < place.position:
            self.publish(queue)
        self.settle(queue)

    def settle(self, queue: Queue) -> None:
        """A lane may have come to rest in a queue that somebody waits for."""
        if queue in self.held_ms:
            self.run()

    def publish(self, queue: Queue) -> None:
        """The group's own offset is the least of its lanes': where any broker may go on."""
        places = [lane.places[queue] for lane in self.lanes.values() if queue in lane.places]
        if any(place.offset >= 0 for place in places):
            self.parts.offsets.put(self.name, *queue, min(place.position for place in places))

    def reset(self, topic: str, queue_id: int, offset: int) -> None:
        """All lanes go to another place of the queue and share what follows anew; what idle lanes
        had not read there is nobody's any longer."""
        queue = (topic, queue_id)
        self.ensure(queue)
        rules = claims(topic, *self.ordered())
        for lane in self.lanes.values():
            place = lane.places.get(queue)
            if place is None:
                continue
            lane.offers.discard(queue)
            lane.orphans.discard(queue)
            rule = rules.get(lane.key, NOTHING)
            lane.places[queue] = Place(offset, offset, whole(offset, rule), scanned=offset)
            self.resets.put(lane.key, topic, queue_id, offset)
        self.held_ms.pop(queue, None)
        self.parts.changed()

    # ------------------------------------------------------------------------------- the end

    @property
    def is_over(self) -> bool:
        """One lane is left and gets everything it wants: the group needs no lanes."""
        if len(self.lanes) != 1 or self.resets:
            return False
        (lane,) = self.lanes.values()
        return all(
            place.rule_at(place.position) == (own_claim(topic, lane.key), None)
            for (topic, _), place in lane.places.items()
        )
