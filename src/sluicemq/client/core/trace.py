"""The body of trace messages: what happened to messages, as RocketMQ's clients tell it.

A body is records, each ended by U+0002, of fields that are separated by U+0001 (spec/remoting.md
§21). A message's way leaves up to five kinds of them:

    Pub             its producer has sent it                     Published
    EndTransaction  its producer has said how it ended           Ended
    Recall          its producer has taken it back               Recalled
    SubBefore       a consumer was given it                      Taken
    SubAfter        that consumer has finished; same request id  Finished

Nothing is written "null", so is empty text: Java's decoder loses empty fields at the end. Records
that are unknown or damaged are counted, not raised: one odd client must not hide all the others.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

FIELD: Final = "\x01"
RECORD: Final = "\x02"
_NULL: Final = "null"


class MessageKind(IntEnum):
    """What kind of message was sent."""

    NORMAL = 0
    HALF = 1
    COMMITTED = 2
    DELAYED = 3
    ORDERED = 4


class Outcome(IntEnum):
    """How a handler came back."""

    SUCCESS = 0
    TIME_OUT = 1
    EXCEPTION = 2
    RETURNED_NULL = 3
    FAILED = 4


@dataclass(frozen=True, slots=True)
class Published:
    """A send. `time_ms` is when it began. Java writes one for a whole batch: then `message_id` and
    `offset_message_id` are lists with commas."""

    time_ms: int
    region: str | None
    group: str | None
    topic: str | None
    message_id: str | None
    tags: str | None
    keys: str | None
    store_host: str | None
    body_length: int
    cost_ms: int
    kind: MessageKind
    offset_message_id: str | None
    success: bool
    client_host: str | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """A delivery begins; `retry_times` says how often the message had come before."""

    time_ms: int
    region: str | None
    group: str | None
    request_id: str | None
    message_id: str | None
    retry_times: int
    keys: str | None


@dataclass(frozen=True, slots=True)
class Finished:
    """A delivery ends. Clients of the cloud's flavour leave time and group out."""

    request_id: str | None
    message_id: str | None
    cost_ms: int
    success: bool
    keys: str | None
    outcome: Outcome
    time_ms: int | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A producer has told the end of a transaction; `state` COMMIT_MESSAGE, ROLLBACK_MESSAGE or
    UNKNOW (spelt so), `from_check`: because the broker had asked."""

    time_ms: int
    region: str | None
    group: str | None
    topic: str | None
    message_id: str | None
    tags: str | None
    keys: str | None
    store_host: str | None
    kind: MessageKind
    transaction_id: str | None
    state: str | None
    from_check: bool


@dataclass(frozen=True, slots=True)
class Recalled:
    """A timed message was taken back."""

    time_ms: int
    region: str | None
    group: str | None
    topic: str | None
    message_id: str | None
    success: bool


TraceRecord = Published | Taken | Finished | Ended | Recalled


def encode(records: Iterable[TraceRecord]) -> bytes:
    """The body of a trace message."""
    return "".join(map(encode_record, records)).encode()


def encode_record(record: TraceRecord) -> str:
    """One record with its end."""
    return FIELD.join(map(_text, _fields(record))) + RECORD


def _fields(record: TraceRecord) -> Sequence[object]:
    match record:
        case Published() as r:
            fields: list[object] = [
                "Pub", r.time_ms, r.region, r.group, r.topic, r.message_id, r.tags, r.keys,
                r.store_host, r.body_length, r.cost_ms, r.kind, r.offset_message_id, r.success,
            ]  # fmt: skip
            return fields if r.client_host is None else [*fields, r.client_host]
        case Taken() as r:
            return [
                "SubBefore", r.time_ms, r.region, r.group, r.request_id, r.message_id,
                r.retry_times, r.keys,
            ]  # fmt: skip
        case Finished() as r:
            after = [
                "SubAfter", r.request_id, r.message_id, r.cost_ms, r.success, r.keys, r.outcome,
            ]  # fmt: skip
            return [*after, ""] if r.time_ms is None else [*after, r.time_ms, r.group]
        case Ended() as r:
            return [
                "EndTransaction", r.time_ms, r.region, r.group, r.topic, r.message_id, r.tags,
                r.keys, r.store_host, r.kind, r.transaction_id, r.state, r.from_check,
            ]  # fmt: skip
        case Recalled() as r:
            return ["Recall", r.time_ms, r.region, r.group, r.topic, r.message_id, r.success]


def _text(value: object) -> str:
    if value is None:
        return _NULL
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    text = str(value)
    if FIELD in text or RECORD in text:  # would shift every field after it
        text = text.replace(FIELD, " ").replace(RECORD, " ")
    return text


def decode(body: bytes) -> tuple[list[TraceRecord], int]:
    """The records of a trace message, and how many more could not be understood."""
    records: list[TraceRecord] = []
    unread = 0
    for line in body.decode("utf-8", "replace").split(RECORD):
        if not line:
            continue
        fields = line.split(FIELD)
        reader = _READERS.get(fields[0])
        try:
            if reader is None:
                unread += 1
            else:
                records.append(reader(fields))
        except (ValueError, IndexError):
            unread += 1
    return records, unread


def _value(text: str) -> str | None:
    return None if text in (_NULL, "") else text


def _published(f: list[str]) -> Published:
    is_old = len(f) == 13  # before there was an offset message id
    return Published(
        int(f[1]), _value(f[2]), _value(f[3]), _value(f[4]), _value(f[5]), _value(f[6]),
        _value(f[7]), _value(f[8]), int(f[9]), int(f[10]), MessageKind(int(f[11])),
        None if is_old else _value(f[12]), _bool(f[12 if is_old else 13]),
        _value(f[14]) if len(f) > 14 else None,
    )  # fmt: skip


def _taken(f: list[str]) -> Taken:
    retry_times = _value(f[6])
    return Taken(
        int(f[1]), _value(f[2]), _value(f[3]), _value(f[4]), _value(f[5]), int(retry_times or 0),
        _value(f[7]) if len(f) > 7 else None,
    )  # fmt: skip


def _finished(f: list[str]) -> Finished:
    outcome = (
        Outcome(int(f[6])) if len(f) > 6 else (Outcome.SUCCESS, Outcome.FAILED)[f[4] != "true"]
    )
    has_time = len(f) > 8
    return Finished(
        _value(f[1]), _value(f[2]), int(f[3]), _bool(f[4]), _value(f[5]), outcome,
        int(f[7]) if has_time else None, _value(f[8]) if has_time else None,
    )  # fmt: skip


def _ended(f: list[str]) -> Ended:
    return Ended(
        int(f[1]), _value(f[2]), _value(f[3]), _value(f[4]), _value(f[5]), _value(f[6]),
        _value(f[7]), _value(f[8]), MessageKind(int(f[9])), _value(f[10]), _value(f[11]),
        _bool(f[12]),
    )  # fmt: skip


def _recalled(f: list[str]) -> Recalled:
    return Recalled(int(f[1]), _value(f[2]), _value(f[3]), _value(f[4]), _value(f[5]), _bool(f[6]))


def _bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


_READERS: Final[dict[str, Callable[[list[str]], TraceRecord]]] = {
    "Pub": _published,
    "SubBefore": _taken,
    "SubAfter": _finished,
    "EndTransaction": _ended,
    "Recall": _recalled,
}


def search_words(record: TraceRecord) -> Iterator[str]:
    """What a trace message with this record is found by: its KEYS."""
    if record.message_id is not None:
        yield record.message_id
    keys = None if isinstance(record, Recalled) else record.keys
    if keys is not None:
        yield from keys.split()
