"""Spark's predicates as one SQL92 selector, and what it cannot say."""

from pyspark.sql.datasource import EqualTo, GreaterThan, In, IsNull, StringContains

from sluicemq.spark.filters import to_selector
from sluicemq.spark.schema import parse_columns

COLUMNS = parse_columns("tags,queue_id,prop:origin,prop:dep_delay:int")


def test_predicates_on_properties_become_conditions() -> None:
    filters = [EqualTo(("origin",), "it's"), GreaterThan(("dep_delay",), 60)]
    assert to_selector(filters, COLUMNS) == ("origin = 'it''s' AND dep_delay > 60", [])


def test_tags_become_a_condition_too() -> None:
    assert to_selector([In(("tags",), ("UA", "AA"))], COLUMNS) == ("TAGS IN ('AA', 'UA')", [])


def test_what_sql92_cannot_say_is_left() -> None:
    left = [StringContains(("origin",), "J"), EqualTo(("queue_id",), 1)]
    assert to_selector([*left, IsNull(("origin",))], COLUMNS) == ("origin IS NULL", left)
    assert to_selector(left, COLUMNS) == (None, left)


def test_tags_that_exclude_each_other_match_nothing() -> None:
    filters = [EqualTo(("tags",), "UA"), EqualTo(("tags",), "AA")]
    assert to_selector(filters, COLUMNS) == ("FALSE", [])
