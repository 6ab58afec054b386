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
from sluicemq.client.aio.queue_reader import MessageBuffer, QueueReader, ReaderContext
from sluicemq.client.aio.readers import Readers
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
HANDLER_WAIT_S: Final = 5.0
"""How long closing waits for a handler that still runs."""
LEASE_S: Final = 60.0
"""How long a broker keeps a queue for its client (spec/remoting.md §15)."""
TRUSTED_S: Final = 30.0
RENEW_PERIOD_S: Final = 20.0
RENEW_RETRY_S: Final = 1.0


class QueueLocks:
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
        on_confirmed: Callable[[MessageQueue], None],
    ) -> None:
        self._cluster = cluster
        self._client_id = client_id
        self._group = group
        self._on_lost = on_lost
        self._on_confirmed = on_confirmed
        self._requested_s: dict[MessageQueue, float] = {}

    def is_held(self, queue: MessageQueue) -> bool:
        """May messages of the queue be handed out now?"""
        requested_s = self._requested_s.get(queue)
        return requested_s is not None and self._now_s() - requested_s < TRUSTED_S

    def _now_s(self) -> float:
        return self._cluster.clock.monotonic_s()

    async def acquire(self, queue: MessageQueue) -> bool:
        """Takes a queue; False when another client has it. Raises SluiceError."""
        requested_s = self._now_s()
        try:
            held = await self._lock([queue])
        except asyncio.CancelledError:
            await run_to_end(self._unlock(queue))  # the broker may have given it
            raise
        if queue not in held:
            return False
        self._requested_s[queue] = requested_s
        return True

    async def _lock(self, queues: list[MessageQueue]) -> tuple[MessageQueue, ...]:
        """Queues of one broker -> those of them that we hold now."""
        command = requests.lock_queues(self._group, self._client_id, queues)
        return decode_locked_queues((await self._cluster.ask_master(queues[0], command)).body)

    async def release(self, queue: MessageQueue) -> None:
        """Give a queue back, so that another member can have it. A broker that is away forgets the
        lease by itself."""
        if self._requested_s.pop(queue, None) is not None:
            await self._unlock(queue)

    async def _unlock(self, queue: MessageQueue) -> None:
        with contextlib.suppress(SluiceError):
            command = requests.unlock_queues(self._group, self._client_id, [queue])
            await self._cluster.ask_master(queue, command)

    async def renew(self) -> bool:
        """Asks for all of them again; False when a broker did not answer."""
        by_broker: dict[str, list[MessageQueue]] = {}
        for queue in self._requested_s:
            by_broker.setdefault(queue.broker, []).append(queue)
        outcomes = await asyncio.gather(*map(self._renew, by_broker.items()))
        return all(outcomes)

    async def _renew(self, item: tuple[str, Iterable[MessageQueue]]) -> bool:
        broker, queues = item[0], sorted(item[1])
        requested_s = self._now_s()
        try:
            held = set(await self._lock(queues))
        except SluiceError as error:
            _log.debug("leases of %s at %s are not renewed: %s", self._group, broker, error)
            return False
        for queue in held - self._requested_s.keys():
            await self._unlock(queue)  # it was given back meanwhile, and locked again by us
        lost = []
        for queue in [queue for queue in queues if queue in self._requested_s]:
            age_s = requested_s - self._requested_s[queue]
            if queue in held and age_s < LEASE_S:
                was_held = self.is_held(queue)  # just before the answer, not when it was asked for
                self._requested_s[queue] = requested_s
                if not was_held:
                    self._on_confirmed(queue)
            else:  # not ours, or ours again after a time in which another one may have had it
                del self._requested_s[queue]
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
            await asyncio.sleep(RENEW_PERIOD_S if is_done else RENEW_RETRY_S)
            is_done = await self.renew()


class OrderedReader(QueueReader):
    """Reads one queue under its lease; `leases` None: nobody is kept out (broadcasting)."""

    def __init__(self, *reader: Any, locks: QueueLocks | None) -> None:
        super().__init__(*reader)
        self.is_retiring: bool = False
        self._locks = locks
        self._all_returned = asyncio.Event()

    @property
    def may_commit(self) -> bool:
        return self._locks is None or self._locks.is_held(self.queue)

    @property
    def may_hand_out(self) -> bool:
        return not self.is_retiring and self.may_commit

    def ack_many(self, messages: list[ReceivedMessage]) -> int:
        counted = super().ack_many(messages)
        self._offer_next()
        return counted

    def mark_returned(self, message: ReceivedMessage, *, failed: bool = False) -> None:
        super().mark_returned(message, failed=failed)
        self._offer_next()

    def _offer_next(self) -> None:
        """The next message may leave when nothing is out."""
        if not self.handed_out:
            self._all_returned.set()
        self.buffer.offer_next(self)

    async def reject(
        self, message: ReceivedMessage, delay_level: int | None, suspend_s: float | None
    ) -> bool:
        """It comes again before any other of its queue; when there were enough retries (or
        `delay_level` is -1) it becomes a dead letter. Never raises: what cannot be stored as a dead
        letter comes again here."""
        if not message.is_current:
            self.mark_returned(message)
            return False
        rules = self._options.retry
        level = rules.delay_level if delay_level is None else delay_level
        times = retry_count(message.record) + message.attempt - 1
        times_max = ORDERED_RETRIES_MAX if rules.retries_max is None else rules.retries_max
        if level <= DEAD_LETTER_LEVEL or times >= times_max:
            if self._context.retry_sender is None:
                _log.warning("%s is dropped: this consumer has no dead letters", message)
                return self.ack(message)
            try:
                await self._context.retry_sender.send_retry_message(message.record, times, level)
            except SluiceError as error:
                self._cluster.directory.log_failure(
                    error, self.queue, f"dead letters of {self.group}",
                    "group %s: %s could not be stored as a dead letter, its queue waits: %s",
                    self.group, message, error,
                )  # fmt: skip
            else:
                return self.ack(message)
        message.attempt += 1
        self.buffer.put_back_later(message, rules.suspend_s if suspend_s is None else suspend_s)
        self.mark_returned(message, failed=True)
        return True

    async def wait_until_returned(self) -> None:
        """Hands nothing out any more; returns when nothing is out."""
        self.is_retiring = True
        while self.handed_out:
            self._all_returned.clear()
            await self._all_returned.wait()


class OrderedReaders(Readers):
    """The readers of a group that consumes in order."""

    def __init__(
        self, context: ReaderContext, client_id: str, on_change: Callable[[], None]
    ) -> None:
        super().__init__(context)
        self._on_change = on_change
        self._retiring: dict[MessageQueue, tuple[OrderedReader, asyncio.Task[None]]] = {}
        self._renewal: SupervisedTask | None = None
        self.locks: QueueLocks | None = None

        def resume(queue: MessageQueue) -> None:
            if queue in self._readers:
                self._readers[queue].buffer.offer_next(self._readers[queue])

        def lose(queue: MessageQueue) -> None:
            """Another client has the queue: neither hand out nor commit."""
            if queue in self._readers:
                reader = self._stop_reader(queue)
                reader.discard_pulled(reader.in_flight.committable)
                self._retire(queue, reader, owns_lock=False)
                self._on_change()

        if not context.options.broadcast:
            self.locks = QueueLocks(
                context.cluster,
                client_id,
                context.group,
                on_lost=lose,
                on_confirmed=resume,
            )
        self._make_reader = partial(OrderedReader, locks=self.locks)

    async def add(
        self,
        queue: MessageQueue,
        subscription: Subscription,
        buffer: MessageBuffer,
        *,
        is_new: bool = False,
    ) -> bool:
        """Locks the queue, then starts where the group stands: whoever had it has committed."""
        locks = self.locks
        if queue in self._retiring:
            return False
        if locks is None:
            return await super().add(queue, subscription, buffer, is_new=is_new)
        if not await locks.acquire(queue):
            return False
        if self._renewal is None:
            self._renewal = self._tasks.supervise(
                locks.renew_forever, f"sluicemq leases {self._group}"
            )
        try:
            return await super().add(queue, subscription, buffer, is_new=is_new)
        except BaseException:
            await run_to_end(locks.release(queue))
            raise

    def _stop_reader(self, queue: MessageQueue) -> OrderedReader:
        reader, task = self._readers.pop(queue), self._reader_tasks.pop(queue)
        task.cancel()
        self._past_identities[queue] = reader.identity, self._recreation_counts[queue.topic]
        assert isinstance(reader, OrderedReader)
        return reader

    async def remove(self, queue: MessageQueue) -> None:
        """Stops reading; the lock goes when the message that is out is done and committed."""
        self._retire(queue, self._stop_reader(queue), owns_lock=True)
        await asyncio.sleep(0)

    def all_readers(self) -> list[QueueReader]:
        """Also those that finish their last message: they commit afterwards."""
        return [*super().all_readers(), *(reader for reader, _ in self._retiring.values())]

    def _retire(self, queue: MessageQueue, reader: OrderedReader, *, owns_lock: bool) -> None:
        reader.is_retiring = True

        async def finish() -> None:
            await reader.wait_until_returned()
            offset = reader.in_flight.committable
            reader.discard_pulled(offset)
            reader.buffer.remove_origin(reader)
            if owns_lock:
                if self.options.auto_commit:
                    await self._commit(reader, offset)
                    await self._offsets.flush()
                if self.locks is not None:
                    await self.locks.release(queue)
                self._on_change()

        task = self._tasks.spawn(finish(), f"sluicemq finish {queue}")
        self._retiring[queue] = reader, task
        task.add_done_callback(lambda _: self._retiring.pop(queue, None))

    async def close(self) -> None:
        """Finishes every queue. One whose handler does not end in time is committed as it is and
        keeps its lock until that expires, so that nobody reads beside the handler."""
        for queue in list(self._readers):
            self._retire(queue, self._stop_reader(queue), owns_lock=True)
        try:
            if self._retiring:
                await asyncio.wait(
                    [task for _, task in self._retiring.values()], timeout=HANDLER_WAIT_S
                )
            for reader, _ in tuple(self._retiring.values()):
                if self.options.auto_commit:
                    await self._commit(reader, reader.in_flight.committable)
        finally:
            await run_to_end(self._close_files())
