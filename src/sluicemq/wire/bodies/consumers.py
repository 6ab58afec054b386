"""What a consumer does and where it stands: 221, 223, 303, 307, 308, 309, 321 (spec/admin.md §4).

Queues are raw keys of maps, as fastjson writes them. A Java consumer's 307 may hold `$ref`s as
keys, which `fastjson.loads` resolves where it can; a queue that stays unknown is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sluicemq.errors import ProtocolError
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.wire import fastjson
from sluicemq.wire.bodies.clients import subscription_from, subscription_object
from sluicemq.wire.bodies.reading import (
    Data,
    as_integer,
    as_object,
    as_texts,
    load_object,
    queue_from,
    queue_key,
    queue_object,
    take_boolean,
    take_float,
    take_integer,
    take_list,
    take_object,
    take_text,
    take_text_or_none,
)


class ConsumeResult(StrEnum):
    """How a message that was handled on request (309) went."""

    SUCCESS = "CR_SUCCESS"
    LATER = "CR_LATER"
    ROLLBACK = "CR_ROLLBACK"
    COMMIT = "CR_COMMIT"
    EXCEPTION = "CR_THROW_EXCEPTION"
    NOTHING = "CR_RETURN_NULL"


@dataclass(frozen=True, slots=True)
class DirectResult:
    """309's answer. `result` is a ConsumeResult, or another word of a newer client."""

    result: str
    remark: str | None = None
    spent_ms: int = 0
    is_ordered: bool = False
    auto_commit: bool = True


@dataclass(frozen=True, slots=True)
class QueueState:
    """One queue that a consumer reads: what it holds and has committed. Times are ms since 1970, 0
    for never."""

    commit_offset: int
    cached_count: int = 0
    cached_min: int = 0
    cached_max: int = 0
    cached_mib: int = 0
    locked: bool = False
    dropped: bool = False
    last_lock_ms: int = 0
    last_pull_ms: int = 0
    last_consume_ms: int = 0


@dataclass(frozen=True, slots=True)
class TopicRates:
    """What a consumer did with a topic lately: times in ms, rates a second, failures an hour."""

    pull_ms: float = 0.0
    pulls_per_second: float = 0.0
    consume_ms: float = 0.0
    done_per_second: float = 0.0
    failed_per_second: float = 0.0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class RunningInfo:
    """307's answer: what a consumer is and does. `stack` only when it was asked for."""

    properties: Mapping[str, str]
    subscriptions: tuple[Subscription, ...] = ()
    queues: Mapping[MessageQueue, QueueState] = field(default_factory=dict)
    rates: Mapping[str, TopicRates] = field(default_factory=dict)
    stack: str | None = None
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """303: a queue's first, consumed and last store time (ms), and how long a group is behind."""

    queue: MessageQueue
    first_ms: int
    last_ms: int
    consumed_ms: int
    delay_ms: int


@dataclass(frozen=True, slots=True)
class QueueUnit:
    """One entry of a queue: where its message lies, and whether a group's filter wants it."""

    physical_offset: int
    size_bytes: int
    tag_code: int
    is_wanted: bool = True
    remark: str | None = None


@dataclass(frozen=True, slots=True)
class QueueUnits:
    """321's answer."""

    offset_min: int
    offset_max: int
    units: Sequence[QueueUnit]
    subscription: Subscription | None = None


# ---------------------------------------------------------------------------------------- 309


def encode_direct_result(result: DirectResult) -> bytes:
    """309's answer."""
    return fastjson.dumps(
        {
            "autoCommit": result.auto_commit,
            "consumeResult": str(result.result),
            "order": result.is_ordered,
            "remark": result.remark,
            "spentTimeMills": result.spent_ms,
        }
    )


def decode_direct_result(data: Data) -> DirectResult:
    """The inverse of `encode_direct_result`."""
    values = load_object(data, "result of a message")
    return DirectResult(
        take_text(values, "consumeResult"),
        take_text_or_none(values, "remark"),
        take_integer(values, "spentTimeMills"),
        take_boolean(values, "order"),
        take_boolean(values, "autoCommit", True),
    )


# ---------------------------------------------------------------------------------------- 307


def encode_running_info(info: RunningInfo) -> bytes:
    """307's answer."""
    return fastjson.dumps(
        {
            "jstack": info.stack,
            "mqPopTable": {},
            "mqTable": {queue_key(queue): _state(item) for queue, item in info.queues.items()},
            "properties": dict(info.properties),
            "statusTable": {topic: _rates(item) for topic, item in info.rates.items()},
            "subscriptionSet": [subscription_object(item) for item in info.subscriptions],
            "userConsumerInfo": dict(info.notes),
        }
    )


def _state(item: QueueState) -> dict[str, Any]:
    return {
        "cachedMsgCount": item.cached_count,
        "cachedMsgMaxOffset": item.cached_max,
        "cachedMsgMinOffset": item.cached_min,
        "cachedMsgSizeInMiB": item.cached_mib,
        "commitOffset": item.commit_offset,
        "droped": item.dropped,  # RocketMQ's spelling
        "lastConsumeTimestamp": item.last_consume_ms,
        "lastLockTimestamp": item.last_lock_ms,
        "lastPullTimestamp": item.last_pull_ms,
        "locked": item.locked,
        "transactionMsgCount": 0,
        "transactionMsgMaxOffset": 0,
        "transactionMsgMinOffset": 0,
        "tryUnlockTimes": 0,
    }


def _rates(item: TopicRates) -> dict[str, Any]:
    return {
        "consumeFailedMsgs": item.failures,
        "consumeFailedTPS": item.failed_per_second,
        "consumeOKTPS": item.done_per_second,
        "consumeRT": item.consume_ms,
        "pullRT": item.pull_ms,
        "pullTPS": item.pulls_per_second,
    }


def decode_running_info(data: Data) -> RunningInfo:
    """307's answer, of any client. Raises ProtocolError."""
    values = load_object(data, "running information")
    return RunningInfo(
        as_texts(take_object(values, "properties")),
        tuple(subscription_from(item) for item in take_list(values, "subscriptionSet")),
        dict(_states_from(take_object(values, "mqTable"))),
        {
            fastjson.text(topic): _rates_from(item)
            for topic, item in take_object(values, "statusTable").items()
        },
        take_text_or_none(values, "jstack"),
        as_texts(take_object(values, "userConsumerInfo")),
    )


def _states_from(table: Mapping[Any, Any]) -> list[tuple[MessageQueue, QueueState]]:
    found = []
    for key, item in table.items():
        try:
            found.append((queue_from(key), _state_from(item)))
        except ProtocolError:
            continue
    return found


def _state_from(value: Any) -> QueueState:
    values = as_object(value, "A queue's state")
    return QueueState(
        take_integer(values, "commitOffset"),
        take_integer(values, "cachedMsgCount"),
        take_integer(values, "cachedMsgMinOffset"),
        take_integer(values, "cachedMsgMaxOffset"),
        take_integer(values, "cachedMsgSizeInMiB"),
        take_boolean(values, "locked"),
        take_boolean(values, "droped"),
        take_integer(values, "lastLockTimestamp"),
        take_integer(values, "lastPullTimestamp"),
        take_integer(values, "lastConsumeTimestamp"),
    )


def _rates_from(value: Any) -> TopicRates:
    values = as_object(value, "A topic's rates")
    return TopicRates(
        take_float(values, "pullRT"),
        take_float(values, "pullTPS"),
        take_float(values, "consumeRT"),
        take_float(values, "consumeOKTPS"),
        take_float(values, "consumeFailedTPS"),
        take_integer(values, "consumeFailedMsgs"),
    )


# ----------------------------------------------------------------------------------- 221, 223


def encode_client_offsets(offsets: Mapping[MessageQueue, int]) -> bytes:
    """221's answer: how far the client is in its queues."""
    table = {queue_key(queue): offset for queue, offset in offsets.items()}
    return fastjson.dumps({"consumerTable": {}, "messageQueueTable": table})


def decode_client_offsets(data: Data) -> dict[MessageQueue, int]:
    """The inverse of `encode_client_offsets`."""
    values = load_object(data, "status of a consumer")
    return _offsets_from(take_object(values, "messageQueueTable"))


def encode_offsets_by_client(found: Mapping[str, Mapping[MessageQueue, int]]) -> bytes:
    """223's answer."""
    table = {
        client_id: {queue_key(queue): offset for queue, offset in offsets.items()}
        for client_id, offsets in found.items()
    }
    return fastjson.dumps({"consumerTable": table, "messageQueueTable": {}})


def decode_offsets_by_client(data: Data) -> dict[str, dict[MessageQueue, int]]:
    """The inverse of `encode_offsets_by_client`."""
    values = load_object(data, "status of consumers")
    return {
        fastjson.text(client_id): _offsets_from(as_object(offsets, "consumerTable"))
        for client_id, offsets in take_object(values, "consumerTable").items()
    }


def _offsets_from(table: Mapping[Any, Any]) -> dict[MessageQueue, int]:
    return {queue_from(key): as_integer(offset, "An offset") for key, offset in table.items()}


def encode_queue_offset_list(offsets: Mapping[MessageQueue, int]) -> bytes:
    """220's body for C++ clients: a list (spec/remoting.md §7.6)."""
    return fastjson.dumps(
        {"offsetTable": [{**queue_object(q), "offset": offset} for q, offset in offsets.items()]}
    )


# ------------------------------------------------------------------------------ 303, 308, 321


def encode_time_spans(spans: Sequence[TimeSpan]) -> bytes:
    """303's answer."""
    return fastjson.dumps(
        {
            "consumeTimeSpanSet": [
                {
                    "consumeTimeStamp": span.consumed_ms,
                    "delayTime": span.delay_ms,
                    "maxTimeStamp": span.last_ms,
                    "messageQueue": queue_object(span.queue),
                    "minTimeStamp": span.first_ms,
                }
                for span in spans
            ]
        }
    )


def decode_time_spans(data: Data) -> list[TimeSpan]:
    """The inverse of `encode_time_spans`."""
    found = []
    for item in take_list(load_object(data, "time spans"), "consumeTimeSpanSet"):
        values = as_object(item, "A time span")
        found.append(
            TimeSpan(
                queue_from(take_object(values, "messageQueue")),
                take_integer(values, "minTimeStamp"),
                take_integer(values, "maxTimeStamp"),
                take_integer(values, "consumeTimeStamp"),
                take_integer(values, "delayTime"),
            )
        )
    return found


def encode_correction_offsets(offsets: Mapping[int, int]) -> bytes:
    """308's answer: queue ids without quotes."""
    return fastjson.dumps({"correctionOffsets": dict(offsets)})


def decode_correction_offsets(data: Data) -> dict[int, int]:
    """The inverse of `encode_correction_offsets`."""
    table = take_object(load_object(data, "correction offsets"), "correctionOffsets")
    return {as_integer(key, "A queue id"): as_integer(it, "An offset") for key, it in table.items()}


def encode_queue_units(found: QueueUnits) -> bytes:
    """321's answer."""
    subscription = found.subscription
    return fastjson.dumps(
        {
            "maxQueueIndex": found.offset_max,
            "minQueueIndex": found.offset_min,
            "queueData": [
                {
                    "eval": unit.is_wanted,
                    "msg": unit.remark,
                    "physicOffset": unit.physical_offset,
                    "physicSize": unit.size_bytes,
                    "tagsCode": unit.tag_code,
                }
                for unit in found.units
            ],
            "subscriptionData": None if subscription is None else subscription_object(subscription),
        }
    )


def decode_queue_units(data: Data) -> QueueUnits:
    """The inverse of `encode_queue_units`."""
    values = load_object(data, "queue")
    units = [as_object(item, "A unit") for item in take_list(values, "queueData")]
    return QueueUnits(
        take_integer(values, "minQueueIndex"),
        take_integer(values, "maxQueueIndex"),
        [
            QueueUnit(
                take_integer(unit, "physicOffset"), take_integer(unit, "physicSize"),
                take_integer(unit, "tagsCode"), take_boolean(unit, "eval"),
                take_text_or_none(unit, "msg"),
            )
            for unit in units
        ],
        subscription_from(values["subscriptionData"]) if values.get("subscriptionData") else None,
    )  # fmt: skip
