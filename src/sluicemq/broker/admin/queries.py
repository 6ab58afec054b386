"""Questions about queues, messages and how far they are consumed: 12 14 15 29 30 31 32 33 41 42.

Answers follow the real broker's, odd ones included: 30 for a queue that a topic does not have is 0
(spec/traffic, item 23).
"""

from typing import Final, Literal

from sluicemq.broker.access import SUB, Access
from sluicemq.broker.consume.clients import Consumers, QueueLocks
from sluicemq.broker.groups import Groups
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.files import memory_bytes
from sluicemq.net.peer import Peer
from sluicemq.record.codec import parse_head
from sluicemq.store.store import Store
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import decode_header, encode_header
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
NOTHING_FOUND: Final = "can not find message, maybe time range not correct"


class Queries:
    """The request family about queue positions."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        groups: Groups,
        offsets: Offsets,
        locks: QueueLocks,
        consumers: Consumers,
        store: Store,
        access: Access | None = None,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._locks = locks
        self._consumers = consumers
        self._store = store
        self._access = access or Access()

    def committed_offset(self, command: Command, peer: Peer) -> Command:
        """14. A group without an offset starts at 0 on a queue that still has its first message
        (spec/remoting.md §14); else 22, and the client's own policy decides."""
        header = decode_header(QueryConsumerOffsetRequest, command.fields)
        offset = self._committed(header.group, header.topic, header.queue_id, command, peer)
        if offset >= 0:
            return _offset(offset)
        if header.zero_if_not_found is not False and self._has_first_message(
            header.topic, header.queue_id
        ):
            return _offset(0)
        return Command(
            ResponseCode.QUERY_NOT_FOUND,
            {},
            remark="Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first",
        )

    def _committed(
        self, group: str, topic: str, queue_id: int, command: Command, peer: Peer
    ) -> int:
        """The group's offset, or that of the asker's lane."""
        reader = self._consumers.lane_of(group, peer, command.fields)
        if reader is None:
            return self._offsets.committed(group, topic, queue_id)
        place = reader.asks((topic, queue_id))
        return place.offset if place is not None else -1

    def _has_first_message(self, topic: str, queue_id: int) -> bool:
        """Is message 0 still there, and near enough to the end of the log to be in memory?"""
        low, high = self._store.queue_offsets(topic, queue_id)
        if not low <= 0 < high:
            return False
        data = self._store.reader.read(topic, queue_id, 0, 1).data
        if not data:
            return False
        age_bytes = self._store.written_offset - parse_head(data[0]).physical_offset
        return age_bytes <= memory_bytes() * self._settings.store.memory_ratio // 100

    def commit_offset(self, command: Command, peer: Peer) -> Command:
        """15."""
        header = decode_header(UpdateConsumerOffsetRequest, command.fields)
        if header.group not in self._groups:
            return Command(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                {},
                remark=f"subscription group [{header.group}] does not exist.",
            )
        if header.topic not in self._topics:
            return _no_topic(header.topic)
        if not self._is_queue(header.topic, header.queue_id):
            return Command(
                ResponseCode.SYSTEM_ERROR,
                {},
                remark=f"topic {header.topic} has no queue {header.queue_id}",
            )
        place = (header.topic, header.queue_id, header.commit_offset)
        self._consumers.commit(header.group, peer, command.fields, *place)
        return Command(ResponseCode.SUCCESS, {})

    def _is_queue(self, topic: str, queue_id: int) -> bool:
        """One of the topic, or one that it had: offsets are kept for real queues only."""
        known = self._topics.get(topic)
        is_one = known is not None and 0 <= queue_id < known.queues
        return is_one or self._store.queue_exists(topic, queue_id)

    def max_offset(self, command: Command, peer: Peer) -> Command:
        """30."""
        header = decode_header(GetMaxOffsetRequest, command.fields)
        return _offset(self._store.queue_offsets(header.topic, header.queue_id)[1])

    def min_offset(self, command: Command, peer: Peer) -> Command:
        """31."""
        header = decode_header(QueueRequest, command.fields)
        answer = _offset(self._store.queue_offsets(header.topic, header.queue_id)[0])
        answer.remark = ""
        return answer

    def offset_by_time(self, command: Command, peer: Peer) -> Command:
        """29."""
        header = decode_header(SearchOffsetRequest, command.fields)
        boundary: Literal["lower", "upper"] = (
            "upper" if (header.boundary or "").lower() == "upper" else "lower"
        )
        offset = self._store.reader.offset_by_time(
            header.topic, header.queue_id, header.time_ms, boundary
        )
        return _offset(offset)

    def earliest_time(self, command: Command, peer: Peer) -> Command:
        """32."""
        header = decode_header(QueueRequest, command.fields)
        time_ms = self._store.reader.earliest_time_ms(header.topic, header.queue_id)
        return Command(
            ResponseCode.SUCCESS, encode_header(GetEarliestStoreTimeResponse(time_ms=time_ms))
        )

    def query_message(self, command: Command, peer: Peer) -> Command:
        """12: messages by key or by unique key, newest first (spec/store.md §4)."""
        header = decode_header(QueryMessageRequest, command.fields)
        config = self._settings.store
        is_unique = header.is_unique_key is True or header.index_type == INDEX_UNIQUE
        count = config.query_count if is_unique else header.count_max
        found = None
        if header.index_type != INDEX_TAG:  # RocketMQ has such an index only in RocksDB
            found = self._store.keys.find(
                header.topic, header.key, min(count, config.query_count_max),
                header.begin_time_ms, header.end_time_ms, is_unique=is_unique,
            )  # fmt: skip
        if found is None:
            return _no_index(header)
        if found.behind_bytes:
            return Command(
                ResponseCode.SYSTEM_BUSY,
                {},
                remark=f"the key index is being built: {found.behind_bytes} bytes of the log are"
                " left; try again later",
            )
        fields = encode_header(
            QueryMessageResponse(
                index_time_ms=found.last_time_ms, index_physical_offset=found.last_offset
            )
        )
        if not found.records:
            return Command(ResponseCode.QUERY_NOT_FOUND, fields, remark=NOTHING_FOUND)
        return Command(ResponseCode.SUCCESS, fields, body=b"".join(found.records))

    def view_message(self, command: Command, peer: Peer) -> Command:
        """33: the message that begins at an offset of the commit log."""
        header = decode_header(ViewMessageRequest, command.fields)
        record = self._store.reader.record_at(header.physical_offset)
        if record is None:
            return Command(
                ResponseCode.SYSTEM_ERROR,
                remark=f"can not find message by the offset, {header.physical_offset}",
            )
        self._access.require_record(record, SUB)
        return Command(ResponseCode.SUCCESS, body=record)

    def lock(self, command: Command, peer: Peer) -> Command:
        """41."""
        data = bodies.decode_lock_batch(command.body)
        group = self._consumers.lanes.lock_name(data.group, data.client_id)
        held = self._locks.lock(group, data.client_id, data.queues)
        return Command(ResponseCode.SUCCESS, body=bodies.encode_locked_queues(sorted(held)))

    def unlock(self, command: Command, peer: Peer) -> Command:
        """42."""
        data = bodies.decode_lock_batch(command.body)
        group = self._consumers.lanes.lock_name(data.group, data.client_id)
        self._locks.unlock(group, data.client_id, data.queues)
        return Command(ResponseCode.SUCCESS)


def _offset(value: int) -> Command:
    return Command(ResponseCode.SUCCESS, encode_header(OffsetResponse(offset=value)))


def _no_index(header: QueryMessageRequest) -> Command:
    reason = (
        "messages cannot be queried by tag: consume with a filter instead"
        if header.index_type == INDEX_TAG
        else "messages cannot be queried by key: messageIndexEnable is false on this broker"
    )
    return Command(ResponseCode.SYSTEM_ERROR, {}, remark=reason)


def _no_topic(name: str) -> Command:
    return Command(ResponseCode.TOPIC_NOT_EXIST, {}, remark=f"topic[{name}] not exist")
