"""Producers in RocketMQ's words: `start`, use, `shutdown`; every method blocks.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, Self, TypeVar

from sluicemq.client.aio.producer import Producer, Transaction
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core import transactions as core
from sluicemq.client.core.answers import SendResult as CoreSendResult
from sluicemq.client.core.transactions import TransactionState
from sluicemq.client.threaded import Portal, blocking
from sluicemq.errors import ClosedError, ConfigurationError, RouteNotFoundError, SluiceError
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import MessageQueue
from sluicemq.net.tls import Tls
from sluicemq.rocketmq.values import Message, MessageExt, SendResult

T = TypeVar("T")
_log = logging.getLogger("sluicemq.client")


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
        self.group = group
        self._trace = (customized_trace_topic or True) if enable_msg_trace else False
        self._name_servers = namesrv_addr
        self._credentials = credentials
        self._tls = tls
        self._portal: Portal | None = None
        self._sluice: Sluice | None = None
        self._client: T | None = None
        self.instance_name = "DEFAULT"
        self.offsets_directory: str | None = None

    def set_namesrv_addr(self, address: str) -> None:
        """`host:port;host:port`; without it NAMESRV_ADDR, or this machine."""
        self._name_servers = address

    def set_instance_name(self, name: str) -> None:
        """Two broadcasting consumers of one group on one machine need two."""
        self.instance_name = name

    def set_credentials(self, access_key: str, secret_key: str) -> None:
        """Signs every request."""
        self._credentials = (access_key, secret_key)

    def set_use_tls(self, tls: Tls | bool) -> None:
        """TLS to name servers and brokers: True, or a `Tls` with its files."""
        self._tls = tls

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

    def __init__(
        self, producer_group: str = "DEFAULT_PRODUCER", *trace: Any, **options: Any
    ) -> None:
        super().__init__(producer_group, *trace, **options)
        self.send_msg_timeout_ms = 10_000
        self.retry_times_when_send_failed = 2
        self.retry_times_when_send_async_failed = 0
        self.compress_msg_body_over_howmuch = 4096

    async def _make(self, sluice: Sluice) -> Producer:
        return sluice.producer(self.group, **self._options())

    def _options(self) -> dict[str, Any]:
        return {
            "timeout_ms": self.send_msg_timeout_ms,
            "retries": self.retry_times_when_send_failed,
            "retries_async": self.retry_times_when_send_async_failed,
            "compress_from_bytes": self.compress_msg_body_over_howmuch,
        }

    fetch_publish_message_queues = blocking(Producer.queues)

    def recall_message(self, topic: str, recall_handle: str) -> str:
        """Takes a timed message back; returns its id. The topic stands in the handle as well."""
        portal, producer = self._on_loop()
        return portal.call(producer.recall(recall_handle))

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
        portal, producer = self._on_loop()
        if not isinstance(message, Message):
            frozen = [one.frozen() for one in message]
            results = portal.call(producer.send_batch(frozen, queue=queue, timeout_ms=timeout_ms))
            return SendResult.of(results[0])
        options: dict[str, Any] = {"queue": queue, "timeout_ms": timeout_ms}
        if selector is not None:
            choose = selector
            options["selector"] = lambda queues, _: choose(queues, message, arg)
        return SendResult.of(portal.call(producer.send(message.frozen(), **options)))

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
        portal, producer = self._on_loop()
        portal.call(producer.send_oneway(message.frozen()))

    def request(self, message: Message, timeout_ms: int = 3000) -> Message:
        """Sends a request and waits for its reply. Raises RequestTimeoutError."""
        portal, producer = self._on_loop()
        reply = portal.call(producer.request(message.frozen(), timeout_s=timeout_ms / 1000))
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

    def __init__(
        self, producer_group: str = "DEFAULT_PRODUCER", *trace: Any, **options: Any
    ) -> None:
        super().__init__(producer_group, *trace, **options)
        self._listener: TransactionListener | None = None

    def set_transaction_listener(self, listener: TransactionListener) -> None:
        """Before `start`."""
        self._listener = listener

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
