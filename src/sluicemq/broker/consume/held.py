"""What heartbeats make a broker keep, in bytes: bounded for each connection and for all together.

A heartbeat of 0.6 MB with tag codes becomes ten times as much in memory, and a connection may name
other groups and client ids in each of its heartbeats. What is counted is an estimate of what the
members of groups, their subscriptions and the filters made of them take; it is given back when the
member leaves, at the latest with its connection.
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
"""Of a tag, and of its code, in their sets."""
TEXT_BYTES: Final = 8
"""Of a character of an expression or topic: it stands in keys, too."""
SQL92_BYTES: Final = 32
"""Of a character of a compiled expression."""
PRODUCER_BYTES: Final = 1000

CONSUMER, PRODUCER = "consumer", "producer"
Role = tuple[str, str]
"""What a connection is: CONSUMER or PRODUCER, and of which group."""


def subscribed_bytes(subscriptions: Iterable[Subscription]) -> int:
    """Return about how many bytes a member with these subscriptions takes."""
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
    """The bytes of each connection by its roles, and of all."""

    __slots__ = ("_connections", "_settings", "total")

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._connections: dict[Peer, _Connection] = {}
        self.total = 0

    def take(self, peer: Peer, role: Role, size: int) -> None:
        """Count `size` bytes for a role of a connection, in place of what it had. Raises
        RequestError, with nothing changed, when there is no room."""
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
                f"The groups and subscriptions of all clients take {self.total} bytes, the limit "
                f"is sluiceClientsBytesMax = {config.clients_bytes_max}. Raise it in broker.conf.",
            )
        self._connections[peer] = mine
        mine.groups[kind][group] = size
        mine.total += more
        self.total += more

    def release(self, peer: Peer, role: Role) -> None:
        """Give back what a role of a connection had."""
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
        """Return the groups of a connection, so that its end looks at its own groups alone."""
        mine = self._connections.get(peer)
        return [] if mine is None else list(mine.groups[kind])

    def has(self, peer: Peer, kind: str) -> bool:
        """Return whether a connection has such a role in any group."""
        mine = self._connections.get(peer)
        return mine is not None and bool(mine.groups[kind])

    def __len__(self) -> int:
        return len(self._connections)
