"""The same pipeline file on a real Spark cluster: one master, two workers, processes of their own.

The driver may take 1 MiB of results in all, and 20 MiB of messages go through: none go through it.
"""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyarrow import dataset

from sluicemq.client.sync.producer import Producer
from sluicemq.model.message import Message
from sluicemq.spark.jvm import ensure_java
from waiting import limit

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

ROOT = Path(__file__).parents[3]
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
DEPLOY = "org.apache.spark.deploy"
ROWS = 20_000
FILE = """\
name: standalone
cluster: {nameServers: "NAME_SERVER"}
source: {topic: TOPIC, columns: [body, "prop:number:int", "prop:origin"], minPartitions: 4}
transform: select number, origin, length(body) as size from source
sinks:
  - {kind: parquet, path: DIR/out, partition_by: [origin]}
  - {kind: table, url: "sqlite:///DIR/t.db", table: seen, key: [number]}
spark:
  spark.executor.memory: 512m
  spark.executor.cores: 1
  spark.driver.memory: 512m
  spark.driver.host: 127.0.0.1
  spark.driver.maxResultSize: 1m
"""


class Daemon:
    """A master or worker; its log is a file, so no pipe can fill up."""

    def __init__(self, log: Path, kind: str, *arguments: str) -> None:
        self.log = log
        ensure_java()
        environment = os.environ | {
            "SPARK_DAEMON_MEMORY": "512m",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYTHONPATH": str(ROOT / "src"),
            "PYSPARK_PYTHON": sys.executable,
        }
        command = [str(SPARK_CLASS), f"{DEPLOY}.{kind}", "--host", "127.0.0.1", "--port", "0",
                   "--webui-port", "0", *arguments]  # fmt: skip
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment
            )

    def wait_for(self, pattern: str) -> str:
        """The first group of the pattern in the log."""
        end = time.monotonic() + limit(120)
        while time.monotonic() < end and self.process.poll() is None:
            found = re.search(pattern, self.log.read_text())
            if found:
                return found[1]
            time.sleep(0.1)
        raise AssertionError(f"{pattern!r} did not come:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(limit(20))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """The address of a cluster with two workers of one core each."""
    daemons = [Daemon(tmp_path / "master.log", "master.Master")]
    try:
        address = daemons[0].wait_for(r"Starting Spark master at (spark://[\d.]+:\d+)")
        daemons += [
            Daemon(tmp_path / f"worker-{number}.log", "worker.Worker", address, "--cores", "1",
                   "--memory", "1g", "--work-dir", str(tmp_path / f"work-{number}"))
            for number in range(2)
        ]  # fmt: skip
        for worker in daemons[1:]:
            worker.wait_for(r"(Successfully registered with master)")
        yield address
    finally:
        for daemon in reversed(daemons):
            daemon.stop()


def test_a_pipeline_file_runs_on_a_cluster_of_two_workers(
    master: str, name_server: str, topic: str, producer: Producer, tmp_path: Path
) -> None:
    for queue in producer.write_queues(topic):
        for first in range(queue.queue_id, ROWS, 1_000):
            producer.send_batch(
                [message(topic, index) for index in range(first, min(ROWS, first + 1_000), 2)],
                queue=queue,
            )
    path = tmp_path / "p.yaml"
    text = FILE.replace("NAME_SERVER", name_server).replace("TOPIC", topic)
    path.write_text(text.replace("DIR", str(tmp_path)))
    command = [sys.executable, "-m", "sluicemq", "pipeline", "run", str(path), "--master", master]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=limit(400), check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "standalone: done" in done.stderr
    found: Any = dataset.dataset(tmp_path / "out", partitioning="hive").to_table()
    assert sorted(found.column("number").to_pylist()) == list(range(ROWS))
    assert set(found.column("size").to_pylist()) == {1_000}
    database = sqlite3.connect(tmp_path / "t.db")
    numbers = [number for (number,) in database.execute("select number from seen order by 1")]
    database.close()
    assert numbers == list(range(ROWS))
    executors = [list(tmp_path.glob(f"work-{number}/app-*/*")) for number in range(2)]
    assert all(executors), "both workers ran an executor"


def message(topic: str, index: int) -> Message:
    properties = {"number": str(index), "origin": ("EWR", "JFK", "LGA")[index % 3]}
    return Message(topic, b"x" * 1_000, properties=properties)
