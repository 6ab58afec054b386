"""What the client asks for, and what the answers mean: values into commands, answers into values.

Every request of the client is made here, so that the asyncio shell and the blocking shell send the
same bytes. A request that is its header is declared as such, in the table below: it takes the
header's fields by name. Only the hot ones, `send` and `pull`, write their fields themselves
(spec/remoting.md §8, §13), behind tests that compare them with the declared headers. A command
made here has no opaque yet: the connection gives it one.

Both shells read answers only here. One table says which code of a broker becomes which exception
and what the user can do about it (spec/remoting.md §19).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, ParamSpec

from sluicemq import engine
from sluicemq.client.core.messages import (
    SEND,
    Outgoing,
    SendRequest,
    send_fields,
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

_SEND_BATCH: Final = int(Code.SEND_BATCH_MESSAGE)
_PULL: Final = int(Code.PULL_MESSAGE)
P = ParamSpec("P")


def request(code: Code, header: Any = None, body: bytes = b"", *, oneway: bool = False) -> Command:
    """A command with a declared header."""
    fields = None if header is None else encode_header(header)
    return Command(int(code), fields, body, flag=FLAG_ONEWAY if oneway else 0)


def _place(queue: MessageQueue) -> dict[str, Any]:
    return {"topic": queue.topic, "queue_id": queue.queue_id, "broker": queue.broker or None}


def _of(code: Code, header: Callable[P, object]) -> Callable[P, Command]:
    """A request that is its header, with the header's fields."""

    def make(*arguments: P.args, **fields: P.kwargs) -> Command:
        return request(code, header(*arguments, **fields))

    return make


def _of_queue(code: Code, header: type) -> Callable[[MessageQueue], Command]:
    """A request about a queue and nothing else."""
    return lambda queue: request(code, header(**_place(queue)))


def _bare(code: Code) -> Callable[[], Command]:
    """A request without a header."""
    return lambda: request(code)


# Clusters, brokers and topics; the first ones are asked of a name server.
cluster_info = _bare(Code.GET_BROKER_CLUSTER_INFO)
topic_list = _bare(Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
put_kv = _of(Code.PUT_KV_CONFIG, headers.PutKvRequest)
get_kv = _of(Code.GET_KV_CONFIG, headers.KvRequest)
wipe_write_permission = _of(Code.WIPE_WRITE_PERM_OF_BROKER, headers.WritePermissionRequest)
add_write_permission = _of(Code.ADD_WRITE_PERM_OF_BROKER, headers.WritePermissionRequest)
name_server_settings = _bare(Code.GET_NAMESRV_CONFIG)
delete_kv = _of(Code.DELETE_KV_CONFIG, headers.KvRequest)
delete_topic_on_name_server = _of(
    Code.DELETE_TOPIC_IN_NAMESRV, headers.DeleteTopicInNameServerRequest
)
delete_topic_on_broker = _of(Code.DELETE_TOPIC_IN_BROKER, headers.TopicRequest)
topic_config = _of(Code.GET_TOPIC_CONFIG, headers.GetTopicConfigRequest)
topic_stats = _of(Code.GET_TOPIC_STATS_INFO, headers.TopicRequest)
groups_of_topic = _of(Code.QUERY_TOPIC_CONSUME_BY_WHO, headers.TopicRequest)
all_topics = _of(Code.GET_ALL_TOPIC_CONFIG, headers.GetAllTopicsRequest)
system_topics = _bare(Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
runtime_info = _bare(Code.GET_BROKER_RUNTIME_INFO)
broker_settings = _bare(Code.GET_BROKER_CONFIG)
replication_status = _bare(Code.GET_BROKER_HA_STATUS)
reset_flushed = _of(Code.RESET_MASTER_FLUSH_OFFSET, replicas.ResetFlushedRequest)
statistics = _of(Code.VIEW_BROKER_STATS_DATA, headers.StatisticsRequest)
consume_stats_of_broker = _of(Code.GET_BROKER_CONSUME_STATS, headers.GetConsumeStatsOfBrokerRequest)
producers = _bare(Code.GET_ALL_PRODUCER_INFO)
roll_back_pops = _bare(Code.POP_ROLLBACK)
access_status = _bare(Code.SLUICE_ACCESS_STATUS)
account_versions = _bare(Code.GET_BROKER_CLUSTER_ACL_INFO)
accounts = _bare(Code.GET_BROKER_CLUSTER_ACL_CONFIG)
delete_account = _of(Code.DELETE_ACL_CONFIG, headers.DeleteAccountRequest)
set_white_addresses = _of(
    Code.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, headers.UpdateWhiteAddressesRequest
)
replica_status = _bare(Code.SLUICE_REPLICA_STATUS)
elect_master = _bare(Code.SLUICE_ELECT_MASTER)

# Queues.
offset_min = _of_queue(Code.GET_MIN_OFFSET, headers.QueueRequest)
offset_max = _of_queue(Code.GET_MAX_OFFSET, headers.GetMaxOffsetRequest)
earliest_time = _of_queue(Code.GET_EARLIEST_MSG_STORETIME, headers.QueueRequest)

# Groups; `consumer_list` is answered with code 1 when nobody is there, `consumer_connections`
# with 206.
all_groups = _bare(Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
group_config = _of(Code.GET_SUBSCRIPTIONGROUP_CONFIG, headers.GetGroupConfigRequest)
group_lanes = _of(Code.SLUICE_GROUP_LANES, headers.ConsumerGroupRequest)
delete_group = _of(Code.DELETE_SUBSCRIPTIONGROUP, headers.DeleteGroupRequest)
producer_connections = _of(Code.GET_PRODUCER_CONNECTION_LIST, headers.GetProducerConnectionsRequest)
consumer_list = _of(Code.GET_CONSUMER_LIST_BY_GROUP, headers.ConsumerGroupRequest)
consumer_connections = _of(Code.GET_CONSUMER_CONNECTION_LIST, headers.ConsumerGroupRequest)
consume_stats = _of(Code.GET_CONSUME_STATS, headers.GetConsumeStatsRequest)
filtered_lag = _of(Code.SLUICE_FILTERED_LAG, headers.FilteredLagRequest)
in_flight = _of(Code.SLUICE_IN_FLIGHT, popping.InFlightRequest)
clone_offsets = _of(Code.CLONE_GROUP_OFFSET, headers.CloneGroupOffsetRequest)
running_info = _of(Code.GET_CONSUMER_RUNNING_INFO, headers.GetConsumerRunningInfoRequest)
consume_directly = _of(Code.CONSUME_MESSAGE_DIRECTLY, headers.ConsumeMessageDirectlyRequest)

# Messages, delayed ones and transactions.
message_at = _of(Code.VIEW_MESSAGE_BY_ID, headers.ViewMessageRequest)
queue_units = _of(Code.QUERY_CONSUME_QUEUE, headers.QueryConsumeQueueRequest)
list_delayed = _of(Code.SLUICE_LIST_DELAYED, headers.ListDelayedRequest)
cancel_delayed = _of(Code.SLUICE_CANCEL_DELAYED, headers.CancelDelayedRequest)
list_transactions = _of(Code.SLUICE_LIST_TRANSACTIONS, headers.ListTransactionsRequest)
resolve_transaction = _of(Code.SLUICE_RESOLVE_TRANSACTION, headers.ResolveTransactionRequest)


def switch_master(broker_id: int | None) -> Command:
    """Another replica becomes master: this one, or whoever has most."""
    command = request(Code.SLUICE_SWITCH_MASTER)
    command.fields = {} if broker_id is None else {"brokerId": f"{broker_id}"}
    return command


def route(topic: str) -> Command:
    """Where a topic lives; asked of a name server."""
    return request(
        Code.GET_ROUTEINFO_BY_TOPIC,
        headers.GetRouteRequest(topic=topic, standard_json_only=True),
    )


def send(
    group: str,
    queue: MessageQueue,
    outgoing: Outgoing,
    born_time_ms: int,
    *,
    batch: bool = False,
    oneway: bool = False,
    is_brief: bool = False,
) -> Command:
    """One message, or a batch when `batch`; `is_brief`: only the id of the first message is asked
    for. HOT."""
    flag = FLAG_ONEWAY if oneway else 0
    odd = batch or outgoing.sys_flag or outgoing.flag or outgoing.reconsume_times
    if not odd and outgoing.reconsume_times_max is None:
        return SendRequest(group, queue, outgoing, born_time_ms, flag)
    fields = send_fields(group, queue, outgoing, born_time_ms)
    if batch:
        fields["m"] = "true"
    if is_brief:
        fields[BRIEF_FIELD] = "true"
    return Command(_SEND_BATCH if batch else SEND, fields, outgoing.body, flag=flag)


def recall(group: str, handle: RecallHandle) -> Command:
    """Takes a timed message back."""
    header = headers.RecallMessageRequest(
        group=group, topic=handle.topic, recall_handle=handle.encode(), broker=handle.broker
    )
    return request(Code.RECALL_MESSAGE, header)


def send_back(
    group: str, record: StoredMessage, topic: str, level: int, times_max: int | None
) -> Command:
    """Deliver a message again later; `topic` is the one it was first read from."""
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
    return request(Code.CONSUMER_SEND_MSG_BACK, header)


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
    """Messages of a queue from `offset` on.

    With `subscription` the expression travels in the request; without it the broker filters by the
    group's heartbeat. `suspend_timeout_ms` > 0 asks for a long poll. `bulk` asks a SluiceMQ broker
    for up to `bytes_max` without its cap of messages, `any_span` says that what it lets through may
    lie as far apart in the queue as it likes; a Java broker ignores both. `lite` is only a flag:
    code 361 would be refused by 4.x brokers, 11 is not (spec/traffic, item 18). HOT: as `send`.
    """
    sys_flag = (
        (PULL_SUSPEND if suspend_timeout_ms else 0)
        | (PULL_SUBSCRIPTION if subscription is not None else 0)
        | (PULL_COMMIT_OFFSET if commit_offset is not None else 0)
        | (PULL_LITE if lite else 0)
    )
    if subscription is not None:
        sub_version, expression_kind = subscription.version, subscription.kind
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


def look(group: str, queue: MessageQueue, offset: int) -> Command:
    """Look at the message at `offset`, whatever the group subscribes to. A SluiceMQ broker leaves
    the group's resets, lanes and figures alone; a RocketMQ broker takes it for a plain pull."""
    command = pull(
        group, queue, offset, count_max=1, bytes_max=1024, subscription=Subscription(queue.topic)
    )
    command.fields = {**(command.fields or {}), "sluiceLook": "true"}
    return command


def offset_of_group(group: str, queue: MessageQueue, *, zero_if_young: bool = False) -> Command:
    """The committed offset of a group; code 22 when there is none. `zero_if_young` leaves it to the
    broker to say 0 instead for a queue that has lost nothing yet, as Java's consumers do
    (spec/remoting.md §14)."""
    zero = None if zero_if_young else False
    return request(
        Code.QUERY_CONSUMER_OFFSET,
        headers.QueryConsumerOffsetRequest(group=group, zero_if_not_found=zero, **_place(queue)),
    )


def commit_offset(group: str, queue: MessageQueue, offset: int, *, oneway: bool = False) -> Command:
    """Sets the committed offset of a group."""
    header = headers.UpdateConsumerOffsetRequest(group=group, commit_offset=offset, **_place(queue))
    return request(Code.UPDATE_CONSUMER_OFFSET, header, oneway=oneway)


def offset_by_time(queue: MessageQueue, time_ms: int) -> Command:
    """The first offset stored at `time_ms` or later."""
    header = headers.SearchOffsetRequest(time_ms=time_ms, boundary="LOWER", **_place(queue))
    return request(Code.SEARCH_OFFSET_BY_TIMESTAMP, header)


def messages_by_key(
    topic: str, key: str, begin_ms: int, end_ms: int, count_max: int, *, is_unique: bool
) -> Command:
    """Messages of one broker with a key, or with that id of their producer."""
    header = headers.QueryMessageRequest(
        topic=topic, key=key, count_max=count_max, begin_time_ms=begin_ms, end_time_ms=end_ms,
        is_unique_key=is_unique,
    )  # fmt: skip
    return request(Code.QUERY_MESSAGE, header)


def reset_offsets(
    group: str, topic: str, time_ms: int, queue_id: int = -1, offset: int = -1
) -> Command:
    """Sends a group to a time of a topic on one broker; -1: behind the last message. With a queue:
    that one alone, to an offset."""
    header = headers.ResetOffsetRequest(
        topic=topic, group=group, time_ms=time_ms, force=True, queue_id=queue_id, offset=offset
    )
    return request(Code.INVOKE_BROKER_TO_RESET_OFFSET, header)


def try_filter(
    subscription: Subscription,
    group: str | None,
    begin_ms: int | None,
    end_ms: int | None,
    count_max: int,
) -> Command:
    """What a filter would do to stored messages; only SluiceMQ brokers answer."""
    header = headers.TryFilterRequest(
        topic=subscription.topic,
        expression=subscription.expression,
        kind=subscription.kind,
        group=group,
        begin_ms=begin_ms,
        end_ms=end_ms,
        count_max=count_max,
    )
    return request(Code.SLUICE_TRY_FILTER, header)


def heartbeat(value: bodies.Heartbeat, *, asks_lanes: bool = False) -> Command:
    """I am here, with these groups and subscriptions; a broker that is asked says that it has
    lanes."""
    command = request(Code.HEART_BEAT, body=bodies.encode_heartbeat(value))
    command.fields = {"sluiceLanes": "true"} if asks_lanes else None
    return command


def unregister(
    client_id: str, *, producer: str | None = None, consumer: str | None = None
) -> Command:
    """Takes this client out of a group at once."""
    header = headers.UnregisterClientRequest(
        client_id=client_id, producer_group=producer, consumer_group=consumer
    )
    return request(Code.UNREGISTER_CLIENT, header)


def check_subscription(client_id: str, group: str, subscription: Subscription) -> Command:
    """Can the broker serve this subscription? 23 when it does not compile, 1 when SQL92 is off."""
    asked = bodies.CheckClientConfig(client_id, group, subscription)
    return request(Code.CHECK_CLIENT_CONFIG, body=bodies.encode_check_client_config(asked))


def lock_queues(group: str, client_id: str, queues: Iterable[MessageQueue]) -> Command:
    """These queues of one broker for this client alone, for a minute."""
    body = bodies.encode_lock_batch(bodies.LockBatch(group, client_id, tuple(queues)))
    return request(Code.LOCK_BATCH_MQ, body=body)


def unlock_queues(group: str, client_id: str, queues: Iterable[MessageQueue]) -> Command:
    """They are free for others."""
    body = bodies.encode_lock_batch(bodies.LockBatch(group, client_id, tuple(queues)))
    return request(Code.UNLOCK_BATCH_MQ, body=body)


def update_topic(config: TopicConfig, attributes: Mapping[str, str | None]) -> Command:
    """Creates or changes a topic on one broker; an attribute that is None is taken away."""
    changes = [
        f"-{key}" if value is None else f"+{key}={value}" for key, value in attributes.items()
    ]
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
    return request(Code.UPDATE_AND_CREATE_TOPIC, header)


def update_group(config: GroupConfig) -> Command:
    """Creates or changes a consumer group on one broker."""
    body = tables.encode_group_config(config)
    return request(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)


def update_topics(configs: Iterable[TopicConfig]) -> Command:
    """The same of several topics, without their attributes."""
    values = {"topicConfigList": [tables.topic_object(one) for one in configs]}
    return request(Code.UPDATE_AND_CREATE_TOPIC_LIST, body=fastjson.dumps(values))


def update_groups(configs: Iterable[GroupConfig]) -> Command:
    """The same of several groups."""
    values = {"groupConfigList": [tables.group_object(one) for one in configs]}
    return request(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, body=fastjson.dumps(values))


def set_request_mode(mode: tables.RequestMode) -> Command:
    """How a group reads a topic on one broker."""
    return request(Code.SET_MESSAGE_REQUEST_MODE, body=tables.encode_request_mode(mode))


def change_settings(changes: Mapping[str, str], *, of_name_server: bool = False) -> Command:
    """Settings of a broker, or of a name server, as lines."""
    code = Code.UPDATE_NAMESRV_CONFIG if of_name_server else Code.UPDATE_BROKER_CONFIG
    return request(code, body="".join(f"{k}={v}\n" for k, v in changes.items()).encode())


def update_account(account: headers.UpdateAccountRequest) -> Command:
    """Creates an account of a broker, or changes what is given."""
    return request(Code.UPDATE_AND_CREATE_ACL_CONFIG, account)


def clean_up(what: str) -> Command:
    """Deletes what nobody needs: expired `queues`, unused `topics`, expired files of the `log`."""
    return request(_CLEAN_UP[what])


_CLEAN_UP: Final = {
    "queues": Code.CLEAN_EXPIRED_CONSUMEQUEUE,
    "topics": Code.CLEAN_UNUSED_TOPIC,
    "log": Code.DELETE_EXPIRED_COMMITLOG,
}

# ------------------------------------------------------------------------------------ answers

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
"""The broker cannot write: its disk is full, or it is not the master (any more)."""

SUBSCRIPTION_PENDING = frozenset({
    SUBSCRIPTION_NOT_EXIST, SUBSCRIPTION_NOT_LATEST, FILTER_DATA_NOT_EXIST, FILTER_DATA_NOT_LATEST,
})  # fmt: skip
"""Normal just after a subscription changed: the heartbeat has not arrived everywhere yet."""

_ERRORS: dict[int, tuple[type[RequestError], str]] = {
    2: (RequestError, "The broker is overloaded: send more slowly, or add a broker."),
    3: (RequestError, "The server is older than this feature: upgrade it."),
    MESSAGE_ILLEGAL: (
        RequestError,
        "Make the message smaller (body 4 MiB, properties 32 KiB by default).",
    ),
    NOT_AVAILABLE: (RequestError, "The broker cannot write: look at its disk space and its log."),
    16: (
        PermissionDeniedError,
        "Check the permission of topic, group and broker, and the credentials.",
    ),
    TOPIC_NOT_EXIST: (
        TopicNotFoundError,
        "Create it: sluice topic create TOPIC, or set autoCreateTopicEnable=true on the broker.",
    ),
    SUBSCRIPTION_PARSE_FAILED: (
        RequestError,
        "Check the expression: sluice filter check 'EXPRESSION'.",
    ),
    GROUP_NOT_EXIST: (
        GroupNotFoundError,
        "Create the group on the broker, or set autoCreateSubscriptionGroup=true there.",
    ),
}


_ACCESS_CURE: Final = (
    "Check access key and secret key, and what plain_acl.yml of the server allows them:"
    " sluice acl check says which rule decides."
)


def is_refused(answer: Command) -> bool:
    """Whether access control refuses: code 1 and the name of RocketMQ's exception."""
    return answer.code == SYSTEM_ERROR and is_access_remark(answer.remark or "")


def is_access_remark(remark: str) -> bool:
    """Return whether a server's remark is one of access control."""
    return "AclException" in remark


def request_error(answer: Command, address: str = "") -> RequestError:
    """The exception for an answer that is not success."""
    kind, fix = _ERRORS.get(answer.code, (RequestError, ""))
    if is_refused(answer):
        kind, fix = PermissionDeniedError, _ACCESS_CURE
    if "sluiceProtectedMode" in (answer.remark or ""):
        fix = ""  # the remark names it
    if answer.code == MESSAGE_ILLEGAL and "delay" in (answer.remark or ""):
        fix = "Deliver it sooner, or raise timerMaxDelaySec on the brokers (3 days by default)."
    return kind(answer.code, (answer.remark or "").strip(), address=address, fix=fix)


def expect_success(answer: Command, address: str = "") -> Command:
    """The answer itself when it is success; else raises `request_error`."""
    if answer.code != SUCCESS:
        raise request_error(answer, address)
    return answer


def number(answer: Command, name: str) -> int:
    """A number of the answer's header. Raises ProtocolError when it is not there."""
    text = (answer.fields or {}).get(name)
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ProtocolError(f"the answer's field {name} is {text!r}, not a number.") from None


class SendStatus(Enum):
    """How far a stored message got. Every value means: it is stored on the broker that answered."""

    OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


_ANSWER: Final[Any] = None if engine.client is None else engine.client.Answer
_SEND_STATUS = {status.value: status for status in SendStatus}


@dataclass(frozen=True, slots=True, repr=False)
class SendResult:
    """What became of a sent message.

    `message_id` is the id made by this client (UNIQ_KEY), `offset_message_id` says where the
    message lies, `queue_offset` is its position in `queue`; of a delayed message both are where it
    waits. `recall_handle` takes a timed message back. A one-way send has no result.
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


def send_results(
    answer: Command, queue: MessageQueue, message_ids: tuple[str, ...], address: str
) -> list[SendResult]:
    """One result a message; a batch's ids come joined by commas (spec/remoting.md §9)."""
    if answer.__class__ is _ANSWER and len(message_ids) == 1:
        plain: Any = answer
        return [plain.result(SendResult, SendStatus.OK, message_ids[0], queue)]
    status = _SEND_STATUS.get(answer.code)
    if status is None:
        raise request_error(answer, address)
    fields = answer.fields or {}
    place, handle = fields.get("msgId", ""), fields.get("recallHandle")
    queue_id = int(fields.get("queueId") or queue.queue_id)
    stored = queue if queue_id == queue.queue_id else queue._replace(queue_id=queue_id)
    first = number(answer, "queueOffset")
    if len(message_ids) == 1:
        place = place.partition(",")[0]
        return [SendResult(status, message_ids[0], place, stored, first, handle)]
    places = place.split(",", len(message_ids))
    return [
        SendResult(
            status,
            message_id,
            places[index] if index < len(places) else "",
            stored,
            first + index,
            handle,
        )
        for index, message_id in enumerate(message_ids)
    ]


class PullStatus(Enum):
    """RocketMQ's four outcomes of a pull."""

    FOUND = SUCCESS
    NO_NEW_MSG = PULL_NOT_FOUND
    NO_MATCHED_MSG = PULL_RETRY_IMMEDIATELY
    OFFSET_ILLEGAL = PULL_OFFSET_MOVED


_PULL_STATUS = {status.value: status for status in PullStatus}


@dataclass(frozen=True, slots=True)
class PullAnswer:
    """A pull's outcome: where to go on, what the queue holds, the records as they travelled, and
    the id of the replica to ask next."""

    status: PullStatus
    next_offset: int
    offset_min: int
    offset_max: int
    data: bytes | memoryview
    remark: str
    next_id: int = MASTER_ID


def pull_answer(answer: Command, address: str) -> PullAnswer:
    """Raises the request's error for every code that is not one of the four outcomes."""
    status = _PULL_STATUS.get(answer.code)
    if status is None:
        raise request_error(answer, address)
    return PullAnswer(
        status,
        number(answer, "nextBeginOffset"),
        number(answer, "minOffset"),
        number(answer, "maxOffset"),
        answer.body if status is PullStatus.FOUND else b"",
        answer.remark or "",
        int(fields_of(answer).get("suggestWhichBrokerId") or MASTER_ID),
    )


def fields_of(answer: Command) -> Mapping[str, str]:
    """The header fields, never None."""
    return answer.fields or {}
