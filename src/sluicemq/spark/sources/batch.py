"""Batch readers: they plan what a batch read reads, from brokers or from a store directory.

Spark's planner creates a reader and calls `partitions` on the driver. Executors call `read` with
one partition each; `sources.reader` does the work. `source` describes the steps of a batch read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from sluicemq.client.sync.admin import Admin
from sluicemq.model.subscription import SQL92
from sluicemq.spark.errors import errors_without_traceback
from sluicemq.spark.filters import (
    SAMPLE_MESSAGES_MAX,
    FilterPushdown,
    build_subscription,
    column_path,
    log_filter_findings,
    log_pushdown,
    parse_predicates,
    try_at_brokers,
    try_on_properties,
)
from sluicemq.spark.options import Options
from sluicemq.spark.sources.identity import fetch_end_anchors, find_existing_topics, set_anchors
from sluicemq.spark.sources.offsets import (
    RangePartition,
    ReadPlan,
    can_evaluate_selectors,
    check_selector,
    fetch_bounds,
    find_broker_addresses,
    make_decoding_plan,
    make_empty_partitions,
    make_partitions,
    make_read_plan,
    narrow_ranges,
    narrow_ranges_by_keys,
    open_admin,
    parse_topics,
    resolve_ending_offsets,
    resolve_starting_offsets,
)


class BatchReader(DataSourceReader):  # type: ignore[misc]
    """Reads a fixed range of offsets of each queue from brokers.

    `offered_predicates` are the predicates of the option `predicates`, or none with
    `pushFilters=false`. `pushed` are the conditions that the broker evaluates for them.
    `remaining_predicates` are the offered predicates that these conditions do not decide. Spark
    applies all predicates again, whichever side has evaluated them.
    """

    evaluator: ClassVar = "the broker"
    """The subject of the log line about pushed predicates."""

    def __init__(self, options: Options, schema: StructType) -> None:
        """Parse the options, push the predicates of Spark, and build the subscription.

        What was pushed is logged, unless the option `reportPushdown` is false. The ranges of
        offsets are found later, by `partitions`, because Spark calls that method on a copy of the
        reader in another process. If a predicate may become a SQL92 selector, the brokers are asked
        whether they evaluate SQL92.

        Raises ConfigurationError for wrong options or a schema that does not fit, FilterSyntaxError
        for a wrong filter, and the client's errors.
        """
        self.options = options
        self.topics = parse_topics(options)
        self.plan = self.make_plan(schema)
        self._push_predicates()
        if options["reportPushdown"]:
            log_pushdown(
                self.topics.label,
                self.pushed,
                self.offered_predicates,
                self.remaining_predicates,
                self.evaluator,
            )

        subscription_and_tags = build_subscription(
            self.topics.label, options["filter.tags"], options["filter.sql"], self.pushed
        )
        self.matches_nothing = subscription_and_tags is None
        if subscription_and_tags is not None:
            subscription, exact_tags = subscription_and_tags
            self.plan = replace(self.plan, subscription=subscription, exact_tags=exact_tags)

    def _push_predicates(self) -> None:
        """Push the predicates of the option `predicates` as far as possible.

        Set `offered_predicates` to all of them, `remaining_predicates` to those that Spark must
        evaluate, and `pushed` to the conditions for the source.
        """
        self.offered_predicates = []
        if self.options["pushFilters"]:
            self.offered_predicates = parse_predicates(self.options["predicates"])
        selectors_allowed = self.can_push_selectors(self.offered_predicates)
        pushdown = FilterPushdown(self.plan.columns, selectors_allowed=selectors_allowed)
        self.remaining_predicates = pushdown.push_all(self.offered_predicates)
        self.pushed = pushdown.pushed

    def make_plan(self, schema: StructType) -> ReadPlan:
        """Return how executors read, without a subscription yet. Raises ConfigurationError."""
        return make_read_plan(self.options, schema)

    def can_push_selectors(self, predicates: list[Any]) -> bool:
        """Return whether predicates may be pushed as SQL92 selectors.

        The brokers are asked whether they evaluate SQL92. If no predicate is about `keys` or a
        column that contains a property, no selector is needed, and the result is False without a
        request. Raises SluiceError if the topics cannot be resolved.
        """
        paths = [column_path(predicate) for predicate in predicates]
        used_columns = {path[0] for path in paths if path}
        promoted_columns = {
            column.name for column in self.plan.columns if column.property_name is not None
        }
        if used_columns.isdisjoint({"keys"} | promoted_columns):
            return False
        with open_admin(self.options) as admin:
            return can_evaluate_selectors(admin, self.topics.resolve(admin), self.plan.group)

    def partitions(self) -> list[InputPartition]:
        """Return the partitions to read.

        If the filter and the pushed predicates contradict each other, the result is one partition
        without messages, and no broker is asked.
        """
        with errors_without_traceback():
            if self.matches_nothing:
                return make_empty_partitions()
            return self.plan_partitions()

    def plan_partitions(self) -> list[InputPartition]:
        """Return partitions for the offsets that the options and pushed predicates select.

        If no offsets are selected, there is one empty partition. Each partition gets an anchor, a
        message by which its task recognises the queue. Surprising facts about `filter.sql` are
        logged.

        Raises RouteNotFoundError for a topic that does not exist (with failOnDataLoss, or if none
        exists), RequestError if a broker does not accept the selector, ConfigurationError or
        OffsetOutOfRangeError if the options ask for offsets that do not exist, and the client's
        errors during an outage.
        """
        with open_admin(self.options) as admin:
            topics = find_existing_topics(
                admin,
                self.topics.resolve(admin),
                fail_on_data_loss=self.options["failOnDataLoss"],
            )
            self._check_filter(admin, topics)

            bounds = fetch_bounds(admin, topics)
            start = resolve_starting_offsets(admin, self.options, bounds, "earliest")
            end = resolve_ending_offsets(admin, self.options, bounds)
            ranges = narrow_ranges(admin, start, end, self.pushed)
            addresses = find_broker_addresses(admin, topics)
            if self.pushed.keys:
                ranges = narrow_ranges_by_keys(admin, ranges, self.pushed.keys, addresses)

            anchors = fetch_end_anchors(admin, self.plan.group, ranges)
            partitions = make_partitions(self.options, ranges, addresses)
            return list(set_anchors(partitions, anchors, is_batch=True))

    def _check_filter(self, admin: Admin, topics: Sequence[str]) -> None:
        """Ask each broker of the topics whether it accepts the filter, and log findings about it.

        Raises RequestError if a broker does not accept the selector.
        """
        subscription = self.plan.subscription
        if subscription is not None and subscription.kind == SQL92:
            check_selector(admin, topics, self.plan.group, subscription.expression)
        log_filter_findings(
            self.options["filter.sql"],
            lambda expression: try_at_brokers(admin, topics, expression),
        )

    def read(self, partition: RangePartition) -> Iterator[Any]:
        """Yield the messages of one partition as Arrow batches. Spark calls this in an executor."""
        from sluicemq.spark.sources.reader import read_range  # noqa: PLC0415 - executors only

        with errors_without_traceback():
            yield from read_range(self.plan, partition)


class StoreBatchReader(BatchReader):
    """Reads a fixed range of offsets of each queue from a store directory."""

    evaluator = "the reader of the store"

    def make_plan(self, schema: StructType) -> ReadPlan:
        """Return the plan for decoding, and set `location`, the directory of the store.

        Raises ConfigurationError for wrong options.
        """
        from sluicemq.spark.sources.reader import StoreLocation  # noqa: PLC0415 - heavy

        self.location = StoreLocation.from_options(self.options)
        return make_decoding_plan(self.options, schema)

    def can_push_selectors(self, _predicates: list[Any]) -> bool:
        """Return True: the reader of a store evaluates SQL92 itself."""
        return True

    def plan_partitions(self) -> list[InputPartition]:
        """Return partitions for the offsets that the options and pushed predicates select.

        If no offsets are selected, there is one empty partition. Surprising facts about
        `filter.sql` are logged. Raises StoreDamagedError if messages are missing from the files
        (with failOnDataLoss), ConfigurationError or OffsetOutOfRangeError if the options ask for a
        topic or for offsets that do not exist, and StoreError if the directory is not a store.
        """
        from sluicemq.spark.sources.reader import open_snapshot  # noqa: PLC0415 - heavy

        with open_snapshot(self.options) as snapshot:
            snapshot.check_damage(is_fatal=self.options["failOnDataLoss"])
            start = resolve_starting_offsets(snapshot, self.options, snapshot.bounds, "earliest")
            end = resolve_ending_offsets(snapshot, self.options, snapshot.bounds)
            ranges = narrow_ranges(snapshot, start, end, self.pushed)

            # An iterator: nothing is read unless the filter is tried.
            newest_properties = snapshot.read_newest_properties(SAMPLE_MESSAGES_MAX)
            log_filter_findings(
                self.options["filter.sql"],
                lambda expression: try_on_properties(list(newest_properties), expression),
            )

            addresses = {self.location.broker: self.location.root}
            partitions = make_partitions(self.options, ranges, addresses)
            return [snapshot.add_unfiled_units(partition) for partition in partitions]

    def read(self, partition: RangePartition) -> Iterator[Any]:
        """Yield the messages of one partition as Arrow batches; nothing for an empty partition."""
        from sluicemq.spark.sources.reader import (  # noqa: PLC0415 - heavy
            StorePartition,
            read_store_partition,
        )

        with errors_without_traceback():
            if isinstance(partition, StorePartition):
                check_bodies = self.options["checkBodies"]
                yield from read_store_partition(
                    self.location, self.plan, partition, check_bodies=check_bodies
                )
