"""Connected consumers by group, as their heartbeats report them.

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

    @property
    def reported_state(self) -> tuple[object, ...]:
        """What a heartbeat may change, apart from its time."""
        return (self.client_id, self.subscription_key, self.fingerprint, self.subscriptions)


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

        If no heartbeat came over `peer`, the member is found by its client id, which the field
        CLIENT_ID_FIELD contains. If that client has several connections, the one with the latest
        heartbeat is returned, because the others may be broken, and their subscriptions outdated.
        """
        member = self.members.get(peer)
        if member is not None or not fields:
            return member
        client_id = fields.get(CLIENT_ID_FIELD)
        if client_id is None:
            return None

        latest: Member | None = None
        for candidate in self.members.values():
            if candidate.client_id != client_id:
                continue
            if latest is None or candidate.heartbeat_s >= latest.heartbeat_s:
                latest = candidate
        return latest

    def update_older_connections(self, member: Member) -> str:
        """Copy the subscriptions of a member to the older connections of the same client.

        An older connection may be broken and still be listed for two minutes. Return the
        subscription key (an encoding of all subscriptions) that the client had before, or "" if it
        had no other connection.
        """
        previous_key = ""
        for older in self.members.values():
            if older is not member and older.client_id == member.client_id:
                previous_key = older.subscription_key
                older.subscription_key = member.subscription_key
                older.subscriptions = member.subscriptions
        return previous_key

    def has_other_connection(self, removed: Member) -> bool:
        """Return whether the client of `removed` has another connection in the group.

        Only a connection with the same subscriptions counts.
        """
        return any(
            member.client_id == removed.client_id
            and member.subscription_key == removed.subscription_key
            for member in self.members.values()
        )

    def other_subscription_keys(self, member: Member) -> dict[str, str]:
        """Return the subscription keys of the other clients, by client id.

        Clients without a key, which assign queues themselves, are left out.
        """
        return {
            other_member.client_id: other_member.subscription_key
            for other_member in self.members.values()
            if other_member.subscription_key and other_member.client_id != member.client_id
        }

    def list_member_subscriptions(self) -> list[Subscription]:
        """Return the subscriptions of all members. Equal ones are repeated."""
        subscriptions: list[Subscription] = []
        for member in self.members.values():
            subscriptions += member.subscriptions.values()
        return subscriptions

    def merge_member_subscriptions(self) -> None:
        """Set the subscriptions of the group, as tools show them, to those of all members.

        If several members subscribe to a topic, the expression of the first member is used.
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

        The filter of a new or changed subscription is taken from `compiled` if it is there, and is
        compiled here otherwise. If only the version of a subscription is newer, its filter stays.
        `change_count` increases with each change.
        """
        topics_changed = subscriptions.keys() != self.subscriptions.keys()
        self.change_count += topics_changed
        for topic in self.subscriptions.keys() - subscriptions.keys():
            del self.subscriptions[topic]

        for topic, subscription in subscriptions.items():
            current = self.subscriptions.get(topic)
            if current is None or not current.has_same_filter(subscription):
                self.subscriptions[topic] = _take_or_compile(topic, subscription, compiled or {})
                self.change_count += 1
            elif subscription.version > current.subscription.version:
                current.subscription = subscription
        return topics_changed


def _take_or_compile(
    topic: str, subscription: Subscription, compiled: CompiledByTopic
) -> CompiledSubscription:
    """Return `subscription` with its filter, which is taken from `compiled` or compiled here.

    `compiled` may have the filter of another subscription to `topic`. That one is not used.
    """
    if topic in compiled:
        compiled_from, compiled_subscription = compiled[topic]
        if compiled_from is subscription:
            return compiled_subscription
    return CompiledSubscription(subscription)


def _list_atoms(consumer: ConsumerData) -> WorkItem[list[tuple[str, Atom]]]:
    """Return (topic, filter expression) for each subscription of a consumer, in steps.

    This is a generator, which yields None after each SUBSCRIPTIONS_PER_STEP subscriptions.
    """
    atoms: list[tuple[str, Atom]] = []
    for count, atom in enumerate(iter_topic_atoms(consumer.group, consumer.subscriptions), 1):
        atoms.append(atom)
        if count % SUBSCRIPTIONS_PER_STEP == 0:
            yield None
    return atoms


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
        """Create the table of connected consumers, without groups.

        `filters` keeps SQL92 expressions of groups. `lanes` has the groups whose members have
        different subscriptions. `contracts` decides whether a group may have different
        subscriptions. `memory` limits the memory that heartbeats may use.
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
        """Return the lane of the client that sent a request, or None if it has none.

        A lane is the members of a group that have the same subscription. `peer` and `fields` are
        the connection and the header fields of the request. Return None if the group has no lanes,
        or if the client is not a member with a lane.
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
        """End the lanes of a group, because it pops now, which needs no lanes.

        The subscriptions of the group become those of all members together. Do nothing if the group
        has no lanes.
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

        The member is found by `peer` and `fields`, the connection and the header fields of its
        request. If the group has lanes, and the client is not a member with a lane, nothing is
        committed.
        """
        if group_name not in self.lanes.table:
            self.lanes.offsets.commit(group_name, topic, queue_id, offset)
            return
        lane = self.lane_of(group_name, peer, fields)
        if lane is not None:
            lane.commit((topic, queue_id), offset)

    # ----------------------------------------------------------------------------- heartbeats

    def prepare_subscriptions(self, consumer: ConsumerData) -> WorkItem[HeartbeatSubscriptions]:
        """Prepare the subscriptions in a heartbeat for `record_heartbeat`, in steps.

        Filters that the group does not have yet are compiled. Nothing is recorded. This is a
        generator, which yields None after each SUBSCRIPTIONS_PER_STEP subscriptions, so that other
        work can run. Its return value is passed to `record_heartbeat`.
        """
        group = self.groups.get(consumer.group)
        by_topic: dict[str, Subscription] = {}
        compiled: dict[str, tuple[Subscription, CompiledSubscription]] = {}
        for count, subscription in enumerate(consumer.subscriptions, 1):
            topic = subscription.topic
            by_topic[topic] = subscription
            current = group.subscriptions.get(topic) if group is not None else None
            if current is None or not current.has_same_filter(subscription):
                compiled[topic] = (subscription, CompiledSubscription(subscription))
            if count % SUBSCRIPTIONS_PER_STEP == 0:
                yield None

        atoms = yield from _list_atoms(consumer)
        is_broadcast = consumer.message_model == BROADCASTING
        subscription_key = "" if is_broadcast else encode_key(atoms)
        is_tag_type = all(is_tag_kind(subscription.kind) for subscription in by_topic.values())
        yield None
        return HeartbeatSubscriptions(subscription_key, by_topic, compiled, is_tag_type)

    def record_heartbeat(
        self,
        consumer: ConsumerData,
        member: Member,
        fingerprint: int,
        subscribed: HeartbeatSubscriptions,
    ) -> bool:
        """Add or update a member by its full heartbeat, and apply its subscriptions.

        `consumer` is the part of the heartbeat about the group, `member` the client with its
        connection, `fingerprint` the hash of the subscriptions that the client sent (0 without
        one), and `subscribed` what `prepare_subscriptions` returned for `consumer`. The caller has
        reserved the memory of the member (`ClientMemory`).

        The subscriptions become those of the group, or of a lane if they differ. SQL92 expressions
        are kept in `filters`. Members are notified to rebalance if a member has joined or the
        topics or lanes have changed. Return whether the last fingerprint (of the group, or of the
        member in a group with lanes) was another one; False if there was none.

        Raises ContractError if the group refuses the subscriptions. Then the client is not a
        member.
        """
        group = self.groups.get(consumer.group) or ConsumerGroup(consumer.group)
        stored_member = group.members.get(member.peer) or member
        joined = member.peer not in group.members
        key = subscribed.key
        # First, because nothing must change if the group refuses the subscriptions.
        if key:
            self._check_contract(group.name, member, key)
        self.contracts.remove_absent_member(group.name, member.client_id)

        # Update the group and the member.
        self.groups[group.name] = group
        group.consume_type = consumer.consume_type
        group.message_model = consumer.message_model
        group.consume_from_where = consumer.consume_from_where
        group.members[member.peer] = stored_member
        # Compared at the end, to find out whether the heartbeat has changed the member.
        old_state = stored_member.reported_state
        stored_member.client_id = member.client_id
        stored_member.heartbeat_s = member.heartbeat_s
        stored_member.subscriptions = subscribed.by_topic
        old_key = stored_member.subscription_key
        stored_member.subscription_key = key
        if joined:
            old_key = group.update_older_connections(stored_member)

        # Apply the subscriptions.
        rebalancing_keys = self._apply_subscriptions(
            group, stored_member, old_key, subscribed.compiled
        )
        if not subscribed.is_tag_type or group.name in self.filters.table:
            self.filters.update_group(group.name, group.list_member_subscriptions())

        # In a group with lanes each member has a fingerprint of its own.
        has_lanes = group.name in self.lanes.table
        old_fingerprint = stored_member.fingerprint if has_lanes else group.fingerprint
        group.fingerprint = fingerprint
        stored_member.fingerprint = fingerprint
        if joined or stored_member.reported_state != old_state:
            group.change_count += 1

        # None as keys means that all members rebalance, and an empty set that none does.
        if joined:
            rebalancing_keys = {key} if has_lanes else None
        must_notify = rebalancing_keys is None or bool(rebalancing_keys)
        if must_notify:
            self.notices.notify_change(group.name, rebalancing_keys)
        return old_fingerprint not in {0, fingerprint}

    def _check_contract(self, group_name: str, member: Member, key: str) -> None:
        """Raise ContractError if a strict group refuses the new subscription of a member.

        `key` is the member's new subscription key. A refused member is removed from the group.
        """
        other_keys = self.other_subscription_keys(group_name, member.client_id)
        if group_name in self.lanes.table:
            # A strict group may have lanes from the time before it was strict. Then only the
            # subscription of one lane counts.
            oldest_key = self._find_oldest_used_lane(group_name)
            other_keys = {
                client_id: other_key
                for client_id, other_key in other_keys.items()
                if other_key == oldest_key
            }
        try:
            self.contracts.check_subscription(
                group_name, member.client_id, key, other_keys, member.peer
            )
        except ContractError:
            self.unregister(group_name, member.peer, member.client_id)
            raise

    def _find_oldest_used_lane(self, group_name: str) -> str | None:
        """Return the key of the oldest lane that has members, or None if no lane has any.

        Absent members count. The group must have lanes.
        """
        lanes = self.lanes.table[group_name]
        absent_members = self.contracts.absent_members(group_name).values()
        absent_keys = {absent.subscription_key for absent in absent_members}
        live_keys, _ = lanes.get_live_and_idle_keys()
        for lane_key in live_keys:
            if lanes.lanes[lane_key].members or lane_key in absent_keys:
                return lane_key
        return None

    def snapshot_member(self, group_name: str, peer: Peer) -> "MemberSnapshot | None":
        """Return a snapshot of the member with this connection, to recognize repeated heartbeats.

        A heartbeat that equals the last one changes nothing while the snapshot is the same. Return
        None if it might change something: there is no such member, or the group is not configured,
        is strict, has lanes or pops.
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
        keys_by_client: dict[str, str] = {}
        group = self.groups.get(group_name)
        if group is not None:
            for member in group.members.values():
                if member.subscription_key and member.client_id != client_id:
                    keys_by_client[member.client_id] = member.subscription_key

        for absent_id, absent_member in self.contracts.absent_members(group_name).items():
            if absent_id != client_id:
                keys_by_client.setdefault(absent_id, absent_member.subscription_key)
        return keys_by_client

    def _apply_subscriptions(
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
        other_keys = group.other_subscription_keys(member)
        key = member.subscription_key
        if not other_keys and not self.contracts.absent_members(group.name):
            self.contracts.popping_groups.discard(group.name)

        has_lanes = group.name in self.lanes.table
        have_all_same_key = set(other_keys.values()) <= {key}
        if not has_lanes and have_all_same_key:
            self._set_group_key(group, key)
            if not key and other_keys:
                return set()
            topics_changed = group.replace_subscriptions(member.subscriptions, compiled)
            return None if topics_changed else set()

        if not key:
            return set()

        if group.name in self.contracts.popping_groups:
            group.merge_member_subscriptions()
            return None if old_key != key else set()

        is_new_in_lane = self.lanes.add_member(
            group.name, key, member.client_id, old_key, other_keys
        )
        if is_new_in_lane:
            self.contracts.record_lane_member(group.name, member.client_id, key, other_keys)
        group.merge_member_subscriptions()
        return {key, old_key} if is_new_in_lane else set()

    def _set_group_key(self, group: ConsumerGroup, key: str) -> None:
        """Make `key` the subscription key of a group. Do nothing if it is "" or has not changed.

        The offsets at which later lanes will begin are recorded for the new key.
        """
        if key and key != group.subscription_key:
            from_first = group.consume_from_where == FROM_FIRST_OFFSET
            self.lanes.storage.start_join_offsets(group.name, key, from_first=from_first)
            group.subscription_key = key

    def record_short_heartbeat(self, group_name: str, member: Member, fingerprint: int) -> bool:
        """Update or add a member by a heartbeat without subscriptions (V2).

        `fingerprint` is the hash of the client's subscriptions. If it is that of the group, and the
        group has no lanes, a new member gets the subscriptions of the group, and the members are
        notified to rebalance. Return True if the client must send a full heartbeat, because the
        group has no subscriptions or the fingerprint differs.

        Raises RequestError if a new member would use too much memory.
        """
        group = self.groups.get(group_name)
        if group is None or not group.subscriptions:
            return True
        has_lanes = group_name in self.lanes.table
        stored_member = group.members.get(member.peer)
        if stored_member is not None:
            stored_member.heartbeat_s = member.heartbeat_s
            # In a group with lanes each member has a fingerprint of its own.
            expected = stored_member.fingerprint if has_lanes else group.fingerprint
            return expected != fingerprint

        if has_lanes or group.fingerprint != fingerprint:
            return True  # the client may have another subscription
        self._add_with_group_subscriptions(group, member)
        return False

    def _add_with_group_subscriptions(self, group: ConsumerGroup, member: Member) -> None:
        """Add a member with the subscriptions of its group, and notify all members to rebalance.

        Raises RequestError if the member would use too much memory.
        """
        self.memory.reserve(member.peer, (CONSUMER, group.name), MEMBER_BYTES)
        self.contracts.remove_absent_member(group.name, member.client_id)
        member.subscription_key = group.subscription_key
        member.subscriptions = {
            topic: compiled.subscription for topic, compiled in group.subscriptions.items()
        }
        group.members[member.peer] = member
        group.change_count += 1
        self.notices.notify_change(group.name, None)

    def check_subscription(
        self, group_name: str, client_id: str, subscription: Subscription, peer: Peer
    ) -> None:
        """Raise ContractError if a strict group would refuse a client that is about to start.

        Only one subscription of the client is known. It is compared with the subscription of each
        other member to the same topic. A refusal is recorded, as for a heartbeat.
        """
        atom = normalize_atom(subscription.kind, subscription.expression)
        other_keys = self.other_subscription_keys(group_name, client_id)
        for other_id, other_key in other_keys.items():
            has_same_filter = parse_key(other_key).get(subscription.topic) == atom
            if not has_same_filter:
                key = subscription_key(group_name, [subscription])
                self.contracts.check_subscription(
                    group_name, client_id, key, {other_id: other_key}, peer
                )

    def _notify_members(self, group_name: str, subscription_keys: set[str] | None) -> int:
        """Send NOTIFY_CONSUMER_IDS_CHANGED to the members with one of these subscription keys.

        None as `subscription_keys` means all members. Only clients that can rebalance are notified.
        Return the number of notified members. It is 0 if notices are disabled in the configuration
        of the broker or the group, and in a broadcasting group, where each member reads all queues.
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
        notified_peers = []
        for peer, member in group.members.items():
            has_key = subscription_keys is None or member.subscription_key in subscription_keys
            if has_key and peer.can_rebalance:
                notified_peers.append(peer)
        for peer in notified_peers:
            peer.send_oneway(Command(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, dict(fields)))
        return len(notified_peers)

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
        if lanes is not None and not group.has_other_connection(member):
            lanes.remove_member(member.subscription_key, member.client_id)
        if not group.members:
            del self.groups[group_name]
            self.filters.update_group(group_name, ())
            self.lanes.storage.forget_join_offsets(group_name)
            self.contracts.forget_group(group_name)
        elif lanes is not None:
            group.merge_member_subscriptions()

        # In a group with lanes, only the members of the same lane rebalance.
        rebalancing_keys = None if lanes is None else {member.subscription_key}
        self.notices.notify_change(group_name, rebalancing_keys)

    def remove_connection(self, peer: Peer) -> WorkItem[None]:
        """Remove a closed connection from its groups.

        In a strict group, the client is remembered as an absent member, unless it has another
        connection. This is a generator, which yields None after each group.
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
        removed_peers = []
        for group in list(self.groups.values()):  # `unregister` removes groups without members
            expired = [member for member in group.members.values() if member.heartbeat_s < limit_s]
            for member in expired:
                log.info(
                    "removed client %s from group %s: its heartbeats stopped",
                    member.client_id,
                    group.name,
                )
                self.unregister(group.name, member.peer)
                removed_peers.append(member.peer)
        return removed_peers
