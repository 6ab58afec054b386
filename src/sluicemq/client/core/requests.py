"""What the client asks for: values in, commands out.

Every request of the client is built here, so that the asyncio shell and the blocking shell send the
same bytes. Headers are the declared ones of `protocol.headers`; only `send`, the hot one, writes
its letters itself (spec/remoting.md §8) behind a test that compares it with the declared header. A
command made here has no opaque yet: the connection gives it one.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from sluicemq.model.message import StoredMessage
from sluicemq.model.recall import RecallHandle
from sluicemq.model.subscription import TAG, Subscription
from sluicemq.model.topic import (
    DEFAULT_TOPIC,
    ORDER_TOPICS,
    GroupConfig,
    MessageQueue,
    TopicConfig,
)
from sluicemq.wire import bodies, headers, tables
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import FLAG_ONEWAY, Command
from sluicemq.wire.headers import (
    BRIEF_FIELD,
    PULL_COMMIT_OFFSET,
    PULL_LITE,
    PULL_SUBSCRIPTION,
    PULL_SUSPEND,
)

NEW_TOPIC_QUEUES: Final = 4
"""Queues of a topic that the broker creates on our first send (defaultTopicQueueNums)."""
_SEND: Final = int(RequestCode.SEND_MESSAGE_V2)
_SEND_BATCH: Final = int(RequestCode.SEND_BATCH_MESSAGE)
_QUEUES: Final = str(NEW_TOPIC_QUEUES)


def _command(code: RequestCode, header: Any = None, *, oneway: bool = False) -> Command:
    fields = None if header is None else encode_header(header)
    return Command(int(code), fields, flag=FLAG_ONEWAY if oneway else 0)


def route(topic: str) -> Command:
    """Where a topic lives; asked of a name server."""
    return _command(
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        headers.GetRouteRequest(topic=topic, standard_json_only=True),
    )


def send(
    group: str,
    queue: MessageQueue,
    properties: str,
    body: bytes | memoryview,
    *,
    sys_flag: int = 0,
    flag: int = 0,
    born_time_ms: int = 0,
    batch: bool = False,
    oneway: bool = False,
    reconsume_times: int = 0,
    reconsume_times_max: int | None = None,
    is_brief: bool = False,
) -> Command:
    """One message, or a batch body when `batch`; `is_brief`: only the id of the first message is
    asked for. HOT: a literal of its fields, nothing generic."""
    fields = {
        "a": group,
        "b": queue.topic,
        "c": DEFAULT_TOPIC,
        "d": _QUEUES,
        "e": str(queue.queue_id),
        "f": str(sys_flag),
        "g": str(born_time_ms),
        "h": str(flag),
        "i": properties,
        "j": str(reconsume_times) if reconsume_times else "0",
        "k": "false",
        "m": "true" if batch else "false",
        "n": queue.broker,
    }
    if reconsume_times_max is not None:
        fields["l"] = str(reconsume_times_max)
    if is_brief:
        fields[BRIEF_FIELD] = "true"
    code = _SEND_BATCH if batch else _SEND
    return Command(code, fields, body, flag=FLAG_ONEWAY if oneway else 0)


def recall(group: str, handle: RecallHandle) -> Command:
    """Takes a timed message back."""
    header = headers.RecallMessageRequest(
        group=group, topic=handle.topic, recall_handle=handle.encode(), broker=handle.broker
    )
    return _command(RequestCode.RECALL_MESSAGE, header)


def list_delayed(topic: str | None, key: str | None, cursor: str | None, count: int) -> Command:
    """A page of the messages that wait on a SluiceMQ broker."""
    header = headers.ListDelayedRequest(topic=topic, key=key, cursor=cursor, count_max=count)
    return _command(RequestCode.SLUICE_LIST_DELAYED, header)


def cancel_delayed(handle: str) -> Command:
    """Never deliver a message that waits on a SluiceMQ broker."""
    return _command(RequestCode.SLUICE_CANCEL_DELAYED, headers.CancelDelayedRequest(handle=handle))


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
    return _command(RequestCode.CONSUMER_SEND_MSG_BACK, header)


def lock_queues(group: str, client_id: str, queues: Iterable[MessageQueue]) -> Command:
    """These queues of one broker for this client alone, for a minute."""
    command = _command(RequestCode.LOCK_BATCH_MQ)
    command.body = bodies.encode_lock_batch(bodies.LockBatch(group, client_id, tuple(queues)))
    return command


def unlock_queues(group: str, client_id: str, queues: Iterable[MessageQueue]) -> Command:
    """They are free for others."""
    command = _command(RequestCode.UNLOCK_BATCH_MQ)
    command.body = bodies.encode_lock_batch(bodies.LockBatch(group, client_id, tuple(queues)))
    return command


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
) -> Command:
    """Messages of a queue from `offset` on.

    With `subscription` the expression travels in the request; without it the broker filters by the
    group's heartbeat. `suspend_timeout_ms` > 0 asks for a long poll. `bulk` asks a SluiceMQ broker
    for up to `bytes_max` without its cap of messages; a Java broker ignores that. `lite` is only a
    flag: code 361 would be refused by 4.x brokers, 11 is not (spec/traffic, item 18).
    """
    sys_flag = (
        (PULL_SUSPEND if suspend_timeout_ms else 0)
        | (PULL_SUBSCRIPTION if subscription is not None else 0)
        | (PULL_COMMIT_OFFSET if commit_offset is not None else 0)
        | (PULL_LITE if lite else 0)
    )
    header = headers.PullMessageRequest(
        group=group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        queue_offset=offset,
        message_count_max=count_max,
        message_bytes_max=bytes_max,
        sys_flag=sys_flag,
        commit_offset=commit_offset or 0,
        suspend_timeout_ms=suspend_timeout_ms,
        subscription=None if subscription is None else subscription.expression,
        sub_version=sub_version if subscription is None else subscription.version,
        expression_kind=expression_kind if subscription is None else subscription.kind,
        broker=queue.broker or None,
        bulk=bulk or None,
    )
    return _command(RequestCode.PULL_MESSAGE, header)


def offset_of_group(group: str, queue: MessageQueue, *, zero_if_young: bool = False) -> Command:
    """The committed offset of a group; code 22 when there is none. `zero_if_young` leaves it to the
    broker to say 0 instead for a queue that has lost nothing yet, as Java's consumers do
    (spec/remoting.md §14)."""
    zero = None if zero_if_young else False
    return _command(
        RequestCode.QUERY_CONSUMER_OFFSET,
        headers.QueryConsumerOffsetRequest(group=group, zero_if_not_found=zero, **_place(queue)),
    )


def commit_offset(group: str, queue: MessageQueue, offset: int, *, oneway: bool = False) -> Command:
    """Sets the committed offset of a group."""
    header = headers.UpdateConsumerOffsetRequest(group=group, commit_offset=offset, **_place(queue))
    return _command(RequestCode.UPDATE_CONSUMER_OFFSET, header, oneway=oneway)


def offset_min(queue: MessageQueue) -> Command:
    """The first offset that is still stored."""
    return _command(RequestCode.GET_MIN_OFFSET, headers.QueueRequest(**_place(queue)))


def offset_max(queue: MessageQueue) -> Command:
    """The offset that the next message will get."""
    return _command(RequestCode.GET_MAX_OFFSET, headers.GetMaxOffsetRequest(**_place(queue)))


def offset_by_time(queue: MessageQueue, time_ms: int, *, upper: bool = False) -> Command:
    """The first offset stored at `time_ms` or later (`upper`: the last at or before it)."""
    header = headers.SearchOffsetRequest(
        time_ms=time_ms, boundary="UPPER" if upper else "LOWER", **_place(queue)
    )
    return _command(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)


def earliest_time(queue: MessageQueue) -> Command:
    """When the first stored message of a queue was stored; -1 when there is none."""
    header = headers.QueueRequest(**_place(queue))
    return _command(RequestCode.GET_EARLIEST_MSG_STORETIME, header)


def consumer_list(group: str) -> Command:
    """The ids of the members of a group; code 1 when nobody is there."""
    return _command(
        RequestCode.GET_CONSUMER_LIST_BY_GROUP, headers.ConsumerGroupRequest(group=group)
    )


def heartbeat(value: bodies.Heartbeat, *, asks_lanes: bool = False) -> Command:
    """I am here, with these groups and subscriptions; a broker that is asked says that it has
    lanes."""
    command = _command(RequestCode.HEART_BEAT)
    if asks_lanes:
        command.fields = {"sluiceLanes": "true"}
    command.body = bodies.encode_heartbeat(value)
    return command


def unregister(
    client_id: str, *, producer: str | None = None, consumer: str | None = None
) -> Command:
    """Takes this client out of a group at once."""
    header = headers.UnregisterClientRequest(
        client_id=client_id, producer_group=producer, consumer_group=consumer
    )
    return _command(RequestCode.UNREGISTER_CLIENT, header)


def check_subscription(client_id: str, group: str, subscription: Subscription) -> Command:
    """Can the broker serve this subscription? 23 when it does not compile, 1 when SQL92 is off."""
    command = _command(RequestCode.CHECK_CLIENT_CONFIG)
    command.body = bodies.encode_check_client_config(
        bodies.CheckClientConfig(client_id, group, subscription)
    )
    return command


def cluster_info() -> Command:
    """All clusters and brokers; asked of a name server."""
    return _command(RequestCode.GET_BROKER_CLUSTER_INFO)


def topic_list() -> Command:
    """All topics; asked of a name server."""
    return _command(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)


def put_order(topic: str, value: str) -> Command:
    """Makes a topic one of strict order at a name server; `value` is `broker:queues;…`."""
    header = headers.PutKvRequest(namespace=ORDER_TOPICS, key=topic, value=value)
    return _command(RequestCode.PUT_KV_CONFIG, header)


def delete_order(topic: str) -> Command:
    """Takes that back."""
    header = headers.KvRequest(namespace=ORDER_TOPICS, key=topic)
    return _command(RequestCode.DELETE_KV_CONFIG, header)


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
    return _command(RequestCode.UPDATE_AND_CREATE_TOPIC, header)


def update_group(config: GroupConfig) -> Command:
    """Creates or changes a consumer group on one broker."""
    command = _command(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP)
    command.body = tables.encode_group_config(config)
    return command


def delete_topic_on_broker(name: str) -> Command:
    """Drops a topic on one broker."""
    return _command(RequestCode.DELETE_TOPIC_IN_BROKER, headers.TopicRequest(topic=name))


def delete_topic_on_name_server(name: str, cluster: str) -> Command:
    """Drops a topic from the routes of one name server."""
    header = headers.DeleteTopicInNameServerRequest(topic=name, cluster=cluster)
    return _command(RequestCode.DELETE_TOPIC_IN_NAMESRV, header)


def topic_config(name: str) -> Command:
    """What one broker keeps of a topic; RocketMQ knows this from 5 on."""
    header = headers.GetTopicConfigRequest(topic=name, logical=True)
    return _command(RequestCode.GET_TOPIC_CONFIG, header)


def topic_stats(name: str) -> Command:
    """First and last offset of each queue of a topic on one broker."""
    return _command(RequestCode.GET_TOPIC_STATS_INFO, headers.TopicRequest(topic=name))


def groups_of_topic(name: str) -> Command:
    """The groups that read a topic on one broker."""
    return _command(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, headers.TopicRequest(topic=name))


def consume_stats(group: str, topic: str | None = None) -> Command:
    """Committed and last offset of each queue that a group reads on one broker."""
    return _command(
        RequestCode.GET_CONSUME_STATS, headers.GetConsumeStatsRequest(group=group, topic=topic)
    )


def all_groups() -> Command:
    """All consumer group settings of one broker."""
    return _command(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)


def group_lanes(group: str) -> Command:
    """A group's contract and its lanes on one SluiceMQ broker."""
    return _command(RequestCode.SLUICE_GROUP_LANES, headers.ConsumerGroupRequest(group=group))


def runtime_info() -> Command:
    """The counters of one broker."""
    return _command(RequestCode.GET_BROKER_RUNTIME_INFO)


def message_at(topic: str, physical_offset: int) -> Command:
    """One message by its place in the commit log."""
    header = headers.ViewMessageRequest(topic=topic, physical_offset=physical_offset)
    return _command(RequestCode.VIEW_MESSAGE_BY_ID, header)


def messages_by_key(
    topic: str, key: str, begin_ms: int, end_ms: int, count_max: int, *, is_unique: bool
) -> Command:
    """Messages of one broker with a key, or with that id of their producer."""
    header = headers.QueryMessageRequest(
        topic=topic, key=key, count_max=count_max, begin_time_ms=begin_ms, end_time_ms=end_ms,
        is_unique_key=is_unique,
    )  # fmt: skip
    return _command(RequestCode.QUERY_MESSAGE, header)


def _place(queue: MessageQueue) -> dict[str, Any]:
    return {"topic": queue.topic, "queue_id": queue.queue_id, "broker": queue.broker or None}


def list_transactions(
    group: str | None, topic: str | None, after: int | None, count: int
) -> Command:
    """A page of the undecided transactions of a SluiceMQ broker."""
    header = headers.ListTransactionsRequest(group=group, topic=topic, after=after, count_max=count)
    return _command(RequestCode.SLUICE_LIST_TRANSACTIONS, header)


def access_status() -> Command:
    """How the access rules of a SluiceMQ broker stand."""
    return Command(RequestCode.SLUICE_ACCESS_STATUS)


def resolve_transaction(transaction_id: str, outcome: int) -> Command:
    """Commit (8) or roll back (12) a transaction on a SluiceMQ broker."""
    header = headers.ResolveTransactionRequest(transaction_id=transaction_id, outcome=outcome)
    return _command(RequestCode.SLUICE_RESOLVE_TRANSACTION, header)


def reset_offsets(group: str, topic: str, time_ms: int) -> Command:
    """Sends a group to a time of a topic on one broker; -1: behind the last message."""
    header = headers.ResetOffsetRequest(
        topic=topic, group=group, time_ms=time_ms, force=True, queue_id=-1, offset=-1
    )
    return _command(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)


def clone_offsets(source: str, target: str, topic: str | None) -> Command:
    """Gives one group the offsets of another on one broker."""
    header = headers.CloneGroupOffsetRequest(
        source_group=source, target_group=target, topic=topic, offline=False
    )
    return _command(RequestCode.CLONE_GROUP_OFFSET, header)


def consumer_connections(group: str) -> Command:
    """Who of a group is connected to one broker; 206 when nobody is."""
    header = headers.ConsumerGroupRequest(group=group)
    return _command(RequestCode.GET_CONSUMER_CONNECTION_LIST, header)


def running_info(group: str, client_id: str, *, stack: bool) -> Command:
    """What a consumer does; the broker asks it."""
    header = headers.GetConsumerRunningInfoRequest(
        group=group, client_id=client_id, stack_enable=stack
    )
    return _command(RequestCode.GET_CONSUMER_RUNNING_INFO, header)


def consume_directly(group: str, client_id: str, offset_message_id: str, topic: str) -> Command:
    """Lets a consumer handle a stored message now; the broker sends it to it."""
    header = headers.ConsumeMessageDirectlyRequest(
        group=group, client_id=client_id, message_id=offset_message_id, topic=topic
    )
    return _command(RequestCode.CONSUME_MESSAGE_DIRECTLY, header)


def filtered_lag(
    group: str, topic: str | None = None, subscription: Subscription | None = None
) -> Command:
    """How many messages before a group match, exactly; only SluiceMQ brokers know it."""
    header = headers.FilteredLagRequest(
        group=group,
        topic=topic,
        expression=None if subscription is None else subscription.expression,
        kind=None if subscription is None else subscription.kind,
    )
    return _command(RequestCode.SLUICE_FILTERED_LAG, header)


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
    return _command(RequestCode.SLUICE_TRY_FILTER, header)
