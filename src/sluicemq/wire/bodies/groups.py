"""Consumer groups as a broker keeps them: 200, 201, 352, `subscriptionGroup.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from sluicemq.errors import ProtocolError
from sluicemq.model.topic import DataVersion, GroupConfig
from sluicemq.wire import fastjson
from sluicemq.wire.bodies.reading import (
    Data,
    as_integer,
    as_object,
    as_texts,
    load_object,
    take_boolean,
    take_integer,
    take_object,
    take_text,
)
from sluicemq.wire.bodies.topics import (
    FILE_BUCKETS,
    NO_VERSION,
    data_version_from,
    data_version_object,
)
from sluicemq.wire.bodies.unknown import Texts, Unknown, completed, unknown_fields
from sluicemq.wire.javamap import hash_map

STANDARD_RETRIES: Final = {"type": "CUSTOMIZED"}
"""The retry policy of a group that has none of its own: RocketMQ's intervals."""
FORBIDDEN_BUCKETS: Final = 8
POLICY_BYTES_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class GroupTable:
    """All groups of a broker by name; `forbidden` is group -> topic -> bits."""

    groups: Mapping[str, GroupConfig] = field(default_factory=dict)
    data_version: DataVersion = NO_VERSION
    forbidden: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unknown: Unknown = field(default_factory=Unknown)
    """Of a file, what it says besides."""


def group_object(group: GroupConfig) -> dict[str, Any]:
    """A group as a JSON object."""
    return {
        "attributes": dict(group.attributes),
        "brokerId": group.broker_id,
        "consumeBroadcastEnable": group.consume_broadcast_enable,
        "consumeEnable": group.consume_enable,
        "consumeFromMinEnable": group.consume_from_min_enable,
        "consumeMessageOrderly": group.consume_message_orderly,
        "consumeTimeoutMinute": group.consume_timeout_minutes,
        "groupName": group.name,
        "groupRetryPolicy": dict(group.retry_policy or STANDARD_RETRIES),
        "groupSysFlag": group.sys_flag,
        "notifyConsumerIdsChangedEnable": group.notify_changes_enable,
        "retryMaxTimes": group.retry_times_max,
        "retryQueueNums": group.retry_queues,
        "whichBrokerWhenConsumeSlowly": group.broker_id_when_slow,
    }


def group_from(values: Mapping[Any, Any], name: str = "") -> GroupConfig:
    """The inverse of `group_object`; `name` stands in for an absent groupName."""
    plain = GroupConfig(take_text(values, "groupName", name))
    policy = _policy(values)
    return GroupConfig(
        plain.name,
        take_boolean(values, "consumeEnable", plain.consume_enable),
        take_boolean(values, "consumeFromMinEnable", plain.consume_from_min_enable),
        take_boolean(values, "consumeBroadcastEnable", plain.consume_broadcast_enable),
        take_boolean(values, "consumeMessageOrderly", plain.consume_message_orderly),
        take_integer(values, "retryQueueNums", plain.retry_queues),
        take_integer(values, "retryMaxTimes", plain.retry_times_max),
        take_integer(values, "brokerId", plain.broker_id),
        take_integer(values, "whichBrokerWhenConsumeSlowly", plain.broker_id_when_slow),
        take_boolean(values, "notifyConsumerIdsChangedEnable", plain.notify_changes_enable),
        take_integer(values, "groupSysFlag", plain.sys_flag),
        take_integer(values, "consumeTimeoutMinute", plain.consume_timeout_minutes),
        as_texts(take_object(values, "attributes")),
        None if policy in ({}, STANDARD_RETRIES) else policy,
    )


def _policy(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Kept as it is, so it has to be something that can be written. Raises ProtocolError."""
    policy = take_object(values, "groupRetryPolicy")
    try:
        size = len(orjson.dumps(policy))
    except TypeError as error:  # also: nested too deeply
        raise ProtocolError("The groupRetryPolicy is not plain JSON.") from error
    if size > POLICY_BYTES_MAX:
        raise ProtocolError(
            f"The groupRetryPolicy has {size} bytes, the limit is {POLICY_BYTES_MAX}."
        )
    return policy


def encode_group_config(group: GroupConfig) -> bytes:
    """200's body, 352's answer."""
    return fastjson.dumps(group_object(group))


def decode_group_config(data: Data) -> GroupConfig:
    """The inverse of `encode_group_config`."""
    return group_from(load_object(data, "group"))


def _table_object(table: GroupTable) -> dict[str, Any]:
    return {
        "dataVersion": data_version_object(table.data_version),
        "forbiddenTable": {name: dict(bits) for name, bits in table.forbidden.items()},
        "subscriptionGroupTable": {
            name: group_object(group) for name, group in table.groups.items()
        },
    }


def encode_group_table(table: GroupTable) -> bytes:
    """201's answer."""
    return fastjson.dumps(_table_object(table))


def encode_group_table_file(table: GroupTable, texts: Texts[GroupConfig] | None = None) -> str:
    """The text of `subscriptionGroup.json`, as RocketMQ writes it. `texts` keeps what did not
    change for the next time."""
    known = {
        "dataVersion": data_version_object(table.data_version),
        "forbiddenTable": {
            name: hash_map(bits)
            for name, bits in hash_map(table.forbidden, FORBIDDEN_BUCKETS).items()
        },
        "subscriptionGroupTable": table.unknown.rendered(
            hash_map(table.groups, FILE_BUCKETS), {} if texts is None else texts, _file_object
        ),
    }
    return fastjson.dumps_pretty(completed(known, table.unknown.fields))


def _file_object(group: GroupConfig) -> dict[str, Any]:
    return group_object(group) | {"attributes": hash_map(group.attributes)}


def decode_group_table_file(text: str) -> GroupTable:
    """The inverse of `encode_group_table_file`, of any release; fields that we do not know stay."""
    values = load_object(text, "group table")
    table = _table_from(values)
    table.unknown.fields.update(unknown_fields(values, _table_object(GroupTable())))
    known = group_object(GroupConfig(""))
    for name, item in take_object(values, "subscriptionGroupTable").items():
        table.unknown.take(fastjson.text(name), as_object(item, "A group"), known)
    return table


def decode_group_table(data: Data) -> GroupTable:
    """201's answer."""
    return _table_from(load_object(data, "group table"))


def _table_from(values: Mapping[Any, Any]) -> GroupTable:
    return GroupTable(
        {
            fastjson.text(name): group_from(as_object(item, "A group"), fastjson.text(name))
            for name, item in take_object(values, "subscriptionGroupTable").items()
        },
        data_version_from(take_object(values, "dataVersion")),
        {
            fastjson.text(name): {
                fastjson.text(topic): as_integer(bits, "forbidden bits")
                for topic, bits in as_object(topics, "forbiddenTable").items()
            }
            for name, topics in take_object(values, "forbiddenTable").items()
        },
    )
