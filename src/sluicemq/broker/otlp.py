"""What leaves by OpenTelemetry's protocol (OTLP): the way out, and the metrics that take it.

    collector --as_metrics--> metrics --OpenTelemetry's exporter--> HTTP, protobuf --> endpoint

The collector is the one that Prometheus asks, so names, labels and values are those of `/metrics`.
A thread asks it once an interval, as a scrape does, and keeps nothing between two: an endpoint that
is down costs no memory, and counters lose nothing by it. That it is down is one line of the log,
and so is that it is back; what the exporter would log itself (each attempt) is kept as the reason.

The package is the extra `otlp`. OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT,
…_HEADERS, …_TIMEOUT, OTEL_METRIC_EXPORT_INTERVAL, OTEL_SERVICE_NAME …) count where nothing else is
said. Its periodic reader reads instruments, of which there are none here, so the thread is ours.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.config.keys import PushedConfig
from sluicemq.errors import ConfigurationError, install_extra

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric
    from opentelemetry.sdk.resources import Resource
    from prometheus_client.core import Metric as Family

log = logging.getLogger(__name__)

SCOPE: Final = "sluicemq"
INTERVAL_MS: Final = 60_000
CLOSE_S: Final = 3.0
NS_PER_MS: Final = 1_000_000
_PROTOCOL: Final = "http/protobuf"


def open_exporter(
    signal: Literal["metrics", "traces"], endpoint: str, headers: dict[str, str] | None = None
) -> Any:
    """OpenTelemetry's exporter to the base URL `endpoint` (empty: as the variables say). Raises
    ConfigurationError: another protocol is asked for, no URL, or the package is missing."""
    protocols = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    for name in protocols:
        if (protocol := os.environ.get(name) or _PROTOCOL) != _PROTOCOL:
            raise ConfigurationError(
                f"{name} = {protocol}: OTLP leaves by HTTP with protobuf alone.",
                fix=f"Set {name}={_PROTOCOL}, and name the collector's port for HTTP "
                "(4318 as a rule; 4317 is gRPC's).",
            )
    if endpoint and (urlsplit(endpoint).scheme not in ("http", "https") or "//" not in endpoint):
        raise ConfigurationError(
            f"{endpoint} is no endpoint of OTLP over HTTP.", fix="Write http://HOST:4318."
        )
    try:
        if signal == "metrics":
            from opentelemetry.exporter.otlp.proto.http import metric_exporter  # noqa: PLC0415

            make: Any = metric_exporter.OTLPMetricExporter
        else:
            from opentelemetry.exporter.otlp.proto.http import trace_exporter  # noqa: PLC0415

            make = trace_exporter.OTLPSpanExporter
    except ImportError as error:
        raise ConfigurationError(
            "OTLP needs the package of OpenTelemetry.", fix=install_extra("otlp")
        ) from error
    path = f"/v1/{signal}"
    url = f"{endpoint.rstrip('/').removesuffix(path)}{path}" if endpoint else None
    return make(endpoint=url, headers=headers)


class _Reason(logging.Filter):
    """Keeps what one thread logs first, instead of the log: the first attempt says why it failed,
    the last one that it was the last."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True
        self.text = self.text or record.getMessage()
        return False


def export(exporter: Any, data: Any) -> str | None:
    """Hands data to an exporter, which tries for some seconds. Why that failed; None: it has
    them."""
    reason, logger = _Reason(), logging.getLogger(type(exporter).__module__)
    logger.addFilter(reason)
    try:
        return None if exporter.export(data).name == "SUCCESS" else reason.text or "no reason given"
    finally:
        logger.removeFilter(reason)


def make_resource(service: str | None, instance: str = "") -> "Resource":
    """Who says it: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415

    found = {"service.name": service or "rocketmq"}
    found |= {"service.instance.id": instance} if instance else {}
    return Resource(found).merge(OTELResourceDetector().detect())


# -------------------------------------------------------------------------------- metrics


def convert_metrics(families: "Iterable[Family]", begin_ns: int, now_ns: int) -> "Iterator[Metric]":
    """Metrics of Prometheus as OpenTelemetry's, under the names and labels of `/metrics`."""
    from opentelemetry.sdk.metrics.export import (  # noqa: PLC0415
        AggregationTemporality,
        Gauge,
        Histogram,
        HistogramDataPoint,
        Metric,
        NumberDataPoint,
        Sum,
    )

    cumulative = AggregationTemporality.CUMULATIVE
    for family in families:
        data: Any
        name = family.name
        if family.type == "histogram":
            data = Histogram(
                [
                    HistogramDataPoint(
                        labels, begin_ns, now_ns, count=sum(counts), sum=total,
                        bucket_counts=counts, explicit_bounds=bounds,
                        min=None, max=None,  # type: ignore[arg-type]  # they are not known
                    )
                    for labels, bounds, counts, total in _histograms(family)
                ],
                cumulative,
            )  # fmt: skip
        else:
            points = [
                NumberDataPoint(one.labels, begin_ns, now_ns, float(one.value))
                for one in family.samples
            ]
            is_counter = family.type == "counter"
            data = Sum(points, cumulative, is_monotonic=True) if is_counter else Gauge(points)
            name += "_total" * is_counter
        if data.data_points:
            yield Metric(name, family.documentation, "", data)


def _histograms(
    family: "Family",
) -> Iterator[tuple[dict[str, str], list[float], list[int], float]]:
    """Labels, upper bounds, the count of each bucket (here alone, not with those below) and the
    sum."""
    labels: dict[str, str] = {}
    bounds: list[float] = []
    counts: list[int] = []
    seen = 0
    for one in family.samples:  # in the order in which Prometheus lays them out
        if one.name.endswith("_bucket"):
            labels = dict(one.labels)
            bounds.append(float(labels.pop("le")))
            counts.append(int(one.value) - seen)
            seen = int(one.value)
        elif one.name.endswith("_sum"):
            yield labels, bounds[:-1], counts, float(one.value)
            bounds, counts, seen = [], [], 0


class MetricsPusher:
    """Metrics that leave once an interval, by a thread, until it is closed."""

    def __init__(
        self, collect: Callable[[], Iterable[Any]], config: PushedConfig, kind: str, node: str
    ) -> None:
        """`kind`, `node`: what serves, and its name. Raises ConfigurationError, see
        `open_exporter`."""
        self._exporter = open_exporter("metrics", config.otlp_endpoint, config.otlp_headers_parsed)
        self._resource = make_resource(f"sluicemq-{kind}", node)
        self._collect = collect
        self._begin_ns = SYSTEM_CLOCK.now_ms() * NS_PER_MS
        variable = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
        default_ms = int(variable) if variable.isdecimal() else INTERVAL_MS
        self._interval_s = (config.otlp_interval_ms or default_ms) / 1000
        self._is_failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sluice-otlp", daemon=True)

    def start(self) -> None:
        """The first push comes after an interval."""
        self._thread.start()
        log.info("metrics are pushed by OTLP once in %g s", self._interval_s)

    def close(self) -> None:
        """Blocking: the last values leave, if the endpoint takes them; seconds at most."""
        self._closing.set()
        self._thread.join(0 if self._is_failing else CLOSE_S)
        self._exporter.shutdown()  # ends its pauses between attempts
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._push()
        if not self._is_failing:
            self._push()

    def _push(self) -> None:
        try:
            reason = export(self._exporter, self._snapshot())
        except Exception as error:  # noqa: BLE001 - a broker between two roles
            reason = f"{type(error).__name__}: {error}"
        if self._is_failing != (reason is not None):
            self._is_failing = reason is not None
            if reason is None:
                log.warning("metrics are taken by the OTLP endpoint again")
            elif not self._closing.is_set():
                log.warning("metrics cannot be pushed by OTLP, and are tried again: %s", reason)

    def _snapshot(self) -> Any:
        from opentelemetry.sdk.metrics.export import (  # noqa: PLC0415
            MetricsData,
            ResourceMetrics,
            ScopeMetrics,
        )
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415

        now_ns = SYSTEM_CLOCK.now_ms() * NS_PER_MS
        metrics = list(convert_metrics(self._collect(), self._begin_ns, now_ns))
        scope = ScopeMetrics(InstrumentationScope(SCOPE), metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])
