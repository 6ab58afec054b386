"""How long nobody can send when the master dies, and that nothing acknowledged is lost with it.

    make bench-failover                        50 kills, 10 planned switches, 10 silent replicas
    python -m benchmarks.failover --kills 5 --switches 2 --silences 2

`sluice up --replicas 2` runs on this machine with its defaults: brokers answer when the in-sync set
has a message. Two clients send one message after the other all the time: ours, which asks for a new
route as soon as a broker does not answer, and the unmodified Java client with its default settings,
which looks at routes every 30 s.

A round kills the process of the master (kill -9) when all replicas are in sync, and waits until
both clients send again and all replicas are in sync again. The outage of a client is the time from
the kill to its next acknowledged send. In a switch (`sluice cluster switch`) no send may fail.
Then the process of another replica is stopped (SIGSTOP) for SILENT_S, with its connection open: no
send may fail either, and the longest one says how long the master waits before it goes on without
that replica. At the end every acknowledged message has to be in its queue.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
for place in (ROOT / "src", ROOT / "tests" / "compatibility", ROOT / "tests" / "lib"):
    sys.path.insert(0, str(place))

from peer import drivers, toolchain  # noqa: E402

from sluicemq.client.sync.admin import Admin  # noqa: E402
from sluicemq.client.sync.bulk import BulkReader  # noqa: E402
from sluicemq.client.sync.producer import Producer  # noqa: E402
from sluicemq.errors import SluiceError  # noqa: E402
from sluicemq.record.codec import decode_records  # noqa: E402

TOPIC, QUEUES = "Failover", 4
PAUSE_S = 0.02
READY_S, RECOVER_S = 90.0, 120.0
AIM_S = 8.0
SILENT_S = 6.0


@dataclass
class Send:
    """One send: when it began and ended (s since 1970), and why it failed."""

    body: bytes
    began: float
    ended: float
    failure: str


@dataclass
class Client:
    """Who sends all the time. `sends` grows while it runs."""

    name: str
    sends: list[Send] = field(default_factory=list)

    def first_after(self, moment: float) -> Send | None:
        """The first acknowledged send that began after it."""
        for send in reversed(self.sends):
            if send.began < moment:
                break
        else:
            return None
        after = [one for one in self.sends[-2000:] if one.began >= moment and not one.failure]
        return after[0] if after else None

    def outage_s(self, moment: float) -> float:
        """From a moment to the next acknowledgement of a send that began later, or of the one
        that was under way if it took that long."""
        times = [
            one.ended for one in self.sends
            if not one.failure and (one.began >= moment or one.ended > moment + 0.2)
        ]  # fmt: skip
        return min(times) - moment

    def failures(self, begin: float, end: float) -> list[Send]:
        return [one for one in self.sends if one.failure and begin <= one.ended <= end]

    def longest_s(self, begin: float) -> float:
        """Return how long the longest send took of those that ended after a moment."""
        return max(one.ended - one.began for one in self.sends[-2000:] if one.ended > begin)


class Ours(Client):
    """Our blocking producer, in a thread."""

    def __init__(self, name_server: str) -> None:
        super().__init__("ours")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(name_server,), daemon=True)
        self._thread.start()

    def _run(self, name_server: str) -> None:
        number = 0
        with Producer(name_server) as producer:
            while not self._stop.wait(PAUSE_S):
                body, began, failure = b"ours-%d" % number, time.time(), ""
                try:
                    producer.send(TOPIC, body)
                except SluiceError as error:
                    failure = f"{type(error).__name__}: {error}"
                self.sends.append(Send(body, began, time.time(), failure))
                number += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)


class Java(Client):
    """The unmodified Java producer with its defaults."""

    def __init__(self, name_server: str, driver: drivers.Driver) -> None:
        super().__init__("Java 5.3.3, defaults")
        self._driver = driver
        options = {"ns": name_server, "topic": TOPIC, "pause_ms": int(PAUSE_S * 1000)}
        self._thread = threading.Thread(
            target=lambda: driver.call(
                "send", on_event=self._sent, timeout_s=100_000, **options  # type: ignore[arg-type]
            ),
            daemon=True,
        )  # fmt: skip
        self._thread.start()

    def _sent(self, event: drivers.Event) -> None:
        body = b"java-%d" % event["number"]
        began, ended = event["began"] / 1000, event["ended"] / 1000
        self.sends.append(Send(body, began, ended, event["failure"]))

    def close(self) -> None:
        process = self._driver._process
        assert process.stdin is not None
        process.stdin.write("stop\n")
        process.stdin.flush()
        self._thread.join(30)


class Trial:
    """`sluice up --replicas`."""

    def __init__(self, directory: Path, replicas: int) -> None:
        self.log = (directory / "log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sluicemq", "up", "--replicas", str(replicas),
             "--nameserver-port", "0", "--broker-port", "0", "--no-proxy",
             "--store", str(directory / "store")],
            stdout=subprocess.PIPE, stderr=self.log, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("ready "), f"see {directory / 'log'}"
        self.replicas = replicas
        self.name_server = dict(word.partition("=")[::2] for word in line.split())["nameserver"]

    def status(self) -> list[dict[str, Any]]:
        with Admin(self.name_server) as admin:
            return admin.replicas()

    @property
    def is_whole(self) -> bool:
        """A master, and all replicas in sync."""
        with contextlib.suppress(SluiceError):
            rows = self.status()
            masters = [row for row in rows if row["role"] == "master"]
            return len(masters) == 1 and self.replicas == sum(
                1 for row in rows if row["inSync"] and row["role"] != "gone"
            )
        return False

    def kill_master(self) -> float:
        master = next(row for row in self.status() if row["role"] == "master")
        os.kill(master["said"]["pid"], signal.SIGKILL)
        return time.time()

    @contextlib.contextmanager
    def silent_slave(self) -> Iterator[None]:
        """Stop the process of a replica that is not the master, and continue it at the end."""
        pid = next(row for row in self.status() if row["role"] == "slave")["said"]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def close(self) -> int:
        self._process.terminate()
        code = self._process.wait(60)
        self.log.close()
        return code


def await_that(what: str, is_so: Callable[[], bool], limit_s: float = RECOVER_S) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > end:
            raise AssertionError(f"after {limit_s:g} s still not: {what}")
        time.sleep(0.1)


def percentile(values: list[float], percent: int) -> float:
    """The smallest value that so many percent are not above."""
    ordered = sorted(values)
    return ordered[max(-(-len(ordered) * percent // 100) - 1, 0)]


def kills(
    trial: Trial, clients: list[Client], count: int, rng: random.Random
) -> dict[str, list[float]]:
    outages: dict[str, list[float]] = {client.name: [] for client in clients}
    for number in range(1, count + 1):
        await_that("all replicas in sync", lambda: trial.is_whole)
        time.sleep(rng.uniform(0.2, 1.0))
        moment = trial.kill_master()
        for client in clients:
            await_that(
                f"{client.name} sends again", lambda: client.first_after(moment) is not None  # noqa: B023
            )  # fmt: skip
            outages[client.name].append(client.outage_s(moment))
        texts = (f"{client.name} {outages[client.name][-1]:.2f} s" for client in clients)
        print(f"kill {number}: {', '.join(texts)}", flush=True)
    return outages


def failures_since(begin: float, clients: list[Client]) -> int:
    """Print the sends that failed since a moment, and return how many there are."""
    count = 0
    for client in clients:
        for one in client.failures(begin, time.time()):
            print(f"  {client.name}: {one.body!r} {one.failure}")
            count += 1
    return count


def switches(trial: Trial, clients: list[Client], count: int) -> tuple[int, dict[str, float]]:
    """Failed sends, and the longest send of each client."""
    failed, longest = 0, dict.fromkeys((client.name for client in clients), 0.0)
    for number in range(1, count + 1):
        await_that("all replicas in sync", lambda: trial.is_whole)
        time.sleep(1.0)
        begin = time.time()
        command = [sys.executable, "-m", "sluicemq", "cluster", "switch", "-n", trial.name_server]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        taken = time.time() - begin
        time.sleep(4.0)
        failed += failures_since(begin, clients)
        for client in clients:
            longest[client.name] = max(longest[client.name], client.longest_s(begin))
        print(f"switch {number}: {taken:.2f} s", flush=True)
    return failed, longest


def silences(trial: Trial, clients: list[Client], count: int) -> tuple[int, list[float]]:
    """Stop a replica `count` times. Return how many sends failed, and the longest send of each
    time in seconds."""
    failed, longest = 0, list[float]()
    for number in range(1, count + 1):
        await_that("all replicas in sync", lambda: trial.is_whole)
        time.sleep(1.0)
        begin = time.time()
        with trial.silent_slave():
            time.sleep(SILENT_S)
        failed += failures_since(begin, clients)
        longest.append(max(client.longest_s(begin) for client in clients))
        print(f"silent replica {number}: longest send {longest[-1]:.2f} s", flush=True)
    return failed, longest


def stored(name_server: str) -> set[bytes]:
    """All bodies that are in the topic."""
    found: set[bytes] = set()
    with Admin(name_server) as admin:
        for queue in admin.queues(TOPIC):
            first, end = admin.offsets(queue)
            address = admin.masters()[queue.broker]
            with BulkReader(address, TOPIC, queue.queue_id, first, end) as chunks:
                for chunk in chunks:
                    found.update(message.body for message in decode_records(chunk))
    return found


@contextlib.contextmanager
def sending(trial: Trial, scratch: Path, *, java: bool) -> Iterator[list[Client]]:
    with Admin(trial.name_server) as admin:
        admin.create_topic(TOPIC, queues=QUEUES)
    clients: list[Client] = [Ours(trial.name_server)]
    with contextlib.ExitStack() as stack:
        stack.callback(clients[0].close)  # type: ignore[attr-defined]
        if java:
            source = ROOT / "benchmarks" / "java" / "Steady.java"
            driver = drivers.java_driver("client-5.3.3", scratch, source=source)
            stack.callback(driver.close)
            clients.append(Java(trial.name_server, driver))
            stack.callback(clients[1].close)  # type: ignore[attr-defined]
        for client in clients:
            await_that(f"{client.name} sends", lambda: len(client.sends) > 10)  # noqa: B023
        yield clients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--switches", type=int, default=10)
    parser.add_argument("--silences", type=int, default=10)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-java", action="store_true")
    parser.add_argument("--json", default="", help="write the figures to this file as well")
    options = parser.parse_args()
    java = not options.no_java
    if java:
        try:
            toolchain.jars("client-5.3.3")
        except toolchain.MissingTool as missing:
            print(f"without the Java client: {missing}")
            java = False
    figures: dict[str, Any] = {"kills": options.kills, "switches": options.switches}
    with tempfile.TemporaryDirectory(prefix="sluice-failover-") as name:
        scratch = Path(name)
        trial = Trial(scratch, options.replicas)
        with sending(trial, scratch, java=java) as clients:
            outages = kills(trial, clients, options.kills, random.Random(options.seed))
            failed, longest = switches(trial, clients, options.switches)
            failed_beside_silent, waits = silences(trial, clients, options.silences)
        await_that("all replicas in sync", lambda: trial.is_whole)
        found = stored(trial.name_server)
        acknowledged = [one.body for client in clients for one in client.sends if not one.failure]
        lost = [body for body in acknowledged if body not in found]
        code = trial.close()
    print(f"\n{options.kills} kills of the master of {options.replicas} replicas, from kill to "
          "next acknowledged send")  # fmt: skip
    for client, values in outages.items():
        if values:
            figures[client] = {
                "median_s": statistics.median(values), "p99_s": percentile(values, 99),
                "max_s": max(values),
            }  # fmt: skip
            print(f"  {client}: median {statistics.median(values):.2f} s, "
                  f"p99 {percentile(values, 99):.2f} s, longest {max(values):.2f} s")  # fmt: skip
    print(f"{options.switches} switches: {failed} failed sends, longest send "
          + ", ".join(f"{name} {value:.2f} s" for name, value in longest.items()))  # fmt: skip
    if waits:
        print(
            f"{options.silences} silent replicas: {failed_beside_silent} failed sends, longest "
            f"send median {statistics.median(waits):.2f} s, longest {max(waits):.2f} s"
        )
    print(f"{len(acknowledged):,} acknowledged messages, {len(lost)} lost; exit code {code}")
    figures |= {
        "failed_beside_silent_replicas": failed_beside_silent, "longest_beside_silent_s": waits,
        "failed_in_switches": failed, "longest_send_s": longest,
        "acknowledged": len(acknowledged), "lost": len(lost), "exit_code": code,
    }  # fmt: skip
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")
    ours = figures.get("ours", {"p99_s": 0.0})
    sys.exit(bool(lost or failed or failed_beside_silent or code) or ours["p99_s"] > AIM_S)


if __name__ == "__main__":
    main()
