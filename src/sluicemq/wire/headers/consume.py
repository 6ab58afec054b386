"""Headers of consumers: pull, offsets, membership, single messages (spec/remoting.md §7.4, §13)."""

from sluicemq.wire.declare import boolean, header, int32, int64, text

PULL_COMMIT_OFFSET = 0x1
PULL_SUSPEND = 0x2
PULL_SUBSCRIPTION = 0x4
PULL_CLASS_FILTER = 0x8
PULL_LITE = 0x10
"""Bits of a pull's sys_flag (spec/remoting.md §10)."""


@header
class PullMessageRequest:
    """11 PULL_MESSAGE, 361 LITE_PULL_MESSAGE. `bulk` is SluiceMQ's own: megabytes, not messages."""

    group: str = text("consumerGroup")
    topic: str = text("topic")
    queue_id: int = int32("queueId")
    queue_offset: int = int64("queueOffset")
    message_count_max: int = int32("maxMsgNums")
    sys_flag: int = int32("sysFlag")
    commit_offset: int = int64("commitOffset")
    suspend_timeout_ms: int = int64("suspendTimeoutMillis")
    subscription: str | None = text("subscription", default=None)
    sub_version: int = int64("subVersion")
    expression_kind: str | None = text("expressionType", default=None)
    message_bytes_max: int | None = int32("maxMsgBytes", default=None)
    request_source: int | None = int32("requestSource", default=None)
    proxy_forward_client_id: str | None = text("proxyFrowardClientId", default=None)
    broker: str | None = text("bname", default=None)
    bulk: bool | None = boolean("sluiceBulk", default=None)


@header
class PullMessageResponse:
    """Answer to a pull: present in 0, 19, 20 and 21; other codes carry none of it."""

    broker_id_suggested: int = int64("suggestWhichBrokerId")
    next_offset: int = int64("nextBeginOffset")
    offset_min: int = int64("minOffset")
    offset_max: int = int64("maxOffset")
    offset_delta: int | None = int64("offsetDelta", default=None)
    topic_sys_flag: int | None = int32("topicSysFlag", default=None)
    group_sys_flag: int | None = int32("groupSysFlag", default=None)
    forbidden_kind: int | None = int32("forbiddenType", default=None)


@header
class QueryConsumerOffsetRequest:
    """14: the committed offset; `zero_if_not_found` False asks for 22 instead of 0."""

    group: str = text("consumerGroup")
    topic: str = text("topic")
    queue_id: int = int32("queueId")
    zero_if_not_found: bool | None = boolean("setZeroIfNotFound", default=None)
    broker: str | None = text("bname", default=None)


@header
class OffsetResponse:
    """Answer to 14, 29, 30 and 31; without the offset when there is none."""

    offset: int | None = int64("offset", default=None)


@header
class UpdateConsumerOffsetRequest:
    """15: commit."""

    group: str = text("consumerGroup")
    topic: str = text("topic")
    queue_id: int = int32("queueId")
    commit_offset: int = int64("commitOffset")
    broker: str | None = text("bname", default=None)


@header
class GetMaxOffsetRequest:
    """30."""

    topic: str = text("topic")
    queue_id: int = int32("queueId")
    committed: bool = boolean("committed", default=True)
    broker: str | None = text("bname", default=None)


@header
class GetMinOffsetRequest:
    """31."""

    topic: str = text("topic")
    queue_id: int = int32("queueId")
    broker: str | None = text("bname", default=None)


@header
class SearchOffsetRequest:
    """29: `boundary` is `lower` or `upper` in any case; anything else means lower
    (spec/delivery.md §6)."""

    topic: str = text("topic")
    queue_id: int = int32("queueId")
    time_ms: int = int64("timestamp")
    boundary: str | None = text("boundaryType", default=None)
    broker: str | None = text("bname", default=None)


@header
class GetEarliestStoreTimeRequest:
    """32."""

    topic: str = text("topic")
    queue_id: int = int32("queueId")
    broker: str | None = text("bname", default=None)


@header
class GetEarliestStoreTimeResponse:
    """Answer to 32: -1 when the queue is empty."""

    time_ms: int = int64("timestamp")


@header
class HeartbeatResponse:
    """Answer to 34; a broker without heartbeat V2 leaves both out (spec/remoting.md §15)."""

    supports_v2: bool | None = boolean("IS_SUPPORT_HEART_BEAT_V2", default=None)
    subscription_changed: bool | None = boolean("IS_SUB_CHANGE", default=None)
    lanes: bool | None = boolean("sluiceLanes", default=None)
    """Ours alone, for who asks: members of a group may want different things."""


@header
class UnregisterClientRequest:
    """35: a producer group or a consumer group of a client is gone."""

    client_id: str = text("clientID")
    producer_group: str | None = text("producerGroup", default=None)
    consumer_group: str | None = text("consumerGroup", default=None)


@header
class GetConsumerListRequest:
    """38."""

    group: str = text("consumerGroup")


@header
class NotifyConsumerIdsChangedRequest:
    """40, one-way from the broker: balance again."""

    group: str = text("consumerGroup")


@header
class SendBackRequest:
    """36: deliver that message again later. `physical_offset` is the one in the commit log."""

    physical_offset: int = int64("offset")
    group: str = text("group")
    delay_level: int = int32("delayLevel")
    origin_message_id: str | None = text("originMsgId", default=None)
    origin_topic: str | None = text("originTopic", default=None)
    unit_mode: bool | None = boolean("unitMode", default=None)
    reconsume_times_max: int | None = int32("maxReconsumeTimes", default=None)
    broker: str | None = text("bname", default=None)


@header
class QueryMessageRequest:
    """12: by key, or by unique id when `is_unique_key` (times in ms). Newer clients say it
    by `index_type`: K (key), U (unique id) or T (tag)."""

    topic: str = text("topic")
    key: str = text("key")
    count_max: int = int32("maxNum")
    begin_time_ms: int = int64("beginTimestamp")
    end_time_ms: int = int64("endTimestamp")
    is_unique_key: bool | None = boolean("_UNIQUE_KEY_QUERY", default=None)
    index_type: str | None = text("indexType", default=None)


@header
class QueryMessageResponse:
    """Answer to 12."""

    index_time_ms: int = int64("indexLastUpdateTimestamp")
    index_physical_offset: int = int64("indexLastUpdatePhyoffset")


@header
class ViewMessageRequest:
    """33: the one message at a commit-log offset."""

    topic: str | None = text("topic", default=None)
    physical_offset: int = int64("offset")
