"""Spark on our broker and on the real RocketMQ 5.3.3: the same rows, filters and offsets."""

import time
from pathlib import Path
from typing import Any

import pytest
from peer import clusters

from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.model.message import Message

# py4j leaves sockets to the garbage collector: no fault of the test that it runs in.
pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore::ResourceWarning")]

TOPIC = "spark-on-both"
COUNT = 3_000
COMPRESSED = b"compressible " * 1_000


@pytest.fixture(scope="module")
def spark() -> Any:
    """Never stopped: Spark has one session a process, which other test modules use as well."""
    from sluicemq.spark.session import spark_session

    settings = {"spark.sql.shuffle.partitions": "2", "spark.log.level": "ERROR"}
    return spark_session("tests", master="local[2]", settings=settings)


@pytest.fixture(scope="module", params=["sluicemq", "rocketmq"])
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
    deadline = time.monotonic() + 10
    while sum(admin.offset_max(queue) for queue in admin.queues(topic)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


def test_a_stream_goes_on_from_its_checkpoint(
    spark: Any, filled: clusters.Cluster, tmp_path: Path
) -> None:
    for _ in range(2):
        source = spark.readStream.format("rocketmq").option("nameServers", filled.name_server)
        frame = source.options(
            **{"topic": TOPIC, "startingOffsets": "earliest", "filter.sql": "late IS NOT NULL",
               "maxOffsetsPerTrigger": "1000"}
        ).load()  # fmt: skip
        query = (
            frame.writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "rows"))
        )
        query.awaitTermination(120)
    assert numbers(spark.read.parquet(str(tmp_path / "rows"))) == [n for n in range(COUNT) if n % 7]


def test_rows_are_written(spark: Any, filled: clusters.Cluster) -> None:
    frame = spark.range(2_000).selectExpr("concat('body-', id) as body", "'x' as tag")
    writer = frame.write.format("rocketmq").option("nameServers", filled.name_server)
    writer.option("topic", f"{TOPIC}-written").mode("append").save()
    with Admin(filled.name_server) as admin:
        await_visible(admin, 2_000, f"{TOPIC}-written")
    assert numbers(read(spark, filled, topic=f"{TOPIC}-written")) == list(range(2_000))
