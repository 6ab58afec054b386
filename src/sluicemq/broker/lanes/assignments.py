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
    """The lane for which each client of one group reads each queue.

    A lane is represented by its key. A client that changes lanes keeps its assignments until it has
    committed the messages that it has in flight, or until MOVE_WAIT_MS are over.
    """

    __slots__ = ("_clock", "_lanes", "_moving_until_ms", "_redirects")

    def __init__(self, clock: Clock, on_change: Callable[[], None]) -> None:
        """Create an empty table, which says for which lane each client reads each queue.

        `on_change()` is called after each change of the redirects, so that they are saved.
        """
        self._clock = clock
        self._lanes: dict[tuple[str, QueueKey], str] = {}
        """By client id and queue: the key of the lane for which the client reads the queue. It is
        "" if that lane has been removed."""
        self._moving_until_ms: dict[str, int] = {}
        """By client id: until when the client may finish messages of its old lane."""
        self._redirects = Resets(on_change)
        """The offsets to which clients must be redirected. The client id is used as the group of a
        reset, because each client is redirected on its own."""

    def lane_of(self, client_id: str, queue: QueueKey, default: str) -> str:
        """Return the lane for which the client reads the queue, or `default` if it has not read it.

        `default` is usually the lane that the client is in.
        """
        return self._lanes.get((client_id, queue), default)

    def assign(self, client_id: str, queue: QueueKey, key: str) -> None:
        """Assign a queue to the client, to be read for the lane `key`.

        The client must have no messages of another lane in flight. If it was to be redirected in
        the queue, it no longer is.
        """
        self._lanes[client_id, queue] = key
        if self._redirects:
            self._redirects.discard(client_id, *queue)

    def has_read(self, client_id: str, queue: QueueKey) -> bool:
        """Return whether the client has pulled, or asked for its offset, since it became a member.

        If it has not, the offset from which it pulls may be that of another lane or of the group.
        """
        return (client_id, queue) in self._lanes

    def redirect(self, client_id: str, queue: QueueKey, key: str, offset: int) -> None:
        """Assign a queue to the client for the lane `key`, and redirect it to `offset`.

        Its commits in the queue are ignored until it knows the offset (`must_ignore_commits`).
        """
        self.assign(client_id, queue, key)
        self._redirects.add(client_id, *queue, offset)

    def get_redirect(self, client_id: str, queue: QueueKey, offset: int) -> int | None:
        """Return the offset to which the client's pull from `offset` must be redirected.

        Return None if it may pull from there. The redirect ends when the pull proves that the
        client knows it (`Resets.redirect`).
        """
        return self._redirects.redirect(client_id, *queue, offset) if self._redirects else None

    def must_ignore_commits(self, client_id: str, queue: QueueKey) -> bool:
        """Return whether the client does not know yet that it is redirected in the queue.

        Then its commits there are invalid, because they are for its old lane.
        """
        return bool(self._redirects) and self._redirects.blocks_commits(client_id, *queue)

    def assume_reads(self, client_id: str, queues: Iterable[tuple[QueueKey, str]]) -> None:
        """Assign queues to a new member, to be read for the lanes for which it read them before.

        `queues` are the queues of which it was the last reader, each with the key of the lane. A
        queue that the client is assigned already is left out.
        """
        for queue, key in queues:
            self._lanes.setdefault((client_id, queue), key)

    def start_move(self, client_id: str, key: str, queues: Iterable[QueueKey]) -> None:
        """Start the client's move from the lane `key` to another one.

        The client may have messages of `queues` in flight, and reads these queues for the old lane
        until it has committed the messages, but for at most MOVE_WAIT_MS. A queue that the client
        is assigned already, for whichever lane, stays assigned as it is.
        """
        self._moving_until_ms[client_id] = self._clock.now_ms() + MOVE_WAIT_MS
        for queue in queues:
            self._lanes.setdefault((client_id, queue), key)

    def is_moving(self, client_id: str) -> bool:
        """Return whether the client changed lanes less than MOVE_WAIT_MS ago.

        Until then it may finish the messages of its old lane.
        """
        return self._clock.now_ms() < self._moving_until_ms.get(client_id, 0)

    def get_queues_by_lane(self) -> dict[str, set[QueueKey]]:
        """Return the queues that clients read for each lane, by the key of the lane.

        A client may read a queue for another lane than the one that it is a member of.
        """
        queues_by_lane: dict[str, set[QueueKey]] = {}
        for (_, queue), key in self._lanes.items():
            queues_by_lane.setdefault(key, set()).add(queue)
        return queues_by_lane

    def iter_clients(self, queue: QueueKey, key: str) -> Iterator[str]:
        """Return an iterator of the ids of the clients that read the queue for the lane `key`."""
        return (
            client_id
            for (client_id, read_queue), lane_key in self._lanes.items()
            if read_queue == queue and lane_key == key
        )

    def forget_lane(self, key: str) -> None:
        """Mark the queues that clients read for the lane `key` as read for no lane ("").

        Called when the lane is removed. A later lane with the same key is another lane, of which
        these clients have nothing in flight.
        """
        for client_and_queue, lane_key in self._lanes.items():
            if lane_key == key:
                self._lanes[client_and_queue] = ""

    def remove_client(self, client_id: str) -> None:
        """Forget everything about a client that has left the group.

        Its assigned queues, its redirects, and its move between lanes are removed.
        """
        self._moving_until_ms.pop(client_id, None)
        self._redirects.forget(group=client_id)
        for client_and_queue in [*self._lanes]:
            assigned_client, _ = client_and_queue
            if assigned_client == client_id:
                del self._lanes[client_and_queue]

    def to_objects(self, members: Mapping[str, Collection[str]]) -> list[list[Any]]:
        """Return the queues that moving clients still read for their old lanes, as JSON values.

        A moving client has changed to another lane a short time ago. Each value is a list [client
        id, topic, queue id, key of the old lane]. Other assignments are not saved. `members` are
        the client ids of the members of each lane, by the key of the lane.
        """
        return [
            [client_id, *queue, key]
            for (client_id, queue), key in self._lanes.items()
            if client_id in self._moving_until_ms and client_id not in members.get(key, ())
        ]

    def load(self, objects: Iterable[Any]) -> None:
        """Start the moves that `to_objects` returned, as if they had begun now.

        Raises TypeError or ValueError for other values.
        """
        for client_id, topic, queue_id, key in objects:
            self.start_move(str(client_id), str(key), [(str(topic), int(queue_id))])
