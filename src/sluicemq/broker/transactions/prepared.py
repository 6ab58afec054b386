"""Transactions as they lie in the log: the half queue, the op queue, and what is written to them.

    send            RMQ_SYS_TRANS_HALF_TOPIC: the message, with REAL_TOPIC, REAL_QID and its id
    commit          the real topic: the message, flag COMMITTED, prepared_offset = its half; an op
    rollback        an op
    check           the half once more at the end of its queue, with one check more; when that one
                    can be seen, an op for the old one
    given up        TRANS_CHECK_MAX_TIME_TOPIC: the message; an op

An op says which halves (offsets in the half queue) are done: `12,15,` as RocketMQ 5 writes them,
`12` as RocketMQ 4 does. We write one at a time, `12`, which both of them read. Message and op of an
end are neighbours in the log, so a crash can lose the op of the very last record only:
`Transactions.load` looks there.

Two halves are one transaction when id, group, real topic and body agree: a copy that a check made,
or a send that its client repeated because it got no answer.

Facts: spec/delivery.md §3, spec/remoting.md §16.
"""

import hashlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from sluicemq.broker.produce.redelivery import Record, read_record
from sluicemq.broker.topics import HALF_TOPIC, OP_TOPIC
from sluicemq.errors import ProtocolError
from sluicemq.model.ids import tag_code
from sluicemq.model.message import CHECK_IMMUNITY, PRODUCER_GROUP, REAL_TOPIC, UNIQ_KEY
from sluicemq.record import property_text as text
from sluicemq.record.codec import CHECKSUM_NAME, parse_head
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store

GROUP: Final = "CID_RMQ_SYS_TRANS"
CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
REAL_QUEUE: Final = "REAL_QID"
TRANSACTION_ID: Final = "__transactionId__"
PREPARED_OFFSET: Final = "TRAN_PREPARED_QUEUE_OFFSET"
FIRST_OFFSET: Final = "SLUICE_FIRST_HALF"
"""Our own, in copies alone: the offset of the first half of the transaction."""
COPY_BYTES_MAX: Final = 96
"""What the copies of a half may add to its properties."""
OP_PROPERTIES: Final = b"WAIT\x01true\x02TAGS\x01d\x02"
OP_TAG_CODE: Final = tag_code("d")
IMMUNITY_S_MAX: Final = 10 * 365 * 86_400
_CHUNK_UNITS: Final = 256
_NAMES: Final = tuple(name.encode() for name in (PRODUCER_GROUP, REAL_TOPIC))
_unpack_units: Final = UNIT.iter_unpack


class Half(NamedTuple):
    """What has to be known of a half message. `first_offset` is that of the first half of its
    transaction, 0 when nothing says it; `began_ms` is when that one was stored; `immunity_ms` how
    long its producer asked not to be asked."""

    offset: int
    first_offset: int
    physical_offset: int
    unique_id: str
    digest: int
    began_ms: int
    stored_ms: int
    checks: int
    immunity_ms: int | None


def identity(view: memoryview, properties: bytes) -> tuple[str, int]:
    """The id of the transaction of a stored message, and a digest of what else makes it one."""
    unique_id = text.value_of(properties, UNIQ_KEY.encode()) or b""
    parts = [text.value_of(properties, name) or b"" for name in _NAMES]
    parts.append(bytes(view[8:12]))  # the checksum of the body
    digest = hashlib.blake2b(b"\x01".join(parts), digest_size=7).digest()
    return unique_id.decode("utf-8", "replace"), int.from_bytes(digest, "big")


def read_half(view: memoryview, offset: int, physical_offset: int) -> Half | None:
    """The half message that `view` begins with; None when it is no message."""
    record = read_record(view)
    if record is None:
        return None
    properties = record.properties
    checks = _number(properties, CHECK_TIMES) or 0
    first = _number(properties, FIRST_OFFSET)
    if first is None:
        first = _number(properties, PREPARED_OFFSET)
    is_copy = checks > 0 or first is not None
    # The producer's clock may be wrong: it is asked only where ours is not known any more.
    began_ms = min(record.born_time_ms, record.store_time_ms) if is_copy else record.store_time_ms
    immunity_s = _number(properties, CHECK_IMMUNITY)
    immunity_ms = None if immunity_s is None else min(immunity_s, IMMUNITY_S_MAX) * 1000
    unique_id, digest = identity(view, properties)
    first_offset = (first or 0) if is_copy else offset
    return Half(
        offset, first_offset, physical_offset, unique_id, digest, began_ms, record.store_time_ms,
        checks, immunity_ms,
    )  # fmt: skip


def _number(properties: bytes, name: str) -> int | None:
    value = text.value_of(properties, name.encode())
    return int(value) if value is not None and value.isdigit() and len(value) < 19 else None


def op_body(offset: int) -> bytes:
    """What is written for one half that is done."""
    return b"%d" % offset


def read_op(body: memoryview) -> list[int]:
    """The half queue offsets of an op of any release; what is no number is passed over."""
    return [int(part) for part in bytes(body).split(b",") if part.isdigit()]


def properties_of(record: Record) -> dict[str, str]:
    """All of a half as the producer and `Halves` made them, without what copies add of our own."""
    properties = text.as_dict(record.properties.decode("utf-8", "replace"))
    properties.pop(CHECKSUM_NAME, None)
    properties.pop(FIRST_OFFSET, None)
    return properties


class HalfReader:
    """The two queues as they can be seen."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def end(self, topic: str) -> int:
        return self._store.queue_offsets(topic, 0)[1]

    def start(self, topic: str) -> int:
        return self._store.queue_offsets(topic, 0)[0]

    def halves(self, offset: int) -> Iterator[Half]:
        """The half messages from an offset on; units without a record are left out."""
        for at, physical_offset, view in self._records(HALF_TOPIC, offset):
            half = read_half(view, at, physical_offset)
            if half is not None:
                yield half

    def ops(self, offset: int) -> Iterator[tuple[int, list[int]]]:
        """(offset, half offsets) of the ops from an offset on."""
        for at, _, view in self._records(OP_TOPIC, offset):
            record = read_record(view)
            if record is not None:
                yield at, read_op(record.body)

    def _records(self, topic: str, offset: int) -> Iterator[tuple[int, int, memoryview]]:
        while len(units := self._store.reader.units(topic, 0, offset, _CHUNK_UNITS)):
            for physical_offset, size, _ in _unpack_units(units):
                view = None if size == BLANK_SIZE else self._store.reader.view_at(physical_offset)
                if view is not None:
                    yield offset, physical_offset, view
                offset += 1

    def record(self, physical_offset: int) -> Record | None:
        """The record of a half that is known from its queue; None when it is deleted."""
        view = self._store.reader.view_at(physical_offset)
        return None if view is None else read_record(view)

    def named(self, physical_offset: int) -> tuple[Record, Half] | None:
        """The half message at a place that a client names; None when none begins there."""
        data = self._store.reader.record_at(physical_offset)
        if data is None:
            return None
        view = memoryview(data)
        head = parse_head(view)
        if bytes(view[head.topic]) != HALF_TOPIC.encode():
            return None
        record = read_record(view)
        half = read_half(view, head.queue_offset, physical_offset)
        return None if record is None or half is None else (record, half)

    def last(self) -> tuple[str, int, tuple[str, int]] | None:
        """Topic, flags and identity of the last record of the log; None without one."""
        position = -1
        for topic, queue_id in self._store.queues():
            end = self._store.queue_offsets(topic, queue_id)[1]
            units = self._store.reader.units(topic, queue_id, end - 1, 1)
            if len(units):
                last, size, _ = UNIT.unpack_from(units)
                position = max(position, -1 if size == BLANK_SIZE else last)
        view = self._store.reader.view_at(position)
        if view is None:
            return None
        try:
            head = parse_head(view)
        except ProtocolError:
            return None
        topic = str(view[head.topic], "utf-8", "replace")
        return topic, head.sys_flag, identity(view, bytes(view[head.properties]))
