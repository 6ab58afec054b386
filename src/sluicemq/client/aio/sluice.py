"""The `Sluice` class: the one object that an application creates to send and consume messages.

    async with Sluice("127.0.0.1:9876") as mq:
        await mq.send("flights", body, tag="UA", keys=["N14228"], properties={"origin": "EWR"})
        async for message in mq.subscribe("flights", group="late", where="dep_delay > 60"):
            ...
            await message.ack()

A `Sluice` owns the connections to name servers and brokers, the heartbeat thread, the producers and
consumers that it creates, and one `Member` for each consumer group. It connects to a server when a
call first needs that server. `close` waits for sends in progress, commits offsets and leaves the
consumer groups.
"""

import asyncio
import functools
import os
import weakref
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Concatenate, Final, ParamSpec, Self, TypedDict, TypeVar, Unpack

from sluicemq.client.aio.broker_requests import BrokerRequests
from sluicemq.client.aio.cluster import Admin, Cluster
from sluicemq.client.aio.consumer import Handler, MessageStream, PushConsumer
from sluicemq.client.aio.members import Member
from sluicemq.client.aio.memberships import Memberships
from sluicemq.client.aio.offsets import DEFAULT_INSTANCE, OffsetFiles
from sluicemq.client.aio.producer import (
    CloseReport,
    Producer,
    Requester,
    TraceWriter,
    sender_method,
)
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
from sluicemq.client.core.send_attempts import SEND_TIMEOUT_MS
from sluicemq.client.core.sending import (
    DEFAULT_PRODUCER_GROUP,
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
    """Return the name servers to use when none are given.

    They come from the environment variable NAMESRV_ADDR, which RocketMQ's own clients read too. If
    it is not set, return `127.0.0.1:9876`.
    """
    return os.environ.get("NAMESRV_ADDR") or DEFAULT_NAME_SERVER


class ClientOptions(TypedDict, total=False):
    """Options of a `Sluice` besides its name servers. `Sluice` describes them."""

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


def default_producer_method(
    method: Callable[Concatenate[Producer, P], T],
) -> Callable[Concatenate[Any, P], T]:
    """Make a method of `Sluice` that calls `method` on the client's default producer.

    The new method has the signature and the docstring of `method`.
    """

    @functools.wraps(method)
    def call(self: "Sluice", /, *arguments: P.args, **named: P.kwargs) -> T:
        return method(self.default_producer, *arguments, **named)

    return call


@with_hints
class Sluice:
    """A client of a RocketMQ-compatible cluster, for asyncio.

    One `Sluice` is enough for a whole program: it sends, consumes and administers, and all its
    producers and consumers share one connection to each server. Use it as an async context manager,
    or call `close` at the end:

        async with Sluice("127.0.0.1:9876") as mq:
            result = await mq.send("orders", b"17 apples", keys="order-4711")

    A `Sluice` belongs to the process that created it and to the event loop that uses it first. In
    another event loop, or after a fork, its methods raise ConfigurationError. After `close` it
    cannot be used again: sending and creating producers or consumers raise ClosedError.
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
        instance: str = DEFAULT_INSTANCE,
        offsets_directory: str | None = None,
        files: Files = SYSTEM_FILES,
        rng: Random | None = None,
    ) -> None:
        """Create a client. Nothing is connected before a call needs a server.

        - `name_servers`: the addresses of the name servers, as `"host:port;host:port"` or a list of
          `"host:port"`. None (the default) means the environment variable NAMESRV_ADDR, or
          `127.0.0.1:9876` if that is not set.
        - `credentials`: a pair (access key, secret key) or a `Credentials`. None sends unsigned
          requests.
        - `producer_group`: the group of the default producer, which `send` and its variants use.
          The default is `"sluicemq-producer"`.
        - `send_timeout_ms`: the time limit in milliseconds of one send with all its attempts
          (10,000).
        - `client_id`: the name by which brokers know this client. Two running clients must not
          share one. None (the default) makes a unique one.
        - `on_moved`: called with an `OffsetMoved` when a consumer must continue at another offset,
          for example because retention deleted the messages that it wanted.
        - `trace`: True writes trace records about sent and consumed messages to the topic
          RMQ_SYS_TRACE_TOPIC; a string names another topic. `sluice trace` shows them. The default
          is False.
        - `tls`: True, or a `Tls` with certificate files. None (the default) follows the environment
          variable SLUICE_TLS; False means no TLS.
        - `offsets_directory`: where broadcasting consumers keep their offsets. None means
          `~/.rocketmq_offsets`. Each client has a subdirectory, named `client_id` if that is given,
          else `<address>@<instance>`.
        - `instance`: the last part of that name (`"DEFAULT"`). Clients on one machine that
          broadcast for the same group need different ones.

        The other parameters are for tests: `clock` tells the time, `network` carries the bytes,
        `files` stores offsets, and `rng` chooses the queue with which each producer begins. With
        `heartbeat_thread=False` heartbeats run on the caller's event loop instead of a thread; this
        suits clusters in one process only, because a busy event loop then delays the heartbeats.

        Raises ConfigurationError if an argument is invalid.
        """
        _check_arguments(client_id, on_moved)
        network = with_tls(network, Tls.resolve(tls))
        self.client_id: str = client_id or make_client_id(clock)
        """The name by which brokers know this client."""
        self.cluster: Cluster = Cluster(
            name_servers or default_name_servers(),
            credentials=credentials,
            clock=clock,
            connect=network.dial,
            client_id=self.client_id,
            rng=rng,
        )
        """The connections and routes of this client. For internal use."""
        self._heartbeat_thread = HeartbeatThread(
            self.client_id,
            credentials=self.cluster.credentials,
            # A lambda, because `_broker_requests` does not exist yet.
            on_request=lambda *request: self._broker_requests.handle(*request),  # noqa: PLW0108 - see above
            connect=network.dial,
            has_thread=heartbeat_thread,
            outages=self.cluster.directory.outages,
        )
        self._tasks = Tasks()
        self._requester = Requester(self.cluster, self._heartbeat_thread)
        self._broker_requests = BrokerRequests(
            self, self._tasks, self._requester, self._heartbeat_thread, clock.now_ms()
        )
        self._members = Memberships(self.cluster, self._heartbeat_thread, self._on_join)
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
            uses_thread=heartbeat_thread,
        )
        self.cluster.directory.on_route_change = self._on_route_change
        self.cluster.on_moved = on_moved
        self.admin: Admin = Admin(self.cluster)
        """Administration of the cluster: topics, groups, offsets, messages."""
        self._producer_group = producer_group
        self._send_timeout_ms = send_timeout_ms
        self._trace_writer: TraceWriter | None = None
        topic = parse_trace_option(trace)
        if topic is not None:
            self.cluster.trace = Tracing(topic, clock, make_unique_ids(clock).make_id)

    # ------------------------------------------------------------------------- sending

    @functools.cached_property
    def default_producer(self) -> Producer:
        """The producer that `send` and its variants use. It is created on first use."""
        return self.producer(self._producer_group, timeout_ms=self._send_timeout_ms)

    @functools.cached_property
    def sender(self) -> Sender:
        """The `Sender` of the default producer."""
        return self.default_producer.sender

    def producer(
        self, group: str = DEFAULT_PRODUCER_GROUP, **options: Unpack[ProducerOptions]
    ) -> Producer:
        """Create a producer with a group and settings of its own.

        `options` are those of `ProducerOptions`: timeout_ms, retries, retries_async, retry_unsafe,
        compress_from_bytes, delay_level_max and listener. The client closes the producer with
        itself.

        Raises ConfigurationError if an option is invalid, and ClosedError after `close`.
        """
        self._check_open()
        producer = Producer(
            self.cluster,
            group=group,
            on_first_send=self._announce_producer,
            trace=self._get_tracing(),
            requester=self._requester,
            **options,
        )
        self._producers.append(producer)
        return producer

    def _get_tracing(self) -> Tracing | None:
        """Return the client's `Tracing`, or None if tracing is off.

        The first call starts the writer of traces, which needs a running event loop.
        """
        trace = self.cluster.trace
        if trace is not None and self._trace_writer is None:
            self._trace_writer = TraceWriter(self.cluster, trace)
        return trace

    def _on_route_change(self, topic: str) -> None:
        """Send heartbeats to the brokers of a topic, whose route has changed.

        So a broker that is new in the route learns the groups of this client.
        """
        if self._members or self._producers:
            routes = self.cluster.routes
            self._heartbeat_thread.update_addresses(
                routes.broker_addresses([topic]), routes.broker_addresses(routes.routes)
            )

    def _announce_producer(self, group: str, topic: str) -> None:
        """Send heartbeats now, so that the brokers of `topic` know the producer group."""
        self._heartbeat_thread.add_producer_group(group)
        self._heartbeat_thread.update_addresses(self.cluster.routes.broker_addresses([topic]))
        self._heartbeat_thread.send_heartbeats()

    send: Final = sender_method(Sender.send_message)
    send_oneway: Final = sender_method(Sender.send_oneway)
    send_batch: Final = sender_method(Sender.send_batch)
    recall: Final = sender_method(Sender.recall)
    send_soon: Final = default_producer_method(Producer.send_soon)
    request: Final = default_producer_method(Producer.request)
    transaction: Final = default_producer_method(Producer.transaction)

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
        """Return a stream of the messages of `topic` for the consumer group `group`.

            async for message in mq.subscribe("orders", group="billing", tags="paid||refunded"):
                ...
                await message.ack()

        Nothing is sent to a server until the stream is iterated or started. The members of a group
        share the messages of a topic and must have the same filter.

        - `tags`: a tag, or several joined by `||`. `where`: a SQL92 expression over properties,
          such as `"price > 3"`. At most one of them can be given; without both, all messages match.
        - `start`: where a group without a committed offset begins: `"first"` (all stored messages,
          the default), `"last"` (only new ones), or a time as a datetime or in milliseconds since
          1970.
        - `prefetch_count` (1,000) and `prefetch_bytes` (64 MiB): the number and size of the
          unacknowledged messages of one queue from which on the client stops fetching from that
          queue.
        - `ordered`: deliver one message of a queue at a time, in the order of offsets, and the next
          one after it was acknowledged. One member at a time locks a queue for that.
        - `max_reconsume_times`: the number of redeliveries before a rejected message becomes a dead
          letter. None (the default) leaves that to the group's configuration at the broker (16);
          for an ordered group it means no limit.
        - `retry_delay_level`: when a rejected message is delivered again. 0 (the default) means
          increasing delays (10 s, 30 s … 2 h), 1 to 18 a delay level of the broker, -1 a dead
          letter at once. Ordered groups only distinguish -1.
        - `suspend_s`: how many seconds the queue of an ordered group pauses after a rejected
          message (1.0).
        - `limits`: the other options, such as `broadcast` and `commit_period_s`; `ConsumeLimits`
          describes them with their defaults.

        Raises FilterSyntaxError if the filter does not compile, ConfigurationError if an argument
        is invalid, and ClosedError after `close`. Errors of the server are raised later, by
        `MessageStream.start` or the first message.
        """
        self._check_open()
        rules = RetryRules(max_reconsume_times, retry_delay_level, suspend_s)
        options = ConsumeOptions(
            start=start,
            count_max=prefetch_count,
            bytes_max=prefetch_bytes,
            ordered=ordered,
            retry=rules,
            **limits,
        )
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
        """Return a consumer that calls `handler` for each message.

        Subscribe it to topics, then run it:

            async def handle(message: ReceivedMessage) -> None:
                ...

            consumer = mq.consumer("billing", handle).subscribe("orders", tags="paid")
            await consumer.run()

        - `group`: the consumer group. Its members share the messages of a topic.
        - `handler`: a function of one `ReceivedMessage`. A coroutine function runs on the event
          loop, a plain function on a thread. Returning acknowledges the message; `PushConsumer`
          describes what an exception does.
        - `concurrency`: how many handlers run at the same time (20).
        - `batch_max`: None (the default) calls the handler with one message. A number from 1 to
          1,024 calls it with a list of up to that many messages of one queue.
        - `ordered`: process one message of a queue at a time, in the order of offsets. A message
          whose handler fails blocks its queue and is processed again after `suspend_s` seconds
          (1.0).
        - `retry_delay_level`: when a failed message of a group that is not ordered is delivered
          again. 0 (the default) means increasing delays (10 s, 30 s … 2 h), 1 to 18 a delay level
          of the broker, -1 a dead letter at once.
        - `max_reconsume_times`: the number of redeliveries before a failed message becomes a dead
          letter. None (the default) leaves that to the group's configuration at the broker (16);
          for an ordered group it means no limit.

        `start`, `prefetch_count`, `prefetch_bytes` and `limits` are the options of `subscribe`.

        Raises ConfigurationError if an argument is invalid, and ClosedError after `close`.
        """
        self._check_open()
        rules = RetryRules(max_reconsume_times, retry_delay_level, suspend_s)
        options = ConsumeOptions(
            start=start,
            count_max=prefetch_count,
            bytes_max=prefetch_bytes,
            ordered=ordered,
            retry=rules,
            **limits,
        )
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
        """Return a consumer that the application polls.

        Subscribe it to topics or assign queues to it, then call `poll`:

            async with mq.lite_pull("billing") as consumer:
                await consumer.subscribe("orders")
                while True:
                    for message in await consumer.poll():
                        ...

        - `start`: where a group without a committed offset begins, as in `subscribe`.
        - `auto_commit`: commit the messages of earlier polls every few seconds (`commit_period_s`,
          5 s) and at close. With False, only `commit` commits.
        - `limits`: `count_max` and `bytes_max`, the prefetch limits of one queue, and the options
          of `ConsumeLimits`.

        Raises ConfigurationError if an argument is invalid, and ClosedError after `close`.
        """
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
        """Return a consumer that pulls from queues and offsets that the caller chooses.

        It joins no group, fetches nothing in advance and commits only when `commit` is called.
        `group` is the name under which it pulls and commits; the default is `"TOOLS_CONSUMER"`.
        `on_undecodable` and `body_bytes_max` are options of `ConsumeLimits`.

        Raises ConfigurationError if an argument is invalid, and ClosedError after `close`.
        """
        self._check_open()
        return PullConsumer(
            self.cluster, group, on_undecodable=on_undecodable, body_bytes_max=body_bytes_max
        )

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues of a topic that can be read, sorted.

        Raises RouteNotFoundError if the topic does not exist, and NameServerUnreachableError.
        """
        return await self.admin.queues(topic)

    # ---------------------------------------------------------------------- membership

    def _on_join(self) -> None:
        """Check that a consumer may join a group now, and start the trace writer if tracing is on.

        Raises ConfigurationError in another event loop or process, and ClosedError after `close`.
        """
        self.cluster.affinity.check_loop()
        self._check_open()
        self._get_tracing()

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that uses this client, or None before its first use."""
        return self.cluster.affinity.loop

    def member_of(self, group: str) -> Member | None:
        """Return this client's membership in a consumer group, or None. For internal use."""
        return self._members.get(group)

    def consumers_of(self, group: str) -> list[Any]:
        """Return the consumers of a group that this client created. For internal use."""
        return [consumer for consumer in tuple(self._consumers) if consumer.group == group]

    def producers_of(self, group: str) -> list[Producer]:
        """Return the producers of a group that this client created. For internal use."""
        return [producer for producer in self._producers if producer.group == group]

    # ---------------------------------------------------------------------- life cycle

    def _check_open(self) -> None:
        """Raise ClosedError after `close`."""
        if self._closed:
            raise ClosedError("this client is closed.", fix="Create a new client.")

    async def close(self) -> CloseReport:
        """Leave the consumer groups, finish the sends in progress and close all connections.

        Running handlers get up to 30 seconds to finish, then offsets are committed; sends get their
        own time limits. Return a `CloseReport`, which lists the messages that may or may not be
        stored. A second call returns the same report.

        If the caller is cancelled, `close` stops waiting for handlers and sends, closes everything,
        and then raises CancelledError. Raises ConfigurationError in another event loop or process.
        """
        self.cluster.affinity.check_loop()
        return await self._closing.run(self._close)

    def _hurry(self) -> None:
        """Stop waiting for handlers and sends: a caller of `close` was cancelled."""
        for user in (*self._consumers, *self._producers):
            if isinstance(user, PushConsumer | Producer):
                user.closing.hurry()

    async def _close(self) -> CloseReport:
        """Close consumers, memberships, producers and connections, in this order.

        All steps are done even if one of them fails; the first error is raised at the end. New work
        is refused once the consumers are closed. Returns the number of sends that ended and the ids
        of messages that may be stored. `close` calls this once.
        """
        reports: list[CloseReport] = []

        async def close_producer(producer: Producer) -> None:
            reports.append(await producer.close())

        async def refuse_further_use() -> None:
            self._closed = True

        steps: list[Callable[[], Awaitable[object]]] = []
        steps += [consumer.close for consumer in reversed(list(self._consumers))]
        steps += [refuse_further_use, self._members.close]
        for producer in reversed(self._producers):
            steps.append(functools.partial(close_producer, producer))
        steps.append(self._tasks.close)
        if self._trace_writer is not None:
            steps.append(self._trace_writer.close)
        steps += [self._heartbeat_thread.aclose, self.cluster.close]
        await run_each(steps)

        settled_count = 0
        unknown_ids: list[str] = []
        for report in reports:
            settled_count += report.settled
            unknown_ids += report.unknown
        return CloseReport(settled_count, tuple(unknown_ids))

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the client."""
        await self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Sluice {';'.join(self.cluster.name_servers)} as {self.client_id}{state}>"


def _check_arguments(client_id: object, on_moved: object) -> None:
    """Raise ConfigurationError if `client_id` is not a string or `on_moved` not a function.

    None is valid for both.
    """
    if client_id is not None and not isinstance(client_id, str):
        raise ConfigurationError(
            f"client_id must be a string, got {client_id!r:.60}.",
            fix="Pass a string, or None for a unique id.",
        )
    if on_moved is not None and not callable(on_moved):
        raise ConfigurationError(
            f"on_moved must be a function, got {on_moved!r:.60}.",
            fix="Pass a function of one argument, an OffsetMoved.",
        )
