"""Runs a pipeline: a batch sink after sink, a stream with a query for each sink, a ready one.

    pipeline = load_pipeline("late.yaml")
    outcome = run(pipeline, spark, listener=lambda event: print(event.text))

All is checked before the first effect: the source is there, the transform parses, every sink can
take its columns. The driver holds no rows: they go from executors to sinks, numbers come from
Spark's own counts. A stream's micro-batches come from `recentProgress`; a batch write is watched by
a thread that looks at Spark's status store: tasks done and rows read of each running stage. The
time left is reckoned from the share of tasks (or, unfiltered, of messages) done.

`stopping` is looked at between steps. A stream then finishes its micro-batches; a batch finishes
the sink it is at and leaves the others out (`Outcome.left`). The first signal asks to stop, the
second does not wait.
"""

import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.pipelines.file import ROCKETMQ, Pipeline
from sluicemq.pipelines.plan import Writer, checked_frame, reach_of, sentence_of
from sluicemq.pipelines.ready import CHECK_S, Report, Task, finish, ready, trigger_of
from sluicemq.spark.classic import get_spark_context
from sluicemq.spark.errors import PlaceError, Secrets
from sluicemq.spark.progress import stream_progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

logger = logging.getLogger(__name__)
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
TELL_S: Final = 0.2
PERIOD_S: Final = 2.0
Stopping = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Event:
    """A line of text and its numbers, for people and for programs; without secrets. `kind`:
    started, stage, batch, written, line, stopping, done.

    late-flights topic-report: batch 7: 30 rows, 60 rows/s, 75 filtered at the broker, lag 0
    {"event": "batch", "pipeline": "late-flights", "sink": "topic-report", "batch": 7, …}
    """

    kind: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"event": self.kind, "text": self.text, **self.figures}


Listener = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Events:
    """The events of one pipeline's run; what to do with them (stderr, JSON lines) is the
    listener's."""

    pipeline: str
    listener: Listener
    secrets: Secrets = field(default_factory=Secrets)

    def emit(self, kind: str, text: str, **figures: Any) -> None:
        sink = figures.get("sink")
        head = f"{self.pipeline} {sink}: " if sink else f"{self.pipeline}: "
        shown = self.secrets.mask(head + text)
        self.listener(Event(kind, shown, {"pipeline": self.pipeline, **figures}))


def run(
    pipeline: Pipeline,
    spark: "SparkSession",
    *,
    listener: Listener = lambda event: None,
    stopping: Stopping = lambda: False,
) -> Report:
    """Runs it to its end, or until `stopping`. Raises ConfigurationError with the place of the file
    for what cannot work, and SluiceError for what fails while it runs."""
    events = Events(pipeline.name, listener, pipeline.secrets)
    began_s = SYSTEM_CLOCK.monotonic_s()
    try:
        if pipeline.use is not None:
            events.emit("started", f"the ready pipeline {pipeline.use!r}")
            said: set[str] = set()

            def say(text: str) -> None:
                said.add(text)
                events.emit("line", text)

            task = Task(spark, pipeline.given, pipeline.cluster, say, stopping)
            report = ready(pipeline.use).run(task)
            for line in report.lines:
                if line not in said:  # most are told as soon as they are known
                    events.emit("line", line)
        else:
            run_it = _run_stream if pipeline.is_streaming else _run_batch
            report = run_it(pipeline, spark, events, stopping)
    except PlaceError as error:
        raise pipeline.failed(error) from error.__cause__
    spent_s = round(SYSTEM_CLOCK.monotonic_s() - began_s, 1)
    ending = f"done in {spent_s} s"
    if report.left:
        ending = f"stopped after {spent_s} s; not written: {', '.join(report.left)}"
    events.emit("done", ending, seconds=spent_s, rows=report.rows, left=report.left,
                figures=report.figures, files=report.files)  # fmt: skip
    return report


# ---- a batch


def _run_batch(
    pipeline: Pipeline, spark: "SparkSession", events: Events, stopping: Stopping
) -> Report:
    reach = reach_of(pipeline)
    pinned = pipeline if reach is None else reach.pinned(pipeline)
    frame, writers = checked_frame(pinned, spark)
    messages = None if reach is None else reach.messages
    what = "a batch"
    if reach is not None:
        what = f"{reach.messages:,} messages of {len(reach.start)} queues"
    events.emit("started", f"{what}, sinks: {len(writers)}", messages=messages)
    assert pipeline.source is not None
    if {"filter.tags", "filter.sql"} & set(pipeline.source.options) or pipeline.transform:
        messages = None  # who knows how many rows a filter leaves
    report = Report()
    for writer in writers:
        if stopping():
            report.left.append(writer.sink.name)
        else:
            report.rows[writer.sink.name] = _write(spark, writer, frame, events, messages)
    return report


def _write(
    spark: "SparkSession", writer: Writer, frame: "DataFrame", events: Events, messages: int | None
) -> int:
    from pyspark.sql import Observation  # noqa: PLC0415 - takes a second
    from pyspark.sql.functions import count, lit  # noqa: PLC0415

    sink = writer.sink.name
    seen = Observation()
    group = f"{events.pipeline} {sink} {uuid.uuid4().hex[:8]}"
    began_s = SYSTEM_CLOCK.monotonic_s()
    writer.prepare(frame)
    try:
        with BatchWatch(spark, events, sink, group, messages).watching():
            writer.write(frame.observe(seen, count(lit(1)).alias("rows")))
    except Exception as error:
        raise _failed(writer, error) from error
    rows = int(seen.get["rows"])
    spent_s = max(0.001, SYSTEM_CLOCK.monotonic_s() - began_s)
    events.emit(
        "written", f"{rows:,} rows into {writer.target} in {spent_s:.1f} s,"
        f" {rows / spent_s:,.0f} rows/s", sink=sink, rows=rows, seconds=round(spent_s, 1),
        rows_per_second=round(rows / spent_s, 1),
    )  # fmt: skip
    return rows


def _failed(writer: Writer, error: BaseException) -> Exception:
    if isinstance(error, PlaceError):
        return error
    return writer.sink.error(f"{writer.target}: {sentence_of(error)}")


@dataclass(frozen=True, slots=True)
class StageNumbers:
    """One stage as Spark's status store has it."""

    stage: int
    tasks: int
    done: int
    rows: int


class BatchWatch:
    """Tells how far the jobs of one group are, every PERIOD_S, and when a stage is done."""

    def __init__(
        self,
        spark: "SparkSession",
        events: Events,
        sink: str,
        group: str,
        messages: int | None,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._context = get_spark_context(spark)
        self._events, self._sink, self._group = events, sink, group
        self._messages = messages
        self._clock = clock
        self._began_s: dict[int, float] = {}
        self._last: dict[int, StageNumbers] = {}
        self._told: set[int] = set()
        self._over = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it a thread looks; at the end what is untold is told."""

        def look_on() -> None:
            while not self._over.wait(PERIOD_S):
                self.look()

        thread = threading.Thread(target=look_on, name=f"watch {self._sink}", daemon=True)
        self._context.setJobGroup(self._group, f"pipeline {self._group}", interruptOnCancel=True)
        thread.start()
        try:
            yield
            self.look(at_end=True)
        finally:
            self._over.set()
            thread.join()
            self._context.setLocalProperty("spark.jobGroup.id", None)
            self._context.setLocalProperty("spark.job.description", None)

    def look(self, *, at_end: bool = False) -> None:
        """Tells what changed. Never raises: a job is not to fail of being watched."""
        try:
            tracker = self._context.statusTracker()
            jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._group)]
            stages = {stage for job in jobs if job is not None for stage in job.stageIds}
            store: Any = self._context._jsc.sc().statusStore()
            for stage in sorted(stages - self._told):
                if tracker.getStageInfo(stage) is None:
                    continue
                data = store.lastStageAttempt(stage)
                if str(data.status().toString()) in ("PENDING", "SKIPPED"):
                    continue
                began_ms = data.submissionTime().get().getTime()
                self._began_s.setdefault(stage, began_ms / 1000)
                rows = max(int(data.inputRecords()), int(data.shuffleReadRecords()))
                tasks, done = int(data.numTasks()), int(data.numCompleteTasks())
                numbers = StageNumbers(stage, tasks, done, rows)
                if numbers == self._last.get(stage):
                    continue
                self._last[stage] = numbers
                is_over = tasks > 0 and done == tasks
                if is_over or (rows and not at_end):
                    self._tell(numbers)
                if is_over:
                    self._told.add(stage)
        except Exception:
            logger.debug("the progress of %s cannot be read", self._group, exc_info=True)

    def _tell(self, numbers: StageNumbers) -> None:
        spent_s = max(0.001, self._clock.now_ms() / 1000 - self._began_s[numbers.stage])
        pace = numbers.rows / spent_s
        share = numbers.done / numbers.tasks if numbers.tasks else 0.0
        if self._messages and numbers.rows <= self._messages:
            share = max(share, numbers.rows / self._messages)
        eta_s = None if share == 0 else round(spent_s * (1 - share) / share, 1)
        left = "" if eta_s is None or share == 1 else f", {eta_s:.0f} s left"
        self._events.emit(
            "stage",
            f"stage {numbers.stage}: {numbers.done} of {numbers.tasks} tasks,"
            f" {numbers.rows:,} rows, {pace:,.0f} rows/s{left}",
            sink=self._sink, stage=numbers.stage, tasks=numbers.tasks, tasks_done=numbers.done,
            rows=numbers.rows, rows_per_second=round(pace, 1), eta_s=eta_s,
        )  # fmt: skip


# ---- a stream


def _run_stream(
    pipeline: Pipeline, spark: "SparkSession", events: Events, stopping: Stopping
) -> Report:
    frame, writers = checked_frame(pipeline, spark)
    for writer in writers:
        writer.prepare(frame)
    watches: list[QueryWatch] = []
    of_topics = pipeline.source is not None and pipeline.source.kind == ROCKETMQ
    try:
        for writer in writers:
            stream = writer.stream(frame).queryName(f"{pipeline.name}/{writer.sink.name}")
            stream = stream.option("checkpointLocation", pipeline.checkpoint_of(writer.sink))
            try:
                query = stream.trigger(**trigger_of(pipeline.trigger)).start()
            except Exception as failure:
                raise _failed(writer, failure) from failure
            watches.append(QueryWatch(query, writer.sink.name, events, of_topics))
        what = f"a stream into {writers[0].target}" if len(writers) == 1 else (
            f"a stream into {len(writers)} sinks; each sink reads for itself, with its own"
            " checkpoint"
        )  # fmt: skip
        events.emit("started", what)
        while not stopping() and any(watch.query.isActive for watch in watches):
            for watch in watches:
                watch.tell_new()
            if any(not watch.query.isActive and watch.query.exception() for watch in watches):
                break
            threading.Event().wait(CHECK_S)
    finally:
        for watch in watches:
            finish(watch.query)
            watch.tell_new()
    for watch, writer in zip(watches, writers, strict=True):
        error = watch.query.exception()
        if error is not None:
            raise _failed(writer, error)
    return Report(rows={watch.sink: watch.rows for watch in watches})


@dataclass(slots=True)
class QueryWatch:
    """Tells each micro-batch of one query once."""

    query: "StreamingQuery"
    sink: str
    events: Events
    of_topics: bool = True
    told: int = -1
    rows: int = 0

    def tell_new(self) -> None:
        """Lines for the micro-batches since the last call; empty triggers are not worth one."""
        last: Any = self.query.lastProgress
        if last is None or int(last["batchId"]) <= self.told:
            return
        for progress in self.query.recentProgress:
            if int(progress["batchId"]) <= self.told or "addBatch" not in progress["durationMs"]:
                continue
            self.told = int(progress["batchId"])
            found, rows = stream_progress(progress), int(progress["numInputRows"])
            text = f"batch {found.batch}: {rows:,} rows, {found.rows_per_second:,.0f} rows/s"
            figures: dict[str, Any] = {}
            if self.of_topics:
                text = found.describe()
                eta_s = None if found.lag is None else round(found.remaining_s(), 1)
                figures = {"filtered": found.filtered, "lag": found.lag, "eta_s": eta_s}
            self.rows += rows
            self.events.emit(
                "batch", text, sink=self.sink, batch=found.batch, rows=rows,
                rows_per_second=round(found.rows_per_second, 1), **figures,
            )  # fmt: skip


# ---- stopping


class Stop:
    """Whether somebody asked to stop."""

    def __init__(self, told: Callable[[str], None] = lambda text: None) -> None:
        self._asked = threading.Event()
        self._told = told

    def __call__(self) -> bool:
        return self._asked.is_set()

    def ask(self, number: int = signal.SIGTERM, _frame: Any = None) -> None:
        """The handler of a signal."""
        if self._asked.is_set():
            self._tell("stopped hard")
            os._exit(128 + number)
        self._asked.set()
        self._tell("stopping: what is under way is finished first; once more stops at once")

    def _tell(self, text: str) -> None:
        """In a thread of its own: a signal can come while a line is being printed, and Python
        prints no other one within that."""
        teller = threading.Thread(target=self._told, args=(text,), daemon=True)
        teller.start()
        teller.join(TELL_S)


@contextmanager
def stop_on_signals(stop: Stop) -> Iterator[None]:
    """Within it SIGINT and SIGTERM ask `stop`. After the session is made: Spark sets its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop.ask) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
