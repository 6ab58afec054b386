"""How groups consume, as somebody sees it who opens and closes consumers: on exact sets.

The clients of RocketMQ against our broker, ours against the real one; the words of the drivers are
in consuming_driver.py.
"""

import time
from collections import Counter
from collections.abc import Callable

import pytest
from peer.clusters import Cluster
from peer.drivers import Driver, Event
from peer.sessions import CROSS_PAIRS, PAIRS, Sessions, bodies, bodies_of, named

from thorough import ALL

CANNOT = {
    ("lite", "go"): "the Go client has neither assignment nor seek",
    ("subscription", "go"): "its next heartbeat, up to 30 s later, tells the broker",
    ("young", "python"): "ours begins where it is told; young_from_first is Java's rule",
    ("thresholds", "java-4"): "the newer one is enough",
    ("begins_at_the_first_message_the_last", "java-4"): "the newer one is enough",
    ("begins_at_the_first_message_the_last", "java-5.3.3-to-rocketmq"): (
        "the real broker says 0 as long as nothing was deleted"
    ),
    ("begins_at_the_first_message_the_last", "go-2.1.2-to-rocketmq"): "so it does",
    ("young", "java-4"): "the newer one is enough",
    ("subscription", "java-4"): "the newer one is enough",
}
BALANCE_MS = 2_000  # a notice and a rebalance, on a machine that does something else too


@pytest.fixture(
    scope="session",
    params=PAIRS + CROSS_PAIRS if ALL else [("sluicemq", "java-5.3.3"), ("sluicemq", "go-2.1.2")],
    ids=lambda pair: f"{pair[1]}-to-{pair[0]}",
)
def places(request: pytest.FixtureRequest) -> tuple[str, str]:
    kind, client = request.param
    return kind, client


@pytest.fixture
def mq(
    places: tuple[str, str],
    cluster: Callable[[str], Cluster],
    driver: Callable[[str], Driver],
) -> Sessions:
    kind, client = places
    return Sessions(client, driver(f"consuming-{client}"), cluster(kind).name_server)


@pytest.fixture
def old(
    places: tuple[str, str],
    cluster: Callable[[str], Cluster],
    driver: Callable[[str], Driver],
) -> Sessions:
    """At a broker that counts every message as old."""
    kind, client = places
    return Sessions(client, driver(f"consuming-{client}"), cluster(f"{kind}-timed").name_server)


def test_each_of_two_broadcasting_consumers_gets_everything_and_goes_on_after_a_restart(
    mq: Sessions,
) -> None:
    mq.send("loud", "one", 20)
    for name in ("a", "b"):
        mq.open(name, "loud", model="broadcasting", instance=f"loud-{name}")
    received = mq.take("a", "b", expect=bodies("one", 20) * 2)
    assert Counter(event["consumer"] for event in received) == {"a": 20, "b": 20}
    mq.close("b")
    mq.send("loud", "two", 20)
    mq.take("a", expect=bodies("two", 20))
    mq.open("b", "loud", model="broadcasting", instance="loud-b")
    mq.take("b", expect=bodies("two", 20))
    mq.close("a", "b")


def test_members_share_every_message_once_when_one_joins_and_when_it_leaves(mq: Sessions) -> None:
    mq.send("shared", "before", 1)
    mq.open("a", "shared")
    mq.take("a", expect=["before-0"])
    if not mq.client.startswith("go"):  # it commits by itself after 10 s, not when told
        mq("commit", name="a")
    mq.open("b", "shared")
    repeated = mq("take", names="a,b", settle_ms=BALANCE_MS)
    assert set(bodies_of(named(repeated, "got"))) <= (
        {"before-0"} if mq.client.startswith("go") else set()
    )
    mq.send("shared", "both", 60)
    received = mq.take("a", "b", expect=bodies("both", 60))
    assert Counter(event["consumer"] for event in received) == {"a": 30, "b": 30}
    owners = {(event["queue"], event["consumer"]) for event in received}
    assert len(owners) == len({queue for queue, _ in owners}) == 4
    mq.close("b")
    mq.take("a", settle_ms=BALANCE_MS)
    mq.send("shared", "alone", 60)
    mq.take("a", expect=bodies("alone", 60))
    mq.close("a")


def test_a_listener_gets_lists_of_one_queue_up_to_the_batch_size(mq: Sessions) -> None:
    mq.send("lists", "m", 48)
    mq.open("a", "lists", batch=5)
    calls: dict[int, list[Event]] = {}
    for event in mq.take("a", expect=bodies("m", 48)):
        calls.setdefault(event["call"], []).append(event)
    assert max(map(len, calls.values())) == 5
    for messages in calls.values():
        offsets = [event["offset"] for event in messages]
        assert len({event["queue"] for event in messages}) == 1
        assert offsets == sorted(offsets)
    mq.close("a")


def test_a_new_group_begins_at_the_first_message_the_last_one_or_a_time(old: Sessions) -> None:
    old.send("start", "old", 12)
    time.sleep(2.1 - time.time() % 1)  # to a whole second: Java's and Go's times have no smaller
    now_ms = int(time.time()) * 1000
    old.send("start", "mid", 12)
    for where in ("first", "last", now_ms):
        name = "time" if isinstance(where, int) else where
        old.open(name, "start", group=f"start_{name}", **{"from": where})
    old.take("first", expect=bodies("old", 12) + bodies("mid", 12))
    old.take("time", expect=bodies("mid", 12))
    old.take("last", settle_ms=500)
    old.send("start", "new", 12)
    for name in ("first", "last", "time"):
        old.take(name, expect=bodies("new", 12), settle_ms=200)
    old.close("first", "last", "time")


def test_a_new_group_begins_at_the_first_message_of_a_young_queue_whatever_it_says(
    mq: Sessions,
) -> None:
    mq.send("young", "m", 12)
    mq.open("a", "young", **{"from": "last"})
    mq.take("a", expect=bodies("m", 12))
    mq.close("a")


def test_nothing_is_lost_between_small_thresholds(mq: Sessions) -> None:
    mq.send("narrow", "m", 120)
    mq.open(
        "a", "narrow", count_max=4, span_max=6, pull_count=3, topic_count_max=8, size_max_mib=1,
        hold_ms=4,
    )  # fmt: skip
    mq.take("a", expect=bodies("m", 120))
    mq.close("a")


def test_another_subscription_holds_from_now_on(mq: Sessions) -> None:
    mq.send("tags", "one", 20, tags="red,green")
    mq.open("a", "tags", tag="red")
    mq.take("a", expect=[f"one-{n}" for n in range(0, 20, 2)])
    mq("change", name="a", topic=mq.name("tags"), tag="green")
    # What a Java client has asked for already is filtered by the old expression, there: wake it.
    mq.send("tags", "flush", 8, tags="red")
    mq.take("a", settle_ms=500)
    mq.send("tags", "two", 20, tags="red,green")
    mq.take("a", expect=[f"two-{n}" for n in range(1, 20, 2)])
    mq.close("a")


def test_a_pull_consumer_is_told_what_there_is_and_where_to_go_on(mq: Sessions) -> None:
    sent = mq.send("pulled", "m", 12)
    first = [event["body"] for event in sent if event["queue"] == 0]
    assert len(first) == 3
    where = {
        "topic": mq.name("pulled"),
        "group": mq.name("pulled"),
        "broker": sent[0].get("broker"),
    }

    def pulled(**options: str) -> list[tuple[str, int, str]]:
        events = named(mq("pull", **where, **options), "pulled")
        return [(event["status"], event["next"], event["bodies"]) for event in events]

    assert pulled(offsets="0,2,3,100") == [
        ("FOUND", 3, ",".join(first)),
        ("FOUND", 3, first[2]),
        ("NO_NEW_MSG", 3, ""),
        ("OFFSET_ILLEGAL", 3, ""),
    ]
    assert pulled(offsets="0", tag="other") == [("NO_MATCHED_MSG", 3, "")]


# ---- lite pull: 40 messages in 4 queues, with messages of later waves after them


def offsets(mq: Sessions, command: str, what: str, **options: object) -> dict[int, int]:
    events = mq(command, name="a", topic=mq.name(what), **options)
    return {event["queue"]: event["offset"] for event in named(events, "offset")}


def everywhere(offset: int) -> dict[int, int]:
    return dict.fromkeys(range(4), offset)


def test_a_lite_pull_consumer_seeks_and_finds_offsets_of_times(mq: Sessions) -> None:
    sent = mq.send("seek", "one", 40)
    time.sleep(0.02)
    between_ms = time.time_ns() // 1_000_000
    time.sleep(0.02)
    topic = {"name": "a", "topic": mq.name("seek")}
    mq.open("a", "seek", kind="lite", assign=1)
    mq.take("a", expect=bodies("one", 40))
    mq("seek", queue=2, offset=5, **topic)
    tail = [event["body"] for event in sent if event["queue"] == 2 and event["offset"] >= 5]
    assert len(tail) == 5
    mq.take("a", expect=tail)
    mq("begin", **topic)
    mq.take("a", expect=bodies("one", 40))
    mq("begin", **topic)
    mq("end", **topic)
    mq.send("seek", "two", 8)
    mq.take("a", expect=bodies("two", 8))
    assert offsets(mq, "at", "seek", time_ms=between_ms) == everywhere(10)
    assert offsets(mq, "at", "seek", time_ms=sent[0]["at_ms"] - 1000) == everywhere(0)
    mq.close("a")


def test_a_lite_pull_consumer_pauses_and_resumes(mq: Sessions) -> None:
    mq.send("pause", "one", 8)
    topic = {"name": "a", "topic": mq.name("pause")}
    mq.open("a", "pause", kind="lite", assign=1)
    mq.take("a", expect=bodies("one", 8))
    mq("pause", **topic)
    # What a Java client has asked for already still comes: a message of each queue.
    mq.send("pause", "two", 8)
    early = bodies_of(named(mq("take", names="a", settle_ms=700), "got"))
    mq.send("pause", "three", 8)
    mq.take("a", settle_ms=700)
    mq("resume", **topic)
    late = [body for body in bodies("two", 8) if body not in early]
    mq.take("a", expect=[*late, *bodies("three", 8)])
    mq.close("a")


def test_a_lite_pull_consumer_commits_when_told_and_by_itself(mq: Sessions) -> None:
    mq.send("commit", "one", 40)
    mq.open("a", "commit", kind="lite", assign=1)
    mq.take("a", expect=bodies("one", 40))
    mq("commit", name="a", topic=mq.name("commit"))
    assert offsets(mq, "committed", "commit") == everywhere(10)
    mq.send("commit", "two", 8)
    mq.take("a", expect=bodies("two", 8))  # not committed
    mq.close("a")
    mq.open("b", "commit", kind="lite", auto=1)
    mq.take("b", expect=bodies("two", 8), settle_ms=1_500)  # polls that find nothing commit
    mq.close("b")
    mq.open("c", "commit", kind="lite")
    mq.take("c", settle_ms=700)
    mq.close("c")
