"""Describe and dump the content of a store as plain values, for `sluice store` and for scripts.

`describe` summarizes the store, and `list_queues` each queue. Both read the units of the queues and
only the first and the last record of each, so they take seconds for a store of any size.

Each `dump_…` function walks over one part of the store and yields dicts that can be written as
JSON. The log is read from its start to its end, past damaged parts, which are yielded as dicts of
their own. A `Selection` restricts the result by topic, queue, offset, time, key and filter. Most of
it is decided in columns, so that only the selected records are decoded.
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
from sluicemq.store.tools.checks import JSON_DOCUMENTS, read_document
from sluicemq.store.tools.index_check import HEADER, IndexFile, IndexHeader, load_index
from sluicemq.store.tools.layout import (
    FileSequence,
    QueueKey,
    StoreLayout,
    file_size,
    read_file,
)
from sluicemq.store.tools.units import (
    BATCH_UNIT_TYPE,
    UnitArray,
    UnitReader,
    blank_mask,
    is_extension_address,
    read_extension,
    used_mask,
)
from sluicemq.store.tools.walk import Blank, InvalidRange, LogWalk, Run, find_data_end, read_record

_HEAD_BYTES = 76
_JAVA_FIELDS = ("log_time_ms", "queue_time_ms", "index_time_ms", "flushed_offset", "confirm_offset")
"""RocketMQ's fields of the checkpoint, of 8 bytes each, by the names that the dump gives them."""


class QueueInfo(NamedTuple):
    """A summary of one queue. The names of the fields are keys of the JSON output.

    `kind` is "plain", "light" or "batch". The queue has messages from `offset_min` on, the first
    one that is still in the log, and before `offset_max`. `size_bytes` is the size of these
    messages in the log, `file_bytes` the size of the queue's own files. Times are store times in ms
    of the first and the last message; 0 if there is none or it cannot be read.
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
    """Yield a summary of each queue, sorted by topic and queue id; batch queues come last.

    If `topic` is given, only its queues are yielded.
    """
    for key, sequence in sorted(layout.queues.items()):
        if topic in (None, key[0]):
            yield _summarize_queue(layout, key, sequence)
    for key, sequence in sorted(layout.batch_queues.items()):
        if topic in (None, key[0]):
            yield _summarize_batch_queue(layout, key, sequence)


def _summarize_queue(layout: StoreLayout, key: QueueKey, sequence: FileSequence) -> QueueInfo:
    """Summarize a consume queue. Only units whose records still exist are counted.

    Units are the 20-byte entries of the queue. `key` is the (topic, queue id).
    """
    reader = UnitReader(sequence)
    offset_min: int | None = None
    message_count = size_bytes = first_position = last_position = 0
    for first_offset, units in reader.iter_units():
        is_retained = units["position"] >= layout.log.start
        rows = np.flatnonzero(used_mask(units) & ~blank_mask(units) & is_retained)
        if not len(rows):
            continue
        if offset_min is None:
            offset_min = first_offset + int(rows[0])
            first_position = int(units["position"][rows[0]])
        last_position = int(units["position"][rows[-1]])
        message_count += len(rows)
        size_bytes += int(units["size"][rows].astype(np.int64).sum())

    first_time_ms = last_time_ms = 0
    if message_count:
        first_time_ms = read_store_time_ms(layout, first_position)
        last_time_ms = read_store_time_ms(layout, last_position)
    topic, queue_id = key
    return QueueInfo(
        topic=topic,
        queue_id=queue_id,
        kind="light" if topic.startswith(LMQ_PREFIX) else "plain",
        offset_min=reader.end_offset if offset_min is None else offset_min,
        offset_max=reader.end_offset,
        messages=message_count,
        size_bytes=size_bytes,
        first_time_ms=first_time_ms,
        last_time_ms=last_time_ms,
        files=len(sequence),
        file_bytes=sequence.size_bytes,
    )


def _summarize_batch_queue(layout: StoreLayout, key: QueueKey, sequence: FileSequence) -> QueueInfo:
    """Summarize a queue of batches. Only batches whose records still exist are counted.

    `key` is the (topic, queue id).
    """
    reader = UnitReader(sequence, BATCH_UNIT_TYPE)
    retained = [np.empty(0, BATCH_UNIT_TYPE)]
    for _, batch_units in reader.iter_units():
        is_retained = batch_units["position"] >= layout.log.start
        retained.append(batch_units[used_mask(batch_units) & is_retained])
    units = np.concatenate(retained)

    offset_min = offset_max = first_time_ms = last_time_ms = 0
    if len(units):
        offset_min = int(units["first"][0])
        offset_max = int(units["first"][-1]) + int(units["count"][-1])
        first_time_ms = int(units["store_time"][0])
        last_time_ms = int(units["store_time"][-1])
    return QueueInfo(
        topic=key[0],
        queue_id=key[1],
        kind="batch",
        offset_min=offset_min,
        offset_max=offset_max,
        messages=int(units["count"].astype(np.int64).sum()),
        size_bytes=int(units["size"].astype(np.int64).sum()),
        first_time_ms=first_time_ms,
        last_time_ms=last_time_ms,
        files=len(sequence),
        file_bytes=sequence.size_bytes,
    )


def read_store_time_ms(layout: StoreLayout, position: int) -> int:
    """Return the store time of the record at a position of the log; 0 if there is no record."""
    head = layout.log.read(position, _HEAD_BYTES)
    # A record contains its own position.
    if len(head) < _HEAD_BYTES or int.from_bytes(head[28:36], "big") != position:
        return 0
    # The born host before the store time has 20 bytes instead of 8 if it is an IPv6 address.
    sys_flag = int.from_bytes(head[36:40], "big")
    store_time_index = 68 if sys_flag & BORN_HOST_IPV6 else 56
    return int.from_bytes(head[store_time_index : store_time_index + 8], "big")


def read_checkpoint_file(layout: StoreLayout) -> dict[str, Any] | None:
    """Return the content of the checkpoint as a dict, or None if the file does not exist.

    The dict has RocketMQ's times by name. "marks" is a list of SluiceMQ's checkpoints in the file
    that are valid, at most two; the one with the largest "sequence" is used.
    """
    content = read_file(layout.files, layout.checkpoint_path, CHECKPOINT_BYTES)
    if content is None:
        return None
    content = content.ljust(CHECKPOINT_BYTES, b"\0")
    fields: dict[str, Any] = {}
    for index, name in enumerate(_JAVA_FIELDS):
        field_bytes = content[index * 8 : (index + 1) * 8]
        fields[name] = int.from_bytes(field_bytes, "big", signed=True)
    checkpoints = [checkpoint for checkpoint in parse_slots(content) if checkpoint is not None]
    fields["marks"] = [checkpoint._asdict() for checkpoint in checkpoints]
    return fields


def iter_index_headers(layout: StoreLayout) -> Iterator[tuple[str, int, IndexHeader]]:
    """Yield (path, size in bytes, header) of each index file that is long enough for a header."""
    for path in layout.indexes:
        header_bytes = read_file(layout.files, path, HEADER.size)
        if header_bytes is not None and len(header_bytes) == HEADER.size:
            header = IndexHeader._make(HEADER.unpack(header_bytes))
            yield path, file_size(layout.files, path), header


def read_documents(layout: StoreLayout) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, problem) of each JSON document in config/.

    If the document cannot be read, the value is None and `problem` says why; otherwise `problem`
    is "".
    """
    for path in layout.document_paths():
        name = layout.shorten_path(path)
        if name.endswith((".json", *JSON_DOCUMENTS)):
            try:
                yield name, read_document(layout, path), ""
            except ProtocolError as error:
                yield name, None, error.fact


def describe(layout: StoreLayout) -> dict[str, Any]:
    """Return a summary of the store as plain values, as `sluice store info --json` prints it."""
    log = layout.log
    queues = list(list_queues(layout))
    last_times = [queue.last_time_ms for queue in queues]
    first_times = [queue.first_time_ms for queue in queues if queue.first_time_ms]
    documents = []
    for name, _, problem in read_documents(layout):
        documents.append({"file": name, "problem": problem} if problem else {"file": name})
    return {
        "root": layout.root,
        "interrupted": layout.was_interrupted,
        "log": {
            "directories": layout.log_paths,
            "start": log.start,
            "files": len(log),
            "file_bytes": log.usual_file_bytes,
            "bytes": log.size_bytes,
        },
        "queues": _describe_queues(layout, queues),
        "first_time_ms": min(first_times, default=0),
        "last_time_ms": max(last_times, default=0),
        "index": _describe_index(layout),
        "checkpoint": read_checkpoint_file(layout),
        "documents": documents,
    }


def _describe_queues(layout: StoreLayout, queues: list[QueueInfo]) -> dict[str, Any]:
    """Return the totals of all consume queues, as `sluice store info --json` prints them."""
    # The messages of light queues are also in plain queues.
    counted_queues = [queue for queue in queues if queue.kind != "light"]
    file_bytes = 0
    for sequence in layout.queues.values():
        if len(sequence):
            file_bytes = sequence.usual_file_bytes
            break
    return {
        "topics": len({queue.topic for queue in queues}),
        "queues": len(queues),
        "messages": sum(queue.messages for queue in counted_queues),
        "message_bytes": sum(queue.size_bytes for queue in counted_queues),
        "files": sum(queue.files for queue in queues),
        "file_bytes": file_bytes,
        "extensions": len(layout.extensions),
    }


def _describe_index(layout: StoreLayout) -> dict[str, int]:
    """Return the totals of all index files: {"files", "entries", "bytes"}."""
    totals = {"files": 0, "entries": 0, "bytes": 0}
    for _, file_bytes, header in iter_index_headers(layout):
        totals["files"] += 1
        totals["entries"] += max(header.entry_limit - 1, 0)
        totals["bytes"] += file_bytes
    return totals


BODY_TEXT: Final = "text"
BODY_BASE64: Final = "base64"
BODY_NONE: Final = "none"
TRANSACTIONS: Final = {0x4: "prepared", 0x8: "commit", 0xC: "rollback"}
"""The transaction bits of a record's sys flag, by the names that the dump gives them."""
_TIMER_FIELDS: Final = (
    "last_read_time_ms",
    "last_flush_position",
    "last_queue_offset",
    "master_queue_offset",
    "state_version",
    "timestamp",
    "counter",
)
"""The fields of RocketMQ's timercheck, of 8 bytes each, by the names that the dump gives them."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which messages, units and index entries are dumped. The default selects everything.

    Each field restricts the selection; None means no restriction. Ranges include both ends. `key`
    is a key or a message id. `matches` is a filter that is called with a message's properties.
    `tag_codes` are all tag codes of the messages that `matches` accepts, if only their tags decide:
    then other units are skipped without reading their records.
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
        """Whether nothing is restricted."""
        return self == Selection()

    @property
    def has_times(self) -> bool:
        """Whether the store time is restricted."""
        return self.time_min_ms > 0 or self.time_max_ms < (1 << 63) - 1

    @property
    def needs_properties(self) -> bool:
        """Whether the properties of a message are needed to decide."""
        return self.key is not None or self.matches is not None

    def includes_queue(self, key: QueueKey) -> bool:
        """Return whether messages of a queue may be selected."""
        return self.topic in (None, key[0]) and self.queue_id in (None, key[1])

    def includes_time(self, time_ms: int) -> bool:
        """Return whether a store time is in the selected range."""
        return self.time_min_ms <= time_ms <= self.time_max_ms

    def select_rows(self, records: Records) -> list[int]:
        """Return the indexes of the records whose topic, queue, offset and time are selected."""
        offsets = records.field("queue_offset")
        times = records.field("store_time")
        is_selected = (offsets >= self.offset_min) & (offsets <= self.offset_max)
        is_selected &= (times >= self.time_min_ms) & (times <= self.time_max_ms)
        if self.queue_id is not None:
            is_selected &= records.field("queue_id") == self.queue_id
        if self.topic is not None:
            names, ids = records.topics
            name = self.topic.encode()
            is_selected &= ids == (names.index(name) if name in names else -1)
        return list(np.flatnonzero(is_selected).tolist())

    def includes_properties(self, properties: Mapping[str, str]) -> bool:
        """Return whether a message with these properties is selected by its keys and the filter.

        The selected key must be its unique key or one of its KEYS. If no key or filter is selected,
        every message passes.
        """
        keys = (properties.get(UNIQ_KEY), *properties.get(KEYS, "").split(" "))
        if self.key is not None and self.key not in keys:
            return False
        return self.matches is None or self.matches(properties)


def dump_log(
    layout: StoreLayout, selection: Selection, body: str = BODY_TEXT
) -> Iterator[dict[str, Any]]:
    """Yield the selected messages in the order of the log, and what else is in the log.

    Each dict has a "kind": "message", "damage" (bytes without a valid record that are followed by
    records), "tail" (such bytes at the end) or "blank" (the unused end of a file; only if
    everything is selected). `body` is BODY_TEXT, BODY_BASE64 or BODY_NONE. Raises OSError.
    """
    # Invalid ranges are damage if anything valid follows, otherwise they are the tail.
    pending: list[InvalidRange] = []
    for log_part in LogWalk(layout.log):
        if isinstance(log_part, InvalidRange) and not log_part.is_record:
            pending.append(log_part)
            continue
        for invalid in pending:
            yield _describe_invalid_bytes("damage", invalid, invalid.end)
        pending.clear()

        if isinstance(log_part, Blank):
            if selection.is_everything:
                yield {"kind": "blank", "position": log_part.start, "end": log_part.end}
        elif isinstance(log_part, Run):
            yield from _dump_messages(log_part.records, selection, body)
        else:
            # A record whose body is damaged: it is shown nevertheless.
            records = read_record(layout.log, log_part.start, log_part.end - log_part.start)
            assert records is not None  # the walk has just read it
            yield from _dump_messages(records, selection, body)

    if pending:
        tail_end = find_data_end(layout.log, pending[0].start)
        if tail_end is not None:
            yield _describe_invalid_bytes("tail", pending[0], tail_end)


def _describe_invalid_bytes(kind: str, invalid: InvalidRange, end: int) -> dict[str, Any]:
    """Return a dict about the bytes from the start of `invalid` to position `end`."""
    return {"kind": kind, "position": invalid.start, "end": end, "reason": invalid.reason}


def _dump_messages(records: Records, selection: Selection, body: str) -> Iterator[dict[str, Any]]:
    """Yield a dict for each selected message of `records`.

    `body` is BODY_TEXT, BODY_BASE64 or BODY_NONE: how the body is shown.
    """
    for row in selection.select_rows(records):
        if selection.needs_properties:
            properties = decode_properties(records.property_bytes(row))
            if not selection.includes_properties(properties):
                continue
        yield message_value(bytes(records.record_bytes(row)), body)


def message_value(record: bytes, body: str) -> dict[str, Any]:
    """Return a stored record as plain values.

    `body` selects how the body is included: BODY_TEXT as "body", or as "body_base64" if it is not
    UTF-8; BODY_BASE64 as "body_base64"; BODY_NONE not at all. A body that cannot be decompressed is
    included as it is stored, with the reason as "body_problem".
    """
    head = parse_head(record)
    message = decode_record(record)
    message_fields: dict[str, Any] = {
        "kind": "message",
        "position": message.physical_offset,
        "size": message.size_bytes,
        "version": 2 if record[7] == 0xAB else 1,  # the last byte of the magic number of version 2
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
        return message_fields

    body_error = message.body_error
    if body_error is not None:
        message_fields["body_problem"] = body_error.reason
    body_bytes = message.body_or_raw
    if body == BODY_TEXT:
        try:
            return message_fields | {"body": body_bytes.decode()}
        except UnicodeDecodeError:
            pass  # not a text
    return message_fields | {"body_base64": base64.b64encode(body_bytes).decode()}


def dump_queues(layout: StoreLayout, selection: Selection) -> Iterator[dict[str, Any]]:
    """Yield the selected units of the queues, sorted by topic, queue and offset.

    Units are the entries of a queue; each locates one record, in a batch queue one batch. The
    "kind" of a dict is "unit" or "batch_unit". Batch queues come last. Raises OSError.
    """
    for key, sequence in sorted(layout.queues.items()):
        if selection.includes_queue(key):
            reader = UnitReader(sequence)
            offset_end = min(selection.offset_max + 1, reader.end_offset)
            for start, units in reader.iter_units(selection.offset_min, offset_end):
                yield from _dump_units(layout, key, start, units, selection)
    for key, sequence in sorted(layout.batch_queues.items()):
        if selection.includes_queue(key):
            for start, units in UnitReader(sequence, BATCH_UNIT_TYPE).iter_units():
                yield from _dump_batch_units(key, start, units, selection)


def _dump_units(
    layout: StoreLayout, key: QueueKey, start: int, units: UnitArray, selection: Selection
) -> Iterator[dict[str, Any]]:
    """Yield a dict for each selected unit of the queue `key`.

    The first of `units` has the offset `start`. Blank and unused units are yielded only if the
    selection does not ask for times or properties.
    """
    is_used = used_mask(units)
    is_blank = blank_mask(units)
    for row in range(len(units)):
        position, size, code = units[row].tolist()
        unit_fields: dict[str, Any] = {
            "kind": "unit",
            "topic": key[0],
            "queue_id": key[1],
            "offset": start + row,
            "position": position,
            "size": size,
        }
        if is_blank[row] or not is_used[row]:
            if not selection.needs_properties and not selection.has_times:
                yield {**unit_fields, "blank" if is_blank[row] else "unused": True}
            continue

        unit_fields |= _describe_code(layout, key, code)
        has_tag_code = selection.tag_codes is None or (
            unit_fields.get("tag_code") in selection.tag_codes
        )
        if has_tag_code and _is_record_selected(layout, selection, position, size):
            yield unit_fields


def _describe_code(layout: StoreLayout, key: QueueKey, code: int) -> dict[str, Any]:
    """Return the meaning of the code of a unit, as fields of a dict.

    The code is the hash of a tag ({"tag_code"}), or the due time of a delayed message
    ({"due_time_ms"}), or the address of an extension unit. For an address, the fields of the
    extension are included, or None as "extension" if it cannot be read.
    """
    if not is_extension_address(code):
        is_time = key[0] == SCHEDULE_TOPIC and code > 1 << 31
        return {"due_time_ms": code} if is_time else {"tag_code": code}
    extension = read_extension(layout.extensions.get(key), code)
    if extension is None:
        return {"extension_address": code, "extension": None}
    return {
        "tag_code": extension.tag_code,
        "extension_address": code,
        "extension": extension._asdict() | {"bitmap": extension.bitmap.hex()},
    }


def _is_record_selected(
    layout: StoreLayout, selection: Selection, position: int, size: int
) -> bool:
    """Return whether the record of a unit has a selected time and selected properties.

    `position` and `size` locate the record. It is read only if the selection asks for times or
    properties.
    """
    if selection.has_times and not selection.includes_time(read_store_time_ms(layout, position)):
        return False
    if not selection.needs_properties:
        return True
    record = read_record(layout.log, position)
    if record is None or record.sizes[0] != size:
        return False
    return selection.includes_properties(decode_properties(record.property_bytes(0)))


def _dump_batch_units(
    key: QueueKey, start: int, units: UnitArray, selection: Selection
) -> Iterator[dict[str, Any]]:
    """Yield a dict for each selected unit of the batch queue `key`.

    Each unit locates a batch of messages. The first of `units` has the number `start`.
    """
    for row in np.flatnonzero(used_mask(units)).tolist():
        unit = dict(zip(units.dtype.names or (), units[row].tolist(), strict=True))
        first_offset = unit["first"]
        count = unit["count"]
        is_behind = first_offset > selection.offset_max
        is_before = first_offset + count <= selection.offset_min
        is_outside = is_before or is_behind
        if not is_outside and selection.includes_time(unit["store_time"]):
            yield {
                "kind": "batch_unit",
                "topic": key[0],
                "queue_id": key[1],
                "number": start + row,
                "offset": first_offset,
                "count": count,
                "position": unit["position"],
                "size": unit["size"],
                "tag_code": unit["code"],
                "store_time_ms": unit["store_time"],
            }


def dump_index(layout: StoreLayout, selection: Selection) -> Iterator[dict[str, Any]]:
    """Yield a dict for the header of each index file, and for each of its selected entries.

    The "kind" of a dict is "index_file" or "entry". A key selects entries by its hash, so entries
    of other keys with the same hash may be among them. Raises OSError.
    """
    wanted_hashes = _find_wanted_hashes(layout, selection)
    for path, file_bytes, header in iter_index_headers(layout):
        name = layout.shorten_path(path)
        index_file = load_index(layout.files, path)
        yield {
            "kind": "index_file",
            "file": name,
            "bytes": file_bytes,
            **header._asdict(),
            "slots": None if index_file is None else len(index_file.slots),
        }
        if index_file is None:
            continue
        for row in _select_entries(index_file, selection, wanted_hashes):
            if _has_topic(layout, int(index_file.positions[row]), selection.topic):
                yield {"kind": "entry", "file": name, **_describe_entry(index_file, row)}


def _find_wanted_hashes(layout: StoreLayout, selection: Selection) -> set[int] | None:
    """Return the hashes that entries for the selected key may have.

    There is one for each topic of the store, or only one if a topic is selected. Return None if no
    key is selected, which selects all entries.
    """
    if selection.key is None:
        return None
    if selection.topic is not None:
        return {hash_key(selection.topic, selection.key)}
    return {hash_key(topic, selection.key) for topic, _ in layout.queues}


def _select_entries(
    index_file: IndexFile, selection: Selection, wanted_hashes: set[int] | None
) -> list[int]:
    """Return the rows of an index file with a wanted hash and a selected time."""
    is_selected = np.ones(len(index_file.hashes), np.bool_)
    if wanted_hashes is not None:
        is_selected = np.isin(index_file.hashes, list(wanted_hashes))
    # The time of an entry is in seconds: its message may have been stored up to 999 ms later.
    times_ms = index_file.header.begin_time_ms + index_file.times * 1000
    is_selected &= times_ms + 999 >= selection.time_min_ms
    is_selected &= times_ms <= selection.time_max_ms
    rows: list[int] = np.flatnonzero(is_selected).tolist()
    return rows


def _has_topic(layout: StoreLayout, position: int, topic: str | None) -> bool:
    """Return whether the record at `position` has this topic. If `topic` is None, return True."""
    if topic is None:
        return True
    record = read_record(layout.log, position)
    return record is not None and record.topics[0][0] == topic.encode()


def _describe_entry(index_file: IndexFile, row: int) -> dict[str, int]:
    """Return the fields of the entry in a row of an index file."""
    seconds = int(index_file.times[row])
    return {
        "number": row + 1,
        "slot": int(index_file.hashes[row] % len(index_file.slots)),
        "hash": int(index_file.hashes[row]),
        "position": int(index_file.positions[row]),
        "seconds": seconds,
        "time_ms": index_file.header.begin_time_ms + seconds * 1000,
        "previous": int(index_file.previous[row]),
    }


def dump_checkpoint(layout: StoreLayout) -> Iterator[dict[str, Any]]:
    """Yield one dict with the content of the checkpoint, or nothing if it does not exist."""
    fields = read_checkpoint_file(layout)
    if fields is not None:
        yield {"kind": "checkpoint", **fields}


def dump_documents(layout: StoreLayout) -> Iterator[dict[str, Any]]:
    """Yield a dict for each JSON document in config/, and for the binary timercheck.

    The dict has the "file" and its "value", or a "problem" if it cannot be read. Keys of objects
    are always strings, although RocketMQ writes some as numbers.
    """
    for name, document, problem in read_documents(layout):
        if problem:
            yield {"kind": "document", "file": name, "problem": problem}
        else:
            yield {"kind": "document", "file": name, "value": _convert_keys_to_text(document)}

    timer_path = f"{layout.root}/config/timercheck"
    timer_bytes = 8 * len(_TIMER_FIELDS)
    timer_checkpoint = read_file(layout.files, timer_path, timer_bytes)
    if timer_checkpoint is not None and len(timer_checkpoint) == timer_bytes:
        numbers = np.frombuffer(timer_checkpoint, ">i8").tolist()
        fields = dict(zip(_TIMER_FIELDS, numbers, strict=True))
        yield {"kind": "document", "file": "config/timercheck", "value": fields}


def _convert_keys_to_text(value: Any) -> Any:
    """Return a JSON value with all keys of objects converted to strings."""
    if isinstance(value, dict):
        return {str(key): _convert_keys_to_text(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_convert_keys_to_text(element) for element in value]
    return value
