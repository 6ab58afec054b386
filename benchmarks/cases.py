"""The rows of `make bench`: what is measured, how, and what we mean to reach.

Every case runs on all servers of the run, one after the other, with the same frames or the same
Java client. A case gives one `Figure` a server; `table` says how ours compare.
"""

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import frames, growth, load, measure
from benchmarks.contenders import ROOT, Plan, Server
from benchmarks.table import OURS, Aim, Case, Figure

from peer.drivers import Event  # isort: skip

Run = Callable[[Server, Plan], Figure]

# ---- sends


def _sending(topic: str, make: Callable[[str], frames.Ring], connections: int, window: int) -> Run:
    def run(server: Server, plan: Plan) -> Figure:
        load.create_topic(server.broker, topic)
        span = measure.Span(server.pid, plan.warm_s, plan.measure_s)
        counts = load.send(
            server.broker,
            make(topic),
            connections=connections,
            window=window,
            until=lambda counts: span.over(counts.messages),
        )
        return growth.span_figure(span.cost, counts)

    return run


def _batches(size: int) -> Callable[[str], frames.Ring]:
    return lambda topic: frames.batch_sends(topic, batch=size)


# ---- pulls over a backlog with 10 % T10, 1 % T01 and 1 % of each level

BACKLOG_TOPIC = "BenchBacklog"
BACKLOG_BATCH = 100
FRESH = itertools.count()


def fill(server: Server, plan: Plan) -> Figure:
    """Until the last message can be pulled: Java fills its queues behind the answers."""
    load.create_topic(server.broker, BACKLOG_TOPIC)
    ring = frames.batch_sends(BACKLOG_TOPIC, batch=BACKLOG_BATCH, count=40, tagged=True)

    def work() -> int:
        load.fill(server.broker, ring, plan.backlog // BACKLOG_BATCH)
        load.await_messages(server.broker, BACKLOG_TOPIC, plan.backlog)
        return plan.backlog

    cost = measure.timed(server.pid, work)
    return Figure(rate=cost.per_second, cpu_us=cost.cpu_us)


def _pulling(expression: str, kind: str = "TAG", topic: str = BACKLOG_TOPIC) -> Run:
    """The figure is per message delivered."""

    def run(server: Server, plan: Plan) -> Figure:
        span = measure.Span(server.pid, min(plan.warm_s, 2), plan.measure_s)
        counts = load.pull(
            server.broker,
            topic,
            expression=expression,
            kind=kind,
            until=lambda counts: span.over(counts.messages),
        )
        return growth.span_figure(span.cost, counts)

    return run


def first_filter(server: Server, plan: Plan) -> Figure:
    """The broker's first SQL92 filter: the backlog once, from end to end. Per message scanned."""
    return _scanned(server, plan, lambda seconds: True)


def new_filters(server: Server, plan: Plan) -> Figure:
    """Expressions never seen, one after the other, once the columns are there."""
    measure.await_rest(server.pid)
    return _scanned(server, plan, lambda seconds: seconds >= plan.measure_s)


def _scanned(server: Server, plan: Plan, is_over: Callable[[float], bool]) -> Figure:
    begin_s, cpu_s, scanned = time.perf_counter(), measure.exact_cpu_s(server.pid), 0
    while True:
        number = next(FRESH)
        expression = f"level = '{number % frames.LEVELS:02d}' AND level <> 'x{number}'"
        counts = load.drain(server.broker, BACKLOG_TOPIC, expression=expression, kind="SQL92")
        found, expected = (counts.messages, counts.scanned), (plan.backlog // 100, plan.backlog)
        if found != expected:
            raise RuntimeError(f"{found} messages found and scanned instead of {expected}")
        scanned += plan.backlog
        seconds = time.perf_counter() - begin_s
        if is_over(seconds):
            cost = measure.Cost(scanned, seconds, measure.exact_cpu_s(server.pid) - cpu_s)
            return Figure(rate=cost.per_second, cpu_us=cost.cpu_us)


# ---- load that does not count

HEAT_TOPIC, JAVA_TOPIC = "BenchHeat", "BenchJava"
HEAT_MESSAGES = 100_000
ROUNDS_MAX = 6
STILL_BETTER = 0.95


def heat(server: Server, plan: Plan) -> None:
    """Until its compiler is done the JVM costs five times as much, for each kind of load."""
    ring = frames.batch_sends(HEAT_TOPIC, batch=BACKLOG_BATCH, count=40, tagged=True)
    load.create_topic(server.broker, HEAT_TOPIC)
    load.fill(server.broker, ring, HEAT_MESSAGES // BACKLOG_BATCH)
    for run in (
        _sending(f"{HEAT_TOPIC}1", frames.single_sends, 1, 64),
        _sending(f"{HEAT_TOPIC}32", _batches(32), 1, 16),
        _pulling("*", topic=HEAT_TOPIC),
        _pulling("T01", topic=HEAT_TOPIC),
        _pulling("level = '07'", "SQL92", topic=HEAT_TOPIC),
    ):
        _until_warm(run, server, plan)


def heat_client(server: Server, plan: Plan) -> None:
    """The same for the Java client."""

    def run(server: Server, plan: Plan) -> Figure:
        load.create_topic(server.broker, JAVA_TOPIC)
        return _synced(server, plan, 16, server.name_server, server.pid)

    with server.awake():
        _until_warm(run, server, plan)


def _until_warm(run: Run, server: Server, plan: Plan) -> None:
    """Rounds, until one is no cheaper than those before."""
    best_us = float("inf")
    for _ in range(ROUNDS_MAX):
        cost_us = run(server, replace(plan, warm_s=0, measure_s=plan.heat_s)).cpu_us or 0.0
        if cost_us > best_us * STILL_BETTER:
            return
        best_us = cost_us


# ---- with the real Java client


@dataclass
class _Clock:
    """Reads the server's CPU time when the driver says `begin` and `end`."""

    pid: int
    marks: list[tuple[float, float, int]] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if event["event"] in ("begin", "end"):
            self.marks.append((time.perf_counter(), measure.exact_cpu_s(self.pid), event["count"]))

    def cost(self, count: int | None = None) -> measure.Cost:
        (begin_s, begin_cpu_s, begin), (end_s, end_cpu_s, end) = self.marks
        return measure.Cost(
            end - begin if count is None else count, end_s - begin_s, end_cpu_s - begin_cpu_s
        )


def _java_sync(threads: int) -> Run:
    """`of stub`: the rate in percent of what the client reaches right after that against a server
    that only answers."""

    def run(server: Server, plan: Plan) -> Figure:
        load.create_topic(server.broker, JAVA_TOPIC)
        figure = _synced(server, plan, threads, server.name_server, server.pid)
        with _stub() as (address, pid):
            stub = _synced(server, plan, threads, address, pid)
        assert figure.rate
        assert stub.rate
        return replace(figure, more={**figure.more, "of_stub_%": 100 * figure.rate / stub.rate})

    return run


def _synced(server: Server, plan: Plan, threads: int, name_server: str, pid: int) -> Figure:
    assert server.java
    clock = _Clock(pid)
    events = server.java.call(
        "sync",
        ns=name_server,
        topic=JAVA_TOPIC,
        threads=threads,
        warm_s=plan.warm_s,
        measure_s=plan.measure_s,
        on_event=clock,
    )
    errors = next(event["count"] for event in events if event["event"] == "errors")
    return growth.span_figure(clock.cost(), load.Counts(errors=errors))


@contextlib.contextmanager
def _stub() -> Iterator[tuple[str, int]]:
    """Its address and process id."""
    command = [sys.executable, "-m", "benchmarks.stub"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout
            yield running.stdout.readline().strip(), running.pid
        finally:
            running.kill()


def _java_drain(how: Callable[[], dict[str, str]]) -> Run:
    """Scanned messages a second: the Java push consumer drains the backlog through a 1 % filter.

    The best of several: the client's own start-up and compiler are in each, least in the last.
    """

    def run(server: Server, plan: Plan) -> Figure:
        assert server.java
        options: dict[str, Any] = {"ns": server.name_server, "topic": BACKLOG_TOPIC}
        costs = []
        for _ in range(plan.repeats):
            clock = _Clock(server.pid)
            server.java.call(
                "drain",
                expect=plan.backlog // 100,
                timeout_s=90,
                on_event=clock,
                **options,
                **how(),
            )
            costs.append(clock.cost(plan.backlog))
        best = max(costs, key=lambda cost: cost.per_second)
        return Figure(rate=best.per_second, cpu_us=best.cpu_us)

    return run


def java_latency(server: Server, plan: Plan) -> Figure:
    assert server.java
    load.create_topic(server.broker, "BenchJavaLatency")
    options: dict[str, Any] = {"ns": server.name_server, "topic": "BenchJavaLatency", "rate": 1000}
    events = server.java.call("latency", seconds=plan.latency_s, timeout_s=90, **options)
    found = {event["event"]: event["count"] for event in events}
    return Figure(value=found["p99_us"] / 1000, unit="ms", more={"p50_ms": found["p50_us"] / 1000})


# ---- latency, start, memory


def latency(server: Server, plan: Plan) -> Figure:
    load.create_topic(server.broker, "BenchLatency")
    counts = load.latency(server.broker, "BenchLatency", rate=1000, seconds=plan.latency_s + 1)
    steady = counts.latencies_s[1000:]  # the first second warms up
    p50, p99 = (measure.percentile(steady, share) * 1000 for share in (0.5, 0.99))
    return Figure(value=p99, unit="ms", more={"p50_ms": p50})


def ready(server: Server, plan: Plan) -> Figure:
    return Figure(value=server.cluster.ready_s, unit="s")


def start_cpu(server: Server, plan: Plan) -> Figure:
    return Figure(value=server.start_cpu_s, unit="s")


def idle_memory(server: Server, plan: Plan) -> Figure:
    own = {"anonymous_MiB": server.idle_own_mib}
    return Figure(value=server.idle_resident_mib, unit="MiB", more=own)


def memory(server: Server, plan: Plan) -> Figure:
    """Without the pages of mapped files, of which there are as many as the kernel has room for."""
    pids = server.cluster.pids.values()
    resident = {"resident_MiB": sum(map(measure.rss_mib, pids))}
    return Figure(value=sum(map(measure.own_mib, pids)), unit="MiB", more=resident)


KEPT_TOPIC, KEPT_BYTES, KEPT_BATCH = "BenchKept", 1024, 32


def restart(server: Server, plan: Plan) -> Figure:
    """A broker of its own is filled, killed, and started again over what it left, several times:
    the median from the broker's exec to serving. A name server beside it is not counted."""
    with tempfile.TemporaryDirectory(prefix="sluicemq-bench-") as name:
        directory, took, spent = Path(name), [], []
        with server.contender.launch(directory) as cluster:
            load.create_topic(cluster.broker, KEPT_TOPIC)
            ring = frames.batch_sends(
                KEPT_TOPIC, batch=KEPT_BATCH, size_bytes=KEPT_BYTES, count=256
            )
            load.fill(cluster.broker, ring, plan.kept // KEPT_BATCH)
            load.await_messages(cluster.broker, KEPT_TOPIC, plan.kept)
            measure.kill(cluster.pids["broker"])
        for _ in range(plan.repeats):
            with server.contender.launch(directory) as cluster:
                took.append(cluster.broker_ready_s)
                spent.append(measure.exact_cpu_s(cluster.pids["broker"]))
                load.await_messages(cluster.broker, KEPT_TOPIC, plan.kept)
                measure.kill(cluster.pids["broker"])
    more = {"longest_s": max(took), "CPU_s": statistics.median(spent)}
    return Figure(value=statistics.median(took), unit="s", more=more)


def _python_client(only: str) -> Run:
    """Our client beside a broker of its own, both with the engine of the column: CPU of the client.

    A process of its own (`clients.py`): the engine is chosen when it is imported.
    """

    def run(server: Server, plan: Plan) -> Figure:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            options = {
                "--only": f"uvloop: {only}", "--json": file.name,
                "--seconds": str(plan.measure_s), "--backlog": str(plan.pushed),
            }  # fmt: skip
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.clients", *itertools.chain(*options.items())],
                env={**os.environ, **server.contender.environment}, cwd=ROOT, check=False,
                capture_output=True, text=True,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(done.stderr[-800:])
            (found,) = json.loads(Path(file.name).read_text())
        return Figure(
            rate=found["per_second"], cpu_us=found["client_us"],
            more={"server_us": found["server_us"]},
        )  # fmt: skip

    return run


# ---- the rows

FILL = "fill the backlog, batches of 100"
FIRST_FILTER = "first SQL92 filter ever, 1 %: scanned"
FEW_SENDS, FEW_PULLS = "growth: send 1 x 64, few topics", "growth: pulls of 32, few topics"
ONE_SEND = _sending("BenchSend1", frames.single_sends, 1, 64)
ALL_PULLS = _pulling("*")


def _as_few(name: str) -> tuple[Aim, ...]:
    return (Aim(1.3, 1.3, of=name),)


def _at_least(pure: float | None, compiled: float | None) -> Aim:
    return Aim(pure, compiled, "rate", is_minimum=True)


CASES = [
    Case("start: exec to ready", ready, compare="value"),
    Case("start: CPU to ready", start_cpu, (Aim(0.5, 0.5, "value", of=""),), "value"),
    Case("memory: idle", idle_memory, (Aim(60, 60, "value", of=""),), "value"),
    Case("send 128 B, 1 connection x 64", ONE_SEND, (Aim(1 / 3, 1 / 9),)),
    Case(
        "send 128 B, 64 connections x 1",
        _sending("BenchSend64", frames.single_sends, 64, 1),
        (Aim(1 / 3, 1 / 4),),
    ),
    Case(
        "send batches of 32, 1 connection x 16",
        _sending("BenchBatch", _batches(32), 1, 16),
        (Aim(1, 1 / 3), _at_least(None, 2)),
    ),
    Case("send batches of 100, 1 connection x 8", _sending("BenchBatch100", _batches(100), 1, 8)),
    Case(FILL, fill),
    Case(FIRST_FILTER, first_filter, (_at_least(5, 8),), "rate", needs=(FILL,)),
    Case(
        "new SQL92 filters, 1 %, columns complete: scanned",
        new_filters,
        (_at_least(10, 20),),
        "rate",
        needs=(FIRST_FILTER,),
    ),
    Case("memory: after SQL92 filters", memory, compare="value", needs=(FIRST_FILTER,)),
    Case("pull of 32, no filter", ALL_PULLS, (Aim(1 / 2.5, 1 / 4),), needs=(FILL,)),
    Case("pull, tag of 10 %", _pulling("T10"), (Aim(1 / 2, 1 / 4),), needs=(FILL,)),
    Case("pull, tag of 1 %", _pulling("T01"), (Aim(1 / 5, 1 / 10),), needs=(FILL,)),
    Case("pull, SQL92 of 1 %", _pulling("TAGS = 'T01'", "SQL92"), needs=(FILL,)),
    Case("latency at 1,000/s, raw long poll: p99", latency, compare="value"),
    Case(
        "Java client, sync, 16 threads",
        _java_sync(16),
        (Aim(1 / 3, 1 / 4), Aim(None, 85, "of_stub_%", of="", is_minimum=True)),
        needs_java=True,
    ),
    Case(
        "Java push consumer, tag of 1 %: scanned",
        _java_drain(lambda: {"tag": "T01"}),
        (_at_least(3, 5),),
        "rate",
        needs=(FILL,),
        needs_java=True,
    ),
    Case(
        "Java push consumer, SQL92 of 1 %: scanned",
        _java_drain(lambda: {"sql": f"TAGS IN ('T01', 'x{next(FRESH)}')"}),
        (_at_least(10, 20),),
        "rate",
        needs=(FILL,),
        needs_java=True,
    ),
    Case("Java client at 1,000/s, end to end: p99", java_latency, compare="value", needs_java=True),
    Case("memory: at the end", memory, compare="value"),
    Case("growth: one sender, 50/s: p50", growth.lone_sender, compare="value"),
    Case(
        "growth: one sender, 50/s, 200 pulls wait: p50",
        growth.waiting_pulls(growth.SENDS_A_SECOND),
        (Aim(1.6, 1.0, "value", of=""),),
        "value",
    ),
    Case(
        "growth: one sender without a pause, 200 pulls wait: p50",
        growth.waiting_pulls(growth.AS_FAST_AS_IT_CAN),
        compare="value",
    ),
    Case("growth: heartbeats, 500 the same", growth.heartbeats, (Aim(15, 15, of=""),)),
    Case(FEW_SENDS, ONE_SEND),
    Case(FEW_PULLS, ALL_PULLS, needs=(FILL,)),
    Case(
        "growth: send 1 x 64, 5,000 idle connections",
        growth.with_connections(ONE_SEND),
        _as_few(FEW_SENDS),
        needs=(FEW_SENDS,),
    ),
    Case(
        "growth: pulls of 32, 5,000 idle connections",
        growth.with_connections(ALL_PULLS),
        _as_few(FEW_PULLS),
        needs=(FEW_PULLS,),
    ),
    Case(
        "growth: send 1 x 64, 1,000 topics",
        growth.with_topics(1_000, ONE_SEND),
        _as_few(FEW_SENDS),
        needs=(FEW_SENDS,),
    ),
    Case(
        "growth: pulls of 32, 1,000 topics",
        growth.with_topics(1_000, ALL_PULLS),
        _as_few(FEW_PULLS),
        needs=(FEW_PULLS,),
    ),
    Case(
        "growth: send 1 x 64, 10,000 topics",
        growth.with_topics(10_000, ONE_SEND),
        _as_few(FEW_SENDS),
        needs=(FEW_SENDS,),
    ),
    Case(
        "growth: pulls of 32, 10,000 topics",
        growth.with_topics(10_000, ALL_PULLS),
        _as_few(FEW_PULLS),
        needs=(FEW_PULLS,),
    ),
    Case(
        "growth: send 1 x 64 over 10,000 topics",
        growth.with_topics(10_000, growth.spread_sends(10_000)),
    ),
    Case(
        "start after kill -9, 1 KiB messages",
        restart,
        (Aim(1, 0.8, "value", of=""),),
        "value",
    ),
    Case(
        "our Python client: send, 256 in flight",
        _python_client("send"),
        (Aim(22, 12, of=""),),
        servers=OURS,
    ),
    Case(
        "our Python client: push in lists of 32",
        _python_client("push, lists"),
        (Aim(14, 8, of=""),),
        servers=OURS,
    ),
]
