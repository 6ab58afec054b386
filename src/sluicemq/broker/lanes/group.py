"""The lanes of one group: who gets which messages, from joining to leaving.

Each lane has a place of its own in each queue (`places.py`): an offset and, from there on, the rule
that says which messages are its own (`rules.py`). The rules of a group's lanes exclude each other
at every offset, so that no message is delivered twice, and cover whatever a lane wants, so that
none is lost.

    join      from the newest message on the lane gets what no older one wants; of what was stored
              within the last while it gets what no lane wants
    leave     a lane without members keeps its place; after `IDLE_MS` what it has not read is
              offered to the others, oldest first; the rest waits for it, for a day
    back      it goes on where it was, as the youngest
    merge     an idle lane costs a look at each of its queues every second. Of more than `IDLE_MAX`
              two that left one after the other become a wider one with the spans of both; who is
              back takes from it the clauses that its own subscription must match. Of more than
              `DEPARTED_MAX` subscriptions the lane that left first is given up

A lane that takes up messages behind its own place goes back there: only when it is at rest in that
queue (its pulls are held for a moment), told with 21 like a reset. The broker itself moves a lane
without members over what is not its own.

A group in which all members want the same has no lanes: it is what it is in RocketMQ. Its lanes
end when one is left that has nothing but its own rule.
"""

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from sluicemq.broker.lanes.places import Ground, Place, Queue, Readers, Span, joined, whole
from sluicemq.broker.lanes.rules import (
    NOTHING,
    Order,
    Rule,
    atoms_of,
    claimed,
    claims,
    clause,
    lane_id,
    merged_key,
    own_atoms,
    own_claim,
    parts_of,
)
from sluicemq.broker.offsets import Resets
from sluicemq.model.topic import RETRY_PREFIX

log = logging.getLogger(__name__)

IDLE_MS: Final = 30_000
"""A lane without a member for so long is no longer waited for."""
HOLD_MS: Final = 30_000
"""Pulls are held so long for a lane to come to rest, then let go as long."""
HAND_OVERS_PER_TICK: Final = 10_000
"""Lanes that are offered something, each in each queue."""
FORGOTTEN_KEPT: Final = 16
IDLE_MAX: Final = 16
"""Lanes."""
DEPARTED_MAX: Final = 1000
"""Subscriptions in them."""
IN_HAND_MS: Final = 300_000
"""After so long a commit of somebody who changed lanes counts no more in a lane that is merged."""
MERGES_PER_TICK: Final = 16
SCANS_PER_TICK: Final = 8
SUBSCRIPTIONS_LOGGED: Final = 8
EVALUATIONS_MAX: Final = 4096
"""Of expressions, for a queue each second, to count what no lane wants: that may lag behind."""


@dataclass(slots=True, eq=False)
class Lane:
    """Members of a group with one subscription (`key`). `number` is its age: the oldest has the
    least. `left_ms` is when its last member left; `is_idle`: it is no longer waited for; `offers`
    are the queues in which others have not been offered what it left; `abandoned` those whose
    reader changed to another lane (`places.Readers`)."""

    key: str
    number: int
    members: set[str] = field(default_factory=set)
    left_ms: int | None = None
    is_idle: bool = False
    places: dict[Queue, Place] = field(default_factory=dict)
    offers: set[Queue] = field(default_factory=set)
    abandoned: set[Queue] = field(default_factory=set)
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

    def __init__(self, name: str, ground: Ground) -> None:
        self.name = name
        self.ground = ground
        self.lanes: dict[str, Lane] = {}
        self.resets = Resets(ground.changed)
        self.unmatched = 0
        """Messages that every lane has passed and none wants."""
        self.number = 0
        self.counted: dict[Queue, int] = {}
        self.readers = Readers(ground.clock, ground.changed)
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

    def places_in(self, queue: Queue) -> list[Place]:
        """Of all lanes that have one there."""
        return [lane.places[queue] for lane in self.lanes.values() if queue in lane.places]

    def enter(self, key: str, client_id: str) -> Lane:
        """A member with a subscription is there."""
        known = self.lanes.get(key)
        lane = known or self._take_out(key) or self._join(key)
        lane.left_ms = None
        if client_id not in lane.members:
            # One that was away for a moment may have another subscription now.
            read_before = [
                (queue, other.key)
                for other in self.lanes.values()
                for queue, place in other.places.items()
                if place.reader == client_id
            ]
            self.readers.comes(client_id, read_before)
        lane.members.add(client_id)
        self.ground.changed()
        if known is None or lane.is_idle:
            if lane.is_idle:
                lane.is_idle, lane.number = False, self.next_number()
                lane.offers.clear()
            self.rebase()
            for other in self.idle():
                for queue in sorted(other.places.keys() & lane.places.keys() - other.offers):
                    if not self._hand_over(other, queue, [key]):
                        other.offers.add(queue)
            self.run()
            self.save()
        return lane

    def move(self, old: str, client_id: str) -> None:
        """A member wants something else. What it has in hand counts for its old lane until it
        begins anew (`places.Readers`)."""
        lane = self.lanes.get(old)
        if lane is not None:
            mine = [q for q, place in lane.places.items() if place.reader in {"", client_id}]
            self.readers.moves(client_id, old, mine)
            lane.abandoned.update(mine)
        self.leave(old, client_id, moved=True)

    def leave(self, key: str, client_id: str, *, moved: bool = False) -> None:
        """A member is gone; `moved`: to another subscription, so that nobody waits for the lane
        that it was the last of."""
        lane = self.lanes.get(key)
        if lane is None:
            return
        lane.members.discard(client_id)
        if not moved:
            self.readers.leave(client_id)
        if not lane.members and lane.left_ms is None:
            now = self.ground.clock.now_ms()
            lane.left_ms = now - IDLE_MS if moved else now
            self.ground.changed()

    def save(self) -> None:
        """Who gets which messages has changed: pulls wait until that is on disk."""

        def read_on() -> None:
            for queue in {queue for lane in self.lanes.values() for queue in lane.places}:
                self.ground.look_again(queue)

        self.ground.save(self.name, read_on)

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def _join(self, key: str) -> Lane:
        """A new lane begins where the group was a while ago, with what no other lane wants."""
        queues = list(self.ground.queues(self.name, key))
        for queue in queues:
            self.ensure(queue)
        lane = Lane(key, self.next_number())
        live, idle = self.ordered()
        own = atoms_of(key)
        taken: dict[str, tuple[Order | None, ...]] = {
            topic: (*claimed(topic, live), *claimed(topic, idle)) for topic in own
        }
        for queue in queues:
            topic, high = queue[0], self.ground.end(queue)
            if topic.startswith(RETRY_PREFIX):
                lane.places[queue] = Place(high, high, scanned=high)
                continue
            start = min(self.ground.floor(self.name, queue), high)
            rule = clause(own[topic], *taken[topic]) if own.get(topic) else NOTHING
            first = max(start, 0)
            lane.places[queue] = Place(start, first, whole(first, rule), scanned=first)
        self.lanes[key] = lane
        log.info("group %s: lane %s joins: %s", self.name, lane.id, key)
        return lane

    def ensure(self, queue: Queue) -> None:
        """Every lane that wants the topic has a place in the queue. All get it at the same time,
        or their rules might not exclude each other."""
        topic = queue[0]
        is_retry = topic == RETRY_PREFIX + self.name
        missing = [
            lane
            for lane in self.lanes.values()
            if queue not in lane.places and (is_retry or topic in atoms_of(lane.key))
        ]
        if missing:
            rules = claims(topic, *self.ordered())
            is_known = any(queue in lane.places for lane in self.lanes.values())
            at = self.ground.end(queue) if is_known else self.ground.floor(self.name, queue)
            first = max(at, 0)
            for lane in missing:
                rule = rules.get(lane.key, NOTHING)
                lane.places[queue] = Place(at, first, whole(first, rule), scanned=first)

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
                    end = ends[queue] = self.ground.end(queue)
                new, old = self._claims[queue[0]], before.get(queue[0])
                if lane.is_idle:
                    place.keep_from(end, new.rest)
                    continue
                rule = new.future.get(lane.key, NOTHING)
                if old is None or lane.key not in old.shares or old.future[lane.key] != rule:
                    place.change_from(end, rule)

    # -------------------------------------------------------------------- what others left

    def run(self) -> None:
        """Now and then, and at each change: what is away too long is no longer waited for."""
        now = self.ground.clock.now_ms()
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
            self.save()
        room = HAND_OVERS_PER_TICK
        for lane in self.idle():
            self._skip(lane)
            for queue in sorted(lane.offers):
                room -= len(self.lanes)
                if room > 0 and self._hand_over(lane, queue):
                    lane.offers.discard(queue)
                    self.save()
            # Do others want all that it wants, and is nothing left of it?
            if not lane.offers and all(
                place.position >= self.ground.end(queue)
                if queue[0].startswith(RETRY_PREFIX)
                else place.rule_at(place.position) == (NOTHING, None)
                for queue, place in lane.places.items()
            ):
                self._forget(lane)
            elif now - lane.idle_ms > self.ground.kept_ms:
                self._give_up(lane, "its day is over")
        self._merge()

    def _skip(self, lane: Lane) -> None:
        """A lane without members moves over what is not its own."""
        for queue, place in lane.places.items():
            for _ in range(SCANS_PER_TICK):
                here, end = place.position, self.ground.end(queue)
                if here >= end:
                    break
                rule, until = place.rule_at(here)
                following, is_match = self.ground.next_match(queue, here, rule, until)
                if following > here:
                    place.commit(following)
                    self.publish(queue)
                if is_match or following <= here:
                    break

    def _hand_over(self, lane: Lane, queue: Queue, takers: Iterable[str] | None = None) -> bool:
        """Offers what an idle lane has not read of a queue to the others, or some. False: not
        yet."""
        self.ensure(queue)
        if self.is_waited_for(lane, queue):
            return False
        place = lane.places[queue]
        here, end = place.position, self.ground.end(queue)
        if queue[0] not in self._claims:
            self.rebase()
        _, rules, rest = self._claims[queue[0]]
        gains: list[tuple[Lane, Place, list[Span]]] = []
        for key in (rules if takers is None else takers) if here < end else ():
            other = self.lanes[key]
            # Without a place it does not want the queue: the retry topic of another group.
            if queue in other.places and (
                gained := place.shared(here, end, rules.get(key, NOTHING))
            ):
                gains.append((other, other.places[queue], gained))
        if any(not theirs.can_take(here) for _, theirs, _ in gains):
            self.held_ms.setdefault(queue, self.ground.clock.now_ms())
            return False
        for other, theirs, gained in gains:
            before = max(theirs.scanned or 0, theirs.position)
            if before > here > theirs.position:
                theirs.commit(here)  # it has looked at all of that, and has nothing of it in hand
            theirs.take_up(gained)
            self.ground.changed()
            if before > here:
                theirs.go_back(here)
                self.resets.add(other.key, *queue, here)
                self.publish(queue)
                log.info(
                    "group %s: lane %s goes back on %s:%d from %d to %d, for what another lane "
                    "left", self.name, other.id, *queue, before, here,
                )  # fmt: skip
        place.keep_from(here, rest)
        self.held_ms.pop(queue, None)
        self.ground.look_again(queue)
        return True

    def _forget(self, lane: Lane) -> None:
        self._remove(lane)
        for queue in lane.places:
            self.publish(queue)
        self.rebase()
        self.save()

    def _remove(self, lane: Lane) -> None:
        del self.lanes[lane.key]
        self.resets.forget(group=lane.key)
        self.readers.forget(lane.key)

    def _give_up(self, lane: Lane, why: str) -> None:
        """What an idle lane has not read is nobody's from now on, and that is said."""
        now_ms = self.ground.clock.now_ms()
        left = sum(
            self.ground.end(queue) - place.position
            for queue, place in lane.places.items()
            if place.rule_at(place.position) != (NOTHING, None)
        )
        parts = parts_of(lane.key)
        for part in parts:
            self.forgotten.append(
                {"messagesMax": left, "subscription": part, "timestamp": now_ms, "why": why}
            )
        log.warning(
            "group %s forgets %d subscription(s) without members, because %s: %s%s. They had not "
            "looked at %d messages; what they wanted of them is nobody's now.",
            self.name, len(parts), why, ", ".join(parts[:SUBSCRIPTIONS_LOGGED]),
            ", ..." if len(parts) > SUBSCRIPTIONS_LOGGED else "", left,
        )  # fmt: skip
        self._forget(lane)

    def _merge(self) -> None:
        """Once a second: of the lanes that left one after the other those with the fewest
        subscriptions become one, but for some minutes none of which a member may have something in
        hand."""
        idle = self.idle()
        if len(idle) > IDLE_MAX:
            read, now_ms = self.readers.queues_read(), self.ground.clock.now_ms()
            idle = [
                lane
                for lane in idle
                if now_ms - lane.idle_ms > IN_HAND_MS
                or all(
                    lane.places[q].is_at_rest for q in read.get(lane.key, ()) if q in lane.places
                )
            ]
        for _ in range(min(len(idle) - IDLE_MAX, MERGES_PER_TICK)):
            counts = [len(parts_of(lane.key)) for lane in idle]
            at = min(range(len(idle) - 1), key=lambda at: counts[at] + counts[at + 1])
            first, second = idle[at : at + 2]  # one that is as old as the younger
            self._remove(first)
            self._remove(second)
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
            second.abandoned.clear()
            self.lanes[second.key] = second
            self.save()
            log.info("group %s: the idle lanes %s are one: %s", self.name, names, second.id)
            del idle[at]
        while sum(len(parts_of(lane.key)) for lane in idle) > DEPARTED_MAX:
            why = f"more than {DEPARTED_MAX} subscriptions left the group within a day"
            self._give_up(idle.pop(0), why)

    def _take_out(self, key: str) -> Lane | None:
        """A subscription that shares a lane is back: it goes on with what is its own."""
        shared = next((lane for lane in self.idle() if key in parts_of(lane.key)), None)
        if shared is None:
            return None
        self._remove(shared)
        lane = Lane(key, self.next_number())
        for queue, place in shared.places.items():
            own = own_atoms(queue[0], key)
            if own:
                mine = [span for span in place.cut(place.position) if span.clause.must & own]
                place.spans = [span for span in place.spans if not span.clause.must & own]
                at = min((span.first for span in mine), default=self.ground.end(queue))
                lane.places[queue] = Place(at if place.offset >= 0 else -1, at, mine, scanned=at)
        rest = [part for part in parts_of(shared.key) if part != key]
        shared.key = merged_key(rest) if len(rest) > 1 else rest[0]
        self.lanes[shared.key] = shared
        self.lanes[key] = lane
        log.info("group %s: lane %s is back: %s", self.name, lane.id, key)
        return lane

    # ------------------------------------------------------------------------------ a member

    def is_pulled(self, topic: str) -> bool:
        """Has somebody read the topic by a lane?"""
        return any(
            place.reader
            for lane in self.lanes.values()
            for queue, place in lane.places.items()
            if queue[0] == topic
        )

    def place(self, key: str, queue: Queue) -> Place | None:
        """None when the lane does not want the topic."""
        lane = self.lanes.get(key)
        if lane is None:
            return None
        if queue not in lane.places:
            self.ensure(queue)
        return lane.places.get(queue)

    def is_held(self, place: Place, queue: Queue) -> bool:
        """Shall a pull wait, because the lane is to go back as soon as it is at rest?"""
        since = self.held_ms.get(queue)
        if since is None or place.is_at_rest:
            return False
        return (self.ground.clock.now_ms() - since) // HOLD_MS % 2 == 0

    def asked(self, key: str, client_id: str, queue: Queue) -> Place | None:
        """A member asks where to begin (14)."""
        place = self.place(key, queue)
        if place is not None and self.readers.reads(client_id, queue, "") != key:
            self.readers.begins(client_id, queue, key)
            self.ground.changed()
        return place

    def tell(
        self, key: str, client_id: str, queue: Queue, offset: int, *, is_parked: bool = False
    ) -> int | None:
        """A member pulls from `offset`: where it has to go on, None when it may go on there."""
        readers = self.readers
        if readers.reads(client_id, queue, key) != key:
            if self.is_finishing(client_id, queue, key):
                return None
            self._begin(key, client_id, queue, offset)
        elif not is_parked and not readers.knows(client_id, queue):
            place = self.place(key, queue)
            # From ahead of its lane's place it reads on after a restart of the broker, if it did.
            is_its_own = place is not None and place.reader in {"", client_id}
            is_right = place is not None and is_its_own and offset >= place.position
            self._begin(key, client_id, queue, None if is_right else offset)
        told = readers.tell(client_id, queue, offset)
        if told is not None:
            return told
        lane = self.lanes.get(key)
        if lane is not None and queue in lane.abandoned and not self.is_waited_for(lane, queue):
            # It reads on in a queue whose reader changed lanes: from where that one came to.
            lane.abandoned.discard(queue)
            place = lane.places[queue]
            is_known = place.is_at_rest or place.reader not in {"", client_id}
            if is_known and 0 <= place.position != offset:
                self.resets.add(lane.key, *queue, place.position)
            self.ground.changed()
        if not self.resets:
            return None
        if lane is not None and queue in lane.places:
            self.resets.raise_offset(key, *queue, lane.places[queue].position)
        return self.resets.redirect(key, *queue, offset, client_id, is_parked=is_parked)

    def _begin(self, key: str, client_id: str, queue: Queue, offset: int | None) -> None:
        """From now on a member reads for this lane. If it pulls from another `offset` than its
        lane's place it is sent there; None: it may go on where it is."""
        place = self.place(key, queue)
        if offset is not None and place is not None and 0 <= place.position != offset:
            self.readers.sent_to(client_id, queue, key, place.position)
        else:
            self.readers.begins(client_id, queue, key)
        self.ground.changed()

    def is_finishing(self, client_id: str, queue: Queue, key: str) -> bool:
        """Has a member of the lane `key` something in hand for another one?"""
        lane = self.lanes.get(self.readers.reads(client_id, queue, key))
        place = lane.places.get(queue) if lane is not None and lane.key != key else None
        return (
            place is not None
            and place.reader in {"", client_id}
            and not place.is_at_rest
            and self.readers.has_time(client_id)
        )

    def is_waited_for(self, lane: Lane, queue: Queue) -> bool:
        """Has a client that left the lane something of it in hand in this queue?"""
        place = lane.places.get(queue)
        if place is None or place.is_at_rest or queue not in lane.abandoned:
            return False
        return any(
            client_id not in lane.members
            and place.reader in {"", client_id}
            and self.readers.has_time(client_id)
            for client_id in self.readers.of(queue, lane.key)
        )

    def commit(self, key: str, client_id: str, topic: str, queue_id: int, offset: int) -> None:
        """A member's commit, for the lane that it reads for; dropped while it does not know of a
        reset."""
        queue = (topic, queue_id)
        key = self.readers.reads(client_id, queue, key)
        place = self.place(key, queue)
        if (
            place is None
            or self.resets.blocks_commits(key, *queue)
            or self.readers.is_unaware(client_id, queue)
        ):
            return
        is_known = queue not in self.lanes[key].abandoned and self.readers.knows(client_id, queue)
        if offset < place.position and not is_known:
            return
        is_ahead = 0 <= self.ground.offsets.committed(self.name, *queue) < place.position
        place.commit(offset)
        self.ground.changed()
        if not is_ahead or offset < place.position:
            self.publish(queue)
        self.settle(queue)

    def settle(self, queue: Queue) -> None:
        """A lane may have come to rest in a queue that somebody waits for."""
        if queue in self.held_ms:
            self.run()

    def publish(self, queue: Queue) -> None:
        """The group's own offset is the least of its lanes': where any broker may go on."""
        places = self.places_in(queue)
        if any(place.offset >= 0 for place in places):
            self.ground.offsets.put(self.name, *queue, min(place.position for place in places))

    def reset(self, topic: str, queue_id: int, offset: int) -> None:
        """All lanes go to another place of the queue and share what follows anew; what idle lanes
        had not read there is nobody's any longer."""
        queue = (topic, queue_id)
        self.ensure(queue)
        rules = claims(topic, *self.ordered())
        for lane in self.lanes.values():
            if queue in lane.places:
                lane.offers.discard(queue)
                lane.abandoned.discard(queue)
                rule = rules.get(lane.key, NOTHING)
                lane.places[queue] = Place(offset, offset, whole(offset, rule), scanned=offset)
                self.resets.add(lane.key, topic, queue_id, offset)
        self.held_ms.pop(queue, None)
        self.ground.changed()

    # ----------------------------------------------------------------------------- the rest

    def count_unmatched(self) -> None:
        """Messages that every lane has passed and none wants, a slice of each queue. A lane that
        comes meanwhile and wants them is heard. They are lost to the group as in RocketMQ, but here
        somebody can see it."""
        live, idle = self.ordered()
        for topic in {topic for key in (*live, *idle) for topic in atoms_of(key)}:
            orders = [order for keys in (live, idle) for order in claimed(topic, keys) if order]
            rule = clause([], *orders)
            room = EVALUATIONS_MAX // (1 + sum(1 for order in orders for _ in order.others())) + 1
            queues = {q for lane in self.lanes.values() for q in lane.places if q[0] == topic}
            for queue in sorted(queues):
                least = min(place.position for place in self.places_in(queue))
                here = self.counted.setdefault(queue, least)
                if here < least:
                    if rule:
                        until = min(least, here + room)
                        here, found = self.ground.count(queue, here, rule, until)
                        self.unmatched += found
                    else:
                        here = least
                    self.counted[queue] = here

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
