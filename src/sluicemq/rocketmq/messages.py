"""Messages, queues, results and constants with the names of RocketMQ's Java client.

The constructor of `Message` has Java's overloads by position, and keywords:

    Message("orders", b"41 books")
    Message("orders", "paid", b"41 books")                      # topic, tags, body
    Message("orders", "paid", "order-7", b"41 books")           # topic, tags, keys, body
    Message("orders", "paid", "order-7", 0, b"41 books", True)  # … flag, body, wait_store_msg_ok
    Message("orders", "41 books", tags="paid", keys="order-7")

Java's getters and setters are methods in snake case, and each is also an attribute:
`message.get_tags()` and `message.tags` are the same.

SluiceMQ's own values (`sluicemq.model`) are immutable. The classes of this module convert to them
with `to_model` and `to_model_queue`, and from them with `from_core` and `to_rocketmq_queues`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import total_ordering
from typing import Any, Final, Self, overload

from sluicemq.client.aio.pull import PullResult as CorePullResult
from sluicemq.client.aio.received import ReceivedMessage, record_attribute
from sluicemq.client.core.consuming import original_topic
from sluicemq.client.core.requests import PullStatus
from sluicemq.client.core.requests import SendResult as CoreSendResult
from sluicemq.errors import ConfigurationError, UndecodableBodyError
from sluicemq.model.message import Message as ModelMessage
from sluicemq.model.message import StoredMessage
from sluicemq.model.properties import settable_properties
from sluicemq.model.subscription import SQL92, TAG
from sluicemq.model.topic import MessageQueue as ModelQueue
from sluicemq.rocketmq.names import Getter, Setter, StrictAttributes


class _Constant(Enum):
    """An enumeration whose members have the repr by which code names them: `SendStatus.SEND_OK`."""

    def __repr__(self) -> str:
        return str(self)


class SendStatus(_Constant):
    """The safety of a message that the broker has stored.

    SEND_OK means as safe as the broker is configured to keep messages. FLUSH_DISK_TIMEOUT means
    that the disk sync took too long, SLAVE_NOT_AVAILABLE that no slave could receive the message,
    and FLUSH_SLAVE_TIMEOUT that no slave confirmed it in time.
    """

    SEND_OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


class ConsumeConcurrentlyStatus(_Constant):
    """The result of a call of a `MessageListenerConcurrently`.

    CONSUME_SUCCESS, or None, acknowledges the messages. RECONSUME_LATER has them delivered again.
    """

    CONSUME_SUCCESS = 0
    RECONSUME_LATER = 1


class ConsumeOrderlyStatus(_Constant):
    """The result of a call of a `MessageListenerOrderly`.

    SUCCESS, or None, acknowledges the messages. SUSPEND_CURRENT_QUEUE_A_MOMENT has them delivered
    again after a pause, before any later message of their queue.
    """

    SUCCESS = 0
    SUSPEND_CURRENT_QUEUE_A_MOMENT = 1


class ConsumeFromWhere(_Constant):
    """The point at which a group without a committed offset begins to read a queue."""

    CONSUME_FROM_LAST_OFFSET = "last"
    CONSUME_FROM_FIRST_OFFSET = "first"
    CONSUME_FROM_TIMESTAMP = "timestamp"


class MessageModel(_Constant):
    """The rule for the members of a group: they share the queues, or each reads all of them."""

    CLUSTERING = "CLUSTERING"
    BROADCASTING = "BROADCASTING"


class LocalTransactionState(_Constant):
    """The state of a local transaction, in RocketMQ's spelling.

    With UNKNOW, the broker sends a transaction check later.
    """

    COMMIT_MESSAGE = "commit"
    ROLLBACK_MESSAGE = "rollback"
    UNKNOW = "unknown"


@dataclass(frozen=True, slots=True)
class MessageSelector:
    """A filter expression and its type.

    MessageSelector.by_sql("a > 3")
    MessageSelector.by_tag("A || B")
    """

    expression: str
    expression_type: str = TAG

    @staticmethod
    def by_sql(expression: str) -> "MessageSelector":
        """Return a selector by properties, with an expression in SQL92."""
        return MessageSelector(expression, SQL92)

    @staticmethod
    def by_tag(expression: str) -> "MessageSelector":
        """Return a selector by tags, such as "A || B". The expression "*" selects all messages."""
        return MessageSelector(expression, TAG)


@total_ordering
class MessageQueue(StrictAttributes):
    """One queue of a topic on one broker.

    It is equal to, and sorts like, a `sluicemq.MessageQueue` with the same values.

    As in Java, `MessageQueue()` can be filled by its setters. A method that receives a queue copies
    its values, so changing the queue afterwards has no effect on the method.
    """

    __slots__ = ("broker_name", "queue_id", "topic")

    topic: str
    broker_name: str
    queue_id: int

    @overload
    def __init__(self) -> None: ...

    @overload
    def __init__(self, other: "MessageQueue | ModelQueue", /) -> None: ...

    @overload
    def __init__(self, topic: str, broker_name: str, queue_id: int) -> None: ...

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        """Make a queue from three values, from another queue, or without arguments an empty one.

        The values are topic, broker_name and queue_id, by position or by name. Raises
        ConfigurationError if only some of them are given.
        """
        if len(positional) == 1 and isinstance(positional[0], MessageQueue | ModelQueue):
            positional = tuple(positional[0])
        value_by_field = dict(zip(_QUEUE_FIELDS, positional, strict=False)) | keywords
        has_unknown = len(positional) > len(_QUEUE_FIELDS) or value_by_field.keys() - set(
            _QUEUE_FIELDS
        )
        is_incomplete = 0 < len(value_by_field) < len(_QUEUE_FIELDS)
        if has_unknown or is_incomplete:
            raise ConfigurationError(
                "MessageQueue takes topic, broker_name and queue_id, or nothing, got "
                f"{(*positional, *keywords.values())!r}.",
                fix="Pass all three, or none and call set_topic, set_broker_name and set_queue_id.",
            )
        self.topic = value_by_field.get("topic", "")
        self.broker_name = value_by_field.get("broker_name", "")
        self.queue_id = value_by_field.get("queue_id", 0)

    set_topic = Setter[str]()
    set_broker_name = Setter[str]()
    set_queue_id = Setter[int]()
    get_topic = Getter[str]()
    get_broker_name = Getter[str]()
    get_queue_id = Getter[int]()

    @property
    def broker(self) -> str:
        """The broker name, as `sluicemq.MessageQueue` calls it."""
        return self.broker_name

    def __iter__(self) -> Iterator[Any]:
        return iter((self.topic, self.broker_name, self.queue_id))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MessageQueue | ModelQueue):
            return NotImplemented
        return tuple(self) == tuple(other)

    def __lt__(self, other: "MessageQueue | ModelQueue") -> bool:
        return tuple(self) < tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"MessageQueue({self.topic!r}, {self.broker_name!r}, {self.queue_id})"

    def __str__(self) -> str:
        return f"{self.topic}/{self.broker_name}/{self.queue_id}"


_QUEUE_FIELDS: Final = ("topic", "broker_name", "queue_id")
AnyMessageQueue = MessageQueue | ModelQueue
"""A queue as an application may pass it: of this module, or of `sluicemq`."""


def to_model_queue(queue: AnyMessageQueue) -> ModelQueue:
    """Return `queue` as the immutable `MessageQueue` of the other clients.

    Raises ConfigurationError if a value of the queue is missing or has a wrong type.
    """
    if isinstance(queue, ModelQueue):
        return queue
    if not isinstance(queue, MessageQueue):
        raise ConfigurationError(
            f"a queue must be a MessageQueue, got {queue!r}.", fix="Pass a MessageQueue."
        )
    for name in ("topic", "broker_name"):
        name_value = getattr(queue, name)
        if not isinstance(name_value, str) or not name_value:
            raise ConfigurationError(
                f"the {name} of {queue!r} must be a string that is not empty, got {name_value!r}.",
                fix=f"Call set_{name} with a name.",
            )
    queue_id = queue.queue_id
    if not isinstance(queue_id, int) or isinstance(queue_id, bool) or queue_id < 0:
        raise ConfigurationError(
            f"the queue_id of {queue!r} must be an integer of 0 or more, got {queue_id!r}.",
            fix="Call set_queue_id with 0 or more.",
        )
    return ModelQueue(*queue)


def to_rocketmq_queues(queues: Iterable[AnyMessageQueue]) -> list[MessageQueue]:
    """Return copies of the queues as instances of this module's `MessageQueue`."""
    return [MessageQueue(*queue) for queue in queues]


_MESSAGE_OVERLOADS: Final = (
    ("body",),
    ("tags", "body"),
    ("tags", "keys", "body"),
    ("tags", "keys", "flag", "body", "wait_store_msg_ok"),
)
"""The positional parameters that may follow the topic, by overload of Java's constructor."""
_ARGUMENT_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "tags": (str, type(None)),
    "keys": (str, type(None)),
    "flag": (int,),
    "body": (bytes, bytearray, memoryview),
    "wait_store_msg_ok": (bool,),
}


class Message(StrictAttributes):
    """A message that an application sends. Its attributes may be changed before it is sent.

    - `topic`, `body` (bytes), `tags`, and `keys`, several of which are separated by spaces.
    - `properties`: strings by name, for filters and consumers. Reserved names are refused when the
      message is sent.
    - `flag`: an integer that is stored with the message. RocketMQ does not use it.
    - `wait_store_msg_ok`: whether the broker responds only when the message is as safe as it is
      configured to be.
    - `delay_time_level`: deliver the message after this delay level of the broker; 0 means none.
      `delay_time_ms`: deliver it after this time. `deliver_time_ms`: deliver it at this time, in
      milliseconds since 1970. At most one of the three may be set.
    - `sharding_key`: messages with the same key go to the same queue.
    - `transaction_id`: set when the message is sent in a transaction, "" before.

    By position, a body that follows tags must be bytes. So an exchange of tags and body is found.
    """

    __slots__ = (
        "body",
        "delay_time_level",
        "delay_time_ms",
        "deliver_time_ms",
        "flag",
        "keys",
        "properties",
        "sharding_key",
        "tags",
        "topic",
        "transaction_id",
        "wait_store_msg_ok",
    )

    @overload
    def __init__(self) -> None: ...

    @overload
    def __init__(
        self,
        topic: str,
        body: bytes | str,
        *,
        tags: str | None = None,
        keys: str | Sequence[str] = (),
        flag: int = 0,
        wait_store_msg_ok: bool = True,
    ) -> None: ...

    @overload
    def __init__(self, topic: str, tags: str | None, body: bytes, /) -> None: ...

    @overload
    def __init__(self, topic: str, tags: str | None, keys: str | None, body: bytes, /) -> None: ...

    @overload
    def __init__(
        self,
        topic: str,
        tags: str | None,
        keys: str | None,
        flag: int,
        body: bytes,
        wait_store_msg_ok: bool,
        /,
    ) -> None: ...

    def __init__(
        self,
        topic: str = "",
        *java_arguments: Any,
        body: bytes | str = b"",
        tags: str | None = None,
        keys: str | Sequence[str] | None = (),
        flag: int = 0,
        wait_store_msg_ok: bool = True,
    ) -> None:
        """Make a message from the arguments of one of Java's constructors, or from keywords.

        By position, these are the topic and the body, with tags, keys and flag between them. If
        there is a flag, `wait_store_msg_ok` follows the body. A body that is a string is encoded as
        UTF-8. Raises ConfigurationError if the positional arguments have a wrong number, order or
        type.
        """
        if len(java_arguments) == 1:
            (body,) = java_arguments
        elif java_arguments:
            tags, keys, flag, body, wait_store_msg_ok = _bind_positional(topic, java_arguments)
        self.topic = topic
        self.tags = tags or None
        self.flag = flag
        self.wait_store_msg_ok = wait_store_msg_ok
        self.properties: dict[str, str] = {}
        self.delay_time_level = 0
        self.sharding_key: str | None = None
        self.transaction_id = ""
        self.delay_time_ms: int | None = None
        self.deliver_time_ms: int | None = None
        self.set_keys(keys or ())
        self.set_body(body)

    set_topic = Setter[str]()
    set_tags = Setter[str | None]()
    set_flag = Setter[int]()
    set_wait_store_msg_ok = Setter[bool]()
    set_delay_time_level = Setter[int]()
    set_delay_time_ms = Setter[int | None]()
    set_deliver_time_ms = Setter[int | None]()
    get_topic = Getter[str]()
    get_body = Getter[bytes]()
    get_tags = Getter[str | None]()
    get_keys = Getter[str]()
    get_flag = Getter[int]()
    get_properties = Getter[dict[str, str]]()
    get_delay_time_level = Getter[int]()
    get_transaction_id = Getter[str]()
    is_wait_store_msg_ok = Getter[bool]("wait_store_msg_ok")

    def set_keys(self, keys: str | Sequence[str]) -> None:
        """Set the keys: a sequence of strings, or a string with keys separated by spaces."""
        self.keys = keys if isinstance(keys, str) else " ".join(keys)

    def set_body(self, body: bytes | str) -> None:
        """Set the body. A string is encoded as UTF-8."""
        self.body = body.encode() if isinstance(body, str) else bytes(body)

    def set_delay_time_sec(self, seconds: int) -> None:
        """Have the message delivered `seconds` seconds after it is sent."""
        self.delay_time_ms = seconds * 1000

    def put_user_property(self, name: str, value: str) -> None:
        """Set a property, which filters and consumers can read.

        As in Java, `value` must be a string; otherwise this raises ConfigurationError. A reserved
        name is refused when the message is sent.
        """
        if not isinstance(value, str):
            raise ConfigurationError(
                f"the value of the property {name!r} must be a string, got {value!r}.",
                fix=f"Pass a string: {str(value)!r}.",
            )
        self.properties[name] = value

    def get_user_property(self, name: str) -> str | None:
        """Return the value of a property, or None if the message does not have it."""
        return self.properties.get(name)

    def __repr__(self) -> str:
        return (
            f"Message(topic={self.topic!r}, tags={self.tags!r}, keys={self.keys!r}, "
            f"body={_short(self.body)}, properties={self.properties!r})"
        )

    def to_model(self) -> ModelMessage:
        """Return the message as the immutable `Message` of the other clients.

        Later changes of this message do not change the result.
        """
        return ModelMessage(
            topic=self.topic,
            body=self.body,
            tag=self.tags,
            keys=tuple(self.keys.split()),
            properties=dict(self.properties),
            flag=self.flag,
            wait_store_ok=self.wait_store_msg_ok,
            sharding_key=self.sharding_key,
            delay_level=self.delay_time_level,
            delay_ms=self.delay_time_ms,
            deliver_at_ms=self.deliver_time_ms,
        )


def _bind_positional(topic: str, positional: tuple[Any, ...]) -> tuple[Any, Any, int, bytes, bool]:
    """Assign the positional arguments after the topic to the parameters of a Java constructor.

    Returns (tags, keys, flag, body, wait_store_msg_ok). `positional` has two or more arguments;
    their number decides which constructor it is. Raises ConfigurationError if there is none, or if
    an argument has a wrong type.
    """
    overload_by_length = {len(overload): overload for overload in _MESSAGE_OVERLOADS}
    parameters = overload_by_length.get(len(positional))
    if parameters is None:
        raise ConfigurationError(
            f"Message takes up to 4, or 6, positional arguments, got {len(positional) + 1}.",
            fix="Pass topic and body, with tags, keys and flag before the body, or use keywords.",
        )
    argument_by_name = dict(zip(parameters, positional, strict=True))
    for name, argument in argument_by_name.items():
        is_bool_flag = name == "flag" and isinstance(argument, bool)
        if not isinstance(argument, _ARGUMENT_TYPES[name]) or is_bool_flag:
            hint = " Encode a string with .encode()." if name == "body" else ""
            raise ConfigurationError(
                f"Message({topic!r}, …) got {argument!r} as {name}.",
                fix=f"The order is ({', '.join(('topic', *parameters))}).{hint}",
            )
    return (
        argument_by_name["tags"],
        argument_by_name.get("keys"),
        argument_by_name.get("flag", 0),
        argument_by_name["body"],
        argument_by_name.get("wait_store_msg_ok", True),
    )


def _short(body: bytes) -> str:
    """Return the repr of a body, cut if it has more than 64 bytes."""
    return repr(body) if len(body) <= 64 else f"{body[:61]!r}… {len(body)} B"


class MessageExt(StrictAttributes):
    """A message that was received from a broker. `record` is its `sluicemq.StoredMessage`.

    Times (`born_timestamp`, `store_timestamp`) are milliseconds since 1970. `queue_offset` is the
    offset in the queue, `commit_log_offset` the position in the commit log of the broker, and
    `store_size` the size of the record in bytes. `raw_body` is the body as it is stored, possibly
    compressed. `msg_id` is the id that the producer assigned; `offset_msg_id` contains the address
    of the broker and the position instead.
    """

    __slots__ = ("_attempt", "_received", "record")

    def __init__(
        self, record: StoredMessage, attempt: int = 1, received: ReceivedMessage | None = None
    ) -> None:
        """Make a message from a stored record.

        `attempt` counts the deliveries by this process, from 1. `received` is the message of the
        asyncio consumer, None for a message that no consumer received.
        """
        self.record = record
        self._attempt = attempt
        self._received = received

    tags: str | None = record_attribute("tag")
    raw_body: bytes = record_attribute("raw_body")
    flag: int = record_attribute("flag")
    msg_id: str = record_attribute("message_id")
    offset_msg_id: str = record_attribute("offset_message_id")
    transaction_id: str = record_attribute("message_id")
    queue_id: int = record_attribute("queue_id")
    broker_name: str = record_attribute("broker")
    queue_offset: int = record_attribute("queue_offset")
    commit_log_offset: int = record_attribute("physical_offset")
    store_size: int = record_attribute("size_bytes")
    born_timestamp: int = record_attribute("born_time_ms")
    store_timestamp: int = record_attribute("store_time_ms")

    @property
    def body(self) -> bytes:
        """The body that the producer sent.

        Reading it raises UndecodableBodyError if it is stored compressed and cannot be decoded.
        """
        return (self._received or self.record).body

    @property
    def body_error(self) -> UndecodableBodyError | None:
        """The error that reading `body` raises, or None if the body can be read."""
        return (self._received or self.record).body_error

    @property
    def topic(self) -> str:
        """The topic that the message was sent to, also if it comes from the retry topic."""
        return original_topic(self.record)

    @property
    def keys(self) -> str:
        """The keys, separated by spaces."""
        return " ".join(self.record.keys)

    @property
    def born_host(self) -> str:
        """The address of the producer, as "host:port"."""
        return str(self.record.born_host)

    @property
    def store_host(self) -> str:
        """The address of the broker that stored the message, as "host:port"."""
        return str(self.record.store_host)

    @property
    def reconsume_times(self) -> int:
        """The number of redeliveries so far, by the broker and within this process; 0 at first."""
        return self.record.reconsume_times + self._attempt - 1

    @property
    def properties(self) -> dict[str, str]:
        """A copy of all properties, including those that RocketMQ has set."""
        return dict(self.record.properties)

    get_topic = Getter[str]()
    get_tags = Getter[str | None]()
    get_keys = Getter[str]()
    get_body = Getter[bytes]()
    get_flag = Getter[int]()
    get_msg_id = Getter[str]()
    get_offset_msg_id = Getter[str]()
    get_transaction_id = Getter[str]()
    get_queue_id = Getter[int]()
    get_broker_name = Getter[str]()
    get_queue_offset = Getter[int]()
    get_commit_log_offset = Getter[int]()
    get_store_size = Getter[int]()
    get_born_timestamp = Getter[int]()
    get_born_host = Getter[str]()
    get_store_timestamp = Getter[int]()
    get_store_host = Getter[str]()
    get_reconsume_times = Getter[int]()
    get_properties = Getter[dict[str, str]]()

    def get_user_property(self, name: str) -> str | None:
        """Return the value of a property, or None if the message does not have it."""
        return self.record.properties.get(name)

    get_property = get_user_property

    def __repr__(self) -> str:
        return (
            f"MessageExt(topic={self.topic!r}, tags={self.tags!r}, keys={self.keys!r}, "
            f"body={_short(self.record.body_or_raw)}, msg_id={self.msg_id!r}, "
            f"broker_name={self.broker_name!r}, queue_id={self.queue_id}, "
            f"queue_offset={self.queue_offset}, reconsume_times={self.reconsume_times}, "
            f"properties={settable_properties(self.record.properties)!r})"
        )


@dataclass(frozen=True, slots=True)
class SendResult(StrictAttributes):
    """The result of sending one message.

    `msg_id` is the id that this client assigned, and `offset_msg_id` contains the address of the
    broker and the position in its commit log. `queue_offset` is the offset in `message_queue`.
    `recall_handle` is the argument of `recall_message`; only timed messages have one.
    """

    send_status: SendStatus
    msg_id: str
    offset_msg_id: str
    message_queue: MessageQueue
    queue_offset: int
    recall_handle: str | None = None

    get_send_status = Getter[SendStatus]()
    get_msg_id = Getter[str]()
    get_offset_msg_id = Getter[str]()
    get_message_queue = Getter[MessageQueue]()
    get_queue_offset = Getter[int]()
    get_recall_handle = Getter[str | None]()

    @classmethod
    def from_core(cls, core_result: CoreSendResult, **fields: Any) -> Self:
        """Convert a result of the asyncio client, and return it.

        `fields` are the values of the fields that a subclass adds.
        """
        return cls(
            send_status=SendStatus(core_result.status.value),
            msg_id=core_result.message_id,
            offset_msg_id=core_result.offset_message_id,
            message_queue=MessageQueue(*core_result.queue),
            queue_offset=core_result.queue_offset,
            recall_handle=core_result.recall_handle,
            **fields,
        )


@dataclass(frozen=True, slots=True)
class TransactionSendResult(SendResult):
    """The result of sending a prepared message, with the id and the state of its transaction."""

    transaction_id: str = ""
    local_transaction_state: LocalTransactionState = LocalTransactionState.UNKNOW

    get_transaction_id = Getter[str]()
    get_local_transaction_state = Getter[LocalTransactionState]()


@dataclass(frozen=True, slots=True)
class PullResult(StrictAttributes):
    """The result of a pull.

    `next_begin_offset` is the offset for the next pull. The queue has the offsets from `min_offset`
    up to, not including, `max_offset`. `msg_found_list` is empty unless `pull_status` is FOUND.
    """

    pull_status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    msg_found_list: list[MessageExt]

    get_pull_status = Getter[PullStatus]()
    get_next_begin_offset = Getter[int]()
    get_min_offset = Getter[int]()
    get_max_offset = Getter[int]()
    get_msg_found_list = Getter[list[MessageExt]]()

    @staticmethod
    def from_core(core_result: CorePullResult) -> "PullResult":
        """Convert a result of the asyncio client, and return it."""
        return PullResult(
            pull_status=core_result.status,
            next_begin_offset=core_result.next_offset,
            min_offset=core_result.offset_min,
            max_offset=core_result.offset_max,
            msg_found_list=[MessageExt(record) for record in core_result.messages],
        )


@dataclass(frozen=True, slots=True)
class QueryResult(StrictAttributes):
    """The messages that have a key, the newest first."""

    message_list: list[MessageExt]

    get_message_list = Getter[list[MessageExt]]()
