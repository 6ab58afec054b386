"""The data source `rocketmq`: what Spark asks for first, and the batch reader.

Spark finds it by name through the module `pyspark_rocketmq` (its `DefaultSource`). Facts on the
Python Data Source API and its limits: bench/spark.md.

A batch read, step by step, with the process it happens in:

    planner   DataSource.schema()          option `columns` or the user's schema
    planner   BatchReader.pushFilters()    `filters.Pushdown` (only with the configuration below)
    planner   BatchReader.partitions()     bounds from the brokers -> ranges -> partitions
    executor  BatchReader.read()           `reader.read_range`

Spark refuses a reader that has `pushFilters` unless `spark.sql.python.filterPushdown.enabled` is
true, and it is false by default. So that a read works without it, `pushFilters` is only there in
the process that Spark starts for push-down (`is_pushdown_process`).
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from sluicemq.model.subscription import SQL92
from sluicemq.spark.cluster import (
    broker_addresses,
    check_selector,
    ending_offsets,
    evaluates_selectors,
    narrowed,
    open_admin,
    queue_bounds,
    starting_offsets,
)
from sluicemq.spark.errors import plain_errors
from sluicemq.spark.filter_findings import tried_at_brokers, warn_of_filter
from sluicemq.spark.filters import Pushdown, Pushed, attribute_of, subscription_of
from sluicemq.spark.keyindex import narrowed_by_keys
from sluicemq.spark.options import READ, WRITE, Options, parse_options
from sluicemq.spark.plan import RangePartition, ReadPlan, nothing, partitions_of, read_plan
from sluicemq.spark.report import report_pushdown
from sluicemq.spark.schema import AUTO, declared_columns, struct_type
from sluicemq.spark.topics import topics_of

PUSHDOWN_CONFIG: Final = "spark.sql.python.filterPushdown.enabled"
_PUSHDOWN_MODULE: Final = "pyspark.sql.worker.data_source_pushdown_filters"


class RocketSource(DataSource):  # type: ignore[misc]
    """`spark.read.format("rocketmq")`, `readStream`, `df.write` and `writeStream`."""

    @classmethod
    def name(cls) -> str:
        return "rocketmq"

    def schema(self) -> StructType:
        with plain_errors():
            options = parse_options(self.options)
            columns = declared_columns(options)
            if any(column.kind == AUTO for column in columns):
                from sluicemq.spark.infer import settled  # noqa: PLC0415 - reads messages

                columns = settled(columns, options)
            return struct_type(columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        with plain_errors():
            options = parse_options(self.options, READ)
            kind = PushingReader if is_pushdown_process() else BatchReader
            return kind(options, schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        from sluicemq.spark.stream import stream_reader  # noqa: PLC0415 - streams only

        return stream_reader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from sluicemq.spark.sink import BatchSink  # noqa: PLC0415 - sinks only

        with plain_errors():
            return BatchSink(parse_options(self.options, WRITE), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802
        from sluicemq.spark.sink import StreamSink  # noqa: PLC0415 - sinks only

        with plain_errors():
            return StreamSink(parse_options(self.options, WRITE), schema, overwrite=overwrite)


def is_pushdown_process() -> bool:
    """Whether this is the planner that Spark starts when push-down is switched on."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PUSHDOWN_MODULE in sys.modules or getattr(main, "name", "") == _PUSHDOWN_MODULE


class BatchReader(DataSourceReader):  # type: ignore[misc]
    """Reads from fixed offsets to fixed offsets."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.options = options
        self.topics = topics_of(options)
        self.plan = self.make_plan(schema)
        self.push(Pushed())

    def make_plan(self, schema: StructType) -> ReadPlan:
        """How executors read; without a subscription yet. Raises ConfigurationError."""
        return read_plan(self.options, schema)

    def push(self, pushed: Pushed) -> None:
        """Settles what is read. Not in `partitions`: Spark has pickled the reader by then."""
        self.pushed = pushed
        found = subscription_of(
            self.topics.label, self.options["filter.tags"], self.options["filter.sql"], pushed
        )
        self.nothing_matches = found is None
        if found is not None:
            self.plan = replace(self.plan, subscription=found[0], tags=found[1])

    def partitions(self) -> list[InputPartition]:
        with plain_errors():
            if self.nothing_matches:
                return nothing()
            with open_admin(self.options) as admin:
                topics = self.topics.found(admin)
                subscription = self.plan.subscription
                if subscription is not None and subscription.kind == SQL92:
                    check_selector(admin, topics, self.plan.group, subscription.expression)
                sql = self.options["filter.sql"]
                warn_of_filter(sql, lambda text: tried_at_brokers(admin, topics, text))
                bounds = queue_bounds(admin, topics)
                start = starting_offsets(admin, self.options, bounds, "earliest")
                end = ending_offsets(admin, self.options, bounds)
                ranges = narrowed(admin, start, end, self.pushed)
                addresses = broker_addresses(admin, topics)
                if self.pushed.keys:
                    ranges = narrowed_by_keys(admin, ranges, self.pushed.keys, addresses)
                return partitions_of(self.options, ranges, addresses)

    def read(self, partition: RangePartition) -> Iterator[Any]:
        from sluicemq.spark.reader import read_range  # noqa: PLC0415 - heavy, executors only

        with plain_errors():
            yield from read_range(self.plan, partition)


class Pushing:
    """What a reader has besides when Spark hands predicates over. It has to come before one of
    `options`, `topics`, `plan`, `push`, `decider` and `selectors_allowed`."""

    def pushFilters(self: Any, filters: list[Any]) -> Iterable[Any]:  # noqa: N802 - Spark's name
        with plain_errors():
            if not self.options["pushFilters"]:
                return filters
            allowed = self.selectors_allowed(filters)
            pushdown = Pushdown(self.plan.columns, selectors_allowed=allowed)
            rest = pushdown.take_all(filters)
            self.push(pushdown.pushed)
            if self.options["reportPushdown"]:
                report_pushdown(
                    self.topics.label, pushdown.pushed, filters, rest, decider=self.decider
                )
            return rest


class PushingReader(Pushing, BatchReader):
    """The same with Spark's predicates handed to broker and offsets where that is exact."""

    decider = "the broker"

    def selectors_allowed(self, filters: list[Any]) -> bool:
        """Asked of the brokers only when there is something to select by."""
        named = {path[0] for one in filters if (path := attribute_of(one))}
        selectable = {"keys"} | {
            column.name for column in self.plan.columns if column.property_name is not None
        }
        if not named & selectable:
            return False
        with open_admin(self.options) as admin:
            return evaluates_selectors(admin, self.topics.found(admin), self.plan.group)
