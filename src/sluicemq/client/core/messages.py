"""A message made ready to travel: checked, its properties joined, its body compressed.

Facts: spec/remoting.md §9-§11. Properties are `name U+0001 value U+0002` repeated; the client adds
UNIQ_KEY (its id) and WAIT; bodies of 4,096 bytes and more are deflated at level 5, as the Java
client does, and keep their plain form when that is smaller.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Final

from sluicemq.client.core.delays import (
    DELAY_LEVEL_MAX,
    delay_ms_of,
    delay_properties,
    deliver_at_ms_of,
    is_delayed,
)
from sluicemq.client.core.names import (
    check_group,
    check_keys,
    check_properties,
    check_tag,
    check_topic_to_send,
)
from sluicemq.errors import ConfigurationError
from sluicemq.model.message import (
    COMPRESSED,
    COMPRESSION_ZLIB,
    KEYS,
    SHARDING_KEY,
    TAGS,
    UNIQ_KEY,
    WAIT,
    Message,
)

BODY_BYTES_MAX: Final = 4 * 1024 * 1024
PROPERTIES_BYTES_MAX: Final = 32_767
COMPRESS_FROM_BYTES: Final = 4096
_COMPRESS_LEVEL: Final = 5

checked_topic = lru_cache(maxsize=1024)(check_topic_to_send)
checked_tag = lru_cache(maxsize=4096)(check_tag)
checked_group = lru_cache(maxsize=1024)(check_group)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message as it goes into a send request. `properties` is the joined text; the counts are of
    the copies that consumers send to a retry topic; `sharding_key` chooses the queue."""

    topic: str
    body: bytes | memoryview
    properties: str
    message_id: str
    sys_flag: int
    flag: int
    wait_store_ok: bool
    reconsume_times: int = 0
    reconsume_times_max: int | None = None
    sharding_key: str | None = None


def make_message(
    topic: str | Message,
    body: bytes | bytearray | memoryview | str | None = None,
    *,
    tag: str | None = None,
    keys: str | list[str] | tuple[str, ...] = (),
    properties: Mapping[str, str] | None = None,
    flag: int = 0,
    wait_store_ok: bool = True,
    sharding_key: str | None = None,
    delay_level: int = 0,
    delay: timedelta | float | None = None,
    deliver_at: datetime | int | None = None,
) -> Message:
    """The arguments of `send` as a `Message`; a `Message` given as topic passes through.

    `delay` is seconds or a timedelta, `deliver_at` a datetime with a time zone or ms since 1970.
    Raises ConfigurationError.
    """
    if isinstance(topic, Message):
        if body is not None:
            raise ConfigurationError(
                "a Message and a body are given.", cure="The message has its body already."
            )
        return topic
    return Message(
        topic,
        _body(body),
        tag,
        (keys,) if isinstance(keys, str) else tuple(keys),
        properties or {},
        flag,
        wait_store_ok,
        sharding_key,
        delay_level,
        delay_ms_of(delay),
        deliver_at_ms_of(deliver_at),
    )


def _body(body: bytes | bytearray | memoryview | str | None) -> bytes:
    if isinstance(body, bytes):
        return body
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, bytearray | memoryview):
        return bytes(body)
    raise ConfigurationError(
        f"the body is {type(body).__name__}.", cure="Give bytes, or text (sent as UTF-8)."
    )


def prepare(
    message: Message,
    message_id: str,
    *,
    body_bytes_max: int = BODY_BYTES_MAX,
    compress_from_bytes: int = COMPRESS_FROM_BYTES,
    delay_level_max: int = DELAY_LEVEL_MAX,
) -> Outgoing:
    """Checks a message and makes it ready. HOT.

    Raises ConfigurationError for a bad topic, tag, key, property or size. `compress_from_bytes` 0
    switches compression off (batches do so, spec/remoting.md §9).
    """
    topic = checked_topic(message.topic)
    body = message.body
    if not body:
        raise ConfigurationError(
            "the body is empty, which RocketMQ's brokers do not accept.",
            cure="Send at least one byte.",
        )
    if len(body) > body_bytes_max:
        raise ConfigurationError(
            f"the body has {len(body):,} bytes, the limit is {body_bytes_max:,}.",
            cure="Split it, or store it elsewhere and send its address.",
        )
    properties = _properties(message, message_id, delay_level_max)
    sys_flag = 0
    if compress_from_bytes and len(body) >= compress_from_bytes:
        smaller = zlib.compress(body, _COMPRESS_LEVEL)
        if len(smaller) < len(body):
            body, sys_flag = smaller, COMPRESSED | COMPRESSION_ZLIB
    return Outgoing(
        topic, body, properties, message_id, sys_flag, message.flag, message.wait_store_ok,
        0, None, message.sharding_key,
    )  # fmt: skip


def _properties(message: Message, message_id: str, delay_level_max: int) -> str:
    parts = [f"{UNIQ_KEY}\x01{message_id}\x02{WAIT}\x01", "true\x02"]
    if not message.wait_store_ok:
        parts[1] = "false\x02"
    if message.tag is not None:
        parts.append(f"{TAGS}\x01{checked_tag(message.tag)}\x02")
    if message.keys:
        parts.append(f"{KEYS}\x01{' '.join(check_keys(message.keys))}\x02")
    if message.sharding_key or is_delayed(message):
        parts.append(_rare_properties(message, delay_level_max))
    own = message.properties
    if own:
        check_properties(own)
        # An empty value would be dropped by every reader (spec/remoting.md §9): it is absent here.
        parts.extend([f"{name}\x01{value}\x02" for name, value in own.items() if value])
    text = "".join(parts)
    if len(text) * 4 > PROPERTIES_BYTES_MAX:
        _check_size(text)
    return text


def _rare_properties(message: Message, delay_level_max: int) -> str:
    parts = []
    if message.sharding_key:
        check_properties({"shardingKey": message.sharding_key})
        parts.append(f"{SHARDING_KEY}\x01{message.sharding_key}\x02")
    for name, value in delay_properties(message, delay_level_max).items():
        parts.append(f"{name}\x01{value}\x02")
    return "".join(parts)


def _check_size(text: str) -> None:
    size = len(text.encode())
    if size > PROPERTIES_BYTES_MAX:
        raise ConfigurationError(
            f"the properties take {size:,} bytes, the limit is {PROPERTIES_BYTES_MAX:,}.",
            cure="Put large values into the body.",
        )
