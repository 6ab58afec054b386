"""Export of metrics and traces by OpenTelemetry's protocol (OTLP), over HTTP with protobuf.

`MetricsPusher` collects the metrics once per interval on a thread of its own, as a scrape does, and
pushes them to the endpoint. They have the names, labels and values of `/metrics`. Nothing is kept
between two pushes, so an endpoint that is down costs no memory, and no counts are lost. When the
endpoint fails, one line is logged, and another one when it works again. OpenTelemetry's exporter
would log each attempt; its first message is used as the reason instead.

The OpenTelemetry packages belong to the extra `otlp`. OpenTelemetry's environment variables
(OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_METRIC_EXPORT_INTERVAL, OTEL_SERVICE_NAME …) apply where the
configuration says nothing. OpenTelemetry's own periodic reader is not used, because it reads
instruments, which a broker does not have.
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
    from opentelemetry.sdk.metrics.export import Gauge, Histogram, Metric, Sum
    from opentelemetry.sdk.resources import Resource
    from prometheus_client.core import Metric as Family

log = logging.getLogger(__name__)

SCOPE: Final = "sluicemq"
"""The name of the instrumentation scope."""
INTERVAL_MS: Final = 60_000
"""The default interval between two pushes."""
CLOSE_S: Final = 3.0
"""How long `close` waits for the last push."""
NS_PER_MS: Final = 1_000_000
_PROTOCOL: Final = "http/protobuf"


def open_exporter(
    signal: Literal["metrics", "traces"], endpoint: str, headers: dict[str, str] | None = None
) -> Any:
    """Return OpenTelemetry's exporter that sends metrics or traces to an endpoint.

    `signal` says which. `endpoint` is a base URL such as `http://HOST:4318`; if it is empty,
    OpenTelemetry's environment variables decide. Raises ConfigurationError if they ask for another
    protocol than HTTP with protobuf, if `endpoint` is not an HTTP URL, or if the package is
    missing.
    """
    _check_protocol(signal)
    is_http = urlsplit(endpoint).scheme in ("http", "https") and "//" in endpoint
    if endpoint and not is_http:
        raise ConfigurationError(
            f"{endpoint} is not an endpoint for OTLP over HTTP.", fix="Write http://HOST:4318."
        )
    exporter_class = _import_exporter(signal)
    url = None
    if endpoint:
        path = f"/v1/{signal}"
        url = endpoint.rstrip("/").removesuffix(path) + path
    return exporter_class(endpoint=url, headers=headers)


def _check_protocol(signal: str) -> None:
    """Raise ConfigurationError if environment variables ask for another protocol than `_PROTOCOL`.

    `signal` is "metrics" or "traces", each of which has a variable of its own.
    """
    for variable in (
        f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL",
        "OTEL_EXPORTER_OTLP_PROTOCOL",
    ):
        protocol = os.environ.get(variable) or _PROTOCOL
        if protocol != _PROTOCOL:
            raise ConfigurationError(
                f"{variable} = {protocol} is not supported. OTLP is exported over HTTP with"
                " protobuf.",
                fix=f"Set {variable}={_PROTOCOL}, and use the collector's port for HTTP "
                "(usually 4318; 4317 is for gRPC).",
            )


def _import_exporter(signal: Literal["metrics", "traces"]) -> Any:
    """Return OpenTelemetry's class of exporters of `signal`.

    Raises ConfigurationError if its package is missing.
    """
    try:
        if signal == "metrics":
            from opentelemetry.exporter.otlp.proto.http import (  # noqa: PLC0415 - an optional dependency
                metric_exporter,
            )

            return metric_exporter.OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http import (  # noqa: PLC0415 - an optional dependency
            trace_exporter,
        )
    except ImportError as error:
        raise ConfigurationError(
            "OTLP export needs the OpenTelemetry packages.", fix=install_extra("otlp")
        ) from error
    return trace_exporter.OTLPSpanExporter


class _FailureReason(logging.Filter):
    """A log filter that drops the records of the present thread, and keeps the first message.

    The first message of an exporter says why its attempt failed; the last one only says that it was
    the last attempt.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a log record is logged; False for a record of the thread that exports.

        The text of the first such record is stored in `text`, as the reason of the failure.
        """
        if record.thread != self._thread:
            return True
        self.text = self.text or record.getMessage()
        return False


def export(exporter: Any, batch: Any) -> str | None:
    """Export a batch of metrics or spans. Return None, or the reason why that failed.

    The call blocks while the exporter tries, which takes some seconds at most.
    """
    reason = _FailureReason()
    logger = logging.getLogger(type(exporter).__module__)
    logger.addFilter(reason)
    try:
        if exporter.export(batch).name == "SUCCESS":
            return None
        return reason.text or "the exporter gave no reason"
    finally:
        logger.removeFilter(reason)


def make_resource(service: str | None, instance: str = "") -> "Resource":
    """Return OpenTelemetry's description of the service that exports data.

    `service` is its name; None means "rocketmq". `instance` is its instance id; "" means none. The
    environment variables OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence.
    """
    from opentelemetry.sdk.resources import (  # noqa: PLC0415 - an optional dependency
        OTELResourceDetector,
        Resource,
    )

    attributes = {"service.name": service or "rocketmq"}
    if instance:
        attributes["service.instance.id"] = instance
    return Resource(attributes).merge(OTELResourceDetector().detect())


def convert_metrics(families: "Iterable[Family]", begin_ns: int, now_ns: int) -> "Iterator[Metric]":
    """Yield OpenTelemetry metrics for metrics of Prometheus, with the same names and labels.

    Metrics without samples are left out. `begin_ns` is the time at which the counters began, and
    `now_ns` the time of the values, both in ns since 1970.
    """
    from opentelemetry.sdk.metrics.export import Metric  # noqa: PLC0415 - an optional dependency

    for family in families:
        name = family.name
        points: Any
        if family.type == "histogram":
            points = _convert_histogram(family, begin_ns, now_ns)
        else:
            points = _convert_numbers(family, begin_ns, now_ns)
        if family.type == "counter":
            name += "_total"
        if points.data_points:
            yield Metric(name, family.documentation, "", points)


def _convert_histogram(family: "Family", begin_ns: int, now_ns: int) -> "Histogram":
    """Return a Prometheus histogram as an OpenTelemetry one, with a data point for each label set.

    `begin_ns` is the time at which the counters began, and `now_ns` the time of the values, both in
    ns since 1970.
    """
    from opentelemetry.sdk.metrics.export import (  # noqa: PLC0415 - an optional dependency
        AggregationTemporality,
        Histogram,
        HistogramDataPoint,
    )

    points = [
        HistogramDataPoint(
            labels,
            begin_ns,
            now_ns,
            count=sum(bucket_counts),
            sum=value_sum,
            bucket_counts=bucket_counts,
            explicit_bounds=bounds,
            min=None,  # type: ignore[arg-type] # unknown
            max=None,  # type: ignore[arg-type] # unknown
        )
        for labels, bounds, bucket_counts, value_sum in _iterate_histograms(family)
    ]
    return Histogram(points, AggregationTemporality.CUMULATIVE)


def _convert_numbers(family: "Family", begin_ns: int, now_ns: int) -> "Sum | Gauge":
    """Return a Prometheus counter as an OpenTelemetry sum, and any other metric as a gauge.

    `begin_ns` is the time at which the counters began, and `now_ns` the time of the values, both in
    ns since 1970.
    """
    from opentelemetry.sdk.metrics.export import (  # noqa: PLC0415 - an optional dependency
        AggregationTemporality,
        Gauge,
        NumberDataPoint,
        Sum,
    )

    points = [
        NumberDataPoint(sample.labels, begin_ns, now_ns, float(sample.value))
        for sample in family.samples
    ]
    if family.type == "counter":
        return Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    return Gauge(points)


def _iterate_histograms(
    family: "Family",
) -> Iterator[tuple[dict[str, str], list[float], list[int], float]]:
    """Yield (labels, upper bounds, count of each bucket, sum of all values) of each histogram.

    In Prometheus, a count includes all lower buckets. The yielded counts do not. The upper bound of
    the last bucket, infinity, is left out.
    """
    labels: dict[str, str] = {}
    bounds: list[float] = []
    counts: list[int] = []
    count_below = 0
    for sample in family.samples:  # Prometheus yields the buckets of a histogram before its sum
        if sample.name.endswith("_bucket"):
            labels = dict(sample.labels)
            bounds.append(float(labels.pop("le")))
            counts.append(int(sample.value) - count_below)
            count_below = int(sample.value)
        elif sample.name.endswith("_sum"):
            yield labels, bounds[:-1], counts, float(sample.value)
            bounds = []
            counts = []
            count_below = 0


def _default_interval_ms() -> int:
    """Return the interval in OTEL_METRIC_EXPORT_INTERVAL, or else INTERVAL_MS."""
    variable = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
    return int(variable) if variable.isdecimal() else INTERVAL_MS


class MetricsPusher:
    """Pushes metrics by OTLP once per interval, on a thread of its own, until it is closed."""

    def __init__(
        self,
        collect: Callable[[], Iterable[Any]],
        config: PushedConfig,
        server_kind: str,
        server_name: str,
    ) -> None:
        """Create a pusher of the metrics that `collect()` returns. Pushing begins with `start`.

        The service name is `sluicemq-{server_kind}`, such as `sluicemq-broker`, and its instance id
        is `server_name`. Raises ConfigurationError if the settings or environment variables are
        wrong, or if the package is missing.
        """
        self._exporter = open_exporter("metrics", config.otlp_endpoint, config.otlp_headers_parsed)
        self._resource = make_resource(f"sluicemq-{server_kind}", server_name)
        self._collect = collect
        self._begin_ns = SYSTEM_CLOCK.now_ms() * NS_PER_MS
        self._interval_s = (config.otlp_interval_ms or _default_interval_ms()) / 1000
        self._is_failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sluice-otlp", daemon=True)

    def start(self) -> None:
        """Start the thread. The first push happens after one interval."""
        self._thread.start()
        log.info("Metrics are pushed by OTLP every %g s.", self._interval_s)

    def close(self) -> None:
        """Stop pushing. Push the last values, unless the endpoint fails.

        The call blocks for some seconds at most.
        """
        self._closing.set()
        self._thread.join(0 if self._is_failing else CLOSE_S)
        self._exporter.shutdown()  # interrupts its pause between attempts
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        """Push the values at each interval until the pusher is closed, and again at the end.

        The last push is left out if the endpoint fails, so that `close` does not wait for it.
        """
        while not self._closing.wait(self._interval_s):
            self._push()
        if not self._is_failing:
            self._push()

    def _push(self) -> None:
        """Push the present values once.

        A warning is logged when a push fails after a successful one, and when a push succeeds after
        a failed one. A failure of the last push, after `close`, is not logged.
        """
        try:
            reason = export(self._exporter, self._collect_metrics())
        except Exception as error:  # noqa: BLE001 - a broker that changes its role raises
            reason = f"{type(error).__name__}: {error}"
        has_failed = reason is not None
        if has_failed == self._is_failing:
            return
        self._is_failing = has_failed
        if not has_failed:
            log.warning("The OTLP endpoint accepts metrics again.")
        elif not self._closing.is_set():
            log.warning("Pushing metrics by OTLP failed and will be retried: %s", reason)

    def _collect_metrics(self) -> Any:
        """Return the present values as OpenTelemetry's `MetricsData`, which an exporter accepts."""
        from opentelemetry.sdk.metrics.export import (  # noqa: PLC0415 - an optional dependency
            MetricsData,
            ResourceMetrics,
            ScopeMetrics,
        )
        from opentelemetry.sdk.util.instrumentation import (  # noqa: PLC0415 - an optional dependency
            InstrumentationScope,
        )

        now_ns = SYSTEM_CLOCK.now_ms() * NS_PER_MS
        metrics = list(convert_metrics(self._collect(), self._begin_ns, now_ns))
        scope = ScopeMetrics(InstrumentationScope(SCOPE), metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])
