"""Offsets of queues and of groups: 43, 202, 208, 220, 222, `consumerOffset.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sluicemq.model.topic import DataVersion, MessageQueue
from sluicemq.protocol import fastjson
from sluicemq.protocol.bodies.reading import (
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
from sluicemq.protocol.bodies.topics import NO_VERSION, data_version_from, data_version_object


@dataclass(frozen=True, slots=True)
class ConsumerOffsets:
    """Committed offsets: `topic@group` -> queue id -> offset."""

    offsets: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    data_version: DataVersion = NO_VERSION


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
    """How far a group is in a queue; `last_time_ms`: when its last consumed message was stored."""

    broker_offset: int
    consumer_offset: int
    last_time_ms: int = 0
    pull_offset: int = 0


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
    """The text of `consumerOffset.json`."""
    return fastjson.dumps_file(_offset_objects(offsets))


def decode_consumer_offsets(data: Data) -> ConsumerOffsets:
    """43's answer or a `consumerOffset.json`; queue ids with quotes or without."""
    values = load_object(data, "consumer offsets")
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
                }
                for queue, item in stats.queues.items()
            },
        }
    )


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
    )


# --------------------------------------------------------------------------------------- reset


def encode_queue_offsets(offsets: Mapping[MessageQueue, int]) -> bytes:
    """220's body, 222's answer: queues as raw keys, which Java and Go both read (spec §5)."""
    return fastjson.dumps(
        {"offsetTable": {queue_key(queue): offset for queue, offset in offsets.items()}}
    )


def decode_queue_offsets(data: Data) -> dict[MessageQueue, int]:
    """The inverse of `encode_queue_offsets`; queues may also be texts that hold the object."""
    return {
        queue_from(key): as_integer(offset, "An offset")
        for key, offset in take_object(load_object(data, "offsets"), "offsetTable").items()
    }
