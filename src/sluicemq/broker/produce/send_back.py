"""Handler for messages that consumers failed to process, and the rules of retries.

`SendBackHandlers` answers CONSUMER_SEND_MSG_BACK (36).

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
from collections.abc import MutableMapping
from typing import Final

from sluicemq.acl.guard import Access
from sluicemq.acl.verdict import SUB
from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.delivery import DeliveryStates
from sluicemq.broker.consume.locks import QueueLocks
from sluicemq.broker.context import BrokerComponent, BrokerContext
from sluicemq.broker.group_commit import Durable
from sluicemq.broker.lanes.rules import LANE_PROPERTY, compute_lane_id
from sluicemq.broker.produce.intake import (
    MessageIntake,
    MessageToStore,
    Record,
    choose_response_code,
    read_record,
)
from sluicemq.broker.topics import (
    UNIT_SYS_FLAG,
    Topic,
)
from sluicemq.errors import RequestError, StoreError
from sluicemq.model.ids import offset_message_id
from sluicemq.model.message import (
    DELAY,
    ORIGIN_MESSAGE_ID,
    RECONSUME_TIMES_MAX,
    RETRY_TOPIC,
    TIMER_PROPERTIES,
    TRAN_MSG,
    UNIQ_KEY,
    WAIT,
)
from sluicemq.model.properties import forget_origin
from sluicemq.model.topic import DLQ_PREFIX, PERM_WRITE, RETRY_PREFIX, GroupConfig
from sluicemq.net.dispatch import Peer, encode_response_to
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import (
    Command,
)
from sluicemq.wire.headers import SendBackRequest

log = logging.getLogger(__name__)

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
        """Create the handler of messages that consumers send back, to get them again later.

        `intake` stores copies of them. `consumers` knows the lane of a client, and `locks` the
        groups that consume in order. `delivered` counts messages that were sent back. `access` says
        which messages the client of a request may read.
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

        The copy becomes a dead letter instead if the request asks for it, or if no retry is left.
        If the group has no retry queues, nothing is stored, and the answer is SUCCESS as well. The
        answer is sent when the copy is durable. Raises RequestError, also if the store fails.
        """
        topic_count_before = len(self.topics)
        lane = self.consumers.lane_of(header.group, peer, command.fields)
        lane_id = compute_lane_id(lane.key) if lane is not None else ""
        try:
            self._store_copy(header, command.version, lane_id)
        except (StoreError, OSError) as error:
            remark = f"the message was not sent back: {error}"
            raise RequestError(choose_response_code(error), remark) from error
        frame = b""
        if not command.is_oneway:
            frame = encode_response_to(Command(ResponseCode.SUCCESS), command)
        return Durable(frame, creates_topic=len(self.topics) > topic_count_before)

    def _store_copy(self, header: SendBackRequest, version: int, lane_id: str) -> None:
        """Append a copy of a message to the retry topic or the dead-letter topic of a group.

        `version` is the version of the client. `lane_id` is the id of its lane, or "" if it has
        none; the copy is then delivered to any member of the group. The retry or dead letter is
        counted. Do nothing if the group has no retry queues.

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
        earlier_retries = message.reconsume_times
        properties.pop(LANE_PROPERTY, None)
        if lane_id:  # Only members of the same lane must receive the message again.
            properties[LANE_PROPERTY] = lane_id

        # Choose the topic: a retry topic or the dead-letter topic.
        retries_max = max_retries(config, header.reconsume_times_max, version)
        is_dead_letter_requested = header.delay_level < 0
        if is_dead_letter_requested or earlier_retries >= retries_max:
            topic = self.make_dead_letter(config.name, properties)
        else:
            topic = self._ensure_retry_topic(config, header)
            properties[DELAY] = str(header.delay_level or FIRST_RETRY_LEVEL + earlier_retries)
        if not topic.config.perm & PERM_WRITE:
            raise RequestError(
                ResponseCode.NO_PERMISSION, f"the topic[{topic.name}] sending message is forbidden"
            )

        # Append the copy, and count it.
        self.next_queue += 1
        message.topic = topic.name
        message.queue_id = self.next_queue % max(topic.config.write_queues, 1)
        message.reconsume_times = min(earlier_retries + 1, RECONSUME_TIMES_MAX)
        self.intake.append_from_client(message)
        self.delivered[properties[RETRY_TOPIC], config.name].sent_back_count += 1
        message_id = properties.get(UNIQ_KEY) or properties[ORIGIN_MESSAGE_ID]
        self.count_stored(config.name, topic, message_id, earlier_retries)

    def _ensure_retry_topic(self, config: GroupConfig, header: SendBackRequest) -> Topic:
        """Return the retry topic of a group, which is created if it does not exist."""
        sys_flag = UNIT_SYS_FLAG if header.unit_mode else 0
        return self.topics.ensure(RETRY_PREFIX + config.name, config.retry_queues, sys_flag)

    def _copy_message(self, position: int, group: str) -> MessageToStore:
        """Return a copy of the message at `position` of the commit log.

        The caller must set the topic, queue and number of retries of the copy. The property
        RETRY_TOPIC of the copy names the topic of the original message. If the record has this
        property already, it is kept only in topics that only members of the group can write to,
        because any producer could write it to other topics.

        Raises RequestError if there is no such message or the client may not read it.
        """
        record = self._read_permitted_record(position)
        topic = record.topic
        properties = record.decode_properties()
        forget_origin(properties, topic, group)
        origin_id = offset_message_id(record.store_host, record.physical_offset)
        properties.setdefault(ORIGIN_MESSAGE_ID, origin_id)
        message = record.copy_to(topic, 0, properties)
        if topic.startswith(DLQ_PREFIX):  # The retries of this group start at 0.
            properties[RETRY_TOPIC] = topic
            message.reconsume_times = 0
        properties.setdefault(RETRY_TOPIC, topic)
        properties[WAIT] = "false"
        properties.pop(TRAN_MSG, None)  # The message is committed, so the copy is not prepared.
        message.store_host = self.settings.store_host
        return message

    def _read_permitted_record(self, position: int) -> Record:
        """Return the record at `position` of the commit log, if the client may read it.

        Raises RequestError if no record begins there, or if the client may not read it. Without
        this check, a client could read every message of the broker by its position.
        """
        record_bytes = self.store.reader.record_at(position)
        if record_bytes is not None:
            record = read_record(memoryview(record_bytes))
            if record is not None:
                self.access.require_record(record_bytes, SUB)
                return record
        raise RequestError(ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {position}")

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
