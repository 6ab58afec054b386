"""Which predicates are kept, and what they become."""

import datetime
from typing import Any

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from sluicemq.errors import FilterSyntaxError
from sluicemq.filter.nodes import And
from sluicemq.filter.subscriptions import compile_sql92
from sluicemq.model.subscription import ALL, SQL92, TAG
from sluicemq.spark.filters import FilterPushdown, PushedFilters, build_subscription
from sluicemq.spark.schema import BASE_COLUMNS, Column

COLUMNS = [*BASE_COLUMNS, Column("delay", "dep_delay", "int"), Column("origin", "origin", "string"),
           Column("bad", "not-a-name", "int"), Column("key", "IN", "string")]  # fmt: skip


def push(*asked: Any, selectors: bool = True) -> tuple[list[Any], PushedFilters]:
    """(left to Spark, pushed)."""
    pushdown = FilterPushdown(COLUMNS, selectors_allowed=selectors)
    return pushdown.push_all(list(asked)), pushdown.pushed


def test_tags_are_kept_and_intersect() -> None:
    rest, pushed = push(In(("tags",), ("UA", "AA", None)), EqualTo(("tags",), "UA"))
    assert rest == []
    assert pushed.tags == {"UA"}
    assert build_subscription("t", "UA||DL", None, pushed)[0].expression == "UA"  # type: ignore[index]


@pytest.mark.parametrize("tag", ["a||b", " x", "*", ""])
def test_tags_that_no_subscription_can_name_are_left_to_spark(tag: str) -> None:
    one = EqualTo(("tags",), tag)
    rest, pushed = push(one)
    assert (rest, pushed.tags) == ([one], None)


def test_offsets_cut_the_range() -> None:
    path = ("queue_offset",)
    rest, pushed = push(
        GreaterThan(path, 9), LessThanOrEqual(path, 20), GreaterThanOrEqual(path, 5)
    )
    assert rest == []
    assert (pushed.offset_min, pushed.offset_end) == (10, 21)
    assert push(EqualTo(path, 7))[1].offset_end == 8
    assert push(LessThan(path, 7))[1].offset_end == 7


def test_queues_and_brokers_are_kept() -> None:
    rest, pushed = push(
        In(("queue_id",), (1, 2)), EqualTo(("broker",), "b"), EqualTo(("topic",), "t")
    )
    assert rest == []
    assert (pushed.queue_ids, pushed.brokers, pushed.topics) == ({1, 2}, {"b"}, {"t"})


def test_store_time_narrows_but_spark_looks_again() -> None:
    moment = datetime.datetime(2026, 11, 21, 12, 0, 0, 500, tzinfo=datetime.UTC)
    low = GreaterThanOrEqual(("store_time",), moment)
    high = LessThan(("store_time",), moment)
    rest, pushed = push(low, high)
    assert rest == [low, high]
    milliseconds = 1_795_262_400_000
    assert (pushed.time_min_ms, pushed.time_max_ms) == (milliseconds, milliseconds + 1)


def test_a_time_without_a_zone_is_not_guessed() -> None:
    naive = datetime.datetime(2026, 11, 21)  # noqa: DTZ001 - the point of the test
    assert push(GreaterThan(("store_time",), naive))[1].time_min_ms is None


def test_properties_become_a_selector() -> None:
    rest, pushed = push(
        GreaterThanOrEqual(("delay",), 60), IsNotNull(("delay",)), In(("origin",), ("JFK", "EWR"))
    )
    assert rest == []
    found = build_subscription("t", None, None, pushed)
    assert found is not None
    assert found[0].kind == SQL92
    assert found[0].expression == "dep_delay >= 60 AND origin IN ('JFK', 'EWR')"


def test_not_null_alone_does_not_tell_whether_a_number_parses() -> None:
    one = IsNotNull(("delay",))
    assert push(one)[0] == [one]
    assert push(IsNotNull(("body",)), IsNotNull(("origin",)))[0] == []
    assert push(IsNotNull(("origin",)))[1].selectors == ("origin IS NOT NULL",)


@pytest.mark.parametrize(
    "one",
    [
        EqualTo(("bad",), 1),
        EqualTo(("key",), "x"),
        EqualTo(("delay",), -(2**31)),
        EqualTo(("msg_id",), "x"),
        Not(EqualTo(("tags",), "x")),
        StringStartsWith(("origin",), "J"),
        EqualNullSafe(("origin",), "J"),
        EqualTo(("properties", "x"), "J"),
        EqualTo(("elsewhere",), 1),
    ],
    ids=str,
)
def test_what_is_not_exact_is_left_to_spark(one: Any) -> None:
    rest, pushed = push(one)
    assert rest == [one]
    assert pushed == PushedFilters()


def test_keys_are_looked_up_and_compared_at_the_broker_where_it_can() -> None:
    rest, pushed = push(EqualTo(("keys",), "k1 k2"), In(("keys",), ("k1 k2", "it's")))
    assert rest == []
    assert pushed.keys == {"k1 k2"}
    assert pushed.selectors == ("KEYS IN ('k1 k2')", "KEYS IN ('it''s', 'k1 k2')")
    one = EqualTo(("keys",), "x")
    rest, pushed = push(one, selectors=False)
    assert (rest, pushed.keys, pushed.selectors) == ([one], {"x"}, ())


def test_what_was_taken_is_told_in_words() -> None:
    _, pushed = push(
        EqualTo(("tags",), "UA"), GreaterThan(("queue_offset",), 4), EqualTo(("origin",), "JFK")
    )
    assert pushed.describe() == "tags in ['UA']; queue_offset 5..; SQL92 origin = 'JFK'"
    assert PushedFilters().describe() == "nothing"


def test_selectors_can_be_forbidden() -> None:
    one = EqualTo(("origin",), "JFK")
    tag = EqualTo(("tags",), "UA")
    rest, pushed = push(one, tag, selectors=False)
    assert rest == [one]
    assert pushed.tags == {"UA"}


def test_a_selector_that_grows_too_long_is_left_to_spark() -> None:
    many = [EqualTo(("origin",), "x" * 1500) for _ in range(4)]
    rest, pushed = push(*many)
    assert len(rest) == 2
    assert len(pushed.selectors) == 2


def test_tags_alone_stay_a_tag_subscription_to_be_compared_again() -> None:
    found = build_subscription("t", "UA || AA", None, PushedFilters())
    assert found is not None
    subscription, tags = found
    assert (subscription.kind, subscription.expression) == (TAG, "AA||UA")
    assert tags == {"UA", "AA"}
    assert len(subscription.codes) == 2


def test_tags_join_a_selector_as_a_condition() -> None:
    found = build_subscription("t", "UA", "a = 1 -- why", PushedFilters())
    assert found is not None
    assert found == (found[0], None)
    assert found[0].expression == "a = 1 AND TAGS IN ('UA')"


def test_conditions_are_joined_as_trees_whatever_their_texts_hold() -> None:
    """As texts, the comment and the OR would take the rest in, or leave it out."""
    pushed = PushedFilters(selectors=("state = 'TX'", "(n = 1 OR n = 2)"))
    found = build_subscription("t", None, "a > 1.0 OR b = 'x)' -- why\n", pushed)
    assert found is not None
    joined = compile_sql92(found[0].expression).tree
    assert isinstance(joined, And)
    parts = ("a > 1.0 OR b = 'x)'", *pushed.selectors)
    assert joined.parts == tuple(compile_sql92(one).tree for one in parts)


def test_text_behind_a_complete_selector_is_refused_with_its_place() -> None:
    """It once closed the parenthesis around it, and the pushed predicates were no more."""
    for pushed in (PushedFilters(), PushedFilters(selectors=("state = 'TX'",))):
        with pytest.raises(FilterSyntaxError, match="not valid at character 17") as refused:
            build_subscription("t", None, "latitude > 30.0 ) garbage", pushed)
        assert refused.value.position == 16
        assert "Remove the parenthesis" in str(refused.value)


def test_a_selector_of_the_user_alone_is_sent_as_it_is() -> None:
    found = build_subscription("t", None, "a = 5  -- why\n", PushedFilters())
    assert found is not None
    assert found[0].expression == "a = 5  -- why\n"


def test_no_filter_is_everything() -> None:
    found = build_subscription("t", "*", None, PushedFilters())
    assert found is not None
    assert (found[0].expression, found[1]) == (ALL, None)


def test_tags_that_exclude_each_other_match_nothing() -> None:
    assert build_subscription("t", "UA", None, PushedFilters(tags=frozenset({"AA"}))) is None


def test_a_bad_selector_of_the_user_is_an_error() -> None:
    with pytest.raises(FilterSyntaxError):
        build_subscription("t", None, "a >", PushedFilters())
