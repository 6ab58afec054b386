"""Commands that create, change, list, show and delete topics."""

from collections.abc import Mapping
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
    TopicRoute,
    allocate_average,
    readable_queues,
)
from sluicemq.mqadmin import java
from sluicemq.mqadmin.commands import FlagValues, Session
from sluicemq.wire import bodies, fastjson, tables
from sluicemq.wire.declare import queue_object

_ROUTE_ROW: Final = "{:<45} {:<32} {:<50} {:<10} {:<11} {:<5}"
_STATUS_ROW: Final = "{:<32}  {:<4}  {:<20}  {:<20}    {}"


def parse_attributes(attributes: str) -> dict[str, str | None]:
    """Parse changes of attributes: `+a=b,-c` becomes {"a": "b", "c": None}.

    None means that the attribute is removed. Raises ConfigurationError for another form.
    """
    changes: dict[str, str | None] = {}
    for change in filter(None, attributes.split(",")):
        sign = change[0]
        key, separator, value = change[1:].partition("=")
        is_set = sign == "+" and bool(separator)
        is_removed = sign == "-" and not separator
        if not key or not (is_set or is_removed):
            raise ConfigurationError(
                f"invalid attribute {change!r}.", fix="Write +a=b to set it, or -a to remove it."
            )
        changes[key] = value if is_set else None
    return changes


def sign_attributes(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the changes of `parse_attributes` as brokers take them: `+a` -> value, `-c` -> ""."""
    return {
        f"-{key}" if value is None else f"+{key}": value or "" for key, value in changes.items()
    }


def update_topic(session: Session, values: FlagValues) -> None:
    """Run `mqadmin updateTopic`: create or change a topic on a broker or a cluster.

    In a cluster, this is done on all masters. With flag `order`, the number of queues is stored at
    the name servers, too.
    """
    sys_flag = int(values.get_bool("unit")) | int(values.get_bool("hasUnitSub")) << 1
    config = TopicConfig(
        values["topic"],
        values.get_int("readQueueNums", 8),
        values.get_int("writeQueueNums", 8),
        values.get_int("perm", 6),
        sys_flag=sys_flag,
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
    session.print_line(java.format_topic_config(config, sign_attributes(changes)))


def _set_order_config(
    session: Session, values: FlagValues, addresses: list[str], config: TopicConfig
) -> None:
    """Store at the name servers how many queues each broker has for an ordered topic.

    They keep this as a text such as "a:8;b:8". With flag `brokerAddr`, the entries of other brokers
    stay as they are.
    """
    changed_brokers = [
        name
        for name, broker in session.admin.cluster_info().brokers.items()
        if not set(addresses).isdisjoint(broker.addresses.values())
    ]
    new_entries = [f"{name}:{config.write_queues}" for name in changed_brokers]
    preserved_entries: list[str] = []
    scope = "cluster"
    if "brokerAddr" in values:
        scope = "broker"
        preserved_entries = _fetch_other_order_entries(session, config.name, changed_brokers)
    entries = ";".join([*preserved_entries, *new_entries])
    session.admin.put_kv_config(ORDER_TOPICS, config.name, entries)
    session.print_line(f"set {scope} orderConf. isOrder=true, orderConf=[{';'.join(new_entries)}]")


def _fetch_other_order_entries(session: Session, topic: str, brokers: list[str]) -> list[str]:
    """Return the entries `broker:queues` of an ordered topic, without those of `brokers`."""
    try:
        entries = session.admin.kv_config(ORDER_TOPICS, topic).split(";")
    except SluiceError:
        return []  # the topic has no entries yet
    return [entry for entry in entries if entry and entry.rpartition(":")[0] not in brokers]


def read_json_list(session: Session, values: FlagValues) -> list[object] | None:
    """Return the JSON list in the file that flag `filename` names, None if there is no such file.

    A missing file is reported in the output. Raises ConfigurationError if the file contains another
    value than a list, and ValueError if it is not JSON.
    """
    json_text = read_text(SYSTEM_FILES, values["filename"])
    if json_text is None:
        session.print_line(f"the file path {values['filename']} does not exists")
        return None
    json_list = orjson.loads(json_text)
    if not isinstance(json_list, list):
        raise ConfigurationError(
            f"{values['filename']} does not contain a JSON list.", fix="Write [{…}, …] into it."
        )
    return json_list


def update_topic_list(session: Session, values: FlagValues) -> None:
    """Run `mqadmin updateTopicList`: create or change the topics of a JSON file."""
    topic_objects = read_json_list(session, values)
    if not topic_objects:
        return
    configs = [tables.topic_from(topic_object, "topic") for topic_object in topic_objects]
    for address in session.target_addresses(values):
        session.admin.put_topics(address, configs)
        session.print_line(
            f"submit batch of topic config to {address} success, please check the result later."
        )


def update_topic_permission(session: Session, values: FlagValues) -> None:
    """Run `mqadmin updateTopicPerm`: change the permission of a topic, and nothing else of it."""
    topic = values["topic"]
    perm = values.get_int("perm")
    route = session.admin.current_route(topic)
    current = route.queues[0]  # the queues at the first broker
    config = TopicConfig(
        topic, current.read_queues, current.write_queues, perm, sys_flag=current.sys_flag
    )
    if (address := values.get("brokerAddr")) is not None:
        _update_permission_at(session, address, route, config)
        return
    for address in session.target_addresses(values):
        session.admin.put_topic(address, config, {})
        session.print_line(f"update topic perm from {current.perm} to {perm} in {address} success.")


def _update_permission_at(
    session: Session, address: str, route: TopicRoute, config: TopicConfig
) -> None:
    """Give a topic the permission in `config` at the master with this address.

    If the address is not a master's, or the permission is the same, that is printed and nothing
    changes. `route` is the topic's present route.
    """
    broker_by_master = {broker.addresses.get(MASTER_ID): broker.broker for broker in route.brokers}
    if address not in broker_by_master:
        session.print_line("updateTopicPerm error broker not exit or broker is not master!.")
        return
    broker_name = broker_by_master[address]
    old_perm = next(queues.perm for queues in route.queues if queues.broker == broker_name)
    if old_perm == config.perm:
        session.print_line("new perm equals to the old one!")
        return
    session.admin.put_topic(address, config, {})
    session.print_line(f"update topic perm from {old_perm} to {config.perm} in {address} success.")
    session.print_line(f"{java.format_topic_config(config, {})}.")


def delete_topic(session: Session, values: FlagValues) -> None:
    """Run `mqadmin deleteTopic`: delete a topic from a cluster and from the name servers."""
    topic = values["topic"]
    cluster = values["clusterName"]
    session.admin.delete_topic(topic, cluster=cluster)
    session.print_line(f"delete topic [{topic}] from cluster [{cluster}] success.")
    session.print_line(f"delete topic [{topic}] from NameServer success.")


def update_order_conf(session: Session, values: FlagValues) -> None:
    """Run `mqadmin updateOrderConf`: print, set or delete the order configuration of a topic.

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
    """Run `mqadmin topicList`: print the names of all topics.

    With `-c`, each line also has the cluster of the topic and a group that reads it.
    """
    names = tables.sort_keys_as_java(session.admin.topics())
    if "clusterModel" not in values:
        for name in names:
            session.print_line(name)
        return
    cluster_by_broker: dict[str, str] = {}
    for cluster_name, brokers in session.admin.cluster_info().clusters.items():
        cluster_by_broker |= dict.fromkeys(brokers, cluster_name)
    session.print_line(
        "{:<20}  {:<48}  {:<48}".format("#Cluster Name", "#Topic", "#Consumer Group")
    )
    for name in names:
        if is_group_topic(name):
            continue
        cluster = ""
        groups = []
        try:
            first_broker = session.admin.current_route(name).brokers[0]
            cluster = cluster_by_broker.get(first_broker.broker, "")
            groups = session.admin.groups_of_topic(name)
        except SluiceError:
            pass  # the topic is printed without cluster or groups
        for group in groups or [""]:
            session.print_line(f"{cluster[:20]:<20}  {name[:64]:<64}  {group[:64]:<64}")


def show_route(session: Session, values: FlagValues) -> None:
    """Run `mqadmin topicRoute`: print the route of a topic as JSON, or, with `-l`, as a table."""
    route = session.admin.current_route(values["topic"])
    if "list" in values:
        _print_route_table(session, route)
        return
    route_object = bodies.route_object_with_integer_ids(route)
    session.print_line(java.format_json(dict(sorted(route_object.items()))))


def _print_route_table(session: Session, route: TopicRoute) -> None:
    """Print a line for each broker in a route, and then the sums of their queues."""
    queues_by_broker = {queues.broker: queues for queues in route.queues}
    session.print_line(
        _ROUTE_ROW.format(
            "#ClusterName", "#BrokerName", "#BrokerAddrs", "#ReadQueue", "#WriteQueue", "#Perm"
        )
    )
    for broker in sorted(route.brokers, key=lambda broker: broker.broker):
        queues = queues_by_broker[broker.broker]
        session.print_line(
            _ROUTE_ROW.format(
                broker.cluster,
                broker.broker,
                java.format_value(broker.addresses),
                queues.read_queues,
                queues.write_queues,
                queues.perm,
            )
        )
    session.print_line("-" * 158)
    read_count = sum(queues.read_queues for queues in queues_by_broker.values())
    write_count = sum(queues.write_queues for queues in queues_by_broker.values())
    session.print_line(
        _ROUTE_ROW.format("Total:", len(queues_by_broker), "", read_count, write_count, "")
    )


def show_topic_status(session: Session, values: FlagValues) -> None:
    """Run `mqadmin topicStatus`: print the first and the next offset of each queue.

    A line also has the time of the newest message; the last line is the rate of the topic.
    """
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
    """Run `mqadmin topicClusterList`: print the clusters that have a topic."""
    names = set(find_read_addresses(session.admin.current_route(values["topic"])))
    for cluster, brokers in session.admin.cluster_info().clusters.items():
        if names.intersection(brokers):
            session.print_line(cluster)


def allocate_queues(session: Session, values: FlagValues) -> None:
    """Run `mqadmin allocateMQ`: print how consumers with these addresses would share the queues."""
    topic = values["topic"]
    members = values["ipList"].split(",")
    queues = readable_queues(topic, session.admin.current_route(topic))
    queues_by_member = {}
    for member in members:
        share = allocate_average(member, queues, members)
        queues_by_member[member] = list(map(queue_object, share))
    result = {"result": tables.sort_map_as_java(queues_by_member)}
    session.print_line(fastjson.dumps_strict(result).decode())
