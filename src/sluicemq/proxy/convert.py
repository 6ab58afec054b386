"""The conversion of stored messages to messages of gRPC clients (spec/grpc.md §5).

The filters, invisible durations and receipt handles of clients are converted here, too.

Properties that RocketMQ or the broker uses become fields or are left out; the application's
properties are copied. Every client can read the body: a body that a remoting producer compressed is
decompressed here, because gRPC clients know only gzip, and some not even that. A body that cannot
be decompressed is sent as it is stored, with the encoding GZIP, as RocketMQ's proxy does with all
compressed bodies: some clients detect the format from its first bytes. `UNDECODABLE` counts these
bodies, because only the client notices whether it can read them.

Each message has a digest of the body as it is sent, because one client fails without it.
"""

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from sluicemq.errors import FilterSyntaxError, ProtocolError
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.bodies import COMPRESSED, decode_body
from sluicemq.model.ids import CACHED_LENGTH_MAX
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
from sluicemq.model.subscription import SQL92, TAG, Subscription
from sluicemq.proxy import messages as m
from sluicemq.proxy.limits import Refusal, StatusError
from sluicemq.proxy.messages import DigestType, Encoding, FilterType, MessageType
from sluicemq.wire.popping import ReceiptHandle

DECODED_BYTES_MAX: Final = 16 * 1024 * 1024
"""The size above which a decompressed body is sent compressed instead, in bytes.

A response has up to 32 messages, and all of their bodies are in memory at the same time.
"""

HANDLE_LENGTH_MAX: Final = 512
"""The maximum length of a receipt handle, in characters."""


class UndecodableCount:
    """The number of bodies that the proxies of this process could not decompress."""

    def __init__(self) -> None:
        self.value: int = 0


UNDECODABLE: Final = UndecodableCount()
"""The counter of this process."""
_DELAY_S, _DELAY_MS, _DELIVER_MS = TIMER_PROPERTIES
_DELAY_PROPERTIES: Final = frozenset({DELAY, *TIMER_PROPERTIES})
_OPTIONAL_PROPERTIES: Final = _DELAY_PROPERTIES | {
    TRAN_MSG,
    SHARDING_KEY,
    TRACE_CONTEXT,
    DLQ_ORIGIN_TOPIC,
    DLQ_ORIGIN_MESSAGE_ID,
    LITE_TOPIC,
    PRIORITY,
}
"""Properties that few messages have, and that become fields."""
_IDENTITY = int(Encoding.IDENTITY)
_MD5 = int(DigestType.MD5)
_NORMAL = int(MessageType.NORMAL)
_DIGITS_MAX: Final = 15
"""The maximum number of digits of a time or delay. Longer values are ignored.

A value within the limit fits into a Timestamp.
"""


def to_message(
    stored: StoredMessage,
    handle: str = "",
    *,
    topic: str = "",
    reconsume_times: int | None = None,
    into: m.Message | None = None,
) -> m.Message:
    """Return a stored message in the form in which gRPC clients get it. Hot path.

    `handle` is its receipt handle, "" if it has none. `topic` replaces the topic of the record
    unless it is "". `reconsume_times` replaces the record's number of redeliveries unless it is
    None. `into` is a message to fill and return; None means a new one.
    """
    message = m.Message() if into is None else into
    properties = stored.properties
    message.topic.name = topic or stored.topic

    body = stored.raw_body
    encoding = _IDENTITY
    if stored.sys_flag & COMPRESSED:
        body, encoding = _decode_for_client(stored)
    message.body = body
    user_properties = message.user_properties
    for name, value in properties.items():
        if name not in HIDDEN_PROPERTIES:
            user_properties[name] = value

    system = message.system_properties
    tag = properties.get(TAGS)
    keys = properties.get(KEYS)
    if tag is not None:
        system.tag = tag
    if keys is not None:
        system.keys.extend(keys.split())
    system.message_id = stored.message_id
    digest = system.body_digest
    digest.type = _MD5
    digest.checksum = hashlib.md5(body, usedforsecurity=False).hexdigest().upper()
    system.body_encoding = encoding
    if _OPTIONAL_PROPERTIES.isdisjoint(properties):
        system.message_type = _NORMAL
    else:
        system.message_type = message_type_of(properties)
        _set_optional_fields(system, stored)

    set_timestamp(system.born_timestamp, stored.born_time_ms)
    system.born_host = properties.get(BORN_HOST) or stored.born_host.address
    set_timestamp(system.store_timestamp, stored.store_time_ms)
    system.store_host = str(stored.store_host)
    system.receipt_handle = handle
    system.queue_id = stored.queue_id
    system.queue_offset = stored.queue_offset
    if reconsume_times is None:
        reconsume_times = stored.reconsume_times
    system.delivery_attempt = reconsume_times + 1
    return message


def set_timestamp(timestamp: m.Timestamp, time_ms: int) -> None:
    """Set the fields of `timestamp` to a time in milliseconds since 1970."""
    timestamp.seconds, rest_ms = divmod(time_ms, 1000)
    timestamp.nanos = rest_ms * 1_000_000


def to_ms(time: m.Duration | m.Timestamp) -> int:
    """Return a duration in milliseconds, or a timestamp in milliseconds since 1970."""
    return time.seconds * 1000 + time.nanos // 1_000_000


def message_type_of(properties: Mapping[str, str]) -> MessageType:
    """Return the type of a message, by the properties that it has.

    As in RocketMQ's proxy, a message with several of these properties has the first type in this
    order: TRANSACTION, DELAY, FIFO (a sharding key), PRIORITY, LITE. A message without any is
    NORMAL.
    """
    if properties.get(TRAN_MSG) == "true":
        return MessageType.TRANSACTION
    if not _DELAY_PROPERTIES.isdisjoint(properties):
        return MessageType.DELAY
    if SHARDING_KEY in properties:
        return MessageType.FIFO
    if PRIORITY in properties:
        return MessageType.PRIORITY
    return MessageType.LITE if LITE_TOPIC in properties else MessageType.NORMAL


def _set_optional_fields(system: m.SystemProperties, stored: StoredMessage) -> None:
    """Set the fields of `system` for properties that few messages have."""
    properties = stored.properties
    group = properties.get(SHARDING_KEY)
    if group is not None:
        system.message_group = group
    trace = properties.get(TRACE_CONTEXT)
    if trace is not None:
        system.trace_context = trace
    deliver_ms = _delivery_time_ms(stored)
    if deliver_ms is not None:
        set_timestamp(system.delivery_timestamp, deliver_ms)
    if DLQ_ORIGIN_TOPIC in properties and DLQ_ORIGIN_MESSAGE_ID in properties:
        system.dead_letter_queue.topic = properties[DLQ_ORIGIN_TOPIC]
        system.dead_letter_queue.message_id = properties[DLQ_ORIGIN_MESSAGE_ID]
    if LITE_TOPIC in properties:
        system.lite_topic = properties[LITE_TOPIC]
    priority = _int_property(stored, PRIORITY)
    if priority is not None and priority < 1 << 31:
        system.priority = priority


def _delivery_time_ms(stored: StoredMessage) -> int | None:
    """Return the delivery time of a delayed message in ms since 1970; None if it is not delayed.

    A message has the time itself, or a delay in ms or s after its birth, as a property.
    """
    deliver_ms = _int_property(stored, _DELIVER_MS)
    if deliver_ms is not None:
        return deliver_ms
    for name, unit_ms in ((_DELAY_MS, 1), (_DELAY_S, 1000)):
        delay = _int_property(stored, name)
        if delay is not None:
            return stored.born_time_ms + delay * unit_ms
    return None


def _int_property(stored: StoredMessage, name: str) -> int | None:
    """Return a property as a number; None if it is not a number of up to 15 digits."""
    digits = stored.properties.get(name, "")
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS_MAX
    return int(digits) if is_number else None


def _decode_for_client(stored: StoredMessage) -> tuple[bytes, int]:
    """Decompress the body of a message, and return it with its encoding.

    If it cannot be decompressed, it is counted, and returned as stored with the encoding GZIP.
    """
    body = decode_body(stored.raw_body, stored.sys_flag, DECODED_BYTES_MAX)
    if isinstance(body, bytes):
        return body, _IDENTITY
    UNDECODABLE.value += 1
    return stored.raw_body, Encoding.GZIP


def to_subscription(topic: str, expression: m.FilterExpression) -> Subscription:
    """Return the filter of a receive or pull as a subscription to `topic`.

    A SQL92 expression is not compiled here, but at the broker. Raises StatusError
    (ILLEGAL_FILTER_EXPRESSION) for an empty SQL92 expression or invalid tags.
    """
    if expression.type != FilterType.SQL:
        return _to_tag_subscription(topic, expression.expression)
    if not expression.expression:
        raise StatusError(Refusal.FILTER_EMPTY, "Set an expression, or filter by tags.")
    return Subscription(topic, expression.expression, SQL92)


def _to_tag_subscription(topic: str, tag_expression: str) -> Subscription:
    """Return a subscription by tags, from a cache unless the texts are unusually long."""
    if len(topic) + len(tag_expression) <= CACHED_LENGTH_MAX:
        return _cached_tag_subscription(topic, tag_expression)
    # `__wrapped__` is the function without its cache.
    return _cached_tag_subscription.__wrapped__(topic, tag_expression)


@lru_cache(maxsize=1024)
def _cached_tag_subscription(topic: str, tag_expression: str) -> Subscription:
    """Return a subscription by tags, from a cache if possible.

    Raises StatusError if the tag expression is invalid.
    """
    try:
        return parse_subscription(topic, tag_expression, TAG)
    except FilterSyntaxError as error:
        raise StatusError(Refusal.FILTER, str(error)) from error


def checked_invisible_ms(duration: m.Duration, least_ms: int, longest_ms: int) -> int:
    """Return the time in ms for which a message is to be invisible, after a check.

    Raises StatusError (ILLEGAL_INVISIBLE_TIME) unless it is from `least_ms` to `longest_ms`.
    """
    invisible_ms = to_ms(duration)
    detail = f"the call asks for {invisible_ms} ms"
    if invisible_ms < least_ms:
        raise StatusError(Refusal.INVISIBLE_TIME_TOO_SMALL, detail, limit=least_ms)
    if invisible_ms > longest_ms:
        raise StatusError(Refusal.INVISIBLE_TIME_TOO_LARGE, detail, limit=longest_ms)
    return invisible_ms


def parse_handle(client_handle: str) -> ReceiptHandle:
    """Return the receipt handle of one message that a client sent as the text `client_handle`.

    Raises StatusError (INVALID_RECEIPT_HANDLE) if

    - the text is malformed or has more than HANDLE_LENGTH_MAX characters
    - a number in it needs more than 63 bits, or the queue id more than 31
    - the offset, the queue id, the time of the pop or the invisible duration is negative
    """
    # A text that is cut here has more than HANDLE_LENGTH_MAX characters and is refused below.
    try:
        handle = ReceiptHandle.parse(client_handle[: HANDLE_LENGTH_MAX + 1])
    except ProtocolError as error:
        raise StatusError(Refusal.HANDLE_MALFORMED, str(error)) from error
    numbers = [field for field in handle if isinstance(field, int)]
    is_too_large = max(numbers) >= 1 << 63 or handle.queue_id >= 1 << 31
    is_negative = min(handle.offset, handle.queue_id, handle.pop_ms, handle.invisible_ms) < 0
    if len(client_handle) > HANDLE_LENGTH_MAX or is_too_large or is_negative:
        raise StatusError(
            Refusal.HANDLE_MALFORMED,
            f"the handle {client_handle[:HANDLE_LENGTH_MAX]!r} does not identify a message.",
        )
    return handle
