"""The readers of a group in this process: they pull, commit what is acknowledged, send back.

A `QueueReader` is a task that pulls, hands messages to a feed and pauses while `count_max` messages
or `bytes_max` bytes are not acknowledged. When the position is moved from outside (seek, reset, an
offset that is not stored any more), acknowledgements of what was pulled before no longer count.

A topic that is deleted and created again is noticed by messages that the reader has seen
(`core.identity`). The reader then begins at the first message, whatever `start` says.

A message that is rejected is sent back for the group, so that it comes again later. When a call
returns the copy is stored: only then the original may count as done.

    36 at the broker that has the message
     └─ fails: the copy is sent by this client to %RETRY%group, at any broker that takes it
         └─ fails: SluiceError, and the message is still the consumer's
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.offsets import BrokerOffsets, GroupOffsets
from sluicemq.client.aio.placing import MovableReader
from sluicemq.client.aio.received import Feed, ReceivedMessage, RetrySink
from sluicemq.client.core import requests
from sluicemq.client.core.consuming import (
    DEAD_LETTER_LEVEL,
    DELIVER,
    LONG_POLL_GRACE_S,
    RAISE,
    ConsumeOptions,
    InFlight,
    TopicConsumeStats,
    local_retry_delay_s,
    make_exact_matcher,
    make_retry_message,
    original_topic,
    pull_pause_s,
    retry_count,
)
from sluicemq.client.core.identity import QueueIdentity, make_anchor
from sluicemq.client.core.requests import (
    FLOW_CONTROL,
    GROUP_NOT_EXIST,
    SUBSCRIPTION_PARSE_FAILED,
    SUBSCRIPTION_PENDING,
    PullResponse,
    PullStatus,
)
from sluicemq.client.core.sending import Sender
from sluicemq.client.tasks import SupervisedTask, Tasks, run_to_end
from sluicemq.errors import (
    GroupNotFoundError,
    ProtocolError,
    RequestError,
    SluiceError,
    UndecodableBodyError,
)
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.system_names import INNER_PRODUCER_GROUP
from sluicemq.model.topic import MASTER_ID, RETRY_PREFIX, MessageQueue
from sluicemq.model.trace_records import ConsumeOutcome
from sluicemq.record.codec import split_records

_log = logging.getLogger("sluicemq.client")
Sink = Feed | RetrySink
"""Where a reader puts what it pulled."""


class SendBack:
    """The failures of one group. `times_max`: None leaves it to the broker."""

    def __init__(self, cluster: Cluster, group: str, times_max: int | None) -> None:
        self._cluster = cluster
        self._group = group
        self._times_max = times_max
        self._sender = Sender(
            cluster.directory, INNER_PRODUCER_GROUP, str, first_queue=cluster.first_queue
        )

    async def send_back(self, record: StoredMessage, level: int) -> None:
        """A copy comes again after `level`, or is a dead letter. Raises SluiceError."""
        queue = MessageQueue(record.topic, record.broker, record.queue_id)
        command = requests.send_back(
            self._group, record, original_topic(record), level, self._times_max
        )
        own = f"sending back for {self._group}"
        try:
            await self._cluster.ask_master(queue, command)
            self._cluster.directory.log_recovery(queue, own)
        except SluiceError as error:
            self._cluster.directory.log_failure(
                error, queue, own,
                "group %s: message %s cannot be sent back (%s); sending a copy to the retry topic",
                self._group, record.message_id, error.fact,
            )  # fmt: skip
            await self.send_copy(record, retry_count(record), level)

    async def send_copy(self, record: StoredMessage, times: int, level: int) -> None:
        """The same without 36; `times` says how often it has come again. Raises SluiceError."""
        outgoing = make_retry_message(record, self._group, times, level, self._times_max)
        await self._cluster.run(self._sender.send_outgoing(outgoing))


_FATAL: Final = frozenset({16, SUBSCRIPTION_PARSE_FAILED, GROUP_NOT_EXIST})
_STUCK_S: Final = 60.0
COUNT_STEP: Final = 64


@dataclass(frozen=True, slots=True)
class Reading:
    """What the readers of a group share.

    `on_pending` is called when a broker does not know the subscription yet; `filtered_here`: the
    expression travels with each pull; without `send_back` what is rejected is dropped.
    `dead_letters` takes undecodable messages when the options say so.
    """

    cluster: Cluster
    group: str
    options: ConsumeOptions
    on_pending: Callable[[], None] = lambda: None
    filtered_here: bool = False
    send_back: SendBack | None = None
    dead_letters: SendBack | None = None


class QueueReader(MovableReader):
    """Reads one queue for one group.

    `in_flight` has every message that is pulled and not acknowledged; when the queue is lost or its
    position is moved there is another one, and messages of the former do not count any more. `out`
    are the messages that the application has, of whichever; nobody else notes that.
    """

    def __init__(
        self,
        reading: Reading,
        queue: MessageQueue,
        subscription: Subscription,
        feed: Sink,
        position: int,
        committed: int | None = None,
    ) -> None:
        super().__init__()
        self.group: str = reading.group
        self.queue = queue
        self._name = f"the pull of {queue} for {reading.group}"
        self.subscription: Subscription = subscription
        self.feed = feed
        self.in_flight: InFlight = InFlight(position)
        self.committed = committed
        self.out: set[ReceivedMessage] = set()
        self.counts: TopicConsumeStats = TopicConsumeStats()
        self.pulled_s: float = 0.0
        self._replica_id = MASTER_ID
        """Where the last answer said to ask next: at the master, or at a slave that has the queue
        while the master is busy reading what is old."""
        self._is_at_master = True
        self._cluster = reading.cluster
        self._reading = reading
        self._options = reading.options
        self._limits = reading.options.queue_limits(1)
        self._span_max = None if reading.options.ordered else reading.options.span_max
        self._is_paused = False
        self._is_held = False
        self._room = asyncio.Event()
        """Set while more may be pulled."""
        self._room.set()
        self._waiting: asyncio.Timeout | None = None
        self.screens: bool = reading.options.on_undecodable != DELIVER
        self.tasks: Tasks = Tasks()
        """Owns the tasks that send undecodable messages to the dead letters."""

    # ------------------------------------------------------------------- from consumers

    @property
    def may_hand_out(self) -> bool:
        """Is the queue ours, and to stay?"""
        return True

    @property
    def may_commit(self) -> bool:
        """Whether what is acknowledged here may become the group's offset."""
        return True

    def taken(self, messages: list[ReceivedMessage], owner: object) -> None:
        """Messages are handed to the application. HOT."""
        trace, in_flight, out = self._cluster.trace, self.in_flight, self.out
        now_s = self._cluster.clock.monotonic_s()
        for message in messages:
            if message.in_flight is in_flight:
                message.owner, message.since_s = owner, now_s
                if trace is not None:
                    message.delivery = trace.start_delivery(self.group, message.record)
                out.add(message)

    def finished(self, message: ReceivedMessage, outcome: ConsumeOutcome) -> None:
        """How the application dealt with a message that is out; the first word counts."""
        if message in self.out and message.delivery is not None:
            message.delivery.finish(outcome)
            message.delivery = None

    def returned(self, message: ReceivedMessage, *, failed: bool = False) -> None:
        """The application does not have it any more, and is not done with it."""
        if message in self.out:
            self.out.remove(message)
            if failed:
                now_s = self._cluster.clock.monotonic_s()
                self.counts.record_failure(now_s, now_s - message.since_s)

    def release(self, owner: object) -> None:
        """An owner is gone: what it had is not out any more."""
        for message in tuple(self.out):
            if message.owner is owner:
                self.returned(message)

    def screen(self, message: ReceivedMessage) -> bool:
        """Return whether the application may have `message`, which is first in line.

        Raises UndecodableBodyError for an undecodable one with on_undecodable="raise". With
        "dead_letter" it is out at once, in the hands of a task that stores it as a dead letter, and
        the answer is False.
        """
        error = message.body_error if message.is_current else None
        if error is None:
            return True
        if self._options.on_undecodable == RAISE:
            raise error
        self.taken([message], self)
        self.tasks.spawn(self._store_dead_letter(message), f"sluicemq dead letter {message}")
        return False

    async def _store_dead_letter(self, message: ReceivedMessage) -> None:
        """Send an undecodable message to the dead letters until a broker has taken it; then it is
        done. Ends without that when the message does not count here any more."""
        assert self._reading.dead_letters is not None
        message.finished(ConsumeOutcome.FAILED)
        while message.is_current:
            try:
                await self._reading.dead_letters.send_back(message.record, DEAD_LETTER_LEVEL)
            except SluiceError as error:
                delay_s = local_retry_delay_s(message.attempt)
                message.attempt += 1
                _log.warning(
                    "group %s: %s could not be stored as a dead letter, will try again in %g s: %s",
                    self.group, message, delay_s, error,
                )  # fmt: skip
                await asyncio.sleep(delay_s)
            else:
                self.returned(message, failed=True)
                self.ack(message)
                return
        self.returned(message)

    def undecodable(self, message: ReceivedMessage, error: UndecodableBodyError) -> None:
        """Count and log a message whose body cannot be decoded. May be called from any thread."""
        count = self.counts.record_undecodable(str(error))
        if not count & (count - 1):  # 1, 2, 4, 8 … of a topic
            _log.warning(
                "group %s: %s (undecodable messages of %s so far: %d; on_undecodable=%r)",
                self.group, error, self.queue.topic, count, self._options.on_undecodable,
            )  # fmt: skip

    def ack(self, message: ReceivedMessage) -> bool:
        """A message is done. False when it does not count any more."""
        return self.done([message]) > 0

    def done(self, messages: list[ReceivedMessage]) -> int:
        """Several are: so many of them counted. HOT."""
        out, in_flight, counted, were_out, since_s = self.out, self.in_flight, 0, 0, 0.0
        for message in messages:
            if message in out:
                out.remove(message)
                were_out += 1
                since_s += message.since_s
                if message.delivery is not None:
                    message.delivery.finish(ConsumeOutcome.SUCCESS)
            if message.in_flight is in_flight:
                counted += in_flight.ack(message.queue_offset)
        if were_out:
            now_s = self._cluster.clock.monotonic_s()
            self.counts.record_acks(now_s, were_out * now_s - since_s, were_out)
        if not self._room.is_set():
            self._look_for_room()
        return counted

    async def reject(
        self, message: ReceivedMessage, delay_level: int | None, suspend_s: float | None
    ) -> bool:
        """A message is not done: a copy comes again, and this one is. Raises SluiceError."""
        del suspend_s
        if not message.is_current:
            return False
        if self._reading.send_back is None:
            _log.warning("%s is rejected and dropped: this consumer has no retries", message)
        else:
            level = self._options.retry.delay_level if delay_level is None else delay_level
            await self._reading.send_back.send_back(message.record, level)
        self.returned(message, failed=True)
        return self.ack(message)

    async def reply(self, record: StoredMessage, body: bytes, message_id: str) -> object:
        """Answers a message that asks for a reply. Raises SluiceError."""
        return await self._cluster.send_reply(record, body, message_id)

    def move(self, position: int) -> None:
        """Goes on from `position`; what was handed out before no longer counts."""
        self.drop(position)
        self._look_for_room()
        self._interrupt()

    def limit(self, count_max: int, bytes_max: int) -> None:
        """How much of this queue may be unacknowledged."""
        self._limits = count_max, bytes_max
        self._look_for_room()

    def hold(self, *, is_held: bool) -> None:
        """Begins no pull while its group finds out whose queue it is. One that is under way counts
        for nothing: it may be answered for the next subscription, and be read by this one."""
        self._is_held = is_held
        if is_held:
            self._interrupt()
        self._look_for_room()

    def warn(self) -> None:
        """Another reader has found that the topic was deleted and created again: look at once
        whether this queue is still the same."""
        self.is_warned: bool = True
        self.identity.is_suspect = bool(self.identity.proven)
        self._interrupt()

    def pause(self, *, is_paused: bool) -> None:
        """Fetches nothing more, or goes on."""
        self._is_paused = is_paused
        self._look_for_room()

    def _look_for_room(self) -> None:
        is_stopped = self._is_paused or self._is_held
        if not is_stopped and self.in_flight.has_room(*self._limits, self._span_max):
            self._room.set()
        else:
            self._room.clear()

    def change(self, subscription: Subscription) -> None:
        """Reads with another expression: what is being pulled, and what waits to be handed out, is
        pulled again. It does not count as done: where members want different things it is somebody
        else's now. What waits before a message that was handed out cannot be pulled again; that
        counts as done when it does not match."""
        self.subscription = subscription
        matches = make_exact_matcher(subscription)
        waiting: set[int] = set()

        def note(message: ReceivedMessage) -> bool:
            if message.origin is self:
                waiting.add(message.queue_offset)
            return False

        self.feed.discard(note)
        again = self.in_flight.rewind(waiting)

        def unwanted(message: ReceivedMessage) -> bool:
            if message.origin is not self:
                return False
            if message.queue_offset in again:
                return True
            if matches(message.record):
                return False
            self.in_flight.ack(message.queue_offset)
            return True

        self.feed.discard(unwanted)
        self._look_for_room()
        self._interrupt()

    def _interrupt(self) -> None:
        """A long poll that asks for something else would hold us up for 15 s."""
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())

    def drop(self, position: int) -> None:
        """What was pulled counts no more, nor do its acknowledgements: the queue is not ours any
        more, or is read from another position."""
        self.in_flight = InFlight(position)
        self.feed.discard(lambda message: message.origin is self)

    # -------------------------------------------------------------------------- pulling

    async def run(self) -> None:
        """Pulls until cancelled, or until an error that no repetition heals ends the feed."""
        failures = 0
        while True:
            if not self._room.is_set():
                await self._wait_for_room()
            in_flight, subscription = self.in_flight, self.subscription

            def is_wanted(
                before: InFlight = in_flight, wanted: Subscription = subscription
            ) -> bool:
                return before is self.in_flight and wanted is self.subscription

            try:
                if not await self._check_queue():
                    continue
                answer = await self._pull()
                if answer is not None and is_wanted():
                    may_take = await self._check_answer(answer)
                    if may_take and is_wanted():
                        self._take(answer)
                if self._cluster.directory.outages.current:
                    self._cluster.directory.log_recovery(self.queue, self._name)
                failures = 0
            except SluiceError as error:
                self.identity.is_suspect = True
                code = error.code if isinstance(error, RequestError) else None
                if code in _FATAL or isinstance(error, ProtocolError):
                    self.feed.fail(error)
                    return
                failures += 1
                await self._pause(error, code, failures)

    async def _pause(self, error: SluiceError, code: int | None, failures: int) -> None:
        """Before the next try; `code` None: the broker did not answer."""
        if code == FLOW_CONTROL:
            await asyncio.sleep(0.02)
            return
        if code is None or not self._is_at_master:
            self._replica_id = MASTER_ID
            self._cluster.routes.expire(self.queue.topic)
        if code in SUBSCRIPTION_PENDING:
            self._reading.on_pending()
        else:
            self._cluster.directory.log_failure(
                error, self.queue, self._name,
                "pull of %s for %s failed, will try again: %s", self.queue, self.group, error,
            )  # fmt: skip
        await asyncio.sleep(pull_pause_s(failures))

    async def _wait_for_room(self) -> None:
        while not self._room.is_set():
            try:
                async with asyncio.timeout(_STUCK_S):
                    await self._room.wait()
            except TimeoutError:
                if self._is_paused or self._is_held:
                    continue
                _log.warning(
                    "%d messages (%d bytes) of %s are unacknowledged in group %s and none was "
                    "acknowledged for %d s: nothing more is fetched. Call await message.ack().",
                    self.in_flight.count,
                    self.in_flight.size_bytes,
                    self.queue,
                    self.group,
                    _STUCK_S,
                )

    async def _pull(self) -> PullResponse | None:
        """The answer to a pull, None when the position was moved meanwhile. HOT."""
        in_flight, poll_s, options = self.in_flight, self._cluster.poll_s, self._options
        masters = self._cluster.routes.master_addresses.get(self.queue.topic)
        self._is_at_master = self._replica_id == MASTER_ID and (
            not masters or self.queue.broker in masters
        )
        may_commit = (
            options.auto_commit
            and self.may_commit
            and not options.broadcast
            and self._is_at_master  # a slave's offsets are the master's
        )
        commit = in_flight.committable if may_commit else 0
        room = max(1, self._limits[0] - in_flight.count)
        if room > COUNT_STEP:  # few different requests: the broker keeps a plan for each
            room -= room % COUNT_STEP
        command = requests.pull(
            self.group,
            self.queue,
            in_flight.position,
            count_max=min(options.pull_count, room),
            subscription=self.subscription if self._reading.filtered_here else None,
            sub_version=self.subscription.version,
            expression_kind=self.subscription.kind,
            suspend_timeout_ms=int(poll_s * 1000),
            commit_offset=commit or None,
            lite=self._reading.filtered_here,
            any_span=self._span_max is None,
        )
        talk = self._cluster.directory.pull(
            self.queue, command, poll_s + LONG_POLL_GRACE_S, self._replica_id
        )
        try:
            async with asyncio.timeout(None) as self._waiting:
                answer = await self._cluster.run(talk)
        except TimeoutError:
            return None
        finally:
            self._waiting = None
        self.pulled_s = self._cluster.clock.monotonic_s()
        self._replica_id = answer.suggested_broker_id
        return answer

    def _take(self, answer: PullResponse) -> None:
        if answer.status is PullStatus.OFFSET_ILLEGAL:
            self._follow_refusal(answer)
            return
        in_flight, tags = self.in_flight, self.subscription.tags
        found = split_records(  # the broker goes by codes
            answer.data, self.queue.broker, tags, self._options.body_bytes_max
        )
        if found:
            self.identity.add_anchor(make_anchor(found[-1][2]), found[-1][1], self.pulled_s)
        in_flight.add([(offset, size) for offset, size, _ in found], answer.next_offset)
        self._look_for_room()
        if found:
            self.counts.record_pull(self.pulled_s, len(found))
            self.feed.put(
                [ReceivedMessage(record, self, in_flight, offset) for offset, _, record in found]
            )


class Readers:
    """Which queues are read here, from where, and up to where they are committed."""

    def __init__(self, reading: Reading) -> None:
        self.options: ConsumeOptions = reading.options
        self._kind: Callable[..., QueueReader] = QueueReader
        self._reading = reading
        self._cluster = cluster = reading.cluster
        self._group = reading.group
        self._offsets: GroupOffsets = (
            cluster.offset_files.of(reading.group)
            if reading.options.broadcast
            else BrokerOffsets(cluster, reading.group)
        )
        self.expected: dict[str, int] = {}
        """How many queues of a topic will be read here: their limits are shared out by it."""
        self._recreations: Counter[str] = Counter()
        """How often a topic was found to be created again."""
        self._known: dict[MessageQueue, tuple[QueueIdentity, int]] = {}
        """Of queues that were read here before: what is known of them, and how often their topics
        had been created again by then."""
        self._readers: dict[MessageQueue, QueueReader] = {}
        self._running: dict[MessageQueue, SupervisedTask] = {}
        self.counts: dict[str, TopicConsumeStats] = {}
        """What was done lately, by topic."""
        self.on_recreated: Callable[[str], None] = lambda topic: None
        """Called with a topic that was deleted and created again, once for each time."""
        self._tasks = Tasks()

    @property
    def queues(self) -> set[MessageQueue]:
        """The queues read here now."""
        return set(self._readers)

    def of_topic(self, topic: str) -> set[MessageQueue]:
        """Those of them that are of a topic."""
        return {queue for queue in self._readers if queue.topic == topic}

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
        reader = self._kind(self._reading, queue, subscription, feed, position, committed)
        reader.counts = self.counts.setdefault(queue.topic, TopicConsumeStats())
        identity, recreations = self._known.pop(queue, (None, 0))
        reader.is_warned = identity is not None and self._recreations[queue.topic] > recreations
        reader.identity = QueueIdentity(
            identity.proven if identity else self._offsets.anchors(queue)
        )
        reader.on_recreated = partial(self._recreated, reader)
        reader.tasks = self._tasks
        if committed is None and self.options.auto_commit:
            # Said at once: a crash before the first commit must not move a group that began at
            # "last" past what came meanwhile.
            await self._commit(reader, position)
            if queue in self._readers:
                return True
        # Nothing is awaited from here on: a reader is in both tables or in none.
        self._running[queue] = self._tasks.supervise(reader.run, f"sluicemq read {queue}")
        self._readers[queue] = reader
        self._share_limits(queue.topic)
        return True

    def _recreated(self, reader: QueueReader, old: int, why: str) -> None:
        """A reader has found that its topic was deleted and created again. Say so once for each
        topic, have the other readers of the topic look at once, and commit the new position before
        a crash could leave the group at the old one."""
        queue, topic = reader.queue, reader.queue.topic
        if not reader.is_warned:
            _log.warning(
                "the topic %s was %s: group %s, which was at offset %d of %s, reads it from its "
                "beginning", topic, why, self._group, old, queue,
            )  # fmt: skip
            self._recreations[topic] += 1
            for other in self.all():
                if other is not reader and other.queue.topic == topic:
                    other.warn()
            self.on_recreated(topic)
        reader.is_warned = False
        if self.options.auto_commit:
            self._tasks.spawn(
                self._commit_now(reader, reader.in_flight.committable), f"sluicemq commit {queue}"
            )

    async def _commit_now(self, reader: QueueReader, offset: int) -> None:
        await self._commit(reader, offset)
        await self._offsets.flush()

    @property
    def undecodable(self) -> int:
        """How many messages had a body that could not be decoded, of all topics."""
        return sum(counts.undecodable_count for counts in self.counts.values())

    def all(self) -> list[QueueReader]:
        """Every reader that may still commit."""
        return list(self._readers.values())

    def out_of(self, owner: object) -> list[ReceivedMessage]:
        """The messages that an owner has taken and is not done with, by offset."""
        found = [message for reader in self.all() for message in reader.out]
        messages = [one for one in found if one.owner is owner and one.is_current]
        return sorted(messages, key=lambda message: message.queue_offset)

    def _share_limits(self, topic: str) -> None:
        """What a topic may hold is shared by those of its queues that are read here."""
        readers = [reader for queue, reader in self._readers.items() if queue.topic == topic]
        for reader in readers:
            reader.limit(*self.options.queue_limits(max(len(readers), self.expected.get(topic, 0))))

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
        start_ms, begin = self.options.start_ms, self._cluster.offset_min
        if not is_new and not queue.topic.startswith(RETRY_PREFIX):
            if start_ms is not None:
                return await self._cluster.offset_by_time(queue, start_ms), None
            if self.options.start == "last":
                begin = self._cluster.offset_max
        return await begin(queue), None

    async def drop(self, queue: MessageQueue) -> None:
        """Stops reading a queue and commits how far it got."""
        reader, task = self._readers.pop(queue), self._running.pop(queue)
        task.cancel()
        self._known[queue] = reader.identity, self._recreations[queue.topic]
        offset = reader.in_flight.committable
        reader.drop(offset)
        self._share_limits(queue.topic)
        if self.options.auto_commit:
            await self._commit(reader, offset)
            await self._offsets.flush()

    async def reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        """An operator sends the group to other places (220): the queues that are read here go on
        there, and say so to the broker. What was pulled before does not count any more; commits of
        it that are under way arrive before the new ones, on the same connection."""
        for reader in [one for one in self.all() if one.queue in offsets]:
            _log.warning(
                "group %s was reset on %s from offset %d to %d",
                self._group, reader.queue, reader.in_flight.position, offsets[reader.queue],
            )  # fmt: skip
            reader.move(offsets[reader.queue])
            reader.committed = None
        await self.commit()

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

            async def in_turn(readers: list[QueueReader]) -> list[SluiceError | None]:
                return [await self._commit(one, one.in_flight.committable) for one in readers]

            found = await asyncio.gather(*map(in_turn, by_broker.values()))
            errors = [error for some in found for error in some if error is not None]
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

    async def _commit(self, reader: QueueReader, offset: int) -> SluiceError | None:
        """What went wrong, which is logged."""
        if offset == reader.committed or not reader.may_commit:
            return None
        own = f"committing for {self._group}"
        try:
            await self._offsets.write(reader.queue, offset, reader.identity.newest)
            reader.committed = offset
            self._cluster.directory.log_recovery(reader.queue, own)
        except GroupNotFoundError as error:
            _log.debug("commit for %s: %s", self._group, error)  # its pulls will say it aloud
            return error
        except SluiceError as error:
            self._cluster.directory.log_failure(
                error, reader.queue, own,
                "commit of offset %d of %s for %s failed: %s",
                offset, reader.queue, self._group, error,
            )  # fmt: skip
            return error
        return None

    async def commit_forever(self) -> None:
        """Commits every `commit_period_s`."""
        while True:
            await asyncio.sleep(self.options.commit_period_s)
            await self.commit()

    async def close(self) -> None:
        """Stop all readers and commit their offsets (when that is automatic)."""
        for task in self._running.values():
            task.cancel()
        try:
            with contextlib.suppress(SluiceError):
                for queue in list(self._readers):
                    await self.drop(queue)
        finally:
            await run_to_end(self._close_files())

    async def _close_files(self) -> None:
        await self._tasks.close()
        await self._offsets.close()
