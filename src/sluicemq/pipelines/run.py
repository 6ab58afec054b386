"""Run a pipeline: a batch writes its sinks in turn, a stream has one query for each sink.

    pipeline = load_pipeline("late.yaml")
    report = run(pipeline, spark, listener=lambda event: print(event.text))

Everything is checked before the first effect: the source exists, the transform parses, and every
sink accepts its columns. The driver holds no rows. They go from executors to sinks, and their
numbers come from Spark's own counters. The micro-batches of a stream are read from
`recentProgress`. A batch write is observed by a thread that reads Spark's status store: the
completed tasks and the rows of each running stage. The remaining time is estimated from the share
of completed tasks, or of messages if nothing is filtered.

`stopping` is called between steps. When it returns True, a stream finishes its micro-batches. A
batch finishes its current sink and skips the others (`Report.skipped`). The first signal asks a run
to stop, and the second ends the process at once.
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
from sluicemq.pipelines.plan import load_checked_frame, resolve_read_range
from sluicemq.pipelines.ready import (
    CHECK_S,
    Report,
    Task,
    find_ready_pipeline,
    finish_query,
    spark_trigger,
)
from sluicemq.pipelines.writers import Writer
from sluicemq.spark.classic import get_spark_context
from sluicemq.spark.errors import PlaceError, Secrets, summarize_spark_error
from sluicemq.spark.progress import stream_progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

logger = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
"""The signals that ask a run to stop."""
SIGNAL_OUTPUT_S: Final = 0.2
"""The longest time for which a signal handler waits until its line is printed."""
PROGRESS_PERIOD_S: Final = 2.0
"""The interval at which the progress of a batch write is reported."""

Stopping = Callable[[], bool]
"""Returns whether the run was asked to stop."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a run: a line of text and the same as numbers, without secrets.

    `kind` is one of started, stage, batch, written, line, stopping and done. For example:

        late-flights topic-report: batch 7: 30 rows, 60 rows/s, 75 filtered at the broker, lag 0
        {"event": "batch", "pipeline": "late-flights", "sink": "topic-report", "batch": 7, …}
    """

    kind: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the event as the object that `sluice pipeline run --json` prints."""
        return {"event": self.kind, "text": self.text, **self.figures}


Listener = Callable[[Event], None]
"""Receives each event of a run, possibly from several threads."""


@dataclass(frozen=True, slots=True)
class EventEmitter:
    """Passes the events of one run to the listener.

    `pipeline` is the name of the pipeline, which is added to each event. `secrets` are masked in
    texts.
    """

    pipeline: str
    listener: Listener
    secrets: Secrets = field(default_factory=Secrets)

    def emit(self, kind: str, text: str, **figures: Any) -> None:
        """Call the listener with an event of this kind, text and figures.

        The text gets the prefix `PIPELINE: `, or `PIPELINE SINK: ` if the figures have a `sink`.
        Secrets in it are masked. The figures get the name of the pipeline.
        """
        sink = figures.get("sink")
        prefix = f"{self.pipeline} {sink}: " if sink else f"{self.pipeline}: "
        masked_text = self.secrets.mask(prefix + text)
        self.listener(Event(kind, masked_text, {"pipeline": self.pipeline, **figures}))


def run(
    pipeline: Pipeline,
    spark: "SparkSession",
    *,
    listener: Listener = lambda event: None,
    stopping: Stopping = lambda: False,
) -> Report:
    """Run the pipeline until it ends, or until `stopping()` is True, and return its report.

    `listener(event)` is called with each event, possibly from several threads. `stopping()` is
    called between steps. Raises ConfigurationError, with the line of the file, if a part of the
    file cannot work or a sink fails, and other SluiceErrors for what fails during the run.
    """
    events = EventEmitter(pipeline.name, listener, pipeline.secrets)
    started_s = SYSTEM_CLOCK.monotonic_s()
    try:
        if pipeline.use is not None:
            report = _run_ready_pipeline(pipeline, pipeline.use, spark, events, stopping)
        elif pipeline.is_streaming:
            report = _run_stream(pipeline, spark, events, stopping)
        else:
            report = _run_batch(pipeline, spark, events, stopping)
    except PlaceError as error:
        raise pipeline.to_configuration_error(error) from error.__cause__

    duration_s = round(SYSTEM_CLOCK.monotonic_s() - started_s, 1)
    summary = f"done in {duration_s} s"
    if report.skipped:
        summary = f"stopped after {duration_s} s; not written: {', '.join(report.skipped)}"
    events.emit(
        "done",
        summary,
        seconds=duration_s,
        rows=report.rows,
        left=report.skipped,
        figures=report.figures,
        files=report.files,
    )
    return report


def _run_ready_pipeline(
    pipeline: Pipeline, use: str, spark: "SparkSession", events: EventEmitter, stopping: Stopping
) -> Report:
    """Run the ready pipeline `use`, and return its report.

    An event is emitted for each line that the pipeline says during the run. At the end, an event is
    emitted for each other line of the report.
    """
    events.emit("started", f"the ready pipeline {use!r}")
    emitted_lines: set[str] = set()

    def say(line: str) -> None:
        """Emit the event of a line."""
        emitted_lines.add(line)
        events.emit("line", line)

    task = Task(spark, pipeline.use_options, pipeline.cluster, say, stopping)
    report = find_ready_pipeline(use).run(task)
    for line in report.lines:
        if line not in emitted_lines:  # most lines have been emitted during the run
            events.emit("line", line)
    return report


# ---- a batch


def _run_batch(
    pipeline: Pipeline, spark: "SparkSession", events: EventEmitter, stopping: Stopping
) -> Report:
    """Write the sinks of a batch one after the other, and return the report.

    All sinks get the same range of offsets. When `stopping()` becomes True, the current sink is
    finished, and the others are listed as `skipped` in the report. Raises PlaceError if a sink
    fails.
    """
    read_range = resolve_read_range(pipeline)
    pinned = pipeline if read_range is None else read_range.pin(pipeline)
    frame, writers = load_checked_frame(pinned, spark)

    message_count = None
    source_text = "a batch"
    if read_range is not None:
        message_count = read_range.message_count
        source_text = f"{message_count:,} messages of {len(read_range.starts)} queues"
    events.emit("started", f"{source_text}, sinks: {len(writers)}", messages=message_count)

    # The number of rows after a filter is unknown.
    row_count = None if _has_filter(pipeline) else message_count
    report = Report()
    for writer in writers:
        sink = writer.sink.name
        if stopping():
            report.skipped.append(sink)
        else:
            report.rows[sink] = _write_sink(spark, writer, frame, events, row_count)
    return report


def _has_filter(pipeline: Pipeline) -> bool:
    """Return whether a filter or a transform may change the number of rows."""
    assert pipeline.source is not None
    options = pipeline.source.options
    return "filter.tags" in options or "filter.sql" in options or bool(pipeline.transform)


def _write_sink(
    spark: "SparkSession",
    writer: Writer,
    frame: "DataFrame",
    events: EventEmitter,
    messages: int | None,
) -> int:
    """Write a batch to one sink, and return the number of rows.

    Events are emitted for its progress and at its end. `messages` is the number of rows that are
    read, or None if it is unknown. Raises PlaceError if the write fails.
    """
    from pyspark.sql import Observation  # noqa: PLC0415 - a slow import
    from pyspark.sql.functions import count, lit  # noqa: PLC0415 - as above

    sink = writer.sink.name
    job_group = f"{events.pipeline} {sink} {uuid.uuid4().hex[:8]}"
    observation = Observation()
    started_s = SYSTEM_CLOCK.monotonic_s()
    writer.prepare(frame)
    try:
        with BatchMonitor(spark, events, sink, job_group, messages).monitoring():
            # Spark counts the rows while it writes them.
            counted_frame = frame.observe(observation, count(lit(1)).alias("rows"))
            writer.write_batch(counted_frame)
    except Exception as error:
        raise _to_sink_error(writer, error) from error

    row_count = int(observation.get["rows"])
    duration_s = max(0.001, SYSTEM_CLOCK.monotonic_s() - started_s)
    rate = row_count / duration_s
    events.emit(
        "written",
        f"{row_count:,} rows into {writer.target} in {duration_s:.1f} s, {rate:,.0f} rows/s",
        sink=sink,
        rows=row_count,
        seconds=round(duration_s, 1),
        rows_per_second=round(rate, 1),
    )
    return row_count


def _to_sink_error(writer: Writer, error: BaseException) -> Exception:
    """Return the error of a write as a PlaceError about the sink.

    A PlaceError is returned unchanged.
    """
    if isinstance(error, PlaceError):
        return error
    return writer.sink.error(f"{writer.target}: {summarize_spark_error(error)}")


@dataclass(frozen=True, slots=True)
class StageProgress:
    """The progress of one stage in Spark's status store.

    `stage` is its id, `tasks` the number of its tasks, `done` the number of completed ones, and
    `rows` the number of rows that the stage has read.
    """

    stage: int
    tasks: int
    done: int
    rows: int


class BatchMonitor:
    """Emits the progress of a job group's stages while a batch is written.

    Each stage with rows is reported every `PROGRESS_PERIOD_S` if it has changed, and when
    it is complete.
    """

    def __init__(
        self,
        spark: "SparkSession",
        events: EventEmitter,
        sink: str,
        job_group: str,
        messages: int | None,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Create a monitor of the Spark jobs in `job_group`, a unique name.

        `messages` is the number of rows that are read, or None if it is unknown.
        """
        self._context = get_spark_context(spark)
        self._events = events
        self._sink = sink
        self._job_group = job_group
        self._messages = messages
        self._clock = clock
        self._started_s: dict[int, float] = {}
        self._last_progress: dict[int, StageProgress] = {}
        self._completed: set[int] = set()
        self._is_over = threading.Event()

    @contextmanager
    def monitoring(self) -> Iterator[None]:
        """Return a context manager that observes the Spark jobs which this thread starts in it.

        A background thread emits events about their progress. At the end, the remaining complete
        stages are reported.
        """

        def emit_periodically() -> None:
            """Emit what has changed, every `PROGRESS_PERIOD_S` until the write is over."""
            while not self._is_over.wait(PROGRESS_PERIOD_S):
                self.emit_changes()

        thread = threading.Thread(target=emit_periodically, name=f"watch {self._sink}", daemon=True)
        self._context.setJobGroup(
            self._job_group, f"pipeline {self._job_group}", interruptOnCancel=True
        )
        thread.start()
        try:
            yield
            self.emit_changes(at_end=True)
        finally:
            self._is_over.set()
            thread.join()
            self._context.setLocalProperty("spark.jobGroup.id", None)
            self._context.setLocalProperty("spark.job.description", None)

    def emit_changes(self, *, at_end: bool = False) -> None:
        """Emit an event for each stage of a job that has changed since the last call.

        With `at_end`, only stages that are complete now are reported. Errors are logged and not
        raised, because the job must not fail if its progress cannot be read.
        """
        try:
            tracker = self._context.statusTracker()
            stages: set[int] = set()
            for job in tracker.getJobIdsForGroup(self._job_group):
                job_info = tracker.getJobInfo(job)
                if job_info is not None:
                    stages.update(job_info.stageIds)
            store: Any = self._context._jsc.sc().statusStore()
            for stage in sorted(stages - self._completed):
                if tracker.getStageInfo(stage) is not None:
                    self._emit_change(store, stage, at_end=at_end)
        except Exception:
            logger.debug("cannot read the progress of %s", self._job_group, exc_info=True)

    def _emit_change(self, store: Any, stage: int, *, at_end: bool) -> None:
        """Read the progress of one stage from Spark, and emit an event if it has changed.

        `store` is the status store of Spark's JVM. A stage without rows is only reported when it is
        complete. A complete stage is not read again. With `at_end`, only a complete stage is
        reported.
        """
        attempt = store.lastStageAttempt(stage)
        if str(attempt.status().toString()) in ("PENDING", "SKIPPED"):
            return
        started_ms = attempt.submissionTime().get().getTime()
        self._started_s.setdefault(stage, started_ms / 1000)
        rows = max(int(attempt.inputRecords()), int(attempt.shuffleReadRecords()))
        progress = StageProgress(
            stage, tasks=int(attempt.numTasks()), done=int(attempt.numCompleteTasks()), rows=rows
        )
        if progress == self._last_progress.get(stage):
            return
        self._last_progress[stage] = progress

        is_complete = progress.tasks > 0 and progress.done == progress.tasks
        if is_complete or (rows and not at_end):
            self._emit_stage(progress)
        if is_complete:
            self._completed.add(stage)

    def _emit_stage(self, progress: StageProgress) -> None:
        """Emit the event of a stage, with its rate and the estimated remaining time.

        The time is None if no task is complete and the number of messages is unknown.
        """
        spent_s = max(0.001, self._clock.now_ms() / 1000 - self._started_s[progress.stage])
        rate = progress.rows / spent_s
        share = self._estimate_share(progress)
        eta_s = None if share == 0 else round(spent_s * (1 - share) / share, 1)
        remaining = ""
        if eta_s is not None and share != 1:
            remaining = f", {eta_s:.0f} s left"
        self._events.emit(
            "stage",
            f"stage {progress.stage}: {progress.done} of {progress.tasks} tasks,"
            f" {progress.rows:,} rows, {rate:,.0f} rows/s{remaining}",
            sink=self._sink,
            stage=progress.stage,
            tasks=progress.tasks,
            tasks_done=progress.done,
            rows=progress.rows,
            rows_per_second=round(rate, 1),
            eta_s=eta_s,
        )

    def _estimate_share(self, progress: StageProgress) -> float:
        """Return how much of a stage is complete, from 0 to 1.

        It is the share of complete tasks, or the share of the messages that were read, if that is
        larger.
        """
        task_share = progress.done / progress.tasks if progress.tasks else 0.0
        if self._messages and progress.rows <= self._messages:
            return max(task_share, progress.rows / self._messages)
        return task_share


# ---- a stream


def _run_stream(
    pipeline: Pipeline, spark: "SparkSession", events: EventEmitter, stopping: Stopping
) -> Report:
    """Run one query of Spark for each sink, and return a report with the rows that each has read.

    The queries run until all have ended, one has failed, or `stopping()` is True. Then each query
    finishes its current micro-batch and is stopped, also after an error. An event is emitted for
    each micro-batch. Raises PlaceError for the first sink whose query failed or could not be
    started, or if a sink does not accept the rows.
    """
    frame, writers = load_checked_frame(pipeline, spark)
    for writer in writers:
        writer.prepare(frame)
    monitors: list[QueryMonitor] = []
    reads_topics = pipeline.source is not None and pipeline.source.kind == ROCKETMQ
    try:
        for writer in writers:
            query = _start_query(pipeline, writer, frame)
            monitors.append(QueryMonitor(query, writer.sink.name, events, reads_topics))
        events.emit("started", _describe_stream(writers))
        _watch_queries(monitors, stopping)
    finally:
        for monitor in monitors:
            finish_query(monitor.query)
            monitor.emit_new_batches()
    for monitor, writer in zip(monitors, writers, strict=True):
        error = monitor.query.exception()
        if error is not None:
            raise _to_sink_error(writer, error)
    return Report(rows={monitor.sink: monitor.rows for monitor in monitors})


def _watch_queries(monitors: "list[QueryMonitor]", stopping: Stopping) -> None:
    """Emit events until all queries have ended, one has failed, or `stopping()` is True."""
    while not stopping() and any(monitor.query.isActive for monitor in monitors):
        for monitor in monitors:
            monitor.emit_new_batches()
        if any(monitor.has_failed() for monitor in monitors):
            break
        threading.Event().wait(CHECK_S)


def _start_query(pipeline: Pipeline, writer: Writer, frame: "DataFrame") -> "StreamingQuery":
    """Start the query of one sink, with the sink's own checkpoint, and return it.

    Raises PlaceError if it cannot be started.
    """
    stream = writer.build_stream_writer(frame)
    stream = stream.queryName(f"{pipeline.name}/{writer.sink.name}")
    stream = stream.option("checkpointLocation", pipeline.checkpoint_of(writer.sink))
    try:
        return stream.trigger(**spark_trigger(pipeline.trigger_s)).start()
    except Exception as failure:
        raise _to_sink_error(writer, failure) from failure


def _describe_stream(writers: list[Writer]) -> str:
    """Return a text about the sinks of a stream, for its first event."""
    if len(writers) == 1:
        return f"a stream into {writers[0].target}"
    return f"a stream into {len(writers)} sinks; each has its own query and checkpoint"


@dataclass(slots=True)
class QueryMonitor:
    """Emits an event for each micro-batch of one query.

    `last_batch` is the number of the last micro-batch that was emitted, -1 before the first one.
    `rows` is the number of rows that the emitted micro-batches have read. If `reads_topics` is
    True, events contain the lag and the number of messages filtered by brokers.
    """

    query: "StreamingQuery"
    sink: str
    events: EventEmitter
    reads_topics: bool = True
    last_batch: int = -1
    rows: int = 0

    def has_failed(self) -> bool:
        """Return whether the query has ended with an error."""
        return not self.query.isActive and self.query.exception() is not None

    def emit_new_batches(self) -> None:
        """Emit an event for each micro-batch since the last call, except empty ones."""
        last_progress: Any = self.query.lastProgress
        if last_progress is None or int(last_progress["batchId"]) <= self.last_batch:
            return
        for progress in self.query.recentProgress:
            is_new = int(progress["batchId"]) > self.last_batch
            if is_new and "addBatch" in progress["durationMs"]:
                self._emit_batch(progress)

    def _emit_batch(self, progress: Any) -> None:
        """Emit the event of one micro-batch, and add its rows to `rows`.

        `progress` is Spark's report about the micro-batch. If the source reads topics, the event
        has the lag in messages (None: unknown) and `eta_s`, the seconds until the lag is read.
        """
        self.last_batch = int(progress["batchId"])
        batch = stream_progress(progress)
        row_count = int(progress["numInputRows"])
        self.rows += row_count
        if self.reads_topics:
            description = batch.describe()
            eta_s = None if batch.lag is None else round(batch.remaining_s(), 1)
            topic_figures = {"filtered": batch.filtered, "lag": batch.lag, "eta_s": eta_s}
        else:
            rate = f"{batch.rows_per_second:,.0f} rows/s"
            description = f"batch {batch.batch}: {row_count:,} rows, {rate}"
            topic_figures = {}
        self.events.emit(
            "batch",
            description,
            sink=self.sink,
            batch=batch.batch,
            rows=row_count,
            rows_per_second=round(batch.rows_per_second, 1),
            **topic_figures,
        )


# ---- stopping


class StopRequest:
    """A request to stop, made by a signal. Calling the object returns whether it was made."""

    def __init__(self, announce: Callable[[str], None] = lambda text: None) -> None:
        """Create an object without a request.

        `announce` is called with a text for the user when a signal arrives.
        """
        self._is_requested = threading.Event()
        self._announce = announce

    def __call__(self) -> bool:
        """Return whether the run was asked to stop."""
        return self._is_requested.is_set()

    def handle_signal(self, signal_number: int = signal.SIGTERM, _frame: Any = None) -> None:
        """Handle a signal: request the stop, or end the process if it is requested already.

        The exit code is then 128 + `signal_number`. This is a handler for `signal.signal`.
        """
        if self._is_requested.is_set():
            self._announce_in_thread("stopped at once")
            os._exit(128 + signal_number)
        self._is_requested.set()
        self._announce_in_thread(
            "stopping: the current work is finished first; a second signal stops at once"
        )

    def _announce_in_thread(self, announcement: str) -> None:
        """Call `announce` in another thread, and wait for it for at most `SIGNAL_OUTPUT_S`."""
        # A signal may arrive while the main thread prints a line, and Python's buffered output
        # cannot be entered again from a signal handler.
        thread = threading.Thread(target=self._announce, args=(announcement,), daemon=True)
        thread.start()
        thread.join(SIGNAL_OUTPUT_S)


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """Return a context manager in which SIGINT and SIGTERM request `stop`.

    The previous handlers are restored at the end. Enter it after the Spark session is created,
    because Spark sets a handler of its own. It does nothing outside of the main thread, in which
    alone Python allows to set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handlers = {
        signal_number: signal.signal(signal_number, stop.handle_signal) for signal_number in SIGNALS
    }
    try:
        yield
    finally:
        for signal_number, old_handler in old_handlers.items():
            signal.signal(signal_number, old_handler)
