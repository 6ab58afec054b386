"""The last heartbeats of consumers, kept across a change of roles.

A change of roles ends all connections. Java's consumers send a heartbeat (HEART_BEAT, 34), which
names their groups and subscriptions, only every 30 s. Until then a new master, or a master that is
reached through another replica, would deliver nothing to them, and would distribute their queues
among the members that it knows.

So the last heartbeat of a connection outlives it for `KEEP_S`. If a new connection from the same
address asks for a group without having sent a heartbeat, it is assumed to be a lost member of that
group, and takes over the heartbeat of one of them. Each heartbeat is taken over only once. The
connection's own next heartbeat corrects a wrong assumption.
"""

from typing import Final

from sluicemq.net.dispatch import Peer
from sluicemq.wire.frames import Command

KEEP_S: Final = 60.0
"""The time for which the heartbeat of a lost connection is kept: two heartbeat intervals."""

LOST_MAX: Final = 1000
"""The number of heartbeats of lost connections that are kept for one address."""


class Presence:
    """The last heartbeat of each open connection, and of connections that were lost recently."""

    def __init__(self) -> None:
        """Create an empty memory of heartbeats."""
        self._heartbeats: dict[Peer, Command] = {}
        """By open connection: its last heartbeat."""
        self._lost: dict[str, list[tuple[float, Command]]] = {}
        """By IP address: the times at which connections were lost, with their heartbeats."""

    def record_heartbeat(self, heartbeat: Command, peer: Peer) -> None:
        """Remember `heartbeat`, a one-way command, as the last one of a connection."""
        self._heartbeats[peer] = heartbeat

    def forget(self, peer: Peer) -> None:
        """Forget the heartbeat of a connection whose client has unregistered."""
        self._heartbeats.pop(peer, None)

    def heartbeat_of(self, peer: Peer) -> Command | None:
        """Return the last heartbeat of a connection, or None if it has sent none."""
        return self._heartbeats.get(peer)

    def disconnected(self, peer: Peer, now_s: float) -> None:
        """Keep the last heartbeat of `peer`, whose connection was lost at the time `now_s`.

        `now_s` is a time of the monotonic clock. A later connection from the same IP address can
        take the heartbeat with `adopt`. At most LOST_MAX heartbeats are kept for an IP address; the
        oldest is dropped. Do nothing if `peer` has sent no heartbeat.
        """
        heartbeat = self._heartbeats.pop(peer, None)
        if heartbeat is None:
            return
        lost_heartbeats = self._lost.get(peer.remote.address, [])
        kept_heartbeats = lost_heartbeats[1 - LOST_MAX :]  # the newest, with room for one more
        self._lost[peer.remote.address] = [*kept_heartbeats, (now_s, heartbeat)]

    def adopt(self, command: Command, peer: Peer, now_s: float) -> Command | None:
        """Give `peer` the heartbeat of a lost connection, and return the heartbeat.

        It is the oldest heartbeat of a lost connection that had the same IP address as `peer` and
        was a member of the group in `command`. It becomes the heartbeat of `peer`, and no other
        connection can take it. Heartbeats of connections lost for KEEP_S seconds or longer are
        dropped; `now_s` is the present time of the monotonic clock.

        Return None if there is no such heartbeat, if `command` names no group, or if `peer` has a
        heartbeat already.
        """
        group = command.fields and command.fields.get("consumerGroup")
        lost_heartbeats = self._lost.get(peer.remote.address)
        if not group or not lost_heartbeats or peer in self._heartbeats:
            return None

        # In place: `_lost` has the same list.
        lost_heartbeats[:] = [
            (lost_s, heartbeat) for lost_s, heartbeat in lost_heartbeats if now_s - lost_s < KEEP_S
        ]
        # The body of a heartbeat is JSON that names the client's groups. A wrong match is harmless:
        # the client's own next heartbeat corrects it.
        name_in_json = f'"{group}"'.encode()
        for index, (_lost_s, heartbeat) in enumerate(lost_heartbeats):
            if name_in_json in bytes(heartbeat.body):
                del lost_heartbeats[index]
                self._heartbeats[peer] = heartbeat
                return heartbeat
        return None
