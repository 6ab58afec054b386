"""The official clients that speak gRPC, before four arrangements of proxy and broker.

A driver is a program in the client's language with nothing but the client in it (java/Official.java
and official/). All understand the same words; `ep` is the proxy:

    send      topic prefix count tags keyed delay_ms: PREFIX-0 and so on, each with itself as its
              key and its number as the property n; tags in turn; keyed=N: group-(number modulo N);
              `sent` has the id and, where the client gives it, the handle for a recall
    recall    topic handle: `recalled` has the id
    transact  topic prefix count outcomes checks expect timeout_s: message i in a transaction that
              ends as the i-th of `outcomes` says (commit, rollback, unknown); waits for `expect`
              checks, which are answered by the i-th of `checks`
    open      name topic group tag|sql: a simple consumer
    receive   name batch hide_s: asks once; `got` for each message
    ack       name bodies: what was received last with these bodies
    hide      name body hide_s: changes the invisible time
    close     name
    push      name topic group tag|sql expect fail timeout_s: a push consumer; waits until it has
              been called `expect` times; the first `fail` deliveries of each message fail

Arrangements: `ours` is our proxy and our broker, `java` the real ones 5.5.0, `java-proxy` the real
proxy before our broker, `our-proxy` ours before the real broker. SLUICEMQ_TESTS=all has
all of them with all clients; else a few clients meet `ours`.
"""

import contextlib
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from peer import clusters, drivers, toolchain
from peer.clusters import Cluster
from peer.drivers import Driver, Event
from peer.names import own
from peer.popping import Raw, bodies, now_ms
from peer.toolchain import HERE, made, run, tool
from sluicemq.model.ids import parse_host
from thorough import ALL
from waiting import limit, slowness

CLIENTS = ["java", "go", "python", "node", "rust"]
ARRANGEMENTS = ["ours", "our-proxy", "java-proxy", "java"]
PAIRS = [
    (client, arrangement)
    for client in (CLIENTS if ALL else ["java", "go", "python"])
    for arrangement in (ARRANGEMENTS if ALL else ["ours"])
]
SETTINGS = {
    "transactionTimeOut": "2000",
    "transactionCheckInterval": "1000",
    "recallMessageEnable": "true",
}
RELEASE = "5.5.0"
OFFICIAL = HERE / "official"


# ---- arrangements


@contextlib.contextmanager
def our_proxy(directory: Path, cluster: Cluster) -> Iterator[Cluster]:
    """Our proxy before a cluster: the same with its endpoint."""
    log = directory / "proxy.log"
    command = [sys.executable, "-m", "sluicemq", "proxy", "-n", cluster.name_server]
    environment = {"PYTHONPATH": str(clusters.SOURCE)}
    with clusters.process([*command, "--port", "0"], log, environment) as running:
        clusters.await_line(running, log, "ready proxy=")
        found = re.search(r"proxy=(\S+)", log.read_text())
        assert found
        pids = {**cluster.pids, "proxy": running.pid}
        yield replace(cluster, pids=pids, endpoint=found[1])


@contextlib.contextmanager
def arranged(name: str, directory: Path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        if name in ("ours", "java-proxy"):
            broker = clusters.sluice_cluster(directory, proxy=name == "ours", **SETTINGS)
        else:
            broker = clusters.rocketmq_cluster(
                directory, release=RELEASE, **SETTINGS, transactionOpBatchInterval="100"
            )
        cluster = stack.enter_context(broker)
        if name != "ours":
            proxy = our_proxy if name == "our-proxy" else clusters.java_proxy
            cluster = stack.enter_context(proxy(directory, cluster))
        yield cluster


CLUSTERS = {f"official-{name}": partial(arranged, name) for name in ARRANGEMENTS}


# ---- drivers


def java(directory: Path) -> Driver:
    return drivers.java_driver("official-5.2.0", directory, source=HERE / "java" / "Official.java")


def go(directory: Path) -> Driver:
    binary = toolchain.go_driver(OFFICIAL / "go", "official-go")
    return Driver([str(binary)], log=directory / "go.log", environment={"HOME": str(directory)})


def python(directory: Path) -> Driver:
    """With packages of its own: what the client wants of protobuf is not what we want."""
    wanted = OFFICIAL / "python" / "requirements.txt"

    def install(target: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(target)]
        run([*pip, "-r", str(wanted)], cwd=target)

    packages = made("official-python", [wanted], install)
    return Driver(
        [sys.executable, "-S", str(OFFICIAL / "python" / "driver.py")],
        log=directory / "python.log",
        environment={"PYTHONPATH": str(packages), "HOME": str(directory)},
    )


def node(directory: Path) -> Driver:
    source = OFFICIAL / "node"

    def install(target: Path) -> None:
        for name in ("package.json", "package-lock.json", "driver.js"):
            (target / name).write_bytes((source / name).read_bytes())
        run([tool("npm"), "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=target)

    place = made("official-node", sorted(source.iterdir()), install)
    return Driver(
        [tool("node"), str(place / "driver.js")],
        log=directory / "node.log",
        environment={"HOME": str(directory)},
    )


def rust(directory: Path) -> Driver:
    """What it depends on is what cargo finds: a file of locks would name where that comes from."""
    source = OFFICIAL / "rust"

    def build(target: Path) -> None:
        shutil.copytree(source, target / "source")
        compiled = toolchain.cache_directory() / "official-rust-target"
        command = [tool("cargo"), "build", "-q", "--target-dir", str(compiled)]
        run(command, cwd=target / "source")
        shutil.copy(compiled / "debug" / "official", target / "driver")

    inputs = [source / "Cargo.toml", source / "src" / "main.rs"]
    binary = made("official-rust", inputs, build) / "driver"
    return Driver([str(binary)], log=directory / "rust.log", environment={"HOME": str(directory)})


DRIVERS: dict[str, Callable[[Path], Driver]] = {
    "official-java": java, "official-go": go, "official-python": python, "official-node": node,
    "official-rust": rust,
}  # fmt: skip


# ---- scenarios


class Stage:
    """A client before an arrangement. Topics and groups have the client's name and the number of
    the try."""

    def __init__(self, client: str, cluster: Cluster, driver: Driver) -> None:
        self.client, self._cluster, self._driver = client, cluster, driver
        self.name_server = cluster.name_server
        self.raw = Raw(parse_host(cluster.broker))
        self._open: list[str] = []

    def close(self) -> None:
        for name in self._open:
            self("close", name=name)
        self.raw.close()

    def __call__(self, command: str, **options: object) -> list[Event]:
        return self._driver.call(command, ep=self._cluster.endpoint, **options)

    def topic(self, what: str, kind: str = "NORMAL", queues: int = 4) -> str:
        name = own(f"T_{what}_{self.client}")
        self.raw.topic(name, queues, attributes=f"+message.type={kind}")
        return name

    def group(self, what: str, **config: object) -> str:
        name = own(f"G_{what}_{self.client}")
        self.raw.group(name, **config)
        return name

    def send(self, topic: str, count: int, **options: object) -> list[Event]:
        """The events of m-0 and so on; nothing is refused."""
        sent = named(self("send", topic=topic, count=count, **options), "sent")
        assert [event["body"] for event in sent] == texts(count)
        assert len({event["id"] for event in sent}) == count
        return sent

    def open(self, topic: str, group: str, **options: object) -> None:
        """A simple consumer of the name c."""
        self("open", name="c", topic=topic, group=group, **options)
        self._open.append("c")

    def receive(
        self, expect: Iterable[str], *, within_s: float = 30, **options: object
    ) -> list[Event]:
        """What the consumer gets, asked again and again and acknowledged: exactly these bodies."""
        wanted, got = Counter(expect), list[Event]()
        end = time.monotonic() + within_s * slowness()
        while len(got) < wanted.total() and time.monotonic() < end:
            fresh = self("receive", name="c", **options)
            if fresh:
                self("ack", name="c", bodies=",".join(event["body"] for event in fresh))
            got += fresh
        assert Counter(event["body"] for event in got) == wanted
        return got

    def push(self, topic: str, group: str, expect: int, **options: object) -> list[Event]:
        """What a push consumer got, which was called so many times exactly; it stays open."""
        self._open.append("p")
        events = self(
            "push", name="p", topic=topic, group=group, expect=expect, timeout_s=60, **options
        )
        got = named(events, "got")
        assert len(got) == expect, events
        assert {event["topic"] for event in got} == {topic}
        return got

    def left(self, topic: str, group: str, **options: object) -> list[str]:
        """What the group could still pop of the topic, at once."""
        return bodies(self.raw.answer(self.raw.popping(topic, group, queueId=-1, **options)))

    def dead_letters(self, group: str, count: int) -> list[str]:
        """The bodies of the group's dead letters, of which there are to be so many."""
        look, found = self.group(f"look_{group}"), list[str]()
        end = time.monotonic() + limit(30) * slowness()
        while len(found) < count and time.monotonic() < end:
            found += self.left(f"%DLQ%{group}", look, pollTime=1000, bornTime=now_ms())
        return sorted(found)


def texts(count: int) -> list[str]:
    return [f"m-{number}" for number in range(count)]


def named(events: Iterable[Event], name: str) -> list[Event]:
    return [event for event in events if event["event"] == name]


def by_group(events: Iterable[Event]) -> dict[str, list[int]]:
    """Message group -> the numbers in the order in which they came."""
    found: dict[str, list[int]] = {}
    for event in events:
        found.setdefault(event["group"], []).append(int(event["n"]))
    return found


def by_body(events: Iterable[Event]) -> dict[str, list[int]]:
    """Body -> the attempts of its deliveries."""
    found: dict[str, list[int]] = {}
    for event in events:
        found.setdefault(event["body"], []).append(event["attempt"])
    return found
