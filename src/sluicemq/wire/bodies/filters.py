"""The SQL92 filters of consumer groups: `consumerFilter.json` (spec/store.md §11)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sluicemq.model.subscription import SQL92
from sluicemq.wire import fastjson
from sluicemq.wire.bodies.reading import (
    as_integer,
    as_object,
    load_object,
    take_integer,
    take_list,
    take_object,
    take_text,
)
from sluicemq.wire.javamap import hash_map

TOPIC_BUCKETS = 512


@dataclass(frozen=True, slots=True)
class ConsumerFilter:
    """What a group wants of a topic. Times are ms since 1970; it is dead when nobody of the group
    subscribed to it any more. `bits` of `bit_count` are its places in RocketMQ's filter bitmaps;
    `version` is when the client made the subscription."""

    topic: str
    group: str
    expression: str
    kind: str = SQL92
    version: int = 0
    born_ms: int = 0
    dead_ms: int = 0
    bits: tuple[int, ...] = ()
    bit_count: int = 0

    @property
    def is_dead(self) -> bool:
        return self.dead_ms >= self.born_ms


def encode_consumer_filters_file(filters: Iterable[ConsumerFilter]) -> str:
    """The text of `consumerFilter.json`, as RocketMQ writes it."""
    by_topic: dict[str, dict[str, Any]] = {}
    for item in filters:
        by_topic.setdefault(item.topic, {})[item.group] = _filter_object(item)
    topics = {
        topic: {"groupFilterData": hash_map(groups), "topic": topic}
        for topic, groups in hash_map(by_topic, TOPIC_BUCKETS).items()
    }
    return fastjson.dumps_pretty({"filterDataByTopic": topics})


def _filter_object(item: ConsumerFilter) -> dict[str, Any]:
    bloom = {"bitNum": item.bit_count, "bitPos": item.bits} if item.bit_count else None
    return {
        "bloomFilterData": bloom,
        "bornTime": item.born_ms,
        "clientVersion": item.version,
        "consumerGroup": item.group,
        "dead": item.is_dead,
        "deadTime": item.dead_ms,
        "expression": item.expression,
        "expressionType": item.kind,
        "topic": item.topic,
    }


def decode_consumer_filters_file(text: str) -> list[ConsumerFilter]:
    """The inverse of `encode_consumer_filters_file`. Raises ProtocolError."""
    found = []
    topics = take_object(load_object(text, "consumer filters"), "filterDataByTopic")
    for topic, entry in topics.items():
        groups = take_object(as_object(entry, "A topic's filters"), "groupFilterData")
        for group, item in groups.items():
            values = as_object(item, "A filter")
            bloom = take_object(values, "bloomFilterData")
            found.append(
                ConsumerFilter(
                    fastjson.text(topic),
                    fastjson.text(group),
                    take_text(values, "expression"),
                    take_text(values, "expressionType", SQL92),
                    take_integer(values, "clientVersion"),
                    take_integer(values, "bornTime"),
                    take_integer(values, "deadTime"),
                    tuple(as_integer(bit, "bitPos") for bit in take_list(bloom, "bitPos")),
                    take_integer(bloom, "bitNum"),
                )
            )
    return found
