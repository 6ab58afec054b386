"""Commands that create, change, list, show and delete topics."""

from typing import Final

import orjson

from sluicemq.client.core.directory import find_read_addresses
from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.files import SYSTEM_FILES, read_text
from sluicemq.model.system_names import is_group_topic
from sluicemq.model.topic import (
    MASTER_ID,
    ORDER_TOPICS,
    TopicConfig,
    allocate_average,
    readable_queues,
)
from sluicemq.mqadmin import java
from sluicemq.mqadmin.commands import FlagValues, Session
from sluicemq.wire import bodies, fastjson, tables
from sluicemq.wire.declare import queue_object

_ROUTE_ROW: Final = "{:<45} {:<32} {:<50} {:<10} {:<11} {:<5}"
_STATUS_ROW: Final = "{:<32}  {:<4}  {:<20}  {:<20}    {}"


def parse_attributes(text: str) -> dict[str, str | None]:
    """Parse changes of attributes such as `+a=b,-c`. Return name -> new value.

    The value is None for an attribute to remove. Raises ConfigurationError for another form.
    """
    changes: dict[str, str | None] = {}
    for part in filter(None, text.split(",")):
        key, separator, value = part[1:].partition("=")
        if not key or part[0] not in "+-" or (part[0] == "+") != bool(separator):
            raise ConfigurationError(
                f"invalid attribute {part!r}.", fix="Write +a=b to set it, or -a to remove it."
            )
        changes[key] = value if part[0] == "+" else None
    return changes


def update_topic(session: Session, values: FlagValues) -> None:
    """Run updateTopic: create or change a topic on a broker, or on all masters of a cluster."""
    flags = values.get_bool("unit") | values.get_bool("hasUnitSub") << 1
    config = TopicConfig(
        values["topic"],
        values.get_int("readQueueNums", 8),
        values.get_int("writeQueueNums", 8),
        values.get_int("perm", 6),
        sys_flag=int(flags),
        order=values.get_bool("order"),
    )
    changes = parse_attributes(values.get("attributes", ""))
    addresses = session.target_addresses(values)
    for address in addresses:
        session.admin.put_topic(address, config, changes)
        if "brokerAddr" not in values:
            session.print_line(f"create topic to {address} success.")
    if config.order:
        _set_order_config(session, values, addresses, config)
    if "brokerAddr" in values:
        session.print_line(f"create topic to {addresses[0]} success.")
    signed_changes = {f"-{k}" if v is None else f"+{k}": v or "" for k, v in changes.items()}
    session.print_line(java.format_topic_config(config, signed_changes))


def _set_order_config(
    session: Session, values: FlagValues, addresses: list[str], config: TopicConfig
) -> None:
    """Store the number of queues that each of the brokers has for an ordered topic.

    Name servers keep it as `broker:queues` joined by semicolons. With flag `brokerAddr`, the
    entries of other brokers are preserved.
    """
    brokers = session.admin.cluster_info().brokers
    names = [name for name, data in brokers.items() if set(data.addresses.values()) & {*addresses}]
    rules = [f"{name}:{config.write_queues}" for name in names]
    if "brokerAddr" in values:
        try:
            old = session.admin.kv_config(ORDER_TOPICS, config.name).split(";")
        except SluiceError:
            old = []
        others = [one for one in old if one and one.rpartition(":")[0] not in names]
        session.admin.put_kv_config(ORDER_TOPICS, config.name, ";".join([*others, *rules]))
    else:
        session.admin.put_kv_config(ORDER_TOPICS, config.name, ";".join(rules))
    kind = "broker" if "brokerAddr" in values else "cluster"
    session.print_line(f"set {kind} orderConf. isOrder=true, orderConf=[{';'.join(rules)}]")


def read_json_list(session: Session, values: FlagValues) -> list[object] | None:
    """Return the JSON list in the file of flag `filename`.

    Without such a file, print that, and return None. Raises ConfigurationError if the file contains
    another value than a list, and ValueError if it is not JSON.
    """
    text = read_text(SYSTEM_FILES, values["filename"])
    if text is None:
        session.print_line(f"the file path {values['filename']} does not exists")
        return None
    items = orjson.loads(text)
    if not isinstance(items, list):
        raise ConfigurationError(
            f"{values['filename']} does not contain a JSON list.", fix="Write [{…}, …] into it."
        )
    return items


def update_topic_list(session: Session, values: FlagValues) -> None:
    """Run updateTopicList: create or change the topics of a JSON file."""
    items = read_json_list(session, values)
    configs = [tables.topic_from(item, "topic") for item in items or ()]
    for address in session.target_addresses(values) if configs else ():
        session.admin.put_topics(address, configs)
        session.print_line(
            f"submit batch of topic config to {address} success, please check the result later."
        )


def update_topic_permission(session: Session, values: FlagValues) -> None:
    """Run updateTopicPerm: change the permission of a topic, and nothing else of it."""
    topic = values["topic"]
    perm = values.get_int("perm")
    route = session.admin.current_route(topic)
    first = route.queues[0]
    config = TopicConfig(
        topic, first.read_queues, first.write_queues, perm, sys_flag=first.sys_flag
    )
    masters = {data.addresses.get(MASTER_ID): data.broker for data in route.brokers}
    if (address := values.get("brokerAddr")) is not None:
        if address not in masters:
            session.print_line("updateTopicPerm error broker not exit or broker is not master!.")
            return
        old = next(data.perm for data in route.queues if data.broker == masters[address])
        if old == perm:
            session.print_line("new perm equals to the old one!")
            return
        session.admin.put_topic(address, config, {})
        session.print_line(f"update topic perm from {old} to {perm} in {address} success.")
        session.print_line(f"{java.format_topic_config(config, {})}.")
        return
    for address in session.target_addresses(values):
        session.admin.put_topic(address, config, {})
        session.print_line(f"update topic perm from {first.perm} to {perm} in {address} success.")


def delete_topic(session: Session, values: FlagValues) -> None:
    """Run deleteTopic: delete a topic from the brokers of a cluster, then from the name servers."""
    topic = values["topic"]
    cluster = values["clusterName"]
    session.admin.delete_topic(topic, cluster=cluster)
    session.print_line(f"delete topic [{topic}] from cluster [{cluster}] success.")
    session.print_line(f"delete topic [{topic}] from NameServer success.")


def update_order_conf(session: Session, values: FlagValues) -> None:
    """Run updateOrderConf: print, set or delete the order configuration of a topic.

    It says how many queues of the topic each broker has, as `broker:queues` joined by semicolons.
    Raises ConfigurationError if the method is `put` and flag `orderConf` is missing.
    """
    topic = values["topic"]
    method = values["method"]
    if method == "get":
        rules = session.admin.kv_config(ORDER_TOPICS, topic)
        session.write(f"get orderConf success. topic=[{topic}], orderConf=[{rules}] ")
    elif method == "put":
        if not values.get("orderConf"):
            raise ConfigurationError("please set orderConf with option -v.")
        session.admin.put_kv_config(ORDER_TOPICS, topic, values["orderConf"])
        session.write(
            f"update orderConf success. topic=[{topic}], orderConf=[{values['orderConf']}]"
        )
    elif method == "delete":
        session.admin.delete_kv_config(ORDER_TOPICS, topic)
        session.write(f"delete orderConf success. topic=[{topic}]")


def list_topics(session: Session, values: FlagValues) -> None:
    """Run topicList: print the names of all topics; with `-c`, their clusters and groups."""
    names = tables.sort_keys_as_java(session.admin.topics())
    if "clusterModel" not in values:
        for name in names:
            session.print_line(name)
        return
    info = session.admin.cluster_info()
    clusters = {broker: name for name, brokers in info.clusters.items() for broker in brokers}
    session.print_line(
        "{:<20}  {:<48}  {:<48}".format("#Cluster Name", "#Topic", "#Consumer Group")
    )
    for name in names:
        if is_group_topic(name):
            continue
        cluster = ""
        groups = []
        try:
            cluster = clusters.get(session.admin.current_route(name).brokers[0].broker, "")
            groups = session.admin.groups_of_topic(name)
        except SluiceError:
            pass  # the topic is printed without cluster or groups
        for group in groups or [""]:
            session.print_line(f"{cluster[:20]:<20}  {name[:64]:<64}  {group[:64]:<64}")


def show_route(session: Session, values: FlagValues) -> None:
    """Run topicRoute: print the route of a topic as JSON, or, with `-l`, as a table."""
    route = session.admin.current_route(values["topic"])
    if "list" not in values:
        session.print_line(
            java.format_json(dict(sorted(bodies.route_object_with_integer_ids(route).items())))
        )
        return
    queues = {data.broker: data for data in route.queues}
    session.print_line(
        _ROUTE_ROW.format(
            "#ClusterName", "#BrokerName", "#BrokerAddrs", "#ReadQueue", "#WriteQueue", "#Perm"
        )
    )
    for data in sorted(route.brokers, key=lambda data: data.broker):
        queue_data = queues[data.broker]
        session.print_line(
            _ROUTE_ROW.format(
                data.cluster,
                data.broker,
                java.format_value(data.addresses),
                queue_data.read_queues,
                queue_data.write_queues,
                queue_data.perm,
            )
        )
    session.print_line("-" * 158)
    readers = sum(one.read_queues for one in queues.values())
    writers = sum(one.write_queues for one in queues.values())
    session.print_line(_ROUTE_ROW.format("Total:", len(queues), "", readers, writers, ""))


def show_topic_status(session: Session, values: FlagValues) -> None:
    """Run topicStatus: print the first and the next offset of each queue, and its last write."""
    session.admin.current_route(values["topic"])
    stats = session.admin.topic_stats(values["topic"])
    session.print_line(
        _STATUS_ROW.format("#Broker Name", "#QID", "#Min Offset", "#Max Offset", "#Last Updated")
    )
    for queue, offsets in stats.queues.items():
        updated = java.format_time(offsets.last_time_ms) if offsets.last_time_ms > 0 else ""
        session.print_line(
            _STATUS_ROW.format(
                queue.broker[:32], queue.queue_id, offsets.offset_min, offsets.offset_max, updated
            )
        )
    session.print_line()
    session.print_line(f"Topic Put TPS: {stats.puts_per_second}")


def list_topic_clusters(session: Session, values: FlagValues) -> None:
    """Run topicClusterList: print the clusters that have a topic."""
    names = set(find_read_addresses(session.admin.current_route(values["topic"])))
    for cluster, brokers in session.admin.cluster_info().clusters.items():
        if names.intersection(brokers):
            session.print_line(cluster)


def allocate_queues(session: Session, values: FlagValues) -> None:
    """Run allocateMQ: print how consumers with these addresses would share the queues."""
    topic = values["topic"]
    members = values["ipList"].split(",")
    queues = readable_queues(topic, session.admin.current_route(topic))
    shares = {
        one: list(map(queue_object, allocate_average(one, queues, members))) for one in members
    }
    session.print_line(fastjson.dumps_strict({"result": tables.sort_map_as_java(shares)}).decode())
