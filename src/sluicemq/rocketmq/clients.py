"""What every class with RocketMQ's names has: `start`, use, `shutdown`; and the producers. Every
method blocks.

    producer.send(message)                            # waits
    producer.send(message, Callback())                # returns at once
    producer.send(message, SelectMessageQueueByHash(), order_id)
    producer.send([message, another])                 # a batch

    class Listener(TransactionListener):
        def execute_local_transaction(self, msg, arg):
            return LocalTransactionState.COMMIT_MESSAGE
        def check_local_transaction(self, msg):
            return LocalTransactionState.UNKNOW

    producer = TransactionMQProducer("my_group")
    producer.set_transaction_listener(Listener())

The local transaction runs in the caller's thread, checks in threads of their own, or in those of
`set_executor_service`. `send` takes Java's overloads by position and its options by name.
"""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import (
    Any,
    ClassVar,
    Concatenate,
    Final,
    Generic,
    ParamSpec,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from sluicemq.client.aio.cluster import Admin
from sluicemq.client.aio.producer import Producer, Transaction
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core import sending as core_sending
from sluicemq.client.core import transactions as core
from sluicemq.client.core.messages import expect_one_message
from sluicemq.client.core.requests import SendResult as CoreSendResult
from sluicemq.client.core.sending import choose_with_selector
from sluicemq.client.core.transactions import TransactionState
from sluicemq.client.tasks import call_listener, run_on_thread
from sluicemq.client.threaded import Portal
from sluicemq.errors import (
    ClosedError,
    ConfigurationError,
    RouteNotFoundError,
    SendUnknownError,
    SluiceError,
)
from sluicemq.model import topic as places
from sluicemq.model.ids import parse_recall_handle
from sluicemq.model.message import CHECK_IMMUNITY, StoredMessage
from sluicemq.model.topic import DEFAULT_TOPIC
from sluicemq.net.tls import Tls
from sluicemq.rocketmq.choices import (
    AclClientRPCHook,
    AllocateMessageQueueStrategy,
    MessageQueueSelector,
    Selector,
    SendCallback,
)
from sluicemq.rocketmq.messages import (
    LocalTransactionState,
    Message,
    MessageExt,
    MessageQueue,
    Place,
    QueryResult,
    SendResult,
    TransactionSendResult,
    frozen_queue,
    queues_of,
)
from sluicemq.rocketmq.names import Gets, Given, Sets, Settings

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_log = logging.getLogger("sluicemq.client")
Sent = Message | Sequence[Message]
_QUEUES: Final[tuple[type[Place], ...]] = (MessageQueue, places.MessageQueue)


class ClientOptions(TypedDict, total=False):
    """What every constructor takes by name. `namesrv_addr`: `host:port;host:port`; without it
    NAMESRV_ADDR, or this machine. `credentials`: (access key, secret key)."""

    namesrv_addr: str | None
    credentials: tuple[str, str] | None
    tls: Tls | bool | None


class Client(Settings, Generic[T]):
    """The life of every class here, which has an asyncio client on a loop of its own, and Java's
    MQAdmin: topics, offsets, stored messages."""

    @overload
    def __init__(
        self,
        group: str = ...,
        enable_msg_trace: bool = False,
        customized_trace_topic: str | None = None,
        **options: Unpack[ClientOptions],
    ) -> None: ...

    @overload
    def __init__(
        self,
        group: str,
        rpc_hook: AclClientRPCHook | None,
        enable_msg_trace: bool = False,
        customized_trace_topic: str | None = None,
        **options: Unpack[ClientOptions],
    ) -> None: ...

    @overload
    def __init__(
        self,
        group: str,
        rpc_hook: AclClientRPCHook | None,
        strategy: AllocateMessageQueueStrategy,
        /,
        enable_msg_trace: bool = False,
        customized_trace_topic: str | None = None,
        **options: Unpack[ClientOptions],
    ) -> None: ...

    @overload
    def __init__(self, rpc_hook: AclClientRPCHook, /, **options: Unpack[ClientOptions]) -> None: ...

    def __init__(
        self,
        group: Any = None,
        *given: Any,
        rpc_hook: AclClientRPCHook | None = None,
        enable_msg_trace: bool = False,
        customized_trace_topic: str | None = None,
        namesrv_addr: str | None = None,
        credentials: tuple[str, str] | None = None,
        tls: Tls | bool | None = None,
    ) -> None:
        """As in Java: a group, a hook that signs, who reads what (of push and lite pull consumers),
        whether traces are written and to which topic."""
        arguments = Given(group, *given)
        self.group = arguments.take(str) or self.group
        hook = arguments.take(AclClientRPCHook) or rpc_hook
        if strategy := arguments.take(AllocateMessageQueueStrategy):  # type: ignore[type-abstract]
            setattr(self, "allocate_message_queue_strategy", strategy)  # noqa: B010 - if it has one
        traces = arguments.take(bool)
        self.enable_msg_trace = enable_msg_trace if traces is None else traces
        topic = None if traces is None else arguments.take(str)
        self.customized_trace_topic = topic or customized_trace_topic
        arguments.end(
            type(self).__name__,
            "The order is: group, AclClientRPCHook (no other hook is supported), whether to trace, "
            "a topic for traces. A namespace stands before the names: 'prod%group'.",
        )
        self.namesrv_addr = namesrv_addr
        self.use_tls = tls
        self._credentials = credentials if hook is None else hook.session_credentials
        self._portal: Portal | None = None
        self._sluice: Sluice | None = None
        self._client: T | None = None

    group = ""
    namesrv_addr: str | None = None
    use_tls: Tls | bool | None = None
    enable_msg_trace = False
    customized_trace_topic: str | None = None
    instance_name = "DEFAULT"
    """Two broadcasting consumers of one group on one machine need two."""
    unit_name: str | None = None
    """Goes to the instance's name, as in Java."""
    offsets_directory: str | None = None
    set_namesrv_addr = Sets[str | None]()
    set_use_tls = Sets[Tls | bool | None]()
    set_enable_trace = Sets[bool]("enable_msg_trace")
    set_enable_msg_trace = Sets[bool]()
    set_trace_topic = Sets[str | None]("customized_trace_topic")
    set_customized_trace_topic = Sets[str | None]()
    set_instance_name = Sets[str]()
    set_unit_name = Sets[str | None]()
    get_namesrv_addr = Gets[str | None]()
    get_instance_name = Gets[str]()

    _at_any_time: ClassVar[frozenset[str]] = frozenset()
    """What may be set while it runs."""

    def _check(self, name: str, default: Any, value: Any) -> None:
        super()._check(name, default, value)
        if getattr(self, "_client", None) is not None and name not in self._at_any_time:
            raise ConfigurationError(
                f"{type(self).__name__} runs: {name} would change nothing.",
                fix="Set it before start().",
            )

    def set_credentials(self, access_key: str, secret_key: str) -> None:
        """Signs every request."""
        self._credentials = (access_key, secret_key)

    def set_vip_channel_enabled(self, vip_channel_enabled: bool) -> None:
        """Brokers are asked at their own port, never at the one two below. Raises
        ConfigurationError for True."""
        if vip_channel_enabled:
            raise ConfigurationError(
                "there is no VIP channel here.",
                fix="Leave it out: a broker serves the same at both ports.",
            )

    def start(self) -> None:
        """Begins to work; once."""
        if self._portal is not None:
            raise ConfigurationError("this client runs already.", fix="Call start() once.")
        self._portal = Portal(f"sluicemq {self.group}")
        unit = f"@{self.unit_name}" if self.unit_name else ""
        try:
            self._sluice = self._portal.run(
                Sluice,
                self.namesrv_addr,
                credentials=self._credentials,
                trace=(self.customized_trace_topic or True) if self.enable_msg_trace else False,
                tls=self.use_tls,
                instance=f"{self.instance_name}{unit}",
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

    def _ask(self, operation: Callable[[Admin], Coroutine[Any, Any, R]]) -> R:
        """An operation of the asyncio client's admin."""
        portal, _ = self._on_loop()
        assert self._sluice is not None
        return portal.call(operation(self._sluice.admin))

    def _on_loop(self) -> tuple[Portal, T]:
        if self._portal is None or self._client is None:
            raise ClosedError("this client does not run.", fix="Call start() first.")
        return self._portal, self._client

    def shutdown(self) -> None:
        """Settles, commits, leaves, closes. Safe to call twice."""
        portal, self._portal = self._portal, None
        if portal is not None:
            try:
                if self._sluice is not None:
                    portal.call_to_end(self._sluice.close)
            finally:
                portal.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = "running" if self._portal is not None else "not running"
        return f"<{type(self).__name__} {self.group} {state}>"

    # --------------------------------------------------------------------------- Java's MQAdmin

    @overload
    def create_topic(self, topic: str, queue_num: int = 8, /) -> None: ...

    @overload
    def create_topic(self, key: str, new_topic: str, queue_num: int, /) -> None: ...

    def create_topic(self, key: str, *given: Any) -> None:
        """Creates a topic on every master. Java's key may stand before it: TBW102, which means just
        that. Raises ConfigurationError for another key."""
        arguments = Given(*given)
        topic = arguments.take(str) or key
        queue_num = arguments.take(int) or 8
        if arguments.next is not None or (topic is not key and key != DEFAULT_TOPIC):
            raise ConfigurationError(
                f"create_topic cannot make {topic!r} of {(key, *given)}.",
                fix="Give the topic and how many queues it has; it is created on every master.",
            )
        self._ask(lambda admin: admin.create_topic(topic, queues=queue_num))

    def search_offset(self, mq: Place, timestamp: int) -> int:
        """The first offset stored at that time (ms since 1970) or later."""
        return self._ask(lambda admin: admin.offset_by_time(frozen_queue(mq), timestamp))

    def min_offset(self, mq: Place) -> int:
        """The first stored offset."""
        return self._ask(lambda admin: admin.offset_min(frozen_queue(mq)))

    def max_offset(self, mq: Place) -> int:
        """The offset that the next message will get."""
        return self._ask(lambda admin: admin.offset_max(frozen_queue(mq)))

    def earliest_msg_store_time(self, mq: Place) -> int:
        """When the oldest message there was stored, ms since 1970; -1 when there is none."""
        return self._ask(lambda admin: admin.earliest_time(frozen_queue(mq)))

    @overload
    def view_message(self, offset_msg_id: str, /) -> MessageExt: ...

    @overload
    def view_message(self, topic: str, msg_id: str, /) -> MessageExt: ...

    def view_message(self, first: str, msg_id: str | None = None) -> MessageExt:
        """The message with this id: `offset_msg_id`, or `msg_id` of a topic. Raises
        MessageNotFoundError."""
        topic, wanted = (None, first) if msg_id is None else (first, msg_id)
        return MessageExt(self._ask(lambda admin: admin.message_by_id(wanted, topic=topic)))

    def query_message(
        self, topic: str, key: str, max_num: int, begin: int, end: int
    ) -> QueryResult:
        """Up to `max_num` messages with the key, stored from `begin` to `end` (ms since 1970)."""
        found = self._ask(
            lambda admin: admin.messages_by_key(
                topic, key, begin_ms=begin, end_ms=end, count_max=max_num
            )
        )
        return QueryResult([MessageExt(record) for record in found])


class DefaultMQProducer(Client[Producer]):
    """Sends messages. Times are milliseconds. The settings hold from the next send on when they
    are set after start; `compress_msg_body_over_howmuch` has to be set before."""

    group = "DEFAULT_PRODUCER"
    send_msg_timeout = 10_000
    retry_times_when_send_failed = 2
    retry_times_when_send_async_failed = 0
    retry_another_broker_when_not_store_ok = False
    compress_msg_body_over_howmuch = 4096
    set_producer_group = Sets[str]("group")
    set_send_msg_timeout = Sets[int]()
    set_retry_times_when_send_failed = Sets[int]()
    set_retry_times_when_send_async_failed = Sets[int]()
    set_retry_another_broker_when_not_store_ok = Sets[bool]()
    set_compress_msg_body_over_howmuch = Sets[int]()
    get_producer_group = Gets[str]("group")
    get_send_msg_timeout = Gets[int]()
    get_retry_times_when_send_failed = Gets[int]()
    get_retry_times_when_send_async_failed = Gets[int]()

    _at_any_time = frozenset({
        "send_msg_timeout", "retry_times_when_send_failed", "retry_times_when_send_async_failed",
        "retry_another_broker_when_not_store_ok",
    })  # fmt: skip
    _checks: core.TransactionListener | None = None

    async def _make(self, sluice: Sluice) -> Producer:
        return sluice.producer(
            self.group,
            compress_from_bytes=self.compress_msg_body_over_howmuch,
            listener=self._checks,
        )

    def _tuned(self) -> tuple[Portal, Producer]:
        """The asyncio producer with the settings of now, and its loop."""
        portal, producer = self._on_loop()
        producer.sender.timeout_ms = self.send_msg_timeout
        producer.sender.retries = self.retry_times_when_send_failed
        producer.sender.retry_unsafe = self.retry_another_broker_when_not_store_ok
        return portal, producer

    def fetch_publish_message_queues(self, topic: str) -> list[MessageQueue]:
        """The queues that a message of the topic may go to. Raises RouteNotFoundError."""
        return queues_of(self._run(Producer.queues, topic))

    def recall_message(self, topic: str, recall_handle: str) -> str:
        """Take a timed message back, and return its id. Raises ConfigurationError if the handle is
        of a message of another topic, which stays."""
        handle = parse_recall_handle(recall_handle)
        if handle is not None and handle.topic != topic:
            raise ConfigurationError(
                f"the handle is of a message of topic {handle.topic!r}, the call names {topic!r}.",
                fix=f"Name the topic of the message: recall_message({handle.topic!r}, …).",
            )
        return self._run(Producer.recall, recall_handle)

    @overload
    def send(
        self,
        message: Sent,
        timeout: int | None = None,
        /,
        *,
        queue: Place | None = None,
        selector: Selector | None = None,
        arg: Any = None,
        timeout_ms: int | None = None,
    ) -> SendResult: ...

    @overload
    def send(self, message: Sent, queue: Place, timeout: int | None = None, /) -> SendResult: ...

    @overload
    def send(
        self, message: Message, selector: Selector, arg: Any, timeout: int | None = None, /
    ) -> SendResult: ...

    @overload
    def send(
        self, message: Sent, callback: SendCallback, timeout: int | None = None, /
    ) -> None: ...

    @overload
    def send(
        self, message: Sent, queue: Place, callback: SendCallback, timeout: int | None = None, /
    ) -> None: ...

    @overload
    def send(
        self, message: Message, selector: Selector, arg: Any, callback: SendCallback,
        timeout: int | None = None, /,
    ) -> None: ...  # fmt: skip

    def send(
        self,
        message: Sent,
        *given: Any,
        queue: Place | None = None,
        selector: Selector | None = None,
        arg: Any = None,
        timeout_ms: int | None = None,
    ) -> SendResult | None:
        """Sends and waits. With a callback it returns at once, and calls it later on the client's
        thread; a message that breaks a rule raises here. For a list (a batch) the result is that of
        its first message. Times are milliseconds."""
        arguments = Given(*given)
        place = arguments.take(*_QUEUES) or queue
        chosen = None if place is None else frozen_queue(place)
        if _selects(arguments.next):
            selector, arg = arguments.pair("a selector", "its argument")
        callback = arguments.take(SendCallback)  # type: ignore[type-abstract]
        timeout_ms = arguments.take(int) or timeout_ms
        arguments.end("send", _SENDS)
        if isinstance(message, Message):
            sending = self._send_one(message, chosen, selector, arg, timeout_ms, callback)
        else:
            sending = self._send_batch(message, chosen, selector, timeout_ms)
        if callback is None:
            return SendResult.of(self._on_loop()[0].call(sending))
        self._on_loop()[0].submit(sending).add_done_callback(partial(_answer, callback))
        return None

    def _send_one(
        self,
        message: Message,
        queue: places.MessageQueue | None,
        selector: Selector | None,
        arg: Any,
        timeout_ms: int | None,
        callback: SendCallback | None,
    ) -> Coroutine[Any, Any, CoreSendResult]:
        portal, producer = self._tuned()
        frozen = message.frozen()
        if callback is None:
            choose = None if selector is None else _chooser(selector, message, arg)
            return producer.send(frozen, queue=queue, selector=choose, timeout_ms=timeout_ms)
        if selector is not None:
            queue = self._choose(selector, message, arg)
        outgoing = portal.run(producer.sender.assign_id, frozen)
        retries = self.retry_times_when_send_async_failed
        return producer.cluster.run(
            producer.sender.send_outgoing(outgoing, queue, timeout_ms, retries)
        )

    def _send_batch(
        self,
        messages: Sequence[Message],
        queue: places.MessageQueue | None,
        selector: Selector | None,
        timeout_ms: int | None,
    ) -> Coroutine[Any, Any, CoreSendResult]:
        if selector is not None or not all(isinstance(one, Message) for one in messages):
            raise ConfigurationError(
                f"send got {messages!r} and the selector {selector!r}.",
                fix="A batch is a list of Message, and goes to one queue: name it, or none.",
            )
        _, producer = self._tuned()
        frozen = [one.frozen() for one in messages]
        return _first(producer.send_batch(frozen, queue=queue, timeout_ms=timeout_ms))

    def _choose(self, selector: Selector, message: Message, arg: Any) -> places.MessageQueue:
        queues = self._run(Producer.queues, message.topic)
        return choose_with_selector(_chooser(selector, message, arg), queues, message.frozen())

    @overload
    def send_oneway(self, message: Message, queue: Place | None = None, /) -> None: ...

    @overload
    def send_oneway(self, message: Message, selector: Selector, arg: Any, /) -> None: ...

    def send_oneway(self, message: Message, *given: Any) -> None:
        """Does not wait for the broker: the message may get lost."""
        message = expect_one_message(message, Message, "send_oneway")
        arguments = Given(*given)
        place = arguments.take(*_QUEUES)
        queue = None if place is None else frozen_queue(place)
        if _selects(arguments.next):
            selector, arg = arguments.pair("a selector", "its argument")
            queue = self._choose(selector, message, arg)
        arguments.end("send_oneway", "After the message: a queue, or a selector and its argument.")
        self._run(Producer.send_oneway, message.frozen(), queue=queue)

    def request(self, message: Message, timeout_ms: int = 3000) -> Message:
        """Sends a request and waits for its reply. Raises RequestTimeoutError."""
        message = expect_one_message(message, Message, "request")
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


_SENDS: Final = (
    "After the message come, each if it is there: a queue, or a selector and its argument; a "
    "SendCallback; a time-out in ms."
)


async def _first(results: Awaitable[Sequence[R]]) -> R:
    return (await results)[0]


def _selects(value: Any) -> bool:
    return isinstance(value, MessageQueueSelector) or callable(value)


def _chooser(selector: Selector, message: Message, arg: Any) -> core_sending.Selector:
    select = selector.select if isinstance(selector, MessageQueueSelector) else selector
    return lambda queues, _: frozen_queue(select(queues_of(queues), message, arg))


def _answer(callback: SendCallback, done: Future[CoreSendResult]) -> None:
    """Tell `callback` how a send ended. Called on the client's loop, so what the callback raises
    must not leave it."""
    if done.cancelled():
        error: BaseException | None = ClosedError("this client was closed while it sent.")
    else:
        error = done.exception()
    if error is None:
        call_listener(callback.on_success, SendResult.of(done.result()))
        return
    if not isinstance(error, SluiceError):
        _log.error("an asynchronous send failed", exc_info=error)
        error = SendUnknownError(
            f"sending failed unexpectedly [{error!r}]: the message may be stored or not.",
            fix="Please report the traceback in the log.",
        )
    call_listener(callback.on_exception, error)


_STATES: Final = {
    LocalTransactionState.COMMIT_MESSAGE: TransactionState.COMMIT,
    LocalTransactionState.ROLLBACK_MESSAGE: TransactionState.ROLLBACK,
    LocalTransactionState.UNKNOW: TransactionState.UNKNOWN,
}
_NAMES: Final = {state: name for name, state in _STATES.items()}


class TransactionListener(ABC):
    """Runs local transactions and says how they ended; None counts as UNKNOW."""

    @abstractmethod
    def execute_local_transaction(self, msg: Message, arg: Any) -> LocalTransactionState | None:
        """The half message is stored: do the work it tells of."""

    @abstractmethod
    def check_local_transaction(self, msg: MessageExt) -> LocalTransactionState | None:
        """A broker asks how the work ended."""


class _Checks(core.TransactionListener):
    """RocketMQ's listener as the asyncio producer asks it."""

    def __init__(self, listener: TransactionListener, executor: Executor | None) -> None:
        self._listener = listener
        self._executor = executor

    async def check(self, message: StoredMessage) -> TransactionState | None:
        check = self._listener.check_local_transaction
        return _state(await run_on_thread(self._executor, check, MessageExt(message)))


def _state(state: LocalTransactionState | None) -> TransactionState:
    return TransactionState.UNKNOWN if state is None else _STATES[state]


class TransactionMQProducer(DefaultMQProducer):
    """A producer of messages that become visible when a local transaction commits."""

    transaction_listener: TransactionListener | None = None
    executor_service: Executor | None = None
    """Where checks run; None is a pool of this client."""
    set_transaction_listener = Sets[TransactionListener]()
    set_executor_service = Sets[Executor | None]()

    async def _make(self, sluice: Sluice) -> Producer:
        if not isinstance(self.transaction_listener, TransactionListener):
            raise ConfigurationError(
                "the producer has no TransactionListener.",
                fix="Call set_transaction_listener before start.",
            )
        self._checks = _Checks(self.transaction_listener, self.executor_service)
        producer = await super()._make(sluice)
        with contextlib.suppress(RouteNotFoundError):  # the first send makes it known
            await producer.answer_checks()
        return producer

    def send_message_in_transaction(
        self, message: Message, arg: Any = None
    ) -> TransactionSendResult:
        """Stores the half message, executes the local transaction, commits or rolls back. The
        property CHECK_IMMUNITY_TIME_IN_SECONDS says when a broker may ask at the earliest."""
        message = expect_one_message(message, Message, "send_message_in_transaction")
        portal, producer = self._tuned()
        assert self.transaction_listener is not None
        frozen, after_s = message.frozen(), message.properties.get(CHECK_IMMUNITY)
        if after_s is not None:
            kept = {name: v for name, v in frozen.properties.items() if name != CHECK_IMMUNITY}
            frozen = replace(frozen, properties=kept)
        after = None if after_s is None else int(after_s)

        async def begin() -> Transaction:
            return await producer.transaction(frozen, check_after_s=after).__aenter__()

        transaction = portal.call(begin())
        message.transaction_id = transaction.transaction_id
        try:
            transaction.state = _state(
                self.transaction_listener.execute_local_transaction(message, arg)
            )
        except (KeyboardInterrupt, SystemExit):
            transaction.unknown()
            portal.call(transaction.__aexit__(None, None, None))
            raise
        except BaseException:  # noqa: BLE001 -- the listener's own code: the broker will ask
            _log.exception("the local transaction %s failed", transaction.transaction_id)
            transaction.unknown()
        portal.call(transaction.__aexit__(None, None, None))
        assert transaction.send_result is not None
        return TransactionSendResult.of(
            transaction.send_result,
            transaction_id=transaction.transaction_id,
            local_transaction_state=_NAMES[transaction.state],
        )
