"""Trace messages to rows: one row for each event, whoever wrote it.

A trace message holds up to a hundred records (`client.core.trace`), which are decoded here a block
of messages at a time, in the Python workers of the executors. Java writes one `Pub` for a whole
batch, with all its ids in one field: it becomes a row for each id. Records that nobody understands
are rows of the kind `Unread`: they are counted, not hidden.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa

from sluicemq.client.core.tracing import Ended, Finished, Published, Recalled, Taken, decode

UNREAD: Final = "Unread"
_NAMES: Final = {
    "string": pa.string(), "boolean": pa.bool_(), "int": pa.int32(), "bigint": pa.int64()
}  # fmt: skip
_FIELDS: Final = {
    "kind": "string", "time_ms": "bigint", "topic": "string", "group": "string",
    "message_id": "string", "request_id": "string", "tags": "string", "keys": "string",
    "message_kind": "string", "success": "boolean", "outcome": "string", "cost_ms": "int",
    "retry_times": "int", "body_length": "int", "state": "string", "region": "string",
    "store_host": "string", "client_host": "string", "offset_message_id": "string",
}  # fmt: skip
"""`time_ms` is the client's clock; what a kind of event does not say is null."""
SCHEMA: Final = (
    "array<struct<" + ", ".join(f"`{name}`: {kind}" for name, kind in _FIELDS.items()) + ">>"
)
"""What `decoded` gives for each trace message."""
_EVENT: Final = pa.struct([(name, _NAMES[kind]) for name, kind in _FIELDS.items()])

_WORDS: Final = {Published: "Pub", Taken: "SubBefore", Finished: "SubAfter",
                 Ended: "EndTransaction", Recalled: "Recall"}  # fmt: skip
_COMMON: Final = tuple(name for name in _FIELDS if name not in ("kind", "message_kind", "outcome"))
Event = Published | Taken | Finished | Ended | Recalled


def decoded(bodies: pa.Array) -> pa.Array:
    """An Arrow function for Spark: bodies of trace messages -> lists of their events."""
    columns: dict[str, list[Any]] = {name: [] for name in _FIELDS}
    ends = [0]
    for body in bodies.to_pylist():
        _add_all(columns, body or b"")
        ends.append(len(columns["kind"]))
    arrays = [pa.array(columns[field.name], field.type) for field in _EVENT]
    events = pa.StructArray.from_arrays(arrays, fields=list(_EVENT))
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), events)


def _add_all(columns: dict[str, list[Any]], body: bytes) -> None:
    records, unread = decode(body)
    for record in records:
        for event in each_message(record):
            values = _values(event)
            for name, column in columns.items():
                column.append(values.get(name))
    for _ in range(unread):
        for name, column in columns.items():
            column.append(UNREAD if name == "kind" else None)


def each_message(record: Event) -> Iterator[Event]:
    """The record; of a Java batch one for each of its messages."""
    if not isinstance(record, Published) or "," not in (record.message_id or ""):
        yield record
        return
    places = (record.offset_message_id or "").split(",")
    for index, message_id in enumerate((record.message_id or "").split(",")):
        place = places[index] if index < len(places) else None
        yield replace(record, message_id=message_id, offset_message_id=place)


def _values(event: Event) -> dict[str, Any]:
    values = {name: getattr(event, name, None) for name in _COMMON}
    values["kind"] = _WORDS[type(event)]
    if isinstance(event, Published | Ended):
        values["message_kind"] = event.kind.name.lower()
    if isinstance(event, Finished):
        values["outcome"] = event.outcome.name.lower().replace("_", " ")
    return values
