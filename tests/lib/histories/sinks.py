"""Exactly-once sinks in histories of real processes: epochs written across failovers.

    Writer    the sink's own classes, called as Spark's driver and its executors call them, without
              a JVM: a try of an epoch stages two tasks and commits
    Job       a streaming query of PySpark; its checkpoint says which micro-batches are committed

Both fail as jobs fail. Task attempts die half-way; drivers die before a commit or while it is under
way, and begin the epoch again; checkpoints lose their last commit. In a `Writer` each try has
values of its own, so it is seen whose rows are there. Errors that the product raises end a try as
they end a query: the next one is the query started again.
"""

import contextlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import BinaryType, IntegerType, StructType

from histories.history import Epoch
from sluicemq.errors import SluiceError
from sluicemq.spark.bad_rows import BadRowHandler
from sluicemq.spark.options import WRITE, parse_options
from sluicemq.spark.senders import (
    StagingSender,
    TaskAttempt,
    create_producer,
    send_all,
)
from sluicemq.spark.session import spark_session
from sluicemq.spark.source import SinkCommitMessage, StreamSink
from sluicemq.wire.staging import StagedRange

TASKS: Final = 2
ROWS: Final = 40
"""Of a task, of a micro-batch."""
BATCH_MESSAGES: Final = 16
TIMEOUT_MS: Final = 8_000
HURRY_MS: Final = 100
REST_S: Final = 60.0
RESTART_S: Final = 3.0
START_S: Final = 300.0
"""A JVM and a first micro-batch, on a machine that is very busy."""
IS_GIVEN_UP, DIES_BEFORE, DIES_MEANWHILE, LOSES_COMMIT = 0.05, 0.15, 0.3, 0.4
"""Fates of a driver, as numbers from 0 to 1: the query is not heard of again; it dies when all is
staged; while it commits; after the commit, which its checkpoint does not know. Above: all well."""
SCHEMA: Final = StructType().add("value", BinaryType()).add("queue_id", IntegerType())
QUICK_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"


class Sink:
    """A thread that writes epochs to a topic: `epochs` is what it has tried, `errors` what ended
    tries, by type."""

    def __init__(self, name_server: str, topic: str, seed: int) -> None:
        self.epochs: list[Epoch] = []
        self.errors: Counter[str] = Counter()
        self.topic = topic
        self.rng = random.Random(f"sink {seed}")
        self.given = {
            "nameServers": name_server, "topic": topic, "delivery": "exactly-once",
            "batchMessages": str(BATCH_MESSAGES), "timeoutMs": str(TIMEOUT_MS),
        }  # fmt: skip
        self.is_over = threading.Event()
        self.end_s = float("inf")
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Before anything else fails. Raises TimeoutError."""
        self._thread.start()

    def finish(self) -> None:
        """The epoch under way is committed, all is well. Raises TimeoutError, or what has ended the
        thread."""
        self.end_s = time.monotonic() + REST_S
        self.is_over.set()
        self._thread.join(REST_S + 2 * TIMEOUT_MS / 1000)
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise TimeoutError(f"{self.topic}: the sink does not come to an end")

    def write(self) -> None:
        """Until `is_over`; then what is under way is committed."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            self.write()
        except BaseException as error:
            self._failure = error

    def failed(self, error: Exception) -> None:
        """A try is over. Raises TimeoutError when there have been too many since all was well."""
        self.errors[type(error).__name__] += 1
        if time.monotonic() > self.end_s:
            raise TimeoutError(f"{self.topic}: no epoch within {REST_S:g} s: {error}") from error
        time.sleep(0.1)


class Writer(Sink):
    """The sink's classes."""

    def write(self) -> None:
        query = number = 0
        while not self.is_over.is_set():
            epoch = Epoch(f"{self.topic}.{query}/{number}")
            self.epochs.append(epoch)
            self._write_epoch(epoch, f"{self.topic}.{query}", number)
            number += 1
            if epoch.committed_at is None:  # its query will not be heard of again
                query, number = query + 1, 0
            time.sleep(self.rng.uniform(0.02, 0.3))

    def _write_epoch(self, epoch: Epoch, query: str, number: int) -> None:
        tries = 0
        while True:
            fate = 1.0 if self.is_over.is_set() else self.rng.random()
            try:
                self._try(epoch, query, number, tries, fate)
            except SluiceError as error:
                self.failed(error)
            tries += 1
            if fate < LOSES_COMMIT:  # until another driver is there, others may be master
                self.is_over.wait(self.rng.uniform(0, RESTART_S))
            if epoch.committed_at is not None and fate >= LOSES_COMMIT:
                return
            if fate < IS_GIVEN_UP and not epoch.offers:
                return

    def _try(self, epoch: Epoch, query: str, number: int, tries: int, fate: float) -> None:
        """A driver's life, to its fate. Raises SluiceError."""
        sink = StreamSink(parse_options(self.given, WRITE), SCHEMA, overwrite=False)
        assert sink.brokers, "the broker has epochs"
        offer: list[str] = []
        tasks = [TaskAttempt(query, number, partition, 0) for partition in range(TASKS)]
        sent = [self._task(sink, epoch, task, tries, offer) for task in tasks]
        if fate < DIES_BEFORE:
            sink.abort([*sent], number)
            return
        epoch.offers.append(frozenset(offer))
        if fate < DIES_MEANWHILE:
            sink.options = parse_options(self.given | {"timeoutMs": str(HURRY_MS)}, WRITE)
        sink.commit([*sent], number)
        if epoch.committed_at is None:
            epoch.committed_at = len(epoch.offers)

    def _task(
        self, sink: StreamSink, epoch: Epoch, task: TaskAttempt, tries: int, offer: list[str]
    ) -> SinkCommitMessage:
        """Executors: some first attempts die in the middle of their rows. What the last one has
        staged is added to the offer."""
        name = f"{epoch.name}/{task.partition}"
        if self.rng.random() < 0.2:
            self._attempt(
                sink, epoch, task, [f"{name}/{row}@{tries}.0" for row in range(ROWS // 2)]
            )
            task = replace(task, attempt=1)
        values = [f"{name}/{row}@{tries}.{task.attempt}" for row in range(ROWS)]
        ranges = self._attempt(sink, epoch, task, values)
        offer += values
        return SinkCommitMessage(ROWS, 0, task.query_id, task.epoch, (self.topic,), ranges)

    def _attempt(
        self, sink: StreamSink, epoch: Epoch, task: TaskAttempt, values: list[str]
    ) -> tuple[StagedRange, ...]:
        epoch.staged.update(values)
        with create_producer(sink.options) as producer:
            sender = StagingSender(producer, BATCH_MESSAGES, task, sink.brokers)
            sorter = BadRowHandler(sink.roles, self.topic, "fail", sender)
            send_all(sorter.prepare_rows(_batches(values)), sender)
        return sender.staged_ranges.ranges


def _batches(values: list[str]) -> Iterator[Any]:
    """Half of the rows go anywhere, the others to a queue each."""
    half = len(values) // 2
    for start, some in ((0, values[:half]), (half, values[half:])):
        queue_ids = [row % 2 if start else None for row in range(len(some))]
        yield pa.record_batch(
            {"value": [value.encode() for value in some],
             "queue_id": pa.array(queue_ids, pa.int32())}
        )  # fmt: skip


class Job(Sink):
    """A streaming query whose micro-batch n has the rows from n × ROWS on."""

    def __init__(self, name_server: str, topic: str, seed: int, checkpoint: Path) -> None:
        super().__init__(name_server, topic, seed)
        self.checkpoint = checkpoint
        self._committed = -1

    def start(self) -> None:
        """With the JVM, and a first micro-batch."""
        query = self._start()
        end_s = time.monotonic() + START_S
        while self._numbers("commits") < 0:
            if time.monotonic() > end_s or query.exception() is not None:
                raise TimeoutError(f"{self.topic}: no first micro-batch: {query.exception()}")
            time.sleep(0.1)
        self._stop(query)
        super().start()

    def write(self) -> None:
        while not self.is_over.is_set():
            query = self._start()
            self.is_over.wait(self.rng.uniform(3, 8))
            self._stop(query)
            if self.rng.random() < 0.5:
                self._lose_commit()
        while True:  # in order: what was under way, or another one
            query = self._start(once=True)
            with contextlib.suppress(PySparkException):  # what has ended it is looked at below
                query.awaitTermination(REST_S)
            error = query.exception()
            self._stop(query)
            if error is None:
                break
            self.failed(error)
        self._told()

    def _start(self, *, once: bool = False) -> Any:
        source = session().readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS)
        rows = source.option("numPartitions", TASKS).load()
        rows = rows.selectExpr(f"concat('{self.topic}/', value) as value")
        writer = rows.writeStream.format("rocketmq").options(**self.given)
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        return (writer.trigger(once=True) if once else writer).start()

    def _stop(self, query: Any) -> None:
        if (error := query.exception()) is not None:
            self.errors[type(error).__name__] += 1
        with contextlib.suppress(PySparkException):
            query.stop()
        self._committed = max(self._committed, self._numbers("commits"))

    def _numbers(self, name: str) -> int:
        """The last micro-batch in a log of the checkpoint; -1: none."""
        directory = self.checkpoint / name
        found = [int(path.name) for path in directory.glob("*") if path.name.isdigit()]
        return max(found, default=-1)

    def _lose_commit(self) -> None:
        number = self._numbers("commits")
        for name in (str(number), f".{number}.crc"):
            (self.checkpoint / "commits" / name).unlink(missing_ok=True)

    def _told(self) -> None:
        for number in range(self._numbers("offsets") + 1):
            first = number * ROWS
            rows = frozenset(f"{self.topic}/{row}" for row in range(first, first + ROWS))
            is_committed = number <= self._committed
            name = f"{self.topic}/{number}"
            self.epochs.append(Epoch(name, set(rows), [rows], 1 if is_committed else None))


def session() -> Any:
    """The one of this process; its JVM ends with it."""
    os.environ["JDK_JAVA_OPTIONS"] = QUICK_JAVA
    settings = {"spark.sql.shuffle.partitions": "2", "spark.sql.codegen.wholeStage": "false"}
    spark = spark_session("histories", master="local[2]", settings=settings, log_level="off")
    # Spark looks for Python's data sources in the session of the thread.
    SparkSession._get_j_spark_session_class(spark._jvm).setActiveSession(spark._jsparkSession)
    return spark
