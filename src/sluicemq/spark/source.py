"""The data sources `rocketmq` and `rocketmq_store`: what Spark asks for first, and batch readers.

Spark finds them by name through the modules `pyspark_rocketmq` and `pyspark_rocketmq_store` (their
`DefaultSource`). Facts on the Python Data Source API and its limits: spec/spark.md.

A batch read, step by step, with the process it happens in:

    planner   DataSource.schema()          option `columns` or the user's schema
    planner   DataSource.reader()          option `predicates` -> `filters.FilterPushdown`
    planner   BatchReader.partitions()     bounds from brokers or store -> ranges -> partitions
    executor  BatchReader.read()           `reader.read_range`, `store_reader.read_part`

There is no `pushFilters` on purpose. Spark keeps what it makes of one use of a DataFrame for the
next one, with the predicates of the first (docs/design/0010-predicate-push-down.md). Predicates
come as an option of the load that they are for: `references`.

`rocketmq_store` reads messages out of a store directory, without a broker. Driver and executors
have to see it under the same name. Everything but the place is as in `rocketmq` and shared with it:
options, columns, bodies, types of properties, predicates. Its snapshot is taken once, while Spark
plans; what retention removes before a task comes to it is an error of that task, unless
`failOnDataLoss=false`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from sluicemq.errors import ConfigurationError
from sluicemq.model.subscription import SQL92
from sluicemq.spark.errors import plain_errors
from sluicemq.spark.filters import (
    MESSAGES_MAX,
    FilterPushdown,
    attribute_of,
    predicates_of,
    report_pushdown,
    subscription_of,
    tried_at_brokers,
    tried_here,
    warn_of_filter,
)
from sluicemq.spark.options import DECLARED, READ, WRITE, Options, parse_options
from sluicemq.spark.schema import declared_columns, struct_type
from sluicemq.spark.sources.offset_reader import (
    broker_addresses,
    check_selector,
    ending_offsets,
    evaluates_selectors,
    narrowed,
    narrowed_by_keys,
    newest_properties,
    open_admin,
    queue_bounds,
    settled,
    starting_offsets,
)
from sluicemq.spark.sources.offsets import (
    RangePartition,
    ReadPlan,
    decoding_plan,
    nothing,
    partitions_of,
    read_plan,
    topics_of,
)


class RocketSource(DataSource):  # type: ignore[misc]
    """`spark.read.format("rocketmq")`, `readStream`, `df.write` and `writeStream`."""

    @classmethod
    def name(cls) -> str:
        return "rocketmq"

    def schema(self) -> StructType:
        with plain_errors():
            options = parse_options(self.options)
            return struct_type(settled(declared_columns(options), options, newest_properties))

    def reader(self, schema: StructType) -> DataSourceReader:
        with plain_errors():
            return BatchReader(parse_options(self.options, READ), schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        from sluicemq.spark.sources.stream import stream_reader  # noqa: PLC0415 - streams only

        return stream_reader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from sluicemq.spark.sinks.writer import BatchSink  # noqa: PLC0415 - sinks only

        with plain_errors():
            return BatchSink(parse_options(self.options, WRITE), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802
        from sluicemq.spark.sinks.writer import StreamSink  # noqa: PLC0415 - sinks only

        with plain_errors():
            return StreamSink(parse_options(self.options, WRITE), schema, overwrite=overwrite)


class StoreSource(DataSource):  # type: ignore[misc]
    """`spark.read.format("rocketmq_store")`; only batch reads."""

    @classmethod
    def name(cls) -> str:
        return "rocketmq_store"

    def schema(self) -> StructType:
        def look(options: Options) -> Iterator[Mapping[str, str]]:
            from sluicemq.spark.sources import store_reader  # noqa: PLC0415 - heavy

            return store_reader.newest_properties(options)

        with plain_errors():
            options = parse_options(self.options, READ, DECLARED)
            return struct_type(settled(declared_columns(options), options, look))

    def reader(self, schema: StructType) -> DataSourceReader:
        with plain_errors():
            return StoreBatchReader(parse_options(self.options, READ, DECLARED), schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        from sluicemq.spark.sources.stream import FailedStream  # noqa: PLC0415 - streams only

        return FailedStream(
            ConfigurationError(
                "rocketmq_store reads a directory as it stands; it is no stream.",
                cure='Use spark.read, or readStream.format("rocketmq") at the broker.',
            )
        )

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        with plain_errors():
            raise ConfigurationError(
                "rocketmq_store only reads: a store has one writer, its broker.",
                cure='Use write.format("rocketmq"), which sends to the broker.',
            )

    streamWriter = writer  # noqa: N815 - Spark's name


class BatchReader(DataSourceReader):  # type: ignore[misc]
    """Reads from fixed offsets to fixed offsets. `offered` predicates are at the reader's choice,
    `left` of them are those that it does not decide."""

    decider: ClassVar = "the broker"

    def __init__(self, options: Options, schema: StructType) -> None:
        """All is settled here but the ranges: `partitions` comes when Spark has pickled the reader.
        Asks the brokers when predicates may become a selector."""
        self.options = options
        self.topics = topics_of(options)
        self.plan = self.make_plan(schema)
        self.offered = predicates_of(options["predicates"]) if options["pushFilters"] else []
        pushdown = FilterPushdown(
            self.plan.columns, selectors_allowed=self.selectors_allowed(self.offered)
        )
        self.left = pushdown.take_all(self.offered)
        self.pushed = pushdown.pushed
        if options["reportPushdown"]:
            report_pushdown(self.topics.label, self.pushed, self.offered, self.left, self.decider)
        found = subscription_of(
            self.topics.label, options["filter.tags"], options["filter.sql"], self.pushed
        )
        self.nothing_matches = found is None
        if found is not None:
            self.plan = replace(self.plan, subscription=found[0], tags=found[1])

    def make_plan(self, schema: StructType) -> ReadPlan:
        """How executors read; without a subscription yet. Raises ConfigurationError."""
        return read_plan(self.options, schema)

    def selectors_allowed(self, predicates: list[Any]) -> bool:
        """Asked of the brokers only when there is something to select by."""
        named = {path[0] for one in predicates if (path := attribute_of(one))}
        selectable = {"keys"} | {
            column.name for column in self.plan.columns if column.property_name is not None
        }
        if not named & selectable:
            return False
        with open_admin(self.options) as admin:
            return evaluates_selectors(admin, self.topics.found(admin), self.plan.group)

    def partitions(self) -> list[InputPartition]:
        with plain_errors():
            return nothing() if self.nothing_matches else self.planned()

    def planned(self) -> list[InputPartition]:
        """Where the messages are that a read has to look at."""
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
        from sluicemq.spark.sources.reader import read_range  # noqa: PLC0415 - executors only

        with plain_errors():
            yield from read_range(self.plan, partition)


class StoreBatchReader(BatchReader):
    """Reads ranges of queues out of a directory."""

    decider = "the reader of the store"

    def make_plan(self, schema: StructType) -> ReadPlan:
        from sluicemq.spark.sources.store_reader import StorePlace  # noqa: PLC0415 - heavy

        self.place = StorePlace.of(self.options)
        return decoding_plan(self.options, schema)

    def selectors_allowed(self, _predicates: list[Any]) -> bool:
        return True

    def planned(self) -> list[InputPartition]:
        from sluicemq.spark.sources.store_reader import snapshot  # noqa: PLC0415 - heavy

        place, sql = self.place, self.options["filter.sql"]
        with snapshot(self.options) as seen:
            start = starting_offsets(seen, self.options, seen.bounds, "earliest")
            end = ending_offsets(seen, self.options, seen.bounds)
            ranges = narrowed(seen, start, end, self.pushed)
            newest = seen.newest_properties(MESSAGES_MAX)
            warn_of_filter(sql, lambda text: tried_here(list(newest), text))
            parts = partitions_of(self.options, ranges, {place.broker: place.root})
            return list(map(seen.with_tail, parts))

    def read(self, partition: RangePartition) -> Iterator[Any]:
        from sluicemq.spark.sources.store_reader import (  # noqa: PLC0415 - heavy
            StorePartition,
            read_part,
        )

        with plain_errors():
            if isinstance(partition, StorePartition):
                check = self.options["checkBodies"]
                yield from read_part(self.place, self.plan, partition, check_bodies=check)
