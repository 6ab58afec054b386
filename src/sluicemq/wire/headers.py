"""The header classes of requests and responses: the fields in their extFields.

A class is declared as the header of one or several request codes. Each field has its name on the
wire and its type; a field without a default is required (`declare.py`). `REQUEST_HEADERS` and
`RESPONSE_HEADERS` map a request code to the header class of its requests and responses. Codes that
are not in these tables have no declared header.

Other modules of this package declare the headers of their part of the protocol: `popping.py`,
`registration.py`, `replicas.py` and `staging.py`.
"""

from collections.abc import Callable
from typing import Final, TypeVar, dataclass_transform

from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.declare import boolean, declare_header, int32, int64, text

T = TypeVar("T")
REQUEST_HEADERS: Final[dict[int, type]] = {}
RESPONSE_HEADERS: Final[dict[int, type]] = {}
CLIENT_ID_FIELD: Final = "sluiceClientId"
"""The extField in which a SluiceMQ client sends its client id with pulls and offset requests.

The client sends its heartbeats over another connection, so the broker cannot tell from the
connection which member sends the request. RocketMQ's brokers ignore the field.
"""


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(text, int32, int64, boolean)
)
def request(*codes: Code, short_names: str = "") -> Callable[[type[T]], type[T]]:
    """Return a decorator that declares a class as the header of these requests.

    `short_names` is explained at `declare_header`.
    """
    return declare_header(REQUEST_HEADERS, codes, short_names)


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(text, int32, int64, boolean)
)
def response(*codes: Code) -> Callable[[type[T]], type[T]]:
    """Return a decorator that declares a class as the header of the responses to `codes`."""
    return declare_header(RESPONSE_HEADERS, codes)


# --------------------------------------------------- producers (spec/remoting.md §7.3, §7.6, §8)
@request(Code.SEND_MESSAGE, Code.SEND_REPLY_MESSAGE)
class SendMessageRequest:
    """The header of SEND_MESSAGE (10) and SEND_REPLY_MESSAGE (324).

    Its fields have long names. Go clients send it.
    """

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


@request(
    Code.SEND_MESSAGE_V2,
    Code.SEND_BATCH_MESSAGE,
    Code.SEND_REPLY_MESSAGE_V2,
    short_names="abcdefghijklmn",
)
class SendMessageRequestV2(SendMessageRequest):
    """The header of SEND_MESSAGE_V2 (310), SEND_BATCH_MESSAGE (320) and a reply.

    The reply is SEND_REPLY_MESSAGE_V2 (325). The header has the fields of `SendMessageRequest` in
    the same order. Their names on the wire are single letters.
    """


BRIEF_FIELD: Final = "sluiceBrief"
"""The extField by which a SluiceMQ client asks for a short response to a batch.

The response then has only the id of the batch's first message. Other brokers ignore the field.
"""


@response(
    Code.SEND_MESSAGE,
    Code.SEND_MESSAGE_V2,
    Code.SEND_BATCH_MESSAGE,
    Code.SEND_REPLY_MESSAGE,
    Code.SEND_REPLY_MESSAGE_V2,
    Code.RECALL_MESSAGE,
)
class SendMessageResponse:
    """The header of the responses to all sends and to RECALL_MESSAGE (370).

    The Java client reads MSG_REGION without checking that extFields are present
    (spec/remoting.md §7.3), so a response must have extFields.
    """

    message_id: str | None = text("msgId", default=None)
    queue_id: int | None = int32("queueId", default=None)
    queue_offset: int | None = int64("queueOffset", default=None)
    transaction_id: str | None = text("transactionId", default=None)
    batch_unique_id: str | None = text("batchUniqId", default=None)
    recall_handle: str | None = text("recallHandle", default=None)
    region: str | None = text("MSG_REGION", default=None)
    trace_on: bool | None = boolean("TRACE_ON", default=None)


@request(Code.END_TRANSACTION)
class EndTransactionRequest:
    """The header of END_TRANSACTION (37), by which a producer ends its transaction.

    `outcome` is 8 for commit, 12 for rollback and 0 for unknown. `half_queue_offset` and
    `physical_offset` locate the prepared message. `is_from_check` is True if the request answers a
    transaction check.
    """

    topic: str | None = text("topic", default=None)
    group: str = text("producerGroup")
    half_queue_offset: int = int64("tranStateTableOffset")
    physical_offset: int = int64("commitLogOffset")
    outcome: int = int32("commitOrRollback")
    is_from_check: bool = boolean("fromTransactionCheck", default=False)
    unique_id: str = text("msgId")
    transaction_id: str | None = text("transactionId", default=None)
    broker: str | None = text("bname", default=None)


@request(Code.CHECK_TRANSACTION_STATE)
class CheckTransactionStateRequest:
    """The header of CHECK_TRANSACTION_STATE (39), a one-way request from the broker to a producer.

    The body of the request is the prepared message as a stored record. `half_queue_offset` is the
    offset of the prepared message in its queue, and `physical_offset` its position in the commit
    log.
    """

    topic: str | None = text("topic", default=None)
    half_queue_offset: int = int64("tranStateTableOffset")
    physical_offset: int = int64("commitLogOffset")
    unique_id: str | None = text("msgId", default=None)
    transaction_id: str | None = text("transactionId", default=None)
    offset_message_id: str | None = text("offsetMsgId", default=None)
    broker: str | None = text("bname", default=None)


@request(Code.RECALL_MESSAGE)
class RecallMessageRequest:
    group: str | None = text("producerGroup", default=None)
    topic: str = text("topic")
    recall_handle: str = text("recallHandle")
    broker: str | None = text("bname", default=None)


@request(Code.PUSH_REPLY_MESSAGE_TO_CLIENT)
class ReplyMessageRequest(SendMessageRequest):
    """The header of PUSH_REPLY_MESSAGE_TO_CLIENT (326).

    The broker sends it, with a reply as the body, to the client that sent the request message. It
    has the fields of the reply's send request, and the hosts and time with which the broker
    received the reply.
    """

    born_host: str = text("bornHost")
    store_host: str = text("storeHost")
    store_time_ms: int = int64("storeTimestamp")


# -------------------------------------------------------- consumers (spec/remoting.md §7.4, §13)
PULL_COMMIT_OFFSET = 0x1
PULL_SUSPEND = 0x2
PULL_SUBSCRIPTION = 0x4
PULL_LITE = 0x10
"""The bits of `PullMessageRequest.sys_flag` (spec/remoting.md §10)."""


@request(Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE)
class PullMessageRequest:
    """The header of PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361).

    Only SluiceMQ has three of the fields. With `bulk` the response is limited by its size in bytes,
    up to several megabytes, and not by `message_count_max`. With `any_span` the matching messages
    of one response may be any distance apart in the commit log. With `probe` the response has one
    message as it is stored, and the state of the group does not change.
    """

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
    any_span: bool | None = boolean("sluiceAnySpan", default=None)
    probe: bool | None = boolean("sluiceLook", default=None)


@response(Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE)
class PullMessageResponse:
    """The header of the responses to PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361).

    Responses with the codes SUCCESS (0), PULL_NOT_FOUND (19), PULL_RETRY_IMMEDIATELY (20) and
    PULL_OFFSET_MOVED (21) have it. Responses with other codes have no header.
    """

    broker_id_suggested: int = int64("suggestWhichBrokerId")
    next_offset: int = int64("nextBeginOffset")
    offset_min: int = int64("minOffset")
    offset_max: int = int64("maxOffset")
    offset_delta: int | None = int64("offsetDelta", default=None)
    topic_sys_flag: int | None = int32("topicSysFlag", default=None)
    group_sys_flag: int | None = int32("groupSysFlag", default=None)
    forbidden_kind: int | None = int32("forbiddenType", default=None)


@request(Code.QUERY_CONSUMER_OFFSET)
class QueryConsumerOffsetRequest:
    """The header of QUERY_CONSUMER_OFFSET (14), which asks for a committed offset.

    If `zero_if_not_found` is False, the response for a queue without a committed offset has the
    code QUERY_NOT_FOUND (22). Otherwise the broker may respond with offset 0.
    """

    group: str = text("consumerGroup")
    topic: str = text("topic")
    queue_id: int = int32("queueId")
    zero_if_not_found: bool | None = boolean("setZeroIfNotFound", default=None)
    broker: str | None = text("bname", default=None)


@response(
    Code.QUERY_CONSUMER_OFFSET,
    Code.GET_MAX_OFFSET,
    Code.GET_MIN_OFFSET,
    Code.SEARCH_OFFSET_BY_TIMESTAMP,
)
class OffsetResponse:
    """The header of the responses to all requests for one offset of a queue.

    `offset` is None if the broker has no such offset.
    """

    offset: int | None = int64("offset", default=None)


@request(Code.UPDATE_CONSUMER_OFFSET)
class UpdateConsumerOffsetRequest:
    group: str = text("consumerGroup")
    topic: str = text("topic")
    queue_id: int = int32("queueId")
    commit_offset: int = int64("commitOffset")
    broker: str | None = text("bname", default=None)


@request(Code.GET_MIN_OFFSET, Code.GET_EARLIEST_MSG_STORETIME)
class QueueRequest:
    topic: str = text("topic")
    queue_id: int = int32("queueId")
    broker: str | None = text("bname", default=None)


@request(Code.GET_MAX_OFFSET)
class GetMaxOffsetRequest(QueueRequest):
    committed: bool = boolean("committed", default=True)


@request(Code.SEARCH_OFFSET_BY_TIMESTAMP)
class SearchOffsetRequest(QueueRequest):
    """The header of SEARCH_OFFSET_BY_TIMESTAMP (29).

    `boundary` is `lower` or `upper`, in upper or lower case. Any other value means `lower`.
    """

    time_ms: int = int64("timestamp")
    boundary: str | None = text("boundaryType", default=None)


@response(Code.GET_EARLIEST_MSG_STORETIME)
class GetEarliestStoreTimeResponse:
    """The header of the response to GET_EARLIEST_MSG_STORETIME (32).

    `time_ms` is when the first message of the queue was stored, -1 if the queue is empty.
    """

    time_ms: int = int64("timestamp")


@response(Code.HEART_BEAT)
class HeartbeatResponse:
    """The header of the response to HEART_BEAT (34).

    A broker without heartbeat V2 sends neither `supports_v2` nor `subscription_changed`
    (spec/remoting.md §15).
    """

    supports_v2: bool | None = boolean("IS_SUPPORT_HEART_BEAT_V2", default=None)
    subscription_changed: bool | None = boolean("IS_SUB_CHANGE", default=None)
    lanes: bool | None = boolean("sluiceLanes", default=None)
    """Whether the broker supports lanes: members of one group with different subscriptions.

    Only SluiceMQ's brokers send this field, and only to clients that ask for it.
    """


@request(Code.UNREGISTER_CLIENT)
class UnregisterClientRequest:
    client_id: str = text("clientID")
    producer_group: str | None = text("producerGroup", default=None)
    consumer_group: str | None = text("consumerGroup", default=None)


@request(
    Code.GET_CONSUMER_LIST_BY_GROUP,
    Code.GET_CONSUMER_CONNECTION_LIST,
    Code.NOTIFY_CONSUMER_IDS_CHANGED,
)
class ConsumerGroupRequest:
    """The header of three requests about one consumer group.

    They are GET_CONSUMER_LIST_BY_GROUP (38), GET_CONSUMER_CONNECTION_LIST (203) and
    NOTIFY_CONSUMER_IDS_CHANGED (40). The last one is a one-way request from the broker: the
    receiving client rebalances its queues.
    """

    group: str = text("consumerGroup")


@request(Code.CONSUMER_SEND_MSG_BACK)
class SendBackRequest:
    """The header of CONSUMER_SEND_MSG_BACK (36), by which a consumer rejects a message.

    The broker delivers the message again later, or moves it to the dead-letter topic.
    `physical_offset` is the position of the message in the commit log.
    """

    physical_offset: int = int64("offset")
    group: str = text("group")
    delay_level: int = int32("delayLevel")
    origin_message_id: str | None = text("originMsgId", default=None)
    origin_topic: str | None = text("originTopic", default=None)
    unit_mode: bool | None = boolean("unitMode", default=None)
    reconsume_times_max: int | None = int32("maxReconsumeTimes", default=None)
    broker: str | None = text("bname", default=None)


@request(Code.QUERY_MESSAGE)
class QueryMessageRequest:
    """The header of QUERY_MESSAGE (12), which queries the key index.

    `key` is a message id if `is_unique_key` is True, else a key. Newer clients send `index_type`
    instead: K for a key, U for a message id, T for a tag. Both times are ms since 1970.
    """

    topic: str = text("topic")
    key: str = text("key")
    count_max: int = int32("maxNum")
    begin_time_ms: int = int64("beginTimestamp")
    end_time_ms: int = int64("endTimestamp")
    is_unique_key: bool | None = boolean("_UNIQUE_KEY_QUERY", default=None)
    index_type: str | None = text("indexType", default=None)


@response(Code.QUERY_MESSAGE)
class QueryMessageResponse:
    index_time_ms: int = int64("indexLastUpdateTimestamp")
    index_physical_offset: int = int64("indexLastUpdatePhyoffset")


@request(Code.VIEW_MESSAGE_BY_ID)
class ViewMessageRequest:
    """The header of VIEW_MESSAGE_BY_ID (33).

    It asks for the message at the position `physical_offset` in the commit log.
    """

    topic: str | None = text("topic", default=None)
    physical_offset: int = int64("offset")


# --------------------------------------------------------------------- tools (see spec/admin.md)
@request(Code.UPDATE_AND_CREATE_TOPIC)
class CreateTopicRequest:
    """The header of UPDATE_AND_CREATE_TOPIC (17).

    `attributes` are changes in the syntax of the tools, `+k=v,-k`: `+` sets an attribute, and `-`
    removes one.
    """

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


@request(
    Code.DELETE_TOPIC_IN_BROKER,
    Code.GET_TOPIC_STATS_INFO,
    Code.QUERY_TOPIC_CONSUME_BY_WHO,
    Code.REGISTER_TOPIC_IN_NAMESRV,
)
class TopicRequest:
    topic: str = text("topic")


@request(Code.GET_ALL_TOPIC_CONFIG)
class GetAllTopicsRequest:
    """The header of GET_ALL_TOPIC_CONFIG (21).

    The fields select a page of the topics. Older clients do not send them (spec/admin.md §1). A
    response without `topic_count` contains all topics.
    """

    topic_sequence: int | None = int32("topicSeq", default=None)
    topic_count_max: int | None = int32("maxTopicNum", default=None)
    data_version: str | None = text("dataVersion", default=None)


@response(Code.GET_ALL_TOPIC_CONFIG)
class GetAllTopicsResponse:
    topic_count: int | None = int32("totalTopicNum", default=None)


@request(Code.GET_TOPIC_CONFIG)
class GetTopicConfigRequest(TopicRequest):
    logical: bool | None = boolean("lo", default=None)


@request(Code.DELETE_SUBSCRIPTIONGROUP)
class DeleteGroupRequest:
    group: str = text("groupName")
    clean_offset: bool = boolean("cleanOffset", default=False)


@request(Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
class GetAllGroupsRequest:
    group_sequence: int | None = int32("groupSeq", default=None)
    group_count_max: int | None = int32("maxGroupNum", default=None)
    data_version: str | None = text("dataVersion", default=None)


@response(Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
class GetAllGroupsResponse:
    group_count: int | None = int32("totalGroupNum", default=None)


@request(Code.GET_SUBSCRIPTIONGROUP_CONFIG, Code.QUERY_TOPICS_BY_CONSUMER)
class GetGroupConfigRequest:
    group: str = text("group")


@request(Code.GET_CONSUME_STATS)
class GetConsumeStatsRequest:
    """The header of GET_CONSUME_STATS (208).

    `topic` None means all topics of the group. `topic_list` contains several names, separated by
    `;`.
    """

    group: str = text("consumerGroup")
    topic: str | None = text("topic", default=None)
    topic_list: str | None = text("topicList", default=None)


@request(Code.GET_PRODUCER_CONNECTION_LIST)
class GetProducerConnectionsRequest:
    group: str = text("producerGroup")


@response(Code.GET_BROKER_CONFIG)
class GetBrokerConfigResponse:
    """The header of the response to GET_BROKER_CONFIG (26).

    `version` is a data version as JSON. RocketMQ's tools require it.
    """

    version: str = text("version")


@request(Code.QUERY_CONSUME_TIME_SPAN)
class TopicGroupRequest(TopicRequest):
    group: str = text("group")


@request(Code.INVOKE_BROKER_TO_RESET_OFFSET, Code.RESET_CONSUMER_CLIENT_OFFSET)
class ResetOffsetRequest(TopicGroupRequest):
    time_ms: int = int64("timestamp")
    force: bool = boolean("isForce", default=False)
    queue_id: int = int32("queueId", default=-1)
    offset: int | None = int64("offset", default=None)


@request(Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, Code.GET_CONSUMER_STATUS_FROM_CLIENT)
class GetConsumerStatusRequest(TopicGroupRequest):
    client_address: str | None = text("clientAddr", default=None)


@request(Code.GET_CONSUMER_RUNNING_INFO)
class GetConsumerRunningInfoRequest:
    """The header of GET_CONSUMER_RUNNING_INFO (307), which the broker forwards to the client.

    With `stack_enable` the response of the client contains its stack traces.
    """

    group: str = text("consumerGroup")
    client_id: str = text("clientId")
    stack_enable: bool = boolean("jstackEnable", default=False)


@request(Code.CONSUME_MESSAGE_DIRECTLY)
class ConsumeMessageDirectlyRequest:
    """The header of CONSUME_MESSAGE_DIRECTLY (309).

    The broker forwards the request to the client, with the stored message as its body.
    """

    group: str = text("consumerGroup")
    client_id: str | None = text("clientId", default=None)
    message_id: str | None = text("msgId", default=None)
    broker: str | None = text("brokerName", default=None)
    topic: str | None = text("topic", default=None)
    topic_sys_flag: int | None = int32("topicSysFlag", default=None)
    group_sys_flag: int | None = int32("groupSysFlag", default=None)


@request(Code.CLONE_GROUP_OFFSET)
class CloneGroupOffsetRequest:
    source_group: str = text("srcGroup")
    target_group: str = text("destGroup")
    topic: str | None = text("topic", default=None)
    offline: bool = boolean("offline", default=False)


@request(Code.QUERY_CORRECTION_OFFSET)
class QueryCorrectionOffsetRequest:
    """The header of QUERY_CORRECTION_OFFSET (308).

    `excluded_groups` are names of groups, separated by commas.
    """

    excluded_groups: str | None = text("filterGroups", default=None)
    compare_group: str | None = text("compareGroup", default=None)
    topic: str = text("topic")


@request(Code.QUERY_CONSUME_QUEUE)
class QueryConsumeQueueRequest(TopicRequest):
    """The header of QUERY_CONSUME_QUEUE (321).

    It asks for up to `count` units of a consume queue, from `offset` on.
    """

    queue_id: int = int32("queueId")
    offset: int = int64("index")
    count: int = int32("count")
    group: str | None = text("consumerGroup", default=None)


@request(Code.VIEW_BROKER_STATS_DATA)
class StatisticsRequest:
    """The header of VIEW_BROKER_STATS_DATA (315), which asks for one statistic.

    `name` is the name of the statistic. `key` is its subject: a topic, `topic@group`, or a cluster.
    """

    name: str = text("statsName")
    key: str = text("statsKey")


@request(Code.GET_BROKER_CONSUME_STATS)
class GetConsumeStatsOfBrokerRequest:
    """The header of GET_BROKER_CONSUME_STATS (317).

    With `ordered` the response contains only the groups that consume in order, else all groups.
    """

    ordered: bool = boolean("isOrder", default=False)


@request(Code.UPDATE_AND_GET_GROUP_FORBIDDEN)
class GroupForbiddenRequest(TopicGroupRequest):
    """The header of UPDATE_AND_GET_GROUP_FORBIDDEN (353).

    `is_readable` permits or forbids the group to read the topic. If it is None, nothing changes,
    and the response only reports the current state.
    """

    is_readable: bool | None = boolean("readable", default=None)


@request(Code.UPDATE_AND_CREATE_ACL_CONFIG)
class UpdateAccountRequest:
    """The header of UPDATE_AND_CREATE_ACL_CONFIG (50), which creates or changes an account.

    The items of a list are separated by commas.
    """

    access_key: str = text("accessKey")
    secret_key: str | None = text("secretKey", default=None)
    white_address: str | None = text("whiteRemoteAddress", default=None)
    admin: bool | None = boolean("admin", default=None)
    topic_default: str | None = text("defaultTopicPerm", default=None)
    group_default: str | None = text("defaultGroupPerm", default=None)
    topic_permissions: str | None = text("topicPerms", default=None)
    group_permissions: str | None = text("groupPerms", default=None)


@request(Code.DELETE_ACL_CONFIG)
class DeleteAccountRequest:
    access_key: str = text("accessKey")


@response(Code.GET_BROKER_CLUSTER_ACL_INFO)
class AccessVersionResponse:
    """The header of the response to GET_BROKER_CLUSTER_ACL_INFO (52).

    `version` is the data version of the main file as JSON. `all_versions` is a JSON object with the
    data version of each file by its path.
    """

    version: str = text("version")
    all_versions: str = text("allAclFileVersion")
    broker: str = text("brokerName")
    address: str = text("brokerAddr")
    cluster: str = text("clusterName")


@request(Code.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG)
class UpdateWhiteAddressesRequest:
    """The header of UPDATE_GLOBAL_WHITE_ADDRS_CONFIG (53).

    `addresses` is the new list, separated by commas. `file` is the path of the file that is
    changed; None means the main file.
    """

    addresses: str = text("globalWhiteAddrs")
    file: str | None = text("aclFileFullPath", default=None)


# ----------------------------------------------------------------------- requests of SluiceMQ
@request(Code.SLUICE_LIST_DELAYED)
class ListDelayedRequest:
    """The header of SLUICE_LIST_DELAYED (900101), which asks for a page of delayed messages.

    `cursor` is the cursor in the response with the previous page, None for the first page.
    """

    topic: str | None = text("topic", default=None)
    key: str | None = text("key", default=None)
    cursor: str | None = text("cursor", default=None)
    count_max: int | None = int32("maxMsgNums", default=None)


@response(Code.SLUICE_LIST_DELAYED)
class ListDelayedResponse:
    """The header of the response to SLUICE_LIST_DELAYED (900101), whose body has the messages.

    `cursor` is None on the last page.
    """

    cursor: str | None = text("cursor", default=None)


@request(Code.SLUICE_CANCEL_DELAYED)
class CancelDelayedRequest:
    """The header of SLUICE_CANCEL_DELAYED (900102).

    `handle` is the handle of a message that SLUICE_LIST_DELAYED (900101) returned.
    """

    handle: str = text("handle")


@request(Code.SLUICE_LIST_TRANSACTIONS)
class ListTransactionsRequest:
    """The header of SLUICE_LIST_TRANSACTIONS (900111), which asks for a page of open transactions.

    `after` is the field `after` in the response with the previous page, None for the first page.
    """

    group: str | None = text("producerGroup", default=None)
    topic: str | None = text("topic", default=None)
    after: int | None = int64("after", default=None)
    count_max: int | None = int32("maxMsgNums", default=None)


@response(Code.SLUICE_LIST_TRANSACTIONS)
class ListTransactionsResponse:
    """The header of the response to SLUICE_LIST_TRANSACTIONS (900111).

    The body has the transactions. `after` is None on the last page.
    """

    count: int = int32("count")
    after: int | None = int64("after", default=None)


@request(Code.SLUICE_RESOLVE_TRANSACTION)
class ResolveTransactionRequest:
    """The header of SLUICE_RESOLVE_TRANSACTION (900112).

    `outcome` is 8 for commit and 12 for rollback.
    """

    transaction_id: str = text("transactionId")
    outcome: int = int32("commitOrRollback")


@request(Code.SLUICE_FILTERED_LAG)
class FilteredLagRequest:
    """The header of SLUICE_FILTERED_LAG (900131).

    `topic` None means all topics that the group reads. If `expression` is given, the broker counts
    as if the group had subscribed to it.
    """

    group: str = text("consumerGroup")
    topic: str | None = text("topic", default=None)
    expression: str | None = text("subscription", default=None)
    kind: str | None = text("expressionType", default=None)


@request(Code.SLUICE_TRY_FILTER)
class TryFilterRequest(TopicRequest):
    """The header of SLUICE_TRY_FILTER (900132), which tries an expression on stored messages.

    The broker tries it on messages that were stored from `begin_ms` to `end_ms`: on at most
    `count_max`, the newest of each queue. If `group` is given, the broker compares the expression
    with the filter of that group.
    """

    expression: str = text("subscription")
    kind: str | None = text("expressionType", default=None)
    group: str | None = text("consumerGroup", default=None)
    begin_ms: int | None = int64("beginTimestamp", default=None)
    end_ms: int | None = int64("endTimestamp", default=None)
    count_max: int | None = int32("maxMsgNums", default=None)


# ----------------------------------------------------------------- name server (spec/namesrv.md)
@request(Code.GET_ROUTEINFO_BY_TOPIC)
class GetRouteRequest(TopicRequest):
    standard_json_only: bool | None = boolean("acceptStandardJsonOnly", default=None)
    zone_mode: str | None = text("__ZONE_MODE", default=None)
    zone: str | None = text("__ZONE_NAME", default=None)


@request(Code.DELETE_TOPIC_IN_NAMESRV)
class DeleteTopicInNameServerRequest(TopicRequest):
    cluster: str | None = text("clusterName", default=None)


@request(Code.GET_TOPICS_BY_CLUSTER)
class GetTopicsByClusterRequest:
    cluster: str = text("cluster")


@response(Code.GET_KV_CONFIG)
class GetKvResponse:
    value: str | None = text("value", default=None)


@request(Code.GET_KVLIST_BY_NAMESPACE)
class GetKvListRequest:
    namespace: str = text("namespace")


@request(Code.GET_KV_CONFIG, Code.DELETE_KV_CONFIG)
class KvRequest(GetKvListRequest):
    key: str = text("key")


@request(Code.PUT_KV_CONFIG)
class PutKvRequest(KvRequest):
    value: str = text("value")
