"""Many consumers of gRPC that wait, and calls beside remoting producers.

    python -m benchmarks.consumers [--consumers 1000] [--rate 500] [--seconds 30] [--only waiting]

waiting   so many clients, each on a connection of its own with telemetry, heartbeats and a long
          poll for the next message; messages are sent at the rate over one more connection. The
          memory of `sluice up` (proxy and broker), and the time from send to receive
burst     remoting producers at a fixed pace, and every second a burst of sends over gRPC beside
          them: how long both wait for their answers

The clients are sockets of this process that write frames made beforehand; headers are written as
plain literals, which costs a server about what real ones do. Answers are read whole.
"""

import argparse
import contextlib
import os
import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import frames, load, measure
from benchmarks.proxies import BACKLOG, GROUP, Pair, ours, prepare

from http2_client import frames_of  # isort: skip

TOPIC = BACKLOG
HEARTBEAT_S = 10.0
POLL_S = 20
BURST, BURST_CONNECTIONS = 1_000, 20
PRODUCERS, PRODUCER_RATE = 10, 500
WINDOW = (1 << 31) - 1 - 65_535


class Client:
    """One connection. What comes on a stream is given to whoever opened it."""

    def __init__(self, endpoint: str, name: str) -> None:
        from sluicemq.wire import http2 as h

        host, _, port = endpoint.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.name = name
        self._h = h
        self._next = 1
        self._rest = b""
        self._open: dict[int, tuple[Callable[[list[bytes]], None], bytearray]] = {}
        self.socket.sendall(
            h.PREFACE
            + h.encode_settings({h.Setting.INITIAL_WINDOW_SIZE: WINDOW})
            + h.encode_window_update(0, WINDOW)
        )

    def call(self, block: bytes, message: bytes, done: Callable[[list[bytes]], None]) -> None:
        """`done` gets the messages of the answer."""
        self.socket.sendall(self.frames(block, message, done))

    def frames(self, block: bytes, message: bytes, done: Callable[[list[bytes]], None]) -> bytes:
        h, number = self._h, self._next
        self._next += 2
        self._open[number] = done, bytearray()
        data = b"\0" + len(message).to_bytes(4, "big") + message
        return h.encode_frame(h.HEADERS, h.END_HEADERS, number, block) + h.encode_frame(
            h.DATA, h.END_STREAM, number, data
        )

    def keep_open(self, block: bytes, message: bytes) -> None:
        """A stream whose client has not said all: telemetry."""
        h, data = self._h, b"\0" + len(message).to_bytes(4, "big") + message
        number, self._next = self._next, self._next + 2
        self.socket.sendall(
            h.encode_frame(h.HEADERS, h.END_HEADERS, number, block)
            + h.encode_frame(h.DATA, 0, number, data)
        )

    def receive(self) -> None:
        """What is there now."""
        h, data = self._h, self.socket.recv(1 << 18)
        if not data:
            raise ConnectionError(f"{self.name} was closed")
        found, self._rest = frames_of(self._rest + data)
        for kind, flags, number, payload in found:
            if kind == h.GOAWAY:
                raise ConnectionError(f"{self.name} was told to go: {payload[8:].decode()}")
            if number not in self._open:
                continue
            done, collected = self._open[number]
            if kind == h.DATA:
                collected += payload
            elif kind == h.RST_STREAM or flags & h.END_STREAM:
                del self._open[number]
                done(split(collected))

    def close(self) -> None:
        self.socket.close()


def split(data: bytearray) -> list[bytes]:
    """The messages of an answer."""
    found, at = [], 0
    while at + 5 <= len(data):
        size = int.from_bytes(data[at + 1 : at + 5], "big")
        found.append(bytes(data[at + 5 : at + 5 + size]))
        at += 5 + size
    return found


def block_of(method: str, client: str, timeout_s: int | None = 30) -> bytes:
    from sluicemq.wire.hpack import encode_headers

    fields = [
        (":method", "POST"), (":scheme", "http"), (":authority", "127.0.0.1:8081"),
        (":path", f"/apache.rocketmq.v2.MessagingService/{method}"), ("te", "trailers"),
        ("content-type", "application/grpc"), ("user-agent", "bench"), ("x-mq-language", "JAVA"),
        ("x-mq-protocol", "v2"), ("x-mq-client-version", "5.2.0"), ("x-mq-client-id", client),
        ("x-mq-request-id", "8c7f4d0e-36d1-4a53-8b0c-6f1c62a7a5d1"),
    ]  # fmt: skip
    timeout = [("grpc-timeout", f"{timeout_s}S")] if timeout_s else []
    return encode_headers([*fields, *timeout])


class Waiter:
    """A simple consumer that always has a long poll open, and acknowledges what it gets."""

    def __init__(self, endpoint: str, number: int, took_s: list[float], wrong: list[str]) -> None:
        from sluicemq.proxy import messages as m

        name = f"bench@{number}"
        self._m, self._took_s, self._wrong = m, took_s, wrong
        self.client = Client(endpoint, name)
        topic, group = m.Resource(name=TOPIC), m.Resource(name=GROUP)
        settings = m.Settings(
            client_type=m.ClientType.SIMPLE_CONSUMER,
            user_agent=m.UA(language=2, version="5.2.0"),
            subscription=m.Subscription(
                group=group,
                subscriptions=[m.SubscriptionEntry(
                    topic=topic, expression=m.FilterExpression(type=1, expression="*")
                )],
                long_polling_timeout=m.Duration(seconds=POLL_S),
            ),
        )  # fmt: skip
        settings.request_timeout.seconds = 3
        self.client.keep_open(
            block_of("Telemetry", name, None),
            m.TelemetryCommand(settings=settings).SerializeToString(),
        )
        self._ack = block_of("AckMessage", name)
        self._beat = block_of("Heartbeat", name)
        self._heartbeat = m.HeartbeatRequest(
            group=group, client_type=m.ClientType.SIMPLE_CONSUMER
        ).SerializeToString()
        self._receive = block_of("ReceiveMessage", name, POLL_S + 5)
        self._request = m.ReceiveMessageRequest(
            group=group, message_queue=m.MessageQueue(topic=topic, id=-1), batch_size=32,
            invisible_duration=m.Duration(seconds=30),
            long_polling_timeout=m.Duration(seconds=POLL_S),
            filter_expression=m.FilterExpression(type=1, expression="*"),
        ).SerializeToString()  # fmt: skip
        self.heartbeat()
        self.poll()

    def heartbeat(self) -> None:
        self.client.call(self._beat, self._heartbeat, lambda _answer: None)

    def poll(self) -> None:
        self.client.call(self._receive, self._request, self._got)

    def _got(self, answers: list[bytes]) -> None:
        m, now_ns, entries = self._m, time.perf_counter_ns(), []
        for data in answers:
            answer = m.ReceiveMessageResponse.FromString(data)
            if answer.message.body[:20].isdigit():
                self._took_s.append((now_ns - int(answer.message.body[:20])) / 1e9)
            if answer.message.body:
                system = answer.message.system_properties
                entries.append(m.AckMessageEntry(
                    message_id=system.message_id, receipt_handle=system.receipt_handle
                ))  # fmt: skip
            elif answer.status.code not in (0, m.Code.OK, m.Code.MESSAGE_NOT_FOUND):
                self._wrong.append(f"{answer.status.code} {answer.status.message}")
        if entries:
            request = m.AckMessageRequest(
                group=m.Resource(name=GROUP), topic=m.Resource(name=TOPIC), entries=entries
            )
            self.client.call(self._ack, request.SerializeToString(), self._acknowledged)
        if not answers:
            self._wrong.append("no answer")
        self.poll()

    def _acknowledged(self, answers: list[bytes]) -> None:
        for data in answers:
            status = self._m.AckMessageResponse.FromString(data).status
            if status.code != self._m.Code.OK:
                self._wrong.append(f"ack: {status.code} {status.message}")


class Poll:
    """Clients by their sockets."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._receive: dict[int, Callable[[], object]] = {}

    def add(self, connected: socket.socket, receive: Callable[[], object]) -> None:
        self._poll.register(connected, select.EPOLLIN)
        self._receive[connected.fileno()] = receive

    def run(self, timeout_s: float) -> None:
        for fileno, _ in self._poll.poll(timeout_s):
            self._receive[fileno]()


def send_request(body: bytes) -> bytes:
    from sluicemq.proxy import messages as m

    message = m.Message(topic=m.Resource(name=TOPIC), body=body)
    message.system_properties.message_id = os.urandom(17).hex().upper()
    message.system_properties.message_type = m.MessageType.NORMAL
    message.system_properties.born_timestamp.seconds = int(time.time())
    return bytes(m.SendMessageRequest(messages=[message]).SerializeToString())


def paced(rate: float, seconds: float, poll: Poll, send: Callable[[int], None]) -> None:
    """Calls `send` with 0, 1, … at the rate, and lets the clients receive between."""
    begin, sent = time.perf_counter(), 0
    while (now := time.perf_counter()) - begin < seconds:
        while sent < (now - begin) * rate:
            send(sent)
            sent += 1
        poll.run(0.001)


def waiting(pair: Pair, count: int, rate: int, seconds: float) -> str:
    before = measure.rss_mib(pair.pid)
    took_s, wrong, poll = list[float](), list[str](), Poll()
    waiters = []
    for number in range(count):
        waiters.append(Waiter(pair.endpoint, number, took_s, wrong))
        poll.add(waiters[-1].client.socket, waiters[-1].client.receive)
        poll.run(0)
    sender, block = Client(pair.endpoint, "sender"), block_of("SendMessage", "sender")
    poll.add(sender.socket, sender.receive)
    beats = iter_forever(waiters)
    due_s = time.perf_counter()

    def send(number: int) -> None:
        nonlocal due_s
        body = b"%020d" % time.perf_counter_ns()
        sender.call(block, send_request(body.ljust(128, b"x")), lambda _answer: None)
        while time.perf_counter() > due_s:
            next(beats).heartbeat()
            due_s += HEARTBEAT_S / count

    settle(poll, 3)
    idle = measure.rss_mib(pair.pid)
    paced(rate, 5, poll, send)  # the first seconds warm up
    took_s.clear()
    begin_s = measure.exact_cpu_s(pair.pid)
    paced(rate, seconds, poll, send)
    cpu_s = measure.exact_cpu_s(pair.pid) - begin_s
    settle(poll, 2)
    rss = measure.rss_mib(pair.pid)
    for waiter in waiters:
        waiter.client.close()
    if wrong:
        print(f"  {len(wrong)} answers were wrong, as {wrong[0]}", file=sys.stderr)
    return (
        f"{count} consumers: memory {before:.0f} MiB before, {idle:.0f} when they wait, {rss:.0f}"
        f" at the end (own {measure.own_mib(pair.pid):.0f}); at {rate}/s {quantiles(took_s)}"
        f" from send to receive, {len(took_s)} of {rate * seconds:.0f};"
        f" {cpu_s / seconds:.0%} of a core"
    )


def settle(poll: Poll, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        poll.run(0.05)


def iter_forever(items: list[Any]) -> Iterator[Any]:
    while True:
        yield from items


def quantiles(took_s: list[float]) -> str:
    p50, p99 = (measure.percentile(took_s, share) * 1000 for share in (0.5, 0.99))
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, longest {max(took_s, default=0) * 1000:.0f} ms"


class Producers:
    """Connections of the remoting protocol with sends at a pace."""

    def __init__(self, pair: Pair, poll: Poll) -> None:
        self.took_s: list[float] = []
        self._began_s: list[list[float]] = [[] for _ in range(PRODUCERS)]
        self.connections = [load.Connection(pair.broker) for _ in self._began_s]
        for number, connection in enumerate(self.connections):
            poll.add(connection.socket, lambda number=number: self._answered(number))

    def send(self, number: int) -> None:
        which = number % PRODUCERS
        self._began_s[which].append(time.perf_counter())
        frame = frames.marked_send(TOPIC, number % frames.QUEUES, b"m")
        self.connections[which].socket.sendall(frame)

    def _answered(self, number: int) -> None:
        for _ in self.connections[number].answers():
            self.took_s.append(time.perf_counter() - self._began_s[number].pop(0))


class Storm:
    """Sends over gRPC, all at once."""

    def __init__(self, pair: Pair, poll: Poll) -> None:
        self.took_s: list[float] = []
        self.clients = [Client(pair.endpoint, f"burst@{n}") for n in range(BURST_CONNECTIONS)]
        self._request = send_request(b"x" * 128)
        for client in self.clients:
            poll.add(client.socket, client.receive)

    def blow(self) -> None:
        for client in self.clients:
            block, begin_s = block_of("SendMessage", client.name), time.perf_counter()

            def done(_answer: list[bytes], begin_s: float = begin_s) -> None:
                self.took_s.append(time.perf_counter() - begin_s)

            calls = [
                client.frames(block, self._request, done) for _ in range(BURST // BURST_CONNECTIONS)
            ]
            client.socket.sendall(b"".join(calls))


def burst(pair: Pair, seconds: float) -> str:
    """The producers alone, then with a burst of calls each second."""
    poll = Poll()
    producers, storm = Producers(pair, poll), Storm(pair, poll)

    def beside(number: int) -> None:
        producers.send(number)
        if number % PRODUCER_RATE == 0:
            storm.blow()

    paced(PRODUCER_RATE, 3, poll, beside)  # warms up
    settle(poll, 1)
    lines = []
    for name, send in (("alone", producers.send), (f"beside {BURST} calls a second", beside)):
        producers.took_s.clear()
        storm.took_s.clear()
        paced(PRODUCER_RATE, seconds, poll, send)
        settle(poll, 1)
        calls = f"; the calls: {quantiles(storm.took_s)}" if storm.took_s else ""
        lines.append(
            f"remoting sends at {PRODUCER_RATE}/s {name}: {quantiles(producers.took_s)}{calls}"
        )
    for connection in (*producers.connections, *storm.clients):
        connection.close()
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.consumers")
    parser.add_argument("--consumers", type=int, default=1000)
    parser.add_argument("--rate", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--only", default="waiting,burst")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="sluicemq-bench-"))
        pair = stack.enter_context(ours(Path(scratch)))
        prepare(pair, 0)
        if "waiting" in options.only:
            print(waiting(pair, options.consumers, options.rate, options.seconds), flush=True)
        if "burst" in options.only:
            print(burst(pair, options.seconds), flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
