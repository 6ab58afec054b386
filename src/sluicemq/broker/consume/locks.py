"""Queue locks: the leases by which members of a group consume queues in order.

A lease lasts LEASE_S, and its owner renews it every 20 s. An expired lease may be taken by another
client. A lane of a group locks under the name `group@lane`.

The leases are stored in `config/sluiceLocks.json`. So a broker that restarts, or a replica that
takes over, gives no queue to a second client while the first one still processes its messages:
every lease in the file is renewed for its full length when it is loaded. RocketMQ's brokers forget
their locks, or ask each other (lockInStrictMode).
"""

from collections.abc import Iterable
from typing import Final

from sluicemq.broker.documents import Document
from sluicemq.clock import Clock
from sluicemq.files import Files
from sluicemq.model.topic import MessageQueue
from sluicemq.wire import fastjson
from sluicemq.wire.fastjson import as_list, as_object, load_object

LEASE_S: Final = 60.0
"""The length of a lease in seconds."""
LEASES_MAX: Final = 100_000
"""The most leases of a broker. Further queues cannot be locked."""
_NAME: Final = "sluiceLocks.json"


class QueueLocks:
    """The queue leases of all groups: group -> queue -> (client id, end on the monotonic clock)."""

    __slots__ = ("_clock", "_groups", "_next_cleanup_s", "_size", "document")

    def __init__(self, files: Files, root: str, clock: Clock) -> None:
        """Create an empty table of leases, by which clients lock queues.

        Its file is in the store at `root`, and is not read before `load`.
        """
        self.document = Document(files, f"{root}/config/{_NAME}", self._render_leases)
        self._clock = clock
        self._groups: dict[str, dict[MessageQueue, tuple[str, float]]] = {}
        """By group and queue: the client that has locked it, and the monotonic end of the lease."""
        self._size = 0
        """The number of leases, with expired ones."""
        self._next_cleanup_s = 0.0
        """The monotonic time before which expired leases are not removed."""

    def load(self) -> None:
        """Grant each lease in the file again, for LEASE_S seconds from now on.

        Raises StoreDamagedError if the content of the file is invalid.
        """
        loaded = self.document.load(_parse_leases) or {}
        for group, queues_by_client in loaded.items():
            for client_id, queues in queues_by_client.items():
                self.lock(group, client_id, queues)
        # The file contains these leases already.
        self.document.changed = False

    def _render_leases(self) -> str:
        """Return the text of the file, with the leases that have not expired.

        It is JSON: {GROUP: {CLIENT_ID: [[TOPIC, BROKER, QUEUE_ID], …]}}.
        """
        now_s = self._clock.monotonic_s()
        queues_by_owner: dict[str, dict[str, list[list[object]]]] = {}
        for group, leases in self._groups.items():
            for queue, (client_id, end_s) in leases.items():
                if end_s > now_s:
                    queues_by_client = queues_by_owner.setdefault(group, {})
                    queues_by_client.setdefault(client_id, []).append([*queue])
        return fastjson.dumps_file(queues_by_owner)

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Lock those of `queues` that no other client has locked, for LEASE_S seconds from now on.

        Return the queues that are locked by the client now. A lock is a lease: it ends by itself,
        and the client renews it by another call. If there are LEASES_MAX leases, expired ones are
        removed, at most once a second. If that does not help, further queues cannot be locked.
        """
        now_s = self._clock.monotonic_s()
        leases = self._groups.get(group, {})
        leased_queues = set()
        for queue in queues:
            if queue not in leases and not self._reserve_lease(now_s):
                continue
            owner, end_s = leases.get(queue, ("", 0.0))
            is_available = owner == client_id or end_s <= now_s
            if is_available:
                # A renewed lease is not saved: each one in the file is renewed when it is loaded.
                self.document.changed |= owner != client_id
                leases[queue] = (client_id, now_s + LEASE_S)
                leased_queues.add(queue)
        if leases:
            self._groups[group] = leases
        return leased_queues

    def _reserve_lease(self, now_s: float) -> bool:
        """Count a new lease. Return False, with nothing counted, if there are LEASES_MAX already.

        Expired leases are removed first if necessary, at most once a second.
        """
        if self._size >= LEASES_MAX and now_s >= self._next_cleanup_s:
            self._remove_expired(now_s)
        if self._size >= LEASES_MAX:
            return False
        self._size += 1
        return True

    def _remove_expired(self, now_s: float) -> None:
        """Remove the expired leases of all groups. The next cleanup is possible in a second."""
        self._next_cleanup_s = now_s + 1.0
        for group, leases in list(self._groups.items()):
            expired_queues = [queue for queue, (_, end_s) in leases.items() if end_s <= now_s]
            for queue in expired_queues:
                del leases[queue]
                self._size -= 1
            if not leases:
                del self._groups[group]

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """End the leases of the client on these queues. Leases of other clients stay."""
        leases = self._groups.get(group, {})
        for queue in queues:
            if queue in leases and leases[queue][0] == client_id:
                del leases[queue]
                self._size -= 1
                self.document.changed = True
        if not leases:
            self._groups.pop(group, None)

    def is_locked(self, group: str) -> bool:
        """Return whether a member of the group, or of one of its lanes, has an unexpired lease."""
        now_s = self._clock.monotonic_s()
        lane_prefix = f"{group}@"
        for name, leases in self._groups.items():
            is_group_or_lane = name == group or name.startswith(lane_prefix)
            if is_group_or_lane and any(end_s > now_s for _, end_s in leases.values()):
                return True
        return False


def _parse_leases(text: str) -> dict[str, dict[str, list[MessageQueue]]]:
    """Parse the text of the file, and return the locked queues by group and client id.

    It is JSON: {GROUP: {CLIENT_ID: [[TOPIC, BROKER, QUEUE_ID], …]}}.
    """
    leases: dict[str, dict[str, list[MessageQueue]]] = {}
    for group, owners in load_object(text, _NAME).items():
        queues_by_client: dict[str, list[MessageQueue]] = {}
        for client_id, entries in as_object(owners, _NAME).items():
            queues: list[MessageQueue] = []
            for entry in entries:
                topic, broker, queue_id = as_list(entry, _NAME)
                queues.append(MessageQueue(str(topic), str(broker), int(queue_id)))
            queues_by_client[str(client_id)] = queues
        leases[str(group)] = queues_by_client
    return leases
