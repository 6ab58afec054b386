"""What our Python client costs: sends and push deliveries a second, and CPU time a message.

    python -m benchmarks.clients [--seconds 5] [--backlog 300000] [--json FILE]
                                 [--official DIRECTORY] [--only WORD]

One process of ours beside the broker, 128 B messages. The client's CPU time is that of this
process, all threads; the broker's is read from /proc. Rates need two idle cores, CPU time does not.

With --official the official client for Python that can be installed does the same: DIRECTORY is
what `pip install --target DIRECTORY rocketmq-python-client==5.1.2` has filled. It speaks gRPC, so
it talks to the real broker 5.3.3 with its proxy (official_client.py). The older official client,
rocketmq-client-python 2.0.0, is a shell over librocketmq, a C++ library that no package index has.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [*(str(ROOT / name) for name in ("tests/compatibility", "tests/lib", "src"))]

import uvloop  # noqa: E402
from peer import clusters, toolchain  # noqa: E402

from benchmarks import frames, load, measure  # noqa: E402
from sluicemq import Sluice  # noqa: E402
from sluicemq.client.aio.received import ReceivedMessage  # noqa: E402

BODY = b"x" * 128
SEND_TOPIC, PUSH_TOPIC = "BenchClientSend", "BenchClientPush"
OFFICIAL_TOPIC = "BenchOfficial"
IN_FLIGHT = 256
WARM_S = 1.0
BATCH = 100
DRAIN_TIMEOUT_S = 120
PROXY_TIMEOUT_S = 60
PROXY_SETTLE_S = 3


@dataclass(frozen=True)
class Figure:
    """A rate, and CPU time a message of the client and of the server processes."""

    name: str
    per_second: float
    client_us: float
    server_us: float

    def __str__(self) -> str:
        return (
            f"{self.name:44} {self.per_second:>9,.0f}/s   client {self.client_us:6.1f} us   "
            f"server {self.server_us:6.1f} us"
        )


@dataclass
class Meter:
    """Rate and CPU time between `start` and `stop`."""

    server_pid: int
    _at: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def start(self) -> None:
        self._at = (time.perf_counter(), time.process_time(), measure.cpu_s(self.server_pid))

    def stop(self, name: str, count: int) -> Figure:
        wall, cpu, server = self._at
        seconds = time.perf_counter() - wall
        return Figure(
            name,
            count / seconds,
            (time.process_time() - cpu) / count * 1e6,
            (measure.cpu_s(self.server_pid) - server) / count * 1e6,
        )


def main() -> int:
    options = arguments()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"load {os.getloadavg()[0]:.1f}, {len(BODY)} B messages\n")  # fmt: skip
    figures = ours(options)
    if options.official:
        figures += official(options)
    if options.json:
        Path(options.json).write_text(
            json.dumps([figure.__dict__ for figure in figures], indent=2) + "\n"
        )
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.clients", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each case sends")
    parser.add_argument("--backlog", type=int, default=300_000, help="messages to be received")
    parser.add_argument("--official", default="", help="where rocketmq-python-client is installed")
    parser.add_argument("--only", default="", help="only the cases whose name has this in it")
    parser.add_argument("--json", default="", help="write the figures to this file as well")
    return parser.parse_args()


# ---- ours


def ours(options: argparse.Namespace) -> list[Figure]:
    """Our client beside our broker, on both event loops."""
    figures = []
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="sluicemq-bench-"))
        cluster = stack.enter_context(clusters.sluice_cluster(Path(scratch)))
        for topic in (SEND_TOPIC, PUSH_TOPIC):
            load.create_topic(cluster.broker, topic)
        fill(cluster.broker, options.backlog)
        for loop_name, factory in (("asyncio", None), ("uvloop", uvloop.new_event_loop)):
            for name, case in CASES.items():
                whole_name = f"SluiceMQ, {loop_name}: {name}"
                if options.only not in whole_name:
                    continue
                with asyncio.Runner(loop_factory=factory) as runner:
                    figure = runner.run(case(cluster, options, whole_name))
                print(figure, flush=True)
                figures.append(figure)
    return figures


def fill(broker: str, count: int) -> None:
    ring = frames.batch_sends(PUSH_TOPIC, batch=BATCH, count=40, tagged=False)
    load.send(broker, ring, connections=1, window=8, until=lambda now: now.messages >= count)


async def send(cluster: clusters.Cluster, options: argparse.Namespace, name: str) -> Figure:
    """Tasks that each wait for the answer before they send again: 256 sends are under way."""
    meter, sent = Meter(cluster.pids["broker"]), 0
    end = time.perf_counter() + WARM_S + options.seconds

    async with Sluice(cluster.name_server) as mq:
        await mq.send(SEND_TOPIC, BODY)

        async def work() -> None:
            nonlocal sent
            while time.perf_counter() < end:
                await mq.send(SEND_TOPIC, BODY)
                sent += 1

        workers = [asyncio.create_task(work()) for _ in range(IN_FLIGHT)]
        await asyncio.sleep(WARM_S)
        meter.start()
        before = sent
        await asyncio.gather(*workers)
        return meter.stop(name, sent - before)


async def push(cluster: clusters.Cluster, options: argparse.Namespace, name: str) -> Figure:
    """A handler that only counts drains the backlog, as a new group."""

    async def drain(received: Callable[[int], None], mq: Sluice, group: str) -> None:
        async def handle(message: ReceivedMessage) -> None:
            received(1)

        await mq.consumer(group, handler=handle).subscribe(PUSH_TOPIC).start()

    return await drained(cluster, options.backlog, name, drain)


async def push_lists(cluster: clusters.Cluster, options: argparse.Namespace, name: str) -> Figure:
    """The handler gets lists of up to 32 messages."""

    async def drain(received: Callable[[int], None], mq: Sluice, group: str) -> None:
        async def handle(messages: list[ReceivedMessage]) -> None:
            received(len(messages))

        consumer = mq.consumer(group, handler=handle, batch_max=32)
        await consumer.subscribe(PUSH_TOPIC).start()

    return await drained(cluster, options.backlog, name, drain)


async def drained(
    cluster: clusters.Cluster,
    backlog: int,
    name: str,
    drain: Callable[[Callable[[int], None], Sluice, str], Awaitable[None]],
) -> Figure:
    """The figure from the first message to the last."""
    meter, complete, count = Meter(cluster.pids["broker"]), asyncio.Event(), 0
    figure: Figure | None = None

    def received(more: int) -> None:
        nonlocal count, figure
        if not count:
            meter.start()
        count += more
        if count >= backlog and figure is None:
            figure = meter.stop(name, count)
            complete.set()

    async with Sluice(cluster.name_server) as mq:
        await drain(received, mq, f"drain-{time.monotonic_ns()}")
        await asyncio.wait_for(complete.wait(), DRAIN_TIMEOUT_S)
    assert figure is not None
    return figure


CASES = {
    f"send, {IN_FLIGHT} in flight": send,
    "push, single messages": push,
    "push, lists of up to 32": push_lists,
}


# ---- the official gRPC client


def official(options: argparse.Namespace) -> list[Figure]:
    """The official client beside the real broker and proxy; [] with the reason printed."""
    with contextlib.ExitStack() as stack:
        try:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            # A send that waits 200 ms is refused by default: too short for 256 on two cores.
            real = clusters.rocketmq_cluster(
                scratch, waitTimeMillsInSendQueue="5000", timerFlushIntervalMs="1000"
            )
            cluster = stack.enter_context(real)
            load.create_topic(cluster.broker, OFFICIAL_TOPIC)
            endpoint, proxy_pid = stack.enter_context(proxy(scratch, cluster.name_server))
            command = [sys.executable, str(ROOT / "benchmarks" / "official_client.py"), endpoint]
            command += [str(options.seconds), str(options.backlog // 20)]
            command += [str(cluster.pids["broker"]), str(proxy_pid)]
            path = os.pathsep.join([options.official, str(ROOT)])
            done = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": path, "HOME": str(scratch)},
                capture_output=True, text=True, timeout=DRAIN_TIMEOUT_S * 2, check=True,
            )  # fmt: skip
        except (toolchain.MissingTool, RuntimeError, subprocess.SubprocessError) as error:
            tail = str(getattr(error, "stderr", "") or error)[-800:]
            print(f"without the official client: {type(error).__name__}: {tail}")
            return []
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    figures = [Figure(**json.loads(line)) for line in lines]
    for figure in figures:
        print(figure)
    return figures


@contextlib.contextmanager
def proxy(directory: Path, name_server: str):  # type: ignore[no-untyped-def]
    """The real proxy in cluster mode: its gRPC endpoint and process id."""
    grpc_port, remoting_port, _ = clusters.free_ports()
    home = clusters.java_home(directory)
    settings = {
        "proxyMode": "CLUSTER", "rocketMQClusterName": "DefaultCluster",
        "namesrvAddr": name_server, "grpcServerPort": grpc_port,
        "remotingListenPort": remoting_port, "useEndpointPortFromRequest": True,
    }  # fmt: skip
    (home / "conf" / "rmq-proxy.json").write_text(json.dumps(settings))
    (home / "conf" / "rmq.proxy.logback.xml").write_text("<configuration/>")
    command = [toolchain.tool("java"), *clusters.SMALL_HEAP, f"-Duser.home={directory}"]
    command += [*clusters.JAVA_OPENINGS, "-cp", f"{toolchain.jars('proxy-5.3.3')}/*"]
    command += ["org.apache.rocketmq.proxy.ProxyStartup"]
    command += ["-pc", str(home / "conf" / "rmq-proxy.json")]
    log = directory / "proxy.log"
    with clusters.process(command, log, {"ROCKETMQ_HOME": str(home)}) as running:
        clusters.await_port(running, grpc_port, log)
        time.sleep(PROXY_SETTLE_S)
        yield f"127.0.0.1:{grpc_port}", running.pid


if __name__ == "__main__":
    sys.exit(main())
