"""What a name server answers: routes, clusters, topic lists, key-value tables (spec/namesrv.md)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sluicemq.errors import ProtocolError
from sluicemq.model.topic import BrokerData, QueueData, TopicRoute
from sluicemq.wire import fastjson
from sluicemq.wire.bodies.reading import (
    Data,
    as_object,
    as_texts,
    load_object,
    take_boolean,
    take_integer,
    take_list,
    take_object,
    take_text,
    take_text_or_none,
    take_texts,
)

STANDARD_JSON_VERSION_MIN = 401
"""V4_9_4: from this version on a client reads quoted broker ids (spec/remoting.md §4)."""


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """All brokers by name, and the names of each cluster's brokers (106)."""

    brokers: Mapping[str, BrokerData] = field(default_factory=dict)
    clusters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def broker_object(broker: BrokerData, *, standard: bool) -> dict[str, Any]:
    """A broker as a JSON object; ids are quoted when `standard`."""
    addresses: dict[Any, str] = (
        {str(broker_id): address for broker_id, address in broker.addresses.items()}
        if standard
        else dict(broker.addresses)
    )
    values: dict[str, Any] = {
        "brokerAddrs": addresses,
        "brokerName": broker.broker,
        "cluster": broker.cluster,
        "enableActingMaster": broker.acting_master_enable,
    }
    if broker.zone is not None:
        values["zoneName"] = broker.zone
    return values


def broker_from(value: Any) -> BrokerData:
    """The inverse of `broker_object`, for both forms."""
    values = as_object(value, "A broker")
    return BrokerData(
        take_text(values, "brokerName"),
        take_text(values, "cluster"),
        _addresses_from(values),
        take_boolean(values, "enableActingMaster"),
        take_text_or_none(values, "zoneName"),
    )


def _addresses_from(values: Mapping[Any, Any]) -> dict[int, str]:
    try:
        return {
            int(broker_id): fastjson.text(address)
            for broker_id, address in take_object(values, "brokerAddrs").items()
        }
    except (ValueError, TypeError) as error:
        raise ProtocolError("A broker id is not an integer.") from error


def encode_topic_route(route: TopicRoute, *, standard: bool = True) -> bytes:
    """105's answer; `standard` False writes broker ids without quotes for old clients."""
    values: dict[str, Any] = {
        "brokerDatas": [broker_object(broker, standard=standard) for broker in route.brokers],
        "filterServerTable": {},
        "queueDatas": [
            {
                "brokerName": queues.broker,
                "perm": queues.perm,
                "readQueueNums": queues.read_queues,
                "topicSysFlag": queues.sys_flag,
                "writeQueueNums": queues.write_queues,
            }
            for queues in route.queues
        ],
    }
    if route.order_topic_config:
        values["orderTopicConf"] = route.order_topic_config
    return fastjson.dumps(values)


def decode_topic_route(data: Data) -> TopicRoute:
    """105's answer, 217's body, of any form."""
    values = load_object(data, "route")
    return TopicRoute(
        tuple(broker_from(item) for item in take_list(values, "brokerDatas")),
        tuple(_queue_data_from(item) for item in take_list(values, "queueDatas")),
        take_text_or_none(values, "orderTopicConf") or None,
    )


def _queue_data_from(value: Any) -> QueueData:
    values = as_object(value, "A queueData")
    return QueueData(
        take_text(values, "brokerName"),
        take_integer(values, "readQueueNums"),
        take_integer(values, "writeQueueNums"),
        take_integer(values, "perm"),
        take_integer(values, "topicSysFlag"),
    )


def encode_cluster_info(info: ClusterInfo) -> bytes:
    """106's answer: broker ids are never quoted here (spec/namesrv.md §6)."""
    return fastjson.dumps(
        {
            "brokerAddrTable": {
                name: broker_object(broker, standard=False) for name, broker in info.brokers.items()
            },
            "clusterAddrTable": {name: list(brokers) for name, brokers in info.clusters.items()},
        }
    )


def decode_cluster_info(data: Data) -> ClusterInfo:
    """The inverse of `encode_cluster_info`."""
    values = load_object(data, "cluster info")
    clusters = take_object(values, "clusterAddrTable")
    return ClusterInfo(
        {
            fastjson.text(name): broker_from(item)
            for name, item in take_object(values, "brokerAddrTable").items()
        },
        {fastjson.text(name): take_texts(clusters, name) for name in clusters},
    )


def encode_broker_member_group(cluster: str, broker: str, addresses: Mapping[int, str]) -> bytes:
    """901's answer."""
    return fastjson.dumps(
        {
            "brokerMemberGroup": {
                "brokerAddrs": dict(addresses),
                "brokerName": broker,
                "cluster": cluster,
            }
        }
    )


def decode_broker_member_group(data: Data) -> BrokerData:
    """The inverse of `encode_broker_member_group`."""
    return broker_from(load_object(data, "broker member group").get("brokerMemberGroup"))


def encode_topic_list(topics: Iterable[str], broker_address: str | None = None) -> bytes:
    """206, 224, 304 and others; `broker_address` only for 304."""
    return fastjson.dumps({"brokerAddr": broker_address, "topicList": sorted(topics)})


def decode_topic_list(data: Data) -> tuple[str, ...]:
    """The names in a topic list."""
    return take_texts(load_object(data, "topic list"), "topicList")


def encode_group_list(groups: Iterable[str]) -> bytes:
    """300's answer."""
    return fastjson.dumps({"groupList": sorted(groups)})


def decode_group_list(data: Data) -> tuple[str, ...]:
    """The inverse of `encode_group_list`."""
    return take_texts(load_object(data, "group list"), "groupList")


def encode_kv_table(table: Mapping[str, str]) -> bytes:
    """28, 103, 219: a table of texts."""
    return fastjson.dumps({"table": dict(table)})


def decode_kv_table(data: Data) -> dict[str, str]:
    """The inverse of `encode_kv_table`."""
    return as_texts(take_object(load_object(data, "table"), "table"))


def encode_kv_config_file(namespaces: Mapping[str, Mapping[str, str]]) -> str:
    """The text of a name server's `kvConfig.json`."""
    return fastjson.dumps_file(
        {"configTable": {name: dict(table) for name, table in namespaces.items()}}
    )


def decode_kv_config_file(data: Data) -> dict[str, dict[str, str]]:
    """The inverse of `encode_kv_config_file`."""
    return {
        fastjson.text(name): as_texts(as_object(table, "A namespace"))
        for name, table in take_object(load_object(data, "kvConfig.json"), "configTable").items()
    }
