"""The producers with RocketMQ's names. Every method blocks, except a send with a callback.

    producer.send(message)                            # waits for the result
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

`send` accepts the positional arguments of Java's overloads, and keywords. The local transaction
runs on the caller's thread. Transaction checks run on the executor of `set_executor_service`, or
else on threads of the client.
"""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar, overload

from sluicemq.client.aio.producer import Producer, Transaction
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core import sending as core_sending
from sluicemq.client.core import transactions as core_transactions
from sluicemq.client.core.messages import expect_one_message
from sluicemq.client.core.requests import SendResult as CoreSendResult
from sluicemq.client.core.sending import choose_with_selector
from sluicemq.client.core.transactions import TransactionState
from sluicemq.client.tasks import call_listener, run_on_thread
from sluicemq.client.threaded.portal import ThreadedClient
from sluicemq.errors import (
    ClosedError,
    ConfigurationError,
    RouteNotFoundError,
    SendUnknownError,
    SluiceError,
)
from sluicemq.model.ids import parse_recall_handle
from sluicemq.model.message import CHECK_IMMUNITY, StoredMessage
from sluicemq.model.message import Message as ModelMessage
from sluicemq.model.topic import MessageQueue as ModelQueue
from sluicemq.rocketmq.choices import MessageQueueSelector, Selector, SendCallback
from sluicemq.rocketmq.clients import Client
from sluicemq.rocketmq.messages import (
    AnyMessageQueue,
    LocalTransactionState,
    Message,
    MessageExt,
    MessageQueue,
    SendResult,
    TransactionSendResult,
    to_model_queue,
    to_rocketmq_queues,
)
from sluicemq.rocketmq.names import Getter, PositionalArguments, Setter

R = TypeVar("R")
_log = logging.getLogger("sluicemq.client")
MessageOrBatch = Message | Sequence[Message]
_QUEUE_TYPES: Final[tuple[type[AnyMessageQueue], ...]] = (MessageQueue, ModelQueue)


class DefaultMQProducer(Client[Producer]):
    """A producer of one producer group.

    Times are milliseconds. Settings may also be changed after `start`, and then apply to the next
    send; only `compress_msg_body_over_howmuch` must be set before.

    - `send_msg_timeout`: the time limit of one send with all its attempts.
    - `retry_times_when_send_failed`: the number of further attempts of a send that waits.
    - `retry_times_when_send_async_failed`: the same for a send with a callback.
    - `retry_another_broker_when_not_store_ok`: send again also if a broker stored the message but
      could not make it as safe as configured. Another broker may then have it as well.
    - `compress_msg_body_over_howmuch`: the size in bytes from which bodies are compressed; 0 means
      never.
    """

    group = "DEFAULT_PRODUCER"
    send_msg_timeout = 10_000
    retry_times_when_send_failed = 2
    retry_times_when_send_async_failed = 0
    retry_another_broker_when_not_store_ok = False
    compress_msg_body_over_howmuch = 4096
    set_producer_group = Setter[str]("group")
    set_send_msg_timeout = Setter[int]()
    set_retry_times_when_send_failed = Setter[int]()
    set_retry_times_when_send_async_failed = Setter[int]()
    set_retry_another_broker_when_not_store_ok = Setter[bool]()
    set_compress_msg_body_over_howmuch = Setter[int]()
    get_producer_group = Getter[str]("group")
    get_send_msg_timeout = Getter[int]()
    get_retry_times_when_send_failed = Getter[int]()
    get_retry_times_when_send_async_failed = Getter[int]()

    _changeable_while_running = frozenset(
        {
            "send_msg_timeout",
            "retry_times_when_send_failed",
            "retry_times_when_send_async_failed",
            "retry_another_broker_when_not_store_ok",
        }
    )
    _core_listener: core_transactions.TransactionListener | None = None

    async def _make_client(self, sluice: Sluice) -> Producer:
        """Return a producer of the asyncio client `sluice`, with these settings."""
        return sluice.producer(
            self.group,
            compress_from_bytes=self.compress_msg_body_over_howmuch,
            listener=self._core_listener,
        )

    def _apply_settings(self) -> ThreadedClient[Producer]:
        """Copy the settings to the asyncio producer, because they may have changed since `start`.

        Returns the asyncio producer with its event loop. Raises ClosedError if the producer is not
        running.
        """
        threaded = self._expect_running()
        sender = threaded.client.sender
        sender.timeout_ms = self.send_msg_timeout
        sender.retries = self.retry_times_when_send_failed
        sender.retry_unsafe = self.retry_another_broker_when_not_store_ok
        return threaded

    def fetch_publish_message_queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues to which messages of a topic can be sent.

        Raises RouteNotFoundError.
        """
        return to_rocketmq_queues(self._call(Producer.queues, topic))

    def recall_message(self, topic: str, recall_handle: str) -> str:
        """Cancel a timed message before it is delivered, and return its message id.

        `topic` is the topic of the message, and `recall_handle` is from the result of the send.
        Raises ConfigurationError, without cancelling anything, if the handle belongs to a message
        of another topic. Raises the errors of `Producer.recall`.
        """
        handle = parse_recall_handle(recall_handle)
        if handle is not None and handle.topic != topic:
            raise ConfigurationError(
                f"the handle belongs to a message of topic {handle.topic!r}, not of {topic!r}.",
                fix=f"Pass the topic of the message: recall_message({handle.topic!r}, …).",
            )
        message_id: str = self._call(Producer.recall, recall_handle)
        return message_id

    @overload
    def send(
        self,
        message: MessageOrBatch,
        timeout: int | None = None,
        /,
        *,
        queue: AnyMessageQueue | None = None,
        selector: Selector | None = None,
        arg: Any = None,
        timeout_ms: int | None = None,
    ) -> SendResult: ...

    @overload
    def send(
        self, message: MessageOrBatch, queue: AnyMessageQueue, timeout: int | None = None, /
    ) -> SendResult: ...

    @overload
    def send(
        self, message: Message, selector: Selector, arg: Any, timeout: int | None = None, /
    ) -> SendResult: ...

    @overload
    def send(
        self, message: MessageOrBatch, callback: SendCallback, timeout: int | None = None, /
    ) -> None: ...

    @overload
    def send(
        self,
        message: MessageOrBatch,
        queue: AnyMessageQueue,
        callback: SendCallback,
        timeout: int | None = None,
        /,
    ) -> None: ...

    @overload
    def send(
        self,
        message: Message,
        selector: Selector,
        arg: Any,
        callback: SendCallback,
        timeout: int | None = None,
        /,
    ) -> None: ...

    def send(
        self,
        message: MessageOrBatch,
        *java_arguments: Any,
        queue: AnyMessageQueue | None = None,
        selector: Selector | None = None,
        arg: Any = None,
        timeout_ms: int | None = None,
    ) -> SendResult | None:
        """Send one message, or a list of messages as one batch, and return the result.

        After the message, these positional arguments may follow in this order: a queue, or a
        selector and its argument `arg`; a `SendCallback`; a time limit in milliseconds, which
        overrides `send_msg_timeout`. The result of a batch is that of its first message.

        With a callback, the method returns None at once. The callback is called later, with the
        result or the error. An invalid message still raises here.

        Raises ConfigurationError if the message is invalid (nothing was sent), RouteNotFoundError,
        RequestError (the broker refused the message), SendError (it is not stored) and its subclass
        SendUnknownError (it may be stored).
        """
        positional = PositionalArguments(*java_arguments)
        any_queue = positional.take(*_QUEUE_TYPES) or queue
        model_queue = None if any_queue is None else to_model_queue(any_queue)
        if _is_selector(positional.next_argument):
            selector, arg = positional.take_pair("a selector", "its argument")
        callback = positional.take(SendCallback)  # type: ignore[type-abstract]
        timeout_ms = positional.take(int) or timeout_ms
        positional.expect_end("send", _SEND_ARGUMENTS)
        if isinstance(message, Message):
            sending = self._send_one(message, model_queue, selector, arg, timeout_ms, callback)
        else:
            sending = self._send_batch(message, model_queue, selector, timeout_ms)
        portal = self._expect_running().portal
        if callback is None:
            return SendResult.from_core(portal.run(sending))
        portal.submit(sending).add_done_callback(partial(_call_back, callback))
        return None

    def _send_one(
        self,
        message: Message,
        queue: ModelQueue | None,
        selector: Selector | None,
        arg: Any,
        timeout_ms: int | None,
        callback: SendCallback | None,
    ) -> Coroutine[Any, Any, CoreSendResult]:
        """Return a coroutine that sends one message and returns the result; it is not started.

        Without a `callback`, the coroutine checks the message and calls the selector. With one,
        both happen here, so that their errors are raised to the caller. The callback is not called
        here.
        """
        threaded = self._apply_settings()
        producer = threaded.client
        model_message = message.to_model()
        if callback is None:
            choose = None if selector is None else _to_core_selector(selector, message, arg)
            return producer.send(model_message, queue=queue, selector=choose, timeout_ms=timeout_ms)
        if selector is not None:
            queue = self._select_queue(selector, message, arg)
        outgoing = threaded.portal.call(producer.sender.assign_id, model_message)
        retries = self.retry_times_when_send_async_failed
        return producer.cluster.run(
            producer.sender.send_outgoing(outgoing, queue, timeout_ms, retries)
        )

    def _send_batch(
        self,
        messages: Sequence[Message],
        queue: ModelQueue | None,
        selector: Selector | None,
        timeout_ms: int | None,
    ) -> Coroutine[Any, Any, CoreSendResult]:
        """Return a coroutine that sends a batch and returns the result of its first message.

        It is not started. Raises ConfigurationError if there is a selector, or if an element is not
        a `Message`.
        """
        if selector is not None or not all(isinstance(message, Message) for message in messages):
            raise ConfigurationError(
                f"a batch must be a list of Message without a selector, got {messages!r} and the "
                f"selector {selector!r}.",
                fix="Pass a list of Message, and a queue or nothing.",
            )
        producer = self._apply_settings().client
        model_messages = [message.to_model() for message in messages]
        return _get_first(producer.send_batch(model_messages, queue=queue, timeout_ms=timeout_ms))

    def _select_queue(self, selector: Selector, message: Message, arg: Any) -> ModelQueue:
        """Return the queue that `selector` selects for a message, on the caller's thread."""
        queues = self._call(Producer.queues, message.topic)
        choose = _to_core_selector(selector, message, arg)
        return choose_with_selector(choose, queues, message.to_model())

    @overload
    def send_oneway(self, message: Message, queue: AnyMessageQueue | None = None, /) -> None: ...

    @overload
    def send_oneway(self, message: Message, selector: Selector, arg: Any, /) -> None: ...

    def send_oneway(self, message: Message, *java_arguments: Any) -> None:
        """Send a message without waiting for a response, so it may be lost unnoticed.

        After the message may follow a queue, or a selector and its argument. Raises
        ConfigurationError, RouteNotFoundError, and ConnectionLostError if the broker cannot be
        connected to.
        """
        message = expect_one_message(message, Message, "send_oneway")
        arguments = PositionalArguments(*java_arguments)
        any_queue = arguments.take(*_QUEUE_TYPES)
        queue = None if any_queue is None else to_model_queue(any_queue)
        if _is_selector(arguments.next_argument):
            selector, arg = arguments.take_pair("a selector", "its argument")
            queue = self._select_queue(selector, message, arg)
        arguments.expect_end(
            "send_oneway", "Pass after the message: a queue, or a selector and its argument."
        )
        self._call(Producer.send_oneway, message.to_model(), queue=queue)

    def request(self, message: Message, timeout_ms: int = 3000) -> Message:
        """Send a request, and return the reply of the consumer that processes it as a `Message`.

        Raises what `send` raises, and RequestTimeoutError if no reply arrives within `timeout_ms`.
        """
        message = expect_one_message(message, Message, "request")
        reply = self._call(Producer.request, message.to_model(), timeout_s=timeout_ms / 1000)
        received = Message(reply.topic, reply.body, tags=reply.tag, keys=reply.keys)
        received.properties = dict(reply.properties)
        return received

    def reply(self, request: MessageExt, body: bytes | str) -> None:
        """Reply to a request that a listener received, and wait until the requester has the reply.

        It is Java's `send(createReplyMessage(request, body))`. Raises ConfigurationError if the
        message is not a request, RequestError if the requester is gone (code 1),
        ConnectionLostError and RequestTimeoutError.
        """
        threaded = self._expect_running()
        encoded_body = body.encode() if isinstance(body, str) else body
        message_id = f"{request.msg_id}R"
        cluster = threaded.sluice.cluster
        threaded.portal.run(cluster.send_reply(request.record, encoded_body, message_id))


_SEND_ARGUMENTS: Final = (
    "Pass after the message, in this order and each optional: a queue, or a selector and its "
    "argument; a SendCallback; a time limit in ms."
)


async def _get_first(send_results: Awaitable[Sequence[R]]) -> R:
    """Await a sequence and return its first element."""
    return (await send_results)[0]


def _is_selector(argument: Any) -> bool:
    """Return whether an argument of `send` is a selector."""
    return isinstance(argument, MessageQueueSelector) or callable(argument)


def _to_core_selector(selector: Selector, message: Message, arg: Any) -> core_sending.Selector:
    """Return `selector` as a function of the asyncio client, bound to a message and an argument."""
    select = selector.select if isinstance(selector, MessageQueueSelector) else selector
    return lambda queues, _: to_model_queue(select(to_rocketmq_queues(queues), message, arg))


def _call_back(callback: SendCallback, future: Future[CoreSendResult]) -> None:
    """Call `on_success` or `on_exception` of `callback`, after an asynchronous send has ended.

    `future` has its result or error. A cancelled send becomes a ClosedError. An error that is not a
    SluiceError is a bug: it is logged, and the callback gets a SendUnknownError instead. Errors of
    the callback are logged, because this runs on the client's event loop.
    """
    if future.cancelled():
        error: BaseException | None = ClosedError(
            "this client was closed while it sent the message."
        )
    else:
        error = future.exception()
    if error is None:
        call_listener(callback.on_success, SendResult.from_core(future.result()))
        return
    if not isinstance(error, SluiceError):
        _log.error("an asynchronous send failed", exc_info=error)
        error = SendUnknownError(
            f"sending failed unexpectedly [{error!r}]: the message may be stored.",
            fix="Report the traceback in the log.",
        )
    call_listener(callback.on_exception, error)


_CORE_STATES: Final = {
    LocalTransactionState.COMMIT_MESSAGE: TransactionState.COMMIT,
    LocalTransactionState.ROLLBACK_MESSAGE: TransactionState.ROLLBACK,
    LocalTransactionState.UNKNOW: TransactionState.UNKNOWN,
}
_LOCAL_STATES: Final = {state: name for name, state in _CORE_STATES.items()}


class TransactionListener(ABC):
    """An object that runs the local transactions of a producer group and knows how they ended.

    Every producer of the group should have one, because a broker sends a check to any of them.
    """

    @abstractmethod
    def execute_local_transaction(self, msg: Message, arg: Any) -> LocalTransactionState | None:
        """Run the local transaction of `msg`, which is stored and not yet visible to consumers.

        `arg` is the argument of `send_message_in_transaction`. Return how the transaction ended.
        None and an exception, which is logged, count as UNKNOW: the broker checks later.
        """

    @abstractmethod
    def check_local_transaction(self, msg: MessageExt) -> LocalTransactionState | None:
        """Return how the local transaction of `msg` ended.

        A broker asks this if it does not know. The transaction may have been run by another
        process of the group. None and an exception, which is logged, count as UNKNOW: the broker
        asks again.
        """


class _CoreListener(core_transactions.TransactionListener):
    """A `TransactionListener` in the form of the asyncio producer. It only answers checks."""

    def __init__(self, listener: TransactionListener, executor: Executor | None) -> None:
        self._listener = listener
        self._executor = executor

    async def check(self, message: StoredMessage) -> TransactionState | None:
        check = self._listener.check_local_transaction
        return _to_core_state(await run_on_thread(self._executor, check, MessageExt(message)))


def _to_core_state(state: LocalTransactionState | None) -> TransactionState:
    """Return a state of RocketMQ as that of the asyncio producer. None becomes UNKNOWN."""
    return TransactionState.UNKNOWN if state is None else _CORE_STATES[state]


def _take_check_after_s(message: ModelMessage) -> tuple[ModelMessage, int | None]:
    """Return the message without CHECK_IMMUNITY_TIME_IN_SECONDS, and the value of that property.

    The value is in seconds, None if the message does not have the property.
    """
    properties = dict(message.properties)
    check_after_text = properties.pop(CHECK_IMMUNITY, None)
    if check_after_text is None:
        return message, None
    return replace(message, properties=properties), int(check_after_text)


class TransactionMQProducer(DefaultMQProducer):
    """A producer whose messages become visible when their local transactions commit."""

    transaction_listener: TransactionListener | None = None
    executor_service: Executor | None = None
    """The executor on which transaction checks run. None means threads of the client."""
    set_transaction_listener = Setter[TransactionListener]()
    set_executor_service = Setter[Executor | None]()

    async def _make_client(self, sluice: Sluice) -> Producer:
        """Return a producer that answers the questions of brokers about transactions.

        It registers with the brokers at once, if possible. Raises ConfigurationError without a
        TransactionListener.
        """
        if not isinstance(self.transaction_listener, TransactionListener):
            raise ConfigurationError(
                "a TransactionMQProducer requires a TransactionListener, but this one has none.",
                fix="Call set_transaction_listener before start.",
            )
        self._core_listener = _CoreListener(self.transaction_listener, self.executor_service)
        producer = await super()._make_client(sluice)
        # Without a route, the first send registers the producer with the brokers.
        with contextlib.suppress(RouteNotFoundError):
            await producer.answer_checks()
        return producer

    def send_message_in_transaction(
        self, message: Message, arg: Any = None
    ) -> TransactionSendResult:
        """Store a prepared message, run its local transaction, and commit it or roll it back.

        The listener's `execute_local_transaction(message, arg)` is called on this thread, and its
        result decides. The property CHECK_IMMUNITY_TIME_IN_SECONDS of the message is the time in
        seconds after which the broker may send a transaction check. Raises what `send` raises,
        without running the local transaction, and RequestError if the broker refuses its end.
        """
        message = expect_one_message(message, Message, "send_message_in_transaction")
        threaded = self._apply_settings()
        portal = threaded.portal
        producer = threaded.client
        model_message, check_after_s = _take_check_after_s(message.to_model())

        async def send_prepared() -> Transaction:
            transaction = producer.transaction(model_message, check_after_s=check_after_s)
            return await transaction.__aenter__()

        transaction = portal.run(send_prepared())
        message.transaction_id = transaction.transaction_id
        try:
            self._execute_local_transaction(transaction, message, arg)
        finally:
            portal.run(transaction.__aexit__(None, None, None))
        assert transaction.send_result is not None
        return TransactionSendResult.from_core(
            transaction.send_result,
            transaction_id=transaction.transaction_id,
            local_transaction_state=_LOCAL_STATES[transaction.state],
        )

    def _execute_local_transaction(
        self, transaction: Transaction, message: Message, arg: Any
    ) -> None:
        """Call the listener, and store the state that it decides in `transaction`.

        If the listener raises an error, that is logged and the state is UNKNOWN. KeyboardInterrupt
        and SystemExit are raised.
        """
        assert self.transaction_listener is not None
        try:
            local_state = self.transaction_listener.execute_local_transaction(message, arg)
            transaction.state = _to_core_state(local_state)
        except (KeyboardInterrupt, SystemExit):
            transaction.unknown()
            raise
        except BaseException:  # noqa: BLE001 - application code: the broker checks the state later
            _log.exception(
                "the local transaction %s failed; the broker will check its state",
                transaction.transaction_id,
            )
            transaction.unknown()
