"""Topic tables: 21, 351, `topics.json`, and the data version that all tables carry."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sluicemq.model.topic import DataVersion, TopicConfig
from sluicemq.wire import fastjson
from sluicemq.wire.bodies.reading import (
    Data,
    as_object,
    as_texts,
    load_object,
    take_boolean,
    take_integer,
    take_object,
    take_text,
)
from sluicemq.wire.bodies.unknown import Texts, Unknown, completed, unknown_fields
from sluicemq.wire.javamap import hash_map

TOPIC_QUEUES_DEFAULT = 16
"""What Java takes for the number of queues that a topic's JSON does not name."""
NO_VERSION = DataVersion()
FILE_BUCKETS = 2048
"""RocketMQ makes the maps of topics and of groups for 1024 entries."""


@dataclass(frozen=True, slots=True)
class TopicTable:
    """All topics of a broker by name (TopicConfigSerializeWrapper)."""

    topics: Mapping[str, TopicConfig] = field(default_factory=dict)
    data_version: DataVersion = NO_VERSION
    unknown: Unknown = field(default_factory=Unknown)
    """Of a file, what it says besides."""


def data_version_object(version: DataVersion) -> dict[str, int]:
    """A data version as a JSON object."""
    return {
        "counter": version.counter,
        "stateVersion": version.state_version,
        "timestamp": version.timestamp_ms,
    }


def data_version_from(values: Mapping[Any, Any]) -> DataVersion:
    """The inverse of `data_version_object`."""
    return DataVersion(
        take_integer(values, "counter"),
        take_integer(values, "timestamp"),
        take_integer(values, "stateVersion"),
    )


def encode_data_version(version: DataVersion) -> bytes:
    """322's body, 26's header field."""
    return fastjson.dumps_strict(data_version_object(version))


def decode_data_version(data: Data) -> DataVersion:
    """The inverse of `encode_data_version`."""
    return data_version_from(load_object(data, "data version"))


def topic_object(topic: TopicConfig) -> dict[str, Any]:
    """A topic as a JSON object."""
    return {
        "attributes": dict(topic.attributes),
        "order": topic.order,
        "perm": topic.perm,
        "readQueueNums": topic.read_queues,
        "topicFilterType": topic.filter_type,
        "topicName": topic.name,
        "topicSysFlag": topic.sys_flag,
        "writeQueueNums": topic.write_queues,
    }


def topic_from(values: Mapping[Any, Any], name: str = "") -> TopicConfig:
    """The inverse of `topic_object`; `name` stands in for an absent topicName."""
    return TopicConfig(
        take_text(values, "topicName", name),
        take_integer(values, "readQueueNums", TOPIC_QUEUES_DEFAULT),
        take_integer(values, "writeQueueNums", TOPIC_QUEUES_DEFAULT),
        take_integer(values, "perm", 6),
        take_text(values, "topicFilterType", "SINGLE_TAG"),
        take_integer(values, "topicSysFlag"),
        take_boolean(values, "order"),
        as_texts(take_object(values, "attributes")),
    )


def encode_topic_config(topic: TopicConfig) -> bytes:
    """351's answer."""
    return fastjson.dumps(topic_object(topic))


def decode_topic_config(data: Data) -> TopicConfig:
    """The inverse of `encode_topic_config`."""
    return topic_from(load_object(data, "topic"))


def topic_table_object(table: TopicTable) -> dict[str, Any]:
    """A topic table as 21 and 103 carry it. Static topics are not there: their maps are empty."""
    version = data_version_object(table.data_version)
    return {
        "dataVersion": version,
        "mappingDataVersion": version,
        "topicConfigTable": _topic_objects(table),
        "topicQueueMappingDetailMap": {},
        "topicQueueMappingInfoMap": {},
    }


def _topic_objects(table: TopicTable) -> dict[str, Any]:
    return {name: topic_object(topic) for name, topic in table.topics.items()}


def topic_table_from(values: Mapping[Any, Any]) -> TopicTable:
    """The inverse of `topic_table_object`."""
    return TopicTable(
        {
            fastjson.text(name): topic_from(as_object(item, "A topic"), fastjson.text(name))
            for name, item in take_object(values, "topicConfigTable").items()
        },
        data_version_from(take_object(values, "dataVersion")),
    )


def encode_topic_table(table: TopicTable) -> bytes:
    """21's answer."""
    return fastjson.dumps(topic_table_object(table))


def decode_topic_table(data: Data) -> TopicTable:
    """21's answer."""
    return topic_table_from(load_object(data, "topic table"))


def encode_topic_table_file(table: TopicTable, texts: Texts[TopicConfig] | None = None) -> str:
    """The text of `topics.json`, as RocketMQ writes it. `texts` keeps what did not change for the
    next time."""
    ordered = hash_map(table.topics, FILE_BUCKETS)
    topics = table.unknown.rendered(
        ordered, {} if texts is None else texts, lambda topic: _with_attributes(topic_object(topic))
    )
    known = {
        "dataVersion": data_version_object(table.data_version),
        "topicConfigTable": topics,
    }
    return fastjson.dumps_pretty(completed(known, table.unknown.fields))


def _with_attributes(item: dict[str, Any]) -> dict[str, Any]:
    return item | {"attributes": hash_map(item["attributes"])}


def decode_topic_table_file(text: str) -> TopicTable:
    """The inverse of `encode_topic_table_file`, of any release; fields that we do not know stay."""
    values = load_object(text, "topic table")
    table = topic_table_from(values)
    table.unknown.fields.update(unknown_fields(values, ("dataVersion", "topicConfigTable")))
    known = topic_object(TopicConfig(""))
    for name, item in take_object(values, "topicConfigTable").items():
        table.unknown.take(fastjson.text(name), as_object(item, "A topic"), known)
    return table
