"""Pulls: 11 and 361, with long polling and the bulk extension.

The order of checks is the real broker's (spec/remoting.md §13), because clients tell from the code
what to do. A pull that finds nothing may be parked: then it looks again when messages of its queue
become visible, from where it stopped looking, and answers when one matches.

A member of a group with lanes asks its lane first what to do (`lanes/table.py`), and reads what its
lane's rule wants. A read does not go over the border between two rules: the next pull goes on
behind it.

A slave that serves readers (slaveReadEnable) moves nobody's offset, since its log may be the
shorter one, unless offsetCheckInSlave says so. Whoever is not behind is sent back to the master
while that is there (spec/ha.md §4). With sluiceConsensus it waits with them instead: clients whose
routes are old take it for the master, and would ask it again and again.

Three fields are our own, and a Java broker ignores them. `sluiceBulk=true`: the answer holds up to
`maxMsgBytes` (at most sluiceBulkPullBytesMax) instead of 32 messages. `sluiceAnySpan`: the reader
is a SluiceMQ client, which lacks the limits of Java's consumers. So the matches that it holds may
lie at any distance from each other (`delivered`), and an answer from memory holds up to
`sluicePullCountMax` messages. Without that field no answer holds more than RocketMQ's count.
`sluiceLook=true`: the answer is the message at the offset, if there is one, whatever the group's
resets, lanes and filter say, and nothing changes for the group. By that a reader finds out whether
the queue is the one that it has read before.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import orjson

from sluicemq import engine
from sluicemq.broker.background import retry_after
from sluicemq.broker.consume.clients import STRICT, ConsumerGroup, Consumers
from sluicemq.broker.consume.delivered import Delivered, Deliveries
from sluicemq.broker.consume.filters import RequestFilters, Watch
from sluicemq.broker.consume.longpoll import LongPolls
from sluicemq.broker.group_commit import Parked, Postponed
from sluicemq.broker.lanes.filters import rule_filter
from sluicemq.broker.lanes.group import GroupLanes
from sluicemq.broker.lanes.table import READ, Do, Step, note
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import (
    FAQ,
    Groups,
    Topic,
    Topics,
    make_no_queue_error,
    make_no_topic_error,
)
from sluicemq.clock import Clock
from sluicemq.errors import RequestError
from sluicemq.filter.subscriptions import SQL92_IS_OFF, is_tag_kind
from sluicemq.model.subscription import MessageFilter
from sluicemq.model.topic import CONTRACT, MASTER_ID, PERM_READ, GroupConfig
from sluicemq.net.dispatch import Peer, RunEngine
from sluicemq.net.limits import FairScheduler
from sluicemq.net.work.background import Background
from sluicemq.store.gather import UNLIMITED, PostponedError, SpanLimit
from sluicemq.store.log import PLACEHOLDER_CODE
from sluicemq.store.read import TAG_SCAN_MAX, ReadResult, ReadStatus
from sluicemq.store.store import Store
from sluicemq.wire.bodies import BROADCASTING
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import decode_header, encode_header
from sluicemq.wire.frames import SERVER_LANGUAGE, VERSION, Command, encode_answer
from sluicemq.wire.headers import CLIENT_ID_FIELD, PullMessageRequest, PullMessageResponse

ANY_SPAN: Final = "sluiceAnySpan"
LOOK: Final = "sluiceLook"
COMMIT_OFFSET: Final = 0x1
SUSPEND: Final = 0x2
SUBSCRIPTION: Final = 0x4
SUSPEND_MS_MAX: Final = 10 * 60_000
HELD_S: Final = 1.0
"""A pull that waits for its lane to come to rest is answered so soon: the next one says what is
committed."""
BULK_BYTES_MIN: Final = 65_536
PIECES_BYTES_MIN: Final = 512 * 1024
"""So large an answer is not copied together: fresh memory for it costs more than sending it."""

FIELDS_PLAIN_MAX: Final = 32
_PREFIX: Final = struct.Struct(">II")
# Bytes, not text: formatting them takes 60 % of the time.
_ANSWER: Final = (
    '{"code":%d,"extFields":{"suggestWhichBrokerId":"%d","groupSysFlag":"%d",'
    '"nextBeginOffset":"%d","maxOffset":"%d","minOffset":"%d","topicSysFlag":"%d"},'
    f'"flag":1,"language":"{SERVER_LANGUAGE}","opaque":%d,"remark":"%b",'
    f'"serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
).encode()
_MARKS: Final = (1 << 60, 1 << 61, 1 << 62, (1 << 62) + 1)
"""Stand in an answer where the numbers of each pull do."""
_FOUND: Final = ReadStatus.FOUND
_CODES: Final = {
    ReadStatus.FOUND: ResponseCode.SUCCESS,
    ReadStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    ReadStatus.MESSAGE_WAS_REMOVING: ResponseCode.PULL_RETRY_IMMEDIATELY,
    ReadStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    ReadStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
}
_SCANNED: Final = ReadStatus.NO_MATCHED_MESSAGE, ReadStatus.MESSAGE_WAS_REMOVING
_OF_EMPTY: Final = (ResponseCode.PULL_OFFSET_MOVED, ResponseCode.PULL_NOT_FOUND)
"""Answers by what the store says; an empty queue's depends on the offset asked for: is it 0?"""

_INSTEAD: Final = {
    Do.MOVE: (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_RESET"),
    Do.WAIT: (ResponseCode.PULL_NOT_FOUND, "LANE_CHANGES"),
    Do.ANEW: (ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE"),
}
"""To a group that was sent to another place of the queue; to a lane that is to go back when what it
has in hand is committed; to one that has to ask again."""


class PullRefusedError(RequestError):
    """A pull that is answered with an error code.

    When: inside a broker: topic, group or filter of a pull is not there, or not allowed.
    Then: nothing was read. Consumers get the answer, as a `RequestError` of its code.
    Fix: that of the code.
    """

    def __init__(self, code: int, remark: str, forbidden_kind: int | None = None) -> None:
        super().__init__(code, remark)
        self.forbidden_kind = forbidden_kind

    @classmethod
    def of(cls, error: RequestError) -> "PullRefusedError":
        return cls(error.code, error.remark)


class Reading:
    """One pull under way: what is asked, and what the checks made of it. A parked pull looks again
    with it."""

    __slots__ = (
        "bytes_max", "consumed", "count_max", "delivered", "fields", "filter", "flags", "group",
        "lane", "offset", "peer", "queue", "queue_id", "sys_flag", "topic",
    )  # fmt: skip

    filter: MessageFilter | None
    flags: tuple[int, int]
    bytes_max: int | None
    delivered: Delivered
    consumed: int | None
    lane: str
    """Of a pull in a lane: its subscription."""

    def __init__(self, fields: Mapping[str, str] | None, peer: Peer) -> None:
        """HOT: straight from the fields; fields that only some pulls need are read when they are
        needed. Raises KeyError, TypeError, ValueError for a missing or bad one."""
        self.fields: Mapping[str, str] = fields  # type: ignore[assignment]
        self.group = self.fields["consumerGroup"]
        self.topic = self.fields["topic"]
        self.queue_id = int(self.fields["queueId"])
        self.offset = int(self.fields["queueOffset"])
        self.count_max = int(self.fields["maxMsgNums"])
        self.sys_flag = int(self.fields["sysFlag"])
        self.queue = (self.topic, self.queue_id)
        self.lane = ""
        self.peer = peer


@dataclass(slots=True, eq=False)
class Pull:
    """The request family of pulling consumers."""

    settings: Settings
    topics: Topics
    groups: Groups
    offsets: Offsets
    consumers: Consumers
    polls: LongPolls
    store: Store
    clock: Clock
    after_turn: Callable[[Callable[[], None]], object]
    background: Background
    delivered: Deliveries
    filters: RequestFilters
    shares: FairScheduler
    call_later: Callable[[float, Callable[[], None]], object] | None = None
    """The loop's. Without it no pull is held (`_held_back`)."""
    has_master: Callable[[], bool] = lambda: False
    """Of a slave: does it follow a master now?"""
    found: int = 0
    missed: int = 0
    compiled: Any = None
    """Takes pulls that are repeated (`sluicemq.engine`)."""
    _given: dict[Peer, int] = field(default_factory=dict)
    _lanes: dict[str, GroupLanes] = field(init=False)

    def __post_init__(self) -> None:
        self._lanes = self.consumers.lanes.table

    def pull(self, command: Command, peer: Peer) -> bytes | Command | Parked | Postponed | None:
        """11 and 361. HOT."""
        missed = None if self.compiled is None else self.compiled.claim()
        try:
            reading = Reading(command.fields, peer)
            self._check(reading)
            if LOOK in reading.fields:
                return self._looked_at(reading, command)
            sys_flag = reading.sys_flag
            consumed = int(reading.fields["commitOffset"]) if sys_flag & COMMIT_OFFSET else -1
            reading.consumed = consumed if consumed >= 0 else None
            held = self._held(reading, command)
            if held is not None:
                return held
            if consumed >= 0 and reading.group not in self._lanes:
                self.offsets.commit(reading.group, *reading.queue, consumed)
            result = self._read(reading, reading.offset)
            if result.status is not _FOUND:
                return self._found_nothing(reading, command, result)
        except PullRefusedError as refusal:
            kind = refusal.forbidden_kind
            fields = {} if kind is None else {"forbiddenType": str(kind)}
            return Command(refusal.code, fields, remark=refusal.remark)
        except PostponedError as postponed:
            return Postponed(retry_after(postponed.work, partial(self.pull, command, peer)))
        except (KeyError, TypeError, ValueError):
            decode_header(PullMessageRequest, command.fields)  # says which field it is
            raise
        if missed is not None:
            self._remember(missed, reading, command)
        pieces = self._found(reading, command.opaque, result)
        if result.size_bytes < PIECES_BYTES_MIN:
            return b"".join(pieces)
        peer.write_buffers(pieces)
        return None

    def _looked_at(self, reading: Reading, command: Command) -> bytes | Command:
        """Answer a pull with the field `sluiceLook`: the message at its offset, or why there is
        none, and the bounds of the queue."""
        result = self.store.reader.read(*reading.queue, reading.offset, 1, None, None)
        low, high = result.offset_min, result.offset_max
        if result.status is _FOUND:
            fields = PullMessageResponse(
                broker_id_suggested=0, next_offset=result.next_offset, offset_min=low,
                offset_max=high,
            )  # fmt: skip
            return Command(
                ResponseCode.SUCCESS, encode_header(fields), b"".join(result.data), remark="FOUND"
            )
        code = self._code_of(reading, result, reading.offset)
        places = (result.next_offset, high, low)
        return self._empty(reading, command.opaque, code, places, result.status.name)

    def pull_quick(self, header: dict[str, Any], body: bytes, peer: Peer) -> bool | bytes:
        """11. HOT: a plain pull where there are messages; False for all else, which goes to `pull`.
        It has its share of the time, as any request."""
        shares = self.shares
        try:
            reading = Reading(header["extFields"], peer)
            fields, opaque, offset = reading.fields, header["opaque"], reading.offset
            resets = self.offsets.resets.table
            queue = self.store.writer.by_key.get(reading.queue)
            if (
                queue is None
                or not queue.offset_min <= offset < queue.visible_offset
                or reading.group not in self.groups.table
                or reading.group in self._lanes
                or (resets and (reading.group, *reading.queue) in resets)
                or "sluiceBulk" in fields
                or LOOK in fields
                or len(fields) > FIELDS_PLAIN_MAX
                or header["flag"] != 0
                or opaque.__class__ is not int
                or not 0 <= opaque <= 0x7FFFFFFF
                or (shares.is_tight and shares.has_to_wait(peer))
            ):
                return False
            begin_s = shares.now_s()
            self._check(reading)
            if reading.filter is not None and reading.filter.reads_properties:
                return False
            consumed = int(fields["commitOffset"]) if reading.sys_flag & COMMIT_OFFSET else -1
            reading.consumed = consumed if consumed >= 0 else None
        except (PullRefusedError, PostponedError, KeyError, TypeError, ValueError):
            return False
        if consumed >= 0:
            self.offsets.commit(reading.group, *reading.queue, consumed)
        result = self._read(reading, offset)
        answer: bool | bytes = True
        if result.status is _FOUND:
            pieces = self._found(reading, opaque, result)
            if result.size_bytes < PIECES_BYTES_MIN:
                answer = b"".join(pieces)
            else:
                peer.write_buffers(pieces)
        elif (
            _is_stuck(reading, result)
            or (code := self._code_of(reading, result, offset)) == ResponseCode.PULL_NOT_FOUND
        ):
            return False  # it may wait
        else:
            answer = self._not_found(reading, opaque, code, result)
        shares.spent(peer, begin_s, RequestCode.PULL_MESSAGE)
        return answer

    def compile(self, sends: Callable[..., int]) -> RunEngine:
        """The compiled engine's way for pulls that are repeated, and for the `sends` between."""
        if engine.pulls is None:
            return lambda data, position, peer, shares: sends(data, position, peer)
        store = self.store
        self.compiled = engine.pulls.Pulls(
            self, store.reader, store.writer.by_key, store.reader.log, sends, PLACEHOLDER_CODE
        )
        return self.compiled.run  # type: ignore[no-any-return]

    def _remember(self, missed: tuple[bytes, bytes], reading: Reading, command: Command) -> None:
        """What the checks have made of this pull, the compiled engine need not find out again: when
        it is the one that it missed, and plain."""
        key, header = missed
        values, wanted, config = orjson.loads(header), reading.filter, self.settings.broker
        assert engine.pulls is not None, "it has missed the pull"
        reader, store = self.store.reader, self.store.reader.config
        is_ours = ANY_SPAN in reading.fields
        count_max = min(max(reading.count_max, 1), reader.memory_count_max[is_ours])
        codes = None if wanted is None else reader.tag_codes_only(wanted)
        scan = None if wanted is None or codes is not None else reader.cached_column_scan(wanted)
        if (
            [values[name] for name in ("opaque", "flag", "extFields")]
            != [command.opaque, 0, command.fields]
            or (wanted is not None and codes is None and scan is None)
            or reading.bytes_max is not None
            or count_max > engine.pulls.count_max
            or config.slave_read
            or reading.group in self._lanes
            or reading.group not in self.groups.table
        ):
            return
        plan = engine.pulls.Plan()
        plan.group, plan.topic, plan.queue = reading.group, reading.topic, reading.queue
        plan.config = self.groups.table[reading.group]
        plan.found_topic = self.topics.table[reading.topic]
        plan.topic_config, plan.broker = plan.found_topic.config, config
        plan.delivered, plan.scan = reading.delivered, scan
        plan.codes = codes if scan is None else wanted.vectorised  # type: ignore[union-attr]
        plan.any_span = is_ours
        if not reading.sys_flag & SUBSCRIPTION:
            plan.members = self.consumers.groups[reading.group]
            plan.watch = plan.members.watches[reading.topic]
            plan.model = plan.members.message_model
        plan.commits = bool(reading.sys_flag & COMMIT_OFFSET)
        plan.count_max = count_max
        plan.bytes_max = min(store.max_transfer_bytes_memory, PIECES_BYTES_MIN - 1)
        plan.scan_max = store.filter_scan_units_max
        if scan is None:
            plan.scan_max = min(plan.scan_max, TAG_SCAN_MAX)
        group_flag, topic_flag = reading.flags
        text = _ANSWER % (0, 0, group_flag, *_MARKS[:3], topic_flag, _MARKS[3], b"FOUND")
        for mark in _MARKS:
            text = text.replace(b"%d" % mark, b"\0")
        plan.answer = tuple(text.split(b"\0"))
        self.compiled.remember(key, plan)

    def _found_nothing(
        self, reading: Reading, command: Command, result: ReadResult
    ) -> bytes | Parked | Postponed:
        """The pull waits, if it may. HOT."""
        if result.postponed is not None:
            return Postponed(
                retry_after(result.postponed, partial(self.pull, command, reading.peer))
            )
        if _is_stuck(reading, result):
            return self._held_back(reading, command)
        code = self._code_of(reading, result, reading.offset)
        if code != ResponseCode.PULL_NOT_FOUND or not reading.sys_flag & SUSPEND:
            return self._not_found(reading, command.opaque, code, result)
        wait_ms = min(max(int(reading.fields["suspendTimeoutMillis"]), 0), SUSPEND_MS_MAX)
        config = self.settings.broker
        if not config.long_polling_enable:
            wait_ms = config.short_polling_ms
        return Parked(
            command, (reading.queue,), result.next_offset,
            self.clock.monotonic_s() + wait_ms / 1000, partial(self._look, reading),
        )  # fmt: skip

    def _held_back(self, reading: Reading, command: Command) -> bytes | Parked:
        """Hold a pull that begins at a match out of its reader's reach, and give it the match after
        some milliseconds (`delivered.Pace`): an answer without messages would be no progress."""
        hold_s = reading.delivered.pace.hold(reading.queue_id)
        parked = Parked(
            command, (reading.queue,), reading.offset, self.clock.monotonic_s() + hold_s,
            partial(self._look, reading),
        )  # fmt: skip
        if self.call_later is None:
            return self._look(reading, parked, is_last=True) or b""
        self.call_later(hold_s, partial(self.polls.look, parked, reading.peer))
        return parked

    def _held(self, reading: Reading, command: Command) -> bytes | Parked | None:
        """Instead of what it asked for, when its lane or a reset says so. HOT."""
        resets = self.offsets.resets.table
        if reading.group not in self._lanes and not (
            resets and (reading.group, *reading.queue) in resets
        ):
            return None
        step = self._step(reading)
        if step.do is Do.WAIT and reading.sys_flag & SUSPEND:
            return Parked(
                command, (reading.queue,), reading.offset, self.clock.monotonic_s() + HELD_S,
                partial(self._look, reading),
            )  # fmt: skip
        return None if step.do is Do.READ else self._instead(reading, command.opaque, step)

    # ------------------------------------------------------------------------------- checks

    def _check(self, reading: Reading) -> None:
        """Everything that can refuse a pull, in the order of the real broker. HOT.

        Raises PullRefusedError, PostponedError.
        """
        group = self.groups.table.get(reading.group) or self.groups.get_or_create(reading.group)
        topic = self.topics.get(reading.topic)
        if (
            group is None
            or topic is None
            or not group.consume_enable
            or not self.settings.broker.broker_permission & topic.config.perm & PERM_READ
            or not 0 <= reading.queue_id < topic.config.read_queues
            or reading.group in self.groups.forbidden
        ):
            self._refuse(reading, group, topic)
        assert group is not None
        assert topic is not None
        members = self.consumers.groups.get(reading.group)
        watch = None if members is None else members.watches.get(reading.topic)
        if reading.sys_flag & SUBSCRIPTION:
            reading.filter = self._filter_of_request(reading)
        elif (
            members is None
            or watch is None
            or not watch.is_by_tags
            or members.message_model == BROADCASTING
            or group.attributes
            or reading.group in self._lanes
            or watch.subscription.version < int(reading.fields["subVersion"])
        ):
            reading.filter = self._filter_of_group(reading, group, members)
        else:
            reading.filter = watch.filter
        reading.flags = (group.sys_flag, topic.config.sys_flag)
        reading.bytes_max = self._bulk_bytes(reading) if "sluiceBulk" in reading.fields else None
        reading.delivered = self.delivered[reading.topic, reading.group]

    def _refuse(self, reading: Reading, group: GroupConfig | None, topic: Topic | None) -> None:
        """Raises PullRefusedError for the first thing in the way; none may be."""
        config, name = self.settings.broker, reading.group
        if not config.broker_permission & PERM_READ:
            what = f"the broker[{config.broker_name}] pulling message is forbidden"
            raise PullRefusedError(ResponseCode.NO_PERMISSION, what, 1)
        if group is None:
            what = f"subscription group [{name}] does not exist, {FAQ}"
            raise PullRefusedError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, what)
        if not group.consume_enable:
            what = f"subscription group no permission, {name}"
            raise PullRefusedError(ResponseCode.NO_PERMISSION, what, 2)
        if topic is None:
            raise PullRefusedError.of(make_no_topic_error(reading.topic))
        if not topic.is_readable:
            what = f"the topic[{reading.topic}] pulling message is forbidden"
            raise PullRefusedError(ResponseCode.NO_PERMISSION, what, 3)
        if not self.groups.can_read(name, reading.topic):
            what = f"the consumer group[{name}] is forbidden for topic[{reading.topic}]"
            raise PullRefusedError(ResponseCode.NO_PERMISSION, what, 5)
        if not 0 <= reading.queue_id < topic.config.read_queues:
            remote, code = reading.peer.remote, ResponseCode.INVALID_PARAMETER
            raise PullRefusedError.of(make_no_queue_error(topic, reading.queue_id, remote, code))

    def _filter_of_request(self, reading: Reading) -> MessageFilter | None:
        """A pull consumer names its expression each time; compiled ones are kept."""
        kind = reading.fields.get("expressionType")
        if not is_tag_kind(kind) and not self.settings.broker.enable_property_filter:
            raise PullRefusedError(ResponseCode.SYSTEM_ERROR, SQL92_IS_OFF)
        try:
            return self.filters.of(kind, reading.fields.get("subscription"))
        except RequestError as error:
            raise PullRefusedError.of(error) from error

    def _filter_of_group(
        self, reading: Reading, config: GroupConfig, group: ConsumerGroup | None
    ) -> MessageFilter | None:
        """What the group's heartbeats say. Raises PullRefusedError."""
        if group is None:
            raise PullRefusedError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's group info not exist\n{FAQ}"
            )
        if reading.group in self._lanes or config.attributes.get(CONTRACT) == STRICT:
            found = self._watch_of_member(reading, group)
            if found is not None:
                return found.filter
        if group.message_model == BROADCASTING and not config.consume_broadcast_enable:
            what = f"the consumer group[{reading.group}] can not consume by broadcast way"
            raise PullRefusedError(ResponseCode.NO_PERMISSION, what, 4)
        watch = group.watches.get(reading.topic)
        if watch is None:
            raise _unknown_subscription()
        if watch.subscription.version < int(reading.fields["subVersion"]):
            raise _old_subscription()
        if not watch.is_by_tags:
            if not self.settings.broker.enable_property_filter:
                raise PullRefusedError(ResponseCode.SYSTEM_ERROR, SQL92_IS_OFF)
            if watch.is_broken:
                raise PullRefusedError(
                    ResponseCode.FILTER_DATA_NOT_EXIST,
                    "The broker's consumer filter data is not exist! The SQL92 expression does "
                    "not compile: `sluice filter check` says why.",
                )
        return watch.filter

    def _watch_of_member(self, reading: Reading, group: ConsumerGroup) -> Watch | None:
        """In a group with lanes a member's version is compared with what it said itself; None for
        members without a lane.

        Raises PullRefusedError, for strangers too: a reader that was there before the broker
        restarted, and whose heartbeat is to come, would pass over its own messages by what the
        others want.
        """
        member = group.find(reading.peer, reading.fields)
        if member is None:
            client_id = reading.fields.get(CLIENT_ID_FIELD)
            contracts = self.consumers.contracts
            refused = contracts.why_refused(reading.group, reading.peer, client_id)
            raise _unknown_subscription(f": {refused or 'no heartbeat of it has come yet'}")
        lanes = self._lanes.get(reading.group)
        if lanes is None or member.key not in lanes.lanes:
            return None
        said = member.wanted.get(reading.topic)
        if said is None:
            raise _unknown_subscription()
        if said.version < int(reading.fields["subVersion"]):
            raise _old_subscription()
        return group.watches.get(reading.topic)

    def _bulk_bytes(self, reading: Reading) -> int | None:
        """None leaves it to the store's rule for ordinary pulls.

        What one connection is given in bulk is bounded in each turn of the loop too: a client that
        sends a thousand pulls at once must not make a thousand answers of megabytes.
        """
        header = decode_header(PullMessageRequest, reading.fields)
        if not header.bulk:
            return None
        config = self.settings.broker
        if not self._given:
            self.after_turn(self._given.clear)
        given = self._given.get(reading.peer, 0)
        room = config.write_buffer_bytes_max + config.bulk_pull_bytes_max - given
        limit = min(header.message_bytes_max or room, room, config.bulk_pull_bytes_max)
        limit = max(limit, BULK_BYTES_MIN)
        self._given[reading.peer] = given + limit
        return limit

    # ------------------------------------------------------- before it reads: resets and lanes

    def _step(self, reading: Reading, *, is_parked: bool = False) -> Step:
        """What a pull of a lane, or of a group that is sent elsewhere, has to do: a new one, whose
        commit counts before it hears of another lane, or one that waits."""
        lane = self.consumers.lane_of(reading.group, reading.peer, reading.fields)
        if lane is None:
            moved = self.offsets.resets.redirect(
                reading.group, *reading.queue, reading.offset, is_parked=is_parked
            )
            return READ if moved is None else Step(Do.MOVE, offset=moved)
        if is_parked:
            return lane.looks_again(reading.queue, reading.offset, reading.lane)
        if reading.consumed is not None:
            lane.commit(reading.queue, reading.consumed)
        step = lane.pulls(reading.queue, reading.offset)
        reading.lane = step.lane
        return step

    def _instead(self, reading: Reading, opaque: int, step: Step) -> bytes:
        """The answer to a pull that may not read."""
        code, why = _INSTEAD[step.do]
        offset = reading.offset if step.do is Do.WAIT else step.offset
        if step.do is Do.MOVE:
            reading.delivered.pulled[reading.queue_id] = offset
        low, high = self.store.queue_offsets(*reading.queue)
        return self._empty(reading, opaque, code, (offset, high, low), why)

    # ------------------------------------------------------------------------------- reading

    def _read(self, reading: Reading, offset: int, is_parked: bool = False) -> ReadResult:
        """HOT."""
        delivered, message_filter, consumed = reading.delivered, reading.filter, reading.consumed
        count = reading.count_max if reading.count_max > 0 else 1
        is_ours = ANY_SPAN in reading.fields
        reach = room = place = pace = None
        if reading.group in self._lanes:
            lane = self.consumers.lane_of(reading.group, reading.peer, reading.fields)
            place = lane.place(reading.queue) if lane is not None else None
        if place is not None:
            rule, until = place.rule_at(offset)
            message_filter = rule_filter(rule)
            if until is not None:
                room = until - offset
                count = min(count, room)
            reach = None if consumed is None else SpanLimit(consumed)
        elif message_filter is not None and reading.bytes_max is None:
            if is_ours:
                reach = SpanLimit(offset, UNLIMITED)
            else:
                pace = delivered.pace
                if not is_parked:
                    pace.asked(reading.queue_id, self.clock.monotonic_s())
                reach = pace.reach(reading.queue_id, offset, consumed, is_parked)
        result = self.store.reader.read(
            reading.topic, reading.queue_id, offset, count, reading.bytes_max, message_filter,
            room, reach, may_postpone=place is None, is_sluice_client=is_ours,
        )  # fmt: skip
        scanned = result.units_scanned
        delivered.filtered += scanned - result.count
        if place is not None:
            note(place, offset, result)
        elif pace is not None:
            pace.answered(reading.queue_id, result, self.clock.monotonic_s())
        is_sure = (
            result.is_filter_reliable and place is None
        )  # a rule of a lane is more than one expression
        if scanned and not is_sure and message_filter and message_filter.reads_properties:
            delivered.looked(message_filter, reading.queue_id, offset, offset + scanned)
        return result

    # ------------------------------------------------------------------------------- waiting

    def _look(self, reading: Reading, parked: Parked, is_last: bool) -> bytes | None:
        """A parked pull looks again. When it is its last time it answers whatever there is, and
        the offset moves on over what the filter did not want. HOT."""
        opaque = parked.command.opaque
        if reading.topic not in self.topics.table:
            refusal = make_no_topic_error(reading.topic)
            return encode_answer(parked.command, refusal.code, remark=refusal.remark)
        resets = self.offsets.resets.table
        if reading.group in self._lanes or (resets and (reading.group, *reading.queue) in resets):
            step = self._step(reading, is_parked=True)
            if step.do is Do.WAIT and not is_last:
                return None
            if step.do is not Do.READ:
                return self._instead(reading, opaque, step)
        if not reading.sys_flag & SUBSCRIPTION:
            members = self.consumers.groups.get(reading.group)
            watch = None if members is None else members.watches.get(reading.topic)
            if watch is not None and watch.filter is not reading.filter:
                # The group has another expression than when it asked. The real broker reads with
                # the new one, and a Java client drops what does not match the old one.
                return self._instead(reading, opaque, Step(Do.ANEW, offset=parked.scan_offset))
        result = self._read(reading, parked.scan_offset, is_parked=True)
        if result.status is _FOUND:
            return b"".join(self._found(reading, opaque, result))
        return self._found_nothing_again(reading, parked, result, is_last)

    def _found_nothing_again(
        self, reading: Reading, parked: Parked, result: ReadResult, is_last: bool
    ) -> bytes | None:
        """It goes on waiting, or looking when it was not through; unless there is a master to ask
        by now. At its last time a filter that takes long is judged first: without that the answer
        would say to retry although no message was looked at."""
        if is_last and result.postponed is not None:
            command, peer = parked.command, reading.peer
            steps = retry_after(result.postponed, partial(self.pull, command, peer))
            self.background.run_request(steps, command, peer)
            return b""
        is_for_master = result.postponed is None and self._is_for_master(
            reading, result, parked.scan_offset
        )
        code = self._code_of(reading, result, parked.scan_offset)
        if not is_last and not is_for_master:
            if code == ResponseCode.PULL_RETRY_IMMEDIATELY:
                parked.scan_offset = result.next_offset
                if result.next_offset < result.offset_max:
                    parked.is_attempt_pending = True
                    steps = self.polls.look_on(parked, reading.peer, result.postponed)
                    self.background.run_in_background(steps, reading.peer)
                return None
            if code == ResponseCode.PULL_NOT_FOUND:
                return None
        elif code == ResponseCode.PULL_NOT_FOUND and result.next_offset > reading.offset:
            code = ResponseCode.PULL_RETRY_IMMEDIATELY
            result.status = ReadStatus.NO_MATCHED_MESSAGE
        return self._not_found(reading, parked.command.opaque, code, result)

    # ------------------------------------------------------------------------------- answers

    def _code_of(self, reading: Reading, result: ReadResult, offset: int) -> int:
        """By what the store says, and on a slave by whom to ask instead; `next_offset` may change.
        HOT."""
        code = _CODES.get(result.status) or _OF_EMPTY[offset == 0]
        settings = self.settings
        if not settings.is_slave:
            return code
        if code == ResponseCode.PULL_OFFSET_MOVED and not settings.broker.offset_check_in_slave:
            result.next_offset, code = offset, ResponseCode.PULL_NOT_FOUND
        if self._is_for_master(reading, result, offset):
            return ResponseCode.PULL_RETRY_IMMEDIATELY
        return code

    def _is_for_master(self, reading: Reading, result: ReadResult, offset: int) -> bool:
        """Does a slave send whoever found nothing back to its master?"""
        settings = self.settings
        if not settings.is_slave or settings.is_failover or not self.has_master():
            return False
        return result.status not in _SCANNED or self.store.reader.is_in_memory(
            *reading.queue, offset
        )

    def _found(self, reading: Reading, opaque: int, result: ReadResult) -> list[bytes | memoryview]:
        """The answer with messages, in pieces. HOT."""
        group_flag, topic_flag = reading.flags
        broker_id = self._suggested(reading) if self.settings.broker.slave_read else 0
        text = _ANSWER % (
            0, broker_id, group_flag, result.next_offset, result.offset_max, result.offset_min,
            topic_flag, opaque, b"FOUND",
        )  # fmt: skip
        size, length = result.size_bytes, len(text)
        self.found += 1
        delivered = reading.delivered
        delivered.pulled[reading.queue_id] = result.next_offset
        delivered.messages_out += result.count
        delivered.bytes_out += size
        return [_PREFIX.pack(length + 4 + size, length) + text, *result.data]

    def _not_found(self, reading: Reading, opaque: int, code: int, result: ReadResult) -> bytes:
        """What the store says instead of messages."""
        status = result.status
        if status is ReadStatus.NO_MATCHED_LOGIC_QUEUE:
            status = ReadStatus.NO_MESSAGE_IN_QUEUE  # the real broker makes the queue to look at
        reading.delivered.pulled[reading.queue_id] = result.next_offset
        places = (result.next_offset, result.offset_max, result.offset_min)
        return self._empty(reading, opaque, code, places, status.name)

    def _empty(
        self, reading: Reading, opaque: int, code: int, places: tuple[int, int, int], why: str
    ) -> bytes:
        """An answer without messages; `places`: next offset, end and begin of the queue."""
        self.missed += 1
        group_flag, topic_flag = reading.flags
        text = _ANSWER % (code, 0, group_flag, *places, topic_flag, opaque, why.encode())
        return _PREFIX.pack(len(text) + 4, len(text)) + text

    def _suggested(self, reading: Reading) -> int:
        """Whom to ask next: another broker for what is likely no more in memory (spec/ha.md §4)."""
        group = self.groups.config_of(reading.group) or GroupConfig(reading.group)
        is_near = self.store.reader.is_in_memory(*reading.queue, reading.offset)
        if is_near and self.settings.is_slave and self.has_master():
            return MASTER_ID
        return group.broker_id if is_near else group.broker_id_when_slow


def _is_stuck(reading: Reading, result: ReadResult) -> bool:
    """Return whether the only thing that a read found out is that its reader holds too much."""
    return result.is_out_of_reach and result.next_offset == reading.offset


def _unknown_subscription(why: str = "") -> PullRefusedError:
    return PullRefusedError(
        ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's subscription not exist{why}\n{FAQ}"
    )


def _old_subscription() -> PullRefusedError:
    return PullRefusedError(
        ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest"
    )
