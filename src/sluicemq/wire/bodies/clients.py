"""What clients say of themselves: heartbeat, subscriptions, locks (spec/remoting.md §15)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sluicemq.model.subscription import ALL, TAG, Subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.wire import fastjson
from sluicemq.wire.bodies.reading import (
    Data,
    as_integer,
    as_object,
    load_object,
    queue_from,
    queue_object,
    take_boolean,
    take_integer,
    take_list,
    take_object,
    take_text,
    take_texts,
)

CONSUME_ACTIVELY = "CONSUME_ACTIVELY"
CONSUME_PASSIVELY = "CONSUME_PASSIVELY"
CONSUME_POP = "CONSUME_POP"
"""Kinds of consumers: pull, push, pop."""
CLUSTERING = "CLUSTERING"
BROADCASTING = "BROADCASTING"
FROM_LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
FROM_FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
FROM_TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


@dataclass(frozen=True, slots=True)
class ConsumerData:
    """One consumer group of a client."""

    group: str
    consume_type: str = CONSUME_PASSIVELY
    message_model: str = CLUSTERING
    consume_from_where: str = FROM_LAST_OFFSET
    subscriptions: tuple[Subscription, ...] = ()
    unit_mode: bool = False


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """34's body. With `without_subscriptions` the broker keeps those it has (heartbeat V2)."""

    client_id: str
    producer_groups: tuple[str, ...] = ()
    consumers: tuple[ConsumerData, ...] = ()
    fingerprint: int = 0
    without_subscriptions: bool = False


@dataclass(frozen=True, slots=True)
class LockBatch:
    """41's and 42's body: these queues for this client alone."""

    group: str
    client_id: str
    queues: tuple[MessageQueue, ...]
    only_this_broker: bool = False


@dataclass(frozen=True, slots=True)
class CheckClientConfig:
    """46's body: can this subscription be served?"""

    client_id: str
    group: str
    subscription: Subscription | None
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Connection:
    """One client of a group, as 203 and 204 show it."""

    client_id: str
    address: str
    language: str
    version: int


@dataclass(frozen=True, slots=True)
class ConsumerConnections:
    """203's answer: who is there, and with which subscriptions."""

    connections: tuple[Connection, ...]
    consume_type: str
    message_model: str
    consume_from_where: str
    subscriptions: Mapping[str, Subscription]


# ----------------------------------------------------------------------------- subscription


def subscription_object(subscription: Subscription) -> dict[str, Any]:
    """A subscription as a JSON object."""
    return {
        "classFilterMode": False,
        "codeSet": sorted(subscription.codes),
        "expressionType": subscription.kind,
        "subString": subscription.expression,
        "subVersion": subscription.version,
        "tagsSet": sorted(subscription.tags),
        "topic": subscription.topic,
    }


def subscription_from(value: Any) -> Subscription:
    """The inverse of `subscription_object`. Tags and codes are as the client says: Go leaves them
    empty at times, so a broker that needs them parses the expression."""
    values = as_object(value, "A subscription")
    return Subscription(
        take_text(values, "topic"),
        take_text(values, "subString", ALL),
        take_text(values, "expressionType", TAG),
        frozenset(take_texts(values, "tagsSet")),
        frozenset(as_integer(code, "codeSet") for code in take_list(values, "codeSet")),
        take_integer(values, "subVersion"),
    )


# -------------------------------------------------------------------------------- heartbeat


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    """34's body."""
    return fastjson.dumps(
        {
            "clientID": heartbeat.client_id,
            "consumerDataSet": [_consumer_object(consumer) for consumer in heartbeat.consumers],
            "heartbeatFingerprint": heartbeat.fingerprint,
            "producerDataSet": [{"groupName": group} for group in heartbeat.producer_groups],
            "withoutSub": heartbeat.without_subscriptions,
        }
    )


def _consumer_object(consumer: ConsumerData) -> dict[str, Any]:
    return {
        "consumeFromWhere": consumer.consume_from_where,
        "consumeType": consumer.consume_type,
        "groupName": consumer.group,
        "messageModel": consumer.message_model,
        "subscriptionDataSet": [subscription_object(item) for item in consumer.subscriptions],
        "unitMode": consumer.unit_mode,
    }


def decode_heartbeat(data: Data) -> Heartbeat:
    """The inverse of `encode_heartbeat`; Go's lacks the last two fields."""
    values = load_object(data, "heartbeat")
    return Heartbeat(
        take_text(values, "clientID"),
        tuple(
            take_text(as_object(item, "A producer"), "groupName")
            for item in take_list(values, "producerDataSet")
        ),
        tuple(_consumer_from(item) for item in take_list(values, "consumerDataSet")),
        take_integer(values, "heartbeatFingerprint"),
        take_boolean(values, "withoutSub"),
    )


def _consumer_from(value: Any) -> ConsumerData:
    values = as_object(value, "A consumer")
    return ConsumerData(
        take_text(values, "groupName"),
        take_text(values, "consumeType", CONSUME_PASSIVELY),
        take_text(values, "messageModel", CLUSTERING),
        take_text(values, "consumeFromWhere", FROM_LAST_OFFSET),
        tuple(subscription_from(item) for item in take_list(values, "subscriptionDataSet")),
        take_boolean(values, "unitMode"),
    )


def encode_check_client_config(request: CheckClientConfig) -> bytes:
    """46's body."""
    return fastjson.dumps(
        {
            "clientId": request.client_id,
            "group": request.group,
            "namespace": request.namespace,
            "subscriptionData": (
                subscription_object(request.subscription) if request.subscription else None
            ),
        }
    )


def decode_check_client_config(data: Data) -> CheckClientConfig:
    """The inverse of `encode_check_client_config`."""
    values = load_object(data, "client configuration")
    subscription = values.get("subscriptionData")
    return CheckClientConfig(
        take_text(values, "clientId"),
        take_text(values, "group"),
        subscription_from(subscription) if subscription is not None else None,
        take_text(values, "namespace") or None,
    )


# ------------------------------------------------------------------------- members and locks


def encode_consumer_list(client_ids: Iterable[str]) -> bytes:
    """38's answer, in the order given."""
    return fastjson.dumps({"consumerIdList": list(client_ids)})


def decode_consumer_list(data: Data) -> tuple[str, ...]:
    """The inverse of `encode_consumer_list`."""
    return take_texts(load_object(data, "consumer list"), "consumerIdList")


def encode_lock_batch(batch: LockBatch) -> bytes:
    """41's and 42's body."""
    return fastjson.dumps(
        {
            "clientId": batch.client_id,
            "consumerGroup": batch.group,
            "mqSet": [queue_object(queue) for queue in batch.queues],
            "onlyThisBroker": batch.only_this_broker,
        }
    )


def decode_lock_batch(data: Data) -> LockBatch:
    """The inverse of `encode_lock_batch`; Go's lacks onlyThisBroker."""
    values = load_object(data, "lock request")
    return LockBatch(
        take_text(values, "consumerGroup"),
        take_text(values, "clientId"),
        tuple(queue_from(item) for item in take_list(values, "mqSet")),
        take_boolean(values, "onlyThisBroker"),
    )


def encode_locked_queues(queues: Iterable[MessageQueue]) -> bytes:
    """41's answer: what the client holds now."""
    return fastjson.dumps({"lockOKMQSet": [queue_object(queue) for queue in queues]})


def decode_locked_queues(data: Data) -> tuple[MessageQueue, ...]:
    """The inverse of `encode_locked_queues`."""
    return tuple(
        queue_from(item) for item in take_list(load_object(data, "lock answer"), "lockOKMQSet")
    )


# ------------------------------------------------------------------------------- connections


def _connection_objects(connections: Iterable[Connection]) -> list[dict[str, Any]]:
    return [
        {
            "clientAddr": connection.address,
            "clientId": connection.client_id,
            "language": connection.language,
            "version": connection.version,
        }
        for connection in connections
    ]


def encode_producer_connections(connections: Iterable[Connection]) -> bytes:
    """204's answer."""
    return fastjson.dumps({"connectionSet": _connection_objects(connections)})


def encode_consumer_connections(group: ConsumerConnections) -> bytes:
    """203's answer."""
    return fastjson.dumps(
        {
            "connectionSet": _connection_objects(group.connections),
            "consumeFromWhere": group.consume_from_where,
            "consumeType": group.consume_type,
            "messageModel": group.message_model,
            "subscriptionTable": {
                topic: subscription_object(item) for topic, item in group.subscriptions.items()
            },
        }
    )


def decode_consumer_connections(data: Data) -> ConsumerConnections:
    """203's answer; a 204 answer is one without subscriptions."""
    values = load_object(data, "connection list")
    return ConsumerConnections(
        tuple(_connection_from(item) for item in take_list(values, "connectionSet")),
        take_text(values, "consumeType"),
        take_text(values, "messageModel"),
        take_text(values, "consumeFromWhere"),
        {
            fastjson.text(topic): subscription_from(item)
            for topic, item in take_object(values, "subscriptionTable").items()
        },
    )


def _connection_from(value: Any) -> Connection:
    values = as_object(value, "A connection")
    return Connection(
        take_text(values, "clientId"),
        take_text(values, "clientAddr"),
        take_text(values, "language"),
        take_integer(values, "version"),
    )
