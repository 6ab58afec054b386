"""Handlers for requests of operators about the offsets of consumer groups.

    INVOKE_BROKER_TO_RESET_OFFSET (222)   send a group to another offset of a topic: by time, to a
                                          given offset, or to the end
    QUERY_CONSUME_TIME_SPAN (303)         the age of the messages that a group consumes now
    QUERY_CORRECTION_OFFSET (308)         the least offset of all groups, queue by queue
    CLONE_GROUP_OFFSET (314)              copy the offsets of one group to another
    QUERY_CONSUME_QUEUE (321)             the units of a queue as they are stored

A reset is done by the broker (`useServerSideResetOffset`, the default; `offsets.py` says how long
it lasts), or by the consumers, which are asked with RESET_CONSUMER_CLIENT_OFFSET (220). In the
second case they have to be connected, and a client that does not know that request does nothing;
RocketMQ 4.x can do only this.
"""

import logging
from collections.abc import Iterable
from functools import partial
from typing import Final

from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.longpoll import LongPolls
from sluicemq.broker.context import BrokerComponent, BrokerContext
from sluicemq.broker.group_commit import Announced, Postponed
from sluicemq.broker.topics import Topic
from sluicemq.errors import RequestError
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import RETRY_PREFIX, MessageQueue
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import WorkItem
from sluicemq.store.queues import UNIT
from sluicemq.wire import bodies
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import (
    CloneGroupOffsetRequest,
    QueryConsumeQueueRequest,
    QueryCorrectionOffsetRequest,
    ResetOffsetRequest,
    TopicGroupRequest,
)

log = logging.getLogger(__name__)

UNITS_MAX: Final = 2000
"""The most units in an answer to QUERY_CONSUME_QUEUE."""
NO_GROUP_BEHIND: Final = (1 << 63) - 1
"""The offset that QUERY_CORRECTION_OFFSET gives if the compared group is behind all others."""


class GroupOffsetHandlers(BrokerComponent):
    """Request handlers for offsets of groups.

    They answer INVOKE_BROKER_TO_RESET_OFFSET (222), QUERY_CONSUME_TIME_SPAN (303),
    QUERY_CORRECTION_OFFSET (308), CLONE_GROUP_OFFSET (314) and QUERY_CONSUME_QUEUE (321).
    """

    def __init__(self, context: BrokerContext, *, consumers: Consumers, polls: LongPolls) -> None:
        """Create the handlers. `polls` has the requests that wait for the queues of a reset."""
        super().__init__(context)
        self.consumers = consumers
        self.polls = polls
        self.group_commit = context.group_commit

    # --------------------------------------------------------------------------------- reset

    def reset_offsets(
        self, header: ResetOffsetRequest, command: Command, peer: Peer
    ) -> Command | Announced:
        """Reset the offsets of a group on a topic: answer INVOKE_BROKER_TO_RESET_OFFSET (222).

        If the broker resets offsets itself (a setting), the answer has the new offset of each
        queue, and is sent when they are on disk. Otherwise the connected members are asked to reset
        their offsets.

        Raises RequestError if the topic, group or queue does not exist, or if the offset is not in
        the queue.
        """
        topic = self.topics.require(header.topic)
        self.groups.check_exists(header.group)
        is_server_side = self.settings.broker.server_side_reset
        offsets = self._choose_offsets(header, topic, is_server_side=is_server_side)
        log.info(
            "%s resets group %s of topic %s: %s",
            peer.remote,
            header.group,
            topic.name,
            ", ".join(f"queue {queue.queue_id} to {offset}" for queue, offset in offsets.items()),
        )
        if is_server_side:
            self._apply_reset(header.group, offsets)
            body = bodies.encode_queue_offsets(offsets)
            return Announced(Command(ResponseCode.SUCCESS, body=body))
        return self._ask_consumers_to_reset(header, offsets, command.language)

    def _choose_offsets(
        self, header: ResetOffsetRequest, topic: Topic, *, is_server_side: bool
    ) -> dict[MessageQueue, int]:
        """Return the queues that a request resets, each with its new offset.

        All queues of the topic are reset. But if the broker resets offsets itself
        (`is_server_side`), the request may name one queue, and also its new offset. If the request
        has no offset (None or -1), the new offset is that of the time in the request, or the end of
        the queue if the time is negative.

        Raises RequestError if the queue does not exist, or if the offset is not in the queue.
        """
        name = topic.name
        queue_ids: Iterable[int] = range(topic.config.read_queues)
        names_queue = is_server_side and header.queue_id >= 0
        if names_queue:
            if header.queue_id not in queue_ids:
                raise RequestError(
                    ResponseCode.SYSTEM_ERROR,
                    f"Queue {header.queue_id} does not exist: topic {name} has "
                    f"{topic.config.read_queues} queues.",
                )
            queue_ids = [header.queue_id]
            if header.offset is not None and header.offset != -1:
                self._check_offset(name, header.queue_id, header.offset)
                return {self._make_message_queue(name, header.queue_id): header.offset}

        return {
            self._make_message_queue(name, queue_id): self._find_offset_at(
                name, queue_id, header.time_ms
            )
            for queue_id in queue_ids
        }

    def _check_offset(self, topic: str, queue_id: int, offset: int) -> None:
        """Raise RequestError if an offset is not in a queue."""
        offset_min, offset_end = self.store.queue_offsets(topic, queue_id)
        # RocketMQ's broker also accepts the end plus one.
        if not offset_min <= offset <= offset_end + 1:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"Offset {offset} is outside queue {queue_id} of topic {topic}, which "
                f"holds {offset_min} to {offset_end}.",
            )

    def _find_offset_at(self, topic: str, queue_id: int, time_ms: int) -> int:
        """Return the offset of a queue at a store time; the end of the queue if it is negative."""
        if time_ms < 0:
            return self.store.queue_offsets(topic, queue_id)[1]
        return self.store.reader.offset_by_time(topic, queue_id, time_ms, "lower")

    def _apply_reset(self, group: str, offsets: dict[MessageQueue, int]) -> None:
        """Reset the offsets of a group, or of its lanes if it has lanes.

        The requests that wait for these queues are retried, because they must start at the new
        offsets. A commit is scheduled.
        """
        for queue, offset in offsets.items():
            if not self.consumers.lanes.reset_queue(group, queue.topic, queue.queue_id, offset):
                self.offsets.reset(group, queue.topic, queue.queue_id, offset)
            self.polls.wake(queue.topic, queue.queue_id)
        self.group_commit.schedule_commit()

    def _ask_consumers_to_reset(
        self, header: ResetOffsetRequest, offsets: dict[MessageQueue, int], language: str
    ) -> Command:
        """Send RESET_CONSUMER_CLIENT_OFFSET (220) to every member, which resets its queues.

        Return the answer, with the offsets. Without `force`, a queue whose new offset would be
        greater than the committed one keeps the committed one. The answer is an error, and nothing
        is sent, if the group has no members, or if a queue has no committed offset, as in
        RocketMQ. `language` is that of the requesting client: the C++ client expects the offsets in
        another format.
        """
        group = self.consumers.groups.get(header.group)
        if group is None:
            return Command(
                ResponseCode.CONSUMER_NOT_ONLINE,
                remark=f"Consumer not online, so can not reset offset, Group: {header.group} "
                f"Topic: {header.topic} Timestamp: {header.time_ms}",
            )

        for queue, offset in list(offsets.items()):
            committed = self.offsets.committed(header.group, queue.topic, queue.queue_id)
            if committed < 0:
                return Command(
                    ResponseCode.SYSTEM_ERROR,
                    remark=f"The consumer group <{header.group}> not exist",
                )
            if not header.force and offset >= committed:
                offsets[queue] = committed

        # Only after all queues were checked, because an error must not reset a part of them.
        if language == "CPP":
            body = bodies.encode_queue_offset_list(offsets)
        else:
            body = bodies.encode_queue_offsets(offsets)
        _send_resets(tuple(group.members), header, body)
        return Command(
            ResponseCode.SUCCESS,
            body=bodies.encode_queue_offsets(offsets),
            remark="not set any response code",
        )

    # --------------------------------------------------------------------------------- clone

    def clone_offsets(
        self, header: CloneGroupOffsetRequest, command: Command, peer: Peer
    ) -> Announced:
        """Answer CLONE_GROUP_OFFSET (314): reset a target group to the offsets of a source group.

        This is done for the topic in the request, or for all topics of the source group, without
        retry topics. Queues in which the source group has no offset do not change. The target group
        is created if that is allowed. Raises RequestError if a group does not exist.
        """
        self.groups.check_exists(header.source_group)
        if self.groups.get_or_create(header.target_group) is None:
            self.groups.check_exists(header.target_group)
        source = header.source_group
        target = header.target_group
        topic_names = {header.topic} if header.topic else self.offsets.topics_of(source)
        for topic_name in sorted(topic_names):
            topic = self.topics.get(topic_name)
            if topic is None or topic_name.startswith(RETRY_PREFIX):
                continue
            self._apply_reset(target, self._list_committed(source, topic))
            log.info(
                "%s copied the offsets of group %s to group %s for topic %s",
                peer.remote,
                source,
                target,
                topic_name,
            )
        return Announced(Command(ResponseCode.SUCCESS))

    # ------------------------------------------------------------------------------- queries

    def _list_committed(self, group: str, topic: Topic) -> dict[MessageQueue, int]:
        """Return the committed offsets of a group on a topic. Queues without one are left out."""
        offsets = {}
        for queue_id in range(topic.config.read_queues):
            offset = self.offsets.committed(group, topic.name, queue_id)
            if offset >= 0:
                offsets[self._make_message_queue(topic.name, queue_id)] = offset
        return offsets

    def query_time_spans(self, header: TopicGroupRequest, command: Command, peer: Peer) -> Command:
        """Answer QUERY_CONSUME_TIME_SPAN (303) with times for each queue of a topic.

        There are three store times in ms: of the first, the last, and the last consumed message. If
        the group has consumed nothing, the third is the time of the first message. The time of the
        last message is -1 if the queue is empty. The delay is the age in ms of the next message to
        consume, or 0 if there is none. Raises RequestError if the topic does not exist.
        """
        topic = self.topics.require(header.topic)
        now_ms = self.clock.now_ms()
        spans = [
            self._measure_time_span(header.group, topic.name, queue_id, now_ms)
            for queue_id in range(topic.config.write_queues)
        ]
        return Command(ResponseCode.SUCCESS, body=bodies.encode_time_spans(spans))

    def _measure_time_span(
        self, group: str, topic: str, queue_id: int, now_ms: int
    ) -> bodies.TimeSpan:
        """Return the store times and the delay of one queue of a topic for a group.

        Store times are those of the first, the last, and the last consumed message, in ms since
        1970. The time of the last message is -1 in an empty queue. If nothing was consumed, the
        third time is that of the first message. The delay is the age in ms, at `now_ms`, of the
        next message to consume, or 0 if there is none.
        """
        store_time_ms = partial(self.store.reader.store_time_ms, topic, queue_id)
        offset_end = self.store.queue_offsets(topic, queue_id)[1]
        committed = self.offsets.committed(group, topic, queue_id)

        first_ms = self.store.reader.earliest_time_ms(topic, queue_id)
        last_ms = store_time_ms(offset_end - 1) if offset_end else -1
        consumed_ms = store_time_ms(committed - 1) if committed > 0 else first_ms
        delay_ms = 0
        if offset_end > committed:
            next_ms = store_time_ms(max(committed, 0))
            if next_ms > 0:
                delay_ms = max(0, now_ms - next_ms)
        queue = self._make_message_queue(topic, queue_id)
        return bodies.TimeSpan(queue, first_ms, last_ms, consumed_ms, delay_ms)

    def query_correction_offsets(
        self, header: QueryCorrectionOffsetRequest, command: Command, peer: Peer
    ) -> Command:
        """Answer QUERY_CORRECTION_OFFSET (308) with the lowest committed offset in each queue.

        Offsets of the groups in `filterGroups`, and offsets of deleted messages, do not count. If
        the offset of the compared group is lower than all that count, the queue gets
        NO_GROUP_BEHIND. RocketMQ also deletes the offsets of the groups in `filterGroups`; here
        they stay.
        """
        excluded_groups = set(filter(None, (header.excluded_groups or "").split(",")))
        least_offsets: dict[int, int] = {}  # by queue id: the least offset
        compared_offsets: dict[int, int] = {}  # by queue id: the offset of the compared group
        for group, topic, queue_id, offset in self.offsets.iter_offsets():
            if topic != header.topic:
                continue
            if group == header.compare_group:
                compared_offsets[queue_id] = offset
            is_stored = offset >= self.store.queue_offsets(topic, queue_id)[0]
            if group not in excluded_groups and is_stored:
                least_offsets[queue_id] = min(offset, least_offsets.get(queue_id, offset))
        for queue_id, offset in compared_offsets.items():
            if least_offsets.get(queue_id, NO_GROUP_BEHIND) > offset:
                least_offsets[queue_id] = NO_GROUP_BEHIND
        return Command(ResponseCode.SUCCESS, body=bodies.encode_correction_offsets(least_offsets))

    def query_consume_queue(
        self, header: QueryConsumeQueueRequest, command: Command, peer: Peer
    ) -> Postponed:
        """Answer QUERY_CONSUME_QUEUE (321) with at most UNITS_MAX entries of a consume queue.

        If the request names a group, each entry says whether its tag code matches the filter of the
        group, and the answer has the group's subscription, or a text that the group is not online.
        Return a Postponed, because the answer is encoded on another thread. Raises RequestError if
        the topic does not exist.
        """
        topic = self.topics.require(header.topic)
        offset_min, offset_end = self.store.queue_offsets(topic.name, header.queue_id)
        units = self._read_units(
            topic.name,
            header.queue_id,
            max(header.offset, offset_min),
            min(header.count, UNITS_MAX),
        )

        subscription = None
        filter_text = None
        if header.group:
            compiled = self.consumers.find_subscription(header.group, topic.name)
            if compiled is None:
                filter_text = f"{header.group}@{topic.name} is not online!"
            else:
                subscription = compiled.subscription
                filter_text = "null"

        def encode_body() -> bytes:
            """Return the body of the answer. Runs on another thread."""
            decoded_units = _decode_units(units, subscription)
            return bodies.encode_queue_units(
                bodies.QueueUnits(offset_min, offset_end, decoded_units, subscription, filter_text)
            )

        def steps() -> WorkItem[Command]:
            return Command(ResponseCode.SUCCESS, body=(yield encode_body))

        return Postponed(steps())

    def _read_units(self, topic: str, queue_id: int, offset: int, count: int) -> bytes:
        """Return the bytes of at most `count` units of a queue from `offset` on.

        Units are the 20-byte entries of a consume queue. There are fewer at the end of the queue.
        """
        pieces = []
        units_left = count
        while units_left > 0:
            piece = self.store.reader.units(topic, queue_id, offset, units_left)
            if not piece:
                break
            pieces.append(piece)
            unit_count = len(piece) // UNIT.size
            offset += unit_count
            units_left -= unit_count
        return b"".join(pieces)

    def _make_message_queue(self, topic: str, queue_id: int) -> MessageQueue:
        """Return the name of a queue of this broker."""
        return MessageQueue(topic, self.settings.broker.broker_name, queue_id)


def _send_resets(members: Iterable[Peer], header: ResetOffsetRequest, body: bytes) -> None:
    """Send RESET_CONSUMER_CLIENT_OFFSET (220) to members, with the offsets in `body`.

    `header` is that of the request that asked for the reset.
    """
    member_request = ResetOffsetRequest(
        topic=header.topic, group=header.group, time_ms=header.time_ms, force=header.force
    )
    fields = encode_header(member_request)
    for peer in members:
        peer.send_oneway(Command(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, dict(fields), body))


def _decode_units(units: bytes, subscription: Subscription | None) -> list[bodies.QueueUnit]:
    """Decode entries of a consume queue, and find out which match a subscription by tags.

    Only tag codes are compared. All entries match if `subscription` is None or selects no tags.
    """
    wanted_codes = subscription.codes if subscription is not None else ()
    return [
        bodies.QueueUnit(position, size, code, not wanted_codes or code in wanted_codes)
        for position, size, code in UNIT.iter_unpack(units)
    ]
