"""Encode messages for send requests: check them, join their properties, compress their bodies.

Facts: spec/remoting.md §9-§11. On the wire, properties are `name U+0001 value U+0002`, repeated.
The client adds UNIQ_KEY (the message id) and WAIT. Bodies of `COMPRESS_FROM_BYTES` and more are
deflated at level 5, as the Java client does, unless that makes them larger.

The delivery time of a message can be given in one of three ways. A delay level works with 4.x
brokers, the others need 5.x:

    delay_level=3                   a level of the brokers' messageDelayLevel; 3 is 10 s by default
    delay=90 | timedelta(hours=5)   from now on, with a resolution of 1 ms
    deliver_at=datetime | ms        at that time, or at once if it has passed

A batch is one request and is stored completely or not at all. So its messages must agree in what
the request has only once: topic, WAIT and sharding key. RocketMQ does not support delayed messages
or retry topics in a batch. The client checks this before it sends anything, and names the index of
the wrong message. `split_batch` divides a batch into requests of at most 1 MiB, the size that
RocketMQ recommends; a single larger message is sent alone.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, TypedDict, TypeVar, Unpack

import orjson

from sluicemq import engine
from sluicemq.client.core.names import (
    check_group,
    check_keys,
    check_number,
    check_properties,
    check_tag,
    check_topic_to_send,
)
from sluicemq.errors import ConfigurationError
from sluicemq.model.arguments import (
    Body,
    encode_body,
    parse_delay_ms,
    parse_deliver_at_ms,
    to_key_tuple,
)
from sluicemq.model.bodies import COMPRESSED, COMPRESSION_ZLIB
from sluicemq.model.ids import RecallHandle, parse_recall_handle
from sluicemq.model.message import (
    DELAY,
    KEYS,
    SHARDING_KEY,
    TAGS,
    TIMER_PROPERTIES,
    UNIQ_KEY,
    WAIT,
    Message,
)
from sluicemq.model.topic import DEFAULT_TOPIC, RETRY_PREFIX, MessageQueue
from sluicemq.record.codec import encode_batch
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import FRAME_BYTES_MAX, JSON, VERSION, Command, encode_start

DELAY_LEVEL_MAX: Final = 18
"""The number of delay levels in messageDelayLevel by default: 1s 5s 10s 30s 1m … 10m 20m 30m 1h 2h.
"""
M = TypeVar("M")
_SECONDS, _MILLISECONDS, _DELIVER = TIMER_PROPERTIES


def expect_recall_handle(handle: str) -> RecallHandle:
    """Decode the handle by which a timed message is recalled, and return it.

    Raises ConfigurationError if `handle` is not valid.
    """
    decoded = parse_recall_handle(handle) if isinstance(handle, str) else None
    if decoded is None:
        raise ConfigurationError(
            f"{handle!r:.200} is not a valid recall handle.",
            fix="Use the recall_handle of a SendResult; only timed messages have one.",
        )
    return decoded


@dataclass(slots=True)
class MessageDraft:
    """The arguments of a send, with the fields of `Message`, until they are encoded.

    A draft is not frozen, because a frozen object takes three times as long to create.
    """

    topic: str
    body: bytes
    tag: str | None
    keys: tuple[str, ...]
    properties: Mapping[str, str]
    flag: int
    wait_store_ok: bool
    sharding_key: str | None
    delay_level: int
    delay_ms: int | None
    deliver_at_ms: int | None


def delay_properties(
    message: Message | MessageDraft, level_max: int = DELAY_LEVEL_MAX
) -> Mapping[str, str]:
    """Return the properties that tell the broker when to deliver a message; {} without a delay.

    The message may have one of `delay_level`, `delay_ms` and `deliver_at_ms`. `level_max` is the
    highest delay level of the brokers. Raises ConfigurationError if it has several of them, or if
    one is invalid.
    """
    properties: dict[str, str] = {}
    if message.delay_level:
        level = message.delay_level
        if not isinstance(level, int) or not 0 < level <= level_max:
            raise ConfigurationError(
                f"the delay level must be a whole number from 0 to {level_max}, got {level!r:.60}.",
                fix=f"Use 1 to {level_max} for a predefined delay, or 0 for no delay; for an "
                "arbitrary delay, use delay= or deliver_at= instead.",
            )
        properties[DELAY] = str(level)
    if message.delay_ms is not None:
        if message.delay_ms < 0:
            raise ConfigurationError(
                f"the delay must not be negative, got {message.delay_ms:,} ms.",
                fix="Use 0 ms or more.",
            )
        properties[_MILLISECONDS] = str(message.delay_ms)
    if message.deliver_at_ms is not None:
        properties[_DELIVER] = str(message.deliver_at_ms)
    if len(properties) > 1:
        raise ConfigurationError(
            f"{' and '.join(_format_delays(message))} cannot be combined.",
            fix="Use only one of delay_level, delay and deliver_at.",
        )
    return properties


def _format_delays(message: Message | MessageDraft) -> list[str]:
    """Return the delay options that a message has, as in "delay_level=3" and "delay=5 s"."""
    shown = []
    if message.delay_level:
        shown.append(f"delay_level={message.delay_level}")
    if message.delay_ms is not None:
        shown.append(f"delay={message.delay_ms / 1000:,} s")
    if message.deliver_at_ms is not None:
        try:
            shown.append(f"deliver_at={datetime.fromtimestamp(message.deliver_at_ms / 1000, UTC)}")
        except (ValueError, OverflowError, OSError):  # a year after 9999
            shown.append(f"deliver_at={message.deliver_at_ms}")
    return shown


BODY_BYTES_MAX: Final = 4 * 1024 * 1024
"""The maximum size of a body that the client sends, before compression."""
PROPERTIES_BYTES_MAX: Final = 32_767
"""The maximum size of all properties of a message together, as encoded."""
COMPRESS_FROM_BYTES: Final = 4096
"""Bodies of this size or more are compressed by default."""
_COMPRESS_LEVEL: Final = 5

check_topic_cached = lru_cache(maxsize=1024)(check_topic_to_send)
check_tag_cached = lru_cache(maxsize=4096)(check_tag)
check_group_cached = lru_cache(maxsize=1024)(check_group)


@dataclass(slots=True)
class OutgoingMessage:
    """A message encoded for a send request. It must not be changed.

    `properties` is the encoded text. The two `reconsume` fields are only set in retry messages that
    a consumer sends. `sharding_key` selects the queue.
    """

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


_draft_values: Final[Callable[[MessageDraft], tuple[Any, ...]]] = attrgetter(
    *MessageDraft.__slots__
)


class MessageOptions(TypedDict, total=False):
    """The options of a message besides its topic and body.

    - `tag`: what consumers filter by. It contains no `|`.
    - `keys`: strings without white space by which `sluice message query` finds the message.
    - `properties`: strings by name, for SQL92 filters.
    - `flag`: a 32-bit number for the application's own use.
    - `wait_store_ok`: if False, the broker responds before the message is as safe as it is
      configured to keep messages.
    - `sharding_key`: messages with the same key go to the same queue, in order.
    - `delay_level` (1 to 18; 0 means none), `delay` (seconds or a timedelta), `deliver_at` (a
      datetime with a time zone, or milliseconds since 1970): at most one of them delays the
      message.
    """

    tag: str | None
    keys: str | Sequence[str]
    properties: Mapping[str, str] | None
    flag: int
    wait_store_ok: bool
    sharding_key: str | None
    delay_level: int
    delay: timedelta | float | None
    deliver_at: datetime | int | None


def make_message(
    topic: str | Message, body: Body | None = None, **options: Unpack[MessageOptions]
) -> Message:
    """Return the arguments of `send` as a `Message`.

    If `topic` is a `Message`, it is returned unchanged. Raises what `make_draft` raises.
    """
    return to_message(make_draft(topic, body, **options))


def expect_one_message(message: object, message_class: type[M], method_name: str) -> M:
    """Return `message` if it is an instance of `message_class`, else raise ConfigurationError.

    `method_name` is the method that the application has called, for the text of the error. A list
    of messages gets a hint to `send`, which accepts several.
    """
    if isinstance(message, message_class):
        return message
    fix = "Pass a Message."
    if isinstance(message, Sequence) and not isinstance(message, str | bytes):
        fix = (
            "Pass one Message. Only `send` takes several at once (a batch): a broker checks each "
            "message of a transaction, and responds to each request, separately."
        )
    raise ConfigurationError(
        f"{method_name} takes exactly one message, got {message!r:.60}.", fix=fix
    )


def to_message(draft: Message | MessageDraft) -> Message:
    """Return a draft as a `Message`, for application code. Return a `Message` unchanged."""
    return draft if isinstance(draft, Message) else Message(*_draft_values(draft))


def make_draft(
    topic: str | Message,
    body: Body | None = None,
    *,
    tag: str | None = None,
    keys: str | Sequence[str] = (),
    properties: Mapping[str, str] | None = None,
    flag: int = 0,
    wait_store_ok: bool = True,
    sharding_key: str | None = None,
    delay_level: int = 0,
    delay: timedelta | float | None = None,
    deliver_at: datetime | int | None = None,
) -> Message | MessageDraft:
    """Put the arguments of a send into a draft, without checking names and limits. HOT.

    A `Message` as `topic` is returned unchanged; the other arguments must then be left out. Raises
    ConfigurationError if they are not, and for a topic, body, keys, delay or delivery time of a
    wrong type. `make_outgoing` checks names and limits later.
    """
    if not isinstance(topic, str):
        if not isinstance(topic, Message):
            raise _topic_type_error(topic)
        options = tag, keys, properties, sharding_key, delay_level, delay, deliver_at, flag
        if body is not None or any(options) or not wait_store_ok:
            raise _combined_message_error()
        return topic
    return MessageDraft(
        topic,
        body if isinstance(body, bytes) else encode_body(body),
        tag,
        keys if isinstance(keys, tuple) else to_key_tuple(keys),
        {} if properties is None else properties,
        flag,
        wait_store_ok,
        sharding_key,
        delay_level,
        None if delay is None else parse_delay_ms(delay),
        None if deliver_at is None else parse_deliver_at_ms(deliver_at),
    )


def _topic_type_error(topic: object) -> ConfigurationError:
    """Return the error for a topic that is neither a string nor a Message."""
    return ConfigurationError(
        f"the topic must be a string, got {topic!r:.60}.",
        fix="Pass the topic's name, or a Message.",
    )


def _combined_message_error() -> ConfigurationError:
    """Return the error for a Message that is sent with a body or options in addition."""
    return ConfigurationError(
        "a Message cannot be combined with a body or options of a message.",
        fix="Put all of them into the Message: Message(topic, body, tag=…).",
    )


def make_outgoing(
    message: Message | MessageDraft,
    message_id: str,
    *,
    body_bytes_max: int = BODY_BYTES_MAX,
    compress_from_bytes: int = COMPRESS_FROM_BYTES,
    delay_level_max: int = DELAY_LEVEL_MAX,
) -> OutgoingMessage:
    """Check a message and encode it for a send request. HOT.

    `message_id` becomes the property UNIQ_KEY. A body of `compress_from_bytes` or more is
    compressed if that makes it smaller; 0 disables this, because batches require it
    (spec/remoting.md §9). `delay_level_max` is the highest delay level of the brokers.

    Raises ConfigurationError for an invalid topic, tag, key, property, flag or delay, an empty
    body, and a body or properties that are too large.
    """
    topic = message.topic
    topic = check_topic_cached(topic) if isinstance(topic, str) else check_topic_to_send(topic)
    body = message.body if isinstance(message.body, bytes) else encode_body(message.body)
    if not 0 < len(body) <= body_bytes_max:
        raise _body_size_error(len(body), body_bytes_max)
    properties = _encode_properties(message, message_id, delay_level_max)
    if message.flag != 0:
        check_number("the flag", message.flag, -(2**31), 2**31 - 1)

    # Compress the body, unless that makes it larger.
    sys_flag = 0
    if compress_from_bytes and len(body) >= compress_from_bytes:
        compressed = zlib.compress(body, _COMPRESS_LEVEL)
        if len(compressed) < len(body):
            body = compressed
            sys_flag = COMPRESSED | COMPRESSION_ZLIB
    return OutgoingMessage(
        topic,
        body,
        properties,
        message_id,
        sys_flag,
        message.flag,
        message.wait_store_ok,
        0,
        None,
        message.sharding_key,
    )


def _body_size_error(body_bytes: int, body_bytes_max: int) -> ConfigurationError:
    """Return the error for a body of `body_bytes` bytes that is empty or too large."""
    if not body_bytes:
        return ConfigurationError(
            "the body is empty, and RocketMQ brokers reject empty bodies.",
            fix="Send at least one byte.",
        )
    return ConfigurationError(
        f"the body has {body_bytes:,} bytes, the limit is {body_bytes_max:,}.",
        fix="Split the body, or store it elsewhere and send a reference to it.",
    )


def make_plain_outgoing(topic: str, body: bytes, message_id: str) -> OutgoingMessage:
    """Return an encoded message that has only a topic and a body. HOT.

    The caller has checked the body: it is neither empty nor too large, and is not compressed.
    Raises ConfigurationError for an invalid topic.
    """
    properties = f"{UNIQ_KEY}\x01{message_id}\x02{WAIT}\x01true\x02"
    return OutgoingMessage(check_topic_cached(topic), body, properties, message_id, 0, 0, True)


def _encode_properties(
    message: Message | MessageDraft, message_id: str, delay_level_max: int
) -> str:
    """Return the properties of a message as they are sent: `name U+0001 value U+0002`, repeated.

    UNIQ_KEY and WAIT come first. Properties with an empty value are left out. Raises
    ConfigurationError if a property is invalid, or if all together are too large.
    """
    wait = "true" if message.wait_store_ok else "false"
    encoded = f"{UNIQ_KEY}\x01{message_id}\x02{WAIT}\x01{wait}\x02"
    if message.tag is not None:
        tag = message.tag
        tag = check_tag_cached(tag) if isinstance(tag, str) else check_tag(tag)
        encoded += f"{TAGS}\x01{tag}\x02"
    keys = message.keys
    if keys:
        keys = check_keys(keys if isinstance(keys, tuple) else to_key_tuple(keys))
        encoded += f"{KEYS}\x01{' '.join(keys)}\x02"
    if message.sharding_key:
        check_properties({"shardingKey": message.sharding_key})
        encoded += f"{SHARDING_KEY}\x01{message.sharding_key}\x02"
    if message.delay_level or message.delay_ms is not None or message.deliver_at_ms is not None:
        delays = delay_properties(message, delay_level_max)
        encoded += "".join([f"{name}\x01{delay}\x02" for name, delay in delays.items()])
    properties = message.properties
    if properties or properties.__class__ is not dict:  # the check refuses what is not a mapping
        check_properties(properties)
        # Every reader drops an empty value (spec/remoting.md §9), so it is not sent.
        encoded += "".join(
            [f"{name}\x01{value}\x02" for name, value in properties.items() if value]
        )

    # A character has at most 4 bytes in UTF-8, so most texts need not be encoded to be measured.
    may_be_too_large = len(encoded) * 4 > PROPERTIES_BYTES_MAX
    if may_be_too_large and len(encoded.encode()) > PROPERTIES_BYTES_MAX:
        raise ConfigurationError(
            f"the properties have {len(encoded.encode()):,} bytes, the limit is "
            f"{PROPERTIES_BYTES_MAX:,}.",
            fix=_FIX_LARGE,
        )
    return encoded


_FIX_LARGE = "Put large values into the body."


def add_properties(
    outgoing: OutgoingMessage, added: Mapping[str, str], purpose: str
) -> OutgoingMessage:
    """Return a copy of a message with the properties `added` as well.

    `purpose`, such as "a transaction", says in an error who added them. Raises ConfigurationError
    if the properties become too large.
    """
    all_properties = outgoing.properties + "".join(
        f"{name}\x01{value}\x02" for name, value in added.items()
    )
    if len(all_properties.encode()) > PROPERTIES_BYTES_MAX:
        raise ConfigurationError(
            f"the properties have more than {PROPERTIES_BYTES_MAX:,} bytes, including those for "
            f"{purpose}.",
            fix=_FIX_LARGE,
        )
    return replace(outgoing, properties=all_properties)


BATCH_BYTES_MAX: Final = 1024 * 1024
"""The maximum size of one batch request."""
_BATCH_ENTRY_OVERHEAD_BYTES: Final = 22
"""The bytes that an encoded message of a batch has besides its body and properties."""


def check_batch(messages: Sequence[Message]) -> None:
    """Raise an error unless the messages can be sent as one batch.

    Raises ConfigurationError if `messages` is not a sequence of messages or is empty, and for a
    message that must not be in a batch with the first one, for example because its topic differs;
    the error names its index.
    """
    if not messages:
        raise ConfigurationError("the batch is empty.", fix="Pass at least one message.")
    if not isinstance(messages, Sequence):
        raise _not_a_batch_error(messages)
    for index, message in enumerate(messages):
        if not isinstance(message, Message):
            raise _not_a_batch_error(message)
        fault_and_fix = _find_batch_fault(index, message, messages[0])
        if fault_and_fix is not None:
            fault, fix = fault_and_fix
            raise ConfigurationError(f"{fault}. Nothing was sent.", fix=fix)


def _not_a_batch_error(wrong_value: object) -> ConfigurationError:
    """Return the error for a batch that is, or contains, something else than messages."""
    return ConfigurationError(
        f"a batch must be a list of messages, got {wrong_value!r:.60}.",
        fix="Write send_batch([Message(topic, body), …]).",
    )


def _find_batch_fault(
    index: int, message: Message, first_message: Message
) -> tuple[str, str] | None:
    """Return (fault, fix) if a message cannot be in one batch with the first message, else None.

    `index` is the position of `message` in the batch. `fault` is a sentence without a full stop.
    """

    def difference_text(field: str, field_value: object, first_value: object) -> str:
        return (
            f"all messages in a batch must have the same {field}, got {first_value!r} (message 0) "
            f"and {field_value!r} (message {index})"
        )

    if message.topic != first_message.topic:
        fault = difference_text("topic", message.topic, first_message.topic)
        return fault, "Send a separate batch for each topic."
    if message.wait_store_ok != first_message.wait_store_ok:
        fault = difference_text("wait_store_ok", message.wait_store_ok, first_message.wait_store_ok)
        return fault, "Use the same value for all messages of a batch."
    if message.delay_level or message.delay_ms is not None or message.deliver_at_ms is not None:
        return f"message {index} of the batch is delayed", "Send delayed messages one by one."
    if message.sharding_key != first_message.sharding_key:
        fault = difference_text("sharding key", message.sharding_key, first_message.sharding_key)
        return fault, "Send a separate batch for each key: a batch goes to one queue."
    if message.topic.startswith(RETRY_PREFIX):
        fault = f"message {index} of the batch goes to the retry topic {message.topic!r}"
        return fault, "Send it to the group's own topic."
    return None


def split_batch(
    messages: Sequence[OutgoingMessage], bytes_max: int = BATCH_BYTES_MAX
) -> Iterator[list[OutgoingMessage]]:
    """Divide messages into lists, one for each request, whose encoded size is at most `bytes_max`.

    The order is kept. A message that is larger than `bytes_max` becomes a list of its own.
    """
    request_messages: list[OutgoingMessage] = []
    request_bytes = 0
    for message in messages:
        properties_bytes = len(message.properties.encode())
        message_bytes = _BATCH_ENTRY_OVERHEAD_BYTES + len(message.body) + properties_bytes
        if request_messages and request_bytes + message_bytes > bytes_max:
            yield request_messages
            request_messages = []
            request_bytes = 0
        request_messages.append(message)
        request_bytes += message_bytes
    if request_messages:
        yield request_messages


def join_batch(messages: Sequence[OutgoingMessage], batch_id: str) -> OutgoingMessage:
    """Return one message that contains `messages`, encoded one after the other in its body.

    It has the topic, WAIT and sharding key of the first one. `batch_id` becomes its id in this
    client, but is not sent: a RocketMQ 5.3.3 broker adds the properties of a batch to all its
    messages, which would then all have this id.
    """
    body = encode_batch(
        (message.flag, message.body, message.properties.encode()) for message in messages
    )
    first_message = messages[0]
    wait_text = "true" if first_message.wait_store_ok else "false"
    return OutgoingMessage(
        first_message.topic,
        body,
        f"{WAIT}\x01{wait_text}\x02",
        batch_id,
        sys_flag=0,
        flag=0,
        wait_store_ok=first_message.wait_store_ok,
        sharding_key=first_message.sharding_key,
    )


NEW_TOPIC_QUEUES: Final = 4
"""The number of queues that a send requests for a topic that the broker has to create."""
SEND: Final = int(RequestCode.SEND_MESSAGE_V2)
_QUEUES: Final = str(NEW_TOPIC_QUEUES)


def make_send_fields(
    group: str, queue: MessageQueue, outgoing: OutgoingMessage, born_time_ms: int
) -> dict[str, str]:
    """Return the header fields of a request that sends a message or batch to `queue`.

    RocketMQ uses single letters as names; the comments have the long names. `born_time_ms` is the
    time of sending in milliseconds since 1970. The request code is SEND_MESSAGE_V2 (310), or 320
    for a batch.
    """
    fields = {
        "a": group,  # producerGroup
        "b": queue.topic,  # topic
        "c": DEFAULT_TOPIC,  # defaultTopic
        "d": _QUEUES,  # defaultTopicQueueNums
        "e": str(queue.queue_id),  # queueId
        "f": str(outgoing.sys_flag),  # sysFlag
        "g": str(born_time_ms),  # bornTimestamp
        "h": str(outgoing.flag),  # flag
        "i": outgoing.properties,  # properties
        "j": str(outgoing.reconsume_times),  # reconsumeTimes
        "k": "false",  # unitMode
        "m": "false",  # batch
        "n": queue.broker,  # bname
    }
    if outgoing.reconsume_times_max is not None:
        fields["l"] = str(outgoing.reconsume_times_max)  # maxReconsumeTimes
    return fields


class SendRequest(Command):
    """The request to send one ordinary message, whose header is encoded only when it is needed.

    An ordinary message is not in a batch, is not compressed, has no flag and is not a retry.
    `start` encodes its header from a template that is the same for all sends of a group to a queue.
    `fields` creates the dict of header fields on first access, for example for a signature. From
    then on the dict counts: `start` returns None, so that the general encoder is used.
    """

    __slots__ = ("_born_time_ms", "_fields", "_group", "_outgoing", "_queue")

    def __init__(
        self,
        group: str,
        queue: MessageQueue,
        outgoing: OutgoingMessage,
        born_time_ms: int,
        flag: int,
    ) -> None:
        """Keep the parts of the request, so that `start` can encode it without a dict of fields."""
        self.code = SEND
        self.body = outgoing.body
        self.flag = flag
        self.opaque = 0
        self.remark = None
        self.language = "PYTHON"
        self.version = VERSION
        self.serialization = JSON
        self._fields: dict[str, str] | None = None
        self._group = group
        self._queue = queue
        self._outgoing = outgoing
        self._born_time_ms = born_time_ms

    @property
    def fields(self) -> dict[str, str] | None:
        """The header fields, created on first access."""
        if self._fields is None:
            self._fields = make_send_fields(
                self._group, self._queue, self._outgoing, self._born_time_ms
            )
        return self._fields

    @fields.setter
    def fields(self, fields: dict[str, str] | None) -> None:
        self._fields = fields

    def start(self) -> bytes | None:
        """Return the bytes of the frame before the body. HOT.

        Returns None if the header fields were read, so that they may have changed; then the general
        encoder must be used.
        """
        if self._fields is not None:
            return None
        return _encode_start(
            _make_frame_template(self._group, self._queue, self.flag),
            self._born_time_ms,
            self._outgoing.properties,
            self.opaque,
            len(self.body),
        )


def encode_send_start(
    template: tuple[bytes, bytes, bytes], born_time_ms: int, properties: str, opaque: int, size: int
) -> bytes | None:
    """Return the frame of a plain send request up to its body, which has `size` bytes.

    The result is the length of the frame and that of the header, four bytes each, and the JSON
    header. `template` has the parts of the header that do not change, as `_make_frame_template`
    returns them. Returns None, so that the caller uses the general encoder, if the frame would be
    too large or a property contains a lone surrogate. `engine.client.start` is the compiled
    equivalent.
    """
    try:
        properties_json = orjson.dumps(properties)
    except TypeError:  # a lone surrogate
        return None
    before_born_time, before_opaque, after_opaque = template
    header = b'%b%d","h":"0","i":%b%b%d%b' % (
        before_born_time,
        born_time_ms,
        properties_json,
        before_opaque,
        opaque,
        after_opaque,
    )
    frame_bytes = 4 + len(header) + size
    if frame_bytes > FRAME_BYTES_MAX:
        return None
    return _PREFIX.pack(frame_bytes, len(header)) + header


_encode_start: Final = encode_send_start if engine.client is None else engine.client.start
_PREFIX: Final = struct.Struct(">II")
_EMPTY_MESSAGE: Final = OutgoingMessage("", b"", "", "", 0, 0, True)


@lru_cache(maxsize=4096)
def _make_frame_template(group: str, queue: MessageQueue, flag: int) -> tuple[bytes, bytes, bytes]:
    """Return the parts of a plain send's JSON header that are the same for each message.

    These are three: the text before the born time, the text between the properties and the opaque
    (the number of the request), and the text after the opaque.
    """
    command = Command(SEND, make_send_fields(group, queue, _EMPTY_MESSAGE, 0), flag=flag)
    header = encode_start(command)[_PREFIX.size :]
    # The born time and opaque of this command are 0, and its properties are "". The header is split
    # at texts with quotes, which JSON escapes inside strings, so a name cannot contain them.
    before_born_time, _, after_properties = header.partition(b'0","h":"0","i":""')
    before_opaque, _, end = after_properties.rpartition(b'0,"serializeTypeCurrentRPC"')
    return before_born_time, before_opaque, b',"serializeTypeCurrentRPC"' + end
