"""What the source says of itself: types it infers, progress of a stream, a plan's predicates."""

import logging
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, Not, StringContains

from sluicemq.model.topic import MessageQueue
from sluicemq.spark import schema as infer
from sluicemq.spark.errors import summarize_spark_error
from sluicemq.spark.filters import PushedFilters, log_pushdown
from sluicemq.spark.options import parse_options
from sluicemq.spark.progress import stream_progress
from sluicemq.spark.report import parse_pushed_filters
from sluicemq.spark.schema import declared_columns, resolve_schema, to_spark_schema


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["1", "-20"], "int"),
        (["1", "3000000000"], "bigint"),
        (["1", "2.5", "1e3"], "double"),
        (["true", "False"], "boolean"),
        (["1", "x"], "string"),
        (["007"], "string"),
        (["5d"], "string"),
        ([""], "string"),
        (["99999999999999999999"], "double"),
    ],
)
def test_the_narrowest_type_of_all_values(texts: list[str], kind: str) -> None:
    assert infer.infer_type(texts) == kind


def test_auto_and_every_become_columns() -> None:
    seen = {"delay": "1", "origin": "JFK", "Tags": "x", "KEYS": "k", "n": "2.5"}
    options = parse_options({"columns": "body,prop:delay:auto as late,prop:gone:auto,prop:*"})
    declared = declared_columns(options)
    found = infer.infer_types(declared, options, lambda _: [seen])
    assert [(one.name, one.property_name, one.type_name) for one in found] == [
        ("body", None, "binary"), ("late", "delay", "int"), ("gone", "gone", "string"),
        ("delay", "delay", "int"), ("n", "n", "double"), ("origin", "origin", "string"),
    ]  # fmt: skip
    assert resolve_schema(to_spark_schema(found), declared) == found


def progress(**changes: Any) -> dict[str, Any]:
    point = {"version": 1, "topic": "t", "filter": "SQL92 a = 1"}
    source = {
        "numInputRows": 30,
        "startOffset": point | {"queues": {"a": {"0": 100}}},
        "endOffset": point | {"queues": {"a": {"0": 200, "1": 9}}, "from": {"a": {"1": 4}}},
        "latestOffset": point | {"queues": {"a": {"0": 250, "1": 9, "2": 5}}},
    } | changes
    return {"batchId": 7, "processedRowsPerSecond": 60.0, "sources": [source, {"endOffset": "x"}]}


def test_progress_in_the_words_of_a_queue() -> None:
    found = stream_progress(progress())
    assert (found.rows, found.filtered, found.lag) == (30, 75, 55)
    assert found.lag_by_queue == {
        MessageQueue("t", "a", 0): 50, MessageQueue("t", "a", 1): 0, MessageQueue("t", "a", 2): 5,
    }  # fmt: skip
    assert found.describe() == (
        "batch 7: 30 rows, 60 rows/s, 75 filtered at the broker, lag 55 (0 s left)"
    )


def test_the_lag_is_unknown_where_spark_does_not_tell() -> None:
    found = stream_progress(progress(latestOffset=None))
    assert found.lag is None
    assert "lag unknown" in found.describe()


PLAN = """
(1) BatchScan rocketmq
Output [2]: [tags#0, delay#1]
PushedFilters: [EqualTo(tags,A), In(delay, [1,2]), Not(EqualTo(delay,5))]
ReadSchema: struct<tags:string,delay:int>

(2) Filter
Input [2]: [tags#0, delay#1]
Condition : Contains(tags#0, x)
"""


def test_a_plan_says_what_files_were_offered() -> None:
    assert parse_pushed_filters(PLAN) == [
        "EqualTo(tags,A)",
        "In(delay, [1,2])",
        "Not(EqualTo(delay,5))",
    ]
    assert parse_pushed_filters("") == []


def test_one_line_of_the_log_a_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    left = Not(StringContains(("origin",), "J"))
    offered = [EqualTo(("tags",), "A"), left]
    log_pushdown("t", PushedFilters(tags=frozenset("A")), offered, [left], "the broker")
    log_pushdown("t", PushedFilters(), [], [], "the broker")
    (record,) = caplog.records
    assert record.getMessage() == (
        "rocketmq 't': the broker evaluates tags in ['A'];"
        " of the predicates that Spark offered, it evaluates: Not(StringContains(origin, 'J'))"
    )


def test_an_error_of_fetching_rows_is_the_error_of_the_task() -> None:
    reason = "[CAST_INVALID_INPUT] The value '120.50' of the type \"STRING\" is malformed."
    awaited = (
        "org.apache.spark.SparkException: Exception thrown in awaitResult: \n\tat a.B(B.scala:1)"
    )
    text = (
        f"An error occurred while calling o43.getResult.\n: {awaited}\nCaused by: {awaited}\n"
        f"Caused by: org.apache.spark.SparkNumberFormatException: {reason} SQLSTATE: 22018\n"
        "== SQL (line 1, position 1) ==\nint(x)\n^^^\n\n\tat c.D(D.scala:2)\n"
    )
    assert summarize_spark_error(RuntimeError(text)) == reason
    lost = f"{awaited}\nCaused by: java.io.IOException: No space left on device\n\tat e.F(F.java:3)"
    assert summarize_spark_error(RuntimeError(lost)) == "No space left on device"
    assert summarize_spark_error(RuntimeError(awaited)).startswith("org.apache.spark.Spark")
