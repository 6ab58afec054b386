"""Pulls that wait for messages (spec/remoting.md §13).

A parked pull stands in the list of its queue and in a heap by deadline. `wake` is called in the
loop turn in which messages of a queue become visible; each pull looks at the new messages through
its own filter and stays parked when it wants none of them. `expire` answers what has waited long
enough. Answers go to `write(peer, frame)`, which joins them to those of the turn.

Looks have their share of the loop's time (`net.shares`), so that a send does not wait for all the
filters that it wakes.

The number of parked pulls is bounded: `park` refuses and the caller answers at once.
"""

import heapq
import logging
from collections.abc import Callable
from itertools import count
from typing import Final

from sluicemq.broker.turns import Parked
from sluicemq.net.limits import Shares
from sluicemq.net.peer import Peer
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import encode_answer

log = logging.getLogger(__name__)

PEER_MAX: Final = 10_000
"""Pulls of one connection that wait: a client has one for each of its queues."""


class LongPolls:
    """All parked pulls of a broker."""

    __slots__ = (
        "_by_peer", "_by_queue", "_deadlines", "_numbers", "_shares", "_size", "_write", "size_max",
    )  # fmt: skip

    def __init__(self, write: Callable[[Peer, bytes], None], size_max: int, shares: Shares) -> None:
        self._write = write
        self._shares = shares
        self.size_max = size_max
        # A dict of each queue: one leaves without a look at the 100,000 others that may wait there.
        self._by_queue: dict[tuple[str, int], dict[Parked, Peer]] = {}
        self._by_peer: dict[Peer, set[Parked]] = {}
        self._deadlines: list[tuple[float, int, Peer, Parked]] = []
        self._numbers = count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def is_full(self) -> bool:
        return self._size >= self.size_max

    def park(self, parked: Parked, peer: Peer) -> bool:
        """Keeps the pull; False when too many wait already."""
        if self._size >= self.size_max or len(self._by_peer.get(peer, ())) >= PEER_MAX:
            return False
        self._by_queue.setdefault((parked.topic, parked.queue_id), {})[parked] = peer
        self._by_peer.setdefault(peer, set()).add(parked)
        heapq.heappush(self._deadlines, (parked.deadline_s, next(self._numbers), peer, parked))
        self._size += 1
        return True

    def wake(self, topic: str, queue_id: int, offset_max: int) -> None:
        """Messages of the queue below `offset_max` are visible now."""
        key = (topic, queue_id)
        waiting = self._by_queue.get(key)
        if waiting is None:
            return
        for parked, peer in tuple(waiting.items()):
            if not parked.is_done and offset_max > parked.scan_offset:
                self._look_soon(parked, peer)

    def look_again(self, topic: str, queue_id: int) -> None:
        """Something besides messages has changed: a group was sent to another place."""
        for parked, peer in tuple(self._by_queue.get((topic, queue_id), {}).items()):
            if not parked.is_done:
                self._look_soon(parked, peer)

    def _look_soon(self, parked: Parked, peer: Peer) -> None:
        """Now, when the turn has time for it; once, however often it is woken until then."""
        if parked.is_looking:
            return
        if self._shares.has_to_wait(peer):
            parked.is_looking = True
            self._shares.add(peer, lambda: self.look(parked, peer))
        else:
            begin_s = self._shares.now_s()
            self._look_now(parked, peer, self._write)
            self._shares.spent(peer, begin_s)

    def look(self, parked: Parked, peer: Peer) -> None:
        """A pull looks again, at any time: its answer leaves at once."""
        self._look_now(parked, peer, Peer.write)

    def _look_now(self, parked: Parked, peer: Peer, write: Callable[[Peer, bytes], None]) -> None:
        parked.is_looking = False
        answer = None if parked.is_done else _look(parked, False)
        if answer is not None:
            self._drop_from_queue(parked)
            self._forget(peer, parked)
            write(peer, answer)

    def expire(self, now_s: float) -> None:
        """Answers the pulls whose time is over."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now_s:
            _, _, peer, parked = heapq.heappop(deadlines)
            if parked.is_done:
                continue
            self._drop_from_queue(parked)
            answer = _look(parked, True) or b""
            self._forget(peer, parked)
            self._write(peer, answer)

    def disconnect(self, peer: Peer) -> None:
        """The connection is gone: its pulls are forgotten."""
        for parked in self._by_peer.pop(peer, ()):
            parked.is_done = True
            self._size -= 1
            self._drop_from_queue(parked)
        self._compact()

    def _forget(self, peer: Peer, parked: Parked) -> None:
        parked.is_done = True
        self._size -= 1
        mine = self._by_peer.get(peer)
        if mine is not None:
            mine.discard(parked)
            if not mine:
                del self._by_peer[peer]
        self._compact()

    def _drop_from_queue(self, parked: Parked) -> None:
        key = (parked.topic, parked.queue_id)
        waiting = self._by_queue.get(key)
        if waiting is not None:
            waiting.pop(parked, None)
            if not waiting:
                del self._by_queue[key]

    def _compact(self) -> None:
        """Answered pulls stay in the heap until their deadline, unless they are most of it."""
        if len(self._deadlines) > 64 and len(self._deadlines) > 4 * self._size:
            self._deadlines = [entry for entry in self._deadlines if not entry[3].is_done]
            heapq.heapify(self._deadlines)


def _look(parked: Parked, is_last: bool) -> bytes | None:
    """What a pull finds; an error is its answer and nobody else's."""
    try:
        return parked.look(parked, is_last)
    except Exception as error:
        log.exception("a waiting pull of %s:%d failed", parked.topic, parked.queue_id)
        remark = f"{type(error).__name__}: {error}"
        return encode_answer(parked.command, ResponseCode.SYSTEM_ERROR, remark=remark)
