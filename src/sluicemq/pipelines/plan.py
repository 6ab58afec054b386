"""Build the DataFrame and the writers of a pipeline, and describe what a run would do.

**Source.** A batch is pinned to one range of offsets before it begins (`ReadRange`). So all of its
sinks write the same messages, the numbers of the dry run are those of the run, and the run can
measure its progress.

**Transform.** The transform is one query over the view `source`. In a batch, topics are loaded
separately for each reference to the view, with the predicates that hold for that reference
(`spark.references`), so that the broker can evaluate them. Spark runs a command (`DROP TABLE`,
`INSERT`) as soon as it gets the text. A dry run must change nothing, so the text is parsed first,
and anything but a query is refused. Errors name the line of the file where Spark found them.

**Sinks.** `pipelines.writers` has a writer for each kind of sink.

**Dry run** (`plan`). It has no effect anywhere. It reads the queues and their ends at the brokers,
the checkpoint of a stream, Spark's plan of the transform, and the topics, directories and tables of
the sinks. Messages are only read if a property has the type `auto` or the source has a
`filter.sql`: both examine the newest ones.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from sluicemq.client.sync.admin import Admin
from sluicemq.errors import ConfigurationError, RouteNotFoundError, SluiceError
from sluicemq.files import SYSTEM_FILES, read_text
from sluicemq.model.subscription import SQL92
from sluicemq.model.topic import MessageQueue
from sluicemq.pipelines.file import (
    PARQUET,
    ROCKETMQ,
    STORE,
    VIEW,
    Pipeline,
    Source,
)
from sluicemq.pipelines.ready import Task, find_ready_pipeline
from sluicemq.pipelines.writers import WRITERS, Writer
from sluicemq.spark.classic import explain_plan, get_gateway, get_query_execution, get_session_state
from sluicemq.spark.errors import FileProblem, PlaceError, Secrets, summarize_spark_error
from sluicemq.spark.filters import (
    SAMPLE_MESSAGES_MAX,
    PushedFilters,
    build_subscription,
    collect_findings,
    try_at_brokers,
    try_on_properties,
)
from sluicemq.spark.options import (
    READ,
    STORE_OPTIONS_BY_NAME,
    STREAM,
    Options,
    parse_options,
)
from sluicemq.spark.references import (
    PlaceholderTable,
    extract_predicates,
    quote_name,
    replace_unknown_tables,
    scala_elements,
)
from sluicemq.spark.report import pushdown
from sluicemq.spark.sources.checkpoints import Offsets, offsets_to_table, parse_checkpoint
from sluicemq.spark.sources.offsets import (
    check_selector,
    fetch_bounds,
    open_admin,
    parse_topics,
    queue_label,
    resolve_ending_offsets,
    resolve_starting_offsets,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMATS: Final = {ROCKETMQ: "rocketmq", STORE: "rocketmq_store", PARQUET: "parquet"}
"""Spark's format for each kind of source."""
_RANGE_OPTIONS: Final = (
    "topic",
    "topics",
    "topicsPattern",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
)
"""The options that `ReadRange.pin` replaces."""
_LOGICAL_PLANS: Final = "org.apache.spark.sql.catalyst.plans.logical"
_LINE_AND_POSITION: Final = re.compile(r"\(line (\d+), pos (\d+)\)|;? ?line (\d+),? pos (\d+)")


# ---- the range of offsets that a run reads


@dataclass(frozen=True, slots=True)
class ReadRange:
    """The offsets starts[queue] <= offset < ends[queue] of each queue of the topics.

    `selector` describes the filter at the broker, such as "SQL92 a > 1"; None means no filter.
    """

    topics: tuple[str, ...]
    starts: Offsets
    ends: Offsets
    selector: str | None

    @property
    def message_count(self) -> int:
        """The number of offsets in the range, before any filter."""
        return sum(max(0, self.ends[queue] - start) for queue, start in self.starts.items())

    def pin(self, pipeline: Pipeline) -> Pipeline:
        """Return a copy of the pipeline whose source reads exactly this range of offsets."""
        source = pipeline.source
        assert source is not None
        by_topic = len(self.topics) > 1
        starts = offsets_to_table(self.starts, by_topic=by_topic)
        ends = offsets_to_table(self.ends, by_topic=by_topic)

        options = {
            name: option for name, option in source.options.items() if name not in _RANGE_OPTIONS
        }
        topics_option = "topics" if by_topic else "topic"
        options[topics_option] = ",".join(self.topics)
        options["startingOffsets"] = json.dumps(starts)
        options["endingOffsets"] = json.dumps(ends)
        return replace(pipeline, source=replace(source, options=options))

    def queue_rows(self) -> list[tuple[str, str, int, int]]:
        """Return (topic, queue label, start offset, end offset) of each queue, sorted."""
        return [
            (queue.topic, queue_label(queue), self.starts[queue], self.ends[queue])
            for queue in sorted(self.starts)
        ]


def resolve_read_range(pipeline: Pipeline, *, checkpoint: str | None = None) -> ReadRange | None:
    """Return the range of offsets that a run would read if it began now.

    Return None if the source does not read topics. A stream continues where its checkpoint ends.
    `checkpoint` is the checkpoint directory of one query of the stream; it is ignored for a batch.
    If it is None or has no committed micro-batch, the stream begins at its starting offsets. Raises
    PlaceError if a topic does not exist, ConfigurationError for invalid options, RequestError if a
    broker rejects the filter, and the client's other errors.
    """
    source = pipeline.source
    if source is None or source.kind != ROCKETMQ:
        return None
    options = parse_options(source.options, STREAM if pipeline.is_streaming else READ)
    with open_admin(options) as admin:
        try:
            topics = tuple(parse_topics(options).resolve(admin))
            selector = _describe_selector(admin, topics, options)
            bounds = fetch_bounds(admin, topics)
        except RouteNotFoundError as error:
            raise to_place_error(error, source.line, "source") from error
        if not pipeline.is_streaming:
            starts = resolve_starting_offsets(admin, options, bounds, "earliest")
            ends = resolve_ending_offsets(admin, options, bounds)
            return ReadRange(topics, starts, ends, selector)

        ends = {queue: end for queue, (_, end) in bounds.items()}
        committed = None if checkpoint is None else read_committed_offsets(checkpoint)
        if committed is None:
            starts = resolve_starting_offsets(admin, options, bounds, "latest")
        else:
            # A queue that the checkpoint does not contain is new, and read from its beginning.
            starts = {queue: committed.get(queue, lowest) for queue, (lowest, _) in bounds.items()}
        return ReadRange(topics, starts, ends, selector)


def _describe_selector(admin: Admin, topics: Sequence[str], options: Options) -> str | None:
    """Return a text about the filter at the broker, such as "tags A || B"; None if there is none.

    The text is "nothing matches" if no message can match. `options` are the parsed options of the
    source. Raises RequestError if a broker rejects the expression of `filter.sql`, and the client's
    other errors.
    """
    subscription_and_rest = build_subscription(
        parse_topics(options).label,
        options["filter.tags"],
        options["filter.sql"],
        PushedFilters(),
    )
    if subscription_and_rest is None:
        return "nothing matches"
    subscription = subscription_and_rest[0]
    expression = subscription.expression
    if subscription.kind == SQL92:
        check_selector(admin, topics, options["group"] or "sluice-pipeline", expression)
        return f"SQL92 {expression}"
    return None if expression == "*" else f"tags {expression}"


def read_committed_offsets(checkpoint: str) -> dict[MessageQueue, int] | None:
    """Return the offsets at which a query with this checkpoint directory continues.

    Return None if the checkpoint has no committed micro-batch, or is not on this machine.
    """
    directory = checkpoint.removeprefix("file://")
    commits = [name for name in SYSTEM_FILES.names(f"{directory}/commits") if name.isdigit()]
    if not commits:
        return None
    last_commit = max(commits, key=int)
    offsets_file = read_text(SYSTEM_FILES, f"{directory}/offsets/{last_commit}")
    if offsets_file is None:
        return None
    # Line 1 is a version, line 2 metadata, and line 3 the offsets of the only source.
    source_offsets: Any = json.loads(offsets_file.splitlines()[2])
    if not isinstance(source_offsets, dict) or "queues" not in source_offsets:
        return None
    return parse_checkpoint(source_offsets, None)


def find_filter_mistakes(pipeline: Pipeline) -> list[str]:
    """Return texts about messages that the source's `filter.sql` probably loses by mistake.

    For that, the filter is tried on the newest messages. The list is empty if the source has no
    `filter.sql`. Raises the client's errors, and StoreError if a store cannot be read.
    """
    source = pipeline.source
    sql = None if source is None else source.options.get("filter.sql")
    if source is None or sql is None:
        return []
    if source.kind == ROCKETMQ:
        options = parse_options(source.options, STREAM if pipeline.is_streaming else READ)
        with open_admin(options) as admin:
            topics = parse_topics(options).resolve(admin)
            return collect_findings(sql, lambda variant: try_at_brokers(admin, topics, variant))

    from sluicemq.spark.sources.reader import open_snapshot  # noqa: PLC0415 - a slow import

    with open_snapshot(parse_options(source.options, READ, STORE_OPTIONS_BY_NAME)) as snapshot:
        newest = list(snapshot.read_newest_properties(SAMPLE_MESSAGES_MAX))
    return collect_findings(sql, lambda variant: try_on_properties(newest, variant))


# ---- source and transform


def load_checked_frame(
    pipeline: Pipeline, spark: "SparkSession"
) -> "tuple[DataFrame, list[Writer]]":
    """Return the transformed DataFrame, and a writer for each sink, after all checks.

    Nothing is written. Raises PlaceError if the source cannot be loaded, the transform is invalid,
    or a sink does not accept the columns.
    """
    frame = apply_transform(pipeline, spark, load_source(pipeline, spark))
    writers = [WRITERS[sink.kind](pipeline, sink) for sink in pipeline.sinks]
    for writer in writers:
        writer.check(frame)
    return frame, writers


def load_source(
    pipeline: Pipeline, spark: "SparkSession", schema: Any = None, **option_overrides: str
) -> "DataFrame":
    """Return the source as a DataFrame, which is a stream if the pipeline is one.

    `option_overrides` replace options of the file. `schema` is the schema of the source if the
    caller knows it; it is ignored for Parquet, which has the schema of the file or of the data.
    Raises PlaceError if Spark or the source refuses the options.
    """
    source = pipeline.source
    assert source is not None
    reader = spark.readStream if pipeline.is_streaming else spark.read
    options = dict(source.options) | option_overrides
    try:
        if source.kind == PARQUET:
            schema = options.pop("schema", None)
            if schema is None and pipeline.is_streaming:
                schema = spark.read.parquet(options["path"]).schema
        reader = reader if schema is None else reader.schema(schema)
        return reader.format(FORMATS[source.kind]).options(**options).load()
    except Exception as error:
        raise to_place_error(error, source.line, "source") from error


def apply_transform(pipeline: Pipeline, spark: "SparkSession", frame: "DataFrame") -> "DataFrame":
    """Return the result of the transform on `frame`, or `frame` itself if there is no transform.

    Raises PlaceError if the transform is not a query, or Spark rejects it.
    """
    if pipeline.transform is None:
        return frame
    try:
        parser = get_session_state(spark).sqlParser()
        if _contains_command(spark, parser.parsePlan(pipeline.transform)):
            raise ConfigurationError(  # noqa: TRY301 - reported like Spark's own errors
                "this is a command, not a query.", fix="Write select … from source."
            )
        frame.createOrReplaceTempView(VIEW)
        try:
            transformed = spark.sql(pipeline.transform)
        finally:
            spark.catalog.dropTempView(VIEW)
        return _push_down_predicates(pipeline, spark, frame.schema) or transformed
    except Exception as error:
        raise to_place_error(error, pipeline.transform_line, "transform") from error


def _contains_command(spark: "SparkSession", plan: Any) -> bool:
    """Return whether a parsed query of Spark contains a statement with an effect (INSERT …)."""
    from py4j.java_gateway import (  # type: ignore[import-untyped]  # noqa: PLC0415 - pyspark's
        is_instance_of,
    )

    gateway = get_gateway(spark)
    for java_class in (f"{_LOGICAL_PLANS}.Command", f"{_LOGICAL_PLANS}.ParsedStatement"):
        if is_instance_of(gateway, plan, java_class):
            return True
    return any(_contains_command(spark, child) for child in scala_elements(plan.children()))


def _push_down_predicates(
    pipeline: Pipeline, spark: "SparkSession", schema: Any
) -> "DataFrame | None":
    """Return the result of the transform, in which the source evaluates conditions of the query.

    Each place in the query that names the view `source` gets a source of its own, with the
    conditions that hold for this place. A store is loaded only once, with the conditions that all
    places share, because all of them must read the same snapshot. Return None if the source cannot
    evaluate conditions (a stream, Parquet), or if the query has none for it.
    """
    source = pipeline.source
    transform = pipeline.transform
    assert source is not None
    assert transform is not None
    if pipeline.is_streaming or source.kind == PARQUET:
        return None
    placeholders: dict[str, PlaceholderTable] = {}

    def create_view(_: str) -> str:
        """Create a placeholder view for one reference to `source`, and return its name."""
        view = VIEW if source.kind == STORE else f"{VIEW} {len(placeholders) + 1}"
        placeholders[view] = PlaceholderTable.create(spark, schema)
        placeholders[view].frame.createOrReplaceTempView(quote_name(view))
        return view

    try:
        query_over_views, query = replace_unknown_tables(spark, transform, create_view)
        predicates_by_view = extract_predicates(query, list(placeholders.values()))
        if not any(predicates_by_view):
            return None
        # Replace each placeholder by the source with the predicates of that reference.
        for view, predicates in zip(placeholders, predicates_by_view, strict=True):
            predicates_option = {"predicates": predicates} if predicates else {}
            loaded = load_source(pipeline, spark, schema, **predicates_option)
            loaded.createOrReplaceTempView(quote_name(view))
        return spark.sql(query_over_views)
    finally:  # the DataFrame keeps the meaning of its views
        for view in placeholders:
            spark.catalog.dropTempView(view)


def to_place_error(error: Exception, line: int, key: str) -> PlaceError:
    """Return an error of Spark or SluiceMQ as an error about a line and a key of the file.

    Its text is one sentence, without plan and stack trace. `line` is the line where the value of
    `key` begins. If Spark names a line of the transform's SQL, the result has the corresponding
    line of the file.
    """
    if isinstance(error, PlaceError):
        return error
    if isinstance(error, SluiceError):
        return PlaceError(FileProblem(line, key, str(error)))

    message = summarize_spark_error(error)
    place = _LINE_AND_POSITION.search(str(error)) if key == "transform" else None
    if place is not None:
        sql_line = int(place[1] or place[3])  # counted from 1
        position = int(place[2] or place[4])  # counted from 0
        line += sql_line - 1
        message = f"at position {position + 1} of the line: {message}"
    return PlaceError(FileProblem(line, key, message))


# ---- the dry run


@dataclass(slots=True)
class Plan:
    """What a run would do: `sections` has lines by heading, `figures` the same for programs."""

    sections: dict[str, list[str]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """Return the headings, each followed by its indented lines, as one text."""
        lines = []
        for heading, section in self.sections.items():
            lines += [heading, *(f"    {line}" for line in section)]
        return "\n".join(lines)


def plan(pipeline: Pipeline, spark: "SparkSession") -> Plan:
    """Return what `run` would do now, with secrets masked. Nothing is written.

    Raises the errors that `run` raises before it changes anything.
    """
    try:
        if pipeline.use is None:
            unmasked = _plan_source_and_sinks(pipeline, spark)
        else:
            unmasked = _plan_ready_pipeline(pipeline, spark, pipeline.use)
    except PlaceError as error:
        raise pipeline.to_configuration_error(error) from error.__cause__
    return Plan(
        _mask_strings(unmasked.sections, pipeline.secrets),
        _mask_strings(unmasked.figures, pipeline.secrets),
    )


def _mask_strings(value: Any, secrets: Secrets) -> Any:
    """Return the value with secrets masked in all strings within its lists and dicts.

    The keys of dicts are not masked.
    """
    if isinstance(value, str):
        return secrets.mask(value)
    if isinstance(value, list):
        return [_mask_strings(element, secrets) for element in value]
    if isinstance(value, dict):
        return {key: _mask_strings(element, secrets) for key, element in value.items()}
    return value


def _plan_ready_pipeline(pipeline: Pipeline, spark: "SparkSession", use: str) -> Plan:
    """Return the plan of a pipeline that uses the ready pipeline `use`."""
    task = Task(spark, pipeline.use_options, pipeline.cluster, lambda text: None)
    lines = find_ready_pipeline(use).plan(task)
    heading = f"pipeline {pipeline.name}: the ready pipeline {use!r}"
    return Plan({heading: lines}, {"pipeline": pipeline.name, "use": use, "plan": lines})


def _plan_source_and_sinks(pipeline: Pipeline, spark: "SparkSession") -> Plan:
    """Return the plan of a pipeline that has a source and sinks.

    Its sections are the source, filters, columns, Spark's plan and each sink. The DataFrame of a
    batch reads exactly the range of offsets that the plan shows. Raises PlaceError if a part cannot
    work.
    """
    range_by_suffix = _resolve_ranges(pipeline)
    read_range = next(iter(range_by_suffix.values()), None)
    pinned = pipeline
    if read_range is not None and not pipeline.is_streaming:
        pinned = read_range.pin(pipeline)
    frame, writers = load_checked_frame(pinned, spark)

    sections: dict[str, list[str]] = {}
    sections[f"pipeline {pipeline.name}: {_describe_mode(pipeline)}"] = []
    sections |= _describe_source(pipeline, range_by_suffix)
    sections["filter"] = _describe_filters(pipeline, frame, read_range)
    sections["columns"] = [f"{name} {spark_type}" for name, spark_type in frame.dtypes]
    sections["plan of Spark"] = _describe_spark_plan(frame)
    sink_figures = []
    for writer in writers:
        lines = _describe_sink(pipeline, writer, frame)
        sections[f"sink {writer.sink.name}: {writer.target}"] = lines
        sink_figures.append({"name": writer.sink.name, "target": writer.target, "what": lines})

    figures = {
        "pipeline": pipeline.name,
        "mode": pipeline.mode,
        "messages": None if read_range is None else read_range.message_count,
        "queues": [] if read_range is None else _list_queues(read_range),
        "filter": sections["filter"],
        "columns": dict(frame.dtypes),
        "plan": sections["plan of Spark"],
        "sinks": sink_figures,
    }
    return Plan(sections, figures)


def _describe_source(
    pipeline: Pipeline, range_by_suffix: Mapping[str, ReadRange]
) -> dict[str, list[str]]:
    """Return one section for each range of offsets that is read.

    `range_by_suffix` has these ranges by the end of the section's heading. If it is empty, the
    source does not read topics and has one section.
    """
    source = pipeline.source
    assert source is not None
    if not range_by_suffix:
        return {"source": [f"{source.kind} {source.options.get('path')}"]}
    return {
        f"source{suffix}": _describe_range(read_range, source)
        for suffix, read_range in range_by_suffix.items()
    }


def _describe_sink(pipeline: Pipeline, writer: Writer, frame: "DataFrame") -> list[str]:
    """Return lines about a sink. For a stream, the last line is about the sink's checkpoint."""
    lines = writer.describe(frame)
    if pipeline.is_streaming:
        lines.append(f"checkpoint {pipeline.checkpoint_of(writer.sink)}")
    return lines


def _list_queues(read_range: ReadRange) -> list[dict[str, Any]]:
    """Return the range of each queue as a JSON object."""
    return [
        {"topic": topic, "queue": queue, "start": start, "end": end}
        for topic, queue, start, end in read_range.queue_rows()
    ]


def _describe_spark_plan(frame: "DataFrame") -> list[str]:
    """Return Spark's plan of a DataFrame as lines.

    It is the physical plan, or the analyzed plan for a stream, because Spark makes the physical
    plan of a stream only for each micro-batch.
    """
    if frame.isStreaming:
        plan_text = get_query_execution(frame).analyzed().toString()
    else:
        plan_text = explain_plan(frame, "simple")
    return [line for line in str(plan_text).splitlines() if line.strip()]


def _resolve_ranges(pipeline: Pipeline) -> dict[str, ReadRange]:
    """Return the range of offsets that each query of the pipeline reads.

    The result is empty if the source does not read topics. The keys complete the heading "source":
    "" for a batch or a single sink, else " for SINK". The queries of a stream may have different
    ranges, because each has a checkpoint of its own.
    """
    checkpoint_by_suffix: dict[str, str | None] = {"": None}
    if pipeline.is_streaming:
        has_several_sinks = len(pipeline.sinks) > 1
        checkpoint_by_suffix = {
            f" for {sink.name}" if has_several_sinks else "": pipeline.checkpoint_of(sink)
            for sink in pipeline.sinks
        }
    range_by_suffix = {}
    for suffix, checkpoint in checkpoint_by_suffix.items():
        read_range = resolve_read_range(pipeline, checkpoint=checkpoint)
        if read_range is not None:
            range_by_suffix[suffix] = read_range
    return range_by_suffix


def _describe_mode(pipeline: Pipeline) -> str:
    """Return a text such as "a batch" or "a stream, a micro-batch every 10 s"."""
    if not pipeline.is_streaming:
        return "a batch"
    if pipeline.trigger_s is None:
        return "a stream of all that is available now"
    return f"a stream, a micro-batch every {pipeline.trigger_s:g} s"


def _describe_range(read_range: ReadRange, source: Source) -> list[str]:
    """Return a line about all topics, and one for each queue."""
    topics = read_range.topics
    name = f"topic {topics[0]}" if len(topics) == 1 else f"{len(topics)} topics"
    return [
        f"{name} at {source.options['nameServers']}: {read_range.message_count:,} messages",
        *(
            f"{topic} {queue}: offsets {start:,} to {end:,}, {end - start:,} messages"
            for topic, queue, start, end in read_range.queue_rows()
        ),
    ]


def _describe_filters(
    pipeline: Pipeline, frame: "DataFrame", read_range: ReadRange | None
) -> list[str]:
    """Return lines about what the broker filters, what Spark filters, and mistakes in filter.sql.

    `frame` is the transformed DataFrame. `read_range` is None if the source does not read topics.
    """
    if read_range is not None:
        selector = read_range.selector
    else:
        assert pipeline.source is not None
        selector = pipeline.source.options.get("filter.sql")
    lines = [f"at the broker, by the file: {selector or '-'}"]
    if not pipeline.is_streaming:
        pushed = pushdown(frame, with_options=False)
        at_broker = ", ".join(pushed.broker) or "-"
        by_spark = ", ".join(pushed.spark) or "-"
        lines.append(f"at the broker, pushed down from the transform: {at_broker}")
        lines.append(f"by Spark: {by_spark}")
    elif pipeline.transform is not None:
        lines.append("by Spark: the conditions of the transform, because this is a stream")
    lines += [f"warning: {mistake}" for mistake in find_filter_mistakes(pipeline)]
    return lines
