"""Writing DataFrames to a topic, batch and streaming."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

Read = Callable[..., Any]
Publish = Callable[[int, int], None]


def write(frame: Any, name_server: str, topic: str, **options: str) -> None:
    given = {"nameServers": name_server, "topic": topic} | options
    frame.write.format("rocketmq").options(**given).mode("append").save()


def test_rows_become_messages(spark: Any, read: Read, name_server: str, topic: str) -> None:
    frame = spark.range(500).selectExpr(
        "concat('body-', id) as value",
        "if(id % 2 = 0, 'even', null) as tag",
        "array(concat('k', id), 'all') as keys",
        "map('number', cast(id as string), 'UNIQ_KEY', 'x', 'none', null) as properties",
    )
    write(frame, name_server, topic, batchMessages="64")
    rows = read(columns="body,tags,keys,properties").collect()
    assert len(rows) == 500
    by_number = {int(row.properties["number"]): row for row in rows}
    assert sorted(by_number) == list(range(500))
    assert bytes(by_number[7].body) == b"body-7"
    assert (by_number[7].tags, by_number[8].tags) == (None, "even")
    assert by_number[7].keys == "k7 all"
    assert by_number[7].properties == {"number": "7"}


def test_what_was_read_can_be_written_with_queue_and_topic_from_columns(
    spark: Any, read: Read, name_server: str, topic: str, publish: Publish
) -> None:
    publish(0, 60)
    copy = f"{topic}-copy"
    frame = read().withColumn(
        "topic", __import__("pyspark.sql.functions", fromlist=["lit"]).lit(copy)
    )
    frame.write.format("rocketmq").option("nameServers", name_server).mode("append").save()
    found = (
        spark.read.format("rocketmq").options(nameServers=name_server, topic=copy).load().collect()
    )
    assert {
        (row.queue_id, bytes(row.body), row.keys, row.properties["origin"]) for row in found
    } == {
        (row.queue_id, bytes(row.body), row.keys, row.properties["origin"])
        for row in read().collect()
    }


def test_a_stream_can_be_written(
    spark: Any, read: Read, name_server: str, topic: str, publish: Publish, tmp_path: Path
) -> None:
    publish(0, 40)
    source = spark.readStream.format("rocketmq").options(
        nameServers=name_server, topic=topic, startingOffsets="earliest", columns="body,tags"
    )
    query = (
        source.load()
        .writeStream.format("rocketmq")
        .options(nameServers=name_server, topic=f"{topic}-streamed")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(120)
    found = read(topic=f"{topic}-streamed")
    assert sorted((bytes(row.body), row.tags) for row in found.collect()) == sorted(
        (f"body-{n}".encode(), "ABC"[n % 3]) for n in range(40)
    )


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("id as body", "the column 'body' has the type 'bigint'. Cast it to binary or string"),
        ("'x' as boddy", "the column 'boddy' cannot be written. Did you mean 'body'?"),
        ("'x' as tag", "the column 'body' or 'value' is missing"),
        ("if(id = 3, null, 'x') as body", "a row has no body"),
        ("'x' as body, 99 as queue_id", "has no writable queue 99"),
        ("'x' as body, 'a|b' as tag", "contains '|'"),
    ],
)
def test_a_mistake_is_named(
    spark: Any, name_server: str, topic: str, expression: str, text: str
) -> None:
    frame = (
        spark.range(10).selectExpr(*expression.split(", "))
        if "null" not in expression
        else (spark.range(10).selectExpr(expression))
    )
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Spark's own classes differ by version
        write(frame, name_server, topic)
    assert text in str(caught.value)


BAD_ROWS = (
    "concat('body-', id) as value",
    "if(id % 10 = 3, 'a|b', 'good') as tag",
    "if(id % 10 = 4, map('n', ''), map('n', cast(id as string))) as properties",
)


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_bad_rows_are_named_left_out_or_kept_in_a_topic(
    spark: Any, read: Read, name_server: str, topic: str, delivery: str
) -> None:
    frame = spark.range(0, 100, 1, 2).selectExpr(*BAD_ROWS)
    with pytest.raises(Exception, match=r"row 4 of partition [01], column 'tag'"):
        write(frame, name_server, topic, delivery=delivery)
    assert read().count() == 0, "the tasks end at their first rows"
    write(frame, name_server, topic, delivery=delivery, badRows="skip")
    wanted = [b"body-%d" % number for number in range(100) if number % 10 not in (3, 4)]
    assert sorted(bytes(row.body) for row in read().collect()) == sorted(wanted)
    write(frame, name_server, f"{topic}-copy", delivery=delivery, badRows=f"topic:{topic}-bad")
    assert read(topic=f"{topic}-copy").count() == len(wanted)
    kept = read(topic=f"{topic}-bad", columns="body,prop:SLUICE_BAD_ROW,prop:SLUICE_BAD_COLUMN")
    back = kept.selectExpr(
        "get_json_object(cast(body as string), '$.value') as value",
        "SLUICE_BAD_ROW as why", "SLUICE_BAD_COLUMN as place",
    ).collect()  # fmt: skip
    assert {(row.value, row.place) for row in back} == {
        (f"body-{number}", "tag" if number % 10 == 3 else "properties")
        for number in range(100) if number % 10 in (3, 4)
    }  # fmt: skip
    assert {row.why.partition(" ")[0] for row in back} == {"the"}


def test_a_stream_goes_on_behind_a_bad_row(
    spark: Any, read: Read, name_server: str, topic: str, publish: Publish, tmp_path: Path
) -> None:
    """It would stop at the row for ever, since each start begins with the same micro-batch."""
    publish(0, 20)
    source = spark.readStream.format("rocketmq").options(
        nameServers=name_server, topic=topic, startingOffsets="earliest", columns="body,keys"
    )
    rows = source.load().selectExpr("body", "if(body = 'body-7', 'a|b', 'c') as tag", "keys")

    def run(**options: str) -> None:
        writer = rows.writeStream.format("rocketmq").trigger(availableNow=True)
        writer = writer.options(nameServers=name_server, topic=f"{topic}-out", **options)
        writer.option("checkpointLocation", str(tmp_path)).start().awaitTermination(120)

    with pytest.raises(Exception, match=r"keys 'k7 all'\), column 'tag'"):
        run()
    run(badRows="skip")
    found = {bytes(row.body) for row in read(topic=f"{topic}-out").collect()}
    assert found == {b"body-%d" % number for number in range(20) if number != 7}


def test_a_topic_is_not_overwritten(spark: Any, name_server: str, topic: str) -> None:
    writer = spark.range(1).selectExpr("'x' as body").write.format("rocketmq")
    with pytest.raises(Exception, match="cannot be overwritten"):
        writer.options(nameServers=name_server, topic=topic).mode("overwrite").save()


def test_an_unreachable_name_server_is_named(spark: Any) -> None:
    with pytest.raises(Exception, match=r"no name server responded \(127.0.0.1:1"):
        write(spark.range(1).selectExpr("'x' as body"), "127.0.0.1:1", "t")
