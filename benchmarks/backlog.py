"""A backlog drained through filters: our broker beside Java's, by Java's client and ours.

    python -m benchmarks.backlog [--quick] [--messages 5000000] [--bytes 1024] [--json FILE]
                                 [--java 5.5.0] [--no-java] [--only WORD] [--drains 3]

Orders with eight properties and a tag (`orders.py`: values at random) are sent to both brokers in
batches, then drained by the unmodified Java push consumer 5.3.3 and by our Python client, with
SQL92 that lets 10 %, 1 % and 0.01 % through and a tag of 1 %. Every drain is a new group with an
expression that was never seen before; a hash of the numbers in the bodies proves that the right
messages came, each once. Rates are messages looked at a second from the first message to the last;
CPU time is that of all of a broker's processes, in seconds for a million messages looked at.

Ours is one store, with the pure and then with the compiled engine over it, each beside Java's
broker in turn. `no columns`: before each drain the files of columns are removed and the broker is
started again. Else all of them are there, and their first use was before. Java's broker is stopped
while ours is measured.

`log read` is how much of the commit log was looked at: pages of its mapped files that were used
(the kernel's accessed bits, cleared before; a page is 4 KiB, so a message that matches is one or
two). `of it matches` is what the matching messages take.

The Java client is set so that it is not the limit, the same for both brokers (see CLIENT); one case
has RocketMQ's defaults instead. Our client has the engine of this process. The first drain of each
case is not counted: it warms up the JVMs. At the end: the exact filtered lag of the whole backlog,
counted for the first time, while sends go on, and what Java's broker estimates (`estimate.py`).
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import platform
import shutil
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks import contenders, estimate, frames, load, measure, table
from benchmarks.orders import SHARES, Orders, Question, sum_of

from peer import clusters, toolchain  # isort: skip  (contenders finds them)
from peer.drivers import Driver, DriverFailedError, Event  # isort: skip
from sluicemq import Sluice  # isort: skip
from sluicemq.client.aio.received import ReceivedMessage  # isort: skip

TOPIC = "BenchOrders"
QUEUES = frames.QUEUES
WINDOW = 8
DRAIN_TIMEOUT_S = 120
SETTLE_TIMEOUT_S = 300
BLOCK_ROWS = 1 << 16
# Messages a pull (brokers give 32), offsets a queue that may be in hand, messages a queue that may
# be in hand, messages a call of the listener, threads: the largest that RocketMQ allows, as far as
# they could hold the client back.
CLIENT = {"pull": 32, "span": 65_535, "held": 10_000, "list": 32, "consumers": 4}
DEFAULTS: dict[str, int] = {}
FILTERED_LAG = 900131
LAG_GROUP, LAG_QUESTIONS, LAG_PAUSE_S = "bench", 8, 0.5
SENDS_TOPIC = "BenchOrdersBeside"
LATENCY_SENDS, LATENCY_S = 500, 5.0


class Server:
    """A broker over a directory; it is started and stopped as a whole."""

    def __init__(self, contender: contenders.Contender, directory: Path, port: int = 0) -> None:
        self.contender, self.directory, self.metrics_port = contender, directory, port
        self._running = contextlib.ExitStack()

    @property
    def name(self) -> str:
        return self.contender.name

    @property
    def is_ours(self) -> bool:
        return self.contender.kind in table.OURS

    @property
    def store(self) -> Path:
        return self.directory / "store"

    @property
    def pid(self) -> int:
        return self.cluster.pids["broker"]

    def start(self) -> None:
        self.directory.mkdir(exist_ok=True)
        self.cluster = self._running.enter_context(self.contender.launch(self.directory))
        self.running = contenders.Server(self.contender, self.cluster, None, 0.0)

    def stop(self) -> None:
        self._running.close()

    def forget_columns(self) -> None:
        self.stop()
        shutil.rmtree(self.store / "columns", ignore_errors=True)
        self.start()


@dataclass(frozen=True)
class Drain:
    """What one drain cost. `read_bytes`: pages of the log that were used."""

    seconds: float
    cpu_s: float
    read_bytes: int
    problem: str = ""


@dataclass(frozen=True)
class Result:
    """Several drains of one case as one line: sums, so that a short one counts for less."""

    case: str
    client: str
    server: str
    scanned_per_s: float
    best_per_s: float
    cpu_s_per_million: float
    read_mib: float
    match_mib: float
    problems: str


def main() -> int:
    options = arguments()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load "
          f"{os.getloadavg()[0]:.1f}; {options.messages:,} messages of {options.bytes} bytes, "
          f"{QUEUES} queues, {options.drains} drains a case")  # fmt: skip
    print(f"Java push consumer: {CLIENT}; 'defaults': RocketMQ's\n", flush=True)
    orders = Orders(options.messages, body_bytes=options.bytes)
    results: list[Result] = []
    lags: dict[str, Any] = {}
    sealing: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluicemq-bench-")))
        theirs = None if options.no_java else real(options.java, scratch)
        java = contenders.java_client(scratch, stack) if theirs else None
        if theirs:
            theirs.start()
            stack.callback(theirs.stop)
            fill(theirs, orders)
            theirs.running.rest()
        for mine in ours(scratch):
            is_filled = mine.store.exists()
            mine.start()
            stack.callback(mine.stop)
            if not is_filled:
                fill(mine, orders)
            servers = [mine, theirs] if theirs else [mine]
            for case in cases(java, options.only, without_columns=True):
                results += run_case(case, servers, orders, java, options.drains)
            mine.forget_columns()
            sealing[mine.name] = settle(mine, orders)
            for case in cases(java, options.only, without_columns=False):
                results += run_case(case, servers, orders, java, options.drains)
            lags[mine.name] = filtered_lag(mine, orders)
            mine.stop()
        estimates = []
        if theirs:
            with theirs.running.awake():
                estimates = real_estimates(theirs, orders)
    verdicts(results)
    if options.json:
        found = {
            "drains": [dataclasses.asdict(one) for one in results],
            "lag": lags,
            "estimates": estimates,
            "sealing": sealing,
        }
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    return 1 if any(one.problems for one in results) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.backlog", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--messages", type=int, default=0, help="5,000,000; --quick: 400,000")
    parser.add_argument("--bytes", type=int, default=1024, help="of each body: 1024")
    parser.add_argument("--java", default=contenders.RELEASES[0], help="5.5.0 or 5.3.3")
    parser.add_argument("--drains", type=int, default=0, help="drains a case: 3; --quick: 2")
    parser.add_argument("--quick", action="store_true", help="a small backlog: some minutes")
    parser.add_argument("--only", default="", help="only the cases whose name has this in it")
    parser.add_argument("--json", default="", help="write the figures to this file as well")
    parser.add_argument("--no-java", action="store_true", help="our broker and client alone")
    options = parser.parse_args()
    options.messages = options.messages or (400_000 if options.quick else 5_000_000)
    options.drains = options.drains or (2 if options.quick else 3)
    return options


# ---- servers and the backlog


def ours(scratch: Path) -> list[Server]:
    """Both engines over one store, to be started one after the other."""
    return [Server(one, scratch / "ours") for one in contenders.ours()]


def real(release: str, scratch: Path) -> Server | None:
    """Java's, with the metrics that estimate lag; None with the reason printed."""
    try:
        toolchain.jars(f"server-{release}")
    except toolchain.MissingTool as missing:
        print(f"without Java's broker: {missing}\n")
        return None
    port = clusters.free_ports()[2]
    return Server(contenders.java(release, **estimate.settings(port)), scratch / "theirs", port)


def fill(server: Server, orders: Orders) -> None:
    broker = server.cluster.broker
    load.create_topic(broker, TOPIC)
    cost = measure.timed(server.pid, lambda: _send_all(broker, orders))
    print(f"{server.name:15} filled at {cost.per_second:,.0f}/s [{cost.cpu_us:.2f} us]", flush=True)


def _send_all(broker: str, orders: Orders) -> int:
    sent = answered = 0
    with contextlib.closing(load.Connection(broker)) as connection:
        for frame in orders.sends(TOPIC, QUEUES):
            connection.socket.sendall(frame)
            sent += 1
            while sent - answered >= WINDOW:
                answered += _answers(connection)
        while answered < sent:
            answered += _answers(connection)
    return orders.count


def _answers(connection: load.Connection) -> int:
    count = 0
    for answer in connection.answers():
        header, _ = load.header_and_body(answer)
        if load.code_of(header):
            raise RuntimeError(f"a send was refused: {header.decode()}")
        count += 1
    return count


def settle(ours: Server, orders: Orders) -> dict[str, float]:
    """A first filter makes the broker put the whole backlog into files of columns; sends are timed
    before that and beside it."""
    broker = ours.cluster.broker
    load.create_topic(broker, SENDS_TOPIC)
    paced_sends(broker, for_seconds(1.0))
    before = paced_sends(broker, for_seconds(LATENCY_S))
    cpu_s, begin_s = measure.exact_cpu_s(ours.pid), time.monotonic()
    wanted = orders.count // QUEUES // BLOCK_ROWS * QUEUES
    making = threading.Thread(target=_await_files, args=(ours, wanted))
    making.start()
    with contextlib.closing(load.Connection(broker)) as connection:
        question = orders.question("1 %")
        connection.call(frames.pull(TOPIC, 0, 0, 1, expression=question.expression, kind="SQL92"))
    beside = paced_sends(broker, lambda _: not making.is_alive())
    made = len(files_of_columns(ours)) * BLOCK_ROWS
    cpu_us = (measure.exact_cpu_s(ours.pid) - cpu_s) / max(made, 1) * 1e6
    size_bytes = sum(path.stat().st_size for path in files_of_columns(ours))
    share = 100 * size_bytes / max(made, 1) / orders.record_bytes(TOPIC)
    print(f"{ours.name:15} {made:,} messages put into files of columns in "
          f"{time.monotonic() - begin_s:.0f} s ({cpu_us:.2f} us CPU each, with the sends beside); "
          f"p99 of sends {before:.2f} ms before, {beside:.2f} ms beside it; files: "
          f"{share:.1f} % of the log\n", flush=True)  # fmt: skip
    return {"sends_p99_ms": before, "sends_p99_ms_beside": beside, "disk_percent": share,
            "build_cpu_us": cpu_us}  # fmt: skip


def _await_files(server: Server, wanted: int) -> None:
    end = time.monotonic() + SETTLE_TIMEOUT_S
    while len(files_of_columns(server)) < wanted and time.monotonic() < end:
        time.sleep(0.2)


def files_of_columns(server: Server) -> list[Path]:
    return list((server.store / "columns").glob("*/*/*.arrow"))


# ---- drains


@dataclass(frozen=True)
class Case:
    share: str
    client: str
    settings: dict[str, int]
    without_columns: bool = False

    @property
    def filter(self) -> str:
        return f"{self.share}, no columns" if self.without_columns else self.share

    @property
    def name(self) -> str:
        return f"{self.client}: {self.filter}"


def cases(java: Driver | None, only: str, *, without_columns: bool) -> list[Case]:
    found = []
    if without_columns:
        clients = [("Java", CLIENT)] if java is not None else []
        found = [Case("1 %", *one, True) for one in [*clients, ("Python", DEFAULTS)]]
        return [case for case in found if only in case.name]
    if java is not None:
        found += [Case(share, "Java", CLIENT) for share in SHARES]
        found += [Case(share, "Java, defaults", DEFAULTS) for share in ("1 %", "0.01 %")]
    found += [Case(share, "Python", DEFAULTS) for share in SHARES]
    return [case for case in found if only in case.name]


def run_case(
    case: Case, servers: list[Server], orders: Orders, java: Driver | None, drains: int
) -> list[Result]:
    taken: dict[str, list[tuple[Question, Drain]]] = {server.name: [] for server in servers}
    for number in range(drains + 1):
        question = orders.question(case.share)
        for server in servers if number % 2 else reversed(servers):
            if case.without_columns and server.is_ours:
                server.forget_columns()
            with server.running.awake():
                drain = (
                    python_drain(server, question)
                    if case.client == "Python"
                    else java_drain(java, server, question, case.settings)
                )
            if number or drain.problem:  # the first one is for the compilers
                taken[server.name].append((question, drain))
    results = [_result(case, server.name, taken[server.name], orders) for server in servers]
    for result in results:
        show(result)
    return results


def _result(case: Case, server: str, taken: list[tuple[Question, Drain]], orders: Orders) -> Result:
    drains = [drain for _, drain in taken]
    record_bytes = orders.record_bytes(TOPIC)
    scanned, seconds = orders.count * len(drains), sum(drain.seconds for drain in drains)
    return Result(
        case.filter, case.client, server, scanned / seconds,
        orders.count / min(drain.seconds for drain in drains),
        sum(drain.cpu_s for drain in drains) / scanned * 1e6,
        statistics.mean(drain.read_bytes for drain in drains) / (1 << 20),
        statistics.mean(question.count for question, _ in taken) * record_bytes / (1 << 20),
        "; ".join(dict.fromkeys(drain.problem for drain in drains if drain.problem)),
    )  # fmt: skip


def show(result: Result) -> None:
    print(f"{result.client:14} {result.case:15} {result.server:11} "
          f"{result.scanned_per_s / 1e6:7.2f} M scanned/s (best {result.best_per_s / 1e6:6.2f})  "
          f"{result.cpu_s_per_million:7.4f} s CPU a million  "
          f"log read {result.read_mib:8.1f} MiB, of it matches {result.match_mib:6.1f}  "
          f"{result.problems}", flush=True)  # fmt: skip


class Clock:
    """Time and the broker's CPU time between the first message and the last."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.marks: list[tuple[float, float]] = []

    def mark(self) -> None:
        self.marks.append((time.perf_counter(), measure.exact_cpu_s(self._pid)))

    def drain(self, read_bytes: int, problem: str) -> Drain:
        (begin_s, begin_cpu_s), (end_s, end_cpu_s) = self.marks[:2]
        return Drain(end_s - begin_s, end_cpu_s - begin_cpu_s, read_bytes, problem)


def java_drain(
    java: Driver | None, server: Server, question: Question, settings: dict[str, int]
) -> Drain:
    assert java is not None
    clock = Clock(server.pid)
    found: dict[str, int] = {}

    def seen(event: Event) -> None:
        if event["event"] in ("begin", "end"):
            clock.mark()
        found[event["event"]] = event["count"]

    measure.forget_pages(server.pid)
    how = {"sql" if question.kind == "SQL92" else "tag": question.expression}
    try:
        java.call(
            "drain", expect=question.count, timeout_s=DRAIN_TIMEOUT_S, on_event=seen, sum=1,
            ns=server.cluster.name_server, topic=TOPIC, **how, **settings,
        )  # fmt: skip
    except DriverFailedError as error:
        return Drain(float(DRAIN_TIMEOUT_S), 0.0, 0, str(error)[-200:])
    came, total = found["came"], found["sum"] % (1 << 64)
    return clock.drain(measure.used_log_bytes(server.pid), _problem(question, came, total))


def _problem(question: Question, came: int, total: int) -> str:
    if came != question.count:
        return f"{question.expression}: {came} messages came instead of {question.count}"
    return "" if total == question.sum else f"{question.expression}: others came"


def python_drain(server: Server, question: Question) -> Drain:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_drained(server, question))


async def _drained(server: Server, question: Question) -> Drain:
    clock, complete = Clock(server.pid), asyncio.Event()
    numbers: list[int] = []

    async def handle(messages: list[ReceivedMessage]) -> None:
        if not numbers:
            clock.mark()
        numbers.extend(struct.unpack_from(">Q", message.body)[0] for message in messages)
        if len(numbers) >= question.count and len(clock.marks) < 2:
            clock.mark()
            complete.set()

    measure.forget_pages(server.pid)
    async with Sluice(server.cluster.name_server) as mq:
        consumer = mq.consumer(f"python-{time.monotonic_ns()}", handle, batch_max=32)
        chosen = {"where" if question.kind == "SQL92" else "tags": question.expression}
        await consumer.subscribe(TOPIC, **chosen).start()
        try:
            await asyncio.wait_for(complete.wait(), DRAIN_TIMEOUT_S)
        except TimeoutError:
            problem = _problem(question, len(numbers), 0)
            return Drain(float(DRAIN_TIMEOUT_S), 0.0, 0, problem)
        await asyncio.sleep(0.2)  # one that comes twice comes soon
    total = sum_of(np.array(numbers, np.uint64))
    return clock.drain(measure.used_log_bytes(server.pid), _problem(question, len(numbers), total))


# ---- sends that are timed beside something else


def paced_sends(broker: str, is_over: Callable[[float], bool]) -> float:
    """Single sends, LATENCY_SENDS a second, each awaited: their p99 in ms. `is_over` is asked with
    the seconds so far."""
    took: list[float] = []
    with contextlib.closing(load.Connection(broker)) as connection:
        due_s = begin_s = time.perf_counter()
        while not is_over(due_s - begin_s):
            frame = frames.marked_send(SENDS_TOPIC, len(took) % QUEUES, b"")
            if (wait_s := due_s - time.perf_counter()) > 0:
                time.sleep(wait_s)
            sent_s = time.perf_counter()
            connection.call(frame)
            answered_s = time.perf_counter()
            took.append(answered_s - sent_s)
            due_s = max(due_s + 1 / LATENCY_SENDS, answered_s)
    return measure.percentile(took, 0.99) * 1000


def for_seconds(seconds: float) -> Callable[[float], bool]:
    return lambda passed_s: passed_s >= seconds


# ---- exact filtered lag


def filtered_lag(ours: Server, orders: Orders) -> dict[str, Any]:
    """The first count of the whole backlog for filters never seen, beside sends that are timed."""
    broker = ours.cluster.broker
    with contextlib.closing(load.Connection(broker)) as connection:  # the group is known then
        connection.call(frames.pull(TOPIC, 0, 0, 1, group=LAG_GROUP))
    before = paced_sends(broker, for_seconds(LATENCY_S))
    print(f"\nfiltered lag of {orders.count:,} messages, counted for the first time (p99 of sends "
          f"before: {before:.2f} ms)")  # fmt: skip
    found: dict[str, Any] = {"sends_p99_ms": before}
    for share in SHARES:
        asked = [orders.question(share) for _ in range(LAG_QUESTIONS)]
        took: list[tuple[float, int]] = []
        asker = threading.Thread(
            target=lambda: took.extend(_spaced(broker, asked))  # noqa: B023
        )
        asker.start()
        beside = paced_sends(broker, lambda passed_s: not asker.is_alive())  # noqa: B023
        errors = [one[1] - question.count for one, question in zip(took, asked, strict=True)]
        found[share] = {
            "ms": [seconds * 1000 for seconds, _ in took], "errors": errors,
            "sends_p99_ms": beside,
        }  # fmt: skip
        print(f"  {share:8} {statistics.median(found[share]['ms']):7.1f} ms (median of {len(took)},"
              f" the longest {max(found[share]['ms']):.1f}), errors {errors}; p99 of sends beside "
              f"it {beside:.2f} ms", flush=True)  # fmt: skip
    return found


def real_estimates(theirs: Server, orders: Orders) -> list[dict[str, Any]]:
    """What the real broker's metrics say of such filters."""
    asked = [orders.question(share) for share in SHARES for _ in range(LAG_QUESTIONS)]
    place = theirs.cluster.name_server, theirs.cluster.broker, theirs.metrics_port
    found = estimate.estimated(*place, TOPIC, asked)
    for share in SHARES:
        errors = sorted(one.error_percent for one in found if one.share == share)
        print(f"  {share:8} {theirs.name} estimates it: wrong by {errors[0]:+,.1f} to "
              f"{errors[-1]:+,.1f} %", flush=True)  # fmt: skip
    return [dataclasses.asdict(one) for one in found]


def _spaced(broker: str, asked: list[Question]) -> Iterator[tuple[float, int]]:
    for question in asked:
        yield _lag(broker, question)
        time.sleep(LAG_PAUSE_S)


def _lag(broker: str, question: Question) -> tuple[float, int]:
    """Seconds, and the count."""
    fields = {
        "consumerGroup": LAG_GROUP, "topic": TOPIC, "subscription": question.expression,
        "expressionType": question.kind,
    }  # fmt: skip
    with contextlib.closing(load.Connection(broker)) as connection:
        begin_s = time.perf_counter()
        answer = connection.call(frames.frame(FILTERED_LAG, fields, 1))
        seconds = time.perf_counter() - begin_s
    header, body = load.header_and_body(memoryview(answer))
    if load.code_of(header):
        raise RuntimeError(header.decode())
    topics = json.loads(bytes(body))["topics"]
    return seconds, sum(queue["matching"] for topic in topics for queue in topic["queues"])


AIMS = {
    "tag 1 %": table.Aim(3, 5, "rate", is_minimum=True),
    "1 %": table.Aim(10, 20, "rate", is_minimum=True),
    "1 %, no columns": table.Aim(5, 8, "rate", is_minimum=True),
}


def verdicts(results: list[Result]) -> None:
    """How each of ours compares with the Java broker beside it, case by case."""
    print()
    for mine, theirs in itertools.pairwise(results):
        if mine.server not in table.OURS or theirs.server in table.OURS:
            continue
        rate = mine.scanned_per_s / theirs.scanned_per_s
        cpu = theirs.cpu_s_per_million / mine.cpu_s_per_million
        aim = AIMS.get(mine.case)
        aims = str(table.Verdict(mine.server, aim, rate)) if aim else ""
        print(f"{mine.client:14} {mine.case:15} {mine.server:8} {rate:6.1f} x Java's rate, CPU "
              f"1/{cpu:.1f}  {aims}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
