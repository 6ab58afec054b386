"""What a proxy counts, for Prometheus and for `sluice proxy status`.

RocketMQ's proxy has one metric of its own, `rocketmq_proxy_up`; the others are ours, under its
prefix. Calls count in integers, by method and status; only a scrape makes objects of them, in the
thread of prometheus-client, so it copies what the loop changes.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Protocol

from sluicemq.config import BrokerConfig
from sluicemq.config.settings import ServerConfig, host_name
from sluicemq.net.grpc import StatusCode
from sluicemq.proxy.clients import Clients
from sluicemq.proxy.messages import Code

if TYPE_CHECKING:
    from prometheus_client.core import Metric


BOUNDS_MS: Final = (1, 3, 5, 7, 10, 100, 1000, 2000, 3000)
"""Those of RocketMQ's rocketmq_rpc_latency."""
_LABELS: Final = ("cluster", "node_type", "node_id", "proxy_mode")


class Tally:
    """What became of the calls of one method. A call that nobody waits for any more counts too, and
    is in flight until its end. Latency includes the wait of a long poll."""

    __slots__ = ("_counts", "begun", "codes", "latency_sum_ms")

    def __init__(self) -> None:
        self.begun = 0
        self.codes: Counter[int] = Counter()
        """Ended calls by status; by the status of gRPC, below 0, where that was the answer."""
        self.latency_sum_ms = 0.0
        self._counts = [0] * (len(BOUNDS_MS) + 1)

    def ended(self, code: int, age_s: float) -> None:
        """HOT."""
        age_ms = age_s * 1000
        self.codes[code] += 1
        self.latency_sum_ms += age_ms
        self._counts[bisect_left(BOUNDS_MS, age_ms)] += 1

    @property
    def done(self) -> int:
        return sum(self._counts)

    @property
    def in_flight(self) -> int:
        return self.begun - self.done

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound -> how many took no longer."""
        bounds = [*(f"{bound:.1f}" for bound in BOUNDS_MS), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))

    @property
    def by_name(self) -> dict[str, int]:
        """Ended calls by the name of their status."""
        return {_name(code): count for code, count in self.codes.copy().items()}


def _name(code: int) -> str:
    names: dict[int, str] = {it: it.name for it in Code}
    return f"grpc {StatusCode(-code).name}" if code < 0 else names.get(code, f"{code}")


class Counted(Protocol):
    """What is looked at of a proxy."""

    config: ServerConfig
    clients: Clients
    tallies: dict[str, Tally]

    @property
    def is_serving(self) -> bool: ...

    @property
    def connections(self) -> int: ...


class ProxyCollector:
    """Reads the counters of a proxy when Prometheus asks."""

    def __init__(self, proxy: Counted) -> None:
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

        proxy, tallies = self._proxy, self._proxy.tallies
        clients = Counter(
            (it.wire_language, it.version) for it in tuple(proxy.clients.by_id.values())
        )
        families: list[tuple[Any, str, str, tuple[str, ...], list[tuple[Any, ...]]]] = [
            (GaugeMetricFamily, "rocketmq_proxy_up", "1 while it serves.", (),
             [(int(proxy.is_serving),)]),
            (GaugeMetricFamily, "rocketmq_proxy_connections", "Connections of clients.", (),
             [(proxy.connections,)]),
            (GaugeMetricFamily, "rocketmq_proxy_clients", "Clients by language and version.",
             ("language", "version"), [(*key, count) for key, count in clients.items()]),
            (GaugeMetricFamily, "rocketmq_proxy_calls_in_flight", "Calls without an answer yet.",
             ("rpc",), [(name, it.in_flight) for name, it in tallies.items()]),
            (CounterMetricFamily, "rocketmq_proxy_calls", "Calls by the status of their answer.",
             ("rpc", "code"), [(name, code, count) for name, it in tallies.items()
                               for code, count in it.by_name.items()]),
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
