"""Members that change lanes while they run: for which lane does a client read a queue?

A client that subscribes to something else is in another lane from its next heartbeat on, and does
not know it: it still has messages of the old lane in hand, commits them, and pulls from an offset
that says how far the *old* lane has come. So what counts is not the lane it is in, but the lane it
reads the queue for. That changes when

    it asks for its offset (14)      whoever does that begins anew: it has nothing in hand any more
    it pulls, with nothing in hand   everything that it was given is committed. If its new lane is
                                     at another offset it is told so (21) until it has heard
    it is waited for too long        half a minute after it changed

Until then its commits count for the old lane, which is why nothing that it finishes comes again,
and its pulls wait. A queue that a mover left behind is *orphaned* in the old lane: whoever takes it
over there waits as long, commits of it only go forward (the newcomer's say where it wanted to
begin), and it is sent to where the mover came to.

Nor does a member know where its lane is that has neither asked nor pulled since it came: it may
have asked before its heartbeat, when it was told the group's own offset, the least of all lanes, or
be back on another connection after somebody else has read on. From an offset behind its lane's
place it is sent there (21), and what it commits behind it is void.

A message comes twice only when the mover gives a queue up without committing what it has in hand
(Java drops what its handlers work at when a queue is taken from it, here as in RocketMQ), or needs
more than half a minute for it.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from sluicemq.broker.resets import Resets
from sluicemq.clock import Clock

MOVE_MS: Final = 30_000
"""A member that changes lanes may finish what it has in hand for so long."""

Queue = tuple[str, int]
"""(topic, queue id)"""


class Movers:
    """Of one group: client and queue -> the subscription of the lane it reads for."""

    __slots__ = ("_clock", "_reads", "_told", "_until_ms")

    def __init__(self, clock: Clock, changed: Callable[[], None]) -> None:
        self._clock = clock
        self._reads: dict[tuple[str, Queue], str] = {}
        self._until_ms: dict[str, int] = {}
        self._told = Resets(changed)

    def reads(self, client_id: str, queue: Queue, key: str) -> str:
        """The lane that a member of the lane `key` reads for."""
        return self._reads.get((client_id, queue), key)

    def begins(self, client_id: str, queue: Queue, key: str) -> None:
        """It has nothing in hand of another lane."""
        self._reads[client_id, queue] = key
        if self._told:
            self._told.heard(client_id, *queue)

    def knows(self, client_id: str, queue: Queue) -> bool:
        """Has it asked for its offset, or pulled, since it is a member? If not, its offset may be
        from before: from another lane, or the group's own."""
        return (client_id, queue) in self._reads

    def sent_to(self, client_id: str, queue: Queue, key: str, offset: int) -> None:
        """It begins at an offset that it has to be told."""
        self.begins(client_id, queue, key)
        self._told.put(client_id, *queue, offset)

    def tell(self, client_id: str, queue: Queue, offset: int) -> int | None:
        """It pulls from `offset`: where it was sent to, until it has heard of it."""
        return self._told.tell(client_id, *queue, offset) if self._told else None

    def is_deaf(self, client_id: str, queue: Queue) -> bool:
        """Was it sent elsewhere and does not know yet? Then what it commits is void."""
        return bool(self._told) and self._told.blocks(client_id, *queue)

    def comes(self, client_id: str, queues: Iterable[tuple[Queue, str]]) -> None:
        """It becomes a member, after it read these queues for these lanes: it may have them still,
        and has to begin anew in another one."""
        for queue, key in queues:
            self._reads.setdefault((client_id, queue), key)

    def moves(self, client_id: str, key: str, queues: Iterable[Queue]) -> None:
        """It leaves the lane `key` for another one, and may have these queues in hand."""
        self._until_ms[client_id] = self._clock.now_ms() + MOVE_MS
        for queue in queues:
            self._reads.setdefault((client_id, queue), key)

    def has_time(self, client_id: str) -> bool:
        """Is it waited for until it has finished what it has in hand?"""
        return self._clock.now_ms() < self._until_ms.get(client_id, 0)

    def queues_read(self) -> dict[str, set[Queue]]:
        """Of each lane the queues that somebody reads for it, who may be in another one."""
        found: dict[str, set[Queue]] = {}
        for (_, queue), key in self._reads.items():
            found.setdefault(key, set()).add(queue)
        return found

    def readers(self, queue: Queue, key: str) -> Iterator[str]:
        """The clients that read the queue for the lane."""
        return (c for (c, q), lane in self._reads.items() if q == queue and lane == key)

    def forget(self, key: str) -> None:
        """The lane is forgotten: who read for it has nothing in hand of another one that may have
        the same subscription later."""
        for entry in [entry for entry, lane in self._reads.items() if lane == key]:
            self._reads[entry] = ""

    def leave(self, client_id: str) -> None:
        """It is gone: nobody waits for what it has in hand."""
        self._until_ms.pop(client_id, None)
        self._told.forget(group=client_id)
        for entry in [entry for entry in self._reads if entry[0] == client_id]:
            del self._reads[entry]

    # --- the file

    def objects(self, members: Callable[[str], Iterable[str]]) -> list[list[Any]]:
        """Those that read for a lane that they are not in; `members` of a lane."""
        return [
            [client_id, *queue, key]
            for (client_id, queue), key in self._reads.items()
            if client_id in self._until_ms and client_id not in members(key)
        ]

    def load(self, objects: Iterable[Any]) -> None:
        """The inverse. Raises TypeError, ValueError."""
        for client_id, topic, queue_id, key in objects:
            self.moves(str(client_id), str(key), [(str(topic), int(queue_id))])
