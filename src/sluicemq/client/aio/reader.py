"""The reader of one queue: pulls ahead within its limits, knows what is unacknowledged.

A reader is a task that pulls, hands messages to a feed and pauses while `count_max` messages or
`bytes_max` bytes are not acknowledged. When the position is moved from outside (seek, reset, an
offset that is not stored any more) a new generation begins: acknowledgements of older messages no
longer count.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.received import ReceivedMessage, Sink
from sluicemq.client.aio.replies import send_reply
from sluicemq.client.aio.sendback import SendBack
from sluicemq.client.core import requests
from sluicemq.client.core.activity import Counts
from sluicemq.client.core.answers import (
    FLOW_CONTROL,
    GROUP_NOT_EXIST,
    SUBSCRIPTION_PARSE_FAILED,
    SUBSCRIPTION_PENDING,
    PullAnswer,
    PullStatus,
    pull_answer,
)
from sluicemq.client.core.consuming import (
    ANSWER_TIMEOUT_S,
    ConsumeOptions,
    OffsetMoved,
    pause_s,
)
from sluicemq.client.core.inflight import InFlight
from sluicemq.client.core.subscriptions import exact_match
from sluicemq.client.core.tracing import Delivery
from sluicemq.errors import ProtocolError, RequestError, SluiceError
from sluicemq.filter.tags import tag_matches
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_records

_log = logging.getLogger("sluicemq.client")
_FATAL: Final = frozenset({16, SUBSCRIPTION_PARSE_FAILED, GROUP_NOT_EXIST})
_STUCK_S: Final = 60.0
OFFSET_RESET: Final = "OFFSET_RESET"
"""A 21 with this remark: an operator has sent the group to another place."""


class QueueReader:
    """Reads one queue for one group. `filtered_here`: the expression travels with each pull."""

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        queue: MessageQueue,
        subscription: Subscription,
        position: int,
        *,
        options: ConsumeOptions,
        feed: Sink,
        on_pending: Callable[[], None] = lambda: None,
        filtered_here: bool = False,
        committed: int | None = None,
        send_back: SendBack | None = None,
    ) -> None:
        self.queue = queue
        self.subscription = subscription
        self.feed = feed
        self.in_flight = InFlight(position)
        self.committed = committed
        self._cluster = cluster
        self._group = group
        self._options = options
        self._send_back = send_back
        self._on_pending = on_pending
        self._filtered_here = filtered_here
        self._generation = 0
        self._dropped = False
        self.counts = Counts()
        self.pulled_s = 0.0
        self.out: dict[tuple[int, int], tuple[float, StoredMessage]] = {}
        """What the application has: (generation, offset) -> since when (s), and the message."""
        self._limits = options.limits(1)
        self._is_paused = False
        self._is_held = False
        self._room = asyncio.Event()
        self._waiting: asyncio.Timeout | None = None

    # ------------------------------------------------------------------- from consumers

    @property
    def group(self) -> str:
        """The consumer group it reads for."""
        return self._group

    def ack(self, generation: int, offset: int) -> bool:
        """A message is done. False when it does not count any more."""
        out = self.out.pop((generation, offset), None)
        if out is not None:
            now_s = self._cluster.clock.monotonic_s()
            self.counts.done(now_s, now_s - out[0])
        if generation != self._generation or self._dropped:
            return False
        counted = self.in_flight.ack(offset)
        self._look_for_room()
        return counted

    async def reject(
        self, message: ReceivedMessage, delay_level: int | None, suspend_s: float | None
    ) -> bool:
        """A message is not done: a copy comes again, and this one is. Raises SluiceError."""
        del suspend_s
        if not message.is_current:
            return False
        if self._send_back is None:
            _log.warning("%s is rejected and dropped: this consumer has no retries", message)
        else:
            level = self._options.retry.level if delay_level is None else delay_level
            await self._send_back.send_back(message.record, level)
        self.given_back(message)
        return self.ack(message.generation, message.queue_offset)

    def given_back(self, message: ReceivedMessage) -> None:
        """The application does not have it any more, and is not done with it."""
        out = self.out.pop((message.generation, message.queue_offset), None)
        if out is not None:
            now_s = self._cluster.clock.monotonic_s()
            self.counts.failed(now_s, now_s - out[0])

    async def reply(self, record: StoredMessage, body: bytes, message_id: str) -> object:
        """Answers a message that asks for a reply. Raises SluiceError."""
        return await send_reply(self._cluster, record, body, message_id)

    @property
    def may_commit(self) -> bool:
        """Whether what is acknowledged here may become the group's offset."""
        return True

    def taken(self, record: StoredMessage) -> Delivery | None:
        """A message is handed to the application."""
        key = (self._generation, record.queue_offset)
        self.out[key] = (self._cluster.clock.monotonic_s(), record)
        trace = self._cluster.trace
        return None if trace is None else trace.taken(self._group, record)

    def owns(self, generation: int) -> bool:
        """Whether messages of that generation still count."""
        return generation == self._generation and not self._dropped

    def move(self, position: int) -> None:
        """Goes on from `position`; what was handed out before no longer counts."""
        self._generation += 1
        self.in_flight = InFlight(position)
        self.feed.discard(lambda message: message.is_from(self))
        self._room.set()
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

    def pause(self, *, is_paused: bool) -> None:
        """Fetches nothing more, or goes on."""
        self._is_paused = is_paused
        self._look_for_room()

    def _look_for_room(self) -> None:
        if not self._room.is_set() and self._has_room():
            self._room.set()

    def change(self, subscription: Subscription) -> None:
        """Reads with another expression: what is being pulled, and what waits to be handed out, is
        pulled again. It does not count as done: where members want different things it is somebody
        else's now. What waits before a message that was handed out cannot be pulled again; that
        counts as done when it does not match."""
        self.subscription = subscription
        matches = exact_match(subscription)
        waiting: set[int] = set()

        def note(message: ReceivedMessage) -> bool:
            if message.is_from(self):
                waiting.add(message.queue_offset)
            return False

        self.feed.discard(note)
        again = self.in_flight.back(waiting)

        def unwanted(message: ReceivedMessage) -> bool:
            if not message.is_from(self):
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

    def drop(self) -> None:
        """The queue is not ours any more; its waiting messages are discarded."""
        self._dropped = True
        self.feed.discard(lambda message: message.is_from(self))

    # -------------------------------------------------------------------------- pulling

    async def run(self) -> None:
        """Pulls until cancelled, or until an error that no repetition heals ends the feed."""
        failures = 0
        while True:
            await self._wait_for_room()
            generation, subscription = self._generation, self.subscription
            try:
                answer = await self._pull_or_move()
                is_wanted = self.owns(generation) and subscription is self.subscription
                if answer is not None and is_wanted:
                    self._take(answer)
                failures = 0
            except RequestError as error:
                if error.code in _FATAL:
                    self.feed.fail(error)
                    return
                failures += 1
                await self._refused(error, failures)
            except ProtocolError as error:
                self.feed.fail(error)
                return
            except SluiceError as error:
                failures += 1
                self._cluster.routes.forget(self.queue.topic)
                await self._pause(error, failures)

    async def _refused(self, error: RequestError, failures: int) -> None:
        if error.code in SUBSCRIPTION_PENDING:
            self._on_pending()
            await asyncio.sleep(pause_s(failures))
        elif error.code == FLOW_CONTROL:
            await asyncio.sleep(0.02)
        else:
            await self._pause(error, failures)

    async def _pause(self, error: SluiceError, failures: int) -> None:
        level = logging.WARNING if failures == 1 else logging.DEBUG
        _log.log(
            level, "pull of %s for %s failed, will try again: %s", self.queue, self._group, error
        )
        await asyncio.sleep(pause_s(failures))

    def _has_room(self) -> bool:
        options = self._options
        span_max = None if options.ordered else options.span_max
        if self._is_paused or self._is_held:
            return False
        return self.in_flight.has_room(*self._limits, span_max)

    async def _wait_for_room(self) -> None:
        while not self._has_room():
            self._room.clear()
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
                    self._group,
                    _STUCK_S,
                )

    async def _pull_or_move(self) -> PullAnswer | None:
        """The answer to a pull, None when the position was moved meanwhile."""
        try:
            async with asyncio.timeout(None) as self._waiting:
                return await self._pull()
        except TimeoutError:
            return None
        finally:
            self._waiting = None

    async def _pull(self) -> PullAnswer:
        in_flight, poll_s = self.in_flight, self._cluster.poll_s
        address = await self._cluster.address(self.queue)
        options = self._options
        may_commit = options.auto_commit and self.may_commit and not options.broadcast
        commit = in_flight.committable if may_commit else 0
        command = requests.pull(
            self._group,
            self.queue,
            in_flight.position,
            count_max=min(self._options.pull_count, max(1, self._limits[0] - in_flight.count)),
            subscription=self.subscription if self._filtered_here else None,
            sub_version=self.subscription.version,
            expression_kind=self.subscription.kind,
            suspend_timeout_ms=int(poll_s * 1000),
            commit_offset=commit or None,
            lite=self._filtered_here,
        )
        answer = await self._cluster.call(address, command, poll_s + ANSWER_TIMEOUT_S)
        self.pulled_s = self._cluster.clock.monotonic_s()
        return pull_answer(answer, address)

    def _take(self, answer: PullAnswer) -> None:
        if answer.status is PullStatus.OFFSET_ILLEGAL:
            self._moved(answer)
            return
        messages = []
        if answer.status is PullStatus.FOUND:
            subscription, in_flight = self.subscription, self.in_flight
            for record in decode_records(answer.data, broker=self.queue.broker):
                if tag_matches(subscription, record.tag):
                    in_flight.add(record.queue_offset, record.size_bytes)
                    messages.append(ReceivedMessage(record, self, self._generation))
        self.in_flight.passed(answer.next_offset)
        if messages:
            self.counts.pulled(self.pulled_s, len(messages))
            self.feed.put(messages)

    def _moved(self, answer: PullAnswer) -> None:
        """21: the broker says where to go on (deleted by retention, ahead of the end, or reset)."""
        old, new = self.in_flight.position, answer.next_offset
        lost = new - old if old < new <= answer.offset_min else 0
        if lost:
            what = f"{lost} messages are lost: the broker deleted them before they were read"
        else:
            what = f"{new - old} messages are skipped" if new > old else f"{old - new} come again"
        if answer.remark == OFFSET_RESET:
            _log.warning(
                "group %s was reset on %s from offset %d to %d, %s",
                self._group, self.queue, old, new, what,
            )  # fmt: skip
        else:
            _log.warning(
                "group %s: offset %d of %s is not in the queue (%d to %d)%s; going on at %d, %s",
                self._group, old, self.queue, answer.offset_min, answer.offset_max,
                f" [{answer.remark}]" if answer.remark else "", new, what,
            )  # fmt: skip
        self.move(new)
        self.committed = None
        if self._cluster.on_moved is not None:  # what goes wrong there is none of our business
            event = OffsetMoved(self._group, self.queue, old, new, lost)
            asyncio.get_running_loop().call_soon(self._cluster.on_moved, event)
