"""Which client may consume a queue in order: a lease per group and queue, in memory.

A lease lasts 60 s and its owner renews it every 20 s; an expired one may be taken by another
(spec/remoting.md §15). Nothing is kept over a restart.
"""

from collections.abc import Iterable
from typing import Final

from sluicemq.clock import Clock
from sluicemq.model.topic import MessageQueue

LEASE_S: Final = 60.0


class QueueLocks:
    """Leases of queues: group -> queue -> (client id, end of the lease)."""

    __slots__ = ("_clock", "_groups")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._groups: dict[str, dict[MessageQueue, tuple[str, float]]] = {}

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Takes or renews what is free, expired or the client's own; returns what it holds now."""
        now = self._clock.monotonic_s()
        leases = self._groups.setdefault(group, {})
        held = set()
        for queue in queues:
            owner, end = leases.get(queue, ("", 0.0))
            if owner == client_id or end <= now:
                leases[queue] = (client_id, now + LEASE_S)
                held.add(queue)
        return held

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Gives up those of the queues that the client holds."""
        leases = self._groups.get(group, {})
        for queue in queues:
            if leases.get(queue, ("", 0.0))[0] == client_id:
                del leases[queue]
        if not leases:
            self._groups.pop(group, None)

    def holds_any(self, group: str) -> bool:
        """Does the group consume in order right now? (An unexpired lease says so.)"""
        now = self._clock.monotonic_s()
        return any(end > now for _, end in self._groups.get(group, {}).values())
