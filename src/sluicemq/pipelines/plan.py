"""Build the DataFrame and the writers of a pipeline, and describe what a run would do.

**Source.** A batch is pinned to one range of offsets before it begins (`ReadRange`). So all of its
sinks write the same messages, the numbers of the dry run are those of the run, and the run can
measure its progress.

**Transform.** The transform is one query over the view `source`. In a batch, topics are loaded
separately for each reference to the view, with the predicates that hold for that reference
(`spark.references`), so that the broker can evaluate them. Spark runs a command (`DROP TABLE`,
`INSERT`) as soon as it gets the text. A dry run must change nothing, so the text is parsed first,
and anything but a query is refused. Errors name the line of the file where Spark found them.

**Sinks.**

| kind | batch | stream |
|---|---|---|
| topic | `df.write.format("rocketmq")` | `writeStream`: exactly once if the sink asks for it |
| parquet | `df.write.parquet` | Spark's file sink: exactly once |
| table | tasks upsert their partitions | the same in `foreachBatch`: repeats change nothing |

`Writer.check` and `Writer.describe` only read. `Writer.prepare` is the first step with an effect:
it creates a missing table.

**Dry run** (`plan`). It has no effect anywhere. It reads the queues and their ends at the brokers,
the checkpoint of a stream, Spark's plan of the transform, and the topics, directories and tables of
the sinks. Messages are only read if a property has the type `auto` or the source has a
`filter.sql`: both examine the newest ones.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.files import SYSTEM_FILES, read_text
from sluicemq.hints import suggest
from sluicemq.model.subscription import SQL92
from sluicemq.model.topic import MessageQueue
from sluicemq.pipelines import dedup as databases
from sluicemq.pipelines.file import (
    MESSAGE,
    PARQUET,
    ROCKETMQ,
    STORE,
    TABLE,
    TOPIC,
    VIEW,
    Pipeline,
    Sink,
    Source,
)
from sluicemq.pipelines.ready import Task, find_ready_pipeline
from sluicemq.spark.classic import explain_plan, get_gateway, get_query_execution, get_session_state
from sluicemq.spark.errors import FileProblem, PlaceError
from sluicemq.spark.filters import (
    SAMPLE_MESSAGES_MAX,
    PushedFilters,
    build_subscription,
    collect_findings,
    try_at_brokers,
    try_on_properties,
)
from sluicemq.spark.options import (
    EXACTLY_ONCE,
    READ,
    STORE_OPTIONS_BY_NAME,
    STREAM,
    WRITE,
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
from sluicemq.spark.source import resolve_roles
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
    from pyspark.sql.streaming import DataStreamWriter

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
_SPARK_DETAILS: Final = re.compile(
    r"(;? ?\(?line \d+,? pos \d+\)?|SQLSTATE: \w+|== SQL.*|JVM stacktrace:.*"
    r"|;\n'.*|;\n\w.*)",
    re.DOTALL,
)
"""The parts of Spark's error texts to leave out: position, SQL state, query and stack trace."""
_ERROR_CHARACTERS_MAX: Final = 600


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
        """Return the pipeline with a source that reads exactly this range."""
        source = pipeline.source
        has_several_topics = len(self.topics) > 1
        assert source is not None
        options = {
            name: text for name, text in source.options.items() if name not in _RANGE_OPTIONS
        }
        options["topics" if has_several_topics else "topic"] = ",".join(self.topics)
        for name, offsets in (("startingOffsets", self.starts), ("endingOffsets", self.ends)):
            options[name] = json.dumps(offsets_to_table(offsets, by_topic=has_several_topics))
        return replace(pipeline, source=replace(source, options=options))

    def queue_rows(self) -> list[tuple[str, str, int, int]]:
        """Return (topic, queue label, start offset, end offset) of each queue, sorted."""
        return [
            (queue.topic, queue_label(queue), self.starts[queue], self.ends[queue])
            for queue in sorted(self.starts)
        ]


def resolve_read_range(pipeline: Pipeline, *, checkpoint: str | None = None) -> ReadRange | None:
    """Return the range that a run would read if it began now; None if the source is not topics.

    A stream continues where its checkpoint ends. `checkpoint` is the directory of one query, and
    ignored for a batch; None, or a checkpoint without a committed micro-batch, means that the
    stream begins at its starting offsets. Raises ConfigurationError for invalid options,
    RequestError if a broker rejects the filter, and the client's other errors.
    """
    source = pipeline.source
    if source is None or source.kind != ROCKETMQ:
        return None
    options = parse_options(source.options, STREAM if pipeline.is_streaming else READ)
    with open_admin(options) as admin:
        topics = tuple(parse_topics(options).resolve(admin))
        wanted = build_subscription(
            parse_topics(options).label,
            options["filter.tags"],
            options["filter.sql"],
            PushedFilters(),
        )
        selector: str | None = "nothing matches"
        if wanted is not None and wanted[0].kind == SQL92:
            text = wanted[0].expression
            check_selector(admin, topics, options["group"] or "sluice-pipeline", text)
            selector = f"SQL92 {text}"
        elif wanted is not None:
            tags = wanted[0].expression
            selector = None if tags == "*" else f"tags {tags}"

        bounds = fetch_bounds(admin, topics)
        if not pipeline.is_streaming:
            starts = resolve_starting_offsets(admin, options, bounds, "earliest")
            ends = resolve_ending_offsets(admin, options, bounds)
            return ReadRange(topics, starts, ends, selector)
        ends = {queue: highest for queue, (_, highest) in bounds.items()}
        committed = None if checkpoint is None else read_committed_offsets(checkpoint)
        if committed is None:
            starts = resolve_starting_offsets(admin, options, bounds, "latest")
            return ReadRange(topics, starts, ends, selector)
        # A queue that the checkpoint does not contain is new, and read from its beginning.
        starts = {queue: committed.get(queue, lowest) for queue, (lowest, _) in bounds.items()}
        return ReadRange(topics, starts, ends, selector)


def read_committed_offsets(checkpoint: str) -> dict[MessageQueue, int] | None:
    """Return the offsets where a query with this checkpoint directory continues.

    Return None if the checkpoint has no committed micro-batch, or is not on this machine.
    """
    directory = checkpoint.removeprefix("file://")
    done = [name for name in SYSTEM_FILES.names(f"{directory}/commits") if name.isdigit()]
    text = read_text(SYSTEM_FILES, f"{directory}/offsets/{max(done, key=int)}") if done else None
    if text is None:
        return None
    # Line 1 is a version, line 2 metadata, and line 3 the offsets of the only source.
    found: Any = json.loads(text.splitlines()[2])
    return parse_checkpoint(found, None) if isinstance(found, dict) and "queues" in found else None


def find_filter_mistakes(pipeline: Pipeline) -> list[str]:
    """Return texts about what the source's `filter.sql` loses by mistake; see `collect_findings`.

    The newest messages are examined for that. The list is empty if the source has no `filter.sql`.
    Raises the client's errors, and StoreError if a store cannot be read.
    """
    source = pipeline.source
    sql = None if source is None else source.options.get("filter.sql")
    if source is None or sql is None:
        return []
    if source.kind == ROCKETMQ:
        options = parse_options(source.options, STREAM if pipeline.is_streaming else READ)
        with open_admin(options) as admin:
            topics = parse_topics(options).resolve(admin)
            return collect_findings(sql, lambda text: try_at_brokers(admin, topics, text))
    from sluicemq.spark.sources.reader import open_snapshot  # noqa: PLC0415 - a slow import

    with open_snapshot(parse_options(source.options, READ, STORE_OPTIONS_BY_NAME)) as snapshot:
        newest = list(snapshot.read_newest_properties(SAMPLE_MESSAGES_MAX))
    return collect_findings(sql, lambda text: try_on_properties(newest, text))


# ---- source and transform


def load_checked_frame(
    pipeline: Pipeline, spark: "SparkSession"
) -> "tuple[DataFrame, list[Writer]]":
    """Return the transformed DataFrame and a writer for each sink, which accepts the DataFrame.

    Nothing is written. Raises PlaceError if the source cannot be loaded, the transform is invalid,
    or a sink does not accept the columns.
    """
    frame = apply_transform(pipeline, spark, load_source(pipeline, spark))
    writers = [_WRITERS[sink.kind](pipeline, sink) for sink in pipeline.sinks]
    for writer in writers:
        writer.check(frame)
    return frame, writers


def load_source(
    pipeline: Pipeline, spark: "SparkSession", schema: Any = None, **more: str
) -> "DataFrame":
    """Return the source as a DataFrame, which is streaming if the pipeline is.

    `more` are options that replace those of the file. `schema` is the schema of the source if the
    caller knows it; the schema of Parquet is always that of the file or of the data. Raises
    PlaceError if Spark or the source refuses the options.
    """
    source = pipeline.source
    assert source is not None
    reader = spark.readStream if pipeline.is_streaming else spark.read
    options = dict(source.options) | more
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
    """Return the result of the transform over `frame`, or `frame` itself if there is none.

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
            whole = spark.sql(pipeline.transform)
        finally:
            spark.catalog.dropTempView(VIEW)
        return _push_down_predicates(pipeline, spark, frame.schema) or whole
    except Exception as error:
        raise to_place_error(error, pipeline.transform_line, "transform") from error


def _contains_command(spark: "SparkSession", plan: Any) -> bool:
    """Return whether a parsed plan, or any part of it, is a statement with an effect."""
    from py4j.java_gateway import (  # type: ignore[import-untyped]  # noqa: PLC0415 - pyspark's
        is_instance_of,
    )

    gateway = get_gateway(spark)
    kinds = (f"{_LOGICAL_PLANS}.Command", f"{_LOGICAL_PLANS}.ParsedStatement")
    if any(is_instance_of(gateway, plan, kind) for kind in kinds):
        return True
    return any(_contains_command(spark, child) for child in scala_elements(plan.children()))


def _push_down_predicates(
    pipeline: Pipeline, spark: "SparkSession", schema: Any
) -> "DataFrame | None":
    """Return the result of the transform, over sources that are loaded with predicates.

    Each reference to the view `source` gets a source of its own, with the predicates that hold for
    this reference. A store is loaded only once, with the predicates that all references share,
    because all of them must see the same snapshot. Return None if the source cannot take predicates
    (a stream, Parquet), or if the transform has none.
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
        text, query = replace_unknown_tables(spark, transform, create_view)
        found = extract_predicates(query, list(placeholders.values()))
        if not any(found):
            return None
        for view, predicates in zip(placeholders, found, strict=True):
            more = {"predicates": predicates} if predicates else {}
            loaded = load_source(pipeline, spark, schema, **more)
            loaded.createOrReplaceTempView(quote_name(view))
        return spark.sql(text)
    finally:
        for view in placeholders:
            spark.catalog.dropTempView(view)


def to_place_error(error: Exception, line: int, key: str) -> PlaceError:
    """Return an error of Spark or SluiceMQ as an error about a line and a key of the file.

    Its text is one sentence, without plan and stack trace. `line` is where the value of `key`
    begins; if Spark names a line of the transform's SQL, the result has the line of the file.
    """
    if isinstance(error, PlaceError):
        return error
    if isinstance(error, SluiceError):
        return PlaceError(FileProblem(line, key, str(error)))
    text = summarize_spark_error(error)
    found = _LINE_AND_POSITION.search(str(error)) if key == "transform" else None
    if found is not None:
        line += int(found[1] or found[3]) - 1
        text = f"at position {int(found[2] or found[4]) + 1} of the line: {text}"
    return PlaceError(FileProblem(line, key, text))


def summarize_spark_error(error: BaseException) -> str:
    """Return the essential part of an exception's text, at most 600 characters in one line.

    If the text contains an error of SluiceMQ from a Python worker, it is that error's text. If the
    text is empty, it is the name of the exception's class.
    """
    text = str(error)
    own_error = re.search(r"sluicemq\.errors\.\w+: (.+)", text)
    if own_error is not None:
        return own_error[1].strip()
    plain = re.search(r"(?:PySparkRuntimeError|\[PYTHON_DATA_SOURCE_ERROR\])[^\n]*\n?(.*)", text)
    cut = _SPARK_DETAILS.sub("", text if plain is None else plain[0]).strip()
    return " ".join(cut.split())[:_ERROR_CHARACTERS_MAX] or type(error).__name__


# ---- sinks


class Writer(ABC):
    """Writes a DataFrame to one sink. `target` names it in texts, such as "topic 'report'"."""

    target: str

    def __init__(self, pipeline: Pipeline, sink: Sink) -> None:
        self.pipeline = pipeline
        self.sink = sink

    @abstractmethod
    def check(self, frame: "DataFrame") -> None:
        """Raise PlaceError if the sink cannot accept the DataFrame. Nothing is written."""

    @abstractmethod
    def describe(self, frame: "DataFrame") -> list[str]:
        """Return lines that say what a run would do at the sink. Nothing is written."""

    def prepare(self, frame: "DataFrame") -> None:  # noqa: B027 - most sinks need nothing
        """Create what must exist before the first row is written."""

    def require_columns(self, frame: "DataFrame", field_name: str, names: Sequence[str]) -> None:
        """Raise PlaceError if the DataFrame lacks one of the columns that `field_name` lists."""
        for name in names:
            if name not in frame.columns:
                fix = suggest(name, frame.columns)
                raise self.sink.error(f"there is no column {name!r}.", fix, field_name=field_name)

    @abstractmethod
    def write_batch(self, frame: "DataFrame") -> None:
        """Write a DataFrame that is not streaming. Return when all rows are written."""

    @abstractmethod
    def build_stream_writer(self, frame: "DataFrame") -> "DataStreamWriter":
        """Return a writer for a streaming DataFrame, without query name, trigger and checkpoint."""


class TopicWriter(Writer):
    """Sends rows as messages, with the sink `rocketmq`."""

    def __init__(self, pipeline: Pipeline, sink: Sink) -> None:
        super().__init__(pipeline, sink)
        self.target = f"topic {sink.options.get('topic')!r}"

    def select_message_columns(self, frame: "DataFrame") -> "DataFrame":
        """Return the parts of messages as columns. Raises PlaceError for an invalid expression.

        If the file has no expressions, `frame` is returned unchanged. Otherwise the columns are the
        expressions, and the body is the column `value` or `body` unless it has an expression.
        """
        given = [name for name in MESSAGE if self.sink.fields.get(name)]
        if not given:
            return frame
        columns = []
        for name in given:
            expression = self.sink.fields[name]
            try:
                part = frame.selectExpr(f"({expression}) as `{name}`")
                columns.append(f"({expression}) as `{part.columns[0]}`")
            except Exception as error:
                raise self.sink.error(summarize_spark_error(error), field_name=name) from error
        if "value" not in given:
            body = next((name for name in ("value", "body") if name in frame.columns), None)
            if body is None:
                raise self.sink.error(
                    "there is no column 'value' or 'body'.", "Add value: to_json(struct(*))."
                )
            columns.insert(0, f"`{body}`")
        return frame.selectExpr(*columns)

    def check(self, frame: "DataFrame") -> None:
        """Raise PlaceError if an expression is invalid, or the sink cannot write the columns."""
        schema = self.select_message_columns(frame).schema
        try:
            resolve_roles(schema, parse_options(self.sink.options, WRITE))
        except ConfigurationError as error:
            raise self.sink.error(str(error)) from None

    def describe(self, frame: "DataFrame") -> list[str]:
        """Return lines about the topic, the delivery guarantee, and the columns of the messages."""
        options = parse_options(self.sink.options, WRITE)
        columns = ", ".join(
            f"{one.name} {one.dataType.simpleString()}"
            for one in self.select_message_columns(frame).schema.fields
        )
        with open_admin(options) as admin:
            state = "it does not exist; the first message creates it, if the brokers allow that"
            if admin.find_route(options["topic"]) is not None:
                state = f"it has {len(admin.queues(options['topic']))} queues"
        is_exact = options["delivery"] == EXACTLY_ONCE
        how = "exactly once (at least once on a Java broker)" if is_exact else "at least once"
        return [f"{state}; {how}", f"message: {columns}"]

    def write_batch(self, frame: "DataFrame") -> None:
        messages = self.select_message_columns(frame)
        writer = messages.write.format("rocketmq").options(**self.sink.options)
        writer.mode("append").save()

    def build_stream_writer(self, frame: "DataFrame") -> "DataStreamWriter":
        messages = self.select_message_columns(frame)
        return messages.writeStream.format("rocketmq").options(**self.sink.options)


class ParquetWriter(Writer):
    """Writes rows to Parquet files, with Spark's own sink."""

    def __init__(self, pipeline: Pipeline, sink: Sink) -> None:
        super().__init__(pipeline, sink)
        self.target = f"parquet {sink.fields['path']}"

    def check(self, frame: "DataFrame") -> None:
        """Raise PlaceError if a partition column is missing or the directory is not new.

        The directory only has to be new for a batch with `write: fail`. One with a URL is not
        examined.
        """
        path: str = self.sink.fields["path"]
        self.require_columns(frame, "partition_by", self.sink.fields["partition_by"])
        must_be_new = not self.pipeline.is_streaming and self.sink.fields["write"] == "fail"
        if must_be_new and "://" not in path and SYSTEM_FILES.names(path):
            raise self.sink.error(
                f"the directory {path!r} has files already.",
                "Write write: append or write: overwrite.",
                field_name="path",
            )

    def describe(self, frame: "DataFrame") -> list[str]:
        columns = self.sink.fields["partition_by"]
        partitioning = f"partitioned by {', '.join(columns)}" if columns else "not partitioned"
        if self.pipeline.is_streaming:
            return [partitioning, "files are added"]
        effects = {
            "fail": "the directory must be new",
            "append": "files are added",
            "overwrite": "existing files are replaced",
        }
        return [partitioning, effects[self.sink.fields["write"]]]

    def write_batch(self, frame: "DataFrame") -> None:
        fields = self.sink.fields
        mode = {"fail": "error"}.get(fields["write"], fields["write"])
        writer = frame.write.mode(mode).options(**fields["options"])
        writer.partitionBy(*fields["partition_by"]).parquet(fields["path"])

    def build_stream_writer(self, frame: "DataFrame") -> "DataStreamWriter":
        fields = self.sink.fields
        writer = frame.writeStream.format("parquet").options(**fields["options"])
        writer = writer.option("path", fields["path"])
        return writer.partitionBy(*fields["partition_by"]) if fields["partition_by"] else writer


class TableWriter(Writer):
    """Upserts rows into a table of a database."""

    def __init__(self, pipeline: Pipeline, sink: Sink) -> None:
        super().__init__(pipeline, sink)
        shown_url = databases.url_without_password(sink.fields["url"])
        self.target = f"table {sink.fields['table']} at {shown_url}"
        self.url = databases.absolute_url(sink.fields["url"])

    def build_target(self, frame: "DataFrame") -> databases.Target:
        """Return the table of the sink with the columns of the DataFrame."""
        fields = self.sink.fields
        return databases.Target(
            self.url,
            fields["table"],
            tuple(fields["key"]),
            tuple(frame.dtypes),
            fields["version"],
            fields["batch_rows"],
        )

    def check(self, frame: "DataFrame") -> None:
        """Raise PlaceError if columns are missing or the table in the database does not fit.

        The database is asked, but nothing is created. A missing table is an error only if `create`
        is False.
        """
        fields = self.sink.fields
        target = self.build_target(frame)
        self.require_columns(frame, "key", fields["key"])
        self.require_columns(frame, "version", [fields["version"]] if fields["version"] else [])
        field_name = ""
        try:
            databases.build_table(target, "")
            with databases.temporary_engine(self.url) as engine:
                field_name = "table"
                is_missing = databases.is_table_missing(engine, target)
                if not is_missing:
                    databases.check_table(engine, target)
        except ConfigurationError as error:
            raise self.sink.error(str(error), field_name=field_name) from None
        except Exception as error:  # noqa: BLE001 - each driver raises its own errors
            message = f"the database cannot be reached: {summarize_spark_error(error)}"
            raise self.sink.error(message, field_name="url") from None
        if is_missing and not fields["create"]:
            raise self.sink.error(
                f"the table {target.table!r} does not exist.",
                "Create it, or write create: true.",
                field_name=field_name,
            )

    def describe(self, frame: "DataFrame") -> list[str]:
        """Return lines that say whether the table exists, and by which rule rows are replaced."""
        target = self.build_target(frame)
        with databases.temporary_engine(target.url) as engine:
            is_missing = databases.is_table_missing(engine, target)
        effect = f"rows are replaced by {', '.join(target.key)}"
        if target.version is not None:
            effect += f" if {target.version} is not smaller"
        return ["it would be created" if is_missing else "it exists", effect]

    def prepare(self, frame: "DataFrame") -> None:
        """Register the sink with Spark, and create the table if it is missing."""
        databases.register_sink(frame.sparkSession)
        target = self.build_target(frame)
        with databases.temporary_engine(target.url) as engine:
            databases.create_table(engine, target)

    def write_batch(self, frame: "DataFrame") -> None:
        target = databases.encode_target(self.build_target(frame))
        frame.write.format(databases.FORMAT).option("target", target).mode("append").save()

    def build_stream_writer(self, frame: "DataFrame") -> "DataStreamWriter":
        def write_micro_batch(batch: "DataFrame", _epoch: int) -> None:
            self.write_batch(batch)

        writer = frame.writeStream.foreachBatch(write_micro_batch)
        return writer.outputMode(self.sink.fields["output"])


_WRITERS: Final[Mapping[str, Callable[[Pipeline, Sink], Writer]]] = {
    TOPIC: TopicWriter,
    PARQUET: ParquetWriter,
    TABLE: TableWriter,
}


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
    mask = pipeline.secrets.mask

    def masked(value: Any) -> Any:
        """Return the value with secrets masked in all strings within it."""
        if isinstance(value, str):
            return mask(value)
        if isinstance(value, list):
            return [masked(one) for one in value]
        if isinstance(value, dict):
            return {name: masked(one) for name, one in value.items()}
        return value

    try:
        if pipeline.use is None:
            found = _plan_source_and_sinks(pipeline, spark)
        else:
            found = _plan_ready_pipeline(pipeline, spark, pipeline.use)
    except PlaceError as error:
        raise pipeline.to_configuration_error(error) from error.__cause__
    return Plan(masked(found.sections), masked(found.figures))


def _plan_ready_pipeline(pipeline: Pipeline, spark: "SparkSession", use: str) -> Plan:
    """Return the plan of a pipeline that uses the ready pipeline `use`."""
    task = Task(spark, pipeline.use_options, pipeline.cluster, lambda text: None)
    lines = find_ready_pipeline(use).plan(task)
    heading = f"pipeline {pipeline.name}: the ready pipeline {use!r}"
    return Plan({heading: lines}, {"pipeline": pipeline.name, "use": use, "plan": lines})


def _plan_source_and_sinks(pipeline: Pipeline, spark: "SparkSession") -> Plan:
    """Return the plan of a pipeline that has a source and sinks.

    Its sections are the source, filters, columns, Spark's plan and each sink. A batch is pinned to
    the range of offsets that the plan shows. Raises PlaceError if a part cannot work.
    """
    source = pipeline.source
    assert source is not None
    ranges = _resolve_ranges(pipeline)
    read_range = next(iter(ranges.values()), None)
    is_pinned = read_range is not None and not pipeline.is_streaming
    pinned = read_range.pin(pipeline) if read_range is not None and is_pinned else pipeline
    frame, writers = load_checked_frame(pinned, spark)

    found = Plan({f"pipeline {pipeline.name}: {_describe_mode(pipeline)}": []})
    for name, topic_range in ranges.items():
        found.sections[f"source{name}"] = _describe_range(topic_range, source)
    if not ranges:
        found.sections["source"] = [f"{source.kind} {source.options.get('path')}"]
    found.sections["filter"] = _describe_filters(pipeline, frame, read_range)
    found.sections["columns"] = [f"{name} {kind}" for name, kind in frame.dtypes]
    if frame.isStreaming:  # Spark makes a physical plan for each micro-batch only
        text = get_query_execution(frame).analyzed().toString()
    else:
        text = explain_plan(frame, "simple")
    found.sections["plan of Spark"] = [line for line in str(text).splitlines() if line.strip()]

    sinks = []
    for writer in writers:
        lines = writer.describe(frame)
        if pipeline.is_streaming:
            lines.append(f"checkpoint {pipeline.checkpoint_of(writer.sink)}")
        found.sections[f"sink {writer.sink.name}: {writer.target}"] = lines
        sinks.append({"name": writer.sink.name, "target": writer.target, "what": lines})
    queues = [] if read_range is None else read_range.queue_rows()
    found.figures = {
        "pipeline": pipeline.name,
        "mode": pipeline.mode,
        "messages": None if read_range is None else read_range.message_count,
        "queues": [
            {"topic": topic, "queue": queue, "start": start, "end": end}
            for topic, queue, start, end in queues
        ],
        "filter": found.sections["filter"],
        "columns": dict(frame.dtypes),
        "plan": found.sections["plan of Spark"],
        "sinks": sinks,
    }
    return found


def _resolve_ranges(pipeline: Pipeline) -> dict[str, ReadRange]:
    """Return the range that each query of the pipeline reads, by a part of its heading.

    The result is empty if the source is not topics. The keys complete the heading "source": "" for
    a batch or a single sink, else " for SINK". The queries of a stream may have different ranges,
    because each has a checkpoint of its own.
    """
    checkpoints: dict[str, str | None] = {"": None}
    if pipeline.is_streaming:
        suffix = " for {}" if len(pipeline.sinks) > 1 else ""
        checkpoints = {
            suffix.format(sink.name): pipeline.checkpoint_of(sink) for sink in pipeline.sinks
        }
    ranges = {}
    for name, checkpoint in checkpoints.items():
        found = resolve_read_range(pipeline, checkpoint=checkpoint)
        if found is not None:
            ranges[name] = found
    return ranges


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
    """Return lines that say what the broker and what Spark filters, and the mistakes in filter.sql.

    `frame` is the transformed DataFrame. `read_range` is None if the source is not topics.
    """
    assert pipeline.source is not None
    own_filter = pipeline.source.options.get("filter.sql")
    selector = read_range.selector if read_range is not None else own_filter
    lines = [f"at the broker, by the file: {selector or '-'}"]
    if not pipeline.is_streaming:
        pushed = pushdown(frame)
        at_broker = ", ".join(pushed.broker) or "-"
        lines += [
            f"at the broker, pushed down from the transform: {at_broker}",
            f"by Spark: {', '.join(pushed.spark) or '-'}",
        ]
    return lines + [f"warning: {one}" for one in find_filter_mistakes(pipeline)]
