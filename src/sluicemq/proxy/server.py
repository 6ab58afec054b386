"""The proxy served: its methods, its port, its clock, its end.

    socket -> GrpcServer -> Calls -> a family's method -> Backend

A family is a class with a line for each of its methods in `table`. One that has something to do by
the clock has `run()`, which is called once a second. One that holds calls back has `drain()`, which
answers all of them as if nothing had come. One that keeps messages for clients has
`held_by(client)`, how many.

The end takes nothing away from anybody: clients are told to go elsewhere, who waits is answered,
answers on their way leave, and only then connections close.
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
from sluicemq.proxy import STATUS
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Backend
from sluicemq.proxy.clients import CLIENT_ID, Clients
from sluicemq.proxy.convert import UNDECODABLE
from sluicemq.proxy.pulling import Pulling
from sluicemq.proxy.receiving import Receiving
from sluicemq.proxy.routes import Routing
from sluicemq.proxy.sending import Sending
from sluicemq.proxy.service import PATH, Calls, Method
from sluicemq.proxy.telemetry import Telemetry
from sluicemq.supervision import Supervisor
from sluicemq.wire.codes import RequestCode

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger("sluicemq.proxy")

RUN_S: Final = 1.0
POLLS: Final = frozenset({"ReceiveMessage", "PullMessage"})


def table(backend: Backend, clients: Clients, limits: ProxyLimits) -> Mapping[str, Method]:
    """Return the methods by name, each bound to the family that serves it within `limits`."""
    routing, pulling = Routing(backend), Pulling(backend, limits)
    telemetry = Telemetry(backend, clients, limits)
    receiving = Receiving(backend, clients, limits)
    sending = Sending(backend, limits)
    return {
        "SendMessage": Method(m.SendMessageRequest, m.SendMessageResponse, sending.send_message),
        "EndTransaction": Method(
            m.EndTransactionRequest, m.EndTransactionResponse, sending.end_transaction
        ),
        "RecallMessage": Method(
            m.RecallMessageRequest, m.RecallMessageResponse, sending.recall_message
        ),
        "Telemetry": Method(
            m.TelemetryCommand, m.TelemetryCommand, telemetry.telemetry, is_dialogue=True
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
        "ReceiveMessage": Method(
            m.ReceiveMessageRequest, m.ReceiveMessageResponse, receiving.receive, streams=True
        ),
        "AckMessage": Method(m.AckMessageRequest, m.AckMessageResponse, receiving.acknowledge),
        "ChangeInvisibleDuration": Method(
            m.ChangeInvisibleDurationRequest, m.ChangeInvisibleDurationResponse, receiving.change
        ),
        "ForwardMessageToDeadLetterQueue": Method(
            m.ForwardMessageToDeadLetterQueueRequest,
            m.ForwardMessageToDeadLetterQueueResponse,
            receiving.forward,
        ),
        "PullMessage": Method(
            m.PullMessageRequest, m.PullMessageResponse, pulling.pull, streams=True
        ),
        "UpdateOffset": Method(m.UpdateOffsetRequest, m.UpdateOffsetResponse, pulling.update),
        "GetOffset": Method(m.GetOffsetRequest, m.GetOffsetResponse, pulling.get),
        "QueryOffset": Method(m.QueryOffsetRequest, m.QueryOffsetResponse, pulling.query),
        "SyncLiteSubscription": Method(
            m.SyncLiteSubscriptionRequest, m.SyncLiteSubscriptionResponse, pulling.sync_lite
        ),
    }


KINDS_MAX: Final = 64
"""Clients say their versions by themselves; so many of them become labels."""
_LABELS: Final = ("cluster", "node_type", "node_id", "proxy_mode")


class Proxy:
    """Serves clients of gRPC. `start` and `close` bracket its life; whoever made the backend closes
    it afterwards."""

    def __init__(
        self,
        backend: Backend,
        guard: Guard | None,
        shares: FairScheduler,
        config: ServerConfig = ServerConfig(),  # noqa: B008 - frozen
        limits: ProxyLimits = ProxyLimits(),  # noqa: B008 - frozen
    ) -> None:
        """`guard`: None lets everybody do everything. `config`: TLS, limits of connections and
        protected mode, as of a broker. `limits`: what calls may ask for."""
        self.backend = backend
        self.config = config
        self.clients = Clients(backend)
        self.service = Calls(self.clients, guard, backend.clock, limits)
        self._drain_s = limits.drain_s
        methods = table(backend, self.clients, limits)
        self.methods = self.service.methods(methods) | {STATUS: self._status}
        """What is called, by path."""
        families: list[Any] = [getattr(it.talk, "__self__", None) for it in methods.values()]
        self.families = list(dict.fromkeys([*families, self.clients]))
        """Those that methods are of."""
        self._shares = shares
        self._server = GrpcServer(
            self.methods,
            shares,
            is_guarded=guard is not None,
            on_disconnect=self._disconnected,
            limits=ServerLimits.from_config(config),
            tls=None if config.tls_mode == "disabled" else TlsAcceptor(config, ALPN),
        )
        self.jobs = Supervisor(backend.clock, log)
        self._runner: asyncio.TimerHandle | None = None
        self.metrics_port: int | None = None
        """The port of its own metrics, if it stands alone and serves them."""

    @property
    def port(self) -> int:
        """The port it listens at: the one that was free when it was told 0."""
        return self._server.ports[0]

    @property
    def is_serving(self) -> bool:
        return self._runner is not None

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Everyone who is connected."""
        return self._server.peers

    async def start(self, host: str | None, port: int) -> None:
        """Serve. Raises ConfigurationError when the port cannot be had, or a certificate cannot be
        used."""
        await self._server.start(host, [port])
        log.info("the proxy for gRPC clients listens at %s:%d", host or "*", self.port)
        self._runner = asyncio.get_running_loop().call_later(RUN_S, self._tick)

    async def close(self) -> None:
        """Drain, then close."""
        if self._runner is None:
            return
        self._runner.cancel()
        self._runner = None
        self._server.stop_listening()
        self._each("reconnect_all")
        self._each("drain")
        await self._server.drain(self._drain_s)
        await self._server.close()

    def run(self) -> None:
        """What has to be done once a second."""
        self._each("run")

    def status(self) -> dict[str, Any]:
        """What it does now: the methods that were called, its clients with what they wait for."""
        calls: dict[str, Counter[str]] = defaultdict(Counter)
        for call in self._server.open_calls:
            name = call.headers.get(":path", "").removeprefix(PATH)
            if name != "Telemetry":  # it is always under way
                calls[call.headers.get(CLIENT_ID, "")][name] += 1
        return {
            "mode": "local" if isinstance(self.config, BrokerConfig) else "cluster",
            "connections": len(self.peers),
            "warnings": self.backend.warnings(),
            "methods": [
                {
                    "method": name,
                    "in_flight": it.in_flight,
                    "codes": it.by_name,
                    "mean_ms": round(it.latency_sum_ms / it.done, 3) if it.done else 0.0,
                }
                for name, it in self.service.tallies.items()
                if it.begun
            ],
            "clients": [
                asdict(it)
                | {
                    "in_flight": calls[it.client_id].total(),
                    "polls": sum(calls[it.client_id][name] for name in POLLS),
                    "works_on": sum(
                        family.held_by(self.clients.by_id[it.client_id])
                        for family in self.families
                        if hasattr(family, "held_by")
                    ),
                }
                for it in self.clients.inventory()
            ],
        }

    def _status(self, _message: bytes, call: Call) -> bytes:
        self.service.require(RequestCode.GET_BROKER_RUNTIME_INFO, call)
        return orjson.dumps(self.status())

    def _tick(self) -> None:
        self._runner = asyncio.get_running_loop().call_later(RUN_S, self._tick)
        self.run()

    def _each(self, name: str) -> None:
        """Call the method `name` of each family that has it; a failure stops no other family."""
        for family in self.families:
            method = getattr(family, name, None)
            if method is not None:
                self.jobs.run_now(f"{name} of {type(family).__name__}", method)

    def _disconnected(self, peer: Peer) -> None:
        self.clients.disconnected(peer)
        self._shares.remove(peer)


class ProxyCollector:
    """Reads the counters of a proxy when Prometheus asks, in the thread of prometheus-client: it
    copies what the loop changes. RocketMQ's proxy has `rocketmq_proxy_up` alone, the others are
    ours."""

    def __init__(self, proxy: "Proxy") -> None:
        self._proxy = proxy
        config = proxy.config
        is_local = isinstance(config, BrokerConfig)
        self._node = [
            getattr(config, "cluster_name", ""), "proxy",
            getattr(config, "broker_name", host_name()), "local" if is_local else "cluster",
        ]  # fmt: skip

    def collect(self) -> "Iterator[Metric]":
        """Every metric of now."""
        from prometheus_client.core import (  # noqa: PLC0415
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        proxy, tallies = self._proxy, self._proxy.service.tallies
        clients = Counter(
            (it.wire_language, it.version) for it in tuple(proxy.clients.by_id.values())
        )
        families: list[tuple[Any, str, str, tuple[str, ...], list[tuple[Any, ...]]]] = [
            (GaugeMetricFamily, "rocketmq_proxy_up", "1 while it serves.", (),
             [(int(proxy.is_serving),)]),
            (GaugeMetricFamily, "rocketmq_proxy_connections", "Connections of clients.", (),
             [(len(proxy.peers),)]),
            (GaugeMetricFamily, "rocketmq_proxy_clients", "Clients by language and version.",
             ("language", "version"),
             [(*key, count) for key, count in clients.most_common(KINDS_MAX)]),
            (GaugeMetricFamily, "rocketmq_proxy_calls_in_flight", "Calls without an answer yet.",
             ("rpc",), [(name, it.in_flight) for name, it in tallies.items()]),
            (CounterMetricFamily, "rocketmq_proxy_calls", "Calls by the status of their answer.",
             ("rpc", "code"), [(name, code, count) for name, it in tallies.items()
                               for code, count in it.by_name.items()]),
            (CounterMetricFamily, "rocketmq_proxy_undecodable_bodies",
             "Messages whose body could not be decompressed and was handed on as it is stored.", (),
             [(UNDECODABLE.value,)]),
            (CounterMetricFamily, "sluicemq_background_failures",
             "Failures of background jobs, by job.", ("job",),
             [*self._proxy.jobs.failures.copy().items()]),
        ]  # fmt: skip
        for make, metric_name, text, labels, samples in families:
            metric = make(metric_name, text, labels=[*_LABELS, *labels])
            for *values, number in samples:
                metric.add_metric([*self._node, *values], number)
            yield metric
        latency = HistogramMetricFamily(
            "rocketmq_proxy_rpc_latency",
            "Milliseconds from a call to its answer, with the wait of a long poll.",
            labels=[*_LABELS, "rpc"],
        )
        for name, tally in tallies.items():
            if tally.done:
                latency.add_metric([*self._node, name], tally.buckets, tally.latency_sum_ms)
        yield latency

    def describe(self) -> "list[Metric]":
        """Nothing: a registry would ask for all metrics else."""
        return []
