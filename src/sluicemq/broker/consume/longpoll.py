"""Pulls and pops that wait for messages (spec/remoting.md §13, spec/grpc.md §8).

A parked request is listed under its queues and in a heap ordered by deadline. `wake` is called in
the iteration of the event loop in which messages of a queue become visible. Each pull then reads
the new messages through its own filter, and stays parked if none of them matches. `expire` answers
the requests whose deadline has passed with the result of a last read, because messages can become
available without waking every waiter. Answers go to `queue_frame(peer, frame)`, which sends them
together with the other answers of the iteration.

A pop waits for one queue or for any queue of a topic (`ANY_QUEUE`), and for the queues of its retry
topics. The pops of a group compete: a message that one of them gets is invisible to the others. So
messages are offered to the pop that has waited longest, and to the next one only if the first
leaves some. A message costs one retry, even if a thousand pops wait. A pop whose retry is pending
(because the event loop is busy, or because it has many messages to scan) keeps the offer until it
has been retried, has expired or has lost its connection. Then the offer goes to the next pop.

Retries use the time of the event loop within the share of their connection (`net.limits`). If many
pulls wait for one queue, the answers of sends leave before they are retried, so that no producer
waits for all the filters that it wakes. Many pulls are retried in slices of a millisecond, between
which sends are read and answered. The connection that has used least time comes first: one
connection with a hundred pulls does not delay a hundred connections with one pull each.

The number of parked requests is limited: `park` returns False and the caller answers at once.
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
from sluicemq.wire.frames import encode_response

log = logging.getLogger(__name__)

PARKED_PER_CONNECTION_MAX: Final = 10_000
"""The most parked requests of one connection. A client has one for each of its queues."""
ANY_QUEUE: Final = -1
"""The queue id under which a pop waits for any queue of its topic."""
CompetingPops = dict[Parked, Peer]
"""The parked pops of one group that wait for the same queue, oldest first, with connections."""
NO_WAITERS: Final[dict[str, CompetingPops]] = {}
"""The empty result of looking up a queue for which no request waits."""
FLUSH_PULLS_MIN: Final = 8
"""If this many pulls wait for a queue, the answers of sends are written before they are retried.

Retrying them takes longer than two writes to a producer that waits for its answers.
"""


@dataclass(slots=True, eq=False)
class LongPolls:
    """All parked pulls and pops of a broker.

    - `queue_frame(peer, frame)` sends an answer with the next `flush()`.
    - `send_after_commit(peer, *answer)` sends a `Durable` answer once the broker's messages are
      durable.
    - `parked_max` is the most requests that are parked.
    """

    queue_frame: Callable[[Peer, bytes], None]
    send_after_commit: Callable[[Peer, bytes, bool, bool], None]
    flush: Callable[[], None]
    parked_max: int
    scheduler: FairScheduler
    parked_pops: int = 0
    """The number of parked requests that are pops."""
    # By queue and competition key. Dicts, so that no removal searches 100,000 others.
    _by_queue: dict[tuple[str, int], dict[str, CompetingPops]] = field(default_factory=dict)
    _by_peer: dict[Peer, set[Parked]] = field(default_factory=dict)
    _deadlines: list[tuple[float, int, Peer, Parked]] = field(default_factory=list)
    """A heap of (deadline, number, connection, request). The number makes each entry unique."""
    _numbers: Iterator[int] = field(default_factory=count)
    _size: int = 0

    def __len__(self) -> int:
        """Return the number of parked requests."""
        return self._size

    def count_waiting_pops(self, topic: str, queue_id: int, competition_key: str) -> int:
        """Return how many pops with this `competition_key` wait for the queue.

        `queue_id` ANY_QUEUE counts those that wait for any queue of the topic.
        """
        return len(self._by_queue.get((topic, queue_id), NO_WAITERS).get(competition_key, ()))

    def park(self, parked: Parked, peer: Peer) -> bool:
        """Keep a request of `peer` until messages arrive or its deadline passes.

        Return False, with nothing kept, if the broker or the connection has too many such requests.
        """
        parked_of_peer = len(self._by_peer.get(peer, ()))
        if self._size >= self.parked_max or parked_of_peer >= PARKED_PER_CONNECTION_MAX:
            return False
        for key in parked.queues:
            self._by_queue.setdefault(key, {}).setdefault(parked.competition_key, {})[parked] = peer
        self.parked_pops += bool(parked.competition_key)
        self._by_peer.setdefault(peer, set()).add(parked)
        heapq.heappush(self._deadlines, (parked.deadline_s, next(self._numbers), peer, parked))
        self._size += 1
        return True

    def wake(self, topic: str, queue_id: int, offset_max: int | None = None) -> None:
        """Retry the requests that wait for a queue, because it has new messages.

        The messages before `offset_max` are visible now. None means that something else has
        changed, for example the offset of a group. A pull that has read up to `offset_max` already
        is not retried. If a connection has used up its share of time, its pull is retried later.
        Among the pops of a group, the one that has waited longest is retried first. Called for each
        commit: keep it cheap.
        """
        requests_by_key = self._by_queue.get((topic, queue_id), NO_WAITERS)
        if not (requests_by_key or self.parked_pops):
            return

        pulls = tuple(requests_by_key.get("", {}).items())  # pulls have the competition key ""
        if len(pulls) >= FLUSH_PULLS_MIN:
            self.flush()
        for parked, peer in pulls:
            has_unread = offset_max is None or offset_max > parked.scan_offset
            if parked.is_done or parked.is_attempt_pending or not has_unread:
                continue
            if self.scheduler.has_to_wait(peer):
                parked.is_attempt_pending = True
                self.scheduler.schedule_slice(peer, partial(self.retry, parked, peer))
            else:
                begin_s = self.scheduler.now_s()
                self._retry_request(parked, peer, self.queue_frame)
                self.scheduler.spent(peer, begin_s)

        if self.parked_pops:
            pops_of_any_queue = self._by_queue.get((topic, ANY_QUEUE), NO_WAITERS)
            for competition_key, pops in (*requests_by_key.items(), *pops_of_any_queue.items()):
                if competition_key:
                    self._retry_pops(pops)

    def _retry_pops(self, pops: CompetingPops) -> None:
        """Retry the pop that has waited longest, then the next one as long as messages are left.

        If the retry of a pop must wait, because its connection has used up its share of time, stop
        there: this pop gets the messages later. Pops of closed connections are removed. Called for
        each commit: keep it cheap.
        """
        while pops:
            parked, peer = next(iter(pops.items()))
            if parked.is_attempt_pending:
                return
            if peer.closed:
                self._remove_request(parked, peer)
                continue
            if self.scheduler.has_to_wait(peer):
                parked.is_attempt_pending = True
                self.scheduler.schedule_slice(peer, partial(self.retry, parked, peer))
                return
            begin_s = self.scheduler.now_s()
            self._retry_request(parked, peer, self.queue_frame)
            self.scheduler.spent(peer, begin_s)
            if not parked.has_left_messages:
                return

    def _offer_to_others(self, parked: Parked) -> None:
        """Let the other pops of the group take messages that `parked` has not taken.

        Do nothing if `parked` is a pull.
        """
        is_pop = bool(parked.competition_key)
        if not is_pop:
            return
        for key in parked.queues:
            self._retry_pops(self._by_queue.get(key, NO_WAITERS).get(parked.competition_key, {}))

    def retry(
        self,
        parked: Parked,
        peer: Peer,
        write: Callable[[Peer, bytes], None] = Peer.write,
    ) -> None:
        """Retry a parked request now, and send its answer, if any, with `write(peer, frame)`.

        The default for `write` sends it at once. Without an answer, the request stays parked. If a
        pop leaves messages, the other pops of its group are retried.
        """
        self._retry_request(parked, peer, write)
        if parked.has_left_messages:
            parked.has_left_messages = False
            self._offer_to_others(parked)

    def _retry_request(
        self,
        parked: Parked,
        peer: Peer,
        write: Callable[[Peer, bytes], None],
        *,
        is_last: bool = False,
    ) -> None:
        """Retry a parked request. If it has an answer now, send that and remove the request.

        With `is_last`, the request is removed in any case. A `Durable` answer is sent after the
        next commit, any other with `write`. An exception is logged, and an error is sent as the
        answer, so that other requests are not affected. Do nothing if the request was answered
        already.
        """
        parked.is_attempt_pending = False
        if parked.is_done:
            return
        try:
            answer = parked.try_answer(parked, is_last)
        except Exception as error:
            log.exception("a parked request for %s:%d failed", *parked.queues[0])
            remark = f"{type(error).__name__}: {error}"
            answer = encode_response(parked.command, ResponseCode.SYSTEM_ERROR, remark=remark)
        if answer is not None or is_last:
            self._remove_request(parked, peer)
            if isinstance(answer, Durable):
                self.send_after_commit(peer, *answer)
            else:
                write(peer, answer or b"")  # b"" sends nothing

    def retry_after(self, parked: Parked, peer: Peer, work: PostponedWork | None) -> WorkItem[None]:
        """Let `work`, if it is not None, run on another thread, and then retry the request.

        This is a generator for `Background`. It first yields None, so that other work gets a turn.
        Then it yields the function of `work`, to be run on another thread, and gets its result.
        """
        yield None
        if work is not None:
            work.store_result((yield work.run))
        self.retry(parked, peer)

    def expire(self, now_s: float) -> None:
        """Retry each request whose deadline is at or before `now_s` a last time, and answer it.

        If such a pop leaves messages, or had a retry pending, the other pops of its group are
        retried.
        """
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, _, peer, parked = heapq.heappop(self._deadlines)
            had_attempt = parked.is_attempt_pending and not parked.is_done
            self._retry_request(parked, peer, self.queue_frame, is_last=True)
            if had_attempt or parked.has_left_messages:
                parked.has_left_messages = False
                self._offer_to_others(parked)

    def answer_deleted_topic(self, topic: str) -> None:
        """Answer every pull, pop and notification that waits for messages of a deleted topic.

        Call this after the topic was removed from the table of topics. The last retry of each
        request then answers with TOPIC_NOT_EXIST (17).
        """
        # Listed before the first retry, because it removes the request from the tables.
        waiting: list[tuple[Parked, Peer]] = []
        for (queue_topic, _), requests_by_key in self._by_queue.items():
            if queue_topic != topic:
                continue
            for requests in requests_by_key.values():
                # A pop also waits for its retry topics, but its first queue is one of its topic.
                waiting += [item for item in requests.items() if item[0].queues[0][0] == topic]
        for parked, peer in waiting:
            self._retry_request(parked, peer, Peer.write, is_last=True)

    def remove_connection(self, peer: Peer) -> None:
        """Forget the parked requests of a closed connection.

        If a retry of its pops was pending, the other pops of their groups are retried.
        """
        closed = tuple(self._by_peer.get(peer, ()))
        for parked in closed:
            self._remove_request(parked, peer)
        for parked in closed:
            if parked.is_attempt_pending:
                self._offer_to_others(parked)

    def _remove_request(self, parked: Parked, peer: Peer) -> None:
        """Mark a parked request as done, and remove it from all tables.

        It stays in the heap until its deadline, or until the heap is rebuilt.
        """
        parked.is_done = True
        self._size -= 1
        parked_of_peer = self._by_peer[peer]
        for queue in parked.queues:
            requests_by_key = self._by_queue[queue]
            requests = requests_by_key[parked.competition_key]
            del requests[parked]
            if not requests:
                del requests_by_key[parked.competition_key]
            if not requests_by_key:
                del self._by_queue[queue]
        self.parked_pops -= bool(parked.competition_key)
        parked_of_peer.discard(parked)
        if not parked_of_peer:
            del self._by_peer[peer]
        # Rebuild the heap when answered requests, which stay in it, are most of its entries.
        if len(self._deadlines) > 64 and len(self._deadlines) > 4 * self._size:
            self._deadlines = [deadline for deadline in self._deadlines if not deadline[3].is_done]
            heapq.heapify(self._deadlines)
