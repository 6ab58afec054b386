"""A small HTTP server in threads of its own, for what is asked now and then: metrics and probes.

Its application runs in those threads and must only read what the loop changes. `/health` answers
200 while the process is worth keeping, `/ready` while clients should come; else 503 with the
reasons.

The threads share the interpreter with the loop, so they are few: one connection more closes the
oldest, which a client that sends a byte now and then would hold for long. While they compute they
hand over quickly, and metrics are rendered by one thread at a time, which rests afterwards, so that
scrapes take a quarter of a processor at most.
"""

import contextlib
import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref import simple_server

from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.config.keys import MeasuredConfig
from sluicemq.model.addresses import LOOPBACK, format_address, is_wildcard
from sluicemq.net.work.background import quick_switches

log = logging.getLogger(__name__)

Probe = Callable[[], list[str]]
"""What is amiss, a sentence each; nothing: all is well."""
Application = Callable[[dict[str, Any], Any], Iterable[bytes]]
STILL_S: Final = 30.0
"""A loop that has not turned for so long hangs."""


CONNECTIONS_MAX: Final = 16
REQUEST_BYTES_MAX: Final = 16 * 1024
"""Of a request's line and headers. Prometheus sends 300 bytes."""
SCRAPES_MAX: Final = 4
REST_FACTOR: Final = 3
"""After metrics were rendered, the next scrape waits three times as long as that has taken."""


class _Server(ThreadingMixIn, simple_server.WSGIServer):
    daemon_threads = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._connections: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, and close the oldest when there are too
        many."""
        with self._lock:
            self._connections[request] = None
            excess = list(self._connections)[:-CONNECTIONS_MAX]
        for oldest in excess:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread ends, and forgets it
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with quick_switches():
            super().process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news."""
        log.debug("a request of %s failed", client_address)


class _ServerOf6(_Server):
    address_family = socket.AF_INET6


class _BoundedLines:
    """The lines of a request, until they are too many bytes."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = REQUEST_BYTES_MAX

    def readline(self, size: int = -1) -> bytes:
        line: bytes = self._file.readline(min(size, self._left) if size >= 0 else self._left)
        self._left -= len(line)
        return line if self._left > 0 else b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Quiet(simple_server.WSGIRequestHandler):
    timeout = 10  # s; a client that says nothing holds a thread

    def setup(self) -> None:
        super().setup()
        self.rfile: Any = _BoundedLines(self.rfile)

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


def calm(application: Application) -> Application:
    """Return the application, called by one thread at a time, which rests afterwards. When
    SCRAPES_MAX wait already, it answers 503."""
    lock, rested = threading.Lock(), [0.0]
    places, never = threading.Semaphore(SCRAPES_MAX), threading.Event()

    def call(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if not places.acquire(blocking=False):
            start("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"Too many scrapes wait already. Scrape less often.\n"]
        try:
            with lock:
                never.wait(max(rested[0] - SYSTEM_CLOCK.monotonic_s(), 0.0))
                begin_s = SYSTEM_CLOCK.monotonic_s()
                try:
                    return list(application(environ, start))
                finally:
                    end_s = SYSTEM_CLOCK.monotonic_s()
                    rested[0] = end_s + REST_FACTOR * (end_s - begin_s)
        finally:
            places.release()

    return call


def hanging(still_s: float) -> list[str]:
    """What is amiss with a loop that has not turned for so long."""
    return [f"the event loop has not turned for {still_s:.0f} s."] if still_s > STILL_S else []


def metrics_host(config: MeasuredConfig, *, is_told: bool = False) -> str:
    """Return the address at which the metrics and probes of a server are served; with `is_told` the
    one at which they are reached from this machine."""
    host = config.metrics_host or (LOOPBACK if config.is_protected else config.listen_address)
    return LOOPBACK if is_told and is_wildcard(host) else host


def expose(
    config: MeasuredConfig,
    health: Probe,
    readiness: Probe,
    metrics: Application | None = None,
) -> tuple[int, Callable[[], None]] | None:
    """Opens the port of the probes, where every other path is `metrics`; 404 without. Returns it
    with a function that closes it. In the place of a port that is taken, another broker's on this
    machine say, a free one, with a warning in the log; None when there is none to be had."""
    host = metrics_host(config)
    probes = {"/health": health, "/ready": readiness}
    metrics = None if metrics is None else calm(metrics)

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
    log.info(
        "%s at http://%s/%s", what, format_address(host, port), "metrics" if metrics else "health"
    )
    return port, close
