"""Topics: make, change, list, show, delete."""

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
    read_queues,
)
from sluicemq.mqadmin import java
from sluicemq.mqadmin.commands import Given, Session
from sluicemq.wire import bodies, fastjson, tables
from sluicemq.wire.declare import queue_object

_ROUTE: Final = "{:<45} {:<32} {:<50} {:<10} {:<11} {:<5}"
_STATUS: Final = "{:<32}  {:<4}  {:<20}  {:<20}    {}"


def parse_attributes(text: str) -> dict[str, str | None]:
    """`+a=b,-c` as changes; None takes one away. Raises ConfigurationError."""
    found: dict[str, str | None] = {}
    for part in filter(None, text.split(",")):
        key, separator, value = part[1:].partition("=")
        if not key or part[0] not in "+-" or (part[0] == "+") != bool(separator):
            raise ConfigurationError(f"the attribute {part!r}.", fix="Write +a=b, or -a.")
        found[key] = value if part[0] == "+" else None
    return found


def update_topic(session: Session, given: Given) -> None:
    """One, on a broker or on all masters of a cluster."""
    flags = given.truth("unit") | given.truth("hasUnitSub") << 1
    config = TopicConfig(
        given["topic"], given.number("readQueueNums", 8), given.number("writeQueueNums", 8),
        given.number("perm", 6), sys_flag=int(flags), order=given.truth("order"),
    )  # fmt: skip
    changes = parse_attributes(given.get("attributes", ""))
    addresses = session.addresses(given)
    for address in addresses:
        session.admin.put_topic(address, config, changes)
        if "brokerAddr" not in given:
            session.say(f"create topic to {address} success.")
    if config.order:
        _set_order(session, given, addresses, config)
    if "brokerAddr" in given:
        session.say(f"create topic to {addresses[0]} success.")
    asked = {f"-{k}" if v is None else f"+{k}": v or "" for k, v in changes.items()}
    session.say(java.topic_config(config, asked))


def _set_order(session: Session, given: Given, addresses: list[str], config: TopicConfig) -> None:
    brokers = session.admin.cluster_info().brokers
    names = [name for name, data in brokers.items() if set(data.addresses.values()) & {*addresses}]
    rules = [f"{name}:{config.write_queues}" for name in names]
    if "brokerAddr" in given:  # beside those of other brokers
        try:
            old = session.admin.kv_config(ORDER_TOPICS, config.name).split(";")
        except SluiceError:
            old = []
        others = [one for one in old if one and one.rpartition(":")[0] not in names]
        session.admin.put_kv_config(ORDER_TOPICS, config.name, ";".join([*others, *rules]))
    else:
        session.admin.put_kv_config(ORDER_TOPICS, config.name, ";".join(rules))
    kind = "broker" if "brokerAddr" in given else "cluster"
    session.say(f"set {kind} orderConf. isOrder=true, orderConf=[{';'.join(rules)}]")


def read_list(session: Session, given: Given) -> list[object] | None:
    """The list of the file that -f names; None, and a line, when there is no such file."""
    text = read_text(SYSTEM_FILES, given["filename"])
    if text is None:
        session.say(f"the file path {given['filename']} does not exists")
        return None
    found = orjson.loads(text)
    if not isinstance(found, list):
        raise ConfigurationError(f"{given['filename']} has no JSON list.", fix="Write [{…}, …].")
    return found


def update_topic_list(session: Session, given: Given) -> None:
    """Those of a file."""
    values = read_list(session, given)
    configs = [tables.topic_from(value, "topic") for value in values or ()]
    for address in session.addresses(given) if configs else ():
        session.admin.put_topics(address, configs)
        session.say(
            f"submit batch of topic config to {address} success, please check the result later."
        )


def update_topic_perm(session: Session, given: Given) -> None:
    """Another permission; all else stays."""
    topic, perm = given["topic"], given.number("perm")
    route = session.admin.current_route(topic)
    first = route.queues[0]
    config = TopicConfig(
        topic, first.read_queues, first.write_queues, perm, sys_flag=first.sys_flag
    )
    masters = {data.addresses.get(MASTER_ID): data.broker for data in route.brokers}
    if (address := given.get("brokerAddr")) is not None:
        if address not in masters:
            session.say("updateTopicPerm error broker not exit or broker is not master!.")
            return
        old = next(data.perm for data in route.queues if data.broker == masters[address])
        if old == perm:
            session.say("new perm equals to the old one!")
            return
        session.admin.put_topic(address, config, {})
        session.say(f"update topic perm from {old} to {perm} in {address} success.")
        session.say(f"{java.topic_config(config, {})}.")
        return
    for address in session.addresses(given):
        session.admin.put_topic(address, config, {})
        session.say(f"update topic perm from {first.perm} to {perm} in {address} success.")


def delete_topic(session: Session, given: Given) -> None:
    """From the brokers of a cluster, then from the name servers."""
    topic, cluster = given["topic"], given["clusterName"]
    session.admin.delete_topic(topic, cluster=cluster)
    session.say(f"delete topic [{topic}] from cluster [{cluster}] success.")
    session.say(f"delete topic [{topic}] from NameServer success.")


def update_order_conf(session: Session, given: Given) -> None:
    """How many queues of a topic each broker has for producers that keep an order."""
    topic, method = given["topic"], given["method"]
    if method == "get":
        rules = session.admin.kv_config(ORDER_TOPICS, topic)
        session.write(f"get orderConf success. topic=[{topic}], orderConf=[{rules}] ")
    elif method == "put":
        if not given.get("orderConf"):
            raise ConfigurationError("please set orderConf with option -v.")
        session.admin.put_kv_config(ORDER_TOPICS, topic, given["orderConf"])
        session.write(
            f"update orderConf success. topic=[{topic}], orderConf=[{given['orderConf']}]"
        )
    elif method == "delete":
        session.admin.delete_kv_config(ORDER_TOPICS, topic)
        session.write(f"delete orderConf success. topic=[{topic}]")


def topic_list(session: Session, given: Given) -> None:
    """All names; with -c their clusters and groups."""
    names = tables.sort_keys_as_java(session.admin.topics())
    if "clusterModel" not in given:
        for name in names:
            session.say(name)
        return
    info = session.admin.cluster_info()
    clusters = {broker: name for name, brokers in info.clusters.items() for broker in brokers}
    session.say("{:<20}  {:<48}  {:<48}".format("#Cluster Name", "#Topic", "#Consumer Group"))
    for name in names:
        if is_group_topic(name):
            continue
        cluster, groups = "", []
        try:
            cluster = clusters.get(session.admin.current_route(name).brokers[0].broker, "")
            groups = session.admin.groups_of_topic(name)
        except SluiceError:
            pass  # the topic is shown all the same
        for group in groups or [""]:
            session.say(f"{cluster[:20]:<20}  {name[:64]:<64}  {group[:64]:<64}")


def topic_route(session: Session, given: Given) -> None:
    """Brokers and queues."""
    route = session.admin.current_route(given["topic"])
    if "list" not in given:
        session.say(java.pretty(dict(sorted(bodies.route_object(route).items()))))
        return
    queues = {data.broker: data for data in route.queues}
    session.say(
        _ROUTE.format(
            "#ClusterName", "#BrokerName", "#BrokerAddrs", "#ReadQueue", "#WriteQueue", "#Perm"
        )
    )
    for data in sorted(route.brokers, key=lambda data: data.broker):
        own = queues[data.broker]
        session.say(
            _ROUTE.format(
                data.cluster, data.broker, java.shown(data.addresses), own.read_queues,
                own.write_queues, own.perm,
            )
        )  # fmt: skip
    session.say("-" * 158)
    readers = sum(own.read_queues for own in queues.values())
    writers = sum(own.write_queues for own in queues.values())
    session.say(_ROUTE.format("Total:", len(queues), "", readers, writers, ""))


def topic_status(session: Session, given: Given) -> None:
    """First and next offset of each queue, and when it was written to."""
    session.admin.current_route(given["topic"])
    stats = session.admin.topic_stats(given["topic"])
    session.say(
        _STATUS.format("#Broker Name", "#QID", "#Min Offset", "#Max Offset", "#Last Updated")
    )
    for queue, own in stats.queues.items():
        updated = java.time_text(own.last_time_ms) if own.last_time_ms > 0 else ""
        session.say(
            _STATUS.format(
                queue.broker[:32], queue.queue_id, own.offset_min, own.offset_max, updated
            )
        )
    session.say()
    session.say(f"Topic Put TPS: {stats.puts_per_second}")


def topic_cluster_list(session: Session, given: Given) -> None:
    """The clusters that have it."""
    names = set(find_read_addresses(session.admin.current_route(given["topic"])))
    for cluster, brokers in session.admin.cluster_info().clusters.items():
        if names.intersection(brokers):
            session.say(cluster)


def allocate_mq(session: Session, given: Given) -> None:
    """How consumers at these addresses would share the queues."""
    topic, members = given["topic"], given["ipList"].split(",")
    queues = read_queues(topic, session.admin.current_route(topic))
    shares = {
        one: list(map(queue_object, allocate_average(one, queues, members))) for one in members
    }
    session.say(fastjson.dumps_strict({"result": tables.sort_map_as_java(shares)}).decode())
