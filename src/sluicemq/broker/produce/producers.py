"""Connected producers by group, as their heartbeats report them.

A member of a producer group is a connection. It leaves with UNREGISTER_CLIENT (35), when its
connection closes, or when its heartbeats stop. A broker looks for a member when it has to ask a
producer how a transaction ended, or relays a reply to a client (`relays.py`).
"""

from collections.abc import Callable
from typing import Final

from sluicemq.broker.consume.client_memory import (
    PRODUCER,
    PRODUCER_BYTES,
    TEXT_BYTES,
    ClientMemory,
)
from sluicemq.broker.consume.clients import Member
from sluicemq.clock import Clock
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import WorkItem

PRODUCER_GROUPS_MAX: Final = 50_000
"""The most producer groups. Any name is accepted; a group ends when its last member leaves."""
NAME_MAX: Final = 255
"""The longest name of a producer group, in characters."""


class Producers:
    """The producer groups that have connected members."""

    def __init__(self, clock: Clock, memory: ClientMemory) -> None:
        """Create an empty table of connected producers by group.

        `memory` limits the memory that heartbeats may use.
        """
        self._clock = clock
        self._memory = memory
        self.groups: dict[str, dict[Peer, Member]] = {}
        """By group and connection: the members."""
        self._by_client: dict[str, Peer] = {}
        """By client id: the connection of the client's last heartbeat."""
        self.on_join: Callable[[str], None] = lambda group: None
        """Called with the name of a group when it has a new member."""

    def find_connection(self, client_id: str) -> Peer | None:
        """Return the open connection of a client that is a producer of any group, or None."""
        peer = self._by_client.get(client_id)
        return peer if peer is not None and not peer.closed else None

    def record_heartbeat(self, group: str, member: Member) -> None:
        """Add or update a member of a producer group by its heartbeat, and count its memory.

        For a new member, `on_join` is called. From now on, `find_connection` returns this
        connection for the client. A new member is ignored if there are PRODUCER_GROUPS_MAX groups,
        or if the name of the group is too long.
        Raises RequestError if the connection, or all together, would use too much memory.
        """
        members = self.groups.get(group, {})
        stored_member = members.get(member.peer)
        may_join = len(self.groups) < PRODUCER_GROUPS_MAX and len(group) <= NAME_MAX
        if stored_member is None and not may_join:
            return
        member_bytes = PRODUCER_BYTES + TEXT_BYTES * len(group)
        self._memory.reserve(member.peer, (PRODUCER, group), member_bytes)

        self._by_client[member.client_id] = member.peer
        if stored_member is None:
            self.groups[group] = members
            members[member.peer] = member
            self.on_join(group)
            return

        # A client that has changed its id is not found by the old one any more.
        has_new_id = stored_member.client_id != member.client_id
        if has_new_id and self._by_client.get(stored_member.client_id) is member.peer:
            del self._by_client[stored_member.client_id]
        stored_member.client_id = member.client_id
        stored_member.heartbeat_s = member.heartbeat_s

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
        removed_peers = []
        for group, members in list(self.groups.items()):  # `unregister` removes empty groups
            expired = [member.peer for member in members.values() if member.heartbeat_s < limit_s]
            for peer in expired:
                self.unregister(group, peer)
            removed_peers += expired
        return removed_peers
