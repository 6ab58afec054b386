"""Handlers for requests that store messages.

`SendHandlers` answers SEND_MESSAGE (10), SEND_MESSAGE_V2 (310) and SEND_BATCH_MESSAGE (320).
`SendBackHandlers` answers CONSUMER_SEND_MSG_BACK (36).

`SendHandlers.send_fast_path` handles plain sends: it reads the single-letter fields of the decoded
JSON header, looks up the topic, appends the message and formats the answer. For every other send
(unknown topic, retry topic, batch, special property, invalid field) it returns False, and the
general path `SendHandlers.send` handles the request. Both paths have the same results;
tests/unit/broker/test_send.py compares them.

A batch that contains a prepared or delayed message is rejected, because it would be stored as an
ordinary message.

A consumer that fails to process a message sends it back. `SendBackHandlers` stores a copy in one of
two topics:

    %RETRY%group     with retryQueueNums queues, after the message has waited for a delay level
    %DLQ%group       with one queue, for dead letters; a group may subscribe to it like to any topic

CONSUMER_SEND_MSG_BACK names the position of the message in the commit log, the group and a delay
level:

    delayLevel  0   delay level 3 + retries so far: 10 s, 30 s, 1 min … 2 h, sixteen in all
               >0   that delay level
               <0   dead letter
    retries so far >= maxReconsumeTimes (of the request, else of the group): dead letter

The copy keeps body, flags, born time and host, keys, tag and message id; its count of retries is
one higher. The property RETRY_TOPIC names the topic of the original message and ORIGIN_MESSAGE_ID
its offset message id. Both stay the same through all retries (spec/delivery.md §4). The answer is
sent once the copy is stored as safely as any sent message, because the consumer then acknowledges
the original.

A group that consumes a %DLQ% topic is treated like any other group: a message that it fails on
goes to that group's retry topic, and the count of retries starts at 0. RocketMQ continues to count,
so such a message would become a dead letter again at once (spec/delivery.md §4, spec/remoting.md
§17).
"""

import logging
import re
import struct
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Final

import orjson

from sluicemq import engine
from sluicemq.acl.guard import Access
from sluicemq.acl.verdict import SUB
from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.delivery import DeliveryStates
from sluicemq.broker.consume.locks import QueueLocks
from sluicemq.broker.context import BrokerComponent, BrokerContext
from sluicemq.broker.group_commit import Durable, Postponed, run_or_postpone
from sluicemq.broker.lanes.rules import LANE_PROPERTY, compute_lane_id
from sluicemq.broker.produce.intake import (
    ILLEGAL_MESSAGE_REMARK,
    BatchFields,
    MessageIntake,
    MessageToStore,
    check_batch_properties,
    choose_response_code,
    read_record,
)
from sluicemq.broker.topics import (
    FAQ,
    UNIT_SYS_FLAG,
    Topic,
    find_topic_name_fault,
)
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

_pack_frame_prefix: Final = struct.Struct(">II").pack
_REQUEST_FLAGS: Final = (0, FLAG_ONEWAY)
_OPAQUE_MAX: Final = 0x7FFFFFFF
"""The largest number of a request that the fast path handles."""
_find_special_property: Final = re.compile(
    f"\x02(?:(?:{'|'.join(map(re.escape, sorted(ACTED_ON_SEND)))}|__SHARDINGKEY)\x01"
    "|WAIT\x01(?!true\x02))"
).search
"""Searches encoded properties, each after a separator, for one that the fast path cannot handle."""
_PLACEHOLDER: Final = re.compile(rb"(?<!%)%[bd]")
"""A placeholder in an answer template."""
_INVALID_HEADER_ERRORS: Final = KeyError, TypeError, ValueError, AttributeError
"""What the fast path raises for a header with missing or invalid fields."""
_APPEND_ERRORS: Final = StoreError, OSError, OverflowError, struct.error
"""What the store raises if it is full, or if a number does not fit its field of the record.

Any other error of the fast path is a bug. It is reported as one, because the general path would
hide it.
"""
_SEND_ERRORS: Final = RequestError, MessageIllegalError, StoreError, OSError
_NO_FIELDS: Final[Mapping[str, str]] = MappingProxyType({})
FIRST_RETRY_LEVEL: Final = 3
"""The delay level of the first retry, if the consumer names none."""
DEAD_LETTER_LOG_PERIOD_S: Final = 60.0
"""Dead letters of a group are logged at most once in this time."""
_MAX_RETRIES_SINCE_VERSION: Final = 121
"""Clients of older versions (before V3_4_9) send a maxReconsumeTimes that does not count."""
_DELAY_PROPERTIES: Final = (DELAY, *TIMER_PROPERTIES)


class SendBackHandlers(BrokerComponent):
    """Request handler for messages that consumers failed to process, and the rules of retries.

    It answers CONSUMER_SEND_MSG_BACK (36). `SendHandlers` uses the rules for consumers that send a
    message to their retry topic themselves.
    """

    def __init__(
        self,
        context: BrokerContext,
        *,
        intake: MessageIntake,
        consumers: Consumers,
        locks: QueueLocks,
        delivered: DeliveryStates,
        access: Access,
    ) -> None:
        """Create the handler without changing anything.

        `intake` stores the copies. `consumers` knows the lane of a client, `locks` the groups that
        consume in order. `delivered` counts the messages that were sent back. `access` says which
        messages the client of a request may read.
        """
        super().__init__(context)
        self.intake = intake
        self.consumers = consumers
        self.locks = locks
        self.delivered = delivered
        self.access = access
        self.next_queue = 0
        """The counter by which copies are distributed over the queues of their topic."""
        self.logged_s: dict[str, float] = {}
        """The monotonic time at which a dead letter was last logged, by group."""
        self.retry_counts: dict[str, int] = {}
        """The number of messages stored for a retry since the broker started, by group."""
        self.dead_letter_counts: dict[str, int] = {}
        """The number of dead letters stored since the broker started, by group."""

    def send_back(self, header: SendBackRequest, command: Command, peer: Peer) -> Durable:
        """Answer CONSUMER_SEND_MSG_BACK (36): store a copy of a message for a retry.

        The copy becomes a dead letter instead if the request asks for it or no retry is left.
        Nothing is stored for a group whose number of retry queues is 0 or less; the answer is
        SUCCESS then, too. The answer is sent when the copy is durable.

        Raises RequestError, also for errors of the store.
        """
        topic_count = len(self.topics)
        lane = self.consumers.lane_of(header.group, peer, command.fields)
        lane_name = compute_lane_id(lane.key) if lane is not None else ""
        try:
            self._store_copy(header, command.version, lane_name)
        except (StoreError, OSError) as error:
            remark = f"the message was not sent back: {error}"
            raise RequestError(choose_response_code(error), remark) from error
        answer = Command(ResponseCode.SUCCESS)
        frame = b"" if command.is_oneway else encode_response_to(answer, command)
        return Durable(frame, creates_topic=len(self.topics) > topic_count)

    def _store_copy(self, header: SendBackRequest, version: int, lane: str) -> None:
        """Append a copy of a message to the retry topic or the dead-letter topic of a group.

        `version` is the version of the client. `lane` is the id of its lane, or "" if it has none;
        the copy is then delivered to any member of the group. The retry or dead letter is counted.
        Do nothing if the group has no retry queues.

        Raises RequestError if the group or message does not exist, or if the broker or topic does
        not accept messages, and StoreError.
        """
        config = self.require_group(header.group)
        broker = self.settings.broker
        if not broker.broker_permission & PERM_WRITE:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"the broker[{broker.broker_name}] sending message is forbidden",
            )
        if config.retry_queues <= 0:
            return  # The group wants no retries: the message counts as processed.
        message = self._copy_message(header.physical_offset, config.name)
        properties = message.properties
        retries = message.reconsume_times
        properties.pop(LANE_PROPERTY, None)
        if lane:  # Only members of the same lane must receive the message again.
            properties[LANE_PROPERTY] = lane
        level = header.delay_level
        if level < 0 or retries >= max_retries(config, header.reconsume_times_max, version):
            topic = self.make_dead_letter(config.name, properties)
        else:
            sys_flag = UNIT_SYS_FLAG if header.unit_mode else 0
            topic = self.topics.ensure(RETRY_PREFIX + config.name, config.retry_queues, sys_flag)
            properties[DELAY] = str(level or FIRST_RETRY_LEVEL + retries)
        if not topic.config.perm & PERM_WRITE:
            raise RequestError(
                ResponseCode.NO_PERMISSION, f"the topic[{topic.name}] sending message is forbidden"
            )
        self.next_queue += 1
        message.topic = topic.name
        message.queue_id = self.next_queue % max(topic.config.write_queues, 1)
        message.reconsume_times = min(retries + 1, RECONSUME_TIMES_MAX)
        self.intake.append_from_client(message)
        self.delivered[properties[RETRY_TOPIC], config.name].sent_back_count += 1
        message_id = properties.get(UNIQ_KEY) or properties[ORIGIN_MESSAGE_ID]
        self.count_stored(config.name, topic, message_id, retries)

    def _copy_message(self, position: int, group: str) -> MessageToStore:
        """Return a copy of the message at `position` of the commit log.

        The caller must set the topic, queue and number of retries of the copy. The topic of the
        original message is taken from the properties only if the record is in a topic to which
        only members of the group write, because any producer can write the same properties to
        other topics.

        Raises RequestError if there is no such message or the client may not read it.
        """
        data = self.store.reader.record_at(position)
        record = read_record(None if data is None else memoryview(data))
        if data is None or record is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {position}"
            )
        # Otherwise a client that may read one group could read every message by its position.
        self.access.require_record(data, SUB)
        topic = record.topic
        properties = record.decode_properties()
        forget_origin(properties, topic, group)
        origin = offset_message_id(record.store_host, record.physical_offset)
        properties.setdefault(ORIGIN_MESSAGE_ID, origin)
        message = record.copy_to(topic, 0, properties)
        if topic.startswith(DLQ_PREFIX):  # The retries of this group start at 0.
            properties[RETRY_TOPIC] = topic
            message.reconsume_times = 0
        properties.setdefault(RETRY_TOPIC, topic)
        properties[WAIT] = "false"
        properties.pop(TRAN_MSG, None)  # The message is committed, so the copy is not prepared.
        message.store_host = self.settings.store_host
        return message

    def require_group(self, group: str) -> GroupConfig:
        """Return the configuration of a group; create the group if that is allowed.

        Raises RequestError if the group does not exist.
        """
        config = self.groups.get_or_create(group)
        if config is None:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group not exist, {group}. Create it, or set "
                "autoCreateSubscriptionGroup=true in broker.conf.",
            )
        return config

    def make_dead_letter(self, group: str, properties: MutableMapping[str, str]) -> Topic:
        """Remove the delay from the properties of a message that becomes a dead letter.

        Return the dead-letter topic of the group; create the topic if it does not exist.
        """
        for name in _DELAY_PROPERTIES:
            properties.pop(name, None)
        return self.topics.ensure(DLQ_PREFIX + group, 1)

    def count_stored(self, group: str, topic: Topic, message_id: str, retries: int) -> None:
        """Count a message that was stored for a retry or as a dead letter of `group`.

        `topic` is the retry or dead-letter topic to which the message goes. A dead letter is
        logged, at most once in `DEAD_LETTER_LOG_PERIOD_S` for each group.
        """
        if not topic.name.startswith(DLQ_PREFIX):
            self.retry_counts[group] = self.retry_counts.get(group, 0) + 1
            return
        count = self.dead_letter_counts[group] = self.dead_letter_counts.get(group, 0) + 1
        now_s = self.clock.monotonic_s()
        last_s = self.logged_s.get(group, -DEAD_LETTER_LOG_PERIOD_S)
        if now_s - last_s >= DEAD_LETTER_LOG_PERIOD_S:
            self.logged_s[group] = now_s
            log.warning(
                "group %s: message %s moved to %s after %d retries (%d dead letters since the "
                "start; logged at most once a minute)",
                group,
                message_id,
                topic.name,
                retries,
                count,
            )


def max_retries(config: GroupConfig, requested: int | None, version: int) -> int:
    """Return how often a message of a group is retried before it becomes a dead letter.

    `requested` is the maxReconsumeTimes of the request. It counts, unless it is None, for clients
    whose `version` is V3_4_9 or newer. Otherwise the configuration of the group counts.
    """
    if requested is not None and version >= _MAX_RETRIES_SINCE_VERSION:
        return requested
    return config.retry_times_max


class SendHandlers:
    """Request handlers for messages of producers.

    They answer SEND_MESSAGE (10), SEND_MESSAGE_V2 (310) and SEND_BATCH_MESSAGE (320).
    """

    def __init__(
        self,
        context: BrokerContext,
        *,
        retries: SendBackHandlers,
        intake: MessageIntake,
        unique_ids: UniqueIds,
    ) -> None:
        """Create the handlers, and the compiled fast path if it is available.

        Plain messages are appended directly to the store, all others by `intake`. `retries` has the
        rules for messages to retry topics. `unique_ids` makes ids for messages without one.
        """
        settings = context.settings
        topics = context.topics
        store = context.store
        group_commit = context.group_commit
        self._settings = settings
        self._topics = topics
        self._by_name = topics.table
        self._retries = retries
        self._append = store.writer.append
        self._intake = intake
        self._send_after_commit = group_commit.send_after_commit
        self._unique_ids = unique_ids
        self._next_queue = 0
        self.failure_count = 0
        """The number of sends that were answered with an error."""
        self.body_size_counts = intake.body_size_counts
        self.fifo_counts: dict[str, int] = {}
        """The number of messages with a sharding key, by topic."""
        self.compiled = None
        """The compiled fast path (`sluicemq.engine`), or None if it is not available."""
        if engine.sends is not None and store.writer.can_append_columns:
            self.compiled = engine.sends.Sends(
                store.writer,
                topics.table,
                store.writer.by_key,
                self.body_size_counts,
                store.writer.begin_group,
                group_commit.send_all_after_commit,
                store.writer.body_bytes_max,
            )
        settings.add_listener(self.apply_settings)
        self.apply_settings()

    def apply_settings(self) -> None:
        """Prepare the properties and answer templates that depend on settings.

        Called at the start and after each change of a setting.
        """
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
        self._suffix = text.format_property_text(self._added)
        escaped_region = orjson.dumps(config.region).decode().replace("%", "%%")
        begin = '{"code":0,"extFields":{"queueId":"%d",'
        end = (
            f'"TRACE_ON":"{trace}","MSG_REGION":{escaped_region},"queueOffset":"%d"}},'
            f'"flag":1,"language":"{SERVER_LANGUAGE}","opaque":%d,'
            f'"serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
        )
        # Templates are bytes: formatting them takes 60 % of the time of formatting text.
        with_id = f'{begin}"transactionId":"%b","msgId":"{self._id_prefix}%016X",{end}'
        self._fast_answer_template = with_id.encode()
        self._answer_template = f'{begin}%b"msgId":"%b",{end}'.encode()
        if self.compiled is not None:
            pieces = [
                piece.replace(b"%%", b"%") for piece in _PLACEHOLDER.split(self._answer_template)
            ]
            self.compiled.prepare(
                self._suffix.encode(),
                self.store_host,
                self._id_prefix.encode(),
                pieces,
                self._properties_max,
                FRAME_BYTES_MAX,
            )

    # -------------------------------------------------------------------------- the fast path

    def send_fast_path(self, header: dict[str, Any], body: bytes, peer: Peer) -> bool:
        """Handle a SEND_MESSAGE_V2 (310) of one plain message.

        `header` is the decoded JSON header. Return True if the message was appended and counted;
        the answer is sent to `peer` after the group commit. Return False, with nothing changed, for
        every request that `send` has to handle, also if the store refuses the message. Called for
        each send: keep it cheap.
        """
        try:
            fields = header["extFields"]
            topic = self._by_name[fields["b"]]
            properties = fields["i"]
            queue_id = int(fields["e"])
            if properties[-1:] != "\x02":
                properties += "\x02"
            separated = "\x02" + properties  # Each property follows a separator.
            # m: whether the message is a batch; j: how often it was retried.
            if (
                topic.is_special
                or not 0 <= queue_id < topic.queues
                or _find_special_property(separated)
                or fields.get("m", "false") != "false"
                or fields.get("j", "0") != "0"
            ):
                return False
            stored = (properties + self._suffix).encode("utf-8", "replace")
            start = separated.rfind("\x02UNIQ_KEY\x01")
            unique_id = separated[start + 10 : separated.find("\x02", start + 10)].encode(
                "utf-8", "replace"
            )
            # Ids are letters and digits; an id with other characters might need escapes in JSON.
            if start < 0 or not unique_id.isalnum() or len(stored) > self._properties_max:
                return False
            tag = text.tag_code_of_text(properties) if "TAGS\x01" in properties else 0
            sys_flag = fields["f"]
            sys_flag = 0 if sys_flag == "0" else int(sys_flag)
            flag = fields["h"]
            flag = 0 if flag == "0" else int(flag)
            born_time_ms = int(fields["g"])
            opaque = header["opaque"]
            kind = header["flag"]
            is_number = 0 <= opaque <= _OPAQUE_MAX
            if kind not in _REQUEST_FLAGS or sys_flag & TRANSACTION_MASK or not is_number:
                return False
        except _INVALID_HEADER_ERRORS:
            return False
        try:
            # Positional, because this runs for each send.
            physical_offset, queue_offset = self._append(
                topic.name,
                queue_id,
                body,
                stored,
                tag,
                flag,
                sys_flag,
                born_time_ms,
                peer.remote_bytes,
                self.store_host,
            )
        except _APPEND_ERRORS:
            return False
        size = len(body)
        topic.messages_in += 1
        topic.bytes_in += size + len(stored) + topic.record_bytes
        self.body_size_counts[(size - 1).bit_length()] += 1
        if kind == FLAG_ONEWAY:
            self._send_after_commit(peer, b"")
            return True
        answer = self._fast_answer_template % (
            queue_id,
            unique_id,
            physical_offset,
            queue_offset,
            opaque,
        )
        length = len(answer)
        self._send_after_commit(peer, _pack_frame_prefix(length + 4, length) + answer)
        return True

    # ----------------------------------------------------------------------- the general path

    def send(
        self, header: SendMessageRequest, command: Command, peer: Peer
    ) -> Durable | Command | Postponed:
        """Answer SEND_MESSAGE (10) and SEND_MESSAGE_V2 (310): store a message or a batch.

        The two requests differ only in the names of their header fields. The topic is created if
        that is allowed. A message to a retry topic may become a dead letter instead. The message
        and the topic are counted.

        Return the answer as Durable, or a Command with an error code if the message cannot be
        stored. A batch is handled by `send_batch`.
        """
        if header.batch:
            return self.send_batch(header, command, peer)
        try:
            topics_before = len(self._topics)
            topic = self._find_or_create_topic(header, peer)
            queue_id = self._choose_queue(topic, header.queue_id, peer)
            properties = text.parse_property_text(header.properties or "")
            _check_transaction_flags(properties, header.sys_flag)
            retry_group = None
            if header.topic.startswith(RETRY_PREFIX):
                # A consumer sends to the retry topic itself if CONSUMER_SEND_MSG_BACK fails. The
                # message becomes a dead letter if no retry is left, and if the group consumes in
                # order, because its consumers retry locally (spec/remoting.md §17).
                retry_group = header.topic.removeprefix(RETRY_PREFIX)
                config = self._retries.require_group(retry_group)
                limit = max_retries(config, header.reconsume_times_max, command.version)
                is_ordered = self._retries.locks.is_locked(retry_group)
                if (header.reconsume_times or 0) > limit or is_ordered:
                    topic = self._retries.make_dead_letter(retry_group, properties)
                    queue_id = 0
            for name, value in self._added.items():
                properties.setdefault(name, value)
            if "UNIQ_KEY" not in properties:
                properties["UNIQ_KEY"] = self._unique_ids.make_id()
            message = MessageToStore(
                topic=topic.name,
                queue_id=queue_id,
                body=command.body,
                properties=properties,
                born_time_ms=header.born_time_ms,
                born_host=peer.remote_bytes,
                store_host=self.store_host,
                flag=header.flag,
                sys_flag=header.sys_flag,
                reconsume_times=header.reconsume_times or 0,
            )
            result = self._intake.append_from_client(message)
            if retry_group is not None:
                self._retries.count_stored(
                    retry_group, topic, properties["UNIQ_KEY"], message.reconsume_times
                )
            # A prepared message counts for its own topic only when it is committed.
            is_prepared = message.topic == HALF_TOPIC
            counted_topic = self._by_name.get(HALF_TOPIC, topic) if is_prepared else topic
            body_bytes = len(command.body)
            counted_topic.messages_in += 1
            counted_topic.bytes_in += (
                body_bytes + result.properties_bytes + counted_topic.record_bytes
            )
            self.body_size_counts[(body_bytes - 1).bit_length()] += 1
            if "__SHARDINGKEY" in properties:
                name = counted_topic.name
                self.fifo_counts[name] = self.fifo_counts.get(name, 0) + 1
            return self._encode_success(
                command=command,
                queue_id=queue_id,
                queue_offset=result.queue_offset,
                message_ids=f"{self._id_prefix}{result.physical_offset:016X}",
                unique_id=properties["UNIQ_KEY"],
                waits_for_sync=_waits_for_sync(properties),
                topic=topic,
                is_known_topic=len(self._topics) == topics_before,
                added_fields=message.answer_fields,
            )
        except _SEND_ERRORS as error:
            return self._make_refusal(error)

    def send_batch(
        self, header: SendMessageRequest, command: Command, peer: Peer
    ) -> Durable | Command | Postponed:
        """Answer SEND_BATCH_MESSAGE (320): store each message of a batch as a record.

        The properties of the request (WAIT, an id) are not added to the messages. RocketMQ 5.3.3
        adds them, so that every message of a batch has the id of the batch.

        Return the answer as Durable, or a Command with an error code if no message was stored. For
        a large batch, return Postponed.
        """
        return run_or_postpone(self._send_batch_in_steps(header, command, peer))

    def _send_batch_in_steps(
        self, header: SendMessageRequest, command: Command, peer: Peer
    ) -> WorkItem[Durable | Command]:
        """Store a batch and return its answer, as `send_batch` describes it.

        Yield None between the steps of its decoding, so that other requests can be handled.
        """
        try:
            if header.topic.startswith(RETRY_PREFIX):
                remark = "batch request does not support retry group"
                return self._make_refusal(RequestError(ResponseCode.MESSAGE_ILLEGAL, remark))
            is_known_topic = header.topic in self._topics
            topic = self._find_or_create_topic(header, peer)
            queue_id = self._choose_queue(topic, header.queue_id, peer)
            batch_properties = text.parse_property_text(header.properties or "")
            check_batch_properties(batch_properties)
            _check_transaction_flags(batch_properties, header.sys_flag)
            fields = BatchFields(
                header.sys_flag, header.born_time_ms, peer.remote_bytes, self.store_host
            )
            batch = yield from self._intake.prepare_batch(command.body, fields, self._suffix)
            # The broker served other requests between the steps: the topic may be deleted.
            if self._topics.get(topic.name) is not topic:
                topic = self._find_or_create_topic(header, peer)
                queue_id = self._choose_queue(topic, header.queue_id, peer)
            message_ids, queue_offset = self._intake.append_batch(
                topic,
                queue_id,
                batch,
                fields,
                self._id_prefix,
                is_brief=BRIEF_FIELD in (command.fields or {}),
            )
            return self._encode_success(
                command=command,
                queue_id=queue_id,
                queue_offset=queue_offset,
                message_ids=message_ids,
                unique_id=batch_properties.get("UNIQ_KEY", ""),
                waits_for_sync=_waits_for_sync(batch_properties),
                topic=topic,
                is_known_topic=is_known_topic,
            )
        except _SEND_ERRORS as error:
            return self._make_refusal(error)

    def _make_refusal(self, error: Exception) -> Command:
        """Count a failed send and return its answer, with the code and remark of `error`.

        Like RocketMQ's, the answer contains the region and the trace switch (spec/traffic item 11).
        """
        if isinstance(error, RequestError):
            remark = error.remark
        elif isinstance(error, MessageIllegalError):
            body_limit = self._settings.store.message_bytes_max
            remark = f"{ILLEGAL_MESSAGE_REMARK.format(body_limit)} {error}"
        else:
            is_full = isinstance(error, StoreFullError)
            remark = str(error) if is_full else f"{type(error).__name__}: {error}"
        self.failure_count += 1
        fields = {"TRACE_ON": self._trace, "MSG_REGION": self._region}
        return Command(choose_response_code(error), fields, remark=remark)

    # -------------------------------------------------------------------- topics and queues

    def _find_or_create_topic(self, header: SendMessageRequest, peer: Peer) -> Topic:
        """Return the topic of a send; create it if that is allowed.

        Raises RequestError if the topic does not exist and cannot be created, if only the broker
        writes to it, or if it is in strict order and the broker accepts no messages.
        """
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
        # Routes already direct producers to other brokers. Only a topic in strict order has to be
        # refused here (spec/remoting.md §16).
        if topic.config.order and not self._settings.broker.broker_permission & PERM_WRITE:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"the broker[{self._settings.broker.broker_name}] sending message is forbidden",
            )
        return topic

    def _choose_queue(self, topic: Topic, queue_id: int, peer: Peer) -> int:
        """Return `queue_id`, or the id of the next write queue in turn if `queue_id` is negative.

        Raises RequestError if the topic has no such queue.
        """
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

    def _encode_success(
        self,
        *,
        command: Command,
        queue_id: int,
        queue_offset: int,
        message_ids: str,
        unique_id: str,
        waits_for_sync: bool,
        topic: Topic,
        is_known_topic: bool,
        added_fields: Mapping[str, str] = _NO_FIELDS,
    ) -> Durable:
        """Return the answer to a send that was stored.

        `message_ids` are the offset message ids, `unique_id` is the id that the producer chose, or
        "". `is_known_topic` says whether the topic existed before the send. `added_fields` are
        further fields of the answer.
        """
        if command.is_oneway:
            return Durable(b"", waits_for_sync)
        identity = b""
        if unique_id:
            identity = b'"transactionId":%b,' % orjson.dumps(
                unique_id.encode("utf-8", "replace").decode()
            )
        if added_fields:
            identity += orjson.dumps(added_fields)[1:-1] + b","
        header = self._answer_template % (
            queue_id,
            identity,
            message_ids.encode(),
            queue_offset,
            command.opaque,
        )
        answer = _pack_frame_prefix(len(header) + 4, len(header)) + header
        creates_topic = not is_known_topic and topic.name in self._topics
        return Durable(answer, waits_for_sync, creates_topic=creates_topic)


def _waits_for_sync(properties: dict[str, str]) -> bool:
    """Return whether the producer wants the answer only after the fsync.

    As in Java's Boolean parsing, every value of WAIT except "true" means no. Without WAIT, the
    producer waits.
    """
    return properties.get("WAIT", "true").lower() == "true"


def _check_transaction_flags(properties: dict[str, str], sys_flag: int) -> None:
    """Raise RequestError if `sys_flag` and the property TRAN_MSG contradict each other.

    Such a message would be stored as prepared without a transaction, and stay invisible forever, or
    be visible at once although its transaction is open.
    """
    kind = sys_flag & TRANSACTION_MASK
    is_prepared = properties.get(TRAN_MSG, "").lower() == "true"
    if kind not in (0, PREPARED) or (kind and not is_prepared):
        raise RequestError(
            ResponseCode.MESSAGE_ILLEGAL,
            f"the sysFlag {sys_flag:#x} contradicts the property TRAN_MSG="
            f"{properties.get(TRAN_MSG)}. The message was not stored.",
        )
