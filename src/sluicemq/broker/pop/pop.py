"""Handlers for requests that pop messages, or that ask what could be popped (spec/grpc.md §8).

`PopHandlers` answers POP_MESSAGE (200050), PEEK_MESSAGE (200052), NOTIFICATION (200054) and
POLLING_INFO (200055). The response codes, and the order of the checks, are those of RocketMQ.

A pop names no offset: it takes the next messages of one queue, or of any queue, for its whole
group. Its response contains the receipt handles by which the messages are acknowledged. The offsets
of groups, and the messages in flight, are in `checkpoints.py`, and for ordered pops in `order.py`.

A pop reads its queues in this order: with a probability of popFromRetryProbability percent the
retry topics of the group and topic are first, otherwise last. The queues of a topic follow each
other from a random one on. The pop stops when it has enough messages or, with a filter, when
READ_TIME_MAX_S is over. The response is sent when the checkpoints are stored (`Durable`).

A pop that finds nothing is parked (`longpoll.py`). It competes for messages with the other parked
pops that have the same competition key.

If a filter rejects many messages of a queue, reading them takes longer than one time slice of the
event loop. Then the pop is done in several steps, and each step moves the offset of the group.

Messages that are delivered again are in a retry topic. The response contains them as they were
sent: with the name of the topic that the consumer subscribes to, and their receipt handle as
property POP_CK.
"""

import logging
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final

from sluicemq.broker.background import retry_after
from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.delivery import DeliveryStates
from sluicemq.broker.consume.filters import RequestFilters
from sluicemq.broker.consume.longpoll import ANY_QUEUE, LongPolls
from sluicemq.broker.context import BrokerComponent, BrokerContext
from sluicemq.broker.group_commit import Durable, Parked, Postponed
from sluicemq.broker.pop.answers import encode_notification, encode_pop_answer, encode_refusal
from sluicemq.broker.pop.checkpoints import PopCheckpoints
from sluicemq.broker.pop.checks import PopChecks
from sluicemq.broker.pop.messages import with_handle, without_handles
from sluicemq.broker.pop.order import OrderedPops
from sluicemq.broker.pop.pending import PendingPop, PopResult, competition_key
from sluicemq.broker.pop.sources import PopSources, Source
from sluicemq.errors import RequestError, StoreError
from sluicemq.model.subscription import MessageFilter
from sluicemq.model.topic import (
    RETRY_PREFIX,
    pop_topic,
)
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import WorkItem
from sluicemq.store.gather import PostponedError
from sluicemq.store.read import ReadResult, ReadStatus
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command, encode_response
from sluicemq.wire.popping import (
    ORDERED,
    UNSET_REMARK,
    NotificationRequest,
    NotificationResponse,
    PeekMessageRequest,
    PollingInfoRequest,
    PollingInfoResponse,
    PopMessageRequest,
    PopMessageResponse,
    ReceiptHandle,
)

log = logging.getLogger(__name__)

ANSWER_EARLY_MS: Final = 50
"""A parked request is answered this long before the end of its waiting time."""
WAIT_MS_MAX: Final = 10 * 60_000
"""The longest time for which a request is parked."""
INIT_MODE_MIN: Final = 0
"""The `init_mode` of a pop whose group begins at the first message of a new queue."""
READ_TIME_MAX_S: Final = 0.002
"""The time after which a pop with a filter reads no further queue."""
NOTIFICATION_SCAN_MAX: Final = 64
"""A notification with a filter is answered if more messages than this are unread."""
_INVALID_OFFSET_STATUSES: Final = (
    ReadStatus.OFFSET_TOO_SMALL,
    ReadStatus.OFFSET_OVERFLOW_BADLY,
    ReadStatus.OFFSET_FOUND_NULL,
)
Admit = Callable[[str, str, str | None, str | None, Peer], None]
"""Raises RequestError if a group may not pop a topic by a filter.

Its arguments are the group, the topic, the kind and expression of the filter, and the connection.
"""


class PopHandlers(BrokerComponent):
    """Handlers for requests of consumers that pop."""

    def __init__(
        self,
        context: BrokerContext,
        *,
        checkpoints: PopCheckpoints,
        order: OrderedPops,
        polls: LongPolls,
        delivered: DeliveryStates,
        filters: RequestFilters,
        random: Random,
        consumers: Consumers,
        admit: Admit,
    ) -> None:
        """Create the handlers.

        `checkpoints` has the messages in flight of unordered pops, and `order` those of ordered
        pops. Pops that find nothing wait in `polls`. `delivered` gets the statistics of each topic
        and group. `filters` compiles and caches filter expressions. `consumers` knows the client
        ids of consumers.

        `random` decides whether a pop reads retry topics first, and from which queue of a topic it
        starts. `admit` is called before each step of a pop, and raises RequestError if the group
        may not pop with its filter.
        """
        super().__init__(context)
        self.steady_clock = context.steady_clock
        self.background = context.background
        self.checkpoints = checkpoints
        self.order = order
        self.polls = polls
        self.delivered = delivered
        self.filters = filters
        self._sources = PopSources(self.settings, self.topics, random)
        self.consumers = consumers
        self.admit = admit
        checks = PopChecks(context)
        # Bound methods, because they are called for each pop.
        self._check_pop = checks.check_pop
        self._check_target = checks.check_target

    # ------------------------------------------------------------------------------- requests

    def pop(
        self, header: PopMessageRequest, command: Command, peer: Peer
    ) -> bytes | Durable | Parked | Postponed | Command:
        """Take messages for a group: answer POP_MESSAGE (200050).

        The type of the result says what happens to it:

        - `Durable`: an encoded response with messages. It is sent when the record of the pop, its
          checkpoint, is on disk.
        - bytes: an encoded response that is sent at once, because it has no messages, or those of
          an ordered pop.
        - `Parked`: no messages were found, and the pop may wait. It is answered when some arrive.
        - `Postponed`: the pop continues in steps, because a filter must be compiled or evaluated on
          another thread, or has rejected many messages.
        - `Command`: an error response with the fields of a pop, as in RocketMQ, because a check
          before the first read has failed.

        Raises RequestError or StoreError if a checkpoint cannot be stored after messages were read.
        Called for each pop: keep it cheap.
        """
        now_ms = self.steady_clock.now_ms()
        deadline_ms = self._find_deadline_ms(header.born_time_ms, header.poll_ms, now_ms)
        late_ms = now_ms - deadline_ms
        try:
            self._check_pop(header, peer, late_ms)
            message_filter = self._get_filter(header.expression_kind, header.expression)
            self._admit(header, peer)
        except PostponedError as postponed:
            retry = partial(self.pop, header, command, peer)
            return Postponed(retry_after(postponed.work, retry))
        except RequestError as refusal:
            return encode_refusal(refusal, PopMessageResponse())

        pop = PendingPop(header, command, peer, deadline_ms, message_filter)
        pop_result = self._take_messages(pop)
        if pop_result.is_unfinished:
            return Postponed(self._continue_unfinished(pop, pop_result))
        return self._answer_or_park(pop, pop_result)

    def peek(self, header: PeekMessageRequest, command: Command, peer: Peer) -> Command:
        """Answer PEEK_MESSAGE (200052) with the messages that a pop would take.

        The messages stay in the queue, and no offset of the group changes. A peek has no filter and
        never waits. Without messages, the code is PULL_NOT_FOUND. A refusal is returned, not
        raised.
        """
        try:
            self._check_target(header, peer)
        except RequestError as refusal:
            return encode_refusal(refusal, PopMessageResponse())
        pop_header = _peek_to_pop_header(header)
        pop = PendingPop(pop_header, command, peer, deadline_ms=0, is_read_only=True)
        pop_result = self._take_messages(pop)

        code = ResponseCode.SUCCESS
        remark = "FOUND"
        if not pop_result.count:
            code = ResponseCode.PULL_NOT_FOUND
            remark = "NO_MESSAGE_IN_QUEUE"
        # The messages of the response also remain in the queue.
        remaining_count = pop_result.rest_count + pop_result.count
        fields = encode_header(PopMessageResponse(rest_count=remaining_count))
        return Command(code, fields, b"".join(pop_result.data), remark=remark)

    def notify(
        self, header: NotificationRequest, command: Command, peer: Peer
    ) -> bytes | Parked | Postponed | Command:
        """Answer NOTIFICATION (200054), which asks whether a pop would find messages.

        Return the encoded response if it would, or if the request may not wait. Otherwise return
        `Parked`: the response is sent when messages arrive, or at the end of the waiting time.
        Return `Postponed` if the filter must be compiled on another thread first, and a `Command`
        if the request is refused.
        """
        now_ms = self.steady_clock.now_ms()
        try:
            self._check_target(header, peer)
            message_filter = self._get_filter(header.expression_kind, header.expression)
        except PostponedError as postponed:
            retry = partial(self.notify, header, command, peer)
            return Postponed(retry_after(postponed.work, retry))
        except RequestError as refusal:
            return encode_refusal(refusal, NotificationResponse())

        deadline_ms = self._find_deadline_ms(header.born_time_ms, header.poll_ms, now_ms)
        pop = PendingPop(
            _notification_to_pop_header(header),
            command,
            peer,
            deadline_ms,
            message_filter,
            is_read_only=True,
        )
        if self._has_messages(pop):
            return encode_notification(pop, NotificationResponse(has_messages=True))
        refusal_code = self._find_reason_not_to_park(pop)
        if refusal_code is None:
            return self._create_parked(pop, self._retry_notification)
        is_full = refusal_code == ResponseCode.POLLING_FULL
        return encode_notification(pop, NotificationResponse(is_full=is_full))

    def count_parked(self, header: PollingInfoRequest, command: Command, peer: Peer) -> Command:
        """Answer POLLING_INFO (200055): how many pops of the group are parked for a queue.

        Queue id -1 means the pops that wait for any queue of the topic.
        """
        try:
            self._check_target(header, peer)
        except RequestError as refusal:
            return encode_refusal(refusal, PollingInfoResponse())
        queue_id = max(header.queue_id, ANY_QUEUE)
        parked_count = 0
        for is_ordered in (False, True):
            key = competition_key(header.group, is_ordered=is_ordered)
            parked_count += self.polls.count_waiting_pops(header.topic, queue_id, key)
        fields = encode_header(PollingInfoResponse(count=parked_count))
        return Command(ResponseCode.SUCCESS, fields, remark=UNSET_REMARK)

    # -------------------------------------------------------------------------------- reading

    def _get_filter(self, filter_kind: str | None, expression: str | None) -> MessageFilter | None:
        """Return the filter of a request, None if it has no expression.

        Raises RequestError for an invalid expression, and PostponedError if the expression must be
        compiled in another thread first.
        """
        if not expression:
            return None
        return self.filters.get_filter(filter_kind, expression)

    def _admit(self, header: PopMessageRequest, peer: Peer) -> None:
        """Raise RequestError if the group may not pop the topic by its filter (`Admit`)."""
        self.admit(header.group, header.topic, header.expression_kind, header.expression, peer)

    def _take_messages(self, pop: PendingPop) -> PopResult:
        """Do one step of a pop: read its queues, and take the messages that match its filter.

        Return the messages. If none was found and queues must still be read, `is_unfinished` of the
        result is true. A read-only pop returns messages without taking them. Raises StoreError or
        RequestError if no checkpoint can be stored. Called for each step of a pop: keep it cheap.
        """
        pop_result = PopResult(
            self.steady_clock.now_ms(), self.steady_clock.monotonic_s() + READ_TIME_MAX_S
        )
        if pop.header.order:
            pop_result.revive_queue = ORDERED
        for source in self._sources.iter_queues(pop.header):
            self._take_from_queue(pop, pop_result, source)
        pop_result.is_unfinished &= not pop_result.count
        return pop_result

    def _take_from_queue(self, pop: PendingPop, pop_result: PopResult, source: Source) -> None:
        """Read one queue, take the messages that match, and add them to `pop_result`.

        Messages that the filter rejects are skipped: the offset of the group moves past them. If
        the offset of the group is outside the queue, it is set to a valid one that the store
        returns, with a warning.

        Nothing is read if an earlier ordered pop blocks the queue. Nothing is read, either, if
        `pop_result` is full or stopped, or if too many messages of the queue are in flight; then
        its messages are only counted in `rest_count`.

        Called for each queue: keep it cheap.
        """
        header = pop.header
        group = header.group
        topic, queue_id, _ = source

        # This may set the first offset of the group, so it comes before all early returns.
        offset = self._find_start_offset(pop, topic, queue_id)
        _, queue_end = self.store.queue_offsets(topic, queue_id)
        if header.order and not self.order.can_pop(
            group, topic, queue_id, header.attempt_id, pop_result.pop_ms
        ):
            return
        if offset == queue_end:
            return

        config = self.settings.broker
        if (  # the step has enough messages, or the group too many in flight
            pop_result.is_stopped
            or pop_result.count >= header.count_max
            or pop_result.size_bytes >= self.settings.store.max_transfer_bytes_memory
            or (
                config.pop_in_flight_limited
                and self.checkpoints.count_in_flight(group, topic, queue_id)
                > config.pop_in_flight_max
            )
        ):
            pop_result.rest_count += max(queue_end - offset, 0)
            return

        read_result = self._read_messages(pop, pop_result, topic, queue_id, offset)
        if read_result.status in _INVALID_OFFSET_STATUSES:
            valid_offset = read_result.next_offset
            self._replace_invalid_offset(pop, topic, queue_id, offset, valid_offset)
            offset = valid_offset
            read_result = self._read_messages(pop, pop_result, topic, queue_id, offset)
        if read_result.postponed is not None:
            # The filter must be evaluated in another thread, and then the next step reads again.
            pop_result.postponed = read_result.postponed
            pop_result.is_stopped = True
            pop_result.is_unfinished = True
            pop_result.rest_count += max(queue_end - offset, 0)
            return

        # Take what matches. If nothing does, skip what the filter has rejected.
        has_moved = read_result.next_offset > offset
        if read_result.count:
            self._take_read_messages(pop, pop_result, source, read_result)
        elif has_moved and not pop.is_read_only:
            self.checkpoints.skip_to(group, topic, queue_id, read_result.next_offset)

        # Say whether there is more to read, and whether there is time for it.
        unread_count = max(read_result.offset_max - read_result.next_offset, 0)
        pop_result.rest_count += unread_count
        # Unfinished only if this read has moved on: otherwise the next step would do the same.
        pop_result.is_unfinished |= unread_count > 0 and has_moved
        if pop.filter is not None:
            pop_result.is_stopped |= self.steady_clock.monotonic_s() >= pop_result.read_until_s

    def _replace_invalid_offset(
        self,
        pop: PendingPop,
        topic: str,
        queue_id: int,
        invalid_offset: int,
        valid_offset: int,
    ) -> None:
        """Set the offset of the group in a queue to `valid_offset`, and log a warning.

        `invalid_offset` is the offset at which the pop wanted to begin, where no message exists. If
        the pop is read-only, only the warning is logged.
        """
        group = pop.header.group
        log.warning(
            "the next offset of group %s in %s:%d was %d, where no message exists; the group"
            " continues at %d",
            group,
            topic,
            queue_id,
            invalid_offset,
            valid_offset,
        )
        if not pop.is_read_only:
            self.offsets.reset(group, topic, queue_id, valid_offset)
            # This removes the pending reset at once, because this pop itself follows it.
            self.checkpoints.resolve_next_offset(group, topic, queue_id)

    def _find_start_offset(self, pop: PendingPop, topic: str, queue_id: int) -> int:
        """Return the offset at which the pop begins in a queue.

        It is the offset at which the last pop of the group ended, or its committed offset. A group
        without an offset begins at the first message in these cases, otherwise at the last one:

        - `init_mode` is INIT_MODE_MIN, the topic is a retry topic, or the pop is read-only.
        - initPopOffsetByCheckMsgInMem is set, and the first message has offset 0 and is in memory.

        Then the result becomes the offset of the group, unless the pop is read-only.
        """
        group = pop.header.group
        offset = self.checkpoints.resolve_next_offset(group, topic, queue_id)
        if offset >= 0:
            return offset

        # The group has no offset yet.
        first_offset, end_offset = self.store.queue_offsets(topic, queue_id)
        begins_at_first = (
            pop.is_read_only
            or pop.header.init_mode == INIT_MODE_MIN
            or topic.startswith(RETRY_PREFIX)
        )
        if begins_at_first:
            offset = first_offset
        elif (
            first_offset == 0
            and self.settings.broker.pop_from_first_when_near
            and self.store.reader.is_in_memory(topic, queue_id, 0)
        ):
            offset = 0
        else:
            offset = max(end_offset - 1, 0)
        if not pop.is_read_only:
            self.checkpoints.skip_to(group, topic, queue_id, offset)
        return offset

    def _read_messages(
        self, pop: PendingPop, pop_result: PopResult, topic: str, queue_id: int, offset: int
    ) -> ReadResult:
        """Read messages of a queue from `offset` on, at most as many as the pop still needs.

        Only messages that match the filter of the pop are returned. Rejected messages are counted
        in the statistics of the group. If the filter must be evaluated on another thread first,
        `postponed` of the result is that work. Called for each queue: keep it cheap.
        """
        missing_count = pop.header.count_max - pop_result.count
        message_filter = pop.filter
        read_result = self.store.reader.read(
            topic, queue_id, offset, missing_count, None, message_filter, may_postpone=True
        )

        delivered = self.delivered[topic, pop.header.group]
        delivered.filtered_count += read_result.units_scanned - read_result.count
        if (  # the filter may be wrong about these messages: they are checked later
            read_result.units_scanned
            and not read_result.is_filter_reliable
            and message_filter
            and message_filter.reads_properties
        ):
            end = offset + read_result.units_scanned
            delivered.add_range_to_check(message_filter, queue_id, offset, end)
        return read_result

    def _take_read_messages(
        self, pop: PendingPop, pop_result: PopResult, source: Source, read_result: ReadResult
    ) -> None:
        """Take the messages that were read from one queue, and add them to `pop_result`.

        First they are recorded as in flight: in the table of ordered pops, or by a checkpoint
        record. A read-only pop records nothing. Messages of a retry topic are added as copies with
        the name of the requested topic and their receipt handle, unless the pop is read-only or the
        broker is set to return them as stored. Called for each queue: keep it cheap.

        If the checkpoint cannot be stored, and `pop_result` has no messages yet, StoreError is
        raised. If it has some, a warning is logged, `pop_result.is_stopped` is set, and the
        messages of this queue stay there.
        """
        header = pop.header
        group = header.group
        invisible_ms = header.invisible_ms
        topic, queue_id, topic_kind = source
        records = list(read_result.records())
        offsets = [offset for offset, _ in records]
        popped_by = self.consumers.client_name(group, pop.peer)

        # Record the messages as in flight, before anything is added to the result.
        if pop.is_read_only:
            pass
        elif header.order:
            self._record_ordered_pop(pop, pop_result, source, offsets)
        else:
            try:
                pop_result.revive_queue = self.checkpoints.record_pop(
                    group=group,
                    topic=topic,
                    queue_id=queue_id,
                    offsets=offsets,
                    next_offset=read_result.next_offset,
                    pop_ms=pop_result.pop_ms,
                    invisible_ms=invisible_ms,
                    popped_by=popped_by,
                )
            except StoreError as error:
                if not pop_result.count:
                    raise
                log.warning(
                    "a pop of group %s returns fewer messages than are available: %s", group, error
                )
                pop_result.is_stopped = True
                pop_result.rest_count += read_result.count
                return

        # Add their offsets, sizes and bodies to the result.
        pop_result.first_offsets.append((topic_kind, queue_id, offsets[0]))
        pop_result.taken_offsets.append((topic_kind, queue_id, ",".join(map(str, offsets))))
        pop_result.count += read_result.count
        pop_result.size_bytes += read_result.size_bytes
        is_as_stored = pop.is_read_only or self.settings.broker.pop_actual_retry_topic
        if topic == header.topic or is_as_stored:
            pop_result.data += without_handles(records, read_result.data)
        else:
            pop_result.data += self._add_handles(pop, pop_result, source, records)

        delivered = self.delivered[topic, group]
        delivered.messages_out += read_result.count
        delivered.bytes_out += read_result.size_bytes

    def _record_ordered_pop(
        self, pop: PendingPop, pop_result: PopResult, source: Source, offsets: list[int]
    ) -> None:
        """Record that an ordered pop takes the messages at `offsets` of a queue.

        How often they were delivered before is added to `pop_result.order_counts`: an entry for
        each message that was delivered before, and one with the minimum of the queue.
        """
        header = pop.header
        topic, queue_id, topic_kind = source
        delivery_counts = self.order.record_pop(
            group=header.group,
            topic=topic,
            queue_id=queue_id,
            offsets=offsets,
            attempt_id=header.attempt_id,
            pop_ms=pop_result.pop_ms,
            invisible_ms=header.invisible_ms,
            popped_by=self.consumers.client_name(header.group, pop.peer),
        )
        for offset, count in delivery_counts.by_offset.items():
            pop_result.order_counts.append((topic_kind, f"qo{queue_id}%{offset}", count))
        pop_result.order_counts.append((topic_kind, queue_id, delivery_counts.minimum))

    def _add_handles(
        self,
        pop: PendingPop,
        pop_result: PopResult,
        source: Source,
        records: list[tuple[int, memoryview]],
    ) -> list[bytes | memoryview]:
        """Return copies of messages of a retry topic, as the client expects them.

        Each copy has the name of the requested topic, and the receipt handle of the message as a
        property. `records` are (offset, record) of each message.
        """
        _, queue_id, topic_kind = source
        first_offset, _ = records[0]
        handle = ReceiptHandle(
            start_offset=first_offset,
            pop_ms=pop_result.pop_ms,
            invisible_ms=pop.header.invisible_ms,
            revive_queue=pop_result.revive_queue,
            kind=topic_kind,
            broker=self.settings.broker.broker_name,
            queue_id=queue_id,
        )
        return [
            with_handle(record, pop.header.topic, handle._replace(offset=offset))
            for offset, record in records
        ]

    def _has_messages(self, pop: PendingPop) -> bool:
        """Return whether a pop may find messages, for a notification.

        Queues that an ordered pop may not read now are skipped. The result may be True although the
        filter rejects all messages: if more than NOTIFICATION_SCAN_MAX messages of a queue are
        unread, or if evaluating the filter for all of them takes too long.
        """
        header = pop.header
        message_filter = pop.filter
        now_ms = self.steady_clock.now_ms()
        for topic, queue_id, _ in self._sources.iter_queues(header):
            offset = self._find_start_offset(pop, topic, queue_id)
            _, queue_end = self.store.queue_offsets(topic, queue_id)
            if offset >= queue_end:
                continue
            if header.order and not self.order.can_pop(
                header.group, topic, queue_id, header.attempt_id, now_ms
            ):
                continue
            if message_filter is None or queue_end - offset > NOTIFICATION_SCAN_MAX:
                return True
            read_result = self.store.reader.read(topic, queue_id, offset, 1, None, message_filter)
            if read_result.count or read_result.next_offset < queue_end:
                return True
        return False

    # -------------------------------------------------------------------------------- waiting

    def _find_deadline_ms(self, born_time_ms: int | None, poll_ms: int, now_ms: int) -> int:
        """Return the end of a request's waiting time, in ms since 1970 of the steady clock.

        It is `poll_ms` after `born_time_ms`, the time of the client's clock when it sent the
        request. 0 or None means now. The result is at most `poll_ms` after `now_ms`, the present
        time of the steady clock.
        """
        if not born_time_ms:
            return now_ms + poll_ms
        # `lead_ms` converts a time of the wall clock to the steady clock.
        sent_ms = born_time_ms + self.steady_clock.lead_ms
        return min(sent_ms, now_ms) + poll_ms

    def _continue_unfinished(
        self, pop: PendingPop, pop_result: PopResult
    ) -> WorkItem[bytes | Durable | Parked]:
        """Take messages in further steps until some are found or the deadline has passed.

        `pop_result` is the result of the first step, which was unfinished. This is a generator. It
        yields before each further step: a function that evaluates a filter, to be run on another
        thread, if the step needs that, otherwise None. It returns the encoded response, or `Parked`
        if nothing was found and the pop may still wait.

        Raises RequestError if the group may not pop with this filter any more, or StoreError.
        """
        while pop_result.is_unfinished:
            filter_work = pop_result.postponed
            if filter_work is not None:
                filter_work.store_result((yield filter_work.run))
            else:
                yield None
                if self.steady_clock.now_ms() >= pop.deadline_ms:
                    break
            self._admit(pop.header, pop.peer)
            pop_result = self._take_messages(pop)
        return self._answer_or_park(pop, pop_result)

    def _answer_or_park(self, pop: PendingPop, pop_result: PopResult) -> bytes | Durable | Parked:
        """Return the encoded response of a pop whose steps have ended with `pop_result`.

        If `pop_result` has no messages, return `Parked` if the pop may wait for some, otherwise a
        response without messages.
        """
        if pop_result.count:
            return encode_pop_answer(pop, pop_result)
        refusal_code = self._find_reason_not_to_park(pop)
        if refusal_code is not None:
            return encode_pop_answer(pop, pop_result, refusal_code)
        return self._create_parked(pop, self._retry_pop)

    def _find_reason_not_to_park(self, pop: PendingPop) -> ResponseCode | None:
        """Return None if the request may be parked, otherwise the code of its response.

        POLLING_TIMEOUT means that the request does not wait, or that its waiting time is over.
        POLLING_FULL means that too many requests are parked, in all or for its queue and group.
        """
        header = pop.header
        config = self.settings.broker
        if header.poll_ms <= 0:
            return ResponseCode.POLLING_TIMEOUT
        if self.polls.parked_pops >= config.pop_polling_total_max:
            return ResponseCode.POLLING_FULL
        if self.steady_clock.now_ms() > pop.deadline_ms - ANSWER_EARLY_MS:
            return ResponseCode.POLLING_TIMEOUT

        queue_id = max(header.queue_id, ANY_QUEUE)
        competing_count = self.polls.count_waiting_pops(header.topic, queue_id, pop.competition_key)
        if competing_count > config.pop_polling_max:
            return ResponseCode.POLLING_FULL
        return None

    def _create_parked(
        self,
        pop: PendingPop,
        try_answer: Callable[[PendingPop, Parked, bool], bytes | Durable | None],
    ) -> Parked:
        """Return a `Parked`, by which the request waits for messages.

        It waits for its queue, and for the retry topics if the pop is not ordered. `try_answer(pop,
        parked, is_last)` is called when messages arrive there, and with `is_last` True shortly
        (ANSWER_EARLY_MS) before the deadline. It returns the encoded response, or None if the
        request remains parked.
        """
        header = pop.header
        answer_ms = pop.deadline_ms - ANSWER_EARLY_MS
        wait_ms = min(answer_ms - self.steady_clock.now_ms(), WAIT_MS_MAX)

        queues = [(header.topic, max(header.queue_id, ANY_QUEUE))]
        # An ordered pop does not read retry topics.
        retry_kinds = () if header.order else self._sources.retry_kinds
        queues += [
            (pop_topic(header.topic, header.group, retry_kind), ANY_QUEUE)
            for retry_kind in retry_kinds
        ]
        return Parked(
            command=pop.command,
            queues=tuple(queues),
            scan_offset=-1,
            deadline_s=self.steady_clock.monotonic_s() + wait_ms / 1000,
            try_answer=partial(try_answer, pop),
            competition_key=pop.competition_key,
        )

    def _retry_pop(self, pop: PendingPop, parked: Parked, is_last: bool) -> bytes | Durable | None:
        """Try to answer a parked pop. Return the encoded response, or None if it remains parked.

        Called when messages have arrived, and a last time at the deadline (`is_last`), because a
        message can become available without notice. The last call always returns a response.
        `parked.has_left_messages` is set if messages are left for other pops. If the pop needs more
        steps, another attempt is started in the background. Called often: keep it cheap.
        """
        try:
            if is_last:
                self._check_target(pop.header, pop.peer)
                if self._is_not_parked(parked):  # the queues have just been read
                    return encode_pop_answer(pop, PopResult(0, 0.0), ResponseCode.POLLING_FULL)
            self._admit(pop.header, pop.peer)
        except RequestError as refusal:
            fields = encode_header(PopMessageResponse())
            return encode_response(pop.command, refusal.code, fields, remark=refusal.remark)

        pop_result = self._take_messages(pop)
        if pop_result.count:
            parked.has_left_messages = pop_result.rest_count > 0
            return encode_pop_answer(pop, pop_result)
        if is_last:
            return encode_pop_answer(pop, pop_result, ResponseCode.POLLING_TIMEOUT)
        if pop_result.is_unfinished:
            parked.is_attempt_pending = True
            next_attempt = self.polls.retry_after(parked, pop.peer, pop_result.postponed)
            self.background.run_in_background(next_attempt, pop.peer)
        return None

    def _retry_notification(self, pop: PendingPop, parked: Parked, is_last: bool) -> bytes | None:
        """Try to answer a parked notification request.

        Return the encoded response, or None if the request remains parked. Called when messages
        have arrived, and a last time at the deadline (`is_last`), because a message may have been
        offered to another notification. The last call always returns a response.
        """
        if is_last:
            try:
                self._check_target(pop.header, pop.peer)
            except RequestError as refusal:
                fields = encode_header(NotificationResponse())
                return encode_response(pop.command, refusal.code, fields, remark=refusal.remark)
            if self._is_not_parked(parked):  # the queues have just been read
                return encode_notification(pop, NotificationResponse(is_full=True))
        if self._has_messages(pop):
            return encode_notification(pop, NotificationResponse(has_messages=True))
        if is_last:
            return encode_notification(pop, NotificationResponse())
        return None

    def _is_not_parked(self, parked: Parked) -> bool:
        """Return whether the last attempt is made before the deadline of the request.

        That means that the request could not be parked, because too many are parked.
        """
        return self.steady_clock.monotonic_s() < parked.deadline_s


def _peek_to_pop_header(header: PeekMessageRequest) -> PopMessageRequest:
    """Return the request of the pop that would take what a peek asks for."""
    return PopMessageRequest(
        group=header.group,
        topic=header.topic,
        queue_id=header.queue_id,
        count_max=header.count_max,
        invisible_ms=0,
        poll_ms=0,
        init_mode=INIT_MODE_MIN,
    )


def _notification_to_pop_header(header: NotificationRequest) -> PopMessageRequest:
    """Return the request of the pop that would find what a notification asks for."""
    return PopMessageRequest(
        group=header.group,
        topic=header.topic,
        queue_id=header.queue_id,
        count_max=1,
        invisible_ms=0,
        poll_ms=header.poll_ms,
        init_mode=INIT_MODE_MIN,
        order=header.order,
        attempt_id=header.attempt_id,
        expression=header.expression,
    )
