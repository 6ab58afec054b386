"""Who is measured: our broker with the pure and with the compiled engine, Java's, and Rust's.

Each is started by the same call, over an empty directory or one that it has left. A server that is
not being measured rests: Java's brokers are stopped (SIGSTOP), the others have nothing to do.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [*(str(ROOT / name) for name in ("tests/compatibility", "tests/lib", "src"))]

from peer import clusters, drivers, toolchain  # noqa: E402

from benchmarks import measure  # noqa: E402

# The heap of the real broker's own figures (1 GiB to 2 GiB); what a user would give it on a small
# machine.
REAL_HEAP = ("-Xms1g", "-Xmx2g", "-XX:MaxDirectMemorySize=1g", "-XX:+UseG1GC")
CLIENT_HEAP = ("-Xms256m", "-Xmx1g", "-XX:+UseG1GC")
# Two commit log files of the default size, as in production; a message that has waited 200 ms on a
# busy machine is not refused.
JAVA_SETTINGS = {"mappedFileSizeCommitLog": str(1 << 30), "waitTimeMillsInSendQueue": "30000"}
RELEASES = ("5.5.0", "5.3.3")
CRATES, CRATES_VERSION = ("rocketmq-namesrv", "rocketmq-broker"), "1.0.0"
WAKE_TIMEOUT_S = 60


@dataclass(frozen=True)
class Plan:
    """How long and how much: the full run, or the quick one."""

    heat_s: float  # one round
    warm_s: float
    measure_s: float
    backlog: int
    latency_s: int
    repeats: int  # of drains and of starts after a kill
    kept: int  # messages of 1 KiB in the store that is killed
    pushed: int  # messages that our client receives


FULL = Plan(4, 1.5, 4, backlog=1_000_000, latency_s=10, repeats=3, kept=1_000_000, pushed=300_000)
QUICK = Plan(1, 0.3, 0.7, backlog=400_000, latency_s=2, repeats=2, kept=100_000, pushed=60_000)

Launch = Callable[[Path], contextlib.AbstractContextManager[clusters.Cluster]]


@dataclass(frozen=True)
class Contender:
    """A column: its first word is `pure`, `compiled`, `Java` or `Rust`."""

    name: str
    launch: Launch
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.name.partition(" ")[0]


@dataclass
class Server:
    """A contender that runs, as the cases see it."""

    contender: Contender
    cluster: clusters.Cluster
    java: drivers.Driver | None
    start_cpu_s: float
    idle_own_mib: float = 0.0
    idle_resident_mib: float = 0.0
    topics: int = 0  # made for the growth cases so far

    @property
    def broker(self) -> str:
        return self.cluster.broker

    @property
    def name_server(self) -> str:
        return self.cluster.name_server

    @property
    def pid(self) -> int:
        return self.cluster.pids["broker"]

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """While it is measured."""
        self._resume()
        try:
            yield
        finally:
            self.rest()

    def rest(self) -> None:
        if self.contender.kind == "Java":
            os.kill(self.pid, signal.SIGSTOP)

    def _resume(self) -> None:
        """Its name server, which did not rest, forgets a broker after two minutes."""
        os.kill(self.pid, signal.SIGCONT)
        port, end = int(self.name_server.rpartition(":")[2]), time.monotonic() + WAKE_TIMEOUT_S
        while b"brokerAddrs" not in clusters.ask(port, clusters.GET_BROKER_CLUSTER_INFO):
            if time.monotonic() > end:
                raise RuntimeError(f"{self.contender.name} is not registered any more")
            time.sleep(0.05)


# ---- which


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--java", default=RELEASES[0],
        help="releases of the Java broker beside ours: 5.5.0, 5.3.3 or 5.5.0,5.3.3",
    )  # fmt: skip
    parser.add_argument(
        "--no-java", action="store_true", help="leave the other brokers and the Java client out"
    )
    parser.add_argument(
        "--rust", action="store_true",
        help="install the Rust broker first (cargo, twenty minutes); it is used when it is there",
    )  # fmt: skip


def chosen(options: argparse.Namespace) -> list[Contender]:
    """All that can run here; a sentence is printed for each that cannot."""
    found = ours()
    if options.no_java:
        return found
    for release in filter(None, options.java.split(",")):
        try:
            toolchain.jars(f"server-{release}")
            found.append(java(release))
        except toolchain.MissingTool as missing:
            print(f"without Java {release}: {missing}")
    try:
        if options.rust:
            install_rust()
        found.append(rust())
    except toolchain.MissingTool as missing:
        print(f"without Rust: {missing}")
    return found


def ours() -> list[Contender]:
    """The pure engine, and the compiled one where it is built."""
    found = [sluice("pure", {"SLUICE_PURE": "1"})]
    try:
        from sluicemq import engine

        if engine.NAME == "compiled":
            return [*found, sluice("compiled", {})]
    except ImportError:
        pass
    print("without `compiled`: the engine is not built (make native)")
    return found


def sluice(name: str, environment: Mapping[str, str]) -> Contender:
    return Contender(
        name,
        lambda directory: clusters.sluice_cluster(directory, environment=environment),
        environment,
    )


def java(release: str, **settings: str) -> Contender:
    return Contender(
        f"Java {release}",
        lambda directory: clusters.rocketmq_cluster(
            directory, release=release, heap=REAL_HEAP, **JAVA_SETTINGS, **settings
        ),
    )


def java_client(scratch: Path, stack: contextlib.ExitStack) -> drivers.Driver | None:
    """The load driver around the unmodified Java client, or None with the reason printed."""
    source = ROOT / "benchmarks" / "java" / "Load.java"
    try:
        driver = drivers.java_driver("client-5.3.3", scratch, source=source, flags=CLIENT_HEAP)
    except toolchain.MissingTool as missing:
        print(f"without the Java client: {missing}")
        return None
    stack.callback(driver.close)
    return driver


def started(
    contender: Contender,
    directory: Path,
    java_driver: drivers.Driver | None,
    stack: contextlib.ExitStack,
) -> Server:
    directory.mkdir(parents=True)
    if contender.kind in ("pure", "compiled"):
        # Once before it counts: the first start of a fresh checkout writes the byte code of every
        # module.
        (directory / "first").mkdir()
        with contender.launch(directory / "first"):
            pass
    cluster = stack.enter_context(contender.launch(directory))
    cpu_s = sum(map(measure.exact_cpu_s, cluster.pids.values()))
    return Server(contender, cluster, java_driver, cpu_s)


# ---- Rust


def rust_directory() -> Path:
    return toolchain.cache_directory() / "rust"


def install_rust() -> None:
    """`cargo install`, unless it is there: it compiles for some twenty minutes."""
    binaries = [rust_directory() / "bin" / f"{crate}-rust" for crate in CRATES]
    if all(binary.exists() for binary in binaries):
        return
    command = [toolchain.tool("cargo"), "install", "--locked", "--root", str(rust_directory())]
    with toolchain.locked(toolchain.cache_directory() / "rust.lock"):
        print(
            f"installing {' and '.join(CRATES)} {CRATES_VERSION}: some twenty minutes", flush=True
        )
        if subprocess.run([*command, "--version", CRATES_VERSION, *CRATES], check=False).returncode:
            raise toolchain.MissingTool("cargo install failed")


def rust() -> Contender:
    for crate in CRATES:
        if shutil.which(f"{crate}-rust", path=rust_directory() / "bin") is None:
            raise toolchain.MissingTool(
                f"{crate} {CRATES_VERSION} is not installed: make bench-rust (needs cargo)"
            )
    return Contender(f"Rust {CRATES_VERSION}", rust_cluster)


@contextlib.contextmanager
def rust_cluster(directory: Path) -> Iterator[clusters.Cluster]:
    """Name server and broker on free ports, with their defaults and SQL92."""
    name_server_port, broker_port, _ = clusters.free_ports()
    name_server = f"127.0.0.1:{name_server_port}"
    configuration = directory / "broker.toml"
    configuration.write_text(f"""\
[broker]
namesrvAddr = "{name_server}"
brokerIp1 = "127.0.0.1"
listenPort = {broker_port}
storePathRootDir = "{directory}/store"
enablePropertyFilter = true

[broker.brokerServerConfig]
bindAddress = "127.0.0.1"

[broker.brokerIdentity]
brokerName = "broker-a"
brokerClusterName = "DefaultCluster"
brokerId = 0

[store]
storeType = "LocalFile"
brokerRole = "ASYNC_MASTER"
storePathRootDir = "{directory}/store"
haListenAddress = "127.0.0.1"
haListenPort = {broker_port + 1}
""")
    home = clusters.java_home(directory)
    environment = {
        "ROCKETMQ_HOME": str(home), "HOME": str(directory),
        "ROCKETMQ_SECURITY_PROFILE": "development-insecure-loopback",
    }  # fmt: skip
    binaries = rust_directory() / "bin"
    names = [str(binaries / "rocketmq-namesrv-rust"), "--bindAddress", "127.0.0.1", "--listenPort"]
    broker = [str(binaries / "rocketmq-broker-rust"), "-c", str(configuration), "-n", name_server]
    logs = [directory / "namesrv.log", directory / "broker.log"]
    with contextlib.ExitStack() as stack:
        begin_s = time.monotonic()
        command = [*names, str(name_server_port)]
        first = stack.enter_context(clusters.process(command, logs[0], environment, signal.SIGKILL))
        clusters.await_port(first, name_server_port, logs[0])
        broker_s = time.monotonic()
        second = stack.enter_context(clusters.process(broker, logs[1], environment, signal.SIGKILL))
        clusters.await_port(second, broker_port, logs[1])
        now_s = time.monotonic()
        clusters.await_registered(second, name_server_port, logs[1])
        pids = {"broker": second.pid, "namesrv": first.pid}
        address = f"127.0.0.1:{broker_port}"
        yield clusters.Cluster(
            "rust", name_server, address, pids, now_s - begin_s, broker_ready_s=now_s - broker_s
        )
