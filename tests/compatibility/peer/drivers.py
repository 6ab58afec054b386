"""Driver processes: a command a line on stdin, JSON lines on stdout until `done` or `failed`.

The Java, the Go and the Python driver understand the same words, so one suite runs over all of
them:

    send   ns topic mode=sync|async|oneway|batch count tags prefix size
           keyed=N: the queue of message i by the hash of key-(i modulo N); pause_ms: a rest after
           each (sync)
    push   ns topic group tag|sql model=clustering|broadcasting instances expect timeout_s
           with `count` (and what `send` takes) it produces once the consumers are balanced;
           orderly=1; fail=N: the first N deliveries of each message fail, and come again after
           `level` (or at once, in order) at most `max` times; distinct=1: a message that comes
           again does not count for `expect`
    lite   ns topic group tag|sql mode=subscribe|assign expect timeout_s
    transact  ns topic group count outcomes checks expect timeout_s: message i in a transaction
           that ends as the i-th of `outcomes` says (commit, rollback, unknown); waits for `expect`
           checks, which are answered by the i-th of `checks`; mute=1 (Java): beside a producer of
           the group that answers none
    admin  ns words                                                         (mqadmin)

Events are {"event": "sent", "body": ...} for each message produced, {"event": "got", ...} for each
consumed, {"event": "checked", ...} for each check of a transaction, {"event": "printed", "text":
...} for mqadmin.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from peer.toolchain import HERE, go_driver, java_classes, tool
from waiting import limit, slowness

JVM_FLAGS = ("-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
# The periodic rebalance of the 5.3 client is every 20 s; a missed notice must not cost a test that
# long.
JAVA_PROPERTIES = (
    "-Drocketmq.client.rebalance.waitInterval=1000",
    "-Drocketmq.client.logLevel=WARN",
)
SPARE_S = 15

Event = dict[str, Any]


class DriverFailedError(Exception):
    """The driver answered `failed`, or died."""


class Driver:
    """One driver process. Commands are answered one after the other."""

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(environment or {})},
                cwd=log.parent,  # mqadmin writes what it learns where it stands
                text=True,
                encoding="utf-8",
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def call(
        self, command: str, *, on_event: Callable[[Event], None] | None = None, **options: object
    ) -> list[Event]:
        """All events of the command but the last; raises DriverFailedError when that is not `done`.

        `on_event` sees each event as it comes: the benchmarks read the server's CPU time there.
        """
        assert self._process.stdin is not None
        # The driver's own clients are as slow as the machine is; what comes early ends the wait.
        stretched = slowness()
        if "timeout_s" in options:
            options["timeout_s"] = round(float(str(options["timeout_s"])) * stretched)
        words = [
            f"{key}={quote(str(value), safe='')}"
            for key, value in options.items()
            if value is not None
        ]
        self._process.stdin.write(" ".join([command, *words]) + "\n")
        self._process.stdin.flush()
        timeout_s = float(str(options.get("timeout_s", 30 * stretched))) + SPARE_S * stretched
        events: list[Event] = []
        is_answered = False
        try:
            while not is_answered:
                event = self._next(timeout_s)
                is_answered = event["event"] in ("done", "failed")
                if event["event"] == "failed":
                    raise DriverFailedError(f"{command} {options}: {event['error']}")
                if not is_answered:
                    events.append(event)
                    if on_event:
                        on_event(event)
        finally:
            if not is_answered:  # the next command would take the rest for its own
                self.kill()
        return events

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """At once; the command that runs fails."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(limit(5))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(limit(5))
        self._process.stdout.close()

    def _next(self, timeout_s: float) -> Event:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise DriverFailedError(f"no answer within {timeout_s:.0f} s{self._tail()}") from None
        if line is None:
            raise DriverFailedError(
                f"the driver ended with code {self._process.wait()}{self._tail()}"
            )
        event: Event = json.loads(line)
        return event

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put(None)

    def _tail(self) -> str:
        return f"\n{self._log}:\n{self._log.read_text(errors='replace')[-3000:]}"


def java_driver(
    name: str,
    directory: Path,
    *,
    source: Path = HERE / "java" / "Driver.java",
    flags: Sequence[str] = JVM_FLAGS,
) -> Driver:
    """The Java driver over the jars of java/NAME.xml; its home (and log folder) is `directory`."""
    classes = java_classes(name, [source])
    home = f"-Duser.home={directory}"
    command = [tool("java"), *flags, *JAVA_PROPERTIES, home, "-cp", classes, source.stem]
    return Driver(command, log=directory / f"{name}.log")


def golang_driver(directory: Path) -> Driver:
    return Driver(
        [str(go_driver())], log=directory / "go.log", environment={"HOME": str(directory)}
    )


def python_driver(shell: str, directory: Path) -> Driver:
    """Our own client: "aio", "sync", or "rocketmq" for RocketMQ's names."""
    programs = {"rocketmq": ["migrant_driver.py"]}
    program, *rest = programs.get(shell, ["python_driver.py", shell])
    command = [sys.executable, str(HERE / program), *rest]
    source = str(HERE.parents[1] / "src")
    return Driver(
        command, log=directory / f"python-{shell}.log", environment={"PYTHONPATH": source}
    )
