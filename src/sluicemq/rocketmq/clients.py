"""Messages, results and choices in RocketMQ's words, and the producers: `start`, use, `shutdown`;
every method blocks.

    producer.send(message, selector=SelectMessageQueueByHash(), arg=order_id)

The same argument leads to the same queue as with the Java class, as long as the topic has as many
queues: text and whole numbers are hashed as Java hashes them.

    class Listener(TransactionListener):
        def execute_local_transaction(self, message, arg):
            return LocalTransactionState.COMMIT_MESSAGE
        def check_local_transaction(self, message):
            return LocalTransactionState.UNKNOW

    producer = TransactionMQProducer("my_group")
    producer.set_transaction_listener(Listener())

The local transaction runs in the caller's thread, checks in threads of their own.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar

from sluicemq.client.aio.producer import Producer, Transaction
from sluicemq.client.aio.pull import PullResult as CorePullResult
from sluicemq.client.aio.received import of_record
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core import transactions as core
from sluicemq.client.core.consuming import first_topic
from sluicemq.client.core.requests import PullStatus
from sluicemq.client.core.requests import SendResult as CoreSendResult
from sluicemq.client.core.transactions import TransactionState
from sluicemq.client.threaded import Portal, blocking
from sluicemq.errors import ClosedError, ConfigurationError, RouteNotFoundError, SluiceError
from sluicemq.model import message as model
from sluicemq.model.ids import java_hash
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import SQL92, TAG
from sluicemq.model.topic import MessageQueue
from sluicemq.net.tls import Tls

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_log = logging.getLogger("sluicemq.client")


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


def sets(name: str) -> Callable[[Any, Any], None]:
    """A setter: RocketMQ's way to say `object.name = value`."""
    return lambda owner, value: setattr(owner, name, value)


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

    set_tags = sets("tags")
    set_flag = sets("flag")
    set_wait_store_msg_ok = sets("wait_store_msg_ok")
    set_delay_time_level = sets("delay_time_level")
    set_delay_time_ms = sets("delay_time_ms")
    set_deliver_time_ms = sets("deliver_time_ms")

    def set_keys(self, keys: str) -> None:
        """Several keys are separated by spaces."""
        self.keys = keys.split()

    def set_body(self, body: bytes | str) -> None:
        self.body = body.encode() if isinstance(body, str) else bytes(body)

    def set_delay_time_sec(self, seconds: int) -> None:
        self.delay_time_ms = seconds * 1000

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
    """A received message in RocketMQ's words; `record` is SluiceMQ's own value."""

    __slots__ = ("_attempt", "record")

    def __init__(self, record: StoredMessage, attempt: int = 1) -> None:
        self.record = record
        self._attempt = attempt

    tags: str | None = of_record("tag")
    body: bytes = of_record("body")
    flag: int = of_record("flag")
    msg_id: str = of_record("message_id")
    offset_msg_id: str = of_record("offset_message_id")
    transaction_id: str = of_record("message_id")
    queue_id: int = of_record("queue_id")
    broker_name: str = of_record("broker")
    queue_offset: int = of_record("queue_offset")
    born_timestamp: int = of_record("born_time_ms")
    store_timestamp: int = of_record("store_time_ms")

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
        if isinstance(arg, str):
            hashed = java_hash(arg)
        elif not isinstance(arg, int) or not -(2**63) <= arg < 2**63:
            raise ConfigurationError(
                f"the selector's argument is {arg!r}.", cure="Use a text or a whole number."
            )
        elif -(2**31) <= arg < 2**31:
            hashed = int(arg)
        else:
            hashed = (arg ^ (arg >> 32)) & 0xFFFFFFFF
            hashed -= (1 << 32) if hashed & 0x80000000 else 0
        return queues[abs(hashed) % len(queues)]


class Client(Generic[T]):
    """`set_namesrv_addr`, `start`, `shutdown` of every class here, which has an asyncio client on a
    loop of its own; the second and third argument switch traces on, as in Java: True, and perhaps a
    topic."""

    def __init__(
        self,
        group: str,
        enable_msg_trace: bool = False,
        customized_trace_topic: str | None = None,
        *,
        namesrv_addr: str | None = None,
        credentials: tuple[str, str] | None = None,
        tls: Tls | bool | None = None,
    ) -> None:
        """`namesrv_addr`: `host:port;host:port`; without it NAMESRV_ADDR, or this machine."""
        self.group = group
        self._trace = (customized_trace_topic or True) if enable_msg_trace else False
        self._name_servers = namesrv_addr
        self._credentials = credentials
        self._tls = tls
        self._portal: Portal | None = None
        self._sluice: Sluice | None = None
        self._client: T | None = None

    instance_name = "DEFAULT"
    """Two broadcasting consumers of one group on one machine need two."""
    offsets_directory: str | None = None
    set_namesrv_addr = sets("_name_servers")
    set_instance_name = sets("instance_name")
    set_use_tls = sets("_tls")

    def set_credentials(self, access_key: str, secret_key: str) -> None:
        """Signs every request."""
        self._credentials = (access_key, secret_key)

    def start(self) -> None:
        """Begins to work; once."""
        if self._portal is not None:
            raise ConfigurationError("this client runs already.", cure="Call start() once.")
        self._portal = Portal(f"sluicemq {self.group}")
        try:
            self._sluice = self._portal.run(
                Sluice,
                self._name_servers,
                credentials=self._credentials,
                trace=self._trace,
                tls=self._tls,
                instance=self.instance_name,
                offsets_directory=self.offsets_directory,
            )
            self._client = self._portal.call(self._make(self._sluice))
        except BaseException:
            self.shutdown()
            raise

    async def _make(self, sluice: Sluice) -> T:
        """The asyncio client, on its loop."""
        raise NotImplementedError

    def _run(
        self, method: Callable[Concatenate[T, P], Awaitable[R]], *given: P.args, **named: P.kwargs
    ) -> R:
        """Calls a method of the asyncio client, and waits."""
        portal, client = self._on_loop()
        return portal.run(method, client, *given, **named)

    def _on_loop(self) -> tuple[Portal, T]:
        if self._portal is None or self._client is None:
            raise ClosedError("this client does not run.", cure="Call start() first.")
        return self._portal, self._client

    def shutdown(self) -> None:
        """Settles, commits, leaves, closes. Safe to call twice."""
        portal, self._portal = self._portal, None
        if portal is not None:
            try:
                if self._sluice is not None:
                    portal.call(self._sluice.close())
            finally:
                portal.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


class DefaultMQProducer(Client[Producer]):
    """Sends messages. `send` waits; with `callback` it returns at once; a list is a batch."""

    send_msg_timeout_ms = 10_000
    retry_times_when_send_failed = 2
    retry_times_when_send_async_failed = 0
    retry_another_broker_when_not_store_ok = False
    compress_msg_body_over_howmuch = 4096

    def __init__(
        self, producer_group: str = "DEFAULT_PRODUCER", *trace: Any, **options: Any
    ) -> None:
        super().__init__(producer_group, *trace, **options)

    async def _make(self, sluice: Sluice) -> Producer:
        return sluice.producer(self.group, **self._options())

    def _options(self) -> dict[str, Any]:
        return {
            "timeout_ms": self.send_msg_timeout_ms,
            "retries": self.retry_times_when_send_failed,
            "retries_async": self.retry_times_when_send_async_failed,
            "retry_unsafe": self.retry_another_broker_when_not_store_ok,
            "compress_from_bytes": self.compress_msg_body_over_howmuch,
        }

    fetch_publish_message_queues = blocking(Producer.queues)

    def recall_message(self, topic: str, recall_handle: str) -> str:
        """Takes a timed message back; returns its id. The topic stands in the handle as well."""
        return self._run(Producer.recall, recall_handle)

    def send(
        self,
        message: Message | Sequence[Message],
        *,
        queue: MessageQueue | None = None,
        selector: Callable[[Sequence[MessageQueue], Message, Any], MessageQueue] | None = None,
        arg: Any = None,
        timeout_ms: int | None = None,
    ) -> SendResult:
        """Sends and waits; for a list (a batch) the result is that of its first message."""
        options: dict[str, Any] = {"queue": queue, "timeout_ms": timeout_ms}
        if not isinstance(message, Message):
            frozen = [one.frozen() for one in message]
            return SendResult.of(self._run(Producer.send_batch, frozen, **options)[0])
        if selector is not None:
            choose = selector
            options["selector"] = lambda queues, _: choose(queues, message, arg)
        return SendResult.of(self._run(Producer.send, message.frozen(), **options))

    def send_async(
        self,
        message: Message,
        on_success: Callable[[SendResult], None],
        on_exception: Callable[[SluiceError], None],
        *,
        timeout_ms: int | None = None,
    ) -> None:
        """Returns at once; one of the two is called later, on the client's thread."""
        portal, producer = self._on_loop()

        def done(result: CoreSendResult | None, error: SluiceError | None) -> None:
            if result is not None:
                on_success(SendResult.of(result))
            elif error is not None:
                on_exception(error)

        portal.run(producer.send_soon, done, message.frozen(), timeout_ms=timeout_ms)

    def send_oneway(self, message: Message) -> None:
        """Does not wait for the broker: the message may get lost."""
        self._run(Producer.send_oneway, message.frozen())

    def request(self, message: Message, timeout_ms: int = 3000) -> Message:
        """Sends a request and waits for its reply. Raises RequestTimeoutError."""
        reply = self._run(Producer.request, message.frozen(), timeout_s=timeout_ms / 1000)
        made = Message(reply.topic, reply.body, tags=reply.tag, keys=reply.keys)
        made.properties = dict(reply.properties)
        return made

    def reply(self, request: MessageExt, body: bytes | str) -> None:
        """Answers a message that a listener got: Java's `send(createReplyMessage(request, body))`.
        Returns when the requester has it. Raises ConfigurationError when nobody asked."""
        portal, _ = self._on_loop()
        data = body.encode() if isinstance(body, str) else body
        assert self._sluice is not None
        message_id = f"{request.msg_id}R"
        portal.call(self._sluice.cluster.send_reply(request.record, data, message_id))

    def create_topic(self, topic: str, queue_num: int = 8) -> None:
        """Creates a topic on every master."""
        portal, _ = self._on_loop()
        assert self._sluice is not None
        portal.call(self._sluice.admin.create_topic(topic, queues=queue_num))


class LocalTransactionState(Enum):
    """How a local transaction stands, in RocketMQ's spelling."""

    COMMIT_MESSAGE = "commit"
    ROLLBACK_MESSAGE = "rollback"
    UNKNOW = "unknown"


_STATES: Final = {
    LocalTransactionState.COMMIT_MESSAGE: TransactionState.COMMIT,
    LocalTransactionState.ROLLBACK_MESSAGE: TransactionState.ROLLBACK,
    LocalTransactionState.UNKNOW: TransactionState.UNKNOWN,
}
_NAMES: Final = {state: name for name, state in _STATES.items()}


class TransactionListener(ABC):
    """Runs local transactions and says how they ended; None counts as UNKNOW."""

    @abstractmethod
    def execute_local_transaction(
        self, message: Message, arg: Any
    ) -> LocalTransactionState | None: ...

    @abstractmethod
    def check_local_transaction(self, message: MessageExt) -> LocalTransactionState | None: ...


@dataclass(frozen=True, slots=True)
class TransactionSendResult:
    """What became of the half message, and how the local transaction ended."""

    send_result: SendResult
    transaction_id: str
    local_transaction_state: LocalTransactionState


class _Checks(core.TransactionListener):
    """RocketMQ's listener as the asyncio producer asks it."""

    def __init__(self, listener: TransactionListener) -> None:
        self._listener = listener

    async def check(self, message: StoredMessage) -> TransactionState | None:
        found = MessageExt(message)
        state = await asyncio.to_thread(self._listener.check_local_transaction, found)
        return _state(state)


def _state(state: LocalTransactionState | None) -> TransactionState:
    return TransactionState.UNKNOWN if state is None else _STATES[state]


class TransactionMQProducer(DefaultMQProducer):
    """A producer of messages that become visible when a local transaction commits."""

    _listener: TransactionListener | None = None
    set_transaction_listener = sets("_listener")

    def _options(self) -> dict[str, Any]:
        if self._listener is None:
            raise ConfigurationError(
                "the producer has no TransactionListener.",
                cure="Call set_transaction_listener before start.",
            )
        return {**super()._options(), "listener": _Checks(self._listener)}

    async def _make(self, sluice: Sluice) -> Producer:
        producer = await super()._make(sluice)
        with contextlib.suppress(RouteNotFoundError):  # the first send makes it known
            await producer.answer_checks()
        return producer

    def send_message_in_transaction(
        self, message: Message, arg: Any = None
    ) -> TransactionSendResult:
        """Stores the half message, executes the local transaction, commits or rolls back."""
        portal, producer = self._on_loop()
        assert self._listener is not None

        async def begin() -> Transaction:
            return await producer.transaction(message.frozen()).__aenter__()

        transaction = portal.call(begin())
        message.transaction_id = transaction.transaction_id
        try:
            transaction.state = _state(self._listener.execute_local_transaction(message, arg))
        except Exception:  # noqa: BLE001 -- the listener's own code: the broker will ask
            _log.exception("the local transaction %s failed", transaction.transaction_id)
            transaction.unknown()
        portal.call(transaction.__aexit__(None, None, None))
        assert transaction.send_result is not None
        return TransactionSendResult(
            SendResult.of(transaction.send_result),
            transaction.transaction_id,
            _NAMES[transaction.state],
        )
