"""Connected producers and consumers by group, as their heartbeats report them.

A member of a group is a connection (spec/remoting.md §15). While all members have the same
subscription, a group has one subscription for each topic: the one in the heartbeats. A topic that
is missing in them is dropped (spec/filter.md §2). In RocketMQ the last heartbeat of any member sets
the subscription of all: members then filter with each other's expressions, and messages are lost.
Here the contract of the group decides what happens to a different subscription. The contract is the
group's attribute `sluice.contract`; RocketMQ keeps attributes that it does not know.

    compatible   the default. As in RocketMQ while all members have the same subscription; members
                 with another one get a lane of their own (`lanes/`). The log, a metric and
                 `sluice group show` warn.
    lanes        the same without a warning
    strict       a different subscription is refused: its heartbeat is answered with both
                 expressions, the client ids and the difference

A group that pops has no lanes: a member that pops a topic makes the whole group pop it, so only one
filter applies (`pop/assignment.py`).

A member leaves with UNREGISTER_CLIENT (35), when its connection closes, or `client_expiry_ms` (120
s) after its last heartbeat. A client whose connection breaks may come back: a stalled Java client
closes its socket after 3 s and sends its next heartbeat up to 30 s later. So in a strict group it
becomes an *absent member*, whose subscription still counts until the client is back, unregisters,
or would have expired. No other client can take over the group in the meantime.

Which members may consume a queue in order is decided by leases (`locks.py`).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sluicemq.broker.consume.client_memory import (
    CONSUMER,
    MEMBER_BYTES,
    PRODUCER,
    PRODUCER_BYTES,
    TEXT_BYTES,
    ClientMemory,
)
from sluicemq.broker.consume.contracts import STRICT, ContractError, Contracts
from sluicemq.broker.consume.filters import CompiledSubscription, ConsumerFilters
from sluicemq.broker.consume.notices import GroupChangeNotices
from sluicemq.broker.context import BrokerContext
from sluicemq.broker.lanes.rules import (
    Atom,
    encode_key,
    iter_topic_atoms,
    normalize_atom,
    parse_key,
    subscription_key,
)
from sluicemq.broker.lanes.table import LaneMember, Lanes
from sluicemq.clock import Clock
from sluicemq.filter.subscriptions import is_tag_kind
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import GroupConfig
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
"""The most producer groups. Any name is accepted; a group ends when its last member leaves."""
NAME_MAX: Final = 255
"""The longest name of a producer group, in characters."""
SUBSCRIPTIONS_PER_STEP: Final = 64
"""The number of subscriptions whose filters are compiled in one step."""


CompiledByTopic = Mapping[str, tuple[Subscription, CompiledSubscription]]
"""By topic: a subscription, and the same subscription with its compiled filter."""


class HeartbeatSubscriptions(NamedTuple):
    """The subscriptions of one consumer, from one heartbeat.

    `key` is its `subscription_key`, "" for a broadcast consumer. `by_topic` is the subscription to
    each topic. `compiled` contains those whose filters the group does not have yet. `is_tag_type`
    says whether all filters select by tags.
    """

    key: str
    by_topic: dict[str, Subscription]
    compiled: CompiledByTopic
    is_tag_type: bool


@dataclass(slots=True, eq=False)
class Member:
    """One connection in one group."""

    client_id: str
    peer: Peer
    language: str
    version: int
    heartbeat_s: float
    """When the last heartbeat came, on the monotonic clock.

    A change of the wall clock must not expire the member.
    """
    subscription_key: str = ""
    """Its subscriptions as one text (`lanes/rules.py`); "" if it assigns queues itself."""
    fingerprint: int = 0
    """The hash of its subscriptions that the client sent (heartbeat V2), 0 without one."""
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    """Its subscription to each topic."""


@dataclass(slots=True, eq=False)
class ConsumerGroup:
    """The connected members of one consumer group, and its subscriptions."""

    name: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    fingerprint: int = 0
    subscription_key: str = ""
    """The key that all members have in common while they have the same subscriptions."""
    change_count: int = 0
    """Increases with each change of the members or subscriptions."""
    members: dict[Peer, Member] = field(default_factory=dict)
    subscriptions: dict[str, CompiledSubscription] = field(default_factory=dict)
    """By topic: the subscription of the group with its compiled filter."""

    @property
    def client_ids(self) -> list[str]:
        """The client ids of the members, without duplicates.

        A client may have two connections, for example one that leads through another replica. If it
        were listed twice, it would rebalance as if half of its queues belonged to another client.
        """
        return list(dict.fromkeys(member.client_id for member in self.members.values()))

    def find_member(self, peer: Peer, fields: Mapping[str, str] | None) -> Member | None:
        """Return the member that sent a request with these header fields on `peer`, or None.

        If `peer` is not a member itself, return a member with the client id in CLIENT_ID_FIELD. If
        that client has several connections, return the one with its last heartbeat: the others may
        be broken, and their subscriptions outdated.
        """
        member = self.members.get(peer)
        if member is not None or not fields:
            return member
        client_id = fields.get(CLIENT_ID_FIELD)
        if client_id is None:
            return None
        for other in self.members.values():
            is_later = member is None or other.heartbeat_s >= member.heartbeat_s
            if other.client_id == client_id and is_later:
                member = other
        return member

    def update_older_connections(self, member: Member) -> str:
        """Copy the subscriptions of a member to the older connections of the same client.

        An older connection may be broken and still be listed for two minutes. Return the
        subscription key that the client had before, "" if it had no other connection.
        """
        before = ""
        for other in self.members.values():
            if other is not member and other.client_id == member.client_id:
                before = other.subscription_key
                other.subscription_key = member.subscription_key
                other.subscriptions = member.subscriptions
        return before

    def other_subscription_keys(self, member: Member) -> dict[str, str]:
        """Return the subscription keys of the other clients, by client id."""
        return {
            other.client_id: other.subscription_key
            for other in self.members.values()
            if other.subscription_key and other.client_id != member.client_id
        }

    def merge_member_subscriptions(self) -> None:
        """Set the group's subscriptions to the union of its members', as tools show them.

        For a topic to which several members subscribe, the expression of the first one is taken.
        """
        self.change_count += 1
        merged: dict[str, Subscription] = {}
        for member in self.members.values():
            merged = member.subscriptions | merged
        self.replace_subscriptions(merged)

    def replace_subscriptions(
        self, subscriptions: Mapping[str, Subscription], compiled: CompiledByTopic | None = None
    ) -> bool:
        """Set the subscriptions of the group, by topic. Return whether the set of topics changed.

        A changed filter is taken from `compiled` if it was compiled there for this subscription,
        and is compiled here otherwise. If only the version of a subscription is newer, its filter
        stays. `change_count` increases with each change.
        """
        topics_changed = subscriptions.keys() != self.subscriptions.keys()
        self.change_count += topics_changed
        for topic in self.subscriptions.keys() - subscriptions.keys():
            del self.subscriptions[topic]
        for topic, new in subscriptions.items():
            current = self.subscriptions.get(topic)
            if current is None or not current.has_same_filter(new):
                compiled_from, ready = (compiled or {}).get(topic, (None, None))
                if ready is None or compiled_from is not new:
                    ready = CompiledSubscription(new)
                self.subscriptions[topic] = ready
                self.change_count += 1
            elif new.version > current.subscription.version:
                current.subscription = new
        return topics_changed


class MemberSnapshot(NamedTuple):
    """A member and everything on which the effect of its next heartbeat depends.

    If two snapshots are equal, a repeated heartbeat between them changed nothing.
    """

    group: ConsumerGroup
    change_count: int
    config: GroupConfig
    member: Member
    filters: tuple[ConsumerFilter, ...]


class Consumers:
    """The consumer groups that have connected members."""

    def __init__(
        self,
        context: BrokerContext,
        *,
        filters: ConsumerFilters,
        lanes: Lanes,
        contracts: Contracts,
        memory: ClientMemory,
    ) -> None:
        """Create the table without groups.

        `filters` keeps SQL92 expressions, `lanes` has the groups with lanes, `contracts` decides
        about different subscriptions, and `memory` limits what heartbeats make the broker use.
        """
        self.settings = context.settings
        self.clock = context.clock
        self.group_configs = context.groups
        self.filters = filters
        self.lanes = lanes
        self.contracts = contracts
        self.memory = memory
        self.groups: dict[str, ConsumerGroup] = {}
        """The groups that have connected members, by name."""
        self.notices = GroupChangeNotices(self.clock, self._notify_members)

    def find_subscription(self, group: str, topic: str) -> CompiledSubscription | None:
        """Return the group's subscription to a topic with its filter; None if there is none."""
        members = self.groups.get(group)
        return members.subscriptions.get(topic) if members is not None else None

    def client_name(self, group_name: str, peer: Peer) -> str:
        """Return the client id of a member, or the address of a connection that is not a member.

        Called for each pop: keep it cheap.
        """
        group = self.groups.get(group_name)
        member = group.members.get(peer) if group is not None else None
        return member.client_id if member is not None else str(peer.remote)

    def groups_subscribed_to(self, topic: str) -> set[str]:
        """Return the names of the connected groups that subscribe to the topic."""
        return {
            group_name for group_name, group in self.groups.items() if topic in group.subscriptions
        }

    def lane_of(
        self, group_name: str, peer: Peer, fields: Mapping[str, str] | None
    ) -> LaneMember | None:
        """Return the lane for which the client of a request reads; None without a lane.

        `peer` and `fields` are the connection and the header fields of the request. There is none
        if the group has no lanes, or the request is not from a member with a lane.
        This is the only question that the rest of the broker asks about lanes.
        """
        lanes = self.lanes.table.get(group_name)
        group = self.groups.get(group_name)
        if lanes is None or group is None:
            return None
        member = group.find_member(peer, fields)
        if member is None or member.subscription_key not in lanes.lanes:
            return None
        return LaneMember(lanes, member.client_id, member.subscription_key)

    def end_lanes(self, group_name: str) -> None:
        """End the lanes of a group that pops, because no member reads by them.

        The group's subscriptions become the union of its members'. Do nothing without lanes.
        """
        if group_name in self.lanes.table:
            self.lanes.forget_group(group_name)
            if group_name in self.groups:
                self.groups[group_name].merge_member_subscriptions()

    def client_ids_sharing_queues(
        self, group_name: str, peer: Peer, fields: Mapping[str, str] | None
    ) -> list[str]:
        """Return the ids of the clients among which the requesting client distributes the queues.

        In a group with lanes these are the clients of its lane, because each lane reads all queues.
        Otherwise these are all clients of the group. Return [] if the group has no members.
        """
        group = self.groups.get(group_name)
        if group is None:
            return []
        lane = self.lane_of(group_name, peer, fields)
        if lane is None:
            return group.client_ids
        return [
            member.client_id
            for member in group.members.values()
            if member.subscription_key == lane.key
        ]

    def commit_offset(
        self,
        group_name: str,
        peer: Peer,
        fields: Mapping[str, str] | None,
        topic: str,
        queue_id: int,
        offset: int,
    ) -> None:
        """Commit an offset of a queue, for the group or for the lane of the requesting member.

        `peer` and `fields` are the connection and the header fields of the request, by which the
        member is found. In a group with lanes, do nothing if the client is not a member with a
        lane.
        """
        if group_name not in self.lanes.table:
            self.lanes.offsets.commit(group_name, topic, queue_id, offset)
        elif lane_member := self.lane_of(group_name, peer, fields):
            lane_member.commit((topic, queue_id), offset)

    # ----------------------------------------------------------------------------- heartbeats

    def prepare_subscriptions(self, data: ConsumerData) -> WorkItem[HeartbeatSubscriptions]:
        """Compute, in steps, what `record_heartbeat` needs of a consumer's subscriptions.

        Compile the filters that the group does not have yet. Work item: it yields None after each
        SUBSCRIPTIONS_PER_STEP subscriptions, where other work may run. Nothing is recorded.
        """
        group = self.groups.get(data.group)
        by_topic = {item.topic: item for item in data.subscriptions}
        compiled = dict[str, tuple[Subscription, CompiledSubscription]]()
        for count, item in enumerate(data.subscriptions, 1):
            current = group.subscriptions.get(item.topic) if group is not None else None
            if current is None or not current.has_same_filter(item):
                compiled[item.topic] = item, CompiledSubscription(item)
            if count % SUBSCRIPTIONS_PER_STEP == 0:
                yield None

        atoms = list[tuple[str, Atom]]()
        for count, atom in enumerate(iter_topic_atoms(data.group, data.subscriptions), 1):
            atoms.append(atom)
            if count % SUBSCRIPTIONS_PER_STEP == 0:
                yield None

        key = encode_key(atoms) if data.message_model != BROADCASTING else ""
        is_tag_type = all(is_tag_kind(item.kind) for item in by_topic.values())
        yield None
        return HeartbeatSubscriptions(key, by_topic, compiled, is_tag_type)

    def record_heartbeat(
        self,
        data: ConsumerData,
        member: Member,
        fingerprint: int,
        subscribed: HeartbeatSubscriptions,
    ) -> bool:
        """Add or update a member by its full heartbeat, and apply its subscriptions.

        `data` is the part of the heartbeat about the group, `member` the client with its
        connection, `fingerprint` the hash of the subscriptions that the client sent (0 without
        one), and `subscribed` what `prepare_subscriptions` returned for `data`. The caller has
        reserved the memory of the member (`ClientMemory`).

        The subscriptions become those of the group, or of a lane if they differ. SQL92 expressions
        are kept in `filters`. Members are notified to rebalance if a member has joined or the
        topics or lanes have changed. Return whether the last fingerprint (of the group, or of the
        member in a group with lanes) was another one; False if there was none.

        Raises ContractError if the group refuses the subscriptions. Then the client is not a
        member.
        """
        group = self.groups.get(data.group) or ConsumerGroup(data.group)
        known = group.members.get(member.peer) or member
        joined = member.peer not in group.members
        key = subscribed.key
        if key:
            self._check_contract(group.name, member, key)
        self.contracts.remove_absent_member(group.name, member.client_id)

        self.groups[group.name] = group
        group.consume_type = data.consume_type
        group.message_model = data.message_model
        group.consume_from_where = data.consume_from_where
        group.members[member.peer] = known
        # Compared at the end, to find out whether the heartbeat has changed the member.
        before_update = (
            known.client_id,
            known.subscription_key,
            known.fingerprint,
            known.subscriptions,
        )
        known.client_id = member.client_id
        known.heartbeat_s = member.heartbeat_s
        known.subscriptions = subscribed.by_topic
        old_key = known.subscription_key
        known.subscription_key = key
        if joined:
            old_key = group.update_older_connections(known)
        rebalancing_keys = self._subscribe(group, known, old_key, subscribed.compiled)
        if not subscribed.is_tag_type or data.group in self.filters.table:
            all_subscriptions = [
                subscription
                for other in group.members.values()
                for subscription in other.subscriptions.values()
            ]
            self.filters.update_group(data.group, all_subscriptions)

        # In a group with lanes each member has a fingerprint of its own.
        old_fingerprint = group.fingerprint
        group.fingerprint = fingerprint
        has_lanes = group.name in self.lanes.table
        if has_lanes:
            old_fingerprint = known.fingerprint
        known.fingerprint = fingerprint
        if joined or before_update != (known.client_id, key, fingerprint, known.subscriptions):
            group.change_count += 1
        if joined:
            rebalancing_keys = {key} if has_lanes else None
        must_notify = rebalancing_keys is None or bool(rebalancing_keys)  # None: all members
        if must_notify:
            self.notices.notify_change(group.name, rebalancing_keys)
        return old_fingerprint not in {0, fingerprint}

    def _check_contract(self, group_name: str, member: Member, key: str) -> None:
        """Raise ContractError, and remove the member, if the group refuses its subscription.

        `key` is the member's new subscription key.
        """
        others = self.other_subscription_keys(group_name, member.client_id)
        lanes = self.lanes.table.get(group_name)
        if lanes is not None:
            # A strict group may have lanes from the time before it was strict. Then the
            # subscription of the oldest lane counts that still has members.
            absent_keys = {
                absent.subscription_key
                for absent in self.contracts.absent_members(group_name).values()
            }
            live_keys, _ = lanes.get_live_and_idle_keys()
            used_keys = [k for k in live_keys if lanes.lanes[k].members or k in absent_keys]
            others = {other: k for other, k in others.items() if k in used_keys[:1]}
        try:
            self.contracts.check_subscription(
                group_name, member.client_id, key, others, member.peer
            )
        except ContractError:
            self.unregister(group_name, member.peer, member.client_id)
            raise

    def snapshot_member(self, group_name: str, peer: Peer) -> "MemberSnapshot | None":
        """Return a snapshot of the member with this connection, to detect repeated heartbeats.

        Return None if an equal heartbeat might change something nevertheless: there is no such
        member, or the group is not configured, is strict, has lanes or pops.
        """
        group = self.groups.get(group_name)
        config = self.group_configs.table.get(group_name)
        member = group.members.get(peer) if group is not None else None
        if (
            group is None
            or config is None
            or member is None
            or group_name in self.lanes.table
            or group_name in self.contracts.popping_groups
            or self.contracts.contract_of(group_name) == STRICT
        ):
            return None
        filters = tuple(self.filters.table.get(group_name, {}).values())
        return MemberSnapshot(group, group.change_count, config, member, filters)

    def other_subscription_keys(self, group_name: str, client_id: str) -> dict[str, str]:
        """Return the subscription keys of the other clients and absent members, by client id.

        Clients without a key, which assign queues themselves, are left out.
        """
        group = self.groups.get(group_name)
        members = group.members.values() if group is not None else ()
        keys = {
            member.client_id: member.subscription_key
            for member in members
            if member.subscription_key and member.client_id != client_id
        }
        for other, absent in self.contracts.absent_members(group_name).items():
            if other != client_id:
                keys.setdefault(other, absent.subscription_key)
        return keys

    def _subscribe(
        self, group: ConsumerGroup, member: Member, old_key: str, compiled: CompiledByTopic | None
    ) -> set[str] | None:
        """Apply the subscriptions of a member to its group or its lane.

        `old_key` is the subscription key that the client had before; "" if it had none. Return the
        subscription keys of the members that have to rebalance; None means all members, and an
        empty set means none. There are four cases:

        1. All members have the same subscriptions: these become the subscriptions of the group. All
           members rebalance if the topics have changed.
        2. The member assigns queues itself (no key) beside others: the group does not change.
        3. The group pops: its subscriptions become the union of its members'. All members rebalance
           if the member's subscriptions have changed.
        4. The subscriptions differ: the member is added to the lane with its key. If that is new to
           it, the members of its old and new lane rebalance.
        """
        others = group.other_subscription_keys(member)
        key = member.subscription_key
        if not others and not self.contracts.absent_members(group.name):
            self.contracts.popping_groups.discard(group.name)

        have_all_same_key = set(others.values()) <= {key}
        if group.name not in self.lanes.table and have_all_same_key:
            if key and key != group.subscription_key:
                is_first = group.consume_from_where == FROM_FIRST_OFFSET
                self.lanes.storage.start_join_offsets(group.name, key, from_first=is_first)
                group.subscription_key = key
            if not key and others:
                return set()
            topics_changed = group.replace_subscriptions(member.subscriptions, compiled)
            return None if topics_changed else set()

        if not key:
            return set()
        if group.name in self.contracts.popping_groups:
            group.merge_member_subscriptions()
            return None if old_key != key else set()
        is_new = self.lanes.add_member(group.name, key, member.client_id, old_key, others)
        if is_new:
            self.contracts.record_lane_member(group.name, member.client_id, key, others)
        group.merge_member_subscriptions()
        return {key, old_key} if is_new else set()

    def record_short_heartbeat(self, group_name: str, member: Member, fingerprint: int) -> bool:
        """Update or add a member by a heartbeat without subscriptions (V2).

        A new member gets the subscriptions of the group, if it has no lanes and the client's
        `fingerprint` is the group's; members are notified to rebalance then. Return True if the
        client has to send a full heartbeat, because the group has no subscriptions or the
        fingerprint is another.

        Raises RequestError if a new member would use too much memory.
        """
        group = self.groups.get(group_name)
        if group is None or not group.subscriptions:
            return True
        known = group.members.get(member.peer)
        has_lanes = group_name in self.lanes.table
        if known is not None:
            known.heartbeat_s = member.heartbeat_s
        elif has_lanes or group.fingerprint != fingerprint:
            return True  # the client may have another subscription
        else:
            self.memory.reserve(member.peer, (CONSUMER, group_name), MEMBER_BYTES)
            self.contracts.remove_absent_member(group_name, member.client_id)
            member.subscription_key = group.subscription_key
            member.subscriptions = {
                topic: compiled.subscription for topic, compiled in group.subscriptions.items()
            }
            group.members[member.peer] = member
            group.change_count += 1
            self.notices.notify_change(group_name, None)
        expected = known.fingerprint if has_lanes and known is not None else group.fingerprint
        return expected != fingerprint

    def check_subscription(
        self, group_name: str, client_id: str, subscription: Subscription, peer: Peer
    ) -> None:
        """Raise ContractError if a strict group would refuse a client that is about to start.

        The refusal is recorded, as for a heartbeat. Only one of the client's subscriptions is
        known; it is compared with the same topic of each member.
        """
        atom = normalize_atom(subscription.kind, subscription.expression)
        for other, other_key in self.other_subscription_keys(group_name, client_id).items():
            if parse_key(other_key).get(subscription.topic) != atom:
                key = subscription_key(group_name, [subscription])
                self.contracts.check_subscription(
                    group_name, client_id, key, {other: other_key}, peer
                )

    def _notify_members(self, group_name: str, keys: set[str] | None) -> int:
        """Send NOTIFY_CONSUMER_IDS_CHANGED to the members with one of these subscription keys.

        None as `keys` means all members. Only clients that can rebalance are notified. Return the
        number of notified members. It is 0 if notices are disabled in the configuration of the
        broker or the group, and in a broadcasting group, where each member reads all queues.
        """
        group = self.groups.get(group_name)
        config = self.group_configs.table.get(group_name)
        if (
            group is None
            or group.message_model == BROADCASTING
            or not self.settings.broker.notify_consumer_changes
            or (config is not None and not config.notify_changes_enable)
        ):
            return 0
        fields = encode_header(ConsumerGroupRequest(group=group_name))
        notified = [
            peer
            for peer, member in group.members.items()
            if peer.can_rebalance and (keys is None or member.subscription_key in keys)
        ]
        for peer in notified:
            peer.send_oneway(Command(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, dict(fields)))
        return len(notified)

    # -------------------------------------------------------------------------------- leaving

    def unregister(self, group_name: str, peer: Peer, client_id: str = "") -> None:
        """Remove the member with the connection `peer` from a group, and release its memory.

        The client leaves its lane, unless it has another connection. A group without members is
        removed, and its SQL92 expressions become dead. The other members, or those of the lane, are
        notified to rebalance.

        If `client_id` is not "", the client also stops being an absent member, even if its request
        comes on another connection than its heartbeats did. Do nothing else if `peer` is not a
        member.
        """
        self.memory.release(peer, (CONSUMER, group_name))
        if client_id:
            self.contracts.remove_absent_member(group_name, client_id)
        group = self.groups.get(group_name)
        member = group.members.pop(peer, None) if group is not None else None
        if group is None or member is None:
            return
        group.change_count += 1
        lanes = self.lanes.table.get(group_name)
        if lanes is not None and not any(
            (other.client_id, other.subscription_key) == (member.client_id, member.subscription_key)
            for other in group.members.values()
        ):
            lanes.remove_member(member.subscription_key, member.client_id)
        if not group.members:
            del self.groups[group_name]
            self.filters.update_group(group_name, ())
            self.lanes.storage.forget_join_offsets(group_name)
            self.contracts.forget_group(group_name)
        elif lanes is not None:
            group.merge_member_subscriptions()
        self.notices.notify_change(group_name, None if lanes is None else {member.subscription_key})

    def remove_connection(self, peer: Peer) -> WorkItem[None]:
        """Remove a closed connection from its groups, one group at each step.

        A client of a strict group becomes an absent member unless it has another connection. Work
        item: it yields None after each group.
        """
        self.contracts.forget_connection(peer)
        for group_name in self.memory.groups_of(peer, CONSUMER):
            group = self.groups.get(group_name)
            member = group.members.get(peer) if group is not None else None
            self.unregister(group_name, peer)
            if group is not None and member is not None:
                if member.client_id not in group.client_ids:
                    self.contracts.add_absent_member(
                        group_name, member.client_id, member.subscription_key, member.heartbeat_s
                    )
                yield None

    def expire(self, age_ms: int) -> list[Peer]:
        """Remove members whose last heartbeat is older than `age_ms`. Return their connections.

        Each removal is logged. A connection is listed once for each of its groups.
        """
        limit_s = self.clock.monotonic_s() - age_ms / 1000
        expired = [
            (group.name, member)
            for group in self.groups.values()
            for member in group.members.values()
            if member.heartbeat_s < limit_s
        ]
        for group_name, member in expired:
            log.info(
                "removed client %s from group %s: its heartbeats stopped",
                member.client_id,
                group_name,
            )
            self.unregister(group_name, member.peer)
        return [member.peer for _, member in expired]


class Producers:
    """The producer groups that have connected members."""

    def __init__(self, clock: Clock, memory: ClientMemory) -> None:
        """Create the table without groups. `memory` limits what heartbeats use."""
        self._clock = clock
        self._memory = memory
        self.groups: dict[str, dict[Peer, Member]] = {}
        """By group and connection: the members."""
        self._by_client: dict[str, Peer] = {}
        """By client id: the connection of the client's last heartbeat."""

    def find_connection(self, client_id: str) -> Peer | None:
        """Return the open connection of a client that is a producer of any group, or None."""
        peer = self._by_client.get(client_id)
        return peer if peer is not None and not peer.closed else None

    def record_heartbeat(self, group: str, member: Member) -> None:
        """Add or update a member of a producer group, and reserve its memory.

        The connection becomes the one that `find_connection` returns for the client. A new member
        is ignored if there are PRODUCER_GROUPS_MAX groups or the name is too long. Raises
        RequestError if the connection, or all connections together, would use too much memory.
        """
        members = self.groups.get(group, {})
        known = members.get(member.peer)
        if known is None and (len(self.groups) >= PRODUCER_GROUPS_MAX or len(group) > NAME_MAX):
            return
        self._memory.reserve(
            member.peer, (PRODUCER, group), PRODUCER_BYTES + TEXT_BYTES * len(group)
        )
        self._by_client[member.client_id] = member.peer
        if known is None:
            self.groups[group] = members
            members[member.peer] = member
            return
        has_new_id = known.client_id != member.client_id
        if has_new_id and self._by_client.get(known.client_id) is member.peer:
            del self._by_client[known.client_id]
        known.client_id = member.client_id
        known.heartbeat_s = member.heartbeat_s

    def unregister(self, group: str, peer: Peer) -> None:
        """Remove the connection `peer` from a group, and release its memory.

        If it is in no other producer group, `find_connection` does not return it any more. Do
        nothing if it is not a member.
        """
        self._memory.release(peer, (PRODUCER, group))
        members = self.groups.get(group)
        member = members.pop(peer, None) if members is not None else None
        if members is None or member is None:
            return
        if not members:
            del self.groups[group]
        if (
            not self._memory.has_role(peer, PRODUCER)
            and self._by_client.get(member.client_id) is peer
        ):
            del self._by_client[member.client_id]

    def remove_connection(self, peer: Peer) -> WorkItem[None]:
        """Remove a closed connection from its groups. Work item: None is yielded after each."""
        for group in self._memory.groups_of(peer, PRODUCER):
            self.unregister(group, peer)
            yield None

    def expire(self, age_ms: int) -> list[Peer]:
        """Remove members whose last heartbeat is older than `age_ms`. Return their connections.

        A connection is listed once for each of its groups.
        """
        limit_s = self._clock.monotonic_s() - age_ms / 1000
        expired = [
            (name, member.peer)
            for name, group in self.groups.items()
            for member in group.values()
            if member.heartbeat_s < limit_s
        ]
        for name, peer in expired:
            self.unregister(name, peer)
        return [peer for _, peer in expired]
