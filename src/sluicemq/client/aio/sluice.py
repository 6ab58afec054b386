"""`Sluice`: the one object an application makes.

    async with Sluice("127.0.0.1:9876") as mq:
        await mq.send("flights", body, tag="UA", keys=["N14228"], properties={"origin": "EWR"})
        async for message in mq.subscribe("flights", group="late", where="dep_delay > 60"):
            ...
            await message.ack()

It owns the connections, the heartbeat thread, one producer and a `Member` for each consumer group;
nothing is connected before it is needed. `close` settles in-flight sends, commits offsets and
leaves the groups.
"""

import asyncio
import functools
import os
import weakref
from collections.abc import Callable
from random import Random
from typing import Any, Concatenate, Final, ParamSpec, Self, TypedDict, TypeVar, Unpack

from sluicemq.client.aio.broker_requests import BrokerRequests
from sluicemq.client.aio.cluster import Admin, Cluster
from sluicemq.client.aio.consumer import Handler, MessageStream, PushConsumer
from sluicemq.client.aio.members import Member, Memberships
from sluicemq.client.aio.offsets import INSTANCE, OffsetFiles
from sluicemq.client.aio.producer import CloseReport, Producer, Requester, TraceWriter, of_sender
from sluicemq.client.aio.pull import LitePullConsumer, PullConsumer
from sluicemq.client.core.consuming import (
    DELIVER,
    IN_FLIGHT_BYTES_MAX,
    IN_FLIGHT_COUNT_MAX,
    ConsumeLimits,
    ConsumeOptions,
    LitePullLimits,
    OffsetMoved,
    OnUndecodable,
    RetryRules,
    Start,
    make_subscription,
)
from sluicemq.client.core.messages import check_group_cached
from sluicemq.client.core.names import Credentials
from sluicemq.client.core.sending import (
    DEFAULT_PRODUCER_GROUP,
    SEND_TIMEOUT_MS,
    ProducerOptions,
    Sender,
)
from sluicemq.client.core.tracing import Tracing, parse_trace_option
from sluicemq.client.heartbeat_thread import (
    HeartbeatThread,
    local_address,
    make_client_id,
    make_unique_ids,
)
from sluicemq.client.tasks import CloseOnce, Tasks, run_each
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import ClosedError, ConfigurationError
from sluicemq.files import SYSTEM_FILES, Files
from sluicemq.hints import with_hints
from sluicemq.model.addresses import DEFAULT_NAME_SERVER
from sluicemq.model.bodies import BODY_BYTES_MAX
from sluicemq.model.system_names import TOOLS_GROUP
from sluicemq.model.topic import MessageQueue
from sluicemq.net.network import SOCKET_NETWORK, Network, with_tls
from sluicemq.net.tls import Tls

P = ParamSpec("P")
T = TypeVar("T")


def default_name_servers() -> str:
    """NAMESRV_ADDR, as RocketMQ's own clients read it, or this machine."""
    return os.environ.get("NAMESRV_ADDR") or DEFAULT_NAME_SERVER


class ClientOptions(TypedDict, total=False):
    """What a client may be told besides where its cluster is: see `Sluice`."""

    credentials: Credentials | tuple[str, str] | None
    producer_group: str
    send_timeout_ms: int
    client_id: str | None
    on_moved: Callable[[OffsetMoved], None] | None
    trace: bool | str
    tls: Tls | bool | None
    instance: str
    offsets_directory: str | None
    files: Files


def of_default(method: Callable[Concatenate[Producer, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A method of the default producer as one of `Sluice`, with its signature and docstring."""

    @functools.wraps(method)
    def call(self: "Sluice", /, *arguments: P.args, **named: P.kwargs) -> T:
        return method(self.default_producer, *arguments, **named)

    return call


@with_hints
class Sluice:
    """A client of a RocketMQ-compatible cluster, for asyncio. It belongs to the event loop that
    uses it first and to the process that made it; used in another loop, or after a fork, it raises
    ConfigurationError.

    `name_servers` is `host:port;host:port` or a list; None: the variable NAMESRV_ADDR, or
    127.0.0.1:9876. `credentials`: a pair (access key, secret key). `producer_group` and
    `send_timeout_ms` (for all attempts of one send) are those of `send`. `on_moved` is called when
    a consumer has to go on at another offset, for instance because what it wanted was deleted.
    `trace`: write what happens to messages to RMQ_SYS_TRACE_TOPIC (True) or a topic of yours, for
    `sluice trace`. `tls`: True, or a `Tls` with its files; None: as the variable SLUICE_TLS says.
    Raises ConfigurationError for what cannot be meant; nothing is connected before it is needed.
    """

    def __init__(
        self,
        name_servers: str | list[str] | tuple[str, ...] | None = None,
        *,
        credentials: Credentials | tuple[str, str] | None = None,
        producer_group: str = DEFAULT_PRODUCER_GROUP,
        send_timeout_ms: int = SEND_TIMEOUT_MS,
        client_id: str | None = None,
        on_moved: Callable[[OffsetMoved], None] | None = None,
        trace: bool | str = False,
        clock: Clock = SYSTEM_CLOCK,
        tls: Tls | bool | None = None,
        network: Network = SOCKET_NETWORK,
        heartbeat_thread: bool = True,
        instance: str = INSTANCE,
        offsets_directory: str | None = None,
        files: Files = SYSTEM_FILES,
        rng: Random | None = None,
    ) -> None:
        """Broadcasting consumers keep offsets in `offsets_directory` (~/.rocketmq_offsets), below
        `client_id` if one is given, else `<address>@<instance>`. `rng` chooses the queue that each
        producer begins with. `network` and `heartbeat_thread=False` are for clusters in one process
        (testing): what carries the bytes, and heartbeats from the caller's own loop.
        """
        if client_id is not None and not isinstance(client_id, str):
            raise ConfigurationError(f"client_id is {client_id!r:.60}.", fix="Give a text.")
        if on_moved is not None and not callable(on_moved):
            raise ConfigurationError(
                f"on_moved is {on_moved!r:.60}.", fix="Give a function of an OffsetMoved."
            )
        network = with_tls(network, Tls.resolve(tls))
        self.client_id: str = client_id or make_client_id(clock)
        self.cluster: Cluster = Cluster(
            name_servers or default_name_servers(),
            credentials=credentials,
            clock=clock,
            connect=network.dial,
            client_id=self.client_id,
            rng=rng,
        )
        self._keeper = HeartbeatThread(
            self.client_id,
            credentials=self.cluster.credentials,
            on_request=lambda *asked: self._brokers_ask.take(*asked),  # noqa: PLW0108 - made below
            connect=network.dial,
            has_thread=heartbeat_thread,
            outages=self.cluster.directory.outages,
        )
        self._tasks = Tasks()
        self._requester = Requester(self.cluster, self._keeper)
        self._brokers_ask = BrokerRequests(
            self, self._tasks, self._requester, self._keeper, clock.now_ms()
        )
        self._members = Memberships(self.cluster, self._keeper, self._on_join)
        self._producers: list[Producer] = []
        self._consumers: weakref.WeakSet[PushConsumer | LitePullConsumer | MessageStream] = (
            weakref.WeakSet()
        )
        self._closed = False
        self._closing: CloseOnce[CloseReport] = CloseOnce(self._hurry)
        self.cluster.offset_files = OffsetFiles(
            client_id or f"{local_address()}@{instance}",
            offsets_directory,
            files,
            in_thread=heartbeat_thread,
        )
        self.cluster.directory.on_route_change = self._on_route
        self.cluster.on_moved = on_moved
        self.admin: Admin = Admin(self.cluster)
        self._producer_group = producer_group
        self._send_timeout_ms = send_timeout_ms
        self._trace_writer: TraceWriter | None = None
        topic = parse_trace_option(trace)
        if topic is not None:
            self.cluster.trace = Tracing(topic, clock, make_unique_ids(clock).make_id)

    # ------------------------------------------------------------------------- sending

    @functools.cached_property
    def default_producer(self) -> Producer:
        """The producer behind `send`."""
        return self.producer(self._producer_group, timeout_ms=self._send_timeout_ms)

    @functools.cached_property
    def sender(self) -> Sender:
        """What sends for `default_producer`."""
        return self.default_producer.sender

    def producer(
        self, group: str = DEFAULT_PRODUCER_GROUP, **options: Unpack[ProducerOptions]
    ) -> Producer:
        """A producer of its own group and settings (`ProducerOptions`): timeout_ms, retries,
        retries_async, retry_unsafe, compress_from_bytes, delay_level_max, listener. Raises
        ConfigurationError."""
        self._check_open()
        producer = Producer(
            self.cluster,
            group=group,
            on_first=self._introduce,
            trace=self._tracing(),
            requester=self._requester,
            **options,
        )
        self._producers.append(producer)
        return producer

    def _tracing(self) -> Tracing | None:
        """None when traces are off; their writer needs the loop, so it is made here."""
        trace = self.cluster.trace
        if trace is not None and self._trace_writer is None:
            self._trace_writer = TraceWriter(self.cluster, trace)
        return trace

    def _on_route(self, topic: str) -> None:
        """A broker that is new in a route hears of our groups too."""
        if self._members or self._producers:
            routes = self.cluster.routes
            self._keeper.update_addresses(
                routes.broker_addresses([topic]), routes.broker_addresses(routes.routes)
            )

    def _introduce(self, group: str, topic: str) -> None:
        """The brokers of a topic learn of a producer group by the next heartbeat, sent now."""
        self._keeper.add_producer_group(group)
        self._keeper.update_addresses(self.cluster.routes.broker_addresses([topic]))
        self._keeper.send_heartbeats()

    send: Final = of_sender(Sender.send_message)
    send_oneway: Final = of_sender(Sender.send_oneway)
    send_batch: Final = of_sender(Sender.send_batch)
    recall: Final = of_sender(Sender.recall)
    send_soon: Final = of_default(Producer.send_soon)
    request: Final = of_default(Producer.request)
    transaction: Final = of_default(Producer.transaction)

    # ----------------------------------------------------------------------- consuming

    def subscribe(
        self,
        topic: str,
        *,
        group: str,
        tags: str | None = None,
        where: str | None = None,
        start: Start = "first",
        prefetch_count: int = IN_FLIGHT_COUNT_MAX,
        prefetch_bytes: int = IN_FLIGHT_BYTES_MAX,
        ordered: bool = False,
        max_reconsume_times: int | None = None,
        retry_delay_level: int = 0,
        suspend_s: float = 1.0,
        **limits: Unpack[ConsumeLimits],
    ) -> MessageStream:
        """The messages of a topic for a group, filtered by tags ("A||B") or SQL92 (`where`).

        `start`: where a group without a committed offset begins: "first", "last", a datetime or
        milliseconds since 1970. `prefetch_count` messages and `prefetch_bytes` bytes of a queue may
        be unacknowledged before it pauses. `ordered`: one message of a queue at a time, and the
        next one when it is acknowledged. The next three say what `message.reject()` does
        (`RetryRules`); `suspend_s` are seconds. `limits` are those of `ConsumeLimits`: broadcast,
        allocate, span_max ….

        The network is first used when the stream is iterated. Raises FilterSyntaxError and
        ConfigurationError for what is wrong without asking anybody; see `MessageStream.start` for
        the rest.
        """
        self._check_open()
        rules = RetryRules(max_reconsume_times, retry_delay_level, suspend_s)
        options = ConsumeOptions(
            start=start, count_max=prefetch_count, bytes_max=prefetch_bytes, ordered=ordered,
            retry=rules, **limits,
        )  # fmt: skip
        subscription = make_subscription(
            topic, tags=tags, where=where, version=self.cluster.clock.now_ms()
        )
        stream = MessageStream(self._members, options, check_group_cached(group), subscription)
        self._consumers.add(stream)
        return stream

    def consumer(
        self,
        group: str,
        handler: Handler,
        *,
        concurrency: int = 20,
        start: Start = "first",
        prefetch_count: int = IN_FLIGHT_COUNT_MAX,
        prefetch_bytes: int = IN_FLIGHT_BYTES_MAX,
        ordered: bool = False,
        max_reconsume_times: int | None = None,
        retry_delay_level: int = 0,
        suspend_s: float = 1.0,
        batch_max: int | None = None,
        **limits: Unpack[ConsumeLimits],
    ) -> PushConsumer:
        """A consumer that calls `handler(message)`; subscribe it to topics, then start it.

        `ordered`: one message of a queue at a time, in its order; one that fails holds its queue
        and comes again after `suspend_s`. Else a failed message comes again by way of the broker
        after `retry_delay_level` (0: 10 s, 30 s … 2 h). After `max_reconsume_times` (None: 16, or
        what the group says; ordered: no end) it goes to the dead letters. With `batch_max` the
        handler gets a list of up to so many messages of one queue. `concurrency`: handlers that
        run at once. `start` and the prefetch limits are those of `subscribe`, `limits` those of
        `ConsumeLimits`. Raises ConfigurationError.
        """
        self._check_open()
        rules = RetryRules(max_reconsume_times, retry_delay_level, suspend_s)
        options = ConsumeOptions(
            start=start, count_max=prefetch_count, bytes_max=prefetch_bytes, ordered=ordered,
            retry=rules, **limits,
        )  # fmt: skip
        consumer = PushConsumer(
            self._members,
            options,
            check_group_cached(group),
            handler,
            concurrency=concurrency,
            version_ms=self.cluster.clock.now_ms,
            batch_max=batch_max,
        )
        self._consumers.add(consumer)
        return consumer

    def lite_pull(
        self,
        group: str,
        *,
        start: Start = "first",
        auto_commit: bool = True,
        **limits: Unpack[LitePullLimits],
    ) -> LitePullConsumer:
        """A consumer that is polled: subscribe or assign, then `poll`.

        `start` is that of `subscribe`. `auto_commit`: what earlier polls returned is committed
        every few seconds; without it by `commit`. `limits`: `count_max` and `bytes_max` (fetched
        ahead of a queue) and those of `ConsumeLimits`. Raises ConfigurationError."""
        self._check_open()
        settings = ConsumeOptions(start=start, auto_commit=auto_commit, **limits)
        consumer = LitePullConsumer(
            self.cluster, self._members, check_group_cached(group), settings
        )
        self._consumers.add(consumer)
        return consumer

    def pull_consumer(
        self,
        group: str = TOOLS_GROUP,
        *,
        on_undecodable: OnUndecodable = DELIVER,
        body_bytes_max: int = BODY_BYTES_MAX,
    ) -> PullConsumer:
        """Raw pulls: the caller keeps the offsets. `on_undecodable` and `body_bytes_max` are those
        of `ConsumeLimits`. Raises ConfigurationError."""
        self._check_open()
        return PullConsumer(
            self.cluster, group, on_undecodable=on_undecodable, body_bytes_max=body_bytes_max
        )

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic, sorted."""
        return await self.admin.queues(topic)

    # ---------------------------------------------------------------------- membership

    def _on_join(self) -> None:
        """Before a consumer enters a group."""
        self.cluster.affinity.check_loop()
        self._check_open()
        self._tracing()

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that uses this client; None before its first use."""
        return self.cluster.affinity.loop

    def member_of(self, group: str) -> Member | None:
        """This client's membership in a group. For this package."""
        return self._members.get(group)

    def consumers_of(self, group: str) -> list[Any]:
        """The consumers of a group that were made here. For this package."""
        return [consumer for consumer in tuple(self._consumers) if consumer.group == group]

    def producers_of(self, group: str) -> list[Producer]:
        """The producers of a group that were made here. For this package."""
        return [producer for producer in self._producers if producer.group == group]

    # ---------------------------------------------------------------------- life cycle

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this client is closed.", fix="Make a new one.")

    async def close(self) -> CloseReport:
        """Leaves the groups (committing offsets), settles in-flight sends, closes connections.

        The report names the messages of which nobody knows whether they are stored. Cancelling it
        ends the waiting for handlers and sends: it raises CancelledError when everything is closed.
        A second call returns the same report.
        """
        self.cluster.affinity.check_loop()
        return await self._closing.run(self._close)

    def _hurry(self) -> None:
        """A caller of close() was cancelled: nothing that it closes waits for others any more."""
        for one in (*self._consumers, *self._producers):
            if isinstance(one, PushConsumer | Producer):
                one.closing.hurry()

    async def _close(self) -> CloseReport:
        reports: list[CloseReport] = []

        async def close_producer(producer: Producer) -> None:
            reports.append(await producer.close())

        async def refuse_further_use() -> None:
            self._closed = True

        writer = self._trace_writer
        await run_each(
            [
                *(consumer.close for consumer in reversed(list(self._consumers))),
                refuse_further_use,
                self._members.close,
                *(
                    functools.partial(close_producer, producer)
                    for producer in reversed(self._producers)
                ),
                self._tasks.close,
                *([] if writer is None else [writer.close]),
                self._keeper.aclose,
                self.cluster.close,
            ]
        )
        unknown = tuple(message_id for report in reports for message_id in report.unknown)
        return CloseReport(sum(report.settled for report in reports), unknown)

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Sluice {';'.join(self.cluster.name_servers)} as {self.client_id}{state}>"
