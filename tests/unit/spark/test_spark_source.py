"""The batch source: what is settled when. Spark pickles the reader before it plans partitions."""

import datetime
import json
import pickle
from typing import Any

import pytest
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    In,
    IsNull,
    LessThan,
    Not,
)

from pyspark_rocketmq import DefaultSource
from sluicemq.errors import ConfigurationError, OffsetOutOfRangeError, RouteNotFoundError
from sluicemq.model.subscription import SQL92, TAG
from sluicemq.model.topic import BrokerData, MessageQueue, QueueData, TopicRoute
from sluicemq.spark import errors, session
from sluicemq.spark.filters import parse_predicates
from sluicemq.spark.schema import parse_columns, to_spark_schema
from sluicemq.spark.sources import batch, identity
from sluicemq.spark.sources import offsets as cluster

Q0, Q1 = MessageQueue("t", "a", 0), MessageQueue("t", "a", 1)
OPTIONS = {"topic": "t", "nameServers": "127.0.0.1:9876"}


class FakeAdmin:
    """Two queues; a message is stored every 10 ms from 1,000 on."""

    def __enter__(self) -> "FakeAdmin":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def queues(self, _: str) -> list[MessageQueue]:
        return [Q0, Q1]

    def offsets(self, queue: MessageQueue) -> tuple[int, int]:
        return {Q0: (0, 100), Q1: (50, 80)}[queue]

    def offset_by_time(self, _: MessageQueue, time_ms: int) -> int:
        return max(0, -(-(time_ms - 1000) // 10))

    def find_route(self, topic: str) -> TopicRoute | None:
        return self.route(topic) if topic == "t" else None

    def route(self, topic: str) -> TopicRoute:
        if topic != "t":
            raise RouteNotFoundError(f"no broker serves {topic!r}.")
        return TopicRoute((BrokerData("a", "c", {0: "a:1"}),), (QueueData("a", 2, 2, 6),))


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "open_admin", lambda _: FakeAdmin())
    monkeypatch.setattr(batch, "check_selector", lambda *_: None)
    monkeypatch.setattr(batch, "can_evaluate_selectors", lambda *_: True)
    monkeypatch.setattr(
        identity, "fetch_store_time", lambda _admin, _group, _queue, offset: 1000 + offset
    )
    monkeypatch.setattr(errors.os, "environ", {})


def reader(*predicates: dict[str, Any], **options: str) -> Any:
    given = OPTIONS | {name.replace("__", "."): value for name, value in options.items()}
    if "topics" in given:
        del given["topic"]
    if predicates:
        given["predicates"] = json.dumps(predicates)
    made: DataSource = DefaultSource(given)
    return made.reader(to_spark_schema(parse_columns(given.get("columns"))))


def on(column: str, kind: str, value: Any) -> dict[str, Any]:
    return {"is": kind, "column": column, "value": value}


def ranges(one: Any) -> list[tuple[int, int, int]]:
    return [(part.queue.queue_id, part.start, part.end) for part in one.partitions() if part.queue]


def test_the_name_is_rocketmq() -> None:
    assert DefaultSource.name() == "rocketmq"


def test_the_subscription_is_there_before_partitions_are_asked_for() -> None:
    tagged = pickle.loads(pickle.dumps(reader(filter__tags="UA||AA")))
    assert (tagged.plan.subscription.kind, tagged.plan.exact_tags) == (TAG, {"UA", "AA"})
    pushing = reader(
        on("delay", "GreaterThan", 5), on("tags", "EqualTo", "UA"), columns="tags,prop:delay:int"
    )
    assert pushing.remaining_predicates == []
    pickled = pickle.loads(pickle.dumps(pushing))
    assert pickled.plan.subscription.kind == SQL92
    assert pickled.plan.subscription.expression == "delay > 5 AND TAGS IN ('UA')"


def test_push_down_can_be_switched_off() -> None:
    off = reader(on("tags", "EqualTo", "UA"), pushFilters="false")
    assert (off.offered_predicates, off.plan.subscription.expression) == ([], "*")


def test_a_reader_takes_no_predicates_of_spark() -> None:
    """Spark would keep the narrowed read for the next use of the frame."""
    one = [EqualTo(("tags",), "UA")]
    assert list(reader().pushFilters(one)) == one
    assert type(reader()).pushFilters is DataSourceReader.pushFilters


def test_predicates_are_a_text() -> None:
    text = json.dumps([
        on("n", "In", [1, 2]), {"is": "IsNull", "column": "a.b", "not": True},
        on("store_time", "LessThan", {"us": 1_500_000}),
    ])  # fmt: skip
    time = datetime.datetime(1970, 1, 1, 0, 0, 1, 500_000, datetime.UTC)
    assert parse_predicates(text) == [
        In(("n",), [1, 2]), Not(IsNull(("a.b",))), LessThan(("store_time",), time)
    ]  # fmt: skip
    for bad in ("{", "[1]", '[{"is": "open", "column": "x"}]', '[{"is": "EqualTo"}]'):
        with pytest.raises(ConfigurationError, match="'predicates' has an invalid value"):
            parse_predicates(bad)


def test_everything_is_read_by_default() -> None:
    assert ranges(reader()) == [(0, 0, 100), (1, 50, 80)]


def test_offsets_and_times_bound_the_ranges() -> None:
    table = '{"a": {"0": 10, "1": "latest"}}'
    assert ranges(reader(startingOffsets=table)) == [(0, 10, 100)]
    timed = reader(startingTimestamp="1300", endingTimestamp="1600")
    assert ranges(timed) == [(0, 30, 60), (1, 50, 60)]
    assert ranges(reader(startingTimestamp="999999")) == []


def test_offsets_that_retention_has_passed_are_loss() -> None:
    given = {"startingOffsets": '{"a": {"0": 5, "1": 7}}', "endingOffsets": '{"a":{"0":9,"1":60}}'}
    with pytest.raises(OffsetOutOfRangeError, match="offset 7 of a:1, which holds 50 to 80"):
        ranges(reader(**given))
    assert ranges(reader(failOnDataLoss="false", **given)) == [(0, 5, 9), (1, 50, 60)]


def test_a_listed_topic_that_does_not_exist_is_an_error_or_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"topics": "t,u"}
    with pytest.raises(RouteNotFoundError, match="no broker serves 'u'"):
        ranges(reader(**given))
    assert ranges(reader(failOnDataLoss="false", **given)) == [(0, 0, 100), (1, 50, 80)]
    assert caplog.text.count("topics that do not exist are not read") == 1
    with pytest.raises(RouteNotFoundError, match="no broker serves 'u'"):
        ranges(reader(failOnDataLoss="false", topics="u,v"))


def test_pushed_bounds_narrow_the_ranges() -> None:
    one = reader(on("queue_offset", "GreaterThan", 60), on("queue_id", "EqualTo", 1))
    assert ranges(one) == [(1, 61, 80)]


def test_time_predicates_keep_a_margin() -> None:
    pushed = cluster.PushedFilters(time_min_ms=1300, time_max_ms=1500)
    narrowed = cluster.narrow_ranges(FakeAdmin(), {Q0: 0}, {Q0: 100}, pushed)  # type: ignore[arg-type]
    assert [(one.start, one.end) for one in narrowed] == [(30, 52)]


def test_what_excludes_itself_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "open_admin", None)
    one = reader(on("tags", "EqualTo", "AA"), filter__tags="UA")
    assert ranges(one) == []
    assert len(one.partitions()) == 1


def test_nothing_at_the_end_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nothing would be read"):
        ranges(reader(endingOffsets="earliest"))


def test_workers_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"PYTHONPATH": "/elsewhere"}
    monkeypatch.setattr(session.os, "environ", environment)
    session.make_package_importable()
    session.make_package_importable()
    first, second = environment["PYTHONPATH"].split(session.os.pathsep)
    assert first.endswith("src")
    assert second == "/elsewhere"
