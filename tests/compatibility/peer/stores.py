"""One store directory that brokers of both kinds open in turn, beside a real name server.

A `House` has a name server that stays, and one address where a broker lives: ours or the real one,
one after the other, with the same name, port and settings. What they write stays in `house.store`.
"""

import contextlib
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from peer.clusters import (
    CALM,
    QUICK_JVM,
    SOURCE,
    await_line,
    await_port,
    await_registered,
    free_ports,
    java_broker_settings,
    java_home,
    java_server,
    process,
    write_properties,
)
from peer.drivers import JVM_FLAGS, Driver, java_driver
from peer.toolchain import HERE
from waiting import wait_for

PERSIST_WAIT_S = 40
"""The real broker writes its tables by timers, of which the slowest fires every ten seconds."""
MAIN = "org.apache.rocketmq"
NORMAL, KILL = signal.SIGTERM, signal.SIGKILL

# Small files, so that there are many; the offsets of consumers on disk before a kill.
SMALL_FILES = {
    "mappedFileSizeCommitLog": "65536",
    "mappedFileSizeConsumeQueue": "2000",
    "maxMessageSize": "32768",
    "maxHashSlotNum": "500",
    "maxIndexNum": "2000",
    "flushConsumerOffsetInterval": "300",
    "metricsPromExporterPort": "0",
}


@dataclass
class House:
    """A place for brokers of a release of RocketMQ, and for ours. Made by `house`."""

    directory: Path
    release: str
    name_server_port: int
    broker_port: int
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def store(self) -> Path:
        return self.directory / "store"

    @property
    def name_server(self) -> str:
        return f"127.0.0.1:{self.name_server_port}"

    @property
    def broker(self) -> str:
        return f"127.0.0.1:{self.broker_port}"

    def _configuration(self, **more: str) -> Path:
        settings = java_broker_settings(self.directory, self.name_server_port, self.broker_port)
        return write_properties(
            self.directory / "broker.conf", settings | SMALL_FILES | more | self.settings
        )

    @contextlib.contextmanager
    def java(self, stop: signal.Signals) -> Iterator[None]:
        """The real broker runs; it ends by `stop`."""
        log = self.directory / "broker.log"
        with java_server(
            self.directory, "broker", f"{MAIN}.broker.BrokerStartup",
            self._configuration(**CALM), QUICK_JVM, release=self.release, stop=stop,
        ) as running:  # fmt: skip
            await_line(running, log, "boot success")
            await_registered(running, self.name_server_port, log)
            yield

    @contextlib.contextmanager
    def sluice(self, stop: signal.Signals) -> Iterator[None]:
        """Our broker runs; it ends by `stop`."""
        log = self.directory / "sluice.log"
        command = [sys.executable, "-m", "sluicemq", "broker", "-c", str(self._configuration())]
        with process(command, log, {"PYTHONPATH": str(SOURCE)}, stop) as running:
            await_line(running, log, "ready")
            await_registered(running, self.name_server_port, log)
            yield


@contextlib.contextmanager
def house(directory: Path, release: str, **settings: str) -> Iterator[House]:
    """A house with a name server of `release`; `settings` are for both kinds of broker."""
    name_server_port, broker_port, _ = free_ports()
    configuration = write_properties(
        directory / "namesrv.conf",
        {"listenPort": str(name_server_port), "bindAddress": "127.0.0.1"},
    )
    with java_server(
        directory, "namesrv", f"{MAIN}.namesrv.NamesrvStartup", configuration, QUICK_JVM,
        release=release,
    ) as running:  # fmt: skip
        await_port(running, name_server_port, directory / "namesrv.log")
        yield House(directory, release, name_server_port, broker_port, settings)


def auditor(directory: Path, release: str) -> Driver:
    """The client and the tools of a release, see java/Auditor.java."""
    flags = (*JVM_FLAGS, f"-Drocketmq.home.dir={java_home(directory)}")
    source = HERE / "java" / "Auditor.java"
    return java_driver(f"server-{release}", directory, source=source, flags=flags)


def await_text(path: Path, pattern: str) -> None:
    """Return once a table on disk has what the pattern finds."""

    def is_there() -> bool:
        with contextlib.suppress(FileNotFoundError):  # there is none while one replaces another
            return re.search(pattern, path.read_text()) is not None
        return False

    wait_for(is_there, PERSIST_WAIT_S)
