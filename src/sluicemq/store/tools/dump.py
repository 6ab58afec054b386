"""What a store holds, in figures and as plain values, for `sluice store` and for scripts.

`describe` speaks of the store as a whole, `list_queues` of each queue. Both look at units and at
the records of the first and last of them only, so they take seconds on a store of any size.

Each `dump_…` walks over one part of the store and yields dicts that JSON can say. The log is walked
from end to end, also over damage (which is a value of its own); what a `Selection` says about
topic, queue, offset and time is decided in columns, so that only wanted records are decoded.
"""

import base64
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from sluicemq.errors import ProtocolError
from sluicemq.model.message import BORN_HOST_IPV6, KEYS, TRANSACTION_MASK, UNIQ_KEY
from sluicemq.model.system_names import SCHEDULE_TOPIC
from sluicemq.model.topic import LMQ_PREFIX
from sluicemq.record.codec import decode_properties, decode_record, hash_key, parse_head
from sluicemq.record.layout import CRC_MASK
from sluicemq.record.table import Records
from sluicemq.store.directory import CHECKPOINT_BYTES, parse_slots
from sluicemq.store.tools.checks import (
    HEADER,
    JSON_DOCUMENTS,
    IndexHeader,
    load_index,
    read_document,
)
from sluicemq.store.tools.layout import (
    BATCH_UNIT,
    Blank,
    Hole,
    LogWalk,
    QueueKey,
    Run,
    StoreLayout,
    UnitFile,
    file_size,
    is_address,
    is_blank,
    is_used,
    last_data,
    read_extension,
    read_file,
    record_at,
)

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
        if topic not in (None, key[0]):
            continue
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
        yield QueueInfo(
            *key,
            "light" if key[0].startswith(LMQ_PREFIX) else "plain",
            units.end if first is None else first,
            units.end,
            messages,
            size,
            store_time_ms(layout, first_position) if messages else 0,
            store_time_ms(layout, last_position) if messages else 0,
            len(series),
            series.size_bytes,
        )
    for key, series in sorted(layout.batch_queues.items()):
        if topic not in (None, key[0]):
            continue
        units = UnitFile(series, BATCH_UNIT)
        found = [
            part[is_used(part) & (part["position"] >= layout.log.start)]
            for _, part in units.pieces()
        ]
        parts = np.concatenate(found) if found else np.empty(0, BATCH_UNIT)
        low = high = first = last = 0
        if len(parts):
            low, high = int(parts["first"][0]), int(parts["first"][-1]) + int(parts["count"][-1])
            first, last = int(parts["store_time"][0]), int(parts["store_time"][-1])
        size = int(parts["size"].astype(np.int64).sum())
        messages = int(parts["count"].astype(np.int64).sum())
        yield QueueInfo(
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
    fields["marks"] = [mark._asdict() for mark in parse_slots(data) if mark is not None]
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


BODY_TEXT: Final = "text"
BODY_BASE64: Final = "base64"
BODY_NONE: Final = "none"
TRANSACTIONS: Final = {0x4: "prepared", 0x8: "commit", 0xC: "rollback"}
_TIMER_FIELDS: Final = (
    "last_read_time_ms", "last_flush_position", "last_queue_offset", "master_queue_offset",
    "state_version", "timestamp", "counter",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Selection:
    """What is wanted; None and the widest range want everything. Ranges include their ends.

    `matches` decides on a message's properties (tags or SQL92), `tag_codes` is what a unit's code
    may be, when that says the same.
    """

    topic: str | None = None
    queue_id: int | None = None
    offset_min: int = 0
    offset_max: int = (1 << 63) - 1
    time_min_ms: int = 0
    time_max_ms: int = (1 << 63) - 1
    key: str | None = None
    matches: Callable[[Mapping[str, str]], bool] | None = None
    tag_codes: frozenset[int] | None = None

    @property
    def is_everything(self) -> bool:
        return self == Selection()

    @property
    def has_times(self) -> bool:
        return self.time_min_ms > 0 or self.time_max_ms < (1 << 63) - 1

    def wants_queue(self, key: QueueKey) -> bool:
        return self.topic in (None, key[0]) and self.queue_id in (None, key[1])

    def wants_time(self, time_ms: int) -> bool:
        return self.time_min_ms <= time_ms <= self.time_max_ms

    def rows(self, records: Records) -> list[int]:
        """The numbers of the records of the wanted queue, offsets and times."""
        offsets, times = records.field("queue_offset"), records.field("store_time")
        good = (offsets >= self.offset_min) & (offsets <= self.offset_max)
        good &= (times >= self.time_min_ms) & (times <= self.time_max_ms)
        if self.queue_id is not None:
            good &= records.field("queue_id") == self.queue_id
        if self.topic is not None:
            names, ids = records.topics
            name = self.topic.encode()
            good &= ids == (names.index(name) if name in names else -1)
        return list(np.flatnonzero(good).tolist())

    def wants(self, properties: Mapping[str, str]) -> bool:
        """By key, tag and expression."""
        keys = (properties.get(UNIQ_KEY), *properties.get(KEYS, "").split(" "))
        if self.key is not None and self.key not in keys:
            return False
        return self.matches is None or self.matches(properties)


def dump_log(
    layout: StoreLayout, selection: Selection, body: str = BODY_TEXT
) -> Iterator[dict[str, Any]]:
    """Messages in the order of the log; damage, blank ends of files, and the tail between them."""
    holes: list[Hole] = []
    decides = selection.key is not None or selection.matches is not None
    for found in LogWalk(layout.log):
        if isinstance(found, Hole) and not found.is_record:
            holes.append(found)  # damage when something good follows, else the tail
            continue
        for hole in holes:
            yield {
                "kind": "damage", "position": hole.start, "end": hole.end, "reason": hole.reason,
            }  # fmt: skip
        holes.clear()
        if isinstance(found, Blank):
            if selection.is_everything:
                yield {"kind": "blank", "position": found.start, "end": found.end}
            continue
        records = (
            found.records
            if isinstance(found, Run)
            else record_at(layout.log, found.start, found.end - found.start)
        )
        assert records is not None  # the walk has just read it
        for row in selection.rows(records):
            properties = records.property_bytes(row) if decides else b""
            if not decides or selection.wants(decode_properties(properties)):
                yield message_value(bytes(records.record_bytes(row)), body)
    if holes and (end := last_data(layout.log, holes[0].start)) is not None:
        yield {
            "kind": "tail", "position": holes[0].start, "end": end, "reason": holes[0].reason,
        }  # fmt: skip


def message_value(record: bytes, body: str) -> dict[str, Any]:
    """One stored record as plain values."""
    head = parse_head(record)
    message = decode_record(record)
    value: dict[str, Any] = {
        "kind": "message",
        "position": message.physical_offset,
        "size": message.size_bytes,
        "version": 2 if record[7] == 0xAB else 1,
        "topic": message.topic,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "message_id": message.message_id,
        "offset_message_id": message.offset_message_id,
        "flag": message.flag,
        "sys_flag": message.sys_flag,
        "transaction": TRANSACTIONS.get(message.sys_flag & TRANSACTION_MASK),
        "born_time_ms": message.born_time_ms,
        "born_host": str(message.born_host),
        "store_time_ms": message.store_time_ms,
        "store_host": str(message.store_host),
        "reconsume_times": message.reconsume_times,
        "prepared_offset": message.prepared_offset,
        "body_crc": message.body_crc,
        "body_crc_agrees": zlib.crc32(record[head.body]) & CRC_MASK == message.body_crc,
        "properties": dict(message.properties),
        "body_bytes": len(message.raw_body),
    }
    if body == BODY_NONE:
        return value
    if (error := message.body_error) is not None:
        value["body_problem"] = error.reason
    data = message.body_or_raw
    if body == BODY_TEXT:
        try:
            return value | {"body": data.decode()}
        except UnicodeDecodeError:
            pass
    return value | {"body_base64": base64.b64encode(data).decode()}


def dump_queues(layout: StoreLayout, selection: Selection) -> Iterator[dict[str, Any]]:
    """Units of the wanted queues, in order; batch queues after them."""
    for key, series in sorted(layout.queues.items()):
        if selection.wants_queue(key):
            units = UnitFile(series)
            limit = min(selection.offset_max + 1, units.end)
            for start, part in units.pieces(selection.offset_min, limit):
                yield from _units(layout, key, start, part, selection)
    for key, series in sorted(layout.batch_queues.items()):
        if selection.wants_queue(key):
            for start, part in UnitFile(series, BATCH_UNIT).pieces():
                for at in np.flatnonzero(is_used(part)).tolist():
                    fields = dict(zip(part.dtype.names, part[at].tolist(), strict=True))
                    first, count = fields["first"], fields["count"]
                    is_beside = (
                        first > selection.offset_max or first + count <= selection.offset_min
                    )
                    if not is_beside and selection.wants_time(fields["store_time"]):
                        yield {
                            "kind": "batch_unit", "topic": key[0], "queue_id": key[1],
                            "number": start + at, "offset": first, "count": count,
                            "position": fields["position"], "size": fields["size"],
                            "tag_code": fields["code"], "store_time_ms": fields["store_time"],
                        }  # fmt: skip


def _units(
    layout: StoreLayout, key: QueueKey, start: int, part: Any, selection: Selection
) -> Iterator[dict[str, Any]]:
    used, blank = is_used(part), is_blank(part)
    for at in range(len(part)):
        position, size, code = part[at].tolist()
        value: dict[str, Any] = {
            "kind": "unit", "topic": key[0], "queue_id": key[1], "offset": start + at,
            "position": position, "size": size,
        }  # fmt: skip
        if blank[at] or not used[at]:
            if selection.matches is None and selection.key is None and not selection.has_times:
                yield {**value, "blank" if blank[at] else "unused": True}
            continue
        if is_address(code):
            found = read_extension(layout.extensions.get(key), code)
            value |= {} if found is None else {"tag_code": found.tag_code}
            value["extension_address"] = code
            value["extension"] = found and found._asdict() | {"bitmap": found.bitmap.hex()}
        else:
            is_time = key[0] == SCHEDULE_TOPIC and code > 1 << 31
            value["due_time_ms" if is_time else "tag_code"] = code
        if selection.tag_codes is not None and value.get("tag_code") not in selection.tag_codes:
            continue
        if selection.has_times and not selection.wants_time(store_time_ms(layout, position)):
            continue
        if selection.key is not None or selection.matches is not None:
            record = record_at(layout.log, position)
            if record is None or record.sizes[0] != size:
                continue
            if not selection.wants(decode_properties(record.property_bytes(0))):
                continue
        yield value


def dump_index(layout: StoreLayout, selection: Selection) -> Iterator[dict[str, Any]]:
    """Each index file's header, then its wanted entries in order."""
    hashes: set[int] | None = None
    if selection.key is not None:
        topics = {topic for topic, _ in layout.queues}
        topics = topics if selection.topic is None else {selection.topic}
        hashes = {hash_key(topic, selection.key) for topic in topics}
    for path, size, header in index_headers(layout):
        name = layout.name_of(path)
        file = load_index(layout.files, path)
        yield {
            "kind": "index_file", "file": name, "bytes": size, **header._asdict(),
            "slots": None if file is None else len(file.slots),
        }  # fmt: skip
        if file is None:
            continue
        wanted = np.ones(len(file.hashes), np.bool_)
        if hashes is not None:
            wanted = np.isin(file.hashes, list(hashes))
        times = file.header.begin_time_ms + file.times * 1000
        wanted &= (times + 999 >= selection.time_min_ms) & (times <= selection.time_max_ms)
        for at in np.flatnonzero(wanted).tolist():
            position = int(file.positions[at])
            if selection.topic is not None:
                record = record_at(layout.log, position)
                if record is None or record.topics[0][0] != selection.topic.encode():
                    continue
            yield {
                "kind": "entry", "file": name, "number": at + 1,
                "slot": int(file.hashes[at] % len(file.slots)), "hash": int(file.hashes[at]),
                "position": position, "seconds": int(file.times[at]), "time_ms": int(times[at]),
                "previous": int(file.previous[at]),
            }  # fmt: skip


def dump_checkpoint(layout: StoreLayout) -> Iterator[dict[str, Any]]:
    """One value, or none without a checkpoint."""
    fields = read_checkpoint_file(layout)
    if fields is not None:
        yield {"kind": "checkpoint", **fields}


def dump_documents(layout: StoreLayout) -> Iterator[dict[str, Any]]:
    """The documents in config/, as they are after reading; keys are text."""
    for name, value, problem in read_documents(layout):
        rest = {"problem": problem} if problem else {"value": _plain(value)}
        yield {"kind": "document", "file": name, **rest}
    data = read_file(layout.files, f"{layout.root}/config/timercheck", 8 * len(_TIMER_FIELDS))
    if data is not None and len(data) == 8 * len(_TIMER_FIELDS):
        numbers = np.frombuffer(data, ">i8").tolist()
        fields = dict(zip(_TIMER_FIELDS, numbers, strict=True))
        yield {"kind": "document", "file": "config/timercheck", "value": fields}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
