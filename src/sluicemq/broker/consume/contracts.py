"""The contracts of consumer groups: what happens to a member with a different subscription.

`clients.py` describes the contracts. `Contracts` refuses subscriptions in strict groups, knows the
absent members of strict groups, and counts the members that have a lane of their own.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from sluicemq.broker.lanes.rules import describe_difference
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups
from sluicemq.clock import Clock
from sluicemq.model.topic import CONTRACT, CONTRACTS
from sluicemq.net.dispatch import Peer

log = logging.getLogger(__name__)

COMPATIBLE, STRICT, LANES = CONTRACTS
"""The values of a contract; `clients.py` describes them."""
REFUSALS_MAX: Final = 1024
"""The most refusals that are kept for tools."""
ABSENT_MEMBERS_MAX: Final = 1024
"""The most absent members of one group."""
REFUSAL_LOG_INTERVAL_S: Final = 600.0
"""The log repeats the refusal of a client that keeps trying after this time."""
WARNED_MAX: Final = 10_000
"""The most subscriptions that are remembered as already mentioned in the log."""


class ContractError(Exception):
    """A subscription that a strict group refuses. The text is the answer to the client."""


@dataclass(frozen=True, slots=True)
class AbsentMember:
    """A member of a strict group whose connection closed without unregistering.

    Its subscription counts until the member would have expired, or the client is back.
    """

    subscription_key: str
    heartbeat_s: float


@dataclass(slots=True)
class Refusal:
    """Why a client may not join a strict group, and when the log last said so."""

    reason: str
    peer: Peer
    logged_s: float


@dataclass(slots=True, eq=False)
class Contracts:
    """The contracts of the groups, and the clients that they refused."""

    groups: Groups
    settings: Settings
    clock: Clock
    conflict_counts: dict[str, int] = field(default_factory=dict)
    """The number of subscriptions that differed from their group's, by group."""
    refusals: dict[tuple[str, str], Refusal] = field(default_factory=dict)
    """By (group, client id): why the client is not a member.

    An entry is removed when the client becomes a member or its connection closes.
    """
    popping_groups: set[str] = field(default_factory=set)
    """Groups of which a member has popped."""
    pop_filters: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    """By (group, topic): the kind and the expression of its pops."""
    _absent_members: dict[str, dict[str, AbsentMember]] = field(default_factory=dict)
    """By group and client id: the absent members."""
    _warned_keys: dict[str, set[str]] = field(default_factory=dict)
    """By group: the subscription keys that the log has mentioned."""
    _warned_count: int = 0
    """The number of all keys in `_warned_keys`."""

    def contract_of(self, group: str) -> str:
        """Return the contract of the group. An unknown value of the attribute is the default."""
        config = self.groups.table.get(group)
        contract = config.attributes.get(CONTRACT) if config is not None else None
        return contract if contract in CONTRACTS else COMPATIBLE

    # ----------------------------------------------------------------------- absent members

    def _tracks_absent_members(self, group: str) -> bool:
        """Return whether the subscriptions of absent members count in this group."""
        return self.contract_of(group) == STRICT

    def add_absent_member(self, group: str, client_id: str, key: str, heartbeat_s: float) -> None:
        """Add an absent member: a client that lost its connection without unregistering.

        `key` is its subscription key, and `heartbeat_s` the monotonic time of its last heartbeat.
        Do nothing if the group is not strict, if `key` is "", or if the group has
        ABSENT_MEMBERS_MAX absent members.
        """
        if key and self._tracks_absent_members(group):
            absent = self._absent_members.setdefault(group, {})
            if len(absent) < ABSENT_MEMBERS_MAX:
                absent[client_id] = AbsentMember(key, heartbeat_s)

    def remove_absent_member(self, group: str, client_id: str) -> None:
        """Remove an absent member, which is back or has unregistered. Do nothing for others."""
        absent = self._absent_members.get(group)
        if absent is not None and absent.pop(client_id, None) is not None and not absent:
            del self._absent_members[group]

    def absent_members(self, group: str) -> dict[str, AbsentMember]:
        """Return the absent members of a group by client id, without those that have expired.

        An absent member has lost its connection without unregistering. Expired ones are removed
        from the table. If the group is not strict any more, all are removed, and {} is returned.
        """
        absent = self._absent_members.get(group)
        if absent is None:
            return {}

        limit_s = self.clock.monotonic_s() - self.settings.broker.client_expiry_ms / 1000
        expired = [
            client_id for client_id, member in absent.items() if member.heartbeat_s < limit_s
        ]
        for client_id in expired:
            del absent[client_id]
        if not absent or not self._tracks_absent_members(group):
            del self._absent_members[group]
            return {}
        return absent

    # ------------------------------------------------------------------------------ refusals

    def check_subscription(
        self, group: str, client_id: str, key: str, other_keys: Mapping[str, str], peer: Peer
    ) -> None:
        """Raise ContractError if the group is strict and another client has another subscription.

        `key` is the subscription key of the client. `other_keys` are the keys of the other clients,
        with absent members, by client id. The refusal is recorded. If the client is not refused, an
        earlier refusal is removed.
        """
        different_keys = {
            other_id: other_key for other_id, other_key in other_keys.items() if other_key != key
        }
        if not different_keys or self.contract_of(group) != STRICT:
            self.refusals.pop((group, client_id), None)
            return

        # The text names one of the clients as an example.
        example_id, example_key = next(iter(different_keys.items()))
        state = self._describe_state(group, different_keys)
        reason = (
            f"Group {group} has the contract strict, and the subscription of {client_id} differs "
            f"from that of {len(different_keys)} member(s) that {state}, for example {example_id}: "
            f"{describe_difference(example_key, key)}. Use the same subscription or another group, "
            f"or allow different subscriptions: sluice group update {group} --contract lanes"
        )
        self.record_refusal(group, client_id, reason, peer)
        raise ContractError(reason)

    def _describe_state(self, group: str, client_ids: Iterable[str]) -> str:
        """Return the end of an error text: "are online", or until when clients may return.

        "are online" is returned unless all of the clients have lost their connections.
        """
        absent = self.absent_members(group)
        if not all(client_id in absent for client_id in client_ids):
            return "are online"
        heartbeat_s = max(absent[client_id].heartbeat_s for client_id in client_ids)
        silent_ms = round((self.clock.monotonic_s() - heartbeat_s) * 1000)
        ms_left = self.settings.broker.client_expiry_ms - silent_ms
        expiry = datetime.fromtimestamp((self.clock.now_ms() + ms_left) / 1000, UTC)
        return (
            "lost the connection without unregistering and may return until "
            f"{expiry:%Y-%m-%dT%H:%M:%SZ}"
        )

    def record_refusal(self, group: str, client_id: str, reason: str, peer: Peer) -> None:
        """Record `reason`, why a client is refused, and log it if it was not logged recently.

        A refusal of the same client is logged again after REFUSAL_LOG_INTERVAL_S seconds. The first
        refusal of a client is counted as a conflict of the group. At most REFUSALS_MAX clients are
        kept. Refusals of further clients are logged each time.
        """
        previous = self.refusals.get((group, client_id))
        logged_s = self.clock.monotonic_s()
        if previous is None:
            self.conflict_counts[group] = self.conflict_counts.get(group, 0) + 1
        if previous is None or logged_s - previous.logged_s >= REFUSAL_LOG_INTERVAL_S:
            log.warning("%s", reason)
        else:
            logged_s = previous.logged_s
        if previous is not None or len(self.refusals) < REFUSALS_MAX:
            self.refusals[group, client_id] = Refusal(reason, peer, logged_s)

    def refusal_reason(self, group: str, peer: Peer, client_id: str | None) -> str:
        """Return why a client was refused by a group; "" if it was not.

        The client is found by its connection `peer` or by its client id.
        """
        for (name, refused_id), refusal in self.refusals.items():
            if name == group and (refusal.peer is peer or refused_id == client_id):
                return refusal.reason
        return ""

    def forget_connection(self, peer: Peer) -> None:
        """Remove the refusals of clients on a connection that has closed."""
        closed = [
            refusal_key for refusal_key, refusal in self.refusals.items() if refusal.peer is peer
        ]
        for refusal_key in closed:
            del self.refusals[refusal_key]

    def record_lane_member(
        self, group: str, client_id: str, key: str, other_keys: Mapping[str, str]
    ) -> None:
        """Count a conflict, because a member got a lane of its own for its subscription.

        If the contract of the group is "compatible", a warning is logged. `key` is the subscription
        key of the member, and `other_keys` are those of the other clients by client id. Each key of
        a group is counted and logged once. If WARNED_MAX keys are remembered, all are forgotten.
        """
        if key in self._warned_keys.get(group, ()):
            return
        if self._warned_count >= WARNED_MAX:
            self._warned_keys.clear()
            self._warned_count = 0
        self._warned_keys.setdefault(group, set()).add(key)
        self._warned_count += 1
        self.conflict_counts[group] = self.conflict_counts.get(group, 0) + 1

        if self.contract_of(group) == COMPATIBLE:
            # The text names one client with a different subscription, if there is one.
            example_id = "earlier members"
            example_key = "[]"
            for other_id, other_key in other_keys.items():
                if other_key != key:
                    example_id = other_id or example_id
                    example_key = other_key
                    break
            log.warning(
                "group %s: the subscription of %s differs from that of %s: %s. Each subscription "
                "gets a lane of its own; in RocketMQ, messages would be lost. To allow different "
                "subscriptions without this warning: sluice group update %s --contract lanes",
                group,
                client_id,
                example_id,
                describe_difference(example_key, key),
                group,
            )

    def forget_group(self, group: str) -> None:
        """Forget the refusals and warnings about a group whose last member has left."""
        self._warned_count -= len(self._warned_keys.pop(group, ()))
        refusal_keys = [refusal_key for refusal_key in self.refusals if refusal_key[0] == group]
        for refusal_key in refusal_keys:
            del self.refusals[refusal_key]

    def popped_subscriptions(self, group: str) -> list[tuple[str, str, str]]:
        """Return (topic, kind, expression) for each topic that the group pops.

        Return [] if the group is not in `popping_groups`.
        """
        if group not in self.popping_groups:
            return []
        subscriptions = []
        for (popping_group, topic), (kind, expression) in self.pop_filters.items():
            if popping_group == group:
                subscriptions.append((topic, kind, expression))
        return subscriptions

    def forget_deleted(self, *, topic: str | None = None, group: str | None = None) -> None:
        """Forget the filters of pops of a deleted topic, or of a deleted group."""
        for pop_group, pop_topic in list(self.pop_filters):
            if pop_group == group or pop_topic == topic:
                del self.pop_filters[pop_group, pop_topic]
