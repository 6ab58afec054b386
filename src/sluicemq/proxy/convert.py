"""A stored message as clients of gRPC get it (spec/grpc.md §5).

What stands in the record's properties beside those of the user becomes fields; names that RocketMQ
keeps for itself are left out. A body is readable in every client: what a producer of the remoting
protocol has compressed is decompressed here, since clients know only gzip, and some not even that.
One that cannot be decompressed is handed on as it is stored, called GZIP, as RocketMQ's proxy does
with all of them: some clients look at its first bytes and know more than we do. `UNDECODABLE`
counts these, since the client alone sees what becomes of them.

The digest is of the body as it is sent, and always there: one client fails without.
"""

import hashlib
from collections.abc import Mapping
from typing import Final

from sluicemq.model.bodies import COMPRESSED, decode_body
from sluicemq.model.message import (
    DELAY,
    KEYS,
    SHARDING_KEY,
    TAGS,
    TIMER_PROPERTIES,
    TRAN_MSG,
    StoredMessage,
)
from sluicemq.model.properties import (
    BORN_HOST,
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    HIDDEN_PROPERTIES,
    LITE_TOPIC,
    PRIORITY,
    TRACE_CONTEXT,
)
from sluicemq.proxy import messages as m
from sluicemq.proxy.messages import DigestType, Encoding, MessageType

DECODED_BYTES_MAX: Final = 16 * 1024 * 1024
"""A body that decompresses to more is handed on compressed: an answer has up to 32 messages, and
all of them are in memory at once."""


class UndecodableCount:
    """How many bodies the proxies of this process could not decode."""

    def __init__(self) -> None:
        self.value: int = 0


UNDECODABLE: Final = UndecodableCount()
_DELAY_S, _DELAY_MS, _DELIVER_MS = TIMER_PROPERTIES
_DELAYS: Final = frozenset({DELAY, *TIMER_PROPERTIES})
_RARE: Final = _DELAYS | {
    TRAN_MSG, SHARDING_KEY, TRACE_CONTEXT, DLQ_ORIGIN_TOPIC, DLQ_ORIGIN_MESSAGE_ID, LITE_TOPIC,
    PRIORITY,
}  # fmt: skip
_IDENTITY, _MD5, _NORMAL = int(Encoding.IDENTITY), int(DigestType.MD5), int(MessageType.NORMAL)
_DIGITS_MAX: Final = 15
"""Times and delays of more digits are no times; what is shorter fits into a Timestamp."""


def message_of(
    stored: StoredMessage,
    handle: str = "",
    *,
    topic: str = "",
    reconsume_times: int | None = None,
    into: m.Message | None = None,
) -> m.Message:
    """Return the message of a record for a gRPC client.

    `topic` and `reconsume_times` go before what the record says; `into` is filled when it is given.
    HOT.
    """
    message = m.Message() if into is None else into
    properties = stored.properties
    message.topic.name = topic or stored.topic
    body, encoding = stored.raw_body, _IDENTITY
    if stored.sys_flag & COMPRESSED:
        body, encoding = _readable(stored)
    message.body = body
    user = message.user_properties
    for name, value in properties.items():
        if name not in HIDDEN_PROPERTIES:
            user[name] = value
    system = message.system_properties
    tag, keys = properties.get(TAGS), properties.get(KEYS)
    if tag is not None:
        system.tag = tag
    if keys is not None:
        system.keys.extend(keys.split())
    system.message_id = stored.message_id
    digest = system.body_digest
    digest.type = _MD5
    digest.checksum = hashlib.md5(body, usedforsecurity=False).hexdigest().upper()
    system.body_encoding = encoding
    if _RARE.isdisjoint(properties):
        system.message_type = _NORMAL
    else:
        system.message_type = type_of(properties)
        _put_rare(system, stored)
    put_time(system.born_timestamp, stored.born_time_ms)
    system.born_host = properties.get(BORN_HOST) or stored.born_host.address
    put_time(system.store_timestamp, stored.store_time_ms)
    system.store_host = str(stored.store_host)
    system.receipt_handle = handle
    system.queue_id = stored.queue_id
    system.queue_offset = stored.queue_offset
    times = stored.reconsume_times if reconsume_times is None else reconsume_times
    system.delivery_attempt = times + 1
    return message


def put_time(timestamp: m.Timestamp, time_ms: int) -> None:
    """Sets it."""
    timestamp.seconds, rest_ms = divmod(time_ms, 1000)
    timestamp.nanos = rest_ms * 1_000_000


def milliseconds(time: m.Duration | m.Timestamp) -> int:
    """Of a duration, or since 1970."""
    return time.seconds * 1000 + time.nanos // 1_000_000


def type_of(properties: Mapping[str, str]) -> MessageType:
    """Of which type a message is, by its properties, as RocketMQ's proxy tells it."""
    if properties.get(TRAN_MSG) == "true":
        return MessageType.TRANSACTION
    if not _DELAYS.isdisjoint(properties):
        return MessageType.DELAY
    if SHARDING_KEY in properties:
        return MessageType.FIFO
    if PRIORITY in properties:
        return MessageType.PRIORITY
    return MessageType.LITE if LITE_TOPIC in properties else MessageType.NORMAL


def _put_rare(system: m.SystemProperties, stored: StoredMessage) -> None:
    """What few messages have."""
    properties = stored.properties
    group = properties.get(SHARDING_KEY)
    if group is not None:
        system.message_group = group
    trace = properties.get(TRACE_CONTEXT)
    if trace is not None:
        system.trace_context = trace
    deliver_ms = _deliver_ms(stored)
    if deliver_ms is not None:
        put_time(system.delivery_timestamp, deliver_ms)
    if DLQ_ORIGIN_TOPIC in properties and DLQ_ORIGIN_MESSAGE_ID in properties:
        system.dead_letter_queue.topic = properties[DLQ_ORIGIN_TOPIC]
        system.dead_letter_queue.message_id = properties[DLQ_ORIGIN_MESSAGE_ID]
    if LITE_TOPIC in properties:
        system.lite_topic = properties[LITE_TOPIC]
    priority = _number(stored, PRIORITY)
    if priority is not None and priority < 1 << 31:
        system.priority = priority


def _deliver_ms(stored: StoredMessage) -> int | None:
    """When it was to be delivered."""
    deliver_ms = _number(stored, _DELIVER_MS)
    if deliver_ms is not None:
        return deliver_ms
    for name, unit_ms in ((_DELAY_MS, 1), (_DELAY_S, 1000)):
        delay = _number(stored, name)
        if delay is not None:
            return stored.born_time_ms + delay * unit_ms
    return None


def _number(stored: StoredMessage, name: str) -> int | None:
    text = stored.properties.get(name, "")
    is_number = text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
    return int(text) if is_number else None


def _readable(stored: StoredMessage) -> tuple[bytes, int]:
    """Return a compressed body for clients, and the encoding that tells them how to read it."""
    body = decode_body(stored.raw_body, stored.sys_flag, DECODED_BYTES_MAX)
    if isinstance(body, bytes):
        return body, _IDENTITY
    UNDECODABLE.value += 1
    return stored.raw_body, Encoding.GZIP
