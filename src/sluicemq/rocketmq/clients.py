"""The producer in RocketMQ's words: `start`, use, `shutdown`; every method blocks."""

from collections.abc import Callable, Sequence
from typing import Any, Self

from sluicemq.client.aio.producer import Producer
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.answers import SendResult as CoreSendResult
from sluicemq.client.threaded.portal import Portal
from sluicemq.errors import ClosedError, ConfigurationError, SluiceError
from sluicemq.model.topic import MessageQueue
from sluicemq.net.tls import Tls
from sluicemq.rocketmq.values import Message, MessageExt, SendResult


class Client:
    """`set_namesrv_addr`, `start`, `shutdown` of every class here; the second and third argument
    switch traces on, as in Java: True, and perhaps a topic."""

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

    def _open(self) -> tuple[Portal, Sluice]:
        if self._portal is not None:
            raise ConfigurationError("this client runs already.", cure="Call start() once.")
        portal = Portal(f"sluicemq {self.group}")

        async def make() -> Sluice:
            return Sluice(
                self._name_servers,
                credentials=self._credentials,
                trace=self._trace,
                tls=self._tls,
                instance=self.instance_name,
                offsets_directory=self.offsets_directory,
            )

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


class DefaultMQProducer(Client):
    """Sends messages. `send` waits; with `callback` it returns at once; a list is a batch."""

    def __init__(
        self, producer_group: str = "DEFAULT_PRODUCER", *trace: Any, **options: Any
    ) -> None:
        super().__init__(producer_group, *trace, **options)
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

    def request(self, message: Message, timeout_ms: int = 3000) -> Message:
        """Sends a request and waits for its reply. Raises RequestTimeoutError."""
        portal, producer = self._ready()
        reply = portal.call(producer.request(message.frozen(), timeout_s=timeout_ms / 1000))
        made = Message(reply.topic, reply.body, tags=reply.tag, keys=reply.keys)
        made.properties = dict(reply.properties)
        return made

    def reply(self, request: MessageExt, body: bytes | str) -> None:
        """Answers a message that a listener got: Java's `send(createReplyMessage(request, body))`.
        Returns when the requester has it. Raises ConfigurationError when nobody asked."""
        portal, _ = self._ready()
        data = body.encode() if isinstance(body, str) else body
        assert self._sluice is not None
        message_id = f"{request.msg_id}R"
        portal.call(self._sluice.cluster.send_reply(request.record, data, message_id))

    def fetch_publish_message_queues(self, topic: str) -> list[MessageQueue]:
        """The queues that messages of a topic may go to."""
        portal, producer = self._ready()
        return portal.call(producer.queues(topic))

    def create_topic(self, topic: str, queue_num: int = 8) -> None:
        """Creates a topic on every master."""
        portal, _ = self._ready()
        assert self._sluice is not None
        portal.call(self._sluice.admin.create_topic(topic, queues=queue_num))
