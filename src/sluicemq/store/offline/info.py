"""What a store holds, as told by its queues, index headers and small files; the log is not walked.

`describe` speaks of the store as a whole, `list_queues` of each queue. Both look at units and at
the records of the first and last of them only, so they take seconds on a store of any size.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from sluicemq.errors import ProtocolError
from sluicemq.model.message import BORN_HOST_IPV6
from sluicemq.store.checkpoint import CHECKPOINT_BYTES, slots_of
from sluicemq.store.offline.check_files import JSON_DOCUMENTS, read_document
from sluicemq.store.offline.index_files import HEADER, IndexHeader
from sluicemq.store.offline.layout import Series, StoreLayout, file_size, read_file
from sluicemq.store.offline.units import BATCH_UNIT, UnitFile, is_blank, is_used

_HEAD_BYTES = 76
_JAVA_FIELDS = ("log_time_ms", "queue_time_ms", "index_time_ms", "flushed_offset", "confirm_offset")


class QueueInfo(NamedTuple):
    """One queue. `size_bytes` is that of its messages in the log, `file_bytes` of its own files.

    `offset_min` is the first message that the log still holds; times (ms) are store times of the
    first and last message, 0 when there is none or it cannot be read.
    """

    topic: str
    queue_id: int
    kind: str
    offset_min: int
    offset_max: int
    messages: int
    size_bytes: int
    first_time_ms: int
    last_time_ms: int
    files: int
    file_bytes: int


def list_queues(layout: StoreLayout, topic: str | None = None) -> Iterator[QueueInfo]:
    """Every queue, by topic and queue id; of one topic when it is named."""
    for key, series in sorted(layout.queues.items()):
        if topic in (None, key[0]):
            yield _queue_info(layout, key, series)
    for key, series in sorted(layout.batch_queues.items()):
        if topic in (None, key[0]):
            yield _batch_info(layout, key, series)


def _queue_info(layout: StoreLayout, key: tuple[str, int], series: Series) -> QueueInfo:
    units = UnitFile(series)
    first: int | None = None
    messages = size = first_position = last_position = 0
    for offset, part in units.pieces():
        rows = np.flatnonzero(
            is_used(part) & ~is_blank(part) & (part["position"] >= layout.log.start)
        )
        if not len(rows):
            continue
        if first is None:
            first, first_position = offset + int(rows[0]), int(part["position"][rows[0]])
        last_position = int(part["position"][rows[-1]])
        messages += len(rows)
        size += int(part["size"][rows].astype(np.int64).sum())
    return QueueInfo(
        *key,
        "light" if key[0].startswith("%LMQ%") else "plain",
        units.end if first is None else first,
        units.end,
        messages,
        size,
        store_time_ms(layout, first_position) if messages else 0,
        store_time_ms(layout, last_position) if messages else 0,
        len(series),
        series.size_bytes,
    )


def _batch_info(layout: StoreLayout, key: tuple[str, int], series: Series) -> QueueInfo:
    units = UnitFile(series, BATCH_UNIT)
    found = [part[is_used(part) & (part["position"] >= layout.log.start)]
             for _, part in units.pieces()]  # fmt: skip
    parts = np.concatenate(found) if found else np.empty(0, BATCH_UNIT)
    low = high = first = last = 0
    if len(parts):
        low, high = int(parts["first"][0]), int(parts["first"][-1]) + int(parts["count"][-1])
        first, last = int(parts["store_time"][0]), int(parts["store_time"][-1])
    size = int(parts["size"].astype(np.int64).sum())
    messages = int(parts["count"].astype(np.int64).sum())
    return QueueInfo(
        *key, "batch", low, high, messages, size, first, last, len(series), series.size_bytes
    )


def store_time_ms(layout: StoreLayout, position: int) -> int:
    """Of the record at a position; 0 when none can be read there."""
    head = layout.log.read(position, _HEAD_BYTES)
    if len(head) < _HEAD_BYTES or int.from_bytes(head[28:36], "big") != position:
        return 0
    at = 68 if int.from_bytes(head[36:40], "big") & BORN_HOST_IPV6 else 56
    return int.from_bytes(head[at : at + 8], "big")


def read_checkpoint_file(layout: StoreLayout) -> dict[str, Any] | None:
    """All that the checkpoint says: RocketMQ's fields, and our marks (the newest counts)."""
    data = read_file(layout.files, layout.checkpoint_path, CHECKPOINT_BYTES)
    if data is None:
        return None
    data = data.ljust(CHECKPOINT_BYTES, b"\0")
    fields: dict[str, Any] = {
        name: int.from_bytes(data[at * 8 : at * 8 + 8], "big", signed=True)
        for at, name in enumerate(_JAVA_FIELDS)
    }
    fields["marks"] = [mark._asdict() for mark in slots_of(data) if mark is not None]
    return fields


def index_headers(layout: StoreLayout) -> Iterator[tuple[str, int, IndexHeader]]:
    """(path, size, header) of each index file that has one."""
    for path in layout.indexes:
        data = read_file(layout.files, path, HEADER.size)
        if data is not None and len(data) == HEADER.size:
            yield path, file_size(layout.files, path), IndexHeader._make(HEADER.unpack(data))


def read_documents(layout: StoreLayout) -> Iterator[tuple[str, Any, str]]:
    """(name, value, problem) of each document in config/ that is JSON."""
    for path in layout.documents():
        name = layout.name_of(path)
        if name.endswith((".json", *JSON_DOCUMENTS)):
            try:
                yield name, read_document(layout, path), ""
            except ProtocolError as error:
                yield name, None, error.fact


def describe(layout: StoreLayout) -> dict[str, Any]:
    """The store as a whole; plain values, as `sluice store info --json` prints them."""
    log = layout.log
    queues = list(list_queues(layout))
    ends = [queue.last_time_ms for queue in queues]
    starts = [queue.first_time_ms for queue in queues if queue.first_time_ms]
    indexes = list(index_headers(layout))
    return {
        "root": layout.root,
        "interrupted": layout.was_interrupted,
        "log": {
            "directories": layout.log_paths,
            "start": log.start,
            "files": len(log),
            "file_bytes": log.file_bytes,
            "bytes": log.size_bytes,
        },
        "queues": {
            "topics": len({queue.topic for queue in queues}),
            "queues": len(queues),
            "messages": sum(queue.messages for queue in queues if queue.kind != "light"),
            "message_bytes": sum(queue.size_bytes for queue in queues if queue.kind != "light"),
            "files": sum(queue.files for queue in queues),
            "file_bytes": next((s.file_bytes for s in layout.queues.values() if len(s)), 0),
            "extensions": len(layout.extensions),
        },
        "first_time_ms": min(starts, default=0),
        "last_time_ms": max(ends, default=0),
        "index": {
            "files": len(indexes),
            "entries": sum(max(header.entry_limit - 1, 0) for _, _, header in indexes),
            "bytes": sum(size for _, size, _ in indexes),
        },
        "checkpoint": read_checkpoint_file(layout),
        "documents": [
            {"file": name, "problem": problem} if problem else {"file": name}
            for name, _, problem in read_documents(layout)
        ],
    }
