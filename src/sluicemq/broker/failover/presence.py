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
        """Create it without heartbeats."""
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
        """Move the heartbeat of `peer` to those of the lost connections from its IP address.

        `now_s` is the time of the loss on the monotonic clock. Of one address at most LOST_MAX
        heartbeats are kept; the oldest is dropped. Do nothing if `peer` has sent no heartbeat.
        """
        heartbeat = self._heartbeats.pop(peer, None)
        if heartbeat is None:
            return
        lost_heartbeats = self._lost.get(peer.remote.address, [])
        kept_heartbeats = lost_heartbeats[1 - LOST_MAX :]
        self._lost[peer.remote.address] = [*kept_heartbeats, (now_s, heartbeat)]

    def adopt(self, command: Command, peer: Peer, now_s: float) -> Command | None:
        """Make the heartbeat of a lost connection that of `peer`, and return it.

        The lost connection had the same IP address, and was a member of the group that `command`
        names. The oldest such heartbeat is taken, and is removed from those of the lost
        connections. Heartbeats older than KEEP_S at `now_s`, on the monotonic clock, are dropped.
        Return None if there is no such heartbeat, if the command names no group, or if the peer
        already has a heartbeat.
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
