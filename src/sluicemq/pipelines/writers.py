"""Writers, which check the sinks of a pipeline file and write DataFrames to them.

| kind | batch | stream |
|---|---|---|
| topic | `df.write.format("rocketmq")` | `writeStream`: exactly once if the sink asks for it |
| parquet | `df.write.parquet` | Spark's file sink: exactly once |
| table | tasks upsert their partitions | the same in `foreachBatch`: repeats change nothing |

`Writer.check` and `Writer.describe` only read. `Writer.prepare` is the first step with an effect:
it creates a missing table.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from sluicemq.errors import ConfigurationError
from sluicemq.files import SYSTEM_FILES
from sluicemq.hints import suggest
from sluicemq.pipelines.file import MESSAGE, PARQUET, TABLE, TOPIC, Pipeline, Sink
from sluicemq.pipelines.sinks import databases
from sluicemq.spark.errors import summarize_spark_error
from sluicemq.spark.options import EXACTLY_ONCE, WRITE, parse_options
from sluicemq.spark.source import resolve_roles
from sluicemq.spark.sources.offsets import open_admin

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import DataStreamWriter


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
        """Return a DataFrame with one column for each given part of the messages.

        If the file has no expressions for parts, `frame` is returned unchanged. Otherwise each
        column has the value of an expression. Without an expression for the body, the body is the
        column `value` or `body` of `frame`. Raises PlaceError for an invalid expression.
        """
        given_fields = [name for name in MESSAGE if self.sink.fields.get(name)]
        if not given_fields:
            return frame
        columns = [self._build_column(frame, name) for name in given_fields]
        if "value" not in given_fields:
            columns.insert(0, self._choose_body_column(frame))
        return frame.selectExpr(*columns)

    def _build_column(self, frame: "DataFrame", field_name: str) -> str:
        """Return the expression of a part of the messages, with the name of the part as its alias.

        The alias has the spelling that Spark gives to the name of the column. Raises PlaceError if
        the expression is invalid.
        """
        expression = self.sink.fields[field_name]
        try:
            selected = frame.selectExpr(f"({expression}) as `{field_name}`")
            return f"({expression}) as `{selected.columns[0]}`"
        except Exception as error:
            raise self.sink.error(summarize_spark_error(error), field_name=field_name) from error

    def _choose_body_column(self, frame: "DataFrame") -> str:
        """Return the quoted name of the column with the body: `value`, or else `body`.

        Raises PlaceError if there is neither.
        """
        for name in ("value", "body"):
            if name in frame.columns:
                return f"`{name}`"
        raise self.sink.error(
            "there is no column 'value' or 'body'.", "Add value: to_json(struct(*))."
        )

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
            f"{column.name} {column.dataType.simpleString()}"
            for column in self.select_message_columns(frame).schema.fields
        )
        with open_admin(options) as admin:
            state = "it does not exist; the first message creates it, if the brokers allow that"
            if admin.find_route(options["topic"]) is not None:
                queue_count = len(admin.queues(options["topic"]))
                state = f"it has {queue_count} {'queue' if queue_count == 1 else 'queues'}"
        guarantee = "at least once"
        if options["delivery"] == EXACTLY_ONCE:
            guarantee = "exactly once (at least once on a Java broker)"
        return [f"{state}; {guarantee}", f"message: {columns}"]

    def write_batch(self, frame: "DataFrame") -> None:
        """Send the rows of a batch DataFrame to the topic."""
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
        """Raise PlaceError if a partition column is missing, or if the directory has files already.

        The directory may have files if the pipeline is a stream, or if `write:` is not `fail`. A
        directory with a URL is not examined.
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
        """Return lines about the partitions and about what happens to existing files."""
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
        """Write the rows of a batch to the directory, by the rule of the key `write:`."""
        fields = self.sink.fields
        mode = {"fail": "error"}.get(fields["write"], fields["write"])
        writer = frame.write.mode(mode).options(**fields["options"])
        writer.partitionBy(*fields["partition_by"]).parquet(fields["path"])

    def build_stream_writer(self, frame: "DataFrame") -> "DataStreamWriter":
        """Return Spark's writer that adds the rows of a stream to the directory."""
        fields = self.sink.fields
        writer = frame.writeStream.format("parquet").options(**fields["options"])
        writer = writer.option("path", fields["path"])
        if fields["partition_by"]:
            writer = writer.partitionBy(*fields["partition_by"])
        return writer


class TableWriter(Writer):
    """Upserts rows into a table of a database."""

    def __init__(self, pipeline: Pipeline, sink: Sink) -> None:
        """Create the writer of a table sink. The database is not opened."""
        super().__init__(pipeline, sink)
        shown_url = databases.url_without_password(sink.fields["url"])
        self.target = f"table {sink.fields['table']} at {shown_url}"
        self.url = databases.absolute_url(sink.fields["url"])

    def build_target(self, frame: "DataFrame") -> databases.Target:
        """Return the target of the writes: the table, its key, and the columns of the DataFrame."""
        fields = self.sink.fields
        return databases.Target(
            self.url,
            fields["table"],
            key=tuple(fields["key"]),
            columns=tuple(frame.dtypes),
            version=fields["version"],
            chunk_rows=fields["batch_rows"],
        )

    def check(self, frame: "DataFrame") -> None:
        """Raise PlaceError if columns are missing or the table in the database does not fit.

        The database is asked, but nothing is created. A missing table is an error only if `create`
        is False.
        """
        fields = self.sink.fields
        target = self.build_target(frame)
        version_columns = [fields["version"]] if fields["version"] else []
        self.require_columns(frame, "key", fields["key"])
        self.require_columns(frame, "version", version_columns)
        is_missing = self._check_table(target)
        if is_missing and not fields["create"]:
            raise self.sink.error(
                f"the table {target.table!r} does not exist.",
                "Create it, or write create: true.",
                field_name="table",
            )

    def _check_table(self, target: databases.Target) -> bool:
        """Check the table in the database, and return whether it is missing.

        Raises PlaceError if a column has a type that tables do not have, if the database cannot be
        reached, or if the table lacks a column or the key.
        """
        field_name = ""  # the field that an error is about
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
        return is_missing

    def describe(self, frame: "DataFrame") -> list[str]:
        """Return lines that say whether the table exists, and when a row replaces another one."""
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
        """Return Spark's writer that writes each micro-batch of a stream to the table."""

        def write_micro_batch(batch: "DataFrame", _epoch: int) -> None:
            self.write_batch(batch)

        writer = frame.writeStream.foreachBatch(write_micro_batch)
        return writer.outputMode(self.sink.fields["output"])


WRITERS: Final[Mapping[str, Callable[[Pipeline, Sink], Writer]]] = {
    TOPIC: TopicWriter,
    PARQUET: ParquetWriter,
    TABLE: TableWriter,
}
"""The class of the writer for each kind of sink."""
