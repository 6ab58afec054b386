"""The Spark sink `sluice_table`: each task puts its rows into a table, by `upsert`.

A data source of its own, as it takes Arrow batches without pandas (`mapInArrow` asks for it) and
Spark counts what it writes. Used through `TableWriter`, which registers it: the option `target`
holds an `upsert.Target` as JSON. A task that Spark runs again writes its rows again, by key.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

from sluicemq.spark.errors import plain_errors
from sluicemq.spark.pipelines import upsert

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMAT: Final = "sluice_table"


@dataclass(frozen=True)
class Put(WriterCommitMessage):  # type: ignore[misc]
    """Rows of one task."""

    rows: int


class TableSource(DataSource):  # type: ignore[misc]
    """`df.write.format("sluice_table").option("target", target_text(…)).mode("append").save()`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def writer(self, schema: Any, overwrite: bool) -> "TableSink":
        return TableSink(parse_target(self.options["target"]))


class TableSink(DataSourceArrowWriter):  # type: ignore[misc]
    """Writes in tasks; the driver has nothing to do."""

    def __init__(self, target: upsert.Target) -> None:
        self.target = target

    def write(self, iterator: Iterator[Any]) -> Put:
        kinds = dict(self.target.columns)
        with plain_errors():
            engine = upsert.open_engine(self.target.url)
            try:
                rows = (
                    upsert.as_row(row, kinds) for batch in iterator for row in batch.to_pylist()
                )
                return Put(upsert.put_rows(engine, self.target, rows))
            finally:
                engine.dispose()

    def commit(self, messages: list[Put | None]) -> None:
        """Every task has committed its transactions."""

    def abort(self, messages: list[Put | None]) -> None:
        """What is written stays, and is replaced when it is written again."""


def target_text(target: upsert.Target) -> str:
    """The option `target`."""
    return json.dumps(asdict(target))


def parse_target(text: str) -> upsert.Target:
    """The inverse."""
    found = json.loads(text)
    found["key"] = tuple(found["key"])
    found["columns"] = tuple((name, kind) for name, kind in found["columns"])
    return upsert.Target(**found)


def register(spark: "SparkSession") -> None:
    """Makes the format known to a session and those cloned from it."""
    spark.dataSource.register(TableSource)
