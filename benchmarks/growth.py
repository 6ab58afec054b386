"""What grows with a cluster: topics in the store, connections, heartbeats, pulls that wait.

The same load as in the plain cases, with more around it; the figures are to stay what they are with
little around.
"""

import contextlib
import ctypes
import json
import multiprocessing
import select
import socket
import time
from collections.abc import Callable, Iterator

from benchmarks import frames, load, measure
from benchmarks.contenders import Plan, Server
from benchmarks.table import Figure

TOPICS_A_REQUEST = 1000
CONNECTIONS = 5000
PULLERS = 200
CLIENTS = 500
SENDS_A_SECOND, SENDER_S_MIN = 50, 2  # all pulls wait again long before the next message
AS_FAST_AS_IT_CAN = 1e6
SENDS_MAX = 5000  # a million deliveries
WAITING_TOPIC = "BenchWaiting"
CATCH_UP_S = 20
FILES_S = 12  # ours writes those of many queues when it has had nothing to do, every ten seconds
SMALL_BUFFER = 1 << 18

Run = Callable[[Server, Plan], Figure]


def with_topics(count: int, run: Run) -> Run:
    """`run` once the store has so many topics, each with a message."""

    def grown(server: Server, plan: Plan) -> Figure:
        if server.topics < count:
            names = topic_names(count)[server.topics :]
            for first in range(0, len(names), TOPICS_A_REQUEST):
                request = frames.create_topics(names[first : first + TOPICS_A_REQUEST])
                load.ask(server.broker, request, "topics were not created")
            load.fill(server.broker, frames.spread_sends(names), len(names))
            server.topics = count
            # New queues' files, which are made once behind the answers, are not the sends'.
            measure.await_rest(server.pid, FILES_S + 60, FILES_S)
        return run(server, plan)

    return grown


def topic_names(count: int) -> list[str]:
    return [f"BenchGrowth{number:05d}" for number in range(count)]


def spread_sends(count: int) -> Run:
    """Single sends over all the topics in turn."""

    def run(server: Server, plan: Plan) -> Figure:
        span = measure.Span(server.pid, plan.warm_s, plan.measure_s)
        ring = frames.spread_sends(topic_names(count))
        counts = load.send(
            server.broker, ring, connections=1, window=64,
            until=lambda counts: span.over(counts.messages),
        )  # fmt: skip
        return span_figure(span.cost, counts)

    return run


def span_figure(cost: measure.Cost, counts: load.Counts) -> Figure:
    if not cost.count:
        raise RuntimeError(f"nothing came, and {counts.errors} errors")
    more = {"errors_": float(counts.errors)} if counts.errors else {}
    return Figure(rate=cost.per_second, cpu_us=cost.cpu_us, more=more)


def with_connections(run: Run) -> Run:
    """`run` beside CONNECTIONS connections on which nothing happens."""

    def crowded(server: Server, plan: Plan) -> Figure:
        host, _, port = server.broker.rpartition(":")
        with contextlib.ExitStack() as stack:
            for _ in range(CONNECTIONS):
                idle = socket.create_connection((host, int(port)), load.ANSWER_TIMEOUT_S)
                stack.enter_context(contextlib.closing(idle))
            return run(server, plan)

    return crowded


def heartbeats(server: Server, plan: Plan) -> Figure:
    """CLIENTS consumers, in ten groups, say again and again what they have said before."""
    with contextlib.ExitStack() as stack:
        said = []
        for number in range(CLIENTS):
            connection = load.Connection(server.broker, SMALL_BUFFER)
            stack.enter_context(contextlib.closing(connection))
            said.append((connection, heartbeat(number)))
        for connection, request in said:
            connection.socket.sendall(request)
            _await_answer(connection)
        span, count = measure.Span(server.pid, plan.warm_s, plan.measure_s), 0
        while not span.over(count):
            for connection, request in said:
                connection.socket.sendall(request)
            for connection, _ in said:
                _await_answer(connection)
            count += CLIENTS
    return Figure(rate=span.cost.per_second, cpu_us=span.cost.cpu_us)


def _await_answer(connection: load.Connection) -> None:
    """Requests of the broker, that consumers have come, may come before it."""
    while not sum(b'"flag":1' in bytes(answer[:400]) for answer in connection.answers()):
        pass


def heartbeat(number: int) -> bytes:
    """Of a push consumer of one topic, as the Java client writes it."""
    subscription = {
        "classFilterMode": False, "codeSet": [], "expressionType": "TAG", "subString": "*",
        "subVersion": frames.BORN_TIME_MS, "tagsSet": [], "topic": WAITING_TOPIC,
    }  # fmt: skip
    consumer = {
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET", "consumeType": "CONSUME_PASSIVELY",
        "groupName": f"bench-heartbeats-{number % 10}", "messageModel": "CLUSTERING",
        "subscriptionDataSet": [subscription], "unitMode": False,
    }  # fmt: skip
    said = {"clientID": f"127.0.0.1@{number}", "consumerDataSet": [consumer], "producerDataSet": []}
    return frames.frame(frames.HEART_BEAT, {}, 1, json.dumps(said).encode())


# ---- one sender that waits for each answer, and pulls that wait for its messages


def lone_sender(server: Server, plan: Plan) -> Figure:
    """Nobody waits for what is sent."""
    load.create_topic(server.broker, WAITING_TOPIC)
    return _figure_of_sends(_timed_sends(server, plan, SENDS_A_SECOND))


def waiting_pulls(sends_a_second: float) -> Run:
    """PULLERS groups wait on the queue; each is to get every message. CPU for a message delivered,
    and for an answer, which has several when messages come faster than a group asks."""

    def run(server: Server, plan: Plan) -> Figure:
        load.create_topic(server.broker, WAITING_TOPIC)
        begin = load.queue_end(server.broker, WAITING_TOPIC, 0)
        with _receivers(server.broker, begin) as shared:
            while not shared.ready:
                time.sleep(0.01)
            time.sleep(0.2)  # the last of them waits, too
            cpu_s = measure.exact_cpu_s(server.pid)
            figure = _figure_of_sends(_timed_sends(server, plan, sends_a_second))
            messages = load.queue_end(server.broker, WAITING_TOPIC, 0) - begin
            end_s = time.monotonic() + CATCH_UP_S
            while shared.delivered < messages * PULLERS and time.monotonic() < end_s:
                time.sleep(0.01)
            delivered, answers = shared.delivered, shared.answers
            spent_s = measure.exact_cpu_s(server.pid) - cpu_s
        if delivered != messages * PULLERS:
            raise RuntimeError(f"{delivered} deliveries of {messages} messages to {PULLERS} groups")
        more = {"delivery_us": spent_s / delivered * 1e6, "answer_us": spent_s / answers * 1e6}
        return Figure(value=figure.value, unit=figure.unit, more={**figure.more, **more})

    return run


def _timed_sends(server: Server, plan: Plan, a_second: float) -> list[float]:
    """Seconds of each; the next one when its time has come and the last one is answered."""
    took: list[float] = []
    seconds = plan.warm_s + max(plan.measure_s, SENDER_S_MIN)
    with contextlib.closing(load.Connection(server.broker)) as connection:
        begin_s = due_s = time.perf_counter()
        while due_s - begin_s < seconds and len(took) < SENDS_MAX:
            if (wait_s := due_s - time.perf_counter()) > 0:
                time.sleep(wait_s)
            sent_s = time.perf_counter()
            answer = connection.call(frames.marked_send(WAITING_TOPIC, 0, b""))
            answered_s = time.perf_counter()
            if load.code_of(load.header_and_body(memoryview(answer))[0]):
                raise RuntimeError(f"a send was refused: {answer!r}")
            if sent_s - begin_s >= plan.warm_s:
                took.append(answered_s - sent_s)
            due_s = max(due_s + 1 / a_second, answered_s)
    return took


def _figure_of_sends(took: list[float]) -> Figure:
    p50, p99 = (measure.percentile(took, share) * 1000 for share in (0.5, 0.99))
    return Figure(value=p50, unit="ms", more={"p99_ms": p99})


class _Shared(ctypes.Structure):
    """What the process of the receivers tells, and is told."""

    _fields_ = (
        ("delivered", ctypes.c_uint64),
        ("answers", ctypes.c_uint64),
        ("ready", ctypes.c_bool),
        ("over", ctypes.c_bool),
    )


@contextlib.contextmanager
def _receivers(address: str, begin: int) -> Iterator[_Shared]:
    """A process of their own: in this one they would hold up the sender that is timed."""
    context = multiprocessing.get_context("spawn")
    shared = context.RawValue(_Shared)
    process = context.Process(target=_receive, args=(address, begin, shared), daemon=True)
    process.start()
    try:
        yield shared
    finally:
        shared.over = True
        process.join(5)
        process.kill()


def _receive(address: str, begin: int, shared: _Shared) -> None:
    pollers: dict[int, tuple[load.Connection, int]] = {}
    with contextlib.closing(select.epoll()) as poll:
        for number in range(PULLERS):
            connection = load.Connection(address, SMALL_BUFFER)
            poll.register(connection.socket, select.EPOLLIN)
            pollers[connection.socket.fileno()] = connection, number
            connection.socket.sendall(_waiting_pull(number, begin))
        shared.ready = True
        while not shared.over:
            for fileno, _ in poll.poll(0.05):
                connection, number = pollers[fileno]
                for answer in connection.answers():
                    header, body = load.header_and_body(answer)
                    shared.delivered += sum(1 for _ in load.records(body))
                    shared.answers += 1
                    connection.socket.sendall(_waiting_pull(number, load.next_offset(header)))


def _waiting_pull(number: int, offset: int) -> bytes:
    return frames.pull(WAITING_TOPIC, 0, offset, 1, suspend=True, group=f"bench-waiting-{number}")
