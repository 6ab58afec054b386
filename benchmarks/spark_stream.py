"""Streams of our source beside those of an idle Python source and of Spark's Kafka connector.

`available_now` times one micro-batch of everything, to Spark's noop sink. `empty_trigger` is the
median of a micro-batch without rows: of ours every message is left out by the broker's filter, the
floor is a Python source with as many partitions that yields nothing. `latency` is the time from a
send to the row in a memory sink; the sink is asked through py4j, which runs no job.
"""

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from spark_read import QUEUES, TOPIC

from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer

TRIGGERS = 20
SENDS = 40


def ours(spark: Any, name_server: str, **options: str) -> Any:
    given = {"nameServers": name_server, "topic": TOPIC, "startingOffsets": "earliest"} | options
    return spark.readStream.format("rocketmq").options(**given).load()


def ceiling(spark: Any, options: dict[str, str]) -> Any:
    return spark.readStream.format("ceiling").options(**options).load()


def available_now(frame: Any, expected: int) -> None:
    """Raises when rows are missing."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        writer = frame.writeStream.format("noop").option("checkpointLocation", directory)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        found = sum(one.numInputRows for one in query.recentProgress)
        assert found == expected, (found, expected)


def empty_trigger_floor(spark: Any, options: dict[str, str], directory: Path) -> float:
    """Median milliseconds of a micro-batch in which no partition yields a row."""
    query = _to_noop(ceiling(spark, options | {"rows": "0"}), directory / "floor")
    while len(query.recentProgress) < TRIGGERS + 2:
        time.sleep(0.2)
    query.stop()
    return _median_ms(query)


def empty_trigger(spark: Any, name_server: str, directory: Path) -> float:
    """The same for a micro-batch whose messages the broker left out, one of each queue."""
    topic = "bench-empty"
    with Admin(name_server) as admin:
        admin.create_topic(topic, queues=QUEUES)
    frame = ours(spark, name_server, **{"topic": topic, "filter.tags": "nothing"})
    query = _to_noop(frame, directory / "empty")
    with Producer(name_server) as producer:
        for _ in range(TRIGGERS + 2):
            for queue in producer.write_queues(topic):
                producer.send(topic, b"other", tag="other", queue=queue)
            query.processAllAvailable()
    query.stop()
    return _median_ms(query)


def _to_noop(frame: Any, checkpoint: Path) -> Any:
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    return writer.trigger(processingTime="0 seconds").start()


def _median_ms(query: Any) -> float:
    """Of the micro-batches that were run, all but the first two."""
    times = [
        one.durationMs["triggerExecution"]
        for one in query.recentProgress
        if "addBatch" in one.durationMs
    ]
    return statistics.median(times[2:])


def latency(spark: Any, name_server: str, directory: Path, rng: random.Random) -> list[float]:
    """Milliseconds from a send to the row, of single messages at random moments."""
    topic, table = "bench-latency", "bench_latency"
    with Admin(name_server) as admin:
        admin.create_topic(topic, queues=QUEUES)
    frame = ours(spark, name_server, topic=topic, columns="body")
    writer = frame.writeStream.format("memory").queryName(table)
    query = writer.option("checkpointLocation", str(directory / "latency")).start()
    sink = query._jsq.streamingQuery().sink()
    found = []
    with Producer(name_server) as producer:
        for number in range(SENDS + 5):
            time.sleep(rng.random() * 0.5)
            started = time.perf_counter()
            producer.send(topic, b"%d" % number)
            while sink.allData().size() <= number:
                time.sleep(0.005)
            found.append((time.perf_counter() - started) * 1000)
    query.stop()
    return found[5:]
