"""Runs a pipeline: a batch sink after sink, a stream with a query for each sink, a ready one.

    pipeline = load_pipeline("late.yaml")
    outcome = run(pipeline, spark, listener=lambda event: print(event.text))

All is checked before the first effect: the source is there, the transform parses, every sink can
take its columns. The driver holds no rows: they go from executors to sinks, numbers come from
Spark's own counts. A batch is pinned to one range of offsets, so several sinks get the same rows.

`stopping` is looked at between steps. A stream then finishes its micro-batches; a batch finishes
the sink it is at and leaves the others out (`Outcome.left`).
"""

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.spark.pipelines.frames import sentence_of, source_frame, transformed
from sluicemq.spark.pipelines.narrate import Listener, Narrator, silent
from sluicemq.spark.pipelines.pipeline import ROCKETMQ, Pipeline, PlaceError
from sluicemq.spark.pipelines.reach import Reach, pinned_options, reach_of
from sluicemq.spark.pipelines.ready import Task, ready
from sluicemq.spark.pipelines.sinks import Writer, writer_of
from sluicemq.spark.pipelines.stop import CHECK_S, finish
from sluicemq.spark.pipelines.watch import BatchWatch, QueryWatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery


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
