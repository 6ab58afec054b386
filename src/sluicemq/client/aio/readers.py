"""The readers of a group in this client: which queues it reads, and the commits of their offsets.

`Readers` has one `QueueReader` for each queue that this client reads for the group, and runs each
as a supervised task. `Member` adds and removes queues by the group's allocation; a
`LitePullConsumer` with assigned queues does it by itself.

A reader begins at the committed offset of the group. Without one, `ConsumeOptions.start` decides.
Offsets are committed every `commit_period_s` seconds, when a queue is removed, and at close.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from sluicemq.client.aio.offsets import BrokerOffsets, GroupOffsets
from sluicemq.client.aio.queue_reader import MessageBuffer, QueueReader, ReaderContext
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.core.consuming import (
    ConsumeOptions,
    TopicConsumeStats,
)
from sluicemq.client.core.identity import QueueIdentity
from sluicemq.client.tasks import SupervisedTask, Tasks, run_to_end
from sluicemq.errors import (
    GroupNotFoundError,
    SluiceError,
)
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import RETRY_PREFIX, MessageQueue

_log = logging.getLogger("sluicemq.client")


class Readers:
    """The readers of one group in this client."""

    def __init__(self, context: ReaderContext) -> None:
        """Begin without queues. `context` is what all readers of the group share."""
        self.options: ConsumeOptions = context.options
        self._make_reader: Callable[..., QueueReader] = QueueReader
        self._context = context
        self._cluster = cluster = context.cluster
        self._group = context.group
        self._offsets: GroupOffsets
        if context.options.broadcast:
            self._offsets = cluster.offset_files.for_group(context.group)
        else:
            self._offsets = BrokerOffsets(cluster, context.group)
        self.expected_queue_counts: dict[str, int] = {}
        """Maps a topic to the number of its queues that will be read here.

        The prefetch limits of a topic are divided by it, even before all its readers are started.
        """
        self._recreation_counts: Counter[str] = Counter()
        """Maps a topic to the number of times it was found to be deleted and created again."""
        self._past_identities: dict[MessageQueue, tuple[QueueIdentity, int]] = {}
        """Maps a queue that was read here before to (identity, recreation count of its topic then).
        """
        self._readers: dict[MessageQueue, QueueReader] = {}
        self._reader_tasks: dict[MessageQueue, SupervisedTask] = {}
        self.stats: dict[str, TopicConsumeStats] = {}
        """Maps a topic to the statistics of its readers."""
        self.on_recreated: Callable[[str], None] = lambda topic: None
        """Called with a topic that was deleted and created again, once for each time."""
        self._tasks = Tasks()

    @property
    def queues(self) -> set[MessageQueue]:
        """The queues that are read now."""
        return set(self._readers)

    def queues_of_topic(self, topic: str) -> set[MessageQueue]:
        """Return the queues of `topic` that are read now."""
        return {queue for queue in self._readers if queue.topic == topic}

    def get(self, queue: MessageQueue) -> QueueReader | None:
        """Return the reader of a queue, or None if the queue is not read here."""
        return self._readers.get(queue)

    async def add(
        self,
        queue: MessageQueue,
        subscription: Subscription,
        buffer: MessageBuffer,
        *,
        is_new: bool = False,
    ) -> bool:
        """Start to read a queue, and return whether it is read now.

        The reader begins at the committed offset. Without one, it begins where the options say, or
        at the first message if the queue is new (`is_new`: it appeared after the consumer had
        started). With automatic commits, this offset is committed at once. `buffer` receives the
        messages. Only a subclass returns False, if the queue is not available yet. Raises
        SluiceError if the offset cannot be determined.
        """
        position, committed = await self.find_start_offset(queue, is_new=is_new)
        if queue in self._readers:  # another task has added it meanwhile
            return True
        reader = self._make_reader(self._context, queue, subscription, buffer, position, committed)
        reader.stats = self.stats.setdefault(queue.topic, TopicConsumeStats())
        self._restore_identity(reader)
        reader.on_recreated = partial(self._on_recreated, reader)
        reader.tasks = self._tasks
        if committed is None and self.options.auto_commit:
            # Commit the start at once. Otherwise a crash before the first commit would make a group
            # with start="last" skip the messages that were stored in between.
            await self._commit(reader, position)
            if queue in self._readers:
                return True
        # No await from here on, so a reader is always in both tables or in neither.
        self._reader_tasks[queue] = self._tasks.supervise(reader.run, f"sluicemq read {queue}")
        self._readers[queue] = reader
        self._update_limits(queue.topic)
        return True

    def _restore_identity(self, reader: QueueReader) -> None:
        """Give a reader the anchors of its queue, messages by which the queue is recognised.

        They come from the last reader of the queue in this client, or else from the offsets file.
        """
        queue = reader.queue
        if queue not in self._past_identities:
            reader.is_recreation_reported = False
            reader.identity = QueueIdentity(self._offsets.anchors_of(queue))
            return
        identity, recreation_count = self._past_identities.pop(queue)
        # Whether another reader of the topic has reported a recreation since.
        reader.is_recreation_reported = self._recreation_counts[queue.topic] > recreation_count
        reader.identity = QueueIdentity(identity.proven)

    def _on_recreated(self, reader: QueueReader, old_offset: int, why: str) -> None:
        """Handle that `reader` has found its topic deleted and created again.

        Each reader of the topic finds it. The first one causes a warning in the log, a check of the
        other readers' queues and a call of `on_recreated`. For each reader, the new offset is
        committed at once if automatic commits are on. Otherwise a crash would leave the group at
        its offset in the deleted topic.
        """
        queue = reader.queue
        topic = reader.queue.topic
        if not reader.is_recreation_reported:
            _log.warning(
                "topic %s was %s: group %s, which was at offset %d of %s, reads it from its "
                "beginning",
                topic,
                why,
                self._group,
                old_offset,
                queue,
            )
            self._recreation_counts[topic] += 1
            for other_reader in self.all_readers():
                if other_reader is not reader and other_reader.queue.topic == topic:
                    other_reader.report_recreation()
            self.on_recreated(topic)
        reader.is_recreation_reported = False
        if self.options.auto_commit:
            self._tasks.spawn(
                self._commit_and_flush(reader, reader.in_flight.committable),
                f"sluicemq commit {queue}",
            )

    async def _commit_and_flush(self, reader: QueueReader, offset: int) -> None:
        """Commit an offset of a reader; in a broadcasting group, also write the offsets file."""
        await self._commit(reader, offset)
        await self._offsets.flush()

    @property
    def undecodable_count(self) -> int:
        """The number of messages of all topics whose body could not be decoded."""
        return sum(stats.undecodable_count for stats in self.stats.values())

    def all_readers(self) -> list[QueueReader]:
        """Return every reader that may still commit offsets."""
        return list(self._readers.values())

    def messages_handed_to(self, owner: object) -> list[ReceivedMessage]:
        """Return the messages that `owner` has received and not acknowledged, by ascending offset.

        Messages that were pulled before their reader moved to another offset are left out.
        """
        messages: list[ReceivedMessage] = []
        for reader in self.all_readers():
            messages += [message for message in reader.handed_out if message.owner is owner]
        current_messages = [message for message in messages if message.is_current]
        return sorted(current_messages, key=lambda message: message.queue_offset)

    def _update_limits(self, topic: str) -> None:
        """Divide the prefetch limits of a topic evenly among the queues that are read here."""
        readers = [reader for queue, reader in self._readers.items() if queue.topic == topic]
        for reader in readers:
            queue_count = max(len(readers), self.expected_queue_counts.get(topic, 0))
            reader.set_limits(*self.options.queue_limits(queue_count))

    @contextlib.contextmanager
    def pulls_blocked(self, topic: str) -> Iterator[None]:
        """Return a context manager during which the queues of a topic are not read.

        Pulls in progress are interrupted when it is entered.
        """
        readers = [reader for queue, reader in self._readers.items() if queue.topic == topic]
        for reader in readers:
            reader.set_blocked(is_blocked=True)
        try:
            yield
        finally:
            for reader in readers:
                reader.set_blocked(is_blocked=False)

    def change_subscription(self, subscription: Subscription) -> None:
        """Read the queues of the subscription's topic with its filter from now on."""
        for queue, reader in self._readers.items():
            if queue.topic == subscription.topic and reader.subscription != subscription:
                reader.change_subscription(subscription)

    async def find_start_offset(
        self, queue: MessageQueue, *, is_new: bool = False
    ) -> tuple[int, int | None]:
        """Return (offset to begin at, committed offset or None) for a queue.

        The committed offset is preferred. Without one, a new queue (`is_new`) and a queue of the
        retry topic begin at their first message, and other queues where `ConsumeOptions.start`
        says. Raises SluiceError if the offset cannot be determined.
        """
        committed = await self._offsets.read(queue)
        if committed is not None:
            return committed, committed
        if self.options.young_from_first:
            young_offset = await self._offsets.read(queue, zero_if_young=True)
            if young_offset is not None:
                return young_offset, None
        start_ms = self.options.start_ms
        find_offset = self._cluster.offset_min
        if not is_new and not queue.topic.startswith(RETRY_PREFIX):
            if start_ms is not None:
                return await self._cluster.offset_by_time(queue, start_ms), None
            if self.options.start == "last":
                find_offset = self._cluster.offset_max
        return await find_offset(queue), None

    async def remove(self, queue: MessageQueue) -> None:
        """Stop reading a queue, and commit its offset if automatic commits are on.

        Messages that were pulled from it can no longer be acknowledged.
        """
        reader = self._readers.pop(queue)
        task = self._reader_tasks.pop(queue)
        task.cancel()
        self._past_identities[queue] = reader.identity, self._recreation_counts[queue.topic]
        offset = reader.in_flight.committable
        reader.discard_pulled(offset)
        self._update_limits(queue.topic)
        if self.options.auto_commit:
            await self._commit(reader, offset)
            await self._offsets.flush()

    async def reset_offsets(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Let queues go on at other offsets, and commit these, because an operator reset the group.

        A broker has sent the request RESET_CONSUMER_CLIENT_OFFSET (220). Messages that were pulled
        before can no longer be acknowledged. A commit in progress does not overwrite the new
        offset: it uses the same connection, so it reaches the broker first.
        """
        for reader in [reader for reader in self.all_readers() if reader.queue in offsets]:
            _log.warning(
                "group %s was reset on %s from offset %d to %d",
                self._group,
                reader.queue,
                reader.in_flight.position,
                offsets[reader.queue],
            )
            reader.move_to(offsets[reader.queue])
            reader.committed_offset = None
        await self.commit()

    async def commit(self, *, must_succeed: bool = False) -> None:
        """Commit the offset of every queue whose offset has changed.

        Errors are logged and the next commit tries again. With `must_succeed`, the first error is
        raised too, as a SluiceError.

        The commits at one broker run one after the other: a Java broker can lose one of two
        concurrent commits of a new group, because both create the group's table.
        """
        readers_by_broker: dict[str, list[QueueReader]] = {}
        for reader in self._readers.values():
            if reader.in_flight.committable != reader.committed_offset:
                readers_by_broker.setdefault(reader.queue.broker, []).append(reader)
        first_errors: list[SluiceError | None] = []
        if readers_by_broker:
            first_errors = await asyncio.gather(
                *map(self._commit_in_turn, readers_by_broker.values())
            )
        await self._offsets.flush()
        if must_succeed:
            for error in first_errors:
                if error is not None:
                    raise error

    async def _commit_in_turn(self, readers: list[QueueReader]) -> SluiceError | None:
        """Commit the offsets of several readers, one after the other.

        Returns the first error, None if all have succeeded. Errors are logged.
        """
        first_error = None
        for reader in readers:
            error = await self._commit(reader, reader.in_flight.committable)
            first_error = first_error or error
        return first_error

    async def commit_offsets(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Commit exactly these offsets, whether the messages before them are acknowledged or not.

        Raises SluiceError if a commit fails; later ones are then not made.
        """
        for queue, offset in sorted(offsets.items()):
            await self._offsets.write(queue, offset)
            reader = self._readers.get(queue)
            if reader is not None:
                reader.committed_offset = offset
        await self._offsets.flush()

    async def _commit(self, reader: QueueReader, offset: int) -> SluiceError | None:
        """Commit `offset` for the queue of a reader, and return None, or the error if it failed.

        An error is logged. Does nothing, and returns None, if the offset is committed already or
        the reader must not commit now.
        """
        if offset == reader.committed_offset or not reader.may_commit:
            return None
        activity = f"committing for {self._group}"
        try:
            await self._offsets.write(reader.queue, offset, reader.identity.newest)
            reader.committed_offset = offset
            self._cluster.directory.log_recovery(reader.queue, activity)
        except GroupNotFoundError as error:
            # Only at level DEBUG: the pulls of the group fail with the same error.
            _log.debug("commit for %s: %s", self._group, error)
            return error
        except SluiceError as error:
            self._cluster.directory.log_failure(
                error,
                reader.queue,
                activity,
                "the commit of offset %d of %s for group %s failed: %s",
                offset,
                reader.queue,
                self._group,
                error,
            )
            return error
        return None

    async def commit_forever(self) -> None:
        """Commit every `commit_period_s` seconds until the task is cancelled."""
        while True:
            await asyncio.sleep(self.options.commit_period_s)
            await self.commit()

    async def close(self) -> None:
        """Stop all readers; commit their offsets if automatic commits are on.

        A commit that fails is logged. Also closes the offsets file of a broadcasting group.
        """
        for task in self._reader_tasks.values():
            task.cancel()
        try:
            with contextlib.suppress(SluiceError):
                for queue in list(self._readers):
                    await self.remove(queue)
        finally:
            await run_to_end(self._close_files())

    async def _close_files(self) -> None:
        """Stop the remaining tasks and close the offsets file of a broadcasting group."""
        await self._tasks.close()
        await self._offsets.close()
