"""Closed-loop load on raw sockets: as many requests in flight as the window says, one more for
every answer.

Answers are counted by their length prefix and by `"code":0`; nothing else of them is looked at
unless the case needs it. So the generator costs about a microsecond a message and leaves the other
core to the server.
"""

import contextlib
import re
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks import frames

GET_MAX_OFFSET = 30
LENGTH = struct.Struct(">I")
NEXT_OFFSET = re.compile(rb'"nextBeginOffset":"(\d+)"')
OPAQUE = re.compile(rb'"opaque":(\d+)')
CODE = re.compile(rb'"code":(\d+)')
BUFFER_BYTES = 4 << 20
ACKNOWLEDGEMENTS_BYTES = 1 << 18
ANSWER_TIMEOUT_S = 30
BODY_LENGTH_AT = 84  # of a stored record with IPv4 hosts
FOUND, RETRY_IMMEDIATELY = 0, 20


@dataclass
class Counts:
    """Messages acknowledged or delivered, messages scanned, answers that were no success."""

    messages: int = 0
    scanned: int = 0
    errors: int = 0
    latencies_s: list[float] = field(default_factory=list)


class Connection:
    """One socket and the bytes of answers that are not whole yet."""

    def __init__(self, address: str, buffer_bytes: int = BUFFER_BYTES) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), ANSWER_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(buffer_bytes)
        self._view = memoryview(self._buffer)
        self._end = 0

    def answers(self) -> Iterator[memoryview]:
        """Receive once; every whole frame now there, without its length prefix."""
        received = self.socket.recv_into(self._view[self._end :])
        if not received:
            raise ConnectionError("the server closed the connection")
        self._end += received
        at = 0
        while self._end - at >= 4:
            size = LENGTH.unpack_from(self._buffer, at)[0]
            if self._end - at < 4 + size:
                break
            yield self._view[at + 4 : at + 4 + size]
            at += 4 + size
        self._buffer[: self._end - at] = self._buffer[at : self._end]
        self._end -= at

    def send(self, ring: frames.Ring, count: int) -> None:
        for part in ring.take(count):
            self.socket.sendall(part)

    def call(self, request: bytes) -> bytes:
        """One request, one answer."""
        self.socket.sendall(request)
        while True:  # `answers` has to run to its end: only then it moves the rest of the buffer up
            for answer in [bytes(answer) for answer in self.answers()]:
                return answer

    def close(self) -> None:
        self._view.release()
        self.socket.close()


def header_and_body(answer: memoryview) -> tuple[bytes, memoryview]:
    size = LENGTH.unpack_from(answer)[0] & 0xFFFFFF
    return bytes(answer[4 : 4 + size]), answer[4 + size :]


def code_of(header: bytes) -> int:
    found = CODE.search(header)
    return int(found[1]) if found else -1


def create_topic(address: str, topic: str) -> None:
    ask(address, frames.create_topic(topic), f"topic {topic} was not created")


def ask(address: str, request: bytes, problem: str) -> bytes:
    """The header of a successful answer."""
    with contextlib.closing(Connection(address)) as connection:
        header, _ = header_and_body(memoryview(connection.call(request)))
    if code_of(header) != 0:
        raise RuntimeError(f"{problem}: {header.decode()}")
    return header


def queue_end(address: str, topic: str, queue: int) -> int:
    fields = {"topic": topic, "queueId": str(queue), "committed": "true"}
    request = frames.frame(GET_MAX_OFFSET, fields, 1)
    found = re.search(rb'"offset":"(\d+)"', ask(address, request, f"no end of {topic} {queue}"))
    assert found
    return int(found[1])


def await_messages(address: str, topic: str, count: int) -> None:
    """Until the queues of a topic hold so many."""
    end_s, found = time.monotonic() + ANSWER_TIMEOUT_S, -1
    while time.monotonic() < end_s:
        found = sum(queue_end(address, topic, queue) for queue in range(frames.QUEUES))
        if found == count:
            return
        time.sleep(0.01)
    raise RuntimeError(f"{topic} has {found} messages instead of {count}")


def send(
    address: str,
    ring: frames.Ring,
    *,
    connections: int,
    window: int,
    until: Callable[[Counts], bool],
) -> Counts:
    """Send over so many connections, `window` requests in flight on each, until `until`.

    `address` may be several, host:port;host:port: connections go to them in turn.
    """
    counts = Counts()
    addresses = address.split(";")
    with contextlib.ExitStack() as stack:
        poll = stack.enter_context(contextlib.closing(select.epoll()))
        by_fileno = {}
        for number in range(connections):
            server = addresses[number % len(addresses)]
            connection = stack.enter_context(
                contextlib.closing(Connection(server, ACKNOWLEDGEMENTS_BYTES))
            )
            by_fileno[connection.socket.fileno()] = connection
            poll.register(connection.socket, select.EPOLLIN)
            connection.send(ring, window)
        while not until(counts):
            for fileno, _ in poll.poll(ANSWER_TIMEOUT_S):
                answered = _count(by_fileno[fileno], counts, ring.messages_per_frame)
                by_fileno[fileno].send(ring, answered)
    return counts


def fill(address: str, ring: frames.Ring, requests: int, *, window: int = 8) -> None:
    """So many requests, each of which has to succeed."""
    sent = answered = 0
    counts = Counts()
    with contextlib.closing(Connection(address)) as connection:
        while answered < requests:
            more = min(window - (sent - answered), requests - sent)
            connection.send(ring, more)
            sent += more
            answered += _count(connection, counts, ring.messages_per_frame)
            if counts.errors:
                raise RuntimeError(f"{counts.errors} of {answered} sends were refused")


def _count(connection: Connection, counts: Counts, messages: int) -> int:
    answered = 0
    for answer in connection.answers():
        answered += 1
        if b'"code":0,' in bytes(answer[:400]):
            counts.messages += messages
        else:
            counts.errors += 1
    return answered


def pull(
    address: str, topic: str, *, expression: str, kind: str = "TAG", until: Callable[[Counts], bool]
) -> Counts:
    """Walk the four queues side by side on one connection, a pull in flight for each, over and
    over."""
    counts = Counts()
    with contextlib.closing(Connection(address)) as connection:
        walk = _Pulls(connection, topic, expression, kind, counts)
        while not until(counts):
            for queue, is_end in walk.answered():
                walk.ask(queue, 0 if is_end else walk.offsets[queue])
    return counts


def drain(
    address: str, topic: str, *, expression: str, kind: str = "TAG", counts: Counts | None = None
) -> Counts:
    """The four queues once, from their beginnings to the ends that they have now."""
    counts = Counts() if counts is None else counts
    ends = [queue_end(address, topic, queue) for queue in range(frames.QUEUES)]
    with contextlib.closing(Connection(address)) as connection:
        walk = _Pulls(connection, topic, expression, kind, counts)
        open_ = frames.QUEUES
        while open_:
            for queue, is_end in walk.answered():
                if is_end or walk.offsets[queue] >= ends[queue]:
                    open_ -= 1
                else:
                    walk.ask(queue, walk.offsets[queue])
    return counts


class _Pulls:
    """A pull in flight for each queue of a topic."""

    def __init__(
        self, connection: Connection, topic: str, expression: str, kind: str, counts: Counts
    ) -> None:
        self._connection, self._topic, self._counts = connection, topic, counts
        self._expression, self._kind = expression, kind
        self.offsets = [0] * frames.QUEUES
        for queue in range(frames.QUEUES):
            self.ask(queue, 0)

    def ask(self, queue: int, offset: int) -> None:
        self.offsets[queue] = offset
        request = frames.pull(
            self._topic,
            queue,
            offset,
            frames.OPAQUE_FIRST + queue,
            expression=self._expression,
            kind=self._kind,
        )
        self._connection.socket.sendall(request)

    def answered(self) -> Iterator[tuple[int, bool]]:
        """Receive once: the queues that were answered, and whether that was their end."""
        for answer in self._connection.answers():
            header, body = header_and_body(answer)
            queue, offset = _lane(header), next_offset(header)
            is_end = code_of(header) not in (FOUND, RETRY_IMMEDIATELY)
            if is_end:
                self._counts.errors += self.offsets[queue] == 0
            else:
                self._counts.messages += sum(1 for _ in records(body))
                self._counts.scanned += offset - self.offsets[queue]
                self.offsets[queue] = offset
            yield queue, is_end


def _lane(header: bytes) -> int:
    found = OPAQUE.search(header)
    assert found, header
    return int(found[1]) - frames.OPAQUE_FIRST


def next_offset(header: bytes) -> int:
    found = NEXT_OFFSET.search(header)
    return int(found[1]) if found else 0


def records(body: memoryview) -> Iterator[memoryview]:
    """The stored records of a pull answer."""
    at = 0
    while at + 4 <= len(body):
        size = LENGTH.unpack_from(body, at)[0]
        if size == 0:
            return
        yield body[at : at + size]
        at += size


def latency(
    address: str, topic: str, *, rate: int, seconds: float, receiver_address: str = ""
) -> Counts:
    """Send `rate` messages a second; parked long polls on another connection receive them, from
    `receiver_address` when another broker has them too."""
    counts = Counts()
    with contextlib.ExitStack() as stack:
        sender = stack.enter_context(contextlib.closing(Connection(address)))
        receiver = stack.enter_context(contextlib.closing(Connection(receiver_address or address)))
        poll = stack.enter_context(contextlib.closing(select.epoll()))
        for connection in (sender, receiver):
            poll.register(connection.socket, select.EPOLLIN)
        walk = _Walk(receiver_address or address, receiver, topic)
        started = time.perf_counter()
        sent = 0
        while (now := time.perf_counter()) - started < seconds:
            while sent < (now - started) * rate:
                mark = b"%020d" % time.perf_counter_ns()
                sender.socket.sendall(frames.marked_send(topic, sent % frames.QUEUES, mark))
                sent += 1
            for fileno, _ in poll.poll(0.001):
                if fileno == receiver.socket.fileno():
                    walk.receive(counts)
                else:
                    counts.errors += sum(
                        b'"code":0,' not in bytes(answer[:400]) for answer in sender.answers()
                    )
    return counts


class _Walk:
    """Long polls at the end of each queue; the time a message took is in its body."""

    def __init__(self, address: str, connection: Connection, topic: str) -> None:
        self._connection = connection
        self._topic = topic
        self._offsets = [queue_end(address, topic, queue) for queue in range(frames.QUEUES)]
        for queue in range(frames.QUEUES):
            self._ask(queue)

    def receive(self, counts: Counts) -> None:
        for answer in self._connection.answers():
            now_ns = time.perf_counter_ns()
            header, body = header_and_body(answer)
            queue = _lane(header)
            for record in records(body):
                mark = bytes(record[BODY_LENGTH_AT + 4 : BODY_LENGTH_AT + 24])
                counts.latencies_s.append((now_ns - int(mark)) / 1e9)
                counts.messages += 1
            self._offsets[queue] = next_offset(header) or self._offsets[queue]
            self._ask(queue)

    def _ask(self, queue: int) -> None:
        request = frames.pull(
            self._topic, queue, self._offsets[queue], frames.OPAQUE_FIRST + queue, suspend=True
        )
        self._connection.socket.sendall(request)
