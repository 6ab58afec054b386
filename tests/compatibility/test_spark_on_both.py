"""Spark on our broker and on the real RocketMQ 5.3.3: the same rows, filters and offsets."""

from pathlib import Path
from typing import Any

import pytest
from peer import clusters
from pyspark.sql.streaming.datasource import ReadAllAvailable

from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.errors import OffsetOutOfRangeError
from sluicemq.model.message import Message
from sluicemq.spark.schema import parse_columns, to_spark_schema
from sluicemq.spark.sources.stream import create_stream_reader
from waiting import wait_for

# py4j leaves sockets to the garbage collector: no fault of the test that it runs in.
pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore::ResourceWarning")]

TOPIC = "spark-on-both"
COUNT = 3_000
COMPRESSED = b"compressible " * 1_000


@pytest.fixture(
    scope="module", params=["rocketmq", pytest.param("sluicemq", marks=pytest.mark.thorough)]
)
def filled(request: pytest.FixtureRequest, cluster: Any) -> clusters.Cluster:
    """A cluster of each kind with the same messages in four queues."""
    running: clusters.Cluster = cluster(request.param)
    with Admin(running.name_server) as admin, Producer(running.name_server) as producer:
        admin.create_topic(TOPIC, queues=4)
        queues = producer.write_queues(TOPIC)
        for queue in queues:
            mine = [index for index in range(COUNT) if index % 4 == queue.queue_id]
            for first in range(0, len(mine), 500):
                messages = [message(index) for index in mine[first : first + 500]]
                producer.send_batch(messages, queue=queue)
        producer.send(Message(TOPIC, COMPRESSED, tag="big"), queue=queues[0])
        await_visible(admin, COUNT + 1)
    return running


def await_visible(admin: Admin, count: int, topic: str = TOPIC) -> None:
    """The real broker builds its queues a moment after it has acknowledged."""
    wait_for(lambda: sum(admin.offset_max(queue) for queue in admin.queues(topic)) >= count)


def message(index: int) -> Message:
    properties = {"number": str(index)} | ({"late": str(index % 90)} if index % 7 else {})
    return Message(TOPIC, f"body-{index}".encode(), tag=f"T{index % 3}", keys=(f"k{index}",),
                   properties=properties)  # fmt: skip


def read(spark: Any, running: clusters.Cluster, **options: str) -> Any:
    reader = spark.read.format("rocketmq").option("nameServers", running.name_server)
    given = {name.replace("__", "."): value for name, value in options.items()}
    return reader.option("topic", TOPIC).options(**given).load()


def numbers(frame: Any) -> list[int]:
    rows = frame.selectExpr("cast(body as string) as text").collect()
    return sorted(int(row.text.partition("-")[2]) for row in rows)


def test_every_message_arrives_whole(spark: Any, filled: clusters.Cluster) -> None:
    rows = read(spark, filled).collect()
    assert len(rows) == COUNT + 1
    by_key = {row.keys: row for row in rows}
    row = by_key["k10"]
    assert (bytes(row.body), row.tags, row.queue_id) == (b"body-10", "T1", 2)
    assert row.properties == {"number": "10", "late": "10"}
    assert bytes(by_key[None].body) == COMPRESSED


@pytest.mark.parametrize("minimum", ["1", "12"])
def test_filters_at_the_broker_are_exact(
    spark: Any, filled: clusters.Cluster, minimum: str
) -> None:
    """Also in many small ranges, whose ends lie inside of what a filtered pull skips."""
    tagged = read(spark, filled, filter__tags="T1", minPartitions=minimum)
    assert numbers(tagged) == [n for n in range(COUNT) if n % 3 == 1]
    selected = read(spark, filled, filter__sql="late > 80", minPartitions=minimum)
    assert numbers(selected) == [n for n in range(COUNT) if n % 7 and n % 90 > 80]


def test_predicates_are_pushed_down(spark: Any, filled: clusters.Cluster) -> None:
    frame = read(spark, filled, columns="body,tags,queue_offset,store_time,prop:late:int")
    wanted = [n for n in range(COUNT) if n % 3 == 0 and n % 7 and n % 90 < 30 and n // 4 < 400]
    predicate = "tags = 'T0' and late < 30 and queue_offset < 400 and store_time > '2020-01-01'"
    assert numbers(frame.where(predicate)) == wanted


def test_keys_topics_and_bodies(spark: Any, filled: clusters.Cluster) -> None:
    """Equality on keys (index or SQL92), two topics in one read, bodies as JSON with reasons."""
    frame = read(spark, filled, columns="topic,body,keys")
    assert numbers(frame.where("keys in ('k77', 'k78', 'nobody')")) == [77, 78]
    with Admin(filled.name_server) as admin, Producer(filled.name_server) as producer:
        admin.create_topic(f"{TOPIC}-json", queues=1)
        for body in (b'{"n": 1}', b"{"):
            producer.send(Message(f"{TOPIC}-json", body, keys=("k77",)))
        await_visible(admin, 2, f"{TOPIC}-json")
    given = {"nameServers": filled.name_server, "columns": "topic,body,keys"}
    source = spark.read.format("rocketmq").options(**given)
    rows = source.options(
        topic=f"{TOPIC}-json", bodyFormat="json", bodySchema="n int"
    ).load().collect()  # fmt: skip
    assert sorted((row.body is None, row._error is None) for row in rows) == [
        (False, True), (True, False),
    ]  # fmt: skip
    source = spark.read.format("rocketmq").options(**given)
    both = source.option("topicsPattern", f"{TOPIC}(-json)?").load()
    assert both.where("keys = 'k77'").select("topic").distinct().count() == 2


def test_a_stream_goes_on_from_its_checkpoint(
    spark: Any, filled: clusters.Cluster, driver: Any, tmp_path: Path
) -> None:
    """With a limit of bytes; its group is seen by the real mqadmin."""
    for _ in range(2):
        source = spark.readStream.format("rocketmq").option("nameServers", filled.name_server)
        frame = source.options(
            **{"topic": TOPIC, "startingOffsets": "earliest", "filter.sql": "late IS NOT NULL",
               "maxBytesPerTrigger": "200000", "group": "spark-job"}
        ).load()  # fmt: skip
        query = (
            frame.writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "rows"))
        )
        query.awaitTermination(120)
        assert all(one["numInputRows"] < COUNT / 2 for one in query.recentProgress)
    assert numbers(spark.read.parquet(str(tmp_path / "rows"))) == [n for n in range(COUNT) if n % 7]
    (event,) = driver("java-5.3.3").call(
        "admin", ns=filled.name_server, words="\n".join(("consumerProgress", "-g", "spark-job"))
    )
    rows = [line.split() for line in str(event["text"]).splitlines() if line.startswith(TOPIC)]
    assert sorted(row[2] for row in rows) == ["0", "1", "2", "3"], event["text"]
    assert all(int(row[4]) > COUNT // 8 for row in rows), "committed when the next batch began"


def test_a_topic_made_anew_is_noticed_by_its_messages(
    filled: clusters.Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The source without Spark: what it asks is in the protocol of every version."""
    name, given = "spark-anew", {"nameServers": filled.name_server, "startingOffsets": "earliest"}
    stream = create_stream_reader(given | {"topic": name}, to_spark_schema(parse_columns("body")))
    with Admin(filled.name_server) as admin, Producer(filled.name_server) as producer:
        for count in (5, 9):
            admin.create_topic(name, queues=1)
            producer.routes.expire(name)
            producer.send_batch([Message(name, b"%d" % number) for number in range(count)])
            await_visible(admin, count, name)
            if count == 5:
                end = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
                admin.delete_topic(name)
    with pytest.raises(OffsetOutOfRangeError, match="'spark-anew' was deleted and created again"):
        stream.latestOffset(end, ReadAllAvailable())
    stream.stop()
    given["failOnDataLoss"] = "false"
    stream = create_stream_reader(given | {"topic": name}, to_spark_schema(parse_columns("body")))
    (part,) = stream.partitions(end, stream.latestOffset(end, ReadAllAvailable()))
    stream.stop()
    assert (part.start, part.end) == (0, 9)
    assert "continues at its beginning" in caplog.text


def test_rows_are_written(spark: Any, filled: clusters.Cluster) -> None:
    frame = spark.range(2_000).selectExpr("concat('body-', id) as body", "'x' as tag")
    writer = frame.write.format("rocketmq").option("nameServers", filled.name_server)
    writer.option("topic", f"{TOPIC}-written").mode("append").save()
    with Admin(filled.name_server) as admin:
        await_visible(admin, 2_000, f"{TOPIC}-written")
    assert numbers(read(spark, filled, topic=f"{TOPIC}-written")) == list(range(2_000))


def test_an_exactly_once_sink_writes_each_row_once_or_says_that_it_cannot(
    spark: Any, filled: clusters.Cluster
) -> None:
    """Our broker has epochs; on the real one each row has a key to tell repeated rows by."""
    topic = f"{TOPIC}-exact"
    frame = spark.range(0, 2_000, 1, 2).selectExpr("concat('body-', id) as body", "'x' as tag")
    for _ in range(2):  # the same write twice, as a job that is run again
        writer = frame.write.format("rocketmq").option("nameServers", filled.name_server)
        writer = writer.option("topic", topic).option("delivery", "exactly-once")
        writer.option("queryId", "job-7").mode("append").save()
    is_ours = filled.kind == "sluicemq"
    with Admin(filled.name_server) as admin:
        await_visible(admin, 2_000 if is_ours else 4_000, topic)
    rows = read(spark, filled, topic=topic, columns="body,properties")
    if is_ours:
        assert numbers(rows) == list(range(2_000))
        return
    assert numbers(rows) == sorted([*range(2_000), *range(2_000)])
    keyed = rows.selectExpr("body", "properties['SLUICE_DEDUP_KEY'] as key").collect()
    assert len({row.key for row in keyed}) == 2_000
    assert len({(row.key, bytes(row.body)) for row in keyed}) == 2_000
