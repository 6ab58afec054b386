"""The proxy as a server: its methods, its port, its periodic work, and its shutdown.

    socket -> GrpcServer -> CallDispatcher -> a method of a service object -> Backend

A service object has several methods of the protocol, one line each in `method_table`. It may also
define some of these methods, which the proxy calls by name:

- `run()`: periodic work, called every `TICK_S` seconds.
- `drain()`: respond to all parked calls as if no message had arrived, before the proxy closes.
- `reconnect_all()`: ask clients to connect elsewhere, before the proxy closes.
- `in_flight_count(client)`: the number of messages that the proxy tracks for a client.

At shutdown, clients are asked to connect elsewhere, and parked calls get a response. Open calls
then have up to `ProxyLimits.drain_s` seconds to end before the connections are closed.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import orjson

from sluicemq.acl.guard import Guard
from sluicemq.config import BrokerConfig
from sluicemq.config.keys import ServerConfig
from sluicemq.config.proxying import ProxyLimits
from sluicemq.config.settings import host_name
from sluicemq.net.dispatch import Peer
from sluicemq.net.grpc import ALPN, Call, GrpcServer
from sluicemq.net.limits import FairScheduler, ServerLimits
from sluicemq.net.openssl import TlsAcceptor
from sluicemq.proxy import STATUS_METHOD
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Backend
from sluicemq.proxy.clients import CLIENT_ID, ClientInfo, Clients
from sluicemq.proxy.convert import UNDECODABLE
from sluicemq.proxy.pulling import Pulling
from sluicemq.proxy.receiving import Receiving
from sluicemq.proxy.routes import Routing
from sluicemq.proxy.sending import Sending
from sluicemq.proxy.service import PATH, CallDispatcher, Method, MethodStats
from sluicemq.proxy.telemetry import Telemetry
from sluicemq.supervision import Supervisor
from sluicemq.wire.codes import RequestCode

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger("sluicemq.proxy")

TICK_S: Final = 1.0
"""The interval of `Proxy.run`, in seconds."""
LONG_POLL_METHODS: Final = frozenset({"ReceiveMessage", "PullMessage"})
"""The methods whose calls may wait for messages."""


def method_table(backend: Backend, clients: Clients, limits: ProxyLimits) -> Mapping[str, Method]:
    """Return the gRPC methods of the protocol, by name.

    They call service objects that use `backend` and `clients` and apply `limits`.
    """
    return {
        **_sending_methods(Sending(backend, limits)),
        **_client_methods(Routing(backend), Telemetry(backend, clients, limits)),
        **_receiving_methods(Receiving(backend, clients, limits)),
        **_pulling_methods(Pulling(backend, limits)),
    }


def _client_methods(routing: Routing, telemetry: Telemetry) -> dict[str, Method]:
    """Return the methods by which clients introduce themselves and find queues, by name.

    Each Method has the class of the request, the class of the response, and the handler.
    """
    return {
        "Telemetry": Method(
            m.TelemetryCommand, m.TelemetryCommand, telemetry.telemetry, is_bidirectional=True
        ),
        "Heartbeat": Method(m.HeartbeatRequest, m.HeartbeatResponse, telemetry.heartbeat),
        "NotifyClientTermination": Method(
            m.NotifyClientTerminationRequest,
            m.NotifyClientTerminationResponse,
            telemetry.notify_client_termination,
        ),
        "QueryRoute": Method(m.QueryRouteRequest, m.QueryRouteResponse, routing.query_route),
        "QueryAssignment": Method(
            m.QueryAssignmentRequest, m.QueryAssignmentResponse, routing.query_assignment
        ),
    }


def _sending_methods(sending: Sending) -> dict[str, Method]:
    """Return the methods of producers, by their names in gRPC.

    Each Method has the class of the request, the class of the response, and the handler.
    """
    return {
        "SendMessage": Method(m.SendMessageRequest, m.SendMessageResponse, sending.send_message),
        "EndTransaction": Method(
            m.EndTransactionRequest, m.EndTransactionResponse, sending.end_transaction
        ),
        "RecallMessage": Method(
            m.RecallMessageRequest, m.RecallMessageResponse, sending.recall_message
        ),
    }


def _receiving_methods(receiving: Receiving) -> dict[str, Method]:
    """Return the methods of consumers that receive messages by pop, by their names in gRPC.

    Each Method has the class of the request, the class of the response, and the handler.
    """
    return {
        "ReceiveMessage": Method(
            m.ReceiveMessageRequest,
            m.ReceiveMessageResponse,
            receiving.receive,
            streams_responses=True,
        ),
        "AckMessage": Method(m.AckMessageRequest, m.AckMessageResponse, receiving.acknowledge),
        "ChangeInvisibleDuration": Method(
            m.ChangeInvisibleDurationRequest,
            m.ChangeInvisibleDurationResponse,
            receiving.change_invisible_duration,
        ),
        "ForwardMessageToDeadLetterQueue": Method(
            m.ForwardMessageToDeadLetterQueueRequest,
            m.ForwardMessageToDeadLetterQueueResponse,
            receiving.forward_to_dead_letter_queue,
        ),
    }


def _pulling_methods(pulling: Pulling) -> dict[str, Method]:
    """Return the methods of clients that read queues by offset, by their names in gRPC.

    Each Method has the class of the request, the class of the response, and the handler.
    """
    return {
        "PullMessage": Method(
            m.PullMessageRequest, m.PullMessageResponse, pulling.pull, streams_responses=True
        ),
        "UpdateOffset": Method(
            m.UpdateOffsetRequest, m.UpdateOffsetResponse, pulling.update_offset
        ),
        "GetOffset": Method(m.GetOffsetRequest, m.GetOffsetResponse, pulling.get_offset),
        "QueryOffset": Method(m.QueryOffsetRequest, m.QueryOffsetResponse, pulling.query_offset),
        "SyncLiteSubscription": Method(
            m.SyncLiteSubscriptionRequest,
            m.SyncLiteSubscriptionResponse,
            pulling.sync_lite_subscription,
        ),
    }


CLIENT_LABELS_MAX: Final = 64
"""The maximum number of pairs of language and version that the client metric reports.

Clients choose their version strings themselves, so their number must be limited.
"""
_NODE_LABELS: Final = ("cluster", "node_type", "node_id", "proxy_mode")


class Proxy:
    """A server for gRPC clients.

    It serves from `start` until `close`. It does not close the backend; its creator does that.
    """

    def __init__(
        self,
        backend: Backend,
        guard: Guard | None,
        shares: FairScheduler,
        config: ServerConfig = ServerConfig(),  # noqa: B008 - frozen
        limits: ProxyLimits = ProxyLimits(),  # noqa: B008 - frozen
    ) -> None:
        """Create a proxy that does not listen yet.

        `guard` decides which account may do what; None means that everything is allowed. `shares`
        distributes the time of the event loop over the connections. `config` has the TLS settings,
        connection limits and protected mode. `limits` are the limits of calls.
        """
        self.backend = backend
        self.config = config
        self.clients = Clients(backend)
        self.dispatcher = CallDispatcher(self.clients, guard, backend.clock, limits)
        self._drain_s = limits.drain_s
        methods = method_table(backend, self.clients, limits)
        self.methods = self.dispatcher.bind_methods(methods) | {STATUS_METHOD: self._answer_status}
        """The handler of each method, by path."""
        # Each conversation is a bound method of its service object.
        services: list[Any] = [
            getattr(method.conversation, "__self__", None) for method in methods.values()
        ]
        self.services = list(dict.fromkeys([*services, self.clients]))
        """The service objects that have methods of the protocol, and the clients."""
        self._shares = shares
        tls = None
        if config.tls_mode != "disabled":
            tls = TlsAcceptor(config, ALPN)
        self._server = GrpcServer(
            self.methods,
            shares,
            is_guarded=guard is not None,
            on_disconnect=self._connection_lost,
            limits=ServerLimits.from_config(config),
            tls=tls,
        )
        self.jobs = Supervisor(backend.clock, log)
        self._runner: asyncio.TimerHandle | None = None
        self.metrics_port: int | None = None
        """The port of the proxy's own metrics, if it is a standalone proxy that serves them."""

    @property
    def port(self) -> int:
        """The port on which the proxy listens; the chosen one if `start` got 0."""
        return self._server.ports[0]

    @property
    def is_serving(self) -> bool:
        """Whether the proxy has been started and not closed."""
        return self._runner is not None

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All connections."""
        return self._server.peers

    async def start(self, host: str | None, port: int) -> None:
        """Listen on a host (None means all addresses) and port, and serve.

        Raises ConfigurationError if the port is not available or a certificate is not usable.
        """
        await self._server.start(host, [port])
        log.info("The proxy listens for gRPC clients on %s:%d.", host or "*", self.port)
        self._runner = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    async def close(self) -> None:
        """Stop listening, drain the open calls, and close all connections.

        Clients are asked to connect elsewhere. Open calls then have up to `ProxyLimits.drain_s`
        seconds to end. Does nothing if the proxy is not serving.
        """
        if self._runner is None:
            return
        self._runner.cancel()
        self._runner = None
        self._server.stop_listening()
        self._call_each("reconnect_all")
        self._call_each("drain")
        await self._server.drain(self._drain_s)
        await self._server.close()

    def run(self) -> None:
        """Do the periodic work of all service objects."""
        self._call_each("run")

    def collect_status(self) -> dict[str, Any]:
        """Return the connections, warnings, methods and clients of the proxy as a JSON object.

        Methods that were never called are left out.
        """
        open_calls = self._count_open_calls()
        return {
            "mode": "local" if isinstance(self.config, BrokerConfig) else "cluster",
            "connections": len(self.peers),
            "warnings": self.backend.list_warnings(),
            "methods": [
                _method_status(name, stats)
                for name, stats in self.dispatcher.stats_by_method.items()
                if stats.started_count
            ],
            "clients": [
                self._client_status(client_info, open_calls[client_info.client_id])
                for client_info in self.clients.list_clients()
            ],
        }

    def _count_open_calls(self) -> dict[str, Counter[str]]:
        """Return the number of open calls of each client id, by method.

        The result is a defaultdict: a client without open calls gets an empty counter. Telemetry
        streams are not counted, because they last as long as their clients.
        """
        open_calls: dict[str, Counter[str]] = defaultdict(Counter)
        for call in self._server.open_calls:
            name = call.headers.get(":path", "").removeprefix(PATH)
            if name != "Telemetry":
                open_calls[call.headers.get(CLIENT_ID, "")][name] += 1
        return open_calls

    def _client_status(self, client_info: ClientInfo, open_calls: Counter[str]) -> dict[str, Any]:
        """Return the entry of a client in the status.

        `open_calls` has the number of the client's open calls by method.
        """
        client = self.clients.by_id[client_info.client_id]
        work_counts = [
            service.in_flight_count(client)
            for service in self.services
            if hasattr(service, "in_flight_count")
        ]
        return asdict(client_info) | {
            "in_flight": open_calls.total(),
            "polls": sum(open_calls[name] for name in LONG_POLL_METHODS),
            "works_on": sum(work_counts),
        }

    def _answer_status(self, _message: bytes, call: Call) -> bytes:
        """Return the status as JSON. Raises CallError if the account may not see it."""
        self.dispatcher.check_permission(RequestCode.GET_BROKER_RUNTIME_INFO, call)
        return orjson.dumps(self.collect_status())

    def _tick(self) -> None:
        """Do the periodic work, and schedule the next call."""
        self._runner = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self.run()

    def _call_each(self, name: str) -> None:
        """Call the method `name` of each service object that has such a method.

        Failures are logged, not raised.
        """
        for service in self.services:
            method = getattr(service, name, None)
            if method is not None:
                self.jobs.run_now(f"{name} of {type(service).__name__}", method)

    def _connection_lost(self, peer: Peer) -> None:
        """Remove the clients that have no other connection, and the connection's share."""
        self.clients.connection_lost(peer)
        self._shares.remove(peer)


def _method_status(name: str, stats: MethodStats) -> dict[str, Any]:
    """Return the entry of a method in the proxy's status, a JSON object."""
    mean_ms = 0.0
    if stats.ended_count:
        mean_ms = round(stats.latency_sum_ms / stats.ended_count, 3)
    return {
        "method": name,
        "in_flight": stats.in_flight_count,
        "codes": stats.count_by_status_name,
        "mean_ms": mean_ms,
    }


_MetricRow = tuple[Any, str, str, tuple[str, ...], list[tuple[Any, ...]]]
"""The class, name, help text and labels of a metric, and its samples.

A sample has a value for each label, followed by the number.
"""


class ProxyCollector:
    """A Prometheus collector for the metrics of a proxy.

    `collect` runs in the thread of prometheus-client, so it copies what the event loop changes.
    RocketMQ's proxy has only `rocketmq_proxy_up`; the other metrics are extensions of SluiceMQ.
    """

    def __init__(self, proxy: "Proxy") -> None:
        """Create the collector of `proxy`, which serves one broker or a cluster."""
        self._proxy = proxy
        config = proxy.config
        is_local = isinstance(config, BrokerConfig)
        # The values of `_NODE_LABELS`, which each metric has.
        self._node = [
            getattr(config, "cluster_name", ""),
            "proxy",
            getattr(config, "broker_name", host_name()),
            "local" if is_local else "cluster",
        ]

    def collect(self) -> "Iterator[Metric]":
        """Yield all metrics with their current values."""
        from prometheus_client.core import (  # noqa: PLC0415 - only where metrics are served
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        rows = self._metric_rows(CounterMetricFamily, GaugeMetricFamily)
        for metric_class, metric_name, help_text, labels, samples in rows:
            metric = metric_class(metric_name, help_text, labels=[*_NODE_LABELS, *labels])
            for *label_values, measurement in samples:
                metric.add_metric([*self._node, *label_values], measurement)
            yield metric

        latency = HistogramMetricFamily(
            "rocketmq_proxy_rpc_latency",
            "Milliseconds from a call to its response, with the wait of a long poll.",
            labels=[*_NODE_LABELS, "rpc"],
        )
        for name, stats in self._proxy.dispatcher.stats_by_method.items():
            if stats.ended_count:
                latency.add_metric([*self._node, name], stats.buckets, stats.latency_sum_ms)
        yield latency

    def _metric_rows(self, counter: Any, gauge: Any) -> list[_MetricRow]:
        """Return the metrics that are not histograms. `counter` and `gauge` are their classes."""
        proxy = self._proxy
        return [
            (
                gauge,
                "rocketmq_proxy_up",
                "1 while the proxy serves.",
                (),
                [(int(proxy.is_serving),)],
            ),
            (
                gauge,
                "rocketmq_proxy_connections",
                "Connections of clients.",
                (),
                [(len(proxy.peers),)],
            ),
            (
                gauge,
                "rocketmq_proxy_clients",
                "Clients by language and version.",
                ("language", "version"),
                self._client_samples(),
            ),
            (
                gauge,
                "rocketmq_proxy_calls_in_flight",
                "Calls without a response yet.",
                ("rpc",),
                [
                    (name, stats.in_flight_count)
                    for name, stats in proxy.dispatcher.stats_by_method.items()
                ],
            ),
            (
                counter,
                "rocketmq_proxy_calls",
                "Calls by the status of their response.",
                ("rpc", "code"),
                self._call_samples(),
            ),
            (
                counter,
                "rocketmq_proxy_undecodable_bodies",
                "Messages whose body could not be decompressed and was delivered as it is stored.",
                (),
                [(UNDECODABLE.value,)],
            ),
            (
                counter,
                "sluicemq_background_failures",
                "Failures of background jobs, by job.",
                ("job",),
                [*self._proxy.jobs.failures.copy().items()],
            ),
        ]

    def _client_samples(self) -> list[tuple[Any, ...]]:
        """Return (language, version, number of clients) for the most frequent pairs of both."""
        clients = tuple(self._proxy.clients.by_id.values())
        counts = Counter((client.wire_language, client.version) for client in clients)
        return [
            (language, version, count)
            for (language, version), count in counts.most_common(CLIENT_LABELS_MAX)
        ]

    def _call_samples(self) -> list[tuple[Any, ...]]:
        """Return a list of (method, status name, number of ended calls with this status)."""
        samples: list[tuple[Any, ...]] = []
        for method_name, stats in self._proxy.dispatcher.stats_by_method.items():
            samples.extend(
                (method_name, status_name, count)
                for status_name, count in stats.count_by_status_name.items()
            )
        return samples

    def describe(self) -> "list[Metric]":
        """Return an empty list, so that registering this does not call `collect`."""
        return []
