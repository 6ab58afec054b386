"""A stored message goes where it was meant to go: delayed and timed ones, when they are due.

The record says all: body, flags, times, hosts and properties are taken from it as they lie, only
topic, queue and tag code are found out. The properties stay as they are, DELAY, REAL_TOPIC and
REAL_QID included, as in RocketMQ (spec/delivery.md §1, §2). No dict for a message; a hundred
thousand may be due in one second.

What has been appended is visible after the turn: `Redelivery.finish` ends it and says whether it
succeeded. When it did not, nothing was delivered and the caller tries again.
"""

import logging
from functools import lru_cache
from typing import Final, NamedTuple

from sluicemq.broker.topics import NOT_FOR_SENDS
from sluicemq.broker.turns import Turns
from sluicemq.errors import MessageIllegalError, ProtocolError
from sluicemq.model.message import BORN_HOST_IPV6, STORE_HOST_IPV6
from sluicemq.record.codec import parse_head
from sluicemq.record.layout import MAGIC_V1, PROPERTIES_BYTES_MAX, RECORD_HEAD
from sluicemq.record.property_text import tag_code_of, value_of
from sluicemq.store.store import Store

log = logging.getLogger(__name__)

REAL_TOPIC: Final = b"REAL_TOPIC"
REAL_QUEUE: Final = b"REAL_QID"
_IPV6: Final = BORN_HOST_IPV6 | STORE_HOST_IPV6
_unpack_head: Final = RECORD_HEAD.struct.unpack_from
_HEAD_BYTES: Final = RECORD_HEAD.size


class Record(NamedTuple):
    """What a stored record says; `body` is a slice of the mapped log."""

    size_bytes: int
    flag: int
    sys_flag: int
    born_time_ms: int
    born_host: bytes
    store_time_ms: int
    store_host: bytes
    reconsume_times: int
    body: memoryview
    properties: bytes


def read_record(view: memoryview) -> Record | None:
    """The record that `view` holds; None when it is none. HOT."""
    try:
        (
            size, magic, _, _, flag, _, _, sys_flag, born_ms, born_host, store_ms, store_host,
            reconsumed, _, body_bytes,
        ) = _unpack_head(view)  # fmt: skip
        if magic == MAGIC_V1 and not sys_flag & _IPV6:
            body_end = _HEAD_BYTES + body_bytes
            properties = bytes(view[body_end + 3 + view[body_end] : size])
            body = view[_HEAD_BYTES:body_end]
            return Record(
                size, flag, sys_flag, born_ms, born_host, store_ms, store_host, reconsumed, body,
                properties,
            )  # fmt: skip
        head = parse_head(view)
    except (ProtocolError, IndexError, ValueError):
        return None
    return Record(
        head.size_bytes, head.flag, head.sys_flag, head.born_time_ms, bytes(view[head.born_host]),
        head.store_time_ms, bytes(view[head.store_host]), head.reconsume_times, view[head.body],
        bytes(view[head.properties]),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def topic_name(name: bytes) -> str:
    """The topic that a property's bytes name."""
    return name.decode("utf-8", "replace")


class Redelivery:
    """Puts due messages into their own topics."""

    def __init__(self, store: Store, turns: Turns) -> None:
        self._append = store.writer.append
        self._store = store
        self._turns = turns

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

    def finish(self) -> bool:
        """End the turn; True when everything that was put is in the log."""
        return self._turns.end_own()
