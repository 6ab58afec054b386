"""A small HTTP server in threads of its own, for what is asked now and then: metrics and probes.

Its application runs in those threads and must only read what the loop changes. `/health` answers
200 while the process is worth keeping, `/ready` while clients should come; else 503 with the
reasons.
"""

import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref import simple_server

from sluicemq.config.keys import MeasuredConfig
from sluicemq.model.addresses import LOOPBACK, join

log = logging.getLogger(__name__)

Probe = Callable[[], list[str]]
"""What is amiss, a sentence each; nothing: all is well."""
Application = Callable[[dict[str, Any], Any], Iterable[bytes]]
STILL_S: Final = 30.0
"""A loop that has not turned for so long hangs."""


class _Server(ThreadingMixIn, simple_server.WSGIServer):
    daemon_threads = True


class _ServerOf6(_Server):
    address_family = socket.AF_INET6


class _Quiet(simple_server.WSGIRequestHandler):
    timeout = 30  # s; a client that says nothing holds a thread

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """A line a scrape is no news."""


def serve(host: str, port: int, application: Any) -> tuple[int, Callable[[], None]]:
    """Serves a WSGI application. Returns the port, and what closes it (half a second). Raises
    OSError."""
    kind = _ServerOf6 if ":" in host else _Server
    server = simple_server.make_server(host, port, application, kind, _Quiet)
    thread = threading.Thread(target=server.serve_forever, name="sluice-http", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(5)

    return server.server_port, close


def hanging(still_s: float) -> list[str]:
    """What is amiss with a loop that has not turned for so long."""
    return [f"the event loop has not turned for {still_s:.0f} s."] if still_s > STILL_S else []


def expose(
    config: MeasuredConfig,
    health: Probe,
    readiness: Probe,
    metrics: Application | None = None,
) -> tuple[int, Callable[[], None]] | None:
    """Opens the port of the probes, where every other path is `metrics`; 404 without. Returns it
    with a function that closes it. In the place of a port that is taken, another broker's on this
    machine say, a free one, with a warning in the log; None when there is none to be had."""
    host = config.metrics_host or (LOOPBACK if config.is_protected else config.listen_address)
    probes = {"/health": health, "/ready": readiness}

    def answer(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        probe = probes.get(environ["PATH_INFO"])
        if probe is None and metrics is not None:
            return metrics(environ, start)
        reasons = probe() if probe is not None else ["here are /health and /ready."]
        status = "503 Service Unavailable" if reasons else "200 OK"
        status = status if probe is not None else "404 Not Found"
        start(status, [("Content-Type", "text/plain; charset=utf-8")])
        return ["\n".join(reasons or ["ok"]).encode() + b"\n"]

    what = "metrics" if metrics is not None else "probes"
    asked = config.metrics_port
    try:
        try:
            port, close = serve(host, asked, answer)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            port, close = serve(host, 0, answer)
            log.warning(
                "port %d is taken: %s at the free port %d. Choose one with --metrics-port or "
                "metricsPromExporterPort.", asked, what, port,
            )  # fmt: skip
    except OSError as error:
        log.warning(
            "no %s: port %d cannot be had (%s). Choose another with --metrics-port or "
            "metricsPromExporterPort, or set metricsExporterType=DISABLE.",
            what, asked, error.strerror,
        )  # fmt: skip
        return None
    log.info("%s at http://%s/%s", what, join(host, port), "metrics" if metrics else "health")
    return port, close
