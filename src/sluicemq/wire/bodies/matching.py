"""The body of 900131: what a group's filters let through, and what is before them. Ours alone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sluicemq.wire import fastjson
from sluicemq.wire.bodies.reading import (
    Data,
    as_integer,
    as_object,
    load_object,
    take_integer,
    take_list,
    take_object,
    take_text,
    take_text_or_none,
)


@dataclass(frozen=True, slots=True)
class QueueMatching:
    """One queue: of the messages from `committed` (-1: nothing is) to `offset_max` so many match,
    None when the subscription is not known. `eta_ms`: in how long none will be left at the present
    pace; None when that is not known, or never."""

    queue_id: int
    committed: int
    offset_min: int
    offset_max: int
    matching: int | None
    eta_ms: int | None = None


@dataclass(frozen=True, slots=True)
class FilterFailure:
    """An evaluation that failed: the message's place, and why."""

    queue_id: int
    offset: int
    text: str


@dataclass(frozen=True, slots=True)
class LaneMatching:
    """One lane of a group whose members want different things: its own offsets, and what it still
    has to get. `expression` is "" where the topic is the group's retry topic."""

    lane: str
    kind: str
    expression: str
    client_ids: tuple[str, ...]
    queues: tuple[QueueMatching, ...]


@dataclass(frozen=True, slots=True)
class GroupMatching:
    """A group on one topic of one broker. Counters are since that broker started; `expression` is
    None when the broker does not know what the group wants."""

    topic: str
    kind: str
    expression: str | None
    queues: tuple[QueueMatching, ...]
    matched: int = 0
    filtered: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    failures: tuple[FilterFailure, ...] = ()
    lanes: tuple[LaneMatching, ...] = ()
    """With lanes, a queue's `committed` is the least of them, and its `matching` the sum."""


def encode_group_matching(topics: Iterable[GroupMatching]) -> bytes:
    """900131's answer."""
    return fastjson.dumps_strict({"topics": [_object(item) for item in topics]})


def _object(item: GroupMatching) -> dict[str, Any]:
    return {
        "topic": item.topic, "expressionType": item.kind, "subscription": item.expression,
        "matched": item.matched, "filtered": item.filtered, "errors": dict(item.errors),
        "failures": [
            {"queueId": one.queue_id, "queueOffset": one.offset, "text": one.text}
            for one in item.failures
        ],
        "queues": [_queue_object(one) for one in item.queues],
        "lanes": [
            {
                "lane": lane.lane, "expressionType": lane.kind, "subscription": lane.expression,
                "clientIds": list(lane.client_ids),
                "queues": [_queue_object(one) for one in lane.queues],
            }
            for lane in item.lanes
        ],
    }  # fmt: skip


def _queue_object(one: QueueMatching) -> dict[str, Any]:
    return {
        "queueId": one.queue_id, "committed": one.committed, "minOffset": one.offset_min,
        "maxOffset": one.offset_max, "matching": one.matching, "eta": one.eta_ms,
    }  # fmt: skip


def decode_group_matching(data: Data) -> list[GroupMatching]:
    """The inverse. Raises ProtocolError."""
    values = load_object(data, "matches of a group")
    return [_from(as_object(value, "A topic's matches")) for value in take_list(values, "topics")]


def _from(item: dict[Any, Any]) -> GroupMatching:
    return GroupMatching(
        take_text(item, "topic"),
        take_text(item, "expressionType"),
        take_text_or_none(item, "subscription"),
        tuple(_queue_from(value) for value in take_list(item, "queues")),
        take_integer(item, "matched"),
        take_integer(item, "filtered"),
        {
            fastjson.text(reason): as_integer(count, "A count")
            for reason, count in take_object(item, "errors").items()
        },
        tuple(_failure_from(value) for value in take_list(item, "failures")),
        tuple(_lane_from(value) for value in take_list(item, "lanes")),
    )


def _lane_from(value: Any) -> LaneMatching:
    item = as_object(value, "A lane's matches")
    return LaneMatching(
        take_text(item, "lane"),
        take_text(item, "expressionType"),
        take_text(item, "subscription"),
        tuple(fastjson.text(client_id) for client_id in take_list(item, "clientIds")),
        tuple(_queue_from(one) for one in take_list(item, "queues")),
    )


def _queue_from(value: Any) -> QueueMatching:
    item = as_object(value, "A queue's matches")
    matching, eta = item.get("matching"), item.get("eta")
    return QueueMatching(
        take_integer(item, "queueId"),
        take_integer(item, "committed"),
        take_integer(item, "minOffset"),
        take_integer(item, "maxOffset"),
        None if matching is None else as_integer(matching, "A count"),
        None if eta is None else as_integer(eta, "A time"),
    )


def _failure_from(value: Any) -> FilterFailure:
    item = as_object(value, "A failure")
    return FilterFailure(
        take_integer(item, "queueId"), take_integer(item, "queueOffset"), take_text(item, "text")
    )
