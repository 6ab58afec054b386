"""A collector of OpenTelemetry's: takes OTLP over HTTP and keeps what came, decoded."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import SimpleQueue
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from waiting import limit

KINDS: dict[str, Any] = {
    "/v1/metrics": ExportMetricsServiceRequest,
    "/v1/traces": ExportTraceServiceRequest,
}
WAIT_S = 20


class Receiver:
    """`url`, and what was received: `take` waits for the next request of a path."""

    def __init__(self, port: int = 0) -> None:
        received = self.received = SimpleQueue[tuple[str, dict[str, str], Any]]()
        refused = self.refused = SimpleQueue[str]()
        answers = self.answers = [200]

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if answers[0] == 200:
                    message = KINDS[self.path].FromString(body)
                    received.put((self.path, dict(self.headers.items()), message))
                else:
                    refused.put(self.path)
                self.send_response(answers[0])
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def take(self) -> tuple[str, dict[str, str], Any]:
        """Path, headers and message of the next request."""
        return self.received.get(timeout=limit(WAIT_S))

    @contextmanager
    def running(self) -> Iterator["Receiver"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def attributes_of(pairs: Any) -> dict[str, Any]:
    """The attributes of a point or span."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in pairs}
