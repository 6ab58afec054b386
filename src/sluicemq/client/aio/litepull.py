"""The lite pull consumer: the caller polls, the client fetches ahead and keeps the offsets.

Either `subscribe` (queues are shared with the other members of the group) or `assign` (these
queues, no sharing). `poll` hands out messages; those of earlier polls count as done at the next
poll, and what is done is committed every 5 s, or by `commit` when automatic commit is off.
"""

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.consumer import Groups
from sluicemq.client.aio.member import Member
from sluicemq.client.aio.readers import Readers
from sluicemq.client.aio.received import Feed, ReceivedMessage
from sluicemq.client.aio.tasks import Tasks
from sluicemq.client.core import requests
from sluicemq.client.core.answers import number
from sluicemq.client.core.consuming import ConsumeOptions
from sluicemq.client.core.routing import read_queues
from sluicemq.client.core.subscriptions import make_subscription
from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import MessageQueue


class LitePullConsumer:
    """Polls messages for a group; made by `Sluice.lite_pull`. Use it from one task."""

    def __init__(
        self,
        cluster: Cluster,
        groups: Groups,
        group: str,
        options: ConsumeOptions,
    ) -> None:
        self.group = group
        self.options = options
        self._cluster = cluster
        self._groups = groups
        self._feed = Feed()
        self._member: Member | None = None
        self._topics: list[str] = []
        self._assigned: Readers | None = None
        self._out: list[ReceivedMessage] = []
        self._tasks = Tasks()

    async def subscribe(
        self, topic: str, *, tags: str | None = None, where: str | None = None
    ) -> None:
        """Joins the group for a topic. Raises what `MessageStream.start` does."""
        if self._assigned is not None:
            raise ConfigurationError("queues are assigned already.", cure=_ONE_WAY)
        subscription = make_subscription(
            topic, tags=tags, where=where, version=self._cluster.clock.now_ms()
        )
        self._member = await self._groups.join(self.group, subscription, self._feed)
        self._topics.append(topic)

    async def assign(
        self, queues: Iterable[MessageQueue], *, tags: str | None = None, where: str | None = None
    ) -> None:
        """Reads exactly these queues, from the group's committed offsets; replaces the last
        call."""
        if self._member is not None:
            raise ConfigurationError("topics are subscribed to already.", cure=_ONE_WAY)
        if self._assigned is None:
            self._assigned = Readers(self._cluster, self.group, self.options, filtered_here=True)
            if self.options.auto_commit:
                self._tasks.spawn(self._assigned.commit_forever(), f"sluicemq commit {self.group}")
        wanted = set(queues)
        for queue in self._assigned.queues - wanted:
            await self._assigned.drop(queue)
        for queue in sorted(wanted - self._assigned.queues):
            subscription = make_subscription(queue.topic, tags=tags, where=where)
            await self._assigned.add(queue, subscription, self._feed)

    @property
    def assignment(self) -> list[MessageQueue]:
        """The queues read now."""
        return sorted(self._readers.queues)

    async def poll(
        self, timeout_s: float | None = 5.0, *, count_max: int = 32
    ) -> list[ReceivedMessage]:
        """Up to `count_max` messages; waits up to `timeout_s` (None: for ever) for the first, []
        when none came.

        What earlier polls returned counts as done from now on. Raises what ended the reading
        (GroupNotFoundError, PermissionDeniedError …).
        """
        self._finish()
        messages: list[ReceivedMessage] = []
        try:
            async with asyncio.timeout(timeout_s):
                messages.append(await self._feed.get())
        except TimeoutError:
            return []
        while len(messages) < count_max and len(self._feed):
            messages.append(await self._feed.get())
        self._out = messages
        return list(messages)

    async def commit(self) -> None:
        """Everything polled so far is done; commits it now."""
        self._finish()
        await self._readers.commit()

    def _finish(self) -> None:
        for message in self._out:
            message.settle()
        self._out = []

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """The next messages of a queue come from `offset` on."""
        reader = self._readers.get(queue)
        if reader is None:
            raise ConfigurationError(
                f"{queue} is not read by this consumer.",
                cure="Seek in a queue of `assignment` (after subscribe, wait for the first poll).",
            )
        self._out = [message for message in self._out if not message.is_from(reader)]
        reader.move(offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        """The next messages of a queue are the oldest stored ones."""
        await self.seek(queue, await self._ask(queue, requests.offset_min(queue)))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        """The next messages of a queue are those that come from now on."""
        await self.seek(queue, await self._ask(queue, requests.offset_max(queue)))

    async def offset_for_time(self, queue: MessageQueue, time_ms: int) -> int:
        """The first offset stored at `time_ms` (milliseconds since 1970) or later."""
        return await self._ask(queue, requests.offset_by_time(queue, time_ms))

    async def committed(self, queue: MessageQueue) -> int | None:
        """The committed offset of the group, None when there is none."""
        return (await self._readers.start_offset(queue))[1]

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic, for `assign`."""
        return read_queues(topic, await self._cluster.route(topic))

    async def _ask(self, queue: MessageQueue, command: object) -> int:
        return number(await self._cluster.ask(queue, command), "offset")  # type: ignore[arg-type]

    @property
    def _readers(self) -> Readers:
        if self._member is not None:
            return self._member.readers
        if self._assigned is not None:
            return self._assigned
        raise ConfigurationError("nothing is read yet.", cure="Call subscribe or assign first.")

    async def close(self) -> None:
        """Commits what earlier polls returned (when that is automatic), leaves the group.

        The last poll's messages are not done: nobody has said so. They come again.
        """
        self._out = []
        await self._tasks.close()
        topics, self._topics = self._topics, []
        for topic in topics:
            await self._groups.leave(self.group, topic)
        if self._assigned is not None:
            await self._assigned.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


_ONE_WAY = "A consumer either subscribes to topics or is assigned queues: use two consumers."
