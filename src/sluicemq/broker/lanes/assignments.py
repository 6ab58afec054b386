"""For which lane each client of a group reads each queue.

A member that changes its subscription is in another lane from its next heartbeat on, but does not
know it. It still has messages of the old lane in flight, commits them, and pulls from an offset of
the old lane. So the lane that counts is not the one that the member is in, but the one for which it
reads the queue (design/0009, "Changing a subscription while running"). That changes when

- it asks for its offset with QUERY_CONSUMER_OFFSET (14): such a client starts again, and has no
  messages in flight;
- it pulls after it has committed everything that was delivered to it. If its new lane is at another
  offset, the pull is redirected with PULL_OFFSET_MOVED (21);
- MOVE_WAIT_MS are over since it changed its subscription.

Until then its commits count for the old lane, and its pulls wait. A queue that it left is an
*abandoned* queue of the old lane. The member that takes the queue over there waits as long, and is
redirected to the offset that its predecessor has committed. Its own commits only count if they go
forward: the others say where it wanted to begin.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from sluicemq.broker.lanes.lane_queue import QueueKey
from sluicemq.broker.offsets import Resets
from sluicemq.clock import Clock

MOVE_WAIT_MS: Final = 30_000
"""The time for which a member that changes lanes may finish messages of its old lane."""


class LaneAssignments:
    """The lane for which each client of one group reads each queue. Lanes are given by their key.

    A client that changes lanes keeps its assignments until it has committed its messages, or until
    MOVE_WAIT_MS are over.
    """

    __slots__ = ("_clock", "_lanes", "_moving_until_ms", "_redirects")

    def __init__(self, clock: Clock, on_change: Callable[[], None]) -> None:
        """Call `on_change` when the redirects in the file of lanes have changed."""
        self._clock = clock
        self._lanes: dict[tuple[str, QueueKey], str] = {}
        """By client id and queue."""
        self._moving_until_ms: dict[str, int] = {}
        """By client id: until when the client may finish messages of its old lane."""
        self._redirects = Resets(on_change)
        """The offsets of which clients do not know yet, with the client id as group."""

    def lane_of(self, client_id: str, queue: QueueKey, default: str) -> str:
        """Return the lane for which the client reads the queue, or `default` if it has not read it.

        `default` is usually the lane that the client is in.
        """
        return self._lanes.get((client_id, queue), default)

    def assign(self, client_id: str, queue: QueueKey, key: str) -> None:
        """Let the client, which has no messages of another lane in flight, read for a lane."""
        self._lanes[client_id, queue] = key
        if self._redirects:
            self._redirects.discard(client_id, *queue)

    def has_read(self, client_id: str, queue: QueueKey) -> bool:
        """Return whether the client has pulled, or asked for its offset, since it became a member.

        If it has not, the offset from which it pulls may be that of another lane or of the group.
        """
        return (client_id, queue) in self._lanes

    def redirect(self, client_id: str, queue: QueueKey, key: str, offset: int) -> None:
        """Let the client read the queue for a lane, from `offset` on, to which it is redirected."""
        self.assign(client_id, queue, key)
        self._redirects.add(client_id, *queue, offset)

    def get_redirect(self, client_id: str, queue: QueueKey, offset: int) -> int | None:
        """Return the offset to which the client's pull from `offset` must be redirected.

        Return None if it may pull from there. The redirect ends when the client has followed it.
        """
        return self._redirects.redirect(client_id, *queue, offset) if self._redirects else None

    def must_ignore_commits(self, client_id: str, queue: QueueKey) -> bool:
        """Return whether commits of the client are invalid, as it does not know of its redirect."""
        return bool(self._redirects) and self._redirects.blocks_commits(client_id, *queue)

    def assume_reads(self, client_id: str, queues: Iterable[tuple[QueueKey, str]]) -> None:
        """Assume that a new member still reads queues for some lanes, unless it is assigned.

        It read `queues`, each with the key of a lane, before it became a member.
        """
        for queue, key in queues:
            self._lanes.setdefault((client_id, queue), key)

    def start_move(self, client_id: str, key: str, queues: Iterable[QueueKey]) -> None:
        """Start the client's move from the lane `key` to another one.

        It may have messages of `queues` in flight, and reads them for the old lane until it has
        committed these messages.
        """
        self._moving_until_ms[client_id] = self._clock.now_ms() + MOVE_WAIT_MS
        for queue in queues:
            self._lanes.setdefault((client_id, queue), key)

    def is_moving(self, client_id: str) -> bool:
        """Return whether the client may still finish messages of its old lane."""
        return self._clock.now_ms() < self._moving_until_ms.get(client_id, 0)

    def get_queues_by_lane(self) -> dict[str, set[QueueKey]]:
        """Return the queues that clients read for each lane, whichever lane they are in."""
        found: dict[str, set[QueueKey]] = {}
        for (_, queue), key in self._lanes.items():
            found.setdefault(key, set()).add(queue)
        return found

    def iter_clients(self, queue: QueueKey, key: str) -> Iterator[str]:
        """Yield the ids of the clients that read the queue for the lane."""
        return (
            client_id
            for (client_id, one), lane in self._lanes.items()
            if one == queue and lane == key
        )

    def forget_lane(self, key: str) -> None:
        """Let the clients that read for a lane read for none, because the lane has ended.

        They have nothing in flight of a later lane that has the same key.
        """
        for entry in [entry for entry, lane in self._lanes.items() if lane == key]:
            self._lanes[entry] = ""

    def remove_client(self, client_id: str) -> None:
        """Forget a client that left the group, with everything that it had in flight."""
        self._moving_until_ms.pop(client_id, None)
        self._redirects.forget(group=client_id)
        for entry in [entry for entry in self._lanes if entry[0] == client_id]:
            del self._lanes[entry]

    def to_objects(self, members: Mapping[str, Collection[str]]) -> list[list[Any]]:
        """Return the assignments to lanes that a moving client is not in, as JSON objects.

        `members` are the client ids of the members of each lane.
        """
        return [
            [client_id, *queue, key]
            for (client_id, queue), key in self._lanes.items()
            if client_id in self._moving_until_ms and client_id not in members.get(key, ())
        ]

    def load(self, objects: Iterable[Any]) -> None:
        """Start the moves that `to_objects` returned. Raises TypeError or ValueError for others."""
        for client_id, topic, queue_id, key in objects:
            self.start_move(str(client_id), str(key), [(str(topic), int(queue_id))])
