"""Producer and consumers in RocketMQ's words: `start`, use, `shutdown`; every method blocks."""

from collections.abc import Callable, Sequence
from typing import Any, Self

from sluicemq.client.aio.consumer import PushConsumer
from sluicemq.client.aio.litepull import LitePullConsumer
from sluicemq.client.aio.producer import Producer
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.answers import SendResult as CoreSendResult
from sluicemq.client.core.consuming import Start
from sluicemq.client.threaded.portal import Portal
from sluicemq.errors import ClosedError, ConfigurationError, SluiceError
from sluicemq.model.subscription import SQL92
from sluicemq.model.topic import MessageQueue
from sluicemq.rocketmq.listening import Listener, Listening
from sluicemq.rocketmq.values import (
    ConsumeFromWhere,
    Message,
    MessageExt,
    MessageSelector,
    SendResult,
)


class _Client:
    """`set_namesrv_addr`, `start`, `shutdown` of every class here."""

    def __init__(
        self,
        group: str,
        *,
        namesrv_addr: str | None = None,
        credentials: tuple[str, str] | None = None,
    ) -> None:
        self.group = group
        self._name_servers = namesrv_addr
        self._credentials = credentials
        self._portal: Portal | None = None
        self._sluice: Sluice | None = None

    def set_namesrv_addr(self, address: str) -> None:
        """`host:port;host:port`; without it NAMESRV_ADDR, or this machine."""
        self._name_servers = address

    def set_credentials(self, access_key: str, secret_key: str) -> None:
        """Signs every request."""
        self._credentials = (access_key, secret_key)

    def _open(self) -> tuple[Portal, Sluice]:
        if self._portal is not None:
            raise ConfigurationError("this client runs already.", cure="Call start() once.")
        portal = Portal(f"sluicemq {self.group}")

        async def make() -> Sluice:
            return Sluice(self._name_servers, credentials=self._credentials)

        try:
            self._sluice = portal.call(make())
        except BaseException:
            portal.close()
            raise
        self._portal = portal
        return portal, self._sluice

    def _running(self) -> Portal:
        if self._portal is None:
            raise ClosedError("this client does not run.", cure="Call start() first.")
        return self._portal

    def shutdown(self) -> None:
        """Settles, commits, leaves, closes. Safe to call twice."""
        portal, self._portal = self._portal, None
        if portal is not None and self._sluice is not None:
            try:
                portal.call(self._sluice.close())
            finally:
                portal.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def start(self) -> None:
        raise NotImplementedError


class DefaultMQProducer(_Client):
    """Sends messages. `send` waits; with `callback` it returns at once; a list is a batch."""

    def __init__(self, producer_group: str = "DEFAULT_PRODUCER", **options: Any) -> None:
        super().__init__(producer_group, **options)
        self.send_msg_timeout_ms = 10_000
        self.retry_times_when_send_failed = 2
        self.retry_times_when_send_async_failed = 0
        self.compress_msg_body_over_howmuch = 4096
        self._producer: Producer | None = None

    def start(self) -> None:
        portal, sluice = self._open()

        async def make() -> Producer:
            return sluice.producer(self.group, **self._options())

        try:
            self._producer = portal.call(make())
        except BaseException:
            self.shutdown()
            raise

    def _options(self) -> dict[str, Any]:
        return {
            "timeout_ms": self.send_msg_timeout_ms,
            "retries": self.retry_times_when_send_failed,
            "retries_async": self.retry_times_when_send_async_failed,
            "compress_from_bytes": self.compress_msg_body_over_howmuch,
        }

    def _ready(self) -> tuple[Portal, Producer]:
        portal = self._running()
        assert self._producer is not None
        return portal, self._producer

    def recall_message(self, topic: str, recall_handle: str) -> str:
        """Takes a timed message back; returns its id. The topic stands in the handle as well."""
        portal, producer = self._ready()
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
        portal, producer = self._ready()
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
        portal, producer = self._ready()

        def done(result: CoreSendResult | None, error: SluiceError | None) -> None:
            if result is not None:
                on_success(SendResult.of(result))
            elif error is not None:
                on_exception(error)

        async def start() -> None:
            producer.send_soon(done, message.frozen(), timeout_ms=timeout_ms)

        portal.call(start())

    def send_oneway(self, message: Message) -> None:
        """Does not wait for the broker: the message may get lost."""
        portal, producer = self._ready()
        portal.call(producer.send_oneway(message.frozen()))

    def fetch_publish_message_queues(self, topic: str) -> list[MessageQueue]:
        """The queues that messages of a topic may go to."""
        portal, producer = self._ready()
        return portal.call(producer.queues(topic))

    def create_topic(self, topic: str, queue_num: int = 8) -> None:
        """Creates a topic on every master."""
        portal, _ = self._ready()
        assert self._sluice is not None
        portal.call(self._sluice.admin.create_topic(topic, queues=queue_num))


class DefaultMQPushConsumer(_Client):
    """Calls a listener with one message at a time, on `consume_thread_max` threads.

    After RECONSUME_LATER or an exception the message comes again by way of the broker, after 10 s,
    30 s … 2 h, at most `max_reconsume_times` times (-1: 16); then it is a dead letter. An orderly
    listener gets it again at once, before any other of its queue, after
    `suspend_current_queue_time_millis`; -1 means without end.
    """

    def __init__(self, consumer_group: str, **options: Any) -> None:
        super().__init__(consumer_group, **options)
        self.consume_thread_max = 20
        self.consume_from_where = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
        self.consume_timestamp_ms = 0
        self._topics: dict[str, MessageSelector] = {}
        self.max_reconsume_times = -1
        self.suspend_current_queue_time_millis = 1000
        self._listening: Listening | None = None

    def set_consume_from_where(self, where: ConsumeFromWhere) -> None:
        self.consume_from_where = where

    def subscribe(self, topic: str, expression: str | MessageSelector = "*") -> None:
        """Tags ("A || B", "*") or a MessageSelector."""
        self._topics[topic] = _selector(expression)

    def set_max_reconsume_times(self, times: int) -> None:
        self.max_reconsume_times = times

    def set_suspend_current_queue_time_millis(self, time_ms: int) -> None:
        self.suspend_current_queue_time_millis = time_ms

    def register_message_listener(self, listener: Listener, *, orderly: bool = False) -> None:
        """A MessageListenerConcurrently or MessageListenerOrderly, or a function of the messages
        (and a context) that returns a status; see `rocketmq.listening`."""
        self._listening = Listening(listener, orderly=orderly)

    def start(self) -> None:
        if self._listening is None or not self._topics:
            raise ConfigurationError(
                "the consumer has no listener, or no topic.",
                cure="Call subscribe and register_message_listener before start.",
            )
        portal, sluice = self._open()

        async def run() -> None:
            consumer = self._make(sluice)
            for topic, selector in self._topics.items():
                consumer.subscribe(topic, **_filter(selector))
            await consumer.start()

        try:
            portal.call(run())
        except BaseException:
            self.shutdown()
            raise

    def _make(self, sluice: Sluice) -> PushConsumer:
        assert self._listening is not None
        times_max = self.max_reconsume_times
        return sluice.consumer(
            self.group,
            self._listening,
            concurrency=self.consume_thread_max,
            start=_start(self.consume_from_where, self.consume_timestamp_ms),
            ordered=self._listening.is_orderly,
            max_reconsume_times=None if times_max == -1 else times_max,
            suspend_s=min(max(self.suspend_current_queue_time_millis, 10), 30_000) / 1000,
        )


class DefaultLitePullConsumer(_Client):
    """Polls messages: subscribe or assign, start, poll."""

    def __init__(self, consumer_group: str, **options: Any) -> None:
        super().__init__(consumer_group, **options)
        self.auto_commit = True
        self.pull_batch_size = 32
        self.consume_from_where = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
        self.consume_timestamp_ms = 0
        self._topics: dict[str, MessageSelector] = {}
        self._consumer: LitePullConsumer | None = None

    def set_auto_commit(self, auto_commit: bool) -> None:
        self.auto_commit = auto_commit

    def subscribe(self, topic: str, expression: str | MessageSelector = "*") -> None:
        """Before or after start; queues are shared with the other members of the group."""
        self._topics[topic] = _selector(expression)
        if self._consumer is not None:
            self._join(self._consumer, topic)

    def start(self) -> None:
        portal, sluice = self._open()

        async def make() -> LitePullConsumer:
            return sluice.lite_pull(
                self.group,
                start=_start(self.consume_from_where, self.consume_timestamp_ms),
                auto_commit=self.auto_commit,
                pull_count=self.pull_batch_size,
            )

        try:
            consumer = portal.call(make())
            for topic in self._topics:
                self._join(consumer, topic)
        except BaseException:
            self.shutdown()
            raise
        self._consumer = consumer

    def _join(self, consumer: LitePullConsumer, topic: str) -> None:
        self._running().call(consumer.subscribe(topic, **_filter(self._topics[topic])))

    def _ready(self) -> tuple[Portal, LitePullConsumer]:
        portal = self._running()
        assert self._consumer is not None
        return portal, self._consumer

    def assign(self, queues: Sequence[MessageQueue]) -> None:
        """Reads exactly these queues."""
        portal, consumer = self._ready()
        portal.call(consumer.assign(queues))

    def poll(self, timeout_ms: int = 5000) -> list[MessageExt]:
        """The next messages, [] when none came in time."""
        portal, consumer = self._ready()
        polled = portal.call(consumer.poll(timeout_ms / 1000, count_max=self.pull_batch_size))
        return [MessageExt(message) for message in polled]

    def commit(self) -> None:
        """Commits everything polled so far."""
        portal, consumer = self._ready()
        portal.call(consumer.commit())

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """The next messages of a queue come from `offset` on."""
        portal, consumer = self._ready()
        portal.call(consumer.seek(queue, offset))

    def seek_to_begin(self, queue: MessageQueue) -> None:
        portal, consumer = self._ready()
        portal.call(consumer.seek_to_begin(queue))

    def seek_to_end(self, queue: MessageQueue) -> None:
        portal, consumer = self._ready()
        portal.call(consumer.seek_to_end(queue))

    def committed(self, queue: MessageQueue) -> int:
        """The committed offset, -1 when there is none."""
        portal, consumer = self._ready()
        offset = portal.call(consumer.committed(queue))
        return -1 if offset is None else offset

    def offset_for_timestamp(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """The first offset stored at that time or later."""
        portal, consumer = self._ready()
        return portal.call(consumer.offset_for_time(queue, timestamp_ms))

    def fetch_message_queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic."""
        portal, consumer = self._ready()
        return portal.call(consumer.queues(topic))


def _selector(expression: str | MessageSelector) -> MessageSelector:
    return MessageSelector.by_tag(expression) if isinstance(expression, str) else expression


def _filter(selector: MessageSelector) -> dict[str, str]:
    name = "where" if selector.expression_type == SQL92 else "tags"
    return {name: selector.expression}


def _start(where: ConsumeFromWhere, timestamp_ms: int) -> Start:
    if where is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP:
        return timestamp_ms
    return "last" if where is ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET else "first"
