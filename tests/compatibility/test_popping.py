"""Popping: the unmodified Java consumer that pops, and stores that change hands meanwhile.

The consumer (clientRebalance=false) asks the broker what to read, and pops where request 401 has
said so. What it fails comes again when the time for which it is to be hidden is over. It makes no
dead letters: what has failed too often is hidden longer and longer, and dropped when it is twice as
old as the last step (spec/delivery.md §7).
"""

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest
from peer import drivers
from peer.beside import side_by_side
from peer.clusters import Cluster
from peer.drivers import Driver, DriverFailedError, Event
from peer.names import own
from peer.popping import Popped, Raw, bodies, now_ms
from peer.stores import KILL, NORMAL, await_text, house
from peer.toolchain import HERE

from conftest import missing_tool_is_a_reason
from sluicemq.model.ids import parse_host
from thorough import ALL
from waiting import wait_for

KINDS = ["sluicemq", *(["rocketmq"] if ALL else [])]


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with missing_tool_is_a_reason():
        source = HERE / "java" / "Delivery.java"
        directory = tmp_path_factory.mktemp("popping")
        driver = drivers.java_driver("client-5.3.3", directory, source=source)
    yield driver
    driver.close()


class Place:
    """A topic and a group that pops it, on a cluster of a kind."""

    def __init__(self, cluster: Cluster, driver: Driver, name: str, queues: int = 4) -> None:
        self.cluster, self._driver = cluster, driver
        self.topic, self.group = own(f"T_pop_{name}"), own(f"G_pop_{name}")
        self.raw = Raw(parse_host(cluster.broker))
        self.raw.topic(self.topic, queues)
        self.raw.group(self.group)
        mode = {"topic": self.topic, "consumerGroup": self.group, "mode": "POP"}
        body = json.dumps(mode | {"popShareQueueNum": 0}).encode()
        assert self.raw.call(401, None, body).code == 0

    def pop(self, **options: object) -> list[Event]:
        """What the consumers got. `step`: seconds until what failed comes again."""
        events = self._driver.call(
            "pop", ns=self.cluster.name_server, topic=self.topic, group=self.group,
            **{"step": 1, "timeout_s": 60, **options},
        )  # fmt: skip
        assert not [event for event in events if event["event"] == "incomplete"], events
        return [event for event in events if event["event"] == "got"]

    def has_left(self) -> int:
        """How many messages a further pop finds, now or within a second."""
        return len(self.raw.pop(self.topic, self.group, queueId=-1, pollTime=1000))


@pytest.fixture(params=KINDS)
def place(
    request: pytest.FixtureRequest, cluster: Callable[[str], Cluster], java: Driver
) -> Iterator[Callable[[str], Place]]:
    with ExitStack() as stack:

        def make(name: str) -> Place:
            made = Place(cluster(request.param), java, name)
            stack.callback(made.raw.close)
            return made

        yield make


# ---- the consumer


def test_two_consumers_get_every_message_once(place: Callable[[str], Place]) -> None:
    here = place("exact")
    got = here.pop(instances=2, count=60, expect=60)
    assert sorted(event["body"] for event in got) == sorted(f"m-{n}" for n in range(60))
    assert {event["reconsumed"] for event in got} == {0}
    assert {event["topic"] for event in got} == {here.topic}
    assert here.has_left() == 0


def test_what_fails_comes_again(place: Callable[[str], Place]) -> None:
    here = place("again")
    got = here.pop(count=6, fail=2, expect=18)
    rounds: dict[str, list[int]] = {}
    for event in got:
        rounds.setdefault(event["body"], []).append(event["reconsumed"])
    assert rounds == {f"m-{n}": [0, 1, 2] for n in range(6)}
    assert {event["topic"] for event in got} == {here.topic}, "never the topic of the retries"
    assert here.has_left() == 0


def test_what_fails_for_good_is_dropped_and_is_no_dead_letter(
    place: Callable[[str], Place],
) -> None:
    here = place("drop")
    got = here.pop(count=1, fail=99, max=1, expect=2)
    assert [event["reconsumed"] for event in got] == [0, 1]
    dead = here.raw.call(351, {"topic": f"%DLQ%{here.group}"})
    assert dead.code != 0, "there is no such topic"


@pytest.mark.parametrize(("tag", "sql"), [("kept", None), ("nothing", None), (None, "n >= 7")])
def test_filters(place: Callable[[str], Place], tag: str | None, sql: str | None) -> None:
    here = place(f"filter{tag or 'sql'}")
    wanted = [n for n in range(10) if tag == "kept" or (sql and n >= 7)]
    options = {name: value for name, value in (("tag", tag), ("sql", sql)) if value}
    got = here.pop(count=10, expect=len(wanted), **options)
    assert sorted(event["body"] for event in got) == [f"m-{n}" for n in wanted]
    assert here.has_left() in (0, 10 - len(wanted)), "the last pop here wants everything"


def test_a_consumer_that_dies_holds_nothing_for_longer_than_it_was_told(
    place: Callable[[str], Place], tmp_path: Path
) -> None:
    here = place("dies")
    here.raw.send(here.topic, 0, *(f"m-{n}" for n in range(8)), TAGS="A")
    source = HERE / "java" / "Delivery.java"
    dying, got = drivers.java_driver("client-5.3.3", tmp_path, source=source), list[Event]()

    def consume() -> None:
        with suppress(DriverFailedError):
            dying.call(
                "pop", ns=here.cluster.name_server, topic=here.topic, group=here.group, hide=5000,
                slow=60_000, expect=8, timeout_s=60, on_event=got.append,
            )  # fmt: skip

    life = threading.Thread(target=consume)
    life.start()
    wait_for(lambda: len(got) == 8)
    dying.kill()
    life.join()
    dying.close()
    again = here.pop(expect=8)
    assert {event["body"] for event in again} == {f"m-{n}" for n in range(8)}


# ---- a store that changes hands


HANDOVERS = {
    f"{first}-{second}-{word}": (first, second, stop)
    for first, second in (("java", "sluice"), ("sluice", "java"))
    for word, stop in (("normal", NORMAL), ("kill", KILL))
    if word == "kill" or ALL
}


@pytest.fixture(scope="module")
def handovers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], None]]:
    tmp_path_factory.getbasetemp()  # two threads that ask first would make two
    with side_by_side({
        name: partial(hand_over, tmp_path_factory, *words) for name, words in HANDOVERS.items()
    }) as found:  # fmt: skip
        yield found


@pytest.mark.parametrize("name", HANDOVERS)
def test_pops_in_flight_change_hands(handovers: Callable[[str], None], name: str) -> None:
    """Some are acknowledged before, some after with the handle of before, the rest comes again when
    its time is over and not before; and the same in order."""
    with missing_tool_is_a_reason():
        handovers(name)


def hand_over(paths: pytest.TempPathFactory, first: str, second: str, stop: signal.Signals) -> None:
    """Messages are hidden for longer when the next broker was not there in time."""
    hidden_ms = 45_000
    while not handed_over(paths.mktemp("handover"), first, second, stop, hidden_ms):
        hidden_ms *= 2
        assert hidden_ms < 400_000, "the machine is too slow for this test"


def handed_over(
    directory: Path, first: str, second: str, stop: signal.Signals, hidden_ms: int
) -> bool:
    """False when the next broker was not there in time."""
    with house(directory, "5.3.3") as place:
        with getattr(place, first)(stop), ExitStack() as stack:
            time.sleep(2)
            raw = stack.enter_context(Raw(parse_host(place.broker)))
            raw.topic("T", 1)
            raw.topic("Order", 1)
            raw.group("G")
            texts = [f"m{n}" for n in range(8)]
            raw.send("T", 0, *texts, TAGS="A")
            raw.send("Order", 0, *texts[:4], TAGS="A")
            due_ms = now_ms() + hidden_ms
            popped = raw.pop("T", "G", maxMsgNums=5, invisibleTime=hidden_ms)
            in_order = raw.pop(
                "Order", "G", maxMsgNums=2, invisibleTime=hidden_ms, order="true", attemptId="1"
            )
            assert (len(popped), len(in_order)) == (5, 2)
            assert raw.ack("G", popped[0]).code == 0
            assert raw.ack("G", in_order[0]).code == 0
            if stop == KILL:
                await_tables(place.store / "config")
        with getattr(place, second)(NORMAL), ExitStack() as stack:
            time.sleep(2)
            raw = stack.enter_context(Raw(parse_host(place.broker)))
            for topic, end in (("T", "8"), ("Order", "4")):  # Java builds queues after it serves
                wait_for(partial(ends_at, raw, topic, end))
            if now_ms() > due_ms - 5000:
                return False
            check_other_hands(raw, popped, in_order, due_ms)
            return True


def ends_at(raw: Raw, topic: str, end: str) -> bool:
    return (raw.call(30, {"topic": topic, "queueId": 0}).fields or {}).get("offset") == end


def await_tables(config: Path) -> None:
    """Until it is on disk, where the other broker looks, that there are the topics, that the first
    of two in order is acknowledged, and how far T was popped. The real broker writes what it knows
    of order every ten seconds; ours keeps a new topic in its journal for up to a second."""
    for name, wanted in (
        ("topics.json", '"Order"'),
        ("subscriptionGroup.json", '"G"'),  # Java drops what it reads of a group it does not know
        ("consumerOrderInfo.json", r'"cm":\s*1\b'),
        ("consumerOffset.json", r'"T@G":\s*{\s*"?0"?:\s*5\b'),
        ("consumerOffset.json", r'"Order@G":\s*{\s*"?0"?:\s*1\b'),
    ):
        await_text(config / name, wanted)


def pop_soon(raw: Raw, topic: str, **options: object) -> list[Popped]:
    """What there is. The real broker says that there is nothing while it has a queue locked."""
    found: list[Popped] = []
    wait_for(lambda: found.extend(raw.pop(topic, "G", **options)) or found)
    return found


def check_other_hands(raw: Raw, popped: list[Popped], in_order: list[Popped], due_ms: int) -> None:
    fresh = pop_soon(raw, "T", queueId=-1)
    assert [message.offset for message in fresh] == [5, 6, 7]
    assert raw.ack_all("G", fresh, "T").code == 0
    assert raw.ack("G", popped[1]).code == 0
    assert raw.ack_all("G", [popped[4]], "T").code == 0
    assert raw.pop("Order", "G", order="true", attemptId="2") == []
    same = pop_soon(raw, "Order", order="true", attemptId="1", maxMsgNums=1)
    assert [message.offset for message in same] == [1]
    assert now_ms() < due_ms, "the machine is too slow for this test"
    found: list[str] = []
    while len(found) < 2 and now_ms() < due_ms + 20_000:
        answer = raw.answer(raw.popping("T", "G", queueId=-1, pollTime=5000), 40)
        if answer.code == 0:
            assert now_ms() >= due_ms - 1000
            found += bodies(answer)
    assert Counter(found) == Counter(["m2", "m3"])
