"""Writing a DataFrame: ours at least once and exactly once, and `df.write` to Kafka.

    python benchmarks/spark_sink.py [--messages 1000000] [--repeat 3] [--kafka]

Same rows, same Spark session, in one run: 128 B bodies, a tag and three properties (headers for
Kafka, the tag as key) into four queues (or partitions), local[2]. The rows are made by Spark from
`range`, which costs the same for all; *noop* is that alone. With --kafka as in `spark_read.py`. The
best of the repetitions is shown, each into a topic of its own; every row is counted afterwards.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from spark_read import BODY_BYTES, QUEUES, ROOT, Cluster, Timing, best

from sluicemq.client.sync.admin import Admin
from sluicemq.spark.session import spark_session


def frame(spark: Any, messages: int) -> Any:
    """The rows of `spark_read.rows`, made by Spark."""
    return spark.range(0, messages, 1, QUEUES).selectExpr(
        f"cast(repeat(lpad(hex(id), 8, '0'), {BODY_BYTES // 8}) as binary) as body",
        "if(id % 100 = 0, 'hit', 'miss') as tags",
        "map('region', element_at(array('hz', 'sh', 'bj'), cast(id % 3 + 1 as int)),"
        " 'price', cast(id % 10007 as string), 'kind', 'order') as properties",
    )


def ours(rows: Any, name_server: str, topic: str, delivery: str) -> None:
    with Admin(name_server) as admin:
        admin.create_topic(topic, queues=QUEUES)
    given = {"nameServers": name_server, "topic": topic, "delivery": delivery}
    rows.write.format("rocketmq").options(**given).mode("append").save()


def stored(name_server: str, topic: str) -> int:
    with Admin(name_server) as admin:
        return sum(end - start for start, end in map(admin.offsets, admin.queues(topic)))


def to_kafka(rows: Any, kafka: Any, topic: str) -> None:
    headers = (
        "transform(map_entries(properties), e -> struct(e.key as key, cast(e.value as binary) as"
        " value)) as headers"
    )
    made = rows.selectExpr("body as value", "tags as key", headers)
    writer = made.write.format("kafka").option("kafka.bootstrap.servers", kafka.address)
    writer.option("topic", topic).option("includeHeaders", "true").save()


def show(title: str, messages: int, timing: Timing, against: Timing | None) -> None:
    share = f"  {against.wall_s / timing.wall_s:4.2f} x Kafka" if against is not None else ""
    print(
        f"{title:16s}{messages / timing.wall_s / 1000:6.0f} thousand rows/s"
        f"  [{timing.cpu_s / messages * 1e6:5.2f} µs CPU a row]{share}",
        flush=True,
    )


def compared(
    spark: Any, cluster: Cluster, messages: int, repeat: int, kafka: Any
) -> dict[str, Any]:
    rows = frame(spark, messages)
    figures: dict[str, Any] = {}
    topics = (f"sink-{number}" for number in range(1000))
    written: list[tuple[str, str]] = []

    def write(delivery: str, some: Any = rows) -> None:
        topic = next(topics)
        ours(some, cluster.name_server, topic, delivery)
        written.append((delivery, topic))

    warm = frame(spark, 20_000)
    warm.write.format("noop").mode("overwrite").save()
    figures["noop"] = best(repeat, lambda: rows.write.format("noop").mode("overwrite").save())
    show("rows alone", messages, figures["noop"], None)
    against = None
    if kafka is not None:
        to_kafka(warm, kafka, "warm")
        against = figures["kafka"] = best(repeat, lambda: to_kafka(rows, kafka, next(topics)))
        show("Kafka", messages, against, None)
    for delivery in ("at-least-once", "exactly-once"):
        write(delivery, warm)
        written.clear()
        before = cluster.cpu_s()
        figures[delivery] = best(repeat, lambda: write(delivery))  # noqa: B023 - called here
        broker_us = (cluster.cpu_s() - before) / repeat / messages * 1e6
        show(delivery, messages, figures[delivery], against)
        print(f"{'':16s}broker CPU {broker_us:.2f} µs a row", flush=True)
        for _, topic in written:
            assert stored(cluster.name_server, topic) == messages
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--kafka", action="store_true", help="compare with Kafka (needs mvn)")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), str(ROOT / "src")))
    settings = {"spark.driver.memory": "2g", "spark.log.level": "ERROR"}
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as text:
        directory = Path(text)
        kafka = None
        if arguments.kafka:
            import spark_kafka

            kafka = spark_kafka.start(directory)
            if isinstance(kafka, str):
                print(f"Kafka is skipped: {kafka}")
                kafka = None
            else:
                settings["spark.jars"] = kafka.connector_jars
        cluster = Cluster(directory / "store")
        spark = spark_session("bench-sink", master="local[2]", settings=settings)
        try:
            figures = compared(spark, cluster, arguments.messages, arguments.repeat, kafka)
        finally:
            spark.stop()
            cluster.close()
            if kafka is not None:
                kafka.close()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
