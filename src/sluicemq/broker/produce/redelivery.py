"""Stored messages read again, and put where they belong: delayed ones when they are due, the
messages of transactions when they are committed.

The record says everything: body, flags, times, hosts and properties are taken from it as they lie,
only topic, queue and tag code are found out. The properties stay as they are, DELAY, REAL_TOPIC and
REAL_QID included, as in RocketMQ (spec/delivery.md §1, §2). No dict for a message that is due; a
hundred thousand may be in one second.

What has been appended is visible after the turn: `Redelivery.finish` ends it and says whether it
succeeded. When it did not, nothing was delivered and the caller tries again.
"""

import logging
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from sluicemq.broker.produce.intake import Draft
from sluicemq.broker.topics import NOT_FOR_SENDS
from sluicemq.broker.turns import Turns
from sluicemq.errors import MessageIllegalError, ProtocolError
from sluicemq.model.message import BORN_HOST_IPV6, STORE_HOST_IPV6
from sluicemq.record.codec import Buffer, as_dict, parse_head, tag_code_of, value_of
from sluicemq.record.layout import MAGIC_V1, PROPERTIES_BYTES_MAX, RECORD_HEAD
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store

log = logging.getLogger(__name__)

REAL_TOPIC: Final = b"REAL_TOPIC"
REAL_QUEUE: Final = b"REAL_QID"
_IPV6: Final = BORN_HOST_IPV6 | STORE_HOST_IPV6
_CHUNK_UNITS: Final = 256
_unpack_head: Final = RECORD_HEAD.struct.unpack_from
_HEAD_BYTES: Final = RECORD_HEAD.size


class Record(NamedTuple):
    """What a stored record says; `topic_view` and `body` are slices of the mapped log."""

    size_bytes: int
    body_crc: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_time_ms: int
    born_host: bytes
    store_time_ms: int
    store_host: bytes
    reconsume_times: int
    topic_view: memoryview
    body: memoryview
    properties: bytes

    @property
    def topic(self) -> str:
        return str(self.topic_view, "utf-8", "replace")

    def text(self, name: str) -> str:
        """The value of a property, "" without it."""
        return (value_of(self.properties, name.encode()) or b"").decode("utf-8", "replace")

    def number(self, name: str) -> int | None:
        """The value of a property if that is a number."""
        value = value_of(self.properties, name.encode())
        return int(value) if value is not None and value.isdigit() and len(value) < 19 else None

    def all_properties(self) -> dict[str, str]:
        return as_dict(self.properties.decode("utf-8", "replace"))

    def draft(self, topic: str, queue_id: int, properties: dict[str, str]) -> Draft:
        """The same message for another place."""
        return Draft(
            topic, queue_id, self.body, properties, self.born_time_ms, self.born_host,
            self.store_host, self.flag, self.sys_flag, self.reconsume_times,
        )  # fmt: skip


def read_record(view: memoryview | None) -> Record | None:
    """The record that `view` holds; None when it is none. HOT."""
    if view is None:
        return None
    try:
        (
            size, magic, crc, _, flag, offset, position, sys_flag, born_ms, born_host, store_ms,
            store_host, reconsumed, _, body_bytes,
        ) = _unpack_head(view)  # fmt: skip
        if magic == MAGIC_V1 and not sys_flag & _IPV6:
            body_end = _HEAD_BYTES + body_bytes
            topic_end = body_end + 1 + view[body_end]
            return Record(
                size, crc, flag, offset, position, sys_flag, born_ms, born_host, store_ms,
                store_host, reconsumed, view[body_end + 1 : topic_end],
                view[_HEAD_BYTES:body_end], bytes(view[topic_end + 2 : size]),
            )  # fmt: skip
        head = parse_head(view)
    except (ProtocolError, IndexError, ValueError):
        return None
    return Record(
        head.size_bytes, head.body_crc, head.flag, head.queue_offset, head.physical_offset,
        head.sys_flag, head.born_time_ms, bytes(view[head.born_host]), head.store_time_ms,
        bytes(view[head.store_host]), head.reconsume_times,
        view[head.topic], view[head.body], bytes(view[head.properties]),
    )  # fmt: skip


class Entry(NamedTuple):
    """A unit of a queue and its record; None when it has none, or that is deleted."""

    offset: int
    position: int
    code: int
    record: Record | None


def entries(
    store: Store,
    topic: str,
    queue_id: int,
    offset: int,
    units: Callable[[str, int, int, int], Buffer] | None = None,
) -> Iterator[Entry]:
    """A queue from an offset on, as it can be seen; `units` reads it (`Store.units`)."""
    units = units or store.reader.units
    while len(chunk := units(topic, queue_id, offset, _CHUNK_UNITS)):
        for position, size, code in UNIT.iter_unpack(chunk):
            view = None if size == BLANK_SIZE else store.reader.view_at(position)
            yield Entry(offset, position, code, read_record(view))
            offset += 1


@lru_cache(maxsize=4096)
def topic_name(name: bytes) -> str:
    """The topic that a property's bytes name."""
    return name.decode("utf-8", "replace")


class Redelivery:
    """Puts due messages into their own topics."""

    def __init__(self, store: Store, turns: Turns) -> None:
        self._append = store.writer.append
        self.finish = turns.end_own
        """Ends the turn; True when everything that was put is in the log."""

    def put(self, record: Record, added: bytes = b"") -> str | None:
        """Append the message to its real topic, with more properties; returns the topic. HOT.

        None when it cannot be stored there, now or ever: the reason is logged. Raises StoreError
        when the store takes nothing at the moment.
        """
        properties = record.properties
        name, queue_id = value_of(properties, REAL_TOPIC), value_of(properties, REAL_QUEUE)
        if name is None or queue_id is None or not queue_id.isdigit():
            log.error("a message that is due says not where it belongs: it is passed over")
            return None
        topic = topic_name(name)
        if topic in NOT_FOR_SENDS:
            log.error("a message that is due belongs to %s: it is passed over", topic)
            return None
        if added and len(properties) + len(added) < PROPERTIES_BYTES_MAX:
            properties += added if properties[-1:] == b"\x02" else b"\x02" + added
        try:
            self._append(
                topic, int(queue_id), record.body, properties, tag_code_of(properties),
                record.flag, record.sys_flag, record.born_time_ms, record.born_host,
                record.store_host, record.reconsume_times,
            )  # fmt: skip
        except MessageIllegalError as error:
            log.error("a message that is due cannot be stored in %s: %s", topic, error)
            return None
        return topic
