"""Unmodified clients of RocketMQ against our broker, and our clients against the real one: one
suite, exact sets.

`PAIRS` says who talks to whom. SLUICEMQ_TESTS=all adds the pairs that prove the drivers
themselves: the real clients against the real broker, and ours against ours.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from peer.clusters import Cluster
from peer.drivers import Driver, Event
from peer.names import own

from sluicemq.client.sync.admin import Admin
from thorough import ALL

PAIRS = [
    ("sluicemq", "java-4.9.8"),
    ("sluicemq", "java-5.3.3"),
    ("sluicemq", "go-2.1.2"),
    ("rocketmq", "python-aio"),
]
if ALL:
    PAIRS += [
        ("rocketmq", "python-sync"),
        ("rocketmq", "python-rocketmq"),
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
    ("retried", "python-sync"): "the blocking shell has no push consumer",
    ("in_order", "python-sync"): "the blocking shell has no push consumer",
    (
        "lite_pull_consumer_assigns",
        "python-sync",
    ): "the blocking shell reads ranges, it commits nothing",
    ("without_a_listener", "go"): "a Java producer is enough",
    ("without_a_listener", "python"): "the real broker keeps on asking it",
    ("async", "python-sync"): "the blocking shell has no asynchronous send",
}
if not ALL:
    CANNOT |= {
        (words, "java-4.9.8"): "the newer one is enough"
        for words in (
            "broadcasting", "lite_pull_consumer_assigns", "lite_pull_consumer_subscribes_by_tags",
            "two_push_consumers", "filters_by_tags", "without_a_listener", "compression",
            "in_order_becomes_a_dead_letter", "one_of_its_group_that_is_gone",
        )
    }  # fmt: skip
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
        return own(f"T_{what}_{self.name}".replace(".", "_"))

    def send(self, mode: str, count: int = COUNT) -> list[Event]:
        """The `sent` events of the topic of that mode, sent now when it has none yet."""
        topic = self.topic(mode)
        if topic not in self.topics:
            self.topics[topic] = self.call(
                "send",
                mode=mode,
                topic=topic,
                count=count,
                prefix=mode,
                tags=",".join(TAGS),
            )
        return self.topics[topic]

    def group(self, what: str) -> str:
        return own(f"G_{what}_{self.name}".replace(".", "_"))

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


# ---- retries, dead letters and order: the first `fail` deliveries of each message fail


def failing(
    pair: Pair, what: str, deliveries: int, keyed: int | None = None, **options: object
) -> tuple[str, list[Event]]:
    """Six messages of a topic of their own, handled until `deliveries` have been made in all."""
    topic, group = pair.topic(what), pair.group(what)
    pair.call("send", topic=topic, count=6, prefix=what, keyed=keyed)
    events = pair.call("push", topic=topic, group=group, expect=deliveries, timeout_s=60, **options)
    assert not [event for event in events if event["event"] == "incomplete"]
    return group, [event for event in events if event["event"] == "got"]


def deliveries_of(received: list[Event]) -> dict[str, list[int]]:
    """Body -> how often it had come before, delivery by delivery."""
    found: dict[str, list[int]] = {}
    for event in received:
        found.setdefault(event["body"], []).append(event["reconsumed"])
    return found


def dead_letters(pair: Pair, group: str, expect: int) -> list[str]:
    events = pair.call(
        "push", topic=f"%DLQ%{group}", group=f"{group}_dead", expect=expect, timeout_s=20
    )
    return sorted(event["body"] for event in events if event["event"] == "got")


def test_a_failed_message_is_retried_and_comes_under_its_own_topic(pair: Pair) -> None:
    # Go's client would find the topic of the retries after 30 s, as it does in the next test.
    if pair.name.startswith("go"):
        with Admin(pair.name_server) as admin:
            admin.create_topic(f"%RETRY%{pair.group('retried')}", queues=1)
    _, received = failing(pair, "retried", 12, fail=1, level=1)
    assert deliveries_of(received) == {f"retried-{n}": [0, 1] for n in range(6)}
    assert {event["topic"] for event in received} == {pair.topic("retried")}


def test_a_message_that_is_retried_too_often_becomes_a_dead_letter(pair: Pair) -> None:
    group, received = failing(pair, "buried", 12, fail=99, level=1, max=1)
    assert deliveries_of(received) == {f"buried-{n}": [0, 1] for n in range(6)}
    assert dead_letters(pair, group, 6) == [f"buried-{n}" for n in range(6)]


def test_messages_of_a_key_are_handled_in_order_although_they_fail(pair: Pair) -> None:
    _, received = failing(pair, "ordered", 12, keyed=3, fail=1, orderly=1)
    assert deliveries_of(received) == {f"ordered-{n}": [0, 1] for n in range(6)}
    by_key: dict[int, list[int]] = {}
    for event in received:
        number = int(event["body"].rpartition("-")[2])
        by_key.setdefault(number % 3, []).append(number)
    assert by_key == {key: [key, key, key + 3, key + 3] for key in range(3)}


def test_what_fails_too_often_in_order_becomes_a_dead_letter(pair: Pair) -> None:
    # The Go client allows one retry more than it is told (checkReconsumeTimes of v2.1.2).
    times = 3 if pair.name.startswith("go") else 2
    group, received = failing(pair, "given_up", 6 * times, keyed=3, fail=99, orderly=1, max=1)
    assert deliveries_of(received) == {f"given_up-{n}": list(range(times)) for n in range(6)}
    assert dead_letters(pair, group, 6) == [f"given_up-{n}" for n in range(6)]


# ---- transactions


def transact(pair: Pair, what: str, prefix: str, **options: object) -> list[Event]:
    """Run a producer; the bodies of the messages whose transactions were checked."""
    events = pair.call(
        "transact", topic=pair.topic(what), group=pair.group(what), prefix=prefix, **options
    )
    assert not [event for event in events if event["event"] == "incomplete"]
    sent_ids = {event["body"]: event["msg_id"] for event in events if event["event"] == "sent"}
    checked = [event for event in events if event["event"] == "checked"]
    assert {event["topic"] for event in checked} <= {pair.topic(what)}
    for event in checked:
        assert event["msg_id"] == sent_ids.get(event["body"], event["msg_id"])
    return [event["body"] for event in checked]


def test_only_messages_of_committed_transactions_are_consumed(pair: Pair) -> None:
    checked = transact(
        pair, "transact", "tx", count=8, outcomes="commit,rollback,unknown,unknown",
        checks="rollback,rollback,commit,rollback", expect=4,
    )  # fmt: skip
    assert sorted(checked) == ["tx-2", "tx-3", "tx-6", "tx-7"]
    expected = ["tx-0", "tx-2", "tx-4", "tx-6"]
    pair.consume("push", "transact", expected, "transact")


def test_a_producer_answers_for_one_of_its_group_that_is_gone(pair: Pair) -> None:
    assert transact(pair, "orphans", "gone", count=3, outcomes="unknown") == []
    checked = transact(
        pair, "orphans", "here", count=1, checks="commit,rollback,commit", expect=3
    )  # fmt: skip
    assert sorted(checked) == ["gone-0", "gone-1", "gone-2"]
    pair.consume("push", "orphans", ["gone-0", "gone-2", "here-0"], "orphans")


def test_a_producer_without_a_listener_does_not_keep_checks_from_the_others(pair: Pair) -> None:
    checked = transact(pair, "mute", "asked", count=6, outcomes="unknown", expect=6, mute=1)
    assert sorted(checked) == [f"asked-{n}" for n in range(6)]
    pair.consume("push", "mute", ["mute", *(f"asked-{n}" for n in range(6))], "mute")
