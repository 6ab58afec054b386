"""A name server and a broker as processes of their own: ours (`sluice up`) or the real RocketMQ
5.3.3 or 5.5.0; and the real proxy before them.

All are used through the same attributes: `name_server`, `broker` and, where there is a proxy,
`endpoint` (HOST:PORT), and `pids` for those who measure. Everything they write stays below the
directory given; ports are free ones of this machine.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from peer.toolchain import HERE, jars, tool
from waiting import limit, slowness

SOURCE = HERE.parents[1] / "src"
READY_TIMEOUT_S = 60
STOP_TIMEOUT_S = 60
GET_BROKER_CLUSTER_INFO = 106
PORTS = range(12_000, 32_000)
NOTHING: Mapping[str, str] = {}
CHANCE = random.SystemRandom()  # all processes of a run have the same seed

# What the real servers need on Java 17: the same openings that their own start scripts make.
JAVA_OPENINGS = tuple(
    f"--add-{kind}={module}=ALL-UNNAMED"
    for kind, module in [
        ("opens", "java.base/java.nio"),
        ("opens", "java.base/jdk.internal.misc"),
        ("opens", "java.base/sun.nio.ch"),
        ("opens", "java.base/java.lang"),
        ("exports", "java.base/jdk.internal.ref"),
        ("exports", "java.base/sun.nio.ch"),
    ]
)
# Every second the real broker compares all 37 MiB of its timer wheel with the disk, which takes up
# to a fifth of a core from the tests: in those that do not look at the wheel, more seldom. And it
# refuses sends that a busy machine has left lying for 200 ms.
CALM = {"timerFlushIntervalMs": "10000", "waitTimeMillsInSendQueue": "5000"}
SMALL_HEAP = ("-Xms128m", "-Xmx384m", "-XX:MaxDirectMemorySize=384m", "-XX:+UseSerialGC")
# The servers of a test live for seconds, of which the optimizing compiler would take a third.
QUICK_JVM = (*SMALL_HEAP, "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")


@dataclass(frozen=True)
class Cluster:
    """Where a running cluster is reached; `ready_s`: from exec to serving, `broker_ready_s`: the
    broker alone; `pids` by role."""

    kind: str
    name_server: str
    broker: str
    pids: dict[str, int]
    ready_s: float
    endpoint: str = ""
    broker_ready_s: float = 0.0


@contextlib.contextmanager
def sluice_cluster(
    directory: Path,
    *,
    proxy: bool = False,
    brokers: int = 1,
    environment: Mapping[str, str] = NOTHING,
    **configuration: str,
) -> Iterator[Cluster]:
    """Ours, started as scripts start it: `sluice up --nameserver-port … --broker-port …`. With
    several brokers, which are broker-a, broker-b, ..., `Cluster.broker` is the first one."""
    name_server_port, broker_port, metrics_port = free_ports()
    settings = {
        "metricsPromExporterPort": str(metrics_port),
        "autoCreateTopicEnable": "true",
        **configuration,
    }
    path = write_properties(directory / "broker.conf", settings)
    command = [sys.executable, "-m", "sluicemq", "up", "--nameserver-port", str(name_server_port)]
    command += [
        "--broker-port",
        str(broker_port),
        "--store",
        str(directory / "store"),
        "-c",
        str(path),
        *(["--proxy-port", "0"] if proxy else ["--no-proxy"]),
        *(["--brokers", str(brokers)] if brokers > 1 else []),
    ]
    log, started = directory / "sluice.log", time.monotonic()
    with process(command, log, {"PYTHONPATH": str(SOURCE), **environment}) as running:
        await_line(running, log, "ready nameserver=")
        ready_s = time.monotonic() - started
        pids = {"broker": running.pid}
        found = re.search(r"proxy=(\S+)", log.read_text())
        yield Cluster(
            "sluicemq", f"127.0.0.1:{name_server_port}", f"127.0.0.1:{broker_port}", pids, ready_s,
            found[1] if found else "", ready_s,
        )  # fmt: skip


@contextlib.contextmanager
def rocketmq_cluster(
    directory: Path,
    *,
    release: str = "5.3.3",
    heap: tuple[str, ...] = QUICK_JVM,
    stop: signal.Signals = signal.SIGKILL,
    **configuration: str,
) -> Iterator[Cluster]:
    """The real name server and broker, with the memory of a test and CALM, or with the `heap`
    of a benchmark; `stop` ends the broker."""
    name_server_port, broker_port, _ = free_ports()
    name_server_file = write_properties(
        directory / "namesrv.conf",
        {"listenPort": str(name_server_port), "bindAddress": "127.0.0.1"},
    )
    broker_file = write_properties(
        directory / "broker.conf",
        java_broker_settings(directory, name_server_port, broker_port)
        | (CALM if heap == QUICK_JVM else {})
        | configuration,
    )
    main = "org.apache.rocketmq"
    with contextlib.ExitStack() as stack:
        started = time.monotonic()
        name_server = stack.enter_context(
            java_server(
                directory,
                "namesrv",
                f"{main}.namesrv.NamesrvStartup",
                name_server_file,
                QUICK_JVM,
                release=release,
            )
        )
        await_port(name_server, name_server_port, directory / "namesrv.log")
        broker_started = time.monotonic()
        broker = stack.enter_context(
            java_server(
                directory,
                "broker",
                f"{main}.broker.BrokerStartup",
                broker_file,
                heap,
                release=release,
                stop=stop,
            )
        )
        await_line(broker, directory / "broker.log", "boot success")
        broker_ready_s = time.monotonic() - broker_started
        await_registered(broker, name_server_port, directory / "broker.log")
        ready_s = time.monotonic() - started
        pids = {"broker": broker.pid, "namesrv": name_server.pid}
        yield Cluster(
            "rocketmq", f"127.0.0.1:{name_server_port}", f"127.0.0.1:{broker_port}", pids, ready_s,
            broker_ready_s=broker_ready_s,
        )  # fmt: skip


@contextlib.contextmanager
def java_proxy(directory: Path, cluster: Cluster, release: str = "5.5.0") -> Iterator[Cluster]:
    """The real proxy in cluster mode before a cluster: the same with its endpoint."""
    port, remoting_port, _ = free_ports()
    home = java_home(directory)
    settings = {
        "proxyMode": "CLUSTER", "rocketMQClusterName": "DefaultCluster",
        "namesrvAddr": cluster.name_server, "grpcServerPort": port,
        "remotingListenPort": remoting_port, "useEndpointPortFromRequest": True,
        "transactionHeartbeatPeriodSecond": 1,  # checks come to a producer that brokers know
    }  # fmt: skip
    configuration = home / "conf" / "rmq-proxy.json"
    configuration.write_text(json.dumps(settings))
    (home / "conf" / "rmq.proxy.logback.xml").write_text("<configuration/>")
    main = "org.apache.rocketmq.proxy.ProxyStartup"
    with java_server(
        directory, "proxy", main, configuration, QUICK_JVM, release=release, jars_of="proxy",
        flag="-pc",
    ) as running:  # fmt: skip
        await_line(running, directory / "proxy.log", "startup successfully")
        pids = {**cluster.pids, "proxy": running.pid}
        yield replace(cluster, pids=pids, endpoint=f"127.0.0.1:{port}")


def java_broker_settings(
    directory: Path, name_server_port: int, broker_port: int
) -> dict[str, str]:
    return {
        "brokerClusterName": "DefaultCluster",
        "brokerName": "broker-a",
        "brokerId": "0",
        "brokerRole": "ASYNC_MASTER",
        "flushDiskType": "ASYNC_FLUSH",
        "bindAddress": "127.0.0.1",
        "brokerIP1": "127.0.0.1",
        "brokerIP2": "127.0.0.1",
        "listenPort": str(broker_port),
        "namesrvAddr": f"127.0.0.1:{name_server_port}",
        "autoCreateTopicEnable": "true",
        "enablePropertyFilter": "true",
        "storePathRootDir": str(directory / "store"),
        "storePathCommitLog": str(directory / "store" / "commitlog"),
        "mappedFileSizeCommitLog": str(256 << 20),
        "diskMaxUsedSpaceRatio": "95",
    }


@contextlib.contextmanager
def java_server(
    directory: Path,
    name: str,
    main: str,
    configuration: Path,
    heap: tuple[str, ...],
    *,
    release: str = "5.3.3",
    jars_of: str = "server",
    flag: str = "-c",
    # SIGTERM takes the real broker ten seconds, and as a rule its store is thrown away.
    stop: signal.Signals = signal.SIGKILL,
) -> Iterator[subprocess.Popen[bytes]]:
    home = java_home(directory)
    flags = [*heap, "-Djava.net.preferIPv4Stack=true", f"-Duser.home={directory}", *JAVA_OPENINGS]
    command = [
        tool("java"),
        *flags,
        "-cp",
        f"{jars(f'{jars_of}-{release}')}/*",
        main,
        flag,
        str(configuration),
    ]
    log, environment = directory / f"{name}.log", {"ROCKETMQ_HOME": str(home)}
    with process(command, log, environment, stop) as running:
        yield running


def java_home(directory: Path) -> Path:
    """The ROCKETMQ_HOME of a test. Servers and tools of 4.9 end when the logback files are not
    there."""
    conf = directory / "home" / "conf"
    conf.mkdir(parents=True, exist_ok=True)
    for name in ("namesrv", "broker", "tools"):
        (conf / f"logback_{name}.xml").write_text("<configuration/>")
    return conf.parent


@contextlib.contextmanager
def process(
    command: list[str],
    log: Path,
    environment: Mapping[str, str],
    stop: signal.Signals = signal.SIGTERM,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that never outlives the block: the signal `stop`, then SIGKILL."""
    with log.open("wb") as output:
        running = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
    try:
        yield running
    finally:
        running.send_signal(stop)
        try:
            running.wait(limit(STOP_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def await_line(running: subprocess.Popen[bytes], log: Path, text: str) -> None:
    """Return once the log has a line with `text`."""
    end = time.monotonic() + READY_TIMEOUT_S * slowness()
    while text not in log.read_text(errors="replace"):
        alive_or_raise(running, log, end)
        time.sleep(0.005)


def await_port(running: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + READY_TIMEOUT_S * slowness()
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        alive_or_raise(running, log, end)
        time.sleep(0.02)


def await_registered(running: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return once the name server knows a broker: it may register after it says it has started."""
    end = time.monotonic() + READY_TIMEOUT_S * slowness()
    while b"brokerAddrs" not in ask(port, GET_BROKER_CLUSTER_INFO):
        alive_or_raise(running, log, end)
        time.sleep(0.1)


def ask(port: int, code: int) -> bytes:
    """The answer to a request without fields, as bytes."""
    header = json.dumps({
        "code": code, "flag": 0, "language": "JAVA", "opaque": 1, "version": 479,
        "serializeTypeCurrentRPC": "JSON",
    })  # fmt: skip
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        lengths = struct.pack(">II", len(header) + 4, len(header))
        connection.sendall(lengths + header.encode())
        answer = connection.makefile("rb")
        with answer:
            return answer.read(struct.unpack(">I", answer.read(4))[0])


def alive_or_raise(running: subprocess.Popen[bytes], log: Path, end: float) -> None:
    if running.poll() is not None or time.monotonic() > end:
        state = (
            f"ended with code {running.returncode}"
            if running.poll() is not None
            else "does not get ready"
        )
        raise RuntimeError(f"{log.stem} {state}:\n{log.read_text(errors='replace')[-3000:]}")


def write_properties(path: Path, settings: dict[str, str]) -> Path:
    path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    return path


def free_ports() -> tuple[int, int, int]:
    """Ports of name server, broker (its neighbours -2 and +1 are free too) and metrics. They lie
    below those that connections get: a broker that is started again finds its own still free."""
    for _ in range(50):
        name_server, broker, metrics = CHANCE.sample(PORTS, 3)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in (name_server, broker - 2, broker, broker + 1, metrics):
                stack.enter_context(bound(port))
            return name_server, broker, metrics
    raise RuntimeError("no three free ports with free neighbours")


def bound(port: int) -> socket.socket:
    found = socket.socket()
    try:
        found.bind(("127.0.0.1", port))
    except OSError:
        found.close()
        raise
    return found
