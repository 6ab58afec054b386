"""Build the client's requests and parse the responses.

Every request of the client is made here, so that the asyncio shell and the blocking shell send the
same bytes. A function named after a request returns that request as a `Command`; it sends nothing.
Requests that consist of their header are declared in the table below; such a function takes the
fields of the header by name. Only the hot requests, `send` and `pull`, write their fields
themselves (spec/remoting.md §8, §13); tests compare them with the declared headers. A new command
has no opaque (request id) yet: the connection assigns it.

Both shells parse responses here, too. The table `_ERRORS` says which exception a broker's response
code becomes, and what the user can do about it (spec/remoting.md §19).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, ParamSpec

from sluicemq import engine
from sluicemq.client.core.messages import (
    SEND,
    OutgoingMessage,
    SendRequest,
    make_send_fields,
)
from sluicemq.errors import (
    GroupNotFoundError,
    PermissionDeniedError,
    ProtocolError,
    RequestError,
    TopicNotFoundError,
)
from sluicemq.model.ids import RecallHandle
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import TAG, Subscription
from sluicemq.model.topic import (
    DEFAULT_TOPIC,
    MASTER_ID,
    GroupConfig,
    MessageQueue,
    TopicConfig,
)
from sluicemq.wire import bodies, fastjson, headers, popping, replicas, tables
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import FLAG_ONEWAY, Command
from sluicemq.wire.headers import (
    BRIEF_FIELD,
    PULL_COMMIT_OFFSET,
    PULL_LITE,
    PULL_SUBSCRIPTION,
    PULL_SUSPEND,
)
from sluicemq.wire.replicas import WritePermissionRequest

_SEND_BATCH: Final = int(Code.SEND_BATCH_MESSAGE)
_PULL: Final = int(Code.PULL_MESSAGE)
P = ParamSpec("P")


def make_request(
    code: Code, header: Any = None, body: bytes = b"", *, oneway: bool = False
) -> Command:
    """Return a request with the given code, declared header and body.

    `header` None means a request without header fields.
    """
    fields = None if header is None else encode_header(header)
    return Command(int(code), fields, body, flag=FLAG_ONEWAY if oneway else 0)


def _queue_fields(queue: MessageQueue) -> dict[str, Any]:
    """Return the header fields that name a queue. The broker is None if its name is unknown."""
    return {"topic": queue.topic, "queue_id": queue.queue_id, "broker": queue.broker or None}


def _request_maker(code: Code, header: Callable[P, object]) -> Callable[P, Command]:
    """Return a function that makes a request with `code`; it takes the fields of `header`."""

    def make(*arguments: P.args, **fields: P.kwargs) -> Command:
        return make_request(code, header(*arguments, **fields))

    return make


def _queue_request_maker(code: Code, header: type) -> Callable[[MessageQueue], Command]:
    """Return a function that makes a request whose header names a queue and nothing else."""
    return lambda queue: make_request(code, header(**_queue_fields(queue)))


def _headerless_request_maker(code: Code) -> Callable[[], Command]:
    """Return a function that makes a request without a header."""
    return lambda: make_request(code)


# Clusters, brokers and topics. The first ones are sent to a name server.
cluster_info = _headerless_request_maker(Code.GET_BROKER_CLUSTER_INFO)
topic_list = _headerless_request_maker(Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
put_kv = _request_maker(Code.PUT_KV_CONFIG, headers.PutKvRequest)
get_kv = _request_maker(Code.GET_KV_CONFIG, headers.KvRequest)
wipe_write_permission = _request_maker(Code.WIPE_WRITE_PERM_OF_BROKER, WritePermissionRequest)
add_write_permission = _request_maker(Code.ADD_WRITE_PERM_OF_BROKER, WritePermissionRequest)
name_server_settings = _headerless_request_maker(Code.GET_NAMESRV_CONFIG)
delete_kv = _request_maker(Code.DELETE_KV_CONFIG, headers.KvRequest)
delete_topic_on_name_server = _request_maker(
    Code.DELETE_TOPIC_IN_NAMESRV, headers.DeleteTopicInNameServerRequest
)
delete_topic_on_broker = _request_maker(Code.DELETE_TOPIC_IN_BROKER, headers.TopicRequest)
topic_config = _request_maker(Code.GET_TOPIC_CONFIG, headers.GetTopicConfigRequest)
topic_stats = _request_maker(Code.GET_TOPIC_STATS_INFO, headers.TopicRequest)
groups_of_topic = _request_maker(Code.QUERY_TOPIC_CONSUME_BY_WHO, headers.TopicRequest)
all_topics = _request_maker(Code.GET_ALL_TOPIC_CONFIG, headers.GetAllTopicsRequest)
system_topics = _headerless_request_maker(Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
runtime_info = _headerless_request_maker(Code.GET_BROKER_RUNTIME_INFO)
broker_settings = _headerless_request_maker(Code.GET_BROKER_CONFIG)
replication_status = _headerless_request_maker(Code.GET_BROKER_HA_STATUS)
reset_flushed = _request_maker(
    Code.RESET_MASTER_FLUSH_OFFSET, replicas.ResetMasterFlushOffsetRequest
)
statistics = _request_maker(Code.VIEW_BROKER_STATS_DATA, headers.StatisticsRequest)
consume_stats_of_broker = _request_maker(
    Code.GET_BROKER_CONSUME_STATS, headers.GetConsumeStatsOfBrokerRequest
)
producers = _headerless_request_maker(Code.GET_ALL_PRODUCER_INFO)
roll_back_pops = _headerless_request_maker(Code.POP_ROLLBACK)
access_status = _headerless_request_maker(Code.SLUICE_ACCESS_STATUS)
account_versions = _headerless_request_maker(Code.GET_BROKER_CLUSTER_ACL_INFO)
accounts = _headerless_request_maker(Code.GET_BROKER_CLUSTER_ACL_CONFIG)
delete_account = _request_maker(Code.DELETE_ACL_CONFIG, headers.DeleteAccountRequest)
set_white_addresses = _request_maker(
    Code.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, headers.UpdateWhiteAddressesRequest
)
replica_status = _headerless_request_maker(Code.SLUICE_REPLICA_STATUS)
elect_master = _headerless_request_maker(Code.SLUICE_ELECT_MASTER)

# Queues.
offset_min = _queue_request_maker(Code.GET_MIN_OFFSET, headers.QueueRequest)
offset_max = _queue_request_maker(Code.GET_MAX_OFFSET, headers.GetMaxOffsetRequest)
earliest_time = _queue_request_maker(Code.GET_EARLIEST_MSG_STORETIME, headers.QueueRequest)

# Groups. Without members the response to `consumer_list` has code 1, that to
# `consumer_connections` has code 206.
all_groups = _headerless_request_maker(Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
group_config = _request_maker(Code.GET_SUBSCRIPTIONGROUP_CONFIG, headers.GetGroupConfigRequest)
group_lanes = _request_maker(Code.SLUICE_GROUP_LANES, headers.ConsumerGroupRequest)
delete_group = _request_maker(Code.DELETE_SUBSCRIPTIONGROUP, headers.DeleteGroupRequest)
producer_connections = _request_maker(
    Code.GET_PRODUCER_CONNECTION_LIST, headers.GetProducerConnectionsRequest
)
consumer_list = _request_maker(Code.GET_CONSUMER_LIST_BY_GROUP, headers.ConsumerGroupRequest)
consumer_connections = _request_maker(
    Code.GET_CONSUMER_CONNECTION_LIST, headers.ConsumerGroupRequest
)
consume_stats = _request_maker(Code.GET_CONSUME_STATS, headers.GetConsumeStatsRequest)
filtered_lag = _request_maker(Code.SLUICE_FILTERED_LAG, headers.FilteredLagRequest)
in_flight = _request_maker(Code.SLUICE_IN_FLIGHT, popping.InFlightRequest)
clone_offsets = _request_maker(Code.CLONE_GROUP_OFFSET, headers.CloneGroupOffsetRequest)
running_info = _request_maker(Code.GET_CONSUMER_RUNNING_INFO, headers.GetConsumerRunningInfoRequest)
consume_directly = _request_maker(
    Code.CONSUME_MESSAGE_DIRECTLY, headers.ConsumeMessageDirectlyRequest
)

# Messages, delayed ones and transactions.
message_at = _request_maker(Code.VIEW_MESSAGE_BY_ID, headers.ViewMessageRequest)
queue_units = _request_maker(Code.QUERY_CONSUME_QUEUE, headers.QueryConsumeQueueRequest)
list_delayed = _request_maker(Code.SLUICE_LIST_DELAYED, headers.ListDelayedRequest)
cancel_delayed = _request_maker(Code.SLUICE_CANCEL_DELAYED, headers.CancelDelayedRequest)
list_transactions = _request_maker(Code.SLUICE_LIST_TRANSACTIONS, headers.ListTransactionsRequest)
resolve_transaction = _request_maker(
    Code.SLUICE_RESOLVE_TRANSACTION, headers.ResolveTransactionRequest
)


def switch_master(broker_id: int | None) -> Command:
    """Return the request to make another replica the master.

    That is the replica `broker_id`, or the one with the most complete log if it is None.
    """
    command = make_request(Code.SLUICE_SWITCH_MASTER)
    command.fields = {} if broker_id is None else {"brokerId": f"{broker_id}"}
    return command


def route(topic: str) -> Command:
    """Return the request to a name server for the route of a topic."""
    return make_request(
        Code.GET_ROUTEINFO_BY_TOPIC,
        headers.GetRouteRequest(topic=topic, standard_json_only=True),
    )


def send(
    group: str,
    queue: MessageQueue,
    outgoing: OutgoingMessage,
    born_time_ms: int,
    *,
    batch: bool = False,
    oneway: bool = False,
    is_brief: bool = False,
) -> Command:
    """Return the request to send a message or, with `batch`, a batch of messages. HOT.

    `born_time_ms` is the time of sending in milliseconds since 1970. `oneway` means that the broker
    does not respond. `is_brief` asks a SluiceMQ broker to return the id of the first message only.
    An ordinary message becomes a `SendRequest`, which is faster to encode.
    """
    flag = FLAG_ONEWAY if oneway else 0
    has_special_field = batch or outgoing.sys_flag or outgoing.flag or outgoing.reconsume_times
    if not has_special_field and outgoing.reconsume_times_max is None:
        return SendRequest(group, queue, outgoing, born_time_ms, flag)
    fields = make_send_fields(group, queue, outgoing, born_time_ms)
    code = SEND
    if batch:
        code = _SEND_BATCH
        fields["m"] = "true"
    if is_brief:
        fields[BRIEF_FIELD] = "true"
    return Command(code, fields, outgoing.body, flag=flag)


def recall(group: str, handle: RecallHandle) -> Command:
    """Return the request to recall the timed message that `handle` names."""
    header = headers.RecallMessageRequest(
        group=group, topic=handle.topic, recall_handle=handle.encode(), broker=handle.broker
    )
    return make_request(Code.RECALL_MESSAGE, header)


def send_back(
    group: str, record: StoredMessage, topic: str, level: int, times_max: int | None
) -> Command:
    """Return the request to deliver a message again later.

    `topic` is the topic from which the group read the message first. `level` is the delay level of
    the retry. `times_max` is the maximum number of retries; None means that of the group.
    """
    header = headers.SendBackRequest(
        physical_offset=record.physical_offset,
        group=group,
        delay_level=level,
        origin_message_id=record.message_id,
        origin_topic=topic,
        unit_mode=False,
        reconsume_times_max=times_max,
        broker=record.broker or None,
    )
    return make_request(Code.CONSUMER_SEND_MSG_BACK, header)


def pull(
    group: str,
    queue: MessageQueue,
    offset: int,
    *,
    count_max: int = 32,
    bytes_max: int = 262_144,
    subscription: Subscription | None = None,
    sub_version: int = 0,
    expression_kind: str = TAG,
    suspend_timeout_ms: int = 0,
    commit_offset: int | None = None,
    lite: bool = False,
    bulk: bool = False,
    any_span: bool = False,
) -> Command:
    """Return the request for messages of a queue from `offset` on. HOT.

    The broker filters by `subscription`. None means the subscription of the group's heartbeat,
    whose version and kind are `sub_version` and `expression_kind`. If `suspend_timeout_ms` is above
    0, the broker waits that long for a message. `commit_offset` is committed at the same time.

    `bulk` asks a SluiceMQ broker for up to `bytes_max` bytes, without its limit on the number of
    messages. `any_span` lets it return matching messages however far apart their offsets are.
    RocketMQ brokers ignore both. `lite` sets only a flag, because 4.x brokers refuse
    LITE_PULL_MESSAGE (361) (spec/traffic, item 18).
    """
    sys_flag = 0
    if suspend_timeout_ms:
        sys_flag |= PULL_SUSPEND
    if commit_offset is not None:
        sys_flag |= PULL_COMMIT_OFFSET
    if lite:
        sys_flag |= PULL_LITE
    if subscription is not None:
        sys_flag |= PULL_SUBSCRIPTION
        sub_version = subscription.version
        expression_kind = subscription.kind
    fields = {
        "consumerGroup": group,
        "topic": queue.topic,
        "queueId": str(queue.queue_id),
        "queueOffset": str(offset),
        "maxMsgNums": str(count_max),
        "sysFlag": str(sys_flag),
        "commitOffset": str(commit_offset or 0),
        "suspendTimeoutMillis": str(suspend_timeout_ms),
        "subVersion": str(sub_version),
        "expressionType": expression_kind,
        "maxMsgBytes": str(bytes_max),
    }
    if subscription is not None:
        fields["subscription"] = subscription.expression
    if queue.broker:
        fields["bname"] = queue.broker
    if bulk:
        fields["sluiceBulk"] = "true"
    if any_span:
        fields["sluiceAnySpan"] = "true"
    return Command(_PULL, fields)


def make_probe_request(group: str, queue: MessageQueue, offset: int) -> Command:
    """Return the request to look at the one message at `offset`, whatever the group subscribes to.

    A SluiceMQ broker sees the field sluiceLook=true: it does not count the pull, does not apply a
    lane and does not carry out a reset of the group. A RocketMQ broker treats it as any pull.
    """
    command = pull(
        group, queue, offset, count_max=1, bytes_max=1024, subscription=Subscription(queue.topic)
    )
    command.fields = {**(command.fields or {}), "sluiceLook": "true"}
    return command


def offset_of_group(group: str, queue: MessageQueue, *, zero_if_young: bool = False) -> Command:
    """Return the request for the committed offset of a group in a queue.

    The response code is QUERY_NOT_FOUND (22) if the group has none. With `zero_if_young`, the
    broker may return 0 instead while the queue has not lost a message, as it does for Java's
    consumers (spec/remoting.md §14).
    """
    zero = None if zero_if_young else False
    return make_request(
        Code.QUERY_CONSUMER_OFFSET,
        headers.QueryConsumerOffsetRequest(
            group=group, zero_if_not_found=zero, **_queue_fields(queue)
        ),
    )


def commit_offset(group: str, queue: MessageQueue, offset: int, *, oneway: bool = False) -> Command:
    """Return the request to set the committed offset of `group` in `queue`."""
    header = headers.UpdateConsumerOffsetRequest(
        group=group, commit_offset=offset, **_queue_fields(queue)
    )
    return make_request(Code.UPDATE_CONSUMER_OFFSET, header, oneway=oneway)


def offset_by_time(queue: MessageQueue, time_ms: int) -> Command:
    """Return the request for the first offset that was stored at `time_ms` or later."""
    header = headers.SearchOffsetRequest(time_ms=time_ms, boundary="LOWER", **_queue_fields(queue))
    return make_request(Code.SEARCH_OFFSET_BY_TIMESTAMP, header)


def messages_by_key(
    topic: str, key: str, begin_ms: int, end_ms: int, count_max: int, *, is_unique: bool
) -> Command:
    """Return the request for the messages of one broker that have a key.

    With `is_unique`, `key` is a message id that a producer made. The times are in milliseconds
    since 1970. The response contains at most `count_max` messages.
    """
    header = headers.QueryMessageRequest(
        topic=topic,
        key=key,
        count_max=count_max,
        begin_time_ms=begin_ms,
        end_time_ms=end_ms,
        is_unique_key=is_unique,
    )
    return make_request(Code.QUERY_MESSAGE, header)


def reset_offsets(
    group: str, topic: str, time_ms: int, queue_id: int = -1, offset: int = -1
) -> Command:
    """Return the request to reset the offsets of a group in a topic on one broker.

    Each queue is reset to its first message that was stored at `time_ms` (milliseconds since 1970)
    or later; -1 means its end. If `queue_id` is not -1, only that queue is reset, to `offset`.
    """
    header = headers.ResetOffsetRequest(
        topic=topic, group=group, time_ms=time_ms, force=True, queue_id=queue_id, offset=offset
    )
    return make_request(Code.INVOKE_BROKER_TO_RESET_OFFSET, header)


def try_filter(
    subscription: Subscription,
    group: str | None,
    begin_ms: int | None,
    end_ms: int | None,
    count_max: int,
) -> Command:
    """Return the request to try a filter on stored messages. Only SluiceMQ brokers support it.

    At most `count_max` messages are tried, the newest of each queue that were stored from
    `begin_ms` to `end_ms` (milliseconds since 1970; None means no limit). With `group`, the
    response also compares the filter with the group's filter.
    """
    header = headers.TryFilterRequest(
        topic=subscription.topic,
        expression=subscription.expression,
        kind=subscription.kind,
        group=group,
        begin_ms=begin_ms,
        end_ms=end_ms,
        count_max=count_max,
    )
    return make_request(Code.SLUICE_TRY_FILTER, header)


def heartbeat(contents: bodies.Heartbeat, *, asks_lanes: bool = False) -> Command:
    """Return a heartbeat with the groups and subscriptions of `contents`.

    With `asks_lanes`, the response of a SluiceMQ broker says whether it supports lanes.
    """
    command = make_request(Code.HEART_BEAT, body=bodies.encode_heartbeat(contents))
    command.fields = {"sluiceLanes": "true"} if asks_lanes else None
    return command


def unregister(
    client_id: str, *, producer: str | None = None, consumer: str | None = None
) -> Command:
    """Return the request to remove this client from a producer or consumer group at once."""
    header = headers.UnregisterClientRequest(
        client_id=client_id, producer_group=producer, consumer_group=consumer
    )
    return make_request(Code.UNREGISTER_CLIENT, header)


def check_subscription(client_id: str, group: str, subscription: Subscription) -> Command:
    """Return the request to check that the broker can serve a subscription.

    The response code is SUBSCRIPTION_PARSE_FAILED (23) if the expression does not compile, and
    SYSTEM_ERROR (1) if SQL92 filters are off.
    """
    config = bodies.CheckClientConfig(client_id, group, subscription)
    return make_request(Code.CHECK_CLIENT_CONFIG, body=bodies.encode_check_client_config(config))


def lock_queues(group: str, client_id: str, queues: Iterable[MessageQueue]) -> Command:
    """Return the request to lock queues of one broker for this client, for one minute."""
    body = bodies.encode_lock_batch(bodies.LockBatch(group, client_id, tuple(queues)))
    return make_request(Code.LOCK_BATCH_MQ, body=body)


def unlock_queues(group: str, client_id: str, queues: Iterable[MessageQueue]) -> Command:
    """Return the request to release the locks of queues of one broker."""
    body = bodies.encode_lock_batch(bodies.LockBatch(group, client_id, tuple(queues)))
    return make_request(Code.UNLOCK_BATCH_MQ, body=body)


def update_topic(config: TopicConfig, attributes: Mapping[str, str | None]) -> Command:
    """Return the request to create or change a topic on one broker.

    `attributes` maps names of attributes to new values. None removes an attribute.
    """
    changes = []  # `+name=value` sets an attribute, `-name` removes it
    for name, attribute in attributes.items():
        changes.append(f"-{name}" if attribute is None else f"+{name}={attribute}")
    header = headers.CreateTopicRequest(
        topic=config.name,
        default_topic=DEFAULT_TOPIC,
        read_queues=config.read_queues,
        write_queues=config.write_queues,
        perm=config.perm,
        filter_type=config.filter_type,
        sys_flag=config.sys_flag,
        order=config.order,
        attributes=",".join(changes) or None,
    )
    return make_request(Code.UPDATE_AND_CREATE_TOPIC, header)


def update_group(config: GroupConfig) -> Command:
    """Return the request to create or change a consumer group on one broker."""
    body = tables.encode_group_config(config)
    return make_request(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)


def update_topics(configs: Iterable[TopicConfig]) -> Command:
    """Return the request to create or change several topics on one broker, without attributes."""
    json_body = {"topicConfigList": [tables.topic_object(config) for config in configs]}
    return make_request(Code.UPDATE_AND_CREATE_TOPIC_LIST, body=fastjson.dumps(json_body))


def update_groups(configs: Iterable[GroupConfig]) -> Command:
    """Return the request to create or change several consumer groups on one broker."""
    json_body = {"groupConfigList": [tables.group_object(config) for config in configs]}
    return make_request(
        Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, body=fastjson.dumps(json_body)
    )


def set_request_mode(mode: tables.RequestMode) -> Command:
    """Return the request to set how a group reads a topic on one broker: by pull or by pop."""
    return make_request(Code.SET_MESSAGE_REQUEST_MODE, body=tables.encode_request_mode(mode))


def change_settings(changes: Mapping[str, str], *, of_name_server: bool = False) -> Command:
    """Return the request to change settings of a broker, or of a name server."""
    code = Code.UPDATE_NAMESRV_CONFIG if of_name_server else Code.UPDATE_BROKER_CONFIG
    return make_request(code, body="".join(f"{k}={v}\n" for k, v in changes.items()).encode())


def update_account(account: headers.UpdateAccountRequest) -> Command:
    """Return the request to create an account of a broker, or to change the fields that are set."""
    return make_request(Code.UPDATE_AND_CREATE_ACL_CONFIG, account)


def clean_up(unused_files: str) -> Command:
    """Return the request to delete what is no longer used on one broker.

    `unused_files` is "queues" (expired files of consume queues), "topics" (consume queues of
    deleted topics) or "log" (expired files of the commit log). Any other value raises KeyError.
    """
    return make_request(_CLEAN_UP_CODES[unused_files])


_CLEAN_UP_CODES: Final = {
    "queues": Code.CLEAN_EXPIRED_CONSUMEQUEUE,
    "topics": Code.CLEAN_UNUSED_TOPIC,
    "log": Code.DELETE_EXPIRED_COMMITLOG,
}

# ---------------------------------------------------------------------------------- responses

SUCCESS: Final = 0
MESSAGE_ILLEGAL: Final = 13
SYSTEM_ERROR: Final = 1
TOPIC_NOT_EXIST: Final = 17
PULL_NOT_FOUND: Final = 19
PULL_RETRY_IMMEDIATELY: Final = 20
PULL_OFFSET_MOVED: Final = 21
QUERY_NOT_FOUND: Final = 22
SUBSCRIPTION_PARSE_FAILED: Final = 23
SUBSCRIPTION_NOT_EXIST: Final = 24
SUBSCRIPTION_NOT_LATEST: Final = 25
GROUP_NOT_EXIST: Final = 26
FILTER_DATA_NOT_EXIST: Final = 27
FILTER_DATA_NOT_LATEST: Final = 28
FLOW_CONTROL: Final = 215
NOT_AVAILABLE: Final = 14
"""The broker cannot write: its disk is full, or it is not the master or no longer is."""

SUBSCRIPTION_PENDING = frozenset(
    {
        SUBSCRIPTION_NOT_EXIST,
        SUBSCRIPTION_NOT_LATEST,
        FILTER_DATA_NOT_EXIST,
        FILTER_DATA_NOT_LATEST,
    }
)
"""Codes that are normal just after a subscription changed: some brokers lack the new heartbeat."""

_ERRORS: dict[int, tuple[type[RequestError], str]] = {
    2: (RequestError, "Send more slowly, or add a broker: this one is overloaded."),
    3: (RequestError, "Upgrade the server: its version does not have this feature."),
    MESSAGE_ILLEGAL: (
        RequestError,
        "Make the message smaller (body 4 MiB, properties 32 KiB by default).",
    ),
    NOT_AVAILABLE: (RequestError, "Try again, or check the broker's log and disk space."),
    16: (
        PermissionDeniedError,
        "Check the permission of topic, group and broker, and the credentials.",
    ),
    TOPIC_NOT_EXIST: (
        TopicNotFoundError,
        "Create it with sluice topic create TOPIC, or set autoCreateTopicEnable=true on a broker.",
    ),
    SUBSCRIPTION_PARSE_FAILED: (
        RequestError,
        "Check the expression with sluice filter check 'EXPRESSION'.",
    ),
    GROUP_NOT_EXIST: (
        GroupNotFoundError,
        "Create the group on the broker, or set autoCreateSubscriptionGroup=true on it.",
    ),
}


_ACCESS_FIX: Final = (
    "Check the access key, the secret key, and what the server's plain_acl.yml allows them:"
    " sluice acl check says which rule decides."
)


def is_access_denied(response: Command) -> bool:
    """Return whether access control refused the request.

    RocketMQ has no code for that: the response has SYSTEM_ERROR (1), and its remark contains the
    name of RocketMQ's exception.
    """
    return response.code == SYSTEM_ERROR and is_access_denied_remark(response.remark or "")


def is_access_denied_remark(remark: str) -> bool:
    """Return whether a server's remark says that access control refused a request."""
    return "AclException" in remark


def request_error(response: Command, address: str = "") -> RequestError:
    """Return the exception for a response that is not a success, with a fix if one is known.

    Its class depends on the response code. `address` is the server that responded.
    """
    remark = response.remark or ""
    error_class, fix = _ERRORS.get(response.code, (RequestError, ""))

    # More specific than the response code:
    if is_access_denied(response):
        error_class = PermissionDeniedError
        fix = _ACCESS_FIX
    if "sluiceProtectedMode" in remark or "recallMessageEnable" in remark:
        fix = ""  # the remark contains the fix
    if response.code == MESSAGE_ILLEGAL and "delay" in remark:
        fix = "Deliver it sooner, or raise timerMaxDelaySec on the brokers (3 days by default)."
    return error_class(response.code, remark.strip(), address=address, fix=fix)


def expect_success(response: Command, address: str = "") -> Command:
    """Return `response` if it is a success, otherwise raise the exception of `request_error`."""
    if response.code != SUCCESS:
        raise request_error(response, address)
    return response


def int_field(response: Command, name: str) -> int:
    """Return a header field of a response as an integer.

    Raises ProtocolError if it is missing or not an integer.
    """
    field_value = (response.fields or {}).get(name)
    try:
        return int(field_value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ProtocolError(
            f"the response's field {name} must be an integer, got {field_value!r}."
        ) from None


class SendStatus(Enum):
    """How safe a stored message is. Every status means that the broker has stored the message.

    `OK` means as safe as the broker is configured to keep messages. `FLUSH_DISK_TIMEOUT` means that
    the disk sync took too long, `SLAVE_NOT_AVAILABLE` that no slave could receive the message, and
    `FLUSH_SLAVE_TIMEOUT` that no slave confirmed it in time.
    """

    OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


_COMPILED_RESPONSE: Final[Any] = None if engine.client is None else engine.client.Answer
_SEND_STATUS = {status.value: status for status in SendStatus}


@dataclass(frozen=True, slots=True, repr=False)
class SendResult:
    """The result of sending one message.

    `message_id` is the id that this client assigned (UNIQ_KEY). `offset_message_id` contains the
    broker's address and the position in its commit log. `queue_offset` is the offset in `queue`. If
    the message is delayed, `offset_message_id` and `queue_offset` say where it waits.
    `recall_handle` recalls a timed message; it is None for other messages. A one-way send has no
    result.
    """

    status: SendStatus
    message_id: str
    offset_message_id: str
    queue: MessageQueue
    queue_offset: int
    recall_handle: str | None = None

    def __repr__(self) -> str:
        topic, broker, queue_id = self.queue
        return (
            f"<SendResult {self.status.name} {self.message_id} in {topic} queue {queue_id} of "
            f"{broker} offset {self.queue_offset}>"
        )


def parse_send_response(
    response: Command, queue: MessageQueue, message_ids: tuple[str, ...], address: str
) -> list[SendResult]:
    """Return the result of each message in a send request, in the order of `message_ids`.

    `queue` is the queue of the request; the broker may have stored the messages in another of its
    queues. A result without an offset message id has "" there. Raises RequestError for a response
    that is not a success, and ProtocolError for one without an offset.
    """
    if response.__class__ is _COMPILED_RESPONSE and len(message_ids) == 1:
        # The compiled decoder makes this class for successful responses to plain sends only.
        plain: Any = response
        return [plain.result(SendResult, SendStatus.OK, message_ids[0], queue)]
    status = _SEND_STATUS.get(response.code)
    if status is None:
        raise request_error(response, address)
    fields = response.fields or {}
    joined_offset_ids = fields.get("msgId", "")
    recall_handle = fields.get("recallHandle")
    queue_id = int(fields.get("queueId") or queue.queue_id)
    stored_queue = queue if queue_id == queue.queue_id else queue._replace(queue_id=queue_id)
    first_offset = int_field(response, "queueOffset")
    offset_ids = joined_offset_ids.split(",", len(message_ids))
    first_result = SendResult(
        status, message_ids[0], offset_ids[0], stored_queue, first_offset, recall_handle
    )
    if len(message_ids) == 1:
        return [first_result]
    return _make_batch_results(first_result, message_ids, offset_ids)


def _make_batch_results(
    first_result: SendResult, message_ids: Sequence[str], offset_ids: Sequence[str]
) -> list[SendResult]:
    """Return one result for each message of a batch, which is stored at consecutive offsets.

    `first_result` is the result of the first message. `offset_ids` may be shorter than
    `message_ids`; a missing id becomes "".
    """
    return [
        SendResult(
            first_result.status,
            message_id,
            offset_ids[index] if index < len(offset_ids) else "",
            first_result.queue,
            first_result.queue_offset + index,
            first_result.recall_handle,
        )
        for index, message_id in enumerate(message_ids)
    ]


class PullStatus(Enum):
    """The four outcomes of a pull that are not errors."""

    FOUND = SUCCESS
    NO_NEW_MSG = PULL_NOT_FOUND
    NO_MATCHED_MSG = PULL_RETRY_IMMEDIATELY
    OFFSET_ILLEGAL = PULL_OFFSET_MOVED


_PULL_STATUS = {status.value: status for status in PullStatus}


@dataclass(frozen=True, slots=True)
class PullResponse:
    """The parsed response to a pull.

    `next_offset` is the offset to pull next. The queue has messages from `offset_min` up to, not
    including, `offset_max`. `data` are the records as they were sent, empty unless `status` is
    FOUND. `suggested_broker_id` is the id of the replica to pull from next.
    """

    status: PullStatus
    next_offset: int
    offset_min: int
    offset_max: int
    data: bytes | memoryview
    remark: str
    suggested_broker_id: int = MASTER_ID


def parse_pull_response(response: Command, address: str) -> PullResponse:
    """Decode the response to a pull; `address` is the broker that sent it.

    Raises RequestError for a code that is not a `PullStatus`, ProtocolError if a field is missing.
    """
    status = _PULL_STATUS.get(response.code)
    if status is None:
        raise request_error(response, address)
    return PullResponse(
        status,
        int_field(response, "nextBeginOffset"),
        int_field(response, "minOffset"),
        int_field(response, "maxOffset"),
        response.body if status is PullStatus.FOUND else b"",
        response.remark or "",
        int(header_fields(response).get("suggestWhichBrokerId") or MASTER_ID),
    )


def header_fields(response: Command) -> Mapping[str, str]:
    """Return the header fields of a response, an empty mapping if it has none."""
    return response.fields or {}
