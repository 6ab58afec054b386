"""Who may consume a queue in order: a lease for each group and queue.

It lasts 60 s and its owner renews it every 20 s; an expired one may be taken by another. A lane of
a group locks as `group@lane`. Who holds what is kept (`config/sluiceLocks.json`), so that a broker
that starts again, or the replica that takes over, gives no queue to a second client while the first
still handles what it was given: whoever is found there has a lease of full length. RocketMQ's
brokers forget, or ask each other (lockInStrictMode).
"""

from collections.abc import Iterable
from typing import Final

from sluicemq.broker.documents import Document
from sluicemq.clock import Clock
from sluicemq.files import Files
from sluicemq.model.topic import MessageQueue
from sluicemq.wire import fastjson
from sluicemq.wire.declare import as_list, as_object, load_object

LEASE_S: Final = 60.0
LEASES_MAX: Final = 100_000
_NAME: Final = "sluiceLocks.json"


class QueueLocks:
    """Leases of queues: group -> queue -> (client id, end of the lease)."""

    __slots__ = ("_clock", "_drop_again_s", "_groups", "_size", "document")

    def __init__(self, files: Files, root: str, clock: Clock) -> None:
        """`root`: the store's."""
        self.document = Document(files, f"{root}/config/{_NAME}", self._render)
        self._clock = clock
        self._groups: dict[str, dict[MessageQueue, tuple[str, float]]] = {}
        self._size = 0
        self._drop_again_s = 0.0

    def load(self) -> None:
        """Raises StoreDamagedError."""

        def parse(text: str) -> dict[str, dict[str, list[tuple[str, str, int]]]]:
            return {
                str(group): {
                    str(client_id): [
                        (str(topic), str(broker), int(number))
                        for topic, broker, number in (as_list(one, _NAME) for one in queues)
                    ]
                    for client_id, queues in as_object(owners, _NAME).items()
                }
                for group, owners in load_object(text, _NAME).items()
            }

        for group, owners in (self.document.load(parse) or {}).items():
            for client_id, queues in owners.items():
                self.lock(group, client_id, [MessageQueue(*queue) for queue in queues])
        self.document.changed = False

    def _render(self) -> str:
        """Group -> client -> its queues."""
        now = self._clock.monotonic_s()
        found: dict[str, dict[str, list[list[object]]]] = {}
        for group, leases in self._groups.items():
            for queue, (client_id, end) in leases.items():
                if end > now:
                    found.setdefault(group, {}).setdefault(client_id, []).append([*queue])
        return fastjson.dumps_file(found)

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Takes or renews what is free, expired or the client's own; returns what it holds now."""
        now = self._clock.monotonic_s()
        leases = self._groups.get(group, {})
        held = set()
        for queue in queues:
            owner, end = leases.get(queue, ("", 0.0))
            if queue not in leases:
                if self._size >= LEASES_MAX and now >= self._drop_again_s:
                    self._drop_again_s = now + 1.0  # what is full stays so for a while
                    for name, held_there in list(self._groups.items()):
                        for queue_there in [q for q, (_, end) in held_there.items() if end <= now]:
                            del held_there[queue_there]
                            self._size -= 1
                        if not held_there:
                            del self._groups[name]
                if self._size >= LEASES_MAX:
                    continue
                self._size += 1
            if owner == client_id or end <= now:
                self.document.changed |= owner != client_id
                leases[queue] = (client_id, now + LEASE_S)
                held.add(queue)
        if leases:
            self._groups[group] = leases
        return held

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Gives up those of the queues that the client holds."""
        leases = self._groups.get(group, {})
        for queue in queues:
            if queue in leases and leases[queue][0] == client_id:
                del leases[queue]
                self._size -= 1
                self.document.changed = True
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
