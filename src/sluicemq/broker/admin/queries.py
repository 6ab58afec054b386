"""Questions about queues, messages and how far they are consumed: 12 14 15 29 30 31 32 33 41 42.

Answers follow the real broker's, odd ones included: 30 for a queue that a topic does not have is 0
(spec/traffic, item 23).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from sluicemq.acl.guard import Access
from sluicemq.acl.verdict import SUB
from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.locks import QueueLocks
from sluicemq.broker.group_commit import Postponed, run_or_postpone
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups, Topics
from sluicemq.errors import RequestError
from sluicemq.files import memory_bytes
from sluicemq.model.topic import MessageQueue
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import WorkItem, decode_body
from sluicemq.record.codec import parse_head
from sluicemq.store.store import Store
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
INDEX_TAG: Final = "T"
QUEUES_A_STEP: Final = 512
NOTHING_FOUND: Final = "can not find message, maybe time range not correct"


@dataclass(slots=True, eq=False)
class Queries:
    """The request family about queue positions."""

    settings: Settings
    topics: Topics
    groups: Groups
    offsets: Offsets
    locks: QueueLocks
    consumers: Consumers
    store: Store
    access: Access

    def committed_offset(
        self, header: QueryConsumerOffsetRequest, command: Command, peer: Peer
    ) -> Command:
        """14. A group without an offset starts at 0 on a queue that still has its first message
        (spec/remoting.md §14), and at the end of an empty queue; else 22, and the client's own
        policy decides. RocketMQ 5 answers 22 for an empty queue, too. But every policy means its
        end, and a client that asks for the end next would skip what arrives in between."""
        reader = self.consumers.lane_of(header.group, peer, command.fields)
        if reader is None:
            offset = self.offsets.committed(header.group, header.topic, header.queue_id)
        else:
            place = reader.asks((header.topic, header.queue_id))
            offset = place.offset if place is not None else -1
        if offset >= 0:
            return _offset(offset)
        topic = self.topics.get(header.topic)
        is_queue = topic is not None and 0 <= header.queue_id < topic.queues
        if header.zero_if_not_found is not False and is_queue:
            low, high = self.store.queue_offsets(header.topic, header.queue_id)
            if low == high:
                return _offset(high)
            if low <= 0 and self._has_first_message(header.topic, header.queue_id):
                return _offset(0)
        return _refused(
            ResponseCode.QUERY_NOT_FOUND,
            "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first",
        )

    def _has_first_message(self, topic: str, queue_id: int) -> bool:
        """Is message 0 still there, and near enough to the end of the log to be in memory?"""
        data = self.store.reader.read(topic, queue_id, 0, 1).data
        if not data:
            return False
        age_bytes = self.store.written_offset - parse_head(data[0]).physical_offset
        return age_bytes <= memory_bytes() * self.settings.store.memory_ratio // 100

    def commit_offset(
        self, header: UpdateConsumerOffsetRequest, command: Command, peer: Peer
    ) -> Command:
        """15."""
        if header.group not in self.groups:
            return _refused(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group [{header.group}] does not exist.",
            )
        topic, queue_id = self.topics.get(header.topic), header.queue_id
        if topic is None:
            return _refused(ResponseCode.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist")
        # One of the topic, or one that it had: offsets are kept for real queues only.
        if not 0 <= queue_id < topic.queues and not self.store.queue_exists(topic.name, queue_id):
            return _refused(
                ResponseCode.SYSTEM_ERROR, f"topic {topic.name} has no queue {queue_id}"
            )
        self.consumers.commit_offset(
            header.group, peer, command.fields, topic.name, queue_id, header.commit_offset
        )
        return Command(ResponseCode.SUCCESS, {})

    def max_offset(self, header: GetMaxOffsetRequest, command: Command, peer: Peer) -> Command:
        """30."""
        return _offset(self.store.queue_offsets(header.topic, header.queue_id)[1])

    def min_offset(self, header: QueueRequest, command: Command, peer: Peer) -> Command:
        """31."""
        answer = _offset(self.store.queue_offsets(header.topic, header.queue_id)[0])
        answer.remark = ""
        return answer

    def offset_by_time(self, header: SearchOffsetRequest, command: Command, peer: Peer) -> Command:
        """29."""
        boundary: Literal["lower", "upper"] = (
            "upper" if (header.boundary or "").lower() == "upper" else "lower"
        )
        offset = self.store.reader.offset_by_time(
            header.topic, header.queue_id, header.time_ms, boundary
        )
        return _offset(offset)

    def earliest_time(self, header: QueueRequest, command: Command, peer: Peer) -> Command:
        """32."""
        time_ms = self.store.reader.earliest_time_ms(header.topic, header.queue_id)
        return Command(
            ResponseCode.SUCCESS, encode_header(GetEarliestStoreTimeResponse(time_ms=time_ms))
        )

    def query_message(self, header: QueryMessageRequest, command: Command, peer: Peer) -> Command:
        """12: messages by key or by unique key, newest first (spec/store.md §4)."""
        config = self.settings.store
        is_unique = header.is_unique_key is True or header.index_type == INDEX_UNIQUE
        count = config.query_count if is_unique else header.count_max
        found = None
        if header.index_type != INDEX_TAG:  # RocketMQ has such an index only in RocksDB
            found = self.store.keys.find(
                header.topic, header.key, min(count, config.query_count_max),
                header.begin_time_ms, header.end_time_ms, is_unique=is_unique,
            )  # fmt: skip
        if found is None:
            return _refused(
                ResponseCode.SYSTEM_ERROR,
                "messages cannot be queried by tag: consume with a filter instead"
                if header.index_type == INDEX_TAG
                else "messages cannot be queried by key: messageIndexEnable is false on this "
                "broker",
            )
        if found.behind_bytes:
            return _refused(
                ResponseCode.SYSTEM_BUSY,
                f"the key index is being built: {found.behind_bytes} bytes of the log are left; "
                "try again later",
            )
        fields = encode_header(
            QueryMessageResponse(
                index_time_ms=found.last_time_ms, index_physical_offset=found.last_offset
            )
        )
        if not found.records:
            return Command(ResponseCode.QUERY_NOT_FOUND, fields, remark=NOTHING_FOUND)
        return Command(ResponseCode.SUCCESS, fields, body=b"".join(found.records))

    def view_message(self, header: ViewMessageRequest, command: Command, peer: Peer) -> Command:
        """33: the message that begins at an offset of the commit log."""
        record = self.store.reader.record_at(header.physical_offset)
        if record is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"can not find message by the offset, {header.physical_offset}",
            )
        self.access.require_record(record, SUB)
        return Command(ResponseCode.SUCCESS, body=record)

    def lock(self, command: Command, peer: Peer) -> Command | Postponed:
        """41."""

        def steps() -> WorkItem[Command]:
            data = yield from decode_body(bodies.decode_lock_batch, command.body)
            group = self.consumers.lanes.lock_name(data.group, data.client_id)
            held: list[MessageQueue] = []
            for number, queues in enumerate(_portions(data.queues)):
                if number:
                    yield None
                held += self.locks.lock(group, data.client_id, queues)
            encode = partial(bodies.encode_locked_queues, sorted(set(held)))
            body = encode() if len(held) <= QUEUES_A_STEP else (yield encode)
            return Command(ResponseCode.SUCCESS, body=body)

        return run_or_postpone(steps())

    def unlock(self, command: Command, peer: Peer) -> Command | Postponed:
        """42."""

        def steps() -> WorkItem[Command]:
            data = yield from decode_body(bodies.decode_lock_batch, command.body)
            group = self.consumers.lanes.lock_name(data.group, data.client_id)
            for number, queues in enumerate(_portions(data.queues)):
                if number:
                    yield None
                self.locks.unlock(group, data.client_id, queues)
            return Command(ResponseCode.SUCCESS)

        return run_or_postpone(steps())


def _portions(queues: Sequence[MessageQueue]) -> Iterator[Sequence[MessageQueue]]:
    """Yield the queues in portions, each of which takes a millisecond."""
    for begin in range(0, len(queues), QUEUES_A_STEP):
        yield queues[begin : begin + QUEUES_A_STEP]


def _offset(value: int) -> Command:
    return Command(ResponseCode.SUCCESS, encode_header(OffsetResponse(offset=value)))


def _refused(code: int, remark: str) -> Command:
    return Command(code, {}, remark=remark)
