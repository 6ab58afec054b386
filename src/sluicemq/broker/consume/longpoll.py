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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

from sluicemq.broker.turns import Parked
from sluicemq.net.dispatch import Peer
from sluicemq.net.limits import Shares
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import encode_answer

log = logging.getLogger(__name__)

PEER_MAX: Final = 10_000
"""Pulls of one connection that wait: a client has one for each of its queues."""


@dataclass(slots=True, eq=False)
class LongPolls:
    """All parked pulls of a broker."""

    write: Callable[[Peer, bytes], None]
    size_max: int
    shares: Shares
    # A dict of each queue: one leaves without a look at the 100,000 others that may wait there.
    _by_queue: dict[tuple[str, int], dict[Parked, Peer]] = field(default_factory=dict)
    _by_peer: dict[Peer, set[Parked]] = field(default_factory=dict)
    _deadlines: list[tuple[float, int, Peer, Parked]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _size: int = 0

    def __len__(self) -> int:
        return self._size

    def park(self, parked: Parked, peer: Peer) -> bool:
        """Keeps the pull; False when too many wait already."""
        if self._size >= self.size_max or len(self._by_peer.get(peer, ())) >= PEER_MAX:
            return False
        self._by_queue.setdefault((parked.topic, parked.queue_id), {})[parked] = peer
        self._by_peer.setdefault(peer, set()).add(parked)
        heapq.heappush(self._deadlines, (parked.deadline_s, next(self._numbers), peer, parked))
        self._size += 1
        return True

    def wake(self, topic: str, queue_id: int, offset_max: int | None = None) -> None:
        """Messages of the queue below `offset_max` are visible now; None: something besides
        messages has changed, a group was sent to another place. Each pull looks when the turn has
        time for it; once, however often it is woken until then. HOT."""
        waiting = self._by_queue.get((topic, queue_id))
        for parked, peer in tuple(waiting.items()) if waiting is not None else ():
            is_new = offset_max is None or offset_max > parked.scan_offset
            if parked.is_done or parked.is_looking or not is_new:
                continue
            if self.shares.has_to_wait(peer):
                parked.is_looking = True
                self.shares.add(peer, partial(self.look, parked, peer))
            else:
                begin_s = self.shares.now_s()
                self.look(parked, peer, self.write)
                self.shares.spent(peer, begin_s)

    def look(
        self,
        parked: Parked,
        peer: Peer,
        write: Callable[[Peer, bytes], None] = Peer.write,
        *,
        is_last: bool = False,
    ) -> None:
        """A pull looks again, at any time: its answer leaves at once. An error is its answer and
        nobody else's. HOT."""
        parked.is_looking = False
        if parked.is_done:
            return
        try:
            answer = parked.look(parked, is_last)
        except Exception as error:
            log.exception("a waiting pull of %s:%d failed", parked.topic, parked.queue_id)
            remark = f"{type(error).__name__}: {error}"
            answer = encode_answer(parked.command, ResponseCode.SYSTEM_ERROR, remark=remark)
        if answer is not None or is_last:
            self._forget(parked, peer)
            write(peer, answer or b"")

    def expire(self, now_s: float) -> None:
        """Answers the pulls whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, _, peer, parked = heapq.heappop(self._deadlines)
            self.look(parked, peer, self.write, is_last=True)

    def disconnect(self, peer: Peer) -> None:
        """The connection is gone: its pulls are forgotten."""
        for parked in tuple(self._by_peer.get(peer, ())):
            self._forget(parked, peer)

    def _forget(self, parked: Parked, peer: Peer) -> None:
        parked.is_done = True
        self._size -= 1
        key = (parked.topic, parked.queue_id)
        waiting, mine = self._by_queue[key], self._by_peer[peer]
        del waiting[parked]
        if not waiting:
            del self._by_queue[key]
        mine.discard(parked)
        if not mine:
            del self._by_peer[peer]
        # Answered pulls stay in the heap until their deadline, unless they are most of it.
        if len(self._deadlines) > 64 and len(self._deadlines) > 4 * self._size:
            self._deadlines = [entry for entry in self._deadlines if not entry[3].is_done]
            heapq.heapify(self._deadlines)
