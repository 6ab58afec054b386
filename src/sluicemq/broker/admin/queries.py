"""Handlers for queries about queues, messages and committed offsets, and for queue locks.

They answer QUERY_MESSAGE (12), QUERY_CONSUMER_OFFSET (14), UPDATE_CONSUMER_OFFSET (15),
SEARCH_OFFSET_BY_TIMESTAMP (29), GET_MAX_OFFSET (30), GET_MIN_OFFSET (31),
GET_EARLIEST_MSG_STORETIME (32), VIEW_MESSAGE_BY_ID (33), LOCK_BATCH_MQ (41) and UNLOCK_BATCH_MQ
(42).

The answers are those of RocketMQ's broker, including unexpected ones: the answer to GET_MAX_OFFSET
for a queue that its topic does not have is 0 (spec/traffic, item 23).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, Literal

from sluicemq.acl.guard import Access
from sluicemq.acl.verdict import SUB
from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.locks import QueueLocks
from sluicemq.broker.context import BrokerComponent, BrokerContext
from sluicemq.broker.group_commit import Postponed, run_or_postpone
from sluicemq.errors import RequestError
from sluicemq.files import memory_bytes
from sluicemq.model.topic import MessageQueue
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import WorkItem, decode_body
from sluicemq.record.codec import parse_head
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import (
    GetEarliestStoreTimeResponse,
    GetMaxOffsetRequest,
    OffsetResponse,
    QueryConsumerOffsetRequest,
    QueryMessageRequest,
    QueryMessageResponse,
    QueueRequest,
    SearchOffsetRequest,
    UpdateConsumerOffsetRequest,
    ViewMessageRequest,
)

INDEX_UNIQUE: Final = "U"
"""The index type of a query by message id."""
INDEX_TAG: Final = "T"
"""The index type of a query by tag, which only RocketMQ's RocksDB store supports."""
QUEUES_PER_STEP: Final = 512
"""The number of queues that are locked or unlocked in one step, about a millisecond."""
NOTHING_FOUND_REMARK: Final = "can not find message, maybe time range not correct"


class QueryHandlers(BrokerComponent):
    """Request handlers for queries about queues and messages, and for queue locks.

    They answer QUERY_MESSAGE (12), QUERY_CONSUMER_OFFSET (14), UPDATE_CONSUMER_OFFSET (15),
    SEARCH_OFFSET_BY_TIMESTAMP (29), GET_MAX_OFFSET (30), GET_MIN_OFFSET (31),
    GET_EARLIEST_MSG_STORETIME (32), VIEW_MESSAGE_BY_ID (33), LOCK_BATCH_MQ (41) and
    UNLOCK_BATCH_MQ (42).
    """

    def __init__(
        self, context: BrokerContext, *, locks: QueueLocks, consumers: Consumers, access: Access
    ) -> None:
        super().__init__(context)
        self.locks = locks
        self.consumers = consumers
        self.access = access

    def query_committed_offset(
        self, header: QueryConsumerOffsetRequest, command: Command, peer: Peer
    ) -> Command:
        """Answer QUERY_CONSUMER_OFFSET (14) with the committed offset of a group for one queue.

        For a group without a committed offset, the answer is 0 if the queue still has its first
        message and that is probably in memory (spec/remoting.md §14). It is the end of the queue if
        the queue is empty. In all other cases the code is QUERY_NOT_FOUND, and the client chooses
        the offset by its own policy. It is also QUERY_NOT_FOUND if the request sets
        `zero_if_not_found` to false.

        RocketMQ 5 answers QUERY_NOT_FOUND for an empty queue, too. But there every policy chooses
        the end, and a client that asks for the end in a second request would skip the messages that
        arrive in between.
        """
        committed_offset = self._find_committed_offset(header, command, peer)
        if committed_offset >= 0:
            return _make_offset_answer(committed_offset)
        if header.zero_if_not_found is not False:
            start_offset = self._find_start_offset(header.topic, header.queue_id)
            if start_offset is not None:
                return _make_offset_answer(start_offset)
        return _make_error_answer(
            ResponseCode.QUERY_NOT_FOUND,
            "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first",
        )

    def _find_committed_offset(
        self, header: QueryConsumerOffsetRequest, command: Command, peer: Peer
    ) -> int:
        """Return the committed offset of the group, or of the client's lane; -1 if there is none.

        A lane is the part of the group that has the same subscription as the client.
        """
        lane = self.consumers.lane_of(header.group, peer, command.fields)
        if lane is None:
            return self.offsets.committed(header.group, header.topic, header.queue_id)
        start = lane.start_from_offset_query((header.topic, header.queue_id))
        return start.committed_offset if start is not None else -1

    def _find_start_offset(self, topic_name: str, queue_id: int) -> int | None:
        """Return the offset at which a group without a committed offset starts in a queue.

        It is 0 if the first message is probably in memory, or the end of an empty queue. Return
        None if there is no such queue, or if the client must choose the offset.
        """
        topic = self.topics.get(topic_name)
        if topic is None or not 0 <= queue_id < topic.queues:
            return None
        first_offset, end_offset = self.store.queue_offsets(topic_name, queue_id)
        if first_offset == end_offset:
            return end_offset
        if first_offset <= 0 and self._has_first_message(topic_name, queue_id):
            return 0
        return None

    def _has_first_message(self, topic: str, queue_id: int) -> bool:
        """Return whether a queue still has its message 0, and that message is probably in memory.

        The message is probably in memory if the log after it has at most
        accessMessageInMemoryMaxRatio percent of the machine's memory.
        """
        records = self.store.reader.read(topic, queue_id, 0, 1).data
        if not records:
            return False
        age_bytes = self.store.written_offset - parse_head(records[0]).physical_offset
        return age_bytes <= memory_bytes() * self.settings.store.memory_ratio // 100

    def commit_offset(
        self, header: UpdateConsumerOffsetRequest, command: Command, peer: Peer
    ) -> Command:
        """Answer UPDATE_CONSUMER_OFFSET (15): commit an offset of a group for one queue.

        If the client is a member of a lane, the offset is committed for the lane. If the group, the
        topic or the queue does not exist, the answer has an error code, and nothing is committed.
        Offsets of queues that the topic had before are accepted.
        """
        if header.group not in self.groups:
            return _make_error_answer(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group [{header.group}] does not exist.",
            )
        topic = self.topics.get(header.topic)
        queue_id = header.queue_id
        if topic is None:
            return _make_error_answer(
                ResponseCode.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist"
            )
        # Offsets are stored only for queues of the topic, and for queues that it had before.
        if not 0 <= queue_id < topic.queues and not self.store.queue_exists(topic.name, queue_id):
            return _make_error_answer(
                ResponseCode.SYSTEM_ERROR, f"topic {topic.name} has no queue {queue_id}"
            )
        self.consumers.commit_offset(
            header.group, peer, command.fields, topic.name, queue_id, header.commit_offset
        )
        return Command(ResponseCode.SUCCESS, {})

    def get_max_offset(self, header: GetMaxOffsetRequest, command: Command, peer: Peer) -> Command:
        """Answer GET_MAX_OFFSET (30) with the end offset of a queue, 0 for an unknown queue."""
        return _make_offset_answer(self.store.queue_offsets(header.topic, header.queue_id)[1])

    def get_min_offset(self, header: QueueRequest, command: Command, peer: Peer) -> Command:
        """Answer GET_MIN_OFFSET (31) with the offset of the first message in a queue.

        For an empty queue it is the end offset, for an unknown queue 0.
        """
        answer = _make_offset_answer(self.store.queue_offsets(header.topic, header.queue_id)[0])
        answer.remark = ""
        return answer

    def search_offset_by_time(
        self, header: SearchOffsetRequest, command: Command, peer: Peer
    ) -> Command:
        """Answer SEARCH_OFFSET_BY_TIMESTAMP (29) with the offset of a queue at a store time.

        It is the offset of the first message that was stored at `header.time_ms` or later. If the
        request asks for the upper boundary, it is the offset of the last message that was stored at
        that time or earlier.
        """
        boundary: Literal["lower", "upper"] = "lower"
        if header.boundary is not None and header.boundary.lower() == "upper":
            boundary = "upper"
        offset = self.store.reader.offset_by_time(
            header.topic, header.queue_id, header.time_ms, boundary
        )
        return _make_offset_answer(offset)

    def get_earliest_time(self, header: QueueRequest, command: Command, peer: Peer) -> Command:
        """Answer GET_EARLIEST_MSG_STORETIME (32) with the store time of a queue's first message.

        The time is in ms; -1 means that the queue does not exist or has no message.
        """
        time_ms = self.store.reader.earliest_time_ms(header.topic, header.queue_id)
        return Command(
            ResponseCode.SUCCESS, encode_header(GetEarliestStoreTimeResponse(time_ms=time_ms))
        )

    def query_messages(self, header: QueryMessageRequest, command: Command, peer: Peer) -> Command:
        """Answer QUERY_MESSAGE (12) with the messages of a key or message id, newest first.

        The body contains their records (spec/store.md §4). The answer has an error code if no
        message was found, if the key index is disabled or not complete, and for a query by tag.
        """
        if header.index_type == INDEX_TAG:
            return _make_error_answer(
                ResponseCode.SYSTEM_ERROR,
                "messages cannot be queried by tag: consume with a filter instead",
            )

        # Search the key index, which contains keys and message ids.
        config = self.settings.store
        is_message_id = header.is_unique_key is True or header.index_type == INDEX_UNIQUE
        count_max = config.query_count if is_message_id else header.count_max
        query_result = self.store.keys.find(
            header.topic,
            header.key,
            min(count_max, config.query_count_max),
            header.begin_time_ms,
            header.end_time_ms,
            is_unique=is_message_id,
        )
        if query_result is None:
            return _make_error_answer(
                ResponseCode.SYSTEM_ERROR,
                "messages cannot be queried by key: messageIndexEnable is false on this broker",
            )
        if query_result.behind_bytes:
            return _make_error_answer(
                ResponseCode.SYSTEM_BUSY,
                f"the key index is being built: {query_result.behind_bytes} bytes of the log are "
                "left; try again later",
            )

        # Answer with the records.
        fields = encode_header(
            QueryMessageResponse(
                index_time_ms=query_result.last_time_ms,
                index_physical_offset=query_result.last_offset,
            )
        )
        if not query_result.records:
            return Command(ResponseCode.QUERY_NOT_FOUND, fields, remark=NOTHING_FOUND_REMARK)
        return Command(ResponseCode.SUCCESS, fields, body=b"".join(query_result.records))

    def view_message(self, header: ViewMessageRequest, command: Command, peer: Peer) -> Command:
        """Answer VIEW_MESSAGE_BY_ID (33) with the record at a position of the commit log.

        Raises RequestError if no record begins there or the client may not read it.
        """
        record = self.store.reader.record_at(header.physical_offset)
        if record is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"can not find message by the offset, {header.physical_offset}",
            )
        self.access.require_record(record, SUB)
        return Command(ResponseCode.SUCCESS, body=record)

    def lock_queues(self, command: Command, peer: Peer) -> Command | Postponed:
        """Answer LOCK_BATCH_MQ (41): lock queues for a client of a group.

        The answer lists the requested queues whose lock the client has now. A request for many
        queues is answered in steps.
        """

        def steps() -> WorkItem[Command]:
            request = yield from decode_body(bodies.decode_lock_batch, command.body)
            lock_name = self.consumers.lanes.get_lock_name(request.group, request.client_id)
            locked_queues: list[MessageQueue] = []
            for chunk_index, queues in enumerate(_split_into_chunks(request.queues)):
                if chunk_index > 0:
                    yield None  # ends a step
                locked_queues += self.locks.lock(lock_name, request.client_id, queues)

            encode_answer = partial(bodies.encode_locked_queues, sorted(set(locked_queues)))
            if len(locked_queues) <= QUEUES_PER_STEP:
                body = encode_answer()
            else:
                body = yield encode_answer  # run on another thread
            return Command(ResponseCode.SUCCESS, body=body)

        return run_or_postpone(steps())

    def unlock_queues(self, command: Command, peer: Peer) -> Command | Postponed:
        """Answer UNLOCK_BATCH_MQ (42): release the locks that a client has on queues.

        A request for many queues is answered in steps.
        """

        def steps() -> WorkItem[Command]:
            request = yield from decode_body(bodies.decode_lock_batch, command.body)
            lock_name = self.consumers.lanes.get_lock_name(request.group, request.client_id)
            for chunk_index, queues in enumerate(_split_into_chunks(request.queues)):
                if chunk_index > 0:
                    yield None  # ends a step
                self.locks.unlock(lock_name, request.client_id, queues)
            return Command(ResponseCode.SUCCESS)

        return run_or_postpone(steps())


def _split_into_chunks(queues: Sequence[MessageQueue]) -> Iterator[Sequence[MessageQueue]]:
    """Yield the queues in sequences of up to `QUEUES_PER_STEP`."""
    for begin in range(0, len(queues), QUEUES_PER_STEP):
        yield queues[begin : begin + QUEUES_PER_STEP]


def _make_offset_answer(offset: int) -> Command:
    """Return the answer SUCCESS with an offset."""
    return Command(ResponseCode.SUCCESS, encode_header(OffsetResponse(offset=offset)))


def _make_error_answer(code: int, remark: str) -> Command:
    """Return an answer with an error code, and with empty fields as in RocketMQ."""
    return Command(code, {}, remark=remark)
