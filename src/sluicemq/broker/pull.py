"""Pulls: 11 and 361, with long polling and the bulk extension.

The order of checks is the real broker's (spec/remoting.md §13), because clients tell from the code
what to do. A pull that finds nothing may be parked: then it looks again when messages of its queue
become visible, from where it stopped looking, and answers when one matches.

`sluiceBulk=true` is our own: the answer holds up to `maxMsgBytes` (at most
sluiceBulkPullBytesMax) instead of 32 messages. A Java broker ignores the field.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from sluicemq.broker.clients import Consumers
from sluicemq.broker.groups import Groups
from sluicemq.broker.longpoll import LongPolls
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.outcomes import Parked
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topic, Topics
from sluicemq.clock import Clock
from sluicemq.errors import FilterError
from sluicemq.filter.sql import SQL92_IS_OFF, make_filter
from sluicemq.filter.tags import is_tag_kind, subscribe
from sluicemq.model.subscription import ALL, TAG, MessageFilter
from sluicemq.model.topic import PERM_READ, GroupConfig
from sluicemq.net.server import Handler, Peer
from sluicemq.protocol.codec import SERVER_LANGUAGE
from sluicemq.protocol.codes import RequestCode, ResponseCode
from sluicemq.protocol.command import VERSION, Command
from sluicemq.protocol.headers import PullMessageRequest, decode_header
from sluicemq.store.store import ReadResult, ReadStatus, Store

_PREFIX: Final = struct.Struct(">II")
COMMIT_OFFSET: Final = 0x1
SUSPEND: Final = 0x2
SUBSCRIPTION: Final = 0x4
SUSPEND_MS_MAX: Final = 10 * 60_000
FILTERS_KEPT: Final = 1024
BULK_BYTES_MIN: Final = 65_536
FAQ: Final = "See https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."

# Bytes, not text: formatting them takes 60 % of the time.
_ANSWER: Final = (
    '{"code":%d,"extFields":{"suggestWhichBrokerId":"0","groupSysFlag":"%d",'
    '"nextBeginOffset":"%d","maxOffset":"%d","minOffset":"%d","topicSysFlag":"%d"},'
    f'"flag":1,"language":"{SERVER_LANGUAGE}","opaque":%d,"remark":"%b",'
    f'"serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
).encode()
_FOUND: Final = ReadStatus.FOUND
# Answers by what the store says; an empty queue depends on the offset asked for.
_CODES: Final = {
    ReadStatus.FOUND: ResponseCode.SUCCESS,
    ReadStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    ReadStatus.MESSAGE_WAS_REMOVING: ResponseCode.PULL_RETRY_IMMEDIATELY,
    ReadStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    ReadStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
}


class RefusalError(Exception):
    """A pull that is answered with an error code."""

    def __init__(self, code: int, remark: str, forbidden_kind: int | None = None) -> None:
        super().__init__(remark)
        self.code = code
        self.remark = remark
        self.forbidden_kind = forbidden_kind


class Delivered:
    """What one group got of one topic. `pulled` is the table of how far it has fetched, by queue;
    it belongs to `Offsets`."""

    __slots__ = ("bytes_out", "filtered", "messages_out", "pulled")

    def __init__(self, pulled: dict[int, int]) -> None:
        self.pulled = pulled
        self.messages_out = 0
        self.bytes_out = 0
        self.filtered = 0


class _Reading:
    """One pull under way: what is asked, and what the checks made of it. A parked pull looks again
    with it."""

    __slots__ = (
        "bytes_max", "consumed", "count_max", "delivered", "fields", "filter", "flags", "group",
        "offset", "queue_id", "sys_flag", "topic",
    )  # fmt: skip

    filter: MessageFilter | None
    flags: tuple[int, int]
    bytes_max: int | None
    delivered: Delivered
    consumed: int | None

    def __init__(self, fields: Mapping[str, str] | None) -> None:
        """HOT: straight from the fields. Raises HeaderError for a missing or bad one."""
        try:
            self.group = fields["consumerGroup"]  # type: ignore[index]
            self.topic = fields["topic"]  # type: ignore[index]
            self.queue_id = int(fields["queueId"])  # type: ignore[index]
            self.offset = int(fields["queueOffset"])  # type: ignore[index]
            self.count_max = int(fields["maxMsgNums"])  # type: ignore[index]
            self.sys_flag = int(fields["sysFlag"])  # type: ignore[index]
        except (KeyError, TypeError, ValueError):
            decode_header(PullMessageRequest, fields)  # says which field it is
            raise
        self.fields: Mapping[str, str] = fields  # type: ignore[assignment]
        self.consumed = None

    def number(self, name: str) -> int:
        """A field that only some pulls need. Raises HeaderError."""
        try:
            return int(self.fields[name])
        except (KeyError, ValueError):
            decode_header(PullMessageRequest, self.fields)
            raise


class Pull:
    """The request family of pulling consumers."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        groups: Groups,
        offsets: Offsets,
        consumers: Consumers,
        polls: LongPolls,
        store: Store,
        clock: Clock,
        after_turn: Callable[[Callable[[], None]], object],
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._consumers = consumers
        self._polls = polls
        self._store_read = store.read
        self._clock = clock
        self._after_turn = after_turn
        self._given: dict[Peer, int] = {}
        self._filters: OrderedDict[tuple[str, str], MessageFilter | None] = OrderedDict()
        self.delivered: dict[tuple[str, str], Delivered] = {}
        self.found = 0
        self.missed = 0

    def handlers(self) -> dict[int, Handler]:
        return {RequestCode.PULL_MESSAGE: self.pull, RequestCode.LITE_PULL_MESSAGE: self.pull}

    def pull(self, command: Command, peer: Peer) -> bytes | Command | Parked:
        """11 and 361. HOT."""
        reading = _Reading(command.fields)
        try:
            self._check(reading, peer)
        except RefusalError as refusal:
            fields = {}
            if refusal.forbidden_kind is not None:
                fields["forbiddenType"] = str(refusal.forbidden_kind)
            return Command(refusal.code, fields, remark=refusal.remark)
        sys_flag = reading.sys_flag
        if sys_flag & COMMIT_OFFSET:
            offset = reading.number("commitOffset")
            if offset >= 0:
                reading.consumed = offset
                self._offsets.commit(reading.group, reading.topic, reading.queue_id, offset)
        result = self._read(reading, reading.offset)
        if result.status is _FOUND:
            return self._deliver(reading, command.opaque, result)
        code = _code(result, reading.offset)
        if code == ResponseCode.PULL_NOT_FOUND and sys_flag & SUSPEND and not self._polls.is_full:
            return self._parked(reading, command, result.next_offset)
        return self._answer(reading, command.opaque, code, result)

    # ------------------------------------------------------------------------------- checks

    def _check(self, reading: _Reading, peer: Peer) -> None:
        """Everything that can refuse a pull, in the order of the real broker. HOT.

        Raises RefusalError.
        """
        group = self._groups.table.get(reading.group) or self._groups.find(reading.group)
        topic = self._topics.get(reading.topic)
        if (
            group is None
            or topic is None
            or not group.consume_enable
            or not self._settings.broker.broker_permission & topic.config.perm & PERM_READ
            or not 0 <= reading.queue_id < topic.config.read_queues
            or reading.group in self._groups.forbidden
        ):
            self._refuse(reading, group, topic, peer)
        assert group is not None
        assert topic is not None
        if reading.sys_flag & SUBSCRIPTION:
            reading.filter = self._filter_of_request(reading)
        else:
            reading.filter = self._filter_of_group(reading, group.consume_broadcast_enable)
        reading.flags = (group.sys_flag, topic.config.sys_flag)
        reading.bytes_max = (
            self._bytes_max(reading, peer) if "sluiceBulk" in reading.fields else None
        )
        key = (reading.topic, reading.group)
        delivered = self.delivered.get(key)
        if delivered is None:
            pulled = self._offsets.pulled_by(reading.group, reading.topic)
            delivered = self.delivered[key] = Delivered(pulled)
        reading.delivered = delivered

    def _refuse(
        self, reading: _Reading, group: GroupConfig | None, topic: Topic | None, peer: Peer
    ) -> None:
        """Raises RefusalError for the first thing in the way; none may be."""
        config = self._settings.broker
        name = reading.group
        if not config.broker_permission & PERM_READ:
            raise RefusalError(
                ResponseCode.NO_PERMISSION,
                f"the broker[{config.broker_name}] pulling message is forbidden",
                1,
            )
        if group is None:
            raise RefusalError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group [{name}] does not exist, {FAQ}",
            )
        if not group.consume_enable:
            raise RefusalError(
                ResponseCode.NO_PERMISSION, f"subscription group no permission, {name}", 2
            )
        if topic is None:
            raise RefusalError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic[{reading.topic}] not exist, apply first please! \n{FAQ}",
            )
        if not topic.is_readable:
            raise RefusalError(
                ResponseCode.NO_PERMISSION,
                f"the topic[{reading.topic}] pulling message is forbidden",
                3,
            )
        if not self._groups.may_read(name, reading.topic):
            raise RefusalError(
                ResponseCode.NO_PERMISSION,
                f"the consumer group[{name}] is forbidden for topic[{reading.topic}]",
                5,
            )
        if not 0 <= reading.queue_id < topic.config.read_queues:
            raise RefusalError(
                ResponseCode.INVALID_PARAMETER,
                f"queueId[{reading.queue_id}] is illegal, topic:[{reading.topic}] "
                f"topicConfig.readQueueNums:[{topic.config.read_queues}] consumer:[/{peer.remote}]",
            )

    def _filter_of_request(self, reading: _Reading) -> MessageFilter | None:
        """A pull consumer names its expression each time; compiled ones are kept."""
        kind = reading.fields.get("expressionType") or TAG
        expression = reading.fields.get("subscription") or ALL
        if expression == ALL and kind == TAG:
            return None
        if not is_tag_kind(kind) and not self._settings.broker.enable_property_filter:
            raise RefusalError(ResponseCode.SYSTEM_ERROR, SQL92_IS_OFF)
        key = (kind, expression)
        if key in self._filters:
            self._filters.move_to_end(key)
            return self._filters[key]
        try:
            made = make_filter(subscribe(reading.topic, expression, kind))
        except FilterError as error:
            raise RefusalError(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED,
                f"parse the consumer's subscription failed: {error}",
            ) from error
        self._filters[key] = made
        if len(self._filters) > FILTERS_KEPT:
            self._filters.popitem(last=False)
        return made

    def _filter_of_group(self, reading: _Reading, broadcast_enable: bool) -> MessageFilter | None:
        """What the group's heartbeats say."""
        group = self._consumers.groups.get(reading.group)
        if group is None:
            raise RefusalError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's group info not exist\n{FAQ}"
            )
        if group.message_model == "BROADCASTING" and not broadcast_enable:
            raise RefusalError(
                ResponseCode.NO_PERMISSION,
                f"the consumer group[{reading.group}] can not consume by broadcast way",
                4,
            )
        watch = group.watches.get(reading.topic)
        if watch is None:
            raise RefusalError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's subscription not exist\n{FAQ}",
            )
        if watch.subscription.version < reading.number("subVersion"):
            raise RefusalError(
                ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest"
            )
        if not is_tag_kind(watch.subscription.kind):
            if not self._settings.broker.enable_property_filter:
                raise RefusalError(ResponseCode.SYSTEM_ERROR, SQL92_IS_OFF)
            if watch.is_broken:
                raise RefusalError(
                    ResponseCode.FILTER_DATA_NOT_EXIST,
                    "The broker's consumer filter data is not exist! The SQL92 expression does "
                    "not compile: `sluice filter check` says why.",
                )
        return watch.filter

    # ------------------------------------------------------------------------------- reading

    def _bytes_max(self, reading: _Reading, peer: Peer) -> int | None:
        """None leaves it to the store's rule for ordinary pulls.

        What one connection is given in bulk is bounded in each turn of the loop too: a client that
        sends a thousand pulls at once must not make a thousand answers of megabytes.
        """
        header = decode_header(PullMessageRequest, reading.fields)
        if not header.bulk:
            return None
        config = self._settings.broker
        if not self._given:
            self._after_turn(self._given.clear)
        given = self._given.get(peer, 0)
        room = config.write_buffer_bytes_max + config.bulk_pull_bytes_max - given
        limit = min(header.message_bytes_max or room, room, config.bulk_pull_bytes_max)
        limit = max(limit, BULK_BYTES_MIN)
        self._given[peer] = given + limit
        return limit

    def _read(self, reading: _Reading, offset: int) -> ReadResult:
        result = self._store_read(
            reading.topic,
            reading.queue_id,
            offset,
            reading.count_max if reading.count_max > 0 else 1,
            reading.bytes_max,
            reading.filter,
            None,
            reading.consumed,
        )
        reading.delivered.filtered += result.scanned - result.count
        return result

    def _parked(self, reading: _Reading, command: Command, scan_offset: int) -> Parked:
        config = self._settings.broker
        wait_ms = min(max(reading.number("suspendTimeoutMillis"), 0), SUSPEND_MS_MAX)
        if not config.long_polling_enable:
            wait_ms = config.short_polling_ms

        def look(parked: Parked, is_last: bool) -> bytes | None:
            return self._look(reading, parked, is_last)

        return Parked(
            command,
            reading.topic,
            reading.queue_id,
            scan_offset,
            self._clock.monotonic_s() + wait_ms / 1000,
            look,
        )

    def _look(self, reading: _Reading, parked: Parked, is_last: bool) -> bytes | None:
        """A parked pull looks again. When it is its last time it answers whatever there is, and
        the offset moves on over what the filter did not want."""
        result = self._read(reading, parked.scan_offset)
        code = _code(result, parked.scan_offset)
        if not is_last:
            if code == ResponseCode.PULL_RETRY_IMMEDIATELY:
                parked.scan_offset = result.next_offset
                return None
            if code == ResponseCode.PULL_NOT_FOUND:
                return None
        elif code == ResponseCode.PULL_NOT_FOUND and result.next_offset > reading.offset:
            code = ResponseCode.PULL_RETRY_IMMEDIATELY
            result.status = ReadStatus.NO_MATCHED_MESSAGE
        return self._answer(reading, parked.command.opaque, code, result)

    def _deliver(self, reading: _Reading, opaque: int, result: ReadResult) -> bytes:
        """The answer with messages. HOT."""
        next_offset = result.next_offset
        group_flag, topic_flag = reading.flags
        text = _ANSWER % (
            0, group_flag, next_offset, result.offset_max, result.offset_min, topic_flag, opaque,
            b"FOUND",
        )  # fmt: skip
        size = result.size_bytes
        self.found += 1
        delivered = reading.delivered
        delivered.pulled[reading.queue_id] = next_offset
        delivered.messages_out += result.count
        delivered.bytes_out += size
        length = len(text)
        return b"".join((_PREFIX.pack(length + 4 + size, length), text, *result.data))

    def _answer(self, reading: _Reading, opaque: int, code: int, result: ReadResult) -> bytes:
        """Any answer that says where to go on."""
        if result.status is _FOUND:
            return self._deliver(reading, opaque, result)
        status = result.status
        if status is ReadStatus.NO_MATCHED_LOGIC_QUEUE:
            status = ReadStatus.NO_MESSAGE_IN_QUEUE  # the real broker makes the queue to look at
        self.missed += 1
        reading.delivered.pulled[reading.queue_id] = result.next_offset
        group_flag, topic_flag = reading.flags
        text = _ANSWER % (
            code, group_flag, result.next_offset, result.offset_max, result.offset_min, topic_flag,
            opaque, status.name.encode(),
        )  # fmt: skip
        return _PREFIX.pack(len(text) + 4, len(text)) + text


def _code(result: ReadResult, offset: int) -> int:
    code = _CODES.get(result.status)
    if code is not None:
        return code
    return ResponseCode.PULL_NOT_FOUND if offset == 0 else ResponseCode.PULL_OFFSET_MOVED
