"""Messages, results and choices in RocketMQ's words.

    producer.send(message, selector=SelectMessageQueueByHash(), arg=order_id)

The same argument leads to the same queue as with the Java class, as long as the topic has as many
queues: text and whole numbers are hashed as Java hashes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

from sluicemq.client.aio.pull import PullResult as CorePullResult
from sluicemq.client.core.answers import PullStatus
from sluicemq.client.core.answers import SendResult as CoreSendResult
from sluicemq.client.core.consuming import first_topic
from sluicemq.errors import ConfigurationError
from sluicemq.model import message as model
from sluicemq.model.ids import java_hash
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import SQL92, TAG
from sluicemq.model.topic import MessageQueue


class SendStatus(Enum):
    """How far a stored message got."""

    SEND_OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


class ConsumeConcurrentlyStatus(Enum):
    """What a listener returns; None counts as success."""

    CONSUME_SUCCESS = 0
    RECONSUME_LATER = 1


class ConsumeFromWhere(Enum):
    """Where a group without a committed offset begins."""

    CONSUME_FROM_LAST_OFFSET = "last"
    CONSUME_FROM_FIRST_OFFSET = "first"
    CONSUME_FROM_TIMESTAMP = "timestamp"


class MessageModel(Enum):
    """Whether a group shares the queues, or each of its consumers reads all."""

    CLUSTERING = "CLUSTERING"
    BROADCASTING = "BROADCASTING"


@dataclass(frozen=True, slots=True)
class MessageSelector:
    """An expression and its kind: `MessageSelector.by_sql("a > 3")`, `.by_tag("A || B")`."""

    expression: str
    expression_type: str = TAG

    @staticmethod
    def by_sql(expression: str) -> "MessageSelector":
        return MessageSelector(expression, SQL92)

    @staticmethod
    def by_tag(expression: str) -> "MessageSelector":
        return MessageSelector(expression, TAG)


class Message:
    """A message under construction."""

    def __init__(
        self,
        topic: str,
        body: bytes | str = b"",
        *,
        tags: str | None = None,
        keys: str | Sequence[str] = (),
    ) -> None:
        self.topic = topic
        self.body = body.encode() if isinstance(body, str) else bytes(body)
        self.tags = tags
        self.keys = keys.split() if isinstance(keys, str) else list(keys)
        self.properties: dict[str, str] = {}
        self.flag = 0
        self.wait_store_msg_ok = True
        self.delay_time_level = 0
        self.sharding_key: str | None = None
        self.transaction_id: str | None = None
        """Set when it is sent in a transaction."""
        self.delay_time_ms: int | None = None
        self.deliver_time_ms: int | None = None

    def set_tags(self, tags: str) -> None:
        self.tags = tags

    def set_keys(self, keys: str) -> None:
        """Several keys are separated by spaces."""
        self.keys = keys.split()

    def set_body(self, body: bytes | str) -> None:
        self.body = body.encode() if isinstance(body, str) else bytes(body)

    def set_flag(self, flag: int) -> None:
        self.flag = flag

    def set_wait_store_msg_ok(self, wait: bool) -> None:
        self.wait_store_msg_ok = wait

    def set_delay_time_level(self, level: int) -> None:
        self.delay_time_level = level

    def set_delay_time_sec(self, seconds: int) -> None:
        self.delay_time_ms = seconds * 1000

    def set_delay_time_ms(self, milliseconds: int) -> None:
        self.delay_time_ms = milliseconds

    def set_deliver_time_ms(self, time_ms: int) -> None:
        """Milliseconds since 1970."""
        self.deliver_time_ms = time_ms

    def put_user_property(self, name: str, value: str) -> None:
        self.properties[name] = value

    def frozen(self) -> model.Message:
        """The same as SluiceMQ's own value."""
        return model.Message(
            self.topic,
            self.body,
            self.tags,
            tuple(self.keys),
            dict(self.properties),
            self.flag,
            self.wait_store_msg_ok,
            self.sharding_key,
            self.delay_time_level,
            self.delay_time_ms,
            self.deliver_time_ms,
        )


def _of(path: str) -> Any:
    """A property: that attribute of the record."""
    return property(attrgetter(f"record.{path}"))


class MessageExt:
    """A received message in RocketMQ's words; `record` is SluiceMQ's own value."""

    __slots__ = ("_attempt", "record")

    def __init__(self, record: StoredMessage, attempt: int = 1) -> None:
        self.record = record
        self._attempt = attempt

    tags: str | None = _of("tag")
    body: bytes = _of("body")
    flag: int = _of("flag")
    msg_id: str = _of("message_id")
    offset_msg_id: str = _of("offset_message_id")
    transaction_id: str = _of("message_id")
    queue_id: int = _of("queue_id")
    broker_name: str = _of("broker")
    queue_offset: int = _of("queue_offset")
    born_timestamp: int = _of("born_time_ms")
    store_timestamp: int = _of("store_time_ms")

    @property
    def topic(self) -> str:
        """That it was sent to, also when it comes from the retry topic."""
        return first_topic(self.record)

    @property
    def keys(self) -> str:
        return " ".join(self.record.keys)

    @property
    def born_host(self) -> str:
        return str(self.record.born_host)

    @property
    def reconsume_times(self) -> int:
        """Redeliveries by the broker and by this process."""
        return self.record.reconsume_times + self._attempt - 1

    @property
    def properties(self) -> dict[str, str]:
        return dict(self.record.properties)

    def get_user_property(self, name: str) -> str | None:
        return self.record.properties.get(name)

    def __repr__(self) -> str:
        return (
            f"<message {self.msg_id} of {self.topic} queue {self.queue_id} "
            f"offset {self.queue_offset} {len(self.body)} B>"
        )


@dataclass(frozen=True, slots=True)
class SendResult:
    """What became of a sent message."""

    send_status: SendStatus
    msg_id: str
    offset_msg_id: str
    message_queue: MessageQueue
    queue_offset: int
    recall_handle: str | None = None

    @staticmethod
    def of(result: CoreSendResult) -> "SendResult":
        return SendResult(
            SendStatus(result.status.value),
            result.message_id,
            result.offset_message_id,
            result.queue,
            result.queue_offset,
            result.recall_handle,
        )


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull brought, and where to go on."""

    pull_status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    msg_found_list: list[MessageExt]

    @staticmethod
    def of(result: CorePullResult) -> "PullResult":
        found = [MessageExt(record) for record in result.messages]
        return PullResult(
            result.status, result.next_offset, result.offset_min, result.offset_max, found
        )


class SelectMessageQueueByHash:
    """The queue by the hash of `arg`: a text, or a whole number of 64 bits."""

    def __call__(self, queues: Sequence[MessageQueue], message: Message, arg: Any) -> MessageQueue:
        del message
        return queues[abs(_hash(arg)) % len(queues)]


def _hash(arg: Any) -> int:
    if isinstance(arg, str):
        return java_hash(arg)
    if not isinstance(arg, int) or not -(2**63) <= arg < 2**63:
        raise ConfigurationError(
            f"the selector's argument is {arg!r}.", cure="Use a text or a whole number."
        )
    if -(2**31) <= arg < 2**31:
        return int(arg)
    folded = (arg ^ (arg >> 32)) & 0xFFFFFFFF
    return folded - (1 << 32) if folded & 0x80000000 else folded
