"""Serving the metrics of a broker or proxy to Prometheus, beside its health checks."""

import logging
from collections.abc import Callable
from typing import Any

from sluicemq.config.keys import MeasuredConfig
from sluicemq.errors import install_extra
from sluicemq.telemetry.health import HealthCheck

log = logging.getLogger(__name__)


def serve_metrics(
    collector: Any,
    config: MeasuredConfig,
    *,
    health: HealthCheck = list,
    readiness: HealthCheck = list,
) -> tuple[int, Callable[[], None]] | None:
    """Serve the metrics of `collector`, and the health checks, over HTTP at the port of `config`.

    `health` and `readiness` return the problems that `/health` and `/ready` report. Return (port,
    function that closes it). If prometheus-client is missing or the port cannot be opened, log a
    warning and return None. The server then runs without its metrics.
    """
    try:
        from prometheus_client import (  # noqa: PLC0415 - an optional dependency
            CollectorRegistry,
            make_wsgi_app,
        )
    except ImportError:
        log.warning(
            "Metrics are not served: prometheus-client is missing. %s", install_extra("server")
        )
        return None

    from sluicemq.telemetry.probes import serve_probes  # noqa: PLC0415 - few brokers of tests serve metrics

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return serve_probes(config, health, readiness, make_wsgi_app(registry))
