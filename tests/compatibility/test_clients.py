"""Unmodified clients of RocketMQ against our broker, and our clients against the real one: one
suite, exact sets.

`PAIRS` says who talks to whom. SLUICEMQ_COMPATIBILITY=all adds the pairs that prove the drivers
themselves: the real clients against the real broker, and ours against ours.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from peer.clusters import Cluster
from peer.drivers import Driver, Event

PAIRS = [
    ("sluicemq", "java-4.9.8"),
    ("sluicemq", "java-5.3.3"),
    ("sluicemq", "go-2.1.2"),
    ("rocketmq", "python-aio"),
    ("rocketmq", "python-sync"),
    ("rocketmq", "python-rocketmq"),
]
if os.environ.get("SLUICEMQ_COMPATIBILITY") == "all":
    PAIRS += [
        ("rocketmq", "java-4.9.8"),
        ("rocketmq", "java-5.3.3"),
        ("rocketmq", "go-2.1.2"),
        ("sluicemq", "python-aio"),
        ("sluicemq", "python-sync"),
        ("sluicemq", "python-rocketmq"),
    ]

# What a client cannot do, by the name of the test and the beginning of the client's name;
# conftest.py leaves those pairs out.
CANNOT = {
    ("lite_pull_consumer_assigns", "go"): "the Go client has no assignment",
    ("lite_pull_consumer_subscribes_by_sql92", "go"): (
        "the Go pull consumer sends every expression as TAG (pull_consumer.go of v2.1.2)"
    ),
    ("broadcasting", "python"): "our client has no broadcasting yet",
    ("push_consumer", "python-sync"): "the blocking shell has no push consumer",
    (
        "lite_pull_consumer_assigns",
        "python-sync",
    ): "the blocking shell reads ranges, it commits nothing",
    ("async", "python-sync"): "the blocking shell has no asynchronous send",
}
COUNT = 60
TAGS = ("red", "green", "blue")
SQL = "parity = 'even' AND n BETWEEN 10 AND 49 AND TAGS <> 'blue'"


@dataclass
class Pair:
    """A client driver pointed at a cluster, with topics of 60 tagged messages it made."""

    name: str
    driver: Driver
    name_server: str
    topics: dict[str, list[Event]] = field(default_factory=dict)

    def call(self, command: str, **options: object) -> list[Event]:
        return self.driver.call(command, ns=self.name_server, **options)

    def topic(self, what: str) -> str:
        return f"T_{what}_{self.name}".replace(".", "_")

    def send(self, mode: str, count: int = COUNT) -> list[Event]:
        """The `sent` events of the topic of that mode, sent now when it has none yet."""
        if mode not in self.topics:
            self.topics[mode] = self.call(
                "send",
                mode=mode,
                topic=self.topic(mode),
                count=count,
                prefix=mode,
                tags=",".join(TAGS),
            )
        return self.topics[mode]

    def group(self, what: str) -> str:
        return f"G_{what}_{self.name}".replace(".", "_")

    def consume(
        self, command: str, what: str, expect: Iterable[str], mode: str = "sync", **options: object
    ) -> list[Event]:
        """Consume the topic of that mode as a new group and get exactly the bodies `expect`."""
        expected = list(expect)
        group = self.group(f"{command}_{what}")
        if self.name == "python-sync":
            command = "lite"  # its only way to consume: whole queues, as Spark reads them
        times = int(str(options.pop("copies", 1)))
        events = self.call(
            command,
            topic=self.topic(mode),
            group=group,
            expect=len(expected),
            timeout_s=20,
            **options,
        )
        received = [event for event in events if event["event"] == "got"]
        assert_exact(
            received, expected, times, [event for event in events if event["event"] == "incomplete"]
        )
        return received


@pytest.fixture(scope="session", params=PAIRS, ids=lambda pair: f"{pair[1]}-to-{pair[0]}")
def pair(
    request: pytest.FixtureRequest,
    cluster: Callable[[str], Cluster],
    driver: Callable[[str], Driver],
) -> Pair:
    kind, client = request.param
    return Pair(client, driver(client), cluster(kind).name_server)


def assert_exact(
    received: list[Event], expected: list[str], times: int, incomplete: list[Event]
) -> None:
    counts = Counter(event["body"] for event in received)
    missing = [body for body in expected if counts[body] < times]
    surplus = {
        body: count for body, count in counts.items() if body not in expected or count > times
    }
    assert not missing, f"missing {missing}, {incomplete}"
    assert not surplus, f"not expected, or more than {times} times: {surplus}"


def bodies(mode: str, keep: Callable[[int], bool] = lambda number: True) -> list[str]:
    return [f"{mode}-{number}" for number in range(COUNT) if keep(number)]


def by_sql(number: int) -> bool:
    """What SQL selects, in Python."""
    return number % 2 == 0 and 10 <= number <= 49 and TAGS[number % 3] != "blue"


@pytest.mark.parametrize("mode", ["sync", "async", "oneway", "batch"])
def test_what_was_sent_is_consumed_exactly_once(pair: Pair, mode: str) -> None:
    sent = pair.send(mode)
    assert sorted(event["body"] for event in sent) == sorted(bodies(mode))
    if mode != "oneway":
        assert {event["status"] for event in sent} == {"SEND_OK"}
    received = pair.consume("push", "all", bodies(mode), mode)
    if mode in (
        "sync",
        "async",
    ):  # the answer of a send names the place where a consumer finds the message
        places = {event["body"]: (event["queue"], event["offset"]) for event in sent}
        assert {event["body"]: (event["queue"], event["offset"]) for event in received} == places


def test_a_message_arrives_as_it_was_sent(pair: Pair) -> None:
    identities = {event["body"]: event["msg_id"] for event in pair.send("sync")}
    for event in pair.consume("push", "whole", bodies("sync")):
        number = int(event["body"].rpartition("-")[2])
        assert event["tag"] == TAGS[number % 3]
        assert event["keys"] == f"k-{number}"
        assert event["properties"]["n"] == str(number)
        assert event["properties"]["name"] == "h\u00e9\u4e2d"
        assert event["msg_id"] == identities[event["body"]]
        assert event["reconsumed"] == 0


def test_messages_over_the_compression_limit_arrive_whole(pair: Pair) -> None:
    size = 6000
    pair.call("send", topic=pair.topic("large"), count=3, prefix="large", size=size)
    expected = [f"large-{number}".ljust(size, ".") for number in range(3)]
    pair.consume("push", "large", expected, "large")


def test_push_consumer_filters_by_tags(pair: Pair) -> None:
    pair.send("sync")
    pair.consume("push", "tags", bodies("sync", lambda n: n % 3 != 1), tag="red || blue")


def test_push_consumer_filters_by_sql92(pair: Pair) -> None:
    pair.send("sync")
    pair.consume("push", "sql", bodies("sync", by_sql), sql=SQL)


def test_two_push_consumers_of_a_group_share_the_messages(pair: Pair) -> None:
    # Makes the topic. A message that is there while the two divide the queues may come twice, so
    # the tag hides it.
    pair.call("send", topic=pair.topic("shared"), count=1, prefix="before", tags="hidden")
    made = {"count": COUNT, "prefix": "shared", "tags": ",".join(TAGS)}
    received = pair.consume(
        "push", "shared", bodies("shared"), "shared", tag=" || ".join(TAGS), instances=2, **made
    )
    counts = Counter(event["consumer"] for event in received)
    assert min(counts[0], counts[1]) >= COUNT // 4, f"one consumer had nearly all: {counts}"


def test_broadcasting_gives_every_consumer_everything(pair: Pair) -> None:
    pair.send("sync")
    received = pair.consume(
        "push", "broadcast", bodies("sync"), model="broadcasting", instances=2, copies=2
    )
    assert Counter(event["consumer"] for event in received) == {0: COUNT, 1: COUNT}


def test_lite_pull_consumer_subscribes_by_tags(pair: Pair) -> None:
    pair.send("sync")
    pair.consume("lite", "tags", bodies("sync", lambda n: n % 3 == 1), tag="green")


def test_lite_pull_consumer_subscribes_by_sql92(pair: Pair) -> None:
    pair.send("sync")
    pair.consume("lite", "sql", bodies("sync", by_sql), sql=SQL)


def test_lite_pull_consumer_assigns_seeks_and_commits(pair: Pair) -> None:
    sent = pair.send("sync")
    ends = Counter(event["queue"] for event in sent)
    events = pair.call(
        "lite",
        mode="assign",
        topic=pair.topic("sync"),
        group=pair.group("assign"),
        expect=COUNT,
        timeout_s=20,
    )
    received = [event for event in events if event["event"] == "got"]
    assert_exact(received, bodies("sync"), 1, [])
    committed = {
        event["queue"]: event["offset"] for event in events if event["event"] == "committed"
    }
    assert {queue: committed[queue] for queue in ends} == dict(ends)
