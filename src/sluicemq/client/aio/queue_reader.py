"""The reader of one queue, which pulls messages, and the sender of rejected messages.

A `QueueReader` runs as a task. It pulls messages, puts them into a prefetch buffer, and pauses
while too many messages or bytes are unacknowledged. When the reader moves to another offset (seek,
offset reset, an offset that is no longer stored), acknowledging messages that were pulled before
has no effect. It notices a topic that was deleted and created again by the messages that it has
read before (`core.identity`), and then continues at the first message of the new topic, whatever
`start` says.

A `RetrySender` sends rejected messages back, so that the group receives them again. When it
returns, the copy of the message is stored; only then does the original count as acknowledged:

    CONSUMER_SEND_MSG_BACK (36) to the broker that has the message
     └─ fails: this client sends the copy to %RETRY%group, at any broker that accepts it
         └─ fails: SluiceError, and the message stays unacknowledged
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.prefetch import PrefetchBuffer, RetryRouter
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.aio.repositioning import RepositioningReader
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
from sluicemq.client.core.identity import make_anchor
from sluicemq.client.core.requests import (
    FLOW_CONTROL,
    GROUP_NOT_EXIST,
    SUBSCRIPTION_PARSE_FAILED,
    SUBSCRIPTION_PENDING,
    PullResponse,
    PullStatus,
)
from sluicemq.client.core.sending import Sender
from sluicemq.client.tasks import Tasks
from sluicemq.errors import (
    ProtocolError,
    RequestError,
    SluiceError,
    UndecodableBodyError,
)
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.system_names import INNER_PRODUCER_GROUP
from sluicemq.model.topic import MASTER_ID, MessageQueue
from sluicemq.model.trace_records import ConsumeOutcome
from sluicemq.record.codec import split_records
from sluicemq.wire.codes import ResponseCode

_log = logging.getLogger("sluicemq.client")
MessageBuffer = PrefetchBuffer | RetryRouter
"""Where a reader puts the messages that it pulled."""


class RetrySender:
    """Sends the rejected messages of one group back to the brokers.

    `retries_max` is the number of retries before a message becomes a dead letter. None means that
    the group's configuration at the broker decides.
    """

    def __init__(self, cluster: Cluster, group: str, retries_max: int | None) -> None:
        """Create a sender of retries for a group.

        `retries_max` is the maximum number of retries of a message; None means the one of the
        group's configuration.
        """
        self._cluster = cluster
        self._group = group
        self._retries_max = retries_max
        self._sender = Sender(
            cluster.directory, INNER_PRODUCER_GROUP, str, first_queue=cluster.choose_first_queue
        )

    async def send_back(self, record: StoredMessage, level: int) -> None:
        """Store a copy of a message, which the group receives again after a delay.

        `level` above 0 is a delay level of RocketMQ, 0 lets the delay grow with each retry, and -1
        makes a dead letter. The broker of the message is asked to store the copy. If that fails,
        the client sends it as a message to the group's retry topic. Raises SluiceError if that
        fails too.
        """
        queue = MessageQueue(record.topic, record.broker, record.queue_id)
        command = requests.send_back(
            self._group, record, original_topic(record), level, self._retries_max
        )
        activity = f"sending back for {self._group}"
        try:
            await self._cluster.ask_master(queue, command)
            self._cluster.directory.log_recovery(queue, activity)
        except SluiceError as error:
            self._cluster.directory.log_failure(
                error,
                queue,
                activity,
                "group %s: message %s could not be sent back (%s); sending a copy to the retry "
                "topic instead",
                self._group,
                record.message_id,
                error.fact,
            )
            await self.send_retry_message(record, retry_count(record), level)

    async def send_retry_message(
        self, record: StoredMessage, previous_retries: int, level: int
    ) -> None:
        """Send a copy of a message to the group's retry topic, as an ordinary message.

        `previous_retries` is the number of retries so far, and `level` that of `send_back`. Raises
        SluiceError if no broker stores the copy.
        """
        outgoing = make_retry_message(
            record, self._group, previous_retries, level, self._retries_max
        )
        await self._cluster.run(self._sender.send_outgoing(outgoing))


_FATAL_CODES: Final = frozenset(
    {ResponseCode.NO_PERMISSION, SUBSCRIPTION_PARSE_FAILED, GROUP_NOT_EXIST}
)
"""The response codes after which a reader stops, because repeating the pull does not help.

NO_PERMISSION (16), a filter that the broker cannot parse, and a group that does not exist.
"""
_FLOW_CONTROL_PAUSE_S: Final = 0.02
"""The pause in seconds before a pull that the broker refused because it is busy."""
_STUCK_WARNING_S: Final = 60.0
"""After how many seconds without an acknowledgement a reader that waits for one logs a warning."""
COUNT_STEP: Final = 64
"""The step to which a pull rounds the number of messages that it asks for.

A broker keeps a plan for each different request, so there should be few different ones.
"""


@dataclass(frozen=True, slots=True)
class ReaderContext:
    """What all readers of a group in this client share.

    - `on_unknown_subscription`: called when a broker does not know the group's subscription yet.
    - `is_lite_pull`: the readers belong to a consumer that is polled. Each of their pulls contains
      the filter, and rejected messages are not retried.
    - `retry_sender`: sends rejected messages back. With None, rejected messages are dropped.
    - `dead_letter_sender`: stores undecodable messages as dead letters if the options say so.
    """

    cluster: Cluster
    group: str
    options: ConsumeOptions
    on_unknown_subscription: Callable[[], None] = lambda: None
    is_lite_pull: bool = False
    retry_sender: RetrySender | None = None
    dead_letter_sender: RetrySender | None = None


class QueueReader(RepositioningReader):
    """Reads one queue for one group.

    `in_flight` are the messages that were pulled and not acknowledged. When the queue is lost or
    the reader moves to another offset, a new object replaces it. A message is *current* while its
    `in_flight` is that of its reader; acknowledging or rejecting any other message has no effect.
    `handed_out` are the messages that the application has now, current or not. `committed_offset`
    is the offset that was committed last, None if that is unknown.
    """

    def __init__(
        self,
        context: ReaderContext,
        queue: MessageQueue,
        subscription: Subscription,
        buffer: MessageBuffer,
        position: int,
        committed: int | None = None,
    ) -> None:
        """Create a reader of `queue` that begins at the offset `position`; `run` starts it.

        `context` is what all readers of the group share. `buffer` receives the messages.
        `committed` is the committed offset of the group, None if there is none.
        """
        super().__init__()
        self.group: str = context.group
        self.queue = queue
        self._activity = f"the pull of {queue} for {context.group}"
        self.subscription: Subscription = subscription
        self.buffer = buffer
        self.in_flight: InFlight = InFlight(position)
        self.committed_offset = committed
        self.handed_out: set[ReceivedMessage] = set()
        self.stats: TopicConsumeStats = TopicConsumeStats()
        """Statistics of the topic, shared by the readers of its queues."""
        self.last_pull_s: float = 0.0
        """The time of the last response to a pull, in monotonic seconds; 0 before the first one."""
        self._replica_id = MASTER_ID
        """The id of the replica that the next pull goes to, as the last response suggested.

        That is the master, or a slave while the master is busy with reading old messages.
        """
        self._pulls_from_master = True
        self._cluster = context.cluster
        self._context = context
        self._options = context.options
        self._limits = context.options.queue_limits(1)
        """How many messages and bytes may be unacknowledged."""
        self._span_max = None if context.options.ordered else context.options.span_max
        """The maximum difference of unacknowledged offsets; None means no limit."""
        self._is_paused = False
        self._is_blocked = False
        """Whether pulls are blocked while the subscription changes."""
        self._room_available = asyncio.Event()
        """Set while more messages may be pulled."""
        self._room_available.set()
        self._pull_timeout: asyncio.Timeout | None = None
        """Ends the pull that is in progress when it is rescheduled; None without a pull."""
        self.needs_body_check: bool = context.options.on_undecodable != DELIVER
        """Whether `check_body` must be called before a message is handed out."""
        self.tasks: Tasks = Tasks()
        """The tasks that store undecodable messages as dead letters."""

    # -------------------------------------------------------------- called by consumers

    @property
    def may_hand_out(self) -> bool:
        """Whether messages of the queue may be handed out now.

        It is always True unless the group consumes in order.
        """
        return True

    @property
    def may_commit(self) -> bool:
        """Whether acknowledgements may be committed now.

        It is always True unless the group consumes in order.
        """
        return True

    def mark_handed_out(self, messages: list[ReceivedMessage], owner: object) -> None:
        """Record that `owner` has received the messages, and start their traces. HOT.

        Messages that were pulled before the reader moved to another offset are left out.
        """
        trace = self._cluster.trace
        in_flight = self.in_flight
        handed_out = self.handed_out
        now_s = self._cluster.clock.monotonic_s()
        for message in messages:
            if message.in_flight is in_flight:
                message.owner = owner
                message.handed_out_s = now_s
                if trace is not None:
                    message.delivery = trace.start_delivery(
                        self.group, message.record, message.reconsume_times
                    )
                handed_out.add(message)

    def record_outcome(self, message: ReceivedMessage, outcome: ConsumeOutcome) -> None:
        """Record in the trace how the application processed a message that is handed out.

        Only the first call for a delivery has an effect.
        """
        if message in self.handed_out and message.delivery is not None:
            message.delivery.finish(outcome)
            message.delivery = None

    def mark_returned(self, message: ReceivedMessage, *, failed: bool = False) -> None:
        """Record that the application has given a message back without acknowledging it.

        With `failed`, the delivery counts as a failure in the statistics. Does nothing if the
        application does not have the message.
        """
        if message in self.handed_out:
            self.handed_out.remove(message)
            if failed:
                now_s = self._cluster.clock.monotonic_s()
                self.stats.record_failure(now_s, now_s - message.handed_out_s)

    def release_owner(self, owner: object) -> None:
        """Record that `owner` has returned all messages that were handed out to it."""
        for message in tuple(self.handed_out):
            if message.owner is owner:
                self.mark_returned(message)

    def check_body(self, message: ReceivedMessage) -> bool:
        """Return whether the application may receive the next message of the buffer.

        A body that can be decoded gives True, and so does a message that was pulled before the
        reader moved to another offset. For any other body, on_undecodable="raise" raises
        UndecodableBodyError. With "dead_letter", a task is started that stores the message as a
        dead letter and acknowledges it, and the result is False.
        """
        error = message.body_error if message.is_current else None
        if error is None:
            return True
        if self._options.on_undecodable == RAISE:
            raise error
        self.mark_handed_out([message], self)
        self.tasks.spawn(self._store_dead_letter(message), f"sluicemq dead letter {message}")
        return False

    async def _store_dead_letter(self, message: ReceivedMessage) -> None:
        """Store a message with an undecodable body as a dead letter, and acknowledge it.

        If no broker stores it, this is tried again after a pause. It ends without success when the
        reader does not own the message any more.
        """
        assert self._context.dead_letter_sender is not None
        message.record_outcome(ConsumeOutcome.FAILED)
        while message.is_current:
            try:
                await self._context.dead_letter_sender.send_back(message.record, DEAD_LETTER_LEVEL)
            except SluiceError as error:
                delay_s = local_retry_delay_s(message.attempt)
                message.attempt += 1
                _log.warning(
                    "group %s: %s could not be stored as a dead letter; retrying in %g s: %s",
                    self.group,
                    message,
                    delay_s,
                    error,
                )
                await asyncio.sleep(delay_s)
            else:
                self.mark_returned(message, failed=True)
                self.ack(message)
                return
        self.mark_returned(message)

    def record_undecodable(self, message: ReceivedMessage, error: UndecodableBodyError) -> None:
        """Count a message whose body cannot be decoded, and log it.

        Only the 1st, 2nd, 4th, 8th … such message of a topic is logged. May be called from any
        thread.
        """
        count = self.stats.record_undecodable(str(error))
        is_power_of_two = not count & (count - 1)  # a power of two has a single bit
        if is_power_of_two:
            _log.warning(
                "group %s: %s (undecodable messages of %s so far: %d; on_undecodable=%r)",
                self.group,
                error,
                self.queue.topic,
                count,
                self._options.on_undecodable,
            )

    def ack(self, message: ReceivedMessage) -> bool:
        """Acknowledge a message. Return False if it is not current or was acknowledged before."""
        return self.ack_many([message]) > 0

    def ack_many(self, messages: list[ReceivedMessage]) -> int:
        """Acknowledge messages, and let the reader pull again if there is room now. HOT.

        Returns how many of them are acknowledged now. Others were acknowledged before, or pulled
        before the reader moved to another offset.
        """
        handed_out = self.handed_out
        in_flight = self.in_flight
        acknowledged_count = 0
        returned_count = 0
        handed_out_s_sum = 0.0
        for message in messages:
            if message in handed_out:
                handed_out.remove(message)
                returned_count += 1
                handed_out_s_sum += message.handed_out_s
                if message.delivery is not None:
                    message.delivery.finish(ConsumeOutcome.SUCCESS)
            if message.in_flight is in_flight:
                acknowledged_count += in_flight.ack(message.queue_offset)
        if returned_count:
            now_s = self._cluster.clock.monotonic_s()
            self.stats.record_acks(now_s, returned_count * now_s - handed_out_s_sum, returned_count)
        if not self._room_available.is_set():
            self._update_room()
        return acknowledged_count

    async def reject(
        self, message: ReceivedMessage, delay_level: int | None, suspend_s: float | None
    ) -> bool:
        """Have a message delivered again later: store a copy of it, and acknowledge the original.

        `delay_level` None means the delay of the group's options; `suspend_s` has no meaning here.
        A consumer without retries drops the message with a warning. Returns False, and does
        nothing, if the message was pulled before the reader moved to another offset. Raises
        SluiceError if no broker stores the copy.
        """
        del suspend_s
        if not message.is_current:
            return False
        if self._context.retry_sender is None:
            _log.warning("%s was rejected and is dropped: this consumer has no retries", message)
        else:
            level = self._options.retry.delay_level if delay_level is None else delay_level
            await self._context.retry_sender.send_back(message.record, level)
        self.mark_returned(message, failed=True)
        return self.ack(message)

    async def reply(self, record: StoredMessage, body: bytes, message_id: str) -> object:
        """Send a reply to a message, and return when the requester has it.

        Raises ConfigurationError if the message does not ask for a reply, and SluiceError if
        sending fails.
        """
        return await self._cluster.send_reply(record, body, message_id)

    def move_to(self, position: int) -> None:
        """Continue at the offset `position`.

        Messages that were pulled before are no longer current.
        """
        self.discard_pulled(position)
        self._update_room()
        self._interrupt_pull()

    def set_limits(self, count_max: int, bytes_max: int) -> None:
        """Set how many messages and bytes of this queue may be unacknowledged."""
        self._limits = count_max, bytes_max
        self._update_room()

    def set_blocked(self, *, is_blocked: bool) -> None:
        """Block or allow pulls while the filter of the group's subscription changes.

        A pull in progress is interrupted and its response dropped, because the broker may have
        applied either filter.
        """
        self._is_blocked = is_blocked
        if is_blocked:
            self._interrupt_pull()
        self._update_room()

    def report_recreation(self) -> None:
        """Make this reader check its queue at once.

        Another reader has found that the topic was deleted and created again, and has reported it.
        """
        self.is_recreation_reported: bool = True
        self.identity.is_suspect = bool(self.identity.proven)
        self._interrupt_pull()

    def set_paused(self, *, is_paused: bool) -> None:
        """Stop pulling until the queue is resumed, or resume."""
        self._is_paused = is_paused
        self._update_room()

    def _update_room(self) -> None:
        """Decide whether more messages may be pulled, and set or clear `_room_available`."""
        is_stopped = self._is_paused or self._is_blocked
        if not is_stopped and self.in_flight.has_room(*self._limits, self._span_max):
            self._room_available.set()
        else:
            self._room_available.clear()

    def change_subscription(self, subscription: Subscription) -> None:
        """Read the queue with another filter from now on.

        The messages in the buffer were selected by the old filter. They are pulled again if they
        come after all messages that a handler has started. The others stay if they match the new
        filter, and are acknowledged if they do not.
        """
        self.subscription = subscription
        matches = make_exact_matcher(subscription)
        waiting_offsets: set[int] = set()

        def note_waiting(message: ReceivedMessage) -> bool:
            """Collect the offsets of this reader's messages in the buffer; keep all messages."""
            if message.origin is self:
                waiting_offsets.add(message.queue_offset)
            return False

        self.buffer.discard(note_waiting)
        offsets_to_pull_again = self.in_flight.rewind(waiting_offsets)

        def is_unwanted(message: ReceivedMessage) -> bool:
            """Return whether to remove a message; acknowledge it if it does not match."""
            if message.origin is not self:
                return False
            if message.queue_offset in offsets_to_pull_again:
                return True
            if matches(message.record):
                return False
            self.in_flight.ack(message.queue_offset)
            return True

        self.buffer.discard(is_unwanted)
        self._update_room()
        self._interrupt_pull()

    def _interrupt_pull(self) -> None:
        """End a pull that is in progress. A long poll would last up to 15 s otherwise."""
        if self._pull_timeout is not None:
            self._pull_timeout.reschedule(asyncio.get_running_loop().time())

    def discard_pulled(self, position: int) -> None:
        """Forget all messages that were pulled; the next pull begins at `position`.

        These messages are no longer current.
        """
        self.in_flight = InFlight(position)
        self.buffer.discard(lambda message: message.origin is self)

    # -------------------------------------------------------------------------- pulling

    async def run(self) -> None:
        """Pull messages until the task is cancelled, or until an error that cannot be repaired.

        Such an error (one of `_FATAL_CODES`, or a ProtocolError) is raised to the consumers that
        take messages from the buffer. After any other error the pull is repeated.
        """
        failed_pulls = 0
        while True:
            if not self._room_available.is_set():
                await self._wait_for_room()
            in_flight = self.in_flight
            subscription = self.subscription

            # The default arguments keep the values of this round of the loop.
            def is_current(
                pulled_for: InFlight = in_flight, pulled_with: Subscription = subscription
            ) -> bool:
                """Return False if the reader has moved or changed its filter since the pull."""
                return pulled_for is self.in_flight and pulled_with is self.subscription

            try:
                if not await self._check_queue():
                    continue
                response = await self._pull()
                if response is not None and is_current():
                    may_take = await self._check_response(response)
                    if may_take and is_current():
                        self._accept_response(response)
                if self._cluster.directory.outages.current:
                    self._cluster.directory.log_recovery(self.queue, self._activity)
                failed_pulls = 0
            except SluiceError as error:
                self.identity.is_suspect = True
                code = error.code if isinstance(error, RequestError) else None
                if code in _FATAL_CODES or isinstance(error, ProtocolError):
                    self.buffer.fail(error)
                    return
                failed_pulls += 1
                await self._pause_after_error(error, code, failed_pulls)

    async def _pause_after_error(self, error: SluiceError, code: int | None, failures: int) -> None:
        """Log a failed pull, and wait before the next one.

        `code` is the code of the response, None if the broker did not respond. `failures` is the
        number of failed pulls in a row; the pause grows with it. If the broker did not respond, the
        route is fetched again and the next pull goes to the master.
        """
        if code == FLOW_CONTROL:
            await asyncio.sleep(_FLOW_CONTROL_PAUSE_S)
            return
        if code is None or not self._pulls_from_master:
            self._replica_id = MASTER_ID
            self._cluster.routes.expire(self.queue.topic)
        if code in SUBSCRIPTION_PENDING:
            self._context.on_unknown_subscription()
        else:
            self._cluster.directory.log_failure(
                error,
                self.queue,
                self._activity,
                "the pull of %s for group %s failed and is retried: %s",
                self.queue,
                self.group,
                error,
            )
        await asyncio.sleep(pull_pause_s(failures))

    async def _wait_for_room(self) -> None:
        """Wait until unacknowledged messages are few enough that more may be pulled.

        A warning is logged for each minute without an acknowledgement, unless the queue is paused
        or blocked.
        """
        while not self._room_available.is_set():
            try:
                async with asyncio.timeout(_STUCK_WARNING_S):
                    await self._room_available.wait()
            except TimeoutError:
                if self._is_paused or self._is_blocked:
                    continue
                _log.warning(
                    "%d messages (%d bytes) of %s are unacknowledged in group %s, and none was "
                    "acknowledged for %d s, so nothing more is fetched. Call await message.ack().",
                    self.in_flight.count,
                    self.in_flight.size_bytes,
                    self.queue,
                    self.group,
                    _STUCK_WARNING_S,
                )

    async def _pull(self) -> PullResponse | None:
        """Pull once and return the response, or None if the pull was interrupted. HOT.

        If automatic commits are on, the request also commits the offset below which all messages
        are acknowledged. Raises SluiceError if the pull fails.
        """
        in_flight = self.in_flight
        poll_s = self._cluster.long_poll_s
        options = self._options
        masters = self._cluster.routes.master_addresses.get(self.queue.topic)
        self._pulls_from_master = self._replica_id == MASTER_ID and (
            not masters or self.queue.broker in masters
        )
        may_commit = (
            options.auto_commit
            and self.may_commit
            and not options.broadcast
            and self._pulls_from_master  # a slave copies its offsets from the master
        )
        commit_offset = in_flight.committable if may_commit else 0
        # How many messages may be pulled until the limit is reached, in steps of COUNT_STEP.
        free_count = max(1, self._limits[0] - in_flight.count)
        if free_count > COUNT_STEP:
            free_count -= free_count % COUNT_STEP
        command = requests.pull(
            self.group,
            self.queue,
            in_flight.position,
            count_max=min(options.pull_count, free_count),
            subscription=self.subscription if self._context.is_lite_pull else None,
            sub_version=self.subscription.version,
            expression_kind=self.subscription.kind,
            suspend_timeout_ms=int(poll_s * 1000),
            commit_offset=commit_offset or None,
            lite=self._context.is_lite_pull,
            any_span=self._span_max is None,
        )
        conversation = self._cluster.directory.pull(
            self.queue, command, poll_s + LONG_POLL_GRACE_S, self._replica_id
        )
        try:
            async with asyncio.timeout(None) as self._pull_timeout:
                response = await self._cluster.run(conversation)
        except TimeoutError:
            return None
        finally:
            self._pull_timeout = None
        self.last_pull_s = self._cluster.clock.monotonic_s()
        self._replica_id = response.suggested_broker_id
        return response

    def _accept_response(self, response: PullResponse) -> None:
        """Put the messages of a response into the buffer.

        If the response says that the offset is not in the queue, move the reader instead.
        """
        if response.status is PullStatus.OFFSET_ILLEGAL:
            self._follow_illegal_offset(response)
            return
        in_flight = self.in_flight
        tags = self.subscription.tags
        # Brokers compare tags by hash: this drops messages of other tags with the same hash.
        records = split_records(
            response.data, self.queue.broker, tags, self._options.body_bytes_max
        )
        if records:
            _, size_bytes, record = records[-1]
            self.identity.add_anchor(make_anchor(record), size_bytes, self.last_pull_s)
        in_flight.add([(offset, size) for offset, size, _ in records], response.next_offset)
        self._update_room()
        if records:
            self.stats.record_pull(self.last_pull_s, len(records))
            self.buffer.put(
                [ReceivedMessage(record, self, in_flight, offset) for offset, _, record in records]
            )
