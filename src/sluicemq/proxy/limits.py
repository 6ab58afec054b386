"""The limits of calls, and every reason for which the proxy refuses one (spec/grpc.md §3).

A status message begins with the phrase of RocketMQ's proxy, because clients and test suites compare
it. SluiceMQ appends the value, the limit and the fix:

    the invisibleTime is too small. min is 10000: the call asks for 9000 ms
    `----------- RocketMQ's phrase -------------'  `------ SluiceMQ -------'

A `StatusError` always has a `Refusal`, so the table of refusals is complete. The golden table
`tests/golden/grpc_refusals.json` has the code and phrase of each refusal, and a test provokes each.

Control characters (U+0000 to U+001F, U+007F to U+009F) are refused in all texts of a client that
are stored, because two of them separate properties.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import count
from typing import Final

from sluicemq.client.core import names
from sluicemq.config.proxying import ProxyLimits
from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.model import topic
from sluicemq.model.bodies import COMPRESSED
from sluicemq.model.properties import HIDDEN_PROPERTIES
from sluicemq.model.system_names import is_reserved_group, is_rocketmq_system_topic
from sluicemq.model.topic import MESSAGE_TYPES, MIXED
from sluicemq.proxy import messages as m
from sluicemq.proxy.messages import Code

NAME_PATTERN: Final = "^[%|a-zA-Z0-9_-]+$"
"""RocketMQ's pattern of valid names, as its error messages quote it."""


class Refusal(Enum):
    """A reason for which a call is refused.

    `code` is the status code. `phrase` is RocketMQ's text with `str.format` placeholders; it is ""
    if RocketMQ's proxy does not refuse such a call, or has a different text each time.
    """

    code: Code
    phrase: str

    def __init__(self, code: Code, phrase: str, _distinct: str = "") -> None:
        """Create a member. `_distinct` makes members with equal code and phrase different."""
        self.code = code
        self.phrase = phrase

    # ---- names
    TOPIC_OF_SYSTEM = Code.ILLEGAL_TOPIC, "cannot access system topic"
    TOPIC_BLANK = Code.ILLEGAL_TOPIC, "The specified topic is blank"
    TOPIC_TOO_LONG = (
        Code.ILLEGAL_TOPIC,
        "The specified topic is longer than topic max length {limit}.",
    )
    TOPIC_CHARACTERS = (
        Code.ILLEGAL_TOPIC,
        "The specified topic[{name}] contains illegal characters, allowing only " + NAME_PATTERN,
    )
    TOPIC_UNKNOWN = (
        Code.TOPIC_NOT_FOUND,
        "CODE: 17  DESC: No topic route info in name server for the topic",
    )
    GROUP_OF_SYSTEM = Code.ILLEGAL_CONSUMER_GROUP, "cannot use system consumer group"
    GROUP_BLANK = Code.ILLEGAL_CONSUMER_GROUP, "the specified group is blank"
    GROUP_TOO_LONG = (
        Code.ILLEGAL_CONSUMER_GROUP,
        "the specified group[{name}] is longer than group max length: {limit}.",
    )
    GROUP_CHARACTERS = (
        Code.ILLEGAL_CONSUMER_GROUP,
        "the specified group[{name}] contains illegal characters, allowing only " + NAME_PATTERN,
    )

    # ---- sends
    NO_MESSAGE = Code.MESSAGE_CORRUPTED, "no message to send"
    TOPICS_DIFFER = Code.MESSAGE_CORRUPTED, "topic in message is not same"
    BATCH_OF_SPECIAL = Code.BAD_REQUEST, "", "delayed or transactional message in a batch"
    BATCH_OF_GROUPS = Code.BAD_REQUEST, "", "several message groups in a batch"
    NO_WRITABLE_QUEUE = Code.FORBIDDEN, "no writable queue"
    TYPE = (
        Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
        "TopicMessageType validate failed, the expected type is {expected}, but actual type is "
        "{actual}",
    )
    BODY_EMPTY = Code.MESSAGE_BODY_EMPTY, "message body cannot be empty"
    BODY_TOO_LARGE = Code.MESSAGE_BODY_TOO_LARGE, "message body cannot exceed the max {limit}"
    PROPERTY_OF_SYSTEM = (Code.ILLEGAL_MESSAGE_PROPERTY_KEY, "property is used by system: {name}")
    PROPERTY_KEY_EMPTY = Code.ILLEGAL_MESSAGE_PROPERTY_KEY, "", "empty name of a property"
    PROPERTY_KEY_CONTROL = (
        Code.ILLEGAL_MESSAGE_PROPERTY_KEY,
        "the key of property cannot contain control character",
    )
    PROPERTY_VALUE_CONTROL = (
        Code.ILLEGAL_MESSAGE_PROPERTY_KEY,
        "the value of property cannot contain control character",
    )
    PROPERTIES_TOO_MANY = (
        Code.MESSAGE_PROPERTIES_TOO_LARGE,
        "too many user properties, max is {limit}",
    )
    PROPERTIES_TOO_LARGE = (
        Code.MESSAGE_PROPERTIES_TOO_LARGE,
        "the total size of user property is too large, max is {limit}",
    )
    TAG_BLANK = Code.ILLEGAL_MESSAGE_TAG, "tag cannot be the char sequence of whitespace"
    TAG_BAR = Code.ILLEGAL_MESSAGE_TAG, "tag cannot contain '|'"
    TAG_CONTROL = Code.ILLEGAL_MESSAGE_TAG, "tag cannot contain control character"
    KEY_BLANK = Code.ILLEGAL_MESSAGE_KEY, "key cannot be the char sequence of whitespace"
    KEY_CONTROL = Code.ILLEGAL_MESSAGE_KEY, "key cannot contain control character"
    MESSAGE_GROUP_BLANK = (
        Code.ILLEGAL_MESSAGE_GROUP,
        "message group cannot be the char sequence of whitespace",
    )
    MESSAGE_GROUP_TOO_LONG = (
        Code.ILLEGAL_MESSAGE_GROUP,
        "message group exceed the max size {limit}",
    )
    MESSAGE_GROUP_CONTROL = (
        Code.ILLEGAL_MESSAGE_GROUP,
        "message group cannot contain control character",
    )
    MESSAGE_ID_EMPTY = Code.ILLEGAL_MESSAGE_ID, "message id cannot be empty"
    MESSAGE_ID_CONTROL = Code.ILLEGAL_MESSAGE_ID, "", "control character in a message id"
    LITE_TOPIC_BLANK = Code.ILLEGAL_LITE_TOPIC, "", "blank lite topic"
    LITE_TOPIC_CONTROL = (
        Code.ILLEGAL_LITE_TOPIC,
        "lite topic can only contain alphanumeric characters, hyphens(-), and underscores(_)",
    )
    LITE_TOPIC_TOO_LONG = Code.ILLEGAL_LITE_TOPIC, "lite topic exceed the max size {limit}"
    BORN_HOST_CONTROL = Code.BAD_REQUEST, "", "control character in a born host"
    TRACE_CONTEXT_CONTROL = Code.BAD_REQUEST, "", "control character in a trace context"
    DELIVERY_TIME = (
        Code.ILLEGAL_DELIVERY_TIME,
        "the max delay time of message is too large, max is {limit}",
    )
    RECOVERY_TIME = (
        Code.BAD_REQUEST,
        "the max transaction recovery time of message is too large, max is {limit}",
    )

    # ---- transactions, recalls
    TRANSACTION_ID_EMPTY = Code.INVALID_TRANSACTION_ID, "transaction id cannot be empty"
    TRANSACTION_UNKNOWN = Code.INVALID_TRANSACTION_ID, "cannot found transaction data"
    TRANSACTION_DELAYED = Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, "", "delayed transaction"
    RECALL_HANDLE = Code.INTERNAL_SERVER_ERROR, "recall handle is invalid"
    RECALL_BROKER = Code.BAD_REQUEST, "cannot find broker {broker}"

    # ---- receives, acknowledgements
    NO_READABLE_QUEUE = Code.FORBIDDEN, "no readable queue"
    POLLING_TIME = (
        Code.ILLEGAL_POLLING_TIME,
        "The deadline time remaining is not enough for polling, please check network condition",
    )
    POLLING_TIME_OLD_CLIENT = (
        Code.BAD_REQUEST,
        "The deadline time remaining is not enough for polling, please check network condition",
    )
    INVISIBLE_TIME_TOO_SMALL = (
        Code.ILLEGAL_INVISIBLE_TIME,
        "the invisibleTime is too small. min is {limit}",
    )
    INVISIBLE_TIME_TOO_LARGE = (
        Code.ILLEGAL_INVISIBLE_TIME,
        "the invisibleTime is too large. max is {limit}",
    )
    FILTER_EMPTY = Code.ILLEGAL_FILTER_EXPRESSION, "Expression can't be null! SQL92"
    FILTER = Code.ILLEGAL_FILTER_EXPRESSION, "", "a filter that does not compile"
    FILTER_OF_SETTINGS = Code.ILLEGAL_FILTER_EXPRESSION, "expression format is not correct"
    MESSAGES_HELD_TOO_MANY = Code.TOO_MANY_REQUESTS, "", "messages that clients work on"
    ENTRIES_TOO_MANY = Code.BAD_REQUEST, "", "entries of an acknowledgement"
    ENTRIES_NONE = Code.INTERNAL_SERVER_ERROR, "ack message result is empty"
    HANDLE_MALFORMED = Code.INVALID_RECEIPT_HANDLE, "", "a handle that names no message"
    HANDLE_EXPIRED = Code.INVALID_RECEIPT_HANDLE, "receipt handle is expired"
    HANDLE_WITHOUT_PLACE = Code.INVALID_RECEIPT_HANDLE, "commit log offset is empty"
    HANDLE_BROKER = Code.INVALID_RECEIPT_HANDLE, "cannot find broker {broker}"
    HANDLE_UNKNOWN = Code.INVALID_RECEIPT_HANDLE, "", "a handle that the broker does not know"

    # ---- reads by offset, which RocketMQ's proxy does not serve
    OFFSET_NEGATIVE = Code.ILLEGAL_OFFSET, "", "an offset below 0"
    OFFSET_POLICY = Code.BAD_REQUEST, "", "a policy without its timestamp"
    QUEUE_BROKER = Code.BAD_REQUEST, "", "a broker without the topic"
    QUEUE_UNKNOWN = Code.BAD_REQUEST, "", "a queue that the topic does not have"
    QUEUE_UNREADABLE = Code.FORBIDDEN, "", "a queue that must not be read"
    LITE_TOPICS = Code.UNSUPPORTED, "", "lite topics"

    # ---- clients
    CLIENT_ID_MISSING = Code.CLIENT_ID_REQUIRED, "client id cannot be empty"
    CLIENTS_TOO_MANY = Code.TOO_MANY_REQUESTS, "", "clients"
    CLIENT_OF_ANOTHER_ACCOUNT = Code.FORBIDDEN, "", "a client id of another account"
    CONNECTION_CLOSED = Code.REQUEST_TIMEOUT, "", "a connection that is closed"
    SETTINGS_EMPTY = (Code.BAD_REQUEST, "there is no publishing or subscription data in settings")
    SETTINGS_TOO_MANY = Code.BAD_REQUEST, "", "topics of a client"
    SETTINGS_MISSING = Code.BAD_REQUEST, "", "a stream that begins without settings"
    SETTINGS_UNKNOWN = (
        Code.UNRECOGNIZED_CLIENT_TYPE,
        "cannot find client settings for this client",
    )
    CLIENT_TYPE = Code.UNRECOGNIZED_CLIENT_TYPE, "Client type is not consumer, type: {kind}"
    ANSWERS_NOT_TAKEN = Code.TOO_MANY_REQUESTS, "", "answers that a client does not take"
    REQUEST_TOO_LARGE = Code.PAYLOAD_TOO_LARGE, "", "a request that is too large"
    NOT_AUTHENTICATED = Code.UNAUTHORIZED, "", "the reason that the access rules give"
    NOT_PERMITTED = Code.FORBIDDEN, "", "the reason that the access rules give"


class StatusError(SluiceError):
    """The status with which a call is refused.

    When: inside a proxy: a request of a gRPC client breaks a limit, or names something that does
    not exist.
    Then: nothing was done. The client gets the status; `code` is RocketMQ's.
    Fix: in the text, which names the value and the limit.

        the policy TIMESTAMP needs a timestamp.
    """

    def __init__(
        self, refusal: Refusal, detail: str = "", *, fix: str = "", **values: object
    ) -> None:
        """Create the error of a refusal, which has a code and a phrase of RocketMQ.

        `values` are the values of the placeholders in the phrase. `detail` follows the phrase in
        the message of the error.
        """
        phrase = refusal.phrase.format(**values)
        separator = ": " if phrase and detail else ""
        super().__init__(phrase + separator + detail, fix=fix)
        self.refusal = refusal
        self.code = refusal.code


LITE_TOPIC_LENGTH_MAX: Final = 64
"""The maximum length of the name of a lite topic, in characters."""

_find_control: Final = re.compile("[\x00-\x1f\x7f-\x9f]").search
_GZIP: Final = int(m.Encoding.GZIP)
_GZIP_OR_ZLIB: Final = 47
"""The `wbits` argument of zlib that accepts a gzip header or a zlib header."""


REQUEST_BYTES_MAX: Final = 256 * 1024
"""The maximum size of a request that does not send messages, in bytes."""
SEND_FIELDS_MAX: Final = 8192
"""The maximum number of messages and their fields in a request that sends messages."""
SEND_METADATA_BYTES_MAX: Final = 1024 * 1024
"""The maximum size of all messages of a send without their bodies, in bytes."""
_BODY_FIELD: Final = 4
"""The protobuf field number of `Message.body`."""
_VARINT: Final = 0
"""The protobuf wire type of integers of any length."""
_FIXED_64_BITS: Final = 1
"""The protobuf wire type of numbers of 8 bytes."""
_LENGTH_DELIMITED: Final = 2
"""The protobuf wire type of strings, bytes and messages."""
_FIXED_32_BITS: Final = 5
"""The protobuf wire type of numbers of 4 bytes."""


def check_shape(encoded: bytes, *, has_bodies: bool) -> None:
    """Raise StatusError if decoding a request could take longer than a few milliseconds.

    A request of 16 MiB could contain eight million empty fields. For a request that sends messages
    (`has_bodies`), the number of fields is limited, and their size without the bodies. For any
    other request, the size is limited.

    Data that is not protobuf is accepted here, because the protobuf decoder refuses it later.
    """
    if not has_bodies:
        if len(encoded) > REQUEST_BYTES_MAX:
            raise StatusError(
                Refusal.REQUEST_TOO_LARGE,
                f"the request has {len(encoded)} bytes, the limit is {REQUEST_BYTES_MAX}.",
            )
        return
    if len(encoded) <= SEND_FIELDS_MAX:  # a field has at least one byte
        return
    field_counter = count()
    metadata_bytes = 0
    # The fields of the request are the messages. Their own fields are one level below.
    for _, message_start, message_end in _read_fields(encoded, 0, len(encoded), field_counter):
        fields = _read_fields(encoded, message_start, message_end, field_counter)
        for field_number, start, end in fields:
            if field_number != _BODY_FIELD:
                metadata_bytes += end - start
        if metadata_bytes > SEND_METADATA_BYTES_MAX:
            raise StatusError(
                Refusal.REQUEST_TOO_LARGE,
                f"the messages have more than {SEND_METADATA_BYTES_MAX} bytes in addition to "
                "their bodies.",
            )


def _read_fields(
    encoded: bytes, position: int, end: int, field_counter: Iterator[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield (number, start, end) of each length-delimited field of a protobuf message.

    The message is `encoded[position:end]`. Malformed data ends the iteration without an error.
    `field_counter` counts the fields of all messages of a request. Raises StatusError when it
    exceeds `SEND_FIELDS_MAX`.
    """
    while position < end:
        if next(field_counter) > SEND_FIELDS_MAX:
            raise StatusError(
                Refusal.REQUEST_TOO_LARGE,
                f"the request has more than {SEND_FIELDS_MAX} messages and fields of messages.",
            )
        tag, position = _read_varint(encoded, position, end)
        field_number = tag >> 3
        wire_type = tag & 7
        if wire_type == _LENGTH_DELIMITED:
            size, position = _read_varint(encoded, position, end)
            if position + size > end:
                return
            yield field_number, position, position + size
            position += size
        elif wire_type == _VARINT:
            _, position = _read_varint(encoded, position, end)
        elif wire_type == _FIXED_64_BITS:
            position += 8
        elif wire_type == _FIXED_32_BITS:
            position += 4
        else:
            return


def _read_varint(encoded: bytes, position: int, end: int) -> tuple[int, int]:
    """Return (number, index behind it) for the protobuf varint at `position`.

    Return (0, `end`) if it is malformed.
    """
    number = shift = 0
    while position < end and shift < 64:
        byte = encoded[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:  # the last byte of a varint has no high bit
            return number, position
        shift += 7
    return 0, end


def checked_topic(resource: m.Resource) -> str:
    """Return the name of a topic, after a check.

    Raises StatusError if the name is invalid, or if it belongs to a system topic, which gRPC
    clients may not use.
    """
    name = resource.name
    if is_rocketmq_system_topic(name):
        detail = f"the topic {name!r} belongs to the broker itself."
        raise StatusError(Refusal.TOPIC_OF_SYSTEM, detail)
    try:
        return names.check_topic_to_send(name)
    except ConfigurationError as error:
        if not name.strip():
            refusal = Refusal.TOPIC_BLANK
        elif len(name) > topic.TOPIC_LENGTH_MAX:
            refusal = Refusal.TOPIC_TOO_LONG
        else:
            refusal = Refusal.TOPIC_CHARACTERS
        raise StatusError(refusal, str(error), name=name, limit=topic.TOPIC_LENGTH_MAX) from error


def checked_group(resource: m.Resource) -> str:
    """Return the name of a consumer group, after a check.

    Raises StatusError if the name is invalid or belongs to a system group.
    """
    name = resource.name
    if is_reserved_group(name):
        detail = f"the group {name!r} belongs to the broker itself."
        raise StatusError(Refusal.GROUP_OF_SYSTEM, detail)
    try:
        return names.check_group(name)
    except ConfigurationError as error:
        if not name.strip():
            refusal = Refusal.GROUP_BLANK
        elif len(name) > topic.GROUP_LENGTH_MAX:
            refusal = Refusal.GROUP_TOO_LONG
        else:
            refusal = Refusal.GROUP_CHARACTERS
        raise StatusError(refusal, str(error), name=name, limit=topic.GROUP_LENGTH_MAX) from error


def check_type(expected: str, actual: str) -> None:
    """Raise StatusError if a topic of type `expected` does not accept messages of type `actual`.

    A MIXED topic accepts the types in MESSAGE_TYPES.
    """
    if actual != expected and (expected != MIXED or actual not in MESSAGE_TYPES):
        raise StatusError(Refusal.TYPE, expected=expected, actual=actual)


def to_stored_body(body: bytes, encoding: int, limits: ProxyLimits) -> tuple[bytes, int]:
    """Return (body as it is stored, compression flag), the flag being 0 or COMPRESSED.

    A body with the encoding GZIP is decompressed. Remoting consumers could not read it, because the
    flag means zlib to them (spec/grpc.md §4). If it cannot be decompressed, it is stored unchanged
    with the flag, as by RocketMQ's proxy. Raises StatusError if the body is empty or too large.
    """
    limit = limits.body_bytes_largest
    flag = 0
    size_detail = f"the body has {len(body)} bytes"
    if encoding == _GZIP and body:
        # One byte more than the limit is enough to see that a body is too large.
        decompressed = _decompress(body, limit + 1)
        if decompressed is None:
            flag = COMPRESSED
        else:
            body = decompressed
            size_detail = "the decompressed body is larger"
    if not body and limits.checks_body_empty:
        raise StatusError(Refusal.BODY_EMPTY)
    if len(body) > limit:
        raise StatusError(Refusal.BODY_TOO_LARGE, size_detail, limit=limit)
    return body, flag


def _decompress(body: bytes, length_max: int) -> bytes | None:
    """Decompress a gzip or zlib body, and return at most `length_max` bytes.

    Return None if the body is neither, or is incomplete.
    """
    inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        plain = inflater.decompress(body, length_max)
    except zlib.error:
        return None
    return plain if inflater.eof or len(plain) == length_max else None


def check_message_texts(
    user: Mapping[str, str], system: m.SystemProperties, limits: ProxyLimits
) -> None:
    """Raise StatusError if a property or other text of a message breaks a limit. Hot path.

    `user` has the properties of the application, and `system` the other texts. These are refused:

    - a property with a reserved name, and too many or too long properties
    - a message group that is too long, a tag that contains "|", and an empty message id
    - a text that is blank or contains a control character
    """
    if not HIDDEN_PROPERTIES.isdisjoint(user):
        name = next(name for name in user if name in HIDDEN_PROPERTIES)
        raise StatusError(Refusal.PROPERTY_OF_SYSTEM, name=name)
    tag = system.tag
    message_id = system.message_id
    group = system.message_group
    property_text = "".join([*user, *user.values(), tag, *system.keys])
    # A character has at most 4 bytes in UTF-8, so most texts need not be encoded to measure them.
    if len(property_text) * 4 > limits.properties_bytes_max or len(user) > limits.properties_max:
        _check_properties_limits(user, property_text, limits)
    if group and len(group) * 4 >= limits.message_group_bytes_max:
        _check_group_size(group, limits.message_group_bytes_max)
    if "|" in tag:
        raise StatusError(Refusal.TAG_BAR)
    if not message_id or message_id.isspace():
        raise StatusError(Refusal.MESSAGE_ID_EMPTY)

    # Blank texts and control characters are rare. One test of all texts together excludes them.
    all_text = (
        f"{property_text}{message_id}{group}{system.born_host}{system.trace_context}"
        f"{system.lite_topic}"
    )
    if " " in all_text or "" in user or not all_text.isprintable():
        _check_each_text(user, system)


def _check_properties_limits(
    user: Mapping[str, str], property_text: str, limits: ProxyLimits
) -> None:
    """Raise StatusError if there are too many properties, or if their text has too many bytes.

    `user` has the properties of the application. `property_text` has the names and values of all
    properties, the tag and the keys, joined. A `properties_bytes_max` of 0 or less means that the
    bytes are not limited.
    """
    if len(user) > limits.properties_max:
        detail = f"the message has {len(user)}"
        raise StatusError(Refusal.PROPERTIES_TOO_MANY, detail, limit=limits.properties_max)
    limit = limits.properties_bytes_max
    size = len(property_text.encode())
    if 0 < limit < size:
        detail = f"properties, tag and keys have {size} bytes"
        raise StatusError(Refusal.PROPERTIES_TOO_LARGE, detail, limit=limit)


def _check_group_size(group: str, limit: int) -> None:
    """Raise StatusError if a message group has `limit` bytes or more; 0 or less means no limit."""
    size = len(group.encode())
    if 0 < limit <= size:
        detail = f"the message group has {size} bytes and must have fewer"
        raise StatusError(Refusal.MESSAGE_GROUP_TOO_LONG, detail, limit=limit)


_TEXT_FIELDS: Final = (
    ("tag", "the tag", Refusal.TAG_BLANK, Refusal.TAG_CONTROL),
    ("keys", "the key", Refusal.KEY_BLANK, Refusal.KEY_CONTROL),
    (
        "message_group",
        "the message group",
        Refusal.MESSAGE_GROUP_BLANK,
        Refusal.MESSAGE_GROUP_CONTROL,
    ),
    ("message_id", "the message id", Refusal.MESSAGE_ID_EMPTY, Refusal.MESSAGE_ID_CONTROL),
    ("lite_topic", "the lite topic", Refusal.LITE_TOPIC_BLANK, Refusal.LITE_TOPIC_CONTROL),
)
"""The fields whose text must not be blank or contain a control character.

Each row has the field, its name in errors, and the refusals for blank text and control characters.
"""


def _check_each_text(user: Mapping[str, str], system: m.SystemProperties) -> None:
    """Raise StatusError for the first text of a message that is blank or has a control character.

    - A property's name must not be empty. Its name and value must not contain a control character.
    - The fields of `_TEXT_FIELDS` may be empty, but must not be white space only or contain a
      control character.
    - The born host and the trace context must not contain a control character.
    """
    for name, value in user.items():
        if not name:
            raise StatusError(Refusal.PROPERTY_KEY_EMPTY, "the key of property cannot be empty")
        _check_control_characters(Refusal.PROPERTY_KEY_CONTROL, "the key of property", name)
        _check_control_characters(Refusal.PROPERTY_VALUE_CONTROL, "the value of property", value)
    for field, label, blank_refusal, control_refusal in _TEXT_FIELDS:
        field_texts = getattr(system, field)
        if isinstance(field_texts, str):  # all fields but `keys` have a single text
            field_texts = (field_texts,)
        for field_text in field_texts:
            if field_text.isspace():
                raise StatusError(blank_refusal, f"{label} is {field_text!r}")
            _check_control_characters(control_refusal, label, field_text)
    _check_control_characters(Refusal.BORN_HOST_CONTROL, "the born host", system.born_host)
    _check_control_characters(
        Refusal.TRACE_CONTEXT_CONTROL, "the trace context", system.trace_context
    )


def _check_control_characters(refusal: Refusal, label: str, field_text: str) -> None:
    """Raise StatusError with `refusal` if `field_text` contains a control character.

    `label` names the field in the error.
    """
    if _find_control(field_text):
        raise StatusError(
            refusal, f"remove the control character from {label} {field_text!r:.100}."
        )


def check_lite_topic(name: str) -> None:
    """Raise StatusError if the name of a lite topic is too long.

    `check_message_texts` checks its characters.
    """
    if len(name) > LITE_TOPIC_LENGTH_MAX:
        detail = f"the lite topic has {len(name)} characters"
        raise StatusError(Refusal.LITE_TOPIC_TOO_LONG, detail, limit=LITE_TOPIC_LENGTH_MAX)


def check_delivery_time(deliver_ms: int, now_ms: int, limits: ProxyLimits) -> None:
    """Raise StatusError if a message is due later than `limits.delay_ms_max` from now.

    Times are in ms since 1970. A limit of 0 or less means that there is no limit.
    """
    if 0 < limits.delay_ms_max < deliver_ms - now_ms:
        detail = f"the message is due in {deliver_ms - now_ms} ms"
        raise StatusError(Refusal.DELIVERY_TIME, detail, limit=limits.delay_ms_max)


def check_recovery_time(seconds: int, limits: ProxyLimits) -> None:
    """Raise StatusError if the time until the first transaction check exceeds the limit.

    A limit of 0 or less means no limit.
    """
    if 0 < limits.recovery_s_max < seconds:
        detail = f"the transaction has {seconds} s"
        raise StatusError(Refusal.RECOVERY_TIME, detail, limit=limits.recovery_s_max)
