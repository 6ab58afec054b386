"""Memory that heartbeats make a broker use, in bytes: limited for each connection and for all
together.

A heartbeat of 0.6 MB with tag codes takes ten times as much memory, and a connection may name other
groups and client ids in each of its heartbeats. The number is an estimate for the members of
groups, their subscriptions and the filters made of them. It is released when the member leaves, at
the latest with its connection.
"""

from collections.abc import Iterable
from typing import Final

from sluicemq.broker.settings import Settings
from sluicemq.errors import RequestError
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.net.dispatch import Peer
from sluicemq.wire.codes import ResponseCode

MEMBER_BYTES: Final = 1500
SUBSCRIPTION_BYTES: Final = 1000
CODE_BYTES: Final = 100
"""Bytes of a tag, and as many of its code, in their sets."""
TEXT_BYTES: Final = 8
"""Bytes of a character of an expression or topic name, which are parts of keys, too."""
SQL92_BYTES: Final = 32
"""Bytes of a character of a compiled SQL92 expression."""
PRODUCER_BYTES: Final = 1000

CONSUMER, PRODUCER = "consumer", "producer"
Role = tuple[str, str]
"""A role of a connection: CONSUMER or PRODUCER, and the group."""


def subscribed_bytes(subscriptions: Iterable[Subscription]) -> int:
    """Return the estimated memory in bytes that a member with these subscriptions takes."""
    size = MEMBER_BYTES
    for item in subscriptions:
        texts = len(item.topic) + len(item.expression)
        size += SUBSCRIPTION_BYTES + TEXT_BYTES * texts
        size += CODE_BYTES * (len(item.tags) + len(item.codes)) + sum(map(len, item.tags))
        if item.kind == SQL92:
            size += SQL92_BYTES * len(item.expression)
    return size


class _Connection:
    """The bytes of one connection, by kind of role and group."""

    __slots__ = ("groups", "total")

    def __init__(self) -> None:
        self.total = 0
        self.groups: dict[str, dict[str, int]] = {CONSUMER: {}, PRODUCER: {}}


class HeldBytes:
    """The estimated memory of each connection, by its roles, and of all connections, in bytes."""

    __slots__ = ("_connections", "_settings", "total")

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._connections: dict[Peer, _Connection] = {}
        self.total = 0

    def take(self, peer: Peer, role: Role, size: int) -> None:
        """Set the memory of a role of a connection to `size` bytes. Raises RequestError, with
        nothing changed, if the connection or all connections together would exceed their limit."""
        kind, group = role
        mine = self._connections.get(peer) or _Connection()
        more, config = size - mine.groups[kind].get(group, 0), self._settings.broker
        if more > 0 and mine.total + more > config.client_bytes_max:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"The groups and subscriptions of this connection would take {mine.total + more} "
                f"bytes, the limit is sluiceClientBytesMax = {config.client_bytes_max}. Subscribe "
                "to fewer topics, or use several clients.",
            )
        if more > 0 and self.total + more > config.clients_bytes_max:
            raise RequestError(
                ResponseCode.SYSTEM_BUSY,
                f"The groups and subscriptions of all clients would take {self.total + more} "
                "bytes, the limit "
                f"is sluiceClientsBytesMax = {config.clients_bytes_max}. Raise it in broker.conf.",
            )
        self._connections[peer] = mine
        mine.groups[kind][group] = size
        mine.total += more
        self.total += more

    def release(self, peer: Peer, role: Role) -> None:
        """Release the memory of a role of a connection; do nothing if it has none."""
        kind, group = role
        mine = self._connections.get(peer)
        if mine is None:
            return
        size = mine.groups[kind].pop(group, 0)
        mine.total -= size
        self.total -= size
        if not any(mine.groups.values()):
            del self._connections[peer]

    def groups(self, peer: Peer, kind: str) -> list[str]:
        """Return the groups in which a connection has a role of this kind, so that closing it
        touches no other group."""
        mine = self._connections.get(peer)
        return [] if mine is None else list(mine.groups[kind])

    def has(self, peer: Peer, kind: str) -> bool:
        """Return whether a connection has a role of this kind in any group."""
        mine = self._connections.get(peer)
        return mine is not None and bool(mine.groups[kind])

    def __len__(self) -> int:
        return len(self._connections)
