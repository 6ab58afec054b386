"""The body of 900111: undecided transactions, as a JSON object. Ours alone."""

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
class OpenTransaction:
    """A transaction that is not decided. Times are ms since 1970; `asked` is the address of the
    client that was asked last and has not answered, "" when there is none."""

    transaction_id: str
    group: str
    topic: str
    queue_id: int
    keys: str
    tag: str
    began_ms: int
    checks: int
    next_check_ms: int
    asked: str
    half_queue_offset: int
    physical_offset: int
    body_bytes: int


def encode_open_transactions(transactions: Iterable[OpenTransaction]) -> bytes:
    """900111's answer."""
    listed = [
        {
            "transactionId": item.transaction_id, "producerGroup": item.group,
            "topic": item.topic, "queueId": item.queue_id, "keys": item.keys, "tag": item.tag,
            "beginTime": item.began_ms, "checkTimes": item.checks,
            "nextCheckTime": item.next_check_ms, "asked": item.asked,
            "tranStateTableOffset": item.half_queue_offset,
            "commitLogOffset": item.physical_offset, "bodySize": item.body_bytes,
        }
        for item in transactions
    ]  # fmt: skip
    return fastjson.dumps_strict({"transactions": listed})


def decode_open_transactions(data: Data) -> list[OpenTransaction]:
    """The inverse. Raises ProtocolError."""
    values = load_object(data, "list of transactions")
    return [_open_from(value) for value in take_list(values, "transactions")]


def _open_from(value: Any) -> OpenTransaction:
    item = as_object(value, "A transaction")
    return OpenTransaction(
        take_text(item, "transactionId"),
        take_text(item, "producerGroup"),
        take_text(item, "topic"),
        take_integer(item, "queueId"),
        take_text(item, "keys"),
        take_text(item, "tag"),
        take_integer(item, "beginTime"),
        take_integer(item, "checkTimes"),
        take_integer(item, "nextCheckTime"),
        take_text(item, "asked"),
        take_integer(item, "tranStateTableOffset"),
        take_integer(item, "commitLogOffset"),
        take_integer(item, "bodySize"),
    )
