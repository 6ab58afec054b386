"""The dry run: what a run would do, found out by looking, with no effect anywhere.

Looked at: the queues and their ends at the brokers, the checkpoint of a stream, Spark's plan of the
transform, the sinks' topics, directories and tables. Nothing is read of the messages themselves,
unless a property's type is `auto` or there is a `filter.sql` (which look at the newest ones).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sluicemq.spark.pipelines.document import Pipeline, PlaceError
from sluicemq.spark.pipelines.frames import Reach, checked_frame, lost_by_filter, reach_of
from sluicemq.spark.pipelines.ready import Task, ready
from sluicemq.spark.report import pushdown

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(slots=True)
class Plan:
    """Lines for people under headings, and the same as `figures` for programs."""

    sections: dict[str, list[str]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def told(self) -> str:
        lines = []
        for heading, section in self.sections.items():
            lines += [heading, *(f"    {line}" for line in section)]
        return "\n".join(lines)


def plan(pipeline: Pipeline, spark: "SparkSession") -> Plan:
    """What `run` would do now. Raises as `run` does before its first effect."""
    hidden = pipeline.secrets.hidden

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return hidden(value)
        if isinstance(value, list):
            return [clean(one) for one in value]
        if isinstance(value, dict):
            return {name: clean(one) for name, one in value.items()}
        return value

    try:
        if pipeline.use is None:
            found = _own(pipeline, spark)
        else:
            task = Task(spark, pipeline.given, pipeline.cluster, lambda text: None)
            lines = ready(pipeline.use).plan(task)
            head = f"pipeline {pipeline.name}: the ready pipeline {pipeline.use!r}"
            figures = {"pipeline": pipeline.name, "use": pipeline.use, "plan": lines}
            found = Plan({head: lines}, figures)
    except PlaceError as error:
        raise pipeline.failed(error) from error.__cause__
    return Plan(clean(found.sections), clean(found.figures))


def _own(pipeline: Pipeline, spark: "SparkSession") -> Plan:
    source = pipeline.source
    assert source is not None
    reaches = _reaches(pipeline)
    reach = next(iter(reaches.values()), None)
    pinned = reach is not None and not pipeline.is_streaming
    frame, writers = checked_frame(
        reach.pinned(pipeline) if reach is not None and pinned else pipeline, spark
    )
    mode = "a batch"
    if pipeline.is_streaming:
        every = "" if pipeline.trigger is None else f", a micro-batch every {pipeline.trigger:g} s"
        mode = f"a stream{every or ' of all that is there now'}"
    found = Plan({f"pipeline {pipeline.name}: {mode}": []})
    for name, one in reaches.items():
        topics = f"topic {one.topics[0]}" if len(one.topics) == 1 else f"{len(one.topics)} topics"
        found.sections[f"source{name}"] = [
            f"{topics} at {source.options['nameServers']}: {one.messages:,} messages",
            *(f"{topic} {queue}: offsets {start:,} to {end:,}, {end - start:,} messages"
              for topic, queue, start, end in one.rows()),
        ]  # fmt: skip
    if not reaches:
        found.sections["source"] = [f"{source.kind} {source.options.get('path')}"]
    own = reach.selector if reach is not None else source.options.get("filter.sql")
    filters = [f"at the broker, by the file: {own or '-'}"]
    if not pipeline.is_streaming:
        pushed = pushdown(frame)
        at_broker = ", ".join(pushed.broker) or "-"
        filters += [
            f"at the broker, pushed down from the transform: {at_broker}",
            f"by Spark: {', '.join(pushed.spark) or '-'}",
        ]
    found.sections["filter"] = filters + [f"mind: {one}" for one in lost_by_filter(pipeline)]
    found.sections["columns"] = [f"{name} {kind}" for name, kind in frame.dtypes]
    found.sections["plan of Spark"] = _explained(frame)
    sinks = []
    for writer in writers:
        lines = writer.told(frame)
        if pipeline.is_streaming:
            lines.append(f"checkpoint {pipeline.checkpoint_of(writer.sink)}")
        found.sections[f"sink {writer.sink.name}: {writer.target}"] = lines
        sinks.append({"name": writer.sink.name, "target": writer.target, "what": lines})
    found.figures = {
        "pipeline": pipeline.name,
        "mode": pipeline.mode,
        "messages": None if reach is None else reach.messages,
        "queues": [] if reach is None else [
            {"topic": topic, "queue": queue, "start": start, "end": end}
            for topic, queue, start, end in reach.rows()
        ],
        "filter": found.sections["filter"],
        "columns": dict(frame.dtypes),
        "plan": found.sections["plan of Spark"],
        "sinks": sinks,
    }  # fmt: skip
    return found


def _reaches(pipeline: Pipeline) -> dict[str, Reach]:
    """One for a batch; for a stream one for each sink, whose checkpoints may differ."""
    checkpoints: dict[str, str | None] = {"": None}
    if pipeline.is_streaming:
        several = len(pipeline.sinks) > 1
        checkpoints = {
            f" for {sink.name}" if several else "": pipeline.checkpoint_of(sink)
            for sink in pipeline.sinks
        }
    found = {name: reach_of(pipeline, checkpoint=place) for name, place in checkpoints.items()}
    return {name: reach for name, reach in found.items() if reach is not None}


def _explained(frame: "DataFrame") -> list[str]:
    inner: Any = frame
    execution = inner._jdf.queryExecution()
    if inner.isStreaming:  # Spark makes a physical plan for each micro-batch only
        text = execution.analyzed().toString()
    else:
        text = inner.sparkSession._jvm.PythonSQLUtils.explainString(execution, "simple")
    return [line for line in str(text).splitlines() if line.strip()]
