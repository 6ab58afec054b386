"""The asyncio consumers that the application asks for messages: `PullConsumer`, `LitePullConsumer`.

A `PullConsumer` sends one request for each call. It joins no group, does nothing in the background,
and the application keeps the offsets (RocketMQ's DefaultMQPullConsumer).

A `LitePullConsumer` is polled by the application. The client fetches messages in advance and keeps
the offsets. The application either calls `subscribe`, which shares the queues with the other
members of the group, or `assign`, which reads exactly the given queues. `poll` returns messages; it
also acknowledges those that earlier polls returned. Acknowledged offsets are committed every 5
seconds, or by `commit` if automatic commits are off.

A paused queue is not fetched from, and its messages are not returned. Messages that were fetched
before the pause wait until the queue is resumed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Self

from sluicemq.client.aio.cluster import Cluster, expect_cluster
from sluicemq.client.aio.members import Member
from sluicemq.client.aio.memberships import Memberships
from sluicemq.client.aio.offsets import BrokerOffsets
from sluicemq.client.aio.prefetch import PausablePrefetchBuffer
from sluicemq.client.aio.queue_reader import QueueReader, ReaderContext, RetrySender
from sluicemq.client.aio.readers import Readers
from sluicemq.client.aio.received import ReceivedMessage
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
    CheckResult,
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

_log = logging.getLogger("sluicemq.client")
POLL_TIMEOUT_S: Final = 5.0
"""How many seconds `poll` waits for a message by default."""
WATCH_PERIOD_S: Final = 30.0
"""The default interval in seconds at which `watch_queues` looks for changes."""
QueuesListener = Callable[[str, list[MessageQueue]], None]
"""A function (topic, queues) that is called with the changed queues of a topic."""
AssignmentListener = Callable[[str, list[MessageQueue], list[MessageQueue]], None]
"""A function (topic, all queues of the topic, queues of this consumer)."""
_ONE_MODE_FIX: Final = (
    "Use two consumers: one that subscribes to topics and one with assigned queues."
)
"""The fix of errors about a consumer that both subscribes and has assigned queues."""


@dataclass(frozen=True, slots=True, repr=False)
class PullResult:
    """The result of a `PullConsumer.pull`.

    - `status`: FOUND, NO_NEW_MSG (no message at or after the offset yet), NO_MATCHED_MSG (the
      messages there do not match the filter) or OFFSET_ILLEGAL (the queue has no message at the
      offset).
    - `next_offset`: the offset with which to pull next. With OFFSET_ILLEGAL, the broker proposes
      it; if the topic was deleted and created again, it is the beginning of the new queue.
    - `offset_min`, `offset_max`: the queue has the offsets from `offset_min` up to, not including,
      `offset_max`.
    - `messages`: the messages in the order of their offsets, empty unless the status is FOUND.
    """

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
    """Pulls messages from queues and offsets that the application chooses.

    `Sluice.pull_consumer` creates it. A loop over one queue:

        consumer = mq.pull_consumer("exporter")
        [queue, *_] = await consumer.queues("orders")
        offset, _ = await consumer.offsets(queue)
        while True:
            result = await consumer.pull(queue, offset, wait_s=10)
            for message in result.messages:
                ...
            offset = result.next_offset

    Its methods raise RouteNotFoundError if a topic does not exist, NameServerUnreachableError,
    ConnectionLostError, RequestTimeoutError, and RequestError if a broker refuses a request.
    """

    def __init__(
        self,
        cluster: Cluster,
        group: str = TOOLS_GROUP,
        *,
        on_undecodable: OnUndecodable = DELIVER,
        body_bytes_max: int = BODY_BYTES_MAX,
    ) -> None:
        """Create a consumer. Applications call `Sluice.pull_consumer` instead.

        Raises ConfigurationError if an argument is invalid, or if `on_undecodable` is "dead_letter"
        for the default group, which has no dead letters.
        """
        self._cluster = expect_cluster(
            cluster, "PullConsumer", "pull_consumer(…)", "sluicemq.rocketmq.DefaultMQPullConsumer"
        )
        self.group: str = check_group(group)
        """The group under whose name it pulls and commits."""
        check_undecodable(on_undecodable, body_bytes_max)
        if on_undecodable == DEAD_LETTER and group == TOOLS_GROUP:
            raise ConfigurationError(
                f"on_undecodable='dead_letter' needs a group of its own, got {TOOLS_GROUP!r}.",
                fix="Name the group that the dead letters belong to: pull_consumer(group, …).",
            )
        self.on_undecodable: OnUndecodable = on_undecodable
        """What becomes of a message whose body cannot be decoded; see `OnUndecodable`."""
        self._body_bytes_max = body_bytes_max
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
        """Pull messages of `queue` from `offset` on, and return a `PullResult`.

        The result has up to `count_max` messages (32). `tags` ("A||B") or `where` (SQL92) selects
        them. If no message is there, the broker waits up to `wait_s` seconds for one; 0 (the
        default) returns at once.

        An offset outside of the queue is not an error: the status is OFFSET_ILLEGAL and
        `next_offset` says where to continue. The status is also OFFSET_ILLEGAL, whatever the
        offset, in the first pull after the topic was deleted and created again. If this consumer
        has not received a message of the queue yet, an offset behind the end counts as one of a
        deleted topic.

        With `on_undecodable="raise"`, the result ends before a message with an undecodable body,
        and the pull that begins with that message raises UndecodableBodyError. With "dead_letter",
        such a message is stored as a dead letter and left out.

        Raises ConfigurationError if an argument is invalid, FilterSyntaxError if the filter does
        not compile, and the errors of all methods (see the class). If a dead letter cannot be
        stored, the SluiceError of its send is raised.
        """
        check_queue(queue)
        check_number("offset", offset, 0)
        check_number("count_max", count_max, 1)
        check_number("wait_s", wait_s, 0, whole=False)
        subscription = self._get_subscription(queue.topic, tags, where)
        command = requests.pull(
            self.group,
            queue,
            offset,
            count_max=count_max,
            subscription=subscription,
            suspend_timeout_ms=int(wait_s * 1000),
            any_span=True,
        )
        # A broker checks its parked pulls every 5 s (spec/remoting.md §13), so a response may be
        # that late.
        timeout_s = self._cluster.timeout_s + wait_s + 5.0
        identity = self._identities.setdefault(queue, QueueIdentity())
        try:
            if wait_s and offset > 0 and not (identity.proven or identity.has_probed_start):
                # The topic may be created again while the broker parks the request.
                await self._cluster.run(
                    identity.probe_start(self._cluster.directory, self.group, queue, offset)
                )
            response = await self._cluster.run(
                self._cluster.directory.pull(queue, command, timeout_s)
            )
            new_offset = await self._find_new_offset(queue, identity, response, offset)
        except SluiceError:
            identity.is_suspect = True
            raise
        if new_offset is not None:
            return PullResult(
                PullStatus.OFFSET_ILLEGAL, new_offset, response.offset_min, response.offset_max, ()
            )
        records = decode_records(
            response.data, broker=queue.broker, body_bytes_max=self._body_bytes_max
        )
        if records:
            last_record = records[-1]
            now_s = self._cluster.clock.monotonic_s()
            identity.add_anchor(make_anchor(last_record), last_record.size_bytes, now_s)
        matching_records = [record for record in records if tag_matches(subscription, record.tag)]
        messages, next_offset = await self._handle_undecodable(
            matching_records, response.next_offset
        )
        return PullResult(
            response.status, next_offset, response.offset_min, response.offset_max, messages
        )

    def _get_subscription(self, topic: str, tags: str | None, where: str | None) -> Subscription:
        """Return the checked subscription with a filter; a second call returns the same object.

        Raises ConfigurationError and FilterSyntaxError for an invalid filter.
        """
        key = (topic, tags, where)
        subscription = self._subscriptions.get(key)
        if subscription is None:
            subscription = make_subscription(topic, tags=tags, where=where)
            self._subscriptions[key] = subscription
        return subscription

    async def _find_new_offset(
        self, queue: MessageQueue, identity: QueueIdentity, response: PullResponse, offset: int
    ) -> int | None:
        """Return the offset at which reading must go on instead of the one in `response`, or None.

        There is one if the topic was created again, its broker lost messages, the group was reset,
        or `offset` is beyond the end of a queue of which no message is known. `identity` has
        messages that were read before; they are compared with the queue if a check is due. Raises
        SluiceError if that fails.
        """
        cluster = self._cluster
        requested_s = cluster.clock.monotonic_s()
        directory = cluster.directory
        has_anchor_or_probe = identity.proven or identity.has_probed_start
        if not has_anchor_or_probe and offset > 0 and not response.data:
            await cluster.run(identity.probe_start(directory, self.group, queue, offset))
        if identity.needs_check(response, requested_s):
            check_result = await cluster.run(identity.check(directory, self.group, queue))
            if check_result.verdict is QueueVerdict.SAME:
                identity.record_same(requested_s)
            elif check_result.verdict is QueueVerdict.UNKNOWN:
                identity.record_unknown(requested_s)
            else:
                return self._follow_verdict(queue, identity, check_result, offset)
        identity.update_bounds(response)
        return None if identity.proven else restart_offset(response, offset)

    def _follow_verdict(
        self, queue: MessageQueue, identity: QueueIdentity, check_result: CheckResult, offset: int
    ) -> int:
        """Return the offset at which reading goes on after the queue has changed, and log that.

        `check_result` says what happened: RECREATED, CUT (the last messages were lost) or RESET.
        `offset` is that of the pull. Messages that the queue no longer has are removed from
        `identity`.
        """
        verdict, new_offset = check_result
        if verdict is QueueVerdict.RECREATED:
            _log.warning(
                "topic %s was deleted and created again: %s, which group %s pulled at offset "
                "%d, begins at %d",
                queue.topic,
                queue,
                self.group,
                offset,
                new_offset,
            )
            identity.clear()
        elif verdict is QueueVerdict.CUT:
            identity.drop_lost_anchors(new_offset)
            return min(new_offset, offset)
        return new_offset

    async def _handle_undecodable(
        self, records: list[StoredMessage], next_offset: int
    ) -> tuple[tuple[StoredMessage, ...], int]:
        """Treat messages whose body cannot be decoded as `on_undecodable` says.

        Returns (messages for the application, offset of the next pull). Raises
        UndecodableBodyError, and SluiceError if a dead letter cannot be stored.
        """
        if self.on_undecodable == DELIVER:
            return tuple(records), next_offset
        good: list[StoredMessage] = []
        for record in records:
            error = record.body_error
            if error is None:
                good.append(record)
            elif self.on_undecodable == DEAD_LETTER:
                await self.send_back(record, DEAD_LETTER_LEVEL)
                _log.warning("group %s: stored as a dead letter: %s", self.group, error)
            elif good:
                return tuple(good), record.queue_offset
            else:
                raise error
        return tuple(good), next_offset

    def __repr__(self) -> str:
        return f"<PullConsumer of {self.group} at {self._cluster!r}>"

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues of a topic that can be read, sorted."""
        return await self._cluster.queues(topic)

    async def offsets(self, queue: MessageQueue) -> tuple[int, int]:
        """Return (offset of the first stored message, offset of the next new message)."""
        return await self._cluster.offsets(queue)

    async def offset_for_time(self, queue: MessageQueue, time_ms: int) -> int:
        """Return the offset of the first message stored at or after `time_ms`.

        `time_ms` is in milliseconds since 1970.
        """
        return await self._cluster.offset_by_time(queue, time_ms)

    async def committed(self, queue: MessageQueue) -> int | None:
        """Return the offset of the queue that the group has committed, or None if there is none."""
        return await BrokerOffsets(self._cluster, self.group).read(queue)

    async def commit(self, queue: MessageQueue, offset: int) -> None:
        """Store `offset` as the committed offset of the group for the queue."""
        await BrokerOffsets(self._cluster, self.group).write(queue, offset)

    async def send_back(self, message: StoredMessage, delay_level: int = 0) -> None:
        """Make the broker deliver a message to the group again, through the group's retry topic.

        `delay_level` says when; see `ReceivedMessage.reject`. Raises SluiceError if no broker
        stored it.
        """
        await RetrySender(self._cluster, self.group, None).send_back(message, delay_level)


@with_hints
class LitePullConsumer:
    """Polls messages for a consumer group. `Sluice.lite_pull` creates it. Use it from one task.

        async with mq.lite_pull("billing") as consumer:
            await consumer.subscribe("orders", tags="paid")
            while True:
                for message in await consumer.poll(timeout_s=10):
                    ...

    A consumer either subscribes to topics, and shares their queues with the other members of its
    group, or it is assigned queues. `poll` acknowledges the messages of earlier polls, so a crash
    repeats at most what was polled since the last commit.

    Methods that send requests raise RouteNotFoundError if a topic does not exist,
    NameServerUnreachableError, ConnectionLostError, RequestTimeoutError, and RequestError if a
    broker refuses a request. After `close`, `subscribe` and `assign` raise ClosedError.
    """

    def __init__(
        self,
        cluster: Cluster,
        memberships: Memberships,
        group: str,
        options: ConsumeOptions,
    ) -> None:
        """Create a consumer that reads nothing yet. Applications call `Sluice.lite_pull`."""
        self.group = group
        """The consumer group."""
        self.options = options
        """The options of the consumer."""
        self._cluster = cluster
        self._memberships = memberships
        self._buffer = PausablePrefetchBuffer()
        self._member: Member | None = None
        """The membership in the group while topics are subscribed to, else None."""
        self._topics: list[str] = []
        self._assigned_readers: Readers | None = None
        """The readers of the assigned queues, None before the first `assign`."""
        self._tasks = Tasks()
        self._watched: dict[str, list[QueuesListener]] = {}
        """Maps a topic to the listeners that `watch_queues` added."""
        self._closing: CloseOnce[None] = CloseOnce()
        self.on_assignment_change: AssignmentListener | None = None
        """Called with (topic, all queues of the topic, queues of this consumer) after a rebalance.

        It is called when the queues of a subscribed topic that this consumer reads have changed,
        and after the first subscription. None (the default) calls nothing. What it raises is
        logged.
        """

    @property
    def is_running(self) -> bool:
        """Whether it has subscribed or was assigned queues, and is not closed."""
        return not self._closing.has_started and (
            self._member is not None or self._assigned_readers is not None
        )

    def _check_open(self) -> None:
        """Raise ClosedError after `close`, ConfigurationError in another event loop or process."""
        self._cluster.affinity.check_loop()
        if self._closing.has_started:
            raise ClosedError(
                f"the consumer of group {self.group!r} is closed.", fix="Create a new consumer."
            )

    async def subscribe(
        self, topic: str, *, tags: str | None = None, where: str | None = None
    ) -> None:
        """Join the group for a topic, or change the filter of a topic that is subscribed to.

        `tags` ("A||B") or `where` (SQL92) selects messages; without both, all messages match.

        Raises ConfigurationError if queues are assigned, ClosedError after `close`, and what
        `MessageStream.start` raises. If it raises or is cancelled, a new topic is not subscribed
        to. If the caller is cancelled during a change of the filter, the change is completed before
        CancelledError is raised.
        """
        self._check_open()
        if self._assigned_readers is not None:
            raise ConfigurationError("this consumer was assigned queues.", fix=_ONE_MODE_FIX)
        if topic in self._topics:
            await self._memberships.change_subscription(self.group, topic, tags=tags, where=where)
            return
        subscription = make_subscription(
            topic, tags=tags, where=where, version=self._cluster.clock.now_ms()
        )
        member = await self._memberships.join(
            self.group, subscription, self._buffer, self.options, has_retries=False
        )
        self._topics.append(topic)
        if self._member is None:
            self._member = member
            member.assignment_listeners.append(self._notify_assignment)
            # The first rebalance is over: report its result, which the listener has missed.
            try:
                queues = await self.queues(topic)
            except BaseException:
                await self.unsubscribe(topic)
                raise
            own_queues = member.readers.queues_of_topic(topic)
            self._notify_assignment(topic, queues, sorted(own_queues))

    def _notify_assignment(
        self, topic: str, queues: list[MessageQueue], own_queues: list[MessageQueue]
    ) -> None:
        """Call `on_assignment_change` unless the consumer is closed."""
        if self.on_assignment_change is not None and not self._closing.has_started:
            call_listener(self.on_assignment_change, topic, queues, own_queues)

    async def unsubscribe(self, topic: str) -> None:
        """Stop reading a topic. Its queues go to the other members of the group.

        They also receive the messages that were polled and not committed. Does nothing for a topic
        that is not subscribed to.
        """
        if topic not in self._topics:
            return
        self._topics.remove(topic)
        if not self._topics:
            self._forget_member()
        await self._memberships.leave(self.group, topic)

    def _forget_member(self) -> None:
        """Detach this consumer from its `Member`, after its last topic. No request is sent."""
        member = self._member
        self._member = None
        if member is not None:
            member.assignment_listeners.remove(self._notify_assignment)

    async def assign(
        self, queues: Iterable[MessageQueue], *, tags: str | None = None, where: str | None = None
    ) -> None:
        """Read exactly `queues`, from the group's committed offsets on.

        A later call replaces the queues. `tags` or `where` selects messages, as in `subscribe`. The
        group's other members are not considered: assign each queue to one consumer only.

        Raises ConfigurationError if topics are subscribed to or an argument is invalid,
        FilterSyntaxError, ClosedError after `close`, and the errors of all methods (see the class).
        If it raises, or is cancelled before it reads all queues, the queues of the previous call
        stay assigned.
        """
        self._check_open()
        if self._member is not None:
            raise ConfigurationError("this consumer has subscribed to topics.", fix=_ONE_MODE_FIX)
        assigned_queues = set(queues)
        for queue in assigned_queues:
            check_queue(queue)
        readers = self._assigned_readers or self._make_readers()
        queues_before = readers.queues
        try:
            for queue in sorted(assigned_queues - queues_before):
                subscription = make_subscription(queue.topic, tags=tags, where=where)
                await readers.add(queue, subscription, self._buffer)
        except BaseException:  # stop reading the queues that were added before the error
            await run_to_end(self._remove_queues(readers, readers.queues - queues_before))
            if self._assigned_readers is None:
                await run_to_end(readers.close())
            raise
        if self._assigned_readers is None:
            self._assigned_readers = readers
            if self.options.auto_commit:
                self._tasks.supervise(readers.commit_forever, f"sluicemq commit {self.group}")
        if queues_before - assigned_queues:
            await run_to_end(self._remove_queues(readers, queues_before - assigned_queues))

    def _make_readers(self) -> Readers:
        """Return the object that will read the assigned queues; it has no queue yet."""
        dead_letter_sender = None
        if self.options.on_undecodable == DEAD_LETTER:
            dead_letter_sender = RetrySender(self._cluster, self.group, None)
        context = ReaderContext(
            self._cluster,
            self.group,
            self.options,
            is_lite_pull=True,
            dead_letter_sender=dead_letter_sender,
        )
        return Readers(context)

    async def _remove_queues(self, readers: Readers, queues: Iterable[MessageQueue]) -> None:
        """Stop reading some of the assigned queues."""
        for queue in sorted(queues):
            await readers.remove(queue)

    @property
    def assignment(self) -> list[MessageQueue]:
        """The queues that are read now, sorted.

        Reading it raises ConfigurationError before `subscribe` or `assign`.
        """
        return sorted(self._readers.queues)

    async def poll(
        self, timeout_s: float | None = POLL_TIMEOUT_S, *, count_max: int = 32
    ) -> list[ReceivedMessage]:
        """Return new messages, and acknowledge those that earlier polls returned.

        Wait up to `timeout_s` seconds (5) for the first message; None waits without limit, and 0
        returns only what was fetched already. Return a list of up to `count_max` messages (32),
        empty if no message came in time.

        Raises ConfigurationError if an argument is invalid, UndecodableBodyError with
        `on_undecodable="raise"`, and the error that ended the reading, such as GroupNotFoundError
        or PermissionDeniedError.
        """
        check_number("count_max", count_max, 1)
        if timeout_s is not None:
            check_number("timeout_s", timeout_s, 0, whole=False)
        self._cluster.affinity.check_loop()
        self._ack_polled()
        messages: list[ReceivedMessage] = []
        try:
            async with asyncio.timeout(timeout_s):
                messages.append(await self._buffer.get(self))
        except TimeoutError:
            return []
        self._buffer.fill(messages, count_max, self)
        return messages

    def put_back(self, messages: list[ReceivedMessage]) -> None:
        """Let the next poll return these messages of the last poll again, before any other.

        The next poll does not acknowledge them.
        """
        self._buffer.put_back([message for message in messages if message.is_current])

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Acknowledge all polled messages and commit their offsets.

        Return when the brokers have stored the offsets. With `offsets`, commit exactly these and
        acknowledge nothing; a later automatic commit overwrites them. Raises SluiceError if a
        broker did not store an offset; the next commit tries again.
        """
        if offsets is None:
            self._ack_polled()
            await self._readers.commit(must_succeed=True)
        else:
            await self._readers.commit_offsets(offsets)

    def commit_soon(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Start `commit` and return at once, like Java's commitAsync. Errors are logged."""
        if offsets is None:
            self._ack_polled()
            self._tasks.spawn(self._readers.commit(), f"sluicemq commit {self.group}")
        else:
            self._tasks.spawn(
                self._readers.commit_offsets(offsets), f"sluicemq commit {self.group}"
            )

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Stop fetching from `queues` and returning their messages, until `resume`.

        The queues stay assigned to this consumer.
        """
        for queue in queues:
            self._buffer.pause_queue(queue)
            self._update_paused(queue)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Continue with paused `queues` where they were paused."""
        for queue in queues:
            self._buffer.resume_queue(queue)
            self._update_paused(queue)

    def _update_paused(self, queue: MessageQueue) -> None:
        """Stop or resume the pulls of a queue, depending on whether it is paused now.

        Does nothing if this consumer does not read the queue.
        """
        reader = self._readers.get(queue) if self.is_running else None
        if reader is not None:
            reader.set_paused(is_paused=queue in self._buffer.paused_queues)

    @property
    def undecodable_count(self) -> int:
        """The number of messages with an undecodable body since this client joined the group."""
        return self._readers.undecodable_count if self.is_running else 0

    @property
    def paused(self) -> list[MessageQueue]:
        """The paused queues, sorted."""
        return sorted(self._buffer.paused_queues)

    def _ack_polled(self) -> None:
        """Acknowledge all messages that earlier polls returned."""
        if self.is_running:
            for message in self._readers.messages_handed_to(self):
                message.ack_nowait()

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on reading a queue at `offset`: the next poll returns messages from there on.

        Raises ConfigurationError if this consumer does not read the queue, or `offset` is not from
        the first offset to the end of the queue.
        """
        self._get_reader(queue)
        offset_min, offset_max = await self._cluster.offsets(queue)
        if not offset_min <= offset <= offset_max:
            raise ConfigurationError(
                f"{queue} has the offsets {offset_min} to {offset_max}, and {offset} is outside.",
                fix="Use an offset within them, or seek_to_begin or seek_to_end.",
            )
        self._get_reader(queue).move_to(offset)

    async def _seek(
        self, queue: MessageQueue, find: Callable[[MessageQueue], Awaitable[int]]
    ) -> None:
        """Continue a queue at the offset that `await find(queue)` returns.

        Raises ConfigurationError, without calling `find`, if this consumer does not read the queue,
        and what `find` raises.
        """
        self._get_reader(queue)  # checks the queue before a broker is asked
        offset = await find(queue)
        self._get_reader(queue).move_to(offset)

    def _get_reader(self, queue: MessageQueue) -> QueueReader:
        """Return the reader of a queue.

        Raises ConfigurationError if this consumer does not read the queue.
        """
        reader = self._readers.get(queue)
        if reader is None:
            raise ConfigurationError(
                f"this consumer does not read {queue}.",
                fix="Use a queue of `assignment` (after subscribe, wait for the first poll).",
            )
        return reader

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        """Continue a queue at its oldest stored message.

        Raises ConfigurationError as `seek` does.
        """
        await self._seek(queue, self._cluster.offset_min)

    async def seek_to_end(self, queue: MessageQueue) -> None:
        """Continue a queue with messages that are stored from now on.

        Raises ConfigurationError as `seek` does.
        """
        await self._seek(queue, self._cluster.offset_max)

    async def seek_to_time(self, queue: MessageQueue, time_ms: int) -> None:
        """Continue a queue with the messages stored at or after `time_ms`.

        `time_ms` is in milliseconds since 1970. Raises ConfigurationError as `seek` does.
        """
        await self._seek(queue, lambda queue: self._cluster.offset_by_time(queue, time_ms))

    async def offset_for_time(self, queue: MessageQueue, time_ms: int) -> int:
        """Return the offset of the first message stored at or after `time_ms`.

        `time_ms` is in milliseconds since 1970.
        """
        return await self._cluster.offset_by_time(queue, time_ms)

    async def committed(self, queue: MessageQueue) -> int | None:
        """Return the offset of the queue that the group has committed, or None if there is none.

        Raises ConfigurationError before `subscribe` or `assign`.
        """
        return (await self._readers.find_start_offset(queue))[1]

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues of a topic that can be read, sorted. Pass some of them to `assign`."""
        return await self._cluster.queues(topic)

    def watch_queues(
        self, topic: str, listener: QueuesListener, *, period_s: float = WATCH_PERIOD_S
    ) -> None:
        """Call `listener(topic, queues)` whenever the queues of a topic have changed.

        This is for programs that `assign` queues. The queues are fetched every `period_s` seconds
        (30); the first time they are only remembered. All listeners of a topic use the period of
        its first call.
        """
        listeners = self._watched.setdefault(topic, [])
        listeners.append(listener)

        async def watch() -> None:
            """Call the listeners whenever the queues differ from those of the last look."""
            last_queues: list[MessageQueue] | None = None
            while True:
                try:
                    self._cluster.routes.expire(topic)
                    queues = await self.queues(topic)
                except SluiceError as error:
                    _log.debug("queues of %s: %s", topic, error)
                else:
                    if last_queues is not None and queues != last_queues:
                        for queues_listener in tuple(listeners):
                            notify(queues_listener, topic, list(queues))
                    last_queues = queues
                await asyncio.sleep(period_s)

        if len(listeners) == 1:
            self._tasks.supervise(watch, f"sluicemq queues of {topic}")

    @property
    def _readers(self) -> Readers:
        """The readers of the subscribed topics or assigned queues.

        Reading it raises ConfigurationError before `subscribe` or `assign`.
        """
        if self._member is not None:
            return self._member.readers
        if self._assigned_readers is not None:
            return self._assigned_readers
        raise ConfigurationError(
            "this consumer reads no queues.", fix="Call subscribe or assign first."
        )

    async def close(self) -> None:
        """Commit the messages of earlier polls and leave the group.

        Offsets are only committed if automatic commits are on. The messages of the last poll were
        not acknowledged, so they are delivered again. If the caller is cancelled, the group is left
        before CancelledError is raised. Raises ConfigurationError in another event loop or process.
        """
        self._cluster.affinity.check_loop()
        await self._closing.run(self._close)

    async def _close(self) -> None:
        """Stop the background tasks, leave the group and stop reading assigned queues.

        Leaving commits the offsets if automatic commits are on. `close` calls this once.
        """
        await self._tasks.close()
        self._forget_member()
        while self._topics:
            await self._memberships.leave(self.group, self._topics.pop())
        if self._assigned_readers is not None:
            await self._assigned_readers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = f"{len(self.assignment)} queues" if self.is_running else "reads nothing"
        return f"<LitePullConsumer of {self.group}: {', '.join(self._topics) or '-'}, {state}>"
