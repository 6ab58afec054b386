"""Classes and codecs of the JSON bodies of requests and responses.

The bodies are declared as `declare.py` explains. Bodies that servers also store in files are in
`tables.py`. Each codec is a pair of functions, `encode_x(value) -> bytes` and
`decode_x(data) -> value`. Decoders raise ProtocolError. Queues that are keys of maps are written as
unquoted objects, as fastjson does (spec/remoting.md §5).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from sluicemq.errors import ProtocolError
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import BrokerData, MessageQueue, QueueData, TopicRoute
from sluicemq.wire import fastjson
from sluicemq.wire.declare import (
    OBJECT_CODECS,
    body,
    body_codec,
    declare_object,
    json_field,
    member_codec,
    queue_from,
    queue_object,
)
from sluicemq.wire.fastjson import as_list, as_object, take_text

CONSUME_ACTIVELY: Final = "CONSUME_ACTIVELY"
CONSUME_PASSIVELY: Final = "CONSUME_PASSIVELY"
CONSUME_POP: Final = "CONSUME_POP"
"""The values of `ConsumerData.consume_type`: pull, push and pop consumers."""
CLUSTERING: Final = "CLUSTERING"
BROADCASTING: Final = "BROADCASTING"
FROM_LAST_OFFSET: Final = "CONSUME_FROM_LAST_OFFSET"
FROM_FIRST_OFFSET: Final = "CONSUME_FROM_FIRST_OFFSET"
FROM_TIMESTAMP: Final = "CONSUME_FROM_TIMESTAMP"
TOPICS_SORTED_MAX: Final = 10_000
"""The most topics that `encode_topic_list` sorts."""
STANDARD_JSON_VERSION_MIN: Final = 401
"""The first version, V4_9_4, whose clients read quoted broker ids (spec/remoting.md §4)."""

# ------------------------------------------------------------ clients (spec/remoting.md §15)

declare_object(
    Subscription,
    topic="topic",
    expression="subString",
    kind="expressionType",
    tags="tagsSet",
    codes="codeSet",
    version="subVersion",
    constants={"classFilterMode": False},
)
# Tags and codes are what the client sent. Go clients leave them empty at times, so a broker that
# needs them parses the expression.


@body
class ConsumerData:
    """One consumer group in a heartbeat of a client."""

    group: str = json_field("groupName")
    consume_type: str = json_field("consumeType", default=CONSUME_PASSIVELY)
    message_model: str = json_field("messageModel", default=CLUSTERING)
    consume_from_where: str = json_field("consumeFromWhere", default=FROM_LAST_OFFSET)
    subscriptions: tuple[Subscription, ...] = json_field("subscriptionDataSet", default=())
    unit_mode: bool = json_field("unitMode", default=False)


def _read_producer_groups(json_list: Any, list_name: str) -> tuple[str, ...]:
    """Return the names in a list of producer groups, which are objects with one member."""
    groups = [as_object(json_group, list_name) for json_group in as_list(json_list, list_name)]
    return tuple(take_text(group, "groupName") for group in groups)


@body
class Heartbeat:
    """The body of HEART_BEAT (34).

    If `without_subscriptions` is set (heartbeat V2), the broker keeps the subscriptions that it
    has. Heartbeats of Go clients lack the last two fields.
    """

    client_id: str = json_field("clientID")
    producer_groups: tuple[str, ...] = json_field(
        "producerDataSet",
        default=(),
        read=_read_producer_groups,
        write=lambda groups: [{"groupName": group} for group in groups],
    )
    consumers: tuple[ConsumerData, ...] = json_field("consumerDataSet", default=())
    fingerprint: int = json_field("heartbeatFingerprint", default=0)
    without_subscriptions: bool = json_field("withoutSub", default=False)


@body
class LockBatch:
    """The body of LOCK_BATCH_MQ (41) and UNLOCK_BATCH_MQ (42): queues for one client only.

    Bodies of Go clients lack the last field.
    """

    group: str = json_field("consumerGroup")
    client_id: str = json_field("clientId")
    queues: tuple[MessageQueue, ...] = json_field("mqSet")
    only_this_broker: bool = json_field("onlyThisBroker", default=False)


@body
class CheckClientConfig:
    """The body of CHECK_CLIENT_CONFIG (46), which asks whether a subscription is valid."""

    client_id: str = json_field("clientId")
    group: str = json_field("group")
    subscription: Subscription | None = json_field("subscriptionData")
    namespace: str | None = json_field(
        "namespace", default=None, read=lambda value, _what: fastjson.to_text(value) or None
    )


@body
class Connection:
    """One client of a group, in the responses that list the connections of a group."""

    client_id: str = json_field("clientId")
    address: str = json_field("clientAddr")
    language: str = json_field("language")
    version: int = json_field("version")


@body
class ConsumerConnections:
    """The response to GET_CONSUMER_CONNECTION_LIST (203): a group's members and subscriptions.

    The response to GET_PRODUCER_CONNECTION_LIST (204) only has the connections.
    """

    connections: tuple[Connection, ...] = json_field("connectionSet")
    consume_type: str = json_field("consumeType")
    message_model: str = json_field("messageModel")
    consume_from_where: str = json_field("consumeFromWhere")
    subscriptions: Mapping[str, Subscription] = json_field("subscriptionTable")


@body
class AssignmentQuery:
    """The body of QUERY_ASSIGNMENT (400), which asks for the queues a client should consume.

    `strategy` is the name of an allocation strategy in RocketMQ's Java client.
    """

    topic: str = json_field("topic")
    group: str = json_field("consumerGroup")
    client_id: str = json_field("clientId")
    strategy: str = json_field("strategyName")
    message_model: str = json_field("messageModel", default=CLUSTERING)


@body
class Assignment:
    """A queue that a client should consume, and `mode`, PULL or POP.

    Queue id -1 means all queues of the broker.
    """

    queue: MessageQueue = json_field("messageQueue")
    mode: str = json_field("mode")


@body
class AssignmentResponse:
    """The response to QUERY_ASSIGNMENT (400).

    None means that the client should keep its present assignments.
    """

    assignments: tuple[Assignment, ...] | None = json_field("messageQueueAssignments", default=None)


encode_heartbeat, decode_heartbeat = body_codec(Heartbeat, "heartbeat")
encode_assignment_query, decode_assignment_query = body_codec(
    AssignmentQuery, "query of an assignment"
)
encode_assignments, decode_assignments = body_codec(AssignmentResponse, "assignment")
encode_lock_batch, decode_lock_batch = body_codec(LockBatch, "lock request")
encode_check_client_config, decode_check_client_config = body_codec(
    CheckClientConfig, "client configuration"
)
encode_consumer_connections, decode_consumer_connections = body_codec(
    ConsumerConnections, "connection list"
)
encode_producer_connections: Callable[[Iterable[Connection]], bytes]
encode_producer_connections, decode_producer_connections = member_codec(
    "connectionSet", list[Connection], "connection list"
)
encode_consumer_list: Callable[[Iterable[str]], bytes]
encode_consumer_list, decode_consumer_list = member_codec(
    "consumerIdList", tuple[str, ...], "consumer list"
)
encode_locked_queues: Callable[[Iterable[MessageQueue]], bytes]
encode_locked_queues, decode_locked_queues = member_codec(
    "lockOKMQSet", tuple[MessageQueue, ...], "lock response"
)

# ------------------------------------------------- consumers at work: 307, 309 (spec/admin.md §4)


class ConsumeResult(StrEnum):
    """The result of a handler that was called for CONSUME_MESSAGE_DIRECTLY (309)."""

    SUCCESS = "CR_SUCCESS"
    LATER = "CR_LATER"
    ROLLBACK = "CR_ROLLBACK"
    COMMIT = "CR_COMMIT"
    EXCEPTION = "CR_THROW_EXCEPTION"
    NOTHING = "CR_RETURN_NULL"


@body
class DirectResult:
    """The response to CONSUME_MESSAGE_DIRECTLY (309).

    `result` is a ConsumeResult, or another string from a newer client.
    """

    result: str = json_field("consumeResult")
    remark: str | None = json_field("remark", default=None)
    spent_ms: int = json_field("spentTimeMills", default=0)
    is_ordered: bool = json_field("order", default=False)
    auto_commit: bool = json_field("autoCommit", default=True)


@body
class QueueState:
    """A queue that a consumer reads: its committed offset and its cached messages.

    Times are ms since 1970. 0 means never.
    """

    commit_offset: int = json_field("commitOffset")
    cached_count: int = json_field("cachedMsgCount", default=0)
    cached_min: int = json_field("cachedMsgMinOffset", default=0)
    cached_max: int = json_field("cachedMsgMaxOffset", default=0)
    cached_mib: int = json_field("cachedMsgSizeInMiB", default=0)
    locked: bool = json_field("locked", default=False)
    dropped: bool = json_field("droped", default=False)  # RocketMQ's spelling
    last_lock_ms: int = json_field("lastLockTimestamp", default=0)
    last_pull_ms: int = json_field("lastPullTimestamp", default=0)
    last_consume_ms: int = json_field("lastConsumeTimestamp", default=0)


@body
class TopicRates:
    """Recent statistics of a consumer for one topic.

    Times are averages in ms. `failures` are the failures in the last hour.
    """

    pull_ms: float = json_field("pullRT", default=0.0)
    pulls_per_second: float = json_field("pullTPS", default=0.0)
    consume_ms: float = json_field("consumeRT", default=0.0)
    done_per_second: float = json_field("consumeOKTPS", default=0.0)
    failed_per_second: float = json_field("consumeFailedTPS", default=0.0)
    failures: int = json_field("consumeFailedMsgs", default=0)


OBJECT_CODECS[QueueState].constants |= dict.fromkeys(
    ("transactionMsgCount", "transactionMsgMaxOffset", "transactionMsgMinOffset", "tryUnlockTimes"),
    0,
)


def _read_queue_states(json_map: Any, map_name: str) -> dict[MessageQueue, QueueState]:
    """Return the states of a consumer's queues from a JSON object whose keys are queues.

    An item is left out if it is invalid. It is also left out if its key is a reference (`$ref`)
    that could not be resolved, because some Java consumers send such keys.
    """
    states_by_queue = {}
    for queue_key, json_state in as_object(json_map, map_name).items():
        try:
            states_by_queue[queue_from(queue_key)] = OBJECT_CODECS[QueueState].read(json_state)
        except ProtocolError:
            continue
    return states_by_queue


@body
class RunningInfo:
    """The response to GET_CONSUMER_RUNNING_INFO (307): the configuration and state of a consumer.

    `stack` contains stack traces if the request asked for them.
    """

    properties: Mapping[str, str] = json_field("properties")
    subscriptions: tuple[Subscription, ...] = json_field("subscriptionSet", default=())
    queues: Mapping[MessageQueue, QueueState] = json_field(
        "mqTable", default_factory=dict, read=_read_queue_states
    )
    rates: Mapping[str, TopicRates] = json_field("statusTable", default_factory=dict)
    stack: str | None = json_field("jstack", default=None)
    notes: Mapping[str, str] = json_field("userConsumerInfo", default_factory=dict)


OBJECT_CODECS[RunningInfo].constants["mqPopTable"] = {}
encode_direct_result, decode_direct_result = body_codec(DirectResult, "result of a message")
encode_running_info, decode_running_info = body_codec(RunningInfo, "running information")

# ------------------------------------------- offsets and queues: 202, 208, 220-223, 303, 308, 321


@body
class QueueStats:
    """The offsets of a queue, and when its last message was stored.

    The time is in ms since 1970, 0 for a queue without messages.
    """

    offset_min: int = json_field("minOffset")
    offset_max: int = json_field("maxOffset")
    last_time_ms: int = json_field("lastUpdateTimestamp")


@body
class TopicStats:
    """The response to GET_TOPIC_STATS_INFO (202)."""

    queues: Mapping[MessageQueue, QueueStats] = json_field("offsetTable")
    puts_per_second: float = json_field("topicPutTps", default=0.0)


def _none_for_zero(count: int) -> int | None:
    """Return a number, or None for 0, so that the field is left out."""
    return count or None


@body
class QueueProgress:
    """The progress of a group in one queue.

    `last_time_ms` is when the last consumed message was stored. The last four fields exist only in
    SluiceMQ. `messages_at_risk` counts the unread messages that are deleted with the next files,
    from `loss_time_ms` on. `in_flight` counts the popped messages that are not acknowledged.
    `extra` counts the unfinished messages below `consumer_offset`; it is negative if messages from
    there on are finished.
    """

    broker_offset: int = json_field("brokerOffset")
    consumer_offset: int = json_field("consumerOffset")
    last_time_ms: int = json_field("lastTimestamp", default=0)
    pull_offset: int = json_field("pullOffset", default=0)
    messages_at_risk: int = json_field("sluiceMessagesAtRisk", default=0, write=_none_for_zero)
    loss_time_ms: int = json_field("sluiceLossTime", default=0, write=_none_for_zero)
    in_flight: int = json_field("sluiceInFlight", default=0, write=_none_for_zero)
    extra: int = json_field("sluiceExtra", default=0, write=_none_for_zero)


@body
class ConsumeStats:
    """The response to GET_CONSUME_STATS (208)."""

    queues: Mapping[MessageQueue, QueueProgress] = json_field("offsetTable")
    consumes_per_second: float = json_field("consumeTps", default=0.0)


@body
class ConsumeStatsOfBroker:
    """The response to GET_BROKER_CONSUME_STATS (317): for each group the progress in its topics."""

    address: str = json_field("brokerAddr")
    stats: list[dict[str, list[ConsumeStats]]] = json_field("consumeStatsList")
    behind: int = json_field("totalDiff")
    in_flight: int = json_field("totalInflightDiff")


@body
class TimeSpan:
    """The times of one queue for a group, in the response to QUERY_CONSUME_TIME_SPAN (303).

    They are the store times of the first, last and last consumed message, in ms since 1970.
    `delay_ms` is the time by which the group is behind.
    """

    queue: MessageQueue = json_field("messageQueue")
    first_ms: int = json_field("minTimeStamp")
    last_ms: int = json_field("maxTimeStamp")
    consumed_ms: int = json_field("consumeTimeStamp")
    delay_ms: int = json_field("delayTime")


@body
class QueueUnit:
    """One unit of a consume queue, and whether the filter of a group matches its message."""

    physical_offset: int = json_field("physicOffset")
    size_bytes: int = json_field("physicSize")
    tag_code: int = json_field("tagsCode")
    is_wanted: bool = json_field("eval", default=True, absent=False)
    remark: str | None = json_field("msg", default=None)


@body
class QueueUnits:
    """The response to QUERY_CONSUME_QUEUE (321)."""

    offset_min: int = json_field("minQueueIndex")
    offset_max: int = json_field("maxQueueIndex")
    units: Sequence[QueueUnit] = json_field("queueData")
    subscription: Subscription | None = json_field("subscriptionData", default=None)
    filter_text: str | None = json_field("filterData", default=None)


Offsets = dict[MessageQueue, int]
subscription_object = OBJECT_CODECS[Subscription].write
encode_topic_stats, decode_topic_stats = body_codec(TopicStats, "topic statistics")
encode_consume_stats, decode_consume_stats = body_codec(ConsumeStats, "consume statistics")
decode_consume_stats_list = member_codec(
    "consumeStatsList", list[dict[str, list[ConsumeStats]]], "consume statistics"
)[1]
encode_consume_stats_of_broker = body_codec(ConsumeStatsOfBroker, "consume statistics")[0]
encode_time_spans, decode_time_spans = member_codec(
    "consumeTimeSpanSet", list[TimeSpan], "time spans"
)
encode_queue_units, decode_queue_units = body_codec(QueueUnits, "queue")
encode_correction_offsets: Callable[[Mapping[int, int]], bytes]
encode_correction_offsets, decode_correction_offsets = member_codec(
    "correctionOffsets", dict[int, int], "correction offsets"
)
# The body of RESET_CONSUMER_CLIENT_OFFSET (220) and of the response to
# INVOKE_BROKER_TO_RESET_OFFSET (222). Its keys are queues, which Java and Go clients can read.
encode_queue_offsets: Callable[[Mapping[MessageQueue, int]], bytes]
encode_queue_offsets, decode_queue_offsets = member_codec(
    "offsetTable", dict[MessageQueue, int], "offsets"
)


def encode_queue_offset_list(offsets: Mapping[MessageQueue, int]) -> bytes:
    """Encode the body of RESET_CONSUMER_CLIENT_OFFSET (220) for C++ clients.

    These read a list of queues with offsets, not a map (spec/remoting.md §7.6).
    """
    return fastjson.dumps(
        {"offsetTable": [{**queue_object(q), "offset": offset} for q, offset in offsets.items()]}
    )


# The offsets of one client in GET_CONSUMER_STATUS_FROM_CLIENT (221), and of all clients in
# INVOKE_BROKER_TO_GET_CONSUMER_STATUS (223). Both bodies have both tables, one of them empty.
encode_client_offsets: Callable[[Offsets], bytes]
encode_client_offsets, decode_client_offsets = member_codec(
    "messageQueueTable", Offsets, "status of consumers", consumerTable={}
)
encode_offsets_by_client: Callable[[Mapping[str, Offsets]], bytes]
encode_offsets_by_client, decode_offsets_by_client = member_codec(
    "consumerTable", dict[str, Offsets], "status of consumers", messageQueueTable={}
)

# --------------------------------------------------------------- name server (spec/namesrv.md)

_BROKER = declare_object(
    BrokerData,
    broker="brokerName",
    cluster="cluster",
    addresses=json_field(
        "brokerAddrs", write=lambda ids: {str(number): it for number, it in ids.items()}
    ),
    acting_master_enable="enableActingMaster",
    zone="zoneName",
)
declare_object(
    QueueData,
    broker="brokerName",
    read_queues="readQueueNums",
    write_queues="writeQueueNums",
    perm="perm",
    sys_flag="topicSysFlag",
)
_ROUTE = declare_object(
    TopicRoute,
    brokers="brokerDatas",
    queues="queueDatas",
    order_topic_config=json_field(
        "orderTopicConf",
        read=lambda value, _what: fastjson.to_text(value) or None,
        write=lambda value: value or None,
    ),
    constants={"filterServerTable": {}},
)


def _broker_with_integer_ids(broker: BrokerData) -> dict[str, Any]:
    """Return a broker as a JSON object in which broker ids, the keys of addresses, are not quoted.

    Old clients require this, and all clients do in the response to GET_BROKER_CLUSTER_INFO (106)
    (spec/namesrv.md §6).
    """
    return {**_BROKER.write(broker), "brokerAddrs": dict(broker.addresses)}


@body
class ClusterInfo:
    """The response to GET_BROKER_CLUSTER_INFO (106).

    It has all brokers by name, and for each cluster the names of its brokers.
    """

    brokers: Mapping[str, BrokerData] = json_field(
        "brokerAddrTable",
        default_factory=dict,
        write=lambda brokers: {
            name: _broker_with_integer_ids(broker) for name, broker in brokers.items()
        },
    )
    clusters: Mapping[str, tuple[str, ...]] = json_field("clusterAddrTable", default_factory=dict)


encode_cluster_info, decode_cluster_info = body_codec(ClusterInfo, "cluster info")
decode_topic_route = body_codec(TopicRoute, "route")[1]
decode_broker_member_group = member_codec("brokerMemberGroup", BrokerData, "broker member group")[1]


def encode_topic_route(route: TopicRoute, *, standard: bool = True) -> bytes:
    """Encode the response to GET_ROUTEINFO_BY_TOPIC (105).

    If `standard` is False, broker ids are not quoted, as old clients require. Such a body is no
    standard JSON, since the names of JSON members are strings.
    """
    if standard:
        return fastjson.dumps(_ROUTE.write(route))
    return fastjson.dumps(route_object_with_integer_ids(route))


def route_object_with_integer_ids(route: TopicRoute) -> dict[str, Any]:
    """Return a route as a JSON object whose broker ids are integers, not strings.

    The ids are keys of `brokerAddrs` in each item of `brokerDatas`. `fastjson.dumps` does not quote
    integer keys.
    """
    route_object = _ROUTE.write(route)
    brokers = [_broker_with_integer_ids(broker) for broker in route.brokers]
    return {**route_object, "brokerDatas": brokers}


def encode_broker_member_group(cluster: str, broker: str, addresses: Mapping[int, str]) -> bytes:
    """Encode the response to GET_BROKER_MEMBER_GROUP (901).

    `addresses` maps the broker ids of the replicas to their addresses.
    """
    member_group = {"brokerAddrs": dict(addresses), "brokerName": broker, "cluster": cluster}
    return fastjson.dumps({"brokerMemberGroup": member_group})


def encode_topic_list(topics: Iterable[str], broker_address: str | None = None) -> bytes:
    """Encode a response that is a list of topics.

    It belongs to GET_ALL_TOPIC_LIST_FROM_NAMESERVER (206), GET_TOPICS_BY_CLUSTER (224),
    GET_SYSTEM_TOPIC_LIST_FROM_NS (304) and others. Only 304 has a `broker_address`. Up to
    TOPICS_SORTED_MAX topics are sorted. Sorting more would take longer than encoding them.
    """
    names = list(topics)
    if len(names) <= TOPICS_SORTED_MAX:
        names.sort()
    return fastjson.dumps({"brokerAddr": broker_address, "topicList": names})


def encode_group_list(groups: Iterable[str]) -> bytes:
    """Encode the response to QUERY_TOPIC_CONSUME_BY_WHO (300), a sorted list of groups."""
    return fastjson.dumps({"groupList": sorted(groups)})


decode_topic_list = member_codec("topicList", tuple[str, ...], "topic list")[1]
decode_group_list = member_codec("groupList", tuple[str, ...], "group list")[1]
encode_kv_table: Callable[[Mapping[str, str]], bytes]
encode_kv_table, decode_kv_table = member_codec("table", dict[str, str], "table")

# ----------------------------------------------------------------------- requests of SluiceMQ


@body
class WaitingMessage:
    """A delayed or timed message that is not delivered yet, listed by SLUICE_LIST_DELAYED (900101).

    `level` is its delay level, 0 for a timed message. Times are ms since 1970. `handle` is what
    SLUICE_CANCEL_DELAYED (900102) recalls it by.
    """

    topic: str = json_field("topic")
    queue_id: int = json_field("queueId")
    unique_id: str = json_field("uniqKey")
    keys: str = json_field("keys")
    tag: str = json_field("tag")
    level: int = json_field("level")
    due_ms: int = json_field("deliverTime")
    stored_ms: int = json_field("storeTime")
    body_bytes: int = json_field("bodySize")
    handle: str = json_field("handle")


@body
class OpenTransaction:
    """A transaction that is not decided, listed by SLUICE_LIST_TRANSACTIONS (900111).

    Times are ms since 1970. `asked_client_address` is the address of the client to which the last
    transaction check was sent and which has not answered; "" means that there is none.
    """

    transaction_id: str = json_field("transactionId")
    group: str = json_field("producerGroup")
    topic: str = json_field("topic")
    queue_id: int = json_field("queueId")
    keys: str = json_field("keys")
    tag: str = json_field("tag")
    began_ms: int = json_field("beginTime")
    checks: int = json_field("checkTimes")
    next_check_ms: int = json_field("nextCheckTime")
    asked_client_address: str = json_field("asked")
    half_queue_offset: int = json_field("tranStateTableOffset")
    physical_offset: int = json_field("commitLogOffset")
    body_bytes: int = json_field("bodySize")


@body
class QueueMatching:
    """The filtered lag of a group in one queue.

    `committed` is the committed offset, -1 if there is none. `matching` is the number of matching
    messages from there to `offset_max`, None if the subscription is unknown. `eta_ms` is the time
    until no matching message is left at the present rate, in ms; None means never or unknown.
    `in_flight` counts the popped messages that are not acknowledged. `extra` counts the unfinished
    messages below `committed`; it is negative if messages from there on are finished.
    """

    queue_id: int = json_field("queueId")
    committed: int = json_field("committed")
    offset_min: int = json_field("minOffset")
    offset_max: int = json_field("maxOffset")
    matching: int | None = json_field("matching")
    eta_ms: int | None = json_field("eta", default=None)
    in_flight: int = json_field("inFlight", default=0)
    extra: int = json_field("extra", default=0)


@body
class InFlightMessage:
    """A message in flight, listed by SLUICE_IN_FLIGHT (900134).

    A group has popped it, and has not acknowledged it. `popped_ms` is the time of the pop, and
    `visible_ms` the time when the message becomes visible again, both in ms since 1970. `client_id`
    is "" if it is unknown. `delivery_count` is how often the message was delivered.
    """

    topic: str = json_field("topic")
    queue_id: int = json_field("queueId")
    queue_offset: int = json_field("queueOffset")
    popped_ms: int = json_field("popTime")
    visible_ms: int = json_field("visibleTime")
    client_id: str = json_field("clientId")
    delivery_count: int = json_field("times")


@body
class FilterFailure:
    """A failed evaluation of a filter: the queue and offset of the message, and the error."""

    queue_id: int = json_field("queueId")
    offset: int = json_field("queueOffset")
    text: str = json_field("text")


@body
class LaneMatching:
    """One lane of a group: its subscription, its members, and its filtered lag in each queue.

    `expression` is "" if the topic is the retry topic of the group.
    """

    lane: str = json_field("lane")
    kind: str = json_field("expressionType")
    expression: str = json_field("subscription")
    client_ids: tuple[str, ...] = json_field("clientIds")
    queues: tuple[QueueMatching, ...] = json_field("queues")


@body
class GroupMatching:
    """The filtered lag of a group for a topic on one broker, from SLUICE_FILTERED_LAG (900131).

    `expression` is None if the broker does not know the subscription of the group. The counters
    `matched`, `filtered` and `errors` begin when the broker starts.
    """

    topic: str = json_field("topic")
    kind: str = json_field("expressionType")
    expression: str | None = json_field("subscription")
    queues: tuple[QueueMatching, ...] = json_field("queues")
    matched: int = json_field("matched", default=0)
    filtered: int = json_field("filtered", default=0)
    errors: Mapping[str, int] = json_field("errors", default_factory=dict)
    failures: tuple[FilterFailure, ...] = json_field("failures", default=())
    lanes: tuple[LaneMatching, ...] = json_field("lanes", default=())
    """The lanes of the group. With lanes, `committed` of a queue is the minimum of all lanes, and
    `matching` is their sum."""


encode_waiting, decode_waiting = member_codec(
    "messages", list[WaitingMessage], "list of delayed messages"
)
encode_open_transactions, decode_open_transactions = member_codec(
    "transactions", list[OpenTransaction], "list of transactions"
)
encode_in_flight, decode_in_flight = member_codec(
    "messages", list[InFlightMessage], "list of messages in flight"
)
encode_group_matching, decode_group_matching = member_codec(
    "topics", list[GroupMatching], "filtered lag of a group"
)
