"""A consumer could not handle a message: 36, deliver it again later.

The request says where the message lies in the log and for which group. A copy goes to the group's
retry topic, with its count one higher, by the way of a delay level:

    delayLevel  0   level 3 + times so far: 10 s, 30 s, 1 m … 2 h, sixteen in all
               >0   that level
               <0   no more: dead letters
    times so far >= maxReconsumeTimes (the header's, else the group's): dead letters

The copy keeps body, flags, born time and host, keys, tag and id. RETRY_TOPIC says where it was
first read, ORIGIN_MESSAGE_ID where it first lay; both survive all rounds (spec/delivery.md §4).
The answer leaves when the copy is safe: the consumer then counts the original as done.
"""

from dataclasses import dataclass, field
from typing import Final

from sluicemq.acl.guard import Access
from sluicemq.acl.verdict import SUB
from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.lanes.rules import LANE_PROPERTY, lane_id
from sluicemq.broker.produce.intake import Draft, Intake, code_of
from sluicemq.broker.produce.redelivery import Record, read_record
from sluicemq.broker.produce.retries import Retries, begins_anew
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topic, Topics
from sluicemq.broker.turns import Durable
from sluicemq.errors import (
    RequestError,
    StoreError,
)
from sluicemq.model.ids import offset_message_id
from sluicemq.model.message import (
    DELAY,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    TRAN_MSG,
    UNIQ_KEY,
    WAIT,
)
from sluicemq.model.topic import PERM_WRITE, GroupConfig
from sluicemq.net.dispatch import Peer, finish_answer
from sluicemq.store.store import Store
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import SendBackRequest

LEVEL_FIRST: Final = 3


@dataclass(slots=True, eq=False)
class SendBack:
    """The request family of consumers that failed."""

    settings: Settings
    topics: Topics
    retries: Retries
    store: Store
    intake: Intake
    consumers: Consumers
    access: Access = field(default_factory=Access)
    next_queue: int = field(default=0, init=False)

    def send_back(self, header: SendBackRequest, command: Command, peer: Peer) -> Durable:
        """36."""
        topic_count = len(self.topics)
        found = self.consumers.lane_of(header.group, peer, command.fields)
        lane = lane_id(found.key) if found is not None else ""
        try:
            self._send_back(header, command.version, lane)
        except (StoreError, OSError) as error:
            remark = f"the message was not sent back: {error}"
            raise RequestError(code_of(error), remark) from error
        answer = Command(ResponseCode.SUCCESS)
        frame = b"" if command.is_oneway else finish_answer(answer, command)
        return Durable(frame, announces=len(self.topics) > topic_count)

    def _send_back(self, header: SendBackRequest, version: int, lane: str) -> None:
        config = self.retries.config(header.group)
        broker = self.settings.broker
        if not broker.broker_permission & PERM_WRITE:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"the broker[{broker.broker_name}] sending message is forbidden",
            )
        if config.retry_queues <= 0:
            return  # a group that wants no retries; its message is done
        data = self.store.reader.record_at(header.physical_offset)
        record = read_record(None if data is None else memoryview(data))
        if data is None or record is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"look message by offset failed, {header.physical_offset}",
            )
        # Else whoever may read one group could read every message by its place in the log.
        self.access.require_record(data, SUB)
        draft = self._copy(record)
        draft.properties.pop(LANE_PROPERTY, None)
        if lane:  # it returns to the lane that it comes from
            draft.properties[LANE_PROPERTY] = lane
        times = draft.reconsume_times
        topic = self._direct(draft, header, config, version)
        self.intake.accept(draft)
        name = draft.properties.get(UNIQ_KEY) or draft.properties[ORIGIN_MESSAGE_ID]
        self.retries.stored(config.name, topic, name, times)

    def _copy(self, record: Record) -> Draft:
        """The message as it lies there, bound for nowhere yet."""
        topic, properties = record.topic, record.all_properties()
        origin = offset_message_id(record.store_host, record.physical_offset)
        properties.setdefault(ORIGIN_MESSAGE_ID, origin)
        draft = record.draft(topic, 0, properties)
        if begins_anew(topic):
            properties[RETRY_TOPIC] = topic
            draft.reconsume_times = 0
        properties.setdefault(RETRY_TOPIC, topic)
        properties[WAIT] = "false"
        properties.pop(TRAN_MSG, None)  # it is committed: no prepared message
        draft.store_host = self.settings.store_host
        return draft

    def _direct(
        self, draft: Draft, header: SendBackRequest, config: GroupConfig, version: int
    ) -> Topic:
        """To the retry topic, or to the dead letters. Raises RequestError."""
        times = draft.reconsume_times
        times_max = self.retries.times_max(config, header.reconsume_times_max, version)
        level = header.delay_level
        if level < 0 or times >= times_max:
            topic = self.retries.bury(config.name, draft.properties)
        else:
            topic = self.retries.retry_topic(config, is_unit=bool(header.unit_mode))
            draft.properties[DELAY] = str(level or LEVEL_FIRST + times)
        if not topic.config.perm & PERM_WRITE:
            raise RequestError(
                ResponseCode.NO_PERMISSION, f"the topic[{topic.name}] sending message is forbidden"
            )
        self.next_queue += 1
        draft.topic = topic.name
        draft.queue_id = self.next_queue % max(topic.config.write_queues, 1)
        draft.reconsume_times = times + 1
        return topic
