"""Who was there before the role changed.

A change of roles ends all connections, and Java's consumers say only every 30 s who they are and
what they subscribe to (34): until then a new master, or one that is reached through another
replica, would give them nothing, and share out their queues among those it knows. So the last
heartbeat of each connection outlives it for a while. A new connection from the same address that
asks for a group, and has not said who it is, is taken for one of those that were in the group, and
each of them is taken up once. Its own next heartbeat says who it really is.
"""

from typing import Final

from sluicemq.net.dispatch import Peer
from sluicemq.wire.frames import Command

LEFT_S: Final = 60.0
"""Twice the time between two heartbeats."""
LEFT_MAX: Final = 1000
"""Of one address."""


class Presence:
    """The last heartbeat of each connection, and of those that are gone."""

    def __init__(self) -> None:
        self._known: dict[Peer, Command] = {}
        self._left: dict[str, list[tuple[float, Command]]] = {}

    def seen(self, heartbeat: Command, peer: Peer) -> None:
        """A heartbeat, as one that wants no answer."""
        self._known[peer] = heartbeat

    def forget(self, peer: Peer) -> None:
        """It says that it goes."""
        self._known.pop(peer, None)

    def of(self, peer: Peer) -> Command | None:
        return self._known.get(peer)

    def disconnected(self, peer: Peer, now_s: float) -> None:
        """Its connection has ended."""
        heartbeat = self._known.pop(peer, None)
        if heartbeat is None:
            return
        left = self._left.get(peer.remote.address, [])
        self._left[peer.remote.address] = [*left[1 - LEFT_MAX :], (now_s, heartbeat)]

    def adopt(self, command: Command, peer: Peer, now_s: float) -> Command | None:
        """The heartbeat of one that is gone, for a connection that asks for its group and has not
        said who it is."""
        group = command.fields and command.fields.get("consumerGroup")
        left = self._left.get(peer.remote.address)
        if not group or not left or peer in self._known:
            return None
        left[:] = [one for one in left if now_s - one[0] < LEFT_S]
        name = f'"{group}"'.encode()
        for index, (_, heartbeat) in enumerate(left):
            if name in bytes(heartbeat.body):
                del left[index]
                self._known[peer] = heartbeat
                return heartbeat
        return None
