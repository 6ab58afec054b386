"""The exactly-once sink in Spark: task attempts that fail, a checkpoint that lost its last commit,
a driver that is killed, repeated writes. SLUICEMQ_SEEDS=8 kills more drivers."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thorough import seeds
from waiting import limit

pytestmark = pytest.mark.timeout(400)

Read = Callable[..., Any]
Publish = Callable[[int, int], None]
ROOT = Path(__file__).parents[3]
KILLS = min(seeds(1), 8)
"""Drivers that are killed, each a JVM of its own."""
ROUNDS = 2 if KILLS == 1 else 3
JOB = """
import os, sys
from pyspark import TaskContext
from sluicemq.spark.session import spark_session
from thorough import seeds

def row(number):
    attempt = TaskContext.get().attemptNumber()
    if number % 500 == 400 and attempt == 0:
        raise RuntimeError("this attempt fails")
    if number % 500 == 300 and attempt == 1:
        os._exit(1)
    return (f"row-{number}",)

server, topic, attempts, target, checkpoint = sys.argv[1:]
settings = {"spark.log.level": "OFF", "spark.sql.execution.arrow.maxRecordsPerBatch": "50"}
spark = spark_session("job", master="local[2,4]", settings=settings)
given = {"nameServers": server, "delivery": "exactly-once"}
if attempts != "-":
    rows = spark.sparkContext.range(0, 1000, numSlices=2).map(row)
    writer = spark.createDataFrame(rows, "value string").write.format("rocketmq").options(**given)
    writer.options(topic=attempts, batchMessages="20").mode("append").save()
    print("written", flush=True)
source = spark.readStream.format("rocketmq").options(nameServers=server, topic=topic,
    startingOffsets="earliest", columns="body,tags", maxOffsetsPerTrigger="50")
writer = source.load().writeStream.format("rocketmq").options(**given)
writer = writer.options(topic=target, checkpointLocation=checkpoint).trigger(availableNow=True)
writer.start().awaitTermination()
"""


def write(frame: Any, name_server: str, topic: str, **options: str) -> None:
    given = {"nameServers": name_server, "topic": topic, "delivery": "exactly-once"} | options
    frame.write.format("rocketmq").options(**given).mode("append").save()


def stream(
    spark: Any, name_server: str, topic: str, target: str, checkpoint: Path, **options: str
) -> Any:
    """A running query that copies a topic, exactly once."""
    source = spark.readStream.format("rocketmq").options(
        nameServers=name_server, topic=topic, startingOffsets="earliest", columns="body,tags",
        **options,
    )  # fmt: skip
    return (
        source.load()
        .writeStream.format("rocketmq")
        .options(nameServers=name_server, topic=target, delivery="exactly-once")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def bodies(frame: Any) -> Counter[bytes]:
    return Counter(bytes(row.body) for row in frame.select("body").collect())


def test_rows_become_messages_with_everything_they_have(
    spark: Any, read: Read, name_server: str, topic: str
) -> None:
    frame = spark.range(500).selectExpr(
        "concat('body-', id) as value",
        "if(id % 2 = 0, 'even', null) as tag",
        "array(concat('k', id), 'all') as keys",
        "map('number', cast(id as string), 'none', null) as properties",
        "if(id % 5 = 0, 1, null) as queue_id",
        "if(id % 5 = 1, 'order-7', null) as sharding_key",
        "if(id % 5 = 2, 1, 0) as delay_level",
    )
    write(frame, name_server, topic, batchMessages="64")
    rows = read(properties="all").collect()
    deadline = time.monotonic() + limit(30)
    while len(rows) < 500 and time.monotonic() < deadline:  # delay level 1 is a second
        time.sleep(0.2)
        rows = read(properties="all").collect()
    by_number = {int(row.properties["number"]): row for row in rows}
    assert sorted(by_number) == list(range(500))
    assert len(rows) == 500
    assert {row.queue_id for number, row in by_number.items() if number % 5 == 0} == {1}
    assert len({row.queue_id for number, row in by_number.items() if number % 5 == 1}) == 1
    seven = by_number[7]
    assert (bytes(seven.body), seven.tags, seven.keys) == (b"body-7", None, "k7 all")
    assert "SLUICE_STAGE" not in seven.properties
    assert seven.properties["DELAY"] == "1"
    assert len({row.msg_id for row in rows}) == 500


def test_a_write_that_fails_half_way_leaves_nothing_and_is_repeated_once(
    spark: Any, read: Read, name_server: str, topic: str
) -> None:
    """Local mode has no second attempt: the whole write fails when half of it is staged."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    try:
        rows = spark.range(1000)
        failing = "if(id = 900, raise_error('killed half way'), concat('row-', id)) as value"
        frame = rows.selectExpr(failing)
        with pytest.raises(Exception, match="killed half way"):
            write(frame, name_server, topic, queryId=f"{topic}-1")
        assert bodies(read()) == Counter()
        frame = rows.selectExpr("concat('row-', id) as value")
        wanted = Counter(f"row-{n}".encode() for n in range(1000))
        for _ in range(2):  # the second time nothing changes: it is a write of the same name
            write(frame, name_server, topic, queryId=f"{topic}-1")
            assert bodies(read()) == wanted
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


def test_a_checkpoint_without_its_last_commit_doubles_nothing(
    spark: Any, read: Read, name_server: str, topic: str, publish: Publish, tmp_path: Path
) -> None:
    """The recipe of paimon#9666."""
    checkpoint, target = tmp_path / "checkpoint", f"{topic}-copy"
    wanted: Counter[bytes] = Counter()
    for first in range(0, 40 * ROUNDS, 40):
        publish(first, 40)
        wanted += Counter(f"body-{n}".encode() for n in range(first, first + 40))
        stream(spark, name_server, topic, target, checkpoint).awaitTermination(120)
        commits = sorted(
            (path for path in (checkpoint / "commits").iterdir() if path.name.isdigit()),
            key=lambda path: int(path.name),
        )
        for path in (commits[-1], commits[-1].with_name(f".{commits[-1].name}.crc")):
            path.unlink(missing_ok=True)
        stream(spark, name_server, topic, target, checkpoint).awaitTermination(120)
        assert bodies(read(topic=target)) == wanted


@pytest.mark.thorough
@pytest.mark.usefixtures("admission")
def test_failed_task_attempts_and_killed_drivers_lose_and_double_nothing(
    spark: Any, read: Read, name_server: str, topic: str, publish: Publish, tmp_path: Path
) -> None:
    """Two tasks die twice each, by an error and by the end of their process; then the driver is
    killed in the middle of its micro-batches, and another one goes on."""
    publish(0, 1000)
    target, checkpoint = f"{topic}-copy", tmp_path / "checkpoint"
    program = tmp_path / "job.py"
    program.write_text(JOB)
    for kill in range(KILLS):
        attempts = "-" if kill else f"{topic}-attempts"
        command = [sys.executable, str(program), name_server, topic, attempts, target,
                   str(checkpoint)]  # fmt: skip
        killed_after(command, checkpoint / "commits", 2 * kill + 2, kill * 0.1, tmp_path / "told")
    assert "written" in (tmp_path / "told").read_text()
    wanted = Counter(f"row-{n}".encode() for n in range(1000))
    assert bodies(read(topic=f"{topic}-attempts")) == wanted
    query = stream(spark, name_server, topic, target, checkpoint, maxOffsetsPerTrigger="400")
    query.awaitTermination(120)
    assert query.lastProgress.batchId >= 2, "the killed driver had done nothing"
    assert bodies(read(topic=target)) == Counter(f"body-{n}".encode() for n in range(1000))


def killed_after(command: list[str], commits: Path, count: int, rest_s: float, told: Path) -> None:
    """Runs a driver and kills it with all its processes, so long after so many commits."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with told.open("a") as output:
        job = subprocess.Popen(
            command, env=environment, start_new_session=True, stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    deadline = time.monotonic() + limit(200)
    while time.monotonic() < deadline and job.poll() is None:
        if commits.is_dir() and sum(path.name.isdigit() for path in commits.iterdir()) >= count:
            break
        time.sleep(0.01)
    time.sleep(rest_s)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait(limit(30))


def test_a_query_id_of_a_stream_is_refused(
    spark: Any, name_server: str, topic: str, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=r"queryId.*not supported for a stream"):
        (
            spark.readStream.format("rate")
            .load()
            .selectExpr("cast(value as string) as value")
            .writeStream.format("rocketmq")
            .options(nameServers=name_server, topic=topic, delivery="exactly-once", queryId="q")
            .option("checkpointLocation", str(tmp_path))
            .start()
            .awaitTermination(60)
        )
