"""Structured Streaming: offsets that lose and repeat nothing, limits, filters, mistakes."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.model.message import Message

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
    producer.routes.forget(topic)
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
    assert f"the checkpoint is of the topic '{topic}', the stream reads '{topic}-other'" in line


def test_a_topic_made_anew_is_noticed(
    job: Job, topic: str, publish: Publish, admin: Admin, producer: Producer
) -> None:
    publish(0, 10)
    job.run(topic)
    admin.delete_topic(topic)
    admin.create_topic(topic, queues=2)
    producer.routes.forget(topic)
    publish(0, 2)
    line = failure(lambda: job.run(topic))
    assert "the topic was deleted and made anew" in line


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nameServers": "127.0.0.1:1"}, "no name server answers [127.0.0.1:1"),
        ({"topic": "no-such-topic"}, "no broker serves the topic 'no-such-topic'"),
        ({"endingOffsets": "latest"}, "'endingOffsets' does not go with a stream read"),
        ({"filter__sql": "a >"}, "The SQL92 expression does not compile"),
    ],
)
def test_a_mistake_stands_in_the_first_line_of_the_exception(
    job: Job, topic: str, options: dict[str, str], text: str
) -> None:
    options = dict(options)
    name = options.pop("topic", topic)
    assert text in failure(lambda: job.run(name, **options))
