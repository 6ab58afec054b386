"""A small HTTP server in threads of its own, for what is asked now and then: metrics and probes.

Its application runs in those threads and must only read what the loop changes.
"""

import socket
import threading
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref import simple_server


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
