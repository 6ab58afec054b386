"""The body of 900101: messages that wait, as a JSON object. Ours alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sluicemq.wire import fastjson
from sluicemq.wire.bodies.reading import (
    Data,
    as_object,
    load_object,
    take_integer,
    take_list,
    take_text,
)


@dataclass(frozen=True, slots=True)
class WaitingMessage:
    """A delayed or timed message that is not delivered yet.

    `level` is 0 for a timed one. Times are ms since 1970. `handle` takes it back.
    """

    topic: str
    queue_id: int
    unique_id: str
    keys: str
    tag: str
    level: int
    due_ms: int
    stored_ms: int
    body_bytes: int
    handle: str


def encode_waiting(messages: Iterable[WaitingMessage]) -> bytes:
    """900101's answer."""
    listed = [
        {
            "topic": item.topic, "queueId": item.queue_id, "uniqKey": item.unique_id,
            "keys": item.keys, "tag": item.tag, "level": item.level, "deliverTime": item.due_ms,
            "storeTime": item.stored_ms, "bodySize": item.body_bytes, "handle": item.handle,
        }
        for item in messages
    ]  # fmt: skip
    return fastjson.dumps_strict({"messages": listed})


def decode_waiting(data: Data) -> list[WaitingMessage]:
    """The inverse. Raises ProtocolError."""
    values = load_object(data, "list of waiting messages")
    return [_waiting_from(value) for value in take_list(values, "messages")]


def _waiting_from(value: Any) -> WaitingMessage:
    item = as_object(value, "A waiting message")
    return WaitingMessage(
        take_text(item, "topic"),
        take_integer(item, "queueId"),
        take_text(item, "uniqKey"),
        take_text(item, "keys"),
        take_text(item, "tag"),
        take_integer(item, "level"),
        take_integer(item, "deliverTime"),
        take_integer(item, "storeTime"),
        take_integer(item, "bodySize"),
        take_text(item, "handle"),
    )
