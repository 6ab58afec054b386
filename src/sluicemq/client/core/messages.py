"""A message made ready to travel: checked, its properties joined, its body compressed; batches.

Facts: spec/remoting.md §9-§11. Properties are `name U+0001 value U+0002` repeated; the client adds
UNIQ_KEY (its id) and WAIT; bodies of 4,096 bytes and more are deflated at level 5, as the Java
client does, and keep their plain form when that is smaller.

When a message is delivered is said in one of three ways; a level needs no more than a 4.x broker, a
time needs 5.x:

    delay_level=3                   a level of the brokers' messageDelayLevel: 10 s as a rule
    delay=90 | timedelta(hours=5)   so long from now, to the millisecond
    deliver_at=datetime | ms        at that time; one that is over means at once

A batch is one request and is stored all or nothing. So its messages must agree in everything that
the request says once: topic and WAIT; and RocketMQ does not support delay or retry topics in it. We
refuse before sending and name the index at fault. Parts are at most 1 MiB, the size that RocketMQ
recommends; a single larger message travels alone.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
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
from sluicemq.errors import ConfigurationError, SendError
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
"""Those of messageDelayLevel by default: 1s 5s 10s 30s 1m … 10m 20m 30m 1h 2h."""
M = TypeVar("M")
_MS_MIN: Final = 100_000_000_000
"""A smaller number of ms lies before 1973: it is one of seconds."""
_SECONDS, _MILLISECONDS, _DELIVER = TIMER_PROPERTIES


def delay_ms_of(delay: timedelta | float) -> int:
    """A delay in seconds or as timedelta -> ms. Raises ConfigurationError."""
    if isinstance(delay, bool) or not isinstance(delay, int | float | timedelta):
        raise ConfigurationError(
            f"the delay is {delay!r:.60}.", fix="Give seconds or a timedelta: delay=90."
        )
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if not 0 <= seconds < 1e10:
        raise ConfigurationError(
            f"the delay is {seconds:,} s.",
            fix="Give 0 or more; brokers take 3 days, or what their timerMaxDelaySec says.",
        )
    return round(seconds * 1000)


def deliver_at_ms_of(moment: datetime | int) -> int:
    """A time of delivery -> ms since 1970. Raises ConfigurationError."""
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise ConfigurationError(
                f"deliver_at={moment} has no time zone.",
                fix="Add one: datetime.now(UTC) + …, or .astimezone() for local time.",
            )
        return round(moment.timestamp() * 1000)
    if isinstance(moment, bool) or not isinstance(moment, int):
        raise ConfigurationError(
            f"deliver_at is {moment!r:.60}.",
            fix="Give a datetime with a time zone, or whole milliseconds since 1970.",
        )
    if moment < _MS_MIN:
        raise ConfigurationError(
            f"deliver_at={moment} is before 1973.",
            fix="It counts milliseconds since 1970: multiply seconds by 1,000.",
        )
    return moment


def recalled(handle: str) -> RecallHandle:
    """What a recall handle says. Raises ConfigurationError when it is none."""
    found = parse_recall_handle(handle) if isinstance(handle, str) else None
    if found is None:
        raise ConfigurationError(
            f"{handle!r:.200} is no recall handle.",
            fix="It is the recall_handle of a SendResult; only timed messages have one.",
        )
    return found


@dataclass(slots=True)
class Draft:
    """A message from the arguments of a send until it is ready: what `Message` has. A frozen object
    costs three times as much to make."""

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
    message: Message | Draft, level_max: int = DELAY_LEVEL_MAX
) -> Mapping[str, str]:
    """The properties that say when. Raises ConfigurationError for what cannot be meant."""
    found: dict[str, str] = {}
    if message.delay_level:
        level = message.delay_level
        if not isinstance(level, int) or not 0 < level <= level_max:
            raise ConfigurationError(
                f"the delay level is {level!r:.60}.",
                fix=f"Levels are 1 to {level_max}, 0 is none. For any other time give delay= or "
                "deliver_at=.",
            )
        found[DELAY] = str(level)
    if message.delay_ms is not None:
        if message.delay_ms < 0:
            raise ConfigurationError(
                f"the delay is {message.delay_ms:,} ms.", fix="Give 0 or more."
            )
        found[_MILLISECONDS] = str(message.delay_ms)
    if message.deliver_at_ms is not None:
        found[_DELIVER] = str(message.deliver_at_ms)
    if len(found) > 1:
        raise ConfigurationError(
            f"the message says in more than one way when to deliver it: {', '.join(found)}.",
            fix="Give one of delay_level, delay and deliver_at.",
        )
    return found


BODY_BYTES_MAX: Final = 4 * 1024 * 1024
PROPERTIES_BYTES_MAX: Final = 32_767
COMPRESS_FROM_BYTES: Final = 4096
_COMPRESS_LEVEL: Final = 5

checked_topic = lru_cache(maxsize=1024)(check_topic_to_send)
checked_tag = lru_cache(maxsize=4096)(check_tag)
checked_group = lru_cache(maxsize=1024)(check_group)


@dataclass(slots=True)
class Outgoing:
    """A message as it goes into a send request; nobody changes it. `properties` is the joined text;
    the counts are of the copies that consumers send to a retry topic; `sharding_key` chooses the
    queue."""

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


_parts: Final[Callable[[Draft], tuple[Any, ...]]] = attrgetter(*Draft.__slots__)

Body = bytes | bytearray | memoryview | str
"""Text is sent as UTF-8."""


class MessageOptions(TypedDict, total=False):
    """What makes a message besides topic and body, where `send` is not the only word.

    `tag`: what consumers choose by, no `|` in it. `keys`: what `sluice message query` finds it by,
    without white space. `properties`: texts by name, for SQL92. `flag`: a number of yours (32
    bits). `wait_store_ok`: answer when it is as safe as the broker keeps messages. `sharding_key`:
    messages with the same one go to the same queue, in order. At most one of: `delay_level` (1 to
    18, 0 is none), `delay` (seconds or a timedelta), `deliver_at` (a datetime with a time zone, or
    ms since 1970).
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
    """The arguments of `send` as a `Message`; a `Message` given as topic passes through. Raises
    ConfigurationError."""
    return as_message(make_draft(topic, body, **options))


def expect_one_message(message: object, kind: type[M], call: str) -> M:
    """Return `message` if it is one message of type `kind`. Raises ConfigurationError, which names
    the `call`, for a list and for everything else."""
    if isinstance(message, kind):
        return message
    raise ConfigurationError(
        f"{call} takes exactly one message, got {message!r:.60}.",
        fix="Give one Message. Only `send` takes several at once (a batch): a broker checks each "
        "message of a transaction, and answers each request, on its own."
        if isinstance(message, Sequence) and not isinstance(message, str | bytes)
        else "Give a Message.",
    )


def as_message(draft: Message | Draft) -> Message:
    """For who shall not see a draft."""
    return draft if isinstance(draft, Message) else Message(*_parts(draft))


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
) -> Message | Draft:
    """The same for who only makes it ready. HOT."""
    if not isinstance(topic, str):
        if not isinstance(topic, Message):
            raise ConfigurationError(
                f"the topic is {topic!r:.60}.", fix="Give its name, or a Message."
            )
        own = tag, keys, properties, sharding_key, delay_level, delay, deliver_at, flag
        if body is not None or any(own) or not wait_store_ok:
            raise ConfigurationError(
                "a Message and a body or options of a message are given.",
                fix="Say all of it in the Message: Message(topic, body, tag=…).",
            )
        return topic
    return Draft(
        topic,
        body if isinstance(body, bytes) else body_of(body),
        tag,
        keys if isinstance(keys, tuple) else keys_of(keys),
        {} if properties is None else properties,
        flag,
        wait_store_ok,
        sharding_key,
        delay_level,
        None if delay is None else delay_ms_of(delay),
        None if deliver_at is None else deliver_at_ms_of(deliver_at),
    )


def body_of(body: Body | None) -> bytes:
    """As it is sent. Raises ConfigurationError."""
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    raise ConfigurationError(
        f"the body is {body!r:.60} ({type(body).__name__}).",
        fix="Give bytes, or text (sent as UTF-8): json.dumps(…) of what is neither.",
    )


def keys_of(keys: object) -> tuple[str, ...]:
    """One key or several. Raises ConfigurationError."""
    if keys is None or isinstance(keys, str):
        return () if keys is None else (keys,)
    if isinstance(keys, Sequence | Set) and not isinstance(keys, bytes):
        return tuple(keys)
    raise ConfigurationError(f"the keys are {keys!r:.60}.", fix="Give a text or a list of texts.")


def prepare(
    message: Message | Draft,
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
    topic = message.topic
    topic = checked_topic(topic) if isinstance(topic, str) else check_topic_to_send(topic)
    body = message.body if isinstance(message.body, bytes) else body_of(message.body)
    if not body:
        raise ConfigurationError(
            "the body is empty, which RocketMQ's brokers do not accept.",
            fix="Send at least one byte.",
        )
    if len(body) > body_bytes_max:
        raise ConfigurationError(
            f"the body has {len(body):,} bytes, the limit is {body_bytes_max:,}.",
            fix="Split it, or store it elsewhere and send its address.",
        )
    properties = _properties(message, message_id, delay_level_max)
    if message.flag != 0:
        check_number("the flag", message.flag, -(2**31), 2**31 - 1)
    sys_flag = 0
    if compress_from_bytes and len(body) >= compress_from_bytes:
        smaller = zlib.compress(body, _COMPRESS_LEVEL)
        if len(smaller) < len(body):
            body, sys_flag = smaller, COMPRESSED | COMPRESSION_ZLIB
    return Outgoing(
        topic, body, properties, message_id, sys_flag, message.flag, message.wait_store_ok,
        0, None, message.sharding_key,
    )  # fmt: skip


def bare(topic: str, body: bytes, message_id: str) -> Outgoing:
    """The same of a message that is nothing but its topic and a body that needs no look. HOT."""
    text = f"{UNIQ_KEY}\x01{message_id}\x02{WAIT}\x01true\x02"
    return Outgoing(checked_topic(topic), body, text, message_id, 0, 0, True)


def _properties(message: Message | Draft, message_id: str, delay_level_max: int) -> str:
    wait = "true" if message.wait_store_ok else "false"
    text = f"{UNIQ_KEY}\x01{message_id}\x02{WAIT}\x01{wait}\x02"
    if message.tag is not None:
        tag = message.tag
        tag = checked_tag(tag) if isinstance(tag, str) else check_tag(tag)
        text += f"{TAGS}\x01{tag}\x02"
    if keys := message.keys:
        keys = check_keys(keys if isinstance(keys, tuple) else keys_of(keys))
        text += f"{KEYS}\x01{' '.join(keys)}\x02"
    if message.sharding_key:
        check_properties({"shardingKey": message.sharding_key})
        text += f"{SHARDING_KEY}\x01{message.sharding_key}\x02"
    if message.delay_level or message.delay_ms is not None or message.deliver_at_ms is not None:
        when = delay_properties(message, delay_level_max)
        text += "".join([f"{name}\x01{value}\x02" for name, value in when.items()])
    own = message.properties
    if own or own.__class__ is not dict:
        check_properties(own)
        # An empty value would be dropped by every reader (spec/remoting.md §9): it is absent here.
        text += "".join([f"{name}\x01{value}\x02" for name, value in own.items() if value])
    if len(text) * 4 > PROPERTIES_BYTES_MAX and len(text.encode()) > PROPERTIES_BYTES_MAX:
        raise ConfigurationError(
            f"the properties take {len(text.encode()):,} bytes, the limit is "
            f"{PROPERTIES_BYTES_MAX:,}.",
            fix=_CURE_LARGE,
        )
    return text


_CURE_LARGE = "Put large values into the body."


def add_properties(outgoing: Outgoing, added: Mapping[str, str], purpose: str) -> Outgoing:
    """The message with the properties that its purpose needs. Raises ConfigurationError when they
    are too many."""
    text = outgoing.properties + "".join(f"{k}\x01{v}\x02" for k, v in added.items())
    if len(text.encode()) > PROPERTIES_BYTES_MAX:
        raise ConfigurationError(
            f"the properties take more than {PROPERTIES_BYTES_MAX:,} bytes with those of "
            f"{purpose}.",
            fix=_CURE_LARGE,
        )
    return replace(outgoing, properties=text)


BATCH_BYTES_MAX: Final = 1024 * 1024
_FIXED_BYTES: Final = 22


def check_batch(messages: Sequence[Message]) -> None:
    """Raises SendError that names the first message which may not be in this batch."""
    if not messages:
        raise SendError("the batch is empty.", fix="Give at least one message.")
    first = messages[0] if isinstance(messages, Sequence) else messages
    for index, message in enumerate(messages if isinstance(messages, Sequence) else [messages]):
        if not isinstance(message, Message) or not isinstance(messages, Sequence):
            raise ConfigurationError(
                f"a batch is a list of messages, not {message!r:.60}.",
                fix="Write send_batch([Message(topic, body), …]).",
            )
        if fault := _batch_fault(message, first):
            what, fix = fault
            raise SendError(f"message {index} of the batch {what}. Nothing was sent.", fix=fix)


def _batch_fault(message: Message, first: Message) -> tuple[str, str] | None:
    """Why a message may not be in a batch that begins with another one, and the cure."""
    if message.topic != first.topic:
        what = f"goes to the topic {message.topic!r}, message 0 to {first.topic!r}"
        return what, "Send a batch for each topic."
    if message.wait_store_ok != first.wait_store_ok:
        what = f"has wait_store_ok={message.wait_store_ok}, message 0 {first.wait_store_ok}"
        return what, "Give all messages of a batch the same."
    if message.delay_level or message.delay_ms is not None or message.deliver_at_ms is not None:
        return "is delayed", "Send delayed messages one by one."
    if message.sharding_key != first.sharding_key:
        what = f"has the sharding key {message.sharding_key!r}, message 0 {first.sharding_key!r}"
        return what, "A batch goes to one queue: send one for each key."
    if message.topic.startswith(RETRY_PREFIX):
        return f"goes to the retry topic {message.topic!r}", "Send it to the group's own topic."
    return None


def split(parts: Sequence[Outgoing], bytes_max: int = BATCH_BYTES_MAX) -> Iterator[list[Outgoing]]:
    """Consecutive runs of at most `bytes_max` bytes as encoded; order is kept."""
    run: list[Outgoing] = []
    size = 0
    for part in parts:
        own = _FIXED_BYTES + len(part.body) + len(part.properties.encode())
        if run and size + own > bytes_max:
            yield run
            run, size = [], 0
        run.append(part)
        size += own
    if run:
        yield run


def join(parts: Sequence[Outgoing], batch_id: str) -> Outgoing:
    """One request body for a run; `batch_id` names it here alone.

    As a property of the batch it would be harmful: a broker of RocketMQ 5.3.3 appends those to the
    properties of every message, and all would have the id of the batch (seen; its own client's do).
    """
    body = encode_batch((part.flag, part.body, part.properties.encode()) for part in parts)
    wait = parts[0].wait_store_ok
    properties = f"{WAIT}\x01{'true' if wait else 'false'}\x02"
    key = parts[0].sharding_key
    return Outgoing(parts[0].topic, body, properties, batch_id, 0, 0, wait, sharding_key=key)


NEW_TOPIC_QUEUES: Final = 4
"""Queues of a topic that the broker creates on our first send (defaultTopicQueueNums)."""
SEND: Final = int(RequestCode.SEND_MESSAGE_V2)
_QUEUES: Final = str(NEW_TOPIC_QUEUES)


def send_fields(
    group: str, queue: MessageQueue, outgoing: Outgoing, born_time_ms: int
) -> dict[str, str]:
    """The header of a send: a literal of its fields, nothing generic."""
    fields = {
        "a": group,
        "b": queue.topic,
        "c": DEFAULT_TOPIC,
        "d": _QUEUES,
        "e": str(queue.queue_id),
        "f": str(outgoing.sys_flag),
        "g": str(born_time_ms),
        "h": str(outgoing.flag),
        "i": outgoing.properties,
        "j": str(outgoing.reconsume_times),
        "k": "false",
        "m": "false",
        "n": queue.broker,
    }
    if outgoing.reconsume_times_max is not None:
        fields["l"] = str(outgoing.reconsume_times_max)
    return fields


class SendRequest(Command):
    """A plain send. Its header is written from what is the same for all sends to a queue; fields
    are made only for who asks for them (signatures), and then they count."""

    __slots__ = ("_born_time_ms", "_fields", "_group", "_outgoing", "_queue")

    def __init__(
        self, group: str, queue: MessageQueue, outgoing: Outgoing, born_time_ms: int, flag: int
    ) -> None:
        self.code, self.body, self.flag, self.opaque = SEND, outgoing.body, flag, 0
        self.remark, self.language, self.version = None, "PYTHON", VERSION
        self.serialization = JSON
        self._fields: dict[str, str] | None = None
        self._group, self._queue = group, queue
        self._outgoing, self._born_time_ms = outgoing, born_time_ms

    @property
    def fields(self) -> dict[str, str] | None:
        if self._fields is None:
            self._fields = send_fields(self._group, self._queue, self._outgoing, self._born_time_ms)
        return self._fields

    @fields.setter
    def fields(self, fields: dict[str, str] | None) -> None:
        self._fields = fields

    def start(self) -> bytes | None:
        """None leaves it to the general way. HOT."""
        if self._fields is not None:
            return None
        return _start(
            _around(self._group, self._queue, self.flag), self._born_time_ms,
            self._outgoing.properties, self.opaque, len(self.body),
        )  # fmt: skip


def send_start(
    around: tuple[bytes, bytes, bytes], born_time_ms: int, properties: str, opaque: int, size: int
) -> bytes | None:
    """A plain send's frame up to its body of so many bytes; None for what needs care."""
    try:
        text = orjson.dumps(properties)
    except TypeError:  # a lone surrogate
        return None
    before, behind, end = around
    header = b'%b%d","h":"0","i":%b%b%d%b' % (before, born_time_ms, text, behind, opaque, end)
    total = 4 + len(header) + size
    return None if total > FRAME_BYTES_MAX else _PREFIX.pack(total, len(header)) + header


_start: Final = send_start if engine.client is None else engine.client.start
_PREFIX: Final = struct.Struct(">II")
_NOTHING: Final = Outgoing("", b"", "", "", 0, 0, True)


@lru_cache(maxsize=4096)
def _around(group: str, queue: MessageQueue, flag: int) -> tuple[bytes, bytes, bytes]:
    """A plain send's header before its time, between its properties and its opaque, and behind
    it. What stands in a text cannot be taken for them: it has no bare quotes."""
    command = Command(SEND, send_fields(group, queue, _NOTHING, 0), flag=flag)
    before, _, rest = encode_start(command)[_PREFIX.size :].partition(b'0","h":"0","i":""')
    behind, _, end = rest.rpartition(b'0,"serializeTypeCurrentRPC"')
    return before, behind, b',"serializeTypeCurrentRPC"' + end
