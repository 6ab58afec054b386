"""Headers of the tools: topics, groups, statistics, running clients (spec/admin.md)."""

from sluicemq.wire.declare import boolean, header, int32, int64, text


@header
class CreateTopicRequest:
    """17. `attributes` is the tools' text form `+k=v,-k`."""

    topic: str = text("topic")
    default_topic: str | None = text("defaultTopic", default=None)
    read_queues: int = int32("readQueueNums")
    write_queues: int = int32("writeQueueNums")
    perm: int = int32("perm")
    filter_type: str | None = text("topicFilterType", default=None)
    sys_flag: int | None = int32("topicSysFlag", default=None)
    order: bool = boolean("order", default=False)
    attributes: str | None = text("attributes", default=None)
    force: bool | None = boolean("force", default=None)


@header
class DeleteTopicRequest:
    """215."""

    topic: str = text("topic")


@header
class GetAllTopicsRequest:
    """21: the paging fields are newer than 5.3.3 and optional (spec/admin.md §1)."""

    topic_sequence: int | None = int32("topicSeq", default=None)
    topic_count_max: int | None = int32("maxTopicNum", default=None)
    data_version: str | None = text("dataVersion", default=None)


@header
class GetAllTopicsResponse:
    """Answer to 21: absent means that the answer is complete."""

    topic_count: int | None = int32("totalTopicNum", default=None)


@header
class GetTopicConfigRequest:
    """351."""

    topic: str = text("topic")
    logical: bool | None = boolean("lo", default=None)


@header
class GetTopicStatsRequest:
    """202."""

    topic: str = text("topic")


@header
class DeleteGroupRequest:
    """207."""

    group: str = text("groupName")
    clean_offset: bool = boolean("cleanOffset", default=False)


@header
class GetAllGroupsRequest:
    """201."""

    group_sequence: int | None = int32("groupSeq", default=None)
    group_count_max: int | None = int32("maxGroupNum", default=None)
    data_version: str | None = text("dataVersion", default=None)


@header
class GetAllGroupsResponse:
    """Answer to 201: absent means that the answer is complete."""

    group_count: int | None = int32("totalGroupNum", default=None)


@header
class GetGroupConfigRequest:
    """352."""

    group: str = text("group")


@header
class GetConsumeStatsRequest:
    """208: without a topic, all topics of the group; `topic_list` joins names by `;`."""

    group: str = text("consumerGroup")
    topic: str | None = text("topic", default=None)
    topic_list: str | None = text("topicList", default=None)


@header
class QueryGroupsByTopicRequest:
    """300."""

    topic: str = text("topic")


@header
class QueryTopicsByGroupRequest:
    """343."""

    group: str = text("group")


@header
class GetConsumerConnectionsRequest:
    """203."""

    group: str = text("consumerGroup")


@header
class GetProducerConnectionsRequest:
    """204."""

    group: str = text("producerGroup")


@header
class GetBrokerConfigResponse:
    """Answer to 26: the data version as JSON; the tools need it."""

    version: str = text("version")


@header
class ViewBrokerStatsRequest:
    """315."""

    name: str = text("statsName")
    key: str = text("statsKey")


@header
class ResetOffsetRequest:
    """222 to the broker, 220 on to the client."""

    topic: str = text("topic")
    group: str = text("group")
    time_ms: int = int64("timestamp")
    force: bool = boolean("isForce", default=False)
    queue_id: int = int32("queueId", default=-1)
    offset: int | None = int64("offset", default=None)


@header
class GetConsumerStatusRequest:
    """223 to the broker, 221 on to the client."""

    topic: str = text("topic")
    group: str = text("group")
    client_address: str | None = text("clientAddr", default=None)


@header
class GetConsumerRunningInfoRequest:
    """307, relayed to the client."""

    group: str = text("consumerGroup")
    client_id: str = text("clientId")
    stack_enable: bool = boolean("jstackEnable", default=False)


@header
class ConsumeMessageDirectlyRequest:
    """309, relayed to the client with the stored message as body."""

    group: str = text("consumerGroup")
    client_id: str | None = text("clientId", default=None)
    message_id: str | None = text("msgId", default=None)
    broker: str | None = text("brokerName", default=None)
    topic: str | None = text("topic", default=None)
    topic_sys_flag: int | None = int32("topicSysFlag", default=None)
    group_sys_flag: int | None = int32("groupSysFlag", default=None)


@header
class CloneGroupOffsetRequest:
    """314."""

    source_group: str = text("srcGroup")
    target_group: str = text("destGroup")
    topic: str | None = text("topic", default=None)
    offline: bool = boolean("offline", default=False)


@header
class QueryConsumeTimeSpanRequest:
    """303."""

    topic: str = text("topic")
    group: str = text("group")


@header
class QueryCorrectionOffsetRequest:
    """308. `groups_left_out`: names with commas between."""

    groups_left_out: str | None = text("filterGroups", default=None)
    compare_group: str | None = text("compareGroup", default=None)
    topic: str = text("topic")


@header
class QueryConsumeQueueRequest:
    """321: so many units of a queue from `offset` on."""

    topic: str = text("topic")
    queue_id: int = int32("queueId")
    offset: int = int64("index")
    count: int = int32("count")
    group: str | None = text("consumerGroup", default=None)
