"""The dry run: what a run would do, found out by looking, with no effect anywhere.

Looked at: the queues and their ends at the brokers, the checkpoint of a stream, Spark's plan of the
transform, the sinks' topics, directories and tables. Nothing is read of the messages themselves,
unless a property's type is `auto` or there is a `filter.sql` (which look at the newest ones).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sluicemq.spark.pipelines.document import Pipeline, PlaceError, Source
from sluicemq.spark.pipelines.frames import Reach, lost_by_filter, pinned_options, reach_of
from sluicemq.spark.pipelines.ready import ready
from sluicemq.spark.pipelines.run import checked_frame, pinned_to, task_of
from sluicemq.spark.report import pushdown

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sluicemq.spark.pipelines.frames import Writer


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
    try:
        found = _ready(pipeline, spark) if pipeline.use is not None else _own(pipeline, spark)
    except PlaceError as error:
        raise pipeline.failed(error) from error.__cause__
    return _without_secrets(pipeline, found)


def _without_secrets(pipeline: Pipeline, found: Plan) -> Plan:
    hidden = pipeline.secrets.hidden

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return hidden(value)
        if isinstance(value, list):
            return [clean(one) for one in value]
        if isinstance(value, dict):
            return {name: clean(one) for name, one in value.items()}
        return value

    return Plan(clean(found.sections), clean(found.figures))


def _ready(pipeline: Pipeline, spark: "SparkSession") -> Plan:
    assert pipeline.use is not None
    lines = ready(pipeline.use).plan(task_of(pipeline, spark, lambda text: None))
    head = f"pipeline {pipeline.name}: the ready pipeline {pipeline.use!r}"
    figures = {"pipeline": pipeline.name, "use": pipeline.use, "plan": lines}
    return Plan({head: lines}, figures)


def _own(pipeline: Pipeline, spark: "SparkSession") -> Plan:
    source = pipeline.source
    assert source is not None
    reaches = _reaches(pipeline)
    reach = next(iter(reaches.values()), None)
    batch = pipeline
    if reach is not None and not pipeline.is_streaming:
        batch = pinned_to(pipeline, pinned_options(reach, dict(source.options)))
    frame, writers = checked_frame(batch, spark)
    found = Plan({f"pipeline {pipeline.name}: {_mode_told(pipeline)}": []})
    for name, one in reaches.items():
        found.sections[f"source{name}"] = _reach_told(source, one)
    if not reaches:
        found.sections["source"] = [f"{source.kind} {source.options.get('path')}"]
    found.sections["filter"] = _filter_told(reach, source, frame, pipeline.is_streaming)
    found.sections["filter"] += [f"mind: {one}" for one in lost_by_filter(pipeline)]
    found.sections["columns"] = [
        f"{one.name} {one.dataType.simpleString()}" for one in frame.schema.fields
    ]
    found.sections["plan of Spark"] = _explained(frame)
    for writer in writers:
        found.sections[f"sink {writer.sink.name}: {writer.target}"] = _sink_told(
            pipeline, writer, frame
        )
    found.figures = _figures(pipeline, found, reach, frame, writers)
    return found


def _mode_told(pipeline: Pipeline) -> str:
    if not pipeline.is_streaming:
        return "a batch"
    if pipeline.trigger is None:
        return "a stream of all that is there now"
    return f"a stream, a micro-batch every {pipeline.trigger:g} s"


def _reaches(pipeline: Pipeline) -> dict[str, Reach]:
    """One for a batch; for a stream one for each sink, whose checkpoints may differ."""
    if not pipeline.is_streaming:
        reach = reach_of(pipeline)
        return {} if reach is None else {"": reach}
    found = {}
    for sink in pipeline.sinks:
        reach = reach_of(pipeline, checkpoint=pipeline.checkpoint_of(sink))
        if reach is not None:
            found[f" for {sink.name}" if len(pipeline.sinks) > 1 else ""] = reach
    return found


def _reach_told(source: Source, reach: Reach) -> list[str]:
    lines = [
        f"{topic} {queue}: offsets {start:,} to {end:,}, {end - start:,} messages"
        for topic, queue, start, end in reach.rows()
    ]
    topics = "topic " + reach.topics[0] if len(reach.topics) == 1 else f"{len(reach.topics)} topics"
    total = f"{topics} at {source.options['nameServers']}: {reach.messages:,} messages"
    return [total, *lines]


def _filter_told(
    reach: Reach | None, source: Source, frame: "DataFrame", is_streaming: bool
) -> list[str]:
    own = reach.selector if reach is not None else source.options.get("filter.sql")
    lines = [f"at the broker, by the file: {own or '-'}"]
    if not is_streaming:
        pushed = pushdown(frame)
        lines.append(
            f"at the broker, pushed down from the transform: {', '.join(pushed.broker) or '-'}"
        )
        lines.append(f"by Spark: {', '.join(pushed.spark) or '-'}")
    return lines


def _explained(frame: "DataFrame") -> list[str]:
    inner: Any = frame
    execution = inner._jdf.queryExecution()
    if inner.isStreaming:  # Spark makes a physical plan for each micro-batch only
        text = execution.analyzed().toString()
    else:
        text = inner.sparkSession._jvm.PythonSQLUtils.explainString(execution, "simple")
    return [line for line in str(text).splitlines() if line.strip()]


def _sink_told(pipeline: Pipeline, writer: "Writer", frame: "DataFrame") -> list[str]:
    lines = writer.told(frame)
    if pipeline.is_streaming:
        lines.append(f"checkpoint {pipeline.checkpoint_of(writer.sink)}")
    return lines


def _figures(
    pipeline: Pipeline, found: Plan, reach: Reach | None, frame: "DataFrame",
    writers: "list[Writer]",
) -> dict[str, Any]:  # fmt: skip
    return {
        "pipeline": pipeline.name,
        "mode": pipeline.mode,
        "messages": None if reach is None else reach.messages,
        "queues": [] if reach is None else [
            {"topic": topic, "queue": queue, "start": start, "end": end}
            for topic, queue, start, end in reach.rows()
        ],
        "filter": found.sections["filter"],
        "columns": {one.name: one.dataType.simpleString() for one in frame.schema.fields},
        "plan": found.sections["plan of Spark"],
        "sinks": [
            {"name": one.sink.name, "target": one.target,
             "what": found.sections[f"sink {one.sink.name}: {one.target}"]}
            for one in writers
        ],
    }  # fmt: skip
