"""Declared headers: what stands in the extFields of each request and answer.

A header names its codes, and its fields their spelling on the wire, their type and by the lack of a
default that they are required (`declare.py`). `REQUEST_HEADERS` and
`RESPONSE_HEADERS` say which one belongs to which code; codes that are not there carry no typed
header.
"""

from collections.abc import Callable
from typing import Final, TypeVar, dataclass_transform

from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.declare import boolean, header_of, int32, int64, text

T = TypeVar("T")
REQUEST_HEADERS: Final[dict[int, type]] = {}
RESPONSE_HEADERS: Final[dict[int, type]] = {}
CLIENT_ID_FIELD: Final = "sluiceClientId"
"""extField in which a SluiceMQ client gives its client id with pulls and offsets.

The client sends its heartbeats over another connection, so the broker cannot tell by the connection
which member asks. RocketMQ's brokers ignore the field.
"""


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(text, int32, int64, boolean)
)
def request(*codes: Code, letters: str = "") -> Callable[[type[T]], type[T]]:
    """Make a class the header of these requests. `letters`: see `header_of`."""
    return header_of(REQUEST_HEADERS, codes, letters)


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(text, int32, int64, boolean)
)
def answer(*codes: Code) -> Callable[[type[T]], type[T]]:
    """Make a class the header of the answers to these requests."""
    return header_of(RESPONSE_HEADERS, codes)


# --------------------------------------------------- producers (spec/remoting.md §7.3, §7.6, §8)
@request(Code.SEND_MESSAGE, Code.SEND_REPLY_MESSAGE)
class SendMessageRequest:
    """Long names, as the Go client sends them."""

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
    Code.SEND_MESSAGE_V2, Code.SEND_BATCH_MESSAGE, Code.SEND_REPLY_MESSAGE_V2,
    letters="abcdefghijklmn",
)  # fmt: skip
class SendMessageRequestV2(SendMessageRequest):
    """The same fields in the same order, a letter each."""


BRIEF_FIELD: Final = "sluiceBrief"
"""SluiceMQ's own field of a batch: the answer has the id of the first message, not of all. Other
brokers ignore it."""


@answer(
    Code.SEND_MESSAGE, Code.SEND_MESSAGE_V2, Code.SEND_BATCH_MESSAGE, Code.SEND_REPLY_MESSAGE,
    Code.SEND_REPLY_MESSAGE_V2, Code.RECALL_MESSAGE,
)  # fmt: skip
class SendMessageResponse:
    """The Java client needs MSG_REGION's map to exist (spec §7.3)."""

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
    """`outcome` is 8 commit, 12 rollback, 0 unknown."""

    topic: str | None = text("topic", default=None)
    group: str = text("producerGroup")
    half_queue_offset: int = int64("tranStateTableOffset")
    physical_offset: int = int64("commitLogOffset")
    outcome: int = int32("commitOrRollback")
    is_check_answer: bool = boolean("fromTransactionCheck", default=False)
    unique_id: str = text("msgId")
    transaction_id: str | None = text("transactionId", default=None)
    broker: str | None = text("bname", default=None)


@request(Code.CHECK_TRANSACTION_STATE)
class CheckTransactionStateRequest:
    """One-way from the broker; the body is the half message in stored form."""

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
    """From the broker to the requester: a send's header and where it was stored."""

    born_host: str = text("bornHost")
    store_host: str = text("storeHost")
    store_time_ms: int = int64("storeTimestamp")


# -------------------------------------------------------- consumers (spec/remoting.md §7.4, §13)
PULL_COMMIT_OFFSET = 0x1
PULL_SUSPEND = 0x2
PULL_SUBSCRIPTION = 0x4
PULL_LITE = 0x10
"""Bits of a pull's sys_flag (spec §10)."""


@request(Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE)
class PullMessageRequest:
    """Our own are `bulk` (megabytes, not messages), `any_span` (matches however far apart) and
    `look` (one message as it lies; nothing changes for the group)."""

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
    look: bool | None = boolean("sluiceLook", default=None)


@answer(Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE)
class PullMessageResponse:
    """Present in 0, 19, 20 and 21; other codes carry none of it."""

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
    """The committed offset; `zero_if_not_found` False asks for 22 instead of 0."""

    group: str = text("consumerGroup")
    topic: str = text("topic")
    queue_id: int = int32("queueId")
    zero_if_not_found: bool | None = boolean("setZeroIfNotFound", default=None)
    broker: str | None = text("bname", default=None)


@answer(
    Code.QUERY_CONSUMER_OFFSET, Code.GET_MAX_OFFSET, Code.GET_MIN_OFFSET,
    Code.SEARCH_OFFSET_BY_TIMESTAMP,
)  # fmt: skip
class OffsetResponse:
    """Without the offset when there is none."""

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
    """`boundary` is `lower` or `upper` in any case; anything else means lower (spec §2)."""

    time_ms: int = int64("timestamp")
    boundary: str | None = text("boundaryType", default=None)


@answer(Code.GET_EARLIEST_MSG_STORETIME)
class GetEarliestStoreTimeResponse:
    """-1 when the queue is empty."""

    time_ms: int = int64("timestamp")


@answer(Code.HEART_BEAT)
class HeartbeatResponse:
    """A broker without heartbeat V2 leaves both out (spec §15)."""

    supports_v2: bool | None = boolean("IS_SUPPORT_HEART_BEAT_V2", default=None)
    subscription_changed: bool | None = boolean("IS_SUB_CHANGE", default=None)
    lanes: bool | None = boolean("sluiceLanes", default=None)
    """Ours alone, when asked for: members of a group may want different things."""


@request(Code.UNREGISTER_CLIENT)
class UnregisterClientRequest:
    client_id: str = text("clientID")
    producer_group: str | None = text("producerGroup", default=None)
    consumer_group: str | None = text("consumerGroup", default=None)


@request(
    Code.GET_CONSUMER_LIST_BY_GROUP, Code.GET_CONSUMER_CONNECTION_LIST,
    Code.NOTIFY_CONSUMER_IDS_CHANGED,
)  # fmt: skip
class ConsumerGroupRequest:
    """The last is one-way from the broker: balance again."""

    group: str = text("consumerGroup")


@request(Code.CONSUMER_SEND_MSG_BACK)
class SendBackRequest:
    """Deliver that message again later. `physical_offset` is the one in the commit log."""

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
    """By key, or by unique id when `is_unique_key` (times in ms). Newer clients say it
    by `index_type`: K (key), U (unique id) or T (tag)."""

    topic: str = text("topic")
    key: str = text("key")
    count_max: int = int32("maxNum")
    begin_time_ms: int = int64("beginTimestamp")
    end_time_ms: int = int64("endTimestamp")
    is_unique_key: bool | None = boolean("_UNIQUE_KEY_QUERY", default=None)
    index_type: str | None = text("indexType", default=None)


@answer(Code.QUERY_MESSAGE)
class QueryMessageResponse:
    index_time_ms: int = int64("indexLastUpdateTimestamp")
    index_physical_offset: int = int64("indexLastUpdatePhyoffset")


@request(Code.VIEW_MESSAGE_BY_ID)
class ViewMessageRequest:
    """The one message at a commit-log offset."""

    topic: str | None = text("topic", default=None)
    physical_offset: int = int64("offset")


# --------------------------------------------------------------------- tools (see spec/admin.md)
@request(Code.UPDATE_AND_CREATE_TOPIC)
class CreateTopicRequest:
    """`attributes` is the tools' text form `+k=v,-k`."""

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
    Code.DELETE_TOPIC_IN_BROKER, Code.GET_TOPIC_STATS_INFO, Code.QUERY_TOPIC_CONSUME_BY_WHO,
    Code.REGISTER_TOPIC_IN_NAMESRV,
)  # fmt: skip
class TopicRequest:
    topic: str = text("topic")


@request(Code.GET_ALL_TOPIC_CONFIG)
class GetAllTopicsRequest:
    """The paging fields are newer (spec/admin.md §1); an answer without its field is complete."""

    topic_sequence: int | None = int32("topicSeq", default=None)
    topic_count_max: int | None = int32("maxTopicNum", default=None)
    data_version: str | None = text("dataVersion", default=None)


@answer(Code.GET_ALL_TOPIC_CONFIG)
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


@answer(Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
class GetAllGroupsResponse:
    group_count: int | None = int32("totalGroupNum", default=None)


@request(Code.GET_SUBSCRIPTIONGROUP_CONFIG, Code.QUERY_TOPICS_BY_CONSUMER)
class GetGroupConfigRequest:
    group: str = text("group")


@request(Code.GET_CONSUME_STATS)
class GetConsumeStatsRequest:
    """Without a topic, all topics of the group; `topic_list` joins names by `;`."""

    group: str = text("consumerGroup")
    topic: str | None = text("topic", default=None)
    topic_list: str | None = text("topicList", default=None)


@request(Code.GET_PRODUCER_CONNECTION_LIST)
class GetProducerConnectionsRequest:
    group: str = text("producerGroup")


@answer(Code.GET_BROKER_CONFIG)
class GetBrokerConfigResponse:
    """The data version as JSON; the tools need it."""

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
    """Relayed to the client."""

    group: str = text("consumerGroup")
    client_id: str = text("clientId")
    stack_enable: bool = boolean("jstackEnable", default=False)


@request(Code.CONSUME_MESSAGE_DIRECTLY)
class ConsumeMessageDirectlyRequest:
    """Relayed to the client with the stored message as body."""

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
    """`groups_left_out`: names with commas between."""

    groups_left_out: str | None = text("filterGroups", default=None)
    compare_group: str | None = text("compareGroup", default=None)
    topic: str = text("topic")


@request(Code.QUERY_CONSUME_QUEUE)
class QueryConsumeQueueRequest(TopicRequest):
    """So many units of a queue from `offset` on."""

    queue_id: int = int32("queueId")
    offset: int = int64("index")
    count: int = int32("count")
    group: str | None = text("consumerGroup", default=None)


@request(Code.VIEW_BROKER_STATS_DATA)
class StatisticsRequest:
    """One count by its name and what it is of: `topic`, `topic@group`, or a cluster."""

    name: str = text("statsName")
    key: str = text("statsKey")


@request(Code.GET_BROKER_CONSUME_STATS)
class GetConsumeStatsOfBrokerRequest:
    """Only the groups that read in order, or all."""

    ordered: bool = boolean("isOrder", default=False)


@request(Code.UPDATE_AND_GET_GROUP_FORBIDDEN)
class GroupForbiddenRequest(TopicGroupRequest):
    """Without `readable` it only asks."""

    is_readable: bool | None = boolean("readable", default=None)


@request(Code.UPDATE_AND_CREATE_ACL_CONFIG)
class UpdateAccountRequest:
    """Create an account or change one. Lists are joined by commas."""

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


@answer(Code.GET_BROKER_CLUSTER_ACL_INFO)
class AccessVersionResponse:
    """Versions are JSON texts: the main file's, and each file's by its path."""

    version: str = text("version")
    all_versions: str = text("allAclFileVersion")
    broker: str = text("brokerName")
    address: str = text("brokerAddr")
    cluster: str = text("clusterName")


@request(Code.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG)
class UpdateWhiteAddressesRequest:
    """The new list, joined by commas, of the main file or of the one that is named."""

    addresses: str = text("globalWhiteAddrs")
    file: str | None = text("aclFileFullPath", default=None)


# ------------------------------------------------------------------------------- ours alone
@request(Code.SLUICE_LIST_DELAYED)
class ListDelayedRequest:
    """A page of what waits; `cursor` from the answer before, absent at first."""

    topic: str | None = text("topic", default=None)
    key: str | None = text("key", default=None)
    cursor: str | None = text("cursor", default=None)
    count_max: int | None = int32("maxMsgNums", default=None)


@answer(Code.SLUICE_LIST_DELAYED)
class ListDelayedResponse:
    """Without `cursor` there is no further page. The body lists the messages."""

    cursor: str | None = text("cursor", default=None)


@request(Code.SLUICE_CANCEL_DELAYED)
class CancelDelayedRequest:
    """`handle` of a listed message."""

    handle: str = text("handle")


@request(Code.SLUICE_LIST_TRANSACTIONS)
class ListTransactionsRequest:
    """A page of what is undecided; `after` from the answer before, absent at first."""

    group: str | None = text("producerGroup", default=None)
    topic: str | None = text("topic", default=None)
    after: int | None = int64("after", default=None)
    count_max: int | None = int32("maxMsgNums", default=None)


@answer(Code.SLUICE_LIST_TRANSACTIONS)
class ListTransactionsResponse:
    """Without `after` there is no further page. The body lists them."""

    count: int = int32("count")
    after: int | None = int64("after", default=None)


@request(Code.SLUICE_RESOLVE_TRANSACTION)
class ResolveTransactionRequest:
    """`outcome` is 8 commit, 12 rollback."""

    transaction_id: str = text("transactionId")
    outcome: int = int32("commitOrRollback")


@request(Code.SLUICE_FILTERED_LAG)
class FilteredLagRequest:
    """Of one topic, or of all that the group reads; with an expression, as if the group
    subscribed to it."""

    group: str = text("consumerGroup")
    topic: str | None = text("topic", default=None)
    expression: str | None = text("subscription", default=None)
    kind: str | None = text("expressionType", default=None)


@request(Code.SLUICE_TRY_FILTER)
class TryFilterRequest(TopicRequest):
    """Messages stored from `begin_ms` to `end_ms`, at most `count_max` of them, the newest
    of each queue; beside the filter of a group, when one is named."""

    expression: str = text("subscription")
    kind: str | None = text("expressionType", default=None)
    group: str | None = text("consumerGroup", default=None)
    begin_ms: int | None = int64("beginTimestamp", default=None)
    end_ms: int | None = int64("endTimestamp", default=None)
    count_max: int | None = int32("maxMsgNums", default=None)


@request(Code.SLUICE_COMMIT_EPOCH)
class CommitEpochRequest:
    """`step` is `prepare` (check what is staged and make it safe) or `commit`; `topics` are those
    that the staged messages go to, separated by commas: access rules look at them."""

    query: str = text("query")
    epoch: int = int64("epoch")
    step: str = text("step")
    topics: str = text("topics", default="")


@answer(Code.SLUICE_COMMIT_EPOCH)
class CommitEpochResponse:
    """`state` is one of checking, checked, publishing, published; the counts are of this broker's
    messages of the epoch. The body holds what was decided once that is safe."""

    state: str = text("state")
    broker: str = text("brokerName")
    messages: int = int64("messages", default=0)
    published: int = int64("published", default=0)
    staging_topic: str = text("stagingTopic")
    staging_queues: int = int32("stagingQueues")


# ----------------------------------------------------------------- name server (spec/namesrv.md)
@request(Code.GET_ROUTEINFO_BY_TOPIC)
class GetRouteRequest(TopicRequest):
    standard_json_only: bool | None = boolean("acceptStandardJsonOnly", default=None)
    zone_mode: str | None = text("__ZONE_MODE", default=None)
    zone: str | None = text("__ZONE_NAME", default=None)


@request(Code.UNREGISTER_BROKER, Code.QUERY_DATA_VERSION)
class BrokerRequest:
    broker: str = text("brokerName")
    address: str = text("brokerAddr")
    cluster: str = text("clusterName")
    broker_id: int = int64("brokerId")


@request(Code.REGISTER_BROKER)
class RegisterBrokerRequest(BrokerRequest):
    """`body_crc32` is 0 when there is nothing to check."""

    ha_address: str = text("haServerAddr")
    heartbeat_timeout_ms: int | None = int64("heartbeatTimeoutMillis", default=None)
    acting_master_enable: bool | None = boolean("enableActingMaster", default=None)
    compressed: bool = boolean("compressed", default=False)
    body_crc32: int = int32("bodyCrc32", default=0)
    zone: str | None = text("__ZONE_NAME", default=None)


@answer(Code.REGISTER_BROKER)
class RegisterBrokerResponse:
    """Both are set for a slave whose master lives."""

    ha_address: str | None = text("haServerAddr", default=None)
    master_address: str | None = text("masterAddr", default=None)


@answer(Code.QUERY_DATA_VERSION)
class QueryDataVersionResponse:
    changed: bool = boolean("changed")


@request(Code.DELETE_TOPIC_IN_NAMESRV)
class DeleteTopicInNameServerRequest(TopicRequest):
    cluster: str | None = text("clusterName", default=None)


@request(Code.GET_TOPICS_BY_CLUSTER)
class GetTopicsByClusterRequest:
    cluster: str = text("cluster")


@answer(Code.GET_KV_CONFIG)
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


@request(Code.WIPE_WRITE_PERM_OF_BROKER, Code.ADD_WRITE_PERM_OF_BROKER)
class WritePermissionRequest:
    broker: str = text("brokerName")


@answer(Code.WIPE_WRITE_PERM_OF_BROKER)
class WritePermissionWipedResponse:
    topic_count: int = int32("wipeTopicCount")


@answer(Code.ADD_WRITE_PERM_OF_BROKER)
class WritePermissionAddedResponse:
    topic_count: int = int32("addTopicCount")
