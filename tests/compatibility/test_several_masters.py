"""Two masters and two name servers of ours under clients of RocketMQ that send and consume all the
time: a name server dies and comes again empty, a broker is drained, goes and comes again, another
is killed. No send fails, and what was sent is consumed."""

import contextlib
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from peer import clusters, names
from peer.drivers import Driver, Event

from sluicemq.client.sync.admin import Admin
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command
from thorough import ALL
from waiting import limit, slowness

CLIENTS = ["java-5.3.3", *(["java-4.9.8", "python-aio"] if ALL else [])]
ROUTE_S = 30
"""How old the routes of clients are at most. Java's keep this default here: one that has just
learnt that a broker is gone would not try it when the other one goes a second later."""


class Servers:
    """Processes by name; one that is started again has its port and its directory."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._directory, self._stack = directory, stack
        self._ports: dict[str, int] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._starts = 0

    @property
    def name_servers(self) -> str:
        return ";".join(f"127.0.0.1:{self._ports[name]}" for name in ("names-1", "names-2"))

    def start(self, name: str) -> None:
        self._starts += 1
        own = self._directory / name
        own.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "sluicemq"]
        if name.startswith("names"):
            settings = {"kvConfigPath": str(own / "kv.json")}
            command += ["nameserver"]
            port, _, _ = clusters.free_ports()
        else:
            settings = {
                "brokerName": name,
                "brokerIP1": "127.0.0.1",
                "namesrvAddr": self.name_servers,
            }
            command += ["broker", "--store", str(own / "store")]
            _, port, _ = clusters.free_ports()
        port = self._ports.setdefault(name, port)  # none that a connection takes while it is down
        path = clusters.write_properties(own / "its.conf", settings)
        command += ["-c", str(path), "--host", "127.0.0.1", "--port", str(port)]
        log = self._directory / f"{name}-{self._starts}.log"
        running = self._stack.enter_context(
            clusters.process(command, log, {"PYTHONPATH": str(clusters.SOURCE)})
        )
        clusters.await_line(running, log, f"ready {command[3]}=")
        self._running[name] = running

    def end(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        running = self._running.pop(name)
        running.send_signal(how)
        running.wait(limit(30))


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with contextlib.ExitStack() as stack:
        made = Servers(tmp_path, stack)
        for name in ("names-1", "names-2", "broker-a", "broker-b"):
            made.start(name)
        yield made


class Story:
    """What happens when, by the number of messages that were sent."""

    def __init__(self, steps: list[tuple[int, Callable[[], None]]]) -> None:
        self._steps = steps
        self.sent: list[str] = []
        self.got: set[str] = set()

    def __call__(self, event: Event) -> None:
        if event["event"] == "sent":
            self.sent.append(event["body"])
        elif event["event"] == "got":
            self.got.add(event["body"])
        while self._steps and len(self.sent) >= self._steps[0][0]:
            self._steps.pop(0)[1]()


@pytest.mark.thorough
@pytest.mark.parametrize("client", CLIENTS)
def test_clients_live_through_whatever_happens_to_servers(
    client: str, servers: Servers, driver: Callable[[str], Driver]
) -> None:
    topic, group = names.own("several"), names.own("several")
    with Admin(servers.name_servers) as admin:
        admin.create_topic(topic, queues=2)
    story = Story(
        [
            (200, lambda: servers.end("names-1")),
            (400, lambda: servers.start("names-1")),
            (600, lambda: servers.end("names-2")),
            (800, lambda: servers.start("names-2")),
            (1000, lambda: servers.end("broker-b")),
            (1200, lambda: servers.start("broker-b")),
            (1400, lambda: servers.end("broker-a", signal.SIGTERM)),
            (1600, lambda: servers.start("broker-a")),
        ]
    )
    driver(client).call(
        "push", on_event=story, ns=servers.name_servers, topic=topic, group=group, tag="*",
        model="clustering", instances=1, count=2000, expect=2000, distinct=1, pause_ms=3,
        timeout_s=100, poll_ms=ROUTE_S * 1000,
    )  # fmt: skip
    assert len(story.sent) == 2000
    assert story.got >= set(story.sent)


@pytest.mark.parametrize("client", CLIENTS)
def test_brokers_under_one_command_are_all_used(
    client: str, tmp_path: Path, driver: Callable[[str], Driver]
) -> None:
    """Of a topic that is made by its first sends, from the default topic of each."""
    name_server, port, _ = clusters.free_ports()
    command = [
        sys.executable, "-m", "sluicemq", "up", "--brokers", "3", "--no-proxy", "--store",
        str(tmp_path / "store"), "--nameserver-port", str(name_server), "--broker-port", str(port),
    ]  # fmt: skip
    topic, log = names.own("spread"), tmp_path / "log"
    with clusters.process(command, log, {"PYTHONPATH": str(clusters.SOURCE)}) as running:
        clusters.await_line(running, log, "ready nameserver=")
        address = f"127.0.0.1:{name_server}"
        # The Java client renews its routes 10 ms after its start, then every 30 s. If that falls
        # into the first sends, it learns only of the brokers that have the topic by then.
        settle_ms = round(500 * slowness())
        driver(client).call("send", ns=address, topic=topic, count=60, settle_ms=settle_ms)
        with Admin(address) as admin:
            sent = Counter[str]()
            for queue in admin.queues(topic):
                sent[queue.broker] += admin.offset_max(queue)
        # A client on a busy machine sends again what it did not hear of in time: to another one.
        assert set(sent) == {"broker-a", "broker-b", "broker-c"}
        assert min(sent.values()) >= 10
        assert sent.total() >= 60


@pytest.mark.thorough
@pytest.mark.parametrize("client", CLIENTS)
def test_a_broker_is_drained(
    client: str, servers: Servers, driver: Callable[[str], Driver]
) -> None:
    """When all routes are newer nobody sends there any more."""
    topic, group = names.own("drained"), names.own("drained")
    steps: list[tuple[int, Callable[[], None]]] = []
    story = Story(steps)
    with Admin(servers.name_servers) as admin:
        admin.create_topic(topic, queues=2)

        def drain() -> None:
            for server in admin.name_servers:
                command = Command(RequestCode.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "broker-b"})
                assert admin.call(server, command).code == 0

        def ends() -> int:
            offsets = admin.topic_offsets(topic)
            return sum(
                one.offset_max for queue, one in offsets.items() if queue.broker == "broker-b"
            )

        before: list[int] = []
        wait_s = ROUTE_S + 5 * slowness()  # the client's timer knows nothing of a busy machine
        steps += [
            (100, drain),
            (200, lambda: time.sleep(wait_s)),
            (200, lambda: before.append(ends())),
            (200, lambda: time.sleep(5)),
            (200, lambda: before.append(ends())),
            (1000, lambda: servers.end("broker-b", signal.SIGTERM)),
        ]
        driver(client).call(
            "push", on_event=story, ns=servers.name_servers, topic=topic, group=group, tag="*",
            model="clustering", instances=1, count=1500, expect=1500, distinct=1, pause_ms=30,
            timeout_s=100, poll_ms=ROUTE_S * 1000,
        )  # fmt: skip
    assert len(story.sent) == 1500
    assert story.got >= set(story.sent)
    assert before[0] == before[1] > 0
