"""Trace records: what RocketMQ's clients write about the way of a message, and its text format.

The body of a trace message is a sequence of records. Each ends with U+0002, its fields are
separated by U+0001 (spec/remoting.md §21). There are five kinds of records about a message:

    Pub             its producer has sent it                     SendTrace
    EndTransaction  its producer has ended its transaction       TransactionTrace
    Recall          its producer has recalled it                 RecallTrace
    SubBefore       a consumer has received it                   DeliveryTrace
    SubAfter        that consumer has processed it; same         ConsumeTrace
                    request id

None is written as "null", because Java's decoder loses empty fields at the end. "null" and an empty
field are read as None. Unknown and damaged records are counted, not raised: one faulty client must
not hide the records of the others.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final

FIELD_SEPARATOR: Final = "\x01"
RECORD_SEPARATOR: Final = "\x02"
_NULL: Final = "null"


class MessageKind(IntEnum):
    """The kind of a message that was sent."""

    NORMAL = 0
    HALF = 1
    COMMITTED = 2
    DELAYED = 3
    ORDERED = 4


class ConsumeOutcome(IntEnum):
    """How a handler ended."""

    SUCCESS = 0
    TIME_OUT = 1
    EXCEPTION = 2
    RETURNED_NULL = 3
    FAILED = 4


@dataclass(frozen=True, slots=True)
class SendTrace:
    """A message was sent. `time_ms` is when the send began, in milliseconds since 1970.

    Java writes one record for a whole batch: `message_id` and `offset_message_id` are then lists of
    ids, separated by commas. `cost_ms` is the duration of the send.
    """

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
class DeliveryTrace:
    """A consumer received a message. `retry_times` is how often the group had failed on it."""

    time_ms: int
    region: str | None
    group: str | None
    request_id: str | None
    message_id: str | None
    retry_times: int
    keys: str | None


@dataclass(frozen=True, slots=True)
class ConsumeTrace:
    """A consumer processed a message. Clients of the cloud edition omit time and group."""

    request_id: str | None
    message_id: str | None
    cost_ms: int
    success: bool
    keys: str | None
    outcome: ConsumeOutcome
    time_ms: int | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True)
class TransactionTrace:
    """A producer ended a transaction.

    `state` is COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOW (RocketMQ's spelling). `from_check` says
    that it answered a transaction check.
    """

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
class RecallTrace:
    """A producer recalled a timed message, or tried to."""

    time_ms: int
    region: str | None
    group: str | None
    topic: str | None
    message_id: str | None
    success: bool


TraceRecord = SendTrace | DeliveryTrace | ConsumeTrace | TransactionTrace | RecallTrace


def encode_trace_records(records: Iterable[TraceRecord]) -> bytes:
    """Return the body of a trace message."""
    return "".join(map(encode_record, records)).encode()


def encode_record(record: TraceRecord) -> str:
    """Return one trace record as text, which ends with the record separator.

    The text has the name of the kind of record, and then the fields in the order of RocketMQ's
    format.
    """
    fields = [getattr(record, name) for name in _FIELD_PARSERS[type(record)]]
    if isinstance(record, SendTrace) and record.client_host is None:
        del fields[-1]
    if isinstance(record, ConsumeTrace) and record.time_ms is None:
        fields[-2:] = [""]  # in place of time and group
    record_name = _RECORD_NAMES[type(record)]
    return FIELD_SEPARATOR.join(map(_encode_field, [record_name, *fields])) + RECORD_SEPARATOR


def _encode_field(field: object) -> str:
    """Return a field as text.

    Separators in it are replaced by spaces, to keep the other fields intact.
    """
    if field is None:
        return _NULL
    if isinstance(field, bool):
        return "true" if field else "false"
    if isinstance(field, int):
        return str(int(field))
    # A separator would shift all later fields.
    return str(field).replace(FIELD_SEPARATOR, " ").replace(RECORD_SEPARATOR, " ")


def decode_trace_records(body: bytes) -> tuple[list[TraceRecord], int]:
    """Return (records of a trace message, number of records that could not be decoded)."""
    records: list[TraceRecord] = []
    undecoded_count = 0
    for line in body.decode("utf-8", "replace").split(RECORD_SEPARATOR):
        if not line:
            continue
        try:
            records.append(_decode_record(line))
        except (KeyError, ValueError, IndexError, TypeError):
            undecoded_count += 1
    return records, undecoded_count


def _decode_record(line: str) -> TraceRecord:
    """Return the record in a line without its separator.

    Raises KeyError, ValueError, IndexError or TypeError if it is not a record of a known kind.
    """
    name, *fields = line.split(FIELD_SEPARATOR)
    record_class = _RECORD_CLASSES[name]
    parse_functions = _FIELD_PARSERS[record_class].values()
    fields = _complete_fields(record_class, fields)
    parsed_fields = [parse(field) for parse, field in zip(parse_functions, fields, strict=False)]
    return record_class(*parsed_fields)


def _complete_fields(record_class: type[TraceRecord], fields: list[str]) -> list[str]:
    """Return the fields of a record, with values for fields that older clients do not send.

    Fields that newer clients add are ignored. Raises IndexError if other fields are missing.
    """
    if record_class is SendTrace and len(fields) == 12:  # before there was an offset message id
        return [*fields[:11], _NULL, *fields[11:]]

    if record_class is DeliveryTrace:
        # The retry times may be followed by "null", or be empty, which means 0.
        retry_times = fields[5].removesuffix(_NULL) or "0"
        keys = fields[6:] or [_NULL]
        return [*fields[:5], retry_times, *keys]

    if record_class is ConsumeTrace:
        if len(fields) == 5:
            is_success = fields[3] == "true"
            outcome = ConsumeOutcome.SUCCESS if is_success else ConsumeOutcome.FAILED
            return [*fields, str(int(outcome))]
        # Time and group are there together or not at all.
        return fields[:8] if len(fields) >= 8 else fields[:6]
    return fields


_RECORD_NAMES: Final[dict[type[TraceRecord], str]] = {
    SendTrace: "Pub",
    DeliveryTrace: "SubBefore",
    ConsumeTrace: "SubAfter",
    TransactionTrace: "EndTransaction",
    RecallTrace: "Recall",
}
_RECORD_CLASSES: Final = {name: kind for kind, name in _RECORD_NAMES.items()}
_PARSERS_BY_TYPE: Final[dict[object, Callable[[str], Any]]] = {
    int: int,
    int | None: int,
    str | None: lambda text: None if text in (_NULL, "") else text,
    bool: {"true": True, "false": False}.__getitem__,
    MessageKind: lambda text: MessageKind(int(text)),
    ConsumeOutcome: lambda text: ConsumeOutcome(int(text)),
}
_FIELD_PARSERS: Final = {
    record_class: {
        field.name: _PARSERS_BY_TYPE[field.type] for field in dataclasses.fields(record_class)
    }
    for record_class in _RECORD_NAMES
}
"""Maps each kind of record to the parsers of its fields, in the order of the format."""


def search_keys(record: TraceRecord) -> Iterator[str]:
    """Yield the keys by which the trace message with this record can be searched.

    They are the id of the traced message, and its keys.
    """
    if record.message_id is not None:
        yield record.message_id
    keys = None if isinstance(record, RecallTrace) else record.keys
    if keys is not None:
        yield from keys.split()


def record_of_message(
    record: TraceRecord, message_id: str, offset_message_id: str | None
) -> TraceRecord | None:
    """Return the trace record if it is about the message with this id, else None.

    The record of a batch from a Java client is about several messages, whose ids are separated by
    commas. In this case, return a copy of the record with the ids of the one message. The message
    may be found by `message_id` or by `offset_message_id`.
    """
    if record.message_id == message_id:
        return record
    if not isinstance(record, SendTrace):
        return None
    ids = (record.message_id or "").split(",")
    offset_ids = (record.offset_message_id or "").split(",")
    if message_id in ids:
        index = ids.index(message_id)
    elif offset_message_id in offset_ids:
        index = offset_ids.index(offset_message_id)
    else:
        return None
    offset_id = offset_ids[index] if index < len(offset_ids) else None
    return replace(record, message_id=message_id, offset_message_id=offset_id)
