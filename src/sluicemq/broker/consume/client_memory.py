"""The memory that heartbeats make a broker use, limited for each connection and for all together.

A heartbeat of 0.6 MB with tag codes takes ten times as much memory, and a connection may name other
groups and client ids in each of its heartbeats. The number of bytes is an estimate for the members
of groups, their subscriptions and the filters compiled for them. It is released when the member
leaves, at the latest when its connection closes.
"""

from collections.abc import Iterable
from typing import Final

from sluicemq.broker.settings import Settings
from sluicemq.errors import RequestError
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.net.dispatch import Peer
from sluicemq.wire.codes import ResponseCode

MEMBER_BYTES: Final = 1500
"""The estimated bytes of a member of a consumer group without subscriptions."""
SUBSCRIPTION_BYTES: Final = 1000
"""The estimated bytes of a subscription besides its strings and tag codes."""
CODE_BYTES: Final = 100
"""The estimated bytes of a tag in its set, and also of a tag code in its set."""
TEXT_BYTES: Final = 8
"""The estimated bytes of a character of an expression or topic name, which is part of keys too."""
SQL92_BYTES: Final = 32
"""The estimated bytes of a character of a compiled SQL92 expression."""
PRODUCER_BYTES: Final = 1000
"""The estimated bytes of a member of a producer group."""

CONSUMER = "consumer"
PRODUCER = "producer"
Role = tuple[str, str]
"""A role of a connection: CONSUMER or PRODUCER, and the group."""


def estimate_member_bytes(subscriptions: Iterable[Subscription]) -> int:
    """Return the estimated memory in bytes of a member with these subscriptions."""
    member_bytes = MEMBER_BYTES
    for subscription in subscriptions:
        characters = len(subscription.topic) + len(subscription.expression)
        member_bytes += SUBSCRIPTION_BYTES + TEXT_BYTES * characters
        member_bytes += CODE_BYTES * (len(subscription.tags) + len(subscription.codes))
        member_bytes += sum(map(len, subscription.tags))
        if subscription.kind == SQL92:
            member_bytes += SQL92_BYTES * len(subscription.expression)
    return member_bytes


class _ConnectionMemory:
    """The reserved bytes of one connection, in total and by kind of role and group."""

    __slots__ = ("groups", "total")

    def __init__(self) -> None:
        """Create it without reserved bytes."""
        self.total = 0
        self.groups: dict[str, dict[str, int]] = {CONSUMER: {}, PRODUCER: {}}


class ClientMemory:
    """The estimated memory in bytes of each connection by its roles, and the `total` of all."""

    __slots__ = ("_by_connection", "_settings", "total")

    def __init__(self, settings: Settings) -> None:
        """Create it without connections. `settings` has the limits."""
        self._settings = settings
        self._by_connection: dict[Peer, _ConnectionMemory] = {}
        self.total = 0

    def reserve(self, peer: Peer, role: Role, role_bytes: int) -> None:
        """Count `role_bytes` bytes of memory for a role of a connection.

        A role is (kind, group): the connection is a producer or a consumer of the group. The number
        replaces the earlier one of the role. Raises RequestError, with nothing changed, if the
        connection, or all connections together, would exceed their limit.
        """
        role_kind, group = role
        connection = self._by_connection.get(peer) or _ConnectionMemory()
        added_bytes = role_bytes - connection.groups[role_kind].get(group, 0)
        if added_bytes > 0:  # a role that shrinks is never refused
            self._check_limits(connection.total + added_bytes, self.total + added_bytes)

        self._by_connection[peer] = connection
        connection.groups[role_kind][group] = role_bytes
        connection.total += added_bytes
        self.total += added_bytes

    def _check_limits(self, connection_bytes: int, all_bytes: int) -> None:
        """Raise RequestError if a connection, or all connections together, use too much memory.

        `connection_bytes` is what the connection would use, and `all_bytes` what all would use.
        """
        config = self._settings.broker
        if connection_bytes > config.client_bytes_max:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"The groups and subscriptions of this connection would take {connection_bytes} "
                f"bytes, the limit is sluiceClientBytesMax = {config.client_bytes_max}. Subscribe "
                "to fewer topics, or use several clients.",
            )
        if all_bytes > config.clients_bytes_max:
            raise RequestError(
                ResponseCode.SYSTEM_BUSY,
                f"The groups and subscriptions of all clients would take {all_bytes} bytes, the "
                f"limit is sluiceClientsBytesMax = {config.clients_bytes_max}. Raise it in "
                "broker.conf.",
            )

    def release(self, peer: Peer, role: Role) -> None:
        """Stop counting the memory of a role of a connection. Do nothing if it has none."""
        role_kind, group = role
        connection = self._by_connection.get(peer)
        if connection is None:
            return
        role_bytes = connection.groups[role_kind].pop(group, 0)
        connection.total -= role_bytes
        self.total -= role_bytes
        if not any(connection.groups.values()):
            del self._by_connection[peer]

    def groups_of(self, peer: Peer, role_kind: str) -> list[str]:
        """Return the groups in which a connection is a CONSUMER or a PRODUCER (`role_kind`)."""
        connection = self._by_connection.get(peer)
        return [] if connection is None else list(connection.groups[role_kind])

    def has_role(self, peer: Peer, role_kind: str) -> bool:
        """Return whether a connection is a CONSUMER or PRODUCER (`role_kind`) in any group."""
        connection = self._by_connection.get(peer)
        return connection is not None and bool(connection.groups[role_kind])

    def __len__(self) -> int:
        """Return the number of connections with reserved memory."""
        return len(self._by_connection)
