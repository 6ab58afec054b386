"""Consume in order: one message of a queue at a time, by the one client that has its queue lock.

    broker  --LOCK_BATCH_MQ (41)-->  QueueLocks
                                     which queues this client may read
                                     OrderedReaders
                                     lock a queue, find its start offset, read it; at the end
                                     wait for its handler, commit, unlock

`OrderedPrefetchBuffer` hands out one message of each queue at a time. A message whose handler fails
is the next one of its queue again, after a pause.

A broker gives a queue of a group to one client for a lease of 60 seconds. This client renews its
leases every 20 seconds. It hands out no messages of a queue if it requested the last confirmed
lease more than 30 seconds ago, so whichever clock is used, no other client can have the queue
before this one has stopped. If the broker refuses a lease, the queue is lost. If the broker does
not respond, the client asks again every second.

When a lease is lost, its queue stops at once: no more messages are handed out and no offset is
committed. This client reads the queue again only after the running handler has ended.
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
"""How many seconds closing waits for handlers that still run."""
LEASE_S: Final = 60.0
"""How many seconds a broker keeps a queue for its client (spec/remoting.md §15)."""
TRUSTED_S: Final = 30.0
"""How many seconds after its request a lease is trusted."""
RENEW_PERIOD_S: Final = 20.0
"""The interval in seconds at which leases are renewed."""
RENEW_RETRY_S: Final = 1.0
"""The interval in seconds at which leases are renewed while a broker does not respond."""


class QueueLocks:
    """The queue locks of one group in this client.

    `on_lost(queue)` is called when another client has the queue, or may have had it.
    `on_confirmed(queue)` is called when the broker confirms a lease that had not been trusted any
    more.
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
        """Begin without locks.

        `on_lost(queue)` is called when another client may have the lock of a queue.
        `on_confirmed(queue)` is called when the broker confirms a lock that was not confirmed in
        time.
        """
        self._cluster = cluster
        self._client_id = client_id
        self._group = group
        self._on_lost = on_lost
        self._on_confirmed = on_confirmed
        self._requested_s_by_queue: dict[MessageQueue, float] = {}
        """When the last confirmed lease of each locked queue was requested, in monotonic seconds.

        A queue whose lease is lost or released is not in it.
        """

    def is_held(self, queue: MessageQueue) -> bool:
        """Return whether messages of the queue may be handed out now."""
        requested_s = self._requested_s_by_queue.get(queue)
        return requested_s is not None and self._now_s() - requested_s < TRUSTED_S

    def _now_s(self) -> float:
        """Return the time in monotonic seconds."""
        return self._cluster.clock.monotonic_s()

    async def acquire(self, queue: MessageQueue) -> bool:
        """Ask the broker for the lock of a queue, and return whether this client has it now.

        False means that another client has it. Raises SluiceError if the request fails. If the
        caller is cancelled, the queue is unlocked again.
        """
        requested_s = self._now_s()
        try:
            granted_queues = await self._lock([queue])
        except asyncio.CancelledError:
            await run_to_end(self._unlock(queue))  # the broker may have granted it
            raise
        if queue not in granted_queues:
            return False
        self._requested_s_by_queue[queue] = requested_s
        return True

    async def _lock(self, queues: list[MessageQueue]) -> tuple[MessageQueue, ...]:
        """Request leases of queues of one broker, and return those queues that were granted."""
        command = requests.lock_queues(self._group, self._client_id, queues)
        return decode_locked_queues((await self._cluster.ask_master(queues[0], command)).body)

    async def release(self, queue: MessageQueue) -> None:
        """Unlock a queue, so that another member can have it.

        If the broker does not respond, the lease expires by itself.
        """
        if self._requested_s_by_queue.pop(queue, None) is not None:
            await self._unlock(queue)

    async def _unlock(self, queue: MessageQueue) -> None:
        """Send the request to unlock a queue, and ignore errors."""
        with contextlib.suppress(SluiceError):
            command = requests.unlock_queues(self._group, self._client_id, [queue])
            await self._cluster.ask_master(queue, command)

    async def renew(self) -> bool:
        """Renew the locks of all queues, and return whether every broker has responded.

        A lock is a lease, which the broker ends after some time. If a broker refuses to renew it,
        it is lost: `on_lost` is called, and the queue is not locked any more. If a broker does not
        respond, the lock is kept, but is not relied on after `TRUSTED_S` seconds.
        """
        queues_by_broker: dict[str, list[MessageQueue]] = {}
        for queue in self._requested_s_by_queue:
            queues_by_broker.setdefault(queue.broker, []).append(queue)
        have_responded = await asyncio.gather(
            *(self._renew(broker, queues) for broker, queues in queues_by_broker.items())
        )
        return all(have_responded)

    async def _renew(self, broker: str, locked_queues: Iterable[MessageQueue]) -> bool:
        """Renew the locks of queues of one broker, and return whether the broker has responded.

        `locked_queues` are these queues. A lock is lost if the broker refuses it. It is also lost
        if more than `LEASE_S` seconds have passed since the last request, because another client
        may have had it. `on_lost` is called for each lost queue, and `on_confirmed` for each queue
        that may be read again.
        """
        queues = sorted(locked_queues)
        requested_s = self._now_s()
        try:
            granted_queues = set(await self._lock(queues))
        except SluiceError as error:
            _log.debug(
                "the leases of group %s at %s were not renewed: %s", self._group, broker, error
            )
            return False

        # A queue that was released meanwhile was locked again by this request.
        for queue in granted_queues - self._requested_s_by_queue.keys():
            await self._unlock(queue)

        lost_queues = []
        for queue in [queue for queue in queues if queue in self._requested_s_by_queue]:
            age_s = requested_s - self._requested_s_by_queue[queue]
            if queue in granted_queues and age_s < LEASE_S:
                was_held = self.is_held(queue)  # as of now, not as of the request
                self._requested_s_by_queue[queue] = requested_s
                if not was_held:
                    self._on_confirmed(queue)
            else:  # refused, or granted after a gap in which another client may have had it
                del self._requested_s_by_queue[queue]
                lost_queues.append(queue)
        if lost_queues:
            self._report_lost(lost_queues)
        return True

    def _report_lost(self, lost_queues: list[MessageQueue]) -> None:
        """Log that the locks of these queues are lost, and call `on_lost` for each of them."""
        further_count = len(lost_queues) - 1
        further_text = f" and of {further_count} more queues" if further_count else ""
        _log.warning(
            "group %s: the lock of %s%s is lost; its messages go to another member",
            self._group,
            lost_queues[0],
            further_text,
        )
        for queue in lost_queues:
            self._on_lost(queue)

    async def renew_forever(self) -> None:
        """Renew all locks in a loop until the task is cancelled.

        The interval is `RENEW_PERIOD_S` seconds, or `RENEW_RETRY_S` while a broker does not
        respond.
        """
        is_renewed = True
        while True:
            await asyncio.sleep(RENEW_PERIOD_S if is_renewed else RENEW_RETRY_S)
            is_renewed = await self.renew()


class OrderedReader(QueueReader):
    """Reads one queue under its queue lock.

    `locks` None means that other clients read the queue as well (a broadcasting group).
    `is_retiring` says that the reader hands out no more messages.
    """

    def __init__(self, *arguments: Any, locks: QueueLocks | None) -> None:
        """Create a reader that hands out one message of its queue at a time.

        `arguments` are those of `QueueReader`. `locks` has the lock of the queue; None means that
        no lock is needed.
        """
        super().__init__(*arguments)
        self.is_retiring: bool = False
        self._locks = locks
        self._all_returned = asyncio.Event()
        """Set when no message of the queue is handed out."""

    @property
    def may_commit(self) -> bool:
        """Whether acknowledgements may be committed now: this client holds the queue lock."""
        return self._locks is None or self._locks.is_held(self.queue)

    @property
    def may_hand_out(self) -> bool:
        """Whether messages may be handed out now.

        That requires the queue lock, and a reader that is not retiring.
        """
        return not self.is_retiring and self.may_commit

    def ack_many(self, messages: list[ReceivedMessage]) -> int:
        """Acknowledge messages, and let a consumer take the next message of the queue."""
        acknowledged_count = super().ack_many(messages)
        self._offer_next()
        return acknowledged_count

    def mark_returned(self, message: ReceivedMessage, *, failed: bool = False) -> None:
        """Record that the application has returned a message.

        Then a consumer may take the next message of the queue.
        """
        super().mark_returned(message, failed=failed)
        self._offer_next()

    def _offer_next(self) -> None:
        """Let a consumer take the next message of the queue, unless one is handed out."""
        if not self.handed_out:
            self._all_returned.set()
        self.buffer.offer_next(self)

    async def reject(
        self, message: ReceivedMessage, delay_level: int | None, suspend_s: float | None
    ) -> bool:
        """Hand out the message again after `suspend_s` seconds, before any other one of its queue.

        A message is stored as a dead letter instead, and acknowledged, if it was retried as often
        as the group allows, or if `delay_level` is -1. None as `suspend_s` or `delay_level` means
        the option of the group. A message that cannot be stored as a dead letter is retried.

        Returns False if the queue is not this client's any more, so that the message is not handed
        out again here. Never raises.
        """
        if not message.is_current:
            self.mark_returned(message)
            return False
        retry_options = self._options.retry
        if delay_level is None:
            delay_level = retry_options.delay_level
        if suspend_s is None:
            suspend_s = retry_options.suspend_s
        retries_max = retry_options.retries_max
        if retries_max is None:
            retries_max = ORDERED_RETRIES_MAX

        # Retries at the broker, before this client received the message, and in this client.
        retries_done = retry_count(message.record) + message.attempt - 1
        is_dead_letter = delay_level <= DEAD_LETTER_LEVEL or retries_done >= retries_max
        if is_dead_letter and await self._send_as_dead_letter(message, retries_done, delay_level):
            return self.ack(message)

        # Put the message back before it is marked as returned: that offers the next message of the
        # queue, which must be this one.
        message.attempt += 1
        self.buffer.put_back_later(message, suspend_s)
        self.mark_returned(message, failed=True)
        return True

    async def _send_as_dead_letter(
        self, message: ReceivedMessage, retries_done: int, delay_level: int
    ) -> bool:
        """Store a rejected message as a dead letter; return whether it may be acknowledged now.

        A broadcasting group has no dead letters, so the message is dropped, which is logged, and
        the result is True. If the request fails, that is logged and the result is False.
        """
        retry_sender = self._context.retry_sender
        if retry_sender is None:
            _log.warning("%s is dropped: this consumer has no dead letters", message)
            return True
        try:
            await retry_sender.send_retry_message(message.record, retries_done, delay_level)
        except SluiceError as error:
            self._cluster.directory.log_failure(
                error,
                self.queue,
                f"dead letters of {self.group}",
                "group %s: %s could not be stored as a dead letter and blocks its queue: %s",
                self.group,
                message,
                error,
            )
            return False
        return True

    async def wait_until_returned(self) -> None:
        """Hand out no further message, and wait until no handler has a message of the queue."""
        self.is_retiring = True
        while self.handed_out:
            self._all_returned.clear()
            await self._all_returned.wait()


class OrderedReaders(Readers):
    """The readers of a group that consumes in order."""

    def __init__(
        self, context: ReaderContext, client_id: str, on_change: Callable[[], None]
    ) -> None:
        """Create the readers of a client's queues; it has none yet.

        `context` is what all readers of the group share. `on_change()` is called when the client
        has lost a queue, or has finished a queue that goes to another member.
        """
        super().__init__(context)
        self._on_change = on_change
        self._retiring: dict[MessageQueue, tuple[OrderedReader, asyncio.Task[None]]] = {}
        """Maps a queue that is not read any more to (its reader, the task that finishes it)."""
        self._renewal: SupervisedTask | None = None
        self.locks: QueueLocks | None = None
        """The queue locks, None in a broadcasting group."""

        if not context.options.broadcast:
            self.locks = QueueLocks(
                context.cluster,
                client_id,
                context.group,
                on_lost=self._stop_lost,
                on_confirmed=self._offer_next,
            )
        self._make_reader = partial(OrderedReader, locks=self.locks)

    def _offer_next(self, queue: MessageQueue) -> None:
        """Let a consumer take the next message of a queue."""
        if queue in self._readers:
            self._readers[queue].buffer.offer_next(self._readers[queue])

    def _stop_lost(self, queue: MessageQueue) -> None:
        """Stop reading a queue whose lock is lost; hand out and commit nothing more of it."""
        if queue in self._readers:
            reader = self._stop_reader(queue)
            reader.discard_pulled(reader.in_flight.committable)
            self._retire(queue, reader, owns_lock=False)
            self._on_change()

    async def add(
        self,
        queue: MessageQueue,
        subscription: Subscription,
        buffer: MessageBuffer,
        *,
        is_new: bool = False,
    ) -> bool:
        """Lock a queue, start to read it, and return whether that was possible.

        It is not possible while another client has the lock, or while this client still processes
        messages of the queue that it read before. The start offset is requested after locking,
        because the previous owner commits before it unlocks. Raises SluiceError if a request fails;
        the queue is then not locked.
        """
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
        """Stop pulling from a queue, remove its reader from all tables, and return it.

        The messages by which the queue is recognised are kept for a later reader of it.
        """
        reader = self._readers.pop(queue)
        task = self._reader_tasks.pop(queue)
        task.cancel()
        # If this client reads the queue again, it recognises the queue by these.
        self._past_identities[queue] = (reader.identity, self._recreation_counts[queue.topic])
        assert isinstance(reader, OrderedReader)
        return reader

    async def remove(self, queue: MessageQueue) -> None:
        """Stop reading a queue.

        Unlock it when its running handler has ended and the offset is committed.
        """
        self._retire(queue, self._stop_reader(queue), owns_lock=True)
        await asyncio.sleep(0)

    def all_readers(self) -> list[QueueReader]:
        """Return every reader that may still commit offsets.

        That includes readers of removed queues whose handler still runs.
        """
        return [*super().all_readers(), *(reader for reader, _ in self._retiring.values())]

    def _retire(self, queue: MessageQueue, reader: OrderedReader, *, owns_lock: bool) -> None:
        """Start a task that waits for the handler of a queue, and then unlocks the queue.

        `reader` was stopped before, and hands out no more messages. When its handler has ended, its
        messages are removed from the buffer. If this client still owns the lock, the task then
        commits the offset, unlocks the queue and calls `on_change`.
        """
        reader.is_retiring = True

        async def finish() -> None:
            """Wait for the handler, commit its offset and then unlock the queue."""
            # The member that locks the queue next begins at the committed offset.
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
        """Stop reading all queues, and wait up to `HANDLER_WAIT_S` seconds for their handlers.

        Then the offsets are committed, also of queues whose handler still runs. Such a queue stays
        locked until the lease ends, so that no other client processes its messages at the same
        time.
        """
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
