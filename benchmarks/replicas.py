"""`make bench-replicas`: a master and its slave beside the real pair.

    python -m benchmarks.replicas [--quick] [--no-java] [--json FILE]

SYNC_MASTER with inSyncReplicas=2 and one SLAVE, ASYNC_FLUSH, each broker a process. A message costs
what both processes take; the name server is not counted. `lag` is how long after it was sent a
consumer that reads from the slave of an ASYNC_MASTER has a message, at a steady rate.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import frames, load, measure
from benchmarks.contenders import REAL_HEAP, ROOT  # finds the compatibility tests' helpers

from peer import clusters  # isort: skip

TOPIC = "BenchReplicas"
RELEASE = "5.5.0"
LAG_RATE = 20_000
ROLES = {
    "sync": {"brokerRole": "SYNC_MASTER", "inSyncReplicas": "2"},
    "async": {"brokerRole": "ASYNC_MASTER"},
}
SLAVE = {"brokerRole": "SLAVE", "brokerId": "1", "slaveReadEnable": "true"}
REACH_S = 90


@dataclass(frozen=True)
class Pair:
    """Addresses and processes of a master and its slave."""

    name: str
    master: str
    slave: str
    pids: tuple[int, int]

    def cpu_s(self) -> float:
        return sum(map(measure.exact_cpu_s, self.pids))


@contextlib.contextmanager
def broker(kind: str, directory: Path, port: int, name_server: int, **own: str) -> Iterator[int]:
    """One broker as a process; its pid."""
    directory.mkdir(parents=True)
    settings = clusters.java_broker_settings(directory, name_server, port)
    settings |= {
        "mappedFileSizeCommitLog": str(1 << 30), "metricsExporterType": "DISABLE",
        "haListenPort": str(port + 1), **own,
    }  # fmt: skip
    path = clusters.write_properties(directory / "broker.conf", settings)
    log = directory / "broker.log"
    if kind == "ours":
        command = [sys.executable, "-m", "sluicemq", "broker", "-c", str(path)]
        with clusters.process(command, log, {"PYTHONPATH": str(ROOT / "src")}) as running:
            clusters.await_line(running, log, "ready ")
            yield running.pid
        return
    main = "org.apache.rocketmq.broker.BrokerStartup"
    with clusters.java_server(
        directory, "broker", main, path, REAL_HEAP, release=RELEASE
    ) as running:
        clusters.await_line(running, log, "boot success")
        yield running.pid


@contextlib.contextmanager
def pair(kind: str, directory: Path, role: str) -> Iterator[Pair]:
    """A name server, a master and a slave that has followed to the end."""
    directory.mkdir()
    name_server, master, _ = clusters.free_ports()
    _, slave, _ = clusters.free_ports()
    settings = {"listenPort": str(name_server), "bindAddress": "127.0.0.1"}
    path = clusters.write_properties(directory / "namesrv.conf", settings)
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(
            clusters.java_server(
                directory, "namesrv", "org.apache.rocketmq.namesrv.NamesrvStartup", path,
                clusters.SMALL_HEAP, release=RELEASE,
            )
            if kind == "theirs"
            else clusters.process(
                [sys.executable, "-m", "sluicemq", "nameserver", "-c", str(path)],
                directory / "namesrv.log", {"PYTHONPATH": str(ROOT / "src")},
            )
        )  # fmt: skip
        clusters.await_port(names, name_server, directory / "namesrv.log")
        pids = (
            stack.enter_context(
                broker(kind, directory / "master", master, name_server, **ROLES[role])
            ),
            stack.enter_context(broker(kind, directory / "slave", slave, name_server, **SLAVE)),
        )
        name = "SluiceMQ" if kind == "ours" else f"RocketMQ {RELEASE}"
        found = Pair(name, f"127.0.0.1:{master}", f"127.0.0.1:{slave}", pids)
        load.create_topic(found.master, TOPIC)
        reach(found)
        yield found


def reach(found: Pair) -> None:
    """Return once the slave hands out what the master was sent."""
    end = time.monotonic() + REACH_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError, AssertionError):
            counts = load.latency(
                found.master, TOPIC, rate=20, seconds=2, receiver_address=found.slave
            )
            if counts.messages:
                return
        time.sleep(1)
    raise RuntimeError(f"the slave of {found.name} hands out nothing")


def cost(found: Pair, ring: frames.Ring, connections: int, window: int, spans: tuple[float, float]
         ) -> measure.Cost:  # fmt: skip
    """What a message costs the pair."""
    warm_s, measure_s = spans
    begin_at = time.perf_counter() + warm_s
    marks: list[tuple[float, float, int]] = []

    def over(counts: load.Counts) -> bool:
        now = time.perf_counter()
        if not marks and now >= begin_at:
            marks.append((now, found.cpu_s(), counts.messages))
        if marks and now >= begin_at + measure_s:
            marks.append((now, found.cpu_s(), counts.messages))
            return True
        return False

    counts = load.send(found.master, ring, connections=connections, window=window, until=over)
    if counts.errors:
        print(f"  {found.name}: {counts.errors} sends refused", file=sys.stderr)
    (began, cpu, first), (ended, cpu_end, last) = marks
    return measure.Cost(last - first, ended - began, cpu_end - cpu)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas")
    parser.add_argument("--quick", action="store_true", help="short spans")
    parser.add_argument("--no-java", action="store_true", help="ours alone")
    parser.add_argument("--json", help="write the figures to this file as well")
    options = parser.parse_args()
    spans = (6.0, 4.0) if options.quick else (20.0, 10.0)
    cases = {
        "1 x 64": (frames.single_sends(TOPIC), 1, 64),
        "64 x 1": (frames.single_sends(TOPIC), 64, 1),
        "batch 32": (frames.batch_sends(TOPIC, batch=32), 1, 8),
    }
    rows: dict[str, dict[str, float]] = {name: {} for name in (*cases, "lag p99 (ms)")}
    with tempfile.TemporaryDirectory(prefix="sluicemq-bench-") as scratch:
        for kind in ("ours",) if options.no_java else ("ours", "theirs"):
            with pair(kind, Path(scratch) / f"{kind}-sync", "sync") as found:
                for name, (ring, connections, window) in cases.items():
                    spent = cost(found, ring, connections, window, spans)
                    rows[name][found.name] = spent.cpu_us
                    print(
                        f"{name:10} {found.name:16} {spent.per_second:9,.0f}/s"
                        f" [{spent.cpu_us:6.1f} us]  load {os.getloadavg()[0]:.1f}", flush=True,
                    )  # fmt: skip
            with pair(kind, Path(scratch) / f"{kind}-async", "async") as found:
                counts = load.latency(
                    found.master, TOPIC, rate=LAG_RATE, seconds=sum(spans),
                    receiver_address=found.slave,
                )  # fmt: skip
                late = [one * 1000 for one in counts.latencies_s[len(counts.latencies_s) // 3 :]]
                p50, p99 = measure.percentile(late, 0.5), measure.percentile(late, 0.99)
                rows["lag p99 (ms)"][found.name] = p99
                print(
                    f"{'lag':10} {found.name:16} p50 {p50:.1f} ms, p99 {p99:.1f} ms at"
                    f" {counts.messages / sum(spans):,.0f}/s", flush=True,
                )  # fmt: skip
    print()
    for name, figures in rows.items():
        if len(figures) == 2:
            mine, real = figures.values()
            print(f"{name:12} {mine / real:.2f} of the real pair's")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
