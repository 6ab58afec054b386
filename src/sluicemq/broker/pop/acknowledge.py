"""Handlers for requests about messages that were popped (spec/grpc.md §8).

`PopAckHandlers` answers ACK_MESSAGE (200051), BATCH_ACK_MESSAGE (200151) and
CHANGE_MESSAGE_INVISIBLETIME (200053). `InFlightHandlers` answers SLUICE_IN_FLIGHT (900134),
and counts messages in flight for the lag of groups.

Acknowledging a message twice, or too late, has no effect and causes no error. Changing the
invisible time of a message makes it invisible from now on, and returns another receipt handle. A
message is in flight from the pop until it is acknowledged or visible again.

The receipt handle identifies the pop that took the message. Messages of unordered pops are in
flight in `checkpoints.py`, and the response is sent when the change is stored. Messages of ordered
pops are in flight in `order.py`. The former are before the offset from which the group continues,
so they count in addition to the messages behind it. The latter are behind the group's committed
offset, where some may be acknowledged already.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from sluicemq.broker.consume.delivery import DeliveryStates
from sluicemq.broker.context import BrokerComponent, BrokerContext
from sluicemq.broker.group_commit import Durable, Postponed
from sluicemq.broker.offsets import SEPARATOR, UnfinishedMessages
from sluicemq.broker.pop.checkpoints import PopCheckpoints
from sluicemq.broker.pop.order import OrderedPops, find_invisible_until_ms
from sluicemq.broker.topics import Groups, make_no_queue_error, make_no_topic_error
from sluicemq.clock import Clock
from sluicemq.errors import RequestError
from sluicemq.model.topic import pop_origin, pop_topic
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import Background, WorkItem, decode_body
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command, encode_response
from sluicemq.wire.popping import (
    UNSET_REMARK,
    AckMessageRequest,
    ChangeInvisibleTimeRequest,
    ChangeInvisibleTimeResponse,
    InFlightRequest,
    PopAck,
    ReceiptHandle,
    decode_pop_acks,
)
from sluicemq.wire.tables import OrderInfo

ACKS_PER_STEP: Final = 64
"""The acknowledgements of a batch that one step of the work item appends."""
LISTED_MESSAGES_MAX: Final = 1000
"""The most messages in a response to SLUICE_IN_FLIGHT."""
ENTRIES_PER_STEP: Final = 1000
"""The entries that one step of a list examines."""
READS_PER_STEP: Final = 100
"""The messages that one step of a list reads from the log."""


class PopAckHandlers(BrokerComponent):
    """Handlers that acknowledge popped messages or change their invisible time."""

    def __init__(
        self,
        context: BrokerContext,
        *,
        checkpoints: PopCheckpoints,
        order: OrderedPops,
        delivered: DeliveryStates,
    ) -> None:
        """Create the handlers.

        `checkpoints` has the messages in flight (popped and not acknowledged) of unordered pops,
        and `order` those of ordered pops. `delivered` counts acknowledgements by topic and group.
        """
        super().__init__(context)
        self.group_commit = context.group_commit
        self.steady_clock = context.steady_clock
        self.checkpoints = checkpoints
        self.order = order
        self.delivered = delivered

    def acknowledge(self, header: AckMessageRequest, command: Command, peer: Peer) -> Durable:
        """Acknowledge one popped message: answer ACK_MESSAGE (200051).

        The returned response is sent when the acknowledgement is on disk. A message that is no
        longer in flight is ignored. Called for each message: keep it cheap.

        Raises RequestError if the queue does not exist or the offset is outside it, and
        ProtocolError if the receipt handle is malformed. Raises RequestError or StoreError if the
        acknowledgement cannot be appended.
        """
        first_offset, end_offset = self._find_queue_bounds(header, peer)
        if not first_offset <= header.offset <= end_offset:
            raise RequestError(
                ResponseCode.NO_MESSAGE,
                f"offset is illegal, key:{header.topic}@{header.queue_id}, "
                f"commit:{header.offset}, store:{first_offset}~{end_offset}",
            )
        handle = ReceiptHandle.parse(header.handle)._replace(queue_id=header.queue_id)
        self._apply_acknowledgement(PopAck(header.group, header.topic, handle, (header.offset,)))
        return Durable.for_command(command, encode_response(command))

    def acknowledge_batch(self, command: Command, peer: Peer) -> Postponed:
        """Acknowledge the messages in the body: answer BATCH_ACK_MESSAGE (200151).

        Return a `Postponed`, because the body is decoded and the messages are acknowledged in
        steps. The answer is sent when the acknowledgements are on disk. Its code is NO_MESSAGE if
        the body has no acknowledgements. Acknowledgements of missing queues or offsets are skipped.
        """

        def decode_and_acknowledge() -> WorkItem[Any]:
            acks: list[PopAck] = []
            if command.body:
                acks = yield from decode_body(decode_pop_acks, command.body)
            if not acks:
                return Command(ResponseCode.NO_MESSAGE)
            return (yield from self._acknowledge_in_steps(acks, command))

        return Postponed(decode_and_acknowledge())

    def change_invisible_time(
        self, header: ChangeInvisibleTimeRequest, command: Command, peer: Peer
    ) -> Durable:
        """Change for how long a message is invisible: CHANGE_MESSAGE_INVISIBLETIME (200053).

        The message was popped. It is delivered again when the new time is over. The response has
        the fields of its new receipt handle, and is sent when the change is on disk. If the request
        is refused, an error response is returned, whose fields are all 0, as in RocketMQ. Raises
        StoreError if the change cannot be appended.
        """
        code = ResponseCode.SUCCESS
        remark = UNSET_REMARK
        answer_header = ChangeInvisibleTimeResponse()
        try:
            first_offset, end_offset = self._find_queue_bounds(header, peer)
            if first_offset <= header.offset < end_offset:
                answer_header = self._change_invisible_time(header)
            else:
                code = ResponseCode.NO_MESSAGE
        except RequestError as refusal:
            code = ResponseCode(refusal.code)
            remark = refusal.remark
        fields = encode_header(answer_header)
        return Durable.for_command(command, encode_response(command, code, fields, b"", remark))

    def _find_queue_bounds(self, header: AckMessageRequest, peer: Peer) -> tuple[int, int]:
        """Check that the queue of a request exists, and return (first offset, end offset).

        The end offset is the last offset plus 1. Raises RequestError if the topic or queue does not
        exist, or if the request names a lite topic, which this broker does not support.
        """
        if header.lite_topic:
            raise RequestError(
                ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
                f"The message is in the lite topic {header.lite_topic}. This broker does not "
                "support lite topics.",
            )
        topic = self.topics.get(header.topic)
        if topic is None:
            raise make_no_topic_error(header.topic)
        if not 0 <= header.queue_id < topic.config.read_queues:
            raise make_no_queue_error(
                topic, header.queue_id, peer.remote, ResponseCode.MESSAGE_ILLEGAL
            )
        return self.store.queue_offsets(header.topic, header.queue_id)

    def _apply_acknowledgement(self, ack: PopAck) -> None:
        """Acknowledge messages of one pop, and count them for the group.

        `ack.topic` is the topic in which the messages are stored, which may be the retry topic.
        Raises RequestError or StoreError. Called for each acknowledgement: keep it cheap.
        """
        group, topic, handle, offsets = ack
        if handle.is_ordered:
            for offset in offsets:
                self.order.acknowledge(group, topic, handle.queue_id, offset, handle.pop_ms)
        else:
            self.checkpoints.acknowledge(group, topic, handle, offsets)
        self.delivered[pop_origin(topic, group), group].acknowledged_count += len(offsets)

    def _acknowledge_in_steps(self, acks: list[PopAck], command: Command) -> WorkItem[Any]:
        """Acknowledge the messages of a batch in steps, and return the answer as a `Durable`.

        This is a generator, which yields None after each ACKS_PER_STEP acknowledgements. Offsets
        outside of their queue are skipped. A refused acknowledgement does not stop the others.

        At the end, the last RequestError is raised if one was refused. RequestError (SYSTEM_ERROR)
        is raised if the commit of an earlier step failed, because the answer waits only for the
        commit of the last step. StoreError is raised at once if an acknowledgement cannot be
        appended.
        """
        failed_commits_before = self.group_commit.failed_commit_count
        last_refusal = None
        for index, ack in enumerate(acks):
            if index > 0 and index % ACKS_PER_STEP == 0:
                yield None  # ends a step
            existing_ack = self._select_existing(ack)
            if existing_ack is None:
                continue
            try:
                self._apply_acknowledgement(existing_ack)
            except RequestError as error:
                last_refusal = error
        if last_refusal is not None:
            raise last_refusal
        if self.group_commit.failed_commit_count != failed_commits_before:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                "Some of the acknowledgements were not stored. Send all of them again.",
            )
        return Durable.for_command(command, encode_response(command))

    def _select_existing(self, ack: PopAck) -> PopAck | None:
        """Return `ack` with only those offsets that exist in its queue.

        Its topic is replaced by the topic in which the messages are stored, which may be a retry
        topic. Return None if the queue does not exist, or if no offset is left.
        """
        queue_id = ack.handle.queue_id
        topic = pop_topic(ack.topic, ack.group, ack.handle.kind)
        first_offset, end_offset = self.store.queue_offsets(topic, queue_id)
        existing_offsets = tuple(
            offset for offset in ack.offsets if first_offset <= offset <= end_offset
        )
        if not existing_offsets or not self.store.queue_exists(topic, queue_id):
            return None
        return ack._replace(topic=topic, offsets=existing_offsets)

    def _change_invisible_time(
        self, header: ChangeInvisibleTimeRequest
    ) -> ChangeInvisibleTimeResponse:
        """Change the invisible time of a message, and return the fields of its new handle.

        If the message is of an ordered pop and before the committed offset, it is acknowledged
        already: nothing changes, and all fields are 0. Raises RequestError or StoreError.
        """
        group = header.group
        topic = header.topic
        queue_id = header.queue_id
        offset = header.offset
        handle = ReceiptHandle.parse(header.handle)._replace(queue_id=queue_id, offset=offset)
        if not handle.is_ordered:
            new_handle = self.checkpoints.change_invisible_time(
                group, topic, handle, header.invisible_ms, is_suspended=header.suspend
            )
        else:
            is_acknowledged = offset < self.offsets.committed(group, topic, queue_id)
            if is_acknowledged:
                return ChangeInvisibleTimeResponse()
            visible_ms = self.steady_clock.now_ms() + header.invisible_ms
            self.order.set_visible_time(group, topic, queue_id, offset, handle.pop_ms, visible_ms)
            new_handle = handle._replace(invisible_ms=visible_ms - handle.pop_ms)
        return ChangeInvisibleTimeResponse(
            pop_ms=new_handle.pop_ms,
            invisible_ms=new_handle.invisible_ms,
            revive_queue=new_handle.revive_queue,
        )


@dataclass(slots=True, eq=False)
class InFlightHandlers:
    """Lists and counts the messages that are in flight after pops."""

    groups: Groups
    checkpoints: PopCheckpoints
    order: OrderedPops
    clock: Clock
    background: Background

    def count_unfinished(self, group: str, topic: str, queue_id: int) -> UnfinishedMessages:
        """Return how many messages of a queue the group has not finished, to compute its lag.

        All messages from `start` of the result on are unfinished, and `extra` more before it.
        """
        # Messages in flight of unordered pops are before the next offset, so they are extra.
        next_offset = self.checkpoints.get_next_offset(group, topic, queue_id)
        in_flight_count = self.checkpoints.count_in_flight(group, topic, queue_id)
        extra_count = in_flight_count

        ordered_pop = self.order.table.get(f"{topic}{SEPARATOR}{group}", {}).get(queue_id)
        if ordered_pop is not None:
            now_ms = self.clock.now_ms()
            visible_ms_by_offset = find_invisible_until_ms(ordered_pop)
            for visible_ms in visible_ms_by_offset.values():
                if visible_ms > now_ms:
                    in_flight_count += 1
            for offset in ordered_pop.offsets:
                is_acknowledged = offset not in visible_ms_by_offset
                if is_acknowledged and offset >= next_offset:
                    # It is finished, although it is after the start of the unfinished messages.
                    extra_count -= 1
        return UnfinishedMessages(next_offset, in_flight_count, extra_count)

    def list_in_flight(
        self, header: InFlightRequest, command: Command, peer: Peer
    ) -> Command | None:
        """Answer SLUICE_IN_FLIGHT (900134): list popped messages that are not acknowledged.

        `header` names the group. It may restrict the list to a topic, queue, offset, and number of
        messages. At most LISTED_MESSAGES_MAX are listed. Messages of unordered pops come first, in
        the order in which they were popped. The work is done in steps: None is returned if the
        answer is sent later. Raises RequestError if the group does not exist.
        """
        self.groups.check_exists(header.group)

        def list_in_steps() -> WorkItem[Command]:
            listed: list[bodies.InFlightMessage] = []
            count_max = min(header.count_max or LISTED_MESSAGES_MAX, LISTED_MESSAGES_MAX)
            for index, message in enumerate(self._iter_in_flight(header)):
                if message is not None:
                    listed.append(message)
                if len(listed) >= count_max:
                    break
                if index % ENTRIES_PER_STEP == 0 or len(listed) % READS_PER_STEP == 1:
                    yield None  # ends a step
            return Command(ResponseCode.SUCCESS, {}, bodies.encode_in_flight(listed))

        return self.background.answer(list_in_steps(), command, peer)

    def _iter_in_flight(self, header: InFlightRequest) -> Iterator[bodies.InFlightMessage | None]:
        """Yield the messages in flight that `header` asks for, unordered pops first.

        Between them, yield None for checkpoints that do not match, and after each topic and group
        of ordered pops, so that the caller can limit the time of a step.
        """
        now_ms = self.clock.now_ms()
        yield from self._iter_of_unordered_pops(header)
        yield from self._iter_of_ordered_pops(header, now_ms)

    def _iter_of_unordered_pops(
        self, header: InFlightRequest
    ) -> Iterator[bodies.InFlightMessage | None]:
        """Yield the requested messages that unordered pops have in flight.

        Also yield None for each pop that was not requested, so that the caller can end a step.
        """
        # Of copies, because the table may change between two steps of the list.
        for open_checkpoint in [*self.checkpoints.open_checkpoints]:
            checkpoint = open_checkpoint.checkpoint
            topic = checkpoint.topic
            queue_id = checkpoint.queue_id
            if checkpoint.group != header.group or not _is_requested(header, topic, queue_id):
                yield None
                continue
            for offset in open_checkpoint.pending_offsets:
                if header.offset not in (None, offset):
                    continue
                record = self.checkpoints.read_message(topic, queue_id, offset)
                earlier_delivery_count = record.reconsume_times if record is not None else 0
                yield bodies.InFlightMessage(
                    topic=topic,
                    queue_id=queue_id,
                    queue_offset=offset,
                    popped_ms=checkpoint.pop_ms,
                    visible_ms=checkpoint.deadline_ms,
                    client_id=open_checkpoint.popped_by,
                    delivery_count=earlier_delivery_count + 1,
                )

    def _iter_of_ordered_pops(
        self, header: InFlightRequest, now_ms: int
    ) -> Iterator[bodies.InFlightMessage | None]:
        """Yield the requested messages that ordered pops have in flight.

        Messages that are visible again at `now_ms` are left out. Also yield None after each topic
        and group, so that the caller can end a step.
        """
        for topic_at_group, last_pops in [*self.order.table.items()]:
            topic, _, group = topic_at_group.partition(SEPARATOR)
            for queue_id, last_pop in last_pops.items():
                if group == header.group and _is_requested(header, topic, queue_id):
                    popped_by = self.order.popped_by.get((topic_at_group, queue_id), "")
                    for message in _describe_last_pop(topic, queue_id, last_pop, popped_by):
                        is_in_flight = message.visible_ms > now_ms
                        if is_in_flight and header.offset in (None, message.queue_offset):
                            yield message
            yield None


def _describe_last_pop(
    topic: str, queue_id: int, last_pop: OrderInfo, popped_by: str
) -> Iterator[bodies.InFlightMessage]:
    """Yield the messages of an ordered pop that are not acknowledged.

    A message is yielded even if it is visible again, that is, if the time after which it may be
    delivered again is over. `popped_by` is the client id or address of the consumer.
    """
    earlier_delivery_counts = last_pop.counts or {}
    for offset, visible_ms in find_invisible_until_ms(last_pop).items():
        yield bodies.InFlightMessage(
            topic=topic,
            queue_id=queue_id,
            queue_offset=offset,
            popped_ms=last_pop.pop_ms,
            visible_ms=visible_ms,
            client_id=popped_by,
            delivery_count=earlier_delivery_counts.get(offset, 0) + 1,
        )


def _is_requested(header: InFlightRequest, topic: str, queue_id: int) -> bool:
    """Return whether `header` asks for messages of the queue. None in a field means all."""
    return header.topic in (None, topic) and header.queue_id in (None, queue_id)
