"""How far a run is, without asking the data: Spark's own numbers, once in a while.

A stream's micro-batches come from `recentProgress`. A batch write is watched by a thread that
looks at Spark's status store: tasks done and rows read of each running stage, so the driver never
holds a row. The time left is reckoned from the share of tasks (or, unfiltered, of messages) done.

Stopping in good order: the first signal asks, the second does not wait.

A stream's query has no such thing: `stop()` interrupts the micro-batch, which is then done again
after the restart. `finish` sets the query's state as if it had ended, which its loop looks at
between micro-batches only; the one under way is committed. That is a look into Spark's inside, so
where it is not as expected the query is stopped between two triggers instead, or interrupted: all
three lose nothing, as the checkpoint says what is done.

Runs a pipeline: a batch sink after sink, a stream with a query for each sink, a ready one.

    pipeline = load_pipeline("late.yaml")
    outcome = run(pipeline, spark, listener=lambda event: print(event.text))

All is checked before the first effect: the source is there, the transform parses, every sink can
take its columns. The driver holds no rows: they go from executors to sinks, numbers come from
Spark's own counts. A batch is pinned to one range of offsets, so several sinks get the same rows.

`stopping` is looked at between steps. A stream then finishes its micro-batches; a batch finishes
the sink it is at and leaves the others out (`Outcome.left`).
"""

import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.spark.pipelines.document import (
    ROCKETMQ,
    Listener,
    Narrator,
    Pipeline,
    PlaceError,
    silent,
)
from sluicemq.spark.pipelines.frames import (
    Reach,
    Writer,
    pinned_options,
    reach_of,
    sentence_of,
    source_frame,
    transformed,
    writer_of,
)
from sluicemq.spark.pipelines.ready import Task, ready
from sluicemq.spark.progress import stream_progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

logger = logging.getLogger(__name__)
PERIOD_S: Final = 2.0


@dataclass(slots=True)
class QueryWatch:
    """Tells each micro-batch of one query once."""

    query: "StreamingQuery"
    sink: str
    narrator: Narrator
    of_topics: bool = True
    told: int = -1
    rows: int = 0

    def tell_new(self) -> None:
        """Lines for the micro-batches since the last call; empty triggers are not worth one."""
        last: Any = self.query.lastProgress
        if last is None or int(last["batchId"]) <= self.told:
            return
        for progress in self.query.recentProgress:
            if int(progress["batchId"]) > self.told and "addBatch" in progress["durationMs"]:
                self.told = int(progress["batchId"])
                self._tell(progress)

    def _tell(self, progress: Any) -> None:
        found = stream_progress(progress)
        figures: dict[str, Any] = {"rows": int(progress["numInputRows"])}
        text = f"batch {found.batch}: {figures['rows']:,} rows, {found.rows_per_second:,.0f} rows/s"
        if self.of_topics:
            text = found.told()
            eta_s = None if found.lag is None else round(found.rest_s(), 1)
            figures |= {"filtered": found.filtered, "lag": found.lag, "eta_s": eta_s}
        self.rows += figures["rows"]
        self.narrator.tell(
            "batch", text, sink=self.sink, batch=found.batch,
            rows_per_second=round(found.rows_per_second, 1), **figures,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StageNumbers:
    """One stage as the status store has it."""

    stage: int
    tasks: int
    done: int
    rows: int

    @property
    def share(self) -> float:
        return self.done / self.tasks if self.tasks else 0.0


class BatchWatch:
    """Tells how far the jobs of one group are, every `period_s`, and when a stage is done."""

    def __init__(
        self,
        spark: "SparkSession",
        narrator: Narrator,
        sink: str,
        group: str,
        messages: int | None,
        *,
        period_s: float = PERIOD_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._context = spark.sparkContext
        self._narrator, self._sink, self._group = narrator, sink, group
        self._messages = messages
        self._period_s, self._clock = period_s, clock
        self._began_s: dict[int, float] = {}
        self._last: dict[int, StageNumbers] = {}
        self._told: set[int] = set()
        self._over = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it a thread looks; at the end what is untold is told."""
        thread = threading.Thread(target=self._look_on, name=f"watch {self._sink}", daemon=True)
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

    def _look_on(self) -> None:
        while not self._over.wait(self._period_s):
            self.look()

    def look(self, *, at_end: bool = False) -> None:
        """Tells what changed. Never raises: a job is not to fail of being watched."""
        try:
            for numbers in self._stages():
                is_over = numbers.tasks > 0 and numbers.done == numbers.tasks
                if numbers.stage in self._told or numbers == self._last.get(numbers.stage):
                    continue
                self._last[numbers.stage] = numbers
                if is_over or (numbers.rows and not at_end):
                    self._tell(numbers)
                if is_over:
                    self._told.add(numbers.stage)
        except Exception:
            logger.debug("the progress of %s cannot be read", self._group, exc_info=True)

    def _stages(self) -> list[StageNumbers]:
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._group)]
        stages = sorted({stage for job in jobs if job is not None for stage in job.stageIds})
        store: Any = self._context._jsc.sc().statusStore()
        found = []
        for stage in stages:
            if stage in self._told or tracker.getStageInfo(stage) is None:
                continue
            data = store.lastStageAttempt(stage)
            if str(data.status().toString()) not in ("PENDING", "SKIPPED"):
                began_ms = data.submissionTime().get().getTime()
                self._began_s.setdefault(stage, began_ms / 1000)
                found.append(
                    StageNumbers(
                        stage, int(data.numTasks()), int(data.numCompleteTasks()),
                        max(int(data.inputRecords()), int(data.shuffleReadRecords())),
                    )
                )  # fmt: skip
        return found

    def _tell(self, numbers: StageNumbers) -> None:
        spent_s = max(0.001, self._clock.now_ms() / 1000 - self._began_s[numbers.stage])
        pace = numbers.rows / spent_s
        share = numbers.share
        if self._messages and numbers.rows <= self._messages:
            share = max(share, numbers.rows / self._messages)
        eta_s = None if share == 0 else round(spent_s * (1 - share) / share, 1)
        left = "" if eta_s is None or share == 1 else f", {eta_s:.0f} s left"
        self._narrator.tell(
            "stage",
            f"stage {numbers.stage}: {numbers.done} of {numbers.tasks} tasks,"
            f" {numbers.rows:,} rows, {pace:,.0f} rows/s{left}",
            sink=self._sink, stage=numbers.stage, tasks=numbers.tasks, tasks_done=numbers.done,
            rows=numbers.rows, rows_per_second=round(pace, 1), eta_s=eta_s,
        )  # fmt: skip


SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
CHECK_S: Final = 0.1
TELL_S: Final = 0.2


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


def finish(query: "StreamingQuery") -> None:
    """Lets the micro-batch under way end, and no other begin; returns when the query is over."""
    if not _ended_inside(query):
        end_s = SYSTEM_CLOCK.monotonic_s() + 600
        while query.isActive and query.status["isTriggerActive"]:
            if SYSTEM_CLOCK.monotonic_s() > end_s:
                break
            threading.Event().wait(CHECK_S)
    query.stop()


def _ended_inside(query: "StreamingQuery") -> bool:
    """Sets the state of Spark's `StreamExecution` to TERMINATED and waits for its trigger to end.

    False when Spark is made differently (or the query has not begun to run).
    """
    try:
        inner: Any = query._jsq
        execution = inner.streamingQuery()
        state = execution.state()
        active = state.get()
        if not active.getClass().getSimpleName().startswith("ACTIVE"):
            return not query.isActive
        name = active.getClass().getName().replace("ACTIVE", "TERMINATED")
        loader = active.getClass().getClassLoader()
        terminated = loader.loadClass(name).getField("MODULE$").get(None)
        state.compareAndSet(active, terminated)
        thread = execution.queryExecutionThread()
        while thread.isAlive() and query.status["isTriggerActive"]:
            threading.Event().wait(CHECK_S)
    except Exception:
        logger.debug(
            "Spark's query is not as expected; it is stopped between triggers", exc_info=True
        )
        return False
    return True


@dataclass(slots=True)
class Outcome:
    """What a run did: rows by sink (of a stream: rows read for it), sinks that were left out when
    it was stopped, and what a ready pipeline reports (`ready.Report`)."""

    rows: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    figures: dict[str, int | float] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    is_failure: bool = False


def run(
    pipeline: Pipeline,
    spark: "SparkSession",
    *,
    listener: Listener = silent,
    stopping: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Runs it to its end, or until `stopping`. Raises ConfigurationError with the place of the file
    for what cannot work, and SluiceError for what fails while it runs."""
    narrator = Narrator(pipeline.name, listener, pipeline.secrets)
    began_s = SYSTEM_CLOCK.monotonic_s()
    try:
        outcome = _kind_of(pipeline)(pipeline, spark, narrator, stopping)
    except PlaceError as error:
        raise pipeline.failed(error) from error.__cause__
    spent_s = round(SYSTEM_CLOCK.monotonic_s() - began_s, 1)
    narrator.tell("done", _ending(outcome, spent_s), seconds=spent_s, rows=outcome.rows,
                  left=outcome.left, figures=outcome.figures, files=outcome.files)  # fmt: skip
    return outcome


def _kind_of(
    pipeline: Pipeline,
) -> "Callable[[Pipeline, SparkSession, Narrator, Callable[[], bool]], Outcome]":
    if pipeline.use is not None:
        return _run_ready
    return _run_stream if pipeline.is_streaming else _run_batch


def _ending(outcome: Outcome, spent_s: float) -> str:
    if outcome.left:
        return f"stopped after {spent_s} s; not written: {', '.join(outcome.left)}"
    return f"done in {spent_s} s"


def task_of(
    pipeline: Pipeline,
    spark: "SparkSession",
    say: Callable[[str], None],
    stopping: Callable[[], bool] = lambda: False,
) -> Task:
    """What a ready pipeline is given."""
    return Task(spark, pipeline.given, pipeline.cluster, say, stopping)


def _run_ready(
    pipeline: Pipeline, spark: "SparkSession", narrator: Narrator, stopping: Callable[[], bool]
) -> Outcome:
    assert pipeline.use is not None
    narrator.tell("started", f"the ready pipeline {pipeline.use!r}")
    said: set[str] = set()

    def say(text: str) -> None:
        said.add(text)
        narrator.tell("line", text)

    report = ready(pipeline.use).run(task_of(pipeline, spark, say, stopping))
    for line in report.lines:
        if line not in said:  # most are told as soon as they are known
            narrator.tell("line", line)
    return Outcome(
        figures=report.figures, files=report.files, lines=report.lines,
        is_failure=report.is_failure,
    )  # fmt: skip


def checked_frame(pipeline: Pipeline, spark: "SparkSession") -> "tuple[DataFrame, list[Writer]]":
    """The transformed frame and its writers, everything checked. Raises PlaceError."""
    frame = transformed(pipeline, spark, source_frame(pipeline, spark))
    writers = [writer_of(pipeline, sink) for sink in pipeline.sinks]
    for writer in writers:
        writer.check(frame)
    return frame, writers


def _run_batch(
    pipeline: Pipeline, spark: "SparkSession", narrator: Narrator, stopping: Callable[[], bool]
) -> Outcome:
    reach = reach_of(pipeline)
    assert pipeline.source is not None
    pinned = None if reach is None else pinned_options(reach, dict(pipeline.source.options))
    frame, writers = checked_frame(pinned_to(pipeline, pinned), spark)
    messages = None if reach is None else reach.messages
    narrator.tell("started", _started(reach, len(writers)), messages=messages)
    outcome = Outcome()
    for writer in writers:
        if stopping():
            outcome.left.append(writer.sink.name)
            continue
        rows = _write(spark, writer, frame, narrator, _expected(pipeline, messages))
        outcome.rows[writer.sink.name] = rows
    return outcome


def pinned_to(pipeline: Pipeline, options: dict[str, str] | None) -> Pipeline:
    assert pipeline.source is not None
    if options is None:
        return pipeline
    return replace(pipeline, source=replace(pipeline.source, options=options))


def _expected(pipeline: Pipeline, messages: int | None) -> int | None:
    """Rows that a read will give: the messages, unless a filter leaves some out."""
    assert pipeline.source is not None
    filtered = {"filter.tags", "filter.sql"} & set(pipeline.source.options)
    return None if filtered or pipeline.transform is not None else messages


def _started(reach: Reach | None, sinks: int) -> str:
    if reach is None:
        return f"a batch, sinks: {sinks}"
    return f"{reach.messages:,} messages of {len(reach.start)} queues, sinks: {sinks}"


def _write(
    spark: "SparkSession", writer: Writer, frame: "DataFrame", narrator: Narrator,
    messages: int | None,
) -> int:  # fmt: skip
    from pyspark.sql import Observation  # noqa: PLC0415 - takes a second
    from pyspark.sql.functions import count, lit  # noqa: PLC0415

    sink = writer.sink.name
    seen = Observation()
    group = f"{narrator.pipeline} {sink} {uuid.uuid4().hex[:8]}"
    began_s = SYSTEM_CLOCK.monotonic_s()
    writer.prepare(frame)
    try:
        with BatchWatch(spark, narrator, sink, group, messages).watching():
            writer.write(frame.observe(seen, count(lit(1)).alias("rows")))
    except Exception as error:
        raise _failed(writer, error) from error
    rows = int(seen.get["rows"])
    spent_s = max(0.001, SYSTEM_CLOCK.monotonic_s() - began_s)
    narrator.tell(
        "written", f"{rows:,} rows into {writer.target} in {spent_s:.1f} s,"
        f" {rows / spent_s:,.0f} rows/s", sink=sink, rows=rows, seconds=round(spent_s, 1),
        rows_per_second=round(rows / spent_s, 1),
    )  # fmt: skip
    return rows


def _failed(writer: Writer, error: BaseException) -> Exception:
    if isinstance(error, PlaceError):
        return error
    return writer.sink.error(f"{writer.target}: {sentence_of(error)}")


def _run_stream(
    pipeline: Pipeline, spark: "SparkSession", narrator: Narrator, stopping: Callable[[], bool]
) -> Outcome:
    frame, writers = checked_frame(pipeline, spark)
    for writer in writers:
        writer.prepare(frame)
    watches: list[QueryWatch] = []
    of_topics = pipeline.source is not None and pipeline.source.kind == ROCKETMQ
    try:
        for writer in writers:
            query = _started_query(pipeline, writer, frame)
            watches.append(QueryWatch(query, writer.sink.name, narrator, of_topics))
        each = "" if len(writers) == 1 else "; each sink reads for itself, with its own checkpoint"
        narrator.tell("started", f"a stream into {len(writers)} sinks" + each
                      if each else f"a stream into {writers[0].target}")  # fmt: skip
        _attend(watches, stopping)
    finally:
        for watch in watches:
            finish(watch.query)
            watch.tell_new()
    for watch, writer in zip(watches, writers, strict=True):
        error = watch.query.exception()
        if error is not None:
            raise _failed(writer, error)
    return Outcome(rows={watch.sink: watch.rows for watch in watches})


def _started_query(pipeline: Pipeline, writer: Writer, frame: "DataFrame") -> "StreamingQuery":
    trigger: dict[str, Any] = {"availableNow": True}
    if pipeline.trigger is not None:
        trigger = {"processingTime": f"{int(pipeline.trigger * 1000)} milliseconds"}
    stream = writer.stream(frame).queryName(f"{pipeline.name}/{writer.sink.name}")
    stream = stream.option("checkpointLocation", pipeline.checkpoint_of(writer.sink))
    try:
        return stream.trigger(**trigger).start()
    except Exception as error:
        raise _failed(writer, error) from error


def _attend(watches: list[QueryWatch], stopping: Callable[[], bool]) -> None:
    """Until all queries are over, one has failed, or somebody asks to stop."""
    while True:
        for watch in watches:
            watch.tell_new()
        if stopping() or not any(watch.query.isActive for watch in watches):
            return
        if any(not watch.query.isActive and watch.query.exception() for watch in watches):
            return
        threading.Event().wait(CHECK_S)
