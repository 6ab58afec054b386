"""Operations on clusters, brokers, topics and the offsets of queues.

An operation is a generator function, a `Conversation`, whose first parameter is the directory.
`operations.AdminOperations` makes the operations methods of `Admin`. Offsets are positions in one
queue, times are milliseconds since 1970.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.directory import NAME_SERVERS, Directory
from sluicemq.client.core.names import check_topic
from sluicemq.client.core.requests import (
    QUERY_NOT_FOUND,
    SUCCESS,
    TOPIC_NOT_EXIST,
    expect_success,
    int_field,
    is_access_denied,
    request_error,
)
from sluicemq.errors import ConfigurationError, ConnectionLostError, RequestTimeoutError
from sluicemq.model.topic import (
    MASTER_ID,
    MESSAGE_TYPE,
    MESSAGE_TYPES,
    ORDER_TOPICS,
    MessageQueue,
    TopicConfig,
    readable_queues,
)
from sluicemq.wire import bodies, fastjson
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command
from sluicemq.wire.tables import decode_topic_config

HIDDEN_SHOWN_MAX: Final = 8
"""The most queues that the error about hidden messages names."""

# -------------------------------------------------------------------- clusters and brokers


def cluster_info(directory: Directory) -> Conversation[bodies.ClusterInfo]:
    """Return all clusters and brokers that a name server knows."""
    answer = yield from directory.call(NAME_SERVERS, requests.cluster_info())
    return bodies.decode_cluster_info(answer.body)


def masters_of(cluster_state: bodies.ClusterInfo, cluster: str | None = None) -> dict[str, str]:
    """Return broker name -> address of its master, from the state of the clusters.

    `cluster` limits this to one cluster; None means all. Brokers without a master are left out.
    Raises ConfigurationError if the cluster does not exist.
    """
    if cluster is not None and cluster not in cluster_state.clusters:
        raise ConfigurationError(
            f"the cluster {cluster!r} does not exist.",
            fix=f"Use one of: {', '.join(sorted(cluster_state.clusters)) or 'none'}.",
        )
    broker_names = (
        set(cluster_state.brokers) if cluster is None else set(cluster_state.clusters[cluster])
    )
    return {
        name: broker_data.addresses[MASTER_ID]
        for name, broker_data in sorted(cluster_state.brokers.items())
        if name in broker_names and MASTER_ID in broker_data.addresses
    }


def masters(directory: Directory, cluster: str | None = None) -> Conversation[dict[str, str]]:
    """Return broker name -> address of its master, of one cluster or of all if `cluster` is None.

    Brokers without a master are left out. Raises ConfigurationError if the cluster does not exist.
    """
    return masters_of((yield from cluster_info(directory)), cluster)


def masters_of_topic(directory: Directory, topic: str) -> Conversation[dict[str, str]]:
    """Return broker name -> address of its master, for each broker in the route of a topic.

    Brokers without a master are left out. Raises RouteNotFoundError if the topic has no route.
    """
    route = yield from directory.get_route(topic)
    addresses = (
        (broker_data.broker, broker_data.addresses.get(MASTER_ID)) for broker_data in route.brokers
    )
    return {broker: address for broker, address in addresses if address is not None}


def ask_each(
    brokers: Mapping[str, str], command: Command, *, ignored_codes: Collection[int] | None = ()
) -> Conversation[list[tuple[str, str, Command]]]:
    """Send one request to several brokers, and return the successful responses.

    Returns a list of (broker name, address, response). `brokers` maps names to addresses. A broker
    that answers with a code in `ignored_codes` has nothing to report and is left out; None means
    every code. Raises RequestError for any other code. Access that is denied is an error too,
    unless `ignored_codes` is None.
    """
    responses = []
    for name, address in brokers.items():
        answer = yield Call(address, command)
        if answer.code == SUCCESS:
            responses.append((name, address, answer))
        elif ignored_codes is not None and (
            answer.code not in ignored_codes or is_access_denied(answer)
        ):
            raise request_error(answer, address)
    return responses


def ask_masters(
    directory: Directory,
    command: Command,
    *,
    topic: str | None = None,
    ignored_codes: Collection[int] = (),
) -> Conversation[list[tuple[str, str, Command]]]:
    """Send one request to every master, or to the masters of `topic`, and return the successes.

    Returns (broker name, address, response) of each. A master that answers with a code in
    `ignored_codes` is left out. Raises RequestError for any other code.
    """
    if topic is None:
        brokers = yield from masters(directory)
    else:
        brokers = yield from masters_of_topic(directory, topic)
    return (yield from ask_each(brokers, command, ignored_codes=ignored_codes))


def runtime(directory: Directory, address: str) -> Conversation[dict[str, str]]:
    """Return the counters of the broker at an address."""
    answer = yield from directory.call(address, requests.runtime_info())
    return bodies.decode_kv_table(answer.body)


def access_status(directory: Directory) -> Conversation[dict[str, dict[str, Any]]]:
    """Return server address -> state of its access rules, for brokers and name servers.

    Every broker is included, and each name server whose rules are enabled. A state contains
    `server` ("broker" or "nameserver"), `enabled`, `sinceMs` (when the rules came into force),
    `accounts`, the last `error`, and `refused`, the number of refused requests by access key.
    """
    states: dict[str, dict[str, Any]] = {}
    for server in directory.name_servers:
        try:
            answer = yield Call(server, requests.access_status())
        except (ConnectionLostError, RequestTimeoutError):
            continue  # if no name server answers, the requests below raise
        if answer.code == SUCCESS and (state := fastjson.loads(answer.body)).get("enabled"):
            states[server] = {"server": "nameserver", **state}
    for _, address, answer in (yield from ask_masters(directory, requests.access_status())):
        states[address] = {"server": "broker", **fastjson.loads(answer.body)}
    return states


# ---------------------------------------------------------------------------------- topics


def topics(directory: Directory) -> Conversation[list[str]]:
    """Return the names of all topics, sorted."""
    answer = yield from directory.call(NAME_SERVERS, requests.topic_list())
    return sorted(set(bodies.decode_topic_list(answer.body)))


def queues(directory: Directory, topic: str) -> Conversation[list[MessageQueue]]:
    """Return the readable queues of a topic, sorted. Raises RouteNotFoundError."""
    return readable_queues(topic, (yield from directory.get_route(topic)))


def create_topic(
    directory: Directory,
    name: str,
    *,
    queues: int = 8,
    write_queues: int | None = None,
    perm: int = 6,
    cluster: str | None = None,
    order: bool | None = None,
    type: str | None = None,  # noqa: A002 - RocketMQ's name for it
    attributes: Mapping[str, str | None] | None = None,
    force: bool = False,
) -> Conversation[list[str]]:
    """Create or change a topic on every master (of one cluster), and return the broker names.

    `queues` is the number of queues that consumers read on each broker, and `write_queues` the
    number that producers send to; None means the same. `perm` is 2 (write), 4 (read) or 6 (both).
    `type` is "normal", "fifo", "delay" or "transaction" and sets the attribute message.type.
    `attributes` are other attributes to set, or to remove if the value is None. Attributes that are
    not named keep their values.

    If `order` is True, producers go on using all queues of the topic while a broker is down, so
    that the messages of a sharding key stay in one queue. This needs orderMessageEnable=true on
    the name servers. False ends this, and None changes nothing.

    A topic can get fewer queues. Consumers then do not read the messages in the other queues. Such
    a change is refused while these queues have messages, unless `force` is True.

    Raises ConfigurationError for an invalid name, count, permission, type or cluster, and for a
    change that would hide messages; RequestError if a broker refuses the request.
    """
    writers = queues if write_queues is None else write_queues
    changes = dict(attributes or {})
    check_topic(name)
    _check_topic_settings(name, min(queues, writers), perm, type, changes)
    if type is not None:
        changes[MESSAGE_TYPE] = type.upper()
    config = TopicConfig(name, queues, writers, perm, order=bool(order))
    brokers = yield from masters(directory, cluster)
    if not brokers:
        raise ConfigurationError("no broker is registered.", fix='Start one with "sluice broker".')
    if not force:
        yield from _check_nothing_hidden(brokers, name, queues)
    if order is not None:  # first, because brokers read it when they register the topic
        queue_counts = dict.fromkeys(brokers, writers) if order else {}
        yield from _set_order_config(directory, name, queue_counts)
    yield from ask_each(brokers, requests.update_topic(config, changes))
    directory.routes.expire(name)
    return sorted(brokers)


def _set_order_config(
    directory: Directory, topic: str, queue_counts: Mapping[str, int]
) -> Conversation[None]:
    """Store the fixed number of queues of an ordered topic at all name servers.

    `queue_counts` maps broker names to numbers of queues: {"a": 4, "b": 4} is stored as "a:4;b:4".
    An empty mapping deletes the configuration.
    """
    command = requests.delete_kv(namespace=ORDER_TOPICS, key=topic)
    if queue_counts:
        entries = [f"{broker}:{count}" for broker, count in sorted(queue_counts.items())]
        command = requests.put_kv(namespace=ORDER_TOPICS, key=topic, value=";".join(entries))
    for server in directory.name_servers:
        yield from directory.call(server, command)


def _check_topic_settings(
    topic: str,
    queues: int,
    perm: int,
    message_type: str | None,
    attributes: Mapping[str, str | None],
) -> None:
    """Raise ConfigurationError if brokers would not accept these settings of a topic.

    There must be 1 or more queues, `perm` must be 0 to 7, and `message_type` a known type or None.
    Attributes must not contain characters that separate them in the request.
    """
    if queues < 1:
        raise ConfigurationError(
            f"a topic must have at least 1 queue, got {queues}.", fix="Use 1 or more queues."
        )
    if not 0 <= perm <= 7:
        raise ConfigurationError(
            f"the permission must be 0 to 7, got {perm}.",
            fix="Use 2 (write), 4 (read) or 6 (both).",
        )
    if message_type is not None and message_type.upper() not in MESSAGE_TYPES:
        raise ConfigurationError(
            f"the type of topic {topic} must not be {message_type!r}.",
            fix=f"Use one of {', '.join(known_type.lower() for known_type in MESSAGE_TYPES)}.",
        )
    for name, attribute in attributes.items():
        is_valid_key = name and "," not in name and "=" not in name
        is_valid_value = attribute is None or (attribute and "," not in attribute)
        if not is_valid_key or not is_valid_value:
            raise ConfigurationError(
                f"the attribute {name!r} = {attribute!r} cannot be sent.",
                fix="Use a name and a value that are not empty and have no comma, and no = in the "
                "name.",
            )


def _check_nothing_hidden(brokers: Mapping[str, str], name: str, queues: int) -> Conversation[None]:
    """Raise ConfigurationError if queues that consumers would no longer read have messages.

    `queues` is the new number of queues of the topic `name`, so queue ids from `queues` on are
    hidden. `brokers` maps the names of the brokers to ask to addresses.
    """
    command = requests.topic_stats(topic=name)
    hidden_count = 0
    hidden_queues: list[str] = []
    for _, _, answer in (yield from ask_each(brokers, command, ignored_codes={TOPIC_NOT_EXIST})):
        for queue, stats in sorted(bodies.decode_topic_stats(answer.body).queues.items()):
            stored = stats.offset_max - stats.offset_min
            if queue.queue_id >= queues and stored > 0:
                hidden_count += stored
                hidden_queues.append(f"{queue.broker}:{queue.queue_id}")
    if hidden_queues:
        shown_queues = ", ".join(hidden_queues[:HIDDEN_SHOWN_MAX])
        if len(hidden_queues) > HIDDEN_SHOWN_MAX:
            shown_queues += ", …"
        raise ConfigurationError(
            f"with {queues} queues on each broker, no consumer would read {hidden_count} "
            f"stored messages of topic {name} ({shown_queues}).",
            fix="Let the groups read these queues first, or hide them with --force (in Python: "
            "force=True). They can be read again when the topic has as many queues as before.",
        )


def delete_topic(
    directory: Directory, name: str, *, cluster: str | None = None
) -> Conversation[None]:
    """Delete a topic on every master, and then on the name servers.

    `cluster` limits this to one cluster; None means all clusters, and then the topic's order
    configuration is deleted, too.
    """
    cluster_state = yield from cluster_info(directory)
    yield from ask_each(
        masters_of(cluster_state, cluster), requests.delete_topic_on_broker(topic=name)
    )
    for server in directory.name_servers:
        for cluster_name in cluster_state.clusters if cluster is None else [cluster]:
            command = requests.delete_topic_on_name_server(topic=name, cluster=cluster_name)
            yield from directory.call(server, command)
        if cluster is None:
            yield Call(server, requests.delete_kv(namespace=ORDER_TOPICS, key=name))
    directory.routes.remove(name)


def topic_configs(directory: Directory, topic: str) -> Conversation[dict[str, TopicConfig]]:
    """Return broker name -> configuration of a topic with its attributes.

    Brokers of RocketMQ 4 do not report it and are left out. Raises RouteNotFoundError if the topic
    does not exist.
    """
    command = requests.topic_config(topic=topic, logical=True)
    ignored_codes = {TOPIC_NOT_EXIST, int(ResponseCode.REQUEST_CODE_NOT_SUPPORTED)}
    answers = yield from ask_masters(directory, command, topic=topic, ignored_codes=ignored_codes)
    return {name: decode_topic_config(answer.body) for name, _, answer in answers}


def topic_stats(directory: Directory, topic: str) -> Conversation[bodies.TopicStats]:
    """Return the lowest and highest offset of each queue of a topic, and the topic's message rate.

    The rate is the number of messages per second that arrive, over all masters. Raises
    RouteNotFoundError if the topic does not exist.
    """
    command = requests.topic_stats(topic=topic)
    stats_by_queue: dict[MessageQueue, bodies.QueueStats] = {}
    rate = 0.0
    for _, _, answer in (yield from ask_masters(directory, command, topic=topic)):
        stats = bodies.decode_topic_stats(answer.body)
        stats_by_queue |= stats.queues
        rate += stats.puts_per_second
    return bodies.TopicStats(dict(sorted(stats_by_queue.items())), rate)


def topic_offsets(
    directory: Directory, topic: str
) -> Conversation[dict[MessageQueue, bodies.QueueStats]]:
    """Return queue -> its first offset, its next offset, and the time of its last message.

    Raises RouteNotFoundError.
    """
    return dict((yield from topic_stats(directory, topic)).queues)


def groups_of_topic(directory: Directory, topic: str) -> Conversation[list[str]]:
    """Return the names of the groups that read a topic or have offsets in it, sorted.

    Raises RouteNotFoundError if the topic does not exist.
    """
    command = requests.groups_of_topic(topic=topic)
    groups: set[str] = set()
    for _, _, answer in (yield from ask_masters(directory, command, topic=topic)):
        groups.update(bodies.decode_group_list(answer.body))
    return sorted(groups - {topic})  # RocketMQ lists the topic itself (spec/traffic, item 29)


# ---------------------------------------------------------------------------------- queues


def offset_min(directory: Directory, queue: MessageQueue) -> Conversation[int]:
    """Return the first offset that is stored in a queue."""
    return int_field((yield from directory.call(queue, requests.offset_min(queue))), "offset")


def offset_max(directory: Directory, queue: MessageQueue) -> Conversation[int]:
    """Return the offset that the next message of a queue will get."""
    return int_field((yield from directory.call(queue, requests.offset_max(queue))), "offset")


def earliest_time(directory: Directory, queue: MessageQueue) -> Conversation[int]:
    """Return the time at which the oldest message of a queue was stored, -1 if there is none."""
    return int_field((yield from directory.call(queue, requests.earliest_time(queue))), "timestamp")


def offsets(directory: Directory, queue: MessageQueue) -> Conversation[tuple[int, int]]:
    """Return (first stored offset, offset of the next message) of a queue."""
    first_offset = yield from offset_min(directory, queue)
    return first_offset, (yield from offset_max(directory, queue))


def offset_by_time(directory: Directory, queue: MessageQueue, time_ms: int) -> Conversation[int]:
    """Return the first offset of a queue whose message was stored at `time_ms` or later."""
    command = requests.offset_by_time(queue, time_ms)
    return int_field((yield from directory.call(queue, command)), "offset")


def committed_offset(
    directory: Directory, group: str, queue: MessageQueue
) -> Conversation[int | None]:
    """Return the committed offset of a group in a queue, None if it has none.

    Raises RouteNotFoundError if the topic does not exist, RequestError if the broker refuses.
    """
    address = yield from directory.get_read_address(queue)
    answer = yield Call(address, requests.offset_of_group(group, queue))
    if answer.code == QUERY_NOT_FOUND:
        return None
    return int_field(expect_success(answer, address), "offset")


def commit_offset(
    directory: Directory, group: str, queue: MessageQueue, offset: int
) -> Conversation[None]:
    """Set the committed offset of a group in a queue, also to a lower offset."""
    yield from directory.call(queue, requests.commit_offset(group, queue, offset))
