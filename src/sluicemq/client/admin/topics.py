"""Clusters, brokers and topics; the offsets and times at the ends of a queue.

An operation is a Talk whose first parameter is the directory; `core.admin` makes them methods of
`Admin`. Offsets are positions in one queue, times are milliseconds since 1970.
"""

from collections.abc import Collection, Mapping
from typing import Any

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
    read_queues,
)
from sluicemq.wire import bodies, fastjson
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command
from sluicemq.wire.tables import decode_topic_config

# -------------------------------------------------------------------- clusters and brokers


def cluster_info(directory: Directory) -> Conversation[bodies.ClusterInfo]:
    """All clusters and brokers that the name server knows."""
    answer = yield from directory.call(NAME_SERVERS, requests.cluster_info())
    return bodies.decode_cluster_info(answer.body)


def masters_of(info: bodies.ClusterInfo, cluster: str | None = None) -> dict[str, str]:
    """Broker name -> master address. Raises ConfigurationError for a cluster that is not there."""
    if cluster is not None and cluster not in info.clusters:
        raise ConfigurationError(
            f"there is no cluster {cluster!r}.",
            fix=f"The name server knows: {', '.join(sorted(info.clusters)) or 'none'}.",
        )
    wanted = set(info.brokers) if cluster is None else set(info.clusters[cluster])
    return {
        name: data.addresses[MASTER_ID]
        for name, data in sorted(info.brokers.items())
        if name in wanted and MASTER_ID in data.addresses
    }


def masters(directory: Directory, cluster: str | None = None) -> Conversation[dict[str, str]]:
    """Broker name -> address of each master. Raises ConfigurationError for an unknown cluster."""
    return masters_of((yield from cluster_info(directory)), cluster)


def masters_of_topic(directory: Directory, topic: str) -> Conversation[dict[str, str]]:
    """Broker name -> address of each master that has the topic. Raises RouteNotFoundError."""
    route = yield from directory.get_route(topic)
    masters = ((data.broker, data.addresses.get(MASTER_ID)) for data in route.brokers)
    return {broker: address for broker, address in masters if address is not None}


def ask_each(
    brokers: Mapping[str, str], command: Command, *, absent: Collection[int] | None = ()
) -> Conversation[list[tuple[str, str, Command]]]:
    """The same of several brokers: (name, address, answer) of each that succeeds. One that answers
    with a code of `absent` (None: any) has nothing to tell; other codes are raised as RequestError.
    """
    found = []
    for name, address in brokers.items():
        answer = yield Call(address, command)
        if answer.code == SUCCESS:
            found.append((name, address, answer))
        elif absent is not None and (answer.code not in absent or is_access_denied(answer)):
            raise request_error(answer, address)
    return found


def ask_masters(
    directory: Directory,
    command: Command,
    *,
    topic: str | None = None,
    absent: Collection[int] = (),
) -> Conversation[list[tuple[str, str, Command]]]:
    """`ask_each` of all masters, or of those that have a topic."""
    if topic is None:
        brokers = yield from masters(directory)
    else:
        brokers = yield from masters_of_topic(directory, topic)
    return (yield from ask_each(brokers, command, absent=absent))


def runtime(directory: Directory, address: str) -> Conversation[dict[str, str]]:
    """The counters of one broker."""
    answer = yield from directory.call(address, requests.runtime_info())
    return bodies.decode_kv_table(answer.body)


def access_status(directory: Directory) -> Conversation[dict[str, dict[str, Any]]]:
    """Return how the access rules of each broker and of each protected name server stand, by
    address: `enabled`, since when they are in force (`sinceMs`), `accounts`, the last `error`,
    requests `refused` by access key. `server` is "broker" or "nameserver"; one process may be both,
    at two addresses."""
    found: dict[str, dict[str, Any]] = {}
    for server in directory.name_servers:
        try:
            answer = yield Call(server, requests.access_status())
        except (ConnectionLostError, RequestTimeoutError):
            continue  # another one answers below, or none does
        if answer.code == SUCCESS and (state := fastjson.loads(answer.body)).get("enabled"):
            found[server] = {"server": "nameserver", **state}
    for _, address, answer in (yield from ask_masters(directory, requests.access_status())):
        found[address] = {"server": "broker", **fastjson.loads(answer.body)}
    return found


# ---------------------------------------------------------------------------------- topics


def topics(directory: Directory) -> Conversation[list[str]]:
    """All topic names, sorted."""
    answer = yield from directory.call(NAME_SERVERS, requests.topic_list())
    return sorted(set(bodies.decode_topic_list(answer.body)))


def queues(directory: Directory, topic: str) -> Conversation[list[MessageQueue]]:
    """The readable queues of a topic, sorted."""
    return read_queues(topic, (yield from directory.get_route(topic)))


def create_topic(
    directory: Directory,
    name: str,
    *,
    queues: int = 8,
    write_queues: int | None = None,
    perm: int = 6,
    cluster: str | None = None,
    order: bool | None = None,
    type: str | None = None,  # noqa: A002 - what RocketMQ calls it
    attributes: Mapping[str, str | None] | None = None,
    force: bool = False,
) -> Conversation[list[str]]:
    """Creates or changes a topic on every master (of one cluster); returns the broker names.

    `type` is "normal", "fifo", "delay" or "transaction", the attribute message.type;
    `attributes` are others to be set, or taken away where the value is None. What is not given
    stays as it is.

    `order`: True makes it a topic of strict order: producers keep the number of its queues also
    while a broker is away (the name servers need orderMessageEnable=true); False ends that.

    No consumer reads a queue whose number is `queues` or higher. Unless `force` is set, a change
    that hides a queue with messages in this way is refused.

    Raises ConfigurationError for a bad name, count, type or cluster, and for a change that would
    hide messages; RequestError when a broker refuses.
    """
    writers = queues if write_queues is None else write_queues
    changes = dict(attributes or {})
    check_topic(name)
    checks = [
        (min(queues, writers) < 1, f"{min(queues, writers)} queues are asked for.",
         "A topic has at least one."),
        (not 0 <= perm <= 7, f"the permission is {perm}.",
         "It is 2 (write), 4 (read) or 6 (both)."),
        (type is not None and type.upper() not in MESSAGE_TYPES,
         f"the type of topic {name} is {type!r}.",
         f"It is one of {', '.join(one.lower() for one in MESSAGE_TYPES)}."),
        *(
            (not key or {",", "="} & set(key) or value == "" or "," in (value or ""),
             f"the attribute {key!r} = {value!r} cannot be sent.",
             "Neither is empty or holds a comma, a name no equals sign.")
            for key, value in changes.items()
        ),
    ]  # fmt: skip
    for is_wrong, what, fix in checks:
        if is_wrong:
            raise ConfigurationError(what, fix=fix)
    if type is not None:
        changes[MESSAGE_TYPE] = type.upper()
    config = TopicConfig(name, queues, writers, perm, order=bool(order))
    found = yield from masters(directory, cluster)
    if not found:
        raise ConfigurationError("no broker is registered.", fix="Start one: sluice broker.")
    if not force:
        yield from _check_nothing_hidden(found, name, queues)
    if order is not None:  # first, so that the brokers hear of it when they register the topic
        value = ";".join(f"{broker}:{writers}" for broker in sorted(found))
        for server in directory.name_servers:
            command = requests.delete_kv(namespace=ORDER_TOPICS, key=name)
            if order:
                command = requests.put_kv(namespace=ORDER_TOPICS, key=name, value=value)
            yield from directory.call(server, command)
    yield from ask_each(found, requests.update_topic(config, changes))
    directory.routes.expire(name)
    return sorted(found)


def _check_nothing_hidden(brokers: Mapping[str, str], name: str, queues: int) -> Conversation[None]:
    """Raise ConfigurationError if topic `name` holds messages, on one of these brokers, in a queue
    whose number is `queues` or higher."""
    command = requests.topic_stats(topic=name)
    hidden: dict[MessageQueue, int] = {}
    for _, _, answer in (yield from ask_each(brokers, command, absent={TOPIC_NOT_EXIST})):
        for queue, stats in sorted(bodies.decode_topic_stats(answer.body).queues.items()):
            stored = stats.offset_max - stats.offset_min
            if queue.queue_id >= queues and stored > 0:
                hidden[queue] = stored
    if hidden:
        places = ", ".join(f"{queue.broker}:{queue.queue_id}" for queue in list(hidden)[:8])
        raise ConfigurationError(
            f"with {queues} queues on each broker, no consumer would read {sum(hidden.values())} "
            f"stored messages of topic {name} ({places}{', …' if len(hidden) > 8 else ''}).",
            fix="Let the groups read these queues first, or hide them with --force, in Python "
            "force=True: they can be read again when the topic has as many queues as before.",
        )


def delete_topic(
    directory: Directory, name: str, *, cluster: str | None = None
) -> Conversation[None]:
    """Deletes a topic on every master, then on every name server."""
    info = yield from cluster_info(directory)
    yield from ask_each(masters_of(info, cluster), requests.delete_topic_on_broker(topic=name))
    for server in directory.name_servers:
        for cluster_name in info.clusters if cluster is None else [cluster]:
            command = requests.delete_topic_on_name_server(topic=name, cluster=cluster_name)
            yield from directory.call(server, command)
        if cluster is None:
            yield Call(server, requests.delete_kv(namespace=ORDER_TOPICS, key=name))
    directory.routes.remove(name)


def topic_configs(directory: Directory, topic: str) -> Conversation[dict[str, TopicConfig]]:
    """Broker name -> what its master keeps of a topic, with its attributes; RocketMQ 4 does not
    tell. Raises RouteNotFoundError."""
    command = requests.topic_config(topic=topic, logical=True)
    absent = {TOPIC_NOT_EXIST, int(ResponseCode.REQUEST_CODE_NOT_SUPPORTED)}
    answers = yield from ask_masters(directory, command, topic=topic, absent=absent)
    return {name: decode_topic_config(answer.body) for name, _, answer in answers}


def topic_stats(directory: Directory, topic: str) -> Conversation[bodies.TopicStats]:
    """`topic_offsets` with how many messages come in a second."""
    command = requests.topic_stats(topic=topic)
    found: dict[MessageQueue, bodies.QueueStats] = {}
    rate = 0.0
    for _, _, answer in (yield from ask_masters(directory, command, topic=topic)):
        stats = bodies.decode_topic_stats(answer.body)
        found |= stats.queues
        rate += stats.puts_per_second
    return bodies.TopicStats(dict(sorted(found.items())), rate)


def topic_offsets(
    directory: Directory, topic: str
) -> Conversation[dict[MessageQueue, bodies.QueueStats]]:
    """Queue -> first offset, next offset, time of the last message."""
    return dict((yield from topic_stats(directory, topic)).queues)


def groups_of_topic(directory: Directory, topic: str) -> Conversation[list[str]]:
    """The groups that read a topic, or have offsets in it."""
    command = requests.groups_of_topic(topic=topic)
    found: set[str] = set()
    for _, _, answer in (yield from ask_masters(directory, command, topic=topic)):
        found.update(bodies.decode_group_list(answer.body))
    return sorted(found - {topic})  # A Java broker lists the topic itself (spec/traffic, item 29).


# ---------------------------------------------------------------------------------- queues


def offset_min(directory: Directory, queue: MessageQueue) -> Conversation[int]:
    """The first offset that is still stored."""
    return int_field((yield from directory.call(queue, requests.offset_min(queue))), "offset")


def offset_max(directory: Directory, queue: MessageQueue) -> Conversation[int]:
    """The offset that the next message will get."""
    return int_field((yield from directory.call(queue, requests.offset_max(queue))), "offset")


def earliest_time(directory: Directory, queue: MessageQueue) -> Conversation[int]:
    """When the oldest message there was stored; -1 when the queue is empty."""
    return int_field((yield from directory.call(queue, requests.earliest_time(queue))), "timestamp")


def offsets(directory: Directory, queue: MessageQueue) -> Conversation[tuple[int, int]]:
    """(first stored offset, offset that the next message will get)."""
    first = yield from offset_min(directory, queue)
    return first, (yield from offset_max(directory, queue))


def offset_by_time(directory: Directory, queue: MessageQueue, time_ms: int) -> Conversation[int]:
    """The first offset stored at `time_ms` or later."""
    command = requests.offset_by_time(queue, time_ms)
    return int_field((yield from directory.call(queue, command)), "offset")


def committed_offset(
    directory: Directory, group: str, queue: MessageQueue
) -> Conversation[int | None]:
    """The committed offset of a group, None when it never committed."""
    address = yield from directory.get_read_address(queue)
    answer = yield Call(address, requests.offset_of_group(group, queue))
    if answer.code == QUERY_NOT_FOUND:
        return None
    return int_field(expect_success(answer, address), "offset")


def commit_offset(
    directory: Directory, group: str, queue: MessageQueue, offset: int
) -> Conversation[None]:
    """Sets the committed offset of a group, also backwards."""
    yield from directory.call(queue, requests.commit_offset(group, queue, offset))
