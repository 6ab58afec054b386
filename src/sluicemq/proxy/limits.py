"""What a call may say: names, and the fields of a message (spec/grpc.md §3).

Each check raises StatusError with the code that the clients know it by. Characters that control
(U+0000 to U+001F, U+007F to U+009F) are refused wherever a client may write text that is stored:
two of them separate properties.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Final

from sluicemq.client.core import names
from sluicemq.client.core.messages import BODY_BYTES_MAX
from sluicemq.errors import ConfigurationError
from sluicemq.model.properties import HIDDEN_PROPERTIES
from sluicemq.model.topic import MESSAGE_TYPES, MIXED
from sluicemq.proxy import messages as m
from sluicemq.proxy.clients import StatusError
from sluicemq.proxy.messages import Code

SYSTEM_TOPIC_PREFIX: Final = "rmq_sys_"
SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"
USER_PROPERTIES_MAX: Final = 128
USER_PROPERTIES_BYTES_MAX: Final = 16 * 1024
"""Of names and values, tag and keys."""
MESSAGE_GROUP_BYTES_MAX: Final = 63
DELAY_MS_MAX: Final = 24 * 3600 * 1000
RECOVERY_S_MAX: Final = 3600
LITE_TOPIC_LENGTH_MAX: Final = 64

_controls: Final = re.compile("[\x00-\x1f\x7f-\x9f]").search
_GZIP: Final = int(m.Encoding.GZIP)
_GZIP_OR_ZLIB: Final = 47
"""As zlib's window bits: whichever of the two heads is there."""


REQUEST_BYTES_MAX: Final = 256 * 1024
"""Of a request that carries no bodies of messages."""
SENT_FIELDS_MAX: Final = 8192
"""Fields of a request that sends, its messages and their fields."""
SENT_REST_BYTES_MAX: Final = 1024 * 1024
"""Of the messages of a request without their bodies."""
_BODY_FIELD: Final = 4
"""The number of `Message.body`."""
_LENGTH_DELIMITED: Final = 2


def check_shape(data: bytes, *, has_bodies: bool) -> None:
    """Raise StatusError if decoding a request could take longer than a few milliseconds: 16 MiB may
    hold eight million empty fields. `has_bodies`: it sends messages, whose bodies are passed over.

    What is not protobuf passes: its decoder says so.
    """
    if not has_bodies:
        if len(data) > REQUEST_BYTES_MAX:
            raise StatusError(
                Code.PAYLOAD_TOO_LARGE,
                f"the request has {len(data)} bytes, the limit is {REQUEST_BYTES_MAX}.",
            )
        return
    if len(data) <= SENT_FIELDS_MAX:
        return
    fields, rest = count(), 0
    for _, begin, end in _fields(data, 0, len(data), fields):
        for number, start, stop in _fields(data, begin, end, fields):
            rest += 0 if number == _BODY_FIELD else stop - start
        if rest > SENT_REST_BYTES_MAX:
            raise StatusError(
                Code.PAYLOAD_TOO_LARGE,
                f"the messages have more than {SENT_REST_BYTES_MAX} bytes beside their bodies.",
            )


def _fields(
    data: bytes, begin: int, end: int, counted: Iterator[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield number, begin and end of the length-delimited fields of a protobuf message, until it is
    none. Raises StatusError when `counted` has come to SENT_FIELDS_MAX."""
    while begin < end:
        if next(counted) > SENT_FIELDS_MAX:
            raise StatusError(
                Code.PAYLOAD_TOO_LARGE,
                f"the request has more than {SENT_FIELDS_MAX} messages and fields of messages.",
            )
        tag, begin = _varint(data, begin, end)
        kind = tag & 7
        if kind == _LENGTH_DELIMITED:
            size, begin = _varint(data, begin, end)
            if begin + size > end:
                return
            yield tag >> 3, begin, begin + size
            begin += size
        elif kind == 0:
            _, begin = _varint(data, begin, end)
        elif kind in (1, 5):
            begin += 8 if kind == 1 else 4
        else:
            return


def _varint(data: bytes, begin: int, end: int) -> tuple[int, int]:
    """Return a number and where it ends; `end` where it is none."""
    value = shift = 0
    while begin < end and shift < 64:
        byte = data[begin]
        begin += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, begin
        shift += 7
    return 0, end


def topic_of(resource: m.Resource) -> str:
    """The name of a topic; system topics are not for clients of gRPC."""
    name = resource.name
    if name.startswith(SYSTEM_TOPIC_PREFIX):
        raise StatusError(Code.ILLEGAL_TOPIC, f"the topic {name!r} belongs to the broker itself.")
    try:
        return names.check_topic_to_send(name)
    except ConfigurationError as error:
        raise StatusError(Code.ILLEGAL_TOPIC, str(error)) from error


def group_of(resource: m.Resource) -> str:
    """The name of a consumer group."""
    name = resource.name
    if name.startswith(SYSTEM_GROUP_PREFIX):
        raise StatusError(
            Code.ILLEGAL_CONSUMER_GROUP, f"the group {name!r} belongs to the broker itself."
        )
    try:
        return names.check_group(name)
    except ConfigurationError as error:
        raise StatusError(Code.ILLEGAL_CONSUMER_GROUP, str(error)) from error


def check_type(expected: str, actual: str) -> None:
    """May messages of this type go to a topic that is for the expected one? MIXED takes the four
    that its route names."""
    if actual != expected and (expected != MIXED or actual not in MESSAGE_TYPES):
        raise StatusError(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"TopicMessageType validate failed, the expected type is {expected}, but actual type "
            f"is {actual}",
        )


def body_of(body: bytes, encoding: int) -> bytes:
    """The body as it is stored. One that came as gzip is stored plain: consumers of the remoting
    protocol, whose flag says zlib, could not read it (spec/grpc.md §4)."""
    if encoding == _GZIP:
        inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
        try:
            body = inflater.decompress(body, BODY_BYTES_MAX + 1)
        except zlib.error as error:
            raise StatusError(
                Code.MESSAGE_CORRUPTED, f"the body is said to be GZIP and is not: {error}"
            ) from None
        if not inflater.eof and len(body) <= BODY_BYTES_MAX:
            raise StatusError(Code.MESSAGE_CORRUPTED, "the body is GZIP that ends too early")
    if not body:
        raise StatusError(Code.MESSAGE_BODY_EMPTY, "message body cannot be empty")
    if len(body) > BODY_BYTES_MAX:
        raise StatusError(
            Code.MESSAGE_BODY_TOO_LARGE,
            f"message body cannot exceed the max {BODY_BYTES_MAX}; it has {len(body)} bytes",
        )
    return body


def check_texts(user: Mapping[str, str], system: m.SystemProperties) -> None:
    """The properties of the user, and the texts among those of the system. HOT: short visible
    words are settled together."""
    if not HIDDEN_PROPERTIES.isdisjoint(user):
        name = next(name for name in user if name in HIDDEN_PROPERTIES)
        raise StatusError(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, f"property is used by system: {name}")
    tag, message_id, group = system.tag, system.message_id, system.message_group
    own = "".join([*user, *user.values(), tag, *system.keys])
    if len(own) * 4 > USER_PROPERTIES_BYTES_MAX or len(user) > USER_PROPERTIES_MAX:
        _check_size(user, own)
    if len(group) * 4 > MESSAGE_GROUP_BYTES_MAX and len(group.encode()) > MESSAGE_GROUP_BYTES_MAX:
        raise StatusError(
            Code.ILLEGAL_MESSAGE_GROUP,
            f"message group exceed the max size {MESSAGE_GROUP_BYTES_MAX + 1}",
        )
    if "|" in tag:
        raise StatusError(Code.ILLEGAL_MESSAGE_TAG, "tag cannot contain '|'")
    if not message_id or message_id.isspace():
        raise StatusError(Code.ILLEGAL_MESSAGE_ID, "message id cannot be empty")
    text = f"{own}{message_id}{group}{system.born_host}{system.trace_context}{system.lite_topic}"
    if " " in text or "" in user or not text.isprintable():
        _check_each(user, system)


def _check_size(user: Mapping[str, str], own: str) -> None:
    size = len(own.encode())
    if len(user) > USER_PROPERTIES_MAX:
        what, limit, found = "too many user properties", USER_PROPERTIES_MAX, len(user)
    elif size > USER_PROPERTIES_BYTES_MAX:
        what = "the total size of user property is too large"
        limit, found = USER_PROPERTIES_BYTES_MAX, size
    else:
        return
    raise StatusError(Code.MESSAGE_PROPERTIES_TOO_LARGE, f"{what}, max is {limit}; it has {found}")


def _check_each(user: Mapping[str, str], system: m.SystemProperties) -> None:
    """Every text by itself: nothing that controls, no name of white space alone."""
    key = Code.ILLEGAL_MESSAGE_PROPERTY_KEY
    for name, value in user.items():
        if not name:
            raise StatusError(key, "the key of property cannot be empty")
        check_characters(key, "the key of property", name)
        check_characters(key, "the value of property", value)
    for code, what, words in (
        (Code.ILLEGAL_MESSAGE_TAG, "tag", [system.tag]),
        (Code.ILLEGAL_MESSAGE_KEY, "key", system.keys),
        (Code.ILLEGAL_MESSAGE_GROUP, "message group", [system.message_group]),
        (Code.ILLEGAL_MESSAGE_ID, "message id", [system.message_id]),
        (Code.ILLEGAL_LITE_TOPIC, "lite topic", [system.lite_topic]),
    ):
        for word in words:
            if word.isspace():
                raise StatusError(code, f"{what} cannot be the char sequence of whitespace")
            check_characters(code, what, word)
    check_characters(Code.BAD_REQUEST, "born host", system.born_host)
    check_characters(Code.BAD_REQUEST, "trace context", system.trace_context)


def check_characters(code: Code, what: str, text: str) -> None:
    """Nothing that controls."""
    if _controls(text):
        raise StatusError(code, f"{what} cannot contain control character")


def check_lite_topic(name: str) -> None:
    """The length of a lite topic's name; `check_texts` has seen to its characters."""
    if len(name) > LITE_TOPIC_LENGTH_MAX:
        raise StatusError(
            Code.ILLEGAL_LITE_TOPIC,
            f"the lite topic has {len(name)} characters, max is {LITE_TOPIC_LENGTH_MAX}",
        )


def check_delivery(deliver_ms: int, now_ms: int) -> None:
    """When a delayed message is delivered."""
    if deliver_ms - now_ms > DELAY_MS_MAX:
        raise StatusError(
            Code.ILLEGAL_DELIVERY_TIME,
            f"the max delay time of message is too large, max is {DELAY_MS_MAX}; it is "
            f"{deliver_ms - now_ms}",
        )


def check_recovery(seconds: int) -> None:
    """After how long the broker asks how a transaction ended."""
    if seconds > RECOVERY_S_MAX:
        raise StatusError(
            Code.BAD_REQUEST,
            f"the max transaction recovery time of message is too large, max is {RECOVERY_S_MAX}; "
            f"it is {seconds}",
        )
