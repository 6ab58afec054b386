"""The limits of the HTTP server for metrics and health checks."""

import contextlib
import itertools
import socket
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from sluicemq.telemetry import probes as wsgi
from waiting import limit

pytestmark = pytest.mark.slow


def pong(_environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    start("200 OK", [("Content-Type", "text/plain")])
    return [b"pong"]


@contextlib.contextmanager
def serving(application: Any = pong) -> Iterator[int]:
    port, close = wsgi.serve_http("127.0.0.1", 0, application)
    try:
        yield port
    finally:
        close()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 10)


def get(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=limit(10)) as answer:
        return bytes(answer.read())


def http_threads() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_connections_that_say_nothing_make_room_for_those_that_ask() -> None:
    with serving() as port, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(port)) for _ in range(3 * wsgi.CONNECTIONS_MAX)]
        assert get(port) == b"pong"
        assert idle[0].recv(1) == b"", "the oldest is closed"
        deadline_s = time.monotonic() + limit(10)
        while http_threads() > wsgi.CONNECTIONS_MAX and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert http_threads() <= wsgi.CONNECTIONS_MAX


@pytest.mark.parametrize(
    "head", [b"GET / HTTP/1.0\r\n" + b"a: b\r\n" * 100_000, b"GET /" + b"x" * 1_000_000],
    ids=["headers", "path"],
)  # fmt: skip
def test_a_request_without_end_is_cut_off(head: bytes) -> None:
    with serving() as port, connected(port) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(head)
        with contextlib.suppress(ConnectionError):
            assert b"pong" not in client.recv(1 << 16) or len(head) < wsgi.REQUEST_BYTES_MAX
        assert get(port) == b"pong"


def test_scrapes_come_one_at_a_time_and_rest_three_times_as_long() -> None:
    running, most, ends = [0], [0], []

    def slow(_environ: dict[str, Any], _start: Any) -> Iterable[bytes]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        begin_s = time.monotonic()
        time.sleep(0.02)
        running[0] -= 1
        ends.append((begin_s, time.monotonic()))
        return [b"metrics"]

    calm = wsgi.limit_scrapes(slow)
    threads = [threading.Thread(target=calm, args=({}, None)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    for (begin_s, end_s), (next_s, _) in itertools.pairwise(ends):
        assert next_s - end_s >= 2.5 * (end_s - begin_s)


def test_more_scrapes_than_may_wait_are_told_so() -> None:
    inside, go_on, said = threading.Event(), threading.Event(), []

    def stuck(_environ: dict[str, Any], _start: Any) -> Iterable[bytes]:
        inside.set()
        go_on.wait(limit(10))
        return [b"metrics"]

    calm = wsgi.limit_scrapes(stuck)
    threads = [threading.Thread(target=calm, args=({}, None)) for _ in range(wsgi.SCRAPES_MAX)]
    for thread in threads:
        thread.start()
    inside.wait(limit(10))
    deadline_s = time.monotonic() + limit(10)
    while not said and time.monotonic() < deadline_s:
        calm({}, lambda status, _headers: said.append(status))
    go_on.set()
    for thread in threads:
        thread.join()
    assert said[0].startswith("503")
