"""Headers of producers, and of what a broker asks them (spec/remoting.md §7.3, §7.6, §8)."""

from typing import Final

from sluicemq.wire.declare import boolean, header, int32, int64, text


@header
class SendMessageRequest:
    """10 SEND_MESSAGE, 324 SEND_REPLY_MESSAGE: long names, as the Go client sends them."""

    group: str = text("producerGroup")
    topic: str = text("topic")
    default_topic: str = text("defaultTopic")
    default_topic_queues: int = int32("defaultTopicQueueNums")
    queue_id: int = int32("queueId")
    sys_flag: int = int32("sysFlag")
    born_time_ms: int = int64("bornTimestamp")
    flag: int = int32("flag")
    properties: str | None = text("properties", default=None)
    reconsume_times: int | None = int32("reconsumeTimes", default=None)
    unit_mode: bool | None = boolean("unitMode", default=None)
    reconsume_times_max: int | None = int32("maxReconsumeTimes", default=None)
    batch: bool | None = boolean("batch", default=None)
    broker: str | None = text("bname", default=None)


BRIEF_FIELD: Final = "sluiceBrief"
"""SluiceMQ's own field of a batch: the answer has the id of the first message, not of all. Other
brokers ignore it."""


@header
class SendMessageRequestV2(SendMessageRequest):
    """310 SEND_MESSAGE_V2, 320 SEND_BATCH_MESSAGE, 325 SEND_REPLY_MESSAGE_V2: one letter each."""

    group: str = text("a")
    topic: str = text("b")
    default_topic: str = text("c")
    default_topic_queues: int = int32("d")
    queue_id: int = int32("e")
    sys_flag: int = int32("f")
    born_time_ms: int = int64("g")
    flag: int = int32("h")
    properties: str | None = text("i", default=None)
    reconsume_times: int | None = int32("j", default=None)
    unit_mode: bool | None = boolean("k", default=None)
    reconsume_times_max: int | None = int32("l", default=None)
    batch: bool | None = boolean("m", default=None)
    broker: str | None = text("n", default=None)


@header
class SendMessageResponse:
    """Answer to a send. The Java client needs MSG_REGION's map to exist (spec/remoting.md §7.3)."""

    message_id: str | None = text("msgId", default=None)
    queue_id: int | None = int32("queueId", default=None)
    queue_offset: int | None = int64("queueOffset", default=None)
    transaction_id: str | None = text("transactionId", default=None)
    batch_unique_id: str | None = text("batchUniqId", default=None)
    recall_handle: str | None = text("recallHandle", default=None)
    region: str | None = text("MSG_REGION", default=None)
    trace_on: bool | None = boolean("TRACE_ON", default=None)


@header
class EndTransactionRequest:
    """37: `outcome` is 8 commit, 12 rollback, 0 unknown."""

    topic: str | None = text("topic", default=None)
    group: str = text("producerGroup")
    half_queue_offset: int = int64("tranStateTableOffset")
    physical_offset: int = int64("commitLogOffset")
    outcome: int = int32("commitOrRollback")
    is_check_answer: bool = boolean("fromTransactionCheck", default=False)
    unique_id: str = text("msgId")
    transaction_id: str | None = text("transactionId", default=None)
    broker: str | None = text("bname", default=None)


@header
class CheckTransactionStateRequest:
    """39, one-way from the broker; the body is the half message in stored form."""

    topic: str | None = text("topic", default=None)
    half_queue_offset: int = int64("tranStateTableOffset")
    physical_offset: int = int64("commitLogOffset")
    unique_id: str | None = text("msgId", default=None)
    transaction_id: str | None = text("transactionId", default=None)
    offset_message_id: str | None = text("offsetMsgId", default=None)
    broker: str | None = text("bname", default=None)


@header
class RecallMessageRequest:
    """370: take back a timer message."""

    group: str | None = text("producerGroup", default=None)
    topic: str = text("topic")
    recall_handle: str = text("recallHandle")
    broker: str | None = text("bname", default=None)


@header
class RecallMessageResponse:
    """Answer to 370."""

    message_id: str | None = text("msgId", default=None)
    region: str | None = text("MSG_REGION", default=None)


@header
class ReplyMessageRequest(SendMessageRequest):
    """326, from the broker to the requester: a send's header and where it was stored."""

    born_host: str = text("bornHost")
    store_host: str = text("storeHost")
    store_time_ms: int = int64("storeTimestamp")
