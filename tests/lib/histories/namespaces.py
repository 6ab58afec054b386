"""Real processes, each in a network namespace of its own, and what can be done to them.

    this process (clients) ── bridge ──┬── names   name server, etcd
                                       ├── one     sluice broker, id 1, its own disk
                                       ├── two     …
                                       └── three

Linux, root, and `ip` are needed (`available`). A namespace's cable is pulled (both ways), packets
to one other namespace vanish (one way), a process is killed, stopped for a while, or killed and its
disk wiped. All of it goes when the `Cluster` is closed.
"""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from histories.history import TermSeen
from sluicemq.broker.failover.election import key_prefix, state_key
from sluicemq.cli.servers.processes import etcd_binary

BROKER: Final = "histories"
CLUSTER: Final = "DefaultCluster"
STATE: Final = state_key(key_prefix(CLUSTER, BROKER))
READY_S: Final = 30.0
CONFIG: Final = """
brokerClusterName = {cluster}
brokerName = {broker}
brokerId = {id}
brokerRole = SYNC_MASTER
flushDiskType = ASYNC_FLUSH
bindAddress = 0.0.0.0
brokerIP1 = {address}
listenPort = 10911
namesrvAddr = {names}:9876
storePathRootDir = {store}
mappedFileSizeCommitLog = 4194304
mappedFileSizeConsumeQueue = 120000
maxMessageSize = 1048576
haMaxTimeSlaveNotCatchup = 4000
haSendHeartbeatInterval = 1000
haHousekeepingInterval = 4000
autoCreateTopicEnable = true
recallMessageEnable = true
sluiceConsensus = etcd://{names}:2379
"""


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def available() -> str:
    """Why it cannot be done here; "": it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and the command ip"
    name = f"probe{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "link", "add", f"p{os.getpid()}", "type", "bridge")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', error)!r}"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"p{os.getpid()}"], check=False, capture_output=True)
    return ""


class Place:
    """A namespace with its address and the processes in it."""

    def __init__(self, cluster: "Cluster", name: str, number: int) -> None:
        self.cluster, self.name, self.number = cluster, name, number
        self.namespace = f"{cluster.tag}{name}"
        self.address = f"{cluster.net}.{number}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.commands: dict[str, list[str]] = {}
        self._cable = f"{cluster.tag}v{number}"
        run("ip", "netns", "add", self.namespace)
        run("ip", "link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns",
            self.namespace)  # fmt: skip
        run("ip", "link", "set", self._cable, "master", cluster.bridge, "up")
        for words in (
            ("addr", "add", f"{self.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            run("ip", "-n", self.namespace, *words)

    def start(self, name: str) -> None:
        """The process of that name, if it does not run."""
        process = self.processes.get(name)
        if process is not None and process.poll() is None:
            return
        with (self.cluster.root / f"{self.name}-{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *self.commands[name]],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def signal(self, name: str, number: signal.Signals) -> None:
        """And waits for the end of one that is killed."""
        process = self.processes.get(name)
        if process is not None and process.poll() is None:
            process.send_signal(number)
            if number in (signal.SIGKILL, signal.SIGTERM):
                process.wait(30)

    def plug(self, *, is_in: bool) -> None:
        """Its cable, in or out."""
        run("ip", "link", "set", self._cable, "up" if is_in else "down")

    def lose(self, other: "Place") -> None:
        """What it sends there vanishes; what comes from there arrives."""
        subprocess.run(
            ["ip", "-n", self.namespace, "route", "add", "blackhole", f"{other.address}/32"],
            check=False, capture_output=True,
        )  # fmt: skip

    def heal(self) -> None:
        """Cable in, nothing vanishes, nobody stopped."""
        self.plug(is_in=True)
        for other in self.cluster.places:
            subprocess.run(
                ["ip", "-n", self.namespace, "route", "del", "blackhole", f"{other.address}/32"],
                check=False, capture_output=True,
            )  # fmt: skip
        for name in self.processes:
            self.signal(name, signal.SIGCONT)

    def close(self) -> None:
        for name in self.processes:
            self.signal(name, signal.SIGCONT)
            self.signal(name, signal.SIGKILL)
        # With its namespace it would go a moment later, and another cluster wants the name.
        subprocess.run(["ip", "link", "del", self._cable], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", self.namespace], check=False, capture_output=True)


class Cluster:
    """A name server, an etcd, and so many replicas; a directory for their disks and logs."""

    def __init__(self, root: Path, replicas: int = 3, mutant: str = "") -> None:
        self.root = root
        number = os.getpid()
        self.tag = f"h{number % 100_000}"
        self.net = f"10.{200 + number % 50}.{number // 50 % 250}"
        self.bridge = f"{self.tag}b"
        self.places: list[Place] = []
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "addr", "add", f"{self.net}.1/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        self.names = self._place("names", 2)
        url = f"http://{self.names.address}:2379"
        self.names.commands = {
            "etcd": [
                etcd_binary(), "--name=trial", f"--data-dir={root}/etcd",
                f"--listen-client-urls={url}", f"--advertise-client-urls={url}",
                "--listen-peer-urls=http://127.0.0.1:2380", "--log-level=error",
                "--initial-advertise-peer-urls=http://127.0.0.1:2380",
                "--initial-cluster=trial=http://127.0.0.1:2380", "--unsafe-no-fsync",
            ],
            "names": [
                sys.executable, "-m", "sluicemq", "nameserver", "--host", "0.0.0.0",
                "-c", self._write("names.conf", "listenPort = 9876\n"),
            ],
        }  # fmt: skip
        self.replicas = [self._place(f"r{i}", 10 + i) for i in range(1, replicas + 1)]
        for index, place in enumerate(self.replicas, 1):
            text = CONFIG.format(
                cluster=CLUSTER, broker=BROKER, id=index, address=place.address,
                names=self.names.address, store=self.disk(index),
            )  # fmt: skip
            path = self._write(f"r{index}.conf", text)
            program = ["histories.mutants", mutant] if mutant else ["sluicemq"]
            place.commands["broker"] = [sys.executable, "-m", *program, "broker", "-c", path]

    def _place(self, name: str, number: int) -> Place:
        self.places.append(Place(self, name, number))
        return self.places[-1]

    def _write(self, name: str, text: str) -> str:
        path = self.root / name
        path.write_text(text)
        return str(path)

    def disk(self, replica: int) -> Path:
        return self.root / f"store-{replica}"

    def start(self) -> None:
        """All of it; returns when every replica is in sync."""
        for name in self.names.commands:
            self.names.start(name)
        self.wait(lambda: self._etcd("range", {"key": _text("x")}) is not None, "etcd")
        for place in self.replicas:
            place.start("broker")

    def wait(self, is_so: Callable[[], object], what: str, seconds: float = READY_S) -> None:
        """Raises TimeoutError."""
        end_s = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > end_s:
                raise TimeoutError(f"{what}: not within {seconds:g} s; logs are in {self.root}")
            time.sleep(0.1)

    # --- the consensus, seen from outside

    def _etcd(self, what: str, body: dict[str, Any]) -> dict[str, Any] | None:
        request = urllib.request.Request(
            f"http://{self.names.address}:2379/v3/kv/{what}", json.dumps(body).encode()
        )
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=2) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
        return None

    def state(self, revision: int = 0) -> tuple[dict[str, Any], int]:
        """The record, and the revision of its last change; as it was at a revision."""
        body = {"key": _text(STATE), **({"revision": revision} if revision else {})}
        found = self._etcd("range", body) or {}
        for kv in found.get("kvs", ()):
            return json.loads(base64.b64decode(kv["value"])), int(kv["mod_revision"])
        return {}, 0

    def terms(self, since: int = 0) -> list[TermSeen]:
        """Every value that the record has had, from a revision on."""
        terms: list[TermSeen] = []
        state, revision = self.state()
        while state and revision >= since:
            in_sync = {int(key): str(value) for key, value in state["inSync"].items()}
            terms.append(
                TermSeen(state["epoch"], state["master"], state["life"], in_sync, state["unclean"])
            )
            state, revision = self.state(revision - 1) if revision > 1 else ({}, 0)
        return terms[::-1]

    def master(self) -> int:
        """Its id, by the record; 0: none yet."""
        return int(self.state()[0].get("master", 0))

    def is_whole(self) -> bool:
        """Are all replicas in sync?"""
        return len(self.state()[0].get("inSync", ())) == len(self.replicas)

    # --- faults

    def kill(self, replica: int, *, wipes: bool = False) -> None:
        place = self.replicas[replica - 1]
        place.signal("broker", signal.SIGCONT)
        place.signal("broker", signal.SIGKILL)
        if wipes:
            shutil.rmtree(self.disk(replica), ignore_errors=True)

    def heal(self) -> None:
        """Everything runs, and reaches everything."""
        for place in self.places:
            place.heal()
            for name in place.commands:
                place.start(name)

    def close(self) -> None:
        for place in self.places:
            place.close()
        run("ip", "link", "del", self.bridge)


def _text(key: str) -> str:
    return base64.b64encode(key.encode()).decode()
