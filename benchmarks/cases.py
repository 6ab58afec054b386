"""The cases of `make bench`: what is measured, how, and what we mean to reach.

Every case runs on our broker and on the real one in the same run, one after the other, with the
same frames or the same Java client. A case gives one `Figure` per server; `ratio` says how ours
compares with theirs.
"""

import enum
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from peer.drivers import Driver, Event

from benchmarks import frames, load, measure


@dataclass(frozen=True)
class Plan:
    """How long and how much: the full run, or the quick one."""

    heat_s: float
    warm_s: float
    measure_s: float
    backlog: int
    latency_s: int
    drains: int


FULL = Plan(heat_s=20, warm_s=4, measure_s=6, backlog=1_000_000, latency_s=15, drains=3)
QUICK = Plan(heat_s=5, warm_s=1, measure_s=2, backlog=200_000, latency_s=3, drains=2)


@dataclass
class Server:
    """A running broker as the cases see it."""

    name: str
    name_server: str
    broker: str
    pid: int
    memory_pids: tuple[int, ...]
    ready_s: float
    java: Driver | None
    idle_rss_mib: float = 0.0


@dataclass(frozen=True)
class Figure:
    """A rate a second and the server's CPU time for each, or another number with its unit."""

    rate: float | None = None
    cpu_us: float | None = None
    value: float | None = None
    unit: str = ""
    note: str = ""

    def __str__(self) -> str:
        if self.value is not None:
            return f"{self.value:,.1f} {self.unit}{self.note}"
        cpu = "" if self.cpu_us is None else f" [{self.cpu_us:.2f} us]"
        return f"{self.rate:,.0f}/s{cpu}{self.note}"


class Compare(enum.Enum):
    """Which number of the two figures is set against the target."""

    CPU = "of its CPU"
    RATE = "x its rate"
    VALUE = "of its"


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[Server, Plan], Figure]
    compare: Compare = Compare.CPU
    target: str = ""
    needs_java: bool = False
    needs_backlog: bool = False

    def ratio(self, ours: Figure, theirs: Figure | None) -> str:
        if theirs is None:
            return ""
        pick = {Compare.CPU: "cpu_us", Compare.RATE: "rate", Compare.VALUE: "value"}[self.compare]
        first, second = getattr(ours, pick), getattr(theirs, pick)
        return f"{first / second:.2f} {self.compare.value}" if first is not None and second else ""


# ---- sends


def _sending(
    topic: str, make: Callable[[str], frames.Ring], connections: int, window: int
) -> Callable[[Server, Plan], Figure]:
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
        return _figure(span.cost, counts)

    return run


def heat(server: Server, plan: Plan) -> None:
    """Sends that do not count: until its compiler is done the JVM costs five times as much."""
    longer = replace(plan, warm_s=0, measure_s=plan.heat_s)
    _sending("BenchHeat", frames.single_sends, 1, 64)(server, longer)


def _figure(cost: measure.Cost, counts: load.Counts) -> Figure:
    note = f" ({counts.errors} errors)" if counts.errors else ""
    return Figure(rate=cost.per_second, cpu_us=cost.cpu_us, note=note)


# ---- pulls over a backlog with 10 % T10 and 1 % T01

BACKLOG_TOPIC = "BenchBacklog"
BACKLOG_BATCH = 100


def fill(server: Server, plan: Plan) -> Figure:
    load.create_topic(server.broker, BACKLOG_TOPIC)
    ring = frames.batch_sends(BACKLOG_TOPIC, batch=BACKLOG_BATCH, count=40, tagged=True)
    counts = load.Counts()

    def work() -> int:
        nonlocal counts
        counts = load.send(
            server.broker,
            ring,
            connections=1,
            window=8,
            until=lambda now: now.messages >= plan.backlog,
        )
        return counts.messages

    return _figure(measure.timed(server.pid, work), counts)


def _pulling(expression: str, kind: str = "TAG") -> Callable[[Server, Plan], Figure]:
    def run(server: Server, plan: Plan) -> Figure:
        span = measure.Span(server.pid, min(plan.warm_s, 2), plan.measure_s)
        counts = load.pull(
            server.broker,
            BACKLOG_TOPIC,
            expression=expression,
            kind=kind,
            until=lambda counts: span.over(counts.messages),
        )
        return _figure(span.cost, counts)

    return run


# ---- with the real Java client


@dataclass
class _Clock:
    """Reads the server's CPU time when the driver says `begin` and `end`."""

    pid: int
    marks: list[tuple[float, float, int]] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if event["event"] in ("begin", "end"):
            self.marks.append((time.perf_counter(), measure.cpu_s(self.pid), event["count"]))

    def cost(self, count: int | None = None) -> measure.Cost:
        (begin_s, begin_cpu_s, begin), (end_s, end_cpu_s, end) = self.marks
        return measure.Cost(
            end - begin if count is None else count, end_s - begin_s, end_cpu_s - begin_cpu_s
        )


def heat_client(servers: Iterable[Server], plan: Plan) -> None:
    """The same for the Java client, with each of the servers in turn."""
    for server in servers:
        _java_sync(16)(server, replace(plan, warm_s=0, measure_s=plan.heat_s / 2))


def _java_sync(threads: int) -> Callable[[Server, Plan], Figure]:
    def run(server: Server, plan: Plan) -> Figure:
        assert server.java
        load.create_topic(server.broker, "BenchJava")
        clock = _Clock(server.pid)
        events = server.java.call(
            "sync",
            ns=server.name_server,
            topic="BenchJava",
            threads=threads,
            warm_s=plan.warm_s,
            measure_s=plan.measure_s,
            on_event=clock,
        )
        cost = clock.cost()
        errors = next(event["count"] for event in events if event["event"] == "errors")
        return Figure(
            rate=cost.per_second, cpu_us=cost.cpu_us, note=f" ({errors} errors)" if errors else ""
        )

    return run


def _java_drain(**how: str) -> Callable[[Server, Plan], Figure]:
    """Scanned messages a second: the Java push consumer drains the backlog through a 1 % filter.

    The best of several: the client's own start-up and compiler are in each, least in the last.
    """

    def run(server: Server, plan: Plan) -> Figure:
        assert server.java
        options: dict[str, Any] = {"ns": server.name_server, "topic": BACKLOG_TOPIC, **how}
        costs = []
        for _ in range(plan.drains):
            clock = _Clock(server.pid)
            server.java.call(
                "drain", expect=plan.backlog // 100, timeout_s=90, on_event=clock, **options
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
    note = f" (p50 {found['p50_us'] / 1000:.1f})"
    return Figure(value=found["p99_us"] / 1000, unit="ms", note=note)


# ---- latency, start, memory


def latency(server: Server, plan: Plan) -> Figure:
    load.create_topic(server.broker, "BenchLatency")
    counts = load.latency(server.broker, "BenchLatency", rate=1000, seconds=plan.latency_s + 1)
    steady = counts.latencies_s[1000:]  # the first second warms up
    note = f" (p50 {measure.percentile(steady, 0.5) * 1000:.1f})"
    return Figure(value=measure.percentile(steady, 0.99) * 1000, unit="ms", note=note)


def ready(server: Server, plan: Plan) -> Figure:
    return Figure(value=server.ready_s, unit="s")


def idle_memory(server: Server, plan: Plan) -> Figure:
    return Figure(value=server.idle_rss_mib, unit="MiB")


def memory(server: Server, plan: Plan) -> Figure:
    return Figure(value=sum(map(measure.rss_mib, server.memory_pids)), unit="MiB")


def memory_at_end(server: Server, plan: Plan) -> Figure:
    """Without the pages of mapped files, of which there are as many as the kernel has room for."""
    own = sum(map(measure.own_mib, server.memory_pids))
    return Figure(value=own, unit="MiB", note=" own")


def memory_after_sql(server: Server, plan: Plan) -> Figure:
    """Memory once the first SQL92 consumer has pulled."""
    load.create_topic(server.broker, "BenchSql")
    ring = frames.single_sends("BenchSql", count=8)
    load.send(
        server.broker, ring, connections=1, window=4, until=lambda counts: counts.messages >= 8
    )
    pulled = []

    def once(counts: load.Counts) -> bool:
        pulled.append(1)
        return len(pulled) > 3

    load.pull(
        server.broker, "BenchSql", expression="a > 1 OR WAIT = 'true'", kind="SQL92", until=once
    )
    return memory(server, plan)


CASES = [
    Case("start: exec to ready", ready, Compare.VALUE, "< 0.5 s"),
    Case("memory: idle", idle_memory, Compare.VALUE, "< 120 MiB"),
    Case("memory: after the first SQL92 pull", memory_after_sql, Compare.VALUE, "< 200 MiB"),
    Case(
        "send 128 B, 1 connection x 64",
        _sending("BenchSend1", frames.single_sends, 1, 64),
        target="<= 0.40",
    ),
    Case(
        "send 128 B, 64 connections x 1",
        _sending("BenchSend64", frames.single_sends, 64, 1),
        target="<= 0.67",
    ),
    Case(
        "send batches of 32, 1 connection x 16",
        _sending("BenchBatch", lambda topic: frames.batch_sends(topic, batch=32), 1, 16),
    ),
    Case("fill the backlog, batches of 100", fill),
    Case("pull, no filter", _pulling("*"), target="<= 0.50", needs_backlog=True),
    Case("pull, tag of 10 %", _pulling("T10"), needs_backlog=True),
    Case("pull, tag of 1 %", _pulling("T01"), needs_backlog=True),
    Case("pull, SQL92 of 1 %", _pulling("TAGS = 'T01'", "SQL92"), needs_backlog=True),
    Case("latency at 1,000/s, raw long poll: p99", latency, Compare.VALUE, "< 5 ms"),
    Case("Java client, sync, 16 threads", _java_sync(16), Compare.RATE, ">= 2", needs_java=True),
    Case(
        "Java push consumer, tag of 1 %: scanned",
        _java_drain(tag="T01"),
        Compare.RATE,
        ">= 2",
        needs_java=True,
        needs_backlog=True,
    ),
    Case(
        "Java push consumer, SQL92 of 1 %: scanned",
        _java_drain(sql="TAGS IN ('T01', 'none') AND TAGS <> 'none'"),
        Compare.RATE,
        ">= 10",
        needs_java=True,
        needs_backlog=True,
    ),
    Case(
        "Java client at 1,000/s, end to end: p99",
        java_latency,
        Compare.VALUE,
        "< 5 ms",
        needs_java=True,
    ),
    Case("memory: at the end", memory_at_end, Compare.VALUE),
]


def wanted(only: str) -> list[Case]:
    """The cases with `only` in their name, and the filling of the backlog where one needs it."""
    named = [case for case in CASES if only in case.name]
    needs_fill = any(case.needs_backlog for case in named)
    return [case for case in CASES if case in named or (needs_fill and case.run is fill)]
