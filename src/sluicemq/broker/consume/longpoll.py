"""Pulls and pops that wait for messages (spec/remoting.md §13, spec/grpc.md §8).

A parked pull stands in the list of its queue and in a heap by deadline. `wake` is called in the
loop turn in which messages of a queue become visible; each pull looks at the new messages through
its own filter and stays parked when it wants none of them. `expire` answers what has waited long
enough, with what a last look finds: messages can become available without waking every waiter.
Answers go to `write(peer, frame)`, which joins them to those of the turn.

A pop waits for one queue or for any (`ANY_QUEUE`), and for those of its retry topics. What one pop
gets no other of its group does, so they are a *contest*: messages are offered to the one that waits
longest, and to the next one only when it leaves some. So a thousand that wait cost a message one
look. Whoever is about to look (its turn has no time, or it has much to scan) has the offer until it
has looked, is too late, or its connection breaks: then it goes to the next one.

Looks have their share of the loop's time (`net.limits`), and where many wait for one queue the
answers of sends leave before them: no producer waits for all the filters that it wakes. A crowd
looks in slices of a millisecond, between which sends are read and answered; the connection that has
used least looks first, so that one with a hundred pulls does not hold up a hundred with one each.

The number of those that wait is bounded: `park` refuses and the caller answers at once.
"""

import heapq
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

from sluicemq.broker.group_commit import Durable, Parked
from sluicemq.net.dispatch import Peer
from sluicemq.net.limits import FairScheduler
from sluicemq.net.work.background import WorkItem
from sluicemq.store.gather import PostponedWork
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import encode_answer

log = logging.getLogger(__name__)

PEER_MAX: Final = 10_000
"""Pulls of one connection that wait: a client has one for each of its queues."""
ANY_QUEUE: Final = -1
Rivals = dict[Parked, Peer]
"""Those of one contest, in the order in which they came."""
NOBODY: Final[dict[str, Rivals]] = {}
CROWD: Final = 8
"""Looks of so many take longer than writing twice to one that sends and waits."""


@dataclass(slots=True, eq=False)
class LongPolls:
    """All parked pulls and pops of a broker. Answers that have to be safe first go to `hold`;
    `flush` sends off what `write` was given."""

    write: Callable[[Peer, bytes], None]
    hold: Callable[[Peer, bytes, bool, bool], None]
    flush: Callable[[], None]
    size_max: int
    shares: FairScheduler
    popping: int = 0
    """How many of them are pops."""
    # By queue and contest, as dicts: one leaves without a look at 100,000 others that wait there.
    _by_queue: dict[tuple[str, int], dict[str, Rivals]] = field(default_factory=dict)
    _by_peer: dict[Peer, set[Parked]] = field(default_factory=dict)
    _deadlines: list[tuple[float, int, Peer, Parked]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _size: int = 0

    def __len__(self) -> int:
        return self._size

    def waiting(self, topic: str, queue_id: int, contest: str) -> int:
        """How many pops of a contest wait for the queue, or for any."""
        return len(self._by_queue.get((topic, queue_id), NOBODY).get(contest, ()))

    def park(self, parked: Parked, peer: Peer) -> bool:
        """Keeps the pull; False when too many wait already."""
        if self._size >= self.size_max or len(self._by_peer.get(peer, ())) >= PEER_MAX:
            return False
        for key in parked.queues:
            self._by_queue.setdefault(key, {}).setdefault(parked.competition_key, {})[parked] = peer
        self.popping += bool(parked.competition_key)
        self._by_peer.setdefault(peer, set()).add(parked)
        heapq.heappush(self._deadlines, (parked.deadline_s, next(self._numbers), peer, parked))
        self._size += 1
        return True

    def wake(self, topic: str, queue_id: int, offset_max: int | None = None) -> None:
        """Messages of the queue below `offset_max` are visible now; None: something besides
        messages has changed, a group was sent to another place. Each pull looks when the turn has
        time for it; once, however often it is woken until then. HOT."""
        waiting = self._by_queue.get((topic, queue_id), NOBODY)
        if not (waiting or self.popping):
            return
        pulls = tuple(waiting.get("", {}).items())
        if len(pulls) >= CROWD:
            self.flush()
        for parked, peer in pulls:
            is_new = offset_max is None or offset_max > parked.scan_offset
            if parked.is_done or parked.is_attempt_pending or not is_new:
                continue
            if self.shares.has_to_wait(peer):
                parked.is_attempt_pending = True
                self.shares.schedule_slice(peer, partial(self.look, parked, peer))
            else:
                begin_s = self.shares.now_s()
                self._look(parked, peer, self.write)
                self.shares.spent(peer, begin_s)
        if self.popping:
            anywhere = self._by_queue.get((topic, ANY_QUEUE), NOBODY)
            for contest, rivals in (*waiting.items(), *anywhere.items()):
                if contest:
                    self._offer(rivals)

    def _offer(self, rivals: Rivals) -> None:
        """There may be messages for one of these, and for the next one if it leaves some. HOT."""
        while rivals:
            parked, peer = next(iter(rivals.items()))
            if parked.is_attempt_pending:
                return
            if peer.closed:
                self._forget(parked, peer)
                continue
            if self.shares.has_to_wait(peer):
                parked.is_attempt_pending = True
                self.shares.schedule_slice(peer, partial(self.look, parked, peer))
                return
            begin_s = self.shares.now_s()
            self._look(parked, peer, self.write)
            self.shares.spent(peer, begin_s)
            if not parked.has_left_messages:
                return

    def _pass_on(self, parked: Parked) -> None:
        """What was offered to this one is for the others of its contest."""
        for key in parked.queues if parked.competition_key else ():
            self._offer(self._by_queue.get(key, NOBODY).get(parked.competition_key, {}))

    def look(
        self,
        parked: Parked,
        peer: Peer,
        write: Callable[[Peer, bytes], None] = Peer.write,
    ) -> None:
        """A pull looks again, at any time: its answer leaves at once. HOT."""
        self._look(parked, peer, write)
        if parked.has_left_messages:
            parked.has_left_messages = False
            self._pass_on(parked)

    def _look(
        self,
        parked: Parked,
        peer: Peer,
        write: Callable[[Peer, bytes], None],
        *,
        is_last: bool = False,
    ) -> None:
        """An error is its answer and nobody else's. HOT."""
        parked.is_attempt_pending = False
        if parked.is_done:
            return
        try:
            answer = parked.try_answer(parked, is_last)
        except Exception as error:
            log.exception("a waiting pull of %s:%d failed", *parked.queues[0])
            remark = f"{type(error).__name__}: {error}"
            answer = encode_answer(parked.command, ResponseCode.SYSTEM_ERROR, remark=remark)
        if answer is not None or is_last:
            self._forget(parked, peer)
            if isinstance(answer, Durable):
                self.hold(peer, *answer)
            else:
                write(peer, answer or b"")

    def look_on(
        self, parked: Parked, peer: Peer, judgement: PostponedWork | None
    ) -> WorkItem[None]:
        """What the next look has to know first, and that look."""
        yield None
        if judgement is not None:
            judgement.store_result((yield judgement.run))
        self.look(parked, peer)

    def expire(self, now_s: float) -> None:
        """Answers the pulls whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, _, peer, parked = heapq.heappop(self._deadlines)
            had_offer = parked.is_attempt_pending and not parked.is_done
            self._look(parked, peer, self.write, is_last=True)
            if had_offer or parked.has_left_messages:
                parked.has_left_messages = False
                self._pass_on(parked)

    def end_topic(self, topic: str) -> None:
        """Answer every pull, pop and notification that waits for messages of a deleted topic. Call
        it when the topic has left the table of topics: the last look of each then answers
        TOPIC_NOT_EXIST (17)."""
        waiting = [
            (parked, peer)
            for (name, _), contests in self._by_queue.items()
            if name == topic
            for rivals in contests.values()
            for parked, peer in rivals.items()
            if parked.queues[0][0] == topic  # a pop also waits for its retry topics
        ]
        for parked, peer in waiting:
            self._look(parked, peer, Peer.write, is_last=True)

    def disconnect(self, peer: Peer) -> None:
        """The connection is gone: its pulls are forgotten."""
        gone = tuple(self._by_peer.get(peer, ()))
        for parked in gone:
            self._forget(parked, peer)
        for parked in gone:
            if parked.is_attempt_pending:
                self._pass_on(parked)

    def _forget(self, parked: Parked, peer: Peer) -> None:
        parked.is_done = True
        self._size -= 1
        mine = self._by_peer[peer]
        for key in parked.queues:
            contests = self._by_queue[key]
            rivals = contests[parked.competition_key]
            del rivals[parked]
            if not rivals:
                del contests[parked.competition_key]
            if not contests:
                del self._by_queue[key]
        self.popping -= bool(parked.competition_key)
        mine.discard(parked)
        if not mine:
            del self._by_peer[peer]
        # Answered pulls stay in the heap until their deadline, unless they are most of it.
        if len(self._deadlines) > 64 and len(self._deadlines) > 4 * self._size:
            self._deadlines = [entry for entry in self._deadlines if not entry[3].is_done]
            heapq.heapify(self._deadlines)
