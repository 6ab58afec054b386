"""Proxy and broker together beside the real ones: what a message costs by the official gRPC client.

    python -m benchmarks.proxies [--quick] [--tls] [--no-java] [--json FILE]

The official client for Java sends single messages (one thread with 64 under way, 64 threads that
wait), and receives lists of up to 32 and acknowledges each, from a backlog that was sent over
remoting. Ours is `sluice up`, the real one the proxy of RocketMQ 5.5.0 with the broker inside
(`-pm local`). The figure is the CPU time of the server's process a message, beside the rate.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import frames, load, measure
from benchmarks.contenders import (
    CLIENT_HEAP,
    REAL_HEAP,
    ROOT,
)  # finds the compatibility tests' helpers

from peer import clusters, drivers, toolchain  # isort: skip

TOPIC, BACKLOG, GROUP = "BenchCalls", "BenchCallsBacklog", "bench-calls"
RELEASE = "5.5.0"
AIM = 0.7


@dataclass(frozen=True)
class Pair:
    """A proxy and a broker: where they are reached, and the process that they are."""

    name: str
    broker: str
    endpoint: str
    pid: int


@contextlib.contextmanager
def ours(directory: Path) -> Iterator[Pair]:
    """`sluice up`."""
    _, broker_port, _ = clusters.free_ports()
    path = clusters.write_properties(
        directory / "broker.conf",
        {"autoCreateTopicEnable": "true", "metricsExporterType": "DISABLE"},
    )
    command = [
        sys.executable, "-m", "sluicemq", "up", "--nameserver-port", "0", "--broker-port",
        str(broker_port), "--proxy-port", "0", "--store", str(directory / "store"), "-c", str(path),
    ]  # fmt: skip
    log = directory / "sluice.log"
    with clusters.process(command, log, {"PYTHONPATH": str(ROOT / "src")}) as running:
        clusters.await_line(running, log, "ready ")
        found = re.search(r" proxy=(\S+)", log.read_text())
        assert found, log.read_text()
        yield Pair("SluiceMQ", f"127.0.0.1:{broker_port}", found[1], running.pid)


@contextlib.contextmanager
def theirs(directory: Path) -> Iterator[Pair]:
    """The real proxy with its broker inside, and a name server beside them that is not counted."""
    name_server_port, broker_port, port = clusters.free_ports()
    remoting_port, _, _ = clusters.free_ports()
    home = clusters.java_home(directory)
    (home / "conf" / "rmq.proxy.logback.xml").write_text("<configuration/>")
    name_server_file = clusters.write_properties(
        directory / "namesrv.conf",
        {"listenPort": str(name_server_port), "bindAddress": "127.0.0.1"},
    )
    settings = clusters.java_broker_settings(directory, name_server_port, broker_port)
    broker_file = clusters.write_properties(
        directory / "broker.conf", settings | {"mappedFileSizeCommitLog": str(1 << 30)}
    )
    proxy_file = home / "conf" / "rmq-proxy.json"
    proxy_file.write_text(json.dumps({
        "proxyMode": "LOCAL", "rocketMQClusterName": "DefaultCluster", "grpcServerPort": port,
        "remotingListenPort": remoting_port, "namesrvAddr": f"127.0.0.1:{name_server_port}",
    }))  # fmt: skip
    command = [
        toolchain.tool("java"), *REAL_HEAP, "-Djava.net.preferIPv4Stack=true",
        f"-Duser.home={directory}", *clusters.JAVA_OPENINGS, "-cp",
        f"{toolchain.jars(f'proxy-{RELEASE}')}/*", "org.apache.rocketmq.proxy.ProxyStartup",
        "-n", f"127.0.0.1:{name_server_port}", "-pm", "local", "-bc", str(broker_file),
        "-pc", str(proxy_file),
    ]  # fmt: skip
    main = "org.apache.rocketmq.namesrv.NamesrvStartup"
    log = directory / "proxy.log"
    with (
        clusters.java_server(
            directory, "namesrv", main, name_server_file, clusters.SMALL_HEAP, release=RELEASE
        ) as name_server,
        clusters.process(command, log, {"ROCKETMQ_HOME": str(home)}) as running,
    ):
        clusters.await_port(name_server, name_server_port, directory / "namesrv.log")
        clusters.await_port(running, port, log)
        clusters.await_registered(running, name_server_port, log)
        yield Pair(
            f"RocketMQ {RELEASE}", f"127.0.0.1:{broker_port}", f"127.0.0.1:{port}", running.pid
        )


def prepare(pair: Pair, backlog: int) -> None:
    """Topics, the group, and the messages that are received."""
    for topic in (TOPIC, BACKLOG):
        load.create_topic(pair.broker, topic)
    with contextlib.closing(load.Connection(pair.broker)) as connection:
        config = {"groupName": GROUP, "consumeEnable": True, "retryQueueNums": 1}
        connection.call(frames.frame(200, {}, 1, json.dumps(config).encode()))
    load.send(
        pair.broker, frames.single_sends(BACKLOG), connections=1, window=64,
        until=lambda counts: counts.messages >= backlog,
    )  # fmt: skip


def measured(pair: Pair, java: drivers.Driver, word: str, **options: object) -> measure.Cost:
    """What a command of Calls.java costs the pair, between its `begin` and its `end`."""
    marks: list[tuple[float, int]] = []

    def on_event(event: drivers.Event) -> None:
        if event["event"] in ("begin", "end"):
            marks.append((measure.exact_cpu_s(pair.pid), event["count"]))
        elif event["event"] == "errors" and event["count"]:
            print(f"  {word} on {pair.name}: {event['count']} errors", file=sys.stderr)

    java.call(word, on_event=on_event, ep=pair.endpoint, timeout_s=120, **options)
    (begin_s, first), (end_s, last) = marks
    return measure.Cost(last - first, float(str(options["measure_s"])), end_s - begin_s)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proxies")
    parser.add_argument("--quick", action="store_true", help="short spans")
    parser.add_argument("--tls", action="store_true", help="as the clients come by default")
    parser.add_argument("--no-java", action="store_true", help="ours alone")
    parser.add_argument("--json", help="write the figures to this file as well")
    options = parser.parse_args()
    heat_s, measure_s = (8, 4) if options.quick else (30, 10)
    cases: dict[str, tuple[str, dict[str, object]]] = {
        "send, 64 under way": ("send", {"topic": TOPIC, "threads": 1, "window": 64}),
        "send, 64 threads": ("send", {"topic": TOPIC, "threads": 64}),
        "receive 32 + ack": ("receive", {"topic": BACKLOG, "group": GROUP, "threads": 8}),
    }
    rows: dict[str, dict[str, measure.Cost]] = {name: {} for name in cases}
    with (
        tempfile.TemporaryDirectory(prefix="sluicemq-bench-") as scratch,
        contextlib.ExitStack() as stack,
    ):
        base = Path(scratch)
        java = drivers.java_driver(
            "official-5.2.0", base, source=ROOT / "benchmarks/java/Calls.java", flags=CLIENT_HEAP
        )
        stack.callback(java.close)
        for start in (ours,) if options.no_java else (ours, theirs):
            directory = base / start.__name__
            directory.mkdir()
            with start(directory) as pair:
                prepare(pair, 150_000 if options.quick else 600_000)
                for name, (word, given) in cases.items():
                    cost = measured(
                        pair, java, word, warm_s=heat_s, measure_s=measure_s,
                        ssl=int(options.tls), **given,
                    )  # fmt: skip
                    rows[name][pair.name] = cost
                    print(
                        f"{name:20} {pair.name:16} {cost.per_second:9,.0f}/s"
                        f" [{cost.cpu_us:7.1f} us]  load {os.getloadavg()[0]:.1f}",
                        flush=True,
                    )
    print()
    for name, costs in rows.items():
        if len(costs) == 2:
            mine, real = costs.values()
            print(f"{name:20} {mine.cpu_us / real.cpu_us:.2f} of its CPU (aim: {AIM})")
    if options.json:
        found = {name: {whose: cost.cpu_us for whose, cost in costs.items()}
                 for name, costs in rows.items()}  # fmt: skip
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
