"""Pulls: 11 and 361, with long polling and the bulk extension.

The order of checks is the real broker's (spec/remoting.md §13), because clients tell from the code
what to do. A pull that finds nothing may be parked: then it looks again when messages of its queue
become visible, from where it stopped looking, and answers when one matches.

`sluiceBulk=true` is our own: the answer holds up to `maxMsgBytes` (at most
sluiceBulkPullBytesMax) instead of 32 messages. A Java broker ignores the field.
"""

import struct
from collections.abc import Callable
from typing import Final

from sluicemq.broker.background import Background, Steps
from sluicemq.broker.consume.clients import ConsumerGroup, Consumers, Watch
from sluicemq.broker.consume.delivered import Delivered
from sluicemq.broker.consume.lane_pulls import HELD_MS, LanePulls
from sluicemq.broker.consume.longpoll import LongPolls
from sluicemq.broker.consume.pull_reading import FAQ, RefusalError, refuse
from sluicemq.broker.consume.pull_reading import Reading as _Reading
from sluicemq.broker.groups import Groups
from sluicemq.broker.lanes.byte_cache import ByteCache
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.broker.turns import Parked, Postponed
from sluicemq.clock import Clock
from sluicemq.errors import FilterError
from sluicemq.filter.subscriptions import (
    SQL92_IS_OFF,
    is_tag_kind,
    make_filter,
    preparation,
    subscribe,
)
from sluicemq.model.subscription import ALL, TAG, MessageFilter
from sluicemq.model.topic import PERM_READ
from sluicemq.net.dispatch import Handler
from sluicemq.net.peer import Peer
from sluicemq.store.gather import Judgement, PostponedError
from sluicemq.store.store import ReadResult, ReadStatus, Store
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import decode_header
from sluicemq.wire.frames import SERVER_LANGUAGE, VERSION, Command
from sluicemq.wire.headers import PullMessageRequest

_PREFIX: Final = struct.Struct(">II")
COMMIT_OFFSET: Final = 0x1
SUSPEND: Final = 0x2
SUBSCRIPTION: Final = 0x4
SUSPEND_MS_MAX: Final = 10 * 60_000
FILTERS_BYTES_MAX: Final = 32 << 20
BULK_BYTES_MIN: Final = 65_536
PIECES_BYTES_MIN: Final = 512 * 1024
"""So large an answer is not copied together: fresh memory for it costs more than sending it."""

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
        background: Background,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._consumers = consumers
        self._polls = polls
        self._lanes = consumers.lanes.table
        self.in_lanes = LanePulls(consumers, store)
        self._store_read = store.reader.read
        self._queue_offsets = store.queue_offsets
        self._clock = clock
        self._after_turn = after_turn
        self._given: dict[Peer, int] = {}
        self._background = background
        self._filters = ByteCache(_make_filter, _filter_bytes, FILTERS_BYTES_MAX)
        self.delivered: dict[tuple[str, str], Delivered] = {}
        self.found = 0
        self.missed = 0

    def handlers(self) -> dict[int, Handler]:
        return {RequestCode.PULL_MESSAGE: self.pull, RequestCode.LITE_PULL_MESSAGE: self.pull}

    def pull(self, command: Command, peer: Peer) -> bytes | Command | Parked | Postponed | None:
        """11 and 361. HOT."""
        reading = _Reading(command.fields, peer)
        try:
            self._check(reading, peer)
        except RefusalError as refusal:
            kind = refusal.forbidden_kind
            fields = {} if kind is None else {"forbiddenType": str(kind)}
            return Command(refusal.code, fields, remark=refusal.remark)
        except PostponedError as postponed:
            return Postponed(self._after(postponed.judgement, command, peer))
        has_lanes = reading.group in self._lanes
        sys_flag = reading.sys_flag
        if has_lanes and sys_flag & COMMIT_OFFSET:  # before it is told that it has changed lanes
            self._commit(reading)
        if self._offsets.resets or has_lanes:
            told = self._reset(reading, command.opaque)
            if told is not None:
                return told
        if sys_flag & COMMIT_OFFSET and not has_lanes:
            self._commit(reading)
        if has_lanes and self.in_lanes.asks(reading):
            return self._reset(reading, command.opaque) or self._wait(reading, command)
        result = self._read(reading, reading.offset)
        if result.status is _FOUND:
            return self._deliver(reading, command.opaque, result)
        return self._found_nothing(reading, command, result)

    def _found_nothing(
        self, reading: _Reading, command: Command, result: ReadResult
    ) -> bytes | Parked | Postponed:
        if result.judgement is not None:
            return Postponed(self._after(result.judgement, command, reading.peer))
        code = _code(result, reading.offset)
        if (
            code == ResponseCode.PULL_NOT_FOUND
            and reading.sys_flag & SUSPEND
            and not self._polls.is_full
        ):
            return self._parked(reading, command, result.next_offset)
        return self._answer(reading, command.opaque, code, result)

    def _after(self, job: Judgement, command: Command, peer: Peer) -> Steps[object]:
        """The same once more, when something is known."""
        job.keep((yield job.run))
        return self.pull(command, peer)

    def _commit(self, reading: _Reading) -> None:
        """What a pull says of what is consumed."""
        offset = reading.number("commitOffset")
        if offset >= 0:
            reading.consumed = offset
            place = (reading.topic, reading.queue_id, offset)
            self._consumers.commit(reading.group, reading.peer, reading.fields, *place)

    def _wait(self, reading: _Reading, command: Command) -> bytes | Parked:
        """A pull that gets nothing until its lane is at rest."""
        if not reading.sys_flag & SUSPEND or self._polls.is_full:
            return self._held(reading, command.opaque)
        return self._parked(reading, command, reading.offset, HELD_MS)

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
            refuse(reading, self._settings.broker, self._groups, group, topic)
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

    def _filter_of_request(self, reading: _Reading) -> MessageFilter | None:
        """A pull consumer names its expression each time; compiled ones are kept."""
        kind = reading.fields.get("expressionType") or TAG
        expression = reading.fields.get("subscription") or ALL
        if expression == ALL and kind == TAG:
            return None
        if not is_tag_kind(kind):
            if not self._settings.broker.enable_property_filter:
                raise RefusalError(ResponseCode.SYSTEM_ERROR, SQL92_IS_OFF)
            for job in preparation(expression, kind):
                raise PostponedError(Judgement(job, lambda _: None))
        try:
            return self._filters(kind, expression)
        except FilterError as error:
            raise RefusalError(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED,
                f"parse the consumer's subscription failed: {error}",
            ) from error

    def _filter_of_group(self, reading: _Reading, broadcast_enable: bool) -> MessageFilter | None:
        """What the group's heartbeats say."""
        group = self._consumers.groups.get(reading.group)
        if group is None:
            raise RefusalError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's group info not exist\n{FAQ}"
            )
        if (reading.group in self._lanes or self._consumers.contracts.refused) and (
            found := self._of_member(reading, group)
        ):
            return found.filter
        if self.in_lanes.is_stranger(reading, group):
            raise RefusalError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's subscription not exist: {self.in_lanes.why(reading)}\n{FAQ}",
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

    def _of_member(self, reading: _Reading, group: ConsumerGroup) -> Watch | None:
        """In a group with lanes a member's version is compared with what it said itself; None for
        others. Raises RefusalError."""
        found = self._consumers.lane_of(reading.group, reading.peer, reading.fields)
        if found is None:
            return None
        said = found[1].wanted.get(reading.topic)
        if said is None:
            raise RefusalError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's subscription not exist\n{FAQ}"
            )
        if said.version < reading.number("subVersion"):
            raise RefusalError(
                ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest"
            )
        return group.watches.get(reading.topic)

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

    def _read(self, reading: _Reading, offset: int, is_parked: bool = False) -> ReadResult:
        if reading.group in self._lanes:
            found = self.in_lanes.read(reading, offset)
            if found is not None:
                reading.delivered.filtered += found.scanned - found.count
                return found
        delivered, message_filter, reach = reading.delivered, reading.filter, None
        if message_filter is not None and reading.bytes_max is None:
            if not is_parked:
                delivered.pace.asked(reading.queue_id, self._clock.monotonic_s())
            reach = delivered.pace.reach(reading.queue_id, offset, reading.consumed, is_parked)
        result = self._store_read(
            reading.topic,
            reading.queue_id,
            offset,
            reading.count_max if reading.count_max > 0 else 1,
            reading.bytes_max,
            message_filter,
            None,
            reach,
            may_postpone=True,
        )
        scanned = result.scanned
        delivered.filtered += scanned - result.count
        if reach is not None:
            delivered.pace.answered(reading.queue_id, result, self._clock.monotonic_s())
        if scanned and message_filter is not None and message_filter.reads_properties:
            delivered.looked(message_filter, reading.queue_id, offset, offset + scanned)
        return result

    def _parked(
        self, reading: _Reading, command: Command, scan_offset: int, wait_max_ms: int | None = None
    ) -> Parked:
        config = self._settings.broker
        wait_ms = min(max(reading.number("suspendTimeoutMillis"), 0), SUSPEND_MS_MAX)
        if not config.long_polling_enable:
            wait_ms = config.short_polling_ms
        if wait_max_ms is not None:
            wait_ms = wait_max_ms

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

    def _reset(self, reading: _Reading, opaque: int, *, is_parked: bool = False) -> bytes | None:
        """21 for a pull whose group has been sent to another place of the queue."""
        topic, queue_id = reading.topic, reading.queue_id
        offset = self.in_lanes.told(reading, self._offsets.resets, is_parked)
        if offset is None:
            return None
        low, high = self._queue_offsets(topic, queue_id)
        self.missed += 1
        reading.delivered.pulled[queue_id] = offset
        return self._moved(reading, opaque, ResponseCode.PULL_OFFSET_MOVED,
                           (offset, high, low), b"OFFSET_RESET")  # fmt: skip

    def _held(self, reading: _Reading, opaque: int) -> bytes:
        """Nothing now: the lane is to go back as soon as what it has in hand is committed."""
        low, high = self._queue_offsets(reading.topic, reading.queue_id)
        self.missed += 1
        return self._moved(reading, opaque, ResponseCode.PULL_NOT_FOUND,
                           (reading.offset, high, low), b"LANE_CHANGES")  # fmt: skip

    def _look(self, reading: _Reading, parked: Parked, is_last: bool) -> bytes | None:
        """A parked pull looks again. When it is its last time it answers whatever there is, and
        the offset moves on over what the filter did not want."""
        has_lanes = reading.group in self._lanes
        if not self.in_lanes.is_stale(reading) if has_lanes else self._offsets.resets:
            told = self._reset(reading, parked.command.opaque, is_parked=True)
            if told is not None:
                return told
        if has_lanes and self.in_lanes.is_held(reading):
            return self._held(reading, parked.command.opaque) if is_last else None
        if has_lanes and self.in_lanes.has_moved(reading):
            return self._again(reading, parked.command.opaque, reading.offset)
        if self._has_changed(reading):
            return self._again(reading, parked.command.opaque, parked.scan_offset)
        result = self._read(reading, parked.scan_offset, is_parked=True)
        code = _code(result, parked.scan_offset)
        if not is_last:
            if code == ResponseCode.PULL_RETRY_IMMEDIATELY:
                self._passed(parked, reading.peer, result)
                return None
            if code == ResponseCode.PULL_NOT_FOUND:
                return None
        elif code == ResponseCode.PULL_NOT_FOUND and result.next_offset > reading.offset:
            code = ResponseCode.PULL_RETRY_IMMEDIATELY
            result.status = ReadStatus.NO_MATCHED_MESSAGE
        return self._answer(reading, parked.command.opaque, code, result)

    def _passed(self, parked: Parked, peer: Peer, result: ReadResult) -> None:
        """A look that found nothing, perhaps before it was through."""
        parked.scan_offset = result.next_offset
        if result.next_offset < result.offset_max:
            parked.is_looking = True
            self._background.add(self._look_on(parked, peer, result.judgement), peer)

    def _look_on(self, parked: Parked, peer: Peer, job: Judgement | None) -> Steps[None]:
        """What a look has to know first, and the next one."""
        yield None
        if job is not None:
            job.keep((yield job.run))
        self._polls.look(parked, peer)

    def _again(self, reading: _Reading, opaque: int, offset: int) -> bytes:
        """Nothing yet: it is to ask again, from an offset."""
        low, high = self._queue_offsets(reading.topic, reading.queue_id)
        self.missed += 1
        return self._moved(reading, opaque, ResponseCode.PULL_RETRY_IMMEDIATELY,
                           (offset, high, low), b"NO_MATCHED_MESSAGE")  # fmt: skip

    def _has_changed(self, reading: _Reading) -> bool:
        """Has the group another expression than when it asked? The real broker reads with the new
        one, and a Java client drops what does not match the old one; so it is told to ask again."""
        if reading.sys_flag & SUBSCRIPTION:
            return False
        watch = self._consumers.watch(reading.group, reading.topic)
        return watch is not None and watch.filter is not reading.filter

    def _deliver(self, reading: _Reading, opaque: int, result: ReadResult) -> bytes | None:
        """The answer with messages; None: it has left already. HOT."""
        pieces = self._pieces(reading, opaque, result)
        if result.size_bytes < PIECES_BYTES_MIN:
            return b"".join(pieces)
        reading.peer.write_pieces(pieces)
        return None

    def _pieces(
        self, reading: _Reading, opaque: int, result: ReadResult
    ) -> list[bytes | memoryview]:
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
        return [_PREFIX.pack(length + 4 + size, length) + text, *result.data]

    def _answer(self, reading: _Reading, opaque: int, code: int, result: ReadResult) -> bytes:
        """Any answer that says where to go on."""
        if result.status is _FOUND:
            return b"".join(self._pieces(reading, opaque, result))
        status = result.status
        if status is ReadStatus.NO_MATCHED_LOGIC_QUEUE:
            status = ReadStatus.NO_MESSAGE_IN_QUEUE  # the real broker makes the queue to look at
        self.missed += 1
        reading.delivered.pulled[reading.queue_id] = result.next_offset
        places = (result.next_offset, result.offset_max, result.offset_min)
        return self._moved(reading, opaque, code, places, status.name.encode())

    def _moved(
        self, reading: _Reading, opaque: int, code: int, places: tuple[int, int, int], why: bytes
    ) -> bytes:
        """An answer without messages; `places`: next offset, end and begin of the queue."""
        group_flag, topic_flag = reading.flags
        text = _ANSWER % (code, group_flag, *places, topic_flag, opaque, why)
        return _PREFIX.pack(len(text) + 4, len(text)) + text


def _make_filter(kind: str, expression: str) -> MessageFilter | None:
    return make_filter(subscribe("", expression, kind))


def _filter_bytes(kind: str, expression: str) -> int:
    """About as much is made of an expression."""
    return (4 if is_tag_kind(kind) else 96) * len(expression)


def _code(result: ReadResult, offset: int) -> int:
    code = _CODES.get(result.status)
    if code is not None:
        return code
    return ResponseCode.PULL_NOT_FOUND if offset == 0 else ResponseCode.PULL_OFFSET_MOVED
