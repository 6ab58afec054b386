"""`make bench-store`: what the store costs, beside the real one: starting after a kill, SYNC_FLUSH
with many senders, memory with a large store.

    python -m benchmarks.stores [--only restart,sync,large] [--messages N] [--gigabytes N]
                                [--no-java]

restart   N messages of 1 KiB are sent one by one, the broker is killed with SIGKILL and started
          again over what it left: from exec to serving, three times, the median
sync      flushDiskType=SYNC_FLUSH, 64 connections with one message of 128 B in flight each
large     only when asked for: ours is filled with N gigabytes, then its anonymous memory is read
          while running, after a kill and a start, and after pulls all over the store
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import frames, load, measure
from benchmarks.contenders import REAL_HEAP  # finds the compatibility tests' helpers too

from peer import clusters, toolchain  # isort: skip

TOPIC = "BenchStore"
RESTARTS = 3
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
    @contextlib.contextmanager
    def start() -> Iterator[Running]:
        with clusters.sluice_cluster(directory, **settings) as cluster:
            yield Running(cluster.broker, cluster.pids["broker"], cluster.ready_s)

    return start


def theirs(directory: Path, name_server_port: int, **settings: str) -> Start:
    """The broker alone: its name server runs all the time."""
    _, broker_port, _ = clusters.free_ports()
    defaults = clusters.java_broker_settings(directory, name_server_port, broker_port)
    defaults["mappedFileSizeCommitLog"] = str(1 << 30)  # as in production
    path = clusters.write_properties(directory / "broker.conf", {**defaults, **settings})

    @contextlib.contextmanager
    def start() -> Iterator[Running]:
        started = time.monotonic()
        main = "org.apache.rocketmq.broker.BrokerStartup"
        with clusters.java_server(directory, "broker", main, path, REAL_HEAP) as process:
            clusters.await_line(process, directory / "broker.log", "boot success")
            ready_s = time.monotonic() - started
            clusters.await_registered(process, name_server_port, directory / "broker.log")
            yield Running(f"127.0.0.1:{broker_port}", process.pid, ready_s)

    return start


@contextlib.contextmanager
def name_server(directory: Path) -> Iterator[int]:
    port, _, _ = clusters.free_ports()
    settings = {"listenPort": str(port), "bindAddress": "127.0.0.1"}
    path = clusters.write_properties(directory / "namesrv.conf", settings)
    main = "org.apache.rocketmq.namesrv.NamesrvStartup"
    with clusters.java_server(directory, "namesrv", main, path, clusters.SMALL_HEAP) as process:
        clusters.await_port(process, port, directory / "namesrv.log")
        yield port


def restart(start: Start, messages: int) -> str:
    """Fill, kill, and see how long it takes to serve again."""
    with start() as broker:
        load.create_topic(broker.address, TOPIC)
        load.send(
            broker.address,
            frames.single_sends(TOPIC, size_bytes=BODY_BYTES, count=4096),
            connections=1,
            window=64,
            until=lambda counts: counts.messages >= messages,
        )
        measure.kill(broker.pid)
    took = []
    for _ in range(RESTARTS):
        with start() as broker:
            took.append(broker.ready_s)
            measure.kill(broker.pid)
    return f"{statistics.median(took):.2f} s (of {', '.join(f'{one:.2f}' for one in took)})"


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
    parser.add_argument("--only", default="restart,sync", help="restart, sync, large")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--no-java", action="store_true")
    options = parser.parse_args()
    cases: dict[str, tuple[Callable[[Start], str], dict[str, str]]] = {
        "restart": (lambda start: restart(start, options.messages), {}),
        "sync": (sync, {"flushDiskType": "SYNC_FLUSH"}),
        "large": (lambda start: large(start, options.gigabytes), {}),
    }
    for name, (run, settings) in cases.items():
        if name in options.only:
            with tempfile.TemporaryDirectory(prefix="sluicemq-bench-") as directory:
                print(
                    f"{name:8} SluiceMQ        {run(ours(Path(directory), **settings))}", flush=True
                )
            if name != "large" and not options.no_java:
                print(f"{name:8} RocketMQ 5.3.3  {real(run, settings)}", flush=True)
    return 0


def real(run: Callable[[Start], str], settings: dict[str, str]) -> str:
    try:
        toolchain.jars("server-5.3.3")
    except toolchain.MissingTool as missing:
        return f"not there: {missing}"
    with tempfile.TemporaryDirectory(prefix="sluicemq-bench-") as scratch:
        directory = Path(scratch)
        with name_server(directory) as port:
            return run(theirs(directory, port, **settings))


if __name__ == "__main__":
    sys.exit(main())
