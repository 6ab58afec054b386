"""Messages, queues, results and choices in RocketMQ's words.

A `Message` is made as in Java, by position, or by name:

    Message("orders", b"41 books")
    Message("orders", "paid", b"41 books")                      # topic, tags, body
    Message("orders", "paid", "order-7", b"41 books")           # topic, tags, keys, body
    Message("orders", "paid", "order-7", 0, b"41 books", True)  # … flag, body, wait_store_msg_ok
    Message("orders", "41 books", tags="paid", keys="order-7")

Attributes have the names of Java's getters: `message.tags` and `message.get_tags()` are the same.
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
from sluicemq.model import message as model
from sluicemq.model import topic as places
from sluicemq.model.message import StoredMessage
from sluicemq.model.properties import settable_properties
from sluicemq.model.subscription import SQL92, TAG
from sluicemq.rocketmq.names import Gets, Sets, Strict


class Word(Enum):
    """A constant that prints as it is written."""

    def __repr__(self) -> str:
        return str(self)


class SendStatus(Word):
    """How far a stored message got."""

    SEND_OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


class ConsumeConcurrentlyStatus(Word):
    """What a listener returns; None counts as success."""

    CONSUME_SUCCESS = 0
    RECONSUME_LATER = 1


class ConsumeOrderlyStatus(Word):
    """What an orderly listener returns; None counts as success."""

    SUCCESS = 0
    SUSPEND_CURRENT_QUEUE_A_MOMENT = 1


class ConsumeFromWhere(Word):
    """Where a group without a committed offset begins."""

    CONSUME_FROM_LAST_OFFSET = "last"
    CONSUME_FROM_FIRST_OFFSET = "first"
    CONSUME_FROM_TIMESTAMP = "timestamp"


class MessageModel(Word):
    """Whether a group shares the queues, or each of its consumers reads all."""

    CLUSTERING = "CLUSTERING"
    BROADCASTING = "BROADCASTING"


class LocalTransactionState(Word):
    """How a local transaction stands, in RocketMQ's spelling."""

    COMMIT_MESSAGE = "commit"
    ROLLBACK_MESSAGE = "rollback"
    UNKNOW = "unknown"


@dataclass(frozen=True, slots=True)
class MessageSelector:
    """An expression and its kind: `MessageSelector.by_sql("a > 3")`, `.by_tag("A || B")`."""

    expression: str
    expression_type: str = TAG

    @staticmethod
    def by_sql(expression: str) -> "MessageSelector":
        """By properties, in SQL92."""
        return MessageSelector(expression, SQL92)

    @staticmethod
    def by_tag(expression: str) -> "MessageSelector":
        """By tags; "*" wants all."""
        return MessageSelector(expression, TAG)


@total_ordering
class MessageQueue(Strict):
    """One queue of a topic at one broker; equal to, and sorted as, the `MessageQueue` of the other
    clients with the same values.

    `MessageQueue()` is filled by its setters, as in Java. Clients take the values that a queue has
    when it is given to them: a later change has no effect on them.
    """

    __slots__ = ("broker_name", "queue_id", "topic")

    topic: str
    broker_name: str
    queue_id: int

    @overload
    def __init__(self) -> None: ...

    @overload
    def __init__(self, other: "MessageQueue | places.MessageQueue", /) -> None: ...

    @overload
    def __init__(self, topic: str, broker_name: str, queue_id: int) -> None: ...

    def __init__(self, *given: Any, **named: Any) -> None:
        """Make a queue of its three values, a copy of another queue, or one without values for the
        setters. Raises ConfigurationError for anything else."""
        if len(given) == 1 and isinstance(given[0], MessageQueue | places.MessageQueue):
            given = tuple(given[0])
        values = dict(zip(_PARTS, given, strict=False)) | named
        if len(given) > len(_PARTS) or values.keys() - set(_PARTS) or 0 < len(values) < len(_PARTS):
            raise ConfigurationError(
                f"MessageQueue got {(*given, *named.values())!r}.",
                fix="Give topic, broker_name and queue_id, or nothing and call set_topic, "
                "set_broker_name and set_queue_id.",
            )
        self.topic = values.get("topic", "")
        self.broker_name = values.get("broker_name", "")
        self.queue_id = values.get("queue_id", 0)

    set_topic = Sets[str]()
    set_broker_name = Sets[str]()
    set_queue_id = Sets[int]()
    get_topic = Gets[str]()
    get_broker_name = Gets[str]()
    get_queue_id = Gets[int]()

    @property
    def broker(self) -> str:
        """The name of its broker, as the other clients call it."""
        return self.broker_name

    def __iter__(self) -> Iterator[Any]:
        return iter((self.topic, self.broker_name, self.queue_id))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MessageQueue | places.MessageQueue):
            return NotImplemented
        return tuple(self) == tuple(other)

    def __lt__(self, other: "MessageQueue | places.MessageQueue") -> bool:
        return tuple(self) < tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"MessageQueue({self.topic!r}, {self.broker_name!r}, {self.queue_id})"

    def __str__(self) -> str:
        return f"{self.topic}/{self.broker_name}/{self.queue_id}"


_PARTS: Final = ("topic", "broker_name", "queue_id")
Place = MessageQueue | places.MessageQueue
"""A queue as callers may give it: in RocketMQ's words, or one of the other clients."""


def frozen_queue(queue: Place) -> places.MessageQueue:
    """Return the queue as the asyncio client takes it, with the values of now. Raises
    ConfigurationError if one of them is missing or of another type."""
    if isinstance(queue, places.MessageQueue):
        return queue
    if not isinstance(queue, MessageQueue):
        raise ConfigurationError(f"the queue is {queue!r}.", fix="Give a MessageQueue.")
    for name in ("topic", "broker_name"):
        value = getattr(queue, name)
        if not isinstance(value, str) or not value:
            raise ConfigurationError(
                f"the {name} of {queue!r} is {value!r}.", fix=f"Call set_{name} with a name."
            )
    number = queue.queue_id
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ConfigurationError(
            f"the queue_id of {queue!r} is {number!r}.", fix="Call set_queue_id with 0 or more."
        )
    return places.MessageQueue(*queue)


def queues_of(queues: Iterable[Place]) -> list[MessageQueue]:
    """Return copies of the queues in RocketMQ's words."""
    return [MessageQueue(*queue) for queue in queues]


_FORMS: Final = (
    ("body",),
    ("tags", "body"),
    ("tags", "keys", "body"),
    ("tags", "keys", "flag", "body", "wait_store_msg_ok"),
)
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "tags": (str, type(None)),
    "keys": (str, type(None)),
    "flag": (int,),
    "body": (bytes, bytearray, memoryview),
    "wait_store_msg_ok": (bool,),
}


class Message(Strict):
    """A message under construction. By position a body is of bytes where tags stand before it, so
    that an exchange of the two is found."""

    __slots__ = (
        "body", "delay_time_level", "delay_time_ms", "deliver_time_ms", "flag", "keys",
        "properties", "sharding_key", "tags", "topic", "transaction_id", "wait_store_msg_ok",
    )  # fmt: skip

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
        self, topic: str, tags: str | None, keys: str | None, flag: int, body: bytes,
        wait_store_msg_ok: bool, /,
    ) -> None: ...  # fmt: skip

    def __init__(
        self,
        topic: str = "",
        *given: Any,
        body: bytes | str = b"",
        tags: str | None = None,
        keys: str | Sequence[str] | None = (),
        flag: int = 0,
        wait_store_msg_ok: bool = True,
    ) -> None:
        if len(given) == 1:
            (body,) = given
        elif given:
            tags, keys, flag, body, wait_store_msg_ok = _by_position(topic, given)
        self.topic = topic
        self.tags = tags or None
        self.flag = flag
        self.wait_store_msg_ok = wait_store_msg_ok
        self.properties: dict[str, str] = {}
        self.delay_time_level = 0
        self.sharding_key: str | None = None
        self.transaction_id = ""  # set when it is sent in a transaction
        self.delay_time_ms: int | None = None
        self.deliver_time_ms: int | None = None
        self.set_keys(keys or ())
        self.set_body(body)

    set_topic = Sets[str]()
    set_tags = Sets[str | None]()
    set_flag = Sets[int]()
    set_wait_store_msg_ok = Sets[bool]()
    set_delay_time_level = Sets[int]()
    set_delay_time_ms = Sets[int | None]()
    set_deliver_time_ms = Sets[int | None]()
    get_topic = Gets[str]()
    get_body = Gets[bytes]()
    get_tags = Gets[str | None]()
    get_keys = Gets[str]()
    get_flag = Gets[int]()
    get_properties = Gets[dict[str, str]]()
    get_delay_time_level = Gets[int]()
    get_transaction_id = Gets[str]()
    is_wait_store_msg_ok = Gets[bool]("wait_store_msg_ok")

    def set_keys(self, keys: str | Sequence[str]) -> None:
        """Several keys are separated by spaces, or a sequence."""
        self.keys = keys if isinstance(keys, str) else " ".join(keys)

    def set_body(self, body: bytes | str) -> None:
        """A text is sent as UTF-8."""
        self.body = body.encode() if isinstance(body, str) else bytes(body)

    def set_delay_time_sec(self, seconds: int) -> None:
        """Delivers it so many seconds after it is sent."""
        self.delay_time_ms = seconds * 1000

    def put_user_property(self, name: str, value: str) -> None:
        """For filters and consumers. Texts only, as in Java: `str(number)`."""
        if not isinstance(value, str):
            raise ConfigurationError(
                f"the property {name!r} would be {value!r}.", fix=f"Give a text: {str(value)!r}."
            )
        self.properties[name] = value

    def get_user_property(self, name: str) -> str | None:
        """None when it has no such property."""
        return self.properties.get(name)

    def __repr__(self) -> str:
        return (
            f"Message(topic={self.topic!r}, tags={self.tags!r}, keys={self.keys!r}, "
            f"body={_short(self.body)}, properties={self.properties!r})"
        )

    def frozen(self) -> model.Message:
        """The same as SluiceMQ's own value."""
        return model.Message(
            self.topic,
            self.body,
            self.tags,
            tuple(self.keys.split()),
            dict(self.properties),
            self.flag,
            self.wait_store_msg_ok,
            self.sharding_key,
            self.delay_time_level,
            self.delay_time_ms,
            self.deliver_time_ms,
        )


def _by_position(topic: str, given: tuple[Any, ...]) -> tuple[Any, Any, int, bytes, bool]:
    """(tags, keys, flag, body, wait_store_msg_ok) of Java's constructors with three and more."""
    form = next((form for form in _FORMS if len(form) == len(given)), None)
    if form is None:
        raise ConfigurationError(
            f"Message takes no {len(given) + 1} arguments.",
            fix="Give topic and body, with tags, keys and flag before the body, or by name.",
        )
    for name, value in zip(form, given, strict=True):
        if not isinstance(value, _KINDS[name]) or (name == "flag" and isinstance(value, bool)):
            hint = " A text becomes bytes by .encode()." if name == "body" else ""
            raise ConfigurationError(
                f"Message({topic!r}, …) got {value!r} as {name}.",
                fix=f"The order is ({', '.join(('topic', *form))}).{hint}",
            )
    named = dict(zip(form, given, strict=True))
    return (
        named["tags"], named.get("keys"), named.get("flag", 0), named["body"],
        named.get("wait_store_msg_ok", True),
    )  # fmt: skip


def _short(body: bytes) -> str:
    return repr(body) if len(body) <= 64 else f"{body[:61]!r}… {len(body)} B"


class MessageExt(Strict):
    """A received message in RocketMQ's words; `record` is SluiceMQ's own value."""

    __slots__ = ("_attempt", "_received", "record")

    def __init__(
        self, record: StoredMessage, attempt: int = 1, received: ReceivedMessage | None = None
    ) -> None:
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
        """The body that the producer sent. Raises UndecodableBodyError when it cannot be
        decoded."""
        return (self._received or self.record).body

    @property
    def body_error(self) -> UndecodableBodyError | None:
        """The error that reading `body` raises, None when the body can be read."""
        return (self._received or self.record).body_error

    @property
    def topic(self) -> str:
        """That it was sent to, also when it comes from the retry topic."""
        return original_topic(self.record)

    @property
    def keys(self) -> str:
        """Separated by spaces."""
        return " ".join(self.record.keys)

    @property
    def born_host(self) -> str:
        """Who sent it: host:port."""
        return str(self.record.born_host)

    @property
    def store_host(self) -> str:
        """Who stored it: host:port."""
        return str(self.record.store_host)

    @property
    def reconsume_times(self) -> int:
        """Redeliveries by the broker and by this process."""
        return self.record.reconsume_times + self._attempt - 1

    @property
    def properties(self) -> dict[str, str]:
        """The user's and the system's."""
        return dict(self.record.properties)

    get_topic = Gets[str]()
    get_tags = Gets[str | None]()
    get_keys = Gets[str]()
    get_body = Gets[bytes]()
    get_flag = Gets[int]()
    get_msg_id = Gets[str]()
    get_offset_msg_id = Gets[str]()
    get_transaction_id = Gets[str]()
    get_queue_id = Gets[int]()
    get_broker_name = Gets[str]()
    get_queue_offset = Gets[int]()
    get_commit_log_offset = Gets[int]()
    get_store_size = Gets[int]()
    get_born_timestamp = Gets[int]()
    get_born_host = Gets[str]()
    get_store_timestamp = Gets[int]()
    get_store_host = Gets[str]()
    get_reconsume_times = Gets[int]()
    get_properties = Gets[dict[str, str]]()

    def get_user_property(self, name: str) -> str | None:
        """None when it has no such property."""
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
class SendResult(Strict):
    """What became of a sent message."""

    send_status: SendStatus
    msg_id: str
    offset_msg_id: str
    message_queue: MessageQueue
    queue_offset: int
    recall_handle: str | None = None

    get_send_status = Gets[SendStatus]()
    get_msg_id = Gets[str]()
    get_offset_msg_id = Gets[str]()
    get_message_queue = Gets[MessageQueue]()
    get_queue_offset = Gets[int]()
    get_recall_handle = Gets[str | None]()

    @classmethod
    def of(cls, result: CoreSendResult, **more: Any) -> Self:
        """The same in RocketMQ's words; `more`: fields of a subclass."""
        return cls(
            SendStatus(result.status.value),
            result.message_id,
            result.offset_message_id,
            MessageQueue(*result.queue),
            result.queue_offset,
            result.recall_handle,
            **more,
        )


@dataclass(frozen=True, slots=True)
class TransactionSendResult(SendResult):
    """What became of the half message, and how the local transaction ended."""

    transaction_id: str = ""
    local_transaction_state: LocalTransactionState = LocalTransactionState.UNKNOW

    get_transaction_id = Gets[str]()
    get_local_transaction_state = Gets[LocalTransactionState]()


@dataclass(frozen=True, slots=True)
class PullResult(Strict):
    """What a pull brought, and where to go on."""

    pull_status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    msg_found_list: list[MessageExt]

    get_pull_status = Gets[PullStatus]()
    get_next_begin_offset = Gets[int]()
    get_min_offset = Gets[int]()
    get_max_offset = Gets[int]()
    get_msg_found_list = Gets[list[MessageExt]]()

    @staticmethod
    def of(result: CorePullResult) -> "PullResult":
        """The same in RocketMQ's words."""
        found = [MessageExt(record) for record in result.messages]
        return PullResult(
            result.status, result.next_offset, result.offset_min, result.offset_max, found
        )


@dataclass(frozen=True, slots=True)
class QueryResult(Strict):
    """The messages that bear a key, newest first; [] when none does."""

    message_list: list[MessageExt]

    get_message_list = Gets[list[MessageExt]]()
