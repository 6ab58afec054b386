"""The batch source: what is settled when. Spark pickles the reader before it plans partitions."""

import pickle
import sys
from typing import Any

import pytest
from pyspark.sql.datasource import DataSource, EqualTo, GreaterThan

from pyspark_rocketmq import DefaultSource
from sluicemq.errors import ConfigurationError, OffsetOutOfRangeError
from sluicemq.model.subscription import SQL92, TAG
from sluicemq.model.topic import BrokerData, MessageQueue, QueueData, TopicRoute
from sluicemq.spark import cluster, errors, session, source
from sluicemq.spark.schema import parse_columns, struct_type

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

    def route(self, _: str) -> TopicRoute:
        return TopicRoute((BrokerData("a", "c", {0: "a:1"}),), (QueueData("a", 2, 2, 6),))


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "open_admin", lambda _: FakeAdmin())
    monkeypatch.setattr(source, "check_selector", lambda *_: None)
    monkeypatch.setattr(source, "evaluates_selectors", lambda *_: True)
    monkeypatch.setattr(errors.os, "environ", {})


def reader(pushing: bool = False, **options: str) -> Any:
    given = OPTIONS | {name.replace("__", "."): value for name, value in options.items()}
    made: DataSource = DefaultSource(given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "is_pushdown_process", lambda: pushing)
        return made.reader(struct_type(parse_columns(given.get("columns"))))


def ranges(one: Any) -> list[tuple[int, int, int]]:
    return [(part.queue.queue_id, part.start, part.end) for part in one.partitions() if part.queue]


def test_the_name_is_rocketmq() -> None:
    assert DefaultSource.name() == "rocketmq"


def test_the_subscription_is_there_before_partitions_are_asked_for() -> None:
    tagged = pickle.loads(pickle.dumps(reader(filter__tags="UA||AA")))
    assert (tagged.plan.subscription.kind, tagged.plan.tags) == (TAG, {"UA", "AA"})
    pushing = reader(pushing=True, columns="tags,prop:delay:int")
    rest = pushing.pushFilters([GreaterThan(("delay",), 5), EqualTo(("tags",), "UA")])
    assert rest == []
    pickled = pickle.loads(pickle.dumps(pushing))
    assert pickled.plan.subscription.kind == SQL92
    assert pickled.plan.subscription.expression == "delay > 5 AND TAGS IN ('UA')"


def test_push_down_can_be_switched_off() -> None:
    one = EqualTo(("tags",), "UA")
    assert list(reader(pushing=True, pushFilters="false").pushFilters([one])) == [one]


def test_a_reader_only_pushes_where_spark_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hasattr(type(reader()), "selectors_allowed")
    monkeypatch.setitem(sys.modules, source._PUSHDOWN_MODULE, sys)
    assert source.is_pushdown_process()


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


def test_pushed_bounds_narrow_the_ranges() -> None:
    one = reader(pushing=True)
    one.pushFilters([GreaterThan(("queue_offset",), 60), EqualTo(("queue_id",), 1)])
    assert ranges(one) == [(1, 61, 80)]


def test_time_predicates_keep_a_margin() -> None:
    pushed = cluster.Pushed(time_min_ms=1300, time_max_ms=1500)
    narrowed = cluster.narrowed(FakeAdmin(), {Q0: 0}, {Q0: 100}, pushed)  # type: ignore[arg-type]
    assert [(one.start, one.end) for one in narrowed] == [(30, 52)]


def test_what_excludes_itself_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "open_admin", None)
    one = reader(pushing=True, filter__tags="UA")
    one.pushFilters([EqualTo(("tags",), "AA")])
    assert ranges(one) == []
    assert len(one.partitions()) == 1


def test_nothing_at_the_end_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nothing would be read"):
        ranges(reader(endingOffsets="earliest"))


def test_workers_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"PYTHONPATH": "/elsewhere"}
    monkeypatch.setattr(session.os, "environ", environment)
    session.make_importable()
    session.make_importable()
    first, second = environment["PYTHONPATH"].split(session.os.pathsep)
    assert first.endswith("src")
    assert second == "/elsewhere"
