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

from typing import Final

from sluicemq.broker.access import SUB, Access
from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.lanes.rules import LANE_PROPERTY, lane_id
from sluicemq.broker.produce.intake import Draft, Intake
from sluicemq.broker.produce.retries import Retries, begins_anew
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topic, Topics
from sluicemq.broker.turns import Durable
from sluicemq.errors import (
    MessageIllegalError,
    ProtocolError,
    RequestError,
    StoreError,
    StoreFullError,
)
from sluicemq.model.ids import Host, encode_host, offset_message_id
from sluicemq.model.message import (
    DELAY,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    TRAN_MSG,
    UNIQ_KEY,
    WAIT,
)
from sluicemq.model.topic import PERM_WRITE, GroupConfig
from sluicemq.net.dispatch import finish_answer
from sluicemq.net.peer import Peer
from sluicemq.record import property_text as text
from sluicemq.record.codec import RecordHead, parse_head
from sluicemq.store.store import Store
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import decode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import SendBackRequest

LEVEL_FIRST: Final = 3


class SendBack:
    """The request family of consumers that failed."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        retries: Retries,
        store: Store,
        intake: Intake,
        store_host: Host,
        consumers: Consumers,
        access: Access | None = None,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._retries = retries
        self._store = store
        self._intake = intake
        self._consumers = consumers
        self._access = access or Access()
        self._next_queue = 0
        self.move(store_host)

    def move(self, store_host: Host) -> None:
        """The host that stands in records is this one."""
        self._store_host = encode_host(store_host)

    def send_back(self, command: Command, peer: Peer) -> Durable | Command:
        """36."""
        header = decode_header(SendBackRequest, command.fields)
        topic_count = len(self._topics)
        try:
            found = self._consumers.lane_of(header.group, peer, command.fields)
            lane = lane_id(found.key) if found is not None else ""
            self._send_back(header, command.version, lane)
        except RequestError as refusal:
            return Command(refusal.code, remark=refusal.remark)
        except (StoreError, OSError) as error:
            return Command(_code_of(error), remark=f"the message was not sent back: {error}")
        answer = Command(ResponseCode.SUCCESS)
        frame = b"" if command.is_oneway else finish_answer(answer, command)
        return Durable(frame, announces=len(self._topics) > topic_count)

    def _send_back(self, header: SendBackRequest, version: int, lane: str) -> None:
        config = self._retries.config(header.group)
        broker = self._settings.broker
        if not broker.broker_permission & PERM_WRITE:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"the broker[{broker.broker_name}] sending message is forbidden",
            )
        if config.retry_queues <= 0:
            return  # a group that wants no retries; its message is done
        data = self._store.reader.record_at(header.physical_offset)
        if data is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"look message by offset failed, {header.physical_offset}",
            )
        try:
            head = parse_head(data)
        except ProtocolError as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        # Else whoever may read one group could read every message by its place in the log.
        self._access.require_record(data, SUB)
        draft = self._copy(data, head)
        draft.properties.pop(LANE_PROPERTY, None)
        if lane:  # it returns to the lane that it comes from
            draft.properties[LANE_PROPERTY] = lane
        times = draft.reconsume_times
        topic = self._direct(draft, header, config, version)
        self._intake.accept(draft)
        name = draft.properties.get(UNIQ_KEY) or draft.properties[ORIGIN_MESSAGE_ID]
        self._retries.stored(config.name, topic, name, times)

    def _copy(self, data: bytes, head: RecordHead) -> Draft:
        """The message as it lies there, bound for nowhere yet."""
        topic = data[head.topic].decode("utf-8", "replace")
        properties = text.as_dict(data[head.properties].decode("utf-8", "replace"))
        origin = offset_message_id(data[head.store_host], head.physical_offset)
        properties.setdefault(ORIGIN_MESSAGE_ID, origin)
        times = head.reconsume_times
        if begins_anew(topic):
            properties[RETRY_TOPIC] = topic
            times = 0
        properties.setdefault(RETRY_TOPIC, topic)
        properties[WAIT] = "false"
        properties.pop(TRAN_MSG, None)  # it is committed: no half message
        return Draft(
            topic, head.queue_id, memoryview(data)[head.body], properties, head.born_time_ms,
            data[head.born_host], self._store_host, head.flag, head.sys_flag, times,
        )  # fmt: skip

    def _direct(
        self,
        draft: Draft,
        header: SendBackRequest,
        config: GroupConfig,
        version: int,
    ) -> Topic:
        """To the retry topic, or to the dead letters. Raises RequestError."""
        times = draft.reconsume_times
        times_max = self._retries.times_max(config, header.reconsume_times_max, version)
        level = header.delay_level
        if level < 0 or times >= times_max:
            topic = self._retries.bury(config.name, draft.properties)
        else:
            topic = self._retries.retry_topic(config, is_unit=bool(header.unit_mode))
            draft.properties[DELAY] = str(level or LEVEL_FIRST + times)
        _check_writable(topic)
        self._next_queue += 1
        draft.topic = topic.name
        draft.queue_id = self._next_queue % max(topic.config.write_queues, 1)
        draft.reconsume_times = times + 1
        return topic


def _check_writable(topic: Topic) -> None:
    if not topic.config.perm & PERM_WRITE:
        raise RequestError(
            ResponseCode.NO_PERMISSION, f"the topic[{topic.name}] sending message is forbidden"
        )


def _code_of(error: Exception) -> ResponseCode:
    if isinstance(error, MessageIllegalError):
        return ResponseCode.MESSAGE_ILLEGAL
    full = isinstance(error, StoreFullError)
    return ResponseCode.SERVICE_NOT_AVAILABLE if full else ResponseCode.SYSTEM_ERROR
