"""A broker process whose disk fails one fsync of the commit log: probes, the exit, the restart."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulation.stepped import send_fields
from sluicemq.net.blocking import BlockingChannel
from sluicemq.wire.frames import Command
from waiting import limit

FAILING = """
import os, sys
real, failing = os.fdatasync, sys.argv[1]
def fdatasync(descriptor):
    if os.path.exists(failing) and "/commitlog/" in os.readlink(f"/proc/self/fd/{descriptor}"):
        raise OSError(5, "Input/output error")
    real(descriptor)
os.fdatasync = fdatasync
sys.argv[:2] = ["sluice"]
from sluicemq.cli import main
main()
"""
CONF = "flushDiskType = SYNC_FLUSH\nmappedFileSizeCommitLog = 1048576\n"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/fd")


class Server:
    """`sluice broker` in a process of its own, whose fsync of the log fails while a file exists."""

    def __init__(self, directory: Path, **environment: str) -> None:
        self.failing = directory / "failing"
        self._log = directory / "log"
        (directory / "broker.conf").write_text(CONF)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", FAILING, str(self.failing), "broker", "--host", "127.0.0.1",
                 "-c", str(directory / "broker.conf"), "--port", "0", "--metrics-port", "0",
                 "--store", str(directory / "store")],
                stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **environment},
            )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.address = line.partition("broker=")[2].partition(" ")[0]
        assert self.address, self.log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def send(self) -> Command:
        channel = BlockingChannel(self.address, 10.0)
        try:
            fields = {name: str(value) for name, value in send_fields().items()}
            return channel.call(Command(310, fields, b"x"))
        finally:
            channel.close()

    def probe(self, path: str) -> tuple[int, str]:
        line = next(line for line in self.log.splitlines() if "/metrics" in line)
        port = line.split("http://", 1)[1].split("/", 1)[0].rpartition(":")[2]
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{port}{path}", timeout=limit(5)
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def end(self) -> int:
        assert self.process.stdout is not None
        self.process.stdout.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit(20))


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def await_metrics(server: Server) -> None:
    deadline = time.monotonic() + limit(20)
    while "/metrics" not in server.log:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)


def test_both_probes_fail_as_soon_as_writes_are_refused_for_good(
    tmp_path: Path, servers: list[Server]
) -> None:
    server = Server(tmp_path)
    servers.append(server)
    await_metrics(server)
    assert server.send().code == 0
    assert (server.probe("/health")[0], server.probe("/ready")[0]) == (200, 200)
    server.failing.touch()
    assert server.send().code != 0
    for path in ("/health", "/ready"):
        status, text = server.probe(path)
        assert status == 503
        assert "the store refuses all writes until the broker is restarted" in text
    assert "sluicemq_store_failed" in server.probe("/metrics")[1]
    server.failing.unlink()
    assert server.send().code != 0, "what was not synced may be gone: only a restart finds out"
    assert server.process.poll() is None, "without a supervisor it stays and serves readers"
    server.end()


def test_under_a_supervisor_the_process_ends_and_a_restart_serves(
    tmp_path: Path, servers: list[Server]
) -> None:
    server = Server(tmp_path, SLUICE_SUPERVISED="1")
    servers.append(server)
    assert server.send().code == 0
    server.failing.touch()
    assert server.send().code != 0
    assert server.process.wait(limit(20)) == 1
    assert "The store refuses all writes" in server.log
    assert "exitOnFatalStoreError" in server.log
    server.end()
    server.failing.unlink()
    again = Server(tmp_path, SLUICE_SUPERVISED="1")
    servers.append(again)
    assert again.send().code == 0
    assert again.end() == 0
