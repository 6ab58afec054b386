"""What each kind of sink does with a frame: check, say, prepare, write, start.

| kind | batch | stream |
|---|---|---|
| topic | `df.write.format("rocketmq")` | `writeStream`: exactly once if asked for |
| parquet | `df.write.parquet` | Spark's file sink: exactly once |
| table | tasks upsert their partitions | the same in `foreachBatch`: repeats change nothing |

`check` and `told` only look; `prepare` is the first step with an effect (it makes a missing table).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sluicemq.errors import ConfigurationError
from sluicemq.files import SYSTEM_FILES
from sluicemq.spark.cluster import open_admin
from sluicemq.spark.options import EXACTLY_ONCE, WRITE, parse_options
from sluicemq.spark.pipelines import upsert
from sluicemq.spark.pipelines.document import nearest
from sluicemq.spark.pipelines.frames import sentence_of
from sluicemq.spark.pipelines.pipeline import PARQUET, TABLE, TOPIC, Pipeline, PlaceError, Sink
from sluicemq.spark.pipelines.sides import MESSAGE
from sluicemq.spark.pipelines.table_source import FORMAT, register, target_text
from sluicemq.spark.sink import roles_of

if TYPE_CHECKING:
    import sqlalchemy as sa
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import DataStreamWriter


class Writer(ABC):
    """One sink of a pipeline."""

    def __init__(self, pipeline: Pipeline, sink: Sink) -> None:
        self.pipeline = pipeline
        self.sink = sink

    @property
    @abstractmethod
    def target(self) -> str:
        """In words: `topic 'report'`."""

    @abstractmethod
    def check(self, frame: "DataFrame") -> None:
        """Raises PlaceError when the frame cannot go there. Reads at most."""

    @abstractmethod
    def told(self, frame: "DataFrame") -> list[str]:
        """What a run would do there, a line each. Reads at most."""

    def prepare(self, frame: "DataFrame") -> None:  # noqa: B027 - most need nothing
        """What has to be there before the first row."""

    def lacks(self, name: str, frame: "DataFrame", at: str) -> PlaceError:
        """The error for a column that the frame does not have."""
        cure = nearest(name, frame.columns)
        return self.sink.error(f"there is no column {name!r}.", cure, at=at)

    @abstractmethod
    def write(self, frame: "DataFrame") -> None:
        """A batch: returns when all is written."""

    @abstractmethod
    def stream(self, frame: "DataFrame") -> "DataStreamWriter":
        """A stream's writer, which lacks name, trigger and checkpoint."""


class TopicWriter(Writer):
    """Messages, by the sink `rocketmq`."""

    @property
    def target(self) -> str:
        return f"topic {self.sink.options.get('topic')!r}"

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
            roles_of(self.shaped(frame).schema, parse_options(self.sink.options, WRITE))
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

    @property
    def target(self) -> str:
        return f"parquet {self.sink.fields['path']}"

    def check(self, frame: "DataFrame") -> None:
        for name in self.sink.fields["partition_by"]:
            if name not in frame.columns:
                raise self.lacks(name, frame, "partition_by")
        if self._refuses and self._is_there:
            raise self.sink.error(
                f"there are files in {self.sink.fields['path']!r} already.",
                "Write write: append or write: overwrite.",
                at="path",
            )

    @property
    def _refuses(self) -> bool:
        return not self.pipeline.is_streaming and self.sink.fields["write"] == "fail"

    @property
    def _is_there(self) -> bool:
        path: str = self.sink.fields["path"]
        return "://" not in path and bool(SYSTEM_FILES.names(path))

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

    @property
    def target(self) -> str:
        return f"table {self.sink.fields['table']} at {upsert.shown_url(self.sink.fields['url'])}"

    def aim(self, frame: "DataFrame") -> upsert.Target:
        fields = self.sink.fields
        columns = tuple((one.name, one.dataType.simpleString()) for one in frame.schema.fields)
        return upsert.Target(
            self._url, fields["table"], tuple(fields["key"]), columns, fields["version"],
            fields["batch_rows"],
        )  # fmt: skip

    @cached_property
    def _url(self) -> str:
        """A file of SQLite by its whole path: tasks run in other directories."""
        url: str = self.sink.fields["url"]
        scheme, _, path = url.partition(":///")
        if scheme.startswith("sqlite") and not path.startswith("/"):
            return f"{scheme}:///{Path(path).absolute()}"
        return url

    def check(self, frame: "DataFrame") -> None:
        fields = self.sink.fields
        for at, names in (("key", fields["key"]), ("version", [fields["version"] or ""])):
            for name in filter(None, names):
                if name not in frame.columns:
                    raise self.lacks(name, frame, at)
        try:
            upsert.table_of(self.aim(frame), "")
            engine = upsert.open_engine(self._url)
        except ConfigurationError as error:
            raise self.sink.error(str(error)) from None
        try:
            self._check_table(engine, self.aim(frame))
        except PlaceError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the driver raises
            said = f"the database does not answer: {sentence_of(error)}"
            raise self.sink.error(said, at="url") from None
        finally:
            engine.dispose()

    def _check_table(self, engine: "sa.Engine", target: upsert.Target) -> None:
        if not upsert.missing_table(engine, target):
            try:
                upsert.check_table(engine, target)
            except ConfigurationError as error:
                raise self.sink.error(str(error), at="table") from None
        elif not self.sink.fields["create"]:
            cure = "Make it, or write create: true."
            raise self.sink.error(f"there is no table {target.table!r}.", cure, at="table")

    def told(self, frame: "DataFrame") -> list[str]:
        target = self.aim(frame)
        engine = upsert.open_engine(target.url)
        try:
            is_missing = upsert.missing_table(engine, target)
        finally:
            engine.dispose()
        by = f"rows are replaced by {', '.join(target.key)}"
        if target.version is not None:
            by += f" where {target.version} is not smaller"
        return ["it would be made" if is_missing else "it is there", by]

    def prepare(self, frame: "DataFrame") -> None:
        register(frame.sparkSession)
        target = self.aim(frame)
        engine = upsert.open_engine(target.url)
        try:
            upsert.make_table(engine, target)
        finally:
            engine.dispose()

    def write(self, frame: "DataFrame") -> None:
        target = target_text(self.aim(frame))
        frame.write.format(FORMAT).option("target", target).mode("append").save()

    def stream(self, frame: "DataFrame") -> "DataStreamWriter":
        def each(batch: "DataFrame", _epoch: int) -> None:
            self.write(batch)

        return frame.writeStream.foreachBatch(each).outputMode(self.sink.fields["output"])


_WRITERS: Final[Mapping[str, Callable[[Pipeline, Sink], Writer]]] = {
    TOPIC: TopicWriter,
    PARQUET: ParquetWriter,
    TABLE: TableWriter,
}


def writer_of(pipeline: Pipeline, sink: Sink) -> Writer:
    """The writer of a sink's kind."""
    return _WRITERS[sink.kind](pipeline, sink)
