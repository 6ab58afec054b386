"""A real etcd of one member, which a test starts, kills, stops for a while and starts again."""

import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import orjson

from certificates import Certificate
from sluicemq.cli.servers.ports import free_ports
from sluicemq.cli.servers.processes import etcd_command
from waiting import limit

START_S: Final = 20.0


class EtcdProcess:
    """`url` is what `sluiceConsensus` takes. Its data are below `directory`."""

    def __init__(
        self, directory: Path, *, options: Sequence[str] = (),
        certificate: Certificate | None = None, ca: str = "",
    ) -> None:  # fmt: skip
        """`options` go behind those of a trial. With a `certificate` it speaks TLS alone, to those
        that show one of `ca`."""
        self.port, health_port = free_ports(2)
        self.url, self._health_port = f"etcd://127.0.0.1:{self.port}", self.port
        self._data = directory / "etcd"
        self._command = [*etcd_command(directory / "etcd", self.port), *options]
        if certificate is not None:
            self.url, self._health_port = f"etcds://127.0.0.1:{self.port}", health_port
            client = f"https://127.0.0.1:{self.port}"
            self._command += [
                f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
                f"--listen-metrics-urls=http://127.0.0.1:{health_port}", "--client-cert-auth",
                f"--cert-file={certificate.path}", f"--key-file={certificate.key_path}",
                f"--trusted-ca-file={ca}",
            ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it has a leader."""
        self._process = subprocess.Popen(self._command)
        end_s = time.monotonic() + limit(START_S)
        health = f"http://127.0.0.1:{self._health_port}/health"
        while time.monotonic() < end_s:
            try:
                with urllib.request.urlopen(health) as answer:
                    if b'"true"' in answer.read():
                        return
            except OSError:
                pass
            time.sleep(0.05)
        raise TimeoutError(f"etcd does not serve after {START_S} s")

    def ask(self, path: str, **request: object) -> None:
        """One request of the gateway, by nobody in particular."""
        url = f"http://127.0.0.1:{self.port}/v3/{path}"
        urllib.request.urlopen(url, orjson.dumps(request)).close()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def lose_data(self) -> None:
        """It is killed, and starts again without its data."""
        self.kill()
        shutil.rmtree(self._data)
        self.start()

    def pause(self, is_paused: bool) -> None:
        """It keeps its connections and says nothing.

        A signal takes effect a little later, so the method waits until all threads have stopped.
        """
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP if is_paused else signal.SIGCONT)
        threads = Path(f"/proc/{self._process.pid}/task")
        while is_paused and threads.exists() and not all(map(_is_stopped, threads.iterdir())):
            time.sleep(0.001)

    def compact(self) -> None:
        """Forgets all revisions but the last."""
        base = f"http://127.0.0.1:{self.port}/v3/kv"
        with urllib.request.urlopen(f"{base}/range", b'{"key":"YQ=="}') as answer:
            revision = answer.read().split(b'"revision":"')[1].split(b'"')[0]
        request = b'{"revision":"%s"}' % revision
        urllib.request.urlopen(f"{base}/compaction", request).close()


def _is_stopped(thread: Path) -> bool:
    """Whether a thread of a process on Linux is stopped, or has ended."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except OSError:
        return True
