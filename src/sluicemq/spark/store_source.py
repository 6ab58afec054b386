"""The data source `rocketmq_store`: messages out of a store directory, without a broker.

The directory is a broker's own, running or not, or a copy; ours or a Java broker's. It is only ever
read: no lock, no recovery, not one byte written (`sluicemq.store.reader`). Driver and executors
have to see it under the same name. Everything but the place is as in `rocketmq` and shared with it:
options, columns, bodies, types of properties, predicates.

    planner   StoreBatchReader.partitions()   snapshot: which queues, from where to where
    executor  StoreBatchReader.read()         `store_read.read_part`: its share of one queue

The snapshot is taken once, while Spark plans: each queue ends behind its last message that is
wholly in the log. What a running broker writes later is not read; what its retention removes before
a task comes to it is an error of that task, unless `failOnDataLoss=false`.
"""

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from sluicemq.errors import ConfigurationError
from sluicemq.spark.cluster import ending_offsets, narrowed, starting_offsets
from sluicemq.spark.errors import plain_errors
from sluicemq.spark.filter_findings import MESSAGES_MAX, tried_here, warn_of_filter
from sluicemq.spark.options import READ, Options, parse_options
from sluicemq.spark.plan import RangePartition, ReadPlan, decoding_plan, nothing, partitions_of
from sluicemq.spark.schema import AUTO, declared_columns, struct_type
from sluicemq.spark.source import BatchReader
from sluicemq.spark.store_options import DECLARED
from sluicemq.spark.store_plan import (
    NAME,
    StorePartition,
    StorePlace,
    newest_properties,
    newest_values,
    snapshot,
)


class StoreSource(DataSource):  # type: ignore[misc]
    """`spark.read.format("rocketmq_store")`; only batch reads."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        with plain_errors():
            options = parse_options(self.options, READ, DECLARED)
            columns = declared_columns(options)
            if any(column.kind == AUTO for column in columns):
                from sluicemq.spark.infer import settled  # noqa: PLC0415 - reads messages

                columns = settled(columns, options, newest_values)
            return struct_type(columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        with plain_errors():
            return StoreBatchReader(parse_options(self.options, READ, DECLARED), schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        from sluicemq.spark.stream import FailedStream  # noqa: PLC0415 - streams only

        return FailedStream(
            ConfigurationError(
                f"{NAME} reads a directory as it stands; it is no stream.",
                cure='Use spark.read, or readStream.format("rocketmq") at the broker.',
            )
        )

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        with plain_errors():
            raise ConfigurationError(
                f"{NAME} only reads: a store has one writer, its broker.",
                cure='Use write.format("rocketmq"), which sends to the broker.',
            )

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802
        return self.writer(schema, overwrite)


class StoreBatchReader(BatchReader):
    """Reads ranges of queues out of a directory."""

    decider = "the reader of the store"

    def __init__(self, options: Options, schema: StructType) -> None:
        self.place = StorePlace.of(options)
        super().__init__(options, schema)

    def make_plan(self, schema: StructType) -> ReadPlan:
        return decoding_plan(self.options, schema)

    def selectors_allowed(self, _filters: list[Any]) -> bool:
        return True

    def partitions(self) -> list[InputPartition]:
        with plain_errors():
            if self.nothing_matches:
                return nothing()
            return self._planned()

    def _planned(self) -> list[InputPartition]:
        reader, seen = snapshot(self.place, self.options)
        try:
            start = starting_offsets(seen, self.options, seen.bounds, "earliest")
            end = ending_offsets(seen, self.options, seen.bounds)
            ranges = narrowed(seen, start, end, self.pushed)
            addresses = {self.place.broker: self.place.root}
            newest = newest_properties(reader, seen.bounds, MESSAGES_MAX)
            warn_of_filter(self.options["filter.sql"], lambda sql: tried_here(list(newest), sql))
            parts = partitions_of(self.options, ranges, addresses)
            return [part if part.queue is None else seen.with_tail(part) for part in parts]
        finally:
            reader.close()

    def read(self, partition: RangePartition) -> Iterator[Any]:
        from sluicemq.spark.store_read import read_part  # noqa: PLC0415 - heavy, executors only

        with plain_errors():
            if isinstance(partition, StorePartition):
                check_bodies = self.options["checkBodies"]
                yield from read_part(self.place, self.plan, partition, check_bodies=check_bodies)
