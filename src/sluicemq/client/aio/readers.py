"""The readers of one group in this process: starting, stopping, committing their offsets."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.reader import QueueReader
from sluicemq.client.aio.received import Sink
from sluicemq.client.aio.sendback import SendBack
from sluicemq.client.aio.tasks import Tasks
from sluicemq.client.core import requests
from sluicemq.client.core.answers import QUERY_NOT_FOUND, expect_success, number
from sluicemq.client.core.consuming import ConsumeOptions
from sluicemq.errors import GroupNotFoundError, SluiceError
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import RETRY_PREFIX, MessageQueue

_log = logging.getLogger("sluicemq.client")


class Readers:
    """Which queues are read here, from where, and up to where they are committed."""

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        options: ConsumeOptions,
        *,
        on_pending: Callable[[], None] = lambda: None,
        filtered_here: bool = False,
        send_back: SendBack | None = None,
    ) -> None:
        self.options = options
        self._cluster = cluster
        self._group = group
        self._on_pending = on_pending
        self._filtered_here = filtered_here
        self._send_back = send_back
        self._readers: dict[MessageQueue, QueueReader] = {}
        self._running: dict[MessageQueue, asyncio.Task[None]] = {}
        self._tasks = Tasks()

    @property
    def queues(self) -> set[MessageQueue]:
        """The queues read here now."""
        return set(self._readers)

    def get(self, queue: MessageQueue) -> QueueReader | None:
        """The reader of a queue, None when it is not read here."""
        return self._readers.get(queue)

    async def add(
        self, queue: MessageQueue, subscription: Subscription, feed: Sink, *, is_new: bool = False
    ) -> bool:
        """Starts reading where the group stands; `is_new`: a queue that appeared after the
        start. False when somebody else must finish with it first."""
        position, committed = await self.start_offset(queue, is_new=is_new)
        if queue in self._readers:
            return True
        reader = self._make(queue, subscription, position, committed, feed)
        self._readers[queue] = reader
        if committed is None and self.options.auto_commit:
            # Said at once: a crash before the first commit must not move a group that began at
            # "last" past what came meanwhile.
            await self._commit(reader, position)
        self._running[queue] = self._tasks.spawn(reader.run(), f"sluicemq read {queue}")
        return True

    def _make(
        self,
        queue: MessageQueue,
        subscription: Subscription,
        position: int,
        committed: int | None,
        feed: Sink,
    ) -> QueueReader:
        return QueueReader(
            self._cluster,
            self._group,
            queue,
            subscription,
            position,
            options=self.options,
            feed=feed,
            on_pending=self._on_pending,
            filtered_here=self._filtered_here,
            committed=committed,
            send_back=self._send_back,
        )

    async def start_offset(
        self, queue: MessageQueue, *, is_new: bool = False
    ) -> tuple[int, int | None]:
        """(where to begin, the committed offset or None)."""
        address = await self._cluster.address(queue)
        answer = await self._cluster.call(address, requests.offset_of_group(self._group, queue))
        if answer.code != QUERY_NOT_FOUND:
            committed = number(expect_success(answer, address), "offset")
            if committed >= 0:
                return committed, committed
        command = requests.offset_min(queue)
        start_ms = self.options.start_ms
        if not is_new and not queue.topic.startswith(RETRY_PREFIX):
            if start_ms is not None:
                command = requests.offset_by_time(queue, start_ms)
            elif self.options.start == "last":
                command = requests.offset_max(queue)
        return number(await self._cluster.ask(queue, command), "offset"), None

    async def drop(self, queue: MessageQueue) -> None:
        """Stops reading a queue and commits how far it got."""
        reader, task = self._readers.pop(queue), self._running.pop(queue)
        task.cancel()
        offset = reader.in_flight.committable
        reader.drop()
        if self.options.auto_commit:
            await self._commit(reader, offset)

    async def commit(self) -> None:
        """Commits every queue whose offset moved; failures are logged and tried again later.

        One after the other on each broker: the Java broker can lose one of two commits of a new
        group that arrive at the same time (it looks for the group's table and makes one).
        """
        by_broker: dict[str, list[QueueReader]] = {}
        for reader in self._readers.values():
            by_broker.setdefault(reader.queue.broker, []).append(reader)
        await asyncio.gather(*map(self._commit_in_turn, by_broker.values()))

    async def _commit_in_turn(self, readers: list[QueueReader]) -> None:
        for reader in readers:
            await self._commit(reader, reader.in_flight.committable)

    async def _commit(self, reader: QueueReader, offset: int) -> None:
        if offset == reader.committed or not reader.may_commit:
            return
        try:
            await self._cluster.ask(
                reader.queue, requests.commit_offset(self._group, reader.queue, offset)
            )
            reader.committed = offset
        except GroupNotFoundError as error:
            _log.debug("commit for %s: %s", self._group, error)  # its pulls will say it aloud
        except SluiceError as error:
            _log.warning(
                "commit of offset %d of %s for %s failed: %s",
                offset,
                reader.queue,
                self._group,
                error,
            )

    async def commit_forever(self) -> None:
        """Commits every `commit_period_s`."""
        while True:
            await asyncio.sleep(self.options.commit_period_s)
            await self.commit()

    async def close(self) -> None:
        """Stops all readers; their offsets are committed (when that is automatic)."""
        for task in self._running.values():
            task.cancel()
        with contextlib.suppress(SluiceError):
            for queue in list(self._readers):
                await self.drop(queue)
        await self._tasks.close()
