"""What expensive filters may take of the loop: CPU time between two of its iterations.

The limits are ten times what is usual and a tenth of what it was when everything happened at once.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest

from simulation.stepped import SteppedBroker, SteppedClient, pull_fields, send_fields
from sluicemq.config import BrokerConfig
from sluicemq.filter import subscriptions as parser
from sluicemq.net.limits import INLINE_DECODE_BYTES
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

pytestmark = pytest.mark.slow

MESSAGES = 600
SLICE_MAX_S = 0.05
Done = Callable[[object], None]


class Watched:
    """A broker whose other thread and whose iterations are stepped, each timed."""

    def __init__(self) -> None:
        self.broker = SteppedBroker(
            config=BrokerConfig(
                broker_name="broker-a", metrics_enable=False, enable_property_filter=True
            )
        )
        self.jobs: list[tuple[Callable[[], object], Done]] = []
        self.broker.core.background.offload = lambda job, done: self.jobs.append((job, done))
        self.client = self.broker.connect()
        self.longest_s = 0.0
        self.jobs_done = 0

    def timed(self, run: Callable[[], object]) -> None:
        begin_s = time.thread_time()
        run()
        self.longest_s = max(self.longest_s, time.thread_time() - begin_s)

    def settle(self) -> None:
        """Iterations of the loop and jobs elsewhere, until nothing is left to do."""
        broker = self.broker
        while broker._soon or self.jobs:
            self.timed(broker.step)
            if self.jobs:
                job, done = self.jobs.pop(0)
                outcome: Any = None
                try:
                    outcome = job()
                except Exception as error:
                    outcome = error
                self.jobs_done += 1
                self.timed(lambda found=outcome, end=done: end(found))  # type: ignore[misc]

    def ask(self, code: int, fields: dict[str, object], body: bytes = b"") -> Command:
        request = self.client.request(code, fields, body)
        self.timed(lambda: self.client.feed(request))
        self.settle()
        return self.client.answers.pop(request.opaque)


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    fill(made.client)
    made.ask(Code.PULL_MESSAGE, sql_pull("p1 = 'warm'"))
    made.longest_s = 0.0
    gc.disable()  # it would go through all that other tests have left
    yield made
    gc.enable()
    made.broker.close()


def fill(client: SteppedClient) -> None:
    for at in range(MESSAGES):
        properties = f"UNIQ_KEY\x01U{at}\x02p1\x01value {at}\x02p2\x01{at}\x02"
        assert client.call(310, send_fields("T", properties), b"x").code == 0


def contains(seed: int, count: int = 700, more: str = "") -> str:
    """Conditions that do not hold, and one that may."""
    rng = random.Random(seed)
    parts = [f"p1 CONTAINS '#{rng.getrandbits(48):x}'" for _ in range(count)]
    return " OR ".join([*parts, more] if more else parts)


def sql_pull(expression: str, offset: int = 0, **more: object) -> dict[str, object]:
    return pull_fields(
        "T", offset, subscription=expression, expressionType="SQL92", maxMsgNums=32, **more
    )


def drain(watched: Watched, expression: str) -> int:
    """Messages that pulls bring, from the first to the last."""
    offset, count = 0, 0
    while offset < MESSAGES:
        answer = watched.ask(Code.PULL_MESSAGE, sql_pull(expression, offset))
        assert answer.fields is not None
        code, following = answer.code, int(answer.fields["nextBeginOffset"])
        assert code in (ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY), answer
        assert following > offset
        count += bytes(answer.body).count(b"p1\x01value ")
        offset = following
    return count


@pytest.mark.parametrize("columns", ["with", "without"])
def test_seven_hundred_conditions_are_judged_elsewhere_and_exactly(
    watched: Watched, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if columns == "without":
        monkeypatch.setattr(watched.broker.store.reader, "columns", None)
    expression = contains(len(columns), more="p2 BETWEEN 100 AND 149")
    assert drain(watched, expression) == 50
    assert watched.jobs_done > 1
    assert watched.longest_s < SLICE_MAX_S


def test_conditions_on_keys_ask_the_records_elsewhere_too(watched: Watched) -> None:
    expression = contains(2, more="UNIQ_KEY = 'U5' OR UNIQ_KEY = 'U599'").replace("p1", "UNIQ_KEY")
    assert drain(watched, expression) == 2
    assert watched.longest_s < SLICE_MAX_S


def test_a_short_filter_is_answered_at_once(watched: Watched) -> None:
    done = watched.jobs_done
    request = watched.client.request(Code.PULL_MESSAGE, sql_pull("p2 < 3"))
    watched.client.feed(request)
    assert watched.client.answers.pop(request.opaque).code == 0
    assert watched.jobs_done == done


def test_a_pull_whose_time_is_over_is_judged_before_it_is_answered(watched: Watched) -> None:
    """The other thread is so slow that the pull's deadline passes meanwhile."""
    watched.broker.store.reader.columns = None
    fields = sql_pull(contains(4), MESSAGES, sysFlag=6)
    request = watched.client.request(Code.PULL_MESSAGE, fields)
    watched.client.feed(request)
    watched.settle()
    watched.broker.connect().call(310, send_fields("T", "UNIQ_KEY\x01N\x02p1\x01new\x02"), b"x")
    assert watched.jobs, "the verdict on the new message is found elsewhere"
    watched.broker.advance(16)
    watched.settle()
    answer = watched.client.answers.pop(request.opaque)
    assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
    assert answer.fields is not None
    assert int(answer.fields["nextBeginOffset"]) == MESSAGES + 1
    assert request.opaque not in watched.client.answers, "one answer"


def test_a_pull_that_waits_is_judged_elsewhere_and_answered_when_something_matches(
    watched: Watched,
) -> None:
    fields = sql_pull(contains(3, more="p2 = 777"), MESSAGES, sysFlag=6)
    request = watched.client.request(Code.PULL_MESSAGE, fields)
    watched.client.feed(request)
    watched.settle()
    sender = watched.broker.connect()
    for value in (1, 777):
        assert request.opaque not in watched.client.answers
        watched.timed(lambda v=value: sender.call(310, send_fields("T", f"p2\x01{v}\x02"), b"x"))  # type: ignore[misc]
        watched.settle()
    assert watched.client.answers[request.opaque].code == 0
    assert watched.longest_s < SLICE_MAX_S


def test_a_long_expression_that_does_not_compile_is_refused_as_ever(watched: Watched) -> None:
    answer = watched.ask(Code.PULL_MESSAGE, sql_pull(contains(4) + " AND"))
    assert answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    again = watched.ask(Code.PULL_MESSAGE, sql_pull("a = 1 OR " * 10_000))
    assert again.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    assert "the limit is 32768" in str(again.remark)


def test_an_asker_who_is_gone_costs_nothing_more(watched: Watched) -> None:
    gone = watched.broker.connect()
    gone.feed(gone.request(Code.PULL_MESSAGE, sql_pull(contains(5))))
    gone.disconnect()
    watched.settle()
    assert not len(watched.broker.core.background)
    assert gone.peer not in watched.broker.core.scheduler._owners


# ------------------------------------------------------------------------------- heartbeats


def heartbeat(expressions: list[str]) -> bytes:
    consumers = [
        {
            "groupName": f"g{at}", "messageModel": "CLUSTERING",
            "subscriptionDataSet": [{
                "topic": "T", "subString": text, "subVersion": 5, "expressionType": "SQL92",
            }],
        }
        for at, text in enumerate(expressions)
    ]  # fmt: skip
    return orjson.dumps({"clientID": "c", "consumerDataSet": consumers, "producerDataSet": []})


def test_a_heartbeat_of_many_groups_is_taken_group_by_group(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A clock under which slices and turns end.
    monkeypatch.setattr(watched.broker.clock, "monotonic_s", time.thread_time)
    monkeypatch.setattr(watched.broker.core.scheduler, "now_s", time.thread_time)
    expressions = [contains(at, 5) for at in range(600)]
    expressions[300] = "p1 CONTAINS"
    expressions[301] = contains(6)
    body = heartbeat(expressions)
    assert len(body) > INLINE_DECODE_BYTES
    assert watched.ask(Code.HEART_BEAT, {}, body).code == 0
    core = watched.broker.core
    assert len(core.consumers.groups) == 600
    assert len(core.filters.table) == 599, "RocketMQ keeps none that does not compile"
    fields = pull_fields("T", consumerGroup="g300", sysFlag=0, subVersion=5)
    refused = watched.ask(Code.PULL_MESSAGE, fields)
    assert refused.code == ResponseCode.FILTER_DATA_NOT_EXIST
    assert watched.longest_s < SLICE_MAX_S


def test_an_expression_is_compiled_once_for_all_groups_of_a_heartbeat(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_ = parser.try_compile
    monkeypatch.setattr(parser, "try_compile", lambda text: compiled.append(text) or compile_(text))
    texts = [contains(at, 5) for at in (900, 901)]
    assert watched.ask(Code.HEART_BEAT, {}, heartbeat(texts * 100)).code == 0
    assert sorted(set(compiled)) == sorted(set(texts))
    assert len(compiled) == 2


# ------------------------------------------------------------------------- questions of tools


def test_a_check_of_a_long_expression_is_answered_when_it_is_compiled(watched: Watched) -> None:
    for text, code in ((contains(7), 0), (contains(8) + " OR", 23)):
        subscription = {
            "topic": "T", "subString": text, "subVersion": 1, "expressionType": "SQL92",
        }  # fmt: skip
        body = orjson.dumps({"clientId": "c", "group": "G", "subscriptionData": subscription})
        assert watched.ask(Code.CHECK_CLIENT_CONFIG, {}, body).code == code
    assert watched.longest_s < SLICE_MAX_S


def test_exact_lag_and_a_trial_leave_long_expressions_to_the_other_thread(watched: Watched) -> None:
    text = contains(9, more="p2 < 10")
    wanted = {"topic": "T", "subscription": text, "expressionType": "SQL92"}
    watched.ask(Code.PULL_MESSAGE, sql_pull("p2 < 0"))  # makes the group
    lag = watched.ask(Code.SLUICE_FILTERED_LAG, {"consumerGroup": "G"} | wanted)
    assert b'"matching":10' in bytes(lag.body).replace(b" ", b"")
    trial = watched.ask(Code.SLUICE_TRY_FILTER, wanted)
    assert orjson.loads(trial.body)["report"]["matched"] == 10
    assert watched.longest_s < SLICE_MAX_S
