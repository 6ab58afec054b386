"""From the file to a DataFrame, and from there into sinks; and what a run would do.

**Source.** A batch is pinned to one range of offsets before it begins (`Reach`). All its sinks then
write the same messages, the dry run's numbers are those of the run, and there is something to count
progress against.

**Transform.** One query over the view `source`. A batch loads topics anew for each place of the
query that names the view, with the predicates that hold there (`references`): the broker decides
them. Spark runs a command (`DROP TABLE`, `INSERT`) at the moment it is given the text, so the text
is parsed first and anything but a query refused: a dry run must change nothing. Errors come back
with the line of the file they are in.

**Sinks.**

| kind | batch | stream |
|---|---|---|
| topic | `df.write.format("rocketmq")` | `writeStream`: exactly once if asked for |
| parquet | `df.write.parquet` | Spark's file sink: exactly once |
| table | tasks upsert their partitions | the same in `foreachBatch`: repeats change nothing |

`check` and `told` only look; `prepare` is the first step with an effect (it makes a missing table).

**Dry run** (`plan`), with no effect anywhere. Looked at: the queues and their ends at the brokers,
the checkpoint of a stream, Spark's plan of the transform, the sinks' topics, directories, tables.
Nothing is read of the messages themselves, unless a property's type is `auto` or there is a
`filter.sql` (which look at the newest ones).
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
)
from sluicemq.pipelines.ready import Task, ready
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
from sluicemq.spark.sources.offsets import (
    Offsets,
    check_selector,
    fetch_bounds,
    offsets_to_table,
    open_admin,
    parse_checkpoint,
    parse_topics,
    queue_label,
    resolve_ending_offsets,
    resolve_starting_offsets,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import DataStreamWriter

FORMATS: Final = {ROCKETMQ: "rocketmq", STORE: "rocketmq_store", PARQUET: "parquet"}
_NAMED_BY: Final = (
    "topic", "topics", "topicsPattern", "startingOffsets", "endingOffsets", "startingTimestamp",
    "endingTimestamp",
)  # fmt: skip
"""Options that a range takes the place of."""
_PLANS: Final = "org.apache.spark.sql.catalyst.plans.logical"
_PLACE: Final = re.compile(r"\(line (\d+), pos (\d+)\)|;? ?line (\d+),? pos (\d+)")
_TAIL: Final = re.compile(r"(;? ?\(?line \d+,? pos \d+\)?|SQLSTATE: \w+|== SQL.*|JVM stacktrace:.*"
                          r"|;\n'.*|;\n\w.*)", re.DOTALL)  # fmt: skip


# ---- how far a read of topics goes


@dataclass(frozen=True, slots=True)
class Reach:
    """Offsets start <= offset < end by queue; `selector`: what the broker filters by, in words."""

    topics: tuple[str, ...]
    start: Offsets
    end: Offsets
    selector: str | None

    @property
    def messages(self) -> int:
        return sum(max(0, self.end[queue] - first) for queue, first in self.start.items())

    def pinned(self, pipeline: Pipeline) -> Pipeline:
        """The pipeline with exactly this range in place of what named it."""
        source, several = pipeline.source, len(self.topics) > 1
        assert source is not None
        options = {name: text for name, text in source.options.items() if name not in _NAMED_BY}
        options["topics" if several else "topic"] = ",".join(self.topics)
        for name, offsets in (("startingOffsets", self.start), ("endingOffsets", self.end)):
            options[name] = json.dumps(offsets_to_table(offsets, by_topic=several))
        return replace(pipeline, source=replace(source, options=options))

    def rows(self) -> list[tuple[str, str, int, int]]:
        """Topic, queue, first offset and end of each queue."""
        return [(queue.topic, queue_label(queue), self.start[queue], self.end[queue])
                for queue in sorted(self.start)]  # fmt: skip


def reach_of(pipeline: Pipeline, *, checkpoint: str | None = None) -> Reach | None:
    """What a run that begins now would read; None for sources that are no topics.

    A stream begins where its checkpoint ends. Raises the client's errors and ConfigurationError.
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
            start = resolve_starting_offsets(admin, options, bounds, "earliest")
            return Reach(topics, start, resolve_ending_offsets(admin, options, bounds), selector)
        end = {queue: highest for queue, (_, highest) in bounds.items()}
        known = None if checkpoint is None else committed_offsets(checkpoint)
        if known is None:
            return Reach(
                topics, resolve_starting_offsets(admin, options, bounds, "latest"), end, selector
            )
        start = {queue: known.get(queue, lowest) for queue, (lowest, _) in bounds.items()}
        return Reach(topics, start, end, selector)


def committed_offsets(checkpoint: str) -> dict[MessageQueue, int] | None:
    """Where a query with this checkpoint directory goes on; None when it would begin anew, or the
    directory is none of this machine."""
    directory = checkpoint.removeprefix("file://")
    done = [name for name in SYSTEM_FILES.names(f"{directory}/commits") if name.isdigit()]
    text = read_text(SYSTEM_FILES, f"{directory}/offsets/{max(done, key=int)}") if done else None
    if text is None:
        return None
    found: Any = json.loads(text.splitlines()[2])
    return parse_checkpoint(found, None) if isinstance(found, dict) and "queues" in found else None


def lost_by_filter(pipeline: Pipeline) -> list[str]:
    """What the source's `filter.sql` loses by mistake (`collect_findings`). Raises as `reach_of`,
    and StoreError."""
    source = pipeline.source
    sql = None if source is None else source.options.get("filter.sql")
    if source is None or sql is None:
        return []
    if source.kind == ROCKETMQ:
        options = parse_options(source.options, STREAM if pipeline.is_streaming else READ)
        with open_admin(options) as admin:
            topics = parse_topics(options).resolve(admin)
            return collect_findings(sql, lambda text: try_at_brokers(admin, topics, text))
    from sluicemq.spark.sources.reader import open_snapshot  # noqa: PLC0415 - heavy

    with open_snapshot(parse_options(source.options, READ, STORE_OPTIONS_BY_NAME)) as seen:
        newest = list(seen.read_newest_properties(SAMPLE_MESSAGES_MAX))
    return collect_findings(sql, lambda text: try_on_properties(newest, text))


# ---- source and transform


def checked_frame(pipeline: Pipeline, spark: "SparkSession") -> "tuple[DataFrame, list[Writer]]":
    """The transformed frame and its writers, everything checked. Raises PlaceError."""
    frame = transformed(pipeline, spark, source_frame(pipeline, spark))
    writers = [_WRITERS[sink.kind](pipeline, sink) for sink in pipeline.sinks]
    for writer in writers:
        writer.check(frame)
    return frame, writers


def source_frame(
    pipeline: Pipeline, spark: "SparkSession", schema: Any = None, **more: str
) -> "DataFrame":
    """The source as a DataFrame, a stream's when the mode says so. `more` options replace those of
    the file; `schema` is the source's when it is known. Raises PlaceError."""
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
        raise spark_error(error, source.line, "source") from error


def transformed(pipeline: Pipeline, spark: "SparkSession", frame: "DataFrame") -> "DataFrame":
    """The transform's result; the frame itself without one. Raises PlaceError."""
    if pipeline.transform is None:
        return frame
    try:
        parser = get_session_state(spark).sqlParser()
        if _acts(spark, parser.parsePlan(pipeline.transform)):
            raise ConfigurationError(  # noqa: TRY301 - told like Spark's
                "it is a command, not a query.", fix="Write select … from source."
            )
        frame.createOrReplaceTempView(VIEW)
        try:
            whole = spark.sql(pipeline.transform)
        finally:
            spark.catalog.dropTempView(VIEW)
        return _pushed(pipeline, spark, frame.schema) or whole
    except Exception as error:
        raise spark_error(error, pipeline.transform_line, "transform") from error


def _acts(spark: "SparkSession", plan: Any) -> bool:
    """Whether a statement does something."""
    from py4j.java_gateway import (  # type: ignore[import-untyped]  # noqa: PLC0415 - Spark's
        is_instance_of,
    )

    gateway = get_gateway(spark)
    kinds = (f"{_PLANS}.Command", f"{_PLANS}.ParsedStatement")
    if any(is_instance_of(gateway, plan, kind) for kind in kinds):
        return True
    return any(_acts(spark, child) for child in scala_elements(plan.children()))


def _pushed(pipeline: Pipeline, spark: "SparkSession", schema: Any) -> "DataFrame | None":
    """The transform over loads with predicates; None when there are none to be had. A store is
    read at one moment, so by one load, with the predicates that hold in all places."""
    source, transform = pipeline.source, pipeline.transform
    assert source is not None
    assert transform is not None
    if pipeline.is_streaming or source.kind == PARQUET:
        return None
    stand_ins: dict[str, PlaceholderTable] = {}

    def view_of(_: str) -> str:
        view = VIEW if source.kind == STORE else f"{VIEW} {len(stand_ins) + 1}"
        stand_ins[view] = PlaceholderTable.create(spark, schema)
        stand_ins[view].frame.createOrReplaceTempView(quote_name(view))
        return view

    try:
        text, query = replace_unknown_tables(spark, transform, view_of)
        found = extract_predicates(query, list(stand_ins.values()))
        if not any(found):
            return None
        for view, predicates in zip(stand_ins, found, strict=True):
            more = {"predicates": predicates} if predicates else {}
            loaded = source_frame(pipeline, spark, schema, **more)
            loaded.createOrReplaceTempView(quote_name(view))
        return spark.sql(text)
    finally:
        for view in stand_ins:
            spark.catalog.dropTempView(view)


def spark_error(error: Exception, line: int, key: str) -> PlaceError:
    """Spark's complaint (or ours) at a place of the file: its sentence, without plan and stack.

    `line` is where the SQL begins, so that a place that Spark names becomes a line of the file.
    """
    if isinstance(error, PlaceError):
        return error
    if isinstance(error, SluiceError):
        return PlaceError(FileProblem(line, key, str(error)))
    text = sentence_of(error)
    found = _PLACE.search(str(error)) if key == "transform" else None
    if found is not None:
        line += int(found[1] or found[3]) - 1
        text = f"at position {int(found[2] or found[4]) + 1} of the line: {text}"
    return PlaceError(FileProblem(line, key, text))


def sentence_of(error: BaseException) -> str:
    """The first thing that an exception of Spark says: our own sentence when it carries one."""
    text = str(error)
    ours = re.search(r"sluicemq\.errors\.\w+: (.+)", text)
    if ours is not None:
        return ours[1].strip()
    plain = re.search(r"(?:PySparkRuntimeError|\[PYTHON_DATA_SOURCE_ERROR\])[^\n]*\n?(.*)", text)
    cut = _TAIL.sub("", text if plain is None else plain[0]).strip()
    return " ".join(cut.split())[:600] or type(error).__name__


# ---- sinks


class Writer(ABC):
    """One sink of a pipeline. `target` is what it writes to, in words: `topic 'report'`."""

    target: str

    def __init__(self, pipeline: Pipeline, sink: Sink) -> None:
        self.pipeline = pipeline
        self.sink = sink

    @abstractmethod
    def check(self, frame: "DataFrame") -> None:
        """Raises PlaceError when the frame cannot go there. Reads at most."""

    @abstractmethod
    def told(self, frame: "DataFrame") -> list[str]:
        """What a run would do there, a line each. Reads at most."""

    def prepare(self, frame: "DataFrame") -> None:  # noqa: B027 - most need nothing
        """What has to be there before the first row."""

    def expect_columns(self, frame: "DataFrame", at: str, names: Sequence[str]) -> None:
        """Raises PlaceError for a column that the frame does not have."""
        for name in names:
            if name not in frame.columns:
                fix = suggest(name, frame.columns)
                raise self.sink.error(f"there is no column {name!r}.", fix, at=at)

    @abstractmethod
    def write(self, frame: "DataFrame") -> None:
        """A batch: returns when all is written."""

    @abstractmethod
    def stream(self, frame: "DataFrame") -> "DataStreamWriter":
        """A stream's writer, which lacks name, trigger and checkpoint."""


class TopicWriter(Writer):
    """Messages, by the sink `rocketmq`."""

    def __init__(self, pipeline: Pipeline, sink: Sink) -> None:
        super().__init__(pipeline, sink)
        self.target = f"topic {sink.options.get('topic')!r}"

    def shaped(self, frame: "DataFrame") -> "DataFrame":
        """The columns of a message: the expressions of the file, or the frame as it is.

        A part without an expression is the column of its name, if there is one.
        """
        given = [name for name in MESSAGE if self.sink.fields.get(name)]
        if not given:
            return frame
        columns = []
        for name in given:
            try:
                part = frame.selectExpr(f"({self.sink.fields[name]}) as `{name}`")
                columns.append(f"({self.sink.fields[name]}) as `{part.columns[0]}`")
            except Exception as error:
                raise self.sink.error(sentence_of(error), at=name) from error
        if "value" not in given:
            body = next((name for name in ("value", "body") if name in frame.columns), None)
            if body is None:
                raise self.sink.error("there is no column 'value' or 'body'.",
                                      "Add value: to_json(struct(*)).")  # fmt: skip
            columns.insert(0, f"`{body}`")
        return frame.selectExpr(*columns)

    def check(self, frame: "DataFrame") -> None:
        try:
            resolve_roles(self.shaped(frame).schema, parse_options(self.sink.options, WRITE))
        except ConfigurationError as error:
            raise self.sink.error(str(error)) from None

    def told(self, frame: "DataFrame") -> list[str]:
        options = parse_options(self.sink.options, WRITE)
        shaped = ", ".join(f"{one.name} {one.dataType.simpleString()}"
                           for one in self.shaped(frame).schema.fields)  # fmt: skip
        with open_admin(options) as admin:
            there = "it is not there yet; the first message makes it, where brokers allow that"
            if admin.find_route(options["topic"]) is not None:
                there = f"it has {len(admin.queues(options['topic']))} queues"
        exact = options["delivery"] == EXACTLY_ONCE
        how = "exactly once (at least once on a Java broker)" if exact else "at least once"
        return [f"{there}; {how}", f"message: {shaped}"]

    def write(self, frame: "DataFrame") -> None:
        shaped = self.shaped(frame).write.format("rocketmq").options(**self.sink.options)
        shaped.mode("append").save()

    def stream(self, frame: "DataFrame") -> "DataStreamWriter":
        return self.shaped(frame).writeStream.format("rocketmq").options(**self.sink.options)


class ParquetWriter(Writer):
    """Files, by Spark's own sink."""

    def __init__(self, pipeline: Pipeline, sink: Sink) -> None:
        super().__init__(pipeline, sink)
        self.target = f"parquet {sink.fields['path']}"

    def check(self, frame: "DataFrame") -> None:
        path: str = self.sink.fields["path"]
        self.expect_columns(frame, "partition_by", self.sink.fields["partition_by"])
        must_be_new = not self.pipeline.is_streaming and self.sink.fields["write"] == "fail"
        if must_be_new and "://" not in path and SYSTEM_FILES.names(path):
            raise self.sink.error(
                f"there are files in {path!r} already.",
                "Write write: append or write: overwrite.",
                at="path",
            )

    def told(self, frame: "DataFrame") -> list[str]:
        by = self.sink.fields["partition_by"]
        how = "files are added" if self.pipeline.is_streaming else {
            "fail": "the directory must be new", "append": "files are added",
            "overwrite": "what is there is replaced",
        }[self.sink.fields["write"]]  # fmt: skip
        return [f"partitioned by {', '.join(by)}" if by else "not partitioned", how]

    def write(self, frame: "DataFrame") -> None:
        fields = self.sink.fields
        mode = {"fail": "error"}.get(fields["write"], fields["write"])
        writer = frame.write.mode(mode).options(**fields["options"])
        writer.partitionBy(*fields["partition_by"]).parquet(fields["path"])

    def stream(self, frame: "DataFrame") -> "DataStreamWriter":
        fields = self.sink.fields
        writer = frame.writeStream.format("parquet").options(**fields["options"])
        writer = writer.option("path", fields["path"])
        return writer.partitionBy(*fields["partition_by"]) if fields["partition_by"] else writer


class TableWriter(Writer):
    """Rows into a database, by key."""

    def __init__(self, pipeline: Pipeline, sink: Sink) -> None:
        super().__init__(pipeline, sink)
        self.target = f"table {sink.fields['table']} at {databases.shown_url(sink.fields['url'])}"
        self.url = databases.whole_url(sink.fields["url"])

    def target_of(self, frame: "DataFrame") -> databases.Target:
        fields = self.sink.fields
        return databases.Target(
            self.url, fields["table"], tuple(fields["key"]), tuple(frame.dtypes),
            fields["version"], fields["batch_rows"],
        )  # fmt: skip

    def check(self, frame: "DataFrame") -> None:
        fields, target = self.sink.fields, self.target_of(frame)
        self.expect_columns(frame, "key", fields["key"])
        self.expect_columns(frame, "version", [fields["version"]] if fields["version"] else [])
        at = ""
        try:
            databases.table_of(target, "")
            with databases.opened(self.url) as engine:
                at = "table"
                is_missing = databases.missing_table(engine, target)
                if not is_missing:
                    databases.check_table(engine, target)
        except ConfigurationError as error:
            raise self.sink.error(str(error), at=at) from None
        except Exception as error:  # noqa: BLE001 - whatever the driver raises
            said = f"the database does not answer: {sentence_of(error)}"
            raise self.sink.error(said, at="url") from None
        if is_missing and not fields["create"]:
            fix = "Make it, or write create: true."
            raise self.sink.error(f"there is no table {target.table!r}.", fix, at=at)

    def told(self, frame: "DataFrame") -> list[str]:
        target = self.target_of(frame)
        with databases.opened(target.url) as engine:
            is_missing = databases.missing_table(engine, target)
        by = f"rows are replaced by {', '.join(target.key)}"
        if target.version is not None:
            by += f" where {target.version} is not smaller"
        return ["it would be made" if is_missing else "it is there", by]

    def prepare(self, frame: "DataFrame") -> None:
        databases.register(frame.sparkSession)
        target = self.target_of(frame)
        with databases.opened(target.url) as engine:
            databases.make_table(engine, target)

    def write(self, frame: "DataFrame") -> None:
        target = databases.target_text(self.target_of(frame))
        frame.write.format(databases.FORMAT).option("target", target).mode("append").save()

    def stream(self, frame: "DataFrame") -> "DataStreamWriter":
        def each(batch: "DataFrame", _epoch: int) -> None:
            self.write(batch)

        return frame.writeStream.foreachBatch(each).outputMode(self.sink.fields["output"])


_WRITERS: Final[Mapping[str, Callable[[Pipeline, Sink], Writer]]] = {
    TOPIC: TopicWriter,
    PARQUET: ParquetWriter,
    TABLE: TableWriter,
}


# ---- the dry run


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
    hidden = pipeline.secrets.mask

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
    source, mode = pipeline.source, "a batch"
    assert source is not None
    checkpoints: dict[str, str | None] = {"": None}
    if pipeline.is_streaming:  # those of its sinks may be at different places
        named = " for {}" if len(pipeline.sinks) > 1 else ""
        checkpoints = {named.format(one.name): pipeline.checkpoint_of(one)
                       for one in pipeline.sinks}  # fmt: skip
    found_reaches = ((name, reach_of(pipeline, checkpoint=at)) for name, at in checkpoints.items())
    reaches = {name: one for name, one in found_reaches if one is not None}
    reach = next(iter(reaches.values()), None)
    is_pinned = reach is not None and not pipeline.is_streaming
    pinned = reach.pinned(pipeline) if reach is not None and is_pinned else pipeline
    frame, writers = checked_frame(pinned, spark)
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
    if frame.isStreaming:  # Spark makes a physical plan for each micro-batch only
        text = get_query_execution(frame).analyzed().toString()
    else:
        text = explain_plan(frame, "simple")
    found.sections["plan of Spark"] = [one for one in str(text).splitlines() if one.strip()]
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
