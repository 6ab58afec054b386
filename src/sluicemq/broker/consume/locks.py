"""Which client may consume a queue in order: a lease per group and queue, in memory.

A lease lasts 60 s and its owner renews it every 20 s; an expired one may be taken by another
(spec/remoting.md §15). Nothing is kept over a restart. A lane of a group (`lanes.py`) locks as
`group@lane`.
"""

from collections.abc import Iterable
from typing import Final

from sluicemq.clock import Clock
from sluicemq.model.topic import MessageQueue

LEASE_S: Final = 60.0
LEASES_MAX: Final = 100_000
"""Of all groups. Groups and queues are what clients say; 100,000 leases have 40 MB."""


class QueueLocks:
    """Leases of queues: group -> queue -> (client id, end of the lease)."""

    __slots__ = ("_clock", "_drop_again_s", "_groups", "_size")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._groups: dict[str, dict[MessageQueue, tuple[str, float]]] = {}
        self._size = 0
        self._drop_again_s = 0.0

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Takes or renews what is free, expired or the client's own; returns what it holds now."""
        now = self._clock.monotonic_s()
        leases = self._groups.get(group, {})
        held = set()
        for queue in queues:
            owner, end = leases.get(queue, ("", 0.0))
            if queue not in leases:
                if self._size >= LEASES_MAX:
                    self._drop_expired(now)
                if self._size >= LEASES_MAX:
                    continue
                self._size += 1
            if owner == client_id or end <= now:
                leases[queue] = (client_id, now + LEASE_S)
                held.add(queue)
        if leases:
            self._groups[group] = leases
        return held

    def _drop_expired(self, now: float) -> None:
        """At most once a second: what is full stays so for a while."""
        if now < self._drop_again_s:
            return
        self._drop_again_s = now + 1.0
        for group, leases in list(self._groups.items()):
            for queue in [queue for queue, (_, end) in leases.items() if end <= now]:
                del leases[queue]
                self._size -= 1
            if not leases:
                del self._groups[group]

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Gives up those of the queues that the client holds."""
        leases = self._groups.get(group, {})
        for queue in queues:
            if queue in leases and leases[queue][0] == client_id:
                del leases[queue]
                self._size -= 1
        if not leases:
            self._groups.pop(group, None)

    def holds_any(self, group: str) -> bool:
        """Does the group consume in order right now? (An unexpired lease says so.)"""
        now = self._clock.monotonic_s()
        lane = f"{group}@"
        return any(
            end > now
            for name, leases in self._groups.items()
            if name == group or name.startswith(lane)
            for _, end in leases.values()
        )
