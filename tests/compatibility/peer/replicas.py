"""Brokers of one name, master and slaves of either kind, beside a name server of ours.

with Replicas(directory) as replicas:
    master = replicas.start("java-5.5.0", "SYNC_MASTER")
    slave = replicas.start("sluicemq", "SLAVE", 1)
    replicas.kill(slave)

The log of each is read from its files: what is the same byte for byte needs no decoder.
"""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from peer.clusters import (
    CALM,
    QUICK_JVM,
    SOURCE,
    await_line,
    await_registered,
    free_ports,
    java_broker_settings,
    java_server,
    process,
    write_properties,
)
from peer.stores import SMALL_FILES
from waiting import slowness

OURS = "sluicemq"
FILE_BYTES = int(SMALL_FILES["mappedFileSizeCommitLog"])
WAIT_S = 60


@dataclass
class Replica:
    """One that runs, or has been killed and can be started again: its port and files stay."""

    kind: str
    role: str
    broker_id: int
    directory: Path
    port: int
    running: subprocess.Popen[bytes]
    block: contextlib.ExitStack

    @property
    def store(self) -> Path:
        return self.directory / "store"

    def log(self) -> dict[int, bytes]:
        """The files of its commit log, by where they begin; without those that hold zeros alone,
        which are made ahead of need."""
        files = {int(path.name): path.read_bytes() for path in (self.store / "commitlog").iterdir()}
        return {base: data for base, data in sorted(files.items()) if any(data)}

    def queues(self) -> dict[str, bytes]:
        """The units of its consume queues from their first one in use on, by topic and queue."""
        found: dict[str, bytes] = {}
        root = self.store / "consumequeue"
        for directory in sorted(path for path in root.glob("*/*") if path.is_dir()):
            data = b"".join(path.read_bytes() for path in sorted(directory.iterdir()))
            units = [data[at : at + 20] for at in range(0, len(data), 20)]
            found[str(directory.relative_to(root))] = b"".join(
                unit for unit in units if int.from_bytes(unit[8:12]) and any(unit[:8] + unit[12:])
            )
        return found


class Replicas:
    """The name server and who has been started. Everything ends with the block."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self._directory = directory
        self._settings = settings
        self._stack = contextlib.ExitStack()
        self.name_server_port = free_ports()[0]

    @property
    def name_server(self) -> str:
        return f"127.0.0.1:{self.name_server_port}"

    def __enter__(self) -> "Replicas":
        log = self._directory / "nameserver.log"
        command = [
            sys.executable, "-m", "sluicemq", "nameserver", "--host", "127.0.0.1", "--port",
            str(self.name_server_port),
        ]  # fmt: skip
        running = self._stack.enter_context(process(command, log, {"PYTHONPATH": str(SOURCE)}))
        await_line(running, log, "ready")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def start(self, kind: str, role: str, broker_id: int = 0) -> Replica:
        """`kind`: OURS, or java- and a release."""
        directory = self._directory / f"{broker_id}-{kind}"
        directory.mkdir()
        port = free_ports()[1]
        return self._run(kind, role, broker_id, directory, port)

    def again(self, replica: Replica) -> Replica:
        """The same that was killed."""
        return self._run(
            replica.kind, replica.role, replica.broker_id, replica.directory, replica.port
        )

    def kill(self, replica: Replica) -> None:
        """As kill -9 does."""
        replica.running.send_signal(signal.SIGKILL)
        replica.running.wait()
        replica.block.close()

    def _run(self, kind: str, role: str, broker_id: int, directory: Path, port: int) -> Replica:
        settings = (
            java_broker_settings(directory, self.name_server_port, port)
            | SMALL_FILES
            | ({} if kind == OURS else CALM)
            | {"brokerRole": role, "brokerId": str(broker_id), "registerNameServerPeriod": "10000",
               "haListenPort": str(port + 1)}
            | self._settings
        )  # fmt: skip
        path, log = write_properties(directory / "broker.conf", settings), directory / "broker.log"
        block = self._stack.enter_context(contextlib.ExitStack())
        if kind == OURS:
            command = [sys.executable, "-m", "sluicemq", "broker", "-c", str(path)]
            environment = {"PYTHONPATH": str(SOURCE)}
            running = block.enter_context(process(command, log, environment, signal.SIGKILL))
            await_line(running, log, "ready")
        else:
            main = "org.apache.rocketmq.broker.BrokerStartup"
            release = kind.removeprefix("java-")
            running = block.enter_context(
                java_server(directory, "broker", main, path, QUICK_JVM, release=release)
            )
            await_line(running, log, "boot success")
            if role != "SLAVE":
                await_registered(running, self.name_server_port, log)
        return Replica(kind, role, broker_id, directory, port, running, block)


def until(condition: Callable[[], bool], wait_s: float = WAIT_S) -> bool:
    """Whether it comes true in time."""
    end_s = time.monotonic() + wait_s * slowness()
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True
