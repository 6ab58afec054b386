"""Messages, results and choices in RocketMQ's words."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from sluicemq.client.aio.pull import PullResult as CorePullResult
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.core.answers import PullStatus
from sluicemq.client.core.answers import SendResult as CoreSendResult
from sluicemq.errors import ConfigurationError
from sluicemq.model import message as model
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


class MessageExt:
    """A received message in RocketMQ's words."""

    __slots__ = ("_received",)

    def __init__(self, received: ReceivedMessage) -> None:
        self._received = received

    @property
    def record(self) -> StoredMessage:
        """The same as SluiceMQ's own value."""
        return self._received.record

    @property
    def topic(self) -> str:
        return self._received.topic

    @property
    def tags(self) -> str | None:
        return self._received.tag

    @property
    def keys(self) -> str:
        return " ".join(self._received.keys)

    @property
    def body(self) -> bytes:
        return self._received.body

    @property
    def flag(self) -> int:
        return self._received.flag

    @property
    def msg_id(self) -> str:
        return self._received.message_id

    @property
    def offset_msg_id(self) -> str:
        return self._received.offset_message_id

    @property
    def transaction_id(self) -> str:
        """The id of the transaction that it was sent in: that of the message."""
        return self._received.message_id

    @property
    def queue_id(self) -> int:
        return self._received.queue.queue_id

    @property
    def broker_name(self) -> str:
        return self._received.queue.broker

    @property
    def queue_offset(self) -> int:
        return self._received.queue_offset

    @property
    def born_timestamp(self) -> int:
        return self._received.born_time_ms

    @property
    def born_host(self) -> str:
        return str(self._received.born_host)

    @property
    def store_timestamp(self) -> int:
        return self._received.store_time_ms

    @property
    def reconsume_times(self) -> int:
        """Redeliveries by the broker and by this process."""
        return self._received.reconsume_times + self._received.attempt - 1

    def get_user_property(self, name: str) -> str | None:
        return self._received.properties.get(name)

    @property
    def properties(self) -> dict[str, str]:
        return dict(self._received.properties)

    def __repr__(self) -> str:
        return repr(self._received)


class Nowhere:
    """The origin of a message that no queue delivered."""

    group = ""

    def ack(self, generation: int, offset: int) -> bool:
        return False

    def owns(self, generation: int) -> bool:
        return False

    async def reject(
        self, message: ReceivedMessage, delay_level: int | None, suspend_s: float | None
    ) -> bool:
        return False

    async def reply(self, record: StoredMessage, body: bytes, message_id: str) -> object:
        raise ConfigurationError(
            "this message was not delivered by a group: nobody waits for an answer.",
            cure="Answer what a push or lite pull consumer gets.",
        )

    def taken(self, record: StoredMessage) -> None:
        return None


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
        found = [MessageExt(ReceivedMessage(record, Nowhere(), 0)) for record in result.messages]
        return PullResult(
            result.status, result.next_offset, result.offset_min, result.offset_max, list(found)
        )
