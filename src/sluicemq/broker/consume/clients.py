"""Who is connected: producers and consumers by group, as their heartbeats say.

A member of a group is a connection (spec/remoting.md §15). While all members want the same, a
group has one subscription for each topic: what the heartbeats say; a topic that is missing in them
is dropped (spec/filter.md §2). In RocketMQ the last heartbeat of any member says so for all: its
members then filter by each other's expressions and messages are lost. Here the group's contract
decides, its attribute `sluice.contract`; RocketMQ keeps an attribute that it does not know.

    compatible   the default. As in RocketMQ while all members have the same subscription; members
                 with another one get a lane of their own (`lanes/`), and the log, a metric and
                 `sluice group show` warn
    lanes        the same, wanted: no warning
    strict       the second, different subscription is refused at its heartbeat, with both
                 expressions, the client ids and what differs

A group that pops has no lanes: who pops a topic moves the whole group on there, so one filter
counts (`pop/assignment.py`).

A member leaves with its request 35, its connection, or 120 s after its last heartbeat. One whose
connection breaks has not left: a stalled Java client closes its socket after 3 s and
sends its next heartbeat up to 30 s later. In a strict group its subscription stays *claimed* until
the client is back, says that it leaves (35), or would have been given up anyway: its expiry (120 s)
after its last heartbeat. So nobody takes a group over in a gap.

Which of them may consume a queue in order is a lease (`locks.py`).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, NamedTuple

from sluicemq.broker.consume.filters import ConsumerFilters, Watch
from sluicemq.broker.consume.held import (
    CONSUMER,
    MEMBER_BYTES,
    PRODUCER,
    PRODUCER_BYTES,
    TEXT_BYTES,
    HeldBytes,
)
from sluicemq.broker.consume.notices import Notices
from sluicemq.broker.lanes.rules import (
    Atom,
    difference,
    key_of,
    named_atoms,
    normal_atom,
    parse_key,
    subscription_key,
)
from sluicemq.broker.lanes.table import LaneReader, Lanes
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups
from sluicemq.clock import Clock
from sluicemq.filter.subscriptions import is_tag_kind
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import CONTRACT, CONTRACTS, GroupConfig
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import WorkItem
from sluicemq.wire.bodies import BROADCASTING, FROM_FIRST_OFFSET, ConsumerData
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import CLIENT_ID_FIELD, ConsumerGroupRequest
from sluicemq.wire.tables import ConsumerFilter

log = logging.getLogger(__name__)

PRODUCER_GROUPS_MAX: Final = 50_000
"""Producers name any group: none is made for them, and it is gone with its last connection."""
NAME_MAX: Final = 255
COMPATIBLE, STRICT, LANES = CONTRACTS
REFUSED_MAX: Final = 1024
CLAIMS_MAX: Final = 1024
"""Of a group."""
REMIND_S: Final = 600.0
"""The log names a client that goes on trying again after so long."""
WARNED_MAX: Final = 10_000
MADE_A_STEP: Final = 64
"""Subscriptions whose filters are compiled at a step."""


Made = Mapping[str, tuple[Subscription, Watch]]
"""By topic: a subscription and its compiled filter."""


class Subscribed(NamedTuple):
    """The subscriptions of one consumer, from one heartbeat.

    `key` is its `subscription_key`, "" for a broadcast consumer; `topics` the subscription of each
    topic; `made` the filters that its group does not have yet; `by_tags` whether all are tags.
    """

    key: str
    topics: dict[str, Subscription]
    made: Made
    by_tags: bool


@dataclass(slots=True, eq=False)
class Member:
    """One connection in one group. `key` is its subscription as text (`lanes/rules.py`), "" for one
    that assigns queues by itself."""

    client_id: str
    peer: Peer
    language: str
    version: int
    seen_s: float
    """When its last heartbeat came, on the monotonic clock: a wall clock that is corrected must not
    expire it."""
    key: str = ""
    fingerprint: int = 0
    wanted: dict[str, Subscription] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ConsumerGroup:
    """The members of a group that are connected, and what they subscribe to. `key`: what all
    members subscribe to, while that is the same. `edition` is another after each change."""

    name: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    fingerprint: int = 0
    key: str = ""
    edition: int = 0
    members: dict[Peer, Member] = field(default_factory=dict)
    watches: dict[str, Watch] = field(default_factory=dict)

    @property
    def client_ids(self) -> list[str]:
        """Each once: a client with two connections, of which one may lead through another replica,
        would take the other for somebody and leave half of its queues to nobody."""
        return list(dict.fromkeys(member.client_id for member in self.members.values()))

    def find(self, peer: Peer, fields: Mapping[str, str] | None) -> Member | None:
        """The member that a request is from; of a client with several connections that of its
        last heartbeat: the others may be broken, and what it wanted there is past."""
        member = self.members.get(peer)
        client_id = fields.get(CLIENT_ID_FIELD) if member is None and fields else None
        if client_id is not None:
            for other in self.members.values():
                if other.client_id == client_id and (
                    member is None or other.seen_s >= member.seen_s
                ):
                    member = other
        return member

    def replace_connection(self, member: Member) -> str:
        """A client is there over a new connection: what it wants holds for its older ones too,
        which may be broken and still be there for two minutes. Returns what it wanted before."""
        before = ""
        for other in self.members.values():
            if other is not member and other.client_id == member.client_id:
                before = other.key
                other.key, other.wanted = member.key, member.wanted
        return before

    def others(self, member: Member) -> dict[str, str]:
        """Client id -> subscription of the members besides this client."""
        return {
            other.client_id: other.key
            for other in self.members.values()
            if other.key and other.client_id != member.client_id
        }

    def unite(self) -> None:
        """What at least one member wants, for tools: of a topic that several want the expression
        of the first one."""
        self.edition += 1
        wanted: dict[str, Subscription] = {}
        for member in self.members.values():
            wanted = member.wanted | wanted
        self.replace(wanted)

    def replace(self, wanted: Mapping[str, Subscription], made: Made | None = None) -> bool:
        """Take over what is said for all members. `made` holds filters that are compiled already.
        Return whether topics came or went."""
        changed = wanted.keys() != self.watches.keys()
        self.edition += changed
        for topic in self.watches.keys() - wanted.keys():
            del self.watches[topic]
        for topic, new in wanted.items():
            watch = self.watches.get(topic)
            if watch is None or not watch.is_of(new):
                of, ready = (made or {}).get(topic, (None, None))
                self.watches[topic] = ready if ready is not None and of is new else Watch(new)
                self.edition += 1
            elif new.version > watch.subscription.version:
                watch.subscription = new
        return changed


class Standing(NamedTuple):
    """A member, and what it depends on that its heartbeats need not change anything."""

    group: ConsumerGroup
    edition: int
    config: GroupConfig
    member: Member
    filters: tuple[ConsumerFilter, ...]


class ContractError(Exception):
    """A subscription that a strict group does not take."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The subscription of a strict group's member that is away without having said so. It holds for
    so long after the last heartbeat as the member would have."""

    key: str
    seen_s: float


@dataclass(slots=True)
class Refusal:
    """`logged_s`: when the log said so last."""

    why: str
    peer: Peer
    logged_s: float


@dataclass(slots=True, eq=False)
class Contracts:
    """What the groups' contracts say, and whom they refused."""

    groups: Groups
    settings: Settings
    clock: Clock
    conflicts: dict[str, int] = field(default_factory=dict)
    """Subscriptions that differed from their group's, by group."""
    refused: dict[tuple[str, str], Refusal] = field(default_factory=dict)
    """(group, client id) -> why it is not a member, until it is one or its connection ends."""
    popping: set[str] = field(default_factory=set)
    """Groups of which somebody has popped."""
    popped_by: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    """(group, topic) -> kind and expression of its pops."""
    _claims: dict[str, dict[str, Claim]] = field(default_factory=dict)
    _warned: dict[str, set[str]] = field(default_factory=dict)
    """The subscriptions of each group that the log has named."""
    _warned_count: int = 0

    def of(self, group: str) -> str:
        """The group's contract; a value that nobody knows is the default."""
        config = self.groups.table.get(group)
        said = config.attributes.get(CONTRACT) if config is not None else None
        return said if said in CONTRACTS else COMPATIBLE

    # ------------------------------------------------------------------------------- claims

    def _has_claims(self, group: str) -> bool:
        """Does the group wait for members that have not said that they leave?"""
        return self.of(group) == STRICT

    def lost(self, group: str, client_id: str, key: str, seen_s: float) -> None:
        """A member's connection is gone, and it has not said that it leaves."""
        if key and self._has_claims(group):
            claims = self._claims.setdefault(group, {})
            if len(claims) < CLAIMS_MAX:
                claims[client_id] = Claim(key, seen_s)

    def release(self, group: str, client_id: str) -> None:
        """The client is back, or has left."""
        claims = self._claims.get(group)
        if claims is not None and claims.pop(client_id, None) is not None and not claims:
            del self._claims[group]

    def claims(self, group: str) -> dict[str, Claim]:
        """Those that still hold, by client id."""
        held = self._claims.get(group)
        if held is None:
            return {}
        limit_s = self.clock.monotonic_s() - self.settings.broker.client_expiry_ms / 1000
        for client_id in [client_id for client_id, c in held.items() if c.seen_s < limit_s]:
            del held[client_id]
        if not held or not self._has_claims(group):
            del self._claims[group]
            return {}
        return held

    # ------------------------------------------------------------------------------ refusals

    def refuse(
        self, group: str, client_id: str, key: str, others: Mapping[str, str], peer: Peer
    ) -> None:
        """Raises ContractError when a strict group has members (client id -> subscription) that
        want something else, or had them so lately that they are waited for."""
        different = {other: said for other, said in others.items() if said != key}
        if not different or self.of(group) != STRICT:
            self.refused.pop((group, client_id), None)
            return
        other, said = next(iter(different.items()))
        claims, where = self.claims(group), " that are online"
        if different.keys() <= claims.keys():  # all are away, and waited for
            seen_s = max(claims[client_id].seen_s for client_id in different)
            silent_ms = round((self.clock.monotonic_s() - seen_s) * 1000)
            left_ms = self.settings.broker.client_expiry_ms - silent_ms
            until = datetime.fromtimestamp((self.clock.now_ms() + left_ms) / 1000, UTC)
            where = (
                " that lost the connection without saying that they leave and are waited for until "
                f"{until:%Y-%m-%dT%H:%M:%SZ}"
            )
        why = (
            f"group {group} has the contract strict, and {client_id} subscribes something else "
            f"than {len(different)} member(s){where}, {other} among "
            f"them: {difference(said, key)}. Give it another group, the same subscription, or set "
            f"the contract to lanes: sluice group update {group} --contract lanes"
        )
        self.note(group, client_id, why, peer)
        raise ContractError(why)

    def note(self, group: str, client_id: str, why: str, peer: Peer) -> None:
        """Somebody is refused: tools show it, and the log says it now and then."""
        known = self.refused.get((group, client_id))
        now_s = self.clock.monotonic_s()
        if known is None:
            self.conflicts[group] = self.conflicts.get(group, 0) + 1
        if known is None or now_s - known.logged_s >= REMIND_S:
            log.warning("%s", why)
        else:
            now_s = known.logged_s
        if known is not None or len(self.refused) < REFUSED_MAX:
            self.refused[group, client_id] = Refusal(why, peer, now_s)

    def why_refused(self, group: str, peer: Peer, client_id: str | None) -> str:
        """Why a request's client is not a member; "" when it was not refused."""
        for (name, refused_id), refusal in self.refused.items():
            if name == group and (refusal.peer is peer or refused_id == client_id):
                return refusal.why
        return ""

    def disconnect(self, peer: Peer) -> None:
        """Whom we refused on this connection is gone."""
        for item in [item for item, refusal in self.refused.items() if refusal.peer is peer]:
            del self.refused[item]

    def split(self, group: str, client_id: str, key: str, others: Mapping[str, str]) -> None:
        """A member with a subscription of its own comes into a group: it gets a lane."""
        if key in self._warned.get(group, ()):
            return
        if self._warned_count >= WARNED_MAX:
            self._warned.clear()
            self._warned_count = 0
        self._warned.setdefault(group, set()).add(key)
        self._warned_count += 1
        self.conflicts[group] = self.conflicts.get(group, 0) + 1
        other, said = next(((o, s) for o, s in others.items() if s != key), ("", "[]"))
        if self.of(group) == COMPATIBLE:
            log.warning(
                "group %s: %s subscribes something else than %s: %s. Each subscription gets a "
                "lane of its own; with RocketMQ messages would be lost. If that is what you want, "
                "say so: sluice group update %s --contract lanes",
                group, client_id, other or "the members before it", difference(said, key), group,
            )  # fmt: skip

    def forget(self, group: str) -> None:
        """The group's last member has left."""
        self._warned_count -= len(self._warned.pop(group, ()))
        for item in [item for item in self.refused if item[0] == group]:
            del self.refused[item]

    def pops(self, group: str) -> list[tuple[str, str, str]]:
        """What the group pops: topic, kind and expression."""
        if group not in self.popping:
            return []
        return [(topic, *said) for (name, topic), said in self.popped_by.items() if name == group]

    def deleted(self, *, topic: str | None = None, group: str | None = None) -> None:
        """The topic, or the group, is no more."""
        for item in [item for item in self.popped_by if item[0] == group or item[1] == topic]:
            del self.popped_by[item]


@dataclass(slots=True, eq=False)
class Consumers:
    """Consumer groups that are online."""

    settings: Settings
    configs: Groups
    filters: ConsumerFilters
    lanes: Lanes
    contracts: Contracts
    clock: Clock
    held: HeldBytes
    groups: dict[str, ConsumerGroup] = field(default_factory=dict)
    notices: Notices = field(init=False)

    def __post_init__(self) -> None:
        self.notices = Notices(self.clock, self._notify)

    def watch(self, group: str, topic: str) -> Watch | None:
        found = self.groups.get(group)
        return found.watches.get(topic) if found is not None else None

    def name_of(self, name: str, peer: Peer) -> str:
        """The client id of a member; the address of somebody else. HOT."""
        group = self.groups.get(name)
        member = group.members.get(peer) if group is not None else None
        return member.client_id if member is not None else str(peer.remote)

    def groups_of(self, topic: str) -> set[str]:
        """Groups online that subscribe to the topic."""
        return {name for name, group in self.groups.items() if topic in group.watches}

    def lane_of(self, name: str, peer: Peer, fields: Mapping[str, str] | None) -> LaneReader | None:
        """THE question about lanes: for which one does a request ask? None: the group has none, or
        it is from somebody else."""
        lanes = self.lanes.table.get(name)
        group = self.groups.get(name)
        member = group.find(peer, fields) if lanes is not None and group is not None else None
        if lanes is None or member is None or member.key not in lanes.lanes:
            return None
        return LaneReader(lanes, member.client_id, member.key)

    def end_lanes(self, name: str) -> None:
        """The group pops, and nobody has read by its lanes."""
        if name in self.lanes.table:
            self.lanes.forget_group(name)
            if name in self.groups:
                self.groups[name].unite()

    def sharing(self, name: str, peer: Peer, fields: Mapping[str, str] | None) -> list[str]:
        """Client ids among whom a client shares the queues; in a group with lanes: those of the
        asker's lane, so that they balance all queues."""
        group = self.groups.get(name)
        if group is None:
            return []
        found = self.lane_of(name, peer, fields)
        if found is None:
            return group.client_ids
        return [m.client_id for m in group.members.values() if m.key == found.key]

    def commit(
        self,
        name: str,
        peer: Peer,
        fields: Mapping[str, str] | None,
        topic: str,
        queue_id: int,
        offset: int,
    ) -> None:
        """A consumer's commit, to the group's offsets or its lane's. In a group with lanes that of
        somebody who is no member belongs to none."""
        if name not in self.lanes.table:
            self.lanes.offsets.commit(name, topic, queue_id, offset)
        elif reader := self.lane_of(name, peer, fields):
            reader.commit((topic, queue_id), offset)

    # ----------------------------------------------------------------------------- heartbeats

    def making(self, data: ConsumerData) -> WorkItem[Subscribed]:
        """Compute, in steps, what `heartbeat` needs of a consumer's subscriptions. Filters are
        compiled where the group does not have them yet."""
        group, made = self.groups.get(data.group), dict[str, tuple[Subscription, Watch]]()
        topics = {item.topic: item for item in data.subscriptions}
        for count, item in enumerate(data.subscriptions, 1):
            watch = group.watches.get(item.topic) if group is not None else None
            if watch is None or not watch.is_of(item):
                made[item.topic] = item, Watch(item)
            if count % MADE_A_STEP == 0:
                yield None
        atoms = list[tuple[str, Atom]]()
        for count, atom in enumerate(named_atoms(data.group, data.subscriptions), 1):
            atoms.append(atom)
            if count % MADE_A_STEP == 0:
                yield None
        key = key_of(atoms) if data.message_model != BROADCASTING else ""
        by_tags = all(is_tag_kind(item.kind) for item in topics.values())
        yield None
        return Subscribed(key, topics, made, by_tags)

    def heartbeat(
        self, data: ConsumerData, member: Member, fingerprint: int, subscribed: Subscribed
    ) -> bool:
        """Take in a heartbeat with the subscriptions of which `making` has returned `subscribed`.
        Return whether the fingerprint was another before.

        Raises ContractError when the group takes no such subscription: then the client is not a
        member. The caller has counted in `held` what the member takes.
        """
        group = self.groups.get(data.group) or ConsumerGroup(data.group)
        known = group.members.get(member.peer) or member
        joined = member.peer not in group.members
        key = subscribed.key
        if key:
            self._check_contract(group.name, member, key)
        self.contracts.release(group.name, member.client_id)
        self.groups[group.name] = group
        group.consume_type = data.consume_type
        group.message_model = data.message_model
        group.consume_from_where = data.consume_from_where
        group.members[member.peer] = known
        said = known.client_id, known.key, known.fingerprint, known.wanted
        known.client_id, known.seen_s = member.client_id, member.seen_s
        known.wanted = subscribed.topics
        before, known.key = known.key, key
        if joined:
            before = group.replace_connection(known)
        keys = self._subscribe(group, known, before, subscribed.made)
        if not subscribed.by_tags or data.group in self.filters.table:
            self.filters.subscribed(
                data.group, [w for m in group.members.values() for w in m.wanted.values()]
            )
        old, group.fingerprint = group.fingerprint, fingerprint
        has_lanes = group.name in self.lanes.table
        if has_lanes:
            old = known.fingerprint
        known.fingerprint = fingerprint
        if joined or said != (known.client_id, key, fingerprint, known.wanted):
            group.edition += 1
        if joined:
            keys = {key} if has_lanes else None
        if keys is None or keys:
            self.notices.changed(group.name, keys)
        return old not in {0, fingerprint}

    def _check_contract(self, name: str, member: Member, key: str) -> None:
        """Take a member out of its group, and raise ContractError, if its subscription is refused
        there."""
        counting = self.claimed(name, member.client_id)
        lanes = self.lanes.table.get(name)
        if lanes is not None:  # in a strict group the oldest lane's subscription counts
            claimed = {claim.key for claim in self.contracts.claims(name).values()}
            live = [k for k in lanes.ordered()[0] if lanes.lanes[k].members or k in claimed]
            counting = {other: k for other, k in counting.items() if k in live[:1]}
        try:
            self.contracts.refuse(name, member.client_id, key, counting, member.peer)
        except ContractError:
            self.unregister(name, member.peer, member.client_id)
            raise

    def standing(self, name: str, peer: Peer) -> "Standing | None":
        """Of a member whose next heartbeat changes nothing when it says the same; None when that
        is not sure: the group is strict, has lanes or pops."""
        group, config = self.groups.get(name), self.configs.table.get(name)
        member = group.members.get(peer) if group is not None else None
        if (
            group is None
            or config is None
            or member is None
            or name in self.lanes.table
            or name in self.contracts.popping
            or self.contracts.of(name) == STRICT
        ):
            return None
        filters = tuple(self.filters.table.get(name, {}).values())
        return Standing(group, group.edition, config, member, filters)

    def claimed(self, name: str, client_id: str) -> dict[str, str]:
        """Client id -> subscription of the members besides this client, with those that are waited
        for."""
        group = self.groups.get(name)
        members = group.members.values() if group is not None else ()
        found = {m.client_id: m.key for m in members if m.key and m.client_id != client_id}
        for other, claim in self.contracts.claims(name).items():
            if other != client_id:
                found.setdefault(other, claim.key)
        return found

    def _subscribe(
        self, group: ConsumerGroup, member: Member, before: str, made: Made | None
    ) -> set[str] | None:
        """What a member wants becomes the group's, or its lane's. Returns the subscriptions whose
        members have to balance anew, None for all."""
        others = group.others(member)
        key = member.key
        if not others and not self.contracts.claims(group.name):
            self.contracts.popping.discard(group.name)
        if group.name not in self.lanes.table and set(others.values()) <= {key}:
            if key and key != group.key:
                is_first = group.consume_from_where == FROM_FIRST_OFFSET
                self.lanes.ground.first_member(group.name, key, from_first=is_first)
                group.key = key
            if not key and others:
                return set()
            return None if group.replace(member.wanted, made) else set()
        if not key:
            return set()
        if group.name in self.contracts.popping:
            group.unite()
            return None if before != key else set()
        is_new = self.lanes.enter(group.name, key, member.client_id, before, others)
        if is_new:
            self.contracts.split(group.name, member.client_id, key, others)
        group.unite()
        return {key, before} if is_new else set()

    def short_heartbeat(self, name: str, member: Member, fingerprint: int) -> bool:
        """A heartbeat that leaves the subscriptions out (V2). Returns whether the client has to
        send all of it: the group is not known or its fingerprint is another."""
        group = self.groups.get(name)
        if group is None or not group.watches:
            return True
        known = group.members.get(member.peer)
        has_lanes = name in self.lanes.table
        if known is not None:
            known.seen_s = member.seen_s
        elif has_lanes or group.fingerprint != fingerprint:  # perhaps another subscription
            return True
        else:
            self.held.take(member.peer, (CONSUMER, name), MEMBER_BYTES)
            self.contracts.release(name, member.client_id)
            member.key = group.key
            member.wanted = {t: watch.subscription for t, watch in group.watches.items()}
            group.members[member.peer] = member
            group.edition += 1
            self.notices.changed(name, None)
        expected = known.fingerprint if has_lanes and known is not None else group.fingerprint
        return expected != fingerprint

    def check(self, name: str, client_id: str, subscription: Subscription, peer: Peer) -> None:
        """Before a client starts: would a strict group take it? Only one of its topics is known.

        Raises ContractError.
        """
        mine = normal_atom(subscription.kind, subscription.expression)
        for other, said in self.claimed(name, client_id).items():
            if parse_key(said).get(subscription.topic) != mine:
                key = subscription_key(name, [subscription])
                self.contracts.refuse(name, client_id, key, {other: said}, peer)

    def _notify(self, name: str, keys: set[str] | None) -> int:
        """Tell the members of a group with these subscriptions (None: all) to balance again, and
        return their number: 0 for a group that broadcasts, where each member reads all queues."""
        group, config = self.groups.get(name), self.configs.table.get(name)
        if (
            group is None
            or group.message_model == BROADCASTING
            or not self.settings.broker.notify_consumer_changes
            or (config is not None and not config.notify_changes_enable)
        ):
            return 0
        fields = encode_header(ConsumerGroupRequest(group=name))
        told = [
            peer
            for peer, member in group.members.items()
            if peer.can_rebalance and (keys is None or member.key in keys)
        ]
        for peer in told:
            peer.send_oneway(Command(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, dict(fields)))
        return len(told)

    # -------------------------------------------------------------------------------- leaving

    def unregister(self, name: str, peer: Peer, client_id: str = "") -> None:
        """A client leaves, perhaps over another connection than its heartbeats came by."""
        self.held.release(peer, (CONSUMER, name))
        if client_id:
            self.contracts.release(name, client_id)
        group = self.groups.get(name)
        member = group.members.pop(peer, None) if group is not None else None
        if group is None or member is None:
            return
        group.edition += 1
        lanes = self.lanes.table.get(name)
        if lanes is not None and not any(
            (other.client_id, other.key) == (member.client_id, member.key)
            for other in group.members.values()
        ):
            lanes.leave(member.key, member.client_id)
        if not group.members:
            del self.groups[name]
            self.filters.subscribed(name, ())
            self.lanes.ground.last_member_left(name)
            self.contracts.forget(name)
        elif lanes is not None:
            group.unite()
        self.notices.changed(name, None if lanes is None else {member.key})

    def disconnecting(self, peer: Peer) -> WorkItem[None]:
        """Take a connection that broke out of its groups, one at each step. A strict group waits
        for a client that has not said that it leaves."""
        self.contracts.disconnect(peer)
        for name in self.held.groups(peer, CONSUMER):
            group = self.groups.get(name)
            member = group.members.get(peer) if group is not None else None
            self.unregister(name, peer)
            if group is not None and member is not None:
                if member.client_id not in group.client_ids:
                    self.contracts.lost(name, member.client_id, member.key, member.seen_s)
                yield None

    def expire(self, age_ms: int) -> list[Peer]:
        """Drops members whose last heartbeat is older; returns their connections."""
        limit_s = self.clock.monotonic_s() - age_ms / 1000
        members = [
            (group.name, m) for group in self.groups.values() for m in group.members.values()
        ]
        dead = [(name, member) for name, member in members if member.seen_s < limit_s]
        for name, member in dead:
            log.info("client %s of group %s is gone", member.client_id, name)
            self.unregister(name, member.peer)
        return [member.peer for _, member in dead]


class Producers:
    """Producer groups that are online."""

    def __init__(self, clock: Clock, held: HeldBytes) -> None:
        self._clock = clock
        self._held = held
        self.groups: dict[str, dict[Peer, Member]] = {}
        self._by_client: dict[str, Peer] = {}

    def find(self, client_id: str) -> Peer | None:
        """The connection of a client that is a producer of any group; None when it is away."""
        peer = self._by_client.get(client_id)
        return peer if peer is not None and not peer.closed else None

    def heartbeat(self, group: str, member: Member) -> None:
        """Note a member of a group. A new one, for which there is no room, is left out. Raises
        RequestError when its connection, or all, take too much memory."""
        members = self.groups.get(group, {})
        known = members.get(member.peer)
        if known is None and (len(self.groups) >= PRODUCER_GROUPS_MAX or len(group) > NAME_MAX):
            return
        self._held.take(member.peer, (PRODUCER, group), PRODUCER_BYTES + TEXT_BYTES * len(group))
        self._by_client[member.client_id] = member.peer
        if known is None:
            self.groups[group] = members
            members[member.peer] = member
            return
        if known.client_id != member.client_id and self._by_client.get(known.client_id) is (
            member.peer
        ):
            del self._by_client[known.client_id]
        known.client_id, known.seen_s = member.client_id, member.seen_s

    def unregister(self, group: str, peer: Peer) -> None:
        self._held.release(peer, (PRODUCER, group))
        members = self.groups.get(group)
        member = members.pop(peer, None) if members is not None else None
        if members is None or member is None:
            return
        if not members:
            del self.groups[group]
        if not self._held.has(peer, PRODUCER) and self._by_client.get(member.client_id) is peer:
            del self._by_client[member.client_id]

    def disconnecting(self, peer: Peer) -> WorkItem[None]:
        """Take a connection out of its groups, one at each step."""
        for group in self._held.groups(peer, PRODUCER):
            self.unregister(group, peer)
            yield None

    def expire(self, age_ms: int) -> list[Peer]:
        """As for consumers."""
        limit_s = self._clock.monotonic_s() - age_ms / 1000
        members = [(name, m) for name, group in self.groups.items() for m in group.values()]
        dead = [(name, member.peer) for name, member in members if member.seen_s < limit_s]
        for name, peer in dead:
            self.unregister(name, peer)
        return [peer for _, peer in dead]
