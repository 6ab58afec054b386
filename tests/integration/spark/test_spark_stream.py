"""Structured Streaming: offsets that lose and repeat nothing, limits, filters, mistakes."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.model.message import Message
from sluicemq.spark.progress import stream_progress
from sluicemq.spark.sources.stream import SupportsTriggerAvailableNow
from waiting import limit

pytestmark = pytest.mark.timeout(300)

Publish = Callable[[int, int], None]


class Job:
    """A stream from the topic into Parquet, run until all that is there now is read."""

    def __init__(self, spark: Any, name_server: str, directory: Path) -> None:
        self.spark = spark
        self.name_server = name_server
        self.output = str(directory / "out")
        self.checkpoint = str(directory / "checkpoint")

    def run(self, topic: str, **options: str) -> Any:
        """Runs with Trigger.AvailableNow and returns the finished query."""
        given = {"nameServers": self.name_server, "topic": topic, "startingOffsets": "earliest"}
        given |= {name.replace("__", "."): value for name, value in options.items()}
        frame = self.spark.readStream.format("rocketmq").options(**given).load()
        query = (
            frame.writeStream.format("parquet")
            .option("checkpointLocation", self.checkpoint)
            .trigger(availableNow=True)
            .start(self.output)
        )
        query.awaitTermination(120)
        return query

    def numbers(self) -> Counter[int]:
        """How often each message number was written."""
        rows = self.spark.read.parquet(self.output).select("body").collect()
        return Counter(int(bytes(row.body).decode().split("-")[1]) for row in rows)


@pytest.fixture
def job(spark: Any, name_server: str, tmp_path: Path) -> Job:
    return Job(spark, name_server, tmp_path)


def test_a_restart_goes_on_where_the_checkpoint_is(job: Job, topic: str, publish: Publish) -> None:
    publish(0, 50)
    job.run(topic)
    assert job.numbers() == Counter(range(50))
    publish(50, 30)
    job.run(topic)
    job.run(topic)
    assert job.numbers() == Counter(range(80))


@pytest.mark.thorough
@pytest.mark.usefixtures("admission")
def test_the_last_micro_batch_is_repeated_exactly_after_a_failed_commit(
    job: Job, topic: str, publish: Publish
) -> None:
    """Without its last commit file Spark plans that micro-batch again from the offset log; the
    file sink then knows it has it, so any other range would lose or repeat messages."""
    publish(0, 60)
    job.run(topic, maxOffsetsPerTrigger="20")
    publish(60, 20)
    last = max((Path(job.checkpoint) / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
    job.run(topic)
    assert job.numbers() == Counter(range(80))


@pytest.mark.usefixtures("admission")
def test_a_trigger_takes_at_most_the_offsets_allowed(
    job: Job, topic: str, publish: Publish
) -> None:
    publish(0, 50)
    query = job.run(topic, maxOffsetsPerTrigger="20")
    rows = [progress["numInputRows"] for progress in query.recentProgress]
    assert [count for count in rows if count] == [20, 20, 10]
    assert job.numbers() == Counter(range(50))


def test_filtered_messages_count_as_read(job: Job, topic: str, publish: Publish) -> None:
    publish(0, 60)
    job.run(topic, filter__sql="origin = 'JFK'", columns="body,prop:origin")
    assert job.numbers() == Counter(range(1, 60, 3))
    publish(60, 30)
    job.run(topic, filter__sql="origin = 'JFK'", columns="body,prop:origin")
    assert job.numbers() == Counter(range(1, 90, 3))


def test_a_stream_can_filter_by_tags(job: Job, topic: str, publish: Publish) -> None:
    publish(0, 30)
    job.run(topic, filter__tags="A||C")
    assert job.numbers() == Counter(n for n in range(30) if n % 3 != 1)


def test_a_new_queue_is_read_from_its_first_message(
    job: Job, topic: str, publish: Publish, admin: Admin, producer: Producer
) -> None:
    publish(0, 20)
    job.run(topic)
    admin.create_topic(topic, queues=3)
    producer.routes.expire(topic)
    queue = next(one for one in producer.write_queues(topic) if one.queue_id == 2)
    producer.send_batch([Message(topic, b"body-77")], queue=queue)
    job.run(topic)
    assert job.numbers() == Counter([*range(20), 77])


def test_progress_and_group_show_how_far_the_stream_is(
    job: Job, topic: str, publish: Publish, admin: Admin
) -> None:
    publish(0, 30)
    query = job.run(topic, group="spark-group")
    source = query.lastProgress["sources"][0]
    assert topic in str(source["endOffset"])
    publish(30, 10)
    job.run(topic, group="spark-group")
    committed = {
        queue.queue_id: admin.committed_offset("spark-group", queue)
        for queue in admin.queues(topic)
    }
    assert committed == {0: 15, 1: 15}, "Spark commits a micro-batch when it starts the next one"


@pytest.mark.usefixtures("admission")
def test_progress_tells_lag_and_what_the_broker_left_out(
    job: Job, topic: str, publish: Publish
) -> None:
    publish(0, 60)
    query = job.run(topic, filter__tags="A", maxOffsetsPerTrigger="40")
    first, second = [stream_progress(one) for one in query.recentProgress][:2]
    assert first.lag == 20
    assert (first.rows + second.rows, first.filtered + second.filtered) == (20, 40)
    assert second.lag == 0


@pytest.mark.usefixtures("admission")
def test_a_trigger_takes_about_the_bytes_allowed(job: Job, topic: str, publish: Publish) -> None:
    publish(0, 100)
    query = job.run(topic, maxBytesPerTrigger="5000")
    rows = [progress["numInputRows"] for progress in query.recentProgress]
    assert next(count for count in rows if count) in range(15, 35)
    assert job.numbers() == Counter(range(100))


def test_a_running_stream_reads_topics_that_are_made_meanwhile(
    spark: Any, name_server: str, topic: str, publish: Publish, admin: Admin,
    producer: Producer, tmp_path: Path,
) -> None:  # fmt: skip
    """With Trigger.ProcessingTime, and a pattern; the text of a body as a column."""
    publish(0, 10)
    source = spark.readStream.format("rocketmq").option("nameServers", name_server)
    source = source.option("topicsPattern", rf"{topic}(-more)?").option("bodyFormat", "utf-8")
    query = (
        source.option("startingOffsets", "earliest").load().select("body")
        .writeStream.format("memory").queryName("meanwhile")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(processingTime="200 milliseconds").start()
    )  # fmt: skip
    try:
        await_rows(spark, "meanwhile", 10)
        admin.create_topic(f"{topic}-more", queues=1)
        producer.send(Message(f"{topic}-more", b"body-77"))
        await_rows(spark, "meanwhile", 11)
    finally:
        query.stop()


def await_rows(spark: Any, table: str, count: int) -> None:
    deadline = time.monotonic() + limit(60)
    while (found := spark.table(table).count()) < count:
        assert time.monotonic() < deadline, f"{found} rows"
        time.sleep(0.1)
    assert found == count


def test_a_changed_filter_is_refused_unless_allowed(job: Job, topic: str, publish: Publish) -> None:
    publish(0, 9)
    job.run(topic, filter__tags="A")
    publish(9, 9)
    line = failure(lambda: job.run(topic, filter__tags="B"))
    assert "the checkpoint was written with the filter 'TAG A', but the stream has 'TAG B'" in line
    job.run(topic, filter__tags="B", onFilterChange="continue")
    assert job.numbers() == Counter([0, 3, 6, 10, 13, 16])


def test_another_query_on_the_same_checkpoint_is_noticed(
    job: Job, topic: str, publish: Publish
) -> None:
    """Another driver has written the offsets of the micro-batch that this one is about to plan."""
    publish(0, 10)
    job.run(topic)
    source = job.spark.readStream.format("rocketmq").option("nameServers", job.name_server)
    query = (
        source.option("topic", topic).load().writeStream.format("parquet")
        .option("checkpointLocation", job.checkpoint)
        .trigger(processingTime="500 milliseconds").start(job.output)
    )  # fmt: skip
    try:
        log = Path(job.checkpoint) / "offsets"
        last = max(int(path.name) for path in log.glob("[0-9]*"))
        await_idle(query)
        (log / str(last + 1)).write_bytes((log / str(last)).read_bytes())
        publish(10, 10)
        line = failure(lambda: query.awaitTermination(60) or pytest.fail("it went on"))
    finally:
        query.stop()
    assert "CONCURRENT_STREAM_LOG_UPDATE" in line or "oncurrent" in line


def await_idle(query: Any) -> None:
    deadline = time.monotonic() + limit(60)
    while query.status["message"] != "Waiting for next trigger":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def failure(work: Callable[[], object]) -> str:
    """The first line of the exception of a failing query."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Spark's own classes differ by version
        work()
    text = str(caught.value)
    return next(line for line in text.splitlines() if line.strip())


def test_a_checkpoint_of_another_topic_is_refused(
    job: Job, topic: str, publish: Publish, admin: Admin
) -> None:
    publish(0, 10)
    job.run(topic)
    admin.create_topic(f"{topic}-other", queues=2)
    line = failure(lambda: job.run(f"{topic}-other"))
    assert f"the checkpoint is of the topic '{topic}', but the stream reads '{topic}-other'" in line


def test_a_topic_made_anew_is_noticed(
    job: Job, topic: str, publish: Publish, admin: Admin, producer: Producer
) -> None:
    publish(0, 10)
    job.run(topic)
    admin.delete_topic(topic)
    admin.create_topic(topic, queues=2)
    producer.routes.expire(topic)
    publish(100, 2)
    line = failure(lambda: job.run(topic))
    assert "the topic was deleted and created again" in line
    publish(102, 28)
    line = failure(lambda: job.run(topic))
    assert f"the topic '{topic}' was deleted and created again" in line, "though it is longer now"
    job.run(topic, failOnDataLoss="false")
    publish(130, 5)
    job.run(topic)
    assert job.numbers() == Counter([*range(10), *range(100, 135)])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"nameServers": "127.0.0.1:1", "timeoutMs": "1000"},
            "no name server responded (127.0.0.1:1",
        ),
        (
            {"topic": "no-such-topic", "timeoutMs": "5000"},
            "the topic 'no-such-topic' does not exist",
        ),
        ({"endingOffsets": "latest"}, "'endingOffsets' is not supported for a stream read"),
        ({"filter__sql": "a >"}, "The SQL92 expression does not compile"),
    ],
)
def test_a_mistake_stands_in_the_first_line_of_the_exception(
    job: Job, topic: str, options: dict[str, str], text: str
) -> None:
    options = dict(options)
    name = options.pop("topic", topic)
    assert text in failure(lambda: job.run(name, **options))


@pytest.mark.skipif(SupportsTriggerAvailableNow is not None, reason="this Spark can bound them")
def test_an_older_spark_says_that_it_cannot_bound_a_micro_batch(job: Job, topic: str) -> None:
    line = failure(lambda: job.run(topic, maxOffsetsPerTrigger="20"))
    assert "'maxOffsetsPerTrigger' needs Spark 4.2 or later" in line
