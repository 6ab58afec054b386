"""Archive and replay on our broker and on the real RocketMQ 5.3.3."""

from pathlib import Path
from typing import Any

import pytest
from peer import clusters

from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.model.message import Message
from sluicemq.pipelines.archive import archive, read_archive, replay
from sluicemq.pipelines.sinks.verify import COLUMNS
from waiting import wait_for

# py4j leaves sockets to the garbage collector: no fault of the test that it runs in.
pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore::ResourceWarning")]

TOPIC = "archive-on-both"
COUNT = 600
COMPRESSED = b"compressible " * 1_000


@pytest.fixture(scope="module", params=["sluicemq", "rocketmq"])
def running(request: pytest.FixtureRequest, cluster: Any) -> clusters.Cluster:
    found: clusters.Cluster = cluster(request.param)
    return found


def publish(running: clusters.Cluster, topic: str, first: int, number: int) -> None:
    """Numbered messages in two queues, one compressed; visible when it returns."""
    with Admin(running.name_server) as admin, Producer(running.name_server) as producer:
        admin.create_topic(topic, queues=2)
        before = stored(admin, topic)
        queues = producer.write_queues(topic)
        for queue in queues:
            mine = range(first + queue.queue_id, first + number, 2)
            producer.send_batch([message(topic, index) for index in mine], queue=queue)
        producer.send(Message(topic, COMPRESSED, tag="big"), queue=queues[0])
        await_stored(admin, topic, before + number + 1)


def message(topic: str, index: int) -> Message:
    return Message(topic, f"body-{index}".encode(), tag=f"T{index % 3}", keys=(f"k{index}",),
                   properties={"number": str(index)})  # fmt: skip


def stored(admin: Admin, topic: str) -> int:
    return sum(admin.offset_max(queue) for queue in admin.queues(topic))


def await_stored(admin: Admin, topic: str, count: int) -> None:
    """The real broker builds its queues a moment after it has acknowledged."""
    wait_for(lambda: stored(admin, topic) >= count)


def rows(frame: Any, *names: str) -> list[str]:
    return sorted(map(str, frame.select(*names).collect()))


@pytest.mark.thorough
def test_whole_messages_are_archived_verified_and_brought_back(
    spark: Any, running: clusters.Cluster, tmp_path: Path
) -> None:
    path, connection = str(tmp_path / "archive"), {"nameServers": running.name_server}
    for turn in range(2):
        publish(running, TOPIC, turn * COUNT, COUNT)
        report = archive(spark, connection, path=path, topics=[TOPIC], say=str)
        assert report.figures == {"rows": COUNT + 1, "verified": COUNT + 1}
    source = spark.read.format("rocketmq").options(**connection)
    whole = source.options(topic=TOPIC, columns=",".join(COLUMNS), properties="all").load()
    archived = read_archive(spark, path)
    assert rows(archived, *COLUMNS) == rows(whole, *COLUMNS)
    assert archived.where(f"length(body) = {len(COMPRESSED)} and sys_flag & 1 = 1").count() == 2
    with Admin(running.name_server) as admin:
        admin.create_topic(f"{TOPIC}-again", queues=2)
        report = replay(
            spark, connection, path=path, name=f"again-{running.kind}", to=f"{TOPIC}-again",
            where="tags = 'T1'", delivery="at-least-once", ids="same", queues="same", say=str,
        )  # fmt: skip
        assert report.figures["rows"] == 2 * COUNT // 3
        await_stored(admin, f"{TOPIC}-again", 2 * COUNT // 3)
    back = spark.read.format("rocketmq").options(**connection).option("topic", f"{TOPIC}-again")
    names = ("msg_id", "keys", "tags", "body", "queue_id")
    assert rows(back.load(), *names) == rows(archived.where("tags = 'T1'"), *names)
