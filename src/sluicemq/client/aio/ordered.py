"""Consuming in order: one message of a queue at a time, by the one client that has its lease.

    broker  --41-->  Leases           who may read a queue
                     OrderedReaders   lock, then look where the group stands, then read; on the way
                                      out: finish, commit, unlock
                     OrderedFeed      a lane a queue: its next message leaves when the last one is
                                      acknowledged, or comes first again after a rest

A broker gives a queue of a group to one client for 60 s. We ask again every 20 s, and hand nothing
out when the last confirmation was asked for more than 30 s ago: another client cannot have the
queue before its 60 s are over, by whichever clock. A broker that says no means that the queue is
lost; one that does not answer is asked again every second.

A lease that is lost stops its lane at once: nothing more is handed out or committed. The handler
that still runs is waited for before this process reads the queue again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.readers import QueueReader, Readers, Reading, Sink
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.core import requests
from sluicemq.client.core.consuming import (
    DEAD_LETTER_LEVEL,
    ORDERED_RETRIES_MAX,
    retry_count,
)
from sluicemq.client.tasks import SupervisedTask, run_to_end
from sluicemq.errors import SluiceError
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.wire.bodies import decode_locked_queues

_log = logging.getLogger("sluicemq.client")
FINISH_S: Final = 5.0
"""How long closing waits for a handler that still runs."""
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
        try:
            held = await self._lock([queue])
        except asyncio.CancelledError:
            await run_to_end(self._unlock(queue))  # the broker may have given it
            raise
        if queue not in held:
            return False
        self._asked_s[queue] = asked_s
        return True

    async def _lock(self, queues: list[MessageQueue]) -> tuple[MessageQueue, ...]:
        """Queues of one broker -> those of them that we hold now."""
        command = requests.lock_queues(self._group, self._client_id, queues)
        return decode_locked_queues((await self._cluster.ask_master(queues[0], command)).body)

    async def release(self, queue: MessageQueue) -> None:
        """Give a queue back, so that another member can have it. A broker that is away forgets the
        lease by itself."""
        if self._asked_s.pop(queue, None) is not None:
            await self._unlock(queue)

    async def _unlock(self, queue: MessageQueue) -> None:
        with contextlib.suppress(SluiceError):
            command = requests.unlock_queues(self._group, self._client_id, [queue])
            await self._cluster.ask_master(queue, command)

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
        for queue in held - self._asked_s.keys():
            await self._unlock(queue)  # it was given back meanwhile, and locked again by us
        lost = []
        for queue in [queue for queue in queues if queue in self._asked_s]:
            age_s = asked_s - self._asked_s[queue]
            if queue in held and age_s < LEASE_S:
                was_held = self.is_held(queue)  # just before the answer, not when it was asked for
                self._asked_s[queue] = asked_s
                if not was_held:
                    self._on_held(queue)
            else:  # not ours, or ours again after a time in which another one may have had it
                del self._asked_s[queue]
                lost.append(queue)
        if lost:
            _log.warning(
                "group %s: the lock of %s%s is lost; its messages go to another member",
                self._group, lost[0], f" and of {len(lost) - 1} more queues" if lost[1:] else "",
            )  # fmt: skip
        for queue in lost:
            self._on_lost(queue)
        return True

    async def renew_forever(self) -> None:
        """Every 20 s; every second while a broker does not answer."""
        is_done = True
        while True:
            await asyncio.sleep(RENEW_S if is_done else RENEW_AGAIN_S)
            is_done = await self.renew()


class OrderedReader(QueueReader):
    """Reads one queue under its lease; `leases` None: nobody is kept out (broadcasting)."""

    def __init__(self, *reader: Any, leases: Leases | None) -> None:
        super().__init__(*reader)
        self.is_retiring: bool = False
        self._leases = leases
        self._quiet = asyncio.Event()

    @property
    def may_commit(self) -> bool:
        return self._leases is None or self._leases.is_held(self.queue)

    @property
    def may_hand_out(self) -> bool:
        return not self.is_retiring and self.may_commit

    def done(self, messages: list[ReceivedMessage]) -> int:
        counted = super().done(messages)
        self._released()
        return counted

    def returned(self, message: ReceivedMessage, *, failed: bool = False) -> None:
        super().returned(message, failed=failed)
        self._released()

    def _released(self) -> None:
        """The next message may leave when nothing is out."""
        if not self.out:
            self._quiet.set()
        self.feed.resume(self)

    async def reject(
        self, message: ReceivedMessage, delay_level: int | None, suspend_s: float | None
    ) -> bool:
        """It comes again before any other of its queue; when there were enough retries (or
        `delay_level` is -1) it becomes a dead letter. Never raises: what cannot be stored as a dead
        letter comes again here."""
        if not message.is_current:
            self.returned(message)
            return False
        rules = self._options.retry
        level = rules.delay_level if delay_level is None else delay_level
        times = retry_count(message.record) + message.attempt - 1
        times_max = ORDERED_RETRIES_MAX if rules.retries_max is None else rules.retries_max
        if level <= DEAD_LETTER_LEVEL or times >= times_max:
            if self._reading.send_back is None:
                _log.warning("%s is dropped: this consumer has no dead letters", message)
                return self.ack(message)
            try:
                await self._reading.send_back.send_copy(message.record, times, level)
            except SluiceError as error:
                self._cluster.directory.log_failure(
                    error, self.queue, f"dead letters of {self.group}",
                    "group %s: %s could not be stored as a dead letter, its queue waits: %s",
                    self.group, message, error,
                )  # fmt: skip
            else:
                return self.ack(message)
        message.attempt += 1
        self.feed.suspend(message, rules.suspend_s if suspend_s is None else suspend_s)
        self.returned(message, failed=True)
        return True

    async def finish(self) -> None:
        """Hands nothing out any more; returns when nothing is out."""
        self.is_retiring = True
        while self.out:
            self._quiet.clear()
            await self._quiet.wait()


class OrderedReaders(Readers):
    """The readers of a group that consumes in order."""

    def __init__(self, reading: Reading, client_id: str, on_change: Callable[[], None]) -> None:
        super().__init__(reading)
        self._on_change = on_change
        self._retiring: dict[MessageQueue, tuple[OrderedReader, asyncio.Task[None]]] = {}
        self._renewing: SupervisedTask | None = None
        self.leases: Leases | None = None

        def resume(queue: MessageQueue) -> None:
            if queue in self._readers:
                self._readers[queue].feed.resume(self._readers[queue])

        def lose(queue: MessageQueue) -> None:
            """Another client has the queue: neither hand out nor commit."""
            if queue in self._readers:
                reader = self._stop(queue)
                reader.drop(reader.in_flight.committable)
                self._retire(queue, reader, is_ours=False)
                self._on_change()

        if not reading.options.broadcast:
            self.leases = Leases(
                reading.cluster,
                client_id,
                reading.group,
                on_lost=lose,
                on_held=resume,
            )
        self._kind = partial(OrderedReader, leases=self.leases)

    async def add(
        self, queue: MessageQueue, subscription: Subscription, feed: Sink, *, is_new: bool = False
    ) -> bool:
        """Locks the queue, then starts where the group stands: whoever had it has committed."""
        leases = self.leases
        if queue in self._retiring:
            return False
        if leases is None:
            return await super().add(queue, subscription, feed, is_new=is_new)
        if not await leases.acquire(queue):
            return False
        if self._renewing is None:
            self._renewing = self._tasks.supervise(
                leases.renew_forever, f"sluicemq leases {self._group}"
            )
        try:
            return await super().add(queue, subscription, feed, is_new=is_new)
        except BaseException:
            await run_to_end(leases.release(queue))
            raise

    def _stop(self, queue: MessageQueue) -> OrderedReader:
        reader, task = self._readers.pop(queue), self._running.pop(queue)
        task.cancel()
        self._known[queue] = reader.identity, self._recreations[queue.topic]
        assert isinstance(reader, OrderedReader)
        return reader

    async def drop(self, queue: MessageQueue) -> None:
        """Stops reading; the lock goes when the message that is out is done and committed."""
        self._retire(queue, self._stop(queue), is_ours=True)
        await asyncio.sleep(0)

    def all(self) -> list[QueueReader]:
        """Also those that finish their last message: they commit afterwards."""
        return [*super().all(), *(reader for reader, _ in self._retiring.values())]

    def _retire(self, queue: MessageQueue, reader: OrderedReader, *, is_ours: bool) -> None:
        reader.is_retiring = True

        async def finish() -> None:
            await reader.finish()
            offset = reader.in_flight.committable
            reader.drop(offset)
            reader.feed.forget(reader)
            if is_ours:
                if self.options.auto_commit:
                    await self._commit(reader, offset)
                    await self._offsets.flush()
                if self.leases is not None:
                    await self.leases.release(queue)
                self._on_change()

        task = self._tasks.spawn(finish(), f"sluicemq finish {queue}")
        self._retiring[queue] = reader, task
        task.add_done_callback(lambda _: self._retiring.pop(queue, None))

    async def close(self) -> None:
        """Finishes every queue. One whose handler does not end in time is committed as it is and
        keeps its lock until that expires, so that nobody reads beside the handler."""
        for queue in list(self._readers):
            self._retire(queue, self._stop(queue), is_ours=True)
        try:
            if self._retiring:
                await asyncio.wait([task for _, task in self._retiring.values()], timeout=FINISH_S)
            for reader, _ in tuple(self._retiring.values()):
                if self.options.auto_commit:
                    await self._commit(reader, reader.in_flight.committable)
        finally:
            await run_to_end(self._close_files())
