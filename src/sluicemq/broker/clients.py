"""Who is connected: producers and consumers by group, as their heartbeats say.

A member of a group is a connection (spec/remoting.md §15). Of each topic a group has one
subscription: the one with the highest version wins, and a topic that is missing in a heartbeat is
dropped for the whole group (spec/filter.md §2). That rule makes members with different
subscriptions harm each other; the broker follows it and says so in the log, once for each topic.

A member leaves with its request 35, its connection, or 120 s after its last heartbeat.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sluicemq.clock import Clock
from sluicemq.errors import FilterError
from sluicemq.filter.sql import make_filter
from sluicemq.filter.tags import is_tag_kind, subscribe
from sluicemq.model.subscription import MessageFilter, Subscription
from sluicemq.net.server import Peer
from sluicemq.protocol.bodies import ConsumerData

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Member:
    """One connection in one group."""

    client_id: str
    peer: Peer
    language: str
    version: int
    seen_ms: int
    expressions: dict[str, str] = field(default_factory=dict)


class Watch:
    """A group's subscription to a topic with its compiled filter.

    `is_broken` says that the SQL92 expression does not compile: then pulls are refused.
    """

    __slots__ = ("filter", "is_broken", "subscription")

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.is_broken = False
        self.filter: MessageFilter | None = None
        try:
            if is_tag_kind(subscription.kind) and not subscription.codes:
                # Some clients leave the codes to the broker.
                parsed = subscribe(
                    subscription.topic, subscription.expression, version=subscription.version
                )
                self.subscription = subscription = parsed
            self.filter = make_filter(subscription)
        except FilterError as error:
            self.is_broken = True
            log.warning("subscription to %s does not compile: %s", subscription.topic, error)


class ConsumerGroup:
    """The members of a group that are connected, and what they subscribe to."""

    __slots__ = (
        "_warned", "consume_from_where", "consume_type", "fingerprint", "members",
        "message_model", "name", "watches",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.consume_type = "CONSUME_PASSIVELY"
        self.message_model = "CLUSTERING"
        self.consume_from_where = "CONSUME_FROM_LAST_OFFSET"
        self.fingerprint = 0
        self.members: dict[Peer, Member] = {}
        self.watches: dict[str, Watch] = {}
        self._warned: set[str] = set()

    @property
    def client_ids(self) -> list[str]:
        return [member.client_id for member in self.members.values()]

    def subscribe(self, subscriptions: Iterable[Subscription], member: Member) -> bool:
        """Takes over what one heartbeat says; True when topics came or went."""
        wanted = {subscription.topic: subscription for subscription in subscriptions}
        self._warn_of_conflicts(wanted, member)
        member.expressions = {topic: s.expression for topic, s in wanted.items()}
        changed = False
        for topic, subscription in wanted.items():
            watch = self.watches.get(topic)
            if watch is None:
                changed = True
            elif subscription.version <= watch.subscription.version:
                continue
            elif _is_same(watch.subscription, subscription):
                watch.subscription = subscription
                continue
            self.watches[topic] = Watch(subscription)
        for topic in [topic for topic in self.watches if topic not in wanted]:
            del self.watches[topic]
            changed = True
        return changed

    def _warn_of_conflicts(self, wanted: dict[str, Subscription], member: Member) -> None:
        others = [m for m in self.members.values() if m.client_id != member.client_id]
        for other in others:
            for topic, expression in other.expressions.items():
                mine = wanted[topic].expression if topic in wanted else "nothing"
                if mine != expression and topic not in self._warned:
                    self._warned.add(topic)
                    log.warning(
                        "group %s: %s subscribes %s of topic %s, %s subscribes %s. The last one "
                        "wins for the whole group and messages get lost for the other: give each "
                        "expression a group of its own.",
                        self.name, member.client_id, mine, topic, other.client_id, expression,
                    )  # fmt: skip


def _is_same(old: Subscription, new: Subscription) -> bool:
    return (old.expression, old.kind, old.codes) == (new.expression, new.kind, new.codes)


class Consumers:
    """Consumer groups that are online. `on_change(group)` is called when members have to balance
    anew, `on_subscribed(group name, subscriptions)` at each full heartbeat, and with none when the
    last member of a group has left."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.groups: dict[str, ConsumerGroup] = {}
        self.on_change: Callable[[ConsumerGroup], None] = lambda group: None
        self.on_subscribed: Callable[[str, Iterable[Subscription]], None] = lambda group, wanted: (
            None
        )

    def heartbeat(self, data: ConsumerData, member: Member, fingerprint: int) -> bool:
        """A heartbeat with subscriptions. Returns whether the fingerprint was another before."""
        group = self.groups.get(data.group)
        if group is None:
            group = self.groups[data.group] = ConsumerGroup(data.group)
        group.consume_type = data.consume_type
        group.message_model = data.message_model
        group.consume_from_where = data.consume_from_where
        known = group.members.get(member.peer)
        joined = known is None
        if known is None:
            known = group.members[member.peer] = member
        known.client_id, known.seen_ms = member.client_id, member.seen_ms
        changed = group.subscribe(data.subscriptions, known)
        self.on_subscribed(data.group, data.subscriptions)
        before, group.fingerprint = group.fingerprint, fingerprint
        if joined or changed:
            self.on_change(group)
        return before not in {0, fingerprint}

    def short_heartbeat(self, name: str, member: Member, fingerprint: int) -> bool:
        """A heartbeat that leaves the subscriptions out (V2). Returns whether the client has to
        send all of it: the group is not known or its fingerprint is another."""
        group = self.groups.get(name)
        if group is None or not group.watches:
            return True
        known = group.members.get(member.peer)
        if known is None:
            group.members[member.peer] = member
            self.on_change(group)
        else:
            known.seen_ms = member.seen_ms
        return group.fingerprint != fingerprint

    def watch(self, group: str, topic: str) -> Watch | None:
        found = self.groups.get(group)
        return found.watches.get(topic) if found is not None else None

    def unregister(self, name: str, peer: Peer) -> None:
        group = self.groups.get(name)
        if group is not None and group.members.pop(peer, None) is not None:
            self._left(group)

    def disconnect(self, peer: Peer) -> None:
        for group in [g for g in self.groups.values() if peer in g.members]:
            self.unregister(group.name, peer)

    def expire(self, age_ms: int) -> list[Peer]:
        """Drops members whose last heartbeat is older; returns their connections."""
        limit = self._clock.now_ms() - age_ms
        dead: list[Peer] = []
        for group in list(self.groups.values()):
            for member in [m for m in group.members.values() if m.seen_ms < limit]:
                log.info("client %s of group %s is gone", member.client_id, group.name)
                dead.append(member.peer)
                self.unregister(group.name, member.peer)
        return dead

    def _left(self, group: ConsumerGroup) -> None:
        if not group.members:
            del self.groups[group.name]
            self.on_subscribed(group.name, ())
        self.on_change(group)

    def groups_of(self, topic: str) -> set[str]:
        """Groups online that subscribe to the topic."""
        return {name for name, group in self.groups.items() if topic in group.watches}


class Producers:
    """Producer groups that are online."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.groups: dict[str, dict[Peer, Member]] = {}

    def heartbeat(self, group: str, member: Member) -> None:
        members = self.groups.setdefault(group, {})
        known = members.get(member.peer)
        if known is None:
            members[member.peer] = member
        else:
            known.client_id, known.seen_ms = member.client_id, member.seen_ms

    def unregister(self, group: str, peer: Peer) -> None:
        members = self.groups.get(group)
        if members is not None:
            members.pop(peer, None)
            if not members:
                del self.groups[group]

    def disconnect(self, peer: Peer) -> None:
        for group in [name for name, members in self.groups.items() if peer in members]:
            self.unregister(group, peer)

    def expire(self, age_ms: int) -> list[Peer]:
        """As for consumers."""
        limit = self._clock.now_ms() - age_ms
        dead: list[Peer] = []
        for group, members in list(self.groups.items()):
            for member in [m for m in members.values() if m.seen_ms < limit]:
                dead.append(member.peer)
                self.unregister(group, member.peer)
        return dead
