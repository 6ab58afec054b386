"""Exact lag, failed evaluations and expressions on trial, asked of a stepped broker."""

from collections.abc import Iterator

import orjson
import pytest

from simulation.stepped import (
    ManualClock,
    SteppedBroker,
    SteppedClient,
    pull_fields,
    send_fields,
)
from sluicemq.broker.consume import matching
from sluicemq.broker.consume.delivery import REASONS_MAX, FilterFailures
from sluicemq.broker.metrics import BrokerCollector
from sluicemq.errors import RequestError
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.topic import GroupConfig
from sluicemq.net.limits import FairScheduler
from sluicemq.net.work.background import LONG_REQUESTS_MAX, SLICE_S, Background, WorkItem
from sluicemq.wire import bodies
from sluicemq.wire.frames import Command

SQL = {"subscription": "n > 5", "expressionType": "SQL92"}
BAD = {"subscription": "n >", "expressionType": "SQL92"}


@pytest.fixture
def filled(broker: SteppedBroker, client: SteppedClient) -> SteppedClient:
    """Ten messages in queue 0: n is 0 to 8, and once a word."""
    broker.core.groups.put(GroupConfig("G"))
    for number in range(10):
        n = "word" if number == 9 else number
        client.call(310, send_fields(properties=f"UNIQ_KEY\x01U{number}\x02n\x01{n}\x02"), b"x")
    return client


def told(client: SteppedClient, **changes: object) -> bodies.GroupMatching:
    answer = client.call(900131, {"consumerGroup": "G", "topic": "T"} | changes)
    assert answer.code == 0, answer.remark
    return bodies.decode_group_matching(answer.body)[0]


def heartbeat(client: SteppedClient, expression: str, kind: str = SQL92, version: int = 1) -> None:
    subscription = Subscription("T", expression, kind, version=version)
    data = bodies.ConsumerData(
        "G", "CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_FIRST_OFFSET", (subscription,)
    )
    beat = bodies.encode_heartbeat(bodies.Heartbeat("c1", (), (data,)))
    assert client.call(34, {}, beat).code == 0


def test_what_is_not_known_is_none(filled: SteppedClient) -> None:
    found = told(filled)
    assert found.expression is None
    assert [queue.matching for queue in found.queues] == [None] * 4
    assert found.queues[0].offset_max == 10


def test_the_expression_of_a_group_that_is_away_is_known(filled: SteppedClient) -> None:
    heartbeat(filled, "n > 5")
    assert told(filled).queues[0].matching == 3
    filled.disconnect()
    other = filled._broker.connect()
    assert told(other).expression == "n > 5"
    assert told(other).queues[0].matching == 3


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"consumerGroup": "nobody"}, 26),
        (
            {"consumerGroup": "G", "topic": "T", "subscription": "n >", "expressionType": "SQL92"},
            23,
        ),
        ({}, 1),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(
    filled: SteppedClient, fields: dict[str, object], code: int
) -> None:
    assert filled.call(900131, fields).code == code


def test_failed_evaluations_are_counted_once_for_each_pull(filled: SteppedClient) -> None:
    fields = pull_fields(**SQL)
    filled.call(11, fields)
    found = told(filled)
    assert (found.matched, found.filtered) == (3, 7)
    (count,) = found.errors.values()
    assert count == 1
    assert [(item.queue_id, item.offset) for item in found.failures] == [(0, 9)]
    assert "'word'" in found.failures[0].text
    assert told(filled).errors == found.errors, "a question is no evaluation"
    filled.call(11, fields)
    assert sum(told(filled).errors.values()) == 2


def test_a_jump_is_not_looked_at(broker: SteppedBroker, filled: SteppedClient) -> None:
    filled.call(11, pull_fields(offset=0, maxMsgNums=1, subscription="n < 2", expressionType=SQL92))
    assert not told(filled).errors
    filled.call(11, pull_fields(offset=10, **SQL))
    assert not told(filled).errors


def test_the_survey_finds_by_itself_what_metrics_and_runtime_show(
    broker: SteppedBroker, filled: SteppedClient
) -> None:
    heartbeat(filled, "n > 5")
    filled.call(11, pull_fields(offset=4, maxMsgNums=1, **SQL))
    broker.core.offsets.commit("G", "T", 0, 7)
    broker.advance(11)
    assert broker.core.filter_watch.survey_results["T", "G"][0] == 2
    assert (
        broker.core.runtime.collect_table()["sluiceFilter:T@G"] == "matched 1 filtered 2 errors 0"
    )
    names = {metric.name for metric in BrokerCollector(lambda: broker.core).collect()}
    assert {"sluicemq_filter_errors", "sluicemq_consumer_lag_matching_messages"} <= names
    samples = {
        sample.name: sample.value
        for metric in BrokerCollector(lambda: broker.core).collect()
        for sample in metric.samples
        if sample.labels.get("consumer_group") == "G"
    }
    assert samples["sluicemq_consumer_lag_matching_messages"] == 2


def test_the_time_until_no_match_is_left_follows_from_two_questions(
    broker: SteppedBroker, filled: SteppedClient
) -> None:
    broker.core.offsets.commit("G", "T", 0, 0)
    assert told(filled, **SQL).queues[0].eta_ms is None
    broker.clock.advance(2)
    broker.core.offsets.commit("G", "T", 0, 7)
    queue = told(filled, **SQL).queues[0]
    assert (queue.matching, queue.eta_ms) == (2, 4000), "one of three in two seconds"
    broker.core.offsets.commit("G", "T", 0, 10)
    assert told(filled, **SQL).queues[0].eta_ms == 0


def test_a_trial_looks_at_a_time_and_beside_the_group(
    broker: SteppedBroker, filled: SteppedClient
) -> None:
    heartbeat(filled, "n > 6")
    fields = {"topic": "T", "consumerGroup": "G"} | SQL
    values = orjson.loads(filled.call(900132, fields).body)
    report = values["report"]
    assert (report["rows"], report["matched"], report["errors"]) == (10, 3, 1)
    difference = report["difference"]
    assert (difference["both"], difference["only_here"], difference["only_there"]) == (2, 1, 0)
    assert {item["queueOffset"] for item in values["messages"]} == {6, 7, 8, 9}
    later = fields | {"beginTimestamp": broker.clock.now_ms() + 1}
    assert orjson.loads(filled.call(900132, later).body)["report"]["rows"] == 0
    few = fields | {"maxMsgNums": 3}
    values = orjson.loads(filled.call(900132, few).body)
    assert (values["report"]["rows"], values["stored"]) == (3, 10)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"topic": "X"} | SQL, 17),
        ({"topic": "T", "consumerGroup": "H"} | SQL, 24),
        (BAD | {"topic": "T"}, 23),
    ],
)
def test_a_trial_that_cannot_be_made_is_refused(
    filled: SteppedClient, fields: dict[str, object], code: int
) -> None:
    assert filled.call(900132, fields).code == code


def test_reasons_do_not_grow_without_end() -> None:
    troubles = FilterFailures()
    for number in range(100):
        troubles.add(f"reason {number}", 2)
    assert troubles.total == 200
    assert len(troubles.reasons) == REASONS_MAX + 1


# ---- long work


class Watched(ManualClock):
    """Each look at it takes a third of a slice."""

    def monotonic_s(self) -> float:
        self.advance(SLICE_S / 3)
        return super().monotonic_s()


def steps(log: list[str], name: str, count: int) -> WorkItem[Command]:
    for number in range(count):
        log.append(f"{name}{number}")
        yield None
    return Command(0, {}, name.encode())


def test_long_work_is_answered_later_and_leaves_room_between(
    filled: SteppedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = filled._broker
    background = broker.core.background
    heartbeat(filled, "UNIQ_KEY <> 'U3'")
    monkeypatch.setattr(background, "_clock", Watched())
    monkeypatch.setattr(matching, "RECORDS_PER_STEP", 1)
    request = filled.request(900131, {"consumerGroup": "G", "topic": "T"})
    filled.feed(request)
    assert request.opaque not in filled.answers, "it takes more than a slice"
    other = filled.request(38, {"consumerGroup": "G"})
    filled.feed(other)
    assert other.opaque in filled.answers, "others are answered meanwhile"
    broker.settle()
    answer = filled.answers[request.opaque]
    assert bodies.decode_group_matching(answer.body)[0].queues[0].matching == 9


def test_works_take_turns_and_one_whose_asker_is_gone_ends() -> None:
    soon: list[object] = []
    log: list[str] = []
    clock, broker = Watched(), SteppedBroker()
    first, second = broker.connect(), broker.connect()
    background = Background(clock, FairScheduler(clock.monotonic_s, soon.append))
    request = Command(900131, {}, b"", 7)
    assert background.answer(steps(log, "a", 9), request, first.peer) is None
    assert background.answer(steps(log, "b", 9), request, second.peer) is None
    first.disconnect()
    while soon:
        soon.pop(0)()  # type: ignore[operator]
    assert "b8" in log
    assert "a8" not in log
    assert not len(background)
    assert bytes(second.answers[7].body) == b"b"


def test_a_job_is_done_elsewhere_and_its_failure_answered() -> None:
    jobs: list[tuple[object, object]] = []
    broker = SteppedBroker()
    client = broker.connect()
    background = Background(
        clock := ManualClock(), FairScheduler(clock.monotonic_s, lambda _: None)
    )
    background.offload = lambda job, done: jobs.append((job, done))

    def work() -> WorkItem[Command]:
        yield lambda: None
        return Command(0)

    assert background.answer(work(), Command(900131, {}, b"", 1), client.peer) is None
    jobs[0][1](RequestError(2, "busy"))  # type: ignore[operator]
    assert client.answers[1].code == 2


def test_too_many_questions_are_refused() -> None:
    background = Background(clock := Watched(), FairScheduler(clock.monotonic_s, lambda _: None))
    client = SteppedBroker().connect()
    for number in range(LONG_REQUESTS_MAX):
        background.answer(steps([], "a", 9), Command(900131, {}, b"", number), client.peer)
    with pytest.raises(RequestError, match="Too many long-running requests"):
        background.answer(steps([], "a", 9), Command(900131, {}, b"", 99), client.peer)


def test_a_failure_in_the_first_slice_is_raised() -> None:
    def work() -> Iterator[None]:
        raise RequestError(23, "no")
        yield

    background = Background(
        clock := ManualClock(), FairScheduler(clock.monotonic_s, lambda _: None)
    )
    with pytest.raises(RequestError, match="no"):
        background.answer(work(), Command(900131), SteppedBroker().connect().peer)  # type: ignore[arg-type]
