"""Messages that wait: levels, times, taking back, and what a consumer and an index see of them.

All scenarios of a pair are sent first (`waiting`); then each test waits for its own, so that a pair
takes as long as its longest delay. Each message is delivered once, never early and not much too
late.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from peer.clusters import Cluster
from peer.drivers import Driver, Event
from peer.sessions import CROSS_PAIRS, PAIRS, Sessions, bodies, named

from thorough import ALL

CANNOT = {
    ("at_its_time", "java-4"): "it knows levels alone",
    ("after_its_time", "java-4"): "it knows levels alone",
    ("taken_back", "java-4"): "it knows levels alone",
    ("taken_back_come", "go"): "this client has no recall",
    ("taken_back", "go"): "this client has no recall",
    ("batch", "go"): "this client does not look, and brokers store such a batch without delay",
    ("key", "go"): "the Go client cannot ask the index",
}
DEFAULT_LEVELS_S = {"1": 1, "2": 5, "3": 10}
LEVELS_S = {"1": 1, "2": 2, "3": 3}
LATE_MS = 3_000  # the machine does something else too; precision is measured by benchmarks
EARLY_MS = {"sluicemq": 3, "rocketmq": 1_000}  # clocks of two processes; its timerPrecisionMs


@dataclass(frozen=True)
class Waiting:
    """What was sent, by scenario, and the answers to recalls."""

    mq: Sessions
    kind: str
    default: Sessions
    sent: dict[str, list[Event]]
    taken: list[list[Event]]


@pytest.fixture(
    scope="module",
    params=PAIRS + CROSS_PAIRS if ALL else [("sluicemq", "java-5.3.3")],
    ids=lambda pair: f"{pair[1]}-to-{pair[0]}",
)
def waiting(
    request: pytest.FixtureRequest,
    cluster: Callable[[str], Cluster],
    driver: Callable[[str], Driver],
) -> Waiting:
    kind, client = request.param
    running = driver(f"consuming-{client}")
    default = Sessions(client, running, cluster(kind).name_server)
    mq = Sessions(client, running, cluster(f"{kind}-timed").name_server)
    sent = {"ladder": send_and_open(default, "ladder", levels="1,2,3")}
    sent["levels"] = send_and_open(mq, "levels", levels="1,2,3")
    sent["sql"] = send_and_open(mq, "sql", open_with={"sql": "n >= 6"}, levels="1,2")
    taken: list[list[Event]] = []
    if client != "java-4.9.8":
        sent["after"] = send_and_open(mq, "after", delays_ms="1500,2500")
        soon_ms = time.time_ns() // 1_000_000 + 2_500
        sent["times"] = send_and_open(mq, "times", times_ms=f"{soon_ms},{soon_ms - 600_000}")
        sent["recall"] = send_and_open(mq, "recall", count=4, delays_ms="4000")
        taken = [
            mq("recall", topic=mq.name("recall"), handle=event["handle"])
            for event in sent["recall"][:2]  # at once: they are due soon, and tests have no order
            if not client.startswith("go")
        ]
    return Waiting(mq, kind, default, sent, taken)


def send_and_open(
    mq: Sessions, what: str, *, count: int = 12, open_with: dict[str, str] | None = None,
    **times: str,
) -> list[Event]:  # fmt: skip
    """A message that waits for nothing makes the topic; then its consumer, then those that wait."""
    mq.send(what, "before", 1)
    mq.open(f"{what}@{mq.name_server}", what, **(open_with or {}))
    return mq.send(what, what, count, **times)


def delays_ms(waiting: Waiting, mq: Sessions, what: str, expect: list[str]) -> dict[str, int]:
    """Takes exactly what was sent, and the one before; body -> ms from send to delivery."""
    before = [] if what == "sql" else ["before-0"]
    name = f"{what}@{mq.name_server}"
    received = mq.take(name, expect=[*before, *expect], settle_ms=200)
    mq.close(name)
    begun = {event["body"]: event["at_ms"] for event in waiting.sent[what]}
    return {
        event["body"]: event["at_ms"] - begun[event["body"]]
        for event in received
        if event["body"] in begun
    }


def assert_in_time(waiting: Waiting, delays: dict[str, int], due_ms: Callable[[int], int]) -> None:
    early_ms = EARLY_MS[waiting.kind]
    for body, delay_ms in delays.items():
        due = due_ms(int(body.rpartition("-")[2]))
        assert due - early_ms <= delay_ms <= due + LATE_MS, (body, due, delay_ms)


def test_a_batch_with_a_delay_is_refused(waiting: Waiting) -> None:
    mq = waiting.mq
    events = mq("send", topic=mq.name("levels"), count=3, prefix="batch", levels=1, mode="batch")
    assert [event["event"] for event in events] == ["refused"]


def test_a_message_that_is_taken_back_does_not_come(waiting: Waiting) -> None:
    mq, sent = waiting.mq, waiting.sent["recall"]
    topic = mq.name("recall")
    for event, taken in zip(sent, waiting.taken, strict=False):
        assert [(one["event"], one["msg_id"]) for one in taken] == [("recalled", event["msg_id"])]
    nonsense = mq("recall", topic=topic, handle="bm9uc2Vuc2U=")
    assert [event["event"] for event in nonsense] == ["refused"]


def test_a_message_of_a_custom_level_comes_after_its_time(waiting: Waiting) -> None:
    delays = delays_ms(waiting, waiting.mq, "levels", bodies("levels", 12))
    assert_in_time(waiting, delays, lambda n: 1000 * LEVELS_S[str(n % 3 + 1)])


def test_a_message_comes_once_after_its_delay_in_milliseconds_after_its_time(
    waiting: Waiting,
) -> None:
    delays = delays_ms(waiting, waiting.mq, "after", bodies("after", 12))
    assert_in_time(waiting, delays, lambda n: (1500, 2500)[n % 2])


def test_a_message_comes_at_its_time_and_at_once_when_that_is_over(waiting: Waiting) -> None:
    delays = delays_ms(waiting, waiting.mq, "times", bodies("times", 12))
    early = EARLY_MS[waiting.kind]
    assert max(delays[f"times-{n}"] for n in range(1, 12, 2)) <= LATE_MS
    # Sent within a second after the time was computed.
    assert min(delays[f"times-{n}"] for n in range(0, 12, 2)) >= 1_500 - early
    assert max(delays[f"times-{n}"] for n in range(0, 12, 2)) <= 2_500 + LATE_MS


def test_a_delayed_message_is_filtered_by_its_properties(waiting: Waiting) -> None:
    delays = delays_ms(waiting, waiting.mq, "sql", bodies("sql", 12)[6:])
    assert_in_time(waiting, delays, lambda n: 1000 * LEVELS_S[str(n % 2 + 1)])


def test_a_delayed_message_is_found_once_by_its_key(waiting: Waiting) -> None:
    mq = waiting.mq
    found = mq("query", topic=mq.name("levels"), key="levels-k-2", expect=1)
    assert [(event["body"], event["topic"]) for event in named(found, "found")] == [
        ("levels-2", mq.name("levels"))
    ]


def test_those_that_were_not_taken_back_come(waiting: Waiting) -> None:
    delays = delays_ms(waiting, waiting.mq, "recall", bodies("recall", 4)[2:])
    assert_in_time(waiting, delays, lambda n: 4000)


def test_a_message_of_a_default_level_comes_after_its_time(waiting: Waiting) -> None:
    delays = delays_ms(waiting, waiting.default, "ladder", bodies("ladder", 12))
    assert_in_time(waiting, delays, lambda n: 1000 * DEFAULT_LEVELS_S[str(n % 3 + 1)])
