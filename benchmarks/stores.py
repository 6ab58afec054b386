"""`make bench-store`: what the store costs, beside the real one: SYNC_FLUSH with many senders,
memory with a large store. (Starting after a kill is a row of `make bench`.)

    python -m benchmarks.stores [--only sync,large] [--gigabytes N] [--java 5.5.0] [--no-java]

sync      flushDiskType=SYNC_FLUSH, 64 connections with one message of 128 B in flight each
large     only when asked for: ours is filled with N gigabytes, then its anonymous memory is read
          while running, after a kill and a start, and after pulls all over the store
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import contenders, frames, load, measure

from peer import clusters, toolchain  # isort: skip  (contenders finds them)

TOPIC = "BenchStore"
SYNC_SENDERS = 64
BODY_BYTES = 1024
LARGE_BATCH = 100


@dataclass
class Running:
    """A broker that serves."""

    address: str
    pid: int
    ready_s: float


Start = Callable[[], contextlib.AbstractContextManager[Running]]


def ours(directory: Path, **settings: str) -> Start:
    return lambda: _running(clusters.sluice_cluster(directory, **settings))


@contextlib.contextmanager
def _running(launch: contextlib.AbstractContextManager[clusters.Cluster]) -> Iterator[Running]:
    with launch as cluster:
        yield Running(cluster.broker, cluster.pids["broker"], cluster.ready_s)


def sync(start: Start, measure_s: float = 6) -> str:
    with start() as broker:
        load.create_topic(broker.address, TOPIC)
        span = measure.Span(broker.pid, 6, measure_s)
        load.send(
            broker.address,
            frames.single_sends(TOPIC),
            connections=SYNC_SENDERS,
            window=1,
            until=lambda counts: span.over(counts.messages),
        )
    return f"{span.cost.per_second:,.0f}/s [{span.cost.cpu_us:.2f} us]"


def large(start: Start, gigabytes: float) -> str:
    size = 8 * BODY_BYTES
    with start() as broker:
        load.create_topic(broker.address, TOPIC)
        load.send(
            broker.address,
            frames.batch_sends(TOPIC, batch=LARGE_BATCH, size_bytes=size, count=16, tagged=True),
            connections=1,
            window=2,
            until=lambda counts: counts.messages * size >= gigabytes * (1 << 30),
        )
        filled = measure.own_mib(broker.pid)
        measure.kill(broker.pid)
    with start() as broker:
        started = measure.own_mib(broker.pid)
        end = time.monotonic() + 10
        load.pull(broker.address, TOPIC, expression="T10", until=lambda _: time.monotonic() > end)
        pulled = measure.own_mib(broker.pid)
        return (
            f"anonymous memory {filled:.0f} MiB when filled, {started:.0f} MiB after a kill and a"
            f" start of {broker.ready_s:.2f} s, {pulled:.0f} MiB after pulls"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stores")
    parser.add_argument("--only", default="sync", help="sync, large")
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--java", default=contenders.RELEASES[0], help="5.5.0 or 5.3.3")
    parser.add_argument("--no-java", action="store_true")
    options = parser.parse_args()
    flushed = {"flushDiskType": "SYNC_FLUSH"}
    if "sync" in options.only:
        with tempfile.TemporaryDirectory(prefix="sluicemq-bench-") as directory:
            print(f"sync   SluiceMQ    {sync(ours(Path(directory), **flushed))}", flush=True)
        if not options.no_java:
            print(f"sync   Java {options.java}  {real(options.java, flushed)}", flush=True)
    if "large" in options.only:
        with tempfile.TemporaryDirectory(prefix="sluicemq-bench-") as directory:
            print(f"large  SluiceMQ    {large(ours(Path(directory)), options.gigabytes)}")
    return 0


def real(release: str, settings: dict[str, str]) -> str:
    try:
        toolchain.jars(f"server-{release}")
    except toolchain.MissingTool as missing:
        return f"not there: {missing}"
    with tempfile.TemporaryDirectory(prefix="sluicemq-bench-") as scratch:
        broker = contenders.java(release, **settings)
        return sync(lambda: _running(broker.launch(Path(scratch))))


if __name__ == "__main__":
    sys.exit(main())
