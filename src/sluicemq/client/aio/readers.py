"""The readers of one group in this process: starting, stopping, committing their offsets."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.offsets import BrokerOffsets, GroupOffsets
from sluicemq.client.aio.reader import QueueReader
from sluicemq.client.aio.received import Sink
from sluicemq.client.aio.sendback import SendBack
from sluicemq.client.aio.tasks import Tasks
from sluicemq.client.core import requests
from sluicemq.client.core.activity import Counts
from sluicemq.client.core.answers import number
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
        self._offsets: GroupOffsets = (
            cluster.offset_files.of(group) if options.broadcast else BrokerOffsets(cluster, group)
        )
        self.expected: dict[str, int] = {}
        """How many queues of a topic will be read here: their limits are shared out by it."""
        self._readers: dict[MessageQueue, QueueReader] = {}
        self._running: dict[MessageQueue, asyncio.Task[None]] = {}
        self.counts: dict[str, Counts] = {}
        """What was done lately, by topic."""
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
        reader.counts = self.counts.setdefault(queue.topic, Counts())
        self._readers[queue] = reader
        self._share_limits(queue.topic)
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

    def _share_limits(self, topic: str) -> None:
        """What a topic may hold is shared by those of its queues that are read here."""
        readers = [reader for queue, reader in self._readers.items() if queue.topic == topic]
        for reader in readers:
            reader.limit(*self.options.limits(max(len(readers), self.expected.get(topic, 0))))

    @contextlib.contextmanager
    def held(self, topic: str) -> Iterator[None]:
        """The readers of a topic begin no pull."""
        readers = [reader for queue, reader in self._readers.items() if queue.topic == topic]
        for reader in readers:
            reader.hold(is_held=True)
        try:
            yield
        finally:
            for reader in readers:
                reader.hold(is_held=False)

    def change(self, subscription: Subscription) -> None:
        """The queues of a topic are read with another expression from now on."""
        for queue, reader in self._readers.items():
            if queue.topic == subscription.topic and reader.subscription != subscription:
                reader.change(subscription)

    async def start_offset(
        self, queue: MessageQueue, *, is_new: bool = False
    ) -> tuple[int, int | None]:
        """(where to begin, the committed offset or None)."""
        committed = await self._offsets.read(queue)
        if committed is not None:
            return committed, committed
        if self.options.young_from_first:
            young = await self._offsets.read(queue, zero_if_young=True)
            if young is not None:
                return young, None
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
        self._share_limits(queue.topic)
        if self.options.auto_commit:
            await self._commit(reader, offset)
            await self._offsets.flush()

    async def reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        """An operator sends the group to other places (220): the queues that are read here go on
        there, and say so to the broker. What was pulled before does not count any more; commits of
        it that are under way arrive before the new ones, on the same connection."""
        for reader in self._moved_by_reset(offsets):
            _log.warning(
                "group %s was reset on %s from offset %d to %d",
                self._group, reader.queue, reader.in_flight.position, offsets[reader.queue],
            )  # fmt: skip
            reader.move(offsets[reader.queue])
            reader.committed = None
        await self.commit()

    def _moved_by_reset(self, queues: Iterable[MessageQueue]) -> list[QueueReader]:
        return [self._readers[queue] for queue in queues if queue in self._readers]

    async def commit(self, *, must_succeed: bool = False) -> None:
        """Commits every queue whose offset moved; failures are logged and tried again later, with
        `must_succeed` the first one is raised as well (SluiceError).

        One after the other on each broker: the Java broker can lose one of two commits of a new
        group that arrive at the same time (it looks for the group's table and makes one).
        """
        by_broker: dict[str, list[QueueReader]] = {}
        for reader in self._readers.values():
            if reader.in_flight.committable != reader.committed:
                by_broker.setdefault(reader.queue.broker, []).append(reader)
        errors: list[SluiceError] = []
        if by_broker:
            found = await asyncio.gather(*map(self._commit_in_turn, by_broker.values()))
            errors = [error for some in found for error in some]
        await self._offsets.flush()
        if errors and must_succeed:
            raise errors[0]

    async def put_offsets(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Commits what the caller says. Raises SluiceError."""
        for queue, offset in sorted(offsets.items()):
            await self._offsets.write(queue, offset)
            reader = self._readers.get(queue)
            if reader is not None:
                reader.committed = offset
        await self._offsets.flush()

    async def _commit_in_turn(self, readers: list[QueueReader]) -> list[SluiceError]:
        found = [await self._commit(reader, reader.in_flight.committable) for reader in readers]
        return [error for error in found if error is not None]

    async def _commit(self, reader: QueueReader, offset: int) -> SluiceError | None:
        """What went wrong, which is logged."""
        if offset == reader.committed or not reader.may_commit:
            return None
        try:
            await self._offsets.write(reader.queue, offset)
            reader.committed = offset
        except GroupNotFoundError as error:
            _log.debug("commit for %s: %s", self._group, error)  # its pulls will say it aloud
            return error
        except SluiceError as error:
            _log.warning(
                "commit of offset %d of %s for %s failed: %s",
                offset,
                reader.queue,
                self._group,
                error,
            )
            return error
        return None

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
        await self._offsets.close()
