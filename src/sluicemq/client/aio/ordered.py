"""Which queues this client may consume in order: leases at their brokers (41, 42).

A broker gives a queue of a group to one client for 60 s. We ask again every 20 s, and hand nothing
out when the last confirmation was asked for more than 30 s ago: another client cannot have the
queue before its 60 s are over, by whichever clock. A broker that says no means that the queue is
lost; one that does not answer is asked again every second.

Consuming in order: one message of a queue at a time, by the one client that has its lease.

    broker  --41-->  Leases           who may read a queue
                     OrderedReaders   lock, then look where the group stands, then read; on the way
                                      out: finish, commit, unlock
                     OrderedFeed      a lane a queue: its next message leaves when the last one is
                                      acknowledged, or comes first again after a rest

A lease that is lost stops its lane at once: nothing more is handed out or committed. The handler
that still runs is waited for before this process reads the queue again.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.readers import QueueReader, Readers, SendBack
from sluicemq.client.aio.received import Feed, ReceivedMessage, RetrySink, Sink
from sluicemq.client.core import requests
from sluicemq.client.core.answers import expect_success
from sluicemq.client.core.consuming import (
    LEVEL_DEAD,
    ORDERED_TIMES_MAX,
    ConsumeOptions,
    times_so_far,
)
from sluicemq.errors import SluiceError
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.wire.bodies import decode_locked_queues

_log = logging.getLogger("sluicemq.client")
LEASE_S: Final = 60.0
"""How long a broker keeps a queue for its client (spec/remoting.md §15)."""
TRUSTED_S: Final = 30.0
RENEW_S: Final = 20.0
RENEW_AGAIN_S: Final = 1.0


class Leases:
    """The leases of one group in this process.

    `on_lost(queue)` is called when another client has it, or may have had it; `on_held(queue)` when
    a lease that was not trusted any more is confirmed again.
    """

    def __init__(
        self,
        cluster: Cluster,
        client_id: str,
        group: str,
        *,
        on_lost: Callable[[MessageQueue], None],
        on_held: Callable[[MessageQueue], None],
    ) -> None:
        self._cluster = cluster
        self._client_id = client_id
        self._group = group
        self._on_lost = on_lost
        self._on_held = on_held
        self._asked_s: dict[MessageQueue, float] = {}

    def is_held(self, queue: MessageQueue) -> bool:
        """May messages of the queue be handed out now?"""
        asked_s = self._asked_s.get(queue)
        return asked_s is not None and self._now_s() - asked_s < TRUSTED_S

    def _now_s(self) -> float:
        return self._cluster.clock.monotonic_s()

    async def acquire(self, queue: MessageQueue) -> bool:
        """Takes a queue; False when another client has it. Raises SluiceError."""
        asked_s = self._now_s()
        if queue not in await self._lock([queue]):
            return False
        self._asked_s[queue] = asked_s
        return True

    async def _lock(self, queues: list[MessageQueue]) -> tuple[MessageQueue, ...]:
        """Queues of one broker -> those of them that we hold now."""
        address = await self._master(queues[0])
        command = requests.lock_queues(self._group, self._client_id, queues)
        answer = expect_success(await self._cluster.call(address, command), address)
        return decode_locked_queues(answer.body)

    async def _master(self, queue: MessageQueue) -> str:
        await self._cluster.route(queue.topic)
        return self._cluster.master(queue)

    async def release(self, queue: MessageQueue) -> None:
        """Gives a queue to whoever wants it; a broker that is away forgets by itself."""
        if self._asked_s.pop(queue, None) is None:
            return
        with contextlib.suppress(SluiceError):
            address = await self._master(queue)
            command = requests.unlock_queues(self._group, self._client_id, [queue])
            await self._cluster.call(address, command)

    def forget(self, queue: MessageQueue) -> None:
        """Does not renew it any more, and does not give it up before its time either."""
        self._asked_s.pop(queue, None)

    async def renew(self) -> bool:
        """Asks for all of them again; False when a broker did not answer."""
        by_broker: dict[str, list[MessageQueue]] = {}
        for queue in self._asked_s:
            by_broker.setdefault(queue.broker, []).append(queue)
        outcomes = await asyncio.gather(*map(self._renew, by_broker.items()))
        return all(outcomes)

    async def _renew(self, item: tuple[str, Iterable[MessageQueue]]) -> bool:
        broker, queues = item[0], sorted(item[1])
        asked_s = self._now_s()
        try:
            held = set(await self._lock(queues))
        except SluiceError as error:
            _log.debug("leases of %s at %s are not renewed: %s", self._group, broker, error)
            return False
        for queue in queues:
            self._renewed(queue, asked_s, is_held=queue in held)
        return True

    def _renewed(self, queue: MessageQueue, asked_s: float, *, is_held: bool) -> None:
        before_s = self._asked_s.get(queue)
        if before_s is None:  # released meanwhile
            return
        if is_held and asked_s - before_s < LEASE_S:
            self._asked_s[queue] = asked_s
            if asked_s - before_s >= TRUSTED_S:
                self._on_held(queue)
            return
        # Not ours, or ours again after a time in which another one may have had it.
        del self._asked_s[queue]
        self._on_lost(queue)

    async def renew_forever(self) -> None:
        """Every 20 s; every second while a broker does not answer."""
        is_done = True
        while True:
            await asyncio.sleep(RENEW_S if is_done else RENEW_AGAIN_S)
            is_done = await self.renew()

    def __len__(self) -> int:
        return len(self._asked_s)


class NoLeases:
    """For a broadcasting group: every client reads every queue, nobody is kept out."""

    def is_held(self, queue: MessageQueue) -> bool:
        """Always."""
        del queue
        return True

    async def acquire(self, queue: MessageQueue) -> bool:
        """Always."""
        del queue
        return True

    async def release(self, queue: MessageQueue) -> None:
        """Nobody waits for it."""

    async def renew_forever(self) -> None:
        """Nothing ends."""


FINISH_S: Final = 5.0
"""How long closing waits for a handler that still runs."""


class Lane:
    """The messages of one queue that wait, and those that are out: one, or one batch."""

    __slots__ = ("is_queued", "is_resting", "origin", "out", "owner", "waiting")

    def __init__(self, origin: "OrderedReader") -> None:
        self.origin = origin
        self.waiting: deque[ReceivedMessage] = deque()
        self.out: dict[int, ReceivedMessage] = {}
        self.owner: object = None
        self.is_resting = False
        self.is_queued = False

    @property
    def is_ready(self) -> bool:
        """May its next message be handed out now?"""
        return (
            bool(self.waiting) and not self.out and not self.is_resting and self.origin.may_hand_out
        )


class OrderedFeed(Feed):
    """Messages that wait for takers, a lane for each queue."""

    __slots__ = ("_lanes", "_ready")

    def __init__(self, *, is_shareable: bool = False) -> None:
        super().__init__(is_shareable=is_shareable)
        self._lanes: dict[object, Lane] = {}
        self._ready: deque[Lane] = deque()

    def __len__(self) -> int:
        return sum(lane.is_ready for lane in self._ready)

    def put(self, messages: list[ReceivedMessage]) -> None:
        for message in messages:
            self._lane(message).waiting.append(message)
        for lane in dict.fromkeys(self._lane(message) for message in messages):
            self._offer(lane)

    def put_back(self, messages: list[ReceivedMessage]) -> None:
        for message in reversed(messages):
            lane = self._lane(message)
            lane.waiting.appendleft(message)
            self._returned(lane, message.queue_offset)

    def suspend(self, message: ReceivedMessage, seconds: float) -> None:
        """The message comes first again, after a rest; of a batch all in their order."""
        lane = self._lane(message)
        older = sum(item.queue_offset < message.queue_offset for item in lane.waiting)
        lane.waiting.insert(older, message)
        lane.is_resting = True
        asyncio.get_running_loop().call_later(seconds, self._go_on, lane)
        self._returned(lane, message.queue_offset)

    def _go_on(self, lane: Lane) -> None:
        lane.is_resting = False
        self._offer(lane)

    def _lane(self, message: ReceivedMessage) -> Lane:
        origin = message.origin
        lane = self._lanes.get(origin)
        if lane is None:
            assert isinstance(origin, OrderedReader)
            lane = self._lanes[origin] = Lane(origin)
        return lane

    def _offer(self, lane: Lane) -> None:
        if lane.waiting and not lane.out and not lane.is_resting and not lane.is_queued:
            lane.is_queued = True
            self._ready.append(lane)
            self._wake(1)

    def _take(self, owner: object) -> ReceivedMessage | None:
        while self._ready:
            lane = self._ready.popleft()
            lane.is_queued = False
            if lane.is_ready:
                message = lane.waiting.popleft()
                lane.out[message.queue_offset] = message
                lane.owner = owner
                return message
        return None

    def more(self, first: ReceivedMessage, count_max: int) -> list[ReceivedMessage]:
        lane, messages = self._lane(first), [first]
        while len(messages) < count_max and lane.waiting and lane.origin.may_hand_out:
            message = lane.waiting.popleft()
            lane.out[message.queue_offset] = message
            messages.append(message)
        return messages

    def _rest(self, lane: Lane) -> None:
        """Nothing of the lane is out any more."""
        lane.out.clear()
        lane.owner = None
        lane.origin.rested()

    def _returned(self, lane: Lane, offset: int) -> None:
        """A message is not out any more; the lane goes on when none is."""
        if lane.out.pop(offset, None) is not None and not lane.out:
            self._rest(lane)
        self._offer(lane)

    # --- what its readers say

    def finished(self, origin: object, offset: int) -> None:
        """The message that was out is done."""
        lane = self._lanes.get(origin)
        if lane is not None and offset in lane.out:
            self._returned(lane, offset)

    def is_busy(self, origin: object) -> bool:
        """Is a message of that reader out?"""
        lane = self._lanes.get(origin)
        return lane is not None and bool(lane.out)

    def resume(self, origin: object) -> None:
        """Its lease is good again."""
        lane = self._lanes.get(origin)
        if lane is not None:
            self._offer(lane)

    def forget(self, origin: object) -> None:
        """The reader has ended."""
        lane = self._lanes.pop(origin, None)
        if lane is not None:
            lane.waiting.clear()

    def discard(self, unwanted: Callable[[ReceivedMessage], bool]) -> None:
        for lane in self._lanes.values():
            lane.waiting = deque(item for item in lane.waiting if not unwanted(item))

    def expel(self, owner: object, error: BaseException) -> None:
        super().expel(owner, error)
        for lane in tuple(self._lanes.values()):
            if lane.out and lane.owner is owner:
                self._rest(lane)
                self._offer(lane)


class OrderedSink(Sink, Protocol):
    """Where an ordered reader puts messages and hears of them."""

    def suspend(self, message: ReceivedMessage, seconds: float) -> None: ...

    def finished(self, origin: object, offset: int) -> None: ...

    def is_busy(self, origin: object) -> bool: ...

    def resume(self, origin: object) -> None: ...

    def forget(self, origin: object) -> None: ...


class OrderedRetrySink(RetrySink):
    """The retry topic of an ordered group: there is something in it when the group once consumed
    another way."""

    __slots__ = ("_ordered",)

    def __init__(self, feeds: Mapping[str, OrderedFeed]) -> None:
        super().__init__(feeds)
        self._ordered = feeds

    def suspend(self, message: ReceivedMessage, seconds: float) -> None:
        feed = self._ordered.get(message.topic) or next(iter(self._ordered.values()), None)
        if feed is not None:
            feed.suspend(message, seconds)

    def finished(self, origin: object, offset: int) -> None:
        for feed in self._ordered.values():
            feed.finished(origin, offset)

    def is_busy(self, origin: object) -> bool:
        return any(feed.is_busy(origin) for feed in self._ordered.values())

    def resume(self, origin: object) -> None:
        for feed in self._ordered.values():
            feed.resume(origin)

    def forget(self, origin: object) -> None:
        for feed in self._ordered.values():
            feed.forget(origin)


class OrderedReader(QueueReader):
    """Reads one queue under its lease."""

    ordered_feed: OrderedSink
    leases: Leases | NoLeases
    is_retiring = False

    def guard(self, feed: OrderedSink, leases: Leases | NoLeases) -> None:
        """Right after it is made."""
        self.ordered_feed = feed
        self.leases = leases
        self._quiet = asyncio.Event()

    @property
    def may_hand_out(self) -> bool:
        """Is the queue ours, and to stay?"""
        return not self.is_retiring and self.leases.is_held(self.queue)

    @property
    def may_commit(self) -> bool:
        return self.leases.is_held(self.queue)

    def ack(self, generation: int, offset: int) -> bool:
        counted = super().ack(generation, offset)
        self.ordered_feed.finished(self, offset)
        return counted

    async def reject(
        self, message: ReceivedMessage, delay_level: int | None, suspend_s: float | None
    ) -> bool:
        """It comes again before any other of its queue; when there were enough retries (or
        `delay_level` is -1) it becomes a dead letter. Never raises: what cannot be stored as a dead
        letter comes again here."""
        if not message.is_current:
            self.ordered_feed.finished(self, message.queue_offset)
            return False
        rules = self._options.retry
        level = rules.level if delay_level is None else delay_level
        times = times_so_far(message.record) + message.attempt - 1
        times_max = ORDERED_TIMES_MAX if rules.times_max is None else rules.times_max
        is_enough = level <= LEVEL_DEAD or times >= times_max
        if is_enough and await self._give_up(message, times, level):
            return self.ack(message.generation, message.queue_offset)
        self.given_back(message)
        message.attempt += 1
        self.ordered_feed.suspend(message, rules.suspend_s if suspend_s is None else suspend_s)
        return True

    async def _give_up(self, message: ReceivedMessage, times: int, level: int) -> bool:
        if self._send_back is None:
            _log.warning("%s is dropped: this consumer has no dead letters", message)
            return True
        try:
            await self._send_back.send_copy(message.record, times, level)
        except SluiceError as error:
            _log.warning(
                "group %s: %s could not be stored as a dead letter, its queue waits: %s",
                self._group, message, error,
            )  # fmt: skip
            return False
        return True

    # --- the end

    def rested(self) -> None:
        """No message of it is out."""
        self._quiet.set()

    async def finish(self) -> None:
        """Hands nothing out any more; returns when nothing is out."""
        self.is_retiring = True
        while self.ordered_feed.is_busy(self):
            self._quiet.clear()
            await self._quiet.wait()


class OrderedReaders(Readers):
    """The readers of a group that consumes in order."""

    leases: Leases | NoLeases

    def __init__(
        self,
        cluster: Cluster,
        client_id: str,
        group: str,
        options: ConsumeOptions,
        *,
        on_pending: Callable[[], None],
        on_change: Callable[[], None],
        send_back: SendBack | None,
    ) -> None:
        super().__init__(cluster, group, options, on_pending=on_pending, send_back=send_back)
        self._on_change = on_change
        self._retiring: dict[MessageQueue, tuple[OrderedReader, asyncio.Task[None]]] = {}
        self._renewing: asyncio.Task[None] | None = None
        self.leases = (
            NoLeases()
            if options.broadcast
            else Leases(cluster, client_id, group, on_lost=self._lost, on_held=self._held_again)
        )

    async def add(
        self, queue: MessageQueue, subscription: Subscription, feed: Sink, *, is_new: bool = False
    ) -> bool:
        """Locks the queue, then starts where the group stands: whoever had it has committed."""
        if queue in self._retiring or not await self.leases.acquire(queue):
            return False
        if self._renewing is None and not self.options.broadcast:
            self._renewing = self._tasks.spawn(
                self.leases.renew_forever(), f"sluicemq leases {self._group}"
            )
        try:
            return await super().add(queue, subscription, feed, is_new=is_new)
        except BaseException:
            await self.leases.release(queue)
            raise

    def _make(
        self,
        queue: MessageQueue,
        subscription: Subscription,
        position: int,
        committed: int | None,
        feed: Sink,
    ) -> QueueReader:
        reader = OrderedReader(
            self._cluster,
            self._group,
            queue,
            subscription,
            position,
            options=self.options,
            feed=feed,
            on_pending=self._on_pending,
            committed=committed,
            send_back=self._send_back,
        )
        assert isinstance(feed, OrderedFeed | OrderedRetrySink)
        reader.guard(feed, self.leases)
        return reader

    def _held_again(self, queue: MessageQueue) -> None:
        reader = self._readers.get(queue)
        if isinstance(reader, OrderedReader):
            reader.ordered_feed.resume(reader)

    def _lost(self, queue: MessageQueue) -> None:
        """Another client has the queue: neither hand out nor commit."""
        if queue not in self._readers:
            return
        _log.warning(
            "group %s: the lock of %s is lost; its messages go to another member",
            self._group, queue,
        )  # fmt: skip
        reader = self._stop(queue)
        reader.drop()
        self._retire(queue, reader, is_ours=False)
        self._on_change()

    def _stop(self, queue: MessageQueue) -> OrderedReader:
        reader, task = self._readers.pop(queue), self._running.pop(queue)
        task.cancel()
        assert isinstance(reader, OrderedReader)
        return reader

    async def drop(self, queue: MessageQueue) -> None:
        """Stops reading; the lock goes when the message that is out is done and committed."""
        self._retire(queue, self._stop(queue), is_ours=True)
        await asyncio.sleep(0)

    def _moved_by_reset(self, queues: Iterable[MessageQueue]) -> list[QueueReader]:
        """Also those that finish their last message: they commit afterwards."""
        wanted = set(queues)
        finishing = [reader for queue, (reader, _) in self._retiring.items() if queue in wanted]
        return [*super()._moved_by_reset(wanted), *finishing]

    def _retire(self, queue: MessageQueue, reader: OrderedReader, *, is_ours: bool) -> None:
        reader.is_retiring = True
        task = self._tasks.spawn(
            self._finish(queue, reader, is_ours=is_ours), f"sluicemq finish {queue}"
        )
        self._retiring[queue] = reader, task
        task.add_done_callback(lambda _: self._retiring.pop(queue, None))

    async def _finish(self, queue: MessageQueue, reader: OrderedReader, *, is_ours: bool) -> None:
        await reader.finish()
        offset = reader.in_flight.committable
        reader.drop()
        reader.ordered_feed.forget(reader)
        if is_ours:
            if self.options.auto_commit:
                await self._commit(reader, offset)
                await self._offsets.flush()
            await self.leases.release(queue)
            self._on_change()

    async def close(self) -> None:
        """Finishes every queue. One whose handler does not end in time is committed as it is and
        keeps its lock until that expires, so that nobody reads beside the handler."""
        for queue in list(self._readers):
            self._retire(queue, self._stop(queue), is_ours=True)
        if self._retiring:
            await asyncio.wait([task for _, task in self._retiring.values()], timeout=FINISH_S)
        for reader, _ in tuple(self._retiring.values()):
            if self.options.auto_commit:
                await self._commit(reader, reader.in_flight.committable)
        await self._tasks.close()
        await self._offsets.close()
