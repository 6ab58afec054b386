"""JSON bodies, as declared tables (`declare.py`); what servers keep in files is in `tables.py`.

Every pair is `encode_x(value) -> bytes` and `decode_x(data) -> value`; decoding raises
ProtocolError. Queues that are keys of maps are raw objects, as fastjson writes them (spec §5).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from sluicemq.errors import ProtocolError
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import BrokerData, MessageQueue, QueueData, TopicRoute
from sluicemq.wire import fastjson
from sluicemq.wire.declare import (
    FORMS,
    as_list,
    as_object,
    body,
    body_codec,
    form,
    json,
    member_codec,
    queue_from,
    queue_object,
    take_text,
)

CONSUME_ACTIVELY: Final = "CONSUME_ACTIVELY"
CONSUME_PASSIVELY: Final = "CONSUME_PASSIVELY"
CONSUME_POP: Final = "CONSUME_POP"
"""Kinds of consumers: pull, push, pop."""
CLUSTERING: Final = "CLUSTERING"
BROADCASTING: Final = "BROADCASTING"
FROM_LAST_OFFSET: Final = "CONSUME_FROM_LAST_OFFSET"
FROM_FIRST_OFFSET: Final = "CONSUME_FROM_FIRST_OFFSET"
FROM_TIMESTAMP: Final = "CONSUME_FROM_TIMESTAMP"
SORTED_MAX: Final = 10_000
STANDARD_JSON_VERSION_MIN: Final = 401
"""V4_9_4: from this version on a client reads quoted broker ids (spec/remoting.md §4)."""

# ------------------------------------------------------------ clients (spec/remoting.md §15)

form(
    Subscription,
    topic="topic",
    expression="subString",
    kind="expressionType",
    tags="tagsSet",
    codes="codeSet",
    version="subVersion",
    constants={"classFilterMode": False},
)
# Tags and codes are as the client says: Go leaves them empty at times, so a broker that needs them
# parses the expression.


@body
class ConsumerData:
    """One consumer group of a client."""

    group: str = json("groupName")
    consume_type: str = json("consumeType", default=CONSUME_PASSIVELY)
    message_model: str = json("messageModel", default=CLUSTERING)
    consume_from_where: str = json("consumeFromWhere", default=FROM_LAST_OFFSET)
    subscriptions: tuple[Subscription, ...] = json("subscriptionDataSet", default=())
    unit_mode: bool = json("unitMode", default=False)


@body
class Heartbeat:
    """34's body. With `without_subscriptions` the broker keeps those it has (heartbeat V2); Go's
    lacks the last two fields."""

    client_id: str = json("clientID")
    producer_groups: tuple[str, ...] = json(
        "producerDataSet",
        default=(),
        read=lambda value, what: tuple(
            take_text(as_object(one, what), "groupName") for one in as_list(value, what)
        ),
        write=lambda groups: [{"groupName": group} for group in groups],
    )
    consumers: tuple[ConsumerData, ...] = json("consumerDataSet", default=())
    fingerprint: int = json("heartbeatFingerprint", default=0)
    without_subscriptions: bool = json("withoutSub", default=False)


@body
class LockBatch:
    """41's and 42's body: these queues for this client alone. Go's lacks the last field."""

    group: str = json("consumerGroup")
    client_id: str = json("clientId")
    queues: tuple[MessageQueue, ...] = json("mqSet")
    only_this_broker: bool = json("onlyThisBroker", default=False)


@body
class CheckClientConfig:
    """46's body: can this subscription be served?"""

    client_id: str = json("clientId")
    group: str = json("group")
    subscription: Subscription | None = json("subscriptionData")
    namespace: str | None = json(
        "namespace", default=None, read=lambda value, _what: fastjson.text(value) or None
    )


@body
class Connection:
    """One client of a group, as 203 and 204 show it."""

    client_id: str = json("clientId")
    address: str = json("clientAddr")
    language: str = json("language")
    version: int = json("version")


@body
class ConsumerConnections:
    """203's answer: who is there, and with which subscriptions. 204's is one without."""

    connections: tuple[Connection, ...] = json("connectionSet")
    consume_type: str = json("consumeType")
    message_model: str = json("messageModel")
    consume_from_where: str = json("consumeFromWhere")
    subscriptions: Mapping[str, Subscription] = json("subscriptionTable")


@body
class AssignmentQuery:
    """400's body: what is a client of the group to read of the topic? Its strategy is one of
    Java's names."""

    topic: str = json("topic")
    group: str = json("consumerGroup")
    client_id: str = json("clientId")
    strategy: str = json("strategyName")
    message_model: str = json("messageModel", default=CLUSTERING)


@body
class Assignment:
    """A queue to read by PULL or by POP; -1 is any queue of its broker."""

    queue: MessageQueue = json("messageQueue")
    mode: str = json("mode")


@body
class AssignmentAnswer:
    """400's answer; None is to keep what one has."""

    found: tuple[Assignment, ...] | None = json("messageQueueAssignments", default=None)


encode_heartbeat, decode_heartbeat = body_codec(Heartbeat, "heartbeat")
encode_assignment_query, decode_assignment_query = body_codec(AssignmentQuery, "query of a share")
encode_assignments, decode_assignments = body_codec(AssignmentAnswer, "share")
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
    "lockOKMQSet", tuple[MessageQueue, ...], "lock answer"
)

# ------------------------------------------------- consumers at work: 307, 309 (spec/admin.md §4)


class ConsumeResult(StrEnum):
    """How a message that was handled on request (309) went."""

    SUCCESS = "CR_SUCCESS"
    LATER = "CR_LATER"
    ROLLBACK = "CR_ROLLBACK"
    COMMIT = "CR_COMMIT"
    EXCEPTION = "CR_THROW_EXCEPTION"
    NOTHING = "CR_RETURN_NULL"


@body
class DirectResult:
    """309's answer. `result` is a ConsumeResult, or another word of a newer client."""

    result: str = json("consumeResult")
    remark: str | None = json("remark", default=None)
    spent_ms: int = json("spentTimeMills", default=0)
    is_ordered: bool = json("order", default=False)
    auto_commit: bool = json("autoCommit", default=True)


@body
class QueueState:
    """One queue that a consumer reads: what it holds and has committed. Times are ms since 1970, 0
    for never."""

    commit_offset: int = json("commitOffset")
    cached_count: int = json("cachedMsgCount", default=0)
    cached_min: int = json("cachedMsgMinOffset", default=0)
    cached_max: int = json("cachedMsgMaxOffset", default=0)
    cached_mib: int = json("cachedMsgSizeInMiB", default=0)
    locked: bool = json("locked", default=False)
    dropped: bool = json("droped", default=False)  # RocketMQ's spelling
    last_lock_ms: int = json("lastLockTimestamp", default=0)
    last_pull_ms: int = json("lastPullTimestamp", default=0)
    last_consume_ms: int = json("lastConsumeTimestamp", default=0)


@body
class TopicRates:
    """What a consumer did with a topic lately: times in ms, rates a second, failures an hour."""

    pull_ms: float = json("pullRT", default=0.0)
    pulls_per_second: float = json("pullTPS", default=0.0)
    consume_ms: float = json("consumeRT", default=0.0)
    done_per_second: float = json("consumeOKTPS", default=0.0)
    failed_per_second: float = json("consumeFailedTPS", default=0.0)
    failures: int = json("consumeFailedMsgs", default=0)


FORMS[QueueState].constants |= dict.fromkeys(
    ("transactionMsgCount", "transactionMsgMaxOffset", "transactionMsgMinOffset", "tryUnlockTimes"),
    0,
)


def _states_from(value: Any, what: str) -> dict[MessageQueue, QueueState]:
    """A Java consumer may have `$ref`s as keys, which `fastjson.loads` resolves where it can; a
    queue that stays unknown is left out."""
    found = {}
    for key, item in as_object(value, what).items():
        try:
            found[queue_from(key)] = FORMS[QueueState].read(item)
        except ProtocolError:
            continue
    return found


@body
class RunningInfo:
    """307's answer: what a consumer is and does. `stack` only when it was asked for."""

    properties: Mapping[str, str] = json("properties")
    subscriptions: tuple[Subscription, ...] = json("subscriptionSet", default=())
    queues: Mapping[MessageQueue, QueueState] = json(
        "mqTable", default_factory=dict, read=_states_from
    )
    rates: Mapping[str, TopicRates] = json("statusTable", default_factory=dict)
    stack: str | None = json("jstack", default=None)
    notes: Mapping[str, str] = json("userConsumerInfo", default_factory=dict)


FORMS[RunningInfo].constants["mqPopTable"] = {}
encode_direct_result, decode_direct_result = body_codec(DirectResult, "result of a message")
encode_running_info, decode_running_info = body_codec(RunningInfo, "running information")

# ------------------------------------------- offsets and queues: 202, 208, 220-223, 303, 308, 321


@body
class QueueStats:
    """Offsets of a queue and the time of its last message (ms, 0 when it has none)."""

    offset_min: int = json("minOffset")
    offset_max: int = json("maxOffset")
    last_time_ms: int = json("lastUpdateTimestamp")


@body
class TopicStats:
    """202's answer."""

    queues: Mapping[MessageQueue, QueueStats] = json("offsetTable")
    puts_per_second: float = json("topicPutTps", default=0.0)


@body
class QueueProgress:
    """How far a group is in a queue; `last_time_ms`: when its last consumed message was stored.

    Ours alone: `messages_at_risk` are unread and go with the next files, from `loss_time_ms` on;
    `in_flight` are popped, and `extra` are before the group besides those from its offset on.
    """

    broker_offset: int = json("brokerOffset")
    consumer_offset: int = json("consumerOffset")
    last_time_ms: int = json("lastTimestamp", default=0)
    pull_offset: int = json("pullOffset", default=0)
    messages_at_risk: int = json("sluiceMessagesAtRisk", default=0, write=lambda it: it or None)
    loss_time_ms: int = json("sluiceLossTime", default=0, write=lambda it: it or None)
    in_flight: int = json("sluiceInFlight", default=0, write=lambda it: it or None)
    extra: int = json("sluiceExtra", default=0, write=lambda it: it or None)


@body
class ConsumeStats:
    """208's answer."""

    queues: Mapping[MessageQueue, QueueProgress] = json("offsetTable")
    consumes_per_second: float = json("consumeTps", default=0.0)


@body
class ConsumeStatsOfBroker:
    """317's answer: for each group its topics."""

    address: str = json("brokerAddr")
    stats: list[dict[str, list[ConsumeStats]]] = json("consumeStatsList")
    behind: int = json("totalDiff")
    in_flight: int = json("totalInflightDiff")


@body
class TimeSpan:
    """303: a queue's first, consumed and last store time (ms), and how long a group is behind."""

    queue: MessageQueue = json("messageQueue")
    first_ms: int = json("minTimeStamp")
    last_ms: int = json("maxTimeStamp")
    consumed_ms: int = json("consumeTimeStamp")
    delay_ms: int = json("delayTime")


@body
class QueueUnit:
    """One entry of a queue: where its message lies, and whether a group's filter wants it."""

    physical_offset: int = json("physicOffset")
    size_bytes: int = json("physicSize")
    tag_code: int = json("tagsCode")
    is_wanted: bool = json("eval", default=True, absent=False)
    remark: str | None = json("msg", default=None)


@body
class QueueUnits:
    """321's answer."""

    offset_min: int = json("minQueueIndex")
    offset_max: int = json("maxQueueIndex")
    units: Sequence[QueueUnit] = json("queueData")
    subscription: Subscription | None = json("subscriptionData", default=None)
    filter_text: str | None = json("filterData", default=None)


Offsets = dict[MessageQueue, int]
subscription_object = FORMS[Subscription].write
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
# 220's body, 222's answer: queues as raw keys, which Java and Go both read.
encode_queue_offsets: Callable[[Mapping[MessageQueue, int]], bytes]
encode_queue_offsets, decode_queue_offsets = member_codec(
    "offsetTable", dict[MessageQueue, int], "offsets"
)


def encode_queue_offset_list(offsets: Mapping[MessageQueue, int]) -> bytes:
    """220's body for C++ clients: a list (spec/remoting.md §7.6)."""
    return fastjson.dumps(
        {"offsetTable": [{**queue_object(q), "offset": offset} for q, offset in offsets.items()]}
    )


# How far a client is in its queues (221), and of each client (223); either has both tables.
encode_client_offsets: Callable[[Offsets], bytes]
encode_client_offsets, decode_client_offsets = member_codec(
    "messageQueueTable", Offsets, "status of consumers", consumerTable={}
)
encode_offsets_by_client: Callable[[Mapping[str, Offsets]], bytes]
encode_offsets_by_client, decode_offsets_by_client = member_codec(
    "consumerTable", dict[str, Offsets], "status of consumers", messageQueueTable={}
)

# --------------------------------------------------------------- name server (spec/namesrv.md)

_BROKER = form(
    BrokerData,
    broker="brokerName",
    cluster="cluster",
    addresses=json(
        "brokerAddrs", write=lambda ids: {str(number): it for number, it in ids.items()}
    ),
    acting_master_enable="enableActingMaster",
    zone="zoneName",
)
form(
    QueueData,
    broker="brokerName",
    read_queues="readQueueNums",
    write_queues="writeQueueNums",
    perm="perm",
    sys_flag="topicSysFlag",
)
_ROUTE = form(
    TopicRoute,
    brokers="brokerDatas",
    queues="queueDatas",
    order_topic_config=json(
        "orderTopicConf",
        read=lambda value, _what: fastjson.text(value) or None,
        write=lambda value: value or None,
    ),
    constants={"filterServerTable": {}},
)


def _unquoted(broker: BrokerData) -> dict[str, Any]:
    """With raw broker ids, as old clients want them, and all of 106 (spec/namesrv.md §6)."""
    return {**_BROKER.write(broker), "brokerAddrs": dict(broker.addresses)}


@body
class ClusterInfo:
    """106's answer: all brokers by name, and the names of each cluster's brokers."""

    brokers: Mapping[str, BrokerData] = json(
        "brokerAddrTable",
        default_factory=dict,
        write=lambda brokers: {name: _unquoted(broker) for name, broker in brokers.items()},
    )
    clusters: Mapping[str, tuple[str, ...]] = json("clusterAddrTable", default_factory=dict)


encode_cluster_info, decode_cluster_info = body_codec(ClusterInfo, "cluster info")
decode_topic_route = body_codec(TopicRoute, "route")[1]
decode_broker_member_group = member_codec("brokerMemberGroup", BrokerData, "broker member group")[1]


def encode_topic_route(route: TopicRoute, *, standard: bool = True) -> bytes:
    """105's answer; `standard` False writes broker ids without quotes for old clients."""
    return fastjson.dumps(_ROUTE.write(route) if standard else route_object(route))


def route_object(route: TopicRoute) -> dict[str, Any]:
    """A route with broker ids as numbers."""
    return {**_ROUTE.write(route), "brokerDatas": [_unquoted(broker) for broker in route.brokers]}


def encode_broker_member_group(cluster: str, broker: str, addresses: Mapping[int, str]) -> bytes:
    """901's answer."""
    values = {"brokerAddrs": dict(addresses), "brokerName": broker, "cluster": cluster}
    return fastjson.dumps({"brokerMemberGroup": values})


def encode_topic_list(topics: Iterable[str], broker_address: str | None = None) -> bytes:
    """Encode the answer to 206, 224, 304 and others; `broker_address` only for 304. Up to
    SORTED_MAX topics are sorted: more of them would take longer than their text."""
    names = list(topics)
    if len(names) <= SORTED_MAX:
        names.sort()
    return fastjson.dumps({"brokerAddr": broker_address, "topicList": names})


def encode_group_list(groups: Iterable[str]) -> bytes:
    """300's answer."""
    return fastjson.dumps({"groupList": sorted(groups)})


decode_topic_list = member_codec("topicList", tuple[str, ...], "topic list")[1]
decode_group_list = member_codec("groupList", tuple[str, ...], "group list")[1]
encode_kv_table: Callable[[Mapping[str, str]], bytes]
encode_kv_table, decode_kv_table = member_codec("table", dict[str, str], "table")

# ------------------------------------------------------------------------------- ours alone


@body
class WaitingMessage:
    """900101: a delayed or timed message that is not delivered yet.

    `level` is 0 for a timed one. Times are ms since 1970. `handle` takes it back.
    """

    topic: str = json("topic")
    queue_id: int = json("queueId")
    unique_id: str = json("uniqKey")
    keys: str = json("keys")
    tag: str = json("tag")
    level: int = json("level")
    due_ms: int = json("deliverTime")
    stored_ms: int = json("storeTime")
    body_bytes: int = json("bodySize")
    handle: str = json("handle")


@body
class OpenTransaction:
    """900111: a transaction that is not decided. Times are ms since 1970; `asked` is the address of
    the client that was asked last and has not answered, "" when there is none."""

    transaction_id: str = json("transactionId")
    group: str = json("producerGroup")
    topic: str = json("topic")
    queue_id: int = json("queueId")
    keys: str = json("keys")
    tag: str = json("tag")
    began_ms: int = json("beginTime")
    checks: int = json("checkTimes")
    next_check_ms: int = json("nextCheckTime")
    asked: str = json("asked")
    half_queue_offset: int = json("tranStateTableOffset")
    physical_offset: int = json("commitLogOffset")
    body_bytes: int = json("bodySize")


@body
class QueueMatching:
    """One queue: of the messages from `committed` (-1: nothing is) to `offset_max` so many match,
    None when the subscription is not known. `eta_ms`: in how long none will be left at the present
    pace; None when that is not known, or never. `in_flight` are popped; `extra` messages are before
    the group besides those from `committed` on."""

    queue_id: int = json("queueId")
    committed: int = json("committed")
    offset_min: int = json("minOffset")
    offset_max: int = json("maxOffset")
    matching: int | None = json("matching")
    eta_ms: int | None = json("eta", default=None)
    in_flight: int = json("inFlight", default=0)
    extra: int = json("extra", default=0)


@body
class InFlightMessage:
    """900134: a message that a group has popped, and not acknowledged. Times are ms since 1970, of
    its pop and when it is visible again; `client_id` is "" when that is not known. It has come
    `times` times."""

    topic: str = json("topic")
    queue_id: int = json("queueId")
    queue_offset: int = json("queueOffset")
    popped_ms: int = json("popTime")
    visible_ms: int = json("visibleTime")
    client_id: str = json("clientId")
    times: int = json("times")


@body
class FilterFailure:
    """An evaluation that failed: the message's place, and why."""

    queue_id: int = json("queueId")
    offset: int = json("queueOffset")
    text: str = json("text")


@body
class LaneMatching:
    """One lane of a group whose members want different things: its own offsets, and what it still
    has to get. `expression` is "" where the topic is the group's retry topic."""

    lane: str = json("lane")
    kind: str = json("expressionType")
    expression: str = json("subscription")
    client_ids: tuple[str, ...] = json("clientIds")
    queues: tuple[QueueMatching, ...] = json("queues")


@body
class GroupMatching:
    """900131: a group on one topic of one broker. Counters are since that broker started;
    `expression` is None when the broker does not know what the group wants."""

    topic: str = json("topic")
    kind: str = json("expressionType")
    expression: str | None = json("subscription")
    queues: tuple[QueueMatching, ...] = json("queues")
    matched: int = json("matched", default=0)
    filtered: int = json("filtered", default=0)
    errors: Mapping[str, int] = json("errors", default_factory=dict)
    failures: tuple[FilterFailure, ...] = json("failures", default=())
    lanes: tuple[LaneMatching, ...] = json("lanes", default=())
    """With lanes, a queue's `committed` is the least of them, and its `matching` the sum."""


encode_waiting, decode_waiting = member_codec(
    "messages", list[WaitingMessage], "list of waiting messages"
)
encode_open_transactions, decode_open_transactions = member_codec(
    "transactions", list[OpenTransaction], "list of transactions"
)
encode_in_flight, decode_in_flight = member_codec(
    "messages", list[InFlightMessage], "list of popped messages"
)
encode_group_matching, decode_group_matching = member_codec(
    "topics", list[GroupMatching], "matches of a group"
)
