"""Offsets of queues and of groups: 43, 202, 208, 220, 222, `consumerOffset.json`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sluicemq.model.topic import DataVersion, MessageQueue
from sluicemq.wire import fastjson
from sluicemq.wire.bodies.reading import (
    Data,
    as_integer,
    as_object,
    load_object,
    queue_from,
    queue_key,
    take_float,
    take_integer,
    take_object,
)
from sluicemq.wire.bodies.topics import NO_VERSION, data_version_from, data_version_object
from sluicemq.wire.bodies.unknown import Unknown, completed, unknown_fields
from sluicemq.wire.javamap import hash_map, hash_map_of_integers, hash_ordered

SEPARATOR: Final = "@"
# Of RocketMQ's maps, for the order in the file: keys, a key's queues, groups, a group's topics.
KEY_BUCKETS, QUEUE_BUCKETS, GROUP_BUCKETS, TOPIC_SET_BUCKETS = 1024, 64, 128, 8


@dataclass(frozen=True, slots=True)
class ConsumerOffsets:
    """Committed offsets: `topic@group` -> queue id -> offset."""

    offsets: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    data_version: DataVersion = NO_VERSION
    unknown: Unknown = field(default_factory=Unknown)
    """Of a file, what it says besides."""


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Offsets of a queue and the time of its last message (ms, 0 when it has none)."""

    offset_min: int
    offset_max: int
    last_time_ms: int


@dataclass(frozen=True, slots=True)
class TopicStats:
    """202's answer."""

    queues: Mapping[MessageQueue, QueueStats]
    puts_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """How far a group is in a queue; `last_time_ms`: when its last consumed message was stored.

    Ours alone: `messages_at_risk` are unread and go with the next files, from `loss_time_ms` on.
    """

    broker_offset: int
    consumer_offset: int
    last_time_ms: int = 0
    pull_offset: int = 0
    messages_at_risk: int = 0
    loss_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class ConsumeStats:
    """208's answer."""

    queues: Mapping[MessageQueue, QueueProgress]
    consumes_per_second: float = 0.0


# ------------------------------------------------------------------------------ consumer offsets


def _offset_objects(offsets: ConsumerOffsets) -> dict[str, Any]:
    return {
        "dataVersion": data_version_object(offsets.data_version),
        "offsetTable": {key: dict(queues) for key, queues in offsets.offsets.items()},
    }


def encode_consumer_offsets(offsets: ConsumerOffsets) -> bytes:
    """43's answer: queue ids without quotes, as fastjson writes them."""
    return fastjson.dumps(_offset_objects(offsets))


def encode_consumer_offsets_file(offsets: ConsumerOffsets) -> str:
    """The text of `consumerOffset.json`, as RocketMQ writes it."""
    table = {
        key: hash_map_of_integers(queues, QUEUE_BUCKETS)
        for key, queues in hash_map(offsets.offsets, KEY_BUCKETS).items()
    }
    known = {
        "dataVersion": data_version_object(offsets.data_version),
        "groupTopicMap": _topics_by_group(table),
        "offsetTable": table,
    }
    return fastjson.dumps_pretty(completed(known, offsets.unknown.fields))


def _topics_by_group(keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """What RocketMQ derives and writes beside the offsets, for who reads the file."""
    found: dict[str, list[str]] = {}
    for key in keys:
        topic, _, group = key.partition(SEPARATOR)
        if topic and group and SEPARATOR not in group:
            found.setdefault(group, []).append(topic)
    return {
        group: tuple(hash_ordered(topics, TOPIC_SET_BUCKETS))
        for group, topics in hash_map(found, GROUP_BUCKETS).items()
    }


def decode_consumer_offsets_file(text: str) -> ConsumerOffsets:
    """The inverse of `encode_consumer_offsets_file`, of any release, with what it says besides.

    Also of `lmqConsumerOffset.json`, where light queues have a table of their own: topic@group to
    the offset of their only queue.
    """
    values = load_object(text, "consumer offsets")
    offsets = _offsets_from(values)
    light = take_object(values, "lmqOffsetTable")
    if light:
        table = {**offsets.offsets}
        for key, offset in light.items():
            table[fastjson.text(key)] = {0: as_integer(offset, "An offset")}
        offsets = ConsumerOffsets(table, offsets.data_version, offsets.unknown)
    known = ("dataVersion", "groupTopicMap", "offsetTable", "lmqOffsetTable")
    offsets.unknown.fields.update(unknown_fields(values, known))
    return offsets


def decode_consumer_offsets(data: Data) -> ConsumerOffsets:
    """43's answer; queue ids with quotes or without."""
    return _offsets_from(load_object(data, "consumer offsets"))


def _offsets_from(values: Mapping[Any, Any]) -> ConsumerOffsets:
    return ConsumerOffsets(
        {
            fastjson.text(key): {
                as_integer(queue_id, "A queue id"): as_integer(offset, "An offset")
                for queue_id, offset in as_object(queues, "offsetTable").items()
            }
            for key, queues in take_object(values, "offsetTable").items()
        },
        data_version_from(take_object(values, "dataVersion")),
    )


# ---------------------------------------------------------------------------------- statistics


def encode_topic_stats(stats: TopicStats) -> bytes:
    """202's answer."""
    return fastjson.dumps(
        {
            "offsetTable": {
                queue_key(queue): {
                    "lastUpdateTimestamp": item.last_time_ms,
                    "maxOffset": item.offset_max,
                    "minOffset": item.offset_min,
                }
                for queue, item in stats.queues.items()
            },
            "topicPutTps": stats.puts_per_second,
        }
    )


def decode_topic_stats(data: Data) -> TopicStats:
    """The inverse of `encode_topic_stats`."""
    values = load_object(data, "topic statistics")
    return TopicStats(
        {
            queue_from(key): _queue_stats_from(item)
            for key, item in take_object(values, "offsetTable").items()
        },
        take_float(values, "topicPutTps"),
    )


def _queue_stats_from(value: Any) -> QueueStats:
    values = as_object(value, "A queue's statistics")
    return QueueStats(
        take_integer(values, "minOffset"),
        take_integer(values, "maxOffset"),
        take_integer(values, "lastUpdateTimestamp"),
    )


def encode_consume_stats(stats: ConsumeStats) -> bytes:
    """208's answer."""
    return fastjson.dumps(
        {
            "consumeTps": stats.consumes_per_second,
            "offsetTable": {
                queue_key(queue): {
                    "brokerOffset": item.broker_offset,
                    "consumerOffset": item.consumer_offset,
                    "lastTimestamp": item.last_time_ms,
                    "pullOffset": item.pull_offset,
                    **_risk_object(item),
                }
                for queue, item in stats.queues.items()
            },
        }
    )


def _risk_object(item: QueueProgress) -> dict[str, Any]:
    if not item.messages_at_risk:
        return {}
    return {"sluiceLossTime": item.loss_time_ms, "sluiceMessagesAtRisk": item.messages_at_risk}


def decode_consume_stats(data: Data) -> ConsumeStats:
    """The inverse of `encode_consume_stats`."""
    values = load_object(data, "consume statistics")
    return ConsumeStats(
        {
            queue_from(key): _progress_from(item)
            for key, item in take_object(values, "offsetTable").items()
        },
        take_float(values, "consumeTps"),
    )


def _progress_from(value: Any) -> QueueProgress:
    values = as_object(value, "A queue's progress")
    return QueueProgress(
        take_integer(values, "brokerOffset"),
        take_integer(values, "consumerOffset"),
        take_integer(values, "lastTimestamp"),
        take_integer(values, "pullOffset"),
        take_integer(values, "sluiceMessagesAtRisk"),
        take_integer(values, "sluiceLossTime"),
    )


# --------------------------------------------------------------------------------------- reset


def encode_queue_offsets(offsets: Mapping[MessageQueue, int]) -> bytes:
    """220's body, 222's answer: queues as raw keys, which Java and Go both read
    (spec/remoting.md §5)."""
    return fastjson.dumps(
        {"offsetTable": {queue_key(queue): offset for queue, offset in offsets.items()}}
    )


def decode_queue_offsets(data: Data) -> dict[MessageQueue, int]:
    """The inverse of `encode_queue_offsets`; queues may also be texts that hold the object."""
    return {
        queue_from(key): as_integer(offset, "An offset")
        for key, offset in take_object(load_object(data, "offsets"), "offsetTable").items()
    }
