"""Consumers that stay open while a test goes on: drivers and clusters of test_consuming.py and
test_timed.py, and what both need of them.

The words of the drivers are described in consuming_driver.py. The `timed` clusters have levels of
one to three seconds, allow to take timed messages back, and count every message as being on disk:
then a new group begins where it says, and not at the first message of a queue that is young.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from peer import clusters, drivers, names
from peer.drivers import Driver, Event
from peer.toolchain import HERE

PAIRS = [
    ("sluicemq", "java-4.9.8"),
    ("sluicemq", "java-5.3.3"),
    ("sluicemq", "go-2.1.2"),
    ("rocketmq", "python-aio"),
]
CROSS_PAIRS = [
    ("rocketmq", "java-5.3.3"),
    ("rocketmq", "go-2.1.2"),
    ("sluicemq", "python-aio"),
]
TIMED = {
    "messageDelayLevel": "1s 2s 3s 1m",
    "recallMessageEnable": "true",
    "accessMessageInMemoryMaxRatio": "0",
}
CLUSTERS = {
    "sluicemq-timed": partial(clusters.sluice_cluster, **TIMED),
    "rocketmq-timed": partial(clusters.rocketmq_cluster, **TIMED),
}


def java(release: str, directory: Path) -> Driver:
    source = HERE / "java" / "Consuming.java"
    return drivers.java_driver(f"client-{release}", directory, source=source)


def python(directory: Path) -> Driver:
    return Driver(
        [sys.executable, str(HERE / "consuming_driver.py")],
        log=directory / "consuming.log",
        environment={
            "PYTHONPATH": str(HERE.parents[1] / "src"),
            "OFFSETS_DIRECTORY": str(directory),
        },
    )


DRIVERS: dict[str, Callable[[Path], Driver]] = {
    "consuming-java-4.9.8": partial(java, "4.9.8"),
    "consuming-java-5.3.3": partial(java, "5.3.3"),
    "consuming-go-2.1.2": drivers.golang_driver,
    "consuming-python-aio": python,
}


@dataclass(frozen=True)
class Sessions:
    """The driver of a client pointed at a cluster; topics and groups have the client's name and the
    number of the try it was made in."""

    client: str
    driver: Driver
    name_server: str
    try_number: int = field(default_factory=names.number_of_try)

    def __call__(self, command: str, **options: object) -> list[Event]:
        word = f"s-{command}" if self.client.startswith("go") else command
        return self.driver.call(word, ns=self.name_server, **options)

    def name(self, what: str) -> str:
        return f"{what}_{self.client}_{self.try_number}".replace(".", "_")

    def send(self, what: str, prefix: str, count: int, **options: object) -> list[Event]:
        """The `sent` events of PREFIX-0 and so on in the topic `what`; nothing is refused."""
        events = self(
            "send", topic=self.name(what), prefix=prefix, count=count, **options
        )  # fmt: skip
        assert len(named(events, "sent")) == count, events
        return named(events, "sent")

    def open(self, name: str, what: str, group: str | None = None, **options: object) -> None:
        """A consumer of the topic `what`, of the group of the same name or of `group`."""
        self(
            "open", name=name, topic=self.name(what), group=self.name(group or what), **options
        )  # fmt: skip

    def take(self, *names: str, expect: Iterable[str] = (), **options: object) -> list[Event]:
        """What these consumers get: exactly the bodies `expect`, and nothing for a while."""
        expected = sorted(expect)
        events = self("take", names=",".join(names), expect=len(expected), **options)
        received = named(events, "got")
        counts, wanted = Counter(bodies_of(received)), Counter(expected)
        assert counts == wanted, f"missing {wanted - counts}, not expected {counts - wanted}"
        return received

    def close(self, *names: str) -> None:
        for name in names:
            self("close", name=name)


def named(events: Iterable[Event], name: str) -> list[Event]:
    return [event for event in events if event["event"] == name]


def bodies_of(events: Iterable[Event]) -> list[str]:
    return sorted(event["body"] for event in events)


def bodies(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]
