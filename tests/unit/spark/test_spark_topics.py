"""Several topics in one read: lists and patterns, offsets and checkpoints by topic."""

from types import SimpleNamespace
from typing import Any

import pytest

from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import MessageQueue
from sluicemq.spark.options import READ, StoreTimestamp, parse_options
from sluicemq.spark.sources.checkpoints import make_checkpoint, parse_checkpoint
from sluicemq.spark.sources.offsets import TopicSelection, parse_topics, resolve_offset_table

X0, Y0 = MessageQueue("x", "a", 0), MessageQueue("y", "a", 0)
NAMES = [
    "orders.eu", "orders.us", "%RETRY%g", "%DLQ%orders", "TBW102", "broker-a", "DefaultCluster",
    "rmq_sys_TRANS", "DefaultCluster_REPLY_TOPIC",
]  # fmt: skip


class FakeAdmin:
    def topics(self) -> list[str]:
        return NAMES

    def cluster_info(self) -> Any:
        return SimpleNamespace(brokers={"broker-a": 1}, clusters={"DefaultCluster": 1})


def chosen(**options: str) -> TopicSelection:
    return parse_topics(parse_options(options))


def found(pattern: str) -> list[str]:
    return list(TopicSelection(pattern=pattern).resolve(FakeAdmin()))  # type: ignore[arg-type]


def test_a_list_is_read_as_it_stands() -> None:
    assert chosen(topics="x, y;x") == TopicSelection(("x", "y"))
    assert chosen(subscribe="x") == chosen(topic="x") == TopicSelection(("x",))


def test_a_pattern_matches_whole_names_of_users_topics() -> None:
    assert found(r"orders\..*") == ["orders.eu", "orders.us"]
    assert found(".*") == ["orders.eu", "orders.us"]
    assert found("%DLQ%.*") == ["%DLQ%orders"]


def test_a_pattern_without_a_match_shows_what_there_is() -> None:
    with pytest.raises(ConfigurationError, match=r"no topic matches 'order'|'order'.*orders\.eu"):
        found("order")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "'topic' is missing"),
        ({"topic": "x", "topics": "y"}, "topic and topics are given together"),
        ({"topicsPattern": "("}, "it is not a valid regular expression"),
        ({"topics": " , "}, "it is empty"),
    ],
)
def test_what_names_no_topics_is_refused(options: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        chosen(**options)


def test_checkpoints_of_several_topics_are_by_topic() -> None:
    point = make_checkpoint("x,y", "TAG *", {X0: 1, Y0: 2}, has_several_topics=True)
    assert point["queues"] == {"x": {"a": {"0": 1}}, "y": {"a": {"0": 2}}}
    assert parse_checkpoint(point, None) == {X0: 1, Y0: 2}
    single = make_checkpoint("x", "TAG *", {X0: 1})
    assert parse_checkpoint(single, None) == {X0: 1}
    with pytest.raises(ConfigurationError, match="the stream reads 'x'"):
        parse_checkpoint(point, "x")


BOUNDS = {X0: (10, 20), Y0: (0, 5)}


def given(text: str) -> Any:
    return parse_options({"startingOffsets": text}, READ)["startingOffsets"]


def test_offsets_of_several_topics_are_by_topic() -> None:
    table = given('{"x": {"a": {"0": 12}}, "y": {"a": {"0": "latest"}}}')
    assert resolve_offset_table(table, BOUNDS, "o") == {X0: 12, Y0: 5}
    with pytest.raises(ConfigurationError, match="names brokers, but several topics are read"):
        resolve_offset_table(given('{"a": {"0": 12}}'), BOUNDS, "o")
    with pytest.raises(ConfigurationError, match="does not name y:a:0"):
        resolve_offset_table(given('{"x": {"a": {"0": 12}}}'), BOUNDS, "o")


def test_a_queue_may_start_at_a_time() -> None:
    table = given('{"a": {"0": "1970-01-01T00:00:01Z"}}')
    assert table == {"a": {0: StoreTimestamp(1000)}}
    for answer, offset in ((15, 15), (3, 10), (99, 20)):
        found = resolve_offset_table(table, {X0: (10, 20)}, "o", lambda *_, answer=answer: answer)
        assert found == {X0: offset}
    with pytest.raises(ConfigurationError, match="'tomorrow'; write a whole number"):
        given('{"a": {"0": "tomorrow"}}')
