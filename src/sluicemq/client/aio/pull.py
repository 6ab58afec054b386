"""Consumers that ask: raw pulls, and polls.

`PullConsumer`: one request, one outcome, no background work and no group membership; the caller
keeps the offsets (RocketMQ's DefaultMQPullConsumer).

`LitePullConsumer`: the caller polls, the client fetches ahead and keeps the offsets. Either
`subscribe` (queues are shared with the other members of the group) or `assign` (these queues, no
sharing). `poll` hands out messages; those of earlier polls count as done at the next poll, and what
is done is committed every 5 s, or by `commit` when automatic commit is off.

A paused queue is neither fetched from nor handed out; what was fetched before waits in its place.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Self

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.members import Member, Memberships
from sluicemq.client.aio.offsets import BrokerOffsets
from sluicemq.client.aio.readers import QueueReader, Readers, Reading, SendBack
from sluicemq.client.aio.received import PausingFeed, ReceivedMessage
from sluicemq.client.core import requests
from sluicemq.client.core.consuming import (
    DEAD_LETTER,
    DEAD_LETTER_LEVEL,
    DELIVER,
    ConsumeOptions,
    OnUndecodable,
    check_undecodable,
    make_subscription,
)
from sluicemq.client.core.identity import (
    QueueIdentity,
    QueueVerdict,
    make_anchor,
    restart_offset,
)
from sluicemq.client.core.names import check_group, check_number, check_queue
from sluicemq.client.core.requests import PullResponse, PullStatus
from sluicemq.client.tasks import CloseOnce, Tasks, call_listener, notify, run_to_end
from sluicemq.errors import ClosedError, ConfigurationError, SluiceError
from sluicemq.filter.subscriptions import tag_matches
from sluicemq.hints import with_hints
from sluicemq.model.bodies import BODY_BYTES_MAX
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.system_names import TOOLS_GROUP
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_records


@dataclass(frozen=True, slots=True, repr=False)
class PullResult:
    """`next_offset` is where to go on (for OFFSET_ILLEGAL: where the broker says, or the beginning
    of the queue if the topic was deleted and created again); the queue holds `offset_min` up to,
    not including, `offset_max`."""

    status: PullStatus
    next_offset: int
    offset_min: int
    offset_max: int
    messages: tuple[StoredMessage, ...]

    def __repr__(self) -> str:
        return (
            f"<PullResult {self.status.name}: {len(self.messages)} messages, next offset "
            f"{self.next_offset} of {self.offset_min} to {self.offset_max}>"
        )


@with_hints
class PullConsumer:
    """Pulls from queues that the caller names. Made by `Sluice.pull_consumer`."""

    def __init__(
        self,
        cluster: Cluster,
        group: str = TOOLS_GROUP,
        *,
        on_undecodable: OnUndecodable = DELIVER,
        body_bytes_max: int = BODY_BYTES_MAX,
    ) -> None:
        self.group: str = check_group(group)
        check_undecodable(on_undecodable, body_bytes_max)
        if on_undecodable == DEAD_LETTER and group == TOOLS_GROUP:
            raise ConfigurationError(
                f"on_undecodable='dead_letter' needs a group, and the group is {TOOLS_GROUP!r}.",
                fix="Name the group that gets the dead letters: pull_consumer(group, …).",
            )
        self.on_undecodable: OnUndecodable = on_undecodable
        self._body_bytes_max = body_bytes_max
        self._cluster = cluster
        self._subscriptions: dict[tuple[str, str | None, str | None], Subscription] = {}
        self._identities: dict[MessageQueue, QueueIdentity] = {}

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        count_max: int = 32,
        tags: str | None = None,
        where: str | None = None,
        wait_s: float = 0.0,
    ) -> PullResult:
        """Messages from `offset` on; with `wait_s` the broker holds the request until some come.

        Raises FilterSyntaxError, RouteNotFoundError, RequestError, ConnectionLostError and
        RequestTimeoutError. An offset outside the queue is no error: status OFFSET_ILLEGAL. That is
        also the status of the first pull after the topic was deleted and created again, whatever
        the offset: the messages of the new topic begin at `next_offset`. If this consumer has not
        seen any message of the queue yet, an offset behind the end counts as one of a deleted
        topic.

        An undecodable message is treated as `on_undecodable` says. With "raise" the result ends
        before it, and the pull that begins with it raises UndecodableBodyError. With "dead_letter"
        it is stored as a dead letter and left out; SluiceError means that no broker took it.
        """
        check_queue(queue)
        check_number("offset", offset, 0)
        check_number("count_max", count_max, 1)
        check_number("wait_s", wait_s, 0, whole=False)
        key = (queue.topic, tags, where)
        subscription = self._subscriptions.get(key)
        if subscription is None:
            subscription = make_subscription(queue.topic, tags=tags, where=where)
            self._subscriptions[key] = subscription
        command = requests.pull(
            self.group,
            queue,
            offset,
            count_max=count_max,
            subscription=subscription,
            suspend_timeout_ms=int(wait_s * 1000),
            any_span=True,
        )
        # The broker looks at its parked pulls every 5 s (spec/remoting.md §13): so late at most.
        timeout_s = self._cluster.timeout_s + wait_s + 5.0
        identity = self._identities.setdefault(queue, QueueIdentity())
        try:
            if wait_s and offset > 0 and not (identity.proven or identity.has_probed_start):
                # While the broker holds the request, the topic may be created again.
                await self._cluster.run(
                    identity.probe_start(self._cluster.directory, self.group, queue, offset)
                )
            pulled = await self._cluster.run(
                self._cluster.directory.pull(queue, command, timeout_s)
            )
            moved_to = await self._moved_to(queue, identity, pulled, offset)
        except SluiceError:
            identity.is_suspect = True
            raise
        if moved_to is not None:
            return PullResult(
                PullStatus.OFFSET_ILLEGAL, moved_to, pulled.offset_min, pulled.offset_max, ()
            )
        found = decode_records(
            pulled.data, broker=queue.broker, body_bytes_max=self._body_bytes_max
        )
        if found:
            last, now_s = found[-1], self._cluster.clock.monotonic_s()
            identity.add_anchor(make_anchor(last), last.size_bytes, now_s)
        wanted = [record for record in found if tag_matches(subscription, record.tag)]
        messages, next_offset = await self._screened(wanted, pulled.next_offset)
        return PullResult(
            pulled.status, next_offset, pulled.offset_min, pulled.offset_max, messages
        )

    async def _moved_to(
        self, queue: MessageQueue, identity: QueueIdentity, pulled: PullResponse, offset: int
    ) -> int | None:
        """Return where to go on instead if the answer is of another topic than the ones before, or
        the offset is behind the end of the queue; None to go on as the broker says. Raises
        SluiceError."""
        cluster, asked_s = self._cluster, self._cluster.clock.monotonic_s()
        directory = cluster.directory
        if not identity.proven and not identity.has_probed_start and offset > 0 and not pulled.data:
            await cluster.run(identity.probe_start(directory, self.group, queue, offset))
        if identity.needs_check(pulled, asked_s):
            judged = await cluster.run(identity.check(directory, self.group, queue))
            if judged.verdict is QueueVerdict.RECREATED:
                _log.warning(
                    "the topic %s was deleted and created again: %s, which %s pulled at offset %d, "
                    "begins at %d", queue.topic, queue, self.group, offset, judged.offset,
                )  # fmt: skip
                identity.clear()
                return judged.offset
            if judged.verdict is QueueVerdict.CUT:
                identity.drop_lost_anchors(judged.offset)
                return min(judged.offset, offset)
            if judged.verdict is QueueVerdict.RESET:
                return judged.offset
            if judged.verdict is QueueVerdict.SAME:
                identity.record_same(asked_s)
            else:
                identity.record_unknown(asked_s)
        identity.update_bounds(pulled)
        return None if identity.proven else restart_offset(pulled, offset)

    async def _screened(
        self, found: list[StoredMessage], next_offset: int
    ) -> tuple[tuple[StoredMessage, ...], int]:
        """Treat undecodable messages as `on_undecodable` says. Return the messages to hand out and
        the offset where the next pull begins. Raises UndecodableBodyError and SluiceError."""
        if self.on_undecodable == DELIVER:
            return tuple(found), next_offset
        good: list[StoredMessage] = []
        for record in found:
            error = record.body_error
            if error is None:
                good.append(record)
            elif self.on_undecodable == DEAD_LETTER:
                await self.send_back(record, DEAD_LETTER_LEVEL)
                _log.warning("group %s: moved to the dead letters: %s", self.group, error)
            elif good:
                return tuple(good), record.queue_offset
            else:
                raise error
        return tuple(good), next_offset

    def __repr__(self) -> str:
        return f"<PullConsumer of {self.group} at {self._cluster!r}>"

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic."""
        return await self._cluster.queues(topic)

    async def offsets(self, queue: MessageQueue) -> tuple[int, int]:
        """(the first stored offset, the offset that the next message will get)."""
        return await self._cluster.offsets(queue)

    async def offset_for_time(self, queue: MessageQueue, time_ms: int) -> int:
        """The first offset stored at `time_ms` (milliseconds since 1970) or later."""
        return await self._cluster.offset_by_time(queue, time_ms)

    async def committed(self, queue: MessageQueue) -> int | None:
        """The group's offset at the broker, None when there is none."""
        return await BrokerOffsets(self._cluster, self.group).read(queue)

    async def commit(self, queue: MessageQueue, offset: int) -> None:
        """Keeps an offset for the group at the broker; nothing else commits here."""
        await BrokerOffsets(self._cluster, self.group).write(queue, offset)

    async def send_back(self, message: StoredMessage, delay_level: int = 0) -> None:
        """A message shall come to the group again, by its retry topic; see
        `ReceivedMessage.reject` for the levels. Raises SluiceError."""
        await SendBack(self._cluster, self.group, None).send_back(message, delay_level)


_log = logging.getLogger("sluicemq.client")
POLL_TIMEOUT_S: Final = 5.0
WATCH_PERIOD_S: Final = 30.0
QueuesListener = Callable[[str, list[MessageQueue]], None]
"""Called with a topic and its queues as they are now."""
ShareListener = Callable[[str, list[MessageQueue], list[MessageQueue]], None]
"""Called with a topic, all of its queues and those of this consumer."""


@with_hints
class LitePullConsumer:
    """Polls messages for a group; made by `Sluice.lite_pull`. Use it from one task.

    `on_share(topic, all queues, own queues)` is called when the share of this consumer changes.
    """

    def __init__(
        self,
        cluster: Cluster,
        groups: Memberships,
        group: str,
        options: ConsumeOptions,
    ) -> None:
        self.group = group
        self.options = options
        self._cluster = cluster
        self._groups = groups
        self._feed = PausingFeed()
        self._member: Member | None = None
        self._topics: list[str] = []
        self._assigned: Readers | None = None
        self._tasks = Tasks()
        self._watched: dict[str, list[QueuesListener]] = {}
        self._closing: CloseOnce[None] = CloseOnce()
        self.on_share: ShareListener | None = None

    @property
    def is_running(self) -> bool:
        """Whether it reads something, and is not closed."""
        return not self._closing.has_started and (
            self._member is not None or self._assigned is not None
        )

    def _check_open(self) -> None:
        self._cluster.affinity.check_loop()
        if self._closing.has_started:
            raise ClosedError(f"the consumer of {self.group!r} is closed.", fix="Make a new one.")

    async def subscribe(
        self, topic: str, *, tags: str | None = None, where: str | None = None
    ) -> None:
        """Joins the group for a topic; once more for a topic: another expression from now on, in
        all its queues. Raises what `MessageStream.start` does; then, and when it is cancelled, the
        topic is not subscribed to. Cancelling a change of expression raises CancelledError when the
        change is complete."""
        self._check_open()
        if self._assigned is not None:
            raise ConfigurationError("queues are assigned already.", fix=_ONE_WAY)
        if topic in self._topics:
            await self._groups.change(self.group, topic, tags=tags, where=where)
            return
        subscription = make_subscription(
            topic, tags=tags, where=where, version=self._cluster.clock.now_ms()
        )
        member = await self._groups.join(
            self.group, subscription, self._feed, self.options, retry=False
        )
        self._topics.append(topic)
        if self._member is None:
            self._member = member
            member.on_share.append(self._share_changed)
            try:
                queues = await self.queues(topic)
            except BaseException:
                await self.unsubscribe(topic)
                raise
            own = [queue for queue in member.readers.queues if queue.topic == topic]
            self._share_changed(topic, queues, sorted(own))

    def _share_changed(
        self, topic: str, queues: list[MessageQueue], own: list[MessageQueue]
    ) -> None:
        if self.on_share is not None and not self._closing.has_started:
            call_listener(self.on_share, topic, queues, own)

    async def unsubscribe(self, topic: str) -> None:
        """Reads a topic no more: its queues go to the other members. What was polled of it and not
        committed comes again to them."""
        if topic not in self._topics:
            return
        self._topics.remove(topic)
        if not self._topics:
            self._leave_member()
        await self._groups.leave(self.group, topic)

    def _leave_member(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            member.on_share.remove(self._share_changed)

    async def assign(
        self, queues: Iterable[MessageQueue], *, tags: str | None = None, where: str | None = None
    ) -> None:
        """Reads exactly these queues, from the group's committed offsets; replaces the last call.
        If it raises, or is cancelled before it has begun to read all of them, the queues of the
        last call are read on."""
        self._check_open()
        if self._member is not None:
            raise ConfigurationError("topics are subscribed to already.", fix=_ONE_WAY)
        wanted = set(queues)
        for queue in wanted:
            check_queue(queue)
        readers = self._assigned
        if readers is None:
            buries = self.options.on_undecodable == DEAD_LETTER
            readers = Readers(
                Reading(
                    self._cluster,
                    self.group,
                    self.options,
                    filtered_here=True,
                    dead_letters=SendBack(self._cluster, self.group, None) if buries else None,
                )
            )
        before = readers.queues
        try:
            for queue in sorted(wanted - before):
                subscription = make_subscription(queue.topic, tags=tags, where=where)
                await readers.add(queue, subscription, self._feed)
        except BaseException:
            await run_to_end(self._drop(readers, readers.queues - before))
            if self._assigned is None:
                await run_to_end(readers.close())
            raise
        if self._assigned is None:
            self._assigned = readers
            if self.options.auto_commit:
                self._tasks.supervise(readers.commit_forever, f"sluicemq commit {self.group}")
        if before - wanted:
            await run_to_end(self._drop(readers, before - wanted))

    async def _drop(self, readers: Readers, queues: Iterable[MessageQueue]) -> None:
        for queue in sorted(queues):
            await readers.drop(queue)

    @property
    def assignment(self) -> list[MessageQueue]:
        """The queues read now."""
        return sorted(self._readers.queues)

    async def poll(
        self, timeout_s: float | None = POLL_TIMEOUT_S, *, count_max: int = 32
    ) -> list[ReceivedMessage]:
        """Up to `count_max` messages; waits up to `timeout_s` (None: for ever) for the first, []
        when none came. 0 takes what is there.

        What earlier polls returned counts as done from now on. Raises what ended the reading
        (GroupNotFoundError, PermissionDeniedError …).
        """
        check_number("count_max", count_max, 1)
        if timeout_s is not None:
            check_number("timeout_s", timeout_s, 0, whole=False)
        self._cluster.affinity.check_loop()
        self._finish()
        messages: list[ReceivedMessage] = []
        try:
            async with asyncio.timeout(timeout_s):
                messages.append(await self._feed.get(self))
        except TimeoutError:
            return []
        self._feed.fill(messages, count_max, self)
        return messages

    def put_back(self, messages: list[ReceivedMessage]) -> None:
        """Hand out these messages of the last poll again, before any other: they do not count as
        done at the next poll."""
        self._feed.put_back([message for message in messages if message.is_current])

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Everything polled so far is done; commits it now and returns when it is stored.

        With `offsets` exactly these are committed, and nothing counts as done by that; automatic
        commits would overwrite them. Raises SluiceError when a broker did not take one: it is tried
        again with the next commit.
        """
        if offsets is None:
            self._finish()
            await self._readers.commit(must_succeed=True)
        else:
            await self._readers.put_offsets(offsets)

    def commit_soon(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """`commit` without waiting (Java's commitAsync): what goes wrong is logged."""
        if offsets is None:
            self._finish()
            self._tasks.spawn(self._readers.commit(), f"sluicemq commit {self.group}")
        else:
            self._tasks.spawn(self._readers.put_offsets(offsets), f"sluicemq commit {self.group}")

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Nothing of these queues is fetched or handed out until `resume`; they stay ours."""
        for queue in queues:
            self._feed.pause(queue)
            self._pause_reader(queue)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """They go on where they stood."""
        for queue in queues:
            self._feed.resume_queue(queue)
            self._pause_reader(queue)

    def _pause_reader(self, queue: MessageQueue) -> None:
        reader = self._readers.get(queue) if self.is_running else None
        if reader is not None:
            reader.pause(is_paused=queue in self._feed.paused)

    @property
    def undecodable(self) -> int:
        """How many messages had a body that could not be decoded since the group is read here."""
        return self._readers.undecodable if self.is_running else 0

    @property
    def paused(self) -> list[MessageQueue]:
        """The queues that are paused."""
        return sorted(self._feed.paused)

    def _finish(self) -> None:
        """What was polled counts as done."""
        if self.is_running:
            for message in self._readers.out_of(self):
                message.settle()

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """The next messages of a queue come from `offset` on. Raises ConfigurationError for a queue
        that is not read here and for an offset outside of what is stored."""
        self._reader(queue)
        first, following = await self._cluster.offsets(queue)
        if not first <= offset <= following:
            raise ConfigurationError(
                f"{queue} holds the offsets {first} up to {following}, not {offset}.",
                fix="Seek within, or use seek_to_begin or seek_to_end.",
            )
        self._reader(queue).move(offset)

    async def _seek(
        self, queue: MessageQueue, find: Callable[[MessageQueue], Awaitable[int]]
    ) -> None:
        self._reader(queue)  # else nobody is asked
        offset = await find(queue)
        self._reader(queue).move(offset)

    def _reader(self, queue: MessageQueue) -> QueueReader:
        reader = self._readers.get(queue)
        if reader is None:
            raise ConfigurationError(
                f"{queue} is not read by this consumer.",
                fix="Seek in a queue of `assignment` (after subscribe, wait for the first poll).",
            )
        return reader

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        """The next messages of a queue are the oldest stored ones."""
        await self._seek(queue, self._cluster.offset_min)

    async def seek_to_end(self, queue: MessageQueue) -> None:
        """The next messages of a queue are those that come from now on."""
        await self._seek(queue, self._cluster.offset_max)

    async def seek_to_time(self, queue: MessageQueue, time_ms: int) -> None:
        """The next messages of a queue are those stored at `time_ms` or later."""
        await self._seek(queue, lambda queue: self._cluster.offset_by_time(queue, time_ms))

    async def offset_for_time(self, queue: MessageQueue, time_ms: int) -> int:
        """The first offset stored at `time_ms` (milliseconds since 1970) or later."""
        return await self._cluster.offset_by_time(queue, time_ms)

    async def committed(self, queue: MessageQueue) -> int | None:
        """The committed offset of the group, None when there is none."""
        return (await self._readers.start_offset(queue))[1]

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic, for `assign`."""
        return await self._cluster.queues(topic)

    def on_queues(
        self, topic: str, listener: QueuesListener, *, period_s: float = WATCH_PERIOD_S
    ) -> None:
        """Calls `listener(topic, queues)` when the queues of a topic are others than before: for
        programs that `assign`. Looks every `period_s`; the first look only remembers."""
        listeners = self._watched.setdefault(topic, [])
        listeners.append(listener)

        async def watch() -> None:
            known: list[MessageQueue] | None = None
            while True:
                try:
                    self._cluster.routes.expire(topic)
                    found = await self.queues(topic)
                except SluiceError as error:
                    _log.debug("queues of %s: %s", topic, error)
                else:
                    has_changed = known is not None and found != known
                    for one in tuple(listeners) if has_changed else ():
                        notify(one, topic, list(found))
                    known = found
                await asyncio.sleep(period_s)

        if len(listeners) == 1:
            self._tasks.supervise(watch, f"sluicemq queues of {topic}")

    @property
    def _readers(self) -> Readers:
        if self._member is not None:
            return self._member.readers
        if self._assigned is not None:
            return self._assigned
        raise ConfigurationError("nothing is read yet.", fix="Call subscribe or assign first.")

    async def close(self) -> None:
        """Commits what earlier polls returned (when that is automatic), leaves the group.

        The last poll's messages are not done: nobody has said so. They come again. Cancelling it
        does not keep it from leaving: it raises CancelledError afterwards.
        """
        self._cluster.affinity.check_loop()
        await self._closing.run(self._close)

    async def _close(self) -> None:
        await self._tasks.close()
        self._leave_member()
        while self._topics:
            await self._groups.leave(self.group, self._topics.pop())
        if self._assigned is not None:
            await self._assigned.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = f"{len(self.assignment)} queues" if self.is_running else "reads nothing"
        return f"<LitePullConsumer of {self.group}: {', '.join(self._topics) or '-'}, {state}>"


_ONE_WAY = "A consumer either subscribes to topics or is assigned queues: use two consumers."
