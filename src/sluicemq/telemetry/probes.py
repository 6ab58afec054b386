"""A small HTTP server for metrics and health checks, in threads of its own.

Its application runs in those threads, so it must only read what the event loop changes. `/health`
responds 200 as long as the process should be kept, and `/ready` as long as clients should be sent
to it. Otherwise they respond 503 with the reasons.

The threads share the interpreter with the event loop, so there are few of them. One connection too
many closes the oldest one, because a client that sends a byte now and then would hold a thread for
long. While a thread computes, the interpreter switches threads more often. Metrics are rendered by
one thread at a time, which pauses afterwards, so that scrapes use at most a quarter of a processor.
"""

import contextlib
import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref import simple_server

from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.config.keys import MeasuredConfig
from sluicemq.model.addresses import format_address
from sluicemq.net.work.background import fast_thread_switching
from sluicemq.telemetry.health import HealthCheck, metrics_host

log = logging.getLogger(__name__)

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]


CONNECTIONS_MAX: Final = 16
REQUEST_BYTES_MAX: Final = 16 * 1024
"""The most bytes of a request's line and headers. Prometheus sends 300."""
SCRAPES_MAX: Final = 4
"""The most scrapes that wait or are rendered."""
PAUSE_FACTOR: Final = 3
"""After metrics were rendered, the next scrape waits three times as long as that took."""


class _Server(ThreadingMixIn, simple_server.WSGIServer):
    """A WSGI server with one thread for each connection, and at most CONNECTIONS_MAX of them."""

    daemon_threads = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._connections: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own.

        If there are more than `CONNECTIONS_MAX` connections, the oldest ones are closed.
        """
        with self._lock:
            self._connections[request] = None
            excess = list(self._connections)[:-CONNECTIONS_MAX]
        for oldest in excess:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread ends and removes it
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its thread, while threads of the process switch faster."""
        with fast_thread_switching():
            super().process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection, and close it."""
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed request only for debugging, because clients may disconnect at any time."""
        log.debug("a request of %s failed", client_address)


class _Ipv6Server(_Server):
    address_family = socket.AF_INET6


class _LimitedReader:
    """The file of a request, which ends after REQUEST_BYTES_MAX bytes of lines."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._remaining_bytes = REQUEST_BYTES_MAX

    def readline(self, size: int = -1) -> bytes:
        """Return a line of at most `size` bytes. A negative size means no limit.

        Return b"" after REQUEST_BYTES_MAX bytes in total, which ends the request.
        """
        limit = self._remaining_bytes
        if size >= 0:
            limit = min(size, limit)
        line: bytes = self._file.readline(limit)
        self._remaining_bytes -= len(line)
        return line if self._remaining_bytes > 0 else b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _RequestHandler(simple_server.WSGIRequestHandler):
    """Reads requests with a limit, and logs none of them."""

    timeout = 10  # s; a silent client holds a thread

    def setup(self) -> None:
        """Prepare a connection, and limit the bytes that are read from it."""
        super().setup()
        self.rfile: Any = _LimitedReader(self.rfile)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing: a line for each scrape would hide the others."""


def serve_http(host: str, port: int, application: Any) -> tuple[int, Callable[[], None]]:
    """Serve a WSGI application in threads. Return (port, function that stops the server).

    Port 0 means any free port. The function takes up to half a second. Raises OSError if the port
    cannot be opened.
    """
    is_ipv6 = ":" in host
    server_class = _Ipv6Server if is_ipv6 else _Server
    server = simple_server.make_server(host, port, application, server_class, _RequestHandler)
    thread = threading.Thread(target=server.serve_forever, name="sluice-http", daemon=True)
    thread.start()

    def close() -> None:
        """Stop the server, and wait until its thread has ended."""
        server.shutdown()
        server.server_close()
        thread.join(5)

    return server.server_port, close


def limit_scrapes(application: Application) -> Application:
    """Return an application that calls `application` in one thread at a time, with pauses.

    The pause after each call is PAUSE_FACTOR times its duration. If SCRAPES_MAX requests are
    waiting or being served, the returned application responds 503.
    """
    slots = threading.Semaphore(SCRAPES_MAX)
    pacer = _ScrapePacer()

    def respond(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Call the application, or respond 503 if too many requests are waiting."""
        if not slots.acquire(blocking=False):
            headers = [("Content-Type", "text/plain; charset=utf-8")]
            start_response("503 Service Unavailable", headers)
            return [b"Too many scrapes are waiting. Scrape less often.\n"]
        try:
            with pacer.turn():
                return list(application(environ, start_response))
        finally:
            slots.release()

    return respond


class _ScrapePacer:
    """Makes scrapes run one after the other, with a pause after each."""

    def __init__(self) -> None:
        """Create a pacer. The first scrape may begin at once."""
        self._lock = threading.Lock()
        self._next_scrape_s = 0.0
        """The time before which no scrape begins."""
        self._never_set = threading.Event()
        """Waiting for it is a pause."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Return a context manager for one scrape, in which no other scrape runs.

        Entering it waits for the other scrape and for the pause after it.
        """
        with self._lock:
            self._never_set.wait(max(self._next_scrape_s - SYSTEM_CLOCK.monotonic_s(), 0.0))
            begin_s = SYSTEM_CLOCK.monotonic_s()
            try:
                yield
            finally:
                end_s = SYSTEM_CLOCK.monotonic_s()
                self._next_scrape_s = end_s + PAUSE_FACTOR * (end_s - begin_s)


def serve_probes(
    config: MeasuredConfig,
    health: HealthCheck,
    readiness: HealthCheck,
    metrics: Application | None = None,
) -> tuple[int, Callable[[], None]] | None:
    """Serve `/health` and `/ready` over HTTP, and `metrics` at every other path.

    Return (port, function that stops the server). If `metrics` is None, other paths respond 404. If
    the configured port is in use, for example by another broker, a free one is chosen and a warning
    logged. If no port can be opened, log a warning and return None.
    """
    host = metrics_host(config)
    probes = {"/health": health, "/ready": readiness}
    limited_metrics = None if metrics is None else limit_scrapes(metrics)

    def respond(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Respond to a request by a probe or the metrics, according to its path."""
        check = probes.get(environ["PATH_INFO"])
        if check is not None:
            return _respond_to_probe(check, start_response)
        if limited_metrics is not None:
            return limited_metrics(environ, start_response)
        return _respond_with_text(
            start_response, "404 Not Found", "The paths here are /health and /ready."
        )

    served = "metrics" if metrics is not None else "probes"
    try:
        port, close = _serve_on_port_or_free_one(host, config.metrics_port, respond, served)
    except OSError as error:
        log.warning(
            "not serving %s: cannot open port %d (%s). Choose another one with --metrics-port or "
            "metricsPromExporterPort, or set metricsExporterType=DISABLE.",
            served,
            config.metrics_port,
            error.strerror,
        )
        return None
    path = "metrics" if metrics is not None else "health"
    log.info("%s at http://%s/%s", served, format_address(host, port), path)
    return port, close


def _respond_to_probe(check: HealthCheck, start_response: Any) -> list[bytes]:
    """Respond 200 if `check()` returns no problems, else 503 with a line for each problem."""
    problems = check()
    if not problems:
        return _respond_with_text(start_response, "200 OK", "ok")
    return _respond_with_text(start_response, "503 Service Unavailable", "\n".join(problems))


def _respond_with_text(start_response: Any, status: str, text: str) -> list[bytes]:
    """Start a WSGI response with this status, and return its body: the text and a line end."""
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [text.encode() + b"\n"]


def _serve_on_port_or_free_one(
    host: str, wanted_port: int, application: Any, served: str
) -> tuple[int, Callable[[], None]]:
    """Serve an application on `wanted_port`, or on a free port if that is in use.

    Return (port, function that stops the server). If the port is in use, a warning is logged, which
    contains `served`, "metrics" or "probes". Raises OSError if no port can be opened.
    """
    try:
        return serve_http(host, wanted_port, application)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    port, close = serve_http(host, 0, application)
    log.warning(
        "port %d is in use: serving %s on the free port %d. Choose one with "
        "--metrics-port or metricsPromExporterPort.",
        wanted_port,
        served,
        port,
    )
    return port, close
