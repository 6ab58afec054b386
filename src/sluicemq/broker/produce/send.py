"""Sends: 310 (letters), 10 (long names), 320 (batch), and what a consumer could not handle: 36.

`Send.send_quick` is the hot path: it takes the letters from the header as it came, looks the topic
up, appends and formats the answer in one go. Everything that is not the plain case (unknown topic,
retry topic, batch, a property that needs care, a bad field) goes through `send`, which does
the same work with care. tests/unit/broker/test_send.py holds the two equal.

What a message cannot be (a prepared or a delayed one in a batch) is refused, so that it is never
stored as an ordinary message.

Where the failures of a consumer group go (`Retries`):

    %RETRY%group     retryQueueNums queues; a message waits (a delay level) before it lies there
    %DLQ%group       one queue, readable and writable like any topic: a group may subscribe to it

36 says where the message lies in the log and for which group. A copy goes to the group's retry
topic, with its count one higher, by the way of a delay level:

    delayLevel  0   level 3 + times so far: 10 s, 30 s, 1 m … 2 h, sixteen in all
               >0   that level
               <0   no more: dead letters
    times so far >= maxReconsumeTimes (the header's, else the group's): dead letters

The copy keeps body, flags, born time and host, keys, tag and id. RETRY_TOPIC says where it was
first read, ORIGIN_MESSAGE_ID where it first lay; both survive all rounds (spec/delivery.md §4).
The answer leaves when the copy is safe: the consumer then counts the original as done.

A group that reads a %DLQ% topic is a group like any other: what it fails on goes to *its* retry
topic and *its* dead letters, and is counted from the beginning. RocketMQ counts on: there such a
failure is a dead letter again at once (spec/delivery.md §4, §17 of remoting.md).
"""

import logging
import re
import struct
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import orjson

from sluicemq import engine
from sluicemq.acl.guard import Access
from sluicemq.acl.verdict import SUB
from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.delivery import DeliveryStates
from sluicemq.broker.consume.locks import QueueLocks
from sluicemq.broker.group_commit import Durable, GroupCommit, Postponed, run_or_postpone
from sluicemq.broker.lanes.rules import LANE_PROPERTY, lane_id
from sluicemq.broker.produce.intake import (
    ILLEGAL,
    Draft,
    Intake,
    Origin,
    code_of,
    read_record,
    refuse_in_batch,
)
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import (
    FAQ,
    UNIT_SYS_FLAG,
    Groups,
    Topic,
    Topics,
    find_topic_name_fault,
)
from sluicemq.clock import Clock
from sluicemq.errors import MessageIllegalError, RequestError, StoreError, StoreFullError
from sluicemq.model.ids import UniqueIds, offset_message_id
from sluicemq.model.message import (
    DELAY,
    ORIGIN_MESSAGE_ID,
    PREPARED,
    RECONSUME_TIMES_MAX,
    RETRY_TOPIC,
    TIMER_PROPERTIES,
    TRAN_MSG,
    TRANSACTION_MASK,
    UNIQ_KEY,
    WAIT,
)
from sluicemq.model.properties import ACTED_ON_SEND, forget_origin
from sluicemq.model.system_names import HALF_TOPIC, is_broker_written_topic
from sluicemq.model.topic import DLQ_PREFIX, PERM_WRITE, RETRY_PREFIX, GroupConfig
from sluicemq.net.dispatch import Peer, encode_response_to
from sluicemq.net.work.background import WorkItem
from sluicemq.record import codec as text
from sluicemq.store.store import Store
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import (
    FLAG_ONEWAY,
    FRAME_BYTES_MAX,
    SERVER_LANGUAGE,
    VERSION,
    Command,
)
from sluicemq.wire.headers import BRIEF_FIELD, SendBackRequest, SendMessageRequest

log = logging.getLogger(__name__)

_pack_prefix: Final = struct.Struct(">II").pack
_REQUEST: Final = (0, FLAG_ONEWAY)
_needs_care: Final = re.compile(
    f"\x02(?:(?:{'|'.join(map(re.escape, sorted(ACTED_ON_SEND)))}|__SHARDINGKEY)\x01"
    "|WAIT\x01(?!true\x02))"
).search
"""Of properties, each behind the end of another: does a name stand there that is not plain?"""
_VALUE: Final = re.compile(rb"(?<!%)%[bd]")
"""A place in an answer."""
_NOT_PLAIN: Final = KeyError, TypeError, ValueError, AttributeError
"""What a header with missing or odd fields makes of the quick way."""
_NOT_TAKEN: Final = StoreError, OSError, OverflowError, struct.error
"""What the store's append raises when it is full, or a number does not fit the record. Anything
else is a bug, answered and logged as one; a second try on the usual way would hide it."""
_REFUSALS: Final = RequestError, MessageIllegalError, StoreError, OSError
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
LEVEL_FIRST: Final = 3
SAY_PERIOD_S: Final = 60.0
_CLIENT_SAYS_MAX_SINCE: Final = 121  # V3_4_9: maxReconsumeTimes of a request counts
_DELAYS: Final = (DELAY, *TIMER_PROPERTIES)


@dataclass(slots=True, eq=False)
class Retries:
    """The request family of consumers that failed: the rules, the two topics, and how much went
    there."""

    settings: Settings
    topics: Topics
    groups: Groups
    store: Store
    intake: Intake
    consumers: Consumers
    locks: QueueLocks
    clock: Clock
    delivered: DeliveryStates
    access: Access = field(default_factory=Access)
    next_queue: int = field(default=0, init=False)
    said_s: dict[str, float] = field(default_factory=dict, init=False)
    retried: dict[str, int] = field(default_factory=dict, init=False)
    """Messages that will come again, by group."""
    dead: dict[str, int] = field(default_factory=dict, init=False)
    """Dead letters, by group."""

    def send_back(self, header: SendBackRequest, command: Command, peer: Peer) -> Durable:
        """36."""
        topic_count = len(self.topics)
        found = self.consumers.lane_of(header.group, peer, command.fields)
        lane = lane_id(found.key) if found is not None else ""
        try:
            self._store_copy(header, command.version, lane)
        except (StoreError, OSError) as error:
            remark = f"the message was not sent back: {error}"
            raise RequestError(code_of(error), remark) from error
        answer = Command(ResponseCode.SUCCESS)
        frame = b"" if command.is_oneway else encode_response_to(answer, command)
        return Durable(frame, creates_topic=len(self.topics) > topic_count)

    def _store_copy(self, header: SendBackRequest, version: int, lane: str) -> None:
        """To the retry topic, or to the dead letters. Raises RequestError, StoreError."""
        config = self.config(header.group)
        broker = self.settings.broker
        if not broker.broker_permission & PERM_WRITE:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"the broker[{broker.broker_name}] sending message is forbidden",
            )
        if config.retry_queues <= 0:
            return  # a group that wants no retries; its message is done
        draft = self._copy(header.physical_offset, config.name)
        properties, times = draft.properties, draft.reconsume_times
        properties.pop(LANE_PROPERTY, None)
        if lane:  # it returns to the lane that it comes from
            properties[LANE_PROPERTY] = lane
        level = header.delay_level
        if level < 0 or times >= times_max(config, header.reconsume_times_max, version):
            topic = self.bury(config.name, properties)
        else:
            sys_flag = UNIT_SYS_FLAG if header.unit_mode else 0
            topic = self.topics.ensure(RETRY_PREFIX + config.name, config.retry_queues, sys_flag)
            properties[DELAY] = str(level or LEVEL_FIRST + times)
        if not topic.config.perm & PERM_WRITE:
            raise RequestError(
                ResponseCode.NO_PERMISSION, f"the topic[{topic.name}] sending message is forbidden"
            )
        self.next_queue += 1
        draft.topic = topic.name
        draft.queue_id = self.next_queue % max(topic.config.write_queues, 1)
        draft.reconsume_times = min(times + 1, RECONSUME_TIMES_MAX)
        self.intake.receive(draft)
        self.delivered[properties[RETRY_TOPIC], config.name].sent_back_count += 1
        name = properties.get(UNIQ_KEY) or properties[ORIGIN_MESSAGE_ID]
        self.stored(config.name, topic, name, times)

    def _copy(self, position: int, group: str) -> Draft:
        """Return a copy of the message that begins at `position` of the log, without a place to go
        to yet. Raises RequestError.

        Where the message was first read is taken from its properties only if it lies in a topic
        that members of the group alone write to; any producer can write the same names elsewhere.
        """
        data = self.store.reader.record_at(position)
        record = read_record(None if data is None else memoryview(data))
        if data is None or record is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {position}"
            )
        # Else whoever may read one group could read every message by its place in the log.
        self.access.require_record(data, SUB)
        topic, properties = record.topic, record.all_properties()
        forget_origin(properties, topic, group)
        origin = offset_message_id(record.store_host, record.physical_offset)
        properties.setdefault(ORIGIN_MESSAGE_ID, origin)
        draft = record.draft(topic, 0, properties)
        if topic.startswith(DLQ_PREFIX):  # it begins anew
            properties[RETRY_TOPIC] = topic
            draft.reconsume_times = 0
        properties.setdefault(RETRY_TOPIC, topic)
        properties[WAIT] = "false"
        properties.pop(TRAN_MSG, None)  # it is committed: no prepared message
        draft.store_host = self.settings.store_host
        return draft

    def config(self, group: str) -> GroupConfig:
        """The group's settings; made where that is allowed. Raises RequestError when there is no
        such group."""
        config = self.groups.get_or_create(group)
        if config is None:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group not exist, {group}. Create it, or set "
                "autoCreateSubscriptionGroup=true in broker.conf.",
            )
        return config

    def bury(self, group: str, properties: MutableMapping[str, str]) -> Topic:
        """A message becomes a dead letter, at once: its delays are taken off. Returns its topic,
        made when it is missing."""
        for name in _DELAYS:
            properties.pop(name, None)
        return self.topics.ensure(DLQ_PREFIX + group, 1)

    def stored(self, group: str, topic: Topic, message_id: str, times: int) -> None:
        """Counts a message that is stored: it will come again, or it is a dead letter."""
        if not topic.name.startswith(DLQ_PREFIX):
            self.retried[group] = self.retried.get(group, 0) + 1
            return
        count = self.dead[group] = self.dead.get(group, 0) + 1
        now_s = self.clock.monotonic_s()
        if now_s - self.said_s.get(group, -SAY_PERIOD_S) >= SAY_PERIOD_S:
            self.said_s[group] = now_s
            log.warning(
                "group %s gives up on message %s after %d retries: it goes to %s (%d dead letters "
                "since the start; this is said once a minute)",
                group, message_id, times, topic.name, count,
            )  # fmt: skip


def times_max(config: GroupConfig, said: int | None, version: int) -> int:
    """How often a message of a group comes again at most; `said` by the request's header."""
    if said is not None and version >= _CLIENT_SAYS_MAX_SINCE:
        return said
    return config.retry_times_max


class Send:
    """The request family of producers."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        retries: Retries,
        store: Store,
        intake: Intake,
        group_commit: GroupCommit,
        unique_ids: UniqueIds,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._by_name = topics.table
        self._retries = retries
        self._append = store.writer.append
        self._intake = intake
        self._hold = group_commit.send_after_commit
        self._unique_ids = unique_ids
        self._next_queue = 0
        self.failures = 0
        self.sizes = intake.sizes
        self.fifo: dict[str, int] = {}
        """Messages with a sharding key, by topic."""
        self.compiled = None
        """Takes plain sends past `send_quick` (`sluicemq.engine`)."""
        if engine.sends is not None and store.writer.can_append_columns:
            self.compiled = engine.sends.Sends(
                store.writer, topics.table, store.writer.by_key, self.sizes,
                store.writer.begin_group, group_commit.send_all_after_commit,
                store.writer.body_bytes_max,
            )  # fmt: skip
        settings.add_listener(self.prepare)
        self.prepare()

    def prepare(self) -> None:
        """What settings give to every message and answer."""
        self.store_host = self._settings.store_host
        self._id_prefix = self.store_host.hex().upper()
        config = self._settings.broker
        self._region = config.region
        self._properties_max = config.properties_length_max
        trace = self._trace = "true" if config.trace_on else "false"
        self._added = {
            "MSG_REGION": config.region,
            "TRACE_ON": trace,
            "CLUSTER": config.cluster_name,
        }
        self._suffix = text.as_text(self._added)
        escaped = orjson.dumps(config.region).decode().replace("%", "%%")
        begin = '{"code":0,"extFields":{"queueId":"%d",'
        end = (
            f'"TRACE_ON":"{trace}","MSG_REGION":{escaped},"queueOffset":"%d"}},'
            f'"flag":1,"language":"{SERVER_LANGUAGE}","opaque":%d,'
            f'"serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
        )
        # Bytes, not text: formatting them takes 60 % of the time.
        with_id = f'{begin}"transactionId":"%b","msgId":"{self._id_prefix}%016X",{end}'
        self._answer_with_id = with_id.encode()
        self._answer_any = f'{begin}%b"msgId":"%b",{end}'.encode()
        if self.compiled is not None:
            pieces = [it.replace(b"%%", b"%") for it in _VALUE.split(self._answer_any)]
            self.compiled.prepare(
                self._suffix.encode(), self.store_host, self._id_prefix.encode(), pieces,
                self._properties_max, FRAME_BYTES_MAX,
            )  # fmt: skip

    # ---------------------------------------------------------------------------- the hot path

    def send_quick(self, header: dict[str, Any], body: bytes, peer: Peer) -> bool:
        """310. HOT: one plain message; False for all else, which goes to `send`.

        Nothing has changed when it is False, whatever the reason.
        """
        try:
            fields = header["extFields"]
            topic = self._by_name[fields["b"]]
            properties = fields["i"]
            queue_id = int(fields["e"])
            if properties[-1:] != "\x02":
                properties += "\x02"
            names = "\x02" + properties  # each behind the end of another
            if (
                topic.is_special
                or not 0 <= queue_id < topic.queues
                or _needs_care(names)
                or fields.get("m", "false") != "false"
                or fields.get("j", "0") != "0"
            ):
                return False
            stored = (properties + self._suffix).encode("utf-8", "replace")
            start = names.rfind("\x02UNIQ_KEY\x01")
            unique_id = names[start + 10 : names.find("\x02", start + 10)].encode(
                "utf-8", "replace"
            )
            # Ids are letters and digits; anything else is not plain.
            if start < 0 or not unique_id.isalnum() or len(stored) > self._properties_max:
                return False
            tag = text.tag_code_in(properties) if "TAGS\x01" in properties else 0
            sys_flag = fields["f"]
            sys_flag = 0 if sys_flag == "0" else int(sys_flag)
            flag = fields["h"]
            flag = 0 if flag == "0" else int(flag)
            born_time_ms = int(fields["g"])
            opaque = header["opaque"]
            kind = header["flag"]
            is_number = 0 <= opaque <= 0x7FFFFFFF
            if kind not in _REQUEST or sys_flag & TRANSACTION_MASK or not is_number:
                return False
        except _NOT_PLAIN:
            return False
        try:
            physical_offset, queue_offset = self._append(
                topic.name, queue_id, body, stored, tag, flag,
                sys_flag, born_time_ms, peer.remote_bytes, self.store_host,
            )  # fmt: skip
        except _NOT_TAKEN:
            return False
        size = len(body)
        topic.messages_in += 1
        topic.bytes_in += size + len(stored) + topic.record_bytes
        self.sizes[(size - 1).bit_length()] += 1
        if kind == FLAG_ONEWAY:
            self._hold(peer, b"")
            return True
        answer = self._answer_with_id % (
            queue_id, unique_id, physical_offset, queue_offset, opaque
        )  # fmt: skip
        length = len(answer)
        self._hold(peer, _pack_prefix(length + 4, length) + answer)
        return True

    # ------------------------------------------------------------------------------ with care

    def send(
        self, header: SendMessageRequest, command: Command, peer: Peer
    ) -> Durable | Command | Postponed:
        """310 (letters), 10 (the names of the Go client)."""
        if header.batch:
            return self.send_batch(header, command, peer)
        try:
            topics_before = len(self._topics)
            topic = self._topic(header, peer)
            queue_id = self._queue_id(topic, header.queue_id, peer)
            properties = text.as_dict(header.properties or "")
            _check_kind(properties, header.sys_flag)
            group = None
            if header.topic.startswith(RETRY_PREFIX):
                # A consumer sends by itself when 36 fails: too many attempts, or a group that
                # consumes in order (it has tried at its own place), lead to the dead letters, at
                # once (spec/remoting.md §17).
                group = header.topic.removeprefix(RETRY_PREFIX)
                config = self._retries.config(group)
                most = times_max(config, header.reconsume_times_max, command.version)
                if (header.reconsume_times or 0) > most or self._retries.locks.is_locked(group):
                    topic, queue_id = self._retries.bury(group, properties), 0
            for name, value in self._added.items():
                properties.setdefault(name, value)
            if "UNIQ_KEY" not in properties:
                properties["UNIQ_KEY"] = self._unique_ids.make_id()
            draft = Draft(
                topic.name, queue_id, command.body, properties, header.born_time_ms,
                peer.remote_bytes, self.store_host, header.flag, header.sys_flag,
                header.reconsume_times or 0,
            )  # fmt: skip
            stored = self._intake.receive(draft)
            if group is not None:
                self._retries.stored(group, topic, properties["UNIQ_KEY"], draft.reconsume_times)
            # A prepared message enters its own topic when it is committed.
            counted = self._by_name.get(HALF_TOPIC, topic) if draft.topic == HALF_TOPIC else topic
            body_bytes = len(command.body)
            counted.messages_in += 1
            counted.bytes_in += body_bytes + stored.properties_bytes + counted.record_bytes
            self.sizes[(body_bytes - 1).bit_length()] += 1
            if "__SHARDINGKEY" in properties:
                self.fifo[counted.name] = self.fifo.get(counted.name, 0) + 1
            message_id = f"{self._id_prefix}{stored.physical_offset:016X}"
            return self._success(
                command, queue_id, stored.queue_offset, message_id,
                properties["UNIQ_KEY"], _waits(properties), topic,
                len(self._topics) == topics_before, draft.answer_fields,
            )  # fmt: skip
        except _REFUSALS as error:
            return self._refused(error)

    def send_batch(
        self, header: SendMessageRequest, command: Command, peer: Peer
    ) -> Durable | Command | Postponed:
        """320: always letters, whatever the flag `m` says. Each message becomes a record of its
        own. The batch's own properties (WAIT, an id) are not mixed into them: the 5.3.3 broker
        appends them, and every message of the batch then shows the batch's id."""
        return run_or_postpone(self._batch_in_steps(header, command, peer))

    def _batch_in_steps(
        self, header: SendMessageRequest, command: Command, peer: Peer
    ) -> WorkItem[Durable | Command]:
        try:
            if header.topic.startswith(RETRY_PREFIX):
                what = "batch request does not support retry group"
                return self._refused(RequestError(ResponseCode.MESSAGE_ILLEGAL, what))
            known = header.topic in self._topics
            topic = self._topic(header, peer)
            queue_id = self._queue_id(topic, header.queue_id, peer)
            own = text.as_dict(header.properties or "")
            refuse_in_batch(own)
            _check_kind(own, header.sys_flag)
            origin = Origin(
                header.sys_flag, header.born_time_ms, peer.remote_bytes, self.store_host
            )
            batch = yield from self._intake.prepare_batch(command.body, origin, self._suffix)
            # Other requests were served between the steps: the topic may be gone.
            if self._topics.get(topic.name) is not topic:
                topic = self._topic(header, peer)
                queue_id = self._queue_id(topic, header.queue_id, peer)
            ids, queue_offset = self._intake.append_batch(
                topic, queue_id, batch, origin, self._id_prefix,
                is_brief=BRIEF_FIELD in (command.fields or {}),
            )  # fmt: skip
            return self._success(
                command, queue_id, queue_offset, ids, own.get("UNIQ_KEY", ""),
                _waits(own), topic, known,
            )  # fmt: skip
        except _REFUSALS as error:
            return self._refused(error)

    def _refused(self, error: Exception) -> Command:
        """Failed sends carry region and trace switch too (spec/traffic item 11)."""
        if isinstance(error, RequestError):
            remark = error.remark
        elif isinstance(error, MessageIllegalError):
            remark = f"{ILLEGAL.format(self._settings.store.message_bytes_max)} {error}"
        else:
            is_full = isinstance(error, StoreFullError)
            remark = str(error) if is_full else f"{type(error).__name__}: {error}"
        self.failures += 1
        fields = {"TRACE_ON": self._trace, "MSG_REGION": self._region}
        return Command(code_of(error), fields, remark=remark)

    # ------------------------------------------------------------------------------- where to

    def _topic(self, header: SendMessageRequest, peer: Peer) -> Topic:
        """The topic of a send, created where that is allowed. Raises RequestError."""
        name = header.topic
        if is_broker_written_topic(name):
            raise RequestError(
                ResponseCode.NO_PERMISSION, f"Sending message to topic[{name}] is forbidden."
            )
        topic = self._topics.get(name)
        if topic is None:
            fault = find_topic_name_fault(name, self._settings.broker.topic_length_max)
            if fault is not None:
                raise RequestError(ResponseCode.INVALID_PARAMETER, fault)
        if topic is None:
            topic = self._topics.create_for_send(
                name, header.default_topic, header.default_topic_queues
            )
        if topic is None:
            raise RequestError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic[{name}] not exist, apply first please!\n{FAQ}",
            )
        # The routes already keep producers away; only strict order has to be refused here
        # (spec/remoting.md §16).
        if topic.config.order and not self._settings.broker.broker_permission & PERM_WRITE:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"the broker[{self._settings.broker.broker_name}] sending message is forbidden",
            )
        return topic

    def _queue_id(self, topic: Topic, queue_id: int, peer: Peer) -> int:
        """A negative id leaves the choice to the broker. Raises RequestError."""
        if queue_id < 0 and topic.config.write_queues > 0:
            self._next_queue += 1
            return self._next_queue % topic.config.write_queues
        if not 0 <= queue_id < topic.queues:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"request queueId[{queue_id}] is illegal, {topic} Producer: {peer.remote}",
            )
        return queue_id

    # -------------------------------------------------------------------------------- answers

    def _success(
        self,
        command: Command,
        queue_id: int,
        queue_offset: int,
        message_id: str,
        unique_id: str,
        waits: bool,
        topic: Topic,
        known: bool,
        added: Mapping[str, str] = _NOTHING,
    ) -> Durable:
        if command.is_oneway:
            return Durable(b"", waits)
        identity = b""
        if unique_id:
            identity = b'"transactionId":%b,' % orjson.dumps(
                unique_id.encode("utf-8", "replace").decode()
            )
        if added:
            identity += orjson.dumps(added)[1:-1] + b","
        header = self._answer_any % (
            queue_id, identity, message_id.encode(), queue_offset, command.opaque
        )  # fmt: skip
        answer = _pack_prefix(len(header) + 4, len(header)) + header
        return Durable(answer, waits, creates_topic=not known and topic.name in self._topics)


def _waits(properties: dict[str, str]) -> bool:
    """Does the producer want to wait for the fsync? As Java reads it: not unless it says true."""
    return properties.get("WAIT", "true").lower() == "true"


def _check_kind(properties: dict[str, str], sys_flag: int) -> None:
    """Raises RequestError when flags and properties disagree whether it is a prepared message: it
    would be hidden for ever, or shown at once."""
    kind = sys_flag & TRANSACTION_MASK
    is_prepared = properties.get(TRAN_MSG, "").lower() == "true"
    if kind not in (0, PREPARED) or (kind and not is_prepared):
        raise RequestError(
            ResponseCode.MESSAGE_ILLEGAL,
            f"the sysFlag {sys_flag:#x} says another kind of message than the property TRAN_MSG="
            f"{properties.get(TRAN_MSG)}. The message was not stored.",
        )
